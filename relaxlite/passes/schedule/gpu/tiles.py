"""Tiles of products: the grid of blocks, and operands in shared memory."""

from __future__ import annotations

from collections.abc import Callable

from relaxlite.ir.program import Binary, Buffer, Cast, Literal, Select, Stmt, Store, Value
from relaxlite.ir.symbolic import SymExpr, SymVar, ceildiv, sym
from relaxlite.passes.loops.transforms import less
from relaxlite.passes.schedule.gpu.axes import Axis, repeat
from relaxlite.passes.schedule.gpu.product import Operand, Product
from relaxlite.records import dataclass


@dataclass(frozen=True, slots=True)
class Grid:
    """The blocks of a product, on one axis: groups, then rows of tiles, then tiles of a row."""

    axis: Axis
    group: SymExpr
    row: SymExpr  # the first of the block
    column: SymExpr

    @staticmethod
    def of(product: Product, rows: int, columns: int) -> Grid:
        """The grid of tiles of `rows` x `columns` results."""
        down, across = ceildiv(product.a.size, rows), ceildiv(product.b.size, columns)
        groups = sym(1)
        for loop in product.groups:
            groups = groups * loop.extent
        axis = Axis.of("b", "block_x", groups * down * across)
        rest, column = axis.var // across, axis.var % across
        return Grid(axis, rest // down, rest % down * rows, column * columns)


def fill_tile(
    tile: Buffer,
    operand: Operand,
    element: Callable[[SymExpr, SymExpr], Value],
    at: Callable[[SymExpr, SymExpr], tuple[SymExpr, ...]],
    *,
    extents: tuple[int, int],
    first: tuple[SymExpr, SymExpr],
    limits: tuple[SymExpr, SymExpr],
    thread: SymExpr,
    threads: int,
) -> Stmt:
    """Store a tile of an operand: zeros beyond `limits`.

    Pairs are (rows or columns, steps of the sum): `extents` of the tile, `first` of the tile, `limits` of the operand.
    `element` gives a value at a pair, `at` its indices in the tile. Threads that lie side by side read what lies side
    by side in memory.
    """
    lines, steps = extents

    def one(q: SymVar) -> Stmt:
        number = q * threads + thread
        line, step = (
            (number // steps, number % steps) if operand.is_along_reduced else (number % lines, number // lines)
        )
        place, depth = first[0] + line, first[1] + step
        exists = Binary("and", less(place, limits[0]), less(depth, limits[1]))
        value = element(place, depth)
        if value.dtype != tile.dtype:
            value = Cast(value, tile.dtype)
        return Store(tile, at(line, step), Select(exists, value, Literal(0.0, tile.dtype)))

    count, rest = divmod(lines * steps, threads)
    assert rest == 0, f"{threads} threads do not share {lines} x {steps} elements evenly"
    return repeat("q", count, one)
