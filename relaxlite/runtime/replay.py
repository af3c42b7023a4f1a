"""The kernel calls of one run, made again with the same sizes and buffers: kernels without what is around them.

    recorder = Recorder(exe.data)
    replay = recorder.record({"x": x})
    replay.calls             # which kernels ran, at which sizes
    replay.run()             # all of them again, in order

For measurements. The programs that compute sizes are left out, as the recording holds what they computed.
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
from relaxlite.runtime.vm import Kernel, VirtualMachine

_HEAP_BYTES = 1 << 16  # more than the sizes of any model take


@dataclass(frozen=True, slots=True)
class KernelCall:
    kernel: str
    symbols: tuple[int, ...]  # the values of the program's symbols, in their order


class Recorder:
    """Links an executable's kernels once; records as many runs as are wanted."""

    def __init__(self, data: ExecutableData) -> None:
        self._data = data
        self._vm = VirtualMachine(data)

    def record(self, inputs: Mapping[str, Any]) -> Replay:
        """Run the model on inputs that fit its signature (see `Executable.run`). Raises as running does."""
        tape: list[_Recorded] = []
        kernels = {name: self._recording(name, kernel, tape) for name, kernel in self._vm.kernels.items()}
        vm = VirtualMachine(self._data, kernels=kernels)
        specs = self._data.signature.inputs
        tensors = [import_tensor(inputs[spec.name], spec.dtype, f"argument '{spec.name}'") for spec in specs]
        result = vm.run(ENTRY, tensors)
        return Replay(tape, result if isinstance(result, tuple) else (result,), (self._vm, vm, tensors))

    def _recording(self, name: str, kernel: Kernel, tape: list[_Recorded]) -> Kernel:
        count = self._data.kernels[name].num_symbols or 0

        def call(buffers: bytes, symbols: int) -> int:
            first = int.from_bytes(buffers[:8], sys.byteorder)
            if not 0 <= symbols - first < _HEAP_BYTES:  # else the heap is its buffer, which ends with the run
                tape.append(_Recorded(name, kernel, buffers, ctypes.string_at(symbols, 8 * count) if count else b""))
            return kernel(buffers, symbols)

        return call


@dataclass(frozen=True, slots=True)
class _Recorded:
    name: str
    kernel: Kernel
    buffers: bytes
    symbols: bytes


class Replay:
    """`outputs` are those of the recorded run, where a kernel's last result may also be."""

    def __init__(self, tape: list[_Recorded], results: tuple[Any, ...], kept: object) -> None:
        self._kept = kept, results  # all that the recorded addresses point to
        self._symbols = [np.frombuffer(item.symbols or bytes(8), np.int64) for item in tape]
        self._tape = [
            (item.kernel, item.buffers, symbols.ctypes.data) for item, symbols in zip(tape, self._symbols, strict=True)
        ]
        self.calls = tuple(
            KernelCall(item.name, tuple(int(s) for s in symbols[: len(item.symbols) // 8]))
            for item, symbols in zip(tape, self._symbols, strict=True)
        )
        given: set[int] = set()
        self.outputs = [export_array(tensor, given) for tensor in results]

    def run(self) -> None:
        """All calls. ExecutionError when a kernel fails, which it did not when it was recorded."""
        for kernel, buffers, symbols in self._tape:
            if kernel(buffers, symbols):
                raise ExecutionError("a recorded kernel failed when it was called again")

    def seconds(self) -> list[float]:
        """All calls, and how long each took."""
        times = []
        for kernel, buffers, symbols in self._tape:
            start = time.perf_counter()
            kernel(buffers, symbols)
            times.append(time.perf_counter() - start)
        return times
