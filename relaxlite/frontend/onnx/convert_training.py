"""Converters of ai.onnx.preview.training, steps of optimizers; inputs: rate, step number, then all tensors by kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr

_DOMAIN = "ai.onnx.preview.training"


class _Arithmetic:
    """Elementwise arithmetic of a node; numbers take the dtype of the other operand."""

    def __init__(self, n: Node) -> None:
        self._n = n

    def _operands(self, a: Expr | float, b: Expr | float) -> tuple[Expr, Expr]:
        dtype = self._n.type_of(b if isinstance(a, float) else a).dtype  # type: ignore[arg-type]
        left, right = (Constant.of(x, dtype) if isinstance(x, float) else x for x in (a, b))
        return left, right

    def add(self, a: Expr | float, b: Expr | float) -> Expr:
        return self._n.emit(ops.add(*self._operands(a, b)))

    def sub(self, a: Expr | float, b: Expr | float) -> Expr:
        return self._n.emit(ops.subtract(*self._operands(a, b)))

    def mul(self, a: Expr | float, b: Expr | float) -> Expr:
        return self._n.emit(ops.multiply(*self._operands(a, b)))

    def div(self, a: Expr | float, b: Expr | float) -> Expr:
        return self._n.emit(ops.divide(*self._operands(a, b)))

    def sqrt(self, x: Expr) -> Expr:
        return self._n.emit(ops.sqrt(x))

    def power(self, base: float, exponent: Expr, dtype: str) -> Expr:
        exponent = self._n.emit(ops.cast(exponent, dtype=dtype))
        return self._n.emit(ops.power(Constant.of(base, dtype), exponent))

    def scalar(self, x: Expr) -> Expr:
        return x if not self._n.shape_of(x) else self._n.emit(ops.reshape(x, ()))


_Step = Callable[[Sequence[Expr]], tuple[Expr, ...]]


def _each(n: Node, kinds: int, step: _Step) -> Result:
    """Apply a step to each optimized tensor with its gradient and states; outputs stand by kind as inputs do."""
    tensors = n.all_inputs()[2:]
    if len(tensors) % kinds:
        n.fail(f"{n.op_type} takes {kinds} inputs for each tensor after the rate and the step number")
    count = len(tensors) // kinds
    results = [step(tensors[k::count]) for k in range(count)]
    return tuple(x for kind in zip(*results, strict=True) for x in kind)


@onnx_op("Adagrad", domain=_DOMAIN)
def adagrad(n: Node) -> Result:
    """Adagrad; each tensor: x, gradient, accumulated squares."""
    a, decay = _Arithmetic(n), n.float("decay_factor", 0.0)
    norm, epsilon = n.float("norm_coefficient", 0.0), n.float("epsilon", 1e-6)
    rate, number = a.scalar(n.input(0)), a.scalar(n.input(1))
    time = n.emit(ops.cast(number, dtype=n.type_of(rate).dtype))
    rate = a.div(rate, a.add(a.mul(time, decay), 1.0))

    def step(tensors: Sequence[Expr]) -> tuple[Expr, ...]:
        x, gradient, accumulated = tensors
        gradient = a.add(a.mul(x, norm), gradient)
        accumulated = a.add(accumulated, a.mul(gradient, gradient))
        return a.sub(x, a.div(a.mul(rate, gradient), a.add(a.sqrt(accumulated), epsilon))), accumulated

    return _each(n, 3, step)


@onnx_op("Momentum", domain=_DOMAIN)
def momentum(n: Node) -> Result:
    """Momentum, also Nesterov's; each tensor: x, gradient, momentum."""
    a, mode = _Arithmetic(n), n.text("mode")
    alpha, beta, norm = n.float("alpha"), n.float("beta"), n.float("norm_coefficient")
    if mode not in ("standard", "nesterov"):
        n.fail(f"attribute 'mode' must be standard or nesterov, not {mode!r}")
    rate, number = a.scalar(n.input(0)), a.scalar(n.input(1))
    is_later = n.emit(ops.less(Constant.of(0, "int64"), number))

    def step(tensors: Sequence[Expr]) -> tuple[Expr, ...]:
        x, gradient, velocity = tensors
        dtype = n.type_of(x).dtype
        gradient = a.add(a.mul(x, norm), gradient)
        damping = n.emit(ops.where(is_later, Constant.of(beta, dtype), Constant.of(1.0, dtype)))
        velocity = a.add(a.mul(velocity, alpha), a.mul(gradient, damping))
        change = velocity if mode == "standard" else a.add(gradient, a.mul(velocity, alpha))
        return a.sub(x, a.mul(rate, change)), velocity

    return _each(n, 3, step)


@onnx_op("Adam", domain=_DOMAIN)
def adam(n: Node) -> Result:
    """Adam; each tensor: x, gradient, averages of gradients and of their squares."""
    a, alpha, beta = _Arithmetic(n), n.float("alpha", 0.9), n.float("beta", 0.999)
    norm, norm_post = n.float("norm_coefficient", 0.0), n.float("norm_coefficient_post", 0.0)
    epsilon = n.float("epsilon", 1e-6)
    rate, number = a.scalar(n.input(0)), a.scalar(n.input(1))
    dtype = n.type_of(rate).dtype
    left = [a.sub(1.0, a.power(factor, number, dtype)) for factor in (alpha, beta)]
    is_later = n.emit(ops.less(Constant.of(0, "int64"), number))
    rate = n.emit(ops.where(is_later, a.div(a.mul(rate, a.sqrt(left[1])), left[0]), rate))

    def step(tensors: Sequence[Expr]) -> tuple[Expr, ...]:
        x, gradient, mean, square = tensors
        gradient = a.add(a.mul(x, norm), gradient)
        mean = a.add(a.mul(mean, alpha), a.mul(gradient, 1 - alpha))
        square = a.add(a.mul(square, beta), a.mul(a.mul(gradient, gradient), 1 - beta))
        x = a.sub(x, a.div(a.mul(rate, mean), a.add(a.sqrt(square), epsilon)))
        return a.mul(x, 1 - norm_post), mean, square

    return _each(n, 4, step)
