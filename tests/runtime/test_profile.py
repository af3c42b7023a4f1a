"""Profiles: what is recorded, costs and rooflines beside it, and the three ways to see it."""

from __future__ import annotations

import ctypes
import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import relaxlite as rl
from relaxlite import config
from relaxlite.errors import ArtifactError, InputError
from relaxlite.ir import ops
from relaxlite.ir.symbolic import SymExpr, SymVar, evaluate, smax, smin, sym, to_text
from relaxlite.runtime import profile as profiling
from relaxlite.runtime import roofline
from relaxlite.runtime.executable import KernelCost, KernelInfo
from relaxlite.runtime.expression import parse_expression
from relaxlite.runtime.module import Executable, load
from relaxlite.runtime.profile import Profile, Recorder, clock_cost, measure
from relaxlite.runtime.roofline import MachineLimits, MemoryLevel

GB = 1e9
LIMITS = MachineLimits(
    "a <processor> & more",
    {1: 100.0, 4: 400.0},
    (
        MemoryLevel("L1", 1000, True, {1: 200.0, 4: 800.0}),
        MemoryLevel("L2", 10_000, True, {1: 100.0, 4: 400.0}),
        MemoryLevel("L3", 100_000, False, {1: 50.0, 4: 200.0}),
        MemoryLevel("RAM", None, False, {1: 20.0, 4: 40.0}),
    ),
)


# Expressions

SYMBOLS = [SymVar(f"s{k}") for k in range(3)]


@st.composite
def expressions(draw: Any, depth: int = 3) -> SymExpr:
    if not depth:
        return draw(st.sampled_from([*SYMBOLS, sym(1), sym(7), sym(1 << 40)]))
    a, b = draw(expressions(depth=depth - 1)), draw(expressions(depth=depth - 1))
    kind = draw(st.sampled_from(("add", "subtract", "multiply", "divide", "modulo", "min", "max")))
    divisor = b if b.is_const and b.const else sym(5)
    made = {"add": a + b, "subtract": a - b, "multiply": a * b, "min": smin(a, b), "max": smax(a, b)}
    return {**made, "divide": a // divisor, "modulo": a % divisor}[kind]


@given(expressions(), st.lists(st.integers(0, 5000), min_size=3, max_size=3))
def test_text_of_a_symbolic_integer_has_its_value(expr: SymExpr, values: list[int]) -> None:
    assert parse_expression(to_text(expr), 3)(values) == evaluate(expr, dict(zip(SYMBOLS, values, strict=True)))


@pytest.mark.parametrize(
    "text",
    ["", "s3", "t0", "1.5", "s0**2", "s0 / 2", "__import__('os')", "min()", "min(s0, key=s1)", "s0 if s1 else 2", "(s0",
     "abs(s0)", "True", "s0.real", "[s0][0]", "lambda: 1", "min(*s0)", "1\n2", "("*500 + ")"*500, "\0"],
)  # fmt: skip
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ArtifactError, match="is no expression of 3 symbols"):
        parse_expression(text, 3)


def test_division_by_zero_gives_zero() -> None:
    assert parse_expression("s0 // s1 + s0 % s1", 2)([7, 0]) == 0


# Rooflines


@pytest.mark.parametrize(
    ("flops", "nbytes", "threads", "seconds", "limit"),
    [
        (1e9, 0, 1, 0.01, "compute"),
        (1e9, 0, 4, 0.0025, "compute"),
        (1e9, 0, 2, 0.005, "compute"),  # in proportion between what was measured
        (1e9, 0, 64, 0.0025, "compute"),
        (0, 1000, 1, 1000 / (200 * GB), "L1"),
        (0, 1001, 1, 1001 / (100 * GB), "L2"),
        (0, 4000, 4, 4000 / (800 * GB), "L1"),  # each core has its own
        (0, 100_000, 4, 100_000 / (200 * GB), "L3"),
        (0, 400_000, 4, 400_000 / (40 * GB), "RAM"),
        (1e6, 100, 1, 1e-5, "compute"),
        (0, 0, 1, 0.0, "compute"),
    ],
)
def test_the_least_time_is_what_arithmetic_or_memory_needs(
    flops: float, nbytes: float, threads: int, seconds: float, limit: str
) -> None:
    bound = LIMITS.bound(flops, nbytes, threads)
    assert math.isclose(bound.seconds, seconds) and bound.limit == limit


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("RELAXLITE_CACHE", raising=False)
    monkeypatch.setattr(config, "user_cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "machines.json"


def test_limits_are_kept_by_machine(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert roofline.load_limits() is None
    assert roofline.save_limits(LIMITS) == cache
    assert roofline.load_limits() == LIMITS
    monkeypatch.setattr(roofline, "machine_key", lambda: "another")
    assert roofline.load_limits() is None
    roofline.save_limits(replace(LIMITS, cpu="another"))
    assert len(json.loads(cache.read_text())) == 2
    assert [path.name for path in cache.parent.iterdir()] == ["machines.json"], "no temporary file is left"


def test_limits_are_kept_in_the_folder_that_the_environment_names(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAXLITE_CACHE", str(tmp_path / "chosen"))
    assert roofline.save_limits(LIMITS) == tmp_path / "chosen" / "machines.json"
    assert roofline.load_limits() == LIMITS and not cache.exists()


@pytest.mark.parametrize(
    "change", [{"gflops": {}}, {"gflops": {"1": -1}}, {"levels": []}, {"levels": [{"name": "L1"}]}]
)
def test_kept_limits_that_make_no_sense_are_none(cache: Path, change: dict[str, Any]) -> None:
    roofline.save_limits(LIMITS)
    damaged = {roofline.machine_key(): {**roofline.to_json(LIMITS), **change}}
    cache.write_text(json.dumps(damaged))
    assert roofline.load_limits() is None
    cache.write_text("{")
    assert roofline.load_limits() is None


def test_the_better_of_two_measurements_counts() -> None:
    slow = replace(LIMITS, gflops={1: 120.0, 4: 90.0})
    assert roofline.best_of(LIMITS, slow).gflops == {1: 120.0, 4: 400.0}
    assert roofline.best_of(None, slow) is slow
    assert roofline.best_of(LIMITS, replace(slow, levels=LIMITS.levels[:2])).gflops == slow.gflops


def test_measuring_gives_figures_for_one_thread_and_all(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from relaxlite import machine

    for name, value in {"_SECONDS": 1e-4, "_ATTEMPTS": 1, "_MAX_BYTES": 1 << 20}.items():
        monkeypatch.setattr(machine, name, value)
    found = machine.limits()
    assert {level.name for level in found.levels} >= {"RAM"} and found.levels[-1].capacity is None
    for figures in (found.gflops, *(level.gb_per_s for level in found.levels)):
        assert 1 in figures and all(figure > 0 for figure in figures.values())
        assert list(figures.values()) == sorted(figures.values()), "more threads are never slower"
    monkeypatch.setattr(machine, "measure_limits", pytest.fail)
    assert machine.limits() == found == roofline.from_json(roofline.to_json(found))


# Recording

KERNELS = {
    "scale": KernelInfo("scale", "scale", num_symbols=2, cost=KernelCost(("n", "m"), "s0*s1*2", "s0*s1*4", "s1*4")),
    "plain": KernelInfo("plain", "plain", num_symbols=0),
    "loops": KernelInfo("loops", "loops", num_symbols=0, cost=KernelCost((), "100", "0", "0", is_bound=False)),
}


def busy(buffers: bytes, symbols: int) -> int:
    """A kernel that takes longer than the clock round it."""
    end = time.perf_counter_ns() + 20_000
    while time.perf_counter_ns() < end:
        pass
    return 0


def record(runs: int = 4, limits: MachineLimits | None = LIMITS, threads: int = 1) -> Profile:
    """A model that calls "scale" twice, at n = 3 and n = 5, and the others once."""
    recorder = Recorder(KERNELS)
    kernels = {name: recorder.timed(name, busy) for name in KERNELS}
    sizes = [(ctypes.c_int64 * 2)(n, 10) for n in (3, 5)]

    def run() -> None:
        for values in sizes:
            assert kernels["scale"](b"", ctypes.addressof(values)) == 0
        kernels["plain"](b"", 0)
        kernels["loops"](b"", 0)

    return measure(run, recorder, runs=runs, threads=threads, limits=limits)


def test_costs_are_added_over_the_calls_of_a_run() -> None:
    profile = record()
    records = {record.kernel: record for record in profile.records}
    assert {name: r.calls for name, r in records.items()} == {"scale": 2, "plain": 1, "loops": 1}
    scale = records["scale"]
    assert (scale.flops, scale.nbytes) == (2 * 30 + 2 * 50, 4 * 30 + 40 + 4 * 50 + 40)
    assert scale.intensity == scale.flops / scale.nbytes
    least = sum(max(2 * n * 10 / 100, 4 * (n * 10 + 10) / 200) for n in (3, 5)) / 1e3
    assert scale.least_us is not None and math.isclose(scale.least_us, least) and scale.limit == "L1"
    assert (records["plain"].flops, records["plain"].roofline, records["plain"].limit) == (None, None, None)
    assert (records["loops"].is_bound, scale.is_bound) == (False, True)
    assert [e.symbols for e in profile.events] == [{"n": 3, "m": 10}, {"n": 5, "m": 10}, {}, {}]
    assert profile.runs == 4 and profile.other_us >= 0
    assert math.isclose(sum(r.share for r in profile.records) + profile.other_us / profile.run_us, 1)


def test_each_call_counts_with_its_least_time() -> None:
    """Three runs of two calls: start, end, and the calls' kernel, start and end, all in nanoseconds."""
    clock = profiling.ClockCost(inside=100, total=300)
    raw = [
        (0, 10_000, [(0, 1_000, 2_100), (1, 3_000, 9_100)]),
        (0, 20_000, [(0, 2_000, 5_100), (1, 6_000, 8_100)]),
        (0, 90_000, [(1, 10, 20)]),  # makes other calls, and is slower
    ]
    runs = [profiling._Run.of(start, end, [(*call, b"") for call in calls], clock) for start, end, calls in raw]
    found = profiling._minimum(runs)
    assert found.calls == [(0, b""), (1, b"")]
    assert found.calls_us == [1.0, 2.0], "the clock reads 100 ns too much"
    assert found.pauses_us == pytest.approx([1.0, 0.7]), "and takes 200 ns more in a pause"
    assert (found.rest_us, found.total_us) == pytest.approx((0.7, 5.4))


def test_without_limits_there_is_no_roofline() -> None:
    profile = record(limits=None)
    assert profile.least_us is None and all(r.roofline is None for r in profile.records)
    assert "roof" not in str(profile) and "GFLOP/s" in str(profile).splitlines()[0]
    assert profile.to_json()["machine"] is None


def test_the_table_says_what_was_measured() -> None:
    text = str(record(threads=4))
    table, _, remarks = text.partition("\n\n")
    head, *rows = table.splitlines()
    assert head.split() == ["kernel", "calls", "us", "share", "MB", "MFLOP", "GFLOP/s", "GB/s", "roof", "limit"]
    assert {row.split()[0] for row in rows[:3]} == set(KERNELS) and len({len(row) for row in (head, *rows)}) == 1
    assert any(row.split()[5].startswith("~") for row in rows if row.startswith("loops"))
    assert (
        "4 threads; each call at its least time of 4 runs, without the clock's own" in remarks
        and "one iteration" in remarks
    )
    assert "a <processor> & more could do: 400 GFLOP/s" in remarks


def test_a_share_above_the_roof_is_explained() -> None:
    slow = replace(LIMITS, levels=(MemoryLevel("RAM", None, False, {1: 1e-3}),))
    assert "A share above 100%" in str(record(limits=slow))
    assert "A share above" not in str(record())


def test_a_failing_kernel_still_says_so() -> None:
    recorder = Recorder(KERNELS)
    assert recorder.timed("plain", lambda buffers, symbols: 7)(b"", 0) == 7


def test_the_clock_takes_some_time_of_its_own() -> None:
    cost = clock_cost()
    assert 0 <= cost.inside <= cost.total < 1e6


def test_costs_that_name_other_symbols_are_refused() -> None:
    info = KernelInfo("scale", "scale", num_symbols=2, cost=KernelCost(("n",), "s0", "0", "0"))
    recorder = Recorder({"scale": info})
    kernel = recorder.timed("scale", lambda buffers, symbols: 0)
    sizes = (ctypes.c_int64 * 2)(1, 2)
    with pytest.raises(ArtifactError, match="kernel 'scale': its cost names 1 symbols"):
        measure(lambda: kernel(b"", ctypes.addressof(sizes)), recorder, runs=1, threads=1)


# Ways to see it


def test_the_chrome_trace_has_one_event_per_call(tmp_path: Path) -> None:
    profile = record()
    profile.chrome_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in events] == ["scale", "scale", "plain", "loops"]
    for event in events:
        assert {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"} <= event.keys()
        assert event["ts"] >= 0 and event["dur"] >= 0
    starts = [event["ts"] for event in events]
    assert starts == sorted(starts)
    assert events[1]["args"]["symbols"] == {"n": 5, "m": 10}
    ends = [event["ts"] + event["dur"] for event in events]
    assert all(end <= start + 0.002 for end, start in zip(ends, starts[1:], strict=False)), "one after another"
    second = events[1]["args"]
    assert (second["flops"], second["bytes_read"], second["bytes_written"], second["limit"]) == (100, 200, 40, "L1")
    assert "flops" not in events[2]["args"]


class Page(HTMLParser):
    """Collects tags and texts, and fails on tags that do not match."""

    VOID = {"meta", "br", "link", "img"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.append((self.open[-1], data))

    def text_in(self, tag: str) -> Iterator[str]:
        return (text for where, text in self.texts if where == tag)


@pytest.mark.parametrize("limits", [LIMITS, None], ids=["with limits", "without"])
def test_the_page_needs_nothing_else_and_names_each_kernel(tmp_path: Path, limits: MachineLimits | None) -> None:
    profile = replace(record(limits=limits), inputs={"<x>": "float32[1, 2]"})
    profile.html(tmp_path / "profile.html")
    text = (tmp_path / "profile.html").read_text("utf-8")
    page = Page(text)
    assert "http" not in text and "@import" not in text and "url(" not in text
    assert not any(key in ("src", "href") for _, attrs in page.tags for key in attrs)
    rows = [attrs for tag, attrs in page.tags if tag == "tr" and "data-k" in attrs]
    assert len(rows) == len(KERNELS) and set(KERNELS) <= set(page.text_in("td"))
    assert any("<x>: float32[1, 2]" in text for text in page.text_in("p"))
    points = [attrs for tag, attrs in page.tags if tag == "circle"]
    assert len(points) == 1, "of the three only one has both FLOPs and bytes"
    peaks = [attrs for tag, attrs in page.tags if tag == "line" and attrs["class"] == "peak"]
    levels = [attrs for tag, attrs in page.tags if tag == "line" and attrs["class"] == "level"]
    assert (len(peaks), len(levels)) == ((2, 4) if limits else (0, 0))
    data = json.loads(next(page.text_in("script")))
    assert [data["names"][call[0]] for call in data["calls"]] == [event.kernel for event in profile.events]


def test_a_page_of_nothing(tmp_path: Path) -> None:
    recorder = Recorder({})
    profile = measure(lambda: None, recorder, runs=1, threads=1)
    profile.html(tmp_path / "profile.html")
    assert "nothing to plot" in (tmp_path / "profile.html").read_text("utf-8")
    assert "total" in str(profile)


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    name = "</script><b onclick='x'>\"&"
    info = KernelInfo(name, "k", num_symbols=0, cost=KernelCost((), "10", "10", "0"))
    recorder = Recorder({name: info})
    kernel = recorder.timed(name, lambda buffers, symbols: 0)
    profile = measure(lambda: kernel(b"", 0), recorder, runs=1, threads=1, limits=LIMITS)
    profile.html(tmp_path / "profile.html")
    page = Page((tmp_path / "profile.html").read_text("utf-8"))
    assert not any("onclick" in attrs for _, attrs in page.tags) and name in page.text_in("td")


# Of a compiled model


@pytest.fixture(scope="module")
def model() -> Executable:
    """y = softmax(relu(x[n, k] @ w[k, m] + b[m])), compiled once."""
    bb = rl.BlockBuilder()
    n, k, m = (bb.symbol(name) for name in "nkm")
    types = {"x": (n, k), "w": (k, m), "b": (m,)}
    with bb.function("main", **{name: rl.TensorType.of(shape, "float32") for name, shape in types.items()}) as (
        x,
        w,
        b,
    ):
        total = bb.emit(ops.add(bb.emit(ops.matmul(x, w)), b))
        bb.result(ops.softmax(bb.emit(ops.relu(total)), axis=1))
    return rl.compile(bb.module())


def inputs(n: int, k: int, m: int) -> dict[str, np.ndarray]:
    return {"x": np.ones((n, k), np.float32), "w": np.ones((k, m), np.float32), "b": np.ones(m, np.float32)}


@pytest.mark.parametrize(("n", "k", "m"), [(1, 1, 1), (5, 64, 33), (128, 7, 16)])
def test_a_compiled_model_states_its_costs(model: Executable, n: int, k: int, m: int) -> None:
    profile = model.profile(inputs(n, k, m), runs=2, limits=LIMITS)
    product = next(event for event in profile.events if "matmul" in event.kernel)
    assert (product.flops, product.bytes_read) == (n * m * (2 * k + 2), 4 * (n * k + k * m + m))
    assert product.bytes_written == 4 * n * m
    assert sorted(product.symbols.values()) == sorted((n, k, m)) and set(product.symbols) == {"n", "k", "m"}
    assert profile.inputs == {"x": f"float32[{n}, {k}]", "w": f"float32[{k}, {m}]", "b": f"float32[{m}]"}


def test_costs_are_kept_in_the_file(model: Executable, tmp_path: Path) -> None:
    model.save(tmp_path / "m.rlx")
    again = load(tmp_path / "m.rlx")
    assert again.data.kernels == model.data.kernels
    assert all(kernel.cost is not None for name, kernel in again.data.kernels.items() if "shapes" not in name)


def test_mistakes_in_the_inputs_are_those_of_a_run(model: Executable) -> None:
    with pytest.raises(InputError, match="argument 'w': dimension 0"):
        model.profile({**inputs(2, 3, 4), "w": np.ones((2, 4), np.float32)})


def test_one_array_is_the_one_input(model: Executable) -> None:
    bb = rl.BlockBuilder()
    with bb.function("main", x=rl.TensorType.of((bb.symbol("n"),), "float32")) as (x,):
        bb.result(bb.emit(ops.relu(x)))
    alone = rl.compile(bb.module())
    for x in (np.ones(3, np.float32), [np.ones(3, np.float32)], {"x": np.ones(3, np.float32)}):
        assert alone.profile(x, runs=1).inputs == {"x": "float32[3]"}
    with pytest.raises(InputError, match=r"missing|takes 3"):
        model.profile(np.ones((2, 3), np.float32))


def test_nothing_is_divided_by_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "clock_cost", lambda: profiling.ClockCost(1e9, 1e9))
    profile = record()
    assert all(r.total_us == 0 and r.gflops is None and r.roofline is None for r in profile.records)
    assert "scale" in str(profile) and profile.to_json()["kernels"][0]["gflops"] is None
