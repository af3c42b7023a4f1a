"""Packs tensors of symbolic sizes into one arena.

For each pair of tensors that are alive at once it is decided, once and for all, which of the two lies below the other
(arena_order.py). Then the offset of a tensor is the largest end of those below it, 0 where there are none: a longest
path. So no two of them overlap *whatever the sizes are*; there is nothing to prove. Proofs only shorten expressions: an
end that is provably never the largest is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.simplify import num_atoms
from relaxlite.ir.symbolic import SymExpr, SymVar, ceildiv, evaluate, smax, sym
from relaxlite.passes.memory.arena_layers import search_layers
from relaxlite.passes.memory.arena_order import Problem, Tenant, valuations
from relaxlite.records import dataclass

ALIGNMENT = 64
_MAX_WEIGHT, _MAX_FAILURES = 20, 40  # of what proofs are tried for


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """The largest of several heights, under a name."""

    name: SymVar
    operands: tuple[Height, ...]
    full: SymExpr  # in terms of the symbols
    level: int  # bases that its operands stand on have lower ones
    samples: np.ndarray

    @property
    def expr(self) -> SymExpr:
        """In terms of names of bases and rooms."""
        return smax(*(operand.expr for operand in self.operands))


@dataclass(frozen=True, slots=True, eq=False)
class Height:
    """A distance from the arena's beginning, in bytes: a base (None: the beginning) and the rooms on top of it."""

    base: Base | None
    rooms: SymExpr  # in terms of the symbols
    short: SymExpr  # in terms of the names of rooms
    samples: np.ndarray  # its value at each of the packer's valuations

    @property
    def expr(self) -> SymExpr:
        """In terms of names of bases and rooms."""
        return self.short if self.base is None else self.base.name + self.short

    @property
    def full(self) -> SymExpr:
        """In terms of the symbols."""
        return self.rooms if self.base is None else self.base.full + self.rooms

    @property
    def key(self) -> tuple[Base | None, SymExpr]:
        return self.base, self.rooms


@dataclass(slots=True)
class Packing:
    """Where everything lies. `rooms`: sizes that got a name; `bases`: in the order in which they can be computed."""

    places: list[Height]  # of each tenant
    end: Height  # of the arena
    rooms: dict[SymExpr, SymVar]
    bases: list[Base]
    worst_ratio: float  # of the arena to the lower bound, rooms counted as aligned, at the packer's valuations


def pack(tenants: Sequence[Tenant]) -> Packing:
    """Places for all tenants, in one arena."""
    rooms = _Rooms(tenants)
    problem = Problem(tenants, rooms.samples)
    order, ratio = search_layers(problem)
    heights = _Heights(rooms, problem, order)
    return Packing(heights.places, heights.end, rooms.names, heights.bases, ratio)


class _Rooms:
    """The sizes of tenants, aligned and never negative, and their values at representative values of the symbols."""

    def __init__(self, tenants: Sequence[Tenant]) -> None:
        analyzer = Analyzer()
        sizes = dict.fromkeys(tenant.size for tenant in tenants)
        aligned = {size: ceildiv(size, ALIGNMENT) * ALIGNMENT for size in sizes}
        rooms = {s: room if analyzer.can_prove_nonneg(s) else smax(room, 0) for s, room in aligned.items()}
        self.of = [rooms[tenant.size] for tenant in tenants]
        long = dict.fromkeys(room for room in self.of if len(room.terms) > 1)
        self.names = {room: SymVar(f"size_{k}", divisor=ALIGNMENT) for k, room in enumerate(long)}
        variables = tuple(dict.fromkeys(v for room in rooms.values() for v in room.free_vars()))
        columns = list(_columns(list(rooms.values()), variables))
        at = {room: row for room, *row in zip(rooms.values(), *columns, strict=True)}
        self.samples = np.array([at[room] for room in self.of], dtype=float)

    def short(self, k: int) -> SymExpr:
        return self.names.get(self.of[k], self.of[k])


def _columns(rooms: Sequence[SymExpr], variables: tuple[SymVar, ...]) -> Iterator[list[int]]:
    """The rooms' values at each valuation where they have one; at least one column."""
    result = False
    for values in valuations(variables):
        try:
            yield [evaluate(room, values) for room in rooms]
            result = True
        except ZeroDivisionError:
            continue
    if not result:
        yield [1] * len(rooms)


class _Heights:
    """Each tenant's offset as an expression: the largest end of its neighbours below, of as few as can be proven."""

    def __init__(self, rooms: _Rooms, problem: Problem, order: Sequence[int]) -> None:
        self._analyzer = Analyzer()
        self._proven: dict[tuple[object, object], bool] = {}
        self._failures = 0
        self._joined: dict[frozenset[tuple[Base | None, SymExpr]], Height] = {}
        self.bases: list[Base] = []
        zero = np.zeros(rooms.samples.shape[1])
        self.floor = Height(None, sym(0), sym(0), zero)
        places, ends = dict[int, Height](), dict[int, Height]()
        rank = {k: position for position, k in enumerate(order)}
        near = [frozenset(neighbours) for neighbours in problem.neighbours]
        for k in order:
            below = [j for j in problem.neighbours[k] if rank[j] < rank[k]]
            places[k] = self._join([ends[j] for j in _tops(below, near, rank)])
            ends[k] = self._raise(places[k], rooms, k)
        self.places = [places[k] for k in range(len(order))]
        self.end = self._join([ends[k] for k in _tops(order, near, rank)])

    def _raise(self, height: Height, rooms: _Rooms, k: int) -> Height:
        result = height.rooms + rooms.of[k], height.short + rooms.short(k), height.samples + rooms.samples[k]
        return Height(height.base, *result)

    def _join(self, heights: Sequence[Height]) -> Height:
        """The largest of them."""
        kept: list[Height] = []
        for height in {height.key: height for height in heights}.values():
            if not any(self._is_below(height, other) for other in kept):
                kept = [other for other in kept if not self._is_below(other, height)]
                kept.append(height)
        if len(kept) <= 1:
            return kept[0] if kept else self.floor
        key = frozenset(height.key for height in kept)
        if key not in self._joined:
            self._joined[key] = self._new_base(tuple(kept))
        return self._joined[key]

    def _new_base(self, operands: tuple[Height, ...]) -> Height:
        level = 1 + max(0 if height.base is None else height.base.level for height in operands)
        name = SymVar(f"place_{len(self.bases)}", divisor=ALIGNMENT)
        samples = np.max([height.samples for height in operands], axis=0)
        base = Base(name, operands, smax(*(height.full for height in operands)), level, samples)
        self.bases.append(base)
        return Height(base, sym(0), sym(0), samples)

    def _is_below(self, a: Height, b: Height) -> bool:
        """Whether a <= b is proven for all values of the symbols. Where it is false at a sample, nothing is tried."""
        if not (a.samples <= b.samples).all():
            return False
        key = (a.key, b.key)
        if key not in self._proven:
            self._proven[key] = self._prove(a, b)
        return self._proven[key]

    def _prove(self, a: Height, b: Height) -> bool:
        """On one base by the rooms; else b is at least what its base is the largest of, and a is one of its own."""
        if (a.base is b.base or a.base is None) and self._is_less(a.rooms, b.rooms):
            return True
        if b.base is not None and any(self._is_below(a, _on(operand, b)) for operand in b.base.operands):
            return True
        return a.base is not None and all(self._is_below(_on(operand, a), b) for operand in a.base.operands)

    def _is_less(self, a: SymExpr, b: SymExpr) -> bool:
        """Whether a <= b is proven. What is left out only costs an operand, so failures have a budget."""
        difference = b - a
        lower = self._analyzer.interval(difference)[0]
        if lower is not None and lower >= 0:
            return True
        if num_atoms(difference) > _MAX_WEIGHT or self._failures >= _MAX_FAILURES:
            return False
        is_proven = self._analyzer.can_prove_nonneg(difference)
        self._failures += not is_proven
        return is_proven


def _on(operand: Height, height: Height) -> Height:
    """The rooms of a height on an operand of its base: one of the values that the height is the largest of."""
    assert height.base is not None
    samples = operand.samples + (height.samples - height.base.samples)
    return Height(operand.base, operand.rooms + height.rooms, operand.short + height.short, samples)


def _tops(below: Sequence[int], near: Sequence[frozenset[int]], rank: dict[int, int]) -> list[int]:
    """Those that none of the others lies on: an end of what lies under another is never the largest. Of a tenant that
    lives long nearly all others are neighbours, of which few are among these."""
    inside = frozenset(below)
    return [j for j in below if not any(rank[i] > rank[j] for i in near[j] & inside)]
