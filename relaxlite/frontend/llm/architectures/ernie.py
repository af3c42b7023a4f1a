"""ERNIE 4.5 (Baidu, 2025): Llama with its own head width; also mixtures of experts with shared experts."""

from __future__ import annotations

from dataclasses import replace

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.architectures.weight_names import HUGGING_FACE_LAYER
from relaxlite.frontend.llm.checkpoint import Weight
from relaxlite.frontend.llm.config import DecoderConfig, Experts


def _ernie(h: Hyperparameters) -> DecoderConfig:
    return _decoder(h, "ernie4_5", 128, None)


def _ernie_moe(h: Hyperparameters) -> DecoderConfig:
    h.require(qkv_bias=False, attention_bias=False, moe_norm_min=1e-12)
    return _decoder(h, "ernie4_5_moe", None, _experts(h))


def _decoder(h: Hyperparameters, name: str, usual_width: int | None, experts: Experts | None) -> DecoderConfig:
    h.require(hidden_act="silu")
    width = h.head_width(usual_width)
    biases = h.biases()
    if not h.is_gguf:
        biases["has_mlp_bias"] = h.flag("qkv_bias")  # one key for all biases
    return h.decoder(name, head_width=width, rope=h.rope(width), experts=experts, **biases)


def _experts(h: Hyperparameters) -> Experts:
    if h.is_gguf:
        return h.experts(is_normed=True)
    layers = h.integer("layers")
    defaults = {"layer_start_index": 1, "layer_end_index": -1, "layer_interval": 1}
    values = [h.raw.get(f"moe_{key}", number) for key, number in defaults.items()]
    if not all(isinstance(number, int) for number in values) or values[2] < 1:
        raise ImportModelError(
            f"{h.source}: moe_layer_start_index, moe_layer_end_index and moe_layer_interval are {values}; they must be "
            "integers, the third positive"
        )
    first, last, every = values
    last = layers - 1 if last == -1 else last
    return h.experts(
        is_normed=True,
        is_balanced=True,
        layers_with=tuple(first <= k <= last and (k + 1) % every == 0 for k in range(layers)),
        shared=h.shared_width("moe_num_shared_experts", 2),
    )


def _from_folder(weights: dict[str, Weight], config: DecoderConfig, source: str) -> dict[str, Weight]:
    """Reshape the selection bias of experts, [1, experts], to a vector."""
    return {
        name: Weight(weight.data.reshape(-1), weight.shape[1:])
        if name.endswith(".router_balance") and len(weight.shape) == 2 and weight.shape[0] == 1
        else weight
        for name, weight in weights.items()
    }


ERNIE = Architecture(
    ("ernie4_5",),
    _ernie,
    is_interleaved=True,
    is_interleaved_in_folders=True,
    keys={"use_bias": "attention_bias"},
    defaults={
        "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
)  # fmt: skip
ERNIE_MOE = replace(
    ERNIE,
    names=("ernie4_5_moe", "ernie4_5-moe"),
    describe=_ernie_moe,
    hugging_face={
        **HUGGING_FACE_LAYER,
        "router_balance": "mlp.moe_statics.e_score_correction_bias",
        **{f"shared.{kind}": f"mlp.shared_experts.{kind}_proj.weight" for kind in ("gate", "up", "down")},
    },
    from_folder=_from_folder,
    keys={**ERNIE.keys, "moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
    defaults={
        **ERNIE.defaults, "num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 6,
        "moe_intermediate_size": 1536,
    },
)  # fmt: skip
