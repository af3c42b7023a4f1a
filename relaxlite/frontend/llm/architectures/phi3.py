"""Phi-3, Phi-3.5 and Phi-4-mini (arXiv 2404.14219): Llama with fused weights and longrope on a part of each head."""

from __future__ import annotations

from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.architectures.weight_names import GGUF_LAYER, HUGGING_FACE_LAYER
from relaxlite.frontend.llm.config import DecoderConfig


def _phi3(h: Hyperparameters) -> DecoderConfig:
    h.require(hidden_act="silu", attention_bias=False)
    return h.decoder("phi3", window=h.window())


PHI3 = Architecture(
    ("phi3",),
    _phi3,
    hugging_face={
        **HUGGING_FACE_LAYER,
        "qkv": "self_attn.qkv_proj.weight",
        "gate_up": "mlp.gate_up_proj.weight",
    },
    gguf={**{k: v for k, v in GGUF_LAYER.items() if k != "up"}, "qkv": "attn_qkv.weight", "gate_up": "ffn_up.weight"},
    fused={"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")},
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
)
