"""Converters of Fourier transforms: products with tables of sines and cosines (ops/window.py)."""

from __future__ import annotations

from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.frontend.torch.complex_parts import part
from relaxlite.frontend.torch.node import Complex, Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.symbolic import SymExpr, product, sym

_BY_ROOT, _BY_COUNT = 1, 2  # torch's normalizations; 0 is none


def transform(n: Node, parts: Expr, axis: int, *, inverse: bool, onesided: bool = False) -> Expr:
    """Emit a transform of (..., parts) along an axis; an inverse one divides by the length."""
    length = n.shape_of(parts)[axis]
    return n.emit(ops.dft(parts, (length,), axis=axis, inverse=inverse, onesided=onesided))


def normalized(n: Node, parts: Expr, sizes: list[SymExpr], normalization: int, *, is_divided: bool) -> Expr:
    """Scale a transform as torch's number of a normalization says; is_divided: it is divided by the count already."""
    power = {0: 0.0, _BY_ROOT: -0.5, _BY_COUNT: -1.0}[normalization] + (1.0 if is_divided else 0.0)
    if power == 0.0:
        return parts
    dtype = n.dtype_of(parts)
    count = n.cast(n.operand(product(sizes), "float64"), "float64")
    factor = n.emit(ops.power(count, n.operand(power, "float64")))
    return n.emit(ops.multiply(parts, n.cast(factor, dtype)))


@torch_op("aten._fft_c2c", complex=True)
def c2c(n: Node, self: Complex, dim: list[int], normalization: int, forward: bool) -> Complex:
    parts, axes = self.parts, [n.axis(part(n, self, 0), d) for d in dim]
    sizes = [n.shape_of(parts)[a] for a in axes]
    for axis in axes:
        parts = transform(n, parts, axis, inverse=not forward)
    return Complex(normalized(n, parts, sizes, normalization, is_divided=not forward))


@torch_op("aten._fft_r2c")
def r2c(n: Node, self: Expr, dim: list[int], normalization: int, onesided: bool) -> Complex:
    """Transform of a real tensor; onesided: only the first half of the last dimension in `dim`."""
    axes = [n.axis(self, d) for d in dim]
    sizes = [n.shape_of(self)[a] for a in axes]
    parts: Expr = n.emit(ops.expand_dims(self, axes=(n.rank(self),)))
    parts = transform(n, parts, axes[-1], inverse=False, onesided=onesided)
    for axis in axes[:-1]:
        parts = transform(n, parts, axis, inverse=False)
    return Complex(normalized(n, parts, sizes, normalization, is_divided=False))


@torch_op("aten._fft_c2r", complex=True)
def c2r(n: Node, self: Complex, dim: list[int], normalization: int, last_dim_size: Any) -> Expr:
    """Inverse transform to a real tensor; the missing half of the last dimension in `dim` is the mirrored conjugate."""
    parts, length = self.parts, n.int(last_dim_size)
    axes = [n.axis(part(n, self, 0), d) for d in dim]
    sizes = [*(n.shape_of(parts)[a] for a in axes[:-1]), length]
    for axis in axes[:-1]:
        parts = transform(n, parts, axis, inverse=True)
    last, rank = axes[-1], n.rank(parts) - 1
    parts = n.emit(ops.slice(parts, (sym(0),), (length // 2 + 1,), axes=(last,)))
    count = (length - 1) // 2
    mirrored = n.emit(ops.slice(parts, (count,), (count,), axes=(last,), steps=(-1,)))
    signs = Constant.of(np.array([1, -1], dtypes.to_numpy(n.dtype_of(parts))).reshape((1,) * rank + (2,)))
    whole = n.emit(ops.concat(parts, n.emit(ops.multiply(mirrored, signs)), axis=last))
    whole = n.bb.match_shape(whole, tuple(length if k == last else d for k, d in enumerate(n.shape_of(whole))))
    result = part(n, Complex(transform(n, whole, last, inverse=True)), 0)
    return normalized(n, result, sizes, normalization, is_divided=True)


@torch_op("aten.stft")
def stft(
    n: Node, self: Any, n_fft: int, hop_length: int | None = None, win_length: int | None = None, window: Any = None,
    center: bool = False, pad_mode: str = "reflect", normalized: bool = False, onesided: bool | None = None,
    return_complex: bool | None = None, align_to_window: bool | None = None,
) -> Any:  # fmt: skip
    """Short-time transform: frames of n_fft points, times a window that is padded to that length on both sides."""
    if (center and n.overload == "center") or align_to_window:
        n.fail("stft with center=True or align_to_window=True inside the operator is not supported")
    x, dtype = self, n.dtype()
    is_batch = n.rank(x) == 2
    signal = n.emit(ops.expand_dims(x if is_batch else n.emit(ops.expand_dims(x, axes=(0,))), axes=(2,)))
    length = n_fft if win_length is None else win_length
    weights: Expr = n.full((length,), 1, dtype) if window is None else n.cast(window, dtype)
    before = (n_fft - length) // 2
    if length < n_fft:
        weights = n.emit(ops.pad(weights, (before,), (n_fft - length - before,)))
    step = hop_length or n_fft // 4
    frames: Expr = n.emit(ops.stft(signal, weights, step=step, onesided=True if onesided is None else onesided))
    frames = n.emit(ops.transpose(frames, axes=(0, 2, 1, 3)))
    if normalized:
        frames = n.emit(ops.multiply(frames, n.operand(n_fft**-0.5, dtype)))
    if not is_batch:
        frames = n.emit(ops.squeeze(frames, axes=(0,)))
    return Complex(frames) if n.is_complex() else frames
