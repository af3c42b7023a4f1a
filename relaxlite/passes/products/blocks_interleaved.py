"""Products with quantized blocks, some rows at a time, in step: a dot product of each in turn.

A chain of dot products fills a core's scheduler with instructions that wait for each other. Where two threads share a
core, as virtual processors of clouds often do, each has half of the scheduler's places; rows in step give it as many
instructions that wait for nothing:

    for some rows: { s = starts; for quad: for row, vector: s[row, vector] += quad . x; for row, vector: e += f(s) }

Starts are computed once for all rows. Where a product is scaled at once they are moved, so that the bits of the sum are
those of a float ORIGIN greater, and scaling is one multiply-add (block_terms.py). The integers are the same, and so
are results, to the last bit. Figures: docs/measurements/cpus.md, interleaves_rows.
"""

from __future__ import annotations

from dataclasses import replace

from relaxlite.ir.intrinsics import BITS, DOT4_BYTES
from relaxlite.ir.ops.scalars import Scalar, literal
from relaxlite.ir.program import Allocate, Buffer, For, IfThenElse, Intrinsic, Load, Stmt, Store, Value, seq
from relaxlite.ir.program_visitor import Substitute
from relaxlite.ir.symbolic import SymVar, as_int, sym
from relaxlite.passes.loops.transforms import less, nest, select_version
from relaxlite.passes.products.block_terms import (
    MOVED,
    ORIGIN,
    ORIGIN_BITS,
    SIGN,
    find_sums,
    largest,
    scaled,
    scaled_at_once,
)
from relaxlite.passes.products.blocks import ManyRows
from relaxlite.passes.products.prologue import Replacement
from relaxlite.passes.products.register_tile import TileLoops

SUMS = 8  # vectors of them, which stay in registers beside the codes of two panels
MIN_DOTS = 8  # that a block adds to a vector; of fewer, chains are short
MIN_ROWS = 12  # of one sum, and half of two: fewer are not worth what comes before them


class InterleavedRows(ManyRows):
    """Tiles whose rows go some at a time."""

    __slots__ = ()

    def over_rows(self, loops: TileLoops, body: Store, of_rows: list[tuple[Buffer, Value]]) -> Stmt:
        row, part, lane = loops
        sums = find_sums(body.value)
        usual = super().over_rows(loops, body, of_rows)
        if sums is None or len(sums.sums) * len(sums.sums[-1].codes) < MIN_DOTS:
            return usual
        count = SUMS // (len(sums.sums) * (as_int(part.extent) or SUMS))
        if count < 2:
            return usual
        starts = Buffer("starts", (sym(self.most_rows),), "int32", "local")
        offsets = Buffer("offsets", (part.extent, lane.extent), "float32", "local")
        start, offset = Scalar(sums.sums[-1].start), Load(offsets, (part.var, lane.var))
        before: list[Stmt] = []
        is_moved = self._is_scaled_at_once()
        if is_moved:
            start, scale = start + ORIGIN_BITS, scaled(body.value, sums.value)
            assert scale is not None
            moved = Store(offsets, offset.indices, (Scalar(scale.b) * -float(ORIGIN)).value)
            before.append(nest((replace(part, kind="unrolled"), lane), moved))
        before.append(_of_all(row, self.lanes, Store(starts, (row.var,), start.value)))

        group, beside, rest = (SymVar(name, lower=0) for name in ("group", "beside", "rest"))
        whole, here = row.extent // count, group * count + beside
        some = Substitute({row.var: here}).stmt(body)
        assert isinstance(some, Store)
        many = For(beside, sym(count), seq(), "unrolled"), part, lane
        code = [
            *before,
            For(group, whole, _interleaved_rows(some, many, Load(starts, (here,)), offset if is_moved else None)),
        ]
        if as_int(row.extent % count) != 0:
            one = Substitute({row.var: whole * count + rest}).stmt(nest((part, lane), body))
            code.append(For(rest, row.extent % count, one))
        in_step = Allocate(starts, seq(*map(Substitute(fresh=True).stmt, code)))
        if is_moved:
            in_step = Allocate(offsets, in_step)
        return select_version(less(row.extent, MIN_ROWS // len(sums.sums)), usual, in_step)

    def _is_scaled_at_once(self) -> bool:
        value = self.update.value
        sums = find_sums(value)
        most = None if sums is None else largest(sums)
        if sums is None or most is None or most >= MOVED:
            return False
        return scaled_at_once(value, sums.value, self._row.var) is not None


def _of_all(row: For, lanes: int, store: Store) -> Stmt:
    """A store of each row, as vectors."""
    some, lane = SymVar("some", lower=0), SymVar("l", upper=lanes - 1)
    here = some * lanes + lane
    body = IfThenElse(less(here, row.extent), Substitute({row.var: here}).stmt(store))
    return For(some, (row.extent + lanes - 1) // lanes, For(lane, sym(lanes), body, "vectorized"))


def _interleaved_rows(body: Store, loops: TileLoops, start: Value, offset: Value | None) -> Stmt:
    """What a block adds of some rows, of which `loops` go over all. `offset`: what a sum whose bits are a float's adds
    to its product with the scale."""
    result = find_sums(body.value)
    assert result is not None
    at, shape = tuple(loop.var for loop in loops), tuple(loop.extent for loop in loops)
    sums = [Buffer(f"sums{k}", shape, "int32", "local") for k in range(len(result.sums))]
    begin = [*(part.start for part in result.sums[:-1]), start]
    steps = [[Store(buffer, at, value) for buffer, value in zip(sums, begin, strict=True)]]
    for q in range(len(result.sums[-1].codes)):
        steps.append([])
        for buffer, part in zip(sums, result.sums, strict=True):
            bounds = literal(part.greatest, "int32"), literal(SIGN, "int32")
            dot = Intrinsic(DOT4_BYTES, (Load(buffer, at), part.codes[q], part.word(sym(q)), *bounds), "int32")
            steps[-1].append(Store(buffer, at, dot))
    *high, total = (Scalar(Load(buffer, at)) for buffer in sums)
    if high:
        total = high[0].binary("shift_left", result.shift) + total
    instead = {id(result.value): total.value}
    if offset is not None:
        product = scaled(body.value, result.value)
        assert product is not None
        as_float = Intrinsic(BITS, (total.value,), "float32")
        instead = {id(product): Intrinsic("fma", (as_float, product.b, offset), "float32")}
    steps.append([replace(body, value=Replacement(instead).value(body.value))])
    code = seq(*(Substitute(fresh=True).stmt(nest(loops, seq(*step))) for step in steps))
    for buffer in sums:
        code = Allocate(buffer, code)
    return code
