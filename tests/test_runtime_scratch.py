"""Scratch memory of native code: aligned, kept for the next request within bounds, safe between threads."""

from __future__ import annotations

import ctypes
import threading

import pytest

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
