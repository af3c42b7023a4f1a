"""Bessel functions of order 0 and 1, and the Airy function, in float64.

Each is a Chebyshev series near 0, and far from it an oscillation or an exponential function times such a series.
Coefficients: special_tables.py.
"""

from __future__ import annotations

import math

from relaxlite.ir.ops import special_tables as tables
from relaxlite.ir.ops.scalars import Scalar
from relaxlite.ir.ops.special import Formula, Let, Series, chebyshev, choose, horner, special

_TWO_OVER_PI = 2 / math.pi


_ZEROS0 = 5.783185962946784, 30.471262343662087  # squares of the zeros of J0 and J1 up to 5
_ZERO1 = 14.681970642123893


def _oscillation(x: Scalar, order: int, let: Let, *, second_kind: bool) -> Scalar:
    """A function of order 0 or 1 for x > 5, by the phase x - (2 order + 1) pi / 4."""
    ratio = let(5.0 / x.maximum(5.0))
    square = let(ratio * ratio)
    of_cosine, of_sine = ((tables.COS0, tables.SIN0), (tables.COS1, tables.SIN1))[order]
    a, b = chebyshev(square, of_cosine, let), ratio * chebyshev(square, of_sine, let)
    phase = let(x - (2 * order + 1) * (math.pi / 4))
    sine, cosine = phase.unary("sin"), phase.unary("cos")
    wave = a * sine + b * cosine if second_kind else a * cosine - b * sine
    return wave * math.sqrt(_TWO_OVER_PI) / x.unary("sqrt")


def bessel_j0(x: Scalar, let: Let) -> Scalar:
    """Bessel function of the first kind of order 0."""
    size = let(x.abs())
    z = let(size.minimum(5.0) * size.minimum(5.0))
    near = (z - _ZEROS0[0]) * (z - _ZEROS0[1]) * chebyshev(z, tables.J0, let)
    return choose(size < 5.0, near, _oscillation(size, 0, let, second_kind=False))


def bessel_j1(x: Scalar, let: Let) -> Scalar:
    """Bessel function of the first kind of order 1."""
    size = let(x.abs())
    near = let(size.minimum(5.0))
    z = let(near * near)
    value = near * (z - _ZERO1) * chebyshev(z, tables.J1, let)
    value = let(choose(size < 5.0, value, _oscillation(size, 1, let, second_kind=False)))
    return choose(x < 0.0, -value, value)


def bessel_y0(x: Scalar, let: Let) -> Scalar:
    """Bessel function of the second kind of order 0; NaN below 0."""
    near = let(x.minimum(5.0))
    value = chebyshev(near * near, tables.Y0, let) + _TWO_OVER_PI * x.unary("log") * bessel_j0(near, let)
    return choose(x < 5.0, value, _oscillation(x, 0, let, second_kind=True))


def bessel_y1(x: Scalar, let: Let) -> Scalar:
    """Bessel function of the second kind of order 1; NaN below 0."""
    near = let(x.minimum(5.0))
    value = near * chebyshev(near * near, tables.Y1, let)
    value = value + _TWO_OVER_PI * (bessel_j1(near, let) * x.unary("log") - 1.0 / x)
    value = choose(x.equals(0.0), -math.inf, value)
    return choose(x < 5.0, value, _oscillation(x, 1, let, second_kind=True))


def _scaled(size: Scalar, near: Series, far: Series, let: Let) -> Scalar:
    """exp(-x) I(x) for x >= 0: of order 0; for order 1 without the factor x up to 8."""
    below = chebyshev(size.minimum(8.0), near, let)
    above = chebyshev(8.0 / size.maximum(8.0), far, let) / size.unary("sqrt")
    return choose(size > 8.0, above, below)


def i0e(x: Scalar, let: Let) -> Scalar:
    """exp(-|x|) I0(x)"""
    return _scaled(let(x.abs()), tables.I0_NEAR, tables.I0_FAR, let)


def i0(x: Scalar, let: Let) -> Scalar:
    """Modified Bessel function of the first kind of order 0."""
    return choose(x.unary("isinf"), math.inf, x.abs().exp() * i0e(x, let))


def i1e(x: Scalar, let: Let) -> Scalar:
    """exp(-|x|) I1(x)"""
    size = let(x.abs())
    value = let(_scaled(size, tables.I1_NEAR, tables.I1_FAR, let))
    value = choose(size > 8.0, value, value * size)
    value = let(value)
    return choose(x < 0.0, -value, value)


def i1(x: Scalar, let: Let) -> Scalar:
    """Modified Bessel function of the first kind of order 1."""
    return choose(x.unary("isinf"), x, x.abs().exp() * i1e(x, let))


def _second_kind(x: Scalar, near: Scalar, far: Series, let: Let, *, is_scaled: bool) -> Scalar:
    """Modified Bessel function of the second kind, its value up to 2 given; scaled by exp(x) if asked for."""
    above = chebyshev(2.0 / x.maximum(2.0), far, let) / x.unary("sqrt")
    near = near * x.minimum(2.0).exp() if is_scaled else near
    above = above if is_scaled else above * (-x).exp()
    near = choose(x.equals(0.0), math.inf, near)
    return choose(x > 2.0, above, choose(x < 0.0, math.nan, near))


def _k0(x: Scalar, let: Let, *, is_scaled: bool) -> Scalar:
    low = let(x.minimum(2.0))
    near = chebyshev(low * low, tables.K0_NEAR, let) - (x * 0.5).unary("log") * i0(low, let)
    return _second_kind(x, near, tables.K0_FAR, let, is_scaled=is_scaled)


def _k1(x: Scalar, let: Let, *, is_scaled: bool) -> Scalar:
    low = let(x.minimum(2.0))
    near = (x * 0.5).unary("log") * i1(low, let) + chebyshev(low * low, tables.K1_NEAR, let) / x
    return _second_kind(x, near, tables.K1_FAR, let, is_scaled=is_scaled)


def _airy_series() -> tuple[list[float], list[float]]:
    """Power series in x^3 of the two solutions of y'' = x y with values 1, 0 and slopes 0, 1; highest power first."""
    first, second = [1.0], [1.0]
    for k in range(1, 16):
        first.append(first[-1] / ((3 * k - 1) * (3 * k)))
        second.append(second[-1] / ((3 * k) * (3 * k + 1)))
    return first[::-1], second[::-1]


_AIRY_FIRST, _AIRY_SECOND = _airy_series()
_INVERSE_ROOT_PI = 1 / math.sqrt(math.pi)


_AIRY_EDGE = 9 ** (1 / 3)  # where zeta is 2
_AIRY_AT_0, _AIRY_SLOPE_AT_0 = 3 ** (-2 / 3) / math.gamma(2 / 3), -(3 ** (-1 / 3)) / math.gamma(1 / 3)


def airy_ai(x: Scalar, let: Let) -> Scalar:
    """The Airy function Ai."""
    near = let(x.minimum(_AIRY_EDGE).maximum(-_AIRY_EDGE))
    cube = let(near * near * near)
    middle = _AIRY_AT_0 * horner(cube, _AIRY_FIRST) + _AIRY_SLOPE_AT_0 * near * horner(cube, _AIRY_SECOND)
    size = let(x.abs().maximum(_AIRY_EDGE))
    root = let(size.unary("sqrt"))
    zeta = let(size * root * (2 / 3))
    z, fourth = let(1.0 / zeta), root.unary("sqrt")
    above = _INVERSE_ROOT_PI * chebyshev(z, tables.AIRY_FAR, let) / (2.0 * fourth) * (-zeta).exp()
    square, phase = let(z * z), let(zeta + math.pi / 4)
    sine, cosine = chebyshev(square, tables.AIRY_SIN, let), z * chebyshev(square, tables.AIRY_COS, let)
    below = _INVERSE_ROOT_PI / fourth * (phase.unary("sin") * sine - phase.unary("cos") * cosine)
    return choose(x > _AIRY_EDGE, above, choose(x < -_AIRY_EDGE, below, middle))


def spherical_bessel_j0(x: Scalar, let: Let) -> Scalar:
    """sin(x) / x"""
    is_zero = x.equals(0.0)
    ratio = x.unary("sin") / choose(is_zero, 1.0, x)
    return choose(x.unary("isinf"), 0.0, choose(is_zero, 1.0, ratio))


_FUNCTIONS: tuple[tuple[str, str, Formula, tuple[float, float]], ...] = (
    ("airy_ai", "The Airy function Ai.", airy_ai, (-9, 9)),
    ("bessel_i0", "The modified Bessel function of the first kind of order 0.", i0, (-12, 12)),
    ("bessel_i0e", "exp(-|x|) * bessel_i0(x)", i0e, (-30, 30)),
    ("bessel_i1", "The modified Bessel function of the first kind of order 1.", i1, (-12, 12)),
    ("bessel_i1e", "exp(-|x|) * bessel_i1(x)", i1e, (-30, 30)),
    ("bessel_j0", "The Bessel function of the first kind of order 0.", bessel_j0, (-30, 30)),
    ("bessel_j1", "The Bessel function of the first kind of order 1.", bessel_j1, (-30, 30)),
    ("bessel_k0", "The modified Bessel function of the second kind of order 0.",
     lambda x, let: _k0(x, let, is_scaled=False), (0.01, 9)),
    ("bessel_k0e", "exp(x) * bessel_k0(x)", lambda x, let: _k0(x, let, is_scaled=True), (0.01, 30)),
    ("bessel_k1", "The modified Bessel function of the second kind of order 1.",
     lambda x, let: _k1(x, let, is_scaled=False), (0.01, 9)),
    ("bessel_k1e", "exp(x) * bessel_k1(x)", lambda x, let: _k1(x, let, is_scaled=True), (0.01, 30)),
    ("bessel_y0", "The Bessel function of the second kind of order 0.", bessel_y0, (0.01, 30)),
    ("bessel_y1", "The Bessel function of the second kind of order 1.", bessel_y1, (0.01, 30)),
    ("spherical_bessel_j0", "sin(x) / x", spherical_bessel_j0, (-9, 9)),
)  # fmt: skip
for _row in _FUNCTIONS:
    special(*_row)
