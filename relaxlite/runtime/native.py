"""Machine code in memory: loads object code and links it to the thread pool, scratch memory and the C library.

Kernels may import `relaxlite_parallel_for` and the other symbols of threadpool.py, the two functions for scratch
memory, and mathematical functions of the C library. Anything else is an error that names the symbol.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import itertools
import platform
import struct
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import llvmlite.binding as llvm

from relaxlite.errors import ArtifactError
from relaxlite.runtime import scratch, threadpool

_LIBM = (
    "exp", "log", "log1p", "expm1", "exp2", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh",
    "acosh", "atanh", "tanh", "erf", "pow", "atan2", "fmod", "floor", "ceil", "trunc", "rint", "nearbyint", "roundeven",
    "fma", "ldexp",
)  # fmt: skip
# LLVM itself calls these where a target has no instruction for something, and for copies of memory.
_MEMORY = ("memcpy", "memset", "memmove")

_ELF_MACHINES = {"x86_64": 62, "amd64": 62, "aarch64": 183, "arm64": 183}
_ELF_SYMBOL_TABLE = 2

_numbers = itertools.count()
_lock = threading.Lock()


class NativeLibrary:
    """Loaded object code. Its addresses are valid until `close`, or until the object is collected."""

    def __init__(
        self, jit: llvm.orcjit.LLJIT, tracker: llvm.orcjit.ResourceTracker, name: str, addresses: dict[str, int]
    ) -> None:
        self._jit, self._tracker, self._name, self._addresses = jit, tracker, name, addresses

    def address(self, symbol: str) -> int:
        """Where a function starts. ArtifactError when there is no such symbol."""
        if self._tracker is None:
            raise ArtifactError(f"symbol {symbol!r} asked of a library that is closed")
        if symbol not in self._addresses:
            try:
                found = self._jit.lookup(self._name, symbol)
            except RuntimeError as error:
                raise ArtifactError(f"no function {symbol!r} can be had from the object code: {error}") from error
            self._addresses[symbol] = int(found[symbol])
            found.detach()  # closing it would unload the library
        return self._addresses[symbol]

    def close(self) -> None:
        """Unload the code; nothing may be running in it."""
        if self._tracker is not None:
            self._tracker.close()
            self._tracker = None
            self._addresses.clear()


def load_objects(
    objects: Sequence[bytes], symbols: Mapping[str, int] | None = None, *, exports: Iterable[str] = ()
) -> NativeLibrary:
    """Link object files into this process as one library. `symbols`: names and addresses that they may use beside the
    usual ones. `exports`: what will be asked for, looked up at once, which is faster than one by one.

    ArtifactError when the bytes are not object code for this machine, or need a symbol that is not there.
    """
    known = {**_imports(), **(symbols or {})}
    lists = [undefined_symbols(code) for code in objects]
    needed = None if None in lists else dict.fromkeys(name for names in lists for name in names or ())
    missing = [name for name in needed or () if name not in known]
    if missing:
        raise ArtifactError(
            f"the object code needs {', '.join(missing)}, which neither the runtime nor the C library has"
        )
    builder = llvm.JITLibraryBuilder()
    for code in objects:
        builder.add_object_img(code)
    for name in known if needed is None else needed:
        builder.import_symbol(name, known[name])
    wanted = tuple(dict.fromkeys(exports))
    for name in wanted:
        builder.export_symbol(name)
    with _lock:
        jit = _jit()
        library = f"relaxlite.{next(_numbers)}"
        try:
            tracker = builder.link(jit, library)
        except RuntimeError as error:
            raise ArtifactError(f"object code could not be linked: {error}") from error
    return NativeLibrary(jit, tracker, library, {name: int(tracker[name]) for name in wanted})


def undefined_symbols(object_code: bytes) -> tuple[str, ...] | None:
    """What an ELF object needs from outside; None for other formats. ArtifactError when it cannot be for this machine.

    LLVM would abort the process on an object for another architecture, so that is looked at here.
    """
    if not object_code.startswith(b"\x7fELF"):
        if sys.platform == "linux":
            raise ArtifactError("these bytes are not object code for Linux: they do not begin as an ELF file")
        return None
    try:
        return _elf_undefined(object_code)
    except (struct.error, ValueError, UnicodeDecodeError) as error:
        raise ArtifactError(f"the object code is truncated or corrupted: {error}") from error


def _elf_undefined(data: bytes) -> tuple[str, ...]:
    """The names in the symbol tables of a 64-bit ELF file whose section is 0 (System V ABI, chapter 4)."""
    architecture = struct.unpack_from("<H", data, 18)[0]
    expected = _ELF_MACHINES.get(platform.machine().lower())
    if expected is not None and architecture != expected:
        raise ArtifactError(
            f"the object code is for another architecture (ELF machine {architecture}), this is {platform.machine()}"
        )
    table, count = struct.unpack_from("<Q", data, 40)[0], struct.unpack_from("<H", data, 60)[0]
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + 64 * k) for k in range(count)]
    names: dict[str, None] = {}
    for _, kind, _, _, offset, size, link, _, _, _ in sections:
        if kind != _ELF_SYMBOL_TABLE:
            continue
        strings = sections[link][4] if link < count else len(data)
        for entry in range(offset + 24, offset + size, 24):  # the first is empty
            name, _, _, section = struct.unpack_from("<IBBH", data, entry)
            if section == 0:
                start = strings + name
                names[data[start : data.index(b"\0", start)].decode()] = None
    names.pop("_GLOBAL_OFFSET_TABLE_", None)  # which every linker makes itself
    return tuple(names)


@cache
def _jit() -> llvm.orcjit.LLJIT:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.create_lljit_compiler(suppress_errors=True)


@cache
def _imports() -> dict[str, int]:
    """Everything that kernels may call."""
    return {**threadpool.symbols(), **scratch.symbols(), **_library_functions()}


def _library_functions() -> dict[str, int]:
    """The C library's mathematical functions, as double and as float; those that it lacks are left out."""
    if sys.platform == "win32":
        libraries: list[Any] = [ctypes.cdll.ucrtbase]
    else:
        libraries = [ctypes.CDLL(ctypes.util.find_library("m")), ctypes.CDLL(None)]
    found: dict[str, int] = {}
    for name in (*_LIBM, *(f"{name}f" for name in _LIBM), *_MEMORY):
        function = next((getattr(library, name) for library in libraries if hasattr(library, name)), None)
        if function is not None:
            found[name] = _address_of(function)
    return found


def _address_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
