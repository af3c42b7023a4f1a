"""EXAONE 4 (arXiv 2507.11407): norms of the outputs of attention and MLP, and of each head's query and key.

Large models have three local layers for each global one; global layers are NoPE.
"""

from __future__ import annotations

from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.architectures.weight_names import POST_NORMED_LAYER
from relaxlite.frontend.llm.config import DecoderConfig

_PATTERN = 4  # every fourth layer is global


def _exaone4(h: Hyperparameters) -> DecoderConfig:
    h.require(hidden_act="silu")
    window, layers = h.window(), dict[str, tuple[bool, ...]]()
    if window is not None:
        is_local = h.local_layers(_PATTERN)
        layers = {"is_local": is_local, "nope_layers": tuple(not local for local in is_local)}
    return h.decoder("exaone4", has_qk_norm=True, has_pre_norms=False, has_post_norms=True, window=window, **layers)


EXAONE4 = Architecture(
    ("exaone4",),
    _exaone4,
    hugging_face=POST_NORMED_LAYER,
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
)
