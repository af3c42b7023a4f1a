"""What one parallel loop costs: hot, after serial work, and after the process has been idle.

    python bench/threadpool.py [--threads N]

Best and median of many runs, in microseconds. "speed-up" is chunks of real work against the same work in one thread;
on a shared machine it says as much about the neighbours as about the pool.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable

from relaxlite.runtime import jit, threadpool

_IR = """
@sink = internal global i32 0

declare i32 @relaxlite_parallel_for(ptr, ptr, i64)

define i32 @empty(ptr %ctx, i64 %chunk) {
  ret i32 0
}

; %ctx points at the number of rounds of arithmetic to do.
define i32 @work(ptr %ctx, i64 %chunk) {
entry:
  %rounds = load i64, ptr %ctx
  br label %loop
loop:
  %round = phi i64 [ 0, %entry ], [ %following, %loop ]
  %value = phi i64 [ %chunk, %entry ], [ %mixed, %loop ]
  %scaled = mul i64 %value, 6364136223846793005
  %mixed = add i64 %scaled, 1442695040888963407
  %following = add i64 %round, 1
  %again = icmp slt i64 %following, %rounds
  br i1 %again, label %loop, label %done
done:
  %is_zero = icmp eq i64 %mixed, 0
  %status = zext i1 %is_zero to i32
  ret i32 %status
}

; %times: %gap rounds of serial work, then a parallel loop over %chunks.
define void @repeat(ptr %fn, ptr %ctx, i64 %chunks, ptr %gap, i64 %times) {
entry:
  br label %loop
loop:
  %time = phi i64 [ 0, %entry ], [ %following, %loop ]
  %serial = call i32 @work(ptr %gap, i64 %time)
  store volatile i32 %serial, ptr @sink
  %status = call i32 @relaxlite_parallel_for(ptr %fn, ptr %ctx, i64 %chunks)
  %following = add i64 %time, 1
  %again = icmp slt i64 %following, %times
  br i1 %again, label %loop, label %done
done:
  ret void
}
"""


class Bench:
    """Loops in native code, so that what ctypes costs is shared by many parallel loops."""

    def __init__(self) -> None:
        self.functions = jit.link_text(
            _IR,
            imports={"relaxlite_parallel_for": threadpool.symbols()["relaxlite_parallel_for"]},
            exports=("empty", "work", "repeat"),
            name="bench_threadpool",
        )
        arguments = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
        self._repeat = ctypes.CFUNCTYPE(None, *arguments)(self.functions["repeat"])

    def loop_us(self, fn: str, *, rounds: int, chunks: int, gap: int, times: int) -> float:
        """Microseconds per parallel loop (and the serial work before it)."""
        work, serial = ctypes.c_int64(rounds), ctypes.c_int64(gap)
        start = time.perf_counter_ns()
        self._repeat(self.functions[fn], ctypes.addressof(work), chunks, ctypes.addressof(serial), times)
        return (time.perf_counter_ns() - start) / 1e3 / times


def _summary(measure: Callable[[], float], runs: int) -> str:
    values = [measure() for _ in range(runs)]
    return f"best {min(values):9.2f}   median {statistics.median(values):9.2f}"


def _fork_join(bench: Bench, threads: int, rounds_per_us: float) -> None:
    """Empty bodies; the same serial work with a loop of one chunk, which never leaves the caller, is taken off."""
    for label, gap_us, times in (("hot", 0, 20_000), ("after 70 us", 70, 300), ("after 700 us", 700, 60)):
        gap = max(1, int(gap_us * rounds_per_us))

        def cost(gap: int = gap, times: int = times) -> float:
            serial = bench.loop_us("empty", rounds=1, chunks=1, gap=gap, times=times)
            return bench.loop_us("empty", rounds=1, chunks=threads, gap=gap, times=times) - serial

        print(f"fork/join, empty body, {label:14} {_summary(cost, 21)}")

    def after_idle() -> float:
        time.sleep(0.1)
        return bench.loop_us("empty", rounds=1, chunks=threads, gap=1, times=1)

    print(f"fork/join, empty body, {'after 100 ms':14} {_summary(after_idle, 15)}")


def _speed_up(bench: Bench, threads: int, rounds_per_us: float) -> None:
    for chunk_us in (2, 5, 20, 200, 2000):
        rounds, times = max(1, int(chunk_us * rounds_per_us)), max(20, 20_000 // chunk_us)

        def ratio(rounds: int = rounds, times: int = times) -> float:
            serial = bench.loop_us("work", rounds=rounds, chunks=1, gap=1, times=times) * threads
            return serial / bench.loop_us("work", rounds=rounds, chunks=threads, gap=1, times=times)

        values = [ratio() for _ in range(11)]
        print(
            f"{threads} chunks of {chunk_us:5d} us   speed-up best {max(values):.2f}, "
            f"median {statistics.median(values):.2f} of {threads}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=threadpool.num_threads())
    threads: int = parser.parse_args().threads
    threadpool.set_num_threads(threads)
    start = time.perf_counter()
    threadpool.symbols()
    print(f"{threads} threads; pool compiled and started in {1e3 * (time.perf_counter() - start):.1f} ms")
    bench = Bench()
    rounds_per_us = 1e5 / min(bench.loop_us("empty", rounds=1, chunks=1, gap=100_000, times=10) for _ in range(5))
    _fork_join(bench, threads, rounds_per_us)
    _speed_up(bench, threads, rounds_per_us)


if __name__ == "__main__":
    main()
