"""How a Hugging Face folder wants tokens chosen: its generation_config.json."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, TypeGuard

# what is taken over, with the values that it may have; `do_sample` says whether the others count
_NUMBERS: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, math.inf), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "repetition_penalty": (0.0, math.inf)
}  # fmt: skip
_MAY_BE_0 = ("temperature", "min_p")
# what would change a reply and is not read, with the value that changes nothing
_UNREAD: Mapping[str, Any] = {
    "stop_strings": None, "begin_suppress_tokens": None, "bad_words_ids": None,
    "no_repeat_ngram_size": 0, "min_new_tokens": 0, "min_length": 0, "num_beams": 1, "typical_p": 1.0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "sequence_bias": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "encoder_no_repeat_ngram_size": 0, "exponential_decay_length_penalty": None,
}  # fmt: skip


def generation_defaults(said: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Of a generation_config.json, those of our options that it sets. A RuntimeWarning names what is left out: values
    that are none, and options that we do not have."""
    result: dict[str, Any] = {}
    if isinstance(said.get("do_sample"), bool):
        result["do_sample"] = said["do_sample"]
    wrong = []
    for name, (low, high) in _NUMBERS.items():
        value = said.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and low <= value <= high and math.isfinite(value) and (value > low or name in _MAY_BE_0):
            result[name] = value
        else:
            wrong.append(name)
    top_k = said.get("top_k")
    if isinstance(top_k, int | float) and not isinstance(top_k, bool) and top_k % 1 == 0:
        result["top_k"] = max(int(top_k), 0)  # -1: all tokens, in some programs
    elif top_k is not None:
        wrong.append("top_k")
    suppressed = said.get("suppress_tokens")
    if are_tokens(suppressed):
        result["suppress_tokens"] = suppressed
    elif suppressed is not None:
        wrong.append("suppress_tokens")
    unread = [name for name, usual in _UNREAD.items() if said.get(name) not in (None, usual, [])]
    if wrong:
        values = ", ".join(f"{name} = {said[name]!r}" for name in wrong)
        warnings.warn(f"{source}: {values} cannot be, and is left out", RuntimeWarning, stacklevel=2)
    if unread:
        warnings.warn(f"{source}: {', '.join(unread)} is not supported, and left out", RuntimeWarning, stacklevel=2)
    return result


def are_tokens(said: Any) -> TypeGuard[list[int]]:
    return isinstance(said, list) and all(type(token) is int and token >= 0 for token in said)
