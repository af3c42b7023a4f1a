"""Sequences, optionals, text and narrow types as arguments and results; what stands on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.helper as h
import pytest
from onnx import TensorProto

import relaxlite
from relaxlite.errors import ExecutionError, ImportModelError, InputError
from relaxlite.frontend.onnx import from_onnx
from tests.support.onnx_models import model, node, value


def sequence(name: str, dims: list[Any], dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return h.make_tensor_sequence_value_info(name, dtype, dims)


def optional(name: str, held: onnx.TypeProto) -> onnx.ValueInfoProto:
    return h.make_value_info(name, h.make_optional_type_proto(held))


def compiled(nodes: list[onnx.NodeProto], inputs: list[Any], outputs: list[Any]) -> relaxlite.Executable:
    return relaxlite.compile(from_onnx(model(nodes, inputs, outputs, opset=21)))


def pieces(*sizes: int) -> list[np.ndarray]:
    return [np.arange(size * 2, dtype=np.float32).reshape(size, 2) for size in sizes]


def assert_same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert [x.shape for x in found] == [x.shape for x in expected]
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


NARROW = ("float8_e4m3fn", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn", "int4", "uint4", "int2", "uint2")


@pytest.mark.parametrize("name", NARROW)
def test_narrow_arrays_come_and_go_as_what_they_are(name: str, tmp_path: Path) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    number = h.np_dtype_to_tensor_dtype(dtype)
    info = [h.make_tensor_value_info(k, number, ["n", 2]) for k in ("x", "y")]
    exe = compiled([node("Identity", ["x"], ["y"])], info[:1], info[1:])
    exe.save(tmp_path / "model.rlx")
    for run in (exe, relaxlite.load(tmp_path / "model.rlx")):
        assert str(run.inputs) == f"x: {name}[n, 2]"
        for size in (0, 1, 7):
            x = np.ones((size, 2)).astype(dtype)
            y = run(x)
            assert y.dtype == dtype and np.array_equal(y.view(np.uint8), x.view(np.uint8))
    with pytest.raises(InputError, match=f"argument 'x': got uint8, expects {name}"):
        exe(np.ones((1, 2), np.uint8))


def test_sequences_of_every_length() -> None:
    nodes = [node("SequenceLength", ["s"], ["n"]), node("SequenceInsert", ["s", "x", "at"], ["t"])]
    outputs = [value("n", [], "int64"), sequence("t", [None, 2])]
    exe = compiled(nodes, [sequence("s", [None, 2]), value("x", ["a", 2]), value("at", [], "int64")], outputs)
    (x,) = pieces(4)
    for sizes in [(), (3,), (0, 1, 5), (2,) * 7]:
        for at in sorted({0, len(sizes) // 2, len(sizes)}):
            before = pieces(*sizes)
            count, after = exe(before, x, np.int64(at))
            assert count == len(sizes)
            assert_same(after, [*before[:at], x, *before[at:]])
    with pytest.raises(ExecutionError, match="a position lies outside of the sequence"):
        exe(pieces(1), x, np.int64(2))
    with pytest.raises(InputError, match=r"argument 's': element 0 is float32 of rank 1, expects float32 of rank 2"):
        exe([np.zeros(2, np.float32)], x, np.int64(0))
    with pytest.raises(InputError, match="argument 's': expects a list of arrays, got ndarray"):
        exe(x, x, np.int64(0))


def test_sequences_lose_and_yield_elements() -> None:
    nodes = [
        node("SequenceErase", ["s", "at"], ["t"]),
        node("SequenceAt", ["s", "at"], ["e"]),
        node("ConcatFromSequence", ["s"], ["c"], axis=0),
    ]
    inputs = [sequence("s", [None, 2]), value("at", [], "int64")]
    exe = compiled(nodes, inputs, [sequence("t", [None, 2]), value("e", [None, 2]), value("c", [None, 2])])
    for sizes in [(3,), (0, 1, 5), (2, 2)]:
        for at in (0, -1):
            before = pieces(*sizes)
            after, element, joined = exe(before, np.int64(at))
            assert np.array_equal(element, before[at])
            assert np.array_equal(joined, np.concatenate(before))
            del before[at]
            assert_same(after, before)


def test_split_into_a_number_of_parts_that_a_size_decides() -> None:
    inputs = [value("x", [2, "n"]), value("k", [], "int64")]
    exe = compiled([node("SplitToSequence", ["x", "k"], ["s"], axis=1)], inputs, [sequence("s", [2, None])])
    for size, part in [(6, 2), (7, 3), (1, 5), (0, 1)]:
        x = np.arange(2 * size, dtype=np.float32).reshape(2, size)
        assert_same(exe(x, np.int64(part)), [x[:, k : k + part] for k in range(0, size, part)])


def test_optionals_are_none_or_present() -> None:
    held = h.make_tensor_type_proto(TensorProto.FLOAT, ["n"])
    nodes = [node("OptionalHasElement", ["x"], ["has"]), node("Identity", ["x"], ["y"])]
    exe = compiled(nodes, [optional("x", held)], [value("has", [], "bool"), optional("y", held)])
    for size in (0, 1, 7):
        has, y = exe(np.ones(size, np.float32))
        assert has and np.array_equal(y, np.ones(size))
    has, y = exe(None)
    assert not has and y is None
    get = compiled([node("OptionalGetElement", ["x"], ["y"])], [optional("x", held)], [value("y", [None])])
    with pytest.raises(ExecutionError, match="the optional value is absent"):
        get(None)


def test_text_goes_through_a_saved_model(tmp_path: Path) -> None:
    nodes = [node("StringConcat", ["a", "suffix"], ["y"]), node("Equal", ["a", "b"], ["same"])]
    inputs = [value("a", ["n"], "string"), value("b", ["n"], "string")]
    proto = model(nodes, inputs, [value("y", ["n"], "string"), value("same", ["n"], "bool")], opset=20)
    proto.graph.initializer.append(h.make_tensor("suffix", TensorProto.STRING, [1], [b"!"]))
    exe = relaxlite.compile(from_onnx(proto))
    exe.save(tmp_path / "text.rlx")
    for run in (exe, relaxlite.load(tmp_path / "text.rlx")):
        assert "a: string[n]" in repr(run)
        for a, b in [(["x", "", "żó"], ["x", "y", "żó"]), ([], []), (["a"] * 7, ["b"] * 7)]:
            y, same = run(np.array(a, dtype=object), np.array(b, dtype=object))
            assert y.tolist() == [text + "!" for text in a]
            assert same.tolist() == [p == q for p, q in zip(a, b, strict=True)]
        with pytest.raises(InputError, match="argument 'a': got int64, expects strings"):
            run(np.int64([1]), np.int64([1]))


def test_host_operators_show_in_the_bytecode() -> None:
    proto = model(
        [node("RegexFullMatch", ["x"], pattern="a+")],
        [value("x", ["n"], "string")],
        [value("y", None, "bool")],
        opset=20,
    )
    exe = relaxlite.compile(from_onnx(proto))
    assert exe(np.array(["aa", "b", ""], dtype=object)).tolist() == [True, False, False]
    assert "extern:host.RegexFullMatch" in exe.disassemble()


def test_a_pattern_that_is_no_regular_expression_is_refused_at_import() -> None:
    """It used to fail in the call, as an exception of Python's."""
    proto = model(
        [node("RegexFullMatch", ["x"], pattern="a(")],
        [value("x", ["n"], "string")],
        [value("y", None, "bool")],
        opset=20,
    )
    with pytest.raises(ImportModelError, match=r"'pattern' is no regular expression that Python takes: 'a\('"):
        from_onnx(proto)


def test_bytes_that_are_no_picture_are_refused() -> None:
    proto = model([node("ImageDecoder", ["x"])], [value("x", ["n"], "uint8")], [value("y", None, "uint8")], opset=20)
    exe = relaxlite.compile(from_onnx(proto))
    with pytest.raises(ExecutionError, match="ImageDecoder cannot decode 3 bytes as a picture"):
        exe(np.array([1, 2, 3], np.uint8))


def test_narrow_types_go_through_a_branch() -> None:
    names = [h.make_tensor_value_info(k, TensorProto.INT4, ["n"]) for k in ("x", "y")]
    then = h.make_graph(
        [node("Identity", ["x"], ["t"])], "t", [], [h.make_tensor_value_info("t", TensorProto.INT4, ["n"])]
    )
    other = h.make_graph([node("Concat", ["x", "x"], ["e"], axis=0)], "e", [],
                         [h.make_tensor_value_info("e", TensorProto.INT4, [None])])  # fmt: skip
    exe = compiled([node("If", ["c"], ["y"], then_branch=then, else_branch=other)],
                   [value("c", [], "bool"), names[0]], [names[1]])  # fmt: skip
    x = np.array([-8, 7, 0]).astype(ml_dtypes.int4)
    assert np.array_equal(exe(np.array(True), x), x)
    assert np.array_equal(exe(np.array(False), x), np.concatenate([x, x]))
