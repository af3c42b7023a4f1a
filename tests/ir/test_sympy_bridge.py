"""Shapes go to sympy and come back with the same values."""

from __future__ import annotations

import itertools

import pytest
import sympy

from relaxlite.errors import InvalidArgumentError
from relaxlite.ir.symbolic import SymExpr, SymVar, evaluate, smax, smin, sym
from relaxlite.ir.sympy_bridge import from_sympy, to_sympy

N, M = SymVar("n", lower=1), SymVar("m")
EXPRESSIONS = [
    sym(7), N * 2 + 3, N * M - M * M, (N + 3) // 4, (N * M + 5) % 6, smin(N, M + 2), smax(N, 4) * 2, (N // 2 + M) // 3,
    smin(smax(N, M), N * 3) - 1, (N + M) % 4 // 2, N // N,
]  # fmt: skip


@pytest.mark.parametrize("expr", EXPRESSIONS, ids=str)
def test_there_and_back_the_values_are_the_same(expr: SymExpr) -> None:
    theirs, symbols = to_sympy(expr)
    back = from_sympy(theirs, symbols)
    for n, m in itertools.product((1, 2, 5, 9), (0, 3, 7)):
        values, own = {N: n, M: m}, {symbol: {N: n, M: m}[var] for symbol, var in symbols.items()}
        assert int(theirs.subs(own)) == evaluate(back, values) == evaluate(expr, values)


def test_bounds_become_assumptions_and_equal_names_different_symbols() -> None:
    other = SymVar("n", lower=0)
    _, symbols = to_sympy(N + other + M)
    by_var = {var: symbol for symbol, var in symbols.items()}
    assert by_var[N].is_positive and by_var[other].is_nonnegative and by_var[M].is_integer
    assert len({str(symbol) for symbol in symbols}) == 3


def test_what_is_simplified_there_comes_back() -> None:
    theirs, symbols = to_sympy(N * M + N)
    assert from_sympy(sympy.factor(theirs), symbols) is N * M + N


def test_what_is_no_size_is_refused() -> None:
    x = sympy.Symbol("x", integer=True)
    with pytest.raises(InvalidArgumentError, match="x stands for no variable"):
        from_sympy(x + 1, {})
    with pytest.raises(InvalidArgumentError, match=r"sin\(x\) is no expression of sizes"):
        from_sympy(sympy.sin(x), {x: N})
