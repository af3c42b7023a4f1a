"""Converters of operators on complex tensors, which are pairs of real ones: real and imaginary part.

A real operand of such an operator has the imaginary part None, which costs no product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from relaxlite.frontend.torch import convert_linalg, convert_reductions
from relaxlite.frontend.torch.complex_parts import combine, over_parts, part
from relaxlite.frontend.torch.convert_special import hypot
from relaxlite.frontend.torch.node import Complex, Node
from relaxlite.frontend.torch.registry import complex_op, torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr

Parts = tuple[Expr, "Expr | None"]


def parts_of(n: Node, value: Any, dtype: str | None = None) -> Parts:
    """Return real and imaginary part of a tensor or number, in a dtype: by default that of the result's parts."""
    dtype = dtype or n.dtype()
    if isinstance(value, Complex):
        return n.cast(part(n, value, 0), dtype), n.cast(part(n, value, 1), dtype)
    if isinstance(value, complex):
        return n.operand(value.real, dtype), n.operand(value.imag, dtype)
    return n.operand(value, dtype), None


def joined(n: Node, real: Expr, imaginary: Expr | None) -> Complex:
    """Return the complex result of two parts, each broadcast to the result's shape."""
    shape = n.shape()
    real = n.broadcast(real, shape)
    return combine(n, real, n.full(shape, 0, n.dtype()) if imaginary is None else n.broadcast(imaginary, shape))


def plus(n: Node, a: Expr | None, b: Expr | None) -> Expr | None:
    """Return a + b; None is 0."""
    return b if a is None else a if b is None else n.emit(ops.add(a, b))


def minus(n: Node, a: Expr | None, b: Expr | None) -> Expr | None:
    """Return a - b; None is 0."""
    if b is None:
        return a
    return n.emit(ops.neg(b)) if a is None else n.emit(ops.subtract(a, b))


def times(n: Node, a: Expr | None, b: Expr | None) -> Expr | None:
    """Return a * b; None is 0."""
    return None if a is None or b is None else n.emit(ops.multiply(a, b))


def known(x: Expr | None) -> Expr:
    """Return a part that is not None."""
    assert x is not None
    return x


def product(n: Node, a: Parts, b: Parts) -> Parts:
    """Return the product of two complex numbers."""
    real = minus(n, times(n, a[0], b[0]), times(n, a[1], b[1]))
    return known(real), plus(n, times(n, a[0], b[1]), times(n, a[1], b[0]))


def quotient(n: Node, a: Parts, b: Parts) -> Parts:
    """Return a / b, with b scaled by its greater part so that no square overflows."""
    if b[1] is None:
        return n.emit(ops.divide(a[0], b[0])), None if a[1] is None else n.emit(ops.divide(a[1], b[0]))
    scale = n.emit(ops.maximum(n.emit(ops.abs(b[0])), n.emit(ops.abs(b[1]))))
    c, d = n.emit(ops.divide(b[0], scale)), n.emit(ops.divide(b[1], scale))
    size = n.emit(ops.multiply(scale, n.emit(ops.add(known(times(n, c, c)), known(times(n, d, d))))))
    real, imaginary = product(n, a, (c, n.emit(ops.neg(d))))
    return n.emit(ops.divide(real, size)), n.emit(ops.divide(known(imaginary), size))


def magnitude(n: Node, x: Parts) -> Expr:
    """Return |x|."""
    return n.emit(ops.abs(x[0])) if x[1] is None else hypot(n, x[0], x[1])


# Parts and pairs


@torch_op("aten.view_as_real", "aten.view_as_real_copy", complex=True)
def view_as_real(n: Node, self: Complex) -> Expr:
    return self.parts


@torch_op("aten.view_as_complex", "aten.view_as_complex_copy")
def view_as_complex(n: Node, self: Expr) -> Complex:
    return Complex(self)


@torch_op("aten.real", "aten.imag", complex=True)
def real(n: Node, self: Expr | Complex) -> Expr:
    if isinstance(self, Complex):
        return part(n, self, int(n.target.startswith("aten.imag")))
    return self


@torch_op("aten.complex")
def complex_(n: Node, real: Expr, imag: Expr) -> Complex:
    return joined(n, real, imag)


@torch_op("aten.polar")
def polar(n: Node, abs: Expr, angle: Expr) -> Complex:
    return joined(n, *polar_form(n, abs, angle))


def polar_form(n: Node, size: Expr, angle: Expr) -> tuple[Expr, Expr]:
    """Return the parts of size * exp(i angle)."""
    return (n.emit(ops.multiply(size, n.emit(ops.cos(angle)))), n.emit(ops.multiply(size, n.emit(ops.sin(angle)))))


@torch_op("aten.conj", "aten._conj", "aten.conj_physical", "aten._conj_physical", "aten._conj_copy", complex=True)
def conj(n: Node, self: Any) -> Any:
    if not isinstance(self, Complex):
        return self
    return combine(n, part(n, self, 0), n.emit(ops.neg(part(n, self, 1))))


@torch_op("aten.resolve_conj", "aten.resolve_neg", complex=True)
def resolve(n: Node, self: Any) -> Any:
    return self


@torch_op("aten._neg_view", "aten._neg_view_copy", complex=True)
@over_parts
def neg_view(n: Node, self: Expr) -> Expr:
    return n.emit(ops.neg(self))


@complex_op("aten._to_copy", "aten.to", "aten.type_as", "prims.convert_element_type")
def to(n: Node, self: Any, dtype: Any = None, other: Any = None) -> Any:
    if n.is_complex():
        return joined(n, *parts_of(n, self))
    if n.dtype() == "bool":
        return convert_reductions.is_nonzero(n, self)
    return n.cast(part(n, self, 0), n.dtype())


# Arithmetic


@complex_op("aten.add", "aten.sub", "aten.subtract", "aten.rsub")
def add(n: Node, self: Any, other: Any, alpha: Any = 1) -> Complex:
    if n.target.startswith("aten.rsub"):
        self, other = other, self
    a, b = parts_of(n, self), parts_of(n, other)
    if alpha != 1:
        b = product(n, b, parts_of(n, alpha))
    combined = plus if n.target.startswith("aten.add") else minus
    return joined(n, known(combined(n, a[0], b[0])), combined(n, a[1], b[1]))


@complex_op("aten.mul", "aten.multiply")
def mul(n: Node, self: Any, other: Any) -> Complex:
    return joined(n, *product(n, parts_of(n, self), parts_of(n, other)))


@complex_op("aten.div", "aten.divide", "aten.true_divide")
def div(n: Node, self: Any, other: Any) -> Complex:
    return joined(n, *quotient(n, parts_of(n, self), parts_of(n, other)))


@complex_op("aten.neg", "aten.negative")
@over_parts
def neg(n: Node, self: Expr) -> Expr:
    return n.emit(ops.neg(self))


@complex_op("aten.reciprocal")
def reciprocal(n: Node, self: Any) -> Complex:
    return joined(n, *quotient(n, (n.operand(1, n.dtype()), None), parts_of(n, self)))


@complex_op("aten.square")
def square(n: Node, self: Any) -> Complex:
    x = parts_of(n, self)
    return joined(n, *product(n, x, x))


@complex_op("aten.eq", "aten.ne")
def equal(n: Node, self: Any, other: Any) -> Expr:
    dtype = next(n.dtype_of(x.parts) for x in (self, other) if isinstance(x, Complex))
    a, b = parts_of(n, self, dtype), parts_of(n, other, dtype)
    zero = n.operand(0, dtype)
    flags = [n.emit(ops.equal(zero if x is None else x, zero if y is None else y)) for x, y in zip(a, b, strict=True)]
    both = n.broadcast(n.emit(ops.logical_and(*flags)), n.shape())
    return both if n.target.startswith("aten.eq") else n.emit(ops.logical_not(both))


@complex_op("aten.isnan", "aten.isinf", "aten.isfinite")
def isnan(n: Node, self: Complex) -> Expr:
    """Whether a part is NaN or infinite; whether both are finite."""
    if n.target.startswith("aten.isnan"):
        return n.emit(ops.any(n.emit(ops.isnan(self.parts)), axes=(-1,)))
    is_infinite = n.emit(ops.isinf(self.parts))
    if n.target.startswith("aten.isinf"):
        return n.emit(ops.any(is_infinite, axes=(-1,)))
    is_off = n.emit(ops.logical_or(is_infinite, n.emit(ops.isnan(self.parts))))
    return n.emit(ops.logical_not(n.emit(ops.any(is_off, axes=(-1,)))))


@complex_op("aten.where")
def where(n: Node, condition: Expr, self: Any, other: Any) -> Complex:
    shape, dtype = n.shape(), n.dtype()
    zero = n.operand(0, dtype)
    a, b = ([zero if x is None else n.fit(x, shape) for x in parts_of(n, v)] for v in (self, other))
    flags = n.fit(n.cast(condition, "bool"), shape)
    return joined(n, *(n.emit(ops.where(flags, x, y)) for x, y in zip(a, b, strict=True)))


# Functions


@complex_op("aten.abs", "aten.absolute")
def absolute(n: Node, self: Complex) -> Expr:
    return magnitude(n, parts_of(n, self))


@torch_op("aten.angle", complex=True)
def angle(n: Node, self: Any) -> Expr:
    if isinstance(self, Complex):
        real, imaginary = parts_of(n, self)
        return n.emit(ops.atan2(known(imaginary), real))
    x = n.cast(self, n.dtype())
    zero = n.operand(0, n.dtype())
    result = n.emit(ops.where(n.emit(ops.less(x, zero)), n.operand(math.pi, n.dtype()), zero))
    return n.emit(ops.where(n.emit(ops.isnan(x)), x, result))


@complex_op("aten.sgn")
def sgn(n: Node, self: Complex) -> Complex:
    x = parts_of(n, self)
    size = magnitude(n, x)
    divisor = n.emit(ops.where(n.emit(ops.equal(size, n.operand(0, n.dtype()))), n.operand(1, n.dtype()), size))
    return joined(n, n.emit(ops.divide(x[0], divisor)), n.emit(ops.divide(known(x[1]), divisor)))


def exponential(n: Node, x: Parts) -> Parts:
    """Return exp(x)."""
    size = n.emit(ops.exp(x[0]))
    return (size, None) if x[1] is None else polar_form(n, size, x[1])


def logarithm(n: Node, x: Parts) -> tuple[Expr, Expr]:
    """Return log(x), with the imaginary part between -pi and pi."""
    imaginary = x[1] if x[1] is not None else n.operand(0, n.dtype())
    return n.emit(ops.log(magnitude(n, x))), n.emit(ops.atan2(imaginary, x[0]))


@complex_op("aten.exp")
def exp(n: Node, self: Complex) -> Complex:
    return joined(n, *exponential(n, parts_of(n, self)))


@complex_op("aten.log", "aten.log2", "aten.log10")
def log(n: Node, self: Complex) -> Complex:
    base = 2.0 if n.target.startswith("aten.log2") else 10.0 if n.target.startswith("aten.log10") else math.e
    factor = n.operand(1 / math.log(base), n.dtype())
    parts = logarithm(n, parts_of(n, self))
    return joined(n, *(parts if base == math.e else (n.emit(ops.multiply(x, factor)) for x in parts)))


def square_root(n: Node, x: Parts) -> tuple[Expr, Expr]:
    """Return the root in the right half-plane: of the greater part from |x|, of the other by division."""
    real, imaginary = x[0], known(x[1])
    dtype = n.dtype()
    zero, half = n.operand(0, dtype), n.operand(0.5, dtype)
    size = n.emit(ops.add(n.emit(ops.abs(real)), magnitude(n, x)))
    great = n.emit(ops.sqrt(n.emit(ops.multiply(size, half))))
    is_zero = n.emit(ops.equal(great, zero))
    divisor = n.emit(ops.where(is_zero, n.operand(1, dtype), n.emit(ops.add(great, great))))
    is_below, is_right = n.emit(ops.less(imaginary, zero)), n.emit(ops.greater_equal(real, zero))
    small = n.emit(ops.divide(n.emit(ops.abs(imaginary)), divisor))
    upper = n.emit(ops.where(is_right, small, great))
    signed = n.emit(ops.where(is_below, n.emit(ops.neg(upper)), upper))
    return n.emit(ops.where(is_right, great, small)), signed


@complex_op("aten.sqrt", "aten.rsqrt")
def sqrt(n: Node, self: Complex) -> Complex:
    root = square_root(n, parts_of(n, self))
    if n.target.startswith("aten.rsqrt"):
        return joined(n, *quotient(n, (n.operand(1, n.dtype()), None), root))
    return joined(n, *root)


@complex_op("aten.pow", "aten.float_power")
def power(n: Node, self: Any, exponent: Any) -> Complex:
    """x ** y = exp(y log(x)); 0 ** y is 0, but 1 for y = 0."""
    dtype = n.dtype()
    x, y = parts_of(n, self), parts_of(n, exponent)
    if isinstance(exponent, int | float) and exponent == 2:
        return joined(n, *product(n, x, x))
    zero, one = n.operand(0, dtype), n.operand(1, dtype)
    value = exponential(n, product(n, logarithm(n, x), y))
    is_zero = n.emit(ops.equal(magnitude(n, x), zero))
    is_constant = n.emit(ops.equal(magnitude(n, y), zero))
    at_zero = n.emit(ops.where(is_constant, one, zero))
    real = n.emit(ops.where(is_zero, at_zero, value[0]))
    return joined(n, real, n.emit(ops.where(is_zero, zero, known(value[1]))))


# Trigonometric and hyperbolic functions: real and imaginary part by functions of real and imaginary part.
_Function = Callable[..., Any]
_CIRCULAR: dict[str, tuple[_Function, _Function, _Function, _Function, int]] = {
    "sin": (ops.sin, ops.cosh, ops.cos, ops.sinh, 1),
    "cos": (ops.cos, ops.cosh, ops.sin, ops.sinh, -1),
    "sinh": (ops.sinh, ops.cos, ops.cosh, ops.sin, 1),
    "cosh": (ops.cosh, ops.cos, ops.sinh, ops.sin, 1),
}


def _circular(n: Node, self: Complex, functions: tuple[_Function, _Function, _Function, _Function, int]) -> Complex:
    x, y = parts_of(n, self)
    of_x, of_y, also_x, also_y, sign = functions
    real = n.emit(ops.multiply(n.emit(of_x(x)), n.emit(of_y(known(y)))))
    imaginary = n.emit(ops.multiply(n.emit(also_x(x)), n.emit(also_y(known(y)))))
    return joined(n, real, imaginary if sign > 0 else n.emit(ops.neg(imaginary)))


for _name, _functions in _CIRCULAR.items():
    complex_op(f"aten.{_name}")(lambda n, self, functions=_functions: _circular(n, self, functions))


@complex_op("aten.sigmoid")
def sigmoid(n: Node, self: Complex) -> Complex:
    one = n.operand(1, n.dtype())
    x, y = parts_of(n, self)
    real, imaginary = exponential(n, (n.emit(ops.neg(x)), n.emit(ops.neg(known(y)))))
    return joined(n, *quotient(n, (one, None), (n.emit(ops.add(real, one)), imaginary)))


@complex_op("aten.silu")
def silu(n: Node, self: Complex) -> Complex:
    return joined(n, *product(n, parts_of(n, self), parts_of(n, sigmoid(n, self))))


@complex_op("aten.tanh")
def tanh(n: Node, self: Complex) -> Complex:
    """(sinh(2x) + i sin(2y)) / (cosh(2x) + cos(2y)), with x limited to where tanh(x) is 1."""
    x, y = parts_of(n, self)
    x = n.emit(ops.clip(x, lower=-20.0, upper=20.0))
    double_x, double_y = n.emit(ops.add(x, x)), n.emit(ops.add(known(y), known(y)))
    below = n.emit(ops.add(n.emit(ops.cosh(double_x)), n.emit(ops.cos(double_y))))
    real = n.emit(ops.divide(n.emit(ops.sinh(double_x)), below))
    return joined(n, real, n.emit(ops.divide(n.emit(ops.sin(double_y)), below)))


# Linear operators: reductions part by part, products by four real ones.

complex_op("aten.sum")(over_parts(convert_reductions.sum_))
complex_op("aten.mean")(over_parts(convert_reductions.mean))
complex_op("aten.cumsum")(over_parts(convert_reductions.cumsum))
complex_op("aten.trace")(over_parts(convert_reductions.trace))


@complex_op("aten.var", "aten.std", "aten.var_mean", "aten.std_mean")
def var(
    n: Node, self: Complex, dim: Any = None, unbiased: bool = True, correction: Any = None, keepdim: bool = False
) -> Any:
    """The variance of a complex tensor, the sum of its parts' variances."""
    pairs = [
        convert_reductions.variance(n, x, dim, unbiased, correction, keepdim, n.dtype())
        for x in (part(n, self, 0), part(n, self, 1))
    ]
    value = n.emit(ops.add(pairs[0][0], pairs[1][0]))
    if n.target.startswith("aten.std"):
        value = n.emit(ops.sqrt(value))
    return (value, combine(n, pairs[0][1], pairs[1][1])) if "_mean" in n.target else value


def bilinear(n: Node, multiply: Callable[[Expr, Expr], Expr], a: Any, b: Any) -> Complex:
    """Return a product that is linear in both operands, as products of their parts."""

    def times(x: Expr | None, y: Expr | None) -> Expr | None:
        return None if x is None or y is None else multiply(x, y)

    x, y = parts_of(n, a), parts_of(n, b)
    real = minus(n, times(x[0], y[0]), times(x[1], y[1]))
    return joined(n, known(real), plus(n, times(x[0], y[1]), times(x[1], y[0])))


@complex_op("aten.mm", "aten.bmm", "aten.matmul", "aten.mv", "aten.dot", "aten.vdot", "aten.__matmul__")
def matmul(
    n: Node, self: Any, other: Any = None, mat2: Any = None, vec: Any = None, tensor: Any = None
) -> Complex:  # fmt: skip
    right = next(x for x in (other, mat2, vec, tensor) if x is not None)
    left = conj(n, self) if n.target.startswith("aten.vdot") else self
    return bilinear(n, lambda a, b: convert_linalg.matrix_product(n, a, b, n.dtype()), left, right)


@complex_op("aten.inner")
def inner(n: Node, self: Any, other: Any) -> Complex:
    return bilinear(n, lambda a, b: convert_linalg.inner(n, a, b), self, other)


@complex_op("aten.outer", "aten.ger")
def outer(n: Node, self: Any, vec2: Any) -> Complex:
    return bilinear(n, lambda a, b: convert_linalg.outer(n, a, b), self, vec2)


@complex_op("aten.kron")
def kron(n: Node, self: Any, other: Any) -> Complex:
    return bilinear(n, lambda a, b: convert_linalg.kron(n, a, b), self, other)


@complex_op("aten.tensordot")
def tensordot(n: Node, self: Any, other: Any, dims_self: list[int], dims_other: list[int]) -> Complex:
    return bilinear(n, lambda a, b: convert_linalg.tensordot(n, a, b, dims_self, dims_other), self, other)


@complex_op("aten.einsum")
def einsum(n: Node, equation: str, tensors: list[Any], path: Any = None) -> Complex:
    if len(tensors) == 1:
        real, imaginary = parts_of(n, tensors[0])
        terms = [convert_linalg.einsum_of(n, equation, [x], n.dtype()) for x in (real, known(imaginary))]
        return joined(n, *terms)
    if len(tensors) != 2:
        n.fail("an Einstein summation of more than two complex tensors is not supported")
    return bilinear(n, lambda a, b: convert_linalg.einsum_of(n, equation, [a, b], n.dtype()), *tensors)


@complex_op("aten.linear")
def linear(n: Node, input: Any, weight: Any, bias: Any = None) -> Complex:
    result = bilinear(n, lambda a, b: convert_linalg.linear(n, a, b), input, weight)
    if bias is None:
        return result
    a, b = parts_of(n, result), parts_of(n, bias)
    return joined(n, known(plus(n, a[0], b[0])), plus(n, a[1], b[1]))


@complex_op("aten.addmm", "aten.addmv", "aten.baddbmm")
def addmm(
    n: Node, self: Any, mat1: Any = None, mat2: Any = None, mat: Any = None, vec: Any = None, batch1: Any = None,
    batch2: Any = None, beta: Any = 1, alpha: Any = 1,
) -> Complex:  # fmt: skip
    left, right = (next(x for x in group if x is not None) for group in ((mat1, mat, batch1), (mat2, vec, batch2)))
    result = bilinear(n, lambda a, b: convert_linalg.matrix_product(n, a, b, n.dtype()), left, right)
    a = product(n, parts_of(n, result), parts_of(n, alpha)) if alpha != 1 else parts_of(n, result)
    if beta == 0:
        return joined(n, *a)
    b = product(n, parts_of(n, self), parts_of(n, beta)) if beta != 1 else parts_of(n, self)
    return joined(n, known(plus(n, a[0], b[0])), plus(n, a[1], b[1]))
