"""Convert convolution networks to the channels-last layout: (n, c, spatial...) becomes (n, spatial..., c).

With channels last, a convolution is vectorized along its output channels for all spatial sizes, strides and dilations.
The pass makes one traversal. Convolutions with constant filters are converted; the layout then propagates through the
ops that have a rule (`RULES`):

    y = conv(x, w)          y' = conv(transpose(x), w', layout="last");   y = transpose(y')
    z = relu(y)       =>    z' = relu(y');                                z = transpose(z')
    s = softmax(z)          s = softmax(z)

Every value stays available in its original layout as a transpose of the new one; unused transposes are removed as dead
code. Thus data are transposed only at the boundaries of a region of such ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from relaxlite.ir.expr import AttrValue, Body, Call, Constant, Expr, ShapeValue, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op, get_op
from relaxlite.ir.ops.binary import BinaryOp
from relaxlite.ir.ops.elementwise import CastOp, UnaryOp
from relaxlite.ir.ops.reduce import ReduceOp
from relaxlite.ir.symbolic import SymExpr, as_int
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import Rewriter, map_functions

MIN_CHANNELS = 8  # of a result worth vectorizing along channels
MAX_BROADCAST_CHANNELS = (
    4  # of an input that is read channels first: its elements are broadcast, which needs no contiguous channels
)
Shape: TypeAlias = "tuple[SymExpr, ...]"


def channels_last(module: IRModule) -> IRModule:
    """Convert convolutions with constant filters, and the ops between them, to the channels-last layout."""
    return map_functions(module, lambda f: _ChannelsLast().function(f))


def order_last(rank: int) -> tuple[int, ...]:
    """The axes of the transpose from (n, c, spatial...) to (n, spatial..., c)."""
    return (0, *range(2, rank), 1)


def order_first(rank: int) -> tuple[int, ...]:
    """The axes of the transpose from (n, spatial..., c) to (n, c, spatial...)."""
    return (0, rank - 1, *range(1, rank - 1))


class _ChannelsLast(Rewriter):
    """`last`: values of rank 3 or more -> their channels-last form; `values`: variables -> the bound expressions."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[Var, Expr] = {}
        self.values: dict[Var, Expr] = {}
        self._converted: Expr | None = None  # channels-last form of the value being bound

    def body(self, body: Body) -> Body:
        outer = self.last, self.values
        self.last, self.values = dict(self.last), dict(self.values)
        new = super().body(body)
        self.last, self.values = outer
        return new

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        self._converted = None
        if not isinstance(value, Call) or not isinstance(value.callee, Op):
            return None
        rule = _rule_of(value.callee)
        converted = rule(self, value) if rule is not None else None
        if converted is None:
            return None
        rank = len(shape_of(value))
        if rank < 3 or value.callee.name == "transpose":  # the result is in the original layout
            return converted
        self._converted = self.emit(converted)
        return get_op("transpose")(self._converted, axes=order_first(rank), loc=value.loc)

    def bind(self, var: Var, value: Expr) -> None:
        converted = self._converted
        super().bind(var, value)
        target = self.env.get(var, var)
        if isinstance(target, Var):
            self.values[target] = value
            if converted is not None:
                self.last[target] = converted

    def emit(self, value: Expr) -> Var:
        """Bind a value to a new variable and record it."""
        var = self.bb.emit(value)
        self.values[var] = value
        return var

    def is_last(self, expr: Expr) -> bool:
        """Whether the value is available in channels-last form, or is a transpose of such a form."""
        if not isinstance(expr, Var):
            return False
        return expr in self.last or self._order_of(expr) == order_first(len(shape_of(expr)))

    def to_last(self, expr: Expr) -> Expr:
        """The value in channels-last form, transposed if needed."""
        order = order_last(len(shape_of(expr)))
        if isinstance(expr, Constant):
            return Constant.of(np.transpose(expr.value, order), name=expr.name)
        assert isinstance(expr, Var)
        if expr not in self.last:
            self.last[expr] = self._transposed_to(expr, order)
        return self.last[expr]

    def _transposed_to(self, expr: Var, order: tuple[int, ...]) -> Expr:
        before = self._order_of(expr)
        if before is None:
            return self.emit(get_op("transpose")(expr, axes=order))
        source = self.values[expr].args[0]  # type: ignore[union-attr]
        composed = tuple(before[axis] for axis in order)
        return (
            source if composed == tuple(range(len(composed))) else self.emit(get_op("transpose")(source, axes=composed))
        )

    def _order_of(self, expr: Var) -> tuple[int, ...] | None:
        """The axes of the transpose that computes the value; None: another op does."""
        value = self.values.get(expr)
        if not isinstance(value, Call) or not isinstance(value.callee, Op) or value.callee.name != "transpose":
            return None
        rank, axes = len(shape_of(expr)), value.attrs["axes"]
        assert axes is None or isinstance(axes, tuple)
        return tuple(reversed(range(rank))) if axes is None else tuple(a % rank for a in _ints(axes))


def shape_of(expr: Expr) -> Shape:
    """The shape of a tensor; () if it is unknown."""
    assert isinstance(expr.ty, TensorType)
    return expr.ty.shape or ()


def _ints(values: AttrValue) -> tuple[int, ...]:
    """The value of an attribute of kind "ints"."""
    assert isinstance(values, tuple)
    return tuple(v for v in values if isinstance(v, int))


Rule: TypeAlias = Callable[[_ChannelsLast, Call], "Expr | None"]


def _rule_of(op: Op) -> Rule | None:
    if isinstance(op, UnaryOp | BinaryOp | CastOp) or op.name == "where":
        return _elementwise
    return _reduction if isinstance(op, ReduceOp) else RULES.get(op.name)


def _permuted(values: Iterable[Any]) -> tuple[Any, ...]:
    """Permute one entry per dimension from (n, c, spatial...) to channels-last order."""
    values = tuple(values)
    return tuple(values[axis] for axis in order_last(len(values)))


def _axis_last(axis: int, rank: int) -> int:
    return order_last(rank).index(axis % rank)


def _recreate(call: Call, *args: Expr, **changed: Any) -> Call:
    """A call of the same op with new operands and some attributes changed."""
    assert isinstance(call.callee, Op)
    return call.callee(*args, loc=call.loc, **{**call.attrs, **changed})


# Convolutions


def _conv(state: _ChannelsLast, call: Call) -> Expr | None:
    """conv(x, w) = first(conv(last(x), w', "last")), if vectorizing along the output channels pays."""
    x, w, pads = call.args
    if call.attrs["layout"] != "first" or not isinstance(w, Constant):
        return None
    oc, groups, channels = w.value.shape[0], call.attrs["groups"], as_int(shape_of(x)[1])
    is_depthwise = groups == oc == channels and groups != 1
    if not is_depthwise and groups != 1:
        return None
    if oc < MIN_CHANNELS and not (state.is_last(x) and not is_depthwise):
        return None
    filters = Constant.of(np.ascontiguousarray(np.moveaxis(w.value, (0, 1), (-1, -2))), name=w.name)
    if state.is_last(x):
        source = state.to_last(x)
        if is_depthwise:
            source, pads = _fold_pad(state, source, pads)
        return _recreate(call, source, filters, pads, layout="last")
    if is_depthwise:
        return None
    if channels is not None and channels <= MAX_BROADCAST_CHANNELS:
        return _recreate(call, x, filters, pads, layout="first_to_last")
    return _recreate(call, state.to_last(x), filters, pads, layout="last")


def _conv_integer(state: _ChannelsLast, call: Call) -> Expr | None:
    """8-bit convolutions without zero points (byte_products.py): dp4a sums adjacent channels, so channels are last."""
    x, w, *rest = call.args
    if len(rest) > 1 or not isinstance(w, Constant) or call.attrs["layout"] != "first" or call.attrs["groups"] != 1:
        return None
    filters = Constant.of(np.ascontiguousarray(np.moveaxis(w.value, (0, 1), (-1, -2))), name=w.name)
    return _recreate(call, state.to_last(x), filters, *rest, layout="last")


def _fold_pad(state: _ChannelsLast, x: Expr, pads: Expr) -> tuple[Expr, Expr]:
    """conv(pad(x), pads) = conv(x, pads + padding of x): saves a depthwise convolution the padded copy."""
    pad = state.values.get(x) if isinstance(x, Var) else None
    if not isinstance(pad, Call) or not isinstance(pad.callee, Op) or pad.callee.name != "pad" or len(pad.args) != 3:
        return x, pads
    source, before, after = pad.args
    if pad.attrs["mode"] != "constant" or not all(isinstance(a, ShapeValue) for a in (before, after, pads)):
        return x, pads
    assert isinstance(before, ShapeValue) and isinstance(after, ShapeValue) and isinstance(pads, ShapeValue)
    if any(as_int(p.values[k]) != 0 for p in (before, after) for k in (0, -1)):
        return x, pads
    if any((as_int(v) or 0) < 0 or as_int(v) is None for v in (*before.values, *after.values)):
        return x, pads
    if any(as_int(v) != 0 for v in pads.values):
        return x, pads
    return source, ShapeValue((*before.values[1:-1], *after.values[1:-1]))


def _phase_interleave(state: _ChannelsLast, call: Call) -> Expr | None:
    """After a convolution: permute its filters so that the channels of each phase are contiguous."""
    x = call.args[0]
    conv = state.values.get(state.last[x]) if isinstance(x, Var) and x in state.last else None  # type: ignore[arg-type]
    if not isinstance(conv, Call) or not isinstance(conv.callee, Op) or conv.callee.name != "conv":
        return None
    w = conv.args[1]
    if not isinstance(w, Constant) or conv.attrs["groups"] != 1:
        return None
    phases = math.prod(_ints(call.attrs["strides"]))
    *rest, columns = w.value.shape
    by_phase = np.swapaxes(w.value.reshape(*rest, columns // phases, phases), -1, -2).reshape(w.value.shape)
    moved = state.emit(_recreate(conv, conv.args[0], Constant.of(np.ascontiguousarray(by_phase)), conv.args[2]))
    return _recreate(call, moved, *call.args[1:], channels_last=True)


# Ops that inherit the layout of their operands


def _elementwise(state: _ChannelsLast, call: Call) -> Expr | None:
    """f(x, y) = first(f(last(x), last(y))); operands of lower rank get leading dimensions of size 1."""
    rank = len(shape_of(call))
    if rank < 3 or not any(state.is_last(a) and len(shape_of(a)) == rank for a in call.args):
        return None
    return _recreate(call, *(_broadcast_operand(state, a, rank) for a in call.args))


def _broadcast_operand(state: _ChannelsLast, x: Expr, rank: int) -> Expr:
    shape = shape_of(x)
    if all(as_int(d) == 1 for d in shape):
        return x
    if len(shape) < rank:
        wide = (1,) * (rank - len(shape)) + tuple(shape)
        if isinstance(x, Constant):
            x = Constant.of(x.value.reshape([int(d) for d in wide]), name=x.name)
        else:
            x = state.emit(get_op("reshape")(x, wide))
    return state.to_last(x)


def _quantization(state: _ChannelsLast, call: Call) -> Expr | None:
    """Quantization per tensor or per axis; not blocked."""
    x, *scales = call.args
    if not state.is_last(x) or call.attrs["block_size"]:
        return None
    rank, axis = len(shape_of(x)), call.attrs["axis"]
    assert isinstance(axis, int)
    return _recreate(call, state.to_last(x), *scales, axis=_axis_last(axis, rank) if -rank <= axis < rank else axis)


def _pool(state: _ChannelsLast, call: Call) -> Expr | None:
    x = call.args[0]
    return _recreate(call, state.to_last(x), call.args[1], channels_last=True) if state.is_last(x) else None


def _pad(state: _ChannelsLast, call: Call) -> Expr | None:
    x, before, after, *value = call.args
    if not state.is_last(x) or not isinstance(before, ShapeValue) or not isinstance(after, ShapeValue):
        return None
    low, high = ShapeValue(_permuted(before.values)), ShapeValue(_permuted(after.values))
    return _recreate(call, state.to_last(x), low, high, *value)


def _resize(state: _ChannelsLast, call: Call) -> Expr | None:
    x, sizes, *scale = call.args
    if not state.is_last(x) or not isinstance(sizes, ShapeValue):
        return None
    scales, roi, axes = call.attrs["scales"], call.attrs["roi"], call.attrs["axes"]
    rank = len(sizes.values)
    changed: dict[str, Any] = {}
    if isinstance(scales, tuple):
        changed["scales"] = _permuted(scales)
    if isinstance(roi, tuple):
        changed["roi"] = (*_permuted(roi[:rank]), *_permuted(roi[rank:]))
    if isinstance(axes, tuple):
        changed["axes"] = tuple(_axis_last(axis, rank) for axis in axes if isinstance(axis, int))
    return _recreate(call, state.to_last(x), ShapeValue(_permuted(sizes.values)), *scale, **changed)


def _concat(state: _ChannelsLast, call: Call) -> Expr | None:
    rank, axis = len(shape_of(call)), call.attrs["axis"]
    assert isinstance(axis, int)
    if rank < 3 or not any(map(state.is_last, call.args)):
        return None
    return _recreate(call, *map(state.to_last, call.args), axis=_axis_last(axis, rank))


def _slice(state: _ChannelsLast, call: Call) -> Expr | None:
    x, rank, axes = call.args[0], len(shape_of(call)), call.attrs["axes"]
    if rank < 3 or not state.is_last(x):
        return None
    over = range(rank) if axes is None else axes
    assert isinstance(over, tuple | range)
    return _recreate(call, state.to_last(x), *call.args[1:], axes=tuple(_axis_last(a, rank) for a in over))  # type: ignore[arg-type]


def _broadcast_to(state: _ChannelsLast, call: Call) -> Expr | None:
    x, shape = call.args
    if not state.is_last(x) or len(shape_of(x)) != len(shape_of(call)) or not isinstance(shape, ShapeValue):
        return None
    return _recreate(call, state.to_last(x), ShapeValue(_permuted(shape.values)))


def _reduction(state: _ChannelsLast, call: Call) -> Expr | None:
    """Reductions over any axes with `keepdims`, else over spatial axes, after which (n, c) is last in both layouts."""
    x, axes = call.args[0], call.attrs["axes"]
    rank = len(shape_of(x))
    if not state.is_last(x) or not isinstance(axes, tuple):
        return None
    over = {a % rank for a in _ints(axes)}
    if over & {0, 1} and not call.attrs["keepdims"]:
        return None
    return _recreate(call, state.to_last(x), axes=tuple(sorted(_axis_last(a, rank) for a in over)))


def _reshape(state: _ChannelsLast, call: Call) -> Expr | None:
    """Reshapes that keep (n, c) and change spatial dimensions only."""
    x, shape = call.args[0], shape_of(call)
    before = shape_of(x)
    if not state.is_last(x) or len(shape) < 2 or any(a is not b for a, b in zip(before[:2], shape[:2], strict=True)):
        return None
    return _recreate(call, state.to_last(x), ShapeValue((shape[0], *shape[2:], shape[1])))


def _transpose(state: _ChannelsLast, call: Call) -> Expr | None:
    """Transpose the channels-last form directly, composing both permutations."""
    x, axes = call.args[0], call.attrs["axes"]
    if not isinstance(x, Var) or x not in state.last or not isinstance(axes, tuple):
        return None
    rank = len(axes)
    order = tuple(order_first(rank)[a % rank] for a in _ints(axes))
    source = state.last[x]
    if order == tuple(range(rank)):
        return source
    return replace(get_op("transpose")(source, axes=order), loc=call.loc)


RULES: Mapping[str, Rule] = {
    "conv": _conv, "conv_integer": _conv_integer, "quantize_linear": _quantization,
    "dequantize_linear": _quantization, "phase_interleave": _phase_interleave,
    "max_pool": _pool, "avg_pool": _pool, "lp_pool": _pool,
    "pad": _pad, "resize": _resize, "concat": _concat, "slice": _slice, "broadcast_to": _broadcast_to,
    "reshape": _reshape, "transpose": _transpose,
}  # fmt: skip
