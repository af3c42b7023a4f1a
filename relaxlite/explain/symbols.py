"""Symbols of a model by unique names, the places that define them, and expressions as JSON."""

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

DEFAULT_SIZE = 64  # initial value of a symbol, within its bounds


@dataclass(slots=True)
class Symbol:
    """Symbol under a unique name, with the places that define it."""

    name: str
    var: SymVar
    defined: list[str] = field(default_factory=list)
    is_input: bool = False  # bound by the shapes of the arguments

    @property
    def default_value(self) -> int:
        """The initial value, within the bounds."""
        return self.nearest_legal_value(DEFAULT_SIZE)

    def nearest_legal_value(self, value: int) -> int:
        """The smallest legal value from `value` on, or the largest below."""
        lower, upper, divisor = self.var.lower or 0, self.var.upper, self.var.divisor
        value = -(-max(value, lower) // divisor) * divisor
        return value if upper is None else min(value, upper // divisor * divisor)


class Symbols:
    """Unique names of symbols: a second symbol of the name `n` is called `n_1`."""

    def __init__(self) -> None:
        self._by_var: dict[SymVar, Symbol] = {}
        self._names: set[str] = set()

    def __iter__(self) -> Iterator[Symbol]:
        return iter(self._by_var.values())

    def of(self, var: SymVar) -> Symbol:
        """The entry of a symbol, created on first use."""
        if var not in self._by_var:
            name, count = var.name, 0
            while name in self._names:
                count += 1
                name = f"{var.name}_{count}"
            self._names.add(name)
            self._by_var[var] = Symbol(name, var)
        return self._by_var[var]

    def add_all(self, expr: SymExpr) -> None:
        """Create entries of all symbols in an expression."""
        for var in expr.free_vars():
            self.of(var)

    def name(self, var: SymVar) -> str:
        """Unique name of a symbol."""
        return self.of(var).name

    def text(self, expr: SymExpr) -> str:
        """An expression with unique names."""
        return to_text(expr, self.name)

    def values(self, values_by_name: Mapping[str, int]) -> dict[SymVar, int]:
        """Values of all symbols: given ones by name, else initial ones."""
        return {s.var: values_by_name.get(s.name, s.default_value) for s in self._by_var.values()}

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
    """Table of expressions without duplicates; the page refers to figures by number."""

    def __init__(self, symbols: Symbols) -> None:
        self._symbols = symbols
        self._numbers: dict[SymExpr, int] = {}

    def number(self, expr: SymExpr) -> int:
        """Number of an expression; added on first use."""
        self._symbols.add_all(expr)
        return self._numbers.setdefault(expr, len(self._numbers))

    def to_json(self) -> list[dict[str, Any]]:
        """Text and tree of each expression."""
        return [{"text": self._symbols.text(expr), "tree": self._symbols.tree(expr)} for expr in self._numbers]


def find_symbols(function: Function) -> Symbols:
    """Symbols that a function's arguments and MatchShapes define, with the places that define them.

    A symbol may have several places: each argument with the symbol as a dimension is one, and is checked.
    """
    symbols = Symbols()
    names = function.attrs.get(INPUT_NAMES)
    input_names = names if isinstance(names, tuple) else tuple(p.name for p in function.params)
    for name, param in zip(input_names, function.params, strict=True):
        for var in defined_symbols(param.ty):
            symbol = symbols.of(var)
            symbol.is_input = True
            dims = getattr(param.ty, "shape", None) or getattr(param.ty, "values", None) or ()
            symbol.defined += [f"dimension {k} of {name}" for k, dim in enumerate(dims) if dim is var]
    for body in bodies(function):
        for binding in body.bindings():
            if isinstance(binding, MatchShape):
                for dim in binding.shape:
                    if isinstance(dim, SymVar) and not symbols.of(dim).is_input:
                        place = f"the size of {binding.var.name}, at run time"
                        symbols.of(dim).defined.append(place)
    return symbols


def value_of(expr: SymExpr, at: Mapping[SymVar, int]) -> int:
    """Value of an expression; 0 where these sizes divide by zero, as in kernel costs (runtime/expression.py)."""
    try:
        return evaluate(expr, at)
    except ZeroDivisionError:
        return 0
