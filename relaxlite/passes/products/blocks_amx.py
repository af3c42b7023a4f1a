"""Products with quantized blocks by AMX: one instruction multiplies 16 rows of bytes with 16 columns of a block.

For some blocks of a panel of columns at a time, codes are unpacked into `quads`, in the form that the instruction
takes, and scales are made. Then, 16 rows at a time, the sums of each block come out of tile registers through memory,
and are scaled and added up in 16 vector registers:

    for panel, some blocks:
        quads, kept = codes(panel), scales(panel)
        for 16 rows:
            for blocks, 16 columns: C[g, columns] = origin + x[g, rows, :] @ quads[g, :, columns]
            for 16 columns, blocks: e[rows, columns] += f(C[g, columns], kept[g, columns])

Where a product is scaled at once, tiles start at an origin that makes their integers floats (block_terms.py). Of rows
that are left over, a few take the loop that goes over all its rows in every step (blocks.py), and for more the
last 16 rows are computed, some of them twice. All of this is the call of a library named "amx" in the IR, beside loops
for where the processor has no tiles or the system refuses them. Intel, "Architecture Instruction Set Extensions
Programming Reference", chapter 3.
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

TILES, FOUND = "amx", "tiles"  # as runtime/libraries.py and codegen/llvm/amx.py know them
ROWS = 16  # of a tile, and as many 32-bit columns
MIN_LEFT = 6  # rows for which 16 more by tiles are faster than a pass (docs/measurements/cpus.md, blocks_amx)
BLOCKS = (
    4  # at a time, or one less where none is left then: their quads, products and rows of x stay in the first cache
)

_TURNS = 4  # tiles of products
_DOTS = ("dot", "dot_unsigned", "dot_of_unsigned", "dot_bf16")
_CYCLES = {"start": 8, "take_x": 8, "take_quads": 8, "keep": 16, **dict.fromkeys(_DOTS, 16)}  # the others: 1


def by_amx(tile: ManyRows, vectors: int, target: Target) -> ManyRowsPlan | str:
    """AMX tiles from 16 rows on, where the system allows them; or why the loops do not fit them."""
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
    """Tiles of many rows by products of 16 x 16."""

    __slots__ = ()

    def __call__(self, piece: ColumnPiece, number: SymExpr, block: SymVar) -> Stmt:
        first, top = self._first(piece, number), SymVar(f"{self._row.var.name}0", lower=0)
        height = SymVar("rows", lower=0, upper=self.most_rows)
        products, whole, left = find_products(self.update.value), height // ROWS, SymVar("left", upper=ROWS - 1)
        assert products is not None
        again = (height % ROWS + ROWS - MIN_LEFT) // ROWS  # 1: the last 16 rows once more; 0: those that are left
        code = seq(
            call_tiles("configure", products.depth),
            self._squares(piece, products, (first, top), whole + again, height - ROWS),
            call_tiles("release"),
            LetIndex(left, IndexValue(height % ROWS * (1 - again)), self.tile(piece, first, top + whole * ROWS, left)),
        )
        code = LetIndex(height, IndexValue(self.rows.height(block)), code)
        return LetIndex(top, IndexValue(self.rows.start(block)), code)

    def _squares(
        self, piece: ColumnPiece, products: Products, corner: tuple[SymExpr, SymExpr], count: SymExpr, last: SymExpr
    ) -> Stmt:
        """All columns of `count` times 16 rows, the last of which begin at row `last`: some of them may be the others',
        too, and are stored once, as a result may lie where the epilogue reads. Sums wait in memory from some blocks to
        the next."""
        element, blocks = self.block.buffer, as_int(self.steps.extent) or 0
        first, top = corner
        (row, _, lane), _ = self._loops(piece, ROWS, first, top)
        shape = (sym(self.most_rows // ROWS), sym(piece.vectors), sym(ROWS), sym(self.lanes))
        down, across = (SymVar(n, lower=0, upper=(as_int(e) or 1) - 1) for n, e in zip("bu", shape, strict=False))
        totals = Buffer(f"{element.name}_tile", shape, element.dtype, "local")
        place = (down, across, row.var, lane.var)
        begin = smin(down * ROWS, last)
        at: dict[SymVar, SymExpr] = {
            self.column.var: first + across * piece.apart(self.lanes)[1] + lane.var,
            self._row.var: top + begin + row.var,
        }
        squares = _AmxTiles(self, products, (row, lane), (down, across), at, totals)

        def everywhere(body: Stmt) -> Stmt:
            return Substitute(fresh=True).stmt(For(down, count, For(across, shape[1], body)))

        def some(start: SymExpr, most: int) -> Stmt:
            """What `most` blocks from `start` on add."""
            stores, body = squares.of_blocks(start, most)
            code = seq(
                self._prepared(piece, squares, stores, start, most), Substitute(fresh=True).stmt(For(down, count, body))
            )
            for buffer in dict.fromkeys(store.buffer for store in stores):
                code = Allocate(buffer, code)
            return code

        group, size = SymVar("go", lower=0), next((n for n in (BLOCKS, BLOCKS - 1) if blocks % n == 0), BLOCKS)
        steps: list[Stmt] = []
        if blocks >= size:
            steps.append(For(group, sym(blocks // size), some(group * size, size)))
        if blocks % size:
            steps.append(some(sym(blocks - blocks % size), blocks % size))
        clear = everywhere(nest((row, lane), Store(totals, place, Literal(0.0, element.dtype))))
        others = down * ROWS - begin
        serial = replace(row, extent=ROWS - others, kind="serial"), lane
        own = {**at, self._row.var: at[self._row.var] + others}
        sums = Load(totals, (down, across, row.var + others, lane.var))
        finish = everywhere(self._epilogue(serial, own, sums, masked=piece.masked))
        return Allocate(totals, seq(clear, *steps, finish))

    def _prepared(
        self, piece: ColumnPiece, squares: _AmxTiles, stores: list[Store], start: SymExpr, count: int
    ) -> Stmt:
        """What all rows use of some blocks."""
        part = For(squares.across, sym(piece.vectors), seq(), "unrolled")
        lane = squares.loops[1]
        at = {**squares.at, self.steps.var: start + squares.step}
        body = Substitute(at).stmt(nest((part, lane), seq(*stores)))
        if piece.masked:
            body = GuardLoads(self._guard(at), {part.var, lane.var}).stmt(body)
        else:
            starts = self.starts((squares.loops[0], part, lane), squares.at)
            body = seq(*self.asked(self.steps, starts, start + squares.step), body)
        return Substitute(fresh=True).stmt(For(squares.step, sym(count), body))


class _AmxTiles:
    """Sums of 16 rows by 16 columns, side by side, and what some blocks add to them.

    All products come first, then what uses them: reading what a tile has just written takes long. They go to memory
    when others begin in their tile: before, an instruction that waits for them would hold up those behind it.
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

        def made(dtype: str) -> list[Buffer]:
            return [Buffer(f"products{k}", shape, dtype, "local") for k in range(len(products.x))]

        self.origin: Buffer | None = Buffer("origin", (lane.extent,), "float32", "local")
        self.made = made("float32")
        value = products.of_floats(tile.update.value, tile._row.var, self._load(self.made[0]))
        if value is None:
            self.origin, self.made = None, made("int32")
            instead = products.combined([self._load(buffer) for buffer in self.made])
            value = Replacement({id(products.value): instead}).value(tile.update.value)
        self.value = value

    def _load(self, made: Buffer) -> Load:
        return Load(made, (self.step, self.across, *self._own))

    @property
    def _own(self) -> tuple[SymExpr, SymExpr]:
        """The row and the lane in terms of the block's variables, so that it shows what moves along which of them."""
        begin = dict.fromkeys(self.place, sym(0))
        row, column = (var - substitute(self.at[var], begin) for var in (self.tile._row.var, self.tile.column.var))
        return row, column

    def of_blocks(self, start: SymExpr, count: int) -> tuple[list[Store], Stmt]:
        """For `count` blocks from `start` on: what is to be there, and the code."""
        tile, (row, lane), parts = self.tile, self.loops, self.totals.shape[1]
        quads = Buffer("quads", (sym(count), parts, sym(len(self.products.quads)), lane.extent), "int32", "local")
        place = (self.step, self.across)
        value, of_rows = hoisted(
            self.value, tile._row, tile.column, (sym(count), row.extent), (self.step, self._own[0])
        )
        value, kept = hoisted(value, tile.column, tile._row, (sym(count), parts, lane.extent), (*place, lane.var))
        stores = [Store(quads, (*place, sym(q), lane.var), quad) for q, quad in enumerate(self.products.quads)]
        stores += [Store(buffer, (*place, lane.var), of_row) for buffer, of_row in kept]

        sums = Load(self.totals, (self.down, self.across, *self.place))
        total = Buffer(tile.block.buffer.name, (row.extent, lane.extent), self.totals.dtype, "local")
        at = {**self.at, tile.steps.var: start + self.step}
        add = Substitute(at).stmt(nest((row, lane), Store(total, self.place, value, "add")))
        down = replace(row, kind="vectorized")
        numbers = nest((down,), seq(*(Store(buffer, (self.step, row.var), of_row) for buffer, of_row in of_rows)))
        fresh = Substitute(fresh=True)
        numbers = fresh.stmt(Substitute(at).stmt(For(self.step, sym(count), numbers)))
        take = fresh.stmt(nest((row, lane), Store(total, self.place, sums)))
        uses = (Substitute({self.step: sym(g)}, fresh=True).stmt(add) for g in range(count))
        give = fresh.stmt(nest((row, lane), Store(self.totals, sums.indices, Load(total, self.place))))
        code = seq(
            self._multiply(quads, at, count), numbers, For(self.across, parts, Allocate(total, seq(take, *uses, give)))
        )
        if self.origin is not None:
            fill = Store(self.origin, (lane.var,), Literal(float(ORIGIN), "float32"))
            code = Allocate(self.origin, seq(nest((lane,), fill), code))
        for buffer in (*self.made, *(buffer for buffer, _ in of_rows)):
            code = Allocate(buffer, code)
        return stores, code

    def _multiply(self, quads: Buffer, at: dict[SymVar, SymExpr], count: int) -> Stmt:
        """The products of `count` blocks with all columns."""
        parts = as_int(self.totals.shape[1]) or 1
        calls: list[Stmt] = []
        places: list[AddressOf] = []

        def keep(number: int) -> None:
            if 0 <= number < len(places):
                calls.append(call_tiles("keep", number % _TURNS, places[number], places[number].buffer.shape[-1] * 4))

        for g, part in itertools.product(range(count), range(parts)):
            for k, (x, result) in enumerate(zip(self.products.x, self.made, strict=True)):
                keep(len(places) - _TURNS)
                tile, left, right = len(places) % _TURNS, (g if len(self.made) == 1 else k) % 2, (g * parts + part) % 2
                calls.append(
                    call_tiles("clear", tile) if self.origin is None else call_tiles("start", tile, self.origin)
                )
                if part == 0:
                    here = {**at, self.place[0]: sym(0), self.step: sym(g)}
                    indices = tuple(substitute(substitute(i, here), here) for i in x.indices)
                    calls.append(call_tiles("take_x", left, AddressOf(x.buffer, indices), x.buffer.shape[-1]))
                if k == 0:
                    panel = AddressOf(quads, (sym(g), sym(part), sym(0), sym(0)))
                    calls.append(call_tiles("take_quads", right, panel, quads.shape[-1] * 4))
                calls.append(call_tiles("dot" if self.products.is_signed else "dot_unsigned", tile, left, right))
                places.append(AddressOf(result, (sym(g), sym(part), sym(0), sym(0)), is_written=True))
        for number in range(max(0, len(places) - _TURNS), len(places)):
            keep(number)
        return seq(*calls)


def call_tiles(symbol: str, *args: int | SymExpr | Buffer | Value) -> CallLibrary:
    def value(arg: int | SymExpr | Buffer | Value) -> Value:
        if isinstance(arg, Buffer):
            return AddressOf(arg, tuple(sym(0) for _ in arg.shape))
        if isinstance(arg, SymExpr):
            return IndexValue(arg, "int64")
        return Literal(arg, "int64") if isinstance(arg, int) else arg

    return CallLibrary(TILES, symbol, tuple(map(value, args)), work=sym(_CYCLES.get(symbol, 1)))
