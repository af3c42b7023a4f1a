"""Memory for machine code: written first, then executed; never writable and executable at once (POSIX)."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import cache
from typing import Any

from relaxlite.errors import ArtifactError, OutOfMemoryError

READ_ONLY, EXECUTABLE = mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_EXEC
_WRITABLE = mmap.PROT_READ | mmap.PROT_WRITE
_FAILED = (1 << 8 * ctypes.sizeof(ctypes.c_void_p)) - 1


class CodeMemory:
    """A private mapping of zeroed pages, writable until `protect`. Unmapped by `free`, or with the last reference.

    Not unmapped at process exit, as threads may still execute the code. OutOfMemoryError where mmap fails.
    """

    def __init__(self, nbytes: int) -> None:
        size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        address = _libc().mmap(None, size, _WRITABLE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if address in (None, _FAILED):
            raise OutOfMemoryError(f"the system has no {size} bytes of memory for machine code: {_last_error()}")
        self.address: int = address
        self.bytes = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
        self.free = weakref.finalize(self, _libc().munmap, address, size)
        self.free.atexit = False

    def protect(self, start: int, nbytes: int, access: int) -> None:
        """Set the protection of the pages from `start`, a multiple of the page size, to READ_ONLY or EXECUTABLE.

        ArtifactError where the system forbids executable memory.
        """
        if nbytes and _libc().mprotect(self.address + start, nbytes, access):
            raise ArtifactError(
                f"the system does not let this process run machine code that it has loaded ({_last_error()}); "
                "look for what forbids executable memory, as a rule of SELinux or of the container"
            )

    def keep(self) -> None:
        """Never unmap the memory."""
        self.free.detach()


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    word, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype, libc.mmap.argtypes = word, (word, size, number, number, number, ctypes.c_long)
    libc.mprotect.argtypes = (word, size, number)
    libc.munmap.argtypes = (word, size)
    return libc


def _last_error() -> str:
    return os.strerror(ctypes.get_errno())
