"""Gemma 4 in GGUF files against a plain computation on their own names, and what is refused, of folders too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.hf_folder import describe
from relaxlite.frontend.llm.quantize import quantize_checkpoint
from relaxlite.frontend.llm.read import read_checkpoint
from relaxlite.frontend.llm.step import ENTRY, FILL, build_step
from relaxlite.llm.compiled_engine import CompiledEngine
from relaxlite.llm.compiling import build
from relaxlite.llm.model import LanguageModel
from relaxlite.runtime.module import Executable
from tests.support import gemma4_files as gemma4
from tests.support import llm_files as files
from tests.support.block_bytes import dequantized
from tests.support.dense_llm import build_dense

gguf = pytest.importorskip("gguf")

TOKENS = np.random.default_rng(5).integers(0, files.VOCAB, 23).tolist()
KINDS: dict[str, dict[str, Any]] = {
    "small": {"is_small": True},
    "large": {"is_small": False},
    "mixture": {"is_small": False, "has_experts": True},
}
TABLE = "per_layer_token_embd.weight"
WIDE = ("token_embd.weight", TABLE, "per_layer_model_proj.weight")  # of 8 bits whatever others have


def check(exe: Executable, wanted: np.ndarray, tolerance: float = 3e-5) -> None:
    for count in (1, 9, len(TOKENS)):
        found = np.asarray(exe(np.asarray([TOKENS[:count]])))[0]
        np.testing.assert_allclose(found, wanted[:count], atol=tolerance * np.abs(wanted).max())


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_means_what_a_plain_computation_does(kind: str, tmp_path: Path) -> None:
    metadata = gemma4.fields(**KINDS[kind])
    weights = gemma4.tensors(metadata)
    path = files.write(tmp_path / "m.gguf", "gemma4", metadata, weights)
    wanted = gemma4.forward(metadata, weights, TOKENS)
    found = Interpreter(build_dense(read_checkpoint(path))).run("main", np.asarray([TOKENS]))
    np.testing.assert_allclose(np.asarray(found)[0], wanted, atol=3e-5 * np.abs(wanted).max())


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_a_plain_computation(kind: str, tmp_path: Path) -> None:
    metadata = gemma4.fields(**KINDS[kind])
    weights = gemma4.tensors(metadata)
    path = files.write(tmp_path / "m.gguf", "gemma4", metadata, weights)
    check(rl.compile(build_dense(read_checkpoint(path))), gemma4.forward(metadata, weights, TOKENS))


def in_blocks(weights: dict[str, np.ndarray], kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """All matrices in a type, as a file has them, and what they are then: some in Q8_0, in floats what chooses
    experts."""
    stored: dict[str, Any] = dict(weights)
    rounded = dict(weights)
    for name, values in weights.items():
        if values.ndim > 1 and "gate_inp" not in name:
            own = "Q8_0" if name in WIDE else kind
            data = gguf.quants.quantize(values.reshape(-1, values.shape[-1]), gguf.GGMLQuantizationType[own])
            stored[name] = (data.reshape(*values.shape[:-1], -1), own)
            rounded[name] = dequantized(data, own).reshape(values.shape)
    return stored, rounded


@pytest.mark.exhaustive
def test_experts_stay_in_their_blocks(tmp_path: Path) -> None:
    metadata = gemma4.fields(**KINDS["mixture"])
    stored, rounded = in_blocks(gemma4.tensors(metadata), "Q8_0")
    checkpoint = read_checkpoint(files.write(tmp_path / "m.gguf", "gemma4", metadata, stored))
    exe = rl.compile(build_dense(checkpoint), precision="float32")
    check(exe, gemma4.forward(metadata, rounded, TOKENS))
    assert stored_bytes(exe) < 1.1 * sum(weight.nbytes for weight in checkpoint.weights.values())


def stored_bytes(exe: Executable) -> int:
    return sum(constant.nbytes for constant in exe.data.constants)


@pytest.mark.exhaustive
def test_the_table_of_inputs_of_layers_stays_in_its_blocks(tmp_path: Path) -> None:
    """Most of a small model, and rows of it alone are read; here through the cache, whose pools layers share."""
    metadata = gemma4.fields(is_small=True)
    weights = gemma4.tensors(metadata)
    stored, rounded = in_blocks(weights, "Q4_0")
    read = read_checkpoint(files.write(tmp_path / "m.gguf", "gemma4", metadata, stored))
    floats = read_checkpoint(files.write(tmp_path / "f.gguf", "gemma4", metadata, weights))
    made = quantize_checkpoint(floats, "q4_0")
    for name, weight in read.weights.items():
        assert made.weights[name].block_format == weight.block_format
        np.testing.assert_array_equal(made.weights[name].data, weight.data)
    assert read.weights["layer_embed"].block_format == "Q8_0"
    exe = rl.compile(build_step(read), precision="float32")
    assert stored_bytes(exe) < 1.1 * sum(weight.nbytes for weight in read.weights.values())
    names = [spec.name for spec in exe.inputs if spec.name.startswith("keys_")]
    assert names == [f"keys_{k}" for k in range(gemma4.LAYERS - gemma4.SHARED)]
    wanted = gemma4.forward(metadata, rounded, TOKENS)
    for chunk in (32, 7):
        engine = CompiledEngine(exe, chunk=chunk)
        (found,) = engine.forward([(engine.new(), TOKENS)], wanted=[len(TOKENS)])
        np.testing.assert_allclose(found, wanted, atol=3e-5 * np.abs(wanted).max())


@pytest.mark.exhaustive
def test_a_file_becomes_a_model(tmp_path: Path) -> None:
    metadata = gemma4.fields(is_small=True)
    path = files.write(
        tmp_path / "m.gguf", "gemma4", {**metadata, **files.byte_tokenizer()}, gemma4.tensors(metadata, vocab=257)
    )
    data = build(path, quantize="q8_0")
    entry, fill = (data.functions[name] for name in (ENTRY, FILL))
    assert len(fill.instructions) < 0.75 * len(entry.instructions)  # without the last layers, which keep nothing
    llm, prompt = LanguageModel.of(data), np.random.default_rng(0).integers(0, 257, 100).tolist()
    tokens = llm.generate(prompt, max_new_tokens=9).tokens
    assert len(tokens) == 9
    assert llm.generate([*prompt, *tokens[:4]], max_new_tokens=5).tokens == tokens[4:]


def test_keys_and_values_that_no_layer_reads_are_left_out(tmp_path: Path) -> None:
    """As published checkpoints have them."""
    metadata = gemma4.fields(is_small=True)
    weights = gemma4.tensors(metadata)
    spare = {
        name.replace("blk.0.", "blk.4."): weight
        for name, weight in weights.items()
        if name.startswith(("blk.0.attn_k", "blk.0.attn_v"))
    }
    assert len(spare) == 3
    path = files.write(tmp_path / "m.gguf", "gemma4", metadata, {**weights, **spare})
    with_spare = read_checkpoint(path).weights
    assert set(with_spare) == set(read_checkpoint(files.write(path, "gemma4", metadata, weights)).weights)


def test_scales_that_a_file_does_not_have_are_1(tmp_path: Path) -> None:
    metadata = gemma4.fields(**KINDS["mixture"])
    weights = gemma4.tensors(metadata)
    fewer = {
        name: weight for name, weight in weights.items() if not name.endswith(("output_scale.weight", "exps.scale"))
    }
    checkpoint = read_checkpoint(files.write(tmp_path / "m.gguf", "gemma4", metadata, fewer))
    for name, size in (("layers.5.scale", 1), ("layers.5.experts_scale", gemma4.EXPERTS)):
        np.testing.assert_array_equal(checkpoint.weights[name].data, np.ones(size))


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"attention.shared_kv_layers": 6}, "attention.shared_kv_layers = 6 must be fewer than all 6 layers"),
        ({"attention.shared_kv_layers": 5}, "layer 1 shares keys and values of a full_attention layer before layer 1"),
        ({"attention.key_length_swa": None}, "'gemma4.attention.key_length_swa' is None; it must be a positive"),
        ({"attention.value_length_swa": 16}, "values of another width than keys are not supported"),
        ({"rope.dimension_count_swa": 16}, "local layers must turn all 32 elements, not 16"),
        ({"rope.freq_base_swa": None}, "hyperparameter 'gemma4.rope.freq_base_swa' is missing"),
        ({"attention.sliding_window": None}, "hyperparameter 'gemma4.attention.sliding_window' is missing"),
        ({"attention.sliding_window_pattern": None}, "'gemma4.attention.sliding_window_pattern' is missing"),
        ({"attention.head_count_kv": [2, 1, 1, 1, 2, 1]}, "num_key_value_heads must be the same for all sliding_atten"),
        ({"attention.head_count_kv": [2, 3] * 3}, "4 heads cannot share 3 heads of keys and values"),
        ({"feed_forward_length": [96] * 5}, r"it must be a positive integer for each of 6 layers"),
        ({"feed_forward_length": [96] * 6}, r"layers.4.gate has shape \(192, 64\), the hyperparameters say \(96, 64\)"),
    ],
)
def test_files_that_make_no_sense_are_refused(more: dict[str, Any], problem: str, tmp_path: Path) -> None:
    weights = gemma4.tensors(gemma4.fields(is_small=True))
    path = files.write(tmp_path / "m.gguf", "gemma4", gemma4.fields(is_small=True, **more), weights)
    with pytest.raises(ImportModelError, match=problem):
        read_checkpoint(path)


def test_missing_tensors_are_refused(tmp_path: Path) -> None:
    metadata = gemma4.fields(is_small=True)
    weights = gemma4.tensors(metadata)
    for name, problem in (
        ("rope_freqs.weight", "tensor 'rope_freqs.weight' is missing: it says what global layers turn"),
        (TABLE, "weight layer_embed is missing"),
        ("blk.3.attn_k.weight", "weight layers.3.k is missing"),
        ("blk.5.inp_gate.weight", "weight layers.5.input_gate is missing"),
    ):
        fewer = {key: weight for key, weight in weights.items() if key != name}
        with pytest.raises(ImportModelError, match=problem):
            read_checkpoint(files.write(tmp_path / "m.gguf", "gemma4", metadata, fewer))


CONFIG = {
    "model_type": "gemma4_text", "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
}  # fmt: skip
ROPES = {"sliding_attention": {"rope_type": "default"}, "full_attention": {"rope_type": "proportional"}}


def with_rope(kind: str, **section: Any) -> dict[str, Any]:
    return {"rope_parameters": {**ROPES, kind: section}}


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation = 'silu' is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported, only None is"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is not supported: a token must"),
        ({"vocab_size_per_layer_input": 99}, "vocab_size_per_layer_input = 99 is not supported, only vocab_size = 101"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers = 4 must be fewer than all 4 layers"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers = -1 must be fewer"),
        ({"num_kv_shared_layers": 3}, "layer 1 shares keys and values of a full_attention layer before layer 1"),
        ({"global_head_dim": "x"}, "head_dim of layer 1 is 'x', no positive integer"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "4 heads cannot share 3 heads of keys"),
        ({"per_layer_config": [1]}, "per_layer_config must be an object by the numbers of layers"),
        ({"per_layer_config": {"7": {}}}, "per_layer_config must be an object by the numbers of layers"),
        ({"per_layer_config": {"1": {"sliding_window": 3}}}, "'sliding_window' in per_layer_config is not supported"),
        ({"per_layer_config": {"1": {"head_dim": 8}}}, "head_dim must be the same for all full_attention layers"),
        ({"enable_moe_block": True}, "the hyperparameter 'num_experts' is missing"),
        (
            {"rope_parameters": {"rope_theta": 1e4}},
            "must have a rope_type of default, linear, proportional for",
        ),
        (with_rope("full_attention", rope_type="yarn", factor=2), "must have a rope_type of .* for full_attention"),
        (
            with_rope("sliding_attention", rope_type="default", partial_rotary_factor=0.5),
            "partial_rotary_factor = 0.5 is only known of proportional ones",
        ),
        (with_rope("full_attention", rope_type="proportional", factor=0), "factor of .* is 0"),
        (
            with_rope("full_attention", rope_type="proportional", partial_rotary_factor=2),
            "rotary embeddings cannot turn 1024 of 512 elements",
        ),
        ({"global_head_dim": 9}, "rotary embeddings cannot turn 9 of 9 elements"),
        ({"model_type": "gemma4_unified_text"}, "hidden_size_per_layer_input = 8 is not supported, only 0 is"),
        (
            {"model_type": "gemma4_unified_text", "hidden_size_per_layer_input": 0, "enable_moe_block": True},
            "enable_moe_block = True is not supported",
        ),
        ({"model_type": "gemma4_assistant"}, "the architecture 'gemma4_assistant' is not known"),
    ],
)
def test_folders_that_we_would_compute_otherwise_are_refused(more: dict[str, Any], problem: str) -> None:
    assert describe(CONFIG, "place")[0].per_layer_input == 8
    with pytest.raises(ImportModelError, match=f"place: .*{problem}"):
        describe({**CONFIG, **more}, "place")
