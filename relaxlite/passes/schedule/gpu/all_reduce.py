"""Combination of a value of each thread to one that all threads have: by shuffles in a warp, then in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from relaxlite.gpus import WARP
from relaxlite.ir.intrinsics import SHUFFLE_XOR
from relaxlite.ir.ops.scalars import identity
from relaxlite.ir.program import (
    Allocate,
    Barrier,
    Buffer,
    Compare,
    For,
    IfThenElse,
    IndexValue,
    Intrinsic,
    Literal,
    Load,
    Stmt,
    Store,
    seq,
)
from relaxlite.ir.program_visitor import Substitute
from relaxlite.ir.symbolic import SymExpr, SymVar, ceildiv, sym
from relaxlite.passes.loops.transforms import less
from relaxlite.passes.schedule.gpu.axes import Axis, on_axes, repeat
from relaxlite.records import dataclass

DTYPE = "float32"  # what shuffles exchange
COMBINES = ("add", "mul", "max", "min", "maxnum")


@dataclass(frozen=True, slots=True)
class Team:
    """The threads that combine values: a warp, or all `threads` of a block. `lane`: a thread's place among them."""

    threads: int
    lane: SymVar

    @property
    def warps(self) -> int:
        return self.threads // WARP

    def new_parts(self, name: str) -> Buffer:
        """A shared buffer for `all_reduce`; unused by a team of one warp."""
        return Buffer.of(name, (self.warps,), DTYPE, "shared")

    def with_parts(self, parts: Buffer, body: Stmt) -> Stmt:
        """The allocation of the shared buffer around the thread axes, where the team needs one."""
        return Allocate(parts, body) if self.warps > 1 else body


WARPS_PER_BLOCK = 4  # where a warp computes a result
BLOCK_THREADS = 256  # where a block computes a result
Work: TypeAlias = "Callable[[Team, SymExpr], tuple[Stmt, Buffer]]"
"""The statements of result `number` for a thread of a team, and the shared buffer that they use."""


def by_warps(results: SymExpr, work: Work) -> Stmt:
    """A launch with a warp for each result."""
    lane, warp = Axis.of("t", "thread_x", WARP), Axis.of("w", "thread_y", WARPS_PER_BLOCK)
    block = Axis.of("b", "block_x", ceildiv(results, WARPS_PER_BLOCK))
    number = block.var * WARPS_PER_BLOCK + warp.var
    body, _ = work(Team(WARP, lane.var), number)
    return on_axes([block, warp, lane], IfThenElse(less(number, results), body))


def by_blocks(results: SymExpr, work: Work) -> Stmt:
    """A launch with a block for each result."""
    lane, block = Axis.of("t", "thread_x", BLOCK_THREADS), Axis.of("b", "block_x", results)
    team = Team(BLOCK_THREADS, lane.var)
    body, parts = work(team, block.var)
    return on_axes([block], team.with_parts(parts, on_axes([lane], body)))


def over(team: Team, loop: For) -> Stmt:
    """The iterations of a loop, dealt out to the threads of a team in turn."""
    step = SymVar(f"{loop.var.name}o", lower=0)
    place = step * team.threads + team.lane
    body = Substitute({loop.var: place}, fresh=True).stmt(loop.body)
    return For(step, ceildiv(loop.extent - team.lane, team.threads), body)


def start(partial: Buffer, combine: str) -> Stmt:
    """Store the identity of a combination."""
    return Store(partial, (), identity(combine, DTYPE))


def all_reduce(team: Team, partial: Buffer, combine: str, parts: Buffer) -> Stmt:
    """Each thread's scalar `partial` becomes the combination of those of the team, in a fixed order."""
    tree = [_exchange(partial, combine, WARP >> n) for n in range(1, WARP.bit_length())]
    if team.warps == 1:
        return seq(*tree)
    is_first = Compare("eq", IndexValue(team.lane % WARP), IndexValue(sym(0)))
    return seq(
        *tree,
        IfThenElse(is_first, Store(parts, (team.lane // WARP,), Load(partial, ()))),
        Barrier(),
        Store(partial, (), Load(parts, (sym(0),))),
        repeat("w", team.warps - 1, lambda w: Store(partial, (), Load(parts, (w + 1,)), combine)),
        Barrier(),  # before the next combination writes the parts again
    )


def _exchange(partial: Buffer, combine: str, distance: int) -> Stmt:
    other = Intrinsic(SHUFFLE_XOR, (Load(partial, ()), Literal(distance, "int32")), DTYPE)
    return Store(partial, (), other, combine)
