"""Cost model of kernel fusion: memory traffic that fusion saves against work that is recomputed.

A kernel takes the time of its arithmetic and of its memory traffic, both divided among threads, and of its launch:

    time = (flops / FLOPS_PER_NS + bytes / BYTES_PER_NS) / min(THREADS, parallel) + CALL_NS

All three amounts are expressions of the symbols. Fusion that neither moves more bytes nor recomputes anything pays at
every size. Otherwise the fused and the separate kernels are timed at representative sizes within the bounds of the
symbols, and the smaller sum decides. A recomputation that is free for one row and expensive for many is refused unless
a bound keeps the rows few. The verdict holds the amounts, and names sizes at which the decision would be the opposite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from relaxlite import dtypes
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.symbolic import SymExpr, SymVar, evaluate, product, sym
from relaxlite.records import dataclass

# Modelled on one core of 4 GHz with vectors of 512 bits and data in the last-level cache. Only the ratio matters:
# 1 byte costs as much as 1 FLOP.
FLOPS_PER_NS = 50
BYTES_PER_NS = 50
CALL_NS = 50
THREADS = 4  # available to a parallel kernel on any machine
REPRESENTATIVE_SIZES = (1, 16, 128, 1024)  # representative values of a symbol
FALLBACK_SIZES = (
    1 << 14,
    1 << 17,
    1 << 20,
)  # where a tensor has no elements at all of REPRESENTATIVE_SIZES, as with audio samples
MAX_VARIED_SYMBOLS = 4  # symbols that are also tried at the largest size while the rest are at the smallest


@dataclass(frozen=True, slots=True)
class KernelWork:
    """Work of one kernel in one set of symbols: FLOPs, bytes moved, and independent iterations."""

    flops: SymExpr
    bytes: SymExpr
    parallel: SymExpr

    def time(self, values: Mapping[SymVar, int]) -> float | None:
        """Modelled time in nanoseconds at these sizes.

        None where a tensor has no elements or a negative number of them.
        """
        flops, moved, parallel = (evaluate(e, values) for e in (self.flops, self.bytes, self.parallel))
        if moved <= 0 or flops < 0 or parallel < 0:
            return None
        threads = min(THREADS, max(parallel, 1))
        return (flops / FLOPS_PER_NS + moved / BYTES_PER_NS) / threads + CALL_NS


@dataclass(frozen=True, slots=True)
class FusionVerdict:
    """Decision whether to fuse, its reason, and the amounts behind the decision by name.

    `PassContext.decide` takes all three.
    """

    taken: bool
    reason: str
    figures: Mapping[str, SymExpr] = field(default_factory=dict)


def tensor_bytes(shape: Sequence[SymExpr], dtype: str) -> SymExpr:
    """Compute the size of a tensor in bytes."""
    return product(shape) * dtypes.itemsize(dtype)


def compare_work(apart: Sequence[KernelWork], merged: KernelWork, figures: Mapping[str, SymExpr]) -> FusionVerdict:
    """Decide whether one kernel with the work `merged` is faster than separate kernels with the work `apart`."""
    moved, computed = (
        sum((getattr(w, name) for w in apart), sym(0)) - getattr(merged, name) for name in ("bytes", "flops")
    )
    is_as_parallel = all(merged.parallel is w.parallel for w in apart)
    if is_as_parallel and Analyzer().can_prove_nonneg(moved) and Analyzer().can_prove_nonneg(computed):
        return FusionVerdict(True, "less is moved and nothing is computed twice, at all sizes", figures)
    return _by_sizes(apart, merged, figures)


def _by_sizes(apart: Sequence[KernelWork], merged: KernelWork, figures: Mapping[str, SymExpr]) -> FusionVerdict:
    """Decide by the modelled time at representative sizes."""
    symbols = dict.fromkeys(
        v for w in (*apart, merged) for e in (w.flops, w.bytes, w.parallel) for v in e.free_vars()
    )  # fmt: skip
    gains = next(
        filter(
            None, (_gains(apart, merged, tuple(symbols), sizes) for sizes in (REPRESENTATIVE_SIZES, FALLBACK_SIZES))
        ),
        [],
    )
    taken = sum(gain for _, gain in gains) >= 0
    against = [where for where, gain in gains if (gain >= 0) != taken and where]
    comparison = "faster" if taken else "slower"
    if not symbols:
        return FusionVerdict(taken, f"one kernel is {comparison}", figures)
    if not against:
        return FusionVerdict(taken, f"one kernel is {comparison} at all sizes tried", figures)
    return FusionVerdict(taken, f"one kernel is {comparison} on the whole, but not at {against[0]}", figures)


def _gains(
    apart: Sequence[KernelWork], merged: KernelWork, symbols: tuple[SymVar, ...], sizes: tuple[int, ...]
) -> list[tuple[str, float]]:
    """Sizes at which fusion was tried, as text, and the nanoseconds that fusion saves there."""
    gains: list[tuple[str, float]] = []
    for values in representative_sizes(symbols, sizes):
        try:
            after, *before = (w.time(values) for w in (merged, *apart))
        except ZeroDivisionError:
            continue
        if after is not None and None not in before:
            gain = sum(time for time in before if time is not None) - after
            gains.append((", ".join(f"{v.name} = {n}" for v, n in values.items()), gain))
    return gains


def representative_sizes(
    symbols: Sequence[SymVar], sizes: tuple[int, ...] = REPRESENTATIVE_SIZES
) -> list[dict[SymVar, int]]:
    """Representative sizes within the bounds of the symbols.

    All symbols small, medium or large, and each symbol large alone.
    """
    assignments = [{v: _within(v, size) for v in symbols} for size in sizes]
    if len(symbols) > 1:
        smallest = assignments[0]
        assignments += [{**smallest, v: _within(v, sizes[-1])} for v in symbols[:MAX_VARIED_SYMBOLS]]
    return list({tuple(values.items()): values for values in assignments}.values())


def _within(symbol: SymVar, size: int) -> int:
    """The multiple of the symbol's divisor within its bounds that is nearest to a size, from below where possible."""
    low = max(symbol.lower or 0, 1) if symbol.upper is None or symbol.upper >= 1 else symbol.upper
    value = max(low, size if symbol.upper is None else min(size, symbol.upper))
    step = symbol.divisor
    return max(value // step, -(-low // step)) * step
