"""Slices of symbolic sizes: NumPy's rules for negative and out-of-range starts and ends as exact expressions."""

from __future__ import annotations

from collections.abc import Iterable

from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import SymExpr, as_int, ceildiv, smax, smin, sym
from relaxlite.records import dataclass

_HUGE = (1 << 31) - 1  # exporters write "to the end" as INT32_MAX, INT64_MAX and numbers near to them


@dataclass(frozen=True, slots=True)
class SliceRange:
    """`size` elements x[begin], x[begin + step], ..., all in bounds; if size is 0, `begin` may be out of bounds."""

    begin: SymExpr
    size: SymExpr
    step: int

    def is_whole(self, extent: SymExpr) -> bool:
        """Whether the range is a whole dimension of this extent."""
        return self.step == 1 and as_int(self.begin) == 0 and self.size is extent


def resolve_slice(extent: SymExpr, start: SymExpr, end: SymExpr, step: int) -> SliceRange:
    """Return the range of x[start:end:step] along a dimension of this extent; step is not 0.

    For step > 0: from max(start, 0) to before min(end, extent). The size is the minimum of the differences between each
    upper and each lower limit, so that terms cancel: x[-3:] has min(3, extent) elements.
    """
    if step > 0:
        lows, highs = _limits(extent, start, sym(0)), _limits(extent, end, extent)
        begin = _extreme(lows, is_max=True)
    else:
        lows, highs = _limits(extent, end, sym(-1)), _limits(extent, start, extent - 1)
        begin = _extreme(highs, is_max=False)
    span = _extreme([high - low for high in highs for low in lows], is_max=False)
    return SliceRange(begin, _nonnegative(ceildiv(span, abs(step))), step)


def _limits(extent: SymExpr, value: SymExpr, bound: SymExpr) -> list[SymExpr]:
    """Return a start or end, with extent added if it is negative, and the bound that it is clamped to."""
    known = as_int(value)
    if known is not None and abs(known) >= _HUGE:
        is_beyond = (known > 0) == (bound is not sym(0) and bound is not sym(-1))
        return [bound] if is_beyond else [value, bound]
    if PROVER.can_prove_lt(value, 0):
        return [value + extent, bound]
    if PROVER.can_prove_le(0, value):
        return [value, bound]
    # value + extent * (1 if value < 0 else 0): min(0, max(-1, value)) is -1 or 0
    return [value - extent * smin(0, smax(-1, value)), bound]


def _extreme(values: Iterable[SymExpr], *, is_max: bool) -> SymExpr:
    """Return the maximum or minimum, without operands that provably do not matter."""
    candidates: list[SymExpr] = []
    for value in values:
        if any(_dominates(other, value, is_max) for other in candidates):
            continue
        candidates = [other for other in candidates if not _dominates(value, other, is_max)]
        candidates.append(value)
    return (smax if is_max else smin)(*candidates)


def _dominates(a: SymExpr, b: SymExpr, is_max: bool) -> bool:
    return PROVER.can_prove_le(b, a) if is_max else PROVER.can_prove_le(a, b)


def _nonnegative(size: SymExpr) -> SymExpr:
    return size if PROVER.can_prove_le(0, size) else smax(size, 0)
