"""Small random checkpoints of every architecture, without a file."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from relaxlite.frontend.llm.checkpoint import Checkpoint, Weight, expected_weights
from relaxlite.frontend.llm.config import Convolutions, DecoderConfig, Experts, LatentAttention, Rope, StateLayers
from relaxlite.runtime.kv_cache import CacheLayout, PoolLayout

VOCAB, CONTEXT = 61, 96

_SIZES: dict[str, Any] = {
    "vocab": VOCAB, "hidden": 32, "layers": 2, "heads": 6, "kv_heads": 2, "head_width": 8, "intermediate": 40,
    "context": CONTEXT, "norm_epsilon": 1e-5, "rope": Rope(1e4, 8), "is_tied": False,
}  # fmt: skip
_SPECIFIC: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"window": 7, "kv_heads": 3},
    "qwen2": {"has_qkv_bias": True, "kv_heads": 6},
    "qwen3": {"has_qk_norm": True, "head_width": 16, "rope": Rope(1e6, 16)},
    "gemma3": {
        "layers": 3, "heads": 4, "kv_heads": 1, "has_qk_norm": True, "has_post_norms": True, "activation": "gelu_tanh",
        "window": 5, "is_local": (True, True, False), "local_rope": Rope(1e4, 8), "rope": Rope(1e6, 8),
        "query_scale": 0.3, "embedding_scale": 5.6, "is_tied": True, "logit_cap": 30.0,
    },
    "gemma2": {
        "has_post_norms": True, "activation": "gelu_tanh", "window": 5, "is_local": (True, False), "score_cap": 0.7,
        "query_scale": 0.5, "logit_cap": 3.0,
    },
    "gemma4": {
        "layers": 4, "heads": 4, "kv_heads": 1, "head_width": 12, "local_head_width": 8, "local_kv_heads": 2,
        "window": 5, "is_local": (True, False, True, False), "kv_shared_from": (0, 1, 0, 1),
        "k_is_v_layers": (False, True, False, False), "rope": Rope(1e6, 12, divisors=(1.0, 1.0, *(math.inf,) * 4)),
        "local_rope": Rope(1e4, 8), "has_qk_norm": True, "has_value_norm": True, "has_post_norms": True,
        "activation": "gelu_tanh", "query_scale": 1.0, "embedding_scale": 5.6, "is_tied": True, "logit_cap": 30.0,
        "intermediates": (40, 40, 80, 80), "per_layer_input": 6, "has_layer_scale": True,
    },
    "olmo2": {"has_qk_norm": True, "is_qk_norm_joint": True, "has_pre_norms": False, "has_post_norms": True},
    "smollm3, scaled as granite": {"nope_layers": (True, False), "residual_scale": 0.3, "logit_divisor": 4.0},
    "phi": {
        "norm": "layer_biased", "is_parallel": True, "has_one_norm": True, "is_gated": False,
        "activation": "gelu_tanh", "has_mlp_bias": True, "has_qkv_bias": True, "has_o_bias": True,
        "has_head_bias": True, "rope": Rope(1e4, 4),
    },
    "gpt_neox": {
        "norm": "layer_biased", "is_parallel": True, "is_gated": False, "activation": "gelu", "has_mlp_bias": True,
        "has_qkv_bias": True, "has_o_bias": True, "rope": Rope(1e4, 2),
    },
    "gpt2": {
        "norm": "layer_biased", "is_gated": False, "activation": "gelu", "has_positions": True,
        "nope_layers": (True, True),
    },
    "lfm2": {
        "layers": 4, "has_qk_norm": True, "is_tied": True,
        "convolutions": Convolutions(3, (True, False, True, True), has_bias=True),
    },
    "qwen3_5": {
        "layers": 4, "has_qk_norm": True, "has_output_gate": True, "head_width": 16, "rope": Rope(1e5, 4),
        "states": StateLayers("delta", 2, 4, 8, 12, 4, (True, True, False, True)),
    },
    "granite_hybrid": {
        "layers": 3, "residual_scale": 0.4, "nope_layers": (True,) * 3,
        "states": StateLayers("mamba", 2, 4, 6, 10, 3, (True, False, True), has_bias=True, has_conv_bias=True),
    },
    "deepseek_v2": {
        "kv_heads": 1, "head_width": 20, "rope": Rope(1e4, 8), "latent": LatentAttention(12, 6, 8, 10, 14, 1e-6),
        "query_scale": 14**-0.5,
    },
    "experts": {"experts": Experts(7, 3, 24, True)},
    "experts in groups": {
        "experts": Experts(
            8, 3, 24, False, shared=12, scores="sigmoid", is_balanced=True, groups=4, top_k_groups=2, scale=1.5
        ),
    },
    "gpt_oss": {
        "has_sinks": True, "window": 5, "is_local": (True, False), "activation": "gelu_sigmoid", "gate_limit": 0.5,
        "has_qkv_bias": True, "has_o_bias": True, "experts": Experts(4, 2, 24, True, has_bias=True),
    },
    "experts beside mlps": {"experts": Experts(5, 2, 24, True, has_dense_mlp=True, has_output_scales=True)},
    "experts, some layers, one shared": {"experts": Experts(5, 2, 24, False, 40, True, (False, True))},
}  # fmt: skip
ARCHITECTURES = tuple(_SPECIFIC)


def attention_layout(
    layers: int, kv_heads: int, width: int, page: int = 64, dtype: str = "float32", block: int = 16
) -> CacheLayout:
    """Of layers that all attend."""
    layer = [PoolLayout(kv_heads, (width, page), dtype), PoolLayout(kv_heads, (page, width), dtype)]
    return CacheLayout(tuple(layer) * layers, kv_heads, page, dtype, block)


def small_checkpoint(architecture: str, seed: int = 0, **changes: Any) -> Checkpoint:
    config = DecoderConfig(architecture, **{**_SIZES, **_SPECIFIC[architecture], **changes})
    rng = np.random.default_rng(seed)
    weights = {name: _random(rng, shape) for name, shape in expected_weights(config).items()}
    for name, weight in weights.items():
        if name.endswith("_rate"):
            weight.data[:] *= -1  # what is remembered fades
    return Checkpoint(config, weights, None, {"source": "random"})


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> Weight:
    scale, offset = (0.1, 1.0) if len(shape) == 1 else (shape[-1] ** -0.5, 0.0)
    return Weight((offset + scale * rng.standard_normal(shape)).astype(np.float32), shape)
