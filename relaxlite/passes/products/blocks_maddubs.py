"""Products with quantized blocks where bytes are multiplied in pairs (SSSE3, AVX2; codegen/llvm/byte_pairs.py).

What zero points take off is a sum of x for each block of a row, which has to come into a vector for every few columns.
Instead codes become signed, less their zero points, and the bytes of x unsigned, more SIGN: a pass over the rows moves
them. What that adds to a product is a sum of codes, one number of a block and a column, which a tile computes once:

    sum of (code - zero) * x = sum of (code - zero) * (x + SIGN) - SIGN * sum of (code - zero)

It is part of the multiply-add by a scale, where that rounds no earlier. The integers are the same, and so are results,
to the last bit.

Vectors of 256 bits are few. A block of x in 8 bits stays in registers while a row goes over some *panels in turn*,
whose codes lie in the first cache, unpacked. Blocks of 12 or 16 bits do not fit; codes stay in registers then, and rows
go *in twos*. Of two panels or rows the sums of both are computed first, then the rest: a core sees only so far ahead.
Figures: docs/measurements/cpus.md, blocks_maddubs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import ClassVar

from relaxlite.ir.intrinsics import DOT4_BYTES, MAX_OF_PAIRS
from relaxlite.ir.ops.block_codes import DP4A_BYTES, ONES
from relaxlite.ir.ops.scalars import Scalar, literal
from relaxlite.ir.program import (
    Allocate,
    Buffer,
    For,
    Intrinsic,
    Load,
    LoopKind,
    Stmt,
    Store,
    Value,
    seq,
)
from relaxlite.ir.program_visitor import Substitute, value_children
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, sym
from relaxlite.passes.loops.transforms import less, nest
from relaxlite.passes.products.block_terms import (
    FLOAT_BITS,
    SIGN,
    SIGNS,
    Sum,
    Sums,
    find_sums,
    fit_signed,
    less_zero,
    scaled,
    significant,
    zeros_of,
)
from relaxlite.passes.products.blocks import ManyRows, ManyRowsPlan, interleaved_panels, kept_parts
from relaxlite.passes.products.prologue import Replacement, symbols_of
from relaxlite.passes.products.register_tile import TileLoops
from relaxlite.target import Target

MIN_ROWS = 6  # fewer are not worth the pass over them
MAX_PANELS = 8  # that a row goes over
_BYTE = 255


def by_maddubs(tile: ManyRows, vectors: int, target: Target) -> ManyRowsPlan | str:
    """Tiles behind a pass over the rows; or why the loops do not fit them."""
    sums = find_sums(tile.update.value)
    if sums is None or tile.row is None:
        return "its sums are no sums of bytes"
    if not sums.symbols <= tile.of_rows:  # the pass goes over blocks and rows
        return "activations depend on more than the block and the row"
    bytes_of = _Bytes(tile, sums, fuses=target.has("fma"))
    block = bytes_of.instead_of_sum(tile.block)
    assert isinstance(block, Allocate)
    is_one_sum = len(sums.sums) == 1
    kind = InterleavedPanels if is_one_sum else RowPairs
    result = kind(*(getattr(replace(tile, block=block, least_rows=MIN_ROWS), f.name) for f in fields(tile)))
    if is_one_sum:
        vectors = interleaved_panels(
            tile.column.extent, tile.lanes, MAX_PANELS, max(target.cores, 1), least=MAX_PANELS // 2
        )
    return ManyRowsPlan(
        less(MIN_ROWS - 1, tile.row.extent), result, vectors, bytes_of.around if bytes_of.are_moved else None
    )


class _Bytes:
    """The rows' bytes, unsigned where zero points are taken off, as words."""

    def __init__(self, tile: ManyRows, found: Sums, *, fuses: bool) -> None:
        assert tile.row is not None
        self._fuses = fuses  # a product and an addition are rounded once
        self._value, self._found, self._last = tile.update.value, found, found.sums[-1]
        self._row, self._steps, self._origin = tile.row, tile.steps, tile.origin
        self._zeros = zeros_of(self._last)
        self._most = [max(zero, self._last.greatest - zero) for zero in self._zeros]
        self._count = tile.row.extent if tile.all_rows is None else tile.all_rows
        words = len(found.sums) * len(self._zeros)
        self._words = Buffer("unsigned", (tile.steps.extent, self._count, sym(words)), "int32")

    @property
    def are_moved(self) -> bool:
        is_signed = any(self._zeros) and fit_signed(self._zeros, self._last.greatest)
        return is_signed and max(self._most) * _BYTE <= MAX_OF_PAIRS

    def instead_of_sum(self, stmt: Stmt) -> Stmt:
        """A statement with another way to compute what a block of a row and a column comes to."""
        if not self.are_moved:
            return self._with(stmt, self._found.value, self._total([_one_chain(part) for part in self._found.sums]))
        codes = [less_zero(Scalar(c), z).value for c, z in zip(self._last.codes, self._zeros, strict=True)]
        total, added = self._total(self._moved(codes)), self._added(codes)
        part = scaled(self._value, self._found.value)
        if part is None or not self._is_exact(part.b):
            return self._with(stmt, self._found.value, total + added)
        offset = Scalar(part.b) * added.cast("float32")
        value = Intrinsic("fma", (total.cast("float32").value, part.b, offset.value), "float32")
        return self._with(stmt, part, Scalar(value))

    def _is_exact(self, scale: Value) -> bool:
        """Whether scale * total + scale * added, for a scale of the columns, is rounded once only: a float holds the
        second product, a multiple of SIGN * scale. It holds the total, too, as all scales have 8 bits or more."""
        bits = (DP4A_BYTES * sum(self._most) * (self._moved_by // SIGN)).bit_length()
        is_of_columns = self._row.var not in symbols_of(scale)
        return self._fuses and is_of_columns and significant(scale) + bits <= FLOAT_BITS

    def _with(self, stmt: Stmt, value: Value, other: Scalar) -> Stmt:
        return Replacement({id(value): other.value}).stmt(stmt)

    def _total(self, sums: Sequence[Scalar]) -> Scalar:
        return sums[0] if len(sums) == 1 else sums[0].binary("shift_left", self._found.shift) + sums[1]

    def _moved(self, codes: Sequence[Value]) -> list[Scalar]:
        """The sums of unsigned bytes times codes less zero points."""
        totals = []
        for number in range(len(self._found.sums)):
            total = Scalar(literal(0, "int32"))
            for q, (code, most) in enumerate(zip(codes, self._most, strict=True), number * len(codes)):
                x = Load(self._words, (self._steps.var, self._origin + self._row.var, sym(q)))
                total = _dot(total, x, _BYTE, code, most)
            totals.append(total)
        return totals

    def _added(self, codes: Sequence[Value]) -> Scalar:
        """What makes them the sums of signed bytes."""
        of_codes = zero = Scalar(literal(0, "int32"))
        for code, most in zip(codes, self._most, strict=True):
            of_codes = _dot(of_codes, literal(ONES, "int32"), 1, code, most)
        return zero - of_codes * self._moved_by

    @property
    def _moved_by(self) -> int:
        """How much greater a number of x is."""
        return SIGN if len(self._found.sums) == 1 else SIGN + (SIGN << self._found.shift)

    def around(self, tiles: Stmt) -> Stmt:
        """The tiles behind the pass over the rows, in one parallel loop over the blocks."""
        g, i, quads = SymVar("g", lower=0), SymVar("i", lower=0), len(self._zeros)
        here: dict[SymVar, SymExpr] = {self._steps.var: g, self._row.var: i - self._origin}
        parts = []
        for number, part in enumerate(self._found.sums):
            q = SymVar("q", lower=0, upper=quads - 1)
            word = Scalar(Substitute(here).value(part.word(q))).binary("xor", SIGNS)
            parts.append(For(q, sym(quads), Store(self._words, (g, i, number * quads + q), word.value), "vectorized"))
        rows = Substitute(fresh=True).stmt(For(g, self._steps.extent, For(i, self._count, seq(*parts)), "parallel"))
        return Allocate(self._words, seq(rows, tiles))


def _one_chain(part: Sum) -> Scalar:
    """A sum in one chain, as dot products do not wait for each other where pairs are added."""
    total = Scalar(part.start)
    for q, code in enumerate(part.codes):
        total = _dot(total, code, part.greatest, part.word(sym(q)), SIGN)
    return total


def _dot(total: Scalar, a: Value, most_a: int, b: Value, most_b: int) -> Scalar:
    bounds = literal(most_a, "int32"), literal(most_b, "int32")
    return Scalar(Intrinsic(DOT4_BYTES, (total.value, a, b, *bounds), "int32"))


class InterleavedPanels(ManyRows):
    """Tiles whose rows stay in registers, a block of each, while they go over some panels."""

    __slots__ = ()
    parts: ClassVar[LoopKind] = "serial"
    is_interleaved = False

    def kept_of_rows(self, value: Value) -> list[tuple[Buffer, Value]]:
        return kept_parts(value, self._row, self.column, (sym(self.lanes),), "row")

    def over_rows(self, loops: TileLoops, body: Store, of_rows: list[tuple[Buffer, Value]]) -> Stmt:
        row, part, lane = loops
        keep = Substitute(fresh=True).stmt(nest((lane,), seq(*(Store(b, (lane.var,), v) for b, v in of_rows))))
        code: Stmt = seq(keep, _in_twos(part, (lane,), body))
        for buffer, _ in of_rows:
            code = Allocate(buffer, code)
        return nest((replace(row, kind="serial"),), code)


class RowPairs(ManyRows):
    """Tiles whose rows go two at a time."""

    __slots__ = ()

    def over_rows(self, loops: TileLoops, body: Store, of_rows: list[tuple[Buffer, Value]]) -> Stmt:
        row, *across = loops
        return _in_twos(row, across, body)


def _in_twos(loop: For, inner: Sequence[For], body: Store) -> Stmt:
    """The body for each step of a loop, two at a time: the chains of dot products of both, then the rest of both."""
    chains = _chains(body.value)
    two, beside, rest = (SymVar(name, lower=0) for name in ("two", "beside", "rest"))
    shape, at = (sym(2), *(i.extent for i in inner)), (beside, *(i.var for i in inner))
    sums = [Buffer(f"sums{k}", shape, "int32", "local") for k in range(len(chains))]
    others = {id(chain): Load(buffer, at) for chain, buffer in zip(chains, sums, strict=True)}
    steps = [Store(buffer, at, chain) for buffer, chain in zip(sums, chains, strict=True)]

    def for_both(step: Store) -> Stmt:
        result = Substitute({loop.var: two * 2 + beside}).stmt(nest(inner, step))
        return Substitute(fresh=True).stmt(For(beside, sym(2), result, "unrolled"))

    code = seq(*map(for_both, [*steps, replace(body, value=Replacement(others).value(body.value))]))
    for buffer in sums:
        code = Allocate(buffer, code)
    twos, left = For(two, loop.extent // 2, code, "serial"), as_int(loop.extent % 2)
    if left == 0:
        return twos
    last = Substitute({loop.var: loop.extent // 2 * 2 + rest}, fresh=True).stmt(nest(inner, body))
    return seq(twos, For(rest, loop.extent % 2, last, "serial"))


def _chains(value: Value) -> list[Value]:
    """The chains of dot products in a value, each from its end."""
    if isinstance(value, Intrinsic) and value.name == DOT4_BYTES:
        return [value]
    chains = [chain for child in value_children(value) for chain in _chains(child)]
    return list({id(chain): chain for chain in chains}.values())
