"""Allocation: alignment, poison, the arena pool, and sizes that cannot be had."""

from __future__ import annotations

import mmap
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

import relaxlite as rl
from relaxlite import config
from relaxlite.errors import OutOfMemoryError
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Tuple
from relaxlite.ir.types import TensorType
from relaxlite.runtime.mapped_file import MappedFile, huge_bytes
from relaxlite.runtime.memory import (
    ALIGNMENT,
    MEMORY_LIMIT,
    ArenaPool,
    allocate,
    group_limits,
    size_text,
    tensor_bytes,
)
from relaxlite.runtime.weights import _owner, align_weights, gather_weights


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 1 << 20, (4 << 20) + 1])
def test_blocks_are_aligned_and_inside_their_memory(nbytes: int) -> None:
    memory = allocate(nbytes, "x")
    assert memory.ptr % ALIGNMENT == 0
    assert memory.base <= memory.ptr and memory.ptr + nbytes <= memory.base + memory.raw.nbytes
    assert nbytes < 4 << 20 or memory.ptr % (2 << 20) == 0


def test_large_weights_are_gathered_in_one_aligned_block() -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1000, 999)).astype("f4"), np.array(True), np.zeros((0, 3), "i8"), np.arange(70000)]
    made = gather_weights(arrays)
    for array, copy in zip(arrays, made, strict=True):
        np.testing.assert_array_equal(copy, array)
        assert copy.dtype == array.dtype and (copy.size == 0 or copy.ctypes.data % ALIGNMENT == 0)
        assert not copy.flags.writeable or sys.platform != "linux"
    if sys.platform == "linux":
        assert made[0].ctypes.data % (2 << 20) == 0
        assert made[-1].ctypes.data - made[0].ctypes.data < arrays[0].nbytes + 4 * ALIGNMENT
        assert all(not np.shares_memory(a, b) for a, b in zip(arrays, made, strict=True))


def of_its_own(count: int) -> np.ndarray:
    """Numbers in the middle of memory that nothing else is in, not to be written."""
    block = np.empty(4 * count + ALIGNMENT, np.uint8)
    array = block[-block.ctypes.data % ALIGNMENT :][: 4 * count].view(np.float32)
    array[...] = np.arange(count)
    array.flags.writeable = False
    return array


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere weights stay where they are")
def test_a_file_whose_weights_were_copied_takes_no_memory(tmp_path: Path) -> None:
    """Pages in which two weights met stayed, and what was read before the weights: 5 MB of a file of 98."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(9 << 20))
    content = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    assert not content[:5000].any()
    arrays = [content[start : start + 6100] for start in range(5000, content.size - 6100, 6100)]
    made = gather_weights(arrays)
    assert len(made) == len(arrays)
    assert _resident(path) == 0


def _resident(path: Path) -> int:
    """Bytes of a file that are in this process's memory."""
    regions = re.findall(rf"{re.escape(str(path))}\n(?:.*\n)*?Rss: *(\d+) kB", Path("/proc/self/smaps").read_text())
    assert len(regions) == 1
    return int(regions[0]) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere weights stay where they are")
def test_large_weights_with_memory_of_their_own_stay_there(tmp_path: Path) -> None:
    count = 5 << 20
    mine, small, writable = of_its_own(count), of_its_own(1000), of_its_own(count)
    writable.flags.writeable = True  # somebody may change it later
    part, off = of_its_own(3 * count)[:count], of_its_own(count)[1:]
    path = tmp_path / "weights"
    path.write_bytes(mine.tobytes())
    mapped = np.memmap(path, dtype=np.float32, mode="r").view(np.ndarray)
    arrays = [small, mine, writable, part, off, mapped, mine.reshape(-1, 4).T]
    made = gather_weights(arrays)
    assert [np.shares_memory(a, b) for a, b in zip(arrays, made, strict=True)] == [False, True, *[False] * 5]
    for array, found in zip(arrays, made, strict=True):
        np.testing.assert_array_equal(found, array)
        assert found.ctypes.data % ALIGNMENT == 0 and not found.flags.writeable


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere weights stay where they are")
@pytest.mark.parametrize("is_huge", [False, True])
def test_weights_stay_in_a_file_that_lies_in_huge_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_huge: bool
) -> None:
    monkeypatch.setattr(MappedFile, "is_in_huge_pages", lambda _: is_huge)
    monkeypatch.setattr("relaxlite.runtime.weights.MEMORY_LIMIT", 1 << 30)
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * (20 << 12))
    with open(path, "rb") as file:
        content = np.frombuffer(MappedFile.of(file), np.uint8)
    assert content[: 4 << 20].any()  # what is read before the weights
    arrays = [content[4 << 20 : 12 << 20], content[(12 << 20) + 1 : 13 << 20], content[13 << 20 :].view(np.int64)]
    made = gather_weights(arrays)
    assert [np.shares_memory(a, b) for a, b in zip(arrays, made, strict=True)] == [is_huge, False, is_huge]
    assert _resident(path) < 1 << 20
    for array, found in zip(arrays, made, strict=True):
        np.testing.assert_array_equal(found, array)
        assert found.ctypes.data % ALIGNMENT == 0 and not found.flags.writeable


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere weights stay where they are")
def test_a_saved_model_is_copied_unless_the_system_has_it_in_huge_pages(tmp_path: Path) -> None:
    bb = BlockBuilder()
    weight = np.arange(4096 * 1024, dtype=np.float32).reshape(4096, 1024)
    with bb.function("main", x=TensorType.of((bb.symbol("m"), 4096), "float32")) as (x,):
        bb.result(bb.emit(ops.matmul(x, weight)))
    path = tmp_path / "m.rlx"
    rl.compile(bb.module()).save(path)
    exe = rl.load(path)
    constant = max(exe.data.constants, key=lambda array: array.nbytes)
    text = Path("/proc/self/smaps").read_text()
    found = re.findall(rf"{re.escape(str(path))}\n(?:[A-Z].*\n)*?FilePmdMapped: *(\d+) kB", text)
    is_huge = sum(map(int, found)) << 10 > 0.8 * weight.nbytes
    assert isinstance(_owner(constant), MappedFile) == is_huge
    x = np.eye(3, 4096, 7, dtype=np.float32)
    np.testing.assert_array_equal(exe(x), weight[7:10])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is asked for")
def test_huge_pages_are_not_asked_for_beyond_half_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, all of a file would be read where only some experts are wanted."""
    path, asked = tmp_path / "weights", list[int]()
    path.write_bytes(bytes(4 << 20))
    monkeypatch.setattr(MappedFile, "madvise", lambda _, advice: asked.append(advice), raising=False)
    for limit in (8 << 20, (8 << 20) - 1):
        monkeypatch.setattr("relaxlite.runtime.mapped_file.MEMORY_LIMIT", limit)
        with open(path, "rb") as file:
            MappedFile.of(file)
    assert asked == [mmap.MADV_HUGEPAGE]


SMAPS = """\
7fe86ec00000-7fe894bb5000 r--s 00000000 fe:00 2458606                    /a file
Size:             622292 kB
FilePmdMapped:    620544 kB
VmFlags: rd mr me ms hg
08a9000-0cbb5000 r--s 00000000 fe:00 2458606                    /another
Size:                 10 kB
FilePmdMapped:         4 kB
VmFlags: rd
0dbb5000-0dbc5000 r--p 00000000 fe:00 2458606
Size:                 10 kB
"""


@pytest.mark.parametrize(
    ("start", "kilobytes"), [(0x7FE86EC00000, 620544), (0x8A9000, 4), (0xDBB5000, 0), (0x86EC00000, 0), (0xA9000, 0)]
)
def test_huge_pages_are_those_of_one_region(start: int, kilobytes: int) -> None:
    assert huge_bytes(SMAPS, start) == kilobytes << 10


@pytest.mark.parametrize("place", [align_weights, gather_weights])
def test_small_weights_start_with_a_cache_line(place: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]) -> None:
    whole = np.empty(5000, np.float32)
    arrays = [whole[k : k + 100] for k in range(32)]
    for array, made in zip(arrays, place(arrays), strict=True):
        np.testing.assert_array_equal(made, array)
        assert made.ctypes.data % ALIGNMENT == 0
        assert np.shares_memory(made, array) == (array.ctypes.data % ALIGNMENT == 0)


@pytest.mark.parametrize("place", [align_weights, gather_weights])
@pytest.mark.parametrize("shape", [(2, 3), (400, 30), (3000, 1000)])
def test_strided_weights_become_contiguous(
    place: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]], shape: tuple[int, int]
) -> None:
    array = np.random.default_rng(0).standard_normal(shape).T
    (made,) = place([array])
    np.testing.assert_array_equal(made, array)
    assert made.flags.c_contiguous and made.ctypes.data % ALIGNMENT == 0


@pytest.mark.parametrize("is_huge", [False, True])
def test_a_model_of_one_product_reads_aligned_weights(is_huge: bool) -> None:
    bb = BlockBuilder()
    weights = [np.ones((16, 16 + k), np.float32) for k in range(8)]
    with bb.function("main", x=TensorType.of((bb.symbol("m"), 16), "float32")) as (x,):
        bb.result(bb.emit(Tuple(tuple(bb.emit(ops.matmul(x, w)) for w in weights))))
    with config.override(huge_pages=is_huge):
        exe = rl.compile(bb.module())
    assert all(np.asarray(c).ctypes.data % ALIGNMENT == 0 for c in exe.data.constants)


@pytest.mark.skipif(sys.platform != "linux", reason="only there are weights gathered")
@pytest.mark.parametrize("mebibytes", [32, 96])  # which one thread copies, and several
def test_weights_are_not_in_memory_twice(tmp_path: Path, mebibytes: int) -> None:
    """What is copied from a mapped file leaves the process's memory; read again, it is still right."""
    written = np.arange(mebibytes << 17, dtype=np.int64)
    (tmp_path / "weights").write_bytes(written.tobytes())
    with open(tmp_path / "weights", "rb") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.int64)
    parts = [mapped[:1000], mapped[1000 : 1 << 20], *np.split(mapped[1 << 20 : -(1 << 20)], 2), mapped[-(1 << 20) :]]
    before = _mapped_bytes()
    made = gather_weights(parts)
    assert _mapped_bytes() - before < written.nbytes // 4  # the system maps more than is read at the edges
    for part, copy in zip(parts, made, strict=True):
        np.testing.assert_array_equal(copy, part)


@pytest.mark.skipif(sys.platform != "linux", reason="only there are weights gathered")
def test_what_was_written_over_a_mapped_file_stays(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(8 << 20))
    with open(tmp_path / "weights", "rb") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
    mapped[:] = 7
    (copy,) = gather_weights([mapped])
    assert (mapped == 7).all() and (copy == 7).all()


def _mapped_bytes() -> int:
    """Of files, in this process's memory."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) * 1024


def test_poison_is_nan() -> None:
    memory = allocate(64, "x", poison=True)
    start = memory.ptr - memory.base
    assert np.isnan(memory.raw[start : start + 64].view(np.float32)).all()


@pytest.mark.parametrize(
    ("nbytes", "message"),
    [
        (-1, "arena r3: a size of -1 bytes is negative or overflows 64 bits"),
        (1 << 63, "is negative or overflows 64 bits"),
        ((1 << 63) - 1, "arena r3: needs 8.0 EiB, more than the "),
        (MEMORY_LIMIT + 1, "of memory of this machine"),
    ],
)
def test_impossible_sizes_are_errors(nbytes: int, message: str) -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        allocate(nbytes, "arena r3")
    assert message in str(caught.value)
    with pytest.raises(OutOfMemoryError):
        ArenaPool().take(nbytes, "arena r3")


@pytest.mark.parametrize(
    ("said", "files", "limits"),
    [
        ("0::/", {"memory.max": "700"}, {700}),
        ("0::/", {"memory.max": "max"}, set()),
        ("0::/a.slice/b.service", {"a.slice/memory.max": "800", "a.slice/b.service/memory.max": "600"}, {600, 800}),
        ("0::/a.slice/b.service", {"a.slice/memory.max": "800", "c.slice/memory.max": "1"}, {800}),
        ("4:cpu:/x\n3:memory:/y\n0::/", {"memory/y/memory.limit_in_bytes": "500"}, {500}),
        ("4:cpu:/x\n3:memory:/y\n0::/", {"memory/x/memory.limit_in_bytes": "500"}, set()),
        ("3:cpu,memory:/y/z", {"memory/y/memory.limit_in_bytes": "400"}, {400}),
        ("3:memory:/docker/1f", {"memory/memory.limit_in_bytes": "300"}, {300}),  # a container that sees its own only
        ("0::/../host", {"memory.max": "200"}, {200}),
        (None, {"memory.max": "100"}, {100}),
        (None, {}, set()),
    ],
)  # fmt: skip
def test_limits_of_nested_and_of_old_control_groups_count(
    said: str | None, files: dict[str, str], limits: set[int], tmp_path: Path
) -> None:
    texts = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in (texts if said is None else {**texts, "proc/self/cgroup": said}).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert set(group_limits(str(tmp_path))) == limits


def test_tensor_sizes_are_checked() -> None:
    assert tensor_bytes((2, 3), "float32", "x") == 24
    assert tensor_bytes((0, 1 << 62), "float32", "x") == 0
    with pytest.raises(OutOfMemoryError, match=r"tensor y: the shape \(2, -3\) has a negative dimension"):
        tensor_bytes((2, -3), "float32", "tensor y")
    with pytest.raises(
        OutOfMemoryError, match=r"tensor y: float32\[4294967296, 4294967296\] has \d+ bytes, which over"
    ):
        tensor_bytes((1 << 32, 1 << 32), "float32", "tensor y")


def test_sizes_read_well() -> None:
    texts = [size_text(size) for size in (0, 1023, 1024, 3 << 19, 5 << 30, 1 << 60)]
    assert texts == ["0 bytes", "1023 bytes", "1.0 KiB", "1.5 MiB", "5.0 GiB", "1.0 EiB"]


def test_the_pool_reuses_what_fits_best() -> None:
    pool = ArenaPool()
    small, large = pool.take(100, "a"), pool.take(10 << 20, "b")
    pool.give([large, small])
    assert pool.take(50, "a") is small
    assert pool.take(50, "a") is large


def test_the_pool_does_not_grow_when_sizes_do() -> None:
    pool = ArenaPool()
    for size in range(1 << 20, 40 << 20, 3 << 20):
        pool.give([pool.take(size, "a")])
    assert 37 << 20 <= pool.release() <= 42 << 20
    assert pool.release() == 0


def test_a_size_that_grows_a_little_keeps_its_arena() -> None:
    pool = ArenaPool()
    first = pool.take(1_000_001, "a")
    pool.give([first])
    assert pool.take(1_010_000, "a") is first


def test_poisoned_pools_poison_what_they_reuse() -> None:
    pool = ArenaPool(poison=True)
    arena = pool.take(64, "a")
    arena.raw.fill(0)
    pool.give([arena])
    assert pool.take(64, "a").raw.min() == 0xFF


def test_threads_never_share_an_arena() -> None:
    pool, shared = ArenaPool(), []

    def work(number: int) -> None:
        for _ in range(200):
            arena = pool.take(4096, "a")
            arena.raw.fill(number)
            if (arena.raw != number).any():
                shared.append(number)
            pool.give([arena])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not shared
