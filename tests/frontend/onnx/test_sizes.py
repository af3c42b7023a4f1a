"""Sizes that exporters compute in integers and floats, and tensors whose sizes nobody can compare before a run."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import relaxlite
from relaxlite.errors import RelaxliteError
from relaxlite.ir.module import IRModule
from relaxlite.ir.simplify import num_atoms
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import bodies
from tests.support.onnx_models import imported, model, node, onnxruntime_result, output_dims, value, values

STEM = np.random.default_rng(0).standard_normal((3, 2, 7, 7)).astype(np.float32)


def _behind_a_stem(target: list[onnx.NodeProto], **weights: np.ndarray) -> onnx.ModelProto:
    """relu(conv + reshape(conv, target)), of a convolution with stride 4; `target` is made of `picture`, (h, w)."""
    nodes = [
        node("Conv", ["x", "stem"], ["conv"], strides=[4, 4], pads=[3, 3, 3, 3]),
        node("Shape", ["x"], ["shape"]),
        node("Slice", ["shape", "two", "four"], ["picture"]),
        *target,
        node("Reshape", ["conv", "target"], ["again"]),
        node("Add", ["conv", "again"], ["sum"]),
        node("Relu", ["sum"]),
    ]
    known = {"stem": STEM, "one": np.int64([1]), "two": np.int64([2]), "four": np.int64([4])}
    return model(nodes, values(x=["n", 2, "h", "w"]), weights=known | weights)


def _agrees(compiled: relaxlite.Executable, proto: onnx.ModelProto, x: np.ndarray) -> None:
    (expected,) = onnxruntime_result(proto, {"x": x})
    found = compiled(x)
    assert found.shape == expected.shape
    assert np.allclose(found, expected, atol=1e-4)


def test_a_reshape_to_rounded_quotients_has_the_sizes_of_the_convolution() -> None:
    """PyTorch's exporter writes a convolution's size as 1 + (h - 1) / 4, and ONNX divides towards zero."""
    target = [
        node("Sub", ["picture", "one"], ["less"]),
        node("Div", ["less", "four"], ["quotient"]),
        node("Add", ["quotient", "one"], ["size"]),
        node("Concat", ["start", "size"], ["target"], axis=0),
    ]
    proto = _behind_a_stem(target, start=np.int64([-1, 3]))
    module = imported(proto)
    assert output_dims(module) == [["n", "3", "((h + 3) // 4)", "((w + 3) // 4)"]]
    compiled = relaxlite.compile(module)
    for n, h, w in ((1, 1, 1), (2, 5, 9), (1, 16, 3), (0, 8, 8), (1, 37, 64)):
        _agrees(compiled, proto, np.random.default_rng(h).standard_normal((n, 2, h, w)).astype(np.float32))
    with pytest.raises(RelaxliteError, match=r"1 .*0|0 .*1"):  # 1 + (0 - 1) / 4 is 1, but the convolution has no row
        compiled(np.zeros((1, 2, 0, 5), np.float32))


def test_a_quotient_rounded_up_in_floats_and_reshaped_is_followed() -> None:
    """Patches of an unfold: ceil(float(h) / 4), made a vector by a Reshape to (-1) before the Concat."""
    target = [
        node("Cast", ["picture"], ["floats"], to=1),
        node("Div", ["floats", "stride"], ["quarters"]),
        node("Ceil", ["quarters"], ["up"]),
        node("Cast", ["up"], ["patches"], to=7),
        node("Gather", ["patches", "zero"], ["rows"]),
        node("Gather", ["patches", "first"], ["columns"]),
        node("Reshape", ["rows", "open"], ["row_vector"]),
        node("Reshape", ["columns", "open"], ["column_vector"]),
        node("Concat", ["start", "row_vector", "column_vector"], ["target"], axis=0),
    ]
    weights = {"stride": np.float32(4), "zero": np.int64(0), "first": np.int64(1), "open": np.int64([-1])}
    proto = _behind_a_stem(target, start=np.int64([-1, 3]), **weights)
    module = imported(proto)
    assert output_dims(module) == [["n", "3", "((h + 3) // 4)", "((w + 3) // 4)"]]
    compiled = relaxlite.compile(module)
    for n, h, w in ((1, 1, 1), (2, 5, 9), (1, 37, 64)):
        _agrees(compiled, proto, np.random.default_rng(h).standard_normal((n, 2, h, w)).astype(np.float32))


def _heaviest(module: IRModule) -> int:
    found = [b.var.ty for f in module.functions().values() for body in bodies(f) for b in body.bindings()]
    return max(num_atoms(d) for ty in found if isinstance(ty, TensorType) for d in ty.shape or ())


def test_sums_of_tensors_of_unknown_sizes_do_not_grow_without_end() -> None:
    """Each sum of sizes that cannot be compared mentions both several times: a chain of 40 took for ever."""
    nodes = [node("Reshape", ["x", "shape"], ["sum0"])]
    for k in range(40):
        nodes += [
            node("Reshape", ["x" if k % 2 else f"sum{k}", "shape"], [f"again{k}"]),
            node("Add", [f"sum{k}", f"again{k}"], [f"twice{k}"]),
            node("Add", ["x", f"twice{k}"], [f"more{k}"]),
            node("Mul", [f"more{k}", "quarter"], [f"sum{k + 1}"]),
        ]
    nodes.append(node("Relu", ["sum40"]))
    inputs = [value("x", ["n"]), value("shape", [1], "int64")]
    module = imported(model(nodes, inputs, weights={"quarter": np.float32(0.25)}))
    assert _heaviest(module) < 100
    compiled = relaxlite.compile(module)
    for n in (1, 2, 7, 100):
        x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
        expected = x
        for k in range(40):
            expected = np.float32(0.25) * (x + (expected + (x if k % 2 else expected)))
        assert np.allclose(compiled(x, np.int64([n])), np.maximum(expected, 0), atol=1e-5)
    assert compiled(np.zeros(0, np.float32), np.int64([0])).shape == (0,)
    with pytest.raises(RelaxliteError, match="7"):
        compiled(np.zeros(6, np.float32), np.int64([7]))


def test_a_chain_of_unknown_sizes_inside_a_branch() -> None:
    """Names of long sizes are known in their branch only."""
    chain = [node("Add", ["x", "b"], ["sum0"])]
    for k in range(12):
        chain.append(node("Mul" if k % 2 else "Sub", [f"sum{k}", "b" if k % 3 else "x"], [f"sum{k + 1}"]))
    then = onnx.helper.make_graph(chain, "then", [], [value("sum12", ["r"])])
    other = onnx.helper.make_graph([node("Add", ["x", "b"], ["plain"])], "else", [], [value("plain", ["r"])])
    nodes = [
        node("If", ["cond"], ["branch"], then_branch=then, else_branch=other),
        *chain,
        node("Add", ["branch", "sum12"]),
    ]
    inputs = [*values(x=["n"], b=["m"]), value("cond", [], "bool")]
    proto = model(nodes, inputs)
    module = imported(proto)
    compiled = relaxlite.compile(module)
    for n, m in ((3, 3), (1, 5), (4, 1), (0, 1), (0, 0)):
        x, b = (np.random.default_rng(c).standard_normal(c).astype(np.float32) for c in (n, m))
        for cond in (np.bool_(True), np.bool_(False)):
            assert np.allclose(compiled(x, b, cond), _chained(x, b) + (_chained(x, b) if cond else x + b), atol=1e-4)


def _chained(x: np.ndarray, b: np.ndarray) -> np.ndarray:
    result = x + b
    for k in range(12):
        other = b if k % 3 else x
        result = result * other if k % 2 else result - other
    return result


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        pytest.param([node("Sub", ["b", "a"], ["size"])], [(-2, 1), (-3, -1), (1, 4), (4, 4)], id="difference"),
        pytest.param([node("Mul", ["a", "b"], ["size"])], [(-2, -3), (2, 3), (-1, 0)], id="product"),
        pytest.param([node("Max", ["a", "b"], ["size"])], [(-2, 3), (2, -3)], id="maximum"),
        pytest.param([node("Neg", ["a"], ["size"])], [(-2, 0), (0, 0)], id="negative"),
        pytest.param(
            [node("Concat", ["a", "b"], ["both"], axis=0), node("Gather", ["both", "one"], ["size"])],
            [(-2, 3), (2, 3)],
            id="element",
        ),
    ],
)
def test_what_a_size_is_computed_of_may_be_negative(size: list[onnx.NodeProto], cases: list[tuple[int, int]]) -> None:
    """zeros(b - a) with a = -2: "a = -2 is below its lower bound 0"."""
    inputs = [value("a", [1], "int64"), value("b", [1], "int64")]
    proto = model([*size, node("ConstantOfShape", ["size"])], inputs, weights={"one": np.int64([1])})
    compiled = relaxlite.compile(imported(proto))
    for a, b in cases:
        (expected,) = onnxruntime_result(proto, {"a": np.int64([a]), "b": np.int64([b])})
        assert compiled(np.int64([a]), np.int64([b])).shape == expected.shape


def test_a_size_is_not_negative() -> None:
    inputs = [value("a", [1], "int64"), value("b", [1], "int64")]
    nodes = [node("Sub", ["b", "a"], ["size"]), node("ConstantOfShape", ["size"])]
    compiled = relaxlite.compile(imported(model(nodes, inputs)))
    with pytest.raises(RelaxliteError, match="= -3 is below its lower bound 0"):
        compiled(np.int64([4]), np.int64([1]))


@pytest.mark.parametrize("dtype", ["int64", "int32", "float32"])
def test_a_range_away_from_its_limit_is_empty(dtype: str) -> None:
    proto = model([node("Range", ["a", "b", "c"])], [value(name, [], dtype) for name in "abc"])
    compiled = relaxlite.compile(imported(proto))
    for given in ((0, 5, 2), (0, -3, 1), (5, 0, -1), (5, 9, -1), (-4, -1, 1)):
        assert compiled(*np.array(given, dtype)).tolist() == list(range(*given))


def test_elements_of_a_size_that_are_known_are_not_read() -> None:
    """One of two comes out of data: the other keeps its symbol."""
    nodes = [
        node("Shape", ["x"], ["batch"], end=1),
        node("Concat", ["batch", "n"], ["both"], axis=0),
        node("Mul", ["both", "two"], ["twice"]),
        node("Gather", ["both", "zero"], ["first"]),
        node("ConstantOfShape", ["twice"], ["y"]),
        node("ConstantOfShape", ["first"], ["z"]),
    ]
    inputs = [value("x", ["b", "t"]), value("n", [1], "int64")]
    module = imported(model(nodes, inputs, ["y", "z"], weights={"two": np.int64([2]), "zero": np.int64([0])}))
    assert output_dims(module) == [["b*2", "twice_1"], ["b"]]


@pytest.mark.parametrize(
    ("length", "cases"),
    [
        pytest.param([node("Gather", ["lengths", "zero"], ["n"])], [[3], [2, -7], [4, 1, 1]], id="element"),
        pytest.param([node("ReduceSum", ["lengths", "zero"], ["n"], keepdims=1)], [[], [3], [2, 2]], id="sum"),
        pytest.param([node("ReduceProd", ["lengths"], ["n"], keepdims=1, axes=[0])], [[], [3], [2, 2]], id="product"),
    ],
)
@pytest.mark.parametrize("use", ["Slice", "ConstantOfShape"])
def test_a_size_from_a_vector_of_unknown_length(use: str, length: list[onnx.NodeProto], cases: list[list[int]]) -> None:
    """x[:lengths[0]]: "an input that stands for a shape has n elements"."""
    last = node("Slice", ["x", "zero", "n"]) if use == "Slice" else node("ConstantOfShape", ["n"])
    proto = model(
        [*length, last], [value("x", ["t"]), value("lengths", ["k"], "int64")], weights={"zero": np.int64([0])}
    )
    compiled = relaxlite.compile(imported(proto))
    x = np.arange(5, dtype=np.float32)
    for lengths in cases:
        (expected,) = onnxruntime_result(proto, {"x": x, "lengths": np.int64(lengths)})
        assert np.array_equal(compiled(x, np.int64(lengths)), expected)


def test_a_shape_of_unknown_rank_is_refused() -> None:
    proto = model([node("ConstantOfShape", ["shape"])], [value("shape", ["rank"], "int64")])
    with pytest.raises(RelaxliteError, match=r"is \(rank,\) int64: its number of elements must be known"):
        imported(proto)
    empty = model([node("ConstantOfShape", ["shape"])], [value("shape", [0], "int64")])
    assert relaxlite.compile(imported(empty))(np.int64([])).shape == ()


_KEPT_SIZES = ((5, 7, 3, 20), (4, 4, 7, 9), (5, 7, 8, 9), (6, 9, 4, 100), (5, 5, 3, 3), (3, 8, 2, 9), (7, 3, 13, 1))


@pytest.mark.each_value
@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("policy", ["not_larger", "not_smaller"])
def test_a_kept_aspect_ratio_is_one_scale_for_all_axes(policy: str, mode: str, is_given: bool) -> None:
    """Coordinates follow size / dim of the axis that decides, not the rounded sizes: these have another ratio each."""
    keep = {"keep_aspect_ratio_policy": policy, "axes": [2, 3], "antialias": int(mode == "linear")}
    resize = node("Resize", ["x", "", "", "sizes"], mode=mode, **keep)
    graph = values(x=["n", 2, "h", "w"]) + ([value("sizes", [2], "int64")] if is_given else [])

    def made(sizes: tuple[int, int]) -> onnx.ModelProto:
        return model([resize], graph, weights={} if is_given else {"sizes": np.int64(sizes)}, opset=18)

    if is_given:
        compiled = relaxlite.compile(imported(made((1, 1))))
    for h, w, *sizes in _KEPT_SIZES:
        if keep["antialias"] and policy == "not_smaller" and (h, w) == (3, 8):
            continue  # 3 * 9 / 8 is rounded to 3, and onnxruntime copies such an axis, against ONNX's reference
        proto = made((sizes[0], sizes[1]))
        inputs = {"x": np.random.default_rng(h).standard_normal((2, 2, h, w)).astype(np.float32)}
        inputs |= {"sizes": np.int64(sizes)} if is_given else {}
        exe = compiled if is_given else relaxlite.compile(imported(proto))
        (expected,) = onnxruntime_result(proto, inputs)
        found = exe(*inputs.values())
        assert found.shape == expected.shape
        assert np.allclose(found, expected, atol=1e-4), (h, w, sizes)


def test_a_kept_aspect_ratio_between_convolutions_has_its_channels_last() -> None:
    one = np.random.default_rng(1).standard_normal((4, 2, 3, 3)).astype(np.float32)
    two = np.random.default_rng(2).standard_normal((2, 4, 3, 3)).astype(np.float32)
    keep = {"keep_aspect_ratio_policy": "not_larger", "axes": [2, 3], "mode": "linear"}
    nodes = [
        node("Conv", ["x", "one"], ["before"], pads=[1, 1, 1, 1]),
        node("Resize", ["before", "", "", "sizes"], ["resized"], **keep),
        node("Conv", ["resized", "two"], pads=[1, 1, 1, 1]),
    ]
    graph = [*values(x=["n", 2, "h", "w"]), value("sizes", [2], "int64")]
    proto = model(nodes, graph, weights={"one": one, "two": two}, opset=18)
    compiled = relaxlite.compile(imported(proto))
    for h, w, *sizes in _KEPT_SIZES:
        inputs = {"x": np.random.default_rng(h).standard_normal((2, 2, h, w)).astype(np.float32)}
        inputs["sizes"] = np.int64(sizes)
        assert np.allclose(compiled(*inputs.values()), onnxruntime_result(proto, inputs)[0], atol=1e-3)


@pytest.mark.parametrize("op", ["MatMulInteger", "QLinearMatMul"])
def test_a_zero_point_whose_size_is_a_symbol_is_of_one_element_or_of_one_for_each_line(op: str) -> None:
    data = [value("a", ["m", "k"], "uint8"), value("b", ["k", "n"], "uint8")]
    zeros = [value("p", ["p_0"], "uint8"), value("q", ["q_0"], "uint8")]
    if op == "MatMulInteger":
        proto = model([node(op, ["a", "b", "p", "q"])], [*data, *zeros], [value("y", None, "int32")])
    else:
        scales = values(s=["s_0"], t=["t_0"], u=[1])
        names = ["a", "s", "p", "b", "t", "q", "u", "v"]
        given = [*data, *zeros, *scales, value("v", ["v_0"], "uint8")]
        proto = model([node(op, names)], given, [value("y", None, "uint8")])
    compiled, rng = relaxlite.compile(imported(proto)), np.random.default_rng(0)

    def inputs(m: int, k: int, n: int, p: int, q: int) -> dict[str, np.ndarray]:
        sizes = {"a": (m, k), "b": (k, n), "p": (p,), "q": (q,)}
        made = {name: rng.integers(0, 9, shape).astype(np.uint8) for name, shape in sizes.items()}
        if op == "MatMulInteger":
            return made
        ranges = {name: rng.uniform(0.5, 2, size).astype(np.float32) for name, size in (("s", p), ("t", q), ("u", 1))}
        return {**made, **ranges, "v": np.uint8([100])}

    for sizes in ((2, 4, 3, 1, 1), (4, 3, 2, 1, 2), (1, 5, 1, 1, 1), (3, 7, 17, 1, 17)):
        feeds = inputs(*sizes)
        (expected,) = onnxruntime_result(proto, feeds)
        assert np.array_equal(compiled.run(feeds)["y"], expected)
    feeds = inputs(3, 4, 2, 3, 2)
    if op == "MatMulInteger":  # onnxruntime has no zero points per row of a
        a, b, p, q = (x.astype(np.int32) for x in feeds.values())
        assert np.array_equal(compiled.run(feeds)["y"], (a - p[:, None]) @ (b - q))
    with pytest.raises(RelaxliteError, match="a zero point per row of a, or per column of b: n against q_0, which is"):
        compiled.run(inputs(2, 4, 3, 1, 2))
    with pytest.raises(RelaxliteError, match="a zero point per row of a, or per column of b: m against p_0, which is"):
        compiled.run(inputs(1, 4, 3, 2, 1))
