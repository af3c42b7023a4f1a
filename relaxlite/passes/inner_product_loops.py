"""The loops of inner products (inner_products.py): a pass over x, then tiles; beside them the ordinary product."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.expr import Attrs
from relaxlite.ir.layout import flat_offset
from relaxlite.ir.ops.scalars import Scalar, literal, select
from relaxlite.ir.program import (
    Allocate,
    Binary,
    Buffer,
    Check,
    Compare,
    For,
    IfThenElse,
    IndexValue,
    Intrinsic,
    Literal,
    Load,
    Select,
    Seq,
    Stmt,
    Store,
    TensorProgram,
    Unary,
    Value,
    seq,
)
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute
from relaxlite.ir.symbolic import SymExpr, SymVar, ceildiv, product, smin, substitute, sym
from relaxlite.passes.balanced_weights import TERMS, whole_steps
from relaxlite.passes.in_place import IN_PLACE, Pairs, in_place_pairs
from relaxlite.passes.join_loops import reads_only_where_written
from relaxlite.passes.loop_pattern import perfect_nest, top_stages
from relaxlite.passes.schedule import collect, fill, less, nest, split_reduction
from relaxlite.passes.schedule_reduction import Block
from relaxlite.records import dataclass
from relaxlite.target import Target

LEAST_ROWS, MOST_ROWS = 10, 20  # of a tile one vector wide, which leaves registers for three weights and two sums
ORDINARY_ROWS = 4  # of tiles of the ordinary product beside it, which has few rows to compute: less code
ROW_UNIT = 4  # heights of tiles are multiples of this, three of them: 1 would take 11 and twice the time to compile
STEPS_AHEAD = 32  # that a tile asks for its weights: 0.65 to 1.3 of the usual speed without, 1.35 to 1.5 with 16 to 64
LEAST_WORK = 2**21  # multiplications, below which the pass over x takes the time that is gained
LARGEST_POWER = 80  # of two: rows whose squares add up to more, or to less than 2**-80, have no length here
VARIANTS = "variants"  # attribute of a program: its stages stand in branches of which one runs

_PERIOD = 3  # vectors after which pairs begin at the same lanes again: 48 elements are 8 steps
_ANALYZER = Analyzer()


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """One stage: block of a reduction over x[i..., k] * w[k, j], where i... are functions of the rows' loops."""

    stage: Stmt
    block: Block
    x: Load
    w: Load

    @property
    def rows(self) -> tuple[For, ...]:
        return self.block.spatial[:-1]

    @property
    def column(self) -> For:
        return self.block.spatial[-1]

    @property
    def row(self) -> SymExpr:
        """Its number."""
        return flat_offset(self.dims, (loop.var for loop in self.rows))

    @property
    def dims(self) -> tuple[SymExpr, ...]:
        return tuple(loop.extent for loop in self.rows)

    def reads_like(self, other: Product) -> bool:
        """Whether both have the same rows."""
        if self.x.buffer is not other.x.buffer or self.dims != other.dims:
            return False
        names = {mine.var: its.var for mine, its in zip(self.rows, other.rows, strict=True)}
        mine = tuple(substitute(index, names) for index in self.x.indices[:-1])
        return all(a is b for a, b in zip(mine, other.x.indices[:-1], strict=True))

    def with_sum(self, reduced: Stmt, finish: Value, block_sum: Buffer) -> Stmt:
        """The stage with other reduced loops, whose sum stands for `finish` in what follows."""
        init, _, *final = self.block.stmts
        after = _Finish(block_sum, finish).stmt(seq(*final))
        body: Stmt = Allocate(self.block.body.buffer, seq(init, reduced, after))
        return Substitute(fresh=True).stmt(nest(self.block.spatial, body))


@dataclass(frozen=True, slots=True, eq=False)
class Products:
    """A program of nothing else, of one x."""

    whole: TensorProgram
    parts: tuple[Product, ...]
    lanes: int

    @property
    def x(self) -> Load:
        """An element of a row, at the loops of the first part."""
        return self.parts[0].x

    @property
    def weights(self) -> tuple[int, ...]:
        """Which inputs these are."""
        return tuple(self.whole.inputs.index(part.w.buffer) for part in self.parts)

    @property
    def depth(self) -> int:
        return int(self.x.buffer.shape[-1])

    @property
    def least_rows(self) -> int:
        """From how many rows on this is faster."""
        columns = sum(int(part.column.extent) for part in self.parts)
        return max(LEAST_ROWS, -(-LEAST_WORK // (self.depth * columns)))

    @property
    def stride(self) -> int:
        """From one balanced row to the next: zeros up to whole periods of `_pairs` and one more element, which that
        reads, and an odd number of vectors, for rows side by side to lie in other sets of the cache."""
        vectors = -(-self.depth // (_PERIOD * self.lanes)) * _PERIOD + 1
        return (vectors + 1 - vectors % 2) * self.lanes

    def program(self) -> TensorProgram:
        """Still to be scheduled, but for the pass over x."""
        rows, columns = product(self.parts[0].dims), [part.column.extent for part in self.parts]
        shape = (rows + (ROW_UNIT - 1), sym(self.stride))  # the last tile reads up to so many rows more
        balanced = Buffer(f"{self.x.buffer.name}_balanced", shape, "float32")
        scales = Buffer(f"{self.x.buffer.name}_scales", (sym(2), rows), "float32")  # and what is to be added then
        weights = [replace(p.w.buffer, shape=(sym(whole_steps(self.depth)), p.column.extent)) for p in self.parts]
        offsets = [Buffer(f"{w.name}_offset", (n,), "float32") for w, n in zip(weights, columns, strict=True)]
        widths = [Buffer(f"{w.name}_width", (n,), "float32") for w, n in zip(weights, columns, strict=True)]
        fast = [
            self._fast(part, (w, offset, width), balanced, scales)
            for part, w, offset, width in zip(self.parts, weights, offsets, widths, strict=True)
        ]
        plain = [self._plain(part, w, width) for part, w, width in zip(self.parts, weights, widths, strict=True)]
        worst = Buffer("largest_scale", (), "float32", "local")
        largest = For(at := SymVar("i", lower=0), rows, Store(worst, (), scales[0, at], "max"))
        look = seq(self._balance(balanced, scales), Store(worst, (), literal(0.0, "float32")), largest)
        choice = seq(
            Store(worst, (), Literal(float("inf"), "float32")),
            IfThenElse(less(self.least_rows - 1, rows), look),
            IfThenElse(Compare("lt", worst[()], Literal(float("inf"), "float32")), seq(*fast), seq(*plain)),
        )
        body: Stmt = Allocate(worst, choice)
        for buffer in (scales, balanced):
            body = Allocate(buffer, body)
        replaced = {part.w.buffer: w for part, w in zip(self.parts, weights, strict=True)}
        beside = [b for both in zip(offsets, widths, strict=True) for b in both]
        inputs = (*(replaced.get(b, b) for b in self.whole.inputs), *beside)
        attrs = Attrs({**self.whole.attrs, VARIANTS: True, IN_PLACE: self._in_place(2 * len(self.parts))})
        checks = [s for s in top_stages(self.whole) if isinstance(s, Check)]
        return replace(self.whole, params=(*inputs, *self.whole.outputs), body=seq(*checks, body), attrs=attrs)

    def _in_place(self, more: int) -> Pairs:
        """Which operands the results may still take over, behind so many more inputs: x is read before results are
        written, or as ever."""
        whole = self.whole
        pairs = [
            (x, out + more)
            for x, out in in_place_pairs(whole)[0]
            if reads_only_where_written(top_stages(whole), whole.params[x], whole.params[out])
        ]
        return tuple(pairs)

    def _plain(self, part: Product, w: Buffer, width: Buffer) -> Stmt:
        """The stage as it was."""
        total, column = part.block.body.buffer, part.column.var
        reduced = _Elsewhere(part.w, w[part.w.indices[-2:]]).stmt(part.block.stmts[1])
        return part.with_sum(reduced, Binary("mul", total[()], width[column]), total)

    def _fast(self, part: Product, column_side: tuple[Buffer, Buffer, Buffer], x: Buffer, scales: Buffer) -> Stmt:
        w, offset, width = column_side
        total, row, column = part.block.body.buffer, part.row, part.column.var
        step = SymVar("t", lower=0)
        places = [step * TERMS + n for n in range(TERMS)]
        x1, x2, x3, x4, x5, x6 = (x[row, k] for k in places)
        w1, w2, w3, w4, w5, w6 = (w[k, column] for k in places)
        terms = Binary("add", _product(x3, w3), _product(_sum(w2, x1), _sum(w1, x2)))
        terms = Binary("add", terms, _product(x6, w6))
        terms = Binary("sub", terms, _product(_difference(w5, x4), _difference(w4, x5)))
        update = Store(total, (), terms, "add")
        reduced = For(step, sym(whole_steps(self.depth) // TERMS), update)
        e = Scalar(total[()])
        finish = ((e - Scalar(offset[column])) * Scalar(scales[0, row]) + Scalar(scales[1, row])) * Scalar(
            width[column]
        )
        return part.with_sum(reduced, finish.value, total)

    def _balance(self, balanced: Buffer, scales: Buffer) -> Stmt:
        """The rows of x, their scales and what their pairs add, in one parallel loop over as many rows as a vector has
        lanes, whose scales are computed side by side. A row that has no length gets an infinite scale, one of zeros a
        scale of 0."""
        lanes, rows = self.lanes, product(self.parts[0].dims)
        group, r = SymVar("group", lower=0), SymVar("r", lower=0, upper=lanes - 1)
        first = group * lanes
        count, row = smin(lanes, rows - first), first + r
        squares, peaks, powers, pairs = (
            Buffer(name, (sym(lanes),), "float32", "local") for name in ("squares", "peaks", "powers", "pairs")
        )
        zero, lane = literal(0.0, "float32"), SymVar("l", lower=0, upper=lanes - 1)
        length, largest, undo = Scalar(squares[lane]), Scalar(peaks[lane]), 1.0 / Scalar(powers[lane])
        has_length = (length >= 2.0**-LARGEST_POWER) & (length <= 2.0**LARGEST_POWER)
        is_zero = length.equals(0.0) & largest.equals(0.0)
        exponent = (select(has_length, length, 1.0).unary("log") * (0.5 / math.log(2))).unary("round")
        infinite = Scalar(Literal(float("inf"), "float32"))
        stored = seq(
            Store(scales, (sym(0), first + lane), select(is_zero, 0.0, select(has_length, undo, infinite)).value),
            Store(scales, (sym(1), first + lane), select(is_zero, 0.0, -Scalar(pairs[lane]) * undo).value),
        )
        x = self._element(row, k := SymVar("k", lower=0))
        squared = For(k, sym(self.depth), Store(squares, (r,), _product(x, x), "add"))
        compared = For(k, sym(self.depth), Store(peaks, (r,), Unary("abs", x), "max"))
        looked = seq(
            split_reduction(squared, lanes, 4, zero),
            IfThenElse(Scalar(squares[r]).equals(0.0).value, split_reduction(compared, lanes, 1, zero)),
        )
        body: Stmt = seq(
            *(fill(buffer, zero, lanes) for buffer in (squares, peaks, pairs)),
            For(r, count, looked),
            For(lane, sym(lanes), Store(powers, (lane,), (-exponent).exp2().value), "vectorized"),
            For(
                r,
                count,
                seq(self._copy(balanced, row, powers[r]), self._pairs(Store(pairs, (r,), zero, "add"), balanced, row)),
            ),
            For(lane, sym(lanes), IfThenElse(less(first + lane, rows), stored), "vectorized"),
        )
        for buffer in (pairs, powers, peaks, squares):
            body = Allocate(buffer, body)
        beyond = For(r, sym(ROW_UNIT - 1), self._zeros(balanced, rows + r, 0))
        groups = For(group, ceildiv(rows, lanes), body, "parallel")
        return Substitute(fresh=True).stmt(seq(beyond, groups))

    def _element(self, row: SymExpr, place: SymExpr) -> Load:
        """Of a row of x by its number."""
        at: dict[SymVar, SymExpr] = {}
        for loop in reversed(self.parts[0].rows[1:]):
            at[loop.var], row = row % loop.extent, row // loop.extent
        at[self.parts[0].rows[0].var] = row
        return replace(self.x, indices=(*(substitute(index, at) for index in self.x.indices[:-1]), place))

    def _copy(self, balanced: Buffer, row: SymExpr, power: Value) -> Stmt:
        """A row times its power of two, then zeros."""
        full, rest = divmod(self.depth, self.lanes)

        def scaled(place: SymExpr) -> Value:
            return _product(self._element(row, place), power)

        def masked(place: SymExpr) -> Value:
            return Select(less(place, self.depth), scaled(place), literal(0.0, "float32"))

        last = [self._vectors(balanced, row, full, full + 1, masked)] if rest else []
        return seq(self._vectors(balanced, row, 0, full, scaled), *last, self._zeros(balanced, row, full + len(last)))

    def _zeros(self, balanced: Buffer, row: SymExpr, first: int) -> Stmt:
        """Of a row from vector `first` on."""
        return self._vectors(balanced, row, first, self.stride // self.lanes, lambda place: literal(0.0, "float32"))

    def _vectors(self, balanced: Buffer, row: SymExpr, first: int, end: int, value: Callable[[SymExpr], Value]) -> Stmt:
        part, lane = SymVar("u", lower=0), SymVar("l", lower=0, upper=self.lanes - 1)
        place = (part + first) * self.lanes + lane
        store = Store(balanced, (row, place), value(place))
        return For(part, sym(end - first), For(lane, sym(self.lanes), store, "vectorized"))

    def _pairs(self, total: Store, balanced: Buffer, row: SymExpr) -> Stmt:
        """The sum of the products of pairs of a balanced row, less those of the second pair of a step: of all
        neighbours, those that are a pair."""
        step, part = SymVar("step", lower=0), SymVar("u", lower=0, upper=_PERIOD - 1)
        lane, zero = SymVar("l", lower=0, upper=self.lanes - 1), literal(0.0, "float32")
        partial = Buffer("pairs_partial", (sym(_PERIOD * self.lanes),), "float32", "local")
        own = part * self.lanes + lane
        place = step * (_PERIOD * self.lanes) + own
        neighbours = Scalar(_product(balanced[row, place], balanced[row, place + 1]))
        number = Scalar(IndexValue(own % TERMS))
        value = select(number.equals(0), neighbours, select(number.equals(TERMS // 2), -neighbours, 0.0))
        store = Store(partial, (own,), value.value, "add")
        body = For(part, sym(_PERIOD), For(lane, sym(self.lanes), store, "vectorized"), "unrolled")
        steps = For(step, sym(-(-self.depth // (_PERIOD * self.lanes))), body)
        return Allocate(
            partial, seq(fill(partial, zero, self.lanes), steps, collect(total, partial, _PERIOD, self.lanes))
        )


def _sum(a: Value, b: Value) -> Value:
    return Binary("add", a, b)


def _difference(a: Value, b: Value) -> Value:
    return Binary("sub", a, b)


def _product(a: Value, b: Value) -> Value:
    return Binary("mul", a, b)


def blocks_together(weights: Buffer, target: Target) -> int | None:
    """How many row blocks go along a panel before the next, for their elements to stay in the second cache: one where
    the weights stay there themselves, all where they come from memory."""
    size, block = product(weights.shape).const * 4, MOST_ROWS * int(weights.shape[0]) * 4
    if size > target.l3_bytes // 2:
        return None
    return 1 if size <= target.l2_bytes // 2 else max(2, target.l2_bytes // 4 // block)


def chained_terms(block: Block) -> Allocate | None:
    """The block of a sum of several products per step, each added by a multiply-add of its own; None: it is none."""
    update, init, reduced, *final = block.update, *block.stmts
    terms = _terms(update.value)
    if block.is_pair or update.combine != "add" or len(terms) < 2:
        return None
    total: Value = Load(update.buffer, update.indices)
    for is_added, term in terms:
        if not isinstance(term, Binary) or term.op != "mul":
            return None
        factor = term.a if is_added else Unary("neg", term.a)
        total = Intrinsic("fma", (factor, term.b, total), update.buffer.dtype)
    chained = nest(perfect_nest(reduced).loops, Store(update.buffer, update.indices, total))
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


class _Finish(ProgramRewriter):
    """What reads the sum reads a function of it."""

    def __init__(self, total: Buffer, finish: Value) -> None:
        super().__init__()
        self._total, self._finish = total, finish

    def _value(self, value: Value) -> Value:
        return self._finish if isinstance(value, Load) and value.buffer is self._total else super()._value(value)


class _Elsewhere(ProgramRewriter):
    """One load as another."""

    def __init__(self, old: Load, new: Load) -> None:
        super().__init__()
        self._old, self._new = old, new

    def _value(self, value: Value) -> Value:
        return self._new if value is self._old else super()._value(value)
