"""Symbolic integers: the canonical form keeps the value, is unique where it is said to be, and prints as Python."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from relaxlite.ir.symbolic import (
    SymExpr,
    SymVar,
    as_int,
    ceildiv,
    evaluate,
    product,
    smax,
    smin,
    substitute,
    sym,
    syms,
    to_text,
)
from tests.support import tiers

n, m, k = SymVar("n", lower=None), SymVar("m", lower=None), SymVar("k", lower=None)
NAMES: dict[str, Any] = {"n": n, "m": m, "k": k}
INTS = st.integers(-12, 12)
VALUES = st.fixed_dictionaries({v: INTS for v in (n, m, k)})

# A program is text: the one form that our expressions, Python's integers and sympy can all run.
LEAVES = st.sampled_from(["n", "m", "k"]) | INTS.map(lambda value: f"({value})")


def _combine(children: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    infix = st.tuples(children, st.sampled_from(["+", "-", "*", "//", "%"]), children).map(
        "({0[0]} {0[1]} {0[2]})".format
    )
    by_const = st.tuples(children, st.sampled_from(["//", "%"]), st.integers(1, 9)).map("({0[0]} {0[1]} {0[2]})".format)
    call = st.tuples(st.sampled_from(["min", "max"]), children, children).map("{0[0]}({0[1]}, {0[2]})".format)
    return infix | by_const | call | children.map("(-{})".format)


PROGRAMS = st.recursive(LEAVES, _combine, max_leaves=8)


def build(program: str, **names: Any) -> SymExpr | None:
    """The program run on symbols; None where it divides by a constant zero."""
    try:
        return sym(eval(program, {"min": smin, "max": smax}, NAMES | names))
    except ZeroDivisionError:
        return None


def run(program: str, values: dict[SymVar, int]) -> int | None:
    try:
        return int(eval(program, {"min": min, "max": max}, {v.name: value for v, value in values.items()}))
    except ZeroDivisionError:
        return None


@settings(max_examples=tiers.examples(600), deadline=None)
@given(PROGRAMS, VALUES)
def test_the_canonical_form_keeps_the_value(program: str, values: dict[SymVar, int]) -> None:
    expr, expected = build(program), run(program, values)
    if expr is not None and expected is not None:
        assert evaluate(expr, values) == expected


def test_what_is_mentioned_many_times_is_computed_once() -> None:
    expr: SymExpr = n  # written out, it would mention n 2**64 times
    value = 3
    for step in range(64):
        expr, value = smin(expr, m + step) * smax(expr + step, 7), min(value, 2 + step) * max(value + step, 7)
    assert evaluate(expr, {n: 3, m: 2}) == value


@settings(max_examples=tiers.examples(300), deadline=None)
@given(PROGRAMS)
def test_the_text_is_python_and_gives_the_same_object(program: str) -> None:
    expr = build(program)
    if expr is not None:
        assert build(str(expr)) is expr


@settings(max_examples=tiers.examples(300), deadline=None)
@given(PROGRAMS, PROGRAMS, PROGRAMS, VALUES)
def test_substitution_is_simultaneous_and_commutes_with_evaluation(
    program: str, for_n: str, for_m: str, values: dict[SymVar, int]
) -> None:
    expr, new_n, new_m = build(program), build(for_n), build(for_m)
    inner_n, inner_m = run(for_n, values), run(for_m, values)
    if expr is None or new_n is None or new_m is None or inner_n is None or inner_m is None:
        return
    expected = run(program, {**values, n: inner_n, m: inner_m})
    try:
        replaced = substitute(expr, {n: new_n, m: new_m})
    except ZeroDivisionError:
        return
    if expected is not None:
        assert evaluate(replaced, values) == expected


@settings(max_examples=tiers.examples(100), deadline=None)
@given(PROGRAMS, VALUES)
def test_sympy_agrees(program: str, values: dict[SymVar, int]) -> None:
    symbols = {name: sympy.Symbol(name, integer=True) for name in NAMES}
    expr = build(program)
    if expr is None or run(program, values) is None:
        return
    theirs = eval(str(expr), {"min": sympy.Min, "max": sympy.Max}, symbols)
    numbers = {symbols[v.name]: value for v, value in values.items()}
    assert int(sympy.sympify(theirs).subs(numbers)) == evaluate(expr, values)


POLYNOMIALS = st.recursive(
    LEAVES,
    lambda children: st.tuples(children, st.sampled_from("+-*"), children).map("({0[0]} {0[1]} {0[2]})".format),
    max_leaves=10,
)


@settings(max_examples=tiers.examples(100), deadline=None)
@given(POLYNOMIALS, POLYNOMIALS)
def test_polynomials_are_the_same_object_just_where_sympy_finds_them_equal(first: str, second: str) -> None:
    symbols = {name: sympy.Symbol(name, integer=True) for name in NAMES}
    for left, right in ((first, second), (f"({first})*({second})", f"({second})*({first})")):
        is_equal = sympy.expand(eval(f"{left} - ({right})", {}, symbols)) == 0
        assert (build(left) is build(right)) == is_equal


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        ((n + 1) * 4 - n, "n*3 + 4"),
        (n * 4 // 4, "n"),
        (n * k // k, "n"),
        ((n * k + k + 3) // k, "n + (3 // k) + 1"),
        ((n * 4 + 5) // 4, "n + 1"),
        ((n * 2 + 1) // 4, "(n // 2)"),
        ((n * 2 + 1) % 4, "(n % 2)*2 + 1"),
        (n * 4 % 4, "0"),
        ((n * 5 + 7) % 4, "((n + 3) % 4)"),
        (((n + 3) // 4 + 1) // 2, "((n + 7) // 8)"),
        (-(-n // 4), "((n + 3) // 4)"),
        (ceildiv(n, 4), "((n + 3) // 4)"),
        (n // -4, "-((n + 3) // 4)"),
        (smin(n + 1, n + 3), "n + 1"),
        (smax(n + 1, smax(m, n)), "max(m, n + 1)"),
        ((n * 6 + k * 9) // (m * 3), "((k*3 + n*2) // m)"),
        (n * k * 3 % (m * k * 6), "k*(n % (m*2))*3"),
        (n // -m, "((-n) // m)"),
        ((n * k + m * k + 5) // (n + m), "k + (5 // (m + n))"),
        (smin(smin(n, m), smin(m, k)), "min(k, m, n)"),
        (sym(-7) // 2, "-4"),
        (-n, "-n"),
        (product([n, m, 2, n]), "m*n*n*2"),
        (3 - n * m, "-m*n + 3"),
    ],
)
def test_canonical_text(expr: SymExpr, text: str) -> None:
    assert str(expr) == text


def test_expressions_of_one_form_are_one_object() -> None:
    assert (n + m) * 2 is m * 2 + n * 2
    assert n // 4 + n % 4 is n % 4 + n // 4
    assert smin(n, m) is smin(m, n)
    assert (n + 1) - 1 is n
    assert sym(3) is sym(np.int64(3))
    assert len({n + 1, 1 + n, n}) == 2


def test_a_constant_equals_its_integer_and_nothing_else_does() -> None:
    assert n - n == 0
    assert sym(3) == 3 and sym(3) != 4
    assert hash(sym(3)) == hash(3)
    assert n != 3 and n != "n" and n is not None
    assert {3: "three"}[sym(3)] == "three"  # type: ignore[index]


def test_variables_of_one_name_differ() -> None:
    other = SymVar("n")
    assert other is not n and other - n != 0
    assert to_text(other + n, {other: "n_1", n: "n"}.__getitem__) == "n + n_1"


def test_text_does_not_depend_on_what_was_made_first() -> None:
    def text(*order: str) -> str:
        made = {name: SymVar(name) for name in order}
        a, b, c = made["a"], made["b"], made["c"]
        return str(smin(c, a) + b * a * 2 - (b + c) // 3 + a)

    assert text("a", "b", "c") == text("c", "a", "b") == "a - ((b + c) // 3) + min(a, c) + a*b*2"


@pytest.mark.parametrize("ask", [lambda: n < m, lambda: n >= 3, lambda: max(n, m), lambda: sorted([n, m])])
def test_order_raises_with_advice(ask: Any) -> None:
    with pytest.raises(TypeError, match=r"no order before run time; ask Analyzer.can_prove_le"):
        ask()


def test_truth_and_int_raise_with_advice() -> None:
    with pytest.raises(TypeError, match="truth of n is not known before run time; ask an Analyzer"):
        bool(n)
    with pytest.raises(TypeError, match="n \\+ 1 has no value before run time; use evaluate"):
        int(n + 1)
    assert int(n - n + 3) == 3 and bool(n - n) is False
    assert as_int(n) is None and as_int(n - n + 2) == 2


def test_numbers_that_are_not_integers_are_refused() -> None:
    for make in (lambda: sym(2.5), lambda: n + 0.5, lambda: n // 2.0, lambda: n * 1.0):  # type: ignore[arg-type,operator]
        with pytest.raises(TypeError):
            make()


def test_numpy_integers_are_integers() -> None:
    assert n + np.int64(3) is n + 3
    assert np.int64(3) * n is n * 3
    assert n // np.int32(3) is n // 3
    assert syms(np.array([1, 2])) == (sym(1), sym(2))


def test_division_by_zero_raises() -> None:
    for make in (lambda: n // 0, lambda: n % 0, lambda: substitute(n // m, {m: 0})):
        with pytest.raises(ZeroDivisionError):
            make()


def test_a_missing_value_is_named() -> None:
    with pytest.raises(KeyError, match="no value for symbol m"):
        evaluate(n + m, {n: 1})


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"divisor": 0}, "symbol x: divisor must be at least 1, got 0"),
        ({"lower": 5, "upper": 4}, "symbol x: lower bound 5 exceeds upper bound 4"),
        ({"lower": 5, "upper": 7, "divisor": 4}, "symbol x: no multiple of 4 lies in \\[5, 7\\]"),
    ],
)
def test_impossible_facts_are_refused(facts: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SymVar("x", **facts)


def test_free_vars_are_in_order_of_occurrence() -> None:
    assert (m * 2 + n // k).free_vars() == (m, n, k)
    assert sym(3).free_vars() == ()


def test_threads_that_make_the_same_expression_get_the_same_object() -> None:
    n, m = SymVar("n"), SymVar("m")
    barrier = threading.Barrier(4)

    def make(_: int) -> list[SymExpr]:
        made = []
        for k in range(2000):
            if k % 100 == 0:
                barrier.wait()
            made.append((n * (k + 2) + m) // (k + 5) + m * k)
        return made

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            first, *others = threads.map(make, range(4))
    finally:
        sys.setswitchinterval(before)
    assert all(a is b for other in others for a, b in zip(first, other, strict=True))
