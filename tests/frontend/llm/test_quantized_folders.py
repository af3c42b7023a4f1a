"""Folders whose weights a library quantized, small and random: every weight and the logits, against the float32 that
codes and scales stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.cli import main
from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.architectures.weight_names import HUGGING_FACE_LAYER, HUGGING_FACE_WHOLE
from relaxlite.frontend.llm.hf_folder import describe, read_safetensors
from relaxlite.frontend.llm.hf_quantized import METHODS, Quantization
from relaxlite.frontend.llm.layers import BlockOperands
from relaxlite.frontend.llm.quantize import quantize_checkpoint
from relaxlite.frontend.llm.read import read_checkpoint
from relaxlite.frontend.llm.step import build_step
from relaxlite.llm.compiled_engine import CompiledEngine
from relaxlite.llm.compiling import build
from relaxlite.passes.graph.eliminate import eliminate_common
from tests.support import tiers, tiny_llm
from tests.support.dense_llm import build_dense
from tests.support.quantized_folders import (
    BF16,
    E4M3,
    E5M2,
    Array,
    Packer,
    Tensors,
    awq,
    bnb,
    compressed,
    fp4,
    fp8,
    gptq,
    int8,
    llm_int8,
    write_safetensors,
)

HIDDEN, INTER, HEADS, KV_HEADS, WIDTH, VOCAB = 128, 256, 4, 2, 32, 258
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INTER, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": WIDTH, "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "tie_word_embeddings": False, "rope_theta": 1e4,
}  # fmt: skip
MLP = {"gate_proj": (INTER, HIDDEN), "up_proj": (INTER, HIDDEN), "down_proj": (HIDDEN, INTER)}
MATRICES = {
    "self_attn.q_proj": (HEADS * WIDTH, HIDDEN), "self_attn.k_proj": (KV_HEADS * WIDTH, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * WIDTH, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * WIDTH),
    **{f"mlp.{name}": shape for name, shape in MLP.items()},
}  # fmt: skip
GPTQ, AWQ = {"quant_method": "gptq", "bits": 4}, {"quant_method": "awq", "version": "gemm", "bits": 4}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}

# By name: what config.json says, what packs a module, and how its weight is kept.
CASES: dict[str, tuple[Mapping[str, Any], Packer, str | None]] = {
    "gptq": (GPTQ, gptq(), "gptq"),
    "gptq, groups of 128": ({**GPTQ, "group_size": 128}, gptq(group=128), "gptq"),
    "gptq, one group": ({**GPTQ, "group_size": -1}, gptq(group=-1, has_index=False), "gptq"),
    "gptq, groups of 96, of which the last is cut": ({**GPTQ, "group_size": 96}, gptq(group=96), "gptq"),
    "the same without an index": ({**GPTQ, "group_size": 96}, gptq(group=96, has_index=False), "gptq"),
    "gptq, groups of 16": ({**GPTQ, "group_size": 16}, gptq(group=16, symmetric=False), "gptq"),
    "gptq, zero points": ({**GPTQ, "group_size": 64}, gptq(group=64, symmetric=False), "gptq"),
    "gptq_v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, gptq(symmetric=False, version=2), "gptq"),
    "gptq, act-order": ({**GPTQ, "desc_act": True}, gptq(is_sorted=False), "gptq"),
    "gptq, act-order, zero points": (GPTQ, gptq(is_sorted=False, symmetric=False, group=64), "gptq"),
    "gptq, act-order, groups of 8": (GPTQ, gptq(is_sorted=False, group=8), None),
    "gptq, 8 bits": ({**GPTQ, "bits": 8}, gptq(bits=8), "gptq"),
    "gptq, 8 bits, zero points": ({**GPTQ, "bits": 8}, gptq(bits=8, symmetric=False), "gptq"),
    "gptq, 3 bits": ({**GPTQ, "bits": 3}, gptq(bits=3, symmetric=False), "gptq"),
    "gptq, 3 bits, gptq_v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, gptq(bits=3, version=2), "gptq"),
    "gptq, 2 bits": ({**GPTQ, "bits": 2}, gptq(bits=2), "gptq"),
    "gptq, 3 bits, a zero point beyond them": ({**GPTQ, "bits": 3}, gptq(bits=3, zero=8), "gptq"),
    "gptq, bfloat16": (GPTQ, gptq(dtype=BF16, symmetric=False), "gptq"),
    "gptq, float32": (GPTQ, gptq(dtype=np.float32), "gptq"),
    "awq": ({**AWQ, "group_size": 32}, awq(), "awq"),
    "awq, groups of 128": ({**AWQ, "group_size": 128}, awq(group=128), "awq"),
    "auto-round as gptq": ({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, gptq(), "gptq"),
    "auto-round as awq": ({"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}, awq(), "awq"),
    "compressed, 4 bits": (COMPRESSED, compressed(), "compressed-tensors"),
    "compressed, 4 bits, groups of 128": (COMPRESSED, compressed(group=128, dtype=np.float16), "compressed-tensors"),
    "compressed, 4 bits, rows": (COMPRESSED, compressed(group=None, dtype=np.float32), "compressed-tensors"),
    "compressed, 4 bits, zero points": (COMPRESSED, compressed(symmetric=False), "compressed-tensors"),
    "compressed, zero points, float32": (
        COMPRESSED, compressed(symmetric=False, group=64, dtype=np.float32), "compressed-tensors"
    ),
    "compressed, 4 bits, act-order": (COMPRESSED, compressed(is_sorted=False), "compressed-tensors"),
    "compressed, 8 bits": (COMPRESSED, compressed(bits=8), "compressed-tensors"),
    "compressed, 8 bits, zero points": (COMPRESSED, compressed(bits=8, symmetric=False), "compressed-tensors"),
    "compressed, 2 bits": (COMPRESSED, compressed(bits=2), "compressed-tensors"),
    "compressed, W8A8": ({**COMPRESSED, "format": "int-quantized"}, int8(), "compressed-tensors"),
    "compressed, W8A8, one scale": (
        {**COMPRESSED, "format": "int-quantized"}, int8(of_rows=False, dtype=np.float32), "compressed-tensors"
    ),
    "compressed, W8, zero points": (
        {**COMPRESSED, "format": "naive-quantized"}, int8(symmetric=False), "compressed-tensors"
    ),
    "compressed, fp8, rows": (
        {**COMPRESSED, "format": "float-quantized"}, fp8(block=(1, 0), name="weight_scale", dtype=BF16), None
    ),
    "compressed, fp8, one scale": (
        {**COMPRESSED, "format": "float-quantized"}, fp8(block=None, name="weight_scale", dtype=BF16), None
    ),
    "compressed, fp8, blocks": (
        {
            **COMPRESSED, "format": "float-quantized",
            "config_groups": {"group_0": {"weights": {"block_structure": [48, 80]}}},
        },
        fp8(block=(48, 80), name="weight_scale"), None,
    ),
    "compressed, nvfp4": ({**COMPRESSED, "format": "nvfp4-pack-quantized"}, fp4(is_mx=False), "NVFP4"),
    "compressed, mxfp4": ({**COMPRESSED, "format": "mxfp4-pack-quantized"}, fp4(is_mx=True), "MXFP4"),
    "fp8": (FP8, fp8(), None),
    "fp8, blocks that are cut": ({**FP8, "weight_block_size": [96, 80]}, fp8(block=(96, 80)), None),
    "fp8, bfloat16": (FP8, fp8(dtype=BF16), None),
    "fp8, e5m2": (FP8, fp8(kind=E5M2), None),
    "fp8, one scale": ({"quant_method": "fp8"}, fp8(block=None, name="weight_scale"), None),
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8"}, fp8(block=(1, 0), name="weight_scale"), None),
    "bitsandbytes, nf4": (BNB, bnb(), None),
    "bitsandbytes, fp4": (BNB, bnb(kind="fp4"), None),
    "bitsandbytes, double": (BNB, bnb(is_nested=True), None),
    "bitsandbytes, blocks across rows": (BNB, bnb(size=512), None),
    "bitsandbytes, stored as bfloat16": (BNB, bnb(storage=BF16), None),
    "bitsandbytes, 8 bits": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8(), "bitsandbytes"),
}  # fmt: skip


def save(
    folder: Path,
    settings: Mapping[str, Any],
    packer: Packer,
    matrices: Mapping[str, tuple[int, int]] = MATRICES,
    others: Tensors | None = None,
    **config: Any,
) -> Tensors:
    """A folder whose `matrices` of each layer are quantized; `others`: more tensors of it. The weights in float32."""
    rng = np.random.default_rng(0)
    described = {**CONFIG, **config}
    vocabulary = (described["vocab_size"], HIDDEN)
    floats = {
        "model.embed_tokens.weight": rng.standard_normal(vocabulary),
        "model.norm.weight": rng.uniform(0.8, 1.2, HIDDEN),
        "lm_head.weight": rng.standard_normal(vocabulary) * HIDDEN**-0.5,
    }  # fmt: skip
    quantized: Tensors = {}
    tensors: Tensors = {}
    for layer in (f"model.layers.{k}." for k in range(described["num_hidden_layers"])):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            floats[f"{layer}{norm}.weight"] = rng.uniform(0.8, 1.2, HIDDEN)
        for name, shape in matrices.items():
            parts, quantized[f"{layer}{name}.weight"] = packer(rng, *shape)
            tensors |= {f"{layer}{name}.{part}": value for part, value in parts.items()}
    plain = {name: value.astype(np.float16) for name, value in floats.items()} | (others or {})
    write_safetensors(folder / "model.safetensors", tensors | plain)
    (folder / "config.json").write_text(json.dumps({**described, "quantization_config": settings}))
    return {name: value.astype(np.float32) for name, value in plain.items()} | quantized


def llama(weights: Tensors, tokens: Array) -> Array:
    """Logits [rows, tokens, vocab] of a Llama of one layer, in float64."""
    w = {name.removeprefix("model.").removesuffix(".weight"): v.astype(np.float64) for name, v in weights.items()}
    count, positions = tokens.shape[1], np.arange(tokens.shape[1])
    angles = positions[:, None] * 1e4 ** (-np.arange(0, WIDTH, 2) / WIDTH)
    seen = np.where(positions[None] <= positions[:, None], 0, -np.inf)

    def norm(x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[name]

    def turned(x: Array) -> Array:
        found = (x[..., : WIDTH // 2] + 1j * x[..., WIDTH // 2 :]) * np.exp(1j * angles)
        return np.concatenate([found.real, found.imag], axis=-1)

    def heads(name: str) -> Array:
        found = (normed @ w[f"layers.0.self_attn.{name}_proj"].T).reshape(len(tokens), count, -1, WIDTH)
        return np.repeat(found.swapaxes(1, 2), HEADS // found.shape[2], axis=1)

    x = w["embed_tokens"][tokens]
    normed = norm(x, "layers.0.input_layernorm")
    scores = turned(heads("q")) @ turned(heads("k")).swapaxes(2, 3) * WIDTH**-0.5 + seen
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    found = (shares / shares.sum(-1, keepdims=True) @ heads("v")).swapaxes(1, 2).reshape(len(tokens), count, -1)
    x = x + found @ w["layers.0.self_attn.o_proj"].T
    normed = norm(x, "layers.0.post_attention_layernorm")
    gate, up, down = (w[f"layers.0.mlp.{name}_proj"].T for name in ("gate", "up", "down"))
    x = x + (normed @ gate / (1 + np.exp(-(normed @ gate))) * (normed @ up)) @ down
    return norm(x, "norm") @ w["lm_head"].T


def logits(folder: Path, tokens: Array, precision: str = "float32") -> Array:
    found: Array = rl.compile(build_dense(read_checkpoint(folder)), precision=precision)(tokens)
    return found


def ours(name: str) -> str:
    """Our name of a weight."""
    found = {theirs: our for our, theirs in HUGGING_FACE_WHOLE.items()}
    prefix, _, rest = name.removeprefix("model.layers.").partition(".")
    layer = {theirs: our for our, theirs in HUGGING_FACE_LAYER.items()}
    return found[name] if name in found else f"layers.{prefix}.{layer[rest]}"


@pytest.mark.parametrize("name", CASES)
def test_weights_are_what_codes_and_scales_stand_for(name: str, tmp_path: Path) -> None:
    settings, packer, kept = CASES[name]
    wanted = {ours(key): value for key, value in save(tmp_path, settings, packer).items()}
    found = read_checkpoint(tmp_path).weights
    assert found.keys() == wanted.keys()
    for key, weight in found.items():
        values, floats = weight.to_float32(), wanted[key]
        if weight.block_format is None:  # in float16, where they were quantized
            np.testing.assert_allclose(values, floats, rtol=2**-11, atol=2**-24)
        else:  # no bit is lost of scales of 16 bits
            tolerance = 0 if "float32" not in name and name != "compressed, W8A8, one scale" else 3e-7
            tolerance = 3e-7 if kept in ("NVFP4", "bitsandbytes") or "rows" in name else tolerance
            np.testing.assert_allclose(values, floats, rtol=tolerance, atol=tolerance * np.abs(floats).max())
    of_layers = {key: weight for key, weight in found.items() if key.startswith("layers.") and "norm" not in key}
    assert {weight.block_format for weight in of_layers.values()} == {kept}
    assert found["head"].block_format is None and found["head"].data.dtype == np.float16
    if kept is None:
        assert {weight.data.dtype.name for weight in of_layers.values()} == {"float16"}


@pytest.mark.parametrize("name", [name for name, (_, _, kept) in CASES.items() if kept is not None])
def test_rows_are_read_in_any_order(name: str, tmp_path: Path) -> None:
    settings, packer, _ = CASES[name]
    save(tmp_path, settings, packer)
    weight = read_checkpoint(tmp_path).weights["layers.0.down"]
    wanted, order = weight.to_float32(), np.random.default_rng(0).permutation(HIDDEN)
    np.testing.assert_array_equal(weight.reorder_rows(order).to_float32(), wanted[order])
    np.testing.assert_array_equal(
        weight.row_range(5, 77).reorder_rows(np.arange(71, -1, -1)).to_float32(), wanted[5:77][::-1]
    )
    operands = BlockOperands.of(weight, "w").operands
    coding = weight.grouped(slice(0, 1)).coding
    assert coding.find_error() is None
    most = {8: 1.5, 4: 0.9, 3: 0.6, 2: 0.45}.get(coding.bits, 0)
    assert sum(operand.value.nbytes for operand in operands) <= most * HIDDEN * INTER


COMPILED = [
    "gptq, zero points", "gptq, act-order, zero points", "gptq, 8 bits, zero points", "awq", "compressed, 4 bits, rows",
    "compressed, zero points, float32", "compressed, W8A8", "compressed, nvfp4", "fp8", "bitsandbytes, double",
    "bitsandbytes, 8 bits",
]  # fmt: skip


BY_DEFAULT = ("fp8",)


@pytest.mark.parametrize("name", tiers.only(BY_DEFAULT, COMPILED))
def test_logits_are_those_of_the_weights_in_float32(name: str, tmp_path: Path) -> None:
    settings, packer, kept = CASES[name]
    tokens = np.random.default_rng(1).integers(0, VOCAB, (2, 9))
    wanted = llama(save(tmp_path, settings, packer), tokens)
    for precision, tolerance in (("float32", 2e-5), ("auto", 2e-3)) if kept else (("float32", 1e-3),):
        found = logits(tmp_path, tokens, precision)
        np.testing.assert_allclose(found, wanted, atol=tolerance * np.abs(wanted).max(), err_msg=precision)


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    stored = save(tmp_path, *CASES["gptq, act-order, zero points"][:2])
    config = transformers.LlamaConfig(**{key: value for key, value in CONFIG.items() if key != "model_type"})
    model = transformers.LlamaForCausalLM(config).eval().float()
    model.load_state_dict({key: torch.tensor(value) for key, value in stored.items()})
    tokens = np.random.default_rng(1).integers(0, VOCAB, (2, 9))
    wanted = model(torch.tensor(tokens)).logits.detach().numpy()
    np.testing.assert_allclose(logits(tmp_path, tokens), wanted, atol=2e-5 * np.abs(wanted).max())


def test_what_several_weights_multiply_is_sorted_once(tmp_path: Path) -> None:
    save(tmp_path, *CASES["gptq, act-order"][:2])
    text = str(eliminate_common(build_dense(read_checkpoint(tmp_path))))
    assert text.count("= gather(") == 5  # of the embedding; q, k, v; o; gate, up; down


# Other architectures


def test_fused_weights_are_taken_apart(tmp_path: Path) -> None:
    rows = (HEADS + 2 * KV_HEADS) * WIDTH
    fused = {"self_attn.qkv_proj": (rows, HIDDEN), "mlp.gate_up_proj": (2 * INTER, HIDDEN)}
    fused |= {name: MATRICES[name] for name in ("self_attn.o_proj", "mlp.down_proj")}
    for name in ("gptq, zero points", "awq", "compressed, 4 bits", "fp8, blocks that are cut", "bitsandbytes, nf4"):
        settings, packer, kept = CASES[name]
        stored = save(tmp_path, settings, packer, fused, model_type="phi3")
        found = read_checkpoint(tmp_path).weights
        parts = {"q": (0, 128), "k": (128, 192), "v": (192, 256)}
        for part, (begin, end) in parts.items():
            wanted = stored["model.layers.0.self_attn.qkv_proj.weight"][begin:end]
            np.testing.assert_allclose(found[f"layers.0.{part}"].to_float32(), wanted, rtol=2**-11, atol=1e-6)
            assert found[f"layers.0.{part}"].block_format == kept
        up = stored["model.layers.0.mlp.gate_up_proj.weight"][INTER:]
        np.testing.assert_allclose(found["layers.0.up"].to_float32(), up, rtol=2**-11, atol=1e-6)


@pytest.mark.parametrize("name", ["gptq", "awq", "compressed, 4 bits", "fp8", "bitsandbytes, double"])
def test_experts_are_read_one_by_one(name: str, tmp_path: Path) -> None:
    settings, packer, kept = CASES[name]
    matrices = {key: shape for key, shape in MATRICES.items() if key.startswith("self_attn")}
    matrices |= {f"mlp.experts.{e}.{part}": shape for e in range(3) for part, shape in MLP.items()}
    norms = {f"model.layers.0.self_attn.{part}_norm.weight": np.ones(WIDTH, np.float32) for part in "qk"}
    router = {"model.layers.0.mlp.gate.weight": np.ones((3, HIDDEN), np.float32)}
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": INTER}
    stored = save(tmp_path, settings, packer, matrices, norms | router, model_type="qwen3_moe", **experts)
    found = read_checkpoint(tmp_path).weights
    assert found["layers.0.experts.2.down"].block_format == kept
    wanted = stored["model.layers.0.mlp.experts.2.down_proj.weight"]
    np.testing.assert_allclose(found["layers.0.experts.2.down"].to_float32(), wanted, rtol=2**-11, atol=1e-6)
    assert found["layers.0.router"].block_format is None


@pytest.mark.parametrize("name", tiers.few(["gptq, act-order, zero points", "gptq, act-order", "awq"]))
def test_experts_whose_columns_have_orders_of_their_own_are_multiplied_together(name: str, tmp_path: Path) -> None:
    matrices = {key: shape for key, shape in MATRICES.items() if key.startswith("self_attn")}
    matrices |= {f"mlp.experts.{e}.{part}": shape for e in range(3) for part, shape in MLP.items()}
    norms = {f"model.layers.0.self_attn.{part}_norm.weight": np.ones(WIDTH, np.float32) for part in "qk"}
    choose = np.random.default_rng(0).standard_normal((3, HIDDEN)).astype(np.float32)
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": INTER}
    router = {"model.layers.0.mlp.gate.weight": choose}
    save(tmp_path, *CASES[name][:2], matrices, norms | router, model_type="qwen3_moe", **experts)
    checkpoint, found = read_checkpoint(tmp_path), []
    for groups_rows in (False, True):
        module = build_step(checkpoint, groups_rows=groups_rows)
        assert ("grouped_matmul" in str(module)) == groups_rows
        engine = CompiledEngine(rl.compile(module, precision="int16"))
        found.append(engine.forward([(engine.new(), np.arange(20) % 8)], wanted=[20])[0])
    np.testing.assert_allclose(found[1], found[0], atol=1e-3 * abs(found[0]).max())


def test_a_weight_that_is_stored_as_in_by_out_is_not_turned_again(tmp_path: Path) -> None:
    """GPT-2's own weights are [in, out]; libraries pack [out, in]."""
    shapes = {"attn.c_attn": (3 * HIDDEN, HIDDEN), "attn.c_proj": (HIDDEN, HIDDEN), "mlp.c_fc": (INTER, HIDDEN),
              "mlp.c_proj": (HIDDEN, INTER)}  # fmt: skip
    rng, tensors, wanted = np.random.default_rng(0), dict[str, Array](), dict[str, Array]()
    for name, (n, k) in shapes.items():
        parts, wanted[name] = gptq()(rng, n, k)
        tensors |= {f"transformer.h.0.{name}.{part}": value for part, value in parts.items()}
        tensors[f"transformer.h.0.{name}.bias"] = np.ones(n, np.float32)
    for name in ("h.0.ln_1", "h.0.ln_2", "ln_f"):
        tensors |= {f"transformer.{name}.{part}": np.ones(HIDDEN, np.float32) for part in ("weight", "bias")}
    tensors |= {f"transformer.{name}.weight": np.ones((16, HIDDEN), np.float32) for name in ("wte", "wpe")}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    described = {"model_type": "gpt2", "n_embd": HIDDEN, "n_layer": 1, "n_head": 4, "n_positions": 16, "n_inner": INTER}
    (tmp_path / "config.json").write_text(json.dumps({**described, "vocab_size": 16, "quantization_config": GPTQ}))
    found = read_checkpoint(tmp_path).weights
    np.testing.assert_array_equal(found["layers.0.down"].to_float32(), wanted["mlp.c_proj"])
    np.testing.assert_array_equal(found["layers.0.k"].to_float32(), wanted["attn.c_attn"][HIDDEN : 2 * HIDDEN])


@pytest.mark.parametrize("name", tiers.few(["lm_head", "model.embed_tokens"]))
def test_a_head_or_an_embedding_may_be_quantized(name: str, tmp_path: Path) -> None:
    """Then the other one is a weight of its own, whatever config.json says of them."""
    vocabulary = 256  # whole words of columns
    packed, wanted = gptq(is_sorted=False)(np.random.default_rng(5), vocabulary, HIDDEN)
    settings, packer, _ = CASES["gptq"]
    more = {f"{name}.{part}": value for part, value in packed.items()}
    stored = save(tmp_path, settings, packer, others=more, vocab_size=vocabulary, tie_word_embeddings=True)
    with pytest.raises(ImportModelError, match=f"{name}, .*: there is a weight that is not quantized, too; there are"):
        read_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {k: w.data for k, w in read_safetensors(path, ("I32",)).items() if k != f"{name}.weight"})
    checkpoint = read_checkpoint(tmp_path)
    found = checkpoint.weights[ours(f"{name}.weight")]
    assert found.block_format == "gptq" and not checkpoint.config.is_tied
    np.testing.assert_array_equal(found.to_float32(), wanted)
    tokens = np.random.default_rng(1).integers(0, vocabulary, (2, 5))
    weights = {key: value for key, value in stored.items() if key not in more} | {f"{name}.weight": wanted}
    want = llama(weights, tokens)
    np.testing.assert_allclose(logits(tmp_path, tokens), want, atol=2e-5 * np.abs(want).max())


def test_biases_of_zeros_that_the_architecture_has_not_are_left_out(tmp_path: Path) -> None:
    """As AutoGPTQ wrote them for every module."""
    settings, packer, _ = CASES["gptq"]
    biases = {f"model.layers.0.{name}.bias": np.zeros(shape[0], np.float16) for name, shape in MATRICES.items()}
    save(tmp_path, settings, packer, others=biases)
    assert "layers.0.q_bias" not in read_checkpoint(tmp_path).weights
    biases["model.layers.0.self_attn.q_proj.bias"][3] = 1
    save(tmp_path, settings, packer, others=biases)
    with pytest.raises(ImportModelError, match=r"weight layers\.0\.q_bias is unknown to the architecture llama"):
        read_checkpoint(tmp_path)


# The whole way of a user


def test_a_quantized_folder_is_compiled_run_and_looked_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, packer, _ = CASES["awq"]
    folder = tmp_path / "tiny-awq"
    folder.mkdir()
    save(folder, settings, packer)
    (folder / "tokenizer.json").write_text(tiny_llm.tokenizer_json())
    artifact = str(tmp_path / "x.rlx")
    assert main(["compile", str(folder), "-o", artifact]) == 0
    assert main(["generate", artifact, "abc", "--max-tokens", "4"]) == 0
    assert main(["inspect", artifact]) == 0
    shown = capsys.readouterr().out
    assert "source: tiny-awq\n" in shown and "quantized: awq\n" in shown
    assert main(["compile", str(folder), "-o", artifact, "--quantize", "q4_0"]) == 0  # its embeddings
    assert main(["inspect", artifact]) == 0
    assert "quantized: Q4_0; 7 in awq before\n" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_what_is_kept_in_codes_stays_small(tmp_path: Path) -> None:
    """Bits of each number in a compiled model, by what others take more."""
    bits, nbytes = {"gptq": 4.5, "awq": 5.5, "compressed, 8 bits": 8.5}, {}
    for name in bits:
        (tmp_path / name).mkdir()
        save(tmp_path / name, *CASES[name][:2])
        (tmp_path / name / "tokenizer.json").write_text(tiny_llm.tokenizer_json())
        target = "llvm -mcpu=icelake-server -mtriple=x86_64-unknown-linux-gnu"  # where all are products in integers
        nbytes[name] = sum(constant.nbytes for constant in build(tmp_path / name, target).constants)
    count = sum(n * k for n, k in MATRICES.values())
    for name, of_each in bits.items():
        assert nbytes[name] - nbytes["gptq"] == pytest.approx(count * (of_each - 4.5) / 8, rel=0.05), name


def test_floats_of_8_bits_can_be_quantized_as_any_others(tmp_path: Path) -> None:
    settings, packer, _ = CASES["fp8"]
    stored = save(tmp_path, settings, packer)
    found = quantize_checkpoint(read_checkpoint(tmp_path), "q8_0").weights["layers.0.down"]
    wanted = stored["model.layers.0.mlp.down_proj.weight"]
    assert found.block_format == "Q8_0"
    np.testing.assert_allclose(found.to_float32(), wanted, atol=np.abs(wanted).max() / 200)


# What is refused


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            "hqq",
            r"quantized by 'hqq' are not read, those of gptq, awq, compressed-tensors, fp8, fbgemm_fp8, bitsandbyt",
        ),
        ("torchao", "quantized by 'torchao' are not read"),
        ({"quant_method": "auto-round", "packing_format": "auto_round"}, "quantized by 'auto-round' are not read"),
        (["gptq"], r"quantized by \['gptq'\] are not read"),
        ({"quant_method": "mxfp4"}, "quantized by 'mxfp4' are not read"),
        ({"bits": 4}, "quantized by None are not read"),
        (
            {**GPTQ, "checkpoint_format": "marlin"},
            "by gptq the layout 'marlin' is not read, only 'gptq' and 'gptq_v2' are",
        ),
        ({**GPTQ, "is_marlin_format": True}, "the layout 'marlin' is not read"),
        ({**AWQ, "version": "gemv"}, "by awq version 'gemv' with 4 bits is not read, only 'gemm'"),
        ({**AWQ, "bits": 8}, "version 'gemm' with 8 bits is not read"),
        ({**COMPRESSED, "format": "marlin-24"}, "the format 'marlin-24' is not read, only dense, pack-quantized"),
        (
            {**COMPRESSED, "config_groups": {"a": {"format": "mxfp6-pack-quantized"}}},
            "the format 'mxfp6-pack-quantized' is not",
        ),
        (
            {**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}},
            "the format 'sparse-24-bitmask' is not read",
        ),
        (
            {**COMPRESSED, "transform_config": {"config_groups": {"u": {}}}},
            "those that rotate activations .* are not read",
        ),
    ],
)
def test_formats_that_are_not_read_are_named(settings: Any, problem: str) -> None:
    with pytest.raises(ImportModelError, match=f"place: .*{problem}.*take the float checkpoint, or a GGUF file"):
        describe({**CONFIG, "quantization_config": settings}, "place")


def changed(packer: Packer, changes: Mapping[str, Array | None]) -> Packer:
    """What `packer` writes with other tensors, None for those that are left out."""

    def pack(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, Array]:
        parts, values = packer(rng, n, k)
        return {name: value for name, value in {**parts, **changes}.items() if value is not None}, values

    return pack


DOT4_BYTES = np.ones((16, 16), np.int32)
STATE = "weight.quant_state.bitsandbytes__nf4"
BAD: list[tuple[str, dict[str, Array | None], str]] = [
    ("gptq", {"scales": None}, "scales is missing; there are qweight int32"),
    ("gptq", {"qweight": None}, "qweight is missing"),
    ("gptq", {"scales": np.ones((4, 128), np.int32)}, "scales must be float16 or bfloat16 or float32 of rank 2"),
    ("gptq", {"scales": np.ones(128, np.float16)}, "scales must be float16 or bfloat16 or float32 of rank 2"),
    ("gptq", {"scales": np.ones((4, 0), np.float16)}, "scales must be .* and not be empty"),
    ("gptq", {"qzeros": np.ones((4, 20), np.int32)}, "qzeros must have 2, 3, 4 or 8 bits"),
    ("gptq", {"qweight": np.ones((16, 96), np.int32)}, "and qweight as many columns"),
    ("gptq", {"g_idx": np.ones(64, np.int32)}, r"g_idx must have shape \(128,\)"),
    ("gptq", {"g_idx": np.full(128, 4, np.int32)}, "g_idx must say one of 4 groups"),
    ("gptq", {"g_idx": np.full(128, -1, np.int32)}, "g_idx must say one of 4 groups"),
    ("gptq, groups of 16", {"g_idx": None, "scales": np.ones((7, 128), np.float16), "qzeros": DOT4_BYTES[:7]},
     "128 columns are no 7 groups of 16"),
    ("awq", {"qzeros": np.ones((3, 16), np.int32)}, "scales must have 128 columns, and qzeros 16"),
    ("awq", {"scales": np.ones((4, 64), np.float16)}, "scales must have 128 columns"),
    ("compressed, 4 bits", {"weight_shape": None}, "weight_shape is missing"),
    ("compressed, 4 bits", {"weight_shape": np.array([-1, 128])}, r"two positive integers, it is \[-1, 128\]"),
    ("compressed, 4 bits", {"weight_shape": np.array([128, 130])}, "rows of 130 codes of 2, 4 or 8 bits"),
    ("compressed, 4 bits", {"weight_packed": np.ones((128, 12), np.int32)}, "rows of 128 codes of 2, 4 or 8 bits"),
    ("compressed, 4 bits", {"weight_scale": np.ones((64, 4), np.float32)}, "weight_scale must have 128 rows"),
    ("compressed, 4 bits", {"weight_scale": np.ones((128, 5), np.float32)}, "128 columns are no 5 groups"),
    ("compressed, 4 bits, zero points", {"weight_zero_point": np.ones((9, 4), np.int32)}, r"must have shape \(16, 4\)"),
    ("compressed, W8A8", {"weight_scale": None}, "weight_scale is missing"),
    ("compressed, W8, zero points", {"weight_zero_point": np.ones(3, np.int8)}, "a number for each of weight_scale"),
    ("compressed, fp8, rows", {"weight_zero_point": np.ones((128, 1), np.int8)}, "weight_zero_point must be 0 where"),
    ("compressed, nvfp4", {"weight_global_scale": np.zeros(1, np.float32)}, "must be one positive number"),
    ("compressed, nvfp4", {"weight_scale": np.ones((128, 3), E4M3)}, "a number for each 16 columns of 128"),
    ("fp8", {"weight_scale_inv": None}, "weight_scale_inv is missing"),
    ("fp8", {"weight_scale_inv": np.ones((3, 1), np.float32)}, r"scales \(3, 1\) are none of blocks \(128, 128\)"),
    ("fp8", {"weight_scale_inv": np.ones((1, 1, 2), np.float32)}, "scales"),
    ("fp8", {"weight": np.ones((128, 128), np.float16)}, "weight must be float8_e4m3fn or float8_e5m2"),
    ("bitsandbytes, nf4", {"weight.absmax": None}, "weight.absmax is missing"),
    ("bitsandbytes, nf4", {"weight.absmax": np.ones(9, np.float32)}, "a number for each of 256 blocks of 64"),
    ("bitsandbytes, nf4", {"weight.quant_map": np.ones(4, np.float32)}, "has 8192 bytes of 4-bit codes"),
    ("bitsandbytes, nf4", {STATE: None}, "bitsandbytes__nf4 is missing"),
    ("bitsandbytes, nf4", {STATE: np.frombuffer(b'{"shape": [1]}', np.uint8)}, "says no shape of two numbers"),
    ("bitsandbytes, nf4", {STATE: np.frombuffer(b"\xff{", np.uint8)}, "says no shape of two numbers"),
    ("bitsandbytes, nf4", {STATE: np.frombuffer(b'{"shape": [128, 128], "blocksize": 0}', np.uint8)}, "no blocksize"),
    ("bitsandbytes, nf4", {"weight": None}, "weight is missing"),
    ("bitsandbytes, double", {"weight.nested_quant_map": np.ones(3, np.float32)}, "nested_absmax must have a number"),
    ("bitsandbytes, double", {"weight.nested_absmax": np.ones(3, np.float32)}, "nested_absmax must have a number"),
    ("bitsandbytes, 8 bits", {"SCB": np.ones(5, np.float32)}, "SCB must have a number for each row"),
    ("bitsandbytes, 8 bits", {"SCB": None}, "SCB is missing"),
    ("bitsandbytes, 8 bits", {"weight_format": np.ones((), np.uint8)}, "weight_format must be 0"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "problem"), BAD)
def test_tensors_that_do_not_fit(name: str, changes: dict[str, Array | None], problem: str, tmp_path: Path) -> None:
    settings, packer, _ = CASES[name]
    save(tmp_path, settings, changed(packer, changes))
    method = settings["quant_method"]
    with pytest.raises(ImportModelError, match=f"self_attn.q_proj, quantized by {method}: .*{problem}"):
        read_checkpoint(tmp_path)


def test_an_index_that_nobody_has_set_is_none(tmp_path: Path) -> None:
    """All groups 0, where there are several: exllama takes it so, too."""
    unset = changed(gptq(), {"g_idx": np.zeros(HIDDEN, np.int32)})
    stored = save(tmp_path, GPTQ, unset, {"self_attn.q_proj": (HIDDEN, HIDDEN)})
    tensors = read_safetensors(tmp_path / "model.safetensors", ("I32",))
    name = "model.layers.0.self_attn.q_proj.weight"
    found = Quantization(METHODS["gptq"], GPTQ).assemble(tensors, "place")[name]
    np.testing.assert_array_equal(found.to_float32(), stored[name])


def test_integers_that_belong_to_nothing(tmp_path: Path) -> None:
    settings, packer, _ = CASES["gptq"]
    save(tmp_path, settings, packer, others={"model.norm.weight": np.ones(HIDDEN, np.int32)})
    with pytest.raises(ImportModelError, match=r"tensor 'model\.norm\.weight' is of type int32, and gptq is not known"):
        read_checkpoint(tmp_path)
    save(tmp_path, settings, packer, others={"model.norm.weight": np.ones(HIDDEN, np.int8)})
    with pytest.raises(
        ImportModelError, match=r"'model\.norm\.weight' is of type I8, .* known are F32, F16, BF16, I32"
    ):
        read_checkpoint(tmp_path)


def test_a_damaged_folder_is_never_a_raw_error(tmp_path: Path) -> None:
    """Any tensor of any format, with another shape or type, is read or refused."""
    rng = np.random.default_rng(0)
    for name in ("gptq", "awq", "compressed, 4 bits, zero points", "compressed, W8A8", "compressed, nvfp4", "fp8",
                 "bitsandbytes, double", "bitsandbytes, 8 bits"):  # fmt: skip
        settings, packer, _ = CASES[name]
        for part, value in packer(rng, 128, 128)[0].items():
            cut = value.reshape(-1) if value.ndim == 0 else value
            for bad in (cut[:0], cut[..., :-1], cut[None], cut.reshape(-1)[:1], np.zeros(value.shape, np.float16),
                        value.astype(np.int32), value.astype(np.uint8)):  # fmt: skip
                pack = changed(packer, {part: bad})
                save(tmp_path, settings, pack, {"self_attn.q_proj": (128, 128)})
                with pytest.raises(ImportModelError):  # other weights are missing
                    read_checkpoint(tmp_path)
