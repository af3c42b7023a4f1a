"""One object for each key, which nobody but its users keeps alive."""

from __future__ import annotations

import threading
import weakref
from typing import Generic, TypeVar

T = TypeVar("T")


class _Reference(weakref.ref[T]):
    """A weak reference that knows its key."""

    __slots__ = ("key",)

    key: tuple[object, ...]


class Interned(Generic[T]):
    """A table of weak references. `references.get(key)` is for those who make objects by the ten thousand:
    weakref.WeakValueDictionary is Python behind Python, half of what making a symbolic expression took."""

    def __init__(self) -> None:
        self.references: dict[tuple[object, ...], _Reference[T]] = {}
        self._lock = threading.RLock()  # while it is held, an object may die, whose end changes the table too

    def keep(self, key: tuple[object, ...], made: T) -> T:
        """The one object of this key: `made`, unless another thread was faster."""
        reference = _Reference(made, self._forget)
        reference.key = key
        with self._lock:
            earlier = self.references.get(key)
            result = None if earlier is None else earlier()
            if result is None:
                self.references[key] = reference
                return made
        return result

    def _forget(self, reference: _Reference[T]) -> None:
        with self._lock:
            if self.references.get(reference.key) is reference:  # else there is a new one of the same form
                del self.references[reference.key]
