"""Resizing by scales or a region that are known at run time only: one axis after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from relaxlite.frontend.onnx.node import Node
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.symbolic import SymExpr, product

Shape = tuple[SymExpr, ...]


def scaled_sizes(n: Node, scales: Expr, axes: Sequence[int], spans: Expr | None = None) -> Shape:
    """Return floor(dim * scale) of every dimension; `spans` (rank,): parts of the dimensions that are resized."""
    rank = n.rank()
    factors = n.emit(ops.cast(for_all_axes(n, scales, axes, rank, 1.0), dtype="float64"))
    if spans is not None:
        factors = n.emit(ops.multiply(factors, n.emit(ops.cast(spans, dtype="float64"))))
    dims = n.emit(ops.cast(n.emit(ops.shape_of(n.input(0))), dtype="float64"))
    sizes = n.emit(ops.cast(n.emit(ops.floor(n.emit(ops.multiply(dims, factors)))), dtype="int64"), "size")
    values = n.resolver.values(sizes, lower=0)
    return tuple(values[k] if k in axes else d for k, d in enumerate(n.shape()))


def for_all_axes(n: Node, values: Expr, axes: Sequence[int], rank: int, default: float) -> Expr:
    """Return (rank,): the values of the axes, `default` of the others."""
    if tuple(axes) == tuple(range(rank)):
        return values
    places = np.array([list(axes).index(k) if k in axes else 0 for k in range(rank)], np.int64)
    taken = n.emit(ops.gather(values, Constant.of(places), axis=0))
    is_named = Constant.of(np.array([k in axes for k in range(rank)]))
    return n.emit(ops.where(is_named, taken, Constant.of(default, n.type_of(values).dtype)))


def resize_by_scales(n: Node, scales: Expr, axes: Sequence[int], attrs: Mapping[str, Any]) -> Expr:
    """Resize the axes by scales, float32 (number of axes,), that the model reads."""
    sizes, result = scaled_sizes(n, scales, axes), n.input(0)
    for place, axis in enumerate(axes):
        dims = n.shape_of(result)
        target = (*dims[:axis], sizes[axis], *dims[axis + 1 :])
        scale = n.emit(ops.gather(scales, Constant.of(place, "int64"), axis=0))
        result = n.emit(ops.resize(result, target, scale, axes=(axis,), **attrs))
    return result


def resize_region(n: Node, roi: Expr, sizes: Shape, axes: Sequence[int], attrs: Mapping[str, Any]) -> Expr:
    """Resize a region, the starts and then the ends of the axes, that the model reads, as tf_crop_and_resize does."""
    if attrs["antialias"] or attrs["exclude_outside"]:
        n.fail("antialias and exclude_outside need a region that is known when the model is compiled")
    result = n.input(0)
    for place, axis in enumerate(axes):
        start, end = (n.emit(ops.gather(roi, Constant.of(k, "int64"), axis=0)) for k in (place, place + len(axes)))
        result = _resample(n, result, axis, sizes[axis], (start, end), attrs)
    return result


def _resample(n: Node, x: Expr, axis: int, out: SymExpr, region: tuple[Expr, Expr], attrs: Mapping[str, Any]) -> Expr:
    """Return x with `out` elements along an axis, at coordinates from the region's start to its end."""
    start, end = (n.emit(ops.cast(value, dtype="float32")) for value in region)
    last = _float(n, n.shape_of(x)[axis] - 1)
    steps = n.emit(ops.maximum(_float(n, out - 1), Constant.of(1.0, "float32")))
    positions = n.emit(ops.cast(n.emit(ops.arange(_int(0), _int(1), (out,))), dtype="float32"))
    extent = n.emit(ops.multiply(n.emit(ops.subtract(end, start)), last))
    moved = n.emit(ops.divide(n.emit(ops.multiply(positions, extent)), steps))
    many = n.emit(ops.add(n.emit(ops.multiply(start, last)), moved))
    centre = n.emit(ops.multiply(n.emit(ops.multiply(n.emit(ops.add(start, end)), last)), Constant.of(0.5, "float32")))
    is_single = n.emit(ops.less(_float(n, out), Constant.of(2.0, "float32")))
    at = n.emit(ops.where(is_single, centre, many), "coordinate")  # (out,)
    value = _interpolated(n, x, axis, at, last, attrs)
    is_low, is_high = n.emit(ops.less(at, Constant.of(0.0, "float32"))), n.emit(ops.less(last, at))
    outside = _along(n, n.emit(ops.logical_or(is_low, is_high)), axis, len(n.shape_of(x)))
    return n.emit(ops.where(outside, Constant.of(attrs["extrapolation_value"], n.type_of(x).dtype), value))


def _interpolated(n: Node, x: Expr, axis: int, at: Expr, last: Expr, attrs: Mapping[str, Any]) -> Expr:
    """Return the weighted sum of the neighbours of each coordinate."""
    rank, dtype = len(n.shape_of(x)), n.type_of(x).dtype
    total: Expr | None = None
    for index, weight in _taps(n, at, attrs):
        low = n.emit(ops.maximum(index, Constant.of(0.0, "float32")))
        clamped = n.emit(ops.cast(n.emit(ops.minimum(low, last)), dtype="int64"))
        part = n.emit(ops.gather(x, clamped, axis=axis))
        if weight is None:
            return part
        part = n.emit(ops.multiply(part, _along(n, n.emit(ops.cast(weight, dtype=dtype)), axis, rank)))
        total = part if total is None else n.emit(ops.add(total, part))
    assert total is not None
    return total


def _taps(n: Node, at: Expr, attrs: Mapping[str, Any]) -> list[tuple[Expr, Expr | None]]:
    """Return (index, weight) of each neighbour, both float32 (out,); weight None: the only one."""
    if attrs["mode"] == "nearest":
        return [(_nearest(n, at, attrs["nearest_mode"]), None)]
    floor = n.emit(ops.floor(at))
    fraction = n.emit(ops.subtract(at, floor))
    is_cubic = attrs["mode"] == "cubic"
    taps: list[tuple[Expr, Expr | None]] = []
    for offset in (-1, 0, 1, 2) if is_cubic else (0, 1):
        shift = Constant.of(float(offset), "float32")
        distance = n.emit(ops.abs(n.emit(ops.subtract(fraction, shift))))
        weight = (
            _cubic(n, distance, attrs["cubic_coeff_a"], is_inner=offset in (0, 1)) if is_cubic else _linear(n, distance)
        )
        taps.append((n.emit(ops.add(floor, shift)), weight))
    return taps


def _linear(n: Node, distance: Expr) -> Expr:
    return n.emit(ops.subtract(Constant.of(1.0, "float32"), distance))


def _cubic(n: Node, distance: Expr, a: float, *, is_inner: bool) -> Expr:
    """Return Keys' weights: (a + 2) d^3 - (a + 3) d^2 + 1 of inner neighbours, a d^3 - 5a d^2 + 8a d - 4a of others."""
    terms = (a + 2, -(a + 3), 0.0, 1.0) if is_inner else (a, -5 * a, 8 * a, -4 * a)
    value: Expr = Constant.of(terms[0], "float32")
    for term in terms[1:]:
        value = n.emit(ops.add(n.emit(ops.multiply(value, distance)), Constant.of(term, "float32")))
    return value


def _nearest(n: Node, at: Expr, rounding: str) -> Expr:
    half = Constant.of(0.5, "float32")
    if rounding == "floor":
        return n.emit(ops.floor(at))
    if rounding == "ceil":
        return n.emit(ops.ceil(at))
    if rounding == "round_prefer_ceil":
        return n.emit(ops.floor(n.emit(ops.add(at, half))))
    return n.emit(ops.ceil(n.emit(ops.subtract(at, half))))


def _along(n: Node, x: Expr, axis: int, rank: int) -> Expr:
    """Return a vector as a tensor of this rank, along an axis."""
    size = product(n.shape_of(x))
    return n.emit(ops.reshape(x, tuple(size if k == axis else size * 0 + 1 for k in range(rank))))


def _float(n: Node, value: SymExpr) -> Expr:
    scalar = n.emit(ops.reshape(n.emit(ops.shape_to_tensor((value,))), ()))
    return n.emit(ops.cast(scalar, dtype="float32"))


def _int(value: int) -> Expr:
    return Constant.of(value, "int64")
