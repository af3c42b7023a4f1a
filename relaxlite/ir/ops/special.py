"""Special functions of one operand: error functions, normal distribution, gamma function.

All are computed in float64 and rounded once to the dtype of x. Coefficients: M. J. Wichura, "Algorithm AS 241: The
Percentage Points of the Normal Distribution", 1988; the Cephes Mathematical Library, copyright 1984-2000 by Stephen L.
Moshier, under the BSD license.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from relaxlite.dtypes import DType
from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Op, Sample, register_op
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


def chebyshev(x: Scalar, coefficients: Sequence[float], let: Let) -> Scalar:
    """Evaluate a Chebyshev series of x / 2, highest order first, by Clenshaw's recurrence."""
    x = let(x)
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


# The complementary error function as exp(-x^2) times a rational function, from 1 to 8 and beyond (Cephes, ndtr.c).

_ERFC_P = (
    2.46196981473530512524e-10, 5.64189564831068821977e-1, 7.46321056442269912687e0, 4.86371970985681366614e1,
    1.96520832956077098242e2, 5.26445194995477358631e2, 9.34528527171957607540e2, 1.02755188689515710272e3,
    5.57535335369399327526e2,
)  # fmt: skip
_ERFC_Q = (
    1.0, 1.32281951154744992508e1, 8.67072140885989742329e1, 3.54937778887819891062e2, 9.75708501743205489753e2,
    1.82390916687909736289e3, 2.24633760818710981792e3, 1.65666309194161350182e3, 5.57535340817727675546e2,
)  # fmt: skip
_ERFC_R = (
    5.64189583547755073984e-1, 1.27536670759978104416e0, 5.01905042251180477414e0, 6.16021097993053585195e0,
    7.40974269950448939160e0, 2.97886665372100240670e0,
)  # fmt: skip
_ERFC_S = (
    1.0, 2.26052863220117276590e0, 9.39603524938001434673e0, 1.20489539808096656605e1, 1.70814450747565897222e1,
    9.60896809063285878198e0, 3.36907645100081516050e0,
)  # fmt: skip


def _scaled_tail(x: Scalar, let: Let) -> Scalar:
    """exp(x^2) erfc(x) for x >= 1."""
    near = let(x.minimum(8.0))
    below = horner(near, _ERFC_P) / horner(near, _ERFC_Q)
    far = let(x.minimum(1e8))  # beyond, 1 / (x sqrt(pi)) is exact to the last place
    above = horner(far, _ERFC_R) / horner(far, _ERFC_S)
    return let(choose(x < 8.0, below, choose(x > 1e8, 1 / (x * math.sqrt(PI)), above)))


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


# The inverse of the normal distribution function (Wichura, algorithm PPND16), lowest power first.

_CENTER = (
    (3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
     4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3),
    (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3, 2.1213794301586595867e4,
     3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3),
)  # fmt: skip
_SIDE = (
    (1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
     1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1, 1.48103976427480074590e-1,
     1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9),
)  # fmt: skip
_TAIL = (
    (6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
     2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7),
    (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2, 7.86869131145613259100e-4,
     1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15),
)  # fmt: skip


def _ratio(x: Scalar, tables: tuple[Sequence[float], Sequence[float]], let: Let) -> Scalar:
    above, below = tables
    x = let(x)
    return horner(x, above[::-1]) / horner(x, below[::-1])


def _normal_quantile(center: Scalar, tail: Scalar, let: Let) -> Scalar:
    """Quantile of the normal distribution at p, by center = p - 1/2 and tail = min(p, 1 - p)."""
    center, tail = let(center), let(tail)
    middle = center * _ratio(0.180625 - center * center, _CENTER, let)
    r = let((-(tail.unary("log"))).unary("sqrt"))
    outer = choose(r < 5.0, _ratio(r - 1.6, _SIDE, let), _ratio(r.minimum(40.0) - 5.0, _TAIL, let))
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
