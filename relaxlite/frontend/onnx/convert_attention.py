"""Converters of attention: onnxruntime's fused Attention, MultiHeadAttention and RotaryEmbedding (com.microsoft).

Attention of the standard domain is inlined by ONNX's function body, after a check of its sizes. GroupQueryAttention is
in convert_grouped_attention.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from relaxlite.frontend.onnx.attention_masks import score_masks
from relaxlite.frontend.onnx.attention_parts import (
    apply_rotary,
    attend,
    attention_scale,
    concat_past,
    input_with_sizes,
    merge_heads,
    positions,
    split_heads,
    with_sizes,
)
from relaxlite.frontend.onnx.convert_contrib import MICROSOFT
from relaxlite.frontend.onnx.convert_quantization import zero_points
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import SymExpr, sym


@onnx_op("Attention", since=23)
def standard_attention(n: Node) -> Result:
    """Attention; inputs: q, k and v, (b, h, s, d) or (b, s, h * d).

    Sizes are checked here: the body would broadcast batches, and the heads of v.
    """
    batch, is_split = n.shape()[0], n.rank(1) == 4
    n.inputs[1] = input_with_sizes(n, 1, {0: batch})
    n.inputs[2] = input_with_sizes(n, 2, {0: batch, 1: n.shape(1)[1]} if is_split else {0: batch})
    return n.importer.expand(n)


@onnx_op("Attention", domain=MICROSOFT)
def attention(n: Node) -> Result:
    """Attention of onnxruntime; inputs: x, the concatenated weights of q, k and v, their bias, mask, past, score bias.

    The past is (2, b, h, t, d): keys and values.
    """
    if n.optional(6) is not None:
        n.fail("Attention with a shared buffer is not supported")
    widths = n.ints("qkv_hidden_sizes", None) or (n.shape(1)[1] // 3,) * 3
    projected: Expr = n.emit(ops.matmul(n.input(0), n.input(1)))
    if n.optional(2) is not None:
        projected = n.emit(ops.add(projected, input_with_sizes(n, 2, {0: n.shape(1)[1]})))
    return _self_attention(n, projected, widths, n.optional(3), n.optional(4), n.optional(5))


@onnx_op("QAttention", domain=MICROSOFT)
def quantized_attention(n: Node) -> Result:
    """QAttention, Attention in 8 bits; inputs: x, weights, bias (float), two scales, mask, two zero points, past."""
    zeros = zero_points(n, 6, 7)
    product = n.emit(ops.cast(n.emit(ops.matmul_integer(n.input(0), n.input(1), *zeros)), dtype="float32"))
    scale = n.emit(ops.multiply(n.input(3), n.input(4)))
    bias = input_with_sizes(n, 2, {0: n.shape(1)[1]})
    projected = n.emit(ops.add(n.emit(ops.multiply(product, scale)), bias))
    return _self_attention(n, projected, (n.shape(1)[1] // 3,) * 3, n.optional(5), n.optional(8), None)


def _self_attention(
    n: Node, projected: Expr, widths: Sequence[SymExpr | int], mask: Expr | None, past: Expr | None, bias: Expr | None
) -> Result:
    """Emit self-attention of concatenated q, k and v (b, s, sum of widths)."""
    heads, low = n.int("num_heads"), n.float("mask_filter_value", -10000.0)
    if n.flag("do_rotary") or n.flag("past_present_share_buffer"):
        n.fail(f"{n.op_type} with rotary embedding or a shared buffer is not supported")
    parts, begin, whole = [], sym(0), n.shape_of(projected)[2]
    if PROVER.can_prove_ne(sum(map(sym, widths), sym(0)), whole):
        n.fail(f"the widths of q, k and v, {', '.join(map(str, widths))}, must add up to those of the weights, {whole}")
    for width in widths:
        parts.append(split_heads(n, n.emit(ops.slice(projected, (begin,), (width,), axes=(2,))), heads))
        begin = begin + width
    q, k, v = parts
    if past is not None:
        past = with_sizes(n, past, {0: sym(2), 1: n.shape_of(q)[0], 2: sym(heads)}, "the past")
        caches = [n.emit(ops.squeeze(n.emit(ops.slice(past, (i,), (1,), axes=(0,))), axes=(0,))) for i in (0, 1)]
        k, v = concat_past(n, caches[0], k), concat_past(n, caches[1], v)
    masks = score_masks(n, q, k, mask, bias, low, causal=n.flag("unidirectional"), is_self=True)
    result = merge_heads(n, attend(n, q, k, v, scale=attention_scale(n, n.shape_of(q)[3]), masks=masks))
    if not n.wants(1):
        return result
    present = [n.emit(ops.expand_dims(x, axes=(0,))) for x in (k, v)]
    return result, ops.concat(*present, axis=0)


@onnx_op("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(n: Node) -> Result:
    """MultiHeadAttention; inputs: query, key, value, bias, key padding mask, attention bias, past key, past value.

    Key and value may be packed in one tensor (b, s, h, 2, d), or all three in one (b, s, h, 3, d). A key and value of
    rank 4, (b, h, s, d), are already split into heads.
    """
    heads, low, causal = n.int("num_heads"), n.float("mask_filter_value", -10000.0), n.flag("unidirectional")
    if any(n.optional(k) is not None for k in (8, 9)) or n.wants(3):
        n.fail("MultiHeadAttention with a shared cache or beams, or that gives its scores, is not supported")
    if (n.optional(6) is None) != (n.optional(7) is None):
        n.fail("inputs 6 and 7, past key and past value, must be given together")
    q, k, v = (x if len(n.shape_of(x)) == 4 else split_heads(n, x, heads) for x in _biased_inputs(n, causal=causal))
    if n.optional(6) is not None:
        sizes = {0: n.shape_of(q)[0], 1: sym(heads)}
        k, v = (concat_past(n, input_with_sizes(n, i, sizes), x) for i, x in ((6, k), (7, v)))
    masks = score_masks(n, q, k, n.optional(4), n.optional(5), low, causal=causal, is_self=False)
    result = merge_heads(n, attend(n, q, k, v, scale=attention_scale(n, n.shape_of(q)[3]), masks=masks))
    return result, k, v


def _biased_inputs(n: Node, *, causal: bool) -> list[Expr]:
    """Return q, k and v with their biases added, each (b, s, h * d) or (b, h, s, d)."""
    q, key = n.input(0), n.optional(1)
    if n.optional(2) is None:
        if n.optional(3) is not None:
            n.fail("MultiHeadAttention of q, k and v in one tensor, or of k and v, with a bias is not supported")
        return _split_packed(n, q, 3) if key is None else [q, *_split_packed(n, key, 2)]
    rank, (batch, queries, _) = n.rank(1), n.shape()
    if rank == 4 and n.optional(6) is not None:
        n.fail("MultiHeadAttention takes either a key and value of rank 4 or a past, not both")
    axis = 2 if rank == 4 else 1
    # onnxruntime's kernels disagree on the causal mask if the numbers of queries and keys differ
    k = input_with_sizes(n, 1, {0: batch, axis: queries} if causal else {0: batch})
    v = input_with_sizes(n, 2, {0: batch, axis: n.shape_of(k)[axis]})
    if n.optional(3) is None:
        return [q, k, v]
    return _add_biases(n, [q, k, v])


def _split_packed(n: Node, x: Expr, count: int) -> list[Expr]:
    """Split a packed tensor (b, s, h, count, d) into `count` tensors (b, h, s, d)."""
    shape = n.shape_of(x)
    if len(shape) != 5 or shape[3] != sym(count):
        n.fail(
            f"{'q, k and v' if count == 3 else 'k and v'} in one tensor must be of (b, s, h, {count}, d), got {shape}"
        )
    parts = [n.emit(ops.squeeze(n.emit(ops.slice(x, (i,), (1,), axes=(3,))), axes=(3,))) for i in range(count)]
    return [n.emit(ops.transpose(part, axes=(0, 2, 1, 3))) for part in parts]


def _add_biases(n: Node, tensors: list[Expr]) -> list[Expr]:
    """Add a concatenated bias vector to q, k and v; a key and value of rank 4, (b, h, s, d), get no bias."""
    shapes = [n.shape_of(x) for x in tensors]
    widths = [shape[2] if len(shape) == 3 else shape[1] * shape[3] for shape in shapes]
    bias = input_with_sizes(n, 3, {0: sum(widths, sym(0))})
    begin = sym(0)
    for i, width in enumerate(widths):
        if len(shapes[i]) == 3:
            part = n.emit(ops.slice(bias, (begin,), (width,), axes=(0,)))
            tensors[i] = n.emit(ops.add(tensors[i], part))
        begin = begin + width
    return tensors


@onnx_op("RotaryEmbedding", domain=MICROSOFT)
def rotary_embedding(n: Node) -> Result:
    """RotaryEmbedding; inputs: x (b, s, h * d) or (b, h, s, d), position ids (1,) or (b, s), tables of cos and sin."""
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
    batch, _, length, _ = n.shape_of(x)
    if n.rank(1) == 2:
        position_ids = input_with_sizes(n, 1, {0: batch, 1: length})
    else:  # the position of the first row
        first = input_with_sizes(n, 1, {0: sym(1)} if n.rank(1) else {})
        position_ids = n.emit(ops.expand_dims(n.emit(ops.add(first, positions(n, length))), axes=(0,)))
    half = sym(width // 2) if width else n.shape(2)[1]
    cos, sin = (input_with_sizes(n, i, {1: half}) for i in (2, 3))
    rotated_heads = apply_rotary(n, x, position_ids, cos, sin, interleaved, width)
    return merge_heads(n, rotated_heads) if flat else rotated_heads
