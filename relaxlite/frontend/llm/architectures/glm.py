"""GLM-4 (arXiv 2406.12793): Llama with fused weights and a rotary embedding of half of each head.

The models of 2025 also have norms of the outputs of attention and MLP. GLM-4.5 (arXiv 2508.06471) has mixtures of
experts, some of them shared by all tokens, in all but the first layers.
"""

from __future__ import annotations

from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.architectures.weight_names import GGUF_LAYER, HUGGING_FACE_LAYER
from relaxlite.frontend.llm.config import DecoderConfig


def _glm(h: Hyperparameters) -> DecoderConfig:
    return _decoder(h, "glm", has_post_norms=False)


def _glm4(h: Hyperparameters) -> DecoderConfig:
    return _decoder(h, "glm4", has_post_norms=True)


def _decoder(h: Hyperparameters, name: str, *, has_post_norms: bool) -> DecoderConfig:
    h.require(hidden_act="silu")
    width = h.head_width(128)
    return h.decoder(
        name,
        head_width=width,
        rope=h.rope(width),
        has_qkv_bias=h.flag("qkv_bias"),
        has_post_norms=has_post_norms,
    )


def _glm4_moe(h: Hyperparameters) -> DecoderConfig:
    h.require(hidden_act="silu")
    width, layers = h.head_width(None), h.integer("layers") - h.mtp_layers()
    experts = h.experts(
        is_normed=True, scores="sigmoid", is_balanced=True, is_scaled=True, layers=layers,
        layers_with=h.layers_from("first_k_dense_replace", 1), shared=h.shared_width("n_shared_experts", 1),
    )  # fmt: skip
    return h.decoder(
        "glm4_moe", layers=layers, head_width=width, rope=h.rope(width), has_qkv_bias=h.flag("qkv_bias"),
        has_qk_norm=h.flag("qk_norm"), experts=experts,
    )  # fmt: skip


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
GLM4_MOE = Architecture(
    ("glm4_moe", "glm4moe"),
    _glm4_moe,
    hugging_face={
        **HUGGING_FACE_LAYER,
        **{f"shared.{kind}": f"mlp.shared_experts.{kind}_proj.weight" for kind in ("gate", "up", "down")},
    },
    gguf={
        **{ours: theirs for ours, theirs in GGUF_LAYER.items() if ours != "attn_post_norm"},
        "mlp_norm": "post_attention_norm.weight",
    },
    keys={"n_routed_experts": "num_experts"},
    defaults={
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 8, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "partial_rotary_factor": 0.5,
    },
)  # fmt: skip
