"""precision="bf16": what it rounds, what it leaves, how far results move, and who refuses it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import relaxlite as rl
from relaxlite.cli import parser
from relaxlite.cli.compiling import make_context
from relaxlite.errors import InvalidArgumentError
from relaxlite.ir import ops
from relaxlite.ir.expr import Call, Constant, Let
from relaxlite.ir.module import IRModule
from relaxlite.ir.program import Intrinsic
from relaxlite.ir.program_visitor import all_values
from relaxlite.passes.context import PassContext
from relaxlite.passes.graph.lower_precision import PRECISIONS, lower_precision
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.target import Target

HAS_DOTS = Target.host().has("avx512bf16")
needs_dots = pytest.mark.skipif(not HAS_DOTS, reason="this processor has no bfloat16 dot products")
WITH_DOTS = Target.parse("llvm -mcpu=znver4 -mtriple=x86_64-unknown-linux-gnu")
rng = np.random.default_rng(11)


def product(k: int, n: int, *, gelu: bool = True) -> tuple[IRModule, np.ndarray]:
    """gelu(x @ w) of x (m, k) and the weights w (k, n)."""
    w = (rng.standard_normal((k, n)) / np.sqrt(k)).astype(np.float32)
    bb = rl.BlockBuilder()
    m = bb.symbol("m")
    with bb.function("main", x=rl.TensorType.of((m, k), "float32")) as (x,):
        y = bb.emit(ops.matmul(x, Constant.of(w)))
        bb.result(bb.emit(ops.relu(y)) if gelu else y)
    return bb.module(), w


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


@needs_dots
@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize(("k", "n"), [(384, 192), (32, 16), (64, 7), (130, 65), (34, 1)])
def test_products_are_those_of_rounded_operands(k: int, n: int) -> None:
    module, w = product(k, n)
    exe = rl.compile(module, precision="bf16")
    for m in (0, 1, 5, 6, 7, 16, 65):
        x = rng.standard_normal((m, k)).astype(np.float32)
        want = np.maximum(rounded(x) @ rounded(w), 0)
        np.testing.assert_allclose(exe(x), want, rtol=1e-4, atol=1e-5)


def dots_of(module: IRModule, precision: str) -> int:
    lowered = run_passes(module, default_pipeline(), PassContext(WITH_DOTS, precision=precision))
    values = [v for p in lowered.programs().values() for v in all_values(p.body)]
    return sum(isinstance(v, Intrinsic) and v.name == "dot2_bf16" for v in values)


def test_dot_products_only_where_asked_for() -> None:
    module, _ = product(64, 64)
    assert dots_of(module, "float32") == 0
    assert dots_of(module, "bf16") > 0


def test_operands_are_rounded_once() -> None:
    w = rng.standard_normal((64, 8)).astype(np.float32)
    bb = rl.BlockBuilder()
    m = bb.symbol("m")
    with bb.function("main", x=rl.TensorType.of((m, 64), "float32")) as (x,):
        parts = [bb.emit(ops.matmul(x, Constant.of(w))), bb.emit(ops.matmul(x, Constant.of(w + 1)))]
        bb.result(bb.emit(ops.add(*parts)))
    steps = [p for p in default_pipeline() if p.name in ("lower_precision", "eliminate_common")]
    made = run_passes(bb.module(), steps, PassContext(WITH_DOTS, precision="bf16"))
    names = [
        b.value.callee.name for b in made["main"].body.bindings() if isinstance(b, Let) and isinstance(b.value, Call)
    ]  # type: ignore[union-attr]
    assert sorted(names) == ["add", "cast", "matmul", "matmul"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_in_half_precision_become_dot_products(dtype: str) -> None:
    w = Constant.of(rng.standard_normal((64, 48)), dtype)
    bb = rl.BlockBuilder()
    with bb.function("main", x=rl.TensorType.of((bb.symbol("m"), 64), "float32")) as (x,):
        bb.result(bb.emit(ops.matmul(x, bb.emit(ops.cast(w, dtype="float32")))))
    assert dots_of(bb.module(), "bf16") > 0
    assert dots_of(bb.module(), "float32") == 0


@pytest.mark.parametrize(("k", "reason"), [(33, "sums 33 products"), (16, "sums 16 products")])
def test_what_stays_float32_says_why(k: int, reason: str) -> None:
    context = PassContext(WITH_DOTS, precision="bf16")
    module, _ = product(k, 8, gelu=False)
    assert lower_precision(module, context) is module
    assert any(reason in note for note in context.notes)


def test_a_target_without_the_instructions_is_refused() -> None:
    module, _ = product(64, 8)
    with pytest.raises(InvalidArgumentError, match=r"bfloat16 dot products.*x86-64-v3 has not"):
        rl.compile(module, "llvm -mcpu=x86-64-v3", precision="bf16")


def test_an_unknown_precision_is_refused() -> None:
    module, _ = product(64, 8)
    with pytest.raises(
        InvalidArgumentError, match="precision 'int3' is not one of auto, float32, bf16, int8, int12, int16"
    ):
        rl.compile(module, precision="int3")


def test_the_command_line_offers_every_precision() -> None:
    assert parser.PRECISIONS == PRECISIONS
    arguments = parser.make_parser().parse_args(["compile", "model.onnx", "--precision", "bf16"])
    assert make_context(arguments).precision == "bf16"
