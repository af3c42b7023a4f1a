"""The interface of drivers: memory, code and launches of one device. Addresses and handles are integers.

Tests run models on a simulated device, which they make known with `use_driver`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from relaxlite.runtime.gpu.cuda import open_driver


class Driver(Protocol):
    """A driver. Work on a stream is in order; copies between host and device have ended when they return.

    OutOfMemoryError where the device has no memory left, ExecutionError where an operation fails.
    """

    name: str
    launch_address: int
    """Address of cuLaunchKernel, or of a function with its parameters."""

    def enter(self) -> None:
        """Make the device current for this thread."""

    def new_stream(self) -> int: ...

    def wait(self, stream: int) -> None:
        """Wait until the work on a stream has ended."""

    def allocate(self, nbytes: int) -> int:
        """Address of new memory, aligned to 256 bytes."""

    def free(self, address: int) -> None: ...

    def upload(self, address: int, source: np.ndarray[Any, Any], stream: int) -> None: ...

    def download(self, address: int, target: np.ndarray[Any, Any], stream: int) -> None: ...

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None: ...

    def fill(self, address: int, byte: int, nbytes: int, stream: int) -> None: ...

    def load(self, code: bytes) -> int:
        """Handle of a module of PTX."""

    def function(self, module: int, name: str) -> int:
        """Handle of a function of a module."""

    def unload(self, module: int) -> None: ...


_driver: Driver | None = None


def current_driver() -> Driver:
    """The driver that runs models: the one of `use_driver`, else NVIDIA's. ArtifactError says what is missing."""
    return _driver if _driver is not None else open_driver()


@contextmanager
def use_driver(driver: Driver) -> Iterator[None]:
    """Run models that are loaded inside of the `with` block by another driver."""
    global _driver
    outer, _driver = _driver, driver
    try:
        yield
    finally:
        _driver = outer
