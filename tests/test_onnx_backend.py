"""A sample of the onnx package's node tests through the interpreter; `python -m tests.onnx_backend` runs all."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from tests.onnx_backend import collect, compare, expected_failures, main_op, run_all

PER_OP = 2  # tests of each op in the sample


@pytest.mark.slow
def test_onnx_node_tests() -> None:
    """What passes must go on to pass, and what is expected to fail must be taken off the list once it passes."""
    taken: dict[str, int] = collections.Counter()
    sample = []
    for case in collect():
        op = main_op(case.model)
        taken[op] += 1
        if taken[op] <= PER_OP or taken[op] % 5 == 0:
            sample.append(case)
    outcomes = run_all(sample)
    expected = expected_failures()
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
