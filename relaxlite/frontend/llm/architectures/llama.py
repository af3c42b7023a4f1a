"""Llama 2 and 3, TinyLlama, SmolLM (Touvron et al., arXiv 2302.13971; Grattafiori et al., arXiv 2407.21783), and
Mistral (Jiang et al., arXiv 2310.06825), which adds a sliding window."""

from __future__ import annotations

from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.config import DecoderConfig


def _llama(h: Hyperparameters) -> DecoderConfig:
    return h.decoder("llama", has_qkv_bias=bool(h.raw.get("attention_bias", False)))


def _mistral(h: Hyperparameters) -> DecoderConfig:
    return h.decoder("mistral", window=h.get("window"))


LLAMA = Architecture(("llama",), _llama, is_interleaved=True)
MISTRAL = Architecture(("mistral",), _mistral)
