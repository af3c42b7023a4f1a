"""Mixtral (arXiv 2401.04088): Mistral with a mixture of experts in each layer; named llama in GGUF files."""

from __future__ import annotations

from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.architectures.weight_names import HUGGING_FACE_LAYER
from relaxlite.frontend.llm.config import DecoderConfig


def _mixtral(h: Hyperparameters) -> DecoderConfig:
    h.require(hidden_act="silu")
    return h.decoder("mixtral", window=h.window(), experts=h.experts(is_normed=True))


MIXTRAL = Architecture(
    ("mixtral",),
    _mixtral,
    hugging_face={
        **HUGGING_FACE_LAYER,
        "router": "block_sparse_moe.gate.weight",
        "experts.{}.gate": "block_sparse_moe.experts.{}.w1.weight",
        "experts.{}.up": "block_sparse_moe.experts.{}.w3.weight",
        "experts.{}.down": "block_sparse_moe.experts.{}.w2.weight",
    },
    defaults={
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 8, "num_experts": 8,
        "num_experts_per_tok": 2, "rope_theta": 1000000.0,
    },
)  # fmt: skip
