"""Schedule primitives keep the meaning of programs: random steps on random programs, and what each must refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from relaxlite.codegen.interpreter import run_program
from relaxlite.errors import ScheduleError
from relaxlite.ir.encoding import fingerprint
from relaxlite.ir.equality import first_difference
from relaxlite.ir.module import IRModule
from relaxlite.ir.parser import parse_module
from relaxlite.ir.printer import print_module
from relaxlite.ir.program import Buffer, Literal, Store, TensorProgram, loops
from relaxlite.ir.program_verifier import verify_program
from relaxlite.ir.symbolic import evaluate, sym
from relaxlite.passes.schedule.cpu.programs import schedule_program
from relaxlite.passes.schedule.primitives import Schedule, steps_of
from relaxlite.target import Target
from tests.support import tiers
from tests.support.ir_text import program
from tests.support.native_kernel import NativeKernel
from tests.support.random_programs import (
    MAX_WORK,
    SIZES,
    N,
    assert_close,
    draw_array,
    maps,
    products,
    reductions,
    rows,
    scrambled,
    values_of,
    work_of,
)
from tests.support.random_schedules import attempt, dots, draw_step, in_place, pipelines

MAX_STEPS = 7
PROGRAMS = {f.__name__: f for f in (maps, products, reductions, rows, pipelines, in_place, dots)}


def arrays_for(program: TensorProgram, sizes: tuple[int, int], seed: int) -> list[Any]:
    rng, values = np.random.default_rng(seed), values_of(program, sizes)
    shapes = [tuple(evaluate(d, values) for d in b.shape) for b in program.inputs]
    return [np.asarray(draw_array(s, b.dtype, rng)) for s, b in zip(shapes, program.inputs, strict=True)]


def packed(s: Schedule, buffers: tuple[Buffer, ...], arrays: list[Any], sizes: tuple[int, int]) -> list[Any]:
    """The arrays in the layouts that the schedule gave to the parameters of their names."""
    found = {b.name: array for b, array in zip(buffers, arrays, strict=True)}
    for name, packing in s.packings:
        if name in found:
            (found[name],) = run_program(packing, [found[name]], values_of(packing, sizes))
    return [found[b.name] for b in buffers]


def check_same(before: TensorProgram, s: Schedule, sizes: tuple[int, int], *, native: bool = False) -> None:
    """The scheduled program fills the same outputs, in the layouts that it gives them."""
    after, seed = s.program(), 3
    inputs, values = arrays_for(before, sizes, seed), values_of(before, sizes)
    wanted = run_program(before, inputs, values)
    expected = packed(s, before.outputs, wanted, sizes)
    given = packed(s, before.inputs, inputs, sizes)
    runs = [run_program(after, given, values), run_program(scrambled(after), given, values)]
    if native:
        outputs = [np.zeros_like(array) for array in expected]
        assert NativeKernel(after)([*given, *outputs], [values[v] for v in after.symbols]) == 0
        runs.append(outputs)
    masks = packed(s, before.outputs, [np.ones(w.shape, w.dtype) for w in wanted], sizes)
    for outputs in runs:
        for got, want, mask, buffer in zip(outputs, expected, masks, before.outputs, strict=True):
            assert_close(np.where(mask != 0, got, want), want, buffer.dtype)


def scheduled(data: Any, kind: str) -> tuple[TensorProgram, Schedule, tuple[int, int]]:
    """A random program, random steps on it (those that are refused change nothing), and sizes to run it at."""
    before = data.draw(PROGRAMS[kind]())
    sizes = data.draw(st.sampled_from(SIZES)), data.draw(st.sampled_from(SIZES))
    assume(work_of(before, sizes) <= MAX_WORK and (kind != "pipelines" or min(sizes) > 0))  # which reads row 0
    s = Schedule(before)
    for _ in range(data.draw(st.integers(1, MAX_STEPS))):
        if attempt(draw_step(data.draw, s)):
            verify_program("scheduled", s.program())
    return before, s, sizes


@pytest.mark.parametrize("kind", PROGRAMS)
@settings(max_examples=tiers.examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_accepted_steps_keep_the_meaning(kind: str, data: Any) -> None:
    before, s, sizes = scheduled(data, kind)
    check_same(before, s, sizes)
    again = Schedule.replay(before, s.program().attrs.get("schedule", ()))
    assert str(again) == str(s) and first_difference(again.program(), s.program()) is None


@pytest.mark.parametrize("kind", PROGRAMS)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(data=st.data())
def test_machine_code_of_schedules(kind: str, data: Any) -> None:
    before, s, sizes = scheduled(data, kind)
    assume(s.steps)
    check_same(before, s, sizes, native=True)


def test_a_loop_without_iterations_is_split_evenly_too() -> None:
    out = Buffer("out", (sym(0), N), "int32")
    before = TensorProgram((out,), (N,), loops("ij", (0, N), lambda i, j: Store(out, (i, j), Literal(1, "int32"))))
    s = Schedule(before)
    s.split("i", 3, tail="even")
    verify_program("empty", s.program())
    check_same(before, s, (0, 5))


# Traces


def matmul() -> TensorProgram:
    return program(
        """
        m = symbol("m")
        @program(symbols=(m,), outputs=1)
        def matmul(a: f32[m, 24], b: f32[24, 40], c: f32[m, 40]):
            for i in serial(m):
                for j in serial(40):
                    with allocate((), "float32", "local") as t:
                        t[()] = float32(0.0)
                        for k in serial(24):
                            t[()] += a[i, k] * b[k, j]
                        c[i, j] = t[()]
        """
    )


TRACE = """\
s = Schedule(program)
s.pack("b", ((1, "//", 16), 0, (1, "%", 16)))
s.split("j", 16, tail="mask")  # jo, ji
s.split("i", 2)  # io, ii, it
s.decompose_reduction("t", "ji")  # t
s.vectorize("ji")
s.stage("b", "jo", order=(0, 1, 2))  # b_copy
s.parallelize("io")"""


def test_a_schedule_prints_and_runs_again() -> None:
    s = Schedule(matmul())
    s.pack("b", ((1, "//", 16), 0, (1, "%", 16)))
    assert s.split("j", 16, tail="mask") == ("jo", "ji")
    assert s.split("i", 2) == ("io", "ii", "it")
    assert s.decompose_reduction("t", "ji") == "t"
    s.vectorize("ji")
    assert s.stage("b", "jo", order=(0, 1, 2)) == "b_copy"
    s.parallelize("io")
    assert str(s) == TRACE
    assert s.loops()[:3] == ("io", "ii", "jo") and s.copies("ji") == ("ji", "ji_2", "ji_3", "ji_1")
    assert s.loops("c") == ("io", "ii", "jo", "ji_3") and s.buffers_in("it") == ("t_1",)
    scope = {"Schedule": Schedule, "program": matmul()}
    exec(TRACE, scope)  # valid Python
    for again in (scope["s"], Schedule.replay(matmul(), TRACE.split("\n")), Schedule.replay(matmul(), s.steps)):
        assert first_difference(again.program(), s.program()) is None


def test_a_program_carries_its_schedule() -> None:
    s = Schedule(matmul())
    s.split("i", 2, tail="mask")
    text = print_module(IRModule({"matmul": s.program()}))
    head = """\
@program(symbols=(m,), outputs=1, schedule=(
    'split("i", 2, tail="mask")  # io, ii',
))
def matmul("""
    assert head in text
    back = parse_module(text)["matmul"]
    assert first_difference(back, s.program()) is None
    assert first_difference(Schedule.replay(matmul(), steps_of(back)).program(), back) is None


@pytest.mark.parametrize("line", ["split(i, 2)", "split", "1 + 1", "import os", "split('i', f(2))"])
def test_a_line_that_is_no_step(line: str) -> None:
    with pytest.raises(ScheduleError, match="is no step of a schedule; one is written split"):
        Schedule.replay(matmul(), [line])


def test_an_unknown_primitive() -> None:
    with pytest.raises(ScheduleError, match="program is no primitive; there are split, fuse"):
        Schedule.replay(matmul(), ["program()"])


def test_the_rules_leave_a_schedule() -> None:
    """Which rule took which loops, the size of tiles and vectors, and what runs in parallel."""
    target = Target.parse("llvm -mcpu=x86-64-v4 -mtriple=x86_64-unknown-linux-gnu")
    assert steps_of(schedule_program(matmul(), target)) == (
        'strategy("fma", rows=1)',
        'register_tile("j", row="i", rows=8, vectors=3, lanes=16)',
        'parallelize("io")',
    )
    sums = program(
        """
        n = symbol("n")
        @program(symbols=(n,), outputs=2)
        def stages(x: f32[n, 9], y: f32[n, 9], z: f32[n]):
            for i in serial(n):
                for j in serial(9):
                    y[i, j] = exp(x[i, j])
            for p in serial(n):
                z[p] = float32(0.0)
                for q in serial(9):
                    z[p] += y[p, q]
        """
    )
    made = schedule_program(sums, target)
    assert steps_of(made) == (
        'fuse("i", "j")',
        'vectorize("ij", lanes=16)',
        'store_past_caches("y")',
        'split_reduction("q", 16, 4)',
        'parallelize("ijo")',
        'parallelize("p")',
    )
    with pytest.raises(ScheduleError, match="strategy is no primitive"):
        Schedule.replay(matmul(), steps_of(schedule_program(matmul(), target)))


def test_equal_programs_may_have_different_schedules() -> None:
    """The steps say how a program came about, and neither equality nor the cache of kernels asks."""
    s, t = Schedule(matmul()), Schedule(matmul())
    s.split("i", 4, tail="mask")
    t.predicate("i", 4)
    t.split("i", 4, tail="none")
    assert str(s) != str(t) and first_difference(s.program(), t.program()) is None
    assert fingerprint(s.program()) == fingerprint(t.program())
