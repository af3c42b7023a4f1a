"""Axes, starts, steps, scales and modes that models read as inputs: one compilation, every value."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import relaxlite
from relaxlite.errors import ExecutionError, ImportModelError
from relaxlite.frontend.onnx import from_onnx
from tests.support.onnx_models import model, node, value, values

INT64 = np.iinfo(np.int64)


def compiled(op: str, dims: list[Any], extra: dict[str, tuple[list[Any], str]], opset: int = 18, **attrs: Any) -> Any:
    """The op alone, of x and other inputs (dims, dtype) by name."""
    inputs = [*values(x=dims), *(value(name, shape, dtype) for name, (shape, dtype) in extra.items())]
    return relaxlite.compile(from_onnx(model([node(op, ["x", *extra], **attrs)], inputs, opset=opset)))


def data(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_reduce_takes_axes_at_run_time() -> None:
    run = compiled("ReduceSum", ["a", "b", "c"], {"axes": ([2], "int64")})
    apart = compiled("ReduceMax", ["a", "b", "c"], {"axes": ([1], "int64")}, keepdims=0)
    for shape in [(2, 3, 4), (1, 1, 1), (7, 2, 5), (0, 2, 3)]:
        x = data(*shape)
        for axes in [(0, 1), (-1, 0), (1, 2)]:
            assert np.allclose(run(x, np.int64(axes)), x.sum(axes, keepdims=True), atol=1e-4)
        for axis in (0, 1, 2, -3) if 0 not in shape else ():
            assert np.array_equal(apart(x, np.int64([axis])), x.max(axis))


def test_reduce_takes_any_number_of_axes() -> None:
    run = compiled("ReduceMean", ["a", "b"], {"axes": (["k"], "int64")})
    noop = compiled("ReduceSum", ["a", "b"], {"axes": (["k"], "int64")}, noop_with_empty_axes=1)
    x = data(3, 5)
    for axes in [(0,), (1,), (0, 1), (-1, 0)]:
        assert np.allclose(run(x, np.int64(axes)), x.mean(axes, keepdims=True), atol=1e-5)
    assert np.allclose(run(x, np.int64([])), x.mean(keepdims=True), atol=1e-5)
    assert np.array_equal(noop(x, np.int64([])), x)


def test_axes_that_do_not_exist_or_repeat_are_errors() -> None:
    run = compiled("ReduceSum", ["a", "b"], {"axes": ([2], "int64")})
    for axes in [(0, 2), (-3, 0)]:
        with pytest.raises(ExecutionError, match=r"ReduceSum.*an axis does not exist in a tensor of rank 2"):
            run(data(2, 2), np.int64(axes))
    with pytest.raises(ExecutionError, match="must differ"):
        run(data(2, 2), np.int64([1, -1]))


def test_too_many_combinations_of_axes_are_refused() -> None:
    with pytest.raises(ImportModelError, match="has 128 combinations, of which at most 64 are compiled"):
        compiled("ReduceSum", [1] * 7, {"axes": (["k"], "int64")})


def test_empty_axes_attribute_reduces_all() -> None:
    reduce = node("ReduceMax", ["x"])
    reduce.attribute.append(helper.make_attribute("axes", [], attr_type=onnx.AttributeProto.INTS))
    run = relaxlite.compile(from_onnx(model([reduce], values(x=["a", "b"]), opset=11)))
    x = data(2, 3)
    assert np.array_equal(run(x), x.max(keepdims=True))


@pytest.mark.parametrize("op", ["CumSum", "CumProd"])
def test_cumulative_ops_take_the_axis_at_run_time(op: str) -> None:
    run = compiled(op, ["a", "b"], {"axis": ([], "int32")}, opset=26 if op == "CumProd" else 14)
    for shape in [(3, 4), (1, 1), (0, 2), (2, 7)]:
        x = data(*shape)
        for axis in (0, 1, -1):
            expected = (np.cumsum if op == "CumSum" else np.cumprod)(x, axis)
            assert np.allclose(run(x, np.int32(axis)), expected, atol=1e-5)


def test_slice_takes_everything_at_run_time() -> None:
    names = {name: ([2], "int64") for name in ("starts", "ends", "axes", "steps")}
    run = compiled("Slice", ["a", "b", "c"], names)
    limits = [0, 1, -1, 3, -3, 100, -100, INT64.max, INT64.min]
    rng = np.random.default_rng(1)
    for shape in [(5, 4, 3), (1, 2, 1), (0, 7, 2)]:
        x = data(*shape)
        for _ in range(12):
            (s0, s1), (e0, e1) = rng.choice(limits, (2, 2)).tolist()
            t0, t1 = rng.choice([1, -1, 2, -3, INT64.max, INT64.min], 2).tolist()
            expected = x[s0:e0:t0, :, s1:e1:t1]
            found = run(x, *(np.int64(v) for v in ([s0, s1], [e0, e1], [0, -1], [t0, t1])))
            assert np.array_equal(found, expected), (s0, e0, t0, s1, e1, t1)
    with pytest.raises(ExecutionError, match="a step of a slice must not be 0"):
        run(data(2, 2, 2), *(np.int64(v) for v in ([0, 0], [1, 1], [0, 1], [1, 0])))


def test_slice_to_the_end_by_the_largest_integer() -> None:
    run = compiled("Slice", ["n"], {"starts": ([1], "int64"), "ends": ([1], "int64")})
    for size in (0, 1, 7):
        x = data(size)
        assert np.array_equal(run(x, np.int64([1]), np.int64([INT64.max])), x[1:])
        assert np.array_equal(run(x, np.int64([INT64.min]), np.int64([-1])), x[:-1])


def test_squeeze_and_unsqueeze_take_axes_at_run_time() -> None:
    squeeze = compiled("Squeeze", ["a", "b", "c"], {"axes": ([1], "int64")})
    unsqueeze = compiled("Unsqueeze", ["a", "b"], {"axes": ([2], "int64")})
    for axis, shape in [(0, (1, 3, 2)), (1, (4, 1, 2)), (-1, (0, 2, 1))]:
        x = data(*shape)
        assert np.array_equal(squeeze(x, np.int64([axis])), x.squeeze(axis))
    for axes in [(0, 1), (3, 0), (-1, 1), (2, -4)]:
        x = data(2, 3)
        assert np.array_equal(unsqueeze(x, np.int64(axes)), np.expand_dims(x, axes))
    with pytest.raises(ExecutionError):
        squeeze(data(2, 3, 2), np.int64([0]))


def test_pad_takes_axes_at_run_time() -> None:
    run = compiled("Pad", ["a", "b"], {"pads": ([2], "int64"), "fill": ([], "float32"), "axes": ([1], "int64")})
    x = data(2, 3)
    assert np.array_equal(
        run(x, np.int64([1, 2]), np.float32(5), np.int64([-1])), np.pad(x, ((0, 0), (1, 2)), constant_values=5)
    )
    assert np.array_equal(run(x, np.int64([0, -1]), np.float32(5), np.int64([0])), x[:1])


def test_resize_takes_scales_at_run_time() -> None:
    inputs = [*values(x=["n", "c", "h", "w"]), value("scales", [4])]
    run = relaxlite.compile(from_onnx(model([node("Resize", ["x", "", "scales"], mode="linear")], inputs, opset=18)))
    x = data(1, 2, 4, 6)
    for scale in [(1, 1, 1, 1), (1, 1, 2, 0.5), (1, 1, 0.6, 3)]:
        fixed = model([node("Resize", ["x", "", "s"], mode="linear")], values(x=["n", "c", "h", "w"]), opset=18,
                      weights={"s": np.float32(scale)})  # fmt: skip
        expected = relaxlite.compile(from_onnx(fixed))(x)
        assert np.allclose(run(x, np.float32(scale)), expected, atol=1e-6)


def test_dropout_takes_its_mode_at_run_time() -> None:
    inputs = [*values(x=["n"]), value("ratio", []), value("training", [], "bool")]
    run = relaxlite.compile(
        from_onnx(model([node("Dropout", ["x", "ratio", "training"], ["y", "mask"])], inputs, ["y", "mask"], opset=13))
    )
    x = np.ones(4000, np.float32)
    y, mask = run(x, np.float32(0.25), np.array(False))
    assert np.array_equal(y, x) and mask.all()
    y, mask = run(x, np.float32(0.25), np.array(True))
    assert abs(mask.mean() - 0.75) < 0.03
    assert np.allclose(y, np.where(mask, x / np.float32(0.75), 0))
