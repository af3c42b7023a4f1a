"""Products with quantized blocks by AMX: one instruction multiplies 16 rows of bytes with 16 columns of a block.

For each panel of columns the codes of all blocks are unpacked once, into `quads`, in the form that the instruction
takes. Then, 16 rows by 16 columns at a time, the sums of each block come out of a tile register through memory and are
scaled and added up in 16 vector registers:

    for panel: { quads = codes(panel)
                 for 16 rows, 16 columns: { e = 0; for g: { C = x[g, rows, :] @ quads[g, :, columns]; e += f(C) } } }

Rows that are left over take the loop that goes over all its rows in every step (schedule_blocks.py). All of this is the
call of a library named "amx" in the IR, beside loops for where the processor has no tiles or the system refuses them.
Intel, "Architecture Instruction Set Extensions Programming Reference", chapter 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from relaxlite.ir.intrinsics import WORD, WORDS
from relaxlite.ir.ops.scalars import Scalar
from relaxlite.ir.program import (
    AddressOf,
    Allocate,
    Binary,
    Buffer,
    CallLibrary,
    For,
    IndexValue,
    Intrinsic,
    LetIndex,
    LibraryFound,
    Literal,
    Load,
    Stmt,
    Store,
    Value,
    loops,
    seq,
)
from relaxlite.ir.program_visitor import Substitute, value_children
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, sym
from relaxlite.passes.prologue import Instead
from relaxlite.passes.register_tile import ColumnPiece
from relaxlite.passes.schedule import GuardLoads, less, nest
from relaxlite.passes.schedule_blocks import ManyRows, of_columns

TILES, FOUND = "amx", "tiles"  # as runtime/libraries.py and codegen/llvm/amx.py know them
ROWS = 16  # of a tile, and as many 32-bit columns
MOST_DEPTH = 64  # bytes of a row
MOST_QUADS_BYTES = 1 << 20  # of a panel's codes, on the stack

SLOTS = int(__import__("os").environ.get("SLOTS", "2"))  # of products
_ONES, _SIGN = 0x01010101, 128
_SIGNS = _SIGN * _ONES - (1 << 32)
_WORK = 24  # instructions that a product of tiles counts as


@dataclass(frozen=True, slots=True)
class _Sum:
    """start + the products of a block's quads with words of x."""

    value: Value
    start: Value
    codes: tuple[Value, ...]
    x: Load  # the first byte

    @property
    def depth(self) -> int:
        return 4 * len(self.codes)


def centered_codes(sums: list[_Sum]) -> tuple[Value, ...] | None:
    """The codes less their zero point, as signed bytes, where the start of the last sum stands for that; None: it does
    not, or they are no signed bytes."""
    *others, last = sums
    codes, zero = last.codes, _zero_of(last.start)
    if zero is None or any(_zero_of(s.start) != 0 for s in others):
        return None
    fits = max(map(_bits_of, codes)) < 8
    if zero == 0 and fits:
        return codes
    if zero == _SIGN:  # as for codes of eight bits
        return tuple(Scalar(code).binary("xor", _SIGNS).value for code in codes)
    if not fits:
        return None
    lowered = [(Scalar(code) | _SIGNS) - zero * _ONES for code in codes]  # no byte borrows from the next
    return tuple(value.binary("xor", _SIGNS).value for value in lowered)


def _zero_of(start: Value) -> int | None:
    """The zero point z in 0 - z * (the sum of x), which matmul_blocks starts from; 0 for 0."""
    if isinstance(start, Literal) and start.value == 0:
        return 0
    if not isinstance(start, Binary) or start.op != "sub" or _zero_of(start.a) != 0:
        return None
    taken = start.b
    is_sum = isinstance(taken, Binary) and taken.op == "mul" and isinstance(taken.a, Load)
    return int(taken.b.value) if is_sum and isinstance(taken.b, Literal) else None  # type: ignore[union-attr]


def _bits_of(code: Value) -> int:
    """Of the bytes of a quad, which are masked or anything."""
    if isinstance(code, Binary) and code.op == "and" and isinstance(code.b, Literal):
        return (int(code.b.value) & 255).bit_length()
    if isinstance(code, Binary) and code.op == "or":
        return max(_bits_of(code.a), _bits_of(code.b))
    if isinstance(code, Binary) and code.op == "shift_left" and isinstance(code.b, Literal):
        return _bits_of(code.a) + int(code.b.value)
    return 8


def block_sums(value: Value) -> list[_Sum]:
    """The sums of dot products in a value that tiles could compute, outermost first."""
    found = _sum(value)
    if found is not None:
        return [found]
    return [s for child in value_children(value) for s in block_sums(child)]


def _sum(value: Value) -> _Sum | None:
    """Two chains of dot products, added."""
    if not isinstance(value, Binary) or value.op != "add":
        return None
    (start, first), (other, second) = _chain(value.a), _chain(value.b)
    if not first or not second or not isinstance(other, Literal) or other.value != 0:
        return None
    terms: list[tuple[int, Value, Load]] = []
    base = first[0][1]
    for code, load in (*first, *second):
        offset = as_int(load.indices[-1] - base.indices[-1])
        if load.buffer is not base.buffer or load.indices[:-1] != base.indices[:-1] or offset is None:
            return None
        terms.append((offset, code, load))
    terms.sort(key=lambda term: term[0])
    if [offset for offset, _, _ in terms] != list(range(0, 4 * len(terms), 4)):
        return None
    return _Sum(value, start, tuple(code for _, code, _ in terms), terms[0][2])


def _chain(value: Value) -> tuple[Value, list[tuple[Value, Load]]]:
    """What a chain of dot products starts from, and its terms: quads, and the first byte of their words of x."""
    terms: list[tuple[Value, Load]] = []
    while isinstance(value, Intrinsic) and value.name == WORDS:
        total, code, word = value.args
        if not isinstance(word, Intrinsic) or word.name != WORD or not isinstance(word.args[0], Load):
            return value, []
        terms.append((code, word.args[0]))
        value = total
    return value, terms[::-1]


def by_tiles(tile: ManyRows, vectors: int) -> tuple[Value, ManyRows] | None:
    """When tiles are there and have rows to fill one, and the code then; None: the sums are no products of tiles."""
    blocks, sums = as_int(tile.steps.extent), block_sums(tile.update.value)
    if blocks is None or not sums or tile.lanes != ROWS:
        return None
    depth, codes = sums[0].depth, sums[0].codes
    is_one = all(s.depth == depth and all(a is b for a, b in zip(s.codes, codes, strict=True)) for s in sums)
    if not is_one or depth > MOST_DEPTH or blocks * depth * vectors * ROWS > MOST_QUADS_BYTES:
        return None
    values = (tile.block, tile.row, tile.column, tile.lanes, tile.most_rows)
    return Binary("and", LibraryFound(TILES, FOUND), less(ROWS - 1, tile.rows.extent)), TiledRows(
        *values, least_rows=ROWS
    )


class TiledRows(ManyRows):
    """Tiles of many rows by products of 16 x 16."""

    __slots__ = ()

    def __call__(self, piece: ColumnPiece, number: SymExpr, block: SymVar) -> Stmt:
        first, top = self._first(piece, number), SymVar(f"{self._row.var.name}0", lower=0)
        height = SymVar("rows", lower=0, upper=self.most_rows)
        steps, update = self.steps, self.update
        blocks, sums = steps.extent, block_sums(update.value)
        quads = len(sums[0].codes)
        panel = Buffer("quads", (blocks, sym(quads), sym(piece.vectors * self.lanes)), "int32", "local")

        centered = centered_codes(sums)
        codes = sums[0].codes if centered is None else centered
        whole = height // ROWS
        code = seq(
            self._unpack(piece, first, panel, codes),
            _call("configure", sums[0].depth),
            loops("b", (whole,), lambda b: self._tiles(piece, first, top + b * ROWS, panel, centered is not None)),
            _call("release"),
            self.tile(piece, first, top + whole * ROWS, height % ROWS),
        )
        code = LetIndex(height, IndexValue(self.rows.height(block)), Allocate(panel, code))
        return LetIndex(top, IndexValue(self.rows.start(block)), code)

    def _unpack(self, piece: ColumnPiece, first: SymExpr, panel: Buffer, codes: tuple[Value, ...]) -> Stmt:
        """quads[g, q, columns]"""
        (_, part, lane), at = self._loops(piece, 1, first, sym(0))
        steps = self.steps
        stores = [Store(panel, (steps.var, sym(q), part.var * self.lanes + lane.var), c) for q, c in enumerate(codes)]
        body = Substitute(at).stmt(nest((part, lane), seq(*stores)))
        if piece.masked:
            body = GuardLoads(self._guard(at), {part.var, lane.var}).stmt(body)
        return Substitute(fresh=True).stmt(replace(steps, body=body))

    def _tiles(self, piece: ColumnPiece, first: SymExpr, top: SymExpr, panel: Buffer, is_centered: bool) -> Stmt:
        """16 rows from `top` on of all vectors of columns."""
        part = SymVar("u", lower=0, upper=piece.vectors - 1)
        single = replace(piece, vectors=1)
        return For(part, sym(piece.vectors), self._tile_of(single, first, top, part, panel, is_centered))

    def _tile_of(
        self, piece: ColumnPiece, first: SymExpr, top: SymExpr, part: SymVar, panel: Buffer, is_centered: bool
    ) -> Stmt:
        sums = block_sums(self.update.value)
        start = first + part * self.lanes
        (row, _, lane), at = self._loops(piece, ROWS, start, top)
        at = {self.column.var: start + lane.var, self._row.var: top + row.var}
        steps, update, element = self.steps, self.update, self.block.buffer
        square = (sym(ROWS), sym(self.lanes))
        made = [Buffer(f"products{k}", (sym(SLOTS), *square), "int32", "local") for k in range(len(sums))]
        total = Buffer(element.name, square, element.dtype, "local")
        done = Buffer(f"{element.name}_tile", square, element.dtype, "local")

        value = self._of_products(update.value, sums, made, top, start, is_centered)
        parts = of_columns(value, self.column, self._row)
        kept = [Buffer(f"kept{k}", (sym(self.lanes),), part.dtype, "local") for k, part in enumerate(parts)]
        instead = {id(part): Load(buffer, (lane.var,)) for part, buffer in zip(parts, kept, strict=True)}
        add = nest((row, lane), Store(total, (row.var, lane.var), Instead(instead).value(value), "add"))
        keep = nest((lane,), seq(*(Store(b, (lane.var,), v) for b, v in zip(kept, parts, strict=True))))
        keep, add = (Substitute(at).stmt(stmt) for stmt in (keep, add))
        if piece.masked:
            keep = GuardLoads(self._guard(at), {lane.var}).stmt(keep)
        pairs = zip(sums, made, strict=True)
        multiply = seq(*(self._product(s, buffer, panel, top, part, is_centered) for s, buffer in pairs))
        use = seq(keep, add)
        for buffer in kept:
            use = Allocate(buffer, use)
        body = _pipelined(steps, multiply, use)
        for buffer in made:
            body = Allocate(buffer, body)
        clear = nest((row, lane), Store(total, (row.var, lane.var), Literal(0.0, element.dtype)))
        keep_total = nest((row, lane), Store(done, (row.var, lane.var), Load(total, (row.var, lane.var))))
        fresh = Substitute(fresh=True)
        summed = seq(fresh.stmt(clear), body, fresh.stmt(keep_total))
        serial = replace(row, kind="serial"), lane
        final = self._epilogue(serial, at, Load(done, (row.var, lane.var)), masked=piece.masked)
        return Allocate(done, seq(Allocate(total, summed), final))

    def _of_products(
        self,
        value: Value,
        sums: list[_Sum],
        made: list[Buffer],
        top: SymExpr,
        start: SymExpr,
        is_centered: bool,
    ) -> Value:
        """The value with elements of the products of tiles in place of its sums."""
        instead: dict[int, Value] = {}
        for s, buffer in zip(sums, made, strict=True):
            load = Load(buffer, (self.steps.var % SLOTS, self._row.var - top, self.column.var - start))
            instead[id(s.value)] = load if is_centered or _zero_of(s.start) == 0 else Binary("add", s.start, load)
        return Instead(instead).value(value)  # type: ignore[arg-type]

    def _product(self, s: _Sum, into: Buffer, panel: Buffer, top: SymExpr, part: SymVar, is_signed: bool) -> Stmt:
        steps = self.steps
        x = Substitute({self._row.var: top}).value(s.x)
        assert isinstance(x, Load)
        args = (
            AddressOf(x.buffer, x.indices),
            IndexValue(x.buffer.shape[-1], "int64"),
            AddressOf(panel, (steps.var, sym(0), part * self.lanes)),
            IndexValue(panel.shape[-1] * 4, "int64"),
            AddressOf(into, (steps.var % SLOTS, sym(0), sym(0)), is_written=True),
        )
        return CallLibrary(TILES, "dot" if is_signed else "dot_unsigned", args, work=sym(_WORK))


def _pipelined(steps: For, multiply: Stmt, use: Stmt) -> Stmt:
    """Each step's products some steps before they are used: reading what a tile has just written takes long."""
    count = as_int(steps.extent) or 0
    before = min(SLOTS - 1, count)

    def loop(start: int, extent: int, make: Callable[[SymExpr], Stmt]) -> Stmt:
        step = SymVar(steps.var.name, lower=0, upper=max(extent - 1, 0))
        return Substitute(fresh=True).stmt(For(step, sym(extent), make(start + step)))

    def at(stmt: Stmt, g: SymExpr) -> Stmt:
        return Substitute({steps.var: g}, fresh=True).stmt(stmt)

    return seq(
        loop(0, before, lambda g: at(multiply, g)),
        loop(0, count - before, lambda g: seq(at(multiply, g + before), at(use, g))),
        loop(count - before, before, lambda g: at(use, g)),
    )


def _call(symbol: str, *numbers: int) -> CallLibrary:
    return CallLibrary(TILES, symbol, tuple(Literal(n, "int64") for n in numbers), work=sym(_WORK))
