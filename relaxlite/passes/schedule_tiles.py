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

from collections.abc import Callable, Sequence
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
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, substitute, sym
from relaxlite.passes.prologue import Instead
from relaxlite.passes.register_tile import ColumnPiece
from relaxlite.passes.schedule import GuardLoads, less, nest
from relaxlite.passes.schedule_blocks import ManyRows, hoisted

TILES, FOUND = "amx", "tiles"  # as runtime/libraries.py and codegen/llvm/amx.py know them
ROWS = 16  # of a tile, and as many 32-bit columns
MOST_DEPTH = 64  # bytes of a row
MOST_QUADS_BYTES = 1 << 20  # of a panel's codes, which stay in the second cache

SLOTS = 4  # blocks whose products wait in memory: reading what a tile has just written takes long
_ONES, _SIGN = 0x01010101, 128
_SIGNS = _SIGN * _ONES - (1 << 32)
_WORK = 24  # instructions that a product of tiles counts as


@dataclass(frozen=True, slots=True)
class _Sum:
    """start + the products of a block's quads with words of x."""

    start: Value
    codes: tuple[Value, ...]
    x: Load  # the first byte

    @property
    def depth(self) -> int:
        return 4 * len(self.codes)


@dataclass(frozen=True, slots=True)
class Products:
    """`value`, the integer that a block comes to, by products of tiles: start + (the first << shift) + the second."""

    value: Value
    x: tuple[Load, ...]  # where the first row of each product's x begins
    quads: tuple[Value, ...]  # what they are multiplied by, one row of a tile each
    is_signed: bool
    start: Value | None
    shift: int = 0

    @property
    def depth(self) -> int:
        """Bytes in a row."""
        return 4 * len(self.quads)

    def combined(self, made: Sequence[Value]) -> Value:
        total = Scalar(made[0])
        if len(made) > 1:
            total = total.binary("shift_left", self.shift) + Scalar(made[1])
        return (total if self.start is None else Scalar(self.start) + total).value


def find_products(value: Value) -> Products | None:
    """The part of a value that tiles can compute; None: there is none, or more than one."""
    found = _products(value)
    if found is not None:
        return found
    parts = [part for child in value_children(value) if (part := find_products(child)) is not None]
    return parts[0] if len(parts) == 1 else None


def _products(value: Value) -> Products | None:
    """A sum of dot products, or such a sum shifted plus another."""
    last = _sum(value)
    if last is not None:
        return _laid_out(value, (last,), 0)
    if not isinstance(value, Binary) or value.op != "add" or not isinstance(value.a, Binary):
        return None
    shifted, last = value.a, _sum(value.b)
    if shifted.op != "shift_left" or not isinstance(shifted.b, Literal):
        return None
    high = _sum(shifted.a)
    if high is None or last is None or _zero_of(high.start) != 0 or len(high.codes) != len(last.codes):
        return None
    if any(a is not b for a, b in zip(high.codes, last.codes, strict=True)):
        return None
    return _laid_out(value, (high, last), int(shifted.b.value))


def _laid_out(value: Value, sums: tuple[_Sum, ...], shift: int) -> Products:
    """Zero points that starts stand for go into the codes. Two sums are one where shifted codes are bytes, too."""
    last = sums[-1]
    zero, bits = _zero_of(last.start), max(map(_bits_of, last.codes))
    is_signed = bool(zero) and (bits < 8 or zero == _SIGN)
    codes = [Scalar(code) for code in last.codes]
    if is_signed and zero == _SIGN:
        codes = [code.binary("xor", _SIGNS) for code in codes]
    elif is_signed:  # no byte borrows from the next
        codes = [((code | _SIGNS) - (zero or 0) * _ONES).binary("xor", _SIGNS) for code in codes]
    x = tuple(s.x for s in sums)
    start = None if is_signed or zero == 0 else last.start
    follows = len(x) > 1 and as_int(x[1].indices[-1] - x[0].indices[-1]) == last.depth
    least, most = (-(zero or 0), (1 << bits) - 1 - (zero or 0)) if is_signed else (0, (1 << bits) - 1)
    is_byte = least << shift >= -128 and most << shift <= (127 if is_signed else 255)
    if follows and is_byte and 2 * last.depth <= MOST_DEPTH:
        raised = [code.binary("shift_left", shift) & _word_of(255 << shift & 255) for code in codes]
        codes, x = [*raised, *codes], x[:1]
    return Products(value, x, tuple(code.value for code in codes), is_signed, start, shift)


def _word_of(byte: int) -> int:
    """Four equal bytes as an int32."""
    word = byte * _ONES
    return word - (1 << 32) if word >> 31 else word


def _zero_of(start: Value) -> int | None:
    """The zero point z in 0 - z * (the sum of x), which matmul_blocks starts from; 0 for 0."""
    if isinstance(start, Literal) and start.value == 0:
        return 0
    if not isinstance(start, Binary) or start.op != "sub" or _zero_of(start.a) != 0:
        return None
    taken = start.b
    if not isinstance(taken, Binary) or taken.op != "mul" or not isinstance(taken.a, Load):
        return None
    return int(taken.b.value) if isinstance(taken.b, Literal) else None


def _bits_of(code: Value) -> int:
    """Of the bytes of a quad, which are masked or anything."""
    if isinstance(code, Binary) and code.op == "and" and isinstance(code.b, Literal):
        return (int(code.b.value) & 255).bit_length()
    if isinstance(code, Binary) and code.op == "or":
        return max(_bits_of(code.a), _bits_of(code.b))
    if isinstance(code, Binary) and code.op == "shift_left" and isinstance(code.b, Literal):
        return _bits_of(code.a) + int(code.b.value)
    return 8


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
    return _Sum(start, tuple(code for _, code, _ in terms), terms[0][2])


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
    """When tiles are there and have rows to fill one, and the code then; None: its sums are no products of tiles."""
    blocks, found = as_int(tile.steps.extent), find_products(tile.update.value)
    if blocks is None or found is None or tile.lanes != ROWS:
        return None
    if found.depth > MOST_DEPTH or blocks * found.depth * vectors * ROWS > MOST_QUADS_BYTES:
        return None
    enough = Binary("and", LibraryFound(TILES, FOUND), less(ROWS - 1, tile.rows.extent))
    return enough, TiledRows(tile.block, tile.row, tile.column, tile.lanes, tile.most_rows, least_rows=ROWS)


class TiledRows(ManyRows):
    """Tiles of many rows by products of 16 x 16."""

    __slots__ = ()

    def __call__(self, piece: ColumnPiece, number: SymExpr, block: SymVar) -> Stmt:
        first, top = self._first(piece, number), SymVar(f"{self._row.var.name}0", lower=0)
        height = SymVar("rows", lower=0, upper=self.most_rows)
        products, whole = find_products(self.update.value), height // ROWS
        assert products is not None
        quads, width = products.quads, sym(piece.vectors * self.lanes)
        panel = Buffer("quads", (self.steps.extent, sym(len(quads)), width), "int32", "local")
        code = seq(
            self._unpack(piece, first, panel, quads),
            _call("configure", products.depth),
            loops("b", (whole,), lambda b: self._across(piece, products, first, top + b * ROWS, panel)),
            _call("release"),
            self.tile(piece, first, top + whole * ROWS, height % ROWS),
        )
        code = LetIndex(height, IndexValue(self.rows.height(block)), Allocate(panel, code))
        return LetIndex(top, IndexValue(self.rows.start(block)), code)

    def _unpack(self, piece: ColumnPiece, first: SymExpr, panel: Buffer, quads: tuple[Value, ...]) -> Stmt:
        """panel[g, q, columns]"""
        (_, part, lane), at = self._loops(piece, 1, first, sym(0))
        place = part.var * self.lanes + lane.var
        stores = [Store(panel, (self.steps.var, sym(q), place), quad) for q, quad in enumerate(quads)]
        body = Substitute(at).stmt(nest((part, lane), seq(*stores)))
        if piece.masked:
            body = GuardLoads(self._guard(at), {part.var, lane.var}).stmt(body)
        return Substitute(fresh=True).stmt(replace(self.steps, body=body))

    def _across(self, piece: ColumnPiece, products: Products, first: SymExpr, top: SymExpr, panel: Buffer) -> Stmt:
        """16 rows from `top` on of all columns."""
        part = SymVar("u", lower=0, upper=piece.vectors - 1)
        return For(part, sym(piece.vectors), self._square(piece, products, first, top, part, panel))

    def _square(
        self, piece: ColumnPiece, products: Products, first: SymExpr, top: SymExpr, part: SymVar, panel: Buffer
    ) -> Stmt:
        """16 rows of vector `part` of the columns."""
        start = first + part * self.lanes
        (row, _, lane), _ = self._loops(piece, ROWS, start, top)
        at: dict[SymVar, SymExpr] = {self.column.var: start + lane.var, self._row.var: top + row.var}
        shape, place = (sym(ROWS), sym(self.lanes)), (row.var, lane.var)
        made = [Buffer(f"products{k}", (sym(SLOTS), *shape), "int32", "local") for k in range(len(products.x))]
        element = self.block.buffer
        total = Buffer(element.name, shape, element.dtype, "local")
        done = Buffer(f"{element.name}_tile", shape, element.dtype, "local")

        slot = (self.steps.var % SLOTS, self._row.var - top, self.column.var - start)
        instead = {id(products.value): products.combined([Load(buffer, slot) for buffer in made])}
        value = Instead(instead).value(self.update.value)
        value, kept = hoisted(value, self.column, self._row, (sym(self.lanes),), (lane.var,))
        keep = nest((lane,), seq(*(Store(b, (lane.var,), v) for b, v in kept)))
        keep, add = (Substitute(at).stmt(s) for s in (keep, nest((row, lane), Store(total, place, value, "add"))))
        use = seq(keep if not piece.masked else GuardLoads(self._guard(at), {lane.var}).stmt(keep), add)
        for buffer, _ in kept:
            use = Allocate(buffer, use)
        pairs = zip(products.x, made, strict=True)
        multiply = seq(*(self._multiply(x, b, panel, top, part, is_signed=products.is_signed) for x, b in pairs))
        body = _pipelined(self.steps, multiply, use)
        for buffer in made:
            body = Allocate(buffer, body)
        clear = nest((row, lane), Store(total, place, Literal(0.0, element.dtype)))
        finish = nest((row, lane), Store(done, place, Load(total, place)))
        fresh = Substitute(fresh=True)
        summed = Allocate(total, seq(fresh.stmt(clear), body, fresh.stmt(finish)))
        serial = replace(row, kind="serial"), lane
        return Allocate(done, seq(summed, self._epilogue(serial, at, Load(done, place), masked=piece.masked)))

    def _multiply(self, x: Load, into: Buffer, panel: Buffer, top: SymExpr, part: SymVar, *, is_signed: bool) -> Stmt:
        g = self.steps.var
        indices = tuple(substitute(i, {self._row.var: top}) for i in x.indices)
        args = (
            AddressOf(x.buffer, indices),
            IndexValue(x.buffer.shape[-1], "int64"),
            AddressOf(panel, (g, sym(0), part * self.lanes)),
            IndexValue(panel.shape[-1] * 4, "int64"),
            AddressOf(into, (g % SLOTS, sym(0), sym(0)), is_written=True),
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
