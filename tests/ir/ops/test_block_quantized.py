"""The ops on weights in blocks: how codes are packed, what is refused, and numbers at the edges of what floats hold."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.errors import RelaxliteError
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Var
from relaxlite.ir.op import get_op
from relaxlite.ir.ops.block_codes import (
    BIT_PLANES,
    Coding,
    count_words,
    fills_words,
    hadamard_transform,
    pack_codes,
    rows_per_run,
    unpack_codes,
)
from relaxlite.ir.ops.block_quantized import MAX_BLOCK_ROWS
from relaxlite.ir.symbolic import SymVar
from relaxlite.ir.types import TensorType, Type
from relaxlite.runtime.module import Executable

M, N, K = (SymVar(name) for name in "mnk")


@pytest.mark.parametrize("bits", BIT_PLANES)
@pytest.mark.parametrize("block", [8, 16, 24, 32, 64, 96])
def test_codes_come_back_and_lie_as_documented(bits: int, block: int) -> None:
    run = rows_per_run(block, bits)
    rows = 3 * run
    assert run == math.lcm(block, {1: 32, 2: 16, 3: 32, 4: 8, 5: 32, 6: 16, 8: 4}[bits])
    assert fills_words(rows, block, bits) and fills_words(rows + block, block, bits) != (run > block)
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (rows, 7)).astype(np.uint8)
    words = pack_codes(codes, block, bits)
    assert words.dtype == np.int32 and words.shape == (3 * count_words(run, bits), 7)
    np.testing.assert_array_equal(unpack_codes(words, block, bits), codes)
    for row in range(rows):
        quad, byte = divmod(row % run, 4)
        of_run = words.reshape(3, -1, 7)[row // run].view(np.uint32)
        found, first, low = np.zeros(7, np.uint32), 0, 0
        for width in BIT_PLANES[bits]:
            word, place = divmod(quad, 8 // width)
            found |= (of_run[first + word] >> 8 * byte + width * place & (1 << width) - 1) << low
            first, low = first + run * width // 32, low + width
        np.testing.assert_array_equal(found, codes[row])


# Errors


def f32(*shape: Any) -> TensorType:
    return TensorType.of(shape, "float32")


def f16(*shape: Any) -> TensorType:
    return TensorType.of(shape, "float16")


def i8(*shape: Any) -> TensorType:
    return TensorType.of(shape, "int8")


def i32(*shape: Any) -> TensorType:
    return TensorType.of(shape, "int32")


# what is wrong with (words, scales, offsets) of a weight, and its attributes
BAD_WEIGHTS: dict[str, tuple[tuple[Type, ...], dict[str, Any], str]] = {
    "floats": ((f32(8, N), f16(2, N)), {},
               "scales float32, float16, bfloat16, or uint8 or int8 with factors, all of rank 2, got (8, n) float32"),
    "double scales": ((i32(8, N), TensorType.of((2, N), "float64")), {}, "got (8, n) int32 and (2, n) float64"),
    "a vector": ((i32(8), f32(2, N)), {}, "all of rank 2, got (8,) int32 and (2, n) float32"),
    "rows that vary": ((i32(K, N), f32(2, N)), {}, "words (k, n) of 4 bits and scales (2, n) do not fit"),
    "blocks that vary": ((i32(8, N), f32(K, N)), {}, "words (8, n) of 4 bits and scales (k, n) do not fit"),
    "no rows": ((i32(0, N), f32(2, N)), {}, "words (0, n) of 4 bits and scales (2, n) do not fit"),
    "parts of blocks": ((i32(8, N), f32(3, N)), {}, "words (8, n) of 4 bits and scales (3, n) do not fit"),
    "other columns": ((i32(8, 5), f32(2, 6)), {}, "words (8, 5) of 4 bits and scales (2, 6) do not fit"),
    "parts of words": ((i32(2, N), f32(4, N)), {}, "16 codes of 4 bits do not fill whole words in blocks of 4 rows"),
    "other offsets": ((i32(8, N), f16(2, N), f32(2, N)), {},
                      "offsets must be like scales, (2, n) float16, got (2, n) float32"),
    "a zero of more bits": ((i32(8, N), f32(2, N)), {"zero": 16}, "zero must be a code, from 0 to 15, got 16"),
    "a zero below": ((i32(8, N), f32(2, N)), {"zero": -1}, "zero must be a code, from 0 to 15, got -1"),
    "a table of 15": (
        (i32(8, N), f32(2, N)), {"table": range(15)}, "a table is 16 bytes for codes of 4 bits, got (0, 1, 2,",
    ),
    "a table of 16 for 3 bits": (
        (i32(6, N), f32(2, N)), {"bits": 3, "table": range(16)}, "a table is 8 bytes for codes of 3 bits, got (0, 1, 2",
    ),
    "a table of words": ((i32(8, N), f32(2, N)), {"table": [256, *range(15)]}, "a table is 16 bytes"),
    "a table for 5 bits": ((i32(5, N), f32(1, N)), {"bits": 5, "table": range(16)},
                           "codes of 5 bits have no table, only those of at most 4 do"),
    "a zero above a table": ((i32(8, N), f32(2, N)), {"table": [3] * 16, "zero": 4}, "from 0 to 3, got 4"),
    "three bits": ((i32(8, N), f32(2, N)), {"bits": 3}, "bits"),
}  # fmt: skip


def refused(op: str, types: tuple[Type, ...], attrs: dict[str, Any]) -> str:
    operands = [Var(f"a{k}", ty) for k, ty in enumerate(types)]
    with pytest.raises(RelaxliteError) as caught:
        get_op(op)(*operands, **attrs)
    assert op in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("op", ["dequantize_blocks", "gather_blocks", "matmul_blocks"])
@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_a_weight_that_is_none_is_refused(name: str, op: str) -> None:
    types, attrs, message = BAD_WEIGHTS[name]
    given = {"gather_blocks": (TensorType.of((M,), "int64"),), "matmul_blocks": (i8(2, M, 32), f32(2, M), i32(2, M))}
    assert message in refused(op, (*given.get(op, ()), *types), {"bits": 4, **attrs})


@pytest.mark.parametrize(
    ("op", "types", "attrs", "message"),
    [
        ("gather_blocks", (f32(M), i32(8, N), f32(2, N)), {"bits": 4},
         "indices must be int32 or int64, got (m,) float32"),
        ("quantize_blocks", (f16(M, 64),), {"block": 32},
         "x must be float32 of rank 2 with a constant last dimension, got (m, 64) float16"),
        ("quantize_blocks", (f32(M, K),), {"block": 32}, "with a constant last dimension, got (m, k) float32"),
        ("quantize_blocks", (f32(64),), {"block": 32}, "x must be float32 of rank 2"),
        ("quantize_blocks", (f32(M, 48),), {"block": 32},
         "rows of 48 are no whole number of blocks of 32, a multiple of 4"),
        ("quantize_blocks", (f32(M, 48),), {"block": 6}, "rows of 48 are no whole number of blocks of 6"),
        ("quantize_blocks", (f32(M, 48),), {"block": 0}, "rows of 48 are no whole number of blocks of 0"),
        ("quantize_blocks", (f32(M, 64),), {"block": 32, "low_bits": 3}, "low_bits"),
        ("matmul_blocks", (f32(2, M, 32), f32(2, M), i32(2, M), i32(8, N), f32(2, N)), {"bits": 4},
         "x, x_scales and x_sums must be as quantize_blocks makes them, got (2, m, 32) float32, (2, m) float32"),
        ("matmul_blocks", (i8(2, 32), f32(2, M), i32(2, M), i32(8, N), f32(2, N)), {"bits": 4},
         "must be as quantize_blocks makes them, got (2, 32) int8"),
        ("matmul_blocks", (i8(3, M, 32), f32(3, M), i32(3, M), i32(8, N), f32(2, N)), {"bits": 4},
         "64 rows in blocks of 32 take x of (2, m, 32) and x_scales and x_sums of (2, m), got (3, m, 32) int8"),
        ("matmul_blocks", (i8(2, M, 32), f32(2, M), i32(2, M), i32(8, N), f32(2, N)), {"bits": 4, "low_bits": 8},
         "take x of (2, m, 64)"),
        ("quantize_blocks", (f32(M, 48),), {"block": 24, "rotation": 4},
         "blocks of 6 quads are no whole number of rotations of 4"),
        ("quantize_blocks", (f32(M, 64),), {"block": 32, "rotation": 3}, "rotation"),
        ("matmul_blocks", (i8(2, M, 32), f32(2, M), i32(2, 2, M), i32(10, N), f32(2, N)), {"bits": 5, "rotation": 16},
         "these codes, mixed 16 quads at a time, are no bytes or no whole blocks; 8"),
        ("matmul_blocks", (i8(2, M, 32), f32(2, M), i32(2, M), i32(8, N), f32(2, N)), {"bits": 4, "rotation": 8},
         "and x_sums of (2, m), of sums two, got"),
        ("matmul_blocks", (i8(2, 5, 32), f32(2, 5), i32(2, 6), i32(8, N), f32(2, N)), {"bits": 4},
         "x_sums of (2, m), got (2, 5, 32) int8, (2, 5) float32, (2, 6) int32"),
    ],
)  # fmt: skip
def test_other_operands_are_refused(op: str, types: tuple[Type, ...], attrs: dict[str, Any], message: str) -> None:
    assert message in refused(op, types, attrs)


# Numbers at the edges


def compiled(op: str, *types: TensorType, **attrs: Any) -> Executable:
    bb = BlockBuilder()
    with bb.function("main", **{f"a{k}": ty for k, ty in enumerate(types)}) as given:
        bb.result(bb.emit(get_op(op)(*given, **attrs)))
    return rl.compile(bb.module())


@pytest.mark.parametrize("low_bits", [0, 4, 8])
def test_blocks_of_any_magnitude_are_rounded_as_the_reference_does(low_bits: int) -> None:
    """From numbers without an inverse, which count as 0, to the largest; NaN and infinity are in the scale."""
    run = compiled("quantize_blocks", f32(M, 32), block=16, low_bits=low_bits)
    x = np.random.default_rng(0).uniform(-1, 1, (90, 32)).astype(np.float32)
    x *= (10.0 ** np.arange(-45, 45))[:, None].clip(0, 3e38)
    x[40, 3], x[41, 17], x[42, 20] = np.nan, np.inf, -np.inf
    x[43], x[44] = 0, np.finfo(np.float32).max
    words, scales, sums = run(x)
    wanted = get_op("quantize_blocks").reference(x, block=16, low_bits=low_bits, rotation=1)
    np.testing.assert_array_equal(words, wanted[0])
    np.testing.assert_array_equal(scales, wanted[1])
    np.testing.assert_array_equal(sums, wanted[2])
    codes = words.reshape(2, 90, -1, 16).astype(np.float64)
    integers = codes[:, :, 0] if not low_bits else codes[:, :, 0] * (1 << low_bits) + codes[:, :, 1]
    np.testing.assert_array_equal(integers.sum(axis=2), sums)
    finite = np.delete(np.arange(90), [40, 41, 42])
    found = (integers[:, finite] * scales[:, finite, None]).swapaxes(0, 1).reshape(len(finite), 32)
    top = abs(x[finite]).reshape(-1, 2, 16).max(axis=2).repeat(16, axis=1)
    step = {0: 0.51 / 127, 4: 0.51 / 127 / 16, 8: 1.01 / 127 / 256}[
        low_bits
    ]  # 128 of the 256th parts are no signed byte: 127 stands for them
    assert (abs(found - x[finite]) <= np.maximum(top * step, 1e-36)).all()
    assert np.isnan(scales[0, 40]) and np.isposinf(scales[1, 41:43]).all()


@pytest.mark.parametrize(("block", "rotation"), [(16, 2), (16, 4), (32, 8), (64, 16), (64, 8)])
def test_mixed_blocks_are_rounded_as_the_reference_does(block: int, rotation: int) -> None:
    """Mixed back, x is there within half a step of each of the T numbers that each of it went into."""
    run = compiled("quantize_blocks", f32(M, 128), block=block, rotation=rotation)
    x = np.random.default_rng(1).standard_normal((7, 128)).astype(np.float32)
    x[3, 5], x[4] = 300, 0
    codes, scales, sums = run(x)
    wanted = get_op("quantize_blocks").reference(x, block=block, low_bits=0, rotation=rotation)
    for got, expected in zip((codes, scales, sums), wanted, strict=True):
        np.testing.assert_array_equal(got, expected)
    quads = codes.astype(np.float64).reshape(128 // block, 7, -1, rotation, 4)
    back = np.stack(hadamard_transform([quads[..., q, :] for q in range(rotation)]), axis=-2).reshape(-1, 7, block)
    found = (back * scales[..., None]).swapaxes(0, 1).reshape(7, 128)
    step = scales.swapaxes(0, 1).repeat(block, axis=1)
    assert (abs(found - x) <= 0.501 * rotation * step).all() and not found[4].any()
    np.testing.assert_array_equal(sums[0] * rotation, back.sum(axis=-1))
    np.testing.assert_array_equal(sums[1], codes.sum(axis=-1, dtype=np.int32))


@pytest.mark.parametrize(
    ("coding", "most"),
    [
        (Coding(4), 16), (Coding(5), 8), (Coding(6), 4), (Coding(8), 1), (Coding(4, 1, (0, 24, *[1] * 14)), 8),
        (Coding(4, 1, (0, 86, *[1] * 14)), 2), (Coding(4, 1, (0, 241, *[1] * 14)), 1),
    ],
    ids=str,
)  # fmt: skip
def test_mixed_codes_stay_bytes(coding: Coding, most: int) -> None:
    """The least and the greatest sums of all patterns of signs, through words."""
    rng = np.random.default_rng(2)
    assert coding.max_rotation(256) == most and coding.max_rotation(24) == math.gcd(6, most)
    mixed = coding.with_rotation(most)
    signs = np.array(hadamard_transform(list(np.eye(most, dtype=np.int64))))
    extremes = [np.where(row * sign > 0, coding.max_value, 0) for row in signs for sign in (1, -1)]
    drawn = [rng.integers(0, coding.max_value + 1, most) for _ in range(20)]
    for codes in [*extremes, *drawn]:
        found = signs @ codes + np.r_[0, [mixed.offset] * (most - 1)] if most > 1 else codes
        assert found.min() >= 0 and found.max() <= mixed.max_value <= 255


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("zero", [0, 255])
def test_sums_of_the_longest_blocks_fit(zero: int, sign: int) -> None:
    """All numbers at their ends: 256 times 255 times 127 + 127/256."""
    block = MAX_BLOCK_ROWS
    codes = np.full((block, 16), 255 - zero, np.uint8)
    numbers = np.full(2 * block, sign * 127, np.int8)
    x = np.broadcast_to(numbers, (1, 3, 2 * block)).copy()
    sums = np.full((1, 3), sign * block * 127 * 257, np.int32)
    scales, one = np.ones((1, 16), np.float32), np.ones((1, 3), np.float32)
    attrs = {"bits": 8, "zero": zero, "low_bits": 8}
    types = (i8(1, M, 2 * block), f32(1, M), i32(1, M), i32(block // 4, 16), f32(1, 16))
    found = compiled("matmul_blocks", *types, **attrs)(x, one, sums, pack_codes(codes, block, 8), scales)
    wanted = sign * block * (255 - 2 * zero) * 127 * 257
    np.testing.assert_array_equal(found, np.full((3, 16), wanted, np.float32))


def test_longer_blocks_are_refused() -> None:
    block = MAX_BLOCK_ROWS + 8
    types = (i8(1, M, block), f32(1, M), i32(1, M), i32(block // 8, N), f32(1, N))
    message = refused("matmul_blocks", types, {"bits": 4})
    assert f"sums of blocks of {block} rows may not fit into 32 bits; at most {MAX_BLOCK_ROWS}" in message
