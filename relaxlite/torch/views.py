"""Results of a graph that are views of its inputs.

aot_autograd makes such results from the input, by the strides and the offset of what the graph gives. So they are taken
as views by torch, not computed.
"""

from __future__ import annotations

from typing import Any

import torch


def output_of(graph: torch.fx.GraphModule) -> Any:
    """Return what a graph gives: a node, or a tuple or list of nodes and constants."""
    return next(node for node in graph.graph.nodes if node.op == "output").args[0]


def views_of_inputs(graph: torch.fx.GraphModule) -> dict[int, torch.fx.Node]:
    """Return the results, by their numbers, that are views of inputs, or inputs."""
    output = output_of(graph)
    results = output if isinstance(output, tuple | list) else [output]
    return {k: node for k, node in enumerate(results) if isinstance(node, torch.fx.Node) and _is_view_of_input(node)}


def graph_of_nodes(graph: torch.fx.GraphModule, results: list[torch.fx.Node]) -> torch.fx.GraphModule:
    """Return a graph with the same inputs that gives the values of some nodes."""
    part = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    needed, pending = set(results), list(results)
    while pending:
        more = [n for n in pending.pop().all_input_nodes if n not in needed]
        needed.update(more)
        pending += more
    for node in graph.graph.nodes:
        if node.op == "placeholder" or node in needed:
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies[node] for node in results))
    return torch.fx.GraphModule(graph, part)


def _is_view_of_input(node: torch.fx.Node) -> bool:
    """Whether a chain of operators that share memory leads from an input that is a tensor to a node."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        returns = node.target._schema.returns
        if not returns or returns[0].alias_info is None or not isinstance(node.args[0], torch.fx.Node):
            return False
        node = node.args[0]
    return node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)
