"""Groups of decisions with the same reason up to numbers and names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from relaxlite.passes.context import Decision
from relaxlite.records import dataclass

_NUMBER = re.compile(r"\d+")


@dataclass(slots=True)
class DecisionGroup:
    """Decisions of one pass with one reason up to numbers, as repeated layers cause them."""

    step: str
    taken: bool
    reason: str  # of the first decision
    decisions: list[Decision]


def group_decisions(decisions: Iterable[Decision]) -> list[DecisionGroup]:
    """Group decisions by pass and reason, in the order of the passes.

    Within a pass, negative decisions come first, then frequent ones.
    """
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
    """Pattern of a decision's reason: "#" for numbers, and "..." for names of values.

    Names are the words of the subject ("x into y", "x as a norm"), and words with a slash, or with an underscore before
    a number.
    """
    subject = set(decision.subject.partition(" as ")[0].split())
    words = ("..." if word in subject else _NUMBER.sub("#", word) for word in decision.reason.split())
    return " ".join("..." if "/" in word or "_#" in word else word for word in words)


def decisions_by_kernel(decisions: Iterable[Decision], kernel_of: Mapping[str, int]) -> dict[int, list[Decision]]:
    """Decisions whose subject names a value of a kernel, by the number of the kernel."""
    result: dict[int, list[Decision]] = {}
    for decision in decisions:
        for kernel in dict.fromkeys(kernel_of[w] for w in decision.subject.split() if w in kernel_of):
            result.setdefault(kernel, []).append(decision)
    return result
