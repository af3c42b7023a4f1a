"""Products with weights that stay in blocks of few bits, as checkpoints of language models hold them.

A weight of `rows` x n is cut into blocks of B neighbouring rows of a column. Each block has integer codes of `bits`
bits, a scale, and maybe an offset:

    weight[k, j] = scales[k // B, j] * (code[k, j] - zero) + offsets[k // B, j]

Codes lie in int32 words (rows * bits / 32, n), so that few operations on words make *quads*, four codes of neighbouring
rows as the bytes of a word, for a dot product of bytes (`dot4_words`). Of the words of a block, the first B/8 hold the
low four bits: row 4*q + b in byte b of word q // 2, in its low half for even q and its high half for odd q. Fifth and
sixth bits follow, those of as many quads in a word as fit: bits 4.. of row 4*q + b stand in byte b, 1 or 2 bits for
each quad. Eight bits are quads as they are.

The integer path rounds activations to `parts` signed bytes per element with a scale for each block of a row, as
llama.cpp does with one: x = scale * (high + low / 256). Sums within a block are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np

from relaxlite.ir.expr import Expr
from relaxlite.ir.intrinsics import WORDS
from relaxlite.ir.op import Attr, Op, Sample, register
from relaxlite.ir.ops.broadcast import PROVER, format_shape
from relaxlite.ir.ops.indexing import Position, at_positions, draw_indices, plain_indices
from relaxlite.ir.ops.linalg import equality_checks
from relaxlite.ir.ops.scalars import Scalar, literal, select
from relaxlite.ir.program import Allocate, Buffer, Intrinsic, Load, Stmt, Store, Value, compute, loops, reduce, seq
from relaxlite.ir.symbolic import IntLike, SymExpr, SymVar, as_int, sym
from relaxlite.ir.types import TensorType, TupleType, Type

BITS = (4, 5, 6, 8)
Array: TypeAlias = "np.ndarray[Any, Any]"

QUAD = 4  # codes in a word of bytes
GREATEST = 127  # of a rounded activation
LONGEST_BLOCK = 256  # rows whose sum of products surely fits into int32: 256 * 255 * (127 * 256 + 128) < 2**31
LEAST_TOP = 1e-36  # a block of smaller numbers is rounded to 0: the inverse of its scale would be infinite
SHIFT = 8  # bits that a second part of it adds

_ONES = 0x01010101
_WEIGHT = ("words", "scales", "offsets?")
_CODES: Mapping[str, Attr] = {"bits": Attr("int", choices=BITS), "zero": Attr("int", 0)}


def words_of(block: int, bits: int) -> int:
    """How many words the codes of a block take."""
    return block * bits // 32


def is_block(block: int, bits: int) -> bool:
    """Whether blocks of this size fill whole words."""
    return block > 0 and block % 8 == 0 and (bits in (4, 8) or block * (bits - 4) % 32 == 0)


def pack_codes(codes: Array, block: int, bits: int) -> Array:
    """Codes uint8 (rows, n) as words int32 (rows * bits / 32, n)."""
    rows, n = codes.shape
    quads = np.ascontiguousarray(codes.reshape(rows // QUAD, QUAD, n).swapaxes(1, 2)).view("<u4")[..., 0]
    quads = quads.reshape(rows // block, block // QUAD, n)
    if bits == 8:
        return np.ascontiguousarray(quads.reshape(-1, n)).view(np.int32)
    low = quads & np.uint32(_ONES * 15)
    parts = [low[:, 0::2] | low[:, 1::2] << np.uint32(4)]
    extra = bits - 4
    if extra:
        per_word = 8 // extra
        high = quads >> np.uint32(4) & np.uint32(_ONES * ((1 << extra) - 1))
        grouped = high.reshape(len(high), -1, per_word, n)
        shifts = (extra * np.arange(per_word, dtype=np.uint32))[:, None]
        parts.append(np.bitwise_or.reduce(grouped << shifts, axis=2))
    return np.ascontiguousarray(np.concatenate(parts, axis=1).reshape(-1, n)).view(np.int32)


def unpack_codes(words: Array, block: int, bits: int) -> Array:
    """The inverse: codes uint8 (rows, n)."""
    n = words.shape[1]
    blocks = words.reshape(-1, words_of(block, bits), n).view(np.uint32)
    quads = np.stack([_quad(blocks, q, block, bits) for q in range(block // QUAD)], axis=1)
    return np.asarray(
        np.ascontiguousarray(quads.reshape(-1, n)[..., None]).view(np.uint8).swapaxes(1, 2).reshape(-1, n)
    )


def _quad(words: Array, q: int, block: int, bits: int) -> Array:
    """Quad q of each block, (blocks, n)."""
    if bits == 8:
        return np.asarray(words[:, q])
    found: Array = words[:, q // 2] >> np.uint32(4 * (q % 2)) & np.uint32(_ONES * 15)
    if bits > 4:
        extra, per_word = bits - 4, 8 // (bits - 4)
        high = words[:, block // 8 + q // per_word] >> np.uint32(extra * (q % per_word))
        found = found | (high & np.uint32(_ONES * ((1 << extra) - 1))) << np.uint32(4)
    return found


def _shifted(word: Scalar, bits: int) -> Scalar:
    return word.binary("shift_right", bits) if bits else word


class _Blocks(Op):
    """What the ops share whose operand is a weight in blocks."""

    def rows_of(
        self, words: Expr, scales: Expr, offsets: Expr | None, bits: int, zero: int
    ) -> tuple[int, int, SymExpr]:
        """(rows, rows of a block, columns) of a weight that is well formed."""
        ty, scale = self.tensor(words, "words"), self.tensor(scales, "scales")
        if ty.dtype != "int32" or ty.rank != 2 or scale.rank != 2 or scale.dtype not in ("float32", "float16"):
            self.fail(f"words must be int32 and scales float32 or float16, both of rank 2, got {ty} and {scale}")
        assert ty.shape is not None and scale.shape is not None
        count, blocks = as_int(ty.shape[0]), as_int(scale.shape[0])
        if not count or not blocks or count * 32 % (bits * blocks) or PROVER.can_prove_ne(ty.shape[1], scale.shape[1]):
            self.fail(
                f"words {format_shape(ty.shape)} of {bits} bits and scales {format_shape(scale.shape)} do not fit"
            )
        rows = count * 32 // bits
        if not is_block(rows // blocks, bits):
            self.fail(f"codes of {bits} bits do not fill whole words in blocks of {rows // blocks} rows")
        if offsets is not None and self.tensor(offsets, "offsets") != scale:
            self.fail(f"offsets must be like scales, {scale}, got {offsets.ty}")
        if not 0 <= zero < 1 << bits:
            self.fail(f"zero must be a code of {bits} bits, got {zero}")
        return rows, rows // blocks, ty.shape[1]


def _block_of(words: Buffer, scales: Buffer, bits: int) -> int:
    count, blocks = as_int(words.shape[0]) or 0, as_int(scales.shape[0]) or 1
    return count * 32 // bits // blocks


def _weight(
    words: Buffer, scales: Buffer, offsets: Buffer | None, k: SymExpr, j: IntLike, bits: int, zero: int
) -> Scalar:
    """The element of row k and column j as float32."""
    block = _block_of(words, scales, bits)
    quad, byte = k % block // QUAD, k % QUAD * 8
    if bits == 8:
        code = Scalar(words[k // QUAD, j]).binary("shift_right", byte) & 255
    else:
        first = k // 8 if bits == 4 else k // block * words_of(block, bits) + k % block // 8
        code = Scalar(words[first, j]).binary("shift_right", quad % 2 * 4 + byte) & 15
    if 4 < bits < 8:
        extra, per_word = bits - 4, 8 // (bits - 4)
        at = k // block * words_of(block, bits) + block // 8 + quad // per_word
        high = Scalar(words[at, j]).binary("shift_right", quad % per_word * extra + byte) & ((1 << extra) - 1)
        code = code | high.binary("shift_left", 4)
    centered = code - zero if zero else code
    found = centered.cast("float32") * Scalar(scales[k // block, j]).cast("float32")
    return found if offsets is None else found + Scalar(offsets[k // block, j]).cast("float32")


def _dequantized(words: Array, scales: Array, offsets: Array | None, bits: int, zero: int) -> Array:
    block = words.shape[0] * 32 // bits // scales.shape[0]
    codes = unpack_codes(words, block, bits).astype(np.float32) - np.float32(zero)
    found = codes.reshape(-1, block, words.shape[1]) * scales.astype(np.float32)[:, None]
    if offsets is not None:
        found = found + offsets.astype(np.float32)[:, None]
    return np.asarray(found.reshape(-1, words.shape[1]), np.float32)


def _some_words(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    return rng.integers(-(2**31), 2**31, shape).astype(np.int32)


@register
class DequantizeBlocks(_Blocks):
    """The weight in blocks (words, scales, offsets) as float32 (rows, n). Not folded: it keeps to the few bits that it
    has, and what reads it widens it on its way in (passes/fuse_prologues.py)."""

    name = "dequantize_blocks"
    operands = _WEIGHT
    attrs: ClassVar[Mapping[str, Attr]] = _CODES

    def infer(self, words: Expr, scales: Expr, offsets: Expr | None = None, *, bits: int, zero: int) -> Type:
        rows, _, columns = self.rows_of(words, scales, offsets, bits, zero)
        return TensorType.of((rows, columns), "float32")

    def lower(
        self, words: Buffer, scales: Buffer, offsets: Buffer | None = None, *, out: Buffer, bits: int, zero: int
    ) -> Stmt:
        return compute(out, lambda k, j: _weight(words, scales, offsets, k, j, bits, zero).value)

    def reference(self, words: Any, scales: Any, offsets: Any = None, *, bits: int, zero: int) -> Any:
        return _dequantized(words, scales, offsets, bits, zero)

    def samples(self) -> Iterable[Sample]:
        kinds, make = ("int32", "float32", "float32"), {0: _some_words}
        yield Sample(((8, "n"), (2, "n")), {"bits": 4, "zero": 8}, kinds[:2], make)
        yield Sample(((12, "n"), (4, "n"), (4, "n")), {"bits": 6}, kinds, make)
        yield Sample(((5, "n"), (1, "n"), (1, "n")), {"bits": 5}, kinds, make)
        yield Sample(((16, "n"), (2, "n")), {"bits": 8, "zero": 128}, ("int32", "float16"), make, tolerance=1e-3)


@register
class GatherBlocks(_Blocks):
    """Columns of a weight in blocks, chosen by indices: (indices..., rows) in float32, as an embedding looks up tokens.
    Negative indices count from the end."""

    name = "gather_blocks"
    operands = ("indices", *_WEIGHT)
    attrs: ClassVar[Mapping[str, Attr]] = _CODES

    def infer(
        self, indices: Expr, words: Expr, scales: Expr, offsets: Expr | None = None, *, bits: int, zero: int
    ) -> Type:
        rows, _, _ = self.rows_of(words, scales, offsets, bits, zero)
        ty = self.tensor(indices, "indices")
        if ty.dtype not in ("int32", "int64"):
            self.fail(f"indices must be int32 or int64, got {ty}")
        return TensorType.of((*(ty.shape or ()), rows), "float32")

    def lower(
        self, indices: Buffer, words: Buffer, scales: Buffer, offsets: Buffer | None = None, *, out: Buffer, bits: int,
        zero: int,
    ) -> Stmt:  # fmt: skip
        def element(*i: SymExpr) -> Stmt:
            position = Position.along(self, words, 1, indices[i[:-1]])
            return at_positions(
                [position], lambda p: Store(out, i, _weight(words, scales, offsets, i[-1], p, bits, zero).value)
            )

        return loops("ijklmn", out.shape, element)

    def reference(self, indices: Any, words: Any, scales: Any, offsets: Any = None, *, bits: int, zero: int) -> Any:
        chosen = plain_indices(indices).reshape(-1)
        shift = None if offsets is None else offsets[:, chosen]
        found = _dequantized(words[:, chosen], scales[:, chosen], shift, bits, zero)
        return np.ascontiguousarray(found.T).reshape(*indices.shape, -1)

    def samples(self) -> Iterable[Sample]:
        kinds = ("int64", "int32", "float32", "float32")
        make = {0: draw_indices(5), 1: _some_words}
        yield Sample((("m",), (8, 5), (2, 5)), {"bits": 4, "zero": 8}, kinds[:3], make)
        yield Sample(((2, "m"), (12, 5), (4, 5), (4, 5)), {"bits": 6}, kinds, make)
        yield Sample(((), (16, 5), (2, 5)), {"bits": 8, "zero": 128}, ("int32", *kinds[1:3]), make)


@register
class QuantizeBlocks(Op):
    """Rows of x float32 (m, k) rounded in blocks of `block` along k: (words int32 (k / block, m, parts * block / 4),
    scales float32 (k / block, m), sums int32 (k / block, m)).

    scale is the block's largest magnitude / 127, over 256 with two parts. A word holds four neighbours, first byte
    first: the high parts of all, round(x / scale) or its 256th part, then the low parts. `sums` are those of the
    integers x / scale, for a zero point or offset of what they are multiplied by. NaN and infinity are in the scale,
    and so in all that the block is multiplied by; its integers are 0 then, as where nothing is as large as 1e-36.
    """

    name = "quantize_blocks"
    operands = ("x",)
    attrs: ClassVar[Mapping[str, Attr]] = {"block": Attr("int"), "parts": Attr("int", 1, (1, 2))}

    def infer(self, x: Expr, *, block: int, parts: int) -> Type:
        ty = self.tensor(x, "x")
        depth = as_int(ty.shape[1]) if ty.shape is not None and ty.rank == 2 else None
        if ty.dtype != "float32" or depth is None:
            self.fail(f"x must be float32 of rank 2 with a constant last dimension, got {ty}")
        if block < QUAD or block % QUAD or depth % block:
            self.fail(f"rows of {depth} are no whole number of blocks of {block}, a multiple of {QUAD}")
        assert ty.shape is not None
        blocks = (depth // block, ty.shape[0])
        words = TensorType.of((*blocks, parts * block // QUAD), "int32")
        return TupleType((words, TensorType.of(blocks, "float32"), TensorType.of(blocks, "int32")))

    def lower(self, x: Buffer, *, out: tuple[Buffer, Buffer, Buffer], block: int, parts: int) -> Stmt:
        words, scales, sums = out
        top, factor = Buffer("top", (), "float32", "local"), Buffer("factor", (), "float32", "local")
        total = Buffer("total", (), "int32", "local")
        quads = block // QUAD

        def of_block(i: SymExpr, g: SymExpr) -> Stmt:
            def rounded(t: SymExpr, b: int) -> tuple[Scalar, Scalar | None]:
                scaled = Scalar(x[i, g * block + t * QUAD + b]) * Scalar(factor[()])
                high = scaled.unary("round")
                if parts == 1:
                    return high.cast("int32"), None
                rest = ((scaled - high) * float(1 << SHIFT)).unary("round").minimum(float(GREATEST))
                return high.cast("int32"), rest.cast("int32")

            def word(bytes_of: list[Scalar]) -> Scalar:
                found = bytes_of[0] & 255
                for n, byte in enumerate(bytes_of[1:], 1):
                    found = found | (byte & 255).binary("shift_left", 8 * n)
                return found

            def stores(t: SymExpr) -> Stmt:
                found = [rounded(t, b) for b in range(QUAD)]
                made: list[Stmt] = [Store(words, (g, i, t), word([high for high, _ in found]).value)]
                if parts == 2:
                    low = word([rest for _, rest in found if rest is not None])
                    made.append(Store(words, (g, i, t + quads), low.value))
                return seq(*made)

            def summed(t: SymExpr) -> Value:
                high = _dot(literal(0, "int32"), literal(_ONES, "int32"), words[g, i, t])
                if parts == 1:
                    return high
                wide = Scalar(high).binary("shift_left", SHIFT).value
                return _dot(wide, literal(_ONES, "int32"), words[g, i, t + quads])

            greatest = Scalar(top[()])
            scale = greatest / float(GREATEST << SHIFT * (parts - 1))
            inverse = select(greatest >= LEAST_TOP, Scalar(literal(float(GREATEST), "float32")) / greatest, 0.0)
            return seq(
                reduce(
                    top,
                    (sym(block),),
                    "max",
                    literal(0.0, "float32"),
                    lambda b: Scalar(x[i, g * block + b]).abs().value,
                ),
                Store(scales, (g, i), scale.value),
                Store(factor, (), inverse.value),
                loops("t", (sym(quads),), stores),
                reduce(total, (sym(quads),), "add", literal(0, "int32"), summed),
                Store(sums, (g, i), total[()]),
            )

        return loops("ig", (x.shape[0], scales.shape[0]), lambda i, g: _local((top, factor, total), of_block(i, g)))

    def reference(self, x: Any, *, block: int, parts: int) -> Any:
        blocks = x.reshape(len(x), x.shape[1] // block, block).swapaxes(0, 1)
        with np.errstate(all="ignore"):
            top = np.abs(blocks).max(axis=2, initial=0)
            factor = np.where(top >= np.float32(LEAST_TOP), np.float32(GREATEST) / top, np.float32(0))
            scaled = blocks * factor[..., None]
            high = np.rint(scaled)
            pieces = [high]
            if parts == 2:
                pieces.append(np.minimum(np.rint((scaled - high) * np.float32(1 << SHIFT)), GREATEST))
            codes = [np.nan_to_num(p, nan=0.0).astype(np.int8) for p in pieces]  # infinity times 0 is NaN
        words = np.ascontiguousarray(np.concatenate(codes, axis=2)).view("<i4")
        sums = sum(c.astype(np.int32).sum(axis=2) << SHIFT * (parts - 1 - n) for n, c in enumerate(codes))
        scales = (top / np.float32(GREATEST << SHIFT * (parts - 1))).astype(np.float32)
        return words, scales, np.asarray(sums, np.int32)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("m", 64),), {"block": 32})
        yield Sample((("m", 48),), {"block": 16, "parts": 2})
        yield Sample((("m", 32),), {"block": 32}, make={0: lambda shape, rng: np.zeros(shape, np.float32)})


def _local(buffers: tuple[Buffer, ...], body: Stmt) -> Stmt:
    for buffer in reversed(buffers):
        body = Allocate(buffer, body)
    return body


def _dot(total: Value, a: Value, b: Value) -> Intrinsic:
    return Intrinsic(WORDS, (total, a, b), "int32")


@register
class MatmulBlocks(_Blocks):
    """x @ weight in float32 (m, n), where x comes from `quantize_blocks` and the weight is in blocks of the same size:

    sum over blocks g of x_scales[g, i] * (scales[g, j] * sum of (codes - zero) * x + offsets[g, j] * x_sums[g, i])

    with exact sums of integers inside of a block of at most 256 rows. `parts` as quantize_blocks made them.
    """

    name = "matmul_blocks"
    operands = ("x", "x_scales", "x_sums", *_WEIGHT)
    attrs: ClassVar[Mapping[str, Attr]] = {**_CODES, "parts": Attr("int", 1, (1, 2))}

    def infer(
        self, x: Expr, x_scales: Expr, x_sums: Expr, words: Expr, scales: Expr, offsets: Expr | None = None, *,
        bits: int, zero: int, parts: int,
    ) -> Type:  # fmt: skip
        rows, block, columns = self.rows_of(words, scales, offsets, bits, zero)
        if block > LONGEST_BLOCK:
            self.fail(f"sums of blocks of {block} rows may not fit into 32 bits; at most {LONGEST_BLOCK} rows do")
        types = [self.tensor(v, name) for v, name in zip((x, x_scales, x_sums), self.operands, strict=False)]
        shape = types[0].shape or ()
        wanted = (rows // block, shape[1] if len(shape) == 3 else sym(0))
        if [t.dtype for t in types] != ["int32", "float32", "int32"] or len(shape) != 3:
            self.fail(f"x, x_scales and x_sums must be as quantize_blocks makes them, got {', '.join(map(str, types))}")
        for t, expected in zip(types, ((*wanted, parts * block // QUAD), wanted, wanted), strict=True):
            if t.rank != len(expected) or any(map(PROVER.can_prove_ne, t.shape or (), expected)):
                self.fail(
                    f"{rows} rows in blocks of {block} take x of ({rows // block}, m, {parts * block // QUAD}) and "
                    f"x_scales and x_sums of ({rows // block}, m), got {', '.join(map(str, types))}"
                )
        return TensorType.of((wanted[1], columns), "float32")

    def lower(
        self, x: Buffer, x_scales: Buffer, x_sums: Buffer, words: Buffer, scales: Buffer, offsets: Buffer | None = None,
        *, out: Buffer, bits: int, zero: int, parts: int,
    ) -> Stmt:  # fmt: skip
        block = _block_of(words, scales, bits)
        quads = block // QUAD

        def term(i: SymVar, j: SymVar, g: SymVar) -> Value:
            codes = _quads(words, g, j, block, bits)
            start = literal(0, "int32")
            correction = (Scalar(start) - Scalar(x_sums[g, i]) * zero).value if zero else start
            high = _dots(start if parts > 1 else correction, codes, [x[g, i, q] for q in range(quads)])
            if parts > 1:
                low = _dots(correction, codes, [x[g, i, quads + q] for q in range(quads)])
                total = Scalar(high).binary("shift_left", SHIFT) + Scalar(low)
            else:
                total = Scalar(high)
            found = total.cast("float32") * Scalar(scales[g, j]).cast("float32")
            if offsets is not None:
                found = found + Scalar(x_sums[g, i]).cast("float32") * Scalar(offsets[g, j]).cast("float32")
            return (found * Scalar(x_scales[g, i])).value

        checks = equality_checks(
            "matmul_blocks: x and the weight differ in size",
            *((b.shape[1], x.shape[1]) for b in (x_scales, x_sums)),
            *((b.shape[1], words.shape[1]) for b in (scales, *([] if offsets is None else [offsets]))),
        )
        element = Buffer("e", (), "float32", "local")

        def sums(i: SymVar, j: SymVar) -> Stmt:
            added = loops("g", (scales.shape[0],), lambda g: Store(element, (), term(i, j, g), "add"))
            first = Store(element, (), literal(0.0, "float32"))
            return Allocate(element, seq(first, added, Store(out, (i, j), Load(element, ()))))

        return seq(*checks, loops("ij", out.shape, sums))

    def reference(
        self, x: Any, x_scales: Any, x_sums: Any, words: Any, scales: Any, offsets: Any = None, *, bits: int,
        zero: int, parts: int,
    ) -> Any:  # fmt: skip
        blocks, m, count = x.shape
        block = count * QUAD // parts
        given = np.ascontiguousarray(x).view(np.int8).reshape(blocks, m, parts, block).astype(np.int64)
        numbers = given[:, :, 0] if parts == 1 else given[:, :, 0] * (1 << SHIFT) + given[:, :, 1]
        codes = unpack_codes(words, block, bits).reshape(blocks, block, -1).astype(np.int64)
        total = (np.matmul(numbers, codes) - zero * x_sums.astype(np.int64)[..., None]).astype(np.float64)
        found = total * scales.astype(np.float64)[:, None]
        if offsets is not None:
            found = found + x_sums[..., None] * offsets.astype(np.float64)[:, None]
        return (found * x_scales[..., None]).sum(axis=0).astype(np.float32)

    def samples(self) -> Iterable[Sample]:
        kinds = ("int32", "float32", "int32", "int32", "float32", "float32")

        def sums(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
            return rng.integers(-500, 500, shape).astype(np.int32)

        make = {0: _some_words, 2: sums, 3: _some_words}
        for bits, block, zero, parts in ((4, 32, 8, 1), (8, 32, 128, 1), (5, 32, 0, 2), (6, 16, 32, 1)):
            rows = 2 * block
            given = ((2, "m", parts * block // 4), (2, "m"), (2, "m"))
            weight: tuple[tuple[int | str, ...], ...] = ((rows * bits // 32, "n"), (2, "n"))
            attrs = {"bits": bits, "zero": zero, "parts": parts}
            yield Sample((*given, *weight, *([] if zero else [(2, "n")])), attrs, kinds[: 5 if zero else 6], make, 1e-4)


def _dots(start: Value, codes: Sequence[Value], numbers: Sequence[Value]) -> Value:
    """start + codes . numbers, in two chains, as each dot product waits for the one before."""
    chains = [start, literal(0, "int32")]
    for q, (code, number) in enumerate(zip(codes, numbers, strict=True)):
        chains[q % 2] = _dot(chains[q % 2], code, number)
    return (Scalar(chains[0]) + Scalar(chains[1])).value


def _quads(words: Buffer, g: SymExpr, j: SymExpr, block: int, bits: int) -> list[Value]:
    """The quads of block g of column j."""
    first = g * words_of(block, bits)
    loaded = [words[first + n, j] for n in range(words_of(block, bits))]

    def quad(q: int) -> Value:
        if bits == 8:
            return loaded[q]
        found = _shifted(Scalar(loaded[q // 2]), 4 * (q % 2)) & _ONES * 15
        if bits > 4:
            extra, per_word = bits - 4, 8 // (bits - 4)
            high = _shifted(Scalar(loaded[block // 8 + q // per_word]), extra * (q % per_word))
            found = found | (high & _ONES * ((1 << extra) - 1)).binary("shift_left", 4)
        return found.value

    return [quad(q) for q in range(block // QUAD)]
