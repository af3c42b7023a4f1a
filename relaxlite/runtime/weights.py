"""Placement of weights in memory: aligned, and in huge pages where possible.

Where the weights of a loaded file are in small pages (mapped_file.py), the model runs from them at once, while a
background thread copies one weight after the other to huge pages and updates its address. Old addresses stay valid.
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from relaxlite.errors import OutOfMemoryError
from relaxlite.runtime.mapped_file import MappedFile
from relaxlite.runtime.memory import ALIGNMENT, HUGE_FROM, MEMORY_LIMIT, allocate
from relaxlite.runtime.tensor import Tensor
from relaxlite.runtime.threadpool import default_num_threads

_PIECE = 4 << 20  # bytes of a mapped file copied at a time, then unmapped
_SHARED_FROM = 64 << 20  # bytes from which copying is parallel, or in the background
_MIN_IN_PLACE_BYTES = 16 << 20  # bytes from which a well-placed weight is not copied
_MAX_COPIERS = 4
_NICE = 10  # nice value of the background thread: a tenth of the CPU share of normal threads


def align_weights(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Copy arrays that are not contiguous or not aligned to a cache line; others are returned as they are.

    Each vector load of an unaligned array touches two lines (docs/measurements/cpus.md, unaligned_weights).
    """
    return tuple(_copy_to_one_block([array])[0] if _needs_alignment(array) else array for array in arrays)


def _needs_alignment(array: np.ndarray) -> bool:
    if not array.flags.c_contiguous:
        return True
    return ALIGNMENT <= array.nbytes <= MEMORY_LIMIT // 4 and array.ctypes.data % ALIGNMENT != 0


def gather_weights(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Copy arrays to one block in huge pages, from 4 MiB to a quarter of the machine's memory in total; else align
    them.

    Huge pages speed up weights that stream from memory (docs/measurements/cpus.md, huge_pages): hardware prefetching
    stops at 4 KiB pages, and the TLB holds few of them. Well-placed arrays are not copied, as fresh memory is slow in
    virtual machines (docs/measurements/backend.md).
    """
    return _place_weights(arrays, may_wait=False)[0]


def place_weights(arrays: Sequence[np.ndarray]) -> tuple[tuple[np.ndarray, ...], tuple[int, ...]]:
    """Place weights as `gather_weights` does, except for arrays of large files, which stay in place.

    Returns the arrays, and the numbers of those that stay, for `Constants.move`.
    """
    return _place_weights(arrays, may_wait=True)


def _place_weights(arrays: Sequence[np.ndarray], *, may_wait: bool) -> tuple[tuple[np.ndarray, ...], tuple[int, ...]]:
    mapped_files = [file for file in _mapped_files(arrays) if isinstance(file, MappedFile)]
    large_files = [
        file for file in mapped_files if _MIN_IN_PLACE_BYTES <= len(file) <= MEMORY_LIMIT // 4
    ]  # larger ones are never copied
    huge_page_files = [file for file in large_files if file.is_in_huge_pages()]
    misplaced = [
        k for k, array in enumerate(arrays) if not (_is_in_files(array, huge_page_files) or _owns_its_memory(array))
    ]
    pending = [k for k in misplaced if may_wait and _is_in_files(arrays[k], large_files)]
    if not _SHARED_FROM <= _total_bytes([arrays[k] for k in pending]) <= MEMORY_LIMIT // 4 or sys.platform != "linux":
        pending = []
    placed_arrays, copied = list(arrays), sorted({*misplaced} - {*pending})
    is_worth_it = (
        sys.platform == "linux" and HUGE_FROM <= _total_bytes([arrays[k] for k in copied]) <= MEMORY_LIMIT // 4
    )
    copy_all = _copy_to_one_block if is_worth_it else align_weights
    for k, array in zip(copied, copy_all([arrays[k] for k in copied]), strict=True):
        placed_arrays[k] = array
    for file in huge_page_files:
        _drop_pages(file, 0, min(_file_offset(array, file) for array in arrays if _owner(array) is file))
    return tuple(placed_arrays), tuple(pending)


def _total_bytes(arrays: Sequence[np.ndarray]) -> int:
    """Total bytes of arrays in one block, each aligned."""
    return sum(_round_up(array.nbytes) for array in arrays)


def _file_offset(array: np.ndarray, file: mmap.mmap) -> int:
    """Byte offset of an array in its mapped file."""
    return int(array.ctypes.data - np.frombuffer(file, np.uint8).ctypes.data)


def _is_in_files(array: np.ndarray, files: Sequence[mmap.mmap]) -> bool:
    """Whether an array is in one of the files, contiguous and aligned."""
    return bool(files) and not _needs_alignment(array) and any(_owner(array) is file for file in files)


def _owns_its_memory(array: np.ndarray) -> bool:
    """Whether a large array is aligned, read-only, and the only user of its anonymous memory."""
    is_aligned = array.nbytes >= _MIN_IN_PLACE_BYTES and array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0
    if not is_aligned or array.flags.writeable:
        return False
    owner = _owner(array)
    return isinstance(owner, np.ndarray) and array.nbytes >= 0.9 * owner.nbytes


def _owner(array: np.ndarray) -> object:
    """Object that owns the memory of an array."""
    owner: object = array
    while isinstance(owner, np.ndarray | memoryview):
        base = owner.base if isinstance(owner, np.ndarray) else owner.obj
        if base is None:
            break
        owner = base
    return owner


def _copy_to_one_block(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Copy arrays to one block; the copies are read-only."""
    copies = _allocate_copies(arrays)
    if _total_bytes(arrays) < _SHARED_FROM:
        list(map(_copy, arrays, copies))
    else:  # page faults dominate, which several threads handle faster
        with ThreadPoolExecutor(min(_MAX_COPIERS, default_num_threads())) as threads:
            list(threads.map(_copy_batch, _batches(arrays, copies)))
    for file in _mapped_files(arrays):
        _drop_pages(file, 0, len(file))  # pages shared by arrays, and pages before the arrays
    for copy in copies:
        copy.flags.writeable = False
    return copies


def _allocate_copies(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Allocate uninitialized copies in one block. Raises OutOfMemoryError."""
    block = allocate(_total_bytes(arrays), "the weights")
    start, copies = block.ptr - block.base, []
    for array in arrays:
        copies.append(block.raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape))
        start += _round_up(array.nbytes)
    return copies


def _batches(arrays: Sequence[np.ndarray], copies: Sequence[np.ndarray]) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Group (array, copy) pairs into batches of some megabytes, as there may be thousands of small arrays."""
    batches: list[list[tuple[np.ndarray, np.ndarray]]] = []
    size = _PIECE
    for pair in zip(arrays, copies, strict=True):
        if size >= _PIECE:
            batches.append([])
            size = 0
        batches[-1].append(pair)
        size += pair[0].nbytes
    return batches


def _copy_batch(batch: list[tuple[np.ndarray, np.ndarray]]) -> None:
    for array, copy in batch:
        _copy(array, copy)


def _copy(array: np.ndarray, copy: np.ndarray) -> None:
    """Copy an array, and drop its pages of a mapped file, so that it is not in memory twice; later reads map them
    again."""
    if not array.nbytes or not array.flags.c_contiguous:
        copy[...] = array
        return
    for start, end in _copy_pieces(array, copy):
        _drop_pages_of(array, start, end)


def _copy_pieces(array: np.ndarray, copy: np.ndarray) -> Iterator[tuple[int, int]]:
    """Copy a dense array piece by piece; yields (start, end) in bytes of each copied piece."""
    source, target = (a.reshape(-1).view(np.uint8) for a in (array, copy))
    for start in range(0, len(source), _PIECE):
        end = min(start + _PIECE, len(source))
        target[start:end] = source[start:end]
        yield start, end


def _mapped_file(array: np.ndarray) -> mmap.mmap | None:
    """Read-only mapped file that contains an array; None for writable mappings, whose changes would be lost."""
    owner = _owner(array)
    return owner if isinstance(owner, mmap.mmap) and memoryview(owner).readonly else None


def _mapped_files(arrays: Sequence[np.ndarray]) -> list[mmap.mmap]:
    return list({id(file): file for file in map(_mapped_file, arrays) if file is not None}.values())


def _drop_pages(file: mmap.mmap, start: int, end: int) -> None:
    """Drop the whole pages of a mapped file from byte `start` to `end` from memory (MADV_DONTNEED)."""
    first, last = -(-start // mmap.PAGESIZE), end // mmap.PAGESIZE
    if last > first:
        file.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)


def _drop_pages_of(array: np.ndarray, start: int, end: int) -> None:
    """Drop the pages of bytes `start` to `end` of an array, where it is in a mapped file."""
    file = _mapped_file(array)
    if file is not None:
        begin = _file_offset(array, file)
        _drop_pages(file, begin + start, begin + end)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Constants:
    """Constants of an executable: tensors for the interpreter, and a table of addresses, which host functions read at
    each use."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.addresses = (ctypes.c_int64 * max(len(tensors), 1))(*[tensor.ptr for tensor in tensors])
        self._mover: _WeightMover | None = None

    def move(self, numbers: Sequence[int]) -> None:
        """Start to move constants out of mapped files in the background; without memory or threads they stay."""
        if numbers:
            largest_first = sorted(numbers, key=lambda number: -self.tensors[number].nbytes)
            mover = _WeightMover(
                self, largest_first
            )  # pages read during a copy are in memory twice until it is complete
            with suppress(RuntimeError):
                mover.start()
                self._mover = mover

    def wait_until_moved(self) -> None:
        """Wait until all constants have moved."""
        if self._mover is not None:
            self._mover.join()


class _WeightMover(threading.Thread):
    """Background thread that copies constants to huge pages."""

    def __init__(self, constants: Constants, numbers: Sequence[int]) -> None:
        super().__init__(name="relaxlite-weights", daemon=True)
        self._tensors, self._addresses, self._numbers = constants.tensors, constants.addresses, numbers
        self._is_stopped = False

    def run(self) -> None:
        _active_movers.add(self)
        if sys.platform == "linux":  # only Linux has per-thread priorities
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        with suppress(OutOfMemoryError):
            self._move()

    def _move(self) -> None:
        owners = [self._tensors[number].owner for number in self._numbers]
        arrays = [owner for owner in owners if isinstance(owner, np.ndarray)]  # all owners are arrays
        for number, array, copy in zip(self._numbers, arrays, _allocate_copies(arrays), strict=True):
            for start, end in _copy_pieces(array, copy):
                if self._is_stopped:
                    return
                _drop_pages_of(array, start, end)
            copy.flags.writeable = False
            tensor = self._tensors[number]
            tensor.owner = copy
            tensor.ptr = self._addresses[number] = copy.ctypes.data
            _drop_pages_of(array, 0, array.nbytes)  # pages that calls have read during the copy
        for file in _mapped_files(arrays):
            _drop_pages(file, 0, len(file))

    def stop(self) -> None:
        """Stop copying, and wait for the thread."""
        self._is_stopped = True
        self.join()


_active_movers: weakref.WeakSet[_WeightMover] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop all background copies before the process exits."""
    for mover in list(_active_movers):
        mover.stop()
