"""Profiler: time per kernel of a run, compared with the roofline of the machine.

    profile = exe.profile(inputs, limits=relaxlite.machine.limits())
    print(profile)                          # a table
    profile.chrome_trace("trace.json")      # for chrome://tracing or https://ui.perfetto.dev
    profile.html("profile.html")            # a page with a roofline plot, a table and a time line

The bytecode interpreter runs the model with a timer around each kernel. The timer's overhead is measured first and
subtracted. Each call, and each pause between calls, counts with its minimum over several runs, which excludes
disturbances by other work of the machine.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, TypeAlias

from relaxlite.errors import ArtifactError
from relaxlite.records import dataclass
from relaxlite.runtime.executable import KernelCost, KernelInfo
from relaxlite.runtime.expression import Expression, parse_expression
from relaxlite.runtime.profile_html import page
from relaxlite.runtime.roofline import MachineLimits, RooflineBound, to_json

KernelFunction: TypeAlias = Callable[[bytes, int], int]  # as in vm.py
_Raw: TypeAlias = tuple[int, int, int, bytes]  # kernel number, start and end in ns, bytes of the symbols' values


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """One kernel call. Times in microseconds since the start of the run; costs are None where the kernel has none."""

    kernel: str
    start_us: float
    us: float
    symbols: Mapping[str, int]
    flops: int | None = None
    bytes_read: int | None = None
    bytes_written: int | None = None
    bound: RooflineBound | None = None  # by the roofline, if the limits of the machine are known

    @property
    def nbytes(self) -> int | None:
        """Bytes read and written."""
        return None if self.bytes_read is None or self.bytes_written is None else self.bytes_read + self.bytes_written


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """Totals of all calls of one kernel in a run."""

    kernel: str
    calls: int
    total_us: float
    share: float  # fraction of the run's time
    flops: float | None = None
    nbytes: float | None = None
    least_us: float | None = None  # lower bound by the roofline
    limit: str | None = None  # dominant limit: "compute" or a memory level
    is_bound: bool = True  # False: flops and nbytes are incomplete, as loop extents depend on data

    @property
    def gflops(self) -> float | None:
        """Arithmetic throughput in GFLOP/s."""
        return _rate(self.flops, self.total_us)

    @property
    def gb_per_s(self) -> float | None:
        """Memory throughput in GB/s."""
        return _rate(self.nbytes, self.total_us)

    @property
    def intensity(self) -> float | None:
        """Arithmetic intensity in FLOPs per byte."""
        return self.flops / self.nbytes if self.flops is not None and self.nbytes else None

    @property
    def roofline(self) -> float | None:
        """Fraction of the roofline that was reached: lower bound of the time divided by the time."""
        return self.least_us / self.total_us if self.least_us is not None and self.total_us > 0 else None


def _rate(amount: float | None, us: float) -> float | None:
    return None if amount is None or us <= 0 else amount / us / 1e3


@dataclass(frozen=True, slots=True)
class Profile:
    """Profile of a run; records in descending order of time. `str()` gives a table."""

    records: list[KernelRecord]
    run_us: float  # sum of the minimum of each call and of each pause between calls over all runs
    runs: int  # number of runs measured
    threads: int = 1
    clock_us: float = 0.0  # timer overhead per kernel call, which is subtracted
    limits: MachineLimits | None = None
    events: Sequence[KernelEvent] = field(default=(), repr=False)  # calls in order
    inputs: Mapping[str, str] = field(default_factory=dict)  # name -> "float32[1, 128]"

    @property
    def other_us(self) -> float:
        """Microseconds outside of kernels: checks, interpretation, allocation."""
        return self.run_us - sum(record.total_us for record in self.records)

    @property
    def least_us(self) -> float | None:
        """Lower bound of the time of all kernels by the roofline, in microseconds."""
        return _sum(record.least_us for record in self.records)

    def __str__(self) -> str:
        columns = _COLUMNS if self.limits is not None else _COLUMNS[:-2]
        if all(record.nbytes is None for record in self.records):
            columns = _COLUMNS[:4]
        total = KernelRecord("total", 0, self.run_us, 1.0, *self._totals(), least_us=self.least_us)
        outside = KernelRecord("(outside kernels)", 0, self.other_us, self.other_us / max(self.run_us, 1e-9))
        rows = [[title for title, _ in columns]]
        rows += [[show(record) for _, show in columns] for record in (*self.records, outside, total)]
        widths = [max(len(row[k]) for row in rows) for k in range(len(columns))]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
        return "\n".join([*lines, "", *self.remarks()]) + "\n"

    def _totals(self) -> tuple[float | None, float | None]:
        return _sum(r.flops for r in self.records), _sum(r.nbytes for r in self.records)

    def remarks(self) -> list[str]:
        """Notes on the figures, one sentence each."""
        notes = [
            f"{self.threads} thread{'s' if self.threads > 1 else ''}; each call at its least time of {self.runs} runs, "
            f"without the clock's own {self.clock_us:.2f} us per call."
        ]
        if any(not record.is_bound for record in self.records):
            notes.append("~: loops as long as data says are counted as one iteration.")
        if self.limits is not None:
            peak = f"{_figure(self.limits.peak_gflops(self.threads))} GFLOP/s in float32"
            speeds = [f"{level.name} {_figure(level.speed(self.threads))} GB/s" for level in self.limits.levels]
            notes.append(f"roof: the share of what {self.limits.cpu} could do: {peak}; {', '.join(speeds)}.")
        if any((record.roofline or 0) > _ROOF_TOLERANCE for record in self.records):
            notes.append(
                "A share above 100%: the kernel needs fewer operations than the program as written (Winograd), or has "
                "narrower numbers than float32, or the machine was busy when it was measured: `relaxlite profile "
                "--measure` does that again."
            )
        return notes

    def to_json(self) -> dict[str, Any]:
        """Plain data for JSON, with one object per kernel."""
        return {
            "run_us": self.run_us,
            "outside_kernels_us": self.other_us,
            "least_us": self.least_us,
            "runs": self.runs,
            "threads": self.threads,
            "clock_us": self.clock_us,
            "inputs": dict(self.inputs),
            "machine": None if self.limits is None else to_json(self.limits),
            "kernels": [record_json(record) for record in self.records],
        }

    def chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace (JSON) with one event per kernel call. Raises OSError."""
        named = {"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "relaxlite"}}
        trace = {
            "traceEvents": [named, *map(_trace_event, self.events)],
            "displayTimeUnit": "ns",
            "otherData": {"threads": self.threads, "inputs": dict(self.inputs)},
        }
        Path(path).write_text(json.dumps(trace))

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write a self-contained HTML page: roofline plot, table, time line. Raises OSError."""
        timeline = [(event.kernel, event.start_us, event.us) for event in self.events]
        Path(path).write_text(page(self.to_json(), timeline, self.remarks()), "utf-8")


def record_json(record: KernelRecord) -> dict[str, Any]:
    """Plain data of a record, for JSON."""
    return {
        "kernel": record.kernel,
        "calls": record.calls,
        "us": record.total_us,
        "share": record.share,
        "flops": record.flops,
        "bytes": record.nbytes,
        "gflops": record.gflops,
        "gb_per_s": record.gb_per_s,
        "intensity": record.intensity,
        "roofline": record.roofline,
        "limit": record.limit,
        "is_bound": record.is_bound,
    }


def _trace_event(event: KernelEvent) -> dict[str, Any]:
    args: dict[str, Any] = {"symbols": dict(event.symbols)}
    if event.nbytes is not None:
        args |= {"flops": event.flops, "bytes_read": event.bytes_read, "bytes_written": event.bytes_written}
        args |= {"GFLOP/s": _rounded(_rate(event.flops, event.us)), "GB/s": _rounded(_rate(event.nbytes, event.us))}
    if event.bound is not None:
        args |= {"least_us": _rounded(event.bound.seconds * 1e6), "limit": event.bound.limit}
    return {
        "name": event.kernel,
        "cat": "kernel",
        "ph": "X",
        "ts": round(event.start_us, 3),
        "dur": round(event.us, 3),
        "pid": 0,
        "tid": 0,
        "args": args,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _sum(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


# Columns of the table: title, and text of a record.

_Column: TypeAlias = tuple[str, Callable[[KernelRecord], str]]


def _figure(value: float | None, scale: float = 1.0) -> str:
    """Number with about three digits; "-" for None."""
    if value is None:
        return "-"
    scaled = value / scale
    return f"{scaled:.0f}" if scaled >= 100 or scaled == 0 else f"{scaled:.1f}" if scaled >= 10 else f"{scaled:.2f}"


def _calls(record: KernelRecord) -> str:
    return str(record.calls) if record.calls else ""


_COLUMNS: tuple[_Column, ...] = (
    ("kernel", lambda r: r.kernel),
    ("calls", _calls),
    ("us", lambda r: f"{r.total_us:.1f}"),
    ("share", lambda r: f"{r.share:.1%}"),
    ("MB", lambda r: _figure(r.nbytes, 1e6)),
    ("MFLOP", lambda r: ("" if r.is_bound else "~") + _figure(r.flops, 1e6)),
    ("GFLOP/s", lambda r: _figure(r.gflops)),
    ("GB/s", lambda r: _figure(r.gb_per_s)),
    ("roof", lambda r: "-" if r.roofline is None else f"{r.roofline:.0%}"),
    ("limit", lambda r: r.limit or "-"),
)


# Measuring


class Recorder:
    """Records times and symbol values of kernel calls. Not thread-safe."""

    def __init__(self, kernels: Mapping[str, KernelInfo]) -> None:
        self.kernels = list(kernels.values())
        self._numbers = {name: number for number, name in enumerate(kernels)}
        self._calls: list[_Raw] = []

    def timed(self, name: str, kernel: KernelFunction) -> KernelFunction:
        """Wrap a kernel so that its calls are recorded."""
        number = self._numbers[name]
        nbytes = 8 * (self.kernels[number].num_symbols or 0)
        now, note, read = time.perf_counter_ns, self._calls.append, ctypes.string_at

        def call(buffers: bytes, symbols: int) -> int:
            start = now()
            status = kernel(buffers, symbols)
            end = now()
            note((number, start, end, read(symbols, nbytes) if nbytes else b""))
            return status

        return call

    def take(self) -> list[_Raw]:
        """Return and clear the recorded calls."""
        calls = self._calls.copy()
        self._calls.clear()
        return calls


@dataclass(frozen=True, slots=True)
class ClockCost:
    """Overhead of recording a call, in nanoseconds: between the two readings of the clock, and in total."""

    inside: float
    total: float


_BATCH, _BATCHES = 500, 7
_ROOF_TOLERANCE = 1.05  # tolerance, as measured limits are uncertain


def clock_cost() -> ClockCost:
    """Measure the recorder's overhead on an empty kernel; takes a few milliseconds."""
    symbols = (ctypes.c_int64 * 2)()
    address = ctypes.addressof(symbols)
    recorder = Recorder({"nothing": KernelInfo("nothing", "nothing", num_symbols=2)})

    def plain(buffers: bytes, symbols: int) -> int:
        return 0

    timed = recorder.timed("nothing", plain)
    untimed: list[float] = []
    timed_ns: list[float] = []
    inside: list[float] = []
    for _ in range(_BATCHES):
        for kernel, times in ((plain, untimed), (timed, timed_ns)):
            start = time.perf_counter_ns()
            for _ in range(_BATCH):
                kernel(b"", address)
            times.append((time.perf_counter_ns() - start) / _BATCH)
        inside.append(statistics.median(end - start for _, start, end, _ in recorder.take()))
    total = max(min(timed_ns) - min(untimed), 0.0)
    return ClockCost(inside=max(min(min(inside), total), 0.0), total=total)


def measure(
    run: Callable[[], object],
    recorder: Recorder,
    *,
    runs: int,
    threads: int,
    limits: MachineLimits | None = None,
) -> Profile:
    """Profile `run`, whose kernels `recorder` has wrapped, over `runs` runs after one run of warm-up.

    Raises ArtifactError for malformed kernel costs of the executable.
    """
    run()
    recorder.take()
    clock, timed = clock_cost(), list[_Run]()
    for _ in range(runs):
        start = time.perf_counter_ns()
        run()
        end = time.perf_counter_ns()
        timed.append(_Run.of(start, end, recorder.take(), clock))
    steps = _minimum(timed)
    events, now, cost_of = [], 0.0, _Costs(recorder.kernels, limits, threads)
    for (number, symbols), pause, us in zip(steps.calls, steps.pauses_us, steps.calls_us, strict=True):
        now += pause
        events.append(KernelEvent(recorder.kernels[number].name, now, us, *cost_of(number, symbols)))
        now += us
    run_us = now + steps.rest_us
    return Profile(
        records=_records(events, run_us, recorder.kernels),
        run_us=run_us,
        runs=runs,
        threads=threads,
        clock_us=clock.total / 1e3,
        limits=limits,
        events=events,
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """Times of one run in microseconds, without the timer's overhead."""

    calls: list[tuple[int, bytes]]  # kernel number, bytes of the symbols
    pauses_us: list[float]  # before each call
    calls_us: list[float]
    rest_us: float  # after the last call

    @staticmethod
    def of(start: int, end: int, calls: list[_Raw], clock: ClockCost) -> _Run:
        pauses, times, last, between = [], [], float(start), clock.total - clock.inside
        for _, began, ended, _ in calls:
            pauses.append(max(began - last, 0.0) / 1e3)
            times.append(max(ended - began - clock.inside, 0.0) / 1e3)
            last = ended + between
        return _Run([(number, symbols) for number, _, _, symbols in calls], pauses, times, max(end - last, 0.0) / 1e3)

    @property
    def total_us(self) -> float:
        return sum(self.pauses_us) + sum(self.calls_us) + self.rest_us


def _minimum(runs: list[_Run]) -> _Run:
    """Elementwise minimum over the runs with the same calls as the fastest run."""
    calls = min(runs, key=lambda run: run.total_us).calls
    comparable = [run for run in runs if run.calls == calls]
    pauses = [min(times) for times in zip(*(run.pauses_us for run in comparable), strict=True)]
    times = [min(times) for times in zip(*(run.calls_us for run in comparable), strict=True)]
    return _Run(calls, pauses, times, min(run.rest_us for run in comparable))


def _records(events: list[KernelEvent], run_us: float, kernels: list[KernelInfo]) -> list[KernelRecord]:
    unbound = {kernel.name for kernel in kernels if kernel.cost is not None and not kernel.cost.is_bound}
    groups: dict[str, list[KernelEvent]] = {}
    for event in events:
        groups.setdefault(event.kernel, []).append(event)
    records = []
    for name, calls in groups.items():
        least_us: dict[str, float] = {}  # by limit
        for bound in (event.bound for event in calls if event.bound is not None):
            least_us[bound.limit] = least_us.get(bound.limit, 0.0) + bound.seconds * 1e6
        us = sum(event.us for event in calls)
        records.append(
            KernelRecord(
                name,
                len(calls),
                us,
                us / max(run_us, 1e-9),
                flops=_sum(event.flops for event in calls),
                nbytes=_sum(event.nbytes for event in calls),
                least_us=_sum(least_us.values()),
                limit=max(least_us, key=least_us.__getitem__, default=None),
                is_bound=name not in unbound,
            )
        )
    return sorted(records, key=lambda record: -record.total_us)


class _Costs:
    """Costs and roofline bounds of calls by kernel and symbols, memoized."""

    def __init__(self, kernels: list[KernelInfo], limits: MachineLimits | None, threads: int) -> None:
        self.kernels, self._limits, self._threads = kernels, limits, threads
        self._parsed: dict[int, tuple[Expression, ...]] = {}
        self._known: dict[tuple[int, bytes], tuple[Any, ...]] = {}

    def __call__(self, number: int, symbols: bytes) -> tuple[Any, ...]:
        """(symbols by name, flops, bytes read, bytes written, roofline bound) of a call."""
        key = (number, symbols)
        if key not in self._known:
            self._known[key] = self._compute(number, struct.unpack(f"={len(symbols) // 8}q", symbols))
        return self._known[key]

    def _compute(self, number: int, values: tuple[int, ...]) -> tuple[Any, ...]:
        cost = self.kernels[number].cost
        if cost is None:
            return {f"s{k}": value for k, value in enumerate(values)}, None, None, None, None
        if len(cost.symbols) != len(values):
            raise ArtifactError(f"kernel '{self.kernels[number].name}': its cost names {len(cost.symbols)} symbols")
        if number not in self._parsed:
            self._parsed[number] = _parse(cost)
        flops, read, written = (max(part(values), 0) for part in self._parsed[number])
        bound = None if self._limits is None else self._limits.bound(flops, read + written, self._threads)
        return dict(zip(cost.symbols, values, strict=True)), flops, read, written, bound


def _parse(cost: KernelCost) -> tuple[Expression, ...]:
    texts = (cost.flops, cost.bytes_read, cost.bytes_written)
    return tuple(parse_expression(text, len(cost.symbols)) for text in texts)
