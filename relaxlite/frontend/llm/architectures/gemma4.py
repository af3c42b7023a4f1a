"""Gemma 4, text only: Gemma 3 with norms of values, unscaled attention scores, and another head width in global layers.

Some global layers use keys as values. Small models have per-layer embeddings (per_layer_inputs.py); their last layers
share keys and values of earlier ones. The mixture of experts has a dense MLP beside the experts of each layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.architectures.gemma import WITH_POST_NORMS
from relaxlite.frontend.llm.architectures.weight_names import GGUF_LAYER, GGUF_WHOLE, HUGGING_FACE_WHOLE
from relaxlite.frontend.llm.checkpoint import Weight
from relaxlite.frontend.llm.config import DecoderConfig, Experts, Rope

_PATTERN = 6  # every sixth layer is global
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_ROPES = {
    _LOCAL: {"rope_type": "default", "rope_theta": 10000.0},
    _GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
_ROPE_TYPES = ("default", "linear", "proportional")


def _gemma4(h: Hyperparameters) -> DecoderConfig:
    return _text_decoder(h, _layer_input(h), _experts(h))


def _gemma4_unified(h: Hyperparameters) -> DecoderConfig:
    h.require(hidden_size_per_layer_input=0, enable_moe_block=False)
    return _text_decoder(h, None, None)


def _text_decoder(h: Hyperparameters, layer_input: int | None, experts: Experts | None) -> DecoderConfig:
    h.require(hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=None)
    if h.raw.get("use_bidirectional_attention") not in (None, False, "vision"):  # "vision" is for images only
        raise ImportModelError(
            f"{h.source}: use_bidirectional_attention = {h.raw['use_bidirectional_attention']!r} is not supported: a "
            "token must not see later ones"
        )
    local, shared = _local_layers(h), _shared_layers(h)
    layers, window = len(local), h.integer("window") if any(local) else None
    widths, kv_heads = _heads(h, local)
    first = layers - shared
    intermediates = h.by_layer("intermediate")
    if h.raw.get("use_double_wide_mlp") and not h.is_gguf:
        intermediates = tuple(width * (1 if k < first else 2) for k, width in enumerate(intermediates))
    return h.decoder(
        "gemma4",
        head_width=widths[_GLOBAL],
        kv_heads=kv_heads[_GLOBAL],
        local_head_width=widths[_LOCAL],
        local_kv_heads=kv_heads[_LOCAL],
        **_ropes(h, widths),
        window=window,
        is_local=local if window is not None else (),
        kv_shared_from=_kv_shared_from(h, local, first) if shared else (),
        k_is_v_layers=_k_is_v_layers(h, local, first),
        intermediate=intermediates[0],
        intermediates=intermediates if len(set(intermediates)) > 1 else (),
        experts=experts,
        per_layer_input=layer_input,
        has_layer_scale=True,
        activation="gelu_tanh",
        has_qkv_bias=h.flag("qkv_bias"),
        has_o_bias=h.flag("o_bias"),
        has_qk_norm=True,
        has_value_norm=True,
        has_post_norms=True,
        query_scale=1.0,
        embedding_scale=float(np.float32(h.integer("hidden") ** 0.5)),
        logit_cap=h.optional_number("logit_cap"),
    )


def _layer_input(h: Hyperparameters) -> int | None:
    """Return the width of per-layer embeddings, None without them."""
    key = f"{h.prefix}embedding_length_per_layer_input" if h.is_gguf else "hidden_size_per_layer_input"
    if h.raw.get(key) in (None, 0):
        return None
    vocab, own_vocab = h.integer("vocab"), h.raw.get("vocab_size_per_layer_input")
    if own_vocab not in (None, vocab) and not h.is_gguf:
        raise ImportModelError(
            f"{h.source}: vocab_size_per_layer_input = {own_vocab!r} is not supported, only vocab_size = {vocab} is"
        )
    return h.size(key)


def _experts(h: Hyperparameters) -> Experts | None:
    if not (h.get("experts") if h.is_gguf else h.raw.get("enable_moe_block")):
        return None
    return replace(h.experts(is_normed=True), has_dense_mlp=True, has_output_scales=True)


def _local_layers(h: Hyperparameters) -> tuple[bool, ...]:
    if h.is_gguf and h.get("window_pattern") is None:
        raise ImportModelError(f"{h.source}: the hyperparameter {h.key('window_pattern')!r} is missing")
    result = h.local_layers(_PATTERN)
    return result if h.is_gguf else (*result[:-1], False)  # transformers always makes the last layer global


def _shared_layers(h: Hyperparameters) -> int:
    """Return the number of layers at the end that have no keys and values of their own."""
    key, layers = f"{h.prefix}attention.shared_kv_layers" if h.is_gguf else "num_kv_shared_layers", h.integer("layers")
    result = h.raw.get(key) or 0
    if not isinstance(result, int) or isinstance(result, bool) or not 0 <= result < layers:
        raise ImportModelError(f"{h.source}: {key} = {result!r} must be fewer than all {layers} layers")
    return result


def _kv_shared_from(h: Hyperparameters, local: tuple[bool, ...], first: int) -> tuple[int, ...]:
    """Return for each layer the layer whose keys and values it reads.

    From `first` on, that is the last layer before `first` of the same kind, local or global.
    """
    last = {is_local: k for k, is_local in enumerate(local[:first])}
    result = tuple(k if k < first else last.get(is_local) for k, is_local in enumerate(local))
    missing = next((k for k, source in enumerate(result) if source is None), None)
    if missing is not None:
        raise ImportModelError(
            f"{h.source}: layer {missing} shares keys and values of a {_LOCAL if local[missing] else _GLOBAL} layer "
            f"before layer {first}, and there is none"
        )
    return tuple(source for source in result if source is not None)


def _k_is_v_layers(h: Hyperparameters, local: tuple[bool, ...], first: int) -> tuple[bool, ...]:
    """Return for each layer whether its values are its keys: layers without v in GGUF, else all global ones or none."""
    if h.is_gguf:
        result = tuple(k < first and k not in h.raw[f"{h.prefix}value_layers"] for k in range(len(local)))
    else:
        is_so = bool(h.raw.get("attention_k_eq_v"))
        result = tuple(is_so and k < first and not is_local for k, is_local in enumerate(local))
    return result if any(result) else ()


def _heads(h: Hyperparameters, local: tuple[bool, ...]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the widths of heads, and the numbers of KV heads, of both kinds of layers."""
    kinds, counts = [_LOCAL if is_local else _GLOBAL for is_local in local], list(h.by_layer("kv_heads"))
    if h.is_gguf:
        width_of = {_GLOBAL: h.head_width(None), _LOCAL: h.size(f"{h.prefix}attention.key_length_swa")}
        if h.raw.get(f"{h.prefix}attention.value_length_swa", width_of[_LOCAL]) != width_of[_LOCAL]:
            raise ImportModelError(f"{h.source}: values of another width than keys are not supported")
        widths = [width_of[kind] for kind in kinds]
    else:
        widths, changes = [h.head_width(256)] * len(local), _layer_overrides(h, kinds)
        for k, change in enumerate(changes):
            widths[k], counts[k] = change.get("head_dim", widths[k]), change.get("num_key_value_heads", counts[k])
    result = _values_by_kind(h, "head_dim", kinds, widths), _values_by_kind(h, "num_key_value_heads", kinds, counts)
    heads = h.integer("heads")
    invalid = next((count for count in result[1].values() if heads % count), None)
    if invalid is not None:
        raise ImportModelError(f"{h.source}: {heads} heads cannot share {invalid} heads of keys and values")
    return result


def _layer_overrides(h: Hyperparameters, kinds: list[str]) -> list[Mapping[str, int]]:
    """Return the values of config.json that differ by layer.

    Published files have them for all global layers, transformers 5 writes them layer by layer.
    """
    by_layer = h.raw.get("per_layer_config")
    if by_layer is None:
        width = h.raw.get("global_head_dim")
        global_values = {"head_dim": 512 if width is None else width}
        if h.raw.get("attention_k_eq_v") and h.raw.get("num_global_key_value_heads") is not None:
            global_values["num_key_value_heads"] = h.raw["num_global_key_value_heads"]
        overrides: dict[str, Any] = {str(k): global_values for k, kind in enumerate(kinds) if kind == _GLOBAL}
    else:
        overrides = dict(by_layer) if isinstance(by_layer, Mapping) else {"": by_layer}
    for layer, change in overrides.items():
        if not layer.isdecimal() or int(layer) >= len(kinds) or not isinstance(change, Mapping):
            raise ImportModelError(f"{h.source}: per_layer_config must be an object by the numbers of layers")
        for key, value in change.items():
            if key not in ("head_dim", "num_key_value_heads"):
                raise ImportModelError(f"{h.source}: {key!r} in per_layer_config is not supported")
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**20:
                raise ImportModelError(f"{h.source}: {key} of layer {layer} is {value!r}, no positive integer")
    numbered = {int(layer): change for layer, change in overrides.items()}
    return [numbered.get(k, {}) for k in range(len(kinds))]


def _values_by_kind(h: Hyperparameters, name: str, kinds: list[str], values: list[int]) -> dict[str, int]:
    """Return the value that all layers of a kind share; without layers of a kind, the value of the other one.

    Raises ImportModelError if the layers of a kind differ.
    """
    result = dict(zip(kinds, values, strict=True))
    for kind, value in zip(kinds, values, strict=True):
        if result[kind] != value:
            raise ImportModelError(f"{h.source}: {name} must be the same for all {kind} layers, got {values}")
    return {kind: result.get(kind, values[0]) for kind in (_LOCAL, _GLOBAL)}


def _ropes(h: Hyperparameters, widths: Mapping[str, int]) -> dict[str, Rope]:
    """Return the rotary embeddings of global and local layers."""
    if h.is_gguf:
        rotary_width = h.raw.get(f"{h.prefix}rope.dimension_count_swa", widths[_LOCAL])
        if rotary_width != widths[_LOCAL]:
            raise ImportModelError(
                f"{h.source}: local layers must turn all {widths[_LOCAL]} elements, not {rotary_width}"
            )
        return {"rope": h.rope(widths[_GLOBAL]), "local_rope": Rope(h.number("rope_local_base"), widths[_LOCAL])}
    parameters = h.raw.get("rope_parameters") or _ROPES
    h = replace(h, raw={**h.raw, "rope_parameters": parameters})
    for kind in (_LOCAL, _GLOBAL):
        section = parameters.get(kind) if isinstance(parameters, Mapping) else None
        if not isinstance(section, Mapping) or section.get("rope_type") not in _ROPE_TYPES:
            raise ImportModelError(
                f"{h.source}: rope_parameters must have a rope_type of {', '.join(_ROPE_TYPES)} for {kind} layers"
            )
        share = section.get("partial_rotary_factor")
        if section["rope_type"] != "proportional" and share not in (None, 1):
            raise ImportModelError(f"{h.source}: partial_rotary_factor = {share!r} is only known of proportional ones")
    return {"rope": h.rope(widths[_GLOBAL], section=_GLOBAL), "local_rope": h.rope(widths[_LOCAL], section=_LOCAL)}


def _convert_weights(weights: dict[str, Weight], config: DecoderConfig, source: str) -> dict[str, Weight]:
    """Drop keys and values of layers that share those of others; make the scale of the router the weights of its norm.

    Published checkpoints have keys and values of all layers.
    """
    result = dict(weights)
    for k in range(config.layers):
        name = f"layers.{k}"
        if config.kv_layer_of(k) != k:
            for spare in ("k", "v", "k_norm", "k_bias", "v_bias"):
                result.pop(f"{name}.{spare}", None)
        scale = result.pop(f"{name}.router_scale", None)
        if scale is not None:
            values = scale.to_float32() * np.float32(config.hidden**-0.5)
            result[f"{name}.router_norm"] = Weight(values, scale.shape)
    return result


def _from_gguf(weights: dict[str, Weight], config: DecoderConfig, source: str) -> dict[str, Weight]:
    """Convert weights of GGUF, with scales of 1 where a file has none."""
    if config.rope.divisors is None:
        raise ImportModelError(f"{source}: tensor 'rope_freqs.weight' is missing: it says what global layers turn")
    used = _convert_weights(weights, config, source)
    for k in range(config.layers):
        sizes, experts = {"scale": 1}, config.experts_of(k)
        if experts is not None:
            sizes["experts_scale"] = experts.count
        for name, size in sizes.items():
            used.setdefault(f"layers.{k}.{name}", Weight(np.ones(size, np.float32), (size,)))
    return used


_HUGGING_FACE = {
    **WITH_POST_NORMS,
    "scale": "layer_scalar", "input_gate": "per_layer_input_gate.weight",
    "input_project": "per_layer_projection.weight", "input_norm": "post_per_layer_input_norm.weight",
    "router": "router.proj.weight", "router_scale": "router.scale", "experts_scale": "router.per_expert_scale",
    "experts.gate_up": "experts.gate_up_proj", "experts.down": "experts.down_proj",
    "experts_norm": "pre_feedforward_layernorm_2.weight",
    "experts_post_norm": "post_feedforward_layernorm_2.weight",
    "dense_post_norm": "post_feedforward_layernorm_1.weight",
}  # fmt: skip
_GGUF = {
    **GGUF_LAYER,
    "scale": "layer_output_scale.weight", "input_gate": "inp_gate.weight", "input_project": "proj.weight",
    "input_norm": "post_norm.weight", "router_scale": "ffn_gate_inp.scale", "experts_scale": "ffn_down_exps.scale",
    "experts.gate_up": "ffn_gate_up_exps.weight", "experts_norm": "pre_ffw_norm_2.weight",
    "experts_post_norm": "post_ffw_norm_2.weight", "dense_post_norm": "post_ffw_norm_1.weight",
}  # fmt: skip
_SHARED: dict[str, Any] = {
    "hugging_face": _HUGGING_FACE,
    "gguf": _GGUF,
    "fused": {"gate_up": ("gate", "up")},
    "hugging_face_whole": {
        **HUGGING_FACE_WHOLE, "layer_embed": "model.embed_tokens_per_layer.weight",
        "layer_project": "model.per_layer_model_projection.weight",
        "layer_project_norm": "model.per_layer_projection_norm.weight",
    },
    "gguf_whole": {
        **GGUF_WHOLE, "layer_embed": "per_layer_token_embd.weight", "layer_project": "per_layer_model_proj.weight",
        "layer_project_norm": "per_layer_proj_norm.weight",
    },
    "from_folder": _convert_weights,
    "from_gguf": _from_gguf,
    "keys": {"top_k_experts": "num_experts_per_tok"},
}  # fmt: skip
_DEFAULTS = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}  # fmt: skip
GEMMA4 = Architecture(
    ("gemma4", "gemma4_text"),
    _gemma4,
    defaults={
        **_DEFAULTS, "max_position_embeddings": 131072, "sliding_window": 512, "hidden_size_per_layer_input": 256
    },
    **_SHARED,
)  # fmt: skip
GEMMA4_UNIFIED = Architecture(
    ("gemma4_unified", "gemma4_unified_text"),
    _gemma4_unified,
    defaults={**_DEFAULTS, "max_position_embeddings": 262144, "sliding_window": 1024},
    **_SHARED,
)
