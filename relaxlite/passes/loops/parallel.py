"""Which loops may run in parallel or side by side, and making them so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.program import Allocate, Buffer, Check, For, IfThenElse, IndexValue, LetIndex, Seq, Stmt, Store, seq
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, bound_symbols, loads, stores, walk_stmts
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, product, sym
from relaxlite.passes.loops.access import accesses, stride

ENOUGH_ITERATIONS = 64  # of a parallel loop, for any number of threads to share them evenly


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


def share_two_loops(stmt: Stmt) -> Stmt:
    """One parallel loop over both outer loops of a nest of three or more that are independent: the outermost alone may
    have too few iterations for all threads, as a batch of one has."""
    if not isinstance(stmt, For) or not isinstance(stmt.body, For) or not isinstance(stmt.body.body, For):
        return stmt
    outer, inner = stmt, stmt.body
    few = (as_int(outer.extent) or 0) < ENOUGH_ITERATIONS
    if not few or outer.kind != "parallel" or inner.kind != "parallel" or outer.var in inner.extent.free_vars():
        return stmt
    both = SymVar(f"{outer.var.name}{inner.var.name}")
    body: Stmt = inner.body
    for var, at in ((inner.var, both % inner.extent), (outer.var, both // inner.extent)):
        body = LetIndex(var, IndexValue(at), body)
    return For(both, outer.extent * inner.extent, body, "parallel")


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
    point = SymVar("".join(loop.var.name for loop in loops))
    at: dict[SymVar, SymExpr] = {}
    rest = sym(point)
    for loop in reversed(loops[1:]):
        width = loop.extent if as_int(loop.extent) != 0 else sym(1)  # a loop of no iterations divides by nothing
        at[loop.var], rest = rest % width, rest // width
    at[loops[0].var] = rest
    return For(point, product(loop.extent for loop in loops), Substitute(at, fresh=True).stmt(body), "parallel")


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


def combines_into_one(loop: For) -> bool:
    """Whether the body combines into an element that the loop does not move."""
    store = loop.body
    if not isinstance(store, Store) or store.combine is None:
        return False
    fixed = all(loop.var not in index.free_vars() for index in store.indices)
    return fixed and all(load.buffer is not store.buffer for load in loads(store))


def is_independent(loop: For) -> bool:
    """Whether an innermost loop's iterations can run side by side: every store moves along the loop, and what is loaded
    from a stored buffer is the element that the same iteration stores."""
    if any(isinstance(s, LetIndex | Check | Allocate) for s in walk_stmts(loop.body)):
        return False
    written: dict[Buffer, list[tuple[SymExpr, ...]]] = {}
    for store in stores(loop.body):
        if not any(index is loop.var or stride(store, loop.var) not in (0, None) for index in store.indices):
            return False
        others = written.setdefault(store.buffer, [])
        if any(other != store.indices and not _lies_apart(store, other, loop) for other in others):
            return False
        others.append(store.indices)
    return all(load.indices in written.get(load.buffer, (load.indices,)) for load in loads(loop.body))


def _lies_apart(store: Store, other: tuple[SymExpr, ...], loop: For) -> bool:
    """Whether the elements that a loop stores to are others than those at indices `other`, in any of its iterations:
    both move along neighbours, from starts that are further apart than the loop is long."""
    distance, length = as_int(store.indices[-1] - other[-1]), as_int(loop.extent)
    is_apart = distance is not None and length is not None and abs(distance) >= length
    return is_apart and store.indices[:-1] == other[:-1] and stride(store, loop.var) == 1


def is_contiguous(loop: For) -> bool:
    """Whether the loop is worth vectorizing: an access moves along it by one element, or none moves."""
    strides = [stride(a, loop.var) for a in accesses(loop.body) if a.buffer.scope == "global"]
    return any(s == 1 for s in strides) or all(s == 0 for s in strides)
