"""Register tiles for reductions: rows x vectors of outputs accumulate while the reduced loops run inside.

    for i, j: { e[]; e = 0; for k: e += a[i, k] * b[k, j]; out[i, j] = f(e) }

becomes, with j along vectors of 16 lanes (the column) and i down the tile (the row):

    for jo: for io: { e[6, 4, 16] = 0; for k: e[r, u, l] += a[io*6 + r, k] * b[k, jo*64 + u*16 + l]; out[...] = f(e) }

The tile's loops are unrolled and vectorized, so `e` lives in registers. Here the tile's size and the order of tiles are
chosen; register_tile.py makes their code. Every shape is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from relaxlite import dtypes
from relaxlite.ir.program import (
    Allocate,
    Buffer,
    For,
    IndexValue,
    LetIndex,
    Literal,
    Load,
    Seq,
    Stmt,
    Store,
    Value,
    seq,
)
from relaxlite.ir.program_visitor import Substitute, loads, stores, walk_stmts
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, ceildiv, sym
from relaxlite.passes.loops.access import can_fuse, stride
from relaxlite.passes.loops.parallel import has_disjoint_writes
from relaxlite.passes.loops.pattern import perfect_nest, reduction_of
from relaxlite.passes.loops.transforms import fuse, less, select_version
from relaxlite.passes.products.choice import DEFAULT, ONE_SUM, ScheduleChoice
from relaxlite.passes.products.pair_tile import PairTile, apart, pair_of
from relaxlite.passes.products.panel_prefetch import LINE, PanelPrefetch
from relaxlite.passes.products.prologue import Prologue, Stream, find_prologue
from relaxlite.passes.products.register_tile import (
    ENOUGH_SUMS,
    MAX_BLOCKS,
    PANEL_STEPS,
    ColumnPiece,
    Fill,
    PanelRows,
    Tile,
    by_piece,
    column_pieces,
    grid,
)
from relaxlite.records import dataclass

MAX_ROWS = 8
FEW_STEPS, MANY_ROWS = 128, 64  # of a reduction whose tiles follow each other along rows
MAX_SMALL_STRIDE = 4  # a strided vector load is still better than scalar code


@dataclass(frozen=True, slots=True)
class RowShape:
    """How rows become blocks (see register_tile.RowSplit). `together`: blocks that go along a panel of columns before
    the next blocks do; None: all of them."""

    least: int = 1
    unit: int = 1
    together: int | None = None


def tiled(
    block: Block,
    column: For,
    lanes: int,
    registers: int = 32,
    body: Allocate | None = None,
    choice: ScheduleChoice = DEFAULT,
    *,
    hides_conversions: bool = True,
    asks: PanelPrefetch | None = None,
    shape: RowShape | None = None,
) -> Stmt:
    """The block in register tiles for vectors of `lanes`, in one parallel loop over all of its tiles. `body` stands for
    the block's, where that does not add term by term any more. `hides_conversions`: see Target. `asks`: how
    tiles ask for panels of the columns' operand (panel_prefetch.py)."""
    row, rows, vectors = tile_size(block, column, lanes, registers, choice)
    shape = RowShape() if shape is None or row is None else shape
    rows = -(-rows // shape.unit) * shape.unit
    kind = PairTile.of if block.is_pair else Tile
    tile = kind(body or block.body, row, column, lanes, rows, choice.sums or ENOUGH_SUMS)
    tile = replace(tile, least_rows=shape.least, row_unit=shape.unit, together=shape.together)
    prologues = prologues_of(block, column) if body is None else ()
    has_panels = (
        bool(prologues) and row is not None and not (hides_conversions and all(each.is_cheap for each in prologues))
    )
    if has_panels and choice.sums == ONE_SUM:
        period = math.lcm(*(each.period for each in prologues))
        tile = replace(tile, part=-(-PANEL_STEPS // period) * period)
    if len(prologues) == 1:
        tile = replace(tile, asks=asks)
        return tiled_prologue(
            tile, prologues[0], block.spatial, vectors, registers, hides_conversions=hides_conversions
        )
    pieces = column_pieces(column.extent, lanes, vectors)
    if not pieces:
        return Seq(())
    across, down = (
        _counter(f"{column.var.name}o", sum((p.count for p in pieces), sym(0))),
        _counter("row" if row is None else f"{row.var.name}o", tile.rows.count),
    )
    others = [(loop.var, loop.extent) for loop in block.spatial if loop is not column and loop is not row]
    if shape.together is not None and row is not None:
        return _in_groups(replace(tile, asks=asks), pieces, others)
    rows_outside = choice.outer == "rows" if choice.outer else row is not None and _rows_first(block, row)
    tile = replace(tile, asks=None if rows_outside else asks)
    tiles = by_piece(pieces, across[0], lambda piece, number: tile(piece, number, down[0]))
    usual = grid([*others, down, across] if rows_outside else [*others, across, down], tiles)
    if row is None or not prologues or hides_conversions:
        return usual
    staged = over_panels(_higher(tile), [each.operand for each in prologues], pieces, others)
    return select_version(less(row.extent, rows + 1), usual, staged)


def _in_groups(tile: Tile, pieces: Sequence[ColumnPiece], others: Sequence[tuple[SymVar, SymExpr]]) -> Stmt:
    """Tiles of which a group of row blocks take a panel, one after the other, then the next, before the next group
    does: what the rows read stays in the cache."""
    rows, group, down = tile.rows, SymVar("group", lower=0), SymVar("block", lower=0)
    across = _counter(f"{tile.column.var.name}o", sum((p.count for p in pieces), sym(0)))
    code = by_piece(pieces, across[0], lambda piece, number: tile(piece, number, down))
    block = SymVar("block", lower=0)
    code = LetIndex(down, IndexValue(group * rows.in_group + block), code)
    return grid([*others, (group, rows.groups), across, (block, rows.in_group)], code)


def prologues_of(block: Block, column: For) -> tuple[Prologue, ...]:
    """What the operand that moves along the column goes through before it is multiplied, for each sum of an element;
    none: that of some sum is a plain load."""
    row = block.row_loop(column)
    bodies = apart(block.body) if block.is_pair else (block.body,)
    result = [_prologue(Block(block.spatial, body), column, row) for body in bodies]
    return tuple(each for each in result if each is not None) if None not in result else ()


def _prologue(block: Block, column: For, row: For | None) -> Prologue | None:
    init = block.stmts[0]
    if not isinstance(init, Store) or not isinstance(init.value, Literal) or init.value.value != 0:
        return None
    return find_prologue(block.stmts[1], column.var, None if row is None else row.var)


def _higher(tile: Tile) -> Tile:
    """For more rows than one tile has."""
    return replace(tile, least_rows=tile.most_rows + 1)


def tiled_prologue(
    tile: Tile, found: Prologue, spatial: Sequence[For], vectors: int, registers: int, *, hides_conversions: bool
) -> Stmt:
    """Tiles of a block with a prologue: streamed where one block holds all rows or what is to be done costs nothing,
    else staged."""
    row, column = tile.row, tile.column
    pieces = column_pieces(column.extent, tile.lanes, vectors)
    across = _counter(f"{column.var.name}o", sum((p.count for p in pieces), sym(0)))
    others = [(loop.var, loop.extent) for loop in spatial if loop is not column and loop is not row]
    if not pieces:
        return Seq(())

    streaming = Stream(registers, column.var, None if row is None else row.var, found.period, tile.enough_sums)
    low = replace(tile, stream=streaming)
    down = _counter("row" if row is None else f"{row.var.name}o", low.rows.count)
    tiles = by_piece(pieces, across[0], lambda piece, number: low(piece, number, down[0]))
    streamed = grid([*others, across, down], tiles)
    if row is None or (found.is_cheap and hides_conversions):
        return streamed
    staged = over_panels(_higher(replace(tile, asks=None)), [found.operand], pieces, others)
    return select_version(less(row.extent, tile.most_rows + 1), streamed, staged)


def over_panels(
    tile: Tile,
    operands: Sequence[Value | PanelRows],
    pieces: Sequence[ColumnPiece],
    others: Sequence[tuple[SymVar, SymExpr]],
    fill: Fill | None = None,
) -> Stmt:
    """Tiles whose row blocks share panels of the columns' operands; many blocks are shared out."""
    blocks = tile.rows.count
    across = _counter(f"{tile.column.var.name}o", sum((p.count for p in pieces), sym(0)))
    share, shares = SymVar("share", lower=0), ceildiv(blocks, MAX_BLOCKS)
    run = share * blocks // shares, (share + 1) * blocks // shares
    tiles = by_piece(pieces, across[0], lambda piece, number: tile.over_panels(piece, number, run, operands, fill))
    return Substitute(fresh=True).stmt(grid([*others, (share, shares), across], tiles))


def _rows_first(block: Block, row: For) -> bool:
    """Whether to go along rows of tiles rather than down their columns, in which the columns' operand stays in the
    cache: for few steps and many rows, as results that lie side by side are then written one after the other."""
    steps = [as_int(loop.extent) or FEW_STEPS + 1 for loop in perfect_nest(block.stmts[1]).loops]
    return math.prod(steps) <= FEW_STEPS and (as_int(row.extent) or 0) >= MANY_ROWS


def tile_size(
    block: Block, column: For, lanes: int, registers: int = 32, choice: ScheduleChoice = DEFAULT
) -> tuple[For | None, int, int]:
    """(the loop down the tile or None, the rows of a tile at most, its vectors)"""
    row = block.row_loop(column)
    return row, *tile_shape(row, column, lanes, registers, choice, len(block.updates))


def tile_shape(
    row: For | None, column: For, lanes: int, registers: int, choice: ScheduleChoice = DEFAULT, sums: int = 1
) -> tuple[int, int]:
    """(the rows of a tile at most, its vectors), where each element of the tile has so many sums"""
    vectors = _vectors(column, lanes, registers, choice, sums)
    return 1 if row is None else _rows(row, vectors * sums, registers, choice), vectors


def panel_width(block: Block, column: For, lanes: int, registers: int = 32, choice: ScheduleChoice = DEFAULT) -> int:
    """How many columns a tile has."""
    return _vectors(column, lanes, registers, choice, len(block.updates)) * lanes


def panel_widths(
    block: Block, column: For, lanes: int, registers: int = 32, choice: ScheduleChoice = DEFAULT
) -> dict[Buffer, int]:
    """Operands that a tile streams through by rows of `width` columns, `width` being the tile's: weights of a matmul.

    Packed into panels of that width (pack_constants.py) they are read from one end to the other.
    """
    width, columns = panel_width(block, column, lanes, registers, choice), as_int(column.extent)
    if columns is None or (columns <= width and columns % lanes == 0):
        return {}
    result: dict[Buffer, int] = {}
    for load in block.loads():
        is_last = len(load.indices) > 1 and load.indices[-1] is column.var
        if is_last and not any(column.var in index.free_vars() for index in load.indices[:-1]):
            result[load.buffer] = width
    return result


def prefetch_distances(panels: Iterable[Buffer], most: int) -> dict[Buffer, int]:
    """How far ahead each of the panels of one product is asked for, in lines: the longest `most` bytes, the others in
    step."""
    rows = {b: (as_int(b.shape[0]) or 1) * dtypes.itemsize(b.dtype) for b in panels}
    return {b: -(-most * size // max(rows.values()) // LINE) * LINE for b, size in rows.items()} if most else {}


def _accumulators(registers: int) -> int:
    """How many vector registers hold sums; the others hold operands."""
    return registers * 3 // 4


def _vectors(column: For, lanes: int, registers: int, choice: ScheduleChoice, sums: int) -> int:
    """How many vectors wide a tile is: as many as leave accumulators for six rows."""
    most = choice.vectors or max(1, _accumulators(registers) // 6 // sums)
    width = as_int(column.extent)
    return most if width is None else max(1, min(most, -(-width // lanes)))


def _rows(row: For, vectors: int, registers: int, choice: ScheduleChoice) -> int:
    most = choice.rows or max(1, min(MAX_ROWS, _accumulators(registers) // vectors))
    extent = as_int(row.extent)
    return most if extent is None else min(most, max(extent, 1))


def _counter(name: str, count: SymExpr) -> tuple[SymVar, SymExpr]:
    known = as_int(count)
    return SymVar(name, upper=None if known is None else max(known - 1, 0)), count


@dataclass(frozen=True, slots=True)
class Block:
    """for spatial: { element[]; init; reduced loops: combine; epilogue }

    The epilogue may be such a block itself: a pair of reductions over the same loops (pair_products.py).
    """

    spatial: tuple[For, ...]
    body: Allocate

    @property
    def stmts(self) -> tuple[Stmt, ...]:
        return self.body.body.stmts if isinstance(self.body.body, Seq) else (self.body.body,)

    @property
    def updates(self) -> tuple[Store, ...]:
        """The combining stores, two of a pair."""
        result = [s for s in walk_stmts(self.body) if isinstance(s, Store) and s.combine is not None]
        return tuple(result[: 2 if self.is_pair else 1])

    @property
    def update(self) -> Store:
        return self.updates[0]

    @property
    def is_pair(self) -> bool:
        return isinstance(self.stmts[-1], Allocate)

    def loads(self) -> Iterator[Load]:
        """What the reductions combine."""
        elements = {update.buffer for update in self.updates}
        return (load for update in self.updates for load in loads(update) if load.buffer not in elements)

    def fused(self, *, reduced: bool = True) -> Block:
        """Fuse adjacent spatial loops, and adjacent reduced loops, whose accesses stay linear."""
        spatial, body = list(self.spatial), self.body
        k = len(spatial) - 2
        while k >= 0:
            outer, inner = spatial[k], spatial[k + 1]
            if can_fuse(body, outer.var, inner.var, inner.extent):
                merged = fuse(outer, replace(inner, body=body))
                spatial[k : k + 2] = [merged]
                assert isinstance(merged.body, Allocate)
                body = merged.body
            k -= 1
        return Block(tuple(spatial), replace(body, body=_fuse_reduced(body.body)) if reduced else body)

    def vector_loop(self) -> For | None:
        """The spatial loop to vectorize: the last along which the output and some operand are contiguous and no operand
        jumps far. None: there is none."""
        for loop in reversed(self.spatial):
            if as_int(loop.extent) == 1:
                continue
            read = [stride(load, loop.var) for load in self.loads()]
            written = [stride(s, loop.var) for s in stores(self.body) if s.buffer.scope == "global"]
            near = all(s is not None and abs(s) <= MAX_SMALL_STRIDE for s in read)
            if near and any(read) and all(s == 1 for s in written):
                return loop
        return None

    def row_loop(self, column: For) -> For | None:
        """A spatial loop that the contiguous operand does not depend on, so that a vector of it serves several rows."""
        moving = [load for load in self.loads() if stride(load, column.var)]
        for loop in reversed(self.spatial):
            if (
                loop is not column
                and as_int(loop.extent) != 1
                and moving
                and all(stride(load, loop.var) == 0 for load in moving)
            ):
                return loop
        return None


def _fuse_reduced(stmt: Stmt) -> Stmt:
    if isinstance(stmt, Seq):
        return seq(*(_fuse_reduced(s) for s in stmt.stmts))
    if isinstance(stmt, Allocate):
        return replace(stmt, body=_fuse_reduced(stmt.body))
    if not isinstance(stmt, For):
        return stmt
    inner = _fuse_reduced(stmt.body)
    stmt = replace(stmt, body=inner)
    if isinstance(inner, For) and can_fuse(inner.body, stmt.var, inner.var, inner.extent):
        return fuse(stmt, inner)
    return stmt


def reduction_block(stage: Stmt) -> Block | None:
    """The stage as a reduction, or a pair, whose loops may change places: each element is computed apart from the
    others, and no extent depends on another loop. None: it is no such reduction."""
    pair = pair_of(stage) or reduction_of(stage)
    reductions = pair if isinstance(pair, tuple) else (pair,) if pair is not None else ()
    if not reductions or not all(map(has_disjoint_writes, reductions[0].spatial)):
        return None
    loops = [*reductions[0].spatial, *(loop for r in reductions for loop in perfect_nest(r.inner).loops)]
    variables = {loop.var for loop in loops}
    if any(variables & set(loop.extent.free_vars()) for loop in loops):
        return None
    return Block(reductions[0].spatial, reductions[0].block)
