"""Products with constant weights in integers, where rounding is allowed and additions cost nothing.

`precision="bf16"` allows it in all of a module, the attribute RELAXED_PRECISION in one of its functions.

A dot product of int16 pairs takes the time of one of bfloat16 pairs, and accumulates in int32, which wraps. So rows of
x and columns of w are quantized to 14-bit integers, relative to their largest element; two of each lie in an int32. As
int16 pairs have additions, Winograd's inner product (winograd_products.py) applies, and is exact,

    e += dot(w2 + x1, w1 + x2);  e += dot(w3, x3);  e += dot(w5 + x4, w4 + x5);  e += dot(w6, x6)

four dot products and four additions for twelve terms of a sum, 1.5 times the bfloat16 peak where additions are free.
The integers are offset to start at 0, so that one addition of int32 adds two int16 without a carry between them. The
correction for the offset and for the pairs is one number of a row and one of a column, and the sum of the products
themselves is below 2**31.

**Rounding.** The error of a row x is at most 2**-8 of its length (2-norm), and so is that of a column: the bound of
rounding each element to bfloat16. It is usually far less (docs/measurements/prod.md): 14 bits relative to the largest
element, where bfloat16 has 8 of each. But an element much smaller than the largest of its row keeps fewer digits than
in bfloat16. The strategy is refused for weights whose columns are mostly zeros or have few large elements.

**Fallback.** If any row has no scale, as it holds an infinity or NaN or its sum of squares is above 2**80 or below
2**-80, all rows are multiplied in float32, unrounded, by the rounded weights. Rows and columns of zeros give zeros.
Otherwise each row's result depends on that row alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from relaxlite.dtypes import DType
from relaxlite.ir.expr import Constant
from relaxlite.ir.intrinsics import DOT2_PACKED_INT16, ROUND_TO_INT32
from relaxlite.ir.ops.scalars import Scalar, literal, select
from relaxlite.ir.program import (
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
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, sym
from relaxlite.passes.loops.transforms import init_accumulators, split_reduction
from relaxlite.passes.products.contraction import Contraction
from relaxlite.passes.products.prepared_rows import (
    TERMS,
    PreparedWeights,
    Product,
    Products,
    Rows,
    columns_for_pass,
    whole_steps,
)
from relaxlite.passes.products.winograd_products import MAX_LENGTH_EXPONENT, lengths_of, problem_of
from relaxlite.records import dataclass
from relaxlite.target import Target

MIN_COLUMNS: Final = 64  # see `columns_for_pass`
MIN_DEPTH: Final = 96  # terms of a sum
MAX_X, MAX_W = 10922, 5461
"""The largest integers of rows and columns. The sum of the offset integers, x + MAX_X and w + MAX_W, is below 2**15:
two int16 in an int32 are added without a carry, and stay signed int16. Rows get more, as few of their elements are
large, and the largest determines the rounding of the others."""

MAX_LENGTH = 46000
"""Maximum length (2-norm) of the integers of a row or column: the sum of their products is below 2**31 by Cauchy and
Schwarz, though partial sums may wrap. Rounding adds at most half a square root of the depth."""

MAX_DEPTH = 7280
"""Maximum terms of a sum. Up to here the error of a row is at most 2**-8 of its length, as in bfloat16: sqrt(depth)
halves of a step of 1/MAX_X of the largest element."""

_ERROR = 2.0**-8
_SMALLEST = 2.0**-100  # columns whose largest weight is smaller are treated as zeros

_MASK = 0xFFFF
_UNIT = 2.0**-16  # scales a column's integers to floats of length at most 1


def int16_problem(contraction: Contraction, target: Target) -> str | None:
    """Return why the sizes of a product do not fit int16 pairs or do not pay for the pass over x; None: they do."""
    depth, columns = as_int(contraction.depth), as_int(contraction.columns)
    if depth is None or depth % 2 or not MIN_DEPTH <= depth <= MAX_DEPTH:
        return f"sums of {contraction.depth} terms are not even in number, from {MIN_DEPTH} to {MAX_DEPTH}"
    if columns is None or columns < columns_for_pass(MIN_COLUMNS, target):
        return f"{contraction.columns} columns are too few for a pass over the rows"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Int16Products(Products):
    """A program of products by int16 pairs: an int32 holds the integers at t and t + depth / 2."""

    @staticmethod
    def convert(weights: Constant) -> tuple[Constant, ...] | str:
        return int16_of(weights)

    def pays(self, target: Target) -> bool:
        return True

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

    def _plain(self, part: Product, weights: PreparedWeights) -> Stmt:
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

    def _step(self, x: Sequence[Scalar], w: Sequence[Scalar]) -> Scalar:
        (x1, x2, x3, x4, x5, x6), (w1, w2, w3, w4, w5, w6) = x, w
        return dot(0, w3, x3) + dot(0, w2 + x1, w1 + x2) + dot(0, w6, x6) + dot(0, w5 + x4, w4 + x5)

    def _finish(self, total: Scalar, offset: Scalar, shift: Scalar, scale: Scalar) -> Scalar:
        return (total - offset - shift).cast("float32") * scale

    def _widen(self, part: Product, weights: PreparedWeights) -> list[Stmt]:
        """Return the stages that quantize w to int16 pairs, as `int16_of` does, padded to whole steps.

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
        has_scale = (square >= 2.0**-MAX_LENGTH_EXPONENT) & (square <= 2.0**MAX_LENGTH_EXPONENT)  # not of NaN
        is_zero = square.equals(0.0) & peak.equals(0.0)
        most, length = select(has_scale, peak, 1.0), select(has_scale, square, 1.0).unary("sqrt")
        undo = (most * (1 / MAX_X)).maximum(length * (1 / MAX_LENGTH))
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
    neighbours = dot(0, Scalar(prepared[row, place]), Scalar(prepared[row, place + 1]))
    is_first = number.equals(0) | number.equals(TERMS // 2)
    offset_product = dot(0, Scalar(literal(MAX_W | MAX_W << 16, "int32")), int16_pair)
    return (select(is_first, neighbours, 0) + offset_product).value


def dot(total: Scalar | int, a: Scalar, b: Scalar) -> Scalar:
    """Return `total` plus the products of two int16 pairs."""
    start = literal(total, "int32") if isinstance(total, int) else total.value
    return Scalar(Intrinsic(DOT2_PACKED_INT16, (start, a.value, b.value), "int32"))


# Weights


def int16_of(weights: Constant) -> tuple[Constant, ...] | str:
    """Quantize weights, float32 (..., k, n), the other dimensions ones and k even, to int16 pairs.

    Returns int32 (k / 2 rounded up to whole steps, n) of the int16 of rows t and t + k / 2; the corrections to subtract
    from the sums of columns, int32 (n); and the scales of columns, float32 (n). Or returns the reason against.
    """
    w: np.ndarray = weights.value.reshape(weights.value.shape[-2:])
    step = steps_of(w)
    if isinstance(step, str):
        return step
    depth, columns = w.shape
    is_zero = step == 0
    width = step.astype(np.float32)
    scaled = w * (1 / np.where(is_zero, np.float32(1), width))  # in float32, as programs do that quantize kept weights
    scaled[:, is_zero] = 0
    integers = np.rint(scaled, out=scaled).astype(np.int32)
    integers += MAX_W
    low, high = integers[: depth // 2], integers[depth // 2 :]
    padded = np.zeros((whole_steps(depth // 2), columns), np.int32)
    np.bitwise_or(low, high << 16, out=padded[: depth // 2])
    correction = MAX_X * integers.sum(axis=0, dtype=np.int64) - depth * MAX_X * MAX_W
    for part in (low, high):
        for first in (0, TERMS // 2):
            second = part[first + 1 :: TERMS]
            correction += np.einsum("kj,kj->j", part[first::TERMS][: len(second)], second, dtype=np.int64)
    offset = correction.astype(np.uint32).view(np.int32)  # sums wrap, too
    return (Constant.of(padded, name=weights.name), Constant.of(offset), Constant.of(width))


def steps_of(w: np.ndarray) -> np.ndarray | str:
    """Return the quantization step of each column, float64[n], 0 for a column of zeros; or the reason against."""
    length = lengths_of(w)
    if (problem := problem_of(w, length)) is not None:
        return problem
    peak = np.abs(w).max(axis=0)
    step = np.where(peak < _SMALLEST, 0, np.maximum(peak / MAX_W, length / MAX_LENGTH))
    if (math.sqrt(len(w)) * step / 2 > _ERROR * length).any():
        return "has a column that would lose more than in bfloat16"
    return step
