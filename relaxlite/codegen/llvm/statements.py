"""Lower statements of tensor programs: loops, stores, conditions, workspaces and checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

from relaxlite import dtypes
from relaxlite.codegen.llvm import memory, scalars
from relaxlite.codegen.llvm.bfloat16 import is_rounded
from relaxlite.codegen.llvm.checked import emit_index
from relaxlite.codegen.llvm.context import OUT_OF_MEMORY, Access, KernelContext
from relaxlite.codegen.llvm.dots import emit_dot2_bf16
from relaxlite.codegen.llvm.emitter import FALSE, TRUE, Val, int_const, lane_numbers, mangle
from relaxlite.codegen.llvm.extern_call import emit_library_call
from relaxlite.codegen.llvm.gpu.context import DeviceContext, HostContext
from relaxlite.codegen.llvm.gpu.device import allocate_on_device, emit_axis, emit_barrier
from relaxlite.codegen.llvm.gpu.launch import emit_launch
from relaxlite.codegen.llvm.indices import BufferBase
from relaxlite.codegen.llvm.loops import branch, count_loop
from relaxlite.codegen.llvm.parallel import emit_parallel
from relaxlite.codegen.llvm.types import convert, memory_elem
from relaxlite.codegen.llvm.values import emit_bounds_check, emit_value
from relaxlite.errors import CodegenError
from relaxlite.ir.intrinsics import DOT2_PACKED_BF16
from relaxlite.ir.launch import is_launch
from relaxlite.ir.program import (
    Allocate,
    Barrier,
    Binary,
    Buffer,
    CallLibrary,
    Check,
    For,
    GpuAxis,
    IfThenElse,
    IndexValue,
    Intrinsic,
    LetIndex,
    Literal,
    Load,
    Prefetch,
    Seq,
    Stmt,
    Store,
    Value,
)
from relaxlite.ir.program_visitor import loads, walk_values
from relaxlite.ir.symbolic import SymExpr, as_int, product

MAX_LANES = 256
_MAX_STACK_BYTES = 64 * 1024  # of one local buffer; larger ones are heap-allocated


def emit_statement(k: KernelContext, stmt: Stmt) -> None:
    """Emit any statement. CodegenError for what CPU code cannot express."""
    _EMITTERS[type(stmt)](k, stmt)


def _seq(k: KernelContext, stmt: Seq) -> None:
    pending = list(reversed(stmt.stmts))
    while pending:
        first = pending.pop()
        if pending and isinstance(first, Store) and _shares_values(first, pending[-1]):
            second = pending.pop()
            assert isinstance(second, Store)
            _stores(k, (first, second))
        else:
            emit_statement(k, first)


# Loops


def _for(k: KernelContext, stmt: For) -> None:
    if isinstance(k, DeviceContext) and stmt.kind in get_args(GpuAxis):
        emit_axis(k, stmt, emit_statement)
        return
    if isinstance(k, HostContext) and is_launch(stmt):
        emit_launch(k, stmt)
        return
    if stmt.kind in get_args(GpuAxis):
        raise CodegenError(
            f"loop {stmt.var} is bound to {stmt.kind}, an axis of a GPU, which a CPU does not have; parallelize it "
            f"instead"
        )
    extent = k.ix.resolve(stmt.extent)
    count = as_int(extent)
    if count is not None and (count <= 1 or stmt.kind == "unrolled"):
        _unrolled(k, stmt, count)
    elif stmt.kind == "vectorized" and count is not None and not k.is_checked:
        _vectorized(k, stmt, count)
    elif stmt.kind == "parallel" and not k.in_parallel and not k.lanes:
        emit_parallel(k, stmt, emit_statement)
    elif k.lanes and k.ix.varies(extent):
        _serial_per_lane(k, stmt)
    else:
        _serial(k, stmt)


def _unrolled(k: KernelContext, stmt: For, count: int) -> None:
    for value in range(count):
        with k.ix.fixed(stmt.var, value):
            emit_statement(k, stmt.body)


def _vectorized(k: KernelContext, stmt: For, count: int) -> None:
    if k.lanes:
        _unrolled(k, stmt, count)
        return
    if count > MAX_LANES:
        raise CodegenError(f"loop {stmt.var} is vectorized over {count} lanes; split it, {MAX_LANES} is the limit")
    k.e.comment(f"for {stmt.var} in range({count}), vectorized")
    with k.ix.scope(), k.ix.bound(stmt.var, lane_numbers(count), (0, count - 1)), k.vectorized(stmt.var, count):
        emit_statement(k, stmt.body)
    k.values.clear()


def _serial(k: KernelContext, stmt: For) -> None:
    k.e.comment(f"for {stmt.var} in range({stmt.extent})")
    count_loop(k, stmt, int_const(0), emit_index(k, stmt.extent), lambda: emit_statement(k, stmt.body))


def _serial_per_lane(k: KernelContext, stmt: For) -> None:
    """Loop whose extent varies over lanes: run to the largest extent, with finished lanes masked off."""
    e = k.e
    extents = emit_index(k, stmt.extent)
    if k.mask is not None:
        extents = e.select(k.mask, extents, int_const(0))
    largest = e.call(f"llvm.vector.reduce.smax.{mangle('i64', extents.lanes)}", [extents], "i64", 0, "largest")

    def body() -> None:
        with k.masked(e.icmp("slt", k.ix.variables[stmt.var].value, extents), some_active=True):
            emit_statement(k, stmt.body)

    count_loop(k, stmt, int_const(0), largest, body)


# Stores


def _stores(k: KernelContext, stmts: Sequence[Store]) -> None:
    """Emit independent stores: all values first, so that common subexpressions and loads are shared."""
    k.values.clear()
    for stmt in stmts:
        emit_bounds_check(k, stmt.buffer, stmt.indices)
    accesses = [memory.classify_access(k, stmt.buffer, stmt.indices) for stmt in stmts]
    values = [emit_value(k, stmt.value) for stmt in stmts]
    for stmt, access, value in zip(stmts, accesses, values, strict=True):
        memory.store(k, access, value, nontemporal=stmt.nontemporal, is_rounded=is_rounded(stmt.value))


def _shares_values(first: Store, second: Stmt) -> bool:
    """Whether two stores have a common subexpression, and neither accesses the buffer that the other writes."""
    if not isinstance(second, Store) or first.combine is not None or second.combine is not None:
        return False
    if first.buffer is second.buffer or "local" in (first.buffer.scope, second.buffer.scope):
        return False
    if any(load.buffer in (first.buffer, second.buffer) for load in (*loads(first), *loads(second))):
        return False
    first_values = set(map(id, walk_values(first.value)))
    return any(
        id(value) in first_values for value in walk_values(second.value) if not isinstance(value, Literal | Load)
    )


def _store(k: KernelContext, stmt: Store) -> None:
    if stmt.combine is None:
        _stores(k, (stmt,))
        return
    k.values.clear()
    emit_bounds_check(k, stmt.buffer, stmt.indices)
    access = memory.classify_access(k, stmt.buffer, stmt.indices)
    if not k.lanes:
        _combine_per_lane(k, stmt, access)
    elif access.kind == "uniform":
        _combine_horizontally(k, stmt, access)
    elif access.stride is not None and as_int(access.stride):
        _combine_per_lane(k, stmt, access)
    else:
        _combine_lane_by_lane(k, stmt, access)


def _combine_per_lane(k: KernelContext, stmt: Store, access: Access) -> None:
    """Combine each lane into its own element."""
    old = memory.load(k, access)
    memory.store(k, access, _updated_element(k, stmt, old))


def _updated_element(k: KernelContext, stmt: Store, old: Val) -> Val:
    value, dtype = stmt.value, stmt.buffer.dtype
    assert stmt.combine is not None
    if stmt.combine == "add" and isinstance(value, Binary) and value.op == "mul" and dtypes.is_float(dtype):
        return k.e.fma(emit_value(k, value.a), emit_value(k, value.b), old)
    if (
        stmt.combine == "add"
        and isinstance(value, Intrinsic)
        and value.name == DOT2_PACKED_BF16
        and _is_zero(value.args[0])
    ):
        return emit_dot2_bf16(k, value, emit_value, old)
    return scalars.combine(k.e, stmt.combine, dtype, old, emit_value(k, value))


def _is_zero(value: Value) -> bool:
    return isinstance(value, Literal) and value.value == 0


def _combine_horizontally(k: KernelContext, stmt: Store, access: Access) -> None:
    """Combine all lanes into one element, by a horizontal reduction."""
    assert stmt.combine is not None
    dtype = stmt.buffer.dtype
    value = k.e.splat(emit_value(k, stmt.value), k.lanes)
    if k.mask is not None:
        value = k.e.select(k.mask, value, scalars.identity(stmt.combine, dtype))
    total = scalars.reduce_lanes(k.e, stmt.combine, dtype, value)
    old = memory.load(k, access)
    memory.store(k, access, scalars.combine(k.e, stmt.combine, dtype, old, total))


def _combine_lane_by_lane(k: KernelContext, stmt: Store, access: Access) -> None:
    """Combine lanes one after the other, as several lanes may update one element."""
    assert stmt.combine is not None
    e = k.e
    values = e.splat(emit_value(k, stmt.value), k.lanes)
    offsets = e.splat(k.ix.value(access.offset), k.lanes)
    base, elem = k.ix.bases[stmt.buffer].pointer, access.elem
    for lane in range(k.lanes):
        active = memory.lane_is_active(k, lane)
        lane_done = e.fresh("lane_done")
        if active is not TRUE:
            lane_active = e.fresh("lane")
            e.branch_if(active, lane_active, lane_done)
            e.start(lane_active)
        pointer = e.op(f"getelementptr {elem}, {base}, {e.extract(offsets, lane)}", "ptr", 0, "lane_at")
        memory.combine_at(k, pointer, access, stmt.combine, e.extract(values, lane))
        if active is not TRUE:
            e.branch(lane_done)
            e.start(lane_done)
    memory.forget_overlapping(k, stmt.buffer)


# Conditions, symbols, checks


def _if(k: KernelContext, stmt: IfThenElse) -> None:
    k.values.clear()
    cond = emit_value(k, stmt.cond)
    if cond.text in ("true", "false"):
        chosen = stmt.then if cond.text == "true" else stmt.other
        if chosen is not None:
            emit_statement(k, chosen)
    elif cond.lanes:
        _if_lanes(k, cond, stmt)
    else:
        branch(k, cond, lambda: emit_statement(k, stmt.then), _optional(k, stmt.other))


def _optional(k: KernelContext, stmt: Stmt | None) -> Callable[[], None] | None:
    return None if stmt is None else lambda: emit_statement(k, stmt)


def _if_lanes(k: KernelContext, cond: Val, stmt: IfThenElse) -> None:
    """Emit both sides under masks: without a branch where running a side with all lanes inactive is harmless."""
    if stmt.other is None and _is_safe_when_inactive(k, stmt.then):
        with k.active(cond):
            emit_statement(k, stmt.then)
        return
    sides = [(cond, stmt.then), (k.e.binary("xor", cond, TRUE, "not"), stmt.other)]
    for side, body in sides:
        if body is not None:
            branch(k, k.e.any_lane(k.when_active(side)), partial(_masked, k, side, body))


def _is_safe_when_inactive(k: KernelContext, stmt: Stmt) -> bool:
    """Whether a statement has no effect and no invalid load with all lanes inactive: all accesses are masked vectors,
    or elements of local buffers that are only combined into."""
    if isinstance(stmt, Seq):
        return all(_is_safe_when_inactive(k, s) for s in stmt.stmts)
    if not isinstance(stmt, Store):
        return False
    store_kind = memory.classify_access(k, stmt.buffer, stmt.indices).kind
    if store_kind != "contiguous" and not (store_kind == "uniform" and stmt.combine and stmt.buffer.scope == "local"):
        return False
    return all(
        load.buffer.scope == "local" or memory.classify_access(k, load.buffer, load.indices).kind == "contiguous"
        for load in loads(stmt)
    )


def _masked(k: KernelContext, cond: Val, body: Stmt) -> None:
    with k.masked(cond, some_active=True):
        emit_statement(k, body)


def _let_index(k: KernelContext, stmt: LetIndex) -> None:
    """Bind a variable to loaded data. Its declared bounds are ignored, so that checks of the data are not folded
    away."""
    k.values.clear()
    if isinstance(stmt.value, IndexValue) and not k.is_checked:
        _let_expression(k, stmt, k.ix.resolve(stmt.value.index))
        return
    value = convert(k.e, emit_value(k, stmt.value), stmt.value.dtype, "int64")
    with k.ix.scope(), k.ix.bound(stmt.var, value, (None, None), is_data=True):
        emit_statement(k, stmt.body)
    k.loads = {key: loaded for key, loaded in k.loads.items() if stmt.var not in key[1].free_vars()}


def _let_expression(k: KernelContext, stmt: LetIndex, expr: SymExpr) -> None:
    """Bind a variable to an index expression, with the interval of the expression."""
    is_data = any(k.ix.variables[v].is_data for v in expr.free_vars())
    with k.ix.scope(), k.ix.bound(stmt.var, k.ix.value(expr), k.ix.bounds(expr), is_data=is_data):
        emit_statement(k, stmt.body)
    k.loads = {key: loaded for key, loaded in k.loads.items() if stmt.var not in key[1].free_vars()}


def _check(k: KernelContext, stmt: Check) -> None:
    k.values.clear()
    status = k.checks.setdefault(stmt.message, len(k.checks)) + 1
    failed = k.e.binary("xor", emit_value(k, stmt.cond), TRUE, "failed")
    k.fail_if(k.e.any_lane(k.when_active(failed)), status)


def _prefetch(k: KernelContext, stmt: Prefetch) -> None:
    if k.lanes:
        raise CodegenError(f"a prefetch of {stmt.buffer.name} inside of a vectorized loop; move it out of the loop")
    address = k.ix.pointer(stmt.buffer, memory.classify_access(k, stmt.buffer, stmt.indices).base)
    memory.prefetch(k, address, stmt.cache)


def _barrier(k: KernelContext, stmt: Barrier) -> None:
    """Emit a barrier on a GPU; on a CPU nothing, as one thread runs the statements around a barrier."""
    if isinstance(k, DeviceContext):
        emit_barrier(k)


# Workspaces


def _allocate(k: KernelContext, stmt: Allocate) -> None:
    buffer = stmt.buffer
    if isinstance(k, DeviceContext):
        _with_base(k, buffer, allocate_on_device(k, stmt), stmt.body)
        return
    itemsize = dtypes.itemsize(buffer.dtype)
    if k.lanes:
        k.per_lane.add(buffer)
    elements = product(buffer.shape) * max(k.lanes, 1)
    count = as_int(elements)
    if buffer.scope == "local" and count is not None and count * itemsize <= _MAX_STACK_BYTES:
        pointer = k.stack_array(buffer.name, memory_elem(buffer.dtype), count)
        if k.is_guarded:
            _poison(k, pointer, int_const(count * itemsize))
        _with_base(k, buffer, pointer, stmt.body)
        return
    num_bytes = emit_index(k, elements * itemsize)
    pointer = k.e.call("relaxlite_scratch_alloc", [num_bytes], "ptr", 0, buffer.name)
    k.fail_if(k.e.icmp("eq", pointer, Val("null", "ptr")), OUT_OF_MEMORY)
    if k.is_guarded:
        _poison(k, pointer, num_bytes)
    k.scratch.append(pointer)
    _with_base(k, buffer, pointer, stmt.body)
    k.scratch.pop()
    k.e.call_void("relaxlite_scratch_free", [pointer])


def _poison(k: KernelContext, pointer: Val, num_bytes: Val) -> None:
    """Fill memory with 0xFF bytes, NaN in every float dtype, so that uninitialized reads show."""
    k.e.call_void("llvm.memset.p0.i64", [pointer, int_const(0xFF, "i8"), num_bytes, FALSE])


def _with_base(k: KernelContext, buffer: Buffer, pointer: Val, body: Stmt) -> None:
    with k.ix.scope() as depth:
        k.ix.bases[buffer] = BufferBase(pointer, depth, memory_elem(buffer.dtype))
        emit_statement(k, body)
        del k.ix.bases[buffer]
    k.per_lane.discard(buffer)
    k.loads = {key: value for key, value in k.loads.items() if key[0] is not buffer}


_EMITTERS: Mapping[type, Callable[[KernelContext, Any], None]] = {
    Seq: _seq,
    For: _for,
    Store: _store,
    LetIndex: _let_index,
    IfThenElse: _if,
    Check: _check,
    Allocate: _allocate,
    Prefetch: _prefetch,
    Barrier: _barrier,
    CallLibrary: emit_library_call,
}
