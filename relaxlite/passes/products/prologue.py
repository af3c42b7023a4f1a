"""Operands that are widened on their way into a sum of products: dequantized or half-precision weights.

    for k: e += x[i, k] * (float32(q[k, j]) * scale[k // 32, j])

An operand that is more than a load is a *prologue*. Two kinds of code take it in:

**Streamed**, for few rows: every vector of the operand is made once, in registers, for all rows of a tile, as its bytes
come in. A scale that stays for some steps is taken out of their sum, which is then multiplied by it once, where the
registers hold a second set of sums; values that stay, as zero points, are made before the steps. Steps that share an
element of memory (the eight numbers of a word of 4-bit numbers) are unrolled, so that it is loaded once.

**Staged**, for many rows, where more than a conversion is to be done: the first block of rows does the same and also
stores what it makes to a panel of float32 in the cache, which the other blocks read (register_tile.py).
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
UNROLLED_SUMS = 20  # vectors of sums at most where those steps are unrolled: with more, registers run out
MAX_SHARED = 8  # steps that are unrolled as they share an element of memory


@dataclass(frozen=True, slots=True)
class Prologue:
    """for k: e += other * (inner * scale), where `other` does not move along the column."""

    loop: For
    other: Value
    operand: Value
    inner: Value
    scale: Value | None
    group: int  # steps along which `scale`, and values inside of `inner`, may stay; 0: all
    shared: int  # steps that read one element of some buffer

    @property
    def period(self) -> int:
        """Where the steps are split, it is best at multiples of this."""
        return math.lcm(max(self.group, 1), self.shared)

    @property
    def is_cheap(self) -> bool:
        """Whether one conversion is all that each step needs: the products of a full tile hide it."""
        return not self.group and isinstance(self.inner, Cast) and isinstance(self.inner.x, Load)


def find_prologue(update: Stmt, column: SymVar, row: SymVar | None) -> Prologue | None:
    """The prologue of the operand that moves along the column; None: it is a plain load, or there is no such sum."""
    loops, store = perfect_nest(update).loops, perfect_nest(update).body
    if len(loops) != 1 or not isinstance(store, Store) or store.combine != "add":
        return None
    if not dtypes.is_float(store.buffer.dtype):
        return None
    product, loop = store.value, loops[0]
    if not isinstance(product, Binary) or product.op != "mul":
        return None
    for other, operand in ((product.a, product.b), (product.b, product.a)):
        if isinstance(operand, Load) or not _moves(operand, column) or _moves(other, column):
            continue
        if row is not None and _moves(operand, row):
            continue
        group = _group(operand, loop.var)
        inner, scale = _taken_apart(operand, loop.var, group)
        return Prologue(loop, other, operand, inner, scale, group, shared_steps(operand, loop.var))
    return None


def symbols_of(value: Value) -> set[SymVar]:
    """The symbols that the value's indices depend on."""
    symbols: set[SymVar] = set()
    for part in walk_values(value):
        indices = part.indices if isinstance(part, Load) else (part.index,) if isinstance(part, IndexValue) else ()
        symbols.update(v for index in indices for v in index.free_vars())
    return symbols


def _moves(value: Value, var: SymVar) -> bool:
    return var in symbols_of(value)


def _divisors(value: Value, var: SymVar) -> list[int]:
    """The constants c of indices var // c."""
    result = []
    for load in walk_values(value):
        for index in load.indices if isinstance(load, Load) else ():
            atoms = [atom for monomial, _ in index.terms for atom in monomial]
            steps = [as_int(a.b) for a in atoms if isinstance(a, FloorDiv) and a.a is var]
            result += [c for c in steps if c is not None and c > 1]
    return result


def shared_steps(value: Value, var: SymVar) -> int:
    """How many steps, few enough to be unrolled, read one element of some buffer."""
    return max((c for c in _divisors(value, var) if c <= MAX_SHARED), default=1)


def _group(value: Value, var: SymVar) -> int:
    """Beyond what is unrolled anyway, the steps along which the slowest load stays."""
    return max((c for c in _divisors(value, var) if c > MAX_SHARED), default=0)


def _stays(value: Value, var: SymVar, group: int) -> bool:
    """Whether the value is the same in each run of `group` steps from a multiple of it on; 0: in all steps."""
    if not group:
        return not _moves(value, var)
    step = SymVar("t", lower=0, upper=group - 1)
    return not _moves(_Simplified({var: SymVar("g", lower=0) * group + step}).value(value), step)


class _Simplified(Substitute):
    def index(self, expr: SymExpr) -> SymExpr:
        return Analyzer().simplify(super().index(expr))


def _taken_apart(operand: Value, var: SymVar, group: int) -> tuple[Value, Value | None]:
    """(inner, scale) with operand == inner * scale, where the scale stays."""
    if isinstance(operand, Binary) and operand.op == "mul":
        for inner, scale in ((operand.a, operand.b), (operand.b, operand.a)):
            if _stays(scale, var, group):
                return inner, scale
    return operand, None


@dataclass(frozen=True, slots=True)
class Stream:
    """The streamed code of a tile, for a processor of so many vector registers."""

    registers: int
    column: SymVar
    row: SymVar | None
    period: int = 1
    enough_sums: int = ENOUGH_SUMS
    panel: Buffer | None = None  # [steps, columns of a tile]: where the operand is kept as well, for other rows

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
        """The sums of a tile by the reduced loop `update`, and one of them in the tile's loops. `at` says what column
        and row are in these; `guard` masks columns; `requests`: what the steps ask for."""
        prologue = find_prologue(update, self.column, self.row)
        assert prologue is not None
        if self.panel is not None:  # the whole operand, and all steps alike
            prologue = replace(prologue, inner=prologue.operand, scale=None, group=0)
        return _StreamedTile(self, prologue, element, init, loops, at, guard, requests).code()


@dataclass(frozen=True, slots=True)
class _StreamedTile:
    stream: Stream
    found: Prologue
    element: Buffer
    init: Store
    loops: tuple[For, For, For]
    at: dict[SymVar, SymExpr]
    guard: Value | None
    requests: Prefetcher | None

    @property
    def _counts(self) -> tuple[int, int]:
        """Vectors of sums, and vectors side by side."""
        rows, vectors = (as_int(loop.extent) or 1 for loop in self.loops[:2])
        return rows * vectors, vectors

    @property
    def _copies(self) -> int:
        """How many sums each element has, of every so many steps, for the latency of the additions."""
        vectors, _ = self._counts
        return max(1, self.stream.enough_sums // vectors)

    @property
    def _is_single(self) -> bool:
        """Whether each element is one sum of what a panel would hold, as for more rows than a tile has."""
        return self.stream.enough_sums == 1

    def code(self) -> tuple[Allocate, Load]:
        result, (count, wide) = self.found, self._counts
        shape = tuple(loop.extent for loop in self.loops)
        total = Buffer(self.element.name, shape, self.element.dtype, "local")
        part = Buffer(f"{self.element.name}_part", (sym(self._copies), *shape), self.element.dtype, "local")
        place = tuple(loop.var for loop in self.loops)
        sum_of_part: Value = Load(part, (sym(0), *place))
        by_group = result.group > 0 and (1 + self._copies) * count + wide + 2 <= self.stream.registers
        factored = not self._is_single and result.scale is not None and (by_group or not result.group)
        if factored and result.scale is not None:
            sum_of_part = Binary("mul", sum_of_part, self._guarded(result.scale))
        operand = result.inner if factored else result.operand
        if factored and result.group:
            begin = self._each(Store(total, place, self.init.value))
            body = self._groups(part, operand, Store(total, place, sum_of_part, "add"))
        else:
            begin = Seq(())
            body = seq(self._clear(part), self._groups(part, operand), self._fold(part))
            body = seq(body, self._each(Store(total, place, sum_of_part)))
        return Allocate(total, seq(begin, Allocate(part, body))), Load(total, place)

    def _clear(self, part: Buffer) -> Stmt:
        place, copy = tuple(loop.var for loop in self.loops), SymVar("s", lower=0)
        clear = Store(part, (copy, *place), identity("add", part.dtype))
        return For(copy, part.shape[0], self._each(clear), "unrolled")

    def _fold(self, part: Buffer) -> Stmt:
        """The copies of each sum added to the first."""
        place, copy = tuple(loop.var for loop in self.loops), SymVar("s", lower=0)
        add = Store(part, (sym(0), *place), Load(part, (copy + 1, *place)), "add")
        return For(copy, part.shape[0] - 1, self._each(add), "unrolled")

    def _groups(self, part: Buffer, operand: Value, after: Store | None = None) -> Stmt:
        """All steps, group by group; each begins with sums of nothing if something comes after it."""
        result = self.found
        if not result.group:
            return self._steps(part, operand, sym(0), result.loop.extent)

        def group(start: SymExpr, count: SymExpr) -> Stmt:
            steps = self._steps(part, operand, start, count)
            if after is not None:
                end = self._each(after, {result.loop.var: start})
                steps = seq(self._clear(part), steps, self._fold(part), end)
            return Substitute(fresh=True).stmt(steps)

        number, size = SymVar("group", lower=0), sym(result.group)
        whole, rest = result.loop.extent // size, result.loop.extent % size
        main = For(number, whole, group(number * size, size))
        return seq(*when_positive(whole, main), *when_positive(rest, group(whole * size, rest)))

    def _steps(self, part: Buffer, operand: Value, start: SymExpr, count: SymExpr) -> Stmt:
        """`count` steps from `start` on, within one group if there are groups."""
        found, (vectors, wide) = self.found, self._counts
        used = vectors * (1 + self._copies if found.group else self._copies) + wide
        operand, kept = self._kept(operand, (self.stream.registers - used - 1) // wide)
        shared = found.shared if vectors <= UNROLLED_SUMS else 1
        width, step = max(shared, self._copies), SymVar(found.loop.var.name, lower=0)
        inner, rest = SymVar("t", lower=0, upper=width - 1), SymVar("t", lower=0, upper=width - 1)
        present = start + step * width + inner
        asked = () if self.requests is None else self.requests.asked(found.loop, present)
        first = seq(*asked, self._step(part, operand, present, inner % self._copies))
        main = For(step, count // width, For(inner, sym(width), first, "unrolled"))
        last = For(rest, count % width, self._step(part, operand, start + count // width * width + rest, sym(0)))
        steps = seq(*when_positive(count // width, main), *when_positive(count % width, last))
        result = seq(*(self._each(Store(b, self._across, v), {found.loop.var: start}, wide=True) for b, v in kept))
        steps = seq(result, Substitute(fresh=True).stmt(steps))
        for buffer, _ in kept:
            steps = Allocate(buffer, steps)
        return steps

    @property
    def _across(self) -> tuple[SymExpr, ...]:
        return tuple(loop.var for loop in self.loops[1:])

    def _kept(self, operand: Value, room: int) -> tuple[Value, list[tuple[Buffer, Value]]]:
        """The operand with values that stay for the steps read from registers, as many as there is room for."""
        result: dict[int, tuple[Buffer, Value]] = {}
        for value in _staying(operand, self.found.loop.var, self.found.group):
            if len(result) < room and value.dtype not in ("bool",):
                shape = tuple(loop.extent for loop in self.loops[1:])
                result[id(value)] = Buffer("kept", shape, value.dtype, "local"), self._guarded(value)
        instead = {key: Load(buffer, self._across) for key, (buffer, _) in result.items()}
        return Replacement(instead).value(operand), list(result.values())

    def _step(self, part: Buffer, operand: Value, k: SymExpr, copy: SymExpr) -> Stmt:
        """Makes the operand's vectors and adds the products."""
        vector = Buffer("wide", tuple(loop.extent for loop in self.loops[1:]), operand.dtype, "local")
        place = (copy, *(loop.var for loop in self.loops))
        make = self._each(Store(vector, self._across, self._guarded(operand)), {self.found.loop.var: k}, wide=True)
        product = Binary("mul", self._at(self.found.other), Load(vector, self._across))
        add = self._each(Store(part, place, product, "add"), {self.found.loop.var: k})
        return Allocate(vector, seq(make, self._keep(vector, k), add))

    def _keep(self, vector: Buffer, k: SymExpr) -> Stmt:
        """The operand's vectors into the panel."""
        if self.stream.panel is None:
            return Seq(())
        part, lane = self._across
        place = (k, part * self.loops[2].extent + lane)
        return self._each(Store(self.stream.panel, place, Load(vector, self._across)), wide=True)

    def _each(self, store: Store, at: dict[SymVar, SymExpr] | None = None, *, wide: bool = False) -> Stmt:
        """The store for every element of a tile, or of its columns (`wide`)."""
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


@lru_cache(maxsize=256)  # every height of a tile and every group of steps asks for the same
def _staying(value: Value, var: SymVar, group: int) -> tuple[Value, ...]:
    """The largest parts of a value that load something and stay the same for a group of steps."""
    if _stays(value, var, group):
        return (value,) if any(isinstance(v, Load) for v in walk_values(value)) else ()
    return tuple(result for child in value_children(value) for result in _staying(child, var, group))


class Replacement(ProgramRewriter):
    """Other values in place of values, which are named by their ids."""

    def __init__(self, instead: Mapping[int, Value]) -> None:
        super().__init__()
        self._instead = instead

    def _value(self, value: Value) -> Value:
        return self._instead.get(id(value)) or super()._value(value)
