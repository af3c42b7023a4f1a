"""When calls may become one kernel, and whether that pays.

A rule gives the reason against merging, or None. What is legal, cost.py weighs.
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
from relaxlite.passes.fuse.call_graph import Group, Node
from relaxlite.passes.fuse.cost import Verdict, Work, tensor_bytes, weigh
from relaxlite.passes.loops.pattern import LoopPattern, reduction_of, top_stages
from relaxlite.passes.loops.row_program import match_row_program

READ_FLOPS = 4  # operations that cost no more than finding and reading a stored element

# Legality


def refuse_epilogue(node: Node, path: Sequence[Node]) -> str | None:
    """What follows a reduction runs in its loops, element by element; those of a reshape are the same in another order.
    Whether the loops merge is left to merge_stages.py to try."""
    analyzer, elements = Analyzer(), product(node.shape)
    inside = {node.var, *(n.var for n in path)}
    for other in path:
        if other.pattern > LoopPattern.INJECTIVE:
            return f"{other.var.name} is {other.pattern.name}, an epilogue must be elementwise"
        count = product(other.shape)
        if count is not elements and not analyzer.can_prove_equal(count, elements):
            return f"{other.var.name} has another shape than {node.var.name}"
        checked = {load.buffer for s in top_stages(other.program) if isinstance(s, Check) for load in loads(s)}
        if any(load.buffer in checked for load in loads_of(other, inside)):
            return f"{other.var.name} checks its operand before its loops"
    return None


def loads_of(node: Node, variables: set[Var]) -> list[Load]:
    """The loads of a program that read an operand among these variables."""
    buffers = {b for b, arg in zip(node.program.inputs, node.call.args, strict=True) if arg in variables}
    return [load for load in loads(node.program.body) if load.buffer in buffers]


def refuse_injective(path: Sequence[Node], sink: Node) -> str | None:
    """What may stand between a value that is inlined and where it ends up."""
    for other in path:
        limit = LoopPattern.ROW if other is sink else LoopPattern.CONCAT
        if other.pattern > limit:
            return f"{other.var.name} is {other.pattern.name}"
    return None


def refuse_data_index(group: Group) -> str | None:
    """An inlined index from data is bound, and checked, round the store that needs it: in front of what would guard it
    in a Select, and inside the reduced loops, which are then no plain reduction any more."""
    for node in group.nodes:
        if not _has_data_index(node.program):
            continue
        for other in _downstream(node, group):
            if _reads_under_condition(other, group):
                return f"{other.var.name} reads under a condition, {node.var.name} computes indices from data"
            if other.pattern >= LoopPattern.REDUCTION:
                return f"{other.var.name} is a reduction, {node.var.name} computes indices from data"
    return None


def _downstream(node: Node, group: Group) -> list[Node]:
    """Every call of the group that depends on the node."""
    result = dict.fromkeys([node])
    for other in group.nodes:  # in order of position
        if any(other in n.consumers for n in result):
            result[other] = None
    return list(result)[1:]


def _has_data_index(program: TensorProgram) -> bool:
    return any(isinstance(s, LetIndex) for s in walk_stmts(program.body))


def _reads_under_condition(node: Node, group: Group) -> bool:
    """Whether a Select decides if the call reads some element of another call of the group at all."""
    roots = [v for s in walk_stmts(node.program.body) for v in stmt_values(s)]
    certain = {(load.buffer, load.indices) for root in roots for load in _certain_loads(root)}
    return any((load.buffer, load.indices) not in certain for load in loads_of(node, {n.var for n in group.nodes}))


def _certain_loads(value: Value) -> Iterator[Load]:
    """The loads that happen whatever the Selects say."""
    if isinstance(value, Load):
        yield value
    for child in (value.cond,) if isinstance(value, Select) else value_children(value):
        yield from _certain_loads(child)


# Costs


def inline_verdict(producer: Node, consumers: Sequence[Node], *, outputs: int = 1) -> Verdict:
    """Whether the elements of a producer are computed where they are read, instead of stored and read again; those that
    several consumers read at one place once for each output of their kernel."""
    elements = product(producer.shape)
    in_place = [c for c in consumers if _reads_in_place(c, producer)]
    evaluations = sum((_evaluations(c, producer) for c in consumers if c not in in_place), sym(0))
    evaluations = evaluations + elements * min(len(in_place), outputs)
    size = tensor_bytes(producer.shape, _dtype(producer))
    operations = max(sum(_operations(n.program) for n in producer.group.nodes) - READ_FLOPS, 0)
    figures = {"bytes_saved": size * 2, "flops_added": (evaluations - elements) * operations}
    parallel = [_parallel(n) for n in (producer, *consumers)]
    if evaluations is elements and all(p is parallel[0] for p in parallel):
        return Verdict(True, "each element is computed once and never stored", figures)
    read = sum((_bytes(a) for a in producer.group.inputs), sym(0))
    apart = [Work(elements * operations, read + size, parallel[0])]
    flops, moved = sym(0), sym(0)
    for c, par in zip(consumers, parallel[1:], strict=True):
        own = _flops(c)
        others = sum((_bytes(a) for a in dict.fromkeys(c.call.args) if a is not producer.var), sym(0))
        others = others + tensor_bytes(c.shape, _dtype(c))
        apart.append(Work(own, others + size, par))
        flops, moved = flops + own, moved + others
    merged = Work(flops + evaluations * operations, moved + read, parallel[-1])
    if len(consumers) > 1:  # one kernel in any case: what counts is the producer
        apart = [apart[0], Work(flops, moved + size, parallel[-1])]
    return weigh(apart, merged, figures)


def rows_verdict(groups: Sequence[Group], merged: Group) -> Verdict:
    """Whether reductions of rows, and what is read along them, are faster row by row in one kernel."""
    apart = []
    for group in groups:
        anchors = [n for n in group.nodes if n.pattern >= LoopPattern.REDUCTION]
        flops = sum((_flops(n) for n in group.nodes), sym(0))
        apart.append(Work(flops, _moved(group), _parallel(anchors[0] if anchors else group.nodes[-1])))
    anchor = next(n for n in merged.nodes if n.pattern >= LoopPattern.REDUCTION)
    together = Work(sum((w.flops for w in apart), sym(0)), _moved(merged), _parallel(anchor))
    saved = sum((w.bytes for w in apart), sym(0)) - together.bytes
    return weigh(apart, together, {"bytes_saved": saved})


def loses_threads(node: Node) -> bool:
    """Whether what follows a call in its group's kernel runs in fewer independent iterations than on its own: row by
    row, where the group holds a row program."""
    anchors = [n for n in node.group.nodes if n.pattern in (LoopPattern.REDUCTION, LoopPattern.ROW)]
    return bool(anchors) and _parallel(anchors[0]) is not product(node.shape)


def _moved(group: Group) -> SymExpr:
    """The bytes that a kernel reads and writes."""
    return sum((_bytes(x) for x in (*group.inputs, *(n.var for n in group.outs))), sym(0))


def may_share_rows(group: Group) -> bool:
    """Whether a group could be a row program: nothing in it but reductions, row programs and elementwise calls."""
    allowed = (LoopPattern.REDUCTION, LoopPattern.ROW)
    return all(
        (n.pattern <= LoopPattern.INJECTIVE or n.pattern in allowed) and not _has_data_index(n.program)
        for n in group.nodes
    )


def _dtype(node: Node) -> str:
    return node.call.ty.dtype if isinstance(node.call.ty, TensorType) else "float32"


def _bytes(arg: object) -> SymExpr:
    ty = getattr(arg, "ty", None)
    return tensor_bytes(ty.shape, ty.dtype) if isinstance(ty, TensorType) and ty.shape is not None else sym(0)


@lru_cache(maxsize=4096)
def _operations(program: TensorProgram) -> int:
    """Of one element: FLOPs, and each load beyond the first."""
    return max(sum(stmt_flops(s) + len({(x.buffer, x.indices) for x in loads(s)}) - 1 for s in top_stages(program)), 0)


def _extent(loops: Sequence[Stmt], node: Node) -> SymExpr:
    symbols = dict(zip(node.program.symbols, node.call.sym_args, strict=True))
    return product(substitute(loop.extent, symbols) for loop in loops if isinstance(loop, For))


def _evaluations(consumer: Node, producer: Node) -> SymExpr:
    """How often the consumer reads elements of the producer."""
    buffers = {b for b, a in zip(consumer.program.inputs, consumer.call.args, strict=True) if a is producer.var}
    total = sym(0)
    for stage in top_stages(consumer.program):
        rows = match_row_program(stage) if consumer.pattern == LoopPattern.ROW else None
        if rows is None:
            read = {(x.buffer, x.indices) for x in loads(stage) if x.buffer in buffers}
            around = [s for s in walk_stmts(stage) if isinstance(s, For)] if read else []
        else:  # its stages read the row once: the first one keeps it for the others (merge_stages)
            read = {(x.buffer, x.indices) for x in rows.loads() if x.buffer in buffers}
            around = [*rows.spatial, rows.final]
        total = total + _extent(around, consumer) * len(read)
    return total


def _reads_in_place(consumer: Node, producer: Node) -> bool:
    """Whether each element of the consumer needs the same element of the producer, and no other."""
    read = loads_of(consumer, {producer.var})
    if consumer.pattern > LoopPattern.INJECTIVE or product(consumer.shape) is not product(producer.shape):
        return False
    return all(load.indices == store.indices for store in stores(consumer.program.body) for load in read)


def _flops(node: Node) -> SymExpr:
    """What a call computes: the operations of each stage, as often as its loops run."""
    total = sym(0)
    for stage in top_stages(node.program):
        around = [s for s in walk_stmts(stage) if isinstance(s, For)]
        if match_row_program(stage) is not None:
            around = [*around[: len(match_row_program(stage).spatial)], around[-1]]  # type: ignore[union-attr]
        total = total + _extent(around, node) * stmt_flops(stage)
    return total


def _parallel(node: Node) -> SymExpr:
    """How many iterations of a call are independent of each other."""
    if node.pattern < LoopPattern.REDUCTION:
        return product(node.shape)
    stage = top_stages(node.program)[-1]
    rows, reduction = match_row_program(stage), reduction_of(stage)
    loops = rows.spatial if rows is not None else reduction.spatial if reduction is not None else ()
    return _extent(loops, node)
