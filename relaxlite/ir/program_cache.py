"""What passes made of programs, kept between processes beside the compiled kernels.

Scheduling is most of the work of a compilation whose kernels are there already. It depends on the program, the target
and the passes alone, so it is done once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from relaxlite.ir.encoding import decode, encode
from relaxlite.ir.program import TensorProgram


class Store(Protocol):
    """Contents by key, of which any may be gone at any time."""

    def get(self, key: str) -> bytes | None: ...

    def put(self, entries: Mapping[str, bytes]) -> None: ...


class ProgramCache:
    """Results in a `store`; `key` stands for all that they depend on beside what is asked. Without a store nothing is
    kept."""

    def __init__(self, store: Store | None = None, key: str = "") -> None:
        self._store, self._key = store, key
        self._new: dict[str, bytes] = {}
        self._encoded: dict[int, tuple[TensorProgram, bytes]] = {}  # by id; the program, so that its id stays its own

    def recall(
        self, step: str, program: TensorProgram, options: str, make: Callable[[], tuple[Any, ...]]
    ) -> tuple[Any, ...]:
        """What `make` returns (see `encode`), which is a function of the program and the text `options`; now, or in an
        earlier process. The program's symbols stay themselves; its buffers do not.

        What is made now is also written and read: later processes have the same to the last bit, or they would ask for
        other kernels.
        """
        if self._store is None:
            return make()
        identity = hashlib.sha256(f"{self._key} {step} {options} ".encode())
        identity.update(self._encode(program))
        key = identity.hexdigest()
        content = self._new.get(key) or self._store.get(key)
        if content is None:
            content = self._new[key] = encode(*make(), symbols=program.symbols)
        return decode(content, symbols=program.symbols)

    def write(self) -> None:
        """Hand what is new to the store, and forget the programs that were asked for."""
        if self._store is not None and self._new:
            self._store.put(self._new)
        self._new, self._encoded = {}, {}

    def _encode(self, program: TensorProgram) -> bytes:
        result = self._encoded.get(id(program))
        if result is None:
            result = self._encoded[id(program)] = program, encode(program)
        return result[1]
