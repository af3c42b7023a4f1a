"""Matrix products and gathers of blocked weights: the 1- to 8-bit formats of language model checkpoints (GGUF, GPTQ).

A weight (rows, n) is split into blocks of B consecutive rows of one column. A block has integer codes of `bits` bits,
a scale, and optionally an offset:

    weight[k, j] = scales[k // B, j] * (code[k, j] - zero) + offsets[k // B, j]

With a `table` (a codebook of bytes, for codes of at most 4 bits), table[code] replaces the code.

Scales and offsets are floats, or int8 or uint8 codes with float factors per super-block of S rows (GGUF's K formats):

    scales[k // B, j] = factors[k // S, j] * scale_codes[k // B, j]

The operands of a weight are `words, scales[, offsets]` or `words, scales, factors[, offsets, offset_factors]`.

Codes are packed in int32 words (rows * bits / 32, n), so that a few word operations unpack a *dp4a group*: the codes of
four consecutive rows as the bytes of an int32, for `dot4_words`. Codes are split into *bit planes* of 8, 4, 2 or 1
bits: 3 bits are 2 + 1, 5 are 4 + 1, 6 are 4 + 2. The words of a block hold the planes one after another, the lowest
bits first. In a plane of w bits, row 4*q + b is in byte b of word q // (8/w), from its bit w * (q % (8/w)) on. Blocks
too small to fill whole words share them: a *run* of blocks is packed like one block (3 bits: two blocks of 16 rows).

The integer path rounds activations to int8 with a scale per block of a row, as llama.cpp does. With `low_bits`, a
second byte adds precision: x = scale * (high * 2**low_bits + low). Sums within a block are exact.

With a `rotation` of T > 1, every T dp4a groups of a block are transformed, in weight and activations, by the
Walsh-Hadamard matrix H of size T. H^T H = T I, so the transform only multiplies products by T, while an outlier among
the activations of a block is distributed over T of them and costs the others less precision (QuaRot, arXiv 2404.00456).
Transformed codes still fit into bytes: T <= 16 for 4 bits, 8 for 5 bits, 4 for 6 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np

from relaxlite.dtypes import DType
from relaxlite.ir.expr import Expr
from relaxlite.ir.intrinsics import DOT4_PACKED_U8S8, PACK_BYTES
from relaxlite.ir.op import Attr, Op, Sample, register
from relaxlite.ir.ops.block_codes import (
    BIT_PLANES,
    BYTE_ONES,
    DP4A_BYTES,
    Array,
    Coding,
    count_words,
    fills_words,
    hadamard_transform,
    locate_bit_fields,
    rows_per_run,
    unpack_codes,
)
from relaxlite.ir.ops.broadcast import PROVER, format_shape
from relaxlite.ir.ops.indexing import DynamicIndex, constant_indices, draw_indices, with_checked_indices
from relaxlite.ir.ops.linalg import equality_checks
from relaxlite.ir.ops.rounded_blocks import (
    LOW_BITS,
    ROTATIONS,
    block_sums_shape,
    bytes_per_block,
    compute_block_sums,
    decode_integers,
)
from relaxlite.ir.ops.scalars import Scalar, literal
from relaxlite.ir.program import Allocate, Buffer, Intrinsic, Load, Stmt, Store, Value, compute, loops, seq
from relaxlite.ir.symbolic import IntLike, SymExpr, as_int, sym
from relaxlite.ir.types import TensorType, Type
from relaxlite.records import dataclass

CODE_BITS = tuple(BIT_PLANES)
FLOATS = ("float32", "float16", "bfloat16")  # dtypes of float scales, offsets and factors
CODE_DTYPES = ("uint8", "int8")  # dtypes of scales and offsets that have factors
T = TypeVar("T")

MAX_BLOCK_ROWS = 256  # the sum of products of a block fits into int32: 256 * 255 * (127 * 256 + 128) < 2**31

WEIGHT_OPERANDS = ("words", "scales", "*others")
CODING_ATTRS: Mapping[str, Attr] = {
    "bits": Attr("int", choices=CODE_BITS),
    "zero": Attr("int", 0),
    "table": Attr("ints", ()),
}


def _with_factors(scales: Sequence[T], dtype_of: Callable[[T], str]) -> list[tuple[T, T | None]]:
    """Pair the scales, and the offsets if there are any, with their factors (None: they are floats)."""
    rest = iter(scales)
    return [(values, next(rest, None) if dtype_of(values) in CODE_DTYPES else None) for values in rest]


@dataclass(frozen=True, slots=True)
class StackedMatrix:
    """Matrix `number` of a buffer of rank 3, indexed like a buffer of rank 2."""

    buffer: Buffer
    number: SymExpr

    @property
    def dtype(self) -> DType:
        return self.buffer.dtype

    @property
    def shape(self) -> tuple[SymExpr, ...]:
        return self.buffer.shape[1:]

    def __getitem__(self, at: tuple[IntLike, IntLike]) -> Load:
        return self.buffer[self.number, at[0], at[1]]


Matrix: TypeAlias = "Buffer | StackedMatrix"


class BlockedWeightOp(Op):
    """Base of the ops with a blocked weight as operand: type checks."""

    def weight_extents(self, words: Expr, scales: Sequence[Expr], coding: Coding) -> tuple[int, int, SymExpr]:
        """Check a blocked weight and return (rows, rows per block, columns); `scales`: all operands after `words`."""
        return self.weight_extents_of_types(
            self.tensor(words, "words"), [self.tensor(x, "scales") for x in scales], coding
        )

    def weight_extents_of_types(
        self, words: TensorType, types: list[TensorType], coding: Coding
    ) -> tuple[int, int, SymExpr]:
        """Check a blocked weight by the types of `words` and of the operands after it; see `weight_extents`."""
        bits, error = coding.bits, coding.find_error()
        scales = types[0]
        if words.dtype != "int32" or words.rank != 2 or scales.rank != 2 or scales.dtype not in (*FLOATS, *CODE_DTYPES):
            self.fail(
                f"words must be int32 and scales {', '.join(FLOATS)}, or uint8 or int8 with factors, all of rank 2, "
                f"got {words} and {scales}"
            )
        assert words.shape is not None and scales.shape is not None
        count, blocks = as_int(words.shape[0]), as_int(scales.shape[0])
        if (
            not count
            or not blocks
            or count * 32 % (bits * blocks)
            or PROVER.can_prove_ne(words.shape[1], scales.shape[1])
        ):
            self.fail(
                f"words {format_shape(words.shape)} of {bits} bits and scales {format_shape(scales.shape)} do not fit"
            )
        rows = count * 32 // bits
        if not fills_words(rows, rows // blocks, bits):
            self.fail(f"{rows} codes of {bits} bits do not fill whole words in blocks of {rows // blocks} rows")
        num_operands = 1
        if scales.dtype in CODE_DTYPES:
            num_operands = 2
            self._check_factors(scales, types[1] if len(types) > 1 else None)
        scale_types, offset_types = types[:num_operands], types[num_operands:]
        if offset_types and offset_types != scale_types:
            wanted_text, got_text = (", ".join(map(str, x)) for x in (scale_types, offset_types))
            self.fail(f"offsets must be like scales, {wanted_text}, got {got_text}")
        if error is not None:
            self.fail(error)
        return rows, rows // blocks, words.shape[1]

    def check_activations(
        self, types: Sequence[TensorType], rows: int, block: int, coding: Coding, low_bits: int, rotation: int
    ) -> SymExpr:
        """Check the types of quantized activations (codes, scales, sums) against a weight; return their row count m."""
        limit = coding.max_rotation(block)
        if rotation > limit:
            self.fail(
                f"these codes, mixed {rotation} quads at a time, are no bytes or no whole blocks; {limit} would be"
            )
        if block > MAX_BLOCK_ROWS:
            self.fail(f"sums of blocks of {block} rows may not fit into 32 bits; at most {MAX_BLOCK_ROWS} rows do")
        shape = types[0].shape or ()
        block_shape = (rows // block, shape[1] if len(shape) == 3 else sym(0))
        if [t.dtype for t in types] != ["int8", "float32", "int32"] or len(shape) != 3:
            self.fail(f"x, x_scales and x_sums must be as quantize_blocks makes them, got {', '.join(map(str, types))}")
        sums = block_sums_shape(block_shape, rotation)
        for t, expected in zip(
            types, ((*block_shape, bytes_per_block(block, low_bits)), block_shape, sums), strict=True
        ):
            if t.rank != len(expected) or any(map(PROVER.can_prove_ne, t.shape or (), expected)):
                width, result = bytes_per_block(block, low_bits), ", ".join(map(str, types))
                self.fail(
                    f"{rows} rows in blocks of {block} take x of ({rows // block}, m, {width}) and x_scales and x_sums "
                    f"of ({rows // block}, m){', of sums two' if rotation > 1 else ''}, got {result}"
                )
        return block_shape[1]

    def _check_factors(self, scales: TensorType, factors: TensorType | None) -> None:
        if factors is None:
            self.fail(f"scales of {scales.dtype} need factors after them, floats, one for several blocks")
        assert scales.shape is not None and factors.shape is not None
        blocks, count = as_int(scales.shape[0]) or 0, as_int(factors.shape[0]) if factors.rank == 2 else None
        if (
            factors.dtype not in FLOATS
            or not count
            or blocks % count
            or PROVER.can_prove_ne(scales.shape[1], factors.shape[1])
        ):
            self.fail(
                f"factors of scales {scales} must be {', '.join(FLOATS)}, of as many columns and a number of rows that "
                f"divides {blocks}, got {factors}"
            )


def rows_per_block(words: Matrix, scales: Matrix, bits: int) -> int:
    """Number of rows of a block."""
    count, blocks = as_int(words.shape[0]) or 0, as_int(scales.shape[0]) or 1
    return count * 32 // bits // blocks


def _load_scales(scales: Sequence[Matrix], g: SymExpr, j: IntLike) -> list[Scalar]:
    """Load the scale, and the offset if there is one, of block g of column j as float32."""
    results = []
    for values, factors in _with_factors(scales, lambda operand: operand.dtype):
        value = Scalar(values[g, j]).cast("float32")
        if factors is not None:
            blocks = (as_int(values.shape[0]) or 1) // (as_int(factors.shape[0]) or 1)
            value = value * Scalar(factors[g // blocks, j]).cast("float32")
        results.append(value)
    return results


def dequantize_element(words: Matrix, scales: Sequence[Matrix], k: SymExpr, j: IntLike, coding: Coding) -> Scalar:
    """Dequantize the element in row k and column j to float32."""
    bits, zero = coding.bits, coding.zero
    block = rows_per_block(words, scales[0], bits)
    run_rows, byte = rows_per_run(block, bits), k % DP4A_BYTES * 8
    if len(BIT_PLANES[bits]) == 1:
        group, first = k // DP4A_BYTES, sym(0)
    else:
        group, first = k % run_rows // DP4A_BYTES, k // run_rows * count_words(run_rows, bits)
    fields = locate_bit_fields(group, run_rows, bits)

    def bits_at(byte: IntLike, ones: int) -> list[tuple[Scalar, int]]:
        """Shift the bit planes right by `byte` bits and mask them; `ones`: 1 for one byte, BYTE_ONES for all four."""
        loads = (
            (Scalar(words[first + field.word, j]).binary("shift_right", field.shift + byte), field) for field in fields
        )
        return [(shifted & ones * field.mask, field.low) for shifted, field in loads]

    if coding.table:
        code = coding.decode_word(_combine_bits(bits_at(0, BYTE_ONES))).binary("shift_right", byte) & 255
    else:
        code = _combine_bits(bits_at(byte, 1))
    centered = code - zero if zero else code
    scale, *offset = _load_scales(scales, k // block, j)
    value = centered.cast("float32") * scale
    return value + offset[0] if offset else value


def _as_float32(scales: Sequence[Array]) -> list[Array]:
    """Compute the scales, and the offsets if there are any, as float32 arrays (blocks, n)."""
    results = []
    for values, factors in _with_factors(scales, lambda operand: operand.dtype.name):
        value = values.astype(np.float32)
        if factors is not None:
            value *= factors.astype(np.float32).repeat(len(values) // len(factors), axis=0)
        results.append(value)
    return results


def dequantize_array(words: Array, scale_operands: Sequence[Array], coding: Coding) -> Array:
    """Dequantize a blocked weight to float32 (rows, n) in NumPy."""
    block = words.shape[0] * 32 // coding.bits // scale_operands[0].shape[0]
    codes = coding.decode(unpack_codes(words, block, coding.bits)).astype(np.float32) - np.float32(coding.zero)
    scales, *offsets = _as_float32(scale_operands)
    result = codes.reshape(len(scales), block, words.shape[1]) * scales[:, None]
    if offsets:
        result = result + offsets[0][:, None]
    return np.asarray(result.reshape(codes.shape), np.float32)


SAMPLE_TABLE = (0, 255, 3, 127, 128, 129, 7, 90, 200, 201, 202, 17, 16, 15, 14, 1)
SMALL_SAMPLE_TABLE = (0, 24, 3, 1, 2, 12, 7, 9, 20, 11, 8, 17, 16, 15, 14, 1)


def draw_words(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    return rng.integers(-(2**31), 2**31, shape).astype(np.int32)


@register
class DequantizeBlocks(BlockedWeightOp):
    """Dequantize a blocked weight (words, scales, ...) to float32 (rows, n).

    Never constant-folded: the weight stays packed in memory and is dequantized in the prologue of its consumer
    (passes/fuse/fuse_prologues.py). `coarse` does not change the result; it permits a consumer to round the activations
    to 8 bits where more are usual (passes/graph/integer_products.py).
    """

    name = "dequantize_blocks"
    operands = WEIGHT_OPERANDS
    attrs: ClassVar[Mapping[str, Attr]] = {**CODING_ATTRS, "coarse": Attr("bool", False)}

    def infer(self, words: Expr, *scales: Expr, coarse: bool, **coding: Any) -> Type:
        rows, _, columns = self.weight_extents(words, scales, Coding(**coding))
        return TensorType.of((rows, columns), "float32")

    def lower(self, words: Buffer, *scales: Buffer, out: Buffer, coarse: bool, **coding: Any) -> Stmt:
        pairs = ((x.shape[1], words.shape[1]) for x in scales)
        checks = equality_checks("dequantize_blocks: codes and scales have different columns", *pairs)
        return seq(*checks, compute(out, lambda k, j: dequantize_element(words, scales, k, j, Coding(**coding)).value))

    def reference(self, words: Any, *scales: Any, coarse: bool, **coding: Any) -> Any:
        return dequantize_array(words, scales, Coding(**coding))

    def samples(self) -> Iterable[Sample]:
        kinds, make = ("int32", "float32", "float32"), {0: draw_words}
        yield Sample(((8, "n"), (2, "n")), {"bits": 4, "zero": 8}, kinds[:2], make)
        yield Sample(((12, "n"), (4, "n"), (4, "n")), {"bits": 6, "coarse": True}, kinds, make)
        yield Sample(((5, "n"), (1, "n"), (1, "n")), {"bits": 5}, kinds, make)
        yield Sample(((16, "n"), (2, "n")), {"bits": 8, "zero": 128}, ("int32", "float16"), make, tolerance=1e-3)
        yield Sample(((12, "n"), (4, "n"), (2, "n")), {"bits": 6, "zero": 32}, ("int32", "int8", "float16"), make)
        two_level = ("int32", "uint8", "float16", "uint8", "float16")
        yield Sample(((16, "n"), (4, "n"), (1, "n"), (4, "n"), (1, "n")), {"bits": 4}, two_level, make)
        yield Sample(((8, "n"), (2, "n")), {"bits": 4, "zero": 128, "table": SAMPLE_TABLE}, kinds[:2], make)
        yield Sample(((4, "n"), (4, "n"), (4, "n")), {"bits": 2}, kinds, make)
        yield Sample(((6, "n"), (4, "n")), {"bits": 3, "zero": 4}, kinds[:2], make)
        yield Sample(((6, "n"), (2, "n")), {"bits": 3, "zero": 128, "table": SAMPLE_TABLE[:8]}, kinds[:2], make)
        yield Sample(((2, "n"), (2, "n")), {"bits": 1, "zero": 1, "table": (0, 2)}, kinds[:2], make)


@register
class GatherBlocks(BlockedWeightOp):
    """Gather columns of a blocked weight by index and dequantize them (embedding lookup): float32 (indices..., rows).

    Negative indices count from the end.
    """

    name = "gather_blocks"
    operands = ("indices", *WEIGHT_OPERANDS)
    attrs: ClassVar[Mapping[str, Attr]] = CODING_ATTRS

    def infer(self, indices: Expr, words: Expr, *scales: Expr, **coding: Any) -> Type:
        rows, _, _ = self.weight_extents(words, scales, Coding(**coding))
        ty = self.tensor(indices, "indices")
        if ty.dtype not in ("int32", "int64"):
            self.fail(f"indices must be int32 or int64, got {ty}")
        return TensorType.of((*(ty.shape or ()), rows), "float32")

    def lower(self, indices: Buffer, words: Buffer, *scales: Buffer, out: Buffer, **coding: Any) -> Stmt:
        def element(*i: SymExpr) -> Stmt:
            position = DynamicIndex.along(self, words, 1, indices[i[:-1]])
            weight = Coding(**coding)
            return with_checked_indices(
                [position], lambda p: Store(out, i, dequantize_element(words, scales, i[-1], p, weight).value)
            )

        return loops("ijklmn", out.shape, element)

    def reference(self, indices: Any, words: Any, *scales: Any, **coding: Any) -> Any:
        columns = constant_indices(indices).reshape(-1)
        result = dequantize_array(words[:, columns], [x[:, columns] for x in scales], Coding(**coding))
        return np.ascontiguousarray(result.T).reshape(*indices.shape, len(result))

    def samples(self) -> Iterable[Sample]:
        kinds = ("int64", "int32", "float32", "float32")
        make = {0: draw_indices(5), 1: draw_words}
        yield Sample((("m",), (8, 5), (2, 5)), {"bits": 4, "zero": 8}, kinds[:3], make)
        yield Sample(((2, "m"), (12, 5), (4, 5), (4, 5)), {"bits": 6}, kinds, make)
        yield Sample(((), (16, 5), (2, 5)), {"bits": 8, "zero": 128}, ("int32", *kinds[1:3]), make)
        two_level = ("int64", "int32", "uint8", "float16", "uint8", "float16")
        yield Sample((("m",), (20, 5), (4, 5), (2, 5), (4, 5), (2, 5)), {"bits": 5}, two_level, make)
        yield Sample((("m",), (8, 5), (2, 5)), {"bits": 4, "zero": 9, "table": SAMPLE_TABLE}, kinds[:3], make)
        yield Sample((("m",), (6, 5), (4, 5)), {"bits": 3, "zero": 4}, kinds[:3], make)
        yield Sample((("m",), (4, 5), (2, 5)), {"bits": 2, "zero": 9, "table": SAMPLE_TABLE[4:8]}, kinds[:3], make)


def _dot4(total: Value, a: Value, b: Value, max_code: int) -> Intrinsic:
    """total + the dot product of four bytes, u8 in `a` (at most `max_code`) and s8 in `b`."""
    return Intrinsic(DOT4_PACKED_U8S8, (total, a, b, literal(max_code, "int32"), literal(128, "int32")), "int32")


@dataclass(frozen=True, slots=True)
class IntegerProduct:
    """Loop nest for one element of `matmul_blocks`: quantized activations times a blocked weight."""

    rounded: tuple[Buffer, Buffer, Buffer]
    words: Matrix
    scales: Sequence[Matrix]
    coding: Coding
    low_bits: int
    rotation: int

    def store(self, out: Buffer, place: tuple[SymExpr, SymExpr], i: SymExpr, j: SymExpr) -> Stmt:
        """Compute the product element of row i and column j and store it at `place` of `out`."""
        element = Buffer("e", (), "float32", "local")
        terms = loops("g", (self.scales[0].shape[0],), lambda g: Store(element, (), self._term(i, j, g), "add"))
        init = Store(element, (), literal(0.0, "float32"))
        return Allocate(element, seq(init, terms, Store(out, place, Load(element, ()))))

    def _term(self, i: SymExpr, j: SymExpr, g: SymExpr) -> Value:
        """The contribution of block g to element (i, j), float32."""
        (x, x_scales, _), low_bits = self.rounded, self.low_bits
        block, coding = (
            rows_per_block(self.words, self.scales[0], self.coding.bits),
            self.coding.with_rotation(self.rotation),
        )
        groups, max_code = block // DP4A_BYTES, coding.max_value
        codes = coding.transform_groups(_load_groups(self.words, g, j, block, self.coding))
        start = literal(0, "int32")
        correction: Value = start
        for activation_sum, zero in zip(self._sums(g, i), coding.sum_corrections, strict=True):
            correction = (Scalar(correction) - activation_sum * zero).value if zero else correction
        high = _dot_product(
            start if low_bits else correction,
            codes,
            [_pack_activations(x, g, i, group) for group in range(groups)],
            max_code,
        )
        if low_bits:
            low = _dot_product(
                correction, codes, [_pack_activations(x, g, i, groups + group) for group in range(groups)], max_code
            )
            total = Scalar(high).binary("shift_left", low_bits) + Scalar(low)
        else:
            total = Scalar(high)
        scale, *offset = _load_scales(self.scales, g, j)
        result = total.cast("float32") * scale
        if offset:
            result = result + (self._sums(g, i)[0] * self.rotation).cast("float32") * offset[0]
        return (result * Scalar(x_scales[g, i])).value

    def _sums(self, g: SymExpr, i: SymExpr) -> list[Scalar]:
        x_sums = self.rounded[2]
        return [Scalar(x_sums[(k, g, i)]) for k in range(2)] if self.rotation > 1 else [Scalar(x_sums[g, i])]


@register
class MatmulBlocks(BlockedWeightOp):
    """Integer product x @ weight in float32 (m, n) of activations from `quantize_blocks` and a weight in equal blocks:

    sum over blocks g of x_scales[g, i] * (scales[g, j] * sum of (codes - zero) * x + offsets[g, j] * x_sums[g, i])

    Sums within a block, of at most 256 rows, are exact. `low_bits` and `rotation` must be those of `quantize_blocks`,
    and x_sums the sums of x's integers: kernels with signed codes do not read x_sums for the zero point.
    """

    name = "matmul_blocks"
    operands = ("x", "x_scales", "x_sums", *WEIGHT_OPERANDS)
    attrs: ClassVar[Mapping[str, Attr]] = {
        **CODING_ATTRS, "low_bits": Attr("int", 0, LOW_BITS), "rotation": Attr("int", 1, ROTATIONS),
    }  # fmt: skip

    def infer(
        self, x: Expr, x_scales: Expr, x_sums: Expr, words: Expr, *scales: Expr, low_bits: int, rotation: int,
        **coding: Any,
    ) -> Type:  # fmt: skip
        rows, block, columns = self.weight_extents(words, scales, Coding(**coding))
        types = [self.tensor(v, name) for v, name in zip((x, x_scales, x_sums), self.operands, strict=False)]
        count = self.check_activations(types, rows, block, Coding(**coding), low_bits, rotation)
        return TensorType.of((count, columns), "float32")

    def lower(
        self, x: Buffer, x_scales: Buffer, x_sums: Buffer, words: Buffer, *scales: Buffer, out: Buffer, low_bits: int,
        rotation: int, **coding: Any,
    ) -> Stmt:  # fmt: skip
        checks = equality_checks(
            "matmul_blocks: x and the weight differ in size",
            *((b.shape[-1], x.shape[1]) for b in (x_scales, x_sums)),
            *((b.shape[1], words.shape[1]) for b in scales),
        )
        sums = IntegerProduct((x, x_scales, x_sums), words, scales, Coding(**coding), low_bits, rotation)
        return seq(*checks, loops("ij", out.shape, lambda i, j: sums.store(out, (i, j), i, j)))

    def reference(
        self, x: Any, x_scales: Any, x_sums: Any, words: Any, *scales: Any, low_bits: int, rotation: int, **coding: Any
    ) -> Any:
        return matmul_array((x, x_scales, x_sums), words, scales, Coding(**coding), low_bits, rotation)

    def samples(self) -> Iterable[Sample]:
        kinds = ("int8", "float32", "int32", "int32", "float32", "float32")

        def draw(shape: tuple[int, ...]) -> Array:
            return np.random.default_rng(0).integers(-127, 128, shape).astype(np.int8)

        configurations: tuple[tuple[int, int, int, int, tuple[int, ...], int], ...] = (
            (4, 32, 8, 0, (), 1), (8, 32, 128, 0, (), 1), (5, 32, 0, 8, (), 1), (6, 16, 32, 0, (), 1),
            (4, 32, 8, 4, (), 1), (4, 32, 128, 0, SAMPLE_TABLE, 1), (4, 32, 128, 4, SAMPLE_TABLE, 1),
            (4, 16, 0, 8, SAMPLE_TABLE, 1), (4, 32, 8, 0, (), 8), (4, 64, 0, 0, (), 16), (4, 32, 5, 4, (), 4),
            (5, 32, 16, 0, (), 8), (5, 32, 0, 0, (), 8), (6, 16, 32, 0, (), 4), (6, 16, 0, 0, (), 2),
            (4, 32, 12, 0, SMALL_SAMPLE_TABLE, 8), (4, 16, 0, 0, SMALL_SAMPLE_TABLE, 4),
            (2, 32, 1, 0, (), 1), (2, 16, 0, 4, (), 1), (2, 32, 1, 0, (), 8), (3, 16, 4, 4, (), 1),
            (3, 32, 0, 8, (), 1), (3, 16, 4, 0, (), 4), (3, 32, 9, 4, SMALL_SAMPLE_TABLE[:8], 1),
            (3, 16, 12, 0, SMALL_SAMPLE_TABLE[8:], 4), (1, 32, 1, 0, (0, 2), 8), (1, 16, 0, 4, (), 1),
        )  # fmt: skip
        for bits, block, zero, low_bits, table, rotation in configurations:
            rows, count = 2 * block, bytes_per_block(block, low_bits)
            activations = ((2, "m", count), (2, "m"), (2, "m") if rotation == 1 else (2, 2, "m"))
            weight: tuple[tuple[int | str, ...], ...] = ((rows * bits // 32, "n"), (2, "n"))
            attrs: dict[str, Any] = {
                "bits": bits, "zero": zero, "low_bits": low_bits, "table": table, "rotation": rotation,
            }  # fmt: skip

            def sums(
                shape: tuple[int, ...], rng: Any, block: int = block, low: int = low_bits, rotation: int = rotation
            ) -> Array:
                return compute_block_sums(
                    decode_integers(draw((*shape[-2:], bytes_per_block(block, low))), block, low), rotation
                )

            make = {0: lambda shape, rng: draw(shape), 2: sums, 3: draw_words}
            yield Sample(
                (*activations, *weight, *([] if zero else [(2, "n")])), attrs, kinds[: 5 if zero else 6], make, 1e-4
            )
        for bits, block, zero, levels in ((4, 32, 0, 2), (6, 16, 32, 1)):
            scales: list[tuple[int | str, ...]] = [(4, "n"), (2, "n")] * levels
            activations = ((4, "m", block), (4, "m"), (4, "m"))
            two_level = (*kinds[:4], *(("int8" if zero else "uint8"), "float16") * levels)
            attrs = {"bits": bits, "zero": zero}

            def block_sums(shape: tuple[int, ...], rng: Any, block: int = block) -> Array:
                return np.asarray(decode_integers(draw((*shape, block)), block, 0).sum(axis=-1), np.int32)

            draws = {0: lambda shape, rng: draw(shape), 2: block_sums, 3: draw_words}
            yield Sample((*activations, (4 * block * bits // 32, "n"), *scales), attrs, two_level, draws, 1e-4)


def matmul_array(
    rounded: tuple[Array, Array, Array], words: Array, scale_operands: Sequence[Array], coding: Coding, low_bits: int,
    rotation: int,
) -> Array:  # fmt: skip
    """Compute `matmul_blocks` in NumPy, float32 (m, n)."""
    x, x_scales, x_sums = rounded
    blocks, block = len(x), x.shape[2] // (2 if low_bits else 1)
    codes = coding.decode(unpack_codes(words, block, coding.bits)).astype(np.float64) - coding.zero
    groups = codes.reshape(blocks, block // (rotation * DP4A_BYTES), rotation, DP4A_BYTES, words.shape[1])
    codes = np.stack(hadamard_transform([groups[:, :, group] for group in range(rotation)]), axis=2)
    codes = codes.reshape(blocks, block, words.shape[1])
    total = np.matmul(decode_integers(x, block, low_bits).astype(np.float64), codes)  # exact: all sums fit into int32
    scales, *offsets = (number.astype(np.float64) for number in _as_float32(scale_operands))
    result = total * scales[:, None]
    if offsets:
        sums = x_sums if rotation == 1 else x_sums[0] * rotation
        result = result + sums[..., None] * offsets[0][:, None]
    return np.asarray((result * x_scales[..., None]).sum(axis=0), np.float32)


def _dot_product(start: Value, codes: Sequence[Value], numbers: Sequence[Value], max_code: int) -> Value:
    """start + dot product of codes and numbers, in two independent chains to hide the latency of the instruction."""
    chains = [start, literal(0, "int32")]
    for q, (code, number) in enumerate(zip(codes, numbers, strict=True)):
        chains[q % 2] = _dot4(chains[q % 2], code, number, max_code)
    return (Scalar(chains[0]) + Scalar(chains[1])).value


def _pack_activations(x: Buffer, g: SymExpr, i: SymExpr, group: int) -> Value:
    """Pack dp4a group `group` of block g of activation row i into an int32."""
    return Intrinsic(PACK_BYTES, tuple(x[g, i, group * DP4A_BYTES + b] for b in range(DP4A_BYTES)), "int32")


def _combine_bits(parts: Iterable[tuple[Scalar, int]]) -> Scalar:
    """Combine (bits, position) pairs to whole codes."""
    codes, *higher = (bits.binary("shift_left", low) if low else bits for bits, low in parts)
    for bits in higher:
        codes = codes | bits
    return codes


def _load_groups(words: Matrix, g: SymExpr, j: SymExpr, block: int, coding: Coding) -> list[Value]:
    """Load and decode the dp4a groups of block g of column j."""
    bits, num_groups = coding.bits, block // DP4A_BYTES
    run = rows_per_run(block, bits)
    blocks = run // block
    run_word, block_of_run = g // blocks * count_words(run, bits), g % blocks
    loaded: dict[SymExpr, Scalar] = {}

    def word(position: SymExpr) -> Scalar:
        return loaded.setdefault(position, Scalar(words[position, j]))

    def load_group(group: int) -> Value:
        bit_fields = []
        for field in locate_bit_fields(group, run, bits):
            per_word = 8 // field.width
            if num_groups % per_word == 0:  # no word is shared between blocks
                packed, shift = word(run_word + block_of_run * (num_groups // per_word) + field.word), sym(field.shift)
            else:
                group_of_run = block_of_run * num_groups + group
                packed = word(run_word + field.word - group // per_word + group_of_run // per_word)
                shift = group_of_run % per_word * field.width
            shifted = packed if as_int(shift) == 0 else packed.binary("shift_right", shift)
            bit_fields.append((shifted & BYTE_ONES * field.mask if field.width < 8 else shifted, field.low))
        return coding.decode_word(_combine_bits(bit_fields)).value

    return [load_group(group) for group in range(num_groups)]
