"""Locks that threads take in turns, also those of processes that are forked from this one."""

from __future__ import annotations

import os
import threading
from weakref import WeakSet


class Turn:
    """`with turn.lock:` for one thread at a time, which may enter it again.

    The lock itself is what `with` enters and leaves, as it does so in C: an interruption (KeyboardInterrupt) within
    methods of Python could come when the lock is taken and nobody is there yet to give it back.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        _turns.add(self)


_turns: WeakSet[Turn] = WeakSet()


def _begin_anew() -> None:
    """A forked process has but one thread: whoever else held a lock is not there to give it back."""
    for turn in _turns:
        turn.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
