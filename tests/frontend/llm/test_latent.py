"""Latent attention: what it keeps of a token, its heads' matrices in blocks, and what is refused of its checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.architectures.deepseek import DEEPSEEK_V3
from relaxlite.frontend.llm.checkpoint import Weight
from relaxlite.frontend.llm.config import Rope
from relaxlite.frontend.llm.hf_folder import describe
from relaxlite.frontend.llm.quantize import quantize_checkpoint
from relaxlite.frontend.llm.quantized import PackedRows
from relaxlite.frontend.llm.read import read_checkpoint
from relaxlite.frontend.llm.step import build_step
from relaxlite.llm.compiled_engine import CompiledEngine
from tests.support import llm_files as files
from tests.support import tiers
from tests.support.block_bytes import dequantized
from tests.support.llm_models import small_checkpoint

gguf = pytest.importorskip("gguf")

TOKENS = np.random.default_rng(7).integers(0, files.VOCAB, 30).tolist()
WIDE = files.RANK + files.TURNED


def in_blocks(weights: dict[str, np.ndarray], kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """All matrices in a type, as a file has them, and what they are then."""
    stored: dict[str, Any] = dict(weights)
    rounded = dict(weights)
    for name, values in weights.items():
        if values.ndim > 1:
            data = gguf.quants.quantize(values.reshape(-1, values.shape[-1]), gguf.GGMLQuantizationType[kind])
            stored[name] = (data.reshape(*values.shape[:-1], -1), kind)
            rounded[name] = dequantized(data, kind).reshape(values.shape)
    return stored, rounded


@pytest.mark.parametrize("groups_rows", tiers.few([True, False]))
def test_one_vector_of_each_token_is_kept_and_matrices_of_heads_stay_in_their_blocks(
    groups_rows: bool, tmp_path: Path
) -> None:
    metadata = files.fields("deepseek2")
    stored, rounded = in_blocks(files.tensors("deepseek2"), "Q5_1")
    checkpoint = read_checkpoint(files.write(tmp_path / "m.gguf", "deepseek2", metadata, stored))
    module = build_step(checkpoint, page=4, step_tokens=32, groups_rows=groups_rows)
    assert ("grouped_matmul" in str(module)) == groups_rows
    exe = rl.compile(module, precision="int16")
    if groups_rows:
        kept = sum(constant.nbytes for constant in exe.data.constants)
        assert kept < 1.15 * sum(weight.nbytes for weight in checkpoint.weights.values())
    engine = CompiledEngine(exe, chunk=11)
    assert [pool.shape for pool in engine.cache.layout.pools] == [(WIDE, 4), (4, files.RANK)] * 2
    wanted = files.forward("deepseek2", metadata, rounded, TOKENS)
    (found,) = engine.forward([(engine.new(), TOKENS)], wanted=[len(TOKENS)])
    np.testing.assert_allclose(found, wanted, atol=3e-4 * np.abs(wanted).max())


@pytest.mark.exhaustive
def test_heads_together_give_what_they_give_alone() -> None:
    """In batches, too: a row beside others is what it is alone, to the bit."""
    config = small_checkpoint("deepseek_v2").config.latent
    assert config is not None
    latent = replace(config, rank=64, nope_width=32, width=32, query_rank=32)
    changes = {"hidden": 64, "intermediate": 64, "latent": latent, "head_width": 64 + latent.rope_width}
    checkpoint = quantize_checkpoint(small_checkpoint("deepseek_v2", **changes, rope=Rope(1e4, 8)), "q4_0")
    engine = CompiledEngine(rl.compile(build_step(checkpoint, groups_rows=True)))
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13]]
    together = engine.forward([(engine.new(), prompt) for prompt in prompts])
    for prompt, found in zip(prompts, together, strict=True):
        np.testing.assert_array_equal(engine.forward([(engine.new(), prompt)])[0], found)


def test_files_in_which_keys_and_values_of_all_heads_are_one_matrix(tmp_path: Path) -> None:
    """As llama.cpp's converter wrote them at first, with the lengths of heads alone, and without its own queries."""
    metadata, weights = files.fields("deepseek2"), files.tensors("deepseek2")
    wanted = files.forward("deepseek2", metadata, weights, TOKENS)
    old = dict(weights)
    for k in range(files.LAYERS):
        keys, values = (old.pop(f"blk.{k}.attn_{kind}_b.weight") for kind in "kv")
        both = [np.concatenate([key.T, value]) for key, value in zip(keys, values, strict=True)]
        old[f"blk.{k}.attn_kv_b.weight"] = np.concatenate(both)
    said = {
        **files.fields(
            "deepseek2",
            **{
                "attention.key_length": files.PLAIN + files.TURNED,
                "attention.value_length": files.OF_VALUE,
                "attention.key_length_mla": None,
                "attention.value_length_mla": None,
                "attention.head_count_kv": files.HEADS,
            },
        )
    }
    path = files.write(tmp_path / "m.gguf", "deepseek2", said, old)
    engine = CompiledEngine(rl.compile(build_step(read_checkpoint(path), page=4, step_tokens=32)))
    (found,) = engine.forward([(engine.new(), TOKENS)], wanted=[len(TOKENS)])
    np.testing.assert_allclose(found, wanted, atol=3e-5 * np.abs(wanted).max())
    old["blk.0.attn_kv_b.weight"] = old["blk.0.attn_kv_b.weight"][:-1]
    with pytest.raises(ImportModelError, match=r"kv_up has shape .*, the hyperparameters say"):
        read_checkpoint(files.write(path, "deepseek2", said, old))


def test_keys_that_lie_otherwise_in_a_file_are_turned_as_floats() -> None:
    """As those of a folder in FP8, which become floats some rows at a time."""
    checkpoint = small_checkpoint("deepseek_v2")
    net = checkpoint.config.latent
    assert net is not None
    rows = np.random.default_rng(0).standard_normal((6 * (net.nope_width + net.width), net.rank)).astype(np.float32)
    packed = Weight(PackedRows.of(len(rows), rows.nbytes, lambda some: rows[some]), rows.shape)
    assert DEEPSEEK_V3.from_folder is not None
    found = DEEPSEEK_V3.from_folder({"layers.0.kv_up": packed}, checkpoint.config, "here")
    for h in range(6):
        keys, values = np.split(
            rows[h * (net.nope_width + net.width) :][: net.nope_width + net.width], [net.nope_width]
        )
        np.testing.assert_array_equal(found[f"layers.0.latent_keys.{h}"].to_float32(), keys.T)
        np.testing.assert_array_equal(found[f"layers.0.latent_values.{h}"].to_float32(), values)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"attention.kv_lora_rank": None}, "'deepseek2.attention.kv_lora_rank' is None; it must be a positive integer"),
        ({"attention.key_length_mla": 20}, "keys of 20 elements, of which rotary embeddings turn 32"),
        (
            {"attention.value_length_mla": 33},
            r"layers.0.o has shape \(256, 384\), the hyperparameters say \(256, 132",
        ),
        ({"attention.q_lora_rank": None}, r"weights layers.0.q_down.* unknown to the architecture|missing|has shape"),
        ({"attention.head_count": 3}, r"latent_keys has shape \(4, 128, 64\); it needs a matrix for each of 3 heads"),
        ({"nextn_predict_layers": 2}, "nextn_predict_layers = 2 must be fewer than all blocks"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": -1.0},
            r"deepseek2.rope.scaling.\* must be positive numbers",
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.yarn_log_multiplier": 0.1,
                "rope.scaling.attn_factor": 2.0,
            },
            "attn_factor is not supported beside deepseek2.rope.scaling.yarn_log_multiplier",
        ),
    ],
)
def test_files_that_make_no_sense_are_refused(more: dict[str, Any], problem: str, tmp_path: Path) -> None:
    path = files.write(tmp_path / "m.gguf", "deepseek2", files.fields("deepseek2", **more), files.tensors("deepseek2"))
    with pytest.raises(ImportModelError, match=problem):
        read_checkpoint(path)


CONFIG = {
    "model_type": "deepseek_v3", "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 16, "first_k_dense_replace": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"kv_lora_rank": 0}, "'kv_lora_rank' is 0; it must be a positive integer"),
        ({"n_shared_experts": -1}, "n_shared_experts = -1 must be a number of experts"),
        ({"first_k_dense_replace": "a"}, "first_k_dense_replace = 'a' must be a number of layers"),
        ({"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types must name dense or sparse for each layer"),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "thin"]}, "must name dense or sparse for each layer"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy' is not supported, only 'noaux_tc' is"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported, only 'sigmoid' is"),
        ({"rope_interleave": False}, "rope_interleave = False is not supported, only True is"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported, only 1 is"),
        ({"topk_group": 9}, "8 experts for each token, of 9 of 8 groups, and there are 16"),
        ({"model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "n_group": 4}, "only 'greedy' is"),
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob = True is not supported, only False"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale_all_dim": -1}},
            "mscale_all_dim = -1 must be a positive number",
        ),
    ],
)
def test_folders_that_we_would_compute_otherwise_are_refused(more: dict[str, Any], problem: str) -> None:
    with pytest.raises(ImportModelError, match=problem):
        describe({**CONFIG, **more}, "here")
