"""Converters of pools: maxima, means, adaptive and fractional windows, and the inverse of maximum pooling."""

from __future__ import annotations

import math
from typing import Any

from relaxlite.frontend.torch.convert_nn import batched, per_axis, unbatched
from relaxlite.frontend.torch.node import Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import as_int, product, smax, sym


def _spatial(n: Node) -> int:
    """Return the number of spatial dimensions, which the operator's name tells."""
    return next(d for d in (1, 2, 3) if f"{d}d" in n.target)


def _windows(n: Node, kernel: Any, stride: Any, dilation: Any, ceil: bool) -> dict[str, Any]:
    spatial = _spatial(n)
    size = per_axis(kernel, spatial)
    return {
        "kernel": size,
        "strides": size if stride is None or stride == [] else per_axis(stride, spatial),
        "dilations": per_axis(dilation, spatial),
        "ceil_mode": bool(ceil),
    }


@torch_op("aten.max_pool1d", "aten.max_pool2d", "aten.max_pool3d")
def max_pool(
    n: Node, self: Expr, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> Expr:  # fmt: skip
    spatial = _spatial(n)
    x, was_added = batched(n, self, spatial + 2)
    windows = _windows(n, kernel_size, stride, dilation, ceil_mode)
    return unbatched(n, n.emit(ops.max_pool(x, per_axis(padding, spatial) * 2, **windows)), was_added)


@torch_op("aten.max_pool1d_with_indices", "aten.max_pool2d_with_indices", "aten.max_pool3d_with_indices")
def max_pool_with_indices(
    n: Node, self: Expr, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[Expr | None, ...]:  # fmt: skip
    """Return maxima, and the index of each in the flattened plane of its channel."""
    spatial = _spatial(n)
    x, was_added = batched(n, self, spatial + 2)
    windows = _windows(n, kernel_size, stride, dilation, ceil_mode)
    pads = per_axis(padding, spatial) * 2
    if not n.wants(1):
        return unbatched(n, n.emit(ops.max_pool(x, pads, **windows)), was_added), None
    values, places = n.fields(ops.max_pool_with_indices(x, pads, **windows))
    plane = smax(product(n.shape_of(x)[2:]), 1)
    places = n.emit(ops.floormod(places, n.operand(plane, "int64")))
    return unbatched(n, values, was_added), unbatched(n, places, was_added)


@torch_op("aten.avg_pool1d", "aten.avg_pool2d", "aten.avg_pool3d")
def avg_pool(
    n: Node, self: Expr, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Expr:  # fmt: skip
    x, was_added = batched(n, self, _spatial(n) + 2)
    windows = _windows(n, kernel_size, stride, 1, ceil_mode)
    pads = per_axis(padding, _spatial(n)) * 2
    if divisor_override is None:
        result = ops.avg_pool(x, pads, count_include_pad=bool(count_include_pad), **windows)
        return unbatched(n, n.emit(result), was_added)
    return unbatched(n, _sums(n, x, pads, windows, divisor_override), was_added)


def _sums(n: Node, x: Expr, pads: tuple[int, ...], windows: dict[str, Any], divisor: int) -> Expr:
    """Return the sum of each window over a divisor, as the mean of whole windows of zero-padded x."""
    kernel, strides, count = windows["kernel"], windows["strides"], len(windows["kernel"])
    ends = []
    for k, (size, out) in enumerate(zip(n.shape_of(x)[2:], n.shape()[-count:], strict=True)):
        reach = (out - 1) * strides[k] + kernel[k] - size - pads[k]  # the last window may end beyond the padding
        ends.append(reach if PROVER.can_prove_le(0, reach) else smax(reach, 0))
    begins = (sym(0), sym(0), *map(sym, pads[:count]))
    padded = n.emit(ops.pad(x, begins, (sym(0), sym(0), *ends)))
    no_pads = (0,) * (2 * count)
    means = n.emit(ops.avg_pool(padded, no_pads, **{**windows, "ceil_mode": False}))
    return n.emit(ops.multiply(means, n.operand(math.prod(kernel) / divisor, n.dtype())))


@torch_op("aten.adaptive_avg_pool1d", "aten.adaptive_avg_pool2d", "aten.adaptive_avg_pool3d",
          "aten._adaptive_avg_pool2d", "aten._adaptive_avg_pool3d")  # fmt: skip
def adaptive_avg_pool(n: Node, self: Expr, output_size: Any) -> Expr:
    spatial = _spatial(n)
    sizes, counts = n.shape_of(self)[-spatial:], n.shape()[-spatial:]
    if all(as_int(c) == 1 for c in counts):
        axes = tuple(range(n.rank(self) - spatial, n.rank(self)))
        return n.emit(ops.mean(self, axes=axes, keepdims=True))
    windows = [as_int(s // c) if as_int(c) and n.proves_equal(s // c * c, s) else None
               for s, c in zip(sizes, counts, strict=True)]  # fmt: skip
    if all(windows):  # windows of one size, which do not overlap
        x, was_added = batched(n, self, spatial + 2)
        call = ops.avg_pool(x, (0,) * (2 * spatial), kernel=tuple(windows), strides=tuple(windows))
        return unbatched(n, n.emit(call), was_added)
    return n.emit(ops.adaptive_avg_pool(self, counts))


@torch_op("aten.adaptive_max_pool1d", "aten.adaptive_max_pool2d", "aten.adaptive_max_pool3d")
def adaptive_max_pool(n: Node, self: Expr, output_size: Any) -> tuple[Expr, ...]:
    return n.fields(ops.adaptive_max_pool(self, n.shape()[-_spatial(n) :]))


@torch_op("aten.fractional_max_pool2d", "aten.fractional_max_pool3d")
def fractional_max_pool(
    n: Node, self: Expr, kernel_size: Any, output_size: Any, random_samples: Expr
) -> tuple[Expr, ...]:
    """Maxima of windows whose begins follow random sequences of each sample and channel (Graham, arXiv 1412.6071)."""
    spatial = _spatial(n)
    x, was_added = batched(n, self, spatial + 2)
    kernel, outer, sizes = per_axis(kernel_size, spatial), n.shape_of(x)[:2], n.shape_of(x)[2:]
    counts, dtype = n.shape()[-spatial:], n.dtype()
    samples, _ = batched(n, random_samples, 3)
    place: Expr = n.operand(0, "int64")
    for k, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        column = 1 - k if spatial == 2 else k  # torch's order: width, height; or depth, height, width
        sample = n.emit(ops.slice(samples, (column,), (1,), axes=(2,)))
        begins = _fractional_begins(n, n.cast(sample, dtype), size, count, kernel[k], dtype)  # (n, c, count)
        shape = (*outer, *((count if j == k else sym(1)) for j in range(spatial)), *(sym(1),) * spatial)
        taps = n.emit(ops.arange(n.operand(0, "int64"), n.operand(1, "int64"), (kernel[k],)))
        tap_shape = (*(sym(1),) * (2 + spatial), *((sym(kernel[k]) if j == k else sym(1)) for j in range(spatial)))
        along = n.emit(ops.add(n.reshape(begins, shape), n.reshape(taps, tap_shape)))
        place = n.emit(ops.add(n.emit(ops.multiply(place, n.operand(size, "int64"))), along))
    flat = n.reshape(place, (*outer, product(counts) * math.prod(kernel)))
    elements: Expr = n.emit(ops.gather_elements(n.reshape(x, (*outer, product(sizes))), flat, axis=2))
    per_window = (*outer, product(counts), sym(math.prod(kernel)))
    elements, flat = n.reshape(elements, per_window), n.reshape(flat, per_window)
    best = n.emit(ops.argmax(elements, axis=3, keepdims=True))
    results = [n.emit(ops.gather_elements(v, best, axis=3)) for v in (elements, flat)]
    return tuple(unbatched(n, n.reshape(r, (*outer, *counts)), was_added) for r in results)


def _fractional_begins(n: Node, sample: Expr, size: Any, count: Any, kernel: int, dtype: str) -> Expr:
    """Return where windows begin: floor((i + u) * alpha) - floor(u * alpha), the last at the end: (n, c, count)."""
    room = n.operand(size - kernel, dtype)
    steps = n.operand(smax(count - 1, 1), dtype)
    alpha = n.emit(ops.divide(room, steps))
    index = n.emit(ops.arange(n.operand(0, dtype), n.operand(1, dtype), (count,)))
    ahead = n.emit(ops.trunc(n.emit(ops.multiply(n.emit(ops.add(index, sample)), alpha))))
    begins = n.emit(ops.subtract(ahead, n.emit(ops.trunc(n.emit(ops.multiply(sample, alpha))))))
    is_last = n.emit(ops.equal(index, n.operand(count - 1, dtype)))
    return n.cast(n.emit(ops.where(is_last, room, begins)), "int64")


@torch_op("aten.max_unpool2d", "aten.max_unpool3d")
def max_unpool(
    n: Node, self: Expr, indices: Expr, output_size: Any, stride: Any = None, padding: Any = None
) -> Expr:  # fmt: skip
    """Set the elements at the indices in the flattened plane of each channel, of zeros."""
    spatial = _spatial(n)
    outer, rest = n.shape_of(self)[:-spatial], product(n.shape()[-spatial:])
    planes, count = product(outer), product(n.shape_of(self)[-spatial:])
    values, places = (n.reshape(v, (planes, count)) for v in (self, indices))
    zeros = n.full((planes, rest), 0, n.dtype())
    return n.reshape(n.emit(ops.scatter_elements(zeros, places, values, axis=1)), n.shape())


@torch_op("aten.max_pool2d_with_indices_backward", "aten.max_pool3d_with_indices_backward")
def max_pool_backward(
    n: Node, grad_output: Expr, self: Expr, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool,
    indices: Expr,
) -> Expr:  # fmt: skip
    """Add the gradient of each maximum at its index in the flattened plane of its channel."""
    spatial = _spatial(n)
    outer, rest = n.shape()[:-spatial], product(n.shape()[-spatial:])
    planes, count = product(outer), product(n.shape_of(grad_output)[-spatial:])
    values, places = (n.reshape(v, (planes, count)) for v in (grad_output, indices))
    zeros = n.full((planes, rest), 0, n.dtype())
    added = n.emit(ops.scatter_elements(zeros, places, values, axis=1, reduction="add"))
    return n.reshape(added, n.shape())
