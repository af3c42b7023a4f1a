"""Options that benchmarks have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """For `type=`: names of `known`, between commas."""

    def parse_names(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; there are {', '.join(known)}")
        return names

    return parse_names
