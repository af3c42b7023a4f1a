"""Products with weights that stay in blocks of few bits, as checkpoints of language models hold them.

A weight of `rows` x n is cut into blocks of B neighbouring rows of a column. Each block has integer codes of `bits`
bits, a scale, and maybe an offset:

    weight[k, j] = scales[k // B, j] * (code[k, j] - zero) + offsets[k // B, j]

With a `table`, codes have at most four bits, and it has a byte for each that says what it stands for: table[code] -
zero.

Scales and offsets are floats, or codes themselves, int8 or uint8, and then the operand after them has the float factors
of super-blocks of S rows, as in the K formats of GGUF:

    scales[k // B, j] = factors[k // S, j] * scale_codes[k // B, j]

So the operands of a weight are `words, scales[, offsets]` or `words, scales, factors[, offsets, offset_factors]`.

Codes lie in int32 words (rows * bits / 32, n), so that few operations on words make *quads*, four codes of neighbouring
rows as the bytes of a word, for a dot product of bytes (`dot4_words`). They are cut into *planes* of 8, 4, 2 or 1 bits:
3 bits are two and one, 5 are four and one, 6 four and two. Of the words of a block the first hold the plane of the
lowest bits, those of as many quads in a word as fit: of row 4*q + b and a plane of w bits in byte b of word q // (8/w),
from its bit w * (q % (8/w)) on. Where that is no whole word, a few blocks make up a *run*, and share the words of each
plane as one block of that size would: two blocks of 16 rows do so in 3 bits.

The integer path rounds activations to signed bytes with a scale for each block of a row, as llama.cpp does; with
`low_bits` more bits of each in a second byte, x = scale * (high * 2**low_bits + low). Sums within a block are exact.

With a `rotation` of T > 1, each T quads of a block are mixed first, on both sides, by the Walsh-Hadamard matrix H of
size T, entries 1 and -1: H^T H = T, so that products stay what they are, times T, while an outlier among a block's
activations is spread over T of them and no more makes the rounding of all others coarse (QuaRot, arXiv 2404.00456).
Codes of few bits stay bytes: those of 4 bits for T up to 16, 5 bits for 8, 6 bits for 4.
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
    DP4A_BYTES,
    ONES,
    Array,
    Coding,
    fills_words,
    places_of,
    rotated,
    rows_of_run,
    unpack_codes,
    words_of,
)
from relaxlite.ir.ops.broadcast import PROVER, format_shape
from relaxlite.ir.ops.indexing import Position, at_positions, draw_indices, plain_indices
from relaxlite.ir.ops.linalg import equality_checks
from relaxlite.ir.ops.rounded_blocks import LOW_BITS, ROTATIONS, bytes_of_block, integers_of, sums_of, sums_shape
from relaxlite.ir.ops.scalars import Scalar, literal
from relaxlite.ir.program import Allocate, Buffer, Intrinsic, Load, Stmt, Store, Value, compute, loops, seq
from relaxlite.ir.symbolic import IntLike, SymExpr, as_int, sym
from relaxlite.ir.types import TensorType, Type
from relaxlite.records import dataclass

BITS = tuple(BIT_PLANES)
FLOATS = ("float32", "float16", "bfloat16")  # of scales, offsets and factors
CODES = ("uint8", "int8")  # of scales and offsets that have factors
T = TypeVar("T")

LONGEST_BLOCK = 256  # rows whose sum of products surely fits into int32: 256 * 255 * (127 * 256 + 128) < 2**31

WEIGHT = ("words", "scales", "*others")
CODED: Mapping[str, Attr] = {"bits": Attr("int", choices=BITS), "zero": Attr("int", 0), "table": Attr("ints", ())}


def _with_factors(given: Sequence[T], dtype_of: Callable[[T], str]) -> list[tuple[T, T | None]]:
    """Scales, and offsets where there are any, each with its factors if it is codes."""
    rest = iter(given)
    return [(values, next(rest, None) if dtype_of(values) in CODES else None) for values in rest]


@dataclass(frozen=True, slots=True)
class Member:
    """One of the matrices that a buffer of rank 3 holds."""

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


Matrix: TypeAlias = "Buffer | Member"


class BlocksOp(Op):
    """What the ops share whose operand is a weight in blocks."""

    def rows_of(self, words: Expr, given: Sequence[Expr], coding: Coding) -> tuple[int, int, SymExpr]:
        """(rows, rows of a block, columns) of a weight that is well formed; `given`: scales and what follows."""
        return self.rows_of_types(self.tensor(words, "words"), [self.tensor(x, "scales") for x in given], coding)

    def rows_of_types(self, ty: TensorType, types: list[TensorType], coding: Coding) -> tuple[int, int, SymExpr]:
        """The same of the types of words, and of scales and what follows."""
        bits, problem = coding.bits, coding.problem()
        scale = types[0]
        if ty.dtype != "int32" or ty.rank != 2 or scale.rank != 2 or scale.dtype not in (*FLOATS, *CODES):
            self.fail(
                f"words must be int32 and scales {', '.join(FLOATS)}, or uint8 or int8 with factors, all of rank 2, "
                f"got {ty} and {scale}"
            )
        assert ty.shape is not None and scale.shape is not None
        count, blocks = as_int(ty.shape[0]), as_int(scale.shape[0])
        if not count or not blocks or count * 32 % (bits * blocks) or PROVER.can_prove_ne(ty.shape[1], scale.shape[1]):
            self.fail(
                f"words {format_shape(ty.shape)} of {bits} bits and scales {format_shape(scale.shape)} do not fit"
            )
        rows = count * 32 // bits
        if not fills_words(rows, rows // blocks, bits):
            self.fail(f"{rows} codes of {bits} bits do not fill whole words in blocks of {rows // blocks} rows")
        level = 1
        if scale.dtype in CODES:
            level = 2
            self._check_factors(scale, types[1] if len(types) > 1 else None)
        wanted, got = types[:level], types[level:]
        if got and got != wanted:
            wanted_text, got_text = (", ".join(map(str, x)) for x in (wanted, got))
            self.fail(f"offsets must be like scales, {wanted_text}, got {got_text}")
        if problem is not None:
            self.fail(problem)
        return rows, rows // blocks, ty.shape[1]

    def rounded_rows(
        self, types: Sequence[TensorType], rows: int, block: int, coding: Coding, low_bits: int, rotation: int
    ) -> SymExpr:
        """How many rows `types` have, those of what quantize_blocks gives, to be multiplied by such a weight."""
        most = coding.longest_rotation(block)
        if rotation > most:
            self.fail(
                f"these codes, mixed {rotation} quads at a time, are no bytes or no whole blocks; {most} would be"
            )
        if block > LONGEST_BLOCK:
            self.fail(f"sums of blocks of {block} rows may not fit into 32 bits; at most {LONGEST_BLOCK} rows do")
        shape = types[0].shape or ()
        wanted = (rows // block, shape[1] if len(shape) == 3 else sym(0))
        if [t.dtype for t in types] != ["int8", "float32", "int32"] or len(shape) != 3:
            self.fail(f"x, x_scales and x_sums must be as quantize_blocks makes them, got {', '.join(map(str, types))}")
        sums = sums_shape(wanted, rotation)
        for t, expected in zip(types, ((*wanted, bytes_of_block(block, low_bits)), wanted, sums), strict=True):
            if t.rank != len(expected) or any(map(PROVER.can_prove_ne, t.shape or (), expected)):
                width, result = bytes_of_block(block, low_bits), ", ".join(map(str, types))
                self.fail(
                    f"{rows} rows in blocks of {block} take x of ({rows // block}, m, {width}) and x_scales and x_sums "
                    f"of ({rows // block}, m){', of sums two' if rotation > 1 else ''}, got {result}"
                )
        return wanted[1]

    def _check_factors(self, scale: TensorType, factor: TensorType | None) -> None:
        if factor is None:
            self.fail(f"scales of {scale.dtype} need factors after them, floats, one for several blocks")
        assert scale.shape is not None and factor.shape is not None
        blocks, count = as_int(scale.shape[0]) or 0, as_int(factor.shape[0]) if factor.rank == 2 else None
        if (
            factor.dtype not in FLOATS
            or not count
            or blocks % count
            or PROVER.can_prove_ne(scale.shape[1], factor.shape[1])
        ):
            self.fail(
                f"factors of scales {scale} must be {', '.join(FLOATS)}, of as many columns and a number of rows that "
                f"divides {blocks}, got {factor}"
            )


def block_of(words: Matrix, scales: Matrix, bits: int) -> int:
    count, blocks = as_int(words.shape[0]) or 0, as_int(scales.shape[0]) or 1
    return count * 32 // bits // blocks


def _numbers(given: Sequence[Matrix], g: SymExpr, j: IntLike) -> list[Scalar]:
    """The scale, and the offset where there is one, of block g of column j in float32."""
    result = []
    for values, factors in _with_factors(given, lambda b: b.dtype):
        number = Scalar(values[g, j]).cast("float32")
        if factors is not None:
            blocks = (as_int(values.shape[0]) or 1) // (as_int(factors.shape[0]) or 1)
            number = number * Scalar(factors[g // blocks, j]).cast("float32")
        result.append(number)
    return result


def weight_at(words: Matrix, given: Sequence[Matrix], k: SymExpr, j: IntLike, coding: Coding) -> Scalar:
    """The element of row k and column j as float32."""
    bits, zero = coding.bits, coding.zero
    block = block_of(words, given[0], bits)
    run, byte = rows_of_run(block, bits), k % DP4A_BYTES * 8
    if len(BIT_PLANES[bits]) == 1:
        quad, first = k // DP4A_BYTES, sym(0)
    else:
        quad, first = k % run // DP4A_BYTES, k // run * words_of(run, bits)
    places = places_of(quad, run, bits)

    def bits_at(byte: IntLike, ones: int) -> list[tuple[Scalar, int]]:
        """From a byte on, of all bytes or of one."""
        ats = ((Scalar(words[first + at.word, j]).binary("shift_right", at.shift + byte), at) for at in places)
        return [(shifted & ones * at.mask, at.low) for shifted, at in ats]

    if coding.table:
        code = coding.of_word(_joined(bits_at(0, ONES))).binary("shift_right", byte) & 255
    else:
        code = _joined(bits_at(byte, 1))
    centered = code - zero if zero else code
    scale, *offset = _numbers(given, k // block, j)
    ats = centered.cast("float32") * scale
    return ats + offset[0] if offset else ats


def _as_float32(given: Sequence[Array]) -> list[Array]:
    """Scales, and offsets where there are any, (blocks, n)."""
    result = []
    for values, factors in _with_factors(given, lambda a: a.dtype.name):
        number = values.astype(np.float32)
        if factors is not None:
            number *= factors.astype(np.float32).repeat(len(values) // len(factors), axis=0)
        result.append(number)
    return result


def dequantized(words: Array, given: Sequence[Array], coding: Coding) -> Array:
    block = words.shape[0] * 32 // coding.bits // given[0].shape[0]
    codes = coding.numbers(unpack_codes(words, block, coding.bits)).astype(np.float32) - np.float32(coding.zero)
    scales, *offsets = _as_float32(given)
    result = codes.reshape(len(scales), block, words.shape[1]) * scales[:, None]
    if offsets:
        result = result + offsets[0][:, None]
    return np.asarray(result.reshape(codes.shape), np.float32)


SOME_TABLE = (0, 255, 3, 127, 128, 129, 7, 90, 200, 201, 202, 17, 16, 15, 14, 1)
SMALL_TABLE = (0, 24, 3, 1, 2, 12, 7, 9, 20, 11, 8, 17, 16, 15, 14, 1)


def some_words(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    return rng.integers(-(2**31), 2**31, shape).astype(np.int32)


@register
class DequantizeBlocks(BlocksOp):
    """The weight in blocks (words, scales, ...) as float32 (rows, n). Not folded: it keeps to the few bits that it
    has, and what reads it widens it on its way in (passes/fuse/fuse_prologues.py).

    `coarse` changes nothing here: what it is multiplied by may be rounded to 8 bits where more are usual
    (passes/graph/integer_products.py)."""

    name = "dequantize_blocks"
    operands = WEIGHT
    attrs: ClassVar[Mapping[str, Attr]] = {**CODED, "coarse": Attr("bool", False)}

    def infer(self, words: Expr, *given: Expr, coarse: bool, **coding: Any) -> Type:
        rows, _, columns = self.rows_of(words, given, Coding(**coding))
        return TensorType.of((rows, columns), "float32")

    def lower(self, words: Buffer, *given: Buffer, out: Buffer, coarse: bool, **coding: Any) -> Stmt:
        pairs = ((x.shape[1], words.shape[1]) for x in given)
        checks = equality_checks("dequantize_blocks: codes and scales have different columns", *pairs)
        return seq(*checks, compute(out, lambda k, j: weight_at(words, given, k, j, Coding(**coding)).value))

    def reference(self, words: Any, *given: Any, coarse: bool, **coding: Any) -> Any:
        return dequantized(words, given, Coding(**coding))

    def samples(self) -> Iterable[Sample]:
        kinds, make = ("int32", "float32", "float32"), {0: some_words}
        yield Sample(((8, "n"), (2, "n")), {"bits": 4, "zero": 8}, kinds[:2], make)
        yield Sample(((12, "n"), (4, "n"), (4, "n")), {"bits": 6, "coarse": True}, kinds, make)
        yield Sample(((5, "n"), (1, "n"), (1, "n")), {"bits": 5}, kinds, make)
        yield Sample(((16, "n"), (2, "n")), {"bits": 8, "zero": 128}, ("int32", "float16"), make, tolerance=1e-3)
        yield Sample(((12, "n"), (4, "n"), (2, "n")), {"bits": 6, "zero": 32}, ("int32", "int8", "float16"), make)
        factored = ("int32", "uint8", "float16", "uint8", "float16")
        yield Sample(((16, "n"), (4, "n"), (1, "n"), (4, "n"), (1, "n")), {"bits": 4}, factored, make)
        yield Sample(((8, "n"), (2, "n")), {"bits": 4, "zero": 128, "table": SOME_TABLE}, kinds[:2], make)
        yield Sample(((4, "n"), (4, "n"), (4, "n")), {"bits": 2}, kinds, make)
        yield Sample(((6, "n"), (4, "n")), {"bits": 3, "zero": 4}, kinds[:2], make)
        yield Sample(((6, "n"), (2, "n")), {"bits": 3, "zero": 128, "table": SOME_TABLE[:8]}, kinds[:2], make)
        yield Sample(((2, "n"), (2, "n")), {"bits": 1, "zero": 1, "table": (0, 2)}, kinds[:2], make)


@register
class GatherBlocks(BlocksOp):
    """Columns of a weight in blocks, chosen by indices: (indices..., rows) in float32, as an embedding looks up tokens.
    Negative indices count from the end."""

    name = "gather_blocks"
    operands = ("indices", *WEIGHT)
    attrs: ClassVar[Mapping[str, Attr]] = CODED

    def infer(self, indices: Expr, words: Expr, *given: Expr, **coding: Any) -> Type:
        rows, _, _ = self.rows_of(words, given, Coding(**coding))
        ty = self.tensor(indices, "indices")
        if ty.dtype not in ("int32", "int64"):
            self.fail(f"indices must be int32 or int64, got {ty}")
        return TensorType.of((*(ty.shape or ()), rows), "float32")

    def lower(self, indices: Buffer, words: Buffer, *given: Buffer, out: Buffer, **coding: Any) -> Stmt:
        def element(*i: SymExpr) -> Stmt:
            position = Position.along(self, words, 1, indices[i[:-1]])
            weight = Coding(**coding)
            return at_positions([position], lambda p: Store(out, i, weight_at(words, given, i[-1], p, weight).value))

        return loops("ijklmn", out.shape, element)

    def reference(self, indices: Any, words: Any, *given: Any, **coding: Any) -> Any:
        chosen = plain_indices(indices).reshape(-1)
        result = dequantized(words[:, chosen], [x[:, chosen] for x in given], Coding(**coding))
        return np.ascontiguousarray(result.T).reshape(*indices.shape, len(result))

    def samples(self) -> Iterable[Sample]:
        kinds = ("int64", "int32", "float32", "float32")
        make = {0: draw_indices(5), 1: some_words}
        yield Sample((("m",), (8, 5), (2, 5)), {"bits": 4, "zero": 8}, kinds[:3], make)
        yield Sample(((2, "m"), (12, 5), (4, 5), (4, 5)), {"bits": 6}, kinds, make)
        yield Sample(((), (16, 5), (2, 5)), {"bits": 8, "zero": 128}, ("int32", *kinds[1:3]), make)
        factored = ("int64", "int32", "uint8", "float16", "uint8", "float16")
        yield Sample((("m",), (20, 5), (4, 5), (2, 5), (4, 5), (2, 5)), {"bits": 5}, factored, make)
        yield Sample((("m",), (8, 5), (2, 5)), {"bits": 4, "zero": 9, "table": SOME_TABLE}, kinds[:3], make)
        yield Sample((("m",), (6, 5), (4, 5)), {"bits": 3, "zero": 4}, kinds[:3], make)
        yield Sample((("m",), (4, 5), (2, 5)), {"bits": 2, "zero": 9, "table": SOME_TABLE[4:8]}, kinds[:3], make)


def _dot(total: Value, a: Value, b: Value, greatest: int) -> Intrinsic:
    """total + a . b, the bytes of a being no greater than that."""
    return Intrinsic(DOT4_PACKED_U8S8, (total, a, b, literal(greatest, "int32"), literal(128, "int32")), "int32")


@dataclass(frozen=True, slots=True)
class BlockSums:
    """Elements of a product in integers: what `matmul_blocks` says of `x`, `x_scales` and `x_sums`, and a weight."""

    rounded: tuple[Buffer, Buffer, Buffer]
    words: Matrix
    given: Sequence[Matrix]
    coding: Coding
    low_bits: int
    rotation: int

    def store(self, out: Buffer, place: tuple[SymExpr, SymExpr], i: SymExpr, j: SymExpr) -> Stmt:
        """The element of row i and column j, stored to a place of `out`."""
        element = Buffer("e", (), "float32", "local")
        added = loops("g", (self.given[0].shape[0],), lambda g: Store(element, (), self._term(i, j, g), "add"))
        first = Store(element, (), literal(0.0, "float32"))
        return Allocate(element, seq(first, added, Store(out, place, Load(element, ()))))

    def _term(self, i: SymExpr, j: SymExpr, g: SymExpr) -> Value:
        """What block g adds."""
        (x, x_scales, _), low_bits = self.rounded, self.low_bits
        block, rotated_by = block_of(self.words, self.given[0], self.coding.bits), self.coding.rotated(self.rotation)
        quads, greatest = block // DP4A_BYTES, rotated_by.greatest
        codes = rotated_by.mixed(_quads(self.words, g, j, block, self.coding))
        start = literal(0, "int32")
        correction: Value = start
        for number, zero in zip(self._sums(g, i), rotated_by.zeros, strict=True):
            correction = (Scalar(correction) - number * zero).value if zero else correction
        high = _dots(start if low_bits else correction, codes, [_word(x, g, i, q) for q in range(quads)], greatest)
        if low_bits:
            low = _dots(correction, codes, [_word(x, g, i, quads + q) for q in range(quads)], greatest)
            total = Scalar(high).binary("shift_left", low_bits) + Scalar(low)
        else:
            total = Scalar(high)
        scale, *offset = _numbers(self.given, g, j)
        result = total.cast("float32") * scale
        if offset:
            result = result + (self._sums(g, i)[0] * self.rotation).cast("float32") * offset[0]
        return (result * Scalar(x_scales[g, i])).value

    def _sums(self, g: SymExpr, i: SymExpr) -> list[Scalar]:
        x_sums = self.rounded[2]
        return [Scalar(x_sums[(k, g, i)]) for k in range(2)] if self.rotation > 1 else [Scalar(x_sums[g, i])]


@register
class MatmulBlocks(BlocksOp):
    """x @ weight in float32 (m, n), where x comes from `quantize_blocks` and the weight is in blocks of the same size:

    sum over blocks g of x_scales[g, i] * (scales[g, j] * sum of (codes - zero) * x + offsets[g, j] * x_sums[g, i])

    with exact sums of integers inside of a block of at most 256 rows. `low_bits` and `rotation` as quantize_blocks was
    given. x_sums has to be the sums of x's integers: where products take signed codes, it is not read for the zero
    point. With a rotation the codes are mixed as x was.
    """

    name = "matmul_blocks"
    operands = ("x", "x_scales", "x_sums", *WEIGHT)
    attrs: ClassVar[Mapping[str, Attr]] = {
        **CODED, "low_bits": Attr("int", 0, LOW_BITS), "rotation": Attr("int", 1, ROTATIONS),
    }  # fmt: skip

    def infer(
        self, x: Expr, x_scales: Expr, x_sums: Expr, words: Expr, *given: Expr, low_bits: int, rotation: int,
        **coding: Any,
    ) -> Type:  # fmt: skip
        rows, block, columns = self.rows_of(words, given, Coding(**coding))
        types = [self.tensor(v, name) for v, name in zip((x, x_scales, x_sums), self.operands, strict=False)]
        count = self.rounded_rows(types, rows, block, Coding(**coding), low_bits, rotation)
        return TensorType.of((count, columns), "float32")

    def lower(
        self, x: Buffer, x_scales: Buffer, x_sums: Buffer, words: Buffer, *given: Buffer, out: Buffer, low_bits: int,
        rotation: int, **coding: Any,
    ) -> Stmt:  # fmt: skip
        checks = equality_checks(
            "matmul_blocks: x and the weight differ in size",
            *((b.shape[-1], x.shape[1]) for b in (x_scales, x_sums)),
            *((b.shape[1], words.shape[1]) for b in given),
        )
        sums = BlockSums((x, x_scales, x_sums), words, given, Coding(**coding), low_bits, rotation)
        return seq(*checks, loops("ij", out.shape, lambda i, j: sums.store(out, (i, j), i, j)))

    def reference(
        self, x: Any, x_scales: Any, x_sums: Any, words: Any, *given: Any, low_bits: int, rotation: int, **coding: Any
    ) -> Any:
        return multiplied((x, x_scales, x_sums), words, given, Coding(**coding), low_bits, rotation)

    def samples(self) -> Iterable[Sample]:
        kinds = ("int8", "float32", "int32", "int32", "float32", "float32")

        def draw(shape: tuple[int, ...]) -> Array:
            return np.random.default_rng(0).integers(-127, 128, shape).astype(np.int8)

        kinds_of_blocks: tuple[tuple[int, int, int, int, tuple[int, ...], int], ...] = (
            (4, 32, 8, 0, (), 1), (8, 32, 128, 0, (), 1), (5, 32, 0, 8, (), 1), (6, 16, 32, 0, (), 1),
            (4, 32, 8, 4, (), 1), (4, 32, 128, 0, SOME_TABLE, 1), (4, 32, 128, 4, SOME_TABLE, 1),
            (4, 16, 0, 8, SOME_TABLE, 1), (4, 32, 8, 0, (), 8), (4, 64, 0, 0, (), 16), (4, 32, 5, 4, (), 4),
            (5, 32, 16, 0, (), 8), (5, 32, 0, 0, (), 8), (6, 16, 32, 0, (), 4), (6, 16, 0, 0, (), 2),
            (4, 32, 12, 0, SMALL_TABLE, 8), (4, 16, 0, 0, SMALL_TABLE, 4),
            (2, 32, 1, 0, (), 1), (2, 16, 0, 4, (), 1), (2, 32, 1, 0, (), 8), (3, 16, 4, 4, (), 1),
            (3, 32, 0, 8, (), 1), (3, 16, 4, 0, (), 4), (3, 32, 9, 4, SMALL_TABLE[:8], 1),
            (3, 16, 12, 0, SMALL_TABLE[8:], 4), (1, 32, 1, 0, (0, 2), 8), (1, 16, 0, 4, (), 1),
        )  # fmt: skip
        for bits, block, zero, low_bits, table, rotation in kinds_of_blocks:
            rows, count = 2 * block, bytes_of_block(block, low_bits)
            given = ((2, "m", count), (2, "m"), (2, "m") if rotation == 1 else (2, 2, "m"))
            weight: tuple[tuple[int | str, ...], ...] = ((rows * bits // 32, "n"), (2, "n"))
            attrs: dict[str, Any] = {
                "bits": bits, "zero": zero, "low_bits": low_bits, "table": table, "rotation": rotation,
            }  # fmt: skip

            def sums(
                shape: tuple[int, ...], rng: Any, block: int = block, low: int = low_bits, rotation: int = rotation
            ) -> Array:
                return sums_of(integers_of(draw((*shape[-2:], bytes_of_block(block, low))), block, low), rotation)

            make = {0: lambda shape, rng: draw(shape), 2: sums, 3: some_words}
            yield Sample((*given, *weight, *([] if zero else [(2, "n")])), attrs, kinds[: 5 if zero else 6], make, 1e-4)
        for bits, block, zero, levels in ((4, 32, 0, 2), (6, 16, 32, 1)):
            scales: list[tuple[int | str, ...]] = [(4, "n"), (2, "n")] * levels
            given = ((4, "m", block), (4, "m"), (4, "m"))
            factored = (*kinds[:4], *(("int8" if zero else "uint8"), "float16") * levels)
            attrs = {"bits": bits, "zero": zero}

            def every_sum(shape: tuple[int, ...], rng: Any, block: int = block) -> Array:
                return np.asarray(integers_of(draw((*shape, block)), block, 0).sum(axis=-1), np.int32)

            result = {0: lambda shape, rng: draw(shape), 2: every_sum, 3: some_words}
            yield Sample((*given, (4 * block * bits // 32, "n"), *scales), attrs, factored, result, 1e-4)


def multiplied(
    rounded: tuple[Array, Array, Array], words: Array, given: Sequence[Array], coding: Coding, low_bits: int,
    rotation: int,
) -> Array:  # fmt: skip
    """What `matmul_blocks` gives, in float32 (m, n)."""
    x, x_scales, x_sums = rounded
    blocks, block = len(x), x.shape[2] // (2 if low_bits else 1)
    codes = coding.numbers(unpack_codes(words, block, coding.bits)).astype(np.float64) - coding.zero
    quads = codes.reshape(blocks, block // (rotation * DP4A_BYTES), rotation, DP4A_BYTES, words.shape[1])
    codes = np.stack(rotated([quads[:, :, q] for q in range(rotation)]), axis=2)
    codes = codes.reshape(blocks, block, words.shape[1])
    total = np.matmul(integers_of(x, block, low_bits).astype(np.float64), codes)  # exact: all sums fit into int32
    scales, *offsets = (number.astype(np.float64) for number in _as_float32(given))
    result = total * scales[:, None]
    if offsets:
        sums = x_sums if rotation == 1 else x_sums[0] * rotation
        result = result + sums[..., None] * offsets[0][:, None]
    return np.asarray((result * x_scales[..., None]).sum(axis=0), np.float32)


def _dots(start: Value, codes: Sequence[Value], numbers: Sequence[Value], greatest: int) -> Value:
    """start + codes . numbers, in two chains, as each dot product waits for the one before."""
    chains = [start, literal(0, "int32")]
    for q, (code, number) in enumerate(zip(codes, numbers, strict=True)):
        chains[q % 2] = _dot(chains[q % 2], code, number, greatest)
    return (Scalar(chains[0]) + Scalar(chains[1])).value


def _word(x: Buffer, g: SymExpr, i: SymExpr, q: int) -> Value:
    """Four neighbours of a row's block."""
    return Intrinsic(PACK_BYTES, tuple(x[g, i, q * DP4A_BYTES + b] for b in range(DP4A_BYTES)), "int32")


def _joined(parts: Iterable[tuple[Scalar, int]]) -> Scalar:
    """Bits of codes, each from a place on."""
    whole, *others = (part.binary("shift_left", low) if low else part for part, low in parts)
    for part in others:
        whole = whole | part
    return whole


def _quads(words: Matrix, g: SymExpr, j: SymExpr, block: int, coding: Coding) -> list[Value]:
    """The quads of block g of column j."""
    bits, quads = coding.bits, block // DP4A_BYTES
    run = rows_of_run(block, bits)
    blocks = run // block
    first, number = g // blocks * words_of(run, bits), g % blocks
    loaded: dict[SymExpr, Scalar] = {}

    def word(at: SymExpr) -> Scalar:
        return loaded.setdefault(at, Scalar(words[at, j]))

    def quad(q: int) -> Value:
        parts = []
        for at in places_of(q, run, bits):
            per_word = 8 // at.width
            if quads % per_word == 0:  # each block has words of its own
                whole, shift = word(first + number * (quads // per_word) + at.word), sym(at.shift)
            else:
                of_run = number * quads + q
                whole = word(first + at.word - q // per_word + of_run // per_word)
                shift = of_run % per_word * at.width
            shifted = whole if as_int(shift) == 0 else whole.binary("shift_right", shift)
            parts.append((shifted & ONES * at.mask if at.width < 8 else shifted, at.low))
        return coding.of_word(_joined(parts)).value

    return [quad(q) for q in range(quads)]
