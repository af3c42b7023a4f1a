"""Comparison of two results: the element with the largest difference beyond its tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.records import dataclass
from relaxlite.validation.oracle import Expected, absolute_error
from relaxlite.validation.rounding import epsilon

RELATIVE_ULPS = {"float16": 2.0, "bfloat16": 2.0, "float32": 16.0, "float64": 64.0}  # units in the last place
ERROR_FACTOR = 8.0  # times the measured rounding error: few runs miss the largest one


@dataclass(frozen=True, slots=True)
class Difference:
    """Mismatch of one output. `amount` is inf for shapes, types, NaN against a number, and integers."""

    output: int
    amount: float
    text: str

    def __str__(self) -> str:
        return f"output {self.output}: {self.text}"


def compare(got: Sequence[Any], expected: Expected) -> Difference | None:
    """Find the first output that differs by more than rounding allows; None if all match."""
    if len(got) != len(expected.values):
        return Difference(0, np.inf, f"{len(got)} results instead of {len(expected.values)}")
    for k, (result, want, error) in enumerate(zip(got, expected.values, expected.rounding_error, strict=True)):
        difference = _compare_one(k, np.asarray(result), want, error)
        if difference is not None:
            return difference
    return None


def _compare_one(output: int, got: Any, want: Any, error: Any) -> Difference | None:
    if got.shape != want.shape or got.dtype != want.dtype:
        return Difference(output, np.inf, f"{got.dtype}{list(got.shape)} instead of {want.dtype}{list(want.shape)}")
    differences = absolute_error(got, want)
    excess = np.where(np.isfinite(error), differences - tolerance(want, error), -1.0)
    if not (excess > 0).any():
        return None
    place = np.unravel_index(int(np.argmax(excess)), want.shape)
    index_text = ", ".join(map(str, place))
    text = (
        f"{np.count_nonzero(excess > 0)} of {want.size} elements differ; the largest difference is at [{index_text}]: "
        f"{got[place]} instead of {want[place]}, where {tolerance(want, error)[place]:.2g} is allowed"
    )
    return Difference(output, float(differences[place]), text)


def tolerance(want: Any, error: Any) -> Any:
    """Absolute tolerance of each element.

    It is the sum of some units in its last place, one unit of the largest element, and a multiple of the measured
    rounding error.
    """
    dtype = dtypes.from_numpy(want.dtype)
    if dtype is None or not dtypes.is_float(dtype):
        return np.zeros(want.shape)
    wide = np.abs(np.asarray(want, np.float64))
    wide = np.where(np.isfinite(wide), wide, 0.0)
    relative = epsilon(dtype) * (RELATIVE_ULPS[dtype] * wide + wide.max(initial=0.0))  # max: for cancellation
    return relative + ERROR_FACTOR * np.where(np.isfinite(error), error, 0.0) + smallest_normal(dtype)


def smallest_normal(dtype: str) -> float:
    """Smallest normal number of a dtype; processors may flush subnormal numbers to 0."""
    return {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}[dtype]
