"""A module of a quantized Hugging Face folder: its tensors, and weights that are dequantized from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np

from relaxlite.config import compile_threads
from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.checkpoint import Weight
from relaxlite.frontend.llm.quantized import PackedRows, RowIndex
from relaxlite.records import dataclass

Array: TypeAlias = "np.ndarray[Any, Any]"

FLOATS = ("float16", "bfloat16", "float32")
_MAX_FLOAT16 = 65504.0  # of float16
_CHUNK_ELEMENTS = 1 << 17  # elements dequantized at once, which stay in the CPU's caches
_MIN_PEAK = 2.0**-10  # least absolute maximum of a matrix for float16: subnormals then lose at most 2**-25


@dataclass(frozen=True, slots=True)
class QuantizedModule:
    """A module whose weight was quantized.

    `parts`: its tensors by name ("qweight"). `settings`: `quantization_config` of config.json. `source`, `name` and
    `method` are for error messages.
    """

    source: str
    name: str
    method: str
    settings: Mapping[str, Any]
    parts: Mapping[str, Array]

    def part(self, name: str, kinds: tuple[str, ...], rank: int = 2) -> Array:
        """Return a tensor. Raises ImportModelError if it is missing, empty, or of another type or rank."""
        result = self.parts.get(name)
        if result is None:
            raise self.error(f"{name} is missing")
        if result.dtype.name not in kinds or result.ndim != rank or result.size == 0:
            raise self.error(f"{name} must be {' or '.join(kinds)} of rank {rank}, and not be empty")
        return result

    def integer(self, name: str) -> int | None:
        """Return a positive integer of the settings; None if it is missing or -1."""
        setting = self.settings.get(name)
        if setting is None or setting == -1:
            return None
        if not isinstance(setting, int) or isinstance(setting, bool) or setting < 1:
            raise self.error(f"{name} = {setting!r} must be a positive integer")
        return setting

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ImportModelError if a tensor has another shape."""
        if self.parts[name].shape != shape:
            raise self.error(f"{name} must have shape {shape}")

    def error(self, problem: str) -> ImportModelError:
        """Make an ImportModelError that names the module and its tensors."""
        parts = ", ".join(f"{name} {part.dtype.name}{part.shape}" for name, part in self.parts.items())
        return ImportModelError(
            f"{self.source}: {self.name}, quantized by {self.method}: {problem}; there are {parts}. If another version "
            "of the format means this, take the float checkpoint, or a GGUF file"
        )


def float_weight(shape: tuple[int, int], peak: float, nbytes: int, read: Callable[[Array], Array]) -> Weight:
    """Make a lazily dequantized weight of float16, or of float32 if the absolute maximum `peak` does not suit float16.

    `read` dequantizes rows of some numbers to float32. float16 keeps three bits more than bfloat16.
    """
    dtype = np.dtype(np.float16 if _MIN_PEAK <= peak < _MAX_FLOAT16 or peak == 0 else np.float32)
    step = max(1, _CHUNK_ELEMENTS // shape[1])

    def rounded(rows: RowIndex) -> Array:
        numbers = np.arange(shape[0])[rows]
        array = np.empty((len(numbers), shape[1]), dtype)

        def fill(at: int) -> None:
            array[at : at + step] = read(numbers[at : at + step])

        with ThreadPoolExecutor(compile_threads(), "relaxlite-dequantize") as pool:
            list(pool.map(fill, range(0, len(numbers), step)))
        return array

    return Weight(PackedRows.of(shape[0], nbytes, rounded), shape)


def max_magnitude(numbers: Array) -> float:
    """Return the absolute maximum; infinity if an element is not finite."""
    result = float(np.abs(numbers.astype(np.float32)).max(initial=0))
    return result if np.isfinite(result) else np.inf
