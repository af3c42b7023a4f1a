"""Converter of If, whose outputs may be sequences, optionals and of narrow types."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnx import GraphProto, ValueInfoProto

from relaxlite.forms import inner, part_names
from relaxlite.frontend.common.control_flow import RankConflict
from relaxlite.frontend.onnx.border import as_optional, declared_element, declared_form
from relaxlite.frontend.onnx.narrow_types import NarrowType
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.frontend.onnx.sequences import leaves, rebuilt, to_ragged
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr, Tuple


def scalar(n: Node, x: Expr) -> Expr:
    """Return a tensor of one element as a scalar."""
    return x if not n.shape_of(x) else n.emit(ops.reshape(x, ()))


@onnx_op("If")
def if_op(n: Node) -> Result:
    """If; a condition that is known at compile time selects its branch at import."""
    branches = [n.graph("then_branch"), n.graph("else_branch")]
    for graph in branches:
        if len(graph.output) < n.num_outputs:
            n.fail(f"branch '{graph.name}' has {len(graph.output)} outputs, but the node has {n.num_outputs}")
    known = n.const(0)
    if known is not None:
        chosen = branches[0] if bool(known.reshape(-1)[0]) else branches[1]
        return tuple(n.importer.subgraph(chosen, [], n.label))
    bodies = [lambda g=graph: n.importer.subgraph(g, [], n.label)[: n.num_outputs] for graph in branches]
    cond = scalar(n, n.input(0))
    try:
        return tuple(_branch(n, cond, bodies, branches))
    except RankConflict as conflict:
        return tuple(_assumed_branch(n, cond, bodies, str(conflict)))


_Bodies = Sequence[Callable[[], list[Expr]]]


def _branch(n: Node, cond: Expr, bodies: _Bodies, graphs: Sequence[GraphProto]) -> list[Expr]:
    common = _CommonOutputs(n, [graph.output for graph in graphs])
    flat = [lambda k=k, body=body: common.leaves(k, body()) for k, body in enumerate(bodies)]
    names = [name or f"{n.op_type}_{k}" for k, name in enumerate(n.proto.output)]
    labels = [label for name, kind in zip(names, common.kinds, strict=True) for label in part_names(name, kind)]
    return common.values(n.importer.flow.branch(cond, flat, labels))


class _CommonOutputs:
    """The outputs of an If's branches as tensors: sequences and optionals are those that either branch declares."""

    def __init__(self, n: Node, infos: Sequence[Sequence[ValueInfoProto]]) -> None:
        self._n, self._infos = n, infos
        columns = zip(*(list(outputs)[: n.num_outputs] for outputs in infos), strict=True)
        self.kinds = [max(declared_form(info.type) if _is_nested(info) else "" for info in pair) for pair in columns]
        self._templates: list[Expr] = []
        self._narrow: list[NarrowType | None] = [None] * n.num_outputs

    def leaves(self, branch: int, values: Sequence[Expr]) -> list[Expr]:
        """Return the tensors that the outputs of a branch stand in."""
        marks = [self._n.importer.narrow.get(x) for x in values]
        self._narrow = [old or new for old, new in zip(self._narrow, marks, strict=True)]
        self._templates = [self._converted(branch, k, x) for k, x in enumerate(values)]
        return [leaf for x in self._templates for leaf in leaves(x)]

    def _converted(self, branch: int, k: int, value: Expr) -> Expr:
        kind, ty, bb = inner(self.kinds[k])[0], self._infos[branch][k].type, self._n.bb
        if kind == "optional":
            return as_optional(bb, value, ty.optional_type.elem_type if ty.HasField("optional_type") else ty)
        if kind == "sequence":
            return to_ragged(bb, value, declared_element(ty))
        if isinstance(value, Tuple):
            self._n.fail(f"output {k} is a sequence or optional, but neither branch declares its type")
        return value

    def values(self, parts: Sequence[Expr]) -> list[Expr]:
        """Return the outputs of the If from the tensors that they stand in."""
        rest, results = list(parts), list[Expr]()
        for template, narrow in zip(self._templates, self._narrow, strict=True):
            results.append(rebuilt(template, [rest.pop(0) for _ in leaves(template)]))
            mark(self._n, results[-1], narrow)
        return results


def _is_nested(info: ValueInfoProto) -> bool:
    return info.type.WhichOneof("value") in ("sequence_type", "optional_type")


def mark(n: Node, value: Expr, narrow: NarrowType | None) -> None:
    """Record the narrow type of a value, if it has one."""
    if narrow is not None:
        n.importer.narrow[value] = narrow


def _assumed_branch(n: Node, cond: Expr, bodies: Sequence[Callable[[], list[Expr]]], why: str) -> list[Expr]:
    """Convert one branch in place of an If whose outputs differ in rank, with a run-time check of the condition."""
    takes_then = n.importer.model.assumptions.assume(n.bb.loc or n.label, f"the condition, for {why}")
    assumed = str(takes_then).lower()
    n.check_assumption(
        cond, takes_then, f"its condition is {str(not takes_then).lower()}, but taken to be {assumed}: {why}"
    )
    return bodies[0 if takes_then else 1]()
