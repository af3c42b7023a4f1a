"""Importing ONNX: names, symbols, overrides, bounds, constants, metadata; and real models."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from relaxlite.errors import ImportModelError, InvalidArgumentError, ShapeMismatchError
from relaxlite.frontend.onnx import from_onnx
from relaxlite.ir.expr import Call, Constant, Let
from relaxlite.ir.symbolic import SymVar
from relaxlite.ir.types import TensorType
from tests.support.onnx_models import graph, imported, input_dims, model, node, output_dims, run, value, values


def relu_model(dims: Any, **shapes: Any) -> onnx.ModelProto:
    return model([node("Relu", ["x"])], [value("x", dims), *values(**shapes)])


def symbol(module: Any, name: str) -> SymVar:
    """The symbol of this name among the inputs' dimensions."""
    dims = [d for p in module["main"].params for d in p.ty.shape]
    return next(d for d in dims if isinstance(d, SymVar) and d.name == name)


# The order of nodes


def test_nodes_may_stand_in_any_order() -> None:
    """As those of a model that onnxruntime's tools made of half precision: its casts stand at the end."""
    x = np.linspace(-2, 2, 5, dtype=np.float32)
    scrambled = [node("Relu", ["t"], name="late"), node("Exp", ["s"], ["t"]), node("Neg", ["x"], ["s"], name="early")]
    proto = model(scrambled, values(x=["n"]))
    assert np.allclose(run(proto, x), np.exp(-x))
    assert [n.name for n in proto.graph.node] == ["late", "", "early"]  # the caller's model stays as it is
    function = helper.make_function(
        "mine", "F", ["a"], ["c"], [node("Exp", ["b"], ["c"]), node("Neg", ["a"], ["b"])], [helper.make_opsetid("", 17)]
    )
    called = model([node("F", ["x"], domain="mine")], values(x=["n"]), domains=["mine"], functions=[function])
    assert np.allclose(run(called, x), np.exp(-x))


def test_what_a_branch_reads_counts_as_read_by_its_if() -> None:
    inner = [node("Exp", ["s"], ["r"]), node("Neg", ["t"], ["s"])]  # a t of the graph around it, and out of order too
    branches = {
        "then_branch": graph(inner, outputs=["r"]),
        "else_branch": graph([node("Identity", ["t"], ["q"])], outputs=["q"]),
    }
    nodes = [node("If", ["c"], name="choice", **branches), node("Relu", ["x"], ["t"])]
    proto = model(nodes, [*values(x=["n"]), value("c", [], "bool")])
    x = np.linspace(-2, 2, 5, dtype=np.float32)
    module = imported(proto)
    assert np.allclose(run(module, x, True), np.exp(-np.maximum(x, 0)))
    assert np.allclose(run(module, x, False), np.maximum(x, 0))


def test_an_order_that_is_right_is_kept() -> None:
    nodes = [node("Exp", ["x"], ["b"]), node("Neg", ["x"], ["a"]), node("Add", ["a", "b"])]
    calls = [b.value for b in imported(model(nodes, values(x=["n"]))).functions()["main"].body.bindings()]
    assert [c.callee.name for c in calls if isinstance(c, Call)][:2] == ["exp", "neg"]


# Symbols


def test_symbols_keep_the_models_names_and_equal_names_are_one_symbol() -> None:
    proto = model([node("Add", ["a", "b"])], values(a=["batch", 3], b=["batch", 3]))
    module = imported(proto)
    assert input_dims(module) == {"a": ["batch", "3"], "b": ["batch", "3"]}
    a, b = module.functions()["main"].params
    assert isinstance(a.ty, TensorType) and isinstance(b.ty, TensorType) and a.ty.shape and b.ty.shape
    assert a.ty.shape[0] is b.ty.shape[0]
    assert output_dims(module) == [["batch", "3"]]


def test_a_symbol_may_be_empty_at_run_time() -> None:
    module = imported(relu_model(["batch", 3]))
    assert symbol(module, "batch").lower == 0
    assert run(module, np.zeros((0, 3), np.float32)).shape == (0, 3)


def test_dimensions_without_name_or_value_get_symbols_of_their_own() -> None:
    assert input_dims(imported(relu_model([None, "", 3, "?"]))) == {"x": ["x_dim0", "x_dim1", "3", "x_dim3"]}


def test_a_size_of_minus_one_is_any_size() -> None:
    proto = relu_model([1, 4])
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    assert input_dims(imported(proto)) == {"x": ["x_dim0", "4"]}


def test_names_that_are_no_identifiers_stay() -> None:
    proto = model([node("Relu", ["x:0"])], [value("x:0", ["p2o.DynamicDimension.0", "seq-len"])])
    assert input_dims(imported(proto)) == {"x:0": ["p2o.DynamicDimension.0", "seq-len"]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("past + length", "length + past"), ("past+2*length - 1", "length*2 + past - 1"),
     ("floor(past/2 - 1/2) + 1", "((past + 1) // 2)"), ("max(past, length)", "max(length, past)")],
)  # fmt: skip
def test_arithmetic_over_other_inputs_is_an_expression(text: str, expected: str) -> None:
    proto = model([node("Relu", ["x"])], values(x=["past", "length"], mask=[text]))
    assert input_dims(imported(proto))["mask"] == [expected]


def test_arithmetic_of_a_dimension_is_checked_at_run_time() -> None:
    proto = model([node("Relu", ["mask"])], values(mask=["past + length"], x=["past", "length"]))
    assert run(proto, np.zeros(5, np.float32), np.zeros((2, 3), np.float32)).shape == (5,)
    with pytest.raises(ShapeMismatchError):
        run(proto, np.zeros(6, np.float32), np.zeros((2, 3), np.float32))


def test_arithmetic_over_unknown_names_is_a_name() -> None:
    assert input_dims(imported(relu_model(["past + length"]))) == {"x": ["past + length"]}


def test_names_of_output_dimensions_are_not_relations() -> None:
    proto = model([node("Relu", ["x"])], values(x=["n", 3]), [value("y", ["other", "floor(n/2)"])])
    assert output_dims(imported(proto)) == [["n", "3"]]


# Options


def test_dynamic_shapes_name_fix_and_free_dimensions() -> None:
    proto = model([node("Relu", ["x"])], values(x=["a", "b", 224], z=["c", None, None]))
    module = imported(proto, dynamic_shapes={"x": {0: "batch", 1: 8, -1: "width"}, "z": ["batch", None, 7]})
    assert input_dims(module) == {"x": ["batch", "8", "width"], "z": ["batch", "z_dim1", "7"]}


@pytest.mark.parametrize("given", ["1..64", (1, 64), "1 .. 64", [1, 64]])
def test_bounds_of_a_symbol(given: Any) -> None:
    found = symbol(imported(relu_model(["batch", 3]), bounds={"batch": given}), "batch")
    assert (found.lower, found.upper) == (1, 64)


@pytest.mark.parametrize(("given", "bounds"), [("2..", (2, None)), ("..9", (0, 9)), ((None, 5), (0, 5)), ("8", (0, 8))])
def test_open_bounds(given: Any, bounds: Any) -> None:
    found = symbol(imported(relu_model(["batch", 3]), bounds={"batch": given}), "batch")
    assert (found.lower, found.upper) == bounds


def test_bounds_apply_to_unnamed_and_renamed_dimensions() -> None:
    module = imported(relu_model([None, "n"]), bounds={"x_dim0": "1..4", "m": "2..3"}, dynamic_shapes={"x": {1: "m"}})
    assert (symbol(module, "x_dim0").upper, symbol(module, "m").upper) == (4, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dynamic_shapes": {"z": {0: "n"}}}, "dynamic_shapes: the model has no input 'z'; it has 'x'"),
        ({"dynamic_shapes": {"x": {5: "n"}}}, "dynamic_shapes['x']: axis 5 does not exist; the input has 2 dimensions"),
        ({"dynamic_shapes": {"x": ["n"]}}, "dynamic_shapes['x'] must name all 2 dimensions"),
        ({"dynamic_shapes": {"x": {0: -3}}}, "dynamic_shapes['x'][0] must be a name or a size, not -3"),
        ({"dynamic_shapes": {"x": {0: "-3"}}}, "dynamic_shapes['x'][0] must be a name or a size, not '-3'"),
        ({"dynamic_shapes": {"x": {0: 1 << 63}}}, "dynamic_shapes['x'][0] must be a name or a size, not 9223"),
        ({"bounds": {"m": "1..2"}}, "bounds: the model has no symbol 'm'; it has 'n'"),
        ({"bounds": {"n": "one"}}, "bounds of 'n': 'one' is not a range such as '1..512'"),
        ({"bounds": {"n": (5, 2)}}, "bounds of 'n': no size lies in 5..2"),
        ({"bounds": {"n": 3}}, "bounds of 'n' must be a pair of integers or None"),
    ],
)
def test_wrong_options(options: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        from_onnx(relu_model(["n", 3]), **options)
    assert message in str(error.value)


def test_an_input_without_rank_needs_a_shape() -> None:
    proto = model([node("Relu", ["x"])], [value("x", None)])
    with pytest.raises(
        ImportModelError, match=r"input 'x' declares no shape, not even a rank; give it: dynamic_shapes="
    ):
        from_onnx(proto)
    assert input_dims(imported(proto, dynamic_shapes={"x": ["n", 3]})) == {"x": ["n", "3"]}


# Names, constants, metadata


def test_names_and_metadata_are_recorded() -> None:
    proto = model([node("Relu", ["in put"], ["out/put"])], values(**{"in put": ["n"]}), ["out/put"])
    helper.set_model_props(proto, {"character": "abc"})
    module = imported(proto)
    main = module.functions()["main"]
    assert main.attrs["input_names"] == ("in put",)
    assert main.attrs["output_names"] == ("out/put",)
    assert module.attrs["producer"] == "tests"
    assert module.attrs["opset"] == 17
    assert module.attrs["metadata"] == (("character", "abc"),)
    (binding,) = main.body.bindings()
    assert isinstance(binding, Let) and binding.var.name == "out/put"


def test_every_node_is_a_source_location() -> None:
    proto = model([node("Relu", ["x"], ["t"], name="first/relu"), node("Exp", ["t"])], values(x=["n"]))
    locations = [b.value.loc for b in imported(proto).functions()["main"].body.bindings() if isinstance(b, Let)]  # type: ignore[union-attr]
    assert locations == ["ONNX node 'first/relu' (Relu)", "ONNX node #1 (Exp)"]


def test_initializers_and_constant_nodes_are_constants_even_if_listed_as_inputs() -> None:
    tensor = numpy_helper.from_array(np.float32([1, 2, 3]))
    nodes = [node("Constant", [], ["c"], value=tensor), node("Add", ["x", "w"], ["t"]), node("Add", ["t", "c"])]
    proto = model(nodes, values(x=["n", 3], w=[3]), weights={"w": np.float32([10, 20, 30])})
    module = imported(proto)
    assert list(input_dims(module)) == ["x"]
    assert np.allclose(run(module, np.zeros((1, 3), np.float32)), [[11, 22, 33]])
    calls = [b.value for b in module.functions()["main"].body.bindings() if isinstance(b, Let)]
    names = [a.name for c in calls if isinstance(c, Call) for a in c.args if isinstance(a, Constant)]
    assert names == ["w", "c"]


@pytest.mark.parametrize(
    ("attrs", "expected"),
    [({"value_int": 7}, np.int64(7)), ({"value_ints": [1, 2]}, np.int64([1, 2])), 
     ({"value_float": 0.5}, np.float32(0.5)), ({"value_floats": [0.5, 1.5]}, np.float32([0.5, 1.5]))],
)  # fmt: skip
def test_constants_of_plain_attributes(attrs: Any, expected: Any) -> None:
    found = run(model([node("Constant", [], **attrs)]))
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("coordinates", [np.int64([1, 5]), np.int64([[0, 1], [1, 2]])])
def test_sparse_constants_become_dense(coordinates: Any) -> None:
    sparse = helper.make_sparse_tensor(
        numpy_helper.from_array(np.float32([4, 5]), "s"), numpy_helper.from_array(coordinates, "i"), [2, 3]
    )
    assert np.array_equal(run(model([node("Constant", [], sparse_value=sparse)])), [[0, 4, 0], [0, 0, 5]])


def test_big_weights_are_not_copied() -> None:
    raw = np.arange(1 << 16, dtype=np.float32)
    proto = model([node("Add", ["x", "w"])], values(x=["n", 1 << 16]), weights={"w": raw})
    (binding,) = imported(proto).functions()["main"].body.bindings()
    assert isinstance(binding, Let) and isinstance(binding.value, Call)
    weight = binding.value.args[1]
    assert isinstance(weight, Constant)
    assert not weight.value.flags.owndata


def test_four_bit_weights_are_widened() -> None:
    tensor = helper.make_tensor("w", onnx.TensorProto.INT4, [3], [-8, 7, 1])
    proto = model([node("DequantizeLinear", ["w", "s"])], weights={"s": np.float32(0.5)}, opset=21)
    proto.graph.initializer.append(tensor)
    assert np.allclose(run(proto), [-4, 3.5, 0.5])


def save_external(folder: Path, weight: Any) -> Path:
    proto = model([node("Add", ["x", "w"])], values(x=["n", weight.size]), weights={"w": weight})
    path = folder / "model.onnx"
    onnx.save_model(proto, str(path), save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


def test_external_data_is_mapped(tmp_path: Path) -> None:
    path = save_external(tmp_path, np.float32([1, 2, 3]))
    for given in (path, str(path)):
        module = from_onnx(given)
        assert np.allclose(run(module, np.zeros((2, 3), np.float32)), [[1, 2, 3]] * 2)


def test_models_come_as_path_bytes_or_proto(tmp_path: Path) -> None:
    proto = relu_model(["n"])
    path = tmp_path / "m.onnx"
    onnx.save(proto, str(path))
    texts = {str(from_onnx(given)) for given in (path, str(path), proto.SerializeToString(), proto)}
    assert len(texts) == 1


# Shape arithmetic


def test_shape_arithmetic_is_followed() -> None:
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["n"], axis=0),
        node("Unsqueeze", ["n", "axes"], ["n1"]),
        node("Concat", ["n1", "rest"], ["target"], axis=0),
        node("Reshape", ["x", "target"]),
    ]
    weights = {"zero": np.int64(0), "axes": np.int64([0]), "rest": np.int64([-1, 2])}
    proto = model(nodes, values(x=["n", "m", 4]), weights=weights)
    module = imported(proto)
    assert output_dims(module) == [["n", "m*2", "2"]]
    assert run(module, np.zeros((0, 3, 4), np.float32)).shape == (0, 6, 2)


def test_sizes_computed_in_floats_are_followed() -> None:
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Cast", ["s"], ["f"], to=1),
        node("Mul", ["f", "half"], ["g"]),
        node("Floor", ["g"], ["h"]),
        node("Cast", ["h"], ["target"], to=7),
        node("Expand", ["one", "target"]),
    ]
    proto = model(nodes, values(x=["n", "m"]), weights={"half": np.float32(0.5), "one": np.float32([[1]])})
    assert output_dims(imported(proto)) == [["(n // 2)", "(m // 2)"]]


@pytest.mark.parametrize(
    ("start", "end", "step", "size"),
    [(0, 1 << 62, 1, "n"), (1, -1, 1, "max(0, n - 2)"), (-3, 1 << 31, 1, "min(n, 3)"), (1 << 62, -(1 << 62), -1, "n"),
     (0, 5, 1, "min(n, 5)"), (0, 1 << 62, 2, "((n + 1) // 2)")],
)  # fmt: skip
def test_slices_have_exact_symbolic_sizes(start: int, end: int, step: int, size: str) -> None:
    weights = {"b": np.int64([start]), "e": np.int64([end]), "a": np.int64([0]), "s": np.int64([step])}
    module = imported(model([node("Slice", ["x", "b", "e", "a", "s"])], values(x=["n"]), weights=weights))
    assert output_dims(module) == [[size]]
    for n in (0, 1, 2, 3, 7):
        x = np.arange(n, dtype=np.float32)
        assert np.array_equal(run(module, x), x[start:end:step])


def test_a_target_known_at_run_time_only_may_hold_zero_and_minus_one() -> None:
    module = imported(model([node("Reshape", ["x", "t"])], [value("x", ["n", 6]), value("t", [3], "int64")]))
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    for target in ([0, -1, 2], [3, 2, 2], [-1, 6, 1]):
        kept = [2 if d == 0 else d for d in target]
        assert np.array_equal(run(module, x, np.int64(target)), x.reshape(kept))


def test_dishonest_symbols_are_run_time_errors() -> None:
    module = imported(model([node("MatMul", ["a", "b"])], values(a=["n", "k"], b=["j", 4])))
    assert run(module, np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)).shape == (2, 4)
    with pytest.raises(ShapeMismatchError, match="3"):
        run(module, np.ones((2, 3), np.float32), np.ones((5, 4), np.float32))


def test_a_table_sliced_to_the_length_keeps_the_symbol() -> None:
    nodes = [node("Shape", ["x"], ["s"]), node("Slice", ["table", "zero", "s"], ["rows"]), node("Add", ["x", "rows"])]
    proto = model(nodes, values(x=["n"]), weights={"table": np.arange(8, dtype=np.float32), "zero": np.int64([0])})
    module = imported(proto)
    assert output_dims(module) == [["n"]]
    assert np.array_equal(run(module, np.zeros(3, np.float32)), [0, 1, 2])
    with pytest.raises(ShapeMismatchError):
        run(module, np.zeros(9, np.float32))


# Real models

SIGNATURES = {
    "minilm-l6-onnx": [["batch_size", "sequence_length", "384"]],
    "magika": [["unk__214", "214"]],
    "open-nsfw-resnet50": [["unk__653", "2"]],
    "ppocrv4-rec": [["p2o.DynamicDimension.0", "max(((p2o.DynamicDimension.1 + 3) // 8), 1)", "6625"]],
    "nudenet-yolov8n": [["batch", "22", "((height + 31) // 32)*((width + 31) // 32)*21"]],
    "silero-vad-v6": [["input_dim0", "1"], ["2", "input_dim0", "128"]],
    "smart-turn-qdq": [["s6", "1"]],
}


@pytest.mark.models
@pytest.mark.parametrize("name", list(SIGNATURES))
def test_real_models_keep_their_symbols(name: str, model_path: Callable[[str], Path]) -> None:
    module = from_onnx(model_path(name))
    assert output_dims(module) == SIGNATURES[name]


@pytest.mark.models
@pytest.mark.parametrize("name", ["ppocrv4-det", "ddddocr-common", "aecmos", "slanet-table"])
def test_more_real_models_import(name: str, model_path: Callable[[str], Path]) -> None:
    assert "main" in from_onnx(model_path(name))


@pytest.mark.models
def test_import_is_quick(model_path: Callable[[str], Path]) -> None:
    path = model_path("minilm-l6-onnx")
    start = time.process_time()
    from_onnx(path)
    assert time.process_time() - start < 2
