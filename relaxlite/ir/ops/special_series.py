"""Special functions of two operands that are sums or recurrences of data-dependent length, one loop an element."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from relaxlite import dtypes
from relaxlite.dtypes import DType
from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Attr, Op, Sample, register
from relaxlite.ir.ops.broadcast import broadcast_checks, broadcast_index, broadcast_shapes
from relaxlite.ir.ops.elementwise import FLOAT, INTEGER, check_dtype
from relaxlite.ir.ops.scalars import Scalar, Variable, allocate, index, literal, select
from relaxlite.ir.ops.special import Bindings, log_gamma
from relaxlite.ir.program import Buffer, For, IfThenElse, LetIndex, Stmt, Store, loops, seq
from relaxlite.ir.symbolic import SymExpr, SymVar
from relaxlite.ir.types import TensorType, Type

StoreResult = Callable[[Scalar], Stmt]


class _PairOp(Op):
    """Base of ops that compute each element of broadcast operands by statements."""

    accepts: ClassVar[tuple[DType, ...]] = FLOAT

    def infer(self, *xs: Expr, **attrs: Any) -> Type:
        a, b = (self.tensor(x, name) for x, name in zip(xs, self.operands, strict=True))
        check_dtype(self, a, self.accepts, self.operands[0])
        if a.dtype != b.dtype:
            self.fail(f"operands have dtypes {a.dtype} and {b.dtype}; cast one of them")
        return TensorType.of(broadcast_shapes(a.shape or (), b.shape or (), fail=self.fail), a.dtype)

    def lower(self, *xs: Buffer, out: Buffer, **attrs: Any) -> Stmt:
        wide = "float64" if dtypes.is_float(out.dtype) else out.dtype

        def at(*i: SymExpr) -> Stmt:
            a, b = (Scalar(x[broadcast_index(x.shape, i, out.shape)]).cast(wide) for x in xs)
            return self.element(a, b, lambda value: Store(out, i, value.cast(out.dtype).value), **attrs)

        checks = broadcast_checks(self.name, *(x.shape for x in xs))
        return seq(*checks, loops("ijklmn", out.shape, at))

    def element(self, a: Scalar, b: Scalar, store: StoreResult, **attrs: Any) -> Stmt:
        """Build the statements that compute one element."""
        raise NotImplementedError


def _repeat(count: Scalar, body: Callable[[SymVar], Stmt]) -> Stmt:
    """Loop as often as data say: the integer part of `count`, at least 0 times."""
    times, step = SymVar("times", lower=0), SymVar("step", lower=0)
    return LetIndex(times, count.maximum(0.0).cast("int64").value, For(step, times, body(step)))


_BERNOULLI = (  # B(2 * k) for k from 1 to 12
    1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510, 43867 / 798, -174611 / 330, 854513 / 138,
    -236364091 / 2730,
)  # fmt: skip
_ZETA_TAIL = tuple(math.factorial(2 * k) / b for k, b in enumerate(_BERNOULLI, 1))  # what terms are divided by


@register
class Zeta(_PairOp):
    """Hurwitz's zeta function, the sum of (q + k) ** -x over k = 0, 1, ..., by the formula of Euler and Maclaurin.

    NaN for x < 1, infinite for x = 1 and for q = 0, -1, -2, ...; below 0, x must be an integer.
    """

    name = "zeta"
    operands = ("x", "q")

    def element(self, a: Scalar, b: Scalar, store: StoreResult, **attrs: Any) -> Stmt:
        x, q, total = a, b, Variable("total")
        floor = q.unary("floor")
        is_pole = x.equals(1.0) | ((q < 0.5) & q.equals(floor))
        is_invalid = (x < 1.0) | ((q < 0.0) & x.differs(x.unary("floor"))) | x.differs(x) | q.differs(q)
        count = select(is_pole | is_invalid, 0.0, (10.0 - floor).maximum(9.0))
        w = q + count
        power = w.binary("pow", -x)
        tail, rising, scale = power * w / (x - 1.0) + power * 0.5, x, power / w
        for k, divisor in enumerate(_ZETA_TAIL):
            tail = tail + rising * scale / divisor
            rising = rising * (x + (2 * k + 1)) * (x + (2 * k + 2))
            scale = scale / w / w
        tail = select(power.equals(0.0), 0.0, tail)
        result = select(is_pole & ~(x < 1.0), math.inf, select(is_invalid, math.nan, total.get() + tail))
        term = _repeat(count, lambda k: total.set(total.get() + (q + index(k, "float64")).binary("pow", -x)))
        return allocate((total,), seq(total.set(0.0), term, store(result)))

    def reference(self, x: Any, q: Any) -> Any:
        return np.frompyfunc(_zeta, 2, 1)(x.astype(np.float64), q.astype(np.float64)).astype(x.dtype)

    def samples(self) -> Iterable[Sample]:
        def exponents(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
            return rng.integers(2, 9, shape)

        def shifts(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
            return rng.uniform(0.3, 12, shape)

        yield Sample((("n", 3), (3,)), make={0: exponents, 1: shifts}, tolerance=1e-4)


def _zeta(x: float, q: float) -> float:
    if x == 1 or (x > 1 and q <= 0 and q == math.floor(q)):
        return math.inf
    if not x > 1 or (q < 0 and x != math.floor(x)):
        return math.nan
    terms = max(200, math.ceil(200 - q))
    w = q + terms
    tail = w ** (1 - x) / (x - 1) + w**-x / 2 + x * w ** (-x - 1) / 12
    return float(math.fsum((q + k) ** -x for k in range(terms)) + tail)


class _IncompleteGamma(_PairOp):
    """Regularized incomplete gamma functions: a power series for x < a + 1, else a continued fraction.

    See Press et al., Numerical Recipes, section 6.2; the fraction is evaluated by Lentz's method.
    """

    operands = ("a", "x")
    is_upper: ClassVar[bool]

    def element(self, a: Scalar, b: Scalar, store: StoreResult, **attrs: Any) -> Stmt:
        x, lower, let = b, Variable("lower"), Bindings()
        factor = (a * x.unary("log") - x - log_gamma(a, let)).exp()
        is_regular = (a > 0.0) & (x > 0.0) & (a < math.inf) & (x < math.inf)
        count = select(is_regular, a.minimum(1e12).unary("sqrt") * 10.0 + 150.0, 0.0)
        part = select(is_regular, lower.get() * factor, _limit(a, x, self.is_upper))
        is_low = x < a + 1.0
        complement = 1.0 - part
        value = select(is_regular & (~is_low if not self.is_upper else is_low), complement, part)
        series, fraction = _gamma_series(a, x, count, lower), _gamma_fraction(a, x, count, lower)
        return allocate((lower,), seq(IfThenElse(is_low.value, series, fraction), let.around(store(value))))

    def reference(self, a: Any, x: Any) -> Any:
        lower = np.frompyfunc(_lower_gamma, 2, 1)(a.astype(np.float64), x.astype(np.float64)).astype(np.float64)
        return (1 - lower if self.is_upper else lower).astype(a.dtype)

    def samples(self) -> Iterable[Sample]:
        def draw(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
            return rng.uniform(0.1, 12, shape)

        yield Sample((("n", 3), (3,)), make={0: draw, 1: draw})


def _limit(a: Scalar, x: Scalar, is_upper: bool) -> Scalar:
    """Value where a or x is 0, infinite, negative or NaN."""
    zero, one = (1.0, 0.0) if is_upper else (0.0, 1.0)
    is_invalid = ~((a > 0.0) | a.equals(0.0)) | ~((x > 0.0) | x.equals(0.0))
    is_invalid = is_invalid | (a.equals(0.0) & x.equals(0.0)) | (a.unary("isinf") & x.unary("isinf"))
    is_one = a.equals(0.0) | x.unary("isinf")
    value = select(is_one, Scalar(literal(one, "float64")), zero)
    return select(is_invalid, math.nan, value)


def _gamma_series(a: Scalar, x: Scalar, count: Scalar, result: Variable) -> Stmt:
    """Build result = sum of x**k / (a (a + 1) ... (a + k))."""
    term = Variable("term")

    def add(k: SymVar) -> Stmt:
        next_term = term.get() * x / (a + (index(k, "float64") + 1.0))
        return seq(term.set(next_term), result.set(result.get() + term.get()))

    return allocate((term,), seq(term.set(1.0 / a), result.set(1.0 / a), _repeat(count, add)))


def _gamma_fraction(a: Scalar, x: Scalar, count: Scalar, result: Variable) -> Stmt:
    """Build result = 1 / (x + 1 - a - 1 (1 - a) / (x + 3 - a - 2 (2 - a) / (x + 5 - a - ...)))."""
    above, below, tiny = Variable("above"), Variable("below"), 1e-300

    def nonzero(value: Scalar) -> Scalar:
        return select(value.abs() < tiny, tiny, value)

    def step(k: SymVar) -> Stmt:
        n = index(k, "float64") + 1.0
        numerator, denominator = n * (a - n), x + 1.0 - a + n * 2.0
        return seq(
            below.set(1.0 / nonzero(numerator * below.get() + denominator)),
            above.set(nonzero(denominator + numerator / above.get())),
            result.set(result.get() * above.get() * below.get()),
        )

    first = 1.0 / nonzero(x + 1.0 - a)
    start = seq(above.set(1 / tiny), below.set(first), result.set(first))
    return allocate((above, below), seq(start, _repeat(count, step)))


def _lower_gamma(a: float, x: float) -> float:
    if not (a >= 0 and x >= 0) or (a == 0 and x == 0):
        return math.nan
    if a == 0 or x == 0:
        return float(a == 0)
    term = total = 1 / a
    for k in range(1, 2000):
        term *= x / (a + k)
        total += term
    return total * math.exp(a * math.log(x) - x - math.lgamma(a))


@register
class LowerGamma(_IncompleteGamma):
    """The regularized lower incomplete gamma function P(a, x)."""

    name = "igamma"
    is_upper = False


@register
class UpperGamma(_IncompleteGamma):
    """The regularized upper incomplete gamma function Q(a, x) = 1 - P(a, x)."""

    name = "igammac"
    is_upper = True


Recurrence = Callable[[Any, Any, Any, Any], Any]  # (x, k, p[k - 1], p[k]) -> p[k + 1]


def _chebyshev(x: Any, k: Any, p: Any, q: Any) -> Any:
    return (x + x) * q - p


# Polynomial of degree 1, and recurrence: of Chebyshev's polynomials of four kinds, Hermite's of physics ("h") and of
# probability theory ("he"), Laguerre's and Legendre's. Shifted polynomials are those of 2 x - 1.
_FAMILIES: dict[str, tuple[Callable[[Any], Any], Recurrence]] = {
    "chebyshev_t": (lambda x: x, _chebyshev),
    "chebyshev_u": (lambda x: x + x, _chebyshev),
    "chebyshev_v": (lambda x: x + x - 1.0, _chebyshev),
    "chebyshev_w": (lambda x: x + x + 1.0, _chebyshev),
    "hermite_h": (lambda x: x + x, lambda x, k, p, q: (x + x) * q - (k + k) * p),
    "hermite_he": (lambda x: x, lambda x, k, p, q: x * q - k * p),
    "laguerre": (lambda x: 1.0 - x, lambda x, k, p, q: ((k + k + 1.0 - x) * q - k * p) / (k + 1.0)),
    "legendre": (lambda x: x, lambda x, k, p, q: ((k + k + 1.0) * x * q - k * p) / (k + 1.0)),
}


@register
class OrthogonalPolynomial(_PairOp):
    """Orthogonal polynomial of x of degree n, a number whose fraction is dropped; 0 for a negative degree.

    `limit`: the greatest degree, above which the result is NaN; None for any degree.
    """

    name = "orthogonal_polynomial"
    operands = ("x", "n")
    attrs: ClassVar[Mapping[str, Attr]] = {
        "family": Attr("str", choices=tuple(_FAMILIES)), "limit": Attr("int", None),
    }  # fmt: skip

    def element(self, a: Scalar, b: Scalar, store: StoreResult, **attrs: Any) -> Stmt:
        first, recurrence = _FAMILIES[attrs["family"]]
        x, degree = a, b.unary("trunc")
        limit = attrs["limit"]
        is_beyond = Scalar(literal(False, "bool")) if limit is None else degree > float(limit)
        before, current, following = Variable("before"), Variable("current"), Variable("following")

        def step(k: SymVar) -> Stmt:
            value = recurrence(x, index(k, "float64") + 1.0, before.get(), current.get())
            return seq(following.set(value), before.set(current.get()), current.set(following.get()))

        count = select(is_beyond, 0.0, degree - 1.0)
        result = select(degree < 0.0, 0.0, select(degree.equals(0.0), 1.0, current.get()))
        result = select(is_beyond, math.nan, result)
        start = seq(before.set(1.0), current.set(first(x)))
        return allocate((before, current, following), seq(start, _repeat(count, step), store(result)))

    def reference(self, x: Any, n: Any, *, family: str, limit: int | None) -> Any:
        first, recurrence = _FAMILIES[family]

        def value(x: float, n: float) -> float:
            degree, p, q = int(n), 1.0, first(x)
            if limit is not None and degree > limit:
                return math.nan
            for k in range(1, degree):
                p, q = q, recurrence(x, float(k), p, q)
            return 0.0 if degree < 0 else q if degree else 1.0

        return np.frompyfunc(value, 2, 1)(x.astype(np.float64), n.astype(np.float64)).astype(x.dtype)

    def samples(self) -> Iterable[Sample]:
        def degrees(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
            return rng.integers(-1, 6, shape)

        for family in _FAMILIES:
            yield Sample((("n", 3), (3,)), {"family": family}, make={1: degrees}, tolerance=1e-3)


@register
class GreatestCommonDivisor(_PairOp):
    """The greatest common divisor of integers, by Euclid's algorithm; gcd(0, 0) = 0."""

    name = "gcd"
    operands = ("a", "b")
    accepts = INTEGER

    def element(self, a: Scalar, b: Scalar, store: StoreResult, **attrs: Any) -> Stmt:
        u, v, rest = (Variable(name, a.dtype) for name in ("u", "v", "rest"))
        divide = seq(
            rest.set(u.get().binary("fmod", v.get())), u.set(v.get()), v.set(rest.get())
        )  # fmt: skip
        steps = int(1.45 * 8 * dtypes.itemsize(a.dtype)) + 2  # of consecutive Fibonacci numbers, the worst case
        loop = loops("s", (steps,), lambda s: IfThenElse(v.get().differs(0).value, divide))
        return allocate((u, v, rest), seq(u.set(a), v.set(b), loop, store(u.get().abs())))

    def reference(self, a: Any, b: Any) -> Any:
        return np.gcd(a, b)

    def samples(self) -> Iterable[Sample]:
        def draw(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
            return rng.integers(-60, 60, shape)

        for dtype in ("int64", "int8"):
            yield Sample((("n", 3), (3,)), dtypes=(dtype, dtype), make={0: draw, 1: draw})
