"""Machine code in memory: loads object code and links it to the thread pool, scratch memory and the C library.

Kernels may import `relaxlite_parallel_for` and the other symbols of threadpool.py, the two functions for scratch
memory, and mathematical functions of the C library. Anything else is an error that names the symbol.

On x86-64 Linux linker.py does it, elsewhere LLVM (jit.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

from relaxlite.errors import ArtifactError
from relaxlite.runtime import elf, jit, linker, scratch, threadpool
from relaxlite.runtime.elf import ElfObject

_LIBM = (
    "exp", "log", "log1p", "expm1", "exp2", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh",
    "acosh", "atanh", "tanh", "erf", "pow", "atan2", "fmod", "floor", "ceil", "trunc", "rint", "nearbyint", "roundeven",
    "fma", "ldexp",
)  # fmt: skip
# LLVM itself calls these where a target has no instruction for something, and for copies of memory.
_MEMORY = ("memcpy", "memset", "memmove")

_ELF_MACHINES = {"x86_64": elf.X86_64, "amd64": elf.X86_64, "aarch64": elf.AARCH64, "arm64": elf.AARCH64}


class NativeLibrary(Protocol):
    """Loaded object code. Its addresses are valid until `close`, or until the object is collected."""

    def address(self, symbol: str) -> int:
        """Where a function starts. ArtifactError when there is no such symbol."""

    def close(self) -> None:
        """Unload the code; nothing may be running in it."""


def load_objects(
    objects: Sequence[bytes], symbols: Mapping[str, int] | None = None, *, exports: Iterable[str] = ()
) -> NativeLibrary:
    """Link object files into this process as one library. `symbols`: names and addresses that they may use beside the
    usual ones. `exports`: what will be asked for; some linkers find it faster so.

    ArtifactError when the bytes are not object code for this machine, or need a symbol that is not there.
    """
    known = {**_imports(), **(symbols or {})}
    if sys.platform != "linux" and not all(code.startswith(elf.MAGIC) for code in objects):
        return jit.link_objects(objects, known, exports=exports)
    read = [_read(code) for code in objects]
    needed = dict.fromkeys(name for item in read for name in item.undefined)
    defined = {symbol.name for item in read for symbol in item.symbols if symbol.section != elf.UNDEFINED}
    missing = [name for name in needed if name not in known and name not in defined]
    if missing:
        raise ArtifactError(
            f"the object code needs {', '.join(missing)}, which neither the runtime nor the C library has"
        )
    if linker.is_supported():
        return linker.link(read, known)
    outside = {name: known[name] for name in needed if name not in defined}
    return jit.link_objects(objects, outside, exports=exports)


def _read(object_code: bytes) -> ElfObject:
    """ArtifactError when it is not for this machine: LLVM would abort the process on an object for another one."""
    item = elf.read_object(object_code)
    expected = _ELF_MACHINES.get(platform.machine().lower())
    if expected is not None and item.machine != expected:
        raise ArtifactError(
            f"the object code is for another architecture (ELF machine {item.machine}), this is {platform.machine()}"
        )
    return item


@cache
def _imports() -> dict[str, int]:
    """Everything that kernels may call."""
    return {**threadpool.symbols(), **scratch.symbols(), **_library_functions()}


def _library_functions() -> dict[str, int]:
    """The C library's mathematical functions, as double and as float; those that it lacks are left out."""
    libraries = _libraries()
    result: dict[str, int] = {}
    for name in (*_LIBM, *(f"{name}f" for name in _LIBM), *_MEMORY):
        function = next((getattr(library, name) for library in libraries if hasattr(library, name)), None)
        if function is not None:
            result[name] = _address_of(function)
    return result


def _libraries() -> list[Any]:
    if sys.platform == "win32":
        return [ctypes.cdll.ucrtbase]
    libraries = [ctypes.CDLL(None)]  # in most systems the interpreter has brought it
    with contextlib.suppress(OSError):
        libraries.insert(0, ctypes.CDLL("libm.so.6"))  # glibc's
    return libraries


def _address_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
