"""One module of a folder whose weight is several tensors, and the weights that such tensors make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np

from relaxlite.config import compile_threads
from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.checkpoint import Weight
from relaxlite.frontend.llm.quantized import PackedRows, Rows
from relaxlite.records import dataclass

Array: TypeAlias = "np.ndarray[Any, Any]"

FLOATS = ("float16", "bfloat16", "float32")
_MAX = 65504.0  # in float16
_AT_ONCE = 1 << 17  # numbers that are widened while caches hold them
_MIN = 2.0**-10  # the largest number of a matrix whose float16 are fine enough: what is lost is 2**-25


@dataclass(frozen=True, slots=True)
class Module:
    """`parts` are its tensors by name, "qweight" and the like, `settings` what config.json says of their format."""

    source: str
    name: str
    method: str
    settings: Mapping[str, Any]
    parts: Mapping[str, Array]

    def part(self, name: str, kinds: tuple[str, ...], rank: int = 2) -> Array:
        """ImportModelError: it is missing, empty, of another type or rank."""
        result = self.parts.get(name)
        if result is None:
            raise self.error(f"{name} is missing")
        if result.dtype.name not in kinds or result.ndim != rank or result.size == 0:
            raise self.error(f"{name} must be {' or '.join(kinds)} of rank {rank}, and not be empty")
        return result

    def integer(self, name: str) -> int | None:
        """A positive integer of the settings; None: they do not say."""
        setting = self.settings.get(name)
        if setting is None or setting == -1:
            return None
        if not isinstance(setting, int) or isinstance(setting, bool) or setting < 1:
            raise self.error(f"{name} = {setting!r} must be a positive integer")
        return setting

    def need(self, name: str, shape: tuple[int, ...]) -> None:
        """ImportModelError: a part has another shape."""
        if self.parts[name].shape != shape:
            raise self.error(f"{name} must have shape {shape}")

    def error(self, problem: str) -> ImportModelError:
        there = ", ".join(f"{name} {part.dtype.name}{part.shape}" for name, part in self.parts.items())
        return ImportModelError(
            f"{self.source}: {self.name}, quantized by {self.method}: {problem}; there are {there}. If another version "
            "of the format means this, take the float checkpoint, or a GGUF file"
        )


def in_floats(shape: tuple[int, int], peak: float, nbytes: int, read: Callable[[Array], Array]) -> Weight:
    """What `read` says in float32 of rows of some numbers, rounded to float16 where the largest of all, `peak`, fits
    well: that keeps three bits more than bfloat16."""
    dtype = np.dtype(np.float16 if _MIN <= peak < _MAX or peak == 0 else np.float32)
    step = max(1, _AT_ONCE // shape[1])

    def rounded(rows: Rows) -> Array:
        numbers = np.arange(shape[0])[rows]
        array = np.empty((len(numbers), shape[1]), dtype)

        def fill(at: int) -> None:
            array[at : at + step] = read(numbers[at : at + step])

        with ThreadPoolExecutor(compile_threads(), "relaxlite-dequantize") as pool:
            list(pool.map(fill, range(0, len(numbers), step)))
        return array

    return Weight(PackedRows.of(shape[0], nbytes, rounded), shape)


def peak_of(numbers: Array) -> float:
    """The largest magnitude; infinite where one is no number."""
    result = float(np.abs(numbers.astype(np.float32)).max(initial=0))
    return result if np.isfinite(result) else np.inf
