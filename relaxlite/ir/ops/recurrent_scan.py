"""Scans, the loops over time of one direction of LSTM, GRU and RNN (ops/recurrent.py).

`gates` (t, b, gates * h) are the projections of every step with their biases, `r` (h, gates * h) multiplies the state.
A step t >= lengths[b] leaves the state of sequence b unchanged and yields 0. With `reverse`, time runs backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Attr, Op, Sample, get_op, register
from relaxlite.ir.ops.elementwise import FLOAT, check_dtype
from relaxlite.ir.ops.linalg import equality_checks
from relaxlite.ir.ops.scalars import HALF, Scalar, identity, index, literal, select
from relaxlite.ir.program import Allocate, Buffer, Stmt, Store, Value, compute, loops, reduce, seq
from relaxlite.ir.symbolic import SymExpr, SymVar
from relaxlite.ir.types import TensorType, TupleType, Type

ACTIVATION_PARAMETERS = {  # activations with parameters: ONNX's defaults of alpha and beta
    "affine": (1.0, 0.0), "leaky_relu": (0.01, 0.0), "thresholded_relu": (1.0, 0.0), "scaled_tanh": (1.0, 1.0),
    "hard_sigmoid": (0.2, 0.5), "elu": (1.0, 0.0),
}  # fmt: skip
ACTIVATIONS = (*ACTIVATION_PARAMETERS, "relu", "tanh", "sigmoid", "softsign", "softplus")

Activation = Callable[[Any], Any]


def _activation(name: str, alpha: float, beta: float, *, on_arrays: bool) -> Activation:
    """Activation function on Scalars or on arrays: the formula of the unary op of this name, if there is one."""
    if name == "affine":
        return lambda x: x * alpha + beta
    if name == "scaled_tanh":
        return (lambda x: np.tanh(x * beta) * alpha) if on_arrays else (lambda x: (x * beta).tanh() * alpha)
    op: Any = type(get_op(name))
    attrs = {k: v for k, v in {"alpha": alpha, "beta": beta}.items() if k in op.attrs}
    return partial(op.numpy if on_arrays else op.formula, **attrs)


def _limited(f: Activation, limit: Activation, x: Any) -> Any:
    return f(limit(x))


class _Scan(Op):
    """Base of the scans."""

    attrs: ClassVar[Mapping[str, Attr]] = {
        "activations": Attr("str"), "alphas": Attr("floats"), "betas": Attr("floats"), "clip": Attr("float", None),
        "reverse": Attr("bool", False),
    }  # fmt: skip
    states: ClassVar[int] = 1

    def infer(self, gates: Expr, r: Expr, *rest: Expr, **attrs: Any) -> Type:
        ty, weights = self.tensor(gates, "gates"), self.tensor(r, "r")
        check_dtype(self, ty, FLOAT, "gates")
        if ty.rank != 3 or weights.rank != 2:
            self.fail(f"gates must be (time, batch, gates) and r (hidden, gates), got {ty} and {weights}")
        (steps, batch, _), (hidden, _) = ty.shape or (), weights.shape or ()
        state = TensorType.of((batch, hidden), ty.dtype)
        return TupleType((TensorType.of((steps, batch, hidden), ty.dtype), *[state] * self.states))

    def functions(self, attrs: Mapping[str, Any], *, on_arrays: bool) -> list[Activation]:
        """Activation functions, after clipping except for the third of LSTM, which is applied to the cell."""
        names, clip = attrs["activations"].split(","), attrs["clip"]
        specs = zip(names, attrs["alphas"], attrs["betas"], strict=True)
        functions = [_activation(name, alpha, beta, on_arrays=on_arrays) for name, alpha, beta in specs]

        def limit(x: Any) -> Any:
            return np.clip(x, -clip, clip) if on_arrays else x.minimum(clip).maximum(-clip)

        clipped = [partial(_limited, f, limit) for f in functions[:2]]
        return functions if clip is None else [*clipped, *functions[2:]]

    def reference(self, gates: Any, r: Any, *rest: Any, **attrs: Any) -> Any:
        *states, lengths = self.split(rest)
        functions = self.functions(attrs, on_arrays=True)
        y = np.zeros((*gates.shape[:2], r.shape[0]), gates.dtype)
        for t in range(gates.shape[0]):
            at = gates.shape[0] - 1 - t if attrs["reverse"] else t
            new = self.step(gates[at], r, states, rest, functions, attrs)
            active = (t < lengths)[:, None] if lengths is not None else True
            states = [np.where(active, after, before) for after, before in zip(new, states, strict=True)]
            y[at] = np.where(active, states[0], 0)
        return (y, *(state.astype(gates.dtype) for state in states))

    def split(self, rest: tuple[Any, ...]) -> tuple[Any, ...]:
        """Split the operands after r into (states..., lengths or None)."""
        return (*rest[: self.states], rest[self.states] if len(rest) > self.states else None)

    def step(
        self, gates: Any, r: Any, states: list[Any], rest: tuple[Any, ...], f: list[Activation], attrs: Any
    ) -> list[Any]:
        """Compute the states after one step in NumPy."""
        raise TypeError(f"op {self.name} declares no step")


class _Loop:
    """Builder of the statements of one step; `at` is the position in time, `y` and `states` are the outputs."""

    def __init__(
        self, t: SymVar, gates: Buffer, out: tuple[Buffer, ...], lengths: Buffer | None, reverse: bool
    ) -> None:
        self.t, self.gates, self.lengths = t, gates, lengths
        self.y, *self.states = out
        self.at: SymExpr = gates.shape[0] - 1 - t if reverse else t

    def gate(self, b: SymExpr, g: SymExpr) -> Scalar:
        return Scalar(self.gates[self.at, b, g])

    def update(self, state: Buffer, value: Callable[[SymExpr, SymExpr], Scalar]) -> Stmt:
        """Build state[b, j] = value(b, j), unless sequence b has ended."""

        def new(b: SymExpr, j: SymExpr) -> Value:
            if self.lengths is None:
                return value(b, j).value
            return select(self.is_active(b), value(b, j), Scalar(state[b, j])).value

        return compute(state, new)

    def is_active(self, b: SymExpr) -> Scalar:
        assert self.lengths is not None
        return index(self.t) < Scalar(self.lengths[b]).cast("int64")

    def emit(self) -> Stmt:
        """Build y[at] = h, 0 after the end of a sequence."""
        h = self.states[0]
        zero = Scalar(literal(0.0, h.dtype))

        def value(b: SymExpr, j: SymExpr) -> Value:
            state = Scalar(h[b, j])
            return state.value if self.lengths is None else select(self.is_active(b), state, zero).value

        return loops("bj", h.shape, lambda b, j: Store(self.y, (self.at, b, j), value(b, j)))

    def fake_quantize(self, out: Buffer, state: Buffer, low: Buffer, high: Buffer) -> Stmt:
        """Build out = the state fake-quantized to 8 bits by its range, as by `dynamic_quantize_linear`."""
        span = (Scalar(high[()]) - Scalar(low[()])) / 255.0
        scale = select(span.equals(0.0), 1.0, span)
        zero = (-Scalar(low[()]) / scale).minimum(255.0).maximum(0.0).unary("round")

        def value(b: SymExpr, j: SymExpr) -> Value:
            level = ((Scalar(state[b, j]) / scale).unary("round") + zero).minimum(255.0).maximum(0.0)
            return ((level - zero) * scale).value

        start = literal(0.0, state.dtype)
        ends = ((low, "min"), (high, "max"))
        ranges = (reduce(end, state.shape, how, start, lambda b, j: state[b, j]) for end, how in ends)
        return seq(*ranges, compute(out, value))

    def product(
        self, out: Buffer, left: Buffer, right: Buffer, offset: SymExpr | int, finish: Callable[..., Scalar]
    ) -> Stmt:
        """Build out[b, g] = finish(sum over k of left[b, k] * right[k, offset + g], b, g)."""
        zero = identity("add", out.dtype)

        def term(b: SymVar, g: SymVar, k: SymVar) -> Value:
            return (Scalar(left[b, k]) * Scalar(right[k, g + offset])).value

        return reduce(out, left.shape[1:], "add", zero, term, lambda total, b, g: finish(Scalar(total), b, g).value)


def _scan(out: tuple[Buffer, ...], initial: Iterable[Buffer], gates: Buffer, step: Callable[[SymVar], Stmt]) -> Stmt:
    """Copy the initial states to their outputs, then loop over time."""
    copies = [compute(state, lambda b, j, x=x: x[b, j]) for state, x in zip(out[1:], initial, strict=True)]
    return seq(*copies, loops("t", gates.shape[:1], step))


def _checks(
    name: str,
    gates: Buffer,
    r: Buffer,
    states: Iterable[Buffer],
    lengths: Buffer | None,
    *more: tuple[SymExpr, SymExpr],
) -> tuple[Stmt, ...]:
    """Run-time checks that all operands have the batch size of the gates and the widths of r."""
    batch, hidden = gates.shape[1], r.shape[0]
    ends = [] if lengths is None else [(lengths.shape[0], batch)]
    begins = [pair for state in states for pair in zip(state.shape, (batch, hidden), strict=True)]
    return (
        *equality_checks(f"{name}: lengths must have one value per sequence", *ends),
        *equality_checks(f"{name}: an initial state has another batch than x, or another size than r", *begins),
        *equality_checks(f"{name}: weights, bias or peepholes do not fit r", (gates.shape[2], r.shape[1]), *more),
    )


def _scan_samples(gates: int, operands: int, attrs: Mapping[str, Any]) -> Iterable[Sample]:
    """Samples with and without lengths, for scans with `operands` vectors or states after r."""
    more = [("b", 2)] * operands
    kinds = ("float32",) * (2 + operands)
    yield Sample((("t", "b", gates * 2), (2, gates * 2), *more), attrs, kinds, tolerance=1e-4)
    draw: Callable[..., Any] = lambda shape, rng: rng.integers(0, shape[0] + 1, shape)  # noqa: E731
    shapes = (("t", "b", gates * 2), (2, gates * 2), *more, ("b",))
    yield Sample(shapes, {**attrs, "reverse": True, "clip": 0.7}, (*kinds, "int32"), {2 + operands: draw}, 1e-4)


def _fake_quantize(state: Any) -> Any:
    """Fake-quantize a state as `_Loop.rounded` does, in NumPy; a float64 state in float64."""
    if state.dtype.name in HALF:
        state = state.astype(np.float32)
    number = state.dtype.type
    low, high = np.min(state, initial=0.0), np.max(state, initial=0.0)
    span = number((high - low) / number(255))
    scale = number(1) if span == 0 else span
    zero = np.rint(np.clip(-low / scale, 0, 255))
    return (np.clip(np.rint(state / scale) + zero, 0, 255) - zero) * scale


@register
class LstmScan(_Scan):
    """One direction of an LSTM: (y (t, b, h), final h (b, h), final c (b, h)); gates input, output, forget, cell.

    quantize_state: the state is fake-quantized to 8 bits by its range, in its own dtype, before r multiplies it.
    """

    name = "lstm_scan"
    operands = ("gates", "r", "h", "c", "lengths?", "peepholes?")
    attrs: ClassVar[Mapping[str, Attr]] = {
        **_Scan.attrs, "input_forget": Attr("bool", False), "quantize_state": Attr("bool", False),
    }  # fmt: skip
    states = 2

    def lower(
        self, gates: Buffer, r: Buffer, h0: Buffer, c0: Buffer, lengths: Buffer | None = None,
        peepholes: Buffer | None = None, *, out: tuple[Buffer, ...], **attrs: Any,
    ) -> Stmt:  # fmt: skip
        f, g, h = self.functions(attrs, on_arrays=False)
        hidden = r.shape[0]
        z = Buffer("z", (gates.shape[1], r.shape[1]), gates.dtype)
        rounded = Buffer("rounded", (gates.shape[1], hidden), gates.dtype)
        low, high = (Buffer(name, (), gates.dtype) for name in ("low", "high"))

        def step(t: SymVar) -> Stmt:
            loop = _Loop(t, gates, out, lengths, attrs["reverse"])
            state, cell = loop.states
            rounding = (loop.fake_quantize(rounded, state, low, high),) if attrs["quantize_state"] else ()

            def gate(k: int, b: SymExpr, j: SymExpr, peep: int | None) -> Scalar:
                result = Scalar(z[b, j + hidden * k])
                if peepholes is None or peep is None:
                    return result
                return result + Scalar(peepholes[j + hidden * peep]) * Scalar(cell[b, j])

            def new_cell(b: SymExpr, j: SymExpr) -> Scalar:
                enter = f(gate(0, b, j, 0))
                forget = 1.0 - enter if attrs["input_forget"] else f(gate(2, b, j, 2))
                return Scalar((forget * Scalar(cell[b, j]) + enter * g(gate(3, b, j, None))).value)

            def new_state(b: SymExpr, j: SymExpr) -> Scalar:
                return Scalar((f(gate(1, b, j, 1)) * h(Scalar(cell[b, j]))).value)

            left = rounded if rounding else state
            product = loop.product(z, left, r, 0, lambda total, b, k: total + loop.gate(b, k))
            return seq(*rounding, product, loop.update(cell, new_cell), loop.update(state, new_state), loop.emit())

        body = _scan(out, (h0, c0), gates, step)
        for local in (rounded, low, high) if attrs["quantize_state"] else ():
            body = Allocate(local, body)
        wide = [(r.shape[1], hidden * 4)] + ([] if peepholes is None else [(peepholes.shape[0], hidden * 3)])
        return seq(*_checks(self.name, gates, r, (h0, c0), lengths, *wide), Allocate(z, body))

    def step(
        self, gates: Any, r: Any, states: list[Any], rest: tuple[Any, ...], f: list[Activation], attrs: Any
    ) -> list[Any]:
        (state, cell), hidden = states, r.shape[0]
        if attrs["quantize_state"]:
            state = _fake_quantize(state)
        enter, leave, forget, new = np.split(gates + state @ r, 4, axis=1)
        peep = rest[3].reshape(3, hidden) if len(rest) > 3 else np.zeros((3, hidden), gates.dtype)
        enter = f[0](enter + peep[0] * cell)
        forget = 1 - enter if attrs["input_forget"] else f[0](forget + peep[2] * cell)
        cell = forget * cell + enter * f[1](new)
        return [f[0](leave + peep[1] * cell) * f[2](cell), cell]

    def samples(self) -> Iterable[Sample]:
        names = {"activations": "sigmoid,tanh,tanh", "alphas": (0.0,) * 3, "betas": (0.0,) * 3}
        yield from _scan_samples(4, 2, names)
        (plain, _) = _scan_samples(4, 2, {**names, "quantize_state": True})
        yield replace(plain, tolerance=0.02)  # rounding of a value halfway between two levels may differ
        yield replace(plain, dtypes=("float64",) * len(plain.shapes), tolerance=1e-12)


@register
class GruScan(_Scan):
    """One direction of a GRU: (y (t, b, h), final h (b, h)); gates update, reset, hidden.

    bias (3 h,) is added to the product of the state.
    """

    name = "gru_scan"
    operands = ("gates", "r", "bias", "h", "lengths?")
    attrs: ClassVar[Mapping[str, Attr]] = {**_Scan.attrs, "linear_before_reset": Attr("bool", False)}

    def lower(
        self, gates: Buffer, r: Buffer, bias: Buffer, h0: Buffer, lengths: Buffer | None = None, *,
        out: tuple[Buffer, ...], **attrs: Any,
    ) -> Stmt:  # fmt: skip
        f, g = self.functions(attrs, on_arrays=False)
        hidden, batch = r.shape[0], gates.shape[1]
        z = Buffer("z", (batch, hidden * 2), gates.dtype)
        new, reset = (Buffer(name, (batch, hidden), gates.dtype) for name in ("new", "reset"))

        def step(t: SymVar) -> Stmt:
            loop = _Loop(t, gates, out, lengths, attrs["reverse"])
            (state,) = loop.states

            def candidate(total: Scalar, b: SymExpr, j: SymExpr) -> Scalar:
                inner = total + Scalar(bias[j + hidden * 2])
                if attrs["linear_before_reset"]:
                    inner = Scalar(z[b, j + hidden]) * inner
                return Scalar(g(loop.gate(b, j + hidden * 2) + inner).value)

            def blend(b: SymExpr, j: SymExpr) -> Scalar:
                update = Scalar(z[b, j])
                return (1.0 - update) * Scalar(new[b, j]) + update * Scalar(state[b, j])

            gate = loop.product(z, state, r, 0, lambda total, b, k: f(total + Scalar(bias[k]) + loop.gate(b, k)))
            update = loop.update(state, blend)
            if attrs["linear_before_reset"]:
                return seq(gate, loop.product(new, state, r, hidden * 2, candidate), update, loop.emit())
            reset_state = compute(reset, lambda b, j: (Scalar(z[b, j + hidden]) * Scalar(state[b, j])).value)
            return seq(gate, reset_state, loop.product(new, reset, r, hidden * 2, candidate), update, loop.emit())

        wide = [(r.shape[1], hidden * 3), (bias.shape[0], hidden * 3)]
        checks = _checks(self.name, gates, r, (h0,), lengths, *wide)
        return seq(*checks, Allocate(z, Allocate(new, Allocate(reset, _scan(out, (h0,), gates, step)))))

    def split(self, rest: tuple[Any, ...]) -> tuple[Any, ...]:
        return (rest[1], rest[2] if len(rest) > 2 else None)

    def step(
        self, gates: Any, r: Any, states: list[Any], rest: tuple[Any, ...], f: list[Activation], attrs: Any
    ) -> list[Any]:
        (state,), bias, hidden = states, rest[0], r.shape[0]
        first = f[0](gates[:, : 2 * hidden] + state @ r[:, : 2 * hidden] + bias[: 2 * hidden])
        update, reset = np.split(first, 2, axis=1)
        if attrs["linear_before_reset"]:
            inner = reset * (state @ r[:, 2 * hidden :] + bias[2 * hidden :])
        else:
            inner = (reset * state) @ r[:, 2 * hidden :] + bias[2 * hidden :]
        return [(1 - update) * f[1](gates[:, 2 * hidden :] + inner) + update * state]

    def samples(self) -> Iterable[Sample]:
        names = {"activations": "sigmoid,tanh", "alphas": (0.0,) * 2, "betas": (0.0,) * 2}
        for sample in _scan_samples(3, 1, names):
            shapes = (*sample.shapes[:2], (6,), *sample.shapes[2:])
            make = {k + 1: draw for k, draw in sample.make.items()}
            kinds = ("float32", *sample.dtypes)
            for linear in (False, True):
                yield Sample(shapes, {**sample.attrs, "linear_before_reset": linear}, kinds, make, 1e-4)


@register
class RnnScan(_Scan):
    """One direction of an RNN, h = f(gates + h @ r): (y (t, b, h), final h (b, h))."""

    name = "rnn_scan"
    operands = ("gates", "r", "h", "lengths?")

    def lower(
        self, gates: Buffer, r: Buffer, h0: Buffer, lengths: Buffer | None = None, *, out: tuple[Buffer, ...],
        **attrs: Any,
    ) -> Stmt:  # fmt: skip
        (f,) = self.functions(attrs, on_arrays=False)
        new = Buffer("new", (gates.shape[1], r.shape[0]), gates.dtype)

        def step(t: SymVar) -> Stmt:
            loop = _Loop(t, gates, out, lengths, attrs["reverse"])
            (state,) = loop.states
            product = loop.product(new, state, r, 0, lambda total, b, j: f(total + loop.gate(b, j)))
            return seq(product, loop.update(state, lambda b, j: Scalar(new[b, j])), loop.emit())

        checks = _checks(self.name, gates, r, (h0,), lengths, (r.shape[1], r.shape[0]))
        return seq(*checks, Allocate(new, _scan(out, (h0,), gates, step)))

    def step(
        self, gates: Any, r: Any, states: list[Any], rest: tuple[Any, ...], f: list[Activation], attrs: Any
    ) -> list[Any]:
        return [f[0](gates + states[0] @ r)]

    def samples(self) -> Iterable[Sample]:
        yield from _scan_samples(1, 1, {"activations": "tanh", "alphas": (0.0,), "betas": (0.0,)})
        affine = {"activations": "affine", "alphas": (0.5,), "betas": (0.1,)}
        yield from _scan_samples(1, 1, affine)
