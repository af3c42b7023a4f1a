"""Weights in blocks of few bits, as checkpoints hold them, and what they stand for.

Every block format of GGUF says the same thing in its own packing: the weights of a row are in groups of 16 or 32, and

    weight[n, k] = scale[n, k // group] * code[n, k] + offset[n, k // group]

with small integer codes. `GroupedWeight` holds just that. Scales and offsets are float32 products of what the file
holds, so nothing is rounded. Formats: llama.cpp, ggml-common.h and ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A weight of n rows and k columns: codes [n, k] (uint8 or int8) of `bits` bits, scales and offsets [n, k / group]
    (float32; offsets None: all zero)."""

    codes: Array
    scales: Array
    offsets: Array | None
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape

    @property
    def group(self) -> int:
        return int(self.codes.shape[1] // self.scales.shape[1])

    def dequantize(self) -> Array:
        """The weights in float32 [n, k]."""
        n, k = self.codes.shape
        grouped = self.codes.reshape(n, -1, self.group).astype(np.float32) * self.scales[:, :, None]
        if self.offsets is not None:
            grouped += self.offsets[:, :, None]
        return grouped.reshape(n, k)

    def zero_point(self) -> int | None:
        """The code that stands for 0 in all groups, where offsets say no more than that; None: they say more."""
        if self.offsets is None:
            return 0
        with np.errstate(all="ignore"):
            found = np.nan_to_num(-self.offsets / self.scales, nan=0.0, posinf=0.0, neginf=0.0)
        zero = int(found.flat[np.argmax(abs(found))]) if found.size else 0
        fits = 0 <= zero < 1 << self.bits and np.array_equal(self.offsets, -zero * self.scales)
        return zero if fits else None


_Parts: TypeAlias = "tuple[Array, Array, Array | None]"  # codes, scales, offsets


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How a block of `size` weights lies in `nbytes` bytes. `decode` takes blocks as bytes [count, nbytes]."""

    name: str
    size: int
    nbytes: int
    bits: int
    decode: Callable[[Array], _Parts]

    def unpack(self, rows: Array) -> GroupedWeight:
        """Rows as bytes [n, k / size * nbytes]."""
        n = rows.shape[0]
        codes, scales, offsets = self.decode(rows.reshape(-1, self.nbytes))
        return GroupedWeight(
            codes.reshape(n, -1),
            scales.reshape(n, -1),
            None if offsets is None else offsets.reshape(n, -1),
            self.bits,
        )


def _half(blocks: Array, at: int) -> Array:
    """A float16 at a byte of each block, as float32 [count, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Array) -> Array:
    """Bytes [..., b] to codes [..., 2*b]: the low halves, then the high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(blocks: Array, at: int) -> Array:
    """32 bits from a byte on, as 0 or 16 for each weight."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4


def _q8_0(blocks: Array) -> _Parts:
    return blocks[:, 2:].view(np.int8), _half(blocks, 0), None


def _q4_0(blocks: Array) -> _Parts:
    scale = _half(blocks, 0)
    return _nibbles(blocks[:, 2:]), scale, -8 * scale


def _q4_1(blocks: Array) -> _Parts:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Array) -> _Parts:
    scale = _half(blocks, 0)
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2), scale, -16 * scale


def _q5_1(blocks: Array) -> _Parts:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2)


def _super_scales(blocks: Array) -> tuple[Array, Array]:
    """Scales and offsets [count, 8] of Q4_K and Q5_K: eight pairs of 6 bits in 12 bytes, times two halves."""
    packed = blocks[:, 4:16]
    low, high, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (rest & 15) | (low >> 6 << 4)], axis=1)
    mins = np.concatenate([high & 63, (rest >> 4) | (high >> 6 << 4)], axis=1)
    return _half(blocks, 0) * scales.astype(np.float32), -_half(blocks, 2) * mins.astype(np.float32)


def _q4_k(blocks: Array) -> _Parts:
    return _nibbles(blocks[:, 16:].reshape(-1, 4, 32)), *_super_scales(blocks)


def _q5_k(blocks: Array) -> _Parts:
    """The fifth bits of the eight groups are the eight bits of 32 bytes."""
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return codes | fifth << 4, *_super_scales(blocks)


def _q6_k(blocks: Array) -> _Parts:
    """Each half of 128 weights: 64 bytes of low nibbles, 32 bytes of four pairs of high bits."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = pairs >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scales = _half(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return low | high << 4, scales, -32 * scales


BLOCK_FORMATS: Mapping[str, BlockFormat] = {
    name: BlockFormat(name, size, nbytes, bits, decode)
    for name, size, nbytes, bits, decode in (
        ("Q8_0", 32, 34, 8, _q8_0),
        ("Q4_0", 32, 18, 4, _q4_0),
        ("Q4_1", 32, 20, 4, _q4_1),
        ("Q5_0", 32, 22, 5, _q5_0),
        ("Q5_1", 32, 24, 5, _q5_1),
        ("Q4_K", 256, 144, 4, _q4_k),
        ("Q5_K", 256, 176, 5, _q5_k),
        ("Q6_K", 256, 210, 6, _q6_k),
    )
}
