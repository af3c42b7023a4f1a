"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437): latent attention (latent.py), and experts, some for all
tokens, in all but the first layers. GLM-4.7-Flash is built alike, Youtu-LLM (Tencent, 2025) without experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.architectures.base import (
    GGUF_LAYER,
    HUGGING_FACE_LAYER,
    Architecture,
    Hyperparameters,
)
from relaxlite.frontend.llm.checkpoint import Weight
from relaxlite.frontend.llm.config import DecoderConfig, Experts, Latent, Rope, yarn_attention

_NORM_EPSILON = 1e-6  # of the norms of latent vectors, whatever config.json says of others
_KINDS = {"dense": False, "sparse": True}


def _v2(h: Hyperparameters) -> DecoderConfig:
    if h.is_gguf:
        layers = h.integer("layers") - h.guessing_layers()
        return _decoder(h, "deepseek2", h.experts(is_normed=False, layers=layers) if h.get("experts") else None, layers)
    method = h.raw.get("topk_method") or "greedy"
    if method != "greedy" and (h.raw.get("n_group") or 1) != 1:
        raise ImportModelError(f"{h.source}: topk_method = {method!r} is not supported, only 'greedy' is")
    h.refuse(norm_topk_prob=False, mlp_bias=False, scoring_func="softmax")
    without_groups = replace(h, raw={**h.raw, "n_group": 1, "topk_group": 1})
    experts = _experts(without_groups, is_normed=False) if h.get("experts") else None
    return _decoder(h, "deepseek_v2", experts)


def _v3(h: Hyperparameters) -> DecoderConfig:
    return _balanced(h, "deepseek_v3")


def _glm4_lite(h: Hyperparameters) -> DecoderConfig:
    return _balanced(h, "glm4_moe_lite")


def _youtu(h: Hyperparameters) -> DecoderConfig:
    h.refuse(rope_interleave=True)
    return _decoder(h, "youtu", None)


def _balanced(h: Hyperparameters, name: str) -> DecoderConfig:
    h.refuse(scoring_func="sigmoid", topk_method="noaux_tc", rope_interleave=True)
    return _decoder(h, name, _experts(h, is_normed=True, scores="sigmoid", is_balanced=True))


def _experts(h: Hyperparameters, **routing: Any) -> Experts:
    return h.experts(
        **routing, is_scaled=True, layers_with=_layers_with(h), shared=h.shared_width("n_shared_experts", 0)
    )


def _layers_with(h: Hyperparameters) -> tuple[bool, ...]:
    layers, said = h.integer("layers"), h.raw.get("mlp_layer_types")
    if said is not None:
        if not isinstance(said, list) or len(said) != layers or set(said) - set(_KINDS):
            raise ImportModelError(f"{h.source}: mlp_layer_types must name {' or '.join(_KINDS)} for each layer")
        return tuple(_KINDS[kind] for kind in said)
    return h.layers_behind("first_k_dense_replace", 0)


def _decoder(h: Hyperparameters, name: str, experts: Experts | None, layers: int | None = None) -> DecoderConfig:
    h.refuse(hidden_act="silu", moe_layer_freq=1)
    latent = _gguf_latent(h) if h.is_gguf else _latent(h)
    rope, growth = _stretched(h, h.rope(latent.turned))
    return h.decoder(
        name,
        layers=layers or h.integer("layers"),
        kv_heads=1,
        head_width=latent.rank + latent.turned,
        rope=rope,
        latent=latent,
        has_qkv_bias=h.flag("qkv_bias"),
        has_o_bias=h.flag("o_bias"),
        experts=experts,
        query_scale=(latent.plain + latent.turned) ** -0.5 * growth,
    )


def _latent(h: Hyperparameters) -> Latent:
    names = {"rank": "kv_lora_rank", "plain": "qk_nope_head_dim", "turned": "qk_rope_head_dim", "width": "v_head_dim"}
    sizes = {ours: h.size(theirs) for ours, theirs in names.items()}
    queries = h.size("q_lora_rank") if h.raw.get("q_lora_rank") is not None else None
    return Latent(**sizes, query_rank=queries, norm_epsilon=_NORM_EPSILON)


def _gguf_latent(h: Hyperparameters) -> Latent:
    """Lengths of keys and values are those of the vector where a file says those of heads in other fields, too."""

    def length(kind: str) -> int:
        usual = f"{h.prefix}attention.{kind}_length"
        return h.size(f"{usual}_mla" if f"{usual}_mla" in h.raw else usual)

    key, value = length("key"), length("value")
    rank, turned = (h.size(f"{h.prefix}{name}") for name in ("attention.kv_lora_rank", "rope.dimension_count"))
    if key <= turned:
        raise ImportModelError(f"{h.source}: keys of {key} elements, of which rotary embeddings turn {turned}")
    queries = f"{h.prefix}attention.q_lora_rank"
    query_rank = h.size(queries) if h.raw.get(queries) else None
    return Latent(rank, key - turned, turned, value, query_rank, h.number("norm_epsilon"))


def _stretched(h: Hyperparameters, rope: Rope) -> tuple[Rope, float]:
    """The rotary embedding, and what scores are multiplied by, where the context is stretched."""
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
    if h.is_gguf:  # a tenth of what config.json says, and cos and sin as they are
        share, rope = share * 10, replace(rope, scaling=replace(rope.scaling, attention_factor=1.0))
    return rope, yarn_attention(rope.scaling.factor, share) ** 2 if rope.scaling is not None else 1.0


def _apart(weights: dict[str, Weight], config: DecoderConfig, source: str) -> dict[str, Weight]:
    """What makes keys and values, by head; turned elements in halves."""
    net = config.latent
    assert net is not None
    result: dict[str, Weight] = {}
    for name, weight in weights.items():
        begin, _, kind = name.rpartition(".")
        if kind in ("latent_keys", "latent_values"):
            if len(weight.shape) != 3 or weight.shape[0] != config.heads:
                raise ImportModelError(
                    f"{source}: weight {name} has shape {weight.shape}; it needs a matrix for each of {config.heads} "
                    "heads"
                )
            result |= {f"{name}.{h}": weight.member(h) for h in range(config.heads)}
            continue
        if kind == "kv_up":
            result |= _by_head(name, weight, config, source)
        else:
            result[f"{begin}.q" if kind == "q_up" else name] = weight
    for k in range(config.layers):
        for name, heads, plain in (("q", config.heads, net.plain), ("kv_down", 1, net.rank)):
            for each in (f"layers.{k}.{name}", f"layers.{k}.{name}_bias"):
                if each in result and result[each].shape[0] == heads * (plain + net.turned):
                    result[each] = result[each].rows(_in_halves(heads, plain, net.turned))
    return result


def _in_halves(heads: int, plain: int, turned: int) -> np.ndarray[Any, Any]:
    """The order of rows in which the first elements of turned pairs come before the second ones."""
    places = np.arange(heads * (plain + turned)).reshape(heads, plain + turned)
    pairs = places[:, plain:].reshape(heads, turned // 2, 2).swapaxes(1, 2).reshape(heads, turned)
    return np.concatenate([places[:, :plain], pairs], axis=1).reshape(-1)


def _by_head(name: str, weight: Weight, config: DecoderConfig, source: str) -> dict[str, Weight]:
    """Of `name`, a matrix of all heads' keys and values: those of keys transposed, as queries go through them."""
    net = config.latent
    assert net is not None
    both = net.plain + net.width
    shape = (config.heads * both, net.rank)
    if weight.shape != shape:
        raise ImportModelError(f"{source}: weight {name} has shape {weight.shape}, the hyperparameters say {shape}")
    result, begin = {}, name.removesuffix("kv_up")
    for h in range(config.heads):
        keys = weight.part(h * both, h * both + net.plain)
        if not isinstance(keys.stored, np.ndarray) or keys.block_format is not None:
            keys = Weight(keys.to_float32(), keys.shape)
        result[f"{begin}latent_keys.{h}"] = keys.transposed
        result[f"{begin}latent_values.{h}"] = weight.part(h * both + net.plain, (h + 1) * both)
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
    from_folder=_apart,
    gguf=_GGUF,
    from_gguf=_apart,
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
