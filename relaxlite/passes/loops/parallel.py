"""Parallelization of loops: independence tests, parallel loop kinds, and collapsing of nests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.program import Allocate, Buffer, Check, For, IfThenElse, IndexValue, LetIndex, Seq, Stmt, Store, seq
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, bound_symbols, loads, stores, walk_stmts
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, product, sym
from relaxlite.passes.loops.access import accesses, stride

MIN_PARALLEL_ITERATIONS = 64  # of a parallel loop, for an even distribution over threads


def mark_parallel(stmt: Stmt) -> Stmt:
    """Make loops with disjoint writes parallel, from the outermost inwards up to the first loop without."""
    if isinstance(stmt, Seq):
        return seq(*(mark_parallel(s) for s in stmt.stmts))
    if isinstance(stmt, LetIndex | Allocate) and not (isinstance(stmt, Allocate) and stmt.buffer.scope == "local"):
        return replace(stmt, body=mark_parallel(stmt.body))
    if isinstance(stmt, For) and stmt.kind == "serial" and has_disjoint_writes(stmt):
        return replace(stmt, body=mark_parallel(stmt.body), kind="parallel")
    return stmt


def outermost_parallel(stmt: Stmt) -> Stmt:
    """Make parallel loops nested in other parallel loops serial."""
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


def collapse_outer_loops(stmt: Stmt) -> Stmt:
    """Collapse the two outer parallel loops of a nest of three or more loops.

    This applies if the extent of the outermost loop is not known to reach `MIN_PARALLEL_ITERATIONS`: a batch of one
    would occupy one thread.
    """
    if not isinstance(stmt, For) or not isinstance(stmt.body, For) or not isinstance(stmt.body.body, For):
        return stmt
    outer, inner = stmt, stmt.body
    has_few = (as_int(outer.extent) or 0) < MIN_PARALLEL_ITERATIONS
    if not has_few or outer.kind != "parallel" or inner.kind != "parallel" or outer.var in inner.extent.free_vars():
        return stmt
    fused = SymVar(f"{outer.var.name}{inner.var.name}")
    body: Stmt = inner.body
    for var, at in ((inner.var, fused % inner.extent), (outer.var, fused // inner.extent)):
        body = LetIndex(var, IndexValue(at), body)
    return For(fused, outer.extent * inner.extent, body, "parallel")


def make_serial(stmt: Stmt) -> Stmt:
    """Make all parallel loops of a statement serial."""
    return _Serial().stmt(stmt)


class _Serial(ProgramRewriter):
    def stmt(self, stmt: Stmt) -> Stmt:
        stmt = super().stmt(stmt)
        return replace(stmt, kind="serial") if isinstance(stmt, For) and stmt.kind == "parallel" else stmt


def collapse_parallel(loops: Sequence[For], body: Stmt) -> Stmt:
    """Collapse independent loops (outermost first) into one parallel loop around a body; without loops, the body."""
    ones = {loop.var: 0 for loop in loops if as_int(loop.extent) == 1}
    loops = [loop for loop in loops if loop.var not in ones]
    body = Substitute(ones).stmt(body)
    if not loops:
        return body
    point = SymVar("".join(loop.var.name for loop in loops))
    at: dict[SymVar, SymExpr] = {}
    rest = sym(point)
    for loop in reversed(loops[1:]):
        width = loop.extent if as_int(loop.extent) != 0 else sym(1)  # an empty loop must not divide by 0
        at[loop.var], rest = rest % width, rest // width
    at[loops[0].var] = rest
    return For(point, product(loop.extent for loop in loops), Substitute(at, fresh=True).stmt(body), "parallel")


def has_disjoint_writes(loop: For) -> bool:
    """Whether iterations write disjoint elements and read no element that another iteration writes.

    Sufficient condition: in all accesses to a written buffer that outlives the iteration, some dimension is indexed by
    the loop variable with the same coefficient and base.
    """
    own = {s.buffer for s in walk_stmts(loop.body) if isinstance(s, Allocate)}
    written = {s.buffer for s in stores(loop.body)} - own
    inner = bound_symbols(loop.body)
    for buffer in written:
        owned = [
            {(k, part) for k, index in enumerate(a.indices) if (part := _owned(index, loop.var, inner)) is not None}
            for a in accesses(loop.body)
            if a.buffer is buffer
        ]
        if not set.intersection(*owned):
            return False
    return True


def _owned(index: SymExpr, var: SymVar, inner: set[SymVar]) -> tuple[int, SymExpr] | None:
    """(c, base) if the index is base + var*c + (0 .. c-1) with a loop-invariant base, so that the index determines
    `var`; else None. `inner`: variables bound inside of the loop."""
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


def is_scalar_reduction(loop: For) -> bool:
    """Whether the body of a loop is one combining store into a loop-invariant element that it does not load."""
    store = loop.body
    if not isinstance(store, Store) or store.combine is None:
        return False
    fixed = all(loop.var not in index.free_vars() for index in store.indices)
    return fixed and all(load.buffer is not store.buffer for load in loads(store))


def is_independent(loop: For) -> bool:
    """Whether the iterations of an innermost loop are independent, so that it can be vectorized.

    Sufficient condition: every store moves along the loop, and loads of a stored buffer read the element that the same
    iteration stores.
    """
    if any(isinstance(s, LetIndex | Check | Allocate) for s in walk_stmts(loop.body)):
        return False
    written: dict[Buffer, list[tuple[SymExpr, ...]]] = {}
    for store in stores(loop.body):
        if not any(index is loop.var or stride(store, loop.var) not in (0, None) for index in store.indices):
            return False
        indices_of_buffer = written.setdefault(store.buffer, [])
        if any(other != store.indices and not _is_disjoint(store, other, loop) for other in indices_of_buffer):
            return False
        indices_of_buffer.append(store.indices)
    return all(load.indices in written.get(load.buffer, (load.indices,)) for load in loads(loop.body))


def _is_disjoint(store: Store, other: tuple[SymExpr, ...], loop: For) -> bool:
    """Whether a store and an access at indices `other` touch disjoint elements in all iterations: both have stride 1,
    and their starts differ by at least the extent of the loop."""
    distance, length = as_int(store.indices[-1] - other[-1]), as_int(loop.extent)
    is_apart = distance is not None and length is not None and abs(distance) >= length
    return is_apart and store.indices[:-1] == other[:-1] and stride(store, loop.var) == 1


def is_contiguous(loop: For) -> bool:
    """Whether vectorizing a loop pays: some access to global memory has stride 1 along it, or all have stride 0."""
    strides = [stride(a, loop.var) for a in accesses(loop.body) if a.buffer.scope == "global"]
    return any(s == 1 for s in strides) or all(s == 0 for s in strides)
