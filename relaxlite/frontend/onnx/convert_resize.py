"""Converters of Resize and Upsample, with scales, sizes and regions of interest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from relaxlite.frontend.onnx.convert_shapes import normalize_axis
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.frontend.onnx.runtime_resize import for_all_axes, resize_by_scales, resize_region, scaled_sizes
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr
from relaxlite.ir.symbolic import SymExpr, as_int, smax, smin

Shape = tuple[SymExpr, ...]


@onnx_op("Upsample")
def upsample_1(n: Node) -> Result:
    scales = (1.0, 1.0, n.float("height_scale"), n.float("width_scale"))
    return _resize_before_11(n, scales)


@onnx_op("Upsample", since=7)
def upsample_7(n: Node) -> Result:
    return _resize_before_11(n, n.floats("scales"))


@onnx_op("Upsample", since=9)
@onnx_op("Resize", since=10)
def resize_10(n: Node) -> Result:
    scales = n.const(1)
    if scales is None:
        attrs = {"mode": _mode_before_11(n), "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        return resize_by_scales(n, n.input(1), range(n.rank()), attrs)
    return _resize_before_11(n, tuple(float(s) for s in scales.reshape(-1)))


def _resize_before_11(n: Node, scales: Sequence[float]) -> Result:
    """Resize before opset 11: asymmetric coordinates, rounded down."""
    mode = _mode_before_11(n)
    sizes = tuple(scaled_size(d, s) for d, s in zip(n.shape(), scales, strict=True))
    return ops.resize(
        n.input(0), sizes, mode=mode, scales=tuple(scales),
        coordinate_transformation_mode="asymmetric", nearest_mode="floor",
    )  # fmt: skip


def _mode_before_11(n: Node) -> str:
    mode = n.text("mode", "nearest")
    if mode not in ("nearest", "linear", "bilinear"):
        n.fail(f"attribute 'mode' must be nearest or linear, not {mode!r}")
    return "nearest" if mode == "nearest" else "linear"


def scaled_size(dim: SymExpr, scale: float) -> SymExpr:
    """Return floor(dim * scale), with the scale as the simplest fraction that rounds to the same float32."""
    simple = Fraction(scale).limit_denominator(1000)
    exact = simple if np.float32(float(simple)) == np.float32(scale) else Fraction(float(scale))
    return dim * exact.numerator // exact.denominator


@onnx_op("Resize", since=11)
def resize(n: Node) -> Result:
    """Resize; inputs: x, region of interest, scales, sizes; since opset 18 optionally of some axes only."""
    dims = n.shape()
    axes = tuple(normalize_axis(n, a, len(dims)) for a in n.ints("axes", None) or range(len(dims)))
    attrs: dict[str, Any] = {
        "mode": n.text("mode", "nearest"),
        "coordinate_transformation_mode": n.text("coordinate_transformation_mode", "half_pixel"),
        "nearest_mode": n.text("nearest_mode", "round_prefer_floor"),
        "cubic_coeff_a": n.float("cubic_coeff_a", -0.75),
        "exclude_outside": n.flag("exclude_outside"),
        "extrapolation_value": n.float("extrapolation_value", 0.0),
        "antialias": n.flag("antialias"),
    }
    if attrs["coordinate_transformation_mode"] == "tf_crop_and_resize" and n.const(1) is None:
        return _resize_runtime_region(n, axes, attrs)
    region = _region(n, axes) if attrs["coordinate_transformation_mode"] == "tf_crop_and_resize" else None
    policy = n.text("keep_aspect_ratio_policy", "stretch")
    if _has_elements(n, 2):
        if n.const(2) is None and n.resolver.ratios(n.input(2)) is None:
            if region is not None:
                n.fail("scales (input 2) must be known when the model is compiled where the region is")
            return resize_by_scales(n, n.input(2), axes, attrs)
        sizes, scales = _sizes_by_scales(n, axes, region)
        return ops.resize(n.input(0), sizes, scales=scales, roi=region, **attrs)
    sizes = _sizes_by_input(n, axes)
    if policy == "stretch":
        return ops.resize(n.input(0), sizes, roi=region, **attrs)
    sizes, scale = _keep_aspect(n, axes, tuple(sizes[a] for a in axes), policy)
    return ops.resize(n.input(0), sizes, scale, axes=axes, roi=region, **attrs)


def _resize_runtime_region(n: Node, axes: tuple[int, ...], attrs: Mapping[str, Any]) -> Result:
    """Resize a region that the model reads, of the size of the region times scales, or of given sizes."""
    roi, rank, count = n.input(1), n.rank(), len(axes)
    if n.text("keep_aspect_ratio_policy", "stretch") != "stretch":
        n.fail("keep_aspect_ratio_policy needs a region that is known when the model is compiled")
    if not _has_elements(n, 2):
        return resize_region(n, roi, _sizes_by_input(n, axes), axes, attrs)
    starts, ends = (
        for_all_axes(n, n.emit(ops.slice(roi, (k,), (count,), axes=(0,))), axes, rank, float(k > 0)) for k in (0, count)
    )
    sizes = scaled_sizes(n, n.input(2), axes, n.emit(ops.subtract(ends, starts)))
    return resize_region(n, roi, sizes, axes, attrs)


def _has_elements(n: Node, index: int) -> bool:
    """Whether an input is present and not an empty tensor."""
    x = n.optional(index)
    return x is not None and not any(as_int(d) == 0 for d in n.shape_of(x))


def _region(n: Node, axes: tuple[int, ...]) -> tuple[float, ...]:
    """Return the region of interest: starts, then ends, of every dimension."""
    roi = n.const(1) if n.optional(1) is not None else None
    if roi is None or roi.size != 2 * len(axes):
        n.fail("the region (input 1) of tf_crop_and_resize must be known when the model is compiled")
    rank, values = n.rank(), [float(v) for v in roi.reshape(-1)]
    region = [0.0] * rank + [1.0] * rank
    for k, axis in enumerate(axes):
        region[axis], region[rank + axis] = values[k], values[len(axes) + k]
    return tuple(region)


def _sizes_by_scales(
    n: Node, axes: tuple[int, ...], region: tuple[float, ...] | None
) -> tuple[Shape, tuple[float, ...] | None]:
    dims, factors = n.shape(), n.const(2)
    if factors is None:
        return _sizes_by_symbolic_scales(n, axes)
    if factors.size != len(axes):
        n.fail(f"scales has {factors.size} values for {len(axes)} axes")
    scales = [1.0] * len(dims)
    for axis, scale in zip(axes, factors.reshape(-1), strict=True):
        scales[axis] = float(scale)
    spans = [1.0] * len(dims) if region is None else [region[len(dims) + k] - region[k] for k in range(len(dims))]
    sizes = tuple(scaled_size(d, s * span) for d, s, span in zip(dims, scales, spans, strict=True))
    return sizes, tuple(scales)


def _sizes_by_symbolic_scales(n: Node, axes: tuple[int, ...]) -> tuple[Shape, None]:
    """Return sizes by scales that the model computes from sizes, as fractions of symbols."""
    dims, ratios = n.shape(), n.resolver.ratios(n.input(2))
    if ratios is None or ratios.size != len(axes):
        n.fail(
            "scales (input 2) must be known when the model is compiled, but they are computed from the model's inputs"
        )
    sizes = list(dims)
    for axis, ratio in zip(axes, ratios.reshape(-1), strict=True):
        sizes[axis] = (dims[axis] * ratio.num) // ratio.den
    return tuple(sizes), None


def _sizes_by_input(n: Node, axes: tuple[int, ...]) -> Shape:
    """Return the size of every dimension, by input 3 for `axes`."""
    targets = n.shape_values(3, lower=0)
    if len(targets) != len(axes):
        n.fail(f"sizes has {len(targets)} values for {len(axes)} axes")
    sizes = list(n.shape())
    for axis, size in zip(axes, targets, strict=True):
        sizes[axis] = size
    return tuple(sizes)


def _keep_aspect(n: Node, axes: tuple[int, ...], targets: Shape, policy: str) -> tuple[Shape, Expr]:
    """Return sizes by one scale for all axes, and that scale as a float32 tensor.

    The scale is the least (not_larger) or the greatest (not_smaller) of target / dim. Sizes are rounded half up. As in
    onnxruntime, coordinates follow the scale, not the rounded sizes.
    """
    if policy not in ("not_larger", "not_smaller"):
        n.fail(f"attribute 'keep_aspect_ratio_policy' must be stretch, not_larger or not_smaller, not {policy!r}")
    dims, sizes = n.shape(), list(n.shape())
    # round(d * min(s / e)) == min(round(d * s / e)): rounding is monotonic
    extreme = smin if policy == "not_larger" else smax
    for axis in axes:
        rounded = [(dims[axis] * s * 2 + dims[e]) // (dims[e] * 2) for e, s in zip(axes, targets, strict=True)]
        sizes[axis] = extreme(*rounded)
    target_tensor, dim_tensor = (
        n.emit(ops.cast(n.emit(ops.shape_to_tensor(values)), dtype="float32"))
        for values in (targets, tuple(dims[a] for a in axes))
    )
    reduced = ops.min if policy == "not_larger" else ops.max
    return tuple(sizes), n.emit(reduced(n.emit(ops.divide(target_tensor, dim_tensor)), axes=(0,)), "scale")
