"""NVIDIA's driver, by ctypes on its library; no other package is needed."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import numpy as np

from relaxlite.errors import ArtifactError, ExecutionError, OutOfMemoryError

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_Pointer, _Size, _Int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (_Pointer, _Int),
    "cuDeviceGetName": (_Pointer, _Int, _Int),
    "cuDevicePrimaryCtxRetain": (_Pointer, _Int),
    "cuCtxSetCurrent": (_Pointer,),
    "cuStreamCreate": (_Pointer, ctypes.c_uint),
    "cuStreamSynchronize": (_Pointer,),
    "cuMemAlloc_v2": (_Pointer, _Size),
    "cuMemFree_v2": (_Pointer,),
    "cuMemcpyHtoDAsync_v2": (_Pointer, _Pointer, _Size, _Pointer),
    "cuMemcpyDtoHAsync_v2": (_Pointer, _Pointer, _Size, _Pointer),
    "cuMemcpyDtoDAsync_v2": (_Pointer, _Pointer, _Size, _Pointer),
    "cuMemsetD8Async": (_Pointer, ctypes.c_ubyte, _Size, _Pointer),
    "cuModuleLoadData": (_Pointer, ctypes.c_char_p),
    "cuModuleGetFunction": (_Pointer, _Pointer, ctypes.c_char_p),
    "cuModuleUnload": (_Pointer,),
    "cuGetErrorString": (_Int, _Pointer),
}


@cache
def open_driver() -> CudaDriver:
    """The driver of this machine's first GPU. ArtifactError says in one sentence what is missing."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise ArtifactError(f"the model runs on an NVIDIA GPU, whose driver ({_LIBRARY}) is not installed") from error
    return CudaDriver(library)


class CudaDriver:
    """The driver of one GPU, with its primary context (see `driver.Driver`)."""

    def __init__(self, library: Any) -> None:
        self._library = library
        for name, arguments in _SIGNATURES.items():
            getattr(library, name).argtypes = arguments
        self.launch_address = ctypes.cast(library.cuLaunchKernel, _Pointer).value or 0
        device, self._context, text = _Int(), _Pointer(), ctypes.create_string_buffer(256)
        try:
            self._call("cuInit", 0)
            self._call("cuDeviceGet", ctypes.byref(device), 0)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
            self._call("cuDeviceGetName", text, len(text), device)
        except ExecutionError as error:
            raise ArtifactError(f"the model runs on an NVIDIA GPU, which cannot be used here: {error}") from error
        self.name = text.value.decode()

    def _call(self, name: str, *args: Any) -> None:
        """Call a routine of the driver. OutOfMemoryError and ExecutionError with the driver's words."""
        code = getattr(self._library, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            kind = OutOfMemoryError if code == _OUT_OF_MEMORY else ExecutionError
            raise kind(f"{name}: {(text.value or b'unknown error').decode()} (CUDA error {code})")

    def _new(self, name: str, *args: Any) -> int:
        """The handle or address that a routine stores at its first argument."""
        result = _Pointer()
        self._call(name, ctypes.byref(result), *args)
        return result.value or 0

    def enter(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def new_stream(self) -> int:
        return self._new("cuStreamCreate", _NON_BLOCKING)

    def wait(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    def allocate(self, nbytes: int) -> int:
        return self._new("cuMemAlloc_v2", nbytes)

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", address)

    def upload(self, address: int, source: np.ndarray[Any, Any], stream: int) -> None:
        self._call("cuMemcpyHtoDAsync_v2", address, source.ctypes.data, source.nbytes, stream)
        self.wait(stream)

    def download(self, address: int, target: np.ndarray[Any, Any], stream: int) -> None:
        self._call("cuMemcpyDtoHAsync_v2", target.ctypes.data, address, target.nbytes, stream)
        self.wait(stream)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyDtoDAsync_v2", target, source, nbytes, stream)

    def fill(self, address: int, byte: int, nbytes: int, stream: int) -> None:
        self._call("cuMemsetD8Async", address, byte, nbytes, stream)

    def load(self, code: bytes) -> int:
        return self._new("cuModuleLoadData", code + b"\0")

    def function(self, module: int, name: str) -> int:
        return self._new("cuModuleGetFunction", module, name.encode())

    def unload(self, module: int) -> None:
        self._call("cuModuleUnload", module)
