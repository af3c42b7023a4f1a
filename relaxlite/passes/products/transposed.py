"""Products whose second operand lies along the sum: x @ y.T without a transposed copy of y.

    for i, j: { e[]; e = 0; for k: e += x[i, k] * y[j, k]; out[i, j] = e }

Few rows of long sums are sums along vectors of k, as both operands lie there (programs.py). Else a part of the
columns of a tile is turned in registers, square by square, into a panel in the cache, over which register tiles run.
"""

from __future__ import annotations

from functools import reduce

from relaxlite.ir.program import (
    Allocate,
    Binary,
    Buffer,
    Cast,
    For,
    IfThenElse,
    Literal,
    Load,
    Select,
    Seq,
    Stmt,
    Store,
    Value,
    seq,
)
from relaxlite.ir.program_visitor import Substitute, stores
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, smin, sym
from relaxlite.passes.loops.access import coefficient, offset, stride
from relaxlite.passes.loops.pattern import perfect_nest
from relaxlite.passes.loops.transforms import less, when_positive
from relaxlite.passes.products.choice import DEFAULT, ONE_SUM, ScheduleChoice
from relaxlite.passes.products.prologue import symbols_of
from relaxlite.passes.products.reduction import Block, over_panels, tile_shape
from relaxlite.passes.products.register_tile import ENOUGH_SUMS, Tile, column_pieces
from relaxlite.records import dataclass

FEW_ROWS, LONG = 4, 256  # rows at most and steps at least for which sums along vectors are faster than panels


@dataclass(frozen=True, slots=True)
class TransposedOperand:
    """for k: e += other * operand, where the operand is a load that is contiguous along k."""

    column: For  # along which the result is contiguous
    row: For  # that the operand does not move along
    loop: For  # k
    operand: Value


def find_transposed(block: Block) -> TransposedOperand | None:
    """None: there is no such operand, or the sum does not start from 0."""
    init, loops = block.stmts[0], perfect_nest(block.stmts[1]).loops
    product = block.update.value
    if len(loops) != 1 or block.update.combine != "add" or not isinstance(product, Binary) or product.op != "mul":
        return None
    if not isinstance(init, Store) or not isinstance(init.value, Literal) or init.value.value != 0:
        return None
    written = [s for s in stores(block.body) if s.buffer.scope == "global"]
    columns = [loop for loop in block.spatial if all(stride(s, loop.var) == 1 for s in written)]
    for other, operand in ((product.a, product.b), (product.b, product.a)):
        load = operand.x if isinstance(operand, Cast) else operand
        if (
            not isinstance(load, Load)
            or not load.indices
            or load.indices[-1] is not loops[0].var
            or operand.dtype != "float32"
        ):
            continue
        moving = symbols_of(operand)
        result = [c for c in columns if c.var in moving and c.var not in symbols_of(other)]
        rows = [r for r in block.spatial if r.var not in moving and r.var in symbols_of(other)]
        if result and rows and coefficient(offset(load), result[-1].var) is not None:
            return TransposedOperand(result[-1], rows[-1], loops[0], operand)
    return None


def tiled_transposed(
    block: Block, found: TransposedOperand, lanes: int, registers: int, few: Stmt, choice: ScheduleChoice = DEFAULT
) -> Stmt:
    """`few` for few rows of long sums, else tiles over panels. Where each element has to be one sum, it does not depend
    on how many rows there are, if that is not known, and no tile adds its elements up in more sums than another."""
    rows, vectors = tile_shape(found.row, found.column, lanes, registers)
    tile = Tile(block.body, found.row, found.column, lanes, rows, enough_sums=choice.sums or ENOUGH_SUMS)
    pieces = column_pieces(found.column.extent, lanes, vectors)
    if not pieces:
        return Seq(())

    def fill(panel: Buffer, steps: tuple[SymExpr, SymExpr], first: SymExpr) -> Stmt:
        return _turned(found, panel, steps, first, lanes)

    others = [(loop.var, loop.extent) for loop in block.spatial if loop is not found.column and loop is not found.row]
    many = over_panels(tile, [found.operand], pieces, others, fill)
    sizes = [(found.row.extent, sym(FEW_ROWS + 1)), (sym(LONG - 1), found.loop.extent)]
    if any(a.is_const and b.is_const and a.const >= b.const for a, b in sizes):
        return many
    if choice.sums == ONE_SUM:
        del sizes[0]
    unknown = [less(a, b) for a, b in sizes if not (a.is_const and b.is_const)]
    return IfThenElse(reduce(lambda a, b: Binary("and", a, b), unknown), few, many) if unknown else few


def _turned(
    found: TransposedOperand, panel: Buffer, steps: tuple[SymExpr, SymExpr], first: SymExpr, lanes: int
) -> Stmt:
    """panel[k, c] = operand at k + steps[0] and column first + c, for the first steps[1] k; what lies beyond the last
    column is the last one again, what lies beyond the last k is 0."""
    start, count = steps
    width, depth = panel.shape[1], found.loop.extent
    block, part = SymVar("kb", lower=0), SymVar("u", lower=0)

    def squares(number: SymExpr, *, masked: bool) -> Stmt:
        row, step = SymVar("r", lower=0, upper=lanes - 1), SymVar("t", lower=0, upper=lanes - 1)
        lane, across = SymVar("l", lower=0, upper=lanes - 1), SymVar("l", lower=0, upper=lanes - 1)
        square = Buffer("square", (sym(lanes), sym(lanes)), panel.dtype, "local")
        k = start + number * lanes + lane
        column = smin(first + part * lanes + row, found.column.extent - 1)
        value = Substitute({found.loop.var: k, found.column.var: column}).value(found.operand)
        if masked:
            value = Select(less(k, depth), value, Literal(0.0, value.dtype))
        taken = _square(row, lane, Store(square, (row, lane), value), lanes)
        place = number * lanes + step, part * lanes + across
        given = _square(step, across, Store(panel, place, Load(square, (across, step))), lanes)
        body = For(part, sym(as_int(width) or 0) // lanes, Allocate(square, seq(taken, given)))
        return Substitute(fresh=True).stmt(body)

    main = For(block, count // lanes, squares(block, masked=False))
    rest = squares(count // lanes, masked=True)
    return seq(*when_positive(count // lanes, main), *when_positive(count % lanes, rest))


def _square(outer: SymVar, lane: SymVar, body: Stmt, lanes: int) -> Stmt:
    return For(outer, sym(lanes), For(lane, sym(lanes), body, "vectorized"), "unrolled")
