"""The weights of inner products (winograd_products.py): which are fit for it, and what becomes of them."""

from __future__ import annotations

import math

import numpy as np

from relaxlite.ir.expr import Constant

TERMS = 6  # of a step: a pair and one more, twice
MIN_DENSITY = 0.25  # |w|_1 / (sqrt(depth) * |w|_2) of most columns: 0.8 for normal distributions, 1 at most
MIN_NONZERO = 0.125  # of the weights of any column that is not zero
_SMALL_SQUARES = 2.0**-80  # below which squares may have left float32's range
_SHORTEST_COLUMN = 2.0**-120  # shorter ones are as if they were so long, for powers to be float32 and exact


def whole_steps(depth: int) -> int:
    """The least number of terms from `depth` on that steps consist of."""
    return -(-depth // TERMS) * TERMS


def balanced(weights: Constant) -> tuple[Constant, ...] | str:
    """Weights float32 (..., k, n), the other dimensions ones, as (k in whole steps, n), each column times the power of
    two that makes its length near 1; what pairs of a column add to a sum (n); and what undoes the powers (n),
    which is 0 for a column of zeros. Or why these weights are none for this."""
    w: np.ndarray = weights.value.reshape(weights.value.shape[-2:])
    length, room = lengths_of(w), np.empty((whole_steps(len(w)), w.shape[1]), np.float32)
    scaled = room[: len(w)]
    if (problem := problem_of(w, length, scaled)) is not None:
        return problem
    power = np.exp2(-np.round(np.log2(np.maximum(length, _SHORTEST_COLUMN)))).astype(np.float32)
    np.multiply(w, power, out=scaled)
    room[len(w) :] = 0
    pairs = [np.einsum("kj,kj->j", room[k::TERMS], room[k + 1 :: TERMS], dtype=np.float64) for k in (0, TERMS // 2)]
    offset = pairs[0] - pairs[1]
    beside = (Constant.of(each.astype(np.float32)) for each in (offset, (length > 0) / power))
    return (Constant.of(room, name=weights.name), *beside)


def problem_of(w: np.ndarray, length: np.ndarray, scratch: np.ndarray | None = None) -> str | None:
    """Why a matrix is not to be multiplied with errors relative to the lengths of its columns; None: it may be."""
    if not np.isfinite(length).all():
        return "has weights that are no finite numbers, or too large"
    used = length > 0
    if not used.any():
        return None
    sizes = np.abs(w, out=scratch)
    if sizes.min() == 0 and (least := np.count_nonzero(w, axis=0)[used].min() / len(w)) < MIN_NONZERO:
        return f"has a column of which {least:.1%} are not zero"
    density = np.median(np.einsum("kj->j", sizes)[used] / (length[used] * math.sqrt(len(w))))
    if density < MIN_DENSITY:
        return f"has few large weights in most columns: |w|_1 / (sqrt(n) * |w|_2) is {density:.2f}"
    return None


def lengths_of(w: np.ndarray) -> np.ndarray:
    """Of columns: float64[n]. Not finite where squares exceed float32's range."""
    squares = np.einsum("kj,kj->j", w, w).astype(np.float64)
    (small,) = np.nonzero(squares < _SMALL_SQUARES)
    squares[small] = (w[:, small].astype(np.float64) ** 2).sum(axis=0)
    lengths: np.ndarray = np.sqrt(squares)
    return lengths
