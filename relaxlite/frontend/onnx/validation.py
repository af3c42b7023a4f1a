"""Checks of an ONNX graph before its conversion: unique names, no cycles, known opset versions and ops."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cache
from typing import Any, NoReturn

import onnx
from onnx import AttributeProto, GraphProto, NodeProto

from relaxlite.errors import ImportModelError, UnsupportedOpsError
from relaxlite.frontend.onnx.registry import canonical_domain, find_converter
from relaxlite.records import dataclass

Opsets = Mapping[str, int]
FunctionKey = tuple[str, str, str]
Functions = Mapping[FunctionKey, onnx.FunctionProto]

NEWEST_OPSET = 28  # of the standard domain: the newest version that the converters were checked against


def opset_versions(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """Return the opset version of each domain, by the domain's canonical name."""
    return {canonical_domain(entry.domain): entry.version for entry in imports}


def function_key(item: onnx.FunctionProto | NodeProto) -> FunctionKey:
    """Return the key that a function and the nodes that call it share; `overload` exists since IR version 10."""
    name = item.op_type if isinstance(item, NodeProto) else item.name
    return canonical_domain(item.domain), name, getattr(item, "overload", "")


def check_opsets(opsets: Opsets) -> None:
    """Raise ImportModelError if the version of the standard domain is not supported."""
    version = opsets.get("")
    if version is not None and not 1 <= version <= NEWEST_OPSET:
        raise ImportModelError(
            f"the model uses opset {version} of ONNX; relaxlite knows 1 to {NEWEST_OPSET}: export it with one of these"
        )


def node_label(node: NodeProto, index: int) -> str:
    """Return the name of a node in messages and source locations."""
    return f"ONNX node '{node.name}' ({node.op_type})" if node.name else f"ONNX node #{index} ({node.op_type})"


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the graphs in a node's attributes, such as the body of a Loop."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def names_read(graph: GraphProto) -> set[str]:
    """Return every name that nodes of the graph, or of nested graphs, read."""
    return names_read_by(graph.node)


def names_read_by(nodes: Iterable[NodeProto]) -> set[str]:
    """Return every name that these nodes, or nodes of their subgraphs, read."""
    names: set[str] = set()
    for node in nodes:
        names.update(node.input)
        for sub in subgraphs(node):
            names |= names_read(sub) | {o.name for o in sub.output}
    return names


def _free_names(node: NodeProto) -> set[str]:
    """Return the names that a node reads from its enclosing scopes, as inputs or in its subgraphs."""
    free = set(filter(None, node.input))
    for sub in subgraphs(node):
        defined = {i.name for i in sub.input} | {t.name for t in sub.initializer}
        defined |= {s.values.name for s in sub.sparse_initializer}
        read = {o.name for o in sub.output}
        for inner in sub.node:
            read |= _free_names(inner)
            defined.update(inner.output)
        free |= read - defined
    return free


# The order of nodes


def topological_order(nodes: Sequence[NodeProto], is_known: Callable[[str], bool]) -> list[tuple[int, NodeProto]]:
    """Return the nodes, each with its index in the graph, in topological order; a valid order is not changed.

    is_known: whether an enclosing scope defines a name. Raises ImportModelError for a cycle.
    """
    defined_by: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in filter(None, node.output):
            if not is_known(name):
                defined_by.setdefault(name, index)
    dependencies = [{defined_by[name] for name in _free_names(n) if name in defined_by} for n in nodes]
    if all(k < index for index, sources in enumerate(dependencies) for k in sources):
        return list(enumerate(nodes))
    users: list[list[int]] = [[] for _ in nodes]
    for index, sources in enumerate(dependencies):
        for k in sources:
            users[k].append(index)
    pending = list(map(len, dependencies))
    ready = [index for index, count in enumerate(pending) if count == 0]  # sorted, and so a heap
    order = list[int]()
    while ready:
        order.append(heapq.heappop(ready))
        for user in users[order[-1]]:
            pending[user] -= 1
            if pending[user] == 0:
                heapq.heappush(ready, user)
    if len(order) < len(nodes):
        _raise_cycle(nodes, dependencies, {index for index, count in enumerate(pending) if count > 0})
    return [(index, nodes[index]) for index in order]


def _raise_cycle(nodes: Sequence[NodeProto], dependencies: Sequence[set[int]], waiting: set[int]) -> NoReturn:
    """Raise ImportModelError that names a cycle among `waiting`, nodes that each depend on another one of them."""
    path = [min(waiting)]
    while path.count(path[-1]) == 1:
        path.append(min(dependencies[path[-1]] & waiting))
    cycle = path[path.index(path[-1]) :]
    start = cycle.index(min(cycle))
    cycle = [*cycle[start:-1], *cycle[:start], min(cycle)]  # starts and ends with its first node
    first, name = nodes[cycle[0]], min(_free_names(nodes[cycle[0]]).intersection(nodes[cycle[1]].output))
    text = f"the graph is cyclic: {node_label(first, cycle[0])} uses '{name}', which is computed from its own output"
    if len(cycle) > 2:
        text += ", by " + " from ".join(node_label(nodes[k], k) for k in cycle[1:-1])
    raise ImportModelError(text)


# Names


def check_graph(graph: GraphProto, outer: frozenset[str] = frozenset()) -> None:
    """Check that every name is defined once and that every name that is used is defined.

    outer: names that enclosing graphs define. Raises ImportModelError.
    """
    defined = _boundary_names(graph)
    computed = set[str]()
    for index, node in enumerate(graph.node):
        for output in filter(None, node.output):
            if output in defined or output in computed:
                raise ImportModelError(f"{node_label(node, index)} defines '{output}', which is already defined")
            computed.add(output)
    known = set(outer) | defined
    for index, node in topological_order(graph.node, known.__contains__):
        for name in filter(None, node.input):
            if name not in known:
                label = node_label(node, index)
                raise ImportModelError(f"{label} uses '{name}', which no input, initializer or node defines")
        for sub in subgraphs(node):
            check_graph(sub, frozenset(known))
        known.update(filter(None, node.output))
    for output in graph.output:
        if output.name not in known:
            raise ImportModelError(f"output '{output.name}' of graph '{graph.name}' is not computed by any node")


def _boundary_names(graph: GraphProto) -> set[str]:
    """Return the names of inputs and initializers; an initializer may also be listed as an input."""
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


# Operators


@dataclass
class _Unknown:
    count: int = 0
    first: str = ""
    reason: str = ""


@dataclass
class OpSurvey:
    """Collects the ops of a graph, its subgraphs and its functions that cannot be converted."""

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
        if find_converter(domain, node.op_type, version or 1) or function_schema(domain, node.op_type, version or 1):
            return
        entry = self.unknown.setdefault((domain, node.op_type), _Unknown(first=node_label(node, index)))
        entry.count += 1

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


@cache
def max_inputs(domain: str, name: str, version: int) -> int:
    """Return the maximum number of an op's inputs; ops that ONNX does not define have no limit."""
    if not onnx.defs.has(name, version, domain):
        return sys.maxsize
    schema: Any = onnx.defs.get_schema(name, version, domain)
    return int(schema.max_input)


def function_schema(domain: str, name: str, version: int) -> Any:
    """Return an op's schema if it defines the op by a function body, else None."""
    if not onnx.defs.has(name, version, domain):
        return None
    schema: Any = onnx.defs.get_schema(name, version, domain)
    return schema if schema.has_function or schema.has_context_dependent_function else None
