"""Programs that multiply one matrix by constant weights through prepared rows, with the ordinary product as fallback.

    for i: { scale[i], shift[i], prepared[i, :] = ... of x[i, :] }               one pass over x
    if all rows have a scale:
        for i, j: { e = ... prepared[i, t], w[t, j];  out[i, j] = f(... e, scale[i], shift[i], offset[j], width[j]) }
    else:
        for i, j: { e = sum of x[i, k] * w[k, j];  out[i, j] = f(e * width[j]) }

Quantized weights stay quantized, and the fallback is unchanged. The fast branch starts with a stage that dequantizes w,
which the schedule splits into panels (winograd_tile.py):

        for k, j: w[k, j] = widened(q[k, j]) / width[j]

Subclasses define the prepared rows and the sums: winograd_products.py in floats, int16_products.py in integers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from relaxlite.dtypes import DType
from relaxlite.ir.attributes import IN_PLACE, MIN_PREPARED_ROWS
from relaxlite.ir.expr import Array, Attrs, Constant
from relaxlite.ir.layout import flat_offset
from relaxlite.ir.ops.scalars import Scalar, literal
from relaxlite.ir.program import (
    Allocate,
    Buffer,
    Check,
    Compare,
    For,
    IfThenElse,
    Literal,
    Load,
    Select,
    Seq,
    Stmt,
    Store,
    TensorProgram,
    Value,
    seq,
)
from relaxlite.ir.program_visitor import ReplaceLoads, Substitute, walk_values
from relaxlite.ir.symbolic import SymExpr, SymVar, ceildiv, product, smin, substitute, sym
from relaxlite.passes.loops.constant_values import evaluate_matrix
from relaxlite.passes.loops.in_place import Pairs, in_place_pairs
from relaxlite.passes.loops.join_parallel import read_only_by_writers
from relaxlite.passes.loops.pattern import perfect_nest, top_stages
from relaxlite.passes.loops.transforms import init_accumulators, less, nest, reduce_accumulators
from relaxlite.passes.products.contraction import Contraction, Encoding
from relaxlite.passes.products.reduction import ReductionBlock
from relaxlite.records import dataclass
from relaxlite.target import Target

ROW_UNIT = 4  # the greatest unit of heights of tiles
TERMS = 6  # of a step of a sum of prepared rows: twice a pair and a single term
PERIOD = 3  # vectors after which pairs start at the same lanes again: 48 elements are 8 steps


def whole_steps(depth: int) -> int:
    """Round `depth` up to a multiple of the terms of a step."""
    return -(-depth // TERMS) * TERMS


def columns_for_pass(least: int, target: Target) -> int:
    """Return the minimum columns that pay for a pass over x: `least` where two loads issue for each FMA, else twice
    that.

    Figures: docs/measurements/cpus.md, prepared_rows.
    """
    return least * 2 // target.cpu_facts.loads_per_fma


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A product with constant weights: one stage, a reduction over x[i..., k] * w.

    The indices i... are functions of the rows' loops; w is a load of w[k, j] or dequantizes stored weights. `is_kept`:
    the stored weights are kept as they are.
    """

    stage: Stmt
    block: ReductionBlock
    x: Load
    w: Value
    is_kept: bool

    @property
    def stored(self) -> tuple[Buffer, ...]:
        """Buffers that w is loaded from."""
        return tuple(dict.fromkeys(part.buffer for part in walk_values(self.w) if isinstance(part, Load)))

    @property
    def contraction(self) -> Contraction:
        """The product, of any number of rows."""
        x, w = Encoding.of_value(self.x), Encoding.of_value(self.w)
        w = w if isinstance(self.w, Load) else Encoding("dequantized", w.bits)
        return Contraction("matmul", None, self.column.extent, self.step.extent, x, w, is_constant=True)

    @property
    def step(self) -> For:
        (loop,) = perfect_nest(self.block.stmts[1]).loops
        return loop

    def floats(self, constants: Sequence[Array], start: int, end: int) -> Array:
        """Evaluate the columns `start` to `end` of w (k, n), given the constants of the `stored` buffers."""
        depth, column = int(self.step.extent), self.column.var
        reads = [part for part in walk_values(self.w) if isinstance(part, Load)]
        of_columns = {load.buffer for load in reads if load.indices[-1:] == (column,)}
        given = zip(self.stored, constants, strict=True)
        some = {buffer: each[..., start:end] if buffer in of_columns else each for buffer, each in given}
        return evaluate_matrix(self.w, self.step.var, column, (depth, end - start), some)

    @property
    def rows(self) -> tuple[For, ...]:
        return self.block.spatial[:-1]

    @property
    def column(self) -> For:
        return self.block.spatial[-1]

    @property
    def row(self) -> SymExpr:
        """Number of the row, over all row loops."""
        return flat_offset(self.dims, (loop.var for loop in self.rows))

    @property
    def dims(self) -> tuple[SymExpr, ...]:
        return tuple(loop.extent for loop in self.rows)

    def reads_like(self, other: Product) -> bool:
        """Whether both products read the same rows of x."""
        if self.x.buffer is not other.x.buffer or self.dims != other.dims:
            return False
        var_map = {mine.var: its.var for mine, its in zip(self.rows, other.rows, strict=True)}
        mine = tuple(substitute(index, var_map) for index in self.x.indices[:-1])
        return all(a is b for a, b in zip(mine, other.x.indices[:-1], strict=True))

    def with_sum(self, reduced: Stmt, finish: Value, total: Buffer) -> Stmt:
        """Return the stage with the reduced loops `reduced`, which add to `total`; its epilogue reads `finish` as the
        sum."""
        after = ReplaceLoads(self.block.body.buffer, finish).stmt(seq(*self.block.stmts[2:]))
        body: Stmt = Allocate(total, seq(Store(total, (), literal(0, total.dtype)), reduced, after))
        return Substitute(fresh=True).stmt(nest(self.block.spatial, body))


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Results of the pass over x: prepared rows, padded to whole tiles, and a scale and a shift for each row."""

    prepared: Buffer
    scales: Buffer  # float32; infinite for a row that needs the fallback
    shifts: Buffer


@dataclass(frozen=True, slots=True, eq=False)
class RowGroup:
    """A loop over groups of as many rows as a vector has lanes: their scales are computed in one vector."""

    loop: SymVar
    member: SymVar
    lane: SymVar
    count: SymExpr  # members of the group; the last group may have fewer
    row: SymExpr  # the number of the member
    lane_row: SymExpr  # the number of the row in the lane


@dataclass(frozen=True, slots=True, eq=False)
class PreparedWeights:
    """New weights of one product: `w`, and for each column the offset subtracted from sums, and the factor of sums."""

    w: Buffer
    offset: Buffer
    width: Buffer  # float32


@dataclass(frozen=True, slots=True, eq=False)
class Products(ABC):
    """A program of products of one x with constant weights, and its rewriting to prepared rows."""

    whole: TensorProgram
    parts: tuple[Product, ...]
    lanes: int

    @property
    def x(self) -> Load:
        """The load of x in the first product."""
        return self.parts[0].x

    @property
    def stored(self) -> tuple[tuple[int, ...], ...]:
        """The positions among the inputs of the stored weights of each product."""
        return tuple(tuple(map(self.whole.inputs.index, part.stored)) for part in self.parts)

    @property
    def depth(self) -> int:
        return int(self.x.buffer.shape[-1])

    @property
    def columns(self) -> int:
        return sum(int(part.column.extent) for part in self.parts)

    @property
    def stride(self) -> int:
        """Elements from one prepared row to the next.

        Rows are padded with zeros to whole periods of `_pairs` and one more element, which `_pairs` reads, and to an
        odd number of vectors, so that neighbouring rows lie in different cache sets.
        """
        vectors = -(-self.length // (PERIOD * self.lanes)) * PERIOD + 1
        return (vectors + 1 - vectors % 2) * self.lanes

    @staticmethod
    @abstractmethod
    def convert(weights: Constant) -> tuple[Constant, ...] | str:
        """Convert a matrix to the new weights, w first; or return the reason against."""

    @abstractmethod
    def pays(self, target: Target) -> bool:
        """Whether the products together are large enough for a pass over x."""

    @property
    @abstractmethod
    def least_rows(self) -> int:
        """Minimum number of rows from which prepared rows pay."""

    @property
    @abstractmethod
    def dtype(self) -> DType:
        """Type of prepared elements and of their sums."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Elements of a prepared row before its padding."""

    @property
    @abstractmethod
    def weight_rows(self) -> int:
        """Number of rows of the new weights."""

    @abstractmethod
    def _prepare(self, rows: Rows) -> Stmt:
        """Return the pass over x that computes `rows`."""

    @abstractmethod
    def _step(self, x: Sequence[Scalar], w: Sequence[Scalar]) -> Scalar:
        """Return the terms that a step adds, from TERMS prepared elements of a row and of a column."""

    @abstractmethod
    def _finish(self, total: Scalar, offset: Scalar, shift: Scalar, scale: Scalar) -> Scalar:
        """Return a product from its sum, but for the factor of the column."""

    @abstractmethod
    def _widen(self, part: Product, weights: PreparedWeights) -> list[Stmt]:
        """Return the stages that compute the new weights from stored ones, which are kept."""

    @abstractmethod
    def _plain(self, part: Product, weights: PreparedWeights) -> Stmt:
        """Return the fallback stage of a product: the ordinary sum with the new weights."""

    def program(self) -> TensorProgram:
        """Build the new program; only its pass over x is scheduled."""
        count, name = product(self.parts[0].dims), self.x.buffer.name
        shape = (count + (ROW_UNIT - 1), sym(self.stride))  # the last tile may read beyond the last row
        rows = Rows(
            Buffer(f"{name}_prepared", shape, self.dtype),
            Buffer(f"{name}_scales", (count,), "float32"),
            Buffer(f"{name}_shifts", (count,), self.dtype),
        )
        weights = [self._weights(part) for part in self.parts]
        fast = [self._fast(part, each, rows) for part, each in zip(self.parts, weights, strict=True)]
        plain = [self._plain(part, each) for part, each in zip(self.parts, weights, strict=True)]
        largest_scale = Buffer("largest_scale", (), "float32", "local")
        max_loop = For(at := SymVar("i", lower=0), count, Store(largest_scale, (), rows.scales[at], "max"))
        measure = seq(self._prepare(rows), Store(largest_scale, (), literal(0.0, "float32")), max_loop)
        infinite = Literal(float("inf"), "float32")
        body: Stmt = seq(
            Store(largest_scale, (), infinite),
            IfThenElse(less(self.least_rows - 1, count), measure),
            IfThenElse(Compare("lt", largest_scale[()], infinite), seq(*fast), seq(*plain)),
        )
        for buffer in (largest_scale, rows.scales, rows.shifts, rows.prepared):
            body = Allocate(buffer, body)
        pairs = zip(self.parts, weights, strict=True)
        new_buffers = {part.stored[0]: each.w for part, each in pairs if not part.is_kept}
        extra_inputs = [buffer for each in weights for buffer in (each.offset, each.width)]
        inputs = (*(new_buffers.get(b, b) for b in self.whole.inputs), *extra_inputs)
        attrs = Attrs(
            {**self.whole.attrs, MIN_PREPARED_ROWS: self.least_rows, IN_PLACE: self._in_place(len(extra_inputs))}
        )
        checks = [s for s in top_stages(self.whole) if isinstance(s, Check)]
        return replace(self.whole, params=(*inputs, *self.whole.outputs), body=seq(*checks, body), attrs=attrs)

    def _fast(self, part: Product, weights: PreparedWeights, rows: Rows) -> Stmt:
        """Return the stage of a product that reads prepared rows."""
        total, row, column = replace(part.block.body.buffer, dtype=self.dtype), part.row, part.column.var
        step = SymVar("t", lower=0)
        places = [step * TERMS + n for n in range(TERMS)]
        x, w = [Scalar(rows.prepared[row, k]) for k in places], [Scalar(weights.w[k, column]) for k in places]
        reduced = For(step, sym(self.weight_rows // TERMS), Store(total, (), self._step(x, w).value, "add"))
        offset, shift, scale = (Scalar(v) for v in (weights.offset[column], rows.shifts[row], rows.scales[row]))
        result = self._finish(Scalar(total[()]), offset, shift, scale) * Scalar(weights.width[column])
        stage = part.with_sum(reduced, result.value, total)
        return Allocate(weights.w, seq(*self._widen(part, weights), stage)) if part.is_kept else stage

    def _weights(self, part: Product) -> PreparedWeights:
        old, columns = part.stored[0], part.column.extent
        name = f"{old.name}_wide" if part.is_kept else old.name
        return PreparedWeights(
            replace(old, name=name, shape=(sym(self.weight_rows), columns), dtype=self.dtype),
            Buffer(f"{old.name}_offset", (columns,), self.dtype),
            Buffer(f"{old.name}_width", (columns,), "float32"),
        )

    def _rows_of_weights(self, row: For, column: For, w: Buffer, value: Value) -> list[Stmt]:
        """Return the stages that store `value` to w for all rows and columns, and pad w with rows of zeros."""
        rest = self.weight_rows - int(row.extent)
        padding = For(SymVar("k", lower=0), sym(rest), Seq(()))
        zeros = nest((padding, column), Store(w, (padding.var + row.extent, column.var), literal(0, w.dtype)))
        stages = [nest((row, column), Store(w, (row.var, column.var), value)), *([zeros] if rest else [])]
        return [Substitute(fresh=True).stmt(stage) for stage in stages]

    def _in_place(self, more: int) -> Pairs:
        """Return the (input, output) pairs that may still share memory, with outputs `more` positions later.

        The fast branch reads x before it writes results; the fallback is as before.
        """
        whole = self.whole
        pairs = [
            (x, out + more)
            for x, out in in_place_pairs(whole)[0]
            if read_only_by_writers(top_stages(whole), whole.params[x], whole.params[out])
        ]
        return tuple(pairs)

    # of passes over x

    def _group(self) -> RowGroup:
        lanes, number = self.lanes, product(self.parts[0].dims)
        loop, member, lane = SymVar("group", lower=0), *(SymVar(name, lower=0, upper=lanes - 1) for name in "rl")
        first = loop * lanes
        return RowGroup(loop, member, lane, smin(lanes, number - first), first + member, first + lane)

    def _over_groups(
        self, group: RowGroup, rows: Rows, results: Stmt, body: Sequence[Stmt], local: Sequence[Buffer]
    ) -> Stmt:
        """Return the parallel loop over groups: `body`, then `results` for each lane that has a row.

        Rows beyond the last, which a tile may read, are zeros. `local`: buffers of one group.
        """
        lanes, number = self.lanes, product(self.parts[0].dims)
        store_results = IfThenElse(less(group.lane_row, number), results)
        group_body: Stmt = seq(*body, For(group.lane, sym(lanes), store_results, "vectorized"))
        for buffer in reversed(local):
            group_body = Allocate(buffer, group_body)
        padding = For(group.member, sym(ROW_UNIT - 1), self._zeros(rows.prepared, number + group.member, 0))
        groups = For(group.loop, ceildiv(number, lanes), group_body, "parallel")
        return Substitute(fresh=True).stmt(seq(padding, groups))

    def _element(self, row: SymExpr, place: SymExpr) -> Load:
        """Return the load of an element of x, by the number of its row."""
        at: dict[SymVar, SymExpr] = {}
        for loop in reversed(self.parts[0].rows[1:]):
            at[loop.var], row = row % loop.extent, row // loop.extent
        at[self.parts[0].rows[0].var] = row
        return replace(self.x, indices=(*(substitute(index, at) for index in self.x.indices[:-1]), place))

    def _vectors(self, prepared: Buffer, row: SymExpr, first: int, end: int, value: Callable[[SymExpr], Value]) -> Stmt:
        part, lane = SymVar("u", lower=0), SymVar("l", lower=0, upper=self.lanes - 1)
        place = (part + first) * self.lanes + lane
        store = Store(prepared, (row, place), value(place))
        return For(part, sym(end - first), For(lane, sym(self.lanes), store, "vectorized"))

    def _row(self, prepared: Buffer, row: SymExpr, value: Callable[[SymExpr], Value]) -> Stmt:
        """Return the stores of a row of prepared values, padded with zeros."""
        full, rest = divmod(self.length, self.lanes)

        def masked(place: SymExpr) -> Value:
            return Select(less(place, self.length), value(place), literal(0, self.dtype))

        last = [self._vectors(prepared, row, full, full + 1, masked)] if rest else []
        return seq(self._vectors(prepared, row, 0, full, value), *last, self._zeros(prepared, row, full + len(last)))

    def _zeros(self, prepared: Buffer, row: SymExpr, first: int) -> Stmt:
        """Return the stores of zeros to a prepared row from vector `first` on."""
        return self._vectors(prepared, row, first, self.stride // self.lanes, lambda place: literal(0, self.dtype))

    def _pairs(self, total: Store, value: Callable[[SymExpr, SymExpr], Value]) -> Stmt:
        """Return a sum over a prepared row of `value`(place modulo PERIOD vectors, place)."""
        step, part = SymVar("step", lower=0), SymVar("u", lower=0, upper=PERIOD - 1)
        lane, zero = SymVar("l", lower=0, upper=self.lanes - 1), literal(0, self.dtype)
        partial = Buffer("pairs_partial", (sym(PERIOD * self.lanes),), self.dtype, "local")
        own = part * self.lanes + lane
        store = Store(partial, (own,), value(own, step * (PERIOD * self.lanes) + own), "add")
        body = For(part, sym(PERIOD), For(lane, sym(self.lanes), store, "vectorized"), "unrolled")
        steps = For(step, sym(-(-self.length // (PERIOD * self.lanes))), body)
        return Allocate(
            partial,
            seq(
                init_accumulators(partial, zero, self.lanes),
                steps,
                reduce_accumulators(total, partial, PERIOD, self.lanes),
            ),
        )
