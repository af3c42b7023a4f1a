"""Classification of tensor programs by their loops: elementwise, injective, reduction and other patterns.

ELEMENTWISE   every load has the indices of the store
BROADCAST     loads use a subset of the store's loop variables, in order (a scalar: none of them)
INJECTIVE     one nest that stores each output element once, with loads at arbitrary indices (transpose, slice, gather)
CONCAT         several such nests that write consecutive ranges of one dimension (concat)
REDUCTION     an output element combines many input elements, each used for few outputs (sum, max, mean)
ROW           several stages over each row of the output (softmax, layer norm; row_program.py)
OUT_FUSIBLE   a reduction whose operands are shared by many outputs (matmul, convolution)
OPAQUE        all other programs: several stages, data-dependent stores, scans
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from typing import TypeGuard

from relaxlite.ir.program import (
    Allocate,
    Buffer,
    Check,
    For,
    IfThenElse,
    LetIndex,
    LibraryFound,
    Load,
    Seq,
    Stmt,
    Store,
    TensorProgram,
    seq,
)
from relaxlite.ir.program_visitor import loads, walk_stmts, walk_values
from relaxlite.ir.symbolic import SymExpr, SymVar, sym
from relaxlite.passes.loops.row_program import match_row_program
from relaxlite.records import dataclass


class LoopPattern(IntEnum):
    """The pattern of a tensor program, ordered from the easiest to fuse to the hardest."""

    ELEMENTWISE = 0
    BROADCAST = 1
    INJECTIVE = 2
    CONCAT = 3
    REDUCTION = 4
    ROW = 5
    OUT_FUSIBLE = 6
    OPAQUE = 7


@dataclass(frozen=True, slots=True)
class Nest:
    """A perfect nest of loops (outermost first) around a body that is not a loop."""

    loops: tuple[For, ...]
    body: Stmt

    @property
    def vars(self) -> tuple[SymVar, ...]:
        """The loop variables, outermost first."""
        return tuple(loop.var for loop in self.loops)

    @property
    def shape(self) -> tuple[SymExpr, ...]:
        """The extents of the loops, outermost first."""
        return tuple(loop.extent for loop in self.loops)

    @property
    def stmt(self) -> Stmt:
        """The nest as one statement."""
        stmt = self.body
        for loop in reversed(self.loops):
            stmt = replace(loop, body=stmt)
        return stmt


def perfect_nest(stmt: Stmt) -> Nest:
    """The maximal perfect nest that starts at a statement; without loops if the statement is not a loop."""
    loops: list[For] = []
    while isinstance(stmt, For):
        loops.append(stmt)
        stmt = stmt.body
    return Nest(tuple(loops), stmt)


def calls_library(stage: Stmt) -> TypeGuard[IfThenElse]:
    """Whether a stage is a conditional library call with loops as fallback.

    The condition includes the presence of the library.
    """
    if not isinstance(stage, IfThenElse):
        return False
    return any(isinstance(value, LibraryFound) for value in walk_values(stage.cond))


def top_stages(program: TensorProgram) -> tuple[Stmt, ...]:
    """The statements at the top level of a program, in order."""
    return program.body.stmts if isinstance(program.body, Seq) else (program.body,)


def injective_store(nest: Nest) -> Store | None:
    """The only store of a nest, if it does not combine and its indices are the loop variables in order; else None."""
    store = plain_store(nest)
    return store if store is not None and store.indices == nest.vars else None


def plain_store(nest: Nest) -> Store | None:
    """The only store of a nest, if it does not combine and the nest does not load its buffer; else None.

    Only `LetIndex` and checks may stand between the loops and the store.
    """
    body = nest.body
    while isinstance(body, LetIndex | Seq):
        if isinstance(body, LetIndex):
            body = body.body
        elif all(isinstance(s, Check) for s in body.stmts[:-1]):
            body = body.stmts[-1]
        else:
            return None
    if not isinstance(body, Store) or body.combine is not None:
        return None
    return body if all(load.buffer is not body.buffer for load in loads(nest.body)) else None


@dataclass(frozen=True, slots=True)
class ConcatPart:
    """A nest that writes one range of a concatenation: at its loop variables, shifted by `offset` along `axis`."""

    nest: Nest
    store: Store
    axis: int
    offset: SymExpr


def concat_parts(stages: Sequence[Stmt]) -> tuple[ConcatPart, ...] | None:
    """The stages as the parts of a concatenation that covers one buffer, in order; else None."""
    nests = [perfect_nest(stage) for stage in stages]
    stores = [plain_store(nest) for nest in nests]
    stored = [store for store in stores if store is not None and store.buffer is getattr(stores[0], "buffer", None)]
    if len(stored) < len(stages) or len(stages) < 2:
        return None
    buffer, rank = stored[0].buffer, len(stored[0].indices)
    if any(len(nest.loops) != rank for nest in nests):
        return None
    at = [(store.indices, nest.vars) for nest, store in zip(nests, stored, strict=True)]
    moved = {k for indices, own in at for k in range(rank) if indices[k] is not own[k]}
    if len(moved) != 1:
        return None
    (axis,), parts, end = moved, list[ConcatPart](), sym(0)
    for nest, store in zip(nests, stored, strict=True):
        offset = store.indices[axis] - nest.vars[axis]
        if offset is not end or set(offset.free_vars()) & set(nest.vars):
            return None
        parts.append(ConcatPart(nest, store, axis, offset))
        end = offset + nest.loops[axis].extent
    return tuple(parts) if end is buffer.shape[axis] else None


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction nest: for spatial: { element[]; element = init; for reduced: element combine= value; final }.

    `final`, the epilogue, has no loop; before fusion it is one store of a function of the element at the spatial loop
    variables.
    """

    spatial: tuple[For, ...]
    element: Buffer
    init: Store
    inner: Stmt  # the reduced loops around `update`
    update: Store
    final: Stmt

    @property
    def block(self) -> Allocate:
        """The allocation of the element around init, reduced loops and epilogue."""
        return Allocate(self.element, seq(self.init, self.inner, self.final))


def reduction_of(stage: Stmt) -> Reduction | None:
    """Match a stage as a reduction; else None.

    A nest that combines directly into its output is normalized to this form.
    """
    nest = perfect_nest(stage)
    body = nest.body
    if isinstance(body, Seq):
        body = _with_element(nest, body) or body
    if (
        not isinstance(body, Allocate)
        or body.buffer.shape
        or not isinstance(body.body, Seq)
        or len(body.body.stmts) < 3
    ):
        return None
    init, inner, *rest = body.body.stmts
    update = perfect_nest(inner).body
    if not isinstance(init, Store) or not isinstance(update, Store) or update.combine is None or update is inner:
        return None
    if init.buffer is not body.buffer or init.combine is not None or update.buffer is not body.buffer:
        return None
    if any(load.buffer is body.buffer for load in loads(update)) or any(True for _ in loads(init)):
        return None
    if any(isinstance(s, For | Allocate) for r in rest for s in walk_stmts(r)):
        return None
    return Reduction(nest.loops, body.buffer, init, inner, update, seq(*rest))


def _with_element(nest: Nest, body: Seq) -> Allocate | None:
    """{ out[i] = init; for r: out[i] combine= v }  =>  { e[]; e = init; for r: e combine= v; out[i] = e }"""
    if len(body.stmts) != 2 or not isinstance(body.stmts[0], Store) or body.stmts[0].combine is not None:
        return None
    init, inner = body.stmts[0], perfect_nest(body.stmts[1])
    update, out = inner.body, init.buffer
    if not isinstance(update, Store) or update.combine is None or update.buffer is not out or not inner.loops:
        return None
    if update.indices != init.indices or init.indices != nest.vars or any(load.buffer is out for load in loads(update)):
        return None
    element = Buffer(f"{out.name}_acc", (), out.dtype, "local")
    reduced: Stmt = Store(element, (), update.value, update.combine)
    for loop in reversed(inner.loops):
        reduced = replace(loop, body=reduced)
    final = Store(out, init.indices, Load(element, ()))
    return Allocate(element, seq(Store(element, (), init.value), reduced, final))


def analyze(program: TensorProgram) -> LoopPattern:
    """Classify a tensor program; programs with several outputs are OPAQUE."""
    stages = tuple(s for s in top_stages(program) if not isinstance(s, Check))
    if program.num_outputs != 1:
        return LoopPattern.OPAQUE
    if len(stages) != 1:
        return LoopPattern.OPAQUE if concat_parts(stages) is None else LoopPattern.CONCAT
    stage = stages[0]
    store = injective_store(perfect_nest(stage))
    if store is not None:
        return _pattern_of_store(store, stage)
    reduction, rows = reduction_of(stage), match_row_program(stage)
    if rows is not None and rows.result.indices == tuple(loop.var for loop in (*rows.spatial, rows.final)):
        return LoopPattern.ROW
    if reduction is None or not _is_plain(reduction.final, reduction):
        return LoopPattern.OPAQUE
    return LoopPattern.OUT_FUSIBLE if _shares_operands(reduction) else LoopPattern.REDUCTION


def _pattern_of_store(store: Store, stage: Stmt) -> LoopPattern:
    if any(isinstance(s, LetIndex) for s in walk_stmts(stage)):
        return LoopPattern.INJECTIVE
    pattern = LoopPattern.ELEMENTWISE
    for load in loads(store):
        if load.indices == store.indices:
            continue
        if not _is_subsequence(load.indices, store.indices):
            return LoopPattern.INJECTIVE
        pattern = LoopPattern.BROADCAST
    return pattern


def _is_subsequence(part: tuple[SymExpr, ...], whole: tuple[SymExpr, ...]) -> bool:
    """Whether `part` is a subsequence of `whole`. Constant indices count as broadcast dimensions of size 1."""
    rest = iter(whole)
    return all(index.is_const or index in rest for index in part)


def _is_plain(final: Stmt, reduction: Reduction) -> bool:
    """Whether the epilogue is one store without `combine` at the spatial loop variables, into a buffer that the
    reduction does not read."""
    return (
        isinstance(final, Store)
        and final.combine is None
        and final.indices == tuple(loop.var for loop in reduction.spatial)
        and all(load.buffer is not final.buffer for load in loads(reduction.block))
    )


def _shares_operands(reduction: Reduction) -> bool:
    """Whether a reduction has two or more operands with reuse across outputs: some load is invariant in a spatial
    loop."""
    reduced = {loop.var for loop in perfect_nest(reduction.inner).loops}
    operands = [load for load in loads(reduction.update) if _mentions(load, reduced)]
    spatial = {loop.var for loop in reduction.spatial}
    return len(operands) > 1 and any(
        spatial - {v for index in load.indices for v in index.free_vars()} for load in operands
    )


def _mentions(load: Load, variables: set[SymVar]) -> bool:
    return any(v in variables for index in load.indices for v in index.free_vars())
