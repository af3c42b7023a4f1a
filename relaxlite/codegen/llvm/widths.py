"""Choice of the vector width of an x86 instruction."""

from __future__ import annotations

from collections.abc import Callable

from relaxlite.target import Target

_WIDTHS = (512, 256, 128)  # bits, widest first


def widest_lanes(target: Target, lanes: int, has: Callable[[int], bool]) -> int:
    """Number of 32-bit lanes of the widest instruction that divides `lanes` and that the target has; 0: none.

    `has(bits)`: whether the target has the instruction for vectors of that many bits.
    """
    if not target.is_x86 or not lanes:
        return 0
    fits = (bits // 32 for bits in _WIDTHS if bits <= target.vector_bits and lanes % (bits // 32) == 0 and has(bits))
    return next(fits, 0)
