"""The rounds: each peer in a new process, one after the other, in an order that turns."""

from __future__ import annotations

import base64
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.cpu import cases as cpu_cases
from bench.cpu.worker import THREAD_VARIABLES, Worker
from bench.llm.cases import Case
from bench.llm.models import Model
from bench.llm.peers import Array
from bench.llm.worker import peer_class
from relaxlite.errors import RelaxliteError

ROOT = Path(__file__).resolve().parents[2]
COMPARED = 32  # tokens of the prompt whose logits are compared
BEYOND_CACHES = 1 << 30  # bytes
COMPILE = "import sys; from relaxlite.cli import main; sys.exit(main(sys.argv[1:]))"
MAX_READS = 400


class BenchmarkError(RelaxliteError):
    """There is nothing to measure."""


@dataclass(frozen=True, slots=True)
class Options:
    """`pythons`: interpreters of peers that do not live in this one. `turn`: seconds of a case. `limit`: seconds of a
    process, after which it is ended."""

    threads: int
    processes: int
    turn: float
    limit: float
    is_quick: bool = False
    pythons: Mapping[str, str] = field(default_factory=dict)
    compile_options: Sequence[str] = ()


@dataclass(slots=True)
class Measured:
    """One peer on one model: the answers of its processes (worker.py), or why there are none."""

    version: str | None = None
    problem: str | None = None
    is_absent: bool = False
    way: str = ""  # that of its class's `fallback`, where it ran in that
    way_problem: str = ""  # and why
    answers: list[dict[str, Any]] = field(default_factory=list)

    def speeds(self, case: Case) -> list[float]:
        """Tokens per second: the median of each process."""
        times = [answer["seconds"].get(case.label) for answer in self.answers]
        return [case.tokens / statistics.median(seconds) for seconds in times if seconds]

    def speed(self, case: Case) -> float | None:
        return _median(self.speeds(case))

    def median(self, *keys: str) -> float | None:
        """Of a figure of each answer, such as "memory", "single"."""
        found: list[Any] = list(self.answers)
        for key in keys:
            found = [each[key] for each in found]
        return _median([float(value) for value in found if value is not None])

    def fact(self, name: str) -> Any:
        return self.answers[0]["facts"].get(name) if self.answers else None

    @property
    def problems(self) -> dict[str, str]:
        """Of cases, each once."""
        found: dict[str, str] = {}
        for answer in self.answers:
            found |= answer["problems"]
        return found

    @property
    def logits(self) -> Array | None:
        """float32 [vocab], of the first process."""
        if not self.answers:
            return None
        return np.frombuffer(base64.b64decode(self.answers[0]["logits"]), "<f4")

    def json(self) -> dict[str, Any]:
        kept = [{key: value for key, value in answer.items() if key != "logits"} for answer in self.answers]
        about = {"version": self.version, "problem": self.problem, "way": self.way, "way_problem": self.way_problem}
        return about | {"processes": kept}


@dataclass(slots=True)
class ModelResult:
    """`reads`: bytes per second of plain reads in each round, by threads and bytes."""

    model: Model
    cases: Sequence[Case]
    threads: int
    artifact_bytes: int | None = None
    compile_seconds: float | None = None
    peers: dict[str, Measured] = field(default_factory=dict)
    reads: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def bandwidth(self, threads: int, nbytes: int) -> float | None:
        return _median(self.reads.get((threads, nbytes), []))

    def json(self) -> dict[str, Any]:
        return {
            "model": self.model.json(),
            "cases": [asdict(case) | {"label": case.label, "tokens": case.tokens} for case in self.cases],
            "artifact_bytes": self.artifact_bytes,
            "compile_seconds": self.compile_seconds,
            "reads": [{"threads": t, "bytes": n, "rates": rates} for (t, n), rates in self.reads.items()],
            "peers": {name: peer.json() for name, peer in self.peers.items()},
        }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def compile_artifact(model: Model, folder: Path, options: Sequence[str], peer: str = "relaxlite") -> tuple[Path, float]:
    """What `relaxlite compile` writes, and how long it takes. BenchmarkError says what it complained of."""
    path = folder / f"{model.name}-{peer}.rlx"
    options = [*options, *peer_class(peer).compile_options]
    start = time.perf_counter()
    words = ["compile", str(model.path), "-o", str(path), *options]
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *words], env=_environment(None), stdin=subprocess.DEVNULL, capture_output=True
    )
    if done.returncode:
        raise BenchmarkError(f"cannot compile {model.path.name}: {_last_lines(done.stderr)}")
    return path, time.perf_counter() - start


def measure(
    result: ModelResult, names: Sequence[str], artifacts: Mapping[str, Path], options: Options, bar: tqdm[Any]
) -> None:
    """All processes of all peers on a model; `artifacts` of those that read a compiled one, by their names."""
    result.peers = {name: Measured() for name in names}
    tokens = sequences_of(result)
    for number in range(options.processes):
        _measure_reads(result, options)
        turn = number % max(len(names), 1)
        for name in [*names[turn:], *names[:turn]]:  # nobody always follows the same other one
            peer = result.peers[name]
            if peer.problem is None:
                bar.set_postfix_str(f"{result.model.name}, {name}")
                path = artifacts[name] if peer_class(name).reads_artifact else result.model.path
                job: dict[str, Any] = {"peer": name, "path": str(path), "threads": options.threads, "tokens": tokens}
                job |= {"turn": options.turn, "compared": COMPARED, "cases": [asdict(case) for case in result.cases]}
                _record(peer, _ask_either_way(peer, job, options))
            bar.update()


def sequences_of(result: ModelResult) -> list[list[int]]:
    """Random tokens for as many sequences as any case has."""
    count = max((case.sequences for case in result.cases), default=1)
    length = max([COMPARED, *(case.context for case in result.cases)])
    found: list[list[int]] = np.random.default_rng(20).integers(3, result.model.vocab, (count, length)).tolist()
    return found


def _record(peer: Measured, found: dict[str, Any]) -> None:
    peer.version = found.get("version", peer.version)
    peer.problem = found.get("absent") or found.get("failed")
    peer.is_absent = "absent" in found
    if peer.problem is None:
        peer.answers.append(found)


def _ask_either_way(peer: Measured, job: dict[str, Any], options: Options) -> dict[str, Any]:
    """The answer, in the peer's other way if a signal has ended its process in the usual one."""
    found = _ask(job | {"is_fallback": bool(peer.way)}, options)
    other = peer_class(job["peer"]).fallback
    if found.get("signal") and other and not peer.way and not peer.answers:
        peer.way, peer.way_problem = other, found["failed"]
        found = _ask(job | {"is_fallback": True}, options)
    return found


def _ask(job: dict[str, Any], options: Options) -> dict[str, Any]:
    """The answer of a new process; {"failed": ...} where it has none."""
    python = options.pythons.get(job["peer"], sys.executable)
    try:
        done = subprocess.run(
            [python, "-m", "bench.llm.worker"],
            input=json.dumps(job).encode(),
            env=_environment(options.threads),
            capture_output=True,
            timeout=options.limit,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"its process had not ended after {options.limit:.0f} s"}
    except OSError as error:
        return {"absent": f"cannot run {python!r}: {error.strerror}"}
    if done.returncode:
        said = _last_lines(done.stderr)
        how = f"exit code {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
        return {
            "failed": f"its process ended with {how}{f': {said}' if said else ''}",
            "signal": max(-done.returncode, 0),
        }
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _environment(threads: int | None) -> dict[str, str]:
    """This one, with our packages in front, and the variables that pools of threads read."""
    before = os.environ.get("PYTHONPATH")
    variables = dict.fromkeys(THREAD_VARIABLES, str(threads)) if threads else {}
    return {**os.environ, **variables, "PYTHONPATH": os.pathsep.join([str(ROOT), *([before] if before else [])])}


def _last_lines(text: bytes) -> str:
    return " ".join(text.decode("utf-8", "replace").split("\n")[-4:]).strip()[-300:]


def _measure_reads(result: ModelResult, options: Options) -> None:
    """How fast this machine reads as many bytes as the weights that a token needs, and more than caches hold."""
    sizes = [result.model.read_bytes, *([] if options.is_quick else [BEYOND_CACHES])]
    for threads in sorted({1, options.threads}):
        worker = Worker("machine", threads)
        try:
            worker.start()
            worker.open(cpu_cases.Workload("read", "read", Path(), (), ("machine",), threads))
            for size in sizes:
                worker.prepare(cpu_cases.Case("read", (), cpu_cases.Work("read", size)))
                seconds = statistics.median(worker.time(min(options.turn, 0.5), MAX_READS))
                result.reads.setdefault((threads, size), []).append(size / seconds)
        finally:
            worker.close()
