"""Which of the widths that a vector instruction comes in a kernel takes."""

from __future__ import annotations

from collections.abc import Callable

from relaxlite.target import Target

_WIDTHS = (512, 256, 128)  # bits, widest first


def widest_lanes(target: Target, lanes: int, has: Callable[[int], bool]) -> int:
    """How many 32-bit lanes an x86 instruction takes that the target `has` for vectors of some bits: the most that
    divide `lanes`; 0: none."""
    if not target.is_x86 or not lanes:
        return 0
    fits = (bits // 32 for bits in _WIDTHS if bits <= target.vector_bits and lanes % (bits // 32) == 0 and has(bits))
    return next(fits, 0)
