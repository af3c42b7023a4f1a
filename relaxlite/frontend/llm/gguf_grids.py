"""Decoders of GGUF's formats of one to three bits a weight: rows of a codebook (IQ1, IQ2, IQ3) or ternary (TQ).

A row of the codebook (groups of 4 or 8 weights; llama.cpp: "grid") holds magnitudes, with sign bits beside it, or
ternary digits, with a bit that shifts all of them by an eighth up or down. Each weight thus is one of at most 8 or 16
numbers, exactly encoded as a scalar code of 3 or 4 bits: the index of the magnitude, then the bit. Weights are kept in
such codes as IQ4_NL is (gguf_blocks.py), in 3.4 to 4.8 bits. The codebooks are read from the `gguf` package, which
other formats do not need; llama.cpp has them in ggml-common.h.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import numpy as np

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.quantized import GroupScales, repeat_scale, unpack_nibbles
from relaxlite.ir.ops.block_codes import Coding

Array: TypeAlias = "np.ndarray[Any, Any]"
_Parts: TypeAlias = "tuple[Array, GroupScales, GroupScales | None]"  # codes, scales, offsets

_EIGHT, _FOUR = np.arange(8, dtype=np.uint8), np.arange(4, dtype=np.uint8)


def _signed(*magnitudes: int) -> Coding:
    """Build the coding of an index into `magnitudes` with a sign bit above it."""
    zero, bits = max(magnitudes), (2 * len(magnitudes) - 1).bit_length()
    padding = (zero,) * ((1 << bits - 1) - len(magnitudes))
    return Coding(bits, zero, (*(zero + m for m in magnitudes), *padding, *(zero - m for m in magnitudes), *padding))


IQ2 = _signed(8, 25, 43)
IQ3_XXS = _signed(4, 12, 20, 28, 36, 44, 52, 62)
IQ3_S = _signed(1, 3, 5, 7, 9, 11, 13, 15)
IQ1 = Coding(3, 9, (2, 10, 18, 9, 0, 8, 16, 9))
"""Eight times -1, 0, 1; an eighth is added to codes below 4 and subtracted from the others."""
TERNARY = Coding(2, 1)


@cache
def _grid(name: str) -> Array:
    """Load the codebook of a format: rows of indices into its magnitudes, or of digits.

    Raises ImportModelError if the package `gguf` is not installed.
    """
    try:
        from gguf import quants  # a slow import that only these formats need
    except ImportError as error:
        raise ImportModelError(
            f"weights of type {name} are rows of a grid, which the Python package gguf has ({error}); "
            "`pip install 'relaxlite[gguf]'` adds it"
        ) from error
    kind = getattr(quants, name)
    kind.init_grid()
    return np.searchsorted(np.asarray(kind.grid_map), kind.grid.reshape(kind.grid_shape)).astype(np.uint8)


@cache
def _parities() -> Array:
    """Tabulate eight sign bits for seven stored bits, [128, 8]: their parity is even."""
    bits = np.unpackbits(np.arange(128, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    bits[:, 7] = bits.sum(axis=1) % 2
    return bits


def _bits(packed: Array) -> Array:
    """Unpack bytes [count, b] to bits [count, b, 8], lowest first."""
    return np.unpackbits(packed[..., None], axis=-1, bitorder="little")


def _with_bit(indices: Array, bit: Array, coding: Coding) -> Array:
    """Combine indices and the bit of each weight to codes."""
    return indices | bit << np.uint8(coding.bits - 1)


def _view(blocks: Array, start: int, end: int, dtype: str) -> Array:
    """Return bytes `start` to `end` of each block as numbers of `dtype`."""
    return np.ascontiguousarray(blocks[:, start:end]).view(dtype)


def _odd_scales(numbers: Array, blocks: Array, eighths: int) -> GroupScales:
    """Return scales d * (2 * number + 1) * eighths / 8 for the float16 d at the beginning of each block.

    Factors are float32 unless `eighths` is 8: d / 8 would lose bits of a small d in float16.
    """
    return _odd_scales_of(numbers, _view(blocks, 0, 2, "<f2"), eighths)


def _odd_scales_of(numbers: Array, d: Array, eighths: int) -> GroupScales:
    factors = d if eighths == 8 else d.astype(np.float32) * np.float32(eighths / 8)
    return GroupScales((2 * numbers + 1).astype(np.uint8), factors)


def _seven_bits(packed: Array) -> Array:
    """Unpack signs [count, n, 4, 8] of four runs of 8 weights from the lower 28 bits of uint32 [count, n]."""
    indices = packed[..., None] >> np.array([0, 7, 14, 21], np.uint32) & np.uint32(127)
    return _parities()[indices]


def iq2_xxs(blocks: Array) -> _Parts:
    """Decode IQ2_XXS."""
    packed = _view(blocks, 2, 66, "<u4").reshape(-1, 8, 2)
    rows = np.ascontiguousarray(packed[..., 0]).view(np.uint8).reshape(-1, 8, 4)
    return (
        _with_bit(_grid("IQ2_XXS")[rows], _seven_bits(packed[..., 1]), IQ2),
        _odd_scales(packed[..., 1] >> 28, blocks, 1),
        None,
    )


def iq2_xs(blocks: Array) -> _Parts:
    """Decode IQ2_XS."""
    packed = _view(blocks, 2, 66, "<u2")
    return (
        _with_bit(_grid("IQ2_XS")[packed & 511], _parities()[packed >> 9], IQ2),
        _odd_scales(unpack_nibbles(blocks[:, 66:]), blocks, 1),
        None,
    )


def iq2_s(blocks: Array) -> _Parts:
    """Decode IQ2_S."""
    high = (blocks[:, 66:74, None] >> 2 * _FOUR & 3).reshape(-1, 32).astype(np.uint16)
    rows = blocks[:, 2:34] | high << np.uint16(8)
    return (
        _with_bit(_grid("IQ2_S")[rows], _bits(blocks[:, 34:66]), IQ2),
        _odd_scales(unpack_nibbles(blocks[:, 74:]), blocks, 1),
        None,
    )


def iq3_xxs(blocks: Array) -> _Parts:
    """Decode IQ3_XXS."""
    packed = _view(blocks, 66, 98, "<u4")
    magnitudes = _grid("IQ3_XXS")[blocks[:, 2:66]].reshape(-1, 8, 4, 8)
    return _with_bit(magnitudes, _seven_bits(packed), IQ3_XXS), _odd_scales(packed >> 28, blocks, 2), None


def iq3_s(blocks: Array) -> _Parts:
    """Decode IQ3_S."""
    high = (blocks[:, 66:74, None] >> _EIGHT & 1).reshape(-1, 64).astype(np.uint16)
    magnitudes = _grid("IQ3_S")[blocks[:, 2:66] | high << np.uint16(8)].reshape(-1, 32, 8)
    return (
        _with_bit(magnitudes, _bits(blocks[:, 74:106]), IQ3_S),
        _odd_scales(unpack_nibbles(blocks[:, 106:]), blocks, 8),
        None,
    )


def iq1_s(blocks: Array) -> _Parts:
    """Decode IQ1_S."""
    packed = _view(blocks, 34, 50, "<u2")
    high = packed[..., None] >> np.uint16(3) * _FOUR & np.uint16(7)
    digits = _grid("IQ1_S")[blocks[:, 2:34].reshape(-1, 8, 4) | high << np.uint16(8)]
    shift_bits = (packed >> 15).astype(np.uint8)[:, :, None, None]
    return _with_bit(digits, shift_bits, IQ1), _odd_scales(packed >> 12 & 7, blocks, 1), None


def iq1_m(blocks: Array) -> _Parts:
    """Decode IQ1_M; the float16 of a block is in the upper nibbles of the four uint16 that hold its scales."""
    packed = _view(blocks, 48, 56, "<u2")
    d = ((packed >> 12) << np.array([0, 4, 8, 12], np.uint16)).sum(axis=1, dtype=np.uint16)
    scales = (packed[..., None] >> np.uint16(3) * _FOUR & np.uint16(7)).reshape(-1, 16)
    high = unpack_nibbles(blocks[:, 32:48])
    digits = _grid("IQ1_M")[blocks[:, :32] | (high & 7).astype(np.uint16) << np.uint16(8)]
    return _with_bit(digits, (high >> 3)[..., None], IQ1), _odd_scales_of(scales, d.view(np.float16)[:, None], 1), None


def tq1_0(blocks: Array) -> _Parts:
    """Decode TQ1_0: five ternary digits in a byte.

    A byte is a fraction of 256: the integer part of three times a fraction is a digit, the rest the next fraction.
    """

    def digits(start: int, end: int, count: int) -> Array:
        powers = np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
        return (blocks[:, None, start:end] * powers).reshape(len(blocks), -1)

    fractions = np.concatenate([digits(0, 32, 5), digits(32, 48, 5), digits(48, 52, 4)], axis=1)
    return (
        (fractions.astype(np.uint16) * 3 >> 8).astype(np.uint8),
        repeat_scale(_view(blocks, 52, 54, "<f2"), 8),
        None,
    )


def tq2_0(blocks: Array) -> _Parts:
    """Decode TQ2_0."""
    codes = blocks[:, :64].reshape(-1, 2, 1, 32) >> 2 * _FOUR[:, None] & 3
    return codes, repeat_scale(_view(blocks, 64, 66, "<f2"), 8), None
