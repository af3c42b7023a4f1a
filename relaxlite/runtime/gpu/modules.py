"""The code of one executable on a GPU: its modules, and the cells that the host's parts of kernels read.

A kernel with checks has a status word on the device, into which threads store the status of a failed check. The words
are read when a call ends, and before the host reads data.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from relaxlite.runtime.executable import (
    LAUNCH_CELLS,
    LAUNCH_ROUTINE,
    STREAM_CELL,
    ExecutableData,
    KernelInfo,
    launch_symbol,
)
from relaxlite.runtime.gpu.space import DeviceBlock, GpuSpace

_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class DeviceModules:
    """Modules of an executable that are loaded on a device; unloaded with the last reference."""

    def __init__(self, data: ExecutableData, space: GpuSpace) -> None:
        self._space, self._driver = space, space.driver
        self._checked = [kernel for kernel in data.kernels.values() if kernel.launches and kernel.checks]
        self._statuses = space.new_tensor((max(len(self._checked), 1),), "int32", "status words", poison=False)
        self.forget_failures()
        self._modules = [self._driver.load(code) for code in data.device_modules]
        self._cells: dict[str, ctypes.c_uint64] = {STREAM_CELL: ctypes.c_uint64(space.stream)}
        for number, kernel in enumerate(self._checked):
            self._cells[LAUNCH_CELLS["status"] + kernel.symbol] = ctypes.c_uint64(self._statuses.ptr + 4 * number)
        with_launches = {kernel.symbol: kernel for kernel in data.kernels.values() if kernel.launches}
        for module, kernel in zip(self._modules, with_launches.values(), strict=True):
            for number in range(kernel.launches):
                name = launch_symbol(kernel.symbol, number)
                self._cells[LAUNCH_CELLS["function"] + name] = ctypes.c_uint64(self._driver.function(module, name))
        self._workspaces: dict[int, DeviceBlock] = {}
        self._callbacks = _ALLOCATE(self._allocate), _FREE(self._free)

    @property
    def symbols(self) -> Mapping[str, int]:
        """Addresses that the host's parts of kernels import: cells, the driver's launch, workspaces on the device."""
        allocate, free = (ctypes.cast(callback, ctypes.c_void_p).value or 0 for callback in self._callbacks)
        return {
            **{name: ctypes.addressof(cell) for name, cell in self._cells.items()},
            LAUNCH_ROUTINE: self._driver.launch_address,
            "relaxlite_scratch_alloc": allocate,
            "relaxlite_scratch_free": free,
        }

    def take_failure(self) -> tuple[KernelInfo, int] | None:
        """The first kernel of which a check failed since `forget_failures`, and its status; None where none failed."""
        if not self._checked:
            return None
        statuses = self._space.read(self._statuses)
        failed = np.flatnonzero(statuses)
        if not len(failed):
            return None
        return self._checked[int(failed[0])], int(statuses[failed[0]])

    def forget_failures(self) -> None:
        """Clear the status words."""
        self._driver.fill(self._statuses.ptr, 0, self._statuses.nbytes, self._space.stream)

    def _allocate(self, nbytes: int) -> int:
        try:
            block = self._space.take(nbytes, "a workspace")
        except MemoryError:  # exceptions must not propagate through machine code, which returns a status
            return 0
        self._workspaces[block.ptr] = block
        return block.ptr

    def _free(self, address: int) -> None:
        self._workspaces.pop(address, None)

    def __del__(self) -> None:
        for module in getattr(self, "_modules", ()):
            self._driver.unload(module)
