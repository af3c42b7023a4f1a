"""Fused attention of onnxruntime (com.microsoft): Attention, MultiHeadAttention, RotaryEmbedding.

Attention of the standard domain is expanded by the body that ONNX gives for it, once its sizes are seen to fit.
GroupQueryAttention has a module of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from relaxlite.frontend.onnx.attention_parts import (
    attend,
    joined,
    merge_heads,
    of_sizes,
    positions,
    rotated,
    score_scale,
    split_heads,
    where_allowed,
)
from relaxlite.frontend.onnx.convert_contrib import MICROSOFT
from relaxlite.frontend.onnx.convert_quantization import zero_points
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.symbolic import SymExpr, sym


def _causal(n: Node, q: Expr, k: Expr, low: float, window: int = -1) -> Expr:
    """Query i, which stands at past + i, sees the keys up to there (and only the last `window` of them)."""
    queries, keys = n.shape_of(q)[2], n.shape_of(k)[2]
    row = n.emit(ops.reshape(positions(n, queries, keys - queries), (queries, 1)))
    column = n.emit(ops.reshape(positions(n, keys), (1, keys)))
    allowed = n.emit(ops.less_equal(column, row))
    if window > 0:
        recent = n.emit(ops.less(n.emit(ops.subtract(row, column)), Constant.of(window, "int64")))
        allowed = n.emit(ops.logical_and(allowed, recent))
    return where_allowed(n, allowed, n.type_of(q).dtype, low)


def _padding_mask(n: Node, mask: Expr, keys: SymExpr, dtype: str, low: float) -> Expr:
    """A mask given as lengths (b,), as flags (b, keys), or as flags (b, queries, keys): 1 for what is seen."""
    shape = n.shape_of(mask)
    if len(shape) == 1:
        column = n.emit(ops.cast(positions(n, keys), dtype=n.type_of(mask).dtype))
        allowed = n.emit(ops.less(column, n.emit(ops.reshape(mask, (shape[0], 1, 1, 1)))))
        return where_allowed(n, allowed, dtype, low)
    if len(shape) not in (2, 3):
        n.fail(f"a mask of rank {len(shape)} is not supported")
    flags = n.emit(ops.not_equal(mask, Constant.of(0, n.type_of(mask).dtype)))
    wide = (shape[0], sym(1), sym(1), shape[1]) if len(shape) == 2 else (shape[0], sym(1), *shape[1:])
    return where_allowed(n, n.emit(ops.reshape(flags, wide)), dtype, low)


@onnx_op("Attention", since=23)
def standard_attention(n: Node) -> Result:
    """Inputs: q, k and v, (b, h, s, d) or (b, s, h * d). The body would broadcast batches, and the heads of v."""
    batch, is_split = n.shape()[0], n.rank(1) == 4
    n.inputs[1] = of_sizes(n, 1, {0: batch})
    n.inputs[2] = of_sizes(n, 2, {0: batch, 1: n.shape(1)[1]} if is_split else {0: batch})
    return n.importer.expand(n)


@onnx_op("Attention", domain=MICROSOFT)
def attention(n: Node) -> Result:
    """Inputs: x, weights of q, k and v side by side, their bias, mask, past (2, b, h, t, d), a bias of the scores."""
    if n.optional(6) is not None:
        n.fail("Attention with a shared buffer is not supported")
    widths = n.ints("qkv_hidden_sizes", None) or (n.shape(1)[1] // 3,) * 3
    projected: Expr = n.emit(ops.matmul(n.input(0), n.input(1)))
    if n.optional(2) is not None:
        projected = n.emit(ops.add(projected, n.input(2)))
    return _self_attention(n, projected, widths, n.optional(3), n.optional(4), n.optional(5))


@onnx_op("QAttention", domain=MICROSOFT)
def quantized_attention(n: Node) -> Result:
    """The same of 8 bits: x, weights, bias (float), their two scales, mask, their two zero points, past."""
    zeros = zero_points(n, 6, 7)
    product = n.emit(ops.cast(n.emit(ops.matmul_integer(n.input(0), n.input(1), *zeros)), dtype="float32"))
    scale = n.emit(ops.multiply(n.input(3), n.input(4)))
    projected = n.emit(ops.add(n.emit(ops.multiply(product, scale)), n.input(2)))
    return _self_attention(n, projected, (n.shape(1)[1] // 3,) * 3, n.optional(5), n.optional(8), None)


def _self_attention(
    n: Node, projected: Expr, widths: Sequence[SymExpr | int], mask: Expr | None, past: Expr | None, bias: Expr | None
) -> Result:
    """Of q, k and v (b, s, sum of widths) side by side."""
    heads, low = n.int("num_heads"), n.float("mask_filter_value", -10000.0)
    if n.flag("do_rotary") or n.flag("past_present_share_buffer"):
        n.fail(f"{n.op_type} with rotary embedding or a shared buffer is not supported")
    parts, begin = [], sym(0)
    for width in widths:
        parts.append(split_heads(n, n.emit(ops.slice(projected, (begin,), (width,), axes=(2,))), heads))
        begin = begin + width
    q, k, v = parts
    if past is not None:
        held = [n.emit(ops.squeeze(n.emit(ops.slice(past, (i,), (1,), axes=(0,))), axes=(0,))) for i in (0, 1)]
        k, v = joined(n, held[0], k), joined(n, held[1], v)
    masks = _masks(n, q, k, mask, bias, low, causal=n.flag("unidirectional"))
    result = merge_heads(n, attend(n, q, k, v, scale=score_scale(n, n.shape_of(q)[3]), masks=masks))
    if not n.wants(1):
        return result
    present = [n.emit(ops.expand_dims(x, axes=(0,))) for x in (k, v)]
    return result, ops.concat(*present, axis=0)


def _masks(n: Node, q: Expr, k: Expr, mask: Expr | None, bias: Expr | None, low: float, *, causal: bool) -> list[Expr]:
    found = [] if mask is None else [_padding_mask(n, mask, n.shape_of(k)[2], n.type_of(q).dtype, low)]
    if causal:
        found.append(_causal(n, q, k, low))
    return found if bias is None else [*found, bias]


@onnx_op("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(n: Node) -> Result:
    """Inputs: query, key, value, bias, key padding mask, attention bias, past key, past value. Keys and values may be
    one tensor (b, s, h, 2, d), and all three (b, s, h, 3, d)."""
    heads, low = n.int("num_heads"), n.float("mask_filter_value", -10000.0)
    if n.optional(8) is not None or n.wants(3):
        n.fail("MultiHeadAttention with a shared cache, or that gives its scores, is not supported")
    tensors = [n.input(0)] if n.optional(1) is None else [n.input(0), n.input(1)]
    if n.optional(2) is None:
        tensors = [*tensors[:-1], *_unpacked(n, tensors[-1], 4 - len(tensors))]
    else:
        tensors.append(n.input(2))
    if n.optional(3) is not None:
        tensors = _with_biases(n, tensors, n.input(3))
    q, k, v = (x if len(n.shape_of(x)) == 4 else split_heads(n, x, heads) for x in tensors)
    k, v = joined(n, n.optional(6), k), joined(n, n.optional(7), v)
    masks = _masks(n, q, k, n.optional(4), n.optional(5), low, causal=n.flag("unidirectional"))
    result = merge_heads(n, attend(n, q, k, v, scale=score_scale(n, n.shape_of(q)[3]), masks=masks))
    return result, k, v


def _unpacked(n: Node, x: Expr, count: int) -> list[Expr]:
    """The parts (b, h, s, d) of a tensor (b, s, h, count, d)."""
    shape = n.shape_of(x)
    if len(shape) != 5 or shape[3] != sym(count):
        n.fail(
            f"{'q, k and v' if count == 3 else 'k and v'} in one tensor must be of (b, s, h, {count}, d), got {shape}"
        )
    parts = [n.emit(ops.squeeze(n.emit(ops.slice(x, (i,), (1,), axes=(3,))), axes=(3,))) for i in range(count)]
    return [n.emit(ops.transpose(part, axes=(0, 2, 1, 3))) for part in parts]


def _with_biases(n: Node, tensors: list[Expr], bias: Expr) -> list[Expr]:
    """One bias vector for q, k and v, side by side."""
    made, begin = [], sym(0)
    for x in tensors:
        if len(n.shape_of(x)) != 3:
            n.fail("MultiHeadAttention with a bias needs inputs of rank 3")
        width = n.shape_of(x)[2]
        made.append(n.emit(ops.add(x, n.emit(ops.slice(bias, (begin,), (width,), axes=(0,))))))
        begin = begin + width
    return list(made)


@onnx_op("RotaryEmbedding", domain=MICROSOFT)
def rotary_embedding(n: Node) -> Result:
    """x (b, s, h * d) or (b, h, s, d) at position ids (1,) or (b, s), by tables of cos and sin."""
    interleaved, width, heads = n.flag("interleaved"), n.int("rotary_embedding_dim", 0), n.int("num_heads", 0)
    if n.flag("is_packed_batching") or n.float("scale", 1.0) != 1.0:
        n.fail("RotaryEmbedding with packed batches or a scale is not supported")
    x, flat = n.input(0), n.rank() == 3
    if flat:
        if not heads:
            head = n.shape(2)[1] * 2
            heads = int(n.shape()[2] // head) if (n.shape()[2] // head).is_const else 0
        if not heads:
            n.fail("the number of heads must be known")
        x = split_heads(n, x, heads)
    places = n.input(1)
    if n.rank(1) == 1:
        offsets = positions(n, n.shape_of(x)[2])
        places = n.emit(ops.expand_dims(n.emit(ops.add(places, offsets)), axes=(0,)))
    made = rotated(n, x, places, n.input(2), n.input(3), interleaved, width)
    return merge_heads(n, made) if flat else made
