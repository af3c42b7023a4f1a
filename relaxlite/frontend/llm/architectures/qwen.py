"""Qwen2 and 2.5 (arXiv 2407.10671): biases of queries, keys and values. Qwen3 (arXiv 2505.09388): norms of queries and
keys instead."""

from __future__ import annotations

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.config import DecoderConfig


def _window(h: Hyperparameters) -> dict[str, object]:
    """Layers from `max_window_layers` on see a window, where a checkpoint switches that on."""
    if h.is_gguf or not h.raw.get("use_sliding_window", False) or h.get("window") is None:
        return {}
    types = h.layer_types()
    if types is None:
        first, layers = h.raw.get("max_window_layers", 0), h.integer("layers")
        if not isinstance(first, int):
            raise ImportModelError(f"{h.source}: max_window_layers is {first!r}, no integer")
        types = tuple(k >= first for k in range(layers))
    return {"window": h.integer("window"), "is_local": types}


def _qwen2(h: Hyperparameters) -> DecoderConfig:
    h.refuse(hidden_act="silu")
    return h.decoder("qwen2", has_qkv_bias=True, **_window(h))


def _qwen3(h: Hyperparameters) -> DecoderConfig:
    h.refuse(hidden_act="silu")
    width = h.integer("head_width", 128)
    biases = {"has_qkv_bias": h.flag("qkv_bias"), "has_o_bias": h.flag("o_bias")}
    return h.decoder("qwen3", head_width=width, rope=h.rope(width), has_qk_norm=True, **biases, **_window(h))


_DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
QWEN2 = Architecture(("qwen2",), _qwen2, defaults=_DEFAULTS)
QWEN3 = Architecture(("qwen3",), _qwen3, defaults=_DEFAULTS)
