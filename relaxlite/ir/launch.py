"""Launches: the parts of a tensor program that run on a GPU.

    for by in block_y((m + 63) // 64):                      block axes, with any extents
        for bx in block_x(8):
            with allocate((64, 32), "float16", "shared") as tile:     one for all threads of a block
                for t in thread_x(128):                     thread axes, with constant extents
                    with allocate((4,), "float32", "local") as acc:   one for each thread
                        ...
                        barrier()

A nest on block axes is a launch; what stands around launches is the host's part: branches on sizes, serial loops,
workspaces. The host does not touch elements of buffers.

Meaning: blocks run in any order. All threads of a block execute one statement before the next one, as far as barriers
say so: between two barriers, no thread may touch an element that another thread of the block writes. Threads of two
blocks never may. `codegen/simt.py` executes launches and reports programs for which the order matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from relaxlite.ir.program import AddressOf, Allocate, Buffer, For, Load, Prefetch, Stmt, Store, TensorProgram
from relaxlite.ir.program_visitor import all_values, bound_symbols, free_symbols, stmt_children, walk_stmts
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, sym
from relaxlite.records import dataclass

BLOCK_AXES = ("block_x", "block_y", "block_z")
THREAD_AXES = ("thread_x", "thread_y", "thread_z")


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch: the nest, and the buffers and symbols of the host that it uses, which are a kernel's parameters."""

    stmt: For
    buffers: tuple[Buffer, ...]
    symbols: tuple[SymVar, ...]
    extents: Mapping[str, SymExpr]
    """Extent by axis; 1 for axes that the nest lacks."""

    @property
    def written(self) -> frozenset[Buffer]:
        """The buffers of the host that the launch writes."""
        stored = {s.buffer for s in walk_stmts(self.stmt) if isinstance(s, Store)}
        addressed = {v.buffer for v in all_values(self.stmt) if isinstance(v, AddressOf) and v.is_written}
        return frozenset(stored | addressed) & frozenset(self.buffers)

    @property
    def threads(self) -> tuple[int, int, int]:
        """Threads of a block along x, y and z."""
        x, y, z = (as_int(self.extents[axis]) or 1 for axis in THREAD_AXES)
        return x, y, z


def is_launch(stmt: Stmt) -> bool:
    """Whether a statement is a nest on block axes."""
    return isinstance(stmt, For) and stmt.kind in BLOCK_AXES


def launches(stmt: Stmt) -> Iterator[For]:
    """The launches of a statement, in order."""
    if isinstance(stmt, For) and stmt.kind in BLOCK_AXES:
        yield stmt
        return
    for child in stmt_children(stmt):
        yield from launches(child)


def has_launches(program: TensorProgram) -> bool:
    """Whether a program runs on a GPU; else the host runs it whole."""
    return next(launches(program.body), None) is not None


def launch_of(stmt: For) -> Launch:
    """Describe a launch. Buffers and symbols are in the order of their first use."""
    own = {s.buffer for s in walk_stmts(stmt) if isinstance(s, Allocate)}
    bound = bound_symbols(stmt)
    used = [s.buffer for s in walk_stmts(stmt) if isinstance(s, Store | Prefetch)]
    used += [v.buffer for v in all_values(stmt) if isinstance(v, Load | AddressOf)]
    buffers = tuple(dict.fromkeys(b for b in used if b not in own))
    symbols = dict.fromkeys(free_symbols(stmt))
    for buffer in buffers:  # offsets of elements depend on the shape
        symbols.update(dict.fromkeys(v for dim in buffer.shape for v in dim.free_vars() if v not in bound))
    extents: dict[str, SymExpr] = {axis: sym(1) for axis in (*BLOCK_AXES, *THREAD_AXES)}
    extents.update((s.kind, s.extent) for s in walk_stmts(stmt) if isinstance(s, For) and s.kind in extents)
    return Launch(stmt, buffers, tuple(symbols), extents)
