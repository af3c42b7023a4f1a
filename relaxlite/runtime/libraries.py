"""Library routines that kernels call: C functions of shared libraries, and registered Python functions.

Kernels load the address of a routine from its cell, an 8-byte word that is filled in when a model is loaded. A missing
routine leaves the cell null where the model has a fallback kernel; else it is an error.

A Python function is called as i32(ptr addresses, ptr words). The words: their count, then for each operand its dtype
(index in dtypes.ALL), whether it is written, its rank and its dimensions.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import re
import struct
import sys
import threading
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from relaxlite import config, dtypes
from relaxlite.errors import LibraryError
from relaxlite.records import dataclass
from relaxlite.runtime.executable import LibraryInfo
from relaxlite.runtime.host_operators import host_routines
from relaxlite.runtime.tensor import Tensor

PYTHON, OPENBLAS = "python", "openblas"  # names of libraries that are not files
AMX = "amx"  # AMX instructions, which need the system's permission

_REQUEST_AMX_TILES = 158, 0x1023, 18  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) on x86-64

_ROUTINE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
_functions: dict[str, Callable[..., None]] = {}
_failure = threading.local()


def register_function(name: str, function: Callable[..., None]) -> None:
    """Register a Python function for models that are loaded later.

    The function takes NumPy arrays, valid during the call only: inputs (read-only), then outputs, which it fills in.
    """
    _functions[name] = function


def unregister_function(name: str) -> None:
    """Remove a registered function; loaded models keep it."""
    _functions.pop(name, None)


def registered_functions() -> dict[str, Callable[..., None]]:
    """Registered functions by name, the runtime's own among them."""
    return {**host_routines(), **_functions}


def registered_function(name: str) -> Callable[..., None] | None:
    """The function registered under a name, or one of the runtime's own."""
    return _functions.get(name) or host_routines().get(name)


def cell_name(library: str, symbol: str) -> str:
    """Unique symbol name of a routine's cell in object code."""
    return f"relaxlite_library.{_encoded(library)}.{_encoded(symbol)}"


def _encoded(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", lambda sign: f"_{ord(sign[0]):x}_", name)


@dataclass(frozen=True, slots=True)
class BoundRoutines:
    """Cells of a model's routines; they, and the Python functions in them, stay valid while this object lives."""

    cells: dict[str, int]  # name -> address
    missing: tuple[str, ...]  # reasons for missing routines that have fallback kernels
    references: tuple[object, ...]


def bind(libraries: Iterable[LibraryInfo]) -> BoundRoutines:
    """Resolve the routines of libraries. LibraryError for a missing routine without a fallback kernel."""
    cells: dict[str, int] = {}
    missing: list[str] = []
    references: list[object] = []
    for info in libraries:
        for symbol in info.symbols:
            try:
                address, owner = _routine(info, symbol)
            except LibraryError as error:
                if symbol in info.required:
                    raise
                missing.append(str(error))
                address, owner = 0, None
            cell = ctypes.c_uint64(address)
            cells[cell_name(info.name, symbol)] = ctypes.addressof(cell)
            references += [cell, owner]
    return BoundRoutines(cells, tuple(missing), tuple(references))


def require_library(name: str, file: str = "", *symbols: str) -> None:
    """Raise LibraryError unless a library exists and has the symbols."""
    library = _open(name, file)
    for symbol in symbols:
        _symbol(library, name, symbol)


def has_openblas() -> bool:
    """Whether OpenBLAS is installed, without loading it, which is slow (docs/measurements/backend.md)."""
    return importlib.util.find_spec("scipy_openblas32") is not None


def _routine(info: LibraryInfo, symbol: str) -> tuple[int, object]:
    if info.name == PYTHON:
        function = _functions.get(symbol)
        if function is None:
            raise LibraryError(
                f"the model calls the Python function '{symbol}', which is not registered; call "
                f"relaxlite.register_function('{symbol}', function) before loading it"
            )
        routine = _ROUTINE(_trampoline(function))
        return ctypes.cast(routine, ctypes.c_void_p).value or 0, routine
    if info.name == AMX:
        _request_amx_permission()
        return 1, None
    library = _open(info.name, info.file)
    return _symbol(library, info.name, symbol), library


@cache
def _request_amx_permission() -> None:
    """Request permission for AMX tile state from Linux, once per process. LibraryError where it is denied."""
    permitted = sys.platform == "linux" and ctypes.CDLL(None).syscall(*_REQUEST_AMX_TILES) == 0
    if not permitted:
        raise LibraryError(
            "the system does not let this process use AMX tiles; kernels go without them, which is slower"
        )


def _symbol(library: ctypes.CDLL, name: str, symbol: str) -> int:
    for spelling in ("scipy_" + symbol, symbol) if name == OPENBLAS else (symbol,):
        if hasattr(library, spelling):
            return ctypes.cast(getattr(library, spelling), ctypes.c_void_p).value or 0
    raise LibraryError(
        f"the library '{name}' ({library._name}) has no symbol '{symbol}'; check its spelling, and for a C++ library "
        f'that it is declared extern "C"'
    )


def _open(name: str, file: str) -> ctypes.CDLL:
    if name == OPENBLAS:
        return _open_openblas()
    if not file:
        raise LibraryError(f"nothing says where the library '{name}' is; relaxlite.register_library(library=...) does")
    candidates = [
        str(Path(folder, Path(file).name)) for folder in config.get("library_path").split(os.pathsep) if folder
    ]
    for path in [p for p in candidates if os.path.exists(p)] or [file]:
        try:
            return _load_shared_library(path)
        except OSError as error:
            problem = str(error)
    raise LibraryError(
        f"the library '{name}' cannot be loaded from {file!r} ({problem}); put it there, or name the folder that holds "
        f"it in RELAXLITE_LIBRARY_PATH"
    )


@cache
def _load_shared_library(place: str) -> ctypes.CDLL:
    return ctypes.CDLL(place)


@cache
def _open_openblas() -> ctypes.CDLL:
    """Load OpenBLAS with one thread, as kernels distribute work over threads themselves.

    The package has its own copy of OpenBLAS, so other users of OpenBLAS in this process are not affected.
    """
    try:
        with config.system_variables(OPENBLAS_NUM_THREADS="1"):  # starts no threads
            package = importlib.import_module("scipy_openblas32")  # importing loads the library
            folder = package.get_lib_dir()
            library = ctypes.CDLL(os.path.join(folder, _shared_library(os.listdir(folder))))
    except ImportError as error:
        raise LibraryError(
            "the library 'openblas' is not installed (package scipy-openblas32); pip install 'relaxlite[openblas]'"
        ) from error
    except OSError as error:
        raise LibraryError(f"OpenBLAS of scipy-openblas32 cannot be loaded ({error}); install it again") from error
    for name in ("scipy_openblas_set_num_threads", "openblas_set_num_threads"):
        if hasattr(library, name):
            getattr(library, name)(1)
    return library


def _shared_library(files: Iterable[str]) -> str:
    names = [name for name in files if re.fullmatch(r"libscipy_openblas.*\.(so|dylib|dll)", name)]
    if not names:
        raise OSError("its folder holds no shared library")
    return names[0]


def take_failure() -> BaseException | None:
    """Return and clear the exception that a Python function raised in the last failed kernel of this thread."""
    error = getattr(_failure, "error", None)
    _failure.error = None
    return error


def _trampoline(function: Callable[..., None]) -> Callable[[int, int], int]:
    def call(addresses: int, words: int) -> int:
        try:
            result: object = function(*_unpack_arrays(addresses, words))  # type: ignore[func-returns-value]
            if result is not None:
                raise TypeError("it returned a value; it must write its result into its last arguments")
            return 0
        except BaseException as error:  # exceptions must not propagate through machine code; see take_failure
            _failure.error = error
            return 1

    return call


def _unpack_arrays(addresses: int, words: int) -> list[Any]:
    """Decode operands to NumPy arrays; reads both tables in bulk, as ctypes is slow per element."""
    count = ctypes.c_int64.from_address(words).value
    descriptors = struct.unpack(f"{count}q", ctypes.string_at(words + 8, 8 * count))
    operands, at = [], 0
    while at < count:
        dtype_index, is_written, rank = descriptors[at : at + 3]
        operands.append((dtypes.ALL[dtype_index], bool(is_written), descriptors[at + 3 : at + 3 + rank]))
        at += 3 + rank
    pointers = struct.unpack(f"{len(operands)}Q", ctypes.string_at(addresses, 8 * len(operands)))
    arrays = []
    for pointer, (dtype, is_written, shape) in zip(pointers, operands, strict=True):
        array = Tensor(pointer, shape, dtype, None).numpy()
        array.flags.writeable = is_written
        arrays.append(array)
    return arrays
