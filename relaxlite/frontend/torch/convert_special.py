"""Converters of less frequent element-wise operators, composed of ops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from relaxlite import dtypes
from relaxlite.frontend.torch.convert_elementwise import binary, unary
from relaxlite.frontend.torch.node import Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr
from relaxlite.ir.ops.scalars import HALF


def wide_dtype(n: Node) -> str:
    """Return the type in which the result is computed: float32 for half-precision floats."""
    return "float32" if n.dtype() in HALF else n.dtype()


def wide_operands(n: Node, *values: Any) -> list[Expr]:
    """Return operands in the type in which the result is computed, with sizes that fit the result."""
    return [n.fit(n.operand(v, wide_dtype(n)), n.shape()) for v in values]


def finished(n: Node, expr: Any) -> Expr:
    """Emit an expression and cast it to the type of the result."""
    return n.cast(n.emit(expr), n.dtype())


def number(n: Node, value: float) -> Expr:
    """Return a number in the type in which the result is computed."""
    return n.operand(value, wide_dtype(n))


_TABLE: dict[str, Callable[..., Any]] = {"exp2": ops.exp2, "log2": ops.log2, "log10": ops.log10}
for _name, _op in _TABLE.items():
    torch_op(f"aten.{_name}", f"aten.special_{_name}")(lambda n, self, op=_op: unary(n, self, op))


@torch_op("aten.frac")
def frac(n: Node, self: Expr) -> Expr:
    return n.emit(ops.subtract(self, n.emit(ops.trunc(self))))


@torch_op("aten.square")
def square(n: Node, self: Expr) -> Expr:
    if n.dtype() == "bool":
        return self
    x = n.cast(self, n.dtype())
    return n.emit(ops.multiply(x, x))


@torch_op("aten.isinf", "aten.isposinf", "aten.isneginf")
def isinf(n: Node, self: Expr) -> Expr:
    if not dtypes.is_float(n.dtype_of(self)):
        return n.full(n.shape(), False, "bool")
    negative, positive = "isposinf" not in n.target, "isneginf" not in n.target
    return n.emit(ops.isinf(self, detect_negative=negative, detect_positive=positive))


@torch_op("aten.isfinite")
def isfinite(n: Node, self: Expr) -> Expr:
    if not dtypes.is_float(n.dtype_of(self)):
        return n.full(n.shape(), True, "bool")
    is_off = n.emit(ops.logical_or(n.emit(ops.isnan(self)), n.emit(ops.isinf(self))))
    return n.emit(ops.logical_not(is_off))


@torch_op("aten.fmax", "aten.fmin")
def fmax(n: Node, self: Expr, other: Expr) -> Expr:
    """The greater or lesser operand; the other one where one is NaN."""
    op = ops.maximum if "fmax" in n.target else ops.minimum
    if not dtypes.is_float(n.dtype()):
        return binary(n, self, other, op, n.dtype())
    a, b = (n.fit(n.operand(x, n.dtype()), n.shape()) for x in (self, other))
    rest = n.emit(ops.where(n.emit(ops.isnan(b)), a, n.emit(op(a, b))))
    return n.emit(ops.where(n.emit(ops.isnan(a)), b, rest))


def is_negative(n: Node, x: Expr) -> Expr:
    """Emit where x has a minus sign, -0.0 too; a NaN counts as positive."""
    dtype = n.dtype_of(x)
    zero = n.operand(0, "uint8" if dtype == "bool" else dtype)
    below = n.emit(ops.less(n.cast(x, "uint8") if dtype == "bool" else x, zero))
    if not dtypes.is_float(dtype):
        return below
    is_minus_zero = n.emit(ops.less(n.emit(ops.reciprocal(x)), zero))  # 1 / -0.0 is -inf
    return n.emit(ops.logical_or(below, n.emit(ops.logical_and(n.emit(ops.equal(x, zero)), is_minus_zero))))


@torch_op("aten.signbit")
def signbit(n: Node, self: Expr) -> Expr:
    return is_negative(n, self)


@torch_op("aten.copysign")
def copysign(n: Node, self: Expr, other: Any) -> Expr:
    a, b = (n.fit(n.operand(x, n.dtype()), n.shape()) for x in (self, other))
    size = n.emit(ops.abs(a))
    return n.emit(ops.where(is_negative(n, b), n.emit(ops.neg(size)), size))


@torch_op("aten.hypot")
def hypot(n: Node, self: Expr, other: Expr) -> Expr:
    """The square root of the sum of squares, scaled by the greater operand so that no square overflows."""
    a, b = (n.emit(ops.abs(x)) for x in wide_operands(n, self, other))
    great, small = n.emit(ops.maximum(a, b)), n.emit(ops.minimum(a, b))
    is_unscaled = n.emit(ops.logical_or(n.emit(ops.equal(great, number(n, 0))), n.emit(ops.isinf(great))))
    ratio = n.emit(ops.divide(small, n.emit(ops.where(is_unscaled, number(n, 1), great))))
    root = n.emit(ops.sqrt(n.emit(ops.add(n.emit(ops.multiply(ratio, ratio)), number(n, 1)))))
    result = n.emit(ops.where(is_unscaled, great, n.emit(ops.multiply(great, root))))
    either = n.emit(ops.logical_or(n.emit(ops.isinf(a)), n.emit(ops.isinf(b))))  # infinite, also with a NaN
    return finished(n, ops.where(either, number(n, math.inf), result))


@torch_op("aten.logaddexp", "aten.logaddexp2")
def logaddexp(n: Node, self: Expr, other: Expr) -> Expr:
    """max + log(1 + exp(-|a - b|)), in the base e or 2; where both are the same infinity, that infinity."""
    a, b = wide_operands(n, self, other)
    is_binary = "logaddexp2" in n.target
    same = n.emit(ops.logical_and(n.emit(ops.isinf(a)), n.emit(ops.equal(a, b))))
    distance = n.emit(ops.neg(n.emit(ops.abs(n.emit(ops.subtract(a, b))))))
    ratio = n.emit((ops.exp2 if is_binary else ops.exp)(distance))
    excess = n.emit(ops.log1p(ratio))
    if is_binary:
        excess = n.emit(ops.multiply(excess, number(n, 1 / math.log(2))))
    return finished(n, ops.where(same, a, n.emit(ops.add(n.emit(ops.maximum(a, b)), excess))))


@torch_op("aten.xlogy", "aten.special_xlogy", "aten.special_xlog1py")
def xlogy(n: Node, self: Any, other: Any) -> Expr:
    """self * log(other), or log(1 + other); 0 where self is 0, and NaN where other is."""
    a, b = wide_operands(n, self, other)
    product = n.emit(ops.multiply(a, n.emit((ops.log1p if "log1p" in n.target else ops.log)(b))))
    is_zero = n.emit(ops.equal(a, number(n, 0)))
    rest = n.emit(ops.where(is_zero, number(n, 0), product))
    return finished(n, ops.where(n.emit(ops.isnan(b)), b, rest))


@torch_op("aten.special_entr")
def entr(n: Node, self: Expr) -> Expr:
    """-x log(x); 0 at 0 and -inf below."""
    (x,) = wide_operands(n, self)
    product = n.emit(ops.neg(n.emit(ops.multiply(x, n.emit(ops.log(x))))))
    is_zero, below = n.emit(ops.equal(x, number(n, 0))), n.emit(ops.less(x, number(n, 0)))
    return finished(n, ops.where(below, number(n, -math.inf), n.emit(ops.where(is_zero, number(n, 0), product))))


@torch_op("aten.heaviside")
def heaviside(n: Node, self: Expr, values: Expr) -> Expr:
    dtype = n.dtype()
    if dtype == "bool":
        return binary(n, self, values, ops.logical_or, dtype)
    a, b = (n.fit(n.operand(x, dtype), n.shape()) for x in (self, values))
    above = n.emit(ops.where(n.emit(ops.greater(a, n.operand(0, dtype))), n.operand(1, dtype), n.operand(0, dtype)))
    return n.emit(ops.where(n.emit(ops.equal(a, n.operand(0, dtype))), b, above))


@torch_op("aten.nan_to_num")
def nan_to_num(n: Node, self: Expr, nan: float | None = None, posinf: float | None = None,
               neginf: float | None = None) -> Expr:  # fmt: skip
    dtype = n.dtype()
    if not dtypes.is_float(dtype):
        return self
    greatest = float(_GREATEST[dtype])
    values = (nan or 0.0, greatest if posinf is None else posinf, -greatest if neginf is None else neginf)
    tests = (
        ops.isnan(self), ops.isinf(self, detect_negative=False), ops.isinf(self, detect_positive=False),
    )  # fmt: skip
    result = self
    for test, value in zip(tests, values, strict=True):
        result = n.emit(ops.where(n.emit(test), n.operand(value, dtype), result))
    return result


_GREATEST = {
    "float16": 65504.0, "bfloat16": 2.0**127 * (2 - 2.0**-7), "float32": 2.0**127 * (2 - 2.0**-23),
    "float64": 2.0**1023 * (2 - 2.0**-52),
}  # fmt: skip


@torch_op("aten.deg2rad", "aten.rad2deg")
def deg2rad(n: Node, self: Expr) -> Expr:
    factor = math.pi / 180 if "deg2rad" in n.target else 180 / math.pi
    return binary(n, self, factor, ops.multiply, n.dtype())


@torch_op("aten.logit", "aten.special_logit")
def logit(n: Node, self: Expr, eps: float | None = None) -> Expr:
    (x,) = wide_operands(n, self)
    if eps is not None:
        x = n.emit(ops.clip(x, lower=eps, upper=1 - eps))
    return finished(n, ops.log(n.emit(ops.divide(x, n.emit(ops.subtract(number(n, 1), x))))))


@torch_op("aten.sinc", "aten.special_sinc")
def sinc(n: Node, self: Expr) -> Expr:
    (x,) = wide_operands(n, self)
    is_zero = n.emit(ops.equal(x, number(n, 0)))
    angle = n.emit(ops.multiply(n.emit(ops.where(is_zero, number(n, 1), x)), number(n, math.pi)))
    ratio = n.emit(ops.divide(n.emit(ops.sin(angle)), angle))
    return finished(n, ops.where(is_zero, number(n, 1), ratio))


@torch_op("aten.lerp")
def lerp(n: Node, self: Expr, end: Expr, weight: Any) -> Expr:
    """self + weight * (end - self), from the nearer end."""
    a, b, w = wide_operands(n, self, end, weight)
    difference = n.emit(ops.subtract(b, a))
    from_start = n.emit(ops.add(a, n.emit(ops.multiply(w, difference))))
    rest = n.emit(ops.multiply(difference, n.emit(ops.subtract(number(n, 1), w))))
    from_end = n.emit(ops.subtract(b, rest))
    is_near = n.emit(ops.less(n.emit(ops.abs(w)), number(n, 0.5)))
    return finished(n, ops.where(is_near, from_start, from_end))


@torch_op("aten.addcmul", "aten.addcdiv")
def addcmul(n: Node, self: Expr, tensor1: Expr, tensor2: Expr, value: Any = 1) -> Expr:
    a, b, c = wide_operands(n, self, tensor1, tensor2)
    op = ops.multiply if "addcmul" in n.target else ops.divide
    scaled = n.emit(ops.multiply(b, n.operand(value, wide_dtype(n)))) if value != 1 else b
    return finished(n, ops.add(a, n.emit(op(scaled, c))))


@torch_op("aten.ldexp")
def ldexp(n: Node, self: Expr, other: Expr) -> Expr:
    """self * 2 ** other, with the power in the type of the result, as torch computes it."""
    power = n.emit(ops.exp2(n.operand(other, n.dtype())))
    return binary(n, self, power, ops.multiply, n.dtype())


# Special functions: ops that compute in float64. Names of torch, with or without "special_".
_SPECIAL: dict[str, Callable[..., Any]] = {
    "airy_ai": ops.airy_ai,
    "bessel_j0": ops.bessel_j0,
    "bessel_j1": ops.bessel_j1,
    "bessel_y0": ops.bessel_y0,
    "bessel_y1": ops.bessel_y1,
    "digamma": ops.digamma,
    "erfc": ops.erfc,
    "erfcx": ops.erfcx,
    "erfinv": ops.erfinv,
    "gammaln": ops.lgamma,
    "i0": ops.bessel_i0,
    "i0e": ops.bessel_i0e,
    "i1": ops.bessel_i1,
    "i1e": ops.bessel_i1e,
    "lgamma": ops.lgamma,
    "log_ndtr": ops.log_ndtr,
    "modified_bessel_i0": ops.bessel_i0,
    "modified_bessel_i1": ops.bessel_i1,
    "modified_bessel_k0": ops.bessel_k0,
    "modified_bessel_k1": ops.bessel_k1,
    "ndtri": ops.ndtri,
    "psi": ops.digamma,
    "scaled_modified_bessel_k0": ops.bessel_k0e,
    "scaled_modified_bessel_k1": ops.bessel_k1e,
    "spherical_bessel_j0": ops.spherical_bessel_j0,
}
for _name, _op in _SPECIAL.items():
    torch_op(f"aten.{_name}", f"aten.special_{_name}")(lambda n, self, op=_op: unary(n, self, op))


@torch_op("aten.special_ndtr")
def ndtr(n: Node, self: Expr) -> Expr:
    (x,) = wide_operands(n, self)
    return finished(n, ops.multiply(n.emit(ops.erfc(n.emit(ops.multiply(x, number(n, -(0.5**0.5)))))), number(n, 0.5)))


def series(n: Node, a: Any, b: Any, op: Callable[..., Any], **attrs: Any) -> Expr:
    """Apply an op of two operands that computes element by element in loops."""
    return n.emit(op(*(n.fit(n.operand(x, n.dtype()), n.shape()) for x in (a, b)), **attrs))


@torch_op("aten.special_zeta")
def zeta(n: Node, self: Any, other: Any) -> Expr:
    return series(n, self, other, ops.zeta)


@torch_op("aten.polygamma", "aten.special_polygamma")
def polygamma(n: Node, order: int, self: Expr) -> Expr:
    """Derivative of digamma of an order: (-1) ** (order + 1) * order! * zeta(order + 1, x)."""
    if order == 0:
        return unary(n, self, ops.digamma)
    x = n.cast(self, "float64")
    value = n.emit(ops.zeta(n.operand(order + 1, "float64"), x))
    factor = math.factorial(order) if order < 171 else math.inf
    return n.cast(n.emit(ops.multiply(value, n.operand(factor if order % 2 else -factor, "float64"))), n.dtype())


@torch_op("aten.igamma", "aten.igammac", "aten.special_gammainc", "aten.special_gammaincc")
def igamma(n: Node, self: Expr, other: Expr) -> Expr:
    is_upper = n.target.startswith(("aten.igammac", "aten.special_gammaincc"))
    return series(n, self, other, ops.igammac if is_upper else ops.igamma)


_FAMILIES = {
    "chebyshev_polynomial_t": "chebyshev_t", "chebyshev_polynomial_u": "chebyshev_u",
    "chebyshev_polynomial_v": "chebyshev_v", "chebyshev_polynomial_w": "chebyshev_w",
    "hermite_polynomial_h": "hermite_h", "hermite_polynomial_he": "hermite_he",
    "laguerre_polynomial_l": "laguerre", "legendre_polynomial_p": "legendre",
}  # fmt: skip


def _polynomial(n: Node, x: Any, degree: Any, family: str, *, is_shifted: bool) -> Expr:
    dtype = n.dtype()
    limit = {"float32": 128, "float64": 512}.get(dtype, 1024) if family.startswith("hermite") else None
    argument = n.operand(x, dtype)
    if is_shifted:
        twice = n.emit(ops.add(argument, argument))
        argument = n.emit(ops.subtract(twice, n.operand(1, dtype)))
    return series(n, argument, degree, ops.orthogonal_polynomial, family=family, limit=limit)


for _name, _family in _FAMILIES.items():
    torch_op(f"aten.special_{_name}")(
        lambda node, x, n, family=_family: _polynomial(node, x, n, family, is_shifted=False)
    )
    if _name.startswith("chebyshev"):
        torch_op(f"aten.special_shifted_{_name}")(
            lambda node, x, n, family=_family: _polynomial(node, x, n, family, is_shifted=True)
        )


@torch_op("aten.gcd")
def gcd(n: Node, self: Expr, other: Expr) -> Expr:
    return series(n, self, other, ops.gcd)


@torch_op("aten.lcm")
def lcm(n: Node, self: Expr, other: Expr) -> Expr:
    dtype = n.dtype()
    divisor = series(n, self, other, ops.gcd)
    a, b = (n.fit(n.operand(x, dtype), n.shape()) for x in (self, other))
    quotient = n.emit(ops.truncdiv(a, divisor))  # 0 where the divisor is 0
    return n.emit(ops.abs(n.emit(ops.multiply(quotient, b))))


# Parts of floats, without access to their bits.
_PRECISION = {"float16": (11, -24), "bfloat16": (8, -133), "float32": (24, -149), "float64": (53, -1074)}


def scaled_by_power(n: Node, x: Expr, exponent: Expr) -> Expr:
    """Emit x * 2 ** exponent, both float64, in two exact steps, as the power itself may overflow."""
    half = n.emit(ops.trunc(n.emit(ops.multiply(exponent, n.operand(0.5, "float64")))))
    rest = n.emit(ops.subtract(exponent, half))
    return n.emit(ops.multiply(n.emit(ops.multiply(x, n.emit(ops.exp2(half)))), n.emit(ops.exp2(rest))))


def binary_exponent(n: Node, x: Expr) -> Expr:
    """Emit the e of x = m * 2 ** e with 0.5 <= |m| < 1, as float64, for finite float64 x other than 0."""
    one = n.operand(1, "float64")
    estimate = n.emit(ops.add(n.emit(ops.floor(n.emit(ops.log2(n.emit(ops.abs(x)))))), one))
    size = n.emit(ops.abs(scaled_by_power(n, x, n.emit(ops.neg(estimate)))))
    larger = n.cast(n.emit(ops.greater_equal(size, one)), "float64")
    smaller = n.cast(n.emit(ops.less(size, n.operand(0.5, "float64"))), "float64")
    return n.emit(ops.add(estimate, n.emit(ops.subtract(larger, smaller))))


def regular(n: Node, x: Expr) -> tuple[Expr, Expr]:
    """Emit where x is finite and not 0, and x there; 1 elsewhere."""
    rest = n.emit(ops.subtract(x, x))  # NaN for infinities and NaN
    is_regular = n.emit(
        ops.logical_and(n.emit(ops.equal(rest, rest)), n.emit(ops.not_equal(x, n.operand(0, "float64"))))
    )
    return is_regular, n.emit(ops.where(is_regular, x, n.operand(1, "float64")))


@torch_op("aten.frexp")
def frexp(n: Node, self: Expr) -> tuple[Expr, Expr]:
    """Mantissa and exponent; zeros, infinities and NaN have the exponent 0."""
    is_regular, x = regular(n, n.cast(self, "float64"))
    exponent = binary_exponent(n, x)
    mantissa = n.cast(scaled_by_power(n, x, n.emit(ops.neg(exponent))), n.dtype())
    mantissa = n.emit(ops.where(is_regular, mantissa, self))
    exponent = n.emit(ops.where(is_regular, exponent, n.operand(0, "float64")))
    return mantissa, n.cast(exponent, "int32")


@torch_op("aten.nextafter")
def nextafter(n: Node, self: Expr, other: Expr) -> Expr:
    """The float next to self in the direction of other."""
    dtype, shape = n.dtype(), n.shape()
    digits, least = _PRECISION[dtype]
    a, b = (n.fit(n.cast(x, dtype), shape) for x in (self, other))
    wide, target = n.cast(a, "float64"), n.cast(b, "float64")
    is_up = n.emit(ops.greater(target, wide))
    is_regular, x = regular(n, wide)
    exponent = binary_exponent(n, x)
    # Below a power of two, the distance to the next float towards 0 is half as large.
    is_power = n.emit(ops.equal(n.emit(ops.abs(x)), scaled_by_power(n, n.operand(0.5, "float64"), exponent)))
    is_inward = n.emit(ops.logical_xor(is_up, n.emit(ops.greater(x, n.operand(0, "float64")))))
    lower = n.cast(n.emit(ops.logical_and(is_power, is_inward)), "float64")
    place = n.emit(ops.subtract(n.emit(ops.subtract(exponent, n.operand(digits, "float64"))), lower))
    place = n.emit(ops.maximum(place, n.operand(least, "float64")))
    step = scaled_by_power(n, n.operand(1, "float64"), place)
    step = n.emit(ops.where(is_regular, step, n.operand(2.0**least, "float64")))
    moved = n.emit(ops.add(wide, n.emit(ops.where(is_up, step, n.emit(ops.neg(step))))))
    greatest = n.operand(_GREATEST[dtype], "float64")  # next to an infinity
    inward = n.emit(ops.where(is_up, n.emit(ops.neg(greatest)), greatest))
    moved = n.emit(ops.where(n.emit(ops.isinf(wide)), inward, moved))
    moved = n.emit(ops.where(n.emit(ops.equal(wide, target)), target, moved))
    either = n.emit(ops.add(wide, target))
    is_nan = n.emit(ops.logical_or(n.emit(ops.isnan(wide)), n.emit(ops.isnan(target))))
    return n.cast(n.emit(ops.where(is_nan, either, moved)), dtype)
