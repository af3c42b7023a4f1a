"""Products with quantized blocks: what a step makes of the weights stays in registers while all rows use it.

    for i, j: { e[]; e = 0; for g: e += f(x(i, g), w(g, j)); out[i, j] = h(e) }

where w(g, j), the codes and scales of a block, are many values that take some work. For few columns and many rows,

    { t[rows, columns] = 0; for g: { kept = w(g, columns); for r in rows: t[r, :] += f(x(r, g), kept) }; out = h(t) }

The sums lie in the first cache, so the loop over rows has one short body for any number of them, and a step of 32 rows
of weights is one pass over the rows. One row alone keeps its sums in registers and streams through the weights, which
lie in panels (pack_constants.py). Of 512 bits these are one vector wide, which come faster from memory, and of which
many rows take two at a time; and one row may read some side by side (`Microarchitecture.block_prefetch_plan`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, TypeAlias

from relaxlite import dtypes
from relaxlite.cpus import PrefetchPlan
from relaxlite.ir.intrinsics import DOT4_BYTES
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
    """A reduction over blocks, its loops, how many vectors wide tiles are, of many rows and of one, and its panels."""

    block: Block
    column: For
    row: For | None
    vectors: int
    alone: int
    panel: int

    @property
    def panels(self) -> Iterator[Buffer]:
        """The operands of the columns, which a tile reads from one end to the other."""
        return (load.buffer for load in _of_panels(self.block.loads(), self.column))


def block_product(block: Block, lanes: int, target: Target) -> BlockProduct | None:
    """The block as a product with quantized blocks; None: it is none."""
    if block.is_pair or len(perfect_nest(block.stmts[1]).loops) != 1 or block.update.combine != "add":
        return None
    if not any(isinstance(v, Intrinsic) and v.name == DOT4_BYTES for v in all_values(block.update)):
        return None
    init, column = block.stmts[0], block.vector_loop()
    if column is None or not isinstance(init, Store) or not isinstance(init.value, Literal) or init.value.value != 0:
        return None
    row = block.row_loop(column)
    kept = len(_of_columns(block.update.value, column, row)) if row is not None else 1
    streams = target.cpu_facts.block_prefetch_plan
    vectors = max(1, min(streams.max_vectors, target.num_vector_registers * 3 // 4 // max(kept, 1)))
    panels = streams.interleaved_panels(len({load.buffer for load in _of_panels(block.loads(), column)}))
    if target.vector_bits < 8 * LINE and panels == 1:
        return BlockProduct(block, column, row, vectors, alone=vectors, panel=vectors)
    alone = interleaved_panels(column.extent, lanes, panels, max(target.cores, 1))
    return BlockProduct(block, column, row, vectors, alone, panel=1)


def _of_panels(found: Iterable[Load], column: For) -> list[Load]:
    """Those of matrices that lie in panels."""
    return [load for load in found if len(load.indices) > 1 and load.indices[-1] is column.var]


def interleaved_panels(columns: SymExpr, lanes: int, most: int, cores: int, least: int = 1) -> int:
    """How many panels a tile takes at a time: `most`, or fewer where the threads' shares are more equal so."""
    width = as_int(columns)
    if width is None:
        return most

    def longest_share(panels: int) -> int:
        return panels * -(-width // (panels * lanes * cores))

    return min(range(most, least - 1, -1), key=longest_share)


@dataclass(frozen=True, slots=True)
class ManyRowsPlan:
    """A faster way for many rows: the condition for it, its tiles, how many vectors wide, and what goes around them."""

    condition: Value
    tile: ManyRows
    vectors: int
    around: Callable[[Stmt], Stmt] | None = None


ManyRowsRule: TypeAlias = "Callable[[ManyRows, int], ManyRowsPlan | None]"
"""The plan for many rows from tiles so many vectors wide; None: there is none."""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """How blocked weights are prefetched, the tiles of two rows and more, and the rule for many rows."""

    prefetch: PrefetchPlan
    tile: type[ManyRows]
    many_rows: ManyRowsRule


def tiled_blocks(found: BlockProduct, lanes: int, plan: BlockPlan) -> Stmt:
    """All tiles in one parallel loop."""
    column, row = found.column, found.row
    others = [(loop.var, loop.extent) for loop in found.block.spatial if loop is not column and loop is not row]

    def tiles(tile: BlockTile, vectors: int = found.vectors) -> Stmt:
        pieces = column_pieces(column.extent, lanes, vectors, spread=tile.is_interleaved and found.panel < vectors)
        across = SymVar(f"{column.var.name}o", lower=0)
        down = SymVar("row" if row is None else f"{row.var.name}o", lower=0)
        body = by_piece(pieces, across, lambda piece, number: tile(piece, number, down))
        count = sum((p.count for p in pieces), sym(0))
        return Substitute(fresh=True).stmt(grid([*others, (down, tile.rows.count), (across, count)], body))

    one = OneRow(found.block.body, row, column, lanes, 1, enough_sums=1, ahead=plan.prefetch.gemv_bytes)
    if row is None:
        return tiles(one, found.alone)
    many = plan.tile(found.block.body, row, column, lanes, MAX_ROWS, least_rows=2, ahead=plan.prefetch.gemm_bytes)
    rest, best = tiles(many), plan.many_rows(many, found.vectors)
    if best is not None:
        faster = tiles(best.tile, best.vectors)
        rest = IfThenElse(best.condition, faster if best.around is None else best.around(faster), rest)
    return select_version(less(row.extent, 2), tiles(one, found.alone), rest)


@dataclass(frozen=True, slots=True)
class BlockTile(Tile):
    """A tile that asks for weights `ahead` bytes before it loads them. Its rows are those from `origin` on of
    `all_rows`; None: they are all there are."""

    is_interleaved: ClassVar[bool] = True  # where a tile has several vectors, they may be in panels far from each other
    ahead: int = 0
    origin: SymExpr = sym(0)
    all_rows: SymExpr | None = None

    def asked(self, update: For, columns: Sequence[SymExpr], step: SymExpr) -> list[Prefetch]:
        """In step `step` of a sum, what a later one loads of each panel that starts at one of `columns`. Where a panel
        ends this is the start of the next one, which the next tile takes if its vectors are spread."""
        if not self.ahead:
            return []
        vectors = {(load.buffer, load.indices): load for load in _of_panels(loads(update), self.column)}.values()
        if not vectors:
            return []
        bytes_of: Counter[Buffer] = Counter()
        lines: list[Load] = []  # those with which a line begins, where a line is several vectors
        for load in vectors:
            if bytes_of[load.buffer] % LINE == 0:
                lines.append(load)
            bytes_of[load.buffer] += self.lanes * dtypes.itemsize(load.dtype)
        later = step + -(-self.ahead // max(bytes_of.values()))
        return [
            Prefetch(load.buffer, Substitute({update.var: later, self.column.var: column}).indices(load.indices))
            for column in columns
            for load in lines
        ]

    def starts(self, loops: TileLoops, at: dict[SymVar, SymExpr]) -> list[SymExpr]:
        """The first columns of a tile's vectors."""
        _, part, lane = loops
        return [
            substitute(at[self.column.var], {part.var: sym(u), lane.var: sym(0)})
            for u in range(as_int(part.extent) or 1)
        ]


class OneRow(BlockTile):
    """Tiles of one row, whose sums are in registers."""

    __slots__ = ()

    def _sums(
        self, loops: TileLoops, at: dict[SymVar, SymExpr], update: Stmt, *, masked: bool
    ) -> tuple[Allocate, Load]:
        sums, load = super()._sums(loops, at, update, masked=masked)
        assert isinstance(update, For) and isinstance(sums.body, Seq)
        *before, steps = sums.body.stmts
        assert isinstance(steps, For)
        asked = [] if masked else self.asked(update, self.starts(loops, at), steps.var)
        return replace(sums, body=seq(*before, replace(steps, body=seq(*asked, steps.body)))), load


class ManyRows(BlockTile):
    """Tiles that go over all their rows in every step."""

    __slots__ = ()
    parts: ClassVar[LoopKind] = "unrolled"  # the loop that makes what rows share, for each vector of columns

    @property
    def of_rows(self) -> set[SymVar]:
        """What changes from block to block, and from row to row."""
        return {self.steps.var, *(() if self.row is None else (self.row.var,)), *self.origin.free_vars()}

    def __call__(self, piece: ColumnPiece, number: SymExpr, block: SymVar) -> Stmt:
        first, top = self._first(piece, number), SymVar(f"{self._row.var.name}0", lower=0)
        height = SymVar("rows", lower=0, upper=self.most_rows)
        body = LetIndex(height, IndexValue(self.rows.height(block)), self.tile(piece, first, top, height))
        return LetIndex(top, IndexValue(self.rows.start(block)), body)

    @property
    def steps(self) -> For:
        """The loop over blocks."""
        steps = self._stmts[1]
        assert isinstance(steps, For)
        return steps

    @property
    def update(self) -> Store:
        """What a block adds."""
        update = self.steps.body
        assert isinstance(update, Store)
        return update

    def tile(self, piece: ColumnPiece, first: SymExpr, top: SymExpr, height: SymExpr) -> Stmt:
        """The columns from `first` on of `height` rows from `top` on."""
        loops, at = self._loops(piece, self.most_rows, first, top)
        row, part, lane = loops
        asked = [] if piece.masked else self.asked(self.steps, self.starts(loops, at), self.steps.var)
        loops = replace(row, extent=height, kind="serial"), part, lane
        element, steps, update = self.block.buffer, self.steps, self.update
        width = sym(piece.vectors * self.lanes)
        totals = Buffer(f"{element.name}_tile", (sym(self.most_rows), width), element.dtype, "local")
        place = (row.var, part.var * self.lanes + lane.var)
        guard = GuardLoads(self._guard(at), {part.var, lane.var}) if piece.masked else None

        across = part.var, lane.var
        kept = kept_parts(update.value, self.column, self._row, (sym(piece.vectors), sym(self.lanes)))
        of_rows = self.kept_of_rows(update.value)
        value = Replacement({**reads(kept, across), **reads(of_rows, (lane.var,))}).value(update.value)
        each = replace(part, kind=self.parts)
        keep = Substitute(at).stmt(nest((each, lane), seq(*(Store(b, across, v) for b, v in kept))))
        keep = Substitute(fresh=True).stmt(keep if guard is None else guard.stmt(keep))
        here = Substitute(at)
        added = Store(totals, place, here.value(value), "add")
        body = seq(*asked, keep, self.over_rows(loops, added, [(b, here.value(v)) for b, v in of_rows]))
        for buffer, _ in kept:
            body = Allocate(buffer, body)
        clear = nest(loops, Store(totals, place, Literal(0.0, element.dtype)))
        serial = loops[0], replace(part, kind="serial"), lane
        epilogue = self._epilogue(serial, at, Load(totals, place), masked=piece.masked)
        fresh = Substitute(fresh=True)
        return Allocate(totals, seq(fresh.stmt(clear), fresh.stmt(replace(steps, body=body)), epilogue))

    def kept_of_rows(self, value: Value) -> list[tuple[Buffer, Value]]:
        """Buffers of one vector for what moves along the rows and not along the columns."""
        return []

    def over_rows(self, loops: TileLoops, body: Store, of_rows: list[tuple[Buffer, Value]]) -> Stmt:
        """What a block adds, of all rows, vectors and lanes."""
        return nest(loops, body)


def hoisted(
    value: Value, column: For, row: For, shape: tuple[SymExpr, ...], place: tuple[SymExpr, ...]
) -> tuple[Value, list[tuple[Buffer, Value]]]:
    """The value with all that moves along the columns and not along the rows read from registers, at `place` of buffers
    of this shape, and what these buffers hold. The same of rows, the other way round."""
    kept = kept_parts(value, column, row, shape)
    return Replacement(reads(kept, place)).value(value), kept


def kept_parts(
    value: Value, column: For, row: For | None, shape: tuple[SymExpr, ...], name: str = "kept"
) -> list[tuple[Buffer, Value]]:
    """The largest parts that move along the columns and not along the rows, each with a buffer for it."""
    parts = _of_columns(value, column, row)
    return [(Buffer(f"{name}{k}", shape, part.dtype, "local"), part) for k, part in enumerate(parts)]


def reads(kept: list[tuple[Buffer, Value]], place: tuple[SymExpr, ...]) -> dict[int, Value]:
    """By the identity of a part, where it is read from."""
    return {id(part): Load(buffer, place) for buffer, part in kept}


def _of_columns(value: Value, column: For, row: For | None) -> list[Value]:
    """The largest parts of a value that move along the columns and not along the rows, each once."""
    moving = symbols_of(value)
    if column.var not in moving:
        return []
    if row is None or row.var not in moving:
        return [value]
    parts = [part for child in value_children(value) for part in _of_columns(child, column, row)]
    return list({id(part): part for part in parts}.values())
