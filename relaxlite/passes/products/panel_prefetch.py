"""Software prefetch of weight panels in register tiles, by one of two schemes that the target selects.

The first row block that runs along a panel reads the panel from L3 or memory, the other blocks from L2. So the steps of
the first block are slow, and memory is idle during those of the others: they prefetch the next panel. With one row
block all steps wait alike, and prefetching would gain nothing.

`NextPanel`: the last row blocks (at most one for each line of a row of the panel) each prefetch some of these lines at
every step; the other blocks prefetch one line again and again. More lines per step would be too many at once: the
processor may drop some, and a panel with holes is slower than one without prefetches, which the hardware prefetcher
streams.

    for k: { prefetch(b[k, j0 + 64 + at]); prefetch(b[k, j0 + 64 + at2]); e[r, u, l] += a[i0 + r, k] * b[k, j0 + ...] }

A step that takes several rows of the matrix prefetches as many.

`BothPanels`: each row block prefetches its share of the next panel, at most one line in a step, and the lines of its
own panel some steps ahead, into L1. Some processors gain by both and lose by `NextPanel`: a prefetch that misses L1
occupies one of the few miss buffers that loads need too. Figures: docs/measurements/cpus.md, panel_prefetch_steps.

    for k: { prefetch(b[k + 8, j0], 1); ...; prefetch(b[line // 4, j0 + 64 + line % 4 * 16]); e[r, u, l] += ... }
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal as OneOf
from typing import TypeAlias

from relaxlite import dtypes
from relaxlite.ir.program import Allocate, Buffer, For, IndexValue, LetIndex, Load, Prefetch, Seq, Stmt, seq
from relaxlite.ir.program_visitor import Substitute, loads
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, smax, smin, sym
from relaxlite.records import dataclass

LINE = 64  # bytes of a cache line
MIN_BLOCKS = 2
Rows: TypeAlias = "Callable[[SymExpr], tuple[tuple[SymExpr, ...], ...]]"  # step -> indices of the matrix rows it reads
ONE = 1 << 16  # fixed-point 1.0 of rates in lines per step


@dataclass(frozen=True, slots=True)
class PanelPrefetch:
    """How tiles prefetch panels of weights.

    `ahead`: prefetch distance in steps within a tile's own panel (0: none). `for_next`: whether tiles prefetch the next
    panel. `cache`: the cache level that lines of the own panel go to.
    """

    ahead: int
    for_next: bool
    cache: OneOf[1, 2] = 1


def prefetcher_of(asks: PanelPrefetch, update: Stmt, column: SymVar, first: SymExpr, width: int) -> Prefetcher | None:
    """Return the prefetcher of tiles whose first column is `first`, in panels of `width` columns.

    `update`: the reduction of an element in column `column`. None: it does not read along the rows of one panel.
    """
    operands = panel_operands(update, column)
    if not operands:
        return None
    lines = -(-width * dtypes.itemsize(operands[0].buffer.dtype) // LINE)
    if asks.ahead:
        rate, block = SymVar("rate", lower=0, upper=ONE), SymVar("turn", lower=0)
        return BothPanels(column, first, width, lines, asks, rate, block)
    begin, end = (SymVar(name, lower=0, upper=lines - 1) for name in ("begin", "end"))
    return NextPanel(column, first, width, lines, SymVar("is_on", lower=0, upper=1), begin, end)


class Prefetcher(ABC):
    """Emits the prefetches of register tiles."""

    __slots__ = ()

    def bound(self, blocks: SymExpr, block: SymExpr, body: Stmt) -> Stmt:
        """Define the symbols of the prefetches around `body`, for row block `block` of `blocks`."""
        for symbol, value in self._values(blocks, block).items():
            body = LetIndex(symbol, IndexValue(value), body)
        return body

    def beside(self, sums: Allocate, update: For) -> Allocate:
        """Add prefetches to the steps of a tile's sums. `update`: the reduction of one element."""
        assert isinstance(sums.body, Seq)
        *before, steps = sums.body.stmts
        assert isinstance(steps, For)
        prefetches = self.asked(update, steps.var)
        return replace(sums, body=seq(*before, replace(steps, body=seq(*prefetches, steps.body))))

    @abstractmethod
    def _values(self, blocks: SymExpr, block: SymExpr) -> dict[SymVar, SymExpr]:
        """Return the values of the symbols in row block `block` of `blocks`."""

    @abstractmethod
    def asked(self, update: For, step: SymExpr) -> list[Prefetch]:
        """Return the prefetches of step `step` of the reduction `update`."""


@dataclass(frozen=True, slots=True)
class PanelPrefetcher(Prefetcher):
    """Prefetches for tiles that run along one panel: lines of that panel, or of the next."""

    column: SymVar
    first: SymExpr  # the first column of the tile
    width: int  # columns of a panel
    lines: int  # of a row of the panel

    def asked(self, update: For, step: SymExpr) -> list[Prefetch]:
        operands = panel_operands(update, self.column)
        assert operands

        def rows(number: SymExpr) -> tuple[tuple[SymExpr, ...], ...]:
            return tuple(Substitute({update.var: number}).indices(operand.indices[:-1]) for operand in operands)

        return self._prefetches(operands[0].buffer, rows, step)

    @abstractmethod
    def _prefetches(self, operand: Buffer, rows: Rows, step: SymExpr) -> list[Prefetch]:
        """Return the prefetches of step `step`. `rows`: step -> indices, without the column, that the step reads."""


@dataclass(frozen=True, slots=True)
class BothPanels(PanelPrefetcher):
    """Prefetches lines of the own panel some steps ahead, and a share of the next panel."""

    asks: PanelPrefetch
    rate: SymVar  # lines of the next panel per step, times ONE; 0 with one block, which prefetches the same line again
    block: SymVar  # the number of the row block

    def _values(self, blocks: SymExpr, block: SymExpr) -> dict[SymVar, SymExpr]:
        if not self.asks.for_next:
            return {}
        even_rate = smin(self.lines * ONE // smax(blocks, 1), ONE)
        return {self.block: sym(block), self.rate: even_rate * smin(blocks // MIN_BLOCKS, 1)}

    def _prefetches(self, operand: Buffer, rows: Rows, step: SymExpr) -> list[Prefetch]:
        line, rows_ahead = LINE // dtypes.itemsize(operand.dtype), rows(step + self.asks.ahead)
        places = [(*row, self.first + k * line) for row in rows_ahead for k in range(self.lines)]
        prefetches = [Prefetch(operand, place, self.asks.cache) for place in places]
        if self.asks.for_next:
            *batch, current_row = rows(step)[0]
            line_number = (self.block * operand.shape[-2] + current_row) * self.rate // ONE
            column = self.first + self.width + line_number % self.lines * line
            prefetches.append(Prefetch(operand, (*batch, line_number // self.lines, column)))
        return prefetches


@dataclass(frozen=True, slots=True)
class NextPanel(PanelPrefetcher):
    """Prefetches lines of the next panel in the last row blocks."""

    is_on: SymVar  # 1 in a row block that prefetches, else 0
    begin: SymVar  # the first line that the block prefetches
    end: SymVar  # the last one

    def _values(self, blocks: SymExpr, block: SymExpr) -> dict[SymVar, SymExpr]:
        prefetching_blocks = smin(smax(blocks, 1), self.lines)
        turn, lines = block - blocks + prefetching_blocks, sym(self.lines)  # turn 0: the first block that prefetches

        def start(turn: SymExpr) -> SymExpr:
            """Return the first line of a turn; the turns differ by at most one line."""
            return turn * (lines // prefetching_blocks) + smin(turn, lines % prefetching_blocks)

        return {
            self.is_on: smax(smin(turn + 1, smin(blocks - MIN_BLOCKS + 1, 1)), 0),
            self.begin: start(smax(turn, 0)),
            self.end: start(smax(turn, 0) + 1) - 1,
        }

    def _prefetches(self, operand: Buffer, rows: Rows, step: SymExpr) -> list[Prefetch]:
        line, start = LINE // dtypes.itemsize(operand.dtype), self.first + self.is_on * self.width
        max_lines = range(-(-self.lines // MIN_BLOCKS))
        columns = [start + smin(self.begin + k, self.end) * line for k in max_lines]
        return [Prefetch(operand, (*row, column)) for row in rows(step * self.is_on) for column in columns]


@dataclass(frozen=True, slots=True)
class NextPart(Prefetcher):
    """Prefetches the stored weights from which the next part of a computed panel will be made.

    `is_interleaved`: all row blocks prefetch, each some rows; else the first block does. `lines`: (step, symbol) ->
    prefetches, where `symbol` is the number of the row block if `is_interleaved`, else 1 in the first block and 0 in
    the others, which may then prefetch any line.
    """

    lines: Callable[[SymExpr, SymExpr], list[Prefetch]]
    symbol: SymVar
    is_interleaved: bool

    def _values(self, blocks: SymExpr, block: SymExpr) -> dict[SymVar, SymExpr]:
        return {self.symbol: block if self.is_interleaved else smax(1 - block, 0)}

    def asked(self, update: For, step: SymExpr) -> list[Prefetch]:
        return self.lines(step, self.symbol)


def panel_operands(update: Stmt, column: SymVar) -> tuple[Load, ...]:
    """Return the loads of matrix rows, at `column`, in a step of a reduction; none: it is no sum along matrix rows."""
    if not isinstance(update, For) or isinstance(update.body, For):
        return ()
    column_loads = [load for load in loads(update) if any(column in index.free_vars() for index in load.indices)]
    if len({load.buffer for load in column_loads}) != 1 or len(column_loads[0].indices) < 2:
        return ()
    are_rows = all(load.indices[-1] is column and update.var in load.indices[-2].free_vars() for load in column_loads)
    return tuple(column_loads) if are_rows else ()


def steps_of(update: Stmt, column: SymVar, num_bytes: int) -> int:
    """Return how many steps of a sum along matrix rows read `num_bytes` of whole rows; 0: it is no such sum."""
    operands = panel_operands(update, column)
    width = as_int(operands[0].buffer.shape[-1]) if operands else None
    return 0 if width is None else num_bytes // (width * dtypes.itemsize(operands[0].buffer.dtype))


def width_that_fits(update: Stmt, column: SymVar, widths: Sequence[int], cache_bytes: int) -> int | None:
    """Return the first of `widths` of which two panels take at most 5/8 of the L2 cache, `cache_bytes`.

    Else the last width, if its two panels take at most 3/4: beyond that prefetching costs more than it gains
    (docs/measurements/prod.md). None: no width fits.
    """
    operands = panel_operands(update, column)
    depth = as_int(operands[0].buffer.shape[-2]) if operands else None
    if depth is None:
        return None
    row_bytes = depth * dtypes.itemsize(operands[0].buffer.dtype)
    for width in widths:
        if 2 * width * row_bytes <= cache_bytes * 5 // 8:
            return width
    return widths[-1] if 2 * widths[-1] * row_bytes <= cache_bytes * 3 // 4 else None
