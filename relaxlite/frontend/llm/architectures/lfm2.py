"""LFM2 (Liquid AI, arXiv 2511.23404): most layers are gated short convolutions.

Other layers are attention with norms of queries and keys. The mixtures have experts in all but the first layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.architectures.weight_names import (
    GGUF_LAYER,
    GGUF_WHOLE,
    HUGGING_FACE_LAYER,
    HUGGING_FACE_WHOLE,
)
from relaxlite.frontend.llm.checkpoint import Weight
from relaxlite.frontend.llm.config import Convolutions, DecoderConfig

_KINDS = {"conv": True, "full_attention": False}


def _lfm2(h: Hyperparameters) -> DecoderConfig:
    specific = {} if h.is_gguf else {"intermediate": _intermediate(h)}
    return _decoder(h, "lfm2", specific)


def _lfm2_moe(h: Hyperparameters) -> DecoderConfig:
    experts = h.experts(
        is_normed=True, scores="sigmoid", is_balanced=h.raw.get("use_expert_bias", True) is True, is_scaled=True,
        layers_with=h.layers_from("num_dense_layers", 2),
    )  # fmt: skip
    return _decoder(h, "lfm2_moe", {"experts": experts})


def _decoder(h: Hyperparameters, name: str, specific: dict[str, Any]) -> DecoderConfig:
    layers, is_convolution = _convolution_layers(h)
    specific |= {"layers": layers, "has_qk_norm": True}
    if any(is_convolution):
        length = h.raw.get(f"{h.prefix}shortconv.l_cache" if h.is_gguf else "conv_L_cache", 3)
        if not isinstance(length, int) or not 1 <= length <= 64:
            raise ImportModelError(f"{h.source}: a convolution along {length!r} tokens must be along 1 to 64")
        has_bias = not h.is_gguf and h.raw.get("conv_bias", False) is True
        specific["convolutions"] = Convolutions(length, is_convolution, has_bias)
    if h.is_gguf:
        return h.decoder(name, kv_heads=h.attention_kv_heads(), **specific)
    if h.raw.get("tie_embedding") is not None:
        specific["is_tied"] = bool(h.raw["tie_embedding"])
    return h.decoder(name, rope=h.rope(h.head_width(None), 1e6), **specific)


def _convolution_layers(h: Hyperparameters) -> tuple[int, tuple[bool, ...]]:
    """Return the number of layers, and for each one whether it is a convolution."""
    layers = h.integer("layers")
    if h.is_gguf:
        counts = h.get("kv_heads")
        counts = counts if isinstance(counts, list) else [counts] * layers
        result = tuple(count == 0 for count in counts)
    else:
        attention_layers = h.raw.get("full_attn_idxs")
        defaults = [
            "full_attention" if attention_layers is None or k in attention_layers else "conv" for k in range(layers)
        ]
        types = h.raw.get("layer_types") or defaults
        if not isinstance(types, list) or set(types) - set(_KINDS):
            raise ImportModelError(f"{h.source}: layer_types must name {' or '.join(_KINDS)} for each layer")
        result = tuple(_KINDS[kind] for kind in types)
    if all(result):
        raise ImportModelError(f"{h.source}: at least one layer must attend, and all {layers} are convolutions")
    if len(result) != layers:
        raise ImportModelError(f"{h.source}: {len(result)} layers are told apart, and there are {layers}")
    return layers, result


def _intermediate(h: Hyperparameters) -> int:
    """Return the width of the MLP.

    With block_auto_adjust_ff_dim that is two thirds of the value of config.json times a factor, rounded up to a
    multiple.
    """
    value = h.raw.get("block_ff_dim") or h.integer("intermediate")
    multiple, factor = h.raw.get("block_multiple_of", 256), h.raw.get("block_ffn_dim_multiplier", 1.0)
    if not isinstance(value, int) or not isinstance(multiple, int) or value < 1 or multiple < 1:
        raise ImportModelError(f"{h.source}: block_ff_dim and block_multiple_of must be positive integers")
    if not h.raw.get("block_auto_adjust_ff_dim", True):
        return value
    width = int(2 * value / 3)
    if factor is None:
        return width
    if not isinstance(factor, int | float) or not factor > 0:
        raise ImportModelError(f"{h.source}: block_ffn_dim_multiplier must be a positive number")
    return -(-int(factor * width) // multiple) * multiple


def _from_folder(weights: dict[str, Weight], config: DecoderConfig, source: str) -> dict[str, Weight]:
    """Reshape convolutions [hidden, 1, length] to matrices."""
    result = dict(weights)
    for name, weight in weights.items():
        if name.endswith(".conv") and len(weight.shape) == 3 and weight.shape[1] == 1:
            result[name] = Weight(weight.data.reshape(weight.shape[0], -1), (weight.shape[0], weight.shape[2]))
    return result


_FUSED = ("conv_before", "conv_after", "conv_given")
LFM2 = Architecture(
    ("lfm2",),
    _lfm2,
    hugging_face={
        **HUGGING_FACE_LAYER,
        "attn_norm": "operator_norm.weight", "mlp_norm": "ffn_norm.weight", "o": "self_attn.out_proj.weight",
        "q_norm": "self_attn.q_layernorm.weight", "k_norm": "self_attn.k_layernorm.weight",
        "gate": "feed_forward.w1.weight", "up": "feed_forward.w3.weight", "down": "feed_forward.w2.weight",
        "conv_in": "conv.in_proj.weight", "conv": "conv.conv.weight", "conv_out": "conv.out_proj.weight",
        "conv_in_bias": "conv.in_proj.bias", "conv_bias": "conv.conv.bias", "conv_out_bias": "conv.out_proj.bias",
    },
    gguf={
        **GGUF_LAYER,
        "conv_in": "shortconv.in_proj.weight", "conv": "shortconv.conv.weight", "conv_out": "shortconv.out_proj.weight",
    },
    fused={"conv_in": _FUSED, "conv_in_bias": tuple(f"{name}_bias" for name in _FUSED)},
    hugging_face_whole={**HUGGING_FACE_WHOLE, "norm": "model.embedding_norm.weight"},
    gguf_whole={**GGUF_WHOLE, "norm": "token_embd_norm.weight"},
    from_folder=_from_folder,
    keys={"norm_eps": "rms_norm_eps"},
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 128000, "tie_word_embeddings": True},
)  # fmt: skip
assert LFM2.hugging_face is not None
LFM2_MOE = replace(
    LFM2,
    names=("lfm2_moe", "lfm2moe"),
    describe=_lfm2_moe,
    hugging_face={
        **LFM2.hugging_face,
        "router": "feed_forward.gate.weight", "router_balance": "feed_forward.expert_bias",
        "experts.{}.gate": "feed_forward.experts.{}.w1.weight", "experts.{}.up": "feed_forward.experts.{}.w3.weight",
        "experts.{}.down": "feed_forward.experts.{}.w2.weight",
    },
    defaults={
        **LFM2.defaults, "num_key_value_heads": 8, "num_experts": 32, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1792,
    },
)  # fmt: skip
