"""Weights that a thread moves to huge pages while their model runs: results, addresses, memory, and what stops it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import relaxlite as rl
from relaxlite import config
from relaxlite.errors import OutOfMemoryError
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.types import TensorType
from relaxlite.runtime import weights
from relaxlite.runtime.mapped_file import MappedFile
from relaxlite.runtime.weights import place_weights

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere weights stay where they are")
SIZE = 1024
LAYERS = 6  # of 4 MB


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    bb, rng = BlockBuilder(), np.random.default_rng(0)
    with bb.function("main", x=TensorType.of((bb.symbol("m"), SIZE), "float32")) as (x,):
        for _ in range(LAYERS):
            w = (rng.standard_normal((SIZE, SIZE)) * SIZE**-0.5).astype(np.float32)
            x = bb.emit(ops.matmul(x, w))
        bb.result(x)
    path = tmp_path_factory.mktemp("weights") / "m.rlx"
    rl.compile(bb.module()).save(path)
    return path


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large file, whatever the system has it in."""
    monkeypatch.setattr(MappedFile, "is_in_huge_pages", lambda _: False)
    monkeypatch.setattr(weights, "_SHARED_FROM", 8 << 20)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The thread copies as many pieces as the list's number says, and then waits until it grows."""
    allowed, copy_pieces = [0], weights._copy_pieces

    def waiting(array: np.ndarray, copy: np.ndarray) -> Iterator[tuple[int, int]]:
        for piece in copy_pieces(array, copy):
            while allowed[0] <= 0:
                time.sleep(0.001)
            allowed[0] -= 1
            yield piece

    monkeypatch.setattr(weights, "_copy_pieces", waiting)
    yield allowed
    allowed[0] = 1 << 30


def x_of(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, SIZE)).astype(np.float32)


def large(exe: rl.Executable) -> list[int]:
    """Numbers of the matrices among the constants."""
    return [k for k, array in enumerate(exe.data.constants) if array.nbytes >= 1 << 20]


def is_moved(exe: rl.Executable) -> list[bool]:
    constants = exe._vm.constants
    found = []
    for k in large(exe):
        tensor = constants.tensors[k]
        assert constants.addresses[k] == tensor.ptr
        found.append(tensor.ptr != exe.data.constants[k].ctypes.data)
    return found


def resident(array: np.ndarray) -> int:
    """Bytes in memory of the mapped file that an array is part of."""
    file = weights._owner(array)
    assert isinstance(file, MappedFile)
    start = np.frombuffer(file, np.uint8).ctypes.data
    found = re.search(rf"^0*{start:x}-.*\n(?:.*\n)*?Rss: *(\d+) kB", Path("/proc/self/smaps").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.parametrize("interpret", [False, True])
def test_a_model_runs_while_its_weights_move(saved: Path, held: list[int], interpret: bool) -> None:
    with config.override(interpret=interpret, huge_pages=False):
        still = rl.load(saved)
        wanted = {rows: still(x_of(rows)) for rows in (0, 1, 3, 33)}
    with config.override(interpret=interpret):
        exe = rl.load(saved)
    pieces = sum(-(-exe.data.constants[k].nbytes // weights._PIECE) for k in large(exe))
    assert not any(is_moved(exe))
    for _ in range(pieces + 1):
        for rows, expected in wanted.items():
            np.testing.assert_array_equal(exe(x_of(rows)), expected)
        held[0] += 1
        time.sleep(0.01)
    held[0] = 1 << 30
    exe._vm.constants.wait_until_moved()
    assert len(is_moved(exe)) == LAYERS and all(is_moved(exe))
    for rows, expected in wanted.items():
        np.testing.assert_array_equal(exe(x_of(rows)), expected)


def test_weights_that_have_moved_are_in_memory_once(saved: Path) -> None:
    exe = rl.load(saved)
    exe._vm.constants.wait_until_moved()
    assert resident(exe.data.constants[large(exe)[0]]) == 0


def test_other_functions_and_profiles_take_them_from_where_they_are(saved: Path) -> None:
    exe = rl.load(saved)
    exe.profile(x_of(2), runs=1)
    assert all(is_moved(exe)) and exe.entry("main")._vm.constants is exe._vm.constants


def test_they_stay_where_no_memory_is_left(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(nbytes: int, what: str) -> None:
        raise OutOfMemoryError(f"{what}: the system has no memory left")

    monkeypatch.setattr(weights, "allocate", refused)
    exe = rl.load(saved)
    exe._vm.constants.wait_until_moved()
    assert not any(is_moved(exe)) and np.isfinite(exe(x_of(3))).all()


def test_they_stay_where_no_thread_can_be_had(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    exe = rl.load(saved)
    exe._vm.constants.wait_until_moved()
    assert not any(is_moved(exe)) and np.isfinite(exe(x_of(3))).all()


def test_only_what_is_left_of_large_files_waits(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = rl.load(saved).data.constants
    others = [np.arange(5000.0), np.ones((3000, 100), np.float32).T]
    found, waiting = place_weights([*constants, *others])
    assert [found[k] is constants[k] for k in waiting] == [True] * len(waiting)
    assert set(waiting) >= {k for k, array in enumerate(constants) if array.nbytes >= 1 << 20}
    assert found[-1].flags.c_contiguous and not found[-1].flags.writeable
    monkeypatch.setattr(weights, "_SHARED_FROM", 1 << 30)
    assert place_weights(constants)[1] == ()


def test_a_process_ends_while_weights_move(saved: Path) -> None:
    """The thread stops before anything is taken down that it uses."""
    program = f"""
import atexit, time
atexit.register(lambda: print(mover.is_alive(), all(t.ptr != p for t, p in zip(tensors, places))))  # runs last
import relaxlite as rl
from relaxlite.runtime import weights
from relaxlite.runtime.mapped_file import MappedFile
MappedFile.is_in_huge_pages = lambda self: False
weights._SHARED_FROM = 8 << 20
copy_pieces = weights._copy_pieces
def slow(array, copy):
    for piece in copy_pieces(array, copy):
        time.sleep(0.3)
        yield piece
weights._copy_pieces = slow
exe = rl.load({str(saved)!r})
constants = exe._vm.constants
mover, tensors = constants._mover, [t for t in constants.tensors if t.nbytes >= 1 << 20]
places = [t.ptr for t in tensors]
assert mover.is_alive()
"""
    found = subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True)
    assert found.stdout.split() == ["False", "False"]
