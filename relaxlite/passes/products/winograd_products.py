"""Winograd's inner product for matrices times constant weights, where additions are free beside FMAs.

Two terms of a sum take one multiplication and two additions of an operand and a weight,

    x1*w1 + x2*w2 = (x1 + w2)*(x2 + w1) - x1*x2 - w1*w2

as the sum of x1*x2 is one number of a row, and that of w1*w2 one of a column (Winograd, "A New Algorithm for Inner
Product", IEEE Transactions on Computers, 1968). There is no gain where one unit adds and multiplies; but some
processors have adders beside their FMA units. There, of three terms two are computed like this and the third by an FMA.
So that the surplus products cancel rather than accumulate, every other pair adds their opposites,

    x4*w4 + x5*w5 = x4*x5 + w4*w5 - (w5 - x4)*(w4 - x5)

and a step of six terms is

    e += (w2 + x1)*(w1 + x2);  e += x3*w3;  e -= (w5 - x4)*(w4 - x5);  e += x6*w6

four FMAs and four additions in place of six FMAs, 1.5 times the FMA peak where additions are free. For the speed of
whole products: docs/measurements/cpus.md, winograd_products.

**Rounding.** x and w must have similar magnitudes, or the smaller is lost in the sums: rows and columns are scaled by
powers of two to unit length (2-norm near 1), which is exact. The error is then within the bound of an ordinary
sum of products up to a small factor, eps * |x| * |w| (Brent, "Error Analysis of Algorithms for Matrix Multiplication
and Triangular Decomposition using Winograd's Identity", 1970; docs/measurements/prod.md). Each row's result depends on
that row alone. The strategy is refused for weights whose ordinary product would be much more exact than that bound:
where some columns are mostly zeros, as those of a selection, or most have few large weights. It is also refused for
large weights that other programs read, which would need a second copy.

**Fallback.** If any row has no such length, as it holds an infinity, NaN or numbers out of range, the ordinary product
of all rows is computed, as it is for few rows. Rows and columns of zeros give zeros.

    for i: { scale[i], shift[i] = ...; balanced[i, :] = x[i, :] / scale[i] }      one pass over x
    if all rows have a length:
        for i, j: { for t: e += the step of balanced[i, 6*t .. 6*t + 5] and w[6*t .. 6*t + 5, j];
                    out[i, j] = f(((e - offset[j]) * scale[i] + shift[i]) * width[j]) }
    else:
        for i, j: { e = sum of x[i, k] * w[k, j];  out[i, j] = f(e * width[j]) }

constant_weights.py finds programs of such products, winograd_tile.py has their register tiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from relaxlite.dtypes import DType
from relaxlite.ir.expr import Constant
from relaxlite.ir.ops.scalars import Scalar, literal, select
from relaxlite.ir.program import (
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
from relaxlite.passes.products.prologue import Replacement
from relaxlite.records import dataclass
from relaxlite.target import Target

MIN_COLUMNS = 64  # see `columns_for_pass`
MIN_DEPTH = 96  # terms of a sum
MIN_ROWS = 10
MIN_WORK = 2**21  # multiplications; below, the pass over x costs what the tiles gain
MAX_LENGTH_EXPONENT = (
    80  # rows whose sum of squares is above 2**80 or below 2**-80 have no length and take the fallback
)
MIN_DENSITY = 0.25  # |w|_1 / (sqrt(depth) * |w|_2) of most columns: 0.8 for normal distributions, 1 at most
MIN_NONZERO = 0.125  # of the weights of any column that is not zero
_SMALL_SQUARES = 2.0**-80  # below, squares may underflow in float32
_SHORTEST_COLUMN = 2.0**-120  # lower bound of lengths, for powers to be exact in float32


def winograd_problem(contraction: Contraction, target: Target) -> str | None:
    """Return why a sum is too short for Winograd's inner product in float32; None: it is long enough."""
    depth = as_int(contraction.depth)
    return None if depth is not None and depth >= MIN_DEPTH else f"sums of {contraction.depth} terms are too short"


@dataclass(frozen=True, slots=True, eq=False)
class FloatProducts(Products):
    """A program of products by Winograd's inner product in float32, of rows scaled to unit length."""

    @staticmethod
    def convert(weights: Constant) -> tuple[Constant, ...] | str:
        return balanced(weights)

    def pays(self, target: Target) -> bool:
        return self.columns >= columns_for_pass(MIN_COLUMNS, target)

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

    def _step(self, x: Sequence[Scalar], w: Sequence[Scalar]) -> Scalar:
        (x1, x2, x3, x4, x5, x6), (w1, w2, w3, w4, w5, w6) = x, w
        return x3 * w3 + (w2 + x1) * (w1 + x2) + x6 * w6 - (w5 - x4) * (w4 - x5)

    def _finish(self, total: Scalar, offset: Scalar, shift: Scalar, scale: Scalar) -> Scalar:
        return (total - offset) * scale + shift

    def _widen(self, part: Product, weights: PreparedWeights) -> list[Stmt]:
        """Return the stages that dequantize w and pad it to whole steps. Columns of zeros, whose width is 0, stay
        zero."""
        width = Scalar(weights.width[part.column.var])
        value = Scalar(part.w) * select(width.equals(0.0), 0.0, 1.0 / width)
        return self._rows_of_weights(part.step, part.column, weights.w, value.value)

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
        square_loop = For(k, sym(self.depth), Store(squares, (r,), Binary("mul", x, x), "add"))
        max_loop = For(k, sym(self.depth), Store(peaks, (r,), Unary("abs", x), "max"))
        measure_row = seq(
            split_reduction(square_loop, lanes, 4, zero),
            IfThenElse(Scalar(squares[r]).equals(0.0).value, split_reduction(max_loop, lanes, 1, zero)),
        )
        balanced = self._row(rows.prepared, group.row, lambda k: Binary("mul", self._element(group.row, k), powers[r]))
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
    neighbours = Scalar(prepared[row, place]) * Scalar(prepared[row, place + 1])
    number = Scalar(IndexValue(own % TERMS))
    result = select(number.equals(0), neighbours, select(number.equals(TERMS // 2), -neighbours, 0.0))
    return result.value


# Weights


def balanced(weights: Constant) -> tuple[Constant, ...] | str:
    """Scale the columns of weights to unit length; weights are float32 (..., k, n), the other dimensions ones.

    Returns the weights (k rounded up to whole steps, n), each column times a power of two; the sums of products of
    pairs in each column (n); and the inverse powers (n), 0 for a column of zeros. Or returns the reason against.
    """
    w: np.ndarray = weights.value.reshape(weights.value.shape[-2:])
    length, padded = lengths_of(w), np.empty((whole_steps(len(w)), w.shape[1]), np.float32)
    scaled = padded[: len(w)]
    if (problem := problem_of(w, length, scaled)) is not None:
        return problem
    power = np.exp2(-np.round(np.log2(np.maximum(length, _SHORTEST_COLUMN)))).astype(np.float32)
    np.multiply(w, power, out=scaled)
    padded[len(w) :] = 0
    pairs = [np.einsum("kj,kj->j", padded[k::TERMS], padded[k + 1 :: TERMS], dtype=np.float64) for k in (0, TERMS // 2)]
    offset = pairs[0] - pairs[1]
    vectors = (Constant.of(vector.astype(np.float32)) for vector in (offset, (length > 0) / power))
    return (Constant.of(padded, name=weights.name), *vectors)


def problem_of(w: np.ndarray, length: np.ndarray, scratch: np.ndarray | None = None) -> str | None:
    """Return why errors relative to the lengths of columns are too large for a matrix; None: they are acceptable."""
    if not np.isfinite(length).all():
        return "has weights that are no finite numbers, or too large"
    is_nonzero = length > 0
    if not is_nonzero.any():
        return None
    sizes = np.abs(w, out=scratch)
    if sizes.min() == 0 and (min_nonzero := np.count_nonzero(w, axis=0)[is_nonzero].min() / len(w)) < MIN_NONZERO:
        return f"has a column of which {min_nonzero:.1%} are not zero"
    density = np.median(np.einsum("kj->j", sizes)[is_nonzero] / (length[is_nonzero] * math.sqrt(len(w))))
    if density < MIN_DENSITY:
        return f"has few large weights in most columns: |w|_1 / (sqrt(n) * |w|_2) is {density:.2f}"
    return None


def lengths_of(w: np.ndarray) -> np.ndarray:
    """Return the lengths (2-norms) of columns, float64[n]; not finite where squares overflow float32."""
    squares = np.einsum("kj,kj->j", w, w).astype(np.float64)
    (small,) = np.nonzero(squares < _SMALL_SQUARES)
    squares[small] = (w[:, small].astype(np.float64) ** 2).sum(axis=0)
    lengths: np.ndarray = np.sqrt(squares)
    return lengths
