"""GGUF's formats of one to three bits a weight: runs of 4 or 8 weights are a row of a grid, or digits.

A row of the grid has magnitudes, and bits beside it the signs; or digits, and a bit says which way all of them are
moved by an eighth. Either is one of at most 8 or 16 numbers for each weight, which codes of 3 or 4 bits and a table say
exactly: the index of the number without its bit, and then this bit. So they are kept as IQ4_NL is (gguf_blocks.py), in
3.4 to 4.8 bits. The grids are those of the `gguf` package, which need not be installed for other formats; llama.cpp
has them in ggml-common.h.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import numpy as np

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.quantized import GroupScales, neighbours, scale_of_groups
from relaxlite.ir.ops.block_codes import Coding

Array: TypeAlias = "np.ndarray[Any, Any]"
_Parts: TypeAlias = "tuple[Array, GroupScales, GroupScales | None]"  # codes, scales, offsets

_EIGHT, _FOUR = np.arange(8, dtype=np.uint8), np.arange(4, dtype=np.uint8)


def _signed(*magnitudes: int) -> Coding:
    """Of places in `magnitudes`, and a bit for the negative ones."""
    zero, bits = max(magnitudes), (2 * len(magnitudes) - 1).bit_length()
    rest = (zero,) * ((1 << bits - 1) - len(magnitudes))
    return Coding(bits, zero, (*(zero + m for m in magnitudes), *rest, *(zero - m for m in magnitudes), *rest))


IQ2 = _signed(8, 25, 43)
IQ3_XXS = _signed(4, 12, 20, 28, 36, 44, 52, 62)
IQ3_S = _signed(1, 3, 5, 7, 9, 11, 13, 15)
IQ1 = Coding(3, 9, (2, 10, 18, 9, 0, 8, 16, 9))
"""Eight times -1, 0, 1, with an eighth added to or, from code 4 on, taken from each."""
TERNARY = Coding(2, 1)


@cache
def _grid(name: str) -> Array:
    """Rows of places in the list of a format's magnitudes, or digits. ImportModelError: the package is missing."""
    try:
        from gguf import quants  # which only these formats need: 0.2 s
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
    """Eight bits of which seven say the last: their number is even."""
    bits = np.unpackbits(np.arange(128, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    bits[:, 7] = bits.sum(axis=1) % 2
    return bits


def _bits(packed: Array) -> Array:
    """Of bytes [count, b]: [count, b, 8]"""
    return np.unpackbits(packed[..., None], axis=-1, bitorder="little")


def _with_bit(places: Array, bit: Array, coding: Coding) -> Array:
    """Codes of places in what a format lists, and of the bit beside them."""
    return places | bit << np.uint8(coding.bits - 1)


def _word(blocks: Array, start: int, end: int, dtype: str) -> Array:
    return np.ascontiguousarray(blocks[:, start:end]).view(dtype)


def _odd(numbers: Array, blocks: Array, eighths: int) -> GroupScales:
    """Scales d * (2 * number + 1) * eighths / 8 for the float16 d that a block begins with. In float32, where that is
    no whole number of d, as float16 would lose bits of a small one."""
    return _odd_of(numbers, _word(blocks, 0, 2, "<f2"), eighths)


def _odd_of(numbers: Array, d: Array, eighths: int) -> GroupScales:
    factors = d if eighths == 8 else d.astype(np.float32) * np.float32(eighths / 8)
    return GroupScales((2 * numbers + 1).astype(np.uint8), factors)


def _seven_bits(words: Array) -> Array:
    """Of words whose lower 28 bits are the signs of four runs, that of each weight [count, words, 4, 8]."""
    places = words[..., None] >> np.array([0, 7, 14, 21], np.uint32) & np.uint32(127)
    return _parities()[places]


def iq2_xxs(blocks: Array) -> _Parts:
    words = _word(blocks, 2, 66, "<u4").reshape(-1, 8, 2)
    rows = np.ascontiguousarray(words[..., 0]).view(np.uint8).reshape(-1, 8, 4)
    return (
        _with_bit(_grid("IQ2_XXS")[rows], _seven_bits(words[..., 1]), IQ2),
        _odd(words[..., 1] >> 28, blocks, 1),
        None,
    )


def iq2_xs(blocks: Array) -> _Parts:
    words = _word(blocks, 2, 66, "<u2")
    return (
        _with_bit(_grid("IQ2_XS")[words & 511], _parities()[words >> 9], IQ2),
        _odd(neighbours(blocks[:, 66:]), blocks, 1),
        None,
    )


def iq2_s(blocks: Array) -> _Parts:
    high = (blocks[:, 66:74, None] >> 2 * _FOUR & 3).reshape(-1, 32).astype(np.uint16)
    rows = blocks[:, 2:34] | high << np.uint16(8)
    return (
        _with_bit(_grid("IQ2_S")[rows], _bits(blocks[:, 34:66]), IQ2),
        _odd(neighbours(blocks[:, 74:]), blocks, 1),
        None,
    )


def iq3_xxs(blocks: Array) -> _Parts:
    words = _word(blocks, 66, 98, "<u4")
    magnitudes = _grid("IQ3_XXS")[blocks[:, 2:66]].reshape(-1, 8, 4, 8)
    return _with_bit(magnitudes, _seven_bits(words), IQ3_XXS), _odd(words >> 28, blocks, 2), None


def iq3_s(blocks: Array) -> _Parts:
    high = (blocks[:, 66:74, None] >> _EIGHT & 1).reshape(-1, 64).astype(np.uint16)
    magnitudes = _grid("IQ3_S")[blocks[:, 2:66] | high << np.uint16(8)].reshape(-1, 32, 8)
    return _with_bit(magnitudes, _bits(blocks[:, 74:106]), IQ3_S), _odd(neighbours(blocks[:, 106:]), blocks, 8), None


def iq1_s(blocks: Array) -> _Parts:
    words = _word(blocks, 34, 50, "<u2")
    high = words[..., None] >> np.uint16(3) * _FOUR & np.uint16(7)
    digits = _grid("IQ1_S")[blocks[:, 2:34].reshape(-1, 8, 4) | high << np.uint16(8)]
    moved = (words >> 15).astype(np.uint8)[:, :, None, None]
    return _with_bit(digits, moved, IQ1), _odd(words >> 12 & 7, blocks, 1), None


def iq1_m(blocks: Array) -> _Parts:
    """The float16 of a block is in the upper nibbles of the four words of its scales."""
    words = _word(blocks, 48, 56, "<u2")
    d = ((words >> 12) << np.array([0, 4, 8, 12], np.uint16)).sum(axis=1, dtype=np.uint16)
    scales = (words[..., None] >> np.uint16(3) * _FOUR & np.uint16(7)).reshape(-1, 16)
    high = neighbours(blocks[:, 32:48])
    digits = _grid("IQ1_M")[blocks[:, :32] | (high & 7).astype(np.uint16) << np.uint16(8)]
    return _with_bit(digits, (high >> 3)[..., None], IQ1), _odd_of(scales, d.view(np.float16)[:, None], 1), None


def tq1_0(blocks: Array) -> _Parts:
    """Bytes are fractions of 256: three times one is a digit and the next fraction."""

    def digits(start: int, end: int, count: int) -> Array:
        powers = np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
        return (blocks[:, None, start:end] * powers).reshape(len(blocks), -1)

    fractions = np.concatenate([digits(0, 32, 5), digits(32, 48, 5), digits(48, 52, 4)], axis=1)
    return (
        (fractions.astype(np.uint16) * 3 >> 8).astype(np.uint8),
        scale_of_groups(_word(blocks, 52, 54, "<f2"), 8),
        None,
    )


def tq2_0(blocks: Array) -> _Parts:
    pairs = blocks[:, :64].reshape(-1, 2, 1, 32) >> 2 * _FOUR[:, None] & 3
    return pairs, scale_of_groups(_word(blocks, 64, 66, "<f2"), 8), None
