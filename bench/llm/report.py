"""The results as JSON, as Markdown and, where matplotlib is installed, as a plot."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.cpu.goals import Goal
from bench.cpu.report import describe_machine, goals_table, machine_text, table, write_text
from bench.llm.cases import Case
from bench.llm.goals import LLAMA, MB, OUR_WAYS, OURS, better_llama, check_goals, distance, share_of_reads
from bench.llm.measure import COMPARED, Measured, ModelResult
from relaxlite.version import __version__

GB = 1e9
REFERENCES = ("transformers", OURS)  # of logits: who computes in float32; the first that was measured


@dataclass(slots=True)
class Report:
    settings: dict[str, Any]
    results: list[ModelResult] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # models, and why
    machine: dict[str, Any] = field(default_factory=describe_machine)  # before anything is measured

    @property
    def goals(self) -> list[Goal]:
        return check_goals(self.results)

    def json(self) -> dict[str, Any]:
        """Everything that was measured; seconds and bytes."""
        return {
            "relaxlite": __version__,
            "machine": self.machine,
            "settings": self.settings,
            "skipped": self.skipped,
            "models": [result.json() for result in self.results],
            "goals": [asdict(goal) for goal in self.goals],
        }

    def markdown(self) -> str:
        return "\n\n".join(["# Language models on one processor", *self._sections()]) + "\n"

    def _sections(self) -> Iterable[str]:
        yield machine_text(self.machine)
        yield "Settings: " + ", ".join(f"{name} {value}" for name, value in self.settings.items()) + "."
        versions = {name: peer.version for r in self.results for name, peer in r.peers.items() if peer.version}
        yield "Peers: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + "."
        missing = {name: peer.problem for r in self.results for name, peer in r.peers.items() if peer.is_absent}
        for title, named in (("Absent", missing), ("Skipped", self.skipped)):
            if named:
                yield f"{title}: " + "; ".join(f"{name} ({why})" for name, why in named.items()) + "."
        for result in self.results:
            yield from _model_sections(result)
        yield "## What is to be reached\n\n" + goals_table(self.goals)


def write(report: Report, folder: Path, markdown: Path | None) -> list[Path]:
    """The files that were written."""
    folder.mkdir(parents=True, exist_ok=True)
    data, text = folder / "llm.json", markdown or folder / "llm.md"
    write_text(data, json.dumps(report.json(), indent=1) + "\n")
    write_text(text, report.markdown())
    plotted = plot(report, folder / "llm.svg")
    return [data, text, *([plotted] if plotted else [])]


# Sections


def _model_sections(result: ModelResult) -> Iterable[str]:
    yield f"## {result.model.name}\n\n{_about(result)}"
    yield "Tokens per second: medians (least to most of the processes; relaxlite's speed).\n\n" + speed_table(result)
    chosen = _better_text(result)
    if chosen:
        yield chosen
    reads = _reads_text(result)
    if reads:
        yield reads
    shares = share_table(result)
    if shares:
        yield shares
    yield (
        "Seconds to load and to the first token after it, memory of the process (one sequence, all cases), files.\n\n"
        + (cost_table(result))
    )
    logits = logits_table(result)
    if logits:
        yield f"Logits behind the first {COMPARED} tokens.\n\n{logits}"
    ways = [
        f"{name} was measured {peer.way}: else {peer.way_problem}."
        for name, peer in _measured(result).items()
        if peer.way
    ]
    if ways:
        yield "\n".join(ways)
    problems = problem_lines(result)
    if problems:
        yield "What did not run:\n\n" + "\n".join(problems)


def _about(result: ModelResult) -> str:
    model = result.model
    text = (
        f"{model.path.name}: {model.parameters / 1e6:.0f} million parameters, matrices {model.types}; file "
        f"{_mb(model.file_bytes)} MB, {_mb(model.read_bytes)} MB of it read for each token."
    )
    if result.artifact_bytes is not None:
        text += f" Compiled: {_mb(result.artifact_bytes)} MB"
        text += "." if result.compile_seconds is None else f", in {result.compile_seconds:.1f} s."
    return text


def _measured(result: ModelResult) -> dict[str, Measured]:
    return {name: peer for name, peer in result.peers.items() if peer.answers}


def speed_table(result: ModelResult) -> str:
    peers = _measured(result)
    rows = [[case.label, *(_speed_text(result, name, case) for name in peers)] for case in result.cases]
    return table(["case", *peers], rows)


def _speed_text(result: ModelResult, name: str, case: Case) -> str:
    peer = result.peers[name]
    speeds, speed = peer.speeds(case), peer.speed(case)
    if speed is None:
        return "-"
    ratio = speed_ratio(result, name, case) if name != OURS else None
    notes = [f"{_rate(min(speeds))} to {_rate(max(speeds))}"] if len(speeds) > 1 else []
    notes += [f"{ratio:.2f}x"] if ratio is not None else []
    return _rate(speed) + (f" ({'; '.join(notes)})" if notes else "")


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _rate(speed: float) -> str:
    return f"{speed:.0f}" if speed >= 1000 else f"{speed:.4g}"


def speed_ratio(result: ModelResult, name: str, case: Case) -> float | None:
    """How many times as fast as a peer relaxlite is."""
    own = result.peers[OURS].speed(case) if OURS in result.peers else None
    theirs = result.peers[name].speed(case)
    return own / theirs if own and theirs else None


def _better_text(result: ModelResult) -> str:
    """Where both of llama.cpp's ways were measured."""
    if not set(LLAMA) <= set(_measured(result)):
        return ""
    by_way: dict[str, list[str]] = {}
    for case in result.cases:
        found = better_llama(result, case)
        if found:
            by_way.setdefault(found[1], []).append(case.label)
    return "llama.cpp is faster " + "; ".join(f"{way}: {', '.join(labels)}" for way, labels in by_way.items()) + "."


def _reads_text(result: ModelResult) -> str:
    found = []
    for threads, size in result.reads:
        rate = (result.bandwidth(threads, size) or 0.0) / GB
        found.append(f"{_mb(size)} MB by {_threads(threads)} {rate:.1f}")
    return "Plain reads, GB/s: " + ", ".join(found) + "." if found else ""


def share_table(result: ModelResult) -> str:
    """GB/s of weights in generation of one sequence, and the share of plain reads of as many bytes."""
    cases = [case for case in result.cases if case.new and case.sequences == 1]
    if not cases:
        return ""
    peers = _measured(result)
    rows = []
    for case in cases:
        cells = [case.label]
        for peer in peers.values():
            speed, share = peer.speed(case), share_of_reads(result, peer, case)
            rate = f"{(speed or 0) * result.model.read_bytes / GB:.2f}"
            cells.append("-" if speed is None else rate if share is None else f"{rate} ({share:.0%})")
        rows.append(cells)
    title = f"Weights read, GB/s of the file's bytes (share of plain reads, {_threads(result.threads)}).\n\n"
    return title + table(["case", *peers], rows)


def cost_table(result: ModelResult) -> str:
    rows = []
    for name, peer in _measured(result).items():
        size = result.artifact_bytes if name in OUR_WAYS else result.model.file_bytes
        seconds = [peer.median(key) for key in ("import_seconds", "load_seconds", "first_seconds")]
        memory = [peer.median("memory", key) for key in ("before", "loaded", "single", "all")]
        cells = [*(_number(value, 1.0, ".2f") for value in seconds), *(_number(value, MB, ".0f") for value in memory)]
        rows.append([name, *cells, _number(size, MB, ".1f"), str(peer.fact("cache_dtype"))])
    header = ["peer", "import (s)", "load (s)", "load and first token (s)", "before it (MB)", "peak, loaded (MB)"]
    return table([*header, "peak, one sequence (MB)", "peak, all (MB)", "file (MB)", "keys and values"], rows)


def _number(value: float | None, unit: float, form: str) -> str:
    return "-" if value is None else format(value / unit, form)


def _mb(size: float) -> str:
    return f"{size / MB:.4g}"


def logits_table(result: ModelResult) -> str:
    """Nothing where there is nobody to compare with."""
    found = {name: peer.logits for name, peer in _measured(result).items()}
    reference = next((name for name in REFERENCES if name in found), None)
    expected = found.get(reference or "")
    if reference is None or expected is None or len(found) < 2:
        return ""
    rows = []
    for name, logits in found.items():
        if name == reference or logits is None:
            continue
        same = "yes" if int(logits.argmax()) == int(expected.argmax()) else "no"
        rows.append([name, f"{distance(logits, expected):.1e}", same])
    return table(["peer", f"distance from {reference}'s, against their size", "same likeliest token"], rows)


def problem_lines(result: ModelResult) -> list[str]:
    whole = [f"- {name}: {peer.problem}" for name, peer in result.peers.items() if peer.problem]
    parts = [f"- {name}, {label}: {why}" for name, peer in result.peers.items() for label, why in peer.problems.items()]
    return [*whole, *parts]


# Plot


def plot(report: Report, path: Path) -> Path | None:
    """relaxlite's speed against each peer, one point per case. None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [(result, case) for result in report.results for case in result.cases]
    points: dict[str, list[tuple[float, int]]] = {}
    for row, (result, case) in enumerate(rows):
        for name in result.peers:
            ratio = speed_ratio(result, name, case) if name != OURS else None
            if ratio is not None:
                points.setdefault(name, []).append((ratio, row))
    if not points:
        return None
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.25 * len(rows)))
    for name, found in points.items():
        axes.plot(*zip(*found, strict=True), "o", label=name, markersize=5)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("relaxlite's speed against the peer (1: as fast)")
    axes.set_yticks(range(len(rows)), [f"{result.model.name}: {case.label}" for result, case in rows], fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=7)
    scratch = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        figure.savefig(scratch, bbox_inches="tight")
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
        pyplot.close(figure)
    return path
