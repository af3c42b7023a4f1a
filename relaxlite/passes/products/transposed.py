"""Products whose second operand is contiguous along the depth: x @ y.T without a transposed copy of y.

    for i, j: { e[]; e = 0; for k: e += x[i, k] * y[j, k]; out[i, j] = e }

Few rows of long sums are reduced along vectors of k, in which both operands are contiguous (programs.py). Else part of
the columns of a tile is transposed in registers, lanes x lanes at a time, into a panel in the cache, which register
tiles read.
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

FEW_ROWS, LONG = 4, 256  # max rows and min steps for which sums along vectors of k are faster than panels


@dataclass(frozen=True, slots=True)
class TransposedOperand:
    """The operand of for k: e += other * operand that is a load contiguous along k."""

    column: For  # along which the result is contiguous
    row: For  # on which the operand does not depend
    loop: For  # k
    operand: Value


def find_transposed(block: Block) -> TransposedOperand | None:
    """Find an operand contiguous along the depth; None: there is none, or the sum does not start from 0."""
    init, loops = block.stmts[0], perfect_nest(block.stmts[1]).loops
    product = block.update.value
    if len(loops) != 1 or block.update.combine != "add" or not isinstance(product, Binary) or product.op != "mul":
        return None
    if not isinstance(init, Store) or not isinstance(init.value, Literal) or init.value.value != 0:
        return None
    result_stores = [s for s in stores(block.body) if s.buffer.scope == "global"]
    columns = [loop for loop in block.spatial if all(stride(s, loop.var) == 1 for s in result_stores)]
    for other, operand in ((product.a, product.b), (product.b, product.a)):
        load = operand.x if isinstance(operand, Cast) else operand
        if (
            not isinstance(load, Load)
            or not load.indices
            or load.indices[-1] is not loops[0].var
            or operand.dtype != "float32"
        ):
            continue
        symbols = symbols_of(operand)
        operand_columns = [c for c in columns if c.var in symbols and c.var not in symbols_of(other)]
        rows = [r for r in block.spatial if r.var not in symbols and r.var in symbols_of(other)]
        if operand_columns and rows and coefficient(offset(load), operand_columns[-1].var) is not None:
            return TransposedOperand(operand_columns[-1], rows[-1], loops[0], operand)
    return None


def tiled_transposed(
    block: Block, match: TransposedOperand, lanes: int, registers: int, few: Stmt, choice: ScheduleChoice = DEFAULT
) -> Stmt:
    """Select `few` for few rows of long sums, else register tiles over transposed panels.

    Where each element has to be one sum (`choice.sums`), the selection does not depend on an unknown number of rows,
    and all tiles use equally many partial sums.
    """
    rows, vectors = tile_shape(match.row, match.column, lanes, registers)
    tile = Tile(block.body, match.row, match.column, lanes, rows, enough_sums=choice.sums or ENOUGH_SUMS)
    pieces = column_pieces(match.column.extent, lanes, vectors)
    if not pieces:
        return Seq(())

    def fill(panel: Buffer, steps: tuple[SymExpr, SymExpr], first: SymExpr) -> Stmt:
        return _transpose_on_load(match, panel, steps, first, lanes)

    outer_axes = [
        (loop.var, loop.extent) for loop in block.spatial if loop is not match.column and loop is not match.row
    ]
    staged = over_panels(tile, [match.operand], pieces, outer_axes, fill)
    few_conditions = [(match.row.extent, sym(FEW_ROWS + 1)), (sym(LONG - 1), match.loop.extent)]
    if any(a.is_const and b.is_const and a.const >= b.const for a, b in few_conditions):
        return staged
    if choice.sums == ONE_SUM:
        del few_conditions[0]
    run_time_conditions = [less(a, b) for a, b in few_conditions if not (a.is_const and b.is_const)]
    return (
        IfThenElse(reduce(lambda a, b: Binary("and", a, b), run_time_conditions), few, staged)
        if run_time_conditions
        else few
    )


def _transpose_on_load(
    match: TransposedOperand, panel: Buffer, steps: tuple[SymExpr, SymExpr], first: SymExpr, lanes: int
) -> Stmt:
    """Fill panel[k, c] with the operand at step steps[0] + k and column first + c, for the first steps[1] values of k.

    Columns beyond the last repeat the last; steps beyond the last are 0.
    """
    start, count = steps
    width, depth = panel.shape[1], match.loop.extent
    block, part = SymVar("kb", lower=0), SymVar("u", lower=0)

    def transpose_blocks(number: SymExpr, *, masked: bool) -> Stmt:
        row, step = SymVar("r", lower=0, upper=lanes - 1), SymVar("t", lower=0, upper=lanes - 1)
        lane, column_lane = SymVar("l", lower=0, upper=lanes - 1), SymVar("l", lower=0, upper=lanes - 1)
        lane_matrix = Buffer("square", (sym(lanes), sym(lanes)), panel.dtype, "local")
        k = start + number * lanes + lane
        column = smin(first + part * lanes + row, match.column.extent - 1)
        value = Substitute({match.loop.var: k, match.column.var: column}).value(match.operand)
        if masked:
            value = Select(less(k, depth), value, Literal(0.0, value.dtype))
        to_square = _lane_nest(row, lane, Store(lane_matrix, (row, lane), value), lanes)
        place = number * lanes + step, part * lanes + column_lane
        to_panel = _lane_nest(step, column_lane, Store(panel, place, Load(lane_matrix, (column_lane, step))), lanes)
        body = For(part, sym(as_int(width) or 0) // lanes, Allocate(lane_matrix, seq(to_square, to_panel)))
        return Substitute(fresh=True).stmt(body)

    main = For(block, count // lanes, transpose_blocks(block, masked=False))
    tail = transpose_blocks(count // lanes, masked=True)
    return seq(*when_positive(count // lanes, main), *when_positive(count % lanes, tail))


def _lane_nest(outer: SymVar, lane: SymVar, body: Stmt, lanes: int) -> Stmt:
    return For(outer, sym(lanes), For(lane, sym(lanes), body, "vectorized"), "unrolled")
