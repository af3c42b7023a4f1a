"""Where the weights of an executable lie: in huge pages, where that can be had.

A loaded file whose weights lie in small pages (mapped_file.py) is run from as it is, and a thread copies weight after
weight to huge pages and says where it is now. So a model of any size opens at once. Who has read an old address still
finds the weight there.
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

_PIECE = 4 << 20  # bytes of a mapped file that are copied, and then given back
_SHARED_FROM = 64 << 20  # bytes that several threads copy, or one while the model runs
_STAYS_FROM = 16 << 20  # bytes of weights that are not gathered where they lie well
_MAX_COPIERS = 4
_NICE = 10  # of the thread that copies while the model runs: a tenth of the share of those that run it


def aligned(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """The arrays, or copies of those that are not contiguous, or do not start with a cache line, as NumPy's may not:
    each vector that is read from such a one takes two lines (docs/measurements/cpus.md, unaligned_weights)."""
    return tuple(_side_by_side([array])[0] if _is_worth_aligning(array) else array for array in arrays)


def _is_worth_aligning(array: np.ndarray) -> bool:
    if not array.flags.c_contiguous:
        return True
    return ALIGNMENT <= array.nbytes <= MEMORY_LIMIT // 4 and array.ctypes.data % ALIGNMENT != 0


def gathered(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """The arrays side by side in one block that huge pages can map, from 4 MiB in all upwards; else aligned, and so too
    where they would take more than a quarter of the machine's memory.

    Weights that stream from memory are read faster so (docs/measurements/cpus.md, huge_pages): a page of 4 KiB ends the
    processor's prefetching, and few of them fit its table of pages. Those that lie well already stay where they are:
    pages that nobody has used yet take a virtual machine 1 to 3 ms per MB.
    """
    return _placed(arrays, may_wait=False)[0]


def placed(arrays: Sequence[np.ndarray]) -> tuple[tuple[np.ndarray, ...], tuple[int, ...]]:
    """`gathered`, but what would be copied from large files is left there for now; and the numbers of those arrays, for
    `Constants.move`."""
    return _placed(arrays, may_wait=True)


def _placed(arrays: Sequence[np.ndarray], *, may_wait: bool) -> tuple[tuple[np.ndarray, ...], tuple[int, ...]]:
    mapped = [file for file in _mapped_files(arrays) if isinstance(file, MappedFile)]
    large = [file for file in mapped if _STAYS_FROM <= len(file) <= MEMORY_LIMIT // 4]  # larger ones stay in any case
    files = [file for file in large if file.is_in_huge_pages()]
    moved = [k for k, array in enumerate(arrays) if not (_lies_in(array, files) or _has_memory_of_its_own(array))]
    waiting = [k for k in moved if may_wait and _lies_in(arrays[k], large)]
    if not _SHARED_FROM <= _size_of([arrays[k] for k in waiting]) <= MEMORY_LIMIT // 4 or sys.platform != "linux":
        waiting = []
    result, now = list(arrays), sorted({*moved} - {*waiting})
    is_worth_it = sys.platform == "linux" and HUGE_FROM <= _size_of([arrays[k] for k in now]) <= MEMORY_LIMIT // 4
    place = _side_by_side if is_worth_it else aligned
    for k, array in zip(now, place([arrays[k] for k in now]), strict=True):
        result[k] = array
    for file in files:
        _give_back(file, 0, min(_place(array, file) for array in arrays if _owner(array) is file))
    return tuple(result), tuple(waiting)


def _size_of(arrays: Sequence[np.ndarray]) -> int:
    """Bytes that they take side by side."""
    return sum(_aligned(array.nbytes) for array in arrays)


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
    result = _rooms(arrays)
    if _size_of(arrays) < _SHARED_FROM:
        list(map(_copy, arrays, result))
    else:  # most of the time goes to the system, for pages of the file and of memory, which several threads get faster
        with ThreadPoolExecutor(min(_MAX_COPIERS, default_num_threads())) as threads:
            list(threads.map(_copy_run, _runs(arrays, result)))
    for file in _mapped_files(arrays):
        _give_back(file, 0, len(file))  # the pages where arrays meet, and what was read before them
    for copy in result:
        copy.flags.writeable = False
    return result


def _rooms(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Room for copies, in one block. Raises OutOfMemoryError."""
    block = allocate(_size_of(arrays), "the weights")
    start, result = block.ptr - block.base, []
    for array in arrays:
        result.append(block.raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape))
        start += _aligned(array.nbytes)
    return result


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
    if not array.nbytes or not array.flags.c_contiguous:
        copy[...] = array
        return
    for start, end in _copy_pieces(array, copy):
        _give_back_part(array, start, end)


def _copy_pieces(array: np.ndarray, copy: np.ndarray) -> Iterator[tuple[int, int]]:
    """Copy a dense array piece by piece; the first byte and the end of each that is done."""
    source, target = (a.reshape(-1).view(np.uint8) for a in (array, copy))
    for start in range(0, len(source), _PIECE):
        end = min(start + _PIECE, len(source))
        target[start:end] = source[start:end]
        yield start, end


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


def _give_back_part(array: np.ndarray, start: int, end: int) -> None:
    """The same for these bytes of an array, where it is part of a mapped file."""
    file = _mapped_file(array)
    if file is not None:
        begin = _place(array, file)
        _give_back(file, begin + start, begin + end)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Constants:
    """The constants of an executable: as tensors, for the interpreter, and as the addresses that host functions read
    (again at each use)."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.addresses = (ctypes.c_int64 * max(len(tensors), 1))(*[tensor.ptr for tensor in tensors])
        self._mover: _Mover | None = None

    def move(self, numbers: Sequence[int]) -> None:
        """Begin to move these, which are parts of mapped files. Where no memory or thread can be had, they stay."""
        if numbers:
            largest_first = sorted(numbers, key=lambda number: -self.tensors[number].nbytes)
            mover = _Mover(self, largest_first)  # what is read while it is copied is in memory twice, until it is there
            with suppress(RuntimeError):
                mover.start()
                self._mover = mover

    def settle(self) -> None:
        """Wait until all have moved."""
        if self._mover is not None:
            self._mover.join()


class _Mover(threading.Thread):
    def __init__(self, constants: Constants, numbers: Sequence[int]) -> None:
        super().__init__(name="relaxlite-weights", daemon=True)
        self._tensors, self._addresses, self._numbers = constants.tensors, constants.addresses, numbers
        self._is_stopped = False

    def run(self) -> None:
        _movers.add(self)
        if sys.platform == "linux":  # where threads have priorities of their own
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        with suppress(OutOfMemoryError):
            self._move()

    def _move(self) -> None:
        owners = [self._tensors[number].owner for number in self._numbers]
        arrays = [owner for owner in owners if isinstance(owner, np.ndarray)]  # all of them
        for number, array, room in zip(self._numbers, arrays, _rooms(arrays), strict=True):
            for start, end in _copy_pieces(array, room):
                if self._is_stopped:
                    return
                _give_back_part(array, start, end)
            room.flags.writeable = False
            tensor = self._tensors[number]
            tensor.owner = room
            tensor.ptr = self._addresses[number] = room.ctypes.data
            _give_back_part(array, 0, array.nbytes)  # what calls have read meanwhile
        for file in _mapped_files(arrays):
            _give_back(file, 0, len(file))

    def stop(self) -> None:
        self._is_stopped = True
        self.join()


_movers: weakref.WeakSet[_Mover] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """No thread may copy while the process ends."""
    for mover in list(_movers):
        mover.stop()
