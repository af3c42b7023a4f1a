"""Inner products with weights that are stored in few bits: a panel of w is made once for all rows that go along it.

    for k, j: w[k, j] = widened(q[k, j])                                          the stages that make w
    for i, j: { e = sum over t of ... x[i, 6*t + n], w[6*t + n, j] ...;  out[i, j] = f(e) }

w as it is written there, in memory, is what these stages mean. It becomes, with some steps t at a time,

    for columns of a tile: { sums = 0
        for part: { panel[k, :] = widened(q[part + k, columns])
                    for row blocks: sums += ... x[i, part + k], panel[k, :] ... }
        out = f(sums) }

so that no more of w than a panel is ever there, and that stays in the first cache (register_tile.over_panels). A panel
is made in no time, if what it is made of is there: the tiles of the first row block ask for that of the next panel, a
line or a few in each step.

Weights that other programs read as well may lie in panels of another width. So that no more lines are asked for at a
time than memory gives, all row blocks then ask, each for some rows. Figures:
docs/measurements/cpus.md, winograd_widened.
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
    """The stages and the product behind them; None: these are others."""
    *makers, last = stmt.body.stmts if isinstance(stmt.body, Seq) else (stmt.body,)
    result = reduction_block(last) if makers else None
    if result is None:
        return None
    block = result.fused()
    column, body = block.vector_loop(), chained_terms(block, target)
    if column is None or body is None:
        return None
    return Widened(stmt.buffer, tuple(makers), block, body, column)


@dataclass(frozen=True, slots=True, eq=False)
class Widened:
    """`block`, whose sums add term by term in `body`, and what makes the matrix `w` of which it reads rows."""

    w: Buffer
    makers: tuple[Stmt, ...]
    block: Block
    body: Allocate
    column: For

    @property
    def stored(self) -> tuple[Buffer, ...]:
        """What of the weights lies in memory column by column."""
        return tuple(dict.fromkeys(load.buffer for maker in self.makers for load in stored_columns(maker)))

    def tiled(self, tile: InnerTile, lanes: int, least_rows: int, *, is_packed: bool) -> Stmt:
        """Of so many rows or more. `is_packed`: what is stored lies in panels as wide as a tile."""
        row = self.block.row_loop(self.column)
        least = min(least_rows, MIN_ROWS) if len(self.block.spatial) == 2 else 1  # of one picture there may be few
        result = Tile(
            self.body, row, self.column, lanes, tile.rows, least_rows=least, row_unit=tile.row_unit, part=PART
        )
        pieces, width = column_pieces(self.column.extent, lanes, tile.vectors), tile.vectors * lanes
        others = [(loop.var, loop.extent) for loop in self.block.spatial if loop is not self.column and loop is not row]

        def fill(panel: Buffer, steps: tuple[SymExpr, SymExpr], first: SymExpr) -> Stmt:
            start, end = steps[0] * TERMS, (steps[0] + steps[1]) * TERMS
            rows = (_rows(maker, panel, (start, end), first, lanes) for maker in self.makers)
            return Substitute(fresh=True).stmt(seq(*rows))

        def ask(start: SymExpr, first: SymExpr) -> NextPart:
            def lines(step: SymExpr, is_on: SymExpr) -> list[Prefetch]:
                later = (start + PART) * TERMS
                return _lines(self.makers[0], (later, first), width, step, is_on)

            def rows(step: SymExpr, block: SymExpr) -> list[Prefetch]:
                return _row_prefetches(self.makers[0], (start, first), width, block * PART + step)

            if is_packed:
                return NextPart(lines, SymVar("is_on", lower=0, upper=1), is_interleaved=False)
            return NextPart(rows, SymVar("block", lower=0), is_interleaved=True)

        return over_panels(result, [PanelRows(self.w, TERMS, ask)], pieces, others, fill)


def stored_columns(maker: Stmt) -> list[Load]:
    """What a stage reads of matrices."""
    return [load for load in loads(maker) if len(load.indices) > 1]


def _lines(maker: Stmt, corner: tuple[SymExpr, SymExpr], width: int, step: SymExpr, is_on: SymExpr) -> list[Prefetch]:
    """What step `step` of a part asks for of what the part of w from `corner` on is made of, PART steps having asked
    for all of it."""
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
    """Of the next part of w, what its row of this number, or the last one, is made of. `corner`: the first step of this
    part, and its first column. Behind the last part comes the first one of the columns beside these."""
    row, later = perfect_nest(maker).loops[0], (corner[0] + PART) * TERMS
    is_behind = smin(smax(later - row.extent + 1, 0), 1)
    asked = smin(later * (1 - is_behind) + smin(number, PART * TERMS - 1), row.extent - 1)
    at, column = Substitute({row.var: asked}), corner[1] + is_behind * width
    return [Prefetch(load.buffer, (*at.indices(load.indices[:-1]), column), 2) for load in stored_columns(maker)]


def _rows(maker: Stmt, panel: Buffer, ends: tuple[SymExpr, SymExpr], first: SymExpr, lanes: int) -> Stmt:
    """Of the rows of w between two, those that a stage makes, into a panel that begins at the first row and column."""
    (row, column), store = perfect_nest(maker).loops, perfect_nest(maker).body
    assert isinstance(store, Store)
    before = store.indices[0] - row.var  # rows of w that others make
    begin, end = smax(ends[0] - before, 0), smin(ends[1] - before, row.extent)
    part, lane = SymVar("u", lower=0), SymVar("l", lower=0, upper=lanes - 1)
    place = part * lanes + lane
    guard = GuardLoads(less(first + place, column.extent), {part, lane})

    def vectors(number: SymExpr) -> Stmt:
        value = Substitute({row.var: begin + number, column.var: first + place}).value(store.value)
        kept = Store(panel, (begin + number + before - ends[0], place), guard.value(value))
        return For(part, panel.shape[1] // lanes, For(lane, sym(lanes), kept, "vectorized"), "unrolled")

    lines = [LINE // (dtypes.itemsize(load.dtype) * lanes) for load in stored_columns(maker)]
    together = max(shared_steps(store.value, row.var), *lines, 1)  # rows of a word or of a line are unrolled
    some, inner, count = SymVar("k", lower=0), SymVar("t", lower=0, upper=together - 1), end - begin
    block = For(inner, sym(together), vectors(some * together + inner), "unrolled")
    many = For(some, count // together, block)
    rest = For(inner, count % together, vectors(count // together * together + inner))
    return seq(*when_positive(count // together, many), *when_positive(count % together, rest))
