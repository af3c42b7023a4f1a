"""Converters of convolutions, pooling and dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from relaxlite.frontend.common.unify import unify_dims
from relaxlite.frontend.torch.node import Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr
from relaxlite.ir.symbolic import SymExpr, as_int, sym


def per_axis(values: Any, count: int) -> tuple[int, ...]:
    """Return one integer for each spatial axis, of a number or a list of one or `count`."""
    items = list(values) if isinstance(values, tuple | list) else [values]
    return tuple(int(v) for v in (items * count if len(items) == 1 else items))


def batched(n: Node, x: Expr, rank: int) -> tuple[Expr, bool]:
    """Return x with a leading batch of 1 where it has none, and whether that was added."""
    if n.rank(x) == rank:
        return x, False
    return n.emit(ops.expand_dims(x, axes=(0,))), True


def unbatched(n: Node, x: Expr, was_added: bool) -> Expr:
    """Return x without the batch that `batched` added."""
    return n.emit(ops.squeeze(x, axes=(0,))) if was_added else x


def convolve(
    n: Node, x: Expr, w: Expr, bias: Expr | None, strides: Any, pads: Sequence[Any], dilations: Any, groups: int
) -> Expr:
    """Emit a convolution with padding (begin of each axis, then ends), in the type of the result."""
    dtype, spatial = n.dtype(), n.rank(w) - 2
    x, was_added = batched(n, n.cast(x, dtype), spatial + 2)
    x = unify_dims(n.bb, x, {1: n.shape_of(w)[1] * groups})
    call = ops.conv(
        x, n.cast(w, dtype), tuple(pads), strides=per_axis(strides, spatial), dilations=per_axis(dilations, spatial),
        groups=int(groups),
    )  # fmt: skip
    result: Expr = n.emit(call)
    if bias is not None:
        result = n.emit(ops.add(result, channel_vector(n, n.cast(bias, dtype), spatial)))
    return unbatched(n, result, was_added)


def channel_vector(n: Node, bias: Expr, spatial: int) -> Expr:
    """Return a vector of the channels as (channels, 1, ...)."""
    return n.reshape(bias, (n.shape_of(bias)[0], *(sym(1),) * spatial))


@torch_op("aten.conv1d", "aten.conv2d", "aten.conv3d")
def conv(
    n: Node, input: Expr, weight: Expr, bias: Expr | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Expr:  # fmt: skip
    spatial = n.rank(weight) - 2
    if isinstance(padding, str):
        pads = _named_padding(n, padding, n.shape_of(weight)[2:], per_axis(dilation, spatial))
    else:
        pads = per_axis(padding, spatial) * 2
    return convolve(n, input, weight, bias, stride, pads, dilation, groups)


def _named_padding(n: Node, name: str, kernel: Sequence[SymExpr], dilations: Sequence[int]) -> tuple[int, ...]:
    if name == "valid":
        return (0,) * (2 * len(kernel))
    totals = [d * ((as_int(k) or n.fail("padding='same' needs a constant kernel")) - 1) for k, d in
              zip(kernel, dilations, strict=True)]  # fmt: skip
    return tuple(t // 2 for t in totals) + tuple(t - t // 2 for t in totals)


@torch_op("aten.convolution", "aten._convolution")
def convolution(
    n: Node, input: Expr, weight: Expr, bias: Expr | None, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int, benchmark: bool = False, deterministic: bool = False, cudnn_enabled: bool = False,
    allow_tf32: bool = False,
) -> Expr:  # fmt: skip
    if transposed:
        return conv_transpose(n, input, weight, bias, stride, padding, output_padding, groups, dilation)
    return convolve(n, input, weight, bias, stride, per_axis(padding, n.rank(weight) - 2) * 2, dilation, groups)


@torch_op("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d")
def conv_transpose(
    n: Node, input: Expr, weight: Expr, bias: Expr | None = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Expr:  # fmt: skip
    dtype, spatial = n.dtype(), n.rank(weight) - 2
    x, was_added = batched(n, n.cast(input, dtype), spatial + 2)
    call = ops.conv_transpose(
        unify_dims(n.bb, x, {1: n.shape_of(weight)[0]}), n.cast(weight, dtype), per_axis(padding, spatial) * 2,
        strides=per_axis(stride, spatial), dilations=per_axis(dilation, spatial), groups=int(groups),
        output_padding=per_axis(output_padding, spatial),
    )  # fmt: skip
    result: Expr = n.emit(call)
    if bias is not None:
        result = n.emit(ops.add(result, channel_vector(n, n.cast(bias, dtype), spatial)))
    return unbatched(n, result, was_added)


# pooling


def _pool_spatial(n: Node) -> int:
    return next(d for d in (1, 2, 3) if f"{d}d" in n.target)


def _windows(n: Node, x: Expr, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> dict[str, Any]:
    spatial = _pool_spatial(n)
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
    spatial = _pool_spatial(n)
    x, was_added = batched(n, self, spatial + 2)
    windows = _windows(n, x, kernel_size, stride, padding, dilation, ceil_mode)
    return unbatched(n, n.emit(ops.max_pool(x, per_axis(padding, spatial) * 2, **windows)), was_added)


@torch_op("aten.max_pool1d_with_indices", "aten.max_pool2d_with_indices", "aten.max_pool3d_with_indices")
def max_pool_with_indices(
    n: Node, self: Expr, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[Expr, ...]:  # fmt: skip
    """Return maxima, and the index of each in the flattened plane of its channel."""
    spatial = _pool_spatial(n)
    x, was_added = batched(n, self, spatial + 2)
    windows = _windows(n, x, kernel_size, stride, padding, dilation, ceil_mode)
    pads = per_axis(padding, spatial) * 2
    if not n.wants(1):
        return unbatched(n, n.emit(ops.max_pool(x, pads, **windows)), was_added), n.full((0,), 0, "int64")
    values, places = n.fields(ops.max_pool_with_indices(x, pads, **windows))
    plane = sym(1)
    for size in n.shape_of(x)[2:]:
        plane = plane * size
    places = n.emit(ops.floormod(places, n.symbols.tensor(plane, "int64")))
    return unbatched(n, values, was_added), unbatched(n, places, was_added)


@torch_op("aten.avg_pool1d", "aten.avg_pool2d", "aten.avg_pool3d")
def avg_pool(
    n: Node, self: Expr, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Expr:  # fmt: skip
    spatial = _pool_spatial(n)
    x, was_added = batched(n, self, spatial + 2)
    windows = _windows(n, x, kernel_size, stride, padding, 1, ceil_mode)
    pads = per_axis(padding, spatial) * 2
    if divisor_override is not None:
        count = float(np.prod(windows["kernel"]))
        if ceil_mode:
            n.fail("avg_pool with divisor_override and ceil_mode is not supported")
        means = n.emit(ops.avg_pool(x, pads, count_include_pad=True, **windows))
        scaled = n.emit(ops.multiply(means, n.operand(count / divisor_override, n.dtype())))
        return unbatched(n, scaled, was_added)
    result = ops.avg_pool(x, pads, count_include_pad=bool(count_include_pad), **windows)
    return unbatched(n, n.emit(result), was_added)


@torch_op("aten.adaptive_avg_pool1d", "aten.adaptive_avg_pool2d", "aten.adaptive_avg_pool3d",
          "aten._adaptive_avg_pool2d", "aten._adaptive_avg_pool3d")  # fmt: skip
def adaptive_avg_pool(n: Node, self: Expr, output_size: Any) -> Expr:
    """Mean over windows from floor(i * size / out) to ceil((i + 1) * size / out), axis by axis."""
    spatial = _pool_spatial(n)
    sizes, outs = n.shape_of(self)[-spatial:], n.shape()[-spatial:]
    first = n.rank(self) - spatial
    if all(as_int(o) == 1 for o in outs):
        axes = tuple(range(first, n.rank(self)))
        return n.emit(ops.mean(self, axes=axes, keepdims=True))
    x = self
    for k, (size, out) in enumerate(zip(sizes, outs, strict=True)):
        if not n.proves_equal(size, out):
            x = _adaptive_axis(n, x, first + k, size, out)
    return x


def _adaptive_axis(n: Node, x: Expr, axis: int, size: SymExpr, out: SymExpr) -> Expr:
    """Average one axis as differences of the running sum at the windows' ends, in float64, over their lengths."""
    index = n.emit(ops.arange(n.operand(0, "int64"), n.operand(1, "int64"), (out,)))
    total, parts = n.symbols.tensor(size, "int64"), n.symbols.tensor(out, "int64")
    begins = n.emit(ops.floor_divide(n.emit(ops.multiply(index, total)), parts))
    following = n.emit(ops.add(index, n.operand(1, "int64")))
    above = n.emit(ops.add(n.emit(ops.multiply(following, total)), n.emit(ops.subtract(parts, n.operand(1, "int64")))))
    ends = n.emit(ops.floor_divide(above, parts))
    dtype = n.dtype_of(x)
    sums = n.emit(ops.cumsum(n.cast(x, "float64"), axis=axis))
    rank = n.rank(x)
    pad = [sym(0)] * rank
    before = [sym(1) if k == axis else sym(0) for k in range(rank)]
    sums = n.emit(ops.pad(sums, tuple(before), tuple(pad)))
    upper, lower = (n.emit(ops.gather(sums, places, axis=axis)) for places in (ends, begins))
    lengths = n.cast(n.emit(ops.subtract(ends, begins)), "float64")
    shape = [out if k == axis else sym(1) for k in range(rank)]
    means = n.emit(ops.divide(n.emit(ops.subtract(upper, lower)), n.reshape(lengths, shape)))
    return n.cast(means, dtype)


# dropout


@torch_op("aten.dropout", "aten.native_dropout", "aten.alpha_dropout", "aten.feature_dropout",
          "aten.feature_alpha_dropout")  # fmt: skip
def dropout(n: Node, input: Expr, p: float, train: bool | None) -> Any:
    if train and p > 0:
        n.fail("dropout in training mode is random; export the model in eval mode: model.eval()")
    if not n.target.startswith("aten.native"):
        return input
    return input, n.full(n.shape(), True, "bool")


@torch_op("aten.prelu", "aten._prelu_kernel")
def prelu(n: Node, self: Expr, weight: Expr) -> Expr:
    if n.target.startswith("aten.prelu") and n.rank(weight) == 1 and n.rank(self) > 1:
        weight = n.reshape(weight, (n.shape_of(weight)[0], *(sym(1),) * (n.rank(self) - 2)))
    return n.emit(ops.where(n.emit(ops.less(self, n.operand(0, n.dtype()))), n.emit(ops.multiply(self, weight)), self))
