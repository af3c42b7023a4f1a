"""Calls of host functions: the bytecode of an entry as machine code, without Python work per instruction.

A call takes two or three steps, on a frame of 64-bit words that Python and native code share:

    i32 relaxlite_host_prepare(ptr arguments, ptr frame)   with the GIL: reads the tuple of arrays, checks shapes,
                                                           computes the sizes of results and arena
    i32 relaxlite_host_run(ptr frame)                      without the GIL: runs the kernels
    void relaxlite_host_finish(ptr frame)                  if run requests it: copies results to Python's arrays

On any failure, such as a wrong argument or a failed kernel, a host function gives up, and the bytecode interpreter runs
the call again. So errors are raised in one place, and results do not depend on how a model was run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import OutOfMemoryError
from relaxlite.records import dataclass
from relaxlite.runtime import array_reader, native
from relaxlite.runtime.executable import Entry, Signature
from relaxlite.runtime.memory import ALIGNMENT, HUGE_FROM, MEMORY_LIMIT, Memory, allocate, rounded_size
from relaxlite.runtime.tensor import export_array, new_tensor
from relaxlite.runtime.weights import Constants

PREPARE, RUN, FINISH = "relaxlite_host_prepare", "relaxlite_host_run", "relaxlite_host_finish"

# Statuses of prepare.
READY, REFUSED, READY_NEEDS_MEMORY = 0, 1, 2  # the last: the arena is too small, or a result is large
# Statuses of run.
DONE, DONE_WITH_COPIES, GAVE_UP = 0, 1, -1  # with copies: some results lie in memory that Python does not own

LARGE_RESULT = 1 << 16  # bytes; for larger results aligned memory pays for its cost (docs/measurements/backend.md)

# Words of a frame. Then follow address and dimensions of each input, the records of outputs, and the heap.
CONSTANTS, KERNELS, PLAN, LIMIT, POISON, ARENA, ARENA_BYTES, ARENA_NEEDED, INPUTS = range(9)
# Words of an output's record; the dimensions follow.
OUT_ARRAY, OUT_BYTES, OUT_RESULT, OUT_COPIED, OUT_OWNER, OUT_DIMS = range(6)


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """Offsets in words of each input, each output's record and the heap in a frame."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    heap: int

    @staticmethod
    def of(signature: Signature) -> FrameLayout:
        at, inputs, outputs = INPUTS, [], []
        for spec in signature.inputs:
            inputs.append(at)
            at += 1 + len(spec.shape)
        for spec in signature.outputs:
            outputs.append(at)
            at += OUT_DIMS + len(spec.shape)
        return FrameLayout(tuple(inputs), tuple(outputs), at)


class HostFailedError(Exception):
    """Raised where a host function has given up on a call, which the interpreter must run."""


class _Frame:
    """The frame of one call at a time, reused by later calls together with its arena."""

    __slots__ = ("address", "arena", "words")

    def __init__(self, head: Sequence[int], count: int) -> None:
        self.words = (ctypes.c_int64 * count)(*head)
        self.address = ctypes.addressof(self.words)
        self.arena: Memory | None = None


class HostFunction:
    """The loaded host function of an entry. Thread-safe: each concurrent call has its own frame."""

    def __init__(self, entry: Entry, kernels: Sequence[int], constants: Constants, *, poison: bool) -> None:
        """Load the code. `kernels`: addresses, in the order of the executable's kernels; `poison`: fill fresh memory
        with 0xFF bytes."""
        code, signature = entry.host, entry.signature
        layout = FrameLayout.of(signature)
        exports = (PREPARE, RUN, FINISH)
        self._library = native.load_objects((code.object_code,), array_reader.symbols(), exports=exports)
        address = self._library.address
        self._prepare = ctypes.PYFUNCTYPE(ctypes.c_int32, ctypes.py_object, ctypes.c_void_p)(address(PREPARE))
        self._run = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(address(RUN))
        self._finish = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address(FINISH))
        specs = zip(layout.outputs, signature.outputs, strict=True)
        self._outputs = [
            (at, at + OUT_DIMS, at + OUT_DIMS + len(spec.shape), dtypes.to_numpy(spec.dtype)) for at, spec in specs
        ]
        self._dtypes = [spec.dtype for spec in signature.outputs]
        self._poison, self._constants = poison, constants
        tables = [(ctypes.c_int64 * max(len(t), 1))(*t) for t in (kernels, _reader_plan(signature))]
        self._tables = [constants.addresses, *tables]
        self._head = [*map(ctypes.addressof, self._tables), MEMORY_LIMIT, int(poison)]
        self._num_words = layout.heap + code.heap_slots
        self._frames: list[_Frame] = []

    def __call__(self, arguments: tuple[Any, ...]) -> list[np.ndarray] | None:
        """Run the function on arrays in the model's order; returns the results.

        None where an argument is not a dense array of the signature's dtype and rank, or a donated one is read-only.
        HostFailedError where the interpreter must run the call.
        """
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = _Frame(self._head, self._num_words)
        state = self._prepare(arguments, frame.address)
        if state == READY:
            words, prepared = frame.words, []
            for at, first, last, dtype in self._outputs:
                array = np.empty(words[first:last], dtype)
                words[at] = id(array)
                prepared.append(array)
        elif state == REFUSED:
            self._frames.append(frame)
            return None
        else:
            prepared = self._allocate_memory(frame)
        results = prepared
        try:
            status = self._run(frame.address)
            if status > 0:
                results = self._allocate_copies(frame, prepared)
        except MemoryError as error:
            self._release_results(frame)
            raise HostFailedError from error
        except BaseException:  # KeyboardInterrupt is raised when run returns, before the status is assigned
            self._release_results(frame)
            raise
        if status > 0:
            self._finish(frame.address)
            for at, *_ in self._outputs:
                frame.words[at + OUT_OWNER] = 0  # invariant of unused frames, for `_release_results`
        self._frames.append(frame)
        if status < 0:
            raise HostFailedError
        return results

    def release_memory(self) -> int:
        """Free the arenas of unused frames; returns their size in bytes."""
        nbytes = 0
        while self._frames:
            arena = self._frames.pop().arena
            nbytes += arena.nbytes if arena is not None else 0
        return nbytes

    def _allocate_memory(self, frame: _Frame) -> list[np.ndarray]:
        """Grow the arena where it is too small, and allocate results in aligned memory. HostFailedError: out of
        memory."""
        words, results = frame.words, []
        try:
            if words[ARENA_BYTES] < words[ARENA_NEEDED]:
                words[ARENA_BYTES], frame.arena = 0, None
                frame.arena = allocate(rounded_size(words[ARENA_NEEDED]), "an arena", pooled=True)
                words[ARENA], words[ARENA_BYTES] = frame.arena.ptr, frame.arena.nbytes
            if self._poison and frame.arena is not None:
                frame.arena.poison()
            for (at, first, last, dtype), name in zip(self._outputs, self._dtypes, strict=True):
                shape = words[first:last]
                if words[at + OUT_BYTES] < HUGE_FROM and not self._poison:
                    results.append(_aligned(shape, dtype, words[at + OUT_BYTES]))
                else:
                    tensor = new_tensor(tuple(shape), name, "a result", poison=self._poison)
                    results.append(export_array(tensor, set()))
                words[at] = id(results[-1])
        except (OutOfMemoryError, MemoryError) as error:
            raise HostFailedError from error
        return results

    def _allocate_copies(self, frame: _Frame, prepared: list[np.ndarray]) -> list[np.ndarray]:
        """Allocate arrays for the results that finish must copy: those in an input, a constant, a block of the host
        function, or a prepared array of another shape or output. The sources live until finish has run."""
        words, results = frame.words, list(prepared)
        for number, (at, first, last, dtype) in enumerate(self._outputs):
            if words[at + OUT_COPIED]:
                results[number] = array = np.empty(words[first:last], dtype)
                words[at] = id(array)
        return results

    def _release_results(self, frame: _Frame) -> None:
        """Release the owners of results after a failed call, without copying, as prepared arrays may have other
        sizes."""
        for at, *_ in self._outputs:
            frame.words[at + OUT_COPIED] = 0
        self._finish(frame.address)


def _aligned(shape: Sequence[int], dtype: np.dtype[Any], nbytes: int) -> np.ndarray:
    """Uninitialized array at an ALIGNMENT boundary; cheaper than `new_tensor` and `export_array` when Python's caches
    are cold (docs/measurements/backend.md)."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    return np.ndarray(shape, dtype, raw, -ctypes.addressof(ctypes.c_char.from_buffer(raw.data)) % ALIGNMENT)


def _reader_plan(signature: Signature) -> list[int]:
    """Plan for relaxlite_read_arrays: count, array type, and (dtype, rank, required flags) of each input."""
    donated = set(signature.donated)
    expected = [
        (
            id(dtypes.to_numpy(spec.dtype)),
            len(spec.shape),
            array_reader.DENSE | (array_reader.WRITABLE if spec.name in donated else 0),
        )
        for spec in signature.inputs
    ]
    return [len(expected), id(np.ndarray), *(word for fields in expected for word in fields)]
