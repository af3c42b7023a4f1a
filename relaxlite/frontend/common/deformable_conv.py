"""Deformable convolution (Dai et al., arXiv 1703.06211; Zhu et al., arXiv 1811.11168): bilinear im2col and a matmul."""

from __future__ import annotations

import math

import numpy as np

from relaxlite.errors import ImportModelError
from relaxlite.frontend.common.unify import unify_dims
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.symbolic import SymExpr, as_int, product
from relaxlite.ir.types import TensorType
from relaxlite.records import dataclass

Shape = tuple[SymExpr, ...]


@dataclass(frozen=True, slots=True)
class DeformableWindows:
    """Windows of a deformable convolution; `pads` are begins, then ends, of height and width."""

    kernel: tuple[int, int]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]

    def output_sizes(self, sizes: Shape) -> Shape:
        """Return the number of windows along height and width of a picture."""
        reach = [(self.kernel[k] - 1) * self.dilations[k] + 1 for k in (0, 1)]
        spans = [size + self.pads[k] + self.pads[k + 2] - reach[k] for k, size in enumerate(sizes)]
        return tuple(span // stride + 1 for span, stride in zip(spans, self.strides, strict=True))


def deformable_conv(
    bb: BlockBuilder, x: Expr, w: Expr, offset: Expr, mask: Expr | None, *, strides: tuple[int, ...],
    dilations: tuple[int, ...], pads: tuple[int, ...], groups: int, offset_groups: int,
) -> Expr:  # fmt: skip
    """Emit a convolution with data-dependent offsets of its taps.

    x (n, c, h, w), w (oc, c / groups, kh, kw), offset (n, og * kh * kw * 2, oh, ow) of y and x by turns, mask
    (n, og * kh * kw, oh, ow) or None. Raises ImportModelError unless the size of the kernel is known.
    """
    batch, channels, *spatial = _shape(x)
    sizes, (filters, _, *kernel_dims) = (spatial[0], spatial[1]), _shape(w)
    kernel = [as_int(k) for k in kernel_dims]
    if None in kernel:
        raise ImportModelError("the size of the kernel of a deformable convolution must be known")
    windows = DeformableWindows((kernel[0] or 0, kernel[1] or 0), strides, dilations, pads)
    taps = math.prod(windows.kernel)
    offset = unify_dims(bb, offset, dict(enumerate(windows.output_sizes(sizes), 2)))
    out = _shape(offset)[2:]
    grid = _sampling_grid(bb, offset, windows, sizes, offset_groups, _dtype(x))
    pictures = bb.emit(ops.reshape(x, (batch * offset_groups, channels // offset_groups, *sizes)))
    sampled: Expr = bb.emit(ops.grid_sample(pictures, grid, mode="linear", padding_mode="zeros", align_corners=False))
    if mask is not None:
        factors = bb.emit(ops.reshape(mask, (batch * offset_groups, 1, out[0] * taps, out[1])))
        sampled = bb.emit(ops.multiply(sampled, factors))
    depth = channels // groups * taps
    columns = bb.emit(ops.reshape(sampled, (batch, groups, depth, product(out))))
    weights = bb.emit(ops.reshape(w, (groups, filters // groups, depth)))
    return bb.emit(ops.reshape(bb.emit(ops.matmul(weights, columns)), (batch, filters, *out)))


def _sampling_grid(
    bb: BlockBuilder, offset: Expr, windows: DeformableWindows, sizes: tuple[SymExpr, SymExpr], offset_groups: int,
    dtype: str,
) -> Expr:  # fmt: skip
    """Emit the sampling positions of all taps and windows: (n * og, kh * kw * oh, ow, 2), x and y in -1..1."""
    batch, _, *out = _shape(offset)
    kernel, taps = windows.kernel, math.prod(windows.kernel)
    offset = bb.emit(ops.reshape(offset, (batch * offset_groups, taps, 2, *out)))
    coordinates = []
    for k in (1, 0):  # x, then y
        start, step = Constant.of(-windows.pads[k], dtype), Constant.of(windows.strides[k], dtype)
        along = bb.emit(ops.arange(start, step, (out[k],)))
        window = bb.emit(ops.reshape(along, (out[0], 1) if k == 0 else (1, out[1])))
        tap = np.indices(kernel)[k].reshape(taps, 1, 1) * windows.dilations[k]
        base = bb.emit(ops.add(window, Constant.of(tap, dtype)))
        shift = bb.emit(ops.squeeze(bb.emit(ops.slice(offset, (k,), (1,), axes=(2,))), axes=(2,)))
        position = bb.emit(ops.add(shift, base))
        size = bb.emit(ops.cast(bb.emit(ops.shape_to_tensor((sizes[k],))), dtype=dtype))
        one, two = Constant.of(1, dtype), Constant.of(2, dtype)
        doubled = bb.emit(ops.add(bb.emit(ops.multiply(position, two)), one))
        scaled = bb.emit(ops.subtract(bb.emit(ops.divide(doubled, size)), one))
        coordinates.append(bb.emit(ops.expand_dims(scaled, axes=(4,))))
    grid = bb.emit(ops.concat(*coordinates, axis=4))
    return bb.emit(ops.reshape(grid, (batch * offset_groups, out[0] * taps, out[1], 2)))


def _shape(x: Expr) -> Shape:
    assert isinstance(x.ty, TensorType) and x.ty.shape is not None
    return x.ty.shape


def _dtype(x: Expr) -> str:
    assert isinstance(x.ty, TensorType)
    return x.ty.dtype
