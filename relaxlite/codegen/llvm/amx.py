"""The routines of the library "amx": instructions of the processor for products of tiles, in place of calls.

    configure(depth)                         tiles of 16 rows of `depth` bytes, and of as many 32-bit columns
    dot(x, stride, quads, stride, products)  products[16, 16] = x[16, depth] @ quads[depth / 4, 16, 4]
    release()

Numbers are signed, those of quads unsigned in `dot_unsigned`; strides in bytes. A thread that computes with tiles
configures them first and releases them afterwards, as switching threads saves 8 KB of tiles that are in use.
"""

from __future__ import annotations

from collections.abc import Sequence

from relaxlite.codegen.llvm.context import Kernel
from relaxlite.codegen.llvm.emitter import Val, int_const
from relaxlite.errors import CodegenError
from relaxlite.ir.program import Literal, Value

_ROWS, _ROW_BYTES = 16, 64
_PRODUCTS, _X, _QUADS = range(3)  # numbers of tile registers
_PRODUCTS_OF = {"dot": "tdpbssd", "dot_unsigned": "tdpbsud"}
_PALETTE, _WIDTHS, _HEIGHTS = 0, 16, 48  # where these stand in the 64 bytes of a configuration


def emit_tiles(k: Kernel, symbol: str, values: Sequence[Val], args: Sequence[Value]) -> None:
    if symbol == "configure":
        (depth,) = args
        assert isinstance(depth, Literal)
        _configure(k, int(depth.value))
    elif symbol in _PRODUCTS_OF:
        _dot(k, _PRODUCTS_OF[symbol], *values)
    elif symbol == "release":
        k.e.call_void("llvm.x86.tilerelease", [])
    else:
        raise CodegenError(f"tiles have no operation {symbol!r}; there are configure, dot, dot_unsigned, release")


def _configure(k: Kernel, depth: int) -> None:
    e, config = k.e, k.stack_array("tiles", "i8", 64)
    e.line(f"store <64 x i8> zeroinitializer, {config}, align 64")
    shapes = {_PRODUCTS: (_ROWS, _ROW_BYTES), _X: (_ROWS, depth), _QUADS: (depth // 4, _ROW_BYTES)}
    fields = [(_PALETTE, 1)]
    for tile, (rows, width) in shapes.items():
        fields += [(_WIDTHS + 2 * tile, width), (_HEIGHTS + tile, rows)]  # widths of 16 bits, below 256
    for offset, value in fields:
        place = e.op(f"getelementptr i8, {config}, i64 {offset}", "ptr", 0, "field")
        e.line(f"store i8 {value}, {place}, align 1")
    e.call_void("llvm.x86.ldtilecfg", [config])


def _dot(k: Kernel, instruction: str, x: Val, x_stride: Val, quads: Val, quads_stride: Val, products: Val) -> None:
    e = k.e
    made, left, right = (int_const(n, "i8") for n in (_PRODUCTS, _X, _QUADS))
    e.call_void("llvm.x86.tilezero", [made])
    e.call_void("llvm.x86.tileloadd64", [left, x, x_stride])
    e.call_void("llvm.x86.tileloadd64", [right, quads, quads_stride])
    e.call_void(f"llvm.x86.{instruction}", [made, left, right])
    e.call_void("llvm.x86.tilestored64", [made, products, int_const(_ROW_BYTES)])
    k.forget_loads()
