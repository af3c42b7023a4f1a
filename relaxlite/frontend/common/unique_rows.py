"""Lexicographic order of rows, by comparison of all pairs."""

from __future__ import annotations

from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Expr


def lexicographic_ranks(bb: BlockBuilder, rows: Expr) -> Expr:
    """Return the rank of each row: rank[i] is the number of rows j that are lexicographically less than row i.

    Equal rows have equal ranks, and the order of ranks is that of rows. Meant for few rows.
    """
    left, right = bb.emit(ops.expand_dims(rows, axes=(0,))), bb.emit(ops.expand_dims(rows, axes=(1,)))  # j, i
    differs = bb.emit(ops.cast(bb.emit(ops.not_equal(left, right)), dtype="int32"))
    position = bb.emit(ops.argmax(differs, axis=2, keepdims=True))  # (i, j, 1): the first different element
    less = bb.emit(ops.cast(bb.emit(ops.less(left, right)), dtype="int64"))
    row_is_less = bb.emit(ops.gather_elements(less, position, axis=2))
    return bb.emit(ops.sum(bb.emit(ops.squeeze(row_is_less, axes=(2,))), axes=(1,)))
