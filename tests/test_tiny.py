"""The whole stack in seconds: a small model with symbolic sizes, compiled once, saved, loaded, run at many shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.errors import InputError
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant

rng = np.random.default_rng(0)
WEIGHT = rng.standard_normal((12, 20), dtype=np.float32)
BIAS = rng.standard_normal(20, dtype=np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@pytest.fixture(scope="module")
def exe() -> rl.Executable:
    bb = rl.BlockBuilder()
    b, s = bb.symbol("b"), bb.symbol("s", upper=300)
    with bb.function("main", x=rl.TensorType.of((b, s, 12), "float32"), y=rl.TensorType.of((b, s, 20), "float32")) as (
        x,
        y,
    ):
        hidden = bb.emit(ops.add(ops.matmul(x, Constant.of(WEIGHT)), Constant.of(BIAS)))
        hidden = bb.emit(ops.add(ops.tanh(hidden), y))
        weights = bb.emit(ops.softmax(ops.matmul(hidden, ops.transpose(hidden, axes=(0, 2, 1))), axis=-1))
        bb.result(ops.mean(ops.matmul(weights, hidden), axes=(1,), keepdims=False))
    return rl.compile(bb.module())


@pytest.mark.parametrize(("b", "s"), [(1, 1), (1, 7), (2, 16), (3, 65), (5, 129), (0, 4), (1, 300)])
def test_one_compilation_serves_every_shape(exe: rl.Executable, b: int, s: int) -> None:
    x = rng.standard_normal((b, s, 12), dtype=np.float32)
    y = rng.standard_normal((b, s, 20), dtype=np.float32)
    hidden = np.tanh(x @ WEIGHT + BIAS) + y
    expected = (softmax(hidden @ hidden.transpose(0, 2, 1)) @ hidden).mean(axis=1)
    np.testing.assert_allclose(exe(x, y=y), expected, rtol=1e-4, atol=1e-5)


def test_a_saved_model_gives_the_same_numbers(exe: rl.Executable, tmp_path: Path) -> None:
    exe.save(tmp_path / "m.rlx")
    again = rl.load(tmp_path / "m.rlx")
    x, y = np.ones((2, 9, 12), np.float32), np.ones((2, 9, 20), np.float32)
    np.testing.assert_array_equal(exe(x, y), again(x, y))


def test_wrong_shapes_name_the_argument_and_the_symbol(exe: rl.Executable) -> None:
    with pytest.raises(InputError, match=r"argument 'y'.*s is 4 here, but 3 in argument 'x'"):
        exe(np.ones((1, 3, 12), np.float32), np.ones((1, 4, 20), np.float32))
    with pytest.raises(InputError, match="s = 301 exceeds its upper bound 300"):
        exe(np.ones((1, 301, 12), np.float32), np.ones((1, 301, 20), np.float32))
