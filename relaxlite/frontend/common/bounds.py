"""Bounds that users set on symbols: {"batch": "1..64"}."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from relaxlite.errors import InvalidArgumentError

Bounds: TypeAlias = "Mapping[str, tuple[int | None, int | None] | str]"

_RANGE = re.compile(r"\s*(\d*)\s*(\.\.)?\s*(\d*)\s*")


def parse_range(name: str, value: tuple[int | None, int | None] | str) -> tuple[int, int | None]:
    """Parse "1..512", "1..", "..512", "8" (at most 8), or a pair. Raises InvalidArgumentError."""
    if isinstance(value, str):
        match = _RANGE.fullmatch(value)
        if match is None or not (match[1] or match[3]):
            raise InvalidArgumentError(
                f"bounds of '{name}': {value!r} is not a range such as '1..512', '1..' or '..512'"
            )
        value = (
            (int(match[1]) if match[1] else None, int(match[3]) if match[3] else None)
            if match[2]
            else (None, int(match[1]))
        )
    if not isinstance(value, tuple | list) or len(value) != 2 or any(not isinstance(v, int | None) for v in value):
        raise InvalidArgumentError(
            f"bounds of '{name}' must be a pair of integers or None, or text such as '1..512', not {value!r}"
        )
    lower, upper = value[0] or 0, value[1]
    if lower < 0 or (upper is not None and upper < lower):
        raise InvalidArgumentError(f"bounds of '{name}': no size lies in {lower}..{'' if upper is None else upper}")
    return lower, upper


def listed(names: Iterable[str]) -> str:
    """Return names in quotes, for messages; "none" if there are none."""
    return ", ".join(f"'{name}'" for name in names) or "none"
