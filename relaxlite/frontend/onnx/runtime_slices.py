"""Slices whose starts, ends, axes or steps are known at run time only: NumPy's rules as integer tensors of all axes."""

from __future__ import annotations

import numpy as np

from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.runtime_values import for_every_axis
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr

_END = np.iinfo(np.int64).max


def runtime_slice(n: Node) -> Expr:
    """Convert a Slice (inputs: data, starts, ends, axes, steps) by sizes that the model computes at run time.

    Axes are taken one after another: by a slice where the step is known when the model is compiled, else by indices.
    """
    rank, known_axes = n.rank(), n.const(3)
    axes = n.optional(3)
    starts, ends = for_every_axis(n, n.input(1), axes, rank, 0), for_every_axis(n, n.input(2), axes, rank, _END)
    is_plain = n.optional(4) is None
    steps = Constant.of(np.ones(rank, np.int64)) if is_plain else for_every_axis(n, n.input(4), axes, rank, 1)
    begins, sizes, steps = _ranges(n, starts, ends, steps)
    all_sizes = n.resolver.values(sizes, lower=0)
    touched = range(rank) if known_axes is None else sorted({int(a) % rank for a in known_axes.reshape(-1)})
    if is_plain:
        all_begins = n.resolver.values(begins, lower=0)
        begin, size = (tuple(values[a] for a in touched) for values in (all_begins, all_sizes))
        return n.emit(ops.slice(n.input(0), begin, size, axes=tuple(touched)))
    result = n.input(0)
    for axis in touched:
        first, step = (n.emit(ops.gather(x, Constant.of(axis, "int64"), axis=0)) for x in (begins, steps))
        indices = n.emit(ops.arange(first, step, (all_sizes[axis],)))
        result = n.emit(ops.gather(result, indices, axis=axis))
    return result


def _ranges(n: Node, starts: Expr, ends: Expr, steps: Expr) -> tuple[Expr, Expr, Expr]:
    """Return (begins, sizes, steps) of every axis, int64 (rank,), from limits as NumPy takes them."""
    zero, one = Constant.of(0, "int64"), Constant.of(1, "int64")
    dims = n.emit(ops.shape_of(n.input(0)))
    is_step = n.emit(ops.all(n.emit(ops.not_equal(steps, zero)), axes=(0,)))
    n.check_assumption(is_step, True, "a step of a slice must not be 0")
    longest = n.emit(ops.maximum(dims, one))  # a step beyond the whole axis takes one element, as this one does
    steps = n.emit(ops.minimum(n.emit(ops.maximum(steps, n.emit(ops.neg(longest)))), longest))
    is_forward = n.emit(ops.less(zero, steps))
    low = n.emit(ops.where(is_forward, zero, Constant.of(-1, "int64")))
    high = n.emit(ops.add(dims, low))
    begins, ends = (_clamped(n, x, dims, low, high) for x in (starts, ends))
    forward, backward = n.emit(ops.subtract(ends, begins)), n.emit(ops.subtract(begins, ends))
    span = n.emit(ops.where(is_forward, forward, backward))
    stride = n.emit(ops.abs(steps))
    rounded = n.emit(ops.add(span, n.emit(ops.subtract(stride, one))))
    count = n.emit(ops.truncdiv(n.emit(ops.maximum(rounded, zero)), stride))
    return begins, n.emit(ops.where(n.emit(ops.less(zero, span)), count, zero), "size"), steps


def _clamped(n: Node, x: Expr, dims: Expr, low: Expr, high: Expr) -> Expr:
    """Return limits counted from the front, clamped to low <= limit <= high."""
    is_negative = n.emit(ops.less(x, Constant.of(0, "int64")))
    positive = n.emit(ops.where(is_negative, n.emit(ops.add(x, dims)), x))
    return n.emit(ops.minimum(n.emit(ops.maximum(positive, low)), high))
