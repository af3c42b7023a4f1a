"""The benchmark of one processor: that it runs, what it writes, and how it judges. Nothing here depends on a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import reference

from bench.cpu import __main__ as bench_main
from bench.cpu import machine, onnx_models
from bench.cpu.cases import GROUPS, Case, Input, Options, Work, Workload, minilm_case, sweep_cases
from bench.cpu.goals import Goal, check_goals, geometric_mean, speed
from bench.cpu.measure import Result, SweepTiming, Team, Timing, difference, measure
from bench.cpu.report import Report
from bench.cpu.worker import PeerError, Worker
from bench.timing import timed_runs
from relaxlite.target import Target
from tests.support.native_kernel import run

MADE_HERE = ("matmul", "quantized", "rows", "attention", "conv", "overhead")  # groups that fetch nothing
MIB = 1 << 20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    path = onnx_models.save(tmp_path_factory.mktemp("models"), "tiny", onnx_models.matmul(8, 24, 2, "-gelu"))
    cases = tuple(Case(f"m={m}", (Input("x", (m, 8)),), Work("fma", 2.0 * m * 8 * 24 * 2)) for m in (1, 5))
    peers = ("machine", "relaxlite-kernels", "onnxruntime", "relaxlite", "openblas")
    return Workload("tiny", "tiny", path, cases, peers, 1, "linear-gelu", 2, is_kernel=True)


@pytest.fixture(scope="module")
def results(tiny: Workload) -> Iterator[list[Result]]:
    with Team(tiny.peers) as team, bench_main.tqdm(disable=True) as bar:
        found = measure(tiny, team, rounds=2, turn_seconds=0.001, bar=bar)
        assert set(team.versions) >= {"machine", "relaxlite", "relaxlite-kernels", "onnxruntime"}
        yield found


def test_a_quick_run_writes_json_and_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--quick", "--only", "overhead", "--peers", "relaxlite,relaxlite-kernels,onnxruntime", "--rounds", "1"]
    assert bench_main.main([*words, "--output", str(tmp_path / "out"), "--markdown", str(tmp_path / "table.md")]) == 0
    data = json.loads((tmp_path / "out" / "cpu.json").read_text("utf-8"))
    assert data["machine"]["cores"] >= 1 and data["settings"]["rounds"] == 1
    assert [r["workload"] for r in data["results"]] == ["1-tiny-kernels", "60-tiny-kernels"]
    for result in data["results"]:
        assert set(result["peers"]) == {"relaxlite", "relaxlite-kernels", "onnxruntime"}
        for timing in result["peers"].values():
            assert timing["problem"] is None and timing["runs"] >= 3 and timing["load"] > 0
            assert 0 < timing["p10"] <= timing["median"] <= timing["p90"]
        assert result["reference"] == "onnxruntime" and result["peers"]["onnxruntime"]["error"] is None
        assert result["peers"]["relaxlite"]["error"] <= 1e-4 and result["peers"]["relaxlite-kernels"]["error"] <= 1e-4
    markdown = (tmp_path / "table.md").read_text("utf-8")
    assert "| 60-tiny-kernels 1x16 |" in markdown and "## What is to be reached" in markdown
    assert markdown in capsys.readouterr().out


def test_every_peer_runs_every_case_and_is_compared(results: list[Result]) -> None:
    assert [r.case for r in results] == ["m=1", "m=5"]
    for result in results:
        assert result.reference == "onnxruntime"
        for name in ("relaxlite", "relaxlite-kernels"):
            assert result.peers[name].error is not None and result.peers[name].agrees
        assert result.peers["machine"].error is None and result.peers["machine"].median


def test_what_a_peer_cannot_do_is_said_and_the_others_go_on(results: list[Result]) -> None:
    problem = results[0].peers["openblas"].problem
    if problem is None:
        pytest.fail("a BLAS has no GELU")
    assert results[0].peers["openblas"].median is None
    assert f"- openblas: {problem} (tiny m=1 and 1 more)" in Report({}, {}, {}, results).markdown()


def test_absent_peers_are_listed(tiny: Workload) -> None:
    with Team(["relaxlite-bf16"]) as team:
        worker = team.worker("relaxlite-bf16", 1)
        if worker is None:
            assert team.absent == {"relaxlite-bf16": "this version of relaxlite compiles for float32 only"}
            text = Report({}, team.versions, team.absent).markdown()
            assert "Absent: relaxlite-bf16 (this version of relaxlite compiles for float32 only)." in text


def test_a_peer_that_fails_or_dies_is_an_error_of_its_own(tiny: Workload, tmp_path: Path) -> None:
    worker = Worker("onnxruntime", 1)
    try:
        missing = Workload("x", "x", tmp_path / "missing.onnx", (), (), 1)
        with pytest.raises(PeerError, match=r"missing\.onnx"):
            worker.open(missing)
        assert worker.open(tiny) > 0 and worker.once(tiny.cases[0]) > 0
        worker._process.kill()
        with pytest.raises(PeerError, match="its process died with exit code"):
            worker.time(0.01, 10)
        with pytest.raises(PeerError, match="has died before"):
            worker.time(0.01, 10)
    finally:
        worker.close()


def test_runs_are_counted_without_the_first() -> None:
    runs: list[int] = []
    assert len(timed_runs(lambda: runs.append(1), 0.0, 10)) == 3 and len(runs) == 4
    assert len(timed_runs(lambda: None, 60.0, 7)) == 7


def test_differences_are_relative_to_the_largest_magnitude() -> None:
    x = np.array([1.0, -4.0], np.float32)
    assert difference([x], [x]) == 0.0
    assert difference([x, x + np.float32(0.5)], [x, x]) == pytest.approx(0.5 / 4)
    assert difference([np.array([1.0, np.nan])], [x]) == math.inf
    assert difference([x[:1]], [x]) == difference([x], [x, x]) == math.inf


# The machine itself


@pytest.mark.parametrize("threads", [1, 3])
def test_the_kernels_that_measure_the_machine_do_what_they_say(threads: int) -> None:
    lanes, steps = Target.host().vector_lanes(4), 5
    x = np.random.default_rng(0).standard_normal(lanes).astype(np.float32)
    out = np.zeros((threads, machine.CHAINS, lanes), np.float32)
    run(machine.fma(threads, lanes), [x, out], [steps])
    np.testing.assert_allclose(out, np.broadcast_to(x + steps * x * x, out.shape), rtol=1e-5, atol=1e-6)
    data = np.random.default_rng(1).random((threads, steps, machine.PARTS * machine.PAIRS, lanes), np.float32)
    sums = np.zeros((threads, machine.PARTS * machine.PAIRS, lanes), np.float32)
    run(machine.read(threads, lanes), [data, sums], [steps])
    np.testing.assert_allclose(sums, data.sum(1), rtol=1e-5)
    for past_caches in (False, True):
        source, copied = (
            data[:, :, : machine.PARTS].copy(),
            np.zeros((threads, steps, machine.PARTS, lanes), np.float32),
        )
        run(machine.copy(threads, lanes, past_caches=past_caches), [source, copied], [steps])
        np.testing.assert_array_equal(copied, source)


# Models and inputs


@pytest.mark.parametrize("group", MADE_HERE)
def test_made_models_are_valid_and_take_their_inputs(group: str, tmp_path: Path) -> None:
    options = Options(threads=1, quick=True, folder=tmp_path)
    for workload in GROUPS[group](options):
        model = onnx.load(workload.model)
        onnx.checker.check_model(model, full_check=True)
        names = [value.name for value in model.graph.input]
        for case in workload.cases:
            assert list(case.arrays()) == names
            assert case.work is None or case.work.amount > 0


@pytest.mark.parametrize("conv", onnx_models.CONVOLUTIONS, ids=lambda c: c.name)
def test_operations_of_a_convolution_are_those_of_its_output(conv: onnx_models.Convolution) -> None:
    size = 9
    model = onnx_models.convolution(conv)
    x = Input("x", (2, conv.channels, size, size)).array()
    (y,) = reference.ReferenceEvaluator(model).run(None, {"x": x})
    assert conv.flops(2, size) == 2.0 * y.size * conv.channels // conv.groups * conv.kernel**2


def test_inputs_are_the_same_in_every_process_and_differ_by_name_and_shape() -> None:
    x = Input("x", (3, 4))
    assert (x.array() == x.array()).all() and (x.array() != Input("z", (3, 4)).array()).any()
    picture = Input("x", (2, 3, 48, 100), "text").array()
    assert picture.shape == (2, 3, 48, 100) and picture.dtype == np.float32 and picture.std() > 0.1
    assert set(Input("m", (2, 2), "ones").array().ravel()) == {1} and Input("t", (2, 9), "tokens").array().max() > 1


def test_the_shapes_of_a_sweep_are_all_different() -> None:
    cases = sweep_cases(64)
    assert len({case.label for case in cases}) == 64 and cases == sweep_cases(64)


# Goals


def _result(group: str, case: str, seconds: dict[str, float], **changes: Any) -> Result:
    peers = {name: Timing(s, s, s, 3, 1e-6) for name, s in seconds.items()}
    fixed = {"workload": group, "threads": 2, "layers": 1, "work": None, "reference": "onnxruntime", "peers": peers}
    return Result(**{"group": group, "case": case, **fixed, **changes})


def _goal(start: str, *results: Result, sweep: dict[str, SweepTiming] | None = None) -> Goal:
    (goal,) = [g for g in check_goals(results, sweep or {}) if g.text.startswith(start)]
    return goal


def test_nothing_measured_is_neither_reached_nor_missed() -> None:
    assert {(g.measured, g.holds) for g in check_goals([], {})} == {("not measured", None)}


def test_speed_is_the_ratio_of_medians() -> None:
    result = _result("minilm", "1x16", {"relaxlite": 2.0, "onnxruntime": 3.0, "torch": 1.0})
    assert speed(result, "onnxruntime") == 1.5 and speed(result, "torch") == 0.5 and speed(result, "mkl") is None
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)


@pytest.mark.parametrize(("onnxruntime", "holds"), [(1.39, False), (1.41, True)])
def test_a_mean_and_every_shape_are_different_goals(onnxruntime: float, holds: bool) -> None:
    even = _result("minilm", "1x16", {"relaxlite": 1.0, "onnxruntime": onnxruntime})
    assert _goal("minilm: 1.4x", even).holds is holds
    slow = _result("minilm", "1x512", {"relaxlite": 1.0, "onnxruntime": 0.9})
    assert _goal("minilm: at no shape slower than onnxruntime", even, slow).holds is False
    assert "least 0.90x (minilm 1x512, 2 threads)" in _goal("minilm: at no shape slower than onn", even, slow).measured


def test_matmuls_are_judged_by_threads_and_rows() -> None:
    fma = {"kind": "fma", "amount": 1e9}
    times = {"relaxlite-kernels": 1.0, "machine": 0.93, "onnxruntime": 1.2}
    two, one = (_result("matmul", "m=16", times, threads=t, work=fma) for t in (2, 1))
    assert _goal("matmul, m >= 16, 2 threads", two, one).holds is True
    assert _goal("matmul, m >= 16, 1 thread:", two, one).holds is False
    assert _goal("matmul: 1.0x onnxruntime", two, one).holds is True
    read = [
        _result("matmul", "m=1", times, work={"kind": "read", "amount": layer * 2}, layers=2)
        for layer in (9 * MIB, 40 * MIB)
    ]
    goal = _goal("matmul, m = 1", *read)
    assert goal.holds is True and "1 of 1" in goal.measured, "weights that fit into L3 are another matter"


def test_quantized_weights_are_judged_by_their_bytes_and_against_floats() -> None:
    fma = {"kind": "fma", "amount": 1e9}
    floats = _result("quantized", "m=64", {"relaxlite-kernels": 1.0}, work=fma, workload="float32-2048x5632", layers=2)
    for seconds, holds in ((2.1, True), (2.3, False)):
        times = {"relaxlite-kernels": seconds, "onnxruntime": 3.0}
        four = _result("quantized", "m=64", times, work=fma, workload="int4-2048x5632", layers=4)
        assert _goal("quantized weights, m >= 64", floats, four).holds is holds
        assert _goal("quantized weights: at no m slower", floats, four).holds is True
    read = _result("quantized", "m=1", {"relaxlite-kernels": 1.0, "machine": 0.8}, work={"kind": "read", "amount": 1e8})
    assert _goal("quantized weights, m = 1", read).holds is False


def test_the_sweep_counts_loading_and_names_the_best_peer() -> None:
    own = SweepTiming(load=[4.0, 0.4, 0.4], runs=[2.0, 2.0, 2.0])
    rivals = {"onnxruntime": SweepTiming([0.2, 0.2], [6.0, 6.0]), "openvino": SweepTiming([0.3, 0.3], [3.0, 3.1])}
    bf16 = {"openvino-default": SweepTiming([0.1], [0.1])}
    goal = _goal("minilm, shapes never", sweep={"relaxlite": own, **rivals, **bf16})
    assert goal.holds is True and goal.measured.startswith("1.42x openvino (0.57x with an empty")
    assert _goal("minilm compiles", sweep={"relaxlite": own, "relaxlite-compile": own}).holds is True
    once = SweepTiming([4.0], [1.0])
    assert _goal("minilm compiles", sweep={"relaxlite": own, "relaxlite-compile": once}).holds is False, "no warm load"
    assert _goal("minilm compiles", sweep={"relaxlite": own}).holds is None


def test_overhead_and_agreement() -> None:
    tiny = _result("overhead", "1x16", {"relaxlite": 8e-6}, layers=60)
    assert _goal("60 tiny kernels", tiny).holds is True
    assert _goal("results within 1e-4", tiny).holds is True
    tiny.peers["relaxlite"].error = 2e-4
    assert _goal("results within 1e-4", tiny).holds is False


def test_the_case_of_minilm_counts_its_operations() -> None:
    work = minilm_case(1, 128).work
    assert work is not None and work.amount == pytest.approx(2.87e9, rel=0.05)
