"""LSTM, GRU and plain RNN with the semantics of ONNX.

A layer is composed of one matrix product, which projects all time steps at once, and a *scan* per direction: an op
whose program is a serial loop over time around a small matrix product of the state. The composition is written once,
for an `ExprOps`, and runs on expressions (decompose) as well as on arrays (reference).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Expr, Tuple, TupleGetItem
from relaxlite.ir.op import Attr, Op, Sample, get_op, register
from relaxlite.ir.ops.broadcast import PROVER, format_shape
from relaxlite.ir.ops.recurrent_scan import ACTIVATION_PARAMETERS, ACTIVATIONS
from relaxlite.ir.ops.scalars import HALF
from relaxlite.ir.symbolic import as_int, sym
from relaxlite.ir.types import TensorType, TupleType, Type


class ExprOps:
    """Interface of the composition: runs ops on expressions, emitting calls by a builder."""

    def __init__(self, bb: BlockBuilder) -> None:
        self.bb = bb

    def run(self, name: str, *operands: Any, **attrs: Any) -> Any:
        return self.bb.emit(get_op(name)(*operands, **attrs))

    def shape(self, x: Any) -> Any:
        return x.ty.shape

    def field(self, x: Any, k: int) -> Any:
        return self.bb.emit(TupleGetItem(x, k))


class ArrayOps(ExprOps):
    """Runs the references of ops on NumPy arrays."""

    def __init__(self) -> None:
        pass

    def run(self, name: str, *operands: Any, **attrs: Any) -> Any:
        op = get_op(name)
        return op.reference(*(x for x in operands if x is not None), **op.check_attrs(attrs))

    def shape(self, x: Any) -> Any:
        return x.shape

    def field(self, x: Any, k: int) -> Any:
        return x[k]


def _part(ops: ExprOps, x: Any, axis: int, begin: Any, size: Any) -> Any:
    return ops.run("slice", x, (begin,), (size,), axes=(axis,))


def _direction(ops: ExprOps, x: Any, d: int) -> Any:
    """Slice x[d] of a weight whose first dimension is the direction."""
    shape = tuple(ops.shape(x))
    return ops.run("reshape", x if as_int(shape[0]) == 1 else _part(ops, x, 0, d, 1), shape[1:])


class _Recurrent(Op):
    """Base of the recurrent layers: directions, shapes, and the composition around the scan."""

    gates: ClassVar[int]
    states: ClassVar[int]
    attrs: ClassVar[Mapping[str, Attr]] = {
        "direction": Attr("str", "forward", ("forward", "reverse", "bidirectional")),
        "activations": Attr("str", ""),  # names of unary ops, comma-separated, direction by direction
        "alphas": Attr("floats", None),  # one per activation
        "betas": Attr("floats", None),
        "clip": Attr("float", None),
        "layout": Attr("int", 0, (0, 1)),  # 1: batch is the first dimension of x and of all results
    }
    default_activations: ClassVar[tuple[str, ...]]

    def infer(self, x: Expr, w: Expr, r: Expr, b: Expr, *rest: Expr, direction: str, layout: int, **attrs: Any) -> Type:
        xt = self.tensor(x, "x")
        shapes = [self.tensor(e, name).shape or () for e, name in zip((x, w, r, b, *rest), self.names(), strict=False)]
        (one, two), hidden = (shapes[0] + (sym(1),) * 3)[:2], (shapes[2] or (sym(0),))[-1]
        steps, batch = (two, one) if layout else (one, two)
        count, rows = 2 if direction == "bidirectional" else 1, hidden * self.gates
        state = (batch, sym(count), hidden) if layout else (sym(count), batch, hidden)
        expected = [shapes[0], (count, rows, (shapes[0] or (sym(0),))[-1]), (count, rows, hidden), (count, rows * 2)]
        expected += [state] * self.states + [(batch,), (count, hidden * 3)]
        for shape, wanted, name in zip(shapes, expected, self.names(), strict=False):
            dims = tuple(map(sym, wanted))
            if name == "x" and len(shape) != 3:
                self.fail(f"x must be (time, batch, input), got {xt}")
            if len(shape) != len(dims) or any(map(PROVER.can_prove_ne, shape, dims)):
                self.fail(f"{name} must have shape {format_shape(dims)}, got {format_shape(shape)}")
        if not dtypes.is_float(xt.dtype):
            self.fail(f"x must be of a float dtype, got {xt.dtype}")
        self.per_direction(count, attrs)
        y = (batch, steps, sym(count), hidden) if layout else (steps, sym(count), batch, hidden)
        return TupleType((TensorType.of(y, xt.dtype), *[TensorType.of(state, xt.dtype)] * self.states))

    def names(self) -> tuple[str, ...]:
        """Names of the operands."""
        return tuple(name.rstrip("?") for name in self.operands)

    def per_direction(self, count: int, attrs: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Activation attributes of the scan of each direction; fails if they are not valid."""
        size = len(self.default_activations)
        activations = (
            attrs["activations"].split(",") if attrs["activations"] else list(self.default_activations) * count
        )
        if len(activations) != size * count or any(name not in ACTIVATIONS for name in activations):
            self.fail(f"activations must be {size * count} of {', '.join(ACTIVATIONS)}, got {attrs['activations']!r}")
        values: dict[str, Sequence[float]] = {}
        for k, name in enumerate(("alphas", "betas")):
            values[name] = attrs[name] or [
                ACTIVATION_PARAMETERS.get(activation, (0.0, 0.0))[k] for activation in activations
            ]
            if len(values[name]) != len(activations):
                self.fail(
                    f"{name} must have one value for each of the {len(activations)} activations, got {attrs[name]}"
                )
        direction_attrs = []
        for part in (slice(d * size, (d + 1) * size) for d in range(count)):
            names = ",".join(activations[part])
            direction_attrs.append(
                {"activations": names, "alphas": values["alphas"][part], "betas": values["betas"][part]}
            )
        return direction_attrs

    def compose(self, ops: ExprOps, x: Any, w: Any, r: Any, b: Any, *rest: Any, attrs: Mapping[str, Any]) -> list[Any]:
        """Run the layer: [y, final states...]."""
        states, extra = list(rest[: self.states]), rest[self.states :]
        lengths, more = (extra[0] if extra else None), extra[1:]
        if attrs["layout"]:
            x, *states = (ops.run("transpose", e, axes=(1, 0, 2)) for e in (x, *states))
        steps, batch, inputs = ops.shape(x)
        rows, count = ops.shape(w)[1], int(ops.shape(w)[0])
        flat = ops.run("reshape", x, (steps * batch, inputs))
        ys, finals = [], []
        for d, scan_attrs in enumerate(self.per_direction(count, attrs)):
            reverse = attrs["direction"] == "reverse" or d == 1
            weights = ops.run("transpose", _direction(ops, w, d), axes=(1, 0))
            projected = ops.run("reshape", ops.run("matmul", flat, weights), (steps, batch, rows))
            operands = self.scan_operands(ops, projected, r, b, states, lengths, more, d)
            scan_attrs |= {"clip": attrs["clip"], "reverse": reverse and lengths is None, **self.scan_attrs(attrs)}
            if reverse and lengths is not None:
                operands[0] = ops.run("reverse_sequence", operands[0], lengths)
            result = ops.run(f"{self.name}_scan", *operands, **scan_attrs)
            y, *final = (ops.field(result, k) for k in range(1 + self.states))
            if reverse and lengths is not None:
                y = ops.run("reverse_sequence", y, lengths)
            ys.append(ops.run("expand_dims", y, axes=(1,)))
            finals.append([ops.run("expand_dims", state, axes=(0,)) for state in final])
        results = [(ys, 1), *(([final[k] for final in finals], 0) for k in range(self.states))]
        joined = [parts[0] if count == 1 else ops.run("concat", *parts, axis=axis) for parts, axis in results]
        if attrs["layout"]:
            y, *final = joined
            moved = [ops.run("transpose", state, axes=(1, 0, 2)) for state in final]
            return [ops.run("transpose", y, axes=(2, 0, 1, 3)), *moved]
        return joined

    def scan_operands(
        self,
        ops: ExprOps,
        projected: Any,
        r: Any,
        b: Any,
        states: Sequence[Any],
        lengths: Any,
        more: Sequence[Any],
        d: int,
    ) -> list[Any]:
        """Operands of the scan of direction d: gates plus both biases, r transposed, states, lengths."""
        rows = ops.shape(b)[1] // 2
        bias = _direction(ops, b, d)
        both = ops.run("add", _part(ops, bias, 0, 0, rows), _part(ops, bias, 0, rows, rows))
        gates = ops.run("add", projected, both)
        recurrent = ops.run("transpose", _direction(ops, r, d), axes=(1, 0))
        return [gates, recurrent, *(_direction(ops, s, d) for s in states), *([] if lengths is None else [lengths])]

    def scan_attrs(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """Attributes of the scan that only this kind of layer has."""
        return {}

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr | None:
        dtype = self.tensor(call.args[0]).dtype
        ops, args = ExprOps(bb), list(call.args)
        if dtype in HALF:
            args = [ops.run("cast", a, dtype="float32") if self.tensor(a).dtype == dtype else a for a in args]
        results = self.compose(ops, *args, attrs=call.attrs)
        return Tuple(tuple(ops.run("cast", e, dtype=dtype) if dtype in HALF else e for e in results))

    def reference(self, x: Any, *rest: Any, **attrs: Any) -> Any:
        wide = np.float64 if x.dtype == np.float64 else np.float32
        operands = [a.astype(wide) if a.dtype == x.dtype else a for a in (x, *rest)]
        return tuple(e.astype(x.dtype) for e in self.compose(ArrayOps(), *operands, attrs=attrs))

    def samples(self) -> Iterable[Sample]:
        yield self.sample("t", "b", 3, 2, 1)
        yield self.sample("t", 2, "i", 3, 1, {"direction": "reverse", "clip": 0.5, "layout": 1})
        yield self.sample("t", "b", 2, 2, 2, {"direction": "bidirectional"}, lengths=True)

    def sample(
        self, t: int | str, b: int | str, i: int | str, h: int, d: int, attrs: Mapping[str, Any] | None = None, *,
        lengths: bool = False,
    ) -> Sample:  # fmt: skip
        first = bool(attrs and attrs.get("layout"))
        rows, state = h * self.gates, (b, d, h) if first else (d, b, h)
        shapes = [(b, t, i) if first else (t, b, i), (d, rows, i), (d, rows, h), (d, rows * 2), *[state] * self.states]
        kinds = ("float32",) * len(shapes)
        if not lengths:
            return Sample(tuple(shapes), attrs or {}, kinds, tolerance=1e-4)
        draw: Callable[..., Any] = lambda shape, rng: rng.integers(0, shape[0] + 1, shape)  # noqa: E731
        return Sample((*shapes, (b,)), attrs or {}, (*kinds, "int32"), {len(shapes): draw}, tolerance=1e-4)


@register
class Lstm(_Recurrent):
    """Long short-term memory: (y (t, d, b, h), final h (d, b, h), final c (d, b, h)), d directions.

    x (t, b, i), w (d, 4 h, i), r (d, 4 h, h), b (d, 8 h) with gates in the order input, output, forget, cell; states
    (d, b, h); lengths (b,) of the sequences; peepholes (d, 3 h) for input, output, forget, after lengths.
    quantize_state: the state is fake-quantized to 8 bits by its range, in its own dtype, before r multiplies it.
    """

    name = "lstm"
    operands = ("x", "w", "r", "b", "initial_h", "initial_c", "lengths?", "peepholes?")
    gates, states = 4, 2
    attrs: ClassVar[Mapping[str, Attr]] = {
        **_Recurrent.attrs, "input_forget": Attr("bool", False), "quantize_state": Attr("bool", False),
    }  # fmt: skip
    default_activations = ("sigmoid", "tanh", "tanh")

    def scan_operands(
        self,
        ops: ExprOps,
        projected: Any,
        r: Any,
        b: Any,
        states: Sequence[Any],
        lengths: Any,
        more: Sequence[Any],
        d: int,
    ) -> list[Any]:
        operands = super().scan_operands(ops, projected, r, b, states, lengths, more, d)
        return operands + [_direction(ops, peepholes, d) for peepholes in more]

    def scan_attrs(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        return {"input_forget": attrs["input_forget"], "quantize_state": attrs["quantize_state"]}

    def samples(self) -> Iterable[Sample]:
        yield from super().samples()
        plain = self.sample("t", "b", 2, 3, 1, {"input_forget": True}, lengths=True)
        kinds = (*plain.dtypes, "float32")
        yield Sample((*plain.shapes, (1, 9)), plain.attrs, kinds, plain.make, tolerance=1e-4)


@register
class Gru(_Recurrent):
    """Gated recurrent unit: (y (t, d, b, h), final h (d, b, h)), gates in the order update, reset, hidden.

    x (t, b, i), w (d, 3 h, i), r (d, 3 h, h), b (d, 6 h), initial_h (d, b, h), lengths (b,) of the sequences.
    """

    name = "gru"
    operands = ("x", "w", "r", "b", "initial_h", "lengths?")
    gates, states = 3, 1
    attrs: ClassVar[Mapping[str, Attr]] = {**_Recurrent.attrs, "linear_before_reset": Attr("bool", False)}
    default_activations = ("sigmoid", "tanh")

    def scan_operands(
        self,
        ops: ExprOps,
        projected: Any,
        r: Any,
        b: Any,
        states: Sequence[Any],
        lengths: Any,
        more: Sequence[Any],
        d: int,
    ) -> list[Any]:
        """Operands of the scan, including the recurrent bias, which it adds before the reset gate."""
        bias, rows = _direction(ops, b, d), ops.shape(b)[1] // 2
        gates = ops.run("add", projected, _part(ops, bias, 0, 0, rows))
        weights = ops.run("transpose", _direction(ops, r, d), axes=(1, 0))
        recurrent, state = _part(ops, bias, 0, rows, rows), _direction(ops, states[0], d)
        return [gates, weights, recurrent, state, *([] if lengths is None else [lengths])]

    def scan_attrs(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        return {"linear_before_reset": attrs["linear_before_reset"]}

    def samples(self) -> Iterable[Sample]:
        yield from super().samples()
        yield self.sample("t", "b", 2, 3, 1, {"linear_before_reset": True})


@register
class Rnn(_Recurrent):
    """Plain recurrent layer, h = f(W x + R h + b): (y (t, d, b, h), final h (d, b, h)).

    x (t, b, i), w (d, h, i), r (d, h, h), b (d, 2 h), initial_h (d, b, h), lengths (b,) of the sequences.
    """

    name = "rnn"
    operands = ("x", "w", "r", "b", "initial_h", "lengths?")
    gates, states = 1, 1
    default_activations = ("tanh",)

    def samples(self) -> Iterable[Sample]:
        yield from super().samples()
        attrs = {"activations": "leaky_relu", "alphas": (0.2,), "clip": 1.0}
        yield self.sample("t", "b", 2, 3, 1, attrs)
