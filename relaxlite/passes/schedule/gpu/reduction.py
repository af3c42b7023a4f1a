"""Reductions whose operands lie along the reduced loops: a warp for each result, or a block where results are few.

    for i: { total[] = init; for r: total combine= f(i, r); final }        row sums, means, dot products

The lanes of a team read what lies side by side. Each combines every 32nd (or 256th) value; all_reduce.py combines the
lanes.
"""

from __future__ import annotations

from functools import partial

from relaxlite.ir.program import (
    Allocate,
    Buffer,
    Check,
    Compare,
    For,
    IfThenElse,
    IndexValue,
    Load,
    Stmt,
    Store,
    seq,
)
from relaxlite.ir.program_visitor import Substitute, loads, walk_stmts
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, sym
from relaxlite.passes.loops.access import stride
from relaxlite.passes.loops.parallel import has_disjoint_writes
from relaxlite.passes.loops.pattern import Reduction, perfect_nest, reduction_of
from relaxlite.passes.loops.transforms import less
from relaxlite.passes.schedule.gpu.all_reduce import COMBINES, DTYPE, Team, all_reduce, by_blocks, by_warps, over, start
from relaxlite.passes.schedule.gpu.axes import flat_places, size_of

MIN_DEPTH = 64  # values of a result; a thread combines fewer alone
FEW_RESULTS = 256  # for which warps would leave multiprocessors idle


def launch_reduction(stage: Stmt, *, one_order: bool) -> Stmt | None:
    """A launch for a reduction; None for other stages, and for reductions that one thread computes better.

    `one_order`: the order of a sum does not depend on how many results there are.
    """
    reduction = reduction_of(stage)
    if reduction is None or any(isinstance(s, Check) for s in walk_stmts(stage)) or not _is_supported(reduction):
        return None
    results, work = size_of(reduction.spatial), partial(_result, reduction)
    if one_order:
        return by_warps(results, work)
    known = as_int(results)
    if known is not None:
        return by_blocks(results, work) if known <= FEW_RESULTS else by_warps(results, work)
    return IfThenElse(less(results, FEW_RESULTS + 1), by_blocks(results, work), by_warps(results, work))


def _is_supported(reduction: Reduction) -> bool:
    update, reduced = reduction.update, perfect_nest(reduction.inner).loops
    if update.combine not in COMBINES or update.buffer.dtype != DTYPE:
        return False
    depth, bound = as_int(size_of(reduced)), {loop.var for loop in (*reduction.spatial, *reduced)}
    if (depth is not None and depth < MIN_DEPTH) or not all(map(has_disjoint_writes, reduction.spatial)):
        return False
    if any(not bound.isdisjoint(loop.extent.free_vars()) for loop in (*reduction.spatial, *reduced)):
        return False
    read = [load for load in loads(update) if any(reduced[-1].var in index.free_vars() for index in load.indices)]
    return bool(read) and all(stride(load, reduced[-1].var) == 1 for load in read)


def _result(reduction: Reduction, team: Team, number: SymExpr) -> tuple[Stmt, Buffer]:
    """(the statements of one result for a thread of a team, the shared buffer that they use)."""
    element, combine = reduction.element, str(reduction.update.combine)
    partial = Buffer(f"{element.name}_part", (), DTYPE, "local")
    reduced = perfect_nest(reduction.inner).loops
    flat = SymVar("r", lower=0)
    value = Substitute(flat_places(reduced, sym(flat))).value(reduction.update.value)
    parts = team.new_parts("parts")
    is_first = Compare("eq", IndexValue(sym(team.lane)), IndexValue(sym(0)))
    body = seq(
        start(partial, combine),
        over(team, For(flat, size_of(reduced), Store(partial, (), value, combine))),
        all_reduce(team, partial, combine, parts),
        reduction.init,
        Store(element, (), Load(partial, ()), combine),
        IfThenElse(is_first, reduction.final),
    )
    body = Substitute(flat_places(reduction.spatial, number), fresh=True).stmt(body)
    return Allocate(element, Allocate(partial, body)), parts
