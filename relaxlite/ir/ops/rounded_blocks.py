"""Blockwise quantization of activations, for integer products with blocked weights (block_quantized.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np

from relaxlite.ir.expr import Expr
from relaxlite.ir.intrinsics import ROUND_TO_INT32
from relaxlite.ir.op import Attr, Op, Sample, register
from relaxlite.ir.ops.block_codes import DP4A_BYTES, Array, hadamard_transform
from relaxlite.ir.ops.elementwise import cast_array
from relaxlite.ir.ops.scalars import Scalar, literal, select
from relaxlite.ir.program import Allocate, Buffer, Intrinsic, Stmt, Store, Value, loops, reduce, seq
from relaxlite.ir.symbolic import IntLike, SymExpr, as_int, sym
from relaxlite.ir.types import TensorType, TupleType, Type

MAX_CODE = 127  # largest magnitude of an int8 activation
LOW_BITS = (0, 4, 8)
ROTATIONS = (1, 2, 4, 8, 16)
MIN_BLOCK_MAX = 1e-36  # a block of smaller numbers is rounded to 0: the inverse of its scale would be infinite


@register
class QuantizeBlocks(Op):
    """Quantize rows of x float32 (m, k) in blocks of `block` along k: (codes, scales, sums).

    codes int8 (k / block, m, c): c = block bytes, or with low bits c = 2 * block, high bytes before low bytes; an
    integer is high * 2**low_bits + low. scales float32 (k / block, m): largest magnitude / (127 * 2**low_bits). sums
    int32 (k / block, m): the sum of the integers of a block, for zero points and offsets of the weight.

    With a `rotation` of T > 1, the dp4a groups of x are transformed T at a time by a Walsh-Hadamard matrix first, and
    sums int32 (2, k / block, m) are over the first group of every T, which are the sums of x, and over all groups.

    NaN and infinity are propagated by the scale; the integers of their blocks are 0, as those of blocks below 1e-36.
    """

    name = "quantize_blocks"
    operands = ("x",)
    attrs: ClassVar[Mapping[str, Attr]] = {
        "block": Attr("int"), "low_bits": Attr("int", 0, LOW_BITS), "rotation": Attr("int", 1, ROTATIONS),
    }  # fmt: skip

    def infer(self, x: Expr, *, block: int, low_bits: int, rotation: int) -> Type:
        ty = self.tensor(x, "x")
        depth = as_int(ty.shape[1]) if ty.shape is not None and ty.rank == 2 else None
        if ty.dtype != "float32" or depth is None:
            self.fail(f"x must be float32 of rank 2 with a constant last dimension, got {ty}")
        if block < DP4A_BYTES or block % DP4A_BYTES or depth % block:
            self.fail(f"rows of {depth} are no whole number of blocks of {block}, a multiple of {DP4A_BYTES}")
        if block // DP4A_BYTES % rotation:
            self.fail(f"blocks of {block // DP4A_BYTES} quads are no whole number of rotations of {rotation}")
        assert ty.shape is not None
        blocks = (depth // block, ty.shape[0])
        codes = TensorType.of((*blocks, bytes_per_block(block, low_bits)), "int8")
        sums = TensorType.of(block_sums_shape(blocks, rotation), "int32")
        return TupleType((codes, TensorType.of(blocks, "float32"), sums))

    def lower(self, x: Buffer, *, out: tuple[Buffer, Buffer, Buffer], block: int, low_bits: int, rotation: int) -> Stmt:
        codes, scales, sums = out
        block_max, factor = Buffer("top", (), "float32", "local"), Buffer("factor", (), "float32", "local")
        total, numbers = Buffer("total", (), "int32", "local"), Buffer("numbers", (sym(block),), "int32", "local")
        mixed = Buffer("mixed", (sym(block),), "float32", "local")
        unit = 1 << low_bits

        def quantize_block(i: SymExpr, g: SymExpr) -> Stmt:
            def source(b: SymExpr) -> Value:
                return mixed[(b,)] if rotation > 1 else x[i, g * block + b]

            def transform(first: SymExpr, b: SymExpr) -> Stmt:
                positions = [first * (rotation * DP4A_BYTES) + q * DP4A_BYTES + b for q in range(rotation)]
                transformed = hadamard_transform([Scalar(x[i, g * block + at]) for at in positions])
                return seq(
                    *(Store(mixed, (at,), value.value) for at, value in zip(positions, transformed, strict=True))
                )

            def number(b: SymExpr) -> Stmt:
                scaled = Scalar(source(b)) * Scalar(factor[()]) * float(unit)
                rounded = Scalar(Intrinsic(ROUND_TO_INT32, (scaled.value,), "int32"))  # never near the limits of int32
                return Store(numbers, (b,), select(scaled.compare("eq", scaled), rounded, 0).value)

            def high(b: SymExpr) -> Scalar:
                whole = Scalar(numbers[(b,)])
                return (whole + unit // 2).binary("shift_right", low_bits) if low_bits else whole

            def low(b: SymExpr) -> Scalar:
                return Scalar(numbers[(b,)]) - high(b).binary("shift_left", low_bits)

            def bytes_of(part: Callable[[SymExpr], Scalar], start: int) -> Stmt:
                return loops("b", (sym(block),), lambda b: Store(codes, (g, i, b + start), part(b).cast("int8").value))

            greatest, width = Scalar(block_max[()]), (sym(block),)
            scale = greatest / float(MAX_CODE * unit * rotation)
            inverse = select(greatest >= MIN_BLOCK_MAX, Scalar(literal(float(MAX_CODE), "float32")) / greatest, 0.0)
            groups = block // (rotation * DP4A_BYTES)
            return seq(
                *(
                    loops("b", (sym(DP4A_BYTES),), partial(transform, sym(t)))
                    for t in range(groups if rotation > 1 else 0)
                ),
                reduce(block_max, width, "max", literal(0.0, "float32"), lambda b: Scalar(source(b)).abs().value),
                Store(scales, (g, i), scale.value),
                Store(factor, (), inverse.value),
                loops("b", width, number),
                bytes_of(high, 0),
                *([bytes_of(low, block)] if low_bits else []),
                *totals(i, g, groups),
            )

        def totals(i: SymExpr, g: SymExpr, groups: int) -> list[Stmt]:
            zero, all_of = literal(0, "int32"), (sym(block),)
            of_all = reduce(total, all_of, "add", zero, lambda b: numbers[(b,)])
            if rotation == 1:
                return [of_all, Store(sums, (g, i), total[()])]
            step, first = rotation * DP4A_BYTES, (sym(groups), sym(DP4A_BYTES))
            of_first = reduce(total, first, "add", zero, lambda t, b: numbers[(t * step + b,)])
            return [of_first, Store(sums, (sym(0), g, i), total[()]), of_all, Store(sums, (sym(1), g, i), total[()])]

        buffers = (block_max, factor, total, numbers, *([mixed] if rotation > 1 else []))
        return loops("ig", scales.shape[::-1], lambda i, g: _allocate(buffers, quantize_block(i, g)))

    def reference(self, x: Any, *, block: int, low_bits: int, rotation: int) -> Any:
        blocks = x.reshape(len(x), x.shape[1] // block, block).swapaxes(0, 1)
        groups = blocks.reshape(*blocks.shape[:2], block // (rotation * DP4A_BYTES), rotation, DP4A_BYTES)
        blocks = np.stack(hadamard_transform([groups[..., group, :] for group in range(rotation)]), axis=-2).reshape(
            blocks.shape
        )
        with np.errstate(all="ignore"):
            block_max = np.abs(blocks).max(axis=2, initial=0)
            factor = np.where(block_max >= np.float32(MIN_BLOCK_MAX), np.float32(MAX_CODE) / block_max, np.float32(0))
            scaled = blocks * factor[..., None]
            numbers = cast_array(np.rint(scaled * np.float32(1 << low_bits)), "int32")
        high = (numbers + (1 << low_bits) // 2) >> low_bits
        code_bytes = [high, numbers - (high << low_bits)][: 2 if low_bits else 1]
        scales = (block_max / np.float32((MAX_CODE << low_bits) * rotation)).astype(np.float32)
        return np.concatenate(code_bytes, axis=2).astype(np.int8), scales, compute_block_sums(numbers, rotation)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("m", 64),), {"block": 32})
        yield Sample((("m", 48),), {"block": 16, "low_bits": 8})
        yield Sample((("m", 64),), {"block": 32, "low_bits": 4})
        yield Sample((("m", 64),), {"block": 32, "rotation": 8})
        yield Sample((("m", 64),), {"block": 32, "low_bits": 4, "rotation": 4})
        yield Sample((("m", 32),), {"block": 32}, make={0: lambda shape, rng: np.zeros(shape, np.float32)})


def block_sums_shape(blocks: tuple[IntLike, IntLike], rotation: int) -> tuple[IntLike, ...]:
    """Shape of the sums of `quantize_blocks`; blocks: (k / block, m)."""
    return blocks if rotation == 1 else (2, *blocks)


def compute_block_sums(numbers: Array, rotation: int) -> Array:
    """Compute the sums of `quantize_blocks` for integers (..., block) in NumPy."""
    all_sums: Array = numbers.sum(axis=-1).astype(np.int32)
    if rotation == 1:
        return all_sums
    groups = numbers.reshape(*numbers.shape[:-1], numbers.shape[-1] // (rotation * DP4A_BYTES), rotation, DP4A_BYTES)
    return np.stack([groups[..., 0, :].sum(axis=(-2, -1)).astype(np.int32), all_sums])


def bytes_per_block(block: int, low_bits: int) -> int:
    """Number of code bytes of a quantized block."""
    return 2 * block if low_bits else block


def decode_integers(codes: Array, block: int, low_bits: int) -> Array:
    """Decode the codes (..., bytes) of quantized blocks to integers, int64 (..., block)."""
    high = codes[..., :block].astype(np.int64)
    return high * (1 << low_bits) + codes[..., block:] if low_bits else high


def _allocate(buffers: tuple[Buffer, ...], body: Stmt) -> Stmt:
    """Allocate buffers around a statement."""
    for buffer in reversed(buffers):
        body = Allocate(buffer, body)
    return body
