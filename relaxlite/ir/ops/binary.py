"""Binary element-wise ops with NumPy's broadcasting, one row per op."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np

from relaxlite import dtypes
from relaxlite.dtypes import DType
from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Op, Sample, register_op
from relaxlite.ir.ops.broadcast import PROVER, broadcast_shapes, compute_broadcast
from relaxlite.ir.ops.elementwise import ANY, BITS, BOOL, FLOAT, INTEGER, NUMBER, check_dtype, map_symbolic
from relaxlite.ir.ops.scalars import Scalar, select
from relaxlite.ir.program import Buffer, Stmt, Value
from relaxlite.ir.symbolic import SymExpr, as_int, floordiv, floormod, smax, smin, sym
from relaxlite.ir.types import TensorType, Type


class BinaryOp(Op):
    """Binary element-wise op: a formula over two Scalars of one dtype, and its NumPy equivalent."""

    operands = ("a", "b")
    accepts: ClassVar[tuple[DType, ...]]
    result: ClassVar[DType | None]  # None: the dtype of the operands
    formula: ClassVar[Callable[[Scalar, Scalar], Scalar]]
    numpy: ClassVar[Callable[[Any, Any], Any]]
    symbolic: ClassVar[Callable[[SymExpr, SymExpr], SymExpr | bool | None] | None]
    draw: ClassVar[Callable[..., Any] | None]  # generator of sample data for b

    def infer(self, a: Expr, b: Expr) -> Type:
        left, right = self.tensor(a, self.operands[0]), self.tensor(b, self.operands[1])
        if left.dtype != right.dtype:
            self.fail(f"operands have dtypes {left.dtype} and {right.dtype}; cast one of them")
        check_dtype(self, left, self.accepts, self.operands[0])
        return TensorType.of(self.result_shape(left, right), self.result or left.dtype)

    def result_shape(self, left: TensorType, right: TensorType) -> tuple[SymExpr, ...]:
        return broadcast_shapes(left.shape or (), right.shape or (), fail=self.fail)

    def lower(self, a: Buffer, b: Buffer, *, out: Buffer) -> Stmt:
        formula = type(self).formula

        def value(x: Value, y: Value) -> Value:
            return formula(Scalar(x), Scalar(y)).value

        return compute_broadcast(self.name, out, (a, b), value)

    def reference(self, a: Any, b: Any) -> Any:
        with np.errstate(all="ignore"):
            array = np.asarray(type(self).numpy(a, b))
        return array.astype(a.dtype if self.result is None else dtypes.to_numpy(self.result), copy=False)

    def evaluate_symbolic(self, a: Any, b: Any) -> Any:
        function = type(self).symbolic
        return None if function is None else map_symbolic(function, a, b)

    def samples(self) -> Iterable[Sample]:
        draw = type(self).draw
        int_data = {} if draw is None else {1: draw}
        for dtype in ("float32", "int64", "bool"):
            if dtype in self.accepts:
                data = int_data if dtype == "int64" else {}
                yield Sample((("n", 3), ("n", 3)), dtypes=(dtype, dtype), make=data)
                yield Sample((("n", 1, 3), (2, 1)), dtypes=(dtype, dtype), make=data)
        if "float32" in self.accepts:
            yield Sample((("n",), ("m",)))
            yield Sample(((), ("n",)), dtypes=("float16", "float16"), tolerance=4e-3)


def binary(
    name: str,
    doc: str,
    formula: str | Callable[[Scalar, Scalar], Scalar],
    numpy: Callable[[Any, Any], Any],
    accepts: tuple[DType, ...],
    *,
    result: DType | None = None,
    symbolic: Callable[[SymExpr, SymExpr], SymExpr | bool | None] | None = None,
    draw: Callable[[tuple[int, ...], np.random.Generator], Any] | None = None,
    base: type[BinaryOp] = BinaryOp,
) -> None:
    """Register a binary op; `formula` is the name of a scalar function, or a function of two Scalars."""
    function = (lambda a, b: a.binary(formula, b)) if isinstance(formula, str) else formula
    members = {
        "name": name, "__doc__": doc, "accepts": accepts, "result": result, "formula": staticmethod(function),
        "numpy": staticmethod(numpy), "symbolic": None if symbolic is None else staticmethod(symbolic),
        "draw": None if draw is None else staticmethod(draw), "is_symbolic": symbolic is not None,
    }  # fmt: skip
    register_op(type(f"Binary_{name}", (base,), members)())


def _draw_nonzero(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    return rng.integers(1, 9, shape) * rng.choice([-1, 1], shape)


def _draw_small(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    return rng.integers(0, 5, shape)


# Symbolic evaluation: None where the result depends on the run-time values of symbols.


def _symbolic_floordiv(a: SymExpr, b: SymExpr) -> SymExpr:
    return floordiv(a, b)


def symbolic_truncdiv(a: SymExpr, b: SymExpr) -> SymExpr | None:
    """Integer division of symbolic values, rounded towards zero.

    a // b where the quotient is exact or neither operand is negative; for a positive constant b the difference of the
    quotients of max(a, 0) and max(-a, 0); otherwise None.
    """
    x, y = as_int(a), as_int(b)
    if x is not None and y is not None:
        return sym(int(_truncdiv(np.int64(x), np.int64(y)))) if y != 0 else None
    quotient = floordiv(a, b)
    exact = quotient * b is a
    if exact or (PROVER.can_prove_le(0, a) and PROVER.can_prove_le(0, b)):
        return quotient
    if y is None or y <= 0:
        return None
    positive = floordiv(smax(a, 0), y)
    return positive if PROVER.can_prove_lt(-y, a) else positive - floordiv(smax(-a, 0), y)


def _symbolic_fmod(a: SymExpr, b: SymExpr) -> SymExpr | None:
    return floormod(a, b) if PROVER.can_prove_le(0, a) and PROVER.can_prove_le(0, b) else None


def _symbolic_power(a: SymExpr, b: SymExpr) -> SymExpr | None:
    exponent = as_int(b)
    if exponent is None or not 0 <= exponent <= 8:
        return None
    result = sym(1)
    for _ in range(exponent):
        result = result * a
    return result


def _symbolic_equal(a: SymExpr, b: SymExpr) -> bool | None:
    if PROVER.can_prove_equal(a, b):
        return True
    return False if PROVER.can_prove_ne(a, b) else None


def _symbolic_less(a: SymExpr, b: SymExpr) -> bool | None:
    if PROVER.can_prove_lt(a, b):
        return True
    return False if PROVER.can_prove_le(b, a) else None


def _negated(value: bool | None) -> bool | None:
    return None if value is None else not value


def _symbolic_and(a: SymExpr, b: SymExpr) -> bool | None:
    x, y = as_int(a), as_int(b)
    return False if x == 0 or y == 0 else None if x is None or y is None else True


def _symbolic_or(a: SymExpr, b: SymExpr) -> bool | None:
    x, y = as_int(a), as_int(b)
    return True if x or y else None if x is None or y is None else False


def _truncdiv(a: Any, b: Any) -> Any:
    """Divide integers, rounding towards zero; division by zero yields 0."""
    quotient = np.floor_divide(a, b)
    inexact = (np.multiply(quotient, b) != a) & (b != 0)
    return quotient + (inexact & ((a < 0) != (b < 0))).astype(quotient.dtype)


def _power(a: Any, b: Any) -> Any:
    """Raise a to the power b; negative powers of integers are truncated: 0 unless a is 1 or -1."""
    if a.dtype.kind != "i" or not np.any(b < 0):
        return np.power(a, b)
    inverse = np.where(np.abs(a) == 1, np.where(b % 2 == 0, a * a, a), 0)
    return np.where(b < 0, inverse, np.power(a, np.maximum(b, 0)))


binary("add", "a + b", "add", np.add, NUMBER, symbolic=lambda a, b: a + b)
binary("subtract", "a - b", "sub", np.subtract, NUMBER, symbolic=lambda a, b: a - b)
binary("multiply", "a * b", "mul", np.multiply, NUMBER, symbolic=lambda a, b: a * b)
binary("divide", "a / b of floats", "div", np.divide, FLOAT)
binary(
    "truncdiv",
    "a / b of integers, rounded towards zero",
    "truncdiv",
    _truncdiv,
    INTEGER,
    symbolic=symbolic_truncdiv,
    draw=_draw_nonzero,
)
binary(
    "floor_divide",
    "a / b rounded towards minus infinity",
    "floordiv",
    np.floor_divide,
    NUMBER,
    symbolic=_symbolic_floordiv,
    draw=_draw_nonzero,
)
binary(
    "floormod",
    "The remainder of a / b with the sign of b.",
    "floormod",
    np.mod,
    NUMBER,
    symbolic=lambda a, b: floormod(a, b),
    draw=_draw_nonzero,
)
binary(
    "fmod",
    "The remainder of a / b with the sign of a.",
    "fmod",
    np.fmod,
    NUMBER,
    symbolic=_symbolic_fmod,
    draw=_draw_nonzero,
)
binary("power", "a to the power b", "pow", _power, NUMBER, symbolic=_symbolic_power, draw=_draw_small)
binary("maximum", "The greater of a and b; NaN when one is NaN.", "max", np.maximum, NUMBER, symbolic=smax)
binary("minimum", "The lesser of a and b; NaN when one is NaN.", "min", np.minimum, NUMBER, symbolic=smin)
binary("atan2", "The angle of the point (b, a), in radians.", "atan2", np.arctan2, FLOAT)

binary("equal", "a == b", Scalar.equals, np.equal, ANY, result="bool", symbolic=_symbolic_equal)
binary(
    "not_equal",
    "a != b",
    Scalar.differs,
    np.not_equal,
    ANY,
    result="bool",
    symbolic=lambda a, b: _negated(_symbolic_equal(a, b)),
)
binary("less", "a < b", Scalar.__lt__, np.less, NUMBER, result="bool", symbolic=_symbolic_less)
binary(
    "less_equal",
    "a <= b",
    Scalar.__le__,
    np.less_equal,
    NUMBER,
    result="bool",
    symbolic=lambda a, b: _negated(_symbolic_less(b, a)),
)
binary("greater", "a > b", Scalar.__gt__, np.greater, NUMBER, result="bool", symbolic=lambda a, b: _symbolic_less(b, a))
binary(
    "greater_equal",
    "a >= b",
    Scalar.__ge__,
    np.greater_equal,
    NUMBER,
    result="bool",
    symbolic=lambda a, b: _negated(_symbolic_less(a, b)),
)

binary("logical_and", "a and b", "and", np.logical_and, BOOL, symbolic=_symbolic_and)
binary("logical_or", "a or b", "or", np.logical_or, BOOL, symbolic=_symbolic_or)
binary("logical_xor", "Logical exclusive or: exactly one of a and b.", "xor", np.logical_xor, BOOL)
binary("bitwise_and", "Bitwise and.", "and", np.bitwise_and, BITS)
binary("bitwise_or", "Bitwise or.", "or", np.bitwise_or, BITS)
binary("bitwise_xor", "Bitwise exclusive or.", "xor", np.bitwise_xor, BITS)
binary("left_shift", "a shifted left by b bits", "shift_left", np.left_shift, INTEGER, draw=_draw_small)
binary("right_shift", "a shifted right by b bits", "shift_right", np.right_shift, INTEGER, draw=_draw_small)


class _PReluOp(BinaryOp):
    operands = ("x", "slope")

    def result_shape(self, left: TensorType, right: TensorType) -> tuple[SymExpr, ...]:
        shape = broadcast_shapes(left.shape or (), right.shape or (), fail=self.fail)
        if len(shape) != len(left.shape or ()):
            self.fail(f"slope of rank {right.rank} does not broadcast to x of rank {left.rank}")
        return left.shape or ()

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 3, 2), (3, 1)))


binary(
    "prelu", "x where x >= 0, else slope * x; slope is broadcast to x", lambda x, slope: select(x < 0, slope * x, x),
    lambda x, slope: np.where(x < 0, slope * x, x), NUMBER, base=_PReluOp,
)  # fmt: skip
