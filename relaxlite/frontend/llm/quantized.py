"""Weights in blocks of few bits, as checkpoints hold them, and what they stand for.

Every format says the same thing in its own packing: the weights of a row are in groups, and

    weight[n, k] = scale[n, k // group] * (code[n, k] - zero) + offset[n, k // group]

with small integer codes of 1 to 6 or 8 bits, or places in a table of such numbers. `GroupedWeight` holds just that, so
nothing is rounded. GGUF's formats are in gguf_blocks.py; what the libraries of Hugging Face's folders write
(hf_quantized.py) comes to the same through `PackedRows`. MXFP4: OCP Microscaling Formats 1.0.
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


def scale_of_groups(factors: Array, groups: int) -> GroupScales:
    """One of factors [n, 1] for so many groups of each row: shorter ones than the format's are rounded better."""
    return GroupScales(np.ones((len(factors), groups), np.uint8), factors)


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
        array = grouped.reshape(n, k)
        return array if self.order is None else array[:, np.argsort(self.order)]


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


def mxfp4_scales(exponents: Array) -> Array:
    """Of exponents, the powers of two in bfloat16, half as large, as the table holds twice the floats."""
    power = exponents.astype(np.uint16)
    bits = np.where(power < 2, np.uint16(0x20) << power, (power - np.uint16(1)) << np.uint16(7))
    return bits.astype(np.uint16).view(_BFLOAT16)


def mxfp4_of_pairs(pairs: Array, powers: Array) -> GroupedWeight:
    """Of bytes [n, k / 2] that have the codes of two neighbours each, and exponents [n, k / 32]."""
    n = len(pairs)
    scales = GroupScales(mxfp4_scales(powers.reshape(-1, 1))).reshape(n)
    return GroupedWeight(neighbours(pairs), scales, None, MXFP4)


def neighbours(packed: Array) -> Array:
    """Bytes [n, b] to codes [n, 2*b]: of each the low half, then the high half."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the floats of 4 bits that are not negative
MXFP4 = Coding(4, 12, (*(12 + n for n in _E2M1), *(12 - n for n in _E2M1)))
