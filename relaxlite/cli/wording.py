"""Errors of the Python interface in the words of the command line: `--max-tokens` is what people typed there, not
`max_new_tokens`."""

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
_SET = re.compile(rf"(?<![-\w])({_NAME})=(?:'([^']*)'|\"([^\"]*)\"|(\w+))")
_NAMED = re.compile(rf"^({_NAME})(?= must )|(?<![-\w'])({'|'.join(n for n in _OPTIONS if '_' in n)})(?![-\w(='])")


def as_typed(text: str, args: argparse.Namespace) -> str:
    """The text with options of a command in place of arguments in Python: `--overflow slide` for overflow='slide'."""

    def option(found: re.Match[str]) -> str:
        name, *values = (group for group in found.groups() if group is not None)
        typed = _OPTIONS[name]
        return " ".join([typed, *values]) if hasattr(args, typed[2:].replace("-", "_")) else found[0]

    return _NAMED.sub(option, _SET.sub(option, text))
