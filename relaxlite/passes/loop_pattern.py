"""What kind of computation a tensor program is, read off its loops.

    ELEMENTWISE   every load of a non-scalar input has the indices of the store
    BROADCAST     loads use a subset of the store's loop variables, in order
    INJECTIVE     one nest, each output element from other indices (transpose, slice, gather, concat of Selects)
    REDUCTION     an output element combines many input elements, each used for few outputs (sum, max, mean)
    OUT_FUSIBLE   a reduction whose operands are shared by many outputs (matmul, convolution)
    OPAQUE        anything else: several stages, data-dependent stores, scans
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from relaxlite.ir.program import Check, For, LetIndex, Load, Seq, Stmt, Store, TensorProgram
from relaxlite.ir.symbolic import SymExpr, SymVar
from relaxlite.ir.visitor import loads, stores, walk_stmts


class LoopPattern(IntEnum):
    ELEMENTWISE = 0
    BROADCAST = 1
    INJECTIVE = 2
    REDUCTION = 3
    OUT_FUSIBLE = 4
    OPAQUE = 5


@dataclass(frozen=True, slots=True)
class Nest:
    """A perfect nest of loops round a body that is no loop."""

    loops: tuple[For, ...]
    body: Stmt

    @property
    def vars(self) -> tuple[SymVar, ...]:
        return tuple(loop.var for loop in self.loops)


def perfect_nest(stmt: Stmt) -> Nest:
    """The loops that stand directly inside each other, from `stmt` inwards."""
    found: list[For] = []
    while isinstance(stmt, For):
        found.append(stmt)
        stmt = stmt.body
    return Nest(tuple(found), stmt)


def top_stages(program: TensorProgram) -> tuple[Stmt, ...]:
    return program.body.stmts if isinstance(program.body, Seq) else (program.body,)


def injective_store(nest: Nest) -> Store | None:
    """The one plain Store of a nest that writes each element once, at its loop variables in order; else None."""
    body = nest.body
    while isinstance(body, LetIndex | Seq):
        if isinstance(body, LetIndex):
            body = body.body
        elif all(isinstance(s, Check) for s in body.stmts[:-1]):
            body = body.stmts[-1]
        else:
            return None
    if not isinstance(body, Store) or body.combine is not None or body.indices != nest.vars:
        return None
    return body if all(load.buffer is not body.buffer for load in loads(body)) else None


@dataclass(frozen=True, slots=True)
class Reduction:
    """for spatial: out[spatial] = init; for reduced: out[spatial] combine= value"""

    spatial: tuple[For, ...]
    init: Store
    reduced: tuple[For, ...]
    update: Store


def reduction_of(stage: Stmt) -> Reduction | None:
    """The stage as a reduction in canonical form, or None."""
    nest = perfect_nest(stage)
    if not isinstance(nest.body, Seq) or len(nest.body.stmts) != 2 or not isinstance(nest.body.stmts[0], Store):
        return None
    init, inner = nest.body.stmts[0], perfect_nest(nest.body.stmts[1])
    update = inner.body
    if not isinstance(update, Store) or update.combine is None or init.combine is not None:
        return None
    if update.buffer is not init.buffer or update.indices != init.indices or init.indices != nest.vars:
        return None
    if any(load.buffer is init.buffer for load in loads(update)) or any(True for _ in loads(init)):
        return None
    return Reduction(nest.loops, init, inner.loops, update)


def analyze(program: TensorProgram) -> LoopPattern:
    """The pattern of a program of one output."""
    stages = tuple(s for s in top_stages(program) if not isinstance(s, Check))
    if len(stages) != 1 or program.num_outputs != 1:
        return LoopPattern.OPAQUE
    stage = stages[0]
    store = injective_store(perfect_nest(stage))
    if store is not None:
        return _pattern_of_store(store, stage)
    reduction = reduction_of(stage)
    if reduction is None:
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
    """Constant indices are dimensions of one, which broadcasting skips."""
    rest = iter(whole)
    return all(index.is_const or index in rest for index in part)


def _shares_operands(reduction: Reduction) -> bool:
    """Two or more inputs, each used for several outputs: some load leaves out a spatial loop."""
    found = [load for load in loads(reduction.update) if _uses_any(load, reduction.reduced)]
    spatial = {loop.var for loop in reduction.spatial}
    return len(found) > 1 and any(
        spatial - {v for index in load.indices for v in index.free_vars()} for load in found
    )


def _uses_any(load: Load, reduced: tuple[For, ...]) -> bool:
    variables = {loop.var for loop in reduced}
    return any(v in variables for index in load.indices for v in index.free_vars())
