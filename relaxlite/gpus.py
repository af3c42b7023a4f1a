"""Table of facts of NVIDIA GPUs, on which schedules and code generation depend. No other module names an architecture.

A row describes the largest product of an architecture; a target may name another number of multiprocessors.

>>> find("sm_80").multiprocessors, find("sm_90").max_shared_bytes
(108, 232448)
"""

from __future__ import annotations

import ctypes
import sys

from relaxlite.records import dataclass

WARP = 32
"""Threads of a warp, which execute one instruction together."""
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


@dataclass(frozen=True, slots=True)
class Gpu:
    """Facts of a GPU: what schedules choose sizes by, and what its instructions need."""

    arch: str
    """LLVM's name of the architecture: "sm_80"."""
    ptx: str
    """LLVM's feature of the PTX version that the architecture needs: "ptx80"."""
    multiprocessors: int
    bytes_per_s: float
    """Bandwidth of the device memory."""
    l2_bytes: int
    max_shared_bytes: int
    """Shared memory of one block, where the launch asks for more than STATIC_SHARED_BYTES."""
    max_threads: int = 1024
    """Threads of one block."""
    registers: int = 1 << 16
    """32-bit registers of a multiprocessor."""
    tensor_core_dtypes: tuple[str, ...] = ("float16", "bfloat16", "int8", "float32")
    """Element types that `mma` multiplies; float32 is rounded to TF32."""


STATIC_SHARED_BYTES = 48 << 10
"""Shared memory of one block that every launch may use."""

GPUS: tuple[Gpu, ...] = (
    Gpu("sm_80", "ptx80", 108, 1.555e12, 40 << 20, 163 << 10),
    Gpu("sm_86", "ptx80", 84, 0.936e12, 6 << 20, 99 << 10),
    Gpu("sm_89", "ptx80", 142, 0.864e12, 96 << 20, 99 << 10),
    Gpu("sm_90", "ptx80", 132, 3.35e12, 50 << 20, 227 << 10),
    Gpu("sm_100", "ptx86", 148, 8.0e12, 126 << 20, 227 << 10),
)
"""NVIDIA's data sheets of A100, RTX A6000, L40S, H100 and B200."""


def find(arch: str) -> Gpu | None:
    """The row of an architecture; None where the table has none."""
    return next((gpu for gpu in GPUS if gpu.arch == arch), None)


def installed() -> Gpu | None:
    """The row of the first GPU of this machine: the newest that is not newer; None without a driver or a GPU.

    A GPU runs the PTX of older architectures.
    """
    version = _installed_version()
    return None if version is None else next((gpu for gpu in reversed(GPUS) if _number(gpu.arch) <= version), None)


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_"))


def _installed_version() -> int | None:
    """Compute capability of the first GPU of this machine, such as 80, as its driver tells it."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    device, version = ctypes.c_int(), [ctypes.c_int(), ctypes.c_int()]
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    for number, attribute in zip(version, (_MAJOR, _MINOR), strict=True):
        if driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device):
            return None
    return 10 * version[0].value + version[1].value
