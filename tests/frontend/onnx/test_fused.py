"""Fused ops of onnxruntime, attention, narrow element types and sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import relaxlite as rl
from relaxlite.errors import ImportModelError
from relaxlite.frontend.onnx import from_onnx
from relaxlite.frontend.onnx.narrow_types import NARROW_TYPES
from tests.support.onnx_models import imported, model, node, onnxruntime_result, run, value, values

MICROSOFT = "com.microsoft"

# Fused ops, against onnxruntime


def draw(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


FUSED: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("Gelu", [draw(2, 4)], {}),
    ("FastGelu", [draw(2, 4), draw(4)], {}),
    ("BiasGelu", [draw(2, 4), draw(4)], {}),
    ("QuickGelu", [draw(2, 4)], {"alpha": 1.5}),
    ("FusedMatMul", [draw(2, 4, 3), draw(2, 4, 5)], {"transA": 1, "alpha": 0.5}),
    ("FusedConv", [draw(1, 2, 5, 5), draw(3, 2, 3, 3), draw(3)], {"activation": "Relu", "pads": [1, 1, 1, 1]}),
    ("SkipLayerNormalization", [draw(2, 3, 4), draw(2, 3, 4), draw(4), draw(4), draw(4)], {"epsilon": 1e-5}),
    ("SkipSimplifiedLayerNormalization", [draw(2, 3, 4), draw(2, 3, 4), draw(4)], {"epsilon": 1e-5}),
    ("DynamicQuantizeMatMul", [draw(3, 4), np.int8([[1, -2], [3, 4], [5, 6], [-7, 8]]), np.float32([0.1]),
                               np.int8([0])], {}),
    ("MatMulNBits", [draw(2, 32), np.arange(5 * 16, dtype=np.uint8).reshape(5, 1, 16), draw(5)],
     {"K": 32, "N": 5, "bits": 4, "block_size": 32}),
]  # fmt: skip


@pytest.mark.parametrize(("op", "inputs", "attrs"), FUSED, ids=[case[0] for case in FUSED])
def test_fused_ops_match_onnxruntime(op: str, inputs: list[Any], attrs: dict[str, Any]) -> None:
    x, *rest = inputs
    weights = {f"c{k}": w for k, w in enumerate(rest)}
    proto = model(
        [node(op, ["x", *weights], domain=MICROSOFT, **attrs)],
        values(x=list(x.shape)),
        weights=weights,
        domains=[MICROSOFT],
    )
    assert np.allclose(run(proto, x), onnxruntime_result(proto, {"x": x})[0], atol=1e-5)


def bytes_of(*shape: int, low: int = 0) -> Any:
    return np.random.default_rng(sum(shape)).integers(low, low + 256, shape).astype(np.int8 if low else np.uint8)


SMALL, ZERO = np.float32(0.03), np.uint8(120)
QUANTIZED: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "average pool": (
        "QLinearAveragePool", [bytes_of(2, 3, 6, 7), SMALL, ZERO, np.float32(0.02), np.uint8(128)],
        {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1], "count_include_pad": 1},
    ),
    "average pool, channels last": (
        "QLinearAveragePool", [bytes_of(2, 6, 7, 3), SMALL, ZERO, np.float32(0.02), np.uint8(128)],
        {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1], "channels_last": 1},
    ),
    "gemm": (
        "QGemm", [bytes_of(3, 8), SMALL, ZERO, bytes_of(8, 5, low=-128), np.float32(0.01), np.int8(3),
                  np.int32([300, -20, 0, 5000, 7]), np.float32(0.4), np.uint8(100)], {},
    ),
    "gemm in floats": (
        "QGemm", [bytes_of(3, 8), SMALL, ZERO, bytes_of(5, 8, low=-128), np.float32([1, 2, 3, 4, 5]) / 100,
                  np.zeros(5, np.int8), np.int32([300, -20, 0, 5000, 7])], {"transB": 1, "alpha": 0.5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(QUANTIZED))
def test_quantized_ops_match_onnxruntime(kind: str) -> None:
    op, (x, *rest), attrs = QUANTIZED[kind]
    weights = {f"c{k}": np.asarray(w) for k, w in enumerate(rest)}
    given = [value("x", list(x.shape), x.dtype.name)]
    results = [value("y", None, "uint8" if kind != "gemm in floats" else "float32")]
    nodes = [node(op, ["x", *weights], domain=MICROSOFT, **attrs)]
    proto = model(nodes, given, results, weights=weights, domains=[MICROSOFT])
    made, wanted = run(proto, x), onnxruntime_result(proto, {"x": x})[0]
    assert made.dtype == wanted.dtype
    np.testing.assert_allclose(made.astype(np.float64), wanted, atol=1 if made.dtype == np.uint8 else 1e-5)


def test_scales_of_channels_before_opset_13_as_onnxruntime_writes_them() -> None:
    """Its quantization of models of opset 10 to 12 was refused: attribute 'axis' is not known."""
    weights = {"w": bytes_of(2, 3, 4, low=-128), "s": np.float32([0.1, 0.2, 0.3]), "z": np.int8([0, 5, -9])}
    nodes = [node("DequantizeLinear", ["w", "s", "z"], ["d"], axis=1), node("Add", ["x", "d"])]
    proto = model(nodes, values(x=[2, 3, 4]), weights=weights, opset=11)
    x = draw(2, 3, 4)
    wanted = x + (weights["w"].astype(np.float32) - weights["z"][:, None]) * weights["s"][:, None]
    assert np.allclose(run(proto, x), wanted)


TABLE = np.arange(20, dtype=np.float32)[:, None] / 2.0 ** np.arange(8, dtype=np.float32)
GROUPED = {
    "q": draw(1, 3, 64), "k": draw(1, 3, 32), "v": draw(1, 3, 32), "pk": draw(1, 2, 4, 16), "pv": draw(1, 2, 4, 16),
    "l": np.int32([6]), "t": np.array(7, np.int32),
}  # fmt: skip
ATTENTION: list[tuple[str, dict[str, Any], list[str], dict[str, Any]]] = [
    ("Attention", {"x": draw(2, 5, 6), "w": draw(6, 24), "b": draw(24), "m": np.int32([5, 3])}, ["x", "w", "b", "m"],
     {"num_heads": 2}),
    ("Attention", {"x": draw(2, 5, 6), "w": draw(6, 24), "b": draw(24), "p": draw(2, 2, 2, 3, 4)},
     ["x", "w", "b", "", "p"], {"num_heads": 2, "unidirectional": 1}),
    ("MultiHeadAttention", {"q": draw(2, 3, 8), "k": draw(2, 5, 8), "v": draw(2, 5, 12), "b": draw(28),
                            "m": np.int32([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])},
     ["q", "k", "v", "b", "m"], {"num_heads": 2}),
    ("GroupQueryAttention",
     {**GROUPED, "c": np.cos(TABLE), "s": np.sin(TABLE)},
     ["q", "k", "v", "pk", "pv", "l", "t", "c", "s"], {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1}),
    ("GroupQueryAttention",
     {**GROUPED, "i": np.int64([[2, 5, 9]]), "a": 3 * draw(1, 4, 3, 7), "c": np.cos(TABLE), "s": np.sin(TABLE)},
     ["q", "k", "v", "pk", "pv", "l", "t", "c", "s", "i", "a"], {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1}),
    ("GroupQueryAttention", {**GROUPED, "h": 5 * draw(4)},
     ["q", "k", "v", "pk", "pv", "l", "t", "", "", "", "", "h"],
     {"num_heads": 4, "kv_num_heads": 2, "local_window_size": 3, "softcap": 0.7}),
    ("GroupQueryAttention", {**GROUPED, "a": draw(1, 1, 3, 7)},
     ["q", "k", "v", "pk", "pv", "l", "t", "", "", "", "a"],
     {"num_heads": 4, "kv_num_heads": 2, "smooth_softmax": 1, "softcap": 0.7}),
    ("RotaryEmbedding", {"x": draw(2, 3, 32), "i": np.int64([[3, 4, 5], [0, 1, 2]]), "c": np.cos(TABLE),
                         "s": np.sin(TABLE)},
     ["x", "i", "c", "s"], {"interleaved": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("op", "tensors", "names", "attrs"), ATTENTION, ids=lambda v: v if isinstance(v, str) else "")
def test_attention_matches_onnxruntime(
    op: str, tensors: dict[str, Any], names: list[str], attrs: dict[str, Any]
) -> None:
    constant = {k: v for k, v in tensors.items() if k in ("w", "b", "c", "s")}
    given = {k: v for k, v in tensors.items() if k not in constant}
    inputs = [value(k, list(v.shape), v.dtype.name) for k, v in given.items()]
    outputs = ("y", "k2", "v2") if op == "GroupQueryAttention" else ("y", "p2") if "p" in tensors else ("y",)
    proto = model([node(op, names, outputs, domain=MICROSOFT, **attrs)], inputs, outputs, constant, domains=[MICROSOFT])
    found = run(proto, *given.values())
    for have, want in zip(
        found if isinstance(found, tuple) else (found,), onnxruntime_result(proto, given), strict=True
    ):
        assert have.shape == want.shape
        assert np.allclose(have, want, atol=1e-5)


@pytest.mark.parametrize("count", [2, 3])
def test_attention_of_packed_keys_and_values_is_that_of_loose_ones(count: int) -> None:
    """onnxruntime takes these on GPUs only."""
    q, k, v = (draw(2, 5, 3, 8) for _ in range(3))
    flat = {name: x.reshape(2, 5, 24) for name, x in (("q", q), ("k", k), ("v", v))}
    loose = model([node("MultiHeadAttention", list(flat), domain=MICROSOFT, num_heads=3, unidirectional=1)],
                  values(**{name: list(x.shape) for name, x in flat.items()}), domains=[MICROSOFT])  # fmt: skip
    given = [np.stack([q, k, v], axis=3)] if count == 3 else [flat["q"], np.stack([k, v], axis=3)]
    named = {f"x{i}": ["batch", *x.shape[1:]] for i, x in enumerate(given)}
    packed = model(
        [node("MultiHeadAttention", list(named), domain=MICROSOFT, num_heads=3, unidirectional=1)],
        values(**named), domains=[MICROSOFT],
    )  # fmt: skip
    assert np.allclose(run(packed, *given), onnxruntime_result(loose, flat)[0], atol=1e-5)


def test_packed_keys_and_values_of_another_shape_are_an_error() -> None:
    nodes = [node("MultiHeadAttention", ["q", "k"], domain=MICROSOFT, num_heads=3)]
    given = values(q=[2, 5, 24], k=[2, 5, 3, 3, 8])
    with pytest.raises(ImportModelError, match=r"k and v in one tensor must be of \(b, s, h, 2, d\)"):
        from_onnx(model(nodes, given, domains=[MICROSOFT]))


@pytest.mark.parametrize("mask", [[[1, 1, 0, 0], [1, 1, 1, 1]], [[0, 1, 1, 0], [2, 0, 1, 0]], None])
def test_attention_masked_by_what_the_embedding_counts(mask: Any) -> None:
    """As onnxruntime's optimizer writes BERT."""
    weights = {"words": draw(10, 8), "places": draw(6, 8), "g": draw(8), "b": draw(8), "w": draw(8, 24), "c": draw(24)}
    names = ["i", "", "words", "places", "", "g", "b", *([] if mask is None else ["k"])]
    nodes = [node("EmbedLayerNormalization", names, ["x", "lengths", "sum"], domain=MICROSOFT)]
    nodes += [] if mask is None else [node("Attention", ["x", "w", "c", "lengths"], domain=MICROSOFT, num_heads=2)]
    given = {"i": np.int32([[1, 2, 3, 4], [5, 6, 7, 8]])} | ({} if mask is None else {"k": np.int32(mask)})
    inputs = [value(name, ["batch", 4], "int32") for name in given]
    results = ["lengths", "sum", "x" if mask is None else "y"]
    outputs = [value(name, None, "int32" if name == "lengths" else "float32") for name in results]
    proto = model(nodes, inputs, outputs, weights=weights, domains=[MICROSOFT])
    for found, wanted in zip(run(proto, *given.values()), onnxruntime_result(proto, given), strict=True):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape and np.allclose(found, wanted, atol=1e-5)


def quantized_table(shape: tuple[int, ...], block: int, bits: int, axis: int, kind: str) -> tuple[Any, Any, Any]:
    """Codes, scales and zero points as the op takes them, and all of these in a byte each."""
    rng, low = np.random.default_rng(bits), -8 if kind == "INT4" else 0
    blocks = [-(-size // block) if k == axis else size for k, size in enumerate(shape)]
    codes, zeros = (rng.integers(low, low + (1 << bits), size) for size in (shape, blocks))
    return codes, rng.uniform(0.1, 0.2, blocks), zeros


def in_bytes(codes: Any, bits: int) -> Any:
    per_byte = 8 // bits
    wide = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % per_byte)])
    return sum(wide[..., k::per_byte] << bits * k for k in range(per_byte)).astype(np.uint8)


TABLES: list[tuple[str, int, tuple[int, ...], int, int, int, str, bool]] = [  # kind, bits, shape, block, axes, scales
    ("UINT8", 4, (7, 64), 32, 0, 1, "float32", True),
    ("UINT8", 4, (7, 64), 16, 0, 1, "float16", False),
    ("UINT8", 4, (7, 80), 32, 0, 1, "float32", True),
    ("UINT8", 8, (7, 64), 32, 0, 1, "float32", True),
    ("UINT8", 2, (7, 64), 16, 0, 1, "float32", True),
    ("UINT4", 4, (7, 64), 16, 0, 1, "float32", True),
    ("INT4", 4, (7, 64), 16, 0, 1, "float16", False),
    ("INT4", 4, (32, 6, 5), 16, 1, 0, "float32", True),
    ("UINT4", 4, (3, 6, 48), 16, 1, 2, "float32", False),
]


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_rows_of_a_table_in_blocks(table: Any) -> None:
    kind, bits, shape, block, axis, along, dtype, has_zeros = table
    codes, scales, zeros = quantized_table(shape, block, bits, along, kind)
    tensors = {"d": codes, "z": zeros} if has_zeros else {"d": codes}
    names = ["d", "i", "s", *(["z"] if has_zeros else [])]
    attrs = {"bits": bits, "block_size": block, "gather_axis": axis, "quantize_axis": along}
    nodes = [node("GatherBlockQuantized", names, domain=MICROSOFT, **attrs)]
    given, result = [value("i", ["batch", 3], "int64")], [value("y", None, dtype)]
    proto = model(nodes, given, result, weights={"s": scales.astype(dtype)}, opset=21, domains=[MICROSOFT])
    for name, array in tensors.items():
        if kind == "UINT8":
            proto.graph.initializer.append(numpy_helper.from_array(in_bytes(array, bits), name))
        else:
            number = TensorProto.DataType.Value(kind)
            proto.graph.initializer.append(helper.make_tensor(name, number, array.shape, array.reshape(-1)))
    exe, size = rl.compile(from_onnx(proto)), shape[axis]
    for indices in ([[0, 1, 2], [2, 1, size - 1]], [[-1, -size, 1]], np.zeros((0, 3))):
        i = np.asarray(indices, np.int64)
        unset = 0 if kind != "UINT8" else 1 << (bits - 1)
        spread = [
            np.repeat(x, block, axis=along).take(range(shape[along]), axis=along) for x in (scales.astype(dtype), zeros)
        ]
        wanted = ((codes - (spread[1] if has_zeros else unset)) * spread[0].astype(np.float32)).take(i, axis=axis)
        found = exe(i)
        assert found.dtype == dtype and found.shape == wanted.shape
        np.testing.assert_allclose(found.astype(np.float32), wanted, rtol=2e-3 if dtype == "float16" else 1e-6)
        if len(i):
            np.testing.assert_allclose(found, onnxruntime_result(proto, {"i": i})[0], rtol=2e-3)


def test_a_table_that_is_gathered_along_its_blocks_is_an_error() -> None:
    weights = {"d": np.zeros((4, 16), np.uint8), "s": np.ones((4, 1), np.float32)}
    nodes = [node("GatherBlockQuantized", ["d", "i", "s"], domain=MICROSOFT, gather_axis=1, block_size=32)]
    proto = model(nodes, [value("i", [2], "int64")], weights=weights, domains=[MICROSOFT])
    with pytest.raises(ImportModelError, match="along the axis of its blocks"):
        from_onnx(proto)


@pytest.mark.parametrize("kind", ["zeros", "groups", "both"])
def test_weights_of_few_bits_that_only_floats_can_say(kind: str) -> None:
    """Zero points that are no integers, and groups in any order."""
    rng = np.random.default_rng(0)
    codes, scales = rng.integers(0, 16, (5, 64)), rng.uniform(0.1, 0.2, (5, 2)).astype(np.float32)
    zeros = rng.uniform(4, 12, (5, 2)).astype(np.float32) if kind != "groups" else np.full((5, 2), 8, np.float32)
    groups = rng.permutation(np.repeat([0, 1], 32)).astype(np.int32) if kind != "zeros" else np.arange(64) // 32
    weights = {"b": in_bytes(codes, 4).reshape(5, 2, 16), "s": scales.reshape(-1)}
    weights |= {"z": zeros} if kind != "groups" else {}
    weights |= {"g": groups} if kind != "zeros" else {}
    names = ["x", "b", "s", "z" if kind != "groups" else "", *(["g"] if kind != "zeros" else [])]
    nodes = [node("MatMulNBits", names, domain=MICROSOFT, K=64, N=5, bits=4, block_size=32)]
    x = draw(3, 64)
    wanted = x @ ((codes - zeros[:, groups]) * scales[:, groups]).T
    proto = model(nodes, values(x=["n", 64]), weights=weights, domains=[MICROSOFT])
    np.testing.assert_allclose(run(proto, x), wanted, rtol=1e-4, atol=1e-4)
    if kind == "zeros":
        np.testing.assert_allclose(onnxruntime_result(proto, {"x": x})[0], wanted, rtol=1e-4, atol=1e-4)


def test_weights_that_are_packed_for_one_processor_are_refused() -> None:
    weights = {"b": np.zeros((5, 2, 16), np.uint8), "s": np.ones(10, np.float32)}
    attrs = {"K": 64, "N": 5, "bits": 4, "block_size": 32, "weight_prepacked": 1}
    nodes = [node("MatMulNBits", ["x", "b", "s"], domain=MICROSOFT, **attrs)]
    with pytest.raises(ImportModelError, match="export the model without 'weight_prepacked'"):
        from_onnx(model(nodes, values(x=[3, 64]), weights=weights, domains=[MICROSOFT]))


def test_group_indices_beyond_the_groups_are_an_error() -> None:
    weights = {"b": np.zeros((5, 2, 16), np.uint8), "s": np.ones(10, np.float32), "g": np.full(64, 2, np.int32)}
    nodes = [node("MatMulNBits", ["x", "b", "s", "", "g"], domain=MICROSOFT, K=64, N=5, bits=4, block_size=32)]
    with pytest.raises(ImportModelError, match="group indices must be 64 numbers from 0 to 1"):
        from_onnx(model(nodes, values(x=[3, 64]), weights=weights, domains=[MICROSOFT]))


@pytest.mark.parametrize("kind", ["plain", "causal", "past", "columns"])
def test_quantized_attention_matches_onnxruntime(kind: str) -> None:
    tensors: dict[str, Any] = {
        "x": bytes_of(2, 5, 6), "w": bytes_of(6, 24, low=-128), "b": draw(24), "sx": np.float32(0.01),
        "sw": np.float32(0.02) if kind != "columns" else np.linspace(0.01, 0.03, 24, dtype=np.float32),
        "m": np.int32([5, 3]), "zx": np.uint8(120), "zw": np.int8(0),
    }  # fmt: skip
    names = list(tensors)
    if kind == "past":
        tensors["p"], names = draw(2, 2, 2, 3, 4), [*(name if name != "m" else "" for name in names), "p"]
        del tensors["m"]
    given = {name: x for name, x in tensors.items() if name in ("x", "m", "p")}
    nodes = [node("QAttention", names, ["y", *(["p2"] if kind == "past" else [])], domain=MICROSOFT, num_heads=2,
                  unidirectional=int(kind in ("causal", "past")))]  # fmt: skip
    inputs = [value(name, list(x.shape), x.dtype.name) for name, x in given.items()]
    weights = {name: np.asarray(x) for name, x in tensors.items() if name not in given}
    outputs = ["y", "p2"] if kind == "past" else ["y"]
    proto = model(nodes, inputs, outputs, weights, domains=[MICROSOFT])
    found = run(proto, *given.values())
    for have, want in zip(
        found if isinstance(found, tuple) else (found,), onnxruntime_result(proto, given), strict=True
    ):
        assert have.shape == want.shape and np.allclose(have, want, atol=1e-4)


@pytest.mark.parametrize("has_segments", [True, False])
def test_quantized_embeddings_match_onnxruntime(has_segments: bool) -> None:
    tables = [bytes_of(10, 8), bytes_of(6, 8), bytes_of(2, 8), bytes_of(8), bytes_of(8)]
    weights: dict[str, Any] = {f"t{k}": table for k, table in enumerate(tables)}
    weights |= {f"s{k}": np.float32(0.01 * (k + 1)) for k in range(5)} | {f"z{k}": np.uint8(100 + k) for k in range(5)}
    names = ["i", "g", *(f"t{k}" for k in range(5)), "m", *(f"s{k}" for k in range(5)), *(f"z{k}" for k in range(5))]
    if not has_segments:
        names = ["" if name in ("g", "t2", "s2", "z2") else name for name in names]
    given = {"i": np.int32([[1, 2, 3, 4], [5, 6, 7, 8]]), "m": np.int32([[1, 1, 0, 0], [1, 1, 1, 1]])}
    given |= {"g": np.int32([[0, 0, 1, 1], [0, 1, 1, 1]])} if has_segments else {}
    nodes = [node("QEmbedLayerNormalization", names, ["y", "lengths"], domain=MICROSOFT)]
    inputs, outputs = (
        [value(name, ["b", 4], "int32") for name in given],
        [value("y", None), value("lengths", None, "int32")],
    )
    proto = model(nodes, inputs, outputs, weights=weights, domains=[MICROSOFT])
    for have, want in zip(run(proto, *given.values()), onnxruntime_result(proto, given), strict=True):
        assert have.dtype == want.dtype and np.allclose(have, want, atol=1e-4)


def test_a_choice_of_two_quantizations_matches_onnxruntime() -> None:
    weights = {"sx": np.float32(0.1), "zx": np.uint8(3), "sy": np.float32(0.05), "zy": np.uint8(90),
               "sz": np.float32(0.07), "zz": np.uint8(20)}  # fmt: skip
    given = {"c": np.array([[True], [False]]), "x": bytes_of(2, 5), "y": bytes_of(5)}
    nodes = [node("QLinearWhere", ["c", "x", "sx", "zx", "y", "sy", "zy", "sz", "zz"], ["out"], domain=MICROSOFT)]
    inputs = [value(name, list(x.shape), x.dtype.name) for name, x in given.items()]
    proto = model(nodes, inputs, [value("out", None, "uint8")], weights=weights, domains=[MICROSOFT])
    assert np.abs(run(proto, *given.values()).astype(int) - onnxruntime_result(proto, given)[0]).max() <= 1


def test_small_floats_in_blocks_are_scaled_block_by_block() -> None:
    x, scales = draw(3, 8), np.float32([[1, 2], [3, 4], [5, 6]])
    bits = x.astype(NARROW_TYPES["FLOAT8E4M3FN"].dtype)
    proto = model([node("DequantizeLinear", ["w", "s"], ["d"], axis=1, block_size=4), node("Add", ["x", "d"])],
                  values(x=[3, 8]), weights={"s": scales}, opset=21)  # fmt: skip
    proto.graph.initializer.append(helper.make_tensor("w", TensorProto.FLOAT8E4M3FN, [3, 8], bits.tobytes(), raw=True))
    np.testing.assert_allclose(run(proto, 0 * x), bits.astype(np.float32) * np.repeat(scales, 4, axis=1), rtol=1e-6)


def test_sequences_of_known_length_exist_at_import_only() -> None:
    nodes = [
        node("SplitToSequence", ["x", "two"], ["parts"], axis=0),
        node("SequenceAt", ["parts", "one"], ["last"]),
        node("SequenceInsert", ["parts", "last", "zero"], ["more"]),
        node("ConcatFromSequence", ["more"], axis=0),
    ]
    weights = {"two": np.int64(2), "one": np.int64(1), "zero": np.int64(0)}
    x = np.arange(4, dtype=np.float32)
    assert np.array_equal(run(model(nodes, values(x=[4]), weights=weights), x), [2, 3, 0, 1, 2, 3])


def narrow_model(nodes: Any, kind: str, *, opset: int = 21) -> onnx.ModelProto:
    proto = model(nodes, values(x=["n"]), opset=opset)
    if kind:
        proto.graph.input[0].type.tensor_type.elem_type = TensorProto.DataType.Value(kind)
    return proto


@pytest.mark.parametrize("kind", ["FLOAT8E4M3FN", "FLOAT8E5M2", "FLOAT8E4M3FNUZ", "FLOAT8E5M2FNUZ"])
def test_small_floats_are_carried_as_their_bits(kind: str) -> None:
    dtype = NARROW_TYPES[kind].dtype
    x = np.concatenate([draw(200) * 10, np.float32([0, -0.0, np.nan, 1e-9])]).astype(np.float32)
    there = imported(narrow_model([node("Cast", ["x"], to=TensorProto.DataType.Value(kind))], ""))
    assert there["main"].attrs["output_forms"] == (("y", dtype.name),)  # type: ignore[union-attr]
    bits = run(there, x)
    assert bits.dtype == np.uint8
    assert np.array_equal(bits.view(dtype).astype(np.float32), x.astype(dtype).astype(np.float32), equal_nan=True)
    nodes = [node("Unsqueeze", ["x", "zero"], ["t"]), node("Cast", ["t"], to=TensorProto.FLOAT)]
    proto = narrow_model(nodes, kind)
    proto.graph.initializer.append(numpy_helper.from_array(np.int64([0]), "zero"))
    back = run(proto, bits)
    assert np.array_equal(back.reshape(-1), bits.view(dtype).astype(np.float32), equal_nan=True)


def test_what_cannot_be_done_with_small_floats_is_an_error() -> None:
    with pytest.raises(ImportModelError, match="Relu of FLOAT8E5M2 is not supported: cast or dequantize it first"):
        from_onnx(narrow_model([node("Relu", ["x"])], "FLOAT8E5M2"))


def test_four_bit_integers_saturate() -> None:
    zero = helper.make_tensor("z", TensorProto.INT4, [], [1])
    proto = narrow_model([node("QuantizeLinear", ["x", "s", "z"])], "")
    proto.graph.initializer.extend([zero, numpy_helper.from_array(np.float32(0.5), "s")])
    assert run(proto, np.float32([-9, -1, 0, 1.5, 9])).tolist() == [-8, -1, 1, 4, 7]


def test_unused_types_are_left_alone() -> None:
    tensor = helper.make_tensor("w", TensorProto.FLOAT, [2], [1.0, 2.0])
    proto = model([node("Add", ["x", "w"])], values(x=[2]))
    proto.graph.initializer.append(tensor)
    assert np.array_equal(run(proto, np.float32([0, 1])), [1, 3])
    assert numpy_helper.to_array(tensor).tolist() == [1, 2]
