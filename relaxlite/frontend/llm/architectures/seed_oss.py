"""Seed-OSS (ByteDance, 2025): Llama with biases of queries, keys and values, and its own head width."""

from __future__ import annotations

from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.architectures.weight_names import GGUF_LAYER
from relaxlite.frontend.llm.config import DecoderConfig


def _seed_oss(h: Hyperparameters) -> DecoderConfig:
    h.require(hidden_act="silu")
    width = h.head_width(128)
    return h.decoder(
        "seed_oss",
        head_width=width,
        rope=h.rope(width),
        has_qkv_bias=h.flag("qkv_bias"),
        has_o_bias=h.flag("o_bias") if h.is_gguf else bool(h.raw.get("attention_out_bias", False)),
        has_mlp_bias=h.flag("mlp_bias"),
    )


_GGUF = {**GGUF_LAYER, "mlp_norm": "post_attention_norm.weight"}
del _GGUF["attn_post_norm"]
SEED_OSS = Architecture(
    ("seed_oss",),
    _seed_oss,
    gguf=_GGUF,
    defaults={"attention_bias": True, "rms_norm_eps": 1e-6, "max_position_embeddings": 524288},
)
