"""Element types of tensors: names as in NumPy, sizes, kinds and conversions to NumPy.

In the IR, a dtype is a string ("float32", "int64", "bool", ...).
"""

from __future__ import annotations

from functools import cache

import numpy as np

DType = str

FLOATS: tuple[DType, ...] = ("float16", "bfloat16", "float32", "float64")
SIGNED: tuple[DType, ...] = ("int8", "int16", "int32", "int64")
UNSIGNED: tuple[DType, ...] = ("uint8", "uint16", "uint32", "uint64")
INTEGERS: tuple[DType, ...] = SIGNED + UNSIGNED
ALL: tuple[DType, ...] = ("bool", *INTEGERS, *FLOATS)

_NUMPY: dict[DType, np.dtype] = {name: np.dtype(name) for name in ALL if name != "bfloat16"}
_ITEMSIZE: dict[DType, int] = {name: dtype.itemsize for name, dtype in _NUMPY.items()} | {"bfloat16": 2}


@cache
def _bfloat16() -> np.dtype:
    """Return the dtype bfloat16; ml_dtypes is imported on first use, to save memory (docs/measurements/frontend.md)."""
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def to_numpy(dtype: DType) -> np.dtype:
    """Return the NumPy dtype of an element type. KeyError for an unknown name."""
    return _bfloat16() if dtype == "bfloat16" else _NUMPY[dtype]


@cache
def from_numpy(dtype: np.dtype | type) -> DType | None:
    """Return the element type of a NumPy dtype, or None if there is none (strings, objects, complex)."""
    name = np.dtype(dtype).name
    return name if name in _ITEMSIZE else None


def itemsize(dtype: DType) -> int:
    """Return the number of bytes of an element."""
    return _ITEMSIZE[dtype]


def is_float(dtype: DType) -> bool:
    """Whether a dtype is a floating-point type."""
    return dtype in FLOATS


def is_integer(dtype: DType) -> bool:
    """Whether a dtype is a signed or unsigned integer type; bool is not."""
    return dtype in INTEGERS


def is_signed(dtype: DType) -> bool:
    """Whether a dtype has negative values: signed integers and floats."""
    return dtype in SIGNED or dtype in FLOATS
