"""Hunyuan, dense models (Tencent, 2025): Llama with norms of queries and keys after the rotary embedding."""

from __future__ import annotations

from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.architectures.weight_names import HUGGING_FACE_LAYER
from relaxlite.frontend.llm.config import DecoderConfig


def _hunyuan(h: Hyperparameters) -> DecoderConfig:
    h.require(hidden_act="silu", mlp_bias=False, use_cla=False)
    biases = {"has_qkv_bias": h.flag("qkv_bias"), "has_o_bias": h.flag("o_bias")}
    rope = h.rope(h.head_width(None), has_alpha=True)
    return h.decoder("hunyuan_v1_dense", rope=rope, has_qk_norm=True, is_qk_norm_last=True, **biases)


HUNYUAN = Architecture(
    ("hunyuan_v1_dense", "hunyuan-dense"),
    _hunyuan,
    hugging_face={
        **HUGGING_FACE_LAYER,
        "q_norm": "self_attn.query_layernorm.weight",
        "k_norm": "self_attn.key_layernorm.weight",
    },
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
)
