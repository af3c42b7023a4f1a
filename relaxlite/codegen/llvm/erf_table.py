"""erf in float32 by sixteen polynomials, where one instruction (AVX-512) looks up a coefficient for sixteen lanes.

On Zen 4 it takes 12 cycles for sixteen numbers, a quotient of polynomials (math.py) 15, and it is more accurate: at
most 3.4 ulp off. tanh, which needs two degrees more, would gain nothing.

erf(x) = x * g(|x|), and g is a polynomial of r = |x| - _STEP*k for the nearest whole number k of 0 ... 15.
"""

from __future__ import annotations

import math
from functools import cache

from relaxlite.codegen.llvm.emitter import Emitter, Val, float_const, int_const

_LANES = 16
_STEP = 17 / 64  # has few bits, so that _STEP*k is exact
_LIMIT = 4.1  # below 15.5*_STEP; erf is 1 in float32 from 3.92 on
_DEGREE = 4
_ROUNDER = 8388608.0  # 2**23: added to a small float32, it leaves the nearest integer in the low bits
_SURPLUS = 1.5e-7  # in the last piece, where erf rounds to 1: a result above 1, and so 1 once it is clamped


def is_available(e: Emitter) -> bool:
    return e.target.has("avx512f")


def erf(e: Emitter, x: Val) -> Val:
    """Of any number of lanes; fewer than sixteen take the place of sixteen."""
    if x.lanes >= _LANES and x.lanes % _LANES == 0:
        return e.by_parts([x], _LANES, lambda part: _erf(e, part))
    first = x if x.lanes else e.op(f"insertelement <1 x float> poison, {x}, i64 0", "float", 1)
    result = _resized(e, _erf(e, _resized(e, first, _LANES)), first.lanes)
    return result if x.lanes else e.extract(result, 0)


def _resized(e: Emitter, x: Val, lanes: int) -> Val:
    """The first lanes of x; those that it has not are undefined."""
    places = ", ".join(f"i32 {k}" if k < x.lanes else "i32 poison" for k in range(lanes))
    return e.op(f"shufflevector {x}, {x.ty} poison, <{lanes} x i32> <{places}>", x.elem, lanes, "resized")


def _erf(e: Emitter, x: Val) -> Val:
    size = e.intrinsic("fabs", x)
    size = e.select(e.fcmp("olt", float_const(_LIMIT), size), float_const(_LIMIT), size)  # NaN stays NaN
    shifted = e.fma(size, float_const(1 / _STEP), float_const(_ROUNDER))
    place = e.cast("bitcast", shifted, "i32")  # of which the instruction looks at the four low bits
    r = e.fma(e.fsub(shifted, float_const(_ROUNDER)), float_const(-_STEP), size)
    *rest, total = [_look_up(e, place, row) for row in _coefficients()]
    for coefficient in reversed(rest):
        total = e.fma(total, r, coefficient)
    y = e.fmul(size, total)
    y = e.select(e.fcmp("olt", float_const(1.0), y), float_const(1.0), y)
    sign = e.binary("and", e.cast("bitcast", x, "i32"), int_const(-(2**31), "i32"))
    return e.cast("bitcast", e.binary("or", e.cast("bitcast", y, "i32"), sign), "float")


def _look_up(e: Emitter, place: Val, row: tuple[float, ...]) -> Val:
    table = Val("<" + ", ".join(str(float_const(c)) for c in row) + ">", "float", _LANES)
    return e.call("llvm.x86.avx512.permvar.sf.512", [table, place], "float", _LANES, "coefficient")


@cache
def _coefficients() -> tuple[tuple[float, ...], ...]:
    """By degree, one for each of the sixteen pieces: interpolation at Chebyshev's points."""
    return tuple(zip(*[_interpolated(k) for k in range(_LANES)], strict=True))


def _interpolated(piece: int) -> list[float]:
    count = _DEGREE + 1
    points = [_STEP / 2 * math.cos(math.pi * (2 * j + 1) / (2 * count)) for j in range(count)]
    values = [_quotient(abs(_STEP * piece + r), is_last=piece == _LANES - 1) for r in points]
    for level in range(1, count):  # Newton's divided differences
        for j in range(count - 1, level - 1, -1):
            values[j] = (values[j] - values[j - 1]) / (points[j] - points[j - level])
    total = [values[-1]]
    for j in range(count - 2, -1, -1):  # total * (r - points[j]) + values[j]
        total = [high - points[j] * low for high, low in zip([0.0, *total], [*total, 0.0], strict=True)]
        total[0] += values[j]
    return total


def _quotient(x: float, *, is_last: bool) -> float:
    """erf(x) / x"""
    if is_last:
        return (1 + _SURPLUS) / x
    return math.erf(x) / x if x > 0 else 2 / math.sqrt(math.pi)
