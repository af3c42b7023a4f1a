"""Parallel loops that follow each other as one, so that threads are started once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce

from relaxlite.ir.program import Binary, Buffer, Compare, For, IfThenElse, IndexValue, LetIndex, Stmt, Value, seq
from relaxlite.ir.program_visitor import Substitute, loads, stores
from relaxlite.ir.symbolic import SymExpr, SymVar, sym
from relaxlite.passes.loops.access import accesses
from relaxlite.passes.loops.edits import less


def joined_loops(stmts: Sequence[Stmt]) -> list[Stmt]:
    """Parallel loops that follow each other and touch nothing that another of them writes as one parallel loop over all
    of their iterations, so that threads are started once. Where one of them has a variant that stores past the caches,
    that condition is asked for all of them first, and the loops run one after another if it holds. Those that have two
    variants each, for few rows and for more, are joined in both."""
    made: list[Stmt] = []
    group: list[Stmt] = []
    for stmt in stmts:
        if group and not (_is_like(stmt, group[0]) and all(_independent(stmt, other) for other in group)):
            made.append(_joined(group))
            group = []
        if _loop_of(stmt) is None and _variants(stmt) is None:
            made.append(stmt)
        else:
            group.append(stmt)
    return [*made, _joined(group)] if group else made


def _loop_of(stmt: Stmt) -> For | None:
    """The parallel loop that a stage is, or is in the usual case."""
    if isinstance(stmt, IfThenElse) and any(store.nontemporal for store in stores(stmt.then)):
        return None if stmt.other is None else _loop_of(stmt.other)
    return stmt if isinstance(stmt, For) and stmt.kind == "parallel" else None


def _variants(stmt: Stmt) -> tuple[For, For] | None:
    """The parallel loops of a stage that chooses between two by a number of rows."""
    if not isinstance(stmt, IfThenElse) or _loop_of(stmt) is not None:
        return None
    found = [s for s in (stmt.then, stmt.other) if isinstance(s, For) and s.kind == "parallel"]
    return (found[0], found[1]) if len(found) == 2 and _compared(stmt.cond) is not None else None


def _compared(cond: Value) -> tuple[str, SymExpr, SymExpr] | None:
    """The comparison of two indices that a condition is."""
    if not isinstance(cond, Compare) or not isinstance(cond.a, IndexValue) or not isinstance(cond.b, IndexValue):
        return None
    return cond.op, cond.a.index, cond.b.index


def _is_like(a: Stmt, b: Stmt) -> bool:
    """Whether both are loops, or both choose between two by the same condition."""
    if _variants(a) is None or _variants(b) is None:
        return _loop_of(a) is not None and _loop_of(b) is not None
    assert isinstance(a, IfThenElse) and isinstance(b, IfThenElse)
    return _compared(a.cond) == _compared(b.cond)


def _independent(a: Stmt, b: Stmt) -> bool:
    written = [{store.buffer for store in stores(s) if store.buffer.scope == "global"} for s in (a, b)]
    touched = [{access.buffer for access in accesses(s)} for s in (a, b)]
    return not (written[0] & touched[1] or written[1] & touched[0])


def _joined(stmts: Sequence[Stmt]) -> Stmt:
    """Independent stages as one loop."""
    if len(stmts) == 1:
        return stmts[0]
    variants = [both for s in stmts if (both := _variants(s)) is not None]
    if variants:
        few, more = (_joined(branch) for branch in zip(*variants, strict=True))
        assert isinstance(stmts[0], IfThenElse)
        return replace(stmts[0], then=few, other=more)
    found = [loop for s in stmts if (loop := _loop_of(s)) is not None]
    point = SymVar("part")
    joined = For(point, sum((loop.extent for loop in found), sym(0)), _pick(found, point), "parallel")
    conds = [s.cond for s in stmts if isinstance(s, IfThenElse)]
    if not conds:
        return joined
    return IfThenElse(reduce(partial(Binary, "or"), conds), seq(*stmts), Substitute(fresh=True).stmt(joined))


def _pick(found: Sequence[For], number: SymExpr) -> Stmt:
    """Iteration `number` of all of these loops."""
    loop, *others = found
    body = LetIndex(loop.var, IndexValue(number), loop.body)
    if not others:
        return body
    return IfThenElse(less(number, loop.extent), body, _pick(others, number - loop.extent))


def reads_only_where_written(stages: Sequence[Stmt], x: Buffer, out: Buffer) -> bool:
    """Whether no stage reads x but those that write `out`. Stages whose loops are joined run side by side, whatever
    their order in the text, so only then may `out` take over the memory of x."""
    reading = [s for s in stages if any(load.buffer is x for load in loads(s))]
    return all(any(store.buffer is out for store in stores(s)) for s in reading)
