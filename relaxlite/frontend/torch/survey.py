"""Survey of a program's operators before its import: what has no converter is reported all at once."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from relaxlite.errors import UnsupportedOpsError
from relaxlite.frontend.torch.places import source_code, source_line
from relaxlite.frontend.torch.registry import find_converter

_SCALARS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)


def name_of(target: Any) -> str:
    """Return the registry's name of a node's target, as "aten.add.Tensor", "higher_order.cond" or "getitem"."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    if target is operator.getitem:
        return "getitem"
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def all_nodes(module: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """Yield the nodes of a graph and its subgraphs."""
    for graph in module.modules():
        if isinstance(graph, torch.fx.GraphModule):
            yield from graph.graph.nodes


def needs_converter(node: torch.fx.Node) -> bool:
    """Whether a node is a call that a converter has to convert: of an operator, or of a function on tensors."""
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        return not isinstance(node.meta.get("val"), _SCALARS)
    return node.target is not operator.getitem and not isinstance(node.meta.get("val"), _SCALARS)


def check_operators(module: torch.fx.GraphModule) -> None:
    """Raise UnsupportedOpsError with all operators that have no converter, their counts and a source line each."""
    missing = [n for n in all_nodes(module) if needs_converter(n) and find_converter(name_of(n.target)) is None]
    if not missing:
        return
    counts = Counter(name_of(n.target) for n in missing)
    first = {name_of(n.target): n for n in reversed(missing)}
    lines = [f"{len(counts)} operator{'s have' if len(counts) > 1 else ' has'} no converter:"]
    for name, count in counts.most_common():
        place = " ".join(filter(None, (source_line(first[name]), source_code(first[name]))))
        lines.append(f"  {name}: {count} call{'s' * (count != 1)}" + f", as at {place}" * bool(place))
    lines.append('hint: convert one with a function of your own, @rl.torch_op("namespace::name")')
    raise UnsupportedOpsError("\n".join(lines))
