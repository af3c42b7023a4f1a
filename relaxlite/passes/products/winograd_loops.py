"""Loops of Winograd's inner product (winograd_products.py): a pass over x, then tiles; the ordinary product as
fallback."""

from __future__ import annotations

import math

from relaxlite.dtypes import DType
from relaxlite.ir.ops.scalars import Scalar, literal, select
from relaxlite.ir.program import (
    Allocate,
    Binary,
    Buffer,
    For,
    IfThenElse,
    IndexValue,
    Literal,
    Load,
    Stmt,
    Store,
    Unary,
    Value,
    seq,
)
from relaxlite.ir.program_visitor import Substitute
from relaxlite.ir.symbolic import SymExpr, SymVar, sym
from relaxlite.passes.loops.transforms import init_accumulators, split_reduction
from relaxlite.passes.products.prepared_rows import PreparedWeights, Product, Products, Rows
from relaxlite.passes.products.prologue import Replacement
from relaxlite.passes.products.winograd_weights import TERMS, whole_steps
from relaxlite.records import dataclass

MIN_ROWS = 10
MIN_WORK = 2**21  # multiplications; below, the pass over x costs what the tiles gain
MAX_LENGTH_EXPONENT = (
    80  # rows whose sum of squares is above 2**80 or below 2**-80 have no length and take the fallback
)


@dataclass(frozen=True, slots=True, eq=False)
class FloatProducts(Products):
    """A program of products by Winograd's inner product in float32, of rows scaled to unit length."""

    @property
    def least_rows(self) -> int:
        return max(MIN_ROWS, -(-MIN_WORK // (self.depth * self.columns)))

    @property
    def dtype(self) -> DType:
        return "float32"

    @property
    def length(self) -> int:
        return self.depth

    @property
    def weight_rows(self) -> int:
        return whole_steps(self.depth)

    def _plain(self, part: Product, weights: PreparedWeights) -> Stmt:
        if part.is_kept:
            return Substitute(fresh=True).stmt(part.stage)
        assert isinstance(part.w, Load)
        total, width = part.block.body.buffer, weights.width[part.column.var]
        reduced = Replacement({id(part.w): weights.w[part.w.indices[-2:]]}).stmt(part.block.stmts[1])
        return part.with_sum(reduced, Binary("mul", total[()], width), total)

    def _fast(self, part: Product, weights: PreparedWeights, rows: Rows) -> Stmt:
        total, row, column = part.block.body.buffer, part.row, part.column.var
        step = SymVar("t", lower=0)
        places = [step * TERMS + n for n in range(TERMS)]
        x1, x2, x3, x4, x5, x6 = (rows.prepared[row, k] for k in places)
        w1, w2, w3, w4, w5, w6 = (weights.w[k, column] for k in places)
        terms = Binary("add", _product(x3, w3), _product(_sum(w2, x1), _sum(w1, x2)))
        terms = Binary("add", terms, _product(x6, w6))
        terms = Binary("sub", terms, _product(_difference(w5, x4), _difference(w4, x5)))
        reduced = For(step, sym(self.weight_rows // TERMS), Store(total, (), terms, "add"))
        e, offset, width = Scalar(total[()]), Scalar(weights.offset[column]), Scalar(weights.width[column])
        finish = ((e - offset) * Scalar(rows.scales[row]) + Scalar(rows.shifts[row])) * width
        stage = part.with_sum(reduced, finish.value, total)
        return Allocate(weights.w, seq(*self._widen(part, weights), stage)) if part.is_kept else stage

    def _widen(self, part: Product, weights: PreparedWeights) -> list[Stmt]:
        """Return the stages that dequantize w and pad it to whole steps. Columns of zeros, whose width is 0, stay
        zero."""
        width = Scalar(weights.width[part.column.var])
        value = _product(part.w, select(width.equals(0.0), 0.0, 1.0 / width).value)
        return self._rows_of_weights(part.step, part.column, weights.w, value)

    def _prepare(self, rows: Rows) -> Stmt:
        """Return the pass that scales the rows of x to unit length and computes their scales and sums of pairs.

        A row without a length gets an infinite scale, a row of zeros a scale of 0.
        """
        group, lanes, zero = self._group(), self.lanes, literal(0.0, "float32")
        r, lane = group.member, group.lane
        squares, peaks, powers, pairs = (
            Buffer(name, (sym(lanes),), "float32", "local") for name in ("squares", "peaks", "powers", "pairs")
        )
        length, peak, inverse_power = Scalar(squares[lane]), Scalar(peaks[lane]), 1.0 / Scalar(powers[lane])
        has_length = (length >= 2.0**-MAX_LENGTH_EXPONENT) & (length <= 2.0**MAX_LENGTH_EXPONENT)
        is_zero = length.equals(0.0) & peak.equals(0.0)
        exponent = (select(has_length, length, 1.0).unary("log") * (0.5 / math.log(2))).unary("round")
        infinite = Scalar(Literal(float("inf"), "float32"))
        scale = select(is_zero, 0.0, select(has_length, inverse_power, infinite))
        shift = select(is_zero, 0.0, -Scalar(pairs[lane]) * inverse_power)
        at = (group.lane_row,)
        results = seq(Store(rows.scales, at, scale.value), Store(rows.shifts, at, shift.value))
        x = self._element(group.row, k := SymVar("k", lower=0))
        square_loop = For(k, sym(self.depth), Store(squares, (r,), _product(x, x), "add"))
        max_loop = For(k, sym(self.depth), Store(peaks, (r,), Unary("abs", x), "max"))
        measure_row = seq(
            split_reduction(square_loop, lanes, 4, zero),
            IfThenElse(Scalar(squares[r]).equals(0.0).value, split_reduction(max_loop, lanes, 1, zero)),
        )
        balanced = self._row(rows.prepared, group.row, lambda k: _product(self._element(group.row, k), powers[r]))
        first = Store(pairs, (r,), zero, "add")
        pair_loop = self._pairs(first, lambda own, place: _signed(rows.prepared, group.row, own, place))
        body = (
            *(init_accumulators(buffer, zero, lanes) for buffer in (squares, peaks, pairs)),
            For(r, group.count, measure_row),
            For(lane, sym(lanes), Store(powers, (lane,), (-exponent).exp2().value), "vectorized"),
            For(r, group.count, seq(balanced, pair_loop)),
        )
        return self._over_groups(group, rows, results, body, (squares, peaks, powers, pairs))


def _signed(prepared: Buffer, row: SymExpr, own: SymExpr, place: SymExpr) -> Value:
    """Return the product of two neighbours in a row: added in the first pair of a step, subtracted in the second, else
    0."""
    neighbours = Scalar(_product(prepared[row, place], prepared[row, place + 1]))
    number = Scalar(IndexValue(own % TERMS))
    result = select(number.equals(0), neighbours, select(number.equals(TERMS // 2), -neighbours, 0.0))
    return result.value


def _sum(a: Value, b: Value) -> Value:
    return Binary("add", a, b)


def _difference(a: Value, b: Value) -> Value:
    return Binary("sub", a, b)


def _product(a: Value, b: Value) -> Value:
    return Binary("mul", a, b)
