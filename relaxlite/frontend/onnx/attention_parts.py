"""Building blocks of onnxruntime's fused attention ops: heads, scores, KV cache, positions, rotary embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from relaxlite.frontend.common.unify import unify_dims
from relaxlite.frontend.onnx.node import Node
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import SymExpr, sym


def split_heads(n: Node, x: Expr, heads: int) -> Expr:
    """Reshape (b, s, h * d) to (b, h, s, d)."""
    batch, length, width = n.shape_of(x)
    split = n.emit(ops.reshape(x, (batch, length, heads, width // heads)))
    return n.emit(ops.transpose(split, axes=(0, 2, 1, 3)))


def merge_heads(n: Node, x: Expr) -> Expr:
    """Reshape (b, h, s, d) to (b, s, h * d)."""
    batch, heads, length, width = n.shape_of(x)
    return n.emit(ops.reshape(n.emit(ops.transpose(x, axes=(0, 2, 1, 3))), (batch, length, heads * width)))


def scalar_like(n: Node, x: Expr, value: float) -> Constant:
    """Return a scalar constant of the dtype of x."""
    return Constant.of(value, n.type_of(x).dtype)


def attend(
    n: Node, q: Expr, k: Expr, v: Expr, *, scale: float, masks: Sequence[Expr], visible: Expr | None = None,
    softcap: float = 0.0, sink: Expr | None = None,
) -> Expr:  # fmt: skip
    """Emit softmax(q @ k.T * scale + masks) @ v, for q, k, v of (b, h, s, d).

    visible: bool mask of keys, broadcast to the scores (b, h, s, keys). softcap: limit of scores, by tanh; 0: none.
    sink (1 or h,): the score of one more key, whose value is zero.
    """
    scores = n.emit(ops.matmul(q, n.emit(ops.transpose(k, axes=(0, 1, 3, 2)))))
    scores = n.emit(ops.multiply(scores, scalar_like(n, q, scale)))
    if softcap:
        inner = n.emit(ops.tanh(n.emit(ops.divide(scores, scalar_like(n, q, softcap)))))
        scores = n.emit(ops.multiply(inner, scalar_like(n, q, softcap)))
    if visible is not None:
        masked_score = -1e4 if n.type_of(q).dtype == "float16" else -1e9
        scores = n.emit(ops.where(visible, scores, scalar_like(n, q, masked_score)))
    for mask in masks:
        scores = n.emit(ops.add(scores, mask))
    if sink is None:
        return n.emit(ops.matmul(n.emit(ops.softmax(scores, axis=-1)), v))
    *batch_dims, keys = n.shape_of(scores)
    sink_column = n.emit(ops.broadcast_to(n.emit(ops.reshape(sink, (*n.shape_of(sink), 1, 1))), (*batch_dims, sym(1))))
    probabilities = n.emit(ops.softmax(n.emit(ops.concat(scores, sink_column, axis=3)), axis=-1))
    return n.emit(ops.matmul(n.emit(ops.slice(probabilities, (0,), (keys,), axes=(3,))), v))


def concat_past(n: Node, past: Expr | None, x: Expr) -> Expr:
    """Concatenate a KV cache, or None, and new rows (b, h, s, d) along the sequence axis."""
    return x if past is None else n.emit(ops.concat(past, x, axis=2))


def positions(n: Node, count: SymExpr, first: SymExpr | int = 0) -> Expr:
    """Emit the int64 vector first, first + 1, ..., of `count` elements."""
    start = n.emit(ops.reshape(n.emit(ops.shape_to_tensor((first,))), ()))
    return n.emit(ops.arange(start, Constant.of(1, "int64"), (count,)))


def additive_mask(n: Node, allowed: Expr, dtype: str, low: float) -> Expr:
    """Emit an additive mask: 0 where `allowed`, `low`, a large negative number, elsewhere."""
    return n.emit(ops.where(allowed, Constant.of(0, dtype), Constant.of(low, dtype)))


def attention_scale(n: Node, width: SymExpr) -> float:
    """Return the attribute `scale`, by default 1 / sqrt(width of a head).

    Raises ImportModelError if the default is needed and the width is symbolic.
    """
    scale = n.float("scale", 0.0)
    if scale:
        return scale
    if not width.is_const:
        n.fail("the size of a head must be known")
    return 1 / math.sqrt(width.const)


def input_with_sizes(n: Node, index: int, sizes: Mapping[int, SymExpr]) -> Expr:
    """Return an input of the node with checked sizes (axis -> size), see `with_sizes`."""
    return with_sizes(n, n.input(index), sizes, f"input {index}")


def with_sizes(n: Node, x: Expr, sizes: Mapping[int, SymExpr], what: str) -> Expr:
    """Return x with these sizes (axis -> size), checked at compile time or run time; errors call x `what`."""
    shape = n.shape_of(x)
    for axis, size in sizes.items():
        if PROVER.can_prove_ne(shape[axis], size):
            n.fail(f"axis {axis} of {what} has size {shape[axis]}, but must have {size}")
    return unify_dims(n.bb, x, sizes)


def repeat_heads(n: Node, x: Expr, times: int) -> Expr:
    """Repeat each head of (b, h, s, d) `times` times: (b, h * times, s, d), as of grouped-query attention."""
    if times == 1:
        return x
    batch, heads, length, width = n.shape_of(x)
    wide = n.emit(ops.broadcast_to(n.emit(ops.expand_dims(x, axes=(2,))), (batch, heads, times, length, width)))
    return n.emit(ops.reshape(wide, (batch, heads * times, length, width)))


def apply_rotary(n: Node, x: Expr, places: Expr, cos: Expr, sin: Expr, interleaved: bool, width: int = 0) -> Expr:
    """Apply a rotary embedding to x (b, h, s, d) at positions `places` (b or 1, s).

    cos, sin: tables (positions, d / 2). interleaved: pairs are adjacent elements, not elements of the two halves.
    width: number of leading elements of a head that are rotated; 0: twice the width of the tables.
    """
    size = n.shape_of(x)[3]
    half = n.shape_of(cos)[1]
    rotated_width = half * 2 if not width else sym(width)
    tail = None
    if (rotated_width is not size and not (rotated_width - size).is_const) or (rotated_width - size).const != 0:
        tail = n.emit(ops.slice(x, (rotated_width,), (size - rotated_width,), axes=(3,)))
        x = n.emit(ops.slice(x, (0,), (rotated_width,), axes=(3,)))
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
        result = n.emit(ops.reshape(n.emit(ops.concat(*pairs, axis=4)), (*n.shape_of(x)[:3], rotated_width)))
    else:
        result = n.emit(ops.concat(real, imaginary, axis=3))
    return result if tail is None else n.emit(ops.concat(result, tail, axis=3))
