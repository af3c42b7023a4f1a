"""Dot products of narrow numbers (ir/intrinsics.py) as machine code, against the interpreter."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from relaxlite.codegen import scalar_functions
from relaxlite.codegen.interpreter import run_program
from relaxlite.codegen.llvm import emit_program
from relaxlite.errors import CodegenError
from relaxlite.ir.intrinsics import DOT_PRODUCTS
from relaxlite.ir.program import (
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
from relaxlite.passes.schedule import less
from relaxlite.target import Target
from tests.native_kernel import NativeKernel

COLUMNS = 40
HOST, PORTABLE = Target.host(), Target.parse("llvm -mcpu=x86-64-v3 -mtriple=x86_64-unknown-linux-gnu")
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
    if buffer.dtype in ("uint8", "int8", "int32"):
        info = np.iinfo(buffer.dtype)
        return rng.integers(info.min, info.max, shape, buffer.dtype, endpoint=True)
    return rng.standard_normal(shape).astype(ml_dtypes.bfloat16 if buffer.dtype == "bfloat16" else np.float32)


@pytest.mark.parametrize("layout", ["beside", "apart", "same"])
@pytest.mark.parametrize("name", DOT_PRODUCTS)
@pytest.mark.parametrize("target", [HOST, PORTABLE], ids=["host", "portable"])
def test_every_layout_and_width(target: Target, name: str, layout: str) -> None:
    if not set(target.required_features) <= set(HOST.required_features):
        pytest.skip("this machine lacks AVX2")
    for lanes, kind in ((1, "serial"), (7, "serial"), (4, "vectorized"), (8, "vectorized"), (16, "vectorized"),
                        (32, "vectorized"), (5, "vectorized"), (3, "unrolled")):  # fmt: skip
        for is_masked in (False, True):
            program = dot_program(name, lanes, kind, layout=layout, is_masked=is_masked)  # type: ignore[arg-type]
            arrays = [numbers(b) for b in program.inputs]
            kernel = NativeKernel(program, target)
            for n in (0, 1, 6, COLUMNS):
                got, wanted = (np.zeros(COLUMNS, arrays[2].dtype) for _ in range(2))
                assert kernel([*arrays, got], [n]) == 0
                run_program(program, arrays, [n], [wanted])
                np.testing.assert_array_equal(got, wanted, err_msg=f"{lanes} {kind} {is_masked} {n}")


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
    with pytest.raises(CodegenError, match="unknown intrinsic 'sad'; known: fma, dot4_u8s8, dot2_bf16"):
        emit_program("p", TensorProgram((out,), (), Store(out, (sym(0),), value)), HOST)
    with pytest.raises(TypeError, match="unknown intrinsic 'sad'"):
        scalar_functions.apply_intrinsic("sad", (np.float32(0),))
