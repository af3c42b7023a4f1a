"""Runs a model through its host function: the bytecode of an entry as machine code, without Python per instruction.

A call takes two steps, on a frame of 64-bit words that Python and the machine code share:

    i32 relaxlite_host_prepare(ptr arguments, ptr frame)   with the GIL: reads the tuple of arrays, checks their shapes,
                                                           computes how much memory results and the arena need
    i32 relaxlite_host_run(ptr frame)                      without the GIL: runs the kernels
    void relaxlite_host_finish(ptr frame)                  where run asks for it: copies results to their arrays

Whatever a host function does not like, a wrong argument as much as a kernel that fails, it gives up on, and the
interpreter runs the call again: so there is one place that words errors, and results cannot depend on who ran a model.
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

# What prepare returns.
READY, REFUSED, READY_WITH_CARE = 0, 1, 2  # with care: the arena is too small, or a result is large
# What run returns.
DONE, DONE_WITH_COPIES, GAVE_UP = 0, 1, -1  # with copies: some results lie in memory that is not Python's

LARGE_RESULT = 1 << 16  # bytes from which aligned memory is worth its price of about 3 us

# Words of a frame. Inputs follow: address and dimensions of each. Then outputs, then the heap.
CONSTANTS, KERNELS, PLAN, LIMIT, POISON, ARENA, ARENA_BYTES, ARENA_NEEDED, INPUTS = range(9)
# Words of an output's record; its dimensions follow.
OUT_ARRAY, OUT_BYTES, OUT_RESULT, OUT_COPIED, OUT_OWNER, OUT_DIMS = range(6)


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """The words of a frame at which inputs, the record of each output, and the heap begin."""

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
    """The host function has given up on a call; the interpreter says why."""


class _Frame:
    """The words of one call at a time. It keeps its arena for the next call that takes the frame."""

    __slots__ = ("address", "arena", "words")

    def __init__(self, head: Sequence[int], count: int) -> None:
        self.words = (ctypes.c_int64 * count)(*head)
        self.address = ctypes.addressof(self.words)
        self.arena: Memory | None = None


class HostFunction:
    """The loaded host function of an executable. Several threads may call it at once: each call has a frame."""

    def __init__(self, entry: Entry, kernels: Sequence[int], constants: Constants, *, poison: bool) -> None:
        """`kernels`: addresses, in the order of the executable's."""
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
        tables = [(ctypes.c_int64 * max(len(t), 1))(*t) for t in (kernels, _reading_plan(signature))]
        self._tables = [constants.addresses, *tables]
        self._head = [*map(ctypes.addressof, self._tables), MEMORY_LIMIT, int(poison)]
        self._num_words = layout.heap + code.heap_slots
        self._frames: list[_Frame] = []

    def __call__(self, arguments: tuple[Any, ...]) -> list[np.ndarray] | None:
        """The results for arrays in the model's order; None when they are not just what the signature asks for, which
        donated ones are only where they may be written.

        Raises HostFailedError when the interpreter must run the call.
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
            prepared = self._make_room(frame)
        results = prepared
        try:
            status = self._run(frame.address)
            if status > 0:
                results = self._to_copy_into(frame, prepared)
        except MemoryError as error:
            self._let_go(frame)
            raise HostFailedError from error
        except BaseException:  # Ctrl-C during run shows when it returns, before its status is known
            self._let_go(frame)
            raise
        if status > 0:
            self._finish(frame.address)
            for at, *_ in self._outputs:
                frame.words[at + OUT_OWNER] = 0  # as `_let_go` expects of frames that are not in use
        self._frames.append(frame)
        if status < 0:
            raise HostFailedError
        return results

    def release_memory(self) -> int:
        """Give the arenas of frames that nobody uses back to the system; says how many bytes that were."""
        nbytes = 0
        while self._frames:
            arena = self._frames.pop().arena
            nbytes += arena.nbytes if arena is not None else 0
        return nbytes

    def _make_room(self, frame: _Frame) -> list[np.ndarray]:
        """An arena that is large enough, and results in aligned memory."""
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

    def _to_copy_into(self, frame: _Frame, prepared: list[np.ndarray]) -> list[np.ndarray]:
        """The results, with new arrays for those that lie elsewhere: in an input, a constant, a block of the host
        function, or in a prepared array of another shape or result. So all of those live until finish has copied."""
        words, results = frame.words, list(prepared)
        for number, (at, first, last, dtype) in enumerate(self._outputs):
            if words[at + OUT_COPIED]:
                results[number] = array = np.empty(words[first:last], dtype)
                words[at] = id(array)
        return results

    def _let_go(self, frame: _Frame) -> None:
        """Free what run has kept for results, wherever a call has ended. Nothing is copied: the arrays may be those
        that were prepared, for other sizes."""
        for at, *_ in self._outputs:
            frame.words[at + OUT_COPIED] = 0
        self._finish(frame.address)


def _aligned(shape: Sequence[int], dtype: np.dtype[Any], nbytes: int) -> np.ndarray:
    """An array of unknown contents, in few operations: behind a step of a language model, whose weights have gone
    through all caches, `new_tensor` and `export_array` take 45 us, and this 10."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    return np.ndarray(shape, dtype, raw, -ctypes.addressof(ctypes.c_char.from_buffer(raw.data)) % ALIGNMENT)


def _reading_plan(signature: Signature) -> list[int]:
    """What relaxlite_read_arrays is to expect."""
    donated = set(signature.donated)
    kinds = [
        (
            id(dtypes.to_numpy(spec.dtype)),
            len(spec.shape),
            array_reader.DENSE | (array_reader.WRITABLE if spec.name in donated else 0),
        )
        for spec in signature.inputs
    ]
    return [len(kinds), id(np.ndarray), *(word for kind in kinds for word in kind)]
