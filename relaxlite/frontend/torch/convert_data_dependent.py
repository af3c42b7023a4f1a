"""Converters of operators whose results have sizes that depend on data: nonzero, unique, item, bincount, ..."""

from __future__ import annotations

from typing import Any

import torch

from relaxlite.frontend.common.unique_rows import lexicographic_ranks
from relaxlite.frontend.torch.convert_indexing import as_vector, flat, positions_along
from relaxlite.frontend.torch.convert_sorting import is_new, sortable
from relaxlite.frontend.torch.node import Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.symbolic import SymExpr, as_int, product, smax

_MAX_COLUMNS = 16  # rows of so many elements are sorted column by column


@torch_op("aten._local_scalar_dense", "aten.item")
def item(n: Node, self: Expr) -> Any:
    """Item: integers are read as sizes, floats are kept as tensors."""
    described = n.fx_node.meta["val"]
    if isinstance(described, torch.SymFloat):
        return n.reshape(n.cast(self, "float64"), ())
    number = n.read(n.cast(self, "int64"))
    if isinstance(described, torch.SymBool):
        for symbol in n.symbols.unknown(described):  # the condition that a symbol is 1
            n.symbols.define_as(symbol, number)
        return described
    return described if isinstance(described, float | bool) else number


@torch_op("aten.nonzero")
def nonzero(n: Node, self: Expr) -> Expr:
    if not n.rank(self):
        count = n.read(n.cast(n.cast(self, "bool"), "int64"), "count")
        return n.full((count, 0), 0, "int64")
    count = n.symbols.fresh("count")
    positions = n.bb.match_shape(n.emit(ops.non_zero(self)), (n.rank(self), count))
    return n.emit(ops.transpose(positions))


@torch_op("aten.nonzero_static")
def nonzero_static(n: Node, self: Expr, size: Any = None, fill_value: int = -1) -> Expr:
    """The first positions of nonzero elements, and rows of a fill value up to a fixed number."""
    dims, (limit, rank) = n.shape_of(self), n.shape()
    if as_int(rank) == 0:
        return n.full(n.shape(), 0, "int64")
    flags = n.cast(flat(n, self), "bool")
    number = n.emit(ops.cumsum(n.cast(flags, "int64"), axis=0))
    last = n.operand(limit, "int64")
    kept = n.emit(ops.logical_and(flags, n.emit(ops.less_equal(number, last))))
    row = n.emit(ops.where(kept, n.emit(ops.subtract(number, Constant.of(1, "int64"))), last))
    place, columns = positions_along(n, product(dims)), list[Expr]()
    for size_ in reversed(dims):
        extent = n.emit(ops.maximum(n.operand(size_, "int64"), Constant.of(1, "int64")))
        columns.insert(0, n.emit(ops.floormod(place, extent)))
        place = n.emit(ops.floor_divide(place, extent))
    updates = n.emit(ops.concat(*(n.emit(ops.expand_dims(c, axes=(1,))) for c in columns), axis=1))
    table = n.full((limit + 1, rank), fill_value, "int64")  # the last row takes what is left out
    written = n.emit(ops.scatter_nd(table, n.emit(ops.expand_dims(row, axes=(1,))), updates))
    return n.emit(ops.slice(written, (0,), (limit,), axes=(0,)))


@torch_op("aten.masked_select")
def masked_select(n: Node, self: Expr, mask: Expr) -> Expr:
    x, flags = _broadcast_pair(n, self, n.cast(mask, "bool"))
    return _kept(n, flat(n, x), flat(n, flags))


def _broadcast_pair(n: Node, x: Expr, mask: Expr) -> list[Expr]:
    from_x, from_mask = n.shape_of(x), n.shape_of(mask)
    rank = max(len(from_x), len(from_mask))
    shape = []
    for k in range(-rank, 0):
        sizes = [s[k] for s in (from_x, from_mask) if len(s) >= -k]
        shape.append(next((d for d in sizes if as_int(d) != 1), sizes[0]))
    return [n.broadcast(v, shape) for v in (x, mask)]


def _kept(n: Node, x: Expr, flags: Expr, count: SymExpr | None = None) -> Expr:
    """Return the elements of a vector where flags are true."""
    size = n.symbols.fresh("count") if count is None else count
    return n.bb.match_shape(n.emit(ops.compress(x, flags, axis=0)), (size,))


# unique


@torch_op("aten._unique2")
def unique(
    n: Node, self: Expr, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Expr, Expr | None, Expr | None]:
    x = flat(n, self)
    order = n.emit(ops.argsort(sortable(n, x)))
    values = n.emit(ops.gather(x, order))
    begins, group, counts = _groups(n, is_new(n, sortable(n, values), 0))
    inverse = n.emit(ops.scatter_elements(group, order, group, axis=0))
    return _requested(n, n.emit(ops.gather(values, begins)), inverse, counts, return_inverse, return_counts)


@torch_op("aten.unique_consecutive")
def unique_consecutive(
    n: Node, self: Expr, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[Expr, Expr | None, Expr | None]:
    if dim is None:
        x = flat(n, self)
        begins, group, counts = _groups(n, is_new(n, sortable(n, x), 0))
        return _requested(n, n.emit(ops.gather(x, begins)), group, counts, return_inverse, return_counts)
    x = as_vector(n, self)
    axis = n.axis(x, dim)
    begins, group, counts = _groups(n, _is_new_row(n, _rows(n, x, axis)))
    values = n.emit(ops.gather(x, begins, axis=axis))
    if n.result().dim() != n.rank(x):  # torch 2.13 derives a wrong shape for a negative dimension
        for symbol in n.symbols.unknown(n.result().shape[n.rank(x) - 1]):
            n.symbols.define_as(symbol, n.shape_of(begins)[0])
        n.fx_node.meta["val"] = (None, *n.fx_node.meta["val"][1:])
    return _requested(n, values, group, counts, return_inverse, return_counts)


@torch_op("aten.unique_dim")
def unique_dim(
    n: Node, self: Expr, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Expr, Expr | None, Expr | None]:
    x = as_vector(n, self)
    axis = n.axis(x, dim)
    rows = _rows(n, x, axis)
    order = _row_order(n, rows)
    begins, group, counts = _groups(n, _is_new_row(n, n.emit(ops.gather(rows, order))))
    inverse = n.emit(ops.scatter_elements(group, order, group, axis=0))
    values = n.emit(ops.gather(x, n.emit(ops.gather(order, begins)), axis=axis))
    return _requested(n, values, inverse, counts, return_inverse, return_counts)


def _groups(n: Node, begins: Expr) -> tuple[Expr, Expr, Expr]:
    """Return for runs that begin where flags are true: first positions, the run of each position, lengths."""
    (size,) = n.shape_of(begins)
    count = n.symbols.fresh("unique")
    first = _kept(n, positions_along(n, size), begins, count)
    run = n.emit(ops.cumsum(n.cast(begins, "int64"), axis=0))
    group = n.emit(ops.subtract(run, Constant.of(1, "int64")))
    zeros = n.full((count,), 0, "int64")
    ones = n.full((size,), 1, "int64")
    return first, group, n.emit(ops.scatter_elements(zeros, group, ones, axis=0, reduction="add"))


def _requested(
    n: Node, values: Expr, inverse: Expr, counts: Expr, return_inverse: bool, return_counts: bool
) -> tuple[Expr, Expr | None, Expr | None]:
    """Return the results; for one that is not requested, a tensor without elements or none, as torch describes it."""
    return (
        values,
        n.reshape(inverse, n.shape(1)) if return_inverse else _not_requested(n, 1),
        counts if return_counts else _not_requested(n, 2),
    )


def _not_requested(n: Node, index: int) -> Expr | None:
    shape = tuple(n.result(index).shape)
    return n.full((0,), 0, "int64") if len(shape) == 1 and isinstance(shape[0], int) and shape[0] == 0 else None


def _rows(n: Node, x: Expr, axis: int) -> Expr:
    """Return the slices of x along an axis as rows of a matrix."""
    dims = n.shape_of(x)
    others = [k for k in range(len(dims)) if k != axis]
    moved = x if axis == 0 else n.emit(ops.transpose(x, axes=(axis, *others)))
    return sortable(n, n.reshape(moved, (dims[axis], product(dims[k] for k in others))))


def _row_order(n: Node, rows: Expr) -> Expr:
    """Return the order of rows from the lexicographically least."""
    size, width = n.shape_of(rows)
    columns = as_int(width)
    if columns is None or columns > _MAX_COLUMNS:
        return n.emit(ops.argsort(lexicographic_ranks(n.bb, rows)))
    order = positions_along(n, size)
    for k in reversed(range(columns)):
        column = n.reshape(n.emit(ops.slice(rows, (k,), (1,), axes=(1,))), (size,))
        order = n.emit(ops.gather(order, n.emit(ops.argsort(n.emit(ops.gather(column, order))))))
    return order


def _is_new_row(n: Node, rows: Expr) -> Expr:
    """Return where a row differs from the one before it; the first does."""
    differs = n.emit(ops.not_equal(rows, n.emit(ops.roll(rows, shift=1, axis=0))))
    is_first = n.emit(ops.equal(positions_along(n, n.shape_of(rows)[0]), Constant.of(0, "int64")))
    return n.emit(ops.logical_or(n.emit(ops.any(differs, axes=(1,))), is_first))


# repetitions and counts


@torch_op("aten.repeat_interleave.Tensor")
def repeat_interleave(n: Node, repeats: Expr, output_size: Any = None) -> Expr:
    return n.cast(_repeated(n, repeats, output_size), n.dtype())


@torch_op("aten.repeat_interleave.self_Tensor")
def repeat_interleave_of(n: Node, self: Expr, repeats: Expr, dim: int | None = None, output_size: Any = None) -> Expr:
    x = flat(n, self) if dim is None else as_vector(n, self)
    axis = 0 if dim is None else n.axis(x, dim)
    counts = n.broadcast(as_vector(n, repeats), (n.shape_of(x)[axis],))
    return n.emit(ops.gather(x, _repeated(n, counts, output_size), axis=axis))


def _repeated(n: Node, repeats: Expr, output_size: Any) -> Expr:
    """Return each position as often as it is to be repeated."""
    counts, zero = n.cast(as_vector(n, repeats), "int64"), Constant.of(0, "int64")
    n.check(n.emit(ops.all(n.emit(ops.greater_equal(counts, zero)))), "repeats must not be negative")
    total = n.emit(ops.sum(counts))
    if output_size is None:
        size = n.read(total, "repeated")
    else:
        size = n.int(output_size)
        agrees = n.emit(ops.equal(total, n.operand(size, "int64")))
        n.check(agrees, "output_size must be the sum of the repeats")
    return n.emit(ops.search_sorted(n.emit(ops.cumsum(counts, axis=0)), positions_along(n, size), right=True))


@torch_op("aten.bincount")
def bincount(n: Node, self: Expr, weights: Expr | None = None, minlength: Any = 0) -> Expr:
    at = n.cast(self, "int64")
    n.check(n.emit(ops.all(n.emit(ops.greater_equal(at, Constant.of(0, "int64"))))), "bincount: a number is negative")
    greatest = n.read(n.emit(ops.max(at)), "greatest")
    size = n.symbols.fresh("bins")
    shape = n.emit(ops.shape_to_tensor((smax(greatest + 1, n.int(minlength)),)))
    n.bb.match_shape(n.emit(ops.tensor_to_shape(shape)), (size,))
    dtype = n.dtype()
    ones = n.full(n.shape_of(at), 1, dtype) if weights is None else n.cast(weights, dtype)
    return n.emit(ops.scatter_elements(n.full((size,), 0, dtype), at, ones, axis=0, reduction="add"))


@torch_op("aten.histc")
def histc(n: Node, self: Expr, bins: int = 100, min: Any = 0, max: Any = 0) -> Expr:
    """Histogram of bins of equal width; torch finds a bin by one division, not by comparisons with its bounds."""
    x, dtype = flat(n, self), n.dtype()
    low, high = _limits(n, x, min, max, widening=1)
    scaled = n.emit(ops.multiply(n.emit(ops.subtract(x, low)), n.operand(bins, dtype)))
    place = n.emit(ops.divide(scaled, n.emit(ops.subtract(high, low))))
    inside = _is_inside(n, x, low, high)
    return _counted(
        n, n.cast(n.emit(ops.where(inside, place, n.operand(0, dtype))), "int64"), inside, bins, dtype, None
    )


@torch_op("aten.histogram")
def histogram(
    n: Node, self: Expr, bins: Any, range: Any = None, weight: Expr | None = None, density: bool = False
) -> tuple[Expr, Expr]:
    x, dtype = flat(n, self), n.dtype()
    if n.overload == "bin_ct":
        low, high = _limits(n, x, *(range or (0, 0)), widening=0.5)
        steps = n.emit(ops.arange(n.operand(0, dtype), n.operand(1, dtype), (bins + 1,)))
        step = n.emit(ops.divide(n.emit(ops.subtract(high, low)), n.operand(bins, dtype)))
        ahead = n.emit(ops.add(low, n.emit(ops.multiply(step, steps))))
        back = n.emit(ops.multiply(step, n.emit(ops.subtract(n.operand(bins, dtype), steps))))
        in_first_half = n.emit(ops.less(steps, n.operand((bins + 1) // 2, dtype)))
        edges = n.emit(ops.where(in_first_half, ahead, n.emit(ops.subtract(high, back))))
        count = bins
    else:
        edges, count = bins, n.shape()[0]
    ends = [n.emit(ops.squeeze(n.emit(ops.slice(edges, (k,), (1,))), axes=(0,))) for k in (0, n.shape_of(edges)[0] - 1)]
    inside = _is_inside(n, x, *ends)
    place = n.emit(ops.subtract(n.emit(ops.search_sorted(edges, x, right=True)), Constant.of(1, "int64")))
    place = n.emit(ops.where(inside, place, Constant.of(0, "int64")))
    counts = _counted(n, place, inside, count, dtype, None if weight is None else flat(n, weight))
    if density:
        widths = [n.emit(ops.slice(edges, (k,), (n.shape()[0],))) for k in (1, 0)]
        area = n.emit(ops.multiply(n.emit(ops.sum(counts)), n.emit(ops.subtract(*widths))))
        counts = n.emit(ops.divide(counts, area))
    return counts, edges


def _limits(n: Node, x: Expr, low: Any, high: Any, *, widening: float) -> tuple[Expr, Expr]:
    """Return the ends of a histogram: those of x where none are given, widened where they are equal."""
    dtype = n.dtype_of(x)
    if low != high:
        return n.operand(low, dtype), n.operand(high, dtype)
    is_empty = as_int(n.shape_of(x)[0]) == 0
    if low != 0 or high != 0 or is_empty:
        first = last = n.operand(low, dtype)
    else:
        first, last = n.emit(ops.min(x)), n.emit(ops.max(x))
    half = n.emit(ops.where(n.emit(ops.equal(first, last)), n.operand(widening, dtype), n.operand(0, dtype)))
    return n.emit(ops.subtract(first, half)), n.emit(ops.add(last, half))


def _is_inside(n: Node, x: Expr, low: Expr, high: Expr) -> Expr:
    return n.emit(ops.logical_and(n.emit(ops.greater_equal(x, low)), n.emit(ops.less_equal(x, high))))


def _counted(n: Node, place: Expr, inside: Expr, bins: Any, dtype: str, weight: Expr | None) -> Expr:
    """Count elements by bin, of those that are inside; the upper end of the last bin belongs to it."""
    place = n.emit(ops.minimum(place, n.operand(n.int(bins) - 1, "int64")))
    ones = n.operand(1, dtype) if weight is None else weight
    amounts = n.emit(ops.where(inside, ones, n.operand(0, dtype)))
    return n.emit(ops.scatter_elements(n.full((bins,), 0, dtype), place, amounts, axis=0, reduction="add"))
