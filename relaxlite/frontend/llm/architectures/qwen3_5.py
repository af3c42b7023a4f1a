"""Qwen3-Next and Qwen3.5: three of four layers are of the gated delta rule (delta_net.py), the others gated attention.

Attention has norms of queries and keys. There are also mixtures of experts with a shared expert.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.architectures.weight_names import GGUF_LAYER, HUGGING_FACE_LAYER
from relaxlite.frontend.llm.checkpoint import Weight
from relaxlite.frontend.llm.config import DecoderConfig, Experts, StateLayers

_KINDS = {"linear_attention": True, "full_attention": False}
_SIZES = {  # our name -> key in config.json, key in GGUF without the prefix of the architecture
    "key_heads": ("linear_num_key_heads", "ssm.group_count"),
    "heads": ("linear_num_value_heads", "ssm.time_step_rank"),
    "key_width": ("linear_key_head_dim", "ssm.state_size"),
    "width": ("linear_value_head_dim", "ssm.inner_size"),  # GGUF: of all heads
    "length": ("linear_conv_kernel_dim", "ssm.conv_kernel"),
}


def _qwen3_5(h: Hyperparameters) -> DecoderConfig:
    return _hybrid(h, "qwen3_5", None)


def _qwen3_5_moe(h: Hyperparameters) -> DecoderConfig:
    return _hybrid(h, "qwen3_5_moe", h.experts(is_normed=True, has_shared_gate=True))


def _qwen3_next(h: Hyperparameters) -> DecoderConfig:
    return _hybrid(h, "qwen3_next", h.experts(is_normed=True, has_shared_gate=True), tiled=False)


def _hybrid(h: Hyperparameters, name: str, experts: Experts | None, *, tiled: bool = True) -> DecoderConfig:
    """Return the configuration; `tiled`: the order of value heads in GGUF (see `StateLayers`)."""
    h.require(hidden_act="silu", attention_bias=False, attn_output_gate=True)
    width = h.head_width(256)
    layers = h.integer("layers") - h.mtp_layers()
    states = _delta_net(h, layers, tiled and h.is_gguf)
    return h.decoder(
        name, layers=layers, head_width=width, rope=h.rope(width), has_qk_norm=True, has_output_gate=True,
        experts=experts, states=states,
    )  # fmt: skip


def _delta_net(h: Hyperparameters, layers: int, tiled: bool) -> StateLayers | None:
    """Return the configuration of the layers of the gated delta rule; None if there are none."""
    state_layers = _state_layers(h, layers)
    if not any(state_layers):
        return None
    sizes: dict[str, Any] = {
        ours: h.size(h.prefix + gguf if h.is_gguf else own) for ours, (own, gguf) in _SIZES.items()
    }
    if h.is_gguf:
        if sizes["width"] % sizes["heads"]:
            raise ImportModelError(
                f"{h.source}: {h.prefix}ssm.inner_size = {sizes['width']} is no multiple of {sizes['heads']} heads"
            )
        sizes["width"] //= sizes["heads"]
    if sizes["heads"] % sizes["key_heads"]:
        raise ImportModelError(
            f"{h.source}: {sizes['heads']} heads of values cannot share {sizes['key_heads']} of keys"
        )
    if sizes["length"] < 2:
        raise ImportModelError(f"{h.source}: a convolution must be along 2 tokens at least, not {sizes['length']}")
    return StateLayers("delta", **sizes, layers=state_layers, tiled=tiled)


def _state_layers(h: Hyperparameters, layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it is of the gated delta rule: as listed, or all but every n-th."""
    listed = h.raw.get(f"{h.prefix}attention.recurrent_layers" if h.is_gguf else "layer_types")
    if listed is None:
        every = h.raw.get(f"{h.prefix}full_attention_interval", 4)
        if not isinstance(every, int) or every < 1:
            raise ImportModelError(f"{h.source}: {h.prefix}full_attention_interval = {every!r} must be positive")
        result = tuple((k + 1) % every != 0 for k in range(layers))
    elif h.is_gguf:
        result = tuple(map(bool, listed[:layers])) if isinstance(listed, list) else ()
    else:
        if not isinstance(listed, list) or set(listed) - set(_KINDS):
            raise ImportModelError(f"{h.source}: layer_types must name {' or '.join(_KINDS)} for each layer")
        result = tuple(_KINDS[kind] for kind in listed)
    if len(result) != layers:
        raise ImportModelError(f"{h.source}: {len(result)} layers are told apart, and there are {layers}")
    if all(result):
        raise ImportModelError(f"{h.source}: at least one layer must attend, and none of {layers} does")
    return result


def _split_weights(weights: dict[str, Weight], config: DecoderConfig, source: str) -> dict[str, Weight]:
    """Split fused weights: each head's query and output gate, and Qwen3-Next's weights that are fused per key head."""
    result, states = dict(weights), config.states
    queries = np.arange(2 * config.heads * config.head_width).reshape(config.heads, 2, config.head_width)
    for k in range(config.layers):
        name = f"layers.{k}"
        _split_rows(result, f"{name}.q", {f"{name}.q": queries[:, 0], f"{name}.q_gate": queries[:, 1]}, source)
        if states is not None:
            shared = states.heads // states.key_heads
            widths = [states.key_width, states.key_width, shared * states.width, shared * states.width]
            q, key, value, gate = _part_rows(states.key_heads, widths)
            qkv = np.concatenate([q.reshape(-1), key.reshape(-1), value.reshape(-1)])
            _split_rows(result, f"{name}.qkvz", {f"{name}.delta_qkv": qkv, f"{name}.delta_gate": gate}, source)
            beta, alpha = _part_rows(states.key_heads, [shared, shared])
            _split_rows(result, f"{name}.ba", {f"{name}.delta_beta": beta, f"{name}.delta_alpha": alpha}, source)
    return result


def _part_rows(heads: int, widths: list[int]) -> list[np.ndarray[Any, Any]]:
    """Return the row numbers of each part, where the parts of a head are adjacent."""
    rows = np.arange(heads * sum(widths)).reshape(heads, -1)
    return np.split(rows, np.cumsum(widths)[:-1], axis=1)


def _split_rows(weights: dict[str, Weight], name: str, parts: dict[str, np.ndarray[Any, Any]], source: str) -> None:
    """Replace a weight by weights of some of its rows."""
    if name not in weights:
        return
    weight, rows = weights.pop(name), sum(order.size for order in parts.values())
    if weight.shape[:1] != (rows,):
        raise ImportModelError(
            f"{source}: weight {name} has shape {weight.shape}; as {' and '.join(parts)} it would have {rows} rows"
        )
    for part, order in parts.items():
        weights[part] = weight.take_rows(order.reshape(-1), (order.size, *weight.shape[1:]))


def _from_folder(weights: dict[str, Weight], config: DecoderConfig, source: str) -> dict[str, Weight]:
    """Split weights, reshape convolutions [channels, 1, length] to matrices, and exponentiate decay rates."""
    result = _split_weights(weights, config, source)
    for name, weight in weights.items():
        if name.endswith(".delta_conv") and len(weight.shape) == 3 and weight.shape[1] == 1:
            result[name] = Weight(weight.data.reshape(weight.shape[0], -1), (weight.shape[0], weight.shape[2]))
        elif name.endswith(".delta_rate"):
            result[name] = Weight(-np.exp(weight.to_float32()), weight.shape)
    return result


_HUGGING_FACE = {
    **HUGGING_FACE_LAYER,
    "delta_qkv": "linear_attn.in_proj_qkv.weight", "delta_gate": "linear_attn.in_proj_z.weight",
    "delta_beta": "linear_attn.in_proj_b.weight", "delta_alpha": "linear_attn.in_proj_a.weight",
    "qkvz": "linear_attn.in_proj_qkvz.weight", "ba": "linear_attn.in_proj_ba.weight",
    "delta_conv": "linear_attn.conv1d.weight", "delta_rate": "linear_attn.A_log", "delta_step": "linear_attn.dt_bias",
    "delta_scale": "linear_attn.norm.weight", "delta_out": "linear_attn.out_proj.weight",
    "experts.gate_up": "mlp.experts.gate_up_proj", "experts.down": "mlp.experts.down_proj",
}  # fmt: skip
_GGUF = {
    **GGUF_LAYER,
    "mlp_norm": "post_attention_norm.weight",
    "delta_qkv": "attn_qkv.weight", "delta_gate": "attn_gate.weight", "delta_beta": "ssm_beta.weight",
    "delta_alpha": "ssm_alpha.weight", "ba": "ssm_ba.weight", "qkvz": "ssm_in.weight",
    "delta_conv": "ssm_conv1d.weight", "delta_rate": "ssm_a", "delta_step": "ssm_dt.bias",
    "delta_scale": "ssm_norm.weight", "delta_out": "ssm_out.weight", "experts.gate_up": "ffn_gate_up_exps.weight",
}  # fmt: skip
_GGUF = {ours: theirs for ours, theirs in _GGUF.items() if ours != "attn_post_norm"}
_SHARED: dict[str, Any] = {
    "hugging_face": _HUGGING_FACE, "gguf": _GGUF, "fused": {"gate_up": ("gate", "up")}, "norm_offset": 1.0,
    "from_folder": _from_folder, "from_gguf": _split_weights,
}  # fmt: skip
_DEFAULTS = {
    "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "partial_rotary_factor": 0.25, "head_dim": 256,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
QWEN3_5 = Architecture(("qwen3_5", "qwen3_5_text", "qwen35"), _qwen3_5, defaults=_DEFAULTS, **_SHARED)
QWEN3_5_MOE = Architecture(
    ("qwen3_5_moe", "qwen3_5_moe_text", "qwen35moe"), _qwen3_5_moe, defaults={**_DEFAULTS, **_EXPERTS}, **_SHARED
)
QWEN3_NEXT = Architecture(
    ("qwen3_next", "qwen3next"),
    _qwen3_next,
    defaults={**_DEFAULTS, **_EXPERTS, "num_experts": 512, "num_experts_per_tok": 10},
    **_SHARED,
)
