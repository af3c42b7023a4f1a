"""Converters of convolutions and pools."""

from __future__ import annotations

from typing import Any

import numpy as np

from relaxlite.frontend.common.unify import unify_dims
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.frontend.onnx.window_padding import auto_pad, split_padding, window_pads
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.symbolic import SymExpr, as_int, product, sym

Shape = tuple[SymExpr, ...]


def kernel_of(n: Node, weight: int = 1) -> Shape:
    """Return the spatial sizes of the filter, input `weight`, checked against the attribute `kernel_shape`."""
    shape, declared = n.shape(weight)[2:], n.ints("kernel_shape", None)
    if declared is not None and any(as_int(d) not in (None, k) for d, k in zip(shape, declared, strict=False)):
        n.fail(
            f"attribute 'kernel_shape' is {declared}, but the filter has shape ({', '.join(map(str, n.shape(weight)))})"
        )
    return shape


def per_axis(n: Node, name: str, count: int) -> tuple[int, ...]:
    """Return an attribute of one integer per spatial dimension, by default 1. ImportModelError for another count."""
    values = n.ints(name, None) or (1,) * count
    if len(values) != count:
        n.fail(f"attribute '{name}' must have {count} values, one per spatial dimension, got {len(values)}")
    return values


def conv_attributes(n: Node, weight: int = 1) -> tuple[Shape, dict[str, Any]]:
    """Return (pads, attributes of the IR's op) of a convolution whose filter is input `weight`."""
    sizes = n.shape(0)[2:]
    if len(n.shape(weight)) != len(sizes) + 2:
        n.fail(f"input of rank {len(sizes) + 2} and filter of rank {len(n.shape(weight))} do not fit")
    strides, dilations = per_axis(n, "strides", len(sizes)), per_axis(n, "dilations", len(sizes))
    pads = window_pads(n, sizes, kernel_of(n, weight), strides, dilations)
    return pads, {"strides": strides, "dilations": dilations, "groups": n.int("group", 1)}


@onnx_op("Conv")
def conv(n: Node) -> Result:
    pads, attrs = conv_attributes(n)
    x = unify_dims(n.bb, n.input(0), {1: n.shape(1)[1] * attrs["groups"]})
    return with_bias(n, ops.conv(x, n.input(1), pads, **attrs), n.optional(2))


def with_bias(n: Node, call: Expr, bias: Expr | None) -> Expr:
    """Add a bias (c,), or None, to a result of shape (n, c, spatial...)."""
    if bias is None:
        return call
    spatial = len(n.shape_of(call)) - 2
    if len(n.shape_of(bias)) != 1:
        n.fail(f"the bias must have one dimension, got {bias.ty}")
    bias = unify_dims(n.bb, bias, {0: n.shape_of(call)[1]})
    column: Expr
    if isinstance(bias, Constant):
        column = Constant.of(np.reshape(bias.value, (-1, *(1,) * spatial)), name=bias.name)
    else:
        column = n.emit(ops.reshape(bias, (*n.shape_of(bias), *(1,) * spatial)))
    return ops.add(n.emit(call), column)


@onnx_op("ConvTranspose")
def conv_transpose(n: Node) -> Result:
    sizes = n.shape(0)[2:]
    count = len(sizes)
    strides, dilations = per_axis(n, "strides", count), per_axis(n, "dilations", count)
    extra = n.ints("output_padding", None) or (0,) * count
    mode, pads = auto_pad(n), n.ints("pads", None) or (0,) * (2 * count)
    declared = n.ints("output_shape", None)
    target = None if declared is None else tuple(sym(d) for d in declared[-count:])
    if target is None and mode in ("SAME_UPPER", "SAME_LOWER"):
        target = tuple(d * s for d, s in zip(sizes, strides, strict=True))
    padding = tuple(sym(p) for p in pads) if mode != "VALID" else (sym(0),) * (2 * count)
    if target is not None:
        extents = [(k - 1) * d + 1 for k, d in zip(kernel_of(n), dilations, strict=True)]
        totals = [(sizes[k] - 1) * strides[k] + extra[k] + extents[k] - target[k] for k in range(count)]
        end_padding = [max(0, -(as_int(total) or 0)) for total in totals]  # a larger result is padded at its end
        extra = tuple(e + more for e, more in zip(extra, end_padding, strict=True))
        totals = [total + more for total, more in zip(totals, end_padding, strict=True)]
        pairs = [split_padding(total, more_at_end=mode == "SAME_UPPER") for total in totals]
        padding = tuple(p for p, _ in pairs) + tuple(p for _, p in pairs)
    else:
        kernel_of(n)
    call = ops.conv_transpose(
        n.input(0),
        n.input(1),
        padding,
        strides=strides,
        dilations=dilations,
        groups=n.int("group", 1),
        output_padding=extra,
    )
    return with_bias(n, call, n.optional(2))


# Pools


def pool_attributes(n: Node, sizes: Shape | None = None) -> tuple[Shape, dict[str, Any]]:
    """Return (pads, attributes of the IR's op) of a pool; `sizes`: spatial sizes, by default of input 0 (n, c, ...).

    at_least_one: by ONNX's formula, an input smaller than the window has an empty result. onnxruntime and Paddle give
    one element, on which Paddle's text recognizers rely.
    """
    sizes, kernel = n.shape(0)[2:] if sizes is None else sizes, n.ints("kernel_shape")
    if len(kernel) != len(sizes):
        n.fail(f"attribute 'kernel_shape' must have {len(sizes)} values, one per spatial dimension, got {len(kernel)}")
    strides, dilations = per_axis(n, "strides", len(sizes)), per_axis(n, "dilations", len(sizes))
    pads = window_pads(n, sizes, kernel, strides, dilations)
    attrs = {"kernel": kernel, "strides": strides, "dilations": dilations, "ceil_mode": n.flag("ceil_mode")}
    return pads, {**attrs, "at_least_one": True}


@onnx_op("MaxPool")
def max_pool(n: Node) -> Result:
    pads, attrs = pool_attributes(n)
    order = n.int("storage_order", 0)
    if n.wants(1):
        return n.fields(ops.max_pool_with_indices(n.input(0), pads, storage_order=order, **attrs))
    return ops.max_pool(n.input(0), pads, **attrs)


@onnx_op("AveragePool")
def average_pool(n: Node) -> Result:
    pads, attrs = pool_attributes(n)
    return ops.avg_pool(n.input(0), pads, count_include_pad=n.flag("count_include_pad"), **attrs)


@onnx_op("LpPool")
def lp_pool(n: Node) -> Result:
    pads, attrs = pool_attributes(n)
    return ops.lp_pool(n.input(0), pads, p=_norm_order(n), **attrs)


def _norm_order(n: Node) -> int:
    """Return the order of an Lp norm, an attribute that is a float in opset 1 and an integer since."""
    if n.opset >= 2:
        return n.int("p", 2)
    value = n.float("p", 2.0)
    if value != int(value):
        n.fail(f"attribute 'p' must be a whole number, got {value}")
    return int(value)


def _spatial_axes(n: Node) -> tuple[int, ...]:
    if n.rank() < 3:
        n.fail(f"the input must be (n, c, spatial...), got {n.type()}")
    return tuple(range(2, n.rank()))


@onnx_op("GlobalAveragePool")
def global_average_pool(n: Node) -> Result:
    return ops.mean(n.input(0), axes=_spatial_axes(n), keepdims=True)


@onnx_op("GlobalMaxPool")
def global_max_pool(n: Node) -> Result:
    return ops.max(n.input(0), axes=_spatial_axes(n), keepdims=True)


@onnx_op("GlobalLpPool")
def global_lp_pool(n: Node) -> Result:
    axes, order = _spatial_axes(n), _norm_order(n)
    if order in (1, 2):
        return (ops.l1_norm if order == 1 else ops.l2_norm)(n.input(0), axes=axes, keepdims=True)
    power = Constant.of(order, n.dtype())
    total = n.emit(ops.sum(n.emit(ops.power(n.emit(ops.abs(n.input(0))), power)), axes=axes, keepdims=True))
    return ops.power(total, Constant.of(1 / order, n.dtype()))


@onnx_op("MaxUnpool", since=9)
def max_unpool(n: Node) -> Result:
    """MaxUnpool: scatter values to their indices in a tensor of zeros, zero-padded at the end to the output shape."""
    x, indices, dims = n.input(0), n.input(1), n.shape(0)
    kernel = n.ints("kernel_shape")
    strides, pads = per_axis(n, "strides", len(kernel)), n.ints("pads", None) or (0,) * (2 * len(kernel))
    spatial = [(dims[k + 2] - 1) * strides[k] + kernel[k] - pads[k] - pads[len(kernel) + k] for k in range(len(kernel))]
    full = (*dims[:2], *spatial)
    zeros = n.emit(ops.full((product(full),), Constant.of(0, n.dtype())))
    flat = [n.emit(ops.reshape(v, (product(dims),))) for v in (indices, x)]
    flat_result = n.emit(ops.scatter_elements(zeros, flat[0], flat[1], axis=0))
    result = ops.reshape(flat_result, full)
    if n.optional(2) is None:
        return result
    after = tuple(t - f for t, f in zip(n.shape_values(2, lower=0), full, strict=True))
    return ops.pad(n.emit(result), (0,) * len(full), after, None)
