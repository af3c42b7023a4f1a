"""Load object code and link it to the thread pool, scratch memory and the C library.

Kernels may import `relaxlite_parallel_for` and the other symbols of threadpool.py, the two functions of scratch.py, and
mathematical functions of libm. An import of any other symbol is an error.

linker.py links on x86-64 Linux, LLVM elsewhere (jit.py).
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
# LLVM generates calls of these.
_MEMORY = ("memcpy", "memset", "memmove")

_ELF_MACHINES = {"x86_64": elf.X86_64, "amd64": elf.X86_64, "aarch64": elf.AARCH64, "arm64": elf.AARCH64}


class NativeLibrary(Protocol):
    """Loaded object code. Addresses are valid until `close`, or until the object is garbage-collected."""

    def address(self, symbol: str) -> int:
        """Address of a function. ArtifactError where the symbol is not defined."""

    def close(self) -> None:
        """Unload the code, which must not be running."""


def load_objects(
    objects: Sequence[bytes], symbols: Mapping[str, int] | None = None, *, exports: Iterable[str] = ()
) -> NativeLibrary:
    """Link object files into this process as one library.

    `symbols`: addresses of further external symbols by name. `exports`: symbols that will be looked up, for linkers
    with bulk lookup. ArtifactError for object code of another machine, and undefined symbols.
    """
    imports = {**_imports(), **(symbols or {})}
    if sys.platform != "linux" and not all(code.startswith(elf.MAGIC) for code in objects):
        return jit.link_objects(objects, imports, exports=exports)
    parsed = [_parse(code) for code in objects]
    needed = dict.fromkeys(name for item in parsed for name in item.undefined)
    defined = {symbol.name for item in parsed for symbol in item.symbols if symbol.section != elf.UNDEFINED}
    missing = [name for name in needed if name not in imports and name not in defined]
    if missing:
        raise ArtifactError(
            f"the object code needs {', '.join(missing)}, which neither the runtime nor the C library has"
        )
    if linker.is_supported():
        return linker.link(parsed, imports)
    external = {name: imports[name] for name in needed if name not in defined}
    return jit.link_objects(objects, external, exports=exports)


def _parse(object_code: bytes) -> ElfObject:
    """Parse an object. ArtifactError for another machine, on whose objects LLVM would abort the process."""
    item = elf.read_object(object_code)
    expected = _ELF_MACHINES.get(platform.machine().lower())
    if expected is not None and item.machine != expected:
        raise ArtifactError(
            f"the object code is for another architecture (ELF machine {item.machine}), this is {platform.machine()}"
        )
    return item


@cache
def _imports() -> dict[str, int]:
    """Addresses of all symbols that kernels may import."""
    return {**threadpool.symbols(), **scratch.symbols(), **_library_functions()}


def _library_functions() -> dict[str, int]:
    """Addresses of libm functions, for double and float, as far as the C library has them."""
    libraries = _libraries()
    addresses: dict[str, int] = {}
    for name in (*_LIBM, *(f"{name}f" for name in _LIBM), *_MEMORY):
        function = next((getattr(library, name) for library in libraries if hasattr(library, name)), None)
        if function is not None:
            addresses[name] = _address_of(function)
    return addresses


def _libraries() -> list[Any]:
    if sys.platform == "win32":
        return [ctypes.cdll.ucrtbase]
    libraries = [ctypes.CDLL(None)]  # on most systems Python has loaded libm
    with contextlib.suppress(OSError):
        libraries.insert(0, ctypes.CDLL("libm.so.6"))  # glibc's
    return libraries


def _address_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
