"""GGUF files written by the `gguf` package: read right, or refused in words that say why."""

from __future__ import annotations

import os
import re
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relaxlite as rl
from relaxlite import config, model_cache
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.errors import ImportModelError, RelaxliteError
from relaxlite.frontend.llm import gguf_grids
from relaxlite.frontend.llm.checkpoint import Checkpoint
from relaxlite.frontend.llm.config import Rope, RopeScaling
from relaxlite.frontend.llm.gguf_blocks import BLOCK_FORMATS
from relaxlite.frontend.llm.read import read_checkpoint
from tests.support import llm_files as files
from tests.support import tiers
from tests.support.block_bytes import dequantized, random_blocks
from tests.support.dense_llm import build_dense

gguf = pytest.importorskip("gguf")

QKV = ("attn_q", "attn_k", "attn_v")
ALL = (*QKV, "attn_output", "ffn_gate", "ffn_up", "ffn_down")
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama, all biases, tied": ("llama", {}, {"biases": ALL, "tied": True}),
    "llama, half of each head turned": ("llama", {"rope.dimension_count": 32}, {}),
    "llama, linear rope": ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {}),
    "qwen2": ("qwen2", {}, {"biases": QKV}),
    "qwen3": ("qwen3", {"rope.freq_base": 1e6}, {"tied": True}),
    "gemma3": (
        "gemma3",
        {"rope.freq_base": 1e6, "attention.sliding_window": 5, "attention.sliding_window_pattern": 2},
        {"tied": True},
    ),
    "gemma3, linear rope of global layers": (
        "gemma3",
        {"attention.sliding_window": 5, "attention.sliding_window_pattern": 2, "rope.scaling.type": "linear",
         "rope.scaling.factor": 8.0},
        {"tied": True},
    ),
    "gemma": ("gemma", {}, {"tied": True}),
    "gemma2": (
        "gemma2",
        {"attention.sliding_window": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        {"tied": True},
    ),
    "phi3": ("phi3", {"rope.dimension_count": 32, "attention.sliding_window": 5}, {}),
    "smollm3": ("smollm3", {"block_count": 5}, {"tied": True}),
    "granite": (
        "granite",
        {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.015625, "logit_scale": 8.0},
        {},
    ),
    "olmo2": ("olmo2", {}, {}),
    "olmo2, which is olmo3": (
        "olmo2",
        {"block_count": 5, "attention.sliding_window": 5, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        {},
    ),
    "llama with experts, which is mixtral": ("llama", {"expert_count": 5, "expert_used_count": 2}, {"experts": 5}),
    "qwen2moe": (
        "qwen2moe",
        {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": files.INTER,
         "expert_shared_feed_forward_length": 96},
        {"experts": 6, "shared": 96, "biases": QKV},
    ),
    "qwen3moe, the first layer without": (
        "qwen3moe",
        {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": files.INTER},
        {"experts": 5, "dense_layers": (0,)},
    ),
    "olmoe": ("olmoe", {"expert_count": 4, "expert_used_count": 4}, {"experts": 4}),
    "starcoder2": ("starcoder2", {}, {"biases": ALL, "tied": True}),
    "phi2": ("phi2", {"rope.dimension_count": 32}, {"biases": (*ALL, "attn_qkv"), "parallel": True}),
    "stablelm": ("stablelm", {"rope.dimension_count": 16, "use_parallel_residual": False}, {"biases": QKV}),
    "stablelm, parallel": (
        "stablelm", {"rope.dimension_count": 16, "use_parallel_residual": True}, {"parallel": True}
    ),
    "stablelm, which a converter calls parallel": (
        "stablelm", {"rope.dimension_count": 16, "use_parallel_residual": True}, {"biases": QKV}
    ),
    "gpt2": (
        "gpt2",
        {"attention.head_count_kv": files.KV_HEADS},
        {"biases": (*ALL, "attn_qkv"), "tied": True},
    ),
    "gptneox": (
        "gptneox", {"rope.dimension_count": 16, "use_parallel_residual": True}, {"biases": (*ALL, "attn_qkv")}
    ),
    "gptneox, one after the other": (
        "gptneox", {"use_parallel_residual": False}, {"biases": (*ALL, "attn_qkv"), "tied": True}
    ),
    "gpt-oss": (
        "gpt-oss",
        {"expert_count": 5, "expert_used_count": 2, "attention.sliding_window": 6, "expert_feed_forward_length": 256},
        {"biases": ALL, "experts": 5},
    ),
    "command-r": ("command-r", {"logit_scale": 0.0625}, {"tied": True, "parallel": True}),
    "cohere2": (
        "cohere2",
        {"block_count": 5, "logit_scale": 0.25, "attention.sliding_window": 5},
        {"tied": True, "parallel": True},
    ),
    "mistral3": (
        "mistral3", {"attention.temperature_scale": 0.5, "rope.scaling.original_context_length": 6}, {}
    ),
    "ernie4_5": ("ernie4_5", {}, {"tied": True}),
    "ernie4_5, biases": ("ernie4_5", {}, {"biases": ALL}),
    "seed_oss": ("seed_oss", {}, {"biases": QKV}),
    "chatglm": ("chatglm", {"rope.dimension_count": 32}, {"biases": ("attn_qkv",)}),
    "glm4": ("glm4", {"rope.dimension_count": 32}, {"biases": QKV}),
    "hunyuan-dense": ("hunyuan-dense", {}, {"tied": True}),
    "exaone4": ("exaone4", {}, {}),
    "exaone4, windows": ("exaone4", {"block_count": 5, "attention.sliding_window": 5}, {}),
    "arcee": ("arcee", {}, {}),
    "lfm2": (
        "lfm2",
        {"block_count": 4, "attention.head_count_kv": [0, files.KV_HEADS, 0, 0], "shortconv.l_cache": 3},
        {"tied": True, "convolved": (0, 2, 3)},
    ),
    "lfm2, the last layer attends": (
        "lfm2",
        {"block_count": 3, "attention.head_count_kv": [0, 0, files.KV_HEADS], "shortconv.l_cache": 3},
        {"convolved": (0, 1)},
    ),
    "lfm2moe": (
        "lfm2moe",
        {"block_count": 4, "attention.head_count_kv": [0, files.KV_HEADS, 0, files.KV_HEADS], "shortconv.l_cache": 3,
         "expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": files.INTER, "expert_gating_func": 2},
        {"tied": True, "convolved": (0, 2), "experts": 6, "dense_layers": (0,), "balanced": True},
    ),
    "ernie4_5-moe": (
        "ernie4_5-moe",
        {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": files.INTER, "expert_gating_func": 1},
        {"tied": True, "experts": 6, "shared": 64, "dense_layers": (0,), "balanced": True},
    ),
    "glm4moe": (
        "glm4moe",
        {"rope.dimension_count": 32, "expert_count": 6, "expert_used_count": 2, "expert_weights_scale": 2.5,
         "expert_feed_forward_length": files.INTER, "expert_gating_func": 2, "expert_weights_norm": True},
        {"biases": QKV, "experts": 6, "shared": 64, "dense_layers": (0,), "balanced": True},
    ),
    "glm4moe, experts in groups": (
        "glm4moe",
        {"expert_count": 12, "expert_used_count": 3, "expert_group_count": 4, "expert_group_used_count": 2,
         "expert_feed_forward_length": files.INTER, "expert_gating_func": 2, "expert_weights_norm": False},
        {"experts": 12, "shared": 64, "balanced": True},
    ),
    "deepseek2": ("deepseek2", {}, {}),
    "deepseek2, stretched": (
        "deepseek2",
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 40.0, "rope.scaling.original_context_length": 64,
         "rope.scaling.yarn_log_multiplier": 0.0707},
        {},
    ),
    "deepseek2, as DeepSeek-V3": (
        "deepseek2",
        {"expert_count": 8, "expert_used_count": 2, "expert_group_count": 4, "expert_group_used_count": 2,
         "expert_feed_forward_length": files.INTER, "expert_gating_func": 2, "expert_weights_norm": True,
         "expert_weights_scale": 2.5},
        {"experts": 8, "shared": 64, "dense_layers": (0,), "balanced": True},
    ),
    "qwen35": ("qwen35", {"block_count": 5, "rope.dimension_count": 16}, {"remembering": (0, 1, 2, 4)}),
    "qwen35, every second layer attends": (
        "qwen35", {"full_attention_interval": 2, "rope.dimension_count": 16}, {"remembering": (0,), "tied": True}
    ),
    "qwen35moe": (
        "qwen35moe",
        {"attention.recurrent_layers": [False, True], "expert_count": 5, "expert_used_count": 2,
         "expert_feed_forward_length": files.INTER, "expert_shared_feed_forward_length": 96},
        {"remembering": (1,), "experts": 5, "shared": 96},
    ),
    "qwen3next": (
        "qwen3next",
        {"block_count": 4, "rope.dimension_count": 16, "expert_count": 5, "expert_used_count": 2,
         "expert_feed_forward_length": files.INTER, "expert_shared_feed_forward_length": 96},
        {"remembering": (0, 1, 2), "experts": 5, "shared": 96},
    ),
    "granitehybrid": (
        "granitehybrid",
        {"block_count": 4, "attention.head_count_kv": [0, 0, files.KV_HEADS, 0], "ssm.inner_size": 128,
         "rope.scaling.finetuned": False, "embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.015625,
         "logit_scale": 6.0},
        {"remembering": (0, 1, 3), "tied": True},
    ),
    "granitehybrid with experts": (
        "granitehybrid",
        {"attention.head_count_kv": [files.KV_HEADS, 0], "expert_count": 5, "expert_used_count": 2,
         "expert_shared_feed_forward_length": 64},
        {"remembering": (1,), "experts": 5, "shared": 64},
    ),
    "granitemoe": (
        "granitemoe",
        {"expert_count": 5, "expert_used_count": 2, "expert_shared_feed_forward_length": 64, "residual_scale": 0.22},
        {"experts": 5, "shared": 64},
    ),
}  # fmt: skip
TOKENS = np.random.default_rng(5).integers(0, files.VOCAB, 23).tolist()


# Of the largest logit. In float32 sums are rounded; "int16" also rounds what blocks are multiplied by, to 15 bits.
TOLERANCE = {"float32": 3e-5, "int16": 1.5e-4}


def check_meaning(path: Path, name: str, metadata: dict[str, Any], weights: dict[str, Any]) -> None:
    """That the ops compute what they should, which takes less long than to compile them."""
    wanted = files.forward(name, metadata, weights, TOKENS)
    found = Interpreter(build_dense(read_checkpoint(path))).run("main", np.asarray([TOKENS]))
    np.testing.assert_allclose(np.asarray(found)[0], wanted, atol=TOLERANCE["float32"] * np.abs(wanted).max())


def check_logits(
    path: Path, name: str, metadata: dict[str, Any], weights: dict[str, Any], precision: str = "float32"
) -> None:
    wanted = files.forward(name, metadata, weights, TOKENS)
    exe = rl.compile(build_dense(read_checkpoint(path)), precision=precision)
    for count in (1, 9, len(TOKENS)):
        found = np.asarray(exe(np.asarray([TOKENS[:count]])))[0]
        np.testing.assert_allclose(found, wanted[:count], atol=TOLERANCE[precision] * np.abs(wanted).max())


def of_case(case: str, path: Path) -> tuple[Path, str, dict[str, Any], dict[str, Any]]:
    name, more, kind = CASES[case]
    metadata = files.fields(name, **more)
    weights = files.tensors(name, layers=metadata[f"{name}.block_count"], **kind)
    return files.write(path, name, metadata, weights), name, metadata, weights


@pytest.mark.parametrize("case", CASES)
def test_a_file_means_what_a_plain_computation_does(case: str, tmp_path: Path) -> None:
    check_meaning(*of_case(case, tmp_path / "m.gguf"))


COMPILED = ("gpt-oss",)  # by default


@pytest.mark.parametrize("case", tiers.only(COMPILED, CASES))
def test_logits_are_those_of_a_plain_computation(case: str, tmp_path: Path) -> None:
    check_logits(*of_case(case, tmp_path / "m.gguf"))


def test_blocks_that_guess_tokens_ahead_are_left_out(tmp_path: Path) -> None:
    """As Qwen3.5 has them behind its layers."""
    metadata = files.fields("qwen35", full_attention_interval=2, **{"rope.dimension_count": 16})
    weights = files.tensors("qwen35", remembering=(0,))
    ahead = {name.replace("blk.1.", "blk.2."): w for name, w in weights.items() if name.startswith("blk.1.")}
    ahead["blk.2.nextn.eh_proj.weight"] = np.ones((files.HIDDEN, 2 * files.HIDDEN), np.float32)
    said = {**metadata, "qwen35.block_count": 3, "qwen35.nextn_predict_layers": 1}
    path = files.write(tmp_path / "m.gguf", "qwen35", said, {**weights, **ahead})
    check_logits(path, "qwen35", metadata, weights)
    with pytest.raises(ImportModelError, match=r"weights blk.2.nextn.eh_proj.weight is|weights? .* missing"):
        read_checkpoint(files.write(path, "qwen35", {**said, "qwen35.nextn_predict_layers": 0}, {**weights, **ahead}))


def test_tokens_that_a_file_suppresses_never_come(tmp_path: Path) -> None:
    """Nor from the saved model, unless others are asked for."""
    metadata, weights = {**files.fields("llama"), **files.byte_tokenizer()}, files.tensors("llama", vocab=257)
    path = tmp_path / "m.gguf"
    plain = rl.llm.compile(files.write(path, "llama", metadata, weights))
    likeliest = plain.generate([1, 2, 3], max_new_tokens=9).tokens
    suppressed = sorted({*likeliest})
    metadata["tokenizer.ggml.suppress_tokens"] = suppressed
    rl.llm.compile(files.write(path, "llama", metadata, weights)).save(tmp_path / "m.rlx")
    loaded = rl.llm.load(tmp_path / "m.rlx")
    assert not {*loaded.generate([1, 2, 3], max_new_tokens=9).tokens} & {*suppressed}
    assert loaded.generate([1, 2, 3], max_new_tokens=9, suppress_tokens=[]).tokens == likeliest
    metadata["tokenizer.ggml.suppress_tokens"] = "abc"
    with pytest.raises(ImportModelError, match=r"tokenizer.ggml.suppress_tokens is 'abc', no list of tokens"):
        read_checkpoint(files.write(path, "llama", metadata, weights))


def test_frequencies_that_a_file_brings_divide(tmp_path: Path) -> None:
    metadata, weights = files.fields("llama"), files.tensors("llama")
    weights["rope_freqs.weight"] = np.linspace(1, 8, files.WIDTH // 2, dtype=np.float32)
    check_logits(files.write(tmp_path / "m.gguf", "llama", metadata, weights), "llama", metadata, weights)
    weights["rope_freqs.weight"] = np.ones(5, np.float32)
    with pytest.raises(ImportModelError, match=r"'rope_freqs.weight' has shape \(5,\); 64 .* so it needs 32 numbers"):
        read_checkpoint(files.write(tmp_path / "m.gguf", "llama", metadata, weights))


def test_a_model_of_two_rotary_embeddings_is_compiled_for_the_context_of_its_training(tmp_path: Path) -> None:
    more = {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.25}
    metadata = {**files.fields("phi3", **more), **files.byte_tokenizer()}
    weights = files.tensors("phi3", vocab=257)
    divisors = {"short": np.linspace(1, 2, files.WIDTH // 2), "long": np.linspace(3, 40, files.WIDTH // 2)}
    stored = {f"rope_factors_{kind}.weight": found.astype(np.float32) for kind, found in divisors.items()}
    path = files.write(tmp_path / "m.gguf", "phi3", metadata, {**weights, **stored})
    rope = read_checkpoint(path).config.rope
    plain = 1e4 ** (-np.arange(0, files.WIDTH, 2) / files.WIDTH)
    for context, kind in ((32, "short"), (33, "long")):
        frequencies, factor = rope.frequencies(context)
        np.testing.assert_allclose(frequencies, plain / divisors[kind], rtol=1e-6)
        assert factor == 1.25
    usual, wide = rl.llm.compile(path), rl.llm.compile(path, max_context=files.CONTEXT)
    assert (usual.context, wide.context) == (32, files.CONTEXT)
    first, second = (llm.generate([1, 2, 3], max_new_tokens=1, logits=True).logits for llm in (usual, wide))
    assert np.abs(np.asarray(first) - np.asarray(second)).max() > 1e-3
    short = dict(stored)
    short["rope_factors_long.weight"] = np.ones(5, np.float32)
    with pytest.raises(ImportModelError, match=r"'rope_factors_long.weight' has shape \(5,\); 64 .* needs 32 numbers"):
        read_checkpoint(files.write(tmp_path / "m.gguf", "phi3", metadata, {**weights, **short}))


GRIDS = [kind for kind in BLOCK_FORMATS if kind.startswith(("IQ1", "IQ2", "IQ3"))]  # which are kept as IQ4_NL is
SIZES = {
    "IQ4_XS": 5e-5,
    "IQ1_S": 2e-3,
    "IQ1_M": 2e-3,
    "TQ1_0": 2e-2,
    "TQ2_0": 2e-2,
    "Q1_0": 2e-2,
    "Q2_0": 2e-2,
}  # of scales, by what codes stand for


def packed(values: np.ndarray, kind: str) -> np.ndarray:
    """Bytes of a type; of those that the package cannot quantize to, random codes with small scales."""
    if kind in ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        found = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
        return found if kind != "F16" else found.view(np.float16)
    scales = np.full(values.size // BLOCK_FORMATS[kind].size, SIZES.get(kind, 2e-4))
    data = random_blocks(kind, scales, values.shape[1])
    if kind == "MXFP4":
        data[:, 0] = 112 + data[:, 1] % 5  # powers of two
    if kind == "NVFP4":
        data[:, :4] = 4 + data[:, :4] % 8  # the least floats, and the ones behind them
    return data.reshape(len(values), -1)


WHOLE = ("F16", "BF16", "Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL")


def is_packed(name: str, kind: str, precision: str) -> bool:
    """Whether the test of a type has this matrix in it.

    What is widened to float32 in the loads of a product is so whatever follows the product: of some types it is enough
    to see it behind attention, in the logits and in rows that are gathered. All other kernels they share.
    """
    return precision != "float32" or kind in WHOLE or "attn_output" in name or "blk" not in name


# By default each kind of types once: test_quantized.py reads all of them.
BY_DEFAULT = ("BF16", "Q4_0", "Q4_K", "MXFP4")


def precision_of(kind: str, precision: str) -> object:
    by_default = tuple(TOLERANCE)[("F16", "BF16", *BLOCK_FORMATS).index(kind) % 2] if kind not in GRIDS else "int16"
    left_out = kind not in BY_DEFAULT or precision != by_default
    return pytest.param(kind, precision, marks=[pytest.mark.exhaustive] if left_out else [])


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        precision_of(kind, p)
        for kind in ("F16", "BF16", *BLOCK_FORMATS)
        for p in TOLERANCE
        if p != "float32" or kind not in GRIDS
    ],
)
def test_every_tensor_type(kind: str, precision: str, tmp_path: Path) -> None:
    metadata, weights = files.fields("llama"), files.tensors("llama")
    stored: dict[str, Any] = dict(weights)
    for name, values in weights.items():
        if values.ndim == 2 and is_packed(name, kind, precision):
            data = packed(values, kind)
            stored[name] = (data, kind)
            weights[name] = dequantized(data, kind).reshape(values.shape)
    path = files.write(tmp_path / "m.gguf", "llama", metadata, stored)
    check_logits(path, "llama", metadata, weights, precision)


def test_a_tensor_that_goes_on_where_the_next_begins_is_refused(tmp_path: Path) -> None:
    """As those of a fork do whose Q2_0 has blocks of another size."""
    path = files.write(tmp_path / "m.gguf", "llama", files.fields("llama"), files.tensors("llama"))
    name, data = b"blk.0.attn_q.weight", bytearray(path.read_bytes())
    at = data.index(name) + len(name) + 4 + 2 * 8 + 4  # behind its rank, dimensions and type
    offset = int.from_bytes(data[at : at + 8], "little") + 32
    data[at : at + 8] = offset.to_bytes(8, "little")
    path.write_bytes(data)
    message = r"attn_q.weight' has (\d+) bytes by its type F32, and the next one begins after \d+: the file is"
    with pytest.raises(ImportModelError, match=message):
        read_checkpoint(path)


@pytest.mark.parametrize("is_stacked", [True, False])
@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "BF16"])
def test_experts_in_blocks(kind: str, is_stacked: bool, tmp_path: Path) -> None:
    """Of one tensor for all experts, and as the first files of Mixtral have them: in one each."""
    metadata = files.fields("llama", expert_count=3, expert_used_count=2)
    weights, stored = files.tensors("llama", experts=3), {}
    for name, values in weights.items():
        stored[name] = values
        if values.ndim == 3:
            data = [packed(matrix, kind) for matrix in values]
            weights[name] = np.stack([gguf.quants.dequantize(d, gguf.GGMLQuantizationType[kind]) for d in data])
            del stored[name]
            parts = {name: np.stack(data)}
            if not is_stacked:
                parts = {name.replace("_exps", f".{e}"): part for e, part in enumerate(data)}
            stored |= {part: (found, kind) for part, found in parts.items()}
    model = files.write(tmp_path / "m.gguf", "llama", metadata, stored), "llama", metadata, weights
    check_meaning(*model)
    if tiers.is_exhaustive() or (kind, is_stacked) == ("Q4_0", True):
        check_logits(*model)


def test_weights_in_nvfp4_are_multiplied_by_numbers_of_their_own(tmp_path: Path) -> None:
    """One of each matrix, or of each expert; what is said of activations is left to `precision`."""
    metadata, weights = files.fields("llama", expert_count=3, expert_used_count=2), files.tensors("llama", experts=3)
    stored: dict[str, Any] = dict(weights)
    for k, (name, values) in enumerate(list(weights.items())):
        if values.ndim < 2 or "ffn_gate_inp" in name:
            continue
        data, stem = packed(values.reshape(-1, values.shape[-1]), "NVFP4"), name.removesuffix(".weight")
        factors = np.float32([0.7, 1, 1.2]) if values.ndim == 3 else np.float32([0.6 + 0.05 * k])
        stored[name] = (data.reshape(*values.shape[:-1], -1), "NVFP4")
        stored[f"{stem}.scale"], stored[f"{stem}.input_scale"] = factors, np.float32([3.0])
        weights[name] = dequantized(data, "NVFP4").reshape(values.shape) * factors.reshape(-1, *[1] * (values.ndim - 1))
    path = files.write(tmp_path / "m.gguf", "llama", metadata, stored)
    check_meaning(path, "llama", metadata, weights)
    for precision in TOLERANCE if tiers.is_exhaustive() else ():
        check_logits(path, "llama", metadata, weights, precision)
    for name, count in (("blk.0.attn_q.scale", 2), ("blk.1.ffn_up_exps.scale", 4)):
        with pytest.raises(ImportModelError, match=rf"'{name}' must have 1 .*positive numbers for .* and has {count}"):
            read_checkpoint(files.write(path, "llama", metadata, {**stored, name: np.ones(count, np.float32)}))
    with pytest.raises(ImportModelError, match=r"attn_q.scale' must have 1 positive numbers .*, the least -1"):
        read_checkpoint(files.write(path, "llama", metadata, {**stored, "blk.0.attn_q.scale": -np.ones(1, np.float32)}))
    others = {**stored, "blk.0.attn_q.weight": weights["blk.0.attn_q.weight"]}
    with pytest.raises(ImportModelError, match=r"attn_q.* unknown to the architecture llama"):
        read_checkpoint(files.write(path, "llama", metadata, others))


def test_a_matrix_for_each_expert_is_needed(tmp_path: Path) -> None:
    metadata, weights = files.fields("llama", expert_count=4, expert_used_count=2), files.tensors("llama", experts=3)
    path = files.write(tmp_path / "m.gguf", "llama", metadata, weights)
    with pytest.raises(ImportModelError, match=r"gate has shape \(3, 256, 256\); it needs .* each of 4 experts"):
        read_checkpoint(path)
    metadata = files.fields("llama", expert_count=3, expert_used_count=4)
    with pytest.raises(ImportModelError, match="4 experts for each token, and there are only 3"):
        read_checkpoint(files.write(tmp_path / "m.gguf", "llama", metadata, weights))
    metadata = files.fields("llama", expert_count=3, expert_used_count=2, expert_gating_func=3)
    with pytest.raises(ImportModelError, match=r"expert_gating_func = 3; known are 1 \(softmax\), 2 \(sigmoid\)"):
        read_checkpoint(files.write(tmp_path / "m.gguf", "llama", metadata, weights))
    groups = {"expert_group_count": 3, "expert_group_used_count": 1}
    metadata = files.fields("llama", expert_count=3, expert_used_count=2, **groups)
    with pytest.raises(ImportModelError, match="2 experts for each token, of 1 of 3 groups, and there are 3"):
        read_checkpoint(files.write(tmp_path / "m.gguf", "llama", metadata, weights))
    metadata = files.fields("llama", expert_count=3, expert_used_count=2, expert_weights_scale=-2.5)
    with pytest.raises(ImportModelError, match=r"'llama.expert_weights_scale' is -2.5; it must be a positive number"):
        read_checkpoint(files.write(tmp_path / "m.gguf", "llama", metadata, weights))
    metadata = files.fields("llama", expert_count=3, expert_used_count=2, expert_weights_norm=False)
    experts = read_checkpoint(files.write(tmp_path / "m.gguf", "llama", metadata, weights)).config.experts
    assert experts is not None and not experts.is_normed
    metadata = files.fields("qwen3", expert_count=3, expert_used_count=2)
    with pytest.raises(ImportModelError, match="mixtures of experts are not known of qwen3"):
        read_checkpoint(files.write(tmp_path / "m.gguf", "qwen3", metadata, files.tensors("qwen3")))


@pytest.mark.parametrize("case", ["llama", "qwen2", "gemma3"])  # it does not read the width of qwen3's heads
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    name, more, kind = CASES[case]
    if name == "gemma3":  # transformers does not read the pattern
        more = {"rope.freq_base": 1e6, "attention.sliding_window": 5}
    metadata = {**files.fields(name, **more), **files.byte_tokenizer(), f"{name}.vocab_size": files.VOCAB}
    metadata["general.file_type"] = 0
    path = files.write(tmp_path / "m.gguf", name, metadata, files.tensors(name, **kind))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for layer in model.model.layers:
        layer.self_attn.scaling = files.WIDTH**-0.5  # of gemma3 it takes 256 for the width, whatever the file says
    wanted = model(torch.tensor([TOKENS])).logits.detach().numpy()
    found = rl.compile(build_dense(read_checkpoint(path)))(np.asarray([TOKENS]))
    np.testing.assert_allclose(found, wanted, atol=3e-5 * np.abs(wanted).max())


def test_a_gpt2_that_says_little(tmp_path: Path) -> None:
    """Its files name no heads of keys, no widths of heads and nothing of rotary embeddings."""
    metadata = files.fields("gpt2")
    left_out = ("head_count_kv", "key_length", "value_length", "freq_base")
    metadata = {key: value for key, value in metadata.items() if not key.endswith(left_out)}
    weights = files.tensors("gpt2", biases=(*ALL, "attn_qkv"))
    for name in list(weights):
        if "attn_qkv" in name:  # as many heads of keys as of queries
            weights[name] = np.concatenate([weights[name], weights[name]])[: 3 * files.HIDDEN]
    config = read_checkpoint(files.write(tmp_path / "m.gguf", "gpt2", metadata, weights)).config
    assert (config.kv_heads, config.head_width, config.has_positions) == (files.HEADS, files.WIDTH, True)


def test_what_else_the_file_says_is_kept(tmp_path: Path) -> None:
    metadata = {**files.fields("llama"), "general.name": "Tiny", "general.license": "mit"}
    found = read_checkpoint(files.write(tmp_path / "tiny.gguf", "llama", metadata, files.tensors("llama")))
    assert found.provenance == {"source": "tiny.gguf", "name": "Tiny", "license": "mit"}
    assert found.tokenizer is None
    assert (found.config.vocab, found.config.context, found.config.is_tied) == (files.VOCAB, files.CONTEXT, False)


def test_only_the_largest_gemma_scales_queries_otherwise(tmp_path: Path) -> None:
    metadata = files.fields("gemma3", block_count=62, **{"attention.sliding_window": 5})
    one = files.tensors("gemma3", tied=True)
    weights = {k: v for k, v in one.items() if "blk" not in k}
    weights |= {f"blk.{k}.{n[6:]}": v for n, v in one.items() if n.startswith("blk.0.") for k in range(62)}
    config = read_checkpoint(files.write(tmp_path / "m.gguf", "gemma3", metadata, weights)).config
    assert config.query_scale == (files.HIDDEN / files.HEADS) ** -0.5
    assert config.is_local.count(False) == 10


SPLIT = "m-0000{}-of-00002.gguf"


def split(folder: Path, **second: Any) -> list[Path]:
    """As llama.cpp splits files: all fields in the first, tensors in both."""
    metadata, weights = files.fields("llama"), files.tensors("llama")
    names = sorted(weights)
    paths = []
    for k, part in enumerate((names[:7], names[7:])):
        said = {"split.no": k, "split.count": 2, "split.tensors.count": len(names)}
        said |= metadata if k == 0 else second
        path = folder / SPLIT.format(k + 1)
        paths.append(files.write(path, "llama", said, {name: weights[name] for name in part}))
    return paths


def test_a_model_in_several_files_is_read_by_any_of_them(tmp_path: Path) -> None:
    paths = split(tmp_path)
    whole = files.write(tmp_path / "m.gguf", "llama", files.fields("llama"), files.tensors("llama"))
    wanted = read_checkpoint(whole)
    for path in paths:
        found = read_checkpoint(path)
        assert found.config == wanted.config and set(found.weights) == set(wanted.weights)
        for name, weight in wanted.weights.items():
            np.testing.assert_array_equal(found.weights[name].data, weight.data)
        assert set(paths) <= set(model_cache._files_of(path))


def test_what_is_wrong_with_several_files_is_told(tmp_path: Path) -> None:
    first, second = split(tmp_path)
    kept = second.rename(tmp_path / "kept")
    with pytest.raises(ImportModelError, match=r"one of 2 files; m-00002-of-00002.gguf is missing beside it"):
        read_checkpoint(first)
    second.write_bytes(first.read_bytes())
    with pytest.raises(ImportModelError, match=r"m-00002-of-00002.gguf: no part 1 of a model in 2 files"):
        read_checkpoint(first)
    second.unlink()
    with pytest.raises(
        ImportModelError, match=r"part 1 of a model in 2 files, which are named NAME-00001-of-00002.gguf"
    ):
        read_checkpoint(kept)


def test_old_and_untyped_scalings_are_linear(tmp_path: Path) -> None:
    def scaling(**more: Any) -> Any:
        return read_checkpoint(changed(tmp_path, **more)).config.rope.scaling

    wanted = RopeScaling("linear", 4.0)
    assert scaling(**{"rope.scale_linear": 4.0}) == scaling(**{"rope.scaling.factor": 4.0}) == wanted
    assert scaling(**{"rope.scaling.type": "none", "rope.scaling.factor": 4.0}) is None
    with pytest.raises(ImportModelError, match=r"attn_factor of 1.5 is only known of yarn and longrope"):
        scaling(**{"rope.scaling.attn_factor": 1.5})


def test_divisors_come_before_a_linear_scaling() -> None:
    divisors = tuple(float(k + 1) for k in range(4))
    both = Rope(1e4, 8, RopeScaling("linear", 4.0), divisors).frequencies(64)[0]
    np.testing.assert_allclose(both, Rope(1e4, 8).frequencies(64)[0] / np.array(divisors) / 4)


@pytest.mark.parametrize("wrong", [0.0, -1.0, np.nan, np.inf])
def test_divisors_that_divide_nothing_are_refused(wrong: float, tmp_path: Path) -> None:
    weights = files.tensors("llama")
    weights["rope_freqs.weight"] = np.array([1.0] * 31 + [wrong], np.float32)
    with pytest.raises(
        ImportModelError, match=r"'rope_freqs.weight' holds numbers that no frequency can be divided by"
    ):
        read_checkpoint(changed(tmp_path, weights))


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt-oss", "olmo2"])
@pytest.mark.parametrize(
    ("pattern", "wanted"), [([False, True], (False, True)), (2, (True, False)), (3, (True, True)), (1, (False, False))]
)
def test_files_say_which_layers_are_local(name: str, pattern: Any, wanted: tuple[bool, ...], tmp_path: Path) -> None:
    _, more, made = CASES[name if name != "olmo2" else "olmo2, which is olmo3"]
    more = {**more, "attention.sliding_window": 5, "attention.sliding_window_pattern": pattern, "block_count": 2}
    path = files.write(tmp_path / "m.gguf", name, files.fields(name, **more), files.tensors(name, **made))
    assert read_checkpoint(path).config.is_local == wanted


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3", "qwen3"])
def test_a_file_that_does_not_say_how_wide_heads_are_means_a_share_of_the_model(name: str, tmp_path: Path) -> None:
    metadata = files.fields(name)
    del metadata[f"{name}.attention.key_length"]
    metadata.pop(f"{name}.attention.value_length", None)
    path = files.write(tmp_path / "m.gguf", name, metadata, files.tensors(name, tied=True))
    assert read_checkpoint(path).config.head_width == files.HIDDEN // files.HEADS


def test_caps_and_windows_of_0_are_none(tmp_path: Path) -> None:
    more = {"attention.sliding_window": 5, "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0}
    metadata = files.fields("gemma2", **more)
    path = files.write(tmp_path / "m.gguf", "gemma2", metadata, files.tensors("gemma2", tied=True))
    config = read_checkpoint(path).config
    assert config.score_cap is None and config.logit_cap is None


# What cannot be read


def changed(tmp_path: Path, weights: dict[str, Any] | None = None, name: str = "llama", **more: Any) -> Path:
    known = name if name in (*files.HYBRIDS, "granitehybrid") else "llama"
    metadata = {key: value for key, value in files.fields(known, **more).items() if value is not None}
    metadata = {key.replace(f"{known}.", f"{name}.", 1): value for key, value in metadata.items()}
    return files.write(tmp_path / "m.gguf", name, metadata, weights or files.tensors("llama"))


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"name": "rwkv7"}, "the architecture 'rwkv7' is not known; known are llama, mistral, smollm3, qwen2, qwen3, "),
        ({"context_length": None}, "the hyperparameter 'llama.context_length' is missing"),
        ({"block_count": 0}, "'llama.block_count' is 0; it must be a positive integer, the same for all layers"),
        ({"block_count": 4_000_000_000}, "'llama.block_count' is 4000000000; it must be"),
        ({"block_count": 3}, "weights layers.2.attn_norm, .* and 5 more are missing; a llama of 3 layers has 30"),
        ({"embedding_length": "wide"}, "'llama.embedding_length' is 'wide'; it must be"),
        ({"embedding_length": 128}, r"weight embed has shape \(40, 256\), the hyperparameters say \(40, 128\)"),
        ({"attention.head_count_kv": [2, 1]}, r"head_count_kv' is \[2, 1\]; it must be .* the same for all layers"),
        ({"attention.head_count_kv": 3}, "4 heads cannot share 3 heads of keys and values"),
        ({"attention.value_length": 32}, "values of another width than keys are not supported"),
        ({"attention.causal": False}, "must not see later ones: llama.attention.causal is false"),
        ({"expert_count": 8}, "the hyperparameter 'llama.expert_used_count' is missing"),
        ({"rope.dimension_count": 65}, "cannot turn 65 of 64 elements of a head"),
        ({"rope.scaling.type": "ntk", "rope.scaling.factor": 4.0}, "scaled by 'ntk' are not known"),
        ({"rope.scaling.type": "longrope"}, "scaled by 'longrope' need tensors, 'rope_factors_short.weight' too"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "is nan; it must be a positive number"),
        ({"name": "lfm2", "attention.head_count_kv": [0, 0]}, "at least one layer must attend, and all 2 are convolut"),
        ({"name": "lfm2", "attention.head_count_kv": [0, 2, 0]}, "3 layers are told apart, and there are 2"),
        ({"name": "lfm2", "attention.head_count_kv": [0, -2]}, "head_count_kv must be one number of all layers that "),
        ({"name": "lfm2", "attention.head_count_kv": [0, 2], "shortconv.l_cache": 0}, "along 0 tokens must be along 1"),
        *(
            ({"name": "granitehybrid", **more}, problem)
            for more, problem in (
                ({"attention.head_count_kv": [0, 0]}, "at least one layer must attend, and none of 2 does"),
                ({"attention.head_count_kv": [0, 2], "ssm.inner_size": 130}, "4 heads cannot share 130 elements"),
                ({"attention.head_count_kv": [0, 2], "ssm.conv_kernel": 1}, "must be along 2 tokens at least, not 1"),
            )
        ),
        (
            {"name": "qwen35", "full_attention_interval": 2, "ssm.group_count": None},
            "'qwen35.ssm.group_count' is None; it must be a positive integer",
        ),
        (
            {"name": "qwen35", "full_attention_interval": 2, "ssm.group_count": 3},
            "4 heads of values cannot share 3 of keys",
        ),
        (
            {"name": "qwen35", "full_attention_interval": 2, "ssm.inner_size": 130},
            "qwen35.ssm.inner_size = 130 is no multiple of 4 heads",
        ),
        (
            {"name": "qwen35", "full_attention_interval": 2, "ssm.conv_kernel": 1},
            "must be along 2 tokens at least, not 1",
        ),
        ({"name": "qwen35", "full_attention_interval": 0}, "qwen35.full_attention_interval = 0 must be positive"),
        ({"name": "qwen35"}, "at least one layer must attend, and none of 2 does"),
        ({"name": "qwen35", "attention.recurrent_layers": [True]}, "1 layers are told apart, and there are 2"),
        ({"name": "qwen35", "nextn_predict_layers": 2}, "nextn_predict_layers = 2 must be fewer than all blocks"),
    ],
)
def test_hyperparameters_that_make_no_sense_are_refused(more: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ImportModelError, match=problem):
        read_checkpoint(changed(tmp_path, **more))


def test_per_layer_hyperparameters_that_are_all_the_same_are_one(tmp_path: Path) -> None:
    assert read_checkpoint(changed(tmp_path, **{"attention.head_count_kv": [2, 2]})).config.kv_heads == 2


def test_unknown_and_missing_weights_are_named(tmp_path: Path) -> None:
    weights = files.tensors("llama")
    weights["blk.0.attn_qkv.weight"] = weights.pop("blk.0.attn_q.weight")
    problem = "weight layers.0.q is missing; .*; weight blk.0.attn_qkv.weight is there and unknown"
    with pytest.raises(ImportModelError, match=problem):
        read_checkpoint(changed(tmp_path, weights))
    weights = {**files.tensors("llama"), "blk.0.ffn_gate_inp.weight": np.zeros(3, np.float32)}
    with pytest.raises(
        ImportModelError, match=r"weight blk\.0\.ffn_gate_inp.weight is unknown to the architecture llama"
    ):
        read_checkpoint(changed(tmp_path, weights))


def test_unread_tensor_types_are_named(tmp_path: Path) -> None:
    weights = {**files.tensors("llama"), "output.weight": (np.zeros((40, 40), np.uint8), "Q8_1")}
    with pytest.raises(
        ImportModelError, match=r"'output\.weight' is of type Q8_1, which is not read; known are F32, F16"
    ):
        read_checkpoint(changed(tmp_path, weights))


def test_grids_need_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    gguf_grids._grid.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    block = BLOCK_FORMATS["IQ3_S"]
    with pytest.raises(ImportModelError, match=r"type IQ3_S are rows of a grid, .*`pip install 'relaxlite\[gguf\]'`"):
        block.unpack(np.zeros((1, block.nbytes), np.uint8))


def header(version: int, tensors: int = 0, values: int = 0, order: str = "<") -> bytes:
    return b"GGUF" + struct.pack(f"{order}IQQ", version, tensors, values)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "no GGUF file: it does not begin with 'GGUF'"),
        (b"PK\x03\x04", "no GGUF file"),
        (b"GGUF", "damaged or truncated"),
        (header(1), "version 1 is not read, 2 and 3 are"),
        (header(3, order=">"), "written for machines with the highest byte first"),
        (header(3, values=2**60), "damaged or truncated"),
        (header(3, tensors=2**60), "damaged or truncated"),
        (header(3, values=1) + struct.pack("<Q", 2**62) + b"abc", "goes beyond the end"),
        (header(3, values=1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 2**40), "a list of 1099511627776 values"),
        (header(3, values=1) + struct.pack("<Q1sI", 1, b"k", 99), "99 is no type of a metadata value"),
        (header(3, values=1) + struct.pack("<Q1sI", 1, b"k", 9) + struct.pack("<IQ", 9, 1) * 5000, "damaged"),
        (header(3, tensors=1) + struct.pack("<Q1sI", 1, b"t", 9), "tensor 't' has 9 dimensions"),
        (header(3), "the architecture '' is not known"),
    ],
)  # fmt: skip
def test_damaged_containers_are_refused(data: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ImportModelError, match=problem):
        read_checkpoint(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("gguf")
    metadata = {**files.fields("llama"), **files.byte_tokenizer("<|im_end|>")}
    path = files.write(folder / "m.gguf", "llama", metadata, files.tensors("llama"))
    return folder / "damaged.gguf", path.read_bytes()


def header_bytes(good: bytes) -> int:
    """What lies before the first weight."""
    return good.index(files.tensors("llama")["token_embd.weight"].tobytes())


def attempt(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        assert isinstance(read_checkpoint(path), Checkpoint)
    except RelaxliteError as error:
        assert str(path) in str(error)


@settings(deadline=None, max_examples=tiers.examples(150))
@given(changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_flipped_bytes_never_crash(whole: tuple[Path, bytes], changes: list[tuple[float, int]]) -> None:
    path, good = whole
    data = bytearray(good)
    for place, value in changes:
        data[int(place * (header_bytes(good) - 1))] = value
    attempt(path, bytes(data))


@settings(deadline=None, max_examples=tiers.examples(60))
@given(share=st.floats(0, 1))
def test_truncated_files_are_refused(whole: tuple[Path, bytes], share: float) -> None:
    path, good = whole
    for end in (int(share * (len(good) - 1)), int(share * header_bytes(good))):
        path.write_bytes(good[:end])
        with pytest.raises(ImportModelError, match=r"truncated|does not begin with"):
            read_checkpoint(path)


def test_a_file_that_ends_within_a_weight_names_it(whole: tuple[Path, bytes]) -> None:
    path, good = whole
    path.write_bytes(good[:-1000])
    with pytest.raises(ImportModelError) as caught:
        read_checkpoint(path)
    wanted = rf"{re.escape(str(path))}: tensor '\S+' ends at byte \d+ of {len(good) - 1000}: the file is truncated"
    assert re.fullmatch(wanted, str(caught.value))


# Real models, where they are there


@pytest.mark.models
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma3-270m"])
def test_real_models_give_the_logits_of_transformers(name: str) -> None:
    """The largest difference is below 1e-4 of the largest logit in float32, and below 1e-3 of it with what blocks are
    multiplied by in 15 bits (Gemma 3 on random tokens: 6.9e-4)."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    paths = sorted((config.model_folder() / name).glob("*.gguf"))
    if not paths:
        pytest.skip(f"{name} is not in the cache folder")
    checkpoint = read_checkpoint(paths[0])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        paths[0].parent, gguf_file=os.path.basename(paths[0]), dtype=torch.float32
    ).eval()
    module = build_dense(checkpoint)
    compiled = {precision: rl.compile(module, precision=precision) for precision in ("float32", "int16")}
    for seed, count in enumerate((1, 7, 64, 130)):
        tokens = np.random.default_rng(seed).integers(0, checkpoint.config.vocab, (1, count))
        with torch.no_grad():
            wanted = model(torch.tensor(tokens)).logits.numpy()
        for precision, most in (("float32", 1e-4), ("int16", 1e-3)):
            atol = most * np.abs(wanted).max()
            np.testing.assert_allclose(compiled[precision](tokens), wanted, rtol=0, atol=atol, err_msg=precision)
