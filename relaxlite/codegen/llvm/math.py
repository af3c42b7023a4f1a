"""Mathematical functions as straight-line vector code, as there is no library of vector forms to call.

float32: exp, exp2, log, tanh, erf and gelu use float32 arithmetic, for speed; the others compute in float64
(math_double.py). float16 and bfloat16 values are float32 in registers.
float64: libm, lane by lane. tests/codegen/test_math.py measures errors in ulp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from relaxlite.codegen.llvm import erf_table
from relaxlite.codegen.llvm import math_double as double
from relaxlite.codegen.llvm.emitter import Emitter, Val, float_const, int_const
from relaxlite.codegen.llvm.erf_table import apply_in_vectors
from relaxlite.codegen.llvm.gpu import math as gpu_math
from relaxlite.codegen.llvm.math_double import clamp, polynomial

_INF, _NAN = float("inf"), float("nan")
_LN2_HI, _LN2_LO = 0.693359375, -2.12194440e-4  # HI has 10 bits: k*HI is exact

# exp(r) = 1 + r + r*r*q(r) on |r| <= ln(2)/2, relative error 3e-9
_EXP = (0.4999999403953552, 0.1666652113199234, 0.04166838899254799, 0.008368724025785923, 0.0013814583653584123)
# 2**r on |r| <= 1/2, relative error 9e-8
_EXP2 = (1.0, 0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.0013264723820611835)
# 2**r for 0 <= r < 1, error 1.2e-7 at both ends, where float32 spacing is finest relative to the result
_EXP2_FLOOR = (
    1.0, 0.6931524872779846, 0.24015261232852936, 0.05583662912249565, 0.008972415700554848, 0.0018857429968193173
)  # fmt: skip
# log(1 + f) = f - f*f/2 + f**3 * q(f) for sqrt(1/2) <= 1 + f <= sqrt(2), relative error 6e-9
_LOG = (
    0.3333333134651184, -0.250008225440979, 0.20001232624053955, -0.16623254120349884, 0.14201541244983673,
    -0.13161052763462067, 0.12763626873493195, -0.07634680718183517,
)  # fmt: skip
# tanh(x) = x * p(x*x) / q(x*x) on |x| <= 9.02, relative error 5e-8; above 1 from 9.06 on
_TANH_P = (
    0.9999999403953552, 0.13384142518043518, 0.003499121405184269, 2.0661276721511967e-05, 1.3415379918058079e-08,
)  # fmt: skip
_TANH_Q = (1.0, 0.4671746492385864, 0.02589084580540657, 0.0003291152243036777, 7.803926678207063e-07)
_REDUCE_FLOOR = 0b1001  # vreduceps immediate: subtract the floor, suppress inexact exceptions
_GELU_SATURATION = 9.0  # erf(x / sqrt(2)) is 1 from here on, in float64 too
# erf(x) = x * p(x*x) / q(x*x) on |x| <= 3.925, relative error 5e-8; above 1 from 3.94 on
_ERF_P = (1.1283791065216064, 0.18971233069896698, 0.051491282880306244, 0.003578703384846449, 0.00023002499074209481)
_ERF_Q = (
    1.0, 0.5014606714248657, 0.11279100179672241, 0.014422529377043247, 0.0010525831021368504, 2.3115055228117853e-05,
    -1.1189242599130012e-07,
)  # fmt: skip


def _exp(e: Emitter, x: Val) -> Val:
    x = e.select(e.fcmp("olt", float_const(89.0), x), float_const(89.0), x)
    x = e.select(e.fcmp("ogt", float_const(-104.0), x), float_const(-104.0), x)
    k = e.intrinsic("rint", e.fmul(x, float_const(1.4426950408889634)))
    r = e.fma(k, float_const(-_LN2_HI), x)
    r = e.fma(k, float_const(-_LN2_LO), r)
    return _times_power(e, polynomial(e, r, (1.0, 1.0, *_EXP)), k)


def _exp2(e: Emitter, x: Val) -> Val:
    """2**x, cheaper than exp: a polynomial of lower degree, and exact argument reduction."""
    if e.target.has("avx512dq"):
        widths = (4, 8, 16) if e.target.has("avx512vl") else (16,)
        return apply_in_vectors(e, x, widths, lambda part: _exp2_avx512(e, part))
    x = e.select(e.fcmp("olt", float_const(129.0), x), float_const(129.0), x)
    x = e.select(e.fcmp("ogt", float_const(-150.0), x), float_const(-150.0), x)
    k = e.intrinsic("rint", x)
    return _times_power(e, polynomial(e, e.fsub(x, k), _EXP2), k)


def _exp2_avx512(e: Emitter, x: Val) -> Val:
    """2**x of 4, 8 or 16 lanes by AVX-512: vreduceps gives x - floor(x), 0 for infinities, and vscalefps multiplies by
    2**floor(x)."""
    mask, rounding = ("i16", [int_const(4, "i32")]) if x.lanes == 16 else ("i8", [])
    name = f"llvm.x86.avx512.mask.reduce.ps.{32 * x.lanes}"
    zero, all_lanes = e.splat(float_const(0.0), x.lanes), int_const(-1, mask)
    r = e.call(name, [x, int_const(_REDUCE_FLOOR, "i32"), zero, all_lanes, *rounding], "float", x.lanes, "r")
    return _scalef(e, polynomial(e, r, _EXP2_FLOOR), x)


def _times_power(e: Emitter, y: Val, k: Val) -> Val:
    """y * 2**k with one rounding, for an integer k of -150 ... 129."""
    if _has_scalef(e, y.lanes):
        return _scalef(e, y, k) if y.lanes < 16 else e.by_subvectors([y, k], 16, lambda *part: _scalef(e, *part))
    power = e.cast("fptosi", e.select(e.fcmp("uno", k, k), float_const(0.0), k), "i32")
    first = e.binary("ashr", power, int_const(1, "i32"))
    for part in (first, e.binary("sub", power, first)):
        bits = e.binary("shl", e.binary("add", part, int_const(127, "i32")), int_const(23, "i32"))
        y = e.fmul(y, e.cast("bitcast", bits, "float"))
    return y


def _has_scalef(e: Emitter, lanes: int) -> bool:
    return (lanes % 16 == 0 and lanes > 0 and e.target.has("avx512f")) or (lanes in (4, 8) and e.target.has("avx512vl"))


def _scalef(e: Emitter, y: Val, k: Val) -> Val:
    """y * 2**floor(k) by vscalefps, for 4, 8 or 16 lanes."""
    mask, rounding = ("i16", [int_const(4, "i32")]) if y.lanes == 16 else ("i8", [])
    name = f"llvm.x86.avx512.mask.scalef.ps.{32 * y.lanes}"
    return e.call(name, [y, k, y, int_const(-1, mask), *rounding], "float", y.lanes)


def _log(e: Emitter, x: Val) -> Val:
    is_tiny = e.fcmp("olt", x, float_const(2.0**-126))  # a denormal, zero, or negative
    scaled = e.select(is_tiny, e.fmul(x, float_const(2.0**23)), x)
    bits = e.cast("bitcast", scaled, "i32")
    exponent = e.binary("ashr", e.binary("sub", bits, int_const(0x3F3504F3, "i32")), int_const(23, "i32"))
    m = e.cast("bitcast", e.binary("sub", bits, e.binary("shl", exponent, int_const(23, "i32"))), "float")
    k = e.cast("sitofp", exponent, "float")
    k = e.select(is_tiny, e.fsub(k, float_const(23.0)), k)
    f = e.fsub(m, float_const(1.0))
    z = e.fmul(f, f)
    y = e.fma(e.fmul(z, f), polynomial(e, f, _LOG), e.fmul(k, float_const(_LN2_LO)))
    y = e.fadd(e.fma(z, float_const(-0.5), y), f)
    y = e.fma(k, float_const(_LN2_HI), y)
    y = e.select(e.fcmp("olt", x, float_const(_INF)), y, x)  # log(inf) is inf, log(NaN) is NaN
    y = e.select(e.fcmp("oeq", x, float_const(0.0)), float_const(-_INF), y)
    return e.select(e.fcmp("olt", x, float_const(0.0)), float_const(_NAN), y)


def _tanh(e: Emitter, x: Val) -> Val:
    return _odd_rational(e, clamp(e, x, 9.6), _TANH_P, _TANH_Q)


def _erf(e: Emitter, x: Val) -> Val:
    if erf_table.is_available(e):
        return erf_table.erf(e, x)
    return _odd_rational(e, clamp(e, x, 4.1), _ERF_P, _ERF_Q)


def _gelu(e: Emitter, x: Val) -> Val:
    """max(x, 0) - |x| * (1 - erf(|x| / sqrt(2))) / 2; absolute error at most 1e-6 and a rounding. The relative error of
    small results of large negative x is much greater."""
    if x.elem == "float" and erf_table.is_available(e):
        return erf_table.gelu(e, x)
    half, zero = e.number(0.5, x), e.number(0.0, x)
    x_abs, saturation = e.intrinsic("fabs", x), e.number(_GELU_SATURATION, x)
    x_abs = e.select(e.fcmp("olt", saturation, x_abs), saturation, x_abs)
    minus_tail = e.fma(apply(e, "erf", e.fmul(x_abs, e.number(math.sqrt(0.5), x))), half, e.number(-0.5, x))
    return e.fma(x_abs, minus_tail, e.select(e.fcmp("ogt", zero, x), zero, x))


def _odd_rational(e: Emitter, x: Val, p: tuple[float, ...], q: tuple[float, ...]) -> Val:
    """x * p(x*x) / q(x*x), clamped to +-1; the quotient exceeds 1 at the ends, so that functions saturate exactly."""
    z = e.fmul(x, x)
    return clamp(e, e.fdiv(e.fmul(x, polynomial(e, z, p)), polynomial(e, z, q)), 1.0)


def _through_double(core: Callable[[Emitter, Val], Val]) -> Callable[[Emitter, Val], Val]:
    def function(e: Emitter, x: Val) -> Val:
        return e.cast("fptrunc", core(e, e.cast("fpext", x, "double")), "float")

    return function


def _near_zero(e: Emitter, x: Val, near: Val, far: Val) -> Val:
    """`near`, a series without cancellation and with the sign of x, for |x| < 2**-12, else `far`; keeps -0.0."""
    is_small = e.fcmp("olt", e.intrinsic("fabs", x), e.number(2.0**-12, x))
    return e.select(is_small, e.intrinsic("copysign", near, x), far)


def _series(e: Emitter, x: Val, second: float, third: float) -> Val:
    """x + second*x**2 + third*x**3"""
    tail = e.fma(x, e.number(third, x), e.number(second, x))
    return e.fma(e.fmul(x, x), tail, x)


def _one(e: Emitter, x: Val) -> Val:
    return e.number(1.0, x)


def _expm1(e: Emitter, x: Val) -> Val:
    return _near_zero(e, x, _series(e, x, 1 / 2, 1 / 6), e.fsub(double.exp(e, x), _one(e, x)))


def _log1p(e: Emitter, x: Val) -> Val:
    return _near_zero(e, x, _series(e, x, -1 / 2, 1 / 3), double.log(e, e.fadd(x, _one(e, x))))


def _sinh(e: Emitter, x: Val) -> Val:
    power = double.exp(e, x)
    far = e.fmul(e.fsub(power, e.fdiv(_one(e, x), power)), e.number(0.5, x))
    return _near_zero(e, x, _series(e, x, 0.0, 1 / 6), far)


def _cosh(e: Emitter, x: Val) -> Val:
    power = double.exp(e, x)
    return e.fmul(e.fadd(power, e.fdiv(_one(e, x), power)), e.number(0.5, x))


def _asinh(e: Emitter, x: Val) -> Val:
    x_abs = e.intrinsic("fabs", x)
    root = e.intrinsic("sqrt", e.fma(x, x, _one(e, x)))
    far = e.intrinsic("copysign", double.log(e, e.fadd(x_abs, root)), x)
    return _near_zero(e, x, _series(e, x, 0.0, -1 / 6), far)


def _acosh(e: Emitter, x: Val) -> Val:
    below, above = e.fsub(x, _one(e, x)), e.fadd(x, _one(e, x))
    y = double.log(e, e.fadd(x, e.intrinsic("sqrt", e.fmul(below, above))))
    return e.select(e.fcmp("olt", x, _one(e, x)), e.number(_NAN, x), y)


def _atanh(e: Emitter, x: Val) -> Val:
    ratio = e.fdiv(e.fadd(_one(e, x), x), e.fsub(_one(e, x), x))
    return _near_zero(e, x, _series(e, x, 0.0, 1 / 3), e.fmul(double.log(e, ratio), e.number(0.5, x)))


def _asin(e: Emitter, x: Val) -> Val:
    return double.atan2(e, x, _other_leg(e, x))


def _acos(e: Emitter, x: Val) -> Val:
    return double.atan2(e, _other_leg(e, x), x)


def _other_leg(e: Emitter, x: Val) -> Val:
    """sqrt(1 - x*x)"""
    return e.intrinsic("sqrt", e.fmul(e.fsub(_one(e, x), x), e.fadd(_one(e, x), x)))


def _atan(e: Emitter, x: Val) -> Val:
    return double.atan2(e, x, _one(e, x))


def _quadrant(quarter_turns: int) -> Callable[[Emitter, Val], Val]:
    """sin(x + quarter_turns * pi/2)"""

    def function(e: Emitter, x: Val) -> Val:
        sin, cos, k = double.sin_cos(e, x)
        k = e.binary("add", k, int_const(quarter_turns)) if quarter_turns else k
        is_odd = e.cast("trunc", k, "i1")
        y = e.select(is_odd, cos, sin)
        sign = e.binary("shl", e.binary("and", k, int_const(2)), int_const(62))
        y = e.cast("bitcast", e.binary("xor", e.cast("bitcast", y, "i64"), sign), "double")
        return _if_finite(e, x, e.cast("fptrunc", y, "float"))

    return function


def _sin(e: Emitter, x: Val) -> Val:
    is_zero = e.fcmp("oeq", x, float_const(0.0))
    return e.select(is_zero, x, _quadrant(0)(e, x))  # keeps -0.0


def _tan(e: Emitter, x: Val) -> Val:
    sin, cos, k = double.sin_cos(e, x)
    is_odd = e.cast("trunc", k, "i1")
    y = e.fdiv(e.select(is_odd, e.neg(cos), sin), e.select(is_odd, sin, cos))
    y = _if_finite(e, x, e.cast("fptrunc", y, "float"))
    return e.select(e.fcmp("oeq", x, float_const(0.0)), x, y)


def _if_finite(e: Emitter, x: Val, y: Val) -> Val:
    return e.select(e.fcmp("olt", e.intrinsic("fabs", x), float_const(_INF)), y, float_const(_NAN))


_FLOAT: Mapping[str, Callable[[Emitter, Val], Val]] = {
    "exp": _exp,
    "exp2": _exp2,
    "log": _log,
    "tanh": _tanh,
    "erf": _erf,
    "gelu": _gelu,
    "sin": _sin,
    "cos": _quadrant(1),
    "tan": _tan,
    **{
        name: _through_double(core)
        for name, core in {
            "log1p": _log1p, "expm1": _expm1, "sinh": _sinh, "cosh": _cosh, "asinh": _asinh, "acosh": _acosh,
            "atanh": _atanh, "asin": _asin, "acos": _acos, "atan": _atan,
        }.items()
    },
}  # fmt: skip

FUNCTIONS = tuple(_FLOAT)  # unary


def apply(e: Emitter, name: str, x: Val) -> Val:
    """Emit one of FUNCTIONS of a float or double."""
    if x.elem != "double" or name == "gelu":  # which libm does not have
        return _FLOAT[name](e, x)
    if e.target.kind == "cuda":
        return gpu_math.double_function(e, name, x)
    return e.for_each_lane([x], "double", lambda lane: e.call(name, [lane], "double"))


def atan2(e: Emitter, y: Val, x: Val) -> Val:
    """Angle of the point (x, y), with the special cases of C."""
    if x.elem == "double":
        _require_library(e, "atan2", "float64")
        return e.for_each_lane([y, x], "double", lambda *lane: e.call("atan2", lane, "double"))
    y, x = e.match_lanes(e.cast("fpext", y, "double"), e.cast("fpext", x, "double"))
    return e.cast("fptrunc", double.atan2(e, y, x), "float")


def fmod(e: Emitter, a: Val, b: Val) -> Val:
    """Exact remainder with the sign of a, by libm, lane by lane."""
    name = "fmod" if a.elem == "double" else "fmodf"
    _require_library(e, "fmod", "floats")
    return e.for_each_lane([a, b], a.elem, lambda *lane: e.call(name, lane, a.elem))


def _require_library(e: Emitter, name: str, dtype: str) -> None:
    """CodegenError on targets where libm cannot be called."""
    if e.target.kind == "cuda":
        gpu_math.refuse(name, dtype)


def power(e: Emitter, x: Val, y: Val) -> Val:
    """x**y with the special cases of C's pow."""
    if x.elem == "double":
        _require_library(e, "pow", "float64")
        return e.for_each_lane([x, y], "double", lambda *lane: e.call("pow", lane, "double"))
    x, y = e.match_lanes(x, y)
    x_abs = e.intrinsic("fabs", x)
    log = double.log(e, e.cast("fpext", x_abs, "double"))
    z = e.cast("fptrunc", double.exp(e, e.fmul(log, e.cast("fpext", y, "double"))), "float")
    is_whole = e.fcmp("oeq", e.intrinsic("trunc", y), y)
    half = e.fmul(y, float_const(0.5))
    is_odd = e.binary("and", is_whole, e.fcmp("une", e.intrinsic("trunc", half), half))
    is_negative = e.icmp("slt", e.cast("bitcast", x, "i32"), int_const(0, "i32"))
    z = e.select(e.binary("and", is_negative, is_odd), e.neg(z), z)
    one, zero, inf = float_const(1.0), float_const(0.0), float_const(_INF)
    is_root = e.binary("and", e.fcmp("olt", x, zero), e.fcmp("olt", x_abs, inf))  # of a negative number
    is_whole = e.binary("or", is_whole, e.fcmp("uno", y, y))
    z = e.select(e.binary("and", is_root, e.binary("xor", is_whole, Val("true", "i1"))), float_const(_NAN), z)
    far = e.binary("and", e.fcmp("oeq", x_abs, one), e.fcmp("oeq", e.intrinsic("fabs", y), inf))  # (+-1)**inf == 1
    is_one = e.binary("or", e.fcmp("oeq", x, one), e.fcmp("oeq", y, zero))
    return e.select(e.binary("or", far, is_one), one, z)
