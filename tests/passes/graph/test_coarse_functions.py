"""Products of words in a function that may round, beside another one of the same weights that may not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import relaxlite as rl
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.driver import build
from relaxlite.ir import ops
from relaxlite.ir.attributes import BATCH_INVARIANT, EXPORTED, INHERITS_LAYOUT, MIN_PREPARED_ROWS, RELAXED_PRECISION
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Attrs, Constant, Expr, Tuple
from relaxlite.ir.module import IRModule
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import program_calls
from relaxlite.passes.context import PassContext
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.passes.products import int16_products as word_products
from relaxlite.passes.products.prepared_rows import TERMS
from relaxlite.passes.products.winograd_tile import PART
from relaxlite.runtime.module import Executable
from relaxlite.target import Target
from tests.passes.products.test_winograd_products import UNTIL_PACKED, ZEN4, ZEN5, rows, weights

FILL = "fill"
_NAMES = [step.name for step in default_pipeline()]
TARGETS = [Target.parse(f"{target} -l2-bytes=1024") for target in (ZEN4, ZEN5)]  # where small weights count as large
each_target = pytest.mark.parametrize("target", TARGETS, ids=["znver4", "znver5"])
KINDS: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
each_kind = pytest.mark.parametrize("kind", KINDS)
Make = Callable[[BlockBuilder, Expr], Expr]


def both_functions(depth: int, make: Make) -> IRModule:
    """main(x: f32[m, depth]) and fill(x), which compute the same; only main must be exact."""
    bb = BlockBuilder()
    for name, marks in (("main", {}), (FILL, {EXPORTED: True, RELAXED_PRECISION: True})):
        with bb.function(name, Attrs(marks), x=TensorType.of((bb.symbol("m"), depth), "float32")) as (x,):
            bb.result(make(bb, x))
    return bb.module(Attrs({BATCH_INVARIANT: True}))


def linear(*matrices: np.ndarray) -> IRModule:
    """The product of x with each, widened where it is stored in less than float32."""
    constants = [Constant.of(w) for w in matrices]
    return both_functions(len(matrices[0]), lambda bb, x: Tuple(tuple(product(bb, x, c) for c in constants)))


def product(bb: BlockBuilder, x: Expr, w: Constant) -> Expr:
    return bb.emit(ops.matmul(x, w if w.ty.dtype == "float32" else bb.emit(ops.cast(w, dtype="float32"))))


def stored(depth: int, columns: int, kind: str, seed: int = 0) -> np.ndarray:
    return weights(depth, columns, seed).astype(KINDS[kind])


def decided(
    module: IRModule, target: Target = TARGETS[0], precision: str = "auto"
) -> tuple[IRModule, list[tuple[bool, str]]]:
    context = PassContext(target=target, precision=precision)
    made = run_passes(module, default_pipeline()[: _NAMES.index("word_products") + 1], context)
    return made, [(d.taken, d.reason) for d in context.decisions if d.step == "word_products"]


def takes(module: IRModule, target: Target = TARGETS[0], precision: str = "auto") -> bool:
    made, reasons = decided(module, target, precision)
    assert any(taken for taken, _ in reasons) == any(p.attrs.get(INHERITS_LAYOUT) for p in made.programs().values())
    return any(taken for taken, _ in reasons)


def compiled(module: IRModule, target: Target) -> tuple[Executable, Executable]:
    """main and fill, where this processor has what they need."""
    assert takes(module, target)
    if not target.runs_here:
        pytest.skip("needs the instructions of a Zen 4")
    made = rl.compile(module, target=str(target))
    return made, made.entry(FILL)


def check(got: Any, x: np.ndarray, w: np.ndarray) -> None:
    """A row and a column may each move by 2**-8 of their lengths, and move by far less here."""
    exact = x.astype(np.float64) @ w.astype(np.float64)
    lengths = np.linalg.norm(x, axis=-1, keepdims=True) * np.linalg.norm(w.astype(np.float64), axis=0)
    assert got.shape == exact.shape and got.dtype == np.float32
    assert np.all(np.abs(got - exact) <= 2.0**-11 * lengths + 1e-30)


# Which products


@each_kind
def test_the_function_gets_programs_of_its_own_over_the_same_weights(kind: str) -> None:
    w = stored(384, 128, kind)
    made, reasons = decided(linear(w))
    assert reasons == [(True, "the function may round, and it is faster than in floats")]
    calls = {name: program_calls(made, [name]) for name in ("main", FILL)}
    (exact,), (rounded,) = (
        [c for c in found if any(isinstance(a, Constant) for a in c.args)] for found in calls.values()
    )
    assert not made.programs()[exact.callee.name].attrs.get(MIN_PREPARED_ROWS)
    assert made.programs()[rounded.callee.name].attrs.get(MIN_PREPARED_ROWS) == 1
    first, second = ([a.value for a in call.args if isinstance(a, Constant)] for call in (exact, rounded))
    assert first[0] is second[0] and [a.shape for a in second[1:]] == [(128,), (128,)]


@pytest.mark.parametrize(
    ("precision", "is_taken"), [("auto", True), ("int8", True), ("float32", False), ("int12", False), ("int16", False)]
)
def test_who_asks_for_more_gets_it(precision: str, is_taken: bool) -> None:
    assert takes(linear(stored(384, 128, "float16")), precision=precision) == is_taken


@pytest.mark.parametrize("flags", ["-mcpu=sapphirerapids", "-mcpu=znver3", "-mcpu=znver4 -mattr=+amx-tile,+amx-bf16"])
def test_processors_that_are_not_faster_so_leave_it(flags: str) -> None:
    assert not takes(
        linear(stored(384, 128, "float16")), Target.parse(f"llvm {flags} -mtriple=x86_64-unknown-linux-gnu")
    )


@pytest.mark.parametrize(("depth", "columns"), [(385, 128), (94, 128), (384, 63)])
def test_sizes_that_are_left_in_floats(depth: int, columns: int) -> None:
    assert not takes(linear(stored(depth, columns, "float16")))


@each_target
def test_weights_that_would_lose_too_much_keep_the_exact_program_and_others_do_not(target: Target) -> None:
    odd, plain = stored(384, 256, "float16"), stored(384, 256, "float16", seed=1)
    odd[:, 5] = 0
    odd[3, 5] = 1

    def make(bb: BlockBuilder, x: Expr) -> Expr:
        first = bb.emit(ops.relu(product(bb, x, Constant.of(odd))))
        return Tuple((first, bb.emit(ops.relu(product(bb, bb.emit(ops.tanh(x)), Constant.of(plain))))))

    made, reasons = decided(both_functions(384, make), target)
    assert [taken for taken, _ in reasons] == [False, True] and "are not zero" in reasons[0][1]
    assert len({c.callee.name for c in program_calls(made) if any(isinstance(a, Constant) for a in c.args)}) == 2
    main, fill = compiled(both_functions(384, make), target)
    x = rows(70, 384)
    for run in (main, fill):
        first, second = run(x)
        np.testing.assert_allclose(first, np.maximum(x @ odd.astype(np.float32), 0), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(second, np.maximum(np.tanh(x) @ plain.astype(np.float32), 0), rtol=1e-2, atol=1e-2)
    np.testing.assert_array_equal(main(x)[0], fill(x)[0])


def test_gated_layers_are_pairs_where_they_must_be_exact_and_two_products_of_words_where_not() -> None:
    constants = [Constant.of(stored(384, 256, "float16", seed)) for seed in (0, 1)]

    def make(bb: BlockBuilder, x: Expr) -> Expr:
        gate, up = (product(bb, x, c) for c in constants)
        return bb.emit(ops.multiply(bb.emit(ops.silu(gate)), up))

    made, _ = decided(both_functions(384, make))
    of_weights = [
        [c.callee.name for c in program_calls(made, [name]) if any(isinstance(a, Constant) for a in c.args)]
        for name in ("main", FILL)
    ]
    assert [len(names) for names in of_weights] == [1, 2] and of_weights[0][0].startswith("pair_")
    main, fill = compiled(both_functions(384, make), TARGETS[0])
    for count in (1, 21, 130):
        wanted = main(x := rows(count, 384))
        np.testing.assert_allclose(fill(x), wanted, rtol=0, atol=1e-3 * np.abs(wanted).max())


# Results


@pytest.fixture
def without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products take it, too, which Python runs in bearable time."""
    for name in ("MIN_DEPTH", "MIN_COLUMNS"):
        monkeypatch.setattr(word_products, name, 1)


@pytest.mark.each_value
@pytest.mark.usefixtures("without_limits")
@each_target
@each_kind
def test_the_loops_mean_what_they_did(kind: str, target: Target) -> None:
    """In the interpreter, before and after they are scheduled: no depth of whole steps, no columns of whole vectors."""
    w = stored(46, 35, kind)
    module = linear(w)
    made, context = decided(module, target)[0], PassContext(target=target)
    for run in (Interpreter(made), Interpreter(run_passes(module, UNTIL_PACKED, context))):
        for count in (0, 1, 23):
            (got,) = run.run(FILL, x := rows(count, 46))
            check(got, x, w)


@each_target
@each_kind
@pytest.mark.parametrize(
    ("depth", "columns"), [(96, 512), (2 * TERMS * PART - 2, 300), (2 * TERMS * PART, 128), (1600, 135)]
)
def test_results_at_all_sizes(kind: str, target: Target, depth: int, columns: int) -> None:
    """Depths of part of a panel, of one, and of several; rows of part of a tile up to several shares of blocks."""
    w = stored(depth, columns, kind)
    main, fill = compiled(linear(w), target)
    for count in (0, 1, 2, 3, 9, 10, 11, 19, 20, 21, 64, 121, 641):
        x = rows(count, depth)
        (exact,), (rounded,) = (run(x) if isinstance(run(x), tuple) else (run(x),) for run in (main, fill))
        np.testing.assert_allclose(exact, x @ w.astype(np.float32), rtol=1e-4, atol=1e-4)
        check(rounded, x, w)


@each_target
def test_main_is_what_it_is_alone(target: Target) -> None:
    module = linear(stored(576, 320, "bfloat16"), stored(576, 128, "bfloat16", seed=1))
    alone = module.updated({FILL: None})
    main, _ = compiled(module, target)
    usual = rl.compile(alone, target=str(target))
    for count in (1, 7, 130):
        for got, wanted in zip(main(rows(count, 576)), usual(rows(count, 576)), strict=True):
            np.testing.assert_array_equal(got, wanted)


@each_target
@each_kind
def test_a_row_does_not_depend_on_its_neighbours(kind: str, target: Target) -> None:
    _, fill = compiled(linear(stored(800, 192, kind)), target)
    x = rows(150, 800)
    whole = fill(x)
    for start, end in ((0, 1), (1, 3), (3, 70), (70, 149), (149, 150)):
        np.testing.assert_array_equal(fill(x[start:end]), whole[start:end])


@each_target
@pytest.mark.parametrize("odd", [np.inf, np.nan, 1e30])
def test_a_row_without_a_scale_gives_what_a_product_of_floats_gives(odd: float, target: Target) -> None:
    w, x = stored(384, 128, "bfloat16"), rows(40, 384)
    x[7, 5] = odd
    _, fill = compiled(linear(w), target)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(fill(x), x @ w.astype(np.float32), rtol=2e-4, atol=1e-3)


@each_target
def test_columns_of_zeros_and_rows_of_zeros_give_zeros(target: Target) -> None:
    w, x = stored(384, 128, "float16"), rows(24, 384)
    w[:, 7] = 0
    x[[0, 13, 23]] = 0
    _, fill = compiled(linear(w), target)
    got = fill(x)
    check(got, x, w)
    assert not got[[0, 13, 23]].any() and not got[:, 7].any()


# Memory


@pytest.mark.each_value
@each_kind
@pytest.mark.parametrize("columns", [128, 2048], ids=["small", "large"])
def test_weights_are_there_once(kind: str, columns: int) -> None:
    """Both read them as main has them packed."""
    matrices = [stored(768, columns, kind, seed) for seed in (0, 1)]
    data = build(linear(*matrices), str(TARGETS[0]))
    assert takes(linear(*matrices))
    most = sum(w.nbytes for w in matrices) + 2 * 2 * 4 * columns  # and what is taken off sums and multiplied by
    assert sum(constant.nbytes for constant in data.constants) <= most


def test_a_program_that_only_the_function_has_stays_under_its_name() -> None:
    module = linear(stored(384, 128, "float16"))
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((bb.symbol("m"), 384), "float32")) as (x,):
        bb.result(bb.emit(ops.tanh(x)))
    only = module.updated({"main": replace(bb.module().functions()["main"])})
    made, _ = decided(only)
    assert [name for name, p in made.programs().items() if p.attrs.get(MIN_PREPARED_ROWS)] == ["matmul_of_stored"]
