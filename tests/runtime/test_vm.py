"""The interpreter on hand-assembled bytecode: builtins, control flow, kernels made from LLVM IR, and every error."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest

from relaxlite import config
from relaxlite.errors import ExecutionError, InputError, OutOfMemoryError, RelaxliteError, ShapeMismatchError
from relaxlite.runtime import decoder
from relaxlite.runtime.executable import (
    Call,
    Const,
    ExecutableData,
    Goto,
    If,
    Imm,
    ImmValue,
    Instruction,
    KernelInfo,
    Operand,
    Reg,
    Ret,
    Signature,
    TensorSpec,
    VMFunction,
)
from relaxlite.runtime.memory import MEMORY_LIMIT
from relaxlite.runtime.tensor import Tensor, from_numpy
from relaxlite.runtime.vm import VirtualMachine, register_extern

KERNELS_IR = """
; out[i] = x[i] + y[i] for i < symbols[0]; fails check 0 when symbols[0] is 13
define i32 @add(ptr %buffers, ptr %symbols) {
entry:
  %n = load i64, ptr %symbols
  %is_unlucky = icmp eq i64 %n, 13
  br i1 %is_unlucky, label %fail, label %start
fail:
  ret i32 1
start:
  %x = load ptr, ptr %buffers
  %y_at = getelementptr ptr, ptr %buffers, i64 1
  %y = load ptr, ptr %y_at
  %out_at = getelementptr ptr, ptr %buffers, i64 2
  %out = load ptr, ptr %out_at
  br label %test
test:
  %i = phi i64 [ 0, %start ], [ %next, %body ]
  %more = icmp slt i64 %i, %n
  br i1 %more, label %body, label %done
body:
  %xi_at = getelementptr float, ptr %x, i64 %i
  %yi_at = getelementptr float, ptr %y, i64 %i
  %oi_at = getelementptr float, ptr %out, i64 %i
  %xi = load float, ptr %xi_at
  %yi = load float, ptr %yi_at
  %sum = fadd float %xi, %yi
  store float %sum, ptr %oi_at
  %next = add i64 %i, 1
  br label %test
done:
  ret i32 0
}
; out = symbols[0] < symbols[1]; a counter's test
define i32 @below(ptr %buffers, ptr %symbols) {
  %a = load i64, ptr %symbols
  %b_at = getelementptr i64, ptr %symbols, i64 1
  %b = load i64, ptr %b_at
  %is_below = icmp slt i64 %a, %b
  %byte = zext i1 %is_below to i8
  %out = load ptr, ptr %buffers
  store i8 %byte, ptr %out
  ret i32 0
}
; a shape program: heap[1] = heap[0] * 4, -1 when heap[0] is 99
define i32 @shapes(ptr %buffers, ptr %symbols) {
  %heap = load ptr, ptr %buffers
  %n = load i64, ptr %heap
  %bytes = mul i64 %n, 4
  %to = getelementptr i64, ptr %heap, i64 1
  store i64 %bytes, ptr %to
  %is_bad = icmp eq i64 %n, 99
  %status = select i1 %is_bad, i32 -1, i32 0
  ret i32 %status
}
; heap[0] += 1
define i32 @count(ptr %buffers, ptr %symbols) {
  %heap = load ptr, ptr %buffers
  %n = load i64, ptr %heap
  %next = add i64 %n, 1
  store i64 %next, ptr %heap
  ret i32 0
}
define i32 @starved(ptr %buffers, ptr %symbols) {
  ret i32 -2
}
define i32 @strange(ptr %buffers, ptr %symbols) {
  ret i32 77
}
"""
KERNELS = {
    "add": KernelInfo("add", "add", ("thirteen is unlucky",), 3, 1),
    "below": KernelInfo("below", "below", (), 1, 2),
    "shapes": KernelInfo("shapes", "shapes", (), 1, 0),
    "count": KernelInfo("count", "count", (), 1, 0),
    "starved": KernelInfo("starved", "starved"),
    "strange": KernelInfo("strange", "strange"),
}


def compile_object(ir: str) -> bytes:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=2, reloc="pic", jit=True)
    return machine.emit_object(llvm.parse_assembly(ir))


@pytest.fixture(scope="module")
def kernels_object() -> bytes:
    return compile_object(KERNELS_IR)


def builtin(name: str, dst: int, *operands: Operand | ImmValue) -> Call:
    """A call; plain values are immediates."""
    return call(f"builtin:{name}", dst, *operands)


def call(callee: str, dst: int, *operands: Operand | ImmValue) -> Call:
    return Call(dst, callee, tuple(o if isinstance(o, Reg | Const | Imm) else Imm(o) for o in operands))


R = [Reg(index) for index in range(12)]


def program(
    *code: Instruction,
    params: int = 0,
    constants: tuple[np.ndarray, ...] = (),
    functions: tuple[VMFunction, ...] = (),
    object_code: bytes = b"",
) -> ExecutableData:
    names = tuple(f"p{index}" for index in range(params))
    main = VMFunction("main", names, 12, code)
    return ExecutableData(
        functions={function.name: function for function in (main, *functions)},
        signature=Signature(tuple(TensorSpec(name, "float32", ()) for name in names), ()),
        kernels=KERNELS if object_code else {},
        objects=(object_code,) if object_code else (),
        constants=constants,
    )


def run(data: ExecutableData, *arrays: np.ndarray) -> Any:
    result = VirtualMachine(data).run("main", [from_numpy(array, str(array.dtype)) for array in arrays])
    return result.numpy() if isinstance(result, Tensor) else result


def floats(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_a_value_passes_through() -> None:
    np.testing.assert_array_equal(run(program(Ret(0), params=1), floats(2, 3)), floats(2, 3))


def test_constants_are_operands() -> None:
    data = program(builtin("copy", 0, Const(1)), Ret(0), constants=(floats(1), floats(3)))
    np.testing.assert_array_equal(run(data), floats(3))


def test_constants_that_are_not_dense_are_made_so() -> None:
    data = program(builtin("copy", 0, Const(0)), Ret(0), constants=(floats(2, 3).T,))
    np.testing.assert_array_equal(run(data), floats(2, 3).T)


def test_tuples_nest() -> None:
    data = program(
        builtin("make_tuple", 2, R[0], R[1]),
        builtin("make_tuple", 3, R[2], Const(0)),
        builtin("tuple_get", 4, R[3], 0),
        builtin("tuple_get", 5, R[4], 1),
        Ret(5),
        params=2,
        constants=(floats(1),),
    )
    np.testing.assert_array_equal(run(data, floats(2), floats(4)), floats(4))


def test_reshape_and_copy_follow_symbols_in_the_heap() -> None:
    data = program(
        builtin("alloc_heap", 1, 2),
        builtin("match_shape", -1, R[0], R[1], (("bind", 0, "n", 0, None, 1), ("bind", 1, "m", 0, None, 1)), "x"),
        builtin("reshape", 2, R[0], R[1], (-2, 1, -1)),
        builtin("copy", 3, R[2]),
        Ret(3),
        params=1,
    )
    for shape in ((2, 3), (0, 5), (1, 1)):
        np.testing.assert_array_equal(run(data, floats(*shape)), floats(*shape).reshape(shape[1], 1, shape[0]))


def test_reshape_to_another_size_is_an_error() -> None:
    with pytest.raises(ShapeMismatchError, match=r"cannot reshape \[2, 3\] to \[7\]: the sizes differ"):
        run(program(builtin("reshape", 1, R[0], None, (7,)), Ret(1), params=1), floats(2, 3))


def test_a_tensor_becomes_a_shape() -> None:
    data = program(builtin("tensor_to_shape", 1, R[0]), Ret(1), params=1)
    assert run(data, np.array([4, 0, 7], np.int32)) == (4, 0, 7)
    assert run(data, np.array(5)) == (5,)
    with pytest.raises(ExecutionError, match="a shape is an integer tensor of rank 0 or 1, got Tensor"):
        run(data, floats(2))


def test_if_and_goto_choose() -> None:
    data = program(If(0, 3), builtin("copy", 1, Const(0)), Goto(4), builtin("copy", 1, Const(1)), Ret(1),
                   params=1, constants=(floats(1), floats(2)))  # fmt: skip
    assert np.shape(run(data, np.array(True))) == (1,)
    assert np.shape(run(data, np.array([False]))) == (2,)


@pytest.mark.parametrize("condition", [np.array([True, True]), np.array(1), np.zeros((0,), bool)])
def test_a_condition_must_be_one_bool(condition: np.ndarray) -> None:
    with pytest.raises(ExecutionError, match="a condition must be one bool, got Tensor"):
        run(program(If(0, 1), Ret(0), params=1), condition)


def test_functions_call_functions() -> None:
    double = VMFunction("double", ("a",), 2, (builtin("make_tuple", 1, R[0], R[0]), Ret(1)))
    data = program(call("func:double", 1, R[0]), call("func:double", 2, R[1]), builtin("tuple_get", 3, R[2], 1),
                   builtin("tuple_get", 4, R[3], 0), Ret(4), params=1, functions=(double,))  # fmt: skip
    np.testing.assert_array_equal(run(data, floats(3)), floats(3))


def test_endless_recursion_is_an_error() -> None:
    with pytest.raises(ExecutionError, match="function 'main' calls itself too deeply"):
        run(program(call("func:main", 1, R[0]), Ret(1), params=1), floats(1))


def test_library_routines_are_python_functions_of_numpy_views() -> None:
    def axpy(factor: int, x: np.ndarray, out: np.ndarray) -> None:
        out[:] = factor * x

    register_extern("test_axpy", axpy)
    data = program(builtin("copy", 1, R[0]), call("extern:test_axpy", -1, 3, R[0], R[1]), Ret(1), params=1)
    np.testing.assert_array_equal(run(data, floats(4)), 3 * floats(4))


def test_library_routines_that_fail_or_are_missing() -> None:
    def broken(x: np.ndarray) -> None:
        raise KeyError("oops")

    register_extern("test_broken", broken)
    with pytest.raises(ExecutionError, match="the library routine 'test_broken' failed: 'oops'"):
        run(program(call("extern:test_broken", -1, R[0]), Ret(0), params=1), floats(1))
    with pytest.raises(ExecutionError, match="there is no library routine 'nowhere'"):
        run(program(call("extern:nowhere", -1, R[0]), Ret(0), params=1), floats(1))


MATCH = (("bind", 0, "n", 2, 8, 2), ("const", 3), ("check", 0, "n"))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((4, 3), "expects shape (n, 3, n) of rank 3, got (4, 3) of rank 2"),
        ((0, 3, 0), "dimension 0 of shape (0, 3, 0): n = 0 is below its lower bound 2"),
        ((10, 3, 10), "dimension 0 of shape (10, 3, 10): n = 10 exceeds its upper bound 8"),
        ((5, 3, 5), "dimension 0 of shape (5, 3, 5): n = 5 is not a multiple of 2"),
        ((4, 2, 4), "dimension 1 of shape (4, 2, 4): expects 3, got 2"),
        ((4, 3, 6), "dimension 2 of shape (4, 3, 6): expects n = 4, got 6"),
    ],
)
def test_shapes_that_do_not_match(shape: tuple[int, ...], message: str) -> None:
    def data(what: str) -> ExecutableData:
        match = builtin("match_shape", -1, R[0], R[1], MATCH, what)
        return program(builtin("alloc_heap", 1, 1), match, Ret(0), params=1)

    run(data("argument 'x'"), floats(4, 3, 4))
    with pytest.raises(InputError) as caught:
        run(data("argument 'x'"), floats(*shape))
    assert str(caught.value) == f"argument 'x': {message}"
    with pytest.raises(ShapeMismatchError) as other:
        run(data("result of node_7"), floats(*shape))
    assert str(other.value) == f"result of node_7: {message}"


def test_shape_values_are_matched_too() -> None:
    data = program(
        builtin("alloc_heap", 1, 1),
        builtin("tensor_to_shape", 2, R[0]),
        builtin("match_shape", -1, R[2], R[1], (("bind", 0, "k", 0, None, 1),), "k of topk"),
        builtin("alloc_tensor", 3, R[1], (-1, 2), "int8"),
        Ret(3),
        params=1,
    )
    assert np.shape(run(data, np.array(5))) == (5, 2)
    with pytest.raises(ShapeMismatchError, match=r"k of topk: .* k = -1 is below its lower bound 0"):
        run(data, np.array(-1))


def test_dimensions_may_be_left_unchecked() -> None:
    spec = (("any",), ("const", 3))
    data = program(builtin("match_shape", -1, R[0], None, spec, "x"), Ret(0), params=1)
    assert run(data, floats(7, 3)).shape == (7, 3)
    with pytest.raises(ShapeMismatchError, match=r"x: expects shape \(any, 3\) of rank 2, got \(3,\) of rank 1"):
        run(data, floats(3))


def test_unbounded_symbols_take_anything() -> None:
    data = program(builtin("alloc_heap", 1, 1), builtin("tensor_to_shape", 2, R[0]), builtin(
        "match_shape", -1, R[2], R[1], (("bind", 0, "k", None, None, 1),), "x"), Ret(2), params=1)  # fmt: skip
    assert run(data, np.array(-7)) == (-7,)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ((-1, -1), "tensor r2 of function 'main': float64[4611686018427387904, 4611686018427387904] has "),
        ((-1,), "float64[4611686018427387904] has 36893488147419103232 bytes, which overflows 64 bits"),
        ((1 << 50,), "tensor r2 of function 'main': needs 8.0 PiB, more than the "),
        ((1 << 50,), "its type is float64[1125899906842624]"),
    ],
)
def test_tensors_that_are_too_large_are_named(dims: tuple[int, ...], message: str) -> None:
    data = program(
        builtin("alloc_heap", 1, 1),
        builtin("tensor_to_shape", 3, R[0]),
        builtin("match_shape", -1, R[3], R[1], (("bind", 0, "n", None, None, 1),), "x"),
        builtin("alloc_tensor", 2, R[1], dims, "float64"),
        Ret(2),
        params=1,
    )
    with pytest.raises(OutOfMemoryError) as caught:
        run(data, np.array(1 << 62))
    assert message in str(caught.value)
    if dims == (-1,):
        with pytest.raises(ShapeMismatchError, match="has a negative dimension; an input that it depends on is too"):
            run(data, np.array(-4))


def test_an_error_names_what_the_failing_instruction_was_made_of_once() -> None:
    reshape = (builtin("alloc_heap", 1, 1), builtin("reshape", 2, R[0], R[1], (4,)), Ret(2))
    inner = VMFunction("inner", ("a",), 3, reshape, (None, "node 'r' (Reshape)", None))
    data = program(call("func:inner", 1, R[0]), Ret(1), params=1, functions=(inner,))
    outer = dataclasses.replace(data.functions["main"], locations=("node 'f' (Call)", None))
    data = dataclasses.replace(data, functions={**data.functions, "main": outer})
    with pytest.raises(ShapeMismatchError) as caught:
        run(data, floats(2, 3))
    assert str(caught.value) == "node 'r' (Reshape): cannot reshape [2, 3] to [4]: the sizes differ"


def test_arenas_that_are_too_large_are_named() -> None:
    with pytest.raises(OutOfMemoryError, match=r"arena r1 of function 'main': needs .*, more than the .* of memory"):
        run(program(builtin("alloc_arena", 1, None, MEMORY_LIMIT + 1), Ret(0), params=1), floats(1))


def arena_program(size: int = 4096) -> ExecutableData:
    """x copied through an arena by way of a nested function that returns arena memory."""
    inner = VMFunction(
        "inner",
        ("a",),
        6,
        (
            builtin("alloc_heap", 1, 3),
            builtin("match_shape", -1, R[0], R[1], (("bind", 0, "n", 0, None, 1),), "a"),
            builtin("alloc_arena", 2, R[1], size),
            builtin("view", 3, R[2], R[1], 64, (-1,), "float32"),
            call("extern:test_copy", -1, R[0], R[3]),
            Ret(3),
        ),
    )
    return program(call("func:inner", 1, R[0]), call("func:inner", 2, R[1]), Ret(2), params=1, functions=(inner,))


def test_arena_memory_never_leaves_its_call() -> None:
    register_extern("test_copy", lambda x, out: np.copyto(out, x))
    machine = VirtualMachine(arena_program())
    result = machine.run("main", [from_numpy(floats(10), "float32")])
    assert not result.owner.pooled
    np.testing.assert_array_equal(result.numpy(), floats(10))
    assert machine.release_memory() > 0


def test_a_view_outside_its_arena_is_an_error() -> None:
    register_extern("test_copy", lambda x, out: np.copyto(out, x))
    with pytest.raises(ExecutionError, match=r"float32\[100000\] at 64 is not inside an arena of 65536 bytes"):
        run(arena_program(4096), floats(100_000))


def test_arenas_return_to_the_pool_after_errors() -> None:
    code = (builtin("alloc_arena", 1, None, 100), builtin("reshape", 2, R[0], None, (7,)), Ret(2))
    machine = VirtualMachine(program(*code, params=1))
    for _ in range(3):
        with pytest.raises(ShapeMismatchError):
            machine.run("main", [from_numpy(floats(1), "float32")])
    assert machine.release_memory() == 1 << 16


@pytest.mark.parametrize("poison", [False, True])
def test_poison_fills_new_tensors_with_nan(poison: bool) -> None:
    with config.override(poison_memory=poison):
        result = run(program(builtin("alloc_tensor", 0, None, (1000,), "float32"), Ret(0)))
    assert not poison or np.isnan(result).all()


@pytest.mark.parametrize(
    "code",
    [
        [builtin("tuple_get", 1, R[0], 0)],
        [builtin("make_tuple", 2, R[0]), builtin("tuple_get", 1, R[2], 3)],
        [builtin("make_tuple", 2, R[0]), builtin("copy", 1, R[2])],
        [builtin("reshape", 1, R[0], None, (-1,))],
        [builtin("reshape", 1, R[0], R[0], (-1,))],
        [builtin("make_tuple", 2, R[0]), builtin("view", 1, R[2], None, 0, (1,), "int8")],
        [builtin("alloc_heap", 2, 1), builtin("alloc_tensor", 1, R[2], (-5,), "int8")],
        [builtin("alloc_arena", 2, None, 5), builtin("tensor_to_shape", 1, R[2])],
    ],
)
def test_values_of_the_wrong_kind_are_errors(code: list[Instruction]) -> None:
    with pytest.raises(RelaxliteError, match=r"function 'main', \d: r1 = builtin:.*: a value of the wrong kind"):
        run(program(*code, Ret(1), params=1), floats(3))


# ---- with kernels


def adder(object_code: bytes) -> ExecutableData:
    return program(
        builtin("alloc_heap", 2, 4),
        builtin("match_shape", -1, R[0], R[2], (("bind", 0, "n", 0, None, 1),), "argument 'x'"),
        builtin("match_shape", -1, R[1], R[2], (("check", 0, "n"),), "argument 'y'"),
        call("kernel:shapes", -1, R[2], 0, R[2]),
        builtin("alloc_arena", 3, R[2], -2),
        builtin("view", 4, R[3], R[2], 0, (-1,), "float32"),
        builtin("alloc_tensor", 5, R[2], (-1,), "float32"),
        call("kernel:add", -1, R[2], 0, R[0], R[1], R[4]),
        call("kernel:add", -1, R[2], 0, R[4], Const(0), R[5]),
        Ret(5),
        params=2,
        constants=(np.full(1000, 100, np.float32),),
        object_code=object_code,
    )


@pytest.fixture(scope="module")
def adding(kernels_object: bytes) -> Iterator[VirtualMachine]:
    yield VirtualMachine(adder(kernels_object))


def add(machine: VirtualMachine, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return machine.run("main", [from_numpy(x, "float32"), from_numpy(y, "float32")]).numpy()


@pytest.mark.parametrize("n", [0, 1, 7, 64, 1000])
def test_kernels_run_at_every_size(adding: VirtualMachine, n: int) -> None:
    np.testing.assert_array_equal(add(adding, floats(n), 2 * floats(n)), 3 * floats(n) + 100)


def test_a_failed_check_of_a_kernel_is_an_error(adding: VirtualMachine) -> None:
    with pytest.raises(ExecutionError, match="kernel 'add': thirteen is unlucky"):
        add(adding, floats(13), floats(13))


def test_an_overflow_in_a_shape_program_is_an_error(adding: VirtualMachine) -> None:
    with pytest.raises(OutOfMemoryError, match="kernel 'shapes': size overflow: an integer does not fit 64 bits"):
        add(adding, floats(99), floats(99))


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("starved", OutOfMemoryError, "kernel 'starved': the system has no memory left for its workspace"),
        ("strange", ExecutionError, "kernel 'strange': failed with the unknown status 77"),
    ],
)
def test_other_statuses(kernels_object: bytes, name: str, kind: type[Exception], message: str) -> None:
    data = program(call(f"kernel:{name}", -1, None, 0), Ret(0), params=1, object_code=kernels_object)
    with pytest.raises(kind, match=message):
        run(data, floats(1))


def test_kernels_do_not_read_beyond_the_heap(kernels_object: bytes) -> None:
    data = program(builtin("alloc_heap", 1, 2), call("kernel:add", -1, R[1], 2, R[0], R[0], R[0]), Ret(0), params=1,
                   object_code=kernels_object)  # fmt: skip
    with pytest.raises(ExecutionError, match="kernel 'add' reads heap slot 2 of 2"):
        run(data, floats(1))


def test_a_loop_counts_to_a_symbol(kernels_object: bytes) -> None:
    """while heap[0] < heap[1]: heap[0] += 1; x = x + 1"""
    data = program(
        builtin("alloc_heap", 2, 3),
        builtin("match_shape", -1, R[1], R[2], (("bind", 1, "steps", 0, None, 1),), "steps"),
        builtin("copy", 3, R[0]),
        builtin("alloc_tensor", 4, R[2], (), "bool"),
        call("kernel:below", -1, R[2], 0, R[4]),
        If(4, 11),
        call("kernel:count", -1, R[2], 0, R[2]),
        builtin("alloc_tensor", 5, R[2], (4,), "float32"),
        call("extern:test_increment", -1, R[3], R[5]),
        builtin("copy", 3, R[5]),
        Goto(4),
        Ret(3),
        params=2,
        object_code=kernels_object,
    )
    register_extern("test_increment", lambda x, out: np.copyto(out, x + 1))
    for steps in (0, 1, 9):
        np.testing.assert_array_equal(run(data, floats(4), floats(steps)), floats(4) + steps)


def test_threads_share_a_machine(adding: VirtualMachine) -> None:
    wrong: list[int] = []

    def work(n: int) -> None:
        for _ in range(200):
            if not np.array_equal(add(adding, floats(n), floats(n)), 2 * floats(n) + 100):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in (3, 50, 400, 999)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_code_outlives_nothing_but_the_machine(kernels_object: bytes) -> None:
    machines = [VirtualMachine(adder(kernels_object)) for _ in range(3)]
    del machines[0], machines[0]
    np.testing.assert_array_equal(add(machines[0], floats(3), floats(3)), 2 * floats(3) + 100)


def test_statuses_are_where_the_compiler_expects_them() -> None:
    assert (decoder._OVERFLOW, decoder._NO_MEMORY) == (-1, -2)
