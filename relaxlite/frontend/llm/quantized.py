"""Blocked weights: integer codes in groups with scales, and offsets or codebooks.

All formats of checkpoints pack the same information, where weights of a row are in groups:

    weight[n, k] = scale[n, k // group] * (code[n, k] - zero) + offset[n, k // group]

Codes are integers of 1 to 6 or 8 bits, or indices of a codebook. `GroupedWeight` holds exactly these, so that nothing
is rounded. GGUF's formats are decoded in gguf_blocks.py; the formats of Hugging Face folders (hf_quantized.py) by
`PackedRows`. MXFP4: OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.ops.block_codes import Coding
from relaxlite.records import dataclass

_BFLOAT16 = dtypes.to_numpy("bfloat16")
Array: TypeAlias = "np.ndarray[Any, Any]"


@dataclass(frozen=True, slots=True)
class GroupScales:
    """Scales, or offsets, of groups.

    `values` [n, k / group] are float16, bfloat16 or float32; or int8 or uint8 that multiply `factors` [n, k /
    super-block] of such types, each for one or several groups.
    """

    values: Array
    factors: Array | None = None

    def to_float32(self) -> Array:
        """Return the products [n, k / group]; exact for 16-bit factors, as 8 times 11 bits fit into float32."""
        values = self.values.astype(np.float32)
        if self.factors is None:
            return values
        n, blocks = self.factors.shape
        return (values.reshape(n, blocks, -1) * self.factors.astype(np.float32)[:, :, None]).reshape(n, -1)

    def reshape(self, n: int) -> GroupScales:
        """Return the same scales as rows of a weight of n rows."""
        return GroupScales(self.values.reshape(n, -1), None if self.factors is None else self.factors.reshape(n, -1))


def repeat_scale(factors: Array, groups: int) -> GroupScales:
    """Repeat one scale per row, factors [n, 1], for a number of groups.

    Groups smaller than those of the format are more accurate where activations are quantized per group.
    """
    return GroupScales(np.ones((len(factors), groups), np.uint8), factors)


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A blocked weight of n rows and k columns.

    `codes` uint8 [n, k]; `coding` says their bits, the code of 0 (without offsets) and the codebook, if any. With an
    `order`, column j of the codes is column order[j] of the weight.
    """

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
        """The number of columns of a group."""
        return int(self.codes.shape[1] // self.scales.values.shape[1])

    def dequantize(self) -> Array:
        """Return the weight in float32 [n, k]."""
        n, k = self.codes.shape
        grouped = self.coding.decode(self.codes).reshape(n, -1, self.group).astype(np.float32)
        grouped -= np.float32(self.coding.zero)
        grouped *= self.scales.to_float32()[:, :, None]
        if self.offsets is not None:
            grouped += self.offsets.to_float32()[:, :, None]
        array = grouped.reshape(n, k)
        return array if self.order is None else array[:, np.argsort(self.order)]


RowIndex: TypeAlias = "slice | Array"


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Lazily decoded rows of a weight, from one or several tensors of a file.

    `read` decodes the rows of a slice or of an array of numbers to codes or floats. `numbers`: the rows of the file
    that the weight consists of. `nbytes`: their size in the file.
    """

    read: Callable[[RowIndex], GroupedWeight | Array]
    numbers: Array
    nbytes: int

    @staticmethod
    def of(count: int, nbytes: int, read: Callable[[RowIndex], GroupedWeight | Array]) -> PackedRows:
        """Make the packed rows of all `count` rows."""
        return PackedRows(read, np.arange(count), nbytes)

    def __getitem__(self, rows: RowIndex) -> GroupedWeight | Array:
        numbers = self.numbers[rows]
        first, count = int(numbers[0]) if len(numbers) else 0, len(numbers)
        is_contiguous = np.array_equal(numbers, np.arange(first, first + count))
        return self.read(slice(first, first + count) if is_contiguous else numbers)  # reading a slice copies nothing

    def take_rows(self, rows: RowIndex) -> PackedRows:
        """Select some rows, or all in another order."""
        numbers = self.numbers[rows]
        return PackedRows(self.read, numbers, self.nbytes * len(numbers) // max(len(self.numbers), 1))


def mxfp4_scales(exponents: Array) -> Array:
    """Convert exponents to scales 2**(e - 127), bfloat16, halved because the codebook holds doubled values."""
    exponents16 = exponents.astype(np.uint16)
    bits = np.where(exponents16 < 2, np.uint16(0x20) << exponents16, (exponents16 - np.uint16(1)) << np.uint16(7))
    return bits.astype(np.uint16).view(_BFLOAT16)


def decode_mxfp4(pairs: Array, exponents: Array) -> GroupedWeight:
    """Decode MXFP4 of bytes [n, k / 2], two adjacent codes each, and exponents [n, k / 32]."""
    n = len(pairs)
    scales = GroupScales(mxfp4_scales(exponents.reshape(-1, 1))).reshape(n)
    return GroupedWeight(unpack_nibbles(pairs), scales, None, MXFP4)


def unpack_nibbles(packed: Array) -> Array:
    """Unpack bytes [n, b] to codes [n, 2 * b], the low nibble of each byte before the high one."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)  # doubled values of the non-negative E2M1 floats
MXFP4 = Coding(4, 12, (*(12 + n for n in _E2M1), *(12 - n for n in _E2M1)))
