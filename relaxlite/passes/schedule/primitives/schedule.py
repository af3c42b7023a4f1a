"""Schedule: a tensor program and the primitives applied to it, one after another.

    s = Schedule(program)
    s.split("j", 64)                  # ("jo", "ji", "jt")
    s.reorder("jo", "i", "ji")
    s.vectorize("ji")
    s.program()                       # the new program
    print(s)                          # the steps, valid Python

Loops and buffers go by their names. Every loop has a name of its own: of copies, the first keeps the name and the
others get a number (`i_1`). A primitive that cannot be proven to keep the program's meaning raises ScheduleError and
changes nothing; what each does, and when, stands at its function in this package.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from relaxlite.errors import ScheduleError
from relaxlite.ir.expr import NO_ATTRS
from relaxlite.ir.program import Allocate, Barrier, Buffer, For, Scope, Stmt, TensorProgram
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
    """A program under the hands of a scheduler: `given` is how it was, `steps` is what has been done."""

    def __init__(self, program: TensorProgram) -> None:
        if any(isinstance(stmt, Barrier) for stmt in walk_stmts(program.body)):
            raise ScheduleError("a program with barriers has been scheduled for a GPU; schedule it before they are set")
        body, _ = with_unique_names(None, Substitute(fresh=True).stmt(program.body), program.params)
        self.given = program
        self._program = replace(program, body=body)
        self._packings: list[tuple[str, TensorProgram]] = []
        self.steps: list[Step] = []

    # What there is

    def program(self) -> TensorProgram:
        """The program as it is now; its attribute `schedule` lists the steps."""
        return replace(self._program, attrs=with_steps(self._program.attrs, self.steps))

    @property
    def packings(self) -> tuple[tuple[str, TensorProgram], ...]:
        """For each parameter that was packed: its name, and the program that brings an array into the new layout."""
        return tuple(self._packings)

    def loops(self, buffer: str | None = None) -> tuple[str, ...]:
        """The names of all loops, outer before inner; or of those round the first store to a buffer."""
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
        """The names of all loops that are this one or copies of it: i, i_1, i_2."""
        return tuple(name for name in self.loops() if re.fullmatch(rf"{re.escape(loop)}(_\d+)?", name))

    def buffers_in(self, loop: str) -> tuple[str, ...]:
        """The names of the buffers that are allocated inside of a loop."""
        inside = walk_stmts(self._loop(loop).body)
        return tuple(stmt.buffer.name for stmt in inside if isinstance(stmt, Allocate))

    def __str__(self) -> str:
        """The steps, one call of a method per line."""
        return "\n".join(["s = Schedule(program)", *(f"s.{step}" for step in self.steps)])

    def show(self) -> str:
        """The steps above the program that they made."""
        return f"{self}\n\n{print_program('program', replace(self._program, attrs=NO_ATTRS))}"

    # Loops

    def split(self, loop: str, factor: int, *, tail: str = "cut") -> tuple[str, ...]:
        """(outer, inner) or, with a tail that is cut off, (outer, inner, rest)."""
        body, variables = loops.split(self._body, self._loop(loop), factor, tail=tail)
        options = () if tail == "cut" else (("tail", tail),)
        return self._done(Step("split", (loop, factor), options), body, *variables)

    def fuse(self, outer: str, inner: str) -> str:
        """One loop over all iterations of two."""
        body, variable = loops.fuse(self._body, self._loop(outer), self._loop(inner))
        return self._done(Step("fuse", (outer, inner)), body, variable)[0]

    def reorder(self, *names: str) -> None:
        """The loops of a nest in this order, outermost first."""
        self._done(Step("reorder", names), loops.reorder(self._body, [self._loop(name) for name in names]))

    def distribute(self, loop: str) -> tuple[str, ...]:
        """The loops over the single statements."""
        body, parts = loops.distribute(self._body, self._loop(loop))
        return self._done(Step("distribute", (loop,)), body, *parts)

    def predicate(self, loop: str, multiple: int) -> None:
        """The extent rounded up to a multiple, and a condition for what lies beyond."""
        body, _ = loops.predicate(self._body, self._loop(loop), multiple)
        self._done(Step("predicate", (loop, multiple)), body)

    def specialize(self, loop: str, *sizes: int) -> tuple[str, ...]:
        """The loops of known extents, one per size; the loop itself stays for all other extents."""
        body, made = loops.specialize(self._body, self._loop(loop), sizes)
        return self._done(Step("specialize", (loop, *sizes)), body, *made)

    def unroll(self, loop: str) -> None:
        self._done(Step("unroll", (loop,)), loops.unroll(self._body, self._loop(loop)))

    def vectorize(self, loop: str) -> None:
        self._done(Step("vectorize", (loop,)), loops.vectorize(self._body, self._loop(loop)))

    def parallelize(self, loop: str) -> None:
        self._done(Step("parallelize", (loop,)), loops.parallelize(self._body, self._loop(loop)))

    def bind(self, loop: str, axis: str) -> None:
        """The loop on an axis of a GPU: block_x ... thread_z."""
        self._done(Step("bind", (loop, axis)), loops.bind(self._body, self._loop(loop), axis))

    # Buffers

    def stage(self, buffer: str, loop: str, *, scope: Scope = "local", order: Sequence[int] | None = None) -> str:
        """The name of the copy that each iteration of the loop works on."""
        options: list[tuple[str, Any]] = [] if scope == "local" else [("scope", scope)]
        options += [] if order is None else [("order", tuple(order))]
        body, copy = staging.stage(self._body, self._buffer(buffer), self._loop(loop), scope=scope, order=order)
        return self._done(Step("stage", (buffer, loop), tuple(options)), body, copy)[0]

    def compute_at(self, buffer: str, loop: str) -> str:
        """The name of the buffer that holds one iteration's part."""
        body, part = staging.compute_at(self._body, find_allocation(self._body, buffer), self._loop(loop))
        return self._done(Step("compute_at", (buffer, loop)), body, part)[0]

    def decompose_reduction(self, buffer: str, *names: str) -> str:
        """The name of the widened buffer."""
        around = [self._loop(name) for name in names]
        body, wide = staging.decompose_reduction(self._body, find_allocation(self._body, buffer), around)
        return self._done(Step("decompose_reduction", (buffer, *names)), body, wide)[0]

    def split_reduction(self, loop: str, lanes: int, accumulators: int = 1) -> None:
        """Partial results in `accumulators` vectors of `lanes`."""
        body = staging.split_reduction(self._body, self._loop(loop), lanes, accumulators)
        self._done(Step("split_reduction", (loop, lanes, accumulators)), body)

    def pack(self, buffer: str, dims: Sequence[Term]) -> None:
        """The buffer in another layout; that of a parameter changes the signature (`packings`)."""
        self._program, packing = layout.pack(self._program, buffer, dims)
        self.steps.append(Step("pack", (buffer, tuple(dims))))
        if packing is not None:
            self._packings.append((buffer, packing))

    def tensorize(self, loop: str, intrinsic: str) -> None:
        """The products that the loop adds up, by one of ir/intrinsics.py."""
        self._done(Step("tensorize", (loop, intrinsic)), tensorize.tensorize(self._body, self._loop(loop), intrinsic))

    # Traces

    @staticmethod
    def replay(program: TensorProgram, steps: Iterable[str | Step]) -> Schedule:
        """A schedule made of steps, as `steps` holds them or as text (`program.attrs["schedule"]`); lines that begin
        with `s = ` are skipped, and a leading `s.` is."""
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

    # How

    @property
    def _body(self) -> Stmt:
        return self._program.body

    def _loop(self, name: str) -> For:
        return find_loop(self._body, name)

    def _buffer(self, name: str) -> Buffer:
        """The parameter or allocated buffer of this name."""
        found = [*self._program.params, *(s.buffer for s in walk_stmts(self._body) if isinstance(s, Allocate))]
        for buffer in found:
            if buffer.name == name:
                return buffer
        raise ScheduleError(f"there is no buffer {name!r}; there are {', '.join(b.name for b in found)}")

    def _done(self, step: Step, body: Stmt, *made: Named) -> tuple[str, ...]:
        """Keep the new body and the step; gives the names of what was made."""
        body, names = with_unique_names(self._body, body, self._program.params, made)
        self._program = replace(self._program, body=body)
        self.steps.append(replace(step, results=names))
        return names


PRIMITIVES = (
    "split", "fuse", "reorder", "distribute", "predicate", "specialize", "unroll", "vectorize", "parallelize", "bind",
    "stage", "compute_at", "decompose_reduction", "split_reduction", "pack", "tensorize",
)  # fmt: skip
