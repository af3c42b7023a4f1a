"""Scratch memory of native code: aligned, kept for the next request within bounds, safe between threads."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.runtime import scratch

ADDRESSES = scratch.symbols()
ALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64)(ADDRESSES["relaxlite_scratch_alloc"])
FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ADDRESSES["relaxlite_scratch_free"])
MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_waits() -> None:
    scratch.trim()


def alloc(nbytes: int) -> int:
    address = ALLOC(nbytes)
    assert address and address % 64 == 0
    ctypes.memset(address, 0xA5, nbytes)
    return int(address)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 1000, MIB - 1, MIB, 5 * MIB, 20 * MIB])
def test_blocks_are_aligned_and_large_enough(nbytes: int) -> None:
    FREE(alloc(nbytes))


@pytest.mark.parametrize("nbytes", [-1, -(1 << 63), 1 << 62, (1 << 63) - 1])
def test_what_cannot_be_had_is_null(nbytes: int) -> None:
    assert ALLOC(nbytes) is None


def test_null_is_freed_without_harm() -> None:
    FREE(None)


@pytest.mark.parametrize(("first", "second", "is_same"), [(8, 8, True), (8, 5, True), (8, 3, False), (8, 9, False)])
def test_large_blocks_are_used_again_for_like_sizes(first: int, second: int, is_same: bool) -> None:
    before = alloc(first * MIB)
    FREE(before)
    after = alloc(second * MIB)
    held = scratch.trim()  # what has not been used again still waits
    FREE(after)
    assert (held == 0) == is_same and (before == after or not is_same)


def test_small_blocks_are_left_to_the_c_library() -> None:
    FREE(alloc(MIB // 2))
    assert scratch.trim() == 0


def test_what_waits_is_bounded() -> None:
    blocks = [alloc(2 * MIB) for _ in range(20)]
    for block in blocks:
        FREE(block)
    assert 16 * MIB <= scratch.trim() < 17 * MIB  # eight places
    for block in [ALLOC(100 * MIB) for _ in range(4)]:
        FREE(block)
    assert 200 * MIB <= scratch.trim() <= 256 * MIB
    assert scratch.trim() == 0


def test_threads_never_share_a_block() -> None:
    wrong: list[int] = []

    def work(mark: int) -> None:
        for round_ in range(300):
            nbytes = MIB + 4096 * ((mark * 7 + round_) % 40)
            address = ALLOC(nbytes)
            words = (ctypes.c_int64 * (nbytes // 8)).from_address(address)
            words[0] = words[len(words) - 1] = mark
            if round_ % 3 == 0:
                other = ALLOC(2 * nbytes)
                FREE(other)
            if words[0] != mark or words[len(words) - 1] != mark:
                wrong.append(mark)
            FREE(address)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert scratch.trim() <= 256 * MIB and scratch.trim() == 0


# Results of a model


def twice(rows: int) -> np.ndarray:
    """2x of x (rows, 1024), where x[i] = i."""
    return _DOUBLE(np.repeat(np.arange(rows, dtype=np.float32)[:, None], 1024, axis=1))


def _double() -> rl.Executable:
    bb = rl.BlockBuilder()
    with bb.function("main", x=rl.TensorType.of((bb.symbol("n"), 1024), "float32")) as (x,):
        bb.result(bb.emit(rl.ops.multiply(x, np.float32(2))))
    return rl.compile(bb.module())


_DOUBLE = _double()
LARGE, SMALL = 9000, 100  # rows: 35 MiB, 400 KiB


def test_memory_of_a_large_result_serves_the_next() -> None:
    """Fresh pages took longer than the work: 16 ms for 128 MB in and out, and 7 with the same pages again."""
    first = twice(LARGE)
    place, nbytes = first.ctypes.data, first.nbytes
    del first
    held = scratch.array(nbytes + (2 << 20))  # as large as the block of such a result
    start = place - held.ctypes.data
    rows = held[start : start + nbytes].view(np.float32).reshape(LARGE, 1024)
    np.testing.assert_array_equal(rows[:, 5], np.arange(LARGE) * 2)  # of fresh pages these would be zeros
    del held, rows
    assert twice(LARGE).ctypes.data == place


def test_a_large_result_stays_while_a_view_of_it_lives() -> None:
    view = twice(LARGE)[::1000, 7]
    other = twice(LARGE)
    other[...] = -1
    np.testing.assert_array_equal(view, np.arange(0, LARGE, 1000) * 2)


def test_large_results_that_wait_are_given_back_when_asked() -> None:
    result = twice(LARGE)
    _DOUBLE.release_memory()
    assert result[5, 0] == 10  # it is in use
    del result
    assert _DOUBLE.release_memory() >= LARGE * 4096
    assert scratch.trim() == 0


def test_small_results_are_left_to_the_c_library() -> None:
    twice(SMALL)
    assert scratch.trim() == 0


def test_results_that_cannot_be_had() -> None:
    with pytest.raises(MemoryError):
        scratch.array(1 << 60)


def test_threads_take_and_drop_large_results() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(6):
            found = twice(LARGE + number)
            if not np.array_equal(found[:, 3], np.arange(LARGE + number) * 2):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
