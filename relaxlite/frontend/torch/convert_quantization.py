"""Converters of quantization: the operators of torch's quantizers (`quantized_decomposed`).

Codes are clamp(round(x * (1 / scale)) + zero_point): with the reciprocal of the scale, as torch computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from relaxlite import dtypes
from relaxlite.frontend.torch.dtypes import dtype_name
from relaxlite.frontend.torch.node import Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr, Var
from relaxlite.ir.symbolic import sym

_DOMAIN = "quantized_decomposed"
_EPSILON = float(np.finfo(np.float32).eps)


def _wide(n: Node, *xs: Expr) -> str:
    """Return the float type in which operands are combined."""
    return "float64" if any(n.dtype_of(x) == "float64" for x in xs) else "float32"


def _vector_along(n: Node, v: Expr, axis: int, rank: int) -> Expr:
    """Return a vector of an axis in a shape that broadcasts to `rank` dimensions."""
    return n.reshape(v, (n.shape_of(v)[0], *(sym(1),) * (rank - 1 - axis)))


def _scalar(n: Node, value: Any, dtype: str) -> Expr:
    """Return a scale or zero point, a number or a tensor of one element, as a scalar."""
    return n.reshape(n.cast(value, dtype), ()) if isinstance(value, Var | Constant) else n.operand(value, dtype)


def _reciprocal(n: Node, scale: Expr) -> Expr:
    return n.emit(ops.divide(n.operand(1, n.dtype_of(scale)), scale))


def _codes(
    n: Node, x: Expr, inverse: Expr, zero: Expr | None, bounds: tuple[Any, Any], *, rounds_last: bool = False
) -> Expr:
    """Return codes as floats: round(x * inverse) + zero, or with rounds_last round(x * inverse + zero), clamped."""
    dtype = n.dtype_of(x)
    scaled = n.emit(ops.multiply(x, inverse))
    shift: Callable[[Expr], Expr] = lambda v: v if zero is None else n.emit(ops.add(v, zero))  # noqa: E731
    codes = n.emit(ops.round(shift(scaled))) if rounds_last else shift(n.emit(ops.round(scaled)))
    for bound, op in zip(bounds, (ops.maximum, ops.minimum), strict=True):
        codes = n.emit(op(codes, _scalar(n, bound, dtype)))
    return codes


@torch_op(f"{_DOMAIN}.quantize_per_tensor")
def quantize_per_tensor(
    n: Node, input: Expr, scale: Any, zero_point: Any, quant_min: Any, quant_max: Any, dtype: torch.dtype
) -> Expr:
    x = n.cast(input, "float32")
    inverse = n.cast(_reciprocal(n, _scalar(n, scale, "float64")), "float32")
    codes = _codes(n, x, inverse, _scalar(n, zero_point, "float32"), (quant_min, quant_max))
    return n.cast(codes, n.dtype())


@torch_op(f"{_DOMAIN}.dequantize_per_tensor")
def dequantize_per_tensor(
    n: Node, input: Expr, scale: Any, zero_point: Any, quant_min: Any, quant_max: Any, dtype: torch.dtype,
    out_dtype: torch.dtype | None = None,
) -> Expr:  # fmt: skip
    wide, stored = n.dtype(), n.dtype_of(input)
    if wide == "float32" and stored in ("int8", "uint8") and not isinstance(zero_point, Var | Constant):
        limits = np.iinfo(stored)
        if not isinstance(scale, Var | Constant) and limits.min <= int(zero_point) <= limits.max:
            return n.emit(ops.dequantize_linear(input, n.operand(scale, wide), n.operand(zero_point, stored)))
    centered = n.emit(ops.subtract(n.cast(input, wide), _scalar(n, zero_point, wide)))
    return n.emit(ops.multiply(centered, _scalar(n, scale, wide)))


@torch_op(f"{_DOMAIN}.quantize_per_channel")
def quantize_per_channel(
    n: Node, input: Expr, scales: Expr, zero_points: Expr, axis: int, quant_min: int, quant_max: int, dtype: torch.dtype
) -> Expr:
    wide, rank = _wide(n, input, scales), n.rank(input)
    inverse = _vector_along(n, n.cast(_reciprocal(n, scales), wide), axis, rank)
    zero = _vector_along(n, n.cast(zero_points, wide), axis, rank)
    return n.cast(_codes(n, n.cast(input, wide), inverse, zero, (quant_min, quant_max)), n.dtype())


def _dequantize(n: Node, codes: Expr, scales: Expr, zero: Expr | None) -> Expr:
    """Return (codes - zero) * scales; the difference of integers is one of integers."""
    dtype = n.dtype_of(scales)
    if zero is not None:
        wide = dtype if dtypes.is_float(n.dtype_of(zero)) else "int64" if n.dtype_of(zero) == "int64" else "int32"
        codes = n.emit(ops.subtract(n.cast(codes, wide), n.cast(zero, wide)))
    return n.emit(ops.multiply(n.cast(codes, dtype), scales))


@torch_op(f"{_DOMAIN}.dequantize_per_channel")
def dequantize_per_channel(
    n: Node, input: Expr, scales: Expr, zero_points: Expr | None, axis: int, quant_min: int, quant_max: int,
    dtype: torch.dtype, out_dtype: torch.dtype | None = None,
) -> Expr:  # fmt: skip
    rank = n.rank(input)
    zero = None if zero_points is None else _vector_along(n, zero_points, axis, rank)
    return n.cast(_dequantize(n, input, _vector_along(n, scales, axis, rank), zero), n.dtype())


@torch_op(f"{_DOMAIN}.quantize_per_token")
def quantize_per_token(
    n: Node, input: Expr, scales: Expr, zero_points: Expr, quant_min: int, quant_max: int, dtype: torch.dtype
) -> Expr:
    wide = _wide(n, input, scales)
    inverse, zero = n.cast(_reciprocal(n, scales), wide), n.cast(zero_points, wide)
    codes = _codes(n, n.cast(input, wide), inverse, zero, (quant_min, quant_max), rounds_last=True)
    return n.cast(codes, n.dtype())


@torch_op(f"{_DOMAIN}.dequantize_per_token")
def dequantize_per_token(
    n: Node, input: Expr, scales: Expr, zero_points: Expr, quant_min: int, quant_max: int, dtype: torch.dtype,
    output_dtype: torch.dtype,
) -> Expr:  # fmt: skip
    return n.cast(_dequantize(n, input, scales, zero_points), n.dtype())


def _grouped(n: Node, x: Expr, scales: Expr, zero: Expr | None, size: int) -> tuple[Expr, Expr, Expr | None]:
    """Return x as rows of a group each, and the scale and zero point of each row."""
    rows, columns = n.shape_of(x)
    size_ = columns if n.proves_equal(n.shape_of(scales)[-1], 1) and not n.proves_equal(columns, size) else sym(size)
    count = rows * (columns // size_)
    column = (count, sym(1))
    return n.reshape(x, (count, size_)), n.reshape(scales, column), None if zero is None else n.reshape(zero, column)


@torch_op(f"{_DOMAIN}.quantize_per_channel_group")
def quantize_per_channel_group(
    n: Node, input: Expr, scales: Expr, zero_points: Expr, quant_min: int, quant_max: int, dtype: torch.dtype,
    group_size: int,
) -> Expr:  # fmt: skip
    x, scale, zero = _grouped(n, input, scales, zero_points, int(group_size))
    assert zero is not None
    wide = _wide(n, x, scale)
    inverse = n.cast(_reciprocal(n, scale), wide)
    codes = _codes(n, n.cast(x, wide), inverse, n.cast(zero, wide), (quant_min, quant_max), rounds_last=True)
    return n.reshape(n.cast(codes, n.dtype()), n.shape())


@torch_op(f"{_DOMAIN}.dequantize_per_channel_group")
def dequantize_per_channel_group(
    n: Node, input: Expr, scales: Expr, zero_points: Expr | None, quant_min: int, quant_max: int, dtype: torch.dtype,
    group_size: int, output_dtype: torch.dtype,
) -> Expr:  # fmt: skip
    x, scale, zero = _grouped(n, input, scales, zero_points, int(group_size))
    return n.reshape(n.cast(_dequantize(n, x, scale, zero), n.dtype()), n.shape())


# Scales and zero points from data


def _range(n: Node, x: Expr, axes: tuple[int, ...], *, keepdims: bool) -> tuple[Expr, Expr]:
    """Return the least and the greatest element over axes, with 0 among them."""
    zero = n.operand(0, n.dtype_of(x))
    low, high = (n.emit(op(x, axes=axes, keepdims=keepdims)) for op in (ops.min, ops.max))
    return n.emit(ops.minimum(low, zero)), n.emit(ops.maximum(high, zero))


@torch_op(f"{_DOMAIN}.choose_qparams", f"{_DOMAIN}.choose_qparams_symmetric")
def choose_qparams(
    n: Node, input: Expr, quant_min: int, quant_max: int, eps: float, dtype: torch.dtype
) -> tuple[Expr, ...]:
    x = n.cast(input, "float32")
    low, high = _range(n, x, tuple(range(n.rank(x))), keepdims=False)
    least, span = n.operand(eps, "float32"), float(quant_max - quant_min)
    if "symmetric" in n.target:
        greatest = n.emit(ops.maximum(n.emit(ops.neg(low)), high))
        scale = n.emit(ops.divide(greatest, n.operand(span / 2, "float32")))
        zero: Expr = n.operand(128 if dtype_name(dtype) == "uint8" else 0, "int64")
    else:
        scale = n.emit(ops.divide(n.emit(ops.subtract(high, low)), n.operand(span, "float32")))
    scale = n.emit(ops.maximum(scale, least))
    if "symmetric" not in n.target:
        steps = n.cast(n.emit(ops.round(n.emit(ops.divide(low, scale)))), "int64")
        zero = n.emit(ops.subtract(n.operand(quant_min, "int64"), steps))
        zero = n.emit(
            ops.minimum(n.emit(ops.maximum(zero, n.operand(quant_min, "int64"))), n.operand(quant_max, "int64"))
        )
    return n.reshape(n.cast(scale, n.dtype(0)), (1,)), n.reshape(n.cast(zero, n.dtype(1)), (1,))


@torch_op(f"{_DOMAIN}.choose_qparams_per_token")
def choose_qparams_per_token(n: Node, input: Expr, dtype: torch.dtype) -> tuple[Expr, ...]:
    if dtype_name(dtype) != "int8":
        n.fail(f"choose_qparams_per_token is for int8, not {dtype_name(dtype)}")
    x = n.cast(input, "float32")
    size = n.emit(ops.max(n.emit(ops.abs(x)), axes=(n.rank(x) - 1,), keepdims=True))
    scale = n.emit(ops.divide(n.emit(ops.maximum(size, n.operand(1e-5, "float32"))), n.operand(127, "float32")))
    return n.cast(scale, n.dtype(0)), n.full(n.shape(1), 0, n.dtype(1))


@torch_op(f"{_DOMAIN}.choose_qparams_per_token_asymmetric", f"{_DOMAIN}._choose_qparams_per_token_asymmetric_impl")
def choose_qparams_per_token_asymmetric(n: Node, input: Expr, dtype: torch.dtype) -> tuple[Expr, ...]:
    """Scale and zero point of each row for int8, as XNNPACK chooses them."""
    x = n.cast(input, "float32")
    low, high = _range(n, x, (n.rank(x) - 1,), keepdims=True)
    number = lambda value: n.operand(value, "float32")  # noqa: E731
    scale = n.emit(ops.divide(n.emit(ops.subtract(high, low)), number(255)))
    scale = n.emit(ops.maximum(scale, number(_EPSILON)))
    least, greatest = (n.emit(ops.divide(v, scale)) for v in (low, high))
    errors = n.emit(ops.add(n.emit(ops.add(number(-128), least)), n.emit(ops.add(number(127), greatest))))
    from_low, from_high = n.emit(ops.subtract(number(-128), least)), n.emit(ops.subtract(number(127), greatest))
    zero = n.emit(ops.where(n.emit(ops.greater(errors, number(0))), from_low, from_high))
    zero = n.emit(ops.round(n.emit(ops.clip(zero, lower=-128.0, upper=127.0))))
    return n.cast(scale, n.dtype(0)), n.cast(zero, n.dtype(1))


@torch_op(f"{_DOMAIN}.fake_quant_per_channel")
def fake_quant_per_channel(
    n: Node, input: Expr, scales: Expr, zero_points: Expr, axis: int, quant_min: int, quant_max: int
) -> Expr:
    """Quantize and dequantize in float32."""
    dtype, rank = n.dtype(), n.rank(input)
    scale, zero = (_vector_along(n, n.cast(v, dtype), axis, rank) for v in (scales, zero_points))
    codes = _codes(n, input, _reciprocal(n, scale), zero, (quant_min, quant_max))
    return n.emit(ops.multiply(n.emit(ops.subtract(codes, zero)), scale))
