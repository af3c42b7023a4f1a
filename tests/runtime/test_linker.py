"""The linker of the runtime: objects of LLVM run as written, and damaged ones are refused without harm."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relaxlite as rl
from relaxlite import driver
from relaxlite.codegen.llvm import compile_support
from relaxlite.errors import ArtifactError, RelaxliteError
from relaxlite.runtime import elf, jit, linker
from relaxlite.runtime.linker import LinkedCode, link
from relaxlite.runtime.module import Executable
from relaxlite.runtime.native import load_objects
from relaxlite.target import Target
from tests.support import tiers

pytestmark = pytest.mark.skipif(not linker.is_supported(), reason="the linker is for x86-64 Linux")

TRIPLE = "x86_64-unknown-linux-gnu"
TO_I32 = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32)


def compiled(ir: str) -> bytes:
    return jit.compile_text(ir, TRIPLE, "x86-64")


def linked(*objects: bytes, **symbols: int) -> LinkedCode:
    return link([elf.read_object(item) for item in objects], symbols)


def call(library: LinkedCode, name: str, argument: int = 0) -> int:
    return int(TO_I32(library.address(name))(argument))


# What objects hold

DATA = """
@table = internal constant [4 x i32] [i32 10, i32 20, i32 30, i32 40]
@counter = internal global i32 5
@zeros = internal global [4096 x i32] zeroinitializer
@pointers = internal constant [2 x ptr] [ptr @table, ptr @counter]

define i32 @look(i32 %k) {
  %at = getelementptr i32, ptr @table, i32 %k
  %found = load i32, ptr %at
  ret i32 %found
}

define i32 @count(i32 %step) {
  %before = load i32, ptr @counter
  %after = add i32 %before, %step
  store i32 %after, ptr @counter
  %zero_at = getelementptr i32, ptr @zeros, i32 4095
  %zero = load i32, ptr %zero_at
  store i32 %after, ptr %zero_at
  %sum = add i32 %after, %zero
  ret i32 %sum
}

define i32 @through(i32 %k) {
  %at = getelementptr ptr, ptr @pointers, i32 %k
  %pointer = load volatile ptr, ptr %at
  %found = load i32, ptr %pointer
  ret i32 %found
}

define i32 @scale(i32 %k) {
  %real = sitofp i32 %k to double
  %product = fmul double %real, 2.5
  %result = fptosi double %product to i32
  ret i32 %result
}
"""


def test_constants_variables_and_pointers_to_them() -> None:
    library = linked(compiled(DATA))
    assert [call(library, "look", k) for k in range(4)] == [10, 20, 30, 40]
    assert [call(library, "count", 1) for _ in range(3)] == [6, 6 + 7, 7 + 8]
    assert [call(library, "through", k) for k in (0, 1)] == [10, 8]
    assert call(library, "scale", 4) == 10


def test_two_libraries_of_one_object_have_variables_of_their_own() -> None:
    code = compiled(DATA)
    first, second = linked(code), linked(code)
    assert (call(first, "count", 10), call(second, "count", 1)) == (15, 6)


OUTSIDE = """
@cell = external global ptr
declare i32 @outside(i32)
define i32 @direct(i32 %k) {
  %r = call i32 @outside(i32 %k)
  %s = add i32 %r, 1
  ret i32 %s
}
define i32 @through_cell(i32 %k) {
  %function = load ptr, ptr @cell
  %r = call i32 %function(i32 %k)
  %s = add i32 %r, 1
  ret i32 %s
}
"""
TRIPLED = bytes.fromhex("8d047f c3")  # lea eax, [rdi + rdi * 2]; ret


def page_of_code(hint: int | None = None) -> int:
    """The address of a page that holds the function TRIPLED."""
    libc, word, number = ctypes.CDLL(None), ctypes.c_void_p, ctypes.c_int
    libc.mmap.restype, libc.mmap.argtypes = word, (word, ctypes.c_size_t, number, number, number, ctypes.c_long)
    libc.mprotect.argtypes = (word, ctypes.c_size_t, number)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    page = int(libc.mmap(hint, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0))
    ctypes.memmove(page, TRIPLED, len(TRIPLED))
    assert libc.mprotect(page, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC) == 0
    return page


@pytest.mark.parametrize("where", ["anywhere", "far"])
def test_functions_from_outside_at_any_distance(where: str) -> None:
    page = page_of_code(None if where == "anywhere" else 0x100000000000)
    cell = ctypes.c_uint64(page)
    library = linked(compiled(OUTSIDE), outside=page, cell=ctypes.addressof(cell))
    if where == "far":
        assert abs(library.address("direct") - page) > 1 << 32
    assert (call(library, "direct", 5), call(library, "through_cell", 7)) == (16, 22)


def test_what_is_neither_here_nor_there_is_named() -> None:
    with pytest.raises(ArtifactError, match="needs outside, cell, which neither the runtime"):
        load_objects([compiled(OUTSIDE)])
    with pytest.raises(ArtifactError, match="refers to what is not there"):
        linked(compiled(OUTSIDE), outside=page_of_code())


def test_objects_of_a_library_call_each_other() -> None:
    one = "declare i32 @b(i32)\ndefine i32 @a(i32 %k) { %r = call i32 @b(i32 %k) ret i32 %r }"
    two = "define i32 @b(i32 %k) { %r = mul i32 %k, 3 ret i32 %r }\n@unused = external global i32"
    library = linked(compiled(one), compiled(two))
    assert call(library, "a", 4) == 12
    loaded = load_objects([compiled(two), compiled(one)])
    assert TO_I32(loaded.address("a"))(5) == 15


def test_two_definitions_are_an_error_unless_they_are_weak() -> None:
    strong, weak = (f"define {kind} i32 @f() {{ ret i32 {k} }}" for kind, k in (("", 1), ("weak", 2)))
    user = "declare i32 @f()\ndefine i32 @g() { %r = call i32 @f() ret i32 %r }"
    for order in itertools.permutations((strong, weak, user)):
        library = linked(*map(compiled, order))
        assert (call(library, "f"), call(library, "g")) == (1, 1)
    assert call(linked(compiled(weak), compiled(weak), compiled(user)), "g") == 2
    with pytest.raises(ArtifactError, match="defines 'f' twice"):
        linked(compiled(strong), compiled(strong))


def test_equal_inline_functions_of_two_objects_are_one() -> None:
    once = "$f = comdat any\ndefine linkonce_odr i32 @f() comdat { ret i32 7 }\n"
    uses = [f"define i32 @{name}() {{ %r = call i32 @f() ret i32 %r }}" for name in "gh"]
    library = linked(*(compiled(once + use) for use in uses))
    assert (call(library, "g"), call(library, "h")) == (7, 7)


# What is in memory


def access_of(address: int) -> str:
    """As "r-xp"; empty where nothing is."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, *_ = line.split()
        start, end = (int(part, 16) for part in place.split("-"))
        if start <= address < end:
            return access
    return ""


ADDRESSES = """
@constant = constant i64 7
@variable = global i64 7
@zeros = global i64 0
define ptr @where(i32 %k) {
  switch i32 %k, label %c [ i32 1, label %v i32 2, label %z ]
c:
  ret ptr @constant
v:
  ret ptr @variable
z:
  ret ptr @zeros
}
"""


def test_nothing_is_writable_and_executable_and_code_goes_when_it_is_closed() -> None:
    library = linked(compiled(ADDRESSES))
    code = library.address("where")
    where = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_int32)(code)
    assert [access_of(at) for at in (code, *map(where, range(3)))] == ["r-xp", "r--p", "rw-p", "rw-p"]
    with pytest.raises(ArtifactError, match="no function 'variable'"):
        library.address("variable")
    library.close()
    library.close()
    assert access_of(code) != "r-xp"
    with pytest.raises(ArtifactError, match="library that is closed"):
        library.address("where")


def test_code_goes_with_the_last_reference_unless_it_is_kept() -> None:
    gone, kept = linked(compiled(ADDRESSES)), linked(compiled(ADDRESSES))
    addresses = gone.address("where"), kept.address("where")
    kept.keep()
    del gone, kept
    assert [access_of(at) == "r-xp" for at in addresses] == [False, True]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_variables_of_its_own() -> None:
    library = linked(compiled(DATA))
    pid = os.fork()
    if pid == 0:
        os._exit(call(library, "count", 10))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 15
    assert call(library, "count", 1) == 6


# Real programs


def softmax_rows() -> rl.IRModule:
    bb = rl.BlockBuilder()
    n, m = bb.symbol("n"), bb.symbol("m")
    with bb.function("main", x=rl.TensorType.of((n, m), "float32"), y=rl.TensorType.of((m, 64), "float32")) as (x, y):
        bb.result(bb.emit(rl.ops.matmul(bb.emit(rl.ops.softmax(x)), y)))
    return bb.module()


@cache
def real_data() -> Any:
    return driver.build(softmax_rows())


def test_real_objects_hold_what_the_linker_is_for() -> None:
    data = real_data()
    objects = [elf.read_object(code) for code in (*data.objects, data.host.object_code, *data.support.values())]
    undefined = {name for item in objects for name in item.undefined}
    assert {"relaxlite_parallel_for", "relaxlite_read_arrays", "aligned_alloc", "syscall"} <= undefined
    kinds = {section.kind for item in objects for section in item.sections if section.flags & elf.ALLOC}
    assert {elf.PROGBITS, elf.NOBITS} <= kinds


@pytest.mark.parametrize("threads", [1, 3])
def test_models_run_without_llvms_linker_and_as_with_it(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    data = real_data()
    x, y = np.random.default_rng(0).standard_normal((300, 70), np.float32), np.ones((70, 64), np.float32)
    ours = Executable(data, threads=threads)
    with monkeypatch.context() as patch:
        patch.setattr(linker, "is_supported", lambda: False)
        llvms = Executable(data)
    kinds = [type(exe._host._library) for exe in (ours, llvms) if exe._host is not None]
    assert kinds == [LinkedCode, jit.JitCode]
    np.testing.assert_array_equal(ours(x, y), llvms(x, y))
    np.testing.assert_allclose(ours(x, y), np.ones((300, 64)), rtol=1e-5)


# Damage


def refused_or_linked(content: bytes) -> bool:
    """Whether a damaged object is refused. Where it is not, nothing but what its code does may be wrong."""
    try:
        item = elf.read_object(content)
        link([item], dict.fromkeys(item.undefined, 0x7F0000001000)).close()
    except RelaxliteError as error:
        assert str(error)
        return True
    return False


@cache
def victims() -> tuple[bytes, ...]:
    data = real_data()
    support = compile_support(Target.host())
    return (*data.objects, data.host.object_code, *support.values(), compiled(DATA), compiled(OUTSIDE))


def test_whole_objects_link() -> None:
    assert not any(map(refused_or_linked, victims()))


def test_truncated_objects_are_refused() -> None:
    for content in victims():
        for size in (*range(0, 64), *range(64, len(content), 97), len(content) - 1):
            assert refused_or_linked(content[:size])


def test_foreign_objects_are_refused() -> None:
    good = bytearray(compiled(DATA))
    for at, value, message in (
        (0, 0, "not object code for Linux"),
        (4, 1, "no relocatable 64-bit ELF object"),
        (5, 2, "no relocatable 64-bit ELF object"),
        (16, 3, "no relocatable 64-bit ELF object"),
        (18, 183, "another architecture"),
        (58, 63, "sections are described in 63 bytes each"),
    ):
        bad = good[:]
        bad[at] = value
        with pytest.raises(ArtifactError, match=message):
            load_objects([bytes(bad)])


def changed_field(content: bytes, kind: int, entry: int, at: int, form: str, value: int) -> bytes:
    """The object with one field of one entry of its sections of a kind overwritten."""
    item = elf.read_object(content)
    tables = [section for section in item.sections if section.kind == kind]
    size = 24
    starts = [start for t in tables for start in range(t.start, t.start + t.size, size)]
    changed = bytearray(content)
    struct.pack_into(form, changed, starts[entry % len(starts)] + at, value)
    return bytes(changed)


def test_relocations_that_lead_outside_are_refused() -> None:
    content = compiled(DATA)
    for at, form, value in (
        (0, "<Q", 1 << 40),  # behind its section
        (0, "<Q", (1 << 64) - 2),
        (8, "<I", 12345),  # of an unknown kind
        (8, "<I", 18),  # of a kind for thread-local variables
        (12, "<I", 10_000),  # of a symbol that is not there
        (16, "<q", 1 << 45),  # too far
        (16, "<q", -(1 << 63)),
    ):
        assert refused_or_linked(changed_field(content, elf.RELA, 0, at, form, value))
        with pytest.raises(ArtifactError):
            load_objects([changed_field(content, elf.RELA, 0, at, form, value)])


def test_the_last_bytes_of_a_section_are_not_overrun() -> None:
    content = compiled(OUTSIDE)
    item = elf.read_object(content)
    target = next(iter(item.relocations))
    for back in (1, 2, 3):
        assert refused_or_linked(changed_field(content, elf.RELA, 0, 0, "<Q", item.sections[target].size - back))


WORDS = st.one_of(
    st.sampled_from([0, 1, 2, 3, 7, 8, 24, 63, 4096, 65535, 0xFFF1, 0xFFF2, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1]),
    st.integers(0, 300),
    st.integers(0, (1 << 64) - 1),
)


@settings(max_examples=tiers.examples(400), deadline=None)
@given(st.integers(0, 100), st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=8))
def test_flipped_bytes_do_no_harm(victim: int, flips: list[tuple[int, int]]) -> None:
    content = bytearray(victims()[victim % len(victims())])
    for at, value in flips:
        content[at % len(content)] = value
    refused_or_linked(bytes(content))


FIELDS = {
    elf.RELA: [(0, "<Q"), (8, "<I"), (12, "<I"), (16, "<Q")],
    elf.SYMBOLS: [(0, "<I"), (4, "<B"), (6, "<H"), (8, "<Q")],
}


@settings(max_examples=tiers.examples(600), deadline=None)
@given(
    st.integers(0, 100),
    st.lists(
        st.tuples(st.sampled_from(sorted(FIELDS)), st.integers(0, 1000), st.integers(0, 3), WORDS),
        min_size=1,
        max_size=3,
    ),
)
def test_forged_symbols_and_relocations_do_no_harm(victim: int, changes: list[tuple[int, int, int, int]]) -> None:
    content = original = victims()[victim % len(victims())]
    for kind, entry, field, value in changes:
        if not any(section.kind == kind for section in elf.read_object(original).sections):
            continue
        at, form = FIELDS[kind][field]
        try:
            content = changed_field(content, kind, entry, at, form, value % (1 << 8 * struct.calcsize(form)))
        except ArtifactError:
            return  # the change before has broken it
    refused_or_linked(content)


@settings(max_examples=tiers.examples(600), deadline=None)
@given(st.integers(0, 100), st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9), WORDS), min_size=1, max_size=3))
def test_forged_sections_do_no_harm(victim: int, changes: list[tuple[int, int, int]]) -> None:
    content = bytearray(victims()[victim % len(victims())])
    table, count = struct.unpack_from("<Q", content, 40)[0], struct.unpack_from("<H", content, 60)[0]
    fields: list[Callable[[int], tuple[int, str]]] = [
        lambda start, k=k: (start + (0, 4, 8, 16, 24, 32, 40, 44, 48, 56)[k], "<" + "IIQQQQIIQQ"[k])  # type: ignore[misc]
        for k in range(10)
    ]
    for section, field, value in changes:
        at, form = fields[field](table + 64 * (section % count))
        struct.pack_into(form, content, at, value % (1 << 8 * struct.calcsize(form)))
    refused_or_linked(bytes(content))
