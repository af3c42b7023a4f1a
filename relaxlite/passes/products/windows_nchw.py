"""Register tiles for windows that move over an image with channels first: depthwise convolution and pooling.

    for n, c, h, w:
        e = 0
        for kh, kw: e += (x[n, c, h*s + kh - p, w*s + kw - p] if inside else 0) * f[c, kh, kw]
        out[n, c, h, w] = g(e)

Vectors run along w. A tile is one of them in a few rows h. All taps are unrolled, one row of x after another, so that a
vector of x that several rows of windows cover is loaded once, and not kept longer than that. Conditions that say what
lies inside x are taken out of tiles in the middle of the image. Others mask their loads: from a first to a last lane,
which depend on the tap along w alone, and all of them where a row lies outside.
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
    """A block of windows: a tap counts where all of `rows`, which do not move along w, and of `inside`, which do, are
    >= 0; what is combined then is `value`. `row` is that of x which is read."""

    block: Block
    row: SymExpr
    rows: tuple[SymExpr, ...]
    inside: tuple[SymExpr, ...]
    value: Value
    outside: Select | None  # what `value` has in place of, where conditions are to be masks
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
        """The loop over taps that go to the next row of x with each step, as all conditions see it; None: there is
        none."""
        result = [tap for tap in self.taps[:-1] if tap.var in self.row.free_vars()]
        if len(result) != 1 or slope(self.row, result[0].var) != 1:
            return None
        (tap,), step = result, slope(self.row, self.down.var) or 0
        is_seen = all(slope(d, self.down.var) == step * (slope(d, tap.var) or 0) for d in self.rows)
        return tap if is_seen else None


def nchw_tile_of(block: Block, lanes: int) -> NchwTile | None:
    """The block as windows with channels first; None: it is something else."""
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
    windows, moved = {down.var, along.var}, {tap.var for tap in taps}
    has_rows = down.var in symbols_in(outer) and all(slope(index, down.var) is not None for index in outer)
    if not any(windows & {*index.free_vars()} and moved & {*index.free_vars()} for index in image.indices):
        return None
    for index, size in zip(image.indices, image.buffer.shape, strict=True):
        tiled = windows if has_rows else {along.var}
        if tiled & set(index.free_vars()):  # windows beyond the last one read nothing
            conditions = [*conditions, size - 1 - index]
    inner = {along.var, taps[-1].var}
    if any(slope(d, var) is None for d in conditions for var in windows | moved):
        return None
    inside = [d for d in conditions if inner & set(d.free_vars())]
    rows = [d for d in conditions if not inner & set(d.free_vars())]
    if not all(slope(d, along.var) for d in inside) or any(down.var in d.free_vars() for d in inside):
        return None
    height = max(1, min(_MAX_ROWS, _MAX_TERMS // math.prod(sizes))) if has_rows else 1
    value = Without(select).value(block.update.value) if select is not None else block.update.value
    row = outer[-1] if outer else sym(0)
    return NchwTile(block, row, _each_once(rows), _each_once(inside), value, select, lanes, height)


def _each_once(conditions: list[SymExpr]) -> tuple[SymExpr, ...]:
    return tuple(dict.fromkeys(conditions))


def tiled_nchw(planes: NchwTile) -> Stmt:
    """The block in tiles, in parallel over images, channels and rows of tiles."""
    tile, first = SymVar(f"{planes.along.var.name}o", lower=0), SymVar(f"{planes.down.var.name}o", lower=0)
    start, top = tile * planes.lanes, first * planes.height
    middle, border = (_tile(planes, start, top, masked=masked) for masked in (False, True))
    body = IfThenElse(all_inside(_corners(planes, start, top)), middle, border)
    axes = [(loop.var, loop.extent) for loop in planes.block.spatial[:-2]]
    axes.append((first, ceildiv(planes.down.extent, planes.height)))
    return grid(axes, For(tile, ceildiv(planes.along.extent, planes.lanes), body))


def _corners(planes: NchwTile, start: SymExpr, top: SymExpr) -> list[SymExpr]:
    """Expressions that are all >= 0 where all of a tile's windows exist and all of their taps lie inside: conditions at
    the corner of the tile where they are least, as they are linear."""
    begins = {tap.var: (sym(0), (as_int(tap.extent) or 1) - 1) for tap in planes.taps}
    begins |= {planes.along.var: (start, planes.lanes - 1), planes.down.var: (top, planes.height - 1)}
    result = [planes.along.extent - start - planes.lanes]
    if planes.height > 1:
        result.append(planes.down.extent - top - planes.height)
    for d in (*planes.rows, *planes.inside):
        at = {var: begin + (0 if (slope(d, var) or 0) >= 0 else last) for var, (begin, last) in begins.items()}
        result.append(substitute(d, at))
    return list(dict.fromkeys(result))


def _tile(planes: NchwTile, start: SymExpr, top: SymExpr, *, masked: bool) -> Stmt:
    """A vector of windows from `start` on, in each of some rows from `top` on."""
    along, down = planes.along, planes.down
    row = For(SymVar("r", upper=planes.height - 1), sym(planes.height), Seq(()), "unrolled")
    lane = For(SymVar("l", upper=planes.lanes - 1), sym(planes.lanes), Seq(()), "vectorized")
    init, _, *final = planes.block.stmts
    value, kept = planes.value, _Kept({along.var, down.var} if planes.height > 1 else {along.var})
    if masked:
        value = _masked(planes, start, lane.var)
        final = [IfThenElse(less(along.var, along.extent), kept.stmt(s)) for s in final]
        if planes.height > 1:
            final = [IfThenElse(less(down.var, down.extent), s) for s in final]
    update = nest(planes.taps, replace(planes.block.update, value=value))
    at = Substitute({along.var: start + lane.var, down.var: top + row.var}, fresh=True)
    block = at.stmt(replace(planes.block.body, body=seq(init, update, *final)))
    assert isinstance(block, Allocate)
    block = distribute([row, lane], block)
    assert isinstance(block.body, Seq)
    init, update, *final = block.body.stmts
    stmt: Stmt = replace(block, body=seq(init, _by_rows(planes, update, top, masked=masked), *final))
    at = Substitute({down.var: top})
    stmt = seq(*(Store(buffer, (), at.value(Load(*place))) for place, buffer in kept.found.items()), stmt)
    for buffer in kept.found.values():
        stmt = Allocate(buffer, stmt)
    return stmt


def _by_rows(planes: NchwTile, update: Stmt, top: SymExpr, *, masked: bool) -> Stmt:
    """The loops over taps and rows of windows, unrolled: over rows of x instead of taps that go down, so that all that
    uses a vector of x stands together. Rows that lie outside are left out.

    for kh, kw, r: f(h*s + kh)   =>   for q: if q inside: for kw, r: if 0 <= q - r*s < size: kh = q - r*s; f(h*s + kh)
    """
    taps: list[For] = []
    for _ in planes.taps:
        assert isinstance(update, For)
        taps.append(replace(update, kind="unrolled"))
        update = update.body
    assert isinstance(update, For)  # over rows of windows
    now: dict[SymVar, SymExpr] = {old.var: new.var for old, new in zip(planes.taps, taps, strict=True)}
    conditions = planes.rows if masked else ()
    tap = planes.tap_down
    if tap is None:
        now[planes.down.var] = top + update.var
        return nest([*taps, update], _where_inside(conditions, now, update.body))
    k, size, step = planes.taps.index(tap), as_int(tap.extent) or 1, slope(planes.row, planes.down.var) or 0
    place = SymVar("q", lower=0, upper=size - 1 + (planes.height - 1) * step)
    at = place - update.var * step
    body = IfThenElse(all_inside([at, size - 1 - at]), Substitute({taps[k].var: at}).stmt(update.body))
    taps[k] = For(place, sym(size + (planes.height - 1) * step), Seq(()), "unrolled")
    now |= {tap.var: place, planes.down.var: top}
    return nest(taps[:-1], _where_inside(conditions, now, nest([taps[-1], update], body)))


def _where_inside(conditions: Sequence[SymExpr], now: Mapping[SymVar, SymExpr], body: Stmt) -> Stmt:
    return IfThenElse(all_inside([substitute(d, now) for d in conditions]), body) if conditions else body


class _Kept(ProgramRewriter):
    """Reads what is the same for all windows of a tile from local buffers: where only some lanes are there, reading it
    from memory would have to ask first whether any is."""

    def __init__(self, moving: set[SymVar]) -> None:
        super().__init__()
        self._moving = moving
        self.found: dict[tuple[Buffer, tuple[SymExpr, ...]], Buffer] = {}

    def _value(self, value: Value) -> Value:
        if isinstance(value, Select):  # what it does not take may lie outside
            return value
        if not isinstance(value, Load) or value.buffer.scope == "local" or self._moving & symbols_in(value.indices):
            return super()._value(value)
        kept = Buffer(f"{value.buffer.name}_kept", (), value.dtype, "local")
        return Load(self.found.setdefault((value.buffer, value.indices), kept), ())


def _masked(planes: NchwTile, start: SymExpr, lane: SymVar) -> Value:
    """The update's value, which loads nothing in lanes whose tap lies outside."""
    first, end = sym(0), sym(planes.lanes)
    for d in planes.inside:
        step = slope(d, planes.along.var) or 1
        rest = substitute(d, {planes.along.var: start})
        if step > 0:
            first = smax(first, ceildiv(-rest, step))
        else:
            end = smin(end, floordiv(rest, -step) + 1)
    cond: Value = less(lane, end)
    if as_int(first) != 0:
        cond = Binary("and", cond, less(first - 1, lane))
    if planes.outside is not None:
        return Without(planes.outside, replace(planes.outside, cond=cond)).value(planes.block.update.value)
    return Masked(planes.along.var, cond).value(planes.value)
