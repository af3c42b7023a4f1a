"""Dependence analysis: distance intervals between iterations that access the same element.

Two accesses b(v') and a(v) conflict if their indices are equal. Every dimension with affine indices gives an equation
in the distances d = v' - v of their common loops,

    sum of c_v * d_v  +  terms in variables of one access only  +  constant  ==  0.

Each equation narrows the interval of every d in it from the intervals of the other terms, until a fixed point (interval
propagation). An empty interval proves independence; the intervals over-approximate the distances. Combining stores with
the same operation commute (the order of a reduction is not part of its semantics) and do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TypeAlias

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.layout import flat_offset
from relaxlite.ir.program import Allocate, Binder, Buffer, For, LetIndex, Load, Stmt, Store
from relaxlite.ir.program_printer import print_value
from relaxlite.ir.program_visitor import stmt_children, stmt_values, walk_values
from relaxlite.ir.symbolic import Division, FloorMod, SymExpr, SymVar, as_int, map_atoms
from relaxlite.passes.loops.access import coefficient
from relaxlite.records import dataclass

Interval: TypeAlias = "tuple[int | None, int | None]"  # inclusive; None: no bound
ANY: Interval = (None, None)
ZERO: Interval = (0, 0)
_ROUNDS = 8  # of interval propagation; more rarely narrow further


@dataclass(frozen=True, slots=True)
class Access:
    """A load or store, and the loops and `LetIndex` statements from the root of the region to it."""

    node: Load | Store
    binders: tuple[For | LetIndex, ...]

    @property
    def buffer(self) -> Buffer:
        """The accessed buffer."""
        return self.node.buffer

    @property
    def combine(self) -> str | None:
        """The operation of a combining store; None for loads and other stores."""
        return self.node.combine if isinstance(self.node, Store) else None

    def __str__(self) -> str:
        text = print_value(Load(self.node.buffer, self.node.indices))
        return f"{'the store to' if isinstance(self.node, Store) else 'the load of'} {text}"


@dataclass(frozen=True, slots=True)
class Dependence:
    """Two accesses that may touch the same element, with their distance.

    `distance`: for each common loop, the interval of iterations by which `second` comes after `first` (negative:
    before).
    """

    first: Access
    second: Access
    distance: Mapping[SymVar, Interval]

    def along(self, var: SymVar) -> Interval:
        """The distance interval of a loop; unbounded for other variables."""
        return self.distance.get(var, ANY)

    def __str__(self) -> str:
        return f"{self.first} and {self.second} may be the same element in different iterations"


def accesses_of(region: Stmt) -> list[Access]:
    """All accesses in a region to buffers that are not allocated in it."""
    return list(_accesses(region, (), frozenset()))


def _accesses(stmt: Stmt, binders: tuple[For | LetIndex, ...], own: frozenset[Buffer]) -> Iterator[Access]:
    for root in stmt_values(stmt):
        for value in walk_values(root):
            if isinstance(value, Load) and value.buffer not in own:
                yield Access(value, binders)
    if isinstance(stmt, Store) and stmt.buffer not in own:
        yield Access(stmt, binders)
    if isinstance(stmt, Allocate):
        own = own | {stmt.buffer}
    inner = (*binders, stmt) if isinstance(stmt, Binder) else binders
    for child in stmt_children(stmt):
        yield from _accesses(child, inner, own)


def dependences(region: Stmt) -> Iterator[Dependence]:
    """The pairs of accesses in a region, at least one of them a store, that may touch the same element."""
    accesses = accesses_of(region)
    yield from conflicts(accesses, accesses, is_same=True)


def conflicts(left: Sequence[Access], right: Sequence[Access], *, is_same: bool = False) -> Iterator[Dependence]:
    """The dependences between accesses of `left` and of `right`, combining stores with the same operation excepted.

    `is_same`: both lists are the same, and each pair is reported once.
    """
    for number, a in enumerate(left):
        for b in right[number:] if is_same else right:
            if a.buffer is not b.buffer or (isinstance(a.node, Load) and isinstance(b.node, Load)):
                continue
            if a.combine is not None and a.combine == b.combine:
                continue
            distance = distance_between(a, b)
            if distance is not None:
                yield Dependence(a, b, distance)


def self_conflicts(left: Sequence[Access]) -> Iterator[Dependence]:
    """The dependences within a list of accesses, combining stores included.

    Threads must not combine into one element.
    """
    for number, a in enumerate(left):
        for b in left[number:]:
            if a.buffer is b.buffer and not (isinstance(a.node, Load) and isinstance(b.node, Load)):
                distance = distance_between(a, b)
                if distance is not None:
                    yield Dependence(a, b, distance)


def distance_between(a: Access, b: Access) -> dict[SymVar, Interval] | None:
    """The distance interval v' (in b) - v (in a) of each common loop; None: the accesses are independent."""
    common = [x for x, y in zip(a.binders, b.binders, strict=False) if x is y]
    loops = [x for x in common if isinstance(x, For)]
    parts = _Quotients({loop.var for loop in loops})
    equations = list(_equations(a, b, parts))
    distance: dict[SymVar, Interval] = {loop.var: _distance_range(loop) for loop in loops}
    distance |= {part: (-last, last) if (last := part.upper) is not None else ANY for part in parts.variables.values()}
    for _ in range(_ROUNDS):
        changed = False
        for terms, rest in equations:
            for var, coef in terms.items():
                other_terms = rest
                for other, factor in terms.items():
                    if other is not var:
                        other_terms = _plus(other_terms, _times(distance[other], factor))
                narrowed = _meet(distance[var], _divided(_times(other_terms, -1), coef))
                if narrowed is None:
                    return None
                changed, distance[var] = changed or narrowed != distance[var], narrowed
            total = rest
            for var, coef in terms.items():
                total = _plus(total, _times(distance[var], coef))
            if _meet(total, ZERO) is None:
                return None
        for (owner, divisor, is_rest), part in parts.variables.items():
            other_part = parts.variables.get((owner, divisor, not is_rest))
            if other_part is not None and distance[part] == distance[other_part] == ZERO != distance[owner]:
                changed, distance[owner] = True, ZERO  # quotient and remainder determine the variable
        if not changed:
            break
    return distance


class _Quotients:
    """Replaces quotients and remainders of loop variables, v // d and v % d, as fusion makes them, by new variables."""

    def __init__(self, loops: set[SymVar]) -> None:
        self.loops = loops
        self.variables: dict[tuple[SymVar, SymExpr, bool], SymVar] = {}

    def named(self, index: SymExpr) -> SymExpr:
        """The index with quotients and remainders replaced."""
        return map_atoms(index, self._name)

    def _name(self, atom: SymExpr) -> SymExpr:
        if not isinstance(atom, Division) or atom.a not in self.loops:
            return atom
        if not self.loops.isdisjoint(atom.b.free_vars()):
            return atom
        assert isinstance(atom.a, SymVar)
        is_rest = isinstance(atom, FloorMod)
        last = as_int(atom.b - 1) if is_rest else None
        key = (atom.a, atom.b, is_rest)
        return self.variables.setdefault(key, SymVar(f"{atom.a.name}_part", upper=last))


def _equations(a: Access, b: Access, parts: _Quotients) -> Iterator[tuple[dict[SymVar, int], Interval]]:
    shape = a.buffer.shape
    pairs = list(zip(a.node.indices, b.node.indices, strict=True))
    pairs.append((flat_offset(shape, a.node.indices), flat_offset(shape, b.node.indices)))
    named = [(parts.named(left), parts.named(right)) for left, right in pairs]
    common = parts.loops | set(parts.variables.values())
    for left, right in named:
        affine_a = _affine(left, [*(x.var for x in a.binders), *parts.variables.values()])
        affine_b = _affine(right, [*(x.var for x in b.binders), *parts.variables.values()])
        if affine_a is None or affine_b is None:
            continue
        (coefs_a, rest_a), (coefs_b, rest_b) = affine_a, affine_b
        terms = {v: coefs_b[v] for v in coefs_b if v in common and coefs_a.get(v) == coefs_b[v]}
        rest = Analyzer().bounds(rest_b - rest_a)
        for coefs, binders, sign in ((coefs_b, b.binders, 1), (coefs_a, a.binders, -1)):
            ranges = {binder.var: _range(binder) for binder in binders}
            ranges |= {part: (0, part.upper) for part in parts.variables.values()}
            for var, coef in coefs.items():
                if var not in terms:
                    rest = _plus(rest, _times(ranges[var], coef * sign))
        yield terms, rest


def _affine(index: SymExpr, variables: Sequence[SymVar]) -> tuple[dict[SymVar, int], SymExpr] | None:
    """(coefficients of the variables, remaining terms) of an index; None if the index is not affine in them."""
    coefs: dict[SymVar, int] = {}
    rest = index
    present = set(index.free_vars())
    for var in (var for var in variables if var in present):
        factor = coefficient(index, var)
        coef = None if factor is None else as_int(factor)
        if coef is None:
            return None
        coefs[var], rest = coef, rest - var * coef
    return coefs, rest


def _range(binder: For | LetIndex) -> Interval:
    """The value range of a variable; unbounded for `LetIndex`, whose declared bounds data may violate."""
    if isinstance(binder, LetIndex):
        return ANY
    return 0, _last(binder)


def _distance_range(loop: For) -> Interval:
    last = _last(loop)
    return ANY if last is None else (-last, last)


def _last(loop: For) -> int | None:
    """The largest value of a loop variable; None if it is not a known constant."""
    _, extent = Analyzer().bounds(loop.extent)
    return None if extent is None else max(extent - 1, 0)


def _plus(a: Interval, b: Interval) -> Interval:
    return (
        None if a[0] is None or b[0] is None else a[0] + b[0],
        None if a[1] is None or b[1] is None else a[1] + b[1],
    )


def _times(a: Interval, factor: int) -> Interval:
    low, high = a if factor >= 0 else (a[1], a[0])
    if factor == 0:
        return ZERO
    return None if low is None else low * factor, None if high is None else high * factor


def _divided(a: Interval, by: int) -> Interval:
    """The interval of integers x with x*by in `a`."""
    if by == 0:
        return ANY
    if by < 0:
        a, by = _times(a, -1), -by
    return None if a[0] is None else -(-a[0] // by), None if a[1] is None else a[1] // by


def _meet(a: Interval, b: Interval) -> Interval | None:
    low = b[0] if a[0] is None else a[0] if b[0] is None else max(a[0], b[0])
    high = b[1] if a[1] is None else a[1] if b[1] is None else min(a[1], b[1])
    return None if low is not None and high is not None and low > high else (low, high)


# Queries


def carried_by(loop: For, *, combining: bool = False) -> Dependence | None:
    """A loop-carried dependence; None: the iterations are independent.

    `combining`: iterations that combine into one element with the same operation count as independent.
    """
    accesses = accesses_of(loop)
    pairs = conflicts(accesses, accesses, is_same=True) if combining else self_conflicts(accesses)
    return next((d for d in pairs if d.along(loop.var) != ZERO), None)


def blocks_reordering(nest: Sequence[For], order: Sequence[SymVar]) -> Dependence | None:
    """A dependence that reordering the loops of a perfect nest would reverse; None: the reordering is legal."""
    before = [loop.var for loop in nest]
    for dependence in dependences(nest[0]):
        choices = [_signs(dependence.along(var)) for var in before]
        for signs in product(*choices):
            sign_of = dict(zip(before, signs, strict=True))
            if _leading(signs) != _leading(sign_of[var] for var in order):
                return dependence
    return None


def _signs(interval: Interval) -> tuple[int, ...]:
    low, high = interval
    signs = [-1] if low is None or low < 0 else []
    signs += [0] if (low is None or low <= 0) and (high is None or high >= 0) else []
    signs += [1] if high is None or high > 0 else []
    return tuple(signs)


def _leading(signs: Sequence[int] | Iterator[int]) -> int:
    return next((s for s in signs if s), 0)


def blocks_distribution(loop: For, earlier: Stmt, later: Stmt) -> Dependence | None:
    """A dependence that prevents distributing a loop over `earlier` and `later`, statements of its body; None: legal.

    It exists if `later` in some iteration conflicts with `earlier` in a following iteration.
    """
    body_of = [[Access(x.node, (loop, *x.binders)) for x in accesses_of(stmt)] for stmt in (earlier, later)]
    for dependence in conflicts(*body_of):
        low, _ = dependence.along(loop.var)  # of the iteration of `later` minus that of `earlier`
        if low is None or low < 0:
            return dependence
    return None
