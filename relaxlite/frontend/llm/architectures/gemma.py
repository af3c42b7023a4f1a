"""Gemma (arXiv 2403.08295): tied embeddings scaled by sqrt(hidden), GELU.

Gemma 2 (arXiv 2408.00118): norms of the outputs of attention and MLP too, every other layer local, soft caps of scores
and logits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.architectures.weight_names import HUGGING_FACE_LAYER
from relaxlite.frontend.llm.config import DecoderConfig

_GELU_NAMES = (None, "gelu_pytorch_tanh", "gelu")  # "gelu" in the first releases means the same
_LAYERS_OF_27B = 46  # the number of layers of Gemma 2 27B
WITH_POST_NORMS = {
    **HUGGING_FACE_LAYER,
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}


def _shared(h: Hyperparameters) -> dict[str, Any]:
    """Return the fields that Gemma and Gemma 2 have in common."""
    return {
        "head_width": h.head_width(256),
        "embedding_scale": float(np.float32(h.integer("hidden") ** 0.5)),
        "has_qkv_bias": h.flag("qkv_bias"),
        "has_o_bias": h.flag("o_bias"),
    }


def _gemma(h: Hyperparameters) -> DecoderConfig:
    h.require(use_bidirectional_attention=False)
    if not h.is_gguf and h.get("activation") not in _GELU_NAMES:
        raise ImportModelError(
            f"{h.source}: hidden_act = {h.get('activation')!r} is not supported, only 'gelu_pytorch_tanh' is"
        )
    shared = _shared(h)
    return h.decoder("gemma", activation="gelu_tanh", rope=h.rope(shared["head_width"]), **shared)


def _gemma2(h: Hyperparameters) -> DecoderConfig:
    h.require(hidden_activation="gelu_pytorch_tanh", use_bidirectional_attention=False)
    width, layers = h.head_width(256), h.integer("layers")
    # Only the largest model has another query scale, which GGUF files do not have.
    is_largest = h.is_gguf and layers == _LAYERS_OF_27B
    scalar = h.number("query_scalar", h.integer("hidden") / h.integer("heads") if is_largest else width)
    return h.decoder(
        "gemma2",
        rope=h.rope(width),
        window=h.integer("window", 4096),
        is_local=h.local_layers(2),
        activation="gelu_tanh",
        has_post_norms=True,
        query_scale=scalar**-0.5,
        score_cap=h.optional_number("score_cap"),
        logit_cap=h.optional_number("logit_cap"),
        **_shared(h),
    )


GEMMA = Architecture(
    ("gemma",),
    _gemma,
    norm_offset=1.0,
    defaults={
        "vocab_size": 256000, "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    },
)  # fmt: skip
GEMMA2 = Architecture(
    ("gemma2",),
    _gemma2,
    hugging_face=WITH_POST_NORMS,
    norm_offset=1.0,
    defaults={
        "vocab_size": 256000, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
    },
)  # fmt: skip
