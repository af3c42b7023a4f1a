"""Failures of a call: each names the ONNX node, from a saved model too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import relaxlite as rl
from relaxlite.errors import ExecutionError, ShapeMismatchError
from tests.support.onnx_models import model, node, value, values

CONV = model(
    [node("Relu", ["x"], ["r"]), node("Conv", ["r", "w"], ["c"], name="stft"), node("Relu", ["c"])],
    values(x=["n", 1, "samples"]),
    weights={"w": np.ones((8, 1, 16), np.float32)},
)
GATHER = model(
    [node("Gather", ["x", "i"], ["y"], name="embed", axis=0)], [value("x", ["n", 4]), value("i", ["k"], "int64")]
)
SQUEEZE = model(
    [node("Squeeze", ["x", "axes"], ["y"], name="flat")], values(x=["n", 3]), weights={"axes": np.int64([0])}
)


@pytest.mark.parametrize("is_saved", [False, True])
@pytest.mark.parametrize(
    ("proto", "good", "bad", "kind", "message"),
    [
        pytest.param(
            CONV,
            [np.ones((2, 1, 20), np.float32)],
            [np.ones((2, 1, 9), np.float32)],
            ShapeMismatchError,
            "(2, -6, 8) has a negative dimension; an input that it depends on is too small",
            id="a window larger than its input",
        ),
        pytest.param(
            GATHER,
            [np.ones((3, 4), np.float32), np.int64([2])],
            [np.ones((3, 4), np.float32), np.int64([3])],
            ExecutionError,
            "gather: an index is out of range for axis 0 of size n (n = 3)",
            id="an index beyond the end",
        ),
        pytest.param(
            SQUEEZE,
            [np.ones((1, 3), np.float32)],
            [np.ones((2, 3), np.float32)],
            ShapeMismatchError,
            "dimension 0 of shape (2, 3): expects 1, got 2",
            id="a size that is squeezed away",
        ),
    ],
)
def test_a_failing_call_names_the_node(
    proto: onnx.ModelProto,
    good: list[np.ndarray],
    bad: list[np.ndarray],
    kind: type[Exception],
    message: str,
    is_saved: bool,
    tmp_path: Path,
) -> None:
    exe = rl.compile(rl.from_onnx(proto))
    if is_saved:
        exe.save(tmp_path / "m.rlx")
        exe = rl.load(tmp_path / "m.rlx")
    exe(*good)
    with pytest.raises(kind) as caught:
        exe(*bad)
    named = next(n for n in proto.graph.node if n.name)
    assert str(caught.value).startswith(f"ONNX node '{named.name}' ({named.op_type})")
    assert str(caught.value).endswith(message)
    exe(*good)
