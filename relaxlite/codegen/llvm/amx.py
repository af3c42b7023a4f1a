"""Routines of the library "amx" as AMX instructions.

    configure(depth)                         rows of x have `depth` bytes; tiles have 16 rows and 16 32-bit columns
    start(products, row)                     broadcast row[16] to all rows of accumulator tile 0, 1, 2 or 3
    clear(products)                          zero an accumulator tile
    take_x(x, from, stride)                  load x[16, depth] to left operand tile 0 or 1
    take_quads(quads, from, stride)          load quads[depth / 4, 16, 4] (dp4a groups) to right operand tile 0 or 1
    dot(products, x, quads)                  products += x @ quads, of signed bytes
    keep(products, to, stride)               store an accumulator tile
    release()                                end the use of tiles by this thread

Bytes are unsigned in the quads of `dot_unsigned` and in the x of `dot_of_unsigned`; `dot_bf16` multiplies bfloat16, of
which quads hold pairs. Strides are in bytes. A thread configures tiles before it uses them, and releases them after:
every context switch saves the 8 KB of tiles in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from relaxlite.codegen.llvm.context import KernelContext
from relaxlite.codegen.llvm.emitter import Val, int_const
from relaxlite.errors import CodegenError
from relaxlite.ir.program import Literal, Value

_ROWS, _ROW_BYTES = 16, 64
_ACCUMULATORS, _X, _DP4A_GROUPS, _END = 0, 4, 6, 8  # the first tile register of each kind
_PALETTE_OFFSET, _ROW_BYTES_OFFSET, _ROWS_OFFSET = 0, 16, 48  # in the 64 bytes of a tile configuration


def emit_amx_routine(k: KernelContext, symbol: str, values: Sequence[Val], args: Sequence[Value]) -> None:
    """Emit the instructions of a routine; literal arguments are passed as numbers. CodegenError: no such routine."""
    routine = _ROUTINES.get(symbol)
    if routine is None:
        raise CodegenError(f"tiles have no operation {symbol!r}; there are {', '.join(_ROUTINES)}")
    routine(k, *(arg.value if isinstance(arg, Literal) else v for arg, v in zip(args, values, strict=True)))


def _configure(k: KernelContext, depth: int) -> None:
    e, config = k.e, k.stack_array("tiles", "i8", 64)
    e.line(f"store <64 x i8> zeroinitializer, {config}, align 64")
    fields = [(_PALETTE_OFFSET, 1)]
    for tile in range(_END):
        rows, width = (
            (_ROWS, _ROW_BYTES) if tile < _X else (_ROWS, depth) if tile < _DP4A_GROUPS else (depth // 4, _ROW_BYTES)
        )
        fields += [
            (_ROW_BYTES_OFFSET + 2 * tile, width),
            (_ROWS_OFFSET + tile, rows),
        ]  # a 16-bit field, of which the upper byte is 0
    for offset, value in fields:
        address = e.op(f"getelementptr i8, {config}, i64 {offset}", "ptr", 0, "field")
        e.line(f"store i8 {value}, {address}, align 1")
    e.call_void("llvm.x86.ldtilecfg", [config])


def _start(k: KernelContext, tile: int, row: Val) -> None:
    k.e.call_void("llvm.x86.tileloadd64", [_tile_register(tile), row, int_const(0)])


def _clear(k: KernelContext, tile: int) -> None:
    k.e.call_void("llvm.x86.tilezero", [_tile_register(tile)])


def _load(first: int) -> Callable[..., None]:
    def emit(k: KernelContext, tile: int, memory: Val, stride: Val) -> None:
        k.e.call_void("llvm.x86.tileloadd64", [_tile_register(first + tile), memory, stride])

    return emit


def _dot(instruction: str) -> Callable[..., None]:
    def emit(k: KernelContext, accumulator: int, x: int, groups: int) -> None:
        k.e.call_void(
            f"llvm.x86.{instruction}",
            [_tile_register(accumulator), _tile_register(_X + x), _tile_register(_DP4A_GROUPS + groups)],
        )

    return emit


def _store(k: KernelContext, tile: int, address: Val, stride: Val) -> None:
    k.e.call_void("llvm.x86.tilestored64", [_tile_register(tile), address, stride])
    k.forget_loads()


def _release(k: KernelContext) -> None:
    k.e.call_void("llvm.x86.tilerelease", [])


def _tile_register(number: int) -> Val:
    return int_const(number, "i8")


_ROUTINES: Mapping[str, Callable[..., None]] = {
    "configure": _configure,
    "start": _start,
    "clear": _clear,
    "take_x": _load(_X),
    "take_quads": _load(_DP4A_GROUPS),
    "dot": _dot("tdpbssd"),
    "dot_unsigned": _dot("tdpbsud"),
    "dot_of_unsigned": _dot("tdpbusd"),
    "dot_bf16": _dot("tdpbf16ps"),
    "keep": _store,
    "release": _release,
}
