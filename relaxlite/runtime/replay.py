"""Record the kernel calls of one run and replay them on the same buffers, to measure kernels alone.

    recorder = Recorder(exe.data)
    replay = recorder.record({"x": x})
    replay.calls             # kernels and symbol values, in order
    replay.run()             # repeat all calls, in order

Programs that compute sizes are not recorded, as the recorded symbol values are their results.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from relaxlite.errors import ExecutionError
from relaxlite.records import dataclass
from relaxlite.runtime.executable import ENTRY, ExecutableData
from relaxlite.runtime.tensor import export_array, import_tensor
from relaxlite.runtime.vm import KernelFunction, VirtualMachine

_HEAP_BYTES = 1 << 16  # upper bound of a model's shape heap


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A recorded call of a kernel."""

    kernel: str
    symbols: tuple[int, ...]  # values of the program's symbols, in order


class Recorder:
    """Links an executable's kernels once, and records any number of runs."""

    def __init__(self, data: ExecutableData) -> None:
        self._data = data
        self._vm = VirtualMachine(data)

    def record(self, inputs: Mapping[str, Any]) -> Replay:
        """Run the model on named inputs and record its kernel calls. Raises as `Executable.run` does."""
        tape: list[_Recorded] = []
        kernels = {name: self._recording(name, kernel, tape) for name, kernel in self._vm.kernels.items()}
        vm = VirtualMachine(self._data, kernels=kernels)
        specs = self._data.signature.inputs
        tensors = [import_tensor(inputs[spec.name], spec.dtype, f"argument '{spec.name}'") for spec in specs]
        result = vm.run(ENTRY, tensors)
        return Replay(tape, result if isinstance(result, tuple) else (result,), (self._vm, vm, tensors))

    def _recording(self, name: str, kernel: KernelFunction, tape: list[_Recorded]) -> KernelFunction:
        count = self._data.kernels[name].num_symbols or 0

        def call(buffers: bytes, symbols: int) -> int:
            first = int.from_bytes(buffers[:8], sys.byteorder)
            if not 0 <= symbols - first < _HEAP_BYTES:  # else a program that computes sizes, whose buffer is the heap
                tape.append(_Recorded(name, kernel, buffers, ctypes.string_at(symbols, 8 * count) if count else b""))
            return kernel(buffers, symbols)

        return call


@dataclass(frozen=True, slots=True)
class _Recorded:
    name: str
    kernel: KernelFunction
    buffers: bytes
    symbols: bytes


class Replay:
    """The recorded calls of a run. `outputs`: of the recorded run; a replay may overwrite them."""

    def __init__(self, tape: list[_Recorded], results: tuple[Any, ...], owners: object) -> None:
        self._owners = owners, results  # keeps the memory of recorded addresses alive
        self._symbols = [np.frombuffer(item.symbols or bytes(8), np.int64) for item in tape]
        self._tape = [
            (item.kernel, item.buffers, symbols.ctypes.data) for item, symbols in zip(tape, self._symbols, strict=True)
        ]
        self.calls = tuple(
            KernelCall(item.name, tuple(int(s) for s in symbols[: len(item.symbols) // 8]))
            for item, symbols in zip(tape, self._symbols, strict=True)
        )
        exported: set[int] = set()
        self.outputs = [export_array(tensor, exported) for tensor in results]

    def run(self) -> None:
        """Repeat all calls in order. ExecutionError where a kernel fails."""
        for kernel, buffers, symbols in self._tape:
            if kernel(buffers, symbols):
                raise ExecutionError("a recorded kernel failed when it was called again")

    def seconds(self) -> list[float]:
        """Repeat all calls in order; returns the seconds of each."""
        times = []
        for kernel, buffers, symbols in self._tape:
            start = time.perf_counter()
            kernel(buffers, symbols)
            times.append(time.perf_counter() - start)
        return times
