"""Native code that reads addresses and shapes of NumPy arrays from CPython objects, without a Python call per array.

The struct layouts of tuples and arrays are part of the C ABI: PyTuple_GET_ITEM and PyArray_DATA are inlined accesses to
them. They are stable for CPython builds of one kind, and for NumPy 1 and 2. `is_supported` verifies them at run time;
where they differ (another Python, no GIL), the bytecode interpreter runs models.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from string import Template

import numpy as np

from relaxlite.runtime import support
from relaxlite.runtime.support import SupportCode

_TUPLE_ITEMS, _TYPE = 24, 8  # byte offsets in a tuple and in any object
_DATA, _RANK, _DIMS, _DTYPE, _FLAGS = 16, 24, 32, 56, 64  # byte offsets in an array
_C_CONTIGUOUS, _ALIGNED, WRITABLE = 0x1, 0x100, 0x400
DENSE = _C_CONTIGUOUS | _ALIGNED

_READER_IR = Template("""
; Store address and dimensions of each array of %tuple in %to, one after the other. 1 when one is not of exactly the
; type, dtype and rank of the plan, or lacks a flag. The plan: count, type of arrays, and dtype, rank, flags of each.
define i32 @relaxlite_read_arrays(ptr %tuple, ptr %plan, ptr %to) {
entry:
  %count = load i64, ptr %plan
  %type_at = getelementptr i64, ptr %plan, i64 1
  %type = load ptr, ptr %type_at
  %items = getelementptr i8, ptr %tuple, i64 $items
  %entries = getelementptr i64, ptr %plan, i64 2
  br label %test
test:
  %k = phi i64 [ 0, %entry ], [ %next, %done ]
  %place = phi ptr [ %to, %entry ], [ %next_place, %done ]
  %more = icmp slt i64 %k, %count
  br i1 %more, label %read, label %good
read:
  %item_at = getelementptr ptr, ptr %items, i64 %k
  %item = load ptr, ptr %item_at
  %its_type_at = getelementptr i8, ptr %item, i64 $type
  %its_type = load ptr, ptr %its_type_at
  %is_array = icmp eq ptr %its_type, %type
  br i1 %is_array, label %look, label %bad
look:
  %at = mul i64 %k, 3
  %wanted_dtype_at = getelementptr i64, ptr %entries, i64 %at
  %wanted_dtype = load ptr, ptr %wanted_dtype_at
  %rank_at = getelementptr i64, ptr %wanted_dtype_at, i64 1
  %rank = load i64, ptr %rank_at
  %dtype_at = getelementptr i8, ptr %item, i64 $dtype
  %dtype = load ptr, ptr %dtype_at
  %is_dtype = icmp eq ptr %dtype, %wanted_dtype
  %its_rank_at = getelementptr i8, ptr %item, i64 $rank
  %its_rank = load i32, ptr %its_rank_at
  %its_rank_wide = sext i32 %its_rank to i64
  %is_rank = icmp eq i64 %its_rank_wide, %rank
  %flags_at = getelementptr i8, ptr %item, i64 $flags
  %flags = load i32, ptr %flags_at
  %needed_at = getelementptr i64, ptr %wanted_dtype_at, i64 2
  %needed_wide = load i64, ptr %needed_at
  %needed = trunc i64 %needed_wide to i32
  %present = and i32 %flags, %needed
  %has_flags = icmp eq i32 %present, %needed
  %fits = and i1 %is_dtype, %is_rank
  %is_good = and i1 %fits, %has_flags
  br i1 %is_good, label %take, label %bad
take:
  %data_at = getelementptr i8, ptr %item, i64 $data
  %data = load ptr, ptr %data_at
  store ptr %data, ptr %place
  %dims_at = getelementptr i8, ptr %item, i64 $dims
  %dims = load ptr, ptr %dims_at
  br label %axis_test
axis_test:
  %axis = phi i64 [ 0, %take ], [ %next_axis, %axis_copy ]
  %next_axis = add i64 %axis, 1
  %more_axes = icmp slt i64 %axis, %rank
  br i1 %more_axes, label %axis_copy, label %done
axis_copy:
  %dim_at = getelementptr i64, ptr %dims, i64 %axis
  %dim = load i64, ptr %dim_at
  %dim_place = getelementptr i64, ptr %place, i64 %next_axis
  store i64 %dim, ptr %dim_place
  br label %axis_test
done:
  %next_place = getelementptr i64, ptr %place, i64 %next_axis
  %next = add i64 %k, 1
  br label %test
good:
  ret i32 0
bad:
  ret i32 1
}

define ptr @relaxlite_array_data(ptr %array) {
  %data_at = getelementptr i8, ptr %array, i64 $data
  %data = load ptr, ptr %data_at
  ret ptr %data
}
""")
_SYMBOLS = ("relaxlite_read_arrays", "relaxlite_array_data")


def support_code() -> SupportCode:
    """The reader's IR, which is the same on all machines."""
    ir = _READER_IR.substitute(
        items=_TUPLE_ITEMS, type=_TYPE, data=_DATA, rank=_RANK, dims=_DIMS, dtype=_DTYPE, flags=_FLAGS
    )  # fmt: skip
    return SupportCode("array_reader", ir, (), _SYMBOLS)


@cache
def symbols() -> dict[str, int]:
    """Addresses of the functions that host functions import, by name."""
    return support.link(support_code(), {})


@cache
def is_supported() -> bool:
    """Whether the layouts of tuples and arrays match this module's offsets, by a check on two arrays."""
    if sys.implementation.name != "cpython" or ctypes.sizeof(ctypes.c_void_p) != 8 or not _has_gil():
        return False
    dense, transposed = np.zeros((2, 3), np.int16), np.zeros((2, 3), np.int16).T
    transposed.flags.writeable = False
    pair = (transposed, dense)
    return (
        _load_int64(id(pair) + _TUPLE_ITEMS + 8) == id(dense) and _layout_matches(dense) and _layout_matches(transposed)
    )


def _has_gil() -> bool:
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def _layout_matches(array: np.ndarray) -> bool:
    address, flags = id(array), array.flags
    dims = _load_int64(address + _DIMS)
    stored_flags = ctypes.c_int32.from_address(address + _FLAGS).value
    return (
        _load_int64(address + _TYPE) == id(np.ndarray)
        and _load_int64(address + _DATA) == array.ctypes.data
        and ctypes.c_int32.from_address(address + _RANK).value == array.ndim
        and _load_int64(address + _DTYPE) == id(array.dtype)
        and bool(stored_flags & _C_CONTIGUOUS) == flags.c_contiguous
        and bool(stored_flags & _ALIGNED) == flags.aligned
        and bool(stored_flags & WRITABLE) == flags.writeable
        and all(_load_int64(dims + 8 * axis) == size for axis, size in enumerate(array.shape))
    )


def _load_int64(address: int) -> int:
    return ctypes.c_int64.from_address(address).value
