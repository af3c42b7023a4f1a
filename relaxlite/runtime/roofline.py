"""Roofline model: lower bounds of kernel times by the measured limits of a machine.

    seconds >= max(flops / peak, bytes / bandwidth of the innermost memory that holds the bytes)

(S. Williams, A. Waterman, D. Patterson: Roofline, CACM 52(4), 2009.) `relaxlite/machine.py` measures the limits; this
module stores them in the user's cache folder, one entry per processor, and loads them without the compiler.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from relaxlite import config
from relaxlite.config import usable_cores
from relaxlite.errors import NoFolderError
from relaxlite.records import dataclass
from relaxlite.runtime import cpu, jit

PEAK = "compute"  # name of the arithmetic limit


@dataclass(frozen=True, slots=True)
class MemoryLevel:
    """A cache level or RAM. `gb_per_s`: total read bandwidth by thread count."""

    name: str
    capacity: int | None  # bytes, per core where `is_private`; None: unlimited
    is_private: bool
    gb_per_s: Mapping[int, float]

    def holds(self, nbytes: float, threads: int) -> bool:
        """Whether `nbytes` fit this level, distributed over the cores of the threads."""
        return self.capacity is None or nbytes <= self.capacity * (threads if self.is_private else 1)

    def speed(self, threads: int) -> float:
        """Read bandwidth in GB/s, interpolated for other thread counts."""
        return _interpolate(self.gb_per_s, threads)


@dataclass(frozen=True, slots=True)
class RooflineBound:
    """Lower bound of a time, and the limit that determines it: "compute", or the name of a memory level."""

    seconds: float
    limit: str


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Measured limits. `gflops`: peak of float32 FMAs (2 FLOPs each) by thread count; `levels`: innermost first."""

    cpu: str
    gflops: Mapping[int, float]
    levels: tuple[MemoryLevel, ...]

    def peak_gflops(self, threads: int) -> float:
        """Arithmetic peak in GFLOP/s, interpolated for other thread counts."""
        return _interpolate(self.gflops, threads)

    def level_for(self, nbytes: float, threads: int) -> MemoryLevel:
        """Innermost memory level that holds this many bytes."""
        return next((level for level in self.levels if level.holds(nbytes, threads)), self.levels[-1])

    def bound(self, flops: float, nbytes: float, threads: int) -> RooflineBound:
        """Lower bound of the time for an amount of arithmetic and memory traffic."""
        level = self.level_for(nbytes, threads)
        compute = flops / (self.peak_gflops(threads) * 1e9)
        traffic = nbytes / (level.speed(threads) * 1e9)
        return RooflineBound(compute, PEAK) if compute >= traffic else RooflineBound(traffic, level.name)


def _interpolate(measured: Mapping[int, float], threads: int) -> float:
    """Linear interpolation between measured thread counts."""
    below = max((t for t in measured if t <= threads), default=min(measured))
    above = min((t for t in measured if t >= threads), default=max(measured))
    if above <= below:
        return measured[below]
    share = (threads - below) / (above - below)
    return measured[below] + (measured[above] - measured[below]) * share


def best_of(known: MachineLimits | None, new: MachineLimits) -> MachineLimits:
    """Elementwise maximum of two measurements; `new` alone where the memory levels differ."""
    if known is None or [level.name for level in known.levels] != [level.name for level in new.levels]:
        return new
    levels = tuple(
        replace(level, gb_per_s=_greater(old.gb_per_s, level.gb_per_s))
        for old, level in zip(known.levels, new.levels, strict=True)
    )
    return replace(new, gflops=_greater(known.gflops, new.gflops), levels=levels)


def _greater(a: Mapping[int, float], b: Mapping[int, float]) -> dict[int, float]:
    return {threads: max(a.get(threads, 0.0), figure) for threads, figure in b.items()}


def to_json(limits: MachineLimits) -> dict[str, Any]:
    """Plain data for JSON; thread counts become strings."""
    return json.loads(json.dumps(asdict(limits)))


def from_json(data: Any) -> MachineLimits:
    """Inverse of `to_json`. Raises ValueError for malformed data."""
    try:
        levels = tuple(
            MemoryLevel(str(item["name"]), item["capacity"], bool(item["is_private"]), _by_threads(item["gb_per_s"]))
            for item in data["levels"]
        )
        limits = MachineLimits(str(data["cpu"]), _by_threads(data["gflops"]), levels)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not the limits of a machine: {error!r}") from error
    if not levels or any(not isinstance(level.capacity, int | None) for level in levels):
        raise ValueError("not the limits of a machine: a memory level lacks its size")
    return limits


def _by_threads(data: Mapping[str, float]) -> dict[int, float]:
    result = {int(threads): float(figure) for threads, figure in data.items()}
    if not result or min(result) < 1 or not all(0 < figure < 1e9 for figure in result.values()):
        raise ValueError(f"figures by thread count should be positive, got {result}")
    return result


# ---- the file of limits


def limits_file() -> Path:
    """Path of the file of limits, in the model cache folder (RELAXLITE_CACHE). NoFolderError without such a folder."""
    return config.cache_folder("cache", "") / "machines.json"


def load_limits() -> MachineLimits | None:
    """Limits stored for this machine; None where there are none, or the file is malformed."""
    try:
        entry = _read(limits_file()).get(machine_key())
        return None if entry is None else from_json(entry)
    except (ValueError, NoFolderError):
        return None


def save_limits(limits: MachineLimits) -> Path:
    """Store limits for `load_limits`; returns the path. Raises OSError, NoFolderError."""
    path = limits_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        temporary.write_text(json.dumps({**_read(path), machine_key(): to_json(limits)}, indent=1))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        data = json.loads(path.read_text())
        if isinstance(data, dict):
            return data
    return {}


def cpu_name() -> str:
    """Marketing name of the processor, else the system's or LLVM's name."""
    return cpu.described().get("model name") or platform.processor() or jit.host_cpu_name()


def machine_key() -> str:
    """Key of stored limits: processor, and number of cores that this process may use."""
    fields = cpu.described()  # clouds give several generations the same name
    kind = f"family {fields['cpu family']}, model {fields['model']}" if "cpu family" in fields else jit.host_cpu_name()
    return f"{cpu_name()} ({kind}), {usable_cores()} cores"
