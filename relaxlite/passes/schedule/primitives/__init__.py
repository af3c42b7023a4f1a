"""Schedule primitives: verified transformations of a program's loops that preserve its results.

`Schedule` applies them by name and keeps a trace. Under it, one file per kind:

    loops.py        split, fuse, reorder, distribute, predicate, specialize; unroll, vectorize, parallelize, bind
    staging.py      stage, compute_at, decompose_reduction, split_reduction
    layout.py       pack
    tensorize.py    tensorize
    dependence.py   dependence analysis between iterations, for the legality of loop transformations
    region.py       access regions of buffers, for the legality of staging
    trace.py        schedule steps as text
    tree.py         lookup of loops and buffers by name
"""

from __future__ import annotations

from relaxlite.passes.schedule.primitives.schedule import PRIMITIVES, Schedule
from relaxlite.passes.schedule.primitives.trace import Step, steps_of, with_steps

__all__ = ["PRIMITIVES", "Schedule", "Step", "steps_of", "with_steps"]
