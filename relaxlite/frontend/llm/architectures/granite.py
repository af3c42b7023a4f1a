"""Granite 3 (IBM): Llama with scales of embeddings, attention scores, residuals and logits; also mixtures of experts.

The mixtures may have a shared expert. Granite 4: most layers are state space models (Mamba-2).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.architectures.weight_names import GGUF_LAYER, HUGGING_FACE_LAYER
from relaxlite.frontend.llm.checkpoint import Weight
from relaxlite.frontend.llm.config import DecoderConfig, Experts, StateLayers

_UNLIMITED = (None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])  # the last one is written by transformers 5
_KINDS = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}


def _granite(h: Hyperparameters) -> DecoderConfig:
    return _decoder(h, "granite", None)


def _granite_moe(h: Hyperparameters) -> DecoderConfig:
    experts = h.experts(is_normed=True)
    if h.raw.get("model_type") == "granitemoeshared":
        shared = h.raw.get("shared_intermediate_size", 1024)
        if not isinstance(shared, int) or shared < 0:
            raise ImportModelError(f"{h.source}: shared_intermediate_size is {shared!r}, no whole number from 0")
        experts = replace(experts, shared=shared or None)
    return _decoder(h, "granitemoe", experts)


def _granite_hybrid(h: Hyperparameters) -> DecoderConfig:
    states = _state_config(h)
    experts = h.experts(is_normed=True) if h.get("experts") else None
    if h.is_gguf:
        has_rope = h.raw.get(f"{h.prefix}rope.scaling.finetuned") is True
        specific: dict[str, Any] = {"kv_heads": h.attention_kv_heads()}
    else:
        specific = {"intermediate": h.size("shared_intermediate_size")}
        if experts is not None:
            experts = replace(experts, shared=specific["intermediate"])
        has_rope = h.raw.get("position_embedding_type") == "rope"
    nope_layers = () if has_rope else (True,) * h.integer("layers")
    return replace(_decoder(h, "granitemoehybrid", experts, **specific), nope_layers=nope_layers, states=states)


def _state_config(h: Hyperparameters) -> StateLayers | None:
    """Return the configuration of the state space layers; None if there are none."""
    layers, state_layers = h.integer("layers"), _state_layers(h)
    if len(state_layers) != layers:
        raise ImportModelError(f"{h.source}: {len(state_layers)} layers are told apart, and there are {layers}")
    if all(state_layers):
        raise ImportModelError(f"{h.source}: at least one layer must attend, and none of {layers} does")
    if not any(state_layers):
        return None
    names = ("group_count", "time_step_rank", "state_size", "conv_kernel", "inner_size") if h.is_gguf else (
        "mamba_n_groups", "mamba_n_heads", "mamba_d_state", "mamba_d_conv", "mamba_expand",
    )  # fmt: skip
    prefix = f"{h.prefix}ssm." if h.is_gguf else ""
    groups, heads, width_of_keys, length, channels = (h.size(prefix + name) for name in names)
    channels *= 1 if h.is_gguf else h.integer("hidden")
    if channels % heads or heads % groups:
        raise ImportModelError(
            f"{h.source}: {heads} heads cannot share {channels} elements, nor {groups} groups of keys"
        )
    if length < 2:
        raise ImportModelError(f"{h.source}: a convolution must be along 2 tokens at least, not {length}")
    if not h.is_gguf and h.raw.get("time_step_limit") not in _UNLIMITED:
        raise ImportModelError(f"{h.source}: time_step_limit = {h.raw['time_step_limit']!r:.60} is not supported")
    has_conv_bias = h.is_gguf or h.raw.get("mamba_conv_bias", True) is True
    has_bias = not h.is_gguf and h.raw.get("mamba_proj_bias", False) is True
    return StateLayers(
        "mamba", groups, heads, width_of_keys, channels // heads, length, state_layers, has_bias=has_bias,
        has_conv_bias=has_conv_bias,
    )  # fmt: skip


def _state_layers(h: Hyperparameters) -> tuple[bool, ...]:
    """Return for each layer whether it is a state space model."""
    if h.is_gguf:
        counts = h.get("kv_heads")
        return tuple(count == 0 for count in (counts if isinstance(counts, list) else [counts] * h.integer("layers")))
    types = h.raw.get("layer_types")
    if not isinstance(types, list) or set(types) - set(_KINDS):
        raise ImportModelError(f"{h.source}: layer_types must name mamba or attention for each layer")
    return tuple(_KINDS[kind] for kind in types)


def _decoder(h: Hyperparameters, name: str, experts: Experts | None, **specific: Any) -> DecoderConfig:
    """Return the configuration with the scales of Granite."""
    h.require(hidden_act="silu")
    return h.decoder(
        name,
        experts=experts,
        **specific,
        **h.biases(),
        embedding_scale=h.optional_number("embedding_scale"),
        residual_scale=h.optional_number("residual_scale"),
        query_scale=h.optional_number("query_scale"),
        logit_divisor=h.optional_number("logit_divisor"),
    )


_SHARED = {"shared.gate_up": "shared_mlp.input_linear.weight", "shared.down": "shared_mlp.output_linear.weight"}
_EXPERTS = {
    "router": "block_sparse_moe.router.layer.weight", "experts.gate_up": "block_sparse_moe.input_linear.weight",
    "experts.down": "block_sparse_moe.output_linear.weight", **_SHARED,
}  # fmt: skip
_DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "attention_multiplier": 1.0}
GRANITE = Architecture(("granite",), _granite, is_interleaved=True, defaults=_DEFAULTS)
GRANITE_MOE = Architecture(
    ("granitemoe", "granitemoeshared"),
    _granite_moe,
    hugging_face={
        **HUGGING_FACE_LAYER,
        **_EXPERTS,
    },
    fused={"gate_up": ("gate", "up")},
    is_interleaved=True,
    defaults={**_DEFAULTS, "num_experts_per_tok": 2, "num_experts": 8},
)
_MAMBA = ("mamba_gate", "mamba_given", "mamba_time")


def _reshape_weights(weights: dict[str, Weight], config: DecoderConfig, source: str) -> dict[str, Weight]:
    """Reshape vectors that are columns or grouped, and convolutions [channels, 1, length] to matrices."""
    result = dict(weights)
    for name, weight in weights.items():
        if name.endswith((".mamba_rate", ".mamba_skip", ".mamba_scale")) and len(weight.shape) == 2:
            result[name] = Weight(weight.data.reshape(-1), (weight.shape[0] * weight.shape[1],))
        elif name.endswith(".mamba_conv") and len(weight.shape) == 3 and weight.shape[1] == 1:
            result[name] = Weight(weight.data.reshape(weight.shape[0], -1), (weight.shape[0], weight.shape[2]))
    return result


def _from_folder(weights: dict[str, Weight], config: DecoderConfig, source: str) -> dict[str, Weight]:
    """Convert the logarithms of decay rates to rates, and reshape weights."""
    used = _reshape_weights(weights, config, source)
    for name, weight in weights.items():
        if name.endswith(".mamba_rate"):
            used[name] = Weight(-np.exp(weight.to_float32()), weight.shape)
    return used


GRANITE_HYBRID = Architecture(
    ("granitemoehybrid", "granitehybrid"),
    _granite_hybrid,
    hugging_face={
        **HUGGING_FACE_LAYER,
        **{name.removeprefix("shared."): theirs for name, theirs in _SHARED.items()},  # without or beside experts
        **_EXPERTS,
        "mamba_in": "mamba.in_proj.weight", "mamba_in_bias": "mamba.in_proj.bias", "mamba_out": "mamba.out_proj.weight",
        "mamba_out_bias": "mamba.out_proj.bias", "mamba_conv": "mamba.conv1d.weight",
        "mamba_conv_bias": "mamba.conv1d.bias", "mamba_rate": "mamba.A_log", "mamba_step": "mamba.dt_bias",
        "mamba_skip": "mamba.D", "mamba_scale": "mamba.norm.weight",
    },
    gguf={
        **GGUF_LAYER,
        "mamba_in": "ssm_in.weight", "mamba_out": "ssm_out.weight", "mamba_conv": "ssm_conv1d.weight",
        "mamba_conv_bias": "ssm_conv1d.bias", "mamba_rate": "ssm_a", "mamba_step": "ssm_dt.bias",
        "mamba_skip": "ssm_d", "mamba_scale": "ssm_norm.weight",
    },
    fused={
        "gate_up": ("gate", "up"), "mamba_in": _MAMBA, "mamba_in_bias": tuple(f"{name}_bias" for name in _MAMBA),
    },
    is_interleaved=True,
    from_folder=_from_folder,
    from_gguf=_reshape_weights,
    keys={"intermediate_size": "moe_intermediate_size"},
    defaults={
        **_DEFAULTS, "num_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024, "mamba_n_heads": 128,
        "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
    },
)  # fmt: skip
