"""Prologues: operands that are converted to float32 as they are loaded: dequantized or half-precision weights.

    for k: e += x[i, k] * (float32(q[k, j]) * scale[k // 32, j])

An operand that is more than a load has a *prologue*. There are two ways to generate its code:

**Streamed**, for few rows: every vector of the operand is converted once, in registers, for all rows of a tile. A scale
that is constant for some steps is factored out of their sum and multiplied once, where the registers hold a second set
of sums; values that are constant for some steps, as zero points, are computed before these. Steps that share an element
of memory (eight 4-bit codes in an int32) are unrolled, so that it is loaded once.

**Staged**, for many rows, where the prologue is more than a conversion: the first row block streams the operand and
also stores it to a panel of float32 in the cache, which the other row blocks read (register_tile.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from relaxlite import dtypes
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.ops.scalars import identity
from relaxlite.ir.program import Allocate, Binary, Buffer, Cast, For, IndexValue, Load, Seq, Stmt, Store, Value, seq
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, value_children, walk_values
from relaxlite.ir.symbolic import FloorDiv, SymExpr, SymVar, as_int, sym
from relaxlite.passes.loops.pattern import perfect_nest
from relaxlite.passes.loops.transforms import GuardLoads, nest, when_positive
from relaxlite.passes.products.panel_prefetch import Prefetcher
from relaxlite.records import dataclass

ENOUGH_SUMS = 8  # vectors of independent sums that hide the latency of their additions
UNROLLED_SUMS = 20  # maximum vectors of sums where such steps are unrolled: with more, registers spill
MAX_SHARED = 8  # maximum steps that are unrolled as they share an element of memory


@dataclass(frozen=True, slots=True)
class Prologue:
    """The prologue of an operand of for k: e += other * (inner * scale), where `other` does not depend on the
    column."""

    loop: For
    other: Value
    operand: Value
    inner: Value
    scale: Value | None
    group: int  # steps for which `scale`, and values inside `inner`, may be constant; 0: all
    shared: int  # steps that read one element of some buffer

    @property
    def period(self) -> int:
        """Number of steps of which splits of the loop should be multiples."""
        return math.lcm(max(self.group, 1), self.shared)

    @property
    def is_cheap(self) -> bool:
        """Whether the prologue is one conversion, which the FMAs of a full tile hide."""
        return not self.group and isinstance(self.inner, Cast) and isinstance(self.inner.x, Load)


def find_prologue(update: Stmt, column: SymVar, row: SymVar | None) -> Prologue | None:
    """Find the prologue of the operand that depends on the column; None: a plain load, or no such sum."""
    loops, store = perfect_nest(update).loops, perfect_nest(update).body
    if len(loops) != 1 or not isinstance(store, Store) or store.combine != "add":
        return None
    if not dtypes.is_float(store.buffer.dtype):
        return None
    product, loop = store.value, loops[0]
    if not isinstance(product, Binary) or product.op != "mul":
        return None
    for other, operand in ((product.a, product.b), (product.b, product.a)):
        if isinstance(operand, Load) or not _depends_on(operand, column) or _depends_on(other, column):
            continue
        if row is not None and _depends_on(operand, row):
            continue
        group = _group(operand, loop.var)
        inner, scale = _split_scale(operand, loop.var, group)
        return Prologue(loop, other, operand, inner, scale, group, shared_steps(operand, loop.var))
    return None


def symbols_of(value: Value) -> set[SymVar]:
    """Return the symbols in the indices of a value."""
    symbols: set[SymVar] = set()
    for part in walk_values(value):
        indices = part.indices if isinstance(part, Load) else (part.index,) if isinstance(part, IndexValue) else ()
        symbols.update(v for index in indices for v in index.free_vars())
    return symbols


def _depends_on(value: Value, var: SymVar) -> bool:
    return var in symbols_of(value)


def _divisors(value: Value, var: SymVar) -> list[int]:
    """Return the constants c of indices var // c in a value."""
    result = []
    for load in walk_values(value):
        for index in load.indices if isinstance(load, Load) else ():
            atoms = [atom for monomial, _ in index.terms for atom in monomial]
            steps = [as_int(a.b) for a in atoms if isinstance(a, FloorDiv) and a.a is var]
            result += [c for c in steps if c is not None and c > 1]
    return result


def shared_steps(value: Value, var: SymVar) -> int:
    """Return how many steps, at most MAX_SHARED, read the same element of some buffer."""
    return max((c for c in _divisors(value, var) if c <= MAX_SHARED), default=1)


def _group(value: Value, var: SymVar) -> int:
    """Return the most steps, above MAX_SHARED, that read the same element of some buffer; 0: none."""
    return max((c for c in _divisors(value, var) if c > MAX_SHARED), default=0)


def _is_constant(value: Value, var: SymVar, group: int) -> bool:
    """Whether the value is constant in each aligned run of `group` steps; 0: in all steps."""
    if not group:
        return not _depends_on(value, var)
    step = SymVar("t", lower=0, upper=group - 1)
    return not _depends_on(_SimplifiedSubstitute({var: SymVar("g", lower=0) * group + step}).value(value), step)


class _SimplifiedSubstitute(Substitute):
    def index(self, expr: SymExpr) -> SymExpr:
        return Analyzer().simplify(super().index(expr))


def _split_scale(operand: Value, var: SymVar, group: int) -> tuple[Value, Value | None]:
    """Return (inner, scale) with operand == inner * scale and a scale constant in a group; scale None: there is
    none."""
    if isinstance(operand, Binary) and operand.op == "mul":
        for inner, scale in ((operand.a, operand.b), (operand.b, operand.a)):
            if _is_constant(scale, var, group):
                return inner, scale
    return operand, None


@dataclass(frozen=True, slots=True)
class Stream:
    """Parameters of the streamed code of a tile, for a processor with `registers` vector registers."""

    registers: int
    column: SymVar
    row: SymVar | None
    period: int = 1
    enough_sums: int = ENOUGH_SUMS
    panel: Buffer | None = (
        None  # [steps, columns of a tile]: where the converted operand is stored, for other row blocks
    )

    def sums(
        self,
        element: Buffer,
        init: Store,
        update: Stmt,
        loops: tuple[For, For, For],
        at: dict[SymVar, SymExpr],
        guard: Value | None,
        requests: Prefetcher | None = None,
    ) -> tuple[Allocate, Load]:
        """Return the sums of a tile over the reduced loop `update`, and the load of one of them in the tile's loops.

        `at`: values of column and row in the tile's loops. `guard` masks columns. `requests`: emits prefetches.
        """
        prologue = find_prologue(update, self.column, self.row)
        assert prologue is not None
        if self.panel is not None:  # the whole operand, and all steps alike
            prologue = replace(prologue, inner=prologue.operand, scale=None, group=0)
        return _StreamedTile(self, prologue, element, init, loops, at, guard, requests).code()


@dataclass(frozen=True, slots=True)
class _StreamedTile:
    """The streamed code of one tile."""

    stream: Stream
    prologue: Prologue
    element: Buffer
    init: Store
    loops: tuple[For, For, For]
    at: dict[SymVar, SymExpr]
    guard: Value | None
    requests: Prefetcher | None

    @property
    def _counts(self) -> tuple[int, int]:
        """Vectors of sums in a tile, and vectors in a row of the tile."""
        rows, vectors = (as_int(loop.extent) or 1 for loop in self.loops[:2])
        return rows * vectors, vectors

    @property
    def _copies(self) -> int:
        """Interleaved partial sums of each element, which hide the latency of additions."""
        vectors, _ = self._counts
        return max(1, self.stream.enough_sums // vectors)

    @property
    def _is_single(self) -> bool:
        """Whether each element is one sum, in the order of staged code, so that results do not depend on the rows."""
        return self.stream.enough_sums == 1

    def code(self) -> tuple[Allocate, Load]:
        prologue, (count, wide) = self.prologue, self._counts
        shape = tuple(loop.extent for loop in self.loops)
        total = Buffer(self.element.name, shape, self.element.dtype, "local")
        part = Buffer(f"{self.element.name}_part", (sym(self._copies), *shape), self.element.dtype, "local")
        place = tuple(loop.var for loop in self.loops)
        sum_of_part: Value = Load(part, (sym(0), *place))
        by_group = prologue.group > 0 and (1 + self._copies) * count + wide + 2 <= self.stream.registers
        factored = not self._is_single and prologue.scale is not None and (by_group or not prologue.group)
        if factored and prologue.scale is not None:
            sum_of_part = Binary("mul", sum_of_part, self._guarded(prologue.scale))
        operand = prologue.inner if factored else prologue.operand
        if factored and prologue.group:
            begin = self._for_elements(Store(total, place, self.init.value))
            body = self._groups(part, operand, Store(total, place, sum_of_part, "add"))
        else:
            begin = Seq(())
            body = seq(self._clear(part), self._groups(part, operand), self._fold(part))
            body = seq(body, self._for_elements(Store(total, place, sum_of_part)))
        return Allocate(total, seq(begin, Allocate(part, body))), Load(total, place)

    def _clear(self, part: Buffer) -> Stmt:
        place, copy = tuple(loop.var for loop in self.loops), SymVar("s", lower=0)
        clear = Store(part, (copy, *place), identity("add", part.dtype))
        return For(copy, part.shape[0], self._for_elements(clear), "unrolled")

    def _fold(self, part: Buffer) -> Stmt:
        """Add the partial sums of each element to the first."""
        place, copy = tuple(loop.var for loop in self.loops), SymVar("s", lower=0)
        add = Store(part, (sym(0), *place), Load(part, (copy + 1, *place)), "add")
        return For(copy, part.shape[0] - 1, self._for_elements(add), "unrolled")

    def _groups(self, part: Buffer, operand: Value, after: Store | None = None) -> Stmt:
        """Return all steps, group by group; `after` folds the sums of a group, which then start from zero."""
        prologue = self.prologue
        if not prologue.group:
            return self._steps(part, operand, sym(0), prologue.loop.extent)

        def group(start: SymExpr, count: SymExpr) -> Stmt:
            steps = self._steps(part, operand, start, count)
            if after is not None:
                end = self._for_elements(after, {prologue.loop.var: start})
                steps = seq(self._clear(part), steps, self._fold(part), end)
            return Substitute(fresh=True).stmt(steps)

        number, size = SymVar("group", lower=0), sym(prologue.group)
        whole, rest = prologue.loop.extent // size, prologue.loop.extent % size
        main = For(number, whole, group(number * size, size))
        return seq(*when_positive(whole, main), *when_positive(rest, group(whole * size, rest)))

    def _steps(self, part: Buffer, operand: Value, start: SymExpr, count: SymExpr) -> Stmt:
        """Return `count` steps from `start` on, within one group if there are groups."""
        prologue, (vectors, wide) = self.prologue, self._counts
        used = vectors * (1 + self._copies if prologue.group else self._copies) + wide
        operand, constants = self._hoist_constants(operand, (self.stream.registers - used - 1) // wide)
        shared = prologue.shared if vectors <= UNROLLED_SUMS else 1
        width, step = max(shared, self._copies), SymVar(prologue.loop.var.name, lower=0)
        inner, rest = SymVar("t", lower=0, upper=width - 1), SymVar("t", lower=0, upper=width - 1)
        present = start + step * width + inner
        prefetches = () if self.requests is None else self.requests.asked(prologue.loop, present)
        first = seq(*prefetches, self._step(part, operand, present, inner % self._copies))
        main = For(step, count // width, For(inner, sym(width), first, "unrolled"))
        last = For(rest, count % width, self._step(part, operand, start + count // width * width + rest, sym(0)))
        steps = seq(*when_positive(count // width, main), *when_positive(count % width, last))
        load_constants = seq(
            *(
                self._for_elements(Store(b, self._across, v), {prologue.loop.var: start}, wide=True)
                for b, v in constants
            )
        )
        steps = seq(load_constants, Substitute(fresh=True).stmt(steps))
        for buffer, _ in constants:
            steps = Allocate(buffer, steps)
        return steps

    @property
    def _across(self) -> tuple[SymExpr, ...]:
        return tuple(loop.var for loop in self.loops[1:])

    def _hoist_constants(self, operand: Value, room: int) -> tuple[Value, list[tuple[Buffer, Value]]]:
        """Hoist up to `room` values that are constant for the steps out of an operand, into registers."""
        hoisted: dict[int, tuple[Buffer, Value]] = {}
        for value in _constant_parts(operand, self.prologue.loop.var, self.prologue.group):
            if len(hoisted) < room and value.dtype not in ("bool",):
                shape = tuple(loop.extent for loop in self.loops[1:])
                hoisted[id(value)] = Buffer("kept", shape, value.dtype, "local"), self._guarded(value)
        replacements = {key: Load(buffer, self._across) for key, (buffer, _) in hoisted.items()}
        return Replacement(replacements).value(operand), list(hoisted.values())

    def _step(self, part: Buffer, operand: Value, k: SymExpr, copy: SymExpr) -> Stmt:
        """Return a step: convert the operand's vectors and add their products."""
        vector = Buffer("wide", tuple(loop.extent for loop in self.loops[1:]), operand.dtype, "local")
        place = (copy, *(loop.var for loop in self.loops))
        convert = self._for_elements(
            Store(vector, self._across, self._guarded(operand)), {self.prologue.loop.var: k}, wide=True
        )
        product = Binary("mul", self._at(self.prologue.other), Load(vector, self._across))
        add = self._for_elements(Store(part, place, product, "add"), {self.prologue.loop.var: k})
        return Allocate(vector, seq(convert, self._store_to_panel(vector, k), add))

    def _store_to_panel(self, vector: Buffer, k: SymExpr) -> Stmt:
        """Store the operand's vectors to the panel, if there is one."""
        if self.stream.panel is None:
            return Seq(())
        part, lane = self._across
        place = (k, part * self.loops[2].extent + lane)
        return self._for_elements(Store(self.stream.panel, place, Load(vector, self._across)), wide=True)

    def _for_elements(self, store: Store, at: dict[SymVar, SymExpr] | None = None, *, wide: bool = False) -> Stmt:
        """Return the loops that run a store for every element of a tile, or of one row of it (`wide`)."""
        body = nest(self.loops[1:] if wide else self.loops, store)
        return Substitute(at or {}, fresh=True).stmt(body)

    def _at(self, value: Value) -> Value:
        return Substitute(self.at).value(value)

    def _guarded(self, value: Value) -> Value:
        value = self._at(value)
        return (
            value
            if self.guard is None
            else GuardLoads(self.guard, set(loop.var for loop in self.loops[1:])).value(value)
        )


@lru_cache(maxsize=256)  # called alike for every height of a tile and every group of steps
def _constant_parts(value: Value, var: SymVar, group: int) -> tuple[Value, ...]:
    """Return the largest parts of a value that contain a load and are constant for a group of steps."""
    if _is_constant(value, var, group):
        return (value,) if any(isinstance(v, Load) for v in walk_values(value)) else ()
    return tuple(result for child in value_children(value) for result in _constant_parts(child, var, group))


class Replacement(ProgramRewriter):
    """Replaces values, identified by their ids, by other values."""

    def __init__(self, instead: Mapping[int, Value]) -> None:
        super().__init__()
        self._instead = instead

    def _value(self, value: Value) -> Value:
        return self._instead.get(id(value)) or super()._value(value)
