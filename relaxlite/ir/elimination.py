"""Lower bounds of symbolic integers by Fourier-Motzkin elimination, one fact at a time.

To bound e from below, cancel an unbounded term by a fact f >= 0 with the same term: for k, c > 0 and a product m >= 0
of atoms, e' = k*e - c*m*f satisfies k*e >= e'. So n*4 - i*4 becomes 4 by n - 1 - i >= 0.
EliminationFacts are assumptions, ranges, and the definitions of floor division, remainder, min and max. The search is
breadth-first and bounded.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator
from typing import Protocol

from relaxlite.ir.intervals import Interval, is_nonneg, scale_down
from relaxlite.ir.simplify import Residue, expand_mod, try_rebuild_atom
from relaxlite.ir.symbolic import (
    BinaryAtom,
    Division,
    Extremum,
    FloorDiv,
    IntLike,
    Max,
    Min,
    Monomial,
    SymExpr,
    divide_monomial,
    extremum_operands,
    floordiv,
    floormod,
    map_atoms,
    monomial_expr,
    sym,
)

_MAX_NODES = 32  # expressions that one elimination visits
_MAX_RELAXATIONS = 120  # expressions that one elimination derives
_MAX_PAIRINGS = 6  # pairings of the factors of two products


class EliminationFacts(Protocol):
    """Queries of elimination, implemented by the Analyzer."""

    def interval(self, expr: SymExpr) -> Interval: ...
    def monomial_interval(self, monomial: Monomial) -> Interval: ...
    def residue(self, expr: SymExpr) -> Residue: ...
    def replacement(self, atom: SymExpr) -> SymExpr | None: ...
    def assumed_facts(self, atom: SymExpr) -> tuple[SymExpr, ...]: ...
    def definition_facts(self, atom: SymExpr) -> tuple[SymExpr, ...]: ...
    def depth(self, atom: SymExpr) -> int: ...


def eliminate(expr: SymExpr, goal: int | None, facts: EliminationFacts) -> int | None:
    """Largest constant c proven with expr >= c, or None. Stops at the first c >= `goal`."""
    best: int | None = None
    modulus, rest = facts.residue(expr)
    nodes = [(form, 1) for form in dict.fromkeys((expr, expand_mod(expr)))]
    seen = {node for node, _ in nodes}
    budget = iter(range(_MAX_RELAXATIONS))
    for node, factor in nodes:  # grows; expr*factor >= node
        low = scale_down(facts.interval(node), factor)[0]
        if low is not None:
            low += (rest - low) % (modulus or 1)
            best = low if best is None else max(best, low)
            if goal is not None and best >= goal:
                return best
        if len(nodes) >= _MAX_NODES:
            continue
        for _, (new, k) in zip(budget, _relaxations(node, facts), strict=False):
            if new not in seen:
                seen.add(new)
                nodes.append((new, factor * k))
    return best


def _relaxations(node: SymExpr, facts: EliminationFacts) -> Iterator[tuple[SymExpr, int]]:
    """Relax `node` by one fact: yields (new, k) with node*k >= new."""
    coefs = dict(node.terms)
    definitions = [fact for monomial in coefs for atom in monomial for fact in facts.definition_facts(atom)]
    first, targets = _targets(node, facts)
    for monomial in targets:
        sign = 1 if coefs[monomial] > 0 else -1
        candidates = definitions + [fact for atom in monomial for fact in facts.assumed_facts(atom)]
        if len(monomial) > 1:
            candidates += [fact for atom in monomial for fact in bound_facts(atom, facts)]
            candidates += [x * x + s * x for x in monomial if monomial.count(x) > 1 for s in (1, -1)]
        for fact in dict.fromkeys(candidates):
            for part, fact_coef in fact.terms:
                rest = divide_monomial(monomial, part) if fact_coef * sign > 0 else None
                low = None if rest is None else facts.monomial_interval(rest)[0]
                if rest is not None and low is not None:  # rest - min(low, 0) >= 0
                    cancel = {monomial, first} if first is not None else {monomial}
                    yield from _cancel(node, coefs, fact * (monomial_expr(rest) - min(low, 0)), cancel)


def _cancel(
    node: SymExpr, coefs: dict[Monomial, int], fact: SymExpr, wanted: set[Monomial]
) -> Iterator[tuple[SymExpr, int]]:
    """Subtract a multiple of `fact` that cancels one of the `wanted` terms: yields (new, k) with node*k >= new."""
    for monomial, fact_coef in fact.terms:
        if monomial in wanted and fact_coef * coefs[monomial] > 0:
            common = math.gcd(fact_coef, coefs[monomial])
            k = abs(fact_coef) // common
            yield node * k - fact * (abs(coefs[monomial]) // common), k


def _targets(node: SymExpr, facts: EliminationFacts) -> tuple[Monomial | None, Iterable[Monomial]]:
    """Terms to cancel: (first, targets).

    `first` is a term without a lower bound, or None if all terms are bounded. `targets` are `first`, its multiples, and
    the innermost term; all terms if `first` is None.
    """
    monomials = [monomial for monomial, _ in node.terms]
    unbounded = [m for m, coef in node.terms if facts.monomial_interval(m)[0 if coef > 0 else 1] is None]
    if not unbounded:
        return None, monomials

    def depth(monomial: Monomial) -> int:
        return max(map(facts.depth, monomial))

    first, innermost = max(unbounded, key=depth), max(monomials, key=depth)
    return first, [m for m in monomials if m is innermost or divide_monomial(m, first) is not None]


def bound_facts(atom: SymExpr, facts: EliminationFacts) -> Iterator[SymExpr]:
    """Facts, each >= 0, by the constant bounds of the atom."""
    low, high = facts.monomial_interval((atom,))
    if low is not None:
        yield atom - low
    if high is not None:
        yield high - atom


def derive_definition_facts(atom: SymExpr, facts: EliminationFacts) -> Iterator[SymExpr]:
    """Facts, each >= 0, by the definition of the atom."""
    if isinstance(atom, Extremum):
        sign = 1 if isinstance(atom, Max) else -1
        yield from ((atom - operand) * sign for operand in extremum_operands(atom))
    elif isinstance(atom, Division) and is_nonneg(facts.interval(atom.b)):
        low, high = _remainder_bounds(atom.a, atom.b, facts)
        remainder = atom.a - atom * atom.b if isinstance(atom, FloorDiv) else atom
        yield from (remainder - low, high - remainder)
        if is_nonneg(facts.interval(atom.a)) and not (isinstance(atom, FloorDiv) and atom.b.is_const):
            yield atom.a - atom


def _remainder_bounds(a: SymExpr, b: SymExpr, facts: EliminationFacts) -> tuple[IntLike, IntLike]:
    """Inclusive bounds of a % b for b > 0."""
    if not b.is_const:
        return 0, b - 1
    known = facts.replacement(floormod(a, b))
    if known is not None:
        return known, known
    modulus, rest = facts.residue(a)
    modulus = math.gcd(modulus, b.const)
    return rest % modulus, b - modulus + rest % modulus


def divide_common_factor(expr: SymExpr, facts: EliminationFacts) -> tuple[Monomial, SymExpr]:
    """Factor out a common monomial f >= 0: (f, q) with expr == f*q, so that q >= 0 implies expr >= 0.

    Example: b*s*x - b*s*y gives b*s and x - y. f is () if there is no such factor.
    """
    common = _common_monomial(expr)
    if not common or not is_nonneg(facts.monomial_interval(common)):
        return (), expr
    return common, sum((monomial_expr(divide_monomial(m, common) or (), c) for m, c in expr.terms), sym(0))


def compare_factors(expr: SymExpr, facts: EliminationFacts) -> Iterator[list[SymExpr]]:
    """Sufficient conditions for c*x*y - d*u*v >= 0 with c >= d > 0, u >= 0 and v >= 0.

    Yields one list per pairing of the factors, such as [x - u, y - v]; if all of a list are >= 0, so is the expression.
    """
    if len(expr.terms) != 2 or expr.const != 0:
        return
    (small, d), (large, c) = sorted(expr.terms, key=lambda term: term[1])
    if not c >= -d > 0 or not 1 < len(small) <= len(large) or not all(is_nonneg(facts.interval(x)) for x in small):
        return
    for chosen in itertools.islice(itertools.permutations(large, len(small)), _MAX_PAIRINGS):
        unpaired = collections.Counter(large) - collections.Counter(chosen)
        yield [x - u for x, u in zip(chosen, small, strict=True)] + [x - 1 for x in unpaired.elements()]


def clear_quotient(expr: SymExpr, facts: EliminationFacts) -> Iterator[SymExpr]:
    """Equivalent claims without a quotient: a // b <= x if and only if a < b*(x + 1); a // b >= x iff a >= b*x."""
    for monomial, coef in expr.terms:
        q = monomial[0]
        if len(monomial) > 1 or abs(coef) != 1 or not isinstance(q, FloorDiv) or not is_nonneg(facts.interval(q.b)):
            continue
        rest = expr - q * coef
        if not occurs(q, rest):
            yield q.a + q.b * rest if coef > 0 else q.b * (rest + 1) - 1 - q.a


def _common_monomial(expr: SymExpr) -> Monomial:
    """Largest product of atoms that divides every term."""
    if expr.const != 0 or len(expr.terms) < 2:
        return ()
    shared = functools.reduce(operator.and_, (collections.Counter(monomial) for monomial, _ in expr.terms))
    return tuple(shared.elements())


def tighten(expr: SymExpr) -> SymExpr:
    """Tighten expr >= 0 by integrality: 2*x - 1 >= 0 implies x - 1 >= 0."""
    common = math.gcd(*(coef for _, coef in expr.terms))
    return floordiv(expr, common) if common > 1 else expr


def occurs(atom: SymExpr, expr: SymExpr) -> bool:
    """Whether `expr` contains the atom, at any depth."""
    atoms = [factor for monomial, _ in expr.terms for factor in monomial]
    return any(x is atom or (isinstance(x, BinaryAtom) and (occurs(atom, x.a) or occurs(atom, x.b))) for x in atoms)


def find_extremum(expr: SymExpr) -> Min | Max | None:
    """Select a min or max for a case distinction: first one whose definition gives no lower bound of the expression."""
    atoms = [(atom, coef) for monomial, coef in expr.terms for atom in monomial if isinstance(atom, BinaryAtom)]
    for atom, coef in atoms:
        if isinstance(atom, Min if coef > 0 else Max):
            return atom
    for atom, _ in atoms:
        for candidate in (atom, find_extremum(atom.a), find_extremum(atom.b)):
            if isinstance(candidate, Extremum):
                return candidate
    return None


def replace_atom(expr: SymExpr, atom: SymExpr, new: SymExpr) -> SymExpr:
    """Replace an atom at any depth."""

    def change(candidate: SymExpr) -> SymExpr:
        if candidate is atom or not isinstance(candidate, BinaryAtom):
            return new if candidate is atom else candidate
        return try_rebuild_atom(candidate, replace_atom(candidate.a, atom, new), replace_atom(candidate.b, atom, new))

    return map_atoms(expr, change)
