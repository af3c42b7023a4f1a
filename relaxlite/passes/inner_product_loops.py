"""The loops of inner products (inner_products.py): a pass over x, then tiles; beside them the ordinary product."""

from __future__ import annotations

import math
from dataclasses import replace

from relaxlite.dtypes import DType
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.intrinsics import HALVES
from relaxlite.ir.ops.scalars import Scalar, literal, select
from relaxlite.ir.program import (
    Allocate,
    Binary,
    Buffer,
    For,
    IfThenElse,
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
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute
from relaxlite.ir.symbolic import SymExpr, SymVar, product, sym
from relaxlite.passes.balanced_weights import TERMS, whole_steps
from relaxlite.passes.loop_pattern import perfect_nest
from relaxlite.passes.panel_requests import Asks
from relaxlite.passes.schedule import fill, nest, split_reduction
from relaxlite.passes.schedule_reduction import Block
from relaxlite.passes.two_ways import ROW_UNIT, Elsewhere, Product, Products, Rows, Weights
from relaxlite.records import dataclass
from relaxlite.target import Target

LEAST_ROWS = 10
STEPS_AHEAD = 32  # that tiles ask for their own panel of weights
ORDINARY_ROWS = 4  # of tiles of the ordinary product beside it, which has few rows to compute: less code
LEAST_WORK = 2**21  # multiplications, below which the pass over x takes the time that is gained
LARGEST_POWER = 80  # of two: rows whose squares add up to more, or to less than 2**-80, have no length here

_ANALYZER = Analyzer()


@dataclass(frozen=True, slots=True, eq=False)
class FloatProducts(Products):
    """Of rows of length near 1."""

    @property
    def least_rows(self) -> int:
        return max(LEAST_ROWS, -(-LEAST_WORK // (self.depth * self.columns)))

    @property
    def dtype(self) -> DType:
        return "float32"

    @property
    def length(self) -> int:
        return self.depth

    @property
    def weight_rows(self) -> int:
        return whole_steps(self.depth)

    def _plain(self, part: Product, weights: Weights) -> Stmt:
        if not isinstance(part.w, Load):
            return Substitute(fresh=True).stmt(part.stage)
        total, width = part.block.body.buffer, weights.width[part.column.var]
        reduced = Elsewhere(part.w, weights.w[part.w.indices[-2:]]).stmt(part.block.stmts[1])
        return part.with_sum(reduced, Binary("mul", total[()], width), total)

    def _fast(self, part: Product, weights: Weights, rows: Rows) -> Stmt:
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
        return Allocate(weights.w, seq(*self._widen(part, weights), stage)) if part.is_widened else stage

    def _widen(self, part: Product, weights: Weights) -> list[Stmt]:
        """Makes w, up to whole steps. Columns of zeros, whose width is 0, stay such."""
        width = Scalar(weights.width[part.column.var])
        value = _product(part.w, select(width.equals(0.0), 0.0, 1.0 / width).value)
        step, beyond = part.step, For(SymVar("k", lower=0), sym(self.weight_rows - self.depth), Seq(()))
        made = nest((step, part.column), Store(weights.w, (step.var, part.column.var), value))
        zeros = Store(weights.w, (beyond.var + self.depth, part.column.var), literal(0.0, "float32"))
        stages = [made, *([nest((beyond, part.column), zeros)] if self.weight_rows > self.depth else [])]
        return [Substitute(fresh=True).stmt(stage) for stage in stages]

    def _prepare(self, rows: Rows) -> Stmt:
        """The rows of x, their scales and what their pairs add. A row that has no length gets an infinite scale, one of
        zeros a scale of 0."""
        group, lanes, zero = self._group(), self.lanes, literal(0.0, "float32")
        r, lane = group.member, group.lane
        squares, peaks, powers, pairs = (
            Buffer(name, (sym(lanes),), "float32", "local") for name in ("squares", "peaks", "powers", "pairs")
        )
        length, largest, undo = Scalar(squares[lane]), Scalar(peaks[lane]), 1.0 / Scalar(powers[lane])
        has_length = (length >= 2.0**-LARGEST_POWER) & (length <= 2.0**LARGEST_POWER)
        is_zero = length.equals(0.0) & largest.equals(0.0)
        exponent = (select(has_length, length, 1.0).unary("log") * (0.5 / math.log(2))).unary("round")
        infinite = Scalar(Literal(float("inf"), "float32"))
        scale = select(is_zero, 0.0, select(has_length, undo, infinite))
        shift = select(is_zero, 0.0, -Scalar(pairs[lane]) * undo)
        at = (group.lane_row,)
        results = seq(Store(rows.scales, at, scale.value), Store(rows.shifts, at, shift.value))
        x = self._element(group.row, k := SymVar("k", lower=0))
        squared = For(k, sym(self.depth), Store(squares, (r,), _product(x, x), "add"))
        compared = For(k, sym(self.depth), Store(peaks, (r,), Unary("abs", x), "max"))
        looked = seq(
            split_reduction(squared, lanes, 4, zero),
            IfThenElse(Scalar(squares[r]).equals(0.0).value, split_reduction(compared, lanes, 1, zero)),
        )
        balanced = self._row(rows.prepared, group.row, lambda k: _product(self._element(group.row, k), powers[r]))
        first = Store(pairs, (r,), zero, "add")
        added = self._pairs(first, lambda own, place: _signed(rows.prepared, group.row, own, place))
        body = (
            *(fill(buffer, zero, lanes) for buffer in (squares, peaks, pairs)),
            For(r, group.count, looked),
            For(lane, sym(lanes), Store(powers, (lane,), (-exponent).exp2().value), "vectorized"),
            For(r, group.count, seq(balanced, added)),
        )
        return self._over_groups(group, rows, results, body, (squares, peaks, powers, pairs))


def _signed(prepared: Buffer, row: SymExpr, own: SymExpr, place: SymExpr) -> Value:
    """Of all neighbours in a row, the products of those that are a first pair of a step, and the opposites of those
    that are a second."""
    neighbours = Scalar(_product(prepared[row, place], prepared[row, place + 1]))
    number = Scalar(IndexValue(own % TERMS))
    found = select(number.equals(0), neighbours, select(number.equals(TERMS // 2), -neighbours, 0.0))
    return found.value


def _sum(a: Value, b: Value) -> Value:
    return Binary("add", a, b)


def _difference(a: Value, b: Value) -> Value:
    return Binary("sub", a, b)


def _product(a: Value, b: Value) -> Value:
    return Binary("mul", a, b)


@dataclass(frozen=True, slots=True)
class InnerTile:
    """The shape of a tile of results: it leaves registers for three vectors of weights, or two times three, and for
    sums of operands."""

    rows: int
    vectors: int
    row_unit: int  # heights are multiples of this, three of them: 1 would take 11 or 5, and more time to compile
    asks_for_next: bool  # panel of weights, where two lie in 5/8 of the second cache; else some steps ahead for its own
    together: int | None = None  # products of a step that all elements add before they add the next; None: all

    @classmethod
    def of(cls, target: Target) -> InnerTile:
        """Of one vector, where a step's two loads for each multiply-add and addition come in time: an element of x is
        then one operand in memory, for a register for it would take a place in the queues of adders and multipliers
        (a Zen 4: 103 instead of 165 GFLOP/s). Else of two vectors, which share the register of an element; for half of
        the weights to do at a time, all rows add the first pair and its neighbour before the second.

        Measured on one thread, 384x1536, 2048x2048, 1536x384, 512 rows. A Zen 4 makes 0.65 to 1.3 of the usual speed
        where it does not ask ahead, 1.35 to 1.5 with 16 to 64 steps. A Zen 5, usually at 261, 269, 255 GFLOP/s: 349,
        353, 334; asking for its own weights takes the time of what is to be loaded: 323, 334, 319; without asking 16
        rows of MiniLM take 3.8 ms instead of 1.4, 128 rows 12.5 instead of 10.1. One vector 237, 228, 235; 12 rows 309,
        290, 294; in a loop written by hand 375. 3072x768, of which two panels do not fit: 230 to 243 by asking for the
        next one, 250 to 274 for its own."""
        if target.loads_per_product > 1:
            return cls(20, 1, ROW_UNIT, asks_for_next=False)
        return cls(10, 2, ROW_UNIT // 2, asks_for_next=True, together=2)

    def asks(self, weights: Buffer, target: Target) -> Asks:
        panel = int(weights.shape[0]) * self.vectors * target.vector_bits // 8
        if self.asks_for_next and 2 * panel <= target.l2_bytes * 5 // 8:
            return Asks(0, for_next=True)
        return Asks(STEPS_AHEAD, for_next=False, cache=2)


def blocks_together(weights: Buffer, target: Target) -> int | None:
    """How many row blocks go along a panel before the next, for their elements to stay in the second cache: one where
    the weights stay there themselves, all where they come from memory."""
    size, block = product(weights.shape).const * 4, InnerTile.of(target).rows * int(weights.shape[0]) * 4
    if size > target.l3_bytes // 2:
        return None
    return 1 if size <= target.l2_bytes // 2 else max(2, target.l2_bytes // 4 // block)


def chained_terms(block: Block, target: Target) -> Allocate | None:
    """The block of a sum of several products per step, each added by a multiply-add of its own; None: it is none."""
    update, init, reduced, *final = block.update, *block.stmts
    terms = _terms(update.value)
    if block.is_pair or update.combine != "add" or len(terms) < 2:
        return None
    together = InnerTile.of(target).together or len(terms)
    added: list[Stmt] = []
    for start in range(0, len(terms), together):
        total: Value = Load(update.buffer, update.indices)
        for is_added, term in terms[start : start + together]:
            if isinstance(term, Intrinsic) and term.name == HALVES and is_added:
                total = replace(term, args=(total, *term.args[1:]))
                continue
            if not isinstance(term, Binary) or term.op != "mul":
                return None
            factor = term.a if is_added else Unary("neg", term.a)
            total = Intrinsic("fma", (factor, term.b, total), update.buffer.dtype)
        added.append(Store(update.buffer, update.indices, total))
    chained = nest(perfect_nest(reduced).loops, seq(*added))
    return replace(block.body, body=_Simplify().stmt(Seq((init, chained, *final))))


def _terms(value: Value) -> list[tuple[bool, Value]]:
    """Those of a sum, and whether each is added."""
    if not isinstance(value, Binary) or value.op not in ("add", "sub"):
        return [(True, value)]
    return [*_terms(value.a), (value.op == "add", value.b)]


class _Simplify(ProgramRewriter):
    """Indices t // m * m + t % m, as fused loops leave them, become t."""

    def index(self, expr: SymExpr) -> SymExpr:
        return _ANALYZER.simplify(expr)
