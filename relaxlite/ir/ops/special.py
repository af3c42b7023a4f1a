"""Special functions of one operand: error functions, normal distribution, gamma function.

All are computed in float64 and rounded once to the dtype of x. Coefficients: special_tables.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from relaxlite.dtypes import DType
from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Op, Sample, register_op
from relaxlite.ir.ops import special_tables as tables
from relaxlite.ir.ops.elementwise import FLOAT, check_dtype
from relaxlite.ir.ops.scalars import Operand, Scalar, select
from relaxlite.ir.program import Allocate, Buffer, Stmt, Store, loops, seq
from relaxlite.ir.scalar_functions import apply_binary, apply_compare, apply_unary
from relaxlite.ir.symbolic import SymExpr, sym
from relaxlite.ir.types import Type

Let = Callable[[Scalar], Scalar]
Formula = Callable[[Scalar, Let], Scalar]

PI = math.pi


class ArrayScalar(Scalar):
    """A NumPy array with the operators of a Scalar, so that one formula gives machine code and reference."""

    __slots__ = ()
    value: Any

    @property
    def dtype(self) -> DType:
        return str(self.value.dtype)

    def wrap(self, other: Operand) -> Any:
        return other.value if isinstance(other, Scalar) else np.asarray(other, self.value.dtype)

    def binary(self, op: str, other: Operand) -> Scalar:
        return ArrayScalar(apply_binary(op, self.value, self.wrap(other)))  # type: ignore[arg-type]

    def _reversed(self, op: str, other: Operand) -> Scalar:
        return ArrayScalar(apply_binary(op, self.wrap(other), self.value))  # type: ignore[arg-type]

    def unary(self, op: str) -> Scalar:
        return ArrayScalar(apply_unary(op, self.value))  # type: ignore[arg-type]

    def compare(self, op: str, other: Operand) -> Scalar:
        return ArrayScalar(apply_compare(op, self.value, self.wrap(other)))  # type: ignore[arg-type]


def choose(cond: Scalar, then: Operand, other: Operand) -> Scalar:
    """Select `then` where cond is true, else `other`: of Scalars or of arrays."""
    if not isinstance(cond, ArrayScalar):
        return select(cond, then, other)
    like = then if isinstance(then, ArrayScalar) else other
    assert isinstance(like, ArrayScalar)
    return ArrayScalar(np.where(cond.value, like.wrap(then), like.wrap(other)))


class Bindings:
    """Values that a formula uses several times: `let(value)` gives a local variable with the value."""

    def __init__(self) -> None:
        self._stores: list[Store] = []

    def __call__(self, value: Scalar) -> Scalar:
        buffer = Buffer.of(f"value{len(self._stores)}", (1,), value.dtype, "local")
        self._stores.append(Store(buffer, (sym(0),), value.value))
        return Scalar(buffer[0])

    def around(self, stmt: Stmt) -> Stmt:
        """Statement preceded by the computation of the values, in order."""
        body = seq(*self._stores, stmt)
        for store in self._stores:
            body = Allocate(store.buffer, body)
        return body


def horner(x: Scalar, coefficients: Sequence[float]) -> Scalar:
    """Evaluate a polynomial, highest power first."""
    total: Scalar | float = coefficients[0]
    for c in coefficients[1:]:
        total = total * x + c
    assert isinstance(total, Scalar)
    return total


Series = tuple[float, float, Sequence[float]]  # the range of a Chebyshev series, and its coefficients


def chebyshev(x: Scalar, series: Series, let: Let) -> Scalar:
    """Evaluate a Chebyshev series by Clenshaw's recurrence; the coefficient of order 0 comes last and counts half."""
    low, high, coefficients = series
    x = let(x * (4 / (high - low)) - 2 * (high + low) / (high - low))
    b0, b1, b2 = x * 0.0 + coefficients[0], x * 0.0, x * 0.0
    for c in coefficients[1:]:
        b0, b1, b2 = let(x * b0 - b1 + c), b0, b1
    return (b0 - b2) * 0.5


class SpecialOp(Op):
    """Special function of one operand: a formula of a float64 Scalar."""

    operands = ("x",)
    formula: ClassVar[Formula]
    domain: ClassVar[tuple[float, float]]  # of the sample data

    def infer(self, x: Expr) -> Type:
        ty = self.tensor(x, "x")
        check_dtype(self, ty, FLOAT)
        return ty

    def lower(self, x: Buffer, *, out: Buffer) -> Stmt:
        def element(*i: SymExpr) -> Stmt:
            let = Bindings()
            value = type(self).formula(let(Scalar(x[i]).cast("float64")), let)
            return let.around(Store(out, i, value.cast(out.dtype).value))

        return loops("ijklmn", out.shape, element)

    def reference(self, x: Any) -> Any:
        wide = ArrayScalar(np.asarray(x, np.float64))  # type: ignore[arg-type]
        return np.asarray(type(self).formula(wide, lambda value: value).value).astype(x.dtype)

    def samples(self) -> Iterable[Sample]:
        def draw(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
            return rng.uniform(*self.domain, shape)

        yield Sample((("n", 3),), make={0: draw})
        yield Sample((("n",),), dtypes=("float64",), make={0: draw}, tolerance=1e-10)


def special(name: str, doc: str, formula: Formula, domain: tuple[float, float] = (-3, 3)) -> None:
    """Register a special function."""
    members = {"name": name, "__doc__": doc, "formula": staticmethod(formula), "domain": domain}
    register_op(type(f"Special_{name}", (SpecialOp,), members)())


# Error functions


def _scaled_tail(x: Scalar, let: Let) -> Scalar:
    """exp(x^2) erfc(x) for x >= 1."""
    return let(chebyshev(5.0 / (x + 4.0), tables.ERFC_TAIL, let) / x)


def erfc(x: Scalar, let: Let) -> Scalar:
    """1 - erf(x), exact for large x too."""
    size = let(x.abs().minimum(30.0))  # from 27.3 on, the function is 0 in float64
    tail = let((-(size * size)).exp() * _scaled_tail(size, let))
    return choose(size < 1.0, 1.0 - x.erf(), choose(x < 0.0, 2.0 - tail, tail))


def erfcx(x: Scalar, let: Let) -> Scalar:
    """exp(x^2) erfc(x), which does not underflow."""
    return choose(x < 1.0, (x * x).exp() * erfc(x, let), _scaled_tail(let(x.maximum(1.0)), let))


def log_ndtr(x: Scalar, let: Let) -> Scalar:
    """Logarithm of the distribution function of the normal distribution."""
    t = let(x * math.sqrt(0.5))
    below = (erfcx(let(-t), let) * 0.5).unary("log") - t * t
    return choose(x < -1.0, below, (erfc(t, let) * -0.5).log1p())


def _normal_quantile(center: Scalar, tail: Scalar, let: Let) -> Scalar:
    """Quantile of the normal distribution at p, by center = p - 1/2 and tail = min(p, 1 - p)."""
    center, tail = let(center), let(tail)
    middle = center * chebyshev(center * center, tables.QUANTILE_CENTER, let)
    r = let((-(tail.unary("log"))).unary("sqrt"))
    inverse = let(1.0 / r)
    side = chebyshev(inverse.maximum(0.2), tables.QUANTILE_SIDE, let)
    outer = r * choose(r < 5.0, side, chebyshev(inverse.minimum(0.2), tables.QUANTILE_TAIL, let))
    outer = let(choose(tail.equals(0.0), math.inf, outer))
    return choose(center.abs() < 0.425, middle, choose(center < 0.0, -outer, outer))


def ndtri(x: Scalar, let: Let) -> Scalar:
    """The inverse of the distribution function of the normal distribution."""
    return _normal_quantile(x - 0.5, x.minimum(1.0 - x), let)


def erfinv(x: Scalar, let: Let) -> Scalar:
    """The inverse of the error function."""
    return _normal_quantile(x * 0.5, (1.0 - x.abs()) * 0.5, let) * math.sqrt(0.5)


# The gamma function's logarithm, and the derivative of that.

_STIRLING = (  # B(2k) / (2k (2k - 1)), highest power first
    -3617 / 122400, 1 / 156, -691 / 360360, 1 / 1188, -1 / 1680, 1 / 1260, -1 / 360, 1 / 12,
)  # fmt: skip
_ZETA = tuple(  # zeta(k) for k = 2, ..., 32, by Euler and Maclaurin
    math.fsum(j**-k for j in range(1, 100))
    + 100.0**-k * (100 / (k - 1) + 0.5 + k / 1200 * (1 - (k + 1) * (k + 2) / 600000))
    for k in range(2, 33)
)
_LGAMMA_AT_1 = (*((-1) ** k * z / k for k, z in reversed(list(enumerate(_ZETA, 2)))), -0.5772156649015328606, 0.0)


def log_gamma(x: Scalar, let: Let) -> Scalar:
    """Logarithm of |gamma(x)| for x > 0: by Stirling's series at x + 8, and by a power series around 1 and 2."""
    x = let(x)
    product = x
    for k in range(1, 8):
        product = product * (x + k)
    is_far = x > 8.0
    at = let(choose(is_far, x, x + 8.0))
    inverse = let(1.0 / at)
    square = let(inverse * inverse)
    series = inverse * horner(square, _STIRLING)
    general = (at - 0.5) * at.unary("log") - at + 0.91893853320467274178 + series
    general = let(choose(x > 1e300, x * (x.unary("log") - 1.0), general))
    general = choose(is_far, general, general - product.unary("log"))
    one, two = let(x - 1.0), let(x - 2.0)
    general = choose(two.abs() < 0.25, two.log1p() + horner(two, _LGAMMA_AT_1), general)
    return choose(one.abs() < 0.25, horner(one, _LGAMMA_AT_1), general)


def lgamma(x: Scalar, let: Let) -> Scalar:
    """Logarithm of the absolute value of the gamma function; infinite at 0, -1, -2, ..."""
    from_nearest = let((x - x.unary("round")).abs())
    sine = (from_nearest * PI).unary("sin")
    value = let(log_gamma(choose(x < 0.5, (1.0 - x).minimum(1e308), x), let))
    reflected = math.log(PI) - sine.unary("log") - value
    reflected = choose(from_nearest.equals(0.0) | x.equals(-math.inf), math.inf, reflected)
    return choose(x < 0.5, reflected, choose(x.equals(math.inf), math.inf, value))


_DIGAMMA = (1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12)  # B(2k) / (2k), highest power first


def digamma(x: Scalar, let: Let) -> Scalar:
    """Derivative of the gamma function's logarithm; infinite at 0, NaN at -1, -2, ..."""
    at = let(choose(x < 0.5, 1.0 - x, x))
    total = at * 0.0
    for _ in range(10):
        is_small = let(at < 10.0)
        total = total - choose(is_small, 1.0 / at, 0.0)
        at = let(choose(is_small, at + 1.0, at))
    inverse = let(1.0 / at)
    square = let(inverse * inverse)
    result = total + at.unary("log") - inverse * 0.5 - square * horner(square, _DIGAMMA)
    result = let(choose(x.equals(math.inf), math.inf, result))
    from_nearest = let(x - x.unary("round"))
    reflected = result - PI / (from_nearest * PI).unary("tan")
    poles = choose(x.equals(0.0), -1.0 / x, math.nan)
    reflected = choose(from_nearest.equals(0.0), poles, reflected)
    return choose(x < 0.5, reflected, result)


special("erfc", "1 - erf(x), exact for large x too", erfc, (-3, 9))
special("erfcx", "exp(x * x) * erfc(x), which does not underflow", erfcx, (-3, 20))
special("erfinv", "The inverse of the error function.", erfinv, (-0.999, 0.999))
special("log_ndtr", "The logarithm of the normal distribution function.", log_ndtr, (-20, 5))
special("ndtri", "The inverse of the normal distribution function.", ndtri, (0.001, 0.999))
special("lgamma", "The logarithm of |gamma(x)|.", lgamma, (0.1, 20))
special("digamma", "The derivative of lgamma.", digamma, (0.1, 20))
