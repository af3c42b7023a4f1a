"""Which loops may run in parallel, and making them so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.program import Allocate, For, IfThenElse, LetIndex, Seq, Stmt, seq
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, bound_symbols, stores, walk_stmts
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, sym
from relaxlite.passes.access import accesses
from relaxlite.passes.schedule import fuse, nest


def mark_parallel(stmt: Stmt) -> Stmt:
    """Every loop whose iterations write different elements, nested ones too, until one that does not."""
    if isinstance(stmt, Seq):
        return seq(*(mark_parallel(s) for s in stmt.stmts))
    if isinstance(stmt, LetIndex | Allocate) and not (isinstance(stmt, Allocate) and stmt.buffer.scope == "local"):
        return replace(stmt, body=mark_parallel(stmt.body))
    if isinstance(stmt, For) and stmt.kind == "serial" and writes_apart(stmt):
        return replace(stmt, body=mark_parallel(stmt.body), kind="parallel")
    return stmt


def outermost_parallel(stmt: Stmt) -> Stmt:
    """One level of parallel loops: those inside another become serial."""
    if isinstance(stmt, For):
        body = _Serial().stmt(stmt.body) if stmt.kind == "parallel" else outermost_parallel(stmt.body)
        return replace(stmt, body=body)
    if isinstance(stmt, Seq):
        return seq(*(outermost_parallel(s) for s in stmt.stmts))
    if isinstance(stmt, LetIndex | Allocate):
        return replace(stmt, body=outermost_parallel(stmt.body))
    if isinstance(stmt, IfThenElse):
        return replace(stmt, then=outermost_parallel(stmt.then))
    return stmt


def serial(stmt: Stmt) -> Stmt:
    """Without parallel loops."""
    return _Serial().stmt(stmt)


class _Serial(ProgramRewriter):
    def stmt(self, stmt: Stmt) -> Stmt:
        stmt = super().stmt(stmt)
        return replace(stmt, kind="serial") if isinstance(stmt, For) and stmt.kind == "parallel" else stmt


def parallel_nest(loops: Sequence[For], body: Stmt) -> Stmt:
    """One parallel loop over all iterations of `loops`, which are independent; without any, the body."""
    ones = {loop.var: 0 for loop in loops if as_int(loop.extent) == 1}
    loops = [loop for loop in loops if loop.var not in ones]
    body = Substitute(ones).stmt(body)
    if not loops:
        return body
    stmt = nest([replace(loop, kind="serial") for loop in loops], body)
    for _ in loops[1:]:
        assert isinstance(stmt, For) and isinstance(stmt.body, For)
        stmt = fuse(stmt, stmt.body)
    assert isinstance(stmt, For)
    return replace(stmt, kind="parallel")


def writes_apart(loop: For) -> bool:
    """Whether different iterations write different elements and read none that another writes: in all accesses to a
    written buffer that outlives the iteration the loop variable stands alone in the same dimension, at one scale."""
    own = {s.buffer for s in walk_stmts(loop.body) if isinstance(s, Allocate)}
    written = {s.buffer for s in stores(loop.body)} - own
    inner = bound_symbols(loop.body)
    for buffer in written:
        places = [
            {(k, part) for k, index in enumerate(a.indices) if (part := _owned(index, loop.var, inner)) is not None}
            for a in accesses(loop.body)
            if a.buffer is buffer
        ]
        if not set.intersection(*places):
            return False
    return True


def _owned(index: SymExpr, var: SymVar, inner: set[SymVar]) -> tuple[int, SymExpr] | None:
    """(c, base) if the index is base + var*c + (0 .. c-1), with a base that is the same in all iterations, so that it
    tells the value of var; else None. `inner`: the variables that are bound inside the loop."""
    coef, rest = 0, sym(0)
    for monomial, c in index.terms:
        term = sym(c)
        for atom in monomial:
            term = term * atom
        used = set(term.free_vars())
        if monomial == (var,):
            coef = c
        elif var in used:
            return None
        elif used & inner:
            rest = rest + term
    if coef <= 0:
        return None
    lower, upper = Analyzer().bounds(rest)
    fits = lower is not None and upper is not None and lower >= 0 and upper < coef
    return (coef, index - var * coef - rest) if fits else None
