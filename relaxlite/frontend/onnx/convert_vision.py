"""Converters of image sampling at data-dependent coordinates, deformable convolution and Col2Im."""

from __future__ import annotations

import math

import numpy as np

from relaxlite.frontend.common.deformable_conv import deformable_conv
from relaxlite.frontend.common.unify import unify_dims
from relaxlite.frontend.onnx.convert_nn import kernel_of, per_axis, with_bias
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.symbolic import SymExpr, product, smax, sym

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
    """DeformConv; inputs: x, w, offset, bias, mask."""
    if n.rank() != 4:
        n.fail(f"DeformConv is supported for pictures (n, c, h, w) only, got {n.type()}")
    kernel_of(n)
    pads = n.ints("pads", None) or (0,) * 4
    result = deformable_conv(
        n.bb, n.input(0), n.input(1), n.input(2), n.optional(4), strides=per_axis(n, "strides", 2),
        dilations=per_axis(n, "dilations", 2), pads=pads, groups=n.int("group", 1),
        offset_groups=n.int("offset_group", 1),
    )  # fmt: skip
    bias = n.optional(3)
    return result if bias is None else with_bias(n, result, bias)


@onnx_op("Col2Im", since=18)
def col2im(n: Node) -> Result:
    """Col2Im: add up columns (n, c * block, positions) into images (n, c, image...)."""
    if n.const(1) is None or n.const(2) is None:
        return _col2im_runtime_shape(n)
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


def _col2im_runtime_shape(n: Node) -> Result:
    """Col2Im whose image or block has a shape that is known at run time only."""
    image, block = n.shape_values(1, lower=0), n.shape_values(2, lower=1)
    count = len(image)
    strides, dilations = per_axis(n, "strides", count), per_axis(n, "dilations", count)
    pads = n.ints("pads", None) or (0,) * (2 * count)
    padded = tuple(image[k] + pads[k] + pads[count + k] for k in range(count))
    windows = tuple((padded[k] - (block[k] - 1) * dilations[k] - 1) // strides[k] + 1 for k in range(count))
    taps = n.emit(ops.expand_dims(_places(n, block, padded, dilations), axes=(1,)))
    positions = n.emit(ops.add(taps, _places(n, windows, padded, strides)))
    batch, depth = n.shape()[0], n.shape()[1] // product(block)
    rows, total = batch * depth, product(block) * product(windows)
    columns = n.emit(ops.reshape(n.input(0), (rows, total)))
    indices = n.emit(ops.broadcast_to(n.emit(ops.reshape(positions, (1, total))), (rows, total)))
    zeros = n.emit(ops.full((rows, product(padded)), Constant.of(0, n.dtype())))
    summed = n.emit(ops.scatter_elements(zeros, indices, columns, axis=1, reduction="add"))
    padded_image = n.emit(ops.reshape(summed, (batch, depth, *padded)))
    return ops.slice(padded_image, pads[:count], image, axes=tuple(range(2, count + 2)))


def _places(n: Node, sizes: Shape, padded: Shape, steps: tuple[int, ...]) -> Expr:
    """Emit the positions, int64 (product(sizes),), of points that lie `steps` apart in a padded image."""
    zero, one = Constant.of(0, "int64"), Constant.of(1, "int64")
    numbers = n.emit(ops.arange(zero, one, (product(sizes),)))
    total: Expr = zero
    for k, (size, step) in enumerate(zip(sizes, steps, strict=True)):
        inner, row, extent = (
            n.emit(ops.reshape(n.emit(ops.shape_to_tensor((smax(value, 1),))), ()))
            for value in (product(sizes[k + 1 :]), product(padded[k + 1 :]) * step, size)
        )
        coordinate = n.emit(ops.floormod(n.emit(ops.truncdiv(numbers, inner)), extent))
        total = n.emit(ops.add(total, n.emit(ops.multiply(coordinate, row))))
    return total
