"""Register tiles for reductions: rows x vectors of outputs accumulate while the reduced loops run inside.

    for i, j: { e[]; e = 0; for k: e += a[i, k] * b[k, j]; out[i, j] = f(e) }

becomes, with j along vectors of 16 lanes (the column) and i down the tile (the row):

    for jo: for io: { e[6, 4, 16] = 0; for k: e[r, u, l] += a[io*6 + r, k] * b[k, jo*64 + u*16 + l]; out[...] = f(e) }

The tile's loops are unrolled and vectorized, so `e` lives in registers. Rows that are left get lower tiles, columns
that are left single masked vectors: every shape is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from relaxlite.ir.program import Allocate, Buffer, For, Seq, Stmt, Store, seq
from relaxlite.ir.program_visitor import Substitute, loads, stores, walk_stmts
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, sym
from relaxlite.passes.access import can_fuse, stride
from relaxlite.passes.loop_pattern import perfect_nest, reduction_of
from relaxlite.passes.parallel_loops import parallel_nest, writes_apart
from relaxlite.passes.schedule import distribute, fuse, less, when_positive

ACCUMULATORS = 24  # vector registers of a tile, of 32; the rest hold operands
MOST_ROWS = 8
ROW_TAILS = (4, 2, 1)  # lower tiles for the rows that are left
ENOUGH_PARALLEL = 8  # iterations of known loops that are worth sharing out on their own
MAX_SMALL_STRIDE = 4  # a strided vector load is still better than scalar code


def tiled(block: Block, column: For, lanes: int) -> Stmt:
    """The block in register tiles, its outer loops and one loop over tiles in parallel."""
    row = block.row_loop(column)
    vectors = _vectors(row, column, lanes)
    rows = 1 if row is None else _rows(row, vectors)
    others = [loop for loop in block.spatial if loop is not column and loop is not row]
    tile = _Tile(block, row, column, lanes)
    across, down = _column_pieces(column, lanes, vectors), _row_pieces(row, rows)
    known = 1
    for loop in others:
        known *= as_int(loop.extent) or 1
    if known >= ENOUGH_PARALLEL:
        return parallel_nest(others, seq(*(c.loop(seq(*(r.loop(tile(r, c)) for r in down))) for c in across)))
    if row is not None and (as_int(row.extent) or 0) // rows >= ENOUGH_PARALLEL:
        return seq(*(r.parallel(others, seq(*(c.loop(tile(r, c)) for c in across))) for r in down))
    return seq(*(c.parallel(others, seq(*(r.loop(tile(r, c)) for r in down))) for c in across))


def panel_widths(block: Block, column: For, lanes: int) -> dict[Buffer, int]:
    """Operands that a tile streams through by rows of `width` columns, `width` being the tile's: weights of a matmul.

    Packed into panels of that width (pack_constants.py) they are read from one end to the other.
    """
    width = _vectors(block.row_loop(column), column, lanes) * lanes
    if (as_int(column.extent) or 0) <= width:
        return {}
    found: dict[Buffer, int] = {}
    for load in loads(block.update):
        is_last = len(load.indices) > 1 and load.indices[-1] is column.var
        if is_last and not any(column.var in index.free_vars() for index in load.indices[:-1]):
            found[load.buffer] = width
    return found


def _vectors(row: For | None, column: For, lanes: int) -> int:
    """How many vectors wide a tile is: few beside rows that are many and known (channels), else four."""
    width = as_int(column.extent)
    if width is not None:
        return max(1, min(4, -(-width // lanes)))
    return 2 if row is not None and row.extent.is_const else 4


def _rows(row: For, vectors: int) -> int:
    most = max(1, min(MOST_ROWS, ACCUMULATORS // vectors))
    extent = as_int(row.extent)
    if extent is None:
        return most
    divisors = [r for r in range(most, most // 2, -1) if extent % r == 0]
    return min(divisors[0] if divisors else most, max(extent, 1))


@dataclass(frozen=True, slots=True)
class _Piece:
    """A loop over tiles of one size: `count` of them, the first at `start`, each `step` long."""

    var: SymVar
    count: SymExpr
    start: SymExpr
    step: int
    masked: bool = False

    @property
    def at(self) -> SymExpr:
        return self.start + self.var * self.step

    def loop(self, body: Stmt) -> Stmt:
        return seq(*when_positive(self.count, For(self.var, self.count, body)))

    def parallel(self, others: list[For], body: Stmt) -> Stmt:
        """The loop over these tiles, run in parallel together with other independent loops round it."""
        return parallel_nest([*others, For(self.var, self.count, Seq(()))], body)


def _column_pieces(column: For, lanes: int, vectors: int) -> list[_Piece]:
    """Full tiles of several vectors, then single masked vectors."""
    width, name = vectors * lanes, column.var.name
    full, rest = column.extent // width, column.extent % width
    tails = (rest + lanes - 1) // lanes
    pieces = [
        _Piece(_counter(f"{name}o", full), full, sym(0), width),
        _Piece(_counter(f"{name}t", tails), tails, full * width, lanes, masked=True),
    ]
    return [p for p in pieces if as_int(p.count) != 0]


def _counter(name: str, count: SymExpr) -> SymVar:
    known = as_int(count)
    return SymVar(name, upper=None if known is None else max(known - 1, 0))


def _row_pieces(row: For | None, most: int) -> list[_Piece]:
    """Tiles of the greatest height, then lower ones for the rows that are left."""
    if row is None:
        return [_Piece(SymVar("row"), sym(1), sym(0), 1)]
    pieces: list[_Piece] = []
    start, left = sym(0), row.extent
    for rows in dict.fromkeys((most, *(t for t in ROW_TAILS if t < most))):
        pieces.append(_Piece(SymVar(f"{row.var.name}o"), left // rows, start, rows))
        start, left = start + left // rows * rows, left % rows
    return [p for p in pieces if as_int(p.count) != 0]


@dataclass(frozen=True, slots=True)
class _Tile:
    """Makes the code of one tile."""

    block: Block
    row: For | None
    column: For
    lanes: int

    def __call__(self, down: _Piece, across: _Piece) -> Stmt:
        vectors = across.step // self.lanes
        part, lane = SymVar("u", upper=vectors - 1), SymVar("l", upper=self.lanes - 1)
        inner = [For(part, sym(vectors), Seq(()), "unrolled"), For(lane, sym(self.lanes), Seq(()), "vectorized")]
        column = across.at + part * self.lanes + lane
        at: dict[SymVar, SymExpr] = {self.column.var: column}
        if self.row is not None:
            row = SymVar("r", upper=down.step - 1)
            inner.insert(0, For(row, sym(down.step), Seq(()), "unrolled"))
            at[self.row.var] = down.at + row
        block = Substitute(at, fresh=True).stmt(self.block.body)
        assert isinstance(block, Allocate)
        return distribute(inner, block, less(column, self.column.extent) if across.masked else None)


@dataclass(frozen=True, slots=True)
class Block:
    """for spatial: { element[]; init; reduced loops: combine; epilogue }"""

    spatial: tuple[For, ...]
    body: Allocate

    @property
    def stmts(self) -> tuple[Stmt, ...]:
        return self.body.body.stmts if isinstance(self.body.body, Seq) else (self.body.body,)

    @property
    def update(self) -> Store:
        """The combining store."""
        return next(s for s in walk_stmts(self.body) if isinstance(s, Store) and s.combine is not None)

    def fused(self) -> Block:
        """Fuse adjacent spatial loops, and adjacent reduced loops, whose accesses stay linear."""
        spatial, body = list(self.spatial), self.body
        k = len(spatial) - 2
        while k >= 0:
            outer, inner = spatial[k], spatial[k + 1]
            if can_fuse(body, outer.var, inner.var, inner.extent):
                merged = fuse(outer, replace(inner, body=body))
                spatial[k : k + 2] = [merged]
                assert isinstance(merged.body, Allocate)
                body = merged.body
            k -= 1
        return Block(tuple(spatial), replace(body, body=_fuse_reduced(body.body)))

    def vector_loop(self) -> For | None:
        """The spatial loop to vectorize: the last along which the output and some operand are contiguous and no operand
        jumps far. None: there is none."""
        for loop in reversed(self.spatial):
            if as_int(loop.extent) == 1:
                continue
            read = [stride(load, loop.var) for load in loads(self.update) if load.buffer is not self.body.buffer]
            written = [stride(s, loop.var) for s in stores(self.body) if s.buffer.scope == "global"]
            near = all(s is not None and abs(s) <= MAX_SMALL_STRIDE for s in read)
            if near and any(read) and all(s == 1 for s in written):
                return loop
        return None

    def row_loop(self, column: For) -> For | None:
        """A spatial loop that the contiguous operand does not depend on, so that a vector of it serves several rows."""
        moving = [load for load in loads(self.update) if stride(load, column.var)]
        for loop in reversed(self.spatial):
            if (
                loop is not column
                and as_int(loop.extent) != 1
                and moving
                and all(stride(load, loop.var) == 0 for load in moving)
            ):
                return loop
        return None


def _fuse_reduced(stmt: Stmt) -> Stmt:
    if isinstance(stmt, Seq):
        return seq(*(_fuse_reduced(s) for s in stmt.stmts))
    if not isinstance(stmt, For):
        return stmt
    inner = _fuse_reduced(stmt.body)
    stmt = replace(stmt, body=inner)
    if isinstance(inner, For) and can_fuse(inner.body, stmt.var, inner.var, inner.extent):
        return fuse(stmt, inner)
    return stmt


def reduction_block(stage: Stmt) -> Block | None:
    """The stage as a reduction whose loops may change places: each element is computed apart from the others, and no
    extent depends on another loop. None: it is no such reduction."""
    reduction = reduction_of(stage)
    if reduction is None or not all(map(writes_apart, reduction.spatial)):
        return None
    loops = (*reduction.spatial, *perfect_nest(reduction.inner).loops)
    variables = {loop.var for loop in loops}
    if any(variables & set(loop.extent.free_vars()) for loop in loops):
        return None
    return Block(reduction.spatial, reduction.block)
