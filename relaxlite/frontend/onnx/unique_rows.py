"""Unique along an axis: different slices, in lexicographic order."""

from __future__ import annotations

from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr
from relaxlite.ir.symbolic import product


def unique_rows(n: Node, axis: int, *, is_sorted: bool) -> Result:
    """Each slice gets a number: how many slices come before it in order. Equal slices have equal numbers, whose unique
    values, in order, are those of the slices. All pairs of slices are compared: meant for short axes.
    """
    dims = n.shape()
    order = [axis, *(k for k in range(len(dims)) if k != axis)]
    moved = n.emit(ops.transpose(n.input(0), axes=tuple(order)))
    rows = n.emit(ops.reshape(moved, (dims[axis], product(dims[k] for k in order[1:]))))
    size = n.importer.symbols.fresh(f"{n.proto.output[0]}_count")
    result = n.fields(ops.unique(_ranks(n, rows), sorted=is_sorted))
    first = n.bb.match_shape(result[1], (size,))
    counts = n.bb.match_shape(result[3], (size,))
    values = n.emit(ops.gather(n.input(0), first, axis=axis))
    return values, first, result[2], counts


def _ranks(n: Node, rows: Expr) -> Expr:
    """rank[i] = how many rows j are less than row i, by their first different element."""
    left, right = n.emit(ops.expand_dims(rows, axes=(0,))), n.emit(ops.expand_dims(rows, axes=(1,)))  # j, i
    differs = n.emit(ops.cast(n.emit(ops.not_equal(left, right)), dtype="int32"))
    at = n.emit(ops.argmax(differs, axis=2, keepdims=True))  # (i, j, 1): the first different element
    less = n.emit(ops.cast(n.emit(ops.less(left, right)), dtype="int64"))
    chosen = n.emit(ops.gather_elements(less, at, axis=2))
    return n.emit(ops.sum(n.emit(ops.squeeze(chosen, axes=(2,))), axes=(1,)))
