"""Decoders with layer norms: StarCoder2, Phi-1 to 2, StableLM, GPT-2, GPT-NeoX and Pythia, Cohere's Command R.

arXiv 2402.19173 (StarCoder2), 2306.11644 (Phi), 2204.06745 and 2304.01373 (GPT-NeoX, Pythia); Radford et al., 2019
(GPT-2); Stability AI (StableLM).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.architectures.weight_names import GGUF_LAYER, HUGGING_FACE_LAYER, HUGGING_FACE_WHOLE
from relaxlite.frontend.llm.checkpoint import Weight
from relaxlite.frontend.llm.config import Activation, DecoderConfig, Rope

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"
}  # fmt: skip
_LOCAL_PATTERN = 4  # of Command R7B: every fourth layer is global
_GGUF = {**GGUF_LAYER, "qkv": "attn_qkv.weight", "qkv_bias": "attn_qkv.bias"}
_FUSED = {"qkv": ("q", "k", "v"), "qkv_bias": ("q_bias", "k_bias", "v_bias")}


def _activation(h: Hyperparameters) -> Activation:
    if h.is_gguf:
        return "gelu_tanh"
    name = h.get("activation")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ImportModelError(
            f"{h.source}: {h.key('activation')} = {name!r} is not known; known are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _ungated(h: Hyperparameters, architecture: str, **more: object) -> DecoderConfig:
    """Return the configuration of a decoder with layer norms, biases in all projections, and an ungated MLP."""
    specific = {
        "has_qkv_bias": True, "has_o_bias": True, "has_mlp_bias": True, "activation": _activation(h), **more
    }  # fmt: skip
    return h.decoder(
        architecture,
        norm="layer_biased",
        norm_epsilon=h.number("layer_norm_epsilon", 1e-5),
        is_gated=False,
        **specific,
    )


def _starcoder2(h: Hyperparameters) -> DecoderConfig:
    h.require(use_bias=True)
    return _ungated(h, "starcoder2", window=h.window())


def _phi(h: Hyperparameters) -> DecoderConfig:
    h.require(qk_layernorm=False)
    return _ungated(h, "phi", is_parallel=True, has_one_norm=True, has_head_bias=True)


def _stablelm(h: Hyperparameters) -> DecoderConfig:
    h.require(hidden_act="silu", qk_layernorm=False)
    # GGUF's use_parallel_residual is unreliable: converters set it where config.json says nothing.
    is_parallel = not h.flag("mlp_norm") if h.is_gguf else h.raw.get("use_parallel_residual", False)
    return h.decoder(
        "stablelm",
        norm="layer_biased",
        norm_epsilon=h.number("layer_norm_epsilon", 1e-5),
        has_qkv_bias=h.flag("qkv_bias") if h.is_gguf else bool(h.raw.get("use_qkv_bias", False)),
        is_parallel=bool(is_parallel),
        has_one_norm=bool(is_parallel),
    )


def _gpt2(h: Hyperparameters) -> DecoderConfig:
    h.require(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    hidden, heads, layers = h.integer("hidden"), h.integer("heads"), h.integer("layers")
    return _ungated(
        h,
        "gpt2",
        kv_heads=h.integer("kv_heads", heads) if h.is_gguf else heads,
        intermediate=h.integer("intermediate", 4 * hidden),
        rope=Rope(10000.0, hidden // heads),
        nope_layers=(True,) * layers,
        has_positions=True,
    )


def _gpt_neox(h: Hyperparameters) -> DecoderConfig:
    h.require(attention_bias=True)
    more = {"activation": "gelu"} if h.is_gguf else {}  # GGUF has no field for it
    return _ungated(h, "gpt_neox", is_parallel=bool(h.raw.get(f"{h.prefix}use_parallel_residual", True)), **more)


def _cohere(h: Hyperparameters) -> DecoderConfig:
    return _command(h, "cohere")


def _cohere2(h: Hyperparameters) -> DecoderConfig:
    """Return the configuration of Command R7B, whose global layers are NoPE."""
    is_local = h.local_layers(_LOCAL_PATTERN)
    return _command(
        h,
        "cohere2",
        window=h.integer("window", 4096),
        is_local=is_local,
        nope_layers=tuple(not local for local in is_local),
    )


def _command(h: Hyperparameters, architecture: str, **more: object) -> DecoderConfig:
    h.require(hidden_act="silu", use_qk_norm=False)
    scale = h.number("logit_divisor", 0.0625)  # multiplies the logits, in spite of its name
    return h.decoder(
        architecture,
        norm="layer",
        norm_epsilon=h.number("layer_norm_epsilon", 1e-5),
        is_parallel=True,
        has_one_norm=True,
        has_qkv_bias=h.flag("qkv_bias"),
        has_o_bias=h.flag("o_bias"),
        logit_divisor=1 / scale,
        **more,
    )


def _split_heads(weights: dict[str, Weight], config: DecoderConfig, source: str) -> dict[str, Weight]:
    """Reorder fused rows from head by head (query, key, value) to all queries, all keys, all values.

    Weights with another number of rows stay as they are, to be refused later.
    """
    rows = 3 * config.heads * config.head_width
    order = np.arange(rows).reshape(config.heads, 3, -1).swapaxes(0, 1).reshape(-1)
    return {
        name: weight.reorder_rows(order)
        if name.endswith((".qkv", ".qkv_bias")) and weight.shape[:1] == (rows,)
        else weight
        for name, weight in weights.items()
    }


_UNGATED = {
    "up": "mlp.c_fc.weight",
    "up_bias": "mlp.c_fc.bias",
    "down": "mlp.c_proj.weight",
    "down_bias": "mlp.c_proj.bias",
}

STARCODER2 = Architecture(
    ("starcoder2",),
    _starcoder2,
    hugging_face={**HUGGING_FACE_LAYER, **_UNGATED},
    keys={"norm_epsilon": "layer_norm_eps"},
    defaults={
        "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 4096, "tie_word_embeddings": True,
        "num_key_value_heads": 2,
    },
)  # fmt: skip
PHI = Architecture(
    ("phi", "phi2"),
    _phi,
    hugging_face={
        **HUGGING_FACE_LAYER, "o": "self_attn.dense.weight", "o_bias": "self_attn.dense.bias",
        "up": "mlp.fc1.weight", "up_bias": "mlp.fc1.bias", "down": "mlp.fc2.weight", "down_bias": "mlp.fc2.bias",
    },
    hugging_face_whole={
        **HUGGING_FACE_WHOLE, "norm": "model.final_layernorm.weight", "norm_bias": "model.final_layernorm.bias"
    },
    gguf=_GGUF,
    fused=_FUSED,
    defaults={"hidden_act": "gelu_new", "max_position_embeddings": 2048, "partial_rotary_factor": 0.5},
)  # fmt: skip
STABLELM = Architecture(
    ("stablelm",),
    _stablelm,
    defaults={"max_position_embeddings": 4096, "partial_rotary_factor": 0.25},
)
_GPT2_KEYS = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings", "n_inner": "intermediate_size", "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
}  # fmt: skip
GPT2 = Architecture(
    ("gpt2",),
    _gpt2,
    hugging_face={
        "attn_norm": "ln_1.weight", "attn_norm_bias": "ln_1.bias", "mlp_norm": "ln_2.weight",
        "mlp_norm_bias": "ln_2.bias", "qkv": "attn.c_attn.weight", "qkv_bias": "attn.c_attn.bias",
        "o": "attn.c_proj.weight", "o_bias": "attn.c_proj.bias", **_UNGATED,
    },
    hugging_face_whole={
        "embed": "wte.weight", "positions": "wpe.weight", "norm": "ln_f.weight",
        "norm_bias": "ln_f.bias", "head": "lm_head.weight",
    },
    prefix="h.",
    transposed=("qkv", "o", "up", "down"),
    gguf=_GGUF,
    fused=_FUSED,
    keys=_GPT2_KEYS,
    defaults={
        "hidden_act": "gelu_new", "vocab_size": 50257, "max_position_embeddings": 1024, "hidden_size": 768,
        "num_hidden_layers": 12, "num_attention_heads": 12, "tie_word_embeddings": True,
    },
)  # fmt: skip
GPT_NEOX = Architecture(
    ("gpt_neox", "gptneox"),
    _gpt_neox,
    hugging_face={
        **HUGGING_FACE_LAYER, "qkv": "attention.query_key_value.weight", "qkv_bias": "attention.query_key_value.bias",
        "o": "attention.dense.weight", "o_bias": "attention.dense.bias", "up": "mlp.dense_h_to_4h.weight",
        "up_bias": "mlp.dense_h_to_4h.bias", "down": "mlp.dense_4h_to_h.weight", "down_bias": "mlp.dense_4h_to_h.bias",
    },
    hugging_face_whole={
        "embed": "gpt_neox.embed_in.weight", "norm": "gpt_neox.final_layer_norm.weight",
        "norm_bias": "gpt_neox.final_layer_norm.bias", "head": "embed_out.weight",
    },
    prefix="gpt_neox.layers.",
    from_folder=_split_heads,
    gguf=_GGUF,
    fused=_FUSED,
    keys={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    defaults={"hidden_act": "gelu", "max_position_embeddings": 2048, "partial_rotary_factor": 0.25},
)  # fmt: skip
COHERE = Architecture(
    ("cohere", "command-r"),
    _cohere,
    is_interleaved=True,
    is_interleaved_in_folders=True,
    keys={"logit_scale": "logits_scaling"},
    defaults={"max_position_embeddings": 8192, "tie_word_embeddings": True},
)
COHERE2 = replace(COHERE, names=("cohere2",), describe=_cohere2)
