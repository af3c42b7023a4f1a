"""The intrinsics: functions of several scalar operands that processors have in hardware, for one vector lane each.

    fma(a, b, c) = a*b + c                                                  floats; one rounding or two
    dot4_u8s8(c, a0..a3, b0..b3) = c + a0*b0 + a1*b1 + a2*b2 + a3*b3        int32 of uint8 and int8; wraps, exact
    dot4_words(c, a, b, most)                                               the same, of the bytes of two int32
    lookup_bytes(a, t0, t1, t2, t3) = the bytes of t0..t3 at the bytes of a  int32; each byte of a is below 16
    word(b0, b1, b2, b3) = b0 | b1 << 8 | b2 << 16 | b3 << 24                int32 of the bits of four int8
    dot2_i16(c, a0, a1, b0, b1) = c + a0*b0 + a1*b1                         int32 of int16; wraps
    dot2_bf16(c, a0, a1, b0, b1) = c + a0*b0 + a1*b1                        float32 of bfloat16
    nearest_i32(a) = a                                                      int32 of float32, to nearest even
    narrow_bf16(a) = a                                                      bfloat16 of float32, to nearest even
    float_of_bits(a)                                                        float32 of the bits of an int32
    pair(a, b) = a | b << 16                                                int32 of the bits of two bfloat16
    dot2_pairs(c, a, b)                                                     dot2_bf16 of two such pairs
    dot2_halves(c, a, b)                                                    dot2_i16 of the halves of two int32

`most` is a literal, which no byte of the word a exceeds: processors without an instruction for such products have
faster ones for small numbers. A table of lookup_bytes is four literals, lowest bytes first.

dot2_bf16 adds a1*b1 and then a0*b0, each product exact and each of the two sums rounded to float32, to nearest even.
vdpbf16ps does just this (docs/measurements/cpus.md, dot2_bf16), but takes numbers below 2**-126, operands and sums, as
zeros of their sign, whatever the mode of the thread; a product beyond the range of float32 is infinite in one and may
cancel in the other.
So does vcvtneps2bf16: narrow_bf16 is a cast for which that is good enough. The code generator uses the hardware's
instruction where the target has it and the operands of one lane lie beside each other in memory; elsewhere it widens,
multiplies and adds, in the same order. A sum `s += dot2_pairs(0, a, b)` is `s = dot2_pairs(s, a, b)`.
"""

from __future__ import annotations

from collections.abc import Mapping

from relaxlite import dtypes
from relaxlite.dtypes import DType
from relaxlite.records import dataclass


@dataclass(frozen=True, slots=True)
class IntrinsicType:
    """dtypes of the operands and the result; None: any float, the same for all."""

    args: tuple[DType | None, ...]
    result: DType | None


@dataclass(frozen=True, slots=True)
class DotProduct:
    """A dot product of `length` elements of a and b, added to an accumulator."""

    length: int
    a: DType
    b: DType
    total: DType


DOT_PRODUCTS: Mapping[str, DotProduct] = {
    "dot4_u8s8": DotProduct(4, "uint8", "int8", "int32"),
    "dot2_i16": DotProduct(2, "int16", "int16", "int32"),
    "dot2_bf16": DotProduct(2, "bfloat16", "bfloat16", "float32"),
}

DOT4_BYTES = "dot4_words"
"""dot4_u8s8 of numbers that come four in a word, lowest byte first: out of memory, or made by operations on words. Two
literals bound them: no byte of the first word is greater, none of the second further from 0."""
MAX_OF_PAIRS = 2**14 - 1
"""Sums of products of two bytes each fit into 16 bits while their greatest products add up to no more."""
PACKED_BYTES = "word"
"""Four bytes, which are one load where they lie beside each other."""
NEAREST = "nearest_i32"
"""A rounded number as an integer; -2**31 for NaN and for what int32 does not hold, where a cast has other answers."""
NARROW = "narrow_bf16"
"""A cast that may be one instruction."""
BITS = "float_of_bits"
"""The float32 whose bits an int32 has."""
PAIR = "pair"
"""Two bfloat16, which are one load where they lie beside each other."""
PAIRS = "dot2_pairs"
"""dot2_bf16 of numbers that come two in a word, lower half first."""

DOT2_INT16 = "dot2_halves"
"""dot2_i16 of numbers that come two in a word, lower half first."""

LOOKUP = "lookup_bytes"
"""What codes of four bits stand for, where that is in a table."""

INTRINSICS: Mapping[str, IntrinsicType] = {
    "fma": IntrinsicType((None, None, None), None),
    DOT4_BYTES: IntrinsicType(("int32",) * 5, "int32"),
    LOOKUP: IntrinsicType(("int32",) * 5, "int32"),
    PACKED_BYTES: IntrinsicType(("int8", "int8", "int8", "int8"), "int32"),
    **{
        name: IntrinsicType((dot.total, *(dot.a,) * dot.length, *(dot.b,) * dot.length), dot.total)
        for name, dot in DOT_PRODUCTS.items()
    },
    NEAREST: IntrinsicType(("float32",), "int32"),
    NARROW: IntrinsicType(("float32",), "bfloat16"),
    BITS: IntrinsicType(("int32",), "float32"),
    PAIR: IntrinsicType(("bfloat16", "bfloat16"), "int32"),
    PAIRS: IntrinsicType(("float32", "int32", "int32"), "float32"),
    DOT2_INT16: IntrinsicType(("int32", "int32", "int32"), "int32"),
}


def type_error(name: str, args: tuple[DType, ...], result: DType) -> str | None:
    """What is wrong with an intrinsic of these dtypes; None: nothing."""
    known = INTRINSICS.get(name)
    if known is None:
        return f"unknown intrinsic {name!r}; known: {', '.join(INTRINSICS)}"
    if len(args) != len(known.args):
        return f"{name} takes {len(known.args)} operands, got {len(args)}"
    if known.result is None:
        if not dtypes.is_float(result) or set(args) != {result}:
            return f"{name} of {', '.join(args)} giving {result}; it takes and gives one float dtype"
        return None
    if args != known.args or result != known.result:
        wanted = ", ".join(map(str, known.args))
        return f"{name} of {', '.join(args)} giving {result}; it takes {wanted} and gives {known.result}"
    return None
