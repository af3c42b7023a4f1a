"""Register tiles that ask for panels of weights before they read them. In which of two ways, the target says.

The first of the row blocks that go along a panel reads it from a lower cache or from memory, the others from the second
cache. So its steps are slow, and during those of the others memory has nothing to do: this is the time to ask for the
panel that comes next. Where there is one block, all steps wait alike, and nothing would be gained.

`NextPanel`: the last row blocks, as many as a row of the panel has lines or as there are, ask for some of these lines
each, at every step; the other blocks ask for one line again and again. More lines per step would be too many at once:
the processor may drop some, and a panel with holes is slower than one that nobody asked for, which comes as a
stream.

    for k: { prefetch(b[k, j0 + 64 + at]); prefetch(b[k, j0 + 64 + at2]); e[r, u, l] += a[i0 + r, k] * b[k, j0 + ...] }

A step may take several rows of the matrix, and then asks for as many.

`BothPanels`: all row blocks ask for their share of the next panel, so that a step asks for one line at most, and for
the lines of their own panel some steps ahead, into the first cache. Some processors gain by both, and lose by the
above: a request that misses the first cache takes one of the few places that loads need too. Figures of both:
docs/measurements/cpus.md, panel_prefetch_steps.

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

LINE = 64  # bytes that come from memory together
MIN_BLOCKS = 2
Rows: TypeAlias = "Callable[[SymExpr], tuple[tuple[SymExpr, ...], ...]]"  # those that a step reads
ONE = 1 << 16  # line: rates of lines per step are fractions of this


@dataclass(frozen=True, slots=True)
class PanelPrefetch:
    """How tiles ask for panels: for their own `ahead` steps before they read it (0: not at all), and for the next.
    `cache`: to which one lines of their own come."""

    ahead: int
    for_next: bool
    cache: OneOf[1, 2] = 1


def prefetcher_of(asks: PanelPrefetch, update: Stmt, column: SymVar, first: SymExpr, width: int) -> Prefetcher | None:
    """What tiles ask for whose first column is `first`. `update`: what sums up an element in column `column`. None: it
    is no sum along the rows of one panel."""
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
    """What tiles ask for while they sum up."""

    __slots__ = ()

    def bound(self, blocks: SymExpr, block: SymExpr, body: Stmt) -> Stmt:
        """`body` with the symbols for row block `block` of so many."""
        for symbol, value in self._values(blocks, block).items():
            body = LetIndex(symbol, IndexValue(value), body)
        return body

    def beside(self, sums: Allocate, update: For) -> Allocate:
        """The sums of a tile, whose steps now ask. `update`: the sum of an element that they were made of."""
        assert isinstance(sums.body, Seq)
        *before, steps = sums.body.stmts
        assert isinstance(steps, For)
        asked = self.asked(update, steps.var)
        return replace(sums, body=seq(*before, replace(steps, body=seq(*asked, steps.body))))

    @abstractmethod
    def _values(self, blocks: SymExpr, block: SymExpr) -> dict[SymVar, SymExpr]:
        """What the symbols are in row block `block` of so many."""

    @abstractmethod
    def asked(self, update: For, step: SymExpr) -> list[Prefetch]:
        """In step `step` of the sum `update`."""


@dataclass(frozen=True, slots=True)
class PanelPrefetcher(Prefetcher):
    """For what the tiles of one column of tiles read themselves, or those of the next."""

    column: SymVar
    first: SymExpr  # the first column of the tile
    width: int  # columns of a panel
    lines: int  # of a row of the panel

    def asked(self, update: For, step: SymExpr) -> list[Prefetch]:
        operands = panel_operands(update, self.column)
        assert operands

        def rows(number: SymExpr) -> tuple[tuple[SymExpr, ...], ...]:
            return tuple(Substitute({update.var: number}).indices(operand.indices[:-1]) for operand in operands)

        return self._requests(operands[0].buffer, rows, step)

    @abstractmethod
    def _requests(self, operand: Buffer, rows: Rows, step: SymExpr) -> list[Prefetch]:
        """Those of step `step`. `rows`: where a step reads the operand, but for the column."""


@dataclass(frozen=True, slots=True)
class BothPanels(PanelPrefetcher):
    """Lines of the own panel, and of the next."""

    asks: PanelPrefetch
    rate: SymVar  # lines of the next panel per step, times ONE; 0 for one block alone, which asks for one line for ever
    block: SymVar  # the number of the row block

    def _values(self, blocks: SymExpr, block: SymExpr) -> dict[SymVar, SymExpr]:
        if not self.asks.for_next:
            return {}
        even = smin(self.lines * ONE // smax(blocks, 1), ONE)
        return {self.block: sym(block), self.rate: even * smin(blocks // MIN_BLOCKS, 1)}

    def _requests(self, operand: Buffer, rows: Rows, step: SymExpr) -> list[Prefetch]:
        line, ahead = LINE // dtypes.itemsize(operand.dtype), rows(step + self.asks.ahead)
        places = [(*row, self.first + k * line) for row in ahead for k in range(self.lines)]
        requests = [Prefetch(operand, place, self.asks.cache) for place in places]
        if self.asks.for_next:
            *batch, present = rows(step)[0]
            number = (self.block * operand.shape[-2] + present) * self.rate // ONE
            column = self.first + self.width + number % self.lines * line
            requests.append(Prefetch(operand, (*batch, number // self.lines, column)))
        return requests


@dataclass(frozen=True, slots=True)
class NextPanel(PanelPrefetcher):
    """Lines of the next panel, by the last row blocks."""

    is_on: SymVar  # 1 in a row block that asks, else 0
    begin: SymVar  # the first line that it asks for
    end: SymVar  # the last one

    def _values(self, blocks: SymExpr, block: SymExpr) -> dict[SymVar, SymExpr]:
        asking = smin(smax(blocks, 1), self.lines)
        turn, lines = block - blocks + asking, sym(self.lines)  # turn 0: the first block that asks

        def start(turn: SymExpr) -> SymExpr:
            """The first line of a turn; no turn has two more than another."""
            return turn * (lines // asking) + smin(turn, lines % asking)

        return {
            self.is_on: smax(smin(turn + 1, smin(blocks - MIN_BLOCKS + 1, 1)), 0),
            self.begin: start(smax(turn, 0)),
            self.end: start(smax(turn, 0) + 1) - 1,
        }

    def _requests(self, operand: Buffer, rows: Rows, step: SymExpr) -> list[Prefetch]:
        line, start = LINE // dtypes.itemsize(operand.dtype), self.first + self.is_on * self.width
        most = range(-(-self.lines // MIN_BLOCKS))
        columns = [start + smin(self.begin + k, self.end) * line for k in most]
        return [Prefetch(operand, (*row, column)) for row in rows(step * self.is_on) for column in columns]


@dataclass(frozen=True, slots=True)
class NextPart(Prefetcher):
    """Of a panel that is made of what is stored otherwise, what the next part of it will be made of. All row blocks ask
    where that `is_interleaved`, else the first one.

    `lines`: those of a step in a block of this number, or if not spread those of a step, or any of them where the
    second is 0 and not 1. `symbol` stands for the second.
    """

    lines: Callable[[SymExpr, SymExpr], list[Prefetch]]
    symbol: SymVar
    is_interleaved: bool

    def _values(self, blocks: SymExpr, block: SymExpr) -> dict[SymVar, SymExpr]:
        return {self.symbol: block if self.is_interleaved else smax(1 - block, 0)}

    def asked(self, update: For, step: SymExpr) -> list[Prefetch]:
        return self.lines(step, self.symbol)


def panel_operands(update: Stmt, column: SymVar) -> tuple[Load, ...]:
    """What a step of a sum reads of the rows of a matrix, in `column`; none: it is no such sum."""
    if not isinstance(update, For) or isinstance(update.body, For):
        return ()
    moving = [load for load in loads(update) if any(column in index.free_vars() for index in load.indices)]
    if len({load.buffer for load in moving}) != 1 or len(moving[0].indices) < 2:
        return ()
    are_rows = all(load.indices[-1] is column and update.var in load.indices[-2].free_vars() for load in moving)
    return tuple(moving) if are_rows else ()


def steps_of(update: Stmt, column: SymVar, num_bytes: int) -> int:
    """How many steps of a sum along rows of a matrix read so many bytes of whole rows; 0: it is no such sum."""
    operands = panel_operands(update, column)
    width = as_int(operands[0].buffer.shape[-1]) if operands else None
    return 0 if width is None else num_bytes // (width * dtypes.itemsize(operands[0].buffer.dtype))


def width_that_fits(update: Stmt, column: SymVar, widths: Sequence[int], cache_bytes: int) -> int | None:
    """The first of some widths of which two panels take at most 5/8 of the second cache; else the last, if those take
    at most 3/4 (measured: more is slower than not to ask). None: not even that."""
    operands = panel_operands(update, column)
    depth = as_int(operands[0].buffer.shape[-2]) if operands else None
    if depth is None:
        return None
    row_bytes = depth * dtypes.itemsize(operands[0].buffer.dtype)
    for width in widths:
        if 2 * width * row_bytes <= cache_bytes * 5 // 8:
            return width
    return widths[-1] if 2 * widths[-1] * row_bytes <= cache_bytes * 3 // 4 else None
