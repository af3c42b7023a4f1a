"""Products of 16-bit floats on tensor cores: a block of four warps computes a tile of 64 x 64 results.

Both operands of a block lie in shared memory, 32 steps of the sums at a time. A warp computes 32 x 32 results, which
its threads hold as fragments of `mma` (ir/warp.py) until the epilogue. Lines of the tiles are 16 bytes longer than they
need to be, so that the eight rows of a matrix lie in different banks.
"""

from __future__ import annotations

from collections.abc import Callable

from relaxlite.gpus import WARP
from relaxlite.ir.program import Allocate, Barrier, Buffer, Cast, For, Literal, Load, Stmt, Store, Value, seq
from relaxlite.ir.symbolic import SymExpr, SymVar, ceildiv
from relaxlite.ir.warp import at, warp_call
from relaxlite.passes.schedule.gpu.axes import Axis, on_axes, repeat
from relaxlite.passes.schedule.gpu.product import Product
from relaxlite.passes.schedule.gpu.tiles import Grid, fill_tile
from relaxlite.records import dataclass

TILE, DEPTH = 64, 32
_PAD = 8  # elements of 16 bits
_SIDE = 2  # warps along a side of the tile
_THREADS = _SIDE * _SIDE * WARP
_WARP_TILE = TILE // _SIDE
_ROWS, _COLUMNS, _STEPS = 16, 8, 16  # of one mma
_INSTRUCTIONS = {"float16": "mma_f16", "bfloat16": "mma_bf16"}


def _stored_dtype(value: Value) -> str:
    """The dtype that an operand has before it is widened to float32."""
    return value.x.dtype if isinstance(value, Cast) else value.dtype


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Buffers of a block and of a thread."""

    a_tile: Buffer
    b_tile: Buffer
    a: Buffer
    b: Buffer
    acc: Buffer

    @staticmethod
    def of(dtype: str) -> _Buffers:
        down, across = _WARP_TILE // _ROWS, _WARP_TILE // _COLUMNS
        return _Buffers(
            Buffer.of("a_tile", (TILE, DEPTH + _PAD), dtype, "shared"),
            Buffer.of("b_tile", (DEPTH, TILE + _PAD), dtype, "shared"),
            Buffer.of("a_frag", (down, 4), "int32", "local"),
            Buffer.of("b_frag", (across, 2), "int32", "local"),
            Buffer.of("acc", (down, across, 4), "float32", "local"),
        )


def matmul_mma(product: Product) -> Stmt | None:
    """The launch of a sum of products of 16-bit floats of one dtype; None for other dtypes."""
    dtype = _stored_dtype(product.a.value)
    if dtype not in _INSTRUCTIONS or _stored_dtype(product.b.value) != dtype:
        return None
    grid, thread = Grid.of(product, TILE, TILE), Axis.of("t", "thread_x", _THREADS)
    held, step, instruction = _Buffers.of(dtype), SymVar("step", lower=0), _INSTRUCTIONS[dtype]
    main = For(
        step,
        ceildiv(product.depth, DEPTH),
        seq(
            _fill(product, grid, step, held, thread.var, is_a=True),
            _fill(product, grid, step, held, thread.var, is_a=False),
            Barrier(),
            repeat("kk", DEPTH // _STEPS, lambda kk: _multiply(held, thread.var, kk, instruction)),
            Barrier(),
        ),
    )
    zero = _each(held, lambda i, j, e: Store(held.acc, (i, j, e), Literal(0.0, "float32")))
    finish = _each(held, lambda i, j, e: _finish(product, grid, held, thread.var, i, j, e))
    body = seq(zero, main, finish)
    for buffer in (held.acc, held.b, held.a):
        body = Allocate(buffer, body)
    return on_axes([grid.axis], Allocate(held.a_tile, Allocate(held.b_tile, on_axes([thread], body))))


def _fill(product: Product, grid: Grid, step: SymVar, held: _Buffers, thread: SymVar, *, is_a: bool) -> Stmt:
    operand = product.a if is_a else product.b
    return fill_tile(
        held.a_tile if is_a else held.b_tile,
        operand,
        lambda place, depth: product.element(operand, grid.group, place, depth),
        (lambda line, s: (line, s)) if is_a else (lambda line, s: (s, line)),
        extents=(TILE, DEPTH),
        first=(grid.row if is_a else grid.column, step * DEPTH),
        limits=(operand.size, product.depth),
        thread=thread,
        threads=_THREADS,
    )


def _warp_place(thread: SymVar) -> tuple[SymExpr, SymExpr, SymExpr]:
    """(lane, first row of the warp in the tile, first column)."""
    warp = thread // WARP
    return thread % WARP, warp // _SIDE * _WARP_TILE, warp % _SIDE * _WARP_TILE


def _multiply(held: _Buffers, thread: SymVar, kk: SymVar, instruction: str) -> Stmt:
    """The products of 16 steps of the sums: load the fragments of a warp, and multiply each with each."""
    lane, row, column = _warp_place(thread)
    line, half = lane % 16, lane // 16 * 8
    down, across = (int(dim) for dim in (held.a.shape[0].const, held.b.shape[0].const))

    def load_a(i: SymVar) -> Stmt:
        source = at(held.a_tile, row + i * _ROWS + line, kk * _STEPS + half)
        return warp_call("load_matrix", at(held.a, i, 0, written=True), source)

    def load_b(j: SymVar) -> Stmt:  # 16 columns, of two fragments
        source = at(held.b_tile, kk * _STEPS + line, column + j * 2 * _COLUMNS + half)
        return warp_call("load_matrix_t", at(held.b, j * 2, 0, written=True), source)

    def multiply(i: SymVar, j: SymVar) -> Stmt:
        return warp_call(instruction, at(held.acc, i, j, 0, written=True), at(held.a, i, 0), at(held.b, j, 0))

    return seq(
        repeat("i", down, load_a),
        repeat("j", across // 2, load_b),
        repeat("i", down, lambda i: repeat("j", across, lambda j: multiply(i, j))),
    )


def _finish(product: Product, grid: Grid, held: _Buffers, thread: SymVar, i: SymVar, j: SymVar, e: SymVar) -> Stmt:
    lane, first_row, first_column = _warp_place(thread)
    row = grid.row + first_row + i * _ROWS + lane // 4 + e // 2 * 8
    column = grid.column + first_column + j * _COLUMNS + lane % 4 * 2 + e % 2
    return product.finish(grid.group, row, column, Load(held.acc, (i, j, e)))


def _each(held: _Buffers, body: Callable[[SymVar, SymVar, SymVar], Stmt]) -> Stmt:
    """A statement for each result of a thread."""
    down, across, elements = (int(dim.const) for dim in held.acc.shape)
    return repeat("i", down, lambda i: repeat("j", across, lambda j: repeat("e", elements, lambda e: body(i, j, e))))
