"""Symbolic integers, for dimensions, loop extents, buffer indices and guards.

A `SymExpr` is a canonical sum `const + c1*m1 + c2*m2 + ...` where each monomial m is a sorted product of atoms. An atom
is a `SymVar`, or a `FloorDiv`, `FloorMod`, `Min` or `Max` of two expressions. An atom is a `SymExpr` too, a sum of one
term. Expressions are interned: equal canonical forms are one object, so `is` and `==` compare canonical forms, and
hashing is by identity. A constant also equals its `int`.

There is no `<`: a comparison may be true, false or unknown; use an `Analyzer` (ir/analyzer.py).
Division assumes a nonzero divisor: `n*k // k` is `n`.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, NoReturn, SupportsIndex, TypeAlias

from relaxlite.ir.interning import InternTable

IntLike: TypeAlias = "int | SymExpr"  # NumPy integers are accepted too
Monomial: TypeAlias = "tuple[SymExpr, ...]"
Terms: TypeAlias = "tuple[tuple[Monomial, int], ...]"

_interned: InternTable[SymExpr] = InternTable()
_references, _keep = _interned.references, _interned.intern
_serial = itertools.count()


class SymExpr:
    """Immutable, interned symbolic integer. Created by `sym`, `SymVar` or arithmetic, never directly."""

    __slots__ = ("__weakref__", "_key", "_vars", "const", "terms")

    terms: Terms
    const: int
    _key: tuple[object, ...] | None
    _vars: tuple[SymVar, ...] | None

    @property
    def is_const(self) -> bool:
        """Whether the expression is an integer constant, `const`."""
        return not self.terms

    @property
    def key(self) -> tuple[object, ...]:
        """Sort key of a total order, by names first, so that printing is deterministic."""
        if self._key is None:
            self._key = self._make_key()
        return self._key

    def _make_key(self) -> tuple[object, ...]:
        return (9, tuple((tuple(atom.key for atom in m), c) for m, c in self.terms), self.const)

    def free_vars(self) -> tuple[SymVar, ...]:
        """Variables of the expression, in order of first occurrence."""
        if self._vars is None:
            self._vars = self._find_vars()
        return self._vars

    def _find_vars(self) -> tuple[SymVar, ...]:
        return tuple(dict.fromkeys(v for monomial, _ in self.terms for atom in monomial for v in atom.free_vars()))

    # Expressions are interned, so equality of canonical forms is identity. `n == m` being False does not mean that the
    # values differ at run time. Only a constant also equals its int (_Constant).
    __eq__, __hash__ = object.__eq__, object.__hash__

    def __add__(self, other: IntLike) -> SymExpr:
        if type(other) is int:
            return _intern(self.const + other, self.terms)
        if not isinstance(other, (int, SymExpr)):
            return NotImplemented
        return _add(self, sym(other), 1)

    def __radd__(self, other: IntLike) -> SymExpr:
        return self + other

    def __sub__(self, other: IntLike) -> SymExpr:
        if type(other) is int:
            return _intern(self.const - other, self.terms)
        if not isinstance(other, (int, SymExpr)):
            return NotImplemented
        return _add(self, sym(other), -1)

    def __rsub__(self, other: IntLike) -> SymExpr:
        return _add(sym(other), self, -1)

    def __neg__(self) -> SymExpr:
        return _scale(self, -1)

    def __mul__(self, other: IntLike) -> SymExpr:
        if not isinstance(other, (int, SymExpr)):
            return NotImplemented
        return _multiply(self, sym(other))

    def __rmul__(self, other: IntLike) -> SymExpr:
        return self * other

    def __floordiv__(self, other: IntLike) -> SymExpr:
        return floordiv(self, other)

    def __rfloordiv__(self, other: IntLike) -> SymExpr:
        return floordiv(other, self)

    def __mod__(self, other: IntLike) -> SymExpr:
        return floormod(self, other)

    def __rmod__(self, other: IntLike) -> SymExpr:
        return floormod(other, self)

    def _no_order(self, other: object) -> NoReturn:
        raise TypeError(
            f"{self} and {other} have no order before run time; ask Analyzer.can_prove_le or can_prove_lt and handle "
            "'not proven', or build smin or smax"
        )

    __lt__ = __le__ = __gt__ = __ge__ = _no_order

    def __bool__(self) -> bool:
        if self.is_const:
            return self.const != 0
        raise TypeError(f"the truth of {self} is not known before run time; ask an Analyzer")

    def __int__(self) -> int:
        if self.is_const:
            return self.const
        raise TypeError(f"{self} has no value before run time; use evaluate(expr, values)")

    __index__ = __int__

    def __str__(self) -> str:
        return to_text(self)

    def __repr__(self) -> str:
        return str(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError("symbolic expressions are not pickled: print them and parse them back")


class SymVar(SymExpr):
    """Variable with facts: `lower <= v`, `v <= upper`, `v % divisor == 0`. Compared by identity, not by name.

    Raises ValueError for facts that no integer satisfies.
    """

    __slots__ = ("divisor", "lower", "name", "serial", "upper")

    def __init__(self, name: str, *, lower: int | None = 0, upper: int | None = None, divisor: int = 1) -> None:
        if divisor < 1:
            raise ValueError(f"symbol {name}: divisor must be at least 1, got {divisor}")
        if lower is not None and upper is not None and lower > upper:
            raise ValueError(f"symbol {name}: lower bound {lower} exceeds upper bound {upper}")
        if lower is not None and upper is not None and upper // divisor * divisor < lower:
            raise ValueError(f"symbol {name}: no multiple of {divisor} lies in [{lower}, {upper}]")
        self.name, self.lower, self.upper, self.divisor = name, lower, upper, divisor
        self.serial = next(_serial)
        self.const, self.terms, self._key = 0, (((self,), 1),), (0, name, self.serial)
        self._vars = (self,)


class _Constant(SymExpr):
    """Constant expression; equal to its int."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SymExpr):
            return self is other
        return self.const == other if isinstance(other, int) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.const)


class BinaryAtom(SymExpr):
    """Atom with two operands: quotient, remainder, min or max."""

    __slots__ = ("a", "b")
    rank: ClassVar[int]
    symbol: ClassVar[str]
    a: SymExpr
    b: SymExpr

    def _make_key(self) -> tuple[object, ...]:
        return (self.rank, self.a.key, self.b.key)

    def _find_vars(self) -> tuple[SymVar, ...]:
        return tuple(dict.fromkeys(self.a.free_vars() + self.b.free_vars()))


class FloorDiv(BinaryAtom):
    """Quotient a // b, rounded towards minus infinity."""

    __slots__ = ()
    rank, symbol = 1, "//"


class FloorMod(BinaryAtom):
    """Remainder a % b with the sign of b."""

    __slots__ = ()
    rank, symbol = 2, "%"


class Min(BinaryAtom):
    """Minimum of a and b."""

    __slots__ = ()
    rank, symbol = 3, "min"


class Max(BinaryAtom):
    """Maximum of a and b."""

    __slots__ = ()
    rank, symbol = 4, "max"


Division: TypeAlias = FloorDiv | FloorMod
Extremum: TypeAlias = Min | Max
Atom: TypeAlias = SymVar | BinaryAtom


def sym(value: SymExpr | SupportsIndex) -> SymExpr:
    """Convert an integer (Python or NumPy) to a SymExpr; a SymExpr is returned as it is. TypeError for a float."""
    return value if isinstance(value, SymExpr) else _constant(int(operator.index(value)))


@functools.lru_cache(maxsize=4096)
def _constant(value: int) -> SymExpr:
    return _intern(value, ())


def syms(values: Iterable[IntLike]) -> tuple[SymExpr, ...]:
    """Convert integers to symbolic expressions."""
    return tuple(sym(v) for v in values)


def as_int(expr: IntLike) -> int | None:
    """Value of a constant expression; None if not constant."""
    if isinstance(expr, SymExpr):
        return expr.const if not expr.terms else None
    return int(operator.index(expr))


def product(values: Iterable[IntLike]) -> SymExpr:
    """Product of integers; 1 if there are none."""
    return functools.reduce(operator.mul, values, sym(1))


def _intern(const: int, terms: Terms) -> SymExpr:
    if const == 0 and len(terms) == 1 and terms[0][1] == 1 and len(terms[0][0]) == 1:
        return terms[0][0][0]  # the sum of one atom is that atom
    key = (const, terms)
    reference = _references.get(key)
    interned = None if reference is None else reference()
    if interned is None:
        created = SymExpr() if terms else _Constant()
        created.const, created.terms, created._vars, created._key = const, terms, None, None
        interned = _keep(key, created)
    return interned


def _atom(kind: type[BinaryAtom], a: SymExpr, b: SymExpr) -> SymExpr:
    key = (kind, a, b)
    reference = _references.get(key)
    atom = None if reference is None else reference()
    if atom is None:
        created = kind()
        created.a, created.b, created.const, created._vars, created._key = a, b, 0, None, None
        created.terms = (((created,), 1),)
        atom = _keep(key, created)
    return atom


def _term_key(term: tuple[Monomial, int]) -> tuple[object, ...]:
    """Sort key of terms: degree, then atoms. Multiplication by a monomial preserves the order."""
    monomial = term[0]
    return (len(monomial), [atom._key or atom.key for atom in monomial])


def _from_dict(const: int, coefs: Mapping[Monomial, int]) -> SymExpr:
    terms = [item for item in coefs.items() if item[1] != 0]
    if len(terms) > 1:
        terms.sort(key=_term_key)
    return _intern(const, tuple(terms))


def _add(a: SymExpr, b: SymExpr, sign: int) -> SymExpr:
    if not b.terms:
        return a if b.const == 0 else _intern(a.const + sign * b.const, a.terms)
    coefs = dict(a.terms)
    for monomial, coef in b.terms:
        coefs[monomial] = coefs.get(monomial, 0) + sign * coef
    const = a.const + sign * b.const
    if len(coefs) == len(a.terms):  # still in order
        return _intern(const, tuple([item for item in coefs.items() if item[1]]))
    return _from_dict(const, coefs)


def _scale(a: SymExpr, factor: int) -> SymExpr:
    if factor == 1:
        return a
    if factor == 0:
        return sym(0)
    return _intern(a.const * factor, tuple((m, c * factor) for m, c in a.terms))


def _multiply(a: SymExpr, b: SymExpr) -> SymExpr:
    if not b.terms:
        return _scale(a, b.const)
    if not a.terms:
        return _scale(b, a.const)
    if len(b.terms) == 1 and not b.const:
        return _multiply_by_term(a, *b.terms[0])
    if len(a.terms) == 1 and not a.const:
        return _multiply_by_term(b, *a.terms[0])
    coefs: dict[Monomial, int] = {}
    for left, cl in (*a.terms, ((), a.const)):
        for right, cr in (*b.terms, ((), b.const)):
            monomial = _join(left, right)
            coefs[monomial] = coefs.get(monomial, 0) + cl * cr
    return _from_dict(coefs.pop((), 0), coefs)


def _multiply_by_term(a: SymExpr, monomial: Monomial, coef: int) -> SymExpr:
    terms = [(_join(m, monomial), c * coef) for m, c in a.terms]
    if a.const:
        terms.insert(0, (monomial, a.const * coef))  # of the lowest degree
    return _intern(0, tuple(terms))


def _join(left: Monomial, right: Monomial) -> Monomial:
    """Product of two monomials, sorted."""
    return tuple(sorted(left + right, key=_atom_key)) if left and right else left or right


def _atom_key(atom: SymExpr) -> tuple[object, ...]:
    return atom._key or atom.key


def _split_multiple(a: SymExpr, b: SymExpr) -> tuple[SymExpr, SymExpr]:
    """Split off multiples of b: (q, r) with a == q*b + r, where r is shorter than a.

    For a constant b > 0, the coefficients of r are between -b and b, its constant is between 0 and b - 1.
    """
    if b.is_const:
        whole = {m: (abs(c) // b.const) * (1 if c > 0 else -1) for m, c in a.terms}
        quotient = _from_dict(a.const // b.const, whole)
        return quotient, a - quotient * b
    divisor, factor = b.terms[0]
    quotient, rest = sym(0), a
    for monomial, coef in a.terms:
        cofactor = divide_monomial(monomial, divisor) if coef % factor == 0 else None
        if cofactor is not None:
            part = monomial_expr(cofactor, coef // factor)
            shorter = rest - part * b
            if _length(shorter) < _length(rest):
                quotient, rest = quotient + part, shorter
    return quotient, rest


def _length(expr: SymExpr) -> int:
    return len(expr.terms) + (expr.const != 0)


def _cancel_common(a: SymExpr, b: SymExpr) -> tuple[SymExpr, SymExpr, SymExpr]:
    """Cancel the greatest common factor f, a positive constant times atoms: (a', b', f) with a == a'*f, b == b'*f."""
    terms = (*a.terms, *b.terms)
    factor = math.gcd(a.const, b.const, *[c for _, c in terms])
    common: Monomial = ()
    if not (a.const or b.const):
        common = tuple(functools.reduce(operator.and_, [Counter(m) for m, _ in terms]).elements())
    if factor == 1 and not common:
        return a, b, sym(1)

    def cancel(expr: SymExpr) -> SymExpr:
        rest = {divide_monomial(m, common) or (): c // factor for m, c in expr.terms}
        return _from_dict(rest.pop((), expr.const // factor), rest)

    return cancel(a), cancel(b), monomial_expr(common, factor)


def monomial_expr(monomial: Monomial, coef: int = 1) -> SymExpr:
    """Expression coef * monomial; the empty monomial is 1."""
    return _intern(0, ((monomial, coef),)) if monomial and coef else sym(coef if not monomial else 0)


def divide_monomial(monomial: Monomial, divisor: Monomial) -> Monomial | None:
    """Quotient of two monomials; None if the divisor does not divide the monomial."""
    remaining = list(monomial)
    for atom in divisor:
        if atom not in remaining:
            return None
        remaining.remove(atom)
    return tuple(remaining)


def floordiv(a: IntLike, b: IntLike) -> SymExpr:
    """Canonical a // b; terms that b divides are moved out of the quotient. ZeroDivisionError for b == 0."""
    a, b = sym(a), sym(b)
    if b.is_const and b.const == 0:
        raise ZeroDivisionError(f"symbolic division {a} // 0")
    if (b.terms[0][1] if b.terms else b.const) < 0:
        return floordiv(-a, -b)
    quotient, rest = _split_multiple(a, b)
    if rest.is_const and (rest.const == 0 or b.is_const):
        return quotient  # a constant rest is less than a constant divisor
    if b.is_const:
        return quotient + _div_by_const(rest, b.const)
    rest, divisor, factor = _cancel_common(rest, b)
    return quotient + (_atom(FloorDiv, rest, b) if factor == 1 else floordiv(rest, divisor))


def _div_by_const(a: SymExpr, b: int) -> SymExpr:
    """Canonical a // b for a constant b greater than every coefficient of a.

    Divide by the gcd of coefficients and divisor: (2n + 1) // 4 == n // 2.
    Make the first coefficient positive: -n // 4 == -((n + 3) // 4).
    Merge nested quotients: (x // p + c) // q == (x + c*p) // (p*q).
    """
    common = math.gcd(b, *(c for _, c in a.terms))
    if common > 1:
        return floordiv(_intern(a.const // common, tuple((m, c // common) for m, c in a.terms)), b // common)
    if a.terms[0][1] < 0:
        return -floordiv(b - 1 - a, b)
    inner = a - a.const
    if isinstance(inner, FloorDiv) and inner.b.is_const:
        return floordiv(inner.a + a.const * inner.b.const, inner.b * b)
    return _atom(FloorDiv, a, sym(b))


def floormod(a: IntLike, b: IntLike) -> SymExpr:
    """Canonical a % b with the sign of b; terms that b divides vanish. ZeroDivisionError for b == 0."""
    a, b = sym(a), sym(b)
    if b.is_const and b.const == 0:
        raise ZeroDivisionError(f"symbolic modulo {a} % 0")
    if (b.terms[0][1] if b.terms else b.const) < 0:
        return -floormod(-a, -b)
    _, rest = _split_multiple(a, b)
    if rest.is_const and (rest.const == 0 or b.is_const):
        return rest
    if not b.is_const:
        rest, divisor, factor = _cancel_common(rest, b)
        return _atom(FloorMod, rest, b) if factor == 1 else floormod(rest, divisor) * factor
    common = math.gcd(b.const, *(c for _, c in rest.terms))
    if common > 1:  # (2n + 1) % 4 == (n % 2)*2 + 1
        scaled = _intern(rest.const // common, tuple((m, c // common) for m, c in rest.terms))
        return floormod(scaled, b.const // common) * common + rest.const % common
    return _atom(FloorMod, rest, b)


def ceildiv(a: IntLike, b: IntLike) -> SymExpr:
    """Quotient a / b rounded up, for b > 0."""
    return floordiv(sym(a) + (sym(b) - 1), b)


def smin(*values: IntLike) -> SymExpr:
    """Minimum of the values; operands with constant differences, as n + 1 and n + 3, are reduced to one."""
    return _extremum(Min, -1, syms(values))


def smax(*values: IntLike) -> SymExpr:
    """Maximum of the values; operands with constant differences, as n + 1 and n + 3, are reduced to one."""
    return _extremum(Max, 1, syms(values))


def _extremum(kind: type[BinaryAtom], sign: int, values: Iterable[SymExpr]) -> SymExpr:
    first, *rest = (extremum_operands(value) if type(value) is kind else (value,) for value in values)
    candidates = list(first)  # operands of one extremum: no constant differences among them
    for value in itertools.chain.from_iterable(rest):
        gaps = [(value - candidate) * sign for candidate in candidates]  # > 0: `value` beats the candidate
        if not any(gap.is_const and gap.const <= 0 for gap in gaps):
            candidates = [candidate for candidate, gap in zip(candidates, gaps, strict=True) if not gap.is_const]
            candidates.append(value)
    candidates.sort(key=lambda value: value.key)
    return functools.reduce(lambda a, b: _atom(kind, a, b), candidates)


def extremum_operands(extremum: SymExpr) -> tuple[SymExpr, ...]:
    """Operands of nested extrema of one kind: a, b, c for min(min(a, b), c)."""
    exprs: list[SymExpr] = []
    value = extremum
    while isinstance(value, Extremum) and type(value) is type(extremum):
        exprs.append(value.b)
        value = value.a
    return (value, *reversed(exprs))


def substitute(expr: SymExpr, values: Mapping[SymVar, IntLike]) -> SymExpr:
    """Substitute variables simultaneously; the same object if nothing changes."""
    if values.keys().isdisjoint(expr.free_vars()):
        return expr
    if isinstance(expr, SymVar):
        return sym(values[expr])

    def replace(atom: SymExpr) -> SymExpr:
        if isinstance(atom, BinaryAtom):
            return rebuild_atom(atom, substitute(atom.a, values), substitute(atom.b, values))
        return sym(values.get(atom, atom))  # type: ignore[call-overload]

    return map_atoms(expr, replace)


def map_atoms(expr: SymExpr, change: Callable[[SymExpr], SymExpr]) -> SymExpr:
    """Replace every atom of an expression by `change(atom)`; the same object if nothing changes."""
    changed = {atom: change(atom) for monomial, _ in expr.terms for atom in monomial}
    if all([new is atom for atom, new in changed.items()]):
        return expr
    const, coefs = expr.const, dict[Monomial, int]()
    for monomial, coef in expr.terms:
        if all([changed[atom] is atom for atom in monomial]):
            coefs[monomial] = coefs.get(monomial, 0) + coef
            continue
        part = changed[monomial[0]] if len(monomial) == 1 else product([changed[atom] for atom in monomial])
        const += part.const * coef
        for new, factor in part.terms:
            coefs[new] = coefs.get(new, 0) + factor * coef
    return _from_dict(const, coefs)


def from_terms(const: int, terms: Iterable[tuple[Monomial, int]]) -> SymExpr:
    """Expression const + sum of terms. Monomials are sorted, may repeat, and may be empty."""
    coefs: dict[Monomial, int] = {}
    for monomial, coef in terms:
        coefs[monomial] = coefs.get(monomial, 0) + coef
    return _from_dict(const + coefs.pop((), 0), coefs)


def rebuild_atom(atom: BinaryAtom, a: SymExpr, b: SymExpr) -> SymExpr:
    """Canonical atom of the same kind with new operands."""
    return atom if a is atom.a and b is atom.b else ATOM_CONSTRUCTORS[type(atom)](a, b)


ATOM_CONSTRUCTORS: dict[type[BinaryAtom], Callable[[IntLike, IntLike], SymExpr]]
ATOM_CONSTRUCTORS = {FloorDiv: floordiv, FloorMod: floormod, Min: smin, Max: smax}


def evaluate(expr: IntLike, values: Mapping[SymVar, int]) -> int:
    """Evaluate under an assignment of every variable. KeyError for a missing variable."""
    return evaluate_memoized(sym(expr), dict[SymExpr, int](values.items()))


def evaluate_memoized(expr: SymExpr, known: dict[SymExpr, int]) -> int:
    """Evaluate with a memo: `known` has the values of variables, and gains those of evaluated atoms."""
    total = expr.const
    for monomial, coef in expr.terms:
        for atom in monomial:
            coef *= known[atom] if atom in known else _evaluate_atom(atom, known)
        total += coef
    return total


def _evaluate_atom(atom: SymExpr, known: dict[SymExpr, int]) -> int:
    if not isinstance(atom, BinaryAtom):
        raise KeyError(f"no value for symbol {atom}")
    a, b = evaluate_memoized(atom.a, known), evaluate_memoized(atom.b, known)
    return known.setdefault(atom, _EVALUATE[type(atom)](a, b))


_EVALUATE: Mapping[type, Callable[[int, int], int]] = {
    FloorDiv: operator.floordiv, FloorMod: operator.mod, Min: min, Max: max,
}  # fmt: skip


def _to_text(expr: SymExpr, name_of: Callable[[SymVar], str]) -> str:
    pieces = [(coef, _monomial_text(monomial, coef, name_of)) for monomial, coef in expr.terms]
    if expr.const != 0 or not pieces:
        pieces.append((expr.const, str(abs(expr.const))))
    first_coef, first = pieces[0]
    rest = ((" - " if coef < 0 else " + ") + piece for coef, piece in pieces[1:])
    return "".join(["-" if first_coef < 0 else "", first, *rest])


def _monomial_text(monomial: Monomial, coef: int, name_of: Callable[[SymVar], str]) -> str:
    factors = [_atom_text(atom, name_of) for atom in monomial]
    return "*".join(factors + ([str(abs(coef))] if abs(coef) != 1 else []))


def _atom_text(atom: SymExpr, name_of: Callable[[SymVar], str]) -> str:
    if isinstance(atom, SymVar):
        return name_of(atom)
    assert isinstance(atom, BinaryAtom)
    if isinstance(atom, Extremum):
        return f"{atom.symbol}({', '.join(_to_text(operand, name_of) for operand in extremum_operands(atom))})"
    a, b = _to_text(atom.a, name_of), _to_text(atom.b, name_of)
    return f"({_parenthesize(atom.a, a)} {atom.symbol} {_parenthesize(atom.b, b)})"


def _parenthesize(expr: SymExpr, text: str) -> str:
    return text if isinstance(expr, Atom) or (expr.is_const and expr.const >= 0) else f"({text})"


def to_text(expr: IntLike, name_of: Callable[[SymVar], str] | None = None) -> str:
    """Print in Python syntax; `name_of` maps variables to unique names (default: their own names)."""
    return _to_text(sym(expr), name_of or (lambda v: v.name))
