"""Hugging Face folders: published config.json files are described rightly; weights, shards and tokenizers are found."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.checkpoint import Weight, split_fused
from relaxlite.frontend.llm.config import (
    Convolutions,
    DecoderConfig,
    Experts,
    LatentAttention,
    Rope,
    RopeScaling,
    StateLayers,
)
from relaxlite.frontend.llm.hf_folder import describe
from relaxlite.frontend.llm.read import read_checkpoint
from relaxlite.llm.tokenizer import Tokenizer
from tests.support import tiers
from tests.support.tiny_llm import tokenizer_json

LLAMA3_SCALING = {
    "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
GEMMA3_LOCAL = tuple((k + 1) % 6 != 0 for k in range(34))
GEMMA4_ROPES = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
GEMMA4_ROPE = Rope(1e6, 512, divisors=(1.0,) * 64 + (math.inf,) * 192)
GEMMA4: dict[str, Any] = {
    "has_qk_norm": True, "has_value_norm": True, "has_post_norms": True, "query_scale": 1.0, "logit_cap": 30.0,
    "local_rope": Rope(1e4, 256), "local_head_width": 256, "has_layer_scale": True,
}  # fmt: skip
PLAIN: dict[str, Any] = {"is_gated": False, "has_qkv_bias": True, "has_o_bias": True, "has_mlp_bias": True}
PUBLISHED: dict[str, tuple[dict[str, Any], DecoderConfig]] = {
    "TinyLlama-1.1B-Chat": (
        {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
         "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632,
         "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 22,
         "num_key_value_heads": 4, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
         "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32000},
        DecoderConfig("llama", 32000, 2048, 22, 32, 4, 64, 5632, 2048, 1e-5, Rope(1e4, 64), False),
    ),
    "SmolLM2-135M-Instruct": (
        {"attention_bias": False, "hidden_act": "silu", "hidden_size": 576, "intermediate_size": 1536,
         "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama",
         "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "rms_norm_eps": 1e-05,
         "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
         "vocab_size": 49152},
        DecoderConfig("llama", 49152, 576, 30, 9, 3, 64, 1536, 8192, 1e-5, Rope(1e5, 64), True),
    ),
    "Llama-3.2-1B": (
        {"attention_bias": False, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
         "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
         "num_hidden_layers": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": LLAMA3_SCALING,
         "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256},
        DecoderConfig(
            "llama", 128256, 2048, 16, 32, 8, 64, 8192, 131072, 1e-5,
            Rope(5e5, 64, RopeScaling("llama3", 32.0, 8192, 1.0, 4.0)), True,
        ),
    ),
    "Mistral-7B-v0.1": (
        {"hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
         "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
         "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
         "vocab_size": 32000},
        DecoderConfig(
            "mistral", 32000, 4096, 32, 32, 8, 128, 14336, 32768, 1e-5, Rope(1e4, 128), False, window=4096
        ),
    ),
    "Mistral-7B-v0.3": (
        {"head_dim": None, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
         "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
         "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
         "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32768},
        DecoderConfig("mistral", 32768, 4096, 32, 32, 8, 128, 14336, 32768, 1e-5, Rope(1e6, 128), False),
    ),
    "Qwen2.5-0.5B-Instruct": (
        {"hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
         "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
         "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
         "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936},
        DecoderConfig(
            "qwen2", 151936, 896, 24, 14, 2, 64, 4864, 32768, 1e-6, Rope(1e6, 64), True, has_qkv_bias=True
        ),
    ),
    "Qwen3-0.6B": (
        {"attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
         "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
         "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
         "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
         "use_sliding_window": False, "vocab_size": 151936},
        DecoderConfig(
            "qwen3", 151936, 1024, 28, 16, 8, 128, 3072, 40960, 1e-6, Rope(1e6, 128), True, has_qk_norm=True
        ),
    ),
    "gemma-3-1b-it": (
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 256,
         "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
         "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
         "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
         "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
         "sliding_window_pattern": 6, "vocab_size": 262144},
        DecoderConfig(
            "gemma3", 262144, 1152, 26, 4, 1, 256, 6912, 32768, 1e-6, Rope(1e6, 256), True, "gelu_tanh",
            has_qk_norm=True, has_post_norms=True, query_scale=256**-0.5,
            embedding_scale=float(np.float32(1152**0.5)), window=512, is_local=GEMMA3_LOCAL[:26],
            local_rope=Rope(1e4, 256),
        ),
    ),
    "gemma-3-4b-it": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eos_token_id": [1, 106],
         "image_token_index": 262144, "mm_tokens_per_image": 256, "model_type": "gemma3",
         "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                         "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                         "sliding_window": 1024},
         "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27}},
        DecoderConfig(
            "gemma3", 262208, 2560, 34, 8, 4, 256, 10240, 131072, 1e-6,
            Rope(1e6, 256, RopeScaling("linear", 8.0)), True, "gelu_tanh", has_qk_norm=True, has_post_norms=True,
            query_scale=256**-0.5, embedding_scale=float(np.float32(2560**0.5)), window=1024, is_local=GEMMA3_LOCAL,
            local_rope=Rope(1e4, 256),
        ),
    ),
    "Qwen3-30B-A3B": (
        {"attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
         "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
         "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
         "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
         "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None,
         "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936},
        DecoderConfig(
            "qwen3_moe", 151936, 2048, 48, 32, 4, 128, 6144, 40960, 1e-6, Rope(1e6, 128), False, has_qk_norm=True,
            experts=Experts(128, 8, 768, True),
        ),
    ),
    "ERNIE-4.5-0.3B-PT": (
        {"head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
         "max_position_embeddings": 131072, "model_type": "ernie4_5", "num_attention_heads": 16,
         "num_hidden_layers": 18, "num_key_value_heads": 2, "rms_norm_eps": 1e-05, "rope_scaling": None,
         "rope_theta": 500000.0, "tie_word_embeddings": True, "use_bias": False, "vocab_size": 103424},
        DecoderConfig("ernie4_5", 103424, 1024, 18, 16, 2, 128, 3072, 131072, 1e-5, Rope(5e5, 128), True),
    ),
    "GLM-4-9B-0414": (
        {"attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
         "intermediate_size": 13696, "max_position_embeddings": 32768, "model_type": "glm4",
         "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2, "partial_rotary_factor": 0.5,
         "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 151552},
        DecoderConfig(
            "glm4", 151552, 4096, 40, 32, 2, 128, 13696, 32768, 1e-5, Rope(1e4, 64), False, has_post_norms=True
        ),
    ),
    "Hunyuan-0.5B-Instruct": (
        {"attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
         "intermediate_size": 3584, "max_position_embeddings": 262144, "mlp_bias": False,
         "model_type": "hunyuan_v1_dense", "num_attention_heads": 16, "num_hidden_layers": 24,
         "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
         "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
                          "mscale_all_dim": 1.0, "type": "dynamic"},
         "tie_word_embeddings": True, "use_cla": False, "use_qk_norm": True, "vocab_size": 120818},
        DecoderConfig(
            "hunyuan_v1_dense", 120818, 1024, 24, 16, 8, 128, 3584, 262144, 1e-5,
            Rope(1e4 * 1000 ** (128 / 126), 128), True, has_qk_norm=True, is_qk_norm_last=True,
        ),
    ),
    "EXAONE-4.0-1.2B": (
        {"head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 4096,
         "layer_types": ["full_attention"] * 30, "max_position_embeddings": 65536, "model_type": "exaone4",
         "num_attention_heads": 32, "num_hidden_layers": 30, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
         "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                          "original_max_position_embeddings": 8192, "rope_type": "llama3"},
         "rope_theta": 1000000, "sliding_window": None, "sliding_window_pattern": None, "tie_word_embeddings": True,
         "vocab_size": 102400},
        DecoderConfig(
            "exaone4", 102400, 2048, 30, 32, 8, 64, 4096, 65536, 1e-5,
            Rope(1e6, 64, RopeScaling("llama3", 16.0, 8192, 1.0, 4.0)), True, has_qk_norm=True, has_pre_norms=False,
            has_post_norms=True,
        ),
    ),
    "LFM2-350M": (
        {"block_auto_adjust_ff_dim": True, "block_dim": 1024, "block_ff_dim": 6656, "block_ffn_dim_multiplier": 1.0,
         "block_multiple_of": 256, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 1024,
         "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 1024, "max_position_embeddings": 128000,
         "model_type": "lfm2", "norm_eps": 1e-05, "num_attention_heads": 16, "num_heads": 16, "num_hidden_layers": 16,
         "num_key_value_heads": 8, "rope_theta": 1000000.0, "vocab_size": 65536},
        DecoderConfig(
            "lfm2", 65536, 1024, 16, 16, 8, 64, 4608, 128000, 1e-5, Rope(1e6, 64), True, has_qk_norm=True,
            convolutions=Convolutions(3, tuple(k not in (2, 5, 8, 10, 12, 14) for k in range(16))),
        ),
    ),
    "LFM2-8B-A1B": (
        {"conv_L_cache": 3, "conv_bias": False, "hidden_size": 2048, "intermediate_size": 7168,
         "layer_types": ["full_attention" if k in (2, 6, 10, 14, 18, 21) else "conv" for k in range(24)],
         "max_position_embeddings": 128000, "model_type": "lfm2_moe", "moe_intermediate_size": 1792, "norm_eps": 1e-05,
         "norm_topk_prob": True, "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32,
         "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "rope_theta": 1000000.0,
         "routed_scaling_factor": 1.0, "use_expert_bias": True, "vocab_size": 65536},
        DecoderConfig(
            "lfm2_moe", 65536, 2048, 24, 32, 8, 64, 7168, 128000, 1e-5, Rope(1e6, 64), True, has_qk_norm=True,
            convolutions=Convolutions(3, tuple(k not in (2, 6, 10, 14, 18, 21) for k in range(24))),
            experts=Experts(
                32, 4, 1792, True, layers=tuple(k >= 2 for k in range(24)), scores="sigmoid", is_balanced=True
            ),
        ),
    ),
    "ERNIE-4.5-21B-A3B-PT": (
        {"hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 12288, "max_position_embeddings": 131072,
         "model_type": "ernie4_5_moe", "moe_capacity": [64, 64, 64], "moe_intermediate_size": 1536, "moe_k": 6,
         "moe_layer_end_index": 27, "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64,
         "moe_num_shared_experts": 2, "moe_use_aux_free": True, "num_attention_heads": 20, "num_hidden_layers": 28,
         "num_key_value_heads": 4, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
         "rope_theta": 500000.0, "tie_word_embeddings": True, "use_bias": False, "vocab_size": 103424},
        DecoderConfig(
            "ernie4_5_moe", 103424, 2560, 28, 20, 4, 128, 12288, 131072, 1e-5, Rope(5e5, 128), True,
            experts=Experts(
                64, 6, 1536, True, 3072, layers=tuple(k >= 1 for k in range(28)), is_balanced=True
            ),
        ),
    ),
    "GLM-4.5-Air": (
        {"attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
         "intermediate_size": 10944, "max_position_embeddings": 131072, "model_type": "glm4_moe",
         "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
         "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
         "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
         "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False,
         "topk_group": 1, "use_qk_norm": False, "vocab_size": 151552},
        DecoderConfig(
            "glm4_moe", 151552, 4096, 46, 96, 8, 128, 10944, 131072, 1e-5, Rope(1e6, 64), False, has_qkv_bias=True,
            experts=Experts(
                128, 8, 1408, True, 1408, layers=tuple(k >= 1 for k in range(46)), scores="sigmoid", is_balanced=True
            ),
        ),
    ),
    "DeepSeek-V2-Lite-Chat": (
        {"attention_bias": False, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
         "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
         "model_type": "deepseek_v2", "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
         "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
         "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
         "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
         "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                          "original_max_position_embeddings": 4096, "type": "yarn"},
         "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "tie_word_embeddings": False,
         "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128, "vocab_size": 102400},
        DecoderConfig(
            "deepseek_v2", 102400, 2048, 27, 16, 1, 576, 10944, 163840, 1e-6,
            Rope(1e4, 64, RopeScaling("yarn", 40.0, 4096, attention_factor=1.0)), False,
            latent=LatentAttention(512, 128, 64, 128, None, 1e-6),
            query_scale=192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2,
            experts=Experts(64, 6, 1408, False, 2816, layers=tuple(k >= 1 for k in range(27))),
        ),
    ),
    "GLM-4.7-Flash": (
        {"attention_bias": False, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
         "intermediate_size": 10240, "kv_lora_rank": 512, "max_position_embeddings": 202752,
         "model_type": "glm4_moe_lite", "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64,
         "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 20, "num_experts_per_tok": 4,
         "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1, "q_lora_rank": 768,
         "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None,
         "rope_theta": 1000000, "routed_scaling_factor": 1.8, "tie_word_embeddings": False, "topk_group": 1,
         "topk_method": "noaux_tc", "v_head_dim": 256, "vocab_size": 154880},
        DecoderConfig(
            "glm4_moe_lite", 154880, 2048, 47, 20, 1, 576, 10240, 202752, 1e-5, Rope(1e6, 64), False,
            latent=LatentAttention(512, 192, 64, 256, 768, 1e-6), query_scale=256**-0.5,
            experts=Experts(
                64, 4, 1536, True, 1536, layers=tuple(k >= 1 for k in range(47)), scores="sigmoid", is_balanced=True,
                scale=1.8,
            ),
        ),
    ),
    "Qwen3.5-0.8B": (
        {"image_token_id": 248056, "model_type": "qwen3_5", "tie_word_embeddings": True, "vision_config": {"depth": 12},
         "text_config": {"attention_bias": False, "attn_output_gate": True, "full_attention_interval": 4,
                         "head_dim": 256, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3584,
                         "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6, "linear_conv_kernel_dim": 4,
                         "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
                         "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [],
                         "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1, "num_attention_heads": 8,
                         "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
                         "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10],
                                             "partial_rotary_factor": 0.25, "rope_theta": 1e7, "rope_type": "default"},
                         "vocab_size": 248320}},
        DecoderConfig(
            "qwen3_5", 248320, 1024, 24, 8, 2, 256, 3584, 262144, 1e-6, Rope(1e7, 64), True, has_qk_norm=True,
            has_output_gate=True, states=StateLayers("delta", 16, 16, 128, 128, 4, (True, True, True, False) * 6),
        ),
    ),
    "gemma-4-E2B-it": (
        {"architectures": ["Gemma4ForConditionalGeneration"], "audio_config": {"hidden_size": 1024},
         "audio_token_id": 258881, "eos_token_id": [1, 106], "image_token_id": 258880, "model_type": "gemma4",
         "text_config": {"attention_bias": False, "attention_k_eq_v": False, "enable_moe_block": False,
                         "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
                         "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1536,
                         "hidden_size_per_layer_input": 256, "intermediate_size": 6144,
                         "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
                         "max_position_embeddings": 131072, "model_type": "gemma4_text", "num_attention_heads": 8,
                         "num_global_key_value_heads": None, "num_hidden_layers": 35, "num_key_value_heads": 1,
                         "num_kv_shared_layers": 20, "rms_norm_eps": 1e-6, "rope_parameters": GEMMA4_ROPES,
                         "sliding_window": 512, "tie_word_embeddings": True, "use_bidirectional_attention": None,
                         "use_double_wide_mlp": True, "vocab_size": 262144, "vocab_size_per_layer_input": 262144},
         "vision_config": {"hidden_size": 768, "model_type": "gemma4_vision"}},
        DecoderConfig(
            "gemma4", 262144, 1536, 35, 8, 1, 512, 6144, 131072, 1e-6, GEMMA4_ROPE, True, "gelu_tanh",
            **{**GEMMA4, "embedding_scale": float(np.float32(1536**0.5)), "window": 512},
            is_local=(*(True,) * 4, False) * 7, local_kv_heads=1, intermediates=(6144,) * 15 + (12288,) * 20,
            kv_shared_from=(*range(15), *(13, 13, 13, 13, 14) * 4), per_layer_input=256,
        ),
    ),
    "gemma-4-26B-A4B-it, its text": (
        {"attention_bias": False, "attention_k_eq_v": True, "enable_moe_block": True, "final_logit_softcapping": 30.0,
         "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2816,
         "hidden_size_per_layer_input": 0, "intermediate_size": 2112,
         "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5, "max_position_embeddings": 262144,
         "model_type": "gemma4_text", "moe_intermediate_size": 704, "num_attention_heads": 16, "num_experts": 128,
         "num_global_key_value_heads": 2, "num_hidden_layers": 30, "num_key_value_heads": 8,
         "num_kv_shared_layers": 0, "per_layer_config": None, "rms_norm_eps": 1e-6, "rope_parameters": GEMMA4_ROPES,
         "sliding_window": 1024, "tie_word_embeddings": True, "top_k_experts": 8,
         "use_bidirectional_attention": "vision", "use_double_wide_mlp": False, "vocab_size": 262144},
        DecoderConfig(
            "gemma4", 262144, 2816, 30, 16, 2, 512, 2112, 262144, 1e-6, GEMMA4_ROPE, True, "gelu_tanh",
            **{**GEMMA4, "embedding_scale": float(np.float32(2816**0.5)), "window": 1024},
            is_local=(*(True,) * 5, False) * 5, local_kv_heads=8, k_is_v_layers=(*(False,) * 5, True) * 5,
            experts=Experts(128, 8, 704, True, has_dense_mlp=True, has_output_scales=True),
        ),
    ),
    "gpt2": (
        {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "model_type": "gpt2", "n_ctx": 1024,
         "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257},
        DecoderConfig(
            "gpt2", 50257, 768, 12, 12, 12, 64, 3072, 1024, 1e-5, Rope(1e4, 64), True, "gelu_tanh",
            norm="layer_biased", has_positions=True, nope_layers=(True,) * 12, **PLAIN,
        ),
    ),
    "phi-2": (
        {"hidden_act": "gelu_new", "hidden_size": 2560, "intermediate_size": 10240, "layer_norm_eps": 1e-5,
         "max_position_embeddings": 2048, "model_type": "phi", "num_attention_heads": 32, "num_hidden_layers": 32,
         "num_key_value_heads": 32, "partial_rotary_factor": 0.4, "qk_layernorm": False, "rope_scaling": None,
         "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 51200},
        DecoderConfig(
            "phi", 51200, 2560, 32, 32, 32, 80, 10240, 2048, 1e-5, Rope(1e4, 32), False, "gelu_tanh",
            norm="layer_biased", is_parallel=True, has_one_norm=True, has_head_bias=True, **PLAIN,
        ),
    ),
    "gpt-oss-20b": (
        {"attention_bias": True, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
         "initial_context_length": 4096, "intermediate_size": 2880,
         "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
         "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
         "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-5,
         "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                          "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False},
         "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
         "vocab_size": 201088},
        DecoderConfig(
            "gpt_oss", 201088, 2880, 24, 64, 8, 64, 2880, 131072, 1e-5,
            Rope(150000.0, 64, RopeScaling("yarn", 32.0, 4096, truncates=False)), False, "gelu_sigmoid",
            has_qkv_bias=True, has_o_bias=True, gate_limit=7.0, has_sinks=True, window=128,
            is_local=(True, False) * 12, experts=Experts(32, 4, 2880, True, has_bias=True),
        ),
    ),
    "pythia-160m": (
        {"bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu", "hidden_size": 768, "intermediate_size": 3072,
         "layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 12,
         "num_hidden_layers": 12, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
         "use_parallel_residual": True, "vocab_size": 50304},
        DecoderConfig(
            "gpt_neox", 50304, 768, 12, 12, 12, 64, 3072, 2048, 1e-5, Rope(1e4, 16), False, "gelu",
            norm="layer_biased", is_parallel=True, **PLAIN,
        ),
    ),
    "Mixtral-8x7B-v0.1": (
        {"hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
         "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
         "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
         "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000},
        DecoderConfig(
            "mixtral", 32000, 4096, 32, 32, 8, 128, 14336, 32768, 1e-5, Rope(1e6, 128), False,
            experts=Experts(8, 2, 14336, True),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name: str) -> None:
    raw, wanted = PUBLISHED[name]
    assert describe(raw, name)[0] == wanted


def test_old_and_new_keys_of_rotary_embeddings_say_the_same() -> None:
    raw, wanted = PUBLISHED["TinyLlama-1.1B-Chat"]
    plain = {key: value for key, value in raw.items() if not key.startswith("rope")}
    spellings = [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    ]
    for more in spellings:
        config = describe({**plain, **more}, "x")[0]
        assert config.rope == Rope(5e5, 64, RopeScaling("linear", 2.0)) != wanted.rope
    raw = PUBLISHED["gemma-3-1b-it"][0]
    plain = {key: value for key, value in raw.items() if not key.startswith("rope")}
    sections = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    config = describe({**plain, "rope_parameters": sections}, "x")[0]
    assert config.rope == Rope(2e6, 256, RopeScaling("linear", 8.0))
    assert config.local_rope == Rope(2e4, 256)


def test_biases() -> None:
    raw = PUBLISHED["SmolLM2-135M-Instruct"][0]
    config = describe({**raw, "attention_bias": True, "mlp_bias": True}, "x")[0]
    assert (config.has_qkv_bias, config.has_o_bias, config.has_mlp_bias) == (True, True, True)
    config = describe({**PUBLISHED["Qwen2.5-0.5B-Instruct"][0]}, "x")[0]
    assert (config.has_qkv_bias, config.has_o_bias, config.has_mlp_bias) == (True, False, False)


def test_gemma_has_a_matrix_of_logits_of_its_own_where_it_says_so() -> None:
    for name in ("gemma", "gemma2", "gemma3_text"):
        raw = {**PUBLISHED["gemma-3-1b-it"][0], "model_type": name, "hidden_act": "gelu_pytorch_tanh"}
        raw.pop("tie_word_embeddings", None)
        assert describe(raw, "x")[0].is_tied
        assert not describe({**raw, "tie_word_embeddings": False}, "x")[0].is_tied


def test_what_transformers_takes_where_a_config_says_nothing() -> None:
    raw = dict(PUBLISHED["gpt-oss-20b"][0])
    raw.pop("rope_scaling", None)
    raw.pop("rope_parameters", None)
    assert describe(raw, "x")[0].rope.scaling == RopeScaling("yarn", 32.0, 4096, truncates=False)
    raw = {**PUBLISHED["Mistral-7B-v0.3"][0], "model_type": "olmo3", "sliding_window": 4096}
    raw.pop("rope_theta")
    config = describe(raw, "x")[0]
    assert config.rope.base == 500000.0 and config.local_rope is not None and config.local_rope.base == 500000.0
    raw = {k: v for k, v in PUBLISHED["TinyLlama-1.1B-Chat"][0].items() if not k.startswith("rope")}
    config = describe({**raw, "model_type": "ministral3"}, "x")[0]
    assert config.query_log_scaling == (0.1, 16384) and config.rope.scaling is not None
    assert (config.rope.scaling.factor, config.rope.scaling.attention_factor) == (16.0, 1.0)
    raw = {key: value for key, value in PUBLISHED["Qwen3-30B-A3B"][0].items() if key != "head_dim"}
    assert describe(raw, "x")[0].head_width == 2048 // 32


@pytest.mark.parametrize("kind", ["gemma3_text", "olmo3"])
def test_local_layers_have_the_rotary_embedding_of_their_section(kind: str) -> None:
    sections = {
        "sliding_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 8.0},
        "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
    }
    raw = {**PUBLISHED["gemma-3-1b-it"][0], "model_type": kind, "hidden_act": "silu", "rope_parameters": sections}
    config = describe(raw, "x")[0]
    assert config.local_rope == Rope(20000.0, 256, RopeScaling("linear", 8.0))
    assert config.rope == Rope(500000.0, 256)


def test_gates_are_cut_where_the_checkpoint_says() -> None:
    raw = PUBLISHED["gpt-oss-20b"][0]
    assert describe({**raw, "swiglu_limit": 5.5}, "x")[0].gate_limit == 5.5
    assert describe({key: value for key, value in raw.items() if key != "swiglu_limit"}, "x")[0].gate_limit == 7.0


@pytest.mark.parametrize(
    ("name", "more", "problem"),
    [
        ("TinyLlama-1.1B-Chat", {"model_type": "rwkv7"}, "the architecture 'rwkv7' is not known; known are llama"),
        ("TinyLlama-1.1B-Chat", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu' is"),
        ("TinyLlama-1.1B-Chat", {"is_causal": False}, "is_causal = False is not supported, only True is"),
        ("TinyLlama-1.1B-Chat", {"num_hidden_layers": None}, "hyperparameter 'num_hidden_layers' is missing"),
        ("TinyLlama-1.1B-Chat", {"num_key_value_heads": 5}, "32 heads cannot share 5"),
        ("TinyLlama-1.1B-Chat", {"rope_scaling": {"type": "dynamic", "factor": 2}}, "scaled by 'dynamic' are not"),
        ("TinyLlama-1.1B-Chat", {"rope_scaling": {"type": "linear"}}, r"factor of the rotary embedding \(linear\)"),
        ("TinyLlama-1.1B-Chat", {"quantization_config": {"quant_method": "hqq"}}, "quantized by 'hqq' are not read"),
        ("TinyLlama-1.1B-Chat", {"quantization_config": {"quant_method": "mxfp4"}}, "quantized by 'mxfp4' are not re"),
        ("gpt-oss-20b", {"quantization_config": {"quant_method": ["x"]}}, r"quantized by \['x'\] are not read"),
        ("gpt-oss-20b", {"quantization_config": {"bits": 4}}, "quantized by None are not read"),
        ("gpt-oss-20b", {"swiglu_limit": -1}, "the hyperparameter 'swiglu_limit' is -1; it must be a positive number"),
        (
            "TinyLlama-1.1B-Chat",
            {"rope_scaling": {**LLAMA3_SCALING, "original_max_position_embeddings": "x"}},
            r"original_max_position_embeddings of the rotary embedding \(llama3\) is 'x'",
        ),
        (
            "Qwen2.5-0.5B-Instruct",
            {"use_sliding_window": True, "max_window_layers": "x"},
            "max_window_layers is 'x', no integer",
        ),
        (
            "TinyLlama-1.1B-Chat",
            {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 1}},
            "longrope needs an original context of more than 1",
        ),
        (
            "TinyLlama-1.1B-Chat",
            {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 64, "short_factor": "x"}},
            "short_factor of the rotary embedding",
        ),
        (
            "TinyLlama-1.1B-Chat",
            {
                "rope_scaling": {
                    "type": "longrope",
                    "original_max_position_embeddings": 64,
                    "short_factor": [1.0],
                    "long_factor": [2.0],
                }
            },
            "64 elements of a head are turned, so that short_factor and long_factor need 32 numbers, got 1 and 1",
        ),
        ("gemma-3-1b-it", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not"),
        ("gemma-3-1b-it", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
        ("gemma-3-1b-it", {"layer_types": ["full_attention"]}, "layer_types must name"),
        ("phi-2", {"hidden_act": ["gelu"]}, r"hidden_act = \['gelu'\] is not known; known are silu, gelu, gelu_new"),
        ("gpt2", {"activation_function": "relu"}, "activation_function = 'relu' is not known; known are silu, gelu"),
        (
            "gpt2",
            {"layer_norm_epsilon": 0},
            "the hyperparameter 'layer_norm_epsilon' is 0; it must be a positive number",
        ),
        ("gpt2", {"n_layer": "x"}, "the hyperparameter 'n_layer' is 'x'; it must be a positive integer"),
        ("pythia-160m", {"rotary_pct": -1}, "rotary_emb_base is 10000 and rotary_pct -1; both must be positive"),
        (
            "TinyLlama-1.1B-Chat",
            {"tie_word_embeddings": "no"},
            "'tie_word_embeddings' is 'no'; it must be true or false",
        ),
        (
            "TinyLlama-1.1B-Chat",
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            "low_freq_factor = 4.0 must be less than high_freq_factor = 4.0",
        ),
        (
            "TinyLlama-1.1B-Chat",
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1},
            "yarn needs a rotary base of more than 1.0",
        ),
        ("Mixtral-8x7B-v0.1", {"num_local_experts": 0}, "the hyperparameter 'num_local_experts' is 0; it must be"),
        ("gpt-oss-20b", {"swiglu_alpha": 1.0}, "swiglu_alpha = 1.0 is not supported, only 1.702 is"),
        ("pythia-160m", {"attention_bias": False}, "attention_bias = False is not supported, only True is"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True is not supported"),
        *(
            ("TinyLlama-1.1B-Chat", {"model_type": "granitemoehybrid", "num_local_experts": 0, **more}, problem)
            for more, problem in (
                ({"layer_types": ["mamba", "rwkv"]}, "layer_types must name mamba or attention for each layer"),
                ({"layer_types": ["mamba", "attention"]}, "2 layers are told apart, and there are 22"),
                ({"layer_types": ["mamba"] * 22}, "at least one layer must attend, and none of 22 does"),
                (
                    {"layer_types": ["mamba"] * 21 + ["attention"], "time_step_limit": [0.1, 1.0]},
                    r"time_step_limit = \[0.1, 1.0\] is not supported",
                ),
                (
                    {"layer_types": ["mamba"] * 21 + ["attention"], "mamba_n_heads": 3},
                    "3 heads cannot share 4096 elements, nor 1 groups of keys",
                ),
            )
        ),
        (
            "TinyLlama-1.1B-Chat",
            {"model_type": "ministral3", "rope_parameters": {"llama_4_scaling_beta": -1}},
            "llama_4_scaling_beta and original_max_position_embeddings must be positive numbers",
        ),
        (
            "TinyLlama-1.1B-Chat",
            {"rope_scaling": {"type": "dynamic", "alpha": 1000.0}},
            "scaled by 'dynamic' are not known",
        ),
        (
            "TinyLlama-1.1B-Chat",
            {"model_type": "lfm2", "layer_types": ["conv", "mamba"]},
            "layer_types must name conv or full_attention for each layer",
        ),
        ("LFM2-8B-A1B", {"num_dense_layers": -1}, "num_dense_layers = -1 must be a number of layers"),
        ("LFM2-8B-A1B", {"n_group": 5}, "4 experts for each token, of 1 of 5 groups, and there are 32"),
        ("ERNIE-4.5-21B-A3B-PT", {"moe_layer_interval": 0}, r"are \[1, 27, 0\]; they must be integers, the third"),
        ("ERNIE-4.5-21B-A3B-PT", {"moe_norm_min": 0.1}, "moe_norm_min = 0.1 is not supported, only 1e-12 is"),
        ("GLM-4.5-Air", {"first_k_dense_replace": None}, "first_k_dense_replace = None must be a number of layers"),
        ("GLM-4.5-Air", {"routed_scaling_factor": -1}, "'routed_scaling_factor' is -1; it must be a positive number"),
        (
            "TinyLlama-1.1B-Chat",
            {"model_type": "lfm2", "full_attn_idxs": [99]},
            "at least one layer must attend, and all 22 are convolutions",
        ),
        ("TinyLlama-1.1B-Chat", {"model_type": "lfm2", "block_multiple_of": 0}, "block_multiple_of must be positive"),
        (
            "TinyLlama-1.1B-Chat",
            {"model_type": "lfm2", "block_ffn_dim_multiplier": -1},
            "block_ffn_dim_multiplier must be a positive number",
        ),
        *(
            ("TinyLlama-1.1B-Chat", {"model_type": "qwen3_5_text", **more}, problem)
            for more, problem in (
                ({"layer_types": ["mamba"]}, "layer_types must name linear_attention or full_attention for each layer"),
                ({"layer_types": ["linear_attention"] * 22}, "at least one layer must attend, and none of 22 does"),
                ({"full_attention_interval": -4}, "full_attention_interval = -4 must be positive"),
                ({"attn_output_gate": False}, "attn_output_gate = False is not supported, only True is"),
                ({"linear_key_head_dim": -1}, "'linear_key_head_dim' is -1; it must be a positive integer"),
            )
        ),
        ("EXAONE-4.0-1.2B", {"layer_types": ["linear_attention"] * 30, "sliding_window": 9}, "layer_types must name"),
        (
            "ERNIE-4.5-0.3B-PT",
            {"rope_scaling": {"rope_type": "yarn", "factor": 1e304}},
            r"a factor of yarn of 1e\+304 is more than anybody has",
        ),
        ("Hunyuan-0.5B-Instruct", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "scaled by 'dynamic' are not"),
        ("Qwen3-30B-A3B", {"num_experts_per_tok": 129}, "129 experts for each token, and there are only 128"),
        ("Qwen3-30B-A3B", {"num_experts": None}, "hyperparameter 'num_experts' is missing"),
        ("Qwen3-30B-A3B", {"num_experts": 1 << 30}, "48 layers of 1073741824 experts are more than anybody has"),
        ("Qwen3-30B-A3B", {"mlp_only_layers": 3}, "mlp_only_layers = 3 must be a list of layers"),
        ("Qwen3-30B-A3B", {"decoder_sparse_step": "x"}, "decoder_sparse_step = 'x' a positive integer"),
        ("Qwen3-30B-A3B", {"model_type": "qwen2_moe", "qkv_bias": False}, "qkv_bias = False is not supported"),
    ],
)
def test_what_we_would_compute_otherwise_is_refused(name: str, more: dict[str, Any], problem: str) -> None:
    with pytest.raises(ImportModelError, match=f"place: .*{problem}"):
        describe({**PUBLISHED[name][0], **more}, "place")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "llama3", "yarn"]), "factor": JSON},
    optional=dict.fromkeys(("low_freq_factor", "rope_theta", "original_max_position_embeddings", "beta_fast"), JSON),
)
KEYS = sorted({key for raw, _ in PUBLISHED.values() for key in raw} | {"rope_parameters", "layer_types", "head_dim"})


@settings(deadline=None, max_examples=tiers.examples(400))
@given(st.sampled_from(sorted(PUBLISHED)), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3), JSON | ROPE)
def test_any_values_give_a_configuration_or_an_error(name: str, changes: dict[str, Any], rope: Any) -> None:
    try:
        assert describe({**PUBLISHED[name][0], "rope_scaling": rope, **changes}, "place")[0].layers > 0
    except ImportModelError as error:
        assert str(error).startswith("place: ")


# Folders


CONFIG = {
    "model_type": "llama", "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "vocab_size": 20, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHAPES = {
    "model.embed_tokens.weight": (20, 32), "model.norm.weight": (32,), "lm_head.weight": (20, 32),
    **{f"model.layers.0.{name}.weight": shape for name, shape in {
        "input_layernorm": (32,), "post_attention_layernorm": (32,), "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (32, 32), "self_attn.v_proj": (32, 32), "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48),
    }.items()},
}  # fmt: skip
KINDS = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(ml_dtypes.bfloat16): "BF16",
         np.dtype(np.int32): "I32"}  # fmt: skip


def weights(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, value in tensors.items():
        entries[name] = {"dtype": KINDS[value.dtype], "shape": value.shape, "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    header = json.dumps(entries).encode()
    body = b"".join(value.tobytes() for value in tensors.values())
    path.write_bytes(len(header).to_bytes(8, "little") + header + body)


def write(folder: Path, tensors: dict[str, np.ndarray] | None = None, **files: Any) -> Path:
    """`files`: JSON by name without its ending."""
    for name, value in {"config": CONFIG, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    write_safetensors(folder / "model.safetensors", weights() if tensors is None else tensors)
    return folder


def test_a_stray_usual_key_counted_in_place_of_the_own_one() -> None:
    for name, strays in (
        ("gpt2", {"n_inner": None, "intermediate_size": 96}),
        ("gpt2", {"hidden_size": 5, "max_position_embeddings": 7}),
        ("pythia-160m", {"partial_rotary_factor": 0.5}),
    ):
        raw, wanted = PUBLISHED[name]
        assert describe({**raw, **strays}, "x")[0] == wanted
    raw, _ = PUBLISHED["gpt2"]
    assert describe({**raw, "n_inner": 96, "intermediate_size": 5}, "x")[0].intermediate == 96


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_weights_are_mapped_as_they_are(dtype: Any, tmp_path: Path) -> None:
    stored = weights(dtype)
    found = read_checkpoint(write(tmp_path, stored)).weights
    np.testing.assert_array_equal(found["layers.0.gate"].data, stored["model.layers.0.mlp.gate_proj.weight"])
    assert found["embed"].data.dtype == dtype and not found["embed"].data.flags.owndata
    assert found["embed"].to_float32().dtype == np.float32


def test_shards(tmp_path: Path) -> None:
    names = list(SHAPES)
    files = {name: f"model-{1 + (k > 5)}-of-2.safetensors" for k, name in enumerate(names)}
    write(tmp_path, **{"model.safetensors.index": {"metadata": {}, "weight_map": files}})
    (tmp_path / "model.safetensors").unlink()
    for shard in set(files.values()):
        write_safetensors(tmp_path / shard, {name: weights()[name] for name in names if files[name] == shard})
    assert len(read_checkpoint(tmp_path).weights) == len(SHAPES)
    (tmp_path / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ImportModelError, match=r"model-2-of-2.safetensors, one of 2 files of weights, is missing"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("is_stored", [True, False])
def test_tied_weights_stored_or_not(is_stored: bool, tmp_path: Path) -> None:
    stored = weights()
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
    if not is_stored:
        del stored["lm_head.weight"]
    found = read_checkpoint(write(tmp_path, stored, config={**CONFIG, "tie_word_embeddings": True}))
    assert found.config.is_tied and "head" not in found.weights


def test_parts_that_see_pictures_are_left_out(tmp_path: Path) -> None:
    text = {key: value for key, value in CONFIG.items() if key != "tie_word_embeddings"}
    raw = {"model_type": "mistral3", "tie_word_embeddings": False, "text_config": {**text, "model_type": "mistral"}}
    raw["text_config"]["num_key_value_heads"] = 2
    for language, vision in (("language_model.", "vision_tower."), ("model.language_model.", "model.vision_tower.")):
        stored = {
            language + name.removeprefix("model." if language[0] == "m" else ""): v for name, v in weights().items()
        }
        if language[0] == "m":
            stored["lm_head.weight"] = stored.pop("model.language_model.lm_head.weight")
        stored |= {vision + "patch.weight": np.zeros(3, np.float32)}
        assert len(read_checkpoint(write(tmp_path, stored, config=raw)).weights) == len(SHAPES)


def test_fused_projections_are_named_as_unknown(tmp_path: Path) -> None:
    stored = weights()
    for part in "qkv":
        del stored[f"model.layers.0.self_attn.{part}_proj.weight"]
    stored["model.layers.0.self_attn.qkv_proj.weight"] = np.zeros((96, 32), np.float32)
    problem = r"layers.0.q, layers.0.k, layers.0.v are missing; .*self_attn.qkv_proj.weight is there and unknown"
    with pytest.raises(ImportModelError, match=problem):
        read_checkpoint(write(tmp_path, stored))


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ImportModelError, match=r"no config.json; a Hugging Face folder has one"):
        read_checkpoint(tmp_path)
    write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "kept")
    with pytest.raises(ImportModelError, match=r"model.safetensors is missing; weights in other formats are not read"):
        read_checkpoint(tmp_path)
    good = (tmp_path / "kept").read_bytes()
    for bad in (b"", good[:100], good[:-1], b"\xff" * 64, (2).to_bytes(8, "little") + b"[]"):
        (tmp_path / "model.safetensors").write_bytes(bad)
        with pytest.raises(ImportModelError, match="a damaged or truncated safetensors file"):
            read_checkpoint(tmp_path)
    with pytest.raises(ImportModelError, match="is of type I32, which is not read; known are F32, F16, BF16"):
        read_checkpoint(write(tmp_path, {"x": np.zeros(3, np.int32)}))
    with pytest.raises(ImportModelError, match=r"weight_map of .* names no files"):
        path = write(tmp_path, **{"model.safetensors.index": {"weight_map": {"x": 3}}})
        (path / "model.safetensors").unlink()
        read_checkpoint(path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ImportModelError, match=r"config.json: cannot be read"):
        read_checkpoint(tmp_path)


def special(place: int, content: str) -> dict[str, Any]:
    return {"id": place, "content": content, "special": True}


def test_tokenizer_template_and_stops(tmp_path: Path) -> None:
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}]}
    tokenizer = {"added_tokens": [special(5, "<s>"), special(7, "<end>")], "post_processor": template}
    said = {
        "bos_token": {"content": "<s>"}, "eos_token": "<end>",
        "chat_template": [{"name": "tool_use", "template": "A"}, {"name": "default", "template": "B"}],
    }  # fmt: skip
    generation = {"eos_token_id": [3, 4], "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    write(tmp_path, tokenizer=tokenizer, tokenizer_config=said, generation_config=generation)
    found = read_checkpoint(tmp_path)
    made = found.tokenizer
    assert made is not None
    assert (made.bos, made.stop, made.adds_bos, made.chat_template) == (5, (3, 4, 7), True, "B")
    assert made.special_tokens == {"bos_token": "<s>", "eos_token": "<end>"}
    assert found.generation == {"temperature": 0.6, "top_p": 0.9, "do_sample": True}
    (tmp_path / "chat_template.jinja").write_text("C")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**said, "add_bos_token": False}))
    made = read_checkpoint(tmp_path).tokenizer
    assert made is not None and (made.chat_template, made.adds_bos) == ("C", False)
    plain = {"added_tokens": [], "post_processor": {"type": "Sequence", "processors": [{"type": "ByteLevel"}]}}
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain))
    made = read_checkpoint(tmp_path).tokenizer
    assert made is not None and (made.bos, made.stop, made.adds_bos) == (1, (2,), False)
    (tmp_path / "tokenizer.json").unlink()
    assert read_checkpoint(tmp_path).tokenizer is None


def test_a_prompt_ended_with_the_tokens_that_a_template_puts_behind_it(tmp_path: Path) -> None:
    """As that of Command R does, whose tokenizer_config.json takes them back."""

    def piece(text: str) -> dict[str, Any]:
        return {"SpecialToken": {"id": text, "type_id": 0}}

    step = {
        "type": "TemplateProcessing", "pair": [],
        "single": [piece("<|start|>"), {"Sequence": {"id": "A", "type_id": 0}}, piece("<|end|>"), piece("<|start|>")],
        "special_tokens": {t: {"id": t, "ids": [n], "tokens": [t]} for t, n in (("<|start|>", 256), ("<|end|>", 257))},
    }  # fmt: skip
    bytes_too = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    for processor in (step, {"type": "Sequence", "processors": [bytes_too, step]}):
        tokenizer = {**json.loads(tokenizer_json()), "post_processor": processor}
        for said, end in (({}, []), ({"add_eos_token": False}, []), ({"add_eos_token": True}, [257, 256])):
            write(tmp_path, tokenizer=tokenizer, tokenizer_config={"bos_token": "<|start|>", **said})
            found = read_checkpoint(tmp_path).tokenizer
            assert found is not None and found.adds_bos
            read = Tokenizer(found.json, bos=found.bos, adds_bos=found.adds_bos)
            assert read.encode("ab") == [256, 97, 98, *end] and read.encode("ab", marks=False) == [97, 98]


@pytest.mark.parametrize(
    "changes",
    [
        *({"post_processor": {"type": "Sequence", "processors": steps}} for steps in (None, 5, [5], [None])),
        *({"post_processor": {"type": "TemplateProcessing", "single": pieces}} for pieces in (5, [5], {"a": 1})),
        {"post_processor": {"single": [{"SpecialToken": {}}]}},
        {"added_tokens": [{"id": 1, "content": ["<s>"]}]},
    ],
)
def test_a_malformed_tokenizer_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, tokenizer={"added_tokens": [special(5, "<s>")], **changes})
    with pytest.raises(ImportModelError, match="the tokenizer is malformed"):
        read_checkpoint(tmp_path)


def test_a_chat_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    write(tmp_path, tokenizer={"added_tokens": []})
    (tmp_path / "chat_template.jinja").write_bytes(b"a\xff")
    with pytest.raises(ImportModelError, match=r"chat_template.jinja: cannot be read: 'utf-8' codec"):
        read_checkpoint(tmp_path)


def test_a_path_that_is_too_long_is_that_of_no_file() -> None:
    with pytest.raises(ImportModelError, match="xx: no such file or folder"):
        read_checkpoint("x" * 5000)


def test_the_licence_stands_in_the_model_card(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# Model\n")
    assert read_checkpoint(tmp_path).provenance == {"source": tmp_path.name, "license": "apache-2.0"}


@pytest.mark.parametrize("shape", [(), (7,), (7, 4)])
def test_fused_weights_of_another_size_are_refused(shape: tuple[int, ...]) -> None:
    config = DecoderConfig("phi3", 10, 4, 1, 2, 1, 2, 6, 16, 1e-5, Rope(1e4, 2), True)
    weights = {"layers.0.qkv": Weight(np.zeros(shape, np.float32), shape)}
    with pytest.raises(
        ImportModelError, match=r"place: weight layers.0.qkv has shape .*; as q, k, v .* 4 \+ 2 \+ 2 rows"
    ):
        split_fused(config, weights, {"qkv": ("q", "k", "v")}, "place")


def test_gemma_means_the_approximation_whatever_its_first_releases_say() -> None:
    raw = {
        "model_type": "gemma", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2,
        "num_hidden_layers": 1, "num_key_value_heads": 2,
    }  # fmt: skip
    for said in ({}, {"hidden_act": "gelu"}, {"hidden_act": "gelu_pytorch_tanh"}):
        assert describe({**raw, **said}, "place")[0].activation == "gelu_tanh"
    with pytest.raises(ImportModelError, match="hidden_act = 'relu' is not supported, only 'gelu_pytorch_tanh' is"):
        describe({**raw, "hidden_act": "relu"}, "place")
