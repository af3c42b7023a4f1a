"""Quantization, y = saturate(round(x / scale) + zero_point), its inverse, and products of quantized tensors.

scale and zero_point are per tensor (one element), per channel along `axis` (a vector), or per block along `axis` (the
rank of x, one element for `block_size` consecutive ones).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Array, Call, Expr
from relaxlite.ir.op import Attr, Op, Sample, get_op, register
from relaxlite.ir.ops.broadcast import PROVER, Shape, format_shape
from relaxlite.ir.ops.elementwise import cast_array
from relaxlite.ir.ops.linalg import emit_op, emit_reshape, equality_checks, to_accumulator_dtype
from relaxlite.ir.ops.nn_conv import Convolution
from relaxlite.ir.ops.reduce import normalize_axis
from relaxlite.ir.ops.scalars import Scalar, literal, select
from relaxlite.ir.program import Allocate, Buffer, Check, Load, Stmt, Store, Value, compute, reduce, seq
from relaxlite.ir.symbolic import SymVar, as_int, ceildiv, sym
from relaxlite.ir.types import TensorType, TupleType, Type

QUANTIZED_DTYPES = ("int8", "uint8", "int16", "uint16", "int32")


class _Scaled(Op):
    """Base of quantize_linear and dequantize_linear: checks and indices of scale and zero_point."""

    operands = ("x", "scale", "zero_point?")
    attrs: ClassVar[Mapping[str, Attr]] = {"axis": Attr("int", 1), "block_size": Attr("int", 0)}

    def check_scale(self, x: Expr, scale: Expr, zero_point: Expr | None, axis: int, block_size: int) -> None:
        """Fail unless scale and zero_point have types that fit x."""
        shape, scale_dims = self.tensor(x, "x").shape or (), self.tensor(scale, "scale").shape or ()
        if not dtypes.is_float(self.tensor(scale).dtype):
            self.fail(f"scale must be of a float dtype, got {scale.ty}")
        if not _is_one(scale_dims):
            expected = self.scale_shape(shape, axis, block_size)
            if len(scale_dims) != len(expected) or any(map(PROVER.can_prove_ne, scale_dims, expected)):
                wanted = f"one element or the shape {format_shape(expected)}"
                self.fail(f"scale must have {wanted}, got {format_shape(scale_dims)}")
        if zero_point is not None:
            zeros = self.tensor(zero_point, "zero_point").shape or ()
            if len(zeros) != len(scale_dims) or any(map(PROVER.can_prove_ne, zeros, scale_dims)):
                self.fail(
                    f"zero_point must have the shape of scale, {format_shape(scale_dims)}, got {format_shape(zeros)}"
                )

    def scale_shape(self, shape: Shape, axis: int, block_size: int) -> Shape:
        """Shape of a scale per channel, or per block if block_size is not 0, for x of this shape."""
        axis = normalize_axis(self, axis, len(shape))
        if not block_size:
            return (shape[axis],)
        return (*shape[:axis], ceildiv(shape[axis], block_size), *shape[axis + 1 :])

    def scale_checks(
        self, x: Buffer, scale: Buffer, zero_point: Buffer | None, axis: int, block_size: int
    ) -> tuple[Check, ...]:
        """Run-time checks of the shapes of scale and zero_point."""
        zeros = () if zero_point is None else zip(zero_point.shape, scale.shape, strict=True)
        checks = equality_checks(f"{self.name}: zero_point and scale have different shapes", *zeros)
        if _is_one(scale.shape):
            return checks
        expected = zip(scale.shape, self.scale_shape(x.shape, axis, block_size), strict=True)
        return (*equality_checks(f"{self.name}: the shape of scale", *expected), *checks)

    def at(self, scale: Buffer, i: tuple[SymVar, ...], axis: int, block_size: int) -> Shape:
        """Indices of the scale of element i."""
        if _is_one(scale.shape):
            return (sym(0),) * len(scale.shape)
        axis = normalize_axis(self, axis, len(i))
        return (*i[:axis], i[axis] // block_size, *i[axis + 1 :]) if block_size else (i[axis],)


def _is_one(shape: Shape) -> bool:
    return all(as_int(d) == 1 for d in shape)


def _expand_scale(scale: Any, shape: tuple[int, ...], axis: int, block_size: int) -> Any:
    """Expand a scale or zero-point array to a shape that broadcasts to x."""
    axis %= max(len(shape), 1)
    if scale.size == 1:
        return scale.reshape(())
    if not block_size:
        return scale.reshape(-1, *(1,) * (len(shape) - 1 - axis))
    return np.take(np.repeat(scale, block_size, axis), np.arange(shape[axis]), axis)


def _small_scale(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    return rng.uniform(0.01, 0.1, shape).astype(np.float32)


@register
class QuantizeLinear(_Scaled):
    """Quantize x: saturate(round(x / scale) + zero_point) in an integer dtype, rounding halves to even, in float32."""

    name = "quantize_linear"
    attrs: ClassVar[Mapping[str, Attr]] = {**_Scaled.attrs, "dtype": Attr("dtype", None)}

    def infer(
        self, x: Expr, scale: Expr, zero_point: Expr | None = None, *, axis: int, block_size: int, dtype: str | None
    ) -> Type:
        self.check_scale(x, scale, zero_point, axis, block_size)
        result = dtype or ("uint8" if zero_point is None else self.tensor(zero_point).dtype)
        if result not in QUANTIZED_DTYPES or (zero_point is not None and self.tensor(zero_point).dtype != result):
            zero = "no zero_point" if zero_point is None else f"zero_point {zero_point.ty}"
            self.fail(
                f"the result must be one of {', '.join(QUANTIZED_DTYPES)}, as zero_point is, got {result} and {zero}"
            )
        return TensorType(self.tensor(x).shape, result, self.tensor(x).rank)

    def lower(
        self, x: Buffer, scale: Buffer, zero_point: Buffer | None = None, *, out: Buffer, axis: int, block_size: int,
        dtype: str | None,
    ) -> Stmt:  # fmt: skip
        def value(*i: SymVar) -> Value:
            at = self.at(scale, i, axis, block_size)
            zero = None if zero_point is None else Scalar(zero_point[at])
            return _quantized(Scalar(x[i]), Scalar(scale[at]), zero, out.dtype).value

        return seq(*self.scale_checks(x, scale, zero_point, axis, block_size), compute(out, value))

    def reference(
        self, x: Any, scale: Any, zero_point: Any = None, *, axis: int, block_size: int, dtype: str | None
    ) -> Any:
        target = dtype or ("uint8" if zero_point is None else dtypes.from_numpy(zero_point.dtype)) or "uint8"
        scales = _expand_scale(scale, x.shape, axis, block_size).astype(np.float32)
        with np.errstate(all="ignore"):
            rounded = np.rint(x.astype(np.float32) / scales)
            zeros = 0 if zero_point is None else _expand_scale(zero_point, x.shape, axis, block_size).astype(np.float32)
            return cast_array(np.asarray(rounded + zeros), target)

    def samples(self) -> Iterable[Sample]:
        make = {1: _small_scale}
        floats, zero = ("float32", "float32"), ("float32", "float32", "int8")
        yield Sample((("n", 3), ()), {}, floats, make)
        yield Sample((("n", 3, 2), (3,), (3,)), {"axis": 1}, zero, make)
        yield Sample((("n", "m"), ("n",), ("n",)), {"axis": -2, "dtype": "int16"}, (*floats, "int16"), make)
        yield Sample((("n", 7), ("n", 3), ("n", 3)), {"axis": 1, "block_size": 3}, zero, make)


def _quantized(x: Scalar, scale: Scalar, zero: Scalar | None, dtype: str) -> Scalar:
    rounded = (x.cast("float32") / scale.cast("float32")).unary("round")
    return (rounded if zero is None else rounded + zero.cast("float32")).cast(dtype)


@register
class DequantizeLinear(_Scaled):
    """Dequantize x: (x - zero_point) * scale, in the dtype of scale."""

    name = "dequantize_linear"

    def infer(self, x: Expr, scale: Expr, zero_point: Expr | None = None, *, axis: int, block_size: int) -> Type:
        self.check_scale(x, scale, zero_point, axis, block_size)
        ty = self.tensor(x)
        if ty.dtype not in QUANTIZED_DTYPES or (zero_point is not None and self.tensor(zero_point).dtype != ty.dtype):
            zero = "no zero_point" if zero_point is None else f"zero_point {zero_point.ty}"
            self.fail(
                f"x must be one of {', '.join(QUANTIZED_DTYPES)}, with a zero_point of the same, got {ty} and {zero}"
            )
        return TensorType(ty.shape, self.tensor(scale).dtype, ty.rank)

    def lower(
        self, x: Buffer, scale: Buffer, zero_point: Buffer | None = None, *, out: Buffer, axis: int, block_size: int
    ) -> Stmt:
        def value(*i: SymVar) -> Value:
            at = self.at(scale, i, axis, block_size)
            wide = "float64" if out.dtype == "float64" else "float32"
            exact = wide if dtypes.itemsize(x.dtype) < 4 else "int32"  # differences of 16-bit integers are exact too
            centered = Scalar(x[i]).cast(exact)
            if zero_point is not None:
                centered = centered - Scalar(zero_point[at]).cast(exact)
            return (centered.cast(wide) * Scalar(scale[at]).cast(wide)).cast(out.dtype).value

        return seq(*self.scale_checks(x, scale, zero_point, axis, block_size), compute(out, value))

    def reference(self, x: Any, scale: Any, zero_point: Any = None, *, axis: int, block_size: int) -> Any:
        zeros = 0 if zero_point is None else _expand_scale(zero_point, x.shape, axis, block_size).astype(np.int32)
        wide = to_accumulator_dtype(_expand_scale(scale, x.shape, axis, block_size))
        return np.asarray((x.astype(np.int32) - zeros).astype(wide.dtype) * wide).astype(scale.dtype)

    def samples(self) -> Iterable[Sample]:
        kinds = ("int8", "float32", "int8")
        yield Sample((("n", 3), (), ()), {}, kinds)
        yield Sample((("n", 3, 2), (3,), (3,)), {"axis": 1}, kinds)
        yield Sample((("n", "m"), ("m",)), {"axis": -1}, ("int32", "float16"), tolerance=1e-3)
        yield Sample((("n", 7), ("n", 3), ("n", 3)), {"axis": 1, "block_size": 3}, ("uint8", "float32", "uint8"))


WORD_BITS = 32  # bits of a word


@register
class UnpackIntegers(Op):
    """Unpack signed 2- or 4-bit numbers from int32 words, along the first dimension.

    x[k, ...] = (words[k // c, ...] >> k % c * bits & (2**bits - 1)) - 2**(bits - 1), with c = 32 / bits numbers per
    word. `rows` is the first dimension of the result. Never constant-folded, so that weights stay packed in memory
    (passes/graph/quantized_weights.py).
    """

    name = "unpack_integers"
    operands = ("words",)
    attrs: ClassVar[Mapping[str, Attr]] = {
        "rows": Attr("int"),
        "bits": Attr("int", choices=(2, 4)),
        "dtype": Attr("dtype", "int8", ("int8", "int16")),
    }

    def infer(self, words: Expr, *, rows: int, bits: int, dtype: str) -> Type:
        ty = self.tensor(words, "words")
        shape, count = ty.shape or (), WORD_BITS // bits
        if ty.dtype != "int32" or not shape:
            self.fail(f"words must be int32 with at least one dimension, got {ty}")
        if rows < 0 or PROVER.can_prove_ne(shape[0], ceildiv(sym(rows), count)):
            self.fail(f"{rows} rows of {bits} bits take {-(-rows // count)} rows of words, got {format_shape(shape)}")
        return TensorType.of((rows, *shape[1:]), dtype)

    def lower(self, words: Buffer, *, out: Buffer, rows: int, bits: int, dtype: str) -> Stmt:
        count = WORD_BITS // bits

        def value(k: SymVar, *i: SymVar) -> Value:
            field = Scalar(Load(words, (k // count, *i))).binary("shift_right", k % count * bits) & ((1 << bits) - 1)
            return (field - (1 << bits - 1)).cast(dtype).value

        checks = equality_checks(f"{self.name}: rows of words", (words.shape[0], ceildiv(sym(rows), count)))
        return seq(*checks, compute(out, value))

    def reference(self, words: Any, *, rows: int, bits: int, dtype: str) -> Any:
        shifts = np.arange(0, WORD_BITS, bits, dtype=np.uint32).reshape(1, -1, *(1,) * (words.ndim - 1))
        fields = np.expand_dims(words.view(np.uint32), 1) >> shifts & np.uint32((1 << bits) - 1)
        numbers = fields.astype(np.int16) - np.int16(1 << bits - 1)
        return numbers.reshape(len(words) * (WORD_BITS // bits), *words.shape[1:])[:rows].astype(dtype)

    def samples(self) -> Iterable[Sample]:
        yield Sample(((2, "n"),), {"rows": 13, "bits": 4}, ("int32",), {0: _words})
        yield Sample(((3, "n"),), {"rows": 24, "bits": 4, "dtype": "int16"}, ("int32",), {0: _words})
        yield Sample(((1,),), {"rows": 16, "bits": 2}, ("int32",), {0: _words})
        yield Sample(((0, "n"),), {"rows": 0, "bits": 4}, ("int32",), {0: _words})


def pack_integers(values: Array, bits: int) -> Array:
    """Pack signed numbers of `bits` bits to words for `unpack_integers`, padding the last words with zeros."""
    count, half = WORD_BITS // bits, 1 << bits - 1
    rows = -(-values.shape[0] // count)
    fields = np.full((rows * count, *values.shape[1:]), half, np.uint8)
    fields[: values.shape[0]] = values.astype(np.int16) + half
    fields = fields.reshape(rows, count, *values.shape[1:])
    words = np.zeros((rows, *values.shape[1:]), np.uint32)
    for k in range(count):
        words |= fields[:, k].astype(np.uint32) << np.uint32(bits * k)
    return words.view(np.int32)


def _words(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    return rng.integers(-(2**31), 2**31, shape).astype(np.int32)


@register
class DynamicQuantizeLinear(Op):
    """Quantize x to uint8 by its range: (quantized x, scale, zero_point), the range of x and 0 mapped to 0..255."""

    name = "dynamic_quantize_linear"
    operands = ("x",)

    def infer(self, x: Expr) -> Type:
        ty = self.tensor(x, "x")
        if ty.dtype != "float32":
            self.fail(f"x must be float32, got {ty.dtype}")
        y = TensorType(ty.shape, "uint8", ty.rank)
        return TupleType((y, TensorType.of((), "float32"), TensorType.of((), "uint8")))

    def lower(self, x: Buffer, *, out: tuple[Buffer, Buffer, Buffer]) -> Stmt:
        y, scale, zero = out
        low, high = (Buffer(name, (), "float32") for name in ("low", "high"))
        ends = ((low, "min"), (high, "max"))
        start, rows = literal(0.0, "float32"), x.shape[:-1]
        row_extrema = {end: Buffer(f"{end.name}s", rows, "float32") for end, _ in ends}  # reduced in parallel
        factor = (Scalar(high[()]) - Scalar(low[()])) / 255.0
        offset = (-Scalar(low[()]) / Scalar(scale[()])).minimum(255.0).maximum(0.0).unary("round")
        stages = seq(
            *(reduce(row_extrema[end], x.shape[-1:], combine, start, lambda *i: x[i]) for end, combine in ends),
            *(reduce(end, rows, combine, start, lambda *i, end=end: row_extrema[end][i]) for end, combine in ends),
            Store(scale, (), select(factor.equals(0.0), 1.0, factor).value),
            Store(zero, (), offset.cast("uint8").value),
            compute(y, lambda *i: _quantized(Scalar(x[i]), Scalar(scale[()]), Scalar(zero[()]), "uint8").value),
        )
        for buffer in (low, high, *row_extrema.values()):
            stages = Allocate(buffer, stages)
        return stages

    def reference(self, x: Any) -> Any:
        low, high = np.min(x, initial=0.0), np.max(x, initial=0.0)
        scale = np.float32((high - low) / np.float32(255))
        scale = np.float32(1) if scale == 0 else scale
        zero = np.rint(np.clip(-low / scale, 0, 255)).astype(np.uint8)
        return cast_array(np.rint(x / scale) + np.float32(zero), "uint8"), np.asarray(scale), np.asarray(zero)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 3),))
        yield Sample((("n",),), make={0: lambda shape, rng: np.zeros(shape)})
        yield Sample((("n", "m"),), make={0: lambda shape, rng: rng.uniform(1, 9, shape)})


_QUANTIZED_PAIR = ("x", "x_scale", "x_zero", "w", "w_scale", "w_zero", "y_scale", "y_zero")


def _requantize(bb: BlockBuilder, total: Expr, scales: tuple[Expr, Expr], y: tuple[Expr, Expr]) -> Expr:
    """Requantize an int32 sum of products; the scales broadcast to it."""
    factor = emit_op(bb, "multiply", *scales)
    wide = emit_op(bb, "multiply", emit_op(bb, "cast", total, dtype="float32"), factor)
    return get_op("quantize_linear")(wide, *y)


@register
class QlinearMatmul(Op):
    """Matrix product of quantized tensors with quantized result.

    x_scale and x_zero are scalars or one value per row of x, w_scale and w_zero scalars or one value per column of w.
    """

    name = "qlinear_matmul"
    operands = _QUANTIZED_PAIR

    def infer(self, x: Expr, xs: Expr, xz: Expr, w: Expr, ws: Expr, wz: Expr, ys: Expr, yz: Expr) -> Type:
        product = get_op("matmul_integer").infer(x, w, xz, wz)
        assert isinstance(product, TensorType)
        return TensorType(product.shape, self.tensor(yz, "y_zero").dtype, product.rank)

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr | None:
        x, x_scale, x_zero, w, w_scale, w_zero, *y = call.args
        total = emit_op(bb, "matmul_integer", x, w, x_zero, w_zero)
        rows = self.tensor(x_scale).shape or ()
        if len(rows) == 1 and as_int(rows[0]) != 1:
            x_scale = emit_reshape(bb, x_scale, (rows[0], 1))
        return _requantize(bb, total, (x_scale, w_scale), (y[0], y[1]))

    def reference(self, x: Any, xs: Any, xz: Any, w: Any, ws: Any, wz: Any, ys: Any, yz: Any) -> Any:
        total = get_op("matmul_integer").reference(x, w, xz, wz).astype(np.float32)
        rows = xs.reshape(-1, 1) if xs.ndim == 1 and xs.size != 1 else xs
        return get_op("quantize_linear").reference(total * (rows * ws), ys, yz, axis=1, block_size=0, dtype=None)

    def samples(self) -> Iterable[Sample]:
        kinds = ("uint8", "float32", "uint8", "int8", "float32", "int8", "float32", "uint8")
        make = dict.fromkeys((1, 4, 6), _small_scale)
        yield Sample((("m", "k"), (), (), ("k", "n"), (), (), (), ()), {}, kinds, make)
        yield Sample(((2, 3, "k"), (3,), (3,), ("k", "n"), ("n",), ("n",), (), ()), {}, kinds, make)


@register
class QlinearConv(Convolution):
    """Convolution of quantized tensors with quantized result, plus an int32 bias of scale x_scale * w_scale.

    w_scale and w_zero are scalars or one value per channel of the result.
    """

    name = "qlinear_conv"
    operands = (*_QUANTIZED_PAIR, "pads", "bias?")

    def infer(
        self, x: Expr, xs: Expr, xz: Expr, w: Expr, ws: Expr, wz: Expr, ys: Expr, yz: Expr, pads: Expr,
        bias: Expr | None = None, **window: Any,
    ) -> Type:  # fmt: skip
        if bias is not None and self.tensor(bias, "bias").dtype != "int32":
            self.fail(f"bias must be int32, got {bias.ty}")
        product = get_op("conv_integer").infer(x, w, pads, xz, wz, layout="first", **window)
        assert isinstance(product, TensorType)
        return TensorType(product.shape, self.tensor(yz, "y_zero").dtype, product.rank)

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr | None:
        x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, pads, *bias = call.args
        ones = (sym(1),) * (len(self.tensor(x).shape or ()) - 2)
        attrs: dict[str, Any] = dict(call.attrs)

        def per_channel(value: Expr) -> Expr:
            shape = self.tensor(value).shape or ()
            return value if _is_one(shape) else emit_reshape(bb, value, (*shape, *ones))

        total = emit_op(bb, "conv_integer", x, w, pads, x_zero, w_zero, **attrs)
        if bias:
            total = emit_op(bb, "add", total, per_channel(bias[0]))
        return _requantize(bb, total, (x_scale, per_channel(w_scale)), (y_scale, y_zero))

    def reference(
        self, x: Any, xs: Any, xz: Any, w: Any, ws: Any, wz: Any, ys: Any, yz: Any, pads: Any, bias: Any = None,
        **window: Any,
    ) -> Any:  # fmt: skip
        ones = (1,) * (x.ndim - 2)
        total = get_op("conv_integer").reference(x, w, pads, xz, wz, layout="first", **window)
        total = (total if bias is None else total + bias.reshape(-1, *ones)).astype(np.float32)
        scaled = total * (xs.reshape(()) * ws.reshape(-1, *ones))
        return get_op("quantize_linear").reference(scaled, ys, yz, axis=1, block_size=0, dtype=None)

    def samples(self) -> Iterable[Sample]:
        kinds = ("uint8", "float32", "uint8", "int8", "float32", "int8", "float32", "uint8", "shape", "int32")
        make = dict.fromkeys((1, 4, 6), _small_scale)
        tensors = (("n", 2, "h", "w"), (), (), (3, 2, 3, 3), (3,), (3,), (), (), (1, 1, 1, 1))
        yield Sample((*tensors, (3,)), {}, kinds, make)
        yield Sample((("n", 2, "h"), (), (), (4, 1, 1), (), (), (), (), (0, 0)), {"groups": 2}, kinds[:-1], make)
