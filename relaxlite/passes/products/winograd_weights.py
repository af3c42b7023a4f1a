"""Checks and transformation of weights for Winograd's inner product (winograd_products.py)."""

from __future__ import annotations

import math

import numpy as np

from relaxlite.ir.expr import Constant

TERMS = 6  # of a step: twice a pair and a single term
MIN_DENSITY = 0.25  # |w|_1 / (sqrt(depth) * |w|_2) of most columns: 0.8 for normal distributions, 1 at most
MIN_NONZERO = 0.125  # of the weights of any column that is not zero
_SMALL_SQUARES = 2.0**-80  # below, squares may underflow in float32
_SHORTEST_COLUMN = 2.0**-120  # lower bound of lengths, for powers to be exact in float32


def whole_steps(depth: int) -> int:
    """Round `depth` up to a multiple of the terms of a step."""
    return -(-depth // TERMS) * TERMS


def balanced(weights: Constant) -> tuple[Constant, ...] | str:
    """Scale the columns of weights to unit length; weights are float32 (..., k, n), the other dimensions ones.

    Returns the weights (k rounded up to whole steps, n), each column times a power of two; the sums of products of
    pairs in each column (n); and the inverse powers (n), 0 for a column of zeros. Or returns the reason against.
    """
    w: np.ndarray = weights.value.reshape(weights.value.shape[-2:])
    length, padded = lengths_of(w), np.empty((whole_steps(len(w)), w.shape[1]), np.float32)
    scaled = padded[: len(w)]
    if (problem := problem_of(w, length, scaled)) is not None:
        return problem
    power = np.exp2(-np.round(np.log2(np.maximum(length, _SHORTEST_COLUMN)))).astype(np.float32)
    np.multiply(w, power, out=scaled)
    padded[len(w) :] = 0
    pairs = [np.einsum("kj,kj->j", padded[k::TERMS], padded[k + 1 :: TERMS], dtype=np.float64) for k in (0, TERMS // 2)]
    offset = pairs[0] - pairs[1]
    vectors = (Constant.of(vector.astype(np.float32)) for vector in (offset, (length > 0) / power))
    return (Constant.of(padded, name=weights.name), *vectors)


def problem_of(w: np.ndarray, length: np.ndarray, scratch: np.ndarray | None = None) -> str | None:
    """Return why errors relative to the lengths of columns are too large for a matrix; None: they are acceptable."""
    if not np.isfinite(length).all():
        return "has weights that are no finite numbers, or too large"
    is_nonzero = length > 0
    if not is_nonzero.any():
        return None
    sizes = np.abs(w, out=scratch)
    if sizes.min() == 0 and (min_nonzero := np.count_nonzero(w, axis=0)[is_nonzero].min() / len(w)) < MIN_NONZERO:
        return f"has a column of which {min_nonzero:.1%} are not zero"
    density = np.median(np.einsum("kj->j", sizes)[is_nonzero] / (length[is_nonzero] * math.sqrt(len(w))))
    if density < MIN_DENSITY:
        return f"has few large weights in most columns: |w|_1 / (sqrt(n) * |w|_2) is {density:.2f}"
    return None


def lengths_of(w: np.ndarray) -> np.ndarray:
    """Return the lengths (2-norms) of columns, float64[n]; not finite where squares overflow float32."""
    squares = np.einsum("kj,kj->j", w, w).astype(np.float64)
    (small,) = np.nonzero(squares < _SMALL_SQUARES)
    squares[small] = (w[:, small].astype(np.float64) ** 2).sum(axis=0)
    lengths: np.ndarray = np.sqrt(squares)
    return lengths
