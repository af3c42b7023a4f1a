"""Look-ups in constant tables: positions of elements among keys, and values for keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from relaxlite.frontend.onnx.node import Node
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.symbolic import product


def position_in(n: Node, x: Expr, keys: Sequence[Any]) -> Expr:
    """Return the position of each element of x among keys, -1 for none: int64 of x's shape.

    The first of equal keys counts; NaN equals NaN.
    """
    shape, table = n.shape_of(x), key_array(n, x, keys)
    kept, first = np.unique(table[~_is_nan(table)], return_index=True)
    first = np.flatnonzero(~_is_nan(table))[first]
    nowhere = ops.full(shape, Constant.of(np.int64(-1)))
    place = _matching_key(n, x, kept.astype(table.dtype), first) if len(kept) else n.emit(nowhere)
    if _is_nan(table).any():
        nan_at = int(np.flatnonzero(_is_nan(table))[0])
        place = n.emit(ops.where(n.emit(ops.isnan(x)), Constant.of(np.int64(nan_at)), place))
    return place


def _is_nan(table: Any) -> Any:
    return np.isnan(table) if table.dtype.kind == "f" else np.zeros(len(table), bool)


def _matching_key(n: Node, x: Expr, kept: Any, first: Any) -> Expr:
    """Return the position that belongs to the equal one of the sorted keys `kept`, or -1."""
    shape = n.shape_of(x)
    flat = n.emit(ops.reshape(x, (product(n.shape_of(x)),)))
    below = n.emit(ops.search_sorted(Constant.of(kept), flat))
    below = n.emit(ops.minimum(below, Constant.of(np.int64(len(kept) - 1))))
    is_equal = n.emit(ops.equal(n.emit(ops.gather(Constant.of(kept), below, axis=0)), flat))
    position = n.emit(ops.gather(Constant.of(first.astype(np.int64)), below, axis=0))
    return n.emit(ops.reshape(n.emit(ops.where(is_equal, position, Constant.of(np.int64(-1)))), shape))


def key_array(n: Node, x: Expr, keys: Sequence[Any]) -> Any:
    """Return keys as an array of the dtype of x."""
    if n.is_text(x) != isinstance(keys[0], str):
        kinds = ("numbers", "strings")[:: -1 if n.is_text(x) else 1]
        n.fail(f"an input of {kinds[0]} is looked up among {kinds[1]}")
    if n.is_text(x):
        return n.text_constant(keys).value
    return np.array(keys, n.type_of(x).dtype)


def value_at(n: Node, position: Expr, values: Any, default: Any) -> Expr:
    """Return the value of each position, or the default for -1."""
    table = Constant.of(np.append(values, np.array([default], values.dtype)))
    count = Constant.of(np.int64(len(values)))
    is_known = n.emit(ops.greater_equal(position, Constant.of(np.int64(0))))
    return n.emit(ops.gather(table, n.emit(ops.where(is_known, position, count)), axis=0))
