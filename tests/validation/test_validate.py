"""compile(validate=True): deliberately broken passes are found and named, and correct ones are not."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite import dtypes
from relaxlite.cli.parser import make_parser
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.errors import InvalidArgumentError, ValidationError
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Body, Call, Expr, Function, MatchShape, ShapeValue, Tuple, TupleGetItem, Var
from relaxlite.ir.intrinsics import DOT4_PACKED_U8S8, INTRINSICS, LOOKUP, SHUFFLE_XOR
from relaxlite.ir.module import IRModule
from relaxlite.ir.program import Buffer, Check, For, Intrinsic, Literal, Load, Seq, Stmt, Store, TensorProgram, Value
from relaxlite.ir.program_visitor import ProgramRewriter
from relaxlite.ir.symbolic import SymVar, smax, sym
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import Rewriter, map_functions, map_programs
from relaxlite.passes.context import PassContext
from relaxlite.passes.manager import Pass
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.revalidate import rerun
from relaxlite.target import Target
from relaxlite.validation import running, validator
from relaxlite.validation.difference import compare
from relaxlite.validation.oracle import Expected, FailedRun, flatten, measure_rounding_error
from relaxlite.validation.rounding import Widen
from relaxlite.validation.running import run_program
from relaxlite.validation.samples import symbol_values
from relaxlite.validation.validator import CONFIRMATION_RUNS, Validator
from tests.support.model_inputs import planes, table

Change = Callable[[IRModule], IRModule]
HOST = Target.parse("llvm")


def context(folder: Path) -> PassContext:
    return PassContext(HOST, verify=False, dump_dir=folder)


def pipeline_with(name: str, change: Change, after: str) -> list[Pass]:
    """The default pipeline with a pass of our own behind one of its passes."""
    made: list[Pass] = []
    for step in default_pipeline():
        made.append(step)
        if step.name == after:
            made.append(Pass(name, lambda module, _: change(module), step.stage))
    return made


def assert_found(module: IRModule, change: Change, after: str, message: str, folder: Path) -> str:
    """The pass is named; gives the path of the kept module."""
    with pytest.raises(ValidationError, match=message) as caught:
        rl.compile(module, passes=pipeline_with("broken", change, after), context=context(folder), validate=True)
    text = str(caught.value)
    assert text.startswith("pass broken changes what the module computes, at ")
    found = re.search(r"relaxlite\.revalidate (\S+)`", text)
    assert found is not None
    return found[1]


def chain() -> IRModule:
    """Products, a sum along each row and a division: of symbolic sizes with a bound and a divisor."""
    bb = BlockBuilder()
    n, m = bb.symbol("n", lower=1, upper=40), bb.symbol("m", divisor=4)
    with bb.function("main", x=TensorType.of((n, m), "float32"), y=TensorType.of((m,), "float32")) as (x, y):
        total = bb.emit(ops.sum(bb.emit(ops.multiply(x, y)), axes=(1,), keepdims=True))
        bb.result(bb.emit(ops.divide(x, bb.emit(ops.add(total, np.float32(3))))))
    return bb.module()


def checked() -> IRModule:
    """Sizes that only run time compares: n against m, and places in a table."""
    bb = BlockBuilder()
    n, m = bb.symbol("n"), bb.symbol("m")
    types = {"x": TensorType.of((n, 3), "float32"), "y": TensorType.of((m, 3), "float32")}
    with bb.function("main", **types, places=TensorType.of((4,), "int64")) as (x, y, places):
        rows = bb.emit(ops.gather(x, places, axis=0))
        same = bb.match_shape(y, (n, 3))
        bb.result(bb.emit(ops.add(bb.emit(ops.sum(same, axes=(0,))), rows)))
    return bb.module()


def diamond() -> IRModule:
    """Values that live at the same time, in memory that is planned."""
    bb = BlockBuilder()
    n = bb.symbol("n")
    with bb.function("main", x=TensorType.of((n, 8), "float32")) as (x,):
        a = bb.emit(ops.softmax(x, axis=1))
        b = bb.emit(ops.cumsum(a, axis=0))
        c = bb.emit(ops.softmax(b, axis=1))
        bb.result(bb.emit(ops.matmul(bb.emit(ops.transpose(a, axes=(1, 0))), bb.emit(ops.add(c, b)))))
    return bb.module()


# Passes that are wrong, each in its own way


class WrongIndex(ProgramRewriter):
    """Reads one element before the right one in the last dimension of matrices."""

    def value(self, value: Value) -> Value:
        value = super().value(value)
        if isinstance(value, Load) and len(value.indices) == 2:
            *rest, last = value.indices
            return replace(value, indices=(*rest, smax(last - 1, 0)))
        return value


class NoChecks(ProgramRewriter):
    def stmt(self, stmt: Stmt) -> Stmt:
        stmt = super().stmt(stmt)
        return Seq(()) if isinstance(stmt, Check) else stmt


class NoLastRow(ProgramRewriter):
    """Leaves the last element of a store of products out: what was there before stays."""

    def stmt(self, stmt: Stmt) -> Stmt:
        stmt = super().stmt(stmt)
        return replace(stmt, combine=None) if isinstance(stmt, Store) and stmt.combine else stmt


def on_programs(rewriter: type[ProgramRewriter]) -> Change:
    def change(module: IRModule) -> IRModule:
        return map_programs(module, lambda p: replace(p, body=rewriter().stmt(p.body)))

    return change


class NoMatch(Rewriter):
    """Takes it for granted that sizes agree."""

    def match_shape(self, binding: MatchShape) -> Expr | None:
        return binding.source if isinstance(binding.source.ty, TensorType) else None


class SameMemory(Rewriter):
    """Puts every value at the beginning of the arena."""

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if isinstance(value, Call) and value.callee.name == "memory.view":
            arena, _, shape = value.args
            return replace(value, args=(arena, ShapeValue((sym(0),)), shape))
        return None


class OtherOp(Rewriter):
    """Divides by multiplying, and rounds a little more than it should."""

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if isinstance(value, Call) and value.callee.name == "divide":
            return ops.multiply(value.args[0], self.bb.emit(ops.reciprocal(self.bb.emit(ops.abs(value.args[1])))))
        return None


def on_functions(rewriter: type[Rewriter]) -> Change:
    return lambda module: map_functions(module, lambda f: rewriter().function(f))


BROKEN = {
    "wrong index": (chain, on_programs(WrongIndex), "legalize", "elements differ; the largest difference is at"),
    "wrong index after fusion": (chain, on_programs(WrongIndex), "fuse_programs", "output 0: "),
    "wrong index after scheduling": (chain, on_programs(WrongIndex), "schedule", "output 0: "),
    "sum that keeps its last term": (chain, on_programs(NoLastRow), "fuse_programs", "elements differ"),
    "dropped check of places": (checked, on_programs(NoChecks), "legalize", "check is missing: .*outside its bounds"),
    "dropped check of a shape": (checked, on_functions(NoMatch), "decompose", "check is lost: .*dimension 0"),
    "reused memory": (diamond, on_functions(SameMemory), "plan_memory", "elements differ"),
    "another op": (chain, on_functions(OtherOp), "simplify_algebra", "elements differ"),
}


@pytest.mark.each_value
@pytest.mark.parametrize("most_steps", [running.MAX_STEPS, -1])
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_pass_is_named(kind: str, most_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the interpreter runs the programs or machine code does."""
    monkeypatch.setattr(running, "MAX_STEPS", most_steps)
    make, change, after, message = BROKEN[kind]
    path = assert_found(make(), change, after, message, tmp_path)
    assert Path(path).parent == tmp_path
    again = rerun(path)  # the pass is none of the pipeline's: what it made stands beside the file
    assert again is not None and again.startswith("pass broken changes what the module computes")


class HalfPrecision(Rewriter):
    """Rounds what is divided."""

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not isinstance(value, Call) or value.callee.name != "divide":
            return None
        narrow = self.bb.emit(ops.cast(value.args[0], dtype="float16"))
        return ops.divide(self.bb.emit(ops.cast(narrow, dtype="float32")), value.args[1])


class TransposedOperand(Rewriter):
    """Turns what is divided."""

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not isinstance(value, Call) or value.callee.name != "divide":
            return None
        return ops.transpose(self.bb.emit(value), axes=(1, 0))


class Unbound(Rewriter):
    """Reads a place of a table that there is not."""

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not isinstance(value, Call) or value.callee.name != "divide":
            return None
        places = np.array([1 << 40])
        return ops.add(value.args[0], self.bb.emit(ops.gather(value.args[0], places, axis=0)))


def test_a_pass_that_rounds_may_change_numbers_and_nothing_else(tmp_path: Path) -> None:
    def compiled(rewriter: type[Rewriter], *, rounds: bool) -> None:
        passes = pipeline_with("rounding", on_functions(rewriter), "simplify_algebra")
        passes = [replace(step, rounds=rounds) if step.name == "rounding" else step for step in passes]
        rl.compile(chain(), passes=passes, context=context(tmp_path), validate=True)

    compiled(HalfPrecision, rounds=True)
    with pytest.raises(ValidationError, match=r"^pass rounding changes .*elements differ"):
        compiled(HalfPrecision, rounds=False)
    with pytest.raises(ValidationError, match=r"^pass rounding changes .*float32\[.*instead of float32\["):
        compiled(TransposedOperand, rounds=True)
    with pytest.raises(ValidationError, match=r"^pass rounding changes .*the run fails with"):
        compiled(Unbound, rounds=True)


@pytest.mark.parametrize("make", [chain, checked, diamond])
def test_the_pipeline_passes(make: Callable[[], IRModule]) -> None:
    exe = rl.compile(make(), validate=True)
    assert exe.data.kernels


def test_example_inputs_take_the_place_of_random_ones() -> None:
    x, y = np.ones((3, 3), np.float32), np.ones((3, 3), np.float32)
    rl.compile(checked(), validate=[(x, y, np.array([0, 2, 1, 0]))])
    with pytest.raises(rl.errors.InvalidArgumentError, match="'main' takes 3 arguments, got 2 to validate with"):
        rl.compile(checked(), validate=[(x, y)])


def in_tiles(rows: int) -> IRModule:
    """Takes whole tiles of so many rows, and nothing else."""
    bb = BlockBuilder()
    n = bb.symbol("n", lower=1)
    with bb.function("main", x=TensorType.of((n, 3), "float32")) as (x,):
        whole = bb.match_shape(x, (n // rows * rows, 3))
        tiles = bb.emit(ops.reshape(whole, ShapeValue((n // rows, sym(rows), sym(3)))))
        bb.result(bb.emit(ops.sum(tiles, axes=(1,))))
    return bb.module()


def test_multiples_of_32_are_tried_where_no_others_will_do() -> None:
    found = Validator(in_tiles(32)).cases
    assert 32 in {n for case in found for n in case.sample.symbols.values()}
    assert any(not isinstance(case.before, FailedRun) for case in found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rl.compile(in_tiles(32), validate=True)


def test_a_slow_model_is_not_validated_on_empty_inputs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes no time, as it has no elements or stops, decided that all else took too long."""
    monkeypatch.setattr(validator, "MAX_SECONDS", 0.0)
    for make in (chain, checked):
        assert Validator(make()).doubt() is None


def test_a_model_that_always_stops_is_no_proof() -> None:
    with pytest.warns(
        RuntimeWarning, match="stops .* at all sizes that were tried, so validation compares hardly any"
    ) as told:
        rl.compile(in_tiles(65), validate=True)
    assert told[0].filename == __file__  # where it was asked for


def test_a_model_of_which_rounding_decides_everything_is_told() -> None:
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((4,), "float32")) as (x,):
        lost = bb.emit(ops.subtract(bb.emit(ops.add(x, np.float32(1e9))), np.float32(1e9)))
        bb.result(bb.emit(ops.reciprocal(lost)))
    with pytest.warns(RuntimeWarning, match="gives nothing but what rounding decides at all sizes that were tried"):
        rl.compile(bb.module(), validate=True)


def test_a_model_most_of_which_rounding_decides_is_told() -> None:
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((4,), "float32"), y=TensorType.of((3,), "float32")) as (x, y):
        lost = bb.emit(ops.subtract(bb.emit(ops.add(x, np.float32(1e9))), np.float32(1e9)))
        bb.result(Tuple((bb.emit(ops.reciprocal(lost)), bb.emit(ops.exp(y)))))
    with pytest.warns(
        RuntimeWarning, match="rounding decides 57% of what the model gives, so validation compares hardly"
    ):
        rl.compile(bb.module(), validate=True)


def test_how_much_was_compared_is_counted() -> None:
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((4,), "float32"), y=TensorType.of((6,), "float32")) as (x, y):
        lost = bb.emit(ops.subtract(bb.emit(ops.add(x, np.float32(1e9))), np.float32(1e9)))
        bb.result(Tuple((bb.emit(ops.reciprocal(lost)), bb.emit(ops.exp(y)))))
    inputs = (np.ones(4, np.float32), np.arange(6, dtype=np.float32))
    found = Validator(bb.module(), inputs=[inputs, inputs]).coverage()
    assert (found.samples, found.stopped, found.unstable, found.elements, found.undetermined) == (2, 0, 0, 20, 8)
    assert found.median is not None and 1e-7 < found.median < 1e-5
    context = PassContext(Target.parse("llvm"))
    rl.compile(bb.module(), context=context, validate=[inputs, inputs])
    (told,) = context.validations
    assert told.startswith("main at 2 samples: 12 elements compared, half of them within ")
    assert told.endswith(" of the largest, 8 others (40.0%) are what rounding decides")


def test_a_model_that_gives_nothing_but_nan_is_no_proof() -> None:
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((4,), "float32"), y=TensorType.of((4,), "float32")) as (x, y):
        bb.result(Tuple((bb.emit(ops.sqrt(bb.emit(ops.subtract(x, np.float32(9))))), y)))
    zeros, nan = np.zeros(4, np.float32), np.array([np.nan, np.inf, 0, 1], np.float32)
    found = Validator(bb.module(), inputs=[(zeros, np.array([np.nan, 1, 2, 3], np.float32))])
    assert found.coverage().not_finite == 5
    assert "8 elements compared, half of them within " in str(found.coverage())
    assert ", 5 (62.5%) of what was compared is NaN or infinite" in str(found.coverage())
    with pytest.warns(RuntimeWarning, match="75% of what the model gives is NaN or infinite, so validation compares"):
        rl.compile(bb.module(), validate=[(zeros, nan)])


def test_samples_that_stop_a_model_are_counted() -> None:
    places = [np.array([0, 2, 1, 0]), np.array([0, 9, 1, 0])]
    x, y = np.ones((3, 3), np.float32), np.ones((3, 3), np.float32)
    found = Validator(checked(), inputs=[(x, y, place) for place in places]).coverage()
    assert (found.samples, found.stopped, found.unstable) == (2, 1, 0)
    assert str(found).endswith(", samples that stop the model, as they should: 1")


def no_float64(*_: Any) -> None:
    raise InvalidArgumentError("no such program in float64")


def test_an_oracle_that_fails_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compared nothing then, and nobody was told."""
    monkeypatch.setattr(Widen, "call", no_float64)
    reason = r"the model stops, if numbers are rounded otherwise, \(InvalidArgumentError: no such program in float64\)"
    with pytest.warns(RuntimeWarning, match=f"{reason} at all sizes that were tried"):
        rl.compile(chain(), validate=True)


def test_passes_before_a_rounding_that_nothing_was_compared_for_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle that failed for them starts anew behind a pass that rounds."""

    def mend(module: IRModule) -> IRModule:
        monkeypatch.undo()
        return on_functions(HalfPrecision)(module)

    monkeypatch.setattr(Widen, "call", no_float64)
    passes = [replace(s, rounds=s.rounds or s.name == "mend") for s in pipeline_with("mend", mend, "simplify_algebra")]
    with pytest.warns(RuntimeWarning, match="no such program in float64"):
        rl.compile(chain(), passes=passes, validate=True)


def picture_of_a_table() -> list[tuple[Any, ...]]:
    return [(planes([table(160, 224)], (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),)]


@pytest.mark.models
@pytest.mark.parametrize(
    ("name", "validate"),
    [
        ("silero-vad-sequence", True),
        pytest.param("moonshine-tiny-encoder", True, marks=pytest.mark.exhaustive),
        # Its loop, whose counter is a float, ends where the table does.
        pytest.param("slanet-table", picture_of_a_table(), marks=pytest.mark.exhaustive),
    ],
)
def test_whole_models_are_validated(name: str, validate: Any, model_path: Callable[[str], Path]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert rl.compile(rl.from_onnx(model_path(name)), validate=validate).data.kernels


def test_sizes_keep_bounds_and_divisors() -> None:
    bb = BlockBuilder()
    n, m = bb.symbol("n", lower=3, upper=11, divisor=2), bb.symbol("m")
    main = Function(
        (Var("x", TensorType.of((n, m), "float32")), Var("y", TensorType.of((n - m,), "float32"))), Body((), Tuple(()))
    )
    found = list(symbol_values(main, random.Random(0)))
    assert len(found) >= 3
    assert all(3 <= v[n] <= 11 and v[n] % 2 == 0 and 0 <= v[m] <= v[n] for v in found)


def test_what_rounding_cannot_decide_is_not_compared() -> None:
    """1/(x - x*1) has no digits; the largest of nearly equal elements no place. Their neighbours are compared."""
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((4,), "float32"), y=TensorType.of((4,), "float32")) as (x, y):
        close = bb.emit(ops.subtract(bb.emit(ops.multiply(x, y)), bb.emit(ops.multiply(y, x))))
        places = bb.emit(ops.argmax(bb.emit(ops.add(close, np.float32(1))), axis=0))
        bb.result(Tuple((bb.emit(ops.exp(x)), places, close)))
    module = bb.module()
    args = (np.linspace(-1, 1, 4, dtype=np.float32), np.full(4, 3, np.float32))
    values = tuple(Interpreter(module).run("main", *args))
    spread = measure_rounding_error(module, args, values, {}, seed=0, runs=8)
    assert not isinstance(spread, FailedRun)
    exact, place, zeros = spread
    assert (exact < 1e-5).all() and np.isinf(place) and (zeros > 0).any()
    expected = Expected(values, spread)
    assert compare(values, expected) is None
    assert compare((values[0], values[1] + 1, zeros.astype(np.float32) * 2), expected) is None
    assert str(compare((values[0] * np.float32(1.001), *values[1:]), expected)).startswith("output 0: 4 of 4 elements")
    assert str(compare((values[0][:2], *values[1:]), expected)) == "output 0: float32[2] instead of float32[4]"


def gelu_chain(x: Var, half: float = 0.5) -> IRModule:
    """half * x * (1 + erf(x / sqrt(2))), each op rounded on its own."""
    assert isinstance(x.ty, TensorType)
    scalar = dtypes.to_numpy(x.ty.dtype).type
    bb = BlockBuilder()
    with bb.function_with_params("main", (x,)):
        erf = bb.emit(ops.erf(bb.emit(ops.divide(x, scalar(2**0.5)))))
        scaled = bb.emit(ops.multiply(x, scalar(half)))
        bb.result(bb.emit(ops.multiply(scaled, bb.emit(ops.add(erf, scalar(1))))))
    return bb.module()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_one_op_of_a_chain_may_round_less_often(dtype: str) -> None:
    """Where erf rounds to -1, the chain gives -0.0, and gelu, which rounds once, the digits that were lost."""
    x = np.array([-5.6], dtypes.to_numpy(dtype))
    module = gelu_chain(Var("x", TensorType.of((1,), dtype)))
    (result,) = flatten(Interpreter(module).run("main", x))
    assert result == 0
    rl.compile(module, validate=[(x,)])
    spread = measure_rounding_error(module, (x,), (result,), {}, seed=0)
    assert not isinstance(spread, FailedRun) and 0 < spread[0] < 1e-6
    assert compare((result - result.dtype.type(1e-3),), Expected((result,), spread)) is not None


def test_what_an_approximation_loses_may_be_zero() -> None:
    """gelu(-6) = -5.9e-9 is less than the rounding of its terms: its reciprocal may be infinite. Of gelu(-3), not."""
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((2,), "float32")) as (x,):
        bb.result(bb.emit(ops.reciprocal(bb.emit(ops.gelu(x)))))
    module, args = bb.module(), (np.array([-6, -3], np.float32),)
    values = flatten(Interpreter(module).run("main", *args))
    spread = measure_rounding_error(module, args, values, {}, seed=0, runs=CONFIRMATION_RUNS)
    assert not isinstance(spread, FailedRun) and np.isinf(spread[0][0]) and spread[0][1] < 1
    infinite, expected = np.float32([-np.inf, values[0][1]]), Expected(values, spread)
    assert compare((infinite,), expected) is None
    assert compare((infinite[[0, 0]],), expected) is not None
    rl.compile(module, validate=[args])


def test_the_mean_of_equal_numbers_may_be_a_little_off() -> None:
    """A running sum of 40 equal numbers is some units off, so what is left of one of them is not always 0."""
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((2, 40), "float32")) as (x,):
        bb.result(bb.emit(ops.subtract(x, bb.emit(ops.mean(x, axes=(1,), keepdims=True)))))
    module, args = bb.module(), (np.full((2, 40), 0.36851165, np.float32),)
    values = flatten(Interpreter(module).run("main", *args))
    spread = measure_rounding_error(module, args, values, {}, seed=0, runs=CONFIRMATION_RUNS)
    assert not isinstance(spread, FailedRun) and (spread[0] > 2e-8).all() and (spread[0] < 1e-6).all()


@pytest.mark.parametrize(("terms", "is_certain"), [([-0.999, -0.7490001], False), ([-0.999, -0.7489], True)])
def test_how_many_different_numbers_there_are_may_hang_on_rounding(terms: list[float], is_certain: bool) -> None:
    """1 - 0.999 and 0.75 - 0.7490001 differ by a digit of the terms, which is many digits of their own."""
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((2,), "float32"), y=TensorType.of((2,), "float32")) as (x, y):
        bb.result(bb.emit(TupleGetItem(bb.emit(ops.unique(bb.emit(ops.add(x, y)), sorted=True)), 0)))
    module, args = bb.module(), (np.float32([1, 0.75]), np.float32(terms))
    values = flatten(Interpreter(module).run("main", *args))
    assert len(values[0]) == 2
    spread = measure_rounding_error(module, args, values, {}, seed=0, runs=CONFIRMATION_RUNS)
    assert isinstance(spread, FailedRun) != is_certain


@pytest.mark.parametrize("name", ["l1_norm", "l2_norm", "sum_square", "log_sum", "log_sum_exp"])
def test_norms_of_equal_numbers_may_be_as_far_off_as_their_sums(name: str) -> None:
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((3, 4096), "float32")) as (x,):
        bb.result(bb.emit(ops.get_op(name)(x, axes=(1,), keepdims=False)))
    module, args = bb.module(), (np.full((3, 4096), 0.6931472, np.float32),)
    (values,) = flatten(Interpreter(module).run("main", *args))
    spread = measure_rounding_error(module, args, (values,), {}, seed=0)
    terms = {"l1_norm": np.abs, "log_sum": np.abs, "log_sum_exp": np.exp}.get(name, np.square)(args[0][0])
    total = np.add.accumulate(terms)[-1]
    one_by_one = {"l2_norm": np.sqrt, "log_sum": np.log, "log_sum_exp": np.log}.get(name, np.positive)(total)
    assert not isinstance(spread, FailedRun) and compare((np.full(3, one_by_one),), Expected((values,), spread)) is None
    assert compare((values * np.float32(1.01),), Expected((values,), spread)) is not None


def test_a_softmax_of_equal_numbers_may_be_as_far_off_as_their_sum() -> None:
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((2, 4096), "float32")) as (x,):
        bb.result(bb.emit(ops.softmax(x, axis=-1)))
    module, args = bb.module(), (np.full((2, 4096), 0.3, np.float32),)
    (values,) = flatten(Interpreter(module).run("main", *args))
    spread = measure_rounding_error(module, args, (values,), {}, seed=0, runs=CONFIRMATION_RUNS)
    one_by_one = np.float32(1) / np.add.accumulate(np.full(4096, np.exp(np.float32(0.3))))[-1] * np.exp(np.float32(0.3))
    assert not isinstance(spread, FailedRun)
    assert compare((np.full_like(values, one_by_one),), Expected((values,), spread)) is None
    assert compare((values * np.float32(1.01),), Expected((values,), spread)) is not None


def test_whether_a_place_between_elements_reads_the_next_one_hangs_on_rounding() -> None:
    """At 0.9999999 the NaN of element 0 counts, at 1 it does not. What is further away is compared."""
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((1, 6), "float32")) as (x,):
        bb.result(bb.emit(ops.resize(x, (1, 6), mode="linear")))
    module, args = bb.module(), (np.float32([[np.nan, 1, 2, 3, 4, 5]]),)
    values = flatten(Interpreter(module).run("main", *args))
    spread = measure_rounding_error(module, args, values, {}, seed=0, runs=CONFIRMATION_RUNS)
    assert not isinstance(spread, FailedRun) and np.isinf(spread[0][0, 1]) and (spread[0][0, 3:] < 1e-4).all()
    expected = Expected(values, spread)
    assert compare((np.float32([[np.nan, np.nan, 2, 3, 4, 5]]),), expected) is None
    assert compare((np.float32([[np.nan, 1, 2, np.nan, 4, 5]]),), expected) is not None


@pytest.mark.parametrize(("dtype", "half"), [("bfloat16", 0.75), ("float16", 0.53), ("float32", 0.5001)])
def test_a_wrong_constant_in_a_chain_of_roundings_is_found(dtype: str, half: float, tmp_path: Path) -> None:
    x = Var("x", TensorType.of((4,), dtype))
    right, wrong = gelu_chain(x), gelu_chain(x, half)
    args = (np.array([-5.6, -0.4, 0.7, 2.0], dtypes.to_numpy(dtype)),)
    with pytest.raises(ValidationError, match=r"pass broken changes what the module computes, .* elements differ"):
        pipeline = pipeline_with("broken", lambda _: wrong, "fold_shapes")
        rl.compile(right, passes=pipeline, context=context(tmp_path), validate=[args])


def test_a_missing_term_of_a_long_sum_is_found() -> None:
    """NumPy adds equal terms in pairs. One after another is as good, if less exact; one term less is not."""
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((2048,), "float32")) as (x,):
        bb.result(bb.emit(ops.sum(x)))
    module, term = bb.module(), np.float32(0.8515747)
    args = (np.full(2048, term),)
    (total,) = flatten(Interpreter(module).run("main", *args))
    spread = measure_rounding_error(module, args, (total,), {}, seed=0)
    assert not isinstance(spread, FailedRun)
    expected, one_by_one = Expected((total,), spread), np.add.accumulate(args[0])[-1]
    assert abs(one_by_one - total) > 100 * np.spacing(total)
    assert compare((np.asarray(one_by_one),), expected) is None
    assert compare((np.asarray(total - term),), expected) is not None


def test_the_command_line_validates() -> None:
    parse = make_parser().parse_args
    assert parse(["compile", "model.onnx", "--validate"]).validate is True
    assert parse(["compile", "model.onnx"]).validate is False


@pytest.mark.parametrize("name", [name for name in INTRINSICS if name != SHUFFLE_XOR])  # which needs a warp
def test_the_oracle_runs_programs_of_every_intrinsic(name: str) -> None:
    """One that it cannot run in float64 would leave nothing to compare with, and nobody would be told."""
    known, j = INTRINSICS[name], SymVar("j")
    columns = [Buffer.of(f"x{k}", (8,), dtype or "float32") for k, dtype in enumerate(known.args)]
    parts: list[Value] = [column[j] for column in columns]
    if name in (LOOKUP, DOT4_PACKED_U8S8):  # tables and bounds are literals
        count = 4 if name == LOOKUP else 2
        parts[-count:] = [Literal(255, "int32")] * count
    inputs = columns[: sum(isinstance(part, Load) for part in parts)]
    out = Buffer.of("out", (8,), known.result or "float32")
    body = For(j, sym(8), Store(out, (j,), Intrinsic(name, tuple(parts), out.dtype)))
    program = TensorProgram((*inputs, out), (), body)
    rng = np.random.default_rng(0)
    args = [np.asarray(rng.integers(0, 9, 8), dtypes.to_numpy(b.dtype)) for b in inputs]
    (plain,), (wide,) = (run(program, args, []) for run in (run_program, Widen().run_program))
    np.testing.assert_array_equal(np.asarray(wide, np.float64), np.asarray(plain, np.float64))
