"""Dot products of bytes where there is no instruction for four of them: by products of pairs, as SSSE3 and AVX2 have.

    pairs  = pmaddubsw(a, b)     16 bits: a0*b0 + a1*b1, which must not leave them, as it would be cut off
    total += pmaddwd(pairs, 1)   32 bits: pairs0 + pairs1

A sum of pairs stays below 2**15 while the greatest products that go into it add up to no more than 2**14 - 1; so the
pairs of several products of small numbers are summed in 16 bits. Where a single product may be greater, bytes above 127
are cut in two, a = (a & 127) + 128 * (a >> 7).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from relaxlite.codegen.llvm.context import Kernel
from relaxlite.codegen.llvm.emitter import Emitter, Val, int_const
from relaxlite.codegen.llvm.widths import widest_lanes
from relaxlite.ir.intrinsics import DOT4_BYTES, MAX_OF_PAIRS
from relaxlite.ir.program import Intrinsic, Literal, Value
from relaxlite.records import dataclass
from relaxlite.target import Target

_LOW = 127  # of a byte that is cut in two
_ONES = 0x01010101


@dataclass(frozen=True, slots=True)
class PairInstructions:
    """What a feature brings for vectors of some width."""

    feature: str
    pairs: str  # of bytes
    sums: str  # of neighbouring 16-bit numbers, times others


INSTRUCTIONS: Mapping[int, PairInstructions] = {  # by the bits of a vector, widest first
    512: PairInstructions("avx512bw", "llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
    256: PairInstructions("avx2", "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
    128: PairInstructions("ssse3", "llvm.x86.ssse3.pmadd.ub.sw.128", "llvm.x86.sse2.pmadd.wd"),
}


def pair_lanes(target: Target, lanes: int) -> int:
    """How many 32-bit lanes the instructions for pairs take, the most that divide `lanes`; 0: the target has none, or
    has better ones."""
    if target.has_dp4a:
        return 0
    return widest_lanes(target, lanes, lambda bits: target.has(INSTRUCTIONS[bits].feature))


def emit_dots(k: Kernel, value: Intrinsic, emit_value: Callable[[Kernel, Value], Val], width: int) -> Val:
    """A chain of dot products of words, `width` lanes at a time."""
    mosts: list[tuple[int, int]] = []
    words: list[tuple[Value, Value]] = []
    start: Value = value
    while isinstance(start, Intrinsic) and start.name == DOT4_BYTES:
        start, a, b, *greatest = start.args
        words.append((a, b))
        most_a, most_b = (int(g.value) if isinstance(g, Literal) else 0xFF for g in greatest)
        mosts.append((min(most_a, 0xFF), min(most_b, 0x80)))
    operands = [emit_value(k, x) for x in (start, *(a for a, _ in words), *(b for _, b in words))]

    def chain(total: Val, *factors: Val) -> Val:
        sums = _Sums(k.e, total)
        for a, b, most in zip(factors[: len(words)], factors[len(words) :], mosts, strict=True):
            sums.add(a, b, *most)
        return sums.total()

    return k.e.by_parts([k.e.splat(x, k.lanes) for x in operands], width, chain)


class _Sums:
    """A total in 32 bits, and sums of pairs in 16 bits that are still to be added, each some times."""

    def __init__(self, e: Emitter, total: Val) -> None:
        self._e, self._total = e, total
        self._instructions = INSTRUCTIONS[32 * total.lanes]
        self._waiting: dict[int, tuple[Val, int]] = {}  # times -> pairs, and what their greatest products add up to

    def add(self, a: Val, b: Val, most_a: int, most_b: int) -> None:
        """The products of the bytes of a, at most `most_a`, with those of b, at most `most_b` in magnitude."""
        if most_a * most_b <= MAX_OF_PAIRS:
            self._wait(a, b, most_a * most_b, 1)
            return
        self._wait(self._e.binary("and", a, self._all(_LOW)), b, _LOW * most_b, 1)
        high = self._e.binary("lshr", a, int_const(7, "i32"))
        self._wait(self._e.binary("and", high, self._all(1)), b, most_b, _LOW + 1)

    def total(self) -> Val:
        for times in list(self._waiting):
            self._flush(times)
        return self._total

    def _wait(self, a: Val, b: Val, most: int, times: int) -> None:
        e, lanes = self._e, a.lanes
        if times in self._waiting and self._waiting[times][1] + most > MAX_OF_PAIRS:
            self._flush(times)
        bytes_of = [e.op(f"bitcast {x} to <{4 * lanes} x i8>", "i8", 4 * lanes) for x in (a, b)]
        pairs = e.call(self._instructions.pairs, bytes_of, "i16", 2 * lanes, "pairs")
        if times in self._waiting:
            others, others_most = self._waiting[times]
            pairs, most = e.binary("add", others, pairs), others_most + most
        self._waiting[times] = pairs, most

    def _flush(self, times: int) -> None:
        pairs, _ = self._waiting.pop(times)
        by = self._e.splat(int_const(times, "i16"), pairs.lanes)
        products = self._e.call(self._instructions.sums, [pairs, by], "i32", self._total.lanes, "sums")
        self._total = self._e.binary("add", self._total, products)

    def _all(self, byte: int) -> Val:
        return int_const(_ONES * byte, "i32")
