"""Converters of image sampling at data-dependent coordinates, deformable convolution and Col2Im."""

from __future__ import annotations

import math

import numpy as np

from relaxlite.frontend.common.unify import unify_dims
from relaxlite.frontend.onnx.convert_linalg import emit_matmul
from relaxlite.frontend.onnx.convert_nn import kernel_of, per_axis, with_bias
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.symbolic import SymExpr, as_int, product, sym

Shape = tuple[SymExpr, ...]
_SAMPLE_MODES = {"bilinear": "linear", "linear": "linear", "bicubic": "cubic", "cubic": "cubic", "nearest": "nearest"}


@onnx_op("GridSample", since=16)
def grid_sample(n: Node) -> Result:
    mode = n.text("mode", "linear")
    if mode not in _SAMPLE_MODES:
        n.fail(f"attribute 'mode' must be one of {', '.join(_SAMPLE_MODES)}, not {mode!r}")
    padding = n.text("padding_mode", "zeros")
    corners = n.flag("align_corners")
    return ops.grid_sample(
        n.input(0), n.input(1), mode=_SAMPLE_MODES[mode], padding_mode=padding, align_corners=corners
    )


@onnx_op("AffineGrid", since=20)
def affine_grid(n: Node) -> Result:
    """AffineGrid; input 1 is the size of the image: n, c, spatial..."""
    batch, _, *sizes = n.shape_values(1, lower=0)
    theta = unify_dims(n.bb, n.input(0), {0: batch})
    return ops.affine_grid(theta, tuple(sizes), align_corners=n.flag("align_corners"))


@onnx_op("RoiAlign", since=10)
def roi_align_10(n: Node) -> Result:
    return _roi_align(n, half_pixel=False)


@onnx_op("RoiAlign", since=16)
def roi_align(n: Node) -> Result:
    mode = n.text("coordinate_transformation_mode", "half_pixel")
    if mode not in ("half_pixel", "output_half_pixel"):
        n.fail(f"attribute 'coordinate_transformation_mode' must be half_pixel or output_half_pixel, not {mode!r}")
    return _roi_align(n, half_pixel=mode == "half_pixel")


def _roi_align(n: Node, *, half_pixel: bool) -> Result:
    return ops.roi_align(
        n.input(0),
        n.input(1),
        n.input(2),
        output=(n.int("output_height", 1), n.int("output_width", 1)),
        mode=n.text("mode", "avg"),
        sampling_ratio=n.int("sampling_ratio", 0),
        spatial_scale=n.float("spatial_scale", 1.0),
        half_pixel=half_pixel,
    )


@onnx_op("DeformConv", since=19)
def deform_conv(n: Node) -> Result:
    """DeformConv: a convolution with data-dependent offsets of its taps, as bilinear im2col and a matmul.

    x (n, c, h, w), w (oc, c / groups, kh, kw), offset (n, og * kh * kw * 2, oh, ow), mask (n, og * kh * kw, oh, ow).
    """
    if n.rank() != 4:
        n.fail(f"DeformConv is supported for pictures (n, c, h, w) only, got {n.type()}")
    batch, channels, *sizes = n.shape()
    height, width = sizes
    groups, offset_groups = n.int("group", 1), n.int("offset_group", 1)
    filters, kernel = n.shape(1)[0], [as_int(k) or 0 for k in kernel_of(n)]
    if 0 in kernel:
        n.fail("the size of the kernel must be known")
    taps = math.prod(kernel)
    offset = unify_dims(n.bb, n.input(2), dict(enumerate(_output_sizes(n, sizes, kernel), 2)))
    out = n.shape_of(offset)[2:]
    grid = _sampling_grid(n, offset, (kernel[0], kernel[1]), (height, width), offset_groups)
    x = n.emit(ops.reshape(n.input(0), (batch * offset_groups, channels // offset_groups, *sizes)))
    sampled: Expr = n.emit(ops.grid_sample(x, grid, mode="linear", padding_mode="zeros", align_corners=False))
    if n.optional(4) is not None:
        mask = n.emit(ops.reshape(n.input(4), (batch * offset_groups, 1, out[0] * taps, out[1])))
        sampled = n.emit(ops.multiply(sampled, mask))
    columns = n.emit(ops.reshape(sampled, (batch, groups, channels // groups * taps, product(out))))
    weights = n.emit(ops.reshape(n.input(1), (groups, filters // groups, channels // groups * taps)))
    result = ops.reshape(emit_matmul(n, weights, columns), (batch, filters, *out))
    return with_bias(n, result, n.optional(3))


def _output_sizes(n: Node, sizes: list[SymExpr], kernel: list[int]) -> list[SymExpr]:
    strides, dilations, pads = per_axis(n, "strides", 2), per_axis(n, "dilations", 2), n.ints("pads", None) or (0,) * 4
    spans = [size + pads[k] + pads[k + 2] - (kernel[k] - 1) * dilations[k] - 1 for k, size in enumerate(sizes)]
    return [span // stride + 1 for span, stride in zip(spans, strides, strict=True)]


def _sampling_grid(
    n: Node, offset: Expr, kernel: tuple[int, int], sizes: tuple[SymExpr, SymExpr], offset_groups: int
) -> Expr:
    """Emit the sampling positions of all taps and windows: (n * og, kh * kw * oh, ow, 2), x and y in -1..1."""
    batch, _, *out = n.shape_of(offset)
    strides, dilations, pads = per_axis(n, "strides", 2), per_axis(n, "dilations", 2), n.ints("pads", None) or (0,) * 4
    taps = kernel[0] * kernel[1]
    offset = n.emit(ops.reshape(offset, (batch * offset_groups, taps, 2, *out)))
    coordinates = []
    for k in (1, 0):  # x, then y
        along = n.emit(ops.arange(_scalar_constant(n, -pads[k]), _scalar_constant(n, strides[k]), (out[k],)))
        window = n.emit(ops.reshape(along, (out[0], 1) if k == 0 else (1, out[1])))
        tap = np.indices(kernel)[k].reshape(taps, 1, 1) * dilations[k]
        base = n.emit(ops.add(window, Constant.of(tap, n.dtype())))
        shift = n.emit(ops.squeeze(n.emit(ops.slice(offset, (k,), (1,), axes=(2,))), axes=(2,)))
        position = n.emit(ops.add(shift, base))
        size = n.emit(ops.cast(n.emit(ops.shape_to_tensor((sizes[k],))), dtype=n.dtype()))
        doubled = n.emit(ops.add(n.emit(ops.multiply(position, _scalar_constant(n, 2))), _scalar_constant(n, 1)))
        scaled = n.emit(ops.subtract(n.emit(ops.divide(doubled, size)), _scalar_constant(n, 1)))
        coordinates.append(n.emit(ops.expand_dims(scaled, axes=(4,))))
    grid = n.emit(ops.concat(*coordinates, axis=4))
    return n.emit(ops.reshape(grid, (batch * offset_groups, out[0] * taps, out[1], 2)))


def _scalar_constant(n: Node, value: float) -> Constant:
    return Constant.of(value, n.dtype())


@onnx_op("Col2Im", since=18)
def col2im(n: Node) -> Result:
    """Col2Im: add up columns (n, c * block, positions) into images (n, c, image...)."""
    image, block = n.const_ints(1, "image_shape"), n.const_ints(2, "block_shape")
    count = len(image)
    strides, dilations = per_axis(n, "strides", count), per_axis(n, "dilations", count)
    pads = n.ints("pads", None) or (0,) * (2 * count)
    padded = [image[k] + pads[k] + pads[count + k] for k in range(count)]
    windows = [(padded[k] - dilations[k] * (block[k] - 1) - 1) // strides[k] + 1 for k in range(count)]
    positions = np.zeros((1,), np.int64)
    for k in range(count):  # of every tap (block...) and window (windows...) in the padded image
        tap = np.indices(block)[k].reshape(-1, 1) * dilations[k]
        window = np.indices(windows)[k].reshape(1, -1) * strides[k]
        positions = positions * padded[k] + tap + window
    batch, depth = n.shape()[0], n.shape()[1] // math.prod(block)
    rows, total = batch * depth, positions.size
    columns = n.emit(ops.reshape(n.input(0), (rows, sym(total))))
    indices = n.emit(ops.broadcast_to(Constant.of(positions.reshape(1, -1)), (rows, sym(total))))
    zeros = n.emit(ops.full((rows, sym(math.prod(padded))), Constant.of(0, n.dtype())))
    summed = n.emit(ops.scatter_elements(zeros, indices, columns, axis=1, reduction="add"))
    padded_image = n.emit(ops.reshape(summed, (batch, depth, *padded)))
    return ops.slice(padded_image, pads[:count], image, axes=tuple(range(2, count + 2)))
