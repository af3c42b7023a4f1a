"""dp4a by the multiply-add instructions of SSSE3, AVX2 and AVX512BW, for targets without VNNI.

    pairs  = pmaddubsw(a, b)     int16: a0*b0 + a1*b1, saturated, so the sum must not overflow
    total += pmaddwd(pairs, 1)   int32: pairs0 + pairs1

A sum of int16 pairs cannot overflow while the greatest products in it add up to at most 2**14 - 1, so pairs of several
products of small codes are summed in int16. Where a single product may be greater, unsigned bytes are split:
a = (a & 127) + 128 * (a >> 7).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from relaxlite.codegen.llvm.context import KernelContext
from relaxlite.codegen.llvm.emitter import Emitter, Val, int_const
from relaxlite.codegen.llvm.widths import widest_lanes
from relaxlite.ir.intrinsics import DOT4_PACKED_U8S8, MAX_MADDUBS_PRODUCT
from relaxlite.ir.program import Intrinsic, Literal, Value
from relaxlite.records import dataclass
from relaxlite.target import Target

_LOW_MASK = 127  # the low part of a split byte
_ONES = 0x01010101


@dataclass(frozen=True, slots=True)
class MaddIntrinsics:
    """Intrinsics of one vector width, and the target feature that they need."""

    feature: str
    maddubs: str  # pmaddubsw
    maddwd: str  # pmaddwd


MADD_INTRINSICS: Mapping[int, MaddIntrinsics] = {  # by vector width in bits, widest first
    512: MaddIntrinsics("avx512bw", "llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
    256: MaddIntrinsics("avx2", "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
    128: MaddIntrinsics("ssse3", "llvm.x86.ssse3.pmadd.ub.sw.128", "llvm.x86.sse2.pmadd.wd"),
}


def maddubs_lanes(target: Target, lanes: int) -> int:
    """Number of 32-bit lanes per instruction, the most that divide `lanes`; 0 where the target lacks pmaddubsw or has
    VNNI."""
    if target.has_dp4a:
        return 0
    return widest_lanes(target, lanes, lambda bits: target.has(MADD_INTRINSICS[bits].feature))


def emit_dp4a_chain(
    k: KernelContext, value: Intrinsic, emit_value: Callable[[KernelContext, Value], Val], width: int
) -> Val:
    """Emit a chain of dp4a over packed int32, `width` lanes at a time; its int16 sums are shared by the whole chain."""
    bounds: list[tuple[int, int]] = []
    operand_pairs: list[tuple[Value, Value]] = []
    start: Value = value
    while isinstance(start, Intrinsic) and start.name == DOT4_PACKED_U8S8:
        start, a, b, *literal_bounds = start.args
        operand_pairs.append((a, b))
        max_a, max_b = (int(g.value) if isinstance(g, Literal) else 0xFF for g in literal_bounds)
        bounds.append((min(max_a, 0xFF), min(max_b, 0x80)))
    operands = [emit_value(k, x) for x in (start, *(a for a, _ in operand_pairs), *(b for _, b in operand_pairs))]

    def chain(total: Val, *factors: Val) -> Val:
        sums = _Sums(k.e, total)
        for a, b, bound in zip(factors[: len(operand_pairs)], factors[len(operand_pairs) :], bounds, strict=True):
            sums.add(a, b, *bound)
        return sums.total()

    return k.e.by_subvectors([k.e.splat(x, k.lanes) for x in operands], width, chain)


class _Sums:
    """An int32 accumulator, and pending int16 sums of pairs by the factor that they are added with."""

    def __init__(self, e: Emitter, total: Val) -> None:
        self._e, self._total = e, total
        self._instructions = MADD_INTRINSICS[32 * total.lanes]
        self._pending: dict[int, tuple[Val, int]] = {}  # factor -> (sum of pairs, bound of its products)

    def add(self, a: Val, b: Val, max_a: int, max_b: int) -> None:
        """Add the products of the bytes of a, at most `max_a`, with those of b, at most `max_b` in magnitude."""
        if max_a * max_b <= MAX_MADDUBS_PRODUCT:
            self._accumulate(a, b, max_a * max_b, 1)
            return
        self._accumulate(self._e.binary("and", a, self._all(_LOW_MASK)), b, _LOW_MASK * max_b, 1)
        high = self._e.binary("lshr", a, int_const(7, "i32"))
        self._accumulate(self._e.binary("and", high, self._all(1)), b, max_b, _LOW_MASK + 1)

    def total(self) -> Val:
        """Flush all pending sums; returns the int32 total."""
        for factor in list(self._pending):
            self._flush(factor)
        return self._total

    def _accumulate(self, a: Val, b: Val, bound: int, factor: int) -> None:
        e, lanes = self._e, a.lanes
        if factor in self._pending and self._pending[factor][1] + bound > MAX_MADDUBS_PRODUCT:
            self._flush(factor)
        operands = [e.op(f"bitcast {x} to <{4 * lanes} x i8>", "i8", 4 * lanes) for x in (a, b)]
        pair_sums = e.call(self._instructions.maddubs, operands, "i16", 2 * lanes, "pairs")
        if factor in self._pending:
            pending, pending_bound = self._pending[factor]
            pair_sums, bound = e.binary("add", pending, pair_sums), pending_bound + bound
        self._pending[factor] = pair_sums, bound

    def _flush(self, factor: int) -> None:
        pair_sums, _ = self._pending.pop(factor)
        factors = self._e.splat(int_const(factor, "i16"), pair_sums.lanes)
        products = self._e.call(self._instructions.maddwd, [pair_sums, factors], "i32", self._total.lanes, "sums")
        self._total = self._e.binary("add", self._total, products)

    def _all(self, byte: int) -> Val:
        return int_const(_ONES * byte, "i32")
