"""Whether merging kernels pays: bytes that no longer move against work that is done more than once.

A kernel takes the time of its arithmetic and of its memory traffic, both shared out among threads, and that of a call:

    time = (flops / FLOPS_PER_NS + bytes / BYTES_PER_NS) / min(THREADS, parallel) + CALL_NS

All three amounts are expressions of the symbols. Where merging moves no more bytes and computes nothing again it pays
at every size. Else both ways are timed at representative sizes within the symbols' bounds, and the lesser sum decides:
a recomputation that is free for one row and costly for many is refused unless a bound keeps the rows few. The verdict
holds the amounts and says at which sizes the answer would be the other one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from relaxlite import dtypes
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.symbolic import SymExpr, SymVar, evaluate, product, sym
from relaxlite.records import dataclass

# Of one core of 4 GHz with vectors of 512 bits, out of its last cache. Only ratios matter: 1 byte is worth 1 FLOP.
FLOPS_PER_NS = 50
BYTES_PER_NS = 50
CALL_NS = 50
THREADS = 4  # what a kernel of independent iterations can count on anywhere
SIZES = (1, 16, 128, 1024)  # that stand for all values of a symbol
LARGER = (1 << 14, 1 << 17, 1 << 20)  # where none of those gives every tensor a size: samples of sound
MAX_ALONE = 4  # symbols that are also tried at the largest size while the others are at the least


@dataclass(frozen=True, slots=True)
class Work:
    """What a kernel does, in one set of symbols: operations, bytes moved, independent iterations."""

    flops: SymExpr
    bytes: SymExpr
    parallel: SymExpr

    def time(self, values: Mapping[SymVar, int]) -> float | None:
        """Nanoseconds at these sizes; None: tensors have no elements there, or fewer, and nobody minds the time."""
        flops, moved, parallel = (evaluate(e, values) for e in (self.flops, self.bytes, self.parallel))
        if moved <= 0 or flops < 0 or parallel < 0:
            return None
        threads = min(THREADS, max(parallel, 1))
        return (flops / FLOPS_PER_NS + moved / BYTES_PER_NS) / threads + CALL_NS


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to merge, why, and the amounts that it rests on by name (`PassContext.decide` takes all three)."""

    taken: bool
    reason: str
    figures: Mapping[str, SymExpr] = field(default_factory=dict)


def tensor_bytes(shape: Sequence[SymExpr], dtype: str) -> SymExpr:
    """The size of a tensor in bytes."""
    return product(shape) * dtypes.itemsize(dtype)


def weigh(apart: Sequence[Work], merged: Work, figures: Mapping[str, SymExpr]) -> Verdict:
    """Whether one kernel that does `merged` takes less time than several that do `apart`."""
    moved, computed = (
        sum((getattr(w, name) for w in apart), sym(0)) - getattr(merged, name) for name in ("bytes", "flops")
    )
    is_as_parallel = all(merged.parallel is w.parallel for w in apart)
    if is_as_parallel and Analyzer().can_prove_nonneg(moved) and Analyzer().can_prove_nonneg(computed):
        return Verdict(True, "less is moved and nothing is computed twice, at all sizes", figures)
    return _by_sizes(apart, merged, figures)


def _by_sizes(apart: Sequence[Work], merged: Work, figures: Mapping[str, SymExpr]) -> Verdict:
    symbols = dict.fromkeys(
        v for w in (*apart, merged) for e in (w.flops, w.bytes, w.parallel) for v in e.free_vars()
    )  # fmt: skip
    gains = next(filter(None, (_gains(apart, merged, tuple(symbols), sizes) for sizes in (SIZES, LARGER))), [])
    taken = sum(gain for _, gain in gains) >= 0
    against = [where for where, gain in gains if (gain >= 0) != taken and where]
    word = "faster" if taken else "slower"
    if not symbols:
        return Verdict(taken, f"one kernel is {word}", figures)
    if not against:
        return Verdict(taken, f"one kernel is {word} at all sizes tried", figures)
    return Verdict(taken, f"one kernel is {word} on the whole, but not at {against[0]}", figures)


def _gains(
    apart: Sequence[Work], merged: Work, symbols: tuple[SymVar, ...], sizes: tuple[int, ...]
) -> list[tuple[str, float]]:
    """Where merging was tried, and the nanoseconds that it saves there."""
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


def representative_sizes(symbols: Sequence[SymVar], sizes: tuple[int, ...] = SIZES) -> list[dict[SymVar, int]]:
    """Assignments that stand for all: every symbol small, middling, large, and each large alone, within bounds."""
    result = [{v: _within(v, size) for v in symbols} for size in sizes]
    if len(symbols) > 1:
        least = result[0]
        result += [{**least, v: _within(v, sizes[-1])} for v in symbols[:MAX_ALONE]]
    return list({tuple(values.items()): values for values in result}.values())


def _within(symbol: SymVar, size: int) -> int:
    """The multiple of the symbol's divisor inside its bounds that is nearest to a size, from below where it can be."""
    low = max(symbol.lower or 0, 1) if symbol.upper is None or symbol.upper >= 1 else symbol.upper
    value = max(low, size if symbol.upper is None else min(size, symbol.upper))
    step = symbol.divisor
    return max(value // step, -(-low // step)) * step
