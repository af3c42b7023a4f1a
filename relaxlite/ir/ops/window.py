"""Signal processing: window functions, and Fourier transforms as matrix products with tables of sines and cosines.

The last dimension of a signal holds its real part (size 1) or its real and imaginary parts (size 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Expr
from relaxlite.ir.op import Attr, Op, Sample, get_op, register
from relaxlite.ir.ops.broadcast import PROVER, Shape
from relaxlite.ir.ops.linalg import emit_op, emit_reshape, to_accumulator_dtype
from relaxlite.ir.ops.reduce import normalize_axis
from relaxlite.ir.ops.scalars import index
from relaxlite.ir.program import Buffer, Stmt, Value, compute
from relaxlite.ir.symbolic import SymExpr, as_int, product, smax, sym
from relaxlite.ir.types import TensorType, Type


@register
class CosineWindow(Op):
    """Cosine window a0 - a1 cos(2 pi n / N) + a2 cos(4 pi n / N) for n < size; N = size if periodic, else size - 1.

    `coefficients` a0, a1, a2: (1/2, 1/2, 0) for Hann, (25/46, 21/46, 0) for Hamming, (0.42, 0.5, 0.08) for Blackman.
    """

    name = "cosine_window"
    operands = ("size",)
    attrs: ClassVar[Mapping[str, Attr]] = {
        "coefficients": Attr("floats"), "periodic": Attr("bool", True), "dtype": Attr("dtype", "float32"),
    }  # fmt: skip

    def infer(self, size: Expr, *, coefficients: tuple[float, ...], periodic: bool, dtype: str) -> Type:
        dims = self.shape(size, "size")
        if len(dims) != 1 or len(coefficients) != 3 or not dtypes.is_float(dtype):
            self.fail(f"needs one size, three coefficients and a float dtype, got {size.ty}, {coefficients}, {dtype}")
        return TensorType.of(dims, dtype)

    def lower(self, size: Shape, *, out: Buffer, coefficients: tuple[float, ...], periodic: bool, dtype: str) -> Stmt:
        a0, a1, a2 = coefficients
        period = index(smax(size[0] - (0 if periodic else 1), 1)).cast("float64")

        def value(i: SymExpr) -> Value:
            angle = index(i).cast("float64") * (2 * math.pi) / period
            result = a0 - a1 * angle.unary("cos")
            return (result + a2 * (angle * 2.0).unary("cos") if a2 else result).cast(dtype).value

        return compute(out, value)

    def reference(self, size: tuple[int, ...], *, coefficients: tuple[float, ...], periodic: bool, dtype: str) -> Any:
        a0, a1, a2 = coefficients
        angle = np.arange(size[0]) * (2 * math.pi) / max(size[0] - (0 if periodic else 1), 1)
        return (a0 - a1 * np.cos(angle) + a2 * np.cos(2 * angle)).astype(dtypes.to_numpy(dtype))

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n",),), {"coefficients": (0.5, 0.5, 0.0)}, ("shape",))
        yield Sample((("n",),), {"coefficients": (0.42, 0.5, 0.08), "periodic": False}, ("shape",))


@register
class DftMatrix(Op):
    """Matrix (length, parts, bins, 2) of the discrete Fourier transform; parts are real and imaginary.

    Elements are cos(-+ 2 pi n k / length + (p - q) pi / 2) for part p of the input and q of the result, divided by
    length if inverse. `sizes` = (length, bins). Angles are integers t in units of 1 / (4 length) turns, so that 0 and 1
    are exact: the cosine is sin((|t - 2 length| - length) / length * pi / 2).
    """

    name = "dft_matrix"
    operands = ("sizes",)
    attrs: ClassVar[Mapping[str, Attr]] = {
        "parts": Attr("int", 1, (1, 2)), "inverse": Attr("bool", False), "dtype": Attr("dtype", "float32"),
    }  # fmt: skip

    def infer(self, sizes: Expr, *, parts: int, inverse: bool, dtype: str) -> Type:
        dims = self.shape(sizes, "sizes")
        if len(dims) != 2 or not dtypes.is_float(dtype):
            self.fail(f"sizes must be the length and the number of bins and dtype a float, got {sizes.ty} and {dtype}")
        return TensorType.of((dims[0], parts, dims[1], 2), dtype)

    def lower(self, sizes: Shape, *, out: Buffer, parts: int, inverse: bool, dtype: str) -> Stmt:
        length = index(sizes[0]).cast("float64")

        def value(n: SymExpr, p: SymExpr, k: SymExpr, q: SymExpr) -> Value:
            angle = _angle(n * k % sizes[0], p - q, sizes[0], inverse)
            part = (index(angle - sizes[0] * 2).cast("float64").abs() - length) / length
            result = (part * (math.pi / 2)).unary("sin")
            return (result / length if inverse else result).cast(dtype).value

        return compute(out, value)

    def reference(self, sizes: tuple[int, ...], *, parts: int, inverse: bool, dtype: str) -> Any:
        length, bins = sizes
        n, p, k, q = np.ogrid[:length, :parts, :bins, :2]
        size = max(length, 1)
        angle = _angle(n * k % size, p - q, size, inverse)
        result = np.sin((np.abs(angle - 2 * size) - size) / size * (math.pi / 2))
        return (result / (size if inverse else 1)).astype(dtypes.to_numpy(dtype))

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", "n//2+1"),), {}, ("shape",))
        yield Sample((("n", "n"),), {"parts": 2, "inverse": True}, ("shape",))


def _angle(step: Any, shift: Any, length: Any, inverse: bool) -> Any:
    """Angle of -+ step / length + shift / 4 turns in units of 1 / (4 length) turns, modulo one turn."""
    return (step * (4 if inverse else -4) + shift * length) % (length * 4)


def _parts(op: Op, shape: Shape) -> int:
    """Size of the last dimension of a signal; fails unless it is 1 or 2."""
    parts = as_int(shape[-1]) if shape else None
    if parts not in (1, 2):
        op.fail(f"the last dimension of x must be 1 (real) or 2 (real, imaginary), got {shape[-1] if shape else '()'}")
    return int(parts or 1)


def _reference_dft(rows: Any, bins: int, inverse: bool) -> Any:
    """Compute the first bins (..., bins, 2) of the transform of rows (..., n, parts) in NumPy.

    Rows with infinities or NaNs use the defining sums, where 0 * inf is NaN; other rows use the FFT.
    """
    signal = rows[..., 0] + (1j * rows[..., 1] if rows.shape[-1] == 2 else 0)
    result = (np.fft.ifft if inverse else np.fft.fft)(signal, axis=-1)[..., :bins]
    parts = np.stack([result.real, result.imag], axis=-1)
    has_nonfinite = ~np.isfinite(rows).all(axis=(-2, -1))
    if has_nonfinite.any():
        sizes, dtype = (rows.shape[-2], bins), str(rows.dtype)
        table = get_op("dft_matrix").reference(sizes, parts=rows.shape[-1], inverse=inverse, dtype=dtype)
        parts[has_nonfinite] = np.einsum("rnp,npkq->rkq", rows[has_nonfinite], table)
    return parts


def _bins(length: SymExpr, onesided: bool) -> SymExpr:
    return length // 2 + 1 if onesided else length


@register
class Dft(Op):
    """Discrete Fourier transform of x (..., n, ..., parts) along an axis, over `length` points.

    x is truncated or zero-padded to that length. onesided, for the forward transform only, keeps the first length // 2
    + 1 bins.
    """

    name = "dft"
    operands = ("x", "length")
    attrs: ClassVar[Mapping[str, Attr]] = {
        "axis": Attr("int", -2), "inverse": Attr("bool", False), "onesided": Attr("bool", False),
    }  # fmt: skip

    def infer(self, x: Expr, length: Expr, *, axis: int, inverse: bool, onesided: bool) -> Type:
        ty, sizes = self.tensor(x, "x"), self.shape(length, "length")
        shape = list(ty.shape or ())
        _parts(self, tuple(shape))
        axis = normalize_axis(self, axis, len(shape))
        if axis == len(shape) - 1 or len(sizes) != 1 or not dtypes.is_float(ty.dtype) or (inverse and onesided):
            self.fail(f"needs a float x, one length, an axis before the last, and onesided only forward; got {ty}, "
                      f"{length.ty}, axis={axis}, inverse={inverse}, onesided={onesided}")  # fmt: skip
        shape[axis], shape[-1] = _bins(sizes[0], onesided), sym(2)
        return TensorType.of(tuple(shape), ty.dtype)

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr | None:
        ty, (length,) = self.tensor(call.args[0]), self.shape(call.args[1])
        shape, x = list(ty.shape or ()), call.args[0]
        rank, parts = len(shape), _parts(self, ty.shape or ())
        axis = normalize_axis(self, int(call.attrs["axis"]), rank)  # type: ignore[arg-type]
        if not PROVER.can_prove_equal(shape[axis], length):
            after = [length - shape[axis] if k == axis else sym(0) for k in range(rank)]
            x = emit_op(bb, "pad", x, (0,) * rank, tuple(after))
        order = [k for k in range(rank) if k not in (axis, rank - 1)] + [axis, rank - 1]
        x = emit_op(bb, "transpose", x, axes=order)
        outer, bins = [shape[k] for k in order[:-2]], _bins(length, bool(call.attrs["onesided"]))
        inverse = call.attrs["inverse"]
        table = emit_op(bb, "dft_matrix", (length, bins), parts=parts, inverse=inverse, dtype=ty.dtype)
        matrix = emit_reshape(bb, table, (length * parts, bins * 2))
        result = emit_op(bb, "matmul", emit_reshape(bb, x, (product(outer), length * parts)), matrix)
        result = emit_reshape(bb, result, (*outer, bins, 2))
        return get_op("transpose")(result, axes=[order.index(k) for k in range(rank)])

    def reference(self, x: Any, length: tuple[int, ...], *, axis: int, inverse: bool, onesided: bool) -> Any:
        along, (points,) = axis % x.ndim, length
        rows = np.moveaxis(to_accumulator_dtype(x), along, -2)[..., :points, :]
        rows = np.pad(rows, [(0, 0)] * (x.ndim - 2) + [(0, points - rows.shape[-2]), (0, 0)])
        result = _reference_dft(rows, points // 2 + 1 if onesided else points, inverse)
        return np.moveaxis(result, -2, along).astype(x.dtype)

    def samples(self) -> Iterable[Sample]:
        kinds = ("float32", "shape")
        yield Sample((("b", "n", 1), ("n",)), {"onesided": True}, kinds, tolerance=1e-4)
        yield Sample((("n", "b", 2), (6,)), {"axis": 0}, kinds, tolerance=1e-4)
        yield Sample(((2, "n", 2), ("n+1",)), {"axis": 1, "inverse": True}, kinds, tolerance=1e-4)


@register
class Stft(Op):
    """Short-time Fourier transform of x (b, n, parts): (b, frames, bins, 2), a frame every `step` points.

    Each frame is multiplied by `window`, whose size is the length of a frame.
    """

    name = "stft"
    operands = ("x", "window")
    attrs: ClassVar[Mapping[str, Attr]] = {"step": Attr("int"), "onesided": Attr("bool", True)}

    def infer(self, x: Expr, window: Expr, *, step: int, onesided: bool) -> Type:
        xt, wt = self.tensor(x, "x"), self.tensor(window, "window")
        if xt.rank != 3 or wt.rank != 1 or xt.dtype != wt.dtype or not dtypes.is_float(xt.dtype) or step < 1:
            self.fail(f"x must be (b, n, parts), window a vector of the same float dtype, got {xt}, {wt}, step={step}")
        (batch, size, _), (length,) = xt.shape or (), wt.shape or ()
        _parts(self, xt.shape or ())
        return TensorType.of((batch, (size - length) // step + 1, _bins(length, onesided), 2), xt.dtype)

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr | None:
        """Emit a strided convolution over time: its channels are the parts, its filters the windowed DFT matrix."""
        x, window = call.args
        xt, (length,) = self.tensor(x), self.tensor(window).shape or ()
        parts, bins = _parts(self, xt.shape or ()), _bins(length, bool(call.attrs["onesided"]))
        table = emit_op(bb, "dft_matrix", (length, bins), parts=parts, dtype=xt.dtype)
        rows = emit_op(bb, "transpose", table, axes=(2, 3, 1, 0))
        filters = emit_op(bb, "multiply", emit_reshape(bb, rows, (bins * 2, parts, length)), window)
        signal = emit_op(bb, "transpose", x, axes=(0, 2, 1))
        result = emit_op(bb, "conv", signal, filters, (0, 0), strides=(call.attrs["step"],))
        result = emit_op(bb, "transpose", result, axes=(0, 2, 1))
        return get_op("reshape")(result, (*(self.tensor(result).shape or ())[:2], bins, 2))

    def reference(self, x: Any, window: Any, *, step: int, onesided: bool) -> Any:
        length = len(window)
        frames = np.lib.stride_tricks.sliding_window_view(to_accumulator_dtype(x), length, axis=1)[
            :, ::step
        ]  # (b, f, p, n)
        rows = np.swapaxes(frames * to_accumulator_dtype(window), -1, -2)
        return _reference_dft(rows, length // 2 + 1 if onesided else length, False).astype(x.dtype)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("b", "n+4", 1), (4,)), {"step": 2}, tolerance=1e-4)
        yield Sample(((2, "n+3", 2), (3,)), {"step": 1, "onesided": False}, tolerance=1e-4)
