"""The thread pool: every chunk exactly once, in every situation that a kernel can be called in."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import llvmlite.binding as llvm
import numpy as np
import pytest

from relaxlite.config import usable_cores
from relaxlite.errors import InvalidArgumentError, RelaxliteError
from relaxlite.runtime import jit, threadpool
from relaxlite.runtime.threadpool import ThreadPool, WaitKind
from tests.support.paths import ROOT

CHUNK = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64)
PARALLEL_FOR = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
TIMEOUT_S = 60.0

# count: adds 1 to the chunk's cell. fail: the same, and the status is the chunk's number.
# nest: a parallel loop over the four cells of the chunk. repeat: many parallel loops over the same chunks.
CHUNKS_IR = """
declare i32 @relaxlite_parallel_for(ptr, ptr, i64)

define i32 @count(ptr %cells, i64 %chunk) {
  %cell = getelementptr i64, ptr %cells, i64 %chunk
  %before = atomicrmw add ptr %cell, i64 1 monotonic
  ret i32 0
}

define i32 @fail(ptr %cells, i64 %chunk) {
  %counted = call i32 @count(ptr %cells, i64 %chunk)
  %status = trunc i64 %chunk to i32
  ret i32 %status
}

define i32 @nest(ptr %cells, i64 %chunk) {
  %first = mul i64 %chunk, 4
  %row = getelementptr i64, ptr %cells, i64 %first
  %status = call i32 @relaxlite_parallel_for(ptr @count, ptr %row, i64 4)
  ret i32 %status
}

define i32 @repeat(ptr %cells, i64 %chunks, i64 %times) {
entry:
  br label %loop
loop:
  %time = phi i64 [ 0, %entry ], [ %following, %loop ]
  %status = call i32 @relaxlite_parallel_for(ptr @count, ptr %cells, i64 %chunks)
  %following = add i64 %time, 1
  %again = icmp slt i64 %following, %times
  br i1 %again, label %loop, label %done
done:
  ret i32 %status
}
"""


class Harness:
    """One pool, and native chunk functions that are linked against it."""

    def __init__(self, pool: ThreadPool, name: str) -> None:
        self.pool = pool
        self._address = pool.symbols()["relaxlite_parallel_for"]
        self._functions = jit.link_text(
            CHUNKS_IR,
            imports={"relaxlite_parallel_for": self._address},
            exports=("count", "fail", "nest", "repeat"),
            name=f"test_threadpool_{name}",
        )

    def run(self, fn: str, cells: np.ndarray, chunks: int) -> int:
        return int(PARALLEL_FOR(self._address)(self._functions[fn], cells.ctypes.data, chunks))

    def run_python(self, chunk: Callable[[int], int], chunks: int) -> int:
        callback = CHUNK(lambda _, index: chunk(index))
        return int(PARALLEL_FOR(self._address)(ctypes.cast(callback, ctypes.c_void_p), None, chunks))

    def repeat(self, cells: np.ndarray, chunks: int, times: int) -> int:
        repeat = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        return int(repeat(self._functions["repeat"])(cells.ctypes.data, chunks, times))

    def native_num_threads(self) -> int:
        return int(ctypes.CFUNCTYPE(ctypes.c_int64)(self.pool.symbols()["relaxlite_num_threads"])())

    def hold(self, delta: int) -> None:
        ctypes.CFUNCTYPE(None, ctypes.c_int32)(self.pool.symbols()["relaxlite_hold_workers"])(delta)


def _wait_kinds() -> list[WaitKind]:
    return ["wait_on_address"] if sys.platform == "win32" else sorted({threadpool.default_wait_kind(), "condvar"})


@pytest.fixture(scope="module", params=_wait_kinds())
def shared_harness(request: pytest.FixtureRequest) -> Harness:
    return Harness(ThreadPool(wait=request.param), request.param)


@pytest.fixture
def harness(shared_harness: Harness) -> Iterator[Harness]:
    """The pool with four threads, whatever the machine has: fewer cores only make it harder."""
    shared_harness.pool.set_num_threads(4)
    yield shared_harness
    shared_harness.pool.set_num_threads(1)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_chunk_runs_exactly_once(harness: Harness, threads: int) -> None:
    harness.pool.set_num_threads(threads)
    for chunks in (0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 64, 1000, 100_003):
        cells = np.zeros(chunks + 1, np.int64)
        assert harness.run("count", cells, chunks) == 0
        np.testing.assert_array_equal(cells, [1] * chunks + [0])


@pytest.mark.parametrize("chunks", [0, -1, -(2**62)])
def test_no_chunks_is_no_work(harness: Harness, chunks: int) -> None:
    cells = np.zeros(1, np.int64)
    assert harness.run("fail", cells, chunks) == 0
    assert cells[0] == 0


def test_one_chunk_runs_in_the_calling_thread(harness: Harness) -> None:
    def note(_: int) -> int:
        seen.append(threading.get_ident())
        return 0

    seen: list[int] = []
    harness.run_python(note, 1)
    assert seen == [threading.get_ident()]


@pytest.mark.parametrize("threads", [1, 4])
def test_a_failing_chunk_gives_its_status_and_the_others_still_run(harness: Harness, threads: int) -> None:
    harness.pool.set_num_threads(threads)
    for _ in range(200):
        cells = np.zeros(50, np.int64)
        assert harness.run("fail", cells, 50) in range(1, 50)
        assert (cells == 1).all()
        assert harness.run("fail", cells, 2) == 1
        assert harness.run("count", cells, 50) == 0  # a status does not outlive its loop
    assert harness.run_python(lambda chunk: -7 if chunk == 3 else 0, 4) == -7


def test_ten_thousand_loops(harness: Harness) -> None:
    cells = np.zeros(5, np.int64)
    for _ in range(10_000):
        harness.run("count", cells, 5)
    assert harness.repeat(cells, 5, 100_000) == 0
    np.testing.assert_array_equal(cells, [110_000] * 5)


def test_loops_with_pauses_around_the_time_when_workers_fall_asleep(harness: Harness) -> None:
    cells = np.zeros(4, np.int64)
    for step in range(300):
        harness.run("count", cells, 4)
        time.sleep(step * 2e-6)
    np.testing.assert_array_equal(cells, [300] * 4)


def _all_meet(harness: Harness, threads: int) -> bool:
    """Whether as many threads take part: each chunk waits until all chunks have begun."""

    def meet(_: int) -> int:
        try:
            meeting.wait(TIMEOUT_S / 2)
            return 0
        except threading.BrokenBarrierError:
            return 1

    meeting = threading.Barrier(threads)
    return harness.run_python(meet, threads) == 0


@pytest.mark.parametrize("pause_s", [0.0, 0.02])
def test_sleeping_workers_wake_and_help(harness: Harness, pause_s: float) -> None:
    for threads in (4, 2):
        harness.pool.set_num_threads(threads)
        for _ in range(10):
            time.sleep(pause_s)
            assert _all_meet(harness, threads)


def test_a_caller_that_sleeps_until_a_slow_worker_is_done_is_woken(harness: Harness) -> None:
    def slow_elsewhere(_: int) -> int:
        meeting.wait(TIMEOUT_S)
        if threading.get_ident() != caller:
            time.sleep(0.02)
        return 0

    caller = threading.get_ident()
    for _ in range(10):
        meeting = threading.Barrier(2)
        start = time.perf_counter()
        assert harness.run_python(slow_elsewhere, 2) == 0
        assert time.perf_counter() - start >= 0.02


def test_nested_loops_run_every_chunk(harness: Harness) -> None:
    cells = np.zeros(400, np.int64)
    for _ in range(500):
        assert harness.run("nest", cells, 100) == 0
    assert (cells == 500).all()


def test_several_python_threads_at_once(harness: Harness) -> None:
    arrays = [np.zeros(37, np.int64) for _ in range(6)]
    callers = [threading.Thread(target=harness.repeat, args=(cells, 37, 5_000), daemon=True) for cells in arrays]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(TIMEOUT_S)
        assert not caller.is_alive()
    for cells in arrays:
        assert (cells == 5_000).all()


def test_the_thread_count_bounds_who_joins(harness: Harness) -> None:
    def note(_: int) -> int:
        seen.add(threading.get_ident())
        time.sleep(0.001)
        return 0

    for threads in (4, 2, 1, 3):
        harness.pool.set_num_threads(threads)
        assert harness.pool.num_threads() == harness.native_num_threads() == threads
        seen: set[int] = set()
        for _ in range(5):
            harness.run_python(note, 40)
        assert threading.get_ident() in seen
        assert len(seen) <= threads


def test_counts_change_while_loops_run(harness: Harness) -> None:
    cells = np.zeros(16, np.int64)
    caller = threading.Thread(target=harness.repeat, args=(cells, 16, 50_000), daemon=True)
    caller.start()
    changes = 0
    while caller.is_alive() and changes < 100_000:
        harness.pool.set_num_threads(1 + changes % 5)
        changes += 1
    caller.join(TIMEOUT_S)
    assert not caller.is_alive()
    assert (cells == 50_000).all()


@pytest.mark.parametrize("held", [False, True])
def test_idle_workers_use_no_cpu_time(harness: Harness, held: bool) -> None:
    """Not even when a graph that died has left its hold behind."""
    harness.hold(int(held))
    harness.repeat(np.zeros(8, np.int64), 8, 1000)
    time.sleep(0.3)
    before = time.process_time()
    time.sleep(0.5)
    used = time.process_time() - before
    harness.hold(-int(held))
    assert used < 0.25  # one worker that spins takes all of the half second, also where the machine is busy


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_workers_of_its_own(harness: Harness) -> None:
    def child() -> bool:
        cells = np.zeros(64, np.int64)
        harness.repeat(cells, 64, 1000)
        return _all_meet(harness, 4) and bool((cells == 1000).all()) and harness.native_num_threads() == 4

    harness.run("count", np.zeros(64, np.int64), 64)
    assert _exit_code_of_fork(child) == 0
    cells = np.zeros(64, np.int64)
    harness.repeat(cells, 64, 1000)
    assert (cells == 1000).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork_while_another_thread_is_in_a_loop(harness: Harness) -> None:
    cells, other_cells = np.zeros(64, np.int64), np.zeros(64, np.int64)
    other = threading.Thread(target=harness.repeat, args=(other_cells, 64, 200_000), daemon=True)
    other.start()
    codes = [_exit_code_of_fork(lambda: harness.repeat(cells, 64, 100) == 0 and (cells == 100).all()) for _ in range(5)]
    other.join(TIMEOUT_S)
    assert not other.is_alive()
    assert codes == [0] * 5
    assert (other_cells == 200_000).all()


def _exit_code_of_fork(child: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if child() else 1)
        finally:
            os._exit(2)
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return -1


def test_symbols_from_several_threads_start_one_pool() -> None:
    pool = ThreadPool()
    answers: list[dict[str, int]] = []
    starters = [threading.Thread(target=lambda: answers.append(pool.symbols())) for _ in range(8)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join(TIMEOUT_S)
    assert len(answers) == 8
    assert all(answer == answers[0] for answer in answers)
    assert set(answers[0]) == set(threadpool.KERNEL_SYMBOLS)
    pool.set_num_threads(1)


def test_module_functions_share_one_pool() -> None:
    count = threadpool.num_threads()
    assert threadpool.symbols() == threadpool.symbols()
    native = ctypes.CFUNCTYPE(ctypes.c_int64)(threadpool.symbols()["relaxlite_num_threads"])
    for wanted in (3, 1, count):
        threadpool.set_num_threads(wanted)
        assert native() == threadpool.num_threads() == wanted


@pytest.mark.parametrize("count", [0, -1, 1025, 2.0, "4", None])
def test_a_wrong_thread_count_is_refused(count: object) -> None:
    before = threadpool.num_threads()
    with pytest.raises(InvalidArgumentError, match=r"the number of threads must be"):
        threadpool.set_num_threads(count)  # type: ignore[arg-type]
    assert threadpool.num_threads() == before


@pytest.mark.parametrize("text", ["0", "-2", "four", "1.5", "9999"])
def test_a_wrong_environment_variable_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("RELAXLITE_NUM_THREADS", text)
    with pytest.raises(
        RelaxliteError, match=rf"RELAXLITE_NUM_THREADS must be a whole number from 1 to 1024, got '{text}'"
    ):
        ThreadPool().symbols()


@pytest.mark.parametrize(("text", "expected"), [("3", 3), (" 1 ", 1), ("", usable_cores())])
def test_the_environment_variable_sets_the_default(monkeypatch: pytest.MonkeyPatch, text: str, expected: int) -> None:
    monkeypatch.setenv("RELAXLITE_NUM_THREADS", text)
    assert ThreadPool().num_threads() == expected


def _python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def test_importing_neither_reads_the_variable_nor_starts_threads() -> None:
    program = "import threading; from relaxlite.runtime import threadpool; print(threading.active_count())"
    done = _python(program, RELAXLITE_NUM_THREADS="four")
    assert (done.returncode, done.stdout.strip()) == (0, "1")
    done = _python(program + "; threadpool.symbols()", RELAXLITE_NUM_THREADS="four")
    assert done.returncode == 1
    assert "InvalidArgumentError: environment variable RELAXLITE_NUM_THREADS must be" in done.stderr


def test_the_process_ends_cleanly_with_workers_spinning_or_asleep() -> None:
    for pause_s in (0.0, 0.05):
        program = f"import time; from relaxlite.runtime import threadpool; threadpool.symbols(); time.sleep({pause_s})"
        done = _python(program, RELAXLITE_NUM_THREADS="4")
        assert (done.returncode, done.stderr) == (0, "")


def test_a_system_that_refuses_threads_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool = ThreadPool()
    pool.set_num_threads(4)
    with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match="relaxlite uses 1 threads"):
        patch.setattr(threading.Thread, "start", refuse)
        pool.symbols()
    assert pool.num_threads() == 1


@pytest.mark.parametrize(
    ("wait", "machine", "triple"),
    [
        ("futex", "x86_64", "x86_64-unknown-linux-gnu"),
        ("futex", "aarch64", "aarch64-unknown-linux-gnu"),
        ("futex", "riscv64", "riscv64-unknown-linux-gnu"),
        ("condvar", "arm64", "arm64-apple-macosx"),
        ("wait_on_address", "AMD64", "x86_64-pc-windows-msvc"),
        ("wait_on_address", "ARM64", "aarch64-pc-windows-msvc"),
    ],
)
def test_the_pool_compiles_for_other_platforms(wait: WaitKind, machine: str, triple: str) -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(threadpool.pool_ir(wait, machine))
    module.verify()
    features = "+m,+a" if machine == "riscv64" else ""
    target_machine = llvm.Target.from_triple(triple).create_target_machine(features=features)
    assert len(target_machine.emit_object(module)) > 1000
