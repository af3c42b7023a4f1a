"""Converters of gather and scatter, one-hot, ranges and triangular matrices."""

from __future__ import annotations

import numpy as np

from relaxlite import dtypes
from relaxlite.frontend.common.unify import unify_dims
from relaxlite.frontend.onnx.convert_shapes import normalize_axis
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import SymExpr, ceildiv, smax, sym


@onnx_op("Gather")
def gather(n: Node) -> Result:
    return ops.gather(n.input(0), n.input(1), axis=n.int("axis", 0))


@onnx_op("GatherElements", since=11)
def gather_elements(n: Node) -> Result:
    return ops.gather_elements(n.input(0), n.input(1), axis=n.int("axis", 0))


@onnx_op("GatherND", since=11)
def gather_nd(n: Node) -> Result:
    return ops.gather_nd(n.input(0), n.input(1), batch_dims=n.int("batch_dims", 0))


@onnx_op("Scatter", since=9)
@onnx_op("ScatterElements", since=11)
def scatter_elements(n: Node) -> Result:
    return ops.scatter_elements(
        n.input(0), n.input(1), n.input(2), axis=n.int("axis", 0), reduction=n.text("reduction", "none")
    )


@onnx_op("ScatterND", since=11)
def scatter_nd(n: Node) -> Result:
    return ops.scatter_nd(n.input(0), n.input(1), n.input(2), reduction=n.text("reduction", "none"))


@onnx_op("OneHot", since=9)
def one_hot(n: Node) -> Result:
    """OneHot; indices and depth may be floats, values are (off, on)."""
    indices = n.input(0)
    if dtypes.is_float(n.dtype(0)):
        indices = n.emit(ops.cast(indices, dtype="int64"))
    depth = n.input(1)
    if dtypes.is_float(n.dtype(1)):
        depth = _as_int64(n, depth)
    return ops.one_hot(indices, n.resolver.values(depth, lower=0), n.input(2), axis=n.int("axis", -1))


def _as_int64(n: Node, x: Expr) -> Expr:
    return Constant.of(x.value.astype(np.int64)) if isinstance(x, Constant) else n.emit(ops.cast(x, dtype="int64"))


@onnx_op("Range", since=11)
def make_range(n: Node) -> Result:
    """Range: start, start + delta, ... before limit: max(ceil((limit - start) / delta), 0) elements."""
    return ops.arange(n.input(0), n.input(2), (_range_count(n),))


def _range_count(n: Node) -> SymExpr:
    if not dtypes.is_float(n.dtype()):
        delta = n.const(2)
        if delta is not None and int(delta.reshape(-1)[0]) != 0:
            step = int(delta.reshape(-1)[0])
            start, limit = n.shape_values(0)[0], n.shape_values(1)[0]
            count = ceildiv(limit - start, step) if step > 0 else ceildiv(start - limit, -step)
            return count if PROVER.can_prove_le(0, count) else smax(count, 0)
    ratio_count = _ratio_count(n)
    if ratio_count is not None:
        return ratio_count
    wide = [n.emit(ops.cast(n.input(k), dtype="float64")) for k in range(3)]
    length = n.emit(ops.divide(n.emit(ops.subtract(wide[1], wide[0])), wide[2]))
    count_ = n.emit(ops.maximum(n.emit(ops.cast(n.emit(ops.ceil(length)), dtype="int64")), np.int64(0)))
    return n.resolver.values(count_, lower=0)[0]


def _ratio_count(n: Node) -> SymExpr | None:
    """Return the number of elements of a float range whose operands are fractions of symbols, else None."""
    if not dtypes.is_float(n.dtype()):
        return None
    operands = [n.resolver.ratios(n.input(k)) for k in range(3)]
    if any(v is None for v in operands):
        return None
    start, limit, delta = (v.reshape(-1)[0] for v in operands)
    step = delta.num.const if delta.num.is_const else 0
    if step == 0:
        return None
    # (limit - start) / delta, over the common denominator
    span = (limit.num * start.den - start.num * limit.den) * delta.den
    sign = 1 if step > 0 else -1
    count = ceildiv(span * sign, limit.den * start.den * abs(step))
    return count if PROVER.can_prove_le(0, count) else smax(count, 0)


@onnx_op("EyeLike", since=9)
def eye_like(n: Node) -> Result:
    return ops.eye(n.shape(), k=n.int("k", 0), dtype=n.element_type("dtype", n.dtype()))


@onnx_op("Trilu", since=14)
def trilu(n: Node) -> Result:
    k = n.shape_values(1) if n.optional(1) is not None else (sym(0),)
    return ops.trilu(n.input(0), k, upper=n.flag("upper", True))


@onnx_op("TensorScatter", since=24)
def tensor_scatter(n: Node) -> Result:
    """TensorScatter: write an update into a cache from write_indices[b] on along an axis; "circular" wraps around."""
    mode = n.text("mode", "linear")
    axis = normalize_axis(n, n.int("axis", -2), n.rank())
    extent, (batch, *_), size = n.shape()[axis], n.shape(1), n.shape(1)[axis]
    zero, one = Constant.of(0, "int64"), Constant.of(1, "int64")
    indices: Expr = n.emit(ops.arange(zero, one, (size,)))
    if n.optional(2) is not None:
        begins = n.emit(ops.reshape(n.emit(ops.cast(n.input(2), dtype="int64")), (batch, 1)))
        indices = n.emit(ops.add(begins, indices))
    else:
        indices = n.emit(ops.reshape(indices, (1, size)))
    if mode == "circular":
        limit = n.emit(ops.reshape(n.emit(ops.shape_to_tensor((extent,))), ()))
        indices = n.emit(ops.floormod(indices, limit))
    elif mode != "linear":
        n.fail(f"attribute 'mode' must be linear or circular, not {mode!r}")
    update = unify_dims(n.bb, n.input(1), {k: d for k, d in enumerate(n.shape()) if k != axis})
    rows = n.shape_of(indices)[0]
    column = n.emit(ops.reshape(indices, tuple(rows if k == 0 else size if k == axis else 1 for k in range(n.rank()))))
    return ops.scatter_elements(n.input(0), n.emit(ops.broadcast_to(column, n.shape_of(update))), update, axis=axis)
