"""In-place analysis: which outputs of a tensor program may alias the memory of an input.

An output may alias an input if the last read of element e of the input precedes the write of element e of the output,
or is part of the stored value. That holds if, in the loops before scheduling,

    exactly one store without `combine` writes the output, in loops whose variables are a permutation of its indices or
    which visit the output in memory order, so that each element is written once;
    every load of the input has, in the loops that it shares with the store, the offset of the store (equal element
    sizes), and precedes the store in program order or is part of its value.

        for i, j:                                    for i:                 every stage reads the row
            e[] = 0                                      top[] = -inf       that the last stage writes
            for k: e[] += a[i, k] * b[k, j]              for j: top[] max= x[i, j]
            out[i, j] = x[i, j] + e[]                    for j: out[i, j] = exp(x[i, j] - top[])

Scheduling preserves the order of the accesses to one element. The exceptions revoke pairs: overlapping tiles of a
transpose write elements twice (programs.py), and a local row may be stored in the row of the output (row_programs.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import TypeAlias

from relaxlite import dtypes
from relaxlite.ir.layout import flat_offset
from relaxlite.ir.program import Buffer, For, IfThenElse, Load, Seq, Stmt, Store, TensorProgram
from relaxlite.ir.program_visitor import ProgramRewriter, loads, stmt_children, stmt_values, walk_values
from relaxlite.ir.symbolic import SymExpr, SymVar, product, substitute
from relaxlite.records import dataclass

Pairs: TypeAlias = "tuple[tuple[int, int], ...]"


@dataclass(frozen=True, slots=True)
class _Access:
    """A load or store, the statement that contains it, and the path to that statement: the enclosing statements,
    outermost first, each with the position of the child on the path."""

    node: Load | Store
    stmt: Stmt
    path: tuple[tuple[Stmt, int], ...]

    @property
    def loops(self) -> tuple[For, ...]:
        return tuple(stmt for stmt, _ in self.path if isinstance(stmt, For))

    @property
    def offset(self) -> SymExpr:
        return flat_offset(self.node.buffer.shape, self.node.indices)


def in_place_pairs(program: TensorProgram) -> tuple[Pairs, tuple[str, ...]]:
    """Find the inputs and outputs of an unscheduled program that may alias.

    Returns the (input, output) positions, and for other inputs of the size of an output the reasons against it, as
    sentences "out in x: ...".
    """
    accesses = list(_accesses(program.body, ()))
    pairs: list[tuple[int, int]] = []
    reasons: list[str] = []
    for number, out in enumerate(program.params):
        if out not in program.outputs:
            continue
        written = _written_once(out, accesses)
        for position, x in enumerate(program.inputs):
            if not _same_size(x, out):
                continue
            reason = written if isinstance(written, str) else _hazard(x, written, accesses)
            if reason is None:
                pairs.append((position, number))
            else:
                reasons.append(f"{out.name} in {x.name}: {reason}")
    return tuple(pairs), tuple(reasons)


def sink_aliasable_stores(program: TensorProgram) -> TensorProgram:
    """Reorder adjacent stores into several outputs, so that outputs that could alias an input are stored last.

    The other stores have then read that input:

        out[i] = f(x[i]); half[i] = bfloat16(f(x[i]))    =>    half[i] = bfloat16(f(x[i])); out[i] = f(x[i])
    """
    if program.num_outputs == 1:
        return program
    late = {out for out in program.outputs if any(_same_size(x, out) for x in program.inputs)}
    return replace(program, body=_LateStores(late, set(program.outputs)).stmt(program.body))


class _LateStores(ProgramRewriter):
    def __init__(self, late: set[Buffer], outputs: set[Buffer]) -> None:
        super().__init__()
        self._late, self._outputs = late, outputs

    def stmt(self, stmt: Stmt) -> Stmt:
        stmt = super().stmt(stmt)
        if not isinstance(stmt, Seq):
            return stmt
        reordered: list[Stmt] = []
        for is_free, run in groupby(stmt.stmts, self._is_free):
            stores = list(run)
            commutes = is_free and len({s.buffer for s in stores if isinstance(s, Store)}) == len(stores)
            reordered += sorted(stores, key=self._is_late) if commutes else stores
        return stmt if tuple(reordered) == stmt.stmts else Seq(tuple(reordered))

    def _is_free(self, stmt: Stmt) -> bool:
        """Whether a statement is a store that commutes with stores into other outputs."""
        if not isinstance(stmt, Store) or stmt.combine is not None or stmt.buffer not in self._outputs:
            return False
        return not any(load.buffer in self._outputs for load in loads(stmt))

    def _is_late(self, stmt: Stmt) -> bool:
        return isinstance(stmt, Store) and stmt.buffer in self._late


def _same_size(a: Buffer, b: Buffer) -> bool:
    """Whether two buffers have equal element sizes and identical element counts."""
    return dtypes.itemsize(a.dtype) == dtypes.itemsize(b.dtype) and product(a.shape) is product(b.shape)


def _accesses(stmt: Stmt, path: tuple[tuple[Stmt, int], ...]) -> Iterator[_Access]:
    for root in stmt_values(stmt):
        for value in walk_values(root):
            if isinstance(value, Load):
                yield _Access(value, stmt, path)
    if isinstance(stmt, Store):
        yield _Access(stmt, stmt, path)
    for number, child in enumerate(stmt_children(stmt)):
        yield from _accesses(child, (*path, (stmt, number)))


def _written_once(out: Buffer, accesses: list[_Access]) -> _Access | str:
    """The only store that writes the output, each element once; else the reason (str)."""
    uses = [a for a in accesses if a.node.buffer is out]
    if len(uses) != 1 or not isinstance(uses[0].node, Store) or uses[0].node.combine is not None:
        return "its elements are not written by one plain store"
    store = uses[0]
    variables, extents = [loop.var for loop in store.loops], [loop.extent for loop in store.loops]
    if any(isinstance(stmt, IfThenElse) for stmt, _ in store.path):
        return "its elements are written under a condition"
    indices = [index for index in store.node.indices if not index.is_const]
    is_permuted = len(indices) == len(variables) and set(indices) == set(variables)
    if is_permuted or (product(extents) is product(out.shape) and store.offset is flat_offset(extents, variables)):
        return store
    return "its elements are not written by the loops in turn, each once"


def _hazard(x: Buffer, store: _Access, accesses: list[_Access]) -> str | None:
    """Why the store may overwrite an element of `x` before its last read; None: it cannot."""
    for load in (a for a in accesses if a.node.buffer is x):
        if load.stmt is not store.stmt and not _precedes(load, store):
            return "it is read after elements of the result are written"
        if not _reads_stored_elements(load, store):
            return "other elements are read than the one that is written"
    return None


def _precedes(load: _Access, store: _Access) -> bool:
    """Whether the load precedes the store in program order within every iteration of their common loops."""
    for (a, first), (b, second) in zip(load.path, store.path, strict=False):
        if a is not b:
            return False
        if first != second:
            return isinstance(a, Seq) and first < second
    return len(load.path) < len(store.path) and store.path[len(load.path)][0] is load.stmt  # in an enclosing head


def _reads_stored_elements(load: _Access, store: _Access) -> bool:
    """Whether, within one iteration of the common loops, the load reads the elements that the store writes in it."""
    common = {loop for loop in load.loops if loop in store.loops}
    inner, written = [loop for loop in load.loops if loop not in common], set(load.offset.free_vars())
    load_loops = [loop for loop in inner if loop.var in written]
    store_loops = [loop for loop in store.loops if loop not in common]
    at: dict[SymVar, SymExpr] = {}
    for load_loop, store_loop in zip(load_loops, store_loops, strict=False):
        if load_loop.extent is not store_loop.extent:
            return False
        at[load_loop.var] = store_loop.var
    return len(load_loops) <= len(store_loops) and substitute(load.offset, at) is store.offset


def has_only_final_stores(body: Stmt, out: Buffer) -> bool:
    """Whether scheduled loops access an output only by stores without `combine`.

    The output then holds no intermediate values that could overwrite an aliased input too early.
    """
    nodes = [a.node for a in _accesses(body, ()) if a.node.buffer is out]
    return all(isinstance(node, Store) and node.combine is None for node in nodes)
