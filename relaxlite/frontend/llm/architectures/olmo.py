"""OLMo 2 (arXiv 2501.00656): norms of outputs instead of inputs, and of queries and keys over all heads jointly.

OLMo 3 adds local layers, three for each global one, whose rotary embedding is not scaled. OLMoE (arXiv 2409.02060):
Llama with such norms of queries and keys, and mixtures of experts.
"""

from __future__ import annotations

from dataclasses import replace

from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.architectures.weight_names import POST_NORMED_LAYER
from relaxlite.frontend.llm.config import DecoderConfig

_PATTERN = 4  # every fourth layer is global


def _olmo2(h: Hyperparameters) -> DecoderConfig:
    return _olmo(h, "olmo2", has_window=h.is_gguf and h.get("window") is not None)  # the name in GGUF of OLMo 3, too


def _olmo3(h: Hyperparameters) -> DecoderConfig:
    return _olmo(h, "olmo3", has_window=True)


def _olmoe(h: Hyperparameters) -> DecoderConfig:
    h.require(hidden_act="silu", clip_qkv=None)
    return h.decoder(
        "olmoe",
        has_qkv_bias=h.flag("qkv_bias"),
        has_o_bias=h.flag("o_bias"),
        has_qk_norm=True,
        is_qk_norm_joint=True,
        experts=h.experts(is_normed=False),
    )


def _olmo(h: Hyperparameters, name: str, *, has_window: bool) -> DecoderConfig:
    h.require(hidden_act="silu", clip_qkv=None)
    c = h.decoder(
        name,
        has_qkv_bias=h.flag("qkv_bias"),
        has_o_bias=h.flag("o_bias"),
        has_qk_norm=True,
        is_qk_norm_joint=True,
        has_pre_norms=False,
        has_post_norms=True,
    )
    if not has_window:
        return c
    local = h.rope(c.head_width, section="sliding_attention")
    return replace(
        c,
        window=h.integer("window", 4096),
        is_local=h.local_layers(_PATTERN),
        rope=h.rope(c.head_width, section="full_attention"),
        local_rope=local if h.has_rope_section("sliding_attention") else replace(local, scaling=None),
    )


_DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
OLMO2 = Architecture(("olmo2",), _olmo2, hugging_face=POST_NORMED_LAYER, defaults=_DEFAULTS)
OLMO3 = Architecture(("olmo3",), _olmo3, hugging_face=POST_NORMED_LAYER, defaults={**_DEFAULTS, "rope_theta": 500000.0})
OLMOE = Architecture(
    ("olmoe",),
    _olmoe,
    defaults={
        "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8
    },
)  # fmt: skip
