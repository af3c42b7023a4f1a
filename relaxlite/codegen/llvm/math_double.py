"""Cores of float32 functions in float64 arithmetic, which are accurate beyond float32 without compensation.

Arguments come from float32, so intermediate results neither overflow nor underflow. Only additions, multiplications,
divisions and bit operations, which every target vectorizes. Polynomials are minimax fits (Remez, 50 digits).
"""

from __future__ import annotations

from collections.abc import Sequence

from relaxlite.codegen.llvm.emitter import Emitter, Val, float_const, int_const, mangle

_ROUNDING_MAGIC = (
    6755399441055744.0  # 1.5 * 2**52: added to a small double, it leaves the nearest integer in the low bits
)
_LN2_HI, _LN2_LO = 0.6931471803691238, 1.9082149292705877e-10  # HI has 32 bits: k*HI is exact
_PIO2_HI, _PIO2_LO = 1.5707963267341256, 6.077100506506192e-11  # HI has 33 bits: k*HI is exact for k < 2**20
_PIO2 = 1.5707963267948966

# exp(r) = 1 + r + r*r*q(r) on |r| <= ln(2)/2, relative error 3e-16
_EXP = (
    0.4999999999999832, 0.1666666666661147, 0.041666666668139875, 0.008333333370913758, 0.0013888888515528517,
    0.00019841185169582168, 2.4801932223158648e-05, 2.763502167208696e-06, 2.747669356160368e-07,
)  # fmt: skip
# log((1 + s) / (1 - s)) = 2*s + s**3 * q(s*s) on |s| <= 0.1716, relative error 3e-16
_LOG = (
    0.666666666666108, 0.4000000004611258, 0.28571417489210565, 0.22223379079353087, 0.18122624055993072,
    0.16838993024640397,
)  # fmt: skip
# sin(r) = r + r**3 * q(r*r), cos(r) = 1 - r*r/2 + r**4 * q(r*r) on |r| <= pi/4, errors 8e-12 and 3e-13
_SIN = (-0.16666666644175293, 0.008333329323111798, -0.00019839259553385303, 2.7173303981399804e-06)
_COS = (0.04166666664789734, -0.0013888885542482406, 2.4799909999661485e-05, -2.7237008278309337e-07)

# atan(t) = t + t**3 * q(t*t) on |t| <= tan(pi/8), relative error 1e-12
_ATAN = (
    -0.33333333308571855, 0.19999995217792643, -0.14285441131680546, 0.11104087554698665, -0.08996013722440425,
    0.0698209298723651, -0.037691615044062286,
)  # fmt: skip

# Bits of 2/pi, for a table of 24 overlapping 32-bit windows at steps of 8 bits (Payne and Hanek, 1983).
_TWO_OVER_PI_BITS = 0xA2F9836E4E441529FC2757D1F534DDC0DB6295993C439041FE5163ABDEBBC561


def polynomial(e: Emitter, x: Val, coefficients: Sequence[float]) -> Val:
    """c0 + c1*x + c2*x**2 + ... by Horner's rule."""
    total = e.number(coefficients[-1], x)
    for c in reversed(coefficients[:-1]):
        total = e.fma(total, x, e.number(c, x))
    return total


def exp(e: Emitter, x: Val) -> Val:
    """e**x with x clamped to +-700, beyond the range of float32 results."""
    x = clamp(e, x, 700.0)
    shifted = e.fma(x, float_const(1.4426950408889634, "double"), float_const(_ROUNDING_MAGIC, "double"))
    k = e.fsub(shifted, float_const(_ROUNDING_MAGIC, "double"))
    r = e.fma(k, float_const(-_LN2_HI, "double"), x)
    r = e.fma(k, float_const(-_LN2_LO, "double"), r)
    y = e.fadd(e.fma(e.fmul(r, r), polynomial(e, r, _EXP), r), float_const(1.0, "double"))
    power = e.binary("shl", e.cast("bitcast", shifted, "i64"), int_const(52))
    return e.cast("bitcast", e.binary("add", e.cast("bitcast", y, "i64"), power), "double")


def clamp(e: Emitter, x: Val, limit: float) -> Val:
    """Clamp x to [-limit, limit]; NaN stays NaN."""
    high, low = e.number(limit, x), e.number(-limit, x)
    x = e.select(e.fcmp("olt", high, x), high, x)
    return e.select(e.fcmp("ogt", low, x), low, x)


def log(e: Emitter, x: Val) -> Val:
    """Natural logarithm with all special cases; x must not be denormal."""
    bits = e.cast("bitcast", x, "i64")
    sqrt_half = 0x3FE6A09E667F3BCD
    offset = e.binary("add", bits, int_const((0x3FF << 52) - sqrt_half))
    biased = e.binary("lshr", offset, int_const(52))
    # convert the integer k < 2**52 to double by putting it into the low bits of 2**52
    k = e.cast("bitcast", e.binary("or", biased, int_const(0x433 << 52)), "double")
    k = e.fsub(k, float_const(2.0**52 + 1023.0, "double"))
    power = e.binary("sub", e.binary("shl", biased, int_const(52)), int_const(0x3FF << 52))
    m = e.cast("bitcast", e.binary("sub", bits, power), "double")  # in [sqrt(1/2), sqrt(2))
    f = e.fsub(m, float_const(1.0, "double"))
    s = e.fdiv(f, e.fadd(f, float_const(2.0, "double")))
    z = e.fmul(s, s)
    y = e.fma(e.fmul(s, z), polynomial(e, z, _LOG), e.fadd(s, s))
    y = e.fma(k, float_const(_LN2_HI, "double"), e.fma(k, float_const(_LN2_LO, "double"), y))
    zero, inf = float_const(0.0, "double"), float_const(float("inf"), "double")
    y = e.select(e.fcmp("olt", x, inf), y, x)  # log(inf) is inf, log(NaN) is NaN
    y = e.select(e.fcmp("oeq", x, zero), float_const(float("-inf"), "double"), y)
    return e.select(e.fcmp("olt", x, zero), float_const(float("nan"), "double"), y)


def sin_cos(e: Emitter, x: Val) -> tuple[Val, Val, Val]:
    """(sin r, cos r, k) with x = k*pi/2 + r of a float32 x; only the low two bits of k (i64) are meaningful."""
    wide = e.cast("fpext", x, "double")
    shifted = e.fma(wide, float_const(1.0 / _PIO2, "double"), float_const(_ROUNDING_MAGIC, "double"))
    quotient = e.fsub(shifted, float_const(_ROUNDING_MAGIC, "double"))
    r = e.fma(quotient, float_const(-_PIO2_HI, "double"), wide)
    r = e.fma(quotient, float_const(-_PIO2_LO, "double"), r)
    k = e.cast("bitcast", shifted, "i64")
    is_large = e.fcmp("oge", e.intrinsic("fabs", x), float_const(2.0**20))

    def reduced() -> tuple[Val, Val]:
        large_r, large_k = _reduce_large(e, x)
        return e.select(is_large, large_r, r), e.select(is_large, large_k, k)

    r, k = e.if_values(e.any_lane(is_large), reduced, lambda: (r, k), "reduced")
    z = e.fmul(r, r)
    sin = e.fma(e.fmul(r, z), polynomial(e, z, _SIN), r)
    half = e.fma(z, float_const(-0.5, "double"), float_const(1.0, "double"))
    cos = e.fma(e.fmul(z, z), polynomial(e, z, _COS), half)
    return sin, cos, k


def _reduce_large(e: Emitter, x: Val) -> tuple[Val, Val]:
    """(r, k) of a large float32 by exact Payne-Hanek reduction: 24 bits of x times 96 bits of 2/pi, modulo 4."""
    windows = [(_TWO_OVER_PI_BITS >> (256 - 8 * (step + 1))) & 0xFFFFFFFF for step in range(24)]
    table = e.module.table("two_over_pi", "i32", windows)
    bits = e.cast("bitcast", x, "i32")
    step = e.binary("and", e.binary("lshr", bits, int_const(26, "i32")), int_const(15, "i32"))
    shift = e.binary("and", e.binary("lshr", bits, int_const(23, "i32")), int_const(7, "i32"))
    mantissa = e.binary("and", bits, int_const(0x7FFFFF, "i32"))
    mantissa = e.binary("shl", e.binary("or", mantissa, int_const(0x800000, "i32")), shift)
    factors = [_lookup(e, table, e.binary("add", step, int_const(4 * k, "i32"))) for k in range(3)]
    low = e.cast("zext", e.binary("mul", mantissa, factors[0]), "i64")
    wide = e.cast("zext", mantissa, "i64")
    middle, tail = (e.binary("mul", wide, e.cast("zext", factor, "i64")) for factor in factors[1:])
    total = e.binary("or", e.binary("lshr", tail, int_const(32)), e.binary("shl", low, int_const(32)))
    total = e.binary("add", total, middle)  # x * 2/pi modulo 4, in fixed point with 62 fraction bits
    k = e.binary("lshr", e.binary("add", total, int_const(1 << 61)), int_const(62))
    fraction = e.binary("sub", total, e.binary("shl", k, int_const(62)))
    r = e.fmul(e.cast("sitofp", fraction, "double"), float_const(_PIO2 * 2.0**-62, "double"))
    is_negative = e.icmp("slt", bits, int_const(0, "i32"))
    r = e.select(is_negative, e.neg(r), r)
    return r, e.select(is_negative, e.binary("sub", int_const(0), k), k)


def _lookup(e: Emitter, table: Val, index: Val) -> Val:
    """Load table[index] of i32, by a gather where the index is a vector."""
    pointer = e.op(f"getelementptr i32, {table}, {index}", "ptr", index.lanes, "entry")
    if not index.lanes:
        return e.op(f"load i32, {pointer}, align 4", "i32", 0, "word")
    return gather(e, pointer, "i32", 4, e.splat(Val("true", "i1"), index.lanes))


def gather(e: Emitter, pointers: Val, elem: str, align: int, mask: Val) -> Val:
    """Masked gather; inactive lanes are 0."""
    lanes = pointers.lanes
    zero = e.splat(e.number(0, Val("", elem)), lanes)
    name = f"llvm.masked.gather.{mangle(elem, lanes)}.{mangle('ptr', lanes)}"
    return e.call(name, [pointers, int_const(align, "i32"), mask, zero], elem, lanes, "gathered")


def _min(e: Emitter, x: Val, limit: Val) -> Val:
    return e.select(e.fcmp("ogt", x, limit), limit, x)


def atan2(e: Emitter, y: Val, x: Val) -> Val:
    """Angle of the point (x, y) of float32 values, with all special cases."""
    huge = float_const(2.0**600, "double")  # instead of infinity: inf/inf is 1 then, and finite/inf is 0 in float32
    ax, ay = (_min(e, e.intrinsic("fabs", v), huge) for v in (x, y))
    is_steep = e.fcmp("ogt", ay, ax)
    low, high = e.select(is_steep, ax, ay), e.select(is_steep, ay, ax)
    zero = float_const(0.0, "double")
    high = e.select(e.fcmp("oeq", high, zero), float_const(1.0, "double"), high)
    # atan(t) = pi/4 + atan((t - 1) / (t + 1)) for t above tan(pi/8)
    is_middle = e.fcmp("ogt", low, e.fmul(high, float_const(0.41421356237309503, "double")))
    t = e.fdiv(e.select(is_middle, e.fsub(low, high), low), e.select(is_middle, e.fadd(low, high), high))
    z = e.fmul(t, t)
    angle = e.fma(e.fmul(t, z), polynomial(e, z, _ATAN), t)
    angle = e.fadd(angle, e.select(is_middle, float_const(_PIO2 / 2, "double"), zero))
    angle = e.select(is_steep, e.fsub(float_const(_PIO2, "double"), angle), angle)
    is_left = e.icmp("slt", e.cast("bitcast", x, "i64"), int_const(0))
    angle = e.select(is_left, e.fsub(float_const(2 * _PIO2, "double"), angle), angle)
    angle = e.intrinsic("copysign", angle, y)
    return e.select(e.fcmp("uno", x, y), float_const(float("nan"), "double"), angle)
