"""Products of blocked weights and 12-bit activations by int16 pairs, where additions are free.

As bytes, the high ones times 16 plus the low ones, activations take two dot products for each four codes. As int16 they
take as many, but int16 leaves bits for additions, and so for Winograd's inner product (winograd_products.py), which is
exact in integers: two dot products and two additions for about six codes. With c the codes of a column and
x' = x + ORIGIN the activations of a row, offset to start at 0, so that one addition of int32 adds two int16,

    sum of x*c = sum over pairs of (c2 + x1') * (c1 + x2') + sum over the others of x'*c
                 - sum of x1'*x2' - sum of c1*c2 - ORIGIN * sum of c

A pass over the rows computes x' and the terms that depend on row and block; each tile computes the terms that depend on
column and block once. A pair is the two even and the two odd codes of a dp4a group. The integers equal those of the
dp4a sums, so results are bit-identical. The number of pairs and of chains is measured; processors that issue one load
for each FMA stay with bytes (docs/measurements/cpus.md, blocks_int16).
"""

from __future__ import annotations

from dataclasses import replace

from relaxlite.ir.ops.scalars import Scalar, literal, select
from relaxlite.ir.program import Allocate, Buffer, For, IndexValue, Load, Stmt, Store, Value, seq
from relaxlite.ir.program_visitor import Substitute
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, sym
from relaxlite.passes.loops.transforms import less
from relaxlite.passes.products.block_terms import Sums, find_sums
from relaxlite.passes.products.blocks import ManyRows, ManyRowsPlan
from relaxlite.passes.products.int16_products import dot
from relaxlite.passes.products.prologue import Replacement
from relaxlite.target import Target

MIN_ROWS = 12  # fewer do not pay for the pass over the rows and the sums of codes of each tile
MIN_COLUMNS = 512  # that share the pass
MAX_DP4A_GROUPS = 8  # of a block; its codes take twice as many vector registers
LOW_BITS = 4
ORIGIN = (128 << LOW_BITS) + 128  # both bytes of an activation are offset by 128

_EVEN, _SIGNS = 0x00FF00FF, 0x00800080
_BOTH = ORIGIN | ORIGIN << 16


def by_int16_pairs(tile: ManyRows, vectors: int, target: Target) -> ManyRowsPlan | str:
    """Plan tiles one vector wide after a pass over the rows; or return the reason why the loops do not fit."""
    sums = find_sums(tile.update.value)
    if sums is None or sums.shift != LOW_BITS or tile.row is None:
        return f"activations are not of {8 + LOW_BITS} bits"
    if len(sums.sums[-1].codes) > MAX_DP4A_GROUPS:
        return f"the codes of a block do not stay in registers: {4 * len(sums.sums[-1].codes)} of them"
    if (as_int(tile.column.extent) or MIN_COLUMNS) < MIN_COLUMNS:
        return f"{tile.column.extent} columns are too few for a pass over the rows"
    if not sums.symbols <= tile.of_rows:  # the pass goes over blocks and rows
        return "activations depend on more than the block and the row"
    prepared_rows = _Int16Activations(tile, sums)
    block = Replacement({id(sums.value): prepared_rows.sum()}).stmt(tile.block)
    assert isinstance(block, Allocate)
    result = replace(tile, block=block, least_rows=MIN_ROWS)
    return ManyRowsPlan(less(MIN_ROWS - 1, tile.row.extent), result, 1, prepared_rows.around)


class _Int16Activations:
    """Activations as int16 pairs in int32, and the correction that the sums of each block start from."""

    def __init__(self, tile: ManyRows, sums: Sums) -> None:
        assert tile.row is not None
        self._row, self._steps, self._origin = tile.row, tile.steps, tile.origin
        self._count = tile.row.extent if tile.all_rows is None else tile.all_rows
        self._high, self._low = sums.sums
        self._num_winograd_groups = round(
            2 * len(self._low.codes) / 3
        )  # dp4a groups by Winograd: as many additions as dot products
        blocks, rows, dp4a_groups = tile.steps.extent, self._count, len(self._low.codes)
        self._int16_pairs = Buffer("halves", (blocks, rows, sym(2 * dp4a_groups)), "int32")
        self._corrections = Buffer("starts", (blocks, rows), "int32")

    def sum(self) -> Value:
        """Return the integer sum of one block for a row and a column."""
        at = (self._steps.var, self._origin + self._row.var)
        dp4a_groups = [Scalar(code) for code in self._low.codes]
        even, odd = (
            [dp4a_group & _EVEN for dp4a_group in dp4a_groups],
            [dp4a_group.binary("shift_right", 8) & _EVEN for dp4a_group in dp4a_groups],
        )
        num_groups, correction, code_sum = len(dp4a_groups), Scalar(literal(0, "int32")), even[0] + odd[0]
        for c1, c2 in zip(even[1:], odd[1:], strict=True):
            code_sum = code_sum + c1 + c2
        for c1, c2 in zip(even[: self._num_winograd_groups], odd[: self._num_winograd_groups], strict=True):
            correction = dot(correction, c1, c2)
        correction = dot(correction, code_sum, Scalar(literal(_BOTH, "int32")))
        chains = [Scalar(self._corrections[at]) - correction, Scalar(literal(0, "int32"))]
        for q, (c1, c2) in enumerate(zip(even, odd, strict=True)):
            x1, x2 = (Scalar(Load(self._int16_pairs, (*at, sym(k)))) for k in (q, num_groups + q))
            if q < self._num_winograd_groups:
                chains[q % 2] = dot(chains[q % 2], c2 + x1, c1 + x2)
            else:
                chains = [dot(chains[0], c1, x1), dot(chains[1], c2, x2)]
        return (chains[0] + chains[1]).value

    def around(self, tiles: Stmt) -> Stmt:
        """Put the pass over the rows, one parallel loop over the blocks, before the tiles."""
        g, i, dp4a_groups = SymVar("g", lower=0), SymVar("i", lower=0), len(self._low.codes)
        q = SymVar("q", lower=0, upper=dp4a_groups - 1)
        at_row: dict[SymVar, SymExpr] = {self._steps.var: g, self._row.var: i - self._origin}
        even, odd = self._activations(at_row, q)
        pair_sum = Buffer("pairs", (), "int32", "local")
        product = select(Scalar(IndexValue(q, "int32")).compare("lt", self._num_winograd_groups), dot(0, even, odd), 0)
        start = Scalar(Substitute(at_row).value(self._low.start)) - Scalar(pair_sum[()])
        group_body = seq(
            Store(self._int16_pairs, (g, i, sym(q)), even.value),
            Store(self._int16_pairs, (g, i, q + dp4a_groups), odd.value),
            Store(pair_sum, (), product.value, "add"),
        )
        body: Stmt = seq(
            Store(pair_sum, (), literal(0, "int32")),
            For(q, sym(dp4a_groups), group_body, "vectorized"),
            Store(self._corrections, (g, i), start.value),
        )
        rows = For(i, self._count, Allocate(pair_sum, body))
        code = seq(Substitute(fresh=True).stmt(For(g, self._steps.extent, rows, "parallel")), tiles)
        return Allocate(self._int16_pairs, Allocate(self._corrections, code))

    def _activations(self, at_row: dict[SymVar, SymExpr], q: SymVar) -> tuple[Scalar, Scalar]:
        """Return the activations, plus ORIGIN, for the even and for the odd codes of dp4a group `q`."""
        high, low = (Scalar(Substitute(at_row).value(part.word(q))) for part in (self._high, self._low))

        def int16_pair(shift: int) -> Scalar:
            parts = [(word.binary("shift_right", shift) if shift else word) & _EVEN for word in (high, low)]
            first, second = (part.binary("xor", _SIGNS) for part in parts)
            return first.binary("shift_left", LOW_BITS) + second

        return int16_pair(0), int16_pair(8)
