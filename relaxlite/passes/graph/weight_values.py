"""Compile-time evaluation of weights as integers times scales, before their widening to float32.

Recognized are all forms of DequantizeLinear; casts, shifts, subtractions and a multiplication that dequantize; and
transposes and reshapes of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import RelaxliteError
from relaxlite.ir.expr import Array, Call, Constant, Expr, ShapeValue, Var
from relaxlite.ir.op import Op
from relaxlite.ir.symbolic import as_int
from relaxlite.ir.types import TensorType
from relaxlite.records import dataclass

_LARGEST = 1 << 15  # exclusive bound on integers whose differences and float32 values are exact


@dataclass(frozen=True, slots=True)
class Scaled:
    """A float32 tensor integers * scale; `scale` broadcasts, None means 1."""

    integers: Array
    scale: Array | None = None

    def floats(self) -> Array:
        """The tensor in float32."""
        wide: Array = self.integers.astype(np.float32)
        return np.ascontiguousarray(wide if self.scale is None else np.multiply(wide, self.scale))

    def moved(self, move: Callable[[Array], Array]) -> Scaled:
        """The value after an op that only permutes or reshapes elements."""
        scale = None if self.scale is None else move(np.broadcast_to(self.scale, self.integers.shape))
        return Scaled(move(self.integers), scale)


@dataclass(frozen=True, slots=True)
class Half:
    """A float32 tensor widened from half precision (`values` in float16 or bfloat16)."""

    values: Array

    def floats(self) -> Array:
        """The tensor in float32."""
        return self.values.astype(np.float32)

    def moved(self, move: Callable[[Array], Array]) -> Half:
        """The value after an op that only permutes or reshapes elements."""
        return Half(move(self.values))


Value: TypeAlias = "Array | tuple[int, ...] | Scaled | Half"


class WeightEvaluator:
    """Evaluates the bindings of a function on demand; `bind` records each binding as it is visited."""

    def __init__(self) -> None:
        self._bound: dict[Var, Expr] = {}
        self._evaluated: dict[Var, Value | None] = {}

    def bind(self, var: Var, value: Expr) -> None:
        """Record a binding."""
        self._bound[var] = value

    def value(self, expr: Expr) -> Expr:
        """The expression that a variable is bound to; other expressions unchanged."""
        return self._bound.get(expr, expr) if isinstance(expr, Var) else expr

    def evaluate(self, expr: Expr) -> Value | None:
        """The value of an expression of constants; None if it is not constant or has no exact representation here."""
        if isinstance(expr, Constant):
            return expr.value
        if isinstance(expr, ShapeValue):
            values = [as_int(v) for v in expr.values]
            return None if None in values else tuple(v for v in values if v is not None)
        if not isinstance(expr, Var) or expr not in self._bound:
            return None
        if expr not in self._evaluated:
            value = self._bound[expr]
            self._evaluated[expr] = self._call(value) if isinstance(value, Call) else self.evaluate(value)
        return self._evaluated[expr]

    def _call(self, call: Call) -> Value | None:
        if not isinstance(call.callee, Op) or not call.callee.is_pure or not isinstance(call.ty, TensorType):
            return None
        operands = [self.evaluate(arg) for arg in call.args]
        if any(o is None for o in operands) or not operands:
            return None
        rule = _RULES.get(call.callee.name)
        evaluated = None if rule is None else rule(call.attrs, *operands)
        if evaluated is not None:
            return evaluated
        if any(isinstance(o, Scaled | Half) for o in operands):
            return None
        arrays = [o for o in operands if isinstance(o, np.ndarray)]
        widens = dtypes.is_float(call.ty.dtype) and any(o.dtype.kind in "iub" for o in arrays)
        if widens or type(call.callee).reference is Op.reference:
            return None
        try:
            with np.errstate(all="ignore"):
                result = np.asarray(call.callee.reference(*operands, **call.attrs))
        except (
            RelaxliteError,
            IndexError,
            ValueError,
            ArithmeticError,
        ):  # reported at run time, if the call is reached
            return None
        return result.astype(dtypes.to_numpy(call.ty.dtype), copy=False)


def _cast(attrs: Mapping[str, Any], x: Value) -> Value | None:
    if attrs["dtype"] != "float32" or not isinstance(x, np.ndarray):
        return None
    if x.dtype.kind in "iu" and _is_exact(x):
        return Scaled(x)
    return Half(x) if dtypes.from_numpy(x.dtype) in ("float16", "bfloat16") else None


def _dequantize(attrs: Mapping[str, Any], x: Value, scale: Value, zero: Value | None = None) -> Value | None:
    if not isinstance(x, np.ndarray) or not isinstance(scale, np.ndarray) or scale.dtype != np.float32:
        return None
    if not isinstance(zero, np.ndarray | None) or not _is_exact(x):
        return None
    axis, block = int(attrs["axis"]) % max(x.ndim, 1), int(attrs["block_size"])
    integers: Array = x.astype(np.int32)
    if zero is not None:
        integers = np.subtract(integers, _broadcast_parameter(zero.astype(np.int32), x.shape, axis, block))
    return Scaled(integers, _broadcast_parameter(scale, x.shape, axis, block))


def _broadcast_parameter(scale: Array, shape: tuple[int, ...], axis: int, block: int) -> Array:
    """Broadcast a scale or zero point (per tensor, per axis or per block) to `shape`."""
    if scale.size == 1:
        return np.broadcast_to(scale.reshape(()), shape)
    if not block:
        return np.broadcast_to(scale.reshape(-1, *(1,) * (len(shape) - 1 - axis)), shape)
    return np.take(np.repeat(scale, block, axis), np.arange(shape[axis]), axis)


def _multiply(attrs: Mapping[str, Any], a: Value, b: Value) -> Value | None:
    for x, scale in ((a, b), (b, a)):
        if isinstance(x, Scaled) and x.scale is None and isinstance(scale, np.ndarray) and scale.dtype == np.float32:
            shape = np.broadcast_shapes(x.integers.shape, scale.shape)
            return Scaled(np.broadcast_to(x.integers, shape), np.broadcast_to(scale, shape))
    return None


def _subtract(attrs: Mapping[str, Any], a: Value, b: Value) -> Value | None:
    """Subtraction of an integral zero point, given in float32 or widened from integers."""
    if isinstance(b, Scaled) and b.scale is None:
        b = b.integers
    if not isinstance(a, Scaled) or a.scale is not None or not isinstance(b, np.ndarray):
        return None
    with np.errstate(all="ignore"):
        zero = b.astype(np.int32)
    return Scaled(a.integers.astype(np.int32) - zero) if np.array_equal(zero, b) and _is_exact(zero) else None


def _add(attrs: Mapping[str, Any], a: Value, b: Value) -> Value | None:
    """integers * scale + offset, if the offset is an integer multiple of the scale and the result is exact."""
    for x, offset in ((a, b), (b, a)):
        if not isinstance(x, Scaled) or x.scale is None or not isinstance(offset, np.ndarray):
            continue
        with np.errstate(all="ignore"):
            zero = np.broadcast_to(np.nan_to_num(np.rint(np.divide(offset, x.scale))), x.integers.shape)
        integers: Array = np.add(x.integers, zero.clip(-_LARGEST, _LARGEST).astype(np.int32))
        sum_of = Scaled(integers, x.scale)
        if _is_exact(integers) and np.array_equal(sum_of.floats(), np.add(x.floats(), offset)):
            return sum_of
    return None


def _transpose(attrs: Mapping[str, Any], x: Value) -> Value | None:
    return x.moved(lambda v: np.transpose(v, attrs["axes"])) if isinstance(x, Scaled | Half) else None


def _reshape(attrs: Mapping[str, Any], x: Value, shape: Value) -> Value | None:
    return x.moved(lambda v: np.reshape(v, shape)) if isinstance(x, Scaled | Half) else None  # type: ignore[arg-type]


_RULES: Mapping[str, Callable[..., Value | None]] = {
    "cast": _cast,
    "dequantize_linear": _dequantize,
    "multiply": _multiply,
    "subtract": _subtract,
    "add": _add,
    "transpose": _transpose,
    "reshape": _reshape,
}


def _is_exact(integers: Array) -> bool:
    return bool(integers.size == 0 or (integers.min() > -_LARGEST and integers.max() < _LARGEST))
