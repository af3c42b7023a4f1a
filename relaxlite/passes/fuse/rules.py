"""Legality rules of fusion, and verdicts on its cost.

A `refuse_*` rule returns the reason against fusion, or None. cost.py weighs the cost of legal fusions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.expr import Var
from relaxlite.ir.op_costs import stmt_flops
from relaxlite.ir.program import Check, For, LetIndex, Load, Select, Stmt, TensorProgram, Value
from relaxlite.ir.program_visitor import loads, stmt_values, stores, value_children, walk_stmts
from relaxlite.ir.symbolic import SymExpr, product, substitute, sym
from relaxlite.ir.types import TensorType
from relaxlite.passes.fuse.call_graph import CallNode, FusionGroup
from relaxlite.passes.fuse.cost import FusionVerdict, KernelWork, compare_work, tensor_bytes
from relaxlite.passes.loops.pattern import LoopPattern, reduction_of, top_stages
from relaxlite.passes.loops.row_program import match_row_program

READ_FLOPS = 4  # operations as cheap as the address and the load of a stored element

# Legality


def refuse_epilogue(node: CallNode, path: Sequence[CallNode]) -> str | None:
    """Reason against running the consumers on `path` as an epilogue of a reduction.

    An epilogue is elementwise, apart from reshapes. merge_stages.py decides whether the loops merge.
    """
    analyzer, elements = Analyzer(), product(node.shape)
    fused_vars = {node.var, *(n.var for n in path)}
    for other in path:
        if other.pattern > LoopPattern.INJECTIVE:
            return f"{other.var.name} is {other.pattern.name}, an epilogue must be elementwise"
        count = product(other.shape)
        if count is not elements and not analyzer.can_prove_equal(count, elements):
            return f"{other.var.name} has another shape than {node.var.name}"
        checked_buffers = {load.buffer for s in top_stages(other.program) if isinstance(s, Check) for load in loads(s)}
        if any(load.buffer in checked_buffers for load in loads_of(other, fused_vars)):
            return f"{other.var.name} checks its operand before its loops"
    return None


def loads_of(node: CallNode, variables: set[Var]) -> list[Load]:
    """Loads of a program from operands among these variables."""
    buffers = {b for b, arg in zip(node.program.inputs, node.call.args, strict=True) if arg in variables}
    return [load for load in loads(node.program.body) if load.buffer in buffers]


def refuse_injective(path: Sequence[CallNode], sink: CallNode) -> str | None:
    """Reason against inlining a value along `path` into `sink`, by the patterns of the programs."""
    for other in path:
        limit = LoopPattern.ROW if other is sink else LoopPattern.CONCAT
        if other.pattern > limit:
            return f"{other.var.name} is {other.pattern.name}"
    return None


def refuse_data_index(group: FusionGroup) -> str | None:
    """Reason against inlining an index that is loaded from data.

    The bounds check of the index encloses the store that uses the index: before a Select that would guard the access,
    and inside reduced loops, which then no longer match a reduction.
    """
    for node in group.nodes:
        if not _has_data_index(node.program):
            continue
        for other in _downstream(node, group):
            if _reads_under_condition(other, group):
                return f"{other.var.name} reads under a condition, {node.var.name} computes indices from data"
            if other.pattern >= LoopPattern.REDUCTION:
                return f"{other.var.name} is a reduction, {node.var.name} computes indices from data"
    return None


def _downstream(node: CallNode, group: FusionGroup) -> list[CallNode]:
    """Calls of the group that depend on the node."""
    dependents = dict.fromkeys([node])
    for other in group.nodes:  # in order of position
        if any(other in n.consumers for n in dependents):
            dependents[other] = None
    return list(dependents)[1:]


def _has_data_index(program: TensorProgram) -> bool:
    return any(isinstance(s, LetIndex) for s in walk_stmts(program.body))


def _reads_under_condition(node: CallNode, group: FusionGroup) -> bool:
    """Whether the call loads a result of the group only under the condition of a Select."""
    roots = [v for s in walk_stmts(node.program.body) for v in stmt_values(s)]
    certain = {(load.buffer, load.indices) for root in roots for load in _unconditional_loads(root)}
    return any((load.buffer, load.indices) not in certain for load in loads_of(node, {n.var for n in group.nodes}))


def _unconditional_loads(value: Value) -> Iterator[Load]:
    """Loads that happen for all conditions of Selects."""
    if isinstance(value, Load):
        yield value
    for child in (value.cond,) if isinstance(value, Select) else value_children(value):
        yield from _unconditional_loads(child)


# Costs


def inline_verdict(producer: CallNode, consumers: Sequence[CallNode], *, outputs: int = 1) -> FusionVerdict:
    """Decide whether to compute a producer's elements where they are read, instead of storing and loading them.

    Elements that several consumers read at the same index are computed once per output of their kernel.
    """
    elements = product(producer.shape)
    in_place = [c for c in consumers if _reads_in_place(c, producer)]
    evaluations = sum((_evaluations(c, producer) for c in consumers if c not in in_place), sym(0))
    evaluations = evaluations + elements * min(len(in_place), outputs)
    size = tensor_bytes(producer.shape, _dtype(producer))
    operations = max(sum(_operations(n.program) for n in producer.group.nodes) - READ_FLOPS, 0)
    figures = {"bytes_saved": size * 2, "flops_added": (evaluations - elements) * operations}
    parallel = [_parallel(n) for n in (producer, *consumers)]
    if evaluations is elements and all(p is parallel[0] for p in parallel):
        return FusionVerdict(True, "each element is computed once and never stored", figures)
    read = sum((_bytes(a) for a in producer.group.inputs), sym(0))
    separate = [KernelWork(elements * operations, read + size, parallel[0])]
    flops, bytes_moved = sym(0), sym(0)
    for c, iterations in zip(consumers, parallel[1:], strict=True):
        consumer_flops = _flops(c)
        other_bytes = sum((_bytes(a) for a in dict.fromkeys(c.call.args) if a is not producer.var), sym(0))
        other_bytes = other_bytes + tensor_bytes(c.shape, _dtype(c))
        separate.append(KernelWork(consumer_flops, other_bytes + size, iterations))
        flops, bytes_moved = flops + consumer_flops, bytes_moved + other_bytes
    merged = KernelWork(flops + evaluations * operations, bytes_moved + read, parallel[-1])
    if len(consumers) > 1:  # one kernel in any case: what counts is the producer
        separate = [separate[0], KernelWork(flops, bytes_moved + size, parallel[-1])]
    return compare_work(separate, merged, figures)


def rows_verdict(groups: Sequence[FusionGroup], merged: FusionGroup) -> FusionVerdict:
    """Decide whether row-wise reductions and the stages along their rows are faster as one row program."""
    separate = []
    for group in groups:
        anchors = [n for n in group.nodes if n.pattern >= LoopPattern.REDUCTION]
        flops = sum((_flops(n) for n in group.nodes), sym(0))
        separate.append(KernelWork(flops, _bytes_moved(group), _parallel(anchors[0] if anchors else group.nodes[-1])))
    anchor = next(n for n in merged.nodes if n.pattern >= LoopPattern.REDUCTION)
    fused = KernelWork(sum((w.flops for w in separate), sym(0)), _bytes_moved(merged), _parallel(anchor))
    bytes_saved = sum((w.bytes for w in separate), sym(0)) - fused.bytes
    return compare_work(separate, fused, {"bytes_saved": bytes_saved})


def loses_parallelism(node: CallNode) -> bool:
    """Whether fusion leaves the consumers of a call fewer independent iterations.

    A row program runs consumers row by row.
    """
    anchors = [n for n in node.group.nodes if n.pattern in (LoopPattern.REDUCTION, LoopPattern.ROW)]
    return bool(anchors) and _parallel(anchors[0]) is not product(node.shape)


def _bytes_moved(group: FusionGroup) -> SymExpr:
    """Bytes that a kernel reads and writes."""
    return sum((_bytes(x) for x in (*group.inputs, *(n.var for n in group.outputs))), sym(0))


def may_share_rows(group: FusionGroup) -> bool:
    """Whether a group may become a row program: only reductions, row programs and injective calls."""
    allowed = (LoopPattern.REDUCTION, LoopPattern.ROW)
    return all(
        (n.pattern <= LoopPattern.INJECTIVE or n.pattern in allowed) and not _has_data_index(n.program)
        for n in group.nodes
    )


def _dtype(node: CallNode) -> str:
    return node.call.ty.dtype if isinstance(node.call.ty, TensorType) else "float32"


def _bytes(arg: object) -> SymExpr:
    ty = getattr(arg, "ty", None)
    return tensor_bytes(ty.shape, ty.dtype) if isinstance(ty, TensorType) and ty.shape is not None else sym(0)


@lru_cache(maxsize=4096)
def _operations(program: TensorProgram) -> int:
    """Operations per element: FLOPs, and each load beyond the first."""
    return max(sum(stmt_flops(s) + len({(x.buffer, x.indices) for x in loads(s)}) - 1 for s in top_stages(program)), 0)


def _extent(loops: Sequence[Stmt], node: CallNode) -> SymExpr:
    symbols = dict(zip(node.program.symbols, node.call.sym_args, strict=True))
    return product(substitute(loop.extent, symbols) for loop in loops if isinstance(loop, For))


def _evaluations(consumer: CallNode, producer: CallNode) -> SymExpr:
    """Number of loads of the producer's elements by the consumer."""
    buffers = {b for b, a in zip(consumer.program.inputs, consumer.call.args, strict=True) if a is producer.var}
    total = sym(0)
    for stage in top_stages(consumer.program):
        rows = match_row_program(stage) if consumer.pattern == LoopPattern.ROW else None
        if rows is None:
            accesses = {(x.buffer, x.indices) for x in loads(stage) if x.buffer in buffers}
            enclosing = [s for s in walk_stmts(stage) if isinstance(s, For)] if accesses else []
        else:  # a row program reads a row once and stages it (merge_stages.py)
            accesses = {(x.buffer, x.indices) for x in rows.loads() if x.buffer in buffers}
            enclosing = [*rows.spatial, rows.final]
        total = total + _extent(enclosing, consumer) * len(accesses)
    return total


def _reads_in_place(consumer: CallNode, producer: CallNode) -> bool:
    """Whether each element of the consumer reads exactly the element of the producer at the same indices."""
    read = loads_of(consumer, {producer.var})
    if consumer.pattern > LoopPattern.INJECTIVE or product(consumer.shape) is not product(producer.shape):
        return False
    return all(load.indices == store.indices for store in stores(consumer.program.body) for load in read)


def _flops(node: CallNode) -> SymExpr:
    """FLOPs of a call: operations of each stage times its iterations."""
    total = sym(0)
    for stage in top_stages(node.program):
        enclosing = [s for s in walk_stmts(stage) if isinstance(s, For)]
        if match_row_program(stage) is not None:
            enclosing = [*enclosing[: len(match_row_program(stage).spatial)], enclosing[-1]]  # type: ignore[union-attr]
        total = total + _extent(enclosing, node) * stmt_flops(stage)
    return total


def _parallel(node: CallNode) -> SymExpr:
    """Number of independent iterations of a call."""
    if node.pattern < LoopPattern.REDUCTION:
        return product(node.shape)
    stage = top_stages(node.program)[-1]
    rows, reduction = match_row_program(stage), reduction_of(stage)
    loops = rows.spatial if rows is not None else reduction.spatial if reduction is not None else ()
    return _extent(loops, node)
