"""Converters of ONNX ops: what changed between opsets, control flow, functions, fused ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import relaxlite
from relaxlite.errors import ExecutionError, ImportModelError
from relaxlite.frontend.onnx import from_onnx, onnx_op, registry
from relaxlite.frontend.onnx.node import Node
from relaxlite.ir import ops
from relaxlite.ir.expr import If, Let, Loop, MatchShape
from tests.support.onnx_models import graph, imported, model, node, onnxruntime_result, output_dims, run, value, values

X = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
MICROSOFT = "com.microsoft"


def of_x(
    op: str, opset: int, *more: Any, dims: Any = ("n", 3, 4), outputs: Any = ("y",), **attrs: Any
) -> onnx.ModelProto:
    """A model of one node with input x and constants."""
    weights = {f"c{k}": np.asarray(w) for k, w in enumerate(more) if w is not None}
    names = ["x", *(f"c{k}" if w is not None else "" for k, w in enumerate(more))]
    return model([node(op, names, outputs, **attrs)], values(x=list(dims)), outputs, weights, opset=opset)


def softmax(x: Any, axis: Any) -> Any:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


# Versions


def test_softmax_takes_one_axis_since_opset_13() -> None:
    assert np.allclose(run(of_x("Softmax", 12, axis=1), X), softmax(X, (1, 2)), atol=1e-6)
    assert np.allclose(run(of_x("Softmax", 11), X), softmax(X, (1, 2)), atol=1e-6)
    assert np.allclose(run(of_x("Softmax", 13, axis=1), X), softmax(X, 1), atol=1e-6)
    assert np.allclose(run(of_x("Softmax", 13), X), softmax(X, -1), atol=1e-6)


def test_axes_are_an_attribute_then_an_input() -> None:
    assert np.allclose(run(of_x("ReduceSum", 11, axes=[1], keepdims=0), X), X.sum(1), atol=1e-5)
    assert np.allclose(run(of_x("ReduceSum", 13, np.int64([1]), keepdims=0), X), X.sum(1), atol=1e-5)
    assert np.allclose(run(of_x("ReduceMax", 13, axes=[-1]), X), X.max(-1, keepdims=True))
    assert np.allclose(run(of_x("ReduceMax", 18, np.int64([-1])), X), X.max(-1, keepdims=True))
    assert np.array_equal(run(of_x("Unsqueeze", 11, axes=[0, -1]), X), X[None, ..., None])
    assert np.array_equal(run(of_x("Unsqueeze", 13, np.int64([0, -1])), X), X[None, ..., None])
    with pytest.raises(ImportModelError, match="attribute 'axes' of ReduceSum"):
        from_onnx(of_x("ReduceSum", 13, axes=[1]))


def test_reductions_of_no_axes() -> None:
    assert run(of_x("ReduceMean", 18), X).shape == (1, 1, 1)
    empty = np.zeros(0, np.int64)
    assert run(of_x("ReduceMean", 18, empty), X).shape == (1, 1, 1)
    assert np.array_equal(run(of_x("ReduceMean", 18, empty, noop_with_empty_axes=1), X), X)
    assert np.allclose(run(of_x("ReduceSumSquare", 18, empty, noop_with_empty_axes=1), X), X * X)


def test_clip_has_attributes_then_inputs() -> None:
    assert np.array_equal(run(of_x("Clip", 6, min=-0.5, max=0.5), X), X.clip(-0.5, 0.5))
    assert np.array_equal(run(of_x("Clip", 11, np.float32(-0.5), np.float32(0.5)), X), X.clip(-0.5, 0.5))
    assert np.array_equal(run(of_x("Clip", 11, None, np.float32(0.5)), X), X.clip(None, 0.5))
    assert np.array_equal(run(of_x("Clip", 11), X), X)


def test_slice_has_attributes_then_inputs() -> None:
    assert np.array_equal(run(of_x("Slice", 9, starts=[1, 0], ends=[99, -1], axes=[1, 2]), X), X[:, 1:, :-1])
    found = run(of_x("Slice", 10, np.int64([-1]), np.int64([-99]), np.int64([2]), np.int64([-2])), X)
    assert np.array_equal(found, X[:, :, ::-2])


def test_split_by_attribute_input_and_count() -> None:
    outputs = ("a", "b")
    for proto in (
        of_x("Split", 11, outputs=outputs, axis=2, split=[1, 3]),
        of_x("Split", 13, np.int64([1, 3]), outputs=outputs, axis=2),
    ):
        a, b = run(proto, X)
        assert np.array_equal(a, X[..., :1]) and np.array_equal(b, X[..., 1:])
    a, b = run(of_x("Split", 18, outputs=outputs, axis=1, num_outputs=2), X)
    assert (a.shape[1], b.shape[1]) == (2, 1)


def test_pad_has_attributes_then_inputs() -> None:
    padded = np.pad(X, ((0, 0), (1, 0), (0, 2)), constant_values=5)
    assert np.array_equal(run(of_x("Pad", 2, pads=[0, 1, 0, 0, 0, 2], value=5.0), X), padded)
    assert np.array_equal(run(of_x("Pad", 11, np.int64([0, 1, 0, 0, 0, 2]), np.float32(5)), X), padded)
    assert np.array_equal(run(of_x("Pad", 18, np.int64([1, 0, 0, 2]), np.float32(5), np.int64([1, 2])), X), padded)
    assert np.array_equal(run(of_x("Pad", 13, np.int64([0, 0, -1, 0, 0, -1])), X), X[..., 1:-1])


def test_broadcasting_was_an_attribute_before_opset_7() -> None:
    column = np.float32([1, 2, 3])
    assert np.array_equal(run(of_x("Add", 6, column, broadcast=1, axis=1), X), X + column[:, None])
    with pytest.raises(ImportModelError, match="not broadcast without the attribute 'broadcast'"):
        from_onnx(of_x("Add", 6, column))
    assert np.array_equal(run(of_x("Add", 7, column[:, None]), X), X + column[:, None])


def test_dropout_is_the_identity_with_a_mask() -> None:
    for opset, dtype in ((7, np.float32), (10, np.bool_), (13, np.bool_)):
        y, mask = run(of_x("Dropout", opset, outputs=("y", "m")), X)
        assert np.array_equal(y, X) and mask.all() and mask.dtype == dtype
    dropped = run(of_x("Dropout", 13, np.float32(0.5), np.array(True)), X)
    assert np.array_equal(dropped, np.where(dropped != 0, 2 * X, 0))
    assert np.array_equal(run(of_x("Dropout", 13, np.float32(0.5), np.array(False)), X), X)


def test_batch_normalization_versions() -> None:
    weights = [np.float32([1, 2, 3]), np.float32([0, 1, 0]), np.float32([0.5, 0, 0]), np.float32([1, 4, 1])]
    s, b, m, v = (w[:, None] for w in weights)
    expected = (X - m) / np.sqrt(v + 1e-5) * s + b
    for opset, attrs in ((7, {"spatial": 1}), (9, {}), (15, {"momentum": 0.5})):
        assert np.allclose(run(of_x("BatchNormalization", opset, *weights, **attrs), X), expected, atol=1e-5)
    with pytest.raises(ImportModelError, match="attribute 'spatial'=0"):
        from_onnx(of_x("BatchNormalization", 7, *weights, spatial=0))


def test_upsample_and_resize_versions() -> None:
    x = np.arange(4, dtype=np.float32).reshape(1, 1, 2, 2)
    scales = np.float32([1, 1, 2, 2])
    expected = x.repeat(2, 2).repeat(2, 3)
    dims = ["n", 1, "h", "w"]
    for proto in (
        of_x("Upsample", 7, dims=dims, scales=[1.0, 1, 2, 2]),
        of_x("Upsample", 9, scales, dims=dims),
        of_x("Resize", 10, scales, dims=dims),
        of_x("Resize", 11, None, scales, dims=dims),
        of_x("Resize", 13, None, None, np.int64([1, 1, 4, 4]), dims=dims),
    ):
        assert np.array_equal(run(proto, x), expected)
    assert output_dims(imported(of_x("Resize", 13, None, np.float32([1, 1, 0.5, 1.5]), dims=dims))) == [
        ["n", "1", "(h // 2)", "w + (w // 2)"]
    ]


def test_squeeze_without_axes() -> None:
    assert run(of_x("Squeeze", 11, dims=[1, "n", 1, 3]), np.zeros((1, 2, 1, 3), np.float32)).shape == (2, 3)


def test_squeeze_without_axes_refuses_a_symbolic_size_of_1() -> None:
    proto = of_x("Squeeze", 13, dims=["b", 1, "t"])
    compiled = relaxlite.compile(imported(proto))
    for b, t in ((3, 4), (2, 9), (0, 5)):
        x = np.ones((b, 1, t), np.float32)
        assert compiled(x).shape == onnxruntime_result(proto, {"x": x})[0].shape == (b, t)
    for b, t, name in ((1, 4, "b"), (3, 1, "t"), (1, 1, "b")):
        message = rf"^ONNX node #0 \(Squeeze\): {name} is 1, but taken to be another size: give the axes to squeeze: "
        with pytest.raises(ExecutionError, match=message):
            compiled(np.ones((b, 1, t), np.float32))


def test_squeeze_without_axes_checks_no_size_that_cannot_be_1() -> None:
    module = imported(of_x("Squeeze", 13, dims=["b", 1, "t"]), bounds={"b": "2..", "t": "2..9"})
    assert not any(isinstance(b, MatchShape) for b in module.functions()["main"].body.bindings())


def test_a_declared_rank_decides_whether_symbolic_sizes_are_squeezed() -> None:
    proto = of_x("Squeeze", 11, dims=["n", 1, 3])
    proto.graph.output[0].CopyFrom(value("y", [None]))
    module = imported(proto)
    assert output_dims(module) == [["3"]]
    assert "n" in module.attrs["assumptions"][0]  # type: ignore[index, operator]
    assert run(module, np.zeros((1, 1, 3), np.float32)).shape == (3,)


def test_integer_division_truncates() -> None:
    proto = model([node("Div", ["x", "d"])], [value("x", ["n"], "int64")], weights={"d": np.int64([2, -2, 3])})
    assert np.array_equal(run(proto, np.int64([-7, 7, -7])), [-3, -3, -2])


def test_powers_of_mixed_types_have_the_type_of_the_base() -> None:
    found = run(
        model([node("Pow", ["x", "p"])], [value("x", ["n"], "int32")], weights={"p": np.float32(0.5)}), np.int32([4, 9])
    )
    assert found.dtype == np.int32 and np.array_equal(found, [2, 3])
    assert np.array_equal(run(of_x("Pow", 15, np.int64(2)), X), X**2)


def test_top_k_keeps_its_k_symbolic() -> None:
    nodes = [node("Shape", ["z"], ["k"]), node("TopK", ["x", "k"], ["y", "i"])]
    proto = model(nodes, values(x=["n", 5], z=["k"]), ["y", "i"])
    module = imported(proto)
    assert output_dims(module) == [["n", "k"], ["n", "k"]]
    x = np.float32([[3, 1, 2, 5, 4]])
    y, i = run(module, x, np.zeros(2, np.float32))
    assert np.array_equal(y, [[5, 4]]) and np.array_equal(i, [[3, 4]])


def test_average_pool_with_ceil_mode_matches_onnxruntime() -> None:
    for attrs in (
        {"ceil_mode": 1},
        {"ceil_mode": 1, "count_include_pad": 1, "pads": [1, 1]},
        {"auto_pad": "SAME_LOWER"},
    ):
        proto = of_x("AveragePool", 19, dims=["n", 2, "l"], kernel_shape=[3], strides=[2], **attrs)
        x = np.random.default_rng(1).standard_normal((1, 2, 8)).astype(np.float32)
        assert np.allclose(run(proto, x), onnxruntime_result(proto, {"x": x})[0], atol=1e-6)


# Control flow


def branches(then: Any, other: Any) -> dict[str, Any]:
    return {"then_branch": then, "else_branch": other}


def test_branches_of_different_sizes() -> None:
    then = graph([node("Concat", ["x", "x"], ["t"], axis=0)], outputs=["t"])
    other = graph([node("Identity", ["x"], ["e"])], outputs=["e"])
    nodes = [node("If", ["c"], ["r"], **branches(then, other)), node("Exp", ["r"])]
    module = imported(model(nodes, [value("c", [], "bool"), value("x", ["n", 4])]))
    assert output_dims(module) == [["r_dim0", "4"]]
    x = X[0]
    assert np.allclose(run(module, np.array(True), x), np.exp(np.concatenate([x, x])))
    assert np.allclose(run(module, np.array(False), x), np.exp(x))


def test_a_known_condition_takes_its_branch_at_import() -> None:
    then = graph([node("Relu", ["x"], ["t"])], outputs=["t"])
    other = graph([node("Unsqueeze", ["x", "zero"], ["e"])], outputs=["e"])
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Size", ["s"], ["rank"]),
        node("Equal", ["rank", "two"], ["c"]),
        node("If", ["c"], **branches(then, other)),
    ]
    module = imported(model(nodes, values(x=["n", 4]), weights={"two": np.int64(2), "zero": np.int64([0])}))
    assert output_dims(module) == [["n", "4"]]
    assert not any(isinstance(b, Let) and isinstance(b.value, If) for b in module.functions()["main"].body.bindings())


def test_branches_of_different_rank_take_the_one_that_can_be_imported() -> None:
    then = graph([node("Squeeze", ["x", "zero"], ["t"])], outputs=["t"])
    other = graph([node("Identity", ["x"], ["e"])], outputs=["e"])
    nodes = [
        node("Shape", ["x"], ["s"], end=1),
        node("Equal", ["s", "one"], ["c"]),
        node("If", ["c"], ["r"], **branches(then, other)),
        node("Transpose", ["r"], perm=[1, 2, 0]),
    ]
    module = imported(model(nodes, values(x=["n", 2, 3]), weights={"zero": np.int64([0]), "one": np.int64([1])}))
    assert "taken to be false" in module.attrs["assumptions"][0]  # type: ignore[index, operator]
    assert run(module, np.zeros((5, 2, 3), np.float32)).shape == (2, 3, 5)
    message = r"\(If\): its condition is true, but taken to be false: output 'r' is .* in one branch and .*: "
    with pytest.raises(ExecutionError, match=message):
        relaxlite.compile(module)(np.zeros((1, 2, 3), np.float32))


def counting_loop(
    inner: Any, carried: Any, *, outputs: Any = ("y",), inputs: Any = (), **weights: Any
) -> onnx.ModelProto:
    """A loop of m rounds over v, starting from x."""
    return model(
        [node("Loop", ["m", "", *carried], outputs, body=inner)], [value("m", [], "int64"), *inputs], outputs, weights
    )


def loop_body(nodes: Any, carried: Any, outputs: Any) -> onnx.GraphProto:
    head = [value("i", [], "int64"), value("c", [], "bool")]
    return graph([node("Identity", ["c"], ["c2"]), *nodes], [*head, *carried], [value("c2", None, "bool"), *outputs])


def test_a_loop_may_change_the_sizes_of_its_values() -> None:
    body = loop_body([node("Concat", ["v", "v"], ["v2"], axis=0)], [value("v", None)], ["v2"])
    module = imported(counting_loop(body, ["x"], inputs=values(x=["n", 2])))
    assert output_dims(module)[0][1] == "2"
    for rounds in (0, 1, 3):
        assert run(module, np.int64(rounds), np.ones((3, 2), np.float32)).shape == (3 * 2**rounds, 2)


def test_a_loop_stacks_what_it_yields() -> None:
    nodes = [node("Add", ["v", "x"], ["v2"]), node("Mul", ["v2", "v2"], ["s"])]
    body = loop_body(nodes, [value("v", None)], ["v2", "s"])
    module = imported(counting_loop(body, ["x"], outputs=("y", "z"), inputs=values(x=["n"])))
    x = np.float32([1, 2])
    y, z = run(module, np.int64(3), x)
    assert np.array_equal(y, 4 * x) and np.array_equal(z, np.stack([(k * x) ** 2 for k in (2, 3, 4)]))
    assert run(module, np.int64(0), x)[1].shape == (0, 2)


def test_a_loop_stacks_what_has_sizes_that_only_the_loop_knows() -> None:
    nodes = [node("NonZero", ["x"], ["p"]), node("Cast", ["p"], ["s"], to=1), node("Identity", ["v"], ["v2"])]
    body = loop_body(nodes, [value("v", None)], ["v2", "s"])
    _, z = run(
        counting_loop(body, ["x"], outputs=("y", "z"), inputs=values(x=["n"])), np.int64(2), np.float32([1, 0, 2])
    )
    assert np.array_equal(z, [[[0, 2]], [[0, 2]]])


@pytest.mark.parametrize(("new_axis", "axis"), [(0, 0), (0, 1), (0, -1), (1, 0), (1, 1), (1, -1)])
def test_a_list_that_a_loop_appends_to_is_concatenated(new_axis: int, axis: int) -> None:
    """As PyTorch scripts it: outs.append(h) in the loop, torch.stack(outs, 1) or torch.cat(outs, 1) behind it."""
    body = loop_body(
        [node("Add", ["v", "x"], ["v2"]), node("SequenceInsert", ["list", "v2"], ["list2"])],
        [value("v", None), value("list", None)],
        ["v2", "list2"],
    )
    nodes = [
        node("SequenceEmpty", [], ["empty"], dtype=1),
        node("Loop", ["m", "", "x", "empty"], ["last", "all"], body=body),
        node("ConcatFromSequence", ["all"], axis=axis, new_axis=new_axis),
    ]
    module = imported(model(nodes, [value("m", [], "int64"), value("x", ["a", "b"])]))
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for rounds in (1, 4):
        parts = [x * (k + 2) for k in range(rounds)]
        expected = np.stack(parts, axis) if new_axis else np.concatenate(parts, axis)
        assert np.array_equal(run(module, np.int64(rounds), x), expected)


def list_in_a_loop(nodes: Any, start: Any, after: str, rank: int | None = 1, **attrs: Any) -> onnx.ModelProto:
    """A loop over m that changes a list, and an op on the list behind it."""
    declared = helper.make_tensor_sequence_value_info(
        "list", TensorProto.FLOAT, None if rank is None else [None] * rank
    )
    loop = node("Loop", ["m", "", "start"], ["all"], body=loop_body(nodes, [declared], ["list2"]))
    return model([start, loop, node(after, ["all"], **attrs)], [value("m", [], "int64"), value("x", ["n"])])


def test_a_list_that_a_loop_reads() -> None:
    empty, filled = node("SequenceEmpty", [], ["start"]), node("SequenceConstruct", ["x"], ["start"])
    append, prepend = (
        node("SequenceInsert", ["list", "x"], ["list2"]),
        node("SequenceInsert", ["list", "x", "i"], ["list2"]),
    )
    measure = node("SequenceLength", ["list"], ["size"])
    first = node("SequenceAt", ["list", "i"], ["p"])
    again = [first, node("SequenceInsert", ["list", "p"], ["list2"])]
    for nodes, start, more in (
        ([append], filled, 1),
        ([prepend], empty, 0),
        ([measure, append], empty, 0),
        (again, filled, 1),
    ):
        module = imported(list_in_a_loop(nodes, start, "ConcatFromSequence", axis=0))
        for size in (0, 1, 3):
            x = np.arange(size, dtype=np.float32)
            for rounds in (1, 3):
                assert np.array_equal(run(module, np.int64(rounds), x), np.tile(x, rounds + more))
    count = imported(list_in_a_loop([append], empty, "SequenceLength"))
    assert [int(run(count, np.int64(k), np.ones(2, np.float32))) for k in (0, 1, 5)] == [0, 1, 5]


def test_a_list_of_elements_whose_sizes_data_decide() -> None:
    ragged = [
        node("NonZero", ["x"], ["p"]),
        node("Cast", ["p"], ["q"], to=TensorProto.FLOAT),
        node("SequenceInsert", ["list", "q"], ["list2"]),
    ]
    module = imported(list_in_a_loop(ragged, node("SequenceEmpty", [], ["start"]), "ConcatFromSequence", 2, axis=0))
    x = np.float32([1, 0, 3])
    assert run(module, np.int64(2), x).tolist() == [[0, 2], [0, 2]]


def test_a_list_that_a_loop_reads_declares_its_rank() -> None:
    nodes = [node("SequenceLength", ["list"], ["size"]), node("SequenceInsert", ["list", "x"], ["list2"])]
    proto = list_in_a_loop(nodes, node("SequenceEmpty", [], ["start"]), "SequenceLength", None)
    with pytest.raises(ImportModelError, match=r"SequenceInsert(.|\n)*declare the sequence's type where it begins"):
        from_onnx(proto)


def test_loop_invariants_stay_outside() -> None:
    nodes = [node("Add", ["v", "w"], ["v2"])]
    body = loop_body(nodes, [value("v", None), value("w", None)], ["v2", "w"])
    module = imported(counting_loop(body, ["x", "k"], outputs=("y", "z"), inputs=values(x=["n"]), k=np.float32([2])))
    (loop,) = [
        b.value for b in module.functions()["main"].body.bindings() if isinstance(b, Let) and isinstance(b.value, Loop)
    ]
    assert [p.name for p in loop.params] == ["iteration", "v"]
    assert np.array_equal(run(module, np.int64(3), np.float32([1]))[0], [7])


def test_a_loop_ends_when_its_condition_does() -> None:
    nodes = [node("Add", ["v", "one"], ["v2"]), node("Less", ["v2", "limit"], ["c2"])]
    body = graph(
        nodes, [value("i", [], "int64"), value("c", [], "bool"), value("v", None)], [value("c2", None, "bool"), "v2"]
    )
    proto = model(
        [node("Loop", ["", "go", "x"], body=body)],
        [value("go", [], "bool"), value("x", []), value("limit", [])],
        weights={"one": np.float32(1)},
    )
    assert run(proto, np.array(True), np.float32(0), np.float32(4.5)) == 5
    assert run(proto, np.array(False), np.float32(0), np.float32(4.5)) == 0


@pytest.mark.parametrize("backwards", [0, 1])
def test_scan(backwards: int) -> None:
    body = graph(
        [node("Add", ["s", "e"], ["s2"]), node("Identity", ["s2"], ["o"])],
        values(s=None, e=None),
        ["s2", "o"],
    )
    scan = node(
        "Scan", ["s0", "x"], ["y", "z"], body=body, num_scan_inputs=1, scan_input_axes=[1],
        scan_input_directions=[backwards], scan_output_axes=[1],
    )  # fmt: skip
    module = imported(model([scan], values(s0=["n"], x=["n", "t"]), ["y", "z"]))
    assert output_dims(module) == [["n"], ["n", "t"]]
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    y, z = run(module, np.zeros(2, np.float32), x)
    ordered = x[:, ::-1] if backwards else x
    assert np.array_equal(y, x.sum(1)) and np.array_equal(z, ordered.cumsum(1))


# Functions and operators from outside


def test_model_functions_are_inlined_with_their_attributes() -> None:
    inner = helper.make_node("LeakyRelu", ["a"], ["b"])
    inner.attribute.add(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    plain = helper.make_function("mine", "F", ["a"], ["b"], [inner], [helper.make_opsetid("", 17)], ["slope"])
    nodes = [
        node("F", ["x"], ["t"], domain="mine", slope=0.5),
        node("F", ["t"], domain="mine", name="second", slope=0.25),
    ]
    proto = model(nodes, values(x=["n"]), domains=["mine"], functions=[plain])
    module = imported(proto)
    assert np.allclose(run(module, np.float32([-8, 8])), [-1, 8])
    (_, last) = module.functions()["main"].body.bindings()
    assert last.value.loc == "ONNX node #0 (LeakyRelu) in ONNX node 'second' (F)"  # type: ignore[union-attr]


def test_ops_without_a_converter_use_the_body_that_onnx_gives() -> None:
    x = np.float32([[1, 2, 3], [3, 2, 1]])
    target = np.int64([2, 0])
    proto = model(
        [node("SoftmaxCrossEntropyLoss", ["x", "t"])], [value("x", ["n", 3]), value("t", ["n"], "int64")], opset=13
    )
    expected = -np.log(softmax(x, 1)[np.arange(2), target]).mean()
    assert np.allclose(run(proto, x, target), expected, atol=1e-6)


def test_a_converter_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_converters", dict(registry._converters))  # it is gone after the test

    @onnx_op("TwiceForTests", domain="my.tests")
    def twice(n: Node) -> Any:
        return ops.multiply(n.input(0), np.float32(n.float("factor", 2.0)))

    proto = model([node("TwiceForTests", ["x"], domain="my.tests", factor=3.0)], values(x=["n"]), domains=["my.tests"])
    assert np.array_equal(run(proto, np.float32([1, 2])), [3, 6])


@pytest.mark.parametrize("op", ["LayerNormalization", "RMSNormalization"])
@pytest.mark.parametrize("is_known", [False, True])
def test_scales_of_a_norm_may_differ_along_the_dimensions_before(op: str, is_known: bool) -> None:
    """As adaptive norms have them: one scale and bias for each batch."""
    rng = np.random.default_rng(0)
    x, scale, bias = rng.standard_normal((2, 3, 4)), rng.standard_normal((2, 1, 4)), rng.standard_normal((2, 3, 4))
    has_bias = op == "LayerNormalization"
    names = ["scale", "bias"] if has_bias else ["scale"]
    arrays = [a.astype(np.float32) for a in (scale, bias)][: len(names)]
    given = [value("x", ["a", "b", "c"])]
    given += [] if is_known else [value(name, [None] * 3) for name in names]
    weights = dict(zip(names, arrays, strict=True)) if is_known else None
    proto = model([node(op, ["x", *names])], given, weights=weights, opset=23)
    found = run(proto, x.astype(np.float32), *([] if is_known else arrays))
    centered = x - x.mean(-1, keepdims=True) if has_bias else x
    expected = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * scale + (bias if has_bias else 0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_scale_that_would_enlarge_a_norm_is_refused() -> None:
    proto = model(
        [node("LayerNormalization", ["x", "s"])], values(x=[1, 3, 4]), weights={"s": np.ones((2, 3, 4), "f4")}
    )
    with pytest.raises(ImportModelError, match=r"a scale or bias of shape \(2, 3, 4\) cannot be broadcast to x"):
        from_onnx(proto)
