"""Programs as careful machine code: the same results and errors as the interpreter's, for any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import relaxlite as rl
from relaxlite.codegen import interpreter
from relaxlite.codegen.llvm import machine_code
from relaxlite.codegen.llvm.guarded import unschedule
from relaxlite.errors import ExecutionError, InputError, OutOfBoundsError
from relaxlite.ir.expr import Constant
from relaxlite.ir.program import (
    Allocate,
    Buffer,
    CallLibrary,
    Check,
    Compare,
    For,
    IfThenElse,
    IndexValue,
    LetIndex,
    LibraryFound,
    Literal,
    Load,
    Prefetch,
    Select,
    Stmt,
    Store,
    TensorProgram,
    loops,
    seq,
)
from relaxlite.ir.program_visitor import walk_stmts
from relaxlite.ir.symbolic import SymVar, sym
from relaxlite.target import Target
from relaxlite.validation import running
from relaxlite.validation.running import run_program
from tests.support import random_programs, tiers
from tests.support.random_programs import assert_close, inputs_for, values_of, work_of

N = SymVar("n", lower=0)
X, OUT = Buffer("x", (N,), "float32"), Buffer("out", (N,), "float32")
ZERO = Literal(0.0, "float32")


@pytest.fixture(autouse=True)
def as_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few steps there are."""
    monkeypatch.setattr(running, "MAX_STEPS", -1)


def program(body: Stmt, *params: Buffer) -> TensorProgram:
    return TensorProgram(params or (X, OUT), (N,), body)


def each(make: Callable[[SymVar], Stmt], extent: Any = N, kind: str = "serial") -> Stmt:
    i = SymVar("i")
    return For(i, sym(extent), make(i), kind)  # type: ignore[arg-type]


def both(given: TensorProgram, inputs: list[Any], values: Any = None, **options: Any) -> tuple[list[Any], list[Any]]:
    return run_program(given, inputs, values, **options), interpreter.run_program(given, inputs, values, **options)


@settings(max_examples=tiers.examples(80), deadline=None)
@given(random_programs.maps() | random_programs.reductions() | random_programs.products() | random_programs.rows())
def test_random_programs_give_what_the_interpreter_gives(given: TensorProgram) -> None:
    for sizes in [(0, 0), (1, 1), (5, 3), (17, 9)]:
        if work_of(given, sizes) <= random_programs.MAX_WORK:
            got, want = both(given, inputs_for(given, sizes), values_of(given, sizes))
            for a, b, buffer in zip(got, want, given.outputs, strict=True):
                assert_close(a, b, buffer.dtype)


@pytest.mark.parametrize("far", [-1, 1, 1000, -(1 << 40)])
@pytest.mark.parametrize("where", ["load", "store", "combined store", "local load"])
@pytest.mark.parametrize("kind", ["serial", "vectorized", "parallel", "unrolled"])
def test_an_access_outside_of_a_buffer_is_found(kind: str, where: str, far: int) -> None:
    table = Buffer("table", (sym(8),), "float32", "local")

    def body(i: SymVar) -> Stmt:
        value = Load(table if where == "local load" else X, (i + far if where.endswith("load") else i,))
        return Store(OUT, (i + far if where.endswith("store") else i,), value, "add" if "combined" in where else None)

    given = program(Allocate(table, seq(each(lambda i: Store(table, (i,), ZERO), 8), each(body, 8, kind))))
    for run in (run_program, interpreter.run_program):
        with pytest.raises(OutOfBoundsError, match="shift: a buffer is accessed outside its bounds"):
            run(given, [np.zeros(8, "f4")], name="shift")


def test_a_side_that_is_not_chosen_reads_nothing() -> None:
    def padded(i: SymVar) -> Stmt:
        is_there = Compare("lt", IndexValue(i + 2, "int64"), IndexValue(sym(N), "int64"))
        return Store(OUT, (i,), Select(is_there, Load(X, (i + 2,)), ZERO))

    x = np.arange(5, dtype="f4")
    got, want = both(program(each(padded, kind="vectorized")), [x])
    np.testing.assert_array_equal(got[0], [2, 3, 4, 0, 0])
    np.testing.assert_array_equal(got[0], want[0])
    assert both(program(each(padded)), [x[:0]])[0][0].shape == (0,)


def test_places_that_data_names_are_checked() -> None:
    places, p = Buffer("places", (N,), "int64"), SymVar("p")
    given = program(
        each(lambda i: LetIndex(p, Load(places, (i,)), Store(OUT, (i,), Load(X, (sym(p),))))), X, places, OUT
    )
    x = np.arange(3, dtype="f4")
    np.testing.assert_array_equal(run_program(given, [x, np.array([2, 0, 1])])[0], [2, 0, 1])
    for wrong in (3, -1, 1 << 62, -(1 << 62)):
        with pytest.raises(OutOfBoundsError):
            run_program(given, [x, np.array([2, wrong, 1])])


@pytest.mark.parametrize("count", [sym(4), 70_000 * sym(1), sym(N) + 3])
def test_what_was_never_written_is_no_number(count: Any) -> None:
    scratch = Buffer("scratch", (count,), "float32", "local")
    given = program(Allocate(scratch, each(lambda i: Store(OUT, (i,), Load(scratch, (i,))))))
    for found in both(given, [np.zeros(3, "f4")]):
        assert np.isnan(found[0]).all()
    fresh = run_program(program(seq()), [np.zeros(3, "f4")])[0]
    assert np.isnan(fresh).all()


def test_checks_fail_with_their_messages() -> None:
    def check(most: int, message: str) -> Stmt:
        return Check(Compare("lt", IndexValue(sym(N), "int64"), Literal(most, "int64")), message)

    given = program(seq(check(7, "too many"), check(5, "many"), each(lambda i: Store(OUT, (i,), Load(X, (i,))))))
    np.testing.assert_array_equal(run_program(given, [np.ones(4, "f4")])[0], np.ones(4))
    for size, message in ((5, "^many$"), (7, "^too many$")):
        with pytest.raises(ExecutionError, match=message):
            run_program(given, [np.ones(size, "f4")])


def test_what_stands_beside_a_library_runs_in_its_place() -> None:
    copy = each(lambda i: Store(OUT, (i,), Load(X, (i,))), kind="parallel")
    call = CallLibrary("openblas", "cblas_scopy", ())
    given = program(IfThenElse(LibraryFound("openblas", "cblas_scopy"), call, copy))
    for found in both(given, [np.ones(3, "f4")]):
        np.testing.assert_array_equal(found[0], np.ones(3))
    with pytest.raises(ExecutionError, match="cblas_scopy of openblas"):
        run_program(program(call), [np.ones(3, "f4")])


def test_loops_lose_their_kinds() -> None:
    ask = Prefetch(X, (sym(0),))
    made = unschedule(program(each(lambda i: seq(ask, Store(OUT, (i,), Load(X, (i,)))), kind="parallel")))
    assert [s.kind for s in walk_stmts(made.body) if isinstance(s, For)] == ["serial"]
    assert not any(isinstance(s, Prefetch) for s in walk_stmts(made.body))


def test_arrays_may_lie_anywhere_and_are_checked() -> None:
    double = program(each(lambda i: Store(OUT, (i,), Load(X, (i,)))))
    whole, out = np.arange(10, dtype="f4"), np.zeros(10, "f4")
    run_program(double, [whole[::2]], outputs=[out[::2]])
    np.testing.assert_array_equal(out, [0, 0, 2, 0, 4, 0, 6, 0, 8, 0])
    with pytest.raises(InputError, match=r"copy: out must be \(10,\) float32, got \(5,\) float32"):
        run_program(double, [whole], outputs=[out[::2]], name="copy")


def test_few_steps_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(program: TensorProgram, is_optimized: bool) -> Any:
        raise AssertionError("compiled")

    monkeypatch.setattr(running, "MAX_STEPS", 18)  # of 3 * 3 stores and as many loads
    monkeypatch.setattr(running, "_compiled", refuse)
    table = loops("ij", (N, N), lambda i, j: Store(OUT, (i,), Load(X, (j,)), "add"))
    run_program(program(table), [np.ones(3, "f4")], outputs=[np.zeros(3, "f4")])
    with pytest.raises(AssertionError, match="compiled"):
        run_program(program(table), [np.ones(4, "f4")])


def test_machine_code_of_very_many_steps_is_optimized(monkeypatch: pytest.MonkeyPatch) -> None:
    optimized, to_object = [], machine_code.to_object

    def noted(text: str, target: Target, *, optimize: bool) -> bytes:
        optimized.append(optimize)
        return to_object(text, target, optimize=optimize)

    monkeypatch.setattr(machine_code, "to_object", noted)
    monkeypatch.setattr(running, "MAX_UNOPTIMIZED_STEPS", 18)
    table = program(loops("ij", (N, N), lambda i, j: Store(OUT, (i,), Load(X, (j,)), "add")))
    for size in (3, 4):
        (found,) = run_program(table, [np.ones(size, "f4")], outputs=[np.zeros(size, "f4")])
        np.testing.assert_array_equal(found, np.full(size, size, "f4"))
    assert optimized == [False, True]


def test_every_program_of_a_pipeline_means_the_same() -> None:
    """Tiles with tails, rows in registers: at sizes that are no multiples."""
    bb = rl.BlockBuilder()
    n = bb.symbol("n")
    rng = np.random.default_rng(0)
    w = Constant.of(rng.standard_normal((48, 35)).astype(np.float32))
    with bb.function("main", x=rl.TensorType.of((n, 48), "float32")) as (x,):
        y = bb.emit(rl.ops.gelu(bb.emit(rl.ops.matmul(x, w))))
        bb.result(bb.emit(rl.ops.softmax(y, axis=-1)))
    rl.compile(bb.module(), validate=True)
