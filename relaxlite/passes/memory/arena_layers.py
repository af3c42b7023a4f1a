"""Order of tensors in an arena for models with repeated layers: solve a few layers and extend to all.

A model of 30 layers allocates the same tensors 30 times at regular steps. The order of five layers is found faster and
is mostly better, as the search budget goes further. Omitted layers alternate between the positions of the second and
the third layer: a tensor that passes from layer to layer has two positions. The first layer is no template, as the code
before it differs. Every order is valid; its ratio is computed on all tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relaxlite.passes.memory.arena_order import GOOD_RATIO, ArenaTensor, PackingProblem, StepRange, search
from relaxlite.records import dataclass

_CYCLE = 2  # layers after which positions repeat
_HEAD, _TAIL = 1 + _CYCLE, _CYCLE  # layers that are solved


@dataclass(frozen=True, slots=True)
class _Layers:
    """Repeated layers in `tensors`, ordered by first step: `count` times `period` tensors from index `first` on."""

    tensors: list[int]
    first: int
    period: int
    count: int

    @property
    def omitted(self) -> range:
        """Indices of omitted tensors: a multiple of two layers."""
        start = self.first + _HEAD * self.period
        return range(start, start + max(0, self.count - _HEAD - _TAIL) // _CYCLE * _CYCLE * self.period)

    @property
    def solved(self) -> list[int]:
        return self.tensors[: self.omitted.start] + self.tensors[self.omitted.stop :]

    def expanded(self, order: Sequence[int]) -> list[int]:
        """Extend an order of the solved tensors to all tensors, from low to high offsets."""
        solved = self.solved
        rank = {solved[k]: position for position, k in enumerate(order)}
        period = _CYCLE * self.period
        for number in self.omitted:
            rank[self.tensors[number]] = rank[self.tensors[number - period]]
        return sorted(self.tensors, key=lambda k: (rank[k], k))


def search_order_by_layers(problem: PackingProblem) -> tuple[list[int], float]:
    """Find an order from low to high offsets; returns the order and its worst ratio."""
    layers = _find_layers(problem.tensors)
    if layers is None:
        return search(problem)
    few = PackingProblem(_without(layers, problem.tensors), problem.samples[layers.solved])
    order = layers.expanded(search(few)[0])
    result = order, float(problem.ratios(order).max(initial=1.0))
    return result if result[1] <= GOOD_RATIO else min(result, search(problem), key=lambda one: one[1])


def _find_layers(tensors: Sequence[ArenaTensor]) -> _Layers | None:
    """The repetition that omits most tensors; None if none omits any."""
    ranked = sorted(range(len(tensors)), key=lambda k: tensors[k].first)
    kind_numbers: dict[object, int] = {}
    last_first, kinds = 0, []
    for tensor in map(tensors.__getitem__, ranked):
        spans = tuple((a - tensor.first, b - tensor.first) for a, b in tensor.spans)
        kinds.append(kind_numbers.setdefault((tensor.size, spans, tensor.first - last_first), len(kind_numbers)))
        last_first = tensor.first
    sequence, best = np.array(kinds), None
    for period in range(1, len(ranked) // (_HEAD + _TAIL + _CYCLE) + 1):
        differ = np.flatnonzero(sequence[period:] != sequence[:-period])
        edges = np.concatenate(([-1], differ, [len(sequence) - period]))
        longest = int(np.diff(edges).argmax())
        length = int(edges[longest + 1] - edges[longest]) - 1 + period
        layers = _Layers(ranked, int(edges[longest]) + 1, period, length // period)
        if layers.omitted and (best is None or len(layers.omitted) > len(best.omitted)):
            best = layers
    return best


def _without(layers: _Layers, tensors: Sequence[ArenaTensor]) -> list[ArenaTensor]:
    """The solved tensors, with the steps of omitted tensors removed."""
    firsts = [tensors[k].first for k in layers.tensors]
    steps_per_layer = firsts[layers.first + layers.period] - firsts[layers.first]
    steps = steps_per_layer * (len(layers.omitted) // layers.period)
    omitted_end = firsts[layers.omitted.start] + steps

    def moved(step: int) -> int:
        """The step after the removal."""
        return step if step < omitted_end else step - steps

    def spans(tensor: ArenaTensor) -> tuple[StepRange, ...]:
        """Spans after the removal, still in order where only the later of two spans moves."""
        result: list[StepRange] = []
        for first, last in tensor.spans:
            start = max(moved(first), result[-1][1]) if result else moved(first)
            result.append((start, max(start, moved(last))))
        return tuple(result)

    return [ArenaTensor(tensors[k].size, spans(tensors[k])) for k in layers.solved]
