"""Search for the order of tensors in an arena: which tensor lies below which, with little waste at all sizes.

Candidate orders come from packings at representative values of the symbols: best fit by several priorities. Each order
is scored at all of these values by the ratio of the arena to its lower bound, the largest sum of tensors that are live
at once. Where no candidate comes close, hill climbing perturbs the priorities of the best ones. The search is
deterministic, with a budget of steps and a fixed seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field

import numpy as np

from relaxlite.ir.symbolic import SymExpr, SymVar
from relaxlite.records import dataclass

GOOD_RATIO = 1.01  # the search stops at this ratio
_SCALES = (16, 1, 2, 100, 512, 1024)
_CONTRASTS = ((1, 128), (1, 1024), (16, 256), (64, 1024))  # one symbol against all others
_MAX_VALUATIONS = 40
_BUDGET, _MAX_STEPS = 80_000, 300  # placements of the whole search, and changes per start
_START_BUDGET = 100_000  # placements of all starts; more tensors are placed at fewer valuations
_NUM_STARTS = 4
_KINDS = 4  # number of priorities

StepRange = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ArenaTensor:
    """Tensor to pack: `size` bytes, live during the steps of its spans, first and last included, in order."""

    size: SymExpr
    spans: tuple[StepRange, ...]

    @property
    def first(self) -> int:
        """First step in which the tensor is live."""
        return self.spans[0][0]

    @property
    def last(self) -> int:
        """Last step in which the tensor is live."""
        return self.spans[-1][1]

    def overlaps_in_time(self, other: ArenaTensor) -> bool:
        """Whether the two tensors are live in a common step."""
        return any(a <= d and c <= b for a, b in self.spans for c, d in other.spans)


class PackingProblem:
    """Packing problem: which tensors are live at once, and the score of an order."""

    def __init__(self, tensors: Sequence[ArenaTensor], samples: np.ndarray) -> None:
        """`samples`: aligned size in bytes of each tensor (row) at each valuation (column)."""
        self.tensors, self.samples = tensors, samples
        self.neighbours = _neighbours(tensors)
        bounds = _lower_bounds(tensors, samples)
        self.bounded = np.flatnonzero(bounds > 0)
        self.bounds = bounds[self.bounded]

    def place(self, priority: Sequence[int], at: int) -> list[int]:
        """Order of tensors from low to high offsets after best fit by this priority at one valuation."""
        sizes: list[float] = self.samples[:, at].tolist()
        offsets = [-1.0] * len(sizes)
        for k in priority:
            occupied = sorted((offsets[j], offsets[j] + sizes[j]) for j in self.neighbours[k] if offsets[j] >= 0)
            offsets[k] = _best_gap(occupied, sizes[k])
        return sorted(range(len(sizes)), key=lambda k: (offsets[k], k))

    def ratios(self, order: Sequence[int]) -> np.ndarray:
        """Ratio of the arena to its lower bound at each valuation with a bound above 0."""
        ends = np.zeros_like(self.samples)
        placed = bytearray(len(order))
        for k in order:
            below = [j for j in self.neighbours[k] if placed[j]]
            ends[k] = ends[below].max(axis=0) + self.samples[k] if below else self.samples[k]
            placed[k] = 1
        result: np.ndarray = ends.max(axis=0)[self.bounded] / self.bounds
        return result


def _neighbours(tensors: Sequence[ArenaTensor]) -> list[list[int]]:
    result: list[list[int]] = [[] for _ in tensors]
    alive: list[int] = []
    for k in sorted(range(len(tensors)), key=lambda k: tensors[k].first):
        alive = [j for j in alive if tensors[j].last >= tensors[k].first]
        for j in alive:
            if tensors[j].overlaps_in_time(tensors[k]):
                result[j].append(k)
                result[k].append(j)
        alive.append(k)
    return result


def _lower_bounds(tensors: Sequence[ArenaTensor], samples: np.ndarray) -> np.ndarray:
    """Largest sum of sizes live in one step, at each valuation."""
    changes = np.zeros((2 + max(tensor.last for tensor in tensors), samples.shape[1]))
    for tensor, sizes in zip(tensors, samples, strict=True):
        for first, last in tensor.spans:
            changes[first] += sizes
            changes[last + 1] -= sizes
    result: np.ndarray = changes.cumsum(axis=0).max(axis=0)
    return result


def _best_gap(occupied: list[tuple[float, float]], size: float) -> float:
    """Offset of the smallest gap of at least this size between occupied ranges, or the end of all."""
    end, best, offset = 0.0, float("inf"), -1.0
    for low, high in occupied:
        if size <= low - end < best:
            best, offset = low - end, end
        end = max(end, high)
    return offset if offset >= 0 else end


# Values of symbols


def representative_values(variables: tuple[SymVar, ...]) -> list[dict[SymVar, int]]:
    """Representative values within bounds: all symbols equal, one against all others, and all upper bounds."""
    assignments: dict[tuple[int, ...], None] = {}

    def add(target_of: Callable[[SymVar], int]) -> None:
        """Add the legal values nearest to the targets."""
        assignments[tuple(nearest_legal_value(v, target_of(v)) for v in variables)] = None

    for scale in _SCALES:
        add(lambda _, scale=scale: scale)  # type: ignore[misc]
    add(lambda v: v.upper if v.upper is not None else _SCALES[-1])
    for small, large in _CONTRASTS:
        for odd in variables:
            add(lambda v, a=small, b=large, odd=odd: b if v is odd else a)  # type: ignore[misc]
            add(lambda v, a=small, b=large, odd=odd: a if v is odd else b)  # type: ignore[misc]
    for odd in variables:
        add(lambda v, odd=odd: 0 if v is odd else _CONTRASTS[-1][1])  # type: ignore[misc]
    return [dict(zip(variables, values, strict=True)) for values in list(assignments)[:_MAX_VALUATIONS]]


def nearest_legal_value(var: SymVar, value: int) -> int:
    """The nearest value that the bounds and the divisor of a symbol allow."""
    value = max(value, var.lower if var.lower is not None else value)
    value = -(-value // var.divisor) * var.divisor
    return value if var.upper is None else min(value, var.upper // var.divisor * var.divisor)


# Search


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Result of placing the tensors by this priority at this valuation."""

    priority: list[int]
    at: int
    order: list[int] = field(repr=False)  # from low to high offsets
    ratios: np.ndarray

    @property
    def score(self) -> tuple[float, float]:
        """Worst and mean ratio; less is better."""
        return float(self.ratios.max(initial=1.0)), float(self.ratios.mean()) if len(self.ratios) else 1.0


def _try(problem: PackingProblem, priority: list[int], at: int) -> _Candidate:
    order = problem.place(priority, at)
    return _Candidate(priority, at, order, problem.ratios(order))


def search(problem: PackingProblem) -> tuple[list[int], float]:
    """Find an order from low to high offsets; returns the order and its worst ratio."""
    starts: dict[int, _Candidate] = {}  # best per priority
    num_valuations = max(2, _START_BUDGET // (_KINDS * len(problem.tensors)))
    for at in range(min(num_valuations, problem.samples.shape[1])):
        for kind, priority in enumerate(priorities(problem, at)):
            attempt = _try(problem, priority, at)
            if kind not in starts or attempt.score < starts[kind].score:
                starts[kind] = attempt
            if attempt.score[0] <= GOOD_RATIO:
                return attempt.order, attempt.score[0]
    ranked = sorted(starts.values(), key=lambda candidate: candidate.score)[:_NUM_STARTS]
    steps = min(_MAX_STEPS, _BUDGET // (len(problem.tensors) * len(ranked)))
    best = ranked[0]
    for start in ranked:
        climbed = _climb(problem, start, steps)
        best = min(best, climbed, key=lambda candidate: candidate.score)
        if best.score[0] <= GOOD_RATIO:
            break
    return best.order, best.score[0]


def priorities(problem: PackingProblem, at: int) -> Iterator[list[int]]:
    """Orders in which to place the tensors: those that are hard to place later come first."""
    sizes: list[float] = problem.samples[:, at].tolist()
    lengths = [tensor.last - tensor.first + 1 for tensor in problem.tensors]
    all_tensors = range(len(sizes))
    yield sorted(all_tensors, key=lambda k: (-lengths[k], -sizes[k], k))
    yield sorted(all_tensors, key=lambda k: (-sizes[k] * lengths[k], k))
    yield sorted(all_tensors, key=lambda k: (-sizes[k], problem.tensors[k].first))
    yield sorted(all_tensors, key=lambda k: (problem.tensors[k].first, -sizes[k]))


def _climb(problem: PackingProblem, start: _Candidate, steps: int) -> _Candidate:
    """Hill climbing over priorities, mostly on the critical path; keeps changes that do not worsen the score."""
    rng = random.Random(0)
    best, path = start, _critical_path(problem, start)
    for _ in range(steps):
        priority, at = list(best.priority), best.at
        tensor = rng.choice(path) if rng.random() < 0.8 else rng.choice(priority)
        position = priority.index(tensor)
        if rng.random() < 0.5:  # earlier
            priority.insert(rng.randrange(position + 1), priority.pop(position))
        else:  # in exchange with a neighbour
            other = priority.index(rng.choice(problem.neighbours[tensor] or [tensor]))
            priority[position], priority[other] = priority[other], priority[position]
        if rng.random() < 0.2:
            at = rng.randrange(problem.samples.shape[1])
        candidate = _try(problem, priority, at)
        if candidate.score <= best.score:
            best, path = candidate, _critical_path(problem, candidate)
        if best.score[0] <= GOOD_RATIO:
            break
    return best


def _critical_path(problem: PackingProblem, candidate: _Candidate) -> list[int]:
    """Stack of tensors, from the top down, that determines the arena where its ratio is worst."""
    sizes: list[float] = problem.samples[:, problem.bounded[int(candidate.ratios.argmax())]].tolist()
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
