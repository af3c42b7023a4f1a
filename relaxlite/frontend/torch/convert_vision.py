"""Converters of sampling at data-dependent coordinates, and of torchvision's operators on regions and boxes."""

from __future__ import annotations

import math
from typing import Any

from relaxlite.frontend.common.deformable_conv import deformable_conv
from relaxlite.frontend.torch.convert_nn import channel_vector
from relaxlite.frontend.torch.node import Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr
from relaxlite.ir.symbolic import sym

_MODES = ("linear", "nearest", "cubic")
_PADDINGS = ("zeros", "border", "reflection")


@torch_op("aten.grid_sampler", "aten.grid_sampler_2d", "aten.grid_sampler_3d", "aten._grid_sampler_2d_cpu_fallback")
def grid_sampler(
    n: Node, input: Expr, grid: Expr, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Expr:
    return n.emit(
        ops.grid_sample(
            input, grid, mode=_MODES[interpolation_mode], padding_mode=_PADDINGS[padding_mode],
            align_corners=bool(align_corners),
        )
    )  # fmt: skip


@torch_op("aten.affine_grid_generator")
def affine_grid(n: Node, theta: Expr, size: Any, align_corners: bool) -> Expr:
    batch, _, *spatial = n.ints(size)
    theta = n.fit(theta, (batch, *n.shape_of(theta)[1:]))
    return n.emit(ops.affine_grid(theta, tuple(spatial), align_corners=bool(align_corners)))


@torch_op("torchvision.nms")
def nms(n: Node, dets: Expr, scores: Expr, iou_threshold: float) -> Expr:
    """Non-maximum suppression: int64 indices of the boxes that are kept, best first."""
    count = n.shape_of(dets)[0]
    order = n.emit(ops.argsort(scores, axis=0, descending=True))
    boxes = n.reshape(n.emit(ops.gather(dets, order, axis=0)), (sym(1), count, sym(4)))
    # ranks instead of scores: no score is below the threshold then, not even -inf
    ranks = n.emit(ops.arange(n.operand(0, "float32"), n.operand(-1, "float32"), (count,)))
    selected = n.emit(
        ops.non_max_suppression(
            n.cast(boxes, "float32"), n.reshape(ranks, (sym(1), sym(1), count)), n.operand(iou_threshold, "float32"),
            n.operand(-math.inf, "float32"), (count,),
        )
    )  # fmt: skip
    kept = n.symbols.fresh("kept")
    selected = n.bb.match_shape(selected, (kept, sym(3)))
    places = n.reshape(n.emit(ops.slice(selected, (2,), (1,), axes=(1,))), (kept,))
    return n.emit(ops.gather(order, places, axis=0))


def _regions(n: Node, rois: Expr) -> tuple[Expr, Expr]:
    """Return the corners (r, 4) and the picture (r,) of regions (r, 5)."""
    corners = n.emit(ops.slice(rois, (1,), (4,), axes=(1,)))
    picture = n.reshape(n.emit(ops.slice(rois, (0,), (1,), axes=(1,))), (n.shape_of(rois)[0],))
    return corners, n.cast(picture, "int64")


@torch_op("torchvision.roi_align")
def roi_align(
    n: Node, input: Expr, rois: Expr, spatial_scale: float, pooled_height: Any, pooled_width: Any, sampling_ratio: int,
    aligned: bool,
) -> Expr:  # fmt: skip
    wide = "float64" if n.dtype() == "float64" else "float32"
    corners, picture = _regions(n, n.cast(rois, wide))
    call = ops.roi_align(
        n.cast(input, wide), corners, picture, output=(int(pooled_height), int(pooled_width)),
        sampling_ratio=max(int(sampling_ratio), 0), spatial_scale=float(spatial_scale), half_pixel=bool(aligned),
    )  # fmt: skip
    return n.cast(n.emit(call), n.dtype())


@torch_op("torchvision.deform_conv2d")
def deform_conv2d(
    n: Node, input: Expr, weight: Expr, offset: Expr, mask: Expr, bias: Expr, stride_h: int, stride_w: int, pad_h: int,
    pad_w: int, dilation_h: int, dilation_w: int, groups: int, offset_groups: int, use_mask: bool,
) -> Expr:  # fmt: skip
    result = deformable_conv(
        n.bb, input, weight, offset, mask if use_mask else None, strides=(int(stride_h), int(stride_w)),
        dilations=(int(dilation_h), int(dilation_w)), pads=(int(pad_h), int(pad_w)) * 2, groups=int(groups),
        offset_groups=int(offset_groups),
    )  # fmt: skip
    return n.emit(ops.add(result, channel_vector(n, bias, 2)))
