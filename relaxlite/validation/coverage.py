"""How much a validation says: how many elements it compared, and how closely."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.records import dataclass
from relaxlite.validation.difference import tolerance
from relaxlite.validation.oracle import Expected, Failed

MAX_UNDETERMINED = 0.5  # more of the elements, and little was compared


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the samples of function `entry` came to. `stopped`: samples that stop the module, which is all that was
    compared of them. `unstable`: samples that stop, or change shapes, if numbers are rounded otherwise.
    `undetermined` of the `elements` of the others may be anything, for the same reason; `not_finite` of those that are
    compared are NaN or infinite, in whose place whatever else is so would pass. `median`: half of the floating
    elements were held to so much of the largest in their result, or less; None without any."""

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
        return self.undetermined / max(self.elements, 1)

    @property
    def share_not_finite(self) -> float:
        """Of what is compared."""
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


def coverage_of(entry: str, outcomes: Sequence[tuple[tuple[Any, ...] | Failed, Expected | Failed]]) -> Coverage:
    """Of samples: what the module gives, and what is expected of other modules."""
    expected = [outcome for _, outcome in outcomes if isinstance(outcome, Expected)]
    stopped = sum(isinstance(given, Failed) for given, _ in outcomes)
    pairs = [pair for outcome in expected for pair in zip(outcome.values, outcome.spread, strict=True)]
    allowed = np.concatenate([_relative(value, spread) for value, spread in pairs] or [np.zeros(0)])
    return Coverage(
        entry=entry,
        samples=len(outcomes),
        stopped=stopped,
        unstable=len(outcomes) - len(expected) - stopped,
        elements=sum(spread.size for _, spread in pairs),
        undetermined=sum(int(np.count_nonzero(~np.isfinite(spread))) for _, spread in pairs),
        not_finite=sum(_count_not_finite(value, spread) for value, spread in pairs),
        median=float(np.median(allowed)) if allowed.size else None,
    )


def _count_not_finite(value: Any, spread: Any) -> int:
    if not dtypes.is_float(str(dtypes.from_numpy(value.dtype))):
        return 0
    return int(np.count_nonzero(~np.isfinite(np.asarray(value, np.float64)) & np.isfinite(spread)))


def _relative(value: Any, spread: Any) -> Any:
    """How far each determined element of floats may be off, as a share of the largest."""
    if not dtypes.is_float(str(dtypes.from_numpy(value.dtype))):
        return np.zeros(0)
    wide = np.abs(np.asarray(value, np.float64))
    largest = wide[np.isfinite(wide)].max(initial=0.0)
    allowed = tolerance(value, spread)[np.isfinite(spread) & np.isfinite(wide)]
    return allowed / largest if largest > 0 else np.zeros(0)
