"""Converters of normalizations and softmax."""

from __future__ import annotations

from relaxlite import dtypes
from relaxlite.frontend.common.unify import unify_dims
from relaxlite.frontend.onnx.convert_shapes import normalize_axis
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.op import Op, get_op
from relaxlite.ir.ops.broadcast import format_shape
from relaxlite.ir.symbolic import SymExpr, as_int, product

Shape = tuple[SymExpr, ...]

_SOFTMAX = {"Softmax": "softmax", "LogSoftmax": "log_softmax"}


def _softmax_1(op: Op, n: Node) -> Result:
    """Softmax before opset 13: over the flattened dimensions from `axis` on."""
    dims = n.shape()
    axis = normalize_axis(n, n.int("axis", 1), len(dims))
    if axis == len(dims) - 1:
        return op(n.input(0), axis=-1)
    rows = n.emit(ops.reshape(n.input(0), (product(dims[:axis]), product(dims[axis:]))))
    return ops.reshape(n.emit(op(rows, axis=-1)), dims)


def _softmax_13(op: Op, n: Node) -> Result:
    return op(n.input(0), axis=n.int("axis", -1))


def _register_softmax(name: str, op: Op) -> None:
    onnx_op(name)(lambda n: _softmax_1(op, n))
    onnx_op(name, since=13)(lambda n: _softmax_13(op, n))


for _name, _op in _SOFTMAX.items():
    _register_softmax(_name, get_op(_op))


@onnx_op("Hardmax")
def hardmax_1(n: Node) -> Result:
    dims = n.shape()
    axis = normalize_axis(n, n.int("axis", 1), len(dims))
    rows = n.emit(ops.reshape(n.input(0), (product(dims[:axis]), product(dims[axis:]))))
    return ops.reshape(n.emit(_hardmax(n, rows, 1)), dims)


@onnx_op("Hardmax", since=13)
def hardmax(n: Node) -> Result:
    return _hardmax(n, n.input(0), normalize_axis(n, n.int("axis", -1), n.rank()))


def _hardmax(n: Node, x: Expr, axis: int) -> Expr:
    """Hardmax along an axis: one at the first maximum, zero elsewhere."""
    first = n.emit(ops.argmax(x, axis=axis))
    values = Constant.of([0, 1], n.type_of(x).dtype)
    return ops.one_hot(first, (n.shape_of(x)[axis],), values, axis=axis)


@onnx_op("BatchNormalization")
def batch_norm_1(n: Node) -> Result:
    n.ignore("consumed_inputs", "momentum")
    if n.opset < 7 and not n.flag("is_test") and n.num_outputs > 1:
        n.fail("BatchNormalization in training mode is not supported; export the model for inference")
    if not n.flag("spatial", True):
        n.fail("attribute 'spatial'=0 (statistics per element, not per channel) is not supported")
    return _batch_norm(n)


@onnx_op("BatchNormalization", since=9)
def batch_norm(n: Node) -> Result:
    if n.opset >= 14 and n.flag("training_mode"):
        return _batch_norm_training(n)
    n.ignore("momentum")
    return _batch_norm(n)


def _batch_norm_training(n: Node) -> Result:
    """BatchNormalization in training mode: by the batch's statistics; also returns running statistics."""
    momentum, x, axes = n.float("momentum", 0.9), n.input(0), tuple(k for k in range(n.rank()) if k != 1)
    average = n.emit(ops.mean(x, axes=axes))
    column = n.emit(ops.reshape(average, (*n.shape_of(average), *(1,) * (n.rank() - 2))))
    centered = n.emit(ops.subtract(x, column))
    variance = n.emit(ops.mean(n.emit(ops.multiply(centered, centered)), axes=axes))
    result = ops.batch_norm(x, n.input(1), n.input(2), average, variance, epsilon=n.float("epsilon", 1e-5))
    running = [_moving_average(n, n.input(3), average, momentum), _moving_average(n, n.input(4), variance, momentum)]
    return result, *running


def _moving_average(n: Node, old: Expr, new: Expr, momentum: float) -> Expr:
    dtype = n.type_of(old).dtype
    decayed = n.emit(ops.multiply(old, Constant.of(momentum, dtype)))
    return n.emit(ops.add(decayed, n.emit(ops.multiply(new, Constant.of(1 - momentum, dtype)))))


def _batch_norm(n: Node) -> Result:
    """BatchNormalization for inference, in the widest dtype of x and its weights, which may differ since opset 15."""
    if any(n.wants(k) for k in range(1, n.num_outputs)):
        n.fail(
            "BatchNormalization with more than one output is training before opset 14; export the model for inference"
        )
    epsilon = n.float("epsilon", 1e-5)
    x, *weights = n.all_inputs()
    values = [x, *(unify_dims(n.bb, w, {0: n.shape()[1]}) if n.rank() > 1 else w for w in weights)]
    wide = max((n.type_of(v).dtype for v in values), key=dtypes.itemsize)
    cast = [v if n.type_of(v).dtype == wide else n.emit(ops.cast(v, dtype=wide)) for v in values]
    result = ops.batch_norm(*cast, epsilon=epsilon)
    return result if wide == n.dtype() else ops.cast(n.emit(result), dtype=n.dtype())


@onnx_op("InstanceNormalization")
def instance_norm(n: Node) -> Result:
    n.ignore("consumed_inputs")
    return ops.instance_norm(n.input(0), n.input(1), n.input(2), epsilon=n.float("epsilon", 1e-5))


@onnx_op("GroupNormalization", since=18)
def group_norm_18(n: Node) -> Result:
    """GroupNormalization before opset 21, with a scale and bias per group."""
    groups = n.int("num_groups")
    per_group = n.shape()[1] // groups
    weights: list[Expr] = [
        n.emit(
            ops.reshape(
                n.emit(ops.broadcast_to(n.emit(ops.reshape(n.input(k), (groups, 1))), (groups, per_group))),
                (n.shape()[1],),
            )
        )
        for k in (1, 2)
    ]
    return _group_norm(n, groups, weights)


@onnx_op("GroupNormalization", since=21)
def group_norm(n: Node) -> Result:
    return _group_norm(n, n.int("num_groups"), [n.input(1), n.input(2)])


def _group_norm(n: Node, groups: int, weights: list[Expr]) -> Result:
    check_stash(n)
    return ops.group_norm(n.input(0), *weights, groups=groups, epsilon=n.float("epsilon", 1e-5))


def check_stash(n: Node) -> None:
    """Read `stash_type`, which has no effect: statistics are computed in float32, or in float64 for float64 inputs."""
    stash = n.int("stash_type", 1)
    if stash not in (1, 11) or (stash == 1 and n.dtype() == "float64"):
        n.int("stash_type", 1)


@onnx_op("LayerNormalization", since=17)
def layer_norm(n: Node) -> Result:
    check_stash(n)
    dims = n.shape()
    axis = normalize_axis(n, n.int("axis", -1), len(dims))
    epsilon = n.float("epsilon", 1e-5)
    result = _scaled_norm(n, ops.layer_norm, axis, epsilon, n.input(1), n.optional(2))
    if not n.wants(1) and not n.wants(2):
        return result
    return (result, *_statistics(n, tuple(range(axis, len(dims))), epsilon))


def _scaled_norm(n: Node, norm: Op, axis: int, epsilon: float, scale: Expr, bias: Expr | None = None) -> Expr:
    """Normalize input 0 from `axis` on; weights that vary along earlier dimensions are applied by separate ops."""
    x, dims, tail = n.input(0), n.shape(), n.shape()[axis:]
    weights = [weight for weight in (scale, bias) if weight is not None]
    if all(as_int(d) == 1 for w in weights for d in n.shape_of(w)[: -len(tail)]):
        return norm(x, *(_broadcast_weight(n, weight, tail) for weight in weights), axis=axis, epsilon=epsilon)
    ones = n.emit(ops.full(tail, Constant.of(1, n.dtype())))
    result: Expr = n.emit(norm(x, ones, axis=axis, epsilon=epsilon))
    for op, weight in zip((ops.multiply, ops.add), weights, strict=False):
        weighted: Expr = n.emit(op(result, weight))
        if len(n.shape_of(weighted)) == len(dims):
            weighted = unify_dims(n.bb, weighted, dict(enumerate(dims)))
        if n.shape_of(weighted) != dims:
            n.fail(f"a scale or bias of shape {format_shape(n.shape_of(weight))} cannot be broadcast to x")
        result = weighted
    return result


def _broadcast_weight(n: Node, weight: Expr, tail: Shape) -> Expr:
    """Broadcast a scale or bias to the normalized dimensions."""
    shape = n.shape_of(weight)
    if len(shape) == len(tail):
        return weight if shape == tail or all(not d.is_const for d in shape) else n.emit(ops.broadcast_to(weight, tail))
    if len(shape) > len(tail):
        lead = len(shape) - len(tail)
        return _broadcast_weight(n, n.emit(ops.squeeze(weight, axes=tuple(range(lead)))), tail)
    return n.emit(ops.broadcast_to(weight, tail))


def _statistics(n: Node, axes: tuple[int, ...], epsilon: float) -> tuple[Expr, Expr]:
    """Return mean and 1 / standard deviation, in float32 for float16 and bfloat16."""
    wide = "float32" if n.dtype() in ("float16", "bfloat16") else n.dtype()
    x = n.input(0) if wide == n.dtype() else n.emit(ops.cast(n.input(0), dtype=wide))
    average = n.emit(ops.mean(x, axes=axes, keepdims=True))
    centered = n.emit(ops.subtract(x, average))
    variance = n.emit(ops.mean(n.emit(ops.multiply(centered, centered)), axes=axes, keepdims=True))
    shifted = n.emit(ops.add(variance, Constant.of(epsilon, wide)))
    return average, n.emit(ops.reciprocal(n.emit(ops.sqrt(shifted))))


@onnx_op("RMSNormalization", since=23)
def rms_norm(n: Node) -> Result:
    check_stash(n)
    dims = n.shape()
    axis = normalize_axis(n, n.int("axis", -1), len(dims))
    return _scaled_norm(n, ops.rms_norm, axis, n.float("epsilon", 1e-5), n.input(1))


@onnx_op("LRN")
def lrn(n: Node) -> Result:
    return ops.lrn(
        n.input(0),
        size=n.int("size"),
        alpha=n.float("alpha", 1e-4),
        beta=n.float("beta", 0.75),
        bias=n.float("bias", 1.0),
    )


@onnx_op("LpNormalization")
def lp_norm(n: Node) -> Result:
    return ops.lp_normalize(n.input(0), axis=n.int("axis", -1), p=n.int("p", 2))


@onnx_op("MeanVarianceNormalization", since=9)
def mean_variance_norm(n: Node) -> Result:
    return ops.mean_variance_normalize(n.input(0), axes=n.ints("axes", (0, 2, 3)))
