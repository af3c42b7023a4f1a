"""Numbers of four bits looked up in 16 bytes: by a shuffle of bytes where there is one, else by a choice per bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from relaxlite.codegen.llvm.context import Kernel
from relaxlite.codegen.llvm.emitter import Emitter, Val, int_const
from relaxlite.codegen.llvm.widths import widest_lanes
from relaxlite.errors import CodegenError
from relaxlite.ir.intrinsics import LOOKUP
from relaxlite.ir.program import Intrinsic, Literal, Value

_SHUFFLES: Mapping[int, tuple[str, str]] = {  # by the bits of a vector: feature, instruction
    512: ("avx512bw", "llvm.x86.avx512.pshuf.b.512"),
    256: ("avx2", "llvm.x86.avx2.pshuf.b"),
    128: ("ssse3", "llvm.x86.ssse3.pshuf.b.128"),
}


def emit_lookup(k: Kernel, value: Intrinsic, emit_value: Callable[[Kernel, Value], Val]) -> Val:
    """A word whose bytes are those of the table at the bytes of another word."""
    words = [arg.value for arg in value.args[1:] if isinstance(arg, Literal)]
    if len(words) < 4:
        raise CodegenError(f"the table of {LOOKUP} must be literals")
    table = [int(word) >> 8 * n & 0xFF for word in words for n in range(4)]
    given = emit_value(k, value.args[0])
    target = k.e.target
    width = widest_lanes(target, given.lanes, lambda bits: target.has(_SHUFFLES[bits][0]))
    if width:
        return k.e.by_parts([given], width, lambda part: _by_shuffle(k.e, part, table))
    return _by_choices(k.e, given, table)


def _by_shuffle(e: Emitter, words: Val, table: list[int]) -> Val:
    """The shuffle chooses among the 16 bytes of each 128 bits."""
    count = 4 * words.lanes
    entries = ", ".join(str(int_const(entry, "i8")) for entry in table * (count // 16))
    places = e.op(f"bitcast {words} to <{count} x i8>", "i8", count)
    result = e.call(_SHUFFLES[32 * words.lanes][1], [Val(f"<{entries}>", "i8", count), places], "i8", count, "looked")
    return e.op(f"bitcast {result} to {words.ty}", "i32", words.lanes)


def _by_choices(e: Emitter, words: Val, table: list[int]) -> Val:
    """By the lowest bit, one of each pair of entries; by the next, one of each pair of these; and so on."""
    count = 4 * max(words.lanes, 1)
    places = e.op(f"bitcast {words} to <{count} x i8>", "i8", count)
    result = [e.splat(int_const(entry, "i8"), count) for entry in table]
    for bit in range(4):
        masked = e.binary("and", places, int_const(1 << bit, "i8"))
        is_set = e.icmp("ne", masked, int_const(0, "i8"))
        result = [e.select(is_set, high, low) for low, high in zip(result[::2], result[1::2], strict=True)]
    return e.op(f"bitcast {result[0]} to {words.ty}", "i32", words.lanes)
