"""Interval arithmetic on integers: bounds of a result from bounds of the operands.

The result for an empty interval (lower > upper, from contradictory facts) is unspecified.
"""

from __future__ import annotations

from typing import TypeAlias

Interval: TypeAlias = tuple[int | None, int | None]  # inclusive lower and upper bound; None is no bound
UNBOUNDED: Interval = (None, None)
ONE: Interval = (1, 1)


def is_nonneg(a: Interval) -> bool:
    """Whether every value is >= 0."""
    return a[0] is not None and a[0] >= 0


def is_nonpos(a: Interval) -> bool:
    """Whether every value is <= 0."""
    return a[1] is not None and a[1] <= 0


def add(a: Interval, b: Interval) -> Interval:
    """Interval of a + b."""
    return (
        None if a[0] is None or b[0] is None else a[0] + b[0],
        None if a[1] is None or b[1] is None else a[1] + b[1],
    )


def scale(a: Interval, factor: int) -> Interval:
    """Interval of a * factor."""
    low, high = a if factor >= 0 else (a[1], a[0])
    return None if low is None else low * factor, None if high is None else high * factor


def scale_down(a: Interval, factor: int) -> Interval:
    """Interval of the integers x with x*factor in a, for factor > 0."""
    return None if a[0] is None else -(-a[0] // factor), None if a[1] is None else a[1] // factor


def negate(a: Interval) -> Interval:
    """Interval of -a."""
    return scale(a, -1)


def multiply(a: Interval, b: Interval) -> Interval:
    """Interval of a * b."""
    if a == (0, 0):
        return a
    if is_nonneg(a):
        return _multiply_nonneg(a, b)
    if is_nonpos(a):
        return negate(multiply(negate(a), b))
    if is_nonneg(b) or is_nonpos(b):
        return multiply(b, a)
    if a[0] is None or a[1] is None or b[0] is None or b[1] is None:
        return UNBOUNDED
    return min(a[0] * b[1], a[1] * b[0]), max(a[0] * b[0], a[1] * b[1])


def _multiply_nonneg(a: Interval, b: Interval) -> Interval:
    """Interval of a * b for a >= 0 other than (0, 0): each bound of b times the bound of a that widens the result."""
    low, high = a
    low_factor = high if b[0] is None or b[0] < 0 else low
    high_factor = high if b[1] is None or b[1] > 0 else low
    return (
        None if b[0] is None or low_factor is None else b[0] * low_factor,
        None if b[1] is None or high_factor is None else b[1] * high_factor,
    )


def floordiv(a: Interval, b: Interval) -> Interval:
    """Interval of a // b, for b != 0."""
    if is_nonneg(b):
        low, high = max(b[0] or 0, 1), b[1]
        if high is not None and high < low:
            return UNBOUNDED  # b is always 0
        return (
            None if a[0] is None else _div_positive(a[0], low if a[0] < 0 else high),
            None if a[1] is None else _div_positive(a[1], high if a[1] < 0 else low),
        )
    if is_nonpos(b):
        return floordiv(negate(a), negate(b))
    if a[0] is None or a[1] is None:
        return UNBOUNDED
    magnitude = max(abs(a[0]), abs(a[1]))
    return -magnitude, magnitude


def _div_positive(a: int, b: int | None) -> int:
    """Quotient a // b for b > 0; the limit for b -> infinity if b is None."""
    if b is None:
        return 0 if a >= 0 else -1
    return a // b


def floormod(a: Interval, b: Interval) -> Interval:
    """Interval of a % b with the sign of b, for b != 0."""
    if not is_nonneg(b):
        if is_nonpos(b):
            return negate(floormod(negate(a), negate(b)))
        return add(b, (1, -1))
    if not is_nonneg(a):
        return 0, add(b, (-1, -1))[1]
    if a[1] is not None and b[0] is not None and a[1] < b[0]:
        return a
    return 0, minimum(a, add(b, (-1, -1)))[1]


def minimum(a: Interval, b: Interval) -> Interval:
    """Interval of min(a, b)."""
    low = None if a[0] is None or b[0] is None else min(a[0], b[0])
    high = min((h for h in (a[1], b[1]) if h is not None), default=None)
    return low, high


def maximum(a: Interval, b: Interval) -> Interval:
    """Interval of max(a, b)."""
    return negate(minimum(negate(a), negate(b)))


def intersect(a: Interval, b: Interval) -> Interval:
    """Intersection of two intervals."""
    lower = max((low for low in (a[0], b[0]) if low is not None), default=None)
    upper = min((high for high in (a[1], b[1]) if high is not None), default=None)
    return lower, upper
