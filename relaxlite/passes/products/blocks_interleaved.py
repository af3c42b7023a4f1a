"""Products with blocked weights by row interleaving: dot products of several rows are issued in turn.

A chain of dot products fills a core's scheduler with dependent instructions. Where two threads share a core, as virtual
processors of clouds often do, each has half of the scheduler's entries; interleaved rows fill them with independent
instructions:

    for some rows: { s = starts; for group: for row, vector: s[row, vector] += group . x; for row, vector: e += f(s) }

Initial values are computed once for all rows. Where a product is only scaled, ORIGIN_BITS is added to them, so that the
bits of a sum are those of the float ORIGIN + sum, and scaling is one FMA (block_terms.py). The integers are the same,
so results are bit-identical. Figures: docs/measurements/cpus.md, interleaves_rows.
"""

from __future__ import annotations

from dataclasses import replace

from relaxlite.ir.intrinsics import BITCAST_TO_FLOAT32, DOT4_PACKED_U8S8
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

SUMS = 8  # vectors of sums that stay in registers beside the codes of two panels
MIN_DOTS = 8  # that a block adds to a vector; of fewer, chains are short
MIN_ROWS = 12  # of one sum, and half of two: fewer do not pay for the initial values


class InterleavedRows(ManyRows):
    """Tiles that issue the dot products of several rows in turn."""

    __slots__ = ()

    def over_rows(self, loops: TileLoops, body: Store, of_rows: list[tuple[Buffer, Value]]) -> Stmt:
        row, part, lane = loops
        sums = find_sums(body.value)
        row_by_row = super().over_rows(loops, body, of_rows)
        if sums is None or len(sums.sums) * len(sums.sums[-1].codes) < MIN_DOTS:
            return row_by_row
        count = SUMS // (len(sums.sums) * (as_int(part.extent) or SUMS))
        if count < 2:
            return row_by_row
        starts = Buffer("starts", (sym(self.most_rows),), "int32", "local")
        offsets = Buffer("offsets", (part.extent, lane.extent), "float32", "local")
        start, offset = Scalar(sums.sums[-1].start), Load(offsets, (part.var, lane.var))
        setup: list[Stmt] = []
        is_moved = self._is_scaled_at_once()
        if is_moved:
            start, scale = start + ORIGIN_BITS, scaled(body.value, sums.value)
            assert scale is not None
            moved = Store(offsets, offset.indices, (Scalar(scale.b) * -float(ORIGIN)).value)
            setup.append(nest((replace(part, kind="unrolled"), lane), moved))
        setup.append(_for_each_row(row, self.lanes, Store(starts, (row.var,), start.value)))

        group, member, rest = (SymVar(name, lower=0) for name in ("group", "beside", "rest"))
        num_groups, member_row = row.extent // count, group * count + member
        member_body = Substitute({row.var: member_row}).stmt(body)
        assert isinstance(member_body, Store)
        member_loops = For(member, sym(count), seq(), "unrolled"), part, lane
        code = [
            *setup,
            For(
                group,
                num_groups,
                _interleaved_rows(member_body, member_loops, Load(starts, (member_row,)), offset if is_moved else None),
            ),
        ]
        if as_int(row.extent % count) != 0:
            one = Substitute({row.var: num_groups * count + rest}).stmt(nest((part, lane), body))
            code.append(For(rest, row.extent % count, one))
        interleaved = Allocate(starts, seq(*map(Substitute(fresh=True).stmt, code)))
        if is_moved:
            interleaved = Allocate(offsets, interleaved)
        return select_version(less(row.extent, MIN_ROWS // len(sums.sums)), row_by_row, interleaved)

    def _is_scaled_at_once(self) -> bool:
        value = self.update.value
        sums = find_sums(value)
        most = None if sums is None else largest(sums)
        if sums is None or most is None or most >= MOVED:
            return False
        return scaled_at_once(value, sums.value, self._row.var) is not None


def _for_each_row(row: For, lanes: int, store: Store) -> Stmt:
    """Run a store for each row, vectorized along the rows."""
    vector, lane = SymVar("some", lower=0), SymVar("l", upper=lanes - 1)
    vector_row = vector * lanes + lane
    body = IfThenElse(less(vector_row, row.extent), Substitute({row.var: vector_row}).stmt(store))
    return For(vector, (row.extent + lanes - 1) // lanes, For(lane, sym(lanes), body, "vectorized"))


def _interleaved_rows(body: Store, loops: TileLoops, start: Value, offset: Value | None) -> Stmt:
    """Return the code that adds a block to the sums of the interleaved rows that `loops` enumerate.

    `offset`: -ORIGIN * scale, where the bits of sums are floats; None: sums are converted.
    """
    sums_of_block = find_sums(body.value)
    assert sums_of_block is not None
    at, shape = tuple(loop.var for loop in loops), tuple(loop.extent for loop in loops)
    sums = [Buffer(f"sums{k}", shape, "int32", "local") for k in range(len(sums_of_block.sums))]
    starts = [*(part.start for part in sums_of_block.sums[:-1]), start]
    steps = [[Store(buffer, at, value) for buffer, value in zip(sums, starts, strict=True)]]
    for q in range(len(sums_of_block.sums[-1].codes)):
        steps.append([])
        for buffer, part in zip(sums, sums_of_block.sums, strict=True):
            bounds = literal(part.greatest, "int32"), literal(SIGN, "int32")
            dot = Intrinsic(DOT4_PACKED_U8S8, (Load(buffer, at), part.codes[q], part.word(sym(q)), *bounds), "int32")
            steps[-1].append(Store(buffer, at, dot))
    *high, total = (Scalar(Load(buffer, at)) for buffer in sums)
    if high:
        total = high[0].binary("shift_left", sums_of_block.shift) + total
    replacements = {id(sums_of_block.value): total.value}
    if offset is not None:
        product = scaled(body.value, sums_of_block.value)
        assert product is not None
        as_float = Intrinsic(BITCAST_TO_FLOAT32, (total.value,), "float32")
        replacements = {id(product): Intrinsic("fma", (as_float, product.b, offset), "float32")}
    steps.append([replace(body, value=Replacement(replacements).value(body.value))])
    code = seq(*(Substitute(fresh=True).stmt(nest(loops, seq(*step))) for step in steps))
    for buffer in sums:
        code = Allocate(buffer, code)
    return code
