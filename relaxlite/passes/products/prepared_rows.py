"""Programs that multiply one matrix by constant weights in two ways: by prepared rows of it, or as they did.

    for i: { scale[i], shift[i], prepared[i, :] = ... of x[i, :] }               one pass over x
    if all rows have a scale:
        for i, j: { e = ... prepared[i, t], w[t, j];  out[i, j] = f(... e, scale[i], shift[i], offset[j], width[j]) }
    else:
        for i, j: { e = sum of x[i, k] * w[k, j];  out[i, j] = f(e * width[j]) }

Weights that are stored in few bits stay so, and the second way is what it was. The first has a stage before it, which
makes w, for the schedule to make it panel by panel (winograd_widened.py):

        for k, j: w[k, j] = widened(q[k, j]) / width[j]

What is prepared and summed is said by winograd_loops.py, in floats, and int16_loops.py, in integers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from relaxlite.dtypes import DType
from relaxlite.ir.attributes import IN_PLACE, MIN_PREPARED_ROWS
from relaxlite.ir.expr import Array, Attrs
from relaxlite.ir.layout import flat_offset
from relaxlite.ir.ops.scalars import literal
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
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, walk_values
from relaxlite.ir.symbolic import SymExpr, SymVar, ceildiv, product, smin, substitute, sym
from relaxlite.passes.loops.constant_values import evaluate_matrix
from relaxlite.passes.loops.in_place import Pairs, in_place_pairs
from relaxlite.passes.loops.join_parallel import read_only_by_writers
from relaxlite.passes.loops.pattern import perfect_nest, top_stages
from relaxlite.passes.loops.transforms import init_accumulators, less, nest, reduce_accumulators
from relaxlite.passes.products.reduction import Block
from relaxlite.records import dataclass
from relaxlite.target import Target

ROW_UNIT = 4  # the greatest of which heights of tiles are multiples
PERIOD = 3  # vectors after which pairs begin at the same lanes again: 48 elements are 8 steps


def columns_for_pass(least: int, target: Target) -> int:
    """Over how many columns a pass over x has to be spread: `least` where two loads issue for each FMA, twice as many
    where products take half the time (docs/measurements/cpus.md, prepared_rows)."""
    return least * 2 // target.cpu_facts.loads_per_fma


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """One stage: block of a reduction over x[i..., k] * w, where i... are functions of the rows' loops, and w is a load
    of w[k, j], or what widens weights that are stored in fewer bits. `is_kept`: what is stored stays as it is."""

    stage: Stmt
    block: Block
    x: Load
    w: Value
    is_kept: bool

    @property
    def stored(self) -> tuple[Buffer, ...]:
        """What w is read from."""
        return tuple(dict.fromkeys(part.buffer for part in walk_values(self.w) if isinstance(part, Load)))

    @property
    def step(self) -> For:
        (loop,) = perfect_nest(self.block.stmts[1]).loops
        return loop

    def floats(self, constants: Sequence[Array], start: int, end: int) -> Array:
        """The columns of w (k, n) from `start` to `end`, where these constants are what is stored."""
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

    def with_sum(self, reduced: Stmt, finish: Value, total: Buffer) -> Stmt:
        """The stage with other reduced loops, which add to `total`, and `finish` for its sum in what follows."""
        after = _Finish(self.block.body.buffer, finish).stmt(seq(*self.block.stmts[2:]))
        body: Stmt = Allocate(total, seq(Store(total, (), literal(0, total.dtype)), reduced, after))
        return Substitute(fresh=True).stmt(nest(self.block.spatial, body))


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What the pass over x makes: rows of elements up to whole tiles, and a scale and what is added for each row."""

    prepared: Buffer
    scales: Buffer  # float32; infinite for a row that takes the ordinary way
    shifts: Buffer


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """As many rows as a vector has lanes, whose scales are computed side by side, in a loop over groups."""

    loop: SymVar
    member: SymVar
    lane: SymVar
    count: SymExpr  # of its members: in the last group there may be less
    row: SymExpr  # the number of the member
    lane_row: SymExpr  # that of the lane


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Of one product: what is read in place of w, and of its columns what is taken off a sum and multiplied by."""

    w: Buffer
    offset: Buffer
    width: Buffer  # float32


@dataclass(frozen=True, slots=True, eq=False)
class Products(ABC):
    """A program of nothing else, of one x."""

    whole: TensorProgram
    parts: tuple[Product, ...]
    lanes: int

    @property
    def x(self) -> Load:
        """An element of a row, at the loops of the first part."""
        return self.parts[0].x

    @property
    def stored(self) -> tuple[tuple[int, ...], ...]:
        """Which inputs the weights of each part are."""
        return tuple(tuple(map(self.whole.inputs.index, part.stored)) for part in self.parts)

    @property
    def depth(self) -> int:
        return int(self.x.buffer.shape[-1])

    @property
    def columns(self) -> int:
        return sum(int(part.column.extent) for part in self.parts)

    @property
    def stride(self) -> int:
        """From one prepared row to the next: zeros up to whole periods of `_pairs` and one more element, which that
        reads, and an odd number of vectors, for rows side by side to lie in other sets of the cache."""
        vectors = -(-self.length // (PERIOD * self.lanes)) * PERIOD + 1
        return (vectors + 1 - vectors % 2) * self.lanes

    @property
    @abstractmethod
    def least_rows(self) -> int:
        """From how many rows on this is faster."""

    @property
    @abstractmethod
    def dtype(self) -> DType:
        """Of prepared elements and of what is summed."""

    @property
    @abstractmethod
    def length(self) -> int:
        """How many elements of a prepared row stand for elements of x; zeros follow."""

    @property
    @abstractmethod
    def weight_rows(self) -> int:
        """How many rows the matrix has that is read in place of w."""

    @abstractmethod
    def _prepare(self, rows: Rows) -> Stmt:
        """The pass over x."""

    @abstractmethod
    def _fast(self, part: Product, weights: Weights, rows: Rows) -> Stmt:
        """The stage out of prepared rows."""

    @abstractmethod
    def _plain(self, part: Product, weights: Weights) -> Stmt:
        """The stage as it was, but for where weights come from."""

    def program(self) -> TensorProgram:
        """Still to be scheduled, but for the pass over x."""
        count, name = product(self.parts[0].dims), self.x.buffer.name
        shape = (count + (ROW_UNIT - 1), sym(self.stride))  # the last tile reads up to so many rows more
        rows = Rows(
            Buffer(f"{name}_prepared", shape, self.dtype),
            Buffer(f"{name}_scales", (count,), "float32"),
            Buffer(f"{name}_shifts", (count,), self.dtype),
        )
        weights = [self._weights(part) for part in self.parts]
        fast = [self._fast(part, each, rows) for part, each in zip(self.parts, weights, strict=True)]
        plain = [self._plain(part, each) for part, each in zip(self.parts, weights, strict=True)]
        worst = Buffer("largest_scale", (), "float32", "local")
        largest = For(at := SymVar("i", lower=0), count, Store(worst, (), rows.scales[at], "max"))
        look = seq(self._prepare(rows), Store(worst, (), literal(0.0, "float32")), largest)
        infinite = Literal(float("inf"), "float32")
        body: Stmt = seq(
            Store(worst, (), infinite),
            IfThenElse(less(self.least_rows - 1, count), look),
            IfThenElse(Compare("lt", worst[()], infinite), seq(*fast), seq(*plain)),
        )
        for buffer in (worst, rows.scales, rows.shifts, rows.prepared):
            body = Allocate(buffer, body)
        pairs = zip(self.parts, weights, strict=True)
        replaced = {part.stored[0]: each.w for part, each in pairs if not part.is_kept}
        beside = [buffer for each in weights for buffer in (each.offset, each.width)]
        inputs = (*(replaced.get(b, b) for b in self.whole.inputs), *beside)
        attrs = Attrs({**self.whole.attrs, MIN_PREPARED_ROWS: self.least_rows, IN_PLACE: self._in_place(len(beside))})
        checks = [s for s in top_stages(self.whole) if isinstance(s, Check)]
        return replace(self.whole, params=(*inputs, *self.whole.outputs), body=seq(*checks, body), attrs=attrs)

    def _weights(self, part: Product) -> Weights:
        old, columns = part.stored[0], part.column.extent
        name = f"{old.name}_wide" if part.is_kept else old.name
        return Weights(
            replace(old, name=name, shape=(sym(self.weight_rows), columns), dtype=self.dtype),
            Buffer(f"{old.name}_offset", (columns,), self.dtype),
            Buffer(f"{old.name}_width", (columns,), "float32"),
        )

    def _rows_of_weights(self, row: For, column: For, w: Buffer, value: Value) -> list[Stmt]:
        """Stages that make w of `value` in these rows and columns, and of zeros behind the last row."""
        rest = self.weight_rows - int(row.extent)
        beyond = For(SymVar("k", lower=0), sym(rest), Seq(()))
        zeros = nest((beyond, column), Store(w, (beyond.var + row.extent, column.var), literal(0, w.dtype)))
        stages = [nest((row, column), Store(w, (row.var, column.var), value)), *([zeros] if rest else [])]
        return [Substitute(fresh=True).stmt(stage) for stage in stages]

    def _in_place(self, more: int) -> Pairs:
        """Which operands the results may still take over, behind so many more inputs: x is read before results are
        written, or as ever."""
        whole = self.whole
        pairs = [
            (x, out + more)
            for x, out in in_place_pairs(whole)[0]
            if read_only_by_writers(top_stages(whole), whole.params[x], whole.params[out])
        ]
        return tuple(pairs)

    # of passes over x

    def _group(self) -> Group:
        lanes, number = self.lanes, product(self.parts[0].dims)
        loop, member, lane = SymVar("group", lower=0), *(SymVar(name, lower=0, upper=lanes - 1) for name in "rl")
        first = loop * lanes
        return Group(loop, member, lane, smin(lanes, number - first), first + member, first + lane)

    def _over_groups(
        self, group: Group, rows: Rows, results: Stmt, body: Sequence[Stmt], local: Sequence[Buffer]
    ) -> Stmt:
        """`body` for each group, then `results` for each of its lanes that is a row, in one parallel loop. The rows
        beyond the last, which a tile may read, are zeros."""
        lanes, number = self.lanes, product(self.parts[0].dims)
        kept = IfThenElse(less(group.lane_row, number), results)
        each: Stmt = seq(*body, For(group.lane, sym(lanes), kept, "vectorized"))
        for buffer in reversed(local):
            each = Allocate(buffer, each)
        beyond = For(group.member, sym(ROW_UNIT - 1), self._zeros(rows.prepared, number + group.member, 0))
        groups = For(group.loop, ceildiv(number, lanes), each, "parallel")
        return Substitute(fresh=True).stmt(seq(beyond, groups))

    def _element(self, row: SymExpr, place: SymExpr) -> Load:
        """Of a row of x by its number."""
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
        """A row of prepared values, then zeros."""
        full, rest = divmod(self.length, self.lanes)

        def masked(place: SymExpr) -> Value:
            return Select(less(place, self.length), value(place), literal(0, self.dtype))

        last = [self._vectors(prepared, row, full, full + 1, masked)] if rest else []
        return seq(self._vectors(prepared, row, 0, full, value), *last, self._zeros(prepared, row, full + len(last)))

    def _zeros(self, prepared: Buffer, row: SymExpr, first: int) -> Stmt:
        """Of a row from vector `first` on."""
        return self._vectors(prepared, row, first, self.stride // self.lanes, lambda place: literal(0, self.dtype))

    def _pairs(self, total: Store, value: Callable[[SymExpr, SymExpr], Value]) -> Stmt:
        """A sum over a prepared row: `value` of a place among PERIOD vectors, and of the place in the row."""
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


class _Finish(ProgramRewriter):
    """What reads the sum reads a function of another one."""

    def __init__(self, total: Buffer, finish: Value) -> None:
        super().__init__()
        self._total, self._finish = total, finish

    def _value(self, value: Value) -> Value:
        return self._finish if isinstance(value, Load) and value.buffer is self._total else super()._value(value)


class Elsewhere(ProgramRewriter):
    """One load as another."""

    def __init__(self, old: Load, new: Load) -> None:
        super().__init__()
        self._old, self._new = old, new

    def _value(self, value: Value) -> Value:
        return self._new if value is self._old else super()._value(value)
