"""Qwen2 and 2.5 (arXiv 2407.10671): biases of queries, keys and values. Qwen3 (arXiv 2505.09388): norms instead.

Both also have mixtures of experts, Qwen2's with a shared expert.
"""

from __future__ import annotations

from collections.abc import Callable

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.config import DecoderConfig, Experts


def _from_limit(layer: int, limit: int) -> bool:
    """Return whether a layer is at or behind `limit`."""
    return layer >= limit


def _alternating_before(layer: int, limit: int) -> bool:
    """Return whether a layer is before `limit` and even."""
    return layer % 2 == 0 and layer < limit


def _window(h: Hyperparameters, is_local: Callable[[int, int], bool] | None = _from_limit) -> dict[str, object]:
    """Return the fields of sliding-window attention, none unless a checkpoint enables it.

    `is_local` picks local layers by their number and `max_window_layers`, as in transformers; None: all are.
    """
    if h.is_gguf or not h.raw.get("use_sliding_window", False) or h.get("window") is None:
        return {}
    layers, types = range(h.integer("layers")), h.layer_types()
    if is_local is None:
        types = tuple(True for k in layers)
    elif types is None:
        limit = h.raw.get("max_window_layers")
        if not isinstance(limit, int):
            raise ImportModelError(f"{h.source}: max_window_layers is {limit!r}, no integer")
        types = tuple(is_local(k, limit) for k in layers)
    return {"window": h.integer("window"), "is_local": types}


def _qwen2(h: Hyperparameters) -> DecoderConfig:
    h.require(hidden_act="silu")
    return h.decoder("qwen2", has_qkv_bias=True, **_window(h))


def _qwen2_moe(h: Hyperparameters) -> DecoderConfig:
    h.require(hidden_act="silu", qkv_bias=True)
    experts = h.experts(is_normed=False, has_shared_gate=True)
    return h.decoder("qwen2_moe", has_qkv_bias=True, experts=experts, **_window(h, _alternating_before))


def _qwen3(h: Hyperparameters) -> DecoderConfig:
    return _with_qk_norm(h, "qwen3", None, **_window(h))


def _qwen3_moe(h: Hyperparameters) -> DecoderConfig:
    return _with_qk_norm(h, "qwen3_moe", h.experts(is_normed=h.is_gguf), **_window(h, None))


def _with_qk_norm(h: Hyperparameters, name: str, experts: Experts | None, **window: object) -> DecoderConfig:
    h.require(hidden_act="silu")
    width = h.head_width(None if experts else 128)
    biases = {"has_qkv_bias": h.flag("qkv_bias"), "has_o_bias": h.flag("o_bias")}
    rope = h.rope(width)
    return h.decoder(name, head_width=width, rope=rope, has_qk_norm=True, experts=experts, **biases, **window)


_DEFAULTS = {
    "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28
}  # fmt: skip
QWEN2 = Architecture(("qwen2",), _qwen2, defaults=_DEFAULTS)
QWEN3 = Architecture(("qwen3",), _qwen3, defaults=_DEFAULTS)
QWEN2_MOE = Architecture(
    ("qwen2_moe", "qwen2moe"),
    _qwen2_moe,
    defaults={
        **_DEFAULTS, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
)  # fmt: skip
QWEN3_MOE = Architecture(
    ("qwen3_moe", "qwen3moe"),
    _qwen3_moe,
    defaults={**_DEFAULTS, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
)
