"""Register tiles of two reductions over the same loops, of which the second's epilogue reads the first's result.

    for i, j: { e[]; e = 0; for k: e += x[i, k]*b[k, j]
                f[]; f = 0; for k: f += x[i, k]*a[k, j];  out[i, j] = g(e, f) }

Both sums of an element lie in one tile, each half as wide, and advance in one loop, row by row, so that each element of
x is loaded once for both. The epilogue runs as that of a single reduction (register_tile.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace

from relaxlite.ir.ops.scalars import identity
from relaxlite.ir.program import Allocate, Buffer, For, Load, Seq, Stmt, Store, Value, seq
from relaxlite.ir.program_visitor import ReplaceLoads, Substitute
from relaxlite.ir.symbolic import SymExpr, SymVar, sym
from relaxlite.passes.loops.pattern import Reduction, perfect_nest, reduction_of
from relaxlite.passes.loops.transforms import nest
from relaxlite.passes.products.register_tile import ColumnPiece, Tile, TileLoops
from relaxlite.records import dataclass


def pair_of(stage: Stmt) -> tuple[Reduction, Reduction] | None:
    """Match a stage as a pair of reductions: `final` of the first is the block of the second. None: no match."""
    outer = perfect_nest(stage)
    body = outer.body
    if not isinstance(body, Allocate) or not isinstance(body.body, Seq) or len(body.body.stmts) != 3:
        return None
    init, inner, last = body.body.stmts
    if not isinstance(last, Allocate) or not isinstance(init, Store):
        return None
    second = reduction_of(nest(outer.loops, last))
    first = reduction_of(nest(outer.loops, Allocate(body.buffer, seq(init, inner, init))))  # any statement as `final`
    return None if first is None or second is None else (replace(first, final=last), second)


def apart(body: Allocate) -> tuple[Allocate, Allocate]:
    """Split the block of a pair into the block of the first sum, without epilogue, and the block of the second."""
    assert isinstance(body.body, Seq)
    *own, second = body.body.stmts
    assert isinstance(second, Allocate)
    return replace(body, body=Seq(tuple(own))), second


def together(first: Allocate, second: Allocate) -> Allocate:
    """Join two blocks into a pair: the inverse of `apart`."""
    assert isinstance(first.body, Seq)
    return replace(first, body=Seq((*first.body.stmts, second)))


@dataclass(frozen=True, slots=True)
class PairTile(Tile):
    """Emits register tiles of a pair: `block`, whose epilogue reads the element of `partner`."""

    partner: Tile = field(kw_only=True)

    @staticmethod
    def of(pair: Allocate, row: For | None, column: For, lanes: int, rows: int, enough_sums: int) -> PairTile:
        """Build the tile of a pair; each block gets half of the sums that hide latency."""
        first, second = (Tile(body, row, column, lanes, rows, max(1, enough_sums // 2)) for body in apart(pair))
        return PairTile(second.block, row, column, lanes, rows, second.enough_sums, partner=first)

    @property
    def _tiles(self) -> tuple[Tile, ...]:
        own = (self.row, self.column, self.lanes, self.most_rows, self.enough_sums, self.least_rows, self.part)
        return replace(self.partner, least_rows=self.least_rows, part=self.part), Tile(self.block, *own)

    def _beside(self, sums: Sequence[Allocate], then: Stmt) -> Stmt:
        return _merge_reductions(sums[0], sums[1], then) if len(sums) == 2 else Tile._beside(self, sums, then)

    def _last(self, loops: TileLoops, at: dict[SymVar, SymExpr], sums: Sequence[Load], *, masked: bool) -> Stmt:
        final = ReplaceLoads(self.partner.block.buffer, sums[0]).stmt(self.block)
        assert isinstance(final, Allocate)
        return replace(self, block=final)._epilogue(loops, at, sums[1], masked=masked)

    def _is_long(self) -> bool:
        return True  # the epilogue reads two sums

    def _staged(self, piece: ColumnPiece, first: SymExpr, top: SymExpr, height: SymExpr) -> Stmt:
        """Return sums in registers, spilled to two tiles on the stack, then the epilogue in a loop over their
        vectors."""
        shape = (sym(self.most_rows), sym(piece.vectors * self.lanes))
        tiles = [Buffer(f"{t.block.buffer.name}_tile", shape, t.block.buffer.dtype, "local") for t in self._tiles]

        def body(rows: int) -> Stmt:
            return self._store_sums(tiles, piece, rows, first, top)

        loops, at = self._loops(piece, self.most_rows, first, top)
        row, part, lane = loops
        place = (row.var, part.var * self.lanes + lane.var)
        loops = replace(row, extent=height, kind="serial"), replace(part, kind="serial"), lane
        epilogue = self._last(loops, at, [Load(buffer, place) for buffer in tiles], masked=piece.masked)
        code = seq(self._by_height(height, body), epilogue)
        for buffer in reversed(tiles):
            code = Allocate(buffer, code)
        return code

    def _store_sums(self, tiles: list[Buffer], piece: ColumnPiece, rows: int, first: SymExpr, top: SymExpr) -> Stmt:
        """Return the sums of both blocks in `rows` rows, stored to the buffers `tiles`."""
        loops, at = self._loops(piece, rows, first, top)
        place = (loops[0].var, loops[1].var * self.lanes + loops[2].var)

        def stored(buffer: Buffer, value: Value, combine: str | None = None) -> Stmt:
            return Substitute(fresh=True).stmt(nest(loops, Store(buffer, place, value, combine)))

        parts = [t._parts() for t in self._tiles]
        first_part, second_part = parts[0], parts[1]
        if first_part is None or second_part is None or any(t._interleaved(loops) > 1 for t in self._tiles):
            sums = [t._sums(loops, at, t._stmts[1], masked=piece.masked) for t in self._tiles]
            stores = [stored(buffer, load) for buffer, (_, load) in zip(tiles, sums, strict=True)]
            return _merge_reductions(sums[0][0], sums[1][0], seq(*stores))
        steps = [first_part.body, Substitute({second_part.var: first_part.var}).stmt(second_part.body)]
        sums = [t._sums(loops, at, s, masked=piece.masked) for t, s in zip(self._tiles, steps, strict=True)]
        stores = [stored(buffer, load, "add") for buffer, (_, load) in zip(tiles, sums, strict=True)]
        starts = [stored(buffer, identity("add", buffer.dtype)) for buffer in tiles]
        return seq(*starts, replace(first_part, body=_merge_reductions(sums[0][0], sums[1][0], seq(*stores))))


def _merge_reductions(first: Allocate, second: Allocate, then: Stmt) -> Stmt:
    """Merge the reductions of two tiles into one loop, followed by `then`, which reads both."""
    assert isinstance(first.body, Seq) and isinstance(second.body, Seq)
    (init, steps, *rest), (other_init, other_steps, *other_rest) = first.body.stmts, second.body.stmts
    depth = len(perfect_nest(steps).loops) - 2  # all but those over the vectors and lanes of a row
    body = seq(init, other_init, _merge_nests(steps, other_steps, depth), *rest, *other_rest, then)
    return Allocate(first.buffer, Allocate(second.buffer, body))


def _merge_nests(a: Stmt, b: Stmt, depth: int) -> Stmt:
    """Merge two loop nests whose first `depth` loops are equal."""
    if depth == 0:
        return seq(a, b)
    assert isinstance(a, For) and isinstance(b, For)
    return replace(a, body=_merge_nests(a.body, Substitute({b.var: a.var}).stmt(b.body), depth - 1))
