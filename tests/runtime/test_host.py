"""The native host function against the interpreter: results, control flow, errors, arguments, memory, threads."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaxlite import config
from relaxlite.codegen.llvm import compile_host
from relaxlite.codegen.llvm import host as host_module
from relaxlite.codegen.llvm.machine_code import to_object
from relaxlite.errors import ExecutionError, InputError, OutOfMemoryError, ShapeMismatchError
from relaxlite.runtime import array_reader, threadpool
from relaxlite.runtime.executable import (
    Const,
    ExecutableData,
    Goto,
    If,
    Instruction,
    KernelInfo,
    Reg,
    Ret,
    Signature,
    TargetInfo,
    TensorSpec,
    VMFunction,
    validate,
)
from relaxlite.runtime.host import LARGE_RESULT, OUT_BYTES, OUT_COPIED, FrameLayout
from relaxlite.runtime.memory import MEMORY_LIMIT
from relaxlite.runtime.module import Executable, load
from relaxlite.runtime.vm import register_extern
from relaxlite.target import Target
from tests.runtime.test_vm import KERNELS_IR, R, builtin, call, compile_object
from tests.support.both_ways import assert_same_both_ways, interpreted, outcome, runs_natively

MORE_KERNELS_IR = """
; out = x[0] < y[0], of float32
define i32 @less(ptr %buffers, ptr %symbols) {
  %x_at = load ptr, ptr %buffers
  %y_slot = getelementptr ptr, ptr %buffers, i64 1
  %y_at = load ptr, ptr %y_slot
  %out_slot = getelementptr ptr, ptr %buffers, i64 2
  %out = load ptr, ptr %out_slot
  %x = load float, ptr %x_at
  %y = load float, ptr %y_at
  %is_less = fcmp olt float %x, %y
  %byte = zext i1 %is_less to i8
  store i8 %byte, ptr %out
  ret i32 0
}
"""
KERNELS = {
    "add": KernelInfo("add", "add", ("thirteen is unlucky",), 3, 1),
    "below": KernelInfo("below", "below", (), 1, 2),
    "shapes": KernelInfo("shapes", "shapes", (), 1, 0),
    "count": KernelInfo("count", "count", (), 1, 0),
    "starved": KernelInfo("starved", "starved", (), 0, 0),
    "less": KernelInfo("less", "less", (), 3, 0),
}
ONE = np.ones(1, np.float32)
N = {"n": (0, None, 1)}
X = TensorSpec("x", "float32", ("n",), N)
FLAG = TensorSpec("flag", "bool", ())
STEPS = TensorSpec("steps", "float32", ("m",), {"m": (0, None, 1)})


@pytest.fixture(scope="module")
def object_code() -> bytes:
    return compile_object(KERNELS_IR + MORE_KERNELS_IR)


def data_of(
    object_code: bytes,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    *code: Instruction,
    constants: tuple[np.ndarray, ...] = (),
    functions: tuple[VMFunction, ...] = (),
) -> ExecutableData:
    main = VMFunction("main", tuple(spec.name for spec in inputs), 24, code)
    given = {function.name: function for function in (main, *functions)}
    signature = Signature(inputs, outputs)
    machine = Target.host()
    host = compile_host(given, signature, KERNELS, constants, machine)
    target = TargetInfo(machine.triple, machine.cpu, machine.required_features)
    data = ExecutableData(given, signature, KERNELS, (object_code,), constants, host, target)
    validate(data)
    return data


def out(*shape: int | str, dtype: str = "float32", name: str = "y") -> TensorSpec:
    return TensorSpec(name, dtype, shape)


def floats(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


BIND_X = (
    builtin("alloc_heap", 4, 6),
    builtin("match_shape", -1, R[0], R[4], (("bind", 0, "n", 0, None, 1),), "argument 'x'"),
)


def adder(object_code: bytes) -> ExecutableData:
    """x + x + 1 through an arena, where the last result is reshaped."""
    return data_of(
        object_code, (X,), (out("n", 1),),
        *BIND_X,
        call("kernel:shapes", -1, R[4], 0, R[4]),
        builtin("alloc_arena", 5, R[4], -2),
        builtin("view", 6, R[5], R[4], 0, (-1,), "float32"),
        call("kernel:add", -1, R[4], 0, R[0], R[0], R[6]),
        builtin("alloc_tensor", 7, R[4], (-1,), "float32"),
        call("kernel:add", -1, R[4], 0, R[6], Const(0), R[7]),
        builtin("reshape", 8, R[7], R[4], (-1, 1)),
        Ret(8),
        constants=(np.ones(1 << 20, np.float32),),
    )  # fmt: skip


@pytest.fixture(scope="module")
def adding(object_code: bytes) -> Executable:
    return Executable(adder(object_code))


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts what host functions allocate and free, and holds of the workers; what is freed is filled with NaN."""
    counts: Counter[str] = Counter()
    libc = ctypes.CDLL(None)
    libc.aligned_alloc.restype, libc.aligned_alloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t, ctypes.c_size_t)
    libc.free.argtypes = (ctypes.c_void_p,)
    live: dict[int, int] = {}  # address -> bytes

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64)
    def alloc(nbytes: int) -> int:
        counts["allocated"] += 1
        counts["most"] = max(counts["most"], len(live) + 1)
        address = libc.aligned_alloc(64, -(-nbytes // 64) * 64)
        live[address] = nbytes
        return int(address)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def free(address: int) -> None:
        ctypes.memset(address, 0xFF, live.pop(address))
        counts["freed"] += 1
        libc.free(address)

    @ctypes.CFUNCTYPE(None, ctypes.c_int32)
    def hold(delta: int) -> None:
        counts["held"] += delta

    wrapped = {"relaxlite_scratch_alloc": alloc, "relaxlite_scratch_free": free, "relaxlite_hold_workers": hold}
    addresses = {name: ctypes.cast(f, ctypes.c_void_p).value for name, f in wrapped.items()}
    own = array_reader.symbols()
    monkeypatch.setattr(array_reader, "symbols", lambda: {**own, **addresses})
    yield counts


# Results


@pytest.mark.parametrize("n", [0, 1, 7, 1000, LARGE_RESULT // 4, LARGE_RESULT])
def test_every_size_gives_what_the_interpreter_gives(adding: Executable, n: int) -> None:
    x = floats(n)
    assert_same_both_ways(adding, [x], interpreted(adding))
    np.testing.assert_array_equal(adding(x), (2 * x + 1).reshape(n, 1))


def test_results_live_on_their_own(adding: Executable) -> None:
    results = [adding(floats(n)) for n in (5, 5, LARGE_RESULT, LARGE_RESULT, 3)]
    for result in results:
        assert result.flags.writeable and result.flags.aligned
        np.testing.assert_array_equal(result, 2 * floats(len(result)).reshape(-1, 1) + 1)


def test_what_is_passed_through_is_copied(object_code: bytes) -> None:
    """An input, a constant, one tensor twice, and one in the arena."""
    data = data_of(
        object_code,
        (X,),
        (out("n"), out(2), out("n"), out("n"), out("n")),
        *BIND_X,
        builtin("alloc_tensor", 5, R[4], (-1,), "float32"),
        call("kernel:add", -1, R[4], 0, R[0], R[0], R[5]),
        builtin("alloc_arena", 6, None, 4096),
        builtin("view", 7, R[6], R[4], 64, (-1,), "float32"),
        call("kernel:add", -1, R[4], 0, R[0], R[5], R[7]),
        builtin("make_tuple", 8, R[0], Const(0), R[5], R[5], R[7]),
        Ret(8),
        constants=(floats(2),),
    )
    exe = Executable(data)
    for n in (0, 1, 9):
        x = floats(n)
        assert_same_both_ways(exe, [x], interpreted(exe))
        results = exe(x)
        for result in results:
            result += 1
        np.testing.assert_array_equal(x, floats(n))
        np.testing.assert_array_equal(results[1], floats(2) + 1)
        np.testing.assert_array_equal(results[3], 2 * floats(n) + 1)


def test_scalars_and_models_without_inputs(object_code: bytes) -> None:
    data = data_of(object_code, (), (out(),), builtin("copy", 0, Const(0)), Ret(0), constants=(np.float32(7),))
    exe = Executable(data)
    assert runs_natively(exe, []) and exe() == 7 and exe().shape == ()


def data_dependent(object_code: bytes) -> ExecutableData:
    """n comes from a tensor's values, so that Python cannot prepare the result: its guess is wrong, and it copies."""
    return data_of(
        object_code,
        (TensorSpec("k", "int64", (1,)), X),
        (out("n"), out("m")),
        builtin("alloc_heap", 4, 2),
        builtin("match_shape", -1, R[1], R[4], (("bind", 0, "n", 0, None, 1),), "argument 'x'"),
        builtin("tensor_to_shape", 5, R[0]),
        builtin("match_shape", -1, R[5], R[4], (("bind", 1, "m", 0, 100, 2),), "k"),
        builtin("alloc_tensor", 6, R[4], (-2,), "float32"),
        builtin("alloc_tensor", 7, R[4], (-1,), "float32"),
        call("kernel:add", -1, R[4], 0, R[1], R[1], R[7]),
        call("kernel:add", -1, R[4], 1, Const(0), Const(0), R[6]),
        builtin("make_tuple", 8, R[7], R[6]),
        Ret(8),
        constants=(floats(100),),
    )


def test_sizes_that_depend_on_data(object_code: bytes, blocks: Counter[str]) -> None:
    data = data_dependent(object_code)
    exe, slow = Executable(data), interpreted(Executable(data))
    for k in (0, 2, 50, 3, 102, -2):
        assert_same_both_ways(exe, [np.array([k]), floats(5)], slow)
    assert exe(np.array([4]), floats(2))[1].shape == (4,)


def test_a_result_whose_shape_is_not_the_announced_one(object_code: bytes) -> None:
    """Of as many bytes, so that it lies in the array that Python has made; another result lies there too. The array
    must live until both are copied: it is so large that its pages are gone once it is freed."""
    rows, columns = 2560, 4096
    data = data_of(
        object_code, (TensorSpec("x", "float32", ("a", "b")), TensorSpec("k", "int64", (2,))),
        (out("c", "d"), out(rows * columns)),
        builtin("alloc_heap", 4, 3),
        builtin("match_shape", -1, R[0], R[4], (("bind", 0, "a", 0, None, 1), ("bind", 1, "b", 0, None, 1)), "x"),
        builtin("tensor_to_shape", 5, R[1]),
        builtin("match_shape", -1, R[5], R[4], (("bind", 0, "c", 0, None, 1), ("bind", 1, "d", 0, None, 1)), "k"),
        builtin("alloc_tensor", 6, R[4], (-1, -2), "float32"),
        builtin("reshape", 7, R[6], None, (rows * columns,)),
        call("kernel:add", -1, R[4], 0, R[0], R[0], R[7]),
        builtin("make_tuple", 8, R[6], R[7]),
        Ret(8),
    )  # fmt: skip
    exe, x = Executable(data), floats(rows, columns)
    for k in ((columns, rows), (rows, columns), (2 * rows, columns // 2)):
        assert runs_natively(exe, [x, np.array(k)])
        first, second = exe(x, np.array(k))
        assert first.shape == k and second.shape == (rows * columns,)
        for result in (first.reshape(-1), second):
            np.testing.assert_array_equal(result[: k[0]], 2 * np.arange(k[0]))
        assert not np.shares_memory(first, second)


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8", "uint64", "int64"])
def test_shapes_are_read_from_every_integer_type(object_code: bytes, dtype: str) -> None:
    data = data_of(
        object_code,
        (TensorSpec("k", dtype, (2,)),),
        (out("a", "b", dtype="int8"),),
        builtin("alloc_heap", 4, 2),
        builtin("tensor_to_shape", 5, R[0]),
        builtin("match_shape", -1, R[5], R[4], (("bind", 0, "a", None, None, 1), ("bind", 1, "b", 0, None, 1)), "k"),
        builtin("alloc_tensor", 6, R[4], (-1, -2), "int8"),
        builtin("tensor_to_shape", 7, Const(0)),
        builtin("match_shape", -1, R[7], R[4], (("check", 0, "a"), ("any",)), "c"),
        Ret(6),
        constants=(np.array([3, 4]),),
    )
    exe, slow = Executable(data), interpreted(Executable(data))
    assert exe(np.array([3, 120], dtype)).shape == (3, 120)
    highest = int(np.iinfo(dtype).max)
    for values in ((4, 2), (highest, highest), (highest, 3), (3, 0)):
        found = np.array(values, np.uint64).astype(dtype)
        if values != (3, 0):
            assert outcome(exe, [found]) == outcome(slow, [found])
        else:
            assert exe(found).shape == (3, 0)


# Control flow


def test_branches_give_one_or_the_other(object_code: bytes, blocks: Counter[str]) -> None:
    """Owned memory, an argument, or a constant, through one variable; and a tuple of them."""
    data = data_of(
        object_code, (FLAG, TensorSpec("x", "float32", ("n",), N)), (out("n"), out("n")),
        builtin("alloc_heap", 4, 1),
        builtin("match_shape", -1, R[1], R[4], (("bind", 0, "n", 0, None, 1),), "argument 'x'"),
        If(0, 7),
        builtin("alloc_tensor", 5, R[4], (-1,), "float32"),
        call("kernel:add", -1, R[4], 0, R[1], R[1], R[5]),
        builtin("make_tuple", 6, R[5], R[1]),
        Goto(8),
        builtin("make_tuple", 6, R[1], R[1]),
        builtin("tuple_get", 7, R[6], 0),
        builtin("tuple_get", 8, R[6], 1),
        builtin("make_tuple", 9, R[8], R[7]),
        Ret(9),
    )  # fmt: skip
    exe, slow = Executable(data), interpreted(Executable(data))
    for n in (0, 3, 13, 40):
        for flag in (True, False):
            assert_same_both_ways(exe, [np.array(flag), floats(n)], slow)


def looping(object_code: bytes) -> ExecutableData:
    """while a < limit: (a, b) = (b, a + b), in new memory each time, with an inner loop that runs while c < 3.

    The condition that is tested is computed from values of the round before, after they have been replaced.
    """
    scalar = TensorSpec("limit", "float32", (1,))
    return data_of(
        object_code, (scalar,), (out(1), out(1)),
        builtin("alloc_heap", 1, 2),
        builtin("match_shape", -1, R[0], R[1], (("bind", 0, "n", 1, None, 1),), "argument 'limit'"),
        builtin("make_tuple", 2, Const(0), Const(1)),
        builtin("alloc_tensor", 3, None, (), "bool"),                      # 3: outer test
        builtin("tuple_get", 4, R[2], 0),
        builtin("tuple_get", 5, R[2], 1),
        call("kernel:less", -1, None, 0, R[4], R[0], R[3]),
        If(3, 20),
        builtin("alloc_tensor", 6, R[1], (-1,), "float32"),
        call("kernel:add", -1, R[1], 0, R[4], R[5], R[6]),
        builtin("make_tuple", 2, R[5], R[6]),
        call("kernel:add", -1, R[1], 0, R[4], R[4], R[6]),                 # 11: R[4] is no longer in the tuple
        call("kernel:add", -1, R[1], 0, R[6], R[5], R[6]),
        builtin("copy", 7, Const(1)),
        builtin("alloc_tensor", 8, None, (1,), "bool"),                    # 14: inner test
        call("kernel:less", -1, None, 0, R[7], Const(2), R[8]),
        If(8, 3),
        builtin("alloc_tensor", 9, R[1], (-1,), "float32"),
        call("kernel:add", -1, R[1], 0, R[7], Const(1), R[9]),
        Goto(22),
        builtin("make_tuple", 10, R[5], R[4]),                             # 20
        Ret(10),
        builtin("reshape", 7, R[9], None, (1,)),                           # 22
        Goto(14),
        constants=(0 * ONE, ONE, 3 * ONE),
    )  # fmt: skip


def test_loops_carry_tensors_of_their_own(object_code: bytes, blocks: Counter[str]) -> None:
    exe = Executable(looping(object_code))
    for limit in (-1, 0, 1, 2, 100, 1e6):
        assert_same_both_ways(exe, [np.float32(limit) * ONE], interpreted(exe))


def test_a_loop_over_heap_slots(object_code: bytes) -> None:
    """while heap[0] < heap[1]: heap[0] += 1, so that nothing known of the heap may be kept over a kernel."""
    data = data_of(
        object_code, (X, STEPS), (out("k"),),
        builtin("alloc_heap", 2, 3),
        builtin("match_shape", -1, R[1], R[2], (("bind", 1, "m", 0, None, 1),), "argument 'steps'"),
        builtin("alloc_tensor", 4, R[2], (), "bool"),
        call("kernel:below", -1, R[2], 0, R[4]),
        If(4, 7),
        call("kernel:count", -1, R[2], 0, R[2]),
        Goto(3),
        builtin("alloc_tensor", 5, R[2], (-1,), "float32"),
        call("kernel:add", -1, R[2], 0, R[1], R[1], R[5]),
        Ret(5),
    )  # fmt: skip
    exe = Executable(data)
    for steps in (0, 1, 9, 13):
        assert_same_both_ways(exe, [floats(2), floats(steps)], interpreted(exe))
    assert exe(floats(2), floats(9)).shape == (9,)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_conditions_are_one_bool_of_any_rank(object_code: bytes, shape: tuple[int, ...]) -> None:
    flag = TensorSpec("flag", "bool", tuple(f"d{k}" for k in range(len(shape))))
    code = (If(0, 3), builtin("copy", 1, Const(0)), Goto(4), builtin("copy", 1, Const(1)), Ret(1))
    exe = Executable(data_of(object_code, (flag,), (out(1),), *code, constants=(ONE, 2 * ONE)))
    for value in (True, False):
        assert_same_both_ways(exe, [np.full(shape, value)], interpreted(exe))
    if shape:
        with pytest.raises(ExecutionError, match="a condition must be one bool"):
            exe(np.zeros((2, *shape[1:]), bool))


def test_functions_are_part_of_the_host_function(object_code: bytes, blocks: Counter[str]) -> None:
    """doubled(a) = a + a through an arena and heap of its own, with a second way out for a short a; called in a row,
    by another function, and with a constant."""
    doubled = VMFunction(
        "doubled", ("a", "flag"), 6,
        (
            builtin("alloc_heap", 2, 3),
            builtin("match_shape", -1, R[0], R[2], (("bind", 2, "k", 0, None, 1),), "a"),
            If(1, 8),
            builtin("alloc_arena", 3, None, 1 << 16),
            builtin("view", 4, R[3], R[2], 64, (-3,), "float32"),
            call("kernel:add", -1, R[2], 2, R[0], R[0], R[4]),
            builtin("make_tuple", 5, R[4], R[0]),
            Ret(5),
            builtin("make_tuple", 5, R[0], R[0]),
            Ret(5),
        ),
    )  # fmt: skip
    twice = VMFunction("twice", ("a", "flag"), 5, (
        call("func:doubled", 2, R[0], R[1]), builtin("tuple_get", 3, R[2], 0),
        call("func:doubled", 4, R[3], Const(1)), Ret(4)))  # fmt: skip
    data = data_of(
        object_code, (X, FLAG), (out("n"), out("n"), out(3)),
        *BIND_X,
        call("func:twice", 5, R[0], R[1]),
        builtin("tuple_get", 6, R[5], 0),
        builtin("alloc_tensor", 7, R[4], (-1,), "float32"),
        call("kernel:add", -1, R[4], 0, R[0], R[6], R[7]),
        call("func:twice", 8, Const(0), R[1]),
        builtin("tuple_get", 9, R[8], 0),
        builtin("make_tuple", 10, R[7], R[6], R[9]),
        Ret(10),
        constants=(floats(3), np.array(True)), functions=(doubled, twice),
    )  # fmt: skip
    exe = Executable(data)
    for n in (0, 1, 9, 13, 16_000, 20_000):
        for flag in (True, False):
            assert_same_both_ways(exe, [floats(n), np.array(flag)], interpreted(exe))
    np.testing.assert_array_equal(exe(floats(2), np.array(True))[0], 5 * floats(2))
    assert blocks["allocated"] == blocks["freed"]


def test_a_function_in_a_loop_with_a_heap_of_its_own(object_code: bytes, blocks: Counter[str]) -> None:
    """steps times: x = copy of x, by way of a function that computes its size anew in a heap of zeros."""
    again = VMFunction(
        "again", ("a",), 4,
        (
            builtin("alloc_heap", 1, 2),
            builtin("match_shape", -1, R[0], R[1], (("bind", 0, "k", 0, None, 1),), "a"),
            builtin("alloc_tensor", 2, R[1], (-1, -2), "float32"),  # empty, for slot 1 is 0
            call("kernel:shapes", -1, R[1], 0, R[1]),
            builtin("match_shape", -1, R[2], R[1], (("any",), ("const", 0)), "a size of slot 1"),
            builtin("copy", 3, R[0]),
            Ret(3),
        ),
    )  # fmt: skip
    data = data_of(
        object_code, (X, STEPS), (out("n"),),
        builtin("alloc_heap", 2, 3),
        builtin("match_shape", -1, R[1], R[2], (("bind", 1, "m", 0, None, 1),), "argument 'steps'"),
        builtin("copy", 3, R[0]),
        builtin("alloc_tensor", 4, R[2], (), "bool"),
        call("kernel:below", -1, R[2], 0, R[4]),
        If(4, 9),
        call("kernel:count", -1, R[2], 0, R[2]),
        call("func:again", 3, R[3]),
        Goto(4),
        Ret(3),
        functions=(again,),
    )  # fmt: skip
    exe = Executable(data)
    for steps in (0, 1, 7):
        assert_same_both_ways(exe, [floats(5), floats(steps)], interpreted(exe))


# Errors: the interpreter words them


FAILURES: list[tuple[type[Exception], str, list[Instruction], int]] = [
    (ExecutionError, "kernel 'add': thirteen is unlucky",
     [builtin("copy", 5, R[0]), call("kernel:add", -1, R[4], 0, R[0], R[0], R[5]), Ret(5)], 13),
    (OutOfMemoryError, "kernel 'shapes': size overflow",
     [call("kernel:shapes", -1, R[4], 0, R[4]), Ret(0)], 99),
    (OutOfMemoryError, "kernel 'starved': the system has no memory left",
     [builtin("copy", 5, R[0]), call("kernel:starved", -1, None, 0), Ret(5)], 3),
    (ShapeMismatchError, r"cannot reshape \[7\] to \[2, 4\]: the sizes differ",
     [builtin("alloc_tensor", 5, R[4], (8,), "float32"), builtin("reshape", 6, R[0], R[4], (2, 4)),
      builtin("reshape", 7, R[6], None, (8,)), Ret(7)], 7),
    (InputError, r"argument 'x': dimension 0 of shape \(3,\): expects 8, got 3",
     [builtin("match_shape", -1, R[0], R[4], (("const", 8),), "argument 'x'"), Ret(0)], 3),
    (ShapeMismatchError, r"made by a: dimension 0 of shape \(9,\): n = 9 is not a multiple of 4",
     [builtin("copy", 5, R[0]),
      builtin("match_shape", -1, R[5], R[4], (("bind", 1, "n", 1, 16, 4),), "made by a"), Ret(0)], 9),
    (ShapeMismatchError, r"made by a: dimension 0 of shape \(20,\): n = 20 exceeds its upper bound 16",
     [builtin("copy", 5, R[0]),
      builtin("match_shape", -1, R[5], R[4], (("bind", 1, "n", 1, 16, 4),), "made by a"), Ret(0)], 20),
    (ShapeMismatchError, r"b: dimension 0 of shape \(2,\): expects k = 5, got 2",
     [builtin("copy", 5, Const(0)),
      builtin("match_shape", -1, R[5], R[4], (("check", 0, "k"),), "b"), Ret(0)], 5),
    (ExecutionError, r"float32\[17000\] at 64 is not inside an arena of 65536 bytes",
     [builtin("alloc_arena", 5, None, 4096), builtin("view", 6, R[5], R[4], 64, (-1,), "float32"), Ret(6)], 17000),
    (OutOfMemoryError, "arena r5 of function 'main': needs .* more than the .* of memory of this machine",
     [builtin("copy", 6, R[0]), builtin("alloc_arena", 5, None, MEMORY_LIMIT + 1), Ret(6)], 1),
    (OutOfMemoryError, r"tensor r5 of function 'main': needs .*; its type is float32\[1125899906842624\]",
     [builtin("alloc_tensor", 5, None, (1 << 50,), "float32"), Ret(5)], 1),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "code", "n"), FAILURES, ids=[f[1][:30] for f in FAILURES])
def test_errors_are_those_of_the_interpreter(
    object_code: bytes, kind: type[Exception], message: str, code: list[Instruction], n: int
) -> None:
    exe = Executable(data_of(object_code, (X,), (out("n"),), *BIND_X, *code, constants=(floats(2),)))
    assert not runs_natively(exe, [floats(n)])
    with pytest.raises(kind, match=message):
        exe(floats(n))
    assert outcome(exe, [floats(n)]) == outcome(interpreted(exe), [floats(n)])


def test_a_view_beyond_what_was_asked_for_but_inside_what_there_is(object_code: bytes) -> None:
    """The interpreter has more room in its arena than the host function believes, which gives up and is right."""
    code = [builtin("alloc_arena", 5, None, 64), builtin("view", 6, R[5], R[4], 64, (-1,), "float32")]
    code += [call("kernel:add", -1, R[4], 0, R[0], R[0], R[6]), Ret(6)]  # type: ignore[list-item]
    exe = Executable(data_of(object_code, (X,), (out("n"),), *BIND_X, *code))
    assert not runs_natively(exe, [floats(3)])
    np.testing.assert_array_equal(exe(floats(3)), 2 * floats(3))


# What stays in the interpreter


def test_what_has_to_be_interpreted_says_why(object_code: bytes) -> None:
    inner = VMFunction("inner", ("a",), 2, (call("func:inner", 1, R[0]), Ret(1)))
    two_ranks = (If(0, 3), builtin("copy", 1, Const(0)), Goto(4), builtin("copy", 1, Const(1)), Ret(1))
    cases: list[tuple[str, tuple[Instruction, ...]]] = [
        ("it calls extern:test_host_nothing", (call("extern:test_host_nothing", -1, R[0]), Ret(0))),
        ("function 'inner' calls itself", (call("func:inner", 1, R[0]), Ret(1))),
        ("register r1 holds values of several types or ranks", two_ranks),
        ("a field is taken of something that does not have it", (builtin("tuple_get", 1, R[0], 0), Ret(1))),
        ("the output 'y' is not of the signature's type", (builtin("copy", 1, Const(0)), Ret(1))),
        ("it allocates an arena in a loop", (builtin("alloc_arena", 1, None, 8), If(0, 0), Ret(0))),
        ("there is no heap slot 3",
         (builtin("alloc_heap", 1, 3), builtin("alloc_tensor", 2, R[1], (-4,), "bool"), Ret(0))),
    ]  # fmt: skip
    register_extern("test_host_nothing", lambda x: None)
    for reason, code in cases:
        data = data_of(
            object_code, (FLAG,), (out(dtype="bool"),), *code, constants=(ONE, np.ones((1, 1))), functions=(inner,)
        )
        assert (data.host.object_code, data.host.reason) == (b"", reason)
        assert Executable(data)._host is None


def test_the_interpreter_can_be_asked_for(object_code: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    data = adder(object_code)
    assert Executable(data)._host is not None
    monkeypatch.setenv("RELAXLITE_INTERPRET", "1")
    exe = Executable(data)
    assert exe._host is None
    np.testing.assert_array_equal(exe(floats(2)), [[1], [3]])


def test_another_layout_of_arrays_means_the_interpreter(object_code: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert array_reader.is_supported()
    monkeypatch.setattr(array_reader, "is_supported", lambda: False)
    exe = Executable(adder(object_code))
    assert exe._host is None and exe(floats(2)).shape == (2, 1)


def test_the_layout_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, wrong in (("_DATA", 24), ("_DTYPE", 48), ("_RANK", 64), ("_FLAGS", 24), ("_TUPLE_ITEMS", 16)):
        with monkeypatch.context() as patch:
            patch.setattr(array_reader, name, wrong)
            assert not array_reader.is_supported.__wrapped__(), name


def test_host_functions_are_saved(adding: Executable, tmp_path: Path) -> None:
    adding.save(tmp_path / "m.rlx")
    again = load(tmp_path / "m.rlx")
    assert again.data.host == adding.data.host and runs_natively(again, [floats(4)])


def test_the_kernel_cache_has_host_functions_too(
    object_code: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def counting(text: str, target: Target, *, optimize: bool) -> bytes:
        made.append(text)
        return to_object(text, target, optimize=optimize)

    monkeypatch.setattr(host_module, "to_object", counting)
    with config.override(kernel_cache=str(tmp_path)):
        first, second = adder(object_code).host, adder(object_code).host
        assert first == second and len(made) == 1
        looping(object_code)
        assert len(made) == 2
    with config.override(kernel_cache_mb=0):
        assert adder(object_code).host == first and len(made) == 3


# Arguments


class Subclass(np.ndarray):
    pass


@pytest.mark.parametrize(
    "x",
    [
        [0.0, 1.0, 2.0],
        (0, 1, 2),
        floats(6)[::2] / 2,
        floats(3).view(Subclass),
        floats(3).astype(">f4"),
        np.frombuffer(b"\0" + floats(3).tobytes(), np.uint8)[1:].view(np.float32),
        np.broadcast_to(np.float32(1), (3,)),
    ],
    ids=["list", "tuple", "strided", "subclass", "big-endian", "unaligned", "broadcast"],
)
def test_arguments_that_are_not_plain_arrays(adding: Executable, x: Any) -> None:
    plain = np.array(x, np.float32, ndmin=1)
    np.testing.assert_array_equal(adding(x), (2 * plain + 1).reshape(-1, 1))
    assert outcome(adding, [x]) == outcome(interpreted(adding), [x])


@pytest.mark.parametrize("x", [floats(3).astype(np.float64), floats(3, 1), np.float32(1), "no", None, [[1.0]], {}])
def test_wrong_arguments_are_refused_alike(adding: Executable, x: Any) -> None:
    with pytest.raises(InputError):
        adding(x)
    assert outcome(adding, [x]) == outcome(interpreted(adding), [x])


def test_the_signature_is_checked_natively(object_code: bytes) -> None:
    """Constants, bounds, divisors, a symbol in two arguments; compound dimensions are not."""
    bounds = {"a": (2, 8, 2)}
    inputs = (
        TensorSpec("p", "float32", ("a", 3), bounds),
        TensorSpec("q", "int8", ("a", "a*2"), bounds),
    )
    exe = Executable(data_of(object_code, inputs, (out("a", 3),), builtin("copy", 2, R[0]), Ret(2)))
    for rows, columns, other, double in (
        *((4, 3, 4, 8), (2, 3, 2, 1), (8, 3, 8, 0), (3, 3, 3, 6), (0, 3, 0, 0), (10, 3, 10, 20), (4, 2, 4, 8)),
        *((4, 3, 6, 12), (4, 0, 4, 8)),
    ):
        args = [floats(rows, columns), np.zeros((other, double), np.int8)]
        assert_same_both_ways(exe, args, interpreted(exe))


# Memory


def test_loops_free_what_they_allocate(object_code: bytes, blocks: Counter[str]) -> None:
    exe = Executable(looping(object_code))
    for limit in (-1, 1, 100):
        assert runs_natively(exe, [np.float32(limit) * ONE])
        assert blocks["allocated"] == blocks["freed"] and blocks["held"] == 0
    assert blocks["allocated"] > 50


def test_a_call_that_fails_frees_what_it_has_allocated(object_code: bytes, blocks: Counter[str]) -> None:
    for _, _, code, n in FAILURES:
        exe = Executable(data_of(object_code, (X,), (out("n"),), *BIND_X, *code, constants=(floats(2),)))
        for _ in range(2):
            assert not runs_natively(exe, [floats(n)])
        assert blocks["allocated"] == blocks["freed"] and blocks["held"] == 0
    assert blocks["allocated"] > 5


def test_memory_is_free_after_its_last_use(object_code: bytes, blocks: Counter[str]) -> None:
    """A chain of eight tensors, some under other names, needs two at a time."""
    code: list[Instruction] = [*BIND_X, builtin("copy", 5, R[0])]
    for k in range(6, 11):
        code.append(builtin("alloc_tensor", k, R[4], (-1,), "float32"))
        code.append(builtin("reshape", k + 6, R[k - 1], R[4], (1, -1)))
        code.append(builtin("make_tuple", k + 12, Reg(k + 6)))
        code.append(call("kernel:add", -1, R[4], 0, R[0], Reg(k + 6), R[k]))
    exe = Executable(data_of(object_code, (X,), (out("n"),), *code, builtin("copy", 11, R[10]), Ret(11)))
    for n in (0, 4, 7):
        np.testing.assert_array_equal(exe(floats(n)), 6 * floats(n))
    assert blocks["most"] == 2 and blocks["allocated"] == blocks["freed"] == 3 * 7


def test_results_that_are_copied_are_freed(object_code: bytes, blocks: Counter[str]) -> None:
    code = (If(0, 4), builtin("alloc_tensor", 1, None, (2,), "bool"), builtin("copy", 2, R[1]), Goto(5),
            builtin("copy", 2, Const(0)), Ret(2))  # fmt: skip
    exe = Executable(data_of(object_code, (FLAG,), (out(2, dtype="bool"),), *code, constants=(np.ones(2, bool),)))
    for flag in (True, False, True):
        exe(np.array(flag))
    assert (blocks["allocated"], blocks["freed"]) == (5, 5)


def interrupted_behind(function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """Ctrl-C as Python notices it: when a function that is not Python's returns, here for the last of `calls`."""
    left = itertools.count(calls - 1, -1)

    def call_and_interrupt(*args: Any) -> Any:
        found = function(*args)
        if next(left) == 0:
            raise KeyboardInterrupt
        return found

    return call_and_interrupt


@pytest.mark.parametrize(("place", "calls"), [("run", 1), ("empty", 1), ("empty", 2), ("empty", 3), ("finish", 1)])
def test_ctrl_c_leaks_nothing_and_copies_no_result_into_an_array_of_another_size(
    object_code: bytes, blocks: Counter[str], monkeypatch: pytest.MonkeyPatch, place: str, calls: int
) -> None:
    exe, args = Executable(data_dependent(object_code)), (np.array([50]), floats(5))
    host = exe._host
    assert host is not None and len(exe(*args)[1]) == 50
    finish, layout = host._finish, FrameLayout.of(exe.data.signature)

    def checked_finish(address: int) -> None:
        words = (ctypes.c_int64 * layout.heap).from_address(address)
        for at in layout.outputs:
            if words[at + OUT_COPIED]:
                assert ctypes.cast(words[at], ctypes.py_object).value.nbytes == words[at + OUT_BYTES]
        finish(address)

    monkeypatch.setattr(host, "_finish", checked_finish)
    with monkeypatch.context() as patch:
        owner, name = (np, place) if place == "empty" else (host, f"_{place}")
        patch.setattr(owner, name, interrupted_behind(getattr(owner, name), calls))
        with pytest.raises(KeyboardInterrupt):
            exe(*args)
    assert blocks["allocated"] == blocks["freed"] > 0
    assert len(exe(*args)[1]) == 50
    assert blocks["allocated"] == blocks["freed"]


def test_ctrl_c_in_a_call_that_gave_up_frees_nothing_twice(
    object_code: bytes, blocks: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exe = Executable(data_dependent(object_code))
    host = exe._host
    assert host is not None and runs_natively(exe, [np.array([50]), floats(5)])
    monkeypatch.setattr(host, "_run", interrupted_behind(host._run, 1))
    with pytest.raises(KeyboardInterrupt):
        host((np.array([3]), floats(5)))
    assert blocks["allocated"] == blocks["freed"] > 0


def test_arenas_stay_with_their_frames_until_released(object_code: bytes) -> None:
    exe = Executable(adder(object_code))
    exe.release_memory()
    assert exe.release_memory() == 0
    exe(floats(5))
    assert exe.release_memory() == 1 << 16
    exe(floats(1 << 20))
    exe(floats(5))
    assert exe.release_memory() >= 4 << 20
    np.testing.assert_array_equal(exe(floats(3)), 2 * floats(3).reshape(3, 1) + 1)


def test_poison_shows_reads_of_garbage(object_code: bytes) -> None:
    """An arena, a prepared result and a block of the host function's own, all read without being written."""
    code = (
        *BIND_X,
        builtin("alloc_arena", 5, None, 4096),
        builtin("view", 6, R[5], R[4], 0, (-1,), "float32"),
        builtin("alloc_tensor", 7, R[4], (-1,), "float32"),
        builtin("alloc_tensor", 8, R[4], (-1,), "float32"),
        builtin("copy", 9, R[8]),
        builtin("make_tuple", 10, R[6], R[7], R[9]),
        Ret(10),
    )
    with config.override(poison_memory=True):
        exe = Executable(data_of(object_code, (X,), (out("n"), out("n"), out("n")), *code))
    assert runs_natively(exe, [floats(8)])
    for result in exe(floats(8)):
        assert np.isnan(result).all()


def test_threads_share_an_executable(object_code: bytes) -> None:
    exe, loop = Executable(adder(object_code)), Executable(looping(object_code))
    expected = loop(100 * ONE)
    wrong: list[int] = []

    def work(n: int) -> None:
        for _ in range(200):
            if not np.array_equal(exe(floats(n)), 2 * floats(n).reshape(n, 1) + 1):
                wrong.append(n)
            if not all(map(np.array_equal, loop(100 * ONE), expected)):
                wrong.append(-1)

    threads = [threading.Thread(target=work, args=(n,)) for n in (3, 50, 999, 40_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_host_function_holds_the_workers(object_code: bytes, blocks: Counter[str]) -> None:
    assert "relaxlite_hold_workers" in threadpool.symbols()
    exe = Executable(adder(object_code))
    exe(floats(3))
    assert blocks["held"] == 0 and "held" in blocks
