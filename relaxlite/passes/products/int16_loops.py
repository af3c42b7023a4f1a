"""Loops of products by int16 pairs (int16_products.py): a pass over x, then tiles; float32 products as fallback."""

from __future__ import annotations

from relaxlite.dtypes import DType
from relaxlite.ir.intrinsics import DOT2_PACKED_INT16, ROUND_TO_INT32
from relaxlite.ir.ops.scalars import Scalar, literal, select
from relaxlite.ir.program import (
    Allocate,
    Binary,
    Buffer,
    For,
    IndexValue,
    Intrinsic,
    Literal,
    Load,
    Seq,
    Stmt,
    Store,
    Unary,
    Value,
    seq,
)
from relaxlite.ir.program_visitor import Substitute
from relaxlite.ir.symbolic import SymExpr, SymVar, sym
from relaxlite.passes.loops.transforms import init_accumulators, split_reduction
from relaxlite.passes.products.int16_weights import LONGEST, MAX_W, MAX_X
from relaxlite.passes.products.prepared_rows import Product, Products, Rows, Weights
from relaxlite.passes.products.winograd_loops import LARGEST_POWER
from relaxlite.passes.products.winograd_weights import TERMS, whole_steps
from relaxlite.records import dataclass

_MASK = 0xFFFF
_UNIT = 2.0**-16  # scales a column's integers to floats of length at most 1


@dataclass(frozen=True, slots=True, eq=False)
class Int16Products(Products):
    """A program of products by int16 pairs: an int32 holds the integers at t and t + depth / 2."""

    @property
    def least_rows(self) -> int:
        return 1

    @property
    def dtype(self) -> DType:
        return "int32"

    @property
    def length(self) -> int:
        return self.depth // 2

    @property
    def weight_rows(self) -> int:
        return whole_steps(self.length)

    def _plain(self, part: Product, weights: Weights) -> Stmt:
        """Return the fallback: unrounded x times the quantized weights as floats; where weights are kept, times
        these."""
        if part.is_kept:
            return Substitute(fresh=True).stmt(part.stage)
        total, column, step = part.block.body.buffer, part.column.var, SymVar("t", lower=0)
        x = [Load(part.x.buffer, (*part.x.indices[:-1], place)) for place in (step, step + self.length)]
        pair = Scalar(weights.w[step, column])
        codes = (pair & _MASK, pair.binary("shift_right", 16))
        w = [(code - MAX_W).cast("float32") * _UNIT for code in codes]
        terms = Binary("add", *(Binary("mul", a, b.value) for a, b in zip(x, w, strict=True)))
        reduced = For(step, sym(self.length), Store(total, (), terms, "add"))
        width = Scalar(weights.width[column]) * (1 / _UNIT)
        return part.with_sum(reduced, (Scalar(total[()]) * width).value, total)

    def _fast(self, part: Product, weights: Weights, rows: Rows) -> Stmt:
        total = Buffer(part.block.body.buffer.name, (), "int32", "local")
        row, column, step = part.row, part.column.var, SymVar("t", lower=0)
        places = [step * TERMS + n for n in range(TERMS)]
        x1, x2, x3, x4, x5, x6 = (rows.prepared[row, k] for k in places)
        w1, w2, w3, w4, w5, w6 = (weights.w[k, column] for k in places)
        terms = Binary("add", _products(w3, x3), _products(_sum(w2, x1), _sum(w1, x2)))
        terms = Binary("add", terms, _products(w6, x6))
        terms = Binary("add", terms, _products(_sum(w5, x4), _sum(w4, x5)))
        reduced = For(step, sym(self.weight_rows // TERMS), Store(total, (), terms, "add"))
        e = Scalar(total[()]) - Scalar(weights.offset[column]) - Scalar(rows.shifts[row])
        finish = e.cast("float32") * Scalar(rows.scales[row]) * Scalar(weights.width[column])
        stage = part.with_sum(reduced, finish.value, total)
        return Allocate(weights.w, seq(*self._widen(part, weights), stage)) if part.is_kept else stage

    def _widen(self, part: Product, weights: Weights) -> list[Stmt]:
        """Return the stages that quantize w to int16 pairs, as int16_weights.py does, padded to whole steps.

        Columns of zeros, whose width is 0, become zeros.
        """
        step, column, width = part.step, part.column, Scalar(weights.width[part.column.var])
        row = SymVar("k", lower=0)
        factor = select(width.equals(0.0), 0.0, 1.0 / width)

        def integer(place: SymExpr) -> Scalar:
            w = Scalar(Substitute({step.var: place}).value(part.w))
            return Scalar(Intrinsic(ROUND_TO_INT32, ((w * factor).value,), "int32")) + MAX_W

        int16_pair = integer(row) | integer(row + self.length).binary("shift_left", 16)
        return self._rows_of_weights(For(row, sym(self.length), Seq(())), column, weights.w, int16_pair.value)

    def _prepare(self, rows: Rows) -> Stmt:
        """Return the pass that quantizes the rows of x to int16 pairs and computes their scales and corrections.

        A row without a scale gets an infinite one, a row of zeros a scale of 0.
        """
        group, lanes, zero = self._group(), self.lanes, literal(0.0, "float32")
        r, lane = group.member, group.lane
        squares, peaks, powers = (
            Buffer(name, (sym(lanes),), "float32", "local") for name in ("squares", "peaks", "powers")
        )
        shifts = Buffer("row_shifts", (sym(lanes),), "int32", "local")
        square, peak = Scalar(squares[lane]), Scalar(peaks[lane])
        has_scale = (square >= 2.0**-LARGEST_POWER) & (square <= 2.0**LARGEST_POWER)  # not of NaN
        is_zero = square.equals(0.0) & peak.equals(0.0)
        most, length = select(has_scale, peak, 1.0), select(has_scale, square, 1.0).unary("sqrt")
        undo = (most * (1 / MAX_X)).maximum(length * (1 / LONGEST))
        infinite = Scalar(Literal(float("inf"), "float32"))
        scale = select(is_zero, 0.0, select(has_scale, undo, infinite))
        at = (group.lane_row,)
        results = seq(Store(rows.scales, at, scale.value), Store(rows.shifts, at, shifts[lane]))
        x = self._element(group.row, k := SymVar("k", lower=0))
        square_loop = For(k, sym(self.depth), Store(squares, (r,), Binary("mul", x, x), "add"))
        max_loop = For(k, sym(self.depth), Store(peaks, (r,), Unary("abs", x), "maxnum"))

        def int16_pair(place: SymExpr) -> Value:
            low, high = (
                Scalar(Intrinsic(ROUND_TO_INT32, (Binary("mul", self._element(group.row, k), powers[r]),), "int32"))
                + MAX_X
                for k in (place, place + self.length)
            )
            return (low | high.binary("shift_left", 16)).value

        first = Store(shifts, (r,), literal(0, "int32"), "add")
        pairs = self._pairs(first, lambda own, place: _shift_of(rows.prepared, group.row, own, place))
        measure_row = seq(split_reduction(square_loop, lanes, 4, zero), split_reduction(max_loop, lanes, 4, zero))
        body = (
            *(init_accumulators(buffer, literal(0, buffer.dtype), lanes) for buffer in (squares, peaks, shifts)),
            For(r, group.count, measure_row),
            For(lane, sym(lanes), Store(powers, (lane,), (1.0 / undo).value), "vectorized"),
            For(r, group.count, seq(self._row(rows.prepared, group.row, int16_pair), pairs)),
        )
        return self._over_groups(group, rows, results, body, (squares, peaks, powers, shifts))


def _shift_of(prepared: Buffer, row: SymExpr, own: SymExpr, place: SymExpr) -> Value:
    """Return the share of an int16 pair in the correction of its row.

    It is the product with the neighbour where the two form a Winograd pair, plus the product with the offset of
    weights.
    """
    int16_pair, number = Scalar(prepared[row, place]), Scalar(IndexValue(own % TERMS))
    neighbours = Scalar(_products(prepared[row, place], prepared[row, place + 1]))
    is_first = number.equals(0) | number.equals(TERMS // 2)
    offset_product = Scalar(_products(literal(MAX_W | MAX_W << 16, "int32"), int16_pair.value))
    return (select(is_first, neighbours, 0) + offset_product).value


def _sum(a: Value, b: Value) -> Value:
    return Binary("add", a, b)


def _products(a: Value, b: Value) -> Value:
    return Intrinsic(DOT2_PACKED_INT16, (literal(0, "int32"), a, b), "int32")
