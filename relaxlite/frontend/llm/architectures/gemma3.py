"""Gemma 3, text only (arXiv 2503.19786): norms around attention and MLP, five local layers for each global one with
rotary bases of their own, tied embeddings scaled by sqrt(hidden), GELU."""

from __future__ import annotations

import numpy as np

from relaxlite.frontend.llm.architectures.base import HUGGING_FACE_LAYER, Architecture, Hyperparameters
from relaxlite.frontend.llm.config import DecoderConfig, Rope

_PATTERN = 6  # every sixth layer is global


def _gemma3(h: Hyperparameters) -> DecoderConfig:
    width, layers = int(h.get("head_width", 256)), int(h.need("layers"))
    types = h.raw.get("layer_types")
    if types is not None:
        is_local = tuple(kind == "sliding_attention" for kind in types)
    else:
        every = int(h.get("window_pattern", _PATTERN))
        is_local = tuple((k + 1) % every != 0 for k in range(layers))
    local = h.rope(width, section="sliding_attention").base if "rope_parameters" in h.raw else 10000.0
    scalar = float(h.get("query_scalar", width))
    return h.decoder(
        "gemma3",
        head_width=width,
        rope=h.rope(width, 1000000.0, section="full_attention"),
        local_rope=Rope(float(h.get("rope_local_base", local)), width),
        window=int(h.get("window", 4096)),
        is_local=is_local,
        activation="gelu_tanh",
        has_qk_norm=True,
        has_post_norms=True,
        query_scale=scalar**-0.5,
        embedding_scale=float(np.float32(int(h.need("hidden")) ** 0.5)),
        logit_cap=h.raw.get("final_logit_softcapping"),
    )


GEMMA3 = Architecture(
    ("gemma3", "gemma3_text"),
    _gemma3,
    hugging_face={
        **HUGGING_FACE_LAYER,
        "attn_post_norm": "post_attention_layernorm.weight",
        "mlp_norm": "pre_feedforward_layernorm.weight",
        "mlp_post_norm": "post_feedforward_layernorm.weight",
    },
    norm_offset=1.0,
    ties_by_default=True,
)
