"""What a tensor program costs at least: arithmetic, and bytes that must move, as symbolic expressions of its symbols.

    for i, j: { e[]; e = 0; for k: e += a[i, k] * b[k, j]; c[i, j] = e }
    flops = 2*m*k*n      bytes_read = 4*(m*k + k*n)      bytes_written = 4*m*n

Meant for programs as they are before they are scheduled: a schedule changes neither the result nor the traffic that no
cache can save (each element of a parameter once; not that of workspaces, nor of outputs that are read again). One that
finds a way with fewer operations, as Winograd's for convolutions, is faster than this work seems to allow.

Where no size is 0 they are upper bounds of what the program does, exact for affine loops without branches: both
branches of a Select are counted (vector code computes both) and the dearer one of an IfThenElse; no access touches
more than its buffer; a gather reads one element per index, or the whole table where that is less. A loop whose extent
nobody can bound, as it is data, counts as one iteration, and the cost says so (`is_bound`).
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
_MAX_EXTREMA = 2  # in a question; each may double the cases that a proof has to look at


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one run of a program, in its symbols: operations, bytes of inputs read, bytes of outputs written."""

    flops: SymExpr
    bytes_read: SymExpr
    bytes_written: SymExpr
    is_bound: bool = True  # False: a loop whose extent is data counts as one iteration

    @property
    def parts(self) -> tuple[SymExpr, SymExpr, SymExpr, bool]:
        return self.flops, self.bytes_read, self.bytes_written, self.is_bound


def estimate_costs(module: IRModule, cache: ProgramCache | None = None) -> dict[str, Cost]:
    """What each program of the module costs."""
    get_or_compute = (cache or ProgramCache()).get_or_compute

    def cost(program: TensorProgram) -> Cost:
        return Cost(*get_or_compute("cost", program, "", lambda: cost_of(program).parts))

    return {name: cost(program) for name, program in module.programs().items()}


def cost_of(program: TensorProgram) -> Cost:
    """What one run of the program costs."""
    result = _Walk(program)
    flops = result.flops(program.body, result.anywhere) + result.shared
    return Cost(
        flops=flops,
        bytes_read=_total(result.touched(b) for b in program.inputs if b in result.read),
        bytes_written=_total(result.touched(b, written=True) for b in program.params if b in result.written),
        is_bound=result.is_bound,
    )


def _total(values: Iterable[SymExpr]) -> SymExpr:
    return sum(values, _ZERO)


# Ranges: what values indices take while the loops run


@dataclass(frozen=True, slots=True)
class _Range:
    """low <= expression <= high, in terms of the program's symbols alone."""

    low: SymExpr
    high: SymExpr

    @property
    def is_fixed(self) -> bool:
        return self.low is self.high


@dataclass(frozen=True, slots=True)
class _Scope:
    """What is bound where a statement stands. It runs only if the loops round it do: their extents are at least 1."""

    sizes: frozenset[SymExpr]  # dimensions of buffers: at least 0
    running: frozenset[SymExpr] = frozenset()  # extents of the loops round it
    extents: Mapping[SymVar, SymExpr] = field(default_factory=dict)  # of loops, in the program's symbols alone
    data: Mapping[SymVar, frozenset[SymVar]] = field(default_factory=dict)  # LetIndex -> the loops that it depends on

    @property
    def analyzer(self) -> Analyzer:
        return _knowing(self.sizes, self.running)

    def inside(self, var: SymVar, extent: SymExpr) -> _Scope:
        running = self.running if extent.is_const else self.running | {extent}
        return replace(self, running=running, extents={**self.extents, var: extent})

    def roots(self, expr: SymExpr) -> frozenset[SymVar]:
        """The loops on which the expression depends, also through data."""
        result = [self.data.get(v, frozenset((v,)) if v in self.extents else frozenset()) for v in expr.free_vars()]
        return frozenset().union(*result)

    def range_of(self, expr: SymExpr) -> _Range | None:
        """None: not known."""
        low = high = sym(expr.const)
        for monomial, coef in expr.terms:
            part = self._product(monomial)
            if part is None:
                return None
            first, last = (part.low, part.high) if coef > 0 else (part.high, part.low)
            low, high = low + first * coef, high + last * coef
        return _Range(low, high)

    def _product(self, atoms: tuple[SymExpr, ...]) -> _Range | None:
        ranges = [self._atom(atom) for atom in atoms]
        known = [r for r in ranges if r is not None]
        if len(known) < len(ranges):
            return None
        signed = [r for r in known if not self.is_nonneg(r.low)]
        others = known if len(signed) > 1 else [r for r in known if r not in signed]
        if signed and not all(r.is_fixed for r in others):
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
            pick = self.least if isinstance(atom, Min) else self.greatest
            return _Range(pick(a.low, b.low), pick(a.high, b.high))
        if b is None or not b.is_fixed or not self.is_nonneg(b.low - 1):
            return None
        if isinstance(atom, FloorMod):
            if a is None or not self.is_nonneg(a.low):
                return _Range(_ZERO, b.low - 1)
            return _Range(_ZERO, self.least(a.high, b.low - 1))
        assert isinstance(atom, FloorDiv)
        return None if a is None else _Range(a.low // b.low, a.high // b.low)

    def least(self, *values: SymExpr) -> SymExpr:
        return reduce(lambda a, b: smin(a, b) if (result := self._lesser(a, b)) is None else result, values)

    def greatest(self, *values: SymExpr) -> SymExpr:
        return reduce(lambda a, b: smax(a, b) if (result := self._lesser(a, b)) is None else a + b - result, values)

    def _lesser(self, a: SymExpr, b: SymExpr) -> SymExpr | None:
        """The one that is proven to be no greater than the other."""
        if a is b or self.is_nonneg(b - a):
            return a
        return b if self.is_nonneg(a - b) else None

    def is_nonneg(self, expr: SymExpr) -> bool:
        """Whether it is proven that expr >= 0. Not asked of what takes long: a bound that is not the least will do."""
        if expr.is_const:
            return expr.const >= 0
        return num_extrema(expr) <= _MAX_EXTREMA and self.analyzer.can_prove_nonneg(expr)

    def count(self, loops: Iterable[SymVar]) -> SymExpr:
        """How often the innermost of these loops runs, at most."""
        return product(self.extents[v] for v in self.extents if v in set(loops))


@lru_cache(maxsize=128)
def _knowing(sizes: frozenset[SymExpr], running: frozenset[SymExpr]) -> Analyzer:
    """Knows that sizes are at least 0, and extents of running loops at least 1."""
    if running:
        result, least, exprs = _knowing(sizes, frozenset()), 1, running
    else:
        result, least, exprs = Analyzer(), 0, sizes
    for expr in sorted(exprs, key=lambda e: e.key):
        if not result.can_prove_le(least, expr):
            result = result.assume_le(least, expr)
    return result


# Accesses: which elements of a buffer are touched


@dataclass(frozen=True, slots=True)
class _Footprint:
    """The elements that one access touches where it runs: at most `count`, in the box of one range per dimension."""

    count: SymExpr
    box: tuple[_Range, ...]


def _footprint(access: Load | Store, scope: _Scope, anywhere: _Scope) -> _Footprint:
    """Dimensions whose indices depend on the same loops move together: there are no more of them than iterations."""
    groups: list[tuple[frozenset[SymVar], SymExpr]] = []
    box = []
    for dim, index in zip(access.buffer.shape, access.indices, strict=True):
        roots, result = scope.roots(index), scope.range_of(index)
        if result is None:
            result = _Range(_ZERO, dim - 1)
        else:  # what would lie outside is never touched: a branch guards it, or a loop is shorter in the end
            result = _Range(scope.greatest(_ZERO, result.low), scope.least(result.high, dim - 1))
        box.append(result)
        if not roots:
            continue
        count = anywhere.greatest(_ZERO, scope.least(result.high - result.low + 1, scope.count(roots)))
        together = [group for group in groups if group[0] & roots]
        groups = [group for group in groups if not group[0] & roots]
        if together:
            roots = roots.union(*(group[0] for group in together))
            count = scope.least(product((count, *(group[1] for group in together))), scope.count(roots))
        groups.append((roots, count))
    return _Footprint(product(count for _, count in groups), tuple(box))


def _union(buffer: Buffer, parts: list[_Footprint], anywhere: _Scope) -> SymExpr:
    """How many elements several accesses touch together: no more than the sum, than the box round all, or than all.

    Not all of them need to run: their formulas then give what they may, but a greater box at most.
    """
    distinct = list({(part.count, part.box): part for part in parts}.values())
    if len(distinct) == 1:
        return distinct[0].count
    least, greatest = anywhere.least, anywhere.greatest
    size = product(buffer.shape)
    if any(part.count is size for part in distinct):
        return size
    sides = zip(*(part.box for part in distinct), strict=True)
    box = product(greatest(*(r.high for r in side)) - least(*(r.low for r in side)) + 1 for side in sides)
    return least(size, box, _total(part.count for part in distinct))


class _Walk:
    """One pass over a program's statements: sums up FLOPs, and collects the accesses to its parameters."""

    def __init__(self, program: TensorProgram) -> None:
        self._params = set(program.params)
        dims = {dim for buffer in program.params for dim in buffer.shape if not dim.is_const}
        self.anywhere = _Scope(frozenset(dims))
        self.read: dict[Buffer, list[_Footprint]] = {}
        self.written: dict[Buffer, list[_Footprint]] = {}
        self.is_bound = True
        self.shared = _ZERO  # FLOPs of factors that several iterations of a reduction share

    def touched(self, buffer: Buffer, *, written: bool = False) -> SymExpr:
        """Bytes."""
        parts = (self.written if written else self.read)[buffer]
        return _union(buffer, parts, self.anywhere) * dtypes.itemsize(buffer.dtype)

    def flops(self, stmt: Stmt, scope: _Scope) -> SymExpr:
        values = stmt_values(stmt)
        for value in values:
            self._accesses(value, scope)
        flops = sym(value_flops(*values))
        if isinstance(stmt, Store):
            self._note(self.written, stmt, scope)
            if stmt.combine is not None:
                flops = sym(value_flops(*self._repeated(stmt.value, scope)))
            combines = stmt.combine is not None and stmt.buffer.dtype != "bool"
            return flops + (flops_of(stmt.combine or "add") if combines else 0)
        if isinstance(stmt, For):
            return self._loop(stmt, scope)
        if isinstance(stmt, Seq):
            return _total(self.flops(s, scope) for s in stmt.stmts)
        if isinstance(stmt, Allocate):
            return self.flops(stmt.body, scope)
        if isinstance(stmt, LetIndex):
            roots = self._roots_of(stmt.value, scope)
            return flops + self.flops(stmt.body, replace(scope, data={**scope.data, stmt.var: roots}))
        if isinstance(stmt, IfThenElse):
            return flops + scope.greatest(*(self.flops(s, scope) for s in stmt_children(stmt)))
        return flops

    def _repeated(self, value: Value, scope: _Scope) -> tuple[Value, ...]:
        """The value without factors that need not be computed in each iteration, as they depend on some of the loops
        only: a dequantized weight. These count once for each iteration of those loops."""
        factors = (value.a, value.b) if isinstance(value, Binary) and value.op == "mul" else ()
        kept = []
        for factor in factors:
            loops, flops = self._roots_of(factor, scope), value_flops(factor)
            if flops and loops < scope.extents.keys():
                self.shared += scope.count(loops) * flops
            else:
                kept.append(factor)
        if len(kept) == len(factors):
            return (value,)
        leaf = Literal(1, value.dtype)
        return (Binary("mul", leaf, leaf), *kept)

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
        """The sum of body over var in range(extent): exact where the body is quadratic in var, as in triangular loops,
        or linear in the length of tiles of which the last may be shorter; else at most its greatest value, each time.
        """
        if var not in body.free_vars():
            return body * extent
        body, tiles = _without_tiles(body, var, extent)
        if tiles is not None:
            return self._sum_over(var, extent, body, scope) + tiles
        powers = _quadratic(body, var)
        if powers is None:
            times, most = scope.range_of(extent), scope.range_of(body)
            if times is None or most is None:
                self.is_bound = False
                return _ONE
            return times.high * most.high
        constant, linear, square = powers
        first = floordiv(extent * (extent - 1), 2)
        second = floordiv(extent * (extent - 1) * (extent * 2 - 1), 6)
        return constant * extent + linear * first + square * second

    def _accesses(self, value: Value, scope: _Scope) -> None:
        for part in walk_values(value):
            if isinstance(part, Load):
                self._note(self.read, part, scope)

    def _note(self, found: dict[Buffer, list[_Footprint]], access: Load | Store, scope: _Scope) -> None:
        if access.buffer in self._params:
            found.setdefault(access.buffer, []).append(_footprint(access, scope, self.anywhere))

    def _roots_of(self, value: Value, scope: _Scope) -> frozenset[SymVar]:
        """The loops on which a value depends; on all of them where it reads what the program itself computes."""
        result: frozenset[SymVar] = frozenset()
        for part in walk_values(value):
            if isinstance(part, Load):
                if part.buffer not in self._params or part.buffer in self.written:
                    return frozenset(scope.extents)
                result = result.union(*map(scope.roots, part.indices))
            elif isinstance(part, IndexValue):
                result |= scope.roots(part.index)
        return result


def _without_tiles(body: SymExpr, var: SymVar, extent: SymExpr) -> tuple[SymExpr, SymExpr | None]:
    """What is left of the body without multiples of min(c, e - c*var), and the sum of these over var in
    range(ceildiv(e, c)), which is a multiple of e; None where the body has none."""
    rest, tiles = body, None
    for monomial, coef in body.terms:
        atoms = [atom for atom in monomial if isinstance(atom, Min) and var in atom.free_vars()]
        others = [atom for atom in monomial if atom not in atoms]
        if len(atoms) != 1 or any(var in atom.free_vars() for atom in others):
            continue
        whole = _tiled(atoms[0], var, extent)
        if whole is not None:
            rest = rest - product(monomial) * coef
            tiles = (tiles or _ZERO) + product(others) * whole * coef
    return rest, tiles


def _tiled(atom: Min, var: SymVar, extent: SymExpr) -> SymExpr | None:
    """e, where the atom is min(c, e - c*var) for a constant c > 0 and the extent is ceildiv(e, c)."""
    for size, left in ((atom.a, atom.b), (atom.b, atom.a)):
        whole = left + var * size
        if size.is_const and size.const > 0 and var not in whole.free_vars() and extent is ceildiv(whole, size):
            return whole
    return None


def _quadratic(expr: SymExpr, var: SymVar) -> tuple[SymExpr, SymExpr, SymExpr] | None:
    """(a, b, c) with expr == a + b*var + c*var*var."""
    powers = [_ZERO, _ZERO, _ZERO]
    powers[0] += expr.const
    for monomial, coef in expr.terms:
        others = [atom for atom in monomial if atom is not var]
        degree = len(monomial) - len(others)
        if degree > 2 or any(var in atom.free_vars() for atom in others):
            return None
        powers[degree] += product(others) * coef
    return powers[0], powers[1], powers[2]
