"""Packing of tensors of symbolic sizes into one arena.

For each pair of tensors that are live at once, the order search (arena_order.py) fixes which of the two lies below the
other. The offset of a tensor is then the largest end of the tensors below it, 0 where there are none: a longest path.
So no two live tensors overlap for any sizes, without proofs. Proofs only shorten expressions: an end that is provably
never the largest is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.simplify import num_atoms
from relaxlite.ir.symbolic import SymExpr, SymVar, ceildiv, evaluate, smax, sym
from relaxlite.passes.memory.arena_layers import search_order_by_layers
from relaxlite.passes.memory.arena_order import ArenaTensor, PackingProblem, representative_values
from relaxlite.records import dataclass

ALIGNMENT = 64
_MAX_WEIGHT, _MAX_FAILURES = 20, 40  # limits of attempted proofs


@dataclass(frozen=True, slots=True, eq=False)
class OffsetBase:
    """Named maximum of several offsets."""

    name: SymVar
    operands: tuple[ArenaOffset, ...]
    full: SymExpr  # in terms of the model's symbols
    level: int  # greater than the levels of the operands' bases
    samples: np.ndarray

    @property
    def expr(self) -> SymExpr:
        """The maximum in terms of names of bases and sizes."""
        return smax(*(operand.expr for operand in self.operands))


@dataclass(frozen=True, slots=True, eq=False)
class ArenaOffset:
    """Distance from the start of the arena in bytes: a base (None: the start) plus a sum of sizes."""

    base: OffsetBase | None
    sizes: SymExpr  # sum of aligned sizes in terms of the model's symbols
    short: SymExpr  # the same sum in terms of names of sizes
    samples: np.ndarray  # its value at each of the packer's valuations

    @property
    def expr(self) -> SymExpr:
        """The offset in terms of names of bases and sizes."""
        return self.short if self.base is None else self.base.name + self.short

    @property
    def full(self) -> SymExpr:
        """The offset in terms of the model's symbols."""
        return self.sizes if self.base is None else self.base.full + self.sizes

    @property
    def key(self) -> tuple[OffsetBase | None, SymExpr]:
        """Structural key of the offset."""
        return self.base, self.sizes


@dataclass(slots=True)
class Packing:
    """Offsets of all tensors. `sizes` names sizes of several terms; `bases` are in order of computation."""

    offsets: list[ArenaOffset]  # of each tensor
    end: ArenaOffset  # of the arena
    sizes: dict[SymExpr, SymVar]
    bases: list[OffsetBase]
    worst_ratio: float  # of the arena to the lower bound of aligned sizes, at the packer's valuations


def pack(tensors: Sequence[ArenaTensor]) -> Packing:
    """Assign offsets in one arena to all tensors."""
    sizes = _AlignedSizes(tensors)
    problem = PackingProblem(tensors, sizes.samples)
    order, ratio = search_order_by_layers(problem)
    offsets = _Offsets(sizes, problem, order)
    return Packing(offsets.offsets, offsets.end, sizes.names, offsets.bases, ratio)


class _AlignedSizes:
    """Sizes of tensors, aligned and not negative, with their values at representative values of the symbols."""

    def __init__(self, tensors: Sequence[ArenaTensor]) -> None:
        analyzer = Analyzer()
        sizes = dict.fromkeys(tensor.size for tensor in tensors)
        aligned = {size: ceildiv(size, ALIGNMENT) * ALIGNMENT for size in sizes}
        padded_sizes = {s: padded if analyzer.can_prove_nonneg(s) else smax(padded, 0) for s, padded in aligned.items()}
        self.aligned = [padded_sizes[tensor.size] for tensor in tensors]
        named_sizes = dict.fromkeys(padded for padded in self.aligned if len(padded.terms) > 1)
        self.names = {padded: SymVar(f"size_{k}", divisor=ALIGNMENT) for k, padded in enumerate(named_sizes)}
        variables = tuple(dict.fromkeys(v for padded in padded_sizes.values() for v in padded.free_vars()))
        columns = list(_columns(list(padded_sizes.values()), variables))
        values_of = {padded: row for padded, *row in zip(padded_sizes.values(), *columns, strict=True)}
        self.samples = np.array([values_of[padded] for padded in self.aligned], dtype=float)

    def short(self, k: int) -> SymExpr:
        return self.names.get(self.aligned[k], self.aligned[k])


def _columns(sizes: Sequence[SymExpr], variables: tuple[SymVar, ...]) -> Iterator[list[int]]:
    """Values of the sizes at each valuation where they are defined; at least one column."""
    has_column = False
    for values in representative_values(variables):
        try:
            yield [evaluate(size, values) for size in sizes]
            has_column = True
        except ZeroDivisionError:
            continue
    if not has_column:
        yield [1] * len(sizes)


class _Offsets:
    """Offset of each tensor: the largest end of its lower neighbours, over as few ends as provable."""

    def __init__(self, sizes: _AlignedSizes, problem: PackingProblem, order: Sequence[int]) -> None:
        self._analyzer = Analyzer()
        self._proven: dict[tuple[object, object], bool] = {}
        self._failures = 0
        self._maxima: dict[frozenset[tuple[OffsetBase | None, SymExpr]], ArenaOffset] = {}
        self.bases: list[OffsetBase] = []
        zero_samples = np.zeros(sizes.samples.shape[1])
        self.start = ArenaOffset(None, sym(0), sym(0), zero_samples)
        offsets, ends = dict[int, ArenaOffset](), dict[int, ArenaOffset]()
        rank = {k: position for position, k in enumerate(order)}
        neighbours_of = [frozenset(neighbours) for neighbours in problem.neighbours]
        for k in order:
            below = [j for j in problem.neighbours[k] if rank[j] < rank[k]]
            offsets[k] = self._maximum([ends[j] for j in _maximal(below, neighbours_of, rank)])
            ends[k] = self._add_size(offsets[k], sizes, k)
        self.offsets = [offsets[k] for k in range(len(order))]
        self.end = self._maximum([ends[k] for k in _maximal(order, neighbours_of, rank)])

    def _add_size(self, offset: ArenaOffset, sizes: _AlignedSizes, k: int) -> ArenaOffset:
        result = offset.sizes + sizes.aligned[k], offset.short + sizes.short(k), offset.samples + sizes.samples[k]
        return ArenaOffset(offset.base, *result)

    def _maximum(self, offsets: Sequence[ArenaOffset]) -> ArenaOffset:
        """The largest of several offsets."""
        operands: list[ArenaOffset] = []
        for offset in {offset.key: offset for offset in offsets}.values():
            if not any(self._is_below(offset, operand) for operand in operands):
                operands = [operand for operand in operands if not self._is_below(operand, offset)]
                operands.append(offset)
        if len(operands) <= 1:
            return operands[0] if operands else self.start
        key = frozenset(offset.key for offset in operands)
        if key not in self._maxima:
            self._maxima[key] = self._new_base(tuple(operands))
        return self._maxima[key]

    def _new_base(self, operands: tuple[ArenaOffset, ...]) -> ArenaOffset:
        level = 1 + max(0 if offset.base is None else offset.base.level for offset in operands)
        name = SymVar(f"place_{len(self.bases)}", divisor=ALIGNMENT)
        samples = np.max([offset.samples for offset in operands], axis=0)
        base = OffsetBase(name, operands, smax(*(offset.full for offset in operands)), level, samples)
        self.bases.append(base)
        return ArenaOffset(base, sym(0), sym(0), samples)

    def _is_below(self, a: ArenaOffset, b: ArenaOffset) -> bool:
        """Whether a <= b is proven for all values of the symbols. Not tried where a sample contradicts."""
        if not (a.samples <= b.samples).all():
            return False
        key = (a.key, b.key)
        if key not in self._proven:
            self._proven[key] = self._prove(a, b)
        return self._proven[key]

    def _prove(self, a: ArenaOffset, b: ArenaOffset) -> bool:
        """Prove a <= b: by sizes on a common base, by an operand of b's base, or by all operands of a's base."""
        if (a.base is b.base or a.base is None) and self._prove_le(a.sizes, b.sizes):
            return True
        if b.base is not None and any(self._is_below(a, _on_operand(operand, b)) for operand in b.base.operands):
            return True
        return a.base is not None and all(self._is_below(_on_operand(operand, a), b) for operand in a.base.operands)

    def _prove_le(self, a: SymExpr, b: SymExpr) -> bool:
        """Whether a <= b is proven. A missed proof only costs an operand, so failures have a budget."""
        difference = b - a
        lower = self._analyzer.interval(difference)[0]
        if lower is not None and lower >= 0:
            return True
        if num_atoms(difference) > _MAX_WEIGHT or self._failures >= _MAX_FAILURES:
            return False
        is_proven = self._analyzer.can_prove_nonneg(difference)
        self._failures += not is_proven
        return is_proven


def _on_operand(operand: ArenaOffset, offset: ArenaOffset) -> ArenaOffset:
    """The offset with an operand of its base in place of the base. The offset is the maximum of these."""
    assert offset.base is not None
    samples = operand.samples + (offset.samples - offset.base.samples)
    return ArenaOffset(operand.base, operand.sizes + offset.sizes, operand.short + offset.short, samples)


def _maximal(below: Sequence[int], neighbours_of: Sequence[frozenset[int]], rank: dict[int, int]) -> list[int]:
    """Tensors below that no other of them lies on. The end of a tensor under another is never the largest."""
    inside = frozenset(below)
    return [j for j in below if not any(rank[i] > rank[j] for i in neighbours_of[j] & inside)]
