"""Memory for tensors and arenas: aligned, checked against overflow and the machine's size, and pooled.

Blocks come from NumPy's allocator, which asks for huge pages (madvise) from 4 MiB upwards on Linux; aligning those to
2 MiB lets the system use such pages for the whole block.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import OutOfMemoryError
from relaxlite.runtime import scratch
from relaxlite.runtime.mapped_file import HUGE_PAGE, MappedFile
from relaxlite.runtime.threadpool import default_num_threads

ALIGNMENT = 64  # a cache line, and the widest vector register
_PIECE = 4 << 20  # bytes of a mapped file that are copied, and then given back
_HUGE_FROM = 4 << 20
_WAITS_FROM = 32 << 20  # bytes; what is smaller, C libraries keep themselves when NumPy frees it
_SHARED_FROM = 64 << 20  # bytes that several threads copy
_STAYS_FROM = 16 << 20  # bytes of weights that are not gathered where they lie well
_MOST_COPIERS = 4
_MAX_BYTES = (1 << 63) - 1
POISON = 0xFF  # NaN in every float dtype, -1 or the maximum in every integer


class Memory:
    """A block of bytes, aligned to ALIGNMENT; freed with the last reference to it or to its `raw` array. If it `waits`
    and is large, it is kept then for the next that does (scratch.py)."""

    __slots__ = ("base", "nbytes", "pooled", "ptr", "raw")

    def __init__(self, nbytes: int, *, pooled: bool = False, waits: bool = False) -> None:
        alignment = HUGE_PAGE if nbytes >= _HUGE_FROM else ALIGNMENT
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
    found = [file.format(".") for file in files.values()]  # a container may see its own group as the root
    for controllers, path in re.findall(r"^\d+:([^:\n]*):/(.*)$", text, re.MULTILINE):
        group = PurePosixPath(path)
        for controller in files.keys() & controllers.split(","):
            found += [files[controller].format(item) for item in (group, *group.parents)]
    limits = []
    for file in found:
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


def aligned(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """The arrays, or copies of those that are not contiguous, or do not start with a cache line, as NumPy's may not:
    each vector that is read from such a one takes two lines. Products in float32 are 17 to 25 % slower so on a Granite
    Rapids."""
    return tuple(_side_by_side([array])[0] if _is_worth_aligning(array) else array for array in arrays)


def _is_worth_aligning(array: np.ndarray) -> bool:
    if not array.flags.c_contiguous:
        return True
    return ALIGNMENT <= array.nbytes <= MEMORY_LIMIT // 4 and array.ctypes.data % ALIGNMENT != 0


def gathered(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """The arrays side by side in one block that huge pages can map, from 4 MiB in all upwards; else aligned, and so too
    where they would take more than a quarter of the machine's memory.

    Weights that stream from memory are read 15 to 40 % faster so (measured at m = 1 and 4, Zen 4): a page of 4 KiB ends
    the processor's prefetching, and few of them fit its table of pages. Those that lie well already stay where they
    are: pages that nobody has used yet take a virtual machine 1 to 3 ms per MB.
    """
    files = [file for file in _mapped_files(arrays) if _may_stay(file)]
    is_moved = [not (_lies_in(array, files) or _has_memory_of_its_own(array)) for array in arrays]
    moved = [array for array, moves in zip(arrays, is_moved, strict=True) if moves]
    size = sum(_aligned(array.nbytes) for array in moved)
    is_worth_it = sys.platform == "linux" and _HUGE_FROM <= size <= MEMORY_LIMIT // 4
    made = iter(_side_by_side(moved) if is_worth_it else aligned(moved))
    for file in files:
        _give_back(file, 0, min(_place(array, file) for array in arrays if _owner(array) is file))
    return tuple(next(made) if moves else array for array, moves in zip(arrays, is_moved, strict=True))


def _may_stay(file: mmap.mmap) -> bool:
    """Whether weights need not leave a file: what they are moved for they have there."""
    return isinstance(file, MappedFile) and len(file) >= _STAYS_FROM and file.is_in_huge_pages()


def _place(array: np.ndarray, file: mmap.mmap) -> int:
    """Where in its file an array begins, in bytes."""
    return int(array.ctypes.data - np.frombuffer(file, np.uint8).ctypes.data)


def _lies_in(array: np.ndarray, files: Sequence[mmap.mmap]) -> bool:
    """Whether an array is part of one of the files, and need not be copied to be used."""
    return bool(files) and not _is_worth_aligning(array) and any(_owner(array) is file for file in files)


def _has_memory_of_its_own(array: np.ndarray) -> bool:
    """Whether a large array lies well, has its memory to itself, no file, and is not to be written by anyone."""
    is_fit = array.nbytes >= _STAYS_FROM and array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0
    if not is_fit or array.flags.writeable:
        return False
    owner = _owner(array)
    return isinstance(owner, np.ndarray) and array.nbytes >= 0.9 * owner.nbytes


def _owner(array: np.ndarray) -> object:
    """What the memory of an array belongs to."""
    owner: object = array
    while isinstance(owner, np.ndarray | memoryview):
        base = owner.base if isinstance(owner, np.ndarray) else owner.obj
        if base is None:
            break
        owner = base
    return owner


def _side_by_side(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Copies in one block."""
    sizes = [_aligned(array.nbytes) for array in arrays]
    block = allocate(sum(sizes), "the weights")
    start, made = block.ptr - block.base, []
    for array, size in zip(arrays, sizes, strict=True):
        made.append(block.raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape))
        start += size
    if sum(sizes) < _SHARED_FROM:
        list(map(_copy, arrays, made))
    else:  # most of the time goes to the system, for pages of the file and of memory, which several threads get faster
        with ThreadPoolExecutor(min(_MOST_COPIERS, default_num_threads())) as threads:
            list(threads.map(_copy_run, _runs(arrays, made)))
    for file in _mapped_files(arrays):
        _give_back(file, 0, len(file))  # the pages where arrays meet, and what was read before them
    for copy in made:
        copy.flags.writeable = False
    return made


def _runs(arrays: Sequence[np.ndarray], copies: Sequence[np.ndarray]) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Both in runs of some megabytes, as there may be thousands of small ones."""
    runs: list[list[tuple[np.ndarray, np.ndarray]]] = []
    size = _PIECE
    for pair in zip(arrays, copies, strict=True):
        if size >= _PIECE:
            runs.append([])
            size = 0
        runs[-1].append(pair)
        size += pair[0].nbytes
    return runs


def _copy_run(run: list[tuple[np.ndarray, np.ndarray]]) -> None:
    for array, copy in run:
        _copy(array, copy)


def _copy(array: np.ndarray, copy: np.ndarray) -> None:
    """Copy an array, and give the pages of a mapped file back that hold it, or it would be in memory twice. Whoever
    reads it again has them mapped again."""
    file = _mapped_file(array)
    if file is None or not array.nbytes or not array.flags.c_contiguous:
        copy[...] = array
        return
    source, target = (a.reshape(-1).view(np.uint8) for a in (array, copy))
    begin = _place(source, file)
    for start in range(0, len(source), _PIECE):
        end = min(start + _PIECE, len(source))
        target[start:end] = source[start:end]
        _give_back(file, begin + start, begin + end)


def _mapped_file(array: np.ndarray) -> mmap.mmap | None:
    """The file that an array is part of, if nobody may write to the mapping: what was written would be lost."""
    owner = _owner(array)
    return owner if isinstance(owner, mmap.mmap) and memoryview(owner).readonly else None


def _mapped_files(arrays: Sequence[np.ndarray]) -> list[mmap.mmap]:
    return list({id(file): file for file in map(_mapped_file, arrays) if file is not None}.values())


def _give_back(file: mmap.mmap, start: int, end: int) -> None:
    """Let go of the memory of the whole pages from `start` to `end`."""
    first, last = -(-start // mmap.PAGESIZE), end // mmap.PAGESIZE
    if last > first:
        file.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


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
            found = min(fitting, key=_size) if fitting else None
            dropped = found or max(self._free, key=_size, default=None)
            if dropped is not None:
                self._free.remove(dropped)
            return found

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
