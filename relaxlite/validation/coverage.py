"""Coverage of a validation: how many elements were compared, and how tightly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.records import dataclass
from relaxlite.validation.difference import tolerance
from relaxlite.validation.oracle import Expected, FailedRun

MAX_UNDETERMINED = 0.5  # share of elements above which the validation says little


@dataclass(frozen=True, slots=True)
class Coverage:
    """Result of validating function `entry`.

    `stopped`: samples that stop the module; only the error was compared. `unstable`: samples that stop, or change
    shapes, under other roundings. Of the `elements` of the remaining samples, `undetermined` may have any value, for
    the same reason. `not_finite` of the compared elements are NaN or infinite, and so match any other such value.
    `median`: median tolerance of floating elements, relative to the largest element of their result; None without any.
    """

    entry: str
    samples: int
    stopped: int
    unstable: int
    elements: int
    undetermined: int
    not_finite: int
    median: float | None

    @property
    def share_undetermined(self) -> float:
        """Share of all elements that are not compared."""
        return self.undetermined / max(self.elements, 1)

    @property
    def share_not_finite(self) -> float:
        """Share of the compared elements that are NaN or infinite."""
        return self.not_finite / max(self.elements - self.undetermined, 1)

    def __str__(self) -> str:
        parts = [f"{self.entry} at {self.samples} samples: {self.elements - self.undetermined:,} elements compared"]
        if self.median is not None:
            parts.append(f"half of them within {self.median:.1g} of the largest")
        if self.not_finite:
            parts.append(f"{self.not_finite:,} ({self.share_not_finite:.1%}) of what was compared is NaN or infinite")
        if self.undetermined:
            parts.append(f"{self.undetermined:,} others ({self.share_undetermined:.1%}) are what rounding decides")
        if self.stopped:
            parts.append(f"samples that stop the model, as they should: {self.stopped}")
        if self.unstable:
            parts.append(f"samples of which rounding changes shapes: {self.unstable}")
        return ", ".join(parts)


def coverage_of(entry: str, outcomes: Sequence[tuple[tuple[Any, ...] | FailedRun, Expected | FailedRun]]) -> Coverage:
    """Compute the coverage of samples from the results of the module and the expected results."""
    expected = [outcome for _, outcome in outcomes if isinstance(outcome, Expected)]
    stopped = sum(isinstance(result, FailedRun) for result, _ in outcomes)
    pairs = [pair for outcome in expected for pair in zip(outcome.values, outcome.rounding_error, strict=True)]
    allowed = np.concatenate([_relative(value, error) for value, error in pairs] or [np.zeros(0)])
    return Coverage(
        entry=entry,
        samples=len(outcomes),
        stopped=stopped,
        unstable=len(outcomes) - len(expected) - stopped,
        elements=sum(error.size for _, error in pairs),
        undetermined=sum(int(np.count_nonzero(~np.isfinite(error))) for _, error in pairs),
        not_finite=sum(_count_not_finite(value, error) for value, error in pairs),
        median=float(np.median(allowed)) if allowed.size else None,
    )


def _count_not_finite(value: Any, error: Any) -> int:
    if not dtypes.is_float(str(dtypes.from_numpy(value.dtype))):
        return 0
    return int(np.count_nonzero(~np.isfinite(np.asarray(value, np.float64)) & np.isfinite(error)))


def _relative(value: Any, error: Any) -> Any:
    """Tolerances of determined floating elements, relative to the largest element."""
    if not dtypes.is_float(str(dtypes.from_numpy(value.dtype))):
        return np.zeros(0)
    magnitudes = np.abs(np.asarray(value, np.float64))
    largest = magnitudes[np.isfinite(magnitudes)].max(initial=0.0)
    allowed = tolerance(value, error)[np.isfinite(error) & np.isfinite(magnitudes)]
    return allowed / largest if largest > 0 else np.zeros(0)
