"""Reductions of narrow numbers by the target's dot products: several terms of a sum in one instruction.

    for k in n: e += float32(a[i, k]) * float32(b[k, j])
        =>  for ko in n/2: e = dot2_bf16(e, a[i, 2*ko], a[i, 2*ko + 1], b[2*ko, j], b[2*ko + 1, j])

The terms of `a` are contiguous in memory; `b`, a constant, is packed so that its terms are (pack_constants.py).

**AMX**: one instruction adds the products of 16 rows of 64 bytes with 16 columns.

    for 32 columns, some rows: for 32 of these rows:
        for k in steps of 64 bytes: C[2, 2] += x[16 rows each, k:k+step] @ w[k:k+step, 16 columns each]
        out[rows, columns] = f(C)

While the weights of some columns are used, those of the next are prefetched, a share by each 32 rows
(docs/measurements/cpus.md, dots_amx).

AMX takes the panels of interleaved pairs or fours of rows as they are packed for dot products; where they are not
packed after all, or for less than 16 rows, the fallback code of dot products runs. The rows of a convolution are
neighbouring positions, all of them for 1x1 filters. Depths that are no multiple of 64 bytes are split into equal
smaller steps. The last AMX tile ends with the last row, so some rows may be computed twice; each is stored once, as the
epilogue may overwrite its operands. Reference: Intel, "Architecture Instruction Set Extensions Programming Reference",
chapter 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from relaxlite.ir.intrinsics import DOT_PRODUCTS
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
    Seq,
    Stmt,
    Value,
    seq,
)
from relaxlite.ir.program_visitor import Substitute
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, ceildiv, smax, smin, sym
from relaxlite.passes.loops.access import stride
from relaxlite.passes.loops.pattern import perfect_nest
from relaxlite.passes.loops.transforms import less, nest, split
from relaxlite.passes.products.blocks_amx import FOUND, ROWS, TILES, call_tiles
from relaxlite.passes.products.pair_tile import join_pair, split_pair
from relaxlite.passes.products.reduction import ReductionBlock
from relaxlite.passes.products.register_tile import ColumnPiece, Tile, grid
from relaxlite.passes.schedule.primitives.tensorize import tensorize
from relaxlite.records import dataclass
from relaxlite.target import Target

SIDE = 2  # AMX tiles of results per row and per column of a register tile
TOGETHER = 4  # register tiles of rows that run along some columns before a thread takes other columns
MAX_BYTES, MIN_BYTES = 64, 32  # of a row of an AMX tile: smaller steps use less than half of the instruction


@dataclass(frozen=True, slots=True)
class Dots:
    """A block whose sum is computed by a dot-product intrinsic, with the packing that its operands need."""

    name: str  # of the intrinsic
    body: Allocate  # of the block, with the dot product
    operands: tuple[Buffer, ...]  # to be packed in groups of rows
    group: int  # rows in a group: terms of one dot product


def dot_products(block: ReductionBlock, column: For, is_available: Callable[[str], bool]) -> Dots | None:
    """Rewrite the innermost reduced loop of a block in steps of a dot product.

    None: no dot product whose intrinsic name passes `is_available` fits the block.
    """
    if not block.is_pair:
        return _dot_product(block, column, is_available)
    first, second = (
        _dot_product(ReductionBlock(block.spatial, body), column, is_available) for body in split_pair(block.body)
    )
    if first is None or second is None or first.group != second.group:
        return None
    return Dots(first.name, join_pair(first.body, second.body), (*first.operands, *second.operands), first.group)


def _dot_product(block: ReductionBlock, column: For, is_available: Callable[[str], bool]) -> Dots | None:
    update, reduced = block.update, perfect_nest(block.stmts[1]).loops
    value, loop = update.value, reduced[-1]
    if not isinstance(value, Binary) or value.op != "mul" or update.combine != "add":
        return None
    for left, right in ((value.a, value.b), (value.b, value.a)):
        if not (isinstance(left, Cast) and isinstance(right, Cast)):
            continue
        a, b = left.x, right.x
        if not (isinstance(a, Load) and isinstance(b, Load)):
            continue
        is_matrix = len(b.indices) > 1 and b.indices[-1] is column.var and b.indices[-2] is loop.var
        if not is_matrix or stride(a, loop.var) != 1 or stride(a, column.var) != 0:
            continue
        for name, dot in DOT_PRODUCTS.items():
            length = as_int(loop.extent)
            is_type_match = (a.dtype, b.dtype, update.buffer.dtype) == (dot.a, dot.b, dot.total)
            if is_type_match and length and length % dot.length == 0 and is_available(name):
                return Dots(name, _tensorized(block, loop, name, dot.length), (b.buffer,), dot.length)
    return None


def _tensorized(block: ReductionBlock, loop: For, name: str, length: int) -> Allocate:
    """Split `loop` of the block by the length of the dot product and tensorize the inner part."""

    def change(stmt: For) -> For:
        if stmt is not loop:
            assert isinstance(stmt.body, For)
            return replace(stmt, body=change(stmt.body))
        main, _, _, _ = split(stmt, length)
        assert isinstance(main.body, For)
        result = tensorize(main, main.body, name)
        assert isinstance(result, For)
        return result

    init, reduced, *final = block.stmts
    assert isinstance(reduced, For)
    return replace(block.body, body=Seq((init, change(reduced), *final)))


# AMX tiles


@dataclass(frozen=True, slots=True)
class _Kind:
    """An AMX instruction: the bytes of its elements, and the rows of weights interleaved in a group."""

    routine: str
    feature: str
    bytes: int
    group: int

    def step(self, depth: int) -> int | None:
        """Return the elements of a step, a divisor of the depth; None: no divisor fits."""
        most, least = MAX_BYTES // self.bytes, MIN_BYTES // self.bytes
        return next((n for n in range(most, least - 1, -self.group) if depth % n == 0), None)


_KINDS: Mapping[tuple[str, str], _Kind] = {  # by the dtypes of x and of the weights
    ("bfloat16", "bfloat16"): _Kind("dot_bf16", "amx-bf16", 2, 2),
    ("uint8", "int8"): _Kind("dot_of_unsigned", "amx-int8", 1, 4),
}


@dataclass(frozen=True, slots=True)
class _Operands:
    """The operands of an AMX product, with the strides in bytes between rows of their tiles.

    `loop`: the innermost reduced loop, `depth` elements in steps of `step`. `others`: reduced loops around it, as those
    over a filter.
    """

    kind: _Kind
    x: Load
    x_apart: int
    weight: Load
    weight_apart: int
    others: Sequence[For]
    loop: SymVar
    depth: int
    step: int


def amx_dots(block: ReductionBlock, column: For, lanes: int, width: int, target: Target) -> tuple[Value, Stmt] | None:
    """Return (condition, code) of AMX tiles for a block; None: its loops do not fit AMX tiles.

    The condition: the system allows AMX tiles, and there are at least 16 rows.

    `width`: columns of a panel of the weights, which are packed in groups of rows.
    """
    row = block.row_loop(column)
    if row is None or block.is_pair or lanes != ROWS or (as_int(row.extent) or ROWS) < ROWS:
        return None
    operands = _operands(block, row, column, width, target)
    if operands is None:
        return None
    tile = _AmxTiles(block.body, row, column, lanes, SIDE * ROWS)
    if not tile.starts_neutral():
        return None
    condition = Binary("and", LibraryFound(TILES, FOUND), less(ROWS - 1, row.extent))
    outer_axes = [(o.var, o.extent) for o in block.spatial if o is not column and o is not row]
    return condition, tile.all_tiles(outer_axes, operands)


def _operands(block: ReductionBlock, row: For, column: For, width: int, target: Target) -> _Operands | None:
    (*outer, loop), value = perfect_nest(block.stmts[1]).loops, block.update.value
    depth, side = as_int(loop.extent), SIDE * ROWS
    spare_columns = as_int(ceildiv(column.extent, width) * width - ceildiv(column.extent, side) * side)
    if not depth or width % ROWS or spare_columns is None or spare_columns < 0:  # the last tile would exceed the panels
        return None
    if not isinstance(value, Binary) or not isinstance(value.a, Cast) or not isinstance(value.b, Cast):
        return None
    x, weight = value.a.x, value.b.x
    if isinstance(x, Load) and stride(x, column.var):
        x, weight = weight, x
    if not isinstance(x, Load) or not isinstance(weight, Load):
        return None
    kind, x_stride = _KINDS.get((x.dtype, weight.dtype)), stride(x, row.var)
    step = None if kind is None else kind.step(depth)
    if kind is None or step is None or x_stride is None or stride(x, loop.var) != 1 or not target.has(kind.feature):
        return None
    return _Operands(
        kind, x, x_stride * kind.bytes, weight, width * kind.group * kind.bytes, outer, loop.var, depth, step
    )


class _AmxTiles(Tile):
    """Register tiles of 32 rows by 32 columns, each of 2 x 2 AMX tiles."""

    __slots__ = ()

    def all_tiles(self, others: Sequence[tuple[SymVar, SymExpr]], operands: _Operands) -> Stmt:
        """Return all tiles in one parallel loop."""
        row, side = self._row, SIDE * ROWS
        across, down, inner = (SymVar(name, lower=0) for name in ("jo", "io", "ii"))
        rows_per_thread = side * TOGETHER
        count = ceildiv(smin(sym(rows_per_thread), row.extent - down * rows_per_thread), side)
        top = SymVar("top", lower=0)
        tile = self._tile(across, top, operands, inner)
        tile = LetIndex(top, IndexValue(down * rows_per_thread + inner * side), tile)
        configure = call_tiles("configure", operands.step * operands.kind.bytes)
        body = seq(configure, For(inner, count, tile), call_tiles("release"))
        axes = [*others, (across, ceildiv(self.column.extent, side)), (down, ceildiv(row.extent, rows_per_thread))]
        return Substitute(fresh=True).stmt(grid(axes, body))

    def _tile(self, across: SymVar, top: SymVar, operands: _Operands, turn: SymVar) -> Stmt:
        """Return the sums of 32 rows from `top` on and their epilogue; `turn`: number of the tile along the columns."""
        first, x, weight = across * (SIDE * ROWS), operands.x, operands.weight
        number = SymVar("s", lower=0, upper=operands.depth // operands.step - 1)
        buffer = Buffer("products", tuple(map(sym, (SIDE, ROWS, SIDE, ROWS))), self.block.buffer.dtype, "local")
        starts = [smin(top + t * ROWS, self._row.extent - ROWS) for t in range(SIDE)]

        def place(load: Load, replacements: dict[SymVar, SymExpr]) -> AddressOf:
            return AddressOf(
                load.buffer, Substitute({**replacements, operands.loop: number * operands.step}).indices(load.indices)
            )

        tiles = [(down, side) for down in range(SIDE) for side in range(SIDE)]
        loads = [
            call_tiles("take_x", t, place(x, {self._row.var: starts[t]}), sym(operands.x_apart)) for t in range(SIDE)
        ]
        loads += [
            call_tiles("take_quads", u, place(weight, {self.column.var: first + u * ROWS}), sym(operands.weight_apart))
            for u in range(SIDE)
        ]
        dots = [call_tiles(operands.kind.routine, n, down, side) for n, (down, side) in enumerate(tiles)]
        stores = [
            call_tiles(
                "keep", n, AddressOf(buffer, tuple(map(sym, (down, 0, side, 0))), is_written=True), sym(SIDE * ROWS * 4)
            )
            for n, (down, side) in enumerate(tiles)
        ]
        step = seq(*self._weight_prefetches(operands, number, first, turn), *loads, *dots)
        steps = nest([*operands.others, For(number, sym(operands.depth // operands.step), seq())], step)
        sums = seq(*(call_tiles("clear", n) for n in range(len(tiles))), steps)
        return Allocate(
            buffer, seq(sums, *stores, *(self._finish(buffer, t, starts[t], first, top) for t in range(SIDE)))
        )

    def _weight_prefetches(self, operands: _Operands, number: SymVar, first: SymExpr, turn: SymVar) -> list[Prefetch]:
        """Return the prefetches of a share of the weights of a step of the next columns."""
        group, weight = operands.kind.group, operands.weight
        share = -(-operands.step // group // TOGETHER)  # of groups of rows
        lines = [(turn * share + row, first + (SIDE + u) * ROWS) for row in range(share) for u in range(SIDE)]
        places = [
            {operands.loop: number * operands.step + group * row, self.column.var: column} for row, column in lines
        ]
        return [Prefetch(weight.buffer, Substitute(at).indices(weight.indices)) for at in places]

    def _finish(self, products: Buffer, down: int, start: SymExpr, first: SymExpr, top: SymVar) -> Stmt:
        """Return the epilogue of the rows from `top + down * ROWS` on, whose AMX tile begins at row `start`."""
        masked = as_int(self.column.extent % (SIDE * ROWS)) != 0
        first_row = top + down * ROWS
        (row, part, lane), at = self._loops(ColumnPiece(sym(1), sym(0), SIDE), ROWS, first, first_row)
        count = smax(smin(sym(ROWS), self._row.extent - first_row), 0)
        loops = replace(row, extent=count, kind="serial"), part, lane
        load = Load(products, (sym(down), row.var + (first_row - start), part.var, lane.var))
        return self._epilogue(loops, at, load, masked=masked)
