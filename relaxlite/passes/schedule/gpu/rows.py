"""Schedule of row programs (loops/row_program.py), such as softmax and norms: a warp or a block for each row.

Element j of a row belongs to thread j % threads in every stage. A total is combined over the threads (all_reduce.py),
so that each of them has it; an element of a local row is computed again where it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from relaxlite.ir.program import Allocate, Buffer, For, IfThenElse, Load, Stmt, Store, Value, seq
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, loads, stores
from relaxlite.ir.symbolic import SymExpr, as_int
from relaxlite.passes.loops.parallel import has_disjoint_writes
from relaxlite.passes.loops.row_program import RowProgram, match_row_program
from relaxlite.passes.loops.transforms import less
from relaxlite.passes.schedule.gpu.all_reduce import COMBINES, DTYPE, Team, all_reduce, by_blocks, by_warps, over, start
from relaxlite.passes.schedule.gpu.axes import flat_places, size_of

MAX_WARP_ROW = 1024  # elements of a row that a warp computes


def launch_rows(stage: Stmt) -> Stmt | None:
    """A launch for a row program; None for other stages, and for row programs that need an order of elements."""
    rows = match_row_program(stage)
    if rows is None or not _is_supported(rows):
        return None
    size, total, work = as_int(rows.size), size_of(rows.spatial), partial(_row, rows)
    if size is not None:
        return by_warps(total, work) if size <= MAX_WARP_ROW else by_blocks(total, work)
    return IfThenElse(less(rows.size, MAX_WARP_ROW + 1), by_warps(total, work), by_blocks(total, work))


def _is_supported(rows: RowProgram) -> bool:
    """Whether totals are combined in any order, and elements of local rows can be computed again."""
    combining = [s for stage in rows.stages for s in stores(stage) if s.combine is not None]
    if any(s.combine not in COMBINES or s.buffer.dtype != DTYPE or s.buffer.shape for s in combining):
        return False
    return all(map(has_disjoint_writes, rows.spatial)) and all(_is_computed_once(rows, b) for b in rows.locals)


def _is_computed_once(rows: RowProgram, buffer: Buffer) -> bool:
    """Whether a local row is stored by one stage, from values that later stages leave as they are."""
    if not buffer.shape:
        return True
    written = [(number, s) for number, stage in enumerate(rows.stages) for s in stores(stage) if s.buffer is buffer]
    if len(written) != 1:
        return False
    number, store = written[0]
    sources = {load.buffer for load in loads(store)}
    later = {s.buffer for stage in rows.stages[number:] for s in stores(stage)} - {buffer}
    return sources.isdisjoint(later)


def _row(rows: RowProgram, team: Team, number: SymExpr) -> tuple[Stmt, Buffer]:
    """(the statements of one row for a thread of a team, the shared buffer that they use)."""
    scalars = {b: Buffer(b.name, (), b.dtype, "local") for b in rows.locals if not b.shape}
    to_row = Substitute(flat_places(rows.spatial, number), scalars, fresh=True)
    parts = team.new_parts("parts")
    elements: dict[Buffer, Callable[..., Value]] = {}
    stmts: list[Stmt] = []
    for stage in rows.stages:
        placed = _Recompute(elements).stmt(to_row.stmt(stage))
        if isinstance(placed, For):
            stmts += _stage(rows, team, placed, parts, elements)
        else:
            stmts.append(placed)
    body = seq(*stmts)
    for scalar in scalars.values():
        body = Allocate(scalar, body)
    return body, parts


def _stage(
    rows: RowProgram, team: Team, loop: For, parts: Buffer, elements: dict[Buffer, Callable[..., Value]]
) -> list[Stmt]:
    """The statements of a loop over the row; notes how elements of local rows are computed."""
    kept: list[Stmt] = []
    totals: list[tuple[Buffer, Store]] = []
    for store in stores(loop.body):
        again = _Recompute(elements)
        if store.buffer in rows.locals and store.buffer.shape:
            elements[store.buffer] = _element(loop, again.value(store.value))
        elif store.combine is None:
            kept.append(again.stmt(store))
        else:
            partial = Buffer(f"{store.buffer.name}_part", (), DTYPE, "local")
            totals.append((partial, store))
            kept.append(Store(partial, (), again.value(store.value), store.combine))
    if not kept:
        return []
    stmts: list[Stmt] = [start(partial, str(store.combine)) for partial, store in totals]
    stmts.append(over(team, replace(loop, body=seq(*kept))))
    for partial, store in totals:
        stmts.append(all_reduce(team, partial, str(store.combine), parts))
        stmts.append(Store(store.buffer, (), Load(partial, ()), store.combine))
    body = seq(*stmts)
    for partial, _ in totals:
        body = Allocate(partial, body)
    return [body]


def _element(loop: For, value: Value) -> Callable[..., Value]:
    return lambda place: Substitute({loop.var: place}).value(value)


class _Recompute(ProgramRewriter):
    """Replaces loads of local rows by the values of the elements."""

    def __init__(self, elements: Mapping[Buffer, Callable[..., Value]]) -> None:
        super().__init__()
        self._elements = elements

    def _value(self, value: Value) -> Value:
        if isinstance(value, Load) and value.buffer in self._elements:
            return self._elements[value.buffer](*value.indices)
        return super()._value(value)
