"""Horizontal fusion of consecutive parallel loops: one parallel region, so that threads are started once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce

from relaxlite.ir.program import Binary, Buffer, Compare, For, IfThenElse, IndexValue, LetIndex, Stmt, Value, seq
from relaxlite.ir.program_visitor import Substitute, loads, stores
from relaxlite.ir.symbolic import SymExpr, SymVar, sym
from relaxlite.passes.loops.access import accesses
from relaxlite.passes.loops.transforms import less


def join_parallel_loops(stmts: Sequence[Stmt]) -> list[Stmt]:
    """Join consecutive independent parallel loops into one parallel loop over all their iterations.

    Loops are independent if none accesses a buffer that another one writes. If a loop has a version with nontemporal
    stores, its condition is evaluated before the joined loop, and the loops run one after another if it holds. Loops
    with two versions by the same condition on the number of rows are joined in both versions.
    """
    joined: list[Stmt] = []
    group: list[Stmt] = []
    for stmt in stmts:
        if group and not (_is_joinable(stmt, group[0]) and all(_independent(stmt, other) for other in group)):
            joined.append(_join(group))
            group = []
        if _loop_of(stmt) is None and _variants(stmt) is None:
            joined.append(stmt)
        else:
            group.append(stmt)
    return [*joined, _join(group)] if group else joined


def _loop_of(stmt: Stmt) -> For | None:
    """The parallel loop of a stage, or of its version without nontemporal stores; None: neither is one."""
    if isinstance(stmt, IfThenElse) and any(store.nontemporal for store in stores(stmt.then)):
        return None if stmt.other is None else _loop_of(stmt.other)
    return stmt if isinstance(stmt, For) and stmt.kind == "parallel" else None


def _variants(stmt: Stmt) -> tuple[For, For] | None:
    """The two parallel loops of a stage that selects between them by a number of rows; None: another stage."""
    if not isinstance(stmt, IfThenElse) or _loop_of(stmt) is not None:
        return None
    branches = [s for s in (stmt.then, stmt.other) if isinstance(s, For) and s.kind == "parallel"]
    return (branches[0], branches[1]) if len(branches) == 2 and _comparison(stmt.cond) is not None else None


def _comparison(cond: Value) -> tuple[str, SymExpr, SymExpr] | None:
    """The operator and operands of a comparison of two index expressions; None: another condition."""
    if not isinstance(cond, Compare) or not isinstance(cond.a, IndexValue) or not isinstance(cond.b, IndexValue):
        return None
    return cond.op, cond.a.index, cond.b.index


def _is_joinable(a: Stmt, b: Stmt) -> bool:
    """Whether two stages can be joined: both are loops, or both select between two loops by the same condition."""
    if _variants(a) is None or _variants(b) is None:
        return _loop_of(a) is not None and _loop_of(b) is not None
    assert isinstance(a, IfThenElse) and isinstance(b, IfThenElse)
    return _comparison(a.cond) == _comparison(b.cond)


def _independent(a: Stmt, b: Stmt) -> bool:
    written = [{store.buffer for store in stores(s) if store.buffer.scope == "global"} for s in (a, b)]
    touched = [{access.buffer for access in accesses(s)} for s in (a, b)]
    return not (written[0] & touched[1] or written[1] & touched[0])


def _join(stmts: Sequence[Stmt]) -> Stmt:
    """One stage with a single parallel loop over the iterations of independent stages."""
    if len(stmts) == 1:
        return stmts[0]
    variants = [pair for s in stmts if (pair := _variants(s)) is not None]
    if variants:
        small, large = (_join(branch) for branch in zip(*variants, strict=True))
        assert isinstance(stmts[0], IfThenElse)
        return replace(stmts[0], then=small, other=large)
    loops = [loop for s in stmts if (loop := _loop_of(s)) is not None]
    point = SymVar("part")
    joined = For(point, sum((loop.extent for loop in loops), sym(0)), _dispatch(loops, point), "parallel")
    conds = [s.cond for s in stmts if isinstance(s, IfThenElse)]
    if not conds:
        return joined
    return IfThenElse(reduce(partial(Binary, "or"), conds), seq(*stmts), Substitute(fresh=True).stmt(joined))


def _dispatch(loops: Sequence[For], number: SymExpr) -> Stmt:
    """Dispatch iteration `number` of a joined loop to the loop that it belongs to."""
    loop, *rest = loops
    body = LetIndex(loop.var, IndexValue(number), loop.body)
    if not rest:
        return body
    return IfThenElse(less(number, loop.extent), body, _dispatch(rest, number - loop.extent))


def read_only_by_writers(stages: Sequence[Stmt], x: Buffer, out: Buffer) -> bool:
    """Whether only stages that write `out` read `x`.

    This is the condition for `out` to alias `x` in joined loops, which run concurrently whatever their program order.
    """
    reading = [s for s in stages if any(load.buffer is x for load in loads(s))]
    return all(any(store.buffer is out for store in stores(s)) for s in reading)
