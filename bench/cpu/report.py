"""The results as JSON, as Markdown and, where matplotlib is installed, as a plot."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from bench.cpu.goals import Goal, check_goals, geometric_mean, ours, speed
from bench.cpu.measure import Result, SweepTiming, Timing
from relaxlite.config import usable_cores
from relaxlite.target import Target
from relaxlite.version import __version__

LIMITS = {"fma": ("GFLOP/s", 1e9), "read": ("GB/s", 1e9), "copy": ("GB/s", 1e9)}
HOLDS = {True: "yes", False: "no", None: "-"}


@dataclass(slots=True)
class Report:
    settings: dict[str, Any]
    versions: Mapping[str, str]
    absent: Mapping[str, str]
    results: list[Result] = field(default_factory=list)
    sweep: dict[str, SweepTiming] = field(default_factory=dict)
    sweep_shapes: int = 0
    skipped: dict[str, str] = field(default_factory=dict)  # groups, and why
    machine: dict[str, Any] = field(default_factory=lambda: describe_machine())  # before anything is measured

    @property
    def goals(self) -> list[Goal]:
        return check_goals(self.results, self.sweep)

    def json(self) -> dict[str, Any]:
        """Everything that was measured; times in seconds, work in operations or bytes."""
        return {
            "relaxlite": __version__,
            "machine": self.machine,
            "settings": self.settings,
            "peers": {name: {"version": version} for name, version in self.versions.items()}
            | {name: {"absent": reason} for name, reason in self.absent.items()},
            "skipped": self.skipped,
            "limits": measured_limits(self.results),
            "results": [asdict(result) for result in self.results],
            "sweep": {"shapes": self.sweep_shapes, "peers": {name: asdict(t) for name, t in self.sweep.items()}},
            "goals": [asdict(goal) for goal in self.goals],
        }

    def markdown(self) -> str:
        return "\n\n".join(["# Benchmarks on one processor", *self._sections()]) + "\n"

    def _sections(self) -> Iterable[str]:
        yield _machine_section(self)
        yield "## What is to be reached\n\n" + goals_table(self.goals)
        if self.results:
            yield "## Speed of relaxlite against each peer\n\n" + means_table(self.results)
        for group in dict.fromkeys(result.group for result in self.results):
            rows = [result for result in self.results if result.group == group]
            yield f"## {group}\n\nMilliseconds (relaxlite's speed).\n\n" + group_table(rows)
        problems = problem_lines(self.results)
        if problems:
            yield "## What did not run\n\n" + "\n".join(problems)
        if self.sweep:
            yield f"## {self.sweep_shapes} shapes never seen before\n\n" + sweep_table(self.sweep)


def write(report: Report, folder: Path, markdown: Path | None) -> list[Path]:
    """The files that were written."""
    folder.mkdir(parents=True, exist_ok=True)
    data, text = folder / "cpu.json", markdown or folder / "cpu.md"
    write_text(data, json.dumps(report.json(), indent=1) + "\n")
    write_text(text, report.markdown())
    plotted = plot(report, folder / "cpu.svg")
    return [data, text, *([plotted] if plotted else [])]


def write_text(path: Path, text: str) -> None:
    """All of it or nothing: a run that is interrupted leaves the results of the last one."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(text, "utf-8")
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def describe_machine() -> dict[str, Any]:
    target = Target.host()
    return {
        "cpu": _cpu_model(),
        "llvm_cpu": target.cpu,
        "vector_bits": target.vector_bits,
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "llvm": ".".join(map(str, llvm.llvm_version_info)),
        "llvmlite": llvmlite.__version__,
        "load": _load_average(),
    }


def _load_average() -> float | None:
    """How many threads wanted to run in the last minute; far more than there are cores spoils every comparison."""
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def measured_limits(results: Iterable[Result]) -> list[dict[str, Any]]:
    """The best rate of each kind that the machine itself reached, per thread count: operations or bytes per second."""
    best: dict[tuple[str, int, str], float] = {}
    for result in results:
        timing = result.peers.get("machine")
        if result.work and timing and timing.median:
            kind, amount = result.work["kind"], result.work["amount"]
            size = "" if kind == "fma" else "beyond 32 MB" if amount > 64 << 20 else "within 32 MB"
            key = (kind, result.threads, size)
            best[key] = max(best.get(key, 0.0), amount / timing.median)
    return [{"kind": k, "threads": t, "size": s, "rate": rate} for (k, t, s), rate in sorted(best.items())]


def _machine_section(report: Report) -> str:
    lines = [
        machine_text(report.machine),
        "",
        "Settings: " + ", ".join(f"{name} {value}" for name, value in report.settings.items()) + ".",
        "",
        "Peers: " + ", ".join(f"{name} {version}" for name, version in report.versions.items()) + ".",
    ]
    for title, missing in (("Absent", report.absent), ("Skipped", report.skipped)):
        if missing:
            lines += ["", f"{title}: " + "; ".join(f"{name} ({why})" for name, why in missing.items()) + "."]
    limits = measured_limits(report.results)
    if limits:
        lines += ["", "Measured limits: " + "; ".join(_limit_text(limit) for limit in limits) + "."]
    return "\n".join(lines)


def machine_text(about: Mapping[str, Any]) -> str:
    """What `describe_machine` found, as a sentence."""
    return (
        f"{about['cpu']} (LLVM: {about['llvm_cpu']}, {about['vector_bits']}-bit vectors), {about['cores']} cores, "
        f"{about['system']}, Python {about['python']}, LLVM {about['llvm']}, llvmlite {about['llvmlite']}, "
        f"relaxlite {__version__}; load average before: {about['load']}."
    )


def _limit_text(limit: Mapping[str, Any]) -> str:
    unit, factor = LIMITS[limit["kind"]]
    size = f" {limit['size']}" if limit["size"] else ""
    threads = f"{limit['threads']} thread{'s' if limit['threads'] > 1 else ''}"
    return f"{limit['kind']}{size} {limit['rate'] / factor:.1f} {unit} ({threads})"


# Tables


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def goals_table(goals: Iterable[Goal]) -> str:
    return table(["goal", "measured", "holds"], [(g.text, g.measured, HOLDS[g.holds]) for g in goals])


def means_table(results: Sequence[Result]) -> str:
    """Geometric means of the ratios of medians, by group and thread count."""
    peers = _peers(results)
    rows = []
    for group, threads in dict.fromkeys((r.group, r.threads) for r in results):
        cells = [group, str(threads)]
        for peer in peers:
            found = [speed(r, peer) for r in results if (r.group, r.threads) == (group, threads)]
            values = [value for value in found if value is not None]
            cells.append(_ratio_text(peer, geometric_mean(values)) if values else "")
        rows.append(cells)
    return table(["group", "threads", *peers], rows)


def _ratio_text(peer: str, value: float) -> str:
    """Shares of the limit in percent."""
    return f"{value:.0%}" if peer == "machine" else f"{value:.2f}x"


def _peers(results: Iterable[Result]) -> list[str]:
    """All but the name under which relaxlite's own ran."""
    names = dict.fromkeys(name for result in results for name in result.peers)
    own = {ours(result) for result in results}
    return [name for name in names if name not in own]


def group_table(results: Sequence[Result]) -> str:
    peers = _peers(results)
    rows = []
    for result in results:
        own = ours(result)
        timing = result.peers[own] if own else None
        cells = [f"{result.workload} {result.case}", str(result.threads), _own_text(result, timing)]
        cells += [_peer_text(result, peer) for peer in peers]
        rows.append(cells)
    return table(["case", "threads", "relaxlite (p10 to p90)", *peers], rows)


def _ms(seconds: float, layers: int) -> str:
    return f"{seconds / layers * 1e3:.4g}"


def _own_text(result: Result, timing: Timing | None) -> str:
    if timing is None or timing.median is None or timing.p10 is None or timing.p90 is None:
        problems = [result.peers[name].problem for name in result.peers if name.startswith("relaxlite")]
        return next((p for p in problems if p), "-")
    spread = (
        f"{_ms(timing.median, result.layers)} ({_ms(timing.p10, result.layers)} to {_ms(timing.p90, result.layers)})"
    )
    return spread + _disagreement(timing)


def _disagreement(timing: Timing) -> str:
    return "" if timing.agrees else f" differs by {timing.error:.0e}"


def _peer_text(result: Result, peer: str) -> str:
    timing, ratio = result.peers.get(peer), speed(result, peer)
    if timing is None or timing.median is None:
        return "-"
    text = _ms(timing.median, result.layers) + (f" ({_ratio_text(peer, ratio)})" if ratio is not None else "")
    return text + _disagreement(timing)


def problem_lines(results: Iterable[Result]) -> list[str]:
    """Each peer's reasons once, with where they were given."""
    where: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for name, timing in result.peers.items():
            if timing.problem is not None:
                where.setdefault((name, timing.problem), []).append(f"{result.workload} {result.case}")
    return [
        f"- {name}: {why} ({cases[0]}{f' and {len(cases) - 1} more' if len(cases) > 1 else ''})"
        for (name, why), cases in where.items()
    ]


def sweep_table(sweep: Mapping[str, SweepTiming]) -> str:
    """Seconds."""
    rows = []
    for name, t in sweep.items():
        if t.problem is not None or not t.load:
            rows.append([name, t.problem or "-", "", "", "", ""])
            continue
        later = min(t.load[1:], default=t.load[0])
        numbers = [t.load[0], later, min(t.runs), t.cold or 0.0, t.warm or 0.0]
        rows.append([name, *(f"{value:.2f}" for value in numbers)])
    header = [
        "peer",
        "load, empty caches (s)",
        "load, later (s)",
        "all shapes once (s)",
        "total, first (s)",
        "total, later (s)",
    ]
    return table(header, rows)


# Plot


def plot(report: Report, path: Path) -> Path | None:
    """Relaxlite's speed against each peer, one point per case. None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = [r for r in report.results if ours(r)]
    if not results:
        return None
    labels = [f"{r.group}: {r.workload} {r.case}, {r.threads}T" for r in results]
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.16 * len(labels)))
    for peer in _peers(results):
        points = [(value, row) for row, r in enumerate(results) if (value := speed(r, peer)) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), "|" if peer == "machine" else "o", label=peer, markersize=4)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("relaxlite's speed against the peer (1: as fast; machine: share of the measured limit)")
    axes.set_yticks(range(len(labels)), labels, fontsize=5)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=7)
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)
    return path
