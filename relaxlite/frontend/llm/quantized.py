"""Weights in blocks of few bits, as checkpoints hold them, and what they stand for.

Every block format of GGUF says the same thing in its own packing: the weights of a row are in groups of 16 or 32, and

    weight[n, k] = scale[n, k // group] * (code[n, k] - zero) + offset[n, k // group]

with small integer codes. Scales and offsets are float16, or in the K formats integers of few bits times a float16 of
256 weights. `GroupedWeight` holds just that, so nothing is rounded. Codes have 4, 5, 6 or 8 bits: those of 2 and 3 bits
are kept in 4. The IQ4 formats have a table of numbers, and codes of 4 bits are places in it. So are those of MXFP4,
which are floats; its scales, powers of two, are kept in bfloat16. What the libraries of Hugging Face's folders write
(hf_quantized.py) comes to the same through `PackedRows`. Formats: llama.cpp, ggml-common.h and ggml-quants.c; OCP
Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.ops.block_codes import Coding
from relaxlite.records import dataclass

_BFLOAT16 = dtypes.to_numpy("bfloat16")
Array: TypeAlias = "np.ndarray[Any, Any]"


@dataclass(frozen=True, slots=True)
class GroupScales:
    """A number for each group of a row: `values` [n, k / group] in float16, bfloat16 or float32, or int8 or uint8 that
    count in `factors` [n, k / super-block] of such types, one for one or several groups."""

    values: Array
    factors: Array | None = None

    def to_float32(self) -> Array:
        """[n, k / group]; exact where factors are, as a product of 8 and 11 bits is."""
        values = self.values.astype(np.float32)
        if self.factors is None:
            return values
        n, blocks = self.factors.shape
        return (values.reshape(n, blocks, -1) * self.factors.astype(np.float32)[:, :, None]).reshape(n, -1)

    def reshape(self, n: int) -> GroupScales:
        """For n rows."""
        return GroupScales(self.values.reshape(n, -1), None if self.factors is None else self.factors.reshape(n, -1))


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A weight of n rows and k columns: codes [n, k] (uint8) of `bits` bits, of which `zero` stands for 0 where there
    are no offsets; with a `table`, of its entries. With an `order`, column j of the codes is the weight's column
    order[j]."""

    codes: Array
    scales: GroupScales
    offsets: GroupScales | None
    coding: Coding
    order: Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape

    @property
    def group(self) -> int:
        return int(self.codes.shape[1] // self.scales.values.shape[1])

    def dequantize(self) -> Array:
        """The weights in float32 [n, k]."""
        n, k = self.codes.shape
        grouped = self.coding.numbers(self.codes).reshape(n, -1, self.group).astype(np.float32)
        grouped -= np.float32(self.coding.zero)
        grouped *= self.scales.to_float32()[:, :, None]
        if self.offsets is not None:
            grouped += self.offsets.to_float32()[:, :, None]
        found = grouped.reshape(n, k)
        return found if self.order is None else found[:, np.argsort(self.order)]


Rows: TypeAlias = "slice | Array"


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of a weight that lie in some tensors of a file: `read` makes codes, or floats, of those that a slice or
    numbers say; `numbers` are the ones that belong to the weight. `nbytes` of the file."""

    read: Callable[[Rows], GroupedWeight | Array]
    numbers: Array
    nbytes: int

    @staticmethod
    def of(count: int, nbytes: int, read: Callable[[Rows], GroupedWeight | Array]) -> PackedRows:
        return PackedRows(read, np.arange(count), nbytes)

    def __getitem__(self, rows: Rows) -> GroupedWeight | Array:
        numbers = self.numbers[rows]
        first, count = int(numbers[0]) if len(numbers) else 0, len(numbers)
        is_run = np.array_equal(numbers, np.arange(first, first + count))
        return self.read(slice(first, first + count) if is_run else numbers)  # slices are not copied

    def picked(self, rows: Rows) -> PackedRows:
        """Some of them, or all in another order."""
        numbers = self.numbers[rows]
        return PackedRows(self.read, numbers, self.nbytes * len(numbers) // max(len(self.numbers), 1))


_Parts: TypeAlias = "tuple[Array, GroupScales, GroupScales | None]"  # codes, scales, offsets


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How a block of `size` weights lies in `nbytes` bytes. `decode` takes blocks as bytes [count, nbytes]."""

    name: str
    size: int
    nbytes: int
    coding: Coding
    decode: Callable[[Array], _Parts]

    def unpack(self, rows: Array) -> GroupedWeight:
        """Rows as bytes [n, k / size * nbytes]."""
        n = rows.shape[0]
        codes, scales, offsets = self.decode(rows.reshape(-1, self.nbytes))
        moved = None if offsets is None else offsets.reshape(n)
        return GroupedWeight(codes.reshape(n, -1), scales.reshape(n), moved, self.coding)


def _half(blocks: Array, at: int) -> Array:
    """The float16 at a byte of each block [count, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)


def _scale(blocks: Array, at: int) -> GroupScales:
    return GroupScales(_half(blocks, at))


def _nibbles(packed: Array) -> Array:
    """Bytes [..., b] to codes [..., 2*b]: the low halves, then the high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(blocks: Array, at: int) -> Array:
    """32 bits from a byte on, as 0 or 16 for each weight."""
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
    """Scales and offsets [count, 8] of Q4_K and Q5_K: eight pairs of 6 bits in 12 bytes, times two halves."""
    packed = blocks[:, 4:16]
    low, high, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (rest & 15) | (low >> 6 << 4)], axis=1)
    mins = np.concatenate([high & 63, (rest >> 4) | (high >> 6 << 4)], axis=1)
    return GroupScales(scales, _half(blocks, 0)), GroupScales(mins, -_half(blocks, 2))


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
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return low | high << 4, GroupScales(scales, _half(blocks, 208)), None


def _pairs(packed: Array) -> Array:
    """64 bytes of four pairs of bits each to codes [count, 2, 4, 32]: each half's lowest pairs come first."""
    return packed.reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3


def _q2_k(blocks: Array) -> _Parts:
    scales, mins = blocks[:, :16] & 15, blocks[:, :16] >> 4
    return _pairs(blocks[:, 16:80]), GroupScales(scales, _half(blocks, 80)), GroupScales(mins, -_half(blocks, 82))


def _q3_k(blocks: Array) -> _Parts:
    """The third bits of the eight runs of 32 weights are the eight bits of 32 bytes; scales of 6 bits, less 32."""
    third = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    low = _nibbles(blocks[:, 96:104])
    high = (blocks[:, None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(-1, 16)
    scales = (low | high << 4).astype(np.int8) - np.int8(32)
    return _pairs(blocks[:, 32:96]) | third.reshape(-1, 2, 4, 32) << 2, GroupScales(scales, _half(blocks, 108)), None


def _iq4_xs(blocks: Array) -> _Parts:
    """Scales of 6 bits, less 32: high pairs of bits in a word, low nibbles in four bytes."""
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    scales = (low | high << 4).astype(np.int8) - np.int8(32)
    return _nibbles(blocks[:, 8:].reshape(-1, 8, 16)), GroupScales(scales, _half(blocks, 0)), None


def _mxfp4(blocks: Array) -> _Parts:
    return _nibbles(blocks[:, 1:]), GroupScales(_of_exponents(blocks[:, :1])), None


def _of_exponents(exponents: Array) -> Array:
    """Powers of two in bfloat16, half as large, as the table holds twice the floats."""
    power = exponents.astype(np.uint16)
    bits = np.where(power < 2, np.uint16(0x20) << power, (power - np.uint16(1)) << np.uint16(7))
    return bits.astype(np.uint16).view(_BFLOAT16)


def mxfp4_of_pairs(pairs: Array, powers: Array) -> GroupedWeight:
    """Of bytes [n, k / 2] that have the codes of two neighbours each, and exponents [n, k / 32]."""
    n = len(pairs)
    scales = GroupScales(_of_exponents(powers.reshape(-1, 1))).reshape(n)
    return GroupedWeight(neighbours(pairs), scales, None, MXFP4)


def neighbours(packed: Array) -> Array:
    """Bytes [n, b] to codes [n, 2*b]: of each the low half, then the high half."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the floats of 4 bits that are not negative
MXFP4 = Coding(4, 12, (*(12 + n for n in _E2M1), *(12 - n for n in _E2M1)))
_IQ4 = Coding(
    4, 128, tuple(128 + n for n in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
)

BLOCK_FORMATS: Mapping[str, BlockFormat] = {
    name: BlockFormat(name, size, nbytes, coding, decode)
    for name, size, nbytes, coding, decode in (
        ("Q8_0", 32, 34, Coding(8, 128), _q8_0),
        ("Q4_0", 32, 18, Coding(4, 8), _q4_0),
        ("Q4_1", 32, 20, Coding(4), _q4_1),
        ("Q5_0", 32, 22, Coding(5, 16), _q5_0),
        ("Q5_1", 32, 24, Coding(5), _q5_1),
        ("Q2_K", 256, 84, Coding(4), _q2_k),
        ("Q3_K", 256, 110, Coding(4, 4), _q3_k),
        ("Q4_K", 256, 144, Coding(4), _q4_k),
        ("Q5_K", 256, 176, Coding(5), _q5_k),
        ("Q6_K", 256, 210, Coding(6, 32), _q6_k),
        ("IQ4_NL", 32, 18, _IQ4, _q4_0),
        ("IQ4_XS", 256, 136, _IQ4, _iq4_xs),
        ("MXFP4", 32, 17, MXFP4, _mxfp4),
    )
}
