"""Watching memory while a model runs: sound plans raise no alarm, and a wrong one is found at the first wrong read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import relaxlite as rl
from relaxlite import config
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.errors import ExecutionError
from relaxlite.ir.module import IRModule
from relaxlite.passes.context import PassContext
from relaxlite.passes.memory import plan_memory as planner
from relaxlite.passes.memory.aliases import Aliases, find_aliases
from relaxlite.runtime.executable import Call, Instruction, Ret
from relaxlite.runtime.vm import register_extern
from relaxlite.target import Target
from tests.runtime.test_vm import R, builtin, call, floats, program, run
from tests.support import tiers
from tests.support.ir_text import module
from tests.support.random_graphs import arguments, assert_same_results, graphs

# Each tensor is larger than the one before, so that none takes another's place.
GROWING = """
n = symbol("n")
@function
def main(x: f32[n]):
    a: f32[n] = cumsum(x, axis=0)
    a1: f32[n + 20] = pad(a, shape(0), shape(20))
    b: f32[n + 20] = cumsum(a1, axis=0)
    b1: f32[n + 40] = pad(b, shape(0), shape(20))
    d: f32[n + 40] = cumsum(b1, axis=0)
    d1: f32[n + 60] = pad(d, shape(0), shape(20))
    e: f32[n + 60] = cumsum(d1, axis=0)
    f: f32[n] = exp(a)
    return (e, f)
"""


def compile_unverified(given: IRModule) -> rl.Executable:
    """The executable that watches memory, with no replay of the plan before."""
    return rl.compile(given, context=PassContext(Target.parse("llvm"), verify=False))


@settings(max_examples=tiers.examples(12), deadline=None, suppress_health_check=list(HealthCheck))
@given(graphs(size=10, control=True), st.booleans())
def test_sound_plans_raise_no_alarm(given: IRModule, flag: bool) -> None:
    with config.override(check_memory=True):
        exe = compile_unverified(given)
    for n, m in ((4, 3), (1, 1), (0, 3)):
        args: Any = arguments(n, m, flag=flag)
        assert_same_results(exe(*args), Interpreter(given).run("main", *args))


def test_a_life_that_is_taken_for_too_short_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """a is read again at the end, but the planner believes that it dies soon."""

    def with_short_lives(*args: Any) -> Aliases:
        aliases = find_aliases(*args)
        aliases._last = {root: min(last, aliases.step(root) + 3) for root, last in aliases._last.items()}  # type: ignore[arg-type]
        return aliases

    given, x = module(GROWING), np.ones(5, "f4")
    with config.override(check_memory=True):
        assert_same_results(compile_unverified(given)(x), Interpreter(given).run("main", x))
        monkeypatch.setattr(planner, "find_aliases", with_short_lives)
        exe = compile_unverified(given)
    message = r"the memory plan is wrong: function 'main', \d+: kernel:.*: r\d+, .* overwritten by r\d+"
    with pytest.raises(ExecutionError, match=message):
        exe(x)


ARENA = builtin("alloc_arena", 1, None, 256)
COPY = "extern:test_check_copy"


def at(register: int, offset: int) -> Call:
    """A view of 8 floats of the arena."""
    return builtin("view", register, R[1], None, offset, (8,), "float32")


def watch(*code: Instruction) -> Any:
    """Run instructions on 8 floats in register 0."""
    register_extern("test_check_copy", lambda x, out: np.copyto(out, x))
    with config.override(check_memory=True):
        return run(program(ARENA, *code, params=1), floats(8))


def test_what_is_made_in_dead_memory_is_poisoned() -> None:
    old, new = at(2, 0), at(3, 16)
    result = watch(old, call(COPY, -1, R[0], R[2]), new, builtin("make_tuple", 4, R[3]), Ret(4))
    assert np.isnan(result[0].numpy()).all()


WRONG = {
    "overwritten": (
        [at(2, 0), call(COPY, -1, R[0], R[2]), at(3, 16), call(COPY, -1, R[0], R[3]), Ret(2)],
        r"5: ret r2: r2, last used by 2: extern.*, has been overwritten by r3 in 4: extern",
    ),
    "made where another lives": (
        [at(2, 0), call(COPY, -1, R[0], R[2]), at(3, 16), call(COPY, -1, R[2], R[3]), Ret(3)],
        r"4: extern.*: r2, last used by 2: extern.*, has been overwritten by r3 in 3: r3 = builtin:view",
    ),
    "under another name": (
        [at(2, 0), call(COPY, -1, R[0], R[2]), builtin("reshape", 4, R[2], None, (4, 2)), at(3, 0), Ret(4)],
        r"r2, last used by 2: extern.*, has been overwritten by r3",
    ),
    "operands overlap": (
        [at(2, 0), at(3, 16), call(COPY, -1, R[2], R[3]), Ret(3)],
        r"3: extern.*: the operands r3 and r2 overlap",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_read_is_named(name: str) -> None:
    code, message = WRONG[name]
    with pytest.raises(ExecutionError, match=f"^the memory plan is wrong: function 'main', .*{message}"):
        watch(*code)


def test_one_after_the_other_is_right() -> None:
    result = watch(
        at(2, 0), call(COPY, -1, R[0], R[2]), at(3, 32), call(COPY, -1, R[2], R[3]),
        at(4, 0), call(COPY, -1, R[3], R[4]), builtin("copy", 5, R[4]), Ret(5),
    )  # fmt: skip
    np.testing.assert_array_equal(result, floats(8))
