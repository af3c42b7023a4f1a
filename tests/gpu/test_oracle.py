"""The oracle of launches: what programs mean, and the faults that it names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from relaxlite.codegen.interpreter import run_program
from relaxlite.errors import ExecutionError, KernelFaultError, OutOfBoundsError
from tests.gpu import programs
from tests.support.ir_text import program

SIZES = (0, 1, 7, 16, 37)
rng = np.random.default_rng(0)


def floats(*shape: int, dtype: Any = np.float32) -> Any:
    return rng.standard_normal(shape).astype(dtype)


CASES: dict[str, tuple[Callable[[int], list[Any]], Callable[..., Any]]] = {
    "SUMS": (lambda n: [floats(n, 64)], lambda x: 2 * x.sum(1)),
    "SHUFFLED": (lambda n: [floats(n, 32)], lambda x: x.sum(1)),
    "PRODUCT": (
        lambda n: [floats(n, 16, dtype=np.float16), floats(16, 8, dtype=np.float16)],
        lambda a, b: a.astype(np.float32) @ b.astype(np.float32),
    ),
    "CHECKED": (lambda n: [floats(5), rng.integers(0, 5, n)], lambda x, i: x[i]),
}


def run(text: str, inputs: list[Any]) -> Any:
    return run_program(program(text), inputs)[0]


@pytest.mark.parametrize("name", CASES)
def test_launches_compute_what_they_say(name: str) -> None:
    make, expected = CASES[name]
    for n in SIZES:
        inputs = make(n)
        np.testing.assert_allclose(run(getattr(programs, name), inputs), expected(*inputs), 1e-4, 1e-4)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("SUMS", "                barrier()\n", "", "a race: several threads access an element of parts"),
        ("SUMS", "out[b] = total", "out[0] = total", "a race: several threads access an element of out"),
        ("SUMS", "parts[t] = x[b, t] * float32(2.0)", "parts[0] = x[b, t]", "a race: .* of parts"),
        ("SUMS", "total[()] = float32(0.0)", "barrier()", "a barrier that some threads of a block do not reach"),
        ("SUMS", "total[()] = float32(0.0)", "parts[0] = float32(0.0)", "a read of total where nobody wrote"),
        ("PRODUCT", '                            call_library("warp", "wait", int32(0))\n', "", "where nobody wrote"),
        ("PRODUCT", '                            call_library("warp", "commit")\n', "", "where nobody wrote"),
        ("PRODUCT", "                            barrier()\n", "", "a race: .* of a_tile"),
    ],
)
def test_faults_are_named(name: str, old: str, new: str, message: str) -> None:
    text = getattr(programs, name)
    assert old in text
    with pytest.raises(KernelFaultError, match=message):
        run(text.replace(old, new), CASES[name][0](37))


def test_accesses_stay_inside_of_buffers() -> None:
    with pytest.raises(OutOfBoundsError, match=r"an access of x at t \+ 1 is outside of 0..63"):
        run(programs.SUMS.replace("x[b, t]", "x[b, t + 1]"), [floats(2, 64)])


def test_a_failed_check_is_an_error() -> None:
    with pytest.raises(ExecutionError, match="an index is outside of x"):
        run(programs.CHECKED, [floats(5), np.array([4, 5])])


def test_arrays_that_are_not_dense_are_taken_and_given() -> None:
    x, out = floats(64, 7).T, np.zeros(14, np.float32)[::2]
    run_program(program(programs.SUMS), [x], outputs=[out])
    np.testing.assert_allclose(out, 2 * x.sum(1), 1e-4, 1e-4)
