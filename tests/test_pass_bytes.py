"""Products of quantized activations and weights: in bytes, four in an instruction, and exact."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Constant, Expr, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.program import Intrinsic
from relaxlite.ir.program_visitor import all_values
from relaxlite.ir.types import TensorType
from relaxlite.passes.manager import PassContext, run_passes
from relaxlite.passes.pipeline import PASSES, default_pipeline
from relaxlite.target import Target

ROWS = (0, 1, 2, 3, 7, 16, 33, 130)
VNNI = Target.parse("llvm -mcpu=znver4")
RNG = np.random.default_rng(0)


def integers(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    info = np.iinfo(dtype)
    return RNG.integers(info.min, info.max + 1, shape).astype(dtype)


def module(shape: tuple[int, ...], dtype: str, make: Callable[..., Expr], **more: TensorType) -> IRModule:
    """make(x, ...), x of shape[:-1] + (m, shape[-1])"""
    bb = BlockBuilder()
    x = TensorType.of((*shape[:-1], bb.symbol("m"), shape[-1]), dtype)
    with bb.function("main", x=x, **more) as given:
        bb.result(make(bb, *given))
    return bb.module()


def product_of_integers(
    a: str, w: np.ndarray, *, a_zero: bool = True, w_zero: np.ndarray | None = None, batch: tuple[int, ...] = ()
) -> IRModule:
    """matmul_integer of x (batch..., m, k) and a constant weight, the zero point of x a scalar that is given."""

    def make(bb: BlockBuilder, x: Var, *zero: Var) -> Expr:
        zeros = [*zero, *([] if w_zero is None else [Constant.of(w_zero)])]
        return bb.emit(ops.matmul_integer(x, Constant.of(w), *zeros))

    return module((*batch, len(w)), a, make, **({"zero": TensorType.of((), a)} if a_zero else {}))


def counts(module: IRModule, target: Target = VNNI) -> list[int]:
    """Dot products of bytes in each program of the scheduled module that has a product of integers."""
    end = [step.name for step in default_pipeline()].index("schedule")
    scheduled = run_passes(module, default_pipeline()[: end + 1], PassContext(target))
    names = [name for name in scheduled.programs() if "matmul" in name]
    assert names
    values = [all_values(scheduled.programs()[name].body) for name in names]
    return [sum(isinstance(v, Intrinsic) and v.name == "dot4_u8s8" for v in found) for found in values]


WEIGHTS = {
    "int8": (integers((24, 40), "int8"), None),
    "int8 with a zero point": (integers((24, 40), "int8"), np.asarray(3, np.int8)),
    "uint8 of one zero point": (integers((24, 40), "uint8"), np.asarray(141, np.uint8)),
    "uint8 of columns with zero points": (integers((24, 40), "uint8"), integers((40,), "uint8")),
    "uint8 without a zero point": (integers((24, 40), "uint8"), None),
    "one column": (integers((8, 1), "int8"), None),
}


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("kind", list(WEIGHTS))
def test_integers_are_multiplied_exactly(kind: str, dtype: str, batch: tuple[int, ...]) -> None:
    w, w_zero = WEIGHTS[kind]
    with_zero = w_zero is not None or dtype == "uint8"
    made = product_of_integers(dtype, w, a_zero=with_zero, w_zero=w_zero, batch=batch)
    exe = rl.compile(made)
    for m in ROWS:
        x, zero = integers((*batch, m, len(w)), dtype), integers((), dtype)
        wide = x.astype(np.int32) - (zero.astype(np.int32) if with_zero else 0)
        wanted = wide @ (w.astype(np.int32) - (0 if w_zero is None else w_zero.astype(np.int32)))
        np.testing.assert_array_equal(exe(x, *([zero] if with_zero else [])), wanted)


def test_the_largest_sums_fit() -> None:
    w = np.full((33024, 1), -128, np.int8)
    exe = rl.compile(product_of_integers("uint8", w, w_zero=np.asarray(127, np.int8)))
    x = np.full((2, len(w)), 255, np.uint8)
    np.testing.assert_array_equal(exe(x, np.asarray(0, np.uint8)), np.full((2, 1), -255 * 255 * len(w)))


@pytest.mark.parametrize("kind", [kind for kind in WEIGHTS if kind != "one column"])
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_the_sums_are_made_by_dot_products_of_bytes(kind: str, dtype: str) -> None:
    w, w_zero = WEIGHTS[kind]
    found = counts(product_of_integers(dtype, w, a_zero=True, w_zero=w_zero))
    assert all(found)


@pytest.mark.parametrize(
    ("target", "depth"), [("llvm -mcpu=haswell", 24), ("llvm -mcpu=znver4", 25)], ids=["no instruction", "odd rows"]
)
def test_other_products_stay_what_they_are(target: str, depth: int) -> None:
    w = integers((depth, 40), "int8")
    made = product_of_integers("uint8", w)
    context = PassContext(Target.parse(target))
    assert run_passes(made, [PASSES["byte_products"]], context) is made
    assert counts(made, context.target) == [0]
    x, zero = integers((5, depth), "uint8"), integers((), "uint8")
    wanted = (x.astype(np.int32) - zero) @ w.astype(np.int32)
    np.testing.assert_array_equal(rl.compile(made, target=target)(x, zero), wanted)


def quantized_float_product(
    dtype: str, w: np.ndarray, w_scale: np.ndarray, w_zero: np.ndarray | None, *, zero: bool = True
) -> IRModule:
    """As exporters write a static quantization: x to `dtype` and back, times a weight that is widened."""

    def make(bb: BlockBuilder, x: Var) -> Expr:
        point = [np.asarray(100 if dtype == "uint8" else -7, dtype)] if zero else []
        attrs = {"axis": 1, "block_size": 0}
        codes = bb.emit(ops.quantize_linear(x, np.float32(0.02), *point, dtype=dtype, **attrs))
        wide = bb.emit(ops.dequantize_linear(codes, np.float32(0.02), *point, **attrs))
        weight = [Constant.of(w), Constant.of(w_scale), *([] if w_zero is None else [Constant.of(w_zero)])]
        return bb.emit(ops.matmul(wide, bb.emit(ops.dequantize_linear(*weight, **attrs))))

    return module((len(w),), "float32", make)


@pytest.mark.parametrize("columns", [False, True], ids=["one scale", "a scale per column"])
@pytest.mark.parametrize("kind", ["int8", "uint8 of one zero point"])
@pytest.mark.parametrize(("dtype", "zero"), [("uint8", True), ("int8", True), ("int8", False)])
def test_static_quantization_is_multiplied_in_bytes(dtype: str, zero: bool, kind: str, columns: bool) -> None:
    w, w_zero = WEIGHTS[kind]
    w_scale = RNG.uniform(0.01, 0.02, w.shape[1:] if columns else ()).astype(np.float32)
    if w_zero is not None and columns:
        w_zero = np.full(w.shape[1:], w_zero, w.dtype)
    made = quantized_float_product(dtype, w, w_scale, w_zero, zero=zero)
    assert all(counts(made))
    exe = rl.compile(made)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    point = (100 if dtype == "uint8" else -7) if zero else 0
    for m in ROWS:
        x = RNG.standard_normal((m, len(w)), np.float32) * 2
        codes = np.clip(np.rint(x / np.float32(0.02)) + point, low, high) - point
        weight = (w.astype(np.int64) - (0 if w_zero is None else w_zero.astype(np.int64))) * w_scale.astype(np.float64)
        np.testing.assert_allclose(exe(x), codes * np.float64(np.float32(0.02)) @ weight, rtol=2e-6, atol=1e-5)


def test_scales_of_groups_of_rows_stay_floats() -> None:
    def make(bb: BlockBuilder, x: Var) -> Expr:
        codes = bb.emit(ops.quantize_linear(x, np.float32(0.02), dtype="uint8", axis=1, block_size=0))
        wide = bb.emit(ops.dequantize_linear(codes, np.float32(0.02), axis=1, block_size=0))
        scale = Constant.of(RNG.uniform(0.01, 0.02, (2, 40)).astype(np.float32))
        weight = ops.dequantize_linear(Constant.of(WEIGHTS["int8"][0]), scale, axis=0, block_size=12)
        return bb.emit(ops.matmul(wide, bb.emit(weight)))

    made = module((24,), "float32", make)
    assert run_passes(made, [PASSES["byte_products"]], PassContext(VNNI)) is made
