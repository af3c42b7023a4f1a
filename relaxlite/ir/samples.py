"""Sample assignments of variables: random ones for tests, fixed ones to refute claims before a proof attempt."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence

from relaxlite.ir.intervals import Interval
from relaxlite.ir.symbolic import SymExpr, SymVar, evaluate_memoized

_STEPS = (2, 3, 5, 7, 11, 13, 17, 19)
_STYLES = range(4)
_MAX_SINGLE_EXTREMES = 4  # variables that are sampled at extreme values while the others are not


def sample_values(variables: Iterable[SymVar], rng: random.Random, limit: int = 100) -> dict[SymVar, int]:
    """Random assignment within declared bounds and divisors; `limit` is the width of the range without a bound."""
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
    """Whether the claim `claim >= 0` fails at a sample point with every fact >= 0 and every expression of `zeros` 0.

    `domain` returns the bounds of a variable, its divisor, and whether it is a loop variable.
    """
    variables = dict.fromkeys(v for expr in (claim, *facts, *zeros) for v in expr.free_vars())
    domains = {v: domain(v) for v in variables}
    styles = [
        {v: _sample_value(*domains[v], style, position) for position, v in enumerate(variables)} for style in _STYLES
    ]
    minimal, base, *_, large = styles
    single_extremes = (
        {**base, v: extreme[v]}
        for v in claim.free_vars()[:_MAX_SINGLE_EXTREMES]
        for extreme in (minimal, large)
        if extreme[v] != base[v]
    )
    for values in itertools.chain(styles, single_extremes):
        known = dict[SymExpr, int](values.items())
        try:
            if (
                evaluate_memoized(claim, known) < 0
                and all(evaluate_memoized(fact, known) >= 0 for fact in facts)
                and all(evaluate_memoized(zero, known) == 0 for zero in zeros)
            ):
                return True
        except ZeroDivisionError:
            continue
    return False


def _sample_value(bounds: Interval, divisor: int, is_loop: bool, style: int, position: int) -> int:
    """Sample value of a variable: style 0 minimal, 1 and 2 small, 3 large; of a loop variable, the first or second."""
    low, high = bounds
    if low is None:
        low = -11 if style == 0 else 0
    steps = 0, _STEPS[position % 8], _STEPS[-1 - position % 8], 1000 + 37 * position
    value = (-(-low // divisor) + (style // 3 if is_loop else steps[style])) * divisor
    return value if high is None else min(value, high // divisor * divisor)
