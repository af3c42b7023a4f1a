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
from relaxlite.ir.symbolic import SymExpr, as_int

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
    (step,) = n.const_ints(1, "frame_step")
    window: Expr | None = n.optional(2)
    if window is None:
        length = n.shape_values(3, lower=0)[0]
        window = n.emit(ops.full((length,), Constant.of(1, n.dtype())))
    signal, dims = n.input(0), n.shape()
    if len(dims) == 2:  # as PyTorch exports it
        signal = n.emit(ops.expand_dims(signal, axes=(2,)))
    elif len(dims) == 3 and as_int(dims[2]) is None:
        signal = n.bb.match_shape(n.bb.leaf(signal), (*dims[:2], 1))
    return ops.stft(signal, window, step=step, onesided=n.flag("onesided", True))


@onnx_op("MelWeightMatrix", since=17)
def mel_weight_matrix(n: Node) -> Result:
    """MelWeightMatrix: triangular filters in the mel scale, (bins of a one-sided spectrum, mel bins)."""
    known = [n.const(k) for k in range(5)]
    if any(v is None for v in known):
        n.fail("the inputs of MelWeightMatrix must be known when the model is compiled")
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
