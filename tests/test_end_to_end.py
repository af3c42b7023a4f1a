"""Compiled functions against the interpreter: control flow, aliases, data-dependent shapes, several functions."""

from __future__ import annotations

import numpy as np
import pytest

import relaxlite as rl
from relaxlite import config, dtypes
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.errors import ExecutionError, InvalidArgumentError, OutOfMemoryError, ShapeMismatchError
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr, If, Loop, Tuple, TupleGetItem, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.symbolic import IntLike
from relaxlite.ir.types import TupleType

rng = np.random.default_rng(7)


def floats(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def tensor(*shape: IntLike, dtype: str = "float32") -> rl.TensorType:
    return rl.TensorType.of(shape, dtype)


def check(module: IRModule, *cases: tuple[np.ndarray, ...]) -> None:
    """One compilation, with every pass verified and memory poisoned, gives what the interpreter gives."""
    with config.override(verify_passes=True, poison_memory=True):
        exe = rl.compile(module)
        for args in cases:
            expected = Interpreter(module).run("main", *args)
            actual = exe(*args)
            pairs = zip(actual, expected, strict=True) if isinstance(expected, tuple) else [(actual, expected)]
            for got, want in pairs:
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def branch_module(nested: bool) -> IRModule:
    bb = rl.BlockBuilder()
    n = bb.symbol("n")
    with bb.function("main", x=tensor(n, 3), flag=tensor(dtype="bool"), other=tensor(dtype="bool")) as (x, flag, other):
        doubled = bb.emit(ops.add(x, x))  # captured by both branches

        def choose(cond: Var, yes: Expr, no: Expr) -> Var:
            with bb.body() as left:
                bb.result(yes)
            with bb.body() as right:
                bb.result(no)
            return bb.emit(If(cond, bb.finish(left), bb.finish(right), x.ty))

        if nested:
            with bb.body() as left:
                bb.result(choose(other, doubled, ops.multiply(doubled, x)))
            with bb.body() as right:
                bb.result(ops.tanh(ops.add(doubled, x)))
            found = bb.emit(If(flag, bb.finish(left), bb.finish(right), x.ty))
        else:
            found = choose(flag, ops.exp(doubled), x)
        bb.result(ops.add(found, doubled))
    return bb.module()


@pytest.mark.parametrize("nested", [False, True])
def test_if_with_captured_storage(nested: bool) -> None:
    yes, no = np.array(True), np.array(False)
    cases = [(floats(n, 3), flag, other) for n in (0, 1, 5) for flag in (yes, no) for other in (yes, no)]
    check(branch_module(nested), *cases)


def growing_loop() -> IRModule:
    """x grows by one row of ones in each of `count` iterations."""
    bb = rl.BlockBuilder()
    n, m = bb.symbol("n"), bb.symbol("m")
    with bb.function("main", x=tensor(n, 2), count=tensor(dtype="int64")) as (x, count):
        step, rows = Var("step", tensor(dtype="int64")), Var("rows", tensor(m, 2))
        with bb.body() as scope:
            following = bb.emit(ops.add(step, np.int64(1)))
            more = bb.emit(ops.less(following, count))
            longer = bb.emit(ops.concat(rows, Constant.of(np.ones((1, 2), np.float32)), axis=0))
            known = bb.match_shape(longer, (m + 1, 2))
            bb.result(Tuple((more, following, known)))
        inits = (Constant.of(np.int64(0)), x)
        ty = TupleType((step.ty, rl.TensorType(None, "float32", 2)))
        start = bb.emit(ops.less(inits[0], count))
        loop = bb.emit(Loop((step, rows), inits, start, bb.finish(scope), ty))
        k = bb.symbol("k")
        found = bb.match_shape(bb.emit(TupleGetItem(loop, 1)), (k, 2))
        bb.result(ops.sum(found, axes=(0,)))
    return bb.module()


def test_loop_whose_value_grows_and_one_that_runs_zero_times() -> None:
    counts = [np.array(c, np.int64) for c in (0, 1, 4)]
    check(growing_loop(), *((floats(n, 2), count) for n in (0, 3) for count in counts))


def test_results_that_are_inputs_constants_views_and_each_other() -> None:
    bb = rl.BlockBuilder()
    n = bb.symbol("n")
    with bb.function("main", x=tensor(n, 4)) as (x,):
        y = bb.emit(ops.relu(x))
        flat = bb.emit(ops.reshape(y, (n * 4,)))
        bb.result(Tuple((x, y, flat, y, Constant.of(np.arange(3, dtype=np.float32)))))
    check(bb.module(), (floats(3, 4),), (floats(0, 4),))
    exe, x0 = rl.compile(bb.module()), floats(2, 4)
    results = exe(x0)
    results[1][:] = -1  # results are independent of each other and of the inputs
    assert (results[2] >= 0).all() and (results[3] >= 0).all()
    results[0][:] = 5
    assert not (x0 == 5).any()


def test_a_reshaped_intermediate_keeps_its_storage_alive() -> None:
    """storage reused across an alias"""
    bb = rl.BlockBuilder()
    n = bb.symbol("n")
    with bb.function("main", x=tensor(n, 8)) as (x,):
        early = bb.emit(ops.reshape(bb.emit(ops.softmax(x)), (n, 2, 4)))
        for _ in range(4):  # enough steps to want the storage of `early`
            x = bb.emit(ops.softmax(bb.emit(ops.add(x, x))))
        bb.result(ops.add(early, ops.reshape(x, (n, 2, 4))))
    check(bb.module(), (floats(5, 8),), (floats(1, 8),))


def test_data_dependent_shape() -> None:
    bb = rl.BlockBuilder()
    n, k = bb.symbol("n"), bb.symbol("k")
    with bb.function("main", x=tensor(n, 3), target=tensor(2, dtype="int64")) as (x, target):
        found = bb.match_shape(bb.emit(ops.non_zero(bb.emit(ops.greater(x, np.float32(0))))), (2, k))
        rows = bb.emit(ops.gather(found, np.array(0, np.int64), axis=0))
        a, b = bb.symbol("a"), bb.symbol("b")
        shape = bb.match_shape(bb.emit(ops.tensor_to_shape(target)), (a, b))
        assert shape.ty is not None
        bb.result(Tuple((ops.add(rows, rows), ops.reshape(ops.relu(x), (a, b)))))
    check(
        bb.module(),
        (floats(4, 3), np.array([6, 2])),
        (floats(4, 3), np.array([1, 12])),
        (floats(0, 3), np.array([0, 9])),
    )
    with pytest.raises(ExecutionError, match="cannot reshape"):
        rl.compile(bb.module())(floats(4, 3), np.array([5, 2]))


def test_a_dishonest_symbol_is_named() -> None:
    bb = rl.BlockBuilder()
    n, m = bb.symbol("n"), bb.symbol("m")
    with bb.function("main", x=tensor(n, 3), y=tensor(m, 3)) as (x, y):
        bb.loc = "ONNX node 'sum' (Add)"
        bb.result(ops.add(x, bb.match_shape(y, (n, 3))))
    exe = rl.compile(bb.module())
    np.testing.assert_allclose(exe(np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)), 2)
    with pytest.raises(ShapeMismatchError, match=r"ONNX node 'sum'.*n.*2.*3|ONNX node 'sum'.*3.*n.*2"):
        exe(np.ones((2, 3), np.float32), np.ones((3, 3), np.float32))


def test_functions_calling_functions() -> None:
    bb = rl.BlockBuilder()
    n, m = bb.symbol("n"), bb.symbol("m")
    with bb.function("twice", x=tensor(m, 2)) as (x,):
        bb.result(ops.add(x, x))
    with bb.function("main", x=tensor(n, 2)) as (x,):
        from relaxlite.ir.expr import Call, GlobalVar

        bb.result(ops.tanh(bb.emit(Call(GlobalVar("twice"), (x,), ty=x.ty))))
    check(bb.module(), (floats(3, 2),), (floats(0, 2),))


def test_a_constant_that_a_function_gives_back_is_not_overwritten() -> None:
    """Its caller took it for memory of the argument, which dies there, and added to it in place, call by call."""
    from relaxlite.ir.expr import Call, GlobalVar

    bb = rl.BlockBuilder()
    n = bb.symbol("n")
    with bb.function("table", p=tensor(n)):
        bb.result(Constant.of(np.arange(6, dtype=np.float32).reshape(2, 3)))
    m = bb.symbol("m")
    with bb.function("main", x=tensor(m)) as (x,):
        table = bb.emit(Call(GlobalVar("table"), (bb.emit(ops.exp(x)),), ty=tensor(2, 3)))
        more = bb.emit(ops.add(table, np.float32(1)))
        bb.result(bb.emit(ops.matmul(more, bb.emit(ops.transpose(more, axes=(1, 0))))))
    exe, more = rl.compile(bb.module()), np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    for _ in range(3):
        np.testing.assert_allclose(exe(floats(3)), more @ more.T)


def test_out_of_range_indices_are_an_error_not_a_crash() -> None:
    bb = rl.BlockBuilder()
    n = bb.symbol("n")
    with bb.function("main", ids=tensor(n, dtype="int64")) as (ids,):
        bb.result(ops.gather(Constant.of(floats(10, 4)), ids, axis=0))
    exe = rl.compile(bb.module())
    assert exe(np.array([0, -1, 9])).shape == (3, 4)
    with pytest.raises(ExecutionError, match="out of range"):
        exe(np.array([0, 10]))
    assert exe(np.array([3])).shape == (1, 4)


def test_sizes_that_overflow_or_exceed_memory() -> None:
    bb = rl.BlockBuilder()
    a, b = bb.symbol("a"), bb.symbol("b")
    with bb.function("main", shape=tensor(2, dtype="int64")) as (shape,):
        bb.match_shape(bb.emit(ops.tensor_to_shape(shape)), (a, b))
        bb.result(ops.full((a, b), np.float32(1)))
    exe = rl.compile(bb.module())
    assert exe(np.array([2, 3])).shape == (2, 3)
    for sizes in ([1 << 40, 1 << 40], [1 << 31, 1 << 31], [1 << 20, 1 << 20]):
        with pytest.raises(OutOfMemoryError):
            exe(np.array(sizes))


def test_compile_errors_name_what_is_wrong() -> None:
    with pytest.raises(InvalidArgumentError, match="no function 'main'"):
        rl.compile(IRModule({}))
    bb = rl.BlockBuilder()
    with bb.function("main", x=tensor(2)) as (x,):
        bb.result(ops.relu(x))
    with pytest.raises(InvalidArgumentError, match="unknown kind 'vulkan'"):
        rl.compile(bb.module(), target="vulkan")


@pytest.mark.parametrize("name", ["l2_norm", "log_sum_exp", "mean_variance_normalize"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_is_made_of_others_is_not_rounded_in_between(name: str, dtype: str) -> None:
    """300 ** 2 is no float16, 1e-9 is one as little, and a row of equal numbers has no deviation."""
    op, bb = ops.get_op(name), rl.BlockBuilder()
    n = bb.symbol("n")
    attrs = {"axes": (1,)} | ({} if name == "mean_variance_normalize" else {"keepdims": False})
    with bb.function("main", x=tensor(3, n, dtype=dtype)) as (x,):
        bb.result(op(x, **attrs))
    exe = rl.compile(bb.module())
    for count in (1, 5, 64):
        rows = np.stack([np.full(count, 300.0), np.linspace(-300, 300, count), np.zeros(count)])
        given = rows.astype(dtypes.to_numpy(dtype))
        expected = op.reference(given, **attrs).astype(np.float64)
        np.testing.assert_allclose(exe(given).astype(np.float64), expected, rtol=1e-2, atol=1e-3)
