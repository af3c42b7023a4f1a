"""What the fused attentions of onnxruntime have in common: heads, scores, positions and rotary embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.unify import unify_dims
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import SymExpr, sym

# (b, s, h * d) <-> (b, h, s, d)


def split_heads(n: Node, x: Expr, heads: int) -> Expr:
    batch, length, width = n.shape_of(x)
    split = n.emit(ops.reshape(x, (batch, length, heads, width // heads)))
    return n.emit(ops.transpose(split, axes=(0, 2, 1, 3)))


def merge_heads(n: Node, x: Expr) -> Expr:
    batch, heads, length, width = n.shape_of(x)
    return n.emit(ops.reshape(n.emit(ops.transpose(x, axes=(0, 2, 1, 3))), (batch, length, heads * width)))


def number(n: Node, x: Expr, value: float) -> Constant:
    return Constant.of(value, n.type_of(x).dtype)


def attend(
    n: Node, q: Expr, k: Expr, v: Expr, *, scale: float, masks: Sequence[Expr], seen: Expr | None = None,
    softcap: float = 0.0, sink: Expr | None = None,
) -> Expr:  # fmt: skip
    """softmax(q @ k.T * scale + masks) @ v, for q, k, v of (b, h, s, d). `seen`: flags of the keys that count; `sink`
    (1 or h,): the score of one more key, whose value is zero."""
    scores = n.emit(ops.matmul(q, n.emit(ops.transpose(k, axes=(0, 1, 3, 2)))))
    scores = n.emit(ops.multiply(scores, number(n, q, scale)))
    if softcap:
        inner = n.emit(ops.tanh(n.emit(ops.divide(scores, number(n, q, softcap)))))
        scores = n.emit(ops.multiply(inner, number(n, q, softcap)))
    if seen is not None:
        low = -1e4 if n.type_of(q).dtype == "float16" else -1e9
        scores = n.emit(ops.where(seen, scores, number(n, q, low)))
    for mask in masks:
        scores = n.emit(ops.add(scores, mask))
    if sink is None:
        return n.emit(ops.matmul(n.emit(ops.softmax(scores, axis=-1)), v))
    *outer, keys = n.shape_of(scores)
    column = n.emit(ops.broadcast_to(n.emit(ops.reshape(sink, (*n.shape_of(sink), 1, 1))), (*outer, sym(1))))
    shares = n.emit(ops.softmax(n.emit(ops.concat(scores, column, axis=3)), axis=-1))
    return n.emit(ops.matmul(n.emit(ops.slice(shares, (0,), (keys,), axes=(3,))), v))


def joined(n: Node, past: Expr | None, x: Expr) -> Expr:
    """The cache followed by what is new, along time."""
    return x if past is None else n.emit(ops.concat(past, x, axis=2))


def positions(n: Node, count: SymExpr, first: SymExpr | int = 0) -> Expr:
    start = n.emit(ops.reshape(n.emit(ops.shape_to_tensor((first,))), ()))
    return n.emit(ops.arange(start, Constant.of(1, "int64"), (count,)))


def where_allowed(n: Node, allowed: Expr, dtype: str, low: float) -> Expr:
    """0 where allowed, a large negative number elsewhere."""
    return n.emit(ops.where(allowed, Constant.of(0, dtype), Constant.of(low, dtype)))


def score_scale(n: Node, width: SymExpr) -> float:
    given = n.float("scale", 0.0)
    if given:
        return given
    if not width.is_const:
        n.fail("the size of a head must be known")
    return 1 / math.sqrt(width.const)


def of_sizes(n: Node, index: int, sizes: Mapping[int, SymExpr]) -> Expr:
    """An input that must have these sizes (axis -> size)."""
    return sized(n, n.input(index), sizes, f"input {index}")


def sized(n: Node, x: Expr, sizes: Mapping[int, SymExpr], what: str) -> Expr:
    """x, which errors call `what`, and which must have these sizes (axis -> size)."""
    shape = n.shape_of(x)
    for axis, size in sizes.items():
        if PROVER.can_prove_ne(shape[axis], size):
            n.fail(f"axis {axis} of {what} has size {shape[axis]}, but must have {size}")
    return unify_dims(n.bb, x, sizes)


def repeated(n: Node, x: Expr, times: int) -> Expr:
    """Each head of (b, h, s, d) `times` times in a row."""
    if times == 1:
        return x
    batch, heads, length, width = n.shape_of(x)
    wide = n.emit(ops.broadcast_to(n.emit(ops.expand_dims(x, axes=(2,))), (batch, heads, times, length, width)))
    return n.emit(ops.reshape(wide, (batch, heads * times, length, width)))


def rotated(n: Node, x: Expr, places: Expr, cos: Expr, sin: Expr, interleaved: bool, width: int = 0) -> Expr:
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
        result = n.emit(ops.reshape(n.emit(ops.concat(*pairs, axis=4)), (*n.shape_of(x)[:3], turned)))
    else:
        result = n.emit(ops.concat(real, imaginary, axis=3))
    return result if rest is None else n.emit(ops.concat(result, rest, axis=3))
