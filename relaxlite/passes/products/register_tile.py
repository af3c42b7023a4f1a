"""Code of register tiles: a grid of tiles, each of rows x vectors of sums, that threads share.

    for jo: for io: { e[6, 4, 16] = 0; for k: e[r, u, l] += a[i0 + r, k] * b[k, jo*64 + u*16 + l]; out[...] = f(e) }

**Rows** are split evenly: ceil(m / most) blocks whose heights differ by at most one, a body for each height that can
occur. 16 rows are 6 + 5 + 5, not 6 + 6 + 4, so every tile has enough independent sums to hide their latency.
**Remaining columns** get a tile of as many vectors as they need, the last of them masked.
**All tiles form one loop**, so that threads get equal shares, however many panels or blocks there are.
**An epilogue** of more than a few operations is a loop over the finished tile, spilled to the stack: its code exists
once, whatever the number of heights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from relaxlite import dtypes
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.op_costs import flops_of
from relaxlite.ir.ops.scalars import identity
from relaxlite.ir.program import (
    Allocate,
    Buffer,
    For,
    IfThenElse,
    IndexValue,
    LetIndex,
    Literal,
    Load,
    Seq,
    Stmt,
    Store,
    Unary,
    Value,
    seq,
)
from relaxlite.ir.program_visitor import ProgramRewriter, ReplaceLoads, Substitute, all_values
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, ceildiv, product, smax, smin, sym
from relaxlite.passes.loops.pattern import perfect_nest
from relaxlite.passes.loops.transforms import distribute, less, nest
from relaxlite.passes.products.panel_prefetch import PanelPrefetch, Prefetcher, prefetcher_of
from relaxlite.passes.products.prologue import Replacement, Stream
from relaxlite.records import dataclass

TileLoops: TypeAlias = tuple[For, For, For]  # over the rows, vectors and lanes of a tile
# (panel, (first step, number of steps), first column) -> code that fills panel[step, column]
Fill: TypeAlias = Callable[[Buffer, tuple[SymExpr, SymExpr], SymExpr], Stmt]

ENOUGH_SUMS = 8  # independent chains of FMAs that hide their latency on cores with two FMA units
LONGEST_SUM = 2048  # terms of a sum in one register, to bound rounding (docs/measurements/prod.md)
PANEL_STEPS = 128  # of the reduced loop in a panel that row blocks share: 32 KB of 64 columns
MAX_BLOCKS = 32  # row blocks that share a panel; their sums take up to 48 KB
FEW_OPERATIONS = 2  # of an epilogue that is unrolled for every vector of a tile
LONG_FUNCTION = 10  # FLOPs of a function whose epilogue is not unrolled


def _ceildiv(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, slots=True, eq=False)
class PanelRows:
    """The columns' operand where each step of a sum reads `count` rows of `matrix`.

    `ask`: (first step, first column) of a part of a panel -> the prefetcher of its tiles.
    """

    matrix: Buffer
    count: int
    ask: Callable[[SymExpr, SymExpr], Prefetcher]


@dataclass(frozen=True, slots=True)
class RowSplit:
    """A split of `extent` rows into blocks of at most `most` rows whose heights differ by at most one `unit`.

    The last unit may exceed the extent: its surplus rows are computed, and not stored. Blocks form groups of an equal
    number of blocks, at most `together`.
    """

    extent: SymExpr
    most: int
    least: int = 1  # lower bound of the extent, where it is not 0
    unit: int = 1  # a divisor of `most`
    together: int = 1

    @property
    def groups(self) -> SymExpr:
        return ceildiv(ceildiv(self.extent, self.most), self.together)

    @property
    def in_group(self) -> SymExpr:
        """Number of blocks in a group."""
        return ceildiv(ceildiv(self.extent, self.most), smax(self.groups, 1))

    @property
    def count(self) -> SymExpr:
        return ceildiv(self.extent, self.most) if self.together == 1 else self.groups * self.in_group

    @property
    def _units(self) -> SymExpr:
        return ceildiv(self.extent, self.unit)

    def start(self, block: SymExpr) -> SymExpr:
        """Return the first row of a block: the first `units % count` blocks are one unit higher than the others."""
        return (block * (self._units // self.count) + smin(block, self._units % self.count)) * self.unit

    def height(self, block: SymExpr) -> SymExpr:
        return self.start(block + 1) - self.start(block)

    @property
    def heights(self) -> tuple[int, ...]:
        """All heights that can occur, greatest first."""
        lower, upper = Analyzer().bounds(self._units)
        most, least = self.most // self.unit, _ceildiv(self.least, self.unit)
        first, window = max(lower or 0, least), most * (most + 1) * self.together
        upper = None if upper is None else max(upper, first)
        if upper is None or upper > first + window:  # beyond so many units only `most` and `most - 1` occur
            first = min(first, most * most * self.together)
        numbers: set[int] = set()
        for units in range(first, first + window if upper is None else min(upper, first + window) + 1):
            groups = _ceildiv(units, most * self.together)
            low, more = divmod(units, groups * _ceildiv(_ceildiv(units, most), groups))
            numbers.update((low, low + 1) if more else (low,))
        return tuple(sorted((self.unit * units for units in numbers), reverse=True)) or (self.unit,)


@dataclass(frozen=True, slots=True)
class ColumnPiece:
    """A run of `count` tiles, `vectors` vectors wide, from column `start` on.

    `masked`: the last vector of a tile may be partial. `spread`: panels are interleaved; the vectors of a tile lie
    `count` vectors apart, so that each continues where the tile before ended.
    """

    count: SymExpr
    start: SymExpr
    vectors: int
    masked: bool = False
    spread: bool = False

    def apart(self, lanes: int) -> tuple[SymExpr, SymExpr]:
        """Return the distances in columns from one tile to the next, and from one vector of a tile to the next."""
        return (sym(lanes), self.count * lanes) if self.spread else (sym(self.vectors * lanes), sym(lanes))


def column_pieces(extent: SymExpr, lanes: int, vectors: int, *, spread: bool = False) -> tuple[ColumnPiece, ...]:
    """Split columns into tiles of the full width, then one tile for the rest; single vectors where the rest is
    unknown."""
    width = vectors * lanes
    num_full, remainder = extent // width, as_int(extent % width)
    pieces = [ColumnPiece(num_full, sym(0), vectors, spread=spread)]
    if remainder is None:
        pieces.append(ColumnPiece(ceildiv(extent % width, lanes), num_full * width, 1, masked=True))
    elif remainder:
        pieces.append(ColumnPiece(sym(1), num_full * width, -(-remainder // lanes), masked=remainder % lanes > 0))
    return tuple(piece for piece in pieces if as_int(piece.count) != 0)


@dataclass(frozen=True, slots=True)
class Tile:
    """Emits the register tiles of a block { element[]; init; reduced loops: combine; epilogue }."""

    block: Allocate
    row: For | None
    column: For
    lanes: int
    most_rows: int
    enough_sums: int = ENOUGH_SUMS
    least_rows: int = 1  # lower bound of the rows where the tiles run
    part: int | None = None  # steps of a partial sum; None: chosen by the length of the sum
    row_unit: int = 1  # heights are multiples of this; surplus rows can be read, and are not stored
    together: int | None = None  # row blocks that run along a panel before the next group (RowSplit); None: all
    stream: Stream | None = None  # streams an operand with a prologue
    asks: PanelPrefetch | None = None  # prefetch of panels of the columns' operand
    requests: Prefetcher | None = None

    @property
    def rows(self) -> RowSplit:
        extent = sym(1) if self.row is None else self.row.extent
        return RowSplit(extent, self.most_rows, self.least_rows, self.row_unit, self.together or 1)

    @property
    def _stmts(self) -> tuple[Stmt, ...]:
        """Statements of the block: initial value, reduced loops, epilogue."""
        assert isinstance(self.block.body, Seq)
        return self.block.body.stmts

    def __call__(self, piece: ColumnPiece, number: SymExpr, block: SymVar) -> Stmt:
        """Return the code of column tile `number` of a piece in row block `block`."""
        first = self._first(piece, number)
        tile = self if piece.masked else self._panel_prefetch(first, piece.vectors * self.lanes)
        is_staged = self._is_long() or self._parts() is not None or self.row_unit > 1
        make = tile._staged if is_staged else tile._direct
        if self.row is None:
            return make(piece, first, sym(0), sym(1))
        top, height = SymVar(f"{self.row.var.name}0"), SymVar("rows", upper=self.most_rows)
        body = LetIndex(height, IndexValue(self.rows.height(block)), make(piece, first, top, height))
        code = LetIndex(top, IndexValue(self.rows.start(block)), body)
        if tile.requests is None:
            return code
        if self.together is None:
            return tile.requests.bound(self.rows.count, block, code)
        blocks = smax(self.rows.in_group, 1)
        return tile.requests.bound(blocks, block % blocks, code)

    def _panel_prefetch(self, first: SymExpr, width: int) -> Tile:
        """Return the tile with the prefetcher of panels of `width` columns, where there is one."""
        if self.asks is None or self.row is None:
            return self
        return replace(self, requests=prefetcher_of(self.asks, self._stmts[1], self.column.var, first, width))

    def _first(self, piece: ColumnPiece, number: SymExpr) -> SymExpr:
        """Return the first column of tile `number` of a piece."""
        return piece.start + (sym(0) if as_int(piece.count) == 1 else number * piece.apart(self.lanes)[0])

    def over_panels(
        self,
        piece: ColumnPiece,
        number: SymExpr,
        blocks: tuple[SymExpr, SymExpr],
        operands: Sequence[Value | PanelRows],
        fill: Fill | None = None,
    ) -> Stmt:
        """Return the code of row blocks blocks[0] to blocks[1], at most MAX_BLOCKS, that share panels in the cache.

        All blocks run along one part of the reduced loop before the next, and read the columns' operands (one for each
        sum of an element) from a panel. `fill` writes the panel; without `fill` the first row block does, while it
        sums. Sums stay in memory between parts.
        """
        first, (begin, end) = self._first(piece, number), blocks
        base = SymVar(f"{self._row.var.name}b", lower=0)
        loops, at = self._loops(piece, self.most_rows, first, base)
        row, vector, lane = loops
        count = self.rows.start(end) - base
        loops = replace(row, extent=count, kind="serial"), replace(vector, kind="serial"), lane
        place = row.var, vector.var * self.lanes + lane.var
        shape = (sym(self.most_rows * MAX_BLOCKS), sym(piece.vectors * self.lanes))
        totals = [Buffer(f"{t.block.buffer.name}_tile", shape, t.block.buffer.dtype, "local") for t in self._tiles]

        def clear(total: Buffer, tile: Tile) -> Stmt:
            stores = nest(loops, Store(total, place, identity(_combination(tile._stmts[1]), total.dtype)))
            return Substitute(fresh=True).stmt(stores)

        cleared = [clear(total, tile) for total, tile in zip(totals, self._tiles, strict=True)]
        steps = self._along_panels(totals, piece, (first, base), blocks, operands, fill)
        if self.row_unit > 1:
            loops = replace(loops[0], extent=smin(count, self._row.extent - base)), *loops[1:]
        epilogue = self._last(loops, at, [Load(total, place) for total in totals], masked=piece.masked)
        code: Stmt = seq(*cleared, steps, epilogue)
        for total in reversed(totals):
            code = Allocate(total, code)
        return LetIndex(base, IndexValue(self.rows.start(begin)), code)

    @property
    def _tiles(self) -> tuple[Tile, ...]:
        """One tile for each sum of an element."""
        return (self,)

    def _last(self, loops: TileLoops, at: dict[SymVar, SymExpr], sums: Sequence[Load], *, masked: bool) -> Stmt:
        """Return the epilogue, given the sums of an element, one for each of `_tiles`."""
        return self._epilogue(loops, at, sums[0], masked=masked)

    def _beside(self, sums: Sequence[Allocate], then: Stmt) -> Stmt:
        """Return the sums of some of `_tiles`, followed by `then`, which reads them."""
        (only,) = sums
        return replace(only, body=seq(only.body, then))

    def _along_panels(
        self,
        totals: Sequence[Buffer],
        piece: ColumnPiece,
        corner: tuple[SymExpr, SymVar],
        blocks: tuple[SymExpr, SymExpr],
        operands: Sequence[Value | PanelRows],
        fill: Fill | None,
    ) -> Stmt:
        """Return the steps of `over_panels`, added to `totals`; `corner`: the column and row of their first
        elements."""
        (first, base), (begin, end), outer = corner, blocks, self._stmts[1]
        assert isinstance(outer, For)
        depth, most = as_int(outer.extent), self.part or PANEL_STEPS
        part, step = SymVar(f"{outer.var.name}o", lower=0), SymVar(outer.var.name, lower=0, upper=most - 1)
        start, is_whole = part * most, depth is not None and depth % most == 0
        extent = sym(most) if is_whole else smin(most, outer.extent - start)
        index = SymVar(f"{self._row.var.name}i", lower=0)
        top, height = SymVar(f"{self._row.var.name}0", lower=0), SymVar("rows", upper=self.most_rows)

        def tile(block: SymExpr, parts: Sequence[tuple[Tile, Stmt, Buffer]], *, masked: bool) -> Stmt:
            def body(rows: int) -> Stmt:
                loops, at = self._loops(piece, rows, first, top)
                row, vector, lane = (loop.var for loop in loops)
                sums, adds = [], []
                for maker, update, total in parts:
                    result, load = maker._sums(loops, at, update, masked=masked)
                    place = (top - base + row, vector * self.lanes + lane)
                    add = nest(loops, Store(total, place, load, _combination(update)))
                    sums.append(result)
                    adds.append(Substitute(fresh=True).stmt(add))
                return self._beside(sums, seq(*adds))

            code: Stmt = LetIndex(height, IndexValue(self.rows.height(block)), self._by_height(height, body))
            for requests in (maker.requests for maker, _, _ in parts):
                code = code if requests is None else requests.bound(end - begin, block - begin, code)
            return Substitute(fresh=True).stmt(LetIndex(top, IndexValue(self.rows.start(block)), code))

        panels = [_panel_of(operand, most, total) for operand, total in zip(operands, totals, strict=True)]
        writing, reading = [], []
        for own, panel, total, operand in zip(self._tiles, panels, totals, operands, strict=True):
            steps = own._stmts[1]
            assert isinstance(steps, For)
            fresh = Substitute({steps.var: start + step})
            if isinstance(operand, PanelRows):
                rows = _RedirectToPanel(operand.matrix, panel, (start * operand.count, first))
                own = replace(own, requests=operand.ask(start, first))
                reading.append((own, For(step, extent, rows.stmt(fresh.stmt(steps.body))), total))
                continue
            load = Load(panel, (step, self.column.var - first))
            stream = Stream(0, self.column.var, self._row.var, enough_sums=own.enough_sums, panel=panel)
            writing.append((replace(own, stream=stream), For(step, extent, fresh.stmt(steps.body)), total))
            reading.append(
                (own, For(step, extent, fresh.stmt(Replacement({id(operand): load}).stmt(steps.body))), total)
            )
        if fill is not None:
            result, rest = fill(panels[0], (start, extent), first), begin
        else:
            result, rest = seq(*(tile(begin, [each], masked=piece.masked) for each in writing)), begin + 1
        code: Stmt = seq(result, For(index, end - rest, tile(rest + index, reading, masked=False)))
        for panel in reversed(panels):
            code = Allocate(panel, code)
        return For(part, ceildiv(outer.extent, most), code)

    @property
    def _row(self) -> For:
        assert self.row is not None
        return self.row

    def _is_long(self) -> bool:
        """Whether the epilogue has more than a few operations."""
        work = [v for v in all_values(seq(*self._stmts[2:])) if not isinstance(v, Load | IndexValue)]
        functions = (v.op for v in work if isinstance(v, Unary))
        return len(work) > FEW_OPERATIONS or any(flops_of(op) >= LONG_FUNCTION for op in functions)

    def _direct(self, piece: ColumnPiece, first: SymExpr, top: SymExpr, height: SymExpr) -> Stmt:
        def body(rows: int) -> Stmt:
            loops, at = self._loops(piece, rows, first, top)
            sums, load = self._sums(loops, at, self._stmts[1], masked=piece.masked)
            return replace(sums, body=seq(sums.body, self._epilogue(loops, at, load, masked=piece.masked)))

        return self._by_height(height, body)

    def _staged(self, piece: ColumnPiece, first: SymExpr, top: SymExpr, height: SymExpr) -> Stmt:
        """Return sums in registers, spilled to a tile on the stack, then the epilogue in a loop over the tile's
        vectors."""
        width, element = piece.vectors * self.lanes, self.block.buffer
        tile = Buffer(f"{element.name}_tile", (sym(self.most_rows), sym(width)), element.dtype, "local")

        parts = self._parts()

        def to_tile(loops: TileLoops, value: Value, combine: str | None = None) -> Stmt:
            row, part, lane = (loop.var for loop in loops)
            store = Store(tile, (row, part * self.lanes + lane), value, combine)
            return Substitute(fresh=True).stmt(nest(loops, store))

        def body(rows: int) -> Stmt:
            loops, at = self._loops(piece, rows, first, top)
            if parts is None or self._interleaved(loops) > 1:
                sums, load = self._sums(loops, at, self._stmts[1], masked=piece.masked)
                return replace(sums, body=seq(sums.body, to_tile(loops, load)))
            sums, load = self._sums(loops, at, parts.body, masked=piece.masked)
            combine = _combination(parts.body)
            part = replace(sums, body=seq(sums.body, to_tile(loops, load, combine)))
            return seq(to_tile(loops, identity(combine, element.dtype)), replace(parts, body=part))

        loops, at = self._loops(piece, self.most_rows, first, top)
        row, part, lane = loops
        load = Load(tile, (row.var, part.var * self.lanes + lane.var))
        stored = height if self.row_unit == 1 else smin(height, self._row.extent - top)
        loops = replace(row, extent=stored, kind="serial"), replace(part, kind="serial"), lane
        epilogue = self._epilogue(loops, at, load, masked=piece.masked)
        return Allocate(tile, seq(self._by_height(height, body), epilogue))

    def _sums(
        self, loops: TileLoops, at: dict[SymVar, SymExpr], update: Stmt, *, masked: bool
    ) -> tuple[Allocate, Load]:
        """Return the reduction of a tile over the loops of `update`, and the load of one of its sums."""
        init = self._stmts[0]
        if self.stream is not None:
            assert isinstance(init, Store)
            guard = self._guard(at) if masked else None
            return self.stream.sums(self.block.buffer, init, update, loops, at, guard, self.requests)
        times = self._interleaved(loops)
        copy = SymVar("s", upper=times - 1)
        if times > 1:
            update = _strided_steps(update, times, copy)
        copies = [For(copy, sym(times), Seq(()), "unrolled")] if times > 1 else []
        block = Substitute(at, fresh=True).stmt(Allocate(self.block.buffer, seq(init, update)))
        assert isinstance(block, Allocate)
        sums = distribute([*copies, *loops], block, self._guard(at) if masked else None)
        if self.requests is not None and times == 1:
            assert isinstance(update, For)
            sums = self.requests.beside(sums, update)
        place = tuple(loop.var for loop in loops)
        if times == 1:
            return sums, Load(sums.buffer, place)
        added = Store(sums.buffer, (sym(0), *place), Load(sums.buffer, (copy + 1, *place)), _combination(update))
        total = nest([For(copy, sym(times - 1), Seq(()), "unrolled"), *loops], added)
        total = Substitute(fresh=True).stmt(total)
        return replace(sums, body=seq(sums.body, total)), Load(sums.buffer, (sym(0), *place))

    def _interleaved(self, loops: TileLoops) -> int:
        """Return how many interleaved partial sums an element gets, where a tile has too few sums to hide latency."""
        if self.stream is not None:
            return 1
        innermost = perfect_nest(self._stmts[1]).loops[-1]
        own = math.prod(as_int(loop.extent) or 1 for loop in loops[:2])
        times = max(1, self.enough_sums // own)
        return times if as_int(innermost.extent % times) == 0 and self.starts_neutral() else 1

    def _parts(self) -> For | None:
        """Split a long sum of floats into partial sums, which is more exact; None: the sum is not long.

        Returns the loop over the parts, around the reduced loops of one part.
        """
        outer = self._stmts[1]
        assert isinstance(outer, For)
        length, inner = as_int(outer.extent), [as_int(loop.extent) for loop in perfect_nest(outer).loops[1:]]
        is_sum = _combination(outer) == "add" and dtypes.is_float(self.block.buffer.dtype) and self.starts_neutral()
        if not is_sum:
            return None
        if self.part is not None:
            return None if length is not None and length <= self.part else _in_parts(outer, self.part)
        if length is None or None in inner:
            return None
        count = -(-length * math.prod(size or 1 for size in inner) // LONGEST_SUM)
        if count < 2 or length < 2:
            return None
        period = 1 if self.stream is None else self.stream.period
        return _in_parts(outer, -(-length // (count * period)) * period)

    def starts_neutral(self) -> bool:
        """Whether the initial value is the identity of the combination."""
        init, update = self._stmts[:2]
        assert isinstance(init, Store)
        neutral = identity(_combination(update), init.buffer.dtype)
        return isinstance(init.value, Literal) and isinstance(neutral, Literal) and init.value.value == neutral.value

    def _epilogue(self, loops: Sequence[For], at: dict[SymVar, SymExpr], load: Load, *, masked: bool) -> Stmt:
        final = Substitute(at, fresh=True).stmt(seq(*self._stmts[2:]))
        final = ReplaceLoads(self.block.buffer, load).stmt(final)
        return Substitute(fresh=True).stmt(nest(loops, IfThenElse(self._guard(at), final) if masked else final))

    def _loops(
        self, piece: ColumnPiece, rows: int, first: SymExpr, top: SymExpr
    ) -> tuple[TileLoops, dict[SymVar, SymExpr]]:
        """Return loops over the rows, vectors and lanes of a tile, and the values of the block's variables in them."""
        row, part, lane = (
            SymVar(name, upper=count - 1) for name, count in (("r", rows), ("u", piece.vectors), ("l", self.lanes))
        )
        at = {self.column.var: first + part * piece.apart(self.lanes)[1] + lane}
        if self.row is not None:
            at[self.row.var] = top + row
        nothing = Seq(())
        loops = (
            For(row, sym(rows), nothing, "unrolled"),
            For(part, sym(piece.vectors), nothing, "unrolled"),
            For(lane, sym(self.lanes), nothing, "vectorized"),
        )
        return loops, at

    def _guard(self, at: dict[SymVar, SymExpr]) -> Value:
        return less(at[self.column.var], self.column.extent)

    def _by_height(self, height: SymExpr, body: Callable[[int], Stmt]) -> Stmt:
        """Select the body for the height of the row block."""
        highest, *lower = self.rows.heights
        stmt = body(highest)
        for rows in lower:
            stmt = IfThenElse(less(height, rows + 1), body(rows), stmt)
        return stmt


def _combination(update: Stmt) -> str:
    """Return how the innermost store of a reduction combines; a dot product adds."""
    body = perfect_nest(update).body
    store = body.stmts[0] if isinstance(body, Seq) else body
    assert isinstance(store, Store)
    return store.combine or "add"


def _in_parts(loop: For, size: int) -> For:
    """Split a loop into a loop over parts of `size` steps and a loop over the steps of a part."""
    part, step = SymVar(f"{loop.var.name}o", lower=0), SymVar(loop.var.name, lower=0, upper=size - 1)
    is_whole, body = as_int(loop.extent % size) == 0, Substitute({loop.var: part * size + step}).stmt(loop.body)
    extent = sym(size) if is_whole else smin(size, loop.extent - part * size)
    return For(part, ceildiv(loop.extent, size), For(step, extent, body))


def _strided_steps(stmt: Stmt, times: int, copy: SymVar) -> Stmt:
    """Restrict the innermost loop of a nest to the steps congruent to `copy` modulo `times`."""
    assert isinstance(stmt, For)
    if isinstance(stmt.body, For):
        return replace(stmt, body=_strided_steps(stmt.body, times, copy))
    outer = SymVar(f"{stmt.var.name}o")
    body = Substitute({stmt.var: outer * times + copy}).stmt(stmt.body)
    return For(outer, stmt.extent // times, body, stmt.kind)


def _panel_of(operand: Value | PanelRows, steps: int, total: Buffer) -> Buffer:
    """Return the buffer of a panel of `steps` steps, as wide as the sums in `total`."""
    rows = steps * operand.count if isinstance(operand, PanelRows) else steps
    return Buffer("panel", (sym(rows), total.shape[1]), total.dtype, "local")


class _RedirectToPanel(ProgramRewriter):
    """Redirects loads of a matrix to a panel that begins at `corner` of the matrix."""

    def __init__(self, matrix: Buffer, panel: Buffer, corner: tuple[SymExpr, SymExpr]) -> None:
        super().__init__()
        self._matrix, self._panel, self._corner = matrix, panel, corner

    def _value(self, value: Value) -> Value:
        if not isinstance(value, Load) or value.buffer is not self._matrix:
            return super()._value(value)
        row, column = (index - start for index, start in zip(value.indices, self._corner, strict=True))
        return Load(self._panel, (row, column))


def by_piece(pieces: Sequence[ColumnPiece], number: SymExpr, make: Callable[[ColumnPiece, SymExpr], Stmt]) -> Stmt:
    """Return the code of column tile `number`, counted over all pieces."""
    piece, *rest = pieces
    if not rest:
        return make(piece, number)
    return IfThenElse(less(number, piece.count), make(piece, number), by_piece(rest, number - piece.count, make))


def grid(axes: Sequence[tuple[SymVar, SymExpr]], body: Stmt) -> Stmt:
    """Return one parallel loop over the independent points of a grid, the last axis fastest."""
    body = Substitute({var: 0 for var, extent in axes if as_int(extent) == 1}).stmt(body)
    axes = [(var, extent) for var, extent in axes if as_int(extent) != 1]
    if any(as_int(extent) == 0 for _, extent in axes):
        return Seq(())
    if not axes:
        return body
    if len(axes) == 1:
        return For(axes[0][0], axes[0][1], body, "parallel")
    point = SymVar("tile")
    for k, (var, extent) in reversed(list(enumerate(axes))):
        inner = product(e for _, e in axes[k + 1 :])
        at = point // inner if k == 0 else point // inner % extent
        body = LetIndex(var, IndexValue(at), body)
    return For(point, product(extent for _, extent in axes), body, "parallel")
