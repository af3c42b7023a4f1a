"""Rounds over peers: everyone runs the same case in turn, again and again."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.cpu.cases import Case, Workload
from bench.cpu.worker import PeerError, Worker
from relaxlite.config import system_variables

TOLERANCE = 1e-4
REFERENCES = (
    "onnxruntime",
    "relaxlite",
    "relaxlite-kernels",
)  # the first that has run a case is what others must equal
MAX_RUNS = 400  # of a turn
OURS = ("machine", "relaxlite", "relaxlite-compile", "relaxlite-kernels", "relaxlite-bf16")


@dataclass(slots=True)
class Timing:
    """Of one peer on one case, in seconds per run of the whole model.

    error: the largest difference of any output from the reference's, against that output's largest magnitude.
    problem: why there is nothing.
    """

    median: float | None = None
    p10: float | None = None
    p90: float | None = None
    runs: int = 0
    error: float | None = None
    load: float | None = None
    problem: str | None = None

    @property
    def agrees(self) -> bool:
        return self.error is None or self.error <= TOLERANCE


@dataclass(slots=True)
class Result:
    group: str
    workload: str
    case: str
    threads: int
    layers: int
    work: dict[str, Any] | None  # kind and amount, of all layers
    reference: str | None
    peers: dict[str, Timing] = field(default_factory=dict)


@dataclass(slots=True)
class Team:
    """The workers, one for each peer and thread count, started at first use."""

    chosen: Sequence[str]
    versions: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    _workers: dict[tuple[str, int], Worker] = field(default_factory=dict)

    def of(self, workload: Workload) -> dict[str, Worker]:
        """Those that may run it, alive."""
        found = {name: self.worker(name, workload.threads) for name in workload.peers if name in self.chosen}
        return {name: worker for name, worker in found.items() if worker is not None}

    def worker(self, name: str, threads: int) -> Worker | None:
        if name in self.absent:
            return None
        worker = self._workers.get((name, threads))
        if worker is None or not worker.is_alive:
            worker = Worker(name, threads)
            try:
                self.versions[name] = worker.start()
            except PeerError as error:
                worker.close()
                if name in OURS and not error.is_expected:
                    raise  # a benchmark of relaxlite without relaxlite
                self.absent[name] = str(error)
                return None
            self._workers[name, threads] = worker
        return worker

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def measure(workload: Workload, team: Team, *, rounds: int, turn_seconds: float, bar: tqdm[Any]) -> list[Result]:
    """All cases of a workload."""
    bar.set_postfix_str(f"{workload.name}, {workload.threads} threads")
    workers, loads, problems = team.of(workload), {}, {}
    for name, worker in workers.items():
        try:
            loads[name] = worker.open(workload)
        except PeerError as error:
            problems[name] = str(error)
    results = []
    for case in workload.cases:
        able = {name: worker for name, worker in workers.items() if name in loads and worker.is_alive}
        timings = _run_case(case, able, rounds, turn_seconds)
        for name, timing in timings.items():
            timing.load = loads[name]
        timings |= {name: Timing(problem=reason) for name, reason in problems.items()}
        work = asdict(case.work) if case.work else None
        results.append(
            Result(
                *(workload.group, workload.name, case.label, workload.threads, workload.layers, work),
                next((name for name in REFERENCES if name in timings and timings[name].median), None),
                {name: timings[name] for name in workload.peers if name in timings},
            )
        )
        bar.update()
    return results


def _run_case(case: Case, workers: Mapping[str, Worker], rounds: int, turn_seconds: float) -> dict[str, Timing]:
    timings = {name: Timing() for name in workers}
    errors = _compare(case, workers, timings)
    ready = [name for name in workers if timings[name].problem is None]
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    for number in range(rounds):
        turn = number % max(len(ready), 1)
        for name in [*ready[turn:], *ready[:turn]]:  # nobody always follows the same other one
            if timings[name].problem is None:
                try:
                    seconds[name] += workers[name].time(turn_seconds, MAX_RUNS)
                except PeerError as error:
                    timings[name].problem = str(error)
    for name in ready:
        if timings[name].problem is None:
            p10, median, p90 = np.percentile(seconds[name], [10, 50, 90])
            timings[name] = Timing(float(median), float(p10), float(p90), len(seconds[name]), errors.get(name))
    return timings


def _compare(case: Case, workers: Mapping[str, Worker], timings: dict[str, Timing]) -> dict[str, float]:
    """The largest difference of each peer from the reference, which runs first."""
    errors: dict[str, float] = {}
    expected: list[np.ndarray] | None = None
    first = [name for name in REFERENCES if name in workers]
    for name in [*first, *(name for name in workers if name not in first)]:
        try:
            outputs = workers[name].prepare(case)
        except PeerError as error:
            timings[name].problem = str(error)
            continue
        if not outputs:
            continue  # the machine computes nothing
        if expected is None:
            expected = outputs
        else:
            errors[name] = difference(outputs, expected)
    return errors


def difference(outputs: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """The largest of any output, against that output's largest magnitude; infinite for other shapes or a NaN."""
    worst = 0.0 if len(outputs) == len(expected) else np.inf
    for a, b in zip(outputs, expected, strict=False):
        if a.shape != b.shape:
            return np.inf
        if b.size:
            far = float(np.abs(np.asarray(a, np.float64) - b).max()) / max(float(np.abs(b).max()), 1e-30)
            worst = max(worst, far if far == far else np.inf)
    return float(worst)


# Shapes that nobody has seen before


@dataclass(slots=True)
class SweepTiming:
    """Of one peer: seconds of each round, each in a fresh process. The first round finds empty caches."""

    load: list[float] = field(default_factory=list)
    runs: list[float] = field(default_factory=list)  # all shapes once
    problem: str | None = None

    @property
    def cold(self) -> float | None:
        return self.load[0] + self.runs[0] if self.load else None

    @property
    def warm(self) -> float | None:
        """The median of the later rounds; of the only one if there is one."""
        totals = [load + runs for load, runs in zip(self.load, self.runs, strict=True)]
        return statistics.median(totals[1:] or totals) if totals else None


def sweep(
    workload: Workload, cases: Sequence[Case], names: Iterable[str], *, rounds: int, bar: tqdm[Any]
) -> dict[str, SweepTiming]:
    """Each peer, in a new process, opens the model and runs every shape once."""
    found = {name: SweepTiming() for name in names}
    for _ in range(rounds):
        for name, timing in found.items():
            if timing.problem is None:
                assert workload.cache is not None
                cache = workload.cache / name  # what one of ours compiles is not there for another
                with _caches_in(cache):
                    _sweep_once(name, replace(workload, cache=cache), cases, timing)
            bar.update()
    return found


def _caches_in(folder: Path) -> AbstractContextManager[None]:
    """Caches of relaxlite, inductor and others below a folder, for a block and the processes started in it."""
    return system_variables(
        XDG_CACHE_HOME=str(folder),
        RELAXLITE_CACHE=str(folder / "models"),
        RELAXLITE_KERNEL_CACHE=str(folder / "kernels"),
        TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"),
    )


def _sweep_once(name: str, workload: Workload, cases: Sequence[Case], timing: SweepTiming) -> None:
    worker = Worker(name, workload.threads)
    try:
        worker.start()  # the import is not counted: it is the price of a Python process
        load = worker.open(workload)
        timing.runs.append(sum(worker.once(case) for case in cases))
        timing.load.append(load)
    except PeerError as error:
        timing.problem = str(error)
    finally:
        worker.close()
