"""Results in the memory of an operand: which programs allow it (in_place), and which calls do it (reuse_operands)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import relaxlite as rl
from relaxlite.codegen.interpreter import Interpreter, run_program
from relaxlite.ir import ops
from relaxlite.ir.attributes import IN_PLACE
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Constant
from relaxlite.ir.module import IRModule
from relaxlite.ir.program import TensorProgram
from relaxlite.ir.symbolic import evaluate
from relaxlite.ir.types import TensorType
from relaxlite.ir.verifier import verify
from relaxlite.passes.context import PassContext
from relaxlite.passes.loops.in_place import in_place_pairs
from relaxlite.passes.manager import run_passes
from relaxlite.passes.memory.reuse_operands import reuse_operands
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.passes.schedule.cpu.programs import schedule_cpu, schedule_program
from relaxlite.target import Target
from tests.support import tiers
from tests.support.ir_text import assert_becomes, assert_stays, module, program
from tests.support.random_graphs import arguments, assert_same_results, graphs


def in_place(text: str) -> tuple[TensorProgram, set[tuple[str, str]], tuple[str, ...]]:
    """The program, its pairs by name, and the reasons against others."""
    made = program(text)
    pairs, reasons = in_place_pairs(made)
    return made, {(made.params[x].name, made.params[out].name) for x, out in pairs}, reasons


def program_text(params: str, body: str, symbols: str = "n, m") -> str:
    lines = "\n".join(f"    {line}" for line in body.strip("\n").split("\n"))
    head = "".join(f"{s} = symbol('{s}')\n" for s in symbols.split(", "))
    return f"{head}@program(symbols=({symbols},), outputs=1)\ndef f({params}):\n{lines}\n"


ALLOWED = {
    "an elementwise operand": (
        "x: f32[n, m], v: f32[m], out: f32[n, m]",
        """
for i in serial(n):
    for j in serial(m):
        out[i, j] = x[i, j] + v[j]
""",
        {("x", "out")},
    ),
    "another shape of the same elements, another dtype of their size": (
        "x: f32[n, m, 8], out: i32[n, m*8]",
        """
for i in serial(n):
    for j in serial(m*8):
        out[i, j] = int32(x[i, j // 8, j % 8])
""",
        {("x", "out")},
    ),
    "a result that is written in another shape": (
        "x: f32[n, m*8], out: f32[n, m, 8]",
        """
for i in serial(n):
    for j in serial(m*8):
        out[i, j // 8, j % 8] = x[i, j]
""",
        {("x", "out")},
    ),
    "the residual operand of a matmul": (
        "a: f32[n, 64], b: f32[64, m], x: f32[n, m], out: f32[n, m]",
        """
for i in serial(n):
    for j in serial(m):
        with allocate((), "float32", "local") as acc:
            acc[()] = float32(0.0)
            for k in serial(64):
                acc[()] += a[i, k] * b[k, j]
            out[i, j] = acc[()] + x[i, j]
""",
        {("x", "out")},
    ),
    "a row that earlier stages have read": (
        "x: f32[n, m], out: f32[n, m]",
        """
for i in serial(n):
    with allocate((), "float32", "local") as top:
        top[()] = float32(0.0)
        for j in serial(m):
            top[()] += x[i, j]
        for k in serial(m):
            out[i, k] = x[i, k] - top[()]
""",
        {("x", "out")},
    ),
}
FORBIDDEN = {
    "a transposed operand": (
        "x: f32[n, n], out: f32[n, n]",
        "for i in serial(n):\n    for j in serial(n):\n        out[i, j] = x[j, i]",
        "out in x: other elements are read than the one that is written",
    ),
    "a shifted operand": (
        "x: f32[n], out: f32[n]",
        "for i in serial(n):\n    out[i] = x[n - 1 - i]",
        "out in x: other elements are read than the one that is written",
    ),
    "an operand that is read whole for each element": (
        "a: f32[n, n], b: f32[n, n], out: f32[n, n]",
        """
for i in serial(n):
    for j in serial(n):
        with allocate((), "float32", "local") as acc:
            acc[()] = float32(0.0)
            for k in serial(n):
                acc[()] += a[i, k] * b[k, j]
            out[i, j] = acc[()]
""",
        "out in a: other elements are read than the one that is written",
    ),
    "an operand that is read after the result": (
        "x: f32[n], y: f32[n], out: f32[n]",
        """
with allocate((), "float32", "local") as total:
    total[()] = float32(0.0)
    for i in serial(n):
        out[i] = y[i]
        total[()] += x[i]
""",
        "out in x: it is read after elements of the result are written",
    ),
    "a result that is written twice": (
        "x: f32[n], out: f32[n]",
        "for i in serial(n):\n    out[i] = x[i]\n    out[i] = x[i] + float32(1.0)",
        "out in x: its elements are not written by one plain store",
    ),
    "a result whose elements are written again and again": (
        "x: f32[n], out: f32[n]",
        "for i in serial(n):\n    for j in serial(2):\n        out[i] = x[i]",
        "out in x: its elements are not written by the loops in turn, each once",
    ),
    "a result whose elements are written by several iterations": (
        "x: f32[n, 8], out: f32[n, 8]",
        "for i in serial(n):\n    for j in serial(8):\n        out[i, j // 2] = x[i, j // 2]",
        "out in x: its elements are not written by the loops in turn, each once",
    ),
    "a result that is written here and there": (
        "x: f32[n], out: f32[n]",
        "for i in serial(n):\n    if x[i] < float32(0.0):\n        out[i] = x[i]",
        "out in x: its elements are written under a condition",
    ),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_a_result_may_take_over(name: str) -> None:
    params, body, expected = ALLOWED[name]
    made, pairs, _ = in_place(program_text(params, body))
    assert pairs == expected
    scheduled = schedule_program(made, Target.host())
    assert scheduled.attrs[IN_PLACE] == in_place_pairs(made)[0]


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_result_may_not_take_over(name: str) -> None:
    params, body, reason = FORBIDDEN[name]
    _, pairs, reasons = in_place(program_text(params, body))
    assert ("x", "out") not in pairs and ("a", "out") not in pairs and reason in reasons


@pytest.mark.parametrize("types", [("f32", "f64"), ("f32", "f16")])
def test_elements_of_another_size_do_not_fit(types: tuple[str, str]) -> None:
    a, b = types
    wide = {"f16": "float16", "f64": "float64"}[b]
    text = program_text(f"x: {a}[n], out: {b}[n]", f"for i in serial(n):\n    out[i] = {wide}(x[i])", symbols="n")
    assert in_place(text)[1:] == (set(), ())


TILED = program_text(
    "y: f32[m, n], x: f32[n, m], out: f32[n, m]",
    "for i in serial(n):\n    for j in serial(m):\n        out[i, j] = y[j, i] + x[i, j]",
)
STAGED = program_text(
    "y: f32[n, m], x: f32[n, m], out: f32[n, m]",
    """
for i in serial(n):
    with allocate((m,), "float32") as t:
        with allocate((), "float32", "local") as total:
            total[()] = float32(0.0)
            for j in serial(m):
                t[j] = exp(y[i, j])
            for k in serial(m):
                total[()] += t[k]
            for l in serial(m):
                out[i, l] = t[l] / total[()] + x[i, l]
""",
)


def test_tiles_of_a_transposition_overlap_so_an_operand_is_read_twice() -> None:
    """Without tiles, x could be overwritten: each element is read where it is written."""
    _, pairs, _ = in_place(TILED)
    assert pairs == {("x", "out")}
    context = PassContext(Target.host())
    (scheduled,) = schedule_cpu(module(TILED), context).programs().values()
    assert IN_PLACE not in scheduled.attrs
    assert [str(d) for d in context.decisions] == [
        "in_place: f: no, out in y: other elements are read than the one that is written",
        "in_place: out of f in x: no, its schedule computes elements twice, or stages other values in the result",
    ]


def test_a_row_that_is_staged_in_the_result_may_not_overwrite_what_is_read_later() -> None:
    """The row t lives in the output's row where it is long; x is read after that was written."""
    made, pairs, _ = in_place(STAGED)
    assert pairs == {("x", "out"), ("y", "out")}
    (kept,) = schedule_program(made, Target.host()).attrs[IN_PLACE]  # type: ignore[misc, union-attr]
    assert made.params[kept[0]].name == "y"  # type: ignore[index, call-overload]


def lowered(given: IRModule, until: str) -> IRModule:
    steps = default_pipeline()
    names = [step.name for step in steps]
    return run_passes(given, steps[: names.index(until) + 1], PassContext(Target.host(), verify=True))


def shared(program: TensorProgram, x: int, out: int, symbols: dict[Any, int], rng: np.random.Generator) -> None:
    """The scheduled loops give the same in the memory of an operand."""
    shapes = [tuple(evaluate(d, symbols) for d in b.shape) for b in program.params]
    arrays = [
        rng.integers(0, 2, shape).astype(b.dtype) if b.dtype == "int64" else rng.standard_normal(shape).astype(b.dtype)
        for b, shape in zip(program.params, shapes, strict=True)
    ]
    count = len(program.inputs)
    expected = run_program(program, arrays[:count], symbols)
    arrays[out] = arrays[x].reshape(-1).view(program.params[out].dtype).reshape(shapes[out])
    run_program(program, arrays[:count], symbols, arrays[count:])
    for k, array in enumerate(expected):
        np.testing.assert_array_equal(arrays[count + k], array)


def test_the_comparison_would_find_what_must_not_share_memory() -> None:
    """The two cases above, made to share memory all the same."""
    rng = np.random.default_rng(0)
    for text, sizes in ((TILED, (18, 17)), (STAGED, (1, 5000))):
        scheduled = schedule_program(program(text), Target.host())
        x, out = (next(k for k, b in enumerate(scheduled.params) if b.name == name) for name in ("x", "out"))
        with pytest.raises(AssertionError, match="Mismatched elements"):
            shared(scheduled, x, out, dict(zip(scheduled.symbols, sizes, strict=True)), rng)


@settings(max_examples=tiers.examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(graphs(size=8), st.sampled_from([(1, 1), (4, 3), (3, 21), (18, 17), (0, 3), (5, 0)]))
def test_scheduled_loops_read_before_they_overwrite(given: IRModule, sizes: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    for found in lowered(given, "schedule").programs().values():
        symbols = {s: sizes[k % 2] for k, s in enumerate(found.symbols)}
        if any(evaluate(d, symbols) < 0 for b in found.params for d in b.shape):
            continue
        for x, out in found.attrs.get(IN_PLACE, ()):  # type: ignore[misc, union-attr, str-unpack]
            shared(found, x, out, symbols, rng)  # type: ignore[arg-type]


# reuse_operands

ADD = """
k = symbol("k")
@program(symbols=(k,), outputs=1, in_place=((0, 2),))
def add(a: f32[k], b: f32[k], out: f32[k]):
    for i in serial(k):
        out[i] = a[i] + b[i // 2]
"""


def reuse(given: IRModule) -> IRModule:
    return reuse_operands(given, PassContext(Target.parse("llvm")))


def main(statements: str, result: str, params: str = "x: f32[n], c: bool[]") -> str:
    body = "\n".join(f"    {line}" for line in statements.strip().split("\n"))
    return f'n = symbol("n")\n@function\ndef main({params}):\n{body}\n    return {result}\n{ADD}'


NEW = 'memory.alloc_tensor(shape(n), dtype="float32")'


def test_a_dying_operand_gives_its_memory() -> None:
    before = f"""
t: f32[n] = {NEW}
call(add, x, x, t, sym=(n,))
u: f32[n] = {NEW}
call(add, t, x, u, sym=(n,))
v: f32[n] = {NEW}
call(add, u, x, v, sym=(n,))
"""
    after = f"""
t: f32[n] = {NEW}
call(add, x, x, t, sym=(n,))
u: f32[n] = memory.part(t, shape(0), shape(n), dtype="float32")
call(add, t, x, u, sym=(n,))
v: f32[n] = memory.part(u, shape(0), shape(n), dtype="float32")
call(add, u, x, v, sym=(n,))
"""
    assert_becomes(reuse, main(before, "v"), main(after, "v"), stage="dps")


KEPT = {
    "an argument": (f"u: f32[n] = {NEW}\ncall(add, x, x, u, sym=(n,))", "u"),
    "what is read later": (
        f"t: f32[n] = {NEW}\ncall(add, x, x, t, sym=(n,))\nu: f32[n] = {NEW}\ncall(add, t, x, u, sym=(n,))",
        "(t, u)",
    ),
    "what is read later under another name": (
        f"t: f32[n] = {NEW}\ncall(add, x, x, t, sym=(n,))\nr: f32[1, n] = reshape(t, shape(1, n))\n"
        f"u: f32[n] = {NEW}\ncall(add, t, x, u, sym=(n,))",
        "(r, u)",
    ),
    "what another operand reads": (
        f"t: f32[n] = {NEW}\ncall(add, x, x, t, sym=(n,))\nu: f32[n] = {NEW}\ncall(add, t, t, u, sym=(n,))",
        "u",
    ),
    "what another operand reads under another name": (
        f"t: f32[n] = {NEW}\ncall(add, x, x, t, sym=(n,))\nr: f32[n] = reshape(t, shape(n))\n"
        f"u: f32[n] = {NEW}\ncall(add, t, r, u, sym=(n,))",
        "u",
    ),
    "a result that something has been written to": (
        f"t: f32[n] = {NEW}\nu: f32[n] = {NEW}\ncall(add, x, x, u, sym=(n,))\ncall(add, x, u, t, sym=(n,))\n"
        "call(add, t, x, u, sym=(n,))",
        "u",
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_an_operand_keeps(name: str) -> None:
    assert_stays(reuse, main(*KEPT[name]), stage="dps")


def test_what_a_loop_reads_again_is_not_overwritten_in_it() -> None:
    text = main(
        f"""
t: f32[n] = {NEW}
call(add, x, x, t, sym=(n,))
@loop(c, x)
def last(v: f32[n]) -> Tuple(f32[n]):
    u: f32[n] = {NEW}
    call(add, t, x, u, sym=(n,))
    return (c, u)
y: f32[n] = last[0]
""",
        "y",
    )
    assert_stays(reuse, text, stage="dps")


def test_a_part_of_larger_memory_does_not_leave_as_a_result() -> None:
    """The result would keep all of t alive."""
    statements = f"""
t: f32[n*2] = memory.alloc_tensor(shape(n*2), dtype="float32")
call(add, w, w, t, sym=(n*2,))
p: f32[n] = memory.part(t, shape(n*4), shape(n), dtype="float32")
u: f32[n] = {NEW}
call(add, p, x, u, sym=(n,))
"""
    assert_stays(reuse, main(statements, "u", "x: f32[n], w: f32[n*2]"), stage="dps")
    inside = statements + f"v: f32[n] = {NEW}\ncall(add, x, u, v, sym=(n,))"
    made = reuse(module(main(inside, "v", "x: f32[n], w: f32[n*2]")))
    verify(made, "dps")
    assert 'u: Tensor((n,), "float32") = memory.part(p, shape(0)' in str(made)


def test_the_decision_says_why() -> None:
    context = PassContext(Target.parse("llvm"))
    statements, result = KEPT["what is read later"]
    reuse_operands(module(main(statements, result)), context)
    assert [str(d) for d in context.decisions] == [
        "reuse_operands: t of add in x: no, 'x' may lie in memory that was not allocated in the same body: an argument,"
        " a constant (bytes n*4)",
        "reuse_operands: u of add in t: no, 't' is read later (bytes n*4)",
    ]


# Compiled


@settings(max_examples=tiers.examples(30), deadline=None, suppress_health_check=list(HealthCheck))
@given(graphs(size=10, control=True))
def test_compiled_models_compute_in_place(given: IRModule) -> None:
    exe = rl.compile(given)
    for sizes in [(4, 3), (1, 1), (18, 33), (0, 3), (5, 0)]:
        args: Any = arguments(*sizes, flag=sizes[0] != 4)
        before = [np.copy(a) for a in args]
        assert_same_results(exe(*args), Interpreter(given).run("main", *args))
        for array, kept in zip(args, before, strict=True):
            np.testing.assert_array_equal(array, kept)


CONVOLUTIONS = {
    "pointwise": ((1, 1, 19, 19), 0, {}),
    "dense": ((3, 3, 8, 19), 1, {"groups": 1}),
    "by Winograd's transforms": ((3, 3, 19, 19), 1, {}),
    "depthwise": ((3, 3, 1, 19), 1, {"groups": 19}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_add_in_place(name: str) -> None:
    """What is added to a convolution gives its memory, whichever kernel computes that."""
    shape, pad, attrs = CONVOLUTIONS[name]
    rng = np.random.default_rng(0)
    inner = shape[2] * attrs.get("groups", 1)
    filters = [rng.standard_normal(s).astype("f4") / 5 for s in ((1, 1, 4, inner), (1, 1, 4, 19), shape)]
    bb = BlockBuilder()
    n, h, w = (bb.symbol(symbol) for symbol in "nhw")
    with bb.function("main", x=TensorType.of((n, h, w, 4), "float32")) as (x,):
        a, b = (bb.emit(ops.conv(x, Constant.of(f), (0,) * 4, layout="last")) for f in filters[:2])
        c = bb.emit(ops.conv(a, Constant.of(filters[2]), (pad,) * 4, layout="last", **attrs))
        bb.result(bb.emit(ops.relu(bb.emit(ops.add(c, b)))))
    context = PassContext(Target.host())
    exe, oracle = rl.compile(bb.module(), context=context), Interpreter(bb.module())
    assert [d.taken for d in context.decisions if d.step == "reuse_operands"].count(True) == 1
    for size in ((1, 1, 1), (2, 3, 3), (1, 13, 6), (1, 24, 25), (0, 8, 8), (3, 2, 7)):
        x = rng.standard_normal((*size, 4)).astype("f4")
        np.testing.assert_allclose(exe(x), oracle.run("main", x), rtol=2e-4, atol=2e-4)


def test_less_memory_is_needed() -> None:
    """A residual stream takes one tensor, not a second one at each sum."""
    text = """
n = symbol("n")
@function
def main(x: f32[n, 64], w: f32[64, 64]):
    a: f32[n, 64] = matmul(x, w)
    b: f32[n, 64] = softmax(a, axis=1)
    c: f32[n, 64] = matmul(b, w)
    d: f32[n, 64] = add(c, a)
    e: f32[n, 64] = softmax(d, axis=1)
    f: f32[n, 64] = matmul(e, w)
    g: f32[n, 64] = add(f, d)
    h: f32[n] = sum(g, axes=(1,))
    return h
"""
    arenas = []
    for skipped in ((), ("reuse_operands",)):
        context = PassContext(Target.host())
        steps = [step for step in default_pipeline() if step.name not in skipped]
        exe = rl.compile(module(text), passes=steps, context=context)
        plan = context.memory_plans["main"]
        arenas.append(plan.arena_bytes({v: 64 for v in plan.arena.free_vars()}))
        for n in (5, 1, 0, 33):
            x, w = np.ones((n, 64), "f4"), np.full((64, 64), 0.01, "f4")
            np.testing.assert_allclose(exe(x, w), Interpreter(module(text)).run("main", x, w), rtol=1e-5)
    assert arenas == [2 * 64 * 64 * 4, 3 * 64 * 64 * 4]
