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

from relaxlite.ir import intervals
from relaxlite.ir.analyzer import Analyzer, sample_values
from relaxlite.ir.symbolic import IntLike, SymExpr, SymVar, ceildiv, evaluate, smax, smin, sym
from tests.support import tiers

# Soundness: random facts, random questions, all small assignments.

FREE = SymVar("n"), SymVar("m", lower=1), SymVar("d", divisor=4), SymVar("u", upper=6), SymVar("z", lower=None)
LOOP = SymVar("i")
DOMAIN = (range(6), range(1, 5), range(0, 13, 4), range(7), range(-3, 4))
NAMES: dict[str, Any] = {v.name: v for v in (*FREE, LOOP)}
CONSTS = st.integers(-6, 20).map(lambda value: f"({value})")
SIZES = st.sampled_from(["n", "m", "d", "u"])


def _combine(children: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    binary = "({0[0]} {0[1]} {0[2]})".format
    infix = st.tuples(children, st.sampled_from(["+", "-", "*", "//", "%"]), children).map(binary)
    by_const = st.tuples(children, st.sampled_from(["*", "//", "%"]), st.integers(2, 8)).map(binary)
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


@settings(max_examples=tiers.examples(150), deadline=None)
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


COEFS = st.integers(-20, 20)
DIVISORS = st.integers(1, 24)


@settings(max_examples=tiers.examples(250), deadline=None)
@given(
    st.tuples(COEFS, COEFS, COEFS, COEFS),
    st.tuples(st.integers(-4, 4), st.integers(1, 9), st.integers(-4, 4), st.integers(1, 9)),
    st.tuples(st.sampled_from(["//", "%"]), DIVISORS, st.sampled_from(["//", "%", "-"]), DIVISORS),
)
def test_index_arithmetic_of_loops_keeps_its_value(
    coefs: tuple[int, ...], loops: tuple[int, ...], ops: tuple[str, int, str, int]
) -> None:
    i, j, d = SymVar("i"), SymVar("j"), SymVar("d", divisor=8)
    first_i, extent_i, first_j, extent_j = loops
    analyzer = Analyzer().with_range(i, first_i, extent_i).with_range(j, first_j, extent_j)
    index = i * coefs[0] + j * coefs[1] + d * coefs[2] + coefs[3]
    for op, by in (ops[:2], ops[2:]):
        index = index // by if op == "//" else index % by if op == "%" else index - by
    simple, (lower, upper) = analyzer.simplify(index), analyzer.bounds(index)
    for x, y, z in product(range(first_i, first_i + extent_i), range(first_j, first_j + extent_j), (0, 8, 64)):
        value = evaluate(index, {i: x, j: y, d: z})
        assert evaluate(simple, {i: x, j: y, d: z}) == value, f"{index} -> {simple}"
        assert (lower is None or lower <= value) and (upper is None or value <= upper)


FACTORS = st.sampled_from(["n", "m", "u", "((n + 1) // 2)", "((u + 3) // 4)", "(n + m)", "max(n, u)", "min(m, u)"])
PRODUCTS = st.tuples(st.integers(1, 4).map(str), st.lists(FACTORS, max_size=3)).map(lambda t: "*".join([t[0], *t[1]]))


@settings(max_examples=tiers.examples(150), deadline=None)
@given(PRODUCTS, PRODUCTS)
def test_sizes_that_are_proven_ordered_are_ordered(first: str, second: str) -> None:
    n, m, _, u, _ = FREE
    a, b = build(first), build(second)
    if Analyzer().can_prove_le(a, b):
        for x, y, z in product(range(6), range(1, 6), range(7)):
            assert evaluate(a, {n: x, m: y, u: z}) <= evaluate(b, {n: x, m: y, u: z}), f"{a} <= {b}"


def test_interval_arithmetic_holds_what_it_bounds() -> None:
    ends = (None, -3, -1, 0, 2, 3)
    boxes = [(a, b) for a in ends for b in ends if a is None or b is None or a <= b]
    ops: list[tuple[Callable[[Any, Any], Any], Callable[[int, int], int]]] = [
        (intervals.add, lambda x, y: x + y),
        (intervals.multiply, lambda x, y: x * y),
        (intervals.floordiv, lambda x, y: x // y if y else 0),
        (intervals.floormod, lambda x, y: x % y if y else 0),
        (intervals.minimum, min),
        (intervals.maximum, max),
    ]
    for op, run in ops:
        is_division = op in (intervals.floordiv, intervals.floormod)
        for a, b in product(boxes, boxes):
            low, high = op(a, b)
            for x, y in product(_members(a), _members(b)):
                if y != 0 or not is_division:
                    assert (low is None or low <= run(x, y)) and (high is None or run(x, y) <= high), (op, a, b, x, y)


def _members(box: intervals.Interval) -> range:
    return range(-9 if box[0] is None else box[0], (9 if box[1] is None else box[1]) + 1, 3)


# Power: what passes ask.

n, m, k, h, w = (SymVar(name) for name in "nmkhw")
batch, seq, height, width = (SymVar(name, lower=1) for name in ("batch", "seq", "height", "width"))
i, j = SymVar("i", lower=None), SymVar("j", lower=None)
blocked = SymVar("blocked", divisor=16)
short = SymVar("short", lower=1, upper=512)
ROOT = Analyzer()


def loops(*extents: IntLike) -> Analyzer:
    """0 <= i < extents[0], 0 <= j < extents[1]."""
    analyzer = ROOT
    for var, extent in zip((i, j), extents, strict=False):
        analyzer = analyzer.with_range(var, 0, extent)
    return analyzer


def aligned(size: SymExpr) -> SymExpr:
    return ceildiv(size, 64) * 64


ORDERED: list[tuple[Analyzer, IntLike, IntLike]] = [
    # division
    (ROOT, n, (n + 15) // 16 * 16),
    (ROOT, n // 16 * 16, n),
    (ROOT, ceildiv(n, 16) * 16, n + 15),
    (ROOT, n, ceildiv(n, k) * k),
    (ROOT, n // k * k, n),
    (ROOT, n % k + 1, k),
    (ROOT, n // 2 * 2 + m // 2 * 2, n + m),
    (ROOT, n // 2 + m // 2, (n + m) // 2),
    (ROOT, ceildiv(n + m, 16), ceildiv(n, 16) + ceildiv(m, 16)),
    (ROOT.assume_le(n, m), ceildiv(n, 16), ceildiv(m, 16)),
    (ROOT.assume_le(n, m), n // 16 * 16 * batch, m // 16 * 16 * batch),
    # min and max
    (ROOT, n, smax(n, m)),
    (ROOT, smin(n, m), m),
    (ROOT, smin(n, m), smax(n, m)),
    (ROOT, smax(n, m), n + m),
    (ROOT, smin(n, m) * batch, n * batch),
    (ROOT, smax(n * 4, m * 4), smax(n * 8, m * 8)),
    (ROOT, n, smax(smax(smax(n, m), k), h)),
    # sizes in memory
    (ROOT, batch * seq * 384 * 4, batch * seq * 1536 * 4),
    (ROOT, batch * seq, batch * seq * seq),
    (ROOT, n, n * n),
    (ROOT, batch * n * seq * 4, batch * n * seq * n * 4),
    (ROOT, batch * short * short * 12, batch * short * 512 * 12),
    (ROOT, aligned(batch * seq * 4), aligned(batch * seq * 8)),
    (ROOT, batch * seq * 4, aligned(batch * seq * 4)),
    (ROOT, aligned(n) + aligned(m), aligned(n) + aligned(m) + aligned(n * m)),
    (ROOT, (height + 1) // 2 * ((width + 1) // 2) * 64, height * width * 64),
    (ROOT, (height + 3) // 4 * ((width + 3) // 4) * 64, (height + 1) // 2 * ((width + 1) // 2) * 64),
    (ROOT.assume_le(1, n), batch, batch * n),
    (ROOT.assume_le(n, 128), n * m, m * 128),
    (ROOT.assume_le(n, m).assume_le(m, k), n + m, k * 2),
    (ROOT.assume_le(k + n, 4096), batch * (k + n) * 128, batch * 4096 * 128),
    # loops
    (loops(n), i * 4 + 4, n * 4),
    (loops(n), 1, n),
    (loops(n, m), i * m + j + 1, n * m),
    (loops(n * m), i // m + 1, n),
    (loops(ceildiv(n, 16), smin(16, n - i * 16)), i * 16 + j + 1, n),
    (loops(ceildiv(n, 64)), 1, smin(64, n - i * 64)),
    (loops((n - 3) // 2 + 1), i * 2 + 3, n),
    (loops(n, i + 1), j + 1, n),
    (loops(n), (i + k) % n + 1, n),
    (loops(k), (i + 1) * n // k, n),
    (loops(k), i * n // k, (i + 1) * n // k),
    (loops(k, ceildiv(n, k)), smin(n, i * ceildiv(n, k) + j), n),
]


@pytest.mark.parametrize(("analyzer", "a", "b"), ORDERED, ids=lambda value: str(value) if value is not None else "")
def test_must_prove_le(analyzer: Analyzer, a: IntLike, b: IntLike) -> None:
    assert analyzer.can_prove_le(a, b)
    assert analyzer.can_prove_lt(a, sym(b) + 1)
    assert not analyzer.can_prove_lt(b, a)


EQUAL: list[tuple[Analyzer, IntLike, IntLike]] = [
    (ROOT, n // 16 * 16 + n % 16, n),
    (ROOT, smin(n, m) + smax(n, m), n + m),
    (ROOT, smin(n, 16) + smax(n - 16, 0), n),
    (ROOT, smax(smin(n, n + 5), 0), n),
    (ROOT, blocked // 16 * 16, blocked),
    (ROOT, (blocked + 15) // 16, blocked // 16),
    (ROOT, batch * seq * h * 64 // (h * 64), batch * seq),
    (ROOT.assume_equal(m, n * 4), m // 4 * 2, n * 2),
    (ROOT.assume_equal(n % 4, 0), n // 4 * 4, n),
    (ROOT.assume_equal(n, h * 64), batch * n // 64, batch * h),
    (ROOT.assume_equal(h * w, n), h * w * batch, n * batch),
    (ROOT.assume_equal(n, m).assume_equal(m, k), n * 4, k * 4),
    (ROOT.assume_equal(n % 4, 0).assume_equal(n, m), m // 4 * 4, n),
    (ROOT.assume_le(n, m).assume_le(m, n), n * 3, m * 3),
    (ROOT.assume_equal(n * 2 + m * 2, k * 2 + 8), n + m, k + 4),
]


@pytest.mark.parametrize(("analyzer", "a", "b"), EQUAL, ids=lambda value: str(value) if value is not None else "")
def test_must_prove_equal(analyzer: Analyzer, a: IntLike, b: IntLike) -> None:
    assert analyzer.can_prove_equal(a, b)
    assert not analyzer.can_prove_ne(a, b)
    assert not analyzer.can_prove_equal(a, sym(b) + 1)


SIMPLER: list[tuple[Analyzer, SymExpr, IntLike]] = [
    (loops(n, 16), (i * 16 + j) // 16, i),
    (loops(n, 16), (i * 16 + j) % 16, j),
    (loops(n, 16), (i * 16 + j) // 64, i // 4),
    (loops(n, 16), (i * 16 + j) % 64, i % 4 * 16 + j),
    (loops(n, 16), (i * 16 + j + 16) // 64, (i + 1) // 4),
    (loops(n, m), (i * m + j) // m, i),
    (loops(n, m), (i * m + j) % m, j),
    (loops(n, m), ((k * n + i) * m + j) // (n * m), k),
    (loops(n, m), ((k * n + i) * m + j) // m % n, i),
    (loops(9), i // 3 * 3 + i % 3, i),
    (loops(3), i // 3, 0),
    (loops(n), smin(i, n), i),
    (loops(n), smax(i - n, 0), 0),
    (ROOT, n // 4 * 4 + n % 4, n),
    (ROOT, n // 4 % 8 * 4 + n % 4 + n // 32 * 32, n),
    (ROOT, n % 16 % 4, n % 4),
    (ROOT, n // m // k, n // (m * k)),
    (ROOT, (blocked + 5) % 16, 5),
    (ROOT, (blocked + 5) // 16, blocked // 16),
    (ROOT, (blocked + n) % 16, n % 16),
    (ROOT, blocked // 4 * 4, blocked),
    (ROOT, smax(smax(n, m), n * 2), smax(m, n * 2)),
    (ROOT, SymVar("fixed", lower=7, upper=7) * n, n * 7),
    (ROOT.assume_equal(n, 16), n * m, m * 16),
    (ROOT.assume_equal(n % 4, 0), n // 4 * 4, n),
]


@pytest.mark.parametrize(("analyzer", "expr", "expected"), SIMPLER, ids=str)
def test_must_simplify(analyzer: Analyzer, expr: SymExpr, expected: IntLike) -> None:
    assert analyzer.simplify(expr) == sym(expected)


BOUNDS: list[tuple[Analyzer, SymExpr, tuple[int | None, int | None]]] = [
    (ROOT, n, (0, None)),
    (ROOT, i, (None, None)),
    (ROOT, short * 4 + 1, (5, 2049)),
    (ROOT, batch * short * 768, (768, None)),
    (ROOT, SymVar("v", lower=1, upper=100, divisor=16) + 0, (16, 96)),
    (ROOT, aligned(short * 3), (64, 1536)),
    (ROOT, n % 16, (0, 15)),
    (ROOT, smin(n, 16), (0, 16)),
    (ROOT, smax(n, 16), (16, None)),
    (ROOT, i * i, (0, None)),
    (ROOT, n - n // 2, (0, None)),
    (loops(n), n - i, (1, None)),
    (loops(9), i // 3, (0, 2)),
    (ROOT, batch - n % batch, (1, None)),
    (ROOT, n - n // batch * batch, (0, None)),
    (loops(batch), (n - 1) // batch * (batch - i), (None, None)),
    (ROOT.assume_le(n, 7), n * 2, (0, 14)),
    (ROOT.assume_le(n + m, 10), n * 3, (0, 30)),
]


@pytest.mark.parametrize(("analyzer", "expr", "expected"), BOUNDS, ids=str)
def test_must_bound(analyzer: Analyzer, expr: SymExpr, expected: tuple[int | None, int | None]) -> None:
    assert analyzer.bounds(expr) == expected


@pytest.mark.parametrize(
    ("a", "by", "is_proven"),
    [
        (blocked * n + 32, 16, True),
        (blocked * n, 16 * n, True),
        (n * 12, 4, True),
        (n // 4 * 4, 4, True),
        (n * m * 6, n * 3, True),
        (smin(blocked, 64), 16, True),
        (sym(12), 4, True),
        (sym(0), n, True),
        (n, 2, False),
        (blocked + 8, 16, False),
        (n * m, k, False),
        (n, 0, False),
    ],
    ids=str,
)
def test_divisibility(a: SymExpr, by: IntLike, is_proven: bool) -> None:
    assert ROOT.can_prove_divisible(a, by) == is_proven


def test_difference() -> None:
    assert ROOT.can_prove_ne(n + 1, 0)
    assert ROOT.can_prove_ne(n * 2, m * 2 + 1)
    assert ROOT.can_prove_ne(n * 2 + 1, m * 4)
    assert ROOT.can_prove_ne(blocked, n * 16 + 8)
    assert not ROOT.can_prove_ne(n, m)
    assert not ROOT.can_prove_ne(n, 0)


@pytest.mark.parametrize(
    ("analyzer", "a", "b"),
    [
        (ROOT, 1, n),
        (ROOT, batch * seq * 4, 1000),
        (ROOT, batch * seq * 4, batch * n * 4),
        (ROOT, n * m, n * m * k),
        (ROOT, ceildiv(n, 16) * 16, n),
        (ROOT, smax(n, m), n),
        (ROOT, n, n // 2 * 2),
        (loops(n), n, i),
        (loops(n), i + 2, n),
        (ROOT.assume_le(n, m), m, n),
        (ROOT.assume_equal(n, m), n, k),
    ],
    ids=lambda value: str(value) if value is not None else "",
)
def test_what_is_not_true_is_not_proven(analyzer: Analyzer, a: IntLike, b: IntLike) -> None:
    assert not analyzer.can_prove_le(a, b)


# Manners.


def test_an_analyzer_does_not_change() -> None:
    base = Analyzer()
    assert not base.can_prove_le(n, m)
    assert base.assume_le(n, m).can_prove_le(n, m)
    assert base.with_range(i, 0, n).can_prove_lt(i, n)
    assert base.assume_equal(n, m).simplify(m) is base.assume_equal(n, m).simplify(n)
    assert not base.can_prove_le(n, m) and base.simplify(n) is n


def test_the_order_of_questions_does_not_matter() -> None:
    questions = [(a, b) for analyzer, a, b in ORDERED if analyzer is ROOT]
    forwards, backwards = Analyzer(), Analyzer()
    asked = [forwards.can_prove_le(a, b) for a, b in questions]
    assert asked == [backwards.can_prove_le(a, b) for a, b in reversed(questions)][::-1]


def test_a_range_in_terms_of_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="the range of i is given in terms of itself: from 0 to i"):
        Analyzer().with_range(i, 0, i + 1)


def test_a_range_replaces_declared_bounds() -> None:
    x = SymVar("x", lower=0)
    assert Analyzer().with_range(x, -3, 5).bounds(x) == (-3, 1)


def test_a_division_by_what_turns_out_to_be_zero_stays() -> None:
    assert Analyzer().assume_equal(m, 0).simplify(n // m) is n // m
    assert Analyzer().with_range(i, 0, 1).simplify(n % i) is n % i


def test_many_sizes_are_compared_in_reasonable_time() -> None:
    sizes = [aligned(batch * (seq if size % 2 else n) * size * 37) for size in range(1, 41)]
    analyzer, largest = Analyzer(), smax(*sizes)
    assert all(analyzer.can_prove_le(size, largest) for size in sizes)
    assert analyzer.can_prove_le(largest, sum(sizes, sym(0)))
    assert analyzer.simplify(largest) is smax(sizes[-1], sizes[-2])


def test_samples_keep_bounds_and_divisors() -> None:
    rng = random.Random(0)
    variables = (n, batch, blocked, short, i, SymVar("v", lower=None, upper=-5), SymVar("w", lower=30, divisor=7))
    for _ in range(200):
        for var, value in sample_values(variables, rng, 20).items():
            assert value % var.divisor == 0
            assert (var.lower is None or value >= var.lower) and (var.upper is None or value <= var.upper)
    assert sample_values(variables, random.Random(1)) == sample_values(variables, random.Random(1))
