"""Qwen2 and 2.5 (arXiv 2407.10671): biases of queries, keys and values. Qwen3 (arXiv 2505.09388): norms of queries and
keys instead."""

from __future__ import annotations

from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.config import DecoderConfig


def _window(h: Hyperparameters) -> dict[str, object]:
    """Layers from `max_window_layers` on see a window, where a checkpoint switches that on."""
    if h.is_gguf or not h.raw.get("use_sliding_window", False) or h.get("window") is None:
        return {}
    first = int(h.raw.get("max_window_layers", 0))
    return {"window": int(h.get("window")), "is_local": tuple(k >= first for k in range(int(h.need("layers"))))}


def _qwen2(h: Hyperparameters) -> DecoderConfig:
    return h.decoder("qwen2", has_qkv_bias=True, **_window(h))


def _qwen3(h: Hyperparameters) -> DecoderConfig:
    width = int(h.get("head_width", 128))
    bias = bool(h.raw.get("attention_bias", False))
    return h.decoder("qwen3", head_width=width, rope=h.rope(width), has_qk_norm=True, has_qkv_bias=bias, **_window(h))


QWEN2 = Architecture(("qwen2",), _qwen2)
QWEN3 = Architecture(("qwen3",), _qwen3)
