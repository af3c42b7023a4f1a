"""A simulated device: a driver whose memory is the process's, and which executes the PTX that it is given.

What a GPU leaves undefined is a fault here (execution.py). Addresses are real ones, so that the host may look at them.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections import Counter
from math import prod
from typing import Any

import numpy as np

from relaxlite.errors import OutOfMemoryError
from tests.gpu.execution import Execution, FaultError
from tests.gpu.ptx import Kernel, parse

LAUNCH_FAILED = 719  # CUDA_ERROR_LAUNCH_FAILED
MAX_LANES = 1 << 14  # that execute together; further blocks come after them
_ALIGNMENT = 256
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, *[ctypes.c_uint32] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)
_EPOCH = 1 << 32  # distance between the threads' numbers of two launches in the tables of accesses


class SimulatedDriver:
    """See runtime/gpu/driver.py. `size`: bytes of memory; `checks_races` and `counts_traffic` take most of the time.

    `fault`: what the last failed launch did wrong. `counts`: executed instructions by name, and with "#" traffic.
    """

    name = "the simulated device"

    def __init__(self, size: int = 1 << 26, *, checks_races: bool = True, counts_traffic: bool = True) -> None:
        raw = np.empty(size + _ALIGNMENT, np.uint8)
        self.memory = raw[-raw.ctypes.data % _ALIGNMENT :][:size]
        self.base = self.memory.ctypes.data
        self.checks_races, self.counts_traffic = checks_races, counts_traffic
        self.places: dict[int, int] = {}  # start -> end, as offsets
        self.starts = self.ends = np.empty(0, np.int64)
        self.modules: dict[int, list[int]] = {}
        self.kernels: dict[int, Kernel] = {}
        self.handles = 0
        self.counts: Counter[str] = Counter()
        self.launches = 0
        self.fault: Exception | None = None
        self.epoch = 0
        self.writer = self.reader = np.empty(0, np.int64)
        if checks_races:
            self.writer, self.reader = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self._callback = _LAUNCH(self._launch)
        self.launch_address = ctypes.cast(self._callback, ctypes.c_void_p).value or 0

    # Memory

    def enter(self) -> None:
        pass

    def new_stream(self) -> int:
        return 1

    def wait(self, stream: int) -> None:
        assert stream == 1

    def allocate(self, nbytes: int) -> int:
        starts, at = sorted(self.places), _ALIGNMENT
        for start in starts:
            if start - at >= nbytes + _ALIGNMENT:  # a gap, so that accesses beyond an end show
                break
            at = -(-self.places[start] // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT
        if at + nbytes > len(self.memory):
            raise OutOfMemoryError(f"no {nbytes} bytes are left")
        self.places[at] = at + nbytes
        self.memory[at : at + nbytes] = 0xFF
        self._index()
        return self.base + at

    def free(self, address: int) -> None:
        del self.places[address - self.base]
        self._index()

    def _index(self) -> None:
        self.starts = np.array(sorted(self.places), np.int64)
        self.ends = np.array([self.places[start] for start in self.starts], np.int64)

    def _bytes(self, address: int, count: int) -> np.ndarray[Any, Any]:
        at = address - self.base
        number = bisect_right(self.starts, at) - 1
        assert number >= 0 and at + count <= self.ends[number], "a copy outside of an allocation"
        return self.memory[at : at + count]

    def upload(self, address: int, source: np.ndarray[Any, Any], stream: int) -> None:
        self._bytes(address, source.nbytes)[:] = np.ascontiguousarray(source).reshape(-1).view(np.uint8)

    def download(self, address: int, target: np.ndarray[Any, Any], stream: int) -> None:
        target.reshape(-1).view(np.uint8)[:] = self._bytes(address, target.nbytes)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._bytes(target, nbytes)[:] = self._bytes(source, nbytes)

    def fill(self, address: int, byte: int, nbytes: int, stream: int) -> None:
        self._bytes(address, nbytes)[:] = byte

    # Code

    def load(self, code: bytes) -> int:
        kernels, tables = parse(code.decode())
        addresses = {}
        for name, table in tables.items():
            addresses[name] = self.allocate(table.nbytes)
            self.upload(addresses[name], table, 1)
        self.handles += 1
        module, functions = self.handles, []
        for kernel in kernels.values():
            self.handles += 1
            self.kernels[self.handles] = kernel
            kernel.symbols.update(addresses)
            functions.append(self.handles)
        self.modules[module] = functions
        return module

    def function(self, module: int, name: str) -> int:
        return next(handle for handle in self.modules[module] if self.kernels[handle].name == name)

    def unload(self, module: int) -> None:
        for handle in self.modules.pop(module):
            del self.kernels[handle]

    def _launch(self, function: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, *rest: int) -> int:
        _, stream, arguments, _ = rest
        try:
            assert stream == 1
            kernel = self.kernels[function]
            pointers = (ctypes.c_void_p * len(kernel.params)).from_address(arguments)
            values = [ctypes.c_uint64.from_address(p or 0).value for p in pointers]
            self.run(kernel, (gx, gy, gz), (bx, by, bz), values)
        except Exception as error:  # exceptions must not propagate through machine code
            self.fault = error
            return LAUNCH_FAILED
        return 0

    def run(self, kernel: Kernel, grid: tuple[int, ...], block: tuple[int, ...], values: list[int]) -> None:
        """Execute all blocks of a launch. FaultError."""
        if block != kernel.threads:
            raise FaultError(f"{kernel.name} wants blocks of {kernel.threads}, got {block}")
        if min(grid) < 1 or max(grid[1:]) > 65535:
            raise FaultError(f"{kernel.name} is launched with the grid {grid}")
        self.launches += 1
        self.epoch += _EPOCH
        step = max(1, MAX_LANES // prod(block))
        for first in range(0, prod(grid), step):
            blocks = np.arange(first, min(first + step, prod(grid)))
            Execution(self, kernel, grid, block, values, blocks).run()
