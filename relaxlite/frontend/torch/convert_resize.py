"""Converters of upsampling: nearest, linear and cubic, with and without antialiasing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relaxlite import dtypes
from relaxlite.frontend.torch.node import Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import SymExpr, as_int

_MODES = {"linear": "linear", "bilinear": "linear", "trilinear": "linear", "bicubic": "cubic"}


def _spatial(n: Node) -> int:
    return int(next(c for c in n.target if c.isdigit()))


def _factors(n: Node, given: Sequence[Any] | None, single: Sequence[Any]) -> list[float | None]:
    """Return the scale of each spatial dimension, None where the sizes give it.

    Torch maps coordinates by the scale that the user gave, not by the quotient of the sizes, which are rounded.
    """
    spatial = _spatial(n)
    values = list(given) if given is not None else [None, *single][-spatial:]
    if any(v is not None and not isinstance(v, int | float) for v in values):
        n.fail("interpolation by a scale that depends on sizes is not supported; pass recompute_scale_factor=True")
    return [None if v is None or v <= 0 else float(v) for v in values]


@torch_op("aten.upsample_nearest1d", "aten.upsample_nearest2d", "aten.upsample_nearest3d",
          "aten._upsample_nearest_exact1d", "aten._upsample_nearest_exact2d",
          "aten._upsample_nearest_exact3d")  # fmt: skip
def upsample_nearest(
    n: Node, self: Expr, output_size: Any = None, scale_factors: Any = None, scales: Any = None, scales_d: Any = None,
    scales_h: Any = None, scales_w: Any = None,
) -> Expr:  # fmt: skip
    width = scales if _spatial(n) == 1 else scales_w
    factors = _factors(n, scale_factors, [scales_d, scales_h, width])
    spatial, target = _spatial(n), list(n.shape())
    is_exact, x = "exact" in n.target, self
    sizes = list(n.shape_of(self))
    for k in range(2, 2 + spatial):  # whole factors by one resize, other dimensions by a gather each
        if _is_whole(n, sizes[k], target[k], factors[k - 2]):
            sizes[k] = target[k]
    attrs = {
        "coordinate_transformation_mode": "half_pixel" if is_exact else "asymmetric",
        "nearest_mode": "round_prefer_ceil" if is_exact else "floor",
    }
    x = x if sizes == list(n.shape_of(self)) else n.emit(ops.resize(x, tuple(sizes), **attrs))
    for k in range(2, 2 + spatial):
        if sizes[k] is not target[k]:
            places = _nearest(n, sizes[k], target[k], factors[k - 2])
            x = n.emit(ops.gather(x, places, axis=k))
    return x


def _is_whole(n: Node, size: SymExpr, out: SymExpr, factor: float | None) -> bool:
    """Whether a dimension is enlarged by a whole factor, which leaves nothing to round."""
    quotient = 1 if PROVER.can_prove_equal(size, out) else as_int(out // size) if as_int(size) != 0 else None
    if not quotient or not PROVER.can_prove_equal(size * quotient, out):
        return False
    return factor in (None, quotient) or (_has_shortcuts(n) and quotient <= 2)


def _has_shortcuts(n: Node) -> bool:
    """Whether the operator copies equal sizes, and doubles sizes, whatever scale is given."""
    return n.target.startswith("aten.upsample_nearest2d")


def _nearest(n: Node, size: SymExpr, out: SymExpr, factor: float | None) -> Expr:
    """Return the source of each element, floor((o + offset) * scale), with the roundings of torch."""
    old, new = n.operand(size, "float32"), n.operand(out, "float32")
    scale: Expr = n.emit(ops.divide(old, new))
    if factor is not None:
        quotient, scale = scale, n.operand(1.0 / factor, "float32")
        for whole in (1, 2) if _has_shortcuts(n) else ():
            is_whole = n.emit(ops.equal(n.operand(size * whole, "int64"), n.operand(out, "int64")))
            scale = n.emit(ops.where(is_whole, quotient, scale))
    begin = 0.5 if "exact" in n.target else 0.0
    index = n.emit(ops.arange(n.operand(begin, "float32"), n.operand(1, "float32"), (out,)))
    place = n.cast(n.emit(ops.floor(n.emit(ops.multiply(index, scale)))), "int64")
    return n.emit(ops.minimum(place, n.operand(size - 1, "int64")))


@torch_op("aten.upsample_linear1d", "aten.upsample_bilinear2d", "aten.upsample_trilinear3d", "aten.upsample_bicubic2d",
          "aten._upsample_bilinear2d_aa", "aten._upsample_bicubic2d_aa")  # fmt: skip
def upsample(
    n: Node, self: Expr, output_size: Any = None, align_corners: bool = False, scale_factors: Any = None,
    scales: Any = None, scales_d: Any = None, scales_h: Any = None, scales_w: Any = None,
) -> Expr:  # fmt: skip
    if not dtypes.is_float(n.dtype()):
        n.fail(f"interpolation of {n.dtype()} between elements rounds in a way of its own; convert the input to floats")
    name, target = n.target.split(".")[1], n.shape()
    is_antialiased = name.endswith("_aa")
    kind = next(mode for key, mode in _MODES.items() if f"upsample_{key}" in name)
    attrs: dict[str, Any] = {
        "mode": kind,
        "coordinate_transformation_mode": "align_corners" if align_corners and not is_antialiased else "half_pixel",
        "antialias": is_antialiased,
        "exclude_outside": is_antialiased,
    }
    if kind == "cubic":
        attrs["cubic_coeff_a"] = -0.5 if is_antialiased else -0.75
    if is_antialiased and align_corners:
        if kind != "linear":
            n.fail("antialiased cubic interpolation with align_corners is not supported")
        return _resize_between_corners(n, self)
    width, x = scales if _spatial(n) == 1 else scales_w, self
    factors = [] if align_corners else _factors(n, scale_factors, [scales_d, scales_h, width])
    if not any(f is not None for f in factors):
        return n.emit(ops.resize(self, target, **attrs))
    copies_equal_sizes = kind == "linear" or is_antialiased  # whatever scale is given
    for k, factor in enumerate(factors, 2):
        x = _resize_axis(n, x, k, target[k], factor, attrs, copies_equal_sizes=copies_equal_sizes)
    return x


def _resize_between_corners(n: Node, x: Expr) -> Expr:
    """Resize (b, c, h, w) linearly, antialiased, by products with the weights of rows and of columns."""
    (*_, height, width), (*_, rows, columns) = n.shape_of(x), n.shape()
    x = n.emit(ops.matmul(_triangles(n, height, rows), n.cast(x, "float32")))
    weights = n.emit(ops.transpose(_triangles(n, width, columns)))
    return n.cast(n.emit(ops.matmul(x, weights)), n.dtype())


def _triangles(n: Node, size: SymExpr, out: SymExpr) -> Expr:
    """Return the weights (out, size) of antialiased linear interpolation whose steps are those between corners.

    As in torch, elements are centered half a step behind their corner: at (o + 1/2) * step.
    """

    def real(value: Any) -> Expr:
        return n.operand(value, "float32")

    def centers(count: SymExpr) -> Expr:
        return n.emit(ops.arange(real(0.5), real(1), (count,)))

    last = real(out - 1)
    quotient = n.emit(ops.divide(real(size - 1), n.emit(ops.maximum(last, real(1)))))
    step = n.emit(ops.where(n.emit(ops.equal(last, real(0))), real(0), quotient))
    places = n.emit(ops.expand_dims(n.emit(ops.multiply(centers(out), step)), axes=(1,)))
    distance = n.emit(ops.abs(n.emit(ops.subtract(centers(size), places))))
    share = n.emit(ops.divide(distance, n.emit(ops.maximum(step, real(1)))))
    weights = n.emit(ops.maximum(n.emit(ops.subtract(real(1), share)), real(0)))
    total = n.emit(ops.sum(weights, axes=(1,), keepdims=True))
    return n.emit(ops.divide(weights, n.emit(ops.where(n.emit(ops.equal(total, real(0))), real(1), total))))


def _resize_axis(
    n: Node, x: Expr, axis: int, out: SymExpr, factor: float | None, attrs: dict[str, Any], *, copies_equal_sizes: bool
) -> Expr:
    """Resize one dimension by a scale, or by the quotient of its sizes."""
    shape = n.shape_of(x)
    size = shape[axis]
    target = (*shape[:axis], out, *shape[axis + 1 :])
    if PROVER.can_prove_equal(size, out) and (copies_equal_sizes or factor in (None, 1.0)):
        return x
    if factor is None:
        return n.emit(ops.resize(x, target, **attrs))
    if not copies_equal_sizes or not 0.5 < factor < 2 or PROVER.can_prove_ne(size, out):
        scales = tuple(factor if k == axis else 1.0 for k in range(len(shape)))
        return n.emit(ops.resize(x, target, scales=scales, **attrs))
    is_equal = n.emit(ops.equal(n.operand(size, "int64"), n.operand(out, "int64")))
    scale = n.emit(ops.where(is_equal, n.operand(1, "float32"), n.operand(factor, "float32")))
    return n.emit(ops.resize(x, target, scale, axes=(axis,), **attrs))
