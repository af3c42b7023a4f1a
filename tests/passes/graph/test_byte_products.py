"""Products of quantized activations and weights: in bytes, four in an instruction, and exact."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Constant, Expr, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op, get_op
from relaxlite.ir.ops.nn_conv import correlate
from relaxlite.ir.program import Intrinsic
from relaxlite.ir.program_visitor import all_values
from relaxlite.ir.types import TensorType
from relaxlite.passes.context import PassContext
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import PASSES, default_pipeline
from relaxlite.target import Target

ROWS = (0, 1, 2, 3, 7, 16, 33, 130)
VNNI = Target.parse("llvm -mcpu=znver4")
PAIRS = Target.parse("llvm -mcpu=x86-64-v3")  # AVX2, which has no instruction for four bytes
HERE = [target for target in (Target.host(), PAIRS) if target.runs_here]
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


def counts(module: IRModule, target: Target = VNNI, instruction: str = "dot4_u8s8") -> list[int]:
    """Dot products in each program of the scheduled module that has a product of integers."""
    end = [step.name for step in default_pipeline()].index("schedule")
    scheduled = run_passes(module, default_pipeline()[: end + 1], PassContext(target))
    names = [name for name in scheduled.programs() if "matmul" in name or "conv" in name]
    assert names
    values = [all_values(scheduled.programs()[name].body) for name in names]
    return [sum(isinstance(v, Intrinsic) and v.name == instruction for v in found) for found in values]


WEIGHTS = {
    "int8": (integers((24, 40), "int8"), None),
    "int8 with a zero point": (integers((24, 40), "int8"), np.asarray(3, np.int8)),
    "uint8 of one zero point": (integers((24, 40), "uint8"), np.asarray(141, np.uint8)),
    "uint8 of columns with zero points": (integers((24, 40), "uint8"), integers((40,), "uint8")),
    "uint8 without a zero point": (integers((24, 40), "uint8"), None),
    "one column": (integers((8, 1), "int8"), None),
}


@pytest.mark.each_value
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("kind", list(WEIGHTS))
def test_integers_are_multiplied_exactly(kind: str, dtype: str, batch: tuple[int, ...]) -> None:
    w, w_zero = WEIGHTS[kind]
    with_zero = w_zero is not None or dtype == "uint8"
    made = product_of_integers(dtype, w, a_zero=with_zero, w_zero=w_zero, batch=batch)
    for exe, m in itertools.product([rl.compile(made, target) for target in HERE], ROWS):
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
    made = product_of_integers(dtype, w, a_zero=True, w_zero=w_zero)
    assert all(counts(made)) and all(counts(made, PAIRS, "dot2_i16"))


@pytest.mark.parametrize(
    ("target", "depth"),
    [("llvm -mcpu=x86-64", 24), ("llvm -mcpu=haswell", 25), ("llvm -mcpu=znver4 -mattr=-sse4a", 26)],
    ids=["no instruction", "odd rows", "no fours"],
)
def test_other_products_stay_what_they_are(target: str, depth: int) -> None:
    w = integers((depth, 40), "int8")
    made = product_of_integers("uint8", w)
    context = PassContext(Target.parse(target))
    assert run_passes(made, [PASSES["byte_products"]], context) is made
    assert counts(made, context.target) == [0]
    if context.target.runs_here:
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


# Convolutions

CONVOLUTIONS: dict[str, tuple[tuple[int, ...], dict[str, object], tuple[int, ...]]] = {
    # shape of the filters, attributes, pads
    "1x1": ((20, 8, 1, 1), {}, (0, 0, 0, 0)),
    "1x1 of many": ((70, 36, 1, 1), {"strides": (2, 1)}, (0, 0, 0, 0)),
    "3x3": ((24, 8, 3, 3), {}, (1, 1, 1, 1)),
    "3x3 with steps": ((9, 16, 3, 3), {"strides": (2, 2), "dilations": (1, 2)}, (1, 2, 0, 1)),
    "of three channels": ((16, 3, 3, 5), {"strides": (2, 2)}, (1, 2, 1, 2)),
    "of one channel": ((8, 1, 3, 3), {}, (0, 0, 0, 0)),
    "over time": ((12, 6, 3), {"strides": (2,)}, (1, 1)),
}
SIZES = ((1, 5), (1, 9), (2, 16), (3, 33))


def convolution_of_integers(
    filters: np.ndarray, zeros: list[np.ndarray], x: str, pads: tuple[int, ...], **attrs: object
) -> IRModule:
    bb = BlockBuilder()
    n, spatial = bb.symbol("n"), [bb.symbol(name) for name in "hw"[: filters.ndim - 2]]
    channels = filters.shape[1] * int(attrs.get("groups", 1))  # type: ignore[call-overload]
    with bb.function("main", x=TensorType.of((n, channels, *spatial), x)) as (given,):
        constants = [Constant.of(z) for z in zeros]
        bb.result(bb.emit(ops.conv_integer(given, Constant.of(filters), pads, *constants, **attrs)))
    return bb.module()


def assert_exact(module: IRModule, filters: np.ndarray, x: str, *operands: object, **attrs: object) -> None:
    channels = filters.shape[1] * int(attrs.get("groups", 1))  # type: ignore[call-overload]
    for exe, (n, size) in itertools.product([rl.compile(module, target) for target in HERE], SIZES):
        given = integers((n, channels, *range(size, size + filters.ndim - 2)), x)
        wanted = get_op("conv_integer").reference(
            given, filters, *operands, **{"strides": None, "dilations": None, "groups": 1, "layout": "first", **attrs}
        )
        np.testing.assert_array_equal(exe(given), wanted)


@pytest.mark.each_value
@pytest.mark.parametrize(("x", "w"), [("uint8", "int8"), ("int8", "int8"), ("uint8", "uint8")])
@pytest.mark.parametrize("kind", list(CONVOLUTIONS))
def test_integers_are_convolved_exactly(kind: str, x: str, w: str) -> None:
    shape, attrs, pads = CONVOLUTIONS[kind]
    filters = integers(shape, w)
    zeros = [np.asarray(77, x), np.asarray(128 if w == "uint8" else 0, w)]
    made = convolution_of_integers(filters, zeros, x, pads, **attrs)
    assert all(counts(made)) and all(counts(made, PAIRS, "dot2_i16"))
    assert_exact(made, filters, x, pads, *zeros, **attrs)


@pytest.mark.parametrize("channels", [3, 8])
def test_convolutions_without_zero_points(channels: int) -> None:
    """They were summed in floats, or stayed products of int32, as if they had been changed already."""
    filters = integers((16, channels, 3, 3), "int8")
    made = convolution_of_integers(filters, [], "uint8", (1, 1, 1, 1))
    assert all(counts(made))
    assert_exact(made, filters, "uint8", (1, 1, 1, 1))


def test_filters_with_zero_points_of_their_own() -> None:
    filters = RNG.integers(-60, 60, (10, 8, 3, 3)).astype(np.int8)
    zeros = [np.asarray(200, np.uint8), RNG.integers(-60, 60, 10).astype(np.int8)]
    made = convolution_of_integers(filters, zeros, "uint8", (1, 1, 1, 1))
    assert all(counts(made))
    assert_exact(made, filters, "uint8", (1, 1, 1, 1), *zeros)


@pytest.mark.each_value
@pytest.mark.parametrize("x", ["uint8", "int8"])
@pytest.mark.parametrize("kind", list(CONVOLUTIONS))
def test_filters_that_do_not_fit_bytes_are_moved(kind: str, x: str) -> None:
    """Of uint8 with a zero point that is not 128, for all or for each: sums over windows bring back the rest."""
    shape, attrs, pads = CONVOLUTIONS[kind]
    filters = integers(shape, "uint8")
    filters.reshape(-1)[:2] = 0, 255
    for point in (np.asarray(20, np.uint8), integers(shape[:1], "uint8")):
        zeros = [np.asarray(77, x), point]
        made = convolution_of_integers(filters, zeros, x, pads, **attrs)
        assert any(counts(made))
        assert_exact(made, filters, x, pads, *zeros, **attrs)


@pytest.mark.parametrize(("filled", "found"), [(None, True), (0.0, True), (0.5, False)])
def test_zeros_around_a_picture_are_its_zero_point(filled: float | None, found: bool) -> None:
    """An op of its own pads what is dequantized; other numbers have no code that is known to stand for them."""
    w, attrs = integers((16, 8, 3, 3), "int8"), {"axis": 1, "block_size": 0}
    zero = np.asarray(90, np.uint8)
    bb = BlockBuilder()
    dims = (bb.symbol("n"), 8, bb.symbol("h"), 9)
    with bb.function("main", x=TensorType.of(dims, "uint8")) as (given,):
        value = bb.emit(ops.dequantize_linear(given, np.float32(0.02), zero, **attrs))
        around = [] if filled is None else [np.float32(filled)]
        value = bb.emit(ops.pad(value, (0, 0, 1, 1), (0, 0, 1, 1), *around))
        weight = bb.emit(ops.dequantize_linear(Constant.of(w), np.float32(0.01), axis=0, block_size=0))
        bb.result(bb.emit(ops.conv(value, weight, (0, 0, 0, 0))))
    made = bb.module()
    assert all(counts(made)) == found
    x = integers((2, 8, 6, 9), "uint8")
    wide = (x.astype(np.float64) - 90) * np.float64(np.float32(0.02))
    padded = np.pad(wide, [(0, 0), (0, 0), (1, 1), (1, 1)], constant_values=filled or 0)
    filters = w * np.float64(np.float32(0.01))
    wanted = correlate(padded, filters, (0, 0, 0, 0), strides=None, dilations=None, groups=1)
    np.testing.assert_allclose(rl.compile(made)(x), wanted, rtol=1e-5, atol=1e-4)


def test_filters_become_constants_without_dot_products_of_bytes() -> None:
    """Those that are larger than their bytes were widened at each run, and convolved channels first: 25 ms, not 11."""
    w, attrs = integers((64, 64, 3, 3), "int8"), {"axis": 1, "block_size": 0}
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((bb.symbol("n"), 64, bb.symbol("h"), 9), "float32")) as (given,):
        codes = bb.emit(ops.quantize_linear(given, np.float32(0.02), np.asarray(3, np.uint8), dtype="uint8", **attrs))
        value = bb.emit(ops.dequantize_linear(codes, np.float32(0.02), np.asarray(3, np.uint8), **attrs))
        weight = bb.emit(ops.dequantize_linear(Constant.of(w), np.float32(0.01), axis=0, block_size=0))
        bb.result(bb.emit(ops.conv(value, weight, (1, 1, 1, 1))))
    end = [step.name for step in default_pipeline()].index("legalize")
    graph = run_passes(bb.module(), default_pipeline()[:end], PassContext(Target.parse("llvm -mcpu=haswell")))
    calls = [b.value for b in graph["main"].body.bindings() if isinstance(b.value.callee, Op)]
    (conv,) = (call for call in calls if call.callee.name == "conv")
    assert isinstance(conv.args[1], Constant) and conv.attrs["layout"] == "last"


@pytest.mark.parametrize("target", ["llvm -mcpu=znver4", "llvm -mcpu=haswell"])
@pytest.mark.parametrize("zero", [0, 130])
def test_convolutions_of_each_channel_are_summed_in_floats(zero: int, target: str) -> None:
    filters, attrs, pads = integers((24, 1, 3, 3), "int8"), {"groups": 24, "strides": (2, 1)}, (1, 1, 1, 1)
    zeros = [np.asarray(zero, np.uint8), np.asarray(-3, np.int8)]
    made = convolution_of_integers(filters, zeros, "uint8", pads, **attrs)
    changed = run_passes(made, [PASSES["decompose"], PASSES["byte_products"]], PassContext(Target.parse(target)))
    names = [b.value.callee.name for b in changed["main"].body.bindings() if isinstance(b.value.callee, Op)]
    assert "conv" in names and "conv_integer" not in names
    assert_exact(made, filters, "uint8", pads, *zeros, **attrs)


@pytest.mark.each_value
@pytest.mark.parametrize("x", ["uint8", "int8"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_chain_of_statically_quantized_convolutions_stays_in_one_layout(padded: bool, x: str) -> None:
    """Two convolutions between QuantizeLinear and DequantizeLinear, an addition and one scale per channel."""
    pads, attrs = ((1, 1, 1, 1) if padded else (0, 0, 0, 0)), {"axis": 1, "block_size": 0}
    zero, shape = np.asarray(110 if x == "uint8" else -9, x), (16, 16, 3, 3)
    filters = [integers(shape, "int8"), integers(shape, "int8")]
    scales = [RNG.uniform(0.001, 0.002, 16).astype(np.float32), np.float32(0.0015).reshape(())]
    of_channels = RNG.uniform(0.03, 0.05, 16).astype(np.float32)
    bb = BlockBuilder()
    dims = (bb.symbol("n"), 16, bb.symbol("h"), bb.symbol("w"))

    def rounded(value: Expr, scale: np.ndarray, zero: np.ndarray) -> Expr:
        codes = bb.emit(ops.quantize_linear(value, Constant.of(scale), Constant.of(zero), dtype=x, **attrs))
        return bb.emit(ops.dequantize_linear(codes, Constant.of(scale), Constant.of(zero), **attrs))

    with bb.function("main", x=TensorType.of(dims, "float32")) as (given,):
        value: Expr = given
        for w, scale in zip(filters, scales, strict=True):
            weight = bb.emit(ops.dequantize_linear(Constant.of(w), Constant.of(scale), axis=0, block_size=0))
            value = bb.emit(ops.conv(rounded(value, np.float32(0.04).reshape(()), zero), weight, pads))
            value = bb.emit(ops.relu(rounded(value, of_channels, np.full(16, zero))))
        bb.result(value)
    made = bb.module()
    assert all(counts(made))
    end = [step.name for step in default_pipeline()].index("legalize")
    graph = run_passes(made, default_pipeline()[:end], PassContext(VNNI))
    names = [b.value.callee.name for b in graph["main"].body.bindings() if isinstance(b.value.callee, Op)]
    assert names.count("conv_integer") == 2 and names.count("transpose") == 2  # where they begin and end
    low, high = np.iinfo(x).min, np.iinfo(x).max

    def rounded_array(value: np.ndarray, scale: np.ndarray) -> np.ndarray:
        spread = scale.reshape(-1, 1, 1) if scale.ndim else scale
        return (np.clip(np.rint(value.astype(np.float32) / spread) + zero, low, high) - zero) * spread

    exe = rl.compile(made)
    for n, size in SIZES[1:]:
        x_value = RNG.standard_normal((n, 16, size, size + 1), np.float32)
        value_array = x_value
        for w, scale in zip(filters, scales, strict=True):
            weight_array = w.astype(np.float64) * np.float64(scale.reshape(-1, 1, 1, 1))
            source = rounded_array(value_array, np.float32(0.04)).astype(np.float64)
            done = correlate(source, weight_array, pads, strides=None, dilations=None, groups=1)
            value_array = np.maximum(rounded_array(done, of_channels), 0)
        difference = np.abs(exe(x_value) - value_array)
        assert (difference > 1e-5).mean() < 0.01 and difference.max() < 0.3  # a value between two codes goes either way
