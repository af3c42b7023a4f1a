"""Converters of embedding bags, the sums, means and maxima of the embeddings of each bag, and of segments."""

from __future__ import annotations

from typing import Any

from relaxlite.frontend.torch.convert_indexing import flat, positions_along
from relaxlite.frontend.torch.node import Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.ops.scalars import HALF, identity
from relaxlite.ir.symbolic import SymExpr, product

_SUM, _MEAN, _MAX = range(3)


@torch_op("aten.embedding_bag", "aten._embedding_bag", "aten._embedding_bag_forward_only")
def embedding_bag(
    n: Node, weight: Expr, indices: Expr, offsets: Expr, scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, per_sample_weights: Expr | None = None, include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Expr | None, ...]:  # fmt: skip
    """Embedding bag; bag k has the indices from offsets[k] to before offsets[k + 1], except the padding."""
    if any(n.wants(k) for k in (1, 2, 3)):
        n.fail("results of embedding_bag other than the first, which serve gradients, are not supported")
    bags = n.shape_of(offsets)[0] - int(include_last_offset)
    bag = _bag_of_each(n, indices, offsets)
    padding = _padding(n, weight, padding_idx)
    if padding is not None:  # padding goes to a row of its own
        is_padding = n.emit(ops.equal(n.cast(indices, "int64"), padding))
        bag = n.emit(ops.where(is_padding, n.operand(bags, "int64"), bag))
    dtype = "float32" if n.dtype() in HALF else n.dtype()
    rows = n.cast(n.emit(ops.gather(weight, indices)), dtype)
    if per_sample_weights is not None:
        rows = n.emit(ops.multiply(rows, n.emit(ops.expand_dims(n.cast(per_sample_weights, dtype), axes=(1,)))))
    out = _combined(n, rows, bag, bags, mode, dtype)
    return n.cast(out, n.dtype()), None, None, None


def _bag_of_each(n: Node, indices: Expr, offsets: Expr) -> Expr:
    places = positions_along(n, n.shape_of(indices)[0])
    after = n.emit(ops.search_sorted(n.cast(offsets, "int64"), places, right=True))
    return n.emit(ops.subtract(after, Constant.of(1, "int64")))


def _padding(n: Node, weight: Expr, padding_idx: int | None) -> Expr | None:
    """Return the index that is left out: of the public operator a negative one counts from the end."""
    if padding_idx is None or (padding_idx < 0 and not n.target.startswith("aten.embedding_bag")):
        return None
    count = n.shape_of(weight)[0]
    return n.operand(count + padding_idx if padding_idx < 0 else padding_idx, "int64")


def _combined(n: Node, rows: Expr, bag: Expr, bags: SymExpr, mode: int, dtype: str) -> Expr:
    length, width = n.shape_of(rows)
    at = n.emit(ops.expand_dims(bag, axes=(1,)))

    def scattered(start: Any, updates: Expr, columns: Any, reduction: str) -> Expr:
        total = n.full((bags + 1, columns), start, dtype)
        summed = n.emit(ops.scatter_nd(total, at, updates, reduction=reduction))
        return n.emit(ops.slice(summed, (0,), (bags,), axes=(0,)))

    if mode == _SUM:
        return scattered(0, rows, width, "add")
    count = scattered(0, n.full((length, 1), 1, dtype), 1, "add")
    if mode == _MEAN:
        return n.emit(ops.divide(scattered(0, rows, width, "add"), n.emit(ops.maximum(count, n.operand(1, dtype)))))
    if mode != _MAX:
        n.fail(f"mode {mode} of an embedding bag is not known")
    greatest = scattered(identity("max", dtype).value, rows, width, "max")
    is_filled = n.emit(ops.greater(count, n.operand(0, dtype)))
    return n.emit(ops.where(is_filled, greatest, n.operand(0, dtype)))


@torch_op("aten.embedding_renorm")
def embedding_renorm(n: Node, self: Expr, indices: Expr, max_norm: float, norm_type: float) -> Expr:
    """Scale the rows at the indices to a norm of at most max_norm."""
    dtype, (rows, _) = n.dtype(), n.shape_of(self)
    at = flat(n, indices)
    ones = n.full(n.shape_of(at), 1, "int32")
    used = n.emit(ops.scatter_elements(n.full((rows,), 0, "int32"), at, ones, axis=0))
    norm, limit = _row_norms(n, self, float(norm_type), dtype), n.operand(max_norm, dtype)
    is_used = n.cast(n.emit(ops.expand_dims(used, axes=(1,))), "bool")
    is_scaled = n.emit(ops.logical_and(is_used, n.emit(ops.greater(norm, limit))))
    scale = n.emit(ops.divide(limit, n.emit(ops.add(norm, n.operand(1e-7, dtype)))))
    return n.emit(ops.where(is_scaled, n.emit(ops.multiply(self, scale)), self))


def _row_norms(n: Node, x: Expr, p: float, dtype: str) -> Expr:
    if p == 2:
        return n.emit(ops.l2_norm(x, axes=(1,), keepdims=True))
    size = n.emit(ops.abs(x))
    if p == float("inf"):
        return n.emit(ops.max(size, axes=(1,), keepdims=True))
    total = n.emit(ops.sum(n.emit(ops.power(size, n.operand(p, dtype))), axes=(1,), keepdims=True))
    return n.emit(ops.power(total, n.operand(1 / p, dtype)))


@torch_op("aten.segment_reduce")
def segment_reduce(
    n: Node, data: Expr, reduce: str, lengths: Expr | None = None, offsets: Expr | None = None, axis: int = 0,
    unsafe: bool = False, initial: Any = None,
) -> Expr:  # fmt: skip
    """Reduce consecutive segments along an axis; lengths or offsets have the dimensions before it as well."""
    axis, dtype = n.axis(data, axis), n.dtype()
    dims = n.shape_of(data)
    outer, size, inner = product(dims[:axis]), dims[axis], product(dims[axis + 1 :])
    last: Expr
    sizes: Expr
    if lengths is None:
        bounds = n.cast(_matrix(n, offsets, axis), "int64")
        count = n.shape_of(bounds)[1] - 1
        last, first = (n.emit(ops.slice(bounds, (k,), (count,), axes=(1,))) for k in (1, 0))
        sizes = n.emit(ops.subtract(last, first))
    else:
        sizes = n.cast(_matrix(n, lengths, axis), "int64")
        last, count = n.emit(ops.cumsum(sizes, axis=1)), n.shape_of(sizes)[1]
    places = n.broadcast(positions_along(n, size), (n.shape_of(last)[0], size))
    segment = n.emit(ops.expand_dims(n.emit(ops.search_sorted(last, places, right=True)), axes=(2,)))
    x = n.reshape(data, (n.shape_of(last)[0], size, inner))
    reduction = {"max": "max", "min": "min", "prod": "mul"}.get(reduce, "add")
    start = identity(reduction, dtype).value if initial is None else initial
    table = n.full((outer, count + 1, inner), start, dtype)  # the last row takes what no segment has
    at = n.broadcast(segment, n.shape_of(x))
    total = n.emit(ops.scatter_elements(table, at, x, axis=1, reduction=reduction))
    total = n.emit(ops.slice(total, (0,), (count,), axes=(1,)))
    if reduce != "mean":
        return n.reshape(total, n.shape())
    column = n.emit(ops.expand_dims(sizes, axes=(2,)))
    return n.reshape(_segment_means(n, total, column, dtype, is_started=initial is not None), n.shape())


def _matrix(n: Node, x: Expr | None, axis: int) -> Expr:
    if x is None:
        n.fail("segments need lengths or offsets")
    return n.reshape(x, (product(n.shape_of(x)[:axis]), n.shape_of(x)[axis]))


def _segment_means(n: Node, total: Expr, sizes: Expr, dtype: str, *, is_started: bool) -> Expr:
    """Divide by the sizes; an empty segment is NaN, or what it started from."""
    mean = n.emit(ops.divide(total, n.cast(sizes, dtype)))  # 0 / 0 where it is empty
    if not is_started:
        return mean
    return n.emit(ops.where(n.emit(ops.greater(sizes, Constant.of(0, "int64"))), mean, total))
