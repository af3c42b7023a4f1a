"""Register tiles for windows that move over an image with channels last: depthwise convolution and pooling.

    for n, h, w, c:
        e = 0
        for kh, kw: e += (x[n, h*s + kh - p, w*s + kw - p, c] if inside else 0) * f[kh, kw, c]
        out[n, h, w, c] = g(e)

Vectors run along the channels. A tile is a few neighbours along w, so that a vector of x that several windows cover is
loaded once (the taps along w are unrolled). Conditions that taps lie inside x are hoisted out of the tile: those on
rows of x skip a row of taps; those along w are tested once per tile, and only tiles at a border mask their loads.
"""

from __future__ import annotations

import math
from dataclasses import replace

from relaxlite.ir.ops.nn_conv import MAX_TAPS
from relaxlite.ir.program import Allocate, For, IfThenElse, Load, Select, Seq, Stmt, Store, Value, seq
from relaxlite.ir.program_visitor import Substitute, loads, stores
from relaxlite.ir.symbolic import IntLike, SymExpr, SymVar, as_int, ceildiv, smax, smin, substitute, sym
from relaxlite.passes.loops.access import stride
from relaxlite.passes.loops.parallel import collapse_parallel
from relaxlite.passes.loops.pattern import perfect_nest
from relaxlite.passes.loops.transforms import distribute, less, nest
from relaxlite.passes.products.reduction import Block
from relaxlite.passes.products.windows import Masked, Without, all_inside, conditions_of, slope, symbols_in
from relaxlite.records import dataclass

WINDOWS = 4  # neighbours along w in one tile
BLOCK_VECTORS = 4  # vectors of channels in a parallel iteration
MAX_UNROLLED = 12  # taps along w


@dataclass(frozen=True, slots=True)
class Window:
    """A block of windows with channels last.

    A row of taps counts where all of `rows` are >= 0, a tap where all of `inside` are; it combines `value`.
    """

    block: Block
    rows: tuple[SymExpr, ...]
    inside: tuple[SymExpr, ...]
    value: Value
    outside: Select | None  # the Select that `value` replaces; masked tiles keep it
    lanes: int

    @property
    def along(self) -> For:
        return self.block.spatial[-2]

    @property
    def channel(self) -> For:
        return self.block.spatial[-1]

    @property
    def taps(self) -> tuple[For, ...]:
        return perfect_nest(self.block.stmts[1]).loops


def window_of(block: Block, lanes: int) -> Window | None:
    """Match a block as windows with channels last; None: no match."""
    if lanes == 1 or len(block.spatial) < 2:
        return None
    *_, along, channel = block.spatial
    taps = perfect_nest(block.stmts[1]).loops
    sizes = [as_int(loop.extent) or MAX_TAPS + 1 for loop in taps]
    if not 1 < math.prod(sizes) <= MAX_TAPS or sizes[-1] > MAX_UNROLLED:
        return None
    accesses: list[Load | Store] = [*loads(block.update), *stores(block.body)]
    if any(stride(a, channel.var) not in (0, 1) for a in accesses if a.buffer is not block.body.buffer):
        return None
    images = [load for load in loads(block.update) if along.var in symbols_in(load.indices)]
    if len(images) != 1 or stride(images[0], channel.var) != 1 or images[0].indices[-1] is not channel.var:
        return None
    result = conditions_of(block.update)
    if result is None:
        return None
    conditions, select = result
    inner = {along.var, taps[-1].var}
    rows = tuple(d for d in conditions if not inner & set(d.free_vars()))
    inside = [d for d in conditions if inner & set(d.free_vars())]
    for index, size in zip(images[0].indices, images[0].buffer.shape, strict=True):
        if along.var in index.free_vars():  # windows beyond the last one read nothing, on either side
            inside.append(index if (slope(index, along.var) or 0) < 0 else size - 1 - index)
    if any(slope(d, var) is None for d in inside for var in inner) or any(channel.var in d.free_vars() for d in inside):
        return None
    value = Without(select).value(block.update.value) if select is not None else block.update.value
    return Window(block, rows, tuple(dict.fromkeys(inside)), value, select, lanes)


def tiled_windows(window: Window) -> Stmt:
    """Lower windows to tiles along w, in parallel over images, rows and blocks of channels."""
    lanes, extent = window.lanes, window.channel.extent
    vectors, block = ceildiv(extent, lanes), SymVar(f"{window.channel.var.name}b", lower=0)
    vector, tile = SymVar(f"{window.channel.var.name}v", lower=0), SymVar(f"{window.along.var.name}o", lower=0)
    at = block * BLOCK_VECTORS + vector
    full = extent // lanes

    def channels(*, masked: bool) -> Stmt:
        inner, border = (_tile(window, at * lanes, tile * WINDOWS, border=b, masked=masked) for b in (False, True))
        return IfThenElse(all_inside(_corners(window, tile * WINDOWS)), inner, border)

    body = channels(masked=False)
    if as_int(extent % lanes) != 0:
        body = IfThenElse(less(at, full), body, channels(masked=True)) if as_int(full) != 0 else channels(masked=True)
    count = smin(BLOCK_VECTORS, vectors - block * BLOCK_VECTORS)
    known = as_int(vectors)
    if known is not None and (known % BLOCK_VECTORS == 0 or known < BLOCK_VECTORS):
        count = sym(min(known, BLOCK_VECTORS))
    body = For(tile, ceildiv(window.along.extent, WINDOWS), For(vector, count, body))
    blocks = For(block, ceildiv(vectors, BLOCK_VECTORS), Seq(()))
    return collapse_parallel([*window.block.spatial[:-2], blocks], body)


def _corners(window: Window, start: SymExpr) -> list[SymExpr]:
    """Return expressions that are all >= 0 where all windows of a tile exist and all of their taps lie inside.

    The conditions are linear, so each is evaluated at the corner of the tile where it is least.
    """
    tap = window.taps[-1]
    last = (as_int(tap.extent) or 1) - 1
    result = [window.along.extent - start - WINDOWS]
    for d in window.inside:
        first = (slope(d, window.along.var) or 0) >= 0
        at = {window.along.var: start + (0 if first else WINDOWS - 1)}
        at[tap.var] = sym(0 if (slope(d, tap.var) or 0) >= 0 else last)
        result.append(substitute(d, at))
    return list(dict.fromkeys(result))


def _tile(window: Window, channel: SymExpr, start: SymExpr, *, border: bool, masked: bool) -> Stmt:
    lanes = window.lanes
    step, lane = SymVar("r", upper=WINDOWS - 1), SymVar("l", upper=lanes - 1)
    inner = [For(step, sym(WINDOWS), Seq(()), "unrolled"), For(lane, sym(lanes), Seq(()), "vectorized")]
    init, _, *final = window.block.stmts
    update = replace(window.block.update, value=_bordered(window, lane) if border else window.value)
    if border:
        final = [IfThenElse(less(window.along.var, window.along.extent), s) for s in final]
    stmts = (init, nest(window.taps, update), *final)
    block = replace(window.block.body, body=seq(*stmts))
    at = {window.along.var: start + step, window.channel.var: channel + lane}
    block = Substitute(at, fresh=True).stmt(block)  # type: ignore[assignment]
    assert isinstance(block, Allocate)
    guard = less(channel + lane, window.channel.extent) if masked else None
    return _with_rows(window, distribute(inner, block, guard))


def _bordered(window: Window, lane: SymVar) -> Value:
    """Return the update's value with loads masked: no lanes where a tap lies outside."""
    limit = sym(1)
    for d in window.inside:
        limit = smin(limit, d + 1)
    cond = less(lane, smax(limit, 0) * window.lanes)
    if window.outside is not None:
        return Without(window.outside, replace(window.outside, cond=cond)).value(window.block.update.value)
    return Masked(window.along.var, cond).value(window.value)


def _with_rows(window: Window, tile: Allocate) -> Stmt:
    """Unroll the taps along w, and skip rows of taps that lie outside."""
    assert isinstance(tile.body, Seq)
    init, update, *final = tile.body.stmts
    loops = perfect_nest(update).loops[: len(window.taps)]
    body: Stmt = replace(loops[-1], kind="unrolled")
    if window.rows:
        tap_vars: dict[SymVar, IntLike] = {old.var: new.var for old, new in zip(window.taps, loops, strict=True)}
        body = IfThenElse(all_inside([substitute(d, tap_vars) for d in window.rows]), body)
    return replace(tile, body=seq(init, nest(loops[:-1], body), *final))
