"""Quantized weights of matrix products: kept in few bits, read as they are stored, and the same results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import relaxlite as rl
from bench.cpu import onnx_models
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Constant, Expr, Let
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.ops.quantize import pack_integers
from relaxlite.ir.types import TensorType
from relaxlite.passes.context import PassContext
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import PASSES, default_pipeline
from relaxlite.target import Target
from tests.support import tiers

ROWS = (0, 1, 2, 3, 4, 6, 7, 13, 17, 200)
TINY_CACHE = "llvm -l2-bytes=1024"  # so that small weights count as large ones
LEVELS = {"avx512": "x86-64-v4", "avx2": "x86-64-v3", "sse": "x86-64-v2"}
RNG = np.random.default_rng(0)

Weight = Callable[[BlockBuilder], Expr]


def module(weight: Weight, depth: int, *, bias: bool = False) -> IRModule:
    """x @ weight, or gelu(x @ weight + bias)"""
    bb = BlockBuilder()
    m = bb.symbol("m")
    with bb.function("main", x=TensorType.of((m, depth), "float32")) as (x,):
        w = weight(bb)
        y = bb.emit(ops.matmul(x, w))
        if bias:
            columns = int(w.ty.shape[1].const)  # type: ignore[union-attr, index]
            y = bb.emit(ops.gelu(bb.emit(ops.add(y, RNG.standard_normal(columns, np.float32)))))
        bb.result(y)
    return bb.module()


def integers(shape: tuple[int, ...], bits: int, dtype: str = "int8") -> np.ndarray:
    low = 0 if dtype.startswith("u") else -(1 << bits - 1)
    return RNG.integers(low, low + (1 << bits), shape).astype(dtype)


def scales(shape: tuple[int, ...]) -> np.ndarray:
    return RNG.uniform(0.01, 0.02, shape).astype(np.float32)


def dequantized(
    depth: int,
    columns: int,
    *,
    bits: int = 8,
    dtype: str = "int8",
    group: int | None = 0,
    zero: bool = False,
    turned: bool = False,
) -> Weight:
    """Scales per column, per group of rows, or one (None); `turned`: stored as (columns, depth) and transposed."""
    shape: tuple[int, ...] = () if group is None else (-(-depth // group), columns) if group else (columns,)
    axis, size = (0 if group else 1), (depth, columns)
    q, s, z = integers(size, bits, dtype), scales(shape), integers(shape, bits, dtype)
    if turned:
        q, s, z, axis = q.T.copy(), s.T.copy(), z.T.copy(), 1 - axis

    def make(bb: BlockBuilder) -> Expr:
        zeros = [Constant.of(z)] if zero else []
        w = bb.emit(ops.dequantize_linear(Constant.of(q), Constant.of(s), *zeros, axis=axis, block_size=group or 0))
        return bb.emit(ops.transpose(w, axes=(1, 0))) if turned else w

    return make


def from_plain_ops(depth: int, columns: int, group: int) -> Weight:
    """Two numbers of 4 bits a byte, along the rows of the transposed weight, taken apart by shifts and masks."""
    packed = RNG.integers(0, 256, (columns, depth // 2)).astype(np.uint8)
    s = scales((columns, depth // group, 1))

    def make(bb: BlockBuilder) -> Expr:
        low = bb.emit(ops.bitwise_and(Constant.of(packed), np.uint8(15)))
        high = bb.emit(ops.right_shift(Constant.of(packed), np.uint8(4)))
        both = [bb.emit(ops.expand_dims(part, axes=(2,))) for part in (low, high)]
        whole = bb.emit(ops.reshape(bb.emit(ops.concat(*both, axis=2)), (columns, depth // group, group)))
        centered = bb.emit(ops.subtract(bb.emit(ops.cast(whole, dtype="float32")), np.float32(8)))
        wide = bb.emit(ops.reshape(bb.emit(ops.multiply(centered, Constant.of(s))), (columns, depth)))
        return bb.emit(ops.transpose(wide, axes=(1, 0)))

    return make


def with_offsets(depth: int, columns: int, group: int) -> Weight:
    """scale * code + offset with codes from 0 on, as GGUF writes them: the offset is -8 scales."""
    codes = RNG.integers(0, 16, (columns, depth // group, group)).astype(np.uint8)
    s = scales((columns, depth // group, 1)).astype(np.float16).astype(np.float32)

    def make(bb: BlockBuilder) -> Expr:
        wide = bb.emit(ops.multiply(bb.emit(ops.cast(Constant.of(codes), dtype="float32")), Constant.of(s)))
        whole = bb.emit(ops.add(wide, Constant.of(np.float32(-8) * s)))
        return bb.emit(ops.transpose(bb.emit(ops.reshape(whole, (columns, depth))), axes=(1, 0)))

    return make


def half(depth: int, columns: int, dtype: Any) -> Weight:
    stored = RNG.standard_normal((depth, columns), np.float32).astype(dtype)
    return lambda bb: bb.emit(ops.cast(Constant.of(stored), dtype="float32"))


WEIGHTS: Mapping[str, tuple[int, Weight, int]] = {  # depth, weight, bits that it is kept in
    "int8 per tensor": (70, dequantized(70, 130, group=None), 8),
    "int8 per column": (129, dequantized(129, 64), 8),
    "uint8 per column, zero points": (64, dequantized(64, 100, dtype="uint8", zero=True), 8),
    "uint8 without zero points": (64, dequantized(64, 100, dtype="uint8"), 8),
    "int8 in groups, zero points": (300, dequantized(300, 48, group=64, zero=True), 8),
    "int8 turned": (96, dequantized(96, 80, turned=True), 8),
    "4 bits per column": (150, dequantized(150, 70, bits=4), 4),
    "4 bits in groups": (100, dequantized(100, 130, bits=4, group=32), 4),
    "4 bits in groups, zero points": (333, dequantized(333, 70, bits=4, dtype="uint8", group=32, zero=True), 4),
    "4 bits in groups of 20, turned": (90, dequantized(90, 65, bits=4, group=20, turned=True), 4),
    "2 bits in groups": (160, dequantized(160, 33, bits=2, group=16, zero=True), 2),
    "4 bits by shifts and masks": (128, from_plain_ops(128, 66, 32), 4),
    "4 bits with offsets": (96, with_offsets(96, 40, 32), 4),
    "float16": (77, half(77, 90, np.float16), 16),
    "bfloat16": (77, half(77, 90, ml_dtypes.bfloat16), 16),
    "longer than a sum in one register": (4100, dequantized(4100, 40, bits=4, group=32, zero=True), 4),
    "int8 longer than a sum in one register": (4099, dequantized(4099, 40), 8),
}


REPEATED = ("int8 per column", "int8 turned", "4 bits in groups", "4 bits in groups of 20, turned", "bfloat16")


@pytest.mark.parametrize("name", tiers.only(WEIGHTS.keys() - {*REPEATED, "longer than a sum in one register"}, WEIGHTS))
def test_weights_stay_in_their_bits_and_products_the_same(name: str) -> None:
    depth, weight, bits = WEIGHTS[name]
    given = module(weight, depth)
    context = PassContext(Target.parse(TINY_CACHE), verify=True)
    exe = rl.compile(given, context=context)
    (kept,) = [d for d in context.decisions if d.step == "keep_quantized"]
    assert kept.taken, kept
    columns = int(given["main"].body.result.ty.shape[1].const)  # type: ignore[union-attr]
    numbers = -(-depth // (32 // bits)) * 4 if bits < 8 else bits // 8 * depth
    assert int(kept.figures["bytes stored"].const) <= numbers * columns + 6 * (depth // 16 + 2) * columns
    assert_one_kernel(exe)
    assert_same(exe, given, depth)


def assert_one_kernel(exe: rl.Executable) -> None:
    """Beside the program that computes sizes."""
    assert [name for name in exe.data.kernels if "matmul" in name] == [n for n in exe.data.kernels if "shape" not in n]
    assert sum("matmul" in name for name in exe.data.kernels) == 1


def assert_same(exe: rl.Executable, given: IRModule, depth: int) -> None:
    reference = Interpreter(given)
    for rows in ROWS:
        x = np.random.default_rng(rows).standard_normal((rows, depth), np.float32)
        want = reference.run("main", x)
        np.testing.assert_allclose(exe(x), want, rtol=1e-5, atol=1e-5 * max(1, np.abs(want).max(initial=0)))


@pytest.mark.each_value
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["4 bits in groups, zero points", "uint8 per column, zero points", "float16"])
def test_processors_with_fewer_instructions(name: str, level: str) -> None:
    target = f"llvm -mcpu={LEVELS[level]} -l2-bytes=1024"
    if not Target.parse(target).runs_here:
        pytest.skip("this processor lacks the instructions")
    depth, weight, _ = WEIGHTS[name]
    given = module(weight, depth, bias=True)
    assert_same(rl.compile(given, target), given, depth)


def test_an_epilogue_follows_a_quantized_product() -> None:
    given = module(dequantized(100, 130, bits=4, group=32), 100, bias=True)
    exe = rl.compile(given, TINY_CACHE)
    assert_one_kernel(exe)
    assert_same(exe, given, 100)


def test_a_known_number_of_rows_needs_no_choice() -> None:
    weight = dequantized(100, 130, bits=4, group=32)
    for rows in (1, 5, 9):
        bb = BlockBuilder()
        with bb.function("main", x=TensorType.of((rows, 100), "float32")) as (x,):
            bb.result(ops.matmul(x, weight(bb)))
        x_value = RNG.standard_normal((rows, 100), np.float32)
        exe, want = rl.compile(bb.module(), TINY_CACHE), Interpreter(bb.module()).run("main", x_value)
        np.testing.assert_allclose(exe(x_value), want, rtol=1e-5, atol=1e-5)


def test_batches_share_a_quantized_weight() -> None:
    bb = BlockBuilder()
    b, m = bb.symbol("b"), bb.symbol("m")
    with bb.function("main", x=TensorType.of((b, m, 64), "float32")) as (x,):
        bb.result(ops.matmul(x, dequantized(64, 70, bits=4, group=32)(bb)))
    exe, reference = rl.compile(bb.module(), TINY_CACHE), Interpreter(bb.module())
    for shape in ((0, 3, 64), (2, 0, 64), (1, 1, 64), (3, 5, 64)):
        x_value = RNG.standard_normal(shape).astype(np.float32)
        np.testing.assert_allclose(exe(x_value), reference.run("main", x_value), rtol=1e-5, atol=1e-5)


def kept(given: IRModule, target: str = TINY_CACHE) -> tuple[list[str], PassContext]:
    """The ops after the pass, and what it decided."""
    context = PassContext(Target.parse(target), verify=True)
    steps = [p for p in default_pipeline() if p.name in ("keep_quantized", "eliminate_dead")]
    made = run_passes(given, steps, context)
    values = [b.value for b in made["main"].body.bindings() if isinstance(b, Let)]  # type: ignore[union-attr]
    return [v.callee.name for v in values if isinstance(v, Call) and isinstance(v.callee, Op)], context


@pytest.mark.parametrize(
    ("kind", "form"), [("float16", "float16"), ("int8", "of 8 bits"), ("int4", "of 4 bits, 32 rows")]
)
def test_weights_of_onnx_models_are_kept_as_they_are_stored(kind: str, form: str, tmp_path: Path) -> None:
    path = onnx_models.save(tmp_path, kind, onnx_models.stored_matmul(kind, 256, 200, 1))
    given, context = rl.from_onnx(path), PassContext(Target.parse(TINY_CACHE), verify=True)
    exe = rl.compile(given, context=context)
    (decision,) = [d for d in context.decisions if d.step == "keep_quantized"]
    assert decision.taken and form in decision.reason
    assert_one_kernel(exe)
    assert_same(exe, given, 256)


def test_a_weight_that_fits_into_the_cache_becomes_float32() -> None:
    found, context = kept(module(dequantized(64, 64), 64), "llvm -l2-bytes=1000000")
    assert found == ["matmul"]
    (decision,) = context.decisions
    assert not decision.taken and "L2 cache" in decision.reason and decision.figures["bytes widened"].const == 16384


@pytest.mark.parametrize("is_large", [False, True])
def test_half_precision_becomes_float32_where_all_weights_fit_into_the_cache(is_large: bool) -> None:
    """Each of two would fit."""
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((bb.symbol("m"), 64), "float32")) as (x,):
        y = bb.emit(ops.matmul(x, half(64, 64, np.float16)(bb)))
        bb.result(ops.matmul(y, half(64, 64, np.float16)(bb)))
    found, context = kept(bb.module(), f"llvm -l2-bytes={20_000 if is_large else 40_000}")
    assert found == (["cast", "matmul"] * 2 if is_large else ["matmul"] * 2)
    wanted = "kept as float16" if is_large else "all weights together fit into the L2 cache of 40000 bytes"
    assert all(wanted in d.reason for d in context.decisions) and len(context.decisions) == 2


@pytest.mark.parametrize(
    ("name", "cpu", "is_asked"),
    [
        ("4 bits in groups", "x86-64-v4", True),
        ("float16", "x86-64-v4", False),
        ("4 bits in groups", "znver4", False),
        ("4 bits in groups", "znver5", True),
    ],
)
def test_integers_are_asked_for_ahead_where_that_helps(name: str, cpu: str, is_asked: bool) -> None:
    depth, weight, _ = WEIGHTS[name]
    context = PassContext(Target.parse(f"llvm -mcpu={cpu} -l2-bytes=1024"))
    made = run_passes(module(weight, depth), default_pipeline(), context)
    (program,) = [p for n, p in made.programs().items() if "matmul" in n]
    assert ("prefetch_bytes" in program.attrs) is is_asked
    if is_asked:
        words, factors = sorted(dict(program.attrs["prefetch_bytes"]).values(), reverse=True)  # type: ignore[arg-type]
        assert words == context.target.cpu_facts.weight_prefetch_bytes and factors < words


def test_scales_of_single_rows_are_no_groups() -> None:
    def weight(bb: BlockBuilder) -> Expr:
        wide = bb.emit(ops.cast(Constant.of(integers((64, 64), 4)), dtype="float32"))
        return bb.emit(ops.multiply(wide, Constant.of(scales((64, 1)))))

    found, context = kept(module(weight, 64))
    assert found == ["cast", "multiply", "matmul"]
    assert "groups of rows" in context.decisions[0].reason


@pytest.mark.parametrize("number", [3, 1.5, np.float32(2**20)])
def test_what_is_no_zero_point_stays(number: float) -> None:
    def weight(bb: BlockBuilder) -> Expr:
        wide = bb.emit(ops.cast(Constant.of(integers((64, 64), 4)), dtype="float32"))
        return bb.emit(ops.subtract(wide, np.float32(number)))

    found, _ = kept(module(weight, 64))
    assert ("subtract" not in found) is bool(number == 3)


def test_a_computed_operand_stays_as_it_is() -> None:
    bb = BlockBuilder()
    m = bb.symbol("m")
    with bb.function("main", x=TensorType.of((m, 64), "float32"), q=TensorType.of((64, 64), "int8")) as (x, q):
        bb.result(ops.matmul(x, bb.emit(ops.cast(q, dtype="float32"))))
    found, context = kept(bb.module())
    assert found == ["cast", "matmul"] and not context.decisions


def test_half_precision_weights_are_not_folded_into_floats_that_only_products_read() -> None:
    given = module(half(64, 64, np.float16), 64)
    folded = PASSES["fold_constants"].run(given, PassContext(Target.host()))
    values = [b.value for b in folded["main"].body.bindings() if isinstance(b, Let)]  # type: ignore[union-attr]
    assert [v.callee.name for v in values if isinstance(v, Call)] == ["cast", "matmul"]  # type: ignore[union-attr]


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 33])
def test_packing_and_unpacking(bits: int, rows: int) -> None:
    values = integers((rows, 3), bits)
    words = pack_integers(values, bits)
    unpack = ops.get_op("unpack_integers").reference
    np.testing.assert_array_equal(unpack(words, rows=rows, bits=bits, dtype="int8"), values)
