"""Schedule: a tensor program and the sequence of primitives applied to it.

    s = Schedule(program)
    s.split("j", 64)                  # ("jo", "ji", "jt")
    s.reorder("jo", "i", "ji")
    s.vectorize("ji")
    s.program()                       # the new program
    print(s)                          # the steps, valid Python

Loops and buffers are identified by unique names: the first copy of a loop keeps its name, further copies get a number
(`i_1`). A primitive that cannot be proven legal raises ScheduleError and changes nothing. The functions of this package
document each primitive and its conditions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from relaxlite.errors import ScheduleError
from relaxlite.ir.expr import NO_ATTRS
from relaxlite.ir.program import Allocate, Barrier, Buffer, For, MemoryScope, Stmt, TensorProgram
from relaxlite.ir.program_printer import print_program
from relaxlite.ir.program_visitor import Substitute, stores, walk_stmts
from relaxlite.passes.schedule.primitives import layout, loops, staging, tensorize
from relaxlite.passes.schedule.primitives.layout import Term
from relaxlite.passes.schedule.primitives.trace import Step, parse_step, with_steps
from relaxlite.passes.schedule.primitives.tree import (
    Named,
    all_loops,
    find_allocation,
    find_loop,
    path_to,
    with_unique_names,
)


class Schedule:
    """A program under transformation: `original` is the initial program, `steps` the primitives applied so far.

    Raises ScheduleError for a program with barriers.
    """

    def __init__(self, program: TensorProgram) -> None:
        if any(isinstance(stmt, Barrier) for stmt in walk_stmts(program.body)):
            raise ScheduleError("a program with barriers has been scheduled for a GPU; schedule it before they are set")
        body, _ = with_unique_names(None, Substitute(fresh=True).stmt(program.body), program.params)
        self.original = program
        self._program = replace(program, body=body)
        self._packings: list[tuple[str, TensorProgram]] = []
        self.steps: list[Step] = []

    # Inspection

    def program(self) -> TensorProgram:
        """The transformed program; its attribute `schedule` lists the steps."""
        return replace(self._program, attrs=with_steps(self._program.attrs, self.steps))

    @property
    def packings(self) -> tuple[tuple[str, TensorProgram], ...]:
        """(name, program that packs an array into the new layout) of each packed parameter."""
        return tuple(self._packings)

    def loops(self, buffer: str | None = None) -> tuple[str, ...]:
        """The names of all loops, or of those around the first store to `buffer`; outer before inner."""
        body = self._program.body
        if buffer is None:
            return tuple(loop.var.name for loop in all_loops(body))
        for store in stores(body):
            if store.buffer.name == buffer:
                return tuple(stmt.var.name for stmt in path_to(body, store) if isinstance(stmt, For))
        raise ScheduleError(f"nothing is stored to a buffer {buffer!r}")

    def loops_in(self, loop: str) -> tuple[str, ...]:
        """The names of the loops inside of a loop, outer before inner."""
        return tuple(inner.var.name for inner in all_loops(self._loop(loop).body))

    def copies(self, loop: str) -> tuple[str, ...]:
        """The names of a loop and its copies: i, i_1, i_2."""
        return tuple(name for name in self.loops() if re.fullmatch(rf"{re.escape(loop)}(_\d+)?", name))

    def buffers_in(self, loop: str) -> tuple[str, ...]:
        """The names of the buffers allocated inside of a loop."""
        inside = walk_stmts(self._loop(loop).body)
        return tuple(stmt.buffer.name for stmt in inside if isinstance(stmt, Allocate))

    def __str__(self) -> str:
        """The steps as Python, one method call per line."""
        return "\n".join(["s = Schedule(program)", *(f"s.{step}" for step in self.steps)])

    def show(self) -> str:
        """The steps, followed by the transformed program."""
        return f"{self}\n\n{print_program('program', replace(self._program, attrs=NO_ATTRS))}"

    # Loops

    def split(self, loop: str, factor: int, *, tail: str = "cut") -> tuple[str, ...]:
        """Split a loop. Returns the names (outer, inner), or (outer, inner, tail) if the tail is a separate loop."""
        body, variables = loops.split(self._body, self._loop(loop), factor, tail=tail)
        options = () if tail == "cut" else (("tail", tail),)
        return self._record(Step("split", (loop, factor), options), body, *variables)

    def fuse(self, outer: str, inner: str) -> str:
        """Fuse two perfectly nested loops. Returns the name of the fused loop."""
        body, variable = loops.fuse(self._body, self._loop(outer), self._loop(inner))
        return self._record(Step("fuse", (outer, inner)), body, variable)[0]

    def reorder(self, *names: str) -> None:
        """Reorder loops of a perfect nest, outermost first."""
        self._record(Step("reorder", names), loops.reorder(self._body, [self._loop(name) for name in names]))

    def distribute(self, loop: str) -> tuple[str, ...]:
        """Distribute a loop over its statements. Returns the names of the loops."""
        body, parts = loops.distribute(self._body, self._loop(loop))
        return self._record(Step("distribute", (loop,)), body, *parts)

    def predicate(self, loop: str, multiple: int) -> None:
        """Round the extent of a loop up to a multiple, with a condition for iterations beyond the original extent."""
        body, _ = loops.predicate(self._body, self._loop(loop), multiple)
        self._record(Step("predicate", (loop, multiple)), body)

    def specialize(self, loop: str, *sizes: int) -> tuple[str, ...]:
        """Specialize a loop for constant extents; the loop stays for other extents.

        Returns the names of the specialized loops.
        """
        body, specialized = loops.specialize(self._body, self._loop(loop), sizes)
        return self._record(Step("specialize", (loop, *sizes)), body, *specialized)

    def unroll(self, loop: str) -> None:
        """Unroll a loop completely."""
        self._record(Step("unroll", (loop,)), loops.unroll(self._body, self._loop(loop)))

    def vectorize(self, loop: str) -> None:
        """Vectorize a loop, one lane per iteration."""
        self._record(Step("vectorize", (loop,)), loops.vectorize(self._body, self._loop(loop)))

    def parallelize(self, loop: str) -> None:
        """Distribute the iterations of a loop over threads."""
        self._record(Step("parallelize", (loop,)), loops.parallelize(self._body, self._loop(loop)))

    def bind(self, loop: str, axis: str) -> None:
        """Bind a loop to an axis of a GPU: block_x ... thread_z."""
        self._record(Step("bind", (loop, axis)), loops.bind(self._body, self._loop(loop), axis))

    # Buffers

    def stage(self, buffer: str, loop: str, *, scope: MemoryScope = "local", order: Sequence[int] | None = None) -> str:
        """Stage the part of a buffer that each iteration accesses in a copy. Returns the name of the copy."""
        options: list[tuple[str, Any]] = [] if scope == "local" else [("scope", scope)]
        options += [] if order is None else [("order", tuple(order))]
        body, copy = staging.stage(self._body, self._buffer(buffer), self._loop(loop), scope=scope, order=order)
        return self._record(Step("stage", (buffer, loop), tuple(options)), body, copy)[0]

    def compute_at(self, buffer: str, loop: str) -> str:
        """Compute a buffer inside of the loop that reads it. Returns the name of the buffer for one iteration."""
        body, part = staging.compute_at(self._body, find_allocation(self._body, buffer), self._loop(loop))
        return self._record(Step("compute_at", (buffer, loop)), body, part)[0]

    def decompose_reduction(self, buffer: str, *names: str) -> str:
        """Move loops inside of a reduction block. Returns the name of the widened buffer."""
        around = [self._loop(name) for name in names]
        body, wide = staging.decompose_reduction(self._body, find_allocation(self._body, buffer), around)
        return self._record(Step("decompose_reduction", (buffer, *names)), body, wide)[0]

    def split_reduction(self, loop: str, lanes: int, accumulators: int = 1) -> None:
        """Split a reduction into partial results in `accumulators` vectors of `lanes` elements."""
        body = staging.split_reduction(self._body, self._loop(loop), lanes, accumulators)
        self._record(Step("split_reduction", (loop, lanes, accumulators)), body)

    def pack(self, buffer: str, dims: Sequence[Term]) -> None:
        """Change the layout of a buffer; packing a parameter changes the signature (`packings`)."""
        self._program, packing = layout.pack(self._program, buffer, dims)
        self.steps.append(Step("pack", (buffer, tuple(dims))))
        if packing is not None:
            self._packings.append((buffer, packing))

    def tensorize(self, loop: str, intrinsic: str) -> None:
        """Replace the multiply-adds of a loop by an intrinsic of ir/intrinsics.py."""
        self._record(Step("tensorize", (loop, intrinsic)), tensorize.tensorize(self._body, self._loop(loop), intrinsic))

    # Traces

    @staticmethod
    def replay(program: TensorProgram, steps: Iterable[str | Step]) -> Schedule:
        """Apply recorded steps to a program: `Step`s, or lines of text (`program.attrs["schedule"]`, `str(schedule)`).

        Raises ScheduleError for a step that is not a primitive or does not apply.
        """
        schedule = Schedule(program)
        for step in steps:
            if isinstance(step, str):
                line = step.strip()
                if not line or line.startswith("s = "):
                    continue
                step = parse_step(line.removeprefix("s."))
            if step.name not in PRIMITIVES:
                raise ScheduleError(f"{step.name} is no primitive; there are {', '.join(PRIMITIVES)}")
            getattr(schedule, step.name)(*step.args, **dict(step.options))
        return schedule

    # Implementation

    @property
    def _body(self) -> Stmt:
        return self._program.body

    def _loop(self, name: str) -> For:
        return find_loop(self._body, name)

    def _buffer(self, name: str) -> Buffer:
        """Find a parameter or allocated buffer by name."""
        buffers = [*self._program.params, *(s.buffer for s in walk_stmts(self._body) if isinstance(s, Allocate))]
        for buffer in buffers:
            if buffer.name == name:
                return buffer
        raise ScheduleError(f"there is no buffer {name!r}; there are {', '.join(b.name for b in buffers)}")

    def _record(self, step: Step, body: Stmt, *created: Named) -> tuple[str, ...]:
        """Record a step and its new body. Returns the names of the new loops and buffers."""
        body, names = with_unique_names(self._body, body, self._program.params, created)
        self._program = replace(self._program, body=body)
        self.steps.append(replace(step, results=names))
        return names


PRIMITIVES = (
    "split", "fuse", "reorder", "distribute", "predicate", "specialize", "unroll", "vectorize", "parallelize", "bind",
    "stage", "compute_at", "decompose_reduction", "split_reduction", "pack", "tensorize",
)  # fmt: skip
