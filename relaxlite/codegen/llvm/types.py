"""LLVM types of dtypes in memory and in registers, and conversions between all of them.

In registers, bool is i1, and float16 and bfloat16 are float32, rounded to nearest even only by stores and casts.
"""

from __future__ import annotations

from relaxlite import dtypes
from relaxlite.codegen.llvm.emitter import Emitter, Val, bits_of, float_const, int_const
from relaxlite.dtypes import DType

_REGISTER = {"bool": "i1", "float16": "float", "bfloat16": "float", "float32": "float", "float64": "double"}
_MEMORY = {"bool": "i8", "float16": "i16", "bfloat16": "i16", "float32": "float", "float64": "double"}
_INT_LIMITS = {
    name: (-(1 << (8 * size - 1)), (1 << (8 * size - 1)) - 1) for size in (1, 2, 4, 8) for name in (f"int{8 * size}",)
}
_INT_LIMITS |= {f"uint{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32, 64)}


def register_elem(dtype: DType) -> str:
    """LLVM type of a dtype in registers."""
    return _REGISTER.get(dtype) or f"i{8 * dtypes.itemsize(dtype)}"


def memory_elem(dtype: DType) -> str:
    """LLVM type of a dtype in memory."""
    return _MEMORY.get(dtype) or f"i{8 * dtypes.itemsize(dtype)}"


def literal(value: float, dtype: DType) -> Val:
    """Constant in register form."""
    if dtype in ("float16", "bfloat16"):
        return float_const(float(dtypes.to_numpy(dtype).type(value)))
    if dtypes.is_float(dtype):
        return float_const(float(value), register_elem(dtype))
    return int_const(int(bool(value)) if dtype == "bool" else int(value), register_elem(dtype))


def from_memory(e: Emitter, raw: Val, dtype: DType) -> Val:
    """Convert a loaded value from memory form to register form."""
    if dtype == "bool":
        return e.icmp("ne", raw, int_const(0, "i8"))
    if dtype == "float16":
        return float16_to_float(e, raw)
    if dtype == "bfloat16":
        return e.cast("bitcast", e.binary("shl", e.cast("zext", raw, "i32"), int_const(16, "i32")), "float")
    return raw


def to_memory(e: Emitter, value: Val, dtype: DType, *, is_rounded: bool = False) -> Val:
    """Convert from register form to memory form. `is_rounded`: the value is known to be representable in the dtype."""
    if dtype == "bool":
        return e.cast("zext", value, "i8")
    if dtype == "float16":
        return float_to_float16(e, value)
    if dtype == "bfloat16":
        return _upper_half(e, e.cast("bitcast", value, "i32")) if is_rounded else float_to_bfloat16(e, value)
    return value


def convert(e: Emitter, x: Val, source: DType, dtype: DType) -> Val:
    """Cast in register form: float to integer truncates and saturates (NaN: 0), to bool tests != 0, integers wrap."""
    if source == dtype:
        return x
    if dtype == "bool":
        return e.fcmp("une", x, e.number(0, x)) if dtypes.is_float(source) else e.icmp("ne", x, int_const(0, x.elem))
    if dtypes.is_float(dtype):
        return _to_float(e, x, source, dtype)
    if dtypes.is_float(source):
        return _float_to_int(e, x, dtype)
    elem = register_elem(dtype)
    if bits_of(elem) < bits_of(x.elem):
        return e.cast("trunc", x, elem)
    return e.cast("sext" if dtypes.is_signed(source) else "zext", x, elem)


def _to_float(e: Emitter, x: Val, source: DType, dtype: DType) -> Val:
    elem = register_elem(dtype)
    if not dtypes.is_float(source):
        x = e.cast("sitofp" if dtypes.is_signed(source) else "uitofp", x, elem)
    elif elem == "double":
        return e.cast("fpext", x, elem)
    elif x.elem == "double":
        x = _round_to_odd(e, x) if dtype != "float32" else e.cast("fptrunc", x, elem)
    if dtype in ("float16", "bfloat16"):
        return from_memory(e, to_memory(e, x, dtype), dtype)
    return x


def _round_to_odd(e: Emitter, x: Val) -> Val:
    """Round float64 to float32 to odd, so that rounding again to 16 bits equals rounding once."""
    near = e.cast("fptrunc", x, "float")
    back = e.cast("fpext", near, "double")
    bits = e.cast("bitcast", near, "i32")
    away = e.fcmp("ogt", e.intrinsic("fabs", back), e.intrinsic("fabs", x))
    bits = e.binary("sub", bits, e.cast("zext", away, "i32"))
    inexact = e.fcmp("one", back, x)
    return e.cast("bitcast", e.binary("or", bits, e.cast("zext", inexact, "i32")), "float")


def _float_to_int(e: Emitter, x: Val, dtype: DType) -> Val:
    """Saturating conversion: clamp to the convertible range, then select the maximum, as fptosi.sat scalarizes on
    x86."""
    elem, (lower, upper) = register_elem(dtype), _INT_LIMITS[dtype]
    signed = dtypes.is_signed(dtype)
    wide = elem if bits_of(elem) >= 32 else "i32"
    x = e.select(e.fcmp("uno", x, x), e.number(0, x), x)
    low = e.number(lower, x)
    x = e.select(e.fcmp("olt", x, low), low, x)
    limit = float(upper + 1)  # a power of two, as the largest integer itself may not be representable
    is_over = e.fcmp("oge", x, e.number(limit, x))
    inside = e.select(is_over, e.number(0, x), x)
    opcode = "fptosi" if signed or bits_of(elem) < 32 else "fptoui"
    result = e.select(is_over, int_const(upper, wide), e.cast(opcode, inside, wide))
    return e.cast("trunc", result, elem)


def float_to_bfloat16(e: Emitter, x: Val) -> Val:
    """float32 to the bits of a bfloat16, keeping denormals, which the hardware instruction flushes (bfloat16.py)."""
    bits = e.cast("bitcast", x, "i32")
    odd = e.binary("and", e.binary("lshr", bits, int_const(16, "i32")), int_const(1, "i32"))
    rounded = e.binary("add", bits, e.binary("add", odd, int_const(0x7FFF, "i32")))
    quiet = e.binary("or", bits, int_const(0x400000, "i32"))
    chosen = e.select(e.fcmp("uno", x, x), quiet, rounded)
    return _upper_half(e, chosen)


def _upper_half(e: Emitter, bits: Val) -> Val:
    return e.cast("trunc", e.binary("lshr", bits, int_const(16, "i32")), "i16")


def float16_to_float(e: Emitter, raw: Val) -> Val:
    """Bits of a float16 to float32, by F16C where the target has it."""
    if e.target.has_fp16_conversion:
        return e.cast("fpext", e.cast("bitcast", raw, "half"), "float")
    wide = e.cast("zext", raw, "i32")
    magnitude = e.binary("shl", e.binary("and", wide, int_const(0x7FFF, "i32")), int_const(13, "i32"))
    scaled = e.fmul(e.cast("bitcast", magnitude, "float"), float_const(2.0**112))  # also normalizes denormals
    is_special = e.icmp("uge", magnitude, int_const(0x0F800000, "i32"))
    special = e.binary("or", magnitude, int_const(0x7F800000, "i32"))
    bits = e.select(is_special, special, e.cast("bitcast", scaled, "i32"))
    sign = e.binary("shl", e.binary("and", wide, int_const(0x8000, "i32")), int_const(16, "i32"))
    return e.cast("bitcast", e.binary("or", bits, sign), "float")


def float_to_float16(e: Emitter, x: Val) -> Val:
    """float32 to the bits of a float16, rounded to nearest even, by F16C where the target has it."""
    if e.target.has_fp16_conversion:
        return e.cast("bitcast", e.cast("fptrunc", x, "half"), "i16")
    bits = e.cast("bitcast", x, "i32")
    magnitude = e.binary("and", bits, int_const(0x7FFFFFFF, "i32"))
    odd = e.binary("and", e.binary("lshr", magnitude, int_const(13, "i32")), int_const(1, "i32"))
    rounded = e.binary("add", magnitude, e.binary("add", odd, int_const(0xFFF, "i32")))
    normal = e.binary("lshr", e.binary("sub", rounded, int_const(112 << 23, "i32")), int_const(13, "i32"))
    # Bits of a denormal result: adding 0.5 rounds at the right bit.
    lifted = e.fadd(e.cast("bitcast", magnitude, "float"), float_const(0.5))
    denormal = e.binary("sub", e.cast("bitcast", lifted, "i32"), int_const(126 << 23, "i32"))
    result = e.select(e.icmp("ult", magnitude, int_const(113 << 23, "i32")), denormal, normal)
    result = e.select(e.icmp("uge", magnitude, int_const(0x477FF000, "i32")), int_const(0x7C00, "i32"), result)
    nan = e.binary(
        "or",
        e.binary("and", e.binary("lshr", bits, int_const(13, "i32")), int_const(0x3FF, "i32")),
        int_const(0x7E00, "i32"),
    )
    result = e.select(e.icmp("ugt", magnitude, int_const(0x7F800000, "i32")), nan, result)
    sign = e.binary("and", e.binary("lshr", bits, int_const(16, "i32")), int_const(0x8000, "i32"))
    return e.cast("trunc", e.binary("or", result, sign), "i16")
