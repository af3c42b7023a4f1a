"""Products with blocked weights by AMX: one instruction multiplies 16 rows of bytes by 16 columns of a block.

For some blocks of a panel of columns at a time, codes are unpacked into quads, dp4a groups as the instruction takes
them, and scales are converted. Then, 16 rows at a time, the sums of each block are stored from AMX tiles to memory,
scaled, and accumulated in 16 vector registers:

    for panel, some blocks:
        quads, kept = codes(panel), scales(panel)
        for 16 rows:
            for blocks, 16 columns: C[g, columns] = origin + x[g, rows, :] @ quads[g, :, columns]
            for 16 columns, blocks: e[rows, columns] += f(C[g, columns], kept[g, columns])

Where a product is only scaled, AMX tiles start at an origin whose bits make their integers floats (block_terms.py).
Remaining rows take the tiles of blocks.py if few; else the last 16 rows are computed by AMX, some of them twice. The IR
calls a library named "amx", with fallback loops for processors without AMX tiles and systems that refuse them.
Reference: Intel, "Architecture Instruction Set Extensions Programming Reference", chapter 3.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from relaxlite.ir.program import (
    AddressOf,
    Allocate,
    Binary,
    Buffer,
    CallLibrary,
    For,
    IndexValue,
    LetIndex,
    LibraryFound,
    Literal,
    Load,
    Stmt,
    Store,
    Value,
    seq,
)
from relaxlite.ir.program_visitor import Substitute
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, smin, substitute, sym
from relaxlite.passes.loops.transforms import GuardLoads, less, nest
from relaxlite.passes.products.block_terms import MAX_DEPTH, ORIGIN, Products, find_products
from relaxlite.passes.products.blocks import ManyRows, ManyRowsPlan, hoisted
from relaxlite.passes.products.prologue import Replacement
from relaxlite.passes.products.register_tile import ColumnPiece
from relaxlite.target import Target

TILES, FOUND = "amx", "tiles"  # names in runtime/libraries.py and codegen/llvm/amx.py
ROWS = 16  # of a tile, and as many 32-bit columns
MIN_LEFT = 6  # remaining rows from which 16 more by AMX pay (docs/measurements/cpus.md, blocks_amx)
BLOCKS = (
    4  # at a time, or one less where that divides the depth: their groups, products and rows of x stay in the L1 cache
)

_NUM_RESULT_TILES = 4  # AMX tiles that hold results, used in turn
_DOTS = ("dot", "dot_unsigned", "dot_of_unsigned", "dot_bf16")
_CYCLES = {"start": 8, "take_x": 8, "take_quads": 8, "keep": 16, **dict.fromkeys(_DOTS, 16)}  # the others: 1


def by_amx(tile: ManyRows, vectors: int, target: Target) -> ManyRowsPlan | str:
    """Plan AMX tiles from 16 rows on, where the system allows them; or return the reason why the loops do not fit."""
    products = find_products(tile.update.value)
    if tile.lanes != ROWS:
        return f"vectors of {tile.lanes} lanes do not make rows of AMX tiles"
    if as_int(tile.steps.extent) is None or products is None:
        return "its sums are no products of AMX tiles"
    if products.depth > MAX_DEPTH:
        return f"blocks of {products.depth} bytes do not fit into rows of {MAX_DEPTH}"
    enough = Binary("and", LibraryFound(TILES, FOUND), less(ROWS - 1, tile.rows.extent))
    amx_rows = AmxRows(tile.block, tile.row, tile.column, tile.lanes, tile.most_rows, least_rows=ROWS, ahead=tile.ahead)
    return ManyRowsPlan(enough, amx_rows, vectors)


class AmxRows(ManyRows):
    """Tiles of many rows by AMX tiles of 16 x 16 sums."""

    __slots__ = ()

    def __call__(self, piece: ColumnPiece, number: SymExpr, block: SymVar) -> Stmt:
        first, top = self._first(piece, number), SymVar(f"{self._row.var.name}0", lower=0)
        height = SymVar("rows", lower=0, upper=self.most_rows)
        products, whole_tiles, left = find_products(self.update.value), height // ROWS, SymVar("left", upper=ROWS - 1)
        assert products is not None
        recomputes_last = (
            height % ROWS + ROWS - MIN_LEFT
        ) // ROWS  # 1: the last 16 rows by AMX; 0: the remaining rows by `tile`
        code = seq(
            call_tiles("configure", products.depth),
            self._all_amx_tiles(piece, products, (first, top), whole_tiles + recomputes_last, height - ROWS),
            call_tiles("release"),
            LetIndex(
                left,
                IndexValue(height % ROWS * (1 - recomputes_last)),
                self.tile(piece, first, top + whole_tiles * ROWS, left),
            ),
        )
        code = LetIndex(height, IndexValue(self.rows.height(block)), code)
        return LetIndex(top, IndexValue(self.rows.start(block)), code)

    def _all_amx_tiles(
        self, piece: ColumnPiece, products: Products, corner: tuple[SymExpr, SymExpr], count: SymExpr, last: SymExpr
    ) -> Stmt:
        """Return the code of all columns of `count` times 16 rows, the last 16 of which begin at row `last`.

        The last 16 rows may overlap those before; each row is stored once, as the epilogue may read what it overwrites.
        Sums stay in memory between groups of blocks.
        """
        element, blocks = self.block.buffer, as_int(self.steps.extent) or 0
        first, top = corner
        (row, _, lane), _ = self._loops(piece, ROWS, first, top)
        shape = (sym(self.most_rows // ROWS), sym(piece.vectors), sym(ROWS), sym(self.lanes))
        down, across = (SymVar(n, lower=0, upper=(as_int(e) or 1) - 1) for n, e in zip("bu", shape, strict=False))
        totals = Buffer(f"{element.name}_tile", shape, element.dtype, "local")
        place = (down, across, row.var, lane.var)
        first_row = smin(down * ROWS, last)
        at: dict[SymVar, SymExpr] = {
            self.column.var: first + across * piece.apart(self.lanes)[1] + lane.var,
            self._row.var: top + first_row + row.var,
        }
        amx_tiles = _AmxTiles(self, products, (row, lane), (down, across), at, totals)

        def for_all_tiles(body: Stmt) -> Stmt:
            return Substitute(fresh=True).stmt(For(down, count, For(across, shape[1], body)))

        def add_blocks(start: SymExpr, most: int) -> Stmt:
            """Return the code that adds `most` blocks from `start` on."""
            stores, body = amx_tiles.of_blocks(start, most)
            code = seq(
                self._unpack(piece, amx_tiles, stores, start, most), Substitute(fresh=True).stmt(For(down, count, body))
            )
            for buffer in dict.fromkeys(store.buffer for store in stores):
                code = Allocate(buffer, code)
            return code

        group, size = SymVar("go", lower=0), next((n for n in (BLOCKS, BLOCKS - 1) if blocks % n == 0), BLOCKS)
        steps: list[Stmt] = []
        if blocks >= size:
            steps.append(For(group, sym(blocks // size), add_blocks(group * size, size)))
        if blocks % size:
            steps.append(add_blocks(sym(blocks - blocks % size), blocks % size))
        clear = for_all_tiles(nest((row, lane), Store(totals, place, Literal(0.0, element.dtype))))
        overlap = down * ROWS - first_row
        serial = replace(row, extent=ROWS - overlap, kind="serial"), lane
        at_own_rows = {**at, self._row.var: at[self._row.var] + overlap}
        sums = Load(totals, (down, across, row.var + overlap, lane.var))
        finish = for_all_tiles(self._epilogue(serial, at_own_rows, sums, masked=piece.masked))
        return Allocate(totals, seq(clear, *steps, finish))

    def _unpack(
        self, piece: ColumnPiece, amx_tiles: _AmxTiles, stores: list[Store], start: SymExpr, count: int
    ) -> Stmt:
        """Return the code that unpacks codes and scales of `count` blocks, for all rows."""
        part = For(amx_tiles.across, sym(piece.vectors), seq(), "unrolled")
        lane = amx_tiles.loops[1]
        at = {**amx_tiles.at, self.steps.var: start + amx_tiles.step}
        body = Substitute(at).stmt(nest((part, lane), seq(*stores)))
        if piece.masked:
            body = GuardLoads(self._guard(at), {part.var, lane.var}).stmt(body)
        else:
            starts = self.starts((amx_tiles.loops[0], part, lane), amx_tiles.at)
            body = seq(*self.asked(self.steps, starts, start + amx_tiles.step), body)
        return Substitute(fresh=True).stmt(For(amx_tiles.step, sym(count), body))


class _AmxTiles:
    """Emits the AMX tiles of some blocks, and the code that scales and accumulates their results.

    All AMX products come before their uses, as loading what an AMX tile has just stored is slow. A result is stored
    only when its AMX tile is needed again: an earlier store would wait for the product and stall the instructions
    behind it.
    """

    def __init__(
        self,
        tile: AmxRows,
        products: Products,
        loops: tuple[For, For],
        place: tuple[SymVar, SymVar],
        at: dict[SymVar, SymExpr],
        totals: Buffer,
    ) -> None:
        self.tile, self.products, self.loops, self.at, self.totals = tile, products, loops, at, totals
        self.down, self.across = place
        self.step = SymVar("g", lower=0)
        row, lane = loops
        self.place = (row.var, lane.var)
        shape = (sym(BLOCKS), totals.shape[1], row.extent, lane.extent)

        def result_buffers(dtype: str) -> list[Buffer]:
            return [Buffer(f"products{k}", shape, dtype, "local") for k in range(len(products.x))]

        self.origin: Buffer | None = Buffer("origin", (lane.extent,), "float32", "local")
        self.results = result_buffers("float32")
        value = products.of_floats(tile.update.value, tile._row.var, self._load(self.results[0]))
        if value is None:
            self.origin, self.results = None, result_buffers("int32")
            total = products.combined([self._load(buffer) for buffer in self.results])
            value = Replacement({id(products.value): total}).value(tile.update.value)
        self.value = value

    def _load(self, buffer: Buffer) -> Load:
        return Load(buffer, (self.step, self.across, *self._own))

    @property
    def _own(self) -> tuple[SymExpr, SymExpr]:
        """Row and lane in terms of the block's variables, so that dependences on row and column stay visible."""
        begin = dict.fromkeys(self.place, sym(0))
        row, column = (var - substitute(self.at[var], begin) for var in (self.tile._row.var, self.tile.column.var))
        return row, column

    def of_blocks(self, start: SymExpr, count: int) -> tuple[list[Store], Stmt]:
        """Return the stores that unpack `count` blocks from `start` on, and the code that adds the blocks to sums."""
        tile, (row, lane), parts = self.tile, self.loops, self.totals.shape[1]
        dp4a_groups = Buffer("quads", (sym(count), parts, sym(len(self.products.quads)), lane.extent), "int32", "local")
        place = (self.step, self.across)
        value, row_values = hoisted(
            self.value, tile._row, tile.column, (sym(count), row.extent), (self.step, self._own[0])
        )
        value, column_values = hoisted(
            value, tile.column, tile._row, (sym(count), parts, lane.extent), (*place, lane.var)
        )
        stores = [
            Store(dp4a_groups, (*place, sym(q), lane.var), dp4a_group)
            for q, dp4a_group in enumerate(self.products.quads)
        ]
        stores += [Store(buffer, (*place, lane.var), hoisted_value) for buffer, hoisted_value in column_values]

        sums = Load(self.totals, (self.down, self.across, *self.place))
        total = Buffer(tile.block.buffer.name, (row.extent, lane.extent), self.totals.dtype, "local")
        at = {**self.at, tile.steps.var: start + self.step}
        add = Substitute(at).stmt(nest((row, lane), Store(total, self.place, value, "add")))
        down = replace(row, kind="vectorized")
        prepare_rows = nest(
            (down,), seq(*(Store(buffer, (self.step, row.var), hoisted_value) for buffer, hoisted_value in row_values))
        )
        fresh = Substitute(fresh=True)
        prepare_rows = fresh.stmt(Substitute(at).stmt(For(self.step, sym(count), prepare_rows)))
        load_sums = fresh.stmt(nest((row, lane), Store(total, self.place, sums)))
        adds = (Substitute({self.step: sym(g)}, fresh=True).stmt(add) for g in range(count))
        store_sums = fresh.stmt(nest((row, lane), Store(self.totals, sums.indices, Load(total, self.place))))
        code = seq(
            self._multiply(dp4a_groups, at, count),
            prepare_rows,
            For(self.across, parts, Allocate(total, seq(load_sums, *adds, store_sums))),
        )
        if self.origin is not None:
            fill = Store(self.origin, (lane.var,), Literal(float(ORIGIN), "float32"))
            code = Allocate(self.origin, seq(nest((lane,), fill), code))
        for buffer in (*self.results, *(buffer for buffer, _ in row_values)):
            code = Allocate(buffer, code)
        return stores, code

    def _multiply(self, dp4a_groups: Buffer, at: dict[SymVar, SymExpr], count: int) -> Stmt:
        """Return the calls that multiply `count` blocks of x by the dp4a groups of all columns."""
        parts = as_int(self.totals.shape[1]) or 1
        calls: list[Stmt] = []
        places: list[AddressOf] = []

        def store_result(number: int) -> None:
            if 0 <= number < len(places):
                calls.append(
                    call_tiles("keep", number % _NUM_RESULT_TILES, places[number], places[number].buffer.shape[-1] * 4)
                )

        for g, part in itertools.product(range(count), range(parts)):
            for k, (x, result) in enumerate(zip(self.products.x, self.results, strict=True)):
                store_result(len(places) - _NUM_RESULT_TILES)
                tile, x_tile, w_tile = (
                    len(places) % _NUM_RESULT_TILES,
                    (g if len(self.results) == 1 else k) % 2,
                    (g * parts + part) % 2,
                )
                calls.append(
                    call_tiles("clear", tile) if self.origin is None else call_tiles("start", tile, self.origin)
                )
                if part == 0:
                    at_first_row = {**at, self.place[0]: sym(0), self.step: sym(g)}
                    indices = tuple(substitute(substitute(i, at_first_row), at_first_row) for i in x.indices)
                    calls.append(call_tiles("take_x", x_tile, AddressOf(x.buffer, indices), x.buffer.shape[-1]))
                if k == 0:
                    panel = AddressOf(dp4a_groups, (sym(g), sym(part), sym(0), sym(0)))
                    calls.append(call_tiles("take_quads", w_tile, panel, dp4a_groups.shape[-1] * 4))
                calls.append(call_tiles("dot" if self.products.is_signed else "dot_unsigned", tile, x_tile, w_tile))
                places.append(AddressOf(result, (sym(g), sym(part), sym(0), sym(0)), is_written=True))
        for number in range(max(0, len(places) - _NUM_RESULT_TILES), len(places)):
            store_result(number)
        return seq(*calls)


def call_tiles(symbol: str, *args: int | SymExpr | Buffer | Value) -> CallLibrary:
    """Return a call of AMX operation `symbol`; a buffer stands for its address."""

    def value(arg: int | SymExpr | Buffer | Value) -> Value:
        if isinstance(arg, Buffer):
            return AddressOf(arg, tuple(sym(0) for _ in arg.shape))
        if isinstance(arg, SymExpr):
            return IndexValue(arg, "int64")
        return Literal(arg, "int64") if isinstance(arg, int) else arg

    return CallLibrary(TILES, symbol, tuple(map(value, args)), work=sym(_CYCLES.get(symbol, 1)))
