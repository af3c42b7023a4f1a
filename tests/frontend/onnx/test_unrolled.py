"""Loops that carry a sequence, of a known number of iterations: compiled once, run at many sizes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import parser

import relaxlite
from relaxlite.ir.expr import Let, Loop
from relaxlite.ir.module import IRModule
from tests.support.onnx_models import imported, onnxruntime_result

PARTS = """
<ir_version: 9, opset_import: ["" : 17]>
g (float[b,t,4] x) => (float[b,p,4] first, float[b,q,4] last, float[k,4] sums) {{
    count = Constant<value_int = {count}>()
    places = Constant<value_ints = [0, 1, 3, 4]>()
    yes = Constant<value = bool {{1}}>()
    one = Constant<value_ints = [1]>()
    both = Constant<value_ints = [0, 1]>()
    empty = SequenceEmpty<dtype = 1>()
    all, sums = Loop(count, yes, empty) <
        body = step (int64[1] i, bool c, seq(float[?,?,?]) list) => (bool go, seq(float[?,?,?]) list2, float[4] sum) {{
        begin = Gather<axis = 0>(places, i)
        next = Add(i, one)
        end = Gather<axis = 0>(places, next)
        part = Slice(x, begin, end, one)
        list2 = SequenceInsert(list, part)
        sum = ReduceSum<keepdims = 0>(part, both)
        {going}
    }}>
    at = Constant<value_int = 0>()
    back = Constant<value_int = -1>()
    first = SequenceAt(all, at)
    last = SequenceAt(all, back)
}}
"""


def _parts(count: int = 3, going: str = "go = Identity(c)") -> onnx.ModelProto:
    return parser.parse_model(PARTS.format(count=count, going=going))


def _agrees(proto: onnx.ModelProto) -> None:
    module = imported(proto)
    assert not _has_loop(module)
    compiled = relaxlite.compile(module)
    for b, t in ((1, 5), (3, 9), (2, 4), (0, 6)):
        x = np.random.default_rng(t).standard_normal((b, t, 4)).astype(np.float32)
        for found, expected in zip(compiled(x), onnxruntime_result(proto, {"x": x}), strict=True):
            assert found.shape == expected.shape
            assert np.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_parts_of_different_sizes_are_appended(count: int) -> None:
    """As torch.tensor_split is scripted."""
    _agrees(_parts(count))


def test_a_condition_ends_the_loop() -> None:
    _agrees(_parts(going="two = Constant<value_ints = [2]>() less = Less(next, two) go = Squeeze(less)"))


def _has_loop(module: IRModule) -> bool:
    return any(isinstance(b, Let) and isinstance(b.value, Loop) for b in module.functions()["main"].body.bindings())


def test_a_condition_that_only_run_time_knows_leaves_a_loop() -> None:
    going = "zero = Constant<value_float = 0.0>() total = ReduceSum<keepdims = 0>(sum) go = Less(total, zero)"
    proto = _parts(going=going)
    module = imported(proto)
    assert _has_loop(module)
    compiled = relaxlite.compile(module)
    for b, t in ((1, 5), (3, 9)):
        x = np.random.default_rng(t).standard_normal((b, t, 4)).astype(np.float32)
        for found, expected in zip(compiled(x), onnxruntime_result(proto, {"x": x}), strict=True):
            assert np.allclose(found, expected, atol=1e-5)


def test_many_iterations_leave_a_loop() -> None:
    assert _has_loop(imported(_parts(count=65)))


def test_a_large_body_leaves_a_loop() -> None:
    going = " ".join(f"c{k} = Identity({'c' if k == 0 else f'c{k - 1}'})" for k in range(1400))
    assert _has_loop(imported(_parts(going=f"{going} go = Identity(c1399)")))
