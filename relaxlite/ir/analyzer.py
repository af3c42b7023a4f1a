"""Arithmetic prover for symbolic integers: inequalities, equality, divisibility, constant bounds.

False means "not proven", never "disproven". An `Analyzer` is immutable: `with_range`, `assume_le` and `assume_equal`
return a new Analyzer with more facts. Variables carry their own facts (`SymVar.lower`, `upper`, `divisor`).
Proof methods, cheapest first:

1. canonical difference: equal terms of a and b cancel in a - b;
2. interval arithmetic: each monomial has constant bounds, from the bounds of its atoms;
3. residues: each expression is r modulo g, from the divisors of its variables;
4. simplification under facts (ir/simplify.py), then a search for a counterexample at sample points (ir/samples.py);
5. Fourier-Motzkin elimination of unbounded terms by assumed facts and facts by definition (ir/elimination.py);
6. case distinction: min(a, b) is a, or min(a, b) is b.

Results are deterministic: no time limits, no randomness. A claim concerns assignments for which the expression is
defined, so a divisor whose bounds allow 0 counts as at least 1. sympy is an oracle in tests only
(docs/measurements/ircore.md).

    >>> n, i = SymVar("n"), SymVar("i")
    >>> Analyzer().with_range(i, 0, n).can_prove_lt(i * 4 + 3, n * 4)
    True
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

from relaxlite.ir import intervals
from relaxlite.ir.elimination import (
    bound_facts,
    clear_quotient,
    compare_factors,
    derive_definition_facts,
    divide_common_factor,
    eliminate,
    find_extremum,
    occurs,
    replace_atom,
    tighten,
)
from relaxlite.ir.intervals import ONE, UNBOUNDED, Interval, add, intersect, is_nonneg, multiply, scale
from relaxlite.ir.samples import has_counterexample
from relaxlite.ir.samples import sample_values as sample_values
from relaxlite.ir.simplify import Residue, apply_rules, expand_mod
from relaxlite.ir.symbolic import (
    Atom,
    BinaryAtom,
    Division,
    Extremum,
    FloorDiv,
    FloorMod,
    IntLike,
    Max,
    Min,
    Monomial,
    SymExpr,
    SymVar,
    divide_monomial,
    extremum_operands,
    floordiv,
    floormod,
    monomial_expr,
    sym,
)

_MAX_CASES = 3  # nested case distinctions: 2**3 leaves
_MAX_MEMO = 1 << 14  # memoized answers; an Analyzer may live as long as the process

T = TypeVar("T")


class Analyzer:
    """Immutable set of facts about variables, and a prover of claims that follow from the facts."""

    __slots__ = ("_depths", "_divisors", "_equal", "_facts", "_index", "_intervals", "_known", "_memo", "_ranges")

    def __init__(self) -> None:
        self._ranges: dict[SymVar, Interval] = {}  # var -> bounds of its range, in place of its declared bounds
        self._depths: dict[SymVar, int] = {}  # var with a range -> nesting depth of the range
        self._known: dict[Monomial, Interval] = {}  # monomial -> constant bounds implied by the facts
        self._equal: dict[SymExpr, SymExpr] = {}  # atom -> equal expression to write in its place
        self._divisors: dict[SymExpr, int] = {}  # atom -> known divisor, beyond SymVar.divisor
        self._facts: tuple[SymExpr, ...] = ()  # each is >= 0
        self._index: dict[SymExpr, tuple[SymExpr, ...]] = {}  # first atom of a monomial -> facts with that monomial
        self._memo: dict[tuple[str, SymExpr], Any] = {}
        self._intervals: dict[Monomial, Interval] = {}

    def __repr__(self) -> str:
        equal = [f"{left} == {right}" for left, right in self._equal.items()]
        return f"Analyzer({', '.join([*equal, *(f'{fact} >= 0' for fact in self._facts)])})"

    # facts

    def with_range(self, var: SymVar, lower: IntLike, extent: IntLike) -> Analyzer:
        """Assume lower <= var < lower + extent, as for a loop variable. Replaces the declared bounds of `var`.

        Raises ValueError if `lower` or `extent` depends on `var`.
        """
        first, last = sym(lower), sym(lower) + extent - 1
        if var in first.free_vars() + last.free_vars():
            raise ValueError(f"the range of {var} is given in terms of itself: from {first} to {last}")
        new = self._copy()
        new._ranges[var] = (self.bounds(first)[0], self.bounds(last)[1])
        new._depths[var] = 1 + self._max_depth(first, last)
        new._add_facts(var - first, last - var)
        return new

    def assume_le(self, a: IntLike, b: IntLike) -> Analyzer:
        """Assume a <= b."""
        new = self._copy()
        new._add_facts(sym(b) - a)
        return new

    def assume_equal(self, a: IntLike, b: IntLike) -> Analyzer:
        """Assume a == b. Simplification then replaces an atom by the rest of the equation if one can be isolated."""
        difference = self.simplify(sym(a) - b)
        common = math.gcd(*(coef for _, coef in difference.terms))
        if difference.is_const or difference.const % common != 0:
            return self  # nothing new, or a contradiction
        difference = floordiv(difference, common)
        new = self._copy()
        solution = _isolate_atom(difference)
        if solution is None:
            new._add_facts(difference, -difference)
            return new
        atom, rest = solution
        new._facts, new._index, new._equal = (), {}, {atom: rest}
        for left, right in self._equal.items():
            if occurs(atom, left):
                new._add_facts(left - right, right - left)
            else:
                new._equal[left] = new.simplify(right)
                new._clear_memo()
        new._derive_divisors(atom, rest)
        new._add_facts(*self._facts, *bound_facts(atom, self), *self.definition_facts(atom))
        return new

    def _derive_divisors(self, atom: SymExpr, rest: SymExpr) -> None:
        """Record divisors that follow from atom == rest."""
        if isinstance(atom, FloorMod) and rest == 0 and atom.b.is_const and atom.a is _as_atom(atom.a):
            self._divisors[atom.a] = math.lcm(self._divisors.get(atom.a, 1), atom.b.const)
        if rest is _as_atom(rest):
            self._divisors[rest] = math.lcm(self._divisors.get(rest, 1), self._divisor(atom))

    def _copy(self) -> Analyzer:
        new = Analyzer()
        new._ranges, new._depths, new._known = dict(self._ranges), dict(self._depths), dict(self._known)
        new._equal, new._divisors = dict(self._equal), dict(self._divisors)
        new._facts, new._index = self._facts, dict(self._index)
        return new

    def _add_facts(self, *facts: SymExpr) -> None:
        """Add facts, each an expression >= 0. Each monomial of a fact is bounded by the interval of the other terms."""
        for fact in facts:
            simple = tighten(self.simplify(fact))
            if simple.is_const or simple in self._facts:
                continue
            for monomial, coef in simple.terms:
                rest = self.interval(simple - monomial_expr(monomial, coef))[1]
                if rest is not None:
                    bound = (-(rest // coef), None) if coef > 0 else (None, rest // -coef)
                    self._known[monomial] = intersect(self._known.get(monomial, UNBOUNDED), bound)
            self._facts = (*self._facts, simple)
            for atom in dict.fromkeys(monomial[0] for monomial, _ in simple.terms):
                self._index[atom] = (*self._index.get(atom, ()), simple)
            self._clear_memo()

    # questions

    def can_prove_nonneg(self, a: IntLike) -> bool:
        """Prove a >= 0."""
        expr = tighten(sym(a))
        if expr.is_const:
            return expr.const >= 0
        lower, upper = self.interval(expr)
        if lower is not None and lower >= 0:
            return True
        if upper is not None and upper < 0:
            return False
        return self._memoize("nonneg", expr, False, lambda: self._prove_nonneg(expr))

    def can_prove_le(self, a: IntLike, b: IntLike) -> bool:
        """Prove a <= b."""
        return self.can_prove_nonneg(sym(b) - a)

    def can_prove_lt(self, a: IntLike, b: IntLike) -> bool:
        """Prove a < b."""
        return self.can_prove_nonneg(sym(b) - a - 1)

    def can_prove_equal(self, a: IntLike, b: IntLike) -> bool:
        """Prove a == b."""
        difference = sym(a) - b
        if difference.is_const:
            return difference.const == 0
        lower, upper = self.interval(difference)
        if (lower is not None and lower > 0) or (upper is not None and upper < 0):
            return False
        simple = self.simplify(difference)
        if simple.is_const:
            return simple.const == 0
        if self.simplify(expand_mod(simple)) == 0:
            return True
        return self.can_prove_nonneg(simple) and self.can_prove_nonneg(-simple)

    def can_prove_ne(self, a: IntLike, b: IntLike) -> bool:
        """Prove a != b."""
        difference = sym(a) - b
        if self.residue(self.simplify(difference))[1] != 0:  # r modulo g, with 0 < r < g
            return True
        return self.can_prove_nonneg(difference - 1) or self.can_prove_nonneg(-difference - 1)

    def can_prove_divisible(self, a: IntLike, by: IntLike) -> bool:
        """Prove that a is a multiple of `by`."""
        a, by = self.simplify(sym(a)), self.simplify(sym(by))
        if len(by.terms) == 1 and by.const == 0:  # cancel the monomial of `by` from each term of a
            ((factor, coef),) = by.terms
            parts = [(divide_monomial(monomial, factor), c) for monomial, c in a.terms]
            if a.const == 0 and all(part is not None for part, _ in parts):
                a, by = sum((monomial_expr(part or (), c) for part, c in parts), sym(0)), sym(coef)
        if by == 0:
            return a == 0
        modulus, rest = self.residue(a)
        if by.is_const and modulus % by.const == 0 and rest % by.const == 0:
            return True
        return self.simplify(floormod(a, by)) == 0

    def bounds(self, e: IntLike) -> Interval:
        """Inclusive constant bounds (lower, upper) of e, as tight as the proofs get; None for an unknown bound."""
        expr = sym(e)
        return self._memoize("bounds", expr, UNBOUNDED, lambda: self._bounds(expr))

    def simplify(self, e: IntLike) -> SymExpr:
        """Simplify an expression to one of equal value under the facts."""
        expr = sym(e)
        return self._memoize("simplify", expr, expr, lambda: apply_rules(expr, self))

    def apply_atom_rule(self, rule: Callable[[SymExpr, Any], SymExpr], atom: SymExpr) -> SymExpr:
        """Apply a rule of ir/simplify.py to an atom, memoized because many expressions share atoms."""
        key = (rule.__name__, atom)
        result: SymExpr | None = self._memo.get(key)
        if result is None:
            result = rule(atom, self)
            if len(self._memo) >= _MAX_MEMO:
                self._clear_memo()
            self._memo[key] = result
        return result

    def replacement(self, atom: SymExpr) -> SymExpr | None:
        """Expression that an assumed equality substitutes for the atom; None without such an equality."""
        return self._equal.get(atom)

    def assumed_facts(self, atom: SymExpr) -> tuple[SymExpr, ...]:
        """Facts, each >= 0, with a monomial whose first atom is `atom`."""
        return self._index.get(atom, ())

    def definition_facts(self, atom: SymExpr) -> tuple[SymExpr, ...]:
        """Facts, each >= 0, by the definition of the atom (floor division, remainder, min, max)."""
        if isinstance(atom, SymVar):
            return ()
        return self._memoize("meaning", atom, (), lambda: tuple(derive_definition_facts(atom, self)))

    def depth(self, atom: SymExpr) -> int:
        """Nesting depth: greater than that of every atom in its range or operands. Elimination starts innermost."""
        if isinstance(atom, SymVar):
            return self._depths.get(atom, 0)
        assert isinstance(atom, BinaryAtom)
        return self._memoize("depth", atom, 0, lambda: 1 + self._max_depth(atom.a, atom.b))

    def _max_depth(self, *exprs: SymExpr) -> int:
        return max((self.depth(atom) for e in exprs for monomial, _ in e.terms for atom in monomial), default=0)

    def interval(self, e: SymExpr) -> Interval:
        """Inclusive constant bounds by interval arithmetic, term by term, ignoring correlations between terms."""
        total: Interval = (e.const, e.const)
        for monomial, coef in e.terms:
            total = add(total, scale(self.monomial_interval(monomial), coef))
        return total

    def residue(self, e: SymExpr) -> Residue:
        """Residue (g, r) with 0 <= r < g and e == r modulo g; (0, e) for a constant."""
        modulus, rest = 0, e.const
        for monomial, coef in e.terms:
            g, r = 0, coef
            for atom in monomial:
                atom_modulus, atom_rest = self._atom_residue(atom)
                g, r = math.gcd(g * atom_modulus, g * atom_rest, atom_modulus * r), r * atom_rest
            modulus, rest = math.gcd(modulus, g), rest + r
        return modulus, rest % modulus if modulus else rest

    # bounds of monomials and atoms

    def monomial_interval(self, monomial: Monomial) -> Interval:
        """Inclusive constant bounds of a product of atoms."""
        result = self._intervals.get(monomial)
        if result is None:
            if len(monomial) == 1:
                result = self._atom_interval(monomial[0])
            else:
                result = functools.reduce(multiply, (self.monomial_interval((atom,)) for atom in monomial), ONE)
                if all(monomial.count(atom) % 2 == 0 for atom in monomial):
                    result = intersect(result, (0, None))
            result = self._intervals[monomial] = intersect(result, self._known.get(monomial, UNBOUNDED))
        return result

    def _atom_interval(self, atom: SymExpr) -> Interval:
        if isinstance(atom, SymVar):
            lower, upper = self._ranges.get(atom, (atom.lower, atom.upper))
            step = atom.divisor
            return (
                None if lower is None else -(-lower // step) * step,
                None if upper is None else upper // step * step,
            )
        assert isinstance(atom, BinaryAtom)
        return _ATOM_INTERVALS[type(atom)](self.interval(atom.a), self.interval(atom.b))

    def _atom_residue(self, atom: SymExpr) -> Residue:
        modulus, rest = 1, 0
        if isinstance(atom, Extremum):
            (g, r), (h, s) = self.residue(atom.a), self.residue(atom.b)
            modulus, rest = math.gcd(g, h, r - s), r
        elif isinstance(atom, Division) and atom.b.is_const:
            (g, r), b = self.residue(atom.a), atom.b.const
            if isinstance(atom, FloorMod):
                modulus, rest = math.gcd(g, b), r
            elif g % b == 0:
                modulus, rest = g // b, r // b
        divisor = self._divisor(atom)
        return (divisor, 0) if divisor > modulus else (modulus, rest)

    def _divisor(self, atom: SymExpr) -> int:
        known = self._divisors.get(atom, 1)
        return math.lcm(known, atom.divisor) if isinstance(atom, SymVar) else known

    def _domain(self, var: SymVar) -> tuple[Interval, int, bool]:
        return self.monomial_interval((var,)), self._divisor(var), var in self._ranges

    # proofs

    def _bounds(self, expr: SymExpr) -> Interval:
        simple = self.simplify(expr)
        low, high = self._lower_bound(simple, None, _MAX_CASES), self._lower_bound(-simple, None, _MAX_CASES)
        return intersect(self.interval(expr), (low, None if high is None else -high))

    def _prove_nonneg(self, expr: SymExpr) -> bool:
        simple = tighten(self.simplify(expr))
        zeros = [left - right for left, right in self._equal.items() if isinstance(left, BinaryAtom)]
        if has_counterexample(simple, self._facts, zeros, self._domain):
            return False
        common, quotient = divide_common_factor(simple, self)
        if common:
            if self.can_prove_nonneg(quotient):
                return True
            if self._is_independent(common, quotient):
                return False  # the factor is unrelated to the quotient and cannot help
        if is_nonneg((self._lower_bound(simple, 0, _MAX_CASES), None)):
            return True
        if any(all(map(self.can_prove_nonneg, conditions)) for conditions in compare_factors(simple, self)):
            return True
        return any(self.can_prove_nonneg(equivalent) for equivalent in clear_quotient(simple, self))

    def _is_independent(self, monomial: Monomial, expr: SymExpr) -> bool:
        """Whether the monomial shares no variable with the expression or a fact."""
        variables = {v for atom in monomial for v in atom.free_vars()}
        return variables.isdisjoint(v for related in (expr, *self._facts) for v in related.free_vars())

    def _lower_bound(self, expr: SymExpr, goal: int | None, cases: int) -> int | None:
        """Lower bound by elimination; if that misses the goal, by up to `cases` case distinctions on min and max."""
        result = eliminate(expr, goal, self)
        extremum = find_extremum(expr) if cases > 0 else None
        if extremum is None or (goal is not None and result is not None and result >= goal):
            return result
        case_bounds = []
        for operand in extremum_operands(extremum):
            branch = self._assume_extreme(extremum, operand)
            bound = branch._lower_bound(branch.simplify(replace_atom(expr, extremum, operand)), goal, cases - 1)
            if bound is None or (goal is not None and bound < goal):
                return result
            case_bounds.append(bound)
        return min(case_bounds) if result is None else max(result, min(case_bounds))

    def _assume_extreme(self, extremum: Min | Max, operand: SymExpr) -> Analyzer:
        """Assume that the min or max is this operand. With more than two operands, no facts are added: too costly."""
        rivals = [rival for rival in extremum_operands(extremum) if rival is not operand]
        if len(rivals) > 1:
            return self
        low, high = (operand, rivals[0]) if isinstance(extremum, Min) else (rivals[0], operand)
        return self.assume_le(low, high)

    def _memoize(self, question: str, expr: SymExpr, unknown: T, answer: Callable[[], T]) -> T:
        """Memoize `answer`; a recursive query of the same question gets `unknown`."""
        key = (question, expr)
        if key not in self._memo:
            if len(self._memo) >= _MAX_MEMO:
                self._clear_memo()
            self._memo[key] = unknown
            self._memo[key] = answer()
        result: T = self._memo[key]
        return result

    def _clear_memo(self) -> None:
        self._memo.clear()
        self._intervals.clear()


_ATOM_INTERVALS: dict[type[BinaryAtom], Callable[[Interval, Interval], Interval]] = {
    FloorDiv: intervals.floordiv,
    FloorMod: intervals.floormod,
    Min: intervals.minimum,
    Max: intervals.maximum,
}


def _as_atom(expr: SymExpr) -> SymExpr | None:
    return expr if isinstance(expr, Atom) else None


def _isolate_atom(difference: SymExpr) -> tuple[SymExpr, SymExpr] | None:
    """Solve difference == 0 for an atom: (atom, rest) with atom == rest. Prefers the newest variable; None if none."""
    solutions = []
    for monomial, coef in difference.terms:
        if len(monomial) == 1 and abs(coef) == 1:
            rest = (monomial[0] * coef - difference) * coef
            if not occurs(monomial[0], rest):
                solutions.append((monomial[0], rest))
    return max(solutions, key=lambda item: item[0].serial if isinstance(item[0], SymVar) else -1, default=None)
