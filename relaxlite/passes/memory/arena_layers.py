"""The order of an arena's tensors where a model's layers repeat: that of a few layers, for all of them.

A model of 30 layers asks for the same tensors 30 times, the same steps apart. An order for five of them is found sooner
than one for all, and mostly is better, as the search's budget goes further. Layers that are left out lie as the second
and the third do, in turn: what goes from layer to layer has two places, and the first layer is none to go by, as what
comes before it is different. Any order is right; how good this one is gets measured on all tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relaxlite.passes.memory.arena_order import GOOD_RATIO, Problem, Span, Tenant, search
from relaxlite.records import dataclass

_TURN = 2  # layers after which places repeat
_BEFORE, _AFTER = 1 + _TURN, _TURN  # layers kept before those that are left out, and at least behind them


@dataclass(frozen=True, slots=True)
class _Layers:
    """`tenants`, in the order of their first steps, from number `first` on: `count` times `period` of them."""

    tenants: list[int]
    first: int
    period: int
    count: int

    @property
    def left_out(self) -> range:
        """Numbers of tenants, of whole turns of layers."""
        start = self.first + _BEFORE * self.period
        return range(start, start + max(0, self.count - _BEFORE - _AFTER) // _TURN * _TURN * self.period)

    @property
    def kept(self) -> list[int]:
        return self.tenants[: self.left_out.start] + self.tenants[self.left_out.stop :]

    def expanded(self, order: Sequence[int]) -> list[int]:
        """All tenants, from the lowest to the highest, after an order of those that are kept."""
        kept = self.kept
        rank = {kept[k]: position for position, k in enumerate(order)}
        turn = _TURN * self.period
        for number in self.left_out:
            rank[self.tenants[number]] = rank[self.tenants[number - turn]]
        return sorted(self.tenants, key=lambda k: (rank[k], k))


def search_layers(problem: Problem) -> tuple[list[int], float]:
    """The best order that was found, from the lowest to the highest, and its worst ratio."""
    layers = _find_layers(problem.tenants)
    if layers is None:
        return search(problem)
    few = Problem(_without(layers, problem.tenants), problem.samples[layers.kept])
    order = layers.expanded(search(few)[0])
    result = order, float(problem.ratios(order).max(initial=1.0))
    return result if result[1] <= GOOD_RATIO else min(result, search(problem), key=lambda one: one[1])


def _find_layers(tenants: Sequence[Tenant]) -> _Layers | None:
    """The run of tenants that repeat of which most are left out, if any are."""
    ranked = sorted(range(len(tenants)), key=lambda k: tenants[k].first)
    known: dict[object, int] = {}
    before, kinds = 0, []
    for tenant in map(tenants.__getitem__, ranked):
        spans = tuple((a - tenant.first, b - tenant.first) for a, b in tenant.spans)
        kinds.append(known.setdefault((tenant.size, spans, tenant.first - before), len(known)))
        before = tenant.first
    sequence, best = np.array(kinds), None
    for period in range(1, len(ranked) // (_BEFORE + _AFTER + _TURN) + 1):
        differ = np.flatnonzero(sequence[period:] != sequence[:-period])
        edges = np.concatenate(([-1], differ, [len(sequence) - period]))
        longest = int(np.diff(edges).argmax())
        length = int(edges[longest + 1] - edges[longest]) - 1 + period
        result = _Layers(ranked, int(edges[longest]) + 1, period, length // period)
        if result.left_out and (best is None or len(result.left_out) > len(best.left_out)):
            best = result
    return best


def _without(layers: _Layers, tenants: Sequence[Tenant]) -> list[Tenant]:
    """The kept tenants, as if the steps of those that are left out did not happen."""
    firsts = [tenants[k].first for k in layers.tenants]
    of_layer = firsts[layers.first + layers.period] - firsts[layers.first]
    steps = of_layer * (len(layers.left_out) // layers.period)
    end = firsts[layers.left_out.start] + steps

    def moved(step: int) -> int:
        return step if step < end else step - steps

    def spans(tenant: Tenant) -> tuple[Span, ...]:
        """In order also where a later one moves and the one before it does not."""
        result: list[Span] = []
        for first, last in tenant.spans:
            start = max(moved(first), result[-1][1]) if result else moved(first)
            result.append((start, max(start, moved(last))))
        return tuple(result)

    return [Tenant(tenants[k].size, spans(tenants[k])) for k in layers.kept]
