"""Models that cannot be imported: each way gets an ImportModelError whose text says what is wrong and where."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from relaxlite.errors import ImportModelError, InvalidArgumentError, UnsupportedOpsError
from relaxlite.frontend.onnx import from_onnx
from tests.support.onnx_models import graph, imported, model, node, value, values


def message_of(given: Any, kind: type[Exception] = ImportModelError, **options: Any) -> str:
    """The text of the error that the import ends with."""
    with pytest.raises(kind) as error:
        from_onnx(given, **options)
    return str(error.value)


def relu() -> onnx.ModelProto:
    return model([node("Relu", ["x"])], values(x=["n", 3]))


# Files


def test_missing_file(tmp_path: Path) -> None:
    assert message_of(tmp_path / "none.onnx") == f"there is no file '{tmp_path / 'none.onnx'}'"


def test_folder(tmp_path: Path) -> None:
    assert message_of(tmp_path) == f"'{tmp_path}' is a folder; give the path of the .onnx file in it"


def test_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.touch()
    assert message_of(path) == f"'{path}': empty, not an ONNX model"
    assert message_of(b"") == "the given bytes: empty, not an ONNX model"


@pytest.mark.parametrize("data", [b"hello world, this is text\n" * 9, b"\x89PNG\r\n\x1a\n" * 9, bytes(range(256))])
def test_not_a_protobuf(data: bytes) -> None:
    assert message_of(data) == "the given bytes: not an ONNX model (not a protobuf)"


def test_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    data = model([node("Add", ["x", "w"])], values(x=[64]), weights={"w": np.ones(64, np.float32)}).SerializeToString()
    path.write_bytes(data[: len(data) // 2])
    assert message_of(path) == f"'{path}': an ONNX model that is truncated or damaged"


def test_every_truncation_is_an_error_and_no_crash() -> None:
    data = model([node("Add", ["x", "w"])], values(x=[4]), weights={"w": np.ones(4, np.float32)}).SerializeToString()
    for size in range(len(data) - 12):  # what is left out at the very end is the opset
        with pytest.raises(ImportModelError):
            from_onnx(data[:size])


def test_random_damage_is_no_crash() -> None:
    data = bytearray(
        model([node("Relu", ["x"], name="a")], values(x=["n", 4]), [value("y", ["n", 4])]).SerializeToString()
    )
    rng = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(data)
        damaged[rng.integers(len(data))] = rng.integers(256)
        with contextlib.suppress(ImportModelError, InvalidArgumentError):
            from_onnx(bytes(damaged))


def test_something_else_than_a_model() -> None:
    assert message_of(7, InvalidArgumentError) == "from_onnx takes a path, bytes or an onnx.ModelProto, not int"  # type: ignore[arg-type]


def test_model_without_graph() -> None:
    assert "contains no graph" in message_of(onnx.ModelProto(ir_version=8))


def test_graph_without_outputs() -> None:
    proto = relu()
    del proto.graph.output[:]
    assert message_of(proto) == "the model: its graph has no outputs, so there is nothing to compute"


# External data


def with_external(folder: Path, **entries: str) -> Path:
    """A model whose weight w (3 floats) stands in the file that `entries` describe."""
    proto = model([node("Add", ["x", "w"])], values(x=["n", 3]), weights={"w": np.ones(3, np.float32)})
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, text in entries.items():
        tensor.external_data.add(key=key, value=text)
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def test_missing_external_data(tmp_path: Path) -> None:
    found = message_of(with_external(tmp_path, location="w.bin"))
    assert found == f"external data file 'w.bin' of tensor 'w' is missing in folder '{tmp_path}'"


@pytest.mark.parametrize("location", ["../w.bin", "a/../../w.bin", "/etc/passwd", "C:\\w.bin", "..\\w.bin"])
def test_external_data_outside_the_folder(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "w.bin").write_bytes(bytes(12))
    found = message_of(with_external(folder, location=location))
    assert found == f"external data of tensor 'w' points outside the model's folder: '{location}'"


def test_external_data_through_a_link(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(12))
    (folder / "w.bin").symlink_to(tmp_path / "secret")
    found = message_of(with_external(folder, location="w.bin"))
    assert found.startswith("external data of tensor 'w' points outside the model's folder: 'w.bin' links to")


def test_a_download_cache_may_hold_model_and_data_as_links(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    with_external(blobs, location="w.bin").rename(blobs / "1234")
    (blobs / "5678").write_bytes(np.ones(3, np.float32).tobytes())
    (snapshot / "model.onnx").symlink_to(blobs / "1234")
    (snapshot / "w.bin").symlink_to(blobs / "5678")
    assert "main" in from_onnx(snapshot / "model.onnx")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"length": "8"}, "external data of tensor 'w' has a length of 8 bytes, but shape (3,) of FLOAT needs 12"),
        (
            {"offset": "4"},
            "external data file 'w.bin' is too short for tensor 'w': 12 bytes, but it needs 12 bytes at offset 4",
        ),
        ({"offset": "-1"}, "external data of tensor 'w' has offset='-1', which is no number of bytes"),
        ({"location": ""}, "tensor 'w' is stored externally, but names no file"),
    ],
)
def test_wrong_external_entries(tmp_path: Path, entries: dict[str, str], message: str) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(12))
    assert message in message_of(with_external(tmp_path, **{"location": "w.bin", **entries}))


def test_external_data_of_a_model_in_memory(tmp_path: Path) -> None:
    data = with_external(tmp_path, location="w.bin").read_bytes()
    assert "but the model was given as bytes; give its path" in message_of(data)


# Graphs


def test_cyclic_graph() -> None:
    nodes = [node("Add", ["x", "t"], ["s"], name="first"), node("Relu", ["s"], ["t"]), node("Exp", ["t"])]
    message = (
        "the graph is cyclic: ONNX node 'first' (Add) uses 't', which is computed from its own output, "
        "by ONNX node #1 (Relu)"
    )
    assert message_of(model(nodes, values(x=["n"]))) == message
    behind = model([nodes[2], nodes[0], nodes[1]], values(x=["n"]))  # what only needs the cycle is not named
    assert message_of(behind) == message.replace("#1", "#2")
    itself = model([node("Add", ["x", "y"], name="self")], values(x=["n"]))
    assert message_of(itself).endswith("ONNX node 'self' (Add) uses 'y', which is computed from its own output")


def test_cycle_through_a_branch() -> None:
    branches = {k: graph([node("Relu", ["t"], ["r"])], outputs=["r"]) for k in ("then_branch", "else_branch")}
    nodes = [node("If", ["c"], ["s"], name="choice", **branches), node("Exp", ["s"], ["t"]), node("Relu", ["t"])]
    assert "ONNX node 'choice' (If) uses 't', which" in message_of(model(nodes, [value("c", [], "bool")]))


def test_more_inputs_than_the_op_takes() -> None:
    proto = model([node("Neg", ["x", "x"], name="minus")], values(x=["n"]))
    assert message_of(proto).startswith("ONNX node 'minus' (Neg): Neg takes at most 1 input, got 2\n")
    proto = model([node("Gemm", ["x", "x", "x", "x"])], values(x=["n", "n"]))
    assert "(Gemm): Gemm takes at most 3 inputs, got 4" in message_of(proto)
    imported(model([node("Neg", ["x", ""])], values(x=["n"])))  # left out
    imported(model([node("Max", ["x"] * 9)], values(x=["n"])))  # any number


def test_undefined_name() -> None:
    proto = model([node("Add", ["x", "q"], name="sum")], values(x=["n"]))
    assert message_of(proto) == "ONNX node 'sum' (Add) uses 'q', which no input, initializer or node defines"


def test_output_that_nothing_computes() -> None:
    proto = model([node("Relu", ["x"], ["t"])], values(x=["n"]))
    assert message_of(proto) == "output 'y' of graph 'test' is not computed by any node"


def test_duplicate_definitions() -> None:
    proto = model([node("Relu", ["x"]), node("Exp", ["x"], name="again")], values(x=["n"]))
    assert message_of(proto) == "ONNX node 'again' (Exp) defines 'y', which is already defined"
    proto = model([node("Relu", ["x"])], [value("x", [1]), value("x", [1])])
    assert message_of(proto) == "the graph has two inputs named 'x'"
    proto = model([node("Relu", ["x"], ["x"])], values(x=["n"]), ["x"])
    assert "defines 'x', which is already defined" in message_of(proto)


def test_undefined_name_in_a_branch() -> None:
    branches = {
        k: graph([node("Relu", ["nowhere"], ["r"], name="inner")], outputs=["r"])
        for k in ("then_branch", "else_branch")
    }
    proto = model([node("If", ["c"], **branches)], [value("c", [], "bool")])
    assert "ONNX node 'inner' (Relu) uses 'nowhere'" in message_of(proto)


def test_declared_shapes_that_do_not_fit_name_the_node() -> None:
    proto = model(
        [node("Gemm", ["x", "w"], name="dense")], values(x=[2, 3]), weights={"w": np.ones((4, 5), np.float32)}
    )
    assert message_of(proto).splitlines() == [
        "ONNX node 'dense' (Gemm): matmul: the inner dimensions differ: a is (2, 3) and b is (4, 5); the last "
        "dimension of a must equal the second to last dimension of b",
        "  input 'x': (2, 3) float32",
        "  input 'w': (4, 5) float32",
    ]


def test_wrong_dtypes_name_the_node_and_its_inputs() -> None:
    proto = model([node("Add", ["x", "z"], name="sum")], [value("x", ["n"]), value("z", ["n"], "int64")])
    found = message_of(proto)
    assert found.startswith("ONNX node 'sum' (Add): add: operands have dtypes float32 and int64")
    assert found.endswith("  input 'x': (n,) float32\n  input 'z': (n,) int64")


def test_missing_inputs_and_broken_attributes_name_the_node() -> None:
    assert "ONNX node #0 (Add): input 1 is missing" in message_of(model([node("Add", ["x"])], values(x=["n"])))
    proto = model([node("Softmax", ["x"], axis=[0])], values(x=["n"]))
    assert "attribute 'axis' has kind INTS, not INT" in message_of(proto)
    assert "attribute 'to' is missing" in message_of(model([node("Cast", ["x"])], values(x=["n"])))


def test_attributes_are_never_ignored() -> None:
    proto = model([node("Relu", ["x"], name="r", alpha=0.5)], values(x=["n"]))
    assert message_of(proto).startswith(
        "ONNX node 'r' (Relu): attribute 'alpha' of Relu (opset 17) is not known; attributes are never ignored"
    )


def test_unknown_element_types() -> None:
    x = helper.make_tensor_value_info("x", TensorProto.COMPLEX64, ["n"])
    message = message_of(model([node("Identity", ["x"])], [x]))
    assert message.startswith("input 'x' has element type COMPLEX64, which relaxlite does not have")


def test_arithmetic_on_text_is_refused() -> None:
    proto = model([node("Relu", ["x"])], [value("x", ["n"], "string")])
    assert "ONNX node #0 (Relu): Relu of STRING is not supported" in message_of(proto)


def test_complex_constants_are_named() -> None:
    tensor = numpy_helper.from_array(np.ones(2, np.complex64), "c")
    proto = model([node("Identity", ["c"])])
    proto.graph.initializer.append(tensor)
    assert message_of(proto).startswith("tensor 'c' has element type COMPLEX64, which relaxlite does not have")


def test_weights_with_too_few_bytes() -> None:
    proto = model([node("Identity", ["w"])], weights={"w": np.ones(4, np.float32)})
    proto.graph.initializer[0].raw_data = bytes(8)
    assert message_of(proto) == "tensor 'w' of shape (4,) and type float32 needs 16 bytes of data, but has 8"
    proto.graph.initializer[0].ClearField("raw_data")
    proto.graph.initializer[0].float_data.extend([1.0, 2.0])
    assert message_of(proto).startswith("tensor 'w' of shape (4,) does not hold as many elements as its shape says")
    proto.graph.initializer[0].dims[0] = -4
    assert message_of(proto) == "tensor 'w' has a negative dimension: (-4,)"


def test_inputs_that_are_no_tensors() -> None:
    sequence = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, ["n"])
    assert "relu: x must be a tensor" in message_of(model([node("Relu", ["s"])], [sequence]))
    table = onnx.ValueInfoProto(name="m")
    table.type.map_type.key_type = TensorProto.INT64
    assert message_of(model([node("Relu", ["m"])], [table])) == "input 'm' is a map_type, not a tensor"


# Versions and operators


@pytest.mark.parametrize("version", [0, 99])
def test_unknown_opsets(version: int) -> None:
    assert f"the model uses opset {version} of ONNX; relaxlite knows 1 to" in message_of(
        model([node("Relu", ["x"])], values(x=["n"]), opset=version)
    )


def test_model_without_opset() -> None:
    proto = relu()
    del proto.opset_import[:]
    assert message_of(proto) == "ONNX node #0 (Relu): the model does not say which opset of ONNX it uses"


def test_all_unknown_ops_are_listed_at_once() -> None:
    inner = graph([node("Strange", ["x"], ["r"], name="deep")], outputs=["r"])
    nodes = [
        node("Fancy", ["x"], ["a"], name="one", domain="my.domain"),
        node("Strange", ["a"], ["b"], name="two"),
        node("Fancy", ["b"], ["d"], domain="my.domain"),
        node("If", ["c"], then_branch=inner, else_branch=inner),
    ]
    proto = model(nodes, [value("x", ["n"]), value("c", [], "bool")], domains=["my.domain"])
    assert message_of(proto, UnsupportedOpsError).splitlines() == [
        "the model uses 2 ops that relaxlite does not know:",
        "  ai.onnx.Strange: 3 nodes, the first is ONNX node 'two' (Strange)",
        "  my.domain.Fancy: 2 nodes, the first is ONNX node 'one' (Fancy)",
        "An op can be added from outside: decorate a converter function with "
        "relaxlite.frontend.onnx.onnx_op(name, since=..., domain=...)",
    ]


def test_unknown_ops_inside_functions_are_listed() -> None:
    body = helper.make_function("mine", "F", ["x"], ["y"], [node("Strange", ["x"])], [helper.make_opsetid("", 17)])
    proto = model([node("F", ["x"], domain="mine")], values(x=["n"]), domains=["mine"], functions=[body])
    assert "ai.onnx.Strange: 1 node, the first is ONNX node #0 (Strange)" in message_of(proto, UnsupportedOpsError)


def test_functions_that_contain_themselves() -> None:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    body = helper.make_function("mine", "F", ["x"], ["y"], [node("F", ["x"], domain="mine")], opsets)
    proto = model([node("F", ["x"], domain="mine")], values(x=["n"]), domains=["mine"], functions=[body])
    assert "function F contains itself" in message_of(proto)


def test_what_must_be_constant_says_so() -> None:
    inputs = [value("x", ["n", 3]), value("axes", ["k"], "int64")]
    proto = model([node("Squeeze", ["x", "axes"], name="r")], inputs)
    message = "ONNX node 'r' (Squeeze): the number of axes (input 1) must be known when the model is compiled"
    assert message in message_of(proto)


def test_loop_values_that_change_their_rank() -> None:
    body = graph(
        [node("Identity", ["c"], ["c2"]), node("Unsqueeze", ["v", "zero"], ["v2"])],
        [value("i", [], "int64"), value("c", [], "bool"), value("v", None)],
        [value("c2", None, "bool"), "v2"],
    )
    proto = model(
        [node("Loop", ["m", "", "x"], body=body)],
        [value("m", [], "int64"), value("x", [3])],
        weights={"zero": np.int64([0])},
    )
    assert (
        "loop value 'v' changes its rank: it is (3,) float32 at first and (1, 3) float32 in the next iteration"
        in message_of(proto)
    )
