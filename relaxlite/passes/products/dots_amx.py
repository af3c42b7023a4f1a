"""Products in bfloat16 and in bytes by AMX: one instruction adds the products of 16 rows of 64 bytes with 16 columns.

    for 32 columns, some rows: for 32 of these rows:
        for k in steps of 64 bytes: C[2, 2] += x[16 rows each, k:k+step] @ w[k:k+step, 16 columns each]
        out[rows, columns] = f(C)

While the weights of some columns are used, those of the next are asked for, a share by each 32 rows
(docs/measurements/cpus.md, dots_amx).

Weights lie in panels of pairs or fours of rows (dots.py, pack_constants.py), which is the form that the
instruction takes; where they are not packed after all, the code beside this one runs. It also does so for less than 16
rows. Of a convolution the rows are positions beside each other, all of them where one pixel makes another. Depths that
are no multiple of 64 bytes are cut into equal steps of less. The last tile of rows ends with the last row, so some rows
may be computed twice; they are stored once, as what follows a product may write over what it reads. Intel,
"Architecture Instruction Set Extensions Programming Reference", chapter 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from relaxlite.passes.loops.access import stride
from relaxlite.passes.loops.pattern import perfect_nest
from relaxlite.passes.loops.transforms import less, nest
from relaxlite.passes.products.blocks_amx import FOUND, ROWS, TILES, call_tiles
from relaxlite.passes.products.reduction import Block
from relaxlite.passes.products.register_tile import ColumnPiece, Tile, grid
from relaxlite.records import dataclass
from relaxlite.target import Target

SIDE = 2  # tiles of products down, and across
TOGETHER = 4  # times so many rows go along some columns before a thread takes others
MAX_BYTES, MIN_BYTES = 64, 32  # of a row in a tile: steps of less leave the instruction half empty


@dataclass(frozen=True, slots=True)
class _Kind:
    """What an instruction multiplies: numbers of so many bytes, so many of which lie beside each other in a column."""

    routine: str
    feature: str
    bytes: int
    group: int

    def step(self, depth: int) -> int | None:
        """How many numbers at a time, the same at each; None: the depth has no divisor that suits."""
        most, least = MAX_BYTES // self.bytes, MIN_BYTES // self.bytes
        return next((n for n in range(most, least - 1, -self.group) if depth % n == 0), None)


_KINDS: Mapping[tuple[str, str], _Kind] = {  # by the dtypes of x and of the weights
    ("bfloat16", "bfloat16"): _Kind("dot_bf16", "amx-bf16", 2, 2),
    ("uint8", "int8"): _Kind("dot_of_unsigned", "amx-int8", 1, 4),
}


@dataclass(frozen=True, slots=True)
class _Operands:
    """What is multiplied, with the bytes from one row of a tile to the next, along a loop of `depth` in some steps,
    inside of others, such as those over a filter."""

    kind: _Kind
    x: Load
    x_apart: int
    weight: Load
    weight_apart: int
    others: Sequence[For]
    loop: SymVar
    depth: int
    step: int


def amx_dots(block: Block, column: For, lanes: int, width: int, target: Target) -> tuple[Value, Stmt] | None:
    """When there are tiles and rows to fill one, and the code then; None: it is no product that tiles can make.

    `width`: how many columns a panel of the weights has, which are packed in groups of rows.
    """
    row = block.row_loop(column)
    if row is None or block.is_pair or lanes != ROWS or (as_int(row.extent) or ROWS) < ROWS:
        return None
    result = _operands(block, row, column, width, target)
    if result is None:
        return None
    tile = _AmxTiles(block.body, row, column, lanes, SIDE * ROWS)
    if not tile.starts_neutral():
        return None
    enough = Binary("and", LibraryFound(TILES, FOUND), less(ROWS - 1, row.extent))
    others = [(o.var, o.extent) for o in block.spatial if o is not column and o is not row]
    return enough, tile.everywhere(others, result)


def _operands(block: Block, row: For, column: For, width: int, target: Target) -> _Operands | None:
    (*outer, loop), value = perfect_nest(block.stmts[1]).loops, block.update.value
    depth, side = as_int(loop.extent), SIDE * ROWS
    spare = as_int(ceildiv(column.extent, width) * width - ceildiv(column.extent, side) * side)
    if not depth or width % ROWS or spare is None or spare < 0:  # the last square would leave the panels
        return None
    if not isinstance(value, Binary) or not isinstance(value.a, Cast) or not isinstance(value.b, Cast):
        return None
    x, weight = value.a.x, value.b.x
    if isinstance(x, Load) and stride(x, column.var):
        x, weight = weight, x
    if not isinstance(x, Load) or not isinstance(weight, Load):
        return None
    kind, apart = _KINDS.get((x.dtype, weight.dtype)), stride(x, row.var)
    step = None if kind is None else kind.step(depth)
    if kind is None or step is None or apart is None or stride(x, loop.var) != 1 or not target.has(kind.feature):
        return None
    return _Operands(kind, x, apart * kind.bytes, weight, width * kind.group * kind.bytes, outer, loop.var, depth, step)


class _AmxTiles(Tile):
    """Squares of 32 rows by 32 columns."""

    __slots__ = ()

    def everywhere(self, others: Sequence[tuple[SymVar, SymExpr]], given: _Operands) -> Stmt:
        """All of them in one parallel loop."""
        row, side = self._row, SIDE * ROWS
        across, down, inner = (SymVar(name, lower=0) for name in ("jo", "io", "ii"))
        some = side * TOGETHER
        count = ceildiv(smin(sym(some), row.extent - down * some), side)
        top = SymVar("top", lower=0)
        square = self._square(across, top, given, inner)
        square = LetIndex(top, IndexValue(down * some + inner * side), square)
        configure = call_tiles("configure", given.step * given.kind.bytes)
        body = seq(configure, For(inner, count, square), call_tiles("release"))
        axes = [*others, (across, ceildiv(self.column.extent, side)), (down, ceildiv(row.extent, some))]
        return Substitute(fresh=True).stmt(grid(axes, body))

    def _square(self, across: SymVar, top: SymVar, given: _Operands, turn: SymVar) -> Stmt:
        """Sums of 32 rows from `top` on, which are the `turn`-th so many along the columns, and what follows them."""
        first, x, weight = across * (SIDE * ROWS), given.x, given.weight
        number = SymVar("s", lower=0, upper=given.depth // given.step - 1)
        buffer = Buffer("products", tuple(map(sym, (SIDE, ROWS, SIDE, ROWS))), self.block.buffer.dtype, "local")
        starts = [smin(top + t * ROWS, self._row.extent - ROWS) for t in range(SIDE)]

        def place(load: Load, instead: dict[SymVar, SymExpr]) -> AddressOf:
            return AddressOf(
                load.buffer, Substitute({**instead, given.loop: number * given.step}).indices(load.indices)
            )

        tiles = [(down, side) for down in range(SIDE) for side in range(SIDE)]
        taken = [call_tiles("take_x", t, place(x, {self._row.var: starts[t]}), sym(given.x_apart)) for t in range(SIDE)]
        taken += [
            call_tiles("take_quads", u, place(weight, {self.column.var: first + u * ROWS}), sym(given.weight_apart))
            for u in range(SIDE)
        ]
        dots = [call_tiles(given.kind.routine, n, down, side) for n, (down, side) in enumerate(tiles)]
        kept = [
            call_tiles(
                "keep", n, AddressOf(buffer, tuple(map(sym, (down, 0, side, 0))), is_written=True), sym(SIDE * ROWS * 4)
            )
            for n, (down, side) in enumerate(tiles)
        ]
        step = seq(*self._asked(given, number, first, turn), *taken, *dots)
        steps = nest([*given.others, For(number, sym(given.depth // given.step), seq())], step)
        sums = seq(*(call_tiles("clear", n) for n in range(len(tiles))), steps)
        return Allocate(
            buffer, seq(sums, *kept, *(self._finish(buffer, t, starts[t], first, top) for t in range(SIDE)))
        )

    def _asked(self, given: _Operands, number: SymVar, first: SymExpr, turn: SymVar) -> list[Prefetch]:
        """Requests for a share of the weights of a step of the next columns."""
        group, weight = given.kind.group, given.weight
        share = -(-given.step // group // TOGETHER)  # of groups of rows
        lines = [(turn * share + row, first + (SIDE + u) * ROWS) for row in range(share) for u in range(SIDE)]
        places = [{given.loop: number * given.step + group * row, self.column.var: column} for row, column in lines]
        return [Prefetch(weight.buffer, Substitute(at).indices(weight.indices)) for at in places]

    def _finish(self, made: Buffer, down: int, start: SymExpr, first: SymExpr, top: SymVar) -> Stmt:
        """What follows the sums of the rows from `top + down * ROWS` on, whose tile begins at row `start`."""
        masked = as_int(self.column.extent % (SIDE * ROWS)) != 0
        begin = top + down * ROWS
        (row, part, lane), at = self._loops(ColumnPiece(sym(1), sym(0), SIDE), ROWS, first, begin)
        count = smax(smin(sym(ROWS), self._row.extent - begin), 0)
        loops = replace(row, extent=count, kind="serial"), part, lane
        load = Load(made, (sym(down), row.var + (begin - start), part.var, lane.var))
        return self._epilogue(loops, at, load, masked=masked)
