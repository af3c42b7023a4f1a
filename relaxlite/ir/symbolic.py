"""Symbolic integers: the one language of dimensions, loop extents, buffer indices and guards.

A `SymExpr` is a canonical sum `const + c1*m1 + c2*m2 + ...` where each monomial m is a sorted product of atoms. An atom
is a `SymVar`, or a `FloorDiv`, `FloorMod`, `Min` or `Max` of two expressions. Atoms are themselves `SymExpr`s (a sum of
one term: themselves), and every expression is interned: two expressions with the same canonical form are the same
object, so `is` and `==` mean "written the same", hashing is free, and a set of expressions is cheap.

There is no `<`: a comparison of symbolic values is a question with three answers. Ask an `Analyzer` (ir/analyzer.py).

    >>> n = SymVar("n")
    >>> str((n + 1) * 4 - n)
    'n*3 + 4'
    >>> (n * 4) // 4 is n
    True
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, NoReturn, TypeAlias

IntLike: TypeAlias = "int | SymExpr"
Monomial: TypeAlias = "tuple[SymExpr, ...]"
Terms: TypeAlias = "tuple[tuple[Monomial, int], ...]"

_interned: weakref.WeakValueDictionary[tuple[object, ...], SymExpr] = weakref.WeakValueDictionary()
_serial = itertools.count()


class SymExpr:
    """An immutable, interned symbolic integer. Make one with `sym`, a `SymVar`, or arithmetic; never directly."""

    __slots__ = ("__weakref__", "_vars", "const", "key", "terms")

    terms: Terms
    const: int
    key: tuple[object, ...]  # a total order that depends on names first, so that printing is deterministic

    @property
    def is_const(self) -> bool:
        return not self.terms

    def free_vars(self) -> tuple[SymVar, ...]:
        """The variables that occur, in order of first occurrence."""
        if self._vars is None:
            found: dict[SymVar, None] = {}
            for monomial, _ in self.terms:
                for atom in monomial:
                    found.update(dict.fromkeys(atom._atom_vars()))
            self._vars = tuple(found)
        return self._vars

    def _atom_vars(self) -> tuple[SymVar, ...]:
        return self.free_vars()

    def __add__(self, other: IntLike) -> SymExpr:
        if not isinstance(other, int | SymExpr):
            return NotImplemented
        return _add(self, sym(other), 1)

    def __radd__(self, other: IntLike) -> SymExpr:
        return self + other

    def __sub__(self, other: IntLike) -> SymExpr:
        if not isinstance(other, int | SymExpr):
            return NotImplemented
        return _add(self, sym(other), -1)

    def __rsub__(self, other: IntLike) -> SymExpr:
        return _add(sym(other), self, -1)

    def __neg__(self) -> SymExpr:
        return _scale(self, -1)

    def __mul__(self, other: IntLike) -> SymExpr:
        if not isinstance(other, int | SymExpr):
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
            f"{self} and {other} have no order before run time; ask Analyzer.can_prove_le or can_prove_lt, and handle 'not proven'"
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
        return _to_text(self)

    def __repr__(self) -> str:
        return str(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError("symbolic expressions are not pickled: print them and parse them back")


class SymVar(SymExpr):
    """A named unknown integer with what is known about it: `lower <= v`, `v <= upper`, `v % divisor == 0`.

    Two variables of one name are different variables: identity counts, names are for people.
    """

    __slots__ = ("divisor", "lower", "name", "serial", "upper")

    def __init__(self, name: str, *, lower: int | None = 0, upper: int | None = None, divisor: int = 1) -> None:
        if divisor < 1:
            raise ValueError(f"symbol {name}: divisor must be at least 1, got {divisor}")
        if lower is not None and upper is not None and lower > upper:
            raise ValueError(f"symbol {name}: lower bound {lower} exceeds upper bound {upper}")
        self.name, self.lower, self.upper, self.divisor = name, lower, upper, divisor
        self.serial = next(_serial)
        self.const, self.terms, self.key = 0, (((self,), 1),), (0, name, self.serial)
        self._vars = (self,)


class _Pair(SymExpr):
    """An atom made of two expressions."""

    __slots__ = ("a", "b")
    rank: ClassVar[int]
    symbol: ClassVar[str]
    a: SymExpr
    b: SymExpr

    def _atom_vars(self) -> tuple[SymVar, ...]:
        return tuple(dict.fromkeys(self.a.free_vars() + self.b.free_vars()))


class FloorDiv(_Pair):
    """a // b, rounded towards minus infinity."""

    __slots__ = ()
    rank, symbol = 1, "//"


class FloorMod(_Pair):
    """a % b with the sign of b."""

    __slots__ = ()
    rank, symbol = 2, "%"


class Min(_Pair):
    __slots__ = ()
    rank, symbol = 3, "min"


class Max(_Pair):
    __slots__ = ()
    rank, symbol = 4, "max"


def sym(value: IntLike) -> SymExpr:
    """An integer (also a NumPy one) as a symbolic expression; expressions pass through."""
    if isinstance(value, SymExpr):
        return value
    return _intern(int(value), ())


def syms(values: Iterable[IntLike]) -> tuple[SymExpr, ...]:
    return tuple(sym(v) for v in values)


def as_int(expr: IntLike) -> int | None:
    """The value of a constant expression, or None."""
    if isinstance(expr, SymExpr):
        return expr.const if not expr.terms else None
    return int(expr)


def product(values: Iterable[IntLike]) -> SymExpr:
    result = sym(1)
    for value in values:
        result = result * value
    return result


def _intern(const: int, terms: Terms) -> SymExpr:
    if const == 0 and len(terms) == 1 and terms[0][1] == 1 and len(terms[0][0]) == 1:
        return terms[0][0][0]  # the sum of one atom is that atom
    ident = (const, *((tuple(map(id, monomial)), coef) for monomial, coef in terms))
    found = _interned.get(ident)
    if found is None:
        found = SymExpr()
        found.const, found.terms, found._vars = const, terms, None
        found.key = (9, tuple((tuple(a.key for a in m), c) for m, c in terms), const)
        _interned[ident] = found
    return found


def _atom(kind: type[_Pair], a: SymExpr, b: SymExpr) -> SymExpr:
    ident = (kind, id(a), id(b))
    found = _interned.get(ident)
    if found is None:
        made = kind()
        made.a, made.b, made.const, made._vars = a, b, 0, None
        made.key = (kind.rank, a.key, b.key)
        made.terms = (((made,), 1),)
        made._vars = made._atom_vars()
        _interned[ident] = found = made
    return found


def _monomial_key(monomial: Monomial) -> tuple[object, ...]:
    return (len(monomial), tuple(a.key for a in monomial))


def _from_dict(const: int, coefs: Mapping[Monomial, int]) -> SymExpr:
    kept = [(m, c) for m, c in coefs.items() if c != 0]
    kept.sort(key=lambda item: _monomial_key(item[0]))
    return _intern(const, tuple(kept))


def _add(a: SymExpr, b: SymExpr, sign: int) -> SymExpr:
    if not b.terms:
        return a if b.const == 0 else _intern(a.const + sign * b.const, a.terms)
    coefs = dict(a.terms)
    for monomial, coef in b.terms:
        coefs[monomial] = coefs.get(monomial, 0) + sign * coef
    return _from_dict(a.const + sign * b.const, coefs)


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
    coefs: dict[Monomial, int] = {}
    for left, cl in (*a.terms, ((), a.const)):
        for right, cr in (*b.terms, ((), b.const)):
            monomial = tuple(sorted(left + right, key=lambda atom: atom.key))
            coefs[monomial] = coefs.get(monomial, 0) + cl * cr
    return _from_dict(coefs.pop((), 0), coefs)


def _split_multiple(a: SymExpr, b: SymExpr) -> tuple[SymExpr, SymExpr]:
    """(q, r) with a == q*b + r, where q takes every term that b divides exactly. b is a constant or one monomial."""
    divisor = as_int(b)
    if divisor is not None:
        parts = {m: (c // divisor if c % divisor == 0 else 0) for m, c in a.terms}
        rest = {m: c for m, c in a.terms if c % divisor != 0}
        return _from_dict(a.const // divisor, parts), _from_dict(a.const % divisor, rest)
    if len(b.terms) != 1 or b.const != 0:
        return (sym(1), sym(0)) if a is b else (sym(0), a)
    (bm, bc) = b.terms[0]
    quotient: dict[Monomial, int] = {}
    rest = {}
    extra = 0
    for monomial, coef in a.terms:
        left = _divide_monomial(monomial, bm) if coef % bc == 0 else None
        if left is None:
            rest[monomial] = coef
        elif left == ():
            extra += coef // bc
        else:
            quotient[left] = quotient.get(left, 0) + coef // bc
    return _from_dict(extra, quotient), _from_dict(a.const, rest)


def _divide_monomial(monomial: Monomial, divisor: Monomial) -> Monomial | None:
    left = list(monomial)
    for atom in divisor:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


def floordiv(a: IntLike, b: IntLike) -> SymExpr:
    """a // b; terms that b divides exactly leave the division. Raises ZeroDivisionError for a constant zero b."""
    a, b = sym(a), sym(b)
    if b.is_const and b.const == 0:
        raise ZeroDivisionError(f"symbolic division {a} // 0")
    if b.is_const and b.const == 1:
        return a
    if b.is_const and b.const < 0:
        return floordiv(-a, -b)
    quotient, rest = _split_multiple(a, b)
    if rest.is_const and rest.const == 0:
        return quotient
    if b.is_const:
        if rest.is_const:
            return quotient + rest.const // b.const
        rest, divisor = _reduce_fraction(rest, b.const)
        return quotient + _nested_div(rest, sym(divisor))
    return quotient + _atom(FloorDiv, rest, b)


def _reduce_fraction(a: SymExpr, divisor: int) -> tuple[SymExpr, int]:
    """(2n + 1) // 4 == (2n) // 4 == n // 2: divide by the common factor of the coefficients and the divisor."""
    common = math.gcd(divisor, *(c for _, c in a.terms))
    if common == 1:
        return a, divisor
    return _intern(0, tuple((m, c // common) for m, c in a.terms)) + a.const // common, divisor // common


def _nested_div(a: SymExpr, b: SymExpr) -> SymExpr:
    """(x // p + c) // q == (x + c*p) // (p*q) for positive constants: one canonical form for chains of divisions."""
    if b.const == 1:
        return a
    if len(a.terms) == 1 and a.terms[0][1] == 1 and len(a.terms[0][0]) == 1:
        inner = a.terms[0][0][0]
        if isinstance(inner, FloorDiv) and inner.b.is_const:
            return floordiv(inner.a + a.const * inner.b.const, inner.b * b)
    return _atom(FloorDiv, a, b)


def floormod(a: IntLike, b: IntLike) -> SymExpr:
    """a % b with the sign of b; terms that b divides exactly vanish."""
    a, b = sym(a), sym(b)
    if b.is_const and b.const == 0:
        raise ZeroDivisionError(f"symbolic modulo {a} % 0")
    if b.is_const and b.const == 1:
        return sym(0)
    if b.is_const and b.const < 0:
        return -floormod(-a, -b)
    _, rest = _split_multiple(a, b)
    if rest.is_const and (rest.const == 0 or b.is_const):
        return sym(rest.const % b.const) if b.is_const else sym(0)
    return _atom(FloorMod, rest, b)


def ceildiv(a: IntLike, b: IntLike) -> SymExpr:
    """The least integer >= a / b, for positive b."""
    return floordiv(sym(a) + (sym(b) - 1), b)


def smin(a: IntLike, b: IntLike) -> SymExpr:
    return _extremum(Min, min, sym(a), sym(b))


def smax(a: IntLike, b: IntLike) -> SymExpr:
    return _extremum(Max, max, sym(a), sym(b))


def _extremum(kind: type[_Pair], pick: Callable[[int, int], int], a: SymExpr, b: SymExpr) -> SymExpr:
    difference = a - b
    if difference.is_const:  # n + 1 against n + 3 is decided without knowing n
        return a if pick(difference.const, 0) == difference.const else b
    if b.key < a.key:  # type: ignore[operator]
        a, b = b, a
    return _atom(kind, a, b)


def substitute(expr: SymExpr, values: Mapping[SymVar, IntLike]) -> SymExpr:
    """Replace variables, all at once; the same object when nothing changes."""
    if not any(v in values for v in expr.free_vars()):
        return expr
    total = sym(expr.const)
    for monomial, coef in expr.terms:
        term = sym(coef)
        for atom in monomial:
            term = term * _substitute_atom(atom, values)
        total = total + term
    return total


def _substitute_atom(atom: SymExpr, values: Mapping[SymVar, IntLike]) -> SymExpr:
    if isinstance(atom, SymVar):
        return sym(values.get(atom, atom))
    assert isinstance(atom, _Pair)
    a, b = substitute(atom.a, values), substitute(atom.b, values)
    return atom if a is atom.a and b is atom.b else rebuild_pair(atom, a, b)


def rebuild_pair(atom: _Pair, a: SymExpr, b: SymExpr) -> SymExpr:
    """The same kind of atom of new operands, canonicalized."""
    make: dict[type[_Pair], Callable[[IntLike, IntLike], SymExpr]] = {FloorDiv: floordiv, FloorMod: floormod, Min: smin, Max: smax}
    return make[type(atom)](a, b)


def evaluate(expr: IntLike, values: Mapping[SymVar, int]) -> int:
    """The value under an assignment of every variable; KeyError names a missing one."""
    if not isinstance(expr, SymExpr):
        return int(expr)
    total = expr.const
    for monomial, coef in expr.terms:
        for atom in monomial:
            coef *= _evaluate_atom(atom, values)
        total += coef
    return total


def _evaluate_atom(atom: SymExpr, values: Mapping[SymVar, int]) -> int:
    if isinstance(atom, SymVar):
        if atom not in values:
            raise KeyError(f"no value for symbol {atom.name}")
        return values[atom]
    assert isinstance(atom, _Pair)
    a, b = evaluate(atom.a, values), evaluate(atom.b, values)
    if isinstance(atom, FloorDiv):
        return a // b
    if isinstance(atom, FloorMod):
        return a % b
    return min(a, b) if isinstance(atom, Min) else max(a, b)


def _to_text(expr: SymExpr, name_of: Callable[[SymVar], str] = lambda v: v.name) -> str:
    pieces = [(coef, _monomial_text(monomial, coef, name_of)) for monomial, coef in expr.terms]
    if expr.const != 0 or not pieces:
        pieces.append((expr.const, str(abs(expr.const))))
    first_coef, first = pieces[0]
    text = ("-" if first_coef < 0 else "") + first
    for coef, piece in pieces[1:]:
        text += (" - " if coef < 0 else " + ") + piece
    return text


def _monomial_text(monomial: Monomial, coef: int, name_of: Callable[[SymVar], str]) -> str:
    factors = [_atom_text(atom, name_of) for atom in monomial]
    return "*".join(factors + ([str(abs(coef))] if abs(coef) != 1 else []))


def _atom_text(atom: SymExpr, name_of: Callable[[SymVar], str]) -> str:
    if isinstance(atom, SymVar):
        return name_of(atom)
    assert isinstance(atom, _Pair)
    a, b = _to_text(atom.a, name_of), _to_text(atom.b, name_of)
    if isinstance(atom, Min | Max):
        return f"{atom.symbol}({a}, {b})"
    return f"({_parenthesize(atom.a, a)} {atom.symbol} {_parenthesize(atom.b, b)})"


def _parenthesize(expr: SymExpr, text: str) -> str:
    return text if isinstance(expr, SymVar) or (expr.is_const and expr.const >= 0) or text[-1] == ")" and text[0] == "(" and isinstance(expr, FloorDiv | FloorMod) else f"({text})"


def to_text(expr: IntLike, name_of: Callable[[SymVar], str] | None = None) -> str:
    """Python syntax, with `name_of` choosing the names of variables (printers make them unique)."""
    return _to_text(sym(expr), name_of or (lambda v: v.name))
