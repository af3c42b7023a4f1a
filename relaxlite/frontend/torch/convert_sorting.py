"""Converters of operators that sort: sort, topk, median, mode, cumulative extremes, search in sorted rows.

Sorting is stable, with NaN as the greatest value, as torch documents it.
"""

from __future__ import annotations

from typing import Any

from relaxlite import dtypes
from relaxlite.frontend.torch.convert_indexing import flat, positions_along
from relaxlite.frontend.torch.node import Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.ops.elementwise import NUMBER
from relaxlite.ir.symbolic import as_int, sym


def sortable(n: Node, x: Expr) -> Expr:
    """Return x with bools as numbers."""
    return x if n.dtype_of(x) in NUMBER else n.cast(x, "uint8")


def _sorted(n: Node, x: Expr, axis: int, descending: bool) -> tuple[Expr, Expr]:
    """Return the sorted elements and their indices."""
    order = n.emit(ops.argsort(sortable(n, x), axis=axis, descending=descending))
    return n.emit(ops.gather_elements(x, order, axis=axis)), order


@torch_op("aten.sort")
def sort(
    n: Node, self: Expr, stable: bool | None = False, dim: int = -1, descending: bool = False
) -> tuple[Expr, Expr]:
    if not n.rank(self):
        return self, Constant.of(0, "int64")
    return _sorted(n, self, n.axis(self, dim), descending)


@torch_op("aten.msort")
def msort(n: Node, self: Expr) -> Expr:
    return _sorted(n, self, 0, False)[0] if n.rank(self) else self


@torch_op("aten.argsort")
def argsort(n: Node, self: Expr, stable: bool = False, dim: int = -1, descending: bool = False) -> Expr:
    if not n.rank(self):
        return Constant.of(0, "int64")
    return n.emit(ops.argsort(sortable(n, self), axis=n.axis(self, dim), descending=descending))


@torch_op("aten.topk")
def topk(n: Node, self: Expr, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not n.rank(self):
        count = n.shape()
        return n.broadcast(self, count), n.full(count, 0, "int64")
    axis = n.axis(self, dim)
    values, indices = n.fields(ops.top_k(sortable(n, self), (n.int(k),), axis=axis, largest=largest, sorted=sorted))
    return n.cast(values, n.dtype_of(self)), indices


@torch_op("aten.kthvalue")
def kthvalue(n: Node, self: Expr, k: Any, dim: int = -1, keepdim: bool = False) -> tuple[Expr, Expr]:
    if not n.rank(self):
        return self, Constant.of(0, "int64")
    axis = n.axis(self, dim)
    rows = (n.emit(ops.slice(x, (n.int(k) - 1,), (1,), axes=(axis,))) for x in _sorted(n, self, axis, False))
    values, indices = (row if keepdim else n.emit(ops.squeeze(row, axes=(axis,))) for row in rows)
    return values, indices


@torch_op("aten.median", "aten.nanmedian")
def median(n: Node, self: Expr, dim: int | None = None, keepdim: bool = False) -> Any:
    """Median: the lower one of two; NaN if an element is NaN, which nanmedian leaves out."""
    is_whole = n.overload == "default"
    if not n.rank(self):
        return self if is_whole else (self, Constant.of(0, "int64"))
    x = flat(n, self) if is_whole else self
    axis = 0 if is_whole or dim is None else n.axis(self, dim)
    size, dtype = n.shape_of(x)[axis], n.dtype_of(x)
    if is_whole and as_int(size) == 0:
        return n.full((), float("nan"), dtype)
    ordered, order = _sorted(n, x, axis, False)
    at = _median_position(n, x, axis, skips_nan=n.target.startswith("aten.nanmedian"))
    chosen = [n.emit(ops.gather_elements(v, at, axis=axis)) for v in (ordered, order)]
    if not keepdim:
        chosen = [n.emit(ops.squeeze(v, axes=(axis,))) for v in chosen]
    return chosen[0] if is_whole else (chosen[0], chosen[1])


def _median_position(n: Node, x: Expr, axis: int, *, skips_nan: bool) -> Expr:
    """Return where the median stands among the sorted elements along an axis, whose size becomes 1."""
    size = n.shape_of(x)[axis]
    kept = tuple(sym(1) if k == axis else d for k, d in enumerate(n.shape_of(x)))
    if not dtypes.is_float(n.dtype_of(x)):
        return n.full(kept, (size - 1) // 2, "int64")
    is_nan = n.cast(n.emit(ops.isnan(x)), "int64")
    count = n.emit(ops.sum(is_nan, axes=(axis,), keepdims=True))
    numbers = n.emit(ops.subtract(n.operand(size, "int64"), count))
    one, zero = Constant.of(1, "int64"), Constant.of(0, "int64")
    half = n.emit(ops.floor_divide(n.emit(ops.subtract(numbers, one)), Constant.of(2, "int64")))
    if skips_nan:
        return n.emit(ops.maximum(half, zero))
    return n.emit(ops.where(n.emit(ops.greater(count, zero)), numbers, half))


@torch_op("aten.mode")
def mode(n: Node, self: Expr, dim: int = -1, keepdim: bool = False) -> tuple[Expr, Expr]:
    """Mode: the least of the most frequent elements, and the index of its last occurrence."""
    if not n.rank(self):
        return self, Constant.of(0, "int64")
    axis = n.axis(self, dim)
    ordered, order = _sorted(n, self, axis, False)
    place = along_axis(n, ordered, axis)
    begins = n.emit(ops.where(is_new(n, ordered, axis), place, Constant.of(0, "int64")))
    run = n.emit(ops.subtract(place, n.emit(ops.cummax(begins, axis=axis))))
    at = n.emit(ops.argmax(run, axis=axis, keepdims=True))
    chosen = [n.emit(ops.gather_elements(v, at, axis=axis)) for v in (ordered, order)]
    if not keepdim:
        chosen = [n.emit(ops.squeeze(v, axes=(axis,))) for v in chosen]
    return chosen[0], chosen[1]


def along_axis(n: Node, x: Expr, axis: int) -> Expr:
    """Return the positions along an axis of x, broadcast to its shape."""
    dims = n.shape_of(x)
    row = positions_along(n, dims[axis])
    return n.broadcast(n.reshape(row, tuple(d if k == axis else sym(1) for k, d in enumerate(dims))), dims)


def is_new(n: Node, x: Expr, axis: int) -> Expr:
    """Return where an element differs from the one before it along an axis; the first does."""
    differs = n.emit(ops.not_equal(x, n.emit(ops.roll(x, shift=1, axis=axis))))
    is_first = n.emit(ops.equal(along_axis(n, x, axis), Constant.of(0, "int64")))
    return n.emit(ops.logical_or(is_first, differs))


@torch_op("aten.cummax", "aten.cummin")
def cummax(n: Node, self: Expr, dim: int) -> tuple[Expr, Expr]:
    """Cumulative maximum or minimum, and the index of its last occurrence so far."""
    if not n.rank(self):
        return self, Constant.of(0, "int64")
    x, axis = sortable(n, self), n.axis(self, dim)
    scan = ops.cummax if n.target.startswith("aten.cummax") else ops.cummin
    values = n.emit(scan(x, axis=axis))
    is_extreme = n.emit(ops.equal(x, values))
    if dtypes.is_float(n.dtype_of(x)):
        is_extreme = n.emit(ops.logical_or(is_extreme, n.emit(ops.isnan(x))))
    places = n.emit(ops.where(is_extreme, along_axis(n, x, axis), Constant.of(0, "int64")))
    return n.cast(values, n.dtype_of(self)), n.emit(ops.cummax(places, axis=axis))


@torch_op("aten.searchsorted")
def searchsorted(
    n: Node, sorted_sequence: Expr, self: Any = None, out_int32: bool = False, right: bool = False,
    side: str | None = None, sorter: Expr | None = None,
) -> Expr:  # fmt: skip
    rows = sorted_sequence
    if sorter is not None:
        rows = n.emit(ops.gather_elements(rows, sorter, axis=n.rank(rows) - 1))
    return _search(n, rows, self, right or side == "right")


@torch_op("aten.bucketize")
def bucketize(n: Node, self: Any, boundaries: Any = None, out_int32: bool = False, right: bool = False) -> Expr:
    return _search(n, boundaries, self, right)


def _search(n: Node, rows: Expr, points: Any, right: bool) -> Expr:
    dtype = n.result_type(*n.fx_node.args[:2])
    number = "uint8" if dtype == "bool" else dtype
    rows, x = n.cast(n.cast(rows, dtype), number), n.cast(n.operand(points, dtype), number)
    wide = n.rank(rows) > 1
    chosen = n.emit(ops.search_sorted(rows, x if wide else flat(n, x), right=right))
    return n.cast(n.reshape(chosen, n.shape()), n.dtype())
