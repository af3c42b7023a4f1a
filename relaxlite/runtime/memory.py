"""Allocation of tensors and arenas: aligned, checked against overflow and the machine's memory, and pooled.

Blocks come from NumPy's allocator, which requests huge pages (madvise) from 4 MiB on in Linux; alignment to 2 MiB lets
the system use huge pages for the whole block.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import OutOfMemoryError
from relaxlite.runtime import scratch

ALIGNMENT = 64  # a cache line, and the widest vector register
HUGE_PAGE = 2 << 20  # bytes
HUGE_FROM = 4 << 20  # bytes of a block that is aligned to huge pages
_MIN_RECYCLED_BYTES = 32 << 20  # smaller blocks are cached by the C library
_MAX_BYTES = (1 << 63) - 1
POISON = 0xFF  # NaN in every float dtype, -1 or the maximum in every integer


class Memory:
    """A block of bytes, aligned to ALIGNMENT; freed with the last reference to it or to its `raw` array.

    `recycled`: a large block is returned to a process-wide cache when it is freed (scratch.py). `pooled`: owned by a
    pool or host function, so results in it must be copied out.
    """

    __slots__ = ("base", "nbytes", "pooled", "ptr", "raw")

    def __init__(self, nbytes: int, *, pooled: bool = False, recycled: bool = False) -> None:
        alignment = HUGE_PAGE if nbytes >= HUGE_FROM else ALIGNMENT
        size = nbytes + alignment
        self.raw = scratch.array(size) if recycled and nbytes >= _MIN_RECYCLED_BYTES else np.empty(size, np.uint8)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.raw.data))
        self.ptr = -(-self.base // alignment) * alignment
        self.nbytes = nbytes
        self.pooled = pooled

    def poison(self) -> None:
        """Fill the block with POISON."""
        self.raw.fill(POISON)


def _memory_limit() -> int:
    """Bytes of memory available to this process: the machine's, or the limit of its control groups if lower."""
    try:
        limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows
        return 1 << 47
    return min([limit, *group_limits()])


def group_limits(root: str = "/") -> list[int]:
    """Memory limits in bytes of this process's control groups, versions 1 and 2, and of their ancestors (cgroups(7)).

    `root`: the folder that contains /proc and /sys.
    """
    files = {"": "sys/fs/cgroup/{}/memory.max", "memory": "sys/fs/cgroup/memory/{}/memory.limit_in_bytes"}
    try:
        text = Path(root, "proc/self/cgroup").read_text(errors="surrogateescape")
    except OSError:
        text = ""
    limit_files = [file.format(".") for file in files.values()]  # in a container, the own group may appear as the root
    for controllers, path in re.findall(r"^\d+:([^:\n]*):/(.*)$", text, re.MULTILINE):
        group = PurePosixPath(path)
        for controller in files.keys() & controllers.split(","):
            limit_files += [files[controller].format(item) for item in (group, *group.parents)]
    limits = []
    for file in limit_files:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int(Path(root, file).read_text()))
    return limits


MEMORY_LIMIT = _memory_limit()


def size_text(nbytes: int) -> str:
    """Size as text, such as "12 bytes", "3.4 KiB", "1.2 TiB"."""
    if nbytes < 1024:
        return f"{nbytes} bytes"
    power = min((nbytes.bit_length() - 1) // 10, 6)
    return f"{nbytes / (1 << 10 * power):.1f} {' KMGTPE'[power]}iB"


def tensor_bytes(shape: Sequence[int], dtype: str, what: str) -> int:
    """Bytes of a dense tensor; OutOfMemoryError for a negative dimension or int64 overflow. `what` begins the
    message."""
    nbytes = dtypes.itemsize(dtype)
    for dim in shape:
        if dim < 0:
            raise OutOfMemoryError(f"{what}: the shape {tuple(shape)} has a negative dimension")
        nbytes *= dim
    if nbytes > _MAX_BYTES:
        raise OutOfMemoryError(f"{what}: {dtype}{list(shape)} has {nbytes} bytes, which overflows 64 bits")
    return nbytes


def allocate(nbytes: int, what: str, *, pooled: bool = False, recycled: bool = False, poison: bool = False) -> Memory:
    """Allocate a block. OutOfMemoryError, whose message begins with `what`, where the size is invalid or
    unavailable."""
    if nbytes < 0 or nbytes > _MAX_BYTES:
        raise OutOfMemoryError(f"{what}: a size of {nbytes} bytes is negative or overflows 64 bits")
    if nbytes > MEMORY_LIMIT:
        raise OutOfMemoryError(
            f"{what}: needs {size_text(nbytes)}, more than the {size_text(MEMORY_LIMIT)} of memory of this machine"
        )
    try:
        memory = Memory(nbytes, pooled=pooled, recycled=recycled)
    except MemoryError as error:
        raise OutOfMemoryError(f"{what}: the system has no {size_text(nbytes)} of memory left") from error
    if poison:
        memory.poison()
    return memory


def trim_heap() -> None:
    """Return freed heap memory to the system (glibc's malloc_trim), after megabytes were freed in small pieces."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


class Block(Protocol):
    """A block of memory; freed with its last reference. `pooled`: owned by a pool, so results are copied out of it."""

    ptr: int
    nbytes: int
    pooled: bool

    def poison(self) -> None:
        """Fill the block with a pattern that shows reads of uninitialized memory."""


def new_arena(nbytes: int, what: str, *, poison: bool) -> Block:
    """Allocate an arena in the memory of this process. OutOfMemoryError."""
    return allocate(nbytes, what, pooled=True, poison=poison)


class ArenaPool:
    """Thread-safe pool of arenas for reuse by later calls; `new` allocates as `new_arena` does."""

    def __init__(self, *, poison: bool = False, new: Callable[..., Block] = new_arena) -> None:
        self._lock = threading.Lock()
        self._free: list[Block] = []
        self._poison, self._new = poison, new

    def take(self, nbytes: int, what: str) -> Block:
        """Take the smallest free arena that is large enough; else allocate one in place of the largest free arena."""
        memory = self._pop_fitting(nbytes)
        if memory is None:
            return self._new(rounded_size(nbytes), what, poison=self._poison)
        if self._poison:
            memory.poison()
        return memory

    def _pop_fitting(self, nbytes: int) -> Block | None:
        with self._lock:
            fitting = [memory for memory in self._free if memory.nbytes >= nbytes]
            best = min(fitting, key=_size) if fitting else None
            removed = best or max(self._free, key=_size, default=None)
            if removed is not None:
                self._free.remove(removed)
            return best

    def give(self, arenas: Sequence[Block]) -> None:
        """Return arenas to the pool."""
        with self._lock:
            self._free.extend(arenas)

    def release(self) -> int:
        """Free all arenas of the pool; returns their size in bytes."""
        with self._lock:
            nbytes = sum(memory.nbytes for memory in self._free)
            self._free.clear()
            return nbytes


def _size(memory: Block) -> int:
    return memory.nbytes


def rounded_size(nbytes: int) -> int:
    """Round an arena's size up by at most 1/32 (64 KiB for small ones), so that a sequence that grows by one token per
    call does not need a new arena each time."""
    if not 0 <= nbytes <= MEMORY_LIMIT // 2:
        return nbytes
    step = max(1 << 16, 1 << max(nbytes.bit_length() - 6, 0))
    return -(-nbytes // step) * step
