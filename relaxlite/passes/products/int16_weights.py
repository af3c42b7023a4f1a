"""Checks and quantization of weights for products by int16 pairs (int16_products.py)."""

from __future__ import annotations

import math

import numpy as np

from relaxlite.ir.expr import Constant
from relaxlite.passes.products.winograd_weights import TERMS, lengths_of, problem_of, whole_steps

MAX_X, MAX_W = 10922, 5461
"""The largest integers of rows and columns. The sum of the offset integers, x + MAX_X and w + MAX_W, is below 2**15:
two int16 in an int32 are added without a carry, and stay signed int16. Rows get more, as few of their elements are
large, and the largest determines the rounding of the others."""

LONGEST = 46000
"""Maximum length (2-norm) of the integers of a row or column: the sum of their products is below 2**31 by Cauchy and
Schwarz, though partial sums may wrap. Rounding adds at most half a square root of the depth."""

MAX_DEPTH = 7280
"""Maximum terms of a sum. Up to here the error of a row is at most 2**-8 of its length, as in bfloat16: sqrt(depth)
halves of a step of 1/MAX_X of the largest element."""

_ERROR = 2.0**-8
_SMALLEST = 2.0**-100  # columns whose largest weight is smaller are treated as zeros


def int16_of(weights: Constant) -> tuple[Constant, ...] | str:
    """Quantize weights, float32 (..., k, n), the other dimensions ones and k even, to int16 pairs.

    Returns int32 (k / 2 rounded up to whole steps, n) of the int16 of rows t and t + k / 2; the corrections to subtract
    from the sums of columns, int32 (n); and the scales of columns, float32 (n). Or returns the reason against.
    """
    w: np.ndarray = weights.value.reshape(weights.value.shape[-2:])
    step = steps_of(w)
    if isinstance(step, str):
        return step
    depth, columns = w.shape
    is_zero = step == 0
    width = step.astype(np.float32)
    scaled = w * (1 / np.where(is_zero, np.float32(1), width))  # in float32, as programs do that quantize kept weights
    scaled[:, is_zero] = 0
    integers = np.rint(scaled, out=scaled).astype(np.int32)
    integers += MAX_W
    low, high = integers[: depth // 2], integers[depth // 2 :]
    padded = np.zeros((whole_steps(depth // 2), columns), np.int32)
    np.bitwise_or(low, high << 16, out=padded[: depth // 2])
    correction = MAX_X * integers.sum(axis=0, dtype=np.int64) - depth * MAX_X * MAX_W
    for part in (low, high):
        for first in (0, TERMS // 2):
            second = part[first + 1 :: TERMS]
            correction += np.einsum("kj,kj->j", part[first::TERMS][: len(second)], second, dtype=np.int64)
    offset = correction.astype(np.uint32).view(np.int32)  # sums wrap, too
    return (Constant.of(padded, name=weights.name), Constant.of(offset), Constant.of(width))


def steps_of(w: np.ndarray) -> np.ndarray | str:
    """Return the quantization step of each column, float64[n], 0 for a column of zeros; or the reason against."""
    length = lengths_of(w)
    if (problem := problem_of(w, length)) is not None:
        return problem
    peak = np.abs(w).max(axis=0)
    step = np.where(peak < _SMALLEST, 0, np.maximum(peak / MAX_W, length / LONGEST))
    if (math.sqrt(len(w)) * step / 2 > _ERROR * length).any():
        return "has a column that would lose more than in bfloat16"
    return step
