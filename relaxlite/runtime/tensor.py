"""The runtime's tensor, and conversions from and to NumPy, DLPack and Python lists.

Tensors are dense and row-major. Inputs that are dense CPU memory of the right dtype are not copied; outputs are NumPy
arrays that own their memory.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import InputError, OutOfMemoryError
from relaxlite.runtime.memory import Memory, allocate, tensor_bytes

_CPU_DEVICES = {1: "CPU", 3: "CUDA pinned host", 11: "ROCm pinned host", 13: "CUDA managed"}
_OTHER_DEVICES = {2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 14: "oneAPI", 15: "WebGPU"}
_DL_BFLOAT, _DL_UINT = 4, 1
_DL_DTYPE_OFFSET = 20  # DLManagedTensor: data 0, device 8, ndim 16, dtype 20 (code, bits, lanes), ...


class Tensor:
    """A dense, row-major tensor at address `ptr`. `owner` keeps the memory alive: a Memory or a NumPy array."""

    __slots__ = ("dtype", "owner", "ptr", "shape")

    def __init__(self, ptr: int, shape: tuple[int, ...], dtype: str, owner: object) -> None:
        self.ptr, self.shape, self.dtype, self.owner = ptr, shape, dtype, owner

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * dtypes.itemsize(self.dtype)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        owner = self.owner
        read_only = isinstance(owner, np.ndarray) and not owner.flags.writeable
        stored = _stored_dtype(self.dtype).str
        return {"version": 3, "shape": self.shape, "typestr": stored, "data": (self.ptr, read_only)}

    def numpy(self) -> np.ndarray:
        """NumPy view of the memory, which keeps it alive."""
        return np.asarray(self).view(dtypes.to_numpy(self.dtype))

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}{list(self.shape)} at {self.ptr:#x})"


class Heap(Tensor):
    """An int64 tensor of zeros whose slots Python accesses through the ctypes array `values`."""

    __slots__ = ("values",)

    def __init__(self, slots: int) -> None:
        values = (ctypes.c_int64 * slots)()
        super().__init__(ctypes.addressof(values), (slots,), "int64", values)
        self.values = values


def _stored_dtype(dtype: str) -> np.dtype:
    """NumPy dtype of the array interface: uint16 for bfloat16, which has no type string."""
    return np.dtype(np.uint16) if dtype == "bfloat16" else dtypes.to_numpy(dtype)


def from_numpy(array: np.ndarray, dtype: str) -> Tensor:
    """Tensor of a dense, aligned array of a dtype, without a copy."""
    try:
        ptr = ctypes.addressof(ctypes.c_char.from_buffer(array.data))  # much faster than array.ctypes
    except (TypeError, ValueError, BufferError):  # read-only, empty, or bfloat16
        ptr = array.ctypes.data
    return Tensor(ptr, array.shape, dtype, array)


def import_tensor(value: object, dtype: str, what: str) -> Tensor:
    """Convert an array-like object to a tensor. InputError, whose message begins with `what`, for another dtype.

    NumPy arrays and DLPack tensors must have exactly the dtype. Python numbers and lists are converted where that is
    exact, floats to the nearest.
    """
    numpy_dtype = dtypes.to_numpy(dtype)
    array = value if type(value) is np.ndarray else _as_array(value, numpy_dtype, what)
    if array.dtype is not numpy_dtype and array.dtype != numpy_dtype:
        array = _native_order(array, numpy_dtype, dtype, what)
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned):
        array = np.array(array, order="C", copy=True)
    return from_numpy(array, dtype)


def _native_order(array: np.ndarray, wanted: np.dtype, dtype: str, what: str) -> np.ndarray:
    native = array.dtype.newbyteorder("=")
    if native != wanted:
        convert = "ml_dtypes.bfloat16" if dtype == "bfloat16" else f"'{dtype}'"
        raise InputError(f"{what}: got {array.dtype.name}, expects {dtype}; convert it with .astype({convert})")
    return array.astype(native)


def _as_array(value: object, wanted: np.dtype, what: str) -> np.ndarray:
    if isinstance(value, np.ndarray):  # a subclass
        return np.asarray(value)
    if isinstance(value, Tensor):
        return value.numpy()
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        return _from_dlpack(value, what)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{what}: {type(value).__name__} is not a tensor: {error}") from error
    if array.dtype.hasobject:
        raise InputError(f"{what}: expects an array, got {type(value).__name__}")
    is_python = isinstance(value, int | float | list | tuple) and not isinstance(value, np.generic)
    return _from_python(array, wanted, what) if is_python else array


def _from_python(array: np.ndarray, wanted: np.dtype, what: str) -> np.ndarray:
    """Convert Python numbers to a dtype. InputError where a value is not representable."""
    kind = dtypes.from_numpy(array.dtype) or ""
    name = dtypes.from_numpy(wanted) or ""
    if array.size == 0 or array.dtype == wanted:
        return array.astype(wanted)
    is_number = dtypes.is_integer(kind) or dtypes.is_float(kind)
    if not is_number or name == "bool" or (dtypes.is_float(kind) and not dtypes.is_float(name)):
        raise InputError(f"{what}: got Python values that NumPy reads as {array.dtype.name}, expects {name}")
    with np.errstate(over="ignore", invalid="ignore"):
        converted = array.astype(wanted)
    if dtypes.is_float(kind):
        exact = np.isinf(converted) == np.isinf(array)
    else:
        exact = (converted.astype(array.dtype) == array) & ((converted < 0) == (array < 0))
    lossy = array[~exact]
    if lossy.size:
        raise InputError(f"{what}: the value {lossy.flat[0]} does not fit {name}")
    return converted


def _from_dlpack(value: Any, what: str) -> np.ndarray:
    device, index = value.__dlpack_device__()
    if int(device) not in _CPU_DEVICES:
        name = _OTHER_DEVICES.get(int(device), f"type {int(device)}")
        raise InputError(f"{what}: the tensor is on device {name}:{index}; copy it to the CPU first, as with .cpu()")
    try:
        return np.from_dlpack(value)
    except Exception as error:  # whatever the other library raises
        bfloat16 = _bfloat16_from_dlpack(value)
        if bfloat16 is None:
            raise InputError(f"{what}: {type(value).__name__} cannot be read through DLPack: {error}") from error
        return bfloat16


class _CapsuleExporter:
    """Exporter of an existing DLPack capsule."""

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack__(self, *, stream: None = None) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def _bfloat16_from_dlpack(value: Any) -> np.ndarray | None:
    """Import a bfloat16 DLPack tensor, which NumPy rejects: relabel it uint16 in our own capsule, then view it back."""
    try:
        capsule = value.__dlpack__()
        pointer = _capsule_pointer(capsule, b"dltensor")
    except Exception:  # the caller reports NumPy's error
        return None
    kind = (ctypes.c_uint8 * 2).from_address(pointer + _DL_DTYPE_OFFSET)
    if tuple(kind) != (_DL_BFLOAT, 16):
        return None
    kind[0] = _DL_UINT
    return np.from_dlpack(_CapsuleExporter(capsule)).view(dtypes.to_numpy("bfloat16"))


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def new_tensor(shape: tuple[int, ...], dtype: str, what: str, *, poison: bool = False) -> Tensor:
    """Allocate an uninitialized (or poisoned) tensor. OutOfMemoryError names `what`, type and size."""
    nbytes = tensor_bytes(shape, dtype, what)
    try:
        memory = allocate(nbytes, what, recycled=True, poison=poison)
    except OutOfMemoryError as error:
        raise OutOfMemoryError(f"{error}; its type is {dtype}{list(shape)}") from error
    return Tensor(memory.ptr, shape, dtype, memory)


def copy(source: Tensor) -> Tensor:
    """Copy a tensor to fresh memory."""
    target = new_tensor(source.shape, source.dtype, "a copy")
    ctypes.memmove(target.ptr, source.ptr, tensor_bytes(source.shape, source.dtype, "a copy"))
    return target


def export_array(tensor: Tensor, exported: set[int]) -> np.ndarray:
    """Convert an output to a NumPy array that owns its memory. `exported`: ids of memory owned by earlier outputs.

    Memory of a pool, an input, a constant or an earlier output is copied.
    """
    owner = tensor.owner
    if not isinstance(owner, Memory) or owner.pooled or id(owner) in exported:
        return tensor.numpy().copy()
    exported.add(id(owner))
    return np.ndarray(tensor.shape, dtypes.to_numpy(tensor.dtype), owner.raw, tensor.ptr - owner.base)
