"""Access regions: the box of a buffer that a statement accesses, in terms of variables bound outside of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from relaxlite.errors import ScheduleError
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.program import Binary, Buffer, For, IfThenElse, Load, Seq, Stmt, Store, Value
from relaxlite.ir.program_visitor import ProgramRewriter
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, smax
from relaxlite.passes.loops.access import coefficient
from relaxlite.passes.loops.transforms import less
from relaxlite.passes.schedule.primitives.dependence import Access, accesses_of
from relaxlite.passes.schedule.primitives.tree import with_ranges
from relaxlite.records import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a buffer: start[d] <= index d < start[d] + size[d], in elements."""

    start: tuple[SymExpr, ...]
    size: tuple[SymExpr, ...]


def box_of(region: Stmt, buffer: Buffer) -> Box:
    """The bounding box of the accesses of a region to a buffer.

    Raises ScheduleError if the region does not access the buffer, an index is not affine in the loops of the region, or
    the distance between two accesses is unknown.
    """
    uses = [access for access in accesses_of(region) if access.buffer is buffer]
    if not uses:
        raise ScheduleError(f"buffer {buffer.name} is not used there; name a loop round its uses")
    spans = [[_span(access, index) for index in access.node.indices] for access in uses]
    start, size = [], []
    for dim, column in enumerate(zip(*spans, strict=True)):
        first, last = column[0]
        low, high = 0, 0
        for access, (other_first, other_last) in zip(uses, column, strict=True):
            below, above = as_int(other_first - first), as_int(other_last - last)
            if below is None or above is None:
                raise ScheduleError(
                    f"dimension {dim} of buffer {buffer.name}: {uses[0]} and {access} lie an unknown distance apart; "
                    f"name "
                    "a loop further inside"
                )
            low, high = min(low, below), max(high, above)
        start.append(first + low)
        extent = last + high - (first + low) + 1
        lower, _ = Analyzer().bounds(extent)
        size.append(extent if lower is not None and lower >= 0 else smax(extent, 0))
    return Box(tuple(start), tuple(size))


def _span(access: Access, index: SymExpr) -> tuple[SymExpr, SymExpr]:
    """The minimum and maximum of an index over the loops around its access."""
    first = last = index
    inner = {binder.var for binder in access.binders}
    for binder in reversed(access.binders):
        if binder.var not in first.free_vars() and binder.var not in last.free_vars():
            continue
        step = coefficient(index, binder.var)
        coef = None if step is None else as_int(step)
        if not isinstance(binder, For) or coef is None or inner & set(binder.extent.free_vars()):
            raise ScheduleError(
                f"{access} has the index {index}, which is not affine in the loop {binder.var.name!r}; name a loop "
                f"further "
                "inside"
            )
        far = binder.extent - 1
        first = first - binder.var * coef + (far * coef if coef < 0 else 0)
        last = last - binder.var * coef + (far * coef if coef > 0 else 0)
    return first, last


def overwrites(region: Stmt, buffer: Buffer, box: Box) -> bool:
    """Whether a region stores every element of a box before it loads any.

    That holds if its first statement with accesses to the buffer only stores, unconditionally and everywhere.
    """
    for stmt in region.stmts if isinstance(region, Seq) else (region,):
        touching = [access for access in accesses_of(stmt) if access.buffer is buffer]
        if touching:
            plain = all(isinstance(access.node, Store) and access.combine is None for access in touching)
            return plain and _fills(stmt, buffer, box)
    return False


def _fills(stmt: Stmt, buffer: Buffer, box: Box, loops: tuple[For, ...] = ()) -> bool:
    """Whether a store with loop variables or constants as indices covers the whole box."""
    if isinstance(stmt, For):
        return _fills(stmt.body, buffer, box, (*loops, stmt))
    if isinstance(stmt, Seq):
        return any(_fills(inner, buffer, box, loops) for inner in stmt.stmts)
    if not isinstance(stmt, Store) or stmt.buffer is not buffer:
        return False
    used: list[SymVar] = []
    for index, start, size in zip(stmt.indices, box.start, box.size, strict=True):
        moved = index - start
        matches = [loop for loop in loops if loop.var is moved]
        if matches and matches[0].extent is size and matches[0].var not in used:
            used.append(matches[0].var)
        elif as_int(moved) != 0 or as_int(size) != 1:
            return False
    return all(loop.var in used or (as_int(loop.extent) or 0) > 0 for loop in loops)


def inside(buffer: Buffer, indices: Sequence[SymExpr], analyzer: Analyzer) -> Value | None:
    """The condition that indices are in bounds; None: they provably are."""
    conds: list[Value] = []
    for index, dim in zip(indices, buffer.shape, strict=True):
        index, dim = analyzer.simplify(index), analyzer.simplify(dim)
        if not analyzer.can_prove_le(0, index):
            conds.append(less(-1, index))
        if not analyzer.can_prove_lt(index, dim):
            conds.append(less(index, dim))
    return reduce(lambda a, b: Binary("and", a, b), conds) if conds else None


def guarded(cond: Value | None, stmt: Stmt) -> Stmt:
    """A statement under a condition, if there is one."""
    return stmt if cond is None else IfThenElse(cond, stmt)


def copy_loops(name: str, size: Sequence[SymExpr], analyzer: Analyzer) -> tuple[list[For], Analyzer]:
    """Loops with empty bodies over a box of `size`, and the analyzer with their ranges."""
    loops = [
        For(SymVar(f"{name}{d}", upper=None if (n := as_int(extent)) is None else max(n - 1, 0)), extent, Seq(()))
        for d, extent in enumerate(size)
    ]
    return loops, with_ranges(analyzer, loops)


class Redirect(ProgramRewriter):
    """Redirects accesses from one buffer to another, with indices relative to `start` and permuted by `order`."""

    def __init__(self, old: Buffer, new: Buffer, start: Sequence[SymExpr], order: Sequence[int]) -> None:
        super().__init__()
        self._old, self._new, self._start, self._order = old, new, start, order

    def _moved(self, indices: Sequence[SymExpr]) -> tuple[SymExpr, ...]:
        return tuple(indices[d] - self._start[d] for d in self._order)

    def _value(self, value: Value) -> Value:
        if isinstance(value, Load) and value.buffer is self._old:
            return Load(self._new, self._moved(value.indices))
        return super()._value(value)

    def stmt(self, stmt: Stmt) -> Stmt:
        new = super().stmt(stmt)
        if isinstance(new, Store) and new.buffer is self._old:
            return Store(self._new, self._moved(new.indices), new.value, new.combine, new.nontemporal)
        return new
