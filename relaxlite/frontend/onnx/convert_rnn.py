"""Converters of LSTM, GRU and RNN."""

from __future__ import annotations

from typing import Any

import numpy as np

from relaxlite.frontend.common.unify import unify_dims
from relaxlite.frontend.onnx.convert_contrib import MICROSOFT
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.op import Op
from relaxlite.ir.symbolic import IntLike, as_int, sym

# ONNX's name of an activation in lower case -> (relaxlite's name, defaults of alpha and beta, if it has them)
_ACTIVATIONS: dict[str, tuple[str, tuple[float, ...]]] = {
    "relu": ("relu", ()), "tanh": ("tanh", ()), "sigmoid": ("sigmoid", ()), "softsign": ("softsign", ()),
    "softplus": ("softplus", ()), "affine": ("affine", (1.0, 0.0)), "scaledtanh": ("scaled_tanh", (1.0, 1.0)),
    "hardsigmoid": ("hard_sigmoid", (0.2, 0.5)), "leakyrelu": ("leaky_relu", (0.01,)), "elu": ("elu", (1.0,)),
    "thresholdedrelu": ("thresholded_relu", (1.0,)),
}  # fmt: skip


def _common_attributes(n: Node) -> dict[str, Any]:
    """Return the attributes that the three ops share."""
    n.int("output_sequence", 0)  # opset 1: no effect, used outputs are computed
    attrs: dict[str, Any] = {"direction": n.text("direction", "forward").lower(), "clip": n.float("clip", None)}
    attrs["layout"] = n.int("layout", 0)
    names = n.texts("activations", None)
    parameters = [list(n.floats(name, ())) for name in ("activation_alpha", "activation_beta")]
    if names is None:
        if any(parameters):
            n.fail("activation_alpha and activation_beta without activations are not supported")
        return attrs
    activations, values = [], ([], [])  # type: tuple[list[str], tuple[list[float], list[float]]]
    for name in names:
        if name.lower() not in _ACTIVATIONS:
            n.fail(f"activation {name!r} is not known; it must be one of {', '.join(sorted(_ACTIVATIONS))}")
        op_name, defaults = _ACTIVATIONS[name.lower()]
        activations.append(op_name)
        for k in (0, 1):
            has_parameter = k < len(defaults)
            values[k].append(
                parameters[k].pop(0) if has_parameter and parameters[k] else defaults[k] if has_parameter else 0.0
            )
    return {**attrs, "activations": ",".join(activations), "alphas": tuple(values[0]), "betas": tuple(values[1])}


def _recurrent(
    n: Node, op: Op, gates: int, states: int, attrs: dict[str, Any], operands: tuple[Expr, Expr, Expr] | None = None
) -> Result:
    """Convert a recurrent op; inputs: x, w, r, b, lengths, initial states..., peepholes of an LSTM.

    Absent inputs are zeros. `operands`: x, w and r, by default the node's inputs.
    """
    x, w, r = operands or (n.input(0), n.input(1), n.input(2))
    dtype, layout, directions = n.dtype(), n.int("layout", 0), 2 if attrs["direction"] == "bidirectional" else 1
    if len(n.shape_of(r)) != 3 or len(n.shape_of(w)) != 3 or n.rank() != 3:
        n.fail("the input and the weights of its gates (inputs 0, 1 and 2) must have rank 3")
    declared = n.int("hidden_size", 0)
    hidden = as_int(n.shape_of(r)[2]) or declared
    if not hidden:
        n.fail("the hidden size must be known, from the weights (input 2) or from hidden_size")
    if declared and declared != hidden:
        n.fail(f"hidden_size is {declared}, but the weights (input 2) are of {hidden}")
    batch, width = n.shape()[0 if layout else 1], n.shape_of(x)[2]
    w = _with_sizes(n, w, (directions, gates * hidden, width))
    r = _with_sizes(n, r, (directions, gates * hidden, hidden))
    sizes = (directions, 2 * gates * hidden)
    bias = _optional(n, 3, sizes) or Constant.of(np.zeros(sizes), dtype)
    shape = (batch, directions, hidden) if layout else (directions, batch, hidden)
    initial_states = [_optional(n, 5 + k, shape) or _zeros(n, shape, dtype) for k in range(states)]
    lengths = _optional(n, 4, (batch,))
    peepholes = _optional(n, 7, (directions, 3 * hidden)) if states == 2 else None
    if peepholes is not None and lengths is None:
        steps = n.shape(0)[1 if layout else 0]
        step_count = n.emit(ops.reshape(n.emit(ops.shape_to_tensor((steps,))), ()))
        lengths = n.emit(ops.broadcast_to(n.emit(ops.cast(step_count, dtype="int32")), (batch,)))
    return n.fields(op(x, w, r, bias, *initial_states, lengths, peepholes, **attrs))


def _with_sizes(n: Node, x: Expr, sizes: tuple[IntLike, ...]) -> Expr:
    """Return x with the constant ones of these sizes, checked at run time if symbolic; the op checks the others."""
    known = {axis: sym(size) for axis, size in enumerate(sizes) if as_int(sym(size)) is not None}
    return unify_dims(n.bb, x, known) if len(n.shape_of(x)) == len(sizes) else x


def _optional(n: Node, index: int, sizes: tuple[IntLike, ...]) -> Expr | None:
    x = n.optional(index)
    return None if x is None else _with_sizes(n, x, sizes)


def _zeros(n: Node, shape: tuple[IntLike, ...], dtype: str) -> Expr:
    return n.emit(ops.full(shape, Constant.of(0, dtype)))


@onnx_op("LSTM")
def lstm(n: Node) -> Result:
    return _recurrent(n, ops.lstm, 4, 2, {**_common_attributes(n), "input_forget": n.flag("input_forget")})


@onnx_op("DynamicQuantizeLSTM", domain=MICROSOFT)
def dynamic_quantize_lstm(n: Node) -> Result:
    """DynamicQuantizeLSTM: an LSTM of transposed 8-bit weights, with x and state quantized at run time.

    Computed on dequantized floats.
    """
    codes, scale, zero = n.fields(ops.dynamic_quantize_linear(n.input(0)))
    x = n.emit(ops.dequantize_linear(codes, scale, zero))
    w, r = (_dequantized_weights(n, k, 8 + 2 * j) for j, k in enumerate((1, 2)))
    attrs = {**_common_attributes(n), "input_forget": n.flag("input_forget"), "quantize_state": True}
    return _recurrent(n, ops.lstm, 4, 2, attrs, (x, w, r))


def _dequantized_weights(n: Node, index: int, at: int) -> Constant:
    """Dequantize weights (d, k, gates), input `index`, to float32 (d, gates, k).

    Inputs `at` and `at` + 1: scales and zero points, of each direction, or of each direction and gate.
    """
    weights, scale, zero = (n.const(k) for k in (index, at, at + 1))
    if weights is None or scale is None or zero is None:
        n.fail("weights, their scales and their zero points must be constants")
    scale, zero = (np.float32(v).reshape(v.shape[0], 1, -1) for v in (scale, zero))
    return Constant.of(((np.float32(weights) - zero) * scale).transpose(0, 2, 1))


@onnx_op("GRU")
def gru(n: Node) -> Result:
    return _recurrent(n, ops.gru, 3, 1, {**_common_attributes(n), "linear_before_reset": n.flag("linear_before_reset")})


@onnx_op("RNN")
def rnn(n: Node) -> Result:
    return _recurrent(n, ops.rnn, 1, 1, _common_attributes(n))
