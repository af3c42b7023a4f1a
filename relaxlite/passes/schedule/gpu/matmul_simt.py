"""Products in float32 without tensor cores: a block computes a tile of 64 x 64 results, a thread 4 x 4 of them.

Both operands of a block lie in shared memory, 16 steps of the sums at a time. The results of a thread are 16 rows and
columns apart, so that threads side by side access what lies side by side. Sums are in the order of the program.
"""

from __future__ import annotations

from collections.abc import Callable

from relaxlite.ir.program import Allocate, Barrier, Binary, Buffer, For, Literal, Load, Stmt, Store, seq
from relaxlite.ir.symbolic import SymExpr, SymVar, ceildiv
from relaxlite.passes.schedule.gpu.axes import Axis, on_axes, repeat
from relaxlite.passes.schedule.gpu.product import Product
from relaxlite.passes.schedule.gpu.tiles import Grid, fill_tile

TILE, DEPTH, EACH = 64, 16, 4
_SIDE = TILE // EACH  # threads along a side
_THREADS = _SIDE * _SIDE
_DTYPE = "float32"


def matmul_simt(product: Product) -> Stmt:
    """The launch of a sum of products."""
    grid = Grid.of(product, TILE, TILE)
    x, y = Axis.of("x", "thread_x", _SIDE), Axis.of("y", "thread_y", _SIDE)
    # one more element in a line: threads that store a column of the tile use different banks
    a_tile, b_tile = (Buffer.of(name, (DEPTH, TILE + 1), _DTYPE, "shared") for name in ("a_tile", "b_tile"))
    acc = Buffer.of("acc", (EACH, EACH), _DTYPE, "local")
    step, thread = SymVar("step", lower=0), y.var * _SIDE + x.var
    main = For(
        step,
        ceildiv(product.depth, DEPTH),
        seq(
            _fill(product, grid, step, a_tile, thread, is_a=True),
            _fill(product, grid, step, b_tile, thread, is_a=False),
            Barrier(),
            repeat("s", DEPTH, lambda s: _multiply(acc, a_tile, b_tile, x, y, s)),
            Barrier(),
        ),
    )
    zero = _each(lambda u, v: Store(acc, (u, v), Literal(0.0, _DTYPE)))
    body = Allocate(acc, seq(zero, main, _each(lambda u, v: _finish(product, grid, acc, x, y, u, v))))
    return on_axes([grid.axis], Allocate(a_tile, Allocate(b_tile, on_axes([y, x], body))))


def _fill(product: Product, grid: Grid, step: SymVar, tile: Buffer, thread: SymExpr, *, is_a: bool) -> Stmt:
    operand = product.a if is_a else product.b
    return fill_tile(
        tile,
        operand,
        lambda place, depth: product.element(operand, grid.group, place, depth),
        lambda line, s: (s, line),
        extents=(TILE, DEPTH),
        first=(grid.row if is_a else grid.column, step * DEPTH),
        limits=(operand.size, product.depth),
        thread=thread,
        threads=_THREADS,
    )


def _multiply(acc: Buffer, a_tile: Buffer, b_tile: Buffer, x: Axis, y: Axis, s: SymVar) -> Stmt:
    return _each(
        lambda u, v: Store(
            acc,
            (u, v),
            Binary("mul", Load(a_tile, (s, y.var + u * _SIDE)), Load(b_tile, (s, x.var + v * _SIDE))),
            "add",
        )
    )


def _finish(product: Product, grid: Grid, acc: Buffer, x: Axis, y: Axis, u: SymVar, v: SymVar) -> Stmt:
    row, column = grid.row + y.var + u * _SIDE, grid.column + x.var + v * _SIDE
    return product.finish(grid.group, row, column, Load(acc, (u, v)))


def _each(body: Callable[[SymVar, SymVar], Stmt]) -> Stmt:
    """A statement for each result of a thread."""
    return repeat("u", EACH, lambda u: repeat("v", EACH, lambda v: body(u, v)))
