"""Schedule primitives: rewrites of a program's loops that cannot change what it computes.

`Schedule` applies them by name and keeps a trace. Under it, one file per kind:

    loops.py        split, fuse, reorder, distribute, predicate, specialize; unroll, vectorize, parallelize, bind
    staging.py      stage, compute_at, decompose_reduction, split_reduction
    layout.py       pack
    tensorize.py    tensorize
    dependence.py   which iterations depend on each other, the question behind most of the checks
    region.py       which part of a buffer a statement touches, the question behind the others
    trace.py        steps as text
    tree.py         loops and buffers by name
"""

from __future__ import annotations

from relaxlite.passes.schedule.primitives.schedule import PRIMITIVES, Schedule
from relaxlite.passes.schedule.primitives.trace import Step, steps_of, with_steps

__all__ = ["PRIMITIVES", "Schedule", "Step", "steps_of", "with_steps"]
