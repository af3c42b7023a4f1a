"""Schedules of transposes and ops fused with them: nests whose loads and store are contiguous along different loops.

    for n: for s: for c: out[n, c, s] = f(x[n, s, c])       in square tiles, of as many rows as a vector has lanes

        tile[r, l] = x[n, s0 + r, c0 + l]                   vectors along c
        out[n, c0 + r, s0 + l] = f(tile[l, r])              vectors along s: the tile is transposed in registers

The last tile of a row or column overlaps the previous one, so that no tile is masked and some elements are written
twice. If a dimension is shorter than a tile, the usual schedule runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from relaxlite import dtypes
from relaxlite.ir.program import Allocate, Binary, Buffer, For, Load, Select, Stmt, Store, Value, seq
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, all_values, loads
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, ceildiv, smin, sym
from relaxlite.passes.loops.access import coefficient, offset, stride
from relaxlite.passes.loops.parallel import collapse_parallel
from relaxlite.passes.loops.pattern import perfect_nest
from relaxlite.passes.loops.transforms import less, select_version

MAX_TILE_LANES = 16  # a larger tile would not fit the registers
BLOCK = 4  # consecutive tiles along a row of the source: a few cache lines
GROUP, ALIKE = 4, 2048  # consecutive tiles along a row of the result, if rows are a multiple of ALIKE bytes
MAX_TILES = 2  # transposed operands: each needs one register per lane


def tiled_transpose(stage: Stmt, lanes: int) -> tuple[list[Value], Stmt] | None:
    """Tile a nest whose store is contiguous along one loop and some loads along another.

    Returns (conditions on symbolic sizes under which the tiles are valid, tiled nest); None: another nest.
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
    transposed = [load for load in loads(store) if stride(load, across.var) not in (0, 1)]
    down = _contiguous_loop(transposed, nest.loops)
    if down is None or len(set(x.buffer for x in transposed)) > MAX_TILES:
        return None
    moving: list[Load | Store] = [*transposed, store]
    if any(coefficient(offset(access), loop.var) is None for access in moving for loop in (across, down)):
        return None  # not linear
    if stride(store, down.var) in (0, 1):
        return None
    sizes = [across.extent, down.extent]
    if any(v in {loop.var for loop in nest.loops} for size in sizes for v in size.free_vars()):
        return None
    if any((as_int(size) or lanes) < lanes for size in sizes):
        return None
    outer_loops = [loop for loop in nest.loops if loop is not across and loop is not down]
    conditions: list[Value] = [less(lanes - 1, size) for size in sizes if as_int(size) is None]
    return conditions, _tiles(outer_loops, down, across, store, transposed, lanes)


def all_of(conditions: Sequence[Value]) -> Value:
    """The conjunction of one or more conditions."""
    return reduce(lambda a, b: Binary("and", a, b), conditions)


def _contiguous_loop(transposed: Sequence[Load], loops: Sequence[For]) -> For | None:
    """The only loop along which all transposed loads are contiguous; else None."""
    candidates = [loop for loop in loops if transposed and all(stride(load, loop.var) == 1 for load in transposed)]
    return candidates[0] if len(candidates) == 1 else None


def _tiles(
    outer_loops: list[For], down: For, across: For, store: Store, transposed: Sequence[Load], lanes: int
) -> Stmt:
    """The loops over tiles, in the order of the source. If rows of the result map to the same cache sets, groups of
    tiles along a row of the result are adjacent, to avoid conflict misses (docs/measurements/cpus.md, transpose)."""
    columns, rows = ceildiv(down.extent, lanes), ceildiv(across.extent, lanes)

    def tiles(group_size: int) -> Stmt:
        names = (f"{down.var.name}b", f"{across.var.name}g", f"{down.var.name}t", f"{across.var.name}t")
        block, group, column, row = (SymVar(name, lower=0) for name in names)
        count = smin(rows - group * group_size, group_size)
        above = smin((group * group_size + (row if group_size > 1 else 0)) * lanes, across.extent - lanes)
        first = smin((block * BLOCK + column) * lanes, down.extent - lanes)
        tile = _tile(store, transposed, (down.var, first), (across.var, above), lanes)
        inner = For(column, smin(columns - block * BLOCK, BLOCK), For(row, count, tile) if group_size > 1 else tile)
        blocks, groups = ceildiv(columns, BLOCK), ceildiv(rows, group_size)
        return collapse_parallel([*outer_loops, For(block, blocks, seq()), For(group, groups, seq())], inner)

    row_stride = coefficient(offset(store), down.var)
    assert row_stride is not None
    has_conflicts = less(sym(row_stride) % (ALIKE // dtypes.itemsize(store.buffer.dtype)), 1)
    return select_version(has_conflicts, Substitute(fresh=True).stmt(tiles(GROUP)), tiles(1))


def _tile(
    store: Store, transposed: Sequence[Load], down: tuple[SymVar, SymExpr], across: tuple[SymVar, SymExpr], lanes: int
) -> Stmt:
    tiles: dict[tuple[Buffer, tuple[SymExpr, ...]], Buffer] = {}
    stmts: list[Stmt] = []
    for load in transposed:
        if (load.buffer, load.indices) in tiles:
            continue
        tile = Buffer(f"{load.buffer.name}_tile", (sym(lanes), sym(lanes)), load.dtype, "local")
        tiles[load.buffer, load.indices] = tile
        r, lane = SymVar("r", upper=lanes - 1), SymVar("l", upper=lanes - 1)
        value = Substitute({across[0]: across[1] + r, down[0]: down[1] + lane}).value(load)
        stmts.append(_tile_loops(r, lane, Store(tile, (r, lane), value), lanes))
    r, lane = SymVar("r", upper=lanes - 1), SymVar("l", upper=lanes - 1)
    placed = _FromTiles(tiles, (lane, r)).stmt(store)
    stmts.append(
        _tile_loops(r, lane, Substitute({across[0]: across[1] + lane, down[0]: down[1] + r}).stmt(placed), lanes)
    )
    body = seq(*stmts)
    for tile in tiles.values():
        body = Allocate(tile, body)
    return body


def _tile_loops(r: SymVar, lane: SymVar, body: Stmt, lanes: int) -> Stmt:
    return For(r, sym(lanes), For(lane, sym(lanes), body, "vectorized"), "unrolled")


class _FromTiles(ProgramRewriter):
    def __init__(self, tiles: dict[tuple[Buffer, tuple[SymExpr, ...]], Buffer], at: tuple[SymExpr, ...]) -> None:
        super().__init__()
        self._tiles, self._at = tiles, at

    def _value(self, value: Value) -> Value:
        tile = self._tiles.get((value.buffer, value.indices)) if isinstance(value, Load) else None
        return super()._value(value) if tile is None else Load(tile, self._at)
