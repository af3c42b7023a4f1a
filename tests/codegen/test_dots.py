"""Dot products of narrow numbers (ir/intrinsics.py) as machine code, against the interpreter."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from relaxlite.codegen.interpreter import run_program
from relaxlite.codegen.llvm import emit_program
from relaxlite.errors import CodegenError
from relaxlite.ir import scalar_functions
from relaxlite.ir.intrinsics import (
    BITCAST_TO_FLOAT32,
    DOT2_PACKED_INT16,
    DOT4_PACKED_U8S8,
    DOT_PRODUCTS,
    LOOKUP,
    ROUND_TO_INT32,
)
from relaxlite.ir.program import (
    Binary,
    Buffer,
    For,
    IfThenElse,
    Intrinsic,
    Literal,
    Load,
    LoopKind,
    Store,
    TensorProgram,
    Value,
)
from relaxlite.ir.symbolic import SymExpr, SymVar, sym
from relaxlite.passes.loops.transforms import less
from relaxlite.target import Target
from tests.support.native_kernel import NativeKernel

COLUMNS = 40
HOST, PORTABLE = Target.host(), Target.parse("llvm -mcpu=x86-64-v3 -mtriple=x86_64-unknown-linux-gnu")
NARROW = Target.parse("llvm -mcpu=x86-64-v3 -mattr=+avxvnni -mtriple=x86_64-unknown-linux-gnu")
OLD, PLAIN = (Target.parse(f"llvm -mcpu={cpu} -mtriple=x86_64-unknown-linux-gnu") for cpu in ("x86-64-v2", "x86-64"))
WIDTHS: tuple[tuple[int, LoopKind], ...] = (
    (1, "serial"), (7, "serial"), (4, "vectorized"), (8, "vectorized"), (16, "vectorized"), (32, "vectorized"),
    (5, "vectorized"), (3, "unrolled"),
)  # fmt: skip
N, J = SymVar("n"), SymVar("j")


def dot_program(name: str, lanes: int, kind: LoopKind, *, layout: str, is_masked: bool) -> TensorProgram:
    """out[j] = dot(c[j], a, b[.., j]) for `lanes` columns; those from n on are masked. `layout` of b: "beside" each
    other for a column, "apart", or "same" for all columns."""
    dot = DOT_PRODUCTS[name]
    a, c = Buffer.of("a", (dot.length,), dot.a), Buffer.of("c", (COLUMNS,), dot.total)
    out = Buffer.of("out", (COLUMNS,), dot.total)
    shape = {"beside": (COLUMNS, dot.length), "apart": (dot.length, COLUMNS), "same": (dot.length,)}[layout]
    b = Buffer.of("b", shape, dot.b)

    def factor(g: int) -> Load:
        at: dict[str, tuple[int | SymExpr, ...]] = {"beside": (J, g), "apart": (g, J), "same": (g,)}
        return b[at[layout]]

    parts: list[Value] = [c[J], *(a[g] for g in range(dot.length)), *map(factor, range(dot.length))]
    store: Any = Store(out, (J,), Intrinsic(name, tuple(parts), dot.total))
    body = For(J, sym(lanes), IfThenElse(less(J, N), store) if is_masked else store, kind)
    return TensorProgram((a, b, c, out), (N,), body)


def numbers(buffer: Buffer) -> Any:
    rng, shape = np.random.default_rng(len(buffer.name)), tuple(int(d) for d in buffer.shape)
    if buffer.dtype in ("uint8", "int8", "int16", "int32"):
        info = np.iinfo(buffer.dtype)
        return rng.integers(info.min, info.max, shape, buffer.dtype, endpoint=True)
    return rng.standard_normal(shape).astype(ml_dtypes.bfloat16 if buffer.dtype == "bfloat16" else np.float32)


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["beside", "apart", "same"])
@pytest.mark.parametrize("name", DOT_PRODUCTS)
@pytest.mark.parametrize("target", [HOST, PORTABLE], ids=["host", "portable"])
def test_every_layout_and_width(target: Target, name: str, layout: str) -> None:
    if not set(target.required_features) <= set(HOST.required_features):
        pytest.skip("this machine lacks AVX2")
    for lanes, kind in WIDTHS:
        for is_masked in (False, True):
            program = dot_program(name, lanes, kind, layout=layout, is_masked=is_masked)
            arrays = [numbers(b) for b in program.inputs]
            kernel = NativeKernel(program, target)
            for n in (0, 1, 6, COLUMNS):
                got, wanted = (np.zeros(COLUMNS, arrays[2].dtype) for _ in range(2))
                assert kernel([*arrays, got], [n]) == 0
                run_program(program, arrays, [n], [wanted])
                np.testing.assert_array_equal(got, wanted, err_msg=f"{lanes} {kind} {is_masked} {n}")


def words_program(lanes: int, kind: LoopKind, *, a: str, b: str, is_masked: bool) -> TensorProgram:
    """out[j] = dot4_words(c[j], a, b), where each operand is "loaded" for each column, the "same" for all, "made" by
    operations on words, or a "literal"."""
    buffers = {name: Buffer.of(name, (COLUMNS,), "int32") for name in ("a", "bb", "c", "out")}

    def word(buffer: Buffer, how: str) -> Value:
        if how == "literal":
            return Literal(0x7F80FF01, "int32")
        if how == "same":
            return buffer[3]
        loaded = buffer[J]
        half = Binary("and", Binary("shift_right", loaded, Literal(4, "int32")), Literal(0x0F0F0F0F, "int32"))
        return half if how == "made" else loaded

    bounds = Literal(255, "int32"), Literal(128, "int32")
    value = Intrinsic(
        DOT4_PACKED_U8S8, (buffers["c"][J], word(buffers["a"], a), word(buffers["bb"], b), *bounds), "int32"
    )
    store: Any = Store(buffers["out"], (J,), value)
    body = For(J, sym(lanes), IfThenElse(less(J, N), store) if is_masked else store, kind)
    return TensorProgram(tuple(buffers.values()), (N,), body)


@pytest.mark.each_value
@pytest.mark.parametrize("a", ["loaded", "same", "made", "literal"])
@pytest.mark.parametrize("b", ["loaded", "same", "made", "literal"])
@pytest.mark.parametrize("target", [HOST, PORTABLE, NARROW], ids=["host", "portable", "avx2 with vnni"])
def test_words_in_every_form_and_width(target: Target, a: str, b: str) -> None:
    if not target.runs_here:
        pytest.skip("this processor lacks the instructions")
    extremes = [0, -1, 1, 0x7F7F7F7F, 0x80808080 - 2**32, 0x7F80FF01, -(2**31), 2**31 - 1]
    for lanes, kind in WIDTHS:
        for is_masked in (False, True):
            program = words_program(lanes, kind, a=a, b=b, is_masked=is_masked)
            kernel = NativeKernel(program, target)
            arrays = [numbers(buffer) for buffer in program.inputs]
            for k, array in enumerate(arrays):  # each extreme of a meets each of b
                array[:32] = np.resize(np.roll(np.repeat(extremes, 1 + 3 * (k == 0)), k), 32)
            for n in (0, 1, 6, COLUMNS):
                got, wanted = np.zeros((2, COLUMNS), np.int32)
                assert kernel([*arrays, got], [n]) == 0
                run_program(program, arrays, [n], [wanted])
                np.testing.assert_array_equal(got, wanted, err_msg=f"{lanes} {kind} {is_masked} {n}")


def of_halves(lanes: int, kind: LoopKind, *, is_masked: bool) -> TensorProgram:
    """out[j] = dot2_halves(c[j], a[j] + b[3], b[j])"""
    a, b, c, out = (Buffer.of(name, (COLUMNS,), "int32") for name in ("a", "bb", "c", "out"))
    value = Intrinsic(DOT2_PACKED_INT16, (c[J], Binary("add", a[J], b[3]), b[J]), "int32")
    store: Any = Store(out, (J,), value)
    body = For(J, sym(lanes), IfThenElse(less(J, N), store) if is_masked else store, kind)
    return TensorProgram((a, b, c, out), (N,), body)


@pytest.mark.parametrize("target", [HOST, PORTABLE, OLD, PLAIN], ids=["host", "portable", "ssse3", "sse2"])
def test_halves_of_words_in_every_width(target: Target) -> None:
    if not target.runs_here:
        pytest.skip("this processor lacks the instructions")
    extremes = [0, -1, 1, 0x7FFF7FFF, 0x80008000 - 2**32, 0x7FFF8000, -(2**31), 2**31 - 1]
    for lanes, kind in WIDTHS:
        for is_masked in (False, True):
            program = of_halves(lanes, kind, is_masked=is_masked)
            kernel = NativeKernel(program, target)
            arrays = [numbers(buffer) for buffer in program.inputs]
            for k, array in enumerate(arrays):
                array[4:36] = np.resize(np.roll(np.repeat(extremes, 1 + 3 * (k == 0)), k), 32)
            for n in (0, 1, 6, COLUMNS):
                got, wanted = np.zeros((2, COLUMNS), np.int32)
                assert kernel([*arrays, got], [n]) == 0
                run_program(program, arrays, [n], [wanted])
                np.testing.assert_array_equal(got, wanted, err_msg=f"{lanes} {kind} {is_masked} {n}")


@pytest.mark.parametrize("target", [HOST, PORTABLE, OLD, PLAIN], ids=["host", "portable", "ssse3", "sse2"])
def test_the_nearest_integers_of_floats_and_what_int32_does_not_hold(target: Target) -> None:
    if not target.runs_here:
        pytest.skip("this processor lacks the instructions")
    x, out = Buffer.of("x", (COLUMNS,), "float32"), Buffer.of("out", (COLUMNS,), "int32")
    limits = [2.0**31, -(2.0**31), np.nextafter(np.float32(2.0**31), np.float32(0)), 3e9, -3e9, 1e30, np.inf, np.nan]
    values = np.array(
        [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49999997, -0.0, 1e-42, *limits, -np.inf, 8388609.0], np.float32
    )
    values = np.resize(values, COLUMNS)
    is_held = np.abs(values) < 2.0**31
    wanted = np.where(is_held, np.rint(np.where(is_held, values, 0)), -(2.0**31)).astype(np.int32)
    for lanes, kind in WIDTHS:
        store: Any = Store(out, (J,), Intrinsic(ROUND_TO_INT32, (x[J],), "int32"))
        for start in range(0, COLUMNS - lanes + 1, 7):
            shifted = replace(store, value=Intrinsic(ROUND_TO_INT32, (x[J + start],), "int32"))
            program = TensorProgram((x, out), (N,), For(J, sym(lanes), shifted, kind))
            got, found = np.zeros((2, COLUMNS), np.int32)
            assert NativeKernel(program, target)([values, got], [COLUMNS]) == 0
            run_program(program, [values], [COLUMNS], [found])
            np.testing.assert_array_equal(got[:lanes], wanted[start : start + lanes], err_msg=f"{lanes} {kind} {start}")
            np.testing.assert_array_equal(found[:lanes], wanted[start : start + lanes])


@pytest.mark.parametrize("target", [HOST, PORTABLE, OLD, PLAIN], ids=["host", "avx2", "ssse3", "portable"])
def test_floats_of_bits_in_every_form_and_width(target: Target) -> None:
    if not target.runs_here:
        pytest.skip("this processor lacks the instructions")
    x, out = Buffer.of("x", (COLUMNS,), "int32"), Buffer.of("out", (COLUMNS,), "float32")
    some = [0, -1, 1, 0x4B400000, 0x4B400000 - 7, 0x7F800000, -(2**31), 0x3F800000]
    bits = np.resize(np.array(some, np.int32), COLUMNS)
    for lanes, kind in WIDTHS:
        store = Store(out, (J,), Intrinsic(BITCAST_TO_FLOAT32, (x[J],), "float32"))
        program = TensorProgram((x, out), (N,), For(J, sym(lanes), store, kind))
        got, found = np.zeros((2, COLUMNS), np.float32)
        assert NativeKernel(program, target)([bits, got], [COLUMNS]) == 0
        run_program(program, [bits], [COLUMNS], [found])
        for made in (got, found):
            np.testing.assert_array_equal(made[:lanes].view(np.int32), bits[:lanes], err_msg=f"{lanes} {kind}")


def test_a_multiply_add_of_float32_is_rounded_once_by_the_interpreter() -> None:
    """(2**23 + 2**22 + 5) * 1.5 - (2**23 + 2**22) * 1.5, where the product has 25 bits."""
    x = tuple(np.float32([v]) for v in (12582917, 1.5, -18874368))
    np.testing.assert_array_equal(scalar_functions.apply_intrinsic("fma", x), np.float32([7.5]))


TABLE = np.array([7, 255, 0, 128, 1, 127, 200, 3, 9, 250, 66, 65, 64, 63, 129, 2], np.uint8)


def lookup_program(lanes: int, kind: LoopKind, how: str, is_masked: bool) -> TensorProgram:
    """out[j] = lookup_bytes(a, TABLE), where a is "loaded" for each column, the "same" for all, or a "literal"."""
    a, out = (Buffer.of(name, (COLUMNS,), "int32") for name in ("a", "out"))
    word = {"loaded": a[J], "same": a[3], "literal": Literal(0x0F00030A, "int32")}[how]
    table = (Literal(entries, "int32") for entries in TABLE.view("<i4").tolist())
    store: Any = Store(out, (J,), Intrinsic(LOOKUP, (word, *table), "int32"))
    body = For(J, sym(lanes), IfThenElse(less(J, N), store) if is_masked else store, kind)
    return TensorProgram((a, out), (N,), body)


@pytest.mark.each_value
@pytest.mark.parametrize("how", ["loaded", "same", "literal"])
@pytest.mark.parametrize("target", [HOST, PORTABLE, OLD, PLAIN], ids=["host", "avx2", "ssse3", "portable"])
def test_bytes_are_looked_up_in_every_form_and_width(target: Target, how: str) -> None:
    if not target.runs_here:
        pytest.skip("this processor lacks the instructions")
    places = np.random.default_rng(0).integers(0, 16, (COLUMNS, 4)).astype(np.uint8)
    words = places.view("<i4").reshape(-1)
    given = {"loaded": places, "same": places[3:4], "literal": np.uint8([[10, 3, 0, 15]])}[how]
    for lanes, kind in WIDTHS:
        for is_masked in (False, True):
            program = lookup_program(lanes, kind, how, is_masked)
            kernel = NativeKernel(program, target)
            for n in (0, 1, 6, COLUMNS):
                got, wanted = np.zeros((2, COLUMNS), np.int32)
                assert kernel([words, got], [n]) == 0
                run_program(program, [words], [n], [wanted])
                np.testing.assert_array_equal(got, wanted, err_msg=f"{lanes} {kind} {is_masked} {n}")
                count = min(lanes, n) if is_masked else lanes
                looked = np.broadcast_to(TABLE[given], (COLUMNS, 4))[:count]
                np.testing.assert_array_equal(wanted[:count].view(np.uint8).reshape(-1, 4), looked)


@pytest.mark.parametrize(
    ("target", "instruction"),
    [
        ("-mcpu=znver4", "avx512.pshuf.b.512"),
        ("-mcpu=x86-64-v3", "avx2.pshuf.b"),
        ("-mcpu=x86-64-v2", "ssse3.pshuf.b.128"),
        ("-mcpu=x86-64", ""),
        ("-mcpu=neoverse-n1 -mtriple=aarch64-unknown-linux-gnu", ""),
    ],
)
def test_lookups_are_shuffles_where_the_target_has_them(target: str, instruction: str) -> None:
    triple = "" if "mtriple" in target else " -mtriple=x86_64-unknown-linux-gnu"
    text = emit_program("p", lookup_program(16, "vectorized", "loaded", False), Target.parse(f"llvm {target}{triple}"))
    found = set(re.findall(r"call .*@llvm\.x86\.(\S*pshuf[^(]*)", text))
    assert found == ({instruction} if instruction else set())


def test_a_table_must_be_known_when_code_is_made() -> None:
    a, out = (Buffer.of(name, (COLUMNS,), "int32") for name in ("a", "out"))
    value = Intrinsic(LOOKUP, (a[0],) * 5, "int32")
    with pytest.raises(CodegenError, match="the table of lookup_bytes must be literals"):
        emit_program("p", TensorProgram((a, out), (), Store(out, (sym(0),), value)), HOST)


def test_words_are_unsigned_and_signed_bytes_and_sums_wrap() -> None:
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(-(2**31), 2**31, 500).astype(np.int32) for _ in range(3))
    a[:4], b[:4], c[:4] = -1, (-0x7F7F7F80, 0x7F7F7F7F, -1, 0), (-(2**31), 2**31 - 1, 0, 5)  # bytes of b: -128, 127, -1
    bytes_of_a, bytes_of_b = a.view(np.uint8).reshape(-1, 4), b.view(np.int8).reshape(-1, 4)
    exact = c + (bytes_of_a.astype(np.int64) * bytes_of_b).sum(axis=1)
    assert exact[:4].tolist() == [-(2**31) - 4 * 255 * 128, 2**31 - 1 + 4 * 255 * 127, -4 * 255, 5]
    bounds = np.full(500, 255, np.int32), np.full(500, 128, np.int32)
    found = scalar_functions.apply_intrinsic(DOT4_PACKED_U8S8, (c, a, b, *bounds))
    np.testing.assert_array_equal(found, exact.astype(np.int32))


@pytest.mark.parametrize(
    ("target", "instructions"),
    [
        ("-mcpu=znver4", ["@llvm.x86.avx512.vpdpbusd.512"] * 2),
        ("-mcpu=cascadelake", ["@llvm.x86.avx512.vpdpbusd.512"] * 2),
        ("-mcpu=x86-64-v3 -mattr=+avxvnni", ["@llvm.x86.avx512.vpdpbusd.256"] * 4),
        ("-mcpu=alderlake", ["@llvm.x86.avx512.vpdpbusd.256"] * 4),
        ("-mcpu=x86-64-v3", [*["@llvm.x86.avx2.pmadd.ub.sw"] * 2, *["@llvm.x86.avx2.pmadd.wd"] * 2] * 4),
        ("-mcpu=x86-64", []),
    ],
)
def test_instructions_for_words(target: str, instructions: list[str]) -> None:
    machine = Target.parse(f"llvm {target} -mtriple=x86_64-unknown-linux-gnu")
    program = words_program(32, "vectorized", a="made", b="same", is_masked=False)
    assert re.findall(r"call .*(@llvm\.x86[\w.]*)\(", emit_program("p", program, machine)) == instructions
    assert machine.has_dp4a == any("vpdpbusd" in name for name in instructions)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("most", "most_b"),
    [
        *((most, 128) for most in (1, 15, 31, 63, 64, 127, 128, 255)),
        *((255, most) for most in (1, 8, 21, 22, 32, 33, 64, 65, 127)),
        (127, 127),
        (128, 127),
    ],
)
@pytest.mark.parametrize("cpu", ["x86-64-v2", "x86-64-v3", "skylake-avx512", "znver4 -mattr=-sse4a"])
def test_chains_of_products_of_small_numbers_are_exact(cpu: str, most: int, most_b: int) -> None:
    """Sums of pairs in 16 bits are never cut off, and no longer chain than fits is summed there."""
    target, count = Target.parse(f"llvm -mcpu={cpu} -mtriple=x86_64-unknown-linux-gnu"), 20
    if not target.runs_here:
        pytest.skip("this processor lacks the instructions")
    a, b = (Buffer.of(name, (count, COLUMNS), "int32") for name in ("a", "bb"))
    c, out = (Buffer.of(name, (COLUMNS,), "int32") for name in ("c", "out"))
    value: Value = c[J]
    for k in range(count):
        bounds = Literal(most, "int32"), Literal(most_b, "int32")
        value = Intrinsic(DOT4_PACKED_U8S8, (value, a[k, J], b[k, J], *bounds), "int32")
    program = TensorProgram((a, b, c, out), (N,), For(J, sym(COLUMNS), Store(out, (J,), value), "vectorized"))
    rng = np.random.default_rng(most)
    codes = rng.integers(0, most + 1, (count, COLUMNS, 4)).astype(np.uint8)
    factors = rng.integers(-most_b, min(most_b, 127) + 1, (count, COLUMNS, 4)).astype(np.int8)
    codes[:, ::2], factors[:, ::4], factors[:, 2::4] = most, -most_b, min(most_b, 127)
    start = rng.integers(-(2**31), 2**31, COLUMNS).astype(np.int32)
    got = np.zeros(COLUMNS, np.int32)
    words = [np.ascontiguousarray(x).view(np.int32)[..., 0] for x in (codes, factors)]
    assert NativeKernel(program, target)([*words, start, got], [0]) == 0
    wanted = start + (codes.astype(np.int64) * factors).sum(axis=(0, 2))
    np.testing.assert_array_equal(got, wanted.astype(np.int32))


@pytest.mark.parametrize(
    "cpu, name, instruction",
    [
        ("znver4", "dot2_bf16", "@llvm.x86.avx512bf16.dpbf16ps.512"),
        ("znver4", "dot4_u8s8", "@llvm.x86.avx512.vpdpbusd.512"),
        ("cascadelake", "dot4_u8s8", "@llvm.x86.avx512.vpdpbusd.512"),
        ("cascadelake", "dot2_bf16", None),
        ("x86-64-v3", "dot4_u8s8", None),
        ("x86-64-v3", "dot2_bf16", None),
    ],
)
def test_instructions_are_used_where_the_target_has_them(cpu: str, name: str, instruction: str | None) -> None:
    target = Target.parse(f"llvm -mcpu={cpu} -mtriple=x86_64-unknown-linux-gnu")
    text = emit_program("p", dot_program(name, 32, "vectorized", layout="beside", is_masked=False), target)
    calls = re.findall(r"call .*(@llvm\.x86[\w.]*)\(", text)
    assert calls == ([instruction] * 2 if instruction else [])


def test_sums_of_bytes_wrap() -> None:
    total = np.array(2**31 - 1, np.int32)
    args = (total, *[np.uint8(255)] * 4, *[np.int8(127)] * 4)
    assert scalar_functions.apply_intrinsic("dot4_u8s8", args) == np.int32(2**31 - 1 + 4 * 255 * 127 - 2**32)


def test_what_is_rounded_in_a_sum_of_two_products() -> None:
    """First the second product is added, then the first; each sum is rounded, the products are not."""
    bf16 = ml_dtypes.bfloat16
    for c, (a0, a1), (b0, b1), wanted in (
        (2.0**24, (1.0, 1.0), (1.0, 1.0), 2.0**24),  # each 1 is lost on its own
        (0.0, (2.0**24, 1.0), (1.0, 1.0), 2.0**24),
        (-(2.0**24), (1.0, 2.0**24), (1.0, 1.0), 1.0),  # cancelled first, so the 1 stays
        (1.0, (1.0 + 2.0**-7, 0.0), (1.0 + 2.0**-7, 0.0), 1 + (1 + 2.0**-7) ** 2),
        (np.inf, (1.0, 1.0), (1.0, 1.0), np.inf),
        (np.inf, (np.inf, 1.0), (-1.0, 1.0), np.nan),
    ):
        args = (np.float32(c), bf16(a0), bf16(a1), bf16(b0), bf16(b1))
        np.testing.assert_array_equal(scalar_functions.apply_intrinsic("dot2_bf16", args), np.float32(wanted))
        program = dot_program("dot2_bf16", 16, "vectorized", layout="beside", is_masked=False)
        out = np.zeros(COLUMNS, np.float32)
        inputs = [np.array([a0, a1], bf16), np.array([[b0, b1]] * COLUMNS, bf16), np.full(COLUMNS, c, np.float32)]
        for target in (HOST, PORTABLE):
            if set(target.required_features) <= set(HOST.required_features):
                assert NativeKernel(program, target)([*inputs, out], [0]) == 0
                np.testing.assert_array_equal(out[:16], np.float32(wanted))


def test_unknown_intrinsics_are_named() -> None:
    out = Buffer.of("out", (1,), "float32")
    value = Intrinsic("sad", (Literal(0.0, "float32"),), "float32")
    with pytest.raises(
        CodegenError, match="unknown intrinsic 'sad'; known: fma, dot4_words, lookup_bytes, word, dot4_u8s8, dot2_i16,"
    ):
        emit_program("p", TensorProgram((out,), (), Store(out, (sym(0),), value)), HOST)
    with pytest.raises(TypeError, match="unknown intrinsic 'sad'"):
        scalar_functions.apply_intrinsic("sad", (np.float32(0),))
