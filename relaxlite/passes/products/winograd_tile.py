"""Register tiles of sums of several products per step: Winograd's inner product (winograd_products.py).

**Quantized weights**: each panel of w is dequantized once for all rows that read it.

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

from collections.abc import Collection
from dataclasses import replace

from relaxlite import dtypes
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.intrinsics import DOT2_PACKED_INT16
from relaxlite.ir.program import (
    Allocate,
    Binary,
    Buffer,
    For,
    Intrinsic,
    Load,
    Prefetch,
    Seq,
    Stmt,
    Store,
    Unary,
    Value,
    seq,
)
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, loads
from relaxlite.ir.symbolic import SymExpr, SymVar, evaluate, product, smax, smin, sym
from relaxlite.passes.loops.pattern import perfect_nest
from relaxlite.passes.loops.transforms import GuardLoads, less, nest, select_version, when_positive
from relaxlite.passes.products.choice import ScheduleChoice
from relaxlite.passes.products.panel_prefetch import CACHE_LINE_BYTES, NextPart, PanelPrefetch
from relaxlite.passes.products.prepared_rows import ROW_UNIT, TERMS
from relaxlite.passes.products.prologue import shared_steps
from relaxlite.passes.products.reduction import (
    ReductionBlock,
    RowShape,
    over_panels,
    panel_widths,
    reduction_block,
    tiled,
)
from relaxlite.passes.products.register_tile import PanelRows, Tile, column_pieces
from relaxlite.passes.products.winograd_products import MIN_ROWS
from relaxlite.records import dataclass
from relaxlite.target import Target

ORDINARY_ROWS = 4  # of tiles of the fallback, the ordinary product, which computes few rows: less code
STEPS_AHEAD = 32  # prefetch distance within a tile's own panel of weights
FEW_ROWS, FEW_VECTORS = 2, 4  # of tiles of prepared rows too few for sums one vector wide to hide latencies
PART = 64  # steps of a panel: 24 KB of 16 columns

_ANALYZER = Analyzer()


@dataclass(frozen=True, slots=True)
class InnerTile:
    """The shape of a register tile of Winograd's inner product.

    It leaves registers for three vectors of weights, or two times three, and for sums of operands.
    """

    rows: int
    vectors: int
    row_unit: int  # heights are multiples of this: three heights to compile, where 1 would take 11 or 5
    prefetches_next: (
        bool  # whether tiles prefetch the next panel, where two fit into 5/8 of the L2 cache; else steps of their own
    )
    together: int | None = None  # products of a step that all elements add before they add the next; None: all

    @classmethod
    def of(cls, target: Target) -> InnerTile:
        """Return the shape for a target.

        One vector where two loads issue for each FMA and addition: an element of x is then a memory operand, as a
        broadcast to a register would take an entry of the adders' and multipliers' queues. Else two vectors, which
        share the register of an element of x; all rows then add the first pair and its neighbour before the second,
        so that half of the weights occupy registers at a time. Figures: docs/measurements/cpus.md, winograd_tile.
        """
        if target.cpu_facts.loads_per_fma > 1:
            return cls(20, 1, ROW_UNIT, prefetches_next=False)
        return cls(10, 2, ROW_UNIT // 2, prefetches_next=True, together=2)

    def asks(self, weights: Buffer, target: Target) -> PanelPrefetch:
        """Return how tiles prefetch panels of the weights."""
        panel_bytes = int(weights.shape[0]) * self.vectors * target.vector_bits // 8
        if self.prefetches_next and 2 * panel_bytes <= target.l2_bytes * 5 // 8:
            return PanelPrefetch(0, for_next=True)
        return PanelPrefetch(STEPS_AHEAD, for_next=False, cache=2)


def blocks_together(weights: Buffer, target: Target) -> int | None:
    """Return how many row blocks run along a panel before the next panel, so that their elements stay in the L2 cache.

    1 where the weights fit into the L2 cache; None, all row blocks, where the weights come from memory.
    """
    weight_bytes, block_bytes = product(weights.shape).const * 4, InnerTile.of(target).rows * int(weights.shape[0]) * 4
    if weight_bytes > target.l3_bytes // 2:
        return None
    return 1 if weight_bytes <= target.l2_bytes // 2 else max(2, target.l2_bytes // 4 // block_bytes)


def chained_terms(block: ReductionBlock, target: Target) -> Allocate | None:
    """Rewrite a sum of several products per step as a chain of FMAs or dot products; None: it is no such sum."""
    update, init, reduced, *final = block.update, *block.stmts
    terms = _terms(update.value)
    if block.is_pair or update.combine != "add" or len(terms) < 2:
        return None
    together = InnerTile.of(target).together or len(terms)
    chain: list[Stmt] = []
    for start in range(0, len(terms), together):
        total: Value = Load(update.buffer, update.indices)
        for is_added, term in terms[start : start + together]:
            if isinstance(term, Intrinsic) and term.name == DOT2_PACKED_INT16 and is_added:
                total = replace(term, args=(total, *term.args[1:]))
                continue
            if not isinstance(term, Binary) or term.op != "mul":
                return None
            factor = term.a if is_added else Unary("neg", term.a)
            total = Intrinsic("fma", (factor, term.b, total), update.buffer.dtype)
        chain.append(Store(update.buffer, update.indices, total))
    chained = nest(perfect_nest(reduced).loops, seq(*chain))
    return replace(block.body, body=_Simplify().stmt(Seq((init, chained, *final))))


def tiled_inner(
    block: ReductionBlock,
    column: For,
    body: Allocate,
    lanes: int,
    target: Target,
    *,
    inputs: Collection[Buffer],
    least: int,
    most: int | None,
) -> tuple[Stmt, dict[Buffer, int]]:
    """Return the tiles of `body`, the result of `chained_terms`, and the widths of the panels of operands.

    `inputs`: of the program. `least`: minimum number of prepared rows. `most`: maximum rows of a tile of other rows.
    """
    registers, tile = target.num_vector_registers, InnerTile.of(target)
    (weights,) = {load.buffer for load in block.loads() if load.indices[-1] is column.var}
    is_prepared = {load.buffer for load in block.loads()} & set(inputs) <= {weights}
    choice = ScheduleChoice(rows=tile.rows if is_prepared else most, vectors=tile.vectors)
    prefetch, blocks_per_group = tile.asks(weights, target), blocks_together(weights, target)
    panels = panel_widths(block, column, lanes, registers, choice)
    has_all_rows = len(block.spatial) == 2  # else rows of one image, of which there may be few
    min_rows = least if is_prepared and has_all_rows else 1
    rows = RowShape(min(min_rows, MIN_ROWS), tile.row_unit if is_prepared else 1, blocks_per_group)
    many_rows = tiled(block, column, lanes, registers, body, choice, asks=prefetch, shape=rows)
    row = block.row_loop(column)
    if not is_prepared or min_rows > FEW_ROWS or row is None:
        return many_rows, panels
    few_rows = tiled(block, column, lanes, registers, body, ScheduleChoice(rows=FEW_ROWS, vectors=FEW_VECTORS))
    return select_version(less(row.extent, FEW_ROWS + 1), few_rows, many_rows), panels


def _terms(value: Value) -> list[tuple[bool, Value]]:
    """Return the terms of a sum, each with whether it is added or subtracted."""
    if not isinstance(value, Binary) or value.op not in ("add", "sub"):
        return [(True, value)]
    return [*_terms(value.a), (value.op == "add", value.b)]


class _Simplify(ProgramRewriter):
    """Simplifies indices of fused loops: t // m * m + t % m becomes t."""

    def index(self, expr: SymExpr) -> SymExpr:
        return _ANALYZER.simplify(expr)


# Quantized weights


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
    block: ReductionBlock
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
        for first in range(0, -(-count * row_bytes // CACHE_LINE_BYTES), PART):
            at = (first + step) * CACHE_LINE_BYTES
            column = corner[1] + at % row_bytes // size if row_bytes > CACHE_LINE_BYTES else corner[1]
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

    lines = [CACHE_LINE_BYTES // (dtypes.itemsize(load.dtype) * lanes) for load in stored_columns(maker)]
    unrolled_rows = max(
        shared_steps(store.value, row.var), *lines, 1
    )  # rows of one packed int32 or cache line are unrolled
    group, inner, count = SymVar("k", lower=0), SymVar("t", lower=0, upper=unrolled_rows - 1), end - begin
    block = For(inner, sym(unrolled_rows), vectors(group * unrolled_rows + inner), "unrolled")
    full_groups = For(group, count // unrolled_rows, block)
    tail = For(inner, count % unrolled_rows, vectors(count // unrolled_rows * unrolled_rows + inner))
    return seq(*when_positive(count // unrolled_rows, full_groups), *when_positive(count % unrolled_rows, tail))
