"""Slices of symbolic sizes: NumPy's rules for negative and overlong starts and ends, as exact expressions."""

from __future__ import annotations

from dataclasses import dataclass

from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import SymExpr, as_int, ceildiv, smax, smin, sym

_HUGE = 1 << 31  # exporters write "to the end" as INT32_MAX, INT64_MAX and numbers near to them


@dataclass(frozen=True, slots=True)
class SliceRange:
    """x[begin], x[begin + step], ...: `size` elements, all inside."""

    begin: SymExpr
    size: SymExpr
    step: int

    def is_whole(self, extent: SymExpr) -> bool:
        return self.step == 1 and as_int(self.begin) == 0 and self.size is extent


def resolve_slice(extent: SymExpr, start: SymExpr, end: SymExpr, step: int) -> SliceRange:
    """The elements that x[start:end:step] means along a dimension of this extent; step is not 0."""
    if step > 0:
        first, last = _clamp(extent, start, sym(0), extent), _clamp(extent, end, sym(0), extent)
        size = _nonnegative(ceildiv(_minus(last, first), step))
        return SliceRange(first, size, step)
    first, last = _clamp(extent, start, sym(-1), extent - 1), _clamp(extent, end, sym(-1), extent - 1)
    return SliceRange(first, _nonnegative(ceildiv(first - last, -step)), step)


def _minus(last: SymExpr, first: SymExpr) -> SymExpr:
    return PROVER.simplify(last - first)


def _clamp(extent: SymExpr, value: SymExpr, low: SymExpr, high: SymExpr) -> SymExpr:
    """A start or end: counted from the end where it is negative, then limited to low..high."""
    known = as_int(value)
    if known is not None and known >= _HUGE - 1:
        return high
    if known is not None and known <= -_HUGE:
        return low
    if PROVER.can_prove_lt(value, 0):
        return _limit(value + extent, low, high)
    if PROVER.can_prove_le(0, value):
        return _limit(value, low, high)
    # value + extent * (1 if value < 0 else 0): min(0, max(-1, value)) is -1 or 0
    return _limit(value - extent * smin(0, smax(-1, value)), low, high)


def _limit(value: SymExpr, low: SymExpr, high: SymExpr) -> SymExpr:
    if not PROVER.can_prove_le(low, value):
        value = high if PROVER.can_prove_le(high, low) else smax(value, low)
    return (
        value if PROVER.can_prove_le(value, high) else high if PROVER.can_prove_le(high, value) else smin(value, high)
    )


def _nonnegative(size: SymExpr) -> SymExpr:
    return size if PROVER.can_prove_le(0, size) else smax(size, 0)
