"""Lookup of 4-bit codes in a table of 16 bytes: by pshufb where the target has it, else by selects per bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from relaxlite.codegen.llvm.context import KernelContext
from relaxlite.codegen.llvm.emitter import Emitter, Val, int_const
from relaxlite.codegen.llvm.widths import widest_lanes
from relaxlite.errors import CodegenError
from relaxlite.ir.intrinsics import LOOKUP
from relaxlite.ir.program import Intrinsic, Literal, Value

_SHUFFLES: Mapping[int, tuple[str, str]] = {  # vector width in bits -> feature, intrinsic
    512: ("avx512bw", "llvm.x86.avx512.pshuf.b.512"),
    256: ("avx2", "llvm.x86.avx2.pshuf.b"),
    128: ("ssse3", "llvm.x86.ssse3.pshuf.b.128"),
}


def emit_lookup(k: KernelContext, value: Intrinsic, emit_value: Callable[[KernelContext, Value], Val]) -> Val:
    """Emit packed int32 whose bytes are table entries at the bytes of the operand; CodegenError for a variable
    table."""
    table_words = [arg.value for arg in value.args[1:] if isinstance(arg, Literal)]
    if len(table_words) < 4:
        raise CodegenError(f"the table of {LOOKUP} must be literals")
    table = [int(word) >> 8 * n & 0xFF for word in table_words for n in range(4)]
    codes = emit_value(k, value.args[0])
    target = k.e.target
    width = widest_lanes(target, codes.lanes, lambda bits: target.has(_SHUFFLES[bits][0]))
    if width:
        return k.e.by_subvectors([codes], width, lambda part: _by_shuffle(k.e, part, table))
    return _by_selects(k.e, codes, table)


def _by_shuffle(e: Emitter, codes: Val, table: list[int]) -> Val:
    """Emit pshufb, with the table in each 128-bit lane."""
    count = 4 * codes.lanes
    entries = ", ".join(str(int_const(entry, "i8")) for entry in table * (count // 16))
    indices = e.op(f"bitcast {codes} to <{count} x i8>", "i8", count)
    result = e.call(_SHUFFLES[32 * codes.lanes][1], [Val(f"<{entries}>", "i8", count), indices], "i8", count, "looked")
    return e.op(f"bitcast {result} to {codes.ty}", "i32", codes.lanes)


def _by_selects(e: Emitter, codes: Val, table: list[int]) -> Val:
    """Emit a tree of selects: bit k of the index halves the remaining candidates."""
    count = 4 * max(codes.lanes, 1)
    indices = e.op(f"bitcast {codes} to <{count} x i8>", "i8", count)
    candidates = [e.splat(int_const(entry, "i8"), count) for entry in table]
    for bit in range(4):
        masked = e.binary("and", indices, int_const(1 << bit, "i8"))
        is_set = e.icmp("ne", masked, int_const(0, "i8"))
        candidates = [e.select(is_set, high, low) for low, high in zip(candidates[::2], candidates[1::2], strict=True)]
    return e.op(f"bitcast {candidates[0]} to {codes.ty}", "i32", codes.lanes)
