"""Codes of few bits as words of 32, and what they stand for; the weights of ops/block_quantized.py are made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from relaxlite.ir.intrinsics import LOOKUP
from relaxlite.ir.ops.scalars import Scalar, literal
from relaxlite.ir.program import Intrinsic, Value
from relaxlite.records import dataclass

QUAD = 4  # codes in a word of bytes
ONES = 0x01010101
Array: TypeAlias = "np.ndarray[Any, Any]"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Coding:
    """What codes of so many bits stand for: themselves or, of four bits, entries of a table; less `zero`."""

    bits: int
    zero: int = 0
    table: tuple[int, ...] = ()

    @property
    def attrs(self) -> dict[str, Any]:
        """Of the ops."""
        return {"bits": self.bits, "zero": self.zero, "table": self.table}

    @property
    def greatest(self) -> int:
        return max(self.table, default=(1 << self.bits) - 1)

    @property
    def number_bits(self) -> int:
        """Bits of what codes stand for."""
        return self.greatest.bit_length()

    def problem(self) -> str | None:
        """What is wrong with it; None: nothing."""
        if self.table and (
            self.bits != 4 or len(self.table) != 16 or not 0 <= min(self.table) <= max(self.table) < 256
        ):
            return f"a table is 16 bytes for codes of 4 bits, got {self.table} for {self.bits}"
        if not 0 <= self.zero <= self.greatest:
            return f"zero must be a code, from 0 to {self.greatest}, got {self.zero}"
        return None

    def numbers(self, codes: Array) -> Array:
        """What codes stand for before zero is taken off, uint8."""
        return np.asarray(self.table, np.uint8)[codes] if self.table else codes

    def of_word(self, word: Scalar) -> Scalar:
        """The same of four codes, the bytes of an int32."""
        if not self.table:
            return word
        words = np.asarray(self.table, np.uint8).view("<i4").tolist()
        return Scalar(Intrinsic(LOOKUP, (word.value, *(literal(w, "int32") for w in words)), "int32"))

    def longest_rotation(self, block: int) -> int:
        """How many quads of a block can be mixed at a time so that they stay bytes; 1: none."""
        return math.gcd(1 << 8 - self.number_bits, block // QUAD)

    def rotated(self, rotation: int) -> RotatedCoding:
        return RotatedCoding(self, rotation)


@dataclass(frozen=True, slots=True)
class RotatedCoding:
    """Codes whose quads are mixed, `rotation` at a time, by the Walsh-Hadamard matrix (`rotated`), as unsigned bytes:
    all but the first of those quads hold sums of as many positive as negative codes, so that they get an offset."""

    coding: Coding
    rotation: int

    @property
    def offset(self) -> int:
        return self.rotation << self.coding.number_bits - 1

    @property
    def greatest(self) -> int:
        """Of the bytes."""
        if self.rotation == 1:
            return self.coding.greatest
        return max(self.rotation * self.coding.greatest, self.offset + self.rotation // 2 * self.coding.greatest)

    @property
    def zeros(self) -> tuple[int, ...]:
        """How many times each sum of what the codes are multiplied by (quantize_blocks) is too much in the product."""
        if self.rotation == 1:
            return (self.coding.zero,)
        return self.rotation * self.coding.zero - self.offset, self.offset

    def mixed(self, quads: Sequence[Value]) -> list[Value]:
        """The quads of a block, int32 words. Bytes borrow from each other on the way, but sums of words are sums of
        their bytes wherever these end as bytes (modulo 2**32), so that no more than additions of words are needed."""
        if self.rotation == 1:
            return list(quads)
        found = []
        for first in range(0, len(quads), self.rotation):
            head, *others = rotated([Scalar(quad) for quad in quads[first : first + self.rotation]])
            found += [head, *(other + four_bytes(self.offset) for other in others)]
        return [quad.value for quad in found]


def four_bytes(byte: int) -> int:
    """Four equal bytes as an int32."""
    word = byte * ONES
    return word - (1 << 32) if word >> 31 else word


def rotated(items: Sequence[T]) -> list[T]:
    """H @ items, of the Walsh-Hadamard matrix H of as many rows, a power of two, in the order of Sylvester."""
    found, span = list(items), len(items) // 2
    while span:
        for k in (k for k in range(len(found)) if not k & span):
            a, b = found[k], found[k + span]
            found[k], found[k + span] = a + b, a - b  # type: ignore[operator]
        span //= 2
    return found


def words_of(block: int, bits: int) -> int:
    """How many words the codes of a block take."""
    return block * bits // 32


def is_block(block: int, bits: int) -> bool:
    """Whether blocks of this size fill whole words."""
    return block > 0 and block % 8 == 0 and (bits in (4, 8) or block * (bits - 4) % 32 == 0)


def pack_codes(codes: Array, block: int, bits: int) -> Array:
    """Codes uint8 (rows, n) as words int32 (rows * bits / 32, n). Fastest where columns lie in one piece."""
    rows, n = codes.shape
    quads = np.ascontiguousarray(codes.T).view("<u4")  # (n, rows / 4)
    if bits == 8:
        return np.ascontiguousarray(quads.T).view(np.int32)
    low = quads & np.uint32(ONES * 15)
    words = np.empty((rows // block, words_of(block, bits), n), np.uint32)
    words[:, : block // 8] = _by_block(low[:, 0::2] | low[:, 1::2] << np.uint32(4), rows // block)
    extra = bits - 4
    if extra:
        high = quads >> np.uint32(4) & np.uint32(ONES * ((1 << extra) - 1))
        per_word = 8 // extra
        joined = high[:, 0::per_word].copy()
        for q in range(1, per_word):
            joined |= high[:, q::per_word] << np.uint32(extra * q)
        words[:, block // 8 :] = _by_block(joined, rows // block)
    return words.reshape(-1, n).view(np.int32)


def _by_block(words: Array, blocks: int) -> Array:
    """Words of columns (n, count) as (blocks, count / blocks, n)."""
    return np.asarray(words.reshape(len(words), blocks, -1).transpose(1, 2, 0))


def unpack_codes(words: Array, block: int, bits: int) -> Array:
    """The inverse: codes uint8 (rows, n)."""
    n = words.shape[1]
    count = len(words) // words_of(block, bits)
    blocks = words.reshape(count, words_of(block, bits), n).view(np.uint32)
    quads = np.stack([_quad(blocks, q, block, bits) for q in range(block // QUAD)], axis=1)
    bytewise = np.ascontiguousarray(quads.reshape(count * block // QUAD, n)[..., None]).view(np.uint8)
    return np.asarray(bytewise.swapaxes(1, 2).reshape(count * block, n))


def _quad(words: Array, q: int, block: int, bits: int) -> Array:
    """Quad q of each block, (blocks, n)."""
    if bits == 8:
        return np.asarray(words[:, q])
    found: Array = words[:, q // 2] >> np.uint32(4 * (q % 2)) & np.uint32(ONES * 15)
    if bits > 4:
        extra, per_word = bits - 4, 8 // (bits - 4)
        high = words[:, block // 8 + q // per_word] >> np.uint32(extra * (q % per_word))
        found = found | (high & np.uint32(ONES * ((1 << extra) - 1))) << np.uint32(4)
    return found
