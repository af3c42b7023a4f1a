"""Fusion: classes of programs, which calls become one kernel, which do not and why, and what the kernel computes."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import relaxlite as rl
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.errors import ExecutionError
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.equality import first_difference
from relaxlite.ir.expr import Body, Call, Function, GlobalVar, If, Let
from relaxlite.ir.module import IRModule
from relaxlite.ir.program import Binary, Buffer, Check, Compare, TensorProgram, compute, index, seq
from relaxlite.ir.program_visitor import walk_stmts, walk_values
from relaxlite.ir.symbolic import SymVar
from relaxlite.ir.types import TensorType
from relaxlite.ir.verifier import verify
from relaxlite.passes.context import PassContext
from relaxlite.passes.fuse.fuse_ops import MAX_GROUP, fuse_ops
from relaxlite.passes.fuse.fuse_programs import fuse_programs
from relaxlite.passes.fuse.resolve_matches import resolve_matches
from relaxlite.passes.fuse.sink_into_branches import sink_into_branches
from relaxlite.passes.graph.decompose import decompose
from relaxlite.passes.graph.reachable import drop_unused
from relaxlite.passes.loops.legalize import legalize
from relaxlite.passes.loops.pattern import LoopPattern, analyze
from relaxlite.target import Target
from tests.support import tiers
from tests.support.ir_text import module, program
from tests.support.random_graphs import arguments, assert_same_results, graphs

TARGET = Target.parse("llvm -mcpu=x86-64-v3")


def fused(given: IRModule) -> tuple[IRModule, list[str]]:
    """The module with its calls fused, and the notes of what was not."""
    context = PassContext(TARGET)
    lowered = legalize(decompose(given))
    verify(lowered, "lowered")
    lowered = sink_into_branches(resolve_matches(lowered, context), context)
    verify(lowered, "lowered")
    grouped = fuse_ops(lowered, context)
    verify(grouped, "lowered")
    merged = drop_unused(fuse_programs(grouped))
    verify(merged, "lowered")
    return merged, context.notes


def main(statements: str, result: str = "", params: str = "") -> IRModule:
    """A function of a few tensors; it gives what the last statement binds."""
    params = params or "x: f32[n, 4], y: f32[n, 4], v: f32[4], w: f32[4, 8], places: i64[m], c: bool[]"
    lines = [line for line in statements.strip().split("\n") if line.strip()]
    result = result or lines[-1].split(":")[0].strip()
    body = "\n".join(f"    {line}" for line in lines)
    text = f'n = symbol("n")\nm = symbol("m")\n@function\ndef main({params}):\n{body}\n    return {result}\n'
    return module(text)


def kernels(made: IRModule) -> list[str]:
    """The names of the programs that main calls, in order."""
    function = made["main"]
    assert isinstance(function, Function)
    return called(function.body)


def called(body: Body) -> list[str]:
    calls = [b.value for b in body.bindings() if isinstance(b, Let) and isinstance(b.value, Call)]
    return [c.callee.name for c in calls if isinstance(c.callee, GlobalVar)]


def assert_fuses(statements: str, expected: str, result: str = "", params: str = "") -> None:
    """The statements become one call of the expected program."""
    made, notes = fused(main(statements, result, params))
    assert len(kernels(made)) == 1, notes
    (name,) = kernels(made)
    difference = first_difference(made[name], program(expected))
    assert difference is None, f"{difference}\n\n{made}"


# Classification

ONE = "n = symbol('n')\n@program(symbols=(n,), outputs=1)\ndef p(x: f32[n, 4], out: f32[n, 4]):\n"
TWO = "n = symbol('n')\n@program(symbols=(n,), outputs=1)\ndef p(x: f32[n, 4], y: f32[4], out: f32[n, 4]):\n"
ROW = "n = symbol('n')\n@program(symbols=(n,), outputs=1)\ndef p(x: f32[n, 4], out: f32[n]):\n"
DOT = "n = symbol('n')\n@program(symbols=(n,), outputs=1)\ndef p(x: f32[n, 4], y: f32[{y}], out: f32[{out}]):\n"
TAKE = "n = symbol('n')\n@program(symbols=(n,), outputs=1)\ndef p(x: f32[n], places: i64[n], out: f32[n]):\n"

PATTERNS: dict[str, tuple[LoopPattern, str]] = {
    "elementwise": (
        LoopPattern.ELEMENTWISE,
        ONE + """
    for i in serial(n):
        for j in serial(4):
            out[i, j] = exp(x[i, j]) + x[i, j]
""",
    ),
    "a check in front does not matter": (
        LoopPattern.ELEMENTWISE,
        ONE + """
    assert index(n) >= int64(2), "small"
    for i in serial(n):
        for j in serial(4):
            out[i, j] = exp(x[i, j])
""",
    ),
    "nothing is read": (
        LoopPattern.ELEMENTWISE,
        ONE + """
    for i in serial(n):
        for j in serial(4):
            out[i, j] = float32(1.0)
""",
    ),
    "a vector along the last dimension": (
        LoopPattern.BROADCAST,
        TWO + """
    for i in serial(n):
        for j in serial(4):
            out[i, j] = x[i, j] + y[j]
""",
    ),
    "a scalar": (
        LoopPattern.BROADCAST,
        TWO.replace("y: f32[4]", "y: f32[]") + """
    for i in serial(n):
        for j in serial(4):
            out[i, j] = x[i, j] + y[()]
""",
    ),
    "a column": (
        LoopPattern.BROADCAST,
        TWO.replace("y: f32[4]", "y: f32[n, 1]") + """
    for i in serial(n):
        for j in serial(4):
            out[i, j] = x[i, j] + y[i, 0]
""",
    ),
    "a vector along the wrong dimension": (
        LoopPattern.INJECTIVE,
        ONE.replace("x: f32[n, 4]", "x: f32[4, n]") + """
    for i in serial(n):
        for j in serial(4):
            out[i, j] = x[j, i]
""",
    ),
    "a slice": (
        LoopPattern.INJECTIVE,
        ONE.replace("x: f32[n, 4]", "x: f32[n, 9]") + """
    for i in serial(n):
        for j in serial(4):
            out[i, j] = x[i, j*2 + 1]
""",
    ),
    "an index from data": (
        LoopPattern.INJECTIVE,
        TAKE + """
    for i in serial(n):
        with let_index(places[i]) as p:
            assert index(p) < index(n), "outside"
            out[i] = x[p]
""",
    ),
    "a sum": (
        LoopPattern.REDUCTION,
        ROW + """
    for i in serial(n):
        with allocate((), "float32", "local") as acc:
            acc[()] = float32(0.0)
            for r in serial(4):
                acc[()] += x[i, r]
            out[i] = acc[()] / float32(4.0)
""",
    ),
    "a sum straight into the output": (
        LoopPattern.REDUCTION,
        ROW + """
    for i in serial(n):
        out[i] = float32(0.0)
        for r in serial(4):
            out[i] += x[i, r]
""",
    ),
    "products of rows, each element used once": (
        LoopPattern.REDUCTION,
        DOT.format(y="n, 4", out="n") + """
    for i in serial(n):
        with allocate((), "float32", "local") as acc:
            acc[()] = float32(0.0)
            for r in serial(4):
                acc[()] += x[i, r] * y[i, r]
            out[i] = acc[()]
""",
    ),
    "a matrix product": (
        LoopPattern.OUT_FUSIBLE,
        DOT.format(y="4, 8", out="n, 8") + """
    for i in serial(n):
        for j in serial(8):
            with allocate((), "float32", "local") as acc:
                acc[()] = float32(0.0)
                for r in serial(4):
                    acc[()] += x[i, r] * y[r, j]
                out[i, j] = acc[()]
""",
    ),
    "two stages": (
        LoopPattern.OPAQUE,
        ONE + """
    for i in serial(n):
        for j in serial(4):
            out[i, j] = x[i, j]
    for i in serial(n):
        for j in serial(4):
            out[i, j] = out[i, j] + x[i, j]
""",
    ),
    "two outputs": (
        LoopPattern.OPAQUE,
        ONE.replace("outputs=1", "outputs=2").replace("x: f32[n, 4]", "more: f32[n, 4]") + """
    for i in serial(n):
        for j in serial(4):
            out[i, j] = float32(1.0)
""",
    ),
    "a result that depends on another": (
        LoopPattern.OPAQUE,
        ONE + """
    for i in serial(n):
        for j in serial(4):
            out[i, j] = x[i, j] + out[i, j]
""",
    ),
    "an index that comes from results": (
        LoopPattern.OPAQUE,
        TAKE.replace("out: f32[n]", "out: i64[n]") + """
    for i in serial(n):
        with let_index(out[i]) as p:
            out[i] = places[p]
""",
    ),
    "a running sum": (
        LoopPattern.OPAQUE,
        ONE + """
    for i in serial(n):
        with allocate((1,), "float32", "local") as total:
            total[0] = float32(0.0)
            for j in serial(4):
                total[0] += x[i, j]
                out[i, j] = total[0]
""",
    ),
    "a scatter": (
        LoopPattern.OPAQUE,
        TAKE + """
    for i in serial(n):
        with let_index(places[i]) as p:
            out[p] = x[i]
""",
    ),
    "a store that combines": (
        LoopPattern.OPAQUE,
        ONE + """
    for i in serial(n):
        for j in serial(4):
            out[i, j] += x[i, j]
""",
    ),
    "a store elsewhere": (
        LoopPattern.OPAQUE,
        ONE.replace("out: f32[n, 4]", "out: f32[n, 5]") + """
    for i in serial(n):
        for j in serial(4):
            out[i, j + 1] = x[i, j]
""",
    ),
    "a store under a condition": (
        LoopPattern.OPAQUE,
        ONE + """
    for i in serial(n):
        for j in serial(4):
            if index(i) < index(j):
                out[i, j] = x[i, j]
""",
    ),
    "a sum that starts from data": (
        LoopPattern.OPAQUE,
        ROW + """
    for i in serial(n):
        out[i] = x[i, 0]
        for r in serial(4):
            out[i] += x[i, r]
""",
    ),
    "a sum on top of what is there": (
        LoopPattern.OPAQUE,
        ROW + """
    for i in serial(n):
        out[i] += float32(1.0)
        for r in serial(4):
            out[i] += x[i, r]
""",
    ),
    "a sum of sums": (
        LoopPattern.OPAQUE,
        ROW.replace("out: f32[n]", "out: f32[n, 1]") + """
    for i in serial(n):
        with allocate((), "float32", "local") as acc:
            acc[()] = float32(0.0)
            for r in serial(4):
                acc[()] += x[i, r]
            out[0, 0] = acc[()]
""",
    ),
    "a sum of elements at indices from data": (
        LoopPattern.OPAQUE,
        TAKE.replace("out: f32[n]", "out: f32[]") + """
    with allocate((), "float32", "local") as acc:
        acc[()] = float32(0.0)
        for r in serial(n):
            with let_index(places[r]) as p:
                acc[()] += x[p]
        out[()] = acc[()]
""",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern_of(name: str) -> None:
    expected, text = PATTERNS[name]
    assert analyze(program(text)) == expected


# What fuses


def test_a_chain_becomes_one_nest() -> None:
    assert_fuses(
        "a: f32[n, 4] = tanh(x)\nb: f32[n, 4] = add(a, y)\nd: f32[n, 4] = relu(b)",
        """
        n = symbol("n")
        @program(symbols=(n,), outputs=1)
        def p(x: f32[n, 4], y: f32[n, 4], out: f32[n, 4]):
            for i in serial(n):
                for j in serial(4):
                    out[i, j] = max(tanh(x[i, j]) + y[i, j], float32(0.0))
        """,
    )


def test_a_diamond_computes_the_shared_part_once() -> None:
    statements = "a: f32[n, 4] = tanh(x)\nb: f32[n, 4] = neg(a)\nd: f32[n, 4] = add(a, b)"
    assert_fuses(
        statements,
        """
        n = symbol("n")
        @program(symbols=(n,), outputs=1)
        def p(x: f32[n, 4], out: f32[n, 4]):
            for i in serial(n):
                for j in serial(4):
                    t = tanh(x[i, j])
                    out[i, j] = t + -t
        """,
    )
    made, _ = fused(main(statements))
    assert str(made).count("tanh(x[i, j])") == 1


def test_a_chain_of_diamonds_stays_small() -> None:
    """y * sigmoid(y), twelve times: not 2**12 copies of the first."""
    statements, last = [], "x"
    for k in range(12):
        statements.append(f"s{k}: f32[n, 4] = sigmoid({last})\ny{k}: f32[n, 4] = multiply({last}, s{k})")
        last = f"y{k}"
    made, _ = fused(main("\n".join(statements)))
    (name,) = kernels(made)
    kernel = made[name]
    assert isinstance(kernel, TensorProgram)
    values = {id(v) for s in walk_stmts(kernel.body) if hasattr(s, "value") for v in walk_values(s.value)}
    assert len(values) < 12 * 8


def test_a_residual_connection_fuses() -> None:
    assert_fuses(
        """
a: f32[n, 4] = multiply(x, v)
b: f32[n, 4] = tanh(a)
d: f32[n, 4] = add(b, x)
""",
        """
        n = symbol("n")
        @program(symbols=(n,), outputs=1)
        def p(x: f32[n, 4], v: f32[4], out: f32[n, 4]):
            for i in serial(n):
                for j in serial(4):
                    out[i, j] = tanh(x[i, j] * v[j]) + x[i, j]
        """,
    )


def test_an_injective_consumer_moves_the_indices() -> None:
    assert_fuses(
        """
a: f32[n, 4] = add(x, v)
b: f32[4, n] = transpose(a, axes=(1, 0))
d: f32[2, n] = slice(b, shape(1), shape(2), axes=(0,))
""",
        """
        n = symbol("n")
        @program(symbols=(n,), outputs=1)
        def p(x: f32[n, 4], v: f32[4], out: f32[2, n]):
            for i in serial(2):
                for j in serial(n):
                    out[i, j] = x[j, i + 1] + v[i + 1]
        """,
    )


def test_a_cheap_producer_is_computed_again_by_a_broadcast() -> None:
    assert_fuses(
        "a: f32[n, 4] = neg(x)\nb: f32[2, n, 4] = broadcast_to(a, shape(2, n, 4))",
        """
        n = symbol("n")
        @program(symbols=(n,), outputs=1)
        def p(x: f32[n, 4], out: f32[2, n, 4]):
            for i in serial(2):
                for j in serial(n):
                    for k in serial(4):
                        out[i, j, k] = -x[j, k]
        """,
    )


def test_a_producer_stays_behind_the_condition_that_guards_it() -> None:
    assert_fuses(
        "a: f32[n, 4] = neg(x)\nb: f32[n+1, 4] = pad(a, shape(1, 0), shape(0, 0))",
        """
        n = symbol("n")
        @program(symbols=(n,), outputs=1)
        def p(x: f32[n, 4], out: f32[n+1, 4]):
            for i in serial(n + 1):
                for j in serial(4):
                    out[i, j] = -x[i - 1, j] if index(i - 1) >= int64(0) else float32(0.0)
        """,
    )


def test_producer_and_epilogue_join_a_reduction() -> None:
    assert_fuses(
        """
a: f32[n, 4] = tanh(x)
b: f32[n] = sum(a, axes=(1,))
d: f32[n] = sqrt(b)
e: f32[n] = add(d, b)
""",
        """
        n = symbol("n")
        @program(symbols=(n,), outputs=1)
        def p(x: f32[n, 4], out: f32[n]):
            for i in serial(n):
                with allocate((), "float32", "local") as acc:
                    acc[()] = float32(0.0)
                    for r in serial(4):
                        acc[()] += tanh(x[i, r])
                    out[i] = sqrt(acc[()]) + acc[()]
        """,
    )


def test_an_epilogue_joins_a_matrix_product_with_producers_of_its_own() -> None:
    assert_fuses(
        """
a: f32[n, 8] = matmul(x, w)
bias: f32[8] = slice(big, shape(1), shape(8))
b: f32[n, 8] = add(a, bias)
d: f32[n, 8] = relu(b)
""",
        """
        n = symbol("n")
        @program(symbols=(n,), outputs=1)
        def p(x: f32[n, 4], w: f32[4, 8], big: f32[9], out: f32[n, 8]):
            for i in serial(n):
                for j in serial(8):
                    with allocate((), "float32", "local") as acc:
                        acc[()] = float32(0.0)
                        for r in serial(4):
                            acc[()] += x[i, r] * w[r, j]
                        out[i, j] = max(acc[()] + big[j + 1], float32(0.0))
        """,
        params="x: f32[n, 4], w: f32[4, 8], big: f32[9]",
    )


def test_an_epilogue_may_gather() -> None:
    """The index from data is bound in the epilogue, outside of the reduced loop."""
    assert_fuses(
        "a: f32[n, 8] = matmul(x, w)\nrows: f32[n, 8] = gather(table, places, axis=0)\nb: f32[n, 8] = add(a, rows)",
        """
        n = symbol("n")
        @program(symbols=(n,), outputs=1)
        def p(x: f32[n, 4], w: f32[4, 8], table: f32[9, 8], places: u8[n], out: f32[n, 8]):
            for i in serial(n):
                for j in serial(8):
                    with allocate((), "float32", "local") as acc:
                        acc[()] = float32(0.0)
                        for r in serial(4):
                            acc[()] += x[i, r] * w[r, j]
                        with let_index(int64(places[i]), lower=None) as p:
                            assert (index(p) >= int64(0)) & (index(p) < index(9)), (
                                "gather: an index is out of range for axis 0 of size 9"
                            )
                            out[i, j] = acc[()] + table[p, j]
        """,
        params="x: f32[n, 4], w: f32[4, 8], table: f32[9, 8], places: u8[n]",
    )


@pytest.mark.parametrize(
    ("kind", "statements"),
    [
        ("gather then map", "a: f32[m, 4] = gather(x, places, axis=0)\nb: f32[m, 4] = relu(a)"),
        ("map then gather", "a: f32[n, 4] = relu(x)\nb: f32[m, 4] = gather(a, places, axis=0)"),
        ("gather of a gather", "a: i64[m] = gather(places, places, axis=0)\nb: f32[m, 4] = gather(x, a, axis=0)"),
        ("gather, conditional on its element", "a: f32[m, 4] = gather(x, places, axis=0)\nb: f32[m, 4] = elu(a)"),
        ("mean", "a: f32[n, 4] = add(x, v)\nb: f32[n, 1] = mean(a, axes=(1,), keepdims=True)\nd: f32[n, 1] = exp(b)"),
        ("max over all", "a: f32[n, 4] = neg(x)\nb: f32[] = max(a)\nd: f32[] = neg(b)"),
        ("batched", "a: f32[n, 4, 4] = matmul(q, q)\nb: f32[n, 4, 4] = gelu(a)\nd: f32[n, 4, 4] = add(b, v)"),
        ("concat of parts", "a: f32[n, 4] = relu(x)\nb: f32[n, 4] = gelu(a, approximate='tanh')"),
    ],
)
def test_fuses_into_one_kernel_that_computes_the_same(kind: str, statements: str) -> None:
    params = "x: f32[n, 4], v: f32[4], q: f32[n, 4, 4], places: i64[m]"
    given = main(statements, params=params)
    made, notes = fused(given)
    assert len(kernels(made)) == 1, notes
    rng = np.random.default_rng(1)
    for n, m in [(1, 1), (4, 2), (5, 3), (3, 0)]:
        places = rng.integers(0, min(n, max(m, 1)), m)
        tensors = [rng.standard_normal(shape, np.float32) for shape in ((n, 4), (4,), (n, 4, 4))]
        args = (*tensors, places)
        assert_same_results(Interpreter(made).run("main", *args), Interpreter(given).run("main", *args))


# What does not fuse, and why

REFUSED = {
    "both sides hold a reduction": (
        "a: f32[n, 8] = matmul(x, w)\nb: f32[n] = sum(a, axes=(1,))",
        "a into b: b is REDUCTION, an epilogue must be elementwise",
    ),
    "two sums meet": (
        "a: f32[n] = sum(x, axes=(1,))\nb: f32[n] = max(y, axes=(1,))\nd: f32[n] = add(a, b)",
        "b into d: both sides hold a reduction",
    ),
    "a reshaping consumer of a reduction": (
        "a: f32[n, 8] = matmul(x, w)\nb: f32[8, n] = transpose(a, axes=(1, 0))",
        "a into b: b would not be stored side by side",
    ),
    "a broadcasting consumer of a reduction": (
        "a: f32[1, 4] = sum(x, axes=(0,), keepdims=True)\nb: f32[n, 4] = subtract(x, a)",
        "a into b: b has another shape than a",
    ),
    "an epilogue that also reads it elsewhere": (
        "a: f32[64, 64] = matmul(q, q)\nb: f32[64, 64] = call(across, a)",
        "a into b: b reads a at other indices than it writes",
    ),
    "an expensive producer under a broadcast": (
        "a: f32[n, 4] = tanh(x)\nb: f32[2, n, 4] = broadcast_to(a, shape(2, n, 4))",
        "a into b: one kernel is slower on the whole, but not at n = 1 (a is computed where it is read)",
    ),
    "an expensive producer read twice": (
        "a: f32[64, 64] = tanh(q)\nb: f32[64, 64] = call(across, a)",
        "a into b: one kernel is slower (a is computed where it is read) (bytes saved 32768, flops added 106496)",
    ),
    "an expensive producer of a matrix product": (
        "a: f32[n, 4] = neg(x)\nb: f32[n, 8] = matmul(a, w)",
        "a into b: b is OUT_FUSIBLE: each tile of it would compute a anew",
    ),
    "an index from data where a condition guards": (
        "a: f32[m, 4] = gather(x, places, axis=0)\nb: f32[m+1, 4] = pad(a, shape(1, 0), shape(0, 0))",
        "a into b: b reads under a condition, a computes indices from data",
    ),
    "an index from data further up": (
        "a: f32[m, 4] = gather(x, places, axis=0)\nb: f32[m, 4] = relu(a)\n"
        "d: f32[m+1, 4] = pad(b, shape(1, 0), shape(0, 0))",
        "b into d: d reads under a condition, a computes indices from data",
    ),
    "an index from data inside of a reduction": (
        "a: f32[m, 4] = gather(x, places, axis=0)\nb: f32[m] = sum(a, axes=(1,))\nd: f32[m] = sqrt(b)",
        "a into b: b is a reduction, a computes indices from data",
    ),
}

ACROSS = """
@program(symbols=(), outputs=1)
def across(x: f32[64, 64], out: f32[64, 64]):
    for i in serial(64):
        for j in serial(64):
            out[i, j] = x[i, j] + x[i, 0]
"""


@pytest.mark.parametrize("name", REFUSED)
def test_not_fused_because(name: str) -> None:
    statements, reason = REFUSED[name]
    params = "x: f32[n, 4], y: f32[n, 4], q: f32[64, 64], w: f32[4, 8], places: i64[m]"
    text = str(main(statements.replace("call(across, a)", "add(a, a)"), params=params))
    made, notes = fused(module(text.replace("add(a, a)", "call(across, a)") + ACROSS))
    assert len(kernels(made)) > 1
    assert any(note.startswith("fuse_ops: " + reason.replace(": ", ": no, ", 1)) for note in notes), notes


def test_a_reason_names_the_tensors_of_its_own_layer() -> None:
    """What is alike is tried once."""
    _, notes = fused(
        main(
            "a: f32[n, 8] = matmul(x, w)\nb: f32[8, n] = transpose(a, axes=(1, 0))\n"
            "low: f32[n, 8] = matmul(y, w)\nhigh: f32[8, n] = transpose(low, axes=(1, 0))",
            result="(b, high)",
        )
    )
    reason = "would not be stored side by side"
    assert [note for note in notes if reason in note] == [
        f"fuse_ops: a into b: no, b {reason}",
        f"fuse_ops: low into high: no, high {reason}",
    ]


def test_an_intermediate_that_is_also_a_result_is_a_second_output() -> None:
    assert_fuses(
        "a: f32[n, 4] = tanh(x)\nb: f32[n, 4] = neg(a)\nd: f32[n, 4] = relu(b)",
        """
        n = symbol("n")
        @program(symbols=(n,), outputs=2)
        def p(x: f32[n, 4], a: f32[n, 4], d: f32[n, 4]):
            for i in serial(n):
                for j in serial(4):
                    a[i, j] = tanh(x[i, j])
                    d[i, j] = max(-a[i, j], float32(0.0))
        """,
        result="(a, d)",
        params="x: f32[n, 4]",
    )


def test_an_intermediate_that_a_branch_captures_is_computed_on_its_own() -> None:
    made, _ = fused(
        main(
            """
a: f32[n, 4] = tanh(x)
b: f32[n, 4] = neg(a)
r: f32[n, 4]
if c:
    d: f32[n, 4] = abs(a)
    e: f32[n, 4] = relu(d)
    r = e
else:
    r = x
f: f32[n, 4] = add(r, b)
"""
        )
    )
    assert kernels(made) == ["tanh", "fused_neg_add"]
    main_function = made["main"]
    assert isinstance(main_function, Function)
    (branch,) = (b.value for b in main_function.body.bindings() if isinstance(b, Let) and isinstance(b.value, If))
    assert called(branch.then_body) == ["fused_abs_relu"]


def test_an_intermediate_with_two_users_that_never_meet_is_computed_on_its_own() -> None:
    statements = "a: f32[n, 4] = tanh(x)\nb: f32[n] = sum(a, axes=(1,))\nd: f32[4] = sum(a, axes=(0,))"
    made, _ = fused(main(statements, "(b, d)"))
    assert kernels(made) == ["tanh", "sum", "sum_1"]


def test_a_run_time_shape_check_of_an_intermediate_keeps_it() -> None:
    made, _ = fused(main("a: f32[n, 4] = tanh(x)\nb: f32[m, 4] = match_shape(a, (m, 4))\nd: f32[m, 4] = relu(b)"))
    assert kernels(made) == ["tanh", "relu"]


def test_calls_fuse_across_the_definition_of_a_symbol() -> None:
    """The kernel stands where its last call stood, after the MatchShape that defines k."""
    made, _ = fused(
        module(
            """
            n = symbol("n")
            @function
            def main(x: f32[n, 4], s: i64[1]):
                a: f32[n, 4] = neg(x)
                t: Shape(rank=1) = tensor_to_shape(s)
                k = symbol("k")
                u: Shape((k,)) = match_shape(t, (k,))
                b: f32[k, n, 4] = broadcast_to(a, shape(k, n, 4))
                return b
            """
        )
    )
    assert kernels(made) == ["fused_neg_broadcast_to"]
    got = Interpreter(made).run("main", np.ones((2, 4), "f4"), np.array([3]))
    np.testing.assert_array_equal(got, -np.ones((3, 2, 4), "f4"))


def test_a_group_is_bounded() -> None:
    names = ["x", *(f"a{k}" for k in range(MAX_GROUP + 5))]
    made, notes = fused(main("\n".join(f"{b}: f32[n, 4] = neg({a})" for a, b in pairwise(names))))
    assert len(kernels(made)) == 2
    assert any(f"the group would exceed {MAX_GROUP} calls" in note for note in notes)


def test_equal_kernels_are_shared() -> None:
    made, _ = fused(
        main(
            """
a: f32[n, 4] = tanh(x)
b: f32[n, 4] = neg(a)
d: f32[n, 4] = tanh(y)
e: f32[n, 4] = neg(d)
f: f32[4, n] = transpose(x, axes=(1, 0))
""",
            "(b, e, f)",
        )
    )
    assert kernels(made) == ["fused_tanh_neg", "fused_tanh_neg", "transpose"]
    assert set(made.programs()) == {"fused_tanh_neg", "transpose"}


def test_calls_of_a_shared_kernel_pass_their_own_symbols() -> None:
    bb = BlockBuilder()
    n, m = bb.symbol("n"), bb.symbol("m")
    types = [TensorType.of(shape, "float32") for shape in ((n, m), (m, n))]
    with bb.function("main", x=types[0], y=types[1]) as (x, y):
        both = [bb.emit(ops.neg(bb.emit(ops.tanh(v)))) for v in (x, y)]
        bb.result(bb.emit(ops.add(both[0], bb.emit(ops.cumsum(bb.emit(ops.transpose(both[1], axes=(1, 0))), axis=0)))))
    made, _ = fused(bb.module())
    args = np.ones((2, 3), "f4"), np.ones((3, 2), "f4")
    assert_same_results(Interpreter(made).run("main", *args), Interpreter(bb.module()).run("main", *args))


# What merging must not lose


def test_checks_of_merged_programs_stay() -> None:
    """Sizes that may turn out to differ: the check of the add is in the merged program."""
    made, _ = fused(
        main("a: f32[max(n, m)*min(1, n, m)] = add(x, y)\nb: f32[max(n, m)*min(1, n, m)] = neg(a)",
             params="x: f32[n], y: f32[m]")
    )  # fmt: skip
    (name,) = kernels(made)
    kernel = made[name]
    assert isinstance(kernel, TensorProgram)
    assert any(isinstance(s, Check) for s in walk_stmts(kernel.body))
    with pytest.raises(ExecutionError, match="could not be broadcast"):
        Interpreter(made).run("main", np.ones(2, "f4"), np.ones(3, "f4"))


def test_a_negative_size_that_no_tensor_shows_any_more_is_an_error() -> None:
    """Alone, the slice of n - 5 elements fails to be allocated where n < 5; merged, there is nothing to allocate."""
    bb = BlockBuilder()
    n = bb.symbol("n")
    with bb.function("main", x=TensorType.of((n,), "float32")) as (x,):
        bb.result(bb.emit(ops.sum(bb.emit(ops.slice(x, (5,), (n - 5,))))))
    made, _ = fused(bb.module())
    assert kernels(made) == ["fused_slice_sum"]
    assert Interpreter(made).run("main", np.ones(7, "f4")) == 2
    with pytest.raises(ExecutionError, match="slice: the size n - 5 is negative"):
        Interpreter(made).run("main", np.ones(3, "f4"))
    with pytest.raises(ExecutionError, match="slice: the size n - 5 is negative"):
        rl.compile(bb.module())(np.ones(3, "f4"))


def test_a_check_that_reads_the_result_of_a_reduction_keeps_it_apart() -> None:
    """The check comes before all loops of a merged program: a sum is not known there."""
    total, out = Buffer.of("total", (), "float32"), Buffer.of("out", (), "float32")
    positive = Check(Compare("ge", total[()], total[()]), "total is NaN")
    body = seq(positive, compute(out, lambda: Binary("add", total[()], total[()])))
    bb = BlockBuilder()
    n = bb.symbol("n")
    twice = bb.define("twice", TensorProgram((total, out), (), body))
    with bb.function("main", x=TensorType.of((n,), "float32")) as (x,):
        summed = bb.emit(ops.sum(x))
        bb.result(bb.emit(Call(twice, (summed,), ty=summed.ty)))
    made, _ = fused(bb.module())
    assert Interpreter(made).run("main", np.ones(3, "f4")) == 6
    with pytest.raises(ExecutionError, match="total is NaN"):
        Interpreter(made).run("main", np.full(1, np.nan, "f4"))


def test_programs_of_symbols_in_expressions_keep_their_arguments() -> None:
    """A program of symbol k, called with k = n*2 + 1: extents and index values of the merged program say so."""
    k = SymVar("k")
    out = Buffer("out", (k,), "int64")
    count = TensorProgram((out,), (k,), compute(out, lambda i: index(k - i)))
    bb = BlockBuilder()
    n = bb.symbol("n")
    counted = bb.define("counted", count)
    with bb.function("main", x=TensorType.of((n,), "float32")) as (_,):
        v = bb.emit(Call(counted, (), sym_args=(n * 2 + 1,), ty=TensorType.of((n * 2 + 1,), "int64")))
        bb.result(bb.emit(ops.neg(v)))
    made, _ = fused(bb.module())
    assert kernels(made) == ["fused_counted_neg"]
    assert Interpreter(made).run("main", np.ones(2, "f4")).tolist() == [-5, -4, -3, -2, -1]


# Merged programs against what they were made from


@settings(max_examples=tiers.examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(graphs(size=9, control=True), st.sampled_from([(0, 3), (3, 0), (1, 1), (4, 3), (2, 9)]), st.booleans())
def test_fusion_keeps_the_meaning_of_random_graphs(given: IRModule, sizes: tuple[int, int], flag: bool) -> None:
    args: Any = arguments(*sizes, flag=flag)
    made, notes = fused(given)
    assert_same_results(Interpreter(made).run("main", *args), Interpreter(given).run("main", *args))
    assert all(re.match(r"\w+: \w+ (into|with|as) .+: no, .+", note) for note in notes)
