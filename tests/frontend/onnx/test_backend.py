"""The ONNX standard's own suite, compiled, through `relaxlite.frontend.onnx.backend`: a sample, or all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.helper as h
import pytest

from relaxlite.errors import ImportModelError, InputError, InvalidArgumentError
from relaxlite.frontend.onnx import backend
from tests.support import tiers
from tests.support.onnx_suite import expected_failures, load_cases, run_cases, sample

EVERY = 25  # of all cases, besides the first of each operator, in the default tier


@pytest.fixture(scope="module")
def cases() -> Mapping[str, Any]:
    return load_cases()


def test_cases_of_the_standard(cases: Mapping[str, Any]) -> None:
    """What passes must go on to pass, and what cannot pass must be taken off the list once it does."""
    chosen = list(cases) if tiers.is_exhaustive() else sample(cases, EVERY)
    failures, expected = run_cases({name: cases[name] for name in chosen}), expected_failures()
    broken = [f"{name}: {reason[:300]}" for name, reason in failures.items() if name not in expected]
    healed = [name for name in chosen if name in expected and name not in failures]
    assert not broken, "\n".join(broken)
    assert not healed, f"these pass now, take them off the list: {healed}"


def test_few_cases_cannot_pass_and_each_has_a_reason(cases: Mapping[str, Any]) -> None:
    expected = expected_failures()
    assert len(expected) <= 20 and expected.keys() <= cases.keys()
    assert all(expected.values())


def model_of(node: onnx.NodeProto, ins: list[Any], outs: list[Any]) -> onnx.ModelProto:
    return h.make_model(h.make_graph([node], "g", ins, outs), opset_imports=[h.make_opsetid("", 21)])


def test_node_runs_by_itself() -> None:
    x = np.float32([[1, -2], [3, 4]])
    (y,) = backend.run_node(h.make_node("Relu", ["x"], ["y"]), [x])
    assert np.array_equal(y, np.maximum(x, 0))


def test_rank_that_the_file_omits_is_that_of_the_arguments() -> None:
    model = model_of(
        h.make_node("Neg", ["x"], ["y"]),
        [h.make_tensor_value_info("x", 1, None)],
        [h.make_tensor_value_info("y", 1, None)],
    )
    prepared = backend.prepare(model)
    for shape in [(), (3,), (0, 2), (5, 7, 1)]:
        x = np.ones(shape, np.float32)
        assert np.array_equal(prepared.run([x])[0], -x)


def test_wrong_use_is_an_error() -> None:
    model = model_of(
        h.make_node("Neg", ["x"], ["y"]),
        [h.make_tensor_value_info("x", 1, ["n"])],
        [h.make_tensor_value_info("y", 1, ["n"])],
    )
    with pytest.raises(InvalidArgumentError, match="'CUDA' is not supported"):
        backend.prepare(model, "CUDA")
    with pytest.raises(InputError, match="got 2 inputs; the model takes 1: x"):
        backend.prepare(model).run([np.zeros(1, np.float32)] * 2)
    with pytest.raises(InvalidArgumentError, match="run has no option"):
        backend.prepare(model).run([np.zeros(1, np.float32)], fast=True)
    with pytest.raises(ImportModelError):
        backend.prepare(model_of(h.make_node("Nag", ["x"], ["y"]), list(model.graph.input), list(model.graph.output)))
