"""erf and GELU in float32 by piecewise polynomials, whose coefficients vpermps (AVX-512) looks up in 16-entry tables.

erf is off by at most 3.4 ulp, and faster than a rational approximation (math.py; docs/measurements/cpus.md, erf_table).
tanh would need two degrees more and gain nothing.

erf(x) = x * g(|x|), where g is a polynomial of r = |x| - step*k for the nearest integer k of 0 ... 15. GELU(x) is
max(x, 0) plus such a polynomial, which saves restoring the sign.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from relaxlite.codegen.llvm.emitter import Emitter, Val, float_const, int_const
from relaxlite.records import dataclass

_LANES = 16
_DEGREE = 4
_RANGE_MIN_ABS = 0b1010  # vrangeps immediate: the operand of smaller magnitude, sign cleared
_ROUNDING_MAGIC = 8388608.0  # 2**23: added to a small float32, it leaves the nearest integer in the low bits
_LAST_PIECE_EXCESS = 1.5e-7  # in the last piece, where erf rounds to 1: above 1, then clamped to exactly 1


@dataclass(frozen=True, slots=True)
class _Table:
    """A function of |x| in 16 pieces of width `step`, constant beyond `limit`."""

    step: float  # few significant bits, so that step*k is exact
    limit: float  # less than 15.5 * step
    function: Callable[[float, bool], float]  # of |x|, and whether |x| is in the last piece
    begins_at_zero: bool  # function(0) == 0 exactly

    def look_up(self, e: Emitter, x_abs: Val) -> Val:
        """Evaluate the function at |x|, which must not exceed the limit."""
        shifted = e.fma(x_abs, float_const(1 / self.step), float_const(_ROUNDING_MAGIC))
        index = e.cast("bitcast", shifted, "i32")  # the instruction uses the four low bits
        r = e.fma(e.fsub(shifted, float_const(_ROUNDING_MAGIC)), float_const(-self.step), x_abs)
        *lower_degrees, total = [_look_up(e, index, row) for row in _coefficients(self)]
        for coefficient in reversed(lower_degrees):
            total = e.fma(total, r, coefficient)
        return total

    def clamped(self, e: Emitter, x: Val) -> Val:
        """min(|x|, limit); NaN stays NaN."""
        x_abs = e.intrinsic("fabs", x)
        return e.select(e.fcmp("olt", float_const(self.limit), x_abs), float_const(self.limit), x_abs)


def _erf_quotient(x: float, is_last: bool) -> float:
    """erf(x) / x"""
    if is_last:
        return (1 + _LAST_PIECE_EXCESS) / x
    return math.erf(x) / x if x > 0 else 2 / math.sqrt(math.pi)


def _gelu_minus_relu(x: float, is_last: bool) -> float:
    """gelu(x) - x == gelu(-x) for x >= 0; 0 in the last piece."""
    return 0.0 if is_last else -x * math.erfc(x * math.sqrt(0.5)) / 2


_ERF = _Table(17 / 64, 4.1, _erf_quotient, begins_at_zero=False)  # erf rounds to 1 in float32 from 3.92 on
_GELU = _Table(3 / 8, 5.75, _gelu_minus_relu, begins_at_zero=True)  # magnitude below 2e-7 from 5.4 on


def is_available(e: Emitter) -> bool:
    """Whether the target has the table lookup instruction (AVX512F)."""
    return e.target.has("avx512f")


def erf(e: Emitter, x: Val) -> Val:
    """erf of float32, any number of lanes; fewer than 16 are padded to 16."""
    return apply_in_vectors(e, x, (_LANES,), lambda part: _erf(e, part))


def gelu(e: Emitter, x: Val) -> Val:
    """GELU (x times the normal CDF) of float32, any number of lanes; absolute error at most 4e-7 and a rounding."""
    return apply_in_vectors(e, x, (_LANES,), lambda part: _gelu(e, part))


def apply_in_vectors(e: Emitter, x: Val, widths: tuple[int, ...], function: Callable[[Val], Val]) -> Val:
    """Apply `function` to x, of any number of lanes, in vectors of the widest of `widths` (ascending), or padded to the
    smallest width that holds all lanes."""
    widest = widths[-1]
    if x.lanes and x.lanes % widest == 0:
        return e.by_subvectors([x], widest, function)
    vector = x if x.lanes else e.op(f"insertelement <1 x float> poison, {x}, i64 0", "float", 1)
    padded = next((width for width in widths if width >= vector.lanes), -(-vector.lanes // widest) * widest)
    y = _resized(e, e.by_subvectors([_resized(e, vector, padded)], min(padded, widest), function), vector.lanes)
    return y if x.lanes else e.extract(y, 0)


def _resized(e: Emitter, x: Val, lanes: int) -> Val:
    """Truncate x, or pad with poison, to `lanes` lanes."""
    indices = ", ".join(f"i32 {k}" if k < x.lanes else "i32 poison" for k in range(lanes))
    return e.op(f"shufflevector {x}, {x.ty} poison, <{lanes} x i32> <{indices}>", x.elem, lanes, "resized")


def _erf(e: Emitter, x: Val) -> Val:
    x_abs = _ERF.clamped(e, x)
    y = e.fmul(x_abs, _ERF.look_up(e, x_abs))
    y = e.select(e.fcmp("olt", float_const(1.0), y), float_const(1.0), y)
    return _copy_sign(e, x, y)


def _gelu(e: Emitter, x: Val) -> Val:
    relu = e.select(e.fcmp("ogt", float_const(0.0), x), float_const(0.0), x)  # NaN where x is
    x_abs = _min_abs(e, x, _GELU.limit) if e.target.has("avx512dq") else _GELU.clamped(e, x)
    return e.fadd(relu, _GELU.look_up(e, x_abs))


def _min_abs(e: Emitter, x: Val, limit: float) -> Val:
    """min(|x|, limit) of 16 lanes by vrangeps (AVX512DQ); the limit for NaN."""
    bound = e.splat(float_const(limit), _LANES)
    zero, all_lanes, rounding = e.splat(float_const(0.0), _LANES), int_const(-1, "i16"), int_const(4, "i32")
    args = [x, bound, int_const(_RANGE_MIN_ABS, "i32"), zero, all_lanes, rounding]
    return e.call("llvm.x86.avx512.mask.range.ps.512", args, "float", _LANES, "size")


def _copy_sign(e: Emitter, x: Val, magnitude: Val) -> Val:
    sign = e.binary("and", e.cast("bitcast", x, "i32"), int_const(-(2**31), "i32"))
    return e.cast("bitcast", e.binary("or", e.cast("bitcast", magnitude, "i32"), sign), "float")


def _look_up(e: Emitter, index: Val, row: tuple[float, ...]) -> Val:
    table = Val("<" + ", ".join(str(float_const(c)) for c in row) + ">", "float", _LANES)
    return e.call("llvm.x86.avx512.permvar.sf.512", [table, index], "float", _LANES, "coefficient")


@cache
def _coefficients(table: _Table) -> tuple[tuple[float, ...], ...]:
    """Coefficients by degree, each for the 16 pieces; interpolation at Chebyshev nodes."""
    return tuple(zip(*[_piece(table, k) for k in range(_LANES)], strict=True))


def _piece(table: _Table, piece: int) -> list[float]:
    def function(r: float) -> float:
        return table.function(abs(table.step * piece + r), piece == _LANES - 1)

    half = table.step / 2
    if piece == 0 and table.begins_at_zero:  # r times a polynomial, on one side of zero
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
