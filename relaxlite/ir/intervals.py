"""Interval arithmetic on integers: what bounds of the operands say about the bounds of the result.

An empty interval (lower above upper, from facts that contradict each other) may give any result.
"""

from __future__ import annotations

from typing import TypeAlias

Interval: TypeAlias = tuple[int | None, int | None]  # inclusive lower and upper bound; None is no bound
UNBOUNDED: Interval = (None, None)
ONE: Interval = (1, 1)


def is_nonneg(a: Interval) -> bool:
    return a[0] is not None and a[0] >= 0


def is_nonpos(a: Interval) -> bool:
    return a[1] is not None and a[1] <= 0


def add(a: Interval, b: Interval) -> Interval:
    return (
        None if a[0] is None or b[0] is None else a[0] + b[0],
        None if a[1] is None or b[1] is None else a[1] + b[1],
    )


def scale(a: Interval, factor: int) -> Interval:
    low, high = a if factor >= 0 else (a[1], a[0])
    return None if low is None else low * factor, None if high is None else high * factor


def scale_down(a: Interval, factor: int) -> Interval:
    """The integers x with x*factor in a, for factor > 0."""
    return None if a[0] is None else -(-a[0] // factor), None if a[1] is None else a[1] // factor


def negate(a: Interval) -> Interval:
    return scale(a, -1)


def multiply(a: Interval, b: Interval) -> Interval:
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
    """a >= 0, and a > 0 is possible: each bound of b meets the bound of a that moves it further out."""
    low, high = a
    least = high if b[0] is None or b[0] < 0 else low
    most = high if b[1] is None or b[1] > 0 else low
    return (
        None if b[0] is None or least is None else b[0] * least,
        None if b[1] is None or most is None else b[1] * most,
    )


def floordiv(a: Interval, b: Interval) -> Interval:
    """b is not 0."""
    if is_nonneg(b):
        least, most = max(b[0] or 0, 1), b[1]
        if most is not None and most < least:
            return UNBOUNDED  # b is never anything but 0
        return (
            None if a[0] is None else _div_positive(a[0], least if a[0] < 0 else most),
            None if a[1] is None else _div_positive(a[1], most if a[1] < 0 else least),
        )
    if is_nonpos(b):
        return floordiv(negate(a), negate(b))
    if a[0] is None or a[1] is None:
        return UNBOUNDED
    size = max(abs(a[0]), abs(a[1]))
    return -size, size


def _div_positive(a: int, b: int | None) -> int:
    """a // b, with None for a b that grows without end."""
    if b is None:
        return 0 if a >= 0 else -1
    return a // b


def floormod(a: Interval, b: Interval) -> Interval:
    """b is not 0, and gives the sign."""
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
    low = None if a[0] is None or b[0] is None else min(a[0], b[0])
    high = min((h for h in (a[1], b[1]) if h is not None), default=None)
    return low, high


def maximum(a: Interval, b: Interval) -> Interval:
    return negate(minimum(negate(a), negate(b)))


def intersect(a: Interval, b: Interval) -> Interval:
    lower = max((low for low in (a[0], b[0]) if low is not None), default=None)
    upper = min((high for high in (a[1], b[1]) if high is not None), default=None)
    return lower, upper
