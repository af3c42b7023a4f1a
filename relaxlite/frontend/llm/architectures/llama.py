"""Llama 2 and 3, TinyLlama, SmolLM (Touvron et al., arXiv 2302.13971; Grattafiori et al., arXiv 2407.21783), and
Mistral (Jiang et al., arXiv 2310.06825), which adds a sliding window."""

from __future__ import annotations

from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.config import DecoderConfig


def _llama(h: Hyperparameters) -> DecoderConfig:
    h.refuse(hidden_act="silu")
    biases = {"has_qkv_bias": h.flag("qkv_bias"), "has_o_bias": h.flag("o_bias"), "has_mlp_bias": h.flag("mlp_bias")}
    return h.decoder("llama", **biases)


def _mistral(h: Hyperparameters) -> DecoderConfig:
    h.refuse(hidden_act="silu")
    return h.decoder("mistral", window=h.integer("window") if h.get("window") is not None else None)


LLAMA = Architecture(
    ("llama",), _llama, is_interleaved=True, defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
)
MISTRAL = Architecture(
    ("mistral",),
    _mistral,
    defaults={
        "rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096
    },
)  # fmt: skip
