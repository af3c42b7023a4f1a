"""Which tests run by default, and which only with `--exhaustive`. See docs/testing.md."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import combinations

import pytest

OPTION = "--exhaustive"

_everything = False


def use(config: pytest.Config) -> None:
    """Choose the tier before the files of tests are imported."""
    global _everything
    _everything = config.getoption(OPTION)


def is_exhaustive() -> bool:
    return _everything


def examples(number: int, by_default: int | None = None) -> int:
    """How many random examples to try: `number` of them, or fewer by default, a quarter where nothing else is said."""
    if _everything:
        return number
    return max(1, number // 4) if by_default is None else by_default


def few(values: Sequence[object], number: int = 1) -> list[object]:
    """All of a test's seeds or sizes that repeat one another, of which the first `number` run by default."""
    return [*values[:number], *(pytest.param(value, marks=pytest.mark.exhaustive) for value in values[number:])]


def few_rows(rows: Sequence[tuple[object, ...]], number: int = 1) -> list[object]:
    """As `few`, of rows of several parameters."""
    return [*rows[:number], *(pytest.param(*row, marks=pytest.mark.exhaustive) for row in rows[number:])]


def only(kept: Collection[str], names: Iterable[str]) -> list[object]:
    """All names as parameters, of which those that are `kept` run by default."""
    names = list(names)
    if unknown := set(kept) - set(names):
        raise ValueError(f"kept, but not among the parameters: {', '.join(sorted(unknown))}")
    return [name if name in kept else pytest.param(name, marks=pytest.mark.exhaustive) for name in names]


def cover(rows: Sequence[Sequence[Hashable]], strength: int) -> list[int]:
    """Numbers of some rows that hold each combination of `strength` columns' values that any row holds.

    Greedy, and the same for the same rows. Of rows that add equally much, that with the least used values is taken.
    """
    width = len(rows[0]) if rows else 0
    groups = list(combinations(range(width), min(strength, width)))
    holds = [{(group, tuple(row[i] for i in group)) for group in groups} for row in rows]
    missing = set().union(*holds)
    used: Counter[tuple[int, Hashable]] = Counter()
    left = list(range(len(rows)))
    taken = []
    while missing:
        best = max(left, key=lambda i: (len(holds[i] & missing), -sum(used[cell] for cell in enumerate(rows[i])), -i))
        missing -= holds[best]
        used.update(enumerate(rows[best]))
        left.remove(best)
        taken.append(best)
    return sorted(taken)


_STRENGTHS = {"each_value": 1, "pairwise": 2}


def _values(item: pytest.Item, names: Sequence[str]) -> tuple[Hashable, ...]:
    """Of these parameters. What cannot be hashed is told apart as an object: one `parametrize` lists it once."""
    params = item.callspec.params  # type: ignore[attr-defined]
    return tuple(_key(params[name]) for name in names)


def _key(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def _row(item: pytest.Item, names: Sequence[str]) -> list[Hashable]:
    """A value for each of these parameters, or for each `parametrize`, whose rows are written by hand, if none is."""
    if names:
        return [_values(item, [name]) for name in names]
    listed = [mark.args[0] for mark in item.iter_markers("parametrize")]
    return [_values(item, re.findall(r"\w+", each) if isinstance(each, str) else each) for each in listed]


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The tests that are run by `--exhaustive` only."""
    out = {item for item in items if item.get_closest_marker("exhaustive")}
    families: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item not in out and any(item.get_closest_marker(name) for name in _STRENGTHS):
            families[item.nodeid.partition("[")[0]].append(item)
    for family in families.values():
        for name, strength in _STRENGTHS.items():
            if marker := family[0].get_closest_marker(name):
                kept = cover([_row(item, marker.args) for item in family], strength)
                out.update(set(family) - {family[i] for i in kept})
    return out


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave those tests out that are neither in the chosen tier nor named by their whole ids on the command line."""
    if _everything:
        return
    out = left_out(items)
    named = {argument.partition("[")[2] for argument in config.args if "[" in argument}
    out = {item for item in out if item.nodeid.partition("[")[2] not in named}
    if out:
        config.hook.pytest_deselected(items=[item for item in items if item in out])
        items[:] = [item for item in items if item not in out]
