"""Lower bounds of symbolic integers by elimination: the method of Fourier and Motzkin, one fact at a time.

To bound e from below, cancel a term that has no bound, with the help of a fact f >= 0 that has the same term: for k, c > 0
and a product m >= 0 of atoms, e' = k*e - c*m*f has k*e >= e'. So i*4 < n*4 becomes 0 < 4 by the fact n - 1 - i >= 0.
The facts are assumptions and ranges, and what floor, min and max mean. The search is breadth-first and bounded.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator
from typing import Protocol

from relaxlite.ir.intervals import Interval, intersect, is_nonneg, scale_down
from relaxlite.ir.simplify import Residue, rebuild, without_mod
from relaxlite.ir.symbolic import (
    FloorDiv,
    FloorMod,
    IntLike,
    Max,
    Min,
    Monomial,
    Pair,
    SymExpr,
    divide_monomial,
    floordiv,
    floormod,
    map_atoms,
    monomial_expr,
    sym,
)

_MAX_NODES = 32  # expressions that one elimination visits
_MAX_RELAXATIONS = 120  # and makes


class Facts(Protocol):
    """What elimination may ask."""

    def interval(self, expr: SymExpr) -> Interval: ...
    def monomial_interval(self, monomial: Monomial) -> Interval: ...
    def residue(self, expr: SymExpr) -> Residue: ...
    def replacement(self, atom: SymExpr) -> SymExpr | None: ...
    def assumed(self, atom: SymExpr) -> tuple[SymExpr, ...]: ...
    def meaning(self, atom: SymExpr) -> tuple[SymExpr, ...]: ...
    def depth(self, atom: SymExpr) -> int: ...


def eliminate(expr: SymExpr, goal: int | None, facts: Facts) -> int | None:
    """The best constant c found with expr >= c; the first that reaches the goal, if there is one."""
    best: int | None = None
    nodes = [(form, 1) for form in dict.fromkeys((expr, without_mod(expr)))]
    seen = {node for node, _ in nodes}
    made = 0
    for node, factor in nodes:  # grows; expr*factor >= node
        best = intersect((best, None), scale_down(facts.interval(node), factor))[0]
        if goal is not None and best is not None and best >= goal:
            return best
        left = _MAX_RELAXATIONS - made if len(nodes) < _MAX_NODES else 0
        for made, (new, k) in enumerate(itertools.islice(_relaxations(node, facts), left), made + 1):
            if new not in seen:
                seen.add(new)
                nodes.append((new, factor * k))
    return best


def _relaxations(node: SymExpr, facts: Facts) -> Iterator[tuple[SymExpr, int]]:
    """(new, k) with node*k >= new."""
    coefs = dict(node.terms)
    meanings = [fact for monomial in coefs for atom in monomial for fact in facts.meaning(atom)]
    first, targets = _targets(node, facts)
    for monomial in targets:
        sign = 1 if coefs[monomial] > 0 else -1
        known = meanings + [fact for atom in monomial for fact in facts.assumed(atom)]
        if len(monomial) > 1:
            known += [fact for atom in monomial for fact in _constant_facts(atom, facts)]
            known += [x * x + s * x for x in monomial if monomial.count(x) > 1 for s in (1, -1)]
        for fact in dict.fromkeys(known):
            for part, weight in fact.terms:
                rest = divide_monomial(monomial, part) if weight * sign > 0 else None
                if rest is not None and is_nonneg(facts.monomial_interval(rest)):
                    cancel = {monomial, first} if first is not None else {monomial}
                    yield from _cancel(node, coefs, fact * monomial_expr(rest), cancel)


def _cancel(node: SymExpr, coefs: dict[Monomial, int], fact: SymExpr, wanted: set[Monomial]) -> Iterator[tuple[SymExpr, int]]:
    """Subtract what cancels one of the wanted terms."""
    for monomial, weight in fact.terms:
        if monomial in wanted and weight * coefs[monomial] > 0:
            common = math.gcd(weight, coefs[monomial])
            k = abs(weight) // common
            yield node * k - fact * (abs(coefs[monomial]) // common), k


def _targets(node: SymExpr, facts: Facts) -> tuple[Monomial | None, Iterable[Monomial]]:
    """(first, targets): a term without a lower bound, if any; it, what can outweigh it, and the innermost, else all."""
    monomials = [monomial for monomial, _ in node.terms]
    unbounded = [m for m, coef in node.terms if facts.monomial_interval(m)[0 if coef > 0 else 1] is None]
    if not unbounded:
        return None, monomials

    def depth(monomial: Monomial) -> int:
        return max(map(facts.depth, monomial))

    first, innermost = max(unbounded, key=depth), max(monomials, key=depth)
    return first, [m for m in monomials if m is innermost or divide_monomial(m, first) is not None]


def _constant_facts(atom: SymExpr, facts: Facts) -> Iterator[SymExpr]:
    low, high = facts.monomial_interval((atom,))
    if low is not None:
        yield atom - low
    if high is not None:
        yield high - atom


def define(atom: SymExpr, facts: Facts) -> Iterator[SymExpr]:
    """What is >= 0 by the definition of the atom."""
    if isinstance(atom, Min):
        yield from (atom.a - atom, atom.b - atom)
    elif isinstance(atom, Max):
        yield from (atom - atom.a, atom - atom.b)
    elif isinstance(atom, FloorDiv | FloorMod) and is_nonneg(facts.interval(atom.b)):
        least, most = _remainder_bounds(atom.a, atom.b, facts)
        remainder = atom.a - atom * atom.b if isinstance(atom, FloorDiv) else atom
        yield from (remainder - least, most - remainder)
        if is_nonneg(facts.interval(atom.a)) and not (isinstance(atom, FloorDiv) and atom.b.is_const):
            yield atom.a - atom


def _remainder_bounds(a: SymExpr, b: SymExpr, facts: Facts) -> tuple[IntLike, IntLike]:
    """Bounds of a % b for b > 0."""
    if not b.is_const:
        return 0, b - 1
    known = facts.replacement(floormod(a, b))
    if known is not None:
        return known, known
    modulus, rest = facts.residue(a)
    modulus = math.gcd(modulus, b.const)
    return rest % modulus, b - modulus + rest % modulus


def sufficient(expr: SymExpr, facts: Facts) -> Iterator[SymExpr]:
    """Expressions that are >= 0 only where this one is: without a common factor, or without a division."""
    common = _common_monomial(expr)
    if common and is_nonneg(facts.monomial_interval(common)):
        yield sum((monomial_expr(divide_monomial(m, common) or (), c) for m, c in expr.terms), sym(0))
        return
    for monomial, coef in expr.terms:  # a // b <= x just where a < b*(x + 1), and a // b >= x just where a >= b*x
        q = monomial[0]
        if len(monomial) > 1 or abs(coef) != 1 or not isinstance(q, FloorDiv) or not is_nonneg(facts.interval(q.b)):
            continue
        rest = expr - q * coef
        if not occurs(q, rest):
            yield q.a + q.b * rest if coef > 0 else q.b * (rest + 1) - 1 - q.a


def _common_monomial(expr: SymExpr) -> Monomial:
    """The largest product of atoms that divides each term."""
    if expr.const != 0 or len(expr.terms) < 2:
        return ()
    shared = functools.reduce(operator.and_, (collections.Counter(monomial) for monomial, _ in expr.terms))
    return tuple(shared.elements())


def tighten(expr: SymExpr) -> SymExpr:
    """2x - 1 >= 0 says x - 1 >= 0."""
    common = math.gcd(*(coef for _, coef in expr.terms))
    return floordiv(expr, common) if common > 1 else expr


def occurs(atom: SymExpr, expr: SymExpr) -> bool:
    """At any depth."""
    atoms = [found for monomial, _ in expr.terms for found in monomial]
    return any(x is atom or (isinstance(x, Pair) and (occurs(atom, x.a) or occurs(atom, x.b))) for x in atoms)


def find_extremum(expr: SymExpr) -> Pair | None:
    """The first min or max in the expression, an inner one before the one around it."""
    for monomial, _ in expr.terms:
        for atom in monomial:
            if isinstance(atom, Pair):
                for found in (find_extremum(atom.a), find_extremum(atom.b)):
                    if found is not None:
                        return found
                if isinstance(atom, Min | Max):
                    return atom
    return None


def decide_extrema(expr: SymExpr, low: SymExpr, high: SymExpr) -> SymExpr:
    """The expression where low <= high: each min and max of the two is one of them."""

    def change(atom: SymExpr) -> SymExpr:
        if not isinstance(atom, Pair):
            return atom
        a, b = decide_extrema(atom.a, low, high), decide_extrema(atom.b, low, high)
        if isinstance(atom, Min | Max) and {a, b} == {low, high}:
            return low if isinstance(atom, Min) else high
        return rebuild(atom, a, b)

    return map_atoms(expr, change)
