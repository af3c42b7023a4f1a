"""What is to be reached, as ratios of medians within one run, and whether it is."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.cpu.cases import L3_BYTES
from bench.cpu.measure import Result, SweepTiming
from bench.cpu.worker import NOT_FLOAT32

OURS = ("relaxlite", "relaxlite-kernels")
CONVOLUTIONAL = ("det", "rec", "resnet50")
BLAS_PEERS = ("onnxruntime", "onednn", "mkl", "openblas")
CALL_US, KERNEL_US = 3.0, 0.1  # of overhead


@dataclass(frozen=True, slots=True)
class Goal:
    """`holds` is None where nothing was measured."""

    text: str
    measured: str
    holds: bool | None


@dataclass(frozen=True, slots=True)
class Ratio:
    value: float
    at: str


def ours(result: Result) -> str | None:
    """The name under which relaxlite ran a case; None when it did not."""
    return next((name for name in OURS if name in result.peers and result.peers[name].median), None)


def speed(result: Result, peer: str, base: str | None = None) -> float | None:
    """How many times as fast as `peer` relaxlite is."""
    base = base or ours(result)
    theirs = result.peers.get(peer)
    own = result.peers.get(base) if base else None
    if theirs is None or own is None or not theirs.median or not own.median:
        return None
    return theirs.median / own.median


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def check_goals(results: Sequence[Result], sweep: Mapping[str, SweepTiming]) -> list[Goal]:
    by_group: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_group[result.group].append(result)
    minilm = by_group["minilm"]
    convolutional = [r for group in CONVOLUTIONAL for r in by_group[group]]
    goals = [
        _mean("minilm: 1.4x onnxruntime, geometric mean of the shapes", minilm, "onnxruntime", 1.4),
        _each("minilm: at no shape slower than onnxruntime", minilm, ["onnxruntime"], 1.0),
        _each("minilm: at no shape slower than OpenVINO in float32", minilm, ["openvino"], 1.0),
        *_sweep_goals(sweep),
        _each("convolutional models: 0.95x onnxruntime at every shape", convolutional, ["onnxruntime"], 0.95),
        _mean(
            "convolutional models: 1.2x onnxruntime, geometric mean (the goal that follows)",
            convolutional,
            "onnxruntime",
            1.2,
        ),
    ]
    both = [r for group in ("int8", "stream") for r in by_group[group]]
    goals.append(
        _each(
            "models in int8, and of one step per call: at no shape slower than onnxruntime", both, ["onnxruntime"], 1.0
        )
    )
    for group, what in (("matmul", "matmul"), ("matmul-gelu", "matmul + bias + GELU")):
        goals += _matmul_goals(what, by_group[group])
    goals += _quantized_goals(by_group["quantized"])
    goals += _bf16_goals(minilm)
    goals += _row_goals(by_group["rows"])
    goals.append(_overhead_goal(by_group["overhead"]))
    goals.append(_agreement_goal(results))
    return goals


def least(text: str, ratios: Sequence[Ratio], wanted: float, unit: str = "x") -> Goal:
    """Every ratio is at least what is wanted."""
    if not ratios:
        return Goal(text, "not measured", None)
    worst = min(ratios, key=lambda r: r.value)
    mean = geometric_mean(r.value for r in ratios)
    reached = sum(r.value >= wanted for r in ratios)
    shown = (
        f"least {_show(worst.value, unit)} ({worst.at}), mean {_show(mean, unit)}, {reached} of {len(ratios)} reach it"
    )
    return Goal(text, shown, reached == len(ratios))


def _show(value: float, unit: str) -> str:
    return f"{value:.1%}" if unit == "%" else f"{value:.2f}x"


def _ratios(results: Iterable[Result], peers: Iterable[str]) -> list[Ratio]:
    names = list(peers)
    found = []
    for result in results:
        for peer in names:
            value = speed(result, peer)
            if value is not None:
                against = f" against {peer}" if len(names) > 1 else ""
                found.append(Ratio(value, f"{result.workload} {result.case}, {_threads(result.threads)}{against}"))
    return found


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _each(text: str, results: Iterable[Result], peers: Iterable[str], wanted: float) -> Goal:
    return least(text, _ratios(results, peers), wanted)


def _mean(text: str, results: Iterable[Result], peer: str, wanted: float) -> Goal:
    ratios = _ratios(results, [peer])
    if not ratios:
        return Goal(text, "not measured", None)
    mean = geometric_mean(r.value for r in ratios)
    return Goal(text, f"{mean:.2f}x over {len(ratios)}", mean >= wanted)


def _shares(results: Iterable[Result]) -> list[Ratio]:
    """Of the machine's limit, measured in the same rounds."""
    return _ratios(results, ["machine"])


_COMPILES = "minilm compiles in 5 s, in 0.5 s with a warm cache"


def _sweep_goals(sweep: Mapping[str, SweepTiming]) -> list[Goal]:
    text = "minilm, shapes never seen before, loading included: 1.3x the best float32 peer"
    own, compiled = sweep.get("relaxlite"), sweep.get("relaxlite-compile")
    rivals = {n: t for n, t in sweep.items() if not n.startswith("relaxlite") and n not in NOT_FLOAT32 and t.warm}
    if own is None or not own.warm or not own.cold:
        return [
            Goal(text, "not measured", None),
            Goal(_COMPILES, "not measured", None),
        ]
    goals = [Goal(text, "no peer was measured", None)]
    if rivals:
        best = min(rivals, key=lambda n: rivals[n].warm or math.inf)
        warm, cold = (rivals[best].warm or 0) / own.warm, (rivals[best].warm or 0) / own.cold
        goals = [Goal(text, f"{warm:.2f}x {best} ({cold:.2f}x with an empty cache)", warm >= 1.3)]
    if compiled is None or not compiled.warm:
        return [*goals, Goal(_COMPILES, "not measured", None)]
    first, later = compiled.load[0], min(compiled.load[1:], default=math.nan)
    shown = f"{first:.2f} s with an empty cache, {later:.2f} s later"
    goals.append(Goal(_COMPILES, shown, first < 5 and later < 0.5))
    return goals


def _matmul_goals(what: str, results: Sequence[Result]) -> list[Goal]:
    goals = []
    for threads in sorted({r.threads for r in results}) or [1, 2]:
        wanted = 0.95 if threads == 1 else 0.92
        large = [r for r in results if r.threads == threads and r.work and r.work["kind"] == "fma" and _m(r) >= 16]
        text = f"{what}, m >= 16, {_threads(threads)}: {wanted:.0%} of the measured peak"
        goals.append(least(text, _shares(large), wanted, "%"))
    for peer in BLAS_PEERS:
        means = []
        for m, threads in sorted({(_m(r), r.threads) for r in results}):
            ratios = _ratios([r for r in results if (_m(r), r.threads) == (m, threads)], [peer])
            if ratios:
                means.append(Ratio(geometric_mean(r.value for r in ratios), f"m={m}, {_threads(threads)}"))
        goals.append(least(f"{what}: 1.0x {peer} in geometric mean at every m", means, 1.0))
    beyond = [r for r in results if _m(r) == 1 and r.work and r.work["amount"] / r.layers > L3_BYTES]
    goals.append(least(f"{what}, m = 1, weights beyond L3: 90% of the read bandwidth", _shares(beyond), 0.9, "%"))
    return goals


def _quantized_goals(results: Sequence[Result]) -> list[Goal]:
    """Against the bytes that the weights are stored in, and against the same product of float32 weights."""
    single = [r for r in results if _m(r) == 1]
    text = "quantized weights, m = 1: 85% of the read bandwidth over the stored bytes"
    goals = [least(text, _shares(single), 0.85, "%")]
    floats = {(r.case, r.threads): r for r in results if r.workload.startswith("float32")}
    ratios = []
    for result in results:
        base = floats.get((result.case, result.threads))
        own = ours(result)
        if base is None or base is result or own is None or own not in base.peers or _m(result) < 64:
            continue
        seconds = [r.peers[own].median for r in (base, result)]
        if all(seconds):
            value = (seconds[0] or 0) / base.layers / ((seconds[1] or 1) / result.layers)
            ratios.append(Ratio(value, f"{result.workload} {result.case}, {_threads(result.threads)}"))
    goals.append(least("quantized weights, m >= 64: 0.9x the speed of float32 weights", ratios, 0.9))
    goals.append(_each("quantized weights: at no m slower than onnxruntime", results, ["onnxruntime"], 1.0))
    return goals


def _m(result: Result) -> int:
    return int(result.case.removeprefix("m="))


def _bf16_goals(minilm: Sequence[Result]) -> list[Goal]:
    long = [r for r in minilm if r.case in ("1x128", "1x512")]
    found = [(speed(r, "relaxlite", "relaxlite-bf16"), r.case) for r in long]
    ratios = [Ratio(value, case) for value, case in found if value is not None]
    return [least("minilm, precision=bf16: 1.5x our own float32 at 1x128 and 1x512", ratios, 1.5)]


def _row_goals(results: Sequence[Result]) -> list[Goal]:
    named = [r for r in results if r.workload != "transpose"]
    large = [r for r in named if r.case == "128MB"]
    return [
        least("softmax, layer norm, GELU, elementwise beyond the cache: 85% of copying", _shares(large), 0.85, "%"),
        _each("softmax, layer norm, GELU, elementwise: 1.0x onnxruntime at every size", named, ["onnxruntime"], 1.0),
    ]


def _overhead_goal(results: Sequence[Result]) -> Goal:
    text = f"60 tiny kernels: {KERNEL_US} us each and {CALL_US:.0f} us per call from Python"
    many = next((r for r in results if r.layers == 60), None)
    timing = many.peers.get("relaxlite") if many else None
    if timing is None or not timing.median:
        return Goal(text, "not measured", None)
    us = timing.median * 1e6
    return Goal(text, f"{us:.1f} us for all, {60 * KERNEL_US + CALL_US:.0f} allowed", us <= 60 * KERNEL_US + CALL_US)


def _agreement_goal(results: Sequence[Result]) -> Goal:
    text = "results within 1e-4 of onnxruntime's"
    errors: list[Ratio] = []
    for result in results:
        if result.group == "int8":  # in which the last place of a float decides on a code
            continue
        name = ours(result)
        error = result.peers[name].error if name and result.reference == "onnxruntime" else None
        if error is not None:
            errors.append(Ratio(error, f"{result.workload} {result.case}"))
    if not errors:
        return Goal(text, "not measured", None)
    worst = max(errors, key=lambda e: e.value)
    return Goal(text, f"largest difference {worst.value:.1e} ({worst.at})", worst.value <= 1e-4)
