"""Converters of element-wise operators: tables of unary and binary operators, and functions for the rest.

Torch has decided the types of results; operands are cast to the type in which the result is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.frontend.torch.iota import compared, is_true
from relaxlite.frontend.torch.node import Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr, Var
from relaxlite.ir.ops.scalars import HALF

# Functions of one operand: computed in the result's type, to which integers are promoted.
_UNARY: dict[str, Callable[..., Any]] = {
    "acos": ops.acos,
    "acosh": ops.acosh,
    "asin": ops.asin,
    "asinh": ops.asinh,
    "atan": ops.atan,
    "atanh": ops.atanh,
    "cos": ops.cos,
    "cosh": ops.cosh,
    "erf": ops.erf,
    "exp": ops.exp,
    "expm1": ops.expm1,
    "hardsigmoid": partial(ops.hard_sigmoid, alpha=1 / 6, beta=0.5),
    "hardswish": ops.hard_swish,
    "log": ops.log,
    "log1p": ops.log1p,
    "mish": ops.mish,
    "neg": ops.neg,
    "reciprocal": ops.reciprocal,
    "relu": ops.relu,
    "rsqrt": ops.rsqrt,
    "sigmoid": ops.sigmoid,
    "silu": ops.silu,
    "sin": ops.sin,
    "sinh": ops.sinh,
    "sqrt": ops.sqrt,
    "tan": ops.tan,
    "tanh": ops.tanh,
}
# Rounding functions, which leave integers as they are.
_ROUNDING: dict[str, Callable[..., Any]] = {"ceil": ops.ceil, "floor": ops.floor}
# Functions of two operands with broadcasting, computed in the result's type.
_BINARY: dict[str, Callable[..., Any]] = {
    "atan2": ops.atan2,
    "bitwise_or": ops.bitwise_or,
    "bitwise_xor": ops.bitwise_xor,
    "max.other": ops.maximum,
    "maximum": ops.maximum,
    "min.other": ops.minimum,
    "minimum": ops.minimum,
    "mul": ops.multiply,
    "multiply": ops.multiply,
    "true_divide": ops.divide,
}
# Comparisons, in the type to which both operands are promoted.
_COMPARISONS: dict[str, Callable[..., Any]] = {
    "eq": ops.equal,
    "ge": ops.greater_equal,
    "gt": ops.greater,
    "le": ops.less_equal,
    "lt": ops.less,
    "ne": ops.not_equal,
}
# Other names of comparisons.
_COMPARISON_NAMES = {
    "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne",
}  # fmt: skip
_AND: dict[str, Callable[..., Any]] = {
    "__and__": ops.bitwise_and,
    "bitwise_and": ops.bitwise_and,
    "logical_and": ops.logical_and,
}
_LOGICAL: dict[str, Callable[..., Any]] = {
    "logical_or": ops.logical_or,
    "logical_xor": ops.logical_xor,
}


def unary(n: Node, x: Expr, op: Callable[..., Any], **attrs: Any) -> Expr:
    """Apply an op to x in the type of the result."""
    return n.emit(op(n.cast(x, n.dtype()), **attrs))


_ARITHMETIC = (ops.add, ops.subtract, ops.multiply, ops.divide, ops.floor_divide)
# What stands for functions of numbers where the operands are booleans.
_OF_BOOLEANS: dict[Callable[..., Any], Callable[..., Any]] = {
    ops.maximum: ops.logical_or,
    ops.minimum: ops.logical_and,
    ops.multiply: ops.logical_and,
}


def binary(n: Node, a: Any, b: Any, op: Callable[..., Any], dtype: str) -> Expr:
    """Apply an op with broadcasting to two operands in a dtype; the result is cast to torch's type.

    A number that is added to half-precision floats, or multiplies them, is not rounded to them: the op computes in
    float32, as torch does.
    """
    if dtype in HALF and op in _ARITHMETIC and any(not isinstance(x, int | Var | Constant) for x in (a, b)):
        dtype = "float32"
    if dtype == "bool":
        op = _OF_BOOLEANS.get(op, op)
    shape = n.shape()
    left, right = (n.fit(n.operand(x, dtype), shape) for x in (a, b))
    return n.cast(n.emit(op(left, right)), n.dtype())


def compare(n: Node, a: Any, b: Any, op: Callable[..., Any]) -> Expr:
    """Compare two operands in the type to which torch promotes both."""
    decided = compared(n, op.name, a, b)  # type: ignore[attr-defined]
    if decided is not None:
        return n.full(n.shape(), decided, "bool")
    dtype = n.result_type(*n.fx_node.args)
    return binary(n, a, b, op, "uint8" if dtype == "bool" else dtype)


def both(n: Node, a: Any, b: Any, op: Callable[..., Any]) -> Expr:
    """Bitwise or logical and; a mask that is true everywhere leaves the other."""
    dtype = n.dtype()
    for mask, other in ((a, b), (b, a)) if dtype == "bool" else ():
        if isinstance(mask, Var | Constant) and isinstance(other, Var | Constant) and is_true(n, mask):
            return n.broadcast(n.cast(other, "bool"), n.shape())
    return binary(n, a, b, op, dtype)


def _register_tables() -> None:
    op: Callable[..., Any]
    for name, op in {
        "bitwise_and": ops.bitwise_and,
        "__and__": ops.bitwise_and,
        "logical_and": ops.logical_and,
    }.items():
        torch_op(f"aten.{name}")(lambda n, self, other, op=op: both(n, self, other, op))
    for name, op in _UNARY.items():
        torch_op(f"aten.{name}")(lambda n, self, op=op: unary(n, self, op))
    for name, op in _ROUNDING.items():
        torch_op(f"aten.{name}")(lambda n, self, op=op: self if dtypes.is_integer(n.dtype()) else unary(n, self, op))
    for name, op in _BINARY.items():
        aliases = (f"aten.__{name.removeprefix('bitwise_')}__",) if "bitwise" in name else ()
        torch_op(f"aten.{name}", *aliases)(lambda n, self, other, op=op: binary(n, self, other, op, n.dtype()))
    for name, key in {**{name: name for name in _COMPARISONS}, **_COMPARISON_NAMES}.items():
        torch_op(f"aten.{name}")(lambda n, self, other, op=_COMPARISONS[key]: compare(n, self, other, op))
    for name, op in _LOGICAL.items():
        torch_op(f"aten.{name}")(lambda n, self, other, op=op: binary(n, self, other, op, "bool"))


_register_tables()


def add_scaled(n: Node, self: Any, other: Any, alpha: Any, op: Callable[..., Any]) -> Expr:
    """Emit self + alpha * other, or a difference; half-precision floats are rounded once."""
    dtype = n.dtype()
    if isinstance(alpha, int | float) and alpha == 1:
        return binary(n, self, other, op, dtype)
    wide = "float32" if dtype in HALF else dtype
    factor = ops.logical_and if dtype == "bool" else ops.multiply
    return binary(n, self, n.emit(factor(n.operand(other, wide), n.operand(alpha, wide))), op, wide)


@torch_op("aten.add")
def add(n: Node, self: Any, other: Any, alpha: Any = 1) -> Expr:
    return add_scaled(n, self, other, alpha, ops.logical_or if n.dtype() == "bool" else ops.add)


@torch_op("aten.sub", "aten.subtract")
def sub(n: Node, self: Any, other: Any, alpha: Any = 1) -> Expr:
    return add_scaled(n, self, other, alpha, ops.subtract)


@torch_op("aten.rsub")
def rsub(n: Node, self: Any, other: Any, alpha: Any = 1) -> Expr:
    return add_scaled(n, other, self, alpha, ops.subtract)


@torch_op("aten.div", "aten.divide")
def div(n: Node, self: Any, other: Any, rounding_mode: str | None = None) -> Expr:
    dtype = n.dtype()
    if rounding_mode is None:
        return binary(n, self, other, ops.divide, dtype)
    if dtypes.is_integer(dtype):
        return binary(n, self, other, ops.floor_divide if rounding_mode == "floor" else ops.truncdiv, dtype)
    if rounding_mode == "floor":
        return binary(n, self, other, ops.floor_divide, dtype)
    return truncate(n, binary(n, self, other, ops.divide, dtype))


@torch_op("aten.floor_divide")
def floor_divide(n: Node, self: Any, other: Any) -> Expr:
    return binary(n, self, other, ops.floor_divide, n.dtype())


@torch_op("aten.remainder")
def remainder(n: Node, self: Any, other: Any) -> Expr:
    return binary(n, self, other, ops.floormod, n.dtype())


@torch_op("aten.fmod")
def fmod(n: Node, self: Any, other: Any) -> Expr:
    return binary(n, self, other, ops.fmod, n.dtype())


# Powers by constants that have functions of their own.
_POWERS: dict[float, Callable[[Node, Expr], Any]] = {
    2: lambda n, x: ops.multiply(x, x),
    3: lambda n, x: ops.multiply(n.emit(ops.multiply(x, x)), x),
    0.5: lambda n, x: ops.sqrt(x),
    -0.5: lambda n, x: ops.rsqrt(x),
    -1: lambda n, x: ops.reciprocal(x),
}


@torch_op("aten.pow", "aten.float_power")
def power(n: Node, self: Any, exponent: Any) -> Expr:
    dtype = n.dtype()
    special = _POWERS.get(exponent) if isinstance(exponent, int | float) else None
    if special is None or (exponent in (0.5, -0.5, -1) and not dtypes.is_float(dtype)):
        return binary(n, self, exponent, ops.power, dtype)
    return n.cast(n.emit(special(n, n.operand(self, "float32" if dtype in HALF else dtype))), dtype)


def truncate(n: Node, x: Expr) -> Expr:
    """Return x rounded towards zero."""
    below = n.emit(ops.less(x, n.operand(0, n.dtype_of(x))))
    return n.emit(ops.where(below, n.emit(ops.ceil(x)), n.emit(ops.floor(x))))


@torch_op("aten.trunc", "aten.fix")
def trunc(n: Node, self: Expr) -> Expr:
    return self if dtypes.is_integer(n.dtype()) else truncate(n, self)


@torch_op("aten.abs", "aten.absolute")
def absolute(n: Node, self: Expr) -> Expr:
    return self if n.dtype() == "bool" else n.emit(ops.abs(self))


@torch_op("aten.logical_not")
def logical_not(n: Node, self: Expr) -> Expr:
    return n.emit(ops.logical_not(n.cast(self, "bool")))


@torch_op("aten.bitwise_not")
def bitwise_not(n: Node, self: Expr) -> Expr:
    return n.emit((ops.logical_not if n.dtype() == "bool" else ops.bitwise_not)(self))


@torch_op("aten.bitwise_left_shift", "aten.bitwise_right_shift", "aten.__lshift__", "aten.__rshift__")
def shift(n: Node, self: Any, other: Any) -> Expr:
    """Shifts; of floats they are products with powers of two."""
    left, dtype = "left" in n.target or "lshift" in n.target, n.dtype()
    if not dtypes.is_float(dtype):
        return binary(n, self, other, ops.left_shift if left else ops.right_shift, dtype)
    count = n.operand(other, dtype)
    factor = n.emit(ops.power(n.operand(2, dtype), count if left else n.emit(ops.neg(count))))
    return binary(n, self, factor, ops.multiply, dtype)


@torch_op("aten.where")
def where(n: Node, condition: Expr, self: Any, other: Any) -> Expr:
    shape, dtype = n.shape(), n.dtype()
    operands = [n.fit(n.operand(x, dtype), shape) for x in (self, other)]
    return n.emit(ops.where(n.fit(n.cast(condition, "bool"), shape), *operands))


@torch_op("aten.clamp", "aten.clip", "aten.clamp_min", "aten.clamp_max", "aten.hardtanh")
def clamp(n: Node, self: Expr, min: Any = None, max: Any = None, min_val: Any = None, max_val: Any = None) -> Expr:
    dtype, shape = n.dtype(), n.shape()
    lower = min if min is not None else min_val
    upper = max if max is not None else max_val
    if n.target.startswith("aten.hardtanh"):
        lower, upper = -1 if lower is None else lower, 1 if upper is None else upper
    x = n.fit(n.cast(self, dtype), shape)
    if dtypes.is_float(dtype) and all(v is None or isinstance(v, int | float) for v in (lower, upper)):
        return n.emit(ops.clip(x, lower=lower, upper=upper))
    for bound, op in ((lower, ops.maximum), (upper, ops.minimum)):
        if bound is not None:
            x = n.emit(op(x, n.fit(n.operand(bound, dtype), shape)))
    return x


@torch_op("aten.gelu")
def gelu(n: Node, self: Expr, approximate: str = "none") -> Expr:
    return unary(n, self, ops.gelu, approximate=approximate)


@torch_op("aten.leaky_relu")
def leaky_relu(n: Node, self: Expr, negative_slope: float = 0.01) -> Expr:
    return unary(n, self, ops.leaky_relu, alpha=float(negative_slope))


@torch_op("aten.sign", "aten.sgn")
def sign(n: Node, self: Expr) -> Expr:
    return self if n.dtype() == "bool" else n.emit(ops.sign(self))


@torch_op("aten.isnan")
def isnan(n: Node, self: Expr) -> Expr:
    if not dtypes.is_float(n.dtype_of(self)):
        return n.full(n.shape(), False, "bool")
    return n.emit(ops.isnan(self))


@torch_op("aten.round")
def round_(n: Node, self: Expr, decimals: int = 0) -> Expr:
    if dtypes.is_integer(n.dtype()):
        return self
    if decimals == 0:
        return n.emit(ops.round(self))
    factor = n.operand(np.float64(10.0) ** abs(decimals), n.dtype())
    first, last = (ops.multiply, ops.divide) if decimals > 0 else (ops.divide, ops.multiply)
    return n.emit(last(n.emit(ops.round(n.emit(first(self, factor)))), factor))
