"""Element types: names as in NumPy, sizes, and what may be done with them.

A dtype is a plain string in the IR ("float32", "int64", "bool", ...).
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
    """Imported with the first use: 2 MB of memory that most models do not need."""
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def to_numpy(dtype: DType) -> np.dtype:
    """The NumPy dtype of an element type; KeyError for an unknown name."""
    return _bfloat16() if dtype == "bfloat16" else _NUMPY[dtype]


@cache
def from_numpy(dtype: np.dtype | type) -> DType | None:
    """The element type of a NumPy dtype, or None when relaxlite has none for it (strings, objects, complex)."""
    name = np.dtype(dtype).name
    return name if name in _ITEMSIZE else None


def itemsize(dtype: DType) -> int:
    """Bytes per element."""
    return _ITEMSIZE[dtype]


def is_float(dtype: DType) -> bool:
    return dtype in FLOATS


def is_integer(dtype: DType) -> bool:
    """True for signed and unsigned integers, not for bool."""
    return dtype in INTEGERS


def is_signed(dtype: DType) -> bool:
    return dtype in SIGNED or dtype in FLOATS
