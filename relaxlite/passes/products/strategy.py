"""Strategies: the ways to compute a contraction, each with what it requires, and who is asked which one is taken.

    candidates(table, contraction, target)    strategies for its form and encodings, with reasons against some of them
    chosen(candidates)                        those that are taken, for ranges of rows: the one for most rows first

The rows themselves are the table in strategy_table.py. A strategy is taken from `min_rows` rows on; below that the next
candidate is. So the last candidate of every form takes one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from relaxlite.passes.products.contraction import Contraction
from relaxlite.records import dataclass
from relaxlite.target import Target

if TYPE_CHECKING:
    from relaxlite.passes.products.blocks import ManyRows


@dataclass(frozen=True, slots=True)
class Requirement:
    """A property of the target without which a strategy is impossible or not worth while; `text` follows "needs"."""

    text: str
    holds: Callable[[Target], bool]


@dataclass(frozen=True, slots=True)
class Strategy:
    """One row of the table.

    `summary`: the inner loop. `forms`, `operands`: the loops and the kinds of encodings (x, w) that it takes; no
    operands: any. `min_rows`: from how many rows on it pays. `rounds`: what it rounds beyond its operands' types.
    `evidence`: the benchmark that shows its speed. `tile` makes the tiles of blocked weights for some rows, `many_rows`
    for many; it returns a reason where the loops do not fit it.
    """

    name: str
    summary: str
    forms: frozenset[str]
    operands: frozenset[tuple[str, str]] = frozenset()
    requires: tuple[Requirement, ...] = ()
    min_rows: int = 1
    rounds: str = ""
    evidence: str = ""
    tile: type[ManyRows] | None = None
    many_rows: Callable[[ManyRows, int, Target], Any] | None = None

    def takes(self, contraction: Contraction) -> bool:
        """Whether it is for such loops and encodings at all."""
        kinds = contraction.x.kind, contraction.w.kind
        return contraction.form in self.forms and (not self.operands or kinds in self.operands)

    def refusal(self, contraction: Contraction, target: Target) -> str | None:
        """Why it is not taken on the target; None: it may be."""
        for requirement in self.requires:
            if not requirement.holds(target):
                return f"needs {requirement.text}, which {target.cpu} has not"
        most = contraction.max_rows
        if most is not None and most < self.min_rows:
            return f"pays from {self.min_rows} rows on, and there are at most {most}"
        return None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy for a contraction, and the reason against it, if there is one."""

    strategy: Strategy
    refusal: str | None = None


def candidates(
    table: Iterable[Strategy], contraction: Contraction, target: Target, preferred: str | None = None
) -> tuple[Candidate, ...]:
    """The strategies of a table that take the contraction, in the table's order. `preferred`: the name of one to take
    for many rows, as `relaxlite tune` has measured, where it is not refused."""
    result = [s for s in table if s.takes(contraction)]
    reasons = {s.name: s.refusal(contraction, target) for s in result}
    if preferred in reasons and reasons[preferred] is None:
        limit = next(s.min_rows for s in result if s.name == preferred)
        for other in result:
            if other.name != preferred and other.min_rows >= limit and reasons[other.name] is None:
                reasons[other.name] = f"tuning has chosen {preferred}"
    return tuple(Candidate(s, reasons[s.name]) for s in result)


def chosen(some: Iterable[Candidate]) -> tuple[Strategy, ...]:
    """Those taken, by falling rows: each takes the rows below the one before it."""
    taken: list[Strategy] = []
    for candidate in some:
        if candidate.refusal is None and (not taken or candidate.strategy.min_rows < taken[-1].min_rows):
            taken.append(candidate.strategy)
    return tuple(taken)
