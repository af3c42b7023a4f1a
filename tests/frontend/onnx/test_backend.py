"""A sample of the onnx package's node tests through the interpreter; `python -m tests.onnx_backend` runs all."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest

from tests.support import tiers
from tests.support.onnx_backend import collect, compare, expected_failures, main_op, run_all


@pytest.fixture(scope="module")
def cases() -> list[Any]:
    return collect()


def sample(cases: list[Any], per_op: int, every: int) -> list[Any]:
    """The first tests of each op, and some of the others."""
    taken: dict[str, int] = collections.Counter()
    chosen = []
    for case in cases:
        op = main_op(case.model)
        taken[op] += 1
        if taken[op] <= per_op or taken[op] % every == 0:
            chosen.append(case)
    return chosen


@pytest.mark.parametrize(
    "compiled",
    [pytest.param(False, id="interpreted"), pytest.param(True, id="compiled", marks=pytest.mark.exhaustive)],
)
def test_onnx_node_tests(cases: list[Any], compiled: bool) -> None:
    """What passes must go on to pass, and what is expected to fail must be taken off the list once it passes."""
    chosen = sample(cases, 1, 20) if compiled else sample(cases, *((2, 5) if tiers.is_exhaustive() else (1, 10)))
    outcomes = run_all(chosen, compiled=compiled)
    expected = expected_failures(compiled=compiled)
    broken = [f"{o.name} {o.kind}: {o.reason}" for o in outcomes if o.kind != "passed" and o.name not in expected]
    healed = [o.name for o in outcomes if o.kind == "passed" and o.name in expected]
    assert not broken, "\n".join(broken)
    assert not healed, f"these pass now, take them off the list: {healed}"
    assert sum(o.kind == "passed" for o in outcomes) > len(outcomes) * 0.8


def test_expected_failures_give_reasons() -> None:
    assert all(expected_failures().values())


def test_comparison_is_strict() -> None:
    one = np.float32([1])
    assert compare([one], [one], 1e-3, 1e-7) == ""
    assert "float64" in compare([one.astype(np.float64)], [one], 1e-3, 1e-7)
    assert "(1,)" in compare([one], [np.float32([[1]])], 1e-3, 1e-7)
    assert "differs" in compare([one], [np.float32([1.1])], 1e-3, 1e-7)
    assert "differs" in compare([np.float32([np.nan])], [one], 1e-3, 1e-7)
    assert "2 results" in compare([one, one], [one], 1e-3, 1e-7)
