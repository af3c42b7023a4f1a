"""Intern tables: one live object per key, held by weak references."""

from __future__ import annotations

import threading
import weakref
from typing import Generic, TypeVar

T = TypeVar("T")


class _Reference(weakref.ref[T]):
    """Weak reference with the key of its object."""

    __slots__ = ("key",)

    key: tuple[object, ...]


class InternTable(Generic[T]):
    """Thread-safe table of weak references to interned objects.

    Hot paths read `references` directly; weakref.WeakValueDictionary is slower (docs/measurements/ircore.md).
    """

    def __init__(self) -> None:
        self.references: dict[tuple[object, ...], _Reference[T]] = {}
        self._lock = (
            threading.RLock()
        )  # reentrant: an object may die under the lock, and its callback changes the table

    def intern(self, key: tuple[object, ...], candidate: T) -> T:
        """Intern `candidate` under `key`. Returns the object of another thread if that was interned first."""
        reference = _Reference(candidate, self._forget)
        reference.key = key
        with self._lock:
            existing = self.references.get(key)
            result = None if existing is None else existing()
            if result is None:
                self.references[key] = reference
                return candidate
        return result

    def _forget(self, reference: _Reference[T]) -> None:
        with self._lock:
            if self.references.get(reference.key) is reference:  # else the key has a newer object
                del self.references[reference.key]
