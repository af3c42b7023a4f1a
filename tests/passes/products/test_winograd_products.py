"""Winograd's inner product: which products take it, why others do not, and that results stay as exact as they were."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.codegen.llvm import emit_assembly
from relaxlite.ir.attributes import MIN_PREPARED_ROWS
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Constant, Tuple
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import get_op
from relaxlite.ir.program import Buffer, IfThenElse, IndexValue, LetIndex, TensorProgram
from relaxlite.ir.program_visitor import walk_stmts
from relaxlite.ir.symbolic import evaluate, sym
from relaxlite.ir.types import TensorType
from relaxlite.passes.context import PassContext
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.passes.products import winograd_products as inner_product_loops
from relaxlite.passes.products import winograd_products as inner_products
from relaxlite.passes.products.winograd_products import MIN_DEPTH, MIN_ROWS, MIN_WORK
from relaxlite.passes.products.winograd_tile import InnerTile
from relaxlite.target import Target
from tests.passes.products.test_register_tile import inner_loops, vector_stack_references

# Without what only processors of AMD have, so that others of these widths run the code too.
ZEN4 = Target.parse("llvm -mcpu=znver4 -mattr=-sse4a -mtriple=x86_64-unknown-linux-gnu")
_MORE = ",".join(f"-{name}" for name in ("avxvnni", "avx512vp2intersect", "movdiri", "movdir64b", "prefetchi"))
ZEN5 = Target.parse(f"llvm -mcpu=znver5 -mattr=-sse4a,{_MORE} -mtriple=x86_64-unknown-linux-gnu")
both = pytest.mark.parametrize("target", [ZEN4, ZEN5], ids=["znver4", "znver5"])
EPS = float(np.finfo(np.float32).eps)
Run = Callable[..., Any]
_NAMES = [step.name for step in default_pipeline()]
UNTIL_PACKED = default_pipeline()[: _NAMES.index("pack_constants") + 1]


def weights(depth: int, columns: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((depth, columns)) * depth**-0.5).astype(np.float32)


def rows(count: int, depth: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, depth)).astype(np.float32)


def linear(w: np.ndarray, most_rows: int | None = None) -> IRModule:
    """main(x: f32[m, depth]) = x @ w"""
    bb = BlockBuilder()
    m = bb.symbol("m", upper=most_rows)
    with bb.function("main", x=TensorType.of((m, w.shape[0]), "float32")) as (x,):
        bb.result(bb.emit(get_op("matmul")(x, Constant.of(w))))
    return bb.module()


@dataclass(frozen=True)
class WeightStrategy:
    """A pass that gives products another way, and the precision that allows it (test_pass_word_products.py, too)."""

    step: str
    precision: str

    def decided(self, module: IRModule, target: Target = ZEN4) -> tuple[IRModule, list[tuple[bool, str]]]:
        """The module after the pass, and what it decided."""
        context = PassContext(target=target, precision=self.precision)
        found = run_passes(module, default_pipeline()[: _NAMES.index(self.step) + 1], context)
        return found, [(d.taken, d.reason) for d in context.decisions if d.step == self.step]

    def takes(self, module: IRModule, target: Target = ZEN4) -> bool:
        return any(p.attrs.get(MIN_PREPARED_ROWS) for p in self.decided(module, target)[0].programs().values())

    def compiled(self, module: IRModule, target: Target = ZEN4) -> Run:
        """As such a processor runs it; elsewhere the test is skipped, and those of the interpreter have to do."""
        assert self.takes(module, target)
        if not target.runs_here:
            pytest.skip("needs the instructions of a Zen 4")
        return rl.compile(module, target=str(target), precision=self.precision)

    def interpreted(self, module: IRModule, target: Target = ZEN4) -> Run:
        """As the interpreter runs what the pass has made, before and after loops are scheduled."""
        made, _ = self.decided(module, target)
        assert any(p.attrs.get(MIN_PREPARED_ROWS) for p in made.programs().values())
        context = PassContext(target=target, precision=self.precision)
        first, second = Interpreter(made), Interpreter(run_passes(module, UNTIL_PACKED, context))

        def run(*args: np.ndarray) -> Any:
            results = first.run("main", *args), second.run("main", *args)
            flat = [np.concatenate([np.ravel(each) for each in (r if isinstance(r, tuple) else (r,))]) for r in results]
            np.testing.assert_allclose(*flat, rtol=1e-4, atol=1e-6)
            return results[1]

        return run


_FLOATS = WeightStrategy("inner_products", "auto")
decided, takes, compiled, interpreted = _FLOATS.decided, _FLOATS.takes, _FLOATS.compiled, _FLOATS.interpreted


@pytest.fixture
def without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products take it, too, which Python runs in bearable time."""
    monkeypatch.setattr(inner_product_loops, "MIN_WORK", 1)
    for name in ("MIN_DEPTH", "MIN_COLUMNS"):
        monkeypatch.setattr(inner_products, name, 1)


def bound(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """A few roundings of the product of the lengths of each row and column."""
    return 4 * EPS * np.linalg.norm(x, axis=-1, keepdims=True) * np.linalg.norm(w, axis=0) + np.finfo(np.float32).tiny


def check(run: Run, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    got = np.asarray(run(x))
    exact = x.astype(np.float64) @ w.astype(np.float64)
    assert got.shape == exact.shape
    assert np.all(np.abs(got - exact) <= bound(x.astype(np.float64), w.astype(np.float64)))
    return got


# Which products


def test_a_product_with_constant_weights_gets_both_ways_and_a_reason() -> None:
    module, reasons = decided(linear(weights(384, 128)))
    (program,) = module.programs().values()
    assert [taken for taken, _ in reasons] == [True]
    assert sum(isinstance(s, IfThenElse) for s in walk_stmts(program.body)) >= 2
    assert [tuple(map(str, b.shape)) for b in program.inputs] == [("m", "384"), ("384", "128"), ("128",), ("128",)]


@pytest.mark.parametrize("cpu", ["x86-64-v4", "x86-64-v3", "znver3", "sapphirerapids"])
def test_other_processors_do_not(cpu: str) -> None:
    assert not takes(linear(weights(384, 128)), Target.parse(f"llvm -mcpu={cpu} -mtriple=x86_64-unknown-linux-gnu"))


@pytest.mark.parametrize(
    ("depth", "columns", "most"),
    [(MIN_DEPTH - 1, 128, None), (384, 32, None), (384, 128, MIN_ROWS - 1), (96, 64, MIN_WORK // 6144)],
)
def test_products_with_too_little_work_do_not(depth: int, columns: int, most: int | None) -> None:
    assert not takes(linear(weights(depth, columns), most))


def test_faster_processors_want_more_columns_for_the_pass_over_the_rows() -> None:
    assert [takes(linear(weights(384, n)), target) for target in (ZEN4, ZEN5) for n in (63, 64, 127, 128)] == [
        *(False, True, True, True),
        *(False, False, False, True),
    ]


def test_a_product_of_two_arguments_does_not() -> None:
    bb = BlockBuilder()
    m = bb.symbol("m")
    args = {"x": TensorType.of((m, 384), "float32"), "w": TensorType.of((384, 128), "float32")}
    with bb.function("main", **args) as (x, w):
        bb.result(bb.emit(get_op("matmul")(x, w)))
    assert decided(bb.module())[1] == [(False, "b is no constant")]


def spoilt(change: Callable[[np.ndarray], None]) -> np.ndarray:
    w = weights(384, 128)
    change(w)
    return w


def _select(w: np.ndarray) -> None:
    w[:, 5] = 0
    w[3, 5] = 1


def _spikes(w: np.ndarray) -> None:
    w *= 1e-4
    w[np.arange(128), np.arange(128)] = 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_select, "b has a column of which 0.3% are not zero"),
        (_spikes, "b has few large weights in most columns: |w|_1 / (sqrt(n) * |w|_2) is 0.05"),
        (lambda w: w.__setitem__((0, 0), np.inf), "b has weights that are no finite numbers, or too large"),
        (lambda w: w.__setitem__((0, 0), 1e30), "b has weights that are no finite numbers, or too large"),
    ],
)
def test_weights_for_which_it_is_not_exact_enough_are_left_alone(
    change: Callable[[np.ndarray], None], reason: str
) -> None:
    w = spoilt(change)
    assert decided(linear(w))[1] == [(False, reason)]
    x = rows(64, 384)
    got = np.asarray(rl.compile(linear(w))(x))
    with np.errstate(invalid="ignore", over="ignore"):
        np.testing.assert_allclose(got, x @ w, rtol=1e-4, atol=1e-5)


# Results


@both
@pytest.mark.parametrize(("depth", "columns"), [(96, 512), (97, 500), (98, 513), (384, 384), (1000, 135)])
def test_results_are_as_exact_as_the_lengths_of_rows_and_columns_allow(
    depth: int, columns: int, target: Target
) -> None:
    w, most = weights(depth, columns), InnerTile.of(target).rows
    run = compiled(linear(w), target)
    for count in (0, 1, MIN_ROWS - 1, MIN_ROWS, most, most + 1, 47, 64, 129):
        check(run, rows(count, depth), w)


@pytest.mark.each_value
@both
@pytest.mark.usefixtures("without_limits")
@pytest.mark.parametrize(("depth", "columns"), [(5, 3), (6, 16), (16, 17), (49, 40)])
def test_the_loops_mean_what_they_did(depth: int, columns: int, target: Target) -> None:
    w = weights(depth, columns)
    run = interpreted(linear(w), target)
    for count in (0, 1, MIN_ROWS - 1, MIN_ROWS, InnerTile.of(target).rows + 1):
        check(run, rows(count, depth), w)


@both
@pytest.mark.parametrize("kind", ["normal", "positive", "relu", "outliers"])
def test_errors_are_those_of_an_ordinary_product(kind: str, target: Target) -> None:
    x, w = rows(128, 1536), weights(1536, 256)
    changes: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "positive": np.abs,
        "relu": lambda x: np.maximum(x, 0),
        "outliers": lambda x: x * np.where(np.arange(x.shape[1]) % 97 == 0, 30, 1).astype(np.float32),
    }
    x = changes.get(kind, lambda x: x)(x)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    ordinary = np.abs(np.asarray(rl.compile(linear(w), target="llvm -mcpu=x86-64-v3 -mattr=-avx512f")(x)) - exact)
    off = np.asarray(compiled(linear(w), target)(x)) - exact
    assert np.sqrt((off**2).mean()) < 2 * np.sqrt((ordinary**2).mean())


@pytest.mark.parametrize("most", [10, 30])
def test_rows_and_columns_of_any_size_keep_their_digits(most: int) -> None:
    """Up to 1e10 all rows have lengths for this; beyond, some of each call have none."""
    w = weights(96, 512) * np.logspace(-30, 8, 512, dtype=np.float32)
    x = rows(64, 96) * np.logspace(-most, most, 64, dtype=np.float32)[:, None]
    check(compiled(linear(w)), x[: 64 if most == 10 else 63], w)


@pytest.mark.usefixtures("without_limits")
def test_rows_of_zeros_and_columns_of_zeros_give_zeros() -> None:
    w, x = weights(33, 20), rows(24, 33)
    w[:, 7] = 0
    x[[0, 13, 23]] = 0
    for run in (interpreted(linear(w)), compiled(linear(w))):
        got = check(run, x, w)
        assert not got[[0, 13, 23]].any() and not got[:, 7].any()


@pytest.mark.usefixtures("without_limits")
@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan, 1e30, 1e-30, 3e38, 1e-42])
def test_a_row_without_a_length_gives_what_an_ordinary_product_gives(odd: float) -> None:
    w, x = weights(33, 20), rows(24, 33)
    x[5] = odd if abs(odd) < 1 else 0  # all of it is tiny
    x[5, 10] = odd
    with np.errstate(invalid="ignore", over="ignore"):
        exact = (x.astype(np.float64) @ w.astype(np.float64)).astype(np.float32)
    for run in (interpreted(linear(w)), compiled(linear(w))):
        got = np.asarray(run(x))
        np.testing.assert_allclose(got[5], exact[5], rtol=1e-4 if odd != 1e-42 else 1, atol=1e-44)
        np.testing.assert_allclose(np.delete(got, 5, axis=0), np.delete(exact, 5, axis=0), rtol=1e-3, atol=1e-5)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    w, x = weights(384, 128), rows(90, 384)
    run = compiled(linear(w))
    np.testing.assert_array_equal(np.asarray(run(x[:50])), np.asarray(run(x))[:50])


def test_a_very_long_sum_is_as_exact_as_an_ordinary_one() -> None:
    """Of positive numbers, whose products of pairs add up the most."""
    rng = np.random.default_rng(0)
    x, w = rng.random((32, 20_000), np.float32), rng.random((20_000, 64), np.float32)
    got, exact = np.asarray(compiled(linear(w))(x)), x.astype(np.float64) @ w
    one_by_one = np.stack([np.cumsum(row[:, None] * w, axis=0, dtype=np.float32)[-1] for row in x])
    assert np.square(got - exact).mean() < np.square(one_by_one - exact).mean() / 4


@both
@pytest.mark.parametrize("count", [11, 12, 14, 20, 21, 37])
def test_a_known_number_of_rows_fits_its_tiles(count: int, target: Target) -> None:
    bb, w = BlockBuilder(), weights(384, 512)
    with bb.function("main", x=TensorType.of((count, 384), "float32")) as (x,):
        bb.result(bb.emit(get_op("matmul")(x, Constant.of(w))))
    check(compiled(bb.module(), target), rows(count, 384), w)


def test_tiles_of_both_shapes_give_the_same_bits() -> None:
    w, x = weights(384, 128), rows(90, 384)
    found = [np.asarray(compiled(linear(w), target)(x)) for target in (ZEN4, ZEN5)]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("columns", [384, 100])
def test_sums_stay_in_registers_and_elements_in_memory(columns: int) -> None:
    module = run_passes(linear(weights(384, columns)), UNTIL_PACKED, PassContext(target=ZEN4))
    text = emit_assembly({"p": next(iter(module.programs().values()))}, ZEN4)
    sums = [body for body in inner_loops(text) if body.count("vaddps") > 8 and "vfmadd" in body]
    assert len(sums) == 3 * (1 if columns % 16 == 0 else 2)  # of 12, 16 and 20 rows; masked ones are apart
    for body in sums:
        assert vector_stack_references(body) == [] and "vbroadcastss" not in body
        assert body.count("vaddps") + body.count("vsubps") == body.count("vfmadd") + body.count("vfnmadd")
        assert "vmovaps" not in body  # from one register to another
    assert sum("prefetcht1" in body for body in sums) == 3  # the last tile has no panel behind it


@pytest.mark.parametrize("columns", [384, 132])
def test_two_vectors_share_the_register_of_an_element(columns: int) -> None:
    """On a Zen 5, whose multiply-adds leave time for one load each."""
    module = run_passes(linear(weights(384, columns)), UNTIL_PACKED, PassContext(target=ZEN5))
    text = emit_assembly({"p": next(iter(module.programs().values()))}, ZEN5)
    sums = [body for body in inner_loops(text) if body.count("vaddps") > 8 and "vfmadd" in body]
    wide = [body for body in sums if "vbroadcastss" in body]
    assert sorted(body.count("vbroadcastss") for body in wide) == [6 * rows for rows in (6, 8, 10)]
    for body in wide:
        assert vector_stack_references(body) == [] and body.count("prefetcht0") in (0, 6)  # lines of the next panel
        products = body.count("vfmadd") + body.count("vfnmadd")
        assert body.count("vaddps") + body.count("vsubps") == products
        assert 4 * body.count("vbroadcastss") == 3 * products  # an element for two vectors, six of eight products


def test_each_group_of_row_blocks_asks_for_the_next_panel() -> None:
    """Only the last group did: 256 rows of 768 x 3072 were at 245 GFLOP/s instead of 323."""
    module = run_passes(linear(weights(768, 1024)), UNTIL_PACKED, PassContext(target=ZEN5))
    (program,) = module.programs().values()
    found = [s.value for s in walk_stmts(program.body) if isinstance(s, LetIndex) and s.var.name == "is_on"]
    assert found
    for value in found:
        assert isinstance(value, IndexValue)
        (block,) = set(value.index.free_vars()) - set(program.symbols)
        rows = 300  # 30 blocks in 8 groups of 4, some lower
        asks = [evaluate(value.index, {program.symbols[0]: rows, block: number}) for number in range(32)]
        assert asks == [0, 0, 1, 1] * 8


def test_panels_too_deep_for_two_of_them_are_asked_for_themselves() -> None:
    assert {
        depth: InnerTile.of(ZEN5).asks(Buffer("w", (sym(depth), sym(768)), "float32"), ZEN5).for_next
        for depth in (1280, 1281)
    } == {1280: True, 1281: False}  # of 512 KB


# Programs of more than a product


def test_joined_products_take_one_pass_over_their_operand() -> None:
    w = [weights(384, n, seed) for seed, n in enumerate((384, 128, 130))]
    bb = BlockBuilder()
    b, n = bb.symbol("b"), bb.symbol("n")
    with bb.function("main", x=TensorType.of((b, n, 384), "float32")) as (x,):
        results = [bb.emit(get_op("gelu")(bb.emit(get_op("matmul")(x, Constant.of(each))))) for each in w]
        bb.result(Tuple(tuple(results)))
    module = bb.module()
    (program,) = (p for p in decided(module)[0].programs().values() if p.attrs.get(MIN_PREPARED_ROWS))
    assert program.num_outputs == 3
    assert sum(b.name.endswith("_prepared") for b in _allocated(program)) == 1
    run = compiled(module)
    for shape in ((1, 64), (3, 33), (0, 5), (2, 1)):
        x = np.random.default_rng(3).standard_normal((*shape, 384)).astype(np.float32)
        for got, each in zip(run(x), w, strict=True):
            product = x.astype(np.float64) @ each
            expected = product * 0.5 * (1 + np.vectorize(math.erf)(product / np.sqrt(2))) if product.size else product
            np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-4, atol=2e-6)


@both
@pytest.mark.usefixtures("without_limits")
def test_short_rows_of_many_pictures_read_nothing_beyond_the_workspace(target: Target) -> None:
    """A term for each picture keeps the loops over pictures and rows apart: a tile has rows of one picture alone."""
    bb, w = BlockBuilder(), weights(13, 20)
    b, n = bb.symbol("b"), bb.symbol("n")
    types = {"x": TensorType.of((b, n, 13), "float32"), "y": TensorType.of((b, 1, 20), "float32")}
    with bb.function("main", **types) as (x, y):
        bb.result(bb.emit(get_op("add")(bb.emit(get_op("matmul")(x, Constant.of(w))), y)))
    rng = np.random.default_rng(4)
    for run in (interpreted(bb.module(), target), compiled(bb.module(), target)):
        for shape in ((8, 3), (5, 7), (11, 1), (2, 21)):
            x, y = (rng.standard_normal((shape[0], *rest)).astype(np.float32) for rest in ((shape[1], 13), (1, 20)))
            np.testing.assert_allclose(np.asarray(run(x, y)), x @ w + y, rtol=1e-4, atol=2e-6)


def test_the_result_takes_over_what_is_added_to_it() -> None:
    bb = BlockBuilder()
    m, w = bb.symbol("m"), weights(384, 384)
    with bb.function("main", x=TensorType.of((m, 384), "float32"), y=TensorType.of((m, 384), "float32")) as (x, y):
        product = bb.emit(get_op("matmul")(bb.emit(get_op("tanh")(x)), Constant.of(w)))
        bb.result(bb.emit(get_op("exp")(bb.emit(get_op("add")(bb.emit(get_op("relu")(y)), product)))))
    module = run_passes(bb.module(), default_pipeline()[: _NAMES.index("schedule") + 1], PassContext(target=ZEN4))
    (program,) = (p for p in module.programs().values() if p.attrs.get(MIN_PREPARED_ROWS))
    pairs: Any = program.attrs["in_place"]
    assert [program.params[b] in program.outputs for _, b in pairs] == [True]
    assert [program.params[a].shape for a, _ in pairs] == [program.outputs[0].shape]


@both
@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_of_one_pixel_are_such_products(stride: int, target: Target) -> None:
    bb = BlockBuilder()
    n, h, w = (bb.symbol(name) for name in "nhw")
    filters = weights(128, 132).T.reshape(132, 128, 1, 1)
    with bb.function("main", x=TensorType.of((n, 128, h, w), "float32")) as (x,):
        conv = bb.emit(
            get_op("conv")(x, Constant.of(np.ascontiguousarray(filters)), (0, 0, 0, 0), strides=(stride, stride))
        )
        bb.result(bb.emit(get_op("relu")(conv)))
    run = compiled(bb.module(), target)
    for shape in ((1, 20, 30), (2, 7, 9), (3, 1, 1)):
        x = np.random.default_rng(2).standard_normal((shape[0], 128, *shape[1:])).astype(np.float32)
        got = np.asarray(run(x))
        exact = np.einsum("nchw,oc->nohw", x[:, :, ::stride, ::stride].astype(np.float64), filters[:, :, 0, 0])
        np.testing.assert_allclose(got, np.maximum(exact, 0), rtol=1e-4, atol=2e-6)


def _allocated(program: TensorProgram) -> list[Any]:
    return [s.buffer for s in walk_stmts(program.body) if hasattr(s, "buffer") and hasattr(s, "body")]
