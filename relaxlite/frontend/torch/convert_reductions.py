"""Converters of reductions and cumulative operators.

`dim` may be None or empty for all dimensions. Half-precision floats accumulate in float32, as the ops do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from relaxlite import dtypes
from relaxlite.frontend.common.unify import unify_dims
from relaxlite.frontend.torch.node import Complex, Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr
from relaxlite.ir.ops.scalars import HALF
from relaxlite.ir.symbolic import SymExpr, product, smax, sym

Dims = Any  # a dimension, a list of dimensions or None


@torch_op("aten.sum", "aten.nansum")
def sum_(n: Node, self: Expr, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Expr:
    x, axes = n.cast(self, n.dtype()), n.axes(self, dim)
    if n.target.startswith("aten.nansum") and dtypes.is_float(n.dtype()):
        x = n.emit(ops.where(n.emit(ops.isnan(x)), n.operand(0, n.dtype()), x))
    return n.emit(ops.sum(x, axes=axes, keepdims=keepdim))


@torch_op("aten.mean")
def mean(n: Node, self: Expr, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Expr:
    return n.emit(ops.mean(n.cast(self, n.dtype()), axes=n.axes(self, dim), keepdims=keepdim))


@torch_op("aten.prod")
def prod(n: Node, self: Expr, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Expr:
    return n.emit(ops.prod(n.cast(self, n.dtype()), axes=n.axes(self, dim), keepdims=keepdim))


def extreme(n: Node, x: Expr, axes: tuple[int, ...], keepdim: bool, *, largest: bool) -> Expr:
    """Emit the largest or smallest element over axes, of any dtype."""
    if n.dtype_of(x) == "bool":
        return n.emit((ops.any if largest else ops.all)(x, axes=axes, keepdims=keepdim))
    return n.emit((ops.max if largest else ops.min)(x, axes=axes, keepdims=keepdim))


def arg_extreme(n: Node, x: Expr, axis: int, keepdim: bool, *, largest: bool) -> Expr:
    """Emit the index of the first largest or smallest element along an axis; 0 for a tensor of rank 0."""
    if not n.rank(x):
        return n.operand(0, "int64")
    x = n.cast(x, "uint8") if n.dtype_of(x) == "bool" else x
    return n.emit((ops.argmax if largest else ops.argmin)(x, axis=axis, keepdims=keepdim))


@torch_op("aten.amax", "aten.amin")
def amax(n: Node, self: Expr, dim: Dims = None, keepdim: bool = False) -> Expr:
    return extreme(n, self, n.axes(self, dim), keepdim, largest="amax" in n.target)


@torch_op("aten.aminmax")
def aminmax(n: Node, self: Expr, dim: int | None = None, keepdim: bool = False) -> tuple[Expr, Expr]:
    axes = n.axes(self, dim)
    return extreme(n, self, axes, keepdim, largest=False), extreme(n, self, axes, keepdim, largest=True)


@torch_op("aten.max.default", "aten.min.default")
def max_all(n: Node, self: Expr) -> Expr:
    return extreme(n, self, n.axes(self, None), keepdim=False, largest="max" in n.target)


@torch_op("aten.max.dim", "aten.min.dim")
def max_dim(n: Node, self: Expr, dim: int, keepdim: bool = False) -> tuple[Expr, Expr]:
    largest = "max" in n.target
    value = extreme(n, self, n.axes(self, dim), keepdim, largest=largest)
    return value, arg_extreme(n, self, n.axis(self, dim), keepdim, largest=largest)


@torch_op("aten.argmax", "aten.argmin")
def argmax(n: Node, self: Expr, dim: int | None = None, keepdim: bool = False) -> Expr:
    largest = "argmax" in n.target
    if dim is not None:
        return arg_extreme(n, self, n.axis(self, dim), keepdim, largest=largest)
    flat = n.reshape(self, (product(n.shape_of(self)),))
    return n.reshape(arg_extreme(n, flat, 0, keepdim=False, largest=largest), n.shape())


@torch_op("aten.all", "aten.any", complex=True)
def all_(n: Node, self: Expr | Complex, dim: Dims = None, keepdim: bool = False) -> Expr:
    flags = is_nonzero(n, self)
    op = ops.all if n.target.startswith("aten.all") else ops.any
    return n.cast(n.emit(op(flags, axes=n.axes(flags, dim), keepdims=keepdim)), n.dtype())


def is_nonzero(n: Node, x: Expr | Complex) -> Expr:
    """Emit where x is not zero."""
    if isinstance(x, Complex):
        return n.emit(ops.any(n.cast(x.parts, "bool"), axes=(-1,)))
    return n.cast(x, "bool")


@torch_op("aten.count_nonzero", complex=True)
def count_nonzero(n: Node, self: Expr | Complex, dim: Dims = None) -> Expr:
    flags = n.cast(is_nonzero(n, self), "int64")
    return n.emit(ops.sum(flags, axes=n.axes(flags, dim)))


# Variance. `correction` is subtracted from the count: 1 by default, 0 for unbiased=False.


def element_count(n: Node, x: Expr, axes: tuple[int, ...]) -> SymExpr:
    """Return the number of elements over axes."""
    return product(n.shape_of(x)[a] for a in axes)


def variance(
    n: Node, x: Expr, dim: Dims, unbiased: bool, correction: Any, keepdim: bool, dtype: str
) -> tuple[Expr, Expr]:
    """Emit variance and mean over dimensions, in float32 or float64; dtype: that of the real result."""
    wide = "float32" if dtype in HALF else dtype
    x, axes = n.cast(x, wide), n.axes(x, dim)
    average = n.emit(ops.mean(x, axes=axes, keepdims=True))
    spread = n.emit(ops.sum_square(n.emit(ops.subtract(x, average)), axes=axes, keepdims=keepdim))
    taken = (1 if unbiased else 0) if correction is None else correction
    count = element_count(n, x, axes)
    if isinstance(taken, int) or float(taken).is_integer():
        divisor = n.operand(smax(count - int(taken), 0), wide)
    else:
        rest = n.emit(ops.subtract(n.operand(count, wide), n.operand(taken, wide)))
        divisor = n.emit(ops.maximum(rest, n.operand(0, wide)))
    value = n.emit(ops.divide(spread, divisor))
    return value, average if keepdim or not axes else n.emit(ops.squeeze(average, axes=axes))


@torch_op("aten.var", "aten.std", "aten.var_mean", "aten.std_mean")
def var(
    n: Node, self: Expr, dim: Dims = None, unbiased: bool = True, correction: Any = None, keepdim: bool = False
) -> Expr | tuple[Expr, Expr]:
    dtype = n.dtype()
    value, average = variance(n, self, dim, unbiased, correction, keepdim, dtype)
    if n.target.startswith("aten.std"):
        value = n.emit(ops.sqrt(value))
    value = n.cast(value, dtype)
    return (value, n.cast(average, dtype)) if "_mean" in n.target else value


# Norms


def vector_norm(n: Node, x: Expr, order: float, axes: tuple[int, ...], keepdim: bool, dtype: str) -> Expr:
    """Emit the norm sum(|x| ** order) ** (1 / order) over axes in a dtype; its limits for infinity and 0."""
    wide = "float32" if dtype in HALF else dtype
    x = n.emit(ops.abs(n.cast(x, wide))) if order != 2 else n.cast(x, wide)
    if order == math.inf:
        value = n.emit(ops.maximum(n.emit(ops.max(x, axes=axes, keepdims=keepdim)), n.operand(0, wide)))
    elif order == -math.inf:
        value = n.emit(ops.min(x, axes=axes, keepdims=keepdim))
    elif order == 0:
        value = n.emit(ops.sum(n.cast(n.cast(x, "bool"), wide), axes=axes, keepdims=keepdim))
    elif order == 1:
        value = n.emit(ops.sum(x, axes=axes, keepdims=keepdim))
    elif order == 2:
        value = n.emit(ops.l2_norm(x, axes=axes, keepdims=keepdim))
    else:
        powers = n.emit(ops.sum(n.emit(ops.power(x, n.operand(order, wide))), axes=axes, keepdims=keepdim))
        value = n.emit(ops.power(powers, n.operand(1.0 / order, wide)))
    return n.cast(value, dtype)


@torch_op("aten.linalg_vector_norm", "aten.norm", complex=True)
def norm(n: Node, self: Expr | Complex, ord: Any = 2, p: Any = None, dim: Dims = None, keepdim: bool = False,
         dtype: Any = None) -> Expr:  # fmt: skip
    order = float(p if p is not None else ord)
    if isinstance(self, Complex):
        self = n.emit(ops.l2_norm(self.parts, axes=(-1,)))
    return vector_norm(n, self, order, n.axes(self, dim), keepdim, n.dtype())


@torch_op("aten.dist")
def dist(n: Node, self: Expr, other: Expr, p: Any = 2) -> Expr:
    dtype = n.dtype()
    difference = n.emit(ops.subtract(n.cast(self, dtype), n.cast(other, dtype)))
    return vector_norm(n, difference, float(p), n.axes(difference, None), False, dtype)


@torch_op("aten.cdist", "aten._cdist_forward", "aten._euclidean_dist")
def cdist(n: Node, x1: Expr, x2: Expr, p: float = 2.0, compute_mode: int | None = None) -> Expr:
    """Distances of rows. compute_mode chooses between algorithms of equal results."""
    x2 = unify_dims(n.bb, x2, {n.rank(x2) - 1: n.shape_of(x1)[-1]})
    left = n.emit(ops.expand_dims(x1, axes=(n.rank(x1) - 1,)))
    right = n.emit(ops.expand_dims(x2, axes=(n.rank(x2) - 2,)))
    difference = n.emit(ops.subtract(left, right))
    return vector_norm(n, difference, float(p), (n.rank(difference) - 1,), False, n.dtype())


@torch_op("aten.pdist", "aten._pdist_forward")
def pdist(n: Node, self: Expr, p: float = 2.0) -> Expr:
    """Distances of the pairs of rows i < j, in the order of i, then j: those above the diagonal of all distances."""
    rows, count = n.shape_of(self)[0], n.shape()[0]
    left, right = (n.emit(ops.expand_dims(self, axes=(axis,))) for axis in (1, 0))
    difference = n.emit(ops.subtract(left, right))
    distances = vector_norm(n, difference, float(p), (2,), False, n.dtype())
    index = n.emit(ops.arange(n.operand(0, "int64"), n.operand(1, "int64"), (rows,)))
    is_above = n.emit(ops.less(n.reshape(index, (rows, sym(1))), index))
    kept = n.emit(ops.compress(distances, n.reshape(is_above, (rows * rows,))))
    return n.bb.match_shape(kept, (count,))


@torch_op("aten.logsumexp")
def logsumexp(n: Node, self: Expr, dim: Dims, keepdim: bool = False) -> Expr:
    return n.emit(ops.log_sum_exp(n.cast(self, n.dtype()), axes=n.axes(self, dim), keepdims=keepdim))


# Cumulative operators


def cumulative(n: Node, x: Expr, dim: int, op: Callable[..., Any]) -> Expr:
    x = n.cast(x, n.dtype())
    return n.emit(op(x, axis=n.axis(x, dim))) if n.rank(x) else x


@torch_op("aten.cumsum")
def cumsum(n: Node, self: Expr, dim: int, dtype: Any = None) -> Expr:
    return cumulative(n, self, dim, ops.cumsum)


@torch_op("aten.cumprod")
def cumprod(n: Node, self: Expr, dim: int, dtype: Any = None) -> Expr:
    return cumulative(n, self, dim, ops.cumprod)


@torch_op("aten.logcumsumexp")
def logcumsumexp(n: Node, self: Expr, dim: int) -> Expr:
    return cumulative(n, self, dim, ops.log_cumsum_exp)


@torch_op("aten.trace")
def trace(n: Node, self: Expr) -> Expr:
    x = n.cast(self, n.dtype())
    shape = n.shape_of(x)
    diagonal = n.emit(ops.cast(n.emit(ops.eye(shape)), dtype="bool"))
    return n.emit(ops.sum(n.emit(ops.where(diagonal, x, n.operand(0, n.dtype())))))
