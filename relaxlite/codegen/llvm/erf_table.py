"""erf and GELU in float32 by sixteen polynomials, where one instruction (AVX-512) looks up a
coefficient for sixteen lanes.

erf is faster than a quotient of polynomials (math.py; docs/measurements/cpus.md, erf_table) and more accurate: at most
3.4 ulp off. tanh, which needs two degrees more, would gain nothing.

erf(x) = x * g(|x|), and g is a polynomial of r = |x| - step*k for the nearest whole number k of 0 ... 15. GELU is
max(x, 0) plus such a polynomial, which has no sign to be put back, and is faster than x times the normal distribution's
function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from relaxlite.codegen.llvm.emitter import Emitter, Val, float_const, int_const
from relaxlite.records import dataclass

_LANES = 16
_DEGREE = 4
_MIN_SIZE = 0b1010  # what vrangeps is to give: the number of the least absolute value, with a sign of 0
_ROUNDER = 8388608.0  # 2**23: added to a small float32, it leaves the nearest integer in the low bits
_SURPLUS = 1.5e-7  # in erf's last piece, where it rounds to 1: a result above 1, and so 1 once it is clamped


@dataclass(frozen=True, slots=True)
class _Table:
    """A function of |x| up to `limit`, beyond which it does not change, in pieces of the width `step`."""

    step: float  # has few bits, so that step*k is exact
    limit: float  # less than 15.5 * step
    function: Callable[[float, bool], float]  # of |x|, and whether it is in the last piece
    begins_at_zero: bool  # exactly

    def look_up(self, e: Emitter, size: Val) -> Val:
        """The polynomial at |x|, which does not exceed the limit."""
        shifted = e.fma(size, float_const(1 / self.step), float_const(_ROUNDER))
        place = e.cast("bitcast", shifted, "i32")  # of which the instruction looks at the four low bits
        r = e.fma(e.fsub(shifted, float_const(_ROUNDER)), float_const(-self.step), size)
        *rest, total = [_look_up(e, place, row) for row in _coefficients(self)]
        for coefficient in reversed(rest):
            total = e.fma(total, r, coefficient)
        return total

    def clamped(self, e: Emitter, x: Val) -> Val:
        """|x|, at most the limit; NaN stays NaN."""
        size = e.intrinsic("fabs", x)
        return e.select(e.fcmp("olt", float_const(self.limit), size), float_const(self.limit), size)


def _erf_quotient(x: float, is_last: bool) -> float:
    """erf(x) / x"""
    if is_last:
        return (1 + _SURPLUS) / x
    return math.erf(x) / x if x > 0 else 2 / math.sqrt(math.pi)


def _below_relu(x: float, is_last: bool) -> float:
    """gelu(x) - x for x >= 0, which is gelu(-x); nothing in the last piece."""
    return 0.0 if is_last else -x * math.erfc(x * math.sqrt(0.5)) / 2


_ERF = _Table(17 / 64, 4.1, _erf_quotient, begins_at_zero=False)  # erf is 1 in float32 from 3.92 on
_GELU = _Table(3 / 8, 5.75, _below_relu, begins_at_zero=True)  # less than 2e-7 from 5.4 on


def is_available(e: Emitter) -> bool:
    return e.target.has("avx512f")


def erf(e: Emitter, x: Val) -> Val:
    """Of any number of lanes; fewer than sixteen take the place of sixteen."""
    return by_vectors(e, x, (_LANES,), lambda part: _erf(e, part))


def gelu(e: Emitter, x: Val) -> Val:
    """x times the normal distribution's function, of any number of lanes; off by at most 4e-7 and a rounding."""
    return by_vectors(e, x, (_LANES,), lambda part: _gelu(e, part))


def by_vectors(e: Emitter, x: Val, widths: tuple[int, ...], function: Callable[[Val], Val]) -> Val:
    """`function` of x, which has any number of lanes, by vectors of these widths, in ascending order: of the widest,
    or of the least that has room."""
    widest = widths[-1]
    if x.lanes and x.lanes % widest == 0:
        return e.by_parts([x], widest, function)
    first = x if x.lanes else e.op(f"insertelement <1 x float> poison, {x}, i64 0", "float", 1)
    room = next((width for width in widths if width >= first.lanes), -(-first.lanes // widest) * widest)
    result = _resized(e, e.by_parts([_resized(e, first, room)], min(room, widest), function), first.lanes)
    return result if x.lanes else e.extract(result, 0)


def _resized(e: Emitter, x: Val, lanes: int) -> Val:
    """The first lanes of x; those that it has not are undefined."""
    places = ", ".join(f"i32 {k}" if k < x.lanes else "i32 poison" for k in range(lanes))
    return e.op(f"shufflevector {x}, {x.ty} poison, <{lanes} x i32> <{places}>", x.elem, lanes, "resized")


def _erf(e: Emitter, x: Val) -> Val:
    size = _ERF.clamped(e, x)
    y = e.fmul(size, _ERF.look_up(e, size))
    y = e.select(e.fcmp("olt", float_const(1.0), y), float_const(1.0), y)
    return _with_sign_of(e, x, y)


def _gelu(e: Emitter, x: Val) -> Val:
    above = e.select(e.fcmp("ogt", float_const(0.0), x), float_const(0.0), x)  # NaN where x is
    size = _least_size(e, x, _GELU.limit) if e.target.has("avx512dq") else _GELU.clamped(e, x)
    return e.fadd(above, _GELU.look_up(e, size))


def _least_size(e: Emitter, x: Val, limit: float) -> Val:
    """|x|, at most the limit, in one instruction (AVX-512 DQ) for sixteen lanes; the limit for NaN."""
    bound = e.splat(float_const(limit), _LANES)
    zero, all_lanes, rounding = e.splat(float_const(0.0), _LANES), int_const(-1, "i16"), int_const(4, "i32")
    args = [x, bound, int_const(_MIN_SIZE, "i32"), zero, all_lanes, rounding]
    return e.call("llvm.x86.avx512.mask.range.ps.512", args, "float", _LANES, "size")


def _with_sign_of(e: Emitter, x: Val, size: Val) -> Val:
    sign = e.binary("and", e.cast("bitcast", x, "i32"), int_const(-(2**31), "i32"))
    return e.cast("bitcast", e.binary("or", e.cast("bitcast", size, "i32"), sign), "float")


def _look_up(e: Emitter, place: Val, row: tuple[float, ...]) -> Val:
    table = Val("<" + ", ".join(str(float_const(c)) for c in row) + ">", "float", _LANES)
    return e.call("llvm.x86.avx512.permvar.sf.512", [table, place], "float", _LANES, "coefficient")


@cache
def _coefficients(table: _Table) -> tuple[tuple[float, ...], ...]:
    """By degree, one for each of the sixteen pieces: interpolation at Chebyshev's points."""
    return tuple(zip(*[_piece(table, k) for k in range(_LANES)], strict=True))


def _piece(table: _Table, piece: int) -> list[float]:
    def function(r: float) -> float:
        return table.function(abs(table.step * piece + r), piece == _LANES - 1)

    half = table.step / 2
    if piece == 0 and table.begins_at_zero:  # r times a polynomial, of which there is but one side
        return [0.0, *_interpolated(lambda r: function(r) / r, 0.0, half, _DEGREE - 1)]
    return _interpolated(function, -half, half, _DEGREE)


def _interpolated(function: Callable[[float], float], begin: float, end: float, degree: int) -> list[float]:
    count, middle, radius = degree + 1, (begin + end) / 2, (end - begin) / 2
    points = [middle + radius * math.cos(math.pi * (2 * j + 1) / (2 * count)) for j in range(count)]
    values = [function(r) for r in points]
    for level in range(1, count):  # Newton's divided differences
        for j in range(count - 1, level - 1, -1):
            values[j] = (values[j] - values[j - 1]) / (points[j] - points[j - level])
    total = [values[-1]]
    for j in range(count - 2, -1, -1):  # total * (r - points[j]) + values[j]
        total = [high - points[j] * low for high, low in zip([0.0, *total], [*total, 0.0], strict=True)]
        total[0] += values[j]
    return total
