"""Converters of operators that write at indices: index_put, scatter, index_add, select_scatter and their kin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relaxlite import dtypes
from relaxlite.frontend.common.unify import unify_dims
from relaxlite.frontend.torch.complex_parts import over_parts
from relaxlite.frontend.torch.convert_indexing import (
    MASKS,
    as_vector,
    flat,
    permuted,
    positions_along,
    resolve_indices,
    stacked,
)
from relaxlite.frontend.torch.node import Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.ops.scalars import identity
from relaxlite.ir.symbolic import as_int, sym

# Names of reductions in torch -> in scatter_elements.
_REDUCTIONS = {
    "add": "add", "sum": "add", "mean": "add", "multiply": "mul", "prod": "mul", "amax": "max", "amin": "min",
}  # fmt: skip
_OF_BOOLS = {"add": "max", "mul": "min", "max": "max", "min": "min", "none": "none"}


@torch_op("aten.index_put", "aten._unsafe_index_put", "aten._index_put_impl", complex=True)
@over_parts
def index_put(
    n: Node, self: Expr, indices: list[Expr | None], values: Expr, accumulate: bool = False, unsafe: bool = False
) -> Expr:
    values = n.cast(values, n.dtype())
    if not accumulate:
        filled = _filled(n, self, indices, values)
        if filled is not None:
            return filled
    where = resolve_indices(n, self, indices)
    dims = n.shape_of(self)
    width, place, others = len(where.shape), where.place, where.others
    values = n.broadcast(_without_leading_ones(n, values, width + len(others)), where.result_shape(dims))
    order = (*range(place, place + width), *range(place), *range(place + width, width + len(others)))
    updates = permuted(n, values, order)  # (indices..., others...)
    axes = (*where.axes, *others)
    x, places = permuted(n, self, axes), stacked(n, where.tensors)
    written = _scatter(n, x, updates, "add" if accumulate else "none", lambda *xs, **a: ops.scatter_nd(
        xs[0], places, xs[1], **a
    ))  # fmt: skip
    return permuted(n, written, [axes.index(k) for k in range(len(axes))])


def _without_leading_ones(n: Node, x: Expr, rank: int) -> Expr:
    extra = n.rank(x) - rank
    return n.reshape(x, n.shape_of(x)[extra:]) if extra > 0 else x


def _filled(n: Node, x: Expr, indices: Sequence[Expr | None], values: Expr) -> Expr | None:
    """Fill x where a mask over its first dimensions is true, if values do not depend on the mask's elements."""
    if len(indices) != 1 or indices[0] is None or n.dtype_of(indices[0]) not in MASKS:
        return None
    dims, rank = n.shape_of(x), n.rank(indices[0])
    sizes = n.shape_of(values)
    if any(as_int(d) != 1 for d in sizes[: max(len(sizes) - (len(dims) - rank), 0)]):
        return None
    values = _without_leading_ones(n, values, len(dims) - rank)
    mask = unify_dims(n.bb, n.cast(indices[0], "bool"), dict(enumerate(dims[:rank])))
    mask = n.reshape(mask, (*dims[:rank], *(1,) * (len(dims) - rank)))
    return n.emit(ops.where(mask, n.fit(values, dims), x))


def _scatter(n: Node, x: Expr, updates: Expr, reduction: str, scatter: Any) -> Expr:
    """Apply a scatter op to x and updates; sums of bools are computed as maxima of integers."""
    if n.dtype_of(x) != "bool" or reduction == "none":
        return n.emit(scatter(x, updates, reduction=reduction))
    numbers = (n.cast(v, "uint8") for v in (x, updates))
    return n.cast(n.emit(scatter(*numbers, reduction=_OF_BOOLS[reduction])), "bool")


def scatter_along(n: Node, x: Expr, axis: int, index: Expr, updates: Expr, reduction: str = "none") -> Expr:
    """Scatter elements of updates, of which those beyond the indices are left out."""
    sizes = n.shape_of(index)
    for k, (size, own) in enumerate(zip(sizes, n.shape_of(updates), strict=True)):
        if not n.proves_equal(size, own):
            updates = n.emit(ops.slice(updates, (0,), (size,), axes=(k,)))
    return _scatter(n, x, updates, reduction, lambda a, b, **attrs: ops.scatter_elements(
        a, index, b, axis=axis, **attrs
    ))  # fmt: skip


@torch_op("aten.scatter", "aten.scatter_add", complex=True)
@over_parts
def scatter(
    n: Node, self: Expr, dim: int, index: Expr, src: Expr | None = None, value: Any = None, reduce: str = "none"
) -> Expr:
    if any(as_int(d) == 0 for d in n.shape_of(index)):
        return self
    x, at = as_vector(n, self), as_vector(n, index)
    updates = n.full(n.shape_of(at), value, n.dtype()) if src is None else as_vector(n, src)
    reduction = "add" if n.target.startswith("aten.scatter_add") else _REDUCTIONS.get(reduce, "none")
    return n.reshape(scatter_along(n, x, n.axis(x, dim), at, updates, reduction), n.shape())


@torch_op("aten.scatter_reduce")
def scatter_reduce(
    n: Node, self: Expr, dim: int, index: Expr, src: Expr, reduce: str, include_self: bool = True
) -> Expr:
    if any(as_int(d) == 0 for d in n.shape_of(index)):
        return self
    x, at, updates = (as_vector(n, v) for v in (self, index, src))
    return n.reshape(_reduced(n, x, n.axis(x, dim), at, updates, reduce, include_self), n.shape())


def _reduced(n: Node, x: Expr, axis: int, index: Expr, updates: Expr, reduce: str, include_self: bool) -> Expr:
    """Reduce updates into x; without include_self, elements that get updates start from none."""
    reduction, dtype = _REDUCTIONS[reduce], n.dtype_of(x)
    start = x
    if not include_self:
        neutral = identity(reduction, dtype).value
        start = scatter_along(n, x, axis, index, n.full(n.shape_of(index), neutral, dtype))
    total = scatter_along(n, start, axis, index, updates, reduction)
    if reduce != "mean":
        return total
    ones = n.full(n.shape_of(index), 1, dtype)
    count = n.full(n.shape_of(x), 1 if include_self else 0, dtype)
    count = scatter_along(n, count, axis, index, ones, "add")
    if not include_self:
        count = n.emit(ops.maximum(count, n.operand(1, dtype)))
    return n.emit(ops.floor_divide(total, count) if dtypes.is_integer(dtype) else ops.divide(total, count))


@torch_op("aten.index_reduce")
def index_reduce(
    n: Node, self: Expr, dim: int, index: Expr, source: Expr, reduce: str, include_self: bool = True
) -> Expr:
    x, updates = as_vector(n, self), as_vector(n, source)
    axis = n.axis(x, dim)
    at, updates = _along_rows(n, x, axis, index, updates)
    return n.reshape(_reduced(n, x, axis, at, updates, reduce, include_self), n.shape())


def _along_rows(n: Node, x: Expr, axis: int, index: Expr, updates: Expr) -> tuple[Expr, Expr]:
    """Return a vector of indices broadcast to the updates, one for each slice, and the updates as they fit x."""
    vector = as_vector(n, index)
    dims = (*n.shape_of(x)[:axis], *n.shape_of(vector), *n.shape_of(x)[axis + 1 :])
    updates = n.broadcast(updates, dims)
    column = n.reshape(vector, tuple(d if k == axis else 1 for k, d in enumerate(dims)))
    return n.broadcast(column, dims), updates


@torch_op("aten.index_add", "aten.index_copy", complex=True)
@over_parts
def index_add(n: Node, self: Expr, dim: int, index: Expr, source: Expr, alpha: Any = 1) -> Expr:
    x, updates = as_vector(n, self), n.cast(as_vector(n, source), n.dtype())
    if alpha != 1:
        updates = n.emit(ops.multiply(updates, n.operand(alpha, n.dtype())))
    axis = n.axis(x, dim)
    at, updates = _along_rows(n, x, axis, index, updates)
    reduction = "add" if n.target.startswith("aten.index_add") else "none"
    return n.reshape(scatter_along(n, x, axis, at, updates, reduction), n.shape())


@torch_op("aten.index_fill", complex=True)
@over_parts
def index_fill(n: Node, self: Expr, dim: int, index: Expr, value: Any) -> Expr:
    x = as_vector(n, self)
    axis = n.axis(x, dim)
    at, updates = _along_rows(n, x, axis, index, n.reshape(n.operand(value, n.dtype()), (1,) * n.rank(x)))
    return n.reshape(scatter_along(n, x, axis, at, updates), n.shape())


@torch_op("aten.put", complex=True)
@over_parts
def put(n: Node, self: Expr, index: Expr, source: Expr, accumulate: bool = False) -> Expr:
    updates = n.reshape(source, n.shape_of(index))
    written = scatter_along(n, flat(n, self), 0, flat(n, index), flat(n, updates), "add" if accumulate else "none")
    return n.reshape(written, n.shape())


@torch_op("aten._unsafe_masked_index_put_accumulate", complex=True)
@over_parts
def unsafe_masked_index_put_accumulate(
    n: Node, self: Expr, mask: Expr, indices: list[Expr | None], values: Expr
) -> Expr:
    """Add values where a mask is true: indices need be in range only there."""
    dims = n.shape_of(self)
    if any(as_int(d) == 0 for d in dims):
        return self
    zero = n.operand(0, n.dtype())
    kept = n.emit(ops.where(n.fit(n.cast(mask, "bool"), n.shape_of(values)), values, zero))
    bounded: list[Expr | None] = []
    for k, at in enumerate(indices):
        last = n.operand(dims[k] - 1, "int64")
        low = at if at is None else n.emit(ops.maximum(n.cast(at, "int64"), Constant.of(0, "int64")))
        bounded.append(low if low is None else n.emit(ops.minimum(low, last)))
    return index_put.__wrapped__(n, self, bounded, kept, True)  # type: ignore[attr-defined]


@torch_op("aten.select_scatter", complex=True)
@over_parts
def select_scatter(n: Node, self: Expr, src: Expr, dim: int, index: Any) -> Expr:
    axis = n.axis(self, dim)
    begin = n.slice_begin(n.shape_of(self)[axis], index)
    return _with_slice(n, self, n.emit(ops.expand_dims(src, axes=(axis,))), axis, begin)


@torch_op("aten.slice_scatter", complex=True)
@over_parts
def slice_scatter(
    n: Node, self: Expr, src: Expr, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Expr:
    axis = n.axis(self, dim)
    begin = n.slice_begin(n.shape_of(self)[axis], 0 if start is None else start)
    src = n.fit_except(src, n.shape_of(self), axis)
    if step == 1:
        return _with_slice(n, self, src, axis, begin)
    count = n.shape_of(src)[axis]
    rows = n.reshape(positions_along(n, count, begin, int(step)), tuple(
        count if k == axis else sym(1) for k in range(n.rank(self))
    ))  # fmt: skip
    return n.emit(ops.scatter_elements(self, n.broadcast(rows, n.shape_of(src)), src, axis=axis))


def _with_slice(n: Node, x: Expr, src: Expr, axis: int, begin: Any) -> Expr:
    """Return x with the slice from begin on replaced by src."""
    size, count = n.shape_of(x)[axis], n.shape_of(src)[axis]
    if n.proves_equal(size, count):
        return src
    parts = [src]
    if as_int(begin) != 0:
        parts.insert(0, n.emit(ops.slice(x, (0,), (begin,), axes=(axis,))))
    rest = size - begin - count
    if as_int(rest) != 0:
        parts.append(n.emit(ops.slice(x, (begin + count,), (rest,), axes=(axis,))))
    return n.emit(ops.concat(*parts, axis=axis))


@torch_op("aten.diagonal_scatter", complex=True)
@over_parts
def diagonal_scatter(n: Node, self: Expr, src: Expr, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Expr:
    rank, dims = n.rank(self), n.shape_of(self)
    pair = (n.axis(self, dim1), n.axis(self, dim2))
    order = (*(k for k in range(rank) if k not in pair), *pair)
    outer, (rows, columns) = tuple(dims[k] for k in order[:-2]), (dims[k] for k in pair)
    x = n.reshape(permuted(n, self, order), (*outer, rows * columns))
    count = n.shape_of(src)[-1]
    begin = offset if offset >= 0 else -columns * offset
    at = positions_along(n, count, begin, columns + 1)
    src = n.broadcast(src, (*outer, count))
    written = n.emit(ops.scatter_elements(x, n.broadcast(at, (*outer, count)), src, axis=rank - 2))
    restored = n.reshape(written, (*outer, rows, columns))
    return permuted(n, restored, [order.index(k) for k in range(rank)])
