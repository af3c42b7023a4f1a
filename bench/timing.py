"""How often something is run and timed. Imports nothing beyond Python: peers may have an interpreter of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

MIN_RUNS = 3
PATIENCE = 2.0  # seconds beyond its turn for a peer to reach them
SETTLE_SECONDS = 1.0  # at most, for threads of a pool to stop spinning


def timed_runs(
    run: Callable[[], Any], seconds: float, most: int, *, reset: Callable[[], Any] = lambda: None
) -> list[float]:
    """Seconds of each run but the first; of that one too if it took so long that nothing is left to warm up.

    `reset` is called before each later run, and not timed.
    """
    clock = time.perf_counter
    start = clock()
    run()
    first = clock() - start
    times = [first] if first > PATIENCE else []
    deadline = clock() + seconds
    while (now := clock()) < deadline or len(times) < MIN_RUNS:
        if len(times) >= most or (times and now > deadline + PATIENCE):
            break
        reset()
        start = clock()
        run()
        times.append(clock() - start)
    return times


def settle() -> None:
    """Return when this process uses next to no processor time: pools spin for a while after their work."""
    deadline = time.perf_counter() + SETTLE_SECONDS
    while time.perf_counter() < deadline:
        before = time.process_time()
        time.sleep(0.005)
        if time.process_time() - before < 0.001:
            return
