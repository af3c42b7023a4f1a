"""Search for the stacking order of an arena's tensors that wastes little memory at all sizes.

Orders are read off packings at representative values of the symbols: best fit by several priorities, at several values.
Each order is evaluated at all of these values, by the largest ratio of its arena to the lower bound, the largest sum of
tensors live at once. Where no order is close to the bound, local search changes the priorities of the best ones. The
search is deterministic: it has a budget of steps and a fixed seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field

import numpy as np

from relaxlite.ir.symbolic import SymExpr, SymVar
from relaxlite.records import dataclass

GOOD_RATIO = 1.01  # ratio at which the search stops
_SCALES = (16, 1, 2, 100, 512, 1024)
_CONTRASTS = ((1, 128), (1, 1024), (16, 256), (64, 1024))  # one symbol against the others
_MAX_VALUATIONS = 40
_BUDGET, _MAX_STEPS = 80_000, 300  # placements of tensors in the local search, and steps from one start
_START_BUDGET = 100_000  # placements of tensors by the initial priorities; more tensors, fewer valuations
_NUM_STARTS = 4
_KINDS = 4  # of priorities

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tensor to place: `size` bytes live in the steps of its spans, first and last included, in order."""

    size: SymExpr
    spans: tuple[Span, ...]

    @property
    def first(self) -> int:
        return self.spans[0][0]

    @property
    def last(self) -> int:
        return self.spans[-1][1]

    def meets(self, other: Tenant) -> bool:
        return any(a <= d and c <= b for a, b in self.spans for c, d in other.spans)


class Problem:
    """An instance of arena planning: which tenants are live together, and the evaluation of orders."""

    def __init__(self, tenants: Sequence[Tenant], samples: np.ndarray) -> None:
        """Build the instance. `samples`: sizes, [tenant, valuation]."""
        self.tenants, self.samples = tenants, samples
        self.neighbours = _neighbours(tenants)
        bounds = _lower_bounds(tenants, samples)
        self.judged = np.flatnonzero(bounds > 0)
        self.bounds = bounds[self.judged]

    def place(self, priority: Sequence[int], at: int) -> list[int]:
        """Return the tenants from lowest to highest after best-fit placement in `priority` order at valuation `at`."""
        sizes: list[float] = self.samples[:, at].tolist()
        offsets = [-1.0] * len(sizes)
        for k in priority:
            taken = sorted((offsets[j], offsets[j] + sizes[j]) for j in self.neighbours[k] if offsets[j] >= 0)
            offsets[k] = _best_gap(taken, sizes[k])
        return sorted(range(len(sizes)), key=lambda k: (offsets[k], k))

    def ratios(self, order: Sequence[int]) -> np.ndarray:
        """Return the ratio of the arena to the lower bound at each valuation whose bound is positive."""
        ends = np.zeros_like(self.samples)
        done = bytearray(len(order))
        for k in order:
            below = [j for j in self.neighbours[k] if done[j]]
            ends[k] = ends[below].max(axis=0) + self.samples[k] if below else self.samples[k]
            done[k] = 1
        result: np.ndarray = ends.max(axis=0)[self.judged] / self.bounds
        return result


def _neighbours(tenants: Sequence[Tenant]) -> list[list[int]]:
    result: list[list[int]] = [[] for _ in tenants]
    alive: list[int] = []
    for k in sorted(range(len(tenants)), key=lambda k: tenants[k].first):
        alive = [j for j in alive if tenants[j].last >= tenants[k].first]
        for j in alive:
            if tenants[j].meets(tenants[k]):
                result[j].append(k)
                result[k].append(j)
        alive.append(k)
    return result


def _lower_bounds(tenants: Sequence[Tenant], samples: np.ndarray) -> np.ndarray:
    """Return, for each valuation, the largest sum of sizes live in one step."""
    changes = np.zeros((2 + max(tenant.last for tenant in tenants), samples.shape[1]))
    for tenant, sizes in zip(tenants, samples, strict=True):
        for first, last in tenant.spans:
            changes[first] += sizes
            changes[last + 1] -= sizes
    result: np.ndarray = changes.cumsum(axis=0).max(axis=0)
    return result


def _best_gap(taken: list[tuple[float, float]], size: float) -> float:
    """Return the start of the smallest gap of at least `size` between the taken ranges, or the end of all."""
    end, best, place = 0.0, float("inf"), -1.0
    for low, high in taken:
        if size <= low - end < best:
            best, place = low - end, end
        end = max(end, high)
    return place if place >= 0 else end


# Values of symbols


def valuations(variables: tuple[SymVar, ...]) -> list[dict[SymVar, int]]:
    """Return representative values of symbols in their bounds: all at one scale, one against the rest, upper bounds."""
    result: dict[tuple[int, ...], None] = {}

    def add(value_of: Callable[[SymVar], int]) -> None:
        result[tuple(nearest(v, value_of(v)) for v in variables)] = None

    for scale in _SCALES:
        add(lambda _, scale=scale: scale)  # type: ignore[misc]
    add(lambda v: v.upper if v.upper is not None else _SCALES[-1])
    for small, large in _CONTRASTS:
        for symbol in variables:
            add(lambda v, a=small, b=large, symbol=symbol: b if v is symbol else a)  # type: ignore[misc]
            add(lambda v, a=small, b=large, symbol=symbol: a if v is symbol else b)  # type: ignore[misc]
    for symbol in variables:
        add(lambda v, symbol=symbol: 0 if v is symbol else _CONTRASTS[-1][1])  # type: ignore[misc]
    return [dict(zip(variables, values, strict=True)) for values in list(result)[:_MAX_VALUATIONS]]


def nearest(var: SymVar, value: int) -> int:
    """Round a value to one that the symbol's bounds and divisor allow."""
    value = max(value, var.lower if var.lower is not None else value)
    value = -(-value // var.divisor) * var.divisor
    return value if var.upper is None else min(value, var.upper // var.divisor * var.divisor)


# Search


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A solution: the order from placing tenants by `priority` at valuation `at`, with its ratios."""

    priority: list[int]
    at: int
    order: list[int] = field(repr=False)  # from the lowest to the highest
    ratios: np.ndarray

    @property
    def score(self) -> tuple[float, float]:
        return float(self.ratios.max(initial=1.0)), float(self.ratios.mean()) if len(self.ratios) else 1.0


def _try(problem: Problem, priority: list[int], at: int) -> _Candidate:
    order = problem.place(priority, at)
    return _Candidate(priority, at, order, problem.ratios(order))


def search(problem: Problem) -> tuple[list[int], float]:
    """Search the best order, from lowest to highest; return it and its worst ratio to the lower bound."""
    starts: dict[int, _Candidate] = {}  # the best of each kind of priority
    max_valuations = max(2, _START_BUDGET // (_KINDS * len(problem.tenants)))
    for at in range(min(max_valuations, problem.samples.shape[1])):
        for kind, priority in enumerate(priorities(problem, at)):
            result = _try(problem, priority, at)
            if kind not in starts or result.score < starts[kind].score:
                starts[kind] = result
            if result.score[0] <= GOOD_RATIO:
                return result.order, result.score[0]
    ranked = sorted(starts.values(), key=lambda candidate: candidate.score)[:_NUM_STARTS]
    steps = min(_MAX_STEPS, _BUDGET // (len(problem.tenants) * len(ranked)))
    best = ranked[0]
    for start in ranked:
        improved = _climb(problem, start, steps)
        best = min(best, improved, key=lambda candidate: candidate.score)
        if best.score[0] <= GOOD_RATIO:
            break
    return best.order, best.score[0]


def priorities(problem: Problem, at: int) -> Iterator[list[int]]:
    """Yield orders in which to place tenants: the hardest to place first."""
    sizes: list[float] = problem.samples[:, at].tolist()
    lengths = [tenant.last - tenant.first + 1 for tenant in problem.tenants]
    tenants = range(len(sizes))
    yield sorted(tenants, key=lambda k: (-lengths[k], -sizes[k], k))
    yield sorted(tenants, key=lambda k: (-sizes[k] * lengths[k], k))
    yield sorted(tenants, key=lambda k: (-sizes[k], problem.tenants[k].first))
    yield sorted(tenants, key=lambda k: (problem.tenants[k].first, -sizes[k]))


def _climb(problem: Problem, start: _Candidate, steps: int) -> _Candidate:
    """Improve a candidate by local search: change priorities, mostly on the critical path, where no score gets
    worse."""
    rng = random.Random(0)
    best, path = start, _critical_path(problem, start)
    for _ in range(steps):
        priority, at = list(best.priority), best.at
        tenant = rng.choice(path) if rng.random() < 0.8 else rng.choice(priority)
        chosen = priority.index(tenant)
        if rng.random() < 0.5:  # earlier
            priority.insert(rng.randrange(chosen + 1), priority.pop(chosen))
        else:  # in exchange with a neighbour
            other = priority.index(rng.choice(problem.neighbours[tenant] or [tenant]))
            priority[chosen], priority[other] = priority[other], priority[chosen]
        if rng.random() < 0.2:
            at = rng.randrange(problem.samples.shape[1])
        result = _try(problem, priority, at)
        if result.score <= best.score:
            best, path = result, _critical_path(problem, result)
        if best.score[0] <= GOOD_RATIO:
            break
    return best


def _critical_path(problem: Problem, candidate: _Candidate) -> list[int]:
    """Return the stack of tenants, from the highest down, that determines the arena's size at the worst valuation."""
    sizes: list[float] = problem.samples[:, problem.judged[int(candidate.ratios.argmax())]].tolist()
    ends: dict[int, float] = {}
    under: dict[int, int] = {}
    for k in candidate.order:
        below = [j for j in problem.neighbours[k] if j in ends]
        if below:
            under[k] = max(below, key=ends.__getitem__)
        ends[k] = sizes[k] + (ends[under[k]] if below else 0.0)
    path = [max(candidate.order, key=ends.__getitem__)]
    while path[-1] in under:
        path.append(under[path[-1]])
    return path
