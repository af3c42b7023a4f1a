"""The schedule of nests that read along another loop than they write: transposes, and what was fused with them.

    for n: for s: for c: out[n, c, s] = f(x[n, s, c])       in tiles of as many rows and columns as a vector has lanes

        tile[r, l] = x[n, s0 + r, c0 + l]                   vectors along c
        out[n, c0 + r, s0 + l] = f(tile[l, r])              vectors along s: the tile changes places in registers

The last tile of a row or column begins earlier, so that it ends with it: some elements are written twice, and no tile
is masked. Where a dimension is shorter than a tile there is none: then the usual schedule runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from relaxlite import dtypes
from relaxlite.ir.program import Allocate, Binary, Buffer, For, Load, Select, Stmt, Store, Value, seq
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, all_values, loads
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, ceildiv, smin, sym
from relaxlite.passes.loops.access import coefficient, offset, stride
from relaxlite.passes.loops.edits import less, with_variant
from relaxlite.passes.loops.parallel import parallel_nest
from relaxlite.passes.loops.pattern import perfect_nest

MAX_TILE_LANES = 16  # a tile of more would not fit into registers
BLOCK = 4  # tiles that are read one after another from each row: a few cache lines
GROUP, ALIKE = 4, 2048  # tiles of a row of the result, where rows are multiples of so many bytes
MAX_TILES = 2  # transposed operands: each needs as many registers as a vector has lanes


def tiled_transpose(stage: Stmt, lanes: int) -> tuple[list[Value], Stmt] | None:
    """(conditions, nest in tiles), for a nest whose store is contiguous along one loop and some loads along another.

    None: it is no such nest. The conditions, on symbolic sizes, must hold for there to be a tile.
    """
    nest = perfect_nest(stage)
    store = nest.body
    if not nest.loops or lanes < 2 or not isinstance(store, Store) or store.combine is not None:
        return None
    if any(isinstance(v, Select) for v in all_values(store)) or any(x.buffer is store.buffer for x in loads(store)):
        return None
    across = next((loop for loop in nest.loops if stride(store, loop.var) == 1), None)
    if across is None:
        return None
    turned = [load for load in loads(store) if stride(load, across.var) not in (0, 1)]
    down = _contiguous_loop(turned, nest.loops)
    if down is None or len(set(x.buffer for x in turned)) > MAX_TILES:
        return None
    moving: list[Load | Store] = [*turned, store]
    if any(coefficient(offset(access), loop.var) is None for access in moving for loop in (across, down)):
        return None  # not linear
    if stride(store, down.var) in (0, 1):
        return None
    sizes = [across.extent, down.extent]
    if any(v in {loop.var for loop in nest.loops} for size in sizes for v in size.free_vars()):
        return None
    if any((as_int(size) or lanes) < lanes for size in sizes):
        return None
    others = [loop for loop in nest.loops if loop is not across and loop is not down]
    conditions: list[Value] = [less(lanes - 1, size) for size in sizes if as_int(size) is None]
    return conditions, _tiles(others, down, across, store, turned, lanes)


def both(conditions: Sequence[Value]) -> Value:
    return reduce(lambda a, b: Binary("and", a, b), conditions)


def _contiguous_loop(turned: Sequence[Load], loops: Sequence[For]) -> For | None:
    """The one loop along which all these loads are contiguous."""
    found = [loop for loop in loops if turned and all(stride(load, loop.var) == 1 for load in turned)]
    return found[0] if len(found) == 1 else None


def _tiles(others: list[For], down: For, across: For, store: Store, turned: Sequence[Load], lanes: int) -> Stmt:
    """As they are read; where rows of the result begin in the same places of a cache, whose lines then are of few rows
    at a time, in groups of which some are written one after another of each row (docs/measurements/cpus.md,
    transpose)."""
    columns, rows = ceildiv(down.extent, lanes), ceildiv(across.extent, lanes)

    def tiles(together: int) -> Stmt:
        names = (f"{down.var.name}b", f"{across.var.name}g", f"{down.var.name}t", f"{across.var.name}t")
        block, group, column, row = (SymVar(name, lower=0) for name in names)
        count = smin(rows - group * together, together)
        above = smin((group * together + (row if together > 1 else 0)) * lanes, across.extent - lanes)
        first = smin((block * BLOCK + column) * lanes, down.extent - lanes)
        tile = _tile(store, turned, (down.var, first), (across.var, above), lanes)
        inner = For(column, smin(columns - block * BLOCK, BLOCK), For(row, count, tile) if together > 1 else tile)
        blocks, groups = ceildiv(columns, BLOCK), ceildiv(rows, together)
        return parallel_nest([*others, For(block, blocks, seq()), For(group, groups, seq())], inner)

    apart = coefficient(offset(store), down.var)
    assert apart is not None
    are_alike = less(sym(apart) % (ALIKE // dtypes.itemsize(store.buffer.dtype)), 1)
    return with_variant(are_alike, Substitute(fresh=True).stmt(tiles(GROUP)), tiles(1))


def _tile(
    store: Store, turned: Sequence[Load], down: tuple[SymVar, SymExpr], across: tuple[SymVar, SymExpr], lanes: int
) -> Stmt:
    tiles: dict[tuple[Buffer, tuple[SymExpr, ...]], Buffer] = {}
    stmts: list[Stmt] = []
    for load in turned:
        if (load.buffer, load.indices) in tiles:
            continue
        tile = Buffer(f"{load.buffer.name}_tile", (sym(lanes), sym(lanes)), load.dtype, "local")
        tiles[load.buffer, load.indices] = tile
        r, lane = SymVar("r", upper=lanes - 1), SymVar("l", upper=lanes - 1)
        value = Substitute({across[0]: across[1] + r, down[0]: down[1] + lane}).value(load)
        stmts.append(_square(r, lane, Store(tile, (r, lane), value), lanes))
    r, lane = SymVar("r", upper=lanes - 1), SymVar("l", upper=lanes - 1)
    placed = _FromTiles(tiles, (lane, r)).stmt(store)
    stmts.append(_square(r, lane, Substitute({across[0]: across[1] + lane, down[0]: down[1] + r}).stmt(placed), lanes))
    body = seq(*stmts)
    for tile in tiles.values():
        body = Allocate(tile, body)
    return body


def _square(r: SymVar, lane: SymVar, body: Stmt, lanes: int) -> Stmt:
    return For(r, sym(lanes), For(lane, sym(lanes), body, "vectorized"), "unrolled")


class _FromTiles(ProgramRewriter):
    def __init__(self, tiles: dict[tuple[Buffer, tuple[SymExpr, ...]], Buffer], at: tuple[SymExpr, ...]) -> None:
        super().__init__()
        self._tiles, self._at = tiles, at

    def _value(self, value: Value) -> Value:
        tile = self._tiles.get((value.buffer, value.indices)) if isinstance(value, Load) else None
        return super()._value(value) if tile is None else Load(tile, self._at)
