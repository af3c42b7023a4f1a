"""Converters of activations.

Torch decomposes the rare ones, in a retrace that takes as long as the export; those of networks that are common stand
here.
"""

from __future__ import annotations

from typing import Any

from relaxlite.frontend.torch.convert_special import finished, number, wide_operands
from relaxlite.frontend.torch.node import Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr
from relaxlite.ir.symbolic import product, sym


@torch_op("aten.elu")
def elu(n: Node, self: Expr, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Expr:
    """scale * (x where x > 0, else alpha * expm1(input_scale * x)); of SELU and CELU too, which are forms of ELU."""
    (x,) = wide_operands(n, self)
    below = x if input_scale == 1 else n.emit(ops.multiply(x, number(n, input_scale)))
    negative = n.emit(ops.multiply(n.emit(ops.expm1(below)), number(n, alpha * scale)))
    positive = x if scale == 1 else n.emit(ops.multiply(x, number(n, scale)))
    return finished(n, ops.where(n.emit(ops.greater(x, number(n, 0))), positive, negative))


@torch_op("aten.relu6")
def relu6(n: Node, self: Expr) -> Expr:
    above = n.emit(ops.maximum(self, n.operand(0, n.dtype())))
    return n.emit(ops.minimum(above, n.operand(6, n.dtype())))


@torch_op("aten.softplus")
def softplus(n: Node, self: Expr, beta: float = 1, threshold: float = 20) -> Expr:
    """log1p(exp(beta * x)) / beta; x where beta * x > threshold."""
    (x,) = wide_operands(n, self)
    scaled = x if beta == 1 else n.emit(ops.multiply(x, number(n, beta)))
    smooth = n.emit(ops.log1p(n.emit(ops.exp(scaled))))
    smooth = smooth if beta == 1 else n.emit(ops.divide(smooth, number(n, beta)))
    return finished(n, ops.where(n.emit(ops.greater(scaled, number(n, threshold))), x, smooth))


@torch_op("aten.glu")
def glu(n: Node, self: Expr, dim: int = -1) -> Expr:
    """The first half along a dimension times the sigmoid of the second."""
    axis = n.axis(self, dim)
    half = n.shape()[axis]
    first, second = (n.emit(ops.slice(self, (k * half,), (half,), axes=(axis,))) for k in range(2))
    return n.emit(ops.multiply(first, n.emit(ops.sigmoid(second))))


@torch_op("aten.prelu", "aten._prelu_kernel")
def prelu(n: Node, self: Expr, weight: Expr) -> Expr:
    if n.target.startswith("aten.prelu") and n.rank(weight) == 1 and n.rank(self) > 1:
        weight = n.reshape(weight, (n.shape_of(weight)[0], *(sym(1),) * (n.rank(self) - 2)))
    elif n.rank(weight) > n.rank(self):  # one slope, of a number
        weight = n.reshape(weight, ())
    scaled = n.emit(ops.multiply(self, n.fit(weight, n.shape_of(self))))
    return n.emit(ops.where(n.emit(ops.greater(self, n.operand(0, n.dtype()))), self, scaled))


@torch_op("aten.rrelu", "aten.rrelu_with_noise", "aten.rrelu_with_noise_functional")
def rrelu(
    n: Node, self: Expr, noise: Any = None, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False
) -> Any:
    """Leaky ReLU with the mean of the slopes; random slopes, of training, are refused."""
    if training and not n.proves_equal(product(n.shape_of(self)), 0):
        n.fail("rrelu in training mode is random; export the model in eval mode: model.eval()")
    result = n.emit(ops.leaky_relu(self, alpha=(float(lower) + float(upper)) / 2))
    return (result, noise) if "functional" in n.target else result


@torch_op("aten.log_sigmoid", "aten.log_sigmoid_forward")
def log_sigmoid(n: Node, self: Expr) -> Any:
    """min(x, 0) - log1p(exp(-|x|))."""
    (x,) = wide_operands(n, self) if n.overload == "default" else (self,)
    least = n.emit(ops.minimum(x, n.operand(0, n.dtype_of(x))))
    rest = n.emit(ops.log1p(n.emit(ops.exp(n.emit(ops.neg(n.emit(ops.abs(x))))))))
    result = n.cast(n.emit(ops.subtract(least, rest)), n.dtype())
    if not n.target.startswith("aten.log_sigmoid_forward"):
        return result
    if n.wants(1):
        n.fail("the buffer of log_sigmoid_forward is for gradients only")
    return result, None
