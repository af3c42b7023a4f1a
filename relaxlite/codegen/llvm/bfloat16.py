"""Rounding of float32 to bfloat16, and pairs of bfloat16 in one int32 (ir/intrinsics.py: NARROW, PAIR)."""

from __future__ import annotations

from collections.abc import Callable

from relaxlite.codegen.llvm.context import KernelContext
from relaxlite.codegen.llvm.dots import load_packed
from relaxlite.codegen.llvm.emitter import Emitter, Val, int_const
from relaxlite.codegen.llvm.types import convert, from_memory, to_memory
from relaxlite.codegen.llvm.widths import widest_lanes
from relaxlite.ir.intrinsics import NARROW
from relaxlite.ir.program import Cast, Intrinsic, Literal, Load, Select, Value
from relaxlite.ir.program_visitor import value_children

_CONVERT = "llvm.x86.avx512bf16"
_LANES = 16  # of a 512-bit vector of float32; two are rounded to one vector of pairs


def emit_round_to_bf16(k: KernelContext, value: Intrinsic, emit_value: Callable[[KernelContext, Value], Val]) -> Val:
    """Round float32 to bfloat16, kept as float32 in the register (types.py), by vcvtneps2bf16 where the target has
    it."""
    e, x = k.e, emit_value(k, value.args[0])
    has_avx512bf16 = e.target.has("avx512bf16")
    supported = {512: has_avx512bf16, 256: has_avx512bf16 and e.target.has("avx512vl"), 128: False}
    width = widest_lanes(e.target, x.lanes, supported.__getitem__)
    if not width:
        return convert(e, x, "float32", "bfloat16")

    def by_instruction(part: Val) -> Val:
        result = e.call(f"{_CONVERT}.cvtneps2bf16.{32 * width}", [part], "bfloat", width, "narrow")
        return from_memory(e, e.cast("bitcast", result, "i16"), "bfloat16")

    return e.by_subvectors([x], width, by_instruction)


def emit_bf16_pair(k: KernelContext, value: Intrinsic, emit_value: Callable[[KernelContext, Value], Val]) -> Val:
    """Emit the bits of two bfloat16 as one int32: by one load, by vcvtne2ps2bf16, or by shift and or."""
    packed = load_packed(k, value.args)
    if packed is not None:
        return packed
    e, kinds = k.e, {part.name if isinstance(part, Intrinsic) else "" for part in value.args}
    if kinds == {NARROW} and k.lanes == _LANES and e.target.has("avx512bf16"):
        low, high = (e.splat(emit_value(k, x), k.lanes) for part in value.args for x in value_children(part))
        return _rounded_pairs(e, low, high)
    low, high = (
        e.cast("zext", to_memory(e, emit_value(k, x), "bfloat16", is_rounded=is_rounded(x)), "i32") for x in value.args
    )
    return e.binary("or", low, e.binary("shl", high, int_const(16, "i32")))


def is_rounded(value: Value) -> bool:
    """Whether a 16-bit float is already rounded in its float32 register, which it is not after arithmetic."""
    if isinstance(value, Select):
        return is_rounded(value.then) and is_rounded(value.other)
    if isinstance(value, Cast):
        return value.x.dtype != value.dtype or is_rounded(value.x)
    return isinstance(value, Load | Literal) or (isinstance(value, Intrinsic) and value.name == NARROW)


def _rounded_pairs(e: Emitter, low: Val, high: Val) -> Val:
    """Round two vectors and interleave their lanes, as the instruction concatenates them."""
    concatenated = e.call(f"{_CONVERT}.cvtne2ps2bf16.512", [high, low], "bfloat", 2 * _LANES, "both")
    lanes = ", ".join(f"i32 {n}, i32 {n + _LANES}" for n in range(_LANES))
    interleaved = e.op(
        f"shufflevector {concatenated}, <{2 * _LANES} x bfloat> poison, <{2 * _LANES} x i32> <{lanes}>",
        "bfloat",
        2 * _LANES,
    )
    return e.op(f"bitcast {interleaved} to <{_LANES} x i32>", "i32", _LANES, "pairs")
