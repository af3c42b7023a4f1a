"""Schedule choices: the tunable numbers of scheduling rules as data, to be searched, stored and read back.

A field is None where the rule decides. To make another number of a rule tunable: add a field and an axis of
alternatives here, and let the rule read the field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from itertools import product
from typing import Literal

from relaxlite.errors import InvalidArgumentError
from relaxlite.records import dataclass

Outer = Literal["rows", "columns"]


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """Overrides of the scheduling rules for one program; they apply to every reduction in it."""

    rows: int | None = None  # of a register tile, at most
    vectors: int | None = None  # of a register tile, next to each other; also the width of packed panels
    sums: int | None = None  # independent sums of a tile; where it has fewer elements, each gets several
    outer: Outer | None = None  # the outer one of the two loops over tiles, which threads share
    partial_sums: int | None = None  # vectors of partial results of a reduction along its contiguous loop
    strategy: str | None = None  # of a product with many rows (strategy_table.py)

    def as_dict(self) -> dict[str, int | str]:
        """Return the fields that are set, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}

    def updated(self, other: ScheduleChoice) -> ScheduleChoice:
        """Return this choice with the fields that `other` sets replaced."""
        return replace(self, **other.as_dict())  # type: ignore[arg-type]

    @staticmethod
    def from_dict(values: Mapping[str, object]) -> ScheduleChoice:
        """Build a choice from `as_dict`. Raises InvalidArgumentError for an unknown field or value."""
        for name, value in values.items():
            if name == "strategy" and isinstance(value, str):
                continue
            if name not in _KNOWN or not _is_valid(name, value):
                raise InvalidArgumentError(f"a schedule has no {name}={value!r}; there are {_known_text()}")
        return ScheduleChoice(**values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.as_dict().items()) or "as the rules say"


_MAX_VALUE = 64
_KNOWN: dict[str, tuple[str, ...]] = {
    "rows": (),
    "vectors": (),
    "sums": (),
    "outer": ("rows", "columns"),
    "partial_sums": (),
}

DEFAULT = ScheduleChoice()
ONE_SUM = 1  # `sums`: each element is one sum, whose terms are added in the same order for any number of rows


def _is_valid(name: str, value: object) -> bool:
    if _KNOWN[name]:
        return value in _KNOWN[name]
    return type(value) is int and 1 <= value <= _MAX_VALUE


def _known_text() -> str:
    texts = [f"{name} ({' or '.join(values) or f'1 to {_MAX_VALUE}'})" for name, values in _KNOWN.items()]
    return ", ".join(texts)


def axes(registers: int, strategies: Iterable[str]) -> tuple[tuple[ScheduleChoice, ...], ...]:
    """Return the tuner's search space for `registers` vector registers and the names `strategies`, for any program.

    An axis is a list of alternatives that depend little on the other axes, so axes are searched one after another.
    A rule that does not read a field makes the same schedule of all its values: equal schedules are dropped.
    """
    tiles = tuple(
        ScheduleChoice(rows=rows, vectors=vectors)
        for vectors, rows in product((1, 2, 3, 4, 6), (1, 2, 3, 4, 5, 6, 8, 12, 14))
        if rows * vectors >= 4 and rows * vectors + vectors + 1 <= registers  # sums, a row of operands, a broadcast
    )
    return (
        tuple(ScheduleChoice(strategy=name) for name in strategies),
        tiles,
        tuple(ScheduleChoice(sums=count) for count in (4, 16, 24)),
        (ScheduleChoice(outer="rows"), ScheduleChoice(outer="columns")),
        tuple(ScheduleChoice(partial_sums=count) for count in (1, 2, 8)),
    )
