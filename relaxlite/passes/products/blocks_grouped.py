"""Products of rows in groups with quantized blocks: one parallel loop over the tiles of all groups.

    for b in groups:
        number, first, count = spans[b]
        for i in count, j: out[first + i, j] = product(row first + i, column j of matrix number)

becomes

    for b, columns in parallel: { number, first, count = spans[b]; tiles of all `count` rows }

so that what is read of a group's rows stays in the second cache. Threads that took some columns of all groups would
have equal shares, whatever the groups' heights, but are slower (docs/measurements/cpus.md, blocks_grouped). A tile of a
group with one row is one of one row (blocks.py), whatever the others are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from relaxlite.ir.program import Check, For, IfThenElse, LetIndex, Seq, Stmt, seq
from relaxlite.ir.program_visitor import Substitute, stores
from relaxlite.ir.symbolic import SymExpr, SymVar, sym
from relaxlite.passes.loops.transforms import less, nest, select_version
from relaxlite.passes.products.blocks import MAX_ROWS, BlockPlan, BlockProduct, BlockTile, ManyRowsPlan, OneRow
from relaxlite.passes.products.register_tile import ColumnPiece, by_piece, column_pieces, grid
from relaxlite.records import dataclass

Around = Callable[[Stmt], Stmt]


@dataclass(frozen=True, slots=True)
class Groups:
    """A loop over groups, each a nest over its rows, those from `first` on of `rows`, and all columns; with what stands
    around both."""

    loop: For
    nest: Stmt
    first: SymExpr
    rows: SymExpr
    outside: Around
    inside: Around


def groups_of(stage: Stmt) -> Groups | None:
    """The stage as products of groups; None: it is none. A loop over groups has an extent from data, and so have its
    rows: no other program does that."""
    outside, loop = _peeled(stage)
    if not isinstance(loop, For) or loop is stage:
        return None
    inside, rows = _peeled(loop.body)
    if not isinstance(rows, For) or rows is loop.body or not isinstance(rows.body, For):
        return None
    results = [store for store in stores(rows) if store.buffer.scope == "global"]
    if len(results) != 1 or len(results[0].indices) != 2:
        return None
    (result,) = results
    return Groups(loop, rows, result.indices[0] - rows.var, result.buffer.shape[0], outside, inside)


def _peeled(stmt: Stmt) -> tuple[Around, Stmt]:
    """What is inside of symbols from data and checks, and these."""
    if isinstance(stmt, LetIndex):
        var, value = stmt.var, stmt.value
        around, inner = _peeled(stmt.body)
        return lambda body: LetIndex(var, value, around(body)), inner
    if isinstance(stmt, Seq) and len(stmt.stmts) > 1 and all(isinstance(s, Check) for s in stmt.stmts[:-1]):
        checks = stmt.stmts[:-1]
        around, inner = _peeled(stmt.stmts[-1])
        return lambda body: seq(*checks, around(body)), inner
    return lambda body: body, stmt


def tiled_groups(groups: Groups, found: BlockProduct, lanes: int, plan: BlockPlan) -> Stmt:
    """All tiles of all groups in one parallel loop."""
    column, row, body = found.column, found.row, found.block.body
    assert row is not None
    one = OneRow(body, row, column, lanes, 1, enough_sums=1, ahead=plan.prefetch.gemv_bytes)
    many = plan.tile(body, row, column, lanes, MAX_ROWS, least_rows=2, ahead=plan.prefetch.gemm_bytes)
    many = replace(many, origin=groups.first, all_rows=groups.rows)
    best = plan.many_rows(many, found.vectors)
    widest = max(found.alone, found.vectors, best.vectors if best is not None else 1)
    pieces = column_pieces(column.extent, lanes, widest)
    across = SymVar(f"{column.var.name}o")

    def tiles(best: ManyRowsPlan | None) -> Stmt:
        def of_piece(piece: ColumnPiece, number: SymExpr) -> Stmt:
            def all_rows(tile: BlockTile, vectors: int) -> Stmt:
                return _all_rows(tile, piece, number, vectors, spread=tile.is_interleaved and found.panel < vectors)

            rest = all_rows(many, found.vectors)
            if best is not None:
                rest = IfThenElse(best.condition, all_rows(best.tile, best.vectors), rest)
            return select_version(less(row.extent, 2), all_rows(one, found.alone), rest)

        code = groups.inside(by_piece(pieces, across, of_piece))
        axes = [(groups.loop.var, groups.loop.extent), (across, sum((p.count for p in pieces), sym(0)))]
        return Substitute(fresh=True).stmt(grid(axes, code))

    result = tiles(best)
    if best is not None and best.around is not None:  # for all rows, so the groups must have enough on average
        enough = less(groups.loop.extent * best.tile.least_rows - 1, groups.rows)
        result = IfThenElse(enough, best.around(result), tiles(None))
    return groups.outside(result)


def _all_rows(tile: BlockTile, piece: ColumnPiece, number: SymExpr, vectors: int, *, spread: bool) -> Stmt:
    """For all rows of a group, of the tiles of `vectors` vectors, or of one where these do not fill it, that are as
    many columns as tile `number` of a piece: those whose numbers follow its own. A group's rows all take the same."""
    if piece.masked or piece.vectors % vectors:
        vectors, spread = 1, False
    times = piece.vectors // vectors
    narrow = replace(piece, count=piece.count * times, vectors=vectors, spread=spread)
    u, down = SymVar("u", upper=times - 1), SymVar(f"{tile._row.var.name}o")
    code = tile(narrow, number * times + u, down)
    code = nest([For(down, tile.rows.count, Seq(())), For(u, sym(times), Seq(()))], code)
    return Substitute(fresh=True).stmt(code)
