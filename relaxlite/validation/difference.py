"""Two results compared: which element is furthest off, and by how much of what it may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.records import dataclass
from relaxlite.validation.oracle import Expected, distance
from relaxlite.validation.rounding import epsilon

RELATIVE = {"float16": 2.0, "bfloat16": 2.0, "float32": 16.0, "float64": 64.0}  # units in the last place
SPREAD = 8.0  # times what nudging moved an element: few runs do not find the most that rounding can do


@dataclass(frozen=True, slots=True)
class Difference:
    """What is wrong with one result. `amount` is inf for shapes, types, NaN against a number, and integers."""

    output: int
    amount: float
    text: str

    def __str__(self) -> str:
        return f"output {self.output}: {self.text}"


def compare(got: Sequence[Any], expected: Expected) -> Difference | None:
    """The first result that is off by more than rounding allows."""
    if len(got) != len(expected.values):
        return Difference(0, np.inf, f"{len(got)} results instead of {len(expected.values)}")
    for k, (result, want, spread) in enumerate(zip(got, expected.values, expected.spread, strict=True)):
        difference = _compare_one(k, np.asarray(result), want, spread)
        if difference is not None:
            return difference
    return None


def _compare_one(output: int, got: Any, want: Any, spread: Any) -> Difference | None:
    if got.shape != want.shape or got.dtype != want.dtype:
        return Difference(output, np.inf, f"{got.dtype}{list(got.shape)} instead of {want.dtype}{list(want.shape)}")
    off = distance(got, want)
    excess = np.where(np.isfinite(spread), off - tolerance(want, spread), -1.0)
    if not (excess > 0).any():
        return None
    place = np.unravel_index(int(np.argmax(excess)), want.shape)
    at = ", ".join(map(str, place))
    text = (
        f"{np.count_nonzero(excess > 0)} of {want.size} elements differ; the largest difference is at [{at}]: "
        f"{got[place]} instead of {want[place]}, where {tolerance(want, spread)[place]:.2g} is allowed"
    )
    return Difference(output, float(off[place]), text)


def tolerance(want: Any, spread: Any) -> Any:
    """How far an element may be off: some units in its last place, one in that of the largest element, and some times
    what nudging did to it."""
    dtype = dtypes.from_numpy(want.dtype)
    if dtype is None or not dtypes.is_float(dtype):
        return np.zeros(want.shape)
    wide = np.abs(np.asarray(want, np.float64))
    wide = np.where(np.isfinite(wide), wide, 0.0)
    relative = epsilon(dtype) * (RELATIVE[dtype] * wide + wide.max(initial=0.0))  # of one term of a sum that is left
    return relative + SPREAD * np.where(np.isfinite(spread), spread, 0.0) + smallest(dtype)


def smallest(dtype: str) -> float:
    """Below it numbers are subnormal, and processors may take them for 0."""
    return {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}[dtype]
