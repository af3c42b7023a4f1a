"""Arcee's foundation models (AFM, 2025): Llama with an ungated MLP and squared ReLU (arXiv 2109.08668)."""

from __future__ import annotations

from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.config import DecoderConfig


def _arcee(h: Hyperparameters) -> DecoderConfig:
    h.require(hidden_act="relu2")
    return h.decoder("arcee", activation="relu2", is_gated=False, **h.biases())


ARCEE = Architecture(
    ("arcee",),
    _arcee,
    is_interleaved=True,
    defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
)
