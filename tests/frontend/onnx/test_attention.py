"""Attention and MultiHeadAttention of onnxruntime: masks, biases and sizes that must fit, compiled once."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import relaxlite as rl
from relaxlite.errors import ImportModelError, RelaxliteError
from tests.support.onnx_models import Dims, model, node, onnxruntime_result, value

MICROSOFT = "com.microsoft"
ORDERS = {
    "Attention": ["x", "w", "c", "m", "p", "a"],
    "MultiHeadAttention": ["q", "k", "v", "c", "m", "a", "pk", "pv", "n", "beams"],
}
WEIGHTS = {"w": (12, 96), "c": (96,)}
INTEGERS = ("m", "n", "beams")


def draw(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def attention(
    op: str, shapes: dict[str, Dims], weights: dict[str, Any], outputs: tuple[str, ...] = ("y",), **attrs: Any
) -> onnx.ModelProto:
    operands = [name if name in shapes or name in weights else "" for name in ORDERS[op]]
    made = [node(op, operands, outputs, domain=MICROSOFT, num_heads=2, **attrs)]
    inputs = [value(name, dims, "int32" if name in INTEGERS else "float32") for name, dims in shapes.items()]
    return model(made, inputs, outputs, weights, domains=[MICROSOFT])


def of_self(mask: Dims, weights: tuple[str, ...] = ("w", "c"), **attrs: Any) -> onnx.ModelProto:
    made = {name: draw(*WEIGHTS[name]) for name in weights}
    return attention("Attention", {"x": ["b", "s", 12], "m": mask}, made, **attrs)


def of_keys(mask: Dims, **attrs: Any) -> onnx.ModelProto:
    shapes: dict[str, Dims] = {"q": ["b", "s", 32], "k": ["b", "t", 32], "v": ["b", "t", 32], "m": mask}
    return attention("MultiHeadAttention", shapes, {}, **attrs)


def check(proto: onnx.ModelProto, cases: list[dict[str, Any]]) -> None:
    compiled = rl.compile(rl.from_onnx(proto))
    for given in cases:
        for have, want in zip(compiled.run(given).values(), onnxruntime_result(proto, given), strict=True):
            assert have.shape == want.shape, (have.shape, want.shape)
            np.testing.assert_allclose(have, want, atol=2e-5)


# (batch, length, mask)
LENGTHS = [(1, 4, [3]), (3, 5, [5, 2, 1]), (2, 3, [3, 2])]
RANGES = [(1, 4, [4, 1]), (3, 5, [5, 4, 5, 0, 1, 3]), (2, 3, [3, 2, 1, 0])]
PACKED = [(1, 4, [3, 0, 4, 0, 4]), (2, 3, [3, 1, 0, 3, 6, 0, 3, 6])]
SIZES: dict[str, list[Any]] = {"b": LENGTHS, "2*b": RANGES, "3*b+2": PACKED}


@pytest.mark.parametrize(
    "attrs", [{}, {"unidirectional": 1}, {"mask_filter_value": -1.0, "unidirectional": 1}], ids=str
)
def test_masks_of_one_dimension_say_where_sequences_end_and_start(attrs: dict[str, Any]) -> None:
    """One of 2 * b or 3 * b + 2 numbers was taken for the lengths of more sequences."""
    cases = [(b, s, m) for kind in SIZES.values() for b, s, m in kind]
    check(of_self(["m"], **attrs), [{"x": draw(b, s, 12), "m": np.int32(m)} for b, s, m in cases])


@pytest.mark.parametrize("kind", ["b", "3*b+2"])
def test_masks_of_one_dimension_for_keys(kind: str) -> None:
    cases = [
        {"q": draw(b, 2, 32), "k": draw(b, s, 32), "v": 2 * draw(b, s, 32), "m": np.int32(m)} for b, s, m in SIZES[kind]
    ]
    check(of_keys(["m"]), cases)


@pytest.mark.parametrize(("batch", "mask"), [(1, [4, 1]), (1, [3, 0, 4, 0, 4]), (2, [3, 2]), (2, [3, 2, 0, 1])])
def test_masks_of_one_dimension_of_known_size(batch: int, mask: list[int]) -> None:
    proto = of_self([len(mask)])
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = batch
    check(proto, [{"x": draw(batch, s, 12), "m": np.int32(mask)} for s in (4, 7)])
    if len(mask) == 4:  # of four, or of two with their starts
        x = {"x": draw(4, 5, 12), "m": np.int32(mask)}
        check(of_self([4]), [{"x": draw(2, 5, 12), "m": np.int32(mask)}, x])


def test_a_mask_of_a_size_that_nothing_has_is_an_error() -> None:
    proto = of_self([4])
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 3
    with pytest.raises(
        ImportModelError, match=r"must hold 3 or 6 or 11 numbers for a batch of 3, but has shape \(4,\)"
    ):
        rl.from_onnx(proto)
    compiled = rl.compile(rl.from_onnx(of_self(["m"])))
    with pytest.raises(RelaxliteError, match=r"shape \(4,\): expects mask_size\S* = 11, got 4"):
        compiled.run({"x": draw(3, 5, 12), "m": np.int32([5, 3, 1, 2])})
    compiled = rl.compile(rl.from_onnx(of_keys(["m"])))
    with pytest.raises(RelaxliteError, match=r"expects mask_size\S* = 8, got 4"):  # of keys there are no starts
        compiled.run({"q": draw(2, 5, 32), "k": draw(2, 5, 32), "v": draw(2, 5, 32), "m": np.int32([5, 3, 1, 2])})


def test_masks_of_flags_fit_the_keys() -> None:
    check(of_self(["mb", "mt"]), [{"x": draw(2, 4, 12), "m": np.int32([[1, 1, 0, 1], [1, 0, 0, 0]])}])
    check(of_self(["mb", 1]), [{"x": draw(2, 4, 12), "m": np.zeros((b, 1), np.int32)} for b in (1, 2)])  # no mask
    compiled = rl.compile(rl.from_onnx(of_self(["mb", "mt"])))
    with pytest.raises(RelaxliteError, match=r"shape \(1, 4\): expects b = 2, got 1"):
        compiled.run({"x": draw(2, 4, 12), "m": np.ones((1, 4), np.int32)})
    with pytest.raises(ImportModelError, match="axis 1 of the mask has size 1, but must have 4"):
        rl.from_onnx(
            attention("MultiHeadAttention", {"q": [2, 4, 32], "k": [2, 4, 32], "v": [2, 4, 32], "m": [2, 1]}, {})
        )


def test_biases_of_scores_fit_the_queries_and_keys() -> None:
    shapes: dict[str, Dims] = {"q": [2, 5, 32], "k": [2, 7, 32], "v": [2, 7, 32], "a": [1, 1, 1, 7]}
    with pytest.raises(ImportModelError, match="axis 2 of the bias of the scores has size 1, but must have 5"):
        rl.from_onnx(attention("MultiHeadAttention", shapes, {}))
    dims: dict[str, Dims] = {"q": ["b", "s", 32], "k": ["b", "t", 32], "v": ["b", "t", 32], "a": ["c", "d", "e", "f"]}
    cases = [{"q": draw(b, s, 32), "k": draw(b, t, 32), "v": draw(b, t, 32), "a": draw(c, d, s, t)}
             for b, s, t, c, d in ((2, 3, 5, 1, 2), (1, 4, 4, 1, 1), (3, 1, 6, 3, 1))]  # fmt: skip
    check(attention("MultiHeadAttention", dims, {}), cases)


@pytest.mark.parametrize("bias", [True, False])
def test_keys_and_values_of_the_past_have_their_biases(bias: bool) -> None:
    """Cross attention whose keys and values, of rank 4, come from a cache: a bias was refused."""
    shapes: dict[str, Dims] = {"q": ["b", "s", 32], "k": ["b", 2, "t", 16], "v": ["b", 2, "t", 16], "m": ["b", "t"]}
    proto = attention("MultiHeadAttention", shapes, {"c": draw(96)} if bias else {}, ("y", "nk", "nv"))
    cases = [{"q": draw(b, s, 32), "k": draw(b, 2, t, 16), "v": draw(b, 2, t, 16) * 2, "m": np.ones((b, t), np.int32)}
             for b, s, t in ((2, 5, 7), (1, 1, 4), (3, 4, 4))]  # fmt: skip
    for case in cases:
        case["m"][:, -1] = 0
    compiled, short = rl.compile(rl.from_onnx(proto)), attention("MultiHeadAttention", shapes, proto_weights(proto))
    for given in cases:
        y, k, v = compiled.run(given).values()
        np.testing.assert_allclose(y, onnxruntime_result(short, given)[0], atol=2e-5)
        assert np.array_equal(k, given["k"]) and np.array_equal(v, given["v"])


def proto_weights(proto: onnx.ModelProto) -> dict[str, Any]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}


REFUSED: dict[str, tuple[dict[str, Dims], dict[str, Any], str]] = {
    "bias of another size": ({"c": [32]}, {}, "axis 0 of input 3 has size 32, but must have 96"),
    "rank 4 and a past": (
        {"k": ["b", 2, "t", 16], "v": ["b", 2, "t", 16], "pk": ["b", 2, "p", 16], "pv": ["b", 2, "p", 16]}, {},
        "either a key and value of rank 4 or a past",
    ),
    "past key alone": ({"pk": ["b", 2, "p", 16]}, {}, "must be given together"),
    "beams": ({"beams": ["b", 1, 9]}, {}, "a shared cache or beams"),
    "another batch": ({"q": [1, "s", 32], "k": [2, "t", 32]}, {}, "axis 0 of input 1 has size 2, but must have 1"),
    "fewer values": ({"k": ["b", 5, 32], "v": ["b", 4, 32]}, {}, "axis 1 of input 2 has size 4, but must have 5"),
    "causal, more keys": (
        {"q": ["b", 3, 32], "k": ["b", 5, 32]}, {"unidirectional": 1}, "axis 1 of input 1 has size 5, but must have 3"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(REFUSED))
def test_what_does_not_fit_says_so(kind: str) -> None:
    shapes, attrs, message = REFUSED[kind]
    given: dict[str, Dims] = {"q": ["b", "s", 32], "k": ["b", "t", 32], "v": ["b", "t", 32], **shapes}
    with pytest.raises(ImportModelError, match=message):
        rl.from_onnx(attention("MultiHeadAttention", given, {}, **attrs))


def test_sizes_of_attention_fit_its_weights() -> None:
    with pytest.raises(ImportModelError, match="axis 0 of input 2 has size 1, but must have 96"):
        rl.from_onnx(attention("Attention", {"x": ["b", "s", 12]}, {"w": draw(12, 96), "c": draw(1)}))
    with pytest.raises(ImportModelError, match="32, 32, 16, must add up to those of the weights, 96"):
        rl.from_onnx(attention("Attention", {"x": ["b", "s", 12]}, {"w": draw(12, 96)}, qkv_hidden_sizes=[32, 32, 16]))
    with pytest.raises(ImportModelError, match="axis 0 of the past has size 1, but must have 2"):
        rl.from_onnx(attention("Attention", {"x": ["b", "s", 12], "p": [1, "b", 2, "t", 16]}, {"w": draw(12, 96)}))


@pytest.mark.parametrize("ids", [[3], [1, 3], [2, 1]])
def test_positions_of_a_rotary_embedding_are_one_or_all(ids: list[int]) -> None:
    """Three positions of one dimension were added to 0, 1, 2; onnxruntime takes one, of the first row, or all."""
    weights = {"cos": draw(20, 8), "sin": draw(20, 8)}
    nodes = [node("RotaryEmbedding", ["x", "i", "cos", "sin"], domain=MICROSOFT)]
    inputs = [value("x", [2, 3, 32]), value("i", ids, "int64")]
    with pytest.raises(ImportModelError, match=r"axis \d of input 1 has size \d, but must have"):
        rl.from_onnx(model(nodes, inputs, weights=weights, domains=[MICROSOFT]))


@pytest.mark.parametrize(("cos", "sin", "attrs"), [(8, 4, {}), (4, 4, {"rotary_embedding_dim": 16, "num_heads": 2})])
def test_tables_of_a_rotary_embedding_are_of_the_width_that_is_turned(
    cos: int, sin: int, attrs: dict[str, Any]
) -> None:
    nodes = [node("RotaryEmbedding", ["x", "i", "cos", "sin"], domain=MICROSOFT, **attrs)]
    inputs = [value("x", ["b", "s", 32]), value("i", ["b", "s"], "int64")]
    with pytest.raises(ImportModelError, match=r"axis 1 of input \d has size 4, but must have 8"):
        rl.from_onnx(model(nodes, inputs, weights={"cos": draw(20, cos), "sin": draw(20, sin)}, domains=[MICROSOFT]))
