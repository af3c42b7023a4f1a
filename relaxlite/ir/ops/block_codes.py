"""Codes of few bits as words of 32, and what they stand for; the weights of ops/block_quantized.py are made of them."""

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

DP4A_BYTES = 4  # codes in a word of bytes
ONES = 0x01010101
BIT_PLANES: Mapping[int, tuple[int, ...]] = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
"""Bits of a code that lie in words of their own, the lowest ones first, by the bits of a code."""
MAX_OF_TABLE = 4  # bits of codes that are places in a table
Array: TypeAlias = "np.ndarray[Any, Any]"
T = TypeVar("T")
Number = TypeVar("Number", int, SymExpr)


@dataclass(frozen=True, slots=True)
class Coding:
    """What codes of so many bits stand for: themselves or, of up to four bits, entries of a table; less `zero`."""

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
        if self.table:
            if self.bits > MAX_OF_TABLE:
                return f"codes of {self.bits} bits have no table, only those of at most {MAX_OF_TABLE} do"
            if len(self.table) != 1 << self.bits or not 0 <= min(self.table) <= max(self.table) < 256:
                return f"a table is {1 << self.bits} bytes for codes of {self.bits} bits, got {self.table}"
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
        whole = self.table * (1 << MAX_OF_TABLE - self.bits)
        words = np.asarray(whole, np.uint8).view("<i4").tolist()
        return Scalar(Intrinsic(LOOKUP, (word.value, *(literal(w, "int32") for w in words)), "int32"))

    def longest_rotation(self, block: int) -> int:
        """How many quads of a block can be mixed at a time so that they stay bytes; 1: none."""
        return math.gcd(1 << 8 - self.number_bits, block // DP4A_BYTES)

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
        result = []
        for first in range(0, len(quads), self.rotation):
            head, *others = rotated([Scalar(quad) for quad in quads[first : first + self.rotation]])
            result += [head, *(other + four_bytes(self.offset) for other in others)]
        return [quad.value for quad in result]


def four_bytes(byte: int) -> int:
    """Four equal bytes as an int32."""
    word = byte * ONES
    return word - (1 << 32) if word >> 31 else word


def rotated(items: Sequence[T]) -> list[T]:
    """H @ items, of the Walsh-Hadamard matrix H of as many rows, a power of two, in the order of Sylvester."""
    result, span = list(items), len(items) // 2
    while span:
        for k in (k for k in range(len(result)) if not k & span):
            a, b = result[k], result[k + span]
            result[k], result[k + span] = a + b, a - b  # type: ignore[operator]
        span //= 2
    return result


def rows_of_run(block: int, bits: int) -> int:
    """Of a column, rows whose codes fill whole words: those of a block, or of a few."""
    return math.lcm(block, 32 // min(BIT_PLANES[bits]))


def words_of(rows: int, bits: int) -> int:
    """How many words codes take."""
    return rows * bits // 32


def fills_words(rows: int, block: int, bits: int) -> bool:
    """Whether blocks of this size, of so many rows in all, fill whole words."""
    return block > 0 and block % 8 == 0 and rows % rows_of_run(block, bits) == 0


@dataclass(frozen=True, slots=True)
class Place(Generic[Number]):
    """Where some bits of a quad stand: in the bytes of a word, counted from the first word of a run, from bit `shift`
    of each byte on. They are those from bit `low` of the codes on, `width` of them."""

    word: Number
    shift: Number
    width: int
    low: int

    @property
    def mask(self) -> int:
        return (1 << self.width) - 1


def places_of(quad: Number, run: int, bits: int) -> list[Place[Number]]:
    """The bits of a quad, a number or an expression, of a run of so many rows."""
    result, first, low = [], 0, 0
    for width in BIT_PLANES[bits]:
        per_word = 8 // width
        result.append(Place(first + quad // per_word, quad % per_word * width, width, low))
        first, low = first + words_of(run, width), low + width
    return result


def pack_codes(codes: Array, block: int, bits: int) -> Array:
    """Codes uint8 (rows, n) as words int32 (rows * bits / 32, n). Fastest where columns lie in one piece."""
    rows, n = codes.shape
    quads = np.ascontiguousarray(codes.T).view("<u4")  # (n, rows / 4)
    if bits == 8:
        return np.ascontiguousarray(quads.T).view(np.int32)
    run = rows_of_run(block, bits)
    words = np.empty((rows // run, words_of(run, bits), n), np.uint32)
    first, low = 0, 0
    for width in BIT_PLANES[bits]:
        plane, per_word = quads >> np.uint32(low) & np.uint32(ONES * ((1 << width) - 1)), 8 // width
        joined = plane[:, 0::per_word].copy()
        for k in range(1, per_word):
            joined |= plane[:, k::per_word] << np.uint32(width * k)
        count = words_of(run, width)
        words[:, first : first + count] = joined.reshape(n, rows // run, count).transpose(1, 2, 0)
        first, low = first + count, low + width
    return words.reshape(words_of(rows, bits), n).view(np.int32)


def unpack_codes(words: Array, block: int, bits: int) -> Array:
    """The inverse: codes uint8 (rows, n)."""
    n, run = words.shape[1], rows_of_run(block, bits)
    count = len(words) // words_of(run, bits)
    runs = words.reshape(count, words_of(run, bits), n).view(np.uint32)
    quads = np.stack([_quad(runs, q, run, bits) for q in range(run // DP4A_BYTES)], axis=1)
    bytewise = np.ascontiguousarray(quads.reshape(count * run // DP4A_BYTES, n)[..., None]).view(np.uint8)
    return np.asarray(bytewise.swapaxes(1, 2).reshape(count * run, n))


def _quad(runs: Array, q: int, run: int, bits: int) -> Array:
    """Quad q of each run, (runs, n)."""
    array: Array = np.uint32(0)
    for at in places_of(q, run, bits):
        array = array | (runs[:, at.word] >> np.uint32(at.shift) & np.uint32(ONES * at.mask)) << np.uint32(at.low)
    return array
