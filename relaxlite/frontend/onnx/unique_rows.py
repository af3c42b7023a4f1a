"""Conversion of ONNX Unique along an axis: the distinct slices in lexicographic order."""

from __future__ import annotations

from relaxlite.frontend.common.unique_rows import lexicographic_ranks
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result
from relaxlite.ir import ops
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
    fields = n.fields(ops.unique(lexicographic_ranks(n.bb, rows), sorted=is_sorted))
    first = n.bb.match_shape(fields[1], (size,))
    counts = n.bb.match_shape(fields[3], (size,))
    values = n.emit(ops.gather(n.input(0), first, axis=axis))
    return values, first, fields[2], counts
