"""Register tiles for convolutions with channels last, and for other products with shared filters:

    for n, h, w, c:
        e = 0
        for kh, kw, ic: e += x[n, h*s + kh, w*s + kw, ic] * f[kh, kw, ic, c]
        out[n, h, w, c] = g(e)

Vectors run along the output channels; the rows of a tile are output positions, whose elements of x are broadcast. So
strides, dilations and short rows cost nothing: h and w are fused into one loop over positions, split into tiles of one
height and a few lower ones at the end of each image. All tiles, of all channels and images, form one parallel loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from relaxlite import dtypes
from relaxlite.ir.program import (
    Allocate,
    Binary,
    Buffer,
    Compare,
    For,
    IfThenElse,
    Load,
    LoopKind,
    Select,
    Seq,
    Stmt,
    Store,
    Unary,
    seq,
)
from relaxlite.ir.program_visitor import Substitute, all_values, loads
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, ceildiv, product, sym
from relaxlite.passes.loops.access import stride
from relaxlite.passes.loops.parallel import collapse_parallel
from relaxlite.passes.loops.pattern import perfect_nest
from relaxlite.passes.loops.transforms import distribute, fuse, less, nest
from relaxlite.passes.products.choice import DEFAULT, ScheduleChoice
from relaxlite.passes.products.reduction import Block
from relaxlite.records import dataclass

ENOUGH_ROWS = 6  # for each vector of filters, so that loads of filters do not limit the FMAs
MAX_ROWS = 8
ROW_TAILS = (3, 1)  # heights for remaining positions, where their number is unknown
CHEAP_EPILOGUE = 5  # maximum cost of an epilogue that is unrolled for every vector of a tile
LONG_SUM = 256  # terms that are added one after another
SMALL_FILTERS = 2**17  # elements of filters that stay in a core's L2 cache


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of output channels in a tile: `vectors` x `lanes` channels from `start` on.

    `masked`: the last vector may be partial.
    """

    start: SymExpr
    vectors: int
    lanes: int
    masked: bool = False


@dataclass(frozen=True, slots=True)
class FilterTile:
    """A block as a product with filters, in register tiles of positions x vectors of output channels."""

    block: Block
    row: For
    column: For
    filters: Buffer
    lanes: int
    vectors: int
    most_rows: int

    @property
    def width(self) -> int:
        return self.vectors * self.lanes

    @property
    def panels(self) -> dict[Buffer, int]:
        """The filters to pack, with the width of a panel, where channels take more than one (pack_constants.py)."""
        return {self.filters: self.width} if self.channels > self.width else {}

    @property
    def channels(self) -> int:
        extent = as_int(self.column.extent)
        assert extent is not None
        return extent

    def rest(self) -> list[Piece]:
        """Return the pieces of channels after the full panels: whole vectors, then one of all or half of the lanes."""
        start = self.channels // self.width * self.width
        vectors, left = divmod(self.channels - start, self.lanes)
        half = self.lanes // 2
        if left > half:
            return [Piece(sym(start), vectors + 1, self.lanes, masked=True)]
        pieces = [Piece(sym(start), vectors, self.lanes)] if vectors else []
        if left:
            pieces.append(Piece(sym(start + vectors * self.lanes), 1, half, masked=left < half))
        return pieces


def filter_tile(block: Block, lanes: int, registers: int, choice: ScheduleChoice = DEFAULT) -> FilterTile | None:
    """Match a fused block (`Block.fused`) as a product with filters, for `registers` vector registers; None: no match.

    Filters are (kernel..., c, oc), with the output channels last.
    """
    column = block.spatial[-1] if len(block.spatial) > 1 else None
    if column is None or as_int(column.extent) in (None, 0, 1) or lanes == 1:
        return None
    filter_loads = [load for load in loads(block.update) if column.var in _symbols(load)]
    outer = {loop.var for loop in block.spatial[:-1]}
    if len(filter_loads) != 1 or not _is_filter(filter_loads[0], column.var, outer):
        return None
    if not any(outer & _symbols(load) for load in loads(block.update)):
        return None
    count = max((as_int(column.extent) or 1) // lanes, 1)
    vectors = min(choice.vectors, count) if choice.vectors else column_vectors(count, registers)
    rows = choice.rows or max(1, min(MAX_ROWS, most_sums(registers) // vectors))
    block = _positions(block)
    return FilterTile(block, block.spatial[-2], block.spatial[-1], filter_loads[0].buffer, lanes, vectors, rows)


def _is_filter(load: Load, column: SymVar, outer: set[SymVar]) -> bool:
    return (
        len(load.indices) > 2
        and load.indices[-1] is column
        and stride(load, column) == 1
        and not outer & _symbols(load)
        and all(d.is_const for d in load.buffer.shape)
    )


def _symbols(load: Load) -> set[SymVar]:
    return {v for index in load.indices for v in index.free_vars()}


def most_sums(registers: int) -> int:
    """Return how many vector registers hold sums; the others hold operands."""
    return registers * 3 // 4


def column_vectors(count: int, registers: int) -> int:
    """Return the width in vectors of a tile for `count` vectors of channels, with enough rows and no narrow rest."""
    most = max(1, most_sums(registers) // ENOUGH_ROWS)
    if count <= most:
        return count
    if most < 3:
        return most
    return next((v for v in (most, most - 1) if count % v == 0), most if count % most != 1 else most - 1)


def _positions(block: Block) -> Block:
    """Fuse the two loops before the last into one loop over positions."""
    if len(block.spatial) < 3:
        return block
    *others, high, wide, column = block.spatial
    merged = fuse(high, replace(wide, body=replace(column, body=block.body)))
    assert isinstance(merged.body, For) and isinstance(merged.body.body, Allocate)
    column, body = merged.body, merged.body.body
    return Block((*others, merged, column), body)


def tiled_filters(tile: FilterTile, choice: ScheduleChoice = DEFAULT) -> Stmt:
    """Lower a product with filters to register tiles in one parallel loop.

    The outer loop is over panels, so that one stays in the L2 cache, or over positions, where all filters fit there.
    """
    rows = _height(tile.row.extent, tile.most_rows)
    full, rest = tile.channels // tile.width, tile.rest()
    panel = SymVar(f"{tile.column.var.name}o", upper=max(full + bool(rest) - 1, 0))
    down = SymVar(f"{tile.row.var.name}o")
    whole = _down(tile, Piece(panel * tile.width, tile.vectors, tile.lanes), down, rows)
    others = seq(*(_down(tile, piece, down, rows) for piece in rest))
    body = IfThenElse(less(panel, full), whole, others) if full and rest else whole if full else others
    across = For(panel, sym(full + bool(rest)), Seq(()))
    downs = For(down, ceildiv(tile.row.extent, rows), Seq(()))
    outer = list(tile.block.spatial[:-2])
    small = product(tile.filters.shape).const <= SMALL_FILTERS
    rows_outside = choice.outer == "rows" if choice.outer else small
    return collapse_parallel([*outer, downs, across] if rows_outside else [across, *outer, downs], body)


def _height(extent: SymExpr, most: int) -> int:
    """Return the rows of a tile; for a known extent such that no low rest remains, as one row takes as long as two."""
    known = as_int(extent)
    if known is None:
        return most
    if known <= most:
        return max(known, 1)
    return min(
        range(most, most // 2, -1),
        key=lambda rows: known // rows * rows + (max(known % rows, 2) if known % rows else 0),
    )


def _down(tile: FilterTile, piece: Piece, down: SymVar, rows: int) -> Stmt:
    """Return the tile of row block `down`: of full height, or the remaining rows at the end."""
    extent = tile.row.extent
    full, rest = extent // rows, extent % rows
    whole = tile_of(tile, piece, down * rows, rows)
    if as_int(rest) == 0:
        return whole
    start, tails = full * rows, []
    known_rest = as_int(rest)
    for height in (known_rest,) if known_rest is not None else tuple(t for t in ROW_TAILS if t < rows):
        tail_block = SymVar(down.name)
        tails.append(For(tail_block, rest // height, tile_of(tile, piece, start + tail_block * height, height)))
        start, rest = start + rest // height * height, rest % height
    return IfThenElse(less(down, full), whole, seq(*tails)) if as_int(full) != 0 else seq(*tails)


def tile_of(tile: FilterTile, piece: Piece, row: SymExpr, rows: int) -> Stmt:
    """Return the code of one register tile: `rows` positions from `row` on, and a piece of the channels."""
    part, lane, step = (
        SymVar("u", upper=piece.vectors - 1),
        SymVar("l", upper=piece.lanes - 1),
        SymVar("r", upper=rows - 1),
    )
    inner = [
        For(step, sym(rows), Seq(()), "unrolled"),
        For(part, sym(piece.vectors), Seq(()), "unrolled"),
        For(lane, sym(piece.lanes), Seq(()), "vectorized"),
    ]
    channel = piece.start + part * piece.lanes + lane
    block = Substitute({tile.row.var: row + step, tile.column.var: channel}, fresh=True).stmt(tile.block.body)
    assert isinstance(block, Allocate)
    result = distribute(inner, block, less(channel, tile.column.extent) if piece.masked else None)
    parts = _in_parts(result, len(perfect_nest(tile.block.stmts[1]).loops))
    if parts is not None:
        return parts
    return _roll_epilogue(result) if rows > 1 and _epilogue_cost(tile.block) > CHEAP_EPILOGUE else result


def _in_parts(tile: Allocate, reduced: int) -> Allocate | None:
    """Split long sums of floats into partial sums, which rounds less; None: sums are short, or of integers.

    e = 0; for k: e += v(k); f(e)   =>   t = 0; for ko: { e = 0; for ki: e += v(ko, ki); t += e }; f(t)

    Totals stay in memory, so that the registers are free for the partial sums.
    """
    assert isinstance(tile.body, Seq)
    if not dtypes.is_float(tile.buffer.dtype):
        return None
    init, update, *final = tile.body.stmts
    loops = perfect_nest(update).loops[:reduced]
    depths = [as_int(loop.extent) for loop in loops]
    if any(d is None for d in depths) or math.prod(d or 0 for d in depths) <= LONG_SUM:
        return None
    innermost = loops[-1]
    depth = _part(as_int(innermost.extent) or 0)
    if depth is None:
        return None
    outer, inner = SymVar(f"{innermost.var.name}o"), SymVar(f"{innermost.var.name}i", upper=depth - 1)
    part = Substitute({innermost.var: outer * depth + inner}, fresh=True).stmt(innermost.body)
    sums, total = tile.buffer, replace(tile.buffer, name=f"{tile.buffer.name}_total")
    to_total = Substitute({}, {sums: total})
    added = _elements(sums, lambda at: Store(total, at, Load(sums, at), "add"))
    body = seq(Substitute(fresh=True).stmt(init), For(inner, sym(depth), part), added)
    steps = nest([*loops[:-1], For(outer, innermost.extent // depth, Seq(()))], body)
    whole = seq(to_total.stmt(init), steps, *_by_rows(to_total.stmt(s) for s in final))
    return Allocate(total, Allocate(sums, whole))


def _by_rows(epilogue: Iterable[Stmt]) -> list[Stmt]:
    """Return the statements of an epilogue with their outermost loop, over the rows, not unrolled."""
    return [replace(s, kind="serial") if isinstance(s, For) else s for s in epilogue]


def _part(extent: int) -> int | None:
    """Return the consecutive steps of a partial sum, a divisor of the extent; None: no divisor fits."""
    return next((d for d in range(min(extent, LONG_SUM), LONG_SUM // 4, -1) if extent % d == 0), None)


def _elements(buffer: Buffer, store: Callable[[tuple[SymVar, ...]], Store]) -> Stmt:
    """Return the loops that run a store for every element of a register tile."""
    at = tuple(SymVar(name, upper=(as_int(d) or 1) - 1) for name, d in zip("rul", buffer.shape, strict=True))
    kinds: tuple[LoopKind, ...] = ("unrolled", "unrolled", "vectorized")
    loops = [For(var, d, Seq(()), kind) for var, d, kind in zip(at, buffer.shape, kinds, strict=True)]
    return nest(loops, store(at))


def _epilogue_cost(block: Block) -> int:
    """Return the cost of the operations on one vector between the sum and the store."""
    values = [v for s in block.stmts[2:] for v in all_values(s)]
    return sum(10 if isinstance(v, Unary) else isinstance(v, Binary | Select | Compare) for v in values)


def _roll_epilogue(tile: Allocate) -> Allocate:
    """Spill the tile's sums to memory and run the epilogue in a loop over rows, which is less code."""
    assert isinstance(tile.body, Seq)
    init, update, *final = tile.body.stmts
    sums = tile.buffer
    rolled = replace(sums, name=f"{sums.name}_rows")
    copy = _elements(sums, lambda at: Store(rolled, at, Load(sums, at)))
    rows = _by_rows(Substitute({}, {sums: rolled}).stmt(s) for s in final)
    return replace(tile, body=seq(init, update, Allocate(rolled, seq(copy, *rows))))
