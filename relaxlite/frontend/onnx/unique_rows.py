"""Conversion of ONNX Unique along an axis: the distinct slices in lexicographic order."""

from __future__ import annotations

from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr
from relaxlite.ir.symbolic import product


def unique_rows(n: Node, axis: int, *, is_sorted: bool) -> Result:
    """Return values, first indices, inverse and counts of the distinct slices of input 0 along an axis.

    Each slice is replaced by its rank, the number of slices less than it: equal slices have equal ranks, and the order
    of ranks is that of slices. All pairs of slices are compared: meant for short axes.
    """
    dims = n.shape()
    order = [axis, *(k for k in range(len(dims)) if k != axis)]
    moved = n.emit(ops.transpose(n.input(0), axes=tuple(order)))
    rows = n.emit(ops.reshape(moved, (dims[axis], product(dims[k] for k in order[1:]))))
    size = n.importer.symbols.fresh(f"{n.proto.output[0]}_count")
    fields = n.fields(ops.unique(_ranks(n, rows), sorted=is_sorted))
    first = n.bb.match_shape(fields[1], (size,))
    counts = n.bb.match_shape(fields[3], (size,))
    values = n.emit(ops.gather(n.input(0), first, axis=axis))
    return values, first, fields[2], counts


def _ranks(n: Node, rows: Expr) -> Expr:
    """Return the rank of each row: rank[i] is the number of rows j that are lexicographically less than row i."""
    left, right = n.emit(ops.expand_dims(rows, axes=(0,))), n.emit(ops.expand_dims(rows, axes=(1,)))  # j, i
    differs = n.emit(ops.cast(n.emit(ops.not_equal(left, right)), dtype="int32"))
    position = n.emit(ops.argmax(differs, axis=2, keepdims=True))  # (i, j, 1): the first different element
    less = n.emit(ops.cast(n.emit(ops.less(left, right)), dtype="int64"))
    row_is_less = n.emit(ops.gather_elements(less, position, axis=2))
    return n.emit(ops.sum(n.emit(ops.squeeze(row_is_less, axes=(2,))), axes=(1,)))
