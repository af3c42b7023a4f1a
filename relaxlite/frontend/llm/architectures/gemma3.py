"""Gemma 3, text only (arXiv 2503.19786): norms before and after attention and MLP.

Five local layers, with their own rotary base, precede each global one; tied embeddings scaled by sqrt(hidden), GELU.
"""

from __future__ import annotations

import numpy as np

from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.architectures.gemma import WITH_POST_NORMS
from relaxlite.frontend.llm.config import DecoderConfig, Rope

_PATTERN = 6  # every sixth layer is global
_LAYERS_OF_27B = 62


def _gemma3(h: Hyperparameters) -> DecoderConfig:
    h.require(
        hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=None, use_bidirectional_attention=False
    )  # fmt: skip
    width, layers = h.head_width(256), h.integer("layers")
    if h.has_rope_section("sliding_attention"):
        local = h.rope(width, section="sliding_attention")
    else:
        local = Rope(h.number("rope_local_base", 10000.0), width)
    # Only the largest model has another query scale, which GGUF files do not have.
    is_largest = h.is_gguf and layers == _LAYERS_OF_27B
    scalar = h.number("query_scalar", h.integer("hidden") / h.integer("heads") if is_largest else width)
    return h.decoder(
        "gemma3",
        head_width=width,
        rope=h.rope(width, 1000000.0, section="full_attention"),
        local_rope=local,
        window=h.integer("window", 4096),
        is_local=h.local_layers(_PATTERN),
        activation="gelu_tanh",
        has_qkv_bias=h.flag("qkv_bias"),
        has_o_bias=h.flag("o_bias"),
        has_qk_norm=True,
        has_post_norms=True,
        query_scale=scalar**-0.5,
        embedding_scale=float(np.float32(h.integer("hidden") ** 0.5)),
        logit_cap=h.optional_number("logit_cap"),
    )


GEMMA3 = Architecture(
    ("gemma3", "gemma3_text"),
    _gemma3,
    hugging_face=WITH_POST_NORMS,
    norm_offset=1.0,
    # config.json of the published multimodal models omits most of these
    defaults={
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
    },
)
