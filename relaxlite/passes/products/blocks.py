"""Products with blocked weights: codes that a step unpacks stay in registers while all rows use them.

    for i, j: { e[]; e = 0; for g: e += f(x(i, g), w(g, j)); out[i, j] = h(e) }

where w(g, j), the unpacked codes and scales of a block, are many values that take some work. A tile of few columns and
many rows becomes

    { t[rows, columns] = 0; for g: { kept = w(g, columns); for r in rows: t[r, :] += f(x(r, g), kept) }; out = h(t) }

The sums lie in the L1 cache, so the loop over rows has one short body for any number of rows, and a block of 32 steps
is one pass over the rows. A GEMV keeps its sums in registers and streams through the weights, which lie in panels
(pack_constants.py). With vectors of 512 bits a panel is one vector wide, as that loads faster from memory: tiles of
many rows take two panels at a time, and a GEMV may interleave several (`Microarchitecture.block_prefetch_plan`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, TypeAlias

from relaxlite import dtypes
from relaxlite.cpus import PrefetchPlan
from relaxlite.ir.intrinsics import DOT4_PACKED_U8S8
from relaxlite.ir.program import (
    Allocate,
    Buffer,
    For,
    IfThenElse,
    IndexValue,
    Intrinsic,
    LetIndex,
    Literal,
    Load,
    LoopKind,
    Prefetch,
    Seq,
    Stmt,
    Store,
    Value,
    seq,
)
from relaxlite.ir.program_visitor import Substitute, all_values, loads, value_children
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, substitute, sym
from relaxlite.passes.loops.pattern import perfect_nest
from relaxlite.passes.loops.transforms import GuardLoads, less, nest, select_version
from relaxlite.passes.products.panel_prefetch import LINE
from relaxlite.passes.products.prologue import Replacement, symbols_of
from relaxlite.passes.products.reduction import Block
from relaxlite.passes.products.register_tile import ColumnPiece, Tile, TileLoops, by_piece, column_pieces, grid
from relaxlite.records import dataclass
from relaxlite.target import Target

MAX_ROWS = 128  # whose sums of 32 columns take 16 KB


@dataclass(frozen=True, slots=True)
class BlockProduct:
    """A product with blocked weights: its loops, and the widths in vectors of its tiles and panels.

    `vectors`: of tiles of many rows. `alone`: of tiles of one row. `panel`: of packed panels.
    """

    block: Block
    column: For
    row: For | None
    vectors: int
    alone: int
    panel: int

    @property
    def panels(self) -> Iterator[Buffer]:
        """Weight operands in panels, which a tile reads from one end to the other."""
        return (load.buffer for load in _panel_loads(self.block.loads(), self.column))


def block_product(block: Block, lanes: int, target: Target) -> BlockProduct | None:
    """Match a block as a product with blocked weights; None: it is none."""
    if block.is_pair or len(perfect_nest(block.stmts[1]).loops) != 1 or block.update.combine != "add":
        return None
    if not any(isinstance(v, Intrinsic) and v.name == DOT4_PACKED_U8S8 for v in all_values(block.update)):
        return None
    init, column = block.stmts[0], block.vector_loop()
    if column is None or not isinstance(init, Store) or not isinstance(init.value, Literal) or init.value.value != 0:
        return None
    row = block.row_loop(column)
    kept = len(_column_values(block.update.value, column, row)) if row is not None else 1
    streams = target.cpu_facts.block_prefetch_plan
    vectors = max(1, min(streams.max_vectors, target.num_vector_registers * 3 // 4 // max(kept, 1)))
    panels = streams.interleaved_panels(len({load.buffer for load in _panel_loads(block.loads(), column)}))
    if target.vector_bits < 8 * LINE and panels == 1:
        return BlockProduct(block, column, row, vectors, alone=vectors, panel=vectors)
    alone = interleaved_panels(column.extent, lanes, panels, max(target.cores, 1))
    return BlockProduct(block, column, row, vectors, alone, panel=1)


def _panel_loads(candidates: Iterable[Load], column: For) -> list[Load]:
    """Filter the loads of matrices that lie in panels of columns."""
    return [load for load in candidates if len(load.indices) > 1 and load.indices[-1] is column.var]


def interleaved_panels(columns: SymExpr, lanes: int, most: int, cores: int, least: int = 1) -> int:
    """Return how many panels a tile interleaves: `most`, or fewer (from `least` on) where that balances threads."""
    width = as_int(columns)
    if width is None:
        return most

    def longest_share(panels: int) -> int:
        return panels * -(-width // (panels * lanes * cores))

    return min(range(most, least - 1, -1), key=longest_share)


@dataclass(frozen=True, slots=True)
class ManyRowsPlan:
    """The tiles of a strategy for many rows.

    `condition`: run-time test under which the strategy is taken. `vectors`: width of its tiles. `around` wraps the
    loop over tiles, in a pass that prepares rows, for example.
    """

    condition: Value
    tile: ManyRows
    vectors: int
    around: Callable[[Stmt], Stmt] | None = None


ManyRowsRule: TypeAlias = "Callable[[ManyRows, int], ManyRowsPlan | None]"
"""(tiles, vectors) -> the plan for many rows, from tiles that many vectors wide; None: no strategy fits."""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """The strategies of a product with blocked weights: prefetch, tiles of two rows and more, rule for many rows."""

    prefetch: PrefetchPlan
    tile: type[ManyRows]
    many_rows: ManyRowsRule


def tiled_blocks(found: BlockProduct, lanes: int, plan: BlockPlan) -> Stmt:
    """Lower a product with blocked weights to tiles in one parallel loop."""
    column, row = found.column, found.row
    outer_axes = [(loop.var, loop.extent) for loop in found.block.spatial if loop is not column and loop is not row]

    def tiles(tile: BlockTile, vectors: int = found.vectors) -> Stmt:
        pieces = column_pieces(column.extent, lanes, vectors, spread=tile.is_interleaved and found.panel < vectors)
        across = SymVar(f"{column.var.name}o", lower=0)
        down = SymVar("row" if row is None else f"{row.var.name}o", lower=0)
        body = by_piece(pieces, across, lambda piece, number: tile(piece, number, down))
        count = sum((p.count for p in pieces), sym(0))
        return Substitute(fresh=True).stmt(grid([*outer_axes, (down, tile.rows.count), (across, count)], body))

    gemv = OneRow(found.block.body, row, column, lanes, 1, enough_sums=1, ahead=plan.prefetch.gemv_bytes)
    if row is None:
        return tiles(gemv, found.alone)
    gemm = plan.tile(found.block.body, row, column, lanes, MAX_ROWS, least_rows=2, ahead=plan.prefetch.gemm_bytes)
    gemm_code, many_plan = tiles(gemm), plan.many_rows(gemm, found.vectors)
    if many_plan is not None:
        many_code = tiles(many_plan.tile, many_plan.vectors)
        gemm_code = IfThenElse(
            many_plan.condition, many_code if many_plan.around is None else many_plan.around(many_code), gemm_code
        )
    return select_version(less(row.extent, 2), tiles(gemv, found.alone), gemm_code)


@dataclass(frozen=True, slots=True)
class BlockTile(Tile):
    """A tile of blocked weights that prefetches `prefetch_bytes` ahead of its loads.

    Its rows start at `origin` of `all_rows`; None: the rows of the tile are all rows.
    """

    is_interleaved: ClassVar[bool] = True  # whether the vectors of a tile may be in panels far from each other
    ahead: int = 0
    origin: SymExpr = sym(0)
    all_rows: SymExpr | None = None

    def asked(self, update: For, columns: Sequence[SymExpr], step: SymExpr) -> list[Prefetch]:
        """Return the prefetches of step `step` of a sum, for each panel that starts at one of `columns`.

        Past the end of a panel they reach the start of the next, which the next tile takes if panels are interleaved.
        """
        if not self.ahead:
            return []
        vectors = {(load.buffer, load.indices): load for load in _panel_loads(loads(update), self.column)}.values()
        if not vectors:
            return []
        row_bytes: Counter[Buffer] = Counter()
        line_loads: list[Load] = []  # loads at which a cache line begins, where a line is several vectors
        for load in vectors:
            if row_bytes[load.buffer] % LINE == 0:
                line_loads.append(load)
            row_bytes[load.buffer] += self.lanes * dtypes.itemsize(load.dtype)
        later_step = step + -(-self.ahead // max(row_bytes.values()))
        return [
            Prefetch(load.buffer, Substitute({update.var: later_step, self.column.var: column}).indices(load.indices))
            for column in columns
            for load in line_loads
        ]

    def starts(self, loops: TileLoops, at: dict[SymVar, SymExpr]) -> list[SymExpr]:
        """Return the first column of each vector of a tile."""
        _, part, lane = loops
        return [
            substitute(at[self.column.var], {part.var: sym(u), lane.var: sym(0)})
            for u in range(as_int(part.extent) or 1)
        ]


class OneRow(BlockTile):
    """Tiles of a GEMV: one row, whose sums are in registers."""

    __slots__ = ()

    def _sums(
        self, loops: TileLoops, at: dict[SymVar, SymExpr], update: Stmt, *, masked: bool
    ) -> tuple[Allocate, Load]:
        sums, load = super()._sums(loops, at, update, masked=masked)
        assert isinstance(update, For) and isinstance(sums.body, Seq)
        *before, steps = sums.body.stmts
        assert isinstance(steps, For)
        prefetches = [] if masked else self.asked(update, self.starts(loops, at), steps.var)
        return replace(sums, body=seq(*before, replace(steps, body=seq(*prefetches, steps.body)))), load


class ManyRows(BlockTile):
    """Tiles of many rows: each step unpacks a block of codes, then loops over all rows of the tile."""

    __slots__ = ()
    parts: ClassVar[LoopKind] = "unrolled"  # kind of the loop over vectors that computes the values shared by rows

    @property
    def of_rows(self) -> set[SymVar]:
        """Symbols that vary with the block or the row."""
        return {self.steps.var, *(() if self.row is None else (self.row.var,)), *self.origin.free_vars()}

    def __call__(self, piece: ColumnPiece, number: SymExpr, block: SymVar) -> Stmt:
        first, top = self._first(piece, number), SymVar(f"{self._row.var.name}0", lower=0)
        height = SymVar("rows", lower=0, upper=self.most_rows)
        body = LetIndex(height, IndexValue(self.rows.height(block)), self.tile(piece, first, top, height))
        return LetIndex(top, IndexValue(self.rows.start(block)), body)

    @property
    def steps(self) -> For:
        """Loop over the blocks of the depth."""
        steps = self._stmts[1]
        assert isinstance(steps, For)
        return steps

    @property
    def update(self) -> Store:
        """Store that adds the products of one block to a sum."""
        update = self.steps.body
        assert isinstance(update, Store)
        return update

    def tile(self, piece: ColumnPiece, first: SymExpr, top: SymExpr, height: SymExpr) -> Stmt:
        """Return the code of a tile: columns from `first` on, `height` rows from `top` on."""
        loops, at = self._loops(piece, self.most_rows, first, top)
        row, part, lane = loops
        prefetches = [] if piece.masked else self.asked(self.steps, self.starts(loops, at), self.steps.var)
        loops = replace(row, extent=height, kind="serial"), part, lane
        element, steps, update = self.block.buffer, self.steps, self.update
        width = sym(piece.vectors * self.lanes)
        totals = Buffer(f"{element.name}_tile", (sym(self.most_rows), width), element.dtype, "local")
        place = (row.var, part.var * self.lanes + lane.var)
        guard = GuardLoads(self._guard(at), {part.var, lane.var}) if piece.masked else None

        across = part.var, lane.var
        column_values = kept_parts(update.value, self.column, self._row, (sym(piece.vectors), sym(self.lanes)))
        row_values = self.kept_of_rows(update.value)
        value = Replacement({**reads(column_values, across), **reads(row_values, (lane.var,))}).value(update.value)
        vector = replace(part, kind=self.parts)
        hoist = Substitute(at).stmt(nest((vector, lane), seq(*(Store(b, across, v) for b, v in column_values))))
        hoist = Substitute(fresh=True).stmt(hoist if guard is None else guard.stmt(hoist))
        at_tile = Substitute(at)
        add = Store(totals, place, at_tile.value(value), "add")
        body = seq(*prefetches, hoist, self.over_rows(loops, add, [(b, at_tile.value(v)) for b, v in row_values]))
        for buffer, _ in column_values:
            body = Allocate(buffer, body)
        clear = nest(loops, Store(totals, place, Literal(0.0, element.dtype)))
        serial = loops[0], replace(part, kind="serial"), lane
        epilogue = self._epilogue(serial, at, Load(totals, place), masked=piece.masked)
        fresh = Substitute(fresh=True)
        return Allocate(totals, seq(fresh.stmt(clear), fresh.stmt(replace(steps, body=body)), epilogue))

    def kept_of_rows(self, value: Value) -> list[tuple[Buffer, Value]]:
        """Return values that vary with the row and not with the column, each with a buffer of one vector for it."""
        return []

    def over_rows(self, loops: TileLoops, body: Store, of_rows: list[tuple[Buffer, Value]]) -> Stmt:
        """Return the loop nest that adds a block to the sums of all rows, vectors and lanes of a tile."""
        return nest(loops, body)


def hoisted(
    value: Value, column: For, row: For, shape: tuple[SymExpr, ...], place: tuple[SymExpr, ...]
) -> tuple[Value, list[tuple[Buffer, Value]]]:
    """Hoist subvalues that vary with the column and not with the row into buffers of shape `shape`, read at `place`.

    Returns the rewritten value, and each buffer with the value that it holds. Exchange `column` and `row` to hoist
    subvalues that vary with the row only.
    """
    kept = kept_parts(value, column, row, shape)
    return Replacement(reads(kept, place)).value(value), kept


def kept_parts(
    value: Value, column: For, row: For | None, shape: tuple[SymExpr, ...], name: str = "kept"
) -> list[tuple[Buffer, Value]]:
    """Return the largest subvalues that vary with the column and not with the row, each with a buffer for it."""
    parts = _column_values(value, column, row)
    return [(Buffer(f"{name}{k}", shape, part.dtype, "local"), part) for k, part in enumerate(parts)]


def reads(kept: list[tuple[Buffer, Value]], place: tuple[SymExpr, ...]) -> dict[int, Value]:
    """Map the identity of each hoisted value to the load of its buffer at `place`."""
    return {id(part): Load(buffer, place) for buffer, part in kept}


def _column_values(value: Value, column: For, row: For | None) -> list[Value]:
    """Return the largest subvalues that vary with the column and not with the row, each once."""
    symbols = symbols_of(value)
    if column.var not in symbols:
        return []
    if row is None or row.var not in symbols:
        return [value]
    parts = [part for child in value_children(value) for part in _column_values(child, column, row)]
    return list({id(part): part for part in parts}.values())
