"""The code of register tiles: a grid of tiles, each of rows x vectors of sums, shared out among threads.

    for jo: for io: { e[6, 4, 16] = 0; for k: e[r, u, l] += a[i0 + r, k] * b[k, jo*64 + u*16 + l]; out[...] = f(e) }

**Rows** are split evenly: ceil(m / most) blocks whose heights differ by at most one, a body for each height that can
occur. 16 rows are 6 + 5 + 5, not 6 + 6 + 4, and no tile is so low that it cannot hide the latency of its sums.
**Columns** that are left over get a tile of as many vectors as they need, the last of them masked.
**All tiles form one loop**, so that threads get equal shares, however many panels or blocks there are.
**An epilogue** of more than a few operations is a loop over the finished tile, which is stored to the stack for it: its
code exists once, whatever the number of heights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from relaxlite import dtypes
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.ops.scalars import identity
from relaxlite.ir.program import (
    Allocate,
    Buffer,
    For,
    IfThenElse,
    IndexValue,
    LetIndex,
    Literal,
    Load,
    Seq,
    Stmt,
    Store,
    Value,
    seq,
)
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, all_values
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, ceildiv, product, smin, sym
from relaxlite.passes.loop_pattern import perfect_nest
from relaxlite.passes.schedule import distribute, less, nest

_Loops: TypeAlias = tuple[For, For, For]  # over the rows, vectors and lanes of a tile

ENOUGH_SUMS = 8  # independent chains of multiply-adds that hide their latency, twice over (cores with two units)
LONGEST_SUM = 2048  # terms of a sum in one register, for the sake of rounding; parts of 512 would cost 4 % of the speed
FEW_OPERATIONS = 2  # of an epilogue that is written out for every vector of every tile


@dataclass(frozen=True, slots=True)
class RowSplit:
    """`extent` rows in blocks of at most `most` whose heights differ by at most one."""

    extent: SymExpr
    most: int

    @property
    def count(self) -> SymExpr:
        return ceildiv(self.extent, self.most)

    def start(self, block: SymExpr) -> SymExpr:
        """The first row of a block: the first `extent % count` blocks are one higher than the others."""
        return block * (self.extent // self.count) + smin(block, self.extent % self.count)

    def height(self, block: SymExpr) -> SymExpr:
        return self.start(block + 1) - self.start(block)

    @property
    def heights(self) -> tuple[int, ...]:
        """Every height that can occur, greatest first."""
        lower, upper = Analyzer().bounds(self.extent)
        first, window = max(lower or 0, 1), self.most * (self.most + 1)
        if upper is None or upper > first + window:  # from most*most rows on, only `most` and `most - 1` occur
            first = min(first, self.most * self.most)
        found: set[int] = set()
        for rows in range(first, first + window if upper is None else min(upper, first + window) + 1):
            low, more = divmod(rows, -(-rows // self.most))
            found.update((low, low + 1) if more else (low,))
        return tuple(sorted(found, reverse=True)) or (1,)


@dataclass(frozen=True, slots=True)
class ColumnPiece:
    """`count` tiles of `vectors` vectors from column `start` on; `masked`: their last vector may be a part of one."""

    count: SymExpr
    start: SymExpr
    vectors: int
    masked: bool = False


def column_pieces(extent: SymExpr, lanes: int, vectors: int) -> tuple[ColumnPiece, ...]:
    """Tiles of the full width; then one of as many vectors as are left, or where that is not known single vectors."""
    width = vectors * lanes
    full, left = extent // width, as_int(extent % width)
    pieces = [ColumnPiece(full, sym(0), vectors)]
    if left is None:
        pieces.append(ColumnPiece(ceildiv(extent % width, lanes), full * width, 1, masked=True))
    elif left:
        pieces.append(ColumnPiece(sym(1), full * width, -(-left // lanes), masked=left % lanes > 0))
    return tuple(piece for piece in pieces if as_int(piece.count) != 0)


@dataclass(frozen=True, slots=True)
class Tile:
    """Makes the code of tiles of a block { element[]; init; reduced loops: combine; epilogue }.

    A partner's sums are kept beside the block's own and take the same steps, so that each vector of the operand that
    both read is loaded once.
    """

    block: Allocate
    row: For | None
    column: For
    lanes: int
    most_rows: int
    enough_sums: int = ENOUGH_SUMS
    partner: Allocate | None = (
        None  # another reduction of the same loops, without an epilogue: that of `block` reads it
    )

    @property
    def rows(self) -> RowSplit:
        return RowSplit(sym(1) if self.row is None else self.row.extent, self.most_rows)

    @property
    def _blocks(self) -> tuple[Allocate, ...]:
        return (self.block,) if self.partner is None else (self.partner, self.block)

    @property
    def _final(self) -> Stmt:
        assert isinstance(self.block.body, Seq)
        return seq(*self.block.body.stmts[2:])

    def __call__(self, piece: ColumnPiece, number: SymExpr, block: SymVar) -> Stmt:
        """The tile of column tile `number` of a piece and row block `block`."""
        first = piece.start + (sym(0) if as_int(piece.count) == 1 else number * (piece.vectors * self.lanes))
        make = self._staged if self._is_long() or any(_parts(b) for b in self._blocks) else self._direct
        if self.row is None:
            return make(piece, first, sym(0), sym(1))
        top, height = SymVar(f"{self.row.var.name}0"), SymVar("rows", upper=self.most_rows)
        body = LetIndex(height, IndexValue(self.rows.height(block)), make(piece, first, top, height))
        return LetIndex(top, IndexValue(self.rows.start(block)), body)

    def _is_long(self) -> bool:
        """Whether the epilogue is more than a few operations."""
        work = sum(not isinstance(v, Load | IndexValue) for v in all_values(self._final))
        return work > FEW_OPERATIONS

    def _direct(self, piece: ColumnPiece, first: SymExpr, top: SymExpr, height: SymExpr) -> Stmt:
        def body(rows: int) -> Stmt:
            loops, at = self._loops(piece, rows, first, top)
            sums = [self._sums(b, loops, at, masked=piece.masked) for b in self._blocks]
            final = self._epilogue(loops, at, [s.element for s in sums], masked=piece.masked)
            return _side_by_side(sums, final)

        return self._by_height(height, body)

    def _staged(self, piece: ColumnPiece, first: SymExpr, top: SymExpr, height: SymExpr) -> Stmt:
        """The sums in registers, stored to a tile on the stack; then the epilogue in a loop over its vectors."""
        shape = (sym(self.most_rows), sym(piece.vectors * self.lanes))
        tiles = [Buffer(f"{b.buffer.name}_tile", shape, b.buffer.dtype, "local") for b in self._blocks]
        long = [_parts(b) for b in self._blocks]
        outer = long[0]

        def to_tiles(loops: _Loops, values: Sequence[Value], combines: Sequence[str | None]) -> Stmt:
            row, part, lane = (loop.var for loop in loops)
            at = (row, part * self.lanes + lane)
            stmts = [Store(tile, at, value, c) for tile, value, c in zip(tiles, values, combines, strict=True)]
            return seq(*(Substitute(fresh=True).stmt(nest(loops, s)) for s in stmts))

        def body(rows: int) -> Stmt:
            loops, at = self._loops(piece, rows, first, top)
            if outer is None or None in long or any(self._interleaved(b, loops) > 1 for b in self._blocks):
                sums = [self._sums(b, loops, at, masked=piece.masked) for b in self._blocks]
                return _side_by_side(sums, to_tiles(loops, [s.element for s in sums], [None] * len(sums)))
            shorter = [_of_part(b, part, outer.var) for b, part in zip(self._blocks, long, strict=True) if part]
            sums = [self._sums(b, loops, at, masked=piece.masked) for b in shorter]
            combines = [_combination(b) for b in shorter]
            neutral = [identity(c, tile.dtype) for c, tile in zip(combines, tiles, strict=True)]
            part = _side_by_side(sums, to_tiles(loops, [s.element for s in sums], combines))
            return seq(to_tiles(loops, neutral, [None] * len(sums)), replace(outer, body=part))

        loops, at = self._loops(piece, self.most_rows, first, top)
        row, part, lane = loops
        found = [Load(tile, (row.var, part.var * self.lanes + lane.var)) for tile in tiles]
        loops = replace(row, extent=height, kind="serial"), replace(part, kind="serial"), lane
        made = seq(self._by_height(height, body), self._epilogue(loops, at, found, masked=piece.masked))
        for tile in reversed(tiles):
            made = Allocate(tile, made)
        return made

    def _sums(self, block: Allocate, loops: _Loops, at: dict[SymVar, SymExpr], *, masked: bool) -> _Sums:
        """The reduction of a tile, and one of its sums in the tile's loops."""
        times = self._interleaved(block, loops)
        copy = SymVar("s", upper=times - 1)
        update = _every(_reduced(block), times, copy) if times > 1 else _reduced(block)
        copies = [For(copy, sym(times), Seq(()), "unrolled")] if times > 1 else []
        made = Substitute(at, fresh=True).stmt(Allocate(block.buffer, seq(_initial(block), update)))
        assert isinstance(made, Allocate)
        wide = distribute([*copies, *loops], made, self._guard(at) if masked else None)
        assert isinstance(wide.body, Seq)
        first, steps = wide.body.stmts
        place = tuple(loop.var for loop in loops)
        if times == 1:
            return _Sums(wide.buffer, first, steps, Load(wide.buffer, place))
        added = Store(wide.buffer, (sym(0), *place), Load(wide.buffer, (copy + 1, *place)), _combination(block))
        total = nest([For(copy, sym(times - 1), Seq(()), "unrolled"), *loops], added)
        total = Substitute(fresh=True).stmt(total)
        return _Sums(wide.buffer, first, steps, Load(wide.buffer, (sym(0), *place)), (total,))

    def _interleaved(self, block: Allocate, loops: _Loops) -> int:
        """How many sums each element gets, of every so many steps, where a tile alone has too few for the latency."""
        innermost = perfect_nest(_reduced(block)).loops[-1]
        own = math.prod(as_int(loop.extent) or 1 for loop in loops[:2]) * len(self._blocks)
        times = max(1, self.enough_sums // own)
        return times if as_int(innermost.extent % times) == 0 and _starts_neutral(block) else 1

    def _epilogue(self, loops: _Loops, at: dict[SymVar, SymExpr], found: Sequence[Load], *, masked: bool) -> Stmt:
        final = Substitute(at, fresh=True).stmt(self._final)
        for block, load in zip(self._blocks, found, strict=True):
            final = _Element(block.buffer, load).stmt(final)
        return Substitute(fresh=True).stmt(nest(loops, IfThenElse(self._guard(at), final) if masked else final))

    def _loops(
        self, piece: ColumnPiece, rows: int, first: SymExpr, top: SymExpr
    ) -> tuple[_Loops, dict[SymVar, SymExpr]]:
        """Loops over the rows, vectors and lanes of a tile, and what the block's own variables are in them."""
        row, part, lane = (
            SymVar(name, upper=count - 1) for name, count in (("r", rows), ("u", piece.vectors), ("l", self.lanes))
        )
        at = {self.column.var: first + part * self.lanes + lane}
        if self.row is not None:
            at[self.row.var] = top + row
        nothing = Seq(())
        loops = (
            For(row, sym(rows), nothing, "unrolled"),
            For(part, sym(piece.vectors), nothing, "unrolled"),
            For(lane, sym(self.lanes), nothing, "vectorized"),
        )
        return loops, at

    def _guard(self, at: dict[SymVar, SymExpr]) -> Value:
        return less(at[self.column.var], self.column.extent)

    def _by_height(self, height: SymExpr, body: Callable[[int], Stmt]) -> Stmt:
        """The body for the number of rows that this block has."""
        highest, *lower = self.rows.heights
        stmt = body(highest)
        for rows in lower:
            stmt = IfThenElse(less(height, rows + 1), body(rows), stmt)
        return stmt


@dataclass(frozen=True, slots=True)
class _Sums:
    """A reduction in the loops of a tile."""

    buffer: Buffer
    first: Stmt  # the initial values
    steps: Stmt
    element: Load
    rest: tuple[Stmt, ...] = ()  # what has to be done after the steps


def _side_by_side(sums: Sequence[_Sums], then: Stmt) -> Stmt:
    """Reductions of the same loops in one loop, row by row of the tile; then what uses them."""
    steps = sums[0].steps
    depth = len(perfect_nest(steps).loops) - 2  # all but those over the vectors and lanes of a row
    for other in sums[1:]:
        steps = _merged(steps, other.steps, depth)
    body = seq(*(s.first for s in sums), steps, *(stmt for s in sums for stmt in s.rest), then)
    for s in reversed(sums):
        body = Allocate(s.buffer, body)
    return body


def _merged(a: Stmt, b: Stmt, depth: int) -> Stmt:
    """Two nests whose first `depth` loops are alike as one."""
    if depth == 0:
        return seq(a, b)
    assert isinstance(a, For) and isinstance(b, For)
    return replace(a, body=_merged(a.body, Substitute({b.var: a.var}).stmt(b.body), depth - 1))


def _initial(block: Allocate) -> Store:
    assert isinstance(block.body, Seq) and isinstance(block.body.stmts[0], Store)
    return block.body.stmts[0]


def _reduced(block: Allocate) -> For:
    """The reduced loops of a block."""
    assert isinstance(block.body, Seq) and isinstance(block.body.stmts[1], For)
    return block.body.stmts[1]


def _parts(block: Allocate) -> For | None:
    """A long sum of floats as a sum of shorter ones, which is more exact: the loop over the parts, round the
    reduced loops of one. None: it is not so long."""
    outer = _reduced(block)
    length, inner = as_int(outer.extent), [as_int(loop.extent) for loop in perfect_nest(outer).loops[1:]]
    is_sum = _combination(block) == "add" and dtypes.is_float(block.buffer.dtype) and _starts_neutral(block)
    if not is_sum or length is None or None in inner:
        return None
    count = -(-length * math.prod(size or 1 for size in inner) // LONGEST_SUM)
    if count < 2 or length < 2:
        return None
    size = -(-length // count)
    part, step = SymVar(f"{outer.var.name}o"), SymVar(outer.var.name, upper=size - 1)
    body = Substitute({outer.var: part * size + step}).stmt(outer.body)
    extent = sym(size) if length % size == 0 else smin(size, length - part * size)
    return For(part, ceildiv(sym(length), size), For(step, extent, body))


def _of_part(block: Allocate, parts: For, number: SymVar) -> Allocate:
    """The block for the terms of part `number` only."""
    return replace(block, body=Seq((_initial(block), Substitute({parts.var: number}).stmt(parts.body))))


def _starts_neutral(block: Allocate) -> bool:
    """Whether combining the initial value in once more changes nothing."""
    init = _initial(block)
    neutral = identity(_combination(block), init.buffer.dtype)
    return isinstance(init.value, Literal) and isinstance(neutral, Literal) and init.value.value == neutral.value


def _combination(block: Allocate) -> str:
    """How the innermost store of a reduction combines; a dot product adds."""
    store = perfect_nest(_reduced(block)).body
    assert isinstance(store, Store)
    return store.combine or "add"


def _every(stmt: Stmt, times: int, copy: SymVar) -> Stmt:
    """Of the innermost loop of a nest, the steps that leave `copy` when divided by `times`."""
    assert isinstance(stmt, For)
    if isinstance(stmt.body, For):
        return replace(stmt, body=_every(stmt.body, times, copy))
    outer = SymVar(f"{stmt.var.name}o")
    body = Substitute({stmt.var: outer * times + copy}).stmt(stmt.body)
    return For(outer, stmt.extent // times, body, stmt.kind)


class _Element(ProgramRewriter):
    """e[] becomes another load."""

    def __init__(self, element: Buffer, load: Load) -> None:
        super().__init__()
        self._element, self._load = element, load

    def _value(self, value: Value) -> Value:
        return self._load if isinstance(value, Load) and value.buffer is self._element else super()._value(value)


def by_piece(pieces: Sequence[ColumnPiece], number: SymExpr, make: Callable[[ColumnPiece, SymExpr], Stmt]) -> Stmt:
    """The code of column tile `number` of all of them."""
    piece, *others = pieces
    if not others:
        return make(piece, number)
    return IfThenElse(less(number, piece.count), make(piece, number), by_piece(others, number - piece.count, make))


def grid(axes: Sequence[tuple[SymVar, SymExpr]], body: Stmt) -> Stmt:
    """One parallel loop over all points of a grid whose points are independent, the last axis fastest."""
    body = Substitute({var: 0 for var, extent in axes if as_int(extent) == 1}).stmt(body)
    axes = [(var, extent) for var, extent in axes if as_int(extent) != 1]
    if any(as_int(extent) == 0 for _, extent in axes):
        return Seq(())
    if not axes:
        return body
    if len(axes) == 1:
        return For(axes[0][0], axes[0][1], body, "parallel")
    point = SymVar("tile")
    for k, (var, extent) in reversed(list(enumerate(axes))):
        inner = product(e for _, e in axes[k + 1 :])
        at = point // inner if k == 0 else point // inner % extent
        body = LetIndex(var, IndexValue(at), body)
    return For(point, product(extent for _, extent in axes), body, "parallel")
