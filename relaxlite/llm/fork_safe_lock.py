"""A lock that serializes threads and survives forks."""

from __future__ import annotations

import os
import threading
from weakref import WeakSet


class ForkSafeLock:
    """A reentrant lock that is reset in forked processes: `with turn.lock:`.

    `with` acquires the RLock itself, in C. A wrapper in Python could be interrupted (KeyboardInterrupt) after the lock
    was acquired and before its release is ensured.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        _turns.add(self)


_turns: WeakSet[ForkSafeLock] = WeakSet()


def _reset_locks() -> None:
    """Replace all locks in a forked process, whose only thread owns none of them."""
    for turn in _turns:
        turn.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_locks)
