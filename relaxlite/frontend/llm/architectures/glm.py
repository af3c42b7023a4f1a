"""GLM-4 (arXiv 2406.12793): Llama with fused weights, half of each head turned; the models of 2025 also with norms of
what attention and MLP give."""

from __future__ import annotations

from relaxlite.frontend.llm.architectures.base import GGUF_LAYER, HUGGING_FACE_LAYER, Architecture, Hyperparameters
from relaxlite.frontend.llm.config import DecoderConfig


def _glm(h: Hyperparameters) -> DecoderConfig:
    return _decoder(h, "glm", has_post_norms=False)


def _glm4(h: Hyperparameters) -> DecoderConfig:
    return _decoder(h, "glm4", has_post_norms=True)


def _decoder(h: Hyperparameters, name: str, *, has_post_norms: bool) -> DecoderConfig:
    h.refuse(hidden_act="silu")
    width = h.head_width(128)
    return h.decoder(
        name,
        head_width=width,
        rope=h.rope(width),
        has_qkv_bias=h.flag("qkv_bias"),
        has_post_norms=has_post_norms,
    )


_FUSED = {"gate_up": ("gate", "up")}
_NAMES = {**HUGGING_FACE_LAYER, "gate_up": "mlp.gate_up_proj.weight"}
_GGUF = {**{ours: theirs for ours, theirs in GGUF_LAYER.items() if ours != "up"}, "gate_up": "ffn_up.weight"}
_DEFAULTS = {
    "attention_bias": True, "rms_norm_eps": 1.5625e-7, "max_position_embeddings": 131072, "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
GLM = Architecture(
    ("glm", "chatglm"),
    _glm,
    hugging_face=_NAMES,
    gguf={**_GGUF, "qkv": "attn_qkv.weight", "qkv_bias": "attn_qkv.bias"},
    fused={**_FUSED, "qkv": ("q", "k", "v"), "qkv_bias": ("q_bias", "k_bias", "v_bias")},
    is_interleaved=True,
    is_interleaved_in_folders=True,
    defaults=_DEFAULTS,
)
GLM4 = Architecture(
    ("glm4",),
    _glm4,
    hugging_face={
        **_NAMES,
        "attn_post_norm": "post_self_attn_layernorm.weight",
        "mlp_post_norm": "post_mlp_layernorm.weight",
    },
    gguf=_GGUF,
    fused=_FUSED,
    is_interleaved=True,
    is_interleaved_in_folders=True,
    defaults=_DEFAULTS,
)
