"""Products of words, which `precision="bf16"` takes where additions are free: which do, and how far results move."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import relaxlite as rl
from relaxlite.codegen.llvm import emit_assembly
from relaxlite.driver import build
from relaxlite.errors import ValidationError
from relaxlite.ir.attributes import MIN_PREPARED_ROWS
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Constant, Tuple
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import get_op
from relaxlite.ir.program import Binary, Intrinsic, Literal, Load, Value
from relaxlite.ir.program_visitor import ProgramRewriter, all_values
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import map_programs
from relaxlite.passes.context import PassContext
from relaxlite.passes.manager import Pass, run_passes
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.passes.products import int16_products as word_products
from relaxlite.passes.products.int16_products import MAX_DEPTH, MAX_LENGTH, MAX_W, MAX_X, int16_of
from relaxlite.target import Target
from relaxlite.validation.oracle import Expected
from relaxlite.validation.validator import Validator
from tests.passes.products.test_register_tile import inner_loops, vector_stack_references
from tests.passes.products.test_winograd_products import (
    UNTIL_PACKED,
    ZEN4,
    ZEN5,
    Run,
    WeightStrategy,
    both,
    linear,
    rows,
    weights,
)

_NAMES = [step.name for step in default_pipeline()]
ROWS = (0, 1, 2, 3, 4, 5, 11, 16, 17, 20, 21, 47, 64, 129)


_WORDS = WeightStrategy("word_products", "bf16")
decided, takes, compiled, interpreted = _WORDS.decided, _WORDS.takes, _WORDS.compiled, _WORDS.interpreted


@pytest.fixture
def without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products take it, too, which Python runs in bearable time."""
    for name in ("MIN_DEPTH", "MIN_COLUMNS"):
        monkeypatch.setattr(word_products, name, 1)


def numbers(x: np.ndarray, most: int) -> np.ndarray:
    """The rows of x as what their whole numbers stand for, in float64."""
    wide = np.abs(x.astype(np.float64))
    peak, length = wide.max(-1, keepdims=True, initial=0), np.linalg.norm(wide, axis=-1, keepdims=True)
    step = np.maximum(peak / most, length / MAX_LENGTH)
    step[step == 0] = 1
    return np.asarray(np.rint(x / step) * step)


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def check(run: Run, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Within what rounding rows and columns to whole numbers may move each result by."""
    got, exact = np.asarray(run(x)), x.astype(np.float64) @ w.astype(np.float64)
    length, width = np.linalg.norm(x, axis=-1, keepdims=True), np.linalg.norm(w, axis=0)
    assert got.shape == exact.shape and got.dtype == np.float32
    assert np.all(np.abs(got - exact) <= 2.0**-7 * length * width + 1e-30)
    return got


# Which products


def test_a_product_becomes_one_of_words_and_says_why() -> None:
    module, reasons = decided(linear(weights(384, 128)))
    (program,) = module.programs().values()
    assert reasons == [(True, "it is faster than in bfloat16")]
    kinds = [(*map(str, b.shape), b.dtype) for b in program.inputs]
    assert kinds == [("m", "384", "float32"), ("192", "128", "int32"), ("128", "int32"), ("128", "float32")]


@pytest.mark.parametrize("cpu", ["cooperlake", "sapphirerapids"])
def test_other_processors_multiply_in_bfloat16(cpu: str) -> None:
    assert not takes(linear(weights(384, 128)), Target.parse(f"llvm -mcpu={cpu} -mtriple=x86_64-unknown-linux-gnu"))


def test_tiles_of_bfloat16_are_faster_still() -> None:
    assert not takes(linear(weights(384, 128)), Target.parse(f"{ZEN4} -mattr=+amx-tile,+amx-bf16"))


@pytest.mark.parametrize("precision", ["auto", "float32", "int8"])
def test_no_other_precision_rounds_to_words(precision: str) -> None:
    context = PassContext(target=ZEN4, precision=precision)
    run_passes(linear(weights(384, 128)), default_pipeline(), context)
    assert not [d for d in context.decisions if d.step == "word_products"]


def test_faster_processors_want_more_columns_for_the_pass_over_the_rows() -> None:
    assert [takes(linear(weights(384, n)), ZEN5) for n in (64, 126, 128)] == [False, False, True]


@pytest.mark.parametrize(("depth", "columns"), [(385, 128), (94, 128), (384, 63), (MAX_DEPTH + 2, 64)])
def test_sizes_that_are_left_to_bfloat16(depth: int, columns: int) -> None:
    assert not takes(linear(weights(depth, columns)))


def test_weights_that_would_lose_too_much_are_multiplied_in_bfloat16() -> None:
    w = weights(384, 128)
    w[:, 5] = 0
    w[3, 5] = 1
    module = linear(w)
    assert not takes(module)
    if ZEN4.runs_here:
        x = rows(33, 384)
        got = rl.compile(module, target=str(ZEN4), precision="bf16")(x)
        np.testing.assert_allclose(got, rounded(x) @ rounded(w), rtol=1e-4, atol=1e-5)


def test_large_weights_of_two_products_are_multiplied_in_bfloat16_and_not_in_float32() -> None:
    """One copy of them serves both."""
    w = Constant.of(weights(512, 512))
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((bb.symbol("m"), 512), "float32")) as (x,):
        y = bb.emit(get_op("tanh")(bb.emit(get_op("matmul")(x, w))))
        bb.result(bb.emit(get_op("softmax")(bb.emit(get_op("matmul")(y, w)), axis=-1)))
    context = PassContext(target=ZEN4, precision="bf16")
    made = run_passes(bb.module(), default_pipeline(), context)
    values = [v for p in made.programs().values() for v in all_values(p.body)]
    names = {v.name for v in values if isinstance(v, Intrinsic)}
    assert "dot2_bf16" in names and "dot2_halves" not in names


# Weights


@pytest.mark.parametrize("depth", [96, 98, 384, MAX_DEPTH])
def test_words_hold_the_numbers_of_two_rows_and_add_without_a_carry(depth: int) -> None:
    w = weights(depth, 80) * np.logspace(-20, 15, 80, dtype=np.float32)
    w[:, 7] = 0
    made = int16_of(Constant.of(w))
    assert not isinstance(made, str)
    words, _, width = (each.value for each in made)
    half = depth // 2
    assert words.dtype == np.int32 and words.shape[0] % 6 == 0 and not words[half:].any()
    low, high = words[:half] & 0xFFFF, words[:half] >> 16
    assert min(low.min(), high.min()) >= 0 and max(low.max(), high.max()) <= 2 * MAX_W
    assert 2 * MAX_W + 2 * MAX_X < 2**15
    numbers = np.concatenate([low, high]).astype(np.int64) - MAX_W
    assert np.all(np.linalg.norm(numbers, axis=0) <= MAX_LENGTH + np.sqrt(depth))
    off = np.linalg.norm(numbers * width.astype(np.float64) - w, axis=0)
    assert np.all(off <= 2.0**-8 * np.linalg.norm(w, axis=0)) and not numbers[:, 7].any()


def test_the_greatest_sums_of_products_stay_within_32_bits() -> None:
    """Of rows and columns that are alike, all of one size or of few large elements."""
    rng = np.random.default_rng(0)
    for depth in (384, MAX_DEPTH):
        w = np.where(rng.random((depth, 64)) < 0.5, -1, 1).astype(np.float32)
        w *= rng.choice([1.0, 1.0, 0.1], (depth, 1)).astype(np.float32)
        x = w.T.copy()
        check(compiled(linear(w)), np.concatenate([x, -x]), w)


# Results


@both
@pytest.mark.parametrize(("depth", "columns"), [(96, 512), (98, 500), (100, 513), (384, 384), (1000, 135)])
def test_results_are_those_of_rounded_rows_and_columns(depth: int, columns: int, target: Target) -> None:
    w = weights(depth, columns)
    run = compiled(linear(w), target)
    step = np.maximum(np.abs(w).max(axis=0) / MAX_W, np.linalg.norm(w.astype(np.float64), axis=0) / MAX_LENGTH)
    whole = np.rint(w / step) * step
    for count in ROWS:
        x = rows(count, depth)
        got = check(run, x, w)
        wanted = numbers(x, MAX_X) @ whole
        few = np.abs(got - wanted) > 1e-5 * np.linalg.norm(x, axis=-1, keepdims=True)  # a number that tips over
        assert few.mean() <= 0.02 if few.size else True


@pytest.mark.pairwise
@both
@pytest.mark.usefixtures("without_limits")
@pytest.mark.parametrize(("depth", "columns"), [(4, 3), (12, 16), (18, 17), (50, 40)])
def test_the_loops_mean_what_they_did(depth: int, columns: int, target: Target) -> None:
    w = weights(depth, columns)
    run = interpreted(linear(w), target)
    for count in (0, 1, 3, 9, 21):
        check(run, rows(count, depth), w)


@pytest.mark.parametrize("kind", ["normal", "positive", "relu", "outliers", "one large"])
def test_errors_are_less_than_those_of_bfloat16(kind: str) -> None:
    x, w = rows(128, 1536), weights(1536, 256)
    changes: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "positive": np.abs,
        "relu": lambda x: np.maximum(x, 0),
        "outliers": lambda x: x * np.where(np.arange(x.shape[1]) % 97 == 0, 30, 1).astype(np.float32),
        "one large": lambda x: x + np.where(np.arange(x.shape[1]) == 11, 300, 0).astype(np.float32),
    }
    x = changes.get(kind, lambda x: x)(x)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    off, usual = np.asarray(compiled(linear(w))(x)) - exact, rounded(x) @ rounded(w) - exact
    assert np.sqrt((off**2).mean()) < np.sqrt((usual**2).mean())


def test_no_row_moves_further_than_rounding_to_bfloat16_may_move_it() -> None:
    """Of the longest sums: one large element among many, and rows of one size, whose step their length decides."""
    w = weights(MAX_DEPTH, 64)
    rng = np.random.default_rng(5)
    large = np.array([1, 10, 85, 1e3, 1e5], np.float32)[:, None]
    x = rng.uniform(0.5, 1.5, (5, MAX_DEPTH)).astype(np.float32)
    x[:, 7:8] *= large
    run = compiled(linear(w))
    whole = (
        np.rint(w / (step := np.maximum(np.abs(w).max(axis=0) / MAX_W, np.linalg.norm(w, axis=0) / MAX_LENGTH))) * step
    )
    moved = np.asarray(run(x)) - x.astype(np.float64) @ whole
    assert np.all(np.abs(moved) <= 2.0**-8 * np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(whole, axis=0))
    assert np.all(np.linalg.norm(numbers(x, MAX_X) - x, axis=1) <= 2.0**-8 * np.linalg.norm(x, axis=1))


def test_rows_and_columns_of_any_size_keep_their_digits() -> None:
    w = weights(96, 512) * np.logspace(-20, 15, 512, dtype=np.float32)
    x = rows(64, 96) * np.logspace(-12, 12, 64, dtype=np.float32)[:, None]
    got, exact = np.asarray(compiled(linear(w))(x)), x.astype(np.float64) @ w
    assert np.all(np.abs(got - exact) <= 2e-3 * np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(w, axis=0))


@pytest.mark.usefixtures("without_limits")
def test_rows_of_zeros_and_columns_of_zeros_give_zeros() -> None:
    w, x = weights(34, 20), rows(24, 34)
    w[:, 7] = 0
    x[[0, 13, 23]] = 0
    for run in (interpreted(linear(w)), compiled(linear(w))):
        got = check(run, x, w)
        assert not got[[0, 13, 23]].any() and not got[:, 7].any()


@pytest.mark.usefixtures("without_limits")
@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan, 1e30, 1e-30, 3e38])
def test_a_row_without_a_scale_gives_what_a_product_of_floats_gives(odd: float) -> None:
    w, x = weights(34, 20), rows(24, 34)
    x[5] = odd if abs(odd) < 1 else 0  # all of it is tiny
    x[5, 10] = odd
    with np.errstate(invalid="ignore", over="ignore"):
        exact = (x.astype(np.float64) @ w.astype(np.float64)).astype(np.float32)
    for run in (interpreted(linear(w)), compiled(linear(w))):
        got = np.asarray(run(x))
        np.testing.assert_allclose(got[5], exact[5], rtol=2e-2, atol=1e-3 * abs(odd) if abs(odd) < 1 else 1e-3)
        np.testing.assert_allclose(np.delete(got, 5, axis=0), np.delete(exact, 5, axis=0), rtol=0.1, atol=2e-3)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    w, x = weights(384, 128), rows(90, 384)
    run = compiled(linear(w))
    whole = np.asarray(run(x))
    for count in (1, 2, 3, 7, 50):
        np.testing.assert_array_equal(np.asarray(run(x[:count])), whole[:count])


@both
@pytest.mark.parametrize("count", [1, 2, 3, 12, 14, 20, 37])
def test_a_known_number_of_rows_fits_its_tiles(count: int, target: Target) -> None:
    bb, w = BlockBuilder(), weights(384, 512)
    with bb.function("main", x=TensorType.of((count, 384), "float32")) as (x,):
        bb.result(bb.emit(get_op("matmul")(x, Constant.of(w))))
    check(compiled(bb.module(), target), rows(count, 384), w)


def test_sums_stay_in_registers_and_elements_in_memory() -> None:
    context = PassContext(target=ZEN4, precision="bf16")
    module = run_passes(linear(weights(384, 384)), UNTIL_PACKED, context)
    text = emit_assembly({"p": next(iter(module.programs().values()))}, ZEN4)
    sums = [body for body in inner_loops(text) if body.count("vpdpwssd") > 8 and "prefetcht1" in body]
    assert {body.count("vpdpwssd") // 4 for body in sums} >= {8, 12, 16, 20}  # rows
    for body in sums:
        assert vector_stack_references(body) == [] and "vpmaddwd" not in body
        assert body.count("vpaddd") == body.count("vpdpwssd") == len(re.findall(r"vpaddd.*\{1to16\}", body))


# Programs of more than a product


def test_joined_products_take_one_pass_over_their_operand() -> None:
    w = [weights(384, n, seed) for seed, n in enumerate((384, 128, 130))]
    bb = BlockBuilder()
    b, n = bb.symbol("b"), bb.symbol("n")
    with bb.function("main", x=TensorType.of((b, n, 384), "float32")) as (x,):
        bb.result(Tuple(tuple(bb.emit(get_op("relu")(bb.emit(get_op("matmul")(x, Constant.of(k))))) for k in w)))
    module = bb.module()
    (program,) = (p for p in decided(module)[0].programs().values() if p.attrs.get(MIN_PREPARED_ROWS))
    assert program.num_outputs == 3
    run = compiled(module)
    for shape in ((1, 64), (3, 33), (0, 5), (2, 1)):
        x = np.random.default_rng(3).standard_normal((*shape, 384)).astype(np.float32)
        for got, each in zip(run(x), w, strict=True):
            wanted = np.maximum(x.astype(np.float64) @ each, 0)
            np.testing.assert_allclose(np.asarray(got), wanted, atol=4e-3)


def test_validation_holds_later_passes_to_what_words_round_to() -> None:
    """What words round, the pass may; all passes after it have to keep."""
    module, _ = decided(linear(weights(96, 64)))
    cases = Validator(module).cases
    assert len(cases) > 2 and all(isinstance(case.outcome, Expected) for case in cases)
    for case in cases:
        (result,), (error,) = case.outcome.values, case.outcome.rounding_error  # type: ignore[union-attr]
        assert np.all(error <= 1e-2 * np.abs(result).max(initial=1))


class _LessTaken(ProgramRewriter):
    """Takes something else off the sums."""

    def _value(self, value: Value) -> Value:
        found = super()._value(value)
        is_offset = isinstance(found, Load) and found.buffer.name.endswith("_offset")
        return Binary("add", found, Literal(1 << 22, "int32")) if is_offset else found


def test_a_wrong_pass_behind_the_rounding_is_found(tmp_path: Path) -> None:
    if not ZEN4.runs_here:
        pytest.skip("needs the instructions of a Zen 4")
    context = PassContext(target=ZEN4, precision="bf16", dump_dir=tmp_path)
    rl.compile(linear(weights(96, 64)), str(ZEN4), precision="bf16", validate=True)

    def broken(module: IRModule, _: object) -> IRModule:
        return map_programs(module, lambda p: replace(p, body=_LessTaken().stmt(p.body)))

    steps = list(default_pipeline())
    steps.insert(_NAMES.index("word_products") + 1, Pass("broken", broken, "lowered"))
    with pytest.raises(ValidationError, match=r"^pass broken changes what the module computes"):
        build(linear(weights(96, 64)), passes=steps, context=context, validate=True)


@both
@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_of_one_pixel_are_such_products(stride: int, target: Target) -> None:
    bb = BlockBuilder()
    n, h, w = (bb.symbol(name) for name in "nhw")
    filters = np.ascontiguousarray(weights(128, 132).T.reshape(132, 128, 1, 1))
    with bb.function("main", x=TensorType.of((n, 128, h, w), "float32")) as (x,):
        conv = bb.emit(get_op("conv")(x, Constant.of(filters), (0, 0, 0, 0), strides=(stride, stride)))
        bb.result(bb.emit(get_op("relu")(conv)))
    run = compiled(bb.module(), target)
    for shape in ((1, 20, 30), (2, 7, 9), (3, 1, 1)):
        x = np.random.default_rng(2).standard_normal((shape[0], 128, *shape[1:])).astype(np.float32)
        exact = np.einsum("nchw,oc->nohw", x[:, :, ::stride, ::stride].astype(np.float64), filters[:, :, 0, 0])
        np.testing.assert_allclose(np.asarray(run(x)), np.maximum(exact, 0), atol=4e-3)
