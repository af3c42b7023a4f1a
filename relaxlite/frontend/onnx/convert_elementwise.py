"""Converters of elementwise ops: arithmetic, comparison, logic, activations, dropout."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.frontend.common.random_values import uniform
from relaxlite.frontend.common.unify import unify_broadcast
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.op import Op, get_op

_UNARY = {
    "Abs": "abs", "Acos": "acos", "Acosh": "acosh", "Asin": "asin", "Asinh": "asinh", "Atan": "atan", "Atanh": "atanh",
    "BitwiseNot": "bitwise_not", "Ceil": "ceil", "Cos": "cos", "Cosh": "cosh", "Erf": "erf", "Exp": "exp",
    "Floor": "floor",
    "HardSwish": "hard_swish", "IsNaN": "isnan", "Log": "log", "Mish": "mish", "Neg": "neg", "Not": "logical_not",
    "Reciprocal": "reciprocal", "Relu": "relu", "Round": "round", "Sigmoid": "sigmoid", "Sign": "sign", "Sin": "sin",
    "Sinh": "sinh", "Softplus": "softplus", "Softsign": "softsign", "Sqrt": "sqrt", "Tan": "tan", "Tanh": "tanh",
}  # fmt: skip

_BINARY = {
    "Add": "add", "Sub": "subtract", "Mul": "multiply", "Equal": "equal", "Less": "less", "LessOrEqual": "less_equal",
    "Greater": "greater", "GreaterOrEqual": "greater_equal", "And": "logical_and", "Or": "logical_or",
    "Xor": "logical_xor",
    "BitwiseAnd": "bitwise_and", "BitwiseOr": "bitwise_or", "BitwiseXor": "bitwise_xor",
}  # fmt: skip

# ONNX op -> (the IR's op, attributes with their defaults)
_FLOAT_ATTRS: dict[str, tuple[str, dict[str, float]]] = {
    "LeakyRelu": ("leaky_relu", {"alpha": 0.01}),
    "Elu": ("elu", {"alpha": 1.0}),
    "Celu": ("celu", {"alpha": 1.0}),
    "ThresholdedRelu": ("thresholded_relu", {"alpha": 1.0}),
    "HardSigmoid": ("hard_sigmoid", {"alpha": 0.2, "beta": 0.5}),
    "Shrink": ("shrink", {"lambd": 0.5, "bias": 0.0}),
}


def _unary(op: Op, n: Node) -> Result:
    n.ignore("consumed_inputs")
    return op(n.input(0))


def _binary(op: Op, n: Node) -> Result:
    return op(*unify_broadcast(n.bb, [n.input(0), n.input(1)]))


def _legacy_binary(op: Op, n: Node) -> Result:
    """Convert a binary op before opset 7, which broadcasts b to a from `axis` on if `broadcast` is set."""
    n.ignore("consumed_inputs")
    return op(n.input(0), _legacy_operand(n))


def _legacy_operand(n: Node) -> Expr:
    a, b = n.rank(0), n.rank(1)
    broadcast, axis = n.flag("broadcast"), n.int("axis", None)
    if not broadcast:
        if a != b:
            n.fail(f"operands of rank {a} and {b} are not broadcast without the attribute 'broadcast'")
        return n.input(1)
    trailing = 0 if axis is None else a - axis % max(a, 1) - b
    return n.input(1) if trailing <= 0 else n.emit(ops.expand_dims(n.input(1), axes=tuple(range(b, b + trailing))))


def _with_floats(op: Op, defaults: dict[str, float], n: Node) -> Result:
    n.ignore("consumed_inputs")
    attrs: dict[str, Any] = {name: n.float(name, value) for name, value in defaults.items()}
    return op(n.input(0), **attrs)


for _name, _op in _UNARY.items():
    onnx_op(_name)(functools.partial(_unary, get_op(_op)))
for _name, _op in _BINARY.items():
    onnx_op(_name, since=7)(functools.partial(_binary, get_op(_op)))
    if _name in ("Add", "Sub", "Mul", "Equal", "Less", "Greater", "And", "Or", "Xor"):
        onnx_op(_name)(functools.partial(_legacy_binary, get_op(_op)))
for _name, (_op, _defaults) in _FLOAT_ATTRS.items():
    onnx_op(_name)(functools.partial(_with_floats, get_op(_op), _defaults))


def _divide(a: Expr, b: Expr, dtype: str) -> Result:
    return ops.divide(a, b) if dtypes.is_float(dtype) else ops.truncdiv(a, b)


@onnx_op("Div")
def div_1(n: Node) -> Result:
    n.ignore("consumed_inputs")
    return _divide(n.input(0), _legacy_operand(n), n.dtype())


@onnx_op("Div", since=7)
def div(n: Node) -> Result:
    a, b = unify_broadcast(n.bb, [n.input(0), n.input(1)])
    return _divide(a, b, n.dtype())


@onnx_op("Pow")
def pow_1(n: Node) -> Result:
    return _power(n, n.input(0), _legacy_operand(n))


@onnx_op("Pow", since=7)
def pow_7(n: Node) -> Result:
    return _power(n, n.input(0), n.input(1))


def _power(n: Node, base: Expr, exponent: Expr) -> Result:
    """Emit a power with the dtype of the base; an integer to a float power is computed in float64."""
    dtype, exponent_dtype = n.type_of(base).dtype, n.type_of(exponent).dtype
    if dtype == exponent_dtype:
        return ops.power(base, exponent)
    if dtypes.is_float(dtype) or dtypes.is_integer(exponent_dtype):
        return ops.power(base, n.emit(ops.cast(exponent, dtype=dtype)))
    wide = n.emit(ops.power(n.emit(ops.cast(base, dtype="float64")), n.emit(ops.cast(exponent, dtype="float64"))))
    return ops.cast(wide, dtype=dtype)


@onnx_op("Mod")
def mod(n: Node) -> Result:
    """Mod: the remainder has the sign of the dividend (fmod=1), else of the divisor (integers only)."""
    return (ops.fmod if n.flag("fmod") else ops.floormod)(n.input(0), n.input(1))


@onnx_op("BitShift")
def bit_shift(n: Node) -> Result:
    direction = n.text("direction")
    if direction not in ("LEFT", "RIGHT"):
        n.fail(f"attribute 'direction' must be LEFT or RIGHT, not {direction!r}")
    return (ops.left_shift if direction == "LEFT" else ops.right_shift)(n.input(0), n.input(1))


def _variadic(op: Op, n: Node) -> Result:
    n.ignore("consumed_inputs")
    total, *rest = n.all_inputs()
    for x in rest:
        total = n.emit(op(*unify_broadcast(n.bb, [total, x])))
    return total


for _name, _op in {"Sum": "add", "Max": "maximum", "Min": "minimum"}.items():
    onnx_op(_name)(functools.partial(_variadic, get_op(_op)))


@onnx_op("Mean")
def mean(n: Node) -> Result:
    total = _variadic(get_op("add"), n)
    assert not isinstance(total, tuple)
    return ops.divide(total, Constant.of(len(n.inputs), n.dtype()))


@onnx_op("Where")
def where(n: Node) -> Result:
    return ops.where(*unify_broadcast(n.bb, n.all_inputs()))


# Activations


@onnx_op("Selu")
def selu(n: Node) -> Result:
    n.ignore("consumed_inputs")
    is_new = n.opset >= 6
    alpha = n.float("alpha", 1.6732632423543772 if is_new else 1.6732)
    return ops.selu(n.input(0), alpha=alpha, gamma=n.float("gamma", 1.0507009873554805 if is_new else 1.0507))


@onnx_op("Gelu", since=20)
def gelu(n: Node) -> Result:
    return ops.gelu(n.input(0), approximate=n.text("approximate", "none"))


@onnx_op("Swish", since=24)
def swish(n: Node) -> Result:
    alpha = n.float("alpha", 1.0)
    if alpha == 1.0:
        return ops.silu(n.input(0))
    scaled = n.emit(ops.multiply(n.input(0), Constant.of(alpha, n.dtype())))
    return ops.multiply(n.input(0), n.emit(ops.sigmoid(scaled)))


@onnx_op("PRelu")
def prelu_1(n: Node) -> Result:
    """PRelu before opset 7, whose slope is one number, or one per channel."""
    n.ignore("consumed_inputs")
    slope = n.input(1)
    if n.rank(1) == 1 and n.rank(0) > 2:
        slope = n.emit(ops.expand_dims(slope, axes=tuple(range(1, n.rank(0) - 1))))
    return ops.prelu(n.input(0), slope)


@onnx_op("PRelu", since=7)
def prelu(n: Node) -> Result:
    return ops.prelu(n.input(0), n.input(1))


@onnx_op("Clip")
def clip_1(n: Node) -> Result:
    n.ignore("consumed_inputs")
    return ops.clip(n.input(0), lower=n.float("min", None), upper=n.float("max", None))


@onnx_op("Clip", since=11)
def clip(n: Node) -> Result:
    """Clip; constant bounds of floats are attributes of the IR's clip, other bounds are operands of max and min."""
    x, lower, upper = n.input(0), n.optional(1), n.optional(2)
    known = [None if bound is None else n.const(k) for k, bound in ((1, lower), (2, upper))]
    if dtypes.is_float(n.dtype()) and all(
        b is None or v is not None for b, v in zip((lower, upper), known, strict=True)
    ):
        low, high = (None if v is None else float(v.reshape(-1)[0]) for v in known)
        return ops.clip(x, lower=low, upper=high)
    x = x if lower is None else n.emit(ops.maximum(x, _scalar(n, lower)))
    return x if upper is None else ops.minimum(x, _scalar(n, upper))


def _scalar(n: Node, x: Expr) -> Expr:
    return x if not n.shape_of(x) else n.emit(ops.reshape(x, ()))


@onnx_op("IsInf")
def is_inf(n: Node) -> Result:
    return ops.isinf(
        n.input(0), detect_negative=n.flag("detect_negative", True), detect_positive=n.flag("detect_positive", True)
    )


@onnx_op("Identity")
def identity(n: Node) -> Result:
    return n.input(0)


@onnx_op("Dropout")
def dropout_1(n: Node) -> Result:
    """Dropout, at inference the identity with a mask of ones."""
    n.ignore("consumed_inputs", "ratio", "seed")
    if n.opset < 7 and not n.flag("is_test") and n.has("is_test"):
        n.fail("Dropout with is_test=0 is training, which relaxlite does not do")
    return n.input(0), _mask(n) if n.wants(1) else None


@onnx_op("Dropout", since=12)
def dropout(n: Node) -> Result:
    """Dropout; training_mode (input 2) may be known at run time only. Random numbers differ from other runtimes'."""
    seed, mode = n.int("seed", None), n.const(2) if n.optional(2) is not None else np.False_
    if mode is not None and not bool(np.reshape(mode, -1)[0]):
        return n.input(0), _mask(n) if n.wants(1) else None
    dtype = n.dtype() if n.dtype() == "float64" else "float32"
    one = Constant.of(1.0, dtype)
    ratio = n.emit(ops.cast(n.input(1), dtype=dtype)) if n.optional(1) is not None else Constant.of(0.5, dtype)
    ratio = n.emit(ops.where(n.input(2), n.emit(ops.reshape(ratio, ())), Constant.of(0.0, dtype)))
    key = Constant.of(zlib.crc32(str(n.label if seed is None else seed).encode()), "uint32")
    noise = n.emit(ops.cast(uniform(n.emit, n.shape(), key), dtype=dtype))
    mask = n.emit(ops.less_equal(ratio, noise), "mask")
    scaled = n.emit(ops.divide(n.emit(ops.cast(n.input(0), dtype=dtype)), n.emit(ops.subtract(one, ratio))))
    kept = n.emit(ops.where(mask, scaled, Constant.of(0.0, dtype)))
    return n.emit(ops.cast(kept, dtype=n.dtype())), mask


def _mask(n: Node) -> Expr:
    """Emit a mask of ones: in the input's dtype before opset 10, in bool since."""
    one = Constant.of(1, n.dtype() if n.opset < 10 else "bool")
    return n.emit(ops.broadcast_to(one, n.shape()))
