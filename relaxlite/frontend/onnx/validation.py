"""What must hold before a graph can be walked: unique names, definitions before uses, known opsets and operators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any

import onnx
from onnx import AttributeProto, GraphProto, NodeProto

from relaxlite.errors import ImportModelError, UnsupportedOpsError
from relaxlite.frontend.onnx.registry import canonical_domain, find_converter
from relaxlite.records import dataclass

Opsets = Mapping[str, int]
FunctionKey = tuple[str, str, str]
Functions = Mapping[FunctionKey, onnx.FunctionProto]

NEWEST_OPSET = 28  # of the standard domain, that the converters were checked against


def opset_versions(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    return {canonical_domain(entry.domain): entry.version for entry in imports}


def function_key(item: onnx.FunctionProto | NodeProto) -> FunctionKey:
    """What a node and the function that it calls have in common; `overload` exists since IR version 10."""
    name = item.op_type if isinstance(item, NodeProto) else item.name
    return canonical_domain(item.domain), name, getattr(item, "overload", "")


def check_opsets(opsets: Opsets) -> None:
    version = opsets.get("")
    if version is not None and not 1 <= version <= NEWEST_OPSET:
        raise ImportModelError(
            f"the model uses opset {version} of ONNX; relaxlite knows 1 to {NEWEST_OPSET}: export it with one of these"
        )


def node_label(node: NodeProto, index: int) -> str:
    """How messages and source locations name a node."""
    return f"ONNX node '{node.name}' ({node.op_type})" if node.name else f"ONNX node #{index} ({node.op_type})"


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def names_read(graph: GraphProto) -> set[str]:
    """Every name that a node of the graph, or of a graph inside it, takes as input."""
    return names_read_by(graph.node)


def names_read_by(nodes: Iterable[NodeProto]) -> set[str]:
    found: set[str] = set()
    for node in nodes:
        found.update(node.input)
        for sub in subgraphs(node):
            found |= names_read(sub) | {o.name for o in sub.output}
    return found


# Names


def check_graph(graph: GraphProto, outer: frozenset[str] = frozenset()) -> None:
    """Every name is defined once, and before it is used."""
    defined = _given_names(graph)
    later: dict[str, int] = {}
    for index, node in enumerate(graph.node):
        for output in filter(None, node.output):
            if output in defined or output in later:
                raise ImportModelError(f"{node_label(node, index)} defines '{output}', which is already defined")
            later[output] = index
    known = set(outer) | defined
    for index, node in enumerate(graph.node):
        for name in filter(None, node.input):
            if name not in known:
                _raise_undefined(graph, later, index, name)
        for sub in subgraphs(node):
            check_graph(sub, frozenset(known))
        known.update(filter(None, node.output))
    for output in graph.output:
        if output.name not in known:
            raise ImportModelError(f"output '{output.name}' of graph '{graph.name}' is not computed by any node")


def _given_names(graph: GraphProto) -> set[str]:
    """Inputs and initializers; an initializer may also be listed as an input."""
    inputs = _unique([i.name for i in graph.input], "input")
    names = [t.name for t in graph.initializer] + [s.values.name for s in graph.sparse_initializer]
    _unique([o.name for o in graph.output], "output")
    return inputs | _unique(names, "initializer")


def _unique(names: list[str], what: str) -> set[str]:
    seen: set[str] = set()
    for name in names:
        if not name:
            raise ImportModelError(f"an {what} of the graph has no name")
        if name in seen and what != "output":
            raise ImportModelError(f"the graph has two {what}s named '{name}'")
        seen.add(name)
    return seen


def _raise_undefined(graph: GraphProto, defined_by: Mapping[str, int], index: int, name: str) -> None:
    label = node_label(graph.node[index], index)
    if name not in defined_by:
        raise ImportModelError(f"{label} uses '{name}', which no input, initializer or node defines")
    source = defined_by[name]
    if _reaches(graph, defined_by, source, index):
        raise ImportModelError(f"the graph is cyclic: {label} uses '{name}', which is computed from its own output")
    raise ImportModelError(
        f"{label} uses '{name}' before {node_label(graph.node[source], source)} defines it; "
        "the nodes of an ONNX graph must stand in the order of computation"
    )


def _reaches(graph: GraphProto, defined_by: Mapping[str, int], start: int, goal: int) -> bool:
    """Whether node `start` depends on node `goal`."""
    stack, seen = [start], set()
    while stack:
        index = stack.pop()
        if index == goal:
            return True
        if index in seen:
            continue
        seen.add(index)
        stack.extend(defined_by[name] for name in graph.node[index].input if name in defined_by)
    return False


# Operators


@dataclass
class _Unknown:
    count: int = 0
    first: str = ""
    reason: str = ""


@dataclass
class OpSurvey:
    """Walks a graph with its subgraphs and functions, and collects the ops that cannot be converted."""

    functions: Functions
    unknown: dict[tuple[str, str], _Unknown] = field(default_factory=dict)
    _visited: set[FunctionKey] = field(default_factory=set)

    def visit(self, nodes: Iterable[NodeProto], opsets: Opsets) -> None:
        for index, node in enumerate(nodes):
            self._visit_node(node, index, opsets)
            for sub in subgraphs(node):
                self.visit(sub.node, opsets)

    def _visit_node(self, node: NodeProto, index: int, opsets: Opsets) -> None:
        domain, key = canonical_domain(node.domain), function_key(node)
        function = self.functions.get(key)
        if function is not None:
            if key not in self._visited:
                self._visited.add(key)
                self.visit(function.node, {**opsets, **opset_versions(function.opset_import)})
            return
        version = opsets.get(domain)
        if version is None and domain == "":
            raise ImportModelError(f"{node_label(node, index)}: the model does not say which opset of ONNX it uses")
        if find_converter(domain, node.op_type, version or 1) or schema_of(domain, node.op_type, version or 1):
            return
        found = self.unknown.setdefault((domain, node.op_type), _Unknown(first=node_label(node, index)))
        found.count += 1

    def raise_if_any(self) -> None:
        if not self.unknown:
            return
        lines = [
            f"  {domain or 'ai.onnx'}.{name}: {entry.count} node{'s' * (entry.count > 1)}, the first is {entry.first}"
            for (domain, name), entry in sorted(self.unknown.items())
        ]
        raise UnsupportedOpsError(
            f"the model uses {len(lines)} {'op' if len(lines) == 1 else 'ops'} that relaxlite does not know:\n"
            + "\n".join(lines)
            + "\nAn op can be added from outside: decorate a converter function with "
            + "relaxlite.frontend.onnx.onnx_op(name, since=..., domain=...)"
        )


def schema_of(domain: str, name: str, version: int) -> Any:
    """The schema of an op that is defined by a function body, or None."""
    if not onnx.defs.has(name, version, domain):
        return None
    schema: Any = onnx.defs.get_schema(name, version, domain)
    return schema if schema.has_function or schema.has_context_dependent_function else None
