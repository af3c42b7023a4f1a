"""The symbols of a model by unique names, where they are defined, and expressions of them as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from relaxlite.ir.attributes import INPUT_NAMES
from relaxlite.ir.expr import Function, MatchShape
from relaxlite.ir.symbolic import FloorDiv, FloorMod, Max, Min, SymExpr, SymVar, evaluate, to_text
from relaxlite.ir.types import defined_symbols
from relaxlite.ir.visitor import bodies
from relaxlite.records import dataclass

UNBOUNDED = 64  # the value shown first of a symbol without an upper bound


@dataclass(slots=True)
class Symbol:
    """A symbol under its unique name, with the places that define it."""

    name: str
    var: SymVar
    defined: list[str] = field(default_factory=list)
    is_input: bool = False  # bound by the shapes of the arguments

    @property
    def usual(self) -> int:
        """A value within the bounds to begin with."""
        return self.near(UNBOUNDED)

    def near(self, value: int) -> int:
        """The least allowed value from this one on, or the greatest below."""
        least, most, step = self.var.lower or 0, self.var.upper, self.var.divisor
        value = -(-max(value, least) // step) * step
        return value if most is None else min(value, most // step * step)


class Symbols:
    """Names for symbols. Two symbols of one name are different ones: the second is called `n_1`."""

    def __init__(self) -> None:
        self._by_var: dict[SymVar, Symbol] = {}
        self._names: set[str] = set()

    def __iter__(self) -> Iterator[Symbol]:
        return iter(self._by_var.values())

    def of(self, var: SymVar) -> Symbol:
        """The entry of a symbol, made when it is met first."""
        if var not in self._by_var:
            name, count = var.name, 0
            while name in self._names:
                count += 1
                name = f"{var.name}_{count}"
            self._names.add(name)
            self._by_var[var] = Symbol(name, var)
        return self._by_var[var]

    def of_all(self, expr: SymExpr) -> None:
        """Make entries of every symbol in an expression."""
        for var in expr.free_vars():
            self.of(var)

    def name(self, var: SymVar) -> str:
        return self.of(var).name

    def text(self, expr: SymExpr) -> str:
        return to_text(expr, self.name)

    def values(self, given: Mapping[str, int]) -> dict[SymVar, int]:
        """A value of every symbol: what is given by name, else the usual one."""
        return {s.var: given.get(s.name, s.usual) for s in self._by_var.values()}

    def tree(self, expr: SymExpr) -> Any:
        """An expression as JSON: a number, a name, or [operator, operand, ...] of + * // % min max."""
        terms: list[Any] = [self._product(monomial, coef) for monomial, coef in expr.terms]
        if expr.const or not terms:
            terms.append(expr.const)
        return terms[0] if len(terms) == 1 else ["+", *terms]

    def _product(self, atoms: tuple[SymExpr, ...], coef: int) -> Any:
        factors = [self._atom(atom) for atom in atoms]
        if coef != 1:
            factors.insert(0, coef)
        return factors[0] if len(factors) == 1 else ["*", *factors]

    def _atom(self, atom: SymExpr) -> Any:
        if isinstance(atom, SymVar):
            return self.name(atom)
        assert isinstance(atom, FloorDiv | FloorMod | Min | Max)
        return [atom.symbol, self.tree(atom.a), self.tree(atom.b)]


class Figures:
    """Expressions, each kept once: figures of the page refer to them by number."""

    def __init__(self, symbols: Symbols) -> None:
        self._symbols = symbols
        self._numbers: dict[SymExpr, int] = {}

    def number(self, expr: SymExpr) -> int:
        self._symbols.of_all(expr)
        return self._numbers.setdefault(expr, len(self._numbers))

    def to_json(self) -> list[dict[str, Any]]:
        """For each its text and its tree."""
        return [{"text": self._symbols.text(expr), "tree": self._symbols.tree(expr)} for expr in self._numbers]


def find_symbols(function: Function) -> Symbols:
    """The symbols that a function's arguments and MatchShapes define, and the places where they do.

    A symbol may be defined at several places: each argument that has it as a dimension is one, and is checked.
    """
    symbols = Symbols()
    names = function.attrs.get(INPUT_NAMES)
    given = names if isinstance(names, tuple) else tuple(p.name for p in function.params)
    for name, param in zip(given, function.params, strict=True):
        for var in defined_symbols(param.ty):
            result = symbols.of(var)
            result.is_input = True
            dims = getattr(param.ty, "shape", None) or getattr(param.ty, "values", None) or ()
            result.defined += [f"dimension {k} of {name}" for k, dim in enumerate(dims) if dim is var]
    for body in bodies(function):
        for binding in body.bindings():
            if isinstance(binding, MatchShape):
                for dim in binding.shape:
                    if isinstance(dim, SymVar) and not symbols.of(dim).is_input:
                        place = f"the size of {binding.var.name}, at run time"
                        symbols.of(dim).defined.append(place)
    return symbols


def value_of(expr: SymExpr, at: Mapping[SymVar, int]) -> int:
    """The value; 0 where these sizes divide by zero, as in kernels' costs (runtime/expression.py)."""
    try:
        return evaluate(expr, at)
    except ZeroDivisionError:
        return 0
