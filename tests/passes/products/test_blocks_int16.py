"""Products of 12-bit activations with quantized blocks in words of 16 bits: the same integers as in bytes."""

from __future__ import annotations

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.intrinsics import DOT2_PACKED_INT16
from relaxlite.ir.module import IRModule
from relaxlite.ir.program import Allocate, Intrinsic, TensorProgram
from relaxlite.ir.program_visitor import all_values, walk_stmts
from relaxlite.ir.types import TensorType
from relaxlite.passes.context import PassContext
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.passes.products import blocks_int16 as schedule_halves
from relaxlite.passes.products.blocks_int16 import MIN_COLUMNS, MIN_ROWS
from relaxlite.target import Target
from tests.passes.products import test_blocks as test_block_products
from tests.passes.products.test_blocks import LAYERS, WEIGHTS, exact_case, product, programs_with, some_rows
from tests.passes.products.test_winograd_products import ZEN4
from tests.support import tiers
from tests.support.block_weights import block_weight

needs_zen4 = pytest.mark.skipif(not ZEN4.runs_here, reason="needs the instructions of a Zen 4")
_NAMES = [step.name for step in default_pipeline()]
ROWS = (1, MIN_ROWS - 1, MIN_ROWS, 17, 64, 127, 128, 129, 300)
WIDE = [name for name, (bits, block, *_) in WEIGHTS.items() if block <= 32]


@pytest.fixture
def of_any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_halves, "MIN_COLUMNS", 1)


def lowered(module: IRModule, precision: str = "int12", target: Target = ZEN4) -> TensorProgram:
    made = run_passes(module, default_pipeline(), PassContext(target, precision=precision, verify=True))
    return next(iter(programs_with(made, "matmul_blocks").values()))


def has_halves(program: TensorProgram) -> bool:
    return any(isinstance(v, Intrinsic) and v.name == DOT2_PACKED_INT16 for v in all_values(program.body))


@pytest.mark.parametrize(("precision", "taken"), [("auto", True), ("int12", True), ("int8", False), ("int16", False)])
def test_activations_of_12_bits_take_them(precision: str, taken: bool) -> None:
    program = lowered(product(block_weight(192, MIN_COLUMNS)), precision)
    assert has_halves(program) == taken
    names = [s.buffer.name for s in walk_stmts(program.body) if isinstance(s, Allocate)]
    assert ("kept17" in names) == taken  # 16 words of codes, a scale and what they add, in registers


def test_what_has_too_little_to_gain_does_not() -> None:
    assert not has_halves(lowered(product(block_weight(192, MIN_COLUMNS - 1))))
    assert not has_halves(lowered(product(block_weight(192, MIN_COLUMNS, bits=5, block=64))))
    intel = Target.parse("llvm -mcpu=icelake-server -mtriple=x86_64-unknown-linux-gnu")
    assert not has_halves(lowered(product(block_weight(192, MIN_COLUMNS)), target=intel))


@pytest.mark.each_value
@needs_zen4
@pytest.mark.usefixtures("of_any_width")
@pytest.mark.parametrize("columns", [17, 33, 80])
@pytest.mark.parametrize("name", WIDE)
def test_sums_of_integers_are_exact_at_every_size(name: str, columns: int) -> None:
    weight, x = exact_case(name, columns, 4)
    assert has_halves(lowered(product(weight)))
    wanted = x.astype(np.float64) @ weight.values
    exe = rl.compile(product(weight), str(ZEN4), precision="int12")
    for m in (0, *ROWS):
        np.testing.assert_array_equal(exe(x[:m]), wanted[:m], err_msg=f"{m} rows")


@needs_zen4
@pytest.mark.usefixtures("of_any_width")
@pytest.mark.parametrize("name", WIDE)
def test_rows_come_out_alike_among_any_number_of_others(name: str) -> None:
    """To the last bit, also those that are not finite or too small to be rounded."""
    weight, _ = exact_case(name, 80, 4)
    x = some_rows(300, 192)
    x[5, 32:64] = 0
    x[6:8] *= np.float32([[1e-30], [1e30]])
    x[20, 3], x[21, 70] = np.inf, np.nan
    exe = rl.compile(product(weight), str(ZEN4), precision="int12")
    alone = np.concatenate([exe(x[i : i + 1]) for i in range(300)])
    for m in ROWS:
        np.testing.assert_array_equal(exe(x[:m]), alone[:m], err_msg=f"{m} rows")


@needs_zen4
@pytest.mark.usefixtures("of_any_width")
@pytest.mark.parametrize("name", LAYERS)
def test_what_follows_products_sees_the_same_rows(name: str) -> None:
    test_block_products.test_what_follows_products_sees_the_same_rows(name)


@needs_zen4
@pytest.mark.usefixtures("of_any_width")
def test_a_term_of_each_batch_keeps_its_rows_apart() -> None:
    """A bias for each batch: the loops over batches and rows cannot be fused."""
    weight = block_weight(192, 80)
    bb = BlockBuilder()
    b, n = bb.symbol("b"), bb.symbol("n")
    types = {"x": TensorType.of((b, n, 192), "float32"), "y": TensorType.of((b, 1, 80), "float32")}
    with bb.function("main", **types) as (x, y):
        made = bb.emit(ops.matmul(x, weight.emit(bb)))
        bb.result(bb.emit(ops.add(made, y)))
    assert has_halves(lowered(bb.module()))
    exe = rl.compile(bb.module(), str(ZEN4), precision="int12")
    for shape in ((2, 16), (3, 5), (1, 40), (20, 1)):
        x, y = some_rows(shape[0] * shape[1], 192).reshape(*shape, 192), some_rows(shape[0], 80).reshape(-1, 1, 80)
        alone = np.stack([exe(x[k : k + 1, i : i + 1], y[k : k + 1])[0, 0] for k, i in np.ndindex(*shape)])
        np.testing.assert_array_equal(exe(x, y), alone.reshape(*shape, 80))


@pytest.mark.usefixtures("of_any_width")
@pytest.mark.parametrize("name", tiers.only(WIDE[::2], WIDE))
def test_the_loops_mean_what_they_did(name: str) -> None:
    """As the interpreter runs them, on any machine."""
    weight, x = exact_case(name, 20, 4)
    context = PassContext(ZEN4, precision="int12")
    scheduled = run_passes(product(weight), default_pipeline()[: _NAMES.index("pack_constants") + 1], context)
    wanted = x.astype(np.float64) @ weight.values
    for m in (0, MIN_ROWS - 1, MIN_ROWS):
        np.testing.assert_array_equal(Interpreter(scheduled).run("main", x[:m]), wanted[:m])
