"""Packing and decoding of the 1- to 8-bit codes of blocked weights (ops/block_quantized.py) in 32-bit words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from relaxlite.ir.intrinsics import LOOKUP
from relaxlite.ir.ops.scalars import Scalar, literal
from relaxlite.ir.program import Intrinsic, Value
from relaxlite.ir.symbolic import SymExpr
from relaxlite.records import dataclass

DP4A_BYTES = 4  # codes in a dp4a group
BYTE_ONES = 0x01010101
BIT_PLANES: Mapping[int, tuple[int, ...]] = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
"""Widths of the bit planes that a code is split into, from the lowest bits on, by the width of the code."""
MAX_TABLE_BITS = 4  # widest code that indexes a table
Array: TypeAlias = "np.ndarray[Any, Any]"
T = TypeVar("T")
Number = TypeVar("Number", int, SymExpr)


@dataclass(frozen=True, slots=True)
class Coding:
    """Decoding of codes of `bits` bits: value = table[code] - zero, or code - zero without a table.

    A table has 2**bits bytes; only codes of at most 4 bits have one.
    """

    bits: int
    zero: int = 0
    table: tuple[int, ...] = ()

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes of the ops of ops/block_quantized.py."""
        return {"bits": self.bits, "zero": self.zero, "table": self.table}

    @property
    def max_value(self) -> int:
        return max(self.table, default=(1 << self.bits) - 1)

    @property
    def value_bits(self) -> int:
        """Width in bits of the decoded values, before the zero point is subtracted."""
        return self.max_value.bit_length()

    def find_error(self) -> str | None:
        """Explain why the coding is invalid; None if it is valid."""
        if self.table:
            if self.bits > MAX_TABLE_BITS:
                return f"codes of {self.bits} bits have no table, only those of at most {MAX_TABLE_BITS} do"
            if len(self.table) != 1 << self.bits or not 0 <= min(self.table) <= max(self.table) < 256:
                return f"a table is {1 << self.bits} bytes for codes of {self.bits} bits, got {self.table}"
        if not 0 <= self.zero <= self.max_value:
            return f"zero must be a code, from 0 to {self.max_value}, got {self.zero}"
        return None

    def decode(self, codes: Array) -> Array:
        """Decode an array of codes to uint8 values, before the zero point is subtracted."""
        return np.asarray(self.table, np.uint8)[codes] if self.table else codes

    def decode_word(self, word: Scalar) -> Scalar:
        """Decode four codes, the bytes of an int32, before the zero point is subtracted."""
        if not self.table:
            return word
        table = self.table * (1 << MAX_TABLE_BITS - self.bits)
        table_words = np.asarray(table, np.uint8).view("<i4").tolist()
        return Scalar(Intrinsic(LOOKUP, (word.value, *(literal(entries, "int32") for entries in table_words)), "int32"))

    def max_rotation(self, block: int) -> int:
        """Largest Walsh-Hadamard transform, in dp4a groups of a block, whose results fit into bytes; 1: none."""
        return math.gcd(1 << 8 - self.value_bits, block // DP4A_BYTES)

    def with_rotation(self, rotation: int) -> RotatedCoding:
        return RotatedCoding(self, rotation)


@dataclass(frozen=True, slots=True)
class RotatedCoding:
    """Codes whose dp4a groups are transformed, `rotation` at a time, by a Walsh-Hadamard matrix (`hadamard_transform`).

    The results are unsigned bytes: all but the first group of a transform hold differences of codes and get `offset`
    added.
    """

    coding: Coding
    rotation: int

    @property
    def offset(self) -> int:
        return self.rotation << self.coding.value_bits - 1

    @property
    def max_value(self) -> int:
        """Largest byte after the transform."""
        if self.rotation == 1:
            return self.coding.max_value
        return max(self.rotation * self.coding.max_value, self.offset + self.rotation // 2 * self.coding.max_value)

    @property
    def sum_corrections(self) -> tuple[int, ...]:
        """Multiples of the activation sums (of `quantize_blocks`) to subtract from a product with the bytes."""
        if self.rotation == 1:
            return (self.coding.zero,)
        return self.rotation * self.coding.zero - self.offset, self.offset

    def transform_groups(self, groups: Sequence[Value]) -> list[Value]:
        """Transform the dp4a groups (int32) of a block by 32-bit additions alone.

        Intermediate bytes may borrow from their neighbours, but a sum of words equals the sums of their bytes modulo
        2**32, and the final sums fit into bytes.
        """
        if self.rotation == 1:
            return list(groups)
        result = []
        for first in range(0, len(groups), self.rotation):
            head, *tail = hadamard_transform([Scalar(group) for group in groups[first : first + self.rotation]])
            result += [head, *(item + replicate_byte(self.offset) for item in tail)]
        return [group.value for group in result]


def replicate_byte(byte: int) -> int:
    """Replicate a byte to the four bytes of an int32."""
    word = byte * BYTE_ONES
    return word - (1 << 32) if word >> 31 else word


def hadamard_transform(items: Sequence[T]) -> list[T]:
    """Multiply a vector, of a power of two items, by the Walsh-Hadamard matrix in Sylvester's (natural) order."""
    result, span = list(items), len(items) // 2
    while span:
        for k in (k for k in range(len(result)) if not k & span):
            a, b = result[k], result[k + span]
            result[k], result[k + span] = a + b, a - b  # type: ignore[operator]
        span //= 2
    return result


def rows_per_run(block: int, bits: int) -> int:
    """Number of rows of a column whose codes fill whole words in every bit plane: one block, or a few."""
    return math.lcm(block, 32 // min(BIT_PLANES[bits]))


def count_words(rows: int, bits: int) -> int:
    """Number of 32-bit words that `rows` codes take."""
    return rows * bits // 32


def fills_words(rows: int, block: int, bits: int) -> bool:
    """Whether `rows` codes in blocks of `block` rows fill whole words."""
    return block > 0 and block % 8 == 0 and rows % rows_per_run(block, bits) == 0


@dataclass(frozen=True, slots=True)
class BitField(Generic[Number]):
    """Location of one bit plane of a dp4a group.

    The bits [low, low + width) of the four codes are at bit `shift` of the four bytes of word `word` of a run.
    """

    word: Number
    shift: Number
    width: int
    low: int

    @property
    def mask(self) -> int:
        return (1 << self.width) - 1


def locate_bit_fields(group: Number, run: int, bits: int) -> list[BitField[Number]]:
    """Locate the bit planes of dp4a group `group` (a number or an expression) in a run of `run` rows."""
    fields, word, low = [], 0, 0
    for width in BIT_PLANES[bits]:
        per_word = 8 // width
        fields.append(BitField(word + group // per_word, group % per_word * width, width, low))
        word, low = word + count_words(run, width), low + width
    return fields


def pack_codes(codes: Array, block: int, bits: int) -> Array:
    """Pack codes, uint8 (rows, n), to words, int32 (rows * bits / 32, n); fastest if columns are contiguous."""
    rows, n = codes.shape
    groups = np.ascontiguousarray(codes.T).view("<u4")  # (n, rows / 4)
    if bits == 8:
        return np.ascontiguousarray(groups.T).view(np.int32)
    run = rows_per_run(block, bits)
    words = np.empty((rows // run, count_words(run, bits), n), np.uint32)
    first, low = 0, 0
    for width in BIT_PLANES[bits]:
        plane, per_word = groups >> np.uint32(low) & np.uint32(BYTE_ONES * ((1 << width) - 1)), 8 // width
        plane_words = plane[:, 0::per_word].copy()
        for k in range(1, per_word):
            plane_words |= plane[:, k::per_word] << np.uint32(width * k)
        count = count_words(run, width)
        words[:, first : first + count] = plane_words.reshape(n, rows // run, count).transpose(1, 2, 0)
        first, low = first + count, low + width
    return words.reshape(count_words(rows, bits), n).view(np.int32)


def unpack_codes(words: Array, block: int, bits: int) -> Array:
    """Unpack words, int32 (rows * bits / 32, n), to codes, uint8 (rows, n); the inverse of `pack_codes`."""
    n, run = words.shape[1], rows_per_run(block, bits)
    count = len(words) // count_words(run, bits)
    runs = words.reshape(count, count_words(run, bits), n).view(np.uint32)
    groups = np.stack([_unpack_group(runs, group, run, bits) for group in range(run // DP4A_BYTES)], axis=1)
    bytewise = np.ascontiguousarray(groups.reshape(count * run // DP4A_BYTES, n)[..., None]).view(np.uint8)
    return np.asarray(bytewise.swapaxes(1, 2).reshape(count * run, n))


def _unpack_group(runs: Array, group: int, run: int, bits: int) -> Array:
    """Unpack dp4a group `group` of every run: uint32 (runs, n)."""
    array: Array = np.uint32(0)
    for field in locate_bit_fields(group, run, bits):
        array = array | (
            runs[:, field.word] >> np.uint32(field.shift) & np.uint32(BYTE_ONES * field.mask)
        ) << np.uint32(field.low)
    return array
