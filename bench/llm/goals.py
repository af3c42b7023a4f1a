"""What is to be reached, as ratios of medians within one run, and whether it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.cpu.goals import Goal, Ratio, least
from bench.llm.cases import Case
from bench.llm.measure import Measured, ModelResult
from bench.llm.peers import Array

OURS = "relaxlite"
OUR_WAYS = {OURS: "", "relaxlite-int8": " (8 bits of activations)"}
LLAMA = {"llama.cpp": "without flash attention", "llama.cpp-flash": "with flash attention"}
LOAD_SECONDS = 1.0
MEMORY_OVER = 0.1  # of weights and cache
MB = 1e6


@dataclass(frozen=True, slots=True)
class Wanted:
    """Times llama.cpp's speed, and the share of plain reads."""

    generate: float
    prompt: float
    prompts: Sequence[int]
    share: float | None = None


WANTED = {
    "llama-1.1b": Wanted(1.3, 2.0, (128, 512), 0.85),
    "smollm2": Wanted(1.1, 1.5, (32, 128, 512)),
}


def better_llama(result: ModelResult, case: Case) -> tuple[float, str] | None:
    """Tokens per second of llama.cpp, and which of its ways that was."""
    peers = {name: result.peers[name] for name in LLAMA if name in result.peers}
    found = [(peer.speed(case), " and ".join(filter(None, (LLAMA[name], peer.way)))) for name, peer in peers.items()]
    return max(((speed, way) for speed, way in found if speed), default=None)


def share_of_reads(result: ModelResult, peer: Measured, case: Case) -> float | None:
    """Bytes of weights read per second in generation, against plain reads of as many bytes by as many threads."""
    speed, limit = peer.speed(case), result.bandwidth(result.threads, result.model.read_bytes)
    return speed / case.sequences * result.model.read_bytes / limit if speed and limit else None


def allowed_bytes(result: ModelResult, peer: Measured) -> float:
    """Weights, and keys and values of the longest of the cases with one sequence, and a tenth."""
    tokens = max((case.length for case in result.cases if case.sequences == 1), default=0)
    cache = result.model.cache_bytes(tokens, str(peer.fact("cache_dtype")))
    return (1 + MEMORY_OVER) * (result.model.weight_bytes + cache)


def distance(logits: Array, reference: Array) -> float:
    """The norm of the difference against the reference's, both around their mean; infinite for a NaN."""
    a, b = (x.astype(np.float64) - x.mean(dtype=np.float64) for x in (logits, reference))
    found = float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30))
    return found if found == found else np.inf


def check_goals(results: Iterable[ModelResult]) -> list[Goal]:
    return [goal for result in results for goal in _goals_of(result)]


def _goals_of(result: ModelResult) -> list[Goal]:
    name, wanted, ours = result.model.name, WANTED.get(result.model.name), result.peers.get(OURS)
    goals = []
    if wanted is not None:
        generate = [case for case in result.cases if case.group == "generate"]
        prompts = [case for case in result.cases if case.group == "prompt" and case.context in wanted.prompts]
        sizes = ", ".join(map(str, [case.context for case in prompts] or wanted.prompts))
        for own in [way for way in OUR_WAYS if way in result.peers or way == OURS]:
            said = name + OUR_WAYS[own]
            goals += [
                _faster(f"{said}: generation {wanted.generate}x llama.cpp", result, own, generate, wanted.generate),
                _faster(
                    f"{said}: prompts of {sizes} tokens {wanted.prompt}x llama.cpp", result, own, prompts, wanted.prompt
                ),
            ]
            if wanted.share is not None:
                text = f"{said}: generation reads weights at {wanted.share:.0%} of the plain read bandwidth"
                peer = result.peers.get(own)
                shares = [(share_of_reads(result, peer, case), case) for case in generate if peer]
                ratios = [Ratio(value, case.label) for value, case in shares if value is not None]
                goals.append(least(text, ratios, wanted.share, "%"))
    return [*goals, _load_goal(name, ours), _memory_goal(name, result, ours)]


def _faster(text: str, result: ModelResult, ours: str, cases: Sequence[Case], wanted: float) -> Goal:
    """No verdict where it seems to hold, but llama.cpp could not run in its best way."""
    ratios = []
    for case in cases:
        own = result.peers[ours].speed(case) if ours in result.peers else None
        theirs = better_llama(result, case)
        if own and theirs:
            ratios.append(Ratio(own / theirs[0], f"{case.label}, llama.cpp {theirs[1]}"))
    goal = least(text, ratios, wanted)
    if goal.holds and any(result.peers[name].way for name in LLAMA if name in result.peers):
        return Goal(text, f"{goal.measured}, but llama.cpp is not at its best here", None)
    return goal


def _load_goal(name: str, ours: Measured | None) -> Goal:
    text = f"{name}: loads in {LOAD_SECONDS:.0f} s"
    seconds = ours.median("load_seconds") if ours else None
    if seconds is None or ours is None:
        return Goal(text, "not measured", None)
    first = ours.median("first_seconds") or 0.0
    return Goal(text, f"{seconds:.2f} s, {first:.2f} s with the first token", seconds < LOAD_SECONDS)


def _memory_goal(name: str, result: ModelResult, ours: Measured | None) -> Goal:
    text = f"{name}: peak memory of weights, keys and values, and {MEMORY_OVER:.0%}"
    peak = ours.median("memory", "single") if ours else None
    if peak is None or ours is None or not any(case.sequences == 1 for case in result.cases):
        return Goal(text, "not measured", None)
    allowed, before = allowed_bytes(result, ours), ours.median("memory", "before") or 0.0
    shown = f"{peak / MB:.0f} MB, {allowed / MB:.0f} allowed ({before / MB:.0f} before the model is opened)"
    return Goal(text, shown, peak <= allowed)
