"""A peer's process: `python -m bench.llm.worker` reads one job from its input, and writes one answer.

It may run in an interpreter that has the peer's library and NumPy alone, so what it imports at the top is no more than
that. Job and answer are JSON:

    job      peer, threads, path, cases, tokens (of each sequence), turn (seconds), compared (tokens whose logits
             count), is_fallback (whether to run in the peer's other way)
    answer   version, import_seconds, load_seconds, first_seconds (loading and one token), memory (bytes: before the
             model is opened, and the peak after it, after single sequences, in the end), facts, seconds (of each
             run, by label), problems (by label), logits (base64 of float32); or absent, or failed: why there is nothing
"""

from __future__ import annotations

import base64
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.llm.cases import Case
from bench.llm.peers import Peer, Unsupported
from bench.timing import settle, timed_runs

PEERS = {
    "relaxlite": "peers.Relaxlite",
    "relaxlite-int8": "peers.RelaxliteInt8",
    "llama.cpp": "llama_peer.LlamaCpp",
    "llama.cpp-flash": "llama_peer.LlamaCppFlash",
    "transformers": "transformers_peer.Transformers",
}
MAX_RUNS = 50


def peer_class(name: str) -> type[Peer]:
    module, _, kind = PEERS[name].partition(".")
    found: type[Peer] = getattr(importlib.import_module(f"bench.llm.{module}"), kind)
    return found


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """What became of a job, whatever the library does."""
    start = time.perf_counter()
    try:
        peer = peer_class(job["peer"])(job["threads"], is_fallback=job["is_fallback"])
        version = peer.version()
    except ImportError as error:
        return {"absent": str(error)}
    said = {"version": version, "import_seconds": time.perf_counter() - start}
    try:
        return said | _measured(peer, job)
    except Unsupported as error:
        return said | {"failed": str(error)}
    except Exception as error:  # of any library; the parent reports it
        return said | {"failed": shortened(error)}


def shortened(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= 300 else text[:300] + "..."


def _measured(peer: Peer, job: dict[str, Any]) -> dict[str, Any]:
    cases, tokens = [Case(**given) for given in job["cases"]], job["tokens"]
    single = [case for case in cases if case.sequences == 1]
    several = [case for case in cases if case.sequences > 1]
    memory = {"before": status_bytes("VmRSS")}
    start = time.perf_counter()
    peer.open(job["path"], 1, max([job["compared"], *(case.length for case in single)]))
    loaded = time.perf_counter()
    peer.start([tokens[0][:1]])
    first = time.perf_counter()
    memory["loaded"] = status_bytes("VmHWM")
    peer.start([tokens[0][: job["compared"]]])
    logits = peer.logits()
    seconds: dict[str, list[float]] = {}
    problems: dict[str, str] = {}
    _run_all(peer, single, job, seconds, problems)
    memory["single"] = status_bytes("VmHWM")
    if several:
        peer.make_room(max(case.sequences for case in several), max(case.length for case in several))
        _run_all(peer, several, job, seconds, problems)
    memory["all"] = status_bytes("VmHWM")
    return {
        "load_seconds": loaded - start,
        "first_seconds": first - start,
        "memory": memory,
        "facts": peer.facts(),
        "seconds": seconds,
        "problems": problems,
        "logits": base64.b64encode(logits.astype("<f4").tobytes()).decode(),
    }


def _run_all(
    peer: Peer, cases: list[Case], job: dict[str, Any], seconds: dict[str, list[float]], problems: dict[str, str]
) -> None:
    for case in cases:
        try:
            prompts = [tokens[: case.context] for tokens in job["tokens"][: case.sequences]]
            seconds[case.label] = _times(peer, case, prompts, job["turn"])
        except Exception as error:  # of any library; the parent reports it
            problems[case.label] = shortened(error)


def _times(peer: Peer, case: Case, prompts: list[list[int]], turn: float) -> list[float]:
    """Seconds of each run."""
    gc.collect()
    if not case.new:
        settle()
        return timed_runs(lambda: peer.start(prompts), turn, MAX_RUNS)
    after = peer.start(prompts)
    settle()
    return timed_runs(_reply(peer, after, case.new), turn, MAX_RUNS, reset=lambda: peer.rewind(case.context))


def _reply(peer: Peer, after: list[int], count: int) -> Callable[[], None]:
    def run() -> None:
        tokens = after
        for _ in range(count):
            tokens = peer.step(tokens)

    return run


def status_bytes(field: str) -> int | None:
    """A figure of /proc/self/status; None where there is none."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            found = next((line.split()[1] for line in file if line.startswith(f"{field}:")), None)
    except OSError:
        return None
    return None if found is None else int(found) << 10


def main() -> int:
    job = json.load(sys.stdin)
    sys.stdout.flush()
    out = os.dup(1)
    os.dup2(2, 1)  # libraries print; the answer is alone on standard output
    text = json.dumps(answer(job))
    with os.fdopen(out, "w", encoding="utf-8") as file:
        file.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
