"""Converters of ops with data-dependent result sizes (NonZero, Unique, NonMaxSuppression, ...), and of TopK."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relaxlite.frontend.onnx.convert_shapes import normalize_axis
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.frontend.onnx.unique_rows import unique_rows
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import IntLike, as_int, smin, sym

_MIN_UNLIMITED = 1 << 31


def _with_shape(n: Node, value: Expr, shape: Sequence[IntLike], index: int = 0) -> Expr:
    return n.bb.match_shape(n.bb.leaf(value), list(shape), n.proto.output[index] or None)


@onnx_op("NonZero", since=9)
def non_zero(n: Node) -> Result:
    x = n.input(0)
    if n.rank() == 0:
        n.fail("NonZero of a scalar is not supported")
    return _with_shape(n, ops.non_zero(x), (n.rank(), n.importer.symbols.fresh(f"{n.proto.output[0]}_count")))


@onnx_op("Compress", since=9)
def compress(n: Node) -> Result:
    axis = n.int("axis", None)
    size = n.importer.symbols.fresh(f"{n.proto.output[0]}_count")
    if axis is None:
        return _with_shape(n, ops.compress(n.input(0), n.input(1), axis=None), (size,))
    dims = list(n.shape())
    axis = normalize_axis(n, axis, len(dims))
    dims[axis] = size
    return _with_shape(n, ops.compress(n.input(0), n.input(1), axis=axis), dims)


@onnx_op("Unique", since=11)
def unique(n: Node) -> Result:
    """Unique; outputs: values, first indices, inverse and counts."""
    x, axis, is_sorted = n.input(0), n.int("axis", None), n.flag("sorted", True)
    if axis is not None and n.rank() > 1:
        return unique_rows(n, normalize_axis(n, axis, n.rank()), is_sorted=is_sorted)
    size = n.importer.symbols.fresh(f"{n.proto.output[0]}_count")
    values, first, inverse, counts = n.fields(ops.unique(x, sorted=is_sorted))
    sized_outputs = [_with_shape(n, v, (size,)) for v in (values, first)]
    return (*sized_outputs, inverse, _with_shape(n, counts, (size,)))


@onnx_op("TopK")
def top_k_1(n: Node) -> Result:
    return n.fields(ops.top_k(n.input(0), (n.int("k"),), axis=n.int("axis", -1)))


@onnx_op("TopK", since=10)
def top_k(n: Node) -> Result:
    axis = normalize_axis(n, n.int("axis", -1), n.rank())
    (k,) = n.shape_values(1, lower=0)
    largest = n.flag("largest", True)
    return n.fields(ops.top_k(n.input(0), (k,), axis=axis, largest=largest, sorted=n.flag("sorted", True)))


@onnx_op("NonMaxSuppression", since=10)
def non_max_suppression(n: Node) -> Result:
    """NonMaxSuppression; inputs: boxes, scores, limit per class (absent or 0: no results), IoU and score thresholds."""
    boxes, scores = n.input(0), n.input(1)
    limit = n.shape_values(2, lower=0)[0] if n.optional(2) is not None else sym(0)
    spatial = n.shape(0)[1]
    limit = (
        spatial
        if (as_int(limit) or 0) >= _MIN_UNLIMITED or PROVER.can_prove_le(spatial, limit)
        else smin(limit, spatial)
    )
    thresholds = [
        n.input(k) if n.optional(k) is not None else Constant.of(np.float32(value))
        for k, value in ((3, 0.0), (4, -np.inf))
    ]
    selected = ops.non_max_suppression(
        boxes, scores, *thresholds, (limit,), center_point_box=n.flag("center_point_box")
    )
    return _with_shape(n, selected, (n.importer.symbols.fresh(f"{n.proto.output[0]}_count"), 3))
