"""The routines of the library "amx": instructions of the processor for products of tiles, in place of calls.

    configure(depth)                         rows of x have `depth` bytes; tiles have 16 rows and 16 32-bit columns
    start(products, row)                     each row of the products, in tile 0, 1, 2 or 3, becomes row[16]
    clear(products)                          the same with zeros
    take_x(x, from, stride)                  x[16, depth], in tile 0 or 1 of its kind, comes from memory
    take_quads(quads, from, stride)          so does quads[depth / 4, 16, 4]
    dot(products, x, quads)                  products += x @ quads, of signed bytes
    keep(products, to, stride)               products go to memory
    release()

Bytes are unsigned in the quads of `dot_unsigned` and in the x of `dot_of_unsigned`; `dot_bf16` multiplies bfloat16, of
which quads hold pairs. Strides are in bytes. A thread that computes with tiles configures them first and releases them
afterwards, as switching threads saves 8 KB of tiles that are in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from relaxlite.codegen.llvm.context import Kernel
from relaxlite.codegen.llvm.emitter import Val, int_const
from relaxlite.errors import CodegenError
from relaxlite.ir.program import Literal, Value

_ROWS, _ROW_BYTES = 16, 64
_PRODUCTS, _X, _DP4A_GROUPS, _END = 0, 4, 6, 8  # the first tile register of each kind
_PALETTE, _WIDTHS, _HEIGHTS = 0, 16, 48  # where these stand in the 64 bytes of a configuration


def emit_tiles(k: Kernel, symbol: str, values: Sequence[Val], args: Sequence[Value]) -> None:
    routine = _ROUTINES.get(symbol)
    if routine is None:
        raise CodegenError(f"tiles have no operation {symbol!r}; there are {', '.join(_ROUTINES)}")
    routine(k, *(arg.value if isinstance(arg, Literal) else v for arg, v in zip(args, values, strict=True)))


def _configure(k: Kernel, depth: int) -> None:
    e, config = k.e, k.stack_array("tiles", "i8", 64)
    e.line(f"store <64 x i8> zeroinitializer, {config}, align 64")
    fields = [(_PALETTE, 1)]
    for tile in range(_END):
        rows, width = (
            (_ROWS, _ROW_BYTES) if tile < _X else (_ROWS, depth) if tile < _DP4A_GROUPS else (depth // 4, _ROW_BYTES)
        )
        fields += [(_WIDTHS + 2 * tile, width), (_HEIGHTS + tile, rows)]  # widths of 16 bits, below 256
    for offset, value in fields:
        place = e.op(f"getelementptr i8, {config}, i64 {offset}", "ptr", 0, "field")
        e.line(f"store i8 {value}, {place}, align 1")
    e.call_void("llvm.x86.ldtilecfg", [config])


def _start(k: Kernel, tile: int, row: Val) -> None:
    k.e.call_void("llvm.x86.tileloadd64", [_register(tile), row, int_const(0)])


def _clear(k: Kernel, tile: int) -> None:
    k.e.call_void("llvm.x86.tilezero", [_register(tile)])


def _take(first: int) -> Callable[..., None]:
    def emit(k: Kernel, tile: int, memory: Val, stride: Val) -> None:
        k.e.call_void("llvm.x86.tileloadd64", [_register(first + tile), memory, stride])

    return emit


def _dot(instruction: str) -> Callable[..., None]:
    def emit(k: Kernel, products: int, x: int, quads: int) -> None:
        k.e.call_void(
            f"llvm.x86.{instruction}", [_register(products), _register(_X + x), _register(_DP4A_GROUPS + quads)]
        )

    return emit


def _keep(k: Kernel, tile: int, products: Val, stride: Val) -> None:
    k.e.call_void("llvm.x86.tilestored64", [_register(tile), products, stride])
    k.forget_loads()


def _release(k: Kernel) -> None:
    k.e.call_void("llvm.x86.tilerelease", [])


def _register(number: int) -> Val:
    return int_const(number, "i8")


_ROUTINES: Mapping[str, Callable[..., None]] = {
    "configure": _configure,
    "start": _start,
    "clear": _clear,
    "take_x": _take(_X),
    "take_quads": _take(_DP4A_GROUPS),
    "dot": _dot("tdpbssd"),
    "dot_unsigned": _dot("tdpbsud"),
    "dot_of_unsigned": _dot("tdpbusd"),
    "dot_bf16": _dot("tdpbf16ps"),
    "keep": _keep,
    "release": _release,
}
