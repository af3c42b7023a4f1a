"""Rules of launches (ir/launch.py): axes, scopes of buffers, barriers in uniform control flow, warp instructions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from relaxlite.gpus import GPUS, WARP
from relaxlite.ir.intrinsics import SHUFFLE_XOR
from relaxlite.ir.launch import BLOCK_AXES, THREAD_AXES
from relaxlite.ir.program import (
    AddressOf,
    Allocate,
    Barrier,
    CallLibrary,
    For,
    IfThenElse,
    IndexValue,
    Intrinsic,
    LetIndex,
    Literal,
    Load,
    Prefetch,
    Stmt,
    Store,
    TensorProgram,
    Value,
)
from relaxlite.ir.program_visitor import stmt_children, stmt_values, value_children, walk_stmts, walk_values
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int
from relaxlite.ir.warp import LIBRARY, call_problem
from relaxlite.records import dataclass

MAX_THREADS = min(gpu.max_threads for gpu in GPUS)

LAUNCH_RULES = {
    "axes": "an axis of a GPU occurs once on a path, threads inside of blocks; threads are constant, 1024 at most",
    "host": "outside of launches a program does not touch elements of buffers",
    "scope": "shared buffers of constant size stand between block and thread axes, local buffers inside of threads",
    "barrier": "a barrier stands inside of the thread axes, in control flow that all threads of a block share",
    "warp": "warp instructions and shuffles stand inside of the thread axes, with operands as ir/warp.py lists them",
}


@dataclass(frozen=True, slots=True)
class LaunchProblem:
    """A violated rule of `LAUNCH_RULES` and where."""

    rule: str
    message: str
    stmt: Stmt


def launch_problem(program: TensorProgram) -> LaunchProblem | None:
    """The first violation of the rules of launches; None for a program without axes of a GPU and shared buffers."""
    is_for_gpu = any(map(_is_for_gpu, walk_stmts(program.body)))
    return next(_Launches().problems(program.body), None) if is_for_gpu else None


def _is_for_gpu(stmt: Stmt) -> bool:
    if isinstance(stmt, Allocate):
        return stmt.buffer.scope == "shared"
    return isinstance(stmt, For) and stmt.kind in (*BLOCK_AXES, *THREAD_AXES)


class _Launches:
    """Checks the statements of one program; tracks axes on the path, and symbols that vary over threads."""

    def __init__(self) -> None:
        self.axes: dict[str, SymExpr] = {}
        self.varying: set[SymVar] = set()
        self.is_divergent = False  # control flow may differ between threads of a block

    @property
    def in_block(self) -> bool:
        return any(axis in self.axes for axis in BLOCK_AXES)

    @property
    def in_threads(self) -> bool:
        return any(axis in self.axes for axis in THREAD_AXES)

    def problems(self, stmt: Stmt) -> Iterator[LaunchProblem]:
        for rule, message in self._own_problems(stmt):
            yield LaunchProblem(rule, message, stmt)
        if isinstance(stmt, For):
            yield from self._loop(stmt)
        elif isinstance(stmt, LetIndex):
            with self._bound(stmt.var, varies=not self._is_uniform(stmt.value)):
                yield from self.problems(stmt.body)
        else:
            diverges = isinstance(stmt, IfThenElse) and not self._is_uniform(stmt.cond)
            with self._diverging(diverges):
                for child in stmt_children(stmt):
                    yield from self.problems(child)

    def _own_problems(self, stmt: Stmt) -> Iterator[tuple[str, str]]:
        if isinstance(stmt, For) and stmt.kind in (*BLOCK_AXES, *THREAD_AXES):
            yield from self._axis_problems(stmt)
        if isinstance(stmt, Allocate):
            yield from self._allocation_problems(stmt)
        if isinstance(stmt, Barrier):
            if not self.in_threads:
                yield "barrier", "a barrier outside of the thread axes"
            elif self.is_divergent:
                yield "barrier", "a barrier under a condition, or in a loop, that varies over threads"
        if isinstance(stmt, CallLibrary) and (self.in_block or stmt.library == LIBRARY):
            yield from self._call_problems(stmt)
        if not self.in_block:
            yield from _host_problems(stmt)
        for root in stmt_values(stmt):
            yield from self._shuffle_problems(root)

    def _axis_problems(self, stmt: For) -> Iterator[tuple[str, str]]:
        if stmt.kind in self.axes:
            yield "axes", f"{stmt.kind} is bound again, by {stmt.var.name}"
        if stmt.kind in BLOCK_AXES and self.in_threads:
            yield "axes", f"{stmt.kind} of {stmt.var.name} stands inside of threads"
        if stmt.kind in THREAD_AXES:
            if not self.in_block:
                yield "axes", f"{stmt.kind} of {stmt.var.name} stands outside of blocks"
            count = 1
            for extent in (*(e for axis, e in self.axes.items() if axis in THREAD_AXES), stmt.extent):
                count *= as_int(extent) or 0
            if not 1 <= count <= MAX_THREADS:
                yield "axes", f"{stmt.kind} of {stmt.var.name} has the extent {stmt.extent}: {count} threads in all"

    def _allocation_problems(self, stmt: Allocate) -> Iterator[tuple[str, str]]:
        buffer = stmt.buffer
        if buffer.scope == "shared":
            if not self.in_block or self.in_threads:
                yield "scope", f"the shared buffer {buffer.name} is not between block and thread axes"
            if any(as_int(dim) is None for dim in buffer.shape):
                yield "scope", f"the shared buffer {buffer.name} has no constant size"
        elif self.in_block and (buffer.scope == "global" or not self.in_threads):
            yield "scope", f"the {buffer.scope} buffer {buffer.name} is allocated {self._place()}"
        elif buffer.scope == "local" and not self.in_block:
            yield "scope", f"the local buffer {buffer.name} is allocated outside of launches"

    def _place(self) -> str:
        return "inside of threads" if self.in_threads else "inside of blocks"

    def _call_problems(self, stmt: CallLibrary) -> Iterator[tuple[str, str]]:
        if stmt.library != LIBRARY:
            yield "warp", f"{stmt.symbol} of {stmt.library} is called inside of a launch"
        elif not self.in_threads:
            yield "warp", f"{stmt.symbol} stands outside of the thread axes"
        elif (problem := call_problem(stmt)) is not None:
            yield "warp", problem

    def _shuffle_problems(self, root: Value) -> Iterator[tuple[str, str]]:
        for value in walk_values(root):
            if isinstance(value, Intrinsic) and value.name == SHUFFLE_XOR:
                distance = value.args[1]
                if not isinstance(distance, Literal) or not 0 < distance.value < WARP:
                    yield "warp", f"the distance of a shuffle is a literal below {WARP}"
                if not self.in_threads:
                    yield "warp", "a shuffle outside of the thread axes"

    def _loop(self, stmt: For) -> Iterator[LaunchProblem]:
        if stmt.kind in (*BLOCK_AXES, *THREAD_AXES):
            outer, self.axes = self.axes, {**self.axes, stmt.kind: stmt.extent}
            with self._bound(stmt.var, varies=stmt.kind in THREAD_AXES):
                yield from self.problems(stmt.body)
            self.axes = outer
            return
        varies = not self.varying.isdisjoint(stmt.extent.free_vars())
        with self._bound(stmt.var, varies=varies), self._diverging(varies):
            yield from self.problems(stmt.body)

    @contextmanager
    def _bound(self, var: SymVar, *, varies: bool) -> Iterator[None]:
        if varies:
            self.varying.add(var)
        yield
        self.varying.discard(var)

    @contextmanager
    def _diverging(self, diverges: bool) -> Iterator[None]:
        outer, self.is_divergent = self.is_divergent, self.is_divergent or diverges
        yield
        self.is_divergent = outer

    def _is_uniform(self, value: Value) -> bool:
        """Whether a value is proven to be the same for all threads of a block."""
        if isinstance(value, IndexValue):
            return self.varying.isdisjoint(value.index.free_vars())
        if isinstance(value, Load):
            is_own = value.buffer.scope == "local"
            return not is_own and all(self.varying.isdisjoint(index.free_vars()) for index in value.indices)
        if isinstance(value, Intrinsic) and value.name == SHUFFLE_XOR:
            return False
        return all(map(self._is_uniform, value_children(value)))


def _host_problems(stmt: Stmt) -> Iterator[tuple[str, str]]:
    touched = [stmt.buffer] if isinstance(stmt, Store | Prefetch) else []
    touched += [v.buffer for root in stmt_values(stmt) for v in walk_values(root) if isinstance(v, Load)]
    if not (isinstance(stmt, CallLibrary) and stmt.library != LIBRARY):  # a library's routine runs on the device
        touched += [v.buffer for root in stmt_values(stmt) for v in walk_values(root) if isinstance(v, AddressOf)]
    if touched:
        yield "host", f"{touched[0].name} is accessed outside of launches"
