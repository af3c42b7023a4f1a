"""GroupQueryAttention whose sequences differ in length, against onnxruntime: compiled once, run at many sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import relaxlite as rl
from relaxlite.errors import ImportModelError, RelaxliteError
from tests.support.onnx_models import model, node, onnxruntime_result, value

MICROSOFT = "com.microsoft"
HEADS, GROUPS, WIDTH = 4, 2, 16
ANGLES = np.arange(40)[:, None] / 3.0 ** np.arange(8)
TABLES = {"cos": np.cos(ANGLES).astype(np.float32), "sin": np.sin(ANGLES).astype(np.float32)}
OPERANDS = [
    "q",
    "k",
    "v",
    "pk",
    "pv",
    "lengths",
    "total",
    "cos",
    "sin",
    "ids",
    "bias",
    "sink",
    "",
    "",
    "qn",
    "kn",
    "valid",
]
SHAPES: dict[str, tuple[list[int | str], str]] = {
    "q": (["b", "s", HEADS * WIDTH], "float32"),
    "k": (["b", "s", GROUPS * WIDTH], "float32"),
    "v": (["b", "s", GROUPS * WIDTH], "float32"),
    "pk": (["b", GROUPS, "p", WIDTH], "float32"),
    "pv": (["b", GROUPS, "p", WIDTH], "float32"),
    "lengths": (["b"], "int32"),
    "total": ([], "int32"),
    "ids": (["b", "s"], "int64"),
    "bias": (["c", "d", "s", "t"], "float32"),
    "sink": ([HEADS], "float32"),
    "qn": ([WIDTH], "float32"),
    "kn": ([WIDTH], "float32"),
    "valid": (["b"], "int32"),
}
PLAIN = ("q", "k", "v", "pk", "pv", "lengths", "total")


def grouped(names: tuple[str, ...] = PLAIN, shapes: dict[str, Any] | None = None, **attrs: Any) -> onnx.ModelProto:
    """The op alone, of these operands (cos and sin where it turns), with symbolic sizes."""
    given = {name: (shapes or {}).get(name, SHAPES[name][0]) for name in names}
    present = {*names, *(TABLES if attrs.get("do_rotary") else ())}
    operands = [name if name in present else "" for name in OPERANDS]
    made = [node("GroupQueryAttention", operands, ("y", "nk", "nv"), domain=MICROSOFT, num_heads=HEADS,
                 kv_num_heads=GROUPS, **attrs)]  # fmt: skip
    inputs = [value(name, dims, SHAPES[name][1]) for name, dims in given.items()]
    weights = TABLES if attrs.get("do_rotary") else {}
    return model(made, inputs, ("y", "nk", "nv"), weights, domains=[MICROSOFT])


def feeds(b: int, s: int, p: int, lengths: list[int], total: int, **more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(b + s + p)
    made = {name: rng.standard_normal((b, s, width * WIDTH)) for name, width in (("q", 4), ("k", 2), ("v", 2))}
    made |= {name: rng.standard_normal((b, GROUPS, p, WIDTH)) for name in ("pk", "pv")}
    made = {name: x.astype(np.float32) for name, x in made.items()}
    return {**made, "lengths": np.int32(lengths) - 1, "total": np.array(total, np.int32), **more}


def check(proto: onnx.ModelProto, cases: list[dict[str, Any]]) -> None:
    """The model compiled once gives what onnxruntime gives, but for padding of a prompt, which is not specified."""
    compiled = rl.compile(rl.from_onnx(proto))
    for case in cases:
        given = {x.name: case[x.name] for x in proto.graph.input}
        found, wanted = list(compiled.run(given).values()), onnxruntime_result(proto, given)
        for have, want in zip(found, wanted, strict=True):
            assert have.shape == want.shape, (have.shape, want.shape)
        for y, want, last in zip(found[0], wanted[0], case["lengths"], strict=True):
            np.testing.assert_allclose(y[: last + 1], want[: last + 1], atol=1e-5)
        for have, want in zip(found[1:], wanted[1:], strict=True):
            np.testing.assert_allclose(have, want, atol=1e-5)


CASES = {
    "prompt": (1, 7, 0, [7], 7),
    "token": (1, 1, 5, [6], 6),
    "tokens of equal length": (3, 1, 5, [6, 6, 6], 6),
    "ragged": (2, 1, 5, [6, 3], 6),
    "ragged down to the first": (3, 1, 4, [1, 5, 2], 5),
    "padded prompt": (2, 4, 0, [4, 2], 4),
    "padded prompt into a buffer": (2, 4, 6, [4, 2], 4),
    "static cache": (1, 1, 10, [6], 6),
    "ragged static cache": (3, 1, 10, [6, 10, 1], 10),
    "full static cache": (1, 1, 10, [10], 10),
    "chunk": (1, 3, 5, [8], 8),
    "chunk in a static cache": (1, 3, 12, [8], 8),
    "first token": (1, 1, 0, [1], 1),
}
ATTRS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary": {"do_rotary": 1},
    "interleaved": {"do_rotary": 1, "rotary_interleaved": 1},
    "window": {"local_window_size": 3},
    "softcap and smooth": {"softcap": 0.7, "smooth_softmax": 1, "scale": 0.3},
    "not causal": {"causal": 0},
}


@pytest.mark.each_value
@pytest.mark.parametrize("kind", list(ATTRS))
def test_new_keys_go_where_each_sequence_ends(kind: str) -> None:
    """seqlens_k was ignored: new keys went behind the whole past, and a static cache grew."""
    check(grouped(**ATTRS[kind]), [feeds(*sizes) for sizes in CASES.values()])


def test_queries_keys_and_values_in_one_tensor() -> None:
    shapes = {"q": ["b", "s", (HEADS + 2 * GROUPS) * WIDTH]}
    cases = []
    for sizes in CASES.values():
        case = feeds(*sizes)
        cases.append({**case, "q": np.concatenate([case["q"], case["k"], case["v"]], axis=2)})
    check(grouped(("q", *PLAIN[3:]), shapes, do_rotary=1), cases)


def test_half_precision() -> None:
    proto = grouped(local_window_size=4)
    for info in [*proto.graph.input, *proto.graph.output]:
        if info.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            info.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    compiled = rl.compile(rl.from_onnx(proto))
    for kind in ("ragged", "static cache", "chunk", "prompt"):
        case = feeds(*CASES[kind])
        given = {name: x.astype(np.float16) if x.dtype == np.float32 else x for name, x in case.items()}
        for have, want in zip(compiled.run(given).values(), onnxruntime_result(proto, given), strict=True):
            assert have.dtype == np.float16 and have.shape == want.shape
            np.testing.assert_allclose(np.float32(have), np.float32(want), atol=3e-3)


@pytest.mark.parametrize("attrs", [{}, {"do_rotary": 1}, {"local_window_size": 2, "causal": 1}], ids=str)
def test_prompts_without_a_past(attrs: dict[str, Any]) -> None:
    proto = grouped(("q", "k", "v", "lengths", "total"), **attrs)
    check(proto, [feeds(b, s, 0, [s, *range(1, b)], s) for b, s in ((1, 1), (1, 6), (4, 5))])


def test_the_total_length_without_a_past_is_that_of_the_query() -> None:
    compiled = rl.compile(rl.from_onnx(grouped(("q", "k", "v", "lengths", "total"))))
    case = feeds(1, 2, 0, [3], 3)
    with pytest.raises(RelaxliteError, match="3"):
        compiled.run({name: case[name] for name in ("q", "k", "v", "lengths", "total")})


@pytest.mark.parametrize("length", [0, 12])
def test_lengths_that_do_not_fit_are_an_error(length: int) -> None:
    compiled = rl.compile(rl.from_onnx(grouped()))
    with pytest.raises(RelaxliteError, match="the new rows of a sequence, from where it begins on, do not fit"):
        compiled.run(feeds(2, 1, 10, [length, 3], 10))


def test_positions_that_are_given() -> None:
    """Of a prompt, onnxruntime reads the first one only."""
    cases: list[tuple[Any, ...]] = [
        (2, 3, 0, [3, 2], 3, [[4, 1, 2], [5, 9, 2]]), (1, 3, 4, [7], 7, [[2, 5, 9]]),
        (2, 1, 4, [5, 2], 5, [[7], [1]]), (2, 3, 9, [3, 3], 3, [[4, 1, 2], [5, 9, 2]]),
    ]  # fmt: skip
    made = [feeds(*sizes, ids=np.int64(ids)) for *sizes, ids in cases]
    check(grouped((*PLAIN, "ids"), do_rotary=1), made)


@pytest.mark.parametrize("attrs", [{}, {"softcap": 0.5, "local_window_size": 2}], ids=str)
def test_biases_of_the_scores_are_as_long_as_the_sequences(attrs: dict[str, Any]) -> None:
    rng = np.random.default_rng(3)
    made = []
    for c, d, kind in ((1, 1, "ragged"), (2, 4, "padded prompt"), (1, 4, "static cache"), (1, 1, "chunk")):
        b, s, p, lengths, total = CASES[kind]
        bias = rng.standard_normal((c, d, s, total)).astype(np.float32)
        made.append(feeds(b, s, p, lengths, total, bias=bias))
    check(grouped((*PLAIN, "bias"), **attrs), made)


def test_sinks() -> None:
    sink = np.float32([0.5, -1, 3, 2])
    check(grouped((*PLAIN, "sink")), [feeds(*CASES[c], sink=sink) for c in ("ragged", "static cache", "padded prompt")])


@pytest.mark.parametrize("attrs", [{}, {"do_rotary": 1}], ids=str)
def test_numbers_of_valid_rows(attrs: dict[str, Any]) -> None:
    """Only what belongs to a valid row is specified."""
    proto = grouped((*PLAIN, "valid"), **attrs)
    compiled = rl.compile(rl.from_onnx(proto))
    for b, s, p, lengths, total, valid in (
        (2, 3, 8, [7, 2], 8, [3, 2]), (2, 3, 4, [7, 2], 7, [3, 1]), (3, 4, 37, [33, 9, 2], 37, [0, 4, 2]),
        (2, 1, 5, [5, 3], 5, [1, 0]),
    ):  # fmt: skip
        given = feeds(b, s, p, lengths, total, valid=np.int32(valid))
        (y, *caches), (wanted, *kept) = list(compiled.run(given).values()), onnxruntime_result(proto, given)
        for i, (length, rows) in enumerate(zip(lengths, valid, strict=True)):
            np.testing.assert_allclose(y[i, :rows], wanted[i, :rows], atol=1e-5)
            for have, want in zip(caches, kept, strict=True):
                assert have.shape == want.shape
                np.testing.assert_allclose(have[i, :, :length], want[i, :, :length], atol=1e-5)


def test_keys_of_another_layer_s_cache() -> None:
    """Without new keys: those of these rows stand in the cache already."""
    shapes = {"k": ["b", 0, GROUPS * WIDTH], "v": ["b", 0, GROUPS * WIDTH]}
    none = np.zeros((1, 0, GROUPS * WIDTH), np.float32)
    cases = [feeds(*sizes, k=none, v=none) for sizes in ((1, 1, 7, [7], 7), (1, 3, 7, [7], 7), (1, 2, 9, [6], 6))]
    check(grouped(PLAIN, shapes, do_rotary=1), cases)


def test_norms_of_heads_are_those_that_stand_before_it() -> None:
    """onnxruntime has these on GPUs only."""
    weights = {name: np.random.default_rng(5).standard_normal(WIDTH).astype(np.float32) for name in ("qn", "kn")}
    normed = rl.compile(rl.from_onnx(grouped((*PLAIN, "qn", "kn"), do_rotary=1, k_norm_epsilon=0.1)))
    plain = grouped(do_rotary=1)
    for sizes in (CASES["ragged"], CASES["chunk"]):
        given = feeds(*sizes)
        before = dict(given)
        for name, weight, epsilon in (("q", "qn", 1e-6), ("k", "kn", 0.1)):
            x = given[name].reshape(*given[name].shape[:2], -1, WIDTH)
            factor = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)
            before[name] = (x * factor * weights[weight]).reshape(given[name].shape).astype(np.float32)
        for have, want in zip(
            normed.run({**given, **weights}).values(), onnxruntime_result(plain, before), strict=True
        ):
            np.testing.assert_allclose(have, want, atol=1e-5)


def test_attributes_that_say_what_is_the_case_anyway() -> None:
    attrs = {"causal": 1, "k_quant_type": "NONE", "v_quant_type": "NONE", "qk_output": 0, "sliding_window_cache": 0}
    check(grouped(**attrs), [feeds(*CASES["ragged"])])


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        ({"sliding_window_cache": 1, "local_window_size": 4}, "a cache of one window"),
        ({"k_quant_type": "PER_TENSOR"}, "a quantized cache"),
        ({"qk_output": 1}, "that gives its scores"),
        ({"causal": 0, "local_window_size": 4}, "no local window"),
    ],
)
def test_what_is_not_supported_says_so(attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(ImportModelError, match=message):
        rl.from_onnx(grouped(**attrs))


@pytest.mark.parametrize("missing", ["k", "pv"])
def test_pairs_of_operands_come_together(missing: str) -> None:
    with pytest.raises(ImportModelError, match="must be given together"):
        rl.from_onnx(grouped(tuple(name for name in PLAIN if name != missing)))


def test_sizes_that_are_known() -> None:
    """A total length that follows from a mask's size, and the lengths from its sum, as exported language models do."""
    nodes = [
        node("ReduceSum", ["mask", "axis"], ["sum"], keepdims=0),
        node("Sub", ["sum", "one"], ["less"]),
        node("Cast", ["less"], ["lengths"], to=onnx.TensorProto.INT32),
        node("Shape", ["mask"], ["shape"]),
        node("Gather", ["shape", "one"], ["size"]),
        node("Cast", ["size"], ["total"], to=onnx.TensorProto.INT32),
        *grouped(do_rotary=1).graph.node,
    ]
    names = ("q", "k", "v", "pk", "pv")
    inputs = [value(name, SHAPES[name][0]) for name in names] + [value("mask", ["b", "t"], "int64")]
    weights = {**TABLES, "axis": np.int64([1]), "one": np.array(1, np.int64)}
    outputs = ["y", *(helper.make_tensor_value_info(o, 1, ["b", GROUPS, "t", WIDTH]) for o in ("nk", "nv"))]
    proto = model(nodes, inputs, outputs, weights, domains=[MICROSOFT])
    cases = []
    for b, s, p, lengths, total in (CASES["prompt"], CASES["ragged"], CASES["padded prompt"], CASES["chunk"]):
        mask = (np.arange(total) < np.array(lengths)[:, None]).astype(np.int64)
        cases.append(feeds(b, s, p, lengths, total, mask=mask))
    check(proto, cases)


@pytest.mark.parametrize("total", [6, 10])
def test_constant_sizes(total: int) -> None:
    shapes = {"q": [2, 1, 64], "k": [2, 1, 32], "v": [2, 1, 32], "pk": [2, 2, 10, 16], "pv": [2, 2, 10, 16]}
    proto = grouped((*shapes, "lengths"), shapes, do_rotary=1)
    proto.graph.node[0].input[6] = "total"
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(total, np.int32), "total"))
    check(proto, [feeds(2, 1, 10, lengths, total) for lengths in ([6, 3], [1, 5])])


def test_layers_of_a_model_share_what_the_lengths_say() -> None:
    first = grouped(do_rotary=1).graph.node[0]
    second = onnx.NodeProto()
    second.CopyFrom(first)
    second.input[0] = first.output[0]
    for at, name in ((3, "pk2"), (4, "pv2")):
        second.input[at] = name
    del second.output[:]
    second.output.extend(["y2", "nk2", "nv2"])
    inputs = [value(name, SHAPES[name][0], SHAPES[name][1]) for name in PLAIN]
    inputs += [value(name, SHAPES["pk"][0]) for name in ("pk2", "pv2")]
    proto = model([first, second], inputs, ("y2", "nk", "nv", "nk2", "nv2"), TABLES, domains=[MICROSOFT])
    cases = []
    for sizes in CASES.values():
        case = feeds(*sizes)
        cases.append({**case, "pk2": case["pv"] * 2, "pv2": case["pk"] / 2})
    check(proto, cases)
