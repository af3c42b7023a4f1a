"""Every architecture with small random weights against transformers, from the folder that it saves.

transformers and torch are no dependencies of the tests: these are skipped where they are missing.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.read import read_checkpoint
from tests.support.dense_llm import build_dense
from tests.support.tiny_llm import tokenizer_json

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
load_file, save_file = (getattr(pytest.importorskip("safetensors.torch"), f"{verb}_file") for verb in ("load", "save"))

SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
    "short_factor": [1.0 + 0.1 * k for k in range(8)], "long_factor": [2.0 + 3 * k for k in range(8)],
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 12, "mamba_d_head": 16, "shared_intermediate_size": 80}
HYBRID = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5,
    "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
}  # fmt: skip
EXPERTS = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 24
}  # fmt: skip
LATENT = {"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4}
ROUTED = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
GEMMA4 = {
    "num_hidden_layers": 6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 5, "head_dim": 16, "global_head_dim": 24, "vocab_size_per_layer_input": 101,
    "hidden_size_per_layer_input": 0, "final_logit_softcapping": 3.0, "pad_token_id": 0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama, heads of their own": ("LlamaConfig", {"num_key_value_heads": 4, "head_dim": 24}),
    "llama, tied, llama3 rope": ("LlamaConfig", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama, all biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama, yarn rope": ("LlamaConfig", {"rope_parameters": YARN}),
    "llama, linear rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "mistral, window": ("MistralConfig", {"sliding_window": 8}),
    "mistral, no window": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2, windows in upper layers": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3, biases": ("Qwen3Config", {"head_dim": 32, "attention_bias": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "gemma3, biases": ("Gemma3TextConfig", {"head_dim": 32, "sliding_window": 8, "attention_bias": True}),
    "gemma3": (
        "Gemma3TextConfig",
        {"num_hidden_layers": 7, "head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24},
    ),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 5, "pad_token_id": 0}),
    "smollm3, layers that do not turn": (
        "SmolLM3Config",
        {"no_rope_layers": [0, 1, 0], "tie_word_embeddings": False, "pad_token_id": 0},
    ),
    "gemma": ("GemmaConfig", {"head_dim": 32}),
    "gemma, one head of keys": ("GemmaConfig", {"head_dim": 32, "num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2Config",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma2, nothing capped": (
        "Gemma2Config",
        {"head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "phi3, window": ("Phi3Config", {"sliding_window": 8, "pad_token_id": 0}),
    "phi3, half of each head turned": (
        "Phi3Config",
        {"pad_token_id": 0, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "phi3, beyond its original context": (
        "Phi3Config",
        {"pad_token_id": 0, "original_max_position_embeddings": 64, "rope_parameters": LONGROPE},
    ),
    "granite": (
        "GraniteConfig",
        {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 8.0},
    ),
    "granite, biases": ("GraniteConfig", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2Config", {}),
    "olmo2, biases": ("Olmo2Config", {"attention_bias": True, "tie_word_embeddings": True}),
    "olmo3": ("Olmo3Config", {"num_hidden_layers": 5, "sliding_window": 8, "rope_parameters": YARN}),
    "mixtral, window": ("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 8}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 80,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe, every second layer": (
        "Qwen3MoeConfig",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen3_moe, all experts": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 2, "eos_token_id": 1}),
    "granitemoe": (
        "GraniteMoeConfig",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "residual_multiplier": 0.22, "logits_scaling": 8.0},
    ),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        {"num_local_experts": 5, "num_experts_per_tok": 1, "shared_intermediate_size": 40},
    ),
    "starcoder2, window": ("Starcoder2Config", {"sliding_window": 8}),
    "starcoder2, not tied": ("Starcoder2Config", {"tie_word_embeddings": False, "hidden_act": "gelu"}),
    "phi": ("PhiConfig", {"num_key_value_heads": 4}),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True}),
    "stablelm, parallel": ("StableLmConfig", {"use_parallel_residual": True, "pad_token_id": 0}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": 4}),
    "gpt_neox, one after the other": (
        "GPTNeoXConfig",
        {"num_key_value_heads": 4, "use_parallel_residual": False, "rotary_pct": 0.5},
    ),
    "gpt_neox, tied": ("GPTNeoXConfig", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 8, "pad_token_id": 0},
    ),
    "gpt_oss, other layers": (
        "GptOssConfig",
        {
            "head_dim": 32,
            "num_local_experts": 3,
            "num_experts_per_tok": 3,
            "sliding_window": 5,
            "pad_token_id": 0,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 15e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    ),
    "cohere": ("CohereConfig", {"pad_token_id": 0}),
    "cohere2": ("Cohere2Config", {"pad_token_id": 0, "num_hidden_layers": 5, "sliding_window": 8}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 24}),
    "ernie4_5, biases": ("Ernie4_5Config", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": False}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 24, "pad_token_id": 0}),
    "seed_oss, other biases": (
        "SeedOssConfig",
        {"head_dim": 16, "pad_token_id": 0, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "glm": ("GlmConfig", {"head_dim": 32, "pad_token_id": 0}),
    "glm4": ("Glm4Config", {"head_dim": 32, "pad_token_id": 0}),
    "glm4, no biases": ("Glm4Config", {"head_dim": 16, "pad_token_id": 0, "attention_bias": False}),
    "hunyuan": ("HunYuanDenseV1Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "hunyuan, a stretched base": (
        "HunYuanDenseV1Config",
        {
            "head_dim": 24,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0},
        },
    ),
    "exaone4": ("Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "exaone4, windows": ("Exaone4Config", {"num_hidden_layers": 5, "sliding_window": 8}),
    "arcee": ("ArceeConfig", {"attention_bias": True}),
    "arcee, mlp biases": ("ArceeConfig", {"mlp_bias": True, "tie_word_embeddings": True}),
    "ministral": (
        "MinistralConfig",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
        },
    ),
    "ministral3": (
        "Ministral3Config",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "ministral3, another attention factor": (
        "Ministral3Config",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"], "pad_token_id": 0}),
    "lfm2, biases, four tokens": (
        "Lfm2Config",
        {
            "num_hidden_layers": 4,
            "full_attn_idxs": [2],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.3,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
        },
    ),
    "lfm2, all layers attend": ("Lfm2Config", {"block_auto_adjust_ff_dim": False, "pad_token_id": 0}),
    "lfm2 with experts": (
        "Lfm2MoeConfig",
        {
            **ROUTED,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "lfm2 with experts, not balanced": (
        "Lfm2MoeConfig",
        {
            **ROUTED,
            "layer_types": ["full_attention"] * 3,
            "num_dense_layers": 0,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "tie_word_embeddings": False,
        },
    ),
    "ernie4_5 with experts": ("Ernie4_5_MoeConfig", {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 40}),
    "ernie4_5 with experts in every second layer, none for all": (
        "Ernie4_5_MoeConfig",
        {
            "num_hidden_layers": 5,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 40,
            "moe_num_shared_experts": 0,
            "moe_layer_start_index": 2,
            "moe_layer_interval": 2,
            "use_bias": False,
        },
    ),
    "glm 4.5": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "glm 4.5, experts in groups": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "n_group": 4,
            "topk_group": 2,
            "head_dim": 24,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
        },
    ),
    "deepseek v2, without experts": (
        "DeepseekV2Config",
        {**LATENT, "num_key_value_heads": 4, "q_lora_rank": None, "first_k_dense_replace": 3, "num_experts_per_tok": 2},
    ),
    "deepseek v2, as lite": (
        "DeepseekV2Config",
        {
            **LATENT,
            "q_lora_rank": None,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek v3": (
        "DeepseekV3Config",
        {
            **LATENT,
            "q_lora_rank": 40,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        },
    ),
    "youtu": ("YoutuConfig", {**LATENT, "q_lora_rank": 40}),
    "glm 4.7 flash": (
        "Glm4MoeLiteConfig",
        {
            **LATENT,
            "v_head_dim": 20,
            "q_lora_rank": 40,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "qwen3.5": ("Qwen3_5TextConfig", {**HYBRID, "full_attention_interval": 3}),
    "qwen3.5, heads of keys for each, tied": (
        "Qwen3_5TextConfig",
        {
            **HYBRID,
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 3,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        },
    ),
    "qwen3.5 with experts": ("Qwen3_5MoeTextConfig", {**HYBRID, **EXPERTS, "full_attention_interval": 3}),
    "qwen3-next": ("Qwen3NextConfig", {**HYBRID, **EXPERTS, "num_hidden_layers": 4, "pad_token_id": 0}),
    "granite 4, state spaces": (
        "GraniteMoeHybridConfig",
        {**MAMBA, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_local_experts": 0},
    ),
    "granite 4, state spaces in groups, experts": (
        "GraniteMoeHybridConfig",
        {
            **MAMBA,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "mamba_n_groups": 2,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "num_local_experts": 5,
            "intermediate_size": 40,
            "residual_multiplier": 0.3,
            "position_embedding_type": "rope",
            "mamba_d_conv": 3,
        },
    ),
    "gemma4, inputs of layers, shared keys, wide mlps": (
        "Gemma4TextConfig",
        {**GEMMA4, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    ),
    "gemma4, inputs of layers, all local layers share": (
        "Gemma4TextConfig",
        {
            **GEMMA4,
            "layer_types": ["sliding_attention", *["full_attention"] * 2, "sliding_attention", *["full_attention"] * 2],
            "hidden_size_per_layer_input": 12,
            "num_kv_shared_layers": 4,
            "attention_bias": True,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4, keys for values": (
        "Gemma4TextConfig",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 4,
        },
    ),
    "gemma4, other rotary embeddings": (
        "Gemma4TextConfig",
        {
            **GEMMA4,
            "num_hidden_layers": 3,
            "layer_types": None,
            "num_global_key_value_heads": 1,  # of keys for values alone
            "use_bidirectional_attention": "vision",
            "rope_parameters": {
                "sliding_attention": {"rope_type": "linear", "rope_theta": 5e3, "factor": 2.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1e5,
                    "partial_rotary_factor": 0.3,
                    "factor": 4.0,
                },
            },
        },
    ),
    "gemma4, experts": (
        "Gemma4TextConfig",
        {
            **GEMMA4,
            "num_hidden_layers": 3,
            "layer_types": GEMMA4["layer_types"][:3],
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
        },
    ),
    "gemma4 unified": ("Gemma4UnifiedTextConfig", {**GEMMA4, "attention_k_eq_v": True, "num_kv_shared_layers": 1}),
    "granite 4": (
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["attention"] * 3,
            "num_local_experts": 0,
            "shared_intermediate_size": 80,
            "position_embedding_type": "rope",
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
        },
    ),
    "granite 4, nothing turned": (
        "GraniteMoeHybridConfig",
        {"layer_types": ["attention"] * 3, "num_local_experts": 0, "shared_intermediate_size": 40},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    kind, options = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**SIZES, **options})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    scales = [buffer for name, buffer in model.named_buffers() if name.endswith("layer_scalar")]
    for parameter in (*model.parameters(), *scales):
        parameter.data.add_(0.02 * torch.randn_like(parameter))  # norms and biases too
    for buffer in (found for name, found in model.named_buffers() if name.endswith("bias")):  # that choose experts
        buffer.add_(0.1 * torch.randn_like(buffer))
    model.save_pretrained(tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    shapes = ((1, 1), (2, 7), (1, 70))
    contexts = {shape: checkpoint.config.context for shape in shapes}
    if checkpoint.config.default_context:  # beyond it another rotary embedding is used, for all positions
        contexts = {(batch, seq): 64 if seq <= 64 else 256 for batch, seq in shapes}
    for context in set(contexts.values()):
        config = replace(checkpoint.config, context=context)
        exe = rl.compile(build_dense(replace(checkpoint, config=config)))
        for batch, seq in (shape for shape in shapes if contexts[shape] == context):
            tokens = np.random.default_rng(seq).integers(0, SIZES["vocab_size"], (batch, seq))
            wanted = model(torch.tensor(tokens)).logits.detach().numpy()
            np.testing.assert_allclose(exe(tokens), wanted, atol=2e-5 * np.abs(wanted).max())


def test_qwen3_5_with_what_sees_pictures(tmp_path: Path) -> None:
    """Its config.json says of the whole model that the embedding makes the logits, and of its text that not."""
    torch.manual_seed(0)
    text = {**SIZES, **HYBRID, "full_attention_interval": 3}
    seen = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=seen, tie_word_embeddings=True)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval().float()
    for parameter in model.parameters():
        parameter.data.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["tie_word_embeddings"] and not said["text_config"]["tie_word_embeddings"]
    tokens = np.random.default_rng(0).integers(0, 101, (2, 9))
    wanted = model(input_ids=torch.tensor(tokens)).logits.detach().numpy()
    found = rl.compile(build_dense(read_checkpoint(tmp_path)))(tokens)
    np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())


SEEN = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
HEARD = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 24}


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("Gemma4Config", {"vision_config": {**SEEN, "num_key_value_heads": 2}, "audio_config": HEARD}),
        ("Gemma4UnifiedConfig", {"vision_config": {"mm_embed_dim": 24}, "audio_config": {"audio_embed_dim": 24}}),
    ],
)
def test_gemma4_with_what_sees_and_hears(kind: str, parts: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    text = {**SIZES, **GEMMA4, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    config = getattr(transformers, kind)(text_config=text, **parts)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval().float()
    model.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    published = {**said["text_config"], "global_head_dim": 24, "num_global_key_value_heads": None}
    del published["per_layer_config"]  # which transformers writes, and published folders do not have
    (tmp_path / "config.json").write_text(json.dumps({**said, "text_config": published}))
    tokens = np.random.default_rng(0).integers(0, 101, (2, 9))
    wanted = model(input_ids=torch.tensor(tokens)).logits.detach().numpy()
    found = rl.compile(build_dense(read_checkpoint(tmp_path)))(tokens)
    np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())


def test_pythia_with_the_masks_of_attention_among_its_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = transformers.GPTNeoXConfig(**sizes, vocab_size=50, max_position_embeddings=16)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    of_layers = {
        "attention.bias": torch.ones(1, 1, 16, 16, dtype=torch.bool), "attention.masked_bias": torch.tensor(-1e9),
        "attention.rotary_emb.inv_freq": torch.ones(2),
    }  # fmt: skip
    masks = {f"gpt_neox.layers.{k}.{name}": value.clone() for k in range(2) for name, value in of_layers.items()}
    save_file(masks | load_file(path), path)
    described = json.loads((tmp_path / "config.json").read_text())
    del described["rope_parameters"]  # as old files say it
    (tmp_path / "config.json").write_text(json.dumps({**described, "rotary_pct": 0.25, "rotary_emb_base": 10000}))
    tokens = np.arange(10)[None]
    wanted = model(torch.tensor(tokens)).logits.detach().numpy()
    found = rl.compile(build_dense(read_checkpoint(tmp_path)))(tokens)
    np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())


def test_gpt_oss_with_the_experts_of_its_own_folders(tmp_path: Path) -> None:
    """In MXFP4: codes of neighbours in a byte, and scales in a tensor of their own."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    torch.manual_seed(0)
    options = CASES["gpt_oss"][1] | {"hidden_size": 64, "intermediate_size": 96}
    config = transformers.GptOssConfig(**{**SIZES, **options})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    model.save_pretrained(tmp_path)
    path, rng = tmp_path / "model.safetensors", np.random.default_rng(0)
    weights = load_file(path)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = weights.pop(name).shape
        blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16), np.uint8)
        scales = rng.integers(121, 125, (experts, rows, columns // 32)).astype(np.uint8)
        weights |= {f"{name}_blocks": torch.tensor(blocks), f"{name}_scales": torch.tensor(scales)}
        of = model.get_parameter(name)
        of.data = mxfp4.convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
        assert of.shape == (experts, columns, rows)
    save_file(weights, path)
    described = json.loads((tmp_path / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(described))
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.weights["layers.1.experts.3.up"].block_format == "MXFP4"
    exe = rl.compile(build_dense(checkpoint), precision="float32")
    tokens = rng.integers(0, SIZES["vocab_size"], (2, 30))
    wanted = model(torch.tensor(tokens)).logits.detach().numpy()
    np.testing.assert_allclose(exe(tokens), wanted, atol=2e-5 * np.abs(wanted).max())
    del weights["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(weights, path)
    with pytest.raises(ImportModelError, match=r"down_blocks has shape .* bytes \(5, 64, 3\) as scales, got None"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("kind", "begin"), [("glm 4.5", "model.layers.3."), ("ernie4_5 with experts", "model.mtp_block.0.")]
)
def test_layers_that_guess_tokens_ahead_are_left_out(kind: str, begin: str, tmp_path: Path) -> None:
    """As published folders have them behind the layers; transformers leaves them out, too."""
    name, options = CASES[kind]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**{**SIZES, **options}))
    model.save_pretrained(tmp_path)
    alone = read_checkpoint(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    ahead = {key.replace("model.layers.2.", begin): w.clone() for key, w in weights.items() if "layers.2." in key}
    ahead[f"{begin}eh_proj.weight"] = torch.ones(64, 128)
    save_file(weights | ahead, tmp_path / "model.safetensors")
    found = read_checkpoint(tmp_path)
    assert (found.config, list(found.weights)) == (alone.config, list(alone.weights))


def test_gpt2_as_its_first_files_name_the_weights(tmp_path: Path) -> None:
    """Without "transformer." before the names, and with the masks of attention among them."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 50}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    model.transformer.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = {f"h.{k}.attn.bias": torch.ones(1, 1, 16, 16) for k in range(2)}
    save_file(weights | load_file(path), path)
    tokens = np.arange(10)[None]
    wanted = model(torch.tensor(tokens)).logits.detach().numpy()
    found = rl.compile(build_dense(read_checkpoint(tmp_path)))(tokens)
    np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    short = rl.llm.compile(tmp_path, max_context=12, quantize="q8_0")
    assert short.context == 12 and len(short.generate([1, 2, 3], max_new_tokens=9).tokens) == 9
