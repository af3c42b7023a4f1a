"""Slices of symbolic sizes: NumPy's rules for negative and overlong starts and ends, as exact expressions."""

from __future__ import annotations

from collections.abc import Iterable

from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import SymExpr, as_int, ceildiv, smax, smin, sym
from relaxlite.records import dataclass

_HUGE = (1 << 31) - 1  # exporters write "to the end" as INT32_MAX, INT64_MAX and numbers near to them


@dataclass(frozen=True, slots=True)
class SliceRange:
    """x[begin], x[begin + step], ...: `size` elements, all inside; of none, `begin` may lie outside."""

    begin: SymExpr
    size: SymExpr
    step: int

    def is_whole(self, extent: SymExpr) -> bool:
        return self.step == 1 and as_int(self.begin) == 0 and self.size is extent


def resolve_slice(extent: SymExpr, start: SymExpr, end: SymExpr, step: int) -> SliceRange:
    """The elements that x[start:end:step] means along a dimension of this extent; step is not 0.

    For step > 0: from max(start, 0) to before min(end, extent). The count is at most each of the differences between an
    upper and a lower limit, so that limits cancel: x[-3:] has min(3, extent) elements.
    """
    if step > 0:
        lows, highs = _limits(extent, start, sym(0)), _limits(extent, end, extent)
        begin = _extreme(lows, is_max=True)
    else:
        lows, highs = _limits(extent, end, sym(-1)), _limits(extent, start, extent - 1)
        begin = _extreme(highs, is_max=False)
    span = _extreme([high - low for high in highs for low in lows], is_max=False)
    return SliceRange(begin, _nonnegative(ceildiv(span, abs(step))), step)


def _limits(extent: SymExpr, value: SymExpr, border: SymExpr) -> list[SymExpr]:
    """A start or end, counted from the end where it is negative, and the border that it may not pass."""
    known = as_int(value)
    if known is not None and abs(known) >= _HUGE:
        passes = (known > 0) == (border is not sym(0) and border is not sym(-1))
        return [border] if passes else [value, border]
    if PROVER.can_prove_lt(value, 0):
        return [value + extent, border]
    if PROVER.can_prove_le(0, value):
        return [value, border]
    # value + extent * (1 if value < 0 else 0): min(0, max(-1, value)) is -1 or 0
    return [value - extent * smin(0, smax(-1, value)), border]


def _extreme(values: Iterable[SymExpr], *, is_max: bool) -> SymExpr:
    """The greatest or least, without those that are provably not it."""
    kept: list[SymExpr] = []
    for value in values:
        if any(_beats(other, value, is_max) for other in kept):
            continue
        kept = [other for other in kept if not _beats(value, other, is_max)]
        kept.append(value)
    return (smax if is_max else smin)(*kept)


def _beats(a: SymExpr, b: SymExpr, is_max: bool) -> bool:
    return PROVER.can_prove_le(b, a) if is_max else PROVER.can_prove_le(a, b)


def _nonnegative(size: SymExpr) -> SymExpr:
    return size if PROVER.can_prove_le(0, size) else smax(size, 0)
