"""Scratch memory of programs as tensors of their callers (lift_workspaces)."""

from __future__ import annotations

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.ir.module import IRModule
from relaxlite.ir.program import Allocate
from relaxlite.ir.program_visitor import walk_stmts
from relaxlite.passes.context import PassContext
from relaxlite.passes.memory.lift_workspaces import lift_workspaces
from relaxlite.target import Target
from tests.support.ir_text import assert_becomes, module

CALL = """
n = symbol("n")
@function
def main(x: f32[n]):
    y: f32[n] = memory.alloc_tensor(shape(n), dtype="float32")
    call(f, x, y, sym=(n,))
    return y
"""


def program(body: str, params: str = "x: f32[k], out: f32[k]", attrs: str = "outputs=1") -> str:
    lines = "\n".join(f"    {line}" for line in body.strip().split("\n"))
    return f'k = symbol("k")\n@program(symbols=(k,), {attrs})\ndef f({params}):\n{lines}\n'


def lift(given: IRModule) -> IRModule:
    return lift_workspaces(given, PassContext(Target.parse("llvm")))


BACKWARDS = """
for i in serial(k):
    t[i] = x[i]
for j in serial(k):
    out[j] = t[k - 1 - j]
"""


def scratch(body: str, shape: str = "(k,)", scope: str = "") -> str:
    lines = "\n".join(f"    {line}" for line in body.strip().split("\n"))
    return f'with allocate({shape}, "float32"{scope}) as t:\n{lines}'


def test_a_workspace_becomes_a_parameter() -> None:
    after_call = """
n = symbol("n")
@function
def main(x: f32[n]):
    y: f32[n] = memory.alloc_tensor(shape(n), dtype="float32")
    t: f32[n] = memory.alloc_tensor(shape(n), dtype="float32")
    call(f, x, y, t, sym=(n,))
    return y
"""
    after = program(BACKWARDS, "x: f32[k], out: f32[k], t: f32[k]", "outputs=2, workspaces=1")
    assert_becomes(lift, CALL + program(scratch(BACKWARDS)), after_call + after, stage="dps")


def test_a_small_one_goes_to_the_stack() -> None:
    body = "t[0] = x[0]\nfor j in serial(k):\n    out[j] = t[0]"
    before, after = (program(scratch(body, "(1,)", scope)) for scope in ("", ', "local"'))
    assert_becomes(lift, CALL + before, CALL + after, stage="dps")


KEPT = {
    "each thread": (
        'for p in parallel(2):\n    with allocate((k,), "float32") as t:\n        for i in serial(k):\n'
        "            t[i] = x[i]\n        for j in serial(k):\n            out[j] = t[j]",
        "each thread has one of its own, and how many there are is known only at run time",
    ),
    "a size that a loop knows": (
        'for p in serial(k):\n    with allocate((p,), "float32") as t:\n        for i in serial(p):\n'
        "            t[i] = x[i]\n        out[p] = x[p]",
        "its size is known only inside of a loop, or by data",
    ),
    "a size that may be negative": (
        scratch("for j in serial(k):\n    out[j] = x[j]", "(k - 5,)"),
        "it is not proven that its size k - 5 is not negative",
    ),
    "a condition": (
        "if index(k) < index(8):\n"
        + "\n".join(f"    {line}" for line in scratch(BACKWARDS).split("\n"))
        + "\nelse:\n    for j in serial(k):\n        out[j] = x[j]",
        "it is needed only under a condition",
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_it_stays_because_of(name: str) -> None:
    body, reason = KEPT[name]
    given, context = module(CALL + program(body)), PassContext(Target.parse("llvm"))
    assert lift_workspaces(given, context) is given
    assert [d.reason for d in context.decisions] == [reason]


MODELS = {
    "argsort": ("y: i64[n, m] = argsort(x, axis=1)", "x: f32[n, m]"),
    "argsort along columns": ("y: i64[n, m] = argsort(x, axis=0, descending=True)", "x: f32[n, m]"),
    "argmax along columns": ("y: i64[m] = argmax(x, axis=0)", "x: f32[n, m]"),
    "two sorts, one behind the other": (
        "a: i64[n, m] = argsort(x, axis=1)\nb: i64[n, m] = argsort(a, axis=0)\ny: i64[n, m] = add(a, b)",
        "x: f32[n, m]",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_compiled_models(name: str) -> None:
    statements, params = MODELS[name]
    body = "\n".join(f"    {line}" for line in statements.split("\n"))
    given = module(f'n = symbol("n", lower=1)\nm = symbol("m")\n@function\ndef main({params}):\n{body}\n    return y\n')
    context = PassContext(Target.host())
    exe = rl.compile(given, context=context)
    for n, m in ((1, 0), (1, 1), (3, 5), (17, 33), (300, 7)):
        rng = np.random.default_rng(n)
        x = rng.standard_normal((n, m)).astype("f4")
        np.testing.assert_array_equal(exe(x), Interpreter(given).run("main", x))
    assert any(d.step == "lift_workspaces" and d.taken for d in context.decisions)


def test_workspaces_are_part_of_the_plan_and_share_memory() -> None:
    statements, params = MODELS["two sorts, one behind the other"]
    body = "\n".join(f"    {line}" for line in statements.split("\n"))
    given = module(f'n = symbol("n", lower=1)\nm = symbol("m")\n@function\ndef main({params}):\n{body}\n    return y\n')
    context = PassContext(Target.host())
    rl.compile(given, context=context)
    plan = context.memory_plans["main"]
    assert {t.name for t in plan.tensors} == {"merged", "merged_1", "b"}  # a becomes the result
    values = {v: 64 for v in plan.arena.free_vars()}
    assert plan.arena_bytes(values) == 2 * 64 * 64 * 8  # one workspace after the other


def test_programs_hold_no_scratch_memory_after_it() -> None:
    made = lift(module(CALL + program(scratch(BACKWARDS))))
    assert not any(isinstance(s, Allocate) for p in made.programs().values() for s in walk_stmts(p.body))
    x = np.arange(5, dtype="f4")
    np.testing.assert_array_equal(Interpreter(made).run("main", x), x[::-1])
