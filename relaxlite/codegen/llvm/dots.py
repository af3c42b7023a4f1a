"""Dot products of a few narrow elements per lane (ir/intrinsics.py: dp4a, dot2), by the target's instructions.

Adjacent operands of one lane, four bytes or two 16-bit numbers, are loaded as one packed int32: a vector for an operand
that varies over the lanes, a broadcast scalar for a uniform one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from relaxlite.codegen.llvm import maddubs, memory
from relaxlite.codegen.llvm.context import Access, KernelContext
from relaxlite.codegen.llvm.emitter import Emitter, Val, int_const, mangle
from relaxlite.codegen.llvm.types import convert, from_memory
from relaxlite.codegen.llvm.widths import widest_lanes
from relaxlite.ir.intrinsics import DOT_PRODUCTS, DotProduct
from relaxlite.ir.program import Intrinsic, Load, Value
from relaxlite.ir.symbolic import as_int
from relaxlite.target import Target


def emit_dot(k: KernelContext, value: Intrinsic, emit_value: Callable[[KernelContext, Value], Val]) -> Val:
    """Emit accumulator plus dot product of separate elements, by the target's instruction or by widened
    multiply-adds."""
    e, dot = k.e, DOT_PRODUCTS[value.name]
    accumulator, *factors = value.args
    sides = factors[: dot.length], factors[dot.length :]
    packed = [load_packed(k, side) for side in sides]
    if packed[0] is not None and packed[1] is not None:
        a, b = packed[0], packed[1]
        c = emit_value(k, accumulator)
        width = _instruction_lanes(e.target, value.name, k.lanes)
        if width and (a.lanes or b.lanes):
            return _by_instruction(k, value.name, width, c, a, b)
        return _portable(e, dot, c, _elements(e, a, dot.a, dot), _elements(e, b, dot.b, dot))
    c = emit_value(k, accumulator)
    a_parts, b_parts = ([emit_value(k, x) for x in side] for side in sides)
    return _portable(
        e,
        dot,
        c,
        [convert(e, x, dot.a, dot.total) for x in a_parts],
        [convert(e, x, dot.b, dot.total) for x in b_parts],
    )


def emit_dp4a(k: KernelContext, value: Intrinsic, emit_value: Callable[[KernelContext, Value], Val]) -> Val:
    """Emit dp4a of packed int32: by VNNI, by pmaddubsw (maddubs.py), or by widened multiply-adds."""
    if width := maddubs.maddubs_lanes(k.e.target, k.lanes):
        return maddubs.emit_dp4a_chain(k, value, emit_value, width)
    c, a, b = (emit_value(k, x) for x in value.args[:3])
    name = "dot4_u8s8"
    dot, width = DOT_PRODUCTS[name], _instruction_lanes(k.e.target, name, k.lanes)
    if width and (a.lanes or b.lanes):
        return _by_instruction(k, name, width, c, a, b)
    return _portable(k.e, dot, c, _elements(k.e, a, dot.a, dot), _elements(k.e, b, dot.b, dot))


def emit_dot2_bf16(
    k: KernelContext, value: Intrinsic, emit_value: Callable[[KernelContext, Value], Val], total: Val | None = None
) -> Val:
    """Emit dot2_bf16 of packed int32, added to `total`, or to the intrinsic's own accumulator where that is None."""
    c = emit_value(k, value.args[0]) if total is None else total
    a, b = (emit_value(k, x) for x in value.args[1:])
    return _dot2(k, "dot2_bf16", c, a, b)


def _dot2(k: KernelContext, name: str, c: Val, a: Val, b: Val) -> Val:
    """Emit a dot product of two 16-bit numbers per lane."""
    dot, width = DOT_PRODUCTS[name], _instruction_lanes(k.e.target, name, k.lanes)
    if width and (a.lanes or b.lanes):
        return _by_instruction(k, name, width, c, a, b)
    return _portable(k.e, dot, c, _elements(k.e, a, dot.a, dot), _elements(k.e, b, dot.b, dot))


def emit_dot2_i16(k: KernelContext, value: Intrinsic, emit_value: Callable[[KernelContext, Value], Val]) -> Val:
    """Emit dot2_i16 of packed int32."""
    c, a, b = (emit_value(k, x) for x in value.args)
    return _dot2(k, "dot2_i16", c, a, b)


def emit_packed_bytes(k: KernelContext, value: Intrinsic, emit_value: Callable[[KernelContext, Value], Val]) -> Val:
    """Emit four bytes as one packed int32: by one load, or by shifts and ors."""
    packed = load_packed(k, value.args)
    if packed is not None:
        return packed
    e, total = k.e, Val("0", "i32")
    for n, part in enumerate(value.args):
        byte = e.cast("zext", emit_value(k, part), "i32")
        total = e.binary("or", total, e.binary("shl", byte, int_const(8 * n, "i32")) if n else byte)
    return total


def _by_instruction(k: KernelContext, name: str, width: int, c: Val, a: Val, b: Val) -> Val:
    e = k.e
    operands = [e.cast("bitcast", e.splat(c, k.lanes), "i32"), e.splat(a, k.lanes), e.splat(b, k.lanes)]
    result = e.by_subvectors(operands, width, lambda *parts: _INSTRUCTIONS[name](e, *parts))
    return e.cast("bitcast", result, c.elem)


def load_packed(k: KernelContext, elements: Sequence[Value]) -> Val | None:
    """Load the elements of one operand as one packed int32 per lane; None where they are not adjacent in memory."""
    accesses = [memory.classify_access(k, x.buffer, x.indices) for x in elements if isinstance(x, Load)]
    if len(accesses) != len(elements) or any(access.buffer is not accesses[0].buffer for access in accesses):
        return None
    first = accesses[0]
    if any(as_int(access.offset - first.offset) != n for n, access in enumerate(accesses)):
        return None
    if first.kind == "uniform" and (k.mask is None or k.some_active):
        return _load_uniform(k, first)
    stride = None if first.stride is None else as_int(first.stride)
    if first.kind == "strided" and stride == len(elements):
        return _load_lanes(k, first)
    return None


def _load_uniform(k: KernelContext, access: Access) -> Val:
    key = (access.buffer, access.offset, 0, "dot")
    if key not in k.loads:
        pointer = k.ix.pointer(access.buffer, access.base)
        k.loads[key] = k.e.op(f"load i32, {pointer}, align {access.align}", "i32", 0, access.buffer.name)
    return k.loads[key]


def _load_lanes(k: KernelContext, access: Access) -> Val:
    e, lanes = k.e, k.lanes
    key = (access.buffer, access.offset, lanes, "dot" + (k.mask.text if k.mask is not None else ""))
    if key in k.loads:
        return k.loads[key]
    pointer = k.ix.pointer(access.buffer, access.base)
    if k.mask is None:
        result = e.op(f"load <{lanes} x i32>, {pointer}, align {access.align}", "i32", lanes, access.buffer.name)
    else:
        arguments = [pointer, int_const(access.align, "i32"), k.mask, e.splat(int_const(0, "i32"), lanes)]
        result = e.call(f"llvm.masked.load.{mangle('i32', lanes)}.p0", arguments, "i32", lanes, access.buffer.name)
    k.loads[key] = result
    return result


def _elements(e: Emitter, packed: Val, dtype: str, dot: DotProduct) -> list[Val]:
    """Unpack int32 lanes, lowest bits first, and convert each part to the accumulator's type."""
    bits = 32 // dot.length
    parts = []
    for n in range(dot.length):
        shifted = e.binary("lshr", packed, int_const(bits * n, "i32")) if n else packed
        raw = e.cast("trunc", shifted, f"i{bits}")
        parts.append(convert(e, from_memory(e, raw, dtype), dtype, dot.total))
    return parts


def _portable(e: Emitter, dot: DotProduct, total: Val, a: Sequence[Val], b: Sequence[Val]) -> Val:
    """Emit multiply-adds in the reference's order of summation: the last pair first."""
    for x, y in reversed(list(zip(a, b, strict=True))):
        is_float = dot.total == "float32"
        total = e.fma(x, y, total) if is_float else e.binary("add", total, e.binary("mul", x, y))
    return total


def _instruction_lanes(target: Target, name: str, lanes: int) -> int:
    """Number of 32-bit lanes of the target's widest instruction that divides `lanes`; 0 where it has none."""
    if name == "dot2_bf16":
        has_512 = target.has("avx512bf16")
        supported = {512: has_512, 256: has_512 and target.has("avx512vl")}
        supported[128] = supported[256]
    elif name == "dot2_i16":
        supported = {bits: target.has(instructions.feature) for bits, instructions in maddubs.MADD_INTRINSICS.items()}
    else:
        has_512 = target.has("avx512vnni")
        supported = {512: has_512, 256: (has_512 and target.has("avx512vl")) or target.has("avxvnni")}
        supported[128] = supported[256]
    return widest_lanes(target, lanes, supported.__getitem__)


def _vpdpbusd(e: Emitter, c: Val, a: Val, b: Val) -> Val:
    operands = [e.op(f"bitcast {x} to <{4 * x.lanes} x i8>", "i8", 4 * x.lanes) for x in (a, b)]
    return e.call(f"llvm.x86.avx512.vpdpbusd.{32 * c.lanes}", [c, *operands], "i32", c.lanes, "dot")


def _vdpbf16ps(e: Emitter, c: Val, a: Val, b: Val) -> Val:
    operands = [e.op(f"bitcast {x} to <{2 * x.lanes} x bfloat>", "bfloat", 2 * x.lanes) for x in (a, b)]
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * c.lanes}"
    result = e.call(name, [e.cast("bitcast", c, "float"), *operands], "float", c.lanes, "dot")
    return e.cast("bitcast", result, "i32")


def _pmaddwd(e: Emitter, c: Val, a: Val, b: Val) -> Val:
    operands = [e.op(f"bitcast {x} to <{2 * x.lanes} x i16>", "i16", 2 * x.lanes) for x in (a, b)]
    return e.binary("add", c, e.call(maddubs.MADD_INTRINSICS[32 * c.lanes].maddwd, operands, "i32", c.lanes, "dot"))


_INSTRUCTIONS: Mapping[str, Callable[..., Val]] = {
    "dot4_u8s8": _vpdpbusd,
    "dot2_i16": _pmaddwd,
    "dot2_bf16": _vdpbf16ps,
}
