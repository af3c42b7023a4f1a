"""Converters of normalizations and softmax."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from relaxlite import dtypes
from relaxlite.frontend.torch.node import Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr
from relaxlite.ir.symbolic import SymExpr, product, sym


@torch_op("aten.softmax", "aten._softmax", "aten._safe_softmax", "aten.special_softmax")
def softmax(n: Node, self: Expr, dim: int, half_to_float: bool = False, dtype: torch.dtype | None = None) -> Expr:
    x = n.cast(self, n.dtype())
    if not n.rank(x):
        return n.full((), 1, n.dtype())
    result: Expr = n.emit(ops.softmax(x, axis=n.axis(x, dim)))
    if n.target.startswith("aten._safe_softmax"):  # rows of -inf alone give 0
        largest = n.emit(ops.max(x, axes=(n.axis(x, dim),), keepdims=True))
        masked = n.emit(ops.equal(largest, n.operand(-math.inf, n.dtype())))
        result = n.emit(ops.where(masked, n.operand(0, n.dtype()), result))
    return result


@torch_op("aten.log_softmax", "aten._log_softmax", "aten.special_log_softmax")
def log_softmax(n: Node, self: Expr, dim: int, half_to_float: bool = False, dtype: torch.dtype | None = None) -> Expr:
    x = n.cast(self, n.dtype())
    return n.emit(ops.log_softmax(x, axis=n.axis(x, dim))) if n.rank(x) else n.full((), 0, n.dtype())


@torch_op("aten.layer_norm")
def layer_norm(
    n: Node, input: Expr, normalized_shape: Any, weight: Expr | None = None, bias: Expr | None = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> Expr:  # fmt: skip
    axis, dtype = n.rank(input) - len(normalized_shape), n.dtype()
    sizes = n.shape_of(input)[axis:]
    weight = _whole(n, weight, sizes, 1, dtype, needed=bias is not None)
    bias = None if bias is None else n.cast(bias, dtype)
    operands = [x for x in (weight, bias) if x is not None]
    return n.emit(ops.layer_norm(n.cast(input, dtype), *operands, axis=axis, epsilon=float(eps)))


@torch_op("aten.native_layer_norm")
def native_layer_norm(
    n: Node, input: Expr, normalized_shape: Any, weight: Expr | None, bias: Expr | None, eps: float
) -> tuple[Expr | None, ...]:
    result = layer_norm(n, input, normalized_shape, weight, bias, eps)
    if not (n.wants(1) or n.wants(2)):
        return result, None, None
    axes = tuple(range(n.rank(input) - len(normalized_shape), n.rank(input)))
    mean, variance = moments(n, n.cast(input, n.dtype(1)), axes)
    return result, mean, n.emit(ops.rsqrt(n.emit(ops.add(variance, n.operand(eps, n.dtype(1))))))


@torch_op("aten.rms_norm", "aten._fused_rms_norm")
def rms_norm(n: Node, input: Expr, normalized_shape: Any, weight: Expr | None = None, eps: float | None = None) -> Any:
    axis, dtype = n.rank(input) - len(normalized_shape), n.dtype()
    epsilon = float(np.finfo(dtypes.to_numpy(dtype if dtype != "bfloat16" else "float32")).eps) if eps is None else eps
    if eps is None and dtype == "bfloat16":
        epsilon = 2.0**-7
    x = n.cast(input, dtype)
    operands = [x] if weight is None else [x, n.cast(weight, dtype)]
    result = n.emit(ops.rms_norm(*operands, axis=axis, epsilon=float(epsilon)))
    if not n.target.startswith("aten._fused"):
        return result
    if n.wants(1):
        n.fail("the reciprocal norm of _fused_rms_norm is for gradients only")
    return result, None


def _whole(
    n: Node, x: Expr | None, shape: tuple[SymExpr, ...], default: float, dtype: str, *, needed: bool
) -> Expr | None:
    """Return a weight in a dtype; a default where there is none and one is needed."""
    if x is not None:
        return n.cast(x, dtype)
    return n.full(shape, default, dtype) if needed else None


def moments(n: Node, x: Expr, axes: tuple[int, ...]) -> tuple[Expr, Expr]:
    """Return mean and biased variance of x over axes, which stay as dimensions of size 1."""
    mean = n.emit(ops.mean(x, axes=axes, keepdims=True))
    centered = n.emit(ops.subtract(x, mean))
    return mean, n.emit(ops.mean(n.emit(ops.multiply(centered, centered)), axes=axes, keepdims=True))


def _channels(n: Node, x: Expr | None, default: float, count: SymExpr, dtype: str) -> Expr:
    if x is None:
        return n.full((count,), default, dtype)
    return n.cast(x, dtype)


@torch_op("aten.group_norm")
def group_norm(
    n: Node, input: Expr, num_groups: int, weight: Expr | None = None, bias: Expr | None = None, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Expr:  # fmt: skip
    dtype, channels = n.dtype(), n.shape_of(input)[1]
    scale, shift = _channels(n, weight, 1, channels, dtype), _channels(n, bias, 0, channels, dtype)
    return n.emit(ops.group_norm(n.cast(input, dtype), scale, shift, groups=int(num_groups), epsilon=float(eps)))


@torch_op("aten.native_group_norm")
def native_group_norm(
    n: Node, input: Expr, weight: Expr | None, bias: Expr | None, N: Any, C: Any, HxW: Any, group: int, eps: float
) -> tuple[Expr | None, ...]:
    """Normalize groups of channels; also their means and reciprocal deviations (N, group)."""
    samples, channels, size = n.ints((N, C, HxW))
    x = n.cast(input, n.dtype())
    result = n.reshape(group_norm(n, n.reshape(x, (samples, channels, size)), group, weight, bias, eps), n.shape())
    if not (n.wants(1) or n.wants(2)):
        return result, None, None
    groups = n.reshape(n.cast(input, n.dtype(1)), (samples, group, channels // group * size))
    mean, variance = (n.reshape(v, (samples, group)) for v in moments(n, groups, (2,)))
    return result, mean, n.emit(ops.rsqrt(n.emit(ops.add(variance, n.operand(eps, n.dtype(1))))))


@torch_op("aten.instance_norm")
def instance_norm(
    n: Node, input: Expr, weight: Expr | None, bias: Expr | None, running_mean: Expr | None, running_var: Expr | None,
    use_input_stats: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> Expr:  # fmt: skip
    if not use_input_stats:
        return _normalized(n, input, weight, bias, running_mean, running_var, eps)
    if running_mean is not None and running_var is not None:
        n.fail("instance_norm that updates running statistics is not supported; export the model in eval mode")
    dtype, channels = n.dtype(), n.shape_of(input)[1]
    scale, shift = _channels(n, weight, 1, channels, dtype), _channels(n, bias, 0, channels, dtype)
    return n.emit(ops.instance_norm(n.cast(input, dtype), scale, shift, epsilon=float(eps)))


def _normalized(
    n: Node, x: Expr, weight: Expr | None, bias: Expr | None, mean: Expr | None, var: Expr | None, eps: float
) -> Expr:
    """Normalize by given statistics of the channels."""
    dtype, channels = n.dtype(), n.shape_of(x)[1]
    if mean is None or var is None:
        n.fail("normalization with given statistics lacks them")
    wide = n.dtype_of(mean)
    scale, shift = _channels(n, weight, 1, channels, wide), _channels(n, bias, 0, channels, wide)
    result = ops.batch_norm(n.cast(x, wide), scale, shift, mean, n.cast(var, wide), epsilon=float(eps))
    return n.cast(n.emit(result), dtype)


@torch_op("aten.batch_norm", "aten.cudnn_batch_norm")
def batch_norm(
    n: Node, input: Expr, weight: Expr | None, bias: Expr | None, running_mean: Expr | None, running_var: Expr | None,
    training: bool, momentum: float, eps: float, cudnn_enabled: bool = False,
) -> Expr:  # fmt: skip
    if n.rank(input) == 1:  # torch permits it for an empty tensor alone
        return input
    if not training:
        return _normalized(n, input, weight, bias, running_mean, running_var, eps)
    if running_mean is not None:
        n.fail("batch_norm in training updates statistics; it is retraced to a functional form")
    return _trained(n, input, weight, bias, eps)[0]


def _trained(n: Node, x: Expr, weight: Expr | None, bias: Expr | None, eps: float) -> tuple[Expr, Expr, Expr]:
    """Normalize by the statistics of x: (result, mean, biased variance), both (channels,)."""
    dtype = n.dtype()
    wide = "float32" if dtype in ("float16", "bfloat16") else dtype
    x = n.cast(x, wide)
    channels = n.shape_of(x)[1]
    axes = tuple(k for k in range(n.rank(x)) if k != 1)
    mean, variance = (n.reshape(v, (channels,)) for v in moments(n, x, axes))
    scale, shift = _channels(n, weight, 1, channels, wide), _channels(n, bias, 0, channels, wide)
    result = n.emit(ops.batch_norm(x, scale, shift, mean, variance, epsilon=float(eps)))
    return n.cast(result, dtype), mean, variance


@torch_op("aten._native_batch_norm_legit", "aten._native_batch_norm_legit_functional", "aten.native_batch_norm",
          "aten._native_batch_norm_legit_no_training", "aten.batch_norm_with_update_functional",
          "aten._batch_norm_with_update_functional")  # fmt: skip
def native_batch_norm(
    n: Node, input: Expr, weight: Expr | None, bias: Expr | None, running_mean: Expr | None = None,
    running_var: Expr | None = None, training: bool | None = None, momentum: float = 0.1, eps: float = 1e-5,
) -> tuple[Expr | None, ...]:  # fmt: skip
    """Return (result, mean, reciprocal deviation), and the new statistics of the functional forms."""
    is_update = "with_update" in n.target
    if training is False or "no_training" in n.target:
        result = _normalized(n, input, weight, bias, running_mean, running_var, eps)
        empty = n.full((sym(0),), 0, n.dtype(1)) if n.wants(1) or n.wants(2) else None
        if "functional" in n.target:
            return result, empty, empty, running_mean, running_var
        return result, empty, empty
    result, mean, variance = _trained(n, input, weight, bias, eps)
    inverse = n.emit(ops.rsqrt(n.emit(ops.add(variance, n.operand(eps, n.dtype_of(variance))))))
    outputs: list[Expr | None] = [result, n.cast(mean, n.dtype(1)), n.cast(inverse, n.dtype(2))]
    if running_mean is None or running_var is None or "functional" not in n.target:
        return tuple(outputs)
    if is_update:
        outputs.append(n.full(n.shape(3), 0, n.dtype(3)))  # reserved memory of other backends
    shape = n.shape_of(input)
    count = n.symbols.tensor(product((shape[0], *shape[2:])), n.dtype_of(variance))
    rest = n.emit(ops.subtract(count, n.operand(1, n.dtype_of(variance))))
    unbiased = n.emit(ops.multiply(variance, n.emit(ops.divide(count, rest))))
    for old, new in ((running_mean, mean), (running_var, unbiased)):
        dtype = n.dtype_of(old)
        kept = n.emit(ops.multiply(old, n.operand(1 - momentum, dtype)))
        outputs.append(n.emit(ops.add(kept, n.emit(ops.multiply(n.cast(new, dtype), n.operand(momentum, dtype))))))
    return tuple(outputs)


@torch_op("aten.local_response_norm")
def local_response_norm(
    n: Node, input: Expr, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Expr:
    return n.emit(ops.lrn(input, size=size, alpha=alpha, beta=beta, bias=k))
