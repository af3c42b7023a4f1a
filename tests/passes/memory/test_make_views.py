"""Views without copies: slices and gathers of contiguous ranges (make_views), concatenations (join_parts)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import relaxlite as rl
from relaxlite import config
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.ir.module import IRModule
from relaxlite.ir.verifier import verify
from relaxlite.passes.context import PassContext
from relaxlite.passes.graph.decompose import decompose
from relaxlite.passes.graph.reachable import drop_unused
from relaxlite.passes.loops.legalize import legalize
from relaxlite.passes.memory.join_parts import join_parts
from relaxlite.passes.memory.lower_dps import lower_dps
from relaxlite.passes.memory.make_views import make_views
from relaxlite.runtime.module import Executable
from relaxlite.target import Target
from tests.support import tiers
from tests.support.ir_text import module
from tests.support.random_graphs import arguments, assert_same_results, graphs

SYMBOLS = 'n = symbol("n", lower=1)\nm = symbol("m")\nk = symbol("k")\n'


def graph(statements: str, result: str, params: str) -> IRModule:
    body = "\n".join(f"    {line}" for line in statements.strip().split("\n"))
    return module(f"{SYMBOLS}@function\ndef main({params}):\n{body}\n    return {result}\n")


def context() -> PassContext:
    return PassContext(Target.parse("llvm"))


def viewed(given: IRModule, notes: PassContext | None = None) -> IRModule:
    made = drop_unused(make_views(legalize(decompose(given)), notes or context()))
    verify(made, "lowered")
    return made


def assert_runs_the_same(given: IRModule, cases: list[tuple[Any, ...]]) -> Executable:
    """Compiled natively and interpreted, against the oracle; inputs stay as they are."""
    exe = rl.compile(given)
    with config.override(interpret=True):
        interpreted = Executable(exe.data)
    for args in cases:
        before = [np.copy(a) for a in args]
        expected = Interpreter(given).run("main", *args)
        for run in (exe, interpreted):
            got = run(*args)
            assert_same_results(got, expected)
            for array in got if isinstance(got, tuple) else (got,):
                array[...] = 7  # results are the caller's own: what is written to them reaches nothing
            for array, kept in zip(args, before, strict=True):
                np.testing.assert_array_equal(array, kept)
    return exe


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


VIEWS = {
    "a slice of the leading dimension": (
        "s: f32[m, 4] = slice(x, shape(k, 0), shape(m, 4))",
        "x: f32[k + m, 4], q: f32[k], r: f32[m]",
        "memory.part(x, shape(k*16), shape(m, 4)",
        [(7, 4), (0, 3), (3, 0)],
        lambda k, m: (floats(k + m, 4), floats(k), floats(m)),
    ),
    "a slice behind dimensions of one element": (
        "s: f32[1, m, 4] = slice(x, shape(0, 2, 0), shape(1, m, 4))",
        "x: f32[1, m + 2, 4], r: f32[m]",
        "memory.part(x, shape(32), shape(1, m, 4)",
        [(7, 4), (0, 0)],
        lambda k, m: (floats(1, m + 2, 4), floats(m)),
    ),
    "the last row": (
        "s: f32[1, 4] = slice(x, shape(n - 1, 0), shape(1, 4))",
        "x: f32[n, 4]",
        "memory.part(x, shape(n*16 - 16), shape(1, 4)",
        [(1, 0), (6, 0)],
        lambda n, _: (floats(n, 4),),
    ),
    "a gather of one place": (
        's: f32[m, k] = gather(x, const(-1, "int64"), axis=0)',
        "x: f32[3, m, k]",
        "memory.part(x, shape(k*m*8), shape(m, k)",
        [(7, 4), (0, 3), (1, 1)],
        lambda k, m: (floats(3, m, k),),
    ),
    "a transposition that moves dimensions of one": (
        "t: f32[m, 1] = reshape(x, shape(m, 1))\ns: f32[1, m] = transpose(t, axes=(1, 0))",
        "x: f32[m]",
        "reshape(",
        [(0, 0), (0, 5)],
        lambda _, m: (floats(m),),
    ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of(name: str) -> None:
    statements, params, expected, sizes, make = VIEWS[name]
    reduced = graph(f"{statements}\ny: f32[] = sum(s)", "y", params)
    made = viewed(reduced)
    assert expected in str(made)
    assert set(made.programs()) == {"sum"}
    assert_runs_the_same(reduced, [make(*pair) for pair in sizes])


COPIES = {
    "columns": (
        "s: f32[m, 2] = slice(x, shape(0, 1), shape(m, 2))\ny: f32[] = sum(s)",
        "y",
        "x: f32[m, 4]",
        "make_views: s of slice: no, what it reads is not contiguous",
    ),
    "every second row": (
        "s: f32[m, 4] = slice(x, shape(0, 0), shape(m, 4), steps=(2, 1))\ny: f32[] = sum(s)",
        "y",
        "x: f32[m*2, 4]",
        "make_views: s of slice: no, what it reads is not contiguous",
    ),
    "a slice that may lie outside": (
        "s: f32[m, 4] = slice(x, shape(2, 0), shape(m, 4))\ny: f32[] = sum(s)",
        "y",
        "x: f32[k, 4], z: f32[k]",
        "make_views: s of slice: no, it may fail: slice: axis 0 of size k: begin 2, size m and step 1 leave it",
    ),
    "a slice of nothing at a place before the first": (
        "s: f32[0, 4] = slice(x, shape(m - 1, 0), shape(0, 4))\ny: f32[] = sum(s)",
        "y",
        "x: f32[m, 4]",
        "make_views: s of slice: no, it may fail: slice: axis 0 of size m: begin m - 1, size 0 and step 1 leave it",
    ),
    "a result": (
        "s: f32[m, 4] = slice(x, shape(2, 0), shape(m, 4))",
        "s",
        "x: f32[m + 2, 4]",
        "make_views: s of slice in x: no, it is a result, which has memory of its own (bytes m*16)",
    ),
    "a result under another name": (
        "s: f32[m, 4] = slice(x, shape(2, 0), shape(m, 4))\nt: f32[m*4] = reshape(s, shape(m*4))",
        "t",
        "x: f32[m + 2, 4]",
        "make_views: s of slice in x: no, it is a result, which has memory of its own (bytes m*16)",
    ),
    "a small part of what would be dead": (
        """
a: f32[64, 4] = cumsum(x, axis=0)
s: f32[1, 4] = slice(a, shape(0, 0), shape(1, 4))
b: f32[64, 4] = cumsum(x, axis=0)
c: f32[64, 4] = cumsum(b, axis=0)
d: f32[64, 4] = cumsum(c, axis=0)
y: f32[64, 4] = add(d, s)""",
        "y",
        "x: f32[64, 4]",
        "make_views: s of slice in a: no, it would keep alive the 1024 bytes that it is a small part of (bytes 16)",
    ),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of(name: str) -> None:
    statements, result, params, expected = COPIES[name]
    notes = context()
    made = viewed(graph(statements, result, f"{params}, r: f32[m]"), notes)
    assert "memory.part" not in str(made)
    assert expected in [str(d) for d in notes.decisions]


def test_a_view_of_a_constant_and_of_an_intermediate() -> None:
    given = graph(
        """
a: f32[n, 6] = cumsum(x, axis=1)
s: f32[1, 6] = slice(a, shape(n - 1, 0), shape(1, 6))
t: f32[1, 6] = cumsum(s, axis=1)
y: f32[n, 6] = add(a, t)""",
        "(y, t)",
        "x: f32[n, 6]",
    )
    assert_runs_the_same(given, [(floats(k, 6),) for k in (1, 2, 33)])


def test_a_branch_that_yields_a_slice_of_an_argument() -> None:
    given = graph(
        """
y: f32[m]
if c:
    a: f32[1, m] = slice(x, shape(1, 0), shape(1, m))
    b: f32[m] = reshape(a, shape(m))
    y = b
else:
    d: f32[1, m] = slice(x, shape(0, 0), shape(1, m))
    e: f32[m] = cumsum(reshaped, axis=0)
    y = e
z: f32[m] = add(y, y)""".replace("reshaped", "f").replace(
            "    e: f32[m]", "    f: f32[m] = reshape(d, shape(m))\n    e: f32[m]"
        ),
        "(y, z)",
        "x: f32[2, m], c: bool[]",
    )
    assert_runs_the_same(given, [(floats(2, m), np.array(c)) for m in (0, 1, 5) for c in (False, True)])


# join_parts


def joined(given: IRModule, notes: PassContext | None = None) -> IRModule:
    notes = notes or context()
    made = join_parts(lower_dps(make_views(legalize(decompose(given)), notes)), notes)
    verify(made, "dps")
    return made


def test_operands_of_a_concatenation_are_computed_in_their_places() -> None:
    given = graph(
        """
a: f32[n, 4] = cumsum(x, axis=0)
b: f32[m, 4] = cumsum(z, axis=0)
c: f32[n + m, 4] = concat(a, b, axis=0)
d: f32[m, 4] = add(b, b)
""",
        "(c, d)",
        "x: f32[n, 4], z: f32[m, 4]",
    )
    text = str(joined(given))
    lines = [line.strip().split(" = ", 1)[-1] for line in text.split("return")[0].split("dataflow():")[1].split("\n")]
    assert [line for line in lines if line.startswith(("memory", "call"))] == [
        'memory.alloc_tensor(shape(m + n, 4), dtype="float32")',
        'memory.part(c, shape(0), shape(n, 4), dtype="float32")',
        "call(cumsum, x, a, sym=(n,))",
        'memory.part(c, shape(n*16), shape(m, 4), dtype="float32")',
        "call(cumsum_1, z, b, sym=(m,))",
        'memory.alloc_tensor(shape(m, 4), dtype="float32")',
        "call(add, b, d, sym=(m,))",
    ]
    assert_runs_the_same(given, [(floats(n, 4), floats(m, 4)) for n, m in ((1, 0), (3, 5), (17, 16))])


APART = {
    "an argument": (
        "a: f32[n, 4] = cumsum(x, axis=0)\nc: f32[n + m, 4] = concat(a, z, axis=0)",
        "c",
        "join_parts: c of concat: no, 'z' has no memory of its own that this body allocates (bytes m*16 + n*16)",
    ),
    "one operand twice": (
        "a: f32[n, 4] = cumsum(x, axis=0)\nc: f32[n*2, 4] = concat(a, a, axis=0)",
        "c",
        None,
    ),
    "an operand that is a result as well": (
        "a: f32[n, 4] = cumsum(x, axis=0)\nb: f32[m, 4] = cumsum(z, axis=0)\nc: f32[n + m, 4] = concat(a, b, axis=0)",
        "(a, c)",
        "join_parts: c of concat: no, 'a' leaves the body itself (bytes m*16 + n*16)",
    ),
    "columns": (
        "a: f32[n, 4] = cumsum(x, axis=0)\nb: f32[n, 4] = cumsum(x, axis=1)\nc: f32[n, 8] = concat(a, b, axis=1)",
        "c",
        None,
    ),
}


@pytest.mark.parametrize("name", APART)
def test_operands_stay_apart(name: str) -> None:
    statements, result, reason = APART[name]
    given, notes = graph(statements, result, "x: f32[n, 4], z: f32[m, 4]"), context()
    assert "memory.part" not in str(joined(given, notes))
    assert reason is None or reason in [str(d) for d in notes.decisions]
    assert_runs_the_same(given, [(floats(n, 4), floats(m, 4)) for n, m in ((1, 0), (3, 5))])


def test_a_size_that_is_known_only_after_the_first_operand() -> None:
    """The number of places above 0 is found when the first operand has been computed."""
    given = graph(
        """
a: f32[n] = cumsum(x, axis=0)
p: i64[1, count] = non_zero(a)
q: i64[1, k] = match_shape(p, (1, k))
r: i64[k] = reshape(q, shape(k))
g: f32[k] = gather(a, r, axis=0)
b: f32[k] = cumsum(g, axis=0)
c: f32[n + k] = concat(a, b, axis=0)
""".replace("p: i64[1, count]", 'p: Tensor(rank=2, dtype="int64")'),
        "c",
        "x: f32[n]",
    )
    notes = context()
    assert "memory.part" not in str(joined(given, notes))
    assert any("the size k is not known yet" in str(d) for d in notes.decisions)
    assert_runs_the_same(given, [(floats(n),) for n in (1, 4, 30)])


@settings(max_examples=tiers.examples(30), deadline=None, suppress_health_check=list(HealthCheck))
@given(graphs(size=10, control=True), st.integers(0, 3))
def test_compiled_models_with_views(given: IRModule, seed: int) -> None:
    exe = rl.compile(given)
    for sizes in [(4, 3), (1, 1), (18, 33), (0, 3), (5, 0), (1, 7)]:
        args: Any = arguments(*sizes, flag=sizes[0] != 4, seed=seed)
        before = [np.copy(a) for a in args]
        got = exe(*args)
        assert_same_results(got, Interpreter(given).run("main", *args))
        for array, kept in zip(args, before, strict=True):
            np.testing.assert_array_equal(array, kept)
