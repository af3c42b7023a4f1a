"""A lock that threads take in turns, also those of processes that are forked from this one."""

from __future__ import annotations

import os
import threading


class Turn:
    """`with turn:` for one thread at a time, which may enter it again. A forked process has but one thread: whoever
    held the lock when it was forked is not there to give it back, so that it begins with a new one."""

    def __init__(self) -> None:
        self._lock, self._process = threading.RLock(), os.getpid()

    def __enter__(self) -> None:
        if os.getpid() != self._process:
            self._lock, self._process = threading.RLock(), os.getpid()
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
