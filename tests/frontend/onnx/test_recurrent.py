"""LSTM, GRU and RNN whose operands say little about their sizes, against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.errors import ImportModelError, RelaxliteError
from tests.support.onnx_models import Dims, model, node, onnxruntime_result, value

HIDDEN, WIDTH = 4, 3
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def draw(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def recurrent(op: str, shapes: dict[str, Dims], weights: dict[str, Any], **attrs: Any) -> Any:
    names = ["x", "w", "r", "b", "lengths", "h", *(["c", "p"] if op == "LSTM" else [])]
    known = {"hidden_size": HIDDEN, "direction": "bidirectional", **attrs}
    made = [node(op, [name if name in shapes or name in weights else "" for name in names], ("y", "yh"), **known)]
    inputs = [value(name, dims, "int32" if name == "lengths" else "float32") for name, dims in shapes.items()]
    return model(made, inputs, ("y", "yh"), weights, opset=14)


def check(proto: Any, constant: dict[str, Any], *names: str) -> None:
    gates = GATES[proto.graph.node[0].op_type]
    compiled = rl.compile(rl.from_onnx(proto))
    for time, batch in ((5, 2), (1, 1), (7, 3)):
        rows, lengths = gates * HIDDEN, np.arange(batch, dtype=np.int32) % time + 1
        given = {"x": draw(time, batch, WIDTH), "w": draw(2, rows, WIDTH), "r": draw(2, rows, HIDDEN),
                 "b": draw(2, 2 * rows), "lengths": lengths, "h": draw(2, batch, HIDDEN), "c": draw(2, batch, HIDDEN),
                 "p": draw(2, 3 * HIDDEN)}  # fmt: skip
        feeds = {name: given[name] for name in names if name not in constant}
        for have, want in zip(compiled.run(feeds).values(), onnxruntime_result(proto, feeds), strict=True):
            np.testing.assert_allclose(have, want, atol=1e-5)


@pytest.mark.each_value
@pytest.mark.parametrize("op", list(GATES))
@pytest.mark.parametrize("w", [["nd", "g", WIDTH], ["nd", "g", "i"], [None, None, None]], ids=str)
def test_directions_of_w_that_only_the_other_weights_say(op: str, w: Any) -> None:
    """With constant R, decompose failed: nd has no value before run time."""
    constant = {"r": draw(2, GATES[op] * HIDDEN, HIDDEN)}
    check(recurrent(op, {"x": ["t", "n", WIDTH], "w": w}, constant), constant, "x", "w")


@pytest.mark.parametrize("op", list(GATES))
def test_sizes_that_only_the_attributes_say(op: str) -> None:
    shapes: dict[str, Any] = {
        "x": ["t", "n", WIDTH], "w": ["d", "g", "i"], "r": ["e", "f", "k"], "b": ["j", "l"], "lengths": ["m"],
        "h": ["o", "q", "s"],
    }  # fmt: skip
    if op == "LSTM":
        shapes |= {"c": ["u", "v", "z"], "p": ["aa", "ab"]}
    check(recurrent(op, shapes, {}), {}, *shapes)


def test_w_of_another_number_of_directions_is_an_error() -> None:
    shapes: dict[str, Any] = {"x": ["t", "n", WIDTH], "w": ["nd", HIDDEN, WIDTH]}
    compiled = rl.compile(rl.from_onnx(recurrent("RNN", shapes, {"r": draw(2, HIDDEN, HIDDEN)})))
    with pytest.raises(RelaxliteError, match=r"dimension 0 of shape \(1, 4, 3\): expects .*2, got 1"):
        compiled.run({"x": draw(2, 2, WIDTH), "w": draw(1, HIDDEN, WIDTH)})
    with pytest.raises(ImportModelError, match=r"w must have shape \(2, 4, 3\), got \(1, 4, 3\)"):
        rl.from_onnx(recurrent("RNN", {**shapes, "w": [1, HIDDEN, WIDTH]}, {"r": draw(2, HIDDEN, HIDDEN)}))


def test_a_hidden_size_that_nothing_says_or_that_differs_is_an_error() -> None:
    shapes: dict[str, Any] = {"x": ["t", "n", WIDTH], "w": ["nd", "g", WIDTH]}
    with pytest.raises(ImportModelError, match="hidden_size is 5, but the weights"):
        rl.from_onnx(recurrent("RNN", shapes, {"r": draw(2, HIDDEN, HIDDEN)}, hidden_size=5))
    with pytest.raises(ImportModelError, match="the hidden size must be known"):
        rl.from_onnx(recurrent("RNN", {**shapes, "r": ["nd", "g", "k"]}, {}, hidden_size=0))
