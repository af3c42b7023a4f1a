"""Products with quantized blocks and activations of 12 bits in words of 16 bits, where additions take no time.

A sum of bytes, high ones times 16 and low ones, takes two dot products for each four codes. As words of 16 bits it
takes as many, but these have room for additions, and so for Winograd's inner product (winograd_products.py), which is
exact in integers: two dot products and two additions for each six codes or so. With c the codes of a column and
x' = x + ORIGIN the numbers of a row, moved to start at 0, so that one addition of int32 adds two words,

    sum of x*c = sum over pairs of (c2 + x1') * (c1 + x2') + sum over the others of x'*c
                 - sum of x1'*x2' - sum of c1*c2 - ORIGIN * sum of c

A pass over the rows makes x' and what is one number of a row and block; what is one of a column and block, each tile
computes once. A pair is the even and the odd codes of a quad, two words of each. The integers are those of the usual
sums, and so are the results, to the last bit. More pairs or fewer are slower, and so are sums in one chain or in more
than two. Processors that issue one load for each FMA stay with bytes (docs/measurements/cpus.md, blocks_int16).
"""

from __future__ import annotations

from dataclasses import replace

from relaxlite.ir.intrinsics import DOT2_INT16
from relaxlite.ir.ops.scalars import Scalar, literal, select
from relaxlite.ir.program import Allocate, Buffer, For, IndexValue, Intrinsic, Load, Stmt, Store, Value, seq
from relaxlite.ir.program_visitor import Substitute
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, sym
from relaxlite.passes.loops.transforms import less
from relaxlite.passes.products.block_terms import Sums, find_sums
from relaxlite.passes.products.blocks import ManyRows, ManyRowsPlan
from relaxlite.passes.products.prologue import Replacement
from relaxlite.target import Target

MIN_ROWS = 12  # fewer are not worth the pass over them, and what tiles do once
MIN_COLUMNS = 512  # that share the pass
MAX_DP4A_GROUPS = 8  # of a block, twice as many vectors of codes stay in registers
LOW_BITS = 4
ORIGIN = (128 << LOW_BITS) + 128  # as both bytes of a number are moved by 128

_EVEN, _SIGNS = 0x00FF00FF, 0x00800080
_BOTH = ORIGIN | ORIGIN << 16


def by_int16_pairs(tile: ManyRows, vectors: int, target: Target) -> ManyRowsPlan | str:
    """Tiles one vector wide, behind a pass over the rows; or why the loops do not fit them."""
    sums = find_sums(tile.update.value)
    if sums is None or sums.shift != LOW_BITS or tile.row is None:
        return f"activations are not of {8 + LOW_BITS} bits"
    if len(sums.sums[-1].codes) > MAX_DP4A_GROUPS:
        return f"the codes of a block do not stay in registers: {4 * len(sums.sums[-1].codes)} of them"
    if (as_int(tile.column.extent) or MIN_COLUMNS) < MIN_COLUMNS:
        return f"{tile.column.extent} columns are too few for a pass over the rows"
    if not sums.symbols <= tile.of_rows:  # the pass goes over blocks and rows
        return "activations depend on more than the block and the row"
    rows = _Rows(tile, sums)
    block = Replacement({id(sums.value): rows.sum()}).stmt(tile.block)
    assert isinstance(block, Allocate)
    result = replace(tile, block=block, least_rows=MIN_ROWS)
    return ManyRowsPlan(less(MIN_ROWS - 1, tile.row.extent), result, 1, rows.around)


class _Rows:
    """The rows' numbers as words, and what is to be added to the sums of each block."""

    def __init__(self, tile: ManyRows, found: Sums) -> None:
        assert tile.row is not None
        self._row, self._steps, self._origin = tile.row, tile.steps, tile.origin
        self._count = tile.row.extent if tile.all_rows is None else tile.all_rows
        self._high, self._low = found.sums
        self._pairs = round(2 * len(self._low.codes) / 3)  # quads: then there are as many additions as dot products
        blocks, rows, quads = tile.steps.extent, self._count, len(self._low.codes)
        self._words = Buffer("halves", (blocks, rows, sym(2 * quads)), "int32")
        self._starts = Buffer("starts", (blocks, rows), "int32")

    def sum(self) -> Value:
        """What a block of a row and a column comes to."""
        at = (self._steps.var, self._origin + self._row.var)
        quads = [Scalar(code) for code in self._low.codes]
        even, odd = [quad & _EVEN for quad in quads], [quad.binary("shift_right", 8) & _EVEN for quad in quads]
        count, taken, total = len(quads), Scalar(literal(0, "int32")), even[0] + odd[0]
        for c1, c2 in zip(even[1:], odd[1:], strict=True):
            total = total + c1 + c2
        for c1, c2 in zip(even[: self._pairs], odd[: self._pairs], strict=True):
            taken = _dot(taken, c1, c2)
        taken = _dot(taken, total, Scalar(literal(_BOTH, "int32")))
        chains = [Scalar(self._starts[at]) - taken, Scalar(literal(0, "int32"))]
        for q, (c1, c2) in enumerate(zip(even, odd, strict=True)):
            x1, x2 = (Scalar(Load(self._words, (*at, sym(k)))) for k in (q, count + q))
            if q < self._pairs:
                chains[q % 2] = _dot(chains[q % 2], c2 + x1, c1 + x2)
            else:
                chains = [_dot(chains[0], c1, x1), _dot(chains[1], c2, x2)]
        return (chains[0] + chains[1]).value

    def around(self, tiles: Stmt) -> Stmt:
        """The tiles behind the pass over the rows, in one parallel loop over the blocks."""
        g, i, quads = SymVar("g", lower=0), SymVar("i", lower=0), len(self._low.codes)
        q = SymVar("q", lower=0, upper=quads - 1)
        here: dict[SymVar, SymExpr] = {self._steps.var: g, self._row.var: i - self._origin}
        even, odd = self._numbers(here, q)
        total = Buffer("pairs", (), "int32", "local")
        product = select(Scalar(IndexValue(q, "int32")).compare("lt", self._pairs), _dot(0, even, odd), 0)
        start = Scalar(Substitute(here).value(self._low.start)) - Scalar(total[()])
        lanes = seq(
            Store(self._words, (g, i, sym(q)), even.value),
            Store(self._words, (g, i, q + quads), odd.value),
            Store(total, (), product.value, "add"),
        )
        body: Stmt = seq(
            Store(total, (), literal(0, "int32")),
            For(q, sym(quads), lanes, "vectorized"),
            Store(self._starts, (g, i), start.value),
        )
        rows = For(i, self._count, Allocate(total, body))
        code = seq(Substitute(fresh=True).stmt(For(g, self._steps.extent, rows, "parallel")), tiles)
        return Allocate(self._words, Allocate(self._starts, code))

    def _numbers(self, here: dict[SymVar, SymExpr], q: SymVar) -> tuple[Scalar, Scalar]:
        """The numbers of a quad that its even codes are multiplied by, from ORIGIN on, and those of the odd ones."""
        high, low = (Scalar(Substitute(here).value(part.word(q))) for part in (self._high, self._low))

        def halves(shift: int) -> Scalar:
            parts = [(word.binary("shift_right", shift) if shift else word) & _EVEN for word in (high, low)]
            first, second = (part.binary("xor", _SIGNS) for part in parts)
            return first.binary("shift_left", LOW_BITS) + second

        return halves(0), halves(8)


def _dot(total: Scalar | int, a: Scalar, b: Scalar) -> Scalar:
    start = literal(total, "int32") if isinstance(total, int) else total.value
    return Scalar(Intrinsic(DOT2_INT16, (start, a.value, b.value), "int32"))
