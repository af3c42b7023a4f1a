"""Rewording of the Python API's error texts for the command line: `--max-tokens` for `max_new_tokens`."""

from __future__ import annotations

import argparse
import re

_OPTIONS = {
    name: f"--{name.replace('_', '-')}"
    for name in (
        "max_tokens", "overflow", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop",
        "draft", "precision", "quantize", "cache_dtype", "max_context", "target", "threads", "constant_memory",
    )
} | {"max_new_tokens": "--max-tokens"}  # fmt: skip
_NAME = "|".join(_OPTIONS)
_ASSIGNMENT = re.compile(rf"(?<![-\w])({_NAME})=(?:'([^']*)'|\"([^\"]*)\"|(\w+))")
_MENTION = re.compile(rf"^({_NAME})(?= must )|(?<![-\w'])({'|'.join(n for n in _OPTIONS if '_' in n)})(?![-\w(='])")


def with_option_names(text: str, args: argparse.Namespace) -> str:
    """Replace Python arguments in a text by the command's options: overflow='slide' by `--overflow slide`."""

    def option(match: re.Match[str]) -> str:
        name, *values = (group for group in match.groups() if group is not None)
        typed = _OPTIONS[name]
        return " ".join([typed, *values]) if hasattr(args, typed[2:].replace("-", "_")) else match[0]

    return _MENTION.sub(option, _ASSIGNMENT.sub(option, text))
