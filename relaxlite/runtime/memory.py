"""Memory for tensors and arenas: aligned, checked against overflow and the machine's size, and pooled.

Blocks come from NumPy's allocator, which asks for huge pages (madvise) from 4 MiB upwards on Linux; aligning those to
2 MiB lets the system use such pages for the whole block.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import OutOfMemoryError
from relaxlite.runtime import scratch

ALIGNMENT = 64  # a cache line, and the widest vector register
HUGE_PAGE = 2 << 20  # bytes
HUGE_FROM = 4 << 20
_WAITS_FROM = 32 << 20  # bytes; what is smaller, C libraries keep themselves when NumPy frees it
_MAX_BYTES = (1 << 63) - 1
POISON = 0xFF  # NaN in every float dtype, -1 or the maximum in every integer


class Memory:
    """A block of bytes, aligned to ALIGNMENT; freed with the last reference to it or to its `raw` array. If it `waits`
    and is large, it is kept then for the next that does (scratch.py)."""

    __slots__ = ("base", "nbytes", "pooled", "ptr", "raw")

    def __init__(self, nbytes: int, *, pooled: bool = False, waits: bool = False) -> None:
        alignment = HUGE_PAGE if nbytes >= HUGE_FROM else ALIGNMENT
        size = nbytes + alignment
        self.raw = scratch.array(size) if waits and nbytes >= _WAITS_FROM else np.empty(size, np.uint8)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.raw.data))
        self.ptr = -(-self.base // alignment) * alignment
        self.nbytes = nbytes
        self.pooled = pooled

    def poison(self) -> None:
        self.raw.fill(POISON)


def _memory_limit() -> int:
    """Bytes of memory that this process can hope to get: the machine's, or its control groups' if that is less."""
    try:
        limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows
        return 1 << 47
    return min([limit, *group_limits()])


def group_limits(root: str = "/") -> list[int]:
    """Bytes that the control groups of this process allow, of versions 1 and 2; each group also keeps the limits of
    those that it is in (cgroups(7)). `root`: where /proc and /sys are."""
    files = {"": "sys/fs/cgroup/{}/memory.max", "memory": "sys/fs/cgroup/memory/{}/memory.limit_in_bytes"}
    try:
        text = Path(root, "proc/self/cgroup").read_text(errors="surrogateescape")
    except OSError:
        text = ""
    result = [file.format(".") for file in files.values()]  # a container may see its own group as the root
    for controllers, path in re.findall(r"^\d+:([^:\n]*):/(.*)$", text, re.MULTILINE):
        group = PurePosixPath(path)
        for controller in files.keys() & controllers.split(","):
            result += [files[controller].format(item) for item in (group, *group.parents)]
    limits = []
    for file in result:
        with contextlib.suppress(OSError, ValueError):  # no such group here, or "max"
            limits.append(int(Path(root, file).read_text()))
    return limits


MEMORY_LIMIT = _memory_limit()


def size_text(nbytes: int) -> str:
    """12 bytes, 3.4 KiB, 1.2 TiB, ..."""
    if nbytes < 1024:
        return f"{nbytes} bytes"
    power = min((nbytes.bit_length() - 1) // 10, 6)
    return f"{nbytes / (1 << 10 * power):.1f} {' KMGTPE'[power]}iB"


def tensor_bytes(shape: Sequence[int], dtype: str, what: str) -> int:
    """Bytes of a dense tensor; OutOfMemoryError for a negative dimension, or where 63 bits do not hold the size."""
    nbytes = dtypes.itemsize(dtype)
    for dim in shape:
        if dim < 0:
            raise OutOfMemoryError(f"{what}: the shape {tuple(shape)} has a negative dimension")
        nbytes *= dim
    if nbytes > _MAX_BYTES:
        raise OutOfMemoryError(f"{what}: {dtype}{list(shape)} has {nbytes} bytes, which overflows 64 bits")
    return nbytes


def allocate(nbytes: int, what: str, *, pooled: bool = False, waits: bool = False, poison: bool = False) -> Memory:
    """A fresh block. OutOfMemoryError, which begins with `what`, when the size cannot be had."""
    if nbytes < 0 or nbytes > _MAX_BYTES:
        raise OutOfMemoryError(f"{what}: a size of {nbytes} bytes is negative or overflows 64 bits")
    if nbytes > MEMORY_LIMIT:
        raise OutOfMemoryError(
            f"{what}: needs {size_text(nbytes)}, more than the {size_text(MEMORY_LIMIT)} of memory of this machine"
        )
    try:
        memory = Memory(nbytes, pooled=pooled, waits=waits)
    except MemoryError as error:
        raise OutOfMemoryError(f"{what}: the system has no {size_text(nbytes)} of memory left") from error
    if poison:
        memory.poison()
    return memory


def trim_heap() -> None:
    """Let the C library give what it keeps of freed memory back to the system, where it can (glibc): for callers that
    have just freed megabytes in small pieces."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


class ArenaPool:
    """Arenas that wait for the next call. Threads may take and give at once; each arena has one user at a time."""

    def __init__(self, *, poison: bool = False) -> None:
        self._lock = threading.Lock()
        self._free: list[Memory] = []
        self._poison = poison

    def take(self, nbytes: int, what: str) -> Memory:
        """The smallest free arena that is large enough; else the largest free one makes room for a new one."""
        memory = self._find(nbytes)
        if memory is None:
            return allocate(rounded_size(nbytes), what, pooled=True, poison=self._poison)
        if self._poison:
            memory.poison()
        return memory

    def _find(self, nbytes: int) -> Memory | None:
        with self._lock:
            fitting = [memory for memory in self._free if memory.nbytes >= nbytes]
            result = min(fitting, key=_size) if fitting else None
            dropped = result or max(self._free, key=_size, default=None)
            if dropped is not None:
                self._free.remove(dropped)
            return result

    def give(self, arenas: Sequence[Memory]) -> None:
        with self._lock:
            self._free.extend(arenas)

    def release(self) -> int:
        """Give the memory of all free arenas back to the system; says how many bytes that were."""
        with self._lock:
            nbytes = sum(memory.nbytes for memory in self._free)
            self._free.clear()
            return nbytes


def _size(memory: Memory) -> int:
    return memory.nbytes


def rounded_size(nbytes: int) -> int:
    """Up to 1/32 more (64 KiB for small ones), so that a sequence that grows by one token per call does not need
    a new arena each time."""
    if not 0 <= nbytes <= MEMORY_LIMIT // 2:
        return nbytes
    step = max(1 << 16, 1 << max(nbytes.bit_length() - 6, 0))
    return -(-nbytes // step) * step
