"""Compilation of a graph: as a whole, or else its largest parts that are supported; the rest runs in eager.

No failure to import or to compile a graph ends the user's program. The report has the reasons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from relaxlite.errors import UnsupportedOpsError
from relaxlite.frontend.torch.dynamo_graph import placeholders_of
from relaxlite.frontend.torch.registry import find_converter
from relaxlite.frontend.torch.survey import check_operators, name_of, needs_converter
from relaxlite.torch.graph_code import GraphCall, GraphCode, ImportFailed
from relaxlite.torch.report import GraphReport
from relaxlite.torch.reuse import find_call, remember

Weights: TypeAlias = "Mapping[int, torch.Tensor]"
_PREFIX = "relaxlite_part_"


def compile_graph(
    graph: torch.fx.GraphModule, weights: Weights, entry: GraphReport, options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return a function that runs the graph: a GraphCall where all of the graph is compiled."""
    try:
        check_operators(graph)
        return _built(graph, _reused_or_imported(graph, weights, options), entry)
    except ImportFailed as failure:
        entry.add_failure(failure.error)
        excluded = [failure.node]
    except UnsupportedOpsError as error:
        entry.add_failure(error)
        excluded = []
    except Exception as error:
        entry.add_failure(error)
        return graph
    try:
        return _with_eager_parts(graph, weights, entry, options, excluded)
    except Exception as error:
        entry.add_failure(error)
        return graph


def _reused_or_imported(
    graph: torch.fx.GraphModule, weights: Weights, options: Mapping[str, Any]
) -> GraphCall | GraphCode:
    """Return a call of earlier code, or code that is imported, not yet compiled. Raises ImportFailed."""
    return find_call(graph, weights, options) or GraphCode(graph, weights, options)


def _built(graph: torch.fx.GraphModule, code: GraphCall | GraphCode, entry: GraphReport) -> GraphCall:
    """Compile imported code. Raises what the compiler raises."""
    if isinstance(code, GraphCall):
        entry.reused += 1
        return code
    code.build(entry)
    remember(code)
    return GraphCall(graph, code)


def _with_eager_parts(
    graph: torch.fx.GraphModule,
    weights: Weights,
    entry: GraphReport,
    options: Mapping[str, Any],
    excluded: list[str | None],
) -> torch.fx.GraphModule:
    """Compile parts without the excluded nodes, and without those that turn out not to be supported."""
    while True:
        parted = _parted(graph, excluded)
        codes: list[tuple[torch.fx.GraphModule, GraphCall | GraphCode]] = []
        failed: list[str] = []
        for part, own_weights in _parts_of(parted, weights):
            try:
                codes.append((part, _reused_or_imported(part, own_weights, options)))
            except ImportFailed as failure:
                entry.add_failure(failure.error)
                failed += [failure.node] if failure.node is not None else []
        if not failed:
            break
        excluded = [*excluded, *failed]
    for part, code in codes:
        try:
            part.forward = _built(part, code, entry).as_module_forward
        except Exception as error:
            entry.add_failure(error)
    return parted


def _parted(graph: torch.fx.GraphModule, excluded: Collection[str | None]) -> torch.fx.GraphModule:
    """Return a copy of the graph with the largest parts that are supported as modules."""
    copy = torch.fx.Graph()
    result = copy.graph_copy(graph.graph, {})
    copy.output(result)
    partitioner = CapabilityBasedPartitioner(
        torch.fx.GraphModule(graph, copy), _Supported(graph, excluded), allows_single_node_partition=False
    )
    return partitioner.fuse_partitions(partitioner.propose_partitions(), prefix=_PREFIX)


def _parts_of(
    parted: torch.fx.GraphModule, weights: Weights
) -> Iterator[tuple[torch.fx.GraphModule, dict[int, torch.Tensor]]]:
    """Yield the parts with those of the weights that are their inputs."""
    numbers = {node: k for k, node in enumerate(placeholders_of(parted))}
    for node in parted.graph.nodes:
        if node.op == "call_module" and str(node.target).startswith(_PREFIX):
            part = parted.get_submodule(str(node.target))
            assert isinstance(part, torch.fx.GraphModule)
            inputs = [numbers.get(x, -1) if isinstance(x, torch.fx.Node) else -1 for x in node.args]
            yield part, {j: weights[k] for j, k in enumerate(inputs) if k in weights}


class _Supported(OperatorSupportBase):
    """What a part may hold: operators that have a converter, but not the excluded nodes.

    Where two calls of an operator are excluded, all are.
    """

    def __init__(self, graph: torch.fx.GraphModule, excluded: Collection[str | None]) -> None:
        self._names = excluded
        calls = Counter(node.target for node in graph.graph.nodes if node.name in excluded)
        self._targets = {target for target, count in calls.items() if count > 1}

    def is_node_supported(self, submodules: Any, node: torch.fx.Node) -> bool:
        """Whether a node is an operator with a converter, and not excluded."""
        is_operator = needs_converter(node) and isinstance(node.target, torch._ops.OpOverload)
        if not is_operator or node.name in self._names or node.target in self._targets:
            return False
        return find_converter(name_of(node.target)) is not None
