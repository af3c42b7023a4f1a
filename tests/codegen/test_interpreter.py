"""The interpreter: control flow, symbols, calls of all levels, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from relaxlite.codegen.interpreter import Interpreter, run_program
from relaxlite.codegen.python_source import compile_to_python
from relaxlite.errors import ExecutionError, InputError, ShapeMismatchError
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Constant, ExternFunction, GlobalVar, If, Loop, ShapeValue, Tuple, TupleGetItem, Var
from relaxlite.ir.intrinsics import INTRINSICS
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import shape_value
from relaxlite.ir.program import (
    Allocate,
    Binary,
    Buffer,
    Cast,
    Check,
    Compare,
    Intrinsic,
    LetIndex,
    Literal,
    Select,
    Store,
    TensorProgram,
    compute,
    index,
    loops,
    seq,
)  # fmt: skip
from relaxlite.ir.scalar_functions import apply_binary, apply_intrinsic, cast
from relaxlite.ir.symbolic import SymVar, sym
from relaxlite.ir.types import UNIT, TensorType, TupleType

n = SymVar("n")


def program(body: Any, out_shape: Any, *inputs: Buffer, dtype: str = "float32") -> TensorProgram:
    """A program of one output; body(out) are its loops."""
    out = Buffer.of("out", out_shape, dtype)
    return TensorProgram((*inputs, out), (n,), body(out))


X = Buffer.of("x", (n,), "float32")
DOUBLE = program(lambda out: compute(out, lambda i: Binary("add", X[i], X[i])), (n,), X)


# Programs


def test_a_program_becomes_readable_python() -> None:
    assert compile_to_python(DOUBLE, "double").__doc__ == (
        "def kernel(x_b0, out_b1, n_s0):  # double\n"
        "    for i_s1 in range(n_s0):\n"
        "        out_b1[i_s1] = (x_b0[i_s1] + x_b0[i_s1])\n"
    )


def test_symbols_are_read_off_the_inputs_or_given() -> None:
    x = np.arange(3, dtype="f4")
    for symbols in (None, [3], {n: 3}):
        np.testing.assert_array_equal(run_program(DOUBLE, [x], symbols)[0], x + x)


def test_outputs_may_be_given() -> None:
    out = np.zeros(2, "f4")
    run_program(DOUBLE, [np.ones(2, "f4")], outputs=[out])
    np.testing.assert_array_equal(out, [2, 2])


def test_arithmetic_keeps_its_dtype() -> None:
    x = Buffer.of("x", (n,), "int8")
    wraps = program(lambda out: compute(out, lambda i: Binary("mul", x[i], x[i])), (n,), x, dtype="int8")
    assert run_program(wraps, [np.array([100, -128, 3], "i1")])[0].tolist() == [16, 0, 9]
    rounds = program(lambda out: compute(out, lambda i: Binary("add", X[i], Literal(1e-9, "float32"))), (n,), X)
    assert run_program(rounds, [np.ones(1, "f4")])[0].tolist() == [1.0]


@pytest.mark.parametrize("name", ["dot4_u8s8", "dot4_words", "dot2_halves", "lookup_bytes", "word"])
def test_intrinsics_of_words_are_those_of_arrays(name: str) -> None:
    """The interpreter computes them one at a time by Python's integers."""
    rng, kinds = np.random.default_rng(0), INTRINSICS[name].args
    columns = []
    for kind in kinds:
        limits = np.iinfo(str(kind))
        column = rng.integers(limits.min, limits.max, 200, endpoint=True, dtype=str(kind))
        columns.append(np.concatenate([[limits.min, limits.max, 0], column]).astype(str(kind)))
    if name == "lookup_bytes":
        columns[0] &= 0x0F0F0F0F  # a table has 16 bytes
    params = [Buffer.of(f"x{k}", (n,), str(kind)) for k, kind in enumerate(kinds)]
    made = program(
        lambda out: compute(out, lambda i: Intrinsic(name, tuple(p[i] for p in params), "int32")),
        (n,), *params, dtype="int32",
    )  # fmt: skip
    (found,) = run_program(made, columns)
    wanted = [apply_intrinsic(name, row) for row in zip(*columns, strict=True)]  # a table is the same in all lanes
    np.testing.assert_array_equal(found, np.asarray(wanted).reshape(-1))


def test_casts_and_shifts_of_integers_are_those_of_arrays() -> None:
    given = np.array([-(2**31), -129, -1, 0, 1, 127, 255, 70000, 2**31 - 1], np.int32)
    for dtype in ("int8", "uint8", "int16", "uint32", "int64"):
        y = Buffer.of("y", (n,), "int32")
        made = program(lambda out: compute(out, lambda i: Cast(y[i], out.dtype)), (n,), y, dtype=dtype)  # noqa: B023
        np.testing.assert_array_equal(run_program(made, [given])[0], cast(given, dtype))
    for op in ("shift_left", "shift_right"):
        for count in (0, 1, 8, 31, 32, -1):
            y = Buffer.of("y", (n,), "int32")
            moved = Literal(count, "int32")
            made = program(lambda out: compute(out, lambda i: Binary(op, y[i], moved)), (n,), y, dtype="int32")  # noqa: B023
            np.testing.assert_array_equal(run_program(made, [given])[0], apply_binary(op, given, np.int32(count)))


def test_casts_saturate() -> None:
    narrow = program(lambda out: compute(out, lambda i: Cast(X[i], "int8")), (n,), X, dtype="int8")
    values = np.array([1.9, -1.9, 300, -300, np.nan, np.inf], "f4")
    assert run_program(narrow, [values])[0].tolist() == [1, -1, 127, -128, 0, 127]


def test_select_is_lazy() -> None:
    def value(i: SymVar) -> Any:
        return Select(Compare("lt", index(i), index(n - 1)), X[i + 1], Literal(-1.0, "float32"))

    assert run_program(program(lambda out: compute(out, value), (n,), X), [np.arange(3, dtype="f4")])[0].tolist() == [
        1,
        2,
        -1,
    ]


@pytest.mark.parametrize("offset", [1, -1])
def test_an_access_outside_a_buffer_is_an_error(offset: int) -> None:
    bad = program(lambda out: compute(out, lambda i: X[i + offset]), (n,), X)
    with pytest.raises(ExecutionError, match=r"shift: a buffer is accessed outside its bounds: index -?\d is"):
        run_program(bad, [np.zeros(3, "f4")], name="shift")


def test_a_check_stops_with_its_message() -> None:
    def body(out: Buffer) -> Any:
        return seq(Check(Compare("gt", index(n), index(2)), "n is too small"), compute(out, lambda i: X[i]))

    run_program(program(body, (n,), X), [np.zeros(3, "f4")])
    with pytest.raises(ExecutionError, match="n is too small"):
        run_program(program(body, (n,), X), [np.zeros(2, "f4")])


def test_fresh_memory_is_poisoned() -> None:
    scratch = Buffer.of("scratch", (n,), "float32")
    reads = program(lambda out: Allocate(scratch, compute(out, lambda i: scratch[i])), (n,), X)
    assert np.isnan(run_program(reads, [np.zeros(2, "f4")])[0]).all()


def test_an_index_from_data_is_bound_to_a_symbol() -> None:
    places = Buffer.of("places", (n,), "int64")

    def body(out: Buffer) -> Any:
        p = SymVar("p")
        return loops("i", (n,), lambda i: LetIndex(p, places[i], Store(out, (p,), X[i])))

    found = run_program(program(body, (n,), X, places), [np.array([5, 6, 7], "f4"), np.array([2, 0, 1])])
    assert found[0].tolist() == [6, 7, 5]


def test_a_wrong_input_of_a_program_is_an_error() -> None:
    with pytest.raises(InputError, match=r"x must be \(3,\) float32, got \(3,\) float64"):
        run_program(DOUBLE, [np.zeros(3)])


# Functions


def scalar(value: Any) -> Constant:
    return Constant.of(np.asarray(value))


def test_branches() -> None:
    bb = BlockBuilder()
    with bb.function("main", c=TensorType.of((), "bool"), x=TensorType.of((n,), "float32")) as (c, x):
        bodies = []
        for op in (ops.neg, ops.exp):
            with bb.body() as scope:
                bb.result(bb.emit(op(x)))
            bodies.append(bb.finish(scope))
        bb.result(bb.emit(If(c, bodies[0], bodies[1], x.ty)))
    run = Interpreter(bb.module()).run
    assert run("main", np.array(True), np.ones(1, "f4")).tolist() == [-1.0]
    assert run("main", np.array(False), np.zeros(1, "f4")).tolist() == [1.0]


def growing_loop() -> IRModule:
    """x = x ++ x until it has at least 10 elements."""
    bb = BlockBuilder()
    m = bb.symbol("m")
    with bb.function("main", x=TensorType.of((n,), "float32")) as (x,):
        value = Var("value", TensorType.of((m,), "float32"))
        with bb.body() as scope:
            longer = bb.emit(ops.concat(value, value, axis=0))
            again = bb.emit(ops.less(bb.emit(ops.shape_of(longer)), np.array([10])))
            bb.result(Tuple((again, longer)))
        ty = TupleType((TensorType(None, "float32", 1),))
        loop = bb.emit(Loop((value,), (x,), scalar(True), bb.finish(scope), ty))
        k = bb.symbol("k")
        bb.result(bb.match_shape(bb.emit(TupleGetItem(loop, 0)), (k,)))
    return bb.module()


def test_a_loop_may_change_the_size_of_its_values() -> None:
    assert Interpreter(growing_loop()).run("main", np.array([1, 2, 3], "f4")).tolist() == [1, 2, 3] * 4


def test_match_shape_binds_and_checks() -> None:
    bb = BlockBuilder()
    k = bb.symbol("k", lower=2)
    with bb.function("main", x=TensorType(None, "float32", 2)) as (x,):
        bb.result(bb.emit(ops.reshape(bb.match_shape(x, (k, k + 1)), (k * (k + 1),))))
    run = Interpreter(bb.module()).run
    assert run("main", np.zeros((2, 3), "f4")).shape == (6,)
    with pytest.raises(ShapeMismatchError, match=r"matched: dimension 1 must be k \+ 1 = 3, got 4"):
        run("main", np.zeros((2, 4), "f4"))
    with pytest.raises(ShapeMismatchError, match="k = 1 breaks 2 <= k"):
        run("main", np.zeros((1, 2), "f4"))


def test_a_size_that_is_a_number_is_told_once() -> None:
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((n, 8), "float32")) as (x,):
        bb.result(x)
    with pytest.raises(ShapeMismatchError, match="x: dimension 1 must be 8, got 9"):
        Interpreter(bb.module()).run("main", np.zeros((2, 9), "f4"))


def test_arguments_are_checked() -> None:
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((n * 2,), "float32"), y=TensorType.of((n,), "float32")) as (x, _):
        bb.result(x)
    run = Interpreter(bb.module()).run
    assert run("main", np.zeros(4, "f4"), np.zeros(2, "f4")).shape == (4,)
    with pytest.raises(ShapeMismatchError, match=r"x: dimension 0 must be n\*2 = 4, got 5"):
        run("main", np.zeros(5, "f4"), np.zeros(2, "f4"))
    with pytest.raises(InputError, match=r"x must be a tensor .*float32, got float64"):
        run("main", np.zeros(4), np.zeros(2, "f4"))


def test_calls_of_programs_in_both_forms() -> None:
    bb = BlockBuilder()
    double = bb.define("double", DOUBLE)
    with bb.function("main", x=TensorType.of((n,), "float32")) as (x,):
        value = bb.emit(Call(double, (x,), sym_args=(n,), ty=x.ty))
        out = bb.emit(ops.get_op("memory.alloc_tensor")(shape_value((n,)), dtype="float32"))
        bb.emit(Call(double, (value, out), sym_args=(n,), ty=UNIT))
        bb.result(out)
    assert Interpreter(bb.module()).run("main", np.ones(2, "f4")).tolist() == [4, 4]


def test_calls_of_functions_and_library_routines() -> None:
    bb = BlockBuilder()
    ty = TensorType.of((n,), "float32")
    square = bb.define("square", ExternFunction("lib_square", (ty, ty)))
    with bb.function("helper", a=ty) as (a,):
        bb.result(bb.emit(Call(square, (a,), ty=a.ty)))
    with bb.function("main", x=ty) as (x,):
        bb.result(bb.emit(Call(GlobalVar("helper"), (x,), ty=x.ty)))
    externs = {"lib_square": lambda a, out: np.multiply(a, a, out=out)}
    assert Interpreter(bb.module(), externs).run("main", np.array([3], "f4")).tolist() == [9]
    with pytest.raises(ExecutionError, match="no Python function is given for the library routine lib_square"):
        Interpreter(bb.module()).run("main", np.array([3], "f4"))


def test_views_share_their_arena() -> None:
    bb = BlockBuilder()
    double = bb.define("double", DOUBLE)
    with bb.function("main", x=TensorType.of((n,), "float32")) as (x,):
        arena = bb.emit(ops.get_op("memory.alloc_arena")(ShapeValue((n * 8,))))
        first, second = (
            bb.emit(ops.get_op("memory.view")(arena, ShapeValue((sym(at),)), ShapeValue((n,)), dtype="float32"))
            for at in (0, n * 4)
        )
        bb.emit(Call(double, (x, first), sym_args=(n,)))
        bb.emit(Call(double, (first, second), sym_args=(n,)))
        bb.result(Tuple((first, second)))
    found = Interpreter(bb.module()).run("main", np.ones(3, "f4"))
    assert [v.tolist() for v in found] == [[2, 2, 2], [4, 4, 4]]


def test_a_result_that_contradicts_its_type_is_an_error() -> None:
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((n,), "float32")) as (x,):
        bb.result(bb.emit(Call(ops.neg, (x,), ty=TensorType.of((n + 1,), "float32"))))
    with pytest.raises(ShapeMismatchError, match=r"neg: dimension 0 must be n \+ 1 = 3, got 2"):
        Interpreter(bb.module()).run("main", np.zeros(2, "f4"))
