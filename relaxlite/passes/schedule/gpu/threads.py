"""Schedule of every program that no template takes: a thread for each iteration of the outer independent loops.

    for i in range(n):                     for b in block_x((n*m + 127) // 128):
        for j in range(m):            =>       for t in thread_x(128):
            out[i, j] = f(i, j)                    if b*128 + t < n*m: out[.. // m, .. % m] = f(..)

Loops around several independent nests stay on the host, as in recurrent layers; what has no independent loop runs in
one thread. Workspaces of a thread are local if they are small; others become parts of a workspace of all threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from relaxlite import dtypes
from relaxlite.errors import ScheduleError
from relaxlite.ir.program import (
    AddressOf,
    Allocate,
    Binder,
    Buffer,
    For,
    IfThenElse,
    LetIndex,
    Load,
    Prefetch,
    Seq,
    Stmt,
    Store,
    Value,
    seq,
)
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, all_values, stmt_values, walk_stmts, walk_values
from relaxlite.ir.symbolic import SymExpr, as_int, ceildiv, product
from relaxlite.passes.loops.parallel import has_disjoint_writes
from relaxlite.passes.loops.transforms import less
from relaxlite.passes.schedule.gpu.axes import Axis, flat_places, on_axes, size_of

THREADS = 128
MAX_LOCAL_BYTES = 4 << 10  # of a workspace of one thread that lies in local memory


def launch_threads(stmt: Stmt) -> Stmt:
    """Launches that compute what a statement computes."""
    if isinstance(stmt, Seq):
        return seq(*map(launch_threads, stmt.stmts))
    if not _touches_memory(stmt):
        return _on_host(stmt)
    if isinstance(stmt, Allocate) and stmt.buffer.scope == "global" and _has_independent_loop(stmt.body):
        return replace(stmt, body=launch_threads(stmt.body))
    if isinstance(stmt, IfThenElse) and not _reads(stmt.cond):
        other = None if stmt.other is None else launch_threads(stmt.other)
        return replace(stmt, then=launch_threads(stmt.then), other=other)
    if isinstance(stmt, LetIndex) and not _reads(stmt.value):
        return replace(stmt, body=launch_threads(stmt.body))
    if isinstance(stmt, For) and _is_host_loop(stmt):
        return replace(stmt, body=launch_threads(stmt.body), kind="serial")
    return _launch(stmt)


def _on_host(stmt: Stmt) -> Stmt:
    return Seq(()) if isinstance(stmt, Prefetch) else stmt


def _touches_memory(stmt: Stmt) -> bool:
    """Whether a statement accesses elements of buffers."""
    has_store = any(isinstance(s, Store | Prefetch) for s in walk_stmts(stmt))
    return has_store or any(isinstance(v, Load | AddressOf) for v in all_values(stmt))


def _reads(value: Value) -> bool:
    return any(isinstance(v, Load) for v in walk_values(value))


def _is_independent(loop: For) -> bool:
    return loop.kind == "parallel" or has_disjoint_writes(loop)


def _has_independent_loop(stmt: Stmt) -> bool:
    return any(isinstance(s, For) and _is_independent(s) for s in walk_stmts(stmt))


def _is_host_loop(loop: For) -> bool:
    """Whether the host runs a loop: its iterations depend on each other, but loops inside are independent."""
    if _is_independent(loop) or not _has_independent_loop(loop.body):
        return False
    body = loop.body.stmts if isinstance(loop.body, Seq) else (loop.body,)
    return all(_is_launchable(s) for s in body)


def _is_launchable(stmt: Stmt) -> bool:
    """Whether a statement of a host loop becomes launches without data in the host's hands."""
    if isinstance(stmt, Allocate):
        return stmt.buffer.scope == "global" and _is_launchable(stmt.body)
    if isinstance(stmt, Seq):
        return all(map(_is_launchable, stmt.stmts))
    return isinstance(stmt, For | Store) or not any(map(_reads, stmt_values(stmt)))


def _launch(stmt: Stmt) -> Stmt:
    """One launch for a statement, with its independent outer loops on threads."""
    loops, lets, body = _split(stmt)
    body = _Serial().stmt(body)
    for let in reversed(lets):
        body = replace(let, body=body)
    total = size_of(loops)
    block, thread = Axis.of("b", "block_x", ceildiv(total, THREADS)), Axis.of("t", "thread_x", THREADS)
    number = block.var * THREADS + thread.var
    body = Substitute(flat_places(loops, number), fresh=True).stmt(body)
    body, workspaces = _lift_workspaces(body, number, total)
    launch = on_axes([block, thread], IfThenElse(less(number, total), body))
    for workspace in workspaces:
        launch = Allocate(workspace, launch)
    return launch


def _split(stmt: Stmt) -> tuple[Sequence[For], Sequence[LetIndex], Stmt]:
    """(independent outer loops, data that is bound between them, body)."""
    loops: list[For] = []
    lets: list[LetIndex] = []
    while isinstance(stmt, For | LetIndex):
        if isinstance(stmt, LetIndex):
            lets.append(stmt)
        else:
            outer = {loop.var for loop in loops} | {let.var for let in lets}
            if not outer.isdisjoint(stmt.extent.free_vars()) or not _is_independent(stmt):
                break
            loops.append(stmt)
        stmt = stmt.body
    return loops, lets, stmt


class _Serial(ProgramRewriter):
    """Makes loops serial, and drops hints for CPUs."""

    def stmt(self, stmt: Stmt) -> Stmt:
        stmt = super().stmt(stmt)
        if isinstance(stmt, For) and stmt.kind != "serial":
            return replace(stmt, kind="serial")
        if isinstance(stmt, Store) and stmt.nontemporal:
            return replace(stmt, nontemporal=False)
        return Seq(()) if isinstance(stmt, Prefetch) else stmt


# Workspaces


def _lift_workspaces(body: Stmt, number: SymExpr, total: SymExpr) -> tuple[Stmt, list[Buffer]]:
    """Workspaces of a thread as local buffers, or as row `number` of buffers with `total` rows, which are returned."""
    local: dict[Buffer, Buffer] = {}
    lifted: dict[Buffer, Buffer] = {}
    inner = {s.var for s in walk_stmts(body) if isinstance(s, Binder)} | set(number.free_vars())
    for buffer in [s.buffer for s in walk_stmts(body) if isinstance(s, Allocate)]:
        elements = as_int(product(buffer.shape))
        if elements is not None and elements * dtypes.itemsize(buffer.dtype) <= MAX_LOCAL_BYTES:
            if buffer.scope != "local":
                local[buffer] = Buffer(buffer.name, buffer.shape, buffer.dtype, "local")
        elif not inner.isdisjoint(v for dim in buffer.shape for v in dim.free_vars()):
            raise ScheduleError(f"the size of the workspace {buffer.name} is known only inside of a loop")
        else:
            lifted[buffer] = Buffer(buffer.name, (total, *buffer.shape), buffer.dtype)
    body = Substitute(buffers=local).stmt(body) if local else body
    return (_InRows(lifted, number).stmt(body) if lifted else body), list(lifted.values())


class _InRows(ProgramRewriter):
    """Replaces buffers of a thread by its row of buffers of all threads."""

    def __init__(self, rows: dict[Buffer, Buffer], number: SymExpr) -> None:
        super().__init__()
        self._rows, self._number = rows, number

    def _value(self, value: Value) -> Value:
        value = super()._value(value)
        if isinstance(value, Load | AddressOf) and value.buffer in self._rows:
            return replace(value, buffer=self._rows[value.buffer], indices=(self._number, *value.indices))
        return value

    def stmt(self, stmt: Stmt) -> Stmt:
        stmt = super().stmt(stmt)
        if isinstance(stmt, Store) and stmt.buffer in self._rows:
            return replace(stmt, buffer=self._rows[stmt.buffer], indices=(self._number, *stmt.indices))
        return stmt.body if isinstance(stmt, Allocate) and stmt.buffer in self._rows else stmt
