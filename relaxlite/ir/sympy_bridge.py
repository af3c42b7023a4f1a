"""Conversion of symbolic integers to and from sympy: `rl.to_sympy`, `rl.from_sympy`.

>>> n = SymVar("n", lower=1)
>>> expr, symbols = to_sympy(n * 2 + n // 4)
>>> print(expr, from_sympy(expr * 2, symbols))
2*n + floor(n/4) n*4 + n//4*2

sympy comes with the extra `sympy` (`pip install "relaxlite[sympy]"`); the compiler itself never imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

from relaxlite.errors import InvalidArgumentError
from relaxlite.ir.symbolic import BinaryAtom, FloorDiv, FloorMod, IntLike, Min, SymExpr, SymVar, smax, smin, sym


def to_sympy(expr: IntLike) -> tuple[Any, dict[Any, SymVar]]:
    """Convert to sympy: (expression, sympy symbol -> variable).

    Symbols are integers, positive or nonnegative by the variable's lower bound. Symbols have unique names. Raises
    ModuleNotFoundError without sympy.
    """
    import sympy

    names: dict[str, int] = {}
    symbols: dict[SymVar, Any] = {}
    for var in sym(expr).free_vars():
        count = names[var.name] = names.get(var.name, -1) + 1
        lower = var.lower if var.lower is not None else -1
        assumptions = {"positive": True} if lower > 0 else {"nonnegative": True} if lower == 0 else {}
        symbols[var] = sympy.Symbol(f"{var.name}_{count}" if count else var.name, integer=True, **assumptions)

    def atom(a: SymExpr) -> Any:
        if isinstance(a, SymVar):
            return symbols[a]
        assert isinstance(a, BinaryAtom)
        left, right = of(a.a), of(a.b)
        if isinstance(a, FloorDiv):
            return sympy.floor(left / right)
        if isinstance(a, FloorMod):
            return sympy.Mod(left, right)
        return (sympy.Min if isinstance(a, Min) else sympy.Max)(left, right)

    def of(e: SymExpr) -> Any:
        terms = (sympy.Mul(coefficient, *map(atom, monomial)) for monomial, coefficient in e.terms)
        return sympy.Add(e.const, *terms)

    return of(sym(expr)), {symbol: var for var, symbol in symbols.items()}


def from_sympy(expr: Any, symbols: Mapping[Any, SymVar]) -> SymExpr:
    """Convert from sympy: integers, sums, products, powers, floor(a/b), Mod, Min and Max. `symbols`: as of `to_sympy`.

    Raises InvalidArgumentError for a symbol without a variable, or any other function.
    """
    import sympy

    def of(e: Any) -> SymExpr:
        if e.is_Integer:
            return sym(int(e))
        if e.is_Symbol:
            if e not in symbols:
                raise InvalidArgumentError(f"{e} stands for no variable; known: {', '.join(map(str, symbols))}")
            return sym(symbols[e])
        if isinstance(e, sympy.floor):
            numerator, denominator = sympy.fraction(sympy.together(e.args[0]))
            return of(sympy.expand(numerator)) // of(denominator)
        if isinstance(e, sympy.Pow) and e.exp.is_Integer and e.exp > 0:
            return reduce(lambda a, b: a * b, [of(e.base)] * int(e.exp))
        if isinstance(e, sympy.Mod):
            return of(e.args[0]) % of(e.args[1])
        for kind, combine in _folds(sympy).items():
            if isinstance(e, kind):
                return reduce(combine, map(of, e.args))
        raise InvalidArgumentError(f"{e} is no expression of sizes; hint: sums, products, floor, Mod, Min and Max are")

    return of(sympy.sympify(expr))


def _folds(sympy: Any) -> dict[Any, Any]:
    return {
        sympy.Add: lambda a, b: a + b,
        sympy.Mul: lambda a, b: a * b,
        sympy.Min: smin,
        sympy.Max: smax,
    }
