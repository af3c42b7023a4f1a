"""Grouped GEMM with blocked weights (mixture of experts): one parallel loop over the tiles of all groups.

    for b in groups:
        number, first, count = spans[b]
        for i in count, j: out[first + i, j] = product(row first + i, column j of matrix number)

becomes

    for b, columns in parallel: { number, first, count = spans[b]; tiles of all `count` rows }

so that the rows of a group stay in the L2 cache. Sharing out columns of all groups among threads would balance groups
of any heights, but is slower (docs/measurements/cpus.md, blocks_grouped). A group with one row takes the GEMV tiles of
blocks.py, whatever the heights of the other groups.
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
    """A loop over groups and, inside, a loop nest over the rows of one group and all columns.

    `first`: the first row of a group, of `rows` in all. `outside`, `inside`: wrap the code of the loop over groups and
    of the nest in the definitions of symbols from data, and in checks, that surrounded them.
    """

    loop: For
    nest: Stmt
    first: SymExpr
    rows: SymExpr
    outside: Around
    inside: Around


def groups_of(stage: Stmt) -> Groups | None:
    """Match a stage as a grouped product; None: it is none.

    The extents of the loop over groups and of the loop over rows come from data: no other program has both.
    """
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
    """Split a statement into a wrapper that restores its symbol definitions and checks, and the statement inside."""
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
    """Lower a grouped product to one parallel loop over the tiles of all groups."""
    column, row, body = found.column, found.row, found.block.body
    assert row is not None
    gemv = OneRow(body, row, column, lanes, 1, enough_sums=1, ahead=plan.prefetch.gemv_bytes)
    gemm = plan.tile(body, row, column, lanes, MAX_ROWS, least_rows=2, ahead=plan.prefetch.gemm_bytes)
    gemm = replace(gemm, origin=groups.first, all_rows=groups.rows)
    many_plan = plan.many_rows(gemm, found.vectors)
    widest = max(found.alone, found.vectors, many_plan.vectors if many_plan is not None else 1)
    pieces = column_pieces(column.extent, lanes, widest)
    across = SymVar(f"{column.var.name}o")

    def tiles(many_plan: ManyRowsPlan | None) -> Stmt:
        def of_piece(piece: ColumnPiece, number: SymExpr) -> Stmt:
            def all_rows(tile: BlockTile, vectors: int) -> Stmt:
                return _all_rows(tile, piece, number, vectors, spread=tile.is_interleaved and found.panel < vectors)

            gemm_code = all_rows(gemm, found.vectors)
            if many_plan is not None:
                gemm_code = IfThenElse(many_plan.condition, all_rows(many_plan.tile, many_plan.vectors), gemm_code)
            return select_version(less(row.extent, 2), all_rows(gemv, found.alone), gemm_code)

        code = groups.inside(by_piece(pieces, across, of_piece))
        axes = [(groups.loop.var, groups.loop.extent), (across, sum((p.count for p in pieces), sym(0)))]
        return Substitute(fresh=True).stmt(grid(axes, code))

    result = tiles(many_plan)
    if (
        many_plan is not None and many_plan.around is not None
    ):  # for all rows, so the groups must have enough on average
        has_enough_rows = less(groups.loop.extent * many_plan.tile.least_rows - 1, groups.rows)
        result = IfThenElse(has_enough_rows, many_plan.around(result), tiles(None))
    return groups.outside(result)


def _all_rows(tile: BlockTile, piece: ColumnPiece, number: SymExpr, vectors: int, *, spread: bool) -> Stmt:
    """Return the tiles, `vectors` vectors wide, that cover the columns of tile `number` of a piece for all rows of a
    group; one vector wide where `vectors` do not divide the piece. All rows of a group take the same tiles."""
    if piece.masked or piece.vectors % vectors:
        vectors, spread = 1, False
    times = piece.vectors // vectors
    narrow = replace(piece, count=piece.count * times, vectors=vectors, spread=spread)
    u, down = SymVar("u", upper=times - 1), SymVar(f"{tile._row.var.name}o")
    code = tile(narrow, number * times + u, down)
    code = nest([For(down, tile.rows.count, Seq(())), For(u, sym(times), Seq(()))], code)
    return Substitute(fresh=True).stmt(code)
