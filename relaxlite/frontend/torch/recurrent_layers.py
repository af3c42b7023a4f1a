"""Exports that keep recurrent layers whole, with dynamic time.

Torch's own decomposition of LSTM, GRU and RNN is a Python loop over time, which fixes the number of steps
(pytorch#193192). An export with a `while_loop` in its place keeps the layer as one operator. Torch has such loops for
LSTM and GRU; the one for RNN is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.export import _patches

Tensor = torch.Tensor


@contextmanager
def recurrent_layers_kept() -> Iterator[None]:
    """Keep LSTM, GRU and RNN layers whole in exports and retraces, so that their time stays dynamic."""
    with ExitStack() as patches:
        for name in ("register_lstm_while_loop_decomposition", "register_gru_while_loop_decomposition"):
            patch = getattr(_patches, name, None)
            if patch is not None:
                patches.enter_context(patch())
        replace = getattr(_patches, "_register_rnn_while_loop_decomposition", None)
        if replace is not None:
            patches.enter_context(replace(torch.ops.aten.rnn_tanh.input, partial(_rnn, torch.tanh)))
            patches.enter_context(replace(torch.ops.aten.rnn_relu.input, partial(_rnn, torch.relu)))
        yield


def _rnn(
    activation: Callable[[Tensor], Tensor], input: Tensor, hx: Tensor, params: Sequence[Tensor], has_biases: bool,
    num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The layers of an RNN, (output, final states), with a `while_loop` over time."""
    x, finals = input.transpose(0, 1) if batch_first else input, []
    count, directions = 4 if has_biases else 2, 2 if bidirectional else 1
    for layer in range(num_layers):
        outputs = []
        for d in range(directions):
            k = layer * directions + d
            weights = params[k * count : (k + 1) * count]
            steps = x.flip(0) if d == 1 else x
            out, final = _direction(activation, steps, hx[k], weights)
            outputs.append(out.flip(0) if d == 1 else out)
            finals.append(final)
        x = torch.cat(outputs, -1)
        if dropout and train and layer < num_layers - 1:
            x = torch.dropout(x, dropout, train=True)
    return x.transpose(0, 1) if batch_first else x, torch.stack(finals, 0)


def _direction(
    activation: Callable[[Tensor], Tensor], x: Tensor, state: Tensor, weights: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the output (t, b, h) and the final state (b, h) of one direction."""
    w, r, *biases = weights
    projected = torch.nn.functional.linear(x, w, biases[0] if biases else None)
    recurrent, bias = r.clone(), biases[1].clone() if biases else None
    steps = projected.size(0)

    def is_running(step: Tensor, out: Tensor, h: Tensor) -> Tensor:
        return step < steps

    def run_step(step: Tensor, out: Tensor, h: Tensor) -> tuple[Any, ...]:
        k = step.item()
        torch._check(k >= 0)
        torch._check(k < steps)
        h = activation(projected[k] + torch.nn.functional.linear(h, recurrent, bias))  # type: ignore[index]
        out = out.clone()
        out[k] = h  # type: ignore[index]
        return step + 1, out, h

    first = (torch.tensor(0), torch.empty(steps, *state.shape, dtype=state.dtype), state.clone())
    _, out, final = torch._higher_order_ops.while_loop(is_running, run_step, first)
    return out, final
