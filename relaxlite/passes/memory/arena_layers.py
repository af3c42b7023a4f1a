"""The order of an arena's tensors where a model's layers repeat: solved for a few layers, extended to all.

A model of 30 layers allocates the same tensors 30 times, the same steps apart. An order for five layers is found faster
than one for all, and usually is better, as the search's budget goes further. Omitted layers repeat the order of the
second and third layers in turn: tensors passed from layer to layer alternate between two places, and the first layer
has a different predecessor. Any order is valid; the quality of the result is evaluated on all tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relaxlite.passes.memory.arena_order import GOOD_RATIO, Problem, Span, Tenant, search
from relaxlite.records import dataclass

_TURN = 2  # layers after which places repeat
_BEFORE, _AFTER = 1 + _TURN, _TURN  # layers kept before the omitted ones, and at least after them


@dataclass(frozen=True, slots=True)
class _Layers:
    """A run of repeated layers: in `tenants`, by first step, from number `first` on, `count` times `period` tenants."""

    tenants: list[int]
    first: int
    period: int
    count: int

    @property
    def left_out(self) -> range:
        """Numbers of the tenants of omitted layers, a multiple of _TURN layers."""
        start = self.first + _BEFORE * self.period
        return range(start, start + max(0, self.count - _BEFORE - _AFTER) // _TURN * _TURN * self.period)

    @property
    def kept(self) -> list[int]:
        return self.tenants[: self.left_out.start] + self.tenants[self.left_out.stop :]

    def expanded(self, order: Sequence[int]) -> list[int]:
        """Extend an order of the kept tenants, from lowest to highest, to all tenants."""
        kept_tenants = self.kept
        rank = {kept_tenants[k]: position for position, k in enumerate(order)}
        turn = _TURN * self.period
        for number in self.left_out:
            rank[self.tenants[number]] = rank[self.tenants[number - turn]]
        return sorted(self.tenants, key=lambda k: (rank[k], k))


def search_layers(problem: Problem) -> tuple[list[int], float]:
    """Search an order of all tenants, from lowest to highest; return it and its worst ratio to the lower bound."""
    layers = _find_layers(problem.tenants)
    if layers is None:
        return search(problem)
    reduced_problem = Problem(_without(layers, problem.tenants), problem.samples[layers.kept])
    order = layers.expanded(search(reduced_problem)[0])
    result = order, float(problem.ratios(order).max(initial=1.0))
    return result if result[1] <= GOOD_RATIO else min(result, search(problem), key=lambda solution: solution[1])


def _find_layers(tenants: Sequence[Tenant]) -> _Layers | None:
    """Find the run of repeated layers that omits the most tenants; None: no layers repeat often enough."""
    ranked = sorted(range(len(tenants)), key=lambda k: tenants[k].first)
    kind_numbers: dict[object, int] = {}
    previous_first, kinds = 0, []
    for tenant in map(tenants.__getitem__, ranked):
        spans = tuple((a - tenant.first, b - tenant.first) for a, b in tenant.spans)
        kinds.append(kind_numbers.setdefault((tenant.size, spans, tenant.first - previous_first), len(kind_numbers)))
        previous_first = tenant.first
    sequence, best = np.array(kinds), None
    for period in range(1, len(ranked) // (_BEFORE + _AFTER + _TURN) + 1):
        differ = np.flatnonzero(sequence[period:] != sequence[:-period])
        edges = np.concatenate(([-1], differ, [len(sequence) - period]))
        longest = int(np.diff(edges).argmax())
        length = int(edges[longest + 1] - edges[longest]) - 1 + period
        candidate = _Layers(ranked, int(edges[longest]) + 1, period, length // period)
        if candidate.left_out and (best is None or len(candidate.left_out) > len(best.left_out)):
            best = candidate
    return best


def _without(layers: _Layers, tenants: Sequence[Tenant]) -> list[Tenant]:
    """Return the kept tenants, with the steps of omitted layers removed from their spans."""
    firsts = [tenants[k].first for k in layers.tenants]
    of_layer = firsts[layers.first + layers.period] - firsts[layers.first]
    steps = of_layer * (len(layers.left_out) // layers.period)
    end = firsts[layers.left_out.start] + steps

    def move_step(step: int) -> int:
        return step if step < end else step - steps

    def spans(tenant: Tenant) -> tuple[Span, ...]:
        """Return the moved spans, in order even where only the later of two moves."""
        result: list[Span] = []
        for first, last in tenant.spans:
            start = max(move_step(first), result[-1][1]) if result else move_step(first)
            result.append((start, max(start, move_step(last))))
        return tuple(result)

    return [Tenant(tenants[k].size, spans(tenants[k])) for k in layers.kept]
