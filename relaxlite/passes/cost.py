"""Lower bounds on the cost of a tensor program: FLOPs, and bytes of compulsory memory traffic, as symbolic expressions.

    for i, j: { e[]; e = 0; for k: e += a[i, k] * b[k, j]; c[i, j] = e }
    flops = 2*m*k*n      bytes_read = 4*(m*k + k*n)      bytes_written = 4*m*n

The model applies to programs before scheduling. A schedule changes neither the result nor the compulsory traffic: each
element of a parameter once, without workspaces and without outputs that are read again. An algorithm with fewer
operations, such as Winograd convolution, can be faster than this cost suggests.

Where no size is 0, the expressions are upper bounds of the work of the program, exact for affine loops without
branches. Both branches of a Select count, as vector code computes both, and the more expensive branch of an IfThenElse.
An access touches at most its buffer. A gather reads one element per index, or the whole table where that is less. A
loop whose extent depends on data and has no bound counts as one iteration; `is_bound` is then false.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from functools import lru_cache, reduce

from relaxlite import dtypes
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.module import IRModule
from relaxlite.ir.op_costs import flops_of, value_flops
from relaxlite.ir.program import (
    Allocate,
    Binary,
    Buffer,
    For,
    IfThenElse,
    IndexValue,
    LetIndex,
    Literal,
    Load,
    Seq,
    Stmt,
    Store,
    TensorProgram,
    Value,
)
from relaxlite.ir.program_cache import ProgramCache
from relaxlite.ir.program_visitor import stmt_children, stmt_values, walk_values
from relaxlite.ir.simplify import num_extrema
from relaxlite.ir.symbolic import (
    BinaryAtom,
    Extremum,
    FloorDiv,
    FloorMod,
    Min,
    SymExpr,
    SymVar,
    ceildiv,
    floordiv,
    product,
    smax,
    smin,
    sym,
)
from relaxlite.records import dataclass

_ZERO, _ONE = sym(0), sym(1)
_MAX_EXTREMA = 2  # per proof; each extremum may double the cases of the proof


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one run of a program in its symbols: FLOPs, bytes of inputs read, bytes of outputs written."""

    flops: SymExpr
    bytes_read: SymExpr
    bytes_written: SymExpr
    is_bound: bool = True  # False: a loop whose extent depends on data counts as one iteration

    @property
    def parts(self) -> tuple[SymExpr, SymExpr, SymExpr, bool]:
        """All fields as a tuple, for the program cache."""
        return self.flops, self.bytes_read, self.bytes_written, self.is_bound


def estimate_costs(module: IRModule, cache: ProgramCache | None = None) -> dict[str, Cost]:
    """Compute the cost of each program of a module, by program name."""
    get_or_compute = (cache or ProgramCache()).get_or_compute

    def cost(program: TensorProgram) -> Cost:
        return Cost(*get_or_compute("cost", program, "", lambda: cost_of(program).parts))

    return {name: cost(program) for name, program in module.programs().items()}


def cost_of(program: TensorProgram) -> Cost:
    """Compute the cost of one run of a program."""
    counter = _CostCounter(program)
    flops = counter.flops(program.body, counter.outermost) + counter.hoisted_flops
    return Cost(
        flops=flops,
        bytes_read=_total(counter.bytes_touched(b) for b in program.inputs if b in counter.read),
        bytes_written=_total(counter.bytes_touched(b, written=True) for b in program.params if b in counter.written),
        is_bound=counter.is_bound,
    )


def _total(values: Iterable[SymExpr]) -> SymExpr:
    return sum(values, _ZERO)


# Ranges of index expressions over the enclosing loops


@dataclass(frozen=True, slots=True)
class _Range:
    """Bounds low <= expression <= high in terms of the program's symbols alone."""

    low: SymExpr
    high: SymExpr

    @property
    def is_fixed(self) -> bool:
        return self.low is self.high


@dataclass(frozen=True, slots=True)
class _Scope:
    """Symbols and loops that enclose a statement.

    The statement runs only if the extents of the enclosing loops are at least 1.
    """

    sizes: frozenset[SymExpr]  # dimensions of buffers: at least 0
    running: frozenset[SymExpr] = frozenset()  # extents of the enclosing loops
    extents: Mapping[SymVar, SymExpr] = field(default_factory=dict)  # by loop variable, in the program's symbols alone
    data: Mapping[SymVar, frozenset[SymVar]] = field(default_factory=dict)  # LetIndex variable -> loops it depends on

    @property
    def analyzer(self) -> Analyzer:
        return _analyzer_with(self.sizes, self.running)

    def inside(self, var: SymVar, extent: SymExpr) -> _Scope:
        running = self.running if extent.is_const else self.running | {extent}
        return replace(self, running=running, extents={**self.extents, var: extent})

    def loops_of(self, expr: SymExpr) -> frozenset[SymVar]:
        """The loops on which an expression depends, also through values loaded from memory."""
        loops = [self.data.get(v, frozenset((v,)) if v in self.extents else frozenset()) for v in expr.free_vars()]
        return frozenset().union(*loops)

    def range_of(self, expr: SymExpr) -> _Range | None:
        """Bound an expression by the ranges of the loops; None if unknown."""
        low = high = sym(expr.const)
        for monomial, coef in expr.terms:
            factor = self._product(monomial)
            if factor is None:
                return None
            first, last = (factor.low, factor.high) if coef > 0 else (factor.high, factor.low)
            low, high = low + first * coef, high + last * coef
        return _Range(low, high)

    def _product(self, atoms: tuple[SymExpr, ...]) -> _Range | None:
        ranges = [self._atom(atom) for atom in atoms]
        known = [r for r in ranges if r is not None]
        if len(known) < len(ranges):
            return None
        signed = [r for r in known if not self.is_nonneg(r.low)]
        unsigned = known if len(signed) > 1 else [r for r in known if r not in signed]
        if signed and not all(r.is_fixed for r in unsigned):
            return None
        return _Range(product(r.low for r in known), product(r.high for r in known))

    def _atom(self, atom: SymExpr) -> _Range | None:
        if not any(v in self.extents or v in self.data for v in atom.free_vars()):
            return _Range(atom, atom)
        if isinstance(atom, SymVar):
            return _Range(_ZERO, self.extents[atom] - 1) if atom in self.extents else None
        assert isinstance(atom, BinaryAtom)
        a, b = self.range_of(atom.a), self.range_of(atom.b)
        if isinstance(atom, Extremum):
            if a is None or b is None:
                return None
            pick = self.minimum if isinstance(atom, Min) else self.maximum
            return _Range(pick(a.low, b.low), pick(a.high, b.high))
        if b is None or not b.is_fixed or not self.is_nonneg(b.low - 1):
            return None
        if isinstance(atom, FloorMod):
            if a is None or not self.is_nonneg(a.low):
                return _Range(_ZERO, b.low - 1)
            return _Range(_ZERO, self.minimum(a.high, b.low - 1))
        assert isinstance(atom, FloorDiv)
        return None if a is None else _Range(a.low // b.low, a.high // b.low)

    def minimum(self, *values: SymExpr) -> SymExpr:
        return reduce(lambda a, b: smin(a, b) if (smaller := self._proven_minimum(a, b)) is None else smaller, values)

    def maximum(self, *values: SymExpr) -> SymExpr:
        return reduce(
            lambda a, b: smax(a, b) if (smaller := self._proven_minimum(a, b)) is None else a + b - smaller, values
        )

    def _proven_minimum(self, a: SymExpr, b: SymExpr) -> SymExpr | None:
        """The operand that is provably no greater than the other; None if neither is."""
        if a is b or self.is_nonneg(b - a):
            return a
        return b if self.is_nonneg(a - b) else None

    def is_nonneg(self, expr: SymExpr) -> bool:
        """Whether expr >= 0 is proven. Expressions of many extrema are not tried, as a looser bound suffices."""
        if expr.is_const:
            return expr.const >= 0
        return num_extrema(expr) <= _MAX_EXTREMA and self.analyzer.can_prove_nonneg(expr)

    def count(self, loops: Iterable[SymVar]) -> SymExpr:
        """Upper bound of the number of iterations of the innermost of these loops."""
        return product(self.extents[v] for v in self.extents if v in set(loops))


@lru_cache(maxsize=128)
def _analyzer_with(sizes: frozenset[SymExpr], running: frozenset[SymExpr]) -> Analyzer:
    """An analyzer that assumes sizes >= 0 and extents of enclosing loops >= 1."""
    if running:
        analyzer, lower, exprs = _analyzer_with(sizes, frozenset()), 1, running
    else:
        analyzer, lower, exprs = Analyzer(), 0, sizes
    for expr in sorted(exprs, key=lambda e: e.key):
        if not analyzer.can_prove_le(lower, expr):
            analyzer = analyzer.assume_le(lower, expr)
    return analyzer


# Footprints of accesses


@dataclass(frozen=True, slots=True)
class _Footprint:
    """Elements that one access touches in its loops: at most `count`, inside `box`, one range per dimension."""

    count: SymExpr
    box: tuple[_Range, ...]


def _footprint(access: Load | Store, scope: _Scope, outermost: _Scope) -> _Footprint:
    """Compute the footprint of an access.

    Dimensions indexed by the same loops touch at most as many elements together as these loops have iterations.
    """
    groups: list[tuple[frozenset[SymVar], SymExpr]] = []
    box = []
    for dim, index in zip(access.buffer.shape, access.indices, strict=True):
        loops, bounds = scope.loops_of(index), scope.range_of(index)
        if bounds is None:
            bounds = _Range(_ZERO, dim - 1)
        else:  # accesses outside of the buffer are guarded by a branch or a shorter last iteration
            bounds = _Range(scope.maximum(_ZERO, bounds.low), scope.minimum(bounds.high, dim - 1))
        box.append(bounds)
        if not loops:
            continue
        count = outermost.maximum(_ZERO, scope.minimum(bounds.high - bounds.low + 1, scope.count(loops)))
        dependent = [group for group in groups if group[0] & loops]
        groups = [group for group in groups if not group[0] & loops]
        if dependent:
            loops = loops.union(*(group[0] for group in dependent))
            count = scope.minimum(product((count, *(group[1] for group in dependent))), scope.count(loops))
        groups.append((loops, count))
    return _Footprint(product(count for _, count in groups), tuple(box))


def _union(buffer: Buffer, footprints: list[_Footprint], outermost: _Scope) -> SymExpr:
    """Bound the elements that several accesses touch together by their sum, their bounding box and the buffer size.

    An access in a branch may not run: its footprint then only widens the box.
    """
    distinct = list({(footprint.count, footprint.box): footprint for footprint in footprints}.values())
    if len(distinct) == 1:
        return distinct[0].count
    minimum, maximum = outermost.minimum, outermost.maximum
    size = product(buffer.shape)
    if any(footprint.count is size for footprint in distinct):
        return size
    sides = zip(*(footprint.box for footprint in distinct), strict=True)
    box = product(maximum(*(r.high for r in side)) - minimum(*(r.low for r in side)) + 1 for side in sides)
    return minimum(size, box, _total(footprint.count for footprint in distinct))


class _CostCounter:
    """Visitor that sums FLOPs and collects the footprints of accesses to parameters."""

    def __init__(self, program: TensorProgram) -> None:
        self._params = set(program.params)
        dims = {dim for buffer in program.params for dim in buffer.shape if not dim.is_const}
        self.outermost = _Scope(frozenset(dims))
        self.read: dict[Buffer, list[_Footprint]] = {}
        self.written: dict[Buffer, list[_Footprint]] = {}
        self.is_bound = True
        self.hoisted_flops = _ZERO  # FLOPs of loop-invariant factors of reductions

    def bytes_touched(self, buffer: Buffer, *, written: bool = False) -> SymExpr:
        """Bytes of a buffer that all reads, or all writes, touch."""
        parts = (self.written if written else self.read)[buffer]
        return _union(buffer, parts, self.outermost) * dtypes.itemsize(buffer.dtype)

    def flops(self, stmt: Stmt, scope: _Scope) -> SymExpr:
        values = stmt_values(stmt)
        for value in values:
            self._accesses(value, scope)
        flops = sym(value_flops(*values))
        if isinstance(stmt, Store):
            self._add_footprint(self.written, stmt, scope)
            if stmt.combine is not None:
                flops = sym(value_flops(*self._without_hoisted(stmt.value, scope)))
            combines = stmt.combine is not None and stmt.buffer.dtype != "bool"
            return flops + (flops_of(stmt.combine or "add") if combines else 0)
        if isinstance(stmt, For):
            return self._loop(stmt, scope)
        if isinstance(stmt, Seq):
            return _total(self.flops(s, scope) for s in stmt.stmts)
        if isinstance(stmt, Allocate):
            return self.flops(stmt.body, scope)
        if isinstance(stmt, LetIndex):
            roots = self._loops_of_value(stmt.value, scope)
            return flops + self.flops(stmt.body, replace(scope, data={**scope.data, stmt.var: roots}))
        if isinstance(stmt, IfThenElse):
            return flops + scope.maximum(*(self.flops(s, scope) for s in stmt_children(stmt)))
        return flops

    def _without_hoisted(self, value: Value, scope: _Scope) -> tuple[Value, ...]:
        """Split loop-invariant factors, such as a dequantized weight, off the value of a reduction.

        Their FLOPs count once per iteration of the loops on which the factor depends.
        """
        factors = (value.a, value.b) if isinstance(value, Binary) and value.op == "mul" else ()
        remaining = []
        for factor in factors:
            loops, flops = self._loops_of_value(factor, scope), value_flops(factor)
            if flops and loops < scope.extents.keys():
                self.hoisted_flops += scope.count(loops) * flops
            else:
                remaining.append(factor)
        if len(remaining) == len(factors):
            return (value,)
        leaf = Literal(1, value.dtype)
        return (Binary("mul", leaf, leaf), *remaining)

    def _loop(self, loop: For, scope: _Scope) -> SymExpr:
        times = scope.range_of(loop.extent)
        if times is None:
            self.is_bound = False
            times = _Range(_ONE, _ONE)
        is_known = all(v not in scope.data for v in loop.extent.free_vars()) and not times.is_fixed
        extent = loop.extent if is_known else times.high
        if not scope.is_nonneg(times.low):
            extent = smax(extent, 0)
        inside = scope.inside(loop.var, times.high)
        return self._sum_over(loop.var, extent, self.flops(loop.body, inside), inside)

    def _sum_over(self, var: SymVar, extent: SymExpr, body: SymExpr, scope: _Scope) -> SymExpr:
        """Sum `body` over var in range(extent).

        The sum is exact where `body` is quadratic in var (triangular loops) or linear in the length of tiles with a
        shorter last one; else the maximum of `body` times the extent.
        """
        if var not in body.free_vars():
            return body * extent
        body, tiles = _without_tiles(body, var, extent)
        if tiles is not None:
            return self._sum_over(var, extent, body, scope) + tiles
        powers = _quadratic(body, var)
        if powers is None:
            times, bounds = scope.range_of(extent), scope.range_of(body)
            if times is None or bounds is None:
                self.is_bound = False
                return _ONE
            return times.high * bounds.high
        constant, linear, square = powers
        first = floordiv(extent * (extent - 1), 2)
        second = floordiv(extent * (extent - 1) * (extent * 2 - 1), 6)
        return constant * extent + linear * first + square * second

    def _accesses(self, value: Value, scope: _Scope) -> None:
        for part in walk_values(value):
            if isinstance(part, Load):
                self._add_footprint(self.read, part, scope)

    def _add_footprint(self, footprints: dict[Buffer, list[_Footprint]], access: Load | Store, scope: _Scope) -> None:
        if access.buffer in self._params:
            footprints.setdefault(access.buffer, []).append(_footprint(access, scope, self.outermost))

    def _loops_of_value(self, value: Value, scope: _Scope) -> frozenset[SymVar]:
        """The loops on which a value depends.

        These are all enclosing loops where the value loads a buffer that the program writes.
        """
        loops: frozenset[SymVar] = frozenset()
        for part in walk_values(value):
            if isinstance(part, Load):
                if part.buffer not in self._params or part.buffer in self.written:
                    return frozenset(scope.extents)
                loops = loops.union(*map(scope.loops_of, part.indices))
            elif isinstance(part, IndexValue):
                loops |= scope.loops_of(part.index)
        return loops


def _without_tiles(body: SymExpr, var: SymVar, extent: SymExpr) -> tuple[SymExpr, SymExpr | None]:
    """Split terms of tile lengths min(c, e - c*var) off `body`.

    Returns the remaining terms, and the sum of the split terms over var in range(ceildiv(e, c)), a multiple of e; None
    where `body` has no such term.
    """
    rest, tiles = body, None
    for monomial, coef in body.terms:
        atoms = [atom for atom in monomial if isinstance(atom, Min) and var in atom.free_vars()]
        factors = [atom for atom in monomial if atom not in atoms]
        if len(atoms) != 1 or any(var in atom.free_vars() for atom in factors):
            continue
        whole = _tiled(atoms[0], var, extent)
        if whole is not None:
            rest = rest - product(monomial) * coef
            tiles = (tiles or _ZERO) + product(factors) * whole * coef
    return rest, tiles


def _tiled(atom: Min, var: SymVar, extent: SymExpr) -> SymExpr | None:
    """The total length e, where the atom is min(c, e - c*var) for a constant c > 0 and the extent is ceildiv(e, c)."""
    for size, remainder in ((atom.a, atom.b), (atom.b, atom.a)):
        whole = remainder + var * size
        if size.is_const and size.const > 0 and var not in whole.free_vars() and extent is ceildiv(whole, size):
            return whole
    return None


def _quadratic(expr: SymExpr, var: SymVar) -> tuple[SymExpr, SymExpr, SymExpr] | None:
    """Coefficients (a, b, c) with expr == a + b*var + c*var*var; None if there are none."""
    powers = [_ZERO, _ZERO, _ZERO]
    powers[0] += expr.const
    for monomial, coef in expr.terms:
        factors = [atom for atom in monomial if atom is not var]
        degree = len(monomial) - len(factors)
        if degree > 2 or any(var in atom.free_vars() for atom in factors):
            return None
        powers[degree] += product(factors) * coef
    return powers[0], powers[1], powers[2]
