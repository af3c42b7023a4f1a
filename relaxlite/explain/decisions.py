"""Decisions in an order for reading: those that differ in numbers only stand together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from relaxlite.passes.context import Decision
from relaxlite.records import dataclass

_NUMBER = re.compile(r"\d+")


@dataclass(slots=True)
class DecisionGroup:
    """Decisions of one step for one reason, up to numbers in it: what a repeated layer brings over and over."""

    step: str
    taken: bool
    reason: str  # of the first
    decisions: list[Decision]


def grouped(decisions: Iterable[Decision]) -> list[DecisionGroup]:
    """In the order of the steps; within a step those against something first, and the most frequent ones first."""
    groups: dict[tuple[str, bool, str], DecisionGroup] = {}
    steps: dict[str, int] = {}
    for decision in decisions:
        steps.setdefault(decision.step, len(steps))
        key = (decision.step, decision.taken, pattern_of(decision))
        if key not in groups:
            groups[key] = DecisionGroup(decision.step, decision.taken, decision.reason, [])
        groups[key].decisions.append(decision)
    return sorted(groups.values(), key=lambda g: (steps[g.step], g.taken, -len(g.decisions)))


def pattern_of(decision: Decision) -> str:
    """The reason with "#" for numbers, and "..." for names of values: those of the subject ("x into y", "x as a norm"),
    and words with a slash, or with an underscore before a number."""
    subject = set(decision.subject.partition(" as ")[0].split())
    words = ("..." if word in subject else _NUMBER.sub("#", word) for word in decision.reason.split())
    return " ".join("..." if "/" in word or "_#" in word else word for word in words)


def about(decisions: Iterable[Decision], kernel_of: Mapping[str, int]) -> dict[int, list[Decision]]:
    """The decisions that name a value which a kernel computes, by the kernel's number."""
    result: dict[int, list[Decision]] = {}
    for decision in decisions:
        for kernel in dict.fromkeys(kernel_of[w] for w in decision.subject.split() if w in kernel_of):
            result.setdefault(kernel, []).append(decision)
    return result
