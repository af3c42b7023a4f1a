"""Which operands a tensor program may be computed in: results that can take over the memory of an input.

An output may take over an input where element e of the input is read for the last time before, or in the very store in
which, element e of the output is written. That holds if, in the loops as they were before scheduling,

    one plain store writes the output, inside of loops whose variables are just its indices, or which run through the
    output's elements in the order of memory: each element once;
    every load of the input reads, at its place in these loops, the elements that are written there (equal offsets in
    memory, equal sizes of elements), and comes before the store in the order of the text, or in its value.

        for i, j:                                    for i:                 every stage reads the row
            e[] = 0                                      top[] = -inf       that the last one writes
            for k: e[] += a[i, k] * b[k, j]              for j: top[] max= x[i, j]
            out[i, j] = x[i, j] + e[]                    for j: out[i, j] = exp(x[i, j] - top[])

Scheduling keeps the order of the accesses to one element. Where a rule does not, it says so: tiles of a transposition
that overlap write elements twice (programs.py), rows may be staged in the output's own row (rows.py).
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
    """A load or store, the statement that makes it, and the way there: statements from the outermost on, each with the
    number of the child that the next one is."""

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
    """The pairs of an unscheduled program, and for inputs of an output's size why they are not among them, as sentences
    "out in x: ..."."""
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
            reason = written if isinstance(written, str) else _too_late(x, written, accesses)
            if reason is None:
                pairs.append((position, number))
            else:
                reasons.append(f"{out.name} in {x.name}: {reason}")
    return tuple(pairs), tuple(reasons)


def with_late_stores(program: TensorProgram) -> TensorProgram:
    """The program where of neighbouring stores into several outputs those that could take over an input come last, when
    the others have read it:

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
        made: list[Stmt] = []
        for is_free, group in groupby(stmt.stmts, self._is_free):
            stores = list(group)
            is_apart = is_free and len({s.buffer for s in stores if isinstance(s, Store)}) == len(stores)
            made += sorted(stores, key=self._is_late) if is_apart else stores
        return stmt if tuple(made) == stmt.stmts else Seq(tuple(made))

    def _is_free(self, stmt: Stmt) -> bool:
        """Whether this is a store that may change places with others like it."""
        if not isinstance(stmt, Store) or stmt.combine is not None or stmt.buffer not in self._outputs:
            return False
        return not any(load.buffer in self._outputs for load in loads(stmt))

    def _is_late(self, stmt: Stmt) -> bool:
        return isinstance(stmt, Store) and stmt.buffer in self._late


def _same_size(a: Buffer, b: Buffer) -> bool:
    """Whether the buffers have the same bytes, as far as their shapes show at once."""
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
    """The one store that writes each element of the output once, or why there is none."""
    found = [a for a in accesses if a.node.buffer is out]
    if len(found) != 1 or not isinstance(found[0].node, Store) or found[0].node.combine is not None:
        return "its elements are not written by one plain store"
    store = found[0]
    variables, extents = [loop.var for loop in store.loops], [loop.extent for loop in store.loops]
    if any(isinstance(stmt, IfThenElse) for stmt, _ in store.path):
        return "its elements are written under a condition"
    indices = [index for index in store.node.indices if not index.is_const]
    is_permuted = len(indices) == len(variables) and set(indices) == set(variables)
    if is_permuted or (product(extents) is product(out.shape) and store.offset is flat_offset(extents, variables)):
        return store
    return "its elements are not written by the loops in turn, each once"


def _too_late(x: Buffer, store: _Access, accesses: list[_Access]) -> str | None:
    """Why the store may overwrite an element of x that is still to be read; None: it does not."""
    for load in (a for a in accesses if a.node.buffer is x):
        if load.stmt is not store.stmt and not _comes_before(load, store):
            return "it is read after elements of the result are written"
        if not _reads_what_is_written(load, store):
            return "other elements are read than the one that is written"
    return None


def _comes_before(load: _Access, store: _Access) -> bool:
    """Whether in each iteration of the loops round both, the load comes first in the text."""
    for (a, first), (b, second) in zip(load.path, store.path, strict=False):
        if a is not b:
            return False
        if first != second:
            return isinstance(a, Seq) and first < second
    return len(load.path) < len(store.path) and store.path[len(load.path)][0] is load.stmt  # a statement round it


def _reads_what_is_written(load: _Access, store: _Access) -> bool:
    """Whether in one iteration of the loops round both, the load reads elements that the store writes in that one."""
    common = {loop for loop in load.loops if loop in store.loops}
    inner, written = [loop for loop in load.loops if loop not in common], set(load.offset.free_vars())
    own = [loop for loop in inner if loop.var in written]
    others = [loop for loop in store.loops if loop not in common]
    at: dict[SymVar, SymExpr] = {}
    for mine, its in zip(own, others, strict=False):
        if mine.extent is not its.extent:
            return False
        at[mine.var] = its.var
    return len(own) <= len(others) and substitute(load.offset, at) is store.offset


def keeps_order(body: Stmt, out: Buffer) -> bool:
    """Whether the scheduled loops write each element of the output by plain stores that read nothing of it: it holds no
    intermediate values that could overwrite an operand too early."""
    found = [a.node for a in _accesses(body, ()) if a.node.buffer is out]
    return all(isinstance(node, Store) and node.combine is None for node in found)
