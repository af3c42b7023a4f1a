"""The memory of one executable on a GPU, with a stream and a pool of blocks of its own.

A block returns to the pool with its last reference. Work on the stream is in order, so the next user of the block comes
after what still reads it.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import OutOfMemoryError, RelaxliteError
from relaxlite.runtime.gpu.driver import Driver
from relaxlite.runtime.memory import POISON, Block, size_text, tensor_bytes
from relaxlite.runtime.tensor import Tensor, new_tensor

_GRAIN = 512  # bytes to which sizes of blocks are rounded up


class DeviceBlock:
    """A block of a GPU's memory (see `memory.Block`)."""

    __slots__ = ("nbytes", "pooled", "ptr", "space")

    def __init__(self, space: GpuSpace, ptr: int, nbytes: int, *, pooled: bool) -> None:
        self.space, self.ptr, self.nbytes, self.pooled = space, ptr, nbytes, pooled

    def poison(self) -> None:
        self.space.driver.fill(self.ptr, POISON, self.nbytes, self.space.stream)

    def __del__(self) -> None:
        self.space.give(self.ptr, self.nbytes)


class GpuSpace:
    """The memory of one executable (see `space.Space`)."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        driver.enter()
        self.stream = driver.new_stream()
        self._lock = threading.Lock()
        self._free: dict[int, list[int]] = {}  # size -> addresses

    def __del__(self) -> None:
        with suppress(RelaxliteError):  # the driver may be gone when the process ends
            self.release()

    def enter(self) -> None:
        self.driver.enter()

    def wait(self) -> None:
        self.driver.wait(self.stream)

    def take(self, nbytes: int, what: str, *, pooled: bool = False, poison: bool = False) -> DeviceBlock:
        """A block of at least `nbytes`. OutOfMemoryError."""
        size = max(-(-nbytes // _GRAIN) * _GRAIN, _GRAIN)
        with self._lock:
            addresses = self._free.get(size)
            address = addresses.pop() if addresses else None
        if address is None:
            address = self._allocate(size, what)
        block = DeviceBlock(self, address, size, pooled=pooled)
        if poison:
            block.poison()
        return block

    def _allocate(self, size: int, what: str) -> int:
        """New memory; where the device has none left, unused blocks are freed first."""
        for _ in range(2):
            try:
                return self.driver.allocate(size)
            except OutOfMemoryError:
                if not self.release():
                    break
        raise OutOfMemoryError(f"{what}: {self.driver.name} has no {size_text(size)} of memory left")

    def give(self, address: int, size: int) -> None:
        """Take a block back."""
        with self._lock:
            self._free.setdefault(size, []).append(address)

    def release(self) -> int:
        """Free unused blocks; returns their size in bytes."""
        with self._lock:
            free, self._free = self._free, {}
        self.driver.wait(self.stream)
        for addresses in free.values():
            for address in addresses:
                self.driver.free(address)
        return sum(size * len(addresses) for size, addresses in free.items())

    def arena(self, nbytes: int, what: str, *, poison: bool) -> Block:
        return self.take(nbytes, what, pooled=True, poison=poison)

    def new_tensor(self, shape: tuple[int, ...], dtype: str, what: str, *, poison: bool) -> Tensor:
        block = self.take(tensor_bytes(shape, dtype, what), what, poison=poison)
        return Tensor(block.ptr, shape, dtype, block)

    def constant(self, array: np.ndarray[Any, Any]) -> Tensor:
        dense = np.ascontiguousarray(array).reshape(array.shape)
        tensor = self.new_tensor(array.shape, dtypes.from_numpy(array.dtype) or "", "a constant", poison=False)
        if dense.nbytes:
            self.driver.upload(tensor.ptr, dense, self.stream)
        return tensor

    def import_tensor(self, tensor: Tensor) -> Tensor:
        result = self.new_tensor(tensor.shape, tensor.dtype, "an argument", poison=False)
        self.update(result, tensor)
        return result

    def update(self, target: Tensor, source: Tensor) -> None:
        if source.nbytes:
            self.driver.upload(target.ptr, source.numpy(), self.stream)

    def export_tensor(self, tensor: Tensor) -> Tensor:
        result = new_tensor(tensor.shape, tensor.dtype, "a result")
        self.write_back(tensor, result)
        return result

    def write_back(self, source: Tensor, target: Tensor) -> None:
        if source.nbytes:
            self.driver.download(source.ptr, target.numpy(), self.stream)

    def copy(self, tensor: Tensor) -> Tensor:
        result = self.new_tensor(tensor.shape, tensor.dtype, "a copy", poison=False)
        if tensor.nbytes:
            self.driver.copy(result.ptr, tensor.ptr, tensor.nbytes, self.stream)
        return result

    def read(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        return self.export_tensor(tensor).numpy()
