"""Granite 3 (IBM): Llama with embeddings, scores, residuals and logits each scaled by a number of its own; also with
mixtures of experts, which may have one more that all tokens go through."""

from __future__ import annotations

from dataclasses import replace

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.architectures.base import HUGGING_FACE_LAYER, Architecture, Hyperparameters
from relaxlite.frontend.llm.config import DecoderConfig, Experts


def _granite(h: Hyperparameters) -> DecoderConfig:
    return _scaled(h, "granite", None)


def _granite_moe(h: Hyperparameters) -> DecoderConfig:
    experts = h.experts(is_normed=True)
    if h.raw.get("model_type") == "granitemoeshared":
        shared = h.raw.get("shared_intermediate_size", 1024)
        if not isinstance(shared, int) or shared < 0:
            raise ImportModelError(f"{h.source}: shared_intermediate_size is {shared!r}, no whole number from 0")
        experts = replace(experts, shared=shared or None)
    return _scaled(h, "granitemoe", experts)


def _scaled(h: Hyperparameters, name: str, experts: Experts | None) -> DecoderConfig:
    h.refuse(hidden_act="silu")
    return h.decoder(
        name,
        experts=experts,
        has_qkv_bias=h.flag("qkv_bias"),
        has_o_bias=h.flag("o_bias"),
        has_mlp_bias=h.flag("mlp_bias"),
        embedding_scale=h.optional("embedding_scale"),
        residual_scale=h.optional("residual_scale"),
        query_scale=h.optional("query_scale"),
        logit_divisor=h.optional("logit_divisor"),
    )


_DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "attention_multiplier": 1.0}
GRANITE = Architecture(("granite",), _granite, is_interleaved=True, defaults=_DEFAULTS)
GRANITE_MOE = Architecture(
    ("granitemoe", "granitemoeshared"),
    _granite_moe,
    hugging_face={
        **HUGGING_FACE_LAYER,
        "router": "block_sparse_moe.router.layer.weight",
        "experts.gate_up": "block_sparse_moe.input_linear.weight",
        "experts.down": "block_sparse_moe.output_linear.weight",
        "shared.gate_up": "shared_mlp.input_linear.weight",
        "shared.down": "shared_mlp.output_linear.weight",
    },
    fused={"gate_up": ("gate", "up")},
    is_interleaved=True,
    defaults={**_DEFAULTS, "num_experts_per_tok": 2, "num_local_experts": 8},
)
