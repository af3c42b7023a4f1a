"""Converters of quantization, dequantization and quantized products."""

from __future__ import annotations

import numpy as np

from relaxlite import dtypes
from relaxlite.frontend.common.unify import unify_dims
from relaxlite.frontend.onnx.convert_nn import conv_attributes
from relaxlite.frontend.onnx.convert_shapes import normalize_axis
from relaxlite.frontend.onnx.narrow import clipped, decode, encode
from relaxlite.frontend.onnx.narrow_types import NarrowType
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr


def _axis(n: Node) -> int:
    """Return the attribute `axis`; onnxruntime's quantizer also writes it before opset 13, where ONNX has none."""
    return n.int("axis", 1 if n.opset >= 13 else 0)


def _equal_ranks(n: Node, scale: Expr, zero: Expr | None) -> tuple[Expr, Expr | None]:
    """Return scale and zero point of equal rank: of one element, exporters write them as () and (1,)."""
    if zero is None or len(n.shape_of(scale)) == len(n.shape_of(zero)):
        return scale, zero
    return tuple(_as_scalar(n, x) for x in (scale, zero))  # type: ignore[return-value]


@onnx_op("QuantizeLinear", since=10)
def quantize_linear(n: Node) -> Result:
    """QuantizeLinear; the result's type is that of the attribute or of the zero point, by default uint8."""
    saturate = n.flag("saturate", True)  # affects float8 only
    precision = n.int("precision", 0)
    if precision not in (0, 1) and not (precision == 11 and n.dtype() == "float64"):
        n.int("precision", 0)
    zero = n.optional(2)
    output_dtype = n.element_type("output_dtype", "") if n.int("output_dtype", 0) else ""
    narrow = (
        n.narrow_type("output_dtype") if output_dtype else n.importer.narrow.get(zero) if zero is not None else None
    )
    dtype = output_dtype or ("uint8" if zero is None else n.dtype(2))
    x = n.input(0)
    if not dtypes.is_float(n.type_of(x).dtype):
        x = n.emit(ops.cast(x, dtype="float32"))
    scale, zero = _equal_ranks(n, n.input(1), zero)
    axis, block = _axis(n), n.int("block_size", 0)
    if narrow is not None and narrow.is_float:
        encoded = encode(n, n.emit(ops.divide(x, _expand_scale(n, scale, axis, block))), narrow, saturate=saturate)
        n.importer.narrow[encoded] = narrow
        return encoded
    result = ops.quantize_linear(x, scale, zero, axis=axis, block_size=block, dtype=dtype)
    if narrow is None:
        return result
    limited = clipped(n, n.emit(result), narrow)
    n.importer.narrow[limited] = narrow
    return limited


def _expand_scale(n: Node, scale: Expr, axis: int, block: int) -> Expr:
    """Expand a scale per tensor, slice or block to a shape that broadcasts to the input."""
    if len(n.shape_of(scale)) == 0:
        return scale
    axis = normalize_axis(n, axis, n.rank())
    if block:
        size = n.shape()[axis]
        if not size.is_const:
            n.fail("the size of the axis that is in blocks must be known")
        return n.emit(ops.gather(scale, Constant.of(np.arange(size.const) // block), axis=axis))
    return n.emit(ops.reshape(scale, (*n.shape_of(scale), *(1,) * (n.rank() - 1 - axis))))


@onnx_op("DequantizeLinear", since=10)
def dequantize_linear(n: Node) -> Result:
    n.ignore("saturate")
    axis, block = _axis(n), n.int("block_size", 0)
    scale, zero = _equal_ranks(n, n.input(1), n.optional(2))
    narrow = n.importer.narrow.get(n.input(0))
    if narrow is not None and narrow.is_float:
        return _dequantized_floats(n, narrow, scale, axis, block)
    result = ops.dequantize_linear(n.input(0), scale, zero, axis=axis, block_size=block)
    output_dtype = n.element_type("output_dtype", "") if n.int("output_dtype", 0) else ""
    return result if output_dtype in ("", n.dtype(1)) else ops.cast(n.emit(result), dtype=output_dtype)


def _dequantized_floats(n: Node, narrow: NarrowType, scale: Expr, axis: int, block: int) -> Result:
    """Dequantize a narrow float type, whose zero point is 0."""
    dtype = n.type_of(scale).dtype
    wide = n.emit(ops.cast(decode(n, n.input(0), narrow), dtype=dtype))
    return ops.multiply(wide, _expand_scale(n, scale, axis, block))


@onnx_op("DynamicQuantizeLinear", since=11)
def dynamic_quantize_linear(n: Node) -> Result:
    return n.fields(ops.dynamic_quantize_linear(n.input(0)))


def zero_points(n: Node, left: int, right: int) -> tuple[Expr, ...]:
    """Return the zero points of two operands, at most two; a second one alone gets a first one of 0."""
    a, b = n.optional(left), n.optional(right)
    if b is None:
        return () if a is None else (a,)
    return (a if a is not None else Constant.of(np.zeros((), dtypes.to_numpy(n.dtype(0)))), b)


@onnx_op("MatMulInteger", since=10)
def matmul_integer(n: Node) -> Result:
    left, right = n.shape(0), n.shape(1)
    a = unify_dims(n.bb, n.input(0), {len(left) - 1: right[-2] if len(right) > 1 else right[0]})
    return ops.matmul_integer(a, n.input(1), *zero_points(n, 2, 3))


@onnx_op("ConvInteger", since=10)
def conv_integer(n: Node) -> Result:
    pads, attrs = conv_attributes(n)
    return ops.conv_integer(n.input(0), n.input(1), pads, *zero_points(n, 2, 3), **attrs)


@onnx_op("QLinearMatMul", since=10)
def qlinear_matmul(n: Node) -> Result:
    operands = [_as_scalar(n, n.input(k)) if k in (6, 7) else n.input(k) for k in range(8)]
    for k in (1, 4, 6):
        if n.dtype(k) != "float32":
            operands[k] = n.emit(ops.cast(operands[k], dtype="float32"))
    return ops.qlinear_matmul(*operands)


def _as_scalar(n: Node, x: Expr) -> Expr:
    """Reshape a scale or zero point of one element to a scalar."""
    if isinstance(x, Constant):
        return Constant.of(x.value.reshape(()), name=x.name) if x.value.size == 1 else x
    return n.emit(ops.reshape(x, ())) if len(n.shape_of(x)) == 1 else x


@onnx_op("QLinearConv", since=10)
def qlinear_conv(n: Node) -> Result:
    pads, attrs = conv_attributes(n, weight=3)
    operands = [n.input(k) for k in range(8)]
    return ops.qlinear_conv(*operands, pads, n.optional(8), **attrs)
