"""Loop transformations on statements: split, fuse, distribute, hoist, vectorized reductions, nontemporal stores.

Each function takes and returns statements and preserves their results under the conditions in its docstring, which
callers check. The schedule rules (schedule/cpu/programs.py) choose among these transformations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from relaxlite import dtypes
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.program import (
    Allocate,
    Binary,
    Buffer,
    Check,
    Compare,
    For,
    IfThenElse,
    IndexValue,
    LetIndex,
    Literal,
    Load,
    Prefetch,
    Select,
    Seq,
    Stmt,
    Store,
    Value,
    seq,
)
from relaxlite.ir.program_visitor import (
    ProgramRewriter,
    Substitute,
    loads,
    stmt_indices,
    stores,
    walk_stmts,
    walk_values,
)
from relaxlite.ir.symbolic import IntLike, SymExpr, SymVar, as_int, product, sym
from relaxlite.passes.loops.access import stride

_ANALYZER = Analyzer()


def split(loop: For, factor: int) -> tuple[For, SymVar, SymExpr, SymExpr]:
    """Split a loop by a factor. Returns (main loop, inner variable, start of the tail, iterations of the tail).

    for i in n: body   =>   for io in n // factor: for ii in factor: body(io*factor + ii)
                            and a tail of n % factor iterations from n // factor * factor on (`masked_tail`).
    """
    outer, inner = SymVar(f"{loop.var.name}o"), SymVar(f"{loop.var.name}i", upper=factor - 1)
    body = Substitute({loop.var: outer * factor + inner}, fresh=True).stmt(loop.body)
    main = For(outer, loop.extent // factor, For(inner, sym(factor), body, loop.kind), loop.kind)
    return main, inner, loop.extent // factor * factor, loop.extent % factor


def masked_tail(loop: For, start: SymExpr, lanes: int) -> Stmt:
    """The tail of a loop from `start` on, at most `lanes` iterations, as one masked vector iteration."""
    var = SymVar(f"{loop.var.name}t", upper=lanes - 1)
    body = Substitute({loop.var: start + var}, fresh=True).stmt(loop.body)
    return For(var, sym(lanes), IfThenElse(less(start + var, loop.extent), body), "vectorized")


def when_positive(count: SymExpr, stmt: Stmt) -> tuple[Stmt, ...]:
    """Guard a statement by count > 0; returns a sequence of statements.

    The sequence is empty if `count` is 0; there is no guard if `count` is known to be positive or the statement is a
    loop of `count` iterations.
    """
    value = as_int(count)
    if value is not None:
        return (stmt,) if value > 0 else ()
    if isinstance(stmt, For) and stmt.extent is count:
        return (stmt,)
    return (IfThenElse(less(0, count), stmt),)


def select_version(cond: Value, usual: Stmt, other: Stmt) -> Stmt:
    """Select between two versions of a statement: `usual` if the condition holds, else `other`.

    The condition is made by `less`; one on constants selects a version at compile time.
    """
    assert isinstance(cond, Compare) and isinstance(cond.a, IndexValue) and isinstance(cond.b, IndexValue)
    a, b = as_int(cond.a.index), as_int(cond.b.index)
    if a is None or b is None:
        return IfThenElse(cond, usual, other)
    return usual if a < b else other


def less(a: IntLike, b: IntLike) -> Value:
    """The condition a < b on integer expressions."""
    return Compare("lt", IndexValue(sym(a)), IndexValue(sym(b)))


def fuse(outer: For, inner: For) -> For:
    """Fuse two loops: for i in n: for j in m: body  =>  for t in n*m: body(t // m, t % m).

    `inner` is the whole body of `outer`, and its extent does not depend on i.
    """
    var = SymVar(f"{outer.var.name}{inner.var.name}")
    width = inner.extent if as_int(inner.extent) != 0 else sym(1)  # an empty loop must not divide by 0
    at = {outer.var: var // width, inner.var: var % width}
    return For(var, outer.extent * inner.extent, Substitute(at, fresh=True).stmt(inner.body), outer.kind)


def with_nontemporal_stores(stmt: Stmt, output: Buffer) -> Stmt:
    """Make the stores into a buffer larger than the caches nontemporal.

    Combining stores stay as they are; prefetches of the buffer are removed.
    """
    return _PastCaches(output).stmt(stmt)


class _PastCaches(ProgramRewriter):
    def __init__(self, output: Buffer) -> None:
        super().__init__()
        self._output = output

    def stmt(self, stmt: Stmt) -> Stmt:
        if isinstance(stmt, Store) and stmt.buffer is self._output and stmt.combine is None:
            return replace(stmt, nontemporal=True)
        if isinstance(stmt, Prefetch) and stmt.buffer is self._output:
            return Seq(())
        return super().stmt(stmt)


def prefetch_arrays(stmt: Stmt, output: Buffer, num_bytes: int) -> Stmt:
    """Insert prefetches into vectorized loops that read two or more buffers of the output's size contiguously.

    The prefetch distance is `num_bytes`.
    """
    return _PrefetchArrays(output, num_bytes).stmt(stmt)


class _PrefetchArrays(ProgramRewriter):
    def __init__(self, output: Buffer, num_bytes: int) -> None:
        super().__init__()
        self._size, self._num_bytes = product(output.shape), num_bytes

    def stmt(self, stmt: Stmt) -> Stmt:
        if not isinstance(stmt, For) or not isinstance(stmt.body, For) or stmt.body.kind != "vectorized":
            return super().stmt(stmt)
        inner, streams = stmt.body, dict[Buffer, Load]()
        for load in loads(inner.body):
            if product(load.buffer.shape) == self._size and stride(load, inner.var) == 1:
                streams.setdefault(load.buffer, load)
        if len(streams) < 2:
            return stmt
        width = max(dtypes.itemsize(load.buffer.dtype) for load in streams.values()) * (as_int(inner.extent) or 1)
        distance = Substitute({inner.var: 0, stmt.var: stmt.var + self._num_bytes // width})
        prefetches = [Prefetch(load.buffer, distance.indices(load.indices)) for load in streams.values()]
        return replace(stmt, body=seq(*prefetches, inner))


def nest(loops: Sequence[For], body: Stmt) -> Stmt:
    """A nest of loops (outermost first) around a body; the bodies of `loops` are ignored."""
    for loop in reversed(loops):
        body = replace(loop, body=body)
    return body


def without_unit_loops(stmt: Stmt) -> Stmt:
    """Replace loops of one iteration by their bodies, which exposes the loop outside of them for vectorization."""
    return _WithoutUnitLoops().stmt(stmt)


class _WithoutUnitLoops(ProgramRewriter):
    def stmt(self, stmt: Stmt) -> Stmt:
        if isinstance(stmt, For) and as_int(stmt.extent) == 1:
            return self.stmt(Substitute({stmt.var: 0}).stmt(stmt.body))
        return super().stmt(stmt)


def hoist_lets(stmt: Stmt) -> Stmt:
    """Hoist data-dependent indices (`LetIndex`) and their checks out of loops on which they do not depend.

    Checks of a loop that may be empty must not fail if it is: outside of the loop they get the alternative that its
    extent is 0. An index loaded at a checked index stays inside such a loop, as the check would no longer protect the
    load.
    """
    checked = {v for s in walk_stmts(stmt) if isinstance(s, Check) for v in _symbols(s)}
    return _HoistLets(checked).stmt(stmt)


class _HoistLets(ProgramRewriter):
    def __init__(self, checked: set[SymVar]) -> None:
        super().__init__()
        self._checked = checked

    def stmt(self, stmt: Stmt) -> Stmt:
        stmt = super().stmt(stmt)
        if not isinstance(stmt, For) or stmt.kind != "serial":
            return stmt
        body, may_be_empty = stmt.body, not _ANALYZER.can_prove_le(1, stmt.extent)
        if isinstance(body, LetIndex) and _is_invariant(LetIndex(body.var, body.value, Seq(())), stmt):
            if may_be_empty and self._reads_at_checked(body.value):
                return stmt
            return LetIndex(body.var, body.value, self.stmt(replace(stmt, body=body.body)))
        if isinstance(body, Seq) and isinstance(check := body.stmts[0], Check) and _is_invariant(check, stmt):
            if may_be_empty and self._reads_at_checked(check.cond):
                return stmt
            if may_be_empty:
                check = replace(check, cond=Binary("or", less(stmt.extent, 1), check.cond))
            return seq(check, self.stmt(replace(stmt, body=seq(*body.stmts[1:]))))
        return stmt

    def _reads_at_checked(self, value: Value) -> bool:
        reads = (v for v in walk_values(value) if isinstance(v, Load))
        return any(not self._checked.isdisjoint(i.free_vars()) for load in reads for i in load.indices)


def _is_invariant(head: Stmt, loop: For) -> bool:
    """Whether a statement is loop invariant: independent of the loop variable, and no load of a buffer that the loop
    stores."""
    written = {store.buffer for store in stores(loop.body)}
    return loop.var not in _symbols(head) and all(load.buffer not in written for load in loads(head))


def _symbols(stmt: Stmt) -> set[SymVar]:
    return {v for expr in stmt_indices(stmt) for v in expr.free_vars()}


def distribute(loops: Sequence[For], block: Allocate, guard: Value | None = None) -> Allocate:
    """Distribute loops over the statements of a block with one local element, as their innermost loops:

    for i: { t[]; t = init; for k: t += v(i, k); use(t) }
        =>  t[n]; for i: t[i] = init;  for k: for i: t[i] += v(i, k);  for i: use(t[i])

    Exact if the iterations of `loops` are independent. `guard` masks a tail: masked iterations skip loads whose indices
    vary with the guarded loops, leave unspecified values in their elements of t, and skip the statements after the
    reduction.
    """
    element = block.buffer
    wide = Buffer(element.name, tuple(loop.extent for loop in loops), element.dtype, "local")
    at = tuple(loop.var for loop in loops)
    stmts = block.body.stmts if isinstance(block.body, Seq) else (block.body,)
    init, update, *final = (_Widen(element, wide, at).stmt(s) for s in stmts)
    if guard is not None:
        update = GuardLoads(guard, set(at), wide).stmt(update)
        final = [IfThenElse(guard, s) for s in final]
    return Allocate(wide, seq(*(_sink(loops, s) for s in (init, update, *final))))


def _sink(loops: Sequence[For], stmt: Stmt) -> Stmt:
    if isinstance(stmt, For):
        return replace(stmt, body=_sink(loops, stmt.body))
    if isinstance(stmt, Seq):
        return seq(*(_sink(loops, s) for s in stmt.stmts))
    return Substitute(fresh=True).stmt(nest(loops, stmt))


class GuardLoads(ProgramRewriter):
    """Guards loads whose indices vary with the guard's loop variables; loads of the local buffer `wide` need none."""

    def __init__(self, guard: Value, loops: set[SymVar], wide: Buffer | None = None) -> None:
        super().__init__()
        self._guard, self._wide = guard, wide
        self._vars = loops & _symbols(IfThenElse(guard, Seq(())))

    def _value(self, value: Value) -> Value:
        if not isinstance(value, Load):
            return super()._value(value)
        varies = any(self._vars & set(index.free_vars()) for index in value.indices)
        if value.buffer is self._wide or not varies:
            return value
        return Select(self._guard, value, Literal(False if value.dtype == "bool" else 0, value.dtype))


class _Widen(ProgramRewriter):
    """Replaces accesses to a scalar element[] by accesses to wide[at]."""

    def __init__(self, element: Buffer, wide: Buffer, at: tuple[SymExpr, ...]) -> None:
        super().__init__()
        self._element, self._wide, self._at = element, wide, at

    def _value(self, value: Value) -> Value:
        if isinstance(value, Load) and value.buffer is self._element:
            return Load(self._wide, self._at)
        return super()._value(value)

    def stmt(self, stmt: Stmt) -> Stmt:
        new = super().stmt(stmt)
        if isinstance(new, Store) and new.buffer is self._element:
            return Store(self._wide, self._at, new.value, new.combine)
        return new


def split_reduction(loop: For, lanes: int, accumulators: int, identity: Value) -> Stmt:
    """Vectorize a reduction into one element with partial results in vector lanes:

    for k in n: t[] += v(k)   =>   p[lanes*accumulators] = 0; for ko: for ki: p[ki] += v(ko*width + ki);
                                   a masked tail, `lanes` at a time; then t[] += p[ki] for all ki.

    Exact up to the order of combination. `loop.body` is one Store with `combine`, at indices without the loop variable.
    """
    store = loop.body
    assert isinstance(store, Store) and store.combine is not None
    width = lanes * accumulators
    partial = Buffer(f"{store.buffer.name}_partial", (sym(width),), store.buffer.dtype, "local")

    def step(extent: SymExpr, start: SymExpr, *, count: int, masked: bool) -> Stmt:
        outer, part, lane = SymVar(f"{loop.var.name}o"), SymVar("u", upper=count - 1), SymVar("l", upper=lanes - 1)
        at = start + outer * (lanes * count) + part * lanes + lane
        value = Substitute({loop.var: at}, fresh=True).value(store.value)
        body: Stmt = Store(partial, (part * lanes + lane,), value, store.combine)
        if masked:
            body = IfThenElse(less(at, loop.extent), body)
        return For(outer, extent, For(part, sym(count), For(lane, sym(lanes), body, "vectorized"), "unrolled"))

    main, rest = loop.extent // width * width, loop.extent % width
    steps = [*when_positive(loop.extent // width, step(loop.extent // width, sym(0), count=accumulators, masked=False))]
    steps += when_positive(rest, step((rest + lanes - 1) // lanes, main, count=1, masked=True))
    return Allocate(
        partial,
        seq(
            init_accumulators(partial, identity, lanes),
            *steps,
            reduce_accumulators(store, partial, accumulators, lanes),
        ),
    )


def init_accumulators(partial: Buffer, identity: Value, lanes: int) -> Stmt:
    """Initialize the partial results of a reduction, vector by vector, with the identity of the combination."""
    (width,) = partial.shape
    part, lane = SymVar("u"), SymVar("l", upper=lanes - 1)
    body = For(lane, sym(lanes), Store(partial, (part * lanes + lane,), identity), "vectorized")
    return For(part, width // lanes, body, "unrolled")


def reduce_accumulators(store: Store, partial: Buffer, accumulators: int, lanes: int) -> Stmt:
    """Combine partial results into the store's element: across accumulators lane by lane, then across lanes."""
    part, lane = SymVar("u"), SymVar("l", upper=lanes - 1)
    higher = Load(partial, (part * lanes + lane + lanes,))
    fold = For(lane, sym(lanes), Store(partial, (lane,), higher, store.combine), "vectorized")
    last = SymVar("l", upper=lanes - 1)
    total = For(
        last, sym(lanes), Store(store.buffer, store.indices, Load(partial, (last,)), store.combine), "vectorized"
    )
    return seq(*([For(part, sym(accumulators - 1), fold, "unrolled")] if accumulators > 1 else []), total)
