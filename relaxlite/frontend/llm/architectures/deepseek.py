"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437): latent attention (latent.py) and mixtures of experts.

All layers but the first ones have experts, some of which are shared by all tokens. GLM-4.7-Flash has the same
architecture, Youtu-LLM (Tencent, 2025) has it without experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.architectures.weight_names import GGUF_LAYER, HUGGING_FACE_LAYER
from relaxlite.frontend.llm.checkpoint import Weight
from relaxlite.frontend.llm.config import DecoderConfig, Experts, LatentAttention, Rope, yarn_attention

_NORM_EPSILON = 1e-6  # of the norms of latent vectors, independent of rms_norm_eps
_KINDS = {"dense": False, "sparse": True}


def _v2(h: Hyperparameters) -> DecoderConfig:
    if h.is_gguf:
        layers = h.integer("layers") - h.mtp_layers()
        return _decoder(h, "deepseek2", h.experts(is_normed=False, layers=layers) if h.get("experts") else None, layers)
    method = h.raw.get("topk_method") or "greedy"
    if method != "greedy" and (h.raw.get("n_group") or 1) != 1:
        raise ImportModelError(f"{h.source}: topk_method = {method!r} is not supported, only 'greedy' is")
    h.require(norm_topk_prob=False, mlp_bias=False, scoring_func="softmax")
    without_groups = replace(h, raw={**h.raw, "n_group": 1, "topk_group": 1})
    experts = _experts(without_groups, is_normed=False) if h.get("experts") else None
    return _decoder(h, "deepseek_v2", experts)


def _v3(h: Hyperparameters) -> DecoderConfig:
    return _balanced(h, "deepseek_v3")


def _glm4_lite(h: Hyperparameters) -> DecoderConfig:
    return _balanced(h, "glm4_moe_lite")


def _youtu(h: Hyperparameters) -> DecoderConfig:
    h.require(rope_interleave=True)
    return _decoder(h, "youtu", None)


def _balanced(h: Hyperparameters, name: str) -> DecoderConfig:
    h.require(scoring_func="sigmoid", topk_method="noaux_tc", rope_interleave=True)
    return _decoder(h, name, _experts(h, is_normed=True, scores="sigmoid", is_balanced=True))


def _experts(h: Hyperparameters, **routing: Any) -> Experts:
    return h.experts(
        **routing, is_scaled=True, layers_with=_expert_layers(h), shared=h.shared_width("n_shared_experts", 0)
    )


def _expert_layers(h: Hyperparameters) -> tuple[bool, ...]:
    """Return for each layer whether it has experts."""
    layers, types = h.integer("layers"), h.raw.get("mlp_layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers or set(types) - set(_KINDS):
            raise ImportModelError(f"{h.source}: mlp_layer_types must name {' or '.join(_KINDS)} for each layer")
        return tuple(_KINDS[kind] for kind in types)
    return h.layers_from("first_k_dense_replace", 0)


def _decoder(h: Hyperparameters, name: str, experts: Experts | None, layers: int | None = None) -> DecoderConfig:
    h.require(hidden_act="silu", moe_layer_freq=1)
    latent = _gguf_latent(h) if h.is_gguf else _latent(h)
    rope, score_scale = _yarn_score_scale(h, h.rope(latent.rope_width))
    return h.decoder(
        name,
        layers=layers or h.integer("layers"),
        kv_heads=1,
        head_width=latent.rank + latent.rope_width,
        rope=rope,
        latent=latent,
        has_qkv_bias=h.flag("qkv_bias"),
        has_o_bias=h.flag("o_bias"),
        experts=experts,
        query_scale=(latent.nope_width + latent.rope_width) ** -0.5 * score_scale,
    )


def _latent(h: Hyperparameters) -> LatentAttention:
    """Read the dimensions of latent attention from config.json."""
    names = {
        "rank": "kv_lora_rank",
        "nope_width": "qk_nope_head_dim",
        "rope_width": "qk_rope_head_dim",
        "width": "v_head_dim",
    }
    sizes = {ours: h.size(theirs) for ours, theirs in names.items()}
    query_rank = h.size("q_lora_rank") if h.raw.get("q_lora_rank") is not None else None
    return LatentAttention(**sizes, query_rank=query_rank, norm_epsilon=_NORM_EPSILON)


def _gguf_latent(h: Hyperparameters) -> LatentAttention:
    """Read the dimensions of latent attention from GGUF.

    Fields key_length and value_length are those of the latent vector if fields with the suffix _mla have those of
    heads.
    """

    def length(kind: str) -> int:
        usual = f"{h.prefix}attention.{kind}_length"
        return h.size(f"{usual}_mla" if f"{usual}_mla" in h.raw else usual)

    key, value = length("key"), length("value")
    rank, rope_width = (h.size(f"{h.prefix}{name}") for name in ("attention.kv_lora_rank", "rope.dimension_count"))
    if key <= rope_width:
        raise ImportModelError(f"{h.source}: keys of {key} elements, of which rotary embeddings turn {rope_width}")
    query_rank_key = f"{h.prefix}attention.q_lora_rank"
    query_rank = h.size(query_rank_key) if h.raw.get(query_rank_key) else None
    return LatentAttention(rank, key - rope_width, rope_width, value, query_rank, h.number("norm_epsilon"))


def _yarn_score_scale(h: Hyperparameters, rope: Rope) -> tuple[Rope, float]:
    """Return the rotary embedding, and the factor of attention scores for a context extended by YaRN."""
    if rope.scaling is None or rope.scaling.kind != "yarn":
        return rope, 1.0
    key = f"{h.prefix}rope.scaling.yarn_log_multiplier" if h.is_gguf else "mscale_all_dim"
    share = (h.raw if h.is_gguf else h.rope_parameters()).get(key) or 0
    if not isinstance(share, int | float) or not 0 <= share < 2**10:
        raise ImportModelError(f"{h.source}: {key} = {share!r} must be a positive number")
    if not share:
        return rope, 1.0
    if h.is_gguf and h.raw.get(f"{h.prefix}rope.scaling.attn_factor", 1.0) != 1.0:
        raise ImportModelError(f"{h.source}: {h.prefix}rope.scaling.attn_factor is not supported beside {key}")
    if h.is_gguf:  # GGUF has a tenth of the value; cos and sin are not scaled
        share, rope = share * 10, replace(rope, scaling=replace(rope.scaling, attention_factor=1.0))
    return rope, yarn_attention(rope.scaling.factor, share) ** 2 if rope.scaling is not None else 1.0


def _convert_weights(weights: dict[str, Weight], config: DecoderConfig, source: str) -> dict[str, Weight]:
    """Split the projections of keys and values by head, and permute rotary rows to the half-split layout."""
    mla = config.latent
    assert mla is not None
    result: dict[str, Weight] = {}
    for name, weight in weights.items():
        begin, _, kind = name.rpartition(".")
        if kind in ("latent_keys", "latent_values"):
            if len(weight.shape) != 3 or weight.shape[0] != config.heads:
                raise ImportModelError(
                    f"{source}: weight {name} has shape {weight.shape}; it needs a matrix for each of {config.heads} "
                    "heads"
                )
            result |= {f"{name}.{h}": weight.slice_at(h) for h in range(config.heads)}
            continue
        if kind == "kv_up":
            result |= _split_kv_up(name, weight, config, source)
        else:
            result[f"{begin}.q" if kind == "q_up" else name] = weight
    for k in range(config.layers):
        for name, heads, plain in (("q", config.heads, mla.nope_width), ("kv_down", 1, mla.rank)):
            for full_name in (f"layers.{k}.{name}", f"layers.{k}.{name}_bias"):
                if full_name in result and result[full_name].shape[0] == heads * (plain + mla.rope_width):
                    result[full_name] = result[full_name].reorder_rows(_half_split_order(heads, plain, mla.rope_width))
    return result


def _half_split_order(heads: int, nope: int, rotary: int) -> np.ndarray[Any, Any]:
    """Return the order of rows with the first elements of all rotary pairs before the second ones, per head."""
    rows = np.arange(heads * (nope + rotary)).reshape(heads, nope + rotary)
    pairs = rows[:, nope:].reshape(heads, rotary // 2, 2).swapaxes(1, 2).reshape(heads, rotary)
    return np.concatenate([rows[:, :nope], pairs], axis=1).reshape(-1)


def _split_kv_up(name: str, weight: Weight, config: DecoderConfig, source: str) -> dict[str, Weight]:
    """Split the joint projection of all heads' keys and values; those of keys are transposed, as queries read them."""
    mla = config.latent
    assert mla is not None
    width = mla.nope_width + mla.width
    shape = (config.heads * width, mla.rank)
    if weight.shape != shape:
        raise ImportModelError(f"{source}: weight {name} has shape {weight.shape}, the hyperparameters say {shape}")
    result, begin = {}, name.removesuffix("kv_up")
    for h in range(config.heads):
        keys = weight.row_range(h * width, h * width + mla.nope_width)
        if not isinstance(keys.stored, np.ndarray) or keys.block_format is not None:
            keys = Weight(keys.to_float32(), keys.shape)
        result[f"{begin}latent_keys.{h}"] = keys.transposed
        result[f"{begin}latent_values.{h}"] = weight.row_range(h * width + mla.nope_width, (h + 1) * width)
    return result


_HUGGING_FACE = {
    **{ours: theirs for ours, theirs in HUGGING_FACE_LAYER.items() if ours not in ("q", "k", "v")},
    "q": "self_attn.q_proj.weight", "q_down": "self_attn.q_a_proj.weight", "q_down_bias": "self_attn.q_a_proj.bias",
    "q_down_norm": "self_attn.q_a_layernorm.weight", "q_up": "self_attn.q_b_proj.weight",
    "kv_down": "self_attn.kv_a_proj_with_mqa.weight", "kv_down_bias": "self_attn.kv_a_proj_with_mqa.bias",
    "kv_norm": "self_attn.kv_a_layernorm.weight", "kv_up": "self_attn.kv_b_proj.weight",
    **{f"shared.{kind}": f"mlp.shared_experts.{kind}_proj.weight" for kind in ("gate", "up", "down")},
}  # fmt: skip
_GGUF = {
    **{ours: theirs for ours, theirs in GGUF_LAYER.items() if ours not in ("q", "k", "v")},
    "q": "attn_q.weight", "q_down": "attn_q_a.weight", "q_down_norm": "attn_q_a_norm.weight",
    "q_up": "attn_q_b.weight", "kv_down": "attn_kv_a_mqa.weight", "kv_norm": "attn_kv_a_norm.weight",
    "kv_up": "attn_kv_b.weight", "latent_keys": "attn_k_b.weight", "latent_values": "attn_v_b.weight",
}  # fmt: skip
DEEPSEEK_V2 = Architecture(
    ("deepseek_v2", "deepseek2"),
    _v2,
    hugging_face=_HUGGING_FACE,
    from_folder=_convert_weights,
    gguf=_GGUF,
    from_gguf=_convert_weights,
    keys={"n_routed_experts": "num_experts"},
    defaults={
        "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
    },
)  # fmt: skip
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    names=("deepseek_v3",),
    describe=_v3,
    defaults={
        **DEEPSEEK_V2.defaults, "max_position_embeddings": 4096, "moe_intermediate_size": 2048, "num_experts": 256,
        "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3, "n_shared_experts": 1,
    },
)  # fmt: skip
GLM4_LITE = replace(
    DEEPSEEK_V2,
    names=("glm4_moe_lite",),
    describe=_glm4_lite,
    defaults={
        "rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "kv_lora_rank": 512, "q_lora_rank": 768,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "moe_intermediate_size": 1536,
        "num_experts": 64, "num_experts_per_tok": 4, "routed_scaling_factor": 1.8, "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
)  # fmt: skip
YOUTU = replace(
    DEEPSEEK_V2,
    names=("youtu",),
    describe=_youtu,
    keys={},
    defaults={
        "rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "tie_word_embeddings": True,
    },
)  # fmt: skip
