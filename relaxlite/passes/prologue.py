"""Operands that are widened on their way into a sum of products: dequantized or half-precision weights.

    for k: e += x[i, k] * (float32(q[k, j]) * scale[k // 32, j])

An operand that is more than a load is a *prologue*. Two kinds of code take it in:

**Streamed**, for few rows: every vector of the operand is made once, in registers, for all rows of a tile, as its bytes
come in. A scale that stays for some steps is taken out of their sum, which is then multiplied by it once, where the
registers hold a second set of sums; values that stay, as zero points, are made before the steps. Steps that share an
element of memory (the eight numbers of a word of 4-bit numbers) are unrolled, so that it is loaded once.

**Staged**, for many rows: the columns of a tile are made once for all rows, into a panel of float32 in the cache, and
the tiles run over that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from relaxlite import dtypes
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.ops.scalars import identity
from relaxlite.ir.program import Allocate, Binary, Buffer, For, IndexValue, Load, Seq, Stmt, Store, Value, seq
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, value_children, walk_values
from relaxlite.ir.symbolic import FloorDiv, SymExpr, SymVar, as_int, sym
from relaxlite.passes.loop_pattern import perfect_nest
from relaxlite.passes.schedule import GuardLoads, nest, when_positive

UNROLLED = 4  # steps at least whose operands are made together
MOST_SHARED = 8  # steps that are unrolled as they share an element of memory


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
        return Prologue(loop, other, operand, inner, scale, group, _shared(operand, loop.var))
    return None


def _symbols(value: Value) -> set[SymVar]:
    found: set[SymVar] = set()
    for part in walk_values(value):
        indices = part.indices if isinstance(part, Load) else (part.index,) if isinstance(part, IndexValue) else ()
        found.update(v for index in indices for v in index.free_vars())
    return found


def _moves(value: Value, var: SymVar) -> bool:
    return var in _symbols(value)


def _divisors(value: Value, var: SymVar) -> list[int]:
    """The constants c of indices var // c."""
    found = []
    for load in walk_values(value):
        for index in load.indices if isinstance(load, Load) else ():
            atoms = [atom for monomial, _ in index.terms for atom in monomial]
            steps = [as_int(a.b) for a in atoms if isinstance(a, FloorDiv) and a.a is var]
            found += [c for c in steps if c is not None and c > 1]
    return found


def _shared(value: Value, var: SymVar) -> int:
    return max((c for c in _divisors(value, var) if c <= MOST_SHARED), default=1)


def _group(value: Value, var: SymVar) -> int:
    """Beyond what is unrolled anyway, the steps along which the slowest load stays."""
    return max((c for c in _divisors(value, var) if c > MOST_SHARED), default=0)


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
    period: int

    def sums(
        self,
        element: Buffer,
        init: Store,
        update: Stmt,
        loops: tuple[For, For, For],
        at: dict[SymVar, SymExpr],
        guard: Value | None,
    ) -> tuple[Allocate, Load]:
        """The sums of a tile by the reduced loop `update`, and one of them in the tile's loops. `at` says what column
        and row are in these; `guard` masks columns."""
        found = find_prologue(update, self.column, self.row)
        assert found is not None
        return _StreamedTile(self, found, element, init, loops, at, guard).code()


@dataclass(frozen=True, slots=True)
class _StreamedTile:
    stream: Stream
    found: Prologue
    element: Buffer
    init: Store
    loops: tuple[For, For, For]
    at: dict[SymVar, SymExpr]
    guard: Value | None

    @property
    def _counts(self) -> tuple[int, int]:
        """Vectors of sums, and vectors side by side."""
        rows, vectors = (as_int(loop.extent) or 1 for loop in self.loops[:2])
        return rows * vectors, vectors

    def _local(self, name: str, loops: Sequence[For]) -> Buffer:
        return Buffer(name, tuple(loop.extent for loop in loops), self.element.dtype, "local")

    def code(self) -> tuple[Allocate, Load]:
        found, (count, wide) = self.found, self._counts
        total = self._local(self.element.name, self.loops)
        place = tuple(loop.var for loop in self.loops)
        begin = Store(total, place, self.init.value)
        factored = found.scale is not None and (not found.group or 2 * count + wide + 2 <= self.stream.registers)
        if not factored:
            body = self._groups(total, found.operand)
            return Allocate(total, seq(self._each(begin), body)), Load(total, place)
        assert found.scale is not None
        scale = self._guarded(found.scale)
        if not found.group:
            scaled = Store(total, place, Binary("mul", Load(total, place), scale))
            body = seq(self._groups(total, found.inner), self._each(scaled))
            return Allocate(total, seq(self._each(begin), body)), Load(total, place)
        part = self._local(f"{self.element.name}_part", self.loops)
        clear = self._each(Store(part, place, identity("add", part.dtype)))
        body = self._groups(
            part, found.inner, clear, Store(total, place, Binary("mul", Load(part, place), scale), "add")
        )
        return Allocate(total, seq(self._each(begin), Allocate(part, body))), Load(total, place)

    def _groups(self, sums: Buffer, operand: Value, before: Stmt | None = None, after: Store | None = None) -> Stmt:
        """All steps, group by group."""
        found = self.found
        if not found.group:
            return self._steps(sums, operand, sym(0), found.loop.extent)

        def group(start: SymExpr, count: SymExpr) -> Stmt:
            steps = self._steps(sums, operand, start, count)
            begin = Seq(()) if before is None else before
            end = Seq(()) if after is None else self._each(after, {found.loop.var: start})
            return Substitute(fresh=True).stmt(seq(begin, steps, end))

        number, size = SymVar("group", lower=0), sym(found.group)
        whole, rest = found.loop.extent // size, found.loop.extent % size
        main = For(number, whole, group(number * size, size))
        last = group(whole * size, rest)
        return seq(*when_positive(whole, main), *when_positive(rest, last))

    def _steps(self, sums: Buffer, operand: Value, start: SymExpr, count: SymExpr) -> Stmt:
        """`count` steps from `start` on, within one group if there are groups."""
        found, (vectors, wide) = self.found, self._counts
        used = vectors * (1 if sums.name == self.element.name else 2) + wide
        operand, kept = self._kept(operand, (self.stream.registers - used - 1) // wide)
        width, step = found.shared, SymVar(found.loop.var.name, lower=0)
        if width == 1:
            steps: Stmt = For(step, count, self._step(sums, operand, start + step))
        else:
            inner = SymVar("t", lower=0, upper=width - 1)
            unrolled = For(inner, sym(width), self._step(sums, operand, start + step * width + inner), "unrolled")
            rest = For(inner, count % width, self._step(sums, operand, start + count // width * width + inner))
            main = For(step, count // width, unrolled)
            steps = seq(*when_positive(count // width, main), *when_positive(count % width, rest))
        made = Substitute({found.loop.var: start}, fresh=True).stmt(
            seq(*(self._each(Store(b, self._across, v), wide=True) for b, v in kept), Seq(()))
        )
        steps = seq(made, Substitute(fresh=True).stmt(steps))
        for buffer, _ in kept:
            steps = Allocate(buffer, steps)
        return steps

    @property
    def _across(self) -> tuple[SymExpr, ...]:
        return tuple(loop.var for loop in self.loops[1:])

    def _kept(self, operand: Value, room: int) -> tuple[Value, list[tuple[Buffer, Value]]]:
        """The operand with values that stay for the steps read from registers, as many as there is room for."""
        found: dict[int, tuple[Buffer, Value]] = {}
        for value in _staying(operand, self.found.loop.var, self.found.group):
            if len(found) < room and value.dtype not in ("bool",):
                shape = tuple(loop.extent for loop in self.loops[1:])
                found[id(value)] = Buffer("kept", shape, value.dtype, "local"), self._guarded(value)
        instead = {key: Load(buffer, self._across) for key, (buffer, _) in found.items()}
        return Instead(instead).value(operand), list(found.values())

    def _step(self, sums: Buffer, operand: Value, k: SymExpr) -> Stmt:
        """Makes the operand's vectors and adds the products."""
        vector = Buffer("wide", tuple(loop.extent for loop in self.loops[1:]), operand.dtype, "local")
        place = tuple(loop.var for loop in self.loops)
        make = self._each(Store(vector, self._across, self._guarded(operand)), {self.found.loop.var: k}, wide=True)
        product = Binary("mul", self._at(self.found.other), Load(vector, self._across))
        add = self._each(Store(sums, place, product, "add"), {self.found.loop.var: k})
        return Allocate(vector, seq(make, add))

    def _each(self, store: Store, at: dict[SymVar, SymExpr] | None = None, *, wide: bool = False) -> Stmt:
        """The store for every element of a tile, or of its columns (`wide`)."""
        body = nest(self.loops[1:] if wide else self.loops, store)
        return Substitute(at or {}, fresh=True).stmt(body)

    def _at(self, value: Value) -> Value:
        return Substitute(self.at).value(value)

    def _guarded(self, value: Value) -> Value:
        value = self._at(value)
        return value if self.guard is None else GuardLoads(self.guard, set(self._across)).value(value)


def _staying(value: Value, var: SymVar, group: int) -> list[Value]:
    """The largest parts of a value that load something and stay the same for a group of steps."""
    if _stays(value, var, group):
        return [value] if any(isinstance(v, Load) for v in walk_values(value)) else []
    return [found for child in value_children(value) for found in _staying(child, var, group)]


class Instead(ProgramRewriter):
    """Loads in place of values, which are named by their ids."""

    def __init__(self, instead: dict[int, Load]) -> None:
        super().__init__()
        self._instead = instead

    def _value(self, value: Value) -> Value:
        return self._instead.get(id(value)) or super()._value(value)


def fill(
    found: Prologue,
    operand: Value,
    loop: For,
    panel: Buffer,
    at: dict[SymVar, SymExpr],
    loops: tuple[For, For],
    guard: Value | None,
) -> Stmt:
    """panel[k, column] = operand, for k of `loop` and the columns of `loops`, over vectors and lanes; `at` says which
    column that is."""
    part, lane = loops
    value = Substitute(at).value(operand)
    if guard is not None:
        value = GuardLoads(guard, {part.var, lane.var}).value(value)

    def store(k: SymExpr) -> Stmt:
        body = nest(loops, Store(panel, (k, part.var * lane.extent + lane.var), value))
        return Substitute({loop.var: k}, fresh=True).stmt(body)

    extent, width = loop.extent, max(found.shared, UNROLLED)
    outer, inner, rest = SymVar(f"{loop.var.name}o", lower=0), SymVar("t", lower=0, upper=width - 1), SymVar("rest", lower=0)
    main = For(outer, extent // width, For(inner, sym(width), store(outer * width + inner), "unrolled"))
    last = For(rest, extent % width, store(extent // width * width + rest))
    return seq(*when_positive(extent // width, main), *when_positive(extent % width, last))
