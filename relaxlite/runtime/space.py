"""Memory spaces: where an executable's tensors lie, and how the host reads and writes them.

The interpreter of bytecode (vm.py) allocates and copies tensors by a space only. `HostSpace` is the process's memory;
runtime/gpu/space.py is that of a GPU.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from relaxlite.runtime.memory import Block, new_arena
from relaxlite.runtime.tensor import Tensor, copy, import_tensor, new_tensor


class Space(Protocol):
    """A memory space. OutOfMemoryError, whose message begins with `what`, where it has no memory left."""

    def enter(self) -> None:
        """Prepare this thread for work in the space."""

    def wait(self) -> None:
        """Wait until the work that kernels have started has ended."""

    def arena(self, nbytes: int, what: str, *, poison: bool) -> Block:
        """A block for a pool of arenas."""

    def new_tensor(self, shape: tuple[int, ...], dtype: str, what: str, *, poison: bool) -> Tensor: ...

    def constant(self, array: np.ndarray[Any, Any]) -> Tensor:
        """A tensor of the space with the values of an array, which lives as long as the executable."""

    def import_tensor(self, tensor: Tensor) -> Tensor:
        """A tensor of the space with the values of a tensor of the host."""

    def export_tensor(self, tensor: Tensor) -> Tensor:
        """A tensor of the host with the values of a tensor of the space; both may be one."""

    def write_back(self, source: Tensor, target: Tensor) -> None:
        """Store a tensor of the space into the tensor of the host from which it was imported."""

    def update(self, target: Tensor, source: Tensor) -> None:
        """Store a tensor of the host into the tensor of the space from which it was exported."""

    def copy(self, tensor: Tensor) -> Tensor: ...

    def read(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """The values of a tensor, once the work that computes them has ended."""


class HostSpace:
    """The memory of the process."""

    def enter(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def arena(self, nbytes: int, what: str, *, poison: bool) -> Block:
        return new_arena(nbytes, what, poison=poison)

    def new_tensor(self, shape: tuple[int, ...], dtype: str, what: str, *, poison: bool) -> Tensor:
        return new_tensor(shape, dtype, what, poison=poison)

    def constant(self, array: np.ndarray[Any, Any]) -> Tensor:
        return import_tensor(array, array.dtype.name, "a constant")

    def import_tensor(self, tensor: Tensor) -> Tensor:
        return tensor

    def export_tensor(self, tensor: Tensor) -> Tensor:
        return tensor

    def write_back(self, source: Tensor, target: Tensor) -> None:
        pass

    def update(self, target: Tensor, source: Tensor) -> None:
        pass

    def copy(self, tensor: Tensor) -> Tensor:
        return copy(tensor)

    def read(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        return tensor.numpy()
