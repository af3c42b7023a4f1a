"""Products with blocked weights by maddubs, pairs of bytes (SSSE3, AVX2; codegen/llvm/maddubs.py).

The correction for zero points is a sum of x for each block of a row, to be broadcast for every few columns. Instead,
zero points are subtracted from the codes, which become signed, and a pass over the rows adds SIGN to the bytes of x,
which become unsigned. The correction is then a sum of codes, one number of a block and a column, computed once a tile:

    sum of (code - zero) * x = sum of (code - zero) * (x + SIGN) - SIGN * sum of (code - zero)

The correction is folded into the FMA by a scale, where that does not round earlier. The integers are the same, so
results are bit-identical.

AVX2 has few vector registers. An 8-bit block of x stays in registers while a row runs over several *interleaved
panels*, whose unpacked codes lie in the L1 cache. Blocks of 12 or 16 bits do not fit; codes then stay in registers, and
rows are processed *in pairs*. The sums of two panels or rows are computed before their epilogues, as the reorder window
of a core is limited. Figures: docs/measurements/cpus.md, blocks_maddubs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import ClassVar

from relaxlite.ir.intrinsics import DOT4_PACKED_U8S8, MAX_MADDUBS_PRODUCT
from relaxlite.ir.ops.block_codes import BYTE_ONES, DP4A_BYTES
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
    scaled,
    significant_bits,
    subtract_zero_point,
    zeros_of,
)
from relaxlite.passes.products.blocks import ManyRows, ManyRowsPlan, interleaved_panels, kept_parts
from relaxlite.passes.products.prologue import Replacement, symbols_of
from relaxlite.passes.products.register_tile import TileLoops
from relaxlite.target import Target

MIN_ROWS = 6  # fewer do not pay for the pass over the rows
MAX_PANELS = 8  # interleaved panels of a tile
_BYTE = 255


def by_maddubs(tile: ManyRows, vectors: int, target: Target) -> ManyRowsPlan | str:
    """Plan maddubs tiles after a pass over the rows; or return the reason why the loops do not fit."""
    sums = find_sums(tile.update.value)
    if sums is None or tile.row is None:
        return "its sums are no sums of bytes"
    if not sums.symbols <= tile.of_rows:  # the pass goes over blocks and rows
        return "activations depend on more than the block and the row"
    activations = _ByteActivations(tile, sums, fuses=target.has("fma"))
    block = activations.replace_sum(tile.block)
    assert isinstance(block, Allocate)
    is_one_sum = len(sums.sums) == 1
    kind = InterleavedPanels if is_one_sum else RowPairs
    result = kind(*(getattr(replace(tile, block=block, least_rows=MIN_ROWS), f.name) for f in fields(tile)))
    if is_one_sum:
        vectors = interleaved_panels(
            tile.column.extent, tile.lanes, MAX_PANELS, max(target.cores, 1), least=MAX_PANELS // 2
        )
    return ManyRowsPlan(
        less(MIN_ROWS - 1, tile.row.extent), result, vectors, activations.around if activations.are_unsigned else None
    )


class _ByteActivations:
    """Activations as bytes in packed int32, unsigned where zero points are subtracted from the codes."""

    def __init__(self, tile: ManyRows, sums: Sums, *, fuses: bool) -> None:
        assert tile.row is not None
        self._fuses = fuses  # whether the target has FMA, which rounds once
        self._value, self._sums, self._last = tile.update.value, sums, sums.sums[-1]
        self._row, self._steps, self._origin = tile.row, tile.steps, tile.origin
        self._zeros = zeros_of(self._last)
        self._max_codes = [max(zero, self._last.greatest - zero) for zero in self._zeros]
        self._count = tile.row.extent if tile.all_rows is None else tile.all_rows
        num_groups = len(sums.sums) * len(self._zeros)
        self._bytes = Buffer("unsigned", (tile.steps.extent, self._count, sym(num_groups)), "int32")

    @property
    def are_unsigned(self) -> bool:
        is_signed = any(self._zeros) and fit_signed(self._zeros, self._last.greatest)
        return is_signed and max(self._max_codes) * _BYTE <= MAX_MADDUBS_PRODUCT

    def replace_sum(self, stmt: Stmt) -> Stmt:
        """Replace the integer sum of a block in a statement by maddubs products."""
        if not self.are_unsigned:
            return self._replace(
                stmt, self._sums.value, self._total([_one_chain(scaling) for scaling in self._sums.sums])
            )
        codes = [subtract_zero_point(Scalar(c), z).value for c, z in zip(self._last.codes, self._zeros, strict=True)]
        total, correction = self._total(self._unsigned_sums(codes)), self._correction(codes)
        scaling = scaled(self._value, self._sums.value)
        if scaling is None or not self._is_exact(scaling.b):
            return self._replace(stmt, self._sums.value, total + correction)
        offset = Scalar(scaling.b) * correction.cast("float32")
        value = Intrinsic("fma", (total.cast("float32").value, scaling.b, offset.value), "float32")
        return self._replace(stmt, scaling, Scalar(value))

    def _is_exact(self, scale: Value) -> bool:
        """Whether fma(total, scale, scale * correction) rounds once, for a scale of the columns.

        The second product, a multiple of SIGN * scale, must be exact in float32. The total is exact, as all scales have
        8 bits or more.
        """
        bits = (DP4A_BYTES * sum(self._max_codes) * (self._bias // SIGN)).bit_length()
        is_of_columns = self._row.var not in symbols_of(scale)
        return self._fuses and is_of_columns and significant_bits(scale) + bits <= FLOAT_BITS

    def _replace(self, stmt: Stmt, value: Value, replacement: Scalar) -> Stmt:
        return Replacement({id(value): replacement.value}).stmt(stmt)

    def _total(self, sums: Sequence[Scalar]) -> Scalar:
        return sums[0] if len(sums) == 1 else sums[0].binary("shift_left", self._sums.shift) + sums[1]

    def _unsigned_sums(self, codes: Sequence[Value]) -> list[Scalar]:
        """Return the sums of unsigned bytes of x times codes less zero points."""
        totals = []
        for number in range(len(self._sums.sums)):
            total = Scalar(literal(0, "int32"))
            for q, (code, max_code) in enumerate(zip(codes, self._max_codes, strict=True), number * len(codes)):
                x = Load(self._bytes, (self._steps.var, self._origin + self._row.var, sym(q)))
                total = _dot(total, x, _BYTE, code, max_code)
            totals.append(total)
        return totals

    def _correction(self, codes: Sequence[Value]) -> Scalar:
        """Return the correction from sums of unsigned bytes to sums of signed bytes of x."""
        code_sum = zero = Scalar(literal(0, "int32"))
        for code, max_code in zip(codes, self._max_codes, strict=True):
            code_sum = _dot(code_sum, literal(BYTE_ONES, "int32"), 1, code, max_code)
        return zero - code_sum * self._bias

    @property
    def _bias(self) -> int:
        """Amount by which an activation is increased."""
        return SIGN if len(self._sums.sums) == 1 else SIGN + (SIGN << self._sums.shift)

    def around(self, tiles: Stmt) -> Stmt:
        """Put the pass over the rows, one parallel loop over the blocks, before the tiles."""
        g, i, num_groups = SymVar("g", lower=0), SymVar("i", lower=0), len(self._zeros)
        at_row: dict[SymVar, SymExpr] = {self._steps.var: g, self._row.var: i - self._origin}
        loops = []
        for number, part in enumerate(self._sums.sums):
            q = SymVar("q", lower=0, upper=num_groups - 1)
            word = Scalar(Substitute(at_row).value(part.word(q))).binary("xor", SIGNS)
            loops.append(
                For(q, sym(num_groups), Store(self._bytes, (g, i, number * num_groups + q), word.value), "vectorized")
            )
        rows = Substitute(fresh=True).stmt(For(g, self._steps.extent, For(i, self._count, seq(*loops)), "parallel"))
        return Allocate(self._bytes, seq(rows, tiles))


def _one_chain(part: Sum) -> Scalar:
    """Return a sum in one chain: maddubs products do not depend on each other."""
    total = Scalar(part.start)
    for q, code in enumerate(part.codes):
        total = _dot(total, code, part.greatest, part.word(sym(q)), SIGN)
    return total


def _dot(total: Scalar, a: Value, most_a: int, b: Value, most_b: int) -> Scalar:
    bounds = literal(most_a, "int32"), literal(most_b, "int32")
    return Scalar(Intrinsic(DOT4_PACKED_U8S8, (total.value, a, b, *bounds), "int32"))


class InterleavedPanels(ManyRows):
    """Tiles that keep a block of a row in registers while the row runs over several panels."""

    __slots__ = ()
    parts: ClassVar[LoopKind] = "serial"
    is_interleaved = False

    def kept_of_rows(self, value: Value) -> list[tuple[Buffer, Value]]:
        return kept_parts(value, self._row, self.column, (sym(self.lanes),), "row")

    def over_rows(self, loops: TileLoops, body: Store, of_rows: list[tuple[Buffer, Value]]) -> Stmt:
        row, part, lane = loops
        load_row = Substitute(fresh=True).stmt(nest((lane,), seq(*(Store(b, (lane.var,), v) for b, v in of_rows))))
        code: Stmt = seq(load_row, _in_pairs(part, (lane,), body))
        for buffer, _ in of_rows:
            code = Allocate(buffer, code)
        return nest((replace(row, kind="serial"),), code)


class RowPairs(ManyRows):
    """Tiles that process rows in pairs."""

    __slots__ = ()

    def over_rows(self, loops: TileLoops, body: Store, of_rows: list[tuple[Buffer, Value]]) -> Stmt:
        row, *across = loops
        return _in_pairs(row, across, body)


def _in_pairs(loop: For, inner: Sequence[For], body: Store) -> Stmt:
    """Run a loop two steps at a time: the chains of dot products of both steps, then the rest of both."""
    chains = _chains(body.value)
    pair, member, rest = (SymVar(name, lower=0) for name in ("two", "beside", "rest"))
    shape, at = (sym(2), *(i.extent for i in inner)), (member, *(i.var for i in inner))
    sums = [Buffer(f"sums{k}", shape, "int32", "local") for k in range(len(chains))]
    replacements = {id(chain): Load(buffer, at) for chain, buffer in zip(chains, sums, strict=True)}
    steps = [Store(buffer, at, chain) for buffer, chain in zip(sums, chains, strict=True)]

    def for_both(step: Store) -> Stmt:
        result = Substitute({loop.var: pair * 2 + member}).stmt(nest(inner, step))
        return Substitute(fresh=True).stmt(For(member, sym(2), result, "unrolled"))

    code = seq(*map(for_both, [*steps, replace(body, value=Replacement(replacements).value(body.value))]))
    for buffer in sums:
        code = Allocate(buffer, code)
    pairs, remainder = For(pair, loop.extent // 2, code, "serial"), as_int(loop.extent % 2)
    if remainder == 0:
        return pairs
    tail = Substitute({loop.var: loop.extent // 2 * 2 + rest}, fresh=True).stmt(nest(inner, body))
    return seq(pairs, For(rest, loop.extent % 2, tail, "serial"))


def _chains(value: Value) -> list[Value]:
    """Return the outermost dot product of each chain in a value."""
    if isinstance(value, Intrinsic) and value.name == DOT4_PACKED_U8S8:
        return [value]
    chains = [chain for child in value_children(value) for chain in _chains(child)]
    return list({id(chain): chain for chain in chains}.values())
