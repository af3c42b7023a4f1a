"""Assignments of variables: random ones for tests, and a few fixed ones that show at once that a claim is false."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence

from relaxlite.ir.intervals import Interval
from relaxlite.ir.symbolic import SymExpr, SymVar, evaluate_with

_STEPS = (2, 3, 5, 7, 11, 13, 17, 19)
_STYLES = range(4)
_MAX_ALONE = 4  # variables that are tried at their least and at a large value while the others are at neither


def sample_values(variables: Iterable[SymVar], rng: random.Random, limit: int = 100) -> dict[SymVar, int]:
    """A random assignment within the declared bounds and divisors; `limit` is the range where there is no bound."""
    values = {}
    for var in variables:
        step = var.divisor
        low = var.lower if var.lower is not None else min(-limit, (var.upper or 0) - limit)
        first = -(-low // step)
        last = (low + limit) // step if var.upper is None else min(var.upper, low + limit) // step
        values[var] = rng.randint(first, max(first, last)) * step
    return values


def has_counterexample(
    claim: SymExpr,
    facts: Sequence[SymExpr],
    zeros: Sequence[SymExpr],
    domain: Callable[[SymVar], tuple[Interval, int, bool]],
) -> bool:
    """Is the claim < 0 at one of a few points where each fact is >= 0 and each zero is 0?

    `domain` gives the bounds of a variable, its divisor, and whether it is a loop variable.
    """
    variables = dict.fromkeys(v for expr in (claim, *facts, *zeros) for v in expr.free_vars())
    domains = {v: domain(v) for v in variables}
    styles = [{v: _pick(*domains[v], style, position) for position, v in enumerate(variables)} for style in _STYLES]
    least, others, *_, large = styles
    alone = (
        {**others, v: odd[v]} for v in claim.free_vars()[:_MAX_ALONE] for odd in (least, large) if odd[v] != others[v]
    )
    for values in itertools.chain(styles, alone):
        known = dict[SymExpr, int](values.items())
        try:
            if (
                evaluate_with(claim, known) < 0
                and all(evaluate_with(fact, known) >= 0 for fact in facts)
                and all(evaluate_with(zero, known) == 0 for zero in zeros)
            ):
                return True
        except ZeroDivisionError:
            continue
    return False


def _pick(bounds: Interval, divisor: int, is_loop: bool, style: int, position: int) -> int:
    """The least value of all variables, small values in two orders, large values; loop variables start their loops."""
    low, high = bounds
    if low is None:
        low = -11 if style == 0 else 0
    steps = 0, _STEPS[position % 8], _STEPS[-1 - position % 8], 1000 + 37 * position
    value = (-(-low // divisor) + (style // 3 if is_loop else steps[style])) * divisor
    return value if high is None else min(value, high // divisor * divisor)
