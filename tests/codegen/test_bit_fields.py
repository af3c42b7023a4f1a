"""Bits of a word as floats: every field, with and without an offset, and what is no such field."""

from __future__ import annotations

import numpy as np
import pytest

from relaxlite.codegen.llvm import emit_assembly
from relaxlite.ir.program import Binary, Buffer, Cast, For, Literal, Load, Stmt, Store, TensorProgram, Value, seq
from relaxlite.ir.symbolic import SymVar, sym
from relaxlite.target import Target
from tests.support.native_kernel import run

LANES = 16
DOT4_BYTES = np.concatenate([
    np.array([0, -1, 2**31 - 1, -(2**31), 0x55555555, -0x55555556]),
    np.random.default_rng(0).integers(-(2**31), 2**31, LANES - 6),
]).astype(np.int32)  # fmt: skip


def field(word: Value, start: int, mask: int, offset: int) -> Value:
    shifted = Binary("shift_right", word, Literal(start, "int32")) if start else word
    masked = Binary("and", shifted, Literal(mask, "int32"))
    return Binary("sub", masked, Literal(offset, "int32")) if offset else masked


def program(values: list[tuple[int, int, int]], *, narrow: str | None = None) -> TensorProgram:
    """out[n, lane] = float32(narrow(field n of word lane)) for (start, mask, offset) number n."""
    words, out = Buffer.of("words", (LANES,), "int32"), Buffer.of("out", (len(values), LANES), "float32")
    stmts: list[Stmt] = []
    for n, value in enumerate(values):
        lane = SymVar("l", lower=0, upper=LANES - 1)
        number = field(Load(words, (lane,)), *value)
        wide = Cast(Cast(Cast(number, narrow), "int32") if narrow else number, "float32")
        stmts.append(For(lane, sym(LANES), Store(out, (sym(n), lane), wide), "vectorized"))
    return TensorProgram((words, out), (), seq(*stmts))


def expected(values: list[tuple[int, int, int]], narrow: str | None = None) -> np.ndarray:
    found = [((DOT4_BYTES.astype(np.int64) >> s & mask) - offset).astype(np.int32) for s, mask, offset in values]
    return np.array([f.astype(narrow) if narrow else f for f in found]).astype(np.float32)


@pytest.mark.each_value
@pytest.mark.parametrize("cpu", ["", " -mcpu=x86-64-v3", " -mcpu=x86-64-v2"])
@pytest.mark.parametrize("size", [1, 2, 4, 8, 15, 23, 24, 31])
def test_every_field_of_a_word(size: int, cpu: str) -> None:
    mask = (1 << size) - 1
    values = [(s, mask, offset) for s in range(32) for offset in (0, 1 << size - 1, -3)]
    out = np.empty((len(values), LANES), np.float32)
    run(program(values), [DOT4_BYTES, out], target=Target.parse(f"llvm{cpu}"))
    np.testing.assert_array_equal(out, expected(values))


@pytest.mark.parametrize("narrow", ["int8", "uint8", "int16"])
def test_a_narrow_type_between_wraps_what_it_does_not_hold(narrow: str) -> None:
    values = [(s, 255, offset) for s in (0, 3, 8, 20, 24) for offset in (0, 128, 200)]
    out = np.empty((len(values), LANES), np.float32)
    run(program(values, narrow=narrow), [DOT4_BYTES, out])
    np.testing.assert_array_equal(out, expected(values, narrow))


def test_masks_with_holes_are_no_fields() -> None:
    values = [(2, 5, 0), (2, 6, 8)]
    out = np.empty((len(values), LANES), np.float32)
    run(program(values), [DOT4_BYTES, out])
    np.testing.assert_array_equal(out, expected(values))


def test_a_field_takes_no_conversion() -> None:
    target = Target.parse("llvm -mcpu=x86-64-v4")
    assert "vcvtdq2ps" not in emit_assembly({"kernel": program([(8, 15, 8)])}, target)
    assert "vcvtdq2ps" in emit_assembly({"kernel": program([(8, 5, 8)])}, target)
