"""Converters of convolutions and dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relaxlite.frontend.common.unify import unify_dims
from relaxlite.frontend.torch.convert_random import dropped
from relaxlite.frontend.torch.node import Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr
from relaxlite.ir.symbolic import SymExpr, product, sym


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
    pads: Sequence[Any]
    if isinstance(padding, str):
        pads = _named_padding(n, padding, n.shape_of(weight)[2:], per_axis(dilation, spatial))
    else:
        pads = per_axis(padding, spatial) * 2
    return convolve(n, input, weight, bias, stride, pads, dilation, groups)


def _named_padding(n: Node, name: str, kernel: Sequence[SymExpr], dilations: Sequence[int]) -> tuple[SymExpr, ...]:
    if name == "valid":
        return (sym(0),) * (2 * len(kernel))
    totals = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
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


# dropout


@torch_op("aten.dropout", "aten.native_dropout", "aten.alpha_dropout", "aten.feature_dropout",
          "aten.feature_alpha_dropout")  # fmt: skip
def dropout(n: Node, input: Expr, p: float, train: bool | None) -> Any:
    """Nothing in eval mode; with the probability 1 all elements are dropped, which is not random either."""
    is_native = n.target.startswith("aten.native")
    drops_all = bool(train) and p == 1
    if train and 0 < p < 1 and not n.proves_equal(product(n.shape_of(input)), 0):
        if not n.target.startswith(("aten.dropout", "aten.native_dropout")):
            n.fail("this dropout in training mode is not supported; export the model in eval mode: model.eval()")
        result, kept = dropped(n, input, p)
        return (result, kept) if is_native else result
    result = n.emit(ops.multiply(input, n.operand(0, n.dtype()))) if drops_all else input
    return (result, n.full(n.shape(), not drops_all, "bool")) if is_native else result
