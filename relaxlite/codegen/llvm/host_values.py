"""Values of host functions: the VM's values with pointers and dimensions as SSA values, and reference-counted memory.

Ranks and dtypes are static, and tuples are scalarized. A block that the host function allocates has a reference count.
References are held by owner slots on the stack: one per allocating instruction, and one per tensor read from a
variable. All slots are released when the function ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from string import Template
from typing import TypeAlias

from relaxlite.codegen.llvm.emitter import Val
from relaxlite.records import dataclass
from relaxlite.runtime import host


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A tensor. `owner`: the block of its memory, a null pointer at run time for none; None: statically none."""

    ptr: Val
    dims: tuple[Val, ...]
    dtype: str
    owner: Val | None = None
    is_borrowed: bool = False  # read from a variable; assigning the variable may free the memory


@dataclass(frozen=True, slots=True)
class HostShape:
    """A shape of static rank."""

    dims: tuple[Val, ...]


@dataclass(frozen=True, slots=True)
class HostHeap:
    """A shape heap: int64 slots in the frame."""

    ptr: Val
    slots: int


@dataclass(frozen=True, slots=True)
class HostArena:
    """An arena of memory for views."""

    ptr: Val
    nbytes: Val
    owner: Val | None  # None: Python owns the arena


HostValue: TypeAlias = "HostTensor | HostShape | HostHeap | HostArena | tuple[HostValue, ...]"


def type_key(value: HostValue) -> object:
    """Static type of a value that a variable can hold: two values of one variable must agree in it; None: neither
    can."""
    match value:
        case HostTensor():
            return value.dtype, len(value.dims)
        case HostShape():
            return "shape", len(value.dims)
        case tuple():
            return tuple(map(type_key, value))
    return None


def fields_of(value: HostValue) -> tuple[Val, ...]:
    """All SSA values of a value: pointers and dimensions, tuples flattened."""
    match value:
        case HostTensor():
            return (value.ptr, *value.dims)
        case HostShape():
            return value.dims
        case tuple():
            return tuple(field for item in value for field in fields_of(item))
    return ()


def tensors_of(value: HostValue) -> tuple[HostTensor, ...]:
    """All tensors of a value, tuples flattened."""
    if isinstance(value, tuple):
        return tuple(tensor for item in value for tensor in tensors_of(item))
    return (value,) if isinstance(value, HostTensor) else ()


def with_fields(value: HostValue, fields: Iterator[Val], owners: Iterator[Val]) -> HostValue:
    """A value of the same type with the fields and owners of a variable; its tensors are borrowed."""
    match value:
        case HostTensor():
            return HostTensor(
                next(fields), tuple(next(fields) for _ in value.dims), value.dtype, next(owners), is_borrowed=True
            )
        case HostShape():
            return HostShape(tuple(next(fields) for _ in value.dims))
        case tuple():
            return tuple(with_fields(item, fields, owners) for item in value)
    return value


def replace_tensors(value: HostValue, replacements: Mapping[HostTensor, HostTensor]) -> HostValue:
    """Replace tensors of a value."""
    if isinstance(value, tuple):
        return tuple(replace_tensors(item, replacements) for item in value)
    return replacements.get(value, value) if isinstance(value, HostTensor) else value


BLOCK_HEADER = 64  # bytes before a block's data, a multiple of the alignment; the first 8 are the reference count

MEMORY_IR = Template("""
declare ptr @relaxlite_scratch_alloc(i64)
declare void @relaxlite_scratch_free(ptr)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare { i64, i1 } @llvm.smul.with.overflow.i64(i64, i64)

; A block with one reference; null when there is no memory for it.
define internal ptr @new_block(ptr %frame, i64 %bytes) nounwind {
entry:
  %limit_at = getelementptr i64, ptr %frame, i64 $limit
  %limit = load i64, ptr %limit_at
  %fits = icmp ule i64 %bytes, %limit
  br i1 %fits, label %take, label %none
take:
  %total = add i64 %bytes, $header
  %block = call ptr @relaxlite_scratch_alloc(i64 %total)
  %is_none = icmp eq ptr %block, null
  br i1 %is_none, label %none, label %count
count:
  store i64 1, ptr %block
  %poison_at = getelementptr i64, ptr %frame, i64 $poison
  %poison = load i64, ptr %poison_at
  %poisons = icmp ne i64 %poison, 0
  br i1 %poisons, label %fill, label %done
fill:
  %data = getelementptr i8, ptr %block, i64 $header
  call void @llvm.memset.p0.i64(ptr %data, i8 -1, i64 %bytes, i1 false)
  br label %done
done:
  ret ptr %block
none:
  ret ptr null
}

define internal void @retain(ptr %block) nounwind {
entry:
  %is_none = icmp eq ptr %block, null
  br i1 %is_none, label %done, label %count
count:
  %references = load i64, ptr %block
  %more = add i64 %references, 1
  store i64 %more, ptr %block
  br label %done
done:
  ret void
}

define internal void @release(ptr %block) nounwind {
entry:
  %is_none = icmp eq ptr %block, null
  br i1 %is_none, label %done, label %count
count:
  %references = load i64, ptr %block
  %fewer = sub i64 %references, 1
  store i64 %fewer, ptr %block
  %is_last = icmp eq i64 %fewer, 0
  br i1 %is_last, label %free, label %done
free:
  call void @relaxlite_scratch_free(ptr %block)
  br label %done
done:
  ret void
}

; Let go of every block of an array of slots.
define internal void @release_all(ptr %slots, i64 %count) nounwind {
entry:
  br label %test
test:
  %k = phi i64 [ 0, %entry ], [ %next, %one ]
  %more = icmp slt i64 %k, %count
  br i1 %more, label %one, label %done
one:
  %slot = getelementptr ptr, ptr %slots, i64 %k
  %block = load ptr, ptr %slot
  call void @release(ptr %block)
  %next = add i64 %k, 1
  br label %test
done:
  ret void
}
""").substitute(limit=host.LIMIT, poison=host.POISON, header=BLOCK_HEADER)
