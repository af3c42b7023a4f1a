"""Register tiles for windows that move over an image with channels first: depthwise convolution and pooling.

    for n, c, h, w:
        e = 0
        for kh, kw: e += (x[n, c, h*s + kh - p, w*s + kw - p] if inside else 0) * f[c, kh, kw]
        out[n, c, h, w] = g(e)

Vectors run along w. A tile is one vector in a few rows h. All taps are unrolled, one row of x after another, so that a
vector of x that several rows of windows cover is loaded once and is live only for these. Tiles in the middle of the
image have no conditions. Tiles at borders mask their loads, from a first to a last lane, which depend on the tap along
w alone, and skip rows outside x.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from relaxlite.ir.ops.nn_conv import MAX_STRIDE, MAX_TAPS
from relaxlite.ir.program import Allocate, Binary, Buffer, For, IfThenElse, Load, Select, Seq, Stmt, Store, Value, seq
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, loads
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, ceildiv, floordiv, smax, smin, substitute, sym
from relaxlite.passes.loops.access import accesses, stride
from relaxlite.passes.loops.pattern import perfect_nest
from relaxlite.passes.loops.transforms import distribute, less, nest
from relaxlite.passes.products.reduction import Block
from relaxlite.passes.products.register_tile import grid
from relaxlite.passes.products.windows import Masked, Without, all_inside, conditions_of, slope, symbols_in
from relaxlite.records import dataclass

_MAX_ROWS = 4
_MAX_TERMS = 128


@dataclass(frozen=True, slots=True)
class NchwTile:
    """A block of windows with channels first, and the size of its register tiles.

    A tap counts where all of `rows`, which do not depend on w, and all of `inside`, which do, are >= 0; it combines
    `value`. `row`: index of the row of x that is read.
    """

    block: Block
    row: SymExpr
    rows: tuple[SymExpr, ...]
    inside: tuple[SymExpr, ...]
    value: Value
    outside: Select | None  # the Select that `value` replaces; masked tiles keep it
    lanes: int
    height: int  # rows of windows in a tile

    @property
    def along(self) -> For:
        return self.block.spatial[-1]

    @property
    def down(self) -> For:
        """The loop over rows of windows; of one dimension, a loop outside of it."""
        return self.block.spatial[-2]

    @property
    def taps(self) -> tuple[For, ...]:
        return perfect_nest(self.block.stmts[1]).loops

    @property
    def tap_down(self) -> For | None:
        """The loop over taps whose steps move to the next row of x, in all conditions; None: there is none."""
        result = [tap for tap in self.taps[:-1] if tap.var in self.row.free_vars()]
        if len(result) != 1 or slope(self.row, result[0].var) != 1:
            return None
        (tap,), step = result, slope(self.row, self.down.var) or 0
        is_seen = all(slope(d, self.down.var) == step * (slope(d, tap.var) or 0) for d in self.rows)
        return tap if is_seen else None


def nchw_tile_of(block: Block, lanes: int) -> NchwTile | None:
    """Match a block as windows with channels first; None: no match."""
    if lanes == 1 or block.is_pair or len(block.spatial) < 2:
        return None
    down, along = block.spatial[-2:]
    taps = perfect_nest(block.stmts[1]).loops
    sizes = [as_int(loop.extent) or MAX_TAPS + 1 for loop in taps]
    if not 1 < math.prod(sizes) <= MAX_TAPS:
        return None
    images = [load for load in loads(block.update) if along.var in symbols_in(load.indices)]
    if len(images) != 1 or not 1 <= (stride(images[0], along.var) or 0) <= MAX_STRIDE:
        return None
    (image,) = images
    if any(loop.var not in symbols_in(image.indices) for loop in block.spatial):  # what it reads can serve several rows
        return None
    *outer, last = image.indices
    if along.var in symbols_in(outer) or any(tap.var in last.free_vars() for tap in taps[:-1]):
        return None
    others = [a for a in accesses(block.body) if a.buffer not in (image.buffer, block.body.buffer)]
    if any(stride(a, along.var) not in (0, 1) for a in others):
        return None
    result = conditions_of(block.update)
    if result is None:
        return None
    conditions, select = result
    windows, tap_vars = {down.var, along.var}, {tap.var for tap in taps}
    has_rows = down.var in symbols_in(outer) and all(slope(index, down.var) is not None for index in outer)
    if not any(windows & {*index.free_vars()} and tap_vars & {*index.free_vars()} for index in image.indices):
        return None
    for index, size in zip(image.indices, image.buffer.shape, strict=True):
        tiled = windows if has_rows else {along.var}
        if tiled & set(index.free_vars()):  # windows beyond the last one read nothing
            conditions = [*conditions, size - 1 - index]
    inner = {along.var, taps[-1].var}
    if any(slope(d, var) is None for d in conditions for var in windows | tap_vars):
        return None
    inside = [d for d in conditions if inner & set(d.free_vars())]
    rows = [d for d in conditions if not inner & set(d.free_vars())]
    if not all(slope(d, along.var) for d in inside) or any(down.var in d.free_vars() for d in inside):
        return None
    height = max(1, min(_MAX_ROWS, _MAX_TERMS // math.prod(sizes))) if has_rows else 1
    value = Without(select).value(block.update.value) if select is not None else block.update.value
    row = outer[-1] if outer else sym(0)
    return NchwTile(block, row, _unique(rows), _unique(inside), value, select, lanes, height)


def _unique(conditions: list[SymExpr]) -> tuple[SymExpr, ...]:
    return tuple(dict.fromkeys(conditions))


def tiled_nchw(nchw: NchwTile) -> Stmt:
    """Lower windows to register tiles, in parallel over images, channels and rows of tiles."""
    tile, first = SymVar(f"{nchw.along.var.name}o", lower=0), SymVar(f"{nchw.down.var.name}o", lower=0)
    start, top = tile * nchw.lanes, first * nchw.height
    middle, border = (_tile(nchw, start, top, masked=masked) for masked in (False, True))
    body = IfThenElse(all_inside(_corners(nchw, start, top)), middle, border)
    axes = [(loop.var, loop.extent) for loop in nchw.block.spatial[:-2]]
    axes.append((first, ceildiv(nchw.down.extent, nchw.height)))
    return grid(axes, For(tile, ceildiv(nchw.along.extent, nchw.lanes), body))


def _corners(nchw: NchwTile, start: SymExpr, top: SymExpr) -> list[SymExpr]:
    """Return expressions that are all >= 0 where all windows of a tile exist and all of their taps lie inside.

    The conditions are linear, so each is evaluated at the corner of the tile where it is least.
    """
    begins = {tap.var: (sym(0), (as_int(tap.extent) or 1) - 1) for tap in nchw.taps}
    begins |= {nchw.along.var: (start, nchw.lanes - 1), nchw.down.var: (top, nchw.height - 1)}
    result = [nchw.along.extent - start - nchw.lanes]
    if nchw.height > 1:
        result.append(nchw.down.extent - top - nchw.height)
    for d in (*nchw.rows, *nchw.inside):
        at = {var: begin + (0 if (slope(d, var) or 0) >= 0 else last) for var, (begin, last) in begins.items()}
        result.append(substitute(d, at))
    return list(dict.fromkeys(result))


def _tile(nchw: NchwTile, start: SymExpr, top: SymExpr, *, masked: bool) -> Stmt:
    """Return the code of a tile: a vector of windows from `start` on, in `height` rows from `top` on."""
    along, down = nchw.along, nchw.down
    row = For(SymVar("r", upper=nchw.height - 1), sym(nchw.height), Seq(()), "unrolled")
    lane = For(SymVar("l", upper=nchw.lanes - 1), sym(nchw.lanes), Seq(()), "vectorized")
    init, _, *final = nchw.block.stmts
    value, hoisted = nchw.value, _HoistLoads({along.var, down.var} if nchw.height > 1 else {along.var})
    if masked:
        value = _masked(nchw, start, lane.var)
        final = [IfThenElse(less(along.var, along.extent), hoisted.stmt(s)) for s in final]
        if nchw.height > 1:
            final = [IfThenElse(less(down.var, down.extent), s) for s in final]
    update = nest(nchw.taps, replace(nchw.block.update, value=value))
    at = Substitute({along.var: start + lane.var, down.var: top + row.var}, fresh=True)
    block = at.stmt(replace(nchw.block.body, body=seq(init, update, *final)))
    assert isinstance(block, Allocate)
    block = distribute([row, lane], block)
    assert isinstance(block.body, Seq)
    init, update, *final = block.body.stmts
    stmt: Stmt = replace(block, body=seq(init, _by_rows(nchw, update, top, masked=masked), *final))
    at = Substitute({down.var: top})
    stmt = seq(*(Store(buffer, (), at.value(Load(*place))) for place, buffer in hoisted.buffers.items()), stmt)
    for buffer in hoisted.buffers.values():
        stmt = Allocate(buffer, stmt)
    return stmt


def _by_rows(nchw: NchwTile, update: Stmt, top: SymExpr, *, masked: bool) -> Stmt:
    """Unroll the loops over taps and rows of windows, over rows of x instead of taps along h.

    All uses of a vector of x are then adjacent. Rows outside x are skipped.

    for kh, kw, r: f(h*s + kh)   =>   for q: if q inside: for kw, r: if 0 <= q - r*s < size: kh = q - r*s; f(h*s + kh)
    """
    taps: list[For] = []
    for _ in nchw.taps:
        assert isinstance(update, For)
        taps.append(replace(update, kind="unrolled"))
        update = update.body
    assert isinstance(update, For)  # over rows of windows
    now: dict[SymVar, SymExpr] = {old.var: new.var for old, new in zip(nchw.taps, taps, strict=True)}
    conditions = nchw.rows if masked else ()
    tap = nchw.tap_down
    if tap is None:
        now[nchw.down.var] = top + update.var
        return nest([*taps, update], _where_inside(conditions, now, update.body))
    k, size, step = nchw.taps.index(tap), as_int(tap.extent) or 1, slope(nchw.row, nchw.down.var) or 0
    place = SymVar("q", lower=0, upper=size - 1 + (nchw.height - 1) * step)
    at = place - update.var * step
    body = IfThenElse(all_inside([at, size - 1 - at]), Substitute({taps[k].var: at}).stmt(update.body))
    taps[k] = For(place, sym(size + (nchw.height - 1) * step), Seq(()), "unrolled")
    now |= {tap.var: place, nchw.down.var: top}
    return nest(taps[:-1], _where_inside(conditions, now, nest([taps[-1], update], body)))


def _where_inside(conditions: Sequence[SymExpr], now: Mapping[SymVar, SymExpr], body: Stmt) -> Stmt:
    return IfThenElse(all_inside([substitute(d, now) for d in conditions]), body) if conditions else body


class _HoistLoads(ProgramRewriter):
    """Hoists loads that are the same for all windows of a tile into local buffers.

    Under a lane mask such a load would need a test for whether any lane is active.
    """

    def __init__(self, variables: set[SymVar]) -> None:
        super().__init__()
        self._variables = variables
        self.buffers: dict[tuple[Buffer, tuple[SymExpr, ...]], Buffer] = {}

    def _value(self, value: Value) -> Value:
        if isinstance(value, Select):  # its condition may guard an access outside
            return value
        if not isinstance(value, Load) or value.buffer.scope == "local" or self._variables & symbols_in(value.indices):
            return super()._value(value)
        buffer = Buffer(f"{value.buffer.name}_kept", (), value.dtype, "local")
        return Load(self.buffers.setdefault((value.buffer, value.indices), buffer), ())


def _masked(nchw: NchwTile, start: SymExpr, lane: SymVar) -> Value:
    """Return the update's value with loads masked in lanes whose tap lies outside."""
    first, end = sym(0), sym(nchw.lanes)
    for d in nchw.inside:
        step = slope(d, nchw.along.var) or 1
        rest = substitute(d, {nchw.along.var: start})
        if step > 0:
            first = smax(first, ceildiv(-rest, step))
        else:
            end = smin(end, floordiv(rest, -step) + 1)
    cond: Value = less(lane, end)
    if as_int(first) != 0:
        cond = Binary("and", cond, less(first - 1, lane))
    if nchw.outside is not None:
        return Without(nchw.outside, replace(nchw.outside, cond=cond)).value(nchw.block.update.value)
    return Masked(nchw.along.var, cond).value(nchw.value)
