"""Rewrite rules that simplify symbolic integers under facts; the comment of each rule has its equation.

Rules query a `SimplifyFacts` object, implemented by the Analyzer, and decline if it proves nothing. A rule preserves
the value for every assignment that satisfies the facts and for which the expression is defined.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Protocol, TypeAlias

from relaxlite.ir.intervals import Interval
from relaxlite.ir.symbolic import (
    BinaryAtom,
    Division,
    Extremum,
    FloorDiv,
    FloorMod,
    Max,
    Min,
    SymExpr,
    divide_monomial,
    extremum_operands,
    floordiv,
    floormod,
    map_atoms,
    monomial_expr,
    rebuild_atom,
    sym,
)

Residue: TypeAlias = tuple[int, int]  # (g, r): the value is r modulo g; g == 0: it is r

_MAX_ATOMS = 32  # sizes in models have at most a dozen atoms (docs/measurements/ircore.md)


def num_atoms(expr: SymExpr) -> int:
    """Number of atoms, nested ones included: a measure of how long proofs take."""
    atoms = [atom for monomial, _ in expr.terms for atom in monomial]
    return len(atoms) + sum(num_atoms(atom.a) + num_atoms(atom.b) for atom in atoms if isinstance(atom, BinaryAtom))


def has_many_atoms(expr: SymExpr) -> bool:
    """Whether an expression is too large to substitute into others: its symbol is used instead."""
    return num_atoms(expr) > _MAX_ATOMS


def num_extrema(expr: SymExpr) -> int:
    """Number of min and max atoms, nested ones included."""
    pairs = [atom for monomial, _ in expr.terms for atom in monomial if isinstance(atom, BinaryAtom)]
    return sum(isinstance(p, Extremum) + num_extrema(p.a) + num_extrema(p.b) for p in pairs)


class SimplifyFacts(Protocol):
    """Queries of rewrite rules, implemented by the Analyzer."""

    def simplify(self, expr: SymExpr) -> SymExpr: ...
    def replacement(self, atom: SymExpr) -> SymExpr | None: ...
    def interval(self, expr: SymExpr) -> Interval: ...
    def residue(self, expr: SymExpr) -> Residue: ...
    def can_prove_nonneg(self, expr: SymExpr) -> bool: ...
    def apply_atom_rule(self, rule: Callable[[SymExpr, SimplifyFacts], SymExpr], atom: SymExpr) -> SymExpr: ...


def apply_rules(expr: SymExpr, facts: SimplifyFacts) -> SymExpr:
    """Simplify an expression: rules on each atom, then recombination of quotients and remainders."""
    return _recombine(map_atoms(expr, lambda atom: facts.apply_atom_rule(_simplify_atom, atom)), facts)


def expand_mod(expr: SymExpr) -> SymExpr:
    """Expand all remainders by a % b == a - (a // b)*b, for proofs."""

    def expand(atom: SymExpr) -> SymExpr:
        if not isinstance(atom, BinaryAtom):
            return atom
        new = try_rebuild_atom(atom, expand_mod(atom.a), expand_mod(atom.b))
        return map_atoms(new, lambda x: x.a - floordiv(x.a, x.b) * x.b if isinstance(x, FloorMod) else x)

    return map_atoms(expr, expand)


def try_rebuild_atom(atom: BinaryAtom, a: SymExpr, b: SymExpr) -> SymExpr:
    """Rebuild an atom with new operands; unchanged if that would divide by the constant 0."""
    return atom if isinstance(atom, Division) and b == 0 else rebuild_atom(atom, a, b)


def _simplify_atom(atom: SymExpr, facts: SimplifyFacts) -> SymExpr:
    equal = facts.replacement(atom)
    if equal is not None:
        return equal
    lower, upper = facts.interval(atom)
    if lower is not None and lower == upper:
        return sym(lower)
    if not isinstance(atom, BinaryAtom):
        return atom
    return _apply_to_atoms(try_rebuild_atom(atom, facts.simplify(atom.a), facts.simplify(atom.b)), facts)


def _apply_to_atoms(expr: SymExpr, facts: SimplifyFacts) -> SymExpr:
    """Apply one rule to each atom, without simplifying its operands."""

    def change(atom: SymExpr) -> SymExpr:
        if isinstance(atom, FloorDiv):
            return _simplify_div(atom, facts)
        if isinstance(atom, FloorMod):
            return _simplify_mod(atom, facts)
        return _simplify_extremum(atom, facts) if isinstance(atom, Extremum) else atom

    return map_atoms(expr, change)


def _simplify_div(atom: FloorDiv, facts: SimplifyFacts) -> SymExpr:
    a, b = atom.a, atom.b
    if _is_remainder(a, b, facts):  # a // b == 0 for 0 <= a < b
        return sym(0)
    if not b.is_const:
        if isinstance(a, FloorDiv) and facts.can_prove_nonneg(b):  # (x // p) // q == x // (p*q) for q > 0
            return _apply_to_atoms(floordiv(a.a, a.b * b), facts)
        return atom
    split = _split_small(a, b.const, facts)  # (g*x + k*g + r) // (g*q) == (g*x + k*g) // (g*q) for 0 <= r < g
    return _apply_to_atoms(floordiv(split[0], b), facts) if split is not None else atom


def _simplify_mod(atom: FloorMod, facts: SimplifyFacts) -> SymExpr:
    a, b = atom.a, atom.b
    if _is_remainder(a, b, facts):  # a % b == a for 0 <= a < b
        return a
    if not b.is_const:
        return atom
    modulus, rest = facts.residue(a)
    if modulus % b.const == 0:
        return sym(rest % b.const)
    reduced = sym(a.const)
    for monomial, coef in a.terms:
        inner, term = monomial[0], monomial_expr(monomial, coef)
        if len(monomial) == 1 and isinstance(inner, FloorMod) and floormod(inner.b * coef, b) == 0:
            reduced += inner.a * coef  # (c*(x % p)) % b == (c*x) % b where b divides c*p
        elif _divisor(term, facts) % b.const != 0:  # (x + y) % b == y % b where b divides x
            reduced += term
    if reduced is not a:
        return _apply_to_atoms(floormod(reduced, b), facts)
    split = _split_small(a, b.const, facts)  # (g*x + k*g + r) % (g*q) == (g*x + k*g) % (g*q) + r for 0 <= r < g
    return _apply_to_atoms(floormod(split[0], b), facts) + split[1] if split is not None else atom


def _simplify_extremum(atom: Min | Max, facts: SimplifyFacts) -> SymExpr:
    sign = 1 if isinstance(atom, Max) else -1
    *init, last = extremum_operands(atom)
    if any(facts.can_prove_nonneg((operand - last) * sign) for operand in init):
        return atom.a
    undecided = [operand for operand in init if not facts.can_prove_nonneg((last - operand) * sign)]
    return functools.reduce(lambda a, b: rebuild_atom(atom, a, b), [*undecided, last])


def _is_remainder(a: SymExpr, b: SymExpr, facts: SimplifyFacts) -> bool:
    """Prove 0 <= a < b."""
    return facts.can_prove_nonneg(a) and facts.can_prove_nonneg(b - 1 - a)


def _split_small(a: SymExpr, b: int, facts: SimplifyFacts) -> tuple[SymExpr, SymExpr] | None:
    """Split a == big + small with 0 <= small < g for a common divisor g of big and b; None if there is no such g."""
    divisors = [_divisor(monomial_expr(*term), facts) for term in a.terms]
    for g in sorted({math.gcd(d, b) for d in divisors} - {1}, reverse=True):
        big = sym(0)
        for (monomial, coef), d in zip(a.terms, divisors, strict=True):
            if d % g == 0:
                big += monomial_expr(monomial, coef)
        small = a - big
        lower, upper = facts.interval(small)
        if lower is not None and upper is not None and lower // g == upper // g:
            whole = lower // g * g
            if small != whole:
                return big + whole, small - whole
    return None


def _divisor(expr: SymExpr, facts: SimplifyFacts) -> int:
    modulus, rest = facts.residue(expr)
    return math.gcd(modulus, rest)


def _recombine(expr: SymExpr, facts: SimplifyFacts) -> SymExpr:
    """Recombine by (a // b)*b + a % b == a, if the result is shorter; also (n // 4)*4 -> n if 4 divides n."""
    candidates = [
        (monomial, coef, atom) for monomial, coef in expr.terms for atom in monomial if isinstance(atom, Division)
    ]
    for monomial, coef, atom in candidates:
        factor = monomial_expr(divide_monomial(monomial, (atom,)) or (), coef)
        new = _by_definition(atom, factor, facts)
        if new is None:
            continue
        shorter = expr - atom * factor + new
        if _size(shorter) < _size(expr):
            return _recombine(shorter, facts)
    return expr


def _by_definition(atom: FloorDiv | FloorMod, factor: SymExpr, facts: SimplifyFacts) -> SymExpr | None:
    """Express atom * factor by the remainder of a quotient, or the quotient of a remainder.

    None for a quotient whose factor is not a multiple of the divisor.
    """
    a, b = atom.a, atom.b
    if isinstance(atom, FloorMod):
        return (a - facts.apply_atom_rule(_other_part, atom) * b) * factor
    if floormod(factor, b) != 0:
        return None
    return (a - facts.apply_atom_rule(_other_part, atom)) * floordiv(factor, b)


def _other_part(atom: SymExpr, facts: SimplifyFacts) -> SymExpr:
    """Quotient of the operands of a remainder; remainder of the operands of a quotient."""
    assert isinstance(atom, Division)
    divide = floordiv if isinstance(atom, FloorMod) else floormod
    return _apply_to_atoms(divide(atom.a, atom.b), facts)


@functools.lru_cache(maxsize=1 << 14)
def _size(expr: SymExpr) -> int:
    """Size of an expression: number of terms and atoms, nested ones included."""
    atoms = [atom for monomial, _ in expr.terms for atom in monomial]
    inner = sum(_size(atom.a) + _size(atom.b) for atom in atoms if isinstance(atom, BinaryAtom))
    return inner + len(atoms) + len(expr.terms) + (expr.const != 0)
