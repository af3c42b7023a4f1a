"""Decoders of the block formats of GGUF files (llama.cpp: ggml-common.h, ggml-quants.c) into `GroupedWeight`.

Each format packs groups of 16 or 32 weights with a scale, and in some formats an offset: float16, or in the K formats
small integers times a float16 for 256 weights. Codes of the IQ4 formats are indices of a codebook. So are those of
MXFP4 and NVFP4, which are floats of 4 bits; their scales, powers of two and floats of 7 bits, become bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from relaxlite import dtypes
from relaxlite.frontend.llm import gguf_grids as grids
from relaxlite.frontend.llm.quantized import MXFP4, GroupedWeight, GroupScales, mxfp4_scales, repeat_scale
from relaxlite.ir.ops.block_codes import Coding
from relaxlite.records import dataclass

Array: TypeAlias = "np.ndarray[Any, Any]"
_Parts: TypeAlias = "tuple[Array, GroupScales, GroupScales | None]"  # codes, scales, offsets


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The layout of a block of `size` weights in `nbytes` bytes.

    `decode` takes blocks as bytes [count, nbytes] and returns codes, scales and offsets.
    """

    name: str
    size: int
    nbytes: int
    coding: Coding
    decode: Callable[[Array], _Parts]

    def unpack(self, rows: Array) -> GroupedWeight:
        """Decode rows given as bytes [n, k / size * nbytes]."""
        n = rows.shape[0]
        codes, scales, offsets = self.decode(rows.reshape(-1, self.nbytes))
        offsets_of_rows = None if offsets is None else offsets.reshape(n)
        return GroupedWeight(codes.reshape(n, -1), scales.reshape(n), offsets_of_rows, self.coding)


def _half(blocks: Array, at: int) -> Array:
    """Read the float16 at byte `at` of each block: [count, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)


def _scale(blocks: Array, at: int) -> GroupScales:
    return GroupScales(_half(blocks, at))


def _nibbles(packed: Array) -> Array:
    """Unpack bytes [..., b] to codes [..., 2 * b]: all low nibbles, then all high nibbles."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(blocks: Array, at: int) -> Array:
    """Unpack the 32 bits from byte `at` on to 0 or 16 for each weight."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4


def _q8_0(blocks: Array) -> _Parts:
    return blocks[:, 2:] ^ 128, _scale(blocks, 0), None


def _q4_0(blocks: Array) -> _Parts:
    return _nibbles(blocks[:, 2:]), _scale(blocks, 0), None


def _q4_1(blocks: Array) -> _Parts:
    return _nibbles(blocks[:, 4:]), _scale(blocks, 0), _scale(blocks, 2)


def _q5_0(blocks: Array) -> _Parts:
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2), _scale(blocks, 0), None


def _q5_1(blocks: Array) -> _Parts:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4), _scale(blocks, 0), _scale(blocks, 2)


def _super_scales(blocks: Array) -> tuple[GroupScales, GroupScales]:
    """Unpack scales and offsets [count, 8] of Q4_K and Q5_K: eight pairs of 6 bits in 12 bytes, times two float16."""
    packed = blocks[:, 4:16]
    low, high, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (rest & 15) | (low >> 6 << 4)], axis=1)
    mins = np.concatenate([high & 63, (rest >> 4) | (high >> 6 << 4)], axis=1)
    return GroupScales(scales, _half(blocks, 0)), GroupScales(mins, -_half(blocks, 2))


def _q4_k(blocks: Array) -> _Parts:
    return _nibbles(blocks[:, 16:].reshape(-1, 4, 32)), *_super_scales(blocks)


def _q5_k(blocks: Array) -> _Parts:
    """Decode Q5_K; the fifth bits of group g are bit g of 32 bytes."""
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return codes | fifth << 4, *_super_scales(blocks)


def _q6_k(blocks: Array) -> _Parts:
    """Decode Q6_K; each half of 128 weights has 64 bytes of low nibbles and 32 bytes of four 2-bit high parts."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high_bytes = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = high_bytes >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return low | high << 4, GroupScales(scales, _half(blocks, 208)), None


def _two_bit_codes(packed: Array) -> Array:
    """Unpack 64 bytes of four 2-bit codes to codes [count, 2, 4, 32]: the lowest bits of each half come first."""
    return packed.reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3


def _q2_k(blocks: Array) -> _Parts:
    scales, mins = blocks[:, :16] & 15, blocks[:, :16] >> 4
    return (
        _two_bit_codes(blocks[:, 16:80]),
        GroupScales(scales, _half(blocks, 80)),
        GroupScales(mins, -_half(blocks, 82)),
    )


def _q3_k(blocks: Array) -> _Parts:
    """Decode Q3_K; the third bits of run r of 32 weights are bit r of 32 bytes; scales of 6 bits with zero point 32."""
    third = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    low = _nibbles(blocks[:, 96:104])
    high = (blocks[:, None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(-1, 16)
    scales = (low | high << 4).astype(np.int8) - np.int8(32)
    return (
        _two_bit_codes(blocks[:, 32:96]) | third.reshape(-1, 2, 4, 32) << 2,
        GroupScales(scales, _half(blocks, 108)),
        None,
    )


def _iq4_xs(blocks: Array) -> _Parts:
    """Decode IQ4_XS; scales of 6 bits with zero point 32: the high bits in an int16, the low nibbles in four bytes."""
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    scales = (low | high << 4).astype(np.int8) - np.int8(32)
    return _nibbles(blocks[:, 8:].reshape(-1, 8, 16)), GroupScales(scales, _half(blocks, 0)), None


def _q1_0(blocks: Array) -> _Parts:
    return np.unpackbits(blocks[:, 2:], axis=1, bitorder="little"), repeat_scale(_half(blocks, 0), 4), None


def _q2_0(blocks: Array) -> _Parts:
    codes = blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    return codes, repeat_scale(_half(blocks, 0), 2), None


def _mxfp4(blocks: Array) -> _Parts:
    return _nibbles(blocks[:, 1:]), GroupScales(mxfp4_scales(blocks[:, :1])), None


def _nvfp4(blocks: Array) -> _Parts:
    """Decode NVFP4: four groups of 16 with E4M3 scales, halved because the codebook holds doubled values."""
    return _nibbles(blocks[:, 4:].reshape(-1, 4, 8)), GroupScales(_UNSIGNED_E4M3[blocks[:, :4]]), None


def _unsigned_e4m3() -> Array:
    """Tabulate half the value of each byte as an E4M3 scale without sign, bfloat16 [256]; 0 for NaN."""
    exponents, fractions = np.divmod(np.arange(256) & 127, 8)
    array = np.where(exponents == 0, fractions * 2.0**-10, (8 + fractions) * 2.0 ** (exponents - 11.0))
    array[127] = 0
    return array.astype(dtypes.to_numpy("bfloat16"))


_UNSIGNED_E4M3 = _unsigned_e4m3()
_IQ4 = Coding(
    4, 128, tuple(128 + n for n in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
)

BLOCK_FORMATS: Mapping[str, BlockFormat] = {
    name: BlockFormat(name, size, nbytes, coding, decode)
    for name, size, nbytes, coding, decode in (
        ("Q1_0", 128, 18, Coding(1, 1, (0, 2)), _q1_0),
        ("Q2_0", 64, 18, Coding(2, 1), _q2_0),
        ("Q8_0", 32, 34, Coding(8, 128), _q8_0),
        ("Q4_0", 32, 18, Coding(4, 8), _q4_0),
        ("Q4_1", 32, 20, Coding(4), _q4_1),
        ("Q5_0", 32, 22, Coding(5, 16), _q5_0),
        ("Q5_1", 32, 24, Coding(5), _q5_1),
        ("Q2_K", 256, 84, Coding(2), _q2_k),
        ("Q3_K", 256, 110, Coding(3, 4), _q3_k),
        ("Q4_K", 256, 144, Coding(4), _q4_k),
        ("Q5_K", 256, 176, Coding(5), _q5_k),
        ("Q6_K", 256, 210, Coding(6, 32), _q6_k),
        ("IQ1_S", 256, 50, grids.IQ1, grids.iq1_s),
        ("IQ1_M", 256, 56, grids.IQ1, grids.iq1_m),
        ("IQ2_XXS", 256, 66, grids.IQ2, grids.iq2_xxs),
        ("IQ2_XS", 256, 74, grids.IQ2, grids.iq2_xs),
        ("IQ2_S", 256, 82, grids.IQ2, grids.iq2_s),
        ("IQ3_XXS", 256, 98, grids.IQ3_XXS, grids.iq3_xxs),
        ("IQ3_S", 256, 110, grids.IQ3_S, grids.iq3_s),
        ("IQ4_NL", 32, 18, _IQ4, _q4_0),
        ("IQ4_XS", 256, 136, _IQ4, _iq4_xs),
        ("TQ1_0", 256, 54, grids.TERNARY, grids.tq1_0),
        ("TQ2_0", 256, 66, grids.TERNARY, grids.tq2_0),
        ("MXFP4", 32, 17, MXFP4, _mxfp4),
        ("NVFP4", 64, 36, MXFP4, _nvfp4),
    )
}
