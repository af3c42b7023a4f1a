"""Control flow shared by several statements: counting loops and branches."""

from __future__ import annotations

from collections.abc import Callable

from relaxlite.codegen.llvm.context import KernelContext
from relaxlite.codegen.llvm.emitter import Val
from relaxlite.codegen.llvm.indices import Interval
from relaxlite.ir.program import For, Intrinsic, Store
from relaxlite.ir.program_visitor import loads, stores, walk_stmts

_MAX_TRIP_COUNT = 1000
_REDUCTION_WEIGHT = 100


def count_loop(k: KernelContext, stmt: For, start: Val, end: Val, body: Callable[[], None]) -> None:
    """Emit `for var in range(start, end)` as a rotated loop: tested before the first iteration and after each."""
    e, name = k.e, stmt.var.name
    enter, done = e.fresh(f"{name}_loop"), e.fresh(f"{name}_done")
    before = e.label
    if start.is_const and end.is_const and int(start.text) < int(end.text):
        e.branch(enter)
    else:
        e.branch_if(e.icmp("slt", start, end), enter, done)
    k.forget_loads()
    e.start(enter)
    var, following = Val(f"%{e.fresh(name)}", "i64"), Val(f"%{e.fresh(f'{name}_next')}", "i64")
    phi = e.reserve()
    with k.ix.scope(), k.ix.bound(stmt.var, var, _bounds(k, stmt)):
        body()
    with e.place(phi):
        e.line(f"{var.text} = phi i64 [ {start.text}, %{before} ], [ {following.text}, %{e.label} ]")
    e.line(f"{following.text} = add nuw nsw i64 {var.text}, 1")
    again = e.icmp("slt", following, end)
    weights = e.module.branch_weights(_branch_weight(k, stmt), 1)
    e.line(f"br i1 {again.text}, label %{enter}, label %{done}, {weights}, {e.module.loop_metadata()}")
    e.start(done)
    k.forget_loads()


def _branch_weight(k: KernelContext, stmt: For) -> int:
    """Branch weight of a loop, which guides LLVM's register allocation: about the trip count, multiplied by
    _REDUCTION_WEIGHT for innermost loops that accumulate in local buffers, whose accumulators must not be spilled."""
    _, upper = k.ix.bounds(k.ix.resolve(stmt.extent))
    count = _MAX_TRIP_COUNT if upper is None else min(max(upper, 1), _MAX_TRIP_COUNT)
    written = list(stores(stmt.body))
    accumulates = any(map(_accumulates, written)) and all(store.buffer.scope == "local" for store in written)
    is_innermost = not any(isinstance(s, For) and s.kind == "serial" for s in walk_stmts(stmt.body))
    return count * _REDUCTION_WEIGHT if accumulates and is_innermost else count


def _accumulates(store: Store) -> bool:
    """Whether a store updates an element of a local buffer: a combine, or an intrinsic of the old element."""
    if store.buffer.scope != "local":
        return False
    reads_itself = (load.buffer is store.buffer and load.indices == store.indices for load in loads(store))
    return store.combine is not None or (isinstance(store.value, Intrinsic) and any(reads_itself))


def _bounds(k: KernelContext, stmt: For) -> Interval:
    _, upper = k.ix.bounds(k.ix.resolve(stmt.extent))
    return 0, None if upper is None else max(upper - 1, 0)


def branch(k: KernelContext, cond: Val, then: Callable[[], None], other: Callable[[], None] | None = None) -> None:
    """Emit `if cond: then() else: other()` for a scalar condition."""
    e = k.e
    labels = e.fresh("then"), e.fresh("else") if other is not None else "", e.fresh("end")
    e.branch_if(cond, labels[0], labels[1] or labels[2])
    for label, part in ((labels[0], then), (labels[1], other)):
        if part is not None:
            e.start(label)
            with k.branch():
                part()
            e.branch(labels[2])
    e.start(labels[2])
    k.forget_loads()
