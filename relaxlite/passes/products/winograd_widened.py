"""Winograd's inner product with quantized weights: each panel of w is dequantized once for all rows that read it.

    for k, j: w[k, j] = widened(q[k, j])                                          the stages that make w
    for i, j: { e = sum over t of ... x[i, 6*t + n], w[6*t + n, j] ...;  out[i, j] = f(e) }

The stages write w to memory; the schedule, for some steps t at a time, becomes

    for columns of a tile: { sums = 0
        for part: { panel[k, :] = widened(q[part + k, columns])
                    for row blocks: sums += ... x[i, part + k], panel[k, :] ... }
        out = f(sums) }

so that only a panel of w exists at a time, in the L1 cache (register_tile.over_panels). Dequantizing a panel is cheap
if its stored weights are in the cache: the tiles of the first row block prefetch those of the next panel, a line or a
few in each step.

Weights that other programs read as well may lie in panels of another width. All row blocks then prefetch, each some
rows, so that prefetches do not exceed the memory bandwidth. Figures: docs/measurements/cpus.md, winograd_widened.
"""

from __future__ import annotations

from relaxlite import dtypes
from relaxlite.ir.program import Allocate, Buffer, For, Load, Prefetch, Seq, Stmt, Store, seq
from relaxlite.ir.program_visitor import Substitute, loads
from relaxlite.ir.symbolic import SymExpr, SymVar, evaluate, smax, smin, sym
from relaxlite.passes.loops.pattern import perfect_nest
from relaxlite.passes.loops.transforms import GuardLoads, less, when_positive
from relaxlite.passes.products.panel_prefetch import LINE, NextPart
from relaxlite.passes.products.prologue import shared_steps
from relaxlite.passes.products.reduction import Block, over_panels, reduction_block
from relaxlite.passes.products.register_tile import PanelRows, Tile, column_pieces
from relaxlite.passes.products.winograd_loops import MIN_ROWS
from relaxlite.passes.products.winograd_tile import InnerTile, chained_terms
from relaxlite.passes.products.winograd_weights import TERMS
from relaxlite.records import dataclass
from relaxlite.target import Target

PART = 64  # steps of a panel: 24 KB of 16 columns


def find_widened(stmt: Allocate, target: Target) -> Widened | None:
    """Match stages that dequantize weights and the product that reads them; None: no match."""
    *makers, last = stmt.body.stmts if isinstance(stmt.body, Seq) else (stmt.body,)
    product_block = reduction_block(last) if makers else None
    if product_block is None:
        return None
    block = product_block.fused()
    column, body = block.vector_loop(), chained_terms(block, target)
    if column is None or body is None:
        return None
    return Widened(stmt.buffer, tuple(makers), block, body, column)


@dataclass(frozen=True, slots=True, eq=False)
class Widened:
    """A product by Winograd's inner product (`block`, chained in `body`) and the stages `makers` that compute its
    `w`."""

    w: Buffer
    makers: tuple[Stmt, ...]
    block: Block
    body: Allocate
    column: For

    @property
    def stored(self) -> tuple[Buffer, ...]:
        """Buffers of stored weights that have columns, to be packed into panels."""
        return tuple(dict.fromkeys(load.buffer for maker in self.makers for load in stored_columns(maker)))

    def tiled(self, tile: InnerTile, lanes: int, least_rows: int, *, is_packed: bool) -> Stmt:
        """Return the tiles of `least_rows` rows or more. `is_packed`: stored weights lie in panels as wide as a
        tile."""
        row = self.block.row_loop(self.column)
        least = min(least_rows, MIN_ROWS) if len(self.block.spatial) == 2 else 1  # one image may have few
        result = Tile(
            self.body, row, self.column, lanes, tile.rows, least_rows=least, row_unit=tile.row_unit, part=PART
        )
        pieces, width = column_pieces(self.column.extent, lanes, tile.vectors), tile.vectors * lanes
        outer_axes = [
            (loop.var, loop.extent) for loop in self.block.spatial if loop is not self.column and loop is not row
        ]

        def fill(panel: Buffer, steps: tuple[SymExpr, SymExpr], first: SymExpr) -> Stmt:
            start, end = steps[0] * TERMS, (steps[0] + steps[1]) * TERMS
            rows = (_fill_rows(maker, panel, (start, end), first, lanes) for maker in self.makers)
            return Substitute(fresh=True).stmt(seq(*rows))

        def prefetcher(start: SymExpr, first: SymExpr) -> NextPart:
            def lines(step: SymExpr, is_on: SymExpr) -> list[Prefetch]:
                later = (start + PART) * TERMS
                return _line_prefetches(self.makers[0], (later, first), width, step, is_on)

            def rows(step: SymExpr, block: SymExpr) -> list[Prefetch]:
                return _row_prefetches(self.makers[0], (start, first), width, block * PART + step)

            if is_packed:
                return NextPart(lines, SymVar("is_on", lower=0, upper=1), is_interleaved=False)
            return NextPart(rows, SymVar("block", lower=0), is_interleaved=True)

        return over_panels(result, [PanelRows(self.w, TERMS, prefetcher)], pieces, outer_axes, fill)


def stored_columns(maker: Stmt) -> list[Load]:
    """Return the loads of matrices in a stage."""
    return [load for load in loads(maker) if len(load.indices) > 1]


def _line_prefetches(
    maker: Stmt, corner: tuple[SymExpr, SymExpr], width: int, step: SymExpr, is_on: SymExpr
) -> list[Prefetch]:
    """Return the prefetches in step `step` of a part, of the stored weights of the part of w from `corner` on.

    The PART steps of a part prefetch all of it.
    """
    row, result = perfect_nest(maker).loops[0], list[Prefetch]()
    for load in stored_columns(maker):
        size, index = dtypes.itemsize(load.dtype), load.indices[-2]
        row_bytes = width * size
        count = evaluate(index, {row.var: PART * TERMS}) - evaluate(index, {row.var: 0})
        *before, begin, _ = Substitute({row.var: smin(corner[0], row.extent)}).indices(load.indices)
        for first in range(0, -(-count * row_bytes // LINE), PART):
            at = (first + step) * LINE
            column = corner[1] + at % row_bytes // size if row_bytes > LINE else corner[1]
            result.append(Prefetch(load.buffer, (*before, (begin + at // row_bytes) * is_on, column), 2))
    return result


def _row_prefetches(maker: Stmt, corner: tuple[SymExpr, SymExpr], width: int, number: SymExpr) -> list[Prefetch]:
    """Return the prefetches of the stored weights of row `number`, or the last row, of the next part of w.

    `corner`: the first step and the first column of this part. The last part is followed by the first part of the next
    columns.
    """
    row, next_start = perfect_nest(maker).loops[0], (corner[0] + PART) * TERMS
    is_behind = smin(smax(next_start - row.extent + 1, 0), 1)
    prefetched_row = smin(next_start * (1 - is_behind) + smin(number, PART * TERMS - 1), row.extent - 1)
    at, column = Substitute({row.var: prefetched_row}), corner[1] + is_behind * width
    return [Prefetch(load.buffer, (*at.indices(load.indices[:-1]), column), 2) for load in stored_columns(maker)]


def _fill_rows(maker: Stmt, panel: Buffer, ends: tuple[SymExpr, SymExpr], first: SymExpr, lanes: int) -> Stmt:
    """Return the code that fills `panel` with the rows of w from ends[0] to ends[1] that a stage computes."""
    (row, column), store = perfect_nest(maker).loops, perfect_nest(maker).body
    assert isinstance(store, Store)
    before = store.indices[0] - row.var  # rows of w that other stages compute
    begin, end = smax(ends[0] - before, 0), smin(ends[1] - before, row.extent)
    part, lane = SymVar("u", lower=0), SymVar("l", lower=0, upper=lanes - 1)
    panel_column = part * lanes + lane
    guard = GuardLoads(less(first + panel_column, column.extent), {part, lane})

    def vectors(number: SymExpr) -> Stmt:
        value = Substitute({row.var: begin + number, column.var: first + panel_column}).value(store.value)
        store_lane = Store(panel, (begin + number + before - ends[0], panel_column), guard.value(value))
        return For(part, panel.shape[1] // lanes, For(lane, sym(lanes), store_lane, "vectorized"), "unrolled")

    lines = [LINE // (dtypes.itemsize(load.dtype) * lanes) for load in stored_columns(maker)]
    unrolled_rows = max(
        shared_steps(store.value, row.var), *lines, 1
    )  # rows of one packed int32 or cache line are unrolled
    group, inner, count = SymVar("k", lower=0), SymVar("t", lower=0, upper=unrolled_rows - 1), end - begin
    block = For(inner, sym(unrolled_rows), vectors(group * unrolled_rows + inner), "unrolled")
    full_groups = For(group, count // unrolled_rows, block)
    tail = For(inner, count % unrolled_rows, vectors(count // unrolled_rows * unrolled_rows + inner))
    return seq(*when_positive(count // unrolled_rows, full_groups), *when_positive(count % unrolled_rows, tail))
