"""Converters of Fourier transforms, windows and mel filters."""

from __future__ import annotations

import functools
import math

import numpy as np

from relaxlite import dtypes
from relaxlite.frontend.onnx.convert_shapes import normalize_axis
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.frontend.onnx.runtime_values import by_axes
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.symbolic import SymExpr, as_int, smax

_WINDOWS = {
    "HannWindow": (0.5, 0.5, 0.0),
    "HammingWindow": (25 / 46, 21 / 46, 0.0),
    "BlackmanWindow": (0.42, 0.5, 0.08),
}


def _window(coefficients: tuple[float, ...], n: Node) -> Result:
    dtype, periodic = n.element_type("output_datatype", "float32"), n.flag("periodic", True)
    wide = dtype if dtypes.is_float(dtype) else "float64"
    window = ops.cosine_window(n.shape_values(0, lower=0)[:1], coefficients=coefficients, periodic=periodic, dtype=wide)
    return window if wide == dtype else ops.cast(n.emit(window), dtype=dtype)


for _name, _coefficients in _WINDOWS.items():
    onnx_op(_name, since=17)(functools.partial(_window, _coefficients))


@onnx_op("DFT", since=17)
def dft_17(n: Node) -> Result:
    return _dft(n, n.int("axis", 1))


@onnx_op("DFT", since=20)
def dft(n: Node) -> Result:
    if n.optional(2) is None:
        return _dft(n, -2)
    is_real_inverse = n.flag("inverse") and n.flag("onesided") and n.optional(1) is None
    # One bin alone says nothing of the length of a real signal, 2 * (bins - 1) by default.
    possible = [k for k, d in enumerate(n.shape()[:-1]) if not (is_real_inverse and as_int(d) == 1)]
    return by_axes(n, 2, n.rank(), lambda axes: n.emit(_dft(n, axes[0])), possible=possible)


def _dft(n: Node, axis: int) -> Expr:
    inverse, onesided = n.flag("inverse"), n.flag("onesided")
    axis = normalize_axis(n, axis, n.rank())
    size = n.shape()[axis]
    is_real_inverse = inverse and onesided
    length = n.shape_values(1, lower=0)[0] if n.optional(1) is not None else (size - 1) * 2 if is_real_inverse else size
    if is_real_inverse:
        return _real_inverse(n, axis, length)
    return ops.dft(n.input(0), (length,), axis=axis, inverse=inverse, onesided=onesided)


def _real_inverse(n: Node, axis: int, length: SymExpr) -> Expr:
    """Emit the real signal of a one-sided spectrum, completed by X[length - k] = conj(X[k])."""
    last, dims = n.rank() - 1, n.shape()
    bins = length // 2 + 1
    missing = tuple(bins - dims[axis] if k == axis else dims[k] * 0 for k in range(n.rank()))
    half = n.emit(ops.pad(n.input(0), (0,) * n.rank(), missing, None))
    count = length - bins
    mirrored = n.emit(ops.slice(half, (count,), (count,), axes=(axis,), steps=(-1,)))
    conjugate = n.emit(ops.multiply(mirrored, Constant.of([1.0, -1.0], n.dtype())))
    full = n.emit(ops.concat(half, conjugate, axis=axis))
    signal = n.emit(ops.dft(full, (length,), axis=axis, inverse=True, onesided=False))
    return ops.slice(signal, (0,), (1,), axes=(last,))


@onnx_op("STFT", since=17)
def stft(n: Node) -> Result:
    """STFT; inputs: signal, step, optional window, frame length (by default the window's).

    A signal of rank 2 is real. A last dimension of unknown size is assumed to be 1, a real signal; checked at run time.
    """
    window: Expr | None = n.optional(2)
    if window is None:
        length = n.shape_values(3, lower=0)[0]
        window = n.emit(ops.full((length,), Constant.of(1, n.dtype())))
    signal, dims = n.input(0), n.shape()
    if len(dims) == 2:  # as PyTorch exports it
        signal = n.emit(ops.expand_dims(signal, axes=(2,)))
    elif len(dims) == 3 and as_int(dims[2]) is None:
        signal = n.bb.match_shape(n.bb.leaf(signal), (*dims[:2], 1))
    onesided, known = n.flag("onesided", True), n.const(1)
    if known is None:
        return _stft_runtime_step(n, signal, window, onesided)
    return ops.stft(signal, window, step=int(known.reshape(-1)[0]), onesided=onesided)


def _stft_runtime_step(n: Node, signal: Expr, window: Expr, onesided: bool) -> Expr:
    """Emit transforms of frames (batch, frames, length, 1 or 2) that begin every so many elements."""
    (length,), (step,) = n.shape_of(window), n.shape_values(1, lower=1)
    count = smax((n.shape_of(signal)[1] - length) // step + 1, 0)
    zero, one = Constant.of(0, "int64"), Constant.of(1, "int64")
    stride = n.emit(ops.reshape(n.emit(ops.cast(n.input(1), dtype="int64")), ()))
    begins = n.emit(ops.expand_dims(n.emit(ops.arange(zero, stride, (count,))), axes=(1,)))
    places = n.emit(ops.add(begins, n.emit(ops.arange(zero, one, (length,)))))
    frames = n.emit(ops.gather(signal, places, axis=1))
    weighted = n.emit(ops.multiply(frames, n.emit(ops.expand_dims(window, axes=(1,)))))
    return ops.dft(weighted, (length,), axis=2, inverse=False, onesided=onesided)


@onnx_op("MelWeightMatrix", since=17)
def mel_weight_matrix(n: Node) -> Result:
    """MelWeightMatrix: triangular filters in the mel scale, (bins of a one-sided spectrum, mel bins)."""
    known = [n.const(k) for k in range(5)]
    if any(v is None for v in known):
        return ops.cast(_runtime_mel_filters(n), dtype=n.element_type("output_datatype", "float32"))
    count, length, rate, low, high = (float(v.reshape(-1)[0]) for v in known if v is not None)
    dtype = n.element_type("output_datatype", "float32")
    return Constant.of(_mel_filters(int(count), int(length), rate, low, high), dtype)


def _mel_filters(count: int, length: int, rate: float, low: float, high: float) -> np.ndarray:
    spectrum = length // 2 + 1
    low_mel, high_mel = (2595 * math.log10(1 + hertz / 700) for hertz in (low, high))
    mels = np.arange(count + 2) * ((high_mel - low_mel) / (count + 2)) + low_mel
    edges = ((length + 1) * (700 * (10 ** (mels / 2595) - 1)) // rate).astype(int)
    filters = np.zeros((spectrum, count), np.float64)
    for k in range(count):
        begin, centre, end = edges[k : k + 3]
        if begin == centre:
            filters[centre, k] = 1
        else:
            filters[begin : centre + 1, k] = np.arange(centre + 1 - begin) / (centre - begin)
        if centre != end:
            filters[centre:end, k] = np.arange(end - centre, 0, -1) / (end - centre)
    return filters


def _runtime_mel_filters(n: Node) -> Expr:
    """Emit the filters, float64, from inputs that are known at run time only."""
    count, length = n.shape_values(0, lower=0)[0], n.shape_values(1, lower=0)[0]
    rate, low, high = (n.emit(ops.reshape(n.emit(ops.cast(n.input(k), dtype="float64")), ())) for k in (2, 3, 4))
    edges = _mel_edges(n, count, length, rate, (low, high))
    begin, centre, end = (n.emit(ops.slice(edges, (k,), (count,), axes=(0,))) for k in range(3))  # (mel bins,)
    at = n.emit(ops.expand_dims(_counted(n, length // 2 + 1), axes=(1,)))  # (bins, 1)
    zero, one = (Constant.of(value, "float64") for value in (0.0, 1.0))
    is_peak = n.emit(ops.equal(at, centre))
    up = _ratio(n, n.emit(ops.subtract(at, begin)), n.emit(ops.subtract(centre, begin)))
    is_up = n.emit(ops.logical_and(n.emit(ops.less_equal(begin, at)), n.emit(ops.less_equal(at, centre))))
    down = _ratio(n, n.emit(ops.subtract(end, at)), n.emit(ops.subtract(end, centre)))
    is_down = n.emit(ops.logical_and(n.emit(ops.less(centre, at)), n.emit(ops.less(at, end))))
    sides = n.emit(ops.where(is_up, up, n.emit(ops.where(is_down, down, zero))))
    return n.emit(ops.where(is_peak, one, sides))


def _ratio(n: Node, a: Expr, b: Expr) -> Expr:
    return n.emit(ops.divide(a, n.emit(ops.maximum(b, Constant.of(1.0, "float64")))))


def _counted(n: Node, count: SymExpr) -> Expr:
    numbers = n.emit(ops.arange(Constant.of(0, "int64"), Constant.of(1, "int64"), (count,)))
    return n.emit(ops.cast(numbers, dtype="float64"))


def _mel_edges(n: Node, count: SymExpr, length: SymExpr, rate: Expr, hertz: tuple[Expr, Expr]) -> Expr:
    """Emit the bins, float64 (count + 2,), between which frequencies lie at equal distances in the mel scale."""

    def scalar(value: SymExpr) -> Expr:
        number = n.emit(ops.reshape(n.emit(ops.shape_to_tensor((value,))), ()))
        return n.emit(ops.cast(number, dtype="float64"))

    def number(value: float) -> Expr:
        return Constant.of(value, "float64")

    def mel(x: Expr) -> Expr:
        ratio = n.emit(ops.add(n.emit(ops.divide(x, number(700.0))), number(1.0)))
        return n.emit(ops.multiply(n.emit(ops.log(ratio)), number(scale)))

    scale = 2595 / math.log(10)
    low, high = map(mel, hertz)
    step = n.emit(ops.divide(n.emit(ops.subtract(high, low)), scalar(count + 2)))
    mels = n.emit(ops.add(n.emit(ops.multiply(_counted(n, count + 2), step)), low))
    powers = n.emit(ops.exp(n.emit(ops.divide(mels, number(scale)))))
    hertz_of_edges = n.emit(ops.multiply(n.emit(ops.subtract(powers, number(1.0))), number(700.0)))
    return n.emit(ops.floor(n.emit(ops.divide(n.emit(ops.multiply(hertz_of_edges, scalar(length + 1))), rate))))
