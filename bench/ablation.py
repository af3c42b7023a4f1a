"""What each part of the compiler brings: time and peak memory of whole models, with one part more per step.

    python -m bench.ablation [MODEL ...] [--threads 2] [--rounds 15] [--json FILE]

MODEL: minilm-l6, ppocrv4-rec, decoder-prefill, decoder-decode (default: all). The steps:

    nothing           every operator a kernel of its own (scheduled as always), memory tensor by tensor, interpreted
    + fusion          patterns recognized, operators merged into kernels, matmuls that share an input combined
    + library         calls of libraries where the cost model prefers them
    + planning        views, results in place of operands, workspaces and one arena per call
    + native host     the same, run by one native function

Each step is compiled in one process and run in another. "ms" is the median of the calls' wall time. "peak" is how much
the resident memory of the process rises above what it was before the call, at most (Linux counts it; elsewhere it is
left out). A first call at the smallest size has happened then, so that code and weights are there already. Results are
part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import relaxlite as rl
from bench.decoder import DecoderConfig, build_decoder
from relaxlite import config, models
from relaxlite.passes.manager import Pass
from relaxlite.passes.pipeline import default_pipeline

ROOT = Path(__file__).resolve().parent.parent
DECODER = DecoderConfig()

PARTS: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "+ fusion": ("recognize", "fuse_attention", "decompose_again", "fuse_ops", "fuse_programs"),
    "+ library": ("dispatch",),
    "+ planning": ("make_views", "lift_workspaces", "join_parts", "reuse_operands", "plan_memory"),
    "+ native host": (),
}
"""The passes that each step adds to those before. The host function is no pass."""

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """`make` builds the module; `arrays` its inputs, of the smallest size (0) and of the one to measure (1)."""

    make: Callable[[], rl.IRModule]
    size: str
    arrays: Callable[[int], Arrays]


def _minilm(which: int) -> Arrays:
    batch, seq = ((1, 8), (8, 128))[which]
    ids = np.random.default_rng(0).integers(1000, 20000, (batch, seq))
    return ids, np.ones_like(ids), np.zeros_like(ids)


def _rec(which: int) -> Arrays:
    return (np.random.default_rng(0).random(((1, 3, 48, 32), (1, 3, 48, 640))[which], np.float32),)


def _decoder(batch: int, seq: int, past: int) -> Callable[[int], Arrays]:
    def arrays(which: int) -> Arrays:
        b, s, p = ((1, 1, 0), (batch, seq, past))[which]
        rng = np.random.default_rng(0)
        cache = [rng.random((b, DECODER.kv_heads, p, DECODER.width), np.float32) for _ in range(2 * DECODER.layers)]
        return rng.integers(0, DECODER.vocab, (b, s)), *cache

    return arrays


def _onnx(name: str) -> Callable[[], rl.IRModule]:
    return lambda: rl.from_onnx(models.fetch(name, progress=False))


MODELS = {
    "minilm-l6": Model(_onnx("minilm-l6-onnx"), "8 x 128 tokens", _minilm),
    "ppocrv4-rec": Model(_onnx("ppocrv4-rec"), "48 x 640 pixels", _rec),
    "decoder-prefill": Model(lambda: build_decoder(DECODER), "512 tokens", _decoder(1, 512, 0)),
    "decoder-decode": Model(lambda: build_decoder(DECODER), "16 tokens after 256", _decoder(16, 1, 256)),
}


def passes_of(step: str) -> list[Pass]:
    """The pipeline without the parts that come after this step."""
    names = list(PARTS)
    later = {name for part in names[names.index(step) + 1 :] for name in PARTS[part]}
    return [each for each in default_pipeline() if each.name not in later]


def build(model: Model, step: str, path: Path) -> None:
    """Compile a model with the parts of a step, into a file."""
    rl.compile(model.make(), passes=passes_of(step)).save(path)


def measure_here(model: Model, step: str, path: Path, threads: int, rounds: int) -> dict[str, float]:
    """Time and memory of a compiled model in this process."""
    with config.override(interpret=step != list(PARTS)[-1]):
        exe = rl.load(path, threads=threads)
    small, large = model.arrays(0), model.arrays(1)
    exe(*small)
    peak = _peak_of(lambda: exe(*large))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        exe(*large)
        times.append(time.perf_counter() - start)
    found = {"ms": statistics.median(times) * 1e3, "kernels": len(exe.data.kernels)}
    return found if peak is None else {**found, "mib": peak / 2**20}


def _peak_of(call: Callable[[], object]) -> int | None:
    """Bytes by which the resident memory rose at most during a call. None where the system does not say."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far becomes what is resident now
        before = _resident("VmRSS")
        call()
        return _resident("VmHWM") - before
    except (OSError, StopIteration):
        call()
        return None


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def measure(name: str, threads: int, rounds: int) -> dict[str, dict[str, float]]:
    """Every step of a model; compiled in one process and run in another, whose memory knows nothing of the compiler."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.rlx"
        for step in PARTS:
            for mode in ("build", "run"):
                child = [sys.executable, "-m", "bench.ablation", name, "--child", mode, step, str(path)]
                child += ["--threads", str(threads), "--rounds", str(rounds)]
                environment = {**os.environ, "PYTHONPATH": str(ROOT)}
                done = subprocess.run(child, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE)
            found[step] = json.loads(done.stdout)
    return found


def table(name: str, steps: dict[str, dict[str, float]]) -> str:
    lines = [f"| {name}, {MODELS[name].size} | ms | speed | peak MiB | kernels |", "| --- | --- | --- | --- | --- |"]
    first = steps[next(iter(PARTS))]["ms"]
    for step, found in steps.items():
        peak = f"{found['mib']:.1f}" if "mib" in found else "-"
        lines.append(f"| {step} | {found['ms']:.2f} | {first / found['ms']:.2f}x | {peak} | {found['kernels']:.0f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    unknown = [name for name in args.models if name not in MODELS]
    if unknown:
        parser.error(f"no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    if args.child:
        mode, step, path = args.child
        if mode == "build":
            build(MODELS[args.models[0]], step, Path(path))
        else:
            print(json.dumps(measure_here(MODELS[args.models[0]], step, Path(path), args.threads, args.rounds)))
        return
    results: dict[str, Any] = {}
    for name in args.models or MODELS:
        results[name] = measure(name, args.threads, args.rounds)
        print(table(name, results[name]) + "\n", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
