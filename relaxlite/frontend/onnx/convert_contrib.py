"""Converters of the fused ops of onnxruntime's optimizer (com.microsoft), except attention and blocked weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relaxlite.frontend.onnx.convert_linalg import emit_matmul, gemm, scale_by
from relaxlite.frontend.onnx.convert_nn import conv, pool_attributes
from relaxlite.frontend.onnx.convert_norm import layer_norm
from relaxlite.frontend.onnx.convert_quantization import (
    dequantize_linear,
    dynamic_quantize_linear,
    quantize_linear,
    zero_points,
)
from relaxlite.frontend.onnx.convert_shapes import normalize_axis
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr

MICROSOFT = "com.microsoft"


def _number(n: Node, value: float) -> Constant:
    return Constant.of(value, n.dtype())


# Activations


@onnx_op("Gelu", domain=MICROSOFT)
def gelu(n: Node) -> Result:
    return ops.gelu(n.input(0), approximate="none")


@onnx_op("BiasGelu", domain=MICROSOFT)
def bias_gelu(n: Node) -> Result:
    return ops.gelu(n.emit(ops.add(n.input(0), n.input(1))), approximate="none")


@onnx_op("FastGelu", domain=MICROSOFT)
def fast_gelu(n: Node) -> Result:
    x, bias = n.input(0), n.optional(1)
    return ops.gelu(x if bias is None else n.emit(ops.add(x, bias)), approximate="tanh")


@onnx_op("QuickGelu", domain=MICROSOFT)
def quick_gelu(n: Node) -> Result:
    """QuickGelu: x * sigmoid(alpha * x)."""
    inner = n.emit(ops.multiply(n.input(0), _number(n, n.float("alpha", 1.702))))
    return ops.multiply(n.input(0), n.emit(ops.sigmoid(inner)))


@onnx_op("BiasSplitGelu", domain=MICROSOFT)
def bias_split_gelu(n: Node) -> Result:
    """BiasSplitGelu: the left half of x + bias times the GELU of the right half."""
    total = n.emit(ops.add(n.input(0), n.input(1)))
    last = n.rank() - 1
    half = n.shape()[last] // 2
    left, right = (n.emit(ops.slice(total, (begin,), (half,), axes=(last,))) for begin in (0, half))
    return ops.multiply(left, n.emit(ops.gelu(right, approximate="none")))


@onnx_op("BiasSoftmax", domain=MICROSOFT)
def bias_softmax(n: Node) -> Result:
    """BiasSoftmax: softmax(x + bias); the bias is broadcast by numpy's rules."""
    axis = normalize_axis(n, n.int("axis", 1), n.rank())
    n.int("is_inner_broadcast")  # follows from the shapes
    if axis != n.rank() - 1:
        n.fail("BiasSoftmax over more than the last axis is not supported")
    return ops.softmax(n.emit(ops.add(n.input(0), n.input(1))), axis=-1)


# Products


@onnx_op("FusedMatMul", "TransposeMatMul", domain=MICROSOFT)
def fused_matmul(n: Node) -> Result:
    a, b = (
        _transposed(n, k, n.flag(name), n.flag(batch))
        for k, name, batch in ((0, "transA", "transBatchA"), (1, "transB", "transBatchB"))
    )
    product = emit_matmul(n, a, b)
    alpha = n.float("alpha", 1.0)
    return product if alpha == 1.0 else scale_by(n, product, alpha)


def _transposed(n: Node, index: int, matrix: bool, batch: bool) -> Expr:
    """Transpose an input. `matrix` swaps the last two dimensions; `batch` moves the first one before the last."""
    order = list(range(n.rank(index)))
    if batch and len(order) > 2:
        order = [*order[1:-1], 0, order[-1]]
    if matrix and len(order) > 1:
        order[-1], order[-2] = order[-2], order[-1]
    return n.input(index) if order == sorted(order) else n.emit(ops.transpose(n.input(index), axes=tuple(order)))


@onnx_op("FusedGemm", domain=MICROSOFT)
def fused_gemm(n: Node) -> Result:
    activation = n.text("activation")
    params = [n.float(name, None) for name in ("activation_alpha", "activation_beta", "activation_gamma")]
    return _activate(n, gemm(n), activation, [p for p in params if p is not None])


@onnx_op("FusedConv", domain=MICROSOFT)
def fused_conv(n: Node) -> Result:
    """FusedConv: a convolution, plus input 3 if present, then an activation."""
    result, added = conv(n), n.optional(3)
    assert not isinstance(result, tuple)
    if added is not None:
        result = ops.add(n.emit(result), added)
    return _activate(n, result, n.text("activation", ""), n.floats("activation_params", ()) or ())


def _activate(n: Node, result: Result, name: str, params: Sequence[float]) -> Result:
    if isinstance(result, tuple):
        n.fail("a fused op has one result")
    simple = {"Relu": ops.relu, "Tanh": ops.tanh, "Sigmoid": ops.sigmoid, "HardSwish": ops.hard_swish}
    if not name:
        return result
    x = n.emit(result)
    if name in simple:
        return simple[name](x)
    if name == "LeakyRelu":
        return ops.leaky_relu(x, alpha=params[0] if params else 0.01)
    if name == "Clip" and len(params) == 2:
        return ops.clip(x, lower=params[0], upper=params[1])
    if name == "HardSigmoid":
        return ops.hard_sigmoid(x, alpha=params[0] if params else 0.2, beta=params[1] if len(params) > 1 else 0.5)
    n.fail(f"activation {name!r} is not known")


# Normalizations (exporters write LayerNormalization in the standard domain before opset 17, too)

onnx_op("LayerNormalization")(layer_norm)


@onnx_op("SimplifiedLayerNormalization")
@onnx_op("SimplifiedLayerNormalization", domain=MICROSOFT)
def simplified_layer_norm(n: Node) -> Result:
    n.int("stash_type", 1)
    if n.wants(1):
        n.fail("the second output (the inverse root) is not supported")
    axis = normalize_axis(n, n.int("axis", -1), n.rank())
    return ops.rms_norm(n.input(0), n.input(1), axis=axis, epsilon=n.float("epsilon", 1e-5))


@onnx_op("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_layer_norm(n: Node) -> Result:
    """SkipLayerNormalization: normalize x + skip + bias; output 3 is the sum.

    Inputs: x, skip, gamma, beta (not in the simplified form), bias.
    """
    is_simple = n.op_type == "SkipSimplifiedLayerNormalization"
    beta, bias = (None, n.optional(3)) if is_simple else (n.optional(3), n.optional(4))
    total: Expr = n.emit(ops.add(n.input(0), n.input(1)))
    if bias is not None:
        total = n.emit(ops.add(total, bias))
    epsilon = n.float("epsilon", 1e-12)
    if is_simple:
        result = ops.rms_norm(total, n.input(2), axis=-1, epsilon=epsilon)
    else:
        result = ops.layer_norm(total, n.input(2), beta, axis=-1, epsilon=epsilon)
    return result, None, None, total


@onnx_op("EmbedLayerNormalization", domain=MICROSOFT)
def embed_layer_norm(n: Node) -> Result:
    """EmbedLayerNormalization: normalize the sum of word, position and segment embeddings.

    Output 1: the number of ones in each row of the mask, or zeros: lengths for Attention. Output 2: the sum.
    """
    n.int("mask_index_type", 0)
    if n.optional(2) is None or n.optional(3) is None:
        n.fail("EmbedLayerNormalization needs word and position tables")
    total = n.emit(ops.gather(n.input(2), n.input(0), axis=0))
    if n.optional(8) is None:
        row = n.emit(ops.slice(n.input(3), (0,), (n.shape()[1],), axes=(0,)))
    else:
        row = n.emit(ops.gather(n.input(3), n.input(8), axis=0))
    total = n.emit(ops.add(total, row))
    if n.optional(1) is not None and n.optional(4) is not None:
        total = n.emit(ops.add(total, n.emit(ops.gather(n.input(4), n.input(1), axis=0))))
    normalized = n.emit(ops.layer_norm(total, n.input(5), n.input(6), axis=-1, epsilon=n.float("epsilon", 1e-12)))
    return normalized, _lengths(n, n.optional(7)), total


@onnx_op("QEmbedLayerNormalization", domain=MICROSOFT)
def quantized_embed_layer_norm(n: Node) -> Result:
    """QEmbedLayerNormalization: tables of 8 bits; inputs 8 to 12: scales of inputs 2 to 6, 13 to 17: zero points."""

    def dequantized_rows(table: int, indices: Expr) -> Expr:
        rows = n.emit(ops.gather(n.input(table), indices, axis=0))
        return n.emit(ops.dequantize_linear(rows, n.input(table + 6), n.input(table + 11)))

    position_ids = n.emit(ops.arange(Constant.of(0, "int64"), Constant.of(1, "int64"), (n.shape()[1],)))
    total = n.emit(ops.add(dequantized_rows(2, n.input(0)), dequantized_rows(3, position_ids)))
    if n.optional(1) is not None and n.optional(4) is not None:
        total = n.emit(ops.add(total, dequantized_rows(4, n.input(1))))
    gamma, beta = (n.emit(ops.dequantize_linear(n.input(k), n.input(k + 6), n.input(k + 11))) for k in (5, 6))
    normalized = n.emit(ops.layer_norm(total, gamma, beta, axis=-1, epsilon=n.float("epsilon", 1e-12)))
    return normalized, _lengths(n, n.optional(7))


def _lengths(n: Node, mask: Expr | None) -> Expr | None:
    """Return the number of ones in each row of a mask, int32; None if output 1 is unused."""
    if not n.wants(1):
        return None
    if mask is None:
        return n.emit(ops.broadcast_to(Constant.of(np.zeros((), np.int32)), n.shape()[:1]))
    ones = n.emit(ops.cast(n.emit(ops.equal(mask, Constant.of(1, n.type_of(mask).dtype))), dtype="int32"))
    return n.emit(ops.sum(ones, axes=(1,)))


@onnx_op("GroupNorm", domain=MICROSOFT)
def group_norm(n: Node) -> Result:
    """GroupNorm: group normalization of (n, h, w, c) or (n, c, h, w), with SiLU if activation=1."""
    last = n.flag("channels_last", True)
    rank = n.rank()
    x = n.input(0)
    if last:
        x = n.emit(ops.transpose(x, axes=(0, rank - 1, *range(1, rank - 1))))
    weights = [
        w if n.type_of(w).dtype == n.dtype() else n.emit(ops.cast(w, dtype=n.dtype())) for w in (n.input(1), n.input(2))
    ]
    result = n.emit(ops.group_norm(x, *weights, groups=n.int("groups"), epsilon=n.float("epsilon", 1e-5)))
    if n.int("activation"):
        result = n.emit(ops.silu(result))
    return ops.transpose(result, axes=(0, *range(2, rank), 1)) if last else result


# Quantized

onnx_op("QuantizeLinear", domain=MICROSOFT)(lambda n: quantize_linear(_as_standard(n)))
onnx_op("DequantizeLinear", domain=MICROSOFT)(lambda n: dequantize_linear(_as_standard(n)))
onnx_op("DynamicQuantizeLinear", domain=MICROSOFT)(dynamic_quantize_linear)


def _as_standard(n: Node) -> Node:
    """Return the node as of opset 21: version 1 of this domain is equal to the standard op since opset 21."""
    n.opset = 21
    return n


@onnx_op("DynamicQuantizeMatMul", domain=MICROSOFT)
def dynamic_quantize_matmul(n: Node) -> Result:
    """DynamicQuantizeMatMul: quantized a @ b, rescaled to floats; inputs: a (float), b (8 bits), b's scale, b's zero
    point, bias."""
    a, scale, zero = n.fields(ops.dynamic_quantize_linear(n.input(0)))
    zeros = (zero,) if n.optional(3) is None else (zero, n.input(3))
    total = n.emit(ops.cast(n.emit(ops.matmul_integer(a, n.input(1), *zeros)), dtype="float32"))
    return _rescaled(n, total, scale, n.input(2), n.optional(4))


@onnx_op("MatMulIntegerToFloat", domain=MICROSOFT)
def matmul_integer_to_float(n: Node) -> Result:
    """MatMulIntegerToFloat; inputs: a, b, their scales, their zero points, bias."""
    total = n.emit(ops.matmul_integer(n.input(0), n.input(1), *zero_points(n, 4, 5)))
    dtype = n.dtype(2)
    return _rescaled(n, n.emit(ops.cast(total, dtype=dtype)), n.input(2), n.input(3), n.optional(6))


def _rescaled(n: Node, total: Expr, left: Expr, right: Expr, bias: Expr | None) -> Result:
    product = ops.multiply(total, n.emit(ops.multiply(left, right)))
    return product if bias is None else ops.add(n.emit(product), bias)


@onnx_op("QLinearAdd", "QLinearMul", domain=MICROSOFT)
def qlinear_binary(n: Node) -> Result:
    """QLinearAdd, QLinearMul; inputs: a, scale and zero point of a, the same of b, scale and zero point of output."""
    a, b = (n.emit(_dequantized(n, k)) for k in (0, 3))
    op = ops.add if n.op_type == "QLinearAdd" else ops.multiply
    return _quantized(n, n.emit(op(a, b)), 6)


def _dequantized(n: Node, index: int) -> Expr:
    return ops.dequantize_linear(n.input(index), n.input(index + 1), n.optional(index + 2))


def _quantized(n: Node, x: Expr, index: int) -> Expr:
    zero = n.optional(index + 1)
    return ops.quantize_linear(x, n.input(index), zero, dtype=None if zero is not None else n.dtype(0))


@onnx_op("QLinearWhere", domain=MICROSOFT)
def qlinear_where(n: Node) -> Result:
    """QLinearWhere; inputs: condition, x, scale and zero point of x, the same of y, scale and zero point of output."""
    x, y = (n.emit(_dequantized(n, k)) for k in (1, 4))
    return _quantized(n, n.emit(ops.where(n.input(0), x, y)), 7)


@onnx_op("QLinearSigmoid", "QLinearLeakyRelu", domain=MICROSOFT)
def qlinear_unary(n: Node) -> Result:
    x = n.emit(_dequantized(n, 0))
    result = ops.sigmoid(x) if n.op_type == "QLinearSigmoid" else ops.leaky_relu(x, alpha=n.float("alpha", 0.01))
    return _quantized(n, n.emit(result), 3)


@onnx_op("QLinearSoftmax", domain=MICROSOFT)
def qlinear_softmax(n: Node) -> Result:
    opset, axis = n.int("opset"), n.int("axis", -1)
    if opset < 13 and normalize_axis(n, axis, n.rank()) != n.rank() - 1:
        n.fail("QLinearSoftmax over more than the last axis is not supported")
    return _quantized(n, n.emit(ops.softmax(n.emit(_dequantized(n, 0)), axis=axis)), 3)


@onnx_op("QLinearGlobalAveragePool", domain=MICROSOFT)
def qlinear_global_average_pool(n: Node) -> Result:
    first = 1 if n.flag("channels_last") else 2
    axes = tuple(range(first, first + n.rank() - 2))
    return _quantized(n, n.emit(ops.mean(n.emit(_dequantized(n, 0)), axes=axes, keepdims=True)), 3)


@onnx_op("QLinearAveragePool", domain=MICROSOFT)
def qlinear_average_pool(n: Node) -> Result:
    last, rank, x = n.flag("channels_last"), n.rank(), n.emit(_dequantized(n, 0))
    if last:
        x = n.emit(ops.transpose(x, axes=(0, rank - 1, *range(1, rank - 1))))
    pads, attrs = pool_attributes(n, n.shape_of(x)[2:])
    result = n.emit(ops.avg_pool(x, pads, count_include_pad=n.flag("count_include_pad"), **attrs))
    if last:
        result = n.emit(ops.transpose(result, axes=(0, *range(2, rank), 1)))
    return _quantized(n, result, 3)


@onnx_op("QGemm", domain=MICROSOFT)
def qgemm(n: Node) -> Result:
    """QGemm: alpha * a @ b in 8 bits, plus an int32 bias with the scale of the product.

    Inputs: a, its scale and zero point, the same of b, bias, the result's scale and zero point; without the latter two
    the result is float32.
    """
    alpha, bias, operands = n.float("alpha", 1.0), n.optional(6), []
    for name, k in (("transA", 0), ("transB", 3)):
        x = n.emit(ops.transpose(n.input(k), axes=(1, 0))) if n.flag(name) else n.input(k)
        operands.append(n.emit(ops.dequantize_linear(x, n.input(k + 1), n.optional(k + 2), axis=1)))
    product = emit_matmul(n, *operands)
    if bias is not None:
        scale = n.emit(ops.multiply(n.input(1), n.input(4)))
        product = n.emit(ops.add(product, n.emit(ops.dequantize_linear(bias, scale, axis=-1))))
    product = product if alpha == 1.0 else n.emit(scale_by(n, product, alpha))
    return product if n.optional(7) is None else _quantized(n, product, 7)


@onnx_op("QLinearConcat", domain=MICROSOFT)
def qlinear_concat(n: Node) -> Result:
    """QLinearConcat; inputs: the result's scale and zero point, then x, scale and zero point for each part."""
    parts = [n.emit(_dequantized(n, k)) for k in range(2, len(n.inputs), 3)]
    joined = n.emit(ops.concat(*parts, axis=n.int("axis")))
    return ops.quantize_linear(joined, n.input(0), n.input(1))


# Other ops


@onnx_op("ExpandDims", domain=MICROSOFT)
def expand_dims(n: Node) -> Result:
    return ops.expand_dims(n.input(0), axes=n.const_ints(1, "axis"))


@onnx_op("Trilu", domain=MICROSOFT)
def trilu(n: Node) -> Result:
    k = n.shape_values(1) if n.optional(1) is not None else (0,)
    return ops.trilu(n.input(0), k, upper=n.flag("upper", True))
