"""Llama 2 and 3, TinyLlama, SmolLM; Mistral and Ministral (sliding windows); SmolLM3 (every fourth layer is NoPE).

Touvron et al., arXiv 2302.13971; Grattafiori et al., arXiv 2407.21783; Jiang et al., arXiv 2310.06825 (Mistral).
"""

from __future__ import annotations

from dataclasses import replace

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.config import DecoderConfig

_NOPE_INTERVAL = 4  # default of SmolLM3


def _llama(h: Hyperparameters) -> DecoderConfig:
    h.require(hidden_act="silu")
    experts = h.experts(is_normed=True) if h.is_gguf and h.get("experts") else None  # Mixtral
    return h.decoder("llama", experts=experts, **h.biases())


def _mistral(h: Hyperparameters) -> DecoderConfig:
    h.require(hidden_act="silu")
    return h.decoder("mistral", window=h.window())


def _ministral(h: Hyperparameters) -> DecoderConfig:
    """Return the configuration of Ministral, where config.json may list layers with full attention."""
    h.require(hidden_act="silu")
    window, types = h.window(), h.layer_types()
    return h.decoder("ministral", window=window, is_local=types or () if window is not None else ())


def _ministral3(h: Hyperparameters) -> DecoderConfig:
    """Return the configuration of Ministral 3, whose queries grow with the logarithm of the position."""
    h.require(hidden_act="silu")
    width = h.head_width(128)
    return h.decoder(
        "ministral3", head_width=width, rope=h.rope(width), window=h.window(), query_log_scaling=h.query_log_scaling()
    )


def _smollm3(h: Hyperparameters) -> DecoderConfig:
    h.require(hidden_act="silu", use_sliding_window=False)
    layers = h.integer("layers")
    every = h.raw.get("no_rope_layer_interval") or _NOPE_INTERVAL
    has_rope = h.raw.get("no_rope_layers")  # 0 for NoPE layers, in spite of its name
    if has_rope is None and isinstance(every, int) and every > 0:
        has_rope = [(k + 1) % every != 0 for k in range(layers)]
    if not isinstance(has_rope, list) or len(has_rope) != layers:
        raise ImportModelError(f"{h.source}: no_rope_layers must say 0 or 1 for each of {layers} layers")
    return h.decoder("smollm3", nope_layers=tuple(not value for value in has_rope), **h.biases())


LLAMA = Architecture(
    ("llama",), _llama, is_interleaved=True, defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
)
MISTRAL = Architecture(
    ("mistral",),
    _mistral,
    defaults={
        "rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096
    },
)  # fmt: skip
MINISTRAL = replace(MISTRAL, names=("ministral",), describe=_ministral)
_MINISTRAL3_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
MINISTRAL3 = Architecture(
    ("ministral3", "mistral3"),
    _ministral3,
    is_interleaved=True,
    defaults={
        "rms_norm_eps": 1e-5, "max_position_embeddings": 262144, "num_key_value_heads": 8,
        "rope_parameters": _MINISTRAL3_ROPE,
    },
)  # fmt: skip
SMOLLM3 = Architecture(
    ("smollm3",),
    _smollm3,
    is_interleaved=True,
    defaults={
        "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
    },
)  # fmt: skip
