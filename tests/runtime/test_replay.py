"""Recordings of a run's kernels: the same calls, sizes and results, as often as one likes."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.errors import InputError, OutOfMemoryError
from relaxlite.runtime.replay import Recorder


@pytest.fixture(scope="module")
def exe() -> rl.Executable:
    """Two products, whose intermediate lives in an arena and whose sizes a program computes."""
    bb = rl.BlockBuilder()
    n = bb.symbol("n")
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((8, 8)).astype(np.float32) for _ in range(2)]
    with bb.function("main", x=rl.TensorType.of((n, 8), "float32")) as (x,):
        for w in weights:
            x = bb.emit(rl.ops.matmul(x, rl.ir.expr.Constant.of(w)))
        bb.result(x)
    return rl.compile(bb.module())


@pytest.mark.parametrize("n", [0, 1, 7, 64, 129])
def test_a_replay_calls_the_same_kernels_at_the_same_sizes(exe: rl.Executable, n: int) -> None:
    x = np.random.default_rng(n).standard_normal((n, 8)).astype(np.float32)
    replay = Recorder(exe.data).record({"x": x})
    (expected,) = exe.run({"x": x}).values()
    np.testing.assert_array_equal(replay.outputs[0], expected)
    assert replay.calls and all(call.symbols == (n,) for call in replay.calls)
    assert {call.kernel for call in replay.calls} <= exe.data.kernels.keys()
    assert len(replay.seconds()) == len(replay.calls)


def test_a_replay_computes_from_the_inputs_as_they_are_now_and_outlives_its_recorder(exe: rl.Executable) -> None:
    x = np.ones((5, 8), np.float32)
    replay = Recorder(exe.data).record({"x": x})
    before = replay.outputs[0].copy()
    x *= 2
    gc.collect()
    replay.run()
    np.testing.assert_array_equal(replay.outputs[0], 2 * before)


def test_recording_answers_bad_inputs_as_running_does(exe: rl.Executable) -> None:
    with pytest.raises((InputError, OutOfMemoryError), match="x"):
        Recorder(exe.data).record({"x": ["no", "numbers"]})
