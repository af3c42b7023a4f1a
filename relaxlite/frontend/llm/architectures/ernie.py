"""ERNIE 4.5 (Baidu, 2025), the dense models: Llama whose heads have a width of their own."""

from __future__ import annotations

from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.config import DecoderConfig


def _ernie(h: Hyperparameters) -> DecoderConfig:
    h.refuse(hidden_act="silu")
    width = h.head_width(128)
    biases = h.biases()
    if not h.is_gguf:
        biases["has_mlp_bias"] = h.flag("qkv_bias")  # one switch for all
    return h.decoder("ernie4_5", head_width=width, rope=h.rope(width), **biases)


ERNIE = Architecture(
    ("ernie4_5",),
    _ernie,
    is_interleaved=True,
    is_interleaved_in_folders=True,
    keys={"use_bias": "attention_bias"},
    defaults={
        "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
)  # fmt: skip
