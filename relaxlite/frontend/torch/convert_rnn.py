"""Converters of LSTM, GRU and plain recurrent layers with dynamic time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relaxlite.frontend.torch.node import Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr
from relaxlite.ir.symbolic import sym

_LSTM_ORDER = (0, 3, 1, 2)  # torch: input, forget, cell, output; relaxlite: input, output, forget, cell
_GRU_ORDER = (1, 0, 2)  # torch: reset, update, hidden; relaxlite: update, reset, hidden


def _gates(n: Node, w: Expr, order: Sequence[int]) -> Expr:
    """Return a weight or bias with the blocks of its gates in another order."""
    size = n.shape_of(w)[0] // len(order)
    if list(order) == sorted(order):
        return w
    parts = [n.emit(ops.slice(w, (size * g,), (size,), axes=(0,))) for g in order]
    return n.emit(ops.concat(*parts, axis=0))


def _stacked(n: Node, xs: Sequence[Expr]) -> Expr:
    expanded = [n.emit(ops.expand_dims(x, axes=(0,))) for x in xs]
    return expanded[0] if len(expanded) == 1 else n.emit(ops.concat(*expanded, axis=0))


def _state_of(n: Node, state: Expr, layer: int, directions: int) -> Expr:
    return n.emit(ops.slice(state, (sym(layer * directions),), (sym(directions),), axes=(0,)))


def _recurrent(
    n: Node, x: Expr, states: Sequence[Expr], params: Sequence[Expr], op: Any, order: Sequence[int], has_biases: bool,
    layers: int, bidirectional: bool, batch_first: bool, *, is_projected: bool = False, **attrs: Any,
) -> tuple[Expr, ...]:  # fmt: skip
    """Emit the layers; return the output and the final state of each kind."""
    directions, per_direction = 2 if bidirectional else 1, (4 if has_biases else 2) + is_projected
    if len(params) != layers * directions * per_direction:
        n.fail(f"{len(params)} weights do not fit {layers} layers of {directions} directions")
    if batch_first:
        x = n.emit(ops.transpose(x, axes=(1, 0, 2)))
    finals: list[list[Expr]] = [[] for _ in states]
    for layer in range(layers):
        first = layer * directions * per_direction
        groups = [params[first + d * per_direction : first + (d + 1) * per_direction] for d in range(directions)]
        initial = [_state_of(n, s, layer, directions) for s in states]
        if is_projected:
            x, *last = _projected_layer(n, x, groups, initial, has_biases)
        else:
            x, *last = _layer(n, x, groups, initial, op, order, has_biases, attrs)
        for kept, state in zip(finals, last, strict=True):
            kept.append(state)
    if batch_first:
        x = n.emit(ops.transpose(x, axes=(1, 0, 2)))
    return x, *(f[0] if layers == 1 else n.emit(ops.concat(*f, axis=0)) for f in finals)


def _layer(
    n: Node, x: Expr, groups: Sequence[Sequence[Expr]], initial: Sequence[Expr], op: Any, order: Sequence[int],
    has_biases: bool, attrs: dict[str, Any],
) -> tuple[Expr, ...]:  # fmt: skip
    """Emit one layer; return y (t, b, directions * h) and the final states."""
    directions = len(groups)
    w, r = (_stacked(n, [_gates(n, g[k], order) for g in groups]) for k in (0, 1))
    if has_biases:
        pairs = [[_gates(n, b, order) for b in g[2:]] for g in groups]
        bias = _stacked(n, [n.emit(ops.concat(*pair, axis=0)) for pair in pairs])
    else:
        bias = n.full((sym(directions), n.shape_of(r)[1] * 2), 0, n.dtype())
    direction = "bidirectional" if directions == 2 else "forward"
    y, *last = n.fields(op(x, w, r, bias, *initial, direction=direction, **attrs))
    steps, _, batch, hidden = n.shape_of(y)
    rows = n.emit(ops.transpose(y, axes=(0, 2, 1, 3)))
    return n.reshape(rows, (steps, batch, hidden * directions)), *last


def _projected_layer(
    n: Node, x: Expr, groups: Sequence[Sequence[Expr]], initial: Sequence[Expr], has_biases: bool
) -> tuple[Expr, ...]:
    """Emit one LSTM layer whose state h is projected to fewer elements, h = P m, where m = o * tanh(c).

    The recurrence is that of m, by the product of recurrent and projection weights: R h = (R P) m. The first step, to
    which the initial h belongs, gets R h with its gates.
    """
    dtype, wide = n.dtype(), "float64" if n.dtype() == "float64" else "float32"
    x = n.cast(x, wide)
    ys, finals = [], []
    for d, group in enumerate(groups):
        w, r, *biases, projection = (n.cast(g, wide) for g in group)
        w, r = (n.emit(ops.transpose(_gates(n, g, _LSTM_ORDER))) for g in (w, r))
        to_state = n.emit(ops.transpose(projection))
        h, c = (n.cast(_state_of(n, s, d, 1), wide) for s in initial)
        gates = n.emit(ops.matmul(x, w))
        for bias in biases:
            gates = n.emit(ops.add(gates, _gates(n, bias, _LSTM_ORDER)))
        others = n.shape_of(x)[0] - 1
        begin, end = (others, 0) if d == 1 else (0, others)
        first = n.emit(ops.pad(n.emit(ops.matmul(h, r)), (begin, 0, 0), (end, 0, 0)))
        c = n.emit(ops.squeeze(c, axes=(0,)))
        scan = ops.lstm_scan(
            n.emit(ops.add(gates, first)), n.emit(ops.matmul(to_state, r)), n.full(n.shape_of(c), 0, wide), c,
            activations="sigmoid,tanh,tanh", alphas=(0.0,) * 3, betas=(0.0,) * 3, reverse=d == 1,
        )  # fmt: skip
        y, m, c = n.fields(scan)
        ys.append(n.emit(ops.matmul(y, to_state)))
        finals.append((n.emit(ops.matmul(m, to_state)), c))
    output = ys[0] if len(ys) == 1 else n.emit(ops.concat(*ys, axis=2))
    states = (_stacked(n, [final[k] for final in finals]) for k in (0, 1))
    return tuple(n.cast(v, dtype) for v in (output, *states))


def _check(n: Node, dropout: float, train: bool) -> None:
    if train and dropout:
        n.fail("dropout between recurrent layers is random; export the model in eval mode: model.eval()")


@torch_op("aten.lstm.input")
def lstm(
    n: Node, input: Expr, hx: Sequence[Expr], params: Sequence[Expr], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Expr, ...]:  # fmt: skip
    _check(n, dropout, train)
    return _recurrent(
        n, input, hx, params, ops.lstm, _LSTM_ORDER, has_biases, num_layers, bidirectional, batch_first,
        is_projected=len(params) == num_layers * (2 if bidirectional else 1) * (5 if has_biases else 3),
    )  # fmt: skip


@torch_op("aten.gru.input")
def gru(
    n: Node, input: Expr, hx: Expr, params: Sequence[Expr], has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Expr, ...]:  # fmt: skip
    _check(n, dropout, train)
    return _recurrent(
        n, input, [hx], params, ops.gru, _GRU_ORDER, has_biases, num_layers, bidirectional, batch_first,
        linear_before_reset=True,
    )  # fmt: skip


@torch_op("aten.rnn_tanh.input", "aten.rnn_relu.input")
def rnn(
    n: Node, input: Expr, hx: Expr, params: Sequence[Expr], has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Expr, ...]:  # fmt: skip
    _check(n, dropout, train)
    name = "relu" if "relu" in n.target else "tanh"
    activations = ",".join([name] * (2 if bidirectional else 1))
    return _recurrent(
        n, input, [hx], params, ops.rnn, (0,), has_biases, num_layers, bidirectional, batch_first,
        activations=activations,
    )  # fmt: skip
