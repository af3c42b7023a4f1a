"""compile(): from a module to numbers. Control flow, functions, data-dependent shapes, results, errors, dumps.

Everything is compiled with the verifier after every pass, and compared with the interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import relaxlite as rl
from relaxlite import driver
from relaxlite.codegen.interpreter import Interpreter, run_program
from relaxlite.errors import (
    ArtifactError,
    ExecutionError,
    InputError,
    InvalidArgumentError,
    PassError,
    ShapeMismatchError,
    VerifyError,
)
from relaxlite.ir import op as op_module
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.equality import first_difference
from relaxlite.ir.expr import (
    Attrs,
    Call,
    Constant,
    Expr,
    GlobalVar,
    If,
    Loop,
    Tuple,
    TupleGetItem,
    Var,
)
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op, register_op
from relaxlite.ir.parser import parse_module
from relaxlite.ir.printer import module_constants, print_module
from relaxlite.ir.program import Binary, TensorProgram, compute
from relaxlite.ir.types import TensorType, TupleType, Type
from relaxlite.passes import manager
from relaxlite.passes.context import PassContext
from relaxlite.passes.manager import Pass, run_passes
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.runtime.artifact import save
from relaxlite.target import Target
from tests.support import random_programs, tiers
from tests.support.both_ways import assert_same_both_ways, interpreted
from tests.support.ir_text import module
from tests.support.random_graphs import arguments, assert_same_results, graphs

TRUE, FALSE = Constant.of(True), Constant.of(False)
HOST = Target.parse("llvm")


def f32(*shape: Any) -> TensorType:
    return TensorType.of(shape, "float32")


def compiled(given: IRModule) -> rl.Executable:
    return rl.compile(given, context=PassContext(HOST, verify=True))


def assert_agrees(given: IRModule, runs: Sequence[tuple[Any, ...]], tolerance: float = 1e-5) -> None:
    """One compilation; for all arguments the same as the interpreter finds."""
    exe = compiled(given)
    slow = interpreted(exe)
    for args in runs:
        assert_same_both_ways(exe, args, slow)
        got, want = exe(*args), Interpreter(given).run("main", *args)
        pairs = [r if isinstance(r, tuple) else (r,) for r in (got, want)]
        assert len(pairs[0]) == len(pairs[1])
        for a, b in zip(*pairs, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def random(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


# Branches


@pytest.fixture
def bb() -> BlockBuilder:
    return BlockBuilder()


class body_of:
    """`with body_of(bb) as made: ...; bb.result(...)`, then made.body."""

    def __init__(self, bb: BlockBuilder) -> None:
        self.bb = bb

    def __enter__(self) -> body_of:
        self.manager = self.bb.body()
        self.scope = self.manager.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.manager.__exit__(*error)
        if error[0] is None:
            self.body = self.bb.finish(self.scope)


def branch(bb: BlockBuilder, cond: Expr, then: Any, other: Any, ty: Type) -> Var:
    """Both are functions without arguments that emit and give a result."""
    bodies = []
    for make in (then, other):
        with body_of(bb) as made:
            bb.result(make())
        bodies.append(made.body)
    return bb.emit(If(cond, bodies[0], bodies[1], ty))


def loop(bb: BlockBuilder, cond: Expr, params: Sequence[Var], inits: Sequence[Expr], step: Any, ty: Type) -> Var:
    """`step` emits and gives the next condition, then the next values."""
    with body_of(bb) as made:
        bb.result(Tuple(tuple(bb.leaf(v) for v in step())))
    return bb.emit(Loop(tuple(params), tuple(inits), cond, made.body, ty))


def test_a_branch_computes_one_side(bb: BlockBuilder) -> None:
    n = bb.symbol("n")
    with bb.function("main", c=TensorType.of((), "bool"), x=f32(n, 3)) as (c, x):
        early = bb.emit(ops.exp(x))
        bb.result(
            branch(
                bb, c,
                lambda: bb.emit(ops.relu(bb.emit(ops.add(early, x)))),
                lambda: bb.emit(ops.softmax(bb.emit(ops.neg(early)), axis=-1)),
                x.ty,
            )
        )  # fmt: skip
    assert_agrees(bb.module(), [(np.array(flag), random(k, 3)) for flag in (True, False) for k in (0, 1, 7)])


def test_a_branch_may_give_what_it_captured_a_constant_or_several_values(bb: BlockBuilder) -> None:
    n = bb.symbol("n")
    ty = TupleType((f32(2), f32(n), f32(n)))
    with bb.function("main", c=TensorType.of((1,), "bool"), x=f32(n)) as (c, x):
        y = bb.emit(ops.cumsum(x, axis=0))
        pair = branch(
            bb, c,
            lambda: Tuple((Constant.of([1.0, 2.0], "float32"), y, x)),
            lambda: Tuple((Constant.of([3.0, 4.0], "float32"), y, y)),
            ty,
        )  # fmt: skip
        fields = [bb.emit(TupleGetItem(pair, k)) for k in range(3)]
        bb.result(Tuple((*fields, bb.emit(ops.add(fields[1], fields[2])))))
    assert_agrees(bb.module(), [(np.array([flag]), random(k)) for flag in (True, False) for k in (0, 5)])


def test_branches_of_different_sizes(bb: BlockBuilder) -> None:
    """The sizes of the branches are not the same: the result's is found at run time."""
    n = bb.symbol("n")
    with bb.function("main", c=TensorType.of((), "bool"), x=f32(n)) as (c, x):
        either = branch(
            bb, c,
            lambda: bb.emit(ops.concat(x, x, axis=0)),
            lambda: bb.emit(ops.slice(x, (0,), (n // 2,))),
            TensorType(None, "float32", 1),
        )  # fmt: skip
        k = bb.symbol("k")
        bb.result(bb.emit(ops.exp(bb.match_shape(either, (k,)))))
    assert_agrees(bb.module(), [(np.array(flag), random(k)) for flag in (True, False) for k in (0, 1, 6)])


def test_a_branch_that_is_not_taken_does_no_harm(bb: BlockBuilder) -> None:
    """Its index is out of range, its size negative, its division by zero: none of it is computed."""
    n, k = bb.symbol("n"), bb.symbol("k")
    with bb.function("main", c=TensorType.of((), "bool"), x=f32(n), y=f32(k)) as (c, x, y):

        def taken() -> Expr:
            part = bb.emit(ops.cumsum(bb.emit(ops.slice(x, (5,), (n - 5,))), axis=0))
            rows = bb.emit(ops.reshape(x, (n // k, k)))
            bad = bb.emit(ops.gather(np.arange(3, dtype="f4"), np.array(7), axis=0))
            return bb.emit(ops.add(bb.emit(ops.add(bb.emit(ops.sum(part)), bb.emit(ops.sum(rows)))), bad))

        bb.result(branch(bb, c, taken, lambda: bb.emit(ops.sum(y)), f32()))
    exe = compiled(bb.module())
    assert exe(np.array(False), np.ones(3, "f4"), np.ones(0, "f4")) == 0
    with pytest.raises(ExecutionError, match="index is out of range for axis 0 of size 3"):
        exe(np.array(True), np.ones(8, "f4"), np.ones(2, "f4"))


# Loops


def counting(bb: BlockBuilder, times: int, x: Expr, carried: Type, step: Any, result: Type) -> Var:
    """x = step(x), `times` times; gives what is carried last."""
    value, count = Var("value", carried), Var("count", TensorType.of((), "int64"))

    def once() -> tuple[Expr, ...]:
        made = step(value, count)
        left = bb.emit(ops.subtract(count, np.array(1)))
        return bb.emit(ops.greater(left, np.array(0))), made, left

    start = Constant.of(times, "int64")
    first = TRUE if times > 0 else FALSE
    found = loop(bb, first, (value, count), (x, start), once, TupleType((result, count.ty)))
    return bb.emit(TupleGetItem(found, 0))


@pytest.mark.parametrize("times", [0, 1, 4])
def test_a_loop_repeats(bb: BlockBuilder, times: int) -> None:
    n = bb.symbol("n")
    with bb.function("main", x=f32(n, 4), w=f32(4, 4)) as (x, w):
        step = bb.emit(ops.matmul(x, w))

        def body(v: Var, _: Var) -> Expr:
            return bb.emit(ops.tanh(bb.emit(ops.add(bb.emit(ops.matmul(v, w)), step))))

        bb.result(bb.emit(ops.sum(counting(bb, times, x, x.ty, body, x.ty), axes=(1,))))
    assert_agrees(bb.module(), [(random(k, 4), random(4, 4, seed=1)) for k in (0, 1, 5)])


@pytest.mark.parametrize("times", [0, 1, 3])
def test_what_a_loop_carries_may_grow(bb: BlockBuilder, times: int) -> None:
    n, k, m = bb.symbol("n"), bb.symbol("k"), bb.symbol("m")
    with bb.function("main", x=f32(n)) as (x,):

        def body(v: Var, _: Var) -> Expr:
            total = bb.emit(ops.reshape(bb.emit(ops.sum(v)), (1,)))
            return bb.emit(ops.concat(v, total, axis=0))

        grown = counting(bb, times, x, f32(k), body, TensorType(None, "float32", 1))
        bb.result(bb.emit(ops.exp(bb.emit(ops.neg(bb.match_shape(grown, (m,)))))))
    assert_agrees(bb.module(), [(np.ones(size, "f4") / 9,) for size in (0, 1, 4)])


def test_a_branch_in_a_loop(bb: BlockBuilder) -> None:
    """Doubles at odd counts, halves at even ones."""
    n = bb.symbol("n")
    with bb.function("main", x=f32(n), c=TensorType.of((), "bool")) as (x, c):

        def body(v: Var, count: Var) -> Expr:
            is_odd = bb.emit(ops.equal(bb.emit(ops.floormod(count, np.array(2))), np.array(1)))
            return branch(
                bb, is_odd,
                lambda: bb.emit(ops.add(v, v)),
                lambda: branch(bb, c, lambda: bb.emit(ops.multiply(v, np.float32(0.5))), lambda: x, v.ty),
                v.ty,
            )  # fmt: skip

        bb.result(counting(bb, 5, x, x.ty, body, x.ty))
    assert_agrees(bb.module(), [(random(k), np.array(flag)) for k in (0, 3) for flag in (True, False)])


def test_a_loop_in_a_loop_and_in_a_branch(bb: BlockBuilder) -> None:
    n = bb.symbol("n")
    with bb.function("main", x=f32(n), c=TensorType.of((), "bool")) as (x, c):

        def outer(v: Var, _: Var) -> Expr:
            def inner(u: Var, _: Var) -> Expr:
                return bb.emit(ops.add(u, v))

            w = counting(bb, 2, x, x.ty, inner, x.ty)
            return branch(bb, c, lambda: counting(bb, 2, w, x.ty, inner, x.ty), lambda: w, x.ty)

        bb.result(counting(bb, 3, x, x.ty, outer, x.ty))
    assert_agrees(bb.module(), [(random(k), np.array(flag)) for k in (0, 3) for flag in (True, False)])


def test_a_loop_may_swap_what_it_carries(bb: BlockBuilder) -> None:
    n = bb.symbol("n")
    with bb.function("main", x=f32(n), y=f32(n), times=TensorType.of((), "int64")) as (x, y, times):
        a, b, count = Var("a", x.ty), Var("b", y.ty), Var("count", times.ty)

        def step() -> tuple[Expr, ...]:
            left = bb.emit(ops.subtract(count, np.array(1)))
            return bb.emit(ops.greater(left, np.array(0))), b, a, left

        found = loop(
            bb, bb.emit(ops.greater(times, np.array(0))), (a, b, count), (x, y, times), step,
            TupleType((x.ty, y.ty, times.ty)),
        )  # fmt: skip
        bb.result(found)
    runs = [(np.array([1, 2], "f4"), np.array([3, 4], "f4"), np.array(k)) for k in (0, 1, 2, 5)]
    assert_agrees(bb.module(), runs)


def test_a_size_from_outside_stays_fixed_in_a_loop(bb: BlockBuilder) -> None:
    """The carried value has the symbol of the function: the next one must have that size."""
    n, m = bb.symbol("n"), bb.symbol("m")
    with bb.function("main", x=f32(n), y=f32(m)) as (x, y):

        def body(v: Var, _: Var) -> Expr:
            return bb.match_shape(bb.emit(ops.add(bb.match_shape(y, (n,)), v)), (n,))

        bb.result(counting(bb, 2, x, f32(n), body, f32(n)))
    exe = compiled(bb.module())
    assert exe(np.ones(2, "f4"), np.ones(2, "f4")).tolist() == [3, 3]
    with pytest.raises(ShapeMismatchError, match=r"dimension 0 of shape \(3,\): expects n = 2, got 3"):
        exe(np.ones(2, "f4"), np.ones(3, "f4"))


# Functions


def test_functions_call_functions(bb: BlockBuilder) -> None:
    n, k, j = bb.symbol("n"), bb.symbol("k"), bb.symbol("j")
    with bb.function("row_norm", x=f32(k, 4)) as (x,):
        total = bb.emit(ops.sum(x, axes=(1,), keepdims=True))
        bb.result(bb.emit(ops.divide(x, total)))
    with bb.function("twice", x=f32(j, 4), y=f32(j, 4)) as (x, y):
        a = bb.emit(Call(GlobalVar("row_norm"), (x,), ty=x.ty))
        b = bb.emit(Call(GlobalVar("row_norm"), (y,), ty=y.ty))
        bb.result(Tuple((bb.emit(ops.add(a, b)), x)))
    with bb.function("main", x=f32(n, 4)) as (x,):
        squared = bb.emit(ops.multiply(x, x))
        pair = bb.emit(Call(GlobalVar("twice"), (squared, x), ty=TupleType((x.ty, x.ty))))
        first, second = (bb.emit(TupleGetItem(pair, i)) for i in range(2))
        bb.result(bb.emit(ops.subtract(first, second)))
    assert_agrees(bb.module(), [(np.abs(random(k, 4)) + 1,) for k in (0, 1, 6)])


def test_the_result_of_a_call_may_have_a_size_of_its_own(bb: BlockBuilder) -> None:
    n, k, m = bb.symbol("n"), bb.symbol("k"), bb.symbol("m")
    with bb.function("positive", x=f32(k)) as (x,):
        places = bb.emit(ops.non_zero(bb.emit(ops.greater(x, np.float32(0)))))
        count = bb.symbol("count")
        bb.result(bb.match_shape(places, (1, count)))
    with bb.function("main", x=f32(n)) as (x,):
        found = bb.emit(Call(GlobalVar("positive"), (x,), ty=TensorType(None, "int64", 2)))
        places = bb.emit(ops.reshape(bb.match_shape(found, (1, m)), (m,)))
        bb.result(bb.emit(ops.gather(x, places, axis=0)))
    assert_agrees(bb.module(), [(random(size, seed=size),) for size in (0, 1, 9)])


# Results


def test_results_of_every_kind(bb: BlockBuilder) -> None:
    """An input, a constant, a view, the same thing twice: all are arrays that own their memory."""
    n = bb.symbol("n")
    with bb.function("main", x=f32(n)) as (x,):
        y = bb.emit(ops.exp(x))
        view = bb.emit(ops.reshape(y, (n, 1)))
        bb.result(Tuple((x, y, y, view, Constant.of([1.0, 2.0], "float32"), Constant.of(7, "int64"), x)))
    given = bb.module()
    assert_agrees(given, [(random(k),) for k in (0, 3)])
    x = random(3)
    results = compiled(given)(x)
    kept = x.copy()
    for k, one in enumerate(results):
        one[...] = 0
        np.testing.assert_array_equal(x, kept)
        assert all(not np.shares_memory(one, other) for other in (x, *results[:k], *results[k + 1 :]))


@pytest.mark.parametrize("what", ["input", "constant", "nothing", "one of a tuple"])
def test_results_that_need_no_kernel(bb: BlockBuilder, what: str) -> None:
    n = bb.symbol("n")
    with bb.function("main", x=f32(n)) as (x,):
        results: dict[str, Expr] = {
            "input": x,
            "constant": Constant.of([1.0, 2.0], "float32"),
            "nothing": Tuple(()),
            "one of a tuple": bb.emit(Tuple((x,))),
        }
        bb.result(results[what])
    assert_agrees(bb.module(), [(random(2),)])


def test_a_scalar_and_an_empty_tensor(bb: BlockBuilder) -> None:
    with bb.function("main", x=f32(), y=f32(0, 3)) as (x, y):
        bb.result(Tuple((bb.emit(ops.exp(x)), bb.emit(ops.neg(y)), bb.emit(ops.sum(y, axes=(0,))))))
    assert_agrees(bb.module(), [(np.array(2, "f4"), np.zeros((0, 3), "f4"))])


def test_names_of_inputs_and_outputs(bb: BlockBuilder) -> None:
    n = bb.symbol("n", lower=1)
    with bb.function("main", x=f32(n, 2)) as (x,):
        bb.result(Tuple((bb.emit(ops.neg(x)), x)))
    exe = compiled(bb.module())
    assert [s.name for s in exe.inputs] == ["x"] and [s.name for s in exe.outputs] == ["output_0", "output_1"]
    assert exe.run({"x": np.ones((1, 2), "f4")})["output_0"].tolist() == [[-1, -1]]


# Data-dependent shapes


def test_the_places_of_nonzeros(bb: BlockBuilder) -> None:
    n, k = bb.symbol("n"), bb.symbol("k")
    with bb.function("main", x=f32(n, 3)) as (x,):
        places = bb.match_shape(bb.emit(ops.non_zero(bb.emit(ops.relu(x)))), (2, k))
        doubled = bb.emit(ops.concat(places, places, axis=0))
        rows = bb.emit(ops.reshape(bb.emit(ops.slice(places, (0, 0), (1, k))), (k,)))
        bb.result(Tuple((doubled, bb.emit(ops.exp(bb.emit(ops.gather(x, rows, axis=0)))))))
    assert_agrees(bb.module(), [(random(size, 3, seed=size),) for size in (0, 1, 8)])


def test_unique_and_compress(bb: BlockBuilder) -> None:
    n, k, j = bb.symbol("n"), bb.symbol("k"), bb.symbol("j")
    with bb.function("main", x=TensorType.of((n,), "int64")) as (x,):
        found = bb.emit(ops.unique(x))
        values, first, inverse, counts = (bb.emit(TupleGetItem(found, i)) for i in range(4))
        values, first, counts = (bb.match_shape(v, (k,)) for v in (values, first, counts))
        often = bb.emit(ops.greater(counts, np.array(1)))
        kept = bb.match_shape(bb.emit(ops.compress(values, often, axis=0)), (j,))
        bb.result(Tuple((values, first, inverse, counts, bb.emit(ops.neg(kept)))))
    assert_agrees(bb.module(), [(np.random.default_rng(k).integers(0, 5, k),) for k in (0, 1, 12)])


def test_a_shape_from_data(bb: BlockBuilder) -> None:
    n, a, b = bb.symbol("n"), bb.symbol("a"), bb.symbol("b")
    with bb.function("main", x=f32(n), s=TensorType.of((2,), "int64")) as (x, s):
        shape = bb.match_shape(bb.emit(ops.tensor_to_shape(s)), (a, b))
        matrix = bb.emit(ops.reshape(x, shape))
        wide = bb.emit(ops.broadcast_to(bb.emit(ops.sum(matrix, axes=(1,), keepdims=True)), shape))
        bb.result(Tuple((bb.emit(ops.transpose(matrix, axes=(1, 0))), wide, bb.emit(ops.shape_to_tensor(shape)))))
    runs = [(random(r * c), np.array([r, c])) for r, c in ((2, 3), (6, 1), (0, 4), (1, 1))]
    assert_agrees(bb.module(), runs)


def test_two_sizes_that_must_turn_out_to_broadcast(bb: BlockBuilder) -> None:
    n, m = bb.symbol("n"), bb.symbol("m")
    with bb.function("main", x=f32(n), y=f32(m)) as (x, y):
        bb.result(bb.emit(ops.exp(bb.emit(ops.add(x, y)))))
    assert_agrees(bb.module(), [(random(a), random(b)) for a, b in ((3, 3), (3, 1), (1, 3), (1, 1), (0, 1), (0, 0))])
    with pytest.raises(ExecutionError, match="operands could not be broadcast: one dimension is n, the other m"):
        compiled(bb.module())(random(3), random(2))


# Errors


def test_a_module_needs_main(bb: BlockBuilder) -> None:
    with bb.function("other", x=f32(2)) as (x,):
        bb.result(x)
    with pytest.raises(InvalidArgumentError, match="the module has no function 'main'; it defines other"):
        rl.compile(bb.module())
    with pytest.raises(InvalidArgumentError, match="it defines nothing"):
        rl.compile(IRModule({}))
    with pytest.raises(InvalidArgumentError, match="has no function 'main'"):
        rl.compile(module("@program(symbols=(), outputs=1)\ndef main(x: f32[2]):\n    x[0] = float32(0.0)\n"))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("vulkan", "target 'vulkan': unknown kind 'vulkan'"),
        ("llvm --fast", "cannot read option '--fast'"),
        ("llvm -mtriple=moon-rock", "LLVM does not know the triple 'moon-rock'"),
        ("llvm -mattr=avx2", r"feature 'avx2' must be '\+' or '-' and a name"),
        ("llvm -cores=many", "-cores must be a whole number from 1, got 'many'"),
    ],
)
def test_a_bad_target_says_what_is_wrong(bb: BlockBuilder, target: str, message: str) -> None:
    with bb.function("main", x=f32(2)) as (x,):
        bb.result(bb.emit(ops.neg(x)))
    with pytest.raises(InvalidArgumentError, match=message):
        rl.compile(bb.module(), target)


def test_an_illegal_module_is_refused_before_any_pass(bb: BlockBuilder) -> None:
    n, k = bb.symbol("n"), bb.symbol("k")
    with bb.function("main", x=f32(n)) as (x,):
        bb.result(bb.emit(ops.reshape(x, (k,))))
    context = PassContext(HOST)
    with pytest.raises(VerifyError, match=r"symbol k in .* is not defined here"):
        rl.compile(bb.module(), context=context)
    assert context.timings == []


def test_inputs_and_outputs_are_tensors(bb: BlockBuilder) -> None:
    pair = Var("pair", TupleType((f32(2), f32(2))))
    with bb.function_with_params("main", (pair,)):
        bb.result(bb.emit(TupleGetItem(pair, 0)))
    with pytest.raises(InvalidArgumentError, match="'pair' is no tensor"):
        rl.compile(bb.module())


class Unfinished(Op):
    """An op without loops."""

    name = "test_driver.unfinished"
    operands = ("x",)

    def infer(self, x: Expr) -> Type:
        return x.ty


class Dotted(Op):
    """x + x, under a name with a dot."""

    name = "test_driver.double"
    operands = ("x",)

    def infer(self, x: Expr) -> Type:
        return x.ty

    def lower(self, x: Any, *, out: Any) -> Any:
        return compute(out, lambda *i: Binary("add", x[i], x[i]))

    def reference(self, x: Any) -> Any:
        return x + x


@pytest.fixture
def own_ops() -> Any:
    made: list[Op] = [Unfinished(), Dotted()]
    for op in made:
        register_op(op)
    yield made
    for op in made:
        del op_module._registry[op.name]


def test_an_op_that_nothing_lowers_is_named(bb: BlockBuilder, own_ops: list[Op]) -> None:
    with bb.function("main", x=f32(2)) as (x,):
        bb.loc = "Custom_3"
        bb.result(bb.emit(own_ops[0](x)))
    message = r"op test_driver.unfinished \(at Custom_3\) has neither a lowering nor a decomposition"
    with pytest.raises(PassError, match=message):
        rl.compile(bb.module())


def test_an_op_of_another_package_may_have_a_dotted_name(bb: BlockBuilder, own_ops: list[Op]) -> None:
    n = bb.symbol("n")
    with bb.function("main", x=f32(n)) as (x,):
        bb.result(bb.emit(own_ops[1](x)))
    assert_agrees(bb.module(), [(random(3),)])


def test_a_pass_that_fails_is_named(bb: BlockBuilder) -> None:
    with bb.function("main", x=f32(2)) as (x,):
        bb.result(bb.emit(ops.neg(x)))

    def broken(given: IRModule, context: PassContext) -> IRModule:
        raise KeyError("lost")

    with pytest.raises(PassError, match="pass broken failed: KeyError: 'lost'"):
        rl.compile(bb.module(), passes=[Pass("broken", broken, "graph")])
    checked = PassContext(HOST, verify=True)
    with pytest.raises(PassError, match="after pass idle: function main: op neg at stage 'lowered'"):
        rl.compile(bb.module(), passes=[Pass("idle", lambda m, c: m, "lowered")], context=checked)


def test_what_a_pass_leaves_alone_is_not_verified_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for other rules, and where anything else differs."""
    verified: list[str] = []

    def function(op: Any) -> Any:
        bb = BlockBuilder()
        with bb.function("main", x=f32(2)) as (x,):
            bb.result(bb.emit(op(x)))
        return bb.module()["main"]

    f, g = function(ops.neg), function(ops.exp)
    monkeypatch.setattr(manager, "verify", lambda module, stage, known: verified.append(stage))
    idle = [Pass("idle", lambda m, c: IRModule(dict(m)), stage) for stage in ("graph", "graph", "vm", "graph")]
    changes = Pass("changes", lambda m, c: m.updated({"main": g}), "graph")
    adds = Pass("adds", lambda m, c: m.updated({"g": g}), "graph")
    drops = Pass("drops", lambda m, c: m.updated({"g": None}), "graph")
    run_passes(IRModule({"main": f}), [*idle, changes, changes, adds, drops], PassContext(HOST, verify=True))
    assert verified == ["graph", "vm", "graph", "graph", "graph", "graph"]


def test_a_wrong_argument_names_tensor_dimension_expected_and_got(bb: BlockBuilder) -> None:
    n = bb.symbol("n", upper=8)
    with bb.function("main", x=f32(n, 3), y=f32(n)) as (x, y):
        bb.result(bb.emit(ops.add(x, bb.emit(ops.reshape(y, (n, 1))))))
    exe = compiled(bb.module())
    good = np.zeros((2, 3), "f4"), np.zeros(2, "f4")
    exe(*good)
    for args, message in [
        ((np.zeros((2, 4), "f4"), good[1]), r"argument 'x'.*dimension 1.*3.*4"),
        ((good[0], np.zeros(3, "f4")), r"argument 'y'.*n is 3 here, but 2 in argument 'x'"),
        ((np.zeros((9, 3), "f4"), np.zeros(9, "f4")), "argument 'x'.*n = 9 exceeds its upper bound 8"),
        ((np.zeros(2, "f4"), good[1]), "argument 'x'.*rank"),
        ((good[0].astype("f8"), good[1]), "argument 'x'.*float64"),
        ((good[0],), "'y'"),
    ]:
        with pytest.raises(InputError, match=message):
            exe(*args)


def test_a_run_time_check_of_a_kernel_names_the_op(bb: BlockBuilder) -> None:
    n, k = bb.symbol("n"), bb.symbol("k")
    with bb.function("main", x=f32(n, 2), places=TensorType.of((k,), "int64")) as (x, places):
        bb.result(bb.emit(ops.exp(bb.emit(ops.gather(x, places, axis=0)))))
    exe = compiled(bb.module())
    exe(random(3, 2), np.array([0, -3, 2]))
    for bad in (3, -4):
        with pytest.raises(ExecutionError, match="gather: an index is out of range for axis 0 of size n"):
            exe(random(3, 2), np.array([bad]))


# What compilation leaves behind


def model() -> IRModule:
    bb = BlockBuilder()
    n = bb.symbol("n")
    weight = Constant.of(random(4, 4).round(2), name="weight")
    with bb.function("main", x=f32(n, 4), c=TensorType.of((), "bool")) as (x, c):
        hidden = bb.emit(ops.gelu(bb.emit(ops.matmul(x, weight))))
        y = branch(bb, c, lambda: bb.emit(ops.softmax(hidden, axis=-1)), lambda: hidden, x.ty)
        bb.result(counting(bb, 2, y, x.ty, lambda v, _: bb.emit(ops.add(v, hidden)), x.ty))
    return bb.module()


def test_dumps_parse_back(tmp_path: Path) -> None:
    context = PassContext(HOST, verify=True, dump_dir=tmp_path / "dumps")
    rl.compile(model(), context=context)
    files = sorted((tmp_path / "dumps").iterdir())
    steps = default_pipeline()
    assert [f.name for f in files] == [f"{k:02d}_{step.name}.py" for k, step in enumerate(steps)]
    made = model()
    for file, step in zip(files, steps, strict=True):
        made = run_passes(made, [step], PassContext(HOST))
        text = file.read_text()
        again = parse_module(text, module_constants(made))
        assert first_difference(again, made) is None, step.name
        assert print_module(again) == text


def test_times_and_notes_are_kept() -> None:
    context = PassContext(HOST)
    exe = rl.compile(model(), context=context)
    assert [name for name, _ in context.timings] == [*(s.name for s in default_pipeline()), "codegen", "host function"]
    assert all(seconds >= 0 for _, seconds in context.timings)
    assert set(exe.data.metadata.info) >= {"ops", "passes_s", "kernels"}
    assert exe.data.metadata.info["ops"]["matmul"] == 1


def test_code_for_another_processor_is_made_but_not_run() -> None:
    data = driver.build(model(), "llvm -mtriple=aarch64-unknown-linux-gnu")
    assert data.target.triple == "aarch64-unknown-linux-gnu" and data.objects[0][:4] == b"\x7fELF"


def test_code_for_another_system_is_made_but_not_run() -> None:
    triple = "x86_64-pc-windows-msvc" if "windows" not in HOST.triple else "x86_64-unknown-linux-gnu"
    target = f"llvm -mcpu=x86-64 -mtriple={triple}"
    assert driver.build(model(), target, validate=True).objects
    with pytest.raises(ArtifactError, match=r"cannot run here: it was compiled for (Windows|Linux|x86_64), and this"):
        rl.compile(model(), target)


@pytest.mark.parametrize(("cpu", "feature"), [("bdver4", "xop"), ("diamondrapids", "egpr")])
def test_code_for_a_processor_with_other_instructions_is_refused(cpu: str, feature: str, tmp_path: Path) -> None:
    if HOST.has(feature):
        pytest.skip("this processor has them")
    target = Target.parse(f"llvm -mcpu={cpu} -mtriple=x86_64-unknown-linux-gnu")
    data = driver.build(model(), target)
    save(data, tmp_path / "model.rlx")
    problem = f"it was compiled for {cpu}, and this CPU .* lacks|for x86_64, and this"
    with pytest.raises(ArtifactError, match=problem):
        rl.load(tmp_path / "model.rlx")
    with pytest.raises(ArtifactError, match=f"the model cannot run here: {problem}"):
        rl.compile(model(), str(target))
    assert driver.build(model(), target, validate=True).objects, "what was compiled is not run"


def test_passes_may_be_chosen(bb: BlockBuilder) -> None:
    """Without fusion and scheduling: the same numbers from more kernels."""
    n = bb.symbol("n")
    with bb.function("main", x=f32(n, 5)) as (x,):
        bb.result(bb.emit(ops.exp(bb.emit(ops.neg(bb.emit(ops.sum(x, axes=(1,))))))))
    plain = [s for s in default_pipeline() if s.name not in ("fuse_ops", "fuse_programs", "schedule")]
    slow, fast = rl.compile(bb.module(), passes=plain), rl.compile(bb.module())
    assert len(slow.data.kernels) > len(fast.data.kernels)
    x = random(7, 5)
    np.testing.assert_allclose(slow(x), fast(x), rtol=1e-5)


def test_compiling_does_not_change_the_module() -> None:
    given = model()
    before = print_module(given)
    rl.compile(given)
    assert print_module(given) == before


# All of it at random


def module_of(given: TensorProgram) -> IRModule:
    """main(sizes, inputs...) = program(inputs...). The shape of `sizes` binds the symbols."""
    bb = BlockBuilder()
    name = bb.define("kernel", given)
    types = [TensorType(b.shape, b.dtype, len(b.shape)) for b in (*given.inputs, *given.outputs)]
    params = [Var(f"x{k}", ty) for k, ty in enumerate(types[:-1])]
    with bb.function_with_params("main", (Var("sizes", TensorType.of(given.symbols, "bool")), *params)):
        bb.result(bb.emit(Call(name, tuple(params), sym_args=given.symbols, ty=types[-1])))
    return bb.module()


@settings(max_examples=tiers.examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(random_programs.maps() | random_programs.reductions() | random_programs.products() | random_programs.rows())
def test_random_programs_agree_with_the_interpreter(given: TensorProgram) -> None:
    exe = compiled(module_of(given))
    for sizes in ((0, 3), (1, 1), (3, 7), (17, 5), (33, 2)):
        if random_programs.work_of(given, sizes) <= random_programs.MAX_WORK:
            values, inputs = random_programs.values_of(given, sizes), random_programs.inputs_for(given, sizes)
            (want,) = run_program(given, inputs, values)
            got = exe(np.zeros(tuple(values.values()), bool), *inputs)
            random_programs.assert_close(got, want, given.outputs[0].dtype)


@pytest.mark.parametrize("poison", tiers.few(["1", "0"]))
def test_random_graphs_agree_with_the_interpreter(monkeypatch: pytest.MonkeyPatch, poison: str) -> None:
    monkeypatch.setenv("RELAXLITE_POISON_MEMORY", poison)

    @settings(max_examples=tiers.examples(25), deadline=None, suppress_health_check=list(HealthCheck))
    @given(graphs(size=10, control=True))
    def run(given: IRModule) -> None:
        exe = compiled(given)
        slow = interpreted(exe)
        for sizes in ((0, 3), (1, 1), (3, 5), (17, 3), (3, 33)):
            for flag in (True, False):
                args: Any = arguments(*sizes, flag=flag)
                assert_same_both_ways(exe, args, slow)
                assert_same_results(exe(*args), Interpreter(given).run("main", *args))

    run()


# Functions beside "main" that callers may run


def with_entries() -> rl.IRModule:
    """main(x) = x * c; add(x, total): total += x * c, and nothing else; what neither calls."""
    weight = Constant.of(np.arange(4, dtype=np.float32))
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((bb.symbol("n", upper=9), 4), "float32")) as (x,):
        bb.result(bb.emit(ops.multiply(x, weight)))
    m = bb.symbol("m")
    types = {"x": TensorType.of((m, 4), "float32"), "total": TensorType.of((8, 4), "float32")}
    attrs = Attrs({"exported": True, "donated": (1,), "input_names": ("x", "total")})
    with bb.function("add", attrs, **types) as (x, total):
        rows = bb.emit(ops.sum(bb.emit(ops.multiply(x, weight)), axes=(0,), keepdims=True))
        places = Constant.of(np.array([[2]], np.int64))
        bb.result(Tuple((bb.emit(ops.scatter_nd(total, places, rows, reduction="add")),)))
    with bb.function("unused", x=TensorType.of((3,), "float32")) as (x,):
        bb.result(x)
    return bb.module()


@pytest.mark.parametrize("interprets", [False, True])
def test_other_entries_run_over_the_same_weights(interprets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if interprets:
        monkeypatch.setenv("RELAXLITE_INTERPRET", "1")
    exe = rl.compile(with_entries())
    assert list(exe.data.functions) == list(exe.data.entries) == ["main", "add"] and len(exe.data.constants) == 1
    add = exe.entry("add")
    assert (add._host is None) == interprets and add.outputs == () and repr(add).endswith("-> ()")
    total, x = np.zeros((8, 4), np.float32), np.ones((3, 4), np.float32)
    assert add(x, total) == () and add.run({"total": total, "x": x}) == {}
    np.testing.assert_array_equal(total, np.outer(np.arange(8) == 2, 6 * np.arange(4)))
    np.testing.assert_array_equal(exe(x), np.tile(np.arange(4), (3, 1)))
    np.testing.assert_array_equal(exe.entry("main")(x), exe(x))
    with pytest.raises(InputError, match=r"argument 'total': dimension 0 of shape \(7, 4\): expects 8, got 7"):
        add(x, total[:7])
    with pytest.raises(InputError, match=r"missing argument 'total'; the model takes 2 \(x, total\)"):
        add(x)
    assert len(add.profile((x, total), runs=1).records) > 0
