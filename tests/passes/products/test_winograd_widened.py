"""Inner products with weights that are stored in few bits: they stay so, and are widened once for many rows."""

from __future__ import annotations

import numpy as np
import pytest

from relaxlite.codegen.interpreter import Interpreter
from relaxlite.ir import ops
from relaxlite.ir.attributes import MIN_PREPARED_ROWS
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Constant, Expr, Tuple
from relaxlite.ir.module import IRModule
from relaxlite.ir.program import Buffer, IndexValue, Literal, Select, Unary
from relaxlite.ir.symbolic import SymVar, sym
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import program_calls
from relaxlite.passes.context import PassContext
from relaxlite.passes.loops.constant_values import evaluate_matrix
from relaxlite.passes.loops.transforms import less
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.passes.products import constant_weights as constant_products
from relaxlite.passes.products import winograd_products as inner_product_loops
from relaxlite.passes.products import winograd_products as inner_products
from relaxlite.passes.products.prepared_rows import TERMS
from relaxlite.passes.products.winograd_products import MIN_ROWS
from relaxlite.passes.products.winograd_tile import PART
from relaxlite.target import Target
from tests.passes.graph.test_quantized_weights import Weight, dequantized, half, module
from tests.passes.products.test_winograd_products import ZEN4, ZEN5, check, compiled, decided, interpreted

SMALL_CACHE = " -l2-bytes=1024"  # so that small weights count as large ones
TARGETS = [Target.parse(str(target) + SMALL_CACHE) for target in (ZEN4, ZEN5)]
each_target = pytest.mark.parametrize("target", TARGETS, ids=["znver4", "znver5"])


def weight_of(kind: str, depth: int, columns: int) -> Weight:
    """Integers of so many bits, or halves, with or without zero points and groups of 32 rows."""
    if kind == "float16":
        return half(depth, columns, np.float16)
    bits, group = int(kind[len("int") : len("int") + 1]), 32 if "groups" in kind else 0
    dtype = "uint8" if "zeros" in kind else "int8"
    return dequantized(depth, columns, bits=bits, dtype=dtype, group=group, zero="zeros" in kind)


KINDS = ["int8", "int8, groups, zeros", "int4, groups", "int4, groups, zeros", "int2, groups", "float16"]
each_kind = pytest.mark.parametrize("kind", KINDS)


def floats(weight: Weight) -> np.ndarray:
    """What the weight is, by the graph's operators."""
    bb = BlockBuilder()
    with bb.function("main", zero=TensorType.of((1,), "float32")) as (zero,):
        bb.result(bb.emit(ops.add(weight(bb), zero)))
    found: np.ndarray = Interpreter(bb.module()).run("main", np.zeros(1, np.float32))
    return found


def rows(count: int, depth: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, depth)).astype(np.float32) / 16


@pytest.fixture
def without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products take it, too, which Python runs in bearable time."""
    monkeypatch.setattr(inner_product_loops, "MIN_WORK", 1)
    for name in ("MIN_DEPTH", "MIN_COLUMNS"):
        monkeypatch.setattr(inner_products, name, 1)


@each_target
@each_kind
def test_weights_stay_in_their_bits_and_get_both_ways(kind: str, target: Target) -> None:
    made, reasons = decided(module(weight_of(kind, 288, 256), 288), target)
    (program,) = [p for p in made.programs().values() if p.attrs.get(MIN_PREPARED_ROWS)]
    assert [taken for taken, _ in reasons] == [True]
    stored = {b.dtype for b in program.inputs if len(b.shape) == 2 and str(b.shape[0]) != "m"}
    assert stored & {"int32", "int8", "uint8", "float16"}


@pytest.mark.each_value
@pytest.mark.usefixtures("without_limits")
@each_target
@each_kind
def test_the_loops_mean_what_they_did(kind: str, target: Target) -> None:
    """In the interpreter: a depth that is not of whole steps or words, and columns that are not of whole vectors."""
    weight = weight_of(kind, 45, 35)
    run = interpreted(module(weight, 45), target)
    for count in (0, 1, MIN_ROWS, 23):
        check(run, rows(count, 45), floats(weight))


@each_target
@each_kind
@pytest.mark.parametrize("depth", [TERMS * PART - 1, TERMS * PART * 2, 1000])
def test_results_at_all_sizes(kind: str, target: Target, depth: int) -> None:
    """Depths of a panel and less, of whole ones, and more; rows of part of a tile up to several shares of blocks."""
    weight = weight_of(kind, depth, 300)
    run, w = compiled(module(weight, depth), target), floats(weight)
    for count in (0, 1, 2, 5, 9, 10, 11, 12, 19, 20, 21, 40, 63, 130, 641, 1290):
        check(run, rows(count, depth), w)


@each_target
def test_a_row_does_not_depend_on_its_neighbours(target: Target) -> None:
    """With an epilogue, and in tiles of all heights."""
    run = compiled(module(weight_of("int4, groups", 512, 256), 512, bias=True), target)
    whole = run(rows(40, 512))
    for count in (16, 17, 22, 33):
        np.testing.assert_array_equal(run(rows(40, 512)[:count]), whole[:count])


@each_target
@pytest.mark.parametrize("odd", [np.inf, np.nan, 1e30])
def test_a_row_without_a_length_gives_what_an_ordinary_product_gives(odd: float, target: Target) -> None:
    weight = weight_of("int8, groups, zeros", 512, 256)
    run, x = compiled(module(weight, 512), target), rows(40, 512)
    x[7, 5] = odd
    got = run(x)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(got, x @ floats(weight), rtol=2e-4, atol=1e-3)


def test_weights_are_looked_at_some_columns_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands beside them is the same as of all at once."""
    layer = module(weight_of("int4, groups, zeros", 512, 256), 512)

    def beside() -> list[np.ndarray]:
        made = decided(layer, TARGETS[0])[0]
        prepared = {name for name, program in made.programs().items() if program.attrs.get(MIN_PREPARED_ROWS)}
        (call,) = [call for call in program_calls(made) if call.callee.name in prepared]
        return [arg.value for arg in call.args if isinstance(arg, Constant) and arg.value.shape == (256,)]

    whole = beside()
    monkeypatch.setattr(constant_products, "AT_A_TIME", 512 * 100)
    for some, wanted in zip(beside(), whole, strict=True):
        np.testing.assert_array_equal(some, wanted)
    assert len(whole) == 2


def test_columns_of_zeros_give_zeros() -> None:
    q = np.random.default_rng(0).integers(-8, 8, (512, 256)).astype(np.int8)
    q[:, 3] = 0

    def weight(bb: BlockBuilder) -> Expr:
        scale = np.full(256, 0.01, np.float32)
        return bb.emit(ops.dequantize_linear(Constant.of(q), Constant.of(scale), axis=1, block_size=0))

    got = compiled(module(weight, 512), TARGETS[0])(rows(40, 512))
    assert not got[:, 3].any() and got[:, 4].all()


def test_weights_for_which_it_is_not_exact_enough_are_left_alone() -> None:
    q = np.zeros((512, 256), np.int8)
    q[:40] = 1

    def weight(bb: BlockBuilder) -> Expr:
        scale = np.full(256, 0.01, np.float32)
        return bb.emit(ops.dequantize_linear(Constant.of(q), Constant.of(scale), axis=1, block_size=0))

    ((taken, reason),) = decided(module(weight, 512), TARGETS[0])[1]
    assert not taken and "are not zero" in reason


def joined(weights: list[Weight], depth: int) -> IRModule:
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((bb.symbol("m"), depth), "float32")) as (x,):
        bb.result(Tuple(tuple(bb.emit(ops.matmul(x, weight(bb))) for weight in weights)))
    return bb.module()


@each_target
def test_joined_products_of_all_kinds_take_one_pass_over_their_operand(target: Target) -> None:
    weights = [weight_of(kind, 512, 192) for kind in KINDS]
    made, _ = decided(joined(weights, 512), target)
    assert [p.num_outputs for p in made.programs().values() if p.attrs.get(MIN_PREPARED_ROWS)] == [len(weights)]
    run = compiled(joined(weights, 512), target)
    for count in (1, 16, 65):
        x = rows(count, 512)
        for got, weight in zip(run(x), weights, strict=True):
            check(lambda _, got=got: got, x, floats(weight))


def gated(weights: list[Weight], depth: int) -> IRModule:
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((bb.symbol("m"), depth), "float32")) as (x,):
        gate, up = (bb.emit(ops.matmul(x, weight(bb))) for weight in weights)
        bb.result(bb.emit(ops.multiply(bb.emit(ops.silu(gate)), up)))
    return bb.module()


def floating(depth: int, columns: int, seed: int) -> Weight:
    w = np.random.default_rng(seed).standard_normal((depth, columns)).astype(np.float32) * np.float32(depth**-0.5)
    return lambda bb: Constant.of(w)


def decisions(layer: IRModule, precision: str = "auto") -> list[tuple[str, bool]]:
    """Which passes decided what about pairs and other ways to compute products."""
    context = PassContext(TARGETS[0], precision=precision)
    run_passes(layer, default_pipeline(), context)
    steps = ("pair_products", "word_products", "inner_products")
    return [(d.step, d.taken) for d in context.decisions if d.step in steps]


@each_target
@pytest.mark.parametrize("kind", ["float32", "int4, groups"])
def test_gated_layers_stay_two_products_where_each_is_faster_alone(kind: str, target: Target) -> None:
    weights = [floating(512, 256, n) if kind == "float32" else weight_of(kind, 512, 256) for n in (0, 1)]
    _, reasons = decided(gated(weights, 512), target)
    assert [taken for taken, _ in reasons] == [True, True]
    run = compiled(gated(weights, 512), target)
    for count in (1, 16, 65):
        x = rows(count, 512)
        gate, up = (x.astype(np.float64) @ floats(weight) for weight in weights)
        np.testing.assert_allclose(run(x), gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-4)


def test_gated_layers_of_few_columns_are_pairs_as_ever() -> None:
    assert decisions(gated([floating(512, 32, n) for n in (0, 1)], 512)) == [("pair_products", True)]


def test_gated_layers_in_bf16_are_products_of_words_and_not_pairs_in_float32() -> None:
    layer = gated([floating(512, 256, n) for n in (0, 1)], 512)
    assert decisions(layer, "bf16") == [("pair_products", False), ("word_products", True), ("word_products", True)]


def test_values_of_constants() -> None:
    """What is computed of rows and columns, in NumPy."""
    k, j = SymVar("k", lower=0), SymVar("j", lower=0)
    a, s = Buffer("a", (sym(5), sym(4)), "float32"), Buffer("s", (sym(5),), "float32")
    arrays = {a: np.arange(20, dtype=np.float32).reshape(5, 4), s: np.arange(5, dtype=np.float32)}
    scaled = Select(less(k, 3), Unary("neg", a[k, j]), s[k])
    wanted = np.concatenate([-arrays[a][:3], np.repeat(arrays[s][3:, None], 4, 1)])
    np.testing.assert_array_equal(evaluate_matrix(scaled, k, j, (5, 4), arrays), wanted)
    np.testing.assert_array_equal(evaluate_matrix(Literal(2.0, "float32"), k, j, (2, 3), {}), np.full((2, 3), 2))
    np.testing.assert_array_equal(evaluate_matrix(IndexValue(k * 2), k, j, (2, 1), {}), [[0], [2]])
