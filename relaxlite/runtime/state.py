"""State of a compiled model: arrays that each call reads and writes, such as a KV cache in a buffer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import numpy as np

from relaxlite.errors import InputError
from relaxlite.nesting import to_array, torch_of


class State(MutableMapping[str, np.ndarray]):
    """The state of one executable by name. Reading gives a copy, writing checks shape and dtype."""

    def __init__(self, names: Sequence[str], initial: Callable[[], Any]) -> None:
        """initial: gives the first contents."""
        self._names, self._initial = tuple(names), initial
        self.lock = threading.Lock()  # held during a call
        self.arrays: tuple[np.ndarray, ...] = ()
        self.reset()

    def reset(self) -> None:
        """Set everything to its first contents."""
        values = self._initial()
        arrays = (values,) if isinstance(values, np.ndarray) else values
        with self.lock:
            self.arrays = tuple(a if a.flags.carray else np.array(a, order="C") for a in arrays)

    def __getitem__(self, name: str) -> np.ndarray:
        with self.lock:
            return self.arrays[self._number(name)].copy()

    def __setitem__(self, name: str, value: Any) -> None:
        array = to_array(value) if torch_of([value]) is not None else np.asarray(value)
        target = self.arrays[self._number(name)]
        if array.shape != target.shape or array.dtype != target.dtype:
            raise InputError(
                f"state '{name}': expects {target.dtype.name}{list(target.shape)}, got {array.dtype.name}"
                f"{list(array.shape)}"
            )
        with self.lock:
            target[...] = array

    def __delitem__(self, name: str) -> None:
        raise TypeError("a model's state cannot be removed; state.reset() sets it to its first contents")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _number(self, name: str) -> int:
        if name not in self._names:
            raise KeyError(f"there is no state '{name}'; there is {', '.join(self._names)}")
        return self._names.index(name)

    def __repr__(self) -> str:
        return "\n".join(f"{n}: {a.dtype.name}{list(a.shape)}" for n, a in zip(self._names, self.arrays, strict=True))
