"""Granite 3 (IBM): Llama with embeddings, scores, residuals and logits each scaled by a number of its own; also with
mixtures of experts, which may have one more that all tokens go through. Granite 4 where it has no Mamba."""

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


def _granite_hybrid(h: Hyperparameters) -> DecoderConfig:
    """Those of Granite 4 whose layers all attend, and have one MLP."""
    types = h.raw.get("layer_types")
    if not isinstance(types, list) or set(types) - {"attention", "full_attention"}:
        raise ImportModelError(
            f"{h.source}: layer_types = {types!r:.60}: of granitemoehybrid those models are supported whose layers are "
            "all 'attention'"
        )
    h.refuse(num_experts=0)
    is_turned = h.raw.get("position_embedding_type") == "rope"
    unturned = () if is_turned else (True,) * h.integer("layers")
    return replace(_scaled(h, "granitemoehybrid", None), unturned=unturned)


def _scaled(h: Hyperparameters, name: str, experts: Experts | None) -> DecoderConfig:
    h.refuse(hidden_act="silu")
    return h.decoder(
        name,
        experts=experts,
        **h.biases(),
        embedding_scale=h.optional("embedding_scale"),
        residual_scale=h.optional("residual_scale"),
        query_scale=h.optional("query_scale"),
        logit_divisor=h.optional("logit_divisor"),
    )


_SHARED = {"shared.gate_up": "shared_mlp.input_linear.weight", "shared.down": "shared_mlp.output_linear.weight"}
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
        **_SHARED,
    },
    fused={"gate_up": ("gate", "up")},
    is_interleaved=True,
    defaults={**_DEFAULTS, "num_experts_per_tok": 2, "num_experts": 8},
)
GRANITE_HYBRID = Architecture(
    ("granitemoehybrid",),
    _granite_hybrid,
    hugging_face={
        **HUGGING_FACE_LAYER,
        **{name.removeprefix("shared."): theirs for name, theirs in _SHARED.items()},
    },
    fused={"gate_up": ("gate", "up")},
    keys={"shared_intermediate_size": "intermediate_size"},
    defaults={**_DEFAULTS, "num_experts": 8},
)
