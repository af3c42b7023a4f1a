"""What must hold before a graph can be walked: unique names, an order of computation, known opsets and operators."""

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
    names: set[str] = set()
    for node in nodes:
        names.update(node.input)
        for sub in subgraphs(node):
            names |= names_read(sub) | {o.name for o in sub.output}
    return names


def _names_needed(node: NodeProto) -> set[str]:
    """Every name that the node takes from around it: as an input, or in its subgraphs."""
    result = set(filter(None, node.input))
    for sub in subgraphs(node):
        inside = {i.name for i in sub.input} | {t.name for t in sub.initializer}
        inside |= {s.values.name for s in sub.sparse_initializer}
        read = {o.name for o in sub.output}
        for inner in sub.node:
            read |= _names_needed(inner)
            inside.update(inner.output)
        result |= read - inside
    return result


# The order of nodes


def in_order(nodes: Sequence[NodeProto], is_known: Callable[[str], bool]) -> list[tuple[int, NodeProto]]:
    """The nodes, each behind those that it needs and with its place in the file. An order that is right is kept.

    is_known: whether a name is defined around the nodes. ImportModelError for a cycle.
    """
    defined_by: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in filter(None, node.output):
            if not is_known(name):
                defined_by.setdefault(name, index)
    needed = [{defined_by[name] for name in _names_needed(n) if name in defined_by} for n in nodes]
    if all(k < index for index, result in enumerate(needed) for k in result):
        return list(enumerate(nodes))
    users: list[list[int]] = [[] for _ in nodes]
    for index, result in enumerate(needed):
        for k in result:
            users[k].append(index)
    waits = list(map(len, needed))
    ready = [index for index, count in enumerate(waits) if count == 0]  # sorted, and so a heap
    order = list[int]()
    while ready:
        order.append(heapq.heappop(ready))
        for user in users[order[-1]]:
            waits[user] -= 1
            if waits[user] == 0:
                heapq.heappush(ready, user)
    if len(order) < len(nodes):
        _raise_cycle(nodes, needed, {index for index, count in enumerate(waits) if count > 0})
    return [(index, nodes[index]) for index in order]


def _raise_cycle(nodes: Sequence[NodeProto], needed: Sequence[set[int]], waiting: set[int]) -> NoReturn:
    """Of `waiting`, each of which needs another of them: back from one to the next, a node comes again."""
    path = [min(waiting)]
    while path.count(path[-1]) == 1:
        path.append(min(needed[path[-1]] & waiting))
    cycle = path[path.index(path[-1]) :]
    start = cycle.index(min(cycle))
    cycle = [*cycle[start:-1], *cycle[:start], min(cycle)]  # from its first node on, back to that
    first, name = nodes[cycle[0]], min(_names_needed(nodes[cycle[0]]).intersection(nodes[cycle[1]].output))
    text = f"the graph is cyclic: {node_label(first, cycle[0])} uses '{name}', which is computed from its own output"
    if len(cycle) > 2:
        text += ", by " + " from ".join(node_label(nodes[k], k) for k in cycle[1:-1])
    raise ImportModelError(text)


# Names


def check_graph(graph: GraphProto, outer: frozenset[str] = frozenset()) -> None:
    """Every name is defined once, and can be before it is used."""
    defined = _given_names(graph)
    names = set[str]()
    for index, node in enumerate(graph.node):
        for output in filter(None, node.output):
            if output in defined or output in names:
                raise ImportModelError(f"{node_label(node, index)} defines '{output}', which is already defined")
            names.add(output)
    known = set(outer) | defined
    for index, node in in_order(graph.node, known.__contains__):
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
        result = self.unknown.setdefault((domain, node.op_type), _Unknown(first=node_label(node, index)))
        result.count += 1

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
def most_inputs(domain: str, name: str, version: int) -> int:
    """How many inputs an op takes at most, as ONNX defines it; of other ops nothing is known."""
    if not onnx.defs.has(name, version, domain):
        return sys.maxsize
    schema: Any = onnx.defs.get_schema(name, version, domain)
    return int(schema.max_input)


def schema_of(domain: str, name: str, version: int) -> Any:
    """The schema of an op that is defined by a function body, or None."""
    if not onnx.defs.has(name, version, domain):
        return None
    schema: Any = onnx.defs.get_schema(name, version, domain)
    return schema if schema.has_function or schema.has_context_dependent_function else None
