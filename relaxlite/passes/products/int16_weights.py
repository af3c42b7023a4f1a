"""The weights of products of words (int16_products.py): which are fit for it, and what becomes of them."""

from __future__ import annotations

import math

import numpy as np

from relaxlite.ir.expr import Constant
from relaxlite.passes.products.winograd_weights import TERMS, lengths_of, problem_of, whole_steps

MAX_X, MAX_W = 10922, 5461
"""The largest whole numbers of rows and columns. From 0 on, x + MAX_X and w + MAX_W, their sum is below 2**15: words
that lie two in an int32 are added without a carry, and stay signed words. Rows get more, as few of their elements
are large, which are all that the others are rounded by."""

LONGEST = 46000
"""Of a row's and a column's whole numbers, the length (2-norm) at most: the sum of their products is below 2**31 by
Cauchy and Schwarz, though partial sums may wrap. Rounding adds at most half a square root of the depth."""

MAX_DEPTH = 7280
"""Of a sum. Up to here rounding moves a row by at most 2**-8 of its length, as bfloat16 may each element: sqrt(depth)
halves of a step of 1/MAX_X of the largest element."""

_ERROR = 2.0**-8
_SMALLEST = 2.0**-100  # columns whose largest weight is smaller are taken for zeros


def int16_of(weights: Constant) -> tuple[Constant, ...] | str:
    """Weights float32 (..., k, n), the other dimensions ones and k even, as int32 (k / 2 in whole steps, n) of two
    words each, those of rows t and t + k / 2; what is taken off the sums of a column (n); and what a column's whole
    numbers are multiplied by (n). Or why these weights are none for this."""
    w: np.ndarray = weights.value.reshape(weights.value.shape[-2:])
    step = steps_of(w)
    if isinstance(step, str):
        return step
    depth, columns = w.shape
    is_zero = step == 0
    width = step.astype(np.float32)
    scaled = w * (1 / np.where(is_zero, np.float32(1), width))  # in float32, as programs do that make words themselves
    scaled[:, is_zero] = 0
    numbers = np.rint(scaled, out=scaled).astype(np.int32)
    numbers += MAX_W
    low, high = numbers[: depth // 2], numbers[depth // 2 :]
    room = np.zeros((whole_steps(depth // 2), columns), np.int32)
    np.bitwise_or(low, high << 16, out=room[: depth // 2])
    taken = MAX_X * numbers.sum(axis=0, dtype=np.int64) - depth * MAX_X * MAX_W
    for part in (low, high):
        for first in (0, TERMS // 2):
            second = part[first + 1 :: TERMS]
            taken += np.einsum("kj,kj->j", part[first::TERMS][: len(second)], second, dtype=np.int64)
    offset = taken.astype(np.uint32).view(np.int32)  # sums wrap, too
    return (Constant.of(room, name=weights.name), Constant.of(offset), Constant.of(width))


def steps_of(w: np.ndarray) -> np.ndarray | str:
    """What each column's whole numbers are multiples of, float64[n], 0 for a column of zeros; or why a matrix of
    weights is not to be rounded to words."""
    length = lengths_of(w)
    if (problem := problem_of(w, length)) is not None:
        return problem
    peak = np.abs(w).max(axis=0)
    step = np.where(peak < _SMALLEST, 0, np.maximum(peak / MAX_W, length / LONGEST))
    if (math.sqrt(len(w)) * step / 2 > _ERROR * length).any():
        return "has a column that would lose more than in bfloat16"
    return step
