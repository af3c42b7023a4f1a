"""Random pipelines: the passes of graphs in any order, any number of times; later ones in order, some left out."""

from __future__ import annotations

from collections.abc import Sequence

from relaxlite.passes.manager import Pass
from relaxlite.passes.pipeline import PASSES, default_pipeline
from tests.support.choices import Rolled

NEEDED = frozenset(("decompose", "legalize", "fuse_programs", "drop_unused", "lower_dps", "lower_shapes"))
AGAIN = frozenset(("drop_unused", "eliminate_dead_again", "schedule", "estimate_costs"))  # may run twice in a row


def random_pipeline(roll: Rolled) -> list[str]:
    """Names of passes. Ops that are made of others are taken apart last, before everything becomes loops."""
    graph = [step.name for step in default_pipeline() if step.stage == "graph"]
    names = [roll.pick(graph) for _ in range(roll.whole(0, len(graph)))]
    if roll.chance(50):
        names = [name for name in graph if roll.chance(80)]
    names.append("decompose")
    for step in default_pipeline():
        if step.stage != "graph" and (step.name in NEEDED or roll.chance(80)):
            names += [step.name] * (2 if step.name in AGAIN and roll.chance(20) else 1)
    return names


def passes_of(names: Sequence[str]) -> list[Pass]:
    return [PASSES[name] for name in names]


def default_names() -> list[str]:
    return [step.name for step in default_pipeline()]
