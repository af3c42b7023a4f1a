"""Import of generation_config.json, the generation defaults of a Hugging Face folder."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, TypeGuard

# options that are imported, with their ranges; they apply only if `do_sample` is set
_NUMBERS: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, math.inf), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "repetition_penalty": (0.0, math.inf)
}  # fmt: skip
_MAY_BE_ZERO = ("temperature", "min_p")
# options that are not supported, with the values that have no effect
_UNSUPPORTED: Mapping[str, Any] = {
    "stop_strings": None, "begin_suppress_tokens": None, "bad_words_ids": None,
    "no_repeat_ngram_size": 0, "min_new_tokens": 0, "min_length": 0, "num_beams": 1, "typical_p": 1.0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "sequence_bias": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "encoder_no_repeat_ngram_size": 0, "exponential_decay_length_penalty": None,
}  # fmt: skip


def generation_defaults(settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the options of `Sampling` that a generation_config.json sets.

    Invalid values and unsupported options are left out with a RuntimeWarning.
    """
    result: dict[str, Any] = {}
    if isinstance(settings.get("do_sample"), bool):
        result["do_sample"] = settings["do_sample"]
    invalid = []
    for name, (low, high) in _NUMBERS.items():
        value = settings.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and low <= value <= high and math.isfinite(value) and (value > low or name in _MAY_BE_ZERO):
            result[name] = value
        else:
            invalid.append(name)
    top_k = settings.get("top_k")
    if isinstance(top_k, int | float) and not isinstance(top_k, bool) and top_k % 1 == 0:
        result["top_k"] = max(int(top_k), 0)  # -1: all tokens, in some programs
    elif top_k is not None:
        invalid.append("top_k")
    suppressed = settings.get("suppress_tokens")
    if are_tokens(suppressed):
        result["suppress_tokens"] = suppressed
    elif suppressed is not None:
        invalid.append("suppress_tokens")
    unsupported = [name for name, neutral in _UNSUPPORTED.items() if settings.get(name) not in (None, neutral, [])]
    if invalid:
        values = ", ".join(f"{name} = {settings[name]!r}" for name in invalid)
        warnings.warn(f"{source}: {values} cannot be, and is left out", RuntimeWarning, stacklevel=2)
    if unsupported:
        warnings.warn(
            f"{source}: {', '.join(unsupported)} is not supported, and left out", RuntimeWarning, stacklevel=2
        )
    return result


def are_tokens(value: Any) -> TypeGuard[list[int]]:
    """Return whether a value is a list of token ids."""
    return isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)
