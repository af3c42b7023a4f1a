"""Products in bfloat16 by AMX: one instruction adds the products of 16 rows of 32 numbers with 16 columns.

    for 32 columns, some rows: for 32 of these rows:
        for k in 32s: C[2, 2] += x[16 rows each, k:k+32] @ w[k:k+32, 16 columns each]
        out[rows, columns] = f(C)

While the weights of some columns are used, those of the next are asked for, a share by each 32 rows: 16 rows of
MiniLM-L6 take 10 % less time so on a Granite Rapids.

Weights lie in panels of pairs of rows (schedule_dots.py, pack_constants.py), which is the form that the instruction
takes; where they are not packed after all, the code beside this one runs. It also does so for less than 16 rows. The
last tile of rows ends with the last row, so some rows may be computed twice; they are stored once, as what follows a
product may write over what it reads. Intel, "Architecture Instruction Set Extensions Programming Reference", chapter 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from relaxlite.ir.program import (
    AddressOf,
    Allocate,
    Binary,
    Buffer,
    Cast,
    For,
    IndexValue,
    LetIndex,
    LibraryFound,
    Load,
    Prefetch,
    Stmt,
    Value,
    seq,
)
from relaxlite.ir.program_visitor import Substitute
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, ceildiv, smax, smin, sym
from relaxlite.passes.access import stride
from relaxlite.passes.loop_pattern import perfect_nest
from relaxlite.passes.register_tile import ColumnPiece, Tile, grid
from relaxlite.passes.schedule import less
from relaxlite.passes.schedule_reduction import Block
from relaxlite.passes.schedule_tiles import FOUND, ROWS, TILES, call_tiles

DEPTH = 32  # numbers in a row of a tile
SIDE = 2  # tiles of products down, and across
TOGETHER = 4  # times so many rows go along some columns before a thread takes others
_BYTES = 2  # of a number


def bf16_tiles(block: Block, column: For, lanes: int, width: int) -> tuple[Value, Stmt] | None:
    """When there are tiles and rows to fill one, and the code then; None: it is no product that tiles can make.

    `width`: how many columns a panel of the weights has, which are packed in pairs of rows.
    """
    row, (loop, *more), value = block.row_loop(column), perfect_nest(block.stmts[1]).loops, block.update.value
    depth = as_int(loop.extent)
    if row is None or more or block.is_pair or depth is None or depth % DEPTH or lanes != ROWS or width % (SIDE * ROWS):
        return None
    if not isinstance(value, Binary) or not isinstance(value.a, Cast) or not isinstance(value.b, Cast):
        return None
    x, weight = value.a.x, value.b.x
    if isinstance(x, Load) and stride(x, column.var):
        x, weight = weight, x
    if not isinstance(x, Load) or not isinstance(weight, Load):
        return None
    apart = stride(x, row.var)
    if apart is None or stride(x, loop.var) != 1 or (x.dtype, weight.dtype) != ("bfloat16", "bfloat16"):
        return None
    tile = _Squares(block.body, row, column, lanes, SIDE * ROWS)
    if not tile.starts_neutral():
        return None
    enough = Binary("and", LibraryFound(TILES, FOUND), less(ROWS - 1, row.extent))
    others = [(o.var, o.extent) for o in block.spatial if o is not column and o is not row]
    return enough, tile.everywhere(others, (x, apart * _BYTES), (weight, width * 2 * _BYTES), (loop.var, depth))


class _Squares(Tile):
    """Squares of 32 rows by 32 columns."""

    __slots__ = ()

    def everywhere(
        self,
        others: Sequence[tuple[SymVar, SymExpr]],
        x: tuple[Load, int],
        weight: tuple[Load, int],
        step: tuple[SymVar, int],
    ) -> Stmt:
        """All of them in one parallel loop. `x`, `weight`: where an element lies, and bytes between rows of a tile."""
        row, side = self._row, SIDE * ROWS
        across, down, inner = (SymVar(name, lower=0) for name in ("jo", "io", "ii"))
        some = side * TOGETHER
        count = ceildiv(smin(sym(some), row.extent - down * some), side)
        top = SymVar("top", lower=0)
        square = self._square(across, top, x, weight, step, inner)
        square = LetIndex(top, IndexValue(down * some + inner * side), square)
        body = seq(call_tiles("configure", DEPTH * _BYTES), For(inner, count, square), call_tiles("release"))
        axes = [*others, (across, ceildiv(self.column.extent, side)), (down, ceildiv(row.extent, some))]
        return Substitute(fresh=True).stmt(grid(axes, body))

    def _square(
        self,
        across: SymVar,
        top: SymVar,
        x: tuple[Load, int],
        weight: tuple[Load, int],
        step: tuple[SymVar, int],
        turn: SymVar,
    ) -> Stmt:
        first, (k, depth) = across * (SIDE * ROWS), step
        number = SymVar("s", lower=0, upper=depth // DEPTH - 1)
        made = Buffer("products", tuple(map(sym, (SIDE, ROWS, SIDE, ROWS))), "float32", "local")
        starts = [smin(top + t * ROWS, self._row.extent - ROWS) for t in range(SIDE)]

        def place(load: Load, instead: dict[SymVar, SymExpr]) -> AddressOf:
            return AddressOf(load.buffer, Substitute({**instead, k: number * DEPTH}).indices(load.indices))

        tiles = [(down, side) for down in range(SIDE) for side in range(SIDE)]
        taken = [call_tiles("take_x", t, place(x[0], {self._row.var: starts[t]}), sym(x[1])) for t in range(SIDE)]
        taken += [
            call_tiles("take_quads", u, place(weight[0], {self.column.var: first + u * ROWS}), sym(weight[1]))
            for u in range(SIDE)
        ]
        dots = [call_tiles("dot_bf16", n, down, side) for n, (down, side) in enumerate(tiles)]
        kept = [
            call_tiles(
                "keep", n, AddressOf(made, tuple(map(sym, (down, 0, side, 0))), is_written=True), sym(SIDE * ROWS * 4)
            )
            for n, (down, side) in enumerate(tiles)
        ]
        share = DEPTH // 2 // TOGETHER  # pairs of rows of a step of the next columns
        lines = [(turn * share + pair, first + (SIDE + u) * ROWS) for pair in range(share) for u in range(SIDE)]
        next_ones = [{k: number * DEPTH + 2 * pair, self.column.var: column} for pair, column in lines]
        asked = [Prefetch(weight[0].buffer, Substitute(at).indices(weight[0].indices)) for at in next_ones]
        sums = seq(
            *(call_tiles("clear", n) for n in range(len(tiles))),
            For(number, sym(depth // DEPTH), seq(*asked, *taken, *dots)),
        )
        return Allocate(made, seq(sums, *kept, *(self._finish(made, t, starts[t], first, top) for t in range(SIDE))))

    def _finish(self, made: Buffer, down: int, start: SymExpr, first: SymExpr, top: SymVar) -> Stmt:
        """What follows the sums of the rows from `top + down * ROWS` on, whose tile begins at row `start`."""
        masked = as_int(self.column.extent % (SIDE * ROWS)) != 0
        begin = top + down * ROWS
        (row, part, lane), at = self._loops(ColumnPiece(sym(1), sym(0), SIDE), ROWS, first, begin)
        count = smax(smin(sym(ROWS), self._row.extent - begin), 0)
        loops = replace(row, extent=count, kind="serial"), part, lane
        load = Load(made, (sym(down), row.var + (begin - start), part.var, lane.var))
        return self._epilogue(loops, at, load, masked=masked)
