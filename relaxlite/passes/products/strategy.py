"""Strategies: ways to compute a contraction, their requirements, and the selection among them.

    candidates(table, contraction, target, precision)    strategies for it, with reasons against some of them
    chosen(candidates)                                   the strategies taken, the one for most rows first

The strategies are listed in strategy_table.py. A strategy is taken from `min_rows` rows on; below that the next
candidate is. So the last candidate of every form takes one row.

Passes ask before they round operands or transform constant weights, with the precision that the module or function
allows; the scheduler asks when that is done, without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from relaxlite.passes.products.contraction import Contraction
from relaxlite.records import dataclass
from relaxlite.target import Target

if TYPE_CHECKING:
    from relaxlite.passes.products.blocks import ManyRows
    from relaxlite.passes.products.prepared_rows import Products


@dataclass(frozen=True, slots=True)
class Precision:
    """What may be rounded: the option `precision`, and whether a function or a weight is marked for relaxed
    precision."""

    name: str
    is_relaxed: bool = False


Fit: TypeAlias = "Callable[[Contraction, Target], str | None]"
"""(contraction, target) -> the reason why a strategy is not for such sizes or encodings; None: it may be taken."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """A property of the target that a strategy needs to be possible or to pay.

    `lacking`: the reason against the strategy where the target has not the property; "{cpu}" stands for its processor.
    """

    lacking: str
    holds: Callable[[Target], bool]


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to compute a contraction, with its requirements: one row of the strategy table.

    `summary`: the inner loop. `forms`, `operands`: the loops and the kinds of encodings (x, w) that it takes; no
    operands: any. `min_rows`: from how many rows on it pays. `rounds`: what it rounds beyond its operands' types,
    where one of `precisions` allows it; none: nothing has to allow it. `fits`: what it asks of sizes and bits.
    `evidence`: the benchmark that shows its speed. `tile`: the class of tiles of blocked weights for a few rows.
    `many_rows` plans tiles for many rows, or returns a reason where the loops do not fit. `prepares`: the programs
    that a pass makes of products with constant weights.
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
    precisions: frozenset[Precision] = frozenset()
    fits: Fit | None = None
    prepares: type[Products] | None = None

    def takes(self, contraction: Contraction) -> bool:
        """Whether the strategy applies to the form and the encodings of the contraction."""
        kinds = contraction.x.kind, contraction.w.kind
        if self.prepares is not None and not contraction.is_constant:
            return False
        return contraction.form in self.forms and (not self.operands or kinds in self.operands)

    def lacking(self, target: Target, precision: Precision | None = None) -> str | None:
        """Return the reason why the strategy is not for the target and precision, whatever it multiplies; None: it may
        be. No precision: what is rounded is rounded already."""
        missing = next((r for r in self.requires if not r.holds(target)), None)
        if missing is not None:
            return missing.lacking.format(cpu=target.cpu)
        if precision is None or not self.precisions or self.precisions & {precision, Precision(precision.name)}:
            return None
        return f"rounds {self.rounds}, which precision {precision.name} does not allow"

    def refusal(self, contraction: Contraction, target: Target, precision: Precision | None = None) -> str | None:
        """Return the reason why the strategy is not taken for the contraction on the target; None: it may be taken."""
        if (reason := self.lacking(target, precision)) is not None:
            return reason
        max_rows = contraction.max_rows
        if max_rows is not None and max_rows < self.min_rows:
            return f"pays from {self.min_rows} rows on, and there are at most {max_rows}"
        return None if self.fits is None else self.fits(contraction, target)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy for a contraction, and the reason against it, if there is one."""

    strategy: Strategy
    refusal: str | None = None


def candidates(
    table: Iterable[Strategy],
    contraction: Contraction,
    target: Target,
    precision: Precision | None = None,
    *,
    preferred: str | None = None,
) -> tuple[Candidate, ...]:
    """Return the strategies of a table that apply to the contraction, in the table's order.

    `preferred`: the name of the strategy that `relaxlite tune` chose for many rows; no effect where it is refused.
    """
    applicable = [s for s in table if s.takes(contraction)]
    reasons = {s.name: s.refusal(contraction, target, precision) for s in applicable}
    if preferred in reasons and reasons[preferred] is None:
        limit = next(s.min_rows for s in applicable if s.name == preferred)
        for other in applicable:
            if other.name != preferred and other.min_rows >= limit and reasons[other.name] is None:
                reasons[other.name] = f"tuning has chosen {preferred}"
    return tuple(Candidate(s, reasons[s.name]) for s in applicable)


def allowed_of(options: Iterable[Candidate]) -> tuple[Strategy, ...]:
    """Return the strategies of candidates that no reason stands against."""
    return tuple(candidate.strategy for candidate in options if candidate.refusal is None)


def chosen(options: Iterable[Candidate]) -> tuple[Strategy, ...]:
    """Return the strategies taken, by falling `min_rows`: each takes the rows below those of the one before it."""
    taken: list[Strategy] = []
    for strategy in allowed_of(options):
        if not taken or strategy.min_rows < taken[-1].min_rows:
            taken.append(strategy)
    return tuple(taken)
