"""The Analyzer: what it says is true for every assignment that satisfies the facts, and it proves what passes ask."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaxlite.ir.analyzer import Analyzer, sample_values
from relaxlite.ir.symbolic import SymExpr, SymVar, ceildiv, evaluate, smax, smin, sym

# Soundness: random facts, random questions, all small assignments.

FREE = SymVar("n"), SymVar("m", lower=1), SymVar("d", divisor=4), SymVar("u", upper=6), SymVar("z", lower=None)
LOOP = SymVar("i")
DOMAIN = (range(6), range(1, 5), range(0, 13, 4), range(7), range(-3, 4))
NAMES: dict[str, Any] = {v.name: v for v in (*FREE, LOOP)}
CONSTS = st.integers(-6, 20).map(lambda value: f"({value})")
SIZES = st.sampled_from(["n", "m", "d", "u"])


def _combine(children: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    infix = st.tuples(children, st.sampled_from(["+", "-", "*", "//", "%"]), children).map("({0[0]} {0[1]} {0[2]})".format)
    by_const = st.tuples(children, st.sampled_from(["*", "//", "%"]), st.integers(2, 8)).map("({0[0]} {0[1]} {0[2]})".format)
    call = st.tuples(st.sampled_from(["min", "max"]), children, children).map("{0[0]}({0[1]}, {0[2]})".format)
    return infix | by_const | call


def programs(leaves: st.SearchStrategy[str], max_leaves: int) -> st.SearchStrategy[str]:
    return st.recursive(leaves, _combine, max_leaves=max_leaves)


@dataclass
class Situation:
    """Facts as text, for Python to check and for an Analyzer to use."""

    facts: list[tuple[str, str, str]]
    loop: tuple[str, str]

    def analyzer(self) -> Analyzer:
        result = Analyzer()
        for kind, a, b in self.facts:
            result = (result.assume_le if kind == "<=" else result.assume_equal)(build(a), build(b))
        return result.with_range(LOOP, build(self.loop[0]), build(self.loop[1]))

    def assignments(self, limit: int) -> Iterator[dict[SymVar, int]]:
        checks = [compile(f"{a} {op} {b}", "fact", "eval") for op, a, b in self.facts]
        first, extent = (compile(text, "loop", "eval") for text in self.loop)
        choices = list(product(*DOMAIN))
        random.Random(0).shuffle(choices)
        for values in choices:
            names = {v.name: value for v, value in zip(FREE, values, strict=True)} | {"min": min, "max": max}
            try:
                if all(eval(check, {}, names) for check in checks):
                    low = eval(first, {}, names)
                    for i in islice(range(low, low + eval(extent, {}, names)), limit):
                        yield {**dict(zip(FREE, values, strict=True)), LOOP: i}
            except ZeroDivisionError:
                continue


def build(program: str) -> SymExpr:
    return sym(eval(program, {"min": smin, "max": smax}, NAMES))


def _is_buildable(text: str) -> bool:
    try:
        build(text)
    except ZeroDivisionError:
        return False
    return True


SMALL = programs(SIZES | CONSTS, 3).filter(_is_buildable)
SITUATIONS = st.builds(
    Situation,
    st.lists(st.tuples(st.sampled_from(["<=", "<=", "=="]), SMALL, SMALL), max_size=3),
    st.tuples(st.just("0") | SMALL, SIZES | SMALL),
)
QUESTIONS = programs(st.sampled_from(["n", "m", "d", "u", "z", "i", "i"]) | CONSTS, 6).filter(_is_buildable)


@settings(max_examples=400, deadline=None)
@given(SITUATIONS, QUESTIONS, QUESTIONS, st.integers(1, 8))
def test_what_is_proven_is_true(situation: Situation, first: str, second: str, by: int) -> None:
    analyzer = situation.analyzer()
    a, b = build(first), build(second)
    simple, (lower, upper) = analyzer.simplify(a), analyzer.bounds(a)
    claims: list[tuple[str, bool, Callable[[int, int], bool]]] = [
        ("a >= 0", analyzer.can_prove_nonneg(a), lambda x, y: x >= 0),
        ("a <= b", analyzer.can_prove_le(a, b), lambda x, y: x <= y),
        ("a < b", analyzer.can_prove_lt(a, b), lambda x, y: x < y),
        ("a == b", analyzer.can_prove_equal(a, b), lambda x, y: x == y),
        ("a != b", analyzer.can_prove_ne(a, b), lambda x, y: x != y),
        ("by divides a", analyzer.can_prove_divisible(a, by), lambda x, y: x % by == 0),
        ("b divides a", analyzer.can_prove_divisible(a, b), lambda x, y: y == 0 or x % y == 0),
        (f"a >= {lower}", lower is not None, lambda x, y: x >= (lower or 0)),
        (f"a <= {upper}", upper is not None, lambda x, y: x <= (upper or 0)),
    ]
    proven = [(text, holds) for text, is_proven, holds in claims if is_proven]
    for values in islice(situation.assignments(limit=3), 60):
        try:
            x, y = evaluate(a, values), evaluate(b, values)
        except ZeroDivisionError:
            continue
        for text, holds in proven:
            assert holds(x, y), f"{text} is false: a = {a}, b = {b}, facts {situation}, at {values}"
        assert evaluate(simple, values) == x, f"{a} -> {simple}, facts {situation}, at {values}"
