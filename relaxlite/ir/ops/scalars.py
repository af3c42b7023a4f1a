"""Scalar formulas in Python syntax: `Scalar` gives operators to a loop-level `Value`.

    x = Scalar(buffer[i, j])
    compute(out, lambda *i: (0.5 * x * (1 + (x * 0.70710678).erf())).value)

Python numbers take the dtype of the other operand. `/` is true division; integers use `truncdiv`, `floordiv`,
`floormod`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

import numpy as np

from relaxlite import dtypes
from relaxlite.dtypes import DType
from relaxlite.ir.program import (
    Allocate,
    Binary,
    Buffer,
    Cast,
    Compare,
    IndexValue,
    Literal,
    Select,
    Stmt,
    Store,
    Unary,
    Value,
)
from relaxlite.ir.symbolic import IntLike, SymExpr, sym
from relaxlite.records import dataclass

Number: TypeAlias = "int | float | bool"
Operand: TypeAlias = "Scalar | int | float | bool | SymExpr"

HALF: tuple[DType, ...] = ("float16", "bfloat16")  # computed in float32, rounded once at the end


@dataclass(frozen=True, slots=True, eq=False)
class Scalar:
    """Expression builder around an IR value; operators return new Scalars."""

    value: Value

    @property
    def dtype(self) -> DType:
        return self.value.dtype

    def wrap(self, other: Operand) -> Value:
        """Convert an operand to an IR value, numbers to the dtype of this Scalar."""
        if isinstance(other, Scalar):
            return other.value
        return IndexValue(other, self.dtype) if isinstance(other, SymExpr) else literal(other, self.dtype)

    def binary(self, op: str, other: Operand) -> Scalar:
        return Scalar(Binary(op, self.value, self.wrap(other)))

    def _reversed(self, op: str, other: Operand) -> Scalar:
        return Scalar(Binary(op, self.wrap(other), self.value))

    def unary(self, op: str) -> Scalar:
        return Scalar(Unary(op, self.value))

    def compare(self, op: str, other: Operand) -> Scalar:
        return Scalar(Compare(op, self.value, self.wrap(other)))

    def cast(self, dtype: DType) -> Scalar:
        return self if dtype == self.dtype else Scalar(Cast(self.value, dtype))

    def __add__(self, other: Operand) -> Scalar:
        return self.binary("add", other)

    def __radd__(self, other: Operand) -> Scalar:
        return self._reversed("add", other)

    def __sub__(self, other: Operand) -> Scalar:
        return self.binary("sub", other)

    def __rsub__(self, other: Operand) -> Scalar:
        return self._reversed("sub", other)

    def __mul__(self, other: Operand) -> Scalar:
        return self.binary("mul", other)

    def __rmul__(self, other: Operand) -> Scalar:
        return self._reversed("mul", other)

    def __truediv__(self, other: Operand) -> Scalar:
        return self.binary("div", other)

    def __rtruediv__(self, other: Operand) -> Scalar:
        return self._reversed("div", other)

    def __neg__(self) -> Scalar:
        return self.unary("neg")

    def __lt__(self, other: Operand) -> Scalar:
        return self.compare("lt", other)

    def __le__(self, other: Operand) -> Scalar:
        return self.compare("le", other)

    def __gt__(self, other: Operand) -> Scalar:
        return self.compare("gt", other)

    def __ge__(self, other: Operand) -> Scalar:
        return self.compare("ge", other)

    def equals(self, other: Operand) -> Scalar:
        return self.compare("eq", other)

    def differs(self, other: Operand) -> Scalar:
        return self.compare("ne", other)

    def __and__(self, other: Operand) -> Scalar:
        return self.binary("and", other)

    def __or__(self, other: Operand) -> Scalar:
        return self.binary("or", other)

    def __invert__(self) -> Scalar:
        """Logical not, of a bool."""
        return self.unary("not")

    def minimum(self, other: Operand) -> Scalar:
        return self.binary("min", other)

    def maximum(self, other: Operand) -> Scalar:
        return self.binary("max", other)

    def exp(self) -> Scalar:
        return self.unary("exp")

    def exp2(self) -> Scalar:
        return self.unary("exp2")

    def expm1(self) -> Scalar:
        return self.unary("expm1")

    def log1p(self) -> Scalar:
        return self.unary("log1p")

    def tanh(self) -> Scalar:
        return self.unary("tanh")

    def erf(self) -> Scalar:
        return self.unary("erf")

    def abs(self) -> Scalar:
        return self.unary("abs")


def literal(value: Number, dtype: DType) -> Literal:
    """Constant of a dtype."""
    if dtype == "bool":
        return Literal(bool(value), dtype)
    return Literal(float(value) if dtypes.is_float(dtype) else int(value), dtype)


def index(expr: IntLike, dtype: DType = "int64") -> Scalar:
    """Symbolic integer as a value."""
    return Scalar(IndexValue(sym(expr), dtype))


def select(cond: Scalar, then: Operand, other: Operand) -> Scalar:
    """Select `then` if cond else `other`; at least one of them must be a Scalar."""
    like = then if isinstance(then, Scalar) else other
    assert isinstance(like, Scalar)
    return Scalar(Select(cond.value, like.wrap(then), like.wrap(other)))


class Variable:
    """A local variable of a scalar dtype, which `allocate` must enclose."""

    def __init__(self, name: str, dtype: DType = "float64") -> None:
        self.buffer = Buffer.of(name, (1,), dtype, "local")

    def get(self) -> Scalar:
        return Scalar(self.buffer[0])

    def set(self, value: Scalar | Number) -> Stmt:
        """Build the assignment of a value, cast to the variable's dtype."""
        dtype = self.buffer.dtype
        new = value.cast(dtype) if isinstance(value, Scalar) else Scalar(literal(value, dtype))
        return Store(self.buffer, (sym(0),), new.value)


class HasBuffer(Protocol):
    """A variable, or a matrix of workspace."""

    buffer: Buffer


def allocate(variables: Iterable[HasBuffer], body: Stmt) -> Stmt:
    """Build a statement with the memory of its variables."""
    for variable in variables:
        body = Allocate(variable.buffer, body)
    return body


def all_of(conditions: list[Scalar]) -> Scalar:
    """Conjunction of conditions; True if there are none."""
    if not conditions:
        return Scalar(Literal(True, "bool"))
    result = conditions[0]
    for condition in conditions[1:]:
        result = result & condition
    return result


def in_float32(x: Value, formula: Callable[[Scalar], Scalar]) -> Value:
    """Apply a formula, for half-precision floats in float32 and rounded once."""
    if x.dtype not in HALF:
        return formula(Scalar(x)).value
    return formula(Scalar(Cast(x, "float32"))).cast(x.dtype).value


def limits(dtype: DType) -> tuple[Number, Number]:
    """Least and greatest value of a dtype; infinities for floats."""
    if dtype == "bool":
        return False, True
    if dtypes.is_float(dtype):
        return float("-inf"), float("inf")
    info = np.iinfo(dtypes.to_numpy(dtype))
    return int(info.min), int(info.max)


def identity(combine: str, dtype: DType) -> Literal:
    """Identity of a combine operation (program.COMBINE), the initial value of a reduction."""
    low, high = limits(dtype)
    ones = -1 if dtype in dtypes.SIGNED else high  # all bits set; true for bool
    start: dict[str, Number] = {"add": 0, "mul": 1, "max": low, "min": high, "and": ones, "or": 0, "maxnum": low}
    return literal(start[combine], dtype)
