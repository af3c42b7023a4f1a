"""Allocator of native code, for workspaces of kernels and tensors of host functions, and cache of large results.

    ptr  relaxlite_scratch_alloc(i64 bytes)    64-byte aligned; null: out of memory
    void relaxlite_scratch_free(ptr)

Freed large blocks are cached in a few slots for the next request: a C library would return them to the system, at the
cost of a page fault per 4 KB at every call of a model (docs/measurements/backend.md). The cached bytes are bounded.
Slots are accessed lock-free, by atomic exchange. On Linux, blocks from 4 MiB on request huge pages.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from functools import cache
from string import Template
from typing import Any

import numpy as np

from relaxlite.runtime import support
from relaxlite.runtime.support import SupportCode

_NUM_SLOTS = 8
_MIN_CACHED_BYTES = 1 << 20  # smaller blocks are cached by the C library
_MAX_CACHED_BYTES = 256 << 20
_HUGE_FROM, _HUGE_PAGE = 4 << 20, 2 << 20
_HEADER = 64  # bytes before the memory; the first 8 hold the block's size
_MADV_HUGEPAGE = 14

_SCRATCH_IR = Template("""
@places = internal global [$places x ptr] zeroinitializer   ; blocks that wait
@kept   = internal global i64 0                             ; their bytes

define ptr @relaxlite_scratch_alloc(i64 %bytes) {
entry:
  %padded = add i64 %bytes, 127
  %size = and i64 %padded, -64
  %is_sane = icmp ult i64 %bytes, 4611686018427387904
  br i1 %is_sane, label %sane, label %none
sane:
  %is_large = icmp uge i64 %size, $kept_from
  br i1 %is_large, label %search, label %fresh
search:
  %waiting = call ptr @take(i64 %size)
  %is_found = icmp ne ptr %waiting, null
  br i1 %is_found, label %done, label %fresh
fresh:
  %new = call ptr @system_block(i64 %size)
  %is_none = icmp eq ptr %new, null
  br i1 %is_none, label %none, label %write
write:
  store i64 %size, ptr %new
  br label %done
done:
  %block = phi ptr [ %waiting, %search ], [ %new, %write ]
  %memory = getelementptr i8, ptr %block, i64 $header
  ret ptr %memory
none:
  ret ptr null
}

define void @relaxlite_scratch_free(ptr %memory) {
entry:
  %is_null = icmp eq ptr %memory, null
  br i1 %is_null, label %done, label %look
look:
  %block = getelementptr i8, ptr %memory, i64 -$header
  %size = load i64, ptr %block
  %is_large = icmp uge i64 %size, $kept_from
  br i1 %is_large, label %count, label %free
count:
  %before = atomicrmw add ptr @kept, i64 %size monotonic
  %after = add i64 %before, %size
  %has_room = icmp ule i64 %after, $kept_in_total
  br i1 %has_room, label %test, label %uncount
test:
  %k = phi i64 [ 0, %count ], [ %next, %try ]
  %more = icmp slt i64 %k, $places
  br i1 %more, label %try, label %uncount
try:
  %place = getelementptr ptr, ptr @places, i64 %k
  %swap = cmpxchg ptr %place, ptr null, ptr %block release monotonic
  %is_in = extractvalue { ptr, i1 } %swap, 1
  %next = add i64 %k, 1
  br i1 %is_in, label %done, label %test
uncount:
  %uncounted = atomicrmw sub ptr @kept, i64 %size monotonic
  br label %free
free:
  call void @$free(ptr %block)
  br label %done
done:
  ret void
}

; A block that waits, of at least %size bytes and not over twice that; null for none.
define internal ptr @take(i64 %size) {
entry:
  %most = shl i64 %size, 1
  br label %test
test:
  %k = phi i64 [ 0, %entry ], [ %next, %try ], [ %next, %put_back ], [ %next, %lost ]
  %more = icmp slt i64 %k, $places
  br i1 %more, label %try, label %none
try:
  %next = add i64 %k, 1
  %place = getelementptr ptr, ptr @places, i64 %k
  %block = atomicrmw xchg ptr %place, ptr null acquire
  %is_empty = icmp eq ptr %block, null
  br i1 %is_empty, label %test, label %look
look:
  %room = load i64, ptr %block
  %is_enough = icmp uge i64 %room, %size
  %is_close = icmp ule i64 %room, %most
  %fits = and i1 %is_enough, %is_close
  br i1 %fits, label %found, label %put_back
found:
  %kept = atomicrmw sub ptr @kept, i64 %room monotonic
  ret ptr %block
put_back:
  %swap = cmpxchg ptr %place, ptr null, ptr %block release monotonic
  %is_in = extractvalue { ptr, i1 } %swap, 1
  br i1 %is_in, label %test, label %lost
lost:                                                        ; another thread has filled the place
  %uncounted = atomicrmw sub ptr @kept, i64 %room monotonic
  call void @$free(ptr %block)
  br label %test
none:
  ret ptr null
}

; Give what waits back to the system; says how many bytes that were.
define i64 @relaxlite_scratch_trim() {
entry:
  br label %test
test:
  %k = phi i64 [ 0, %entry ], [ %next, %try ], [ %next, %free ]
  %total = phi i64 [ 0, %entry ], [ %total, %try ], [ %more_bytes, %free ]
  %more = icmp slt i64 %k, $places
  br i1 %more, label %try, label %done
try:
  %next = add i64 %k, 1
  %place = getelementptr ptr, ptr @places, i64 %k
  %block = atomicrmw xchg ptr %place, ptr null acquire
  %is_empty = icmp eq ptr %block, null
  br i1 %is_empty, label %test, label %free
free:
  %size = load i64, ptr %block
  %more_bytes = add i64 %total, %size
  %kept = atomicrmw sub ptr @kept, i64 %size monotonic
  call void @$free(ptr %block)
  br label %test
done:
  ret i64 %total
}

declare void @$free(ptr)
""")

_POSIX_BLOCK_IR = """
declare ptr @aligned_alloc(i64, i64)

define internal ptr @system_block(i64 %size) {
  %block = call ptr @aligned_alloc(i64 64, i64 %size)
  ret ptr %block
}
"""
_LINUX_BLOCK_IR = f"""
declare ptr @aligned_alloc(i64, i64)
declare i32 @madvise(ptr, i64, i32)

define internal ptr @system_block(i64 %size) {{
entry:
  %is_huge = icmp uge i64 %size, {_HUGE_FROM}
  br i1 %is_huge, label %huge, label %small
small:
  %block = call ptr @aligned_alloc(i64 64, i64 %size)
  ret ptr %block
huge:
  %padded = add i64 %size, {_HUGE_PAGE - 1}
  %whole = and i64 %padded, -{_HUGE_PAGE}
  %pages = call ptr @aligned_alloc(i64 {_HUGE_PAGE}, i64 %whole)
  %is_none = icmp eq ptr %pages, null
  br i1 %is_none, label %done, label %advise
advise:
  %advised = call i32 @madvise(ptr %pages, i64 %whole, i32 {_MADV_HUGEPAGE})
  br label %done
done:
  ret ptr %pages
}}
"""
_WINDOWS_BLOCK_IR = """
declare ptr @_aligned_malloc(i64, i64)

define internal ptr @system_block(i64 %size) {
  %block = call ptr @_aligned_malloc(i64 %size, i64 64)
  ret ptr %block
}
"""
_SYMBOLS = ("relaxlite_scratch_alloc", "relaxlite_scratch_free")
_TRIM = "relaxlite_scratch_trim"


def symbols() -> dict[str, int]:
    """Addresses of the two functions that native code imports, by name."""
    return {name: _functions()[name] for name in _SYMBOLS}


def array(nbytes: int) -> np.ndarray:
    """Allocate an uninitialized byte array, whose block is cached for reuse when it is freed. Raises MemoryError."""
    functions = _functions()
    address = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64)(functions[_SYMBOLS[0]])(nbytes)
    if not address:
        raise MemoryError
    block: Any = (ctypes.c_char * nbytes).from_address(address)
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(functions[_SYMBOLS[1]])
    weakref.finalize(block, free, address).atexit = False
    return np.frombuffer(block, np.uint8)


def trim() -> int:
    """Return cached blocks to the system; returns their size in bytes."""
    return int(ctypes.CFUNCTYPE(ctypes.c_int64)(_functions()[_TRIM])()) if _functions.cache_info().currsize else 0


def support_code(system: str) -> SupportCode:
    """IR of the allocator for a system, named as by `sys.platform`."""
    imports: tuple[str, ...]
    if system == "win32":
        block, free, imports = _WINDOWS_BLOCK_IR, "_aligned_free", ("_aligned_malloc", "_aligned_free")
    elif system == "linux":
        block, free, imports = _LINUX_BLOCK_IR, "free", ("aligned_alloc", "free", "madvise")
    else:
        block, free, imports = _POSIX_BLOCK_IR, "free", ("aligned_alloc", "free")
    ir = _SCRATCH_IR.substitute(
        places=_NUM_SLOTS, kept_from=_MIN_CACHED_BYTES, kept_in_total=_MAX_CACHED_BYTES, header=_HEADER, free=free
    )
    return SupportCode("scratch", block + ir, imports, (*_SYMBOLS, _TRIM))


@cache
def _functions() -> dict[str, int]:
    code = support_code(sys.platform)
    library: Any = ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)
    imports = {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in code.imports}
    return support.link(code, imports)
