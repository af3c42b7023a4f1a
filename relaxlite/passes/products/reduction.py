"""Register tiles for reductions: rows x vectors of outputs accumulate while the reduced loops run inside.

    for i, j: { e[]; e = 0; for k: e += a[i, k] * b[k, j]; out[i, j] = f(e) }

becomes, with j along vectors of 16 lanes (the column) and i down the tile (the row):

    for jo: for io: { e[6, 4, 16] = 0; for k: e[r, u, l] += a[io*6 + r, k] * b[k, jo*64 + u*16 + l]; out[...] = f(e) }

The tile's loops are unrolled and vectorized, so `e` lives in registers. This file chooses the tile's size and the order
of tiles; register_tile.py emits their code. Every shape is exact.
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
    """How rows are split into blocks (see register_tile.RowSplit).

    `together`: blocks that run along a panel of columns before the next blocks do; None: all blocks.
    """

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
    """Lower a block to register tiles with vectors of `lanes`, in one parallel loop over the tiles.

    `body`: replaces the block's body, where its sum was rewritten (dot products). `hides_conversions`: see Target.
    `asks`: how tiles prefetch panels of the columns' operand (panel_prefetch.py).
    """
    row, rows, vectors = tile_size(block, column, lanes, registers, choice)
    shape = RowShape() if shape is None or row is None else shape
    rows = -(-rows // shape.unit) * shape.unit
    kind = PairTile.of if block.is_pair else Tile
    tile = kind(body or block.body, row, column, lanes, rows, choice.sums or ENOUGH_SUMS)
    tile = replace(tile, least_rows=shape.least, row_unit=shape.unit, together=shape.together)
    prologues = prologues_of(block, column) if body is None else ()
    has_panels = (
        bool(prologues)
        and row is not None
        and not (hides_conversions and all(prologue.is_cheap for prologue in prologues))
    )
    if has_panels and choice.sums == ONE_SUM:
        period = math.lcm(*(prologue.period for prologue in prologues))
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
    outer_axes = [(loop.var, loop.extent) for loop in block.spatial if loop is not column and loop is not row]
    if shape.together is not None and row is not None:
        return _in_groups(replace(tile, asks=asks), pieces, outer_axes)
    rows_outside = choice.outer == "rows" if choice.outer else row is not None and _rows_first(block, row)
    tile = replace(tile, asks=None if rows_outside else asks)
    tiles = by_piece(pieces, across[0], lambda piece, number: tile(piece, number, down[0]))
    streamed = grid([*outer_axes, down, across] if rows_outside else [*outer_axes, across, down], tiles)
    if row is None or not prologues or hides_conversions:
        return streamed
    staged = over_panels(_higher(tile), [prologue.operand for prologue in prologues], pieces, outer_axes)
    return select_version(less(row.extent, rows + 1), streamed, staged)


def _in_groups(tile: Tile, pieces: Sequence[ColumnPiece], others: Sequence[tuple[SymVar, SymExpr]]) -> Stmt:
    """Lower tiles so that a group of row blocks runs along all panels before the next group.

    The rows of a group stay in the cache.
    """
    rows, group, down = tile.rows, SymVar("group", lower=0), SymVar("block", lower=0)
    across = _counter(f"{tile.column.var.name}o", sum((p.count for p in pieces), sym(0)))
    code = by_piece(pieces, across[0], lambda piece, number: tile(piece, number, down))
    block = SymVar("block", lower=0)
    code = LetIndex(down, IndexValue(group * rows.in_group + block), code)
    return grid([*others, (group, rows.groups), across, (block, rows.in_group)], code)


def prologues_of(block: Block, column: For) -> tuple[Prologue, ...]:
    """Return the prologue of the columns' operand for each sum of an element; none: in some sum it is a plain load."""
    row = block.row_loop(column)
    bodies = apart(block.body) if block.is_pair else (block.body,)
    prologues = [_prologue(Block(block.spatial, body), column, row) for body in bodies]
    return tuple(prologue for prologue in prologues if prologue is not None) if None not in prologues else ()


def _prologue(block: Block, column: For, row: For | None) -> Prologue | None:
    init = block.stmts[0]
    if not isinstance(init, Store) or not isinstance(init.value, Literal) or init.value.value != 0:
        return None
    return find_prologue(block.stmts[1], column.var, None if row is None else row.var)


def _higher(tile: Tile) -> Tile:
    """Return the tile with the assumption that there are more rows than one tile has."""
    return replace(tile, least_rows=tile.most_rows + 1)


def tiled_prologue(
    tile: Tile, prologue: Prologue, spatial: Sequence[For], vectors: int, registers: int, *, hides_conversions: bool
) -> Stmt:
    """Lower a block with a prologue: streamed where one tile holds all rows or the prologue is cheap, else staged."""
    row, column = tile.row, tile.column
    pieces = column_pieces(column.extent, tile.lanes, vectors)
    across = _counter(f"{column.var.name}o", sum((p.count for p in pieces), sym(0)))
    outer_axes = [(loop.var, loop.extent) for loop in spatial if loop is not column and loop is not row]
    if not pieces:
        return Seq(())

    stream = Stream(registers, column.var, None if row is None else row.var, prologue.period, tile.enough_sums)
    streamed_tile = replace(tile, stream=stream)
    down = _counter("row" if row is None else f"{row.var.name}o", streamed_tile.rows.count)
    tiles = by_piece(pieces, across[0], lambda piece, number: streamed_tile(piece, number, down[0]))
    streamed = grid([*outer_axes, across, down], tiles)
    if row is None or (prologue.is_cheap and hides_conversions):
        return streamed
    staged = over_panels(_higher(replace(tile, asks=None)), [prologue.operand], pieces, outer_axes)
    return select_version(less(row.extent, tile.most_rows + 1), streamed, staged)


def over_panels(
    tile: Tile,
    operands: Sequence[Value | PanelRows],
    pieces: Sequence[ColumnPiece],
    others: Sequence[tuple[SymVar, SymExpr]],
    fill: Fill | None = None,
) -> Stmt:
    """Lower tiles whose row blocks share panels of the columns' operands; threads share runs of row blocks."""
    blocks = tile.rows.count
    across = _counter(f"{tile.column.var.name}o", sum((p.count for p in pieces), sym(0)))
    share, shares = SymVar("share", lower=0), ceildiv(blocks, MAX_BLOCKS)
    run = share * blocks // shares, (share + 1) * blocks // shares
    tiles = by_piece(pieces, across[0], lambda piece, number: tile.over_panels(piece, number, run, operands, fill))
    return Substitute(fresh=True).stmt(grid([*others, (share, shares), across], tiles))


def _rows_first(block: Block, row: For) -> bool:
    """Whether the loop over row blocks is the outer one, for few steps and many rows: results are then written in
    order.

    Else the loop over columns is the outer one, and the columns' operand stays in the cache.
    """
    steps = [as_int(loop.extent) or FEW_STEPS + 1 for loop in perfect_nest(block.stmts[1]).loops]
    return math.prod(steps) <= FEW_STEPS and (as_int(row.extent) or 0) >= MANY_ROWS


def tile_size(
    block: Block, column: For, lanes: int, registers: int = 32, choice: ScheduleChoice = DEFAULT
) -> tuple[For | None, int, int]:
    """Return (the loop over rows or None, the maximum rows of a tile, its vectors)."""
    row = block.row_loop(column)
    return row, *tile_shape(row, column, lanes, registers, choice, len(block.updates))


def tile_shape(
    row: For | None, column: For, lanes: int, registers: int, choice: ScheduleChoice = DEFAULT, sums: int = 1
) -> tuple[int, int]:
    """Return (the maximum rows of a tile, its vectors), for `sums` sums in each element."""
    vectors = _vectors(column, lanes, registers, choice, sums)
    return 1 if row is None else _rows(row, vectors * sums, registers, choice), vectors


def panel_width(block: Block, column: For, lanes: int, registers: int = 32, choice: ScheduleChoice = DEFAULT) -> int:
    """Return the columns of a tile."""
    return _vectors(column, lanes, registers, choice, len(block.updates)) * lanes


def panel_widths(
    block: Block, column: For, lanes: int, registers: int = 32, choice: ScheduleChoice = DEFAULT
) -> dict[Buffer, int]:
    """Return the operands that a tile reads by rows of its width, as weights of a matmul, with that width.

    Packed into panels of that width (pack_constants.py) an operand is read from one end to the other.
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
    """Return the prefetch distance in bytes, whole cache lines, of each panel of one product.

    `most`: the distance in the operand with the most bytes per column; the others in proportion, at the same step.
    """
    rows = {b: (as_int(b.shape[0]) or 1) * dtypes.itemsize(b.dtype) for b in panels}
    return {b: -(-most * size // max(rows.values()) // LINE) * LINE for b, size in rows.items()} if most else {}


def _accumulators(registers: int) -> int:
    """Return how many vector registers hold sums; the others hold operands."""
    return registers * 3 // 4


def _vectors(column: For, lanes: int, registers: int, choice: ScheduleChoice, sums: int) -> int:
    """Return how many vectors wide a tile is: as many as leave accumulators for six rows."""
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
    """A reduction: for spatial: { element[]; init; reduced loops: combine; epilogue }.

    The epilogue may be such a block itself: a pair of reductions over the same loops (pair_products.py).
    """

    spatial: tuple[For, ...]
    body: Allocate

    @property
    def stmts(self) -> tuple[Stmt, ...]:
        return self.body.body.stmts if isinstance(self.body.body, Seq) else (self.body.body,)

    @property
    def updates(self) -> tuple[Store, ...]:
        """The combining stores: one, or two of a pair."""
        result = [s for s in walk_stmts(self.body) if isinstance(s, Store) and s.combine is not None]
        return tuple(result[: 2 if self.is_pair else 1])

    @property
    def update(self) -> Store:
        return self.updates[0]

    @property
    def is_pair(self) -> bool:
        return isinstance(self.stmts[-1], Allocate)

    def loads(self) -> Iterator[Load]:
        """Return the loads that the reductions combine."""
        elements = {update.buffer for update in self.updates}
        return (load for update in self.updates for load in loads(update) if load.buffer not in elements)

    def fused(self, *, reduced: bool = True) -> Block:
        """Fuse adjacent spatial loops, and adjacent reduced loops if `reduced`, where accesses stay linear."""
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
        """Return the spatial loop to vectorize; None: there is none.

        It is the last loop along which the output and some operand are contiguous and all strides are small.
        """
        for loop in reversed(self.spatial):
            if as_int(loop.extent) == 1:
                continue
            read_strides = [stride(load, loop.var) for load in self.loads()]
            write_strides = [stride(s, loop.var) for s in stores(self.body) if s.buffer.scope == "global"]
            near = all(s is not None and abs(s) <= MAX_SMALL_STRIDE for s in read_strides)
            if near and any(read_strides) and all(s == 1 for s in write_strides):
                return loop
        return None

    def row_loop(self, column: For) -> For | None:
        """Return a spatial loop on which the columns' operand does not depend, so that rows share its vectors; None:
        none."""
        column_loads = [load for load in self.loads() if stride(load, column.var)]
        for loop in reversed(self.spatial):
            if (
                loop is not column
                and as_int(loop.extent) != 1
                and column_loads
                and all(stride(load, loop.var) == 0 for load in column_loads)
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
    """Match a stage as a reduction, or a pair of reductions, whose loops may be reordered; None: no match.

    Elements must be independent of each other, and no extent may depend on another loop.
    """
    pair = pair_of(stage) or reduction_of(stage)
    reductions = pair if isinstance(pair, tuple) else (pair,) if pair is not None else ()
    if not reductions or not all(map(has_disjoint_writes, reductions[0].spatial)):
        return None
    loops = [*reductions[0].spatial, *(loop for r in reductions for loop in perfect_nest(r.inner).loops)]
    variables = {loop.var for loop in loops}
    if any(variables & set(loop.extent.free_vars()) for loop in loops):
        return None
    return Block(reductions[0].spatial, reductions[0].block)
