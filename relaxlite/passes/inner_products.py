"""Winograd's inner product for matrices times constant weights, where additions cost nothing beside multiply-adds.

Two terms of a sum take one multiplication and two additions of an operand and a weight,

    x1*w1 + x2*w2 = (x1 + w2)*(x2 + w1) - x1*x2 - w1*w2

for x1*x2, summed up, is one number of a row, and w1*w2 one of a column (Winograd, "A New Algorithm for Inner Product",
IEEE Transactions on Computers, 1968). That is no gain where one unit does both; but some processors have adders beside
their multiply-adders. There, of three terms two are computed like this and the third as ever:

    e += (x1 + w2)*(x2 + w1); e += x3*w3             two multiply-adds and two additions, in the time of two for three

Which is 1.5 times the peak of multiply-adds alone (measured on a Zen 4: 1.45 times).

**Rounding.** x and w have to be of like size, or the smaller is lost in the sums: rows and columns are multiplied by
powers of two that give them lengths (2-norms) near 1, which is exact. The error is then within the bound of an ordinary
sum of products up to a small factor, eps * |x| * |w| (Brent, "Error Analysis of Algorithms for Matrix Multiplication
and Triangular Decomposition using Winograd's Identity", 1970); measured, it is 0.8 to 1.8 times that of an ordinary
one. Each row's result depends on that row alone. Weights are left alone where an ordinary product would be much more
exact than that bound: where some columns are mostly zeros, as those of a selection, or most have few large weights.

**Rows that have no such length**, for they hold an infinity or NaN or numbers out of all proportion: one of them, and
the ordinary product of all rows is computed, as it is for few rows. Rows and columns of zeros give zeros.

    for i: { scale[i], shift[i] = ...; balanced[i, :] = x[i, :] / scale[i] }      one pass over x
    if all rows have a length:
        for i, j: { e = sum of (balanced[i, 3*t] + w[3*t + 1, j]) * (balanced[i, 3*t + 1] + w[3*t, j])
                           + balanced[i, 3*t + 2] * w[3*t + 2, j];
                    out[i, j] = f(((e - offset[j]) * scale[i] + shift[i]) * width[j]) }
    else:
        for i, j: { e = sum of x[i, k] * w[k, j];  out[i, j] = f(e * width[j]) }
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.expr import Attrs, Call, Constant, Expr, GlobalVar, Var
from relaxlite.ir.layout import flat_offset
from relaxlite.ir.module import Definition, IRModule
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
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, product, substitute, sym
from relaxlite.ir.visitor import Rewriter, program_calls
from relaxlite.passes.in_place import IN_PLACE, Pairs, in_place_pairs
from relaxlite.passes.join_loops import reads_only_where_written
from relaxlite.passes.loop_pattern import perfect_nest, top_stages
from relaxlite.passes.manager import PassContext
from relaxlite.passes.pack_constants import SHARED_BYTES
from relaxlite.passes.parallel_loops import parallel_nest
from relaxlite.passes.schedule import collect, fill, less, nest, split_reduction
from relaxlite.passes.schedule_reduction import Block, reduction_block
from relaxlite.passes.specialize import clamped_loops
from relaxlite.records import dataclass
from relaxlite.target import Target

LEAST_ROWS, MOST_ROWS = 10, 20  # of a tile one vector wide, which leaves registers for three weights and two sums
ORDINARY_ROWS = 4  # of tiles of the ordinary product beside it, which has few rows to compute: less code
ROW_UNIT = 4  # heights of tiles are multiples of this, three of them: 1 would take 11 and twice the time to compile
STEPS_AHEAD = 64  # that a tile asks for its weights: 0.65 to 1.3 of the usual speed without, 1.4 to 1.5 with 64 to 128
LEAST_COLUMNS = 64  # over which the pass over x is spread
LEAST_DEPTH = 96  # terms of a sum
LEAST_WORK = 2**21  # multiplications, below which the pass over x takes the time that is gained
LEAST_DENSITY = 0.25  # |w|_1 / (sqrt(depth) * |w|_2) of most columns: 0.8 for normal distributions, 1 at most
LEAST_NONZERO = 0.125  # of the weights of any column that is not zero
LARGEST_POWER = 80  # of two: rows whose squares add up to more, or to less than 2**-80, have no length here
_SHORTEST_COLUMN = 2.0**-120  # shorter ones are as if they were so long, for powers to be float32 and exact
_FACTORS = 3  # terms of a step
_ANALYZER = Analyzer()
VARIANTS = "variants"  # attribute of a program: its stages stand in branches of which one runs


def inner_products(module: IRModule, context: PassContext) -> IRModule:
    """Compute products with constant weights by fewer multiplications, where additions are free."""
    if not context.target.adds_beside_products:
        return module
    programs = module.programs().items()
    found = {name: made for name, p in programs if (made := _find(p, context.target.vector_lanes(4))) is not None}
    readers = _readers(module)
    for call in program_calls(module):
        name = call.callee.name
        if name in found and (problem := found[name].problem_of(call, readers)) is not None:
            context.decide("inner_products", name, False, problem)
            del found[name]
    definitions: dict[str, Definition] = {}
    for name, products in found.items():
        context.decide("inner_products", name, True, "additions take no time beside multiply-adds")
        definitions[name] = products.program()
    for name, function in module.functions().items():
        definitions[name] = _PassWeights(found).function(function)
    return module.updated(definitions)


def _readers(module: IRModule) -> dict[int, set[tuple[str, int]]]:
    """By the id of each constant's value, the programs that read it, and as which of their inputs."""
    readers: dict[int, set[tuple[str, int]]] = {}
    for call in program_calls(module):
        for place, arg in enumerate(call.args):
            if isinstance(arg, Constant):
                readers.setdefault(id(arg.value), set()).add((call.callee.name, place))
    return readers


def _find(program: TensorProgram, lanes: int) -> _Products | None:
    """The program as products of one matrix with weights; None: it is something else, or not worth it."""
    if program.attrs.get("scheduled"):
        return None
    stages = [s for s in top_stages(program) if not isinstance(s, Check)]
    made = [_product_of(stage, program) for stage in stages]
    found = [each for each in made if each is not None]
    if not found or len(found) < len(made):
        return None
    first, weights = found[0], {each.w.buffer for each in found}
    if not all(each.reads_like(first) for each in found) or len(weights) < len(found):
        return None
    columns = sum(as_int(each.column.extent) or 0 for each in found)
    _, most_rows = _ANALYZER.bounds(product(first.dims))
    products = _Products(program, tuple(found), lanes)
    if columns < LEAST_COLUMNS or products.depth < LEAST_DEPTH:
        return None
    return products if most_rows is None or most_rows >= products.least_rows else None


def _product_of(stage: Stmt, program: TensorProgram) -> _Product | None:
    block = reduction_block(stage)
    if block is None or block.is_pair or len(block.spatial) < 2 or clamped_loops(stage):
        return None
    update, reduced = block.update, perfect_nest(block.stmts[1]).loops
    init, value = block.stmts[0], update.value
    if len(reduced) != 1 or not isinstance(value, Binary) or value.op != "mul" or update.combine != "add":
        return None
    if not isinstance(init, Store) or not isinstance(init.value, Literal) or init.value.value != 0:
        return None
    column = block.spatial[-1]
    for x, w in ((value.a, value.b), (value.b, value.a)):
        if not isinstance(x, Load) or not isinstance(w, Load) or {x.dtype, w.dtype} != {"float32"}:
            return None
        if x.buffer in program.inputs and w.buffer in program.inputs and _is_matrix(w, reduced[0], column):
            where = {v for index in x.indices[:-1] for v in index.free_vars()}
            is_row = x.indices[-1] is reduced[0].var and x.buffer.shape[-1] is reduced[0].extent
            if is_row and where.isdisjoint((reduced[0].var, column.var)):
                return _Product(stage, block, x, w)
    return None


def _is_matrix(w: Load, step: For, column: For) -> bool:
    """Whether these are all of the weights of a matrix, or of filters of one pixel: w[0, 0, k, j]."""
    if len(w.indices) < 2:
        return False
    *ones, depth, columns = w.buffer.shape
    is_pixel = all(as_int(d) == 1 for d in ones) and all(as_int(i) == 0 for i in w.indices[:-2])
    is_whole = depth is step.extent and columns is column.extent and depth.is_const and columns.is_const
    return is_pixel and is_whole and w.indices[-2:] == (step.var, column.var)


@dataclass(frozen=True, slots=True, eq=False)
class _Product:
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
    def at(self) -> tuple[SymVar, ...]:
        return tuple(loop.var for loop in self.rows)

    @property
    def row(self) -> SymExpr:
        """Its number."""
        return flat_offset(self.dims, self.at)

    @property
    def dims(self) -> tuple[SymExpr, ...]:
        return tuple(loop.extent for loop in self.rows)

    def reads_like(self, other: _Product) -> bool:
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
class _Products:
    whole: TensorProgram
    parts: tuple[_Product, ...]
    lanes: int

    @property
    def x(self) -> Load:
        """An element of a row, at the loops of the first part."""
        return self.parts[0].x

    @property
    def depth(self) -> int:
        return int(self.x.buffer.shape[-1])

    @property
    def least_rows(self) -> int:
        """From how many rows on this is faster."""
        columns = sum(int(part.column.extent) for part in self.parts)
        return max(LEAST_ROWS, -(-LEAST_WORK // (self.depth * columns)))

    @property
    def padded(self) -> int:
        """The depth in whole steps."""
        return -(-self.depth // _FACTORS) * _FACTORS

    @property
    def stride(self) -> int:
        """From one balanced row to the next: zeros up to whole steps of three vectors and one more element, which
        `_pairs` reads, and an odd number of vectors, for rows side by side to lie in other sets of the cache."""
        step = _FACTORS * self.lanes
        vectors = -(-self.depth // step) * _FACTORS + 1
        return (vectors + 1 - vectors % 2) * self.lanes

    def problem_of(self, call: Call, readers: Mapping[int, set[tuple[str, int]]]) -> str | None:
        """Why the weights of a call are none that this is for."""
        for part in self.parts:
            weights = call.args[self.whole.inputs.index(part.w.buffer)]
            if not isinstance(weights, Constant):
                return f"{part.w.buffer.name} is no constant"
            if weights.value.nbytes >= SHARED_BYTES and len(readers[id(weights.value)]) > 1:
                return f"{part.w.buffer.name} is read elsewhere, too, and stays one copy as it is"
            if (problem := _problem_of(_matrix(weights.value))) is not None:
                return f"{part.w.buffer.name} {problem}"
        return None

    def arguments(self, call: Call, done: dict[int, tuple[Constant, ...]]) -> tuple[Expr, ...]:
        """Those of the new program. `done`: what has been made of weights, by the id of their value."""
        args, beside = list(call.args), []
        for part in self.parts:
            place = self.whole.inputs.index(part.w.buffer)
            weights = args[place]
            assert isinstance(weights, Constant)
            if id(weights.value) not in done:
                done[id(weights.value)] = self._balanced_weights(weights)
            args[place], *more = done[id(weights.value)]
            beside += more
        inputs = len(self.whole.inputs)
        return (*args[:inputs], *beside, *args[inputs:])

    def _balanced_weights(self, weights: Constant) -> tuple[Constant, ...]:
        """The weights, each column times a power of two, in whole steps; the sums of products of pairs of a column; and
        what undoes the powers (0 for a column of zeros)."""
        w = _matrix(weights.value)
        length = _lengths(w)
        power = np.exp2(-np.round(np.log2(np.maximum(length, _SHORTEST_COLUMN)))).astype(np.float32)
        balanced = np.empty((self.padded, w.shape[1]), np.float32)
        np.multiply(w, power, out=balanced[: len(w)])
        balanced[len(w) :] = 0
        first, second = balanced[0::_FACTORS], balanced[1::_FACTORS]
        offset = np.einsum("kj,kj->j", first, second, dtype=np.float64)
        made = (balanced, offset, (length > 0) / power)
        names = (weights.name, None, None)
        return tuple(Constant.of(a.astype(np.float32, copy=False), name=n) for a, n in zip(made, names, strict=True))

    # The program

    def program(self) -> TensorProgram:
        """Still to be scheduled, but for the pass over x."""
        dims, columns = self.parts[0].dims, [part.column.extent for part in self.parts]
        shape = (product(dims) + (ROW_UNIT - 1), sym(self.stride))  # the last tile reads up to so many rows more
        balanced = Buffer(f"{self.x.buffer.name}_balanced", shape, "float32")
        scale, shift = (Buffer(f"{self.x.buffer.name}_{name}", dims, "float32") for name in ("scale", "shift"))
        weights = [replace(p.w.buffer, shape=(sym(self.padded), p.column.extent)) for p in self.parts]
        offsets = [Buffer(f"{w.name}_offset", (n,), "float32") for w, n in zip(weights, columns, strict=True)]
        widths = [Buffer(f"{w.name}_width", (n,), "float32") for w, n in zip(weights, columns, strict=True)]
        fast = [
            self._fast(part, (w, offset, width), (balanced, scale, shift))
            for part, w, offset, width in zip(self.parts, weights, offsets, widths, strict=True)
        ]
        plain = [self._plain(part, w, width) for part, w, width in zip(self.parts, weights, widths, strict=True)]
        worst = Buffer("largest_scale", (), "float32", "local")
        look = seq(self._balance(balanced, scale, shift), self._largest(worst, scale))
        choice = seq(
            Store(worst, (), Literal(float("inf"), "float32")),
            IfThenElse(less(self.least_rows - 1, product(dims)), look),
            IfThenElse(Compare("lt", worst[()], Literal(float("inf"), "float32")), seq(*fast), seq(*plain)),
        )
        body: Stmt = Allocate(worst, choice)
        for buffer in (shift, scale, balanced):
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

    def _plain(self, part: _Product, w: Buffer, width: Buffer) -> Stmt:
        """The stage as it was."""
        total, column = part.block.body.buffer, part.column.var
        reduced = _Elsewhere(part.w, w[part.w.indices[-2:]]).stmt(part.block.stmts[1])
        return part.with_sum(reduced, Binary("mul", total[()], width[column]), total)

    def _fast(
        self, part: _Product, column_side: tuple[Buffer, Buffer, Buffer], row_side: tuple[Buffer, Buffer, Buffer]
    ) -> Stmt:
        (w, offset, width), (x, scale, shift) = column_side, row_side
        total, at, row, column = part.block.body.buffer, part.at, part.row, part.column.var
        step = SymVar("t", lower=0)
        first = [step * _FACTORS + n for n in range(_FACTORS)]
        (x1, x2, x3), (w1, w2, w3) = ([x[row, f] for f in first], [w[f, column] for f in first])
        pair = Binary("mul", Binary("add", x1, w2), Binary("add", x2, w1))
        update = Store(total, (), Binary("add", pair, Binary("mul", x3, w3)), "add")
        reduced = For(step, sym(self.padded // _FACTORS), update)
        e = Scalar(total[()])
        finish = ((e - Scalar(offset[column])) * Scalar(scale[at]) + Scalar(shift[at])) * Scalar(width[column])
        return part.with_sum(reduced, finish.value, total)

    def _balance(self, balanced: Buffer, scale: Buffer, shift: Buffer) -> Stmt:
        """The rows of x, their scales and the sums of products of their pairs, in one parallel loop over rows. A row
        that has no length gets an infinite scale, one of zeros a scale of 0."""
        at = self.parts[0].at
        squares, peak, power, pairs = (
            Buffer(name, (), "float32", "local") for name in ("squares", "peak", "power", "pairs")
        )
        zero, infinity = (Literal(value, "float32") for value in (0.0, float("inf")))
        length, largest, undo = Scalar(squares[()]), Scalar(peak[()]), 1.0 / Scalar(power[()])
        has_length = (length >= 2.0**-LARGEST_POWER) & (length <= 2.0**LARGEST_POWER)
        is_zero = length.equals(0.0) & largest.equals(0.0)
        exponent = (select(has_length, length, 1.0).unary("log") * (0.5 / math.log(2))).unary("round")
        x = self._element(k := SymVar("k", lower=0))
        depth = sym(self.depth)
        squared = For(k, depth, Store(squares, (), Binary("mul", x, x), "add"))
        compared = For(k, depth, Store(peak, (), Unary("abs", x), "max"))
        body: Stmt = seq(
            *(Store(buffer, (), zero) for buffer in (squares, peak, pairs)),
            split_reduction(squared, self.lanes, 4, zero),
            IfThenElse(length.equals(0.0).value, split_reduction(compared, self.lanes, 1, zero)),
            Store(power, (), (-exponent).exp2().value),
            self._copy(balanced, power),
            self._pairs(pairs, balanced),
            Store(scale, at, select(is_zero, 0.0, select(has_length, undo, Scalar(infinity))).value),
            Store(shift, at, select(is_zero, 0.0, -Scalar(pairs[()]) * undo).value),
        )
        for buffer in (pairs, power, peak, squares):
            body = Allocate(buffer, body)
        beyond = For(
            r := SymVar("r", lower=0), sym(ROW_UNIT - 1), self._zeros(balanced, product(self.parts[0].dims) + r, 0)
        )
        return seq(beyond, Simplify().stmt(parallel_nest(self.parts[0].rows, body)))

    def _element(self, place: SymExpr) -> Load:
        return replace(self.x, indices=(*self.x.indices[:-1], place))

    def _copy(self, balanced: Buffer, power: Buffer) -> Stmt:
        """A row times its power of two, then zeros."""
        row, (full, rest) = self.parts[0].row, divmod(self.depth, self.lanes)

        def scaled(place: SymExpr) -> Value:
            element = Binary("mul", self._element(place), power[()])
            return Select(less(place, self.depth), element, literal(0.0, "float32"))

        def unmasked(place: SymExpr) -> Value:
            return Binary("mul", self._element(place), power[()])

        last = [self._vectors(balanced, row, full, full + 1, scaled)] if rest else []
        head = self._vectors(balanced, row, 0, full, unmasked)
        return seq(head, *last, self._zeros(balanced, row, full + len(last)))

    def _zeros(self, balanced: Buffer, row: SymExpr, first: int) -> Stmt:
        """Of a row from vector `first` on."""
        return self._vectors(balanced, row, first, self.stride // self.lanes, lambda place: literal(0.0, "float32"))

    def _vectors(self, balanced: Buffer, row: SymExpr, first: int, end: int, value: Callable[[SymExpr], Value]) -> Stmt:
        part, lane = SymVar("u", lower=0), SymVar("l", lower=0, upper=self.lanes - 1)
        place = (part + first) * self.lanes + lane
        store = Store(balanced, (row, place), value(place))
        return For(part, sym(end - first), For(lane, sym(self.lanes), store, "vectorized"))

    def _pairs(self, pairs: Buffer, balanced: Buffer) -> Stmt:
        """The sum of the products of pairs of a balanced row: of all neighbours, those that are a pair."""
        step, part = SymVar("step", lower=0), SymVar("u", lower=0, upper=_FACTORS - 1)
        lane, zero = SymVar("l", lower=0, upper=self.lanes - 1), literal(0.0, "float32")
        partial = Buffer("pairs_partial", (sym(_FACTORS * self.lanes),), "float32", "local")
        own = part * self.lanes + lane
        row, place = self.parts[0].row, step * (_FACTORS * self.lanes) + own
        neighbours = Binary("mul", balanced[row, place], balanced[row, place + 1])
        is_pair = Compare("eq", IndexValue(own % _FACTORS), literal(0, "int64"))
        store = Store(partial, (own,), Select(is_pair, neighbours, zero), "add")
        body = For(part, sym(_FACTORS), For(lane, sym(self.lanes), store, "vectorized"), "unrolled")
        steps = For(step, sym(-(-self.depth // (_FACTORS * self.lanes))), body)
        total = collect(Store(pairs, (), zero, "add"), partial, _FACTORS, self.lanes)
        return Allocate(partial, seq(fill(partial, zero, self.lanes), steps, total))

    def _largest(self, worst: Buffer, scale: Buffer) -> Stmt:
        rows = self.parts[0].rows
        at = SymVar("i", lower=0)
        flat: list[SymExpr] = [at]
        for loop in reversed(rows[1:]):
            head, *tail = flat
            flat = [head // loop.extent, head % loop.extent, *tail]
        loop = For(at, product(loop.extent for loop in rows), Store(worst, (), scale[tuple(flat)], "max"))
        return seq(Store(worst, (), literal(0.0, "float32")), loop)


def _matrix(weights: np.ndarray) -> np.ndarray:
    """Weights (..., k, n) whose other dimensions are ones."""
    return weights.reshape(weights.shape[-2:])


def _lengths(w: np.ndarray) -> np.ndarray:
    """Of columns: float64[n]. Not finite where squares leave float32's range."""
    squares = np.einsum("kj,kj->j", w, w).astype(np.float64)
    (small,) = np.nonzero(squares < 2.0**-LARGEST_POWER)  # where they may have vanished
    squares[small] = (w[:, small].astype(np.float64) ** 2).sum(axis=0)
    lengths: np.ndarray = np.sqrt(squares)
    return lengths


def _problem_of(w: np.ndarray) -> str | None:
    """Why these weights are none for this, or None."""
    length = _lengths(w)
    if not np.isfinite(length).all():
        return "has weights that are no finite numbers, or too large"
    used, nonzero = length > 0, np.count_nonzero(w, axis=0)
    if not used.any():
        return None
    least = nonzero[used].min() / len(w)
    density = np.median(np.einsum("kj->j", np.abs(w))[used] / (length[used] * math.sqrt(len(w))))
    if least < LEAST_NONZERO:
        return f"has a column of which {least:.1%} are not zero"
    if density < LEAST_DENSITY:
        return f"has few large weights in most columns: |w|_1 / (sqrt(n) * |w|_2) is {density:.2f}"
    return None


def blocks_together(weights: Buffer, target: Target) -> int | None:
    """How many row blocks go along a panel before the next, for their elements to stay in the second cache: one where
    the weights stay there themselves, all where they come from memory."""
    size, block = product(weights.shape).const * 4, MOST_ROWS * int(weights.shape[0]) * 4
    if size > target.l3_bytes // 2:
        return None
    return 1 if size <= target.l2_bytes // 2 else max(2, target.l2_bytes // 4 // block)


def chained_terms(block: Block) -> Allocate | None:
    """The block of a sum of two products per step, each added by a multiply-add of its own; None: it is none."""
    if block.is_pair:
        return None
    update, init, reduced, *final = block.update, *block.stmts
    value = update.value
    if update.combine != "add" or not isinstance(value, Binary) or value.op != "add":
        return None
    terms = (value.b, value.a)
    if not all(isinstance(t, Binary) and t.op == "mul" for t in terms):
        return None
    total: Value = Load(update.buffer, update.indices)
    for term in terms:
        assert isinstance(term, Binary)
        total = Intrinsic("fma", (term.a, term.b, total), update.buffer.dtype)
    loops = perfect_nest(reduced).loops
    chained = nest(loops, Store(update.buffer, update.indices, total))
    return replace(block.body, body=Seq((init, Simplify().stmt(chained), *final)))


class Simplify(ProgramRewriter):
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


class _PassWeights(Rewriter):
    """Passes balanced weights."""

    def __init__(self, found: Mapping[str, _Products]) -> None:
        super().__init__()
        self._found = found
        self._done: dict[int, tuple[Constant, ...]] = {}  # by the id of the weights' value: those of several calls

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not isinstance(value, Call) or not isinstance(value.callee, GlobalVar):
            return None
        products = self._found.get(value.callee.name)
        return None if products is None else replace(value, args=products.arguments(value, self._done))
