"""Library calls: what a rule may say, where it is used, how routines are called, and what happens without them."""

from __future__ import annotations

import ast
import contextlib
import ctypes.util
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from onnx import TensorProto, helper

import relaxlite as rl
from bench.library import CONSTANT, Row, best_range
from relaxlite import cli, config
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.errors import ExecutionError, InvalidArgumentError, LibraryError, ParseError
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.encoding import fingerprint
from relaxlite.ir.equality import structural_equal
from relaxlite.ir.expr import Constant, Expr, ShapeValue
from relaxlite.ir.module import IRModule
from relaxlite.ir.parser import parse_module
from relaxlite.ir.pattern import is_op, wildcard
from relaxlite.ir.printer import module_constants, print_module
from relaxlite.ir.symbolic import syms
from relaxlite.ir.types import TensorType
from relaxlite.library import registered, rules_for, unregister
from relaxlite.library.openblas import KINDS, load_costs, openblas_rules, rules_of_kind
from relaxlite.passes.context import PassContext
from relaxlite.passes.fuse.dispatch import dispatch
from relaxlite.runtime import libraries
from relaxlite.target import Target
from tests.support import tiers
from tests.support.both_ways import interpreted, runs_natively
from tests.support.paths import ROOT
from tests.support.random_graphs import arguments, assert_same_results, graphs

LIBC = ctypes.util.find_library("c") or ""
X, A, B = wildcard("x"), wildcard("a"), wildcard("b")
needs_libc = pytest.mark.skipif(not LIBC or os.name != "posix", reason="needs the C library of a POSIX system")


def has_openblas() -> bool:
    try:
        libraries.require_library("openblas")
    except LibraryError:
        return False
    return True


needs_openblas = pytest.mark.skipif(not has_openblas(), reason="needs the package scipy-openblas32")


@pytest.fixture(autouse=True)
def no_rules_are_left() -> Iterator[None]:
    yield
    left = registered()
    for name in left:
        unregister(name)
    assert not left


def module_of(make: Callable[..., Expr], **shapes: tuple[str | int, ...]) -> IRModule:
    """main(...) over float32 tensors of these shapes, in which equal letters are one symbol."""
    bb = BlockBuilder()
    names = dict.fromkeys(d for shape in shapes.values() for d in shape if isinstance(d, str))
    symbols = {name: bb.symbol(name) for name in names}
    types = {
        name: TensorType.of([symbols[d] if isinstance(d, str) else d for d in shape], "float32")
        for name, shape in shapes.items()
    }
    with bb.function("main", **types) as params:
        bb.result(bb.emit(make(bb, *params)))
    return bb.module()


def decisions(module: IRModule, *, openblas: bool = False) -> list[Any]:
    """About the rules of a test, or those of OpenBLAS."""
    context = PassContext(Target.host())
    context.libraries = rules_for(None, context.target)
    dispatch(module, context)
    return [d for d in context.decisions if ("openblas" in d.subject) == openblas]


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def relu_module() -> IRModule:
    return module_of(lambda bb, x: ops.relu(x), x=("n", "m"))


def sum_of(bb: BlockBuilder, a: Expr, b: Expr) -> Expr:
    return ops.relu(bb.emit(ops.add(a, b)))


def minus_one(x: np.ndarray, out: np.ndarray) -> None:
    """Not what relu computes, so that results say who computed them."""
    assert not x.flags.writeable and x.flags.c_contiguous and out.flags.c_contiguous
    out[...] = -1


# Python functions


@pytest.mark.parametrize("interpret", [False, True])
def test_a_python_function_is_called_natively_in_its_range_and_loops_run_elsewhere(interpret: bool) -> None:
    with rl.register_library("minus", is_op("relu")(X), {"x": ("n", "m")}, function=minus_one, when={"n": (2, 4)}):
        exe = rl.compile(relu_module())
        exe = interpreted(exe) if interpret else exe
    for n in range(7):
        for m in (0, 1, 7, 33):
            x = random(n, m)
            np.testing.assert_array_equal(exe(x), np.full((n, m), -1) if 2 <= n <= 4 else np.maximum(x, 0))
    assert interpret or runs_natively(exe, [random(3, 5)])
    assert [(item.name, item.symbols, item.required) for item in exe.data.libraries] == [("python", ("minus",), ())]


def test_a_rule_of_several_ops_comes_before_one_of_a_part_of_them() -> None:
    def wrong(*arrays: np.ndarray) -> None:
        raise AssertionError("the larger pattern takes it")

    def fused(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        np.maximum(a + b, 0, out=out)
        out += 100

    inner = rl.register_library("inner", is_op("add")(A, B), {"a": None, "b": None}, function=wrong)
    outer = rl.register_library("outer", is_op("relu")(is_op("add")(A, B)), {"a": None, "b": None}, function=fused)
    with inner, outer:
        exe = rl.compile(module_of(sum_of, a=("n", 3), b=(3,)))
    a, b = random(5, 3), random(3)
    np.testing.assert_allclose(exe(a, b), np.maximum(a + b, 0) + 100, rtol=1e-6)


def test_the_rest_of_the_graph_is_fused_around_a_call() -> None:
    def make(bb: BlockBuilder, a: Expr, b: Expr) -> Expr:
        product = bb.emit(ops.matmul(bb.emit(ops.tanh(bb.emit(ops.relu(a)))), b))
        return ops.exp(bb.emit(ops.neg(bb.emit(ops.abs(product)))))

    def times(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        np.matmul(a, b, out=out)

    module = module_of(make, a=("m", "k"), b=("k", "n"))
    with rl.register_library("times", is_op("matmul")(A, B), {"a": ("m", "k"), "b": ("k", "n")}, function=times):
        exe = rl.compile(module)
    kernels = [name for name in exe.data.kernels if "shapes" not in name]
    assert len(kernels) == 2 and "matmul_abs_neg_exp_times" in kernels  # what follows runs behind the call
    assert int(exe.data.metadata.memory_plan["arena_bytes"] != "0")  # tensors on both sides of the call are planned
    a, b = random(4, 6), random(6, 9)
    np.testing.assert_allclose(exe(a, b), np.exp(-np.abs(np.tanh(np.maximum(a, 0)) @ b)), rtol=1e-5)


def test_what_follows_stays_in_the_loops_and_behind_the_call() -> None:
    """bias, residual and relu: fused into the product's loops outside of the range, and a nest of its own inside."""

    def make(bb: BlockBuilder, a: Expr, b: Expr, bias: Expr, rest: Expr) -> Expr:
        total = bb.emit(ops.add(bb.emit(ops.matmul(a, b)), bias))
        return ops.relu(bb.emit(ops.add(rest, bb.emit(ops.multiply(total, total)))))

    def times(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        out[...] = 100

    module = module_of(make, a=("m", "k"), b=("k", "n"), bias=("n",), rest=("m", "n"))
    rule = rl.register_library(
        "times", is_op("matmul")(A, B), {"a": ("m", "k"), "b": ("k", "n")}, function=times, when={"m": (3, 6)}
    )
    with rule:
        exe = rl.compile(module)
        (decision,) = decisions(module)
    assert decision.reason.endswith("add, multiply, add, relu of its result in the same kernel")
    assert [name for name in exe.data.kernels if "shapes" not in name] == ["matmul_add_multiply_add_relu_times"]
    for m, k, n in ((0, 2, 3), (1, 1, 1), (2, 7, 33), (3, 7, 33), (4, 0, 17), (5, 3, 0), (6, 2, 129), (64, 9, 20)):
        a, b, bias, rest = random(m, k), random(k, n), random(n), random(m, n)
        product = np.full((m, n), 100, np.float32) if 3 <= m <= 6 else a @ b
        expected = np.maximum(rest + (product + bias) ** 2, 0)
        np.testing.assert_allclose(exe(a, b, bias, rest), expected, rtol=1e-4, atol=1e-4)


def test_what_is_used_elsewhere_or_has_another_shape_does_not_follow() -> None:
    def make(bb: BlockBuilder, a: Expr, b: Expr) -> Expr:
        product = bb.emit(ops.matmul(a, b))
        return ops.add(bb.emit(ops.sum(bb.emit(ops.exp(product)), axes=(1,), keepdims=True)), product)

    def times(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        np.matmul(a, b, out=out)

    with rl.register_library("times", is_op("matmul")(A, B), {"a": None, "b": None}, function=times):
        module = module_of(make, a=("m", "k"), b=("k", "n"))
        (decision,) = decisions(module)
        assert "in the same kernel" not in decision.reason
        exe = rl.compile(module)
    a, b = random(3, 4), random(4, 5)
    np.testing.assert_allclose(exe(a, b), np.exp(a @ b).sum(axis=1, keepdims=True) + a @ b, rtol=1e-4)


def test_several_results_and_one_operand_twice() -> None:
    def parts(x: np.ndarray, y: np.ndarray, values: np.ndarray, places: np.ndarray) -> None:
        assert x is not y and (x == y).all()
        values[...] = 7
        places[...] = 3

    def both(bb: BlockBuilder, x: Expr) -> Expr:
        return ops.top_k(bb.emit(ops.multiply(x, x)), ShapeValue(syms((2,))))

    pattern = is_op("top_k")(is_op("multiply")(X, wildcard("y")), wildcard())
    with rl.register_library("parts", pattern, {"x": ("n", "m"), "y": None}, function=parts):
        exe = rl.compile(module_of(both, x=("n", 4)))
    values, places = exe(random(3, 4))
    assert (values == 7).all() and (places == 3).all() and places.dtype == np.int64


def test_constants_and_inputs_can_be_operands() -> None:
    weight = random(6, 4)

    def times(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        np.testing.assert_array_equal(b, weight)
        np.matmul(a, b, out=out)

    module = module_of(lambda bb, a: ops.matmul(a, Constant.of(weight)), a=("m", 6))
    rule = rl.register_library(
        "times", is_op("matmul")(A, B), {"a": ("m", "k"), "b": ("k", "n")}, function=times, when={"m": (3, None)}
    )
    with rule:
        exe = rl.compile(module)
    for m in (0, 1, 2, 3, 17):
        np.testing.assert_allclose(exe(random(m, 6)), random(m, 6) @ weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("interpret", [False, True])
def test_what_a_python_function_raises_reaches_the_caller(interpret: bool) -> None:
    def broken(x: np.ndarray, out: np.ndarray) -> None:
        raise ValueError("no such luck")

    with rl.register_library("broken", is_op("relu")(X), {"x": None}, function=broken):
        exe = rl.compile(relu_module())
        exe = interpreted(exe) if interpret else exe
    with pytest.raises(
        ExecutionError, match=r"kernel 'relu_broken': .*broken of the library python failed: no such luck"
    ) as caught:
        exe(random(2, 2))
    assert isinstance(caught.value.__cause__, ValueError)


def test_threads_may_call_at_once() -> None:
    def double(x: np.ndarray, out: np.ndarray) -> None:
        np.multiply(x, 2, out=out)

    with rl.register_library("double", is_op("relu")(X), {"x": None}, function=double):
        exe = rl.compile(relu_module())
    inputs = [random(50 + k, 70) for k in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for x, result in zip(inputs * 20, pool.map(exe, inputs * 20), strict=True):
            np.testing.assert_array_equal(result, x * 2)


def test_a_function_that_returns_its_result_is_told_to_write_it() -> None:
    with rl.register_library("gives", is_op("relu")(X), {"x": None}, function=lambda x, out: x):  # type: ignore[arg-type, return-value]
        exe = rl.compile(relu_module())
    with pytest.raises(ExecutionError, match="must write its result into its last arguments"):
        exe(random(2, 2))


# C functions


def memcpy_rule(**options: Any) -> Any:
    """relu by memcpy, which leaves negative numbers: results say who computed them."""
    arguments = ("float32* out", "float32* x", "int64 4 * n * m")
    given: dict[str, Any] = {"library": LIBC, "symbol": "memcpy", "arguments": arguments, **options}
    return rl.register_library("copy", is_op("relu")(X), {"x": ("n", "m")}, **given)


@needs_libc
@pytest.mark.parametrize("interpret", [False, True])
def test_a_c_function_is_called_in_its_range(interpret: bool) -> None:
    with memcpy_rule(when={"n * m": (12, 60)}):
        exe = rl.compile(relu_module())
    exe = interpreted(exe) if interpret else exe
    for n, m in ((0, 0), (0, 12), (3, 4), (1, 11), (1, 12), (5, 12), (61, 1), (6, 11)):
        x = random(n, m)
        np.testing.assert_array_equal(exe(x), x if 12 <= n * m <= 60 else np.maximum(x, 0))
    assert interpret or runs_natively(exe, [random(3, 4)])


@needs_libc
@pytest.mark.parametrize("threads", [1, 2])
def test_loops_round_a_call_run_on_all_threads(threads: int) -> None:
    """Row by row, and in each row in blocks of 8 of which the last one is shorter."""
    arguments = ("float32* out[i, 8 * j]", "float32* x[i, 8 * j]", "int64 4 * min(8, m - 8 * j)")
    with memcpy_rule(arguments=arguments, loops={"i": "n", "j": "(m + 7) // 8"}, work="100000"):
        exe = rl.compile(relu_module(), threads=threads)
    for n, m in ((0, 3), (3, 0), (1, 1), (5, 8), (7, 9), (64, 129)):
        np.testing.assert_array_equal(exe(random(n, m)), random(n, m))


@needs_libc
def test_a_status_other_than_zero_is_an_error() -> None:
    rule = rl.register_library(
        "compare",
        is_op("add")(A, B),
        {"a": ("n",), "b": ("n",)},
        library=LIBC,
        symbol="memcmp",
        arguments=("float32* a", "float32* b", "int64 4 * n"),
        returns="status",
    )
    with rule:
        exe = rl.compile(module_of(lambda bb, a, b: ops.add(a, b), a=("n",), b=("n",)))
    exe(random(5), random(5))
    with pytest.raises(ExecutionError, match="the routine memcmp of the library c failed"):
        exe(random(5), random(5) + 1)


@needs_libc
def test_sizes_that_c_cannot_hold_leave_it_to_the_loops() -> None:
    with memcpy_rule(arguments=("float32* out", "float32* x", "int32 n * m * 1000000000")):
        exe = rl.compile(relu_module())
    x = random(3, 1)
    np.testing.assert_array_equal(exe(x), np.maximum(x, 0))  # 3e9 is more than an int32 holds
    x = -np.ones((1, 1), np.float32)
    assert "relu_copy" in exe.data.kernels and exe(x[:0]).shape == (0, 1)


# The range


def test_a_range_that_the_bounds_decide_leaves_no_compare() -> None:
    def bounded(lower: int, upper: int | None) -> IRModule:
        bb = BlockBuilder()
        n = bb.symbol("n", lower=lower, upper=upper)
        with bb.function("main", x=TensorType.of((n, 4), "float32")) as (x,):
            bb.result(bb.emit(ops.relu(x)))
        return bb.module()

    with rl.register_library("minus", is_op("relu")(X), {"x": ("n", 4)}, function=minus_one, when={"n": (8, 16)}):
        (inside,), (outside,), (open_,) = (decisions(bounded(*b)) for b in ((8, 16), (17, None), (1, 64)))
        assert inside.taken and open_.taken and not outside.taken
        assert "n is never from 8 to 16" in outside.reason
        context = PassContext(Target.host(), libraries=rules_for(None, Target.host()))
        text = print_module(dispatch(bounded(8, 16), context))
        assert 'if library_found("python", "minus"):' in text
        text = print_module(dispatch(bounded(1, 64), context))
        assert "index(n) >= index(8)" in text and "index(n) <= index(16)" in text


def test_dispatched_programs_print_and_parse() -> None:
    context = PassContext(Target.host(), libraries=tuple(rule for kind in KINDS for rule in rules_of_kind(kind)))
    module = module_of(lambda bb, a, b: ops.matmul(a, b), a=("p", "h", "m", "k"), b=("p", "h", "k", "n"))
    made = dispatch(module, context)
    text = print_module(made)
    assert "call_library(" in text and print_module(parse_module(text, module_constants(made))) == text


CALLS = """n = symbol("n")
@program(symbols=(n,), outputs=1)
def p(x: Buffer((n, 4), "float32"), y: Buffer((n,), "float32")):
    if (index(n) >= index(8)) & library_found("blas", "f"):
        for i in parallel(n):
            call_library("blas", "f", index(n, "int32"), float32(1.5), address_of(x[i, 0]), written(y[i]), work=n*4)
    elif library_found("other", "g", required=True):
        call_library("other", "g", address_of(x[0, 0]), written(y[0]), convention="status")
    else:
        for i in serial(n):
            y[i] = x[i, 3]
"""


def test_calls_in_text() -> None:
    text = CALLS
    module = parse_module(text)
    assert print_module(module) == text
    program = module["p"]
    for old, new in (
        ('"blas", "f", index', '"blas", "h", index'),
        ("float32(1.5)", "float32(1.0)"),
        ("address_of(x[i, 0])", "address_of(x[i, 1])"),
        ("written(y[i])", "address_of(y[i])"),
        ('convention="status"', 'convention="arrays"'),
        ("work=n*4", "work=n*5"),
        (", required=True", ""),
        ('found("blas"', 'found("blis"'),
    ):
        changed = parse_module(text.replace(old, new))["p"]
        assert not structural_equal(program, changed), new
        assert fingerprint(changed) != fingerprint(program), new  # type: ignore[arg-type]
    with pytest.raises(ParseError, match=r"unknown convention 'statu'.*did you mean"):
        parse_module(text.replace('"status"', '"statu"'))


def test_refusals_say_why() -> None:
    def reasons(module: IRModule) -> list[str]:
        return [d.reason for d in decisions(module) if not d.taken]

    pattern = is_op("relu")(is_op("add")(A, B))
    with rl.register_library("f", pattern, {"a": ("n", "n"), "b": ("n",)}, function=minus_one):
        assert reasons(module_of(sum_of, a=("n", "m"), b=("m",))) == [
            "a dimension of a is m, which is not proven to be n"
        ]
        assert reasons(module_of(sum_of, a=(4, 4), b=(4, 4))) == ["b has rank 2, not 1"]
    with rl.register_library("f", pattern, {"a": None}, function=minus_one):
        (reason,) = reasons(module_of(sum_of, a=("n",), b=("n",)))
        assert "also matches b, which is no operand of the rule" in reason
    with rl.register_library(
        "f", pattern, {"a": None, "b": None}, function=minus_one, check=lambda found: "it is Tuesday"
    ):
        assert reasons(module_of(sum_of, a=("n",), b=("n",))) == ["it is Tuesday"]

    def used_twice(bb: BlockBuilder, a: Expr, b: Expr) -> Expr:
        total = bb.emit(ops.add(a, b))
        return ops.multiply(bb.emit(ops.relu(total)), total)

    with rl.register_library("f", pattern, {"a": None, "b": None}, function=minus_one):
        assert reasons(module_of(used_twice, a=("n",), b=("n",))) == ["a value inside is used elsewhere too"]


@needs_libc
def test_another_dtype_is_not_passed_to_c() -> None:
    with memcpy_rule(arguments=("float64* out", "float32* x", "int64 n * m")):
        (decision,) = decisions(relu_module())
    assert not decision.taken and decision.reason == "out is float32, and memcpy takes float64; cast it before"


# What a rule may say


def bad_rule(**options: Any) -> Any:
    given: dict[str, Any] = {"library": LIBC, "symbol": "memcpy", "arguments": ("float32* x",), **options}
    operands = given.pop("operands", {"x": ("n",)})
    return rl.register_library("bad", given.pop("pattern", is_op("relu")(X)), operands, **given)


@needs_libc
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": X}, "does not begin with an op"),
        ({"operands": {}}, "it has no operands"),
        ({"operands": {"x": ("n + 1",)}}, "'n \\+ 1' of x is neither a name nor a number"),
        ({"arguments": ()}, "a C function needs its arguments"),
        ({"arguments": ("double x",)}, "'double x' is not one of int32, .*'int32 m \\* 2'"),
        ({"arguments": ("float32* y",)}, "points to 'y'"),
        ({"arguments": ("float32* ouy",)}, "did you mean 'out'"),
        ({"arguments": ("int32 n + q",)}, "'n \\+ q' is no expression of its dimensions: .*unknown symbol q"),
        ({"arguments": ("float32 n",)}, "needs a number"),
        ({"when": {"q": (1, 2)}}, "unknown symbol q"),
        ({"loops": {"n": "3"}}, "the loop 'n' needs a name of its own"),
        ({"function": minus_one}, "either a Python function, or library and symbol"),
        ({"symbol": ""}, "either a Python function, or library and symbol"),
    ],
)
def test_rules_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        bad_rule(**options)


@needs_libc
def test_libraries_and_symbols_that_are_not_there() -> None:
    with pytest.raises(
        LibraryError, match=r"'nowhere' cannot be loaded from '/lib/nowhere.so'.*RELAXLITE_LIBRARY_PATH"
    ):
        bad_rule(library="/lib/nowhere.so")
    with pytest.raises(LibraryError, match="has no symbol 'memcpi'; check its spelling"):
        bad_rule(symbol="memcpi")


def test_names_are_taken_once_and_freed() -> None:
    first = rl.register_library("f", is_op("relu")(X), {"x": None}, function=minus_one)
    with pytest.raises(InvalidArgumentError, match="'f' exists; unregister it"):
        rl.register_library("f", is_op("relu")(X), {"x": None}, function=minus_one)
    first.unregister()
    first.unregister()  # which does nothing more
    with pytest.raises(InvalidArgumentError, match="no library rule 'f'; there are none"):
        unregister("f")


def test_a_compilation_chooses_its_libraries() -> None:
    with rl.register_library("f", is_op("relu")(X), {"x": None}, function=minus_one):
        x = random(2, 3)
        for chosen, is_called in ((None, True), ("none", False), (("python",), True), ("f", True), ((), False)):
            result = rl.compile(relu_module(), libraries=chosen)(x)
            np.testing.assert_array_equal(result, np.full_like(x, -1) if is_called else np.maximum(x, 0))
        for text, expected in (
            ("none", 0),
            ("f", -1),
            ("openblas" if has_openblas() else "f", 0 if has_openblas() else -1),
        ):
            with config.override(libraries=text):
                assert rl.compile(relu_module())(-np.ones((1, 1), np.float32))[0, 0] == expected
        with pytest.raises(InvalidArgumentError, match="no library or rule 'mkl'; there are openblas, python, f"):
            rl.compile(relu_module(), libraries=("mkl",))


# Saved models in another process


def in_new_process(code: str, *paths: object, **environment: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **environment}
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, paths)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


RUN = """
    import sys, numpy as np, relaxlite as rl
    {before}
    exe = rl.load(sys.argv[1])
    assert "relaxlite.driver" not in sys.modules
    x = -np.ones((3, 4), np.float32)
    print(float(exe(x)[0, 0]), len(exe.missing_libraries), *exe.missing_libraries)
"""
REGISTER = 'rl.register_function("minus", lambda x, out: out.fill(-5))'


@pytest.mark.parametrize("fallback", [True, False])
def test_python_functions_of_saved_models_are_found_by_name(tmp_path: Path, fallback: bool) -> None:
    path = tmp_path / "model.rlx"
    rule = rl.register_library("minus", is_op("relu")(X), {"x": None}, function=minus_one, fallback=fallback)
    with rule:
        rl.compile(relu_module()).save(path)
    assert in_new_process(RUN.format(before=REGISTER), path).split() == ["-5.0", "0"]
    if fallback:
        found = in_new_process(RUN.format(before=""), path)
        assert found.startswith("0.0 1 the model calls the Python function 'minus', which is not registered")
    else:
        with pytest.raises(
            AssertionError, match=r"LibraryError: .*register_function\('minus', function\) before loading"
        ):
            in_new_process(RUN.format(before=""), path)


@needs_libc
def test_c_libraries_of_saved_models_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "model.rlx"
    with memcpy_rule(fallback=False):
        exe = rl.compile(relu_module())
    exe.save(path)
    assert in_new_process(RUN.format(before=""), path).split() == ["-1.0", "0"]
    assert rl.load(path).data.libraries == exe.data.libraries
    assert f"c ({LIBC}): memcpy (required)" in exe.disassemble()


@needs_libc
def test_a_library_path_names_folders(tmp_path: Path) -> None:
    (tmp_path / "libelsewhere.so").write_bytes(b"no library")
    with memcpy_rule(fallback=False):
        data = rl.compile(relu_module()).data
    info = libraries.LibraryInfo("elsewhere", ("memcpy",), "/gone/libelsewhere.so", ("memcpy",))
    with pytest.raises(LibraryError, match=r"cannot be loaded from '/gone/libelsewhere.so'"):
        libraries.bind([info])
    with config.override(library_path=str(tmp_path)), pytest.raises(LibraryError, match=r"invalid ELF|too short"):
        libraries.bind([info])
    assert data.libraries[0].required == ("memcpy",)


def test_a_library_without_a_file_is_not_looked_for() -> None:
    with pytest.raises(LibraryError, match="nothing says where the library 'blas' is"):
        libraries.bind([libraries.LibraryInfo("blas", ("f",), required=("f",))])
    assert libraries.bind([libraries.LibraryInfo("blas", ("f",))]).missing


@needs_libc
def test_the_command_line_shows_and_chooses_libraries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "relu",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "m"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", "m"])],
    )
    model = str(tmp_path / "relu.onnx")
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), model)
    with memcpy_rule(when={"n": (8, None)}):
        assert cli.main(["inspect", model]) == 0
        assert f"libraries c ({LIBC}): memcpy" in capsys.readouterr().out
        assert cli.main(["inspect", model, "--json", "--libraries", "copy"]) == 0
        assert json.loads(capsys.readouterr().out)["libraries"][0]["symbols"] == ["memcpy"]
        assert cli.main(["inspect", model, "--libraries", "none"]) == 0
        assert "memcpy" not in capsys.readouterr().out
        assert cli.main(["inspect", model, "--libraries", "mkl"]) == 2
        assert "there is no library or rule 'mkl'" in capsys.readouterr().err


NO_OPENBLAS = "sys.modules['scipy_openblas32'] = None"


@needs_openblas
@pytest.mark.parametrize("before", ["", NO_OPENBLAS], ids=["there", "missing"])
def test_models_that_call_openblas_run_without_it(tmp_path: Path, before: str) -> None:
    module = module_of(lambda bb, a, b: ops.matmul(a, b), a=("m", "k"), b=("k", "n"))
    path = tmp_path / "model.rlx"
    context = PassContext(Target.host(), libraries=tuple(rules_of_kind("gemm_nn")))
    rl.compile(module, context=context).save(path)
    code = """
        import sys, numpy as np, relaxlite as rl
        {before}
        exe = rl.load(sys.argv[1])
        a, b = np.ones((3, 5), np.float32), np.full((5, 7), 2, np.float32)
        print(exe(a, b).sum(), *exe.missing_libraries)
    """
    found = in_new_process(code.format(before=before), path)
    assert found.startswith("210.0")
    assert ("pip install 'relaxlite[openblas]'" in found) == bool(before)


def test_asking_for_openblas_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy_openblas32", None)
    libraries._open_openblas.cache_clear()
    with pytest.raises(LibraryError, match=r"pip install 'relaxlite\[openblas\]'"):
        rl.compile(relu_module(), libraries=("openblas",))
    np.testing.assert_array_equal(rl.compile(relu_module())(random(2, 2)), np.maximum(random(2, 2), 0))


# OpenBLAS

SIZES = [(1, 1, 1), (1, 3, 7), (1, 70, 600), (2, 5, 3), (7, 9, 1), (33, 17, 5), (5, 1, 130), (600, 3, 2), (1100, 20, 1)]
EMPTY = [(0, 3, 4), (1, 0, 4), (1, 4, 0), (3, 0, 1), (0, 0, 0)]


def product_module(kind: str, lead: tuple[str, ...], *, both: bool) -> IRModule:
    """The first operand has `lead` before its matrix, the second if `both`."""
    before = lead if both else ()
    is_transposed = kind in ("gemv_n", "gemm_nt")

    def make(bb: BlockBuilder, a: Expr, b: Expr) -> Expr:
        last = len(before)
        order = (*range(last), last + 1, last)
        return ops.matmul(a, bb.emit(ops.transpose(b, axes=order)) if is_transposed else b)

    return module_of(make, a=(*lead, "m", "k"), b=(*before, "n", "k") if is_transposed else (*before, "k", "n"))


@pytest.mark.each_value
@needs_openblas
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("lead", "both"), [((), True), (("p",), True), (("p", "q"), True), (("p",), False)], ids=["2", "3", "4", "3x2"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_openblas_computes_what_the_loops_do(kind: str, lead: tuple[str, ...], both: bool, threads: int) -> None:
    """At all sizes, also where it is not used; into memory full of NaN, which beta = 0 must not read."""
    context = PassContext(Target.host(), libraries=tuple(rules_of_kind(kind)))
    with config.override(poison_memory=True):
        exe = rl.compile(product_module(kind, lead, both=both), context=context, threads=threads)
    assert [item.name for item in exe.data.libraries] == ["openblas"]
    batches = [(3, 2)[: len(lead)], (1, 1)[: len(lead)], (0, 1)[: len(lead)]] if lead else [()]
    for m, k, n in (*SIZES, *EMPTY):
        for batch in batches:
            a = random(*batch, m, k)
            before = batch if both else ()
            b = random(*before, n, k) if kind in ("gemv_n", "gemm_nt") else random(*before, k, n)
            expected = a @ (b.swapaxes(-1, -2) if kind in ("gemv_n", "gemm_nt") else b)
            np.testing.assert_allclose(exe(a, b), expected, rtol=1e-4, atol=1e-4)


@needs_openblas
def test_a_rule_of_ones_own_for_openblas() -> None:
    """The arguments are those that docs/howto/libraries.md shows."""
    readme = (ROOT / "docs" / "howto" / "libraries.md").read_text("utf-8")
    (shown,) = re.findall(r"```text\n(\(.int32 101.*?\))\n```", readme, re.DOTALL)
    arguments = ast.literal_eval(shown)
    operands = {"a": ("m", "k"), "b": ("k", "n")}
    with rl.register_library(
        "sgemm", is_op("matmul")(A, B), operands, library="openblas", symbol="cblas_sgemm", arguments=arguments
    ):
        exe = rl.compile(product_module("gemm_nn", (), both=True), libraries=("sgemm",))
    for m, k, n in ((1, 1, 1), (7, 5, 3), (64, 33, 129)):
        np.testing.assert_allclose(exe(random(m, k), random(k, n)), random(m, k) @ random(k, n), rtol=1e-4, atol=1e-4)


@needs_openblas
def test_a_transposed_operand_is_read_as_it_lies() -> None:
    """The larger pattern wins, whatever the order of the rules; both kinds of calls stand in one kernel."""
    rules = tuple(rule for kind in KINDS for rule in rules_of_kind(kind))
    for order in (rules, rules[::-1]):
        exe = rl.compile(product_module("gemm_nt", (), both=True), context=PassContext(Target.host(), libraries=order))
        assert [name for name in exe.data.kernels if "shapes" not in name and "openblas" not in name] == []
        assert set(exe.data.libraries[0].symbols) <= {"cblas_sgemm", "cblas_sgemv"}
        for m, k, n in ((1, 70, 9), (3, 5, 7), (0, 2, 3), (2, 0, 4)):
            a, b = random(m, k), random(n, k)
            np.testing.assert_allclose(exe(a, b), a @ b.T, rtol=1e-4, atol=1e-4)


@needs_openblas
def test_profiles_count_calls_of_libraries() -> None:
    context = PassContext(Target.host(), libraries=tuple(rules_of_kind("gemm_nn")))
    exe = rl.compile(product_module("gemm_nn", (), both=True), context=context)
    (record,) = [r for r in exe.profile([random(8, 16), random(16, 32)], runs=2).records if "openblas" in r.kernel]
    assert record.flops == 2 * 8 * 16 * 32 and record.nbytes == 4 * (8 * 16 + 16 * 32 + 8 * 32)


@needs_openblas
def test_openblas_starts_no_threads() -> None:
    code = """
        import os
        from relaxlite.runtime import libraries
        before = len(os.listdir("/proc/self/task"))
        libraries.require_library("openblas")
        print(len(os.listdir("/proc/self/task")) - before)
    """
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("needs Linux")
    assert in_new_process(code).split() == ["0"]


@needs_openblas
def test_openblas_is_loaded_only_for_models_that_call_it() -> None:
    code = """
        import sys
        import numpy as np
        import relaxlite as rl
        from tests.library.test_library import product_module, relu_module
        loaded = [name for name in sys.modules if name == "scipy_openblas32"]
        assert not loaded or sys.modules.pop(loaded[0])  # by this file, which asks whether to skip tests
        rl.compile(relu_module())(np.ones((2, 3), np.float32))
        print("scipy_openblas32" in sys.modules)
        from relaxlite.runtime import libraries
        libraries._open_openblas.cache_clear()
        rl.compile(product_module("gemm_nt", (), both=True), libraries="openblas")
        print("scipy_openblas32" in sys.modules)
    """
    assert in_new_process(code).split() == ["False", "True"]


def test_the_rules_of_the_table_could_be_called() -> None:
    for rule in (*openblas_rules(), *(rule for kind in KINDS for rule in rules_of_kind(kind))):
        rule.validate()


@needs_openblas
def test_openblas_leaves_constant_weights_to_packed_panels() -> None:
    weight = Constant.of(random(64, 4096))
    found = decisions(module_of(lambda bb, a: ops.matmul(a, weight), a=(1, 64)), openblas=True)
    assert found and not any(decision.taken for decision in found)
    assert all("laid out when compiling" in d.reason or "never" in d.reason for d in found)


def test_the_ranges_follow_from_what_was_measured() -> None:
    found = load_costs()
    assert set(found["table"]) == {*KINDS, CONSTANT}
    for kind in KINDS:
        rows: list[Row] = [
            (dict(zip("mkn", sizes, strict=True)), ours, theirs) for *sizes, ours, theirs in found["table"][kind]
        ]
        best = best_range(rows)
        assert (best is None) == (kind not in found["ranges"])
        if best is not None:
            when, inside = best
            assert {name: list(limits) for name, limits in when.items()} == found["ranges"][kind]["when"]
            assert len(inside) == found["ranges"][kind]["sizes"]
    rules = openblas_rules()
    assert {rule.symbol for rule in rules} <= {"cblas_sgemv", "cblas_sgemm"}
    (plain,) = [rule for rule in rules if rule.name == "openblas_gemv_n"]
    assert plain.when["m"] == (1, 1) and "times as fast as the generated kernel" in plain.reason


def test_a_range_needs_many_gains_and_no_loss() -> None:
    def rows(*gains: float) -> list[Row]:
        return [({"m": 1, "k": 2**i, "n": 2**j}, 100.0 * gains[4 * i + j], 100.0) for i in range(4) for j in range(4)]

    when, inside = best_range(rows(*[0.5] * 8, *[2.0] * 8)) or ({}, [])
    assert when == {"m": (1, 1), "k": (4, None), "n": (1, None)} and len(inside) == 8
    when, _ = best_range(rows(*[2.0] * 12, *[0.5] * 4)) or ({}, [])
    assert when["k"] == (1, 4)
    assert best_range(rows(*[0.5] * 9, *[2.0] * 7)) is None  # too few
    assert best_range(rows(*[1.05] * 16)) is None  # too little


# Random graphs

NUMPY: dict[str, Callable[..., Any]] = {"tanh": np.tanh, "neg": np.negative, "add": np.add, "multiply": np.multiply}


def rule_of(name: str) -> Any:
    """An op by its function of NumPy; tanh of matrices of 3 to 9 rows only."""
    function, names = NUMPY[name], ["a", "b"][: len(ops.get_op(name).operands)]

    def call(*arrays: np.ndarray) -> None:
        function(*arrays[:-1], out=arrays[-1])

    pattern = is_op(name)(*map(wildcard, names))
    if name == "tanh":
        return rl.register_library("tanh", pattern, {"a": ("n", "m")}, function=call, when={"n": (3, 9)})
    return rl.register_library(f"numpy_{name}", pattern, dict.fromkeys(names), function=call)


@settings(max_examples=tiers.examples(25), deadline=None, suppress_health_check=list(HealthCheck))
@given(graphs(size=10, control=True))
def test_random_graphs_with_calls_agree_with_the_interpreter(given: IRModule) -> None:
    """Some ops are called from NumPy, others in a range of sizes only; inside of If and Loop too."""
    with contextlib.ExitStack() as stack:
        for name in NUMPY:
            stack.enter_context(rule_of(name))
        exe = rl.compile(given)
        for sizes in ((0, 3), (1, 1), (3, 5), (17, 3)):
            for flag in (True, False):
                values = arguments(*sizes, flag=flag)
                assert_same_results(exe(*values), Interpreter(given).run("main", *values))
        context = PassContext(Target.host(), libraries=rules_for("python", Target.host()))
        values = arguments(3, 5)
        assert_same_results(
            Interpreter(dispatch(given, context)).run("main", *values), Interpreter(given).run("main", *values)
        )
