"""Intrinsics: scalar functions of one vector lane that map to single instructions on some processors.

    fma(a, b, c) = a*b + c                                                  floats; one rounding or two
    dot4_u8s8(c, a0..a3, b0..b3) = c + a0*b0 + a1*b1 + a2*b2 + a3*b3        int32 of uint8 and int8; wraps, exact
    dot4_words(c, a, b, max_a, max_b)                                       the same, of the bytes of two int32
    lookup_bytes(a, t0, t1, t2, t3) = the bytes of t0..t3 at the bytes of a  int32; each byte of a is below 16
    word(b0, b1, b2, b3) = b0 | b1 << 8 | b2 << 16 | b3 << 24                int32 of the bits of four int8
    dot2_i16(c, a0, a1, b0, b1) = c + a0*b0 + a1*b1                         int32 of int16; wraps
    dot2_bf16(c, a0, a1, b0, b1) = c + a0*b0 + a1*b1                        float32 of bfloat16
    nearest_i32(a) = a                                                      int32 of float32, to nearest even
    narrow_bf16(a) = a                                                      bfloat16 of float32, to nearest even
    float_of_bits(a)                                                        float32 of the bits of an int32
    bits_of_float(a)                                                        int32 of the bits of a float32; and such
    pair(a, b) = a | b << 16                                                int32 of the bits of two bfloat16
    dot2_pairs(c, a, b)                                                     dot2_bf16 of two such pairs
    dot2_halves(c, a, b)                                                    dot2_i16 of the halves of two int32
    shuffle_xor(a, n) = a of the lane whose number differs in the bits of n float32, between the threads of a warp

`max_a` and `max_b` are literal bounds of the bytes of a and of the absolute values of the bytes of b: small numbers
have faster code on processors without a 4-way dot product. The table of lookup_bytes is four literals, lowest bytes
first.

dot2_bf16 adds a1*b1 and then a0*b0. Products are exact; each of the two sums is rounded to float32, to nearest even.
vdpbf16ps computes the same (docs/measurements/cpus.md, dot2_bf16), but flushes subnormal operands and sums to zero of
the same sign, whatever MXCSR says; a product beyond the range of float32 is infinite in one and may cancel in the
other. vcvtneps2bf16 flushes subnormals too: narrow_bf16 is a cast that permits flushing. The code generator emits these
instructions if the target has them and the operands of a lane are adjacent in memory; otherwise it widens, multiplies
and adds in the same order. A sum `s += dot2_pairs(0, a, b)` is compiled as `s = dot2_pairs(s, a, b)`.
"""

from __future__ import annotations

from collections.abc import Mapping

from relaxlite import dtypes
from relaxlite.dtypes import DType
from relaxlite.records import dataclass


@dataclass(frozen=True, slots=True)
class IntrinsicSignature:
    """Signature of an intrinsic: dtypes of operands and result. None stands for any float dtype, the same for all."""

    args: tuple[DType | None, ...]
    result: DType | None


@dataclass(frozen=True, slots=True)
class DotProduct:
    """Dot product of `length` elements of dtypes `a` and `b`, added to an accumulator of dtype `total`."""

    length: int
    a: DType
    b: DType
    total: DType


DOT_PRODUCTS: Mapping[str, DotProduct] = {
    "dot4_u8s8": DotProduct(4, "uint8", "int8", "int32"),
    "dot2_i16": DotProduct(2, "int16", "int16", "int32"),
    "dot2_bf16": DotProduct(2, "bfloat16", "bfloat16", "float32"),
}

DOT4_PACKED_U8S8 = "dot4_words"
"""dot4_u8s8 of packed int32 operands, lowest byte first. Two literals bound the bytes of the first operand and the
absolute values of the bytes of the second."""
MAX_MADDUBS_PRODUCT = 2**14 - 1
"""Largest product of two bytes of which a sum of two fits int16, as vpmaddubsw accumulates."""
PACK_BYTES = "word"
"""Four int8 packed into an int32; one load if they are adjacent in memory."""
ROUND_TO_INT32 = "nearest_i32"
"""Rounding of a float32 to int32; -2**31 for NaN and out-of-range numbers, where a cast saturates."""
NARROW = "narrow_bf16"
"""Cast of float32 to bfloat16 that may flush subnormals, so that one instruction suffices."""
BITCAST_TO_FLOAT32 = "float_of_bits"
"""Bitcast of an int32 to float32."""
BITCASTS: Mapping[tuple[DType, DType], str] = {
    ("int32", "float32"): BITCAST_TO_FLOAT32,
    ("float32", "int32"): "bits_of_float",
    ("int64", "float64"): "double_of_bits",
    ("float64", "int64"): "bits_of_double",
    ("int16", "float16"): "half_of_bits",
    ("float16", "int16"): "bits_of_half",
    ("int16", "bfloat16"): "bfloat16_of_bits",
    ("bfloat16", "int16"): "bits_of_bfloat16",
}
"""Bitcasts between floats and signed integers of their size."""
PACK_BF16 = "pair"
"""Two bfloat16 packed into an int32; one load if they are adjacent in memory."""
DOT2_PACKED_BF16 = "dot2_pairs"
"""dot2_bf16 of packed int32 operands, lower half first."""

DOT2_PACKED_INT16 = "dot2_halves"
"""dot2_i16 of packed int32 operands, lower half first."""

LOOKUP = "lookup_bytes"
"""Table lookup of 4-bit codes (a codebook), four codes per int32."""

SHUFFLE_XOR = "shuffle_xor"
"""Exchange between the 32 threads of a warp, which all execute it; the distance is a literal below 32."""

INTRINSICS: Mapping[str, IntrinsicSignature] = {
    "fma": IntrinsicSignature((None, None, None), None),
    DOT4_PACKED_U8S8: IntrinsicSignature(("int32",) * 5, "int32"),
    LOOKUP: IntrinsicSignature(("int32",) * 5, "int32"),
    PACK_BYTES: IntrinsicSignature(("int8", "int8", "int8", "int8"), "int32"),
    **{
        name: IntrinsicSignature((dot.total, *(dot.a,) * dot.length, *(dot.b,) * dot.length), dot.total)
        for name, dot in DOT_PRODUCTS.items()
    },
    ROUND_TO_INT32: IntrinsicSignature(("float32",), "int32"),
    NARROW: IntrinsicSignature(("float32",), "bfloat16"),
    **{name: IntrinsicSignature((source,), result) for (source, result), name in BITCASTS.items()},
    PACK_BF16: IntrinsicSignature(("bfloat16", "bfloat16"), "int32"),
    DOT2_PACKED_BF16: IntrinsicSignature(("float32", "int32", "int32"), "float32"),
    DOT2_PACKED_INT16: IntrinsicSignature(("int32", "int32", "int32"), "int32"),
    SHUFFLE_XOR: IntrinsicSignature(("float32", "int32"), "float32"),
}


def type_error(name: str, args: tuple[DType, ...], result: DType) -> str | None:
    """Check the operand and result dtypes of an intrinsic: an error message, or None."""
    signature = INTRINSICS.get(name)
    if signature is None:
        return f"unknown intrinsic {name!r}; known: {', '.join(INTRINSICS)}"
    if len(args) != len(signature.args):
        return f"{name} takes {len(signature.args)} operands, got {len(args)}"
    if signature.result is None:
        if not dtypes.is_float(result) or set(args) != {result}:
            return f"{name} of {', '.join(args)} giving {result}; it takes and gives one float dtype"
        return None
    if args != signature.args or result != signature.result:
        expected = ", ".join(map(str, signature.args))
        return f"{name} of {', '.join(args)} giving {result}; it takes {expected} and gives {signature.result}"
    return None
