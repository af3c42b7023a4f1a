"""Granite 3 (IBM): Llama with embeddings, scores, residuals and logits each scaled by a number of its own."""

from __future__ import annotations

from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.config import DecoderConfig


def _granite(h: Hyperparameters) -> DecoderConfig:
    h.refuse(hidden_act="silu")
    return h.decoder(
        "granite",
        has_qkv_bias=h.flag("qkv_bias"),
        has_o_bias=h.flag("o_bias"),
        has_mlp_bias=h.flag("mlp_bias"),
        embedding_scale=h.optional("embedding_scale"),
        residual_scale=h.optional("residual_scale"),
        query_scale=h.optional("query_scale"),
        logit_divisor=h.optional("logit_divisor"),
    )


GRANITE = Architecture(
    ("granite",),
    _granite,
    is_interleaved=True,
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "attention_multiplier": 1.0},
)
