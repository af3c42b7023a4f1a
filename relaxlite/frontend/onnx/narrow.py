"""Conversions from and to element types of at most 8 bits (see narrow_types), composed of ordinary ops."""

from __future__ import annotations

import functools

import numpy as np

from relaxlite.frontend.onnx.narrow_types import NarrowType
from relaxlite.frontend.onnx.node import Node
from relaxlite.ir import ops
from relaxlite.ir.expr import Array, Constant, Expr

# From narrow types


def decode(n: Node, x: Expr, ty: NarrowType) -> Expr:
    """Convert a tensor of a narrow type to float32 (floats, by a table) or int32 (integers)."""
    if not ty.is_float:
        return n.emit(ops.cast(x, dtype="int32"))
    table = np.arange(1 << ty.bits, dtype=np.uint8).view(ty.dtype).astype(np.float32)
    return n.emit(ops.gather(Constant.of(table), n.emit(ops.cast(x, dtype="int32")), axis=0))


# To narrow types


def encode(n: Node, x: Expr, ty: NarrowType, *, saturate: bool = True, rounding: str = "nearest") -> Expr:
    """Convert a tensor to a narrow type. Integers wrap; floats are rounded.

    saturate: floats out of range become the largest number of their sign; otherwise NaN or infinity.
    rounding: "nearest" (ties to even), "up" or "down".

    The code of a positive float is the number of rounding thresholds between adjacent representable numbers that are
    at most the float.
    """
    if not ty.is_float:
        return _wrapped(n, x, ty)
    wide = x if n.type_of(x).dtype == "float32" else n.emit(ops.cast(x, dtype="float32"))
    thresholds, nan = _thresholds(ty, saturate, rounding)
    column = n.emit(ops.expand_dims(n.emit(ops.abs(wide)), axes=(-1,)))
    reached = n.emit(ops.cast(n.emit(ops.greater_equal(column, Constant.of(thresholds))), dtype="int32"))
    code: Expr = n.emit(ops.sum(reached, axes=(-1,)))
    over = n.emit(ops.equal(code, Constant.of(len(thresholds), "int32")))
    if ty.name != "FLOAT8E8M0":
        code = _signed(n, code, wide, ty)
    if not saturate and not ty.has_negative_zero:  # the code after the largest number is not NaN's
        code = n.emit(ops.where(over, Constant.of(nan, "int32"), code))
    if nan:
        code = n.emit(ops.where(n.emit(ops.isnan(wide)), Constant.of(nan, "int32"), code))
    return n.emit(ops.cast(code, dtype="uint8"))


def _signed(n: Node, code: Expr, x: Expr, ty: NarrowType) -> Expr:
    """Set the sign bits of codes from the signs of x; code 0 stays 0 in types without a negative zero."""
    zero = Constant.of(0.0, "float32")
    is_negative = n.emit(ops.less(x, zero))
    if ty.has_negative_zero:
        is_negative_zero = n.emit(ops.less(n.emit(ops.reciprocal(x)), zero))
        is_negative = n.emit(
            ops.logical_or(is_negative, n.emit(ops.logical_and(n.emit(ops.equal(x, zero)), is_negative_zero)))
        )
    else:
        is_negative = n.emit(ops.logical_and(is_negative, n.emit(ops.greater(code, Constant.of(0, "int32")))))
    sign = Constant.of(1 << (ty.bits - 1), "int32")
    return n.emit(ops.where(is_negative, n.emit(ops.add(code, sign)), code))


@functools.lru_cache
def _thresholds(ty: NarrowType, saturate: bool, rounding: str) -> tuple[Array, int]:
    """Return (the least float32 of each code above 0, the code of NaN or 0 if the type has no NaN).

    Ties round to the even code. Without `saturate` there is one code more, for numbers that round beyond the largest.
    """
    count = 1 << (ty.bits if ty.name == "FLOAT8E8M0" else ty.bits - 1)
    numbers = np.arange(count, dtype=np.uint8).view(ty.dtype).astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    nan = ty.dtype.type(np.nan) if ty.name != "FLOAT4E2M1" else None
    if not saturate:
        finite = np.append(finite, finite[-1] + (finite[-1] - finite[-2]))
    low, high = finite[:-1], finite[1:]
    with np.errstate(over="ignore"):
        if rounding == "up":
            least = np.nextafter(low.astype(np.float32), np.float32(np.inf))
        elif rounding == "down":
            least = high.astype(np.float32)
        else:
            middle = ((low + high) / 2).astype(np.float32)
            least = np.where(np.arange(len(middle)) % 2, middle, np.nextafter(middle, np.float32(np.inf)))
    return least.astype(np.float32), int(np.asarray(nan).view(np.uint8)) if nan is not None else 0


def _wrapped(n: Node, x: Expr, ty: NarrowType) -> Expr:
    """Convert integers to a narrow integer type by keeping their lowest bits."""
    low, high = ty.integer_range
    wide = n.emit(ops.cast(x, dtype="int32"))
    shifted = n.emit(ops.subtract(wide, Constant.of(low, "int32")))
    wrapped = n.emit(ops.floormod(shifted, Constant.of(high - low + 1, "int32")))
    return n.emit(ops.cast(n.emit(ops.add(wrapped, Constant.of(low, "int32"))), dtype=ty.storage))


def clipped(n: Node, x: Expr, ty: NarrowType) -> Expr:
    """Clamp integers to the range of the type."""
    low, high = ty.integer_range
    dtype = n.type_of(x).dtype
    return n.emit(ops.minimum(n.emit(ops.maximum(x, Constant.of(low, dtype))), Constant.of(high, dtype)))
