"""Converters of reductions, arg-reductions and cumulative sums and products."""

from __future__ import annotations

from collections.abc import Callable

from relaxlite import dtypes
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.frontend.onnx.runtime_values import by_axes
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr
from relaxlite.ir.op import get_op

_REDUCTIONS = {
    "ReduceSum": "sum", "ReduceProd": "prod", "ReduceMax": "max", "ReduceMin": "min", "ReduceMean": "mean",
    "ReduceL1": "l1_norm",
    "ReduceL2": "l2_norm", "ReduceSumSquare": "sum_square", "ReduceLogSum": "log_sum", "ReduceLogSumExp": "log_sum_exp",
}  # fmt: skip
_OF_BOOL = {"max": "any", "min": "all"}
_FLOATS_ONLY = ("l2_norm", "log_sum", "log_sum_exp")


def _register(name: str, op: str) -> None:
    def by_attribute(n: Node) -> Result:
        return _reduce(n, op, n.ints("axes", None) or None)

    def by_input(n: Node) -> Result:
        is_noop = n.flag("noop_with_empty_axes")

        def reduce_axes(axes: tuple[int, ...]) -> Expr:
            return _elementwise(n, op) if is_noop and not axes else n.emit(_reduce(n, op, axes or None))

        if n.optional(1) is None:
            return reduce_axes(())
        return by_axes(n, 1, n.rank(), reduce_axes)

    onnx_op(name)(by_attribute)
    onnx_op(name, since=13 if name == "ReduceSum" else 18)(by_input)


def _reduce(n: Node, op: str, axes: tuple[int, ...] | None) -> Expr:
    keepdims = n.flag("keepdims", True)
    if n.dtype() == "bool":
        op = _OF_BOOL.get(op, op)
    return _reduce_in_floats(n, op, n.input(0), axes, keepdims)


def _elementwise(n: Node, op: str) -> Expr:
    """Convert a reduction over no axes, which applies the op to each element alone."""
    n.flag("keepdims", True)
    if op in ("sum", "prod", "max", "min", "mean"):
        return n.input(0)
    return _reduce_in_floats(n, op, n.input(0), (), True)


def _reduce_in_floats(n: Node, op: str, x: Expr, axes: tuple[int, ...] | None, keepdims: bool) -> Expr:
    """Emit a reduction; roots and logarithms of integers are computed in float64 and truncated."""
    dtype = n.type_of(x).dtype
    if op in _FLOATS_ONLY and not dtypes.is_float(dtype):
        wide = n.emit(ops.cast(x, dtype="float64"))
        return ops.cast(n.emit(get_op(op)(wide, axes=axes, keepdims=keepdims)), dtype=dtype)
    return get_op(op)(x, axes=axes, keepdims=keepdims)


for _name, _op in _REDUCTIONS.items():
    _register(_name, _op)


@onnx_op("ArgMax", "ArgMin")
def arg_reduce(n: Node) -> Result:
    op = ops.argmax if n.op_type == "ArgMax" else ops.argmin
    last = n.flag("select_last_index")
    return op(n.input(0), axis=n.int("axis", 0), keepdims=n.flag("keepdims", True), select_last_index=last)


@onnx_op("CumSum", since=11)
def cumsum(n: Node) -> Result:
    return _cumulate(n, ops.cumsum)


@onnx_op("CumProd", since=26)
def cumprod(n: Node) -> Result:
    return _cumulate(n, ops.cumprod)


def _cumulate(n: Node, op: Callable[..., Expr]) -> Expr:
    exclusive, reverse = n.flag("exclusive"), n.flag("reverse")

    def along(axes: tuple[int, ...]) -> Expr:
        return n.emit(op(n.input(0), axis=axes[0], exclusive=exclusive, reverse=reverse))

    return by_axes(n, 1, n.rank(), along)
