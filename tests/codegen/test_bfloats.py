"""bfloat16 by the processor's instructions: rounding, pairs in words, their products, and attention made of these."""

from __future__ import annotations

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import relaxlite as rl
from relaxlite.codegen.interpreter import run_program
from relaxlite.codegen.llvm import emit_program
from relaxlite.ir import ops
from relaxlite.ir.expr import Call, Constant, Let
from relaxlite.ir.intrinsics import DOT2_PACKED_BF16, NARROW, PACK_BF16
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op, get_op
from relaxlite.ir.program import (
    Binary,
    Buffer,
    Cast,
    For,
    Intrinsic,
    Literal,
    Seq,
    Store,
    TensorProgram,
    Value,
)
from relaxlite.ir.scalar_functions import apply_intrinsic
from relaxlite.ir.symbolic import SymVar, sym
from relaxlite.passes.context import PassContext
from relaxlite.passes.loops.in_place import in_place_pairs, sink_aliasable_stores
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.passes.schedule.cpu.programs import schedule_program
from relaxlite.target import Target
from relaxlite.validation.rounding import _widened_program
from tests.support.native_kernel import NativeKernel

HOST = Target.host()
PORTABLE = Target.parse("llvm -mcpu=x86-64-v3 -mtriple=x86_64-unknown-linux-gnu")
ZEN4 = Target.parse("llvm -mcpu=znver4 -mattr=-sse4a -mtriple=x86_64-unknown-linux-gnu")
INTEL = Target.parse("llvm -mcpu=graniterapids -mtriple=x86_64-unknown-linux-gnu")
TARGETS = [t for t in (HOST, PORTABLE, ZEN4) if t.runs_here]
BF16 = ml_dtypes.bfloat16
N, IDX = SymVar("n"), SymVar("i")
rng = np.random.default_rng(5)
needs_dots = pytest.mark.skipif(not HOST.has("avx512bf16"), reason="this processor has no bfloat16 dot products")


def narrow(value: Value) -> Value:
    return Intrinsic(NARROW, (value,), "bfloat16")


def elementwise(dtypes: tuple[str, ...], result: str, make: Callable[..., Value], lanes: int = 0) -> TensorProgram:
    """out[i] = make(x0[i], ...), scheduled, or over so many lanes."""
    extent = sym(lanes) if lanes else sym(N)
    inputs = [Buffer.of(f"x{k}", (extent,), dtype) for k, dtype in enumerate(dtypes)]
    out = Buffer.of("out", (extent,), result)
    store = Store(out, (IDX,), make(*(x[IDX] for x in inputs)))
    program = TensorProgram(
        (*inputs, out), () if lanes else (N,), For(IDX, extent, store, "vectorized" if lanes else "serial")
    )
    return program if lanes else schedule_program(program, HOST)


def floats(count: int) -> np.ndarray:
    """All kinds, but none below 2**-126, which may become zeros."""
    found = (rng.standard_normal(count) * 10.0 ** rng.integers(-30, 30, count)).astype(np.float32)
    ties = (rng.integers(0x3F00, 0x4200, count).astype(np.uint32) << 16 | 0x8000).view(np.float32)
    special = [np.inf, -np.inf, np.nan, -0.0, 0.0, 3.4e38, -3.4e38, 1 + 2**-8, 1 + 3 * 2**-8, 2.0**-126]
    found = np.where(rng.random(count) < 0.3, ties, found)
    where = rng.random(count) < 0.2
    return np.where(where, rng.choice(np.array(special, np.float32), count), found)


def run(program: TensorProgram, target: Target, *arrays: np.ndarray) -> np.ndarray:
    out = program.outputs[0]
    result = np.zeros(arrays[0].shape, BF16 if out.dtype == "bfloat16" else out.dtype)
    assert NativeKernel(program, target)([*arrays, result], [len(arrays[0])] if program.symbols else []) == 0
    return result


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.cpu)
@pytest.mark.parametrize("lanes", [0, 1, 4, 8, 16, 32, 24])
def test_rounding_is_that_of_a_cast(target: Target, lanes: int) -> None:
    program = elementwise(("float32",), "bfloat16", narrow, lanes)
    for size in (lanes,) if lanes else (0, 1, 15, 16, 17, 70):
        x = floats(size)
        got, want = run(program, target, x), x.astype(BF16)
        np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
        assert np.array_equal(np.signbit(got), np.signbit(want)) or np.isnan(want).any()


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.cpu)
def test_numbers_that_are_too_small_become_zeros_or_stay(target: Target) -> None:
    x = np.tile(np.array([1e-39, -1e-39, 2.0**-127, -(2.0**-133)], np.float32), 8)
    got = run(elementwise(("float32",), "bfloat16", narrow), target, x).astype(np.float32)
    want = x.astype(BF16).astype(np.float32)
    assert np.all((got == want) | (got == 0)) and np.array_equal(np.signbit(got), np.signbit(want))


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.cpu)
@pytest.mark.parametrize("lanes", [0, 1, 8, 16, 32])
def test_pairs_of_rounded_numbers(target: Target, lanes: int) -> None:
    def pair(x: Value, y: Value) -> Value:
        return Intrinsic(PACK_BF16, (narrow(x), narrow(y)), "int32")

    program = elementwise(("float32", "float32"), "int32", pair, lanes)
    for size in (lanes,) if lanes else (0, 1, 16, 33):
        x, y = floats(size), floats(size)
        halves = np.ascontiguousarray(run(program, target, x, y)).view(BF16).reshape(size, 2)
        for got, want in zip(halves.T, (x, y), strict=True):
            np.testing.assert_array_equal(got.astype(np.float32), want.astype(BF16).astype(np.float32))
        plain = np.isfinite(x) & np.isfinite(y)
        want_words = apply_intrinsic(PACK_BF16, (x.astype(BF16), y.astype(BF16)))
        np.testing.assert_array_equal(np.ascontiguousarray(halves).view(np.int32)[plain, 0], want_words[plain])


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.cpu)
@pytest.mark.parametrize("lanes", [0, 1, 16])
def test_sums_are_rounded_before_they_are_paired_or_stored(target: Target, lanes: int) -> None:
    """In registers a sum of bfloat16 has more digits, also behind a cast that changes nothing."""

    def pair(x: Value, y: Value) -> Value:
        return Intrinsic(PACK_BF16, (Binary("add", x, y), y), "int32")

    def again(x: Value, y: Value) -> Value:
        return Cast(Binary("add", x, y), "bfloat16")

    size = lanes or 33
    x, y = (rng.standard_normal(size).astype(BF16) for _ in range(2))
    want = (x.astype(np.float32) + y.astype(np.float32)).astype(BF16)
    words = run(elementwise(("bfloat16",) * 2, "int32", pair, lanes), target, x, y)
    np.testing.assert_array_equal(words, apply_intrinsic(PACK_BF16, (want, y)))
    stored = run(elementwise(("bfloat16",) * 2, "bfloat16", again, lanes), target, x, y)
    np.testing.assert_array_equal(stored.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.cpu)
@pytest.mark.parametrize("lanes", [0, 1, 8, 16, 32])
def test_products_of_pairs(target: Target, lanes: int) -> None:
    def dot(c: Value, a: Value, b: Value) -> Value:
        return Intrinsic(DOT2_PACKED_BF16, (c, a, b), "float32")

    program = elementwise(("float32", "int32", "int32"), "float32", dot, lanes)
    for size in (lanes,) if lanes else (0, 1, 16, 33):
        c = rng.standard_normal(size).astype(np.float32)
        a, b = rng.standard_normal((2, size, 2)).astype(BF16)
        words = [np.ascontiguousarray(x).view(np.int32)[:, 0] for x in (a, b)]
        want = c.astype(np.float64) + (a.astype(np.float64) * b.astype(np.float64)).sum(axis=1)
        np.testing.assert_allclose(run(program, target, c, *words), want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(apply_intrinsic(DOT2_PACKED_BF16, (c, *words)), want, rtol=1e-5, atol=1e-6)


def instructions(program: TensorProgram, target: Target) -> list[str]:
    return re.findall(r"call .*@llvm\.x86\.avx512bf16\.([\w.]*)\(", emit_program("p", program, target))


def test_instructions_are_used_where_the_target_has_them() -> None:
    def pair(x: Value, y: Value) -> Value:
        return Intrinsic(PACK_BF16, (narrow(x), narrow(y)), "int32")

    cases: tuple[tuple[TensorProgram, list[str]], ...] = (
        (elementwise(("float32",), "bfloat16", narrow, 32), ["cvtneps2bf16.512"] * 2),
        (elementwise(("float32",), "bfloat16", narrow, 8), ["cvtneps2bf16.256"]),
        (elementwise(("float32",), "bfloat16", narrow, 4), []),
        (elementwise(("float32",) * 2, "int32", pair, 16), ["cvtne2ps2bf16.512"]),
    )
    for program, wanted in cases:
        assert instructions(program, ZEN4) == wanted
        assert instructions(program, PORTABLE) == []


def test_a_sum_of_products_of_pairs_takes_one_instruction_each() -> None:
    a, b = Buffer.of("a", (N,), "int32"), Buffer.of("b", (N, 16), "int32")
    out, k = Buffer.of("out", (16,), "float32"), SymVar("k")
    dot = Intrinsic(DOT2_PACKED_BF16, (Literal(0.0, "float32"), a[k], b[k, IDX]), "float32")
    body = For(k, sym(N), For(IDX, sym(16), Store(out, (IDX,), dot, "add"), "vectorized"))
    program = TensorProgram((a, b, out), (N,), body)
    text = emit_program("p", program, ZEN4)
    assert instructions(program, ZEN4) == ["dpbf16ps.512"] and "fadd" not in text
    words = rng.standard_normal((34, 2)).astype(BF16).view(np.int32)
    for target in TARGETS:
        got = np.ones(16, np.float32)
        x, y = words[:2, 0].copy(), np.ascontiguousarray(np.tile(words[2:34, 0].reshape(2, 16), 1))
        assert NativeKernel(program, target)([x, y, got], [2]) == 0
        (want,) = run_program(program, [x, y], [2], [np.ones(16, np.float32)])
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


# Stores


def test_a_rounded_value_is_not_rounded_again_when_it_is_stored() -> None:
    once = elementwise(("float32",), "bfloat16", lambda x: Cast(x, "bfloat16"), 16)
    assert emit_program("p", once, PORTABLE).count("fcmp uno") == 1
    x = np.append(floats(15), np.float32(1e-40))  # and small numbers stay, as ever
    for target in TARGETS:
        np.testing.assert_array_equal(run(once, target, x).astype(np.float32), x.astype(BF16).astype(np.float32))
    twice = elementwise(("bfloat16",) * 2, "bfloat16", lambda x, y: Binary("add", x, y), 16)
    assert emit_program("p", twice, PORTABLE).count("fcmp uno") == 1  # a sum in a register has more digits
    a, b = floats(16).astype(BF16), floats(16).astype(BF16)
    with np.errstate(all="ignore"):
        want = (a.astype(np.float32) + b.astype(np.float32)).astype(BF16)
    np.testing.assert_array_equal(run(twice, HOST, a, b).astype(np.float32), want.astype(np.float32))


def two_results(in_place: bool) -> TensorProgram:
    """out = 1 / x, and the same in bfloat16."""
    x, out = (Buffer.of(name, (N,), "float32") for name in ("x", "out"))
    half = Buffer.of("half", (N,), "bfloat16")
    value = Binary("div", Literal(1.0, "float32"), x[IDX])
    stores = (Store(out, (IDX,), value), Store(half, (IDX,), narrow(value)))
    return TensorProgram(
        (x, out, half), (N,), For(IDX, sym(N), Seq(stores[::-1] if in_place else stores)), num_outputs=2
    )


def test_results_that_share_a_value_compute_it_once() -> None:
    assert emit_program("p", two_results(False), ZEN4).count("fdiv") == 1
    x, n = np.linspace(1, 9, 37, dtype=np.float32), 37
    for target in TARGETS:
        out, half = np.zeros(n, np.float32), np.zeros(n, BF16)
        assert NativeKernel(schedule_program(two_results(False), target), target)([x, out, half], [n]) == 0
        np.testing.assert_allclose(out, 1 / x, rtol=1e-6)
        np.testing.assert_array_equal(half.astype(np.float32), out.astype(BF16).astype(np.float32))


def test_results_that_read_each_other_keep_their_order() -> None:
    x, out, other = (Buffer.of(name, (N,), "float32") for name in ("x", "out", "other"))
    value = Binary("div", Literal(1.0, "float32"), x[IDX])
    stores = Seq((Store(out, (IDX,), value), Store(other, (IDX,), Binary("add", value, out[IDX]))))
    program = TensorProgram((x, out, other), (N,), For(IDX, sym(N), stores), num_outputs=2)
    assert sink_aliasable_stores(program).body is program.body
    values, results = np.linspace(1, 2, 19, dtype=np.float32), [np.zeros(19, np.float32) for _ in range(2)]
    assert NativeKernel(program)([values, *results], [19]) == 0
    np.testing.assert_allclose(results[1], 2 / values, rtol=1e-6)


def test_a_result_may_take_over_its_operand_beside_one_of_half_precision() -> None:
    assert in_place_pairs(two_results(False))[0] == ()
    late = sink_aliasable_stores(two_results(False))
    assert in_place_pairs(late)[0] == ((0, 1),)
    scheduled = schedule_program(two_results(False), HOST)
    assert scheduled.attrs["in_place"] == ((0, 1),)
    for n in (1, 16, 37, 200):
        x = np.linspace(1, 9, n, dtype=np.float32)
        memory, half = x.copy(), np.zeros(n, BF16)
        assert NativeKernel(scheduled)([memory, memory, half], [n]) == 0
        np.testing.assert_allclose(memory, 1 / x, rtol=1e-6)
        np.testing.assert_array_equal(half.astype(np.float32), memory.astype(BF16).astype(np.float32))


# Attention


def attention_module(width: int = 32, *, reshapes: bool = True) -> IRModule:
    """Three products, attention in two heads, one product."""
    bb = rl.BlockBuilder()
    b, n = bb.symbol("b"), bb.symbol("n")
    weights = np.random.default_rng(1).standard_normal((4, 2 * width, 2 * width)).astype(np.float32) / 8
    with bb.function(
        "main", x=rl.TensorType.of((b, n, 2 * width), "float32"), bias=rl.TensorType.of((b, 1, 1, n), "float32")
    ) as (x, bias):
        parts = []
        for w in weights[:3]:
            part = bb.emit(ops.matmul(x, Constant.of(w)))
            heads = bb.emit(ops.reshape(part, (b, n, 2, width)))
            parts.append(bb.emit(ops.transpose(heads, axes=(0, 2, 1, 3))))
        q, k, v = parts
        scores = bb.emit(ops.matmul(q, bb.emit(ops.transpose(k, axes=(0, 1, 3, 2)))))
        scores = bb.emit(ops.add(bb.emit(ops.multiply(scores, np.float32(width**-0.5))), bias))
        made = bb.emit(ops.matmul(bb.emit(ops.softmax(scores, axis=-1)), v))
        made = bb.emit(ops.transpose(made, axes=(0, 2, 1, 3)))
        flat = bb.emit(ops.reshape(made, (b, n, 2 * width)))
        bb.result(bb.emit(ops.matmul(flat, Constant.of(weights[3]))))
    return bb.module()


def calls_in(module: IRModule, target: Target, until: str = "eliminate_dead") -> list[Call]:
    names = [step.name for step in default_pipeline()]
    steps = default_pipeline()[: names.index(until) + 1]
    lowered = run_passes(module, steps, PassContext(target, precision="bf16"))
    values = [b.value for b in lowered["main"].body.bindings() if isinstance(b, Let)]
    return [v for v in values if isinstance(v, Call) and isinstance(v.callee, Op)]


def test_attention_is_in_bfloat16_where_that_is_faster() -> None:
    (found,) = [c for c in calls_in(attention_module(), ZEN4) if c.callee.name == "attention"]
    assert found.attrs["rounds"] and found.ty.dtype == "bfloat16"
    casts = [c for c in calls_in(attention_module(), ZEN4) if c.callee.name == "cast"]
    assert [c.attrs["dtype"] for c in casts] == ["bfloat16"] * 4  # of x, q, k and v: the result is narrow already
    (found,) = [c for c in calls_in(attention_module(64), ZEN4) if c.callee.name == "attention"]
    assert found.attrs["rounds"] and found.ty.dtype == "float32"  # for a product of whole numbers, which rounds less
    casts = [c for c in calls_in(attention_module(64), ZEN4) if c.callee.name == "cast"]
    assert [c.attrs["dtype"] for c in casts] == ["bfloat16"] * 3  # of q, k and v
    (found,) = [c for c in calls_in(attention_module(), INTEL) if c.callee.name == "attention"]
    assert not found.attrs["rounds"] and found.ty.dtype == "float32"
    (odd,) = [c for c in calls_in(attention_module(33), ZEN4) if c.callee.name == "attention"]
    assert odd.ty.dtype == "float32"


def test_steps_of_a_decoder_leave_keys_and_values_as_they_are() -> None:
    """Rounding all that came before, for one query, would take longer than it saves."""
    bb = rl.BlockBuilder()
    m, n = bb.symbol("m"), bb.symbol("n")
    lengths = {"q": m, "k": n, "v": n}
    types = {name: rl.TensorType.of((2, length, 32), "float32") for name, length in lengths.items()}
    with bb.function("main", **types) as (q, k, v):
        scores = bb.emit(ops.matmul(q, bb.emit(ops.transpose(k, axes=(0, 2, 1)))))
        bb.result(bb.emit(ops.matmul(bb.emit(ops.softmax(scores, axis=-1)), v)))
    (found,) = [c for c in calls_in(bb.module(), ZEN4) if c.callee.name == "attention"]
    assert found.ty.dtype == "float32" and not found.attrs["rounds"]


@needs_dots
def test_attention_in_bfloat16_is_near_that_in_float32() -> None:
    plain, narrow_one = rl.compile(attention_module()), rl.compile(attention_module(), precision="bf16")
    for b, n in ((1, 1), (2, 3), (1, 16), (3, 17), (1, 49), (2, 64), (1, 97), (1, 200), (0, 5), (2, 0)):
        x = np.random.default_rng(n).standard_normal((b, n, 64)).astype(np.float32)
        bias = np.where(np.random.default_rng(b).random((b, 1, 1, n)) < 0.2, np.float32(-3.4e38), np.float32(0))
        want, got = plain(x, bias), narrow_one(x, bias)
        assert got.dtype == np.float32 and got.shape == want.shape
        assert np.abs(got - want).max(initial=0) <= 0.02 * np.abs(want).max(initial=0.01)


@needs_dots
def test_attention_in_bfloat16_notices_nan_and_ignores_what_is_beyond_the_keys() -> None:
    exe = rl.compile(attention_module(), precision="bf16")
    x = np.random.default_rng(0).standard_normal((1, 70, 64)).astype(np.float32)
    bias = np.zeros((1, 1, 1, 70), np.float32)
    x[0, 69] = np.nan
    assert np.isnan(exe(x, bias)).all()
    x = np.random.default_rng(0).standard_normal((1, 70, 64)).astype(np.float32)
    first = exe(x, bias)
    exe(np.full_like(x, np.nan), bias)
    np.testing.assert_array_equal(exe(x, bias), first)  # nothing of the call before is left


def test_programs_of_pairs_can_be_widened() -> None:
    """What validation compares with is the program in float64, but for bits."""
    call = next(c for c in calls_in(attention_module(), ZEN4) if c.callee.name == "attention")
    bb = rl.BlockBuilder()
    n = bb.symbol("n")
    types = {name: rl.TensorType.of((n, 16), "bfloat16") for name in "qkv"}
    with bb.function("main", **types) as (q, k, v):
        bb.result(bb.emit(get_op("attention")(q, k, v, scale=call.attrs["scale"], rounds=True)))
    names = [step.name for step in default_pipeline()]
    lowered = run_passes(bb.module(), default_pipeline()[: names.index("legalize") + 1], PassContext(ZEN4))
    (program,) = lowered.programs().values()
    arrays = [np.random.default_rng(k).standard_normal((21, 16)).astype(BF16) for k in range(3)]
    (narrow_one,) = run_program(program, arrays, [21])
    (wide,) = run_program(_widened_program(program), [a.astype(np.float64) for a in arrays], [21])
    np.testing.assert_allclose(wide, narrow_one.astype(np.float64), rtol=3e-2, atol=3e-2)


@needs_dots
def test_validation_accepts_attention_in_bfloat16() -> None:
    context = PassContext(HOST)
    inputs = [
        (np.random.default_rng(n).standard_normal((2, n, 16)).astype(np.float32), np.zeros((2, 1, 1, n), np.float32))
        for n in (1, 6, 17)
    ]
    rl.compile(attention_module(8), precision="bf16", validate=inputs, context=context)
    taken = [d for d in context.decisions if d.step == "narrow_attention"]
    assert [d.taken for d in taken] == [True] * HOST.has_fast_bf16_dots
