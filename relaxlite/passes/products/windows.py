"""Register tiles for windows that move over an image, one per channel: depthwise convolution and pooling.

    for n, h, w, c:
        e = 0
        for kh, kw: e += (x[n, h*s + kh - p, w*s + kw - p, c] if inside else 0) * f[kh, kw, c]
        out[n, h, w, c] = g(e)

**Channels last** (`NhwcTile`): vectors run along the channels. A tile is a few neighbours along w, so that a vector of
x that several windows cover is loaded once (the taps along w are unrolled). Conditions that taps lie inside x are
hoisted out of the tile: those on rows of x skip a row of taps; those along w are tested once per tile.

**Channels first** (`NchwTile`): vectors run along w. A tile is one vector in a few rows h. All taps are unrolled, one
row of x after another, so that a vector of x that several rows of windows cover is loaded once and is live only for
these.

Tiles in the middle of an image have no conditions; tiles at its borders mask their loads.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

from relaxlite.ir.ops.nn_conv import MAX_STRIDE, MAX_TAPS
from relaxlite.ir.ops.scalars import identity
from relaxlite.ir.program import (
    Allocate,
    Binary,
    Buffer,
    Compare,
    For,
    IfThenElse,
    IndexValue,
    Literal,
    Load,
    Select,
    Seq,
    Stmt,
    Store,
    Value,
    seq,
)
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, loads, stores, walk_values
from relaxlite.ir.symbolic import IntLike, SymExpr, SymVar, as_int, ceildiv, floordiv, smax, smin, substitute, sym
from relaxlite.passes.loops.access import accesses, coefficient, stride
from relaxlite.passes.loops.parallel import collapse_parallel
from relaxlite.passes.loops.pattern import perfect_nest
from relaxlite.passes.loops.transforms import distribute, less, nest
from relaxlite.passes.products.prologue import Replacement, symbols_of
from relaxlite.passes.products.reduction import ReductionBlock
from relaxlite.passes.products.register_tile import grid
from relaxlite.records import dataclass

WINDOWS = 4  # neighbours along w in a tile with channels last
BLOCK_VECTORS = 4  # vectors of channels in a parallel iteration
MAX_UNROLLED = 12  # taps along w that are unrolled, of channels last
_MAX_ROWS = 4  # of windows in a tile with channels first
_MAX_TERMS = 128  # products of an element in a tile with channels first


@dataclass(frozen=True, slots=True)
class Windows(ABC):
    """A block of windows over an image.

    A row of taps counts where all of `rows`, which do not depend on the position along w, are >= 0; a tap where all of
    `inside`, which do, are. `select`: takes the combined value where the conditions hold; None: nothing is selected.
    """

    block: ReductionBlock
    rows: tuple[SymExpr, ...]
    inside: tuple[SymExpr, ...]
    select: Select | None
    lanes: int

    @property
    @abstractmethod
    def along(self) -> For:
        """The loop over the positions along w."""

    @property
    def taps(self) -> tuple[For, ...]:
        return perfect_nest(self.block.stmts[1]).loops

    @property
    def value(self) -> Value:
        """The combined value of a tap inside the image."""
        value = self.block.update.value
        return value if self.select is None else Replacement({id(self.select): self.select.then}).value(value)

    def masked(self, cond: Value) -> Value:
        """Return the combined value with loads masked by a condition."""
        value = self.block.update.value
        if self.select is None:
            return _MaskLoads(self.along.var, cond).value(value)
        return Replacement({id(self.select): replace(self.select, cond=cond)}).value(value)


@dataclass(frozen=True, slots=True)
class NhwcTile(Windows):
    """Windows with channels last, whose vectors run along the channels."""

    @property
    def along(self) -> For:
        return self.block.spatial[-2]

    @property
    def channel(self) -> For:
        return self.block.spatial[-1]


@dataclass(frozen=True, slots=True)
class NchwTile(Windows):
    """Windows with channels first, whose vectors run along w; `row`: index of the row of x that is read."""

    row: SymExpr
    height: int  # rows of windows in a tile

    @property
    def along(self) -> For:
        return self.block.spatial[-1]

    @property
    def down(self) -> For:
        """The loop over rows of windows; of one dimension, a loop outside of it."""
        return self.block.spatial[-2]

    @property
    def tap_down(self) -> For | None:
        """The loop over taps whose steps move to the next row of x, in all conditions; None: there is none."""
        result = [tap for tap in self.taps[:-1] if tap.var in self.row.free_vars()]
        if len(result) != 1 or _slope(self.row, result[0].var) != 1:
            return None
        (tap,), step = result, _slope(self.row, self.down.var) or 0
        is_seen = all(_slope(d, self.down.var) == step * (_slope(d, tap.var) or 0) for d in self.rows)
        return tap if is_seen else None


# Matching


def _image_of(block: ReductionBlock, along: For) -> tuple[Load, tuple[For, ...], int] | None:
    """Return (the one load that moves with `along`, the loops over taps, the number of taps), of few taps; or None."""
    taps = perfect_nest(block.stmts[1]).loops
    count = math.prod(as_int(loop.extent) or MAX_TAPS + 1 for loop in taps)
    images = [load for load in loads(block.update) if along.var in symbols_of(load)]
    return (images[0], taps, count) if 1 < count <= MAX_TAPS and len(images) == 1 else None


def nhwc_tile_of(block: ReductionBlock, lanes: int) -> NhwcTile | None:
    """Match a block as windows with channels last; None: no match."""
    if lanes == 1 or block.is_pair or len(block.spatial) < 2:
        return None
    *_, along, channel = block.spatial
    match, conditions_of_update = _image_of(block, along), _conditions(block.update)
    if match is None or conditions_of_update is None:
        return None
    (image, taps, _), (conditions, select) = match, conditions_of_update
    others: list[Load | Store] = [*loads(block.update), *stores(block.body)]
    if any(stride(a, channel.var) not in (0, 1) for a in others if a.buffer is not block.body.buffer):
        return None
    if (as_int(taps[-1].extent) or 0) > MAX_UNROLLED:
        return None
    if stride(image, channel.var) != 1 or image.indices[-1] is not channel.var:
        return None
    inner = {along.var, taps[-1].var}
    rows, inside = _partition(conditions, inner)
    for index, size in zip(image.indices, image.buffer.shape, strict=True):
        if along.var in index.free_vars():  # windows beyond the last one read nothing, on either side
            inside.append(index if (_slope(index, along.var) or 0) < 0 else size - 1 - index)
    if any(_slope(d, var) is None for d in inside for var in inner) or any(
        channel.var in d.free_vars() for d in inside
    ):
        return None
    return NhwcTile(block, tuple(rows), _unique(inside), select, lanes)


def nchw_tile_of(block: ReductionBlock, lanes: int) -> NchwTile | None:
    """Match a block as windows with channels first; None: no match."""
    if lanes == 1 or block.is_pair or len(block.spatial) < 2:
        return None
    down, along = block.spatial[-2:]
    match, conditions_of_update = _image_of(block, along), _conditions(block.update)
    if match is None or conditions_of_update is None:
        return None
    (image, taps, num_taps), (conditions, select) = match, conditions_of_update
    (*outer, last), seen = image.indices, symbols_of(image)
    if not 1 <= (stride(image, along.var) or 0) <= MAX_STRIDE:
        return None
    if any(loop.var not in seen for loop in block.spatial):  # what it reads can serve several rows
        return None
    of_rows = {v for index in outer for v in index.free_vars()}
    if along.var in of_rows or any(tap.var in last.free_vars() for tap in taps[:-1]):
        return None
    others = [a for a in accesses(block.body) if a.buffer not in (image.buffer, block.body.buffer)]
    if any(stride(a, along.var) not in (0, 1) for a in others):
        return None
    windows, tap_vars = {down.var, along.var}, {tap.var for tap in taps}
    has_rows = down.var in of_rows and all(_slope(index, down.var) is not None for index in outer)
    if not any(windows & {*index.free_vars()} and tap_vars & {*index.free_vars()} for index in image.indices):
        return None
    for index, size in zip(image.indices, image.buffer.shape, strict=True):
        tiled = windows if has_rows else {along.var}
        if tiled & set(index.free_vars()):  # windows beyond the last one read nothing
            conditions = [*conditions, size - 1 - index]
    if any(_slope(d, var) is None for d in conditions for var in windows | tap_vars):
        return None
    rows, inside = _partition(conditions, {along.var, taps[-1].var})
    if not all(_slope(d, along.var) for d in inside) or any(down.var in d.free_vars() for d in inside):
        return None
    height = max(1, min(_MAX_ROWS, _MAX_TERMS // num_taps)) if has_rows else 1
    return NchwTile(block, _unique(rows), _unique(inside), select, lanes, outer[-1] if outer else sym(0), height)


def _conditions(update: Store) -> tuple[list[SymExpr], Select | None] | None:
    """Return (terms, select): the update's one Select takes its value where all terms are >= 0; no effect elsewhere.

    select is None where the update has no Select. None: the update has another form.
    """
    value = update.value
    factor = isinstance(value, Binary) and value.op == "mul" and update.combine == "add"
    candidates = (value.a, value.b) if factor else (value,)  # type: ignore[union-attr]
    selects = [v for v in candidates if isinstance(v, Select)]
    if not selects:
        return ([], None) if not _has_select(value) else None
    (select, *other_selects) = selects
    neutral = identity(update.combine or "add", update.buffer.dtype)
    is_neutral = isinstance(select.other, Literal) and select.other.value == neutral.value
    terms = None if other_selects or not is_neutral or _has_select(select.then) else _terms(select.cond)
    return None if terms is None else (terms, select)


def _has_select(value: Value) -> bool:
    return any(isinstance(part, Select) for part in walk_values(value))


def _terms(cond: Value) -> list[SymExpr] | None:
    """Return expressions that are all >= 0 if and only if the condition holds; None: it has another form."""
    if isinstance(cond, Binary) and cond.op == "and":
        left, right = _terms(cond.a), _terms(cond.b)
        return None if left is None or right is None else left + right
    if not isinstance(cond, Compare):
        return None
    a, b = _as_index(cond.a), _as_index(cond.b)
    if a is None or b is None:
        return None
    return {"ge": [a - b], "gt": [a - b - 1], "le": [b - a], "lt": [b - a - 1]}.get(cond.op)


def _as_index(value: Value) -> SymExpr | None:
    if isinstance(value, Literal) and value.dtype == "int64" and isinstance(value.value, int):
        return sym(value.value)
    return value.index if isinstance(value, IndexValue) else None


def _partition(conditions: Sequence[SymExpr], inner: set[SymVar]) -> tuple[list[SymExpr], list[SymExpr]]:
    """Return the conditions without and with symbols of `inner`."""
    inside = [d for d in conditions if inner & set(d.free_vars())]
    return [d for d in conditions if not inner & set(d.free_vars())], inside


def _unique(conditions: Sequence[SymExpr]) -> tuple[SymExpr, ...]:
    return tuple(dict.fromkeys(conditions))


def _slope(expr: SymExpr, var: SymVar) -> int | None:
    result = coefficient(expr, var)
    return None if result is None else as_int(result)


# Code of both layouts


def _all_inside(terms: Sequence[SymExpr]) -> Value:
    """Return the condition that all expressions are >= 0."""
    cond: Value | None = None
    for term in terms:
        test = less(-1, term)
        cond = test if cond is None else Binary("and", cond, test)
    return cond if cond is not None else Literal(True, "bool")


def _where_inside(conditions: Sequence[SymExpr], now: Mapping[SymVar, IntLike], body: Stmt) -> Stmt:
    return IfThenElse(_all_inside([substitute(d, now) for d in conditions]), body) if conditions else body


def _corners(conditions: Sequence[SymExpr], begins: Mapping[SymVar, tuple[SymExpr, int]]) -> list[SymExpr]:
    """Evaluate linear conditions at the corner of a tile where each is least; `begins`: (first value, steps) of
    symbols."""
    return [
        substitute(
            d, {var: begin + (0 if (_slope(d, var) or 0) >= 0 else last) for var, (begin, last) in begins.items()}
        )
        for d in conditions
    ]


class _MaskLoads(ProgramRewriter):
    """Masks the loads that depend on a loop variable by a condition."""

    def __init__(self, var: SymVar, cond: Value) -> None:
        super().__init__()
        self._var, self._cond = var, cond

    def _value(self, value: Value) -> Value:
        if isinstance(value, Load) and self._var in symbols_of(value):
            return Select(self._cond, value, Literal(0, value.dtype))
        return super()._value(value)


# Channels last


def tiled_nhwc(tile: NhwcTile) -> Stmt:
    """Lower windows to tiles along w, in parallel over images, rows and blocks of channels."""
    lanes, extent = tile.lanes, tile.channel.extent
    vectors, block = ceildiv(extent, lanes), SymVar(f"{tile.channel.var.name}b", lower=0)
    vector, number = SymVar(f"{tile.channel.var.name}v", lower=0), SymVar(f"{tile.along.var.name}o", lower=0)
    at, start = block * BLOCK_VECTORS + vector, number * WINDOWS
    full, last_tap = extent // lanes, tile.taps[-1]
    begins = {tile.along.var: (start, WINDOWS - 1), last_tap.var: (sym(0), (as_int(last_tap.extent) or 1) - 1)}
    corners = [tile.along.extent - start - WINDOWS, *_corners(tile.inside, begins)]

    def channels(*, masked: bool) -> Stmt:
        inner, border = (_nhwc_code(tile, at * lanes, start, border=b, masked=masked) for b in (False, True))
        return IfThenElse(_all_inside(_unique(corners)), inner, border)

    body = channels(masked=False)
    if as_int(extent % lanes) != 0:
        body = IfThenElse(less(at, full), body, channels(masked=True)) if as_int(full) != 0 else channels(masked=True)
    count = smin(BLOCK_VECTORS, vectors - block * BLOCK_VECTORS)
    known = as_int(vectors)
    if known is not None and (known % BLOCK_VECTORS == 0 or known < BLOCK_VECTORS):
        count = sym(min(known, BLOCK_VECTORS))
    body = For(number, ceildiv(tile.along.extent, WINDOWS), For(vector, count, body))
    blocks = For(block, ceildiv(vectors, BLOCK_VECTORS), Seq(()))
    return collapse_parallel([*tile.block.spatial[:-2], blocks], body)


def _nhwc_code(tile: NhwcTile, channel: SymExpr, start: SymExpr, *, border: bool, masked: bool) -> Stmt:
    """Return the code of a tile: windows from `start` on, a vector of channels from `channel` on."""
    lanes = tile.lanes
    step, lane = SymVar("r", upper=WINDOWS - 1), SymVar("l", upper=lanes - 1)
    inner = [For(step, sym(WINDOWS), Seq(()), "unrolled"), For(lane, sym(lanes), Seq(()), "vectorized")]
    init, _, *final = tile.block.stmts
    value = tile.value
    if border:
        limit = sym(1)  # no lanes where a tap lies outside
        for d in tile.inside:
            limit = smin(limit, d + 1)
        value = tile.masked(less(lane, smax(limit, 0) * lanes))
        final = [IfThenElse(less(tile.along.var, tile.along.extent), s) for s in final]
    update = nest(tile.taps, replace(tile.block.update, value=value))
    at = {tile.along.var: start + step, tile.channel.var: channel + lane}
    block = Substitute(at, fresh=True).stmt(replace(tile.block.body, body=seq(init, update, *final)))
    assert isinstance(block, Allocate)
    block = distribute(inner, block, less(channel + lane, tile.channel.extent) if masked else None)
    assert isinstance(block.body, Seq)
    init, update, *final = block.body.stmts
    loops = perfect_nest(update).loops[: len(tile.taps)]
    now: dict[SymVar, IntLike] = {old.var: new.var for old, new in zip(tile.taps, loops, strict=True)}
    body = _where_inside(tile.rows, now, replace(loops[-1], kind="unrolled"))
    return replace(block, body=seq(init, nest(loops[:-1], body), *final))


# Channels first


def tiled_nchw(tile: NchwTile) -> Stmt:
    """Lower windows to register tiles, in parallel over images, channels and rows of tiles."""
    number, first = SymVar(f"{tile.along.var.name}o", lower=0), SymVar(f"{tile.down.var.name}o", lower=0)
    start, top = number * tile.lanes, first * tile.height
    begins = {tap.var: (sym(0), (as_int(tap.extent) or 1) - 1) for tap in tile.taps}
    begins |= {tile.along.var: (start, tile.lanes - 1), tile.down.var: (top, tile.height - 1)}
    corners = [tile.along.extent - start - tile.lanes]
    if tile.height > 1:
        corners.append(tile.down.extent - top - tile.height)
    corners += _corners((*tile.rows, *tile.inside), begins)
    middle, border = (_nchw_code(tile, start, top, masked=masked) for masked in (False, True))
    body = IfThenElse(_all_inside(_unique(corners)), middle, border)
    axes = [(loop.var, loop.extent) for loop in tile.block.spatial[:-2]]
    axes.append((first, ceildiv(tile.down.extent, tile.height)))
    return grid(axes, For(number, ceildiv(tile.along.extent, tile.lanes), body))


def _nchw_code(tile: NchwTile, start: SymExpr, top: SymExpr, *, masked: bool) -> Stmt:
    """Return the code of a tile: a vector of windows from `start` on, in `height` rows from `top` on."""
    along, down = tile.along, tile.down
    row = For(SymVar("r", upper=tile.height - 1), sym(tile.height), Seq(()), "unrolled")
    lane = For(SymVar("l", upper=tile.lanes - 1), sym(tile.lanes), Seq(()), "vectorized")
    init, _, *final = tile.block.stmts
    value, hoisted = tile.value, _HoistLoads({along.var, down.var} if tile.height > 1 else {along.var})
    if masked:
        value = tile.masked(_inside_lanes(tile, start, lane.var))
        final = [IfThenElse(less(along.var, along.extent), hoisted.stmt(s)) for s in final]
        if tile.height > 1:
            final = [IfThenElse(less(down.var, down.extent), s) for s in final]
    update = nest(tile.taps, replace(tile.block.update, value=value))
    at = Substitute({along.var: start + lane.var, down.var: top + row.var}, fresh=True)
    block = at.stmt(replace(tile.block.body, body=seq(init, update, *final)))
    assert isinstance(block, Allocate)
    block = distribute([row, lane], block)
    assert isinstance(block.body, Seq)
    init, update, *final = block.body.stmts
    stmt: Stmt = replace(block, body=seq(init, _by_rows(tile, update, top, masked=masked), *final))
    at = Substitute({down.var: top})
    stmt = seq(*(Store(buffer, (), at.value(Load(*place))) for place, buffer in hoisted.buffers.items()), stmt)
    for buffer in hoisted.buffers.values():
        stmt = Allocate(buffer, stmt)
    return stmt


def _by_rows(tile: NchwTile, update: Stmt, top: SymExpr, *, masked: bool) -> Stmt:
    """Unroll the loops over taps and rows of windows, over rows of x instead of taps along h.

    All uses of a vector of x are then adjacent. Rows outside x are skipped.

    for kh, kw, r: f(h*s + kh)   =>   for q: if q inside: for kw, r: if 0 <= q - r*s < size: kh = q - r*s; f(h*s + kh)
    """
    taps: list[For] = []
    for _ in tile.taps:
        assert isinstance(update, For)
        taps.append(replace(update, kind="unrolled"))
        update = update.body
    assert isinstance(update, For)  # over rows of windows
    now: dict[SymVar, IntLike] = {old.var: new.var for old, new in zip(tile.taps, taps, strict=True)}
    conditions = tile.rows if masked else ()
    tap = tile.tap_down
    if tap is None:
        now[tile.down.var] = top + update.var
        return nest([*taps, update], _where_inside(conditions, now, update.body))
    k, size, step = tile.taps.index(tap), as_int(tap.extent) or 1, _slope(tile.row, tile.down.var) or 0
    place = SymVar("q", lower=0, upper=size - 1 + (tile.height - 1) * step)
    at = place - update.var * step
    body = IfThenElse(_all_inside([at, size - 1 - at]), Substitute({taps[k].var: at}).stmt(update.body))
    taps[k] = For(place, sym(size + (tile.height - 1) * step), Seq(()), "unrolled")
    now |= {tap.var: place, tile.down.var: top}
    return nest(taps[:-1], _where_inside(conditions, now, nest([taps[-1], update], body)))


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
        if not isinstance(value, Load) or value.buffer.scope == "local" or self._variables & symbols_of(value):
            return super()._value(value)
        buffer = Buffer(f"{value.buffer.name}_kept", (), value.dtype, "local")
        return Load(self.buffers.setdefault((value.buffer, value.indices), buffer), ())


def _inside_lanes(tile: NchwTile, start: SymExpr, lane: SymVar) -> Value:
    """Return the condition of the lanes whose tap lies inside, from a first to a last lane."""
    first, end = sym(0), sym(tile.lanes)
    for d in tile.inside:
        step = _slope(d, tile.along.var) or 1
        rest = substitute(d, {tile.along.var: start})
        if step > 0:
            first = smax(first, ceildiv(-rest, step))
        else:
            end = smin(end, floordiv(rest, -step) + 1)
    cond: Value = less(lane, end)
    return cond if as_int(first) == 0 else Binary("and", cond, less(first - 1, lane))
