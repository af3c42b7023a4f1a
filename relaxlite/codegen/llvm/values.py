"""Lower value expressions of tensor programs.

A value is emitted as a scalar unless it varies over lanes. `Select` is lazy: a uniform condition becomes a branch where
a side contains a load, a varying one becomes a mask for the loads of both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from relaxlite.codegen.llvm import memory, scalars
from relaxlite.codegen.llvm.bfloat16 import emit_bf16_pair, emit_round_to_bf16, is_rounded
from relaxlite.codegen.llvm.bit_fields import bit_field, field_to_float
from relaxlite.codegen.llvm.checked import emit_index
from relaxlite.codegen.llvm.context import OUT_OF_BOUNDS, KernelContext
from relaxlite.codegen.llvm.dots import emit_dot, emit_dot2_bf16, emit_dot2_i16, emit_dp4a, emit_packed_bytes
from relaxlite.codegen.llvm.emitter import FALSE, TRUE, Val
from relaxlite.codegen.llvm.extern_call import emit_library_present
from relaxlite.codegen.llvm.gpu.warp import emit_shuffle_xor
from relaxlite.codegen.llvm.indices import split_lane
from relaxlite.codegen.llvm.lookup import emit_lookup
from relaxlite.codegen.llvm.nearest import emit_nearest
from relaxlite.codegen.llvm.types import convert, from_memory, literal, memory_elem, to_memory
from relaxlite.dtypes import DType
from relaxlite.errors import CodegenError
from relaxlite.ir.intrinsics import (
    BITCASTS,
    DOT2_PACKED_BF16,
    DOT2_PACKED_INT16,
    DOT4_PACKED_U8S8,
    DOT_PRODUCTS,
    LOOKUP,
    NARROW,
    PACK_BF16,
    PACK_BYTES,
    ROUND_TO_INT32,
    SHUFFLE_XOR,
    type_error,
)
from relaxlite.ir.program import (
    Binary,
    Buffer,
    Cast,
    Compare,
    IndexValue,
    Intrinsic,
    LibraryFound,
    Literal,
    Load,
    Select,
    Unary,
    Value,
)
from relaxlite.ir.symbolic import SymExpr, as_int, sym

_MIRRORED = {"eq": "eq", "ne": "ne", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_SIGNED = {"eq": "eq", "ne": "ne", "lt": "slt", "le": "sle", "gt": "sgt", "ge": "sge"}


def emit_value(k: KernelContext, value: Value) -> Val:
    """Emit a value in register form; each distinct value of a statement is computed once."""
    known = k.values.get(value)
    if known is None:
        known = k.values[value] = _EMITTERS[type(value)](k, value)
    return known


def _literal(k: KernelContext, value: Literal) -> Val:
    return literal(value.value, value.dtype)


def _load(k: KernelContext, value: Load) -> Val:
    emit_bounds_check(k, value.buffer, value.indices)
    return memory.load(k, memory.classify_access(k, value.buffer, value.indices))


def _unary(k: KernelContext, value: Unary) -> Val:
    return scalars.unary(k.e, value.op, value.x.dtype, emit_value(k, value.x))


def _binary(k: KernelContext, value: Binary) -> Val:
    a, b = emit_value(k, value.a), emit_value(k, value.b)
    return scalars.binary(k.e, value.op, value.dtype, a, b)


def _cast(k: KernelContext, value: Cast) -> Val:
    field = bit_field(k, value.x) if value.dtype == "float32" else None
    if field is not None:
        return field_to_float(k.e, emit_value(k, field.packed), field)
    return convert(k.e, emit_value(k, value.x), value.x.dtype, value.dtype)


def _index(k: KernelContext, value: IndexValue) -> Val:
    return convert(k.e, emit_index(k, value.index), "int64", value.dtype)


def _intrinsic(k: KernelContext, value: Intrinsic) -> Val:
    problem = type_error(value.name, tuple(arg.dtype for arg in value.args), value.dtype)
    if problem is not None:
        raise CodegenError(problem)
    for arg in value.args if k.is_guarded else ():
        if isinstance(arg, Load):  # several loads may be merged to one access, which is not guarded
            emit_bounds_check(k, arg.buffer, arg.indices)
    if value.name in DOT_PRODUCTS:
        return emit_dot(k, value, emit_value)
    if value.name == DOT4_PACKED_U8S8:
        return emit_dp4a(k, value, emit_value)
    if value.name == PACK_BYTES:
        return emit_packed_bytes(k, value, emit_value)
    if value.name == DOT2_PACKED_BF16:
        return emit_dot2_bf16(k, value, emit_value)
    if value.name == DOT2_PACKED_INT16:
        return emit_dot2_i16(k, value, emit_value)
    if value.name == PACK_BF16:
        return emit_bf16_pair(k, value, emit_value)
    if value.name == ROUND_TO_INT32:
        return emit_nearest(k, value, emit_value)
    if value.name == NARROW:
        return emit_round_to_bf16(k, value, emit_value)
    if value.name == SHUFFLE_XOR:
        return emit_shuffle_xor(k, *(emit_value(k, arg) for arg in value.args))
    if value.name == LOOKUP:
        return emit_lookup(k, value, emit_value)
    if value.name in BITCASTS.values():
        return _bitcast(k, value.args[0], value.dtype)
    a, b, c = (emit_value(k, arg) for arg in value.args)
    return k.e.fma(a, b, c)


def _bitcast(k: KernelContext, value: Value, dtype: DType) -> Val:
    """Reinterpret bits, in the form that values have in memory."""
    raw = to_memory(k.e, emit_value(k, value), value.dtype, is_rounded=is_rounded(value))
    if memory_elem(dtype) != memory_elem(value.dtype):
        raw = k.e.cast("bitcast", raw, memory_elem(dtype))
    return from_memory(k.e, raw, dtype)


def _compare(k: KernelContext, value: Compare) -> Val:
    if isinstance(value.a, IndexValue) and isinstance(value.b, IndexValue) and not k.is_checked:
        return _compare_indices(k, value.op, value.a.index, value.b.index)
    a, b = emit_value(k, value.a), emit_value(k, value.b)
    return scalars.compare(k.e, value.op, value.a.dtype, a, b)


def _compare_indices(k: KernelContext, op: str, a: SymExpr, b: SymExpr) -> Val:
    """Compare symbolic integers: folded by intervals, or by a hoisted lane mask where the difference is +-lane +
    base."""
    difference = k.ix.resolve(b - a)
    decided = _decide(op, *k.ix.bounds(difference))
    if decided is not None:
        return TRUE if decided else FALSE
    varying = {v: k.ix.variables[v].value.lanes > 0 for v in difference.free_vars()}
    parts = split_lane(difference, k.lane, varying) if k.lane is not None and any(varying.values()) else None
    stride = as_int(parts[1]) if parts is not None else None
    if parts is not None and stride in (1, -1):
        # a < b  <=>  0 < base - lane  <=>  lane < base, and mirrored for stride 1
        base = parts[0] if stride == -1 else -parts[0]
        predicate = _SIGNED[op if stride == -1 else _MIRRORED[op]]
        return k.ix.lane_mask(predicate, base, k.lanes)
    return k.e.icmp(_SIGNED[op], k.ix.value(a), k.ix.value(b))


def emit_bounds_check(k: KernelContext, buffer: Buffer, indices: tuple[SymExpr, ...]) -> None:
    """Emit bounds checks of an access in a guarded kernel."""
    if not k.is_guarded:
        return
    for index_expr, size in zip(indices, buffer.shape, strict=True):
        for in_bounds in (_compare_indices(k, "le", sym(0), index_expr), _compare_indices(k, "lt", index_expr, size)):
            if in_bounds is not TRUE:
                k.fail_if(k.e.binary("xor", in_bounds, TRUE, "outside"), OUT_OF_BOUNDS)


def _decide(op: str, lower: int | None, upper: int | None) -> bool | None:
    """Truth of `a op b` for b - a in [lower, upper]; None where that is undecided."""
    if lower is not None and (lower > 0 or (lower == 0 and op in ("le", "gt"))):
        return op in ("lt", "le", "ne")
    if upper is not None and (upper < 0 or (upper == 0 and op in ("ge", "lt"))):
        return op in ("gt", "ge", "ne")
    if lower == upper == 0:
        return op in ("eq", "le", "ge")
    return None


def _select(k: KernelContext, value: Select) -> Val:
    cond = emit_value(k, value.cond)
    if cond.text in ("true", "false"):
        return emit_value(k, value.then if cond.text == "true" else value.other)
    if not (has_load(k, value.then) or has_load(k, value.other)):
        return k.e.select(cond, emit_value(k, value.then), emit_value(k, value.other))
    if cond.lanes:
        then = _under(k, cond, value.then)
        other = _under(k, k.e.binary("xor", cond, TRUE, "not"), value.other)
        return k.e.select(cond, then, other)

    def side(arm: Value) -> Callable[[], Val]:
        def emit() -> Val:
            with k.branch():
                return emit_value(k, arm)

        return emit

    return k.e.if_value(cond, side(value.then), side(value.other), "chosen")


def _under(k: KernelContext, cond: Val, value: Value) -> Val:
    """Emit a value whose loads are masked by `cond`."""
    if not has_load(k, value):
        return emit_value(k, value)
    with k.masked(cond):
        return emit_value(k, value)


def has_load(k: KernelContext, value: Value) -> bool:
    """Whether a value contains a load; memoized."""
    if value not in k.contains_load:
        k.contains_load[value] = isinstance(value, Load) or any(has_load(k, operand) for operand in operands(value))
    return k.contains_load[value]


def operands(value: Value) -> tuple[Value, ...]:
    """Operands of a value."""
    if isinstance(value, Unary | Cast):
        return (value.x,)
    if isinstance(value, Binary | Compare):
        return value.a, value.b
    if isinstance(value, Select):
        return value.cond, value.then, value.other
    return value.args if isinstance(value, Intrinsic) else ()


_EMITTERS: Mapping[type, Callable[[KernelContext, Any], Val]] = {
    Literal: _literal,
    Load: _load,
    Unary: _unary,
    Binary: _binary,
    Compare: _compare,
    Select: _select,
    Cast: _cast,
    IndexValue: _index,
    Intrinsic: _intrinsic,
    LibraryFound: emit_library_present,
}
