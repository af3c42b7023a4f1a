"""Process-wide thread pool, which all compiled kernels share.

Kernels import these symbols; `symbols()` gives their addresses:

    i32  relaxlite_parallel_for(ptr fn, ptr ctx, i64 num_chunks)   fn is i32 (*)(ptr ctx, i64 chunk)
    i64  relaxlite_num_threads()                                   threads per parallel loop
    void relaxlite_hold_workers(i32 delta)                         +1 on entry of a compiled graph, -1 on its exit

`relaxlite_parallel_for` calls `fn` once for every chunk, in any order and any thread, and returns 0 or one of the
non-zero statuses that chunks returned (a failure does not stop the other chunks). `relaxlite_hold_workers` is optional:
it keeps workers spinning through the serial parts of a graph, as waking one is slow (docs/measurements/backend.md).

The logic is LLVM IR (threadpool_ir.py), linked at first use (support.py), so neither a C compiler nor an OpenMP runtime
is needed. Workers are Python daemon threads that stay in one ctypes call, without the GIL, until the process exits.

Protocol. The state word holds `epoch << 32 | closed | waiting | active`. The caller takes the callers' lock, writes the
job, opens a new epoch, wakes sleeping workers, and takes chunks from a shared counter, as the workers do. A worker
joins by a compare-and-swap that increments `active`, only while the epoch is open. When no chunk is left, the caller
closes the epoch and waits until `active` is 0. A late worker finds the epoch closed, so the caller never waits for a
thread that the system has not scheduled: it runs all chunks itself.

No deadlock: a caller that does not get the callers' lock (a call nested in a chunk, or a second Python thread) runs its
chunks serially. Forking while a chunk runs is not supported.

Spinning threads yield their core every 64 rounds, which keeps small parallel loops from being slower than serial ones
on busy machines (docs/measurements/backend.md).
"""

from __future__ import annotations

import ctypes
import operator
import os
import platform
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import SupportsIndex

from relaxlite import config
from relaxlite.errors import InvalidArgumentError
from relaxlite.records import dataclass
from relaxlite.runtime import support
from relaxlite.runtime.support import SupportCode
from relaxlite.runtime.threadpool_ir import (
    CONTROL_SYMBOLS,
    FUTEX_NUMBERS,
    KERNEL_SYMBOLS,
    WAIT_IMPORTS,
    WaitKind,
    pool_ir,
    yield_symbol,
)

MAX_THREADS = config.MAX_THREADS
_IDLE_SPIN_US = 200.0  # an idle worker spins this long before it sleeps
_HELD_SPIN_US = 20_000.0  # the same while a graph runs; bounded, in case of a missing release


def default_wait_kind() -> WaitKind:
    """Wait primitive of this platform."""
    if sys.platform == "win32":
        return "wait_on_address"
    return "futex" if sys.platform == "linux" and platform.machine() in FUTEX_NUMBERS else "condvar"


def support_code(wait: WaitKind, machine: str) -> SupportCode:
    """Support code of the pool for a machine, named as by `platform.machine()`."""
    imports = (*WAIT_IMPORTS[wait], yield_symbol(wait))
    return SupportCode(f"threadpool_{wait}", pool_ir(wait, machine), imports, (*KERNEL_SYMBOLS, *CONTROL_SYMBOLS))


def default_num_threads() -> int:
    """RELAXLITE_NUM_THREADS where that is set, else the number of usable cores; from 1 to MAX_THREADS."""
    return config.get("num_threads") or min(config.usable_cores(), MAX_THREADS)


def _checked_count(count: SupportsIndex) -> int:
    try:
        number = operator.index(count)
    except TypeError as error:
        raise InvalidArgumentError(f"the number of threads must be an integer, got {count!r}") from error
    if not 1 <= number <= MAX_THREADS:
        raise InvalidArgumentError(f"the number of threads must be from 1 to {MAX_THREADS}, got {number}")
    return number


@dataclass(frozen=True, slots=True)
class _Native:
    """The linked pool: addresses of kernel symbols, and control functions as ctypes functions."""

    symbols: dict[str, int]
    worker: Callable[[int], None]
    reset: Callable[[], None]
    configure: Callable[[int, int, int], None]
    rounds_per_us: float  # speed of spinning

    @staticmethod
    def build(wait: WaitKind) -> _Native:
        code = support_code(wait, platform.machine())
        addresses = support.link(code, _system_symbols(code.imports))
        i32, i64 = ctypes.c_int32, ctypes.c_int64
        return _Native(
            symbols={name: addresses[name] for name in KERNEL_SYMBOLS},
            worker=ctypes.CFUNCTYPE(None, i32)(addresses["pool_worker"]),
            reset=ctypes.CFUNCTYPE(None)(addresses["pool_reset"]),
            configure=ctypes.CFUNCTYPE(None, i32, i64, i64)(addresses["pool_configure"]),
            rounds_per_us=_measure_spin_speed(ctypes.CFUNCTYPE(None, i64)(addresses["pool_spin"])),
        )


def _system_symbols(names: Sequence[str]) -> dict[str, int]:
    library = ctypes.CDLL("kernelbase" if sys.platform == "win32" else None)
    return {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names}


def _measure_spin_speed(spin: Callable[[int], None]) -> float:
    """Rounds of spinning per microsecond, best of three, as the cycles of a pause depend on the CPU."""
    rounds, best_ns = 5_000, 1 << 62
    for _ in range(3):
        start = time.perf_counter_ns()
        spin(rounds)
        best_ns = min(best_ns, time.perf_counter_ns() - start)
    return rounds * 1e3 / max(best_ns, 1)


class ThreadPool:
    """A pool that lives until the process exits; code is linked and threads are started by the first `symbols()`.

    Use the module's functions, which share one pool. After a fork, the child starts new workers for the same code, so
    loaded kernels keep working.
    """

    def __init__(self, *, wait: WaitKind | None = None) -> None:
        self._wait: WaitKind = wait or default_wait_kind()
        self._lock = threading.Lock()
        self._count: int | None = None  # None: not determined yet
        self._native: _Native | None = None
        self._workers: list[threading.Thread] = []
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._restart_in_child)

    def symbols(self) -> dict[str, int]:
        """Addresses of the functions that kernels import, by name; starts the pool at the first call. Thread-safe."""
        with self._lock:
            if self._native is None:
                count = self._num_requested()
                native = _Native.build(self._wait)
                native.reset()
                self._native = native
                self._apply(native, count)
            return dict(self._native.symbols)

    def num_threads(self) -> int:
        """Number of threads per parallel loop, including the caller."""
        with self._lock:
            return self._num_requested()

    def set_num_threads(self, count: int) -> None:
        """Set the number of threads per parallel loop, including the caller: from 1 to MAX_THREADS.

        InvalidArgumentError for other values.
        """
        checked = _checked_count(count)
        with self._lock:
            self._count = checked
            if self._native is not None:
                self._apply(self._native, checked)

    def _num_requested(self) -> int:
        if self._count is None:
            self._count = default_num_threads()
        return self._count

    def _apply(self, native: _Native, count: int) -> None:
        """Start missing workers, and set the thread limit; RuntimeWarning where the system refuses threads."""
        try:
            while len(self._workers) < count - 1:
                number = len(self._workers) + 1
                thread = threading.Thread(
                    target=native.worker, args=(number,), name=f"relaxlite-worker-{number}", daemon=True
                )
                thread.start()
                self._workers.append(thread)
        except RuntimeError as error:
            self._count = count = len(self._workers) + 1
            warnings.warn(
                f"the system refused to start more than {count - 1} worker threads ({error}); relaxlite uses "
                f"{count} threads; set RELAXLITE_NUM_THREADS to a smaller number, or raise the limit on threads",
                RuntimeWarning,
                stacklevel=3,
            )
        spins, held_spins = (int(us * native.rounds_per_us) for us in (_IDLE_SPIN_US, _HELD_SPIN_US))
        native.configure(count, spins, held_spins)

    def _restart_in_child(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held the old one
        self._workers = []
        if self._native is not None:
            self._native.reset()
            self._apply(self._native, self._num_requested())


_POOL = ThreadPool()
symbols = _POOL.symbols
num_threads = _POOL.num_threads
set_num_threads = _POOL.set_num_threads
