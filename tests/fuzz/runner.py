"""Many cases: one process per core, which may die or hang without stopping the others; progress, and what was found."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

SECONDS = 120.0  # after which a case counts as hanging
QUICK = 80  # percent of the cases whose machine code LLVM does not optimize: ten times faster


@dataclass
class Worker:
    """A process, the seed that it is at, and since when."""

    process: Any
    pipe: Connection
    seed: int | None = None
    since: float = field(default_factory=time.monotonic)


@dataclass
class Tally:
    """What came of the cases so far."""

    target: int | None
    deadline: float | None
    started: float = field(default_factory=time.monotonic)
    done: int = 0
    kinds: dict[str, list[int]] = field(default_factory=dict)

    def note(self, seed: int, kind: str) -> bool:
        """Keep a failure; whether it is the first of its kind."""
        seeds = self.kinds.setdefault(kind, [])
        seeds.append(seed)
        return len(seeds) == 1

    @property
    def failures(self) -> int:
        return sum(map(len, self.kinds.values()))

    def is_over(self, given: int) -> bool:
        is_late = self.deadline is not None and time.monotonic() > self.deadline
        return is_late or (self.target is not None and given >= self.target)

    def line(self) -> str:
        seconds = time.monotonic() - self.started
        goal = f"/{self.target}" if self.target else ""
        part = self.done / self.target if self.target else 0.0
        if self.deadline is not None:
            part = max(part, seconds / max(self.deadline - self.started, 1e-9))
        bar = "#" * int(20 * min(part, 1)) + "." * (20 - int(20 * min(part, 1)))
        rate = self.done / max(seconds, 1e-9)
        return f"[{bar}] {self.done}{goal} modules, {rate:.1f}/s, {self.failures} failures of {len(self.kinds)} kinds"


def work(pipe: Connection) -> None:
    """Check the cases of the seeds that come in; says (seed, kind, text), or (seed, None, None) when all is well."""
    from tests.fuzz.case import check, random_case

    prepare()
    while (seed := pipe.recv()) is not None:
        faulthandler.dump_traceback_later(0.9 * SECONDS)  # where it hangs, before it is stopped
        quick(seed % 100 < QUICK)
        try:
            problem = check(random_case(seed))
        except Exception as error:
            pipe.send((seed, f"generator: {type(error).__name__}", str(error)))
            continue
        pipe.send((seed, problem.kind, problem.text) if problem else (seed, None, None))
    faulthandler.cancel_dump_traceback_later()


def prepare() -> None:
    """One thread, and no kernels on disk: most are there once."""
    from relaxlite import config

    config.set(compile_threads=1, kernel_cache_mb=0)


def quick(is_quick: bool) -> None:
    """Whether LLVM leaves out its own optimizations."""
    from functools import partial

    from relaxlite.codegen.llvm import machine_code

    machine_code.to_object = partial(_to_object(), optimize=not is_quick)  # type: ignore[assignment]


def _to_object() -> Callable[..., bytes]:
    from relaxlite.codegen.llvm import machine_code

    made = machine_code.to_object
    return made.func if hasattr(made, "func") else made  # type: ignore[no-any-return]


def run_many(
    seeds: Iterator[int],
    jobs: int,
    tally: Tally,
    found: Callable[[int, str, str], None],
    show: Callable[[str], None],
    target: Callable[[Connection], None] = work,
) -> None:
    """Check cases until the tally is over. `found` is called for the first failure of each kind; `target` is what a
    process runs."""
    context = multiprocessing.get_context("spawn")
    workers = [_start(context, target) for _ in range(jobs)]
    given = 0
    for k, worker in enumerate(workers):
        if not tally.is_over(given):
            given += 1
            _give(worker, next(seeds))
        workers[k] = worker
    shown = 0.0
    while any(w.seed is not None for w in workers):
        wait([w.pipe for w in workers if w.seed is not None], timeout=1.0)
        for k, worker in enumerate(workers):
            if worker.seed is None:
                continue
            answer = _answer(worker)
            if answer is None:
                continue
            seed, kind, text = answer
            tally.done += 1
            if kind is not None and tally.note(seed, kind):
                found(seed, kind, text)
            if not worker.process.is_alive() or kind == "hangs":
                worker.process.kill()
                workers[k] = worker = _start(context, target)
            worker.seed = None
            if not tally.is_over(given):
                given += 1
                _give(worker, next(seeds))
        if time.monotonic() - shown > 1.0:
            shown = time.monotonic()
            show(tally.line())
    for worker in workers:
        worker.pipe.send(None)
        worker.process.join()


def _start(context: Any, target: Callable[[Connection], None]) -> Worker:
    mine, other = context.Pipe()
    process = context.Process(target=target, args=(other,), daemon=True)
    process.start()
    other.close()
    return Worker(process, mine)


def _give(worker: Worker, seed: int) -> None:
    worker.seed, worker.since = seed, time.monotonic()
    worker.pipe.send(seed)


def _answer(worker: Worker) -> tuple[int, str | None, str] | None:
    """What the worker says; that it died, or hangs; None while it works."""
    assert worker.seed is not None
    try:
        if worker.pipe.poll():
            return worker.pipe.recv()  # type: ignore[no-any-return]
    except (EOFError, ConnectionError):
        worker.process.join()
        return worker.seed, "process died", f"the process ended with status {worker.process.exitcode}"
    if not worker.process.is_alive():
        return worker.seed, "process died", f"the process ended with status {worker.process.exitcode}"
    if time.monotonic() - worker.since > SECONDS:
        return worker.seed, "hangs", f"no answer after {SECONDS:.0f} s"
    return None


def write_failure(folder: Path, seed: int, kind: str, text: str, case: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(c if c.isalnum() else "_" for c in kind)[:60].strip("_")
    path = folder / f"{name}_{seed}.txt"
    comment = "".join(f"#   {line}\n" for line in text.split("\n")[:12])
    path.write_text(f"{case.rstrip()}\n\n# found by seed {seed}: {kind}\n{comment}")
    return path


class Progress:
    """Shows a line in place of the one before; where nobody watches, one every minute."""

    def __init__(self) -> None:
        self._shown = time.monotonic()

    def __call__(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{text:<{min(os.get_terminal_size().columns, 110) - 1}}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._shown > 60:
            self._shown = time.monotonic()
            print(text, flush=True)
