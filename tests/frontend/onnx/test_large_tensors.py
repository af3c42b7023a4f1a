"""Files whose large tensors are read from where they lie: the same models, the same errors, whatever the bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import relaxlite as rl
from relaxlite.errors import ImportModelError
from relaxlite.frontend.onnx import large_tensors, loading, tensors
from relaxlite.ir import structural_equal

TYPES = ("float32", "float64", "float16", "int8", "int32", "int64", "uint8")


@pytest.fixture(autouse=True, params=["in one block", "the largest alone", "all alone"])
def everything_is_large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MIN_FILE", 1)
    monkeypatch.setattr(large_tensors, "MIN_TENSOR", 1)
    if request.param != "in one block":
        monkeypatch.setattr(tensors, "_ALONE_FROM", 100 if request.param == "the largest alone" else 1)


def model(*, lead: str = "") -> onnx.ModelProto:
    """One output for each weight; `lead` shifts all that follows it."""
    rng = np.random.default_rng(0)
    weights = [rng.integers(0, 100, (3, 5)).astype(dtype) for dtype in TYPES]
    nodes, outputs, initializers = [], [], []
    for dtype, weight in zip(TYPES, weights, strict=True):
        initializers.append(numpy_helper.from_array(weight, f"w_{dtype}"))
        kind = initializers[-1].data_type
        nodes.append(helper.make_node("Add", [f"w_{dtype}", f"w_{dtype}"], [f"y_{dtype}"]))
        outputs.append(helper.make_tensor_value_info(f"y_{dtype}", kind, (3, 5)))
    initializers.append(helper.make_tensor("typed", TensorProto.FLOAT, (3,), [1.0, 2.0, 3.0]))  # no raw bytes
    initializers.append(TensorProto(name="empty", data_type=TensorProto.FLOAT, dims=(0,), raw_data=b""))
    nodes.append(helper.make_node("Concat", ["typed", "empty"], ["both"], axis=0))
    outputs.append(helper.make_tensor_value_info("both", TensorProto.FLOAT, (3,)))
    graph = helper.make_graph(nodes, "g", [], outputs, initializers, doc_string=lead)
    return helper.make_model(graph, producer_name=lead, opset_imports=[helper.make_opsetid("", 18)])


def is_emptied(path: Path) -> bool:
    """No raw bytes are left in what is parsed, and the reader has the file."""
    loaded = loading.load_model(path)
    tensors = [t for t in loaded.proto.graph.initializer if t.name.startswith("w_")]
    return loaded.content is not None and not any(t.raw_data for t in tensors)


@pytest.mark.parametrize("lead", ["", "a", "ab", "abc", "x" * 200, "x" * 20_000])
def test_the_same_model_as_from_its_bytes(tmp_path: Path, lead: str) -> None:
    path = tmp_path / "m.onnx"
    data = model(lead=lead).SerializeToString()
    path.write_bytes(data)
    assert is_emptied(path)
    assert structural_equal(rl.from_onnx(path), rl.from_onnx(data))


def test_what_is_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    data = model().SerializeToString()
    path.write_bytes(data)
    found = rl.from_onnx(path)
    path.write_bytes(bytes(len(data)))
    assert structural_equal(found, rl.from_onnx(data))
    path.write_bytes(b"")
    assert structural_equal(found, rl.from_onnx(data))


def test_fields_of_one_graph_may_lie_apart(tmp_path: Path) -> None:
    """A message may be written in pieces, which are merged."""
    whole = model()
    first, second = onnx.ModelProto(), onnx.ModelProto()
    first.CopyFrom(whole)
    del first.graph.initializer[:]
    second.graph.initializer.extend(whole.graph.initializer)
    path = tmp_path / "m.onnx"
    path.write_bytes(first.SerializeToString() + second.SerializeToString())
    assert is_emptied(path)
    assert structural_equal(rl.from_onnx(path), rl.from_onnx(whole))


def message_of(model: Any) -> str:
    with pytest.raises(ImportModelError) as error:
        rl.from_onnx(model)
    return str(error.value)


def test_errors_are_those_of_any_file(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    proto = model()
    proto.graph.initializer[0].raw_data = proto.graph.initializer[0].raw_data[:-1]
    path.write_bytes(proto.SerializeToString())
    assert "tensor 'w_float32' of shape (3, 5) and type float32 needs 60 bytes of data, but has 59" in message_of(path)
    proto.graph.initializer[0].dims[0] = -3
    path.write_bytes(proto.SerializeToString())
    assert "tensor 'w_float32' has a negative dimension" in message_of(path)


def test_every_truncation_and_many_damages_are_errors_of_the_file(tmp_path: Path) -> None:
    """Reading in place accepts no more and no less than parsing does, and never ends in another error."""
    path = tmp_path / "m.onnx"
    data = model().SerializeToString()
    rng = np.random.default_rng(0)
    cases = [data[:length] for length in range(1, len(data), 7)]
    for _ in range(200):
        damaged = bytearray(data)
        damaged[rng.integers(len(data))] = rng.integers(256)
        cases.append(bytes(damaged))
    for case in cases:
        path.write_bytes(case)
        found, expected = outcome(path), outcome(case)
        assert type(found) is type(expected), (found, expected)
        if isinstance(expected, rl.IRModule):
            assert structural_equal(found, expected)


def outcome(model: Any) -> Any:
    try:
        return rl.from_onnx(model)
    except rl.RelaxliteError as error:
        return error


def test_small_files_are_read_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    path = tmp_path / "m.onnx"
    path.write_bytes(model().SerializeToString())
    assert loading.load_model(path).content is None
