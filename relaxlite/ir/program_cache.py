"""Persistent cache of the results of passes on tensor programs, next to the cache of compiled kernels.

With cached kernels, scheduling dominates compile time. Its results depend only on program, target and passes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from relaxlite.ir.encoding import decode, encode
from relaxlite.ir.program import TensorProgram


class CacheStore(Protocol):
    """Key-value store of bytes. Entries may be evicted at any time."""

    def get(self, key: str) -> bytes | None: ...

    def put(self, entries: Mapping[str, bytes]) -> None: ...


class ProgramCache:
    """Cache of results of passes in a `store`; without a store, nothing is cached.

    `key` identifies everything that results depend on besides the arguments of `get_or_compute`: target, passes.
    """

    def __init__(self, store: CacheStore | None = None, key: str = "") -> None:
        self._store, self._key = store, key
        self._new: dict[str, bytes] = {}
        self._encoded: dict[
            int, tuple[TensorProgram, bytes]
        ] = {}  # by id; the reference to the program keeps the id unique

    def get_or_compute(
        self, step: str, program: TensorProgram, options: str, make: Callable[[], tuple[Any, ...]]
    ) -> tuple[Any, ...]:
        """Return the cached result of `make`, or compute and cache it.

        `make` returns items that `encode` accepts, and depends only on `program` and `options`. The result refers to
        the program's symbols, but to new buffers. A computed result is encoded and decoded too, so that this process
        and later ones get equal programs and request the same kernels.
        """
        if self._store is None:
            return make()
        digest = hashlib.sha256(f"{self._key} {step} {options} ".encode())
        digest.update(self._encode(program))
        key = digest.hexdigest()
        content = self._new.get(key) or self._store.get(key)
        if content is None:
            content = self._new[key] = encode(*make(), symbols=program.symbols)
        return decode(content, symbols=program.symbols)

    def write(self) -> None:
        """Write new results to the store, and release memory."""
        if self._store is not None and self._new:
            self._store.put(self._new)
        self._new, self._encoded = {}, {}

    def _encode(self, program: TensorProgram) -> bytes:
        entry = self._encoded.get(id(program))
        if entry is None:
            entry = self._encoded[id(program)] = program, encode(program)
        return entry[1]
