"""Fused attention of onnxruntime (com.microsoft): Attention, MultiHeadAttention, GroupQueryAttention, RotaryEmbedding.

Attention of the standard domain is expanded by the body that ONNX gives for it, once its sizes are seen to fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from relaxlite.frontend.onnx.convert_contrib import MICROSOFT
from relaxlite.frontend.onnx.convert_quantization import zero_points
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.frontend.onnx.unify import unify_dims
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import SymExpr, sym

Shape = tuple[SymExpr, ...]


# (b, s, h * d) <-> (b, h, s, d)


def _heads(n: Node, x: Expr, heads: int) -> Expr:
    batch, length, width = n.shape_of(x)
    split = n.emit(ops.reshape(x, (batch, length, heads, width // heads)))
    return n.emit(ops.transpose(split, axes=(0, 2, 1, 3)))


def _merged(n: Node, x: Expr) -> Expr:
    batch, heads, length, width = n.shape_of(x)
    return n.emit(ops.reshape(n.emit(ops.transpose(x, axes=(0, 2, 1, 3))), (batch, length, heads * width)))


def _number(n: Node, x: Expr, value: float) -> Constant:
    return Constant.of(value, n.type_of(x).dtype)


def _attend(
    n: Node, q: Expr, k: Expr, v: Expr, *, scale: float, masks: Sequence[Expr], softcap: float = 0.0,
    sink: Expr | None = None,
) -> Expr:  # fmt: skip
    """softmax(q @ k.T * scale + masks) @ v, for q, k, v of (b, h, s, d). `sink` (1 or h,): the score of one more key,
    whose value is zero."""
    scores = n.emit(ops.matmul(q, n.emit(ops.transpose(k, axes=(0, 1, 3, 2)))))
    scores = n.emit(ops.multiply(scores, _number(n, q, scale)))
    if softcap:
        inner = n.emit(ops.tanh(n.emit(ops.divide(scores, _number(n, q, softcap)))))
        scores = n.emit(ops.multiply(inner, _number(n, q, softcap)))
    for mask in masks:
        scores = n.emit(ops.add(scores, mask))
    if sink is None:
        return n.emit(ops.matmul(n.emit(ops.softmax(scores, axis=-1)), v))
    *outer, keys = n.shape_of(scores)
    column = n.emit(ops.broadcast_to(n.emit(ops.reshape(sink, (*n.shape_of(sink), 1, 1))), (*outer, sym(1))))
    shares = n.emit(ops.softmax(n.emit(ops.concat(scores, column, axis=3)), axis=-1))
    return n.emit(ops.matmul(n.emit(ops.slice(shares, (0,), (keys,), axes=(3,))), v))


def _joined(n: Node, past: Expr | None, x: Expr) -> Expr:
    """The cache followed by what is new, along time."""
    return x if past is None else n.emit(ops.concat(past, x, axis=2))


def _positions(n: Node, count: SymExpr, first: SymExpr | int = 0) -> Expr:
    start = n.emit(ops.reshape(n.emit(ops.shape_to_tensor((first,))), ()))
    return n.emit(ops.arange(start, Constant.of(1, "int64"), (count,)))


def _where_allowed(n: Node, allowed: Expr, dtype: str, low: float) -> Expr:
    """0 where allowed, a large negative number elsewhere."""
    return n.emit(ops.where(allowed, Constant.of(0, dtype), Constant.of(low, dtype)))


def _causal(n: Node, q: Expr, k: Expr, low: float, window: int = -1) -> Expr:
    """Query i, which stands at past + i, sees the keys up to there (and only the last `window` of them)."""
    queries, keys = n.shape_of(q)[2], n.shape_of(k)[2]
    row = n.emit(ops.reshape(_positions(n, queries, keys - queries), (queries, 1)))
    column = n.emit(ops.reshape(_positions(n, keys), (1, keys)))
    allowed = n.emit(ops.less_equal(column, row))
    if window > 0:
        recent = n.emit(ops.less(n.emit(ops.subtract(row, column)), Constant.of(window, "int64")))
        allowed = n.emit(ops.logical_and(allowed, recent))
    return _where_allowed(n, allowed, n.type_of(q).dtype, low)


def _padding_mask(n: Node, mask: Expr, keys: SymExpr, dtype: str, low: float) -> Expr:
    """A mask given as lengths (b,), as flags (b, keys), or as flags (b, queries, keys): 1 for what is seen."""
    shape = n.shape_of(mask)
    if len(shape) == 1:
        column = n.emit(ops.cast(_positions(n, keys), dtype=n.type_of(mask).dtype))
        allowed = n.emit(ops.less(column, n.emit(ops.reshape(mask, (shape[0], 1, 1, 1)))))
        return _where_allowed(n, allowed, dtype, low)
    if len(shape) not in (2, 3):
        n.fail(f"a mask of rank {len(shape)} is not supported")
    flags = n.emit(ops.not_equal(mask, Constant.of(0, n.type_of(mask).dtype)))
    wide = (shape[0], sym(1), sym(1), shape[1]) if len(shape) == 2 else (shape[0], sym(1), *shape[1:])
    return _where_allowed(n, n.emit(ops.reshape(flags, wide)), dtype, low)


def _scale(n: Node, width: SymExpr) -> float:
    given = n.float("scale", 0.0)
    if given:
        return given
    if not width.is_const:
        n.fail("the size of a head must be known")
    return 1 / math.sqrt(width.const)


@onnx_op("Attention", since=23)
def standard_attention(n: Node) -> Result:
    """Inputs: q, k and v, (b, h, s, d) or (b, s, h * d). The body would broadcast batches, and the heads of v."""
    batch, is_split = n.shape()[0], n.rank(1) == 4
    n.inputs[1] = _of_sizes(n, 1, {0: batch})
    n.inputs[2] = _of_sizes(n, 2, {0: batch, 1: n.shape(1)[1]} if is_split else {0: batch})
    return n.importer.expand(n)


def _of_sizes(n: Node, index: int, sizes: Mapping[int, SymExpr]) -> Expr:
    """An input that must have these sizes (axis -> size)."""
    for axis, size in sizes.items():
        if PROVER.can_prove_ne(n.shape(index)[axis], size):
            n.fail(f"axis {axis} of input {index} has size {n.shape(index)[axis]}, but must have {size}")
    return unify_dims(n.bb, n.input(index), sizes)


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
        parts.append(_heads(n, n.emit(ops.slice(projected, (begin,), (width,), axes=(2,))), heads))
        begin = begin + width
    q, k, v = parts
    if past is not None:
        held = [n.emit(ops.squeeze(n.emit(ops.slice(past, (i,), (1,), axes=(0,))), axes=(0,))) for i in (0, 1)]
        k, v = _joined(n, held[0], k), _joined(n, held[1], v)
    masks = _masks(n, q, k, mask, bias, low, causal=n.flag("unidirectional"))
    result = _merged(n, _attend(n, q, k, v, scale=_scale(n, n.shape_of(q)[3]), masks=masks))
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
    q, k, v = (x if len(n.shape_of(x)) == 4 else _heads(n, x, heads) for x in tensors)
    k, v = _joined(n, n.optional(6), k), _joined(n, n.optional(7), v)
    masks = _masks(n, q, k, n.optional(4), n.optional(5), low, causal=n.flag("unidirectional"))
    result = _merged(n, _attend(n, q, k, v, scale=_scale(n, n.shape_of(q)[3]), masks=masks))
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


@onnx_op("GroupQueryAttention", domain=MICROSOFT)
def group_query_attention(n: Node) -> Result:
    """Inputs: query (or q, k, v side by side), key, value, past key, past value, lengths - 1, total length, cos, sin,
    positions (b, s), a bias of the scores, sinks (h,): scores of a key whose value is zero.

    The caches hold exactly the past: present = past + new. Keys beyond the length of a sequence are masked.
    """
    heads, groups = n.int("num_heads"), n.int("kv_num_heads")
    window, softcap = n.int("local_window_size", -1), n.float("softcap", 0.0)
    interleaved, rotary = n.flag("rotary_interleaved"), n.flag("do_rotary")
    if any(n.optional(k) is not None for k in (12, 13)) or n.wants(3):
        n.fail("GroupQueryAttention with a quantized cache, or that gives its scores, is not supported")
    q, k, v = _grouped_inputs(n, heads, groups)
    past = n.optional(3)
    begin = sym(0) if past is None else n.shape_of(past)[2]
    if rotary:
        places = n.optional(9)
        if places is None:
            places = n.emit(ops.expand_dims(_positions(n, n.shape_of(q)[2], begin), axes=(0,)))
        q, k = (_rotated(n, x, places, n.input(7), n.input(8), interleaved) for x in (q, k))
    k, v = _joined(n, past, k), _joined(n, n.optional(4), v)
    low = -1e4 if n.type_of(q).dtype == "float16" else -1e9
    lengths = n.emit(ops.add(n.input(5), Constant.of(1, n.dtype(5))))
    flat = n.emit(ops.reshape(lengths, (n.shape_of(q)[0],)))
    masks = [_padding_mask(n, flat, n.shape_of(k)[2], n.type_of(q).dtype, low), _causal(n, q, k, low, window)]
    masks += [] if n.optional(10) is None else [n.input(10)]
    sink = n.optional(11)
    if sink is None and n.flag("smooth_softmax"):
        sink = Constant.of([0.0], n.type_of(q).dtype)
    repeated = [_repeated(n, x, heads // groups) for x in (k, v)]
    scale = _scale(n, n.shape_of(q)[3])
    result = _attend(n, q, repeated[0], repeated[1], scale=scale, masks=masks, softcap=softcap, sink=sink)
    return _merged(n, result), k, v


def _grouped_inputs(n: Node, heads: int, groups: int) -> tuple[Expr, Expr, Expr]:
    if n.optional(1) is not None and n.optional(2) is not None:
        return _heads(n, n.input(0), heads), _heads(n, n.input(1), groups), _heads(n, n.input(2), groups)
    width = n.shape()[2] // (heads + 2 * groups)
    sizes = (width * heads, width * groups, width * groups)
    begins = (sym(0), sizes[0], sizes[0] + sizes[1])
    parts = [
        n.emit(ops.slice(n.input(0), (begin,), (size,), axes=(2,))) for begin, size in zip(begins, sizes, strict=True)
    ]
    return _heads(n, parts[0], heads), _heads(n, parts[1], groups), _heads(n, parts[2], groups)


def _repeated(n: Node, x: Expr, times: int) -> Expr:
    """Each head of (b, h, s, d) `times` times in a row."""
    if times == 1:
        return x
    batch, heads, length, width = n.shape_of(x)
    wide = n.emit(ops.broadcast_to(n.emit(ops.expand_dims(x, axes=(2,))), (batch, heads, times, length, width)))
    return n.emit(ops.reshape(wide, (batch, heads * times, length, width)))


def _rotated(n: Node, x: Expr, places: Expr, cos: Expr, sin: Expr, interleaved: bool, width: int = 0) -> Expr:
    """Rotary embedding of x (b, h, s, d) at places (b or 1, s), by tables of (positions, d / 2)."""
    size = n.shape_of(x)[3]
    half = n.shape_of(cos)[1]
    turned = half * 2 if not width else sym(width)
    rest = None
    if (turned is not size and not (turned - size).is_const) or (turned - size).const != 0:
        rest = n.emit(ops.slice(x, (turned,), (size - turned,), axes=(3,)))
        x = n.emit(ops.slice(x, (0,), (turned,), axes=(3,)))
    tables = [n.emit(ops.expand_dims(n.emit(ops.gather(t, places, axis=0)), axes=(1,))) for t in (cos, sin)]
    if interleaved:
        starts, steps = (sym(0), sym(1)), (2,)
    else:
        starts, steps = (sym(0), half), (1,)
    a, b = (n.emit(ops.slice(x, (start,), (half,), axes=(3,), steps=steps)) for start in starts)
    real = n.emit(ops.subtract(n.emit(ops.multiply(a, tables[0])), n.emit(ops.multiply(b, tables[1]))))
    imaginary = n.emit(ops.add(n.emit(ops.multiply(a, tables[1])), n.emit(ops.multiply(b, tables[0]))))
    if interleaved:
        pairs = [n.emit(ops.expand_dims(v, axes=(4,))) for v in (real, imaginary)]
        made = n.emit(ops.reshape(n.emit(ops.concat(*pairs, axis=4)), (*n.shape_of(x)[:3], turned)))
    else:
        made = n.emit(ops.concat(real, imaginary, axis=3))
    return made if rest is None else n.emit(ops.concat(made, rest, axis=3))


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
        x = _heads(n, x, heads)
    places = n.input(1)
    if n.rank(1) == 1:
        offsets = _positions(n, n.shape_of(x)[2])
        places = n.emit(ops.expand_dims(n.emit(ops.add(places, offsets)), axes=(0,)))
    made = _rotated(n, x, places, n.input(2), n.input(3), interleaved, width)
    return _merged(n, made) if flat else made
