"""A function as a graph to draw: one node per binding, argument and result, with its operands.

Plain data. Tuples, their fields and renamed variables make no nodes. Constants are counted at the node that reads them.
A node `inside` another belongs to it: the bindings of the bodies of an If or Loop, and the calls fused into a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from typing import Any

from relaxlite.explain.fusion import FusedCall
from relaxlite.ir.attributes import INPUT_NAMES, OUTPUT_NAMES
from relaxlite.ir.expr import (
    Body,
    Call,
    Constant,
    ControlFlow,
    Expr,
    ExternFunction,
    Function,
    GlobalVar,
    If,
    Let,
    Loop,
    MatchShape,
    Tuple,
    TupleGetItem,
    Var,
)
from relaxlite.ir.module import IRModule
from relaxlite.ir.program import TensorProgram
from relaxlite.ir.symbolic import SymExpr, to_text
from relaxlite.ir.types import ShapeType, TensorType, TupleType, Type
from relaxlite.records import dataclass

VIEWS = frozenset({"reshape", "squeeze", "expand_dims", "flatten", "memory.view"})  # ops that move no data


@dataclass(slots=True)
class GraphNode:
    """Node of the graph.

    `what` names the op, kernel or kind of value; `kind` is input, output, op, view, kernel, library or control.
    """

    name: str
    what: str
    kind: str
    ty: str
    loc: str | None
    reads: tuple[int, ...]
    constants: int = 0
    inside: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The node as JSON data, without empty fields."""
        result: dict[str, Any] = {"name": self.name, "what": self.what, "kind": self.kind, "type": self.ty}
        optional = {"loc": self.loc, "reads": list(self.reads), "constants": self.constants, "inside": self.inside}
        return {
            **result,
            **{key: value for key, value in optional.items() if value or (value == 0 and key == "inside")},
        }


@dataclass(slots=True)
class Graph:
    """Nodes in order; operands refer to nodes by number."""

    nodes: list[GraphNode] = field(default_factory=list)

    def to_json(self) -> list[dict[str, Any]]:
        """The nodes as JSON data."""
        return [node.to_json() for node in self.nodes]


def graph_of(
    function: Function,
    module: IRModule,
    fused: dict[str, FusedCall] | None = None,
    text: Callable[[SymExpr], str] = to_text,
) -> Graph:
    """Build the graph of a function; `fused` holds the calls fused into a kernel, by the name of its result."""
    return _Drawing(module, fused or {}, text).build(function)


class _Drawing:
    """Builder of a graph."""

    def __init__(self, module: IRModule, fused: dict[str, FusedCall], text: Callable[[SymExpr], str]) -> None:
        self._module, self._fused, self._text = module, fused, text
        self._graph = Graph()
        self._sources_of: dict[Var, tuple[int, ...]] = {}  # nodes that define the value of a variable
        self._by_name: dict[str, int] = {}

    def build(self, function: Function) -> Graph:
        input_names = function.attrs.get(INPUT_NAMES)
        names = input_names if isinstance(input_names, tuple) else tuple(p.name for p in function.params)
        for param, name in zip(function.params, names, strict=True):
            self._sources_of[param] = (
                self._add(GraphNode(str(name), "input", "input", self._type(param.ty), None, ())),
            )
            self._by_name[param.name] = self._sources_of[param][0]
        result_expr = self._body(function.body, None)
        self._results(function, result_expr)
        return self._graph

    def _results(self, function: Function, result: Expr) -> None:
        fields = result.fields if isinstance(result, Tuple) else (result,)
        output_names = function.attrs.get(OUTPUT_NAMES)
        names = output_names if isinstance(output_names, tuple) else tuple(f"output_{k}" for k in range(len(fields)))
        for k, leaf in enumerate(fields):
            name = str(names[k]) if k < len(names) else f"output_{k}"
            self._add(GraphNode(name, "output", "output", self._type(leaf.ty), None, self._sources((leaf,))))

    def _body(self, body: Body, inside: int | None) -> Expr:
        for binding in body.bindings():
            self._binding(binding.var, binding, inside)
        return body.result

    def _binding(self, var: Var, binding: Let | MatchShape, inside: int | None) -> None:
        if isinstance(binding, MatchShape):
            reads = self._sources((binding.source,))
            node = GraphNode(var.name, "match_shape", "view", self._type(var.ty), binding.loc, reads, inside=inside)
            self._define(var, self._add(node))
            return
        value = binding.value
        if isinstance(value, ControlFlow):
            self._control(var, value, inside)
        elif isinstance(value, Call):
            self._call(var, value, inside)
        else:
            self._sources_of[var] = self._sources((value,))

    def _call(self, var: Var, call: Call, inside: int | None) -> None:
        kind = self._kind(call)
        reads, constants = self._sources(call.args), sum(isinstance(a, Constant) for a in call.args)
        ty, loc = self._type(call.ty), call.loc or var.loc
        at = self._add(GraphNode(var.name, call.callee.name, kind, ty, loc, reads, constants, inside))
        if kind == "kernel" and var.name in self._fused:
            self._members(at, self._fused[var.name])
        self._define(var, at)

    def _members(self, at: int, fused: FusedCall) -> None:
        """Add the calls inside a kernel as nodes; the last one represents the kernel when it is expanded."""
        member_nodes: dict[str, int] = {}
        for member in fused.members:
            reads = dict.fromkeys(member_nodes.get(name, self._by_name.get(name, -1)) for name in member.reads)
            operands = tuple(r for r in reads if r >= 0)
            node = GraphNode(
                member.name, member.what, "op", self._type(member.ty), member.loc, operands, member.constants, at
            )
            member_nodes[member.name] = self._add(node)

    def _control(self, var: Var, value: If | Loop, inside: int | None) -> None:
        is_if = isinstance(value, If)
        inputs: Sequence[Expr] = (value.cond,) if isinstance(value, If) else (*value.inits, value.cond)
        ty = self._type(value.ty)
        node = GraphNode(
            var.name, "if" if is_if else "loop", "control", ty, value.loc, self._sources(inputs), 0, inside
        )
        at = self._add(node)
        if isinstance(value, Loop):
            for param, init in zip(value.params, value.inits, strict=True):
                self._sources_of[param] = self._sources((init,))
        inner = (value.then_body, value.else_body) if isinstance(value, If) else (value.body,)
        for body in inner:
            self._body(body, at)
        self._define(var, at)

    def _kind(self, call: Call) -> str:
        if isinstance(call.callee, GlobalVar):
            callee = self._module.get(call.callee.name)
            if isinstance(callee, TensorProgram):
                return "kernel"
            return "library" if isinstance(callee, ExternFunction) else "op"
        return "view" if call.callee.name in VIEWS else "op"

    def _define(self, var: Var, at: int) -> None:
        self._sources_of[var] = (at,)
        self._by_name[var.name] = at

    def _add(self, node: GraphNode) -> int:
        self._graph.nodes.append(node)
        return len(self._graph.nodes) - 1

    def _sources(self, exprs: Iterable[Expr]) -> tuple[int, ...]:
        roots: dict[int, None] = {}
        for expr in exprs:
            if isinstance(expr, Var):
                roots.update(dict.fromkeys(self._sources_of.get(expr, ())))
            elif isinstance(expr, Tuple):
                roots.update(dict.fromkeys(self._sources(expr.fields)))
            elif isinstance(expr, TupleGetItem):
                roots.update(dict.fromkeys(self._sources((expr.value,))))
        return tuple(roots)

    def _type(self, ty: Type) -> str:
        return type_text(ty, self._text)


def type_text(ty: Type, text: Callable[[SymExpr], str] = to_text) -> str:
    """A type as short text: "float32[batch, 384]"."""
    if isinstance(ty, TensorType):
        dims = "?" if ty.shape is None else ", ".join(map(text, ty.shape))
        return f"{ty.dtype}[{dims}]"
    if isinstance(ty, ShapeType):
        return "shape" if ty.values is None else f"shape({', '.join(map(text, ty.values))})"
    if isinstance(ty, TupleType):
        return f"({', '.join(type_text(f, text) for f in ty.fields)})"
    return "object"
