"""Operator fusion: group calls of tensor programs that become one kernel.

The call graph is walked in order. A call `u` may join its immediate post-dominator `v`, the first call through which
all of its uses flow, together with all calls on the paths between them, when the patterns of the programs allow:

    epilogue    u is a reduction, ROW or OUT_FUSIBLE, all others are elementwise over the output shape of u
    injective   u and the path are at most CONCAT, v is at most ROW
    rows        all are reductions of rows, row programs, or elementwise along the same rows or once per row

Reshapes take part: between two programs a reshape becomes a change of indices, at the edge of a group it stays a view.
Then groups join that share work but not a post-dominator; their kernels have several outputs:

    output      v reads element by element what u computes and others use too
    siblings    u and v compute tensors of one shape from the same operand

Each group becomes a Function with the attribute `composite`; its last parameter is a shape that carries the symbols.
fuse_programs.py then merges the loops. rules.py decides legality and cost.py profitability. Every decision, for or
against, is recorded with its reason and its amounts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from relaxlite.ir.expr import Binding, Block, Body, Call, GlobalVar, Let, ShapeValue, Var
from relaxlite.ir.layout import flat_offset
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.program import Allocate, Load, TensorProgram
from relaxlite.ir.program_visitor import loads, stores
from relaxlite.ir.symbolic import Division, SymExpr, product, sym
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import Rewriter
from relaxlite.passes.context import PassContext
from relaxlite.passes.fuse.call_graph import (
    CallNode,
    FusionGroup,
    build_call_graph,
    call_bindings,
    composite_function,
    join_groups,
    nodes_between,
    set_post_dominators,
)
from relaxlite.passes.fuse.cost import FusionVerdict, tensor_bytes
from relaxlite.passes.fuse.fuse_programs import merge_composite
from relaxlite.passes.fuse.merge_stages import CannotMerge
from relaxlite.passes.fuse.rules import (
    inline_verdict,
    loads_of,
    loses_parallelism,
    may_share_rows,
    refuse_data_index,
    refuse_epilogue,
    refuse_injective,
    rows_verdict,
)
from relaxlite.passes.loops.access import coefficient
from relaxlite.passes.loops.legalize import ProgramTable, lower_call
from relaxlite.passes.loops.pattern import LoopPattern, analyze, perfect_nest, top_stages

MAX_GROUP = 40  # calls in one kernel: bounds the code size
MAX_KERNEL_TENSORS = 16  # tensors that a kernel of several outputs accesses in one loop


def fuse_ops(module: IRModule, context: PassContext) -> IRModule:
    """Group calls of tensor programs that become one kernel into composite functions."""
    definitions: dict[str, Definition] = dict(module)
    patterns = {name: analyze(program) for name, program in module.programs().items()}
    table = ProgramTable(definitions)
    for name, function in module.functions().items():
        definitions[name] = _FuseFunction(patterns, definitions, table, context).function(function)
    return module.updated(definitions)


class _FuseFunction(Rewriter):
    def __init__(
        self,
        patterns: dict[str, LoopPattern],
        definitions: dict[str, Definition],
        table: ProgramTable,
        context: PassContext,
    ) -> None:
        super().__init__()
        self._patterns, self._definitions, self._table, self._context = patterns, definitions, table, context
        # Cached, as layers repeat: verdicts by structural key, with the names that a reason may mention; and reshapes.
        self._trials: dict[object, tuple[FusionVerdict | None, list[str]]] = {}
        self._views: dict[object, tuple[GlobalVar, TensorProgram, LoopPattern]] = {}

    def body(self, body: Body) -> Body:
        nodes = build_call_graph(body, self._make_node)
        set_post_dominators(nodes)
        for epilogue in (True, False):
            for node in nodes:
                self._fuse_into_post_dominator(node, epilogue)
        for group in _groups(nodes):
            _trim_views(group)
        self._join_outputs(nodes)
        groups = [g for g in _groups(nodes) if len(g.nodes) > 1]
        if not groups:
            return super().body(body)
        self.changed = True
        inner = {n.var for g in groups for n in g.nodes}
        placed = [(float(k), [b]) for k, b in enumerate(body.bindings()) if b.var not in inner]
        placed += [(g.place, call_bindings(g, self._define(g))) for g in groups]
        bindings = tuple(b for _, group_bindings in sorted(placed, key=lambda item: item[0]) for b in group_bindings)
        return super().body(Body((Block(bindings, is_dataflow=False),), body.result))

    def _make_node(self, position: int, binding: Binding) -> CallNode | None:
        value = binding.value if isinstance(binding, Let) else None
        if not isinstance(value, Call) or not isinstance(value.ty, TensorType) or value.ty.shape is None:
            return None
        if isinstance(value.callee, Op) and value.callee.name == "reshape":
            return self._make_view_node(position, binding.var, value)
        program = self._definitions.get(value.callee.name) if isinstance(value.callee, GlobalVar) else None
        if not isinstance(program, TensorProgram):
            return None
        return CallNode(position, binding.var, value, program, self._patterns[value.callee.name])

    def _make_view_node(self, position: int, var: Var, call: Call) -> CallNode | None:
        """Node of a reshape, lowered to a program that copies."""
        source = call.args[0]
        if not isinstance(source, Var) or not isinstance(source.ty, TensorType) or source.ty.shape is None:
            return None
        key = source.ty, call.ty, *(arg.values if isinstance(arg, ShapeValue) else arg.ty for arg in call.args)
        if key not in self._views:
            program, _ = lower_call(call)
            self._views[key] = self._table.add("reshape", program), program, analyze(program)
        callee, program, pattern = self._views[key]
        result = Call(callee, (source,), sym_args=program.symbols, ty=call.ty, loc=call.loc)
        return CallNode(position, var, result, program, pattern, is_view=True)

    # One output

    def _fuse_into_post_dominator(self, node: CallNode, epilogue: bool) -> None:
        """Join a node with its post-dominator where that is legal and pays."""
        sink = node.parent
        if sink is None or node.pattern == LoopPattern.OPAQUE or node.group is sink.group:
            return
        if epilogue != (node.pattern >= LoopPattern.REDUCTION):
            return
        path = nodes_between(node, sink)
        verdict = self._verdict(node, path, sink, epilogue)
        groups = list(dict.fromkeys(n.group for n in (node, *path)))
        merged = join_groups(groups)
        reason = _refuse_group(groups, merged)
        if verdict.taken and (reason is not None or isinstance(merged, str)):
            verdict = FusionVerdict(False, reason or str(merged))
        if verdict.taken and isinstance(merged, FusionGroup) and loses_parallelism(node):
            verdict = rows_verdict(groups, merged)
        if verdict.taken and isinstance(merged, FusionGroup) and _needs_trial(merged):
            verdict = self._try_to_merge(merged) or verdict
        elif not verdict.taken and isinstance(merged, FusionGroup) and node.group.has_anchor:
            verdict = self._as_row_program(groups, merged) or verdict
        if not (node.is_view and len(node.group.nodes) == 1):  # a view alone moves nothing
            self._context.decide(
                "fuse_ops", f"{node.var.name} into {sink.var.name}", verdict.taken, verdict.reason, **verdict.figures
            )
        if verdict.taken and isinstance(merged, FusionGroup):
            for n in merged.nodes:
                n.group = merged

    def _verdict(self, node: CallNode, path: list[CallNode], sink: CallNode, epilogue: bool) -> FusionVerdict:
        if not epilogue and sink.pattern == LoopPattern.OUT_FUSIBLE and path == [sink]:
            return FusionVerdict(
                False, f"{sink.var.name} is OUT_FUSIBLE: each tile of it would compute {node.var.name} anew"
            )
        reason = None if epilogue else refuse_injective(path, sink)
        if reason is None and node.group.has_anchor:
            reason = refuse_epilogue(node, path)
        if reason is not None:
            return FusionVerdict(False, reason)
        if node.group.has_anchor:
            size = tensor_bytes(node.shape, node.call.ty.dtype)  # type: ignore[union-attr]
            return FusionVerdict(True, "an epilogue of the reduction", {"bytes_saved": size * 2})
        figures: dict[str, SymExpr] = {}
        for n in (node, *(other for other in path if other is not sink)):
            verdict = inline_verdict(n, [c for c in n.consumers if c in path])
            if not verdict.taken:
                return FusionVerdict(
                    False, f"{verdict.reason} ({n.var.name} is computed where it is read)", verdict.figures
                )
            for name, amount in verdict.figures.items():
                figures[name] = figures.get(name, sym(0)) + amount
        return FusionVerdict(True, verdict.reason, figures)

    def _as_row_program(self, groups: list[FusionGroup], merged: FusionGroup) -> FusionVerdict | None:
        """Verdict on a group that may become a row program; None if the group cannot."""
        if len(merged.nodes) > MAX_GROUP or not may_share_rows(merged) or self._try_to_merge(merged) is not None:
            return None
        return rows_verdict(groups, merged)

    def _try_to_merge(self, group: FusionGroup) -> FusionVerdict | None:
        """Verdict against a group whose loops do not merge, or merge badly; None if they merge.

        Groups with the same structural key are tried once.
        """
        key, names = group.structural_key, group.names
        if key not in self._trials:
            self._trials[key] = self._trial(group), names
        refusal, tried_names = self._trials[key]
        if refusal is None or names == tried_names:
            return refusal
        renamed = dict(zip(tried_names, names, strict=True))
        return FusionVerdict(False, re.sub(r"[^\s,]+", lambda word: renamed.get(word[0], word[0]), refusal.reason))

    def _trial(self, group: FusionGroup) -> FusionVerdict | None:
        """Merge the loops of a group on trial; the verdict against the group, or None."""
        try:
            program = merge_composite(composite_function(group), self._definitions)
        except CannotMerge as reason:
            return FusionVerdict(False, str(reason))
        division = next((x for x in loads(program.body) if _divides(x)), None)
        if division is not None and any(n.is_view for n in group.nodes):
            return FusionVerdict(
                False, f"each element of {division.buffer.name} would be found by a division (reshape)"
            )
        strided = _find_strided_load(program) if program.num_outputs > 1 else None
        if strided is not None:
            return FusionVerdict(
                False, f"{strided.buffer.name} is read across its rows, which one output alone does in tiles"
            )
        return None

    # Several outputs

    def _join_outputs(self, nodes: list[CallNode]) -> None:
        """Join groups that read the same operands, and consumers that read an output element by element."""
        for node in nodes:
            for other in _siblings(node):
                if node.group is not other.group:
                    self._join(node, other, _shared_bytes(node.group, other.group), "siblings read the same operands")
        for node in nodes:
            if node in node.group.outputs and not node.is_view:
                for consumer in node.consumers:
                    if _may_read_output(node, consumer):
                        size = tensor_bytes(node.shape, node.call.ty.dtype)  # type: ignore[union-attr]
                        self._join(node, consumer, size, f"{node.var.name} is stored for others and not read again")

    def _join(self, node: CallNode, other: CallNode, bytes_saved: SymExpr, reason: str) -> None:
        """Join two groups into a kernel of several outputs where that is legal and pays."""
        groups = [node.group, other.group]
        merged = join_groups(groups)
        if isinstance(merged, FusionGroup) and len(merged.outputs) < 2:
            return  # one output: decided above
        obstacle = _refuse_group(groups, merged)
        if obstacle is None and isinstance(merged, FusionGroup) and node not in merged.outputs:
            verdict = inline_verdict(node, node.consumers, outputs=len(merged.outputs))
            reason, obstacle = verdict.reason, None if verdict.taken else verdict.reason
        if obstacle is None and isinstance(merged, FusionGroup):
            num_tensors = len(merged.inputs) + len(merged.outputs)
            if num_tensors > MAX_KERNEL_TENSORS:
                obstacle = f"{num_tensors} tensors would be gone through side by side, more than {MAX_KERNEL_TENSORS}"
            else:
                refusal = self._try_to_merge(merged)
                obstacle = None if refusal is None else refusal.reason
        subject = f"{node.var.name} with {other.var.name}"
        self._context.decide("fuse_ops", subject, obstacle is None, obstacle or reason, bytes_saved=bytes_saved)
        if obstacle is None and isinstance(merged, FusionGroup):
            for n in merged.nodes:
                n.group = merged

    # Definitions

    def _define(self, group: FusionGroup) -> GlobalVar:
        name = self._unique("fused_" + "_".join(_base_name(n.call) for n in group.nodes))
        self._definitions[name] = composite_function(group)
        return GlobalVar(name)

    def _unique(self, hint: str) -> str:
        hint = hint if len(hint) <= 60 else hint[:56] + "_etc"
        name, count = hint, 0
        while name in self._definitions:
            count += 1
            name = f"{hint}_{count}"
        return name


def _base_name(call: Call) -> str:
    name = call.callee.name
    stem, _, last = name.rpartition("_")
    return stem if stem and last.isdigit() else name


def _groups(nodes: list[CallNode]) -> list[FusionGroup]:
    return list(dict.fromkeys(n.group for n in nodes))


def _refuse_group(groups: list[FusionGroup], merged: FusionGroup | str) -> str | None:
    """Reason against joining groups into `merged`, or None."""
    if isinstance(merged, str):
        return merged
    if sum(g.has_anchor for g in groups) > 1:
        return "both sides hold a reduction"
    if len(merged.nodes) > MAX_GROUP:
        return f"the group would exceed {MAX_GROUP} calls"
    return refuse_data_index(merged)


def _needs_trial(group: FusionGroup) -> bool:
    """Whether only a trial tells if the loops merge.

    True where a call inside is a concatenation or a reshape, or follows a reduction in another order of elements.
    """
    anchors = [n.position for n in group.nodes if n.pattern >= LoopPattern.REDUCTION]
    followers = [n for n in group.nodes if any(n.position > p for p in anchors)]
    return any(n.is_view or (n.pattern == LoopPattern.CONCAT and n not in group.outputs) for n in group.nodes) or any(
        not _is_in_place(n, group) for n in followers
    )


def _is_in_place(node: CallNode, group: FusionGroup) -> bool:
    """Whether a call reads the results of its group at exactly the indices at which it writes."""
    group_vars = {n.var for n in group.nodes}
    written = [s.indices for s in stores(node.program.body)]
    return all([load.indices] == written for load in loads_of(node, group_vars))


def _find_strided_load(program: TensorProgram) -> Load | None:
    """A load with a stride other than 0 or 1 along the innermost loop of a nest; None if there is none."""
    for stage in top_stages(program):
        nest = perfect_nest(stage)
        if not nest.loops or isinstance(nest.body, Allocate):  # these have rows of their own
            continue
        for load in loads(nest.body):
            step = coefficient(flat_offset(load.buffer.shape, load.indices), nest.loops[-1].var)
            if step is not None and step is not sym(0) and step is not sym(1):
                return load
    return None


def _divides(load: Load) -> bool:
    """Whether the address of a load needs a division: the indices contain one that the flat offset keeps."""
    return any(map(_has_division, load.indices)) and _has_division(flat_offset(load.buffer.shape, load.indices))


def _has_division(expr: SymExpr) -> bool:
    return any(isinstance(atom, Division) for monomial, _ in expr.terms for atom in monomial)


def _trim_views(group: FusionGroup) -> None:
    """Remove reshapes at the edges of a group from the group: a view costs nothing."""
    while len(group.nodes) > 1:
        inside = set(group.nodes)
        edge = next((n for n in group.nodes if n.is_view and _is_edge(n, inside)), None)
        if edge is None:
            return
        group.nodes.remove(edge)
        group.place = group.nodes[-1].position
        edge.group = FusionGroup([edge], edge.position)


def _is_edge(node: CallNode, inside: set[CallNode]) -> bool:
    first = not inside.intersection(node.producers)
    last = not inside.intersection(node.consumers)
    return first or (last and all(len(p.consumers) == 1 and not p.external_uses for p in node.producers))


def _siblings(node: CallNode) -> Iterator[CallNode]:
    """Outputs of other elementwise groups that read an operand of this node and have its shape."""
    if not _is_elementwise_group(node.group) or node not in node.group.outputs:
        return
    for producer in node.producers:
        for other in producer.consumers:
            if other.position > node.position and _is_elementwise_group(other.group) and other in other.group.outputs:
                is_same = len(other.shape) == len(node.shape) and all(map(lambda a, b: a is b, other.shape, node.shape))
                if is_same and _shared_bytes(node.group, other.group) is not sym(0):
                    yield other


def _is_elementwise_group(group: FusionGroup) -> bool:
    return all(n.pattern < LoopPattern.CONCAT and not n.is_view for n in group.nodes)


def _shared_bytes(a: FusionGroup, b: FusionGroup) -> SymExpr:
    """Size in bytes of the operands that two groups both read, counting only operands as large as the result."""
    types = [x.ty for x in a.inputs if x in b.inputs]
    size = product(a.nodes[-1].shape)
    full_size = [t for t in types if isinstance(t, TensorType) and t.shape is not None and product(t.shape) is size]
    return sum((tensor_bytes(t.shape or (), t.dtype) for t in full_size), sym(0))


def _may_read_output(node: CallNode, consumer: CallNode) -> bool:
    """Whether the patterns allow a consumer in another group to run in the loops that compute the node."""
    if node.group is consumer.group or node.pattern == LoopPattern.OPAQUE:
        return False
    group, target = node.group, consumer.group
    if node is not group.outputs[-1] or any(n.pattern == LoopPattern.CONCAT for n in (*group.nodes, *target.nodes)):
        return False
    if group.has_anchor:
        return _is_elementwise_group(target) and refuse_epilogue(node, [consumer]) is None
    if not _is_elementwise_group(target) and not any(n.pattern == LoopPattern.ROW for n in target.nodes):
        return False
    return bool(loads_of(consumer, {node.var}))
