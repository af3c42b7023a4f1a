"""Code of an earlier graph that serves a new one, which differs only in sizes that the code's symbols cover.

Dynamo traces a model again for a batch of one, say, and gives the same operators with 1 in place of a symbol. Both
graphs are compared node by node, under a substitution of the earlier graph's symbols by the new one's sizes. Nodes that
give their operand, such as an expansion to the size 1, are left out in one of them, and skipped in both.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from relaxlite.frontend.torch.dynamo_graph import placeholders_of, symbol_ranges
from relaxlite.frontend.torch.symbols import sympy_of
from relaxlite.torch.graph_code import GraphCall, GraphCode
from relaxlite.torch.views import output_of, views_of_inputs

_SCALARS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
_IDENTITIES = tuple(getattr(torch.ops.aten, name) for name in ("expand", "slice", "view", "clone", "alias"))
_codes: list[weakref.ref[GraphCode]] = []


def remember(code: GraphCode) -> None:
    """Offer the code to later graphs, as long as something calls the code."""
    _codes[:] = [known for known in _codes if known() is not None] + [weakref.ref(code)]


def forget_all() -> None:
    """Offer no code to later graphs."""
    _codes.clear()


def find_call(
    graph: torch.fx.GraphModule, weights: Mapping[int, torch.Tensor], options: Mapping[str, Any]
) -> GraphCall | None:
    """Return a call of earlier code that serves the graph, or None."""
    for code in filter(None, (known() for known in _codes)):
        if code.options == options and (order := _Match(code, graph, weights).order()) is not None:
            return GraphCall(graph, code, order)
    return None


class _Match:
    """Comparison of the graph of code, which is general, with a special one."""

    def __init__(self, code: GraphCode, special: torch.fx.GraphModule, weights: Mapping[int, torch.Tensor]) -> None:
        self._code, self._special, self._weights = code, special, weights
        self._sizes: dict[Any, Any] = {}  # symbol of the general graph -> expression of the special one
        self._nodes: dict[torch.fx.Node, torch.fx.Node] = {}  # node of the general graph -> node of the special one
        self._operands: dict[torch.fx.Node, torch.fx.Node] = {}  # skipped node -> what it gives

    def order(self) -> list[int | None] | None:
        """The special graph's input for each input of the general one; None where the graphs differ."""
        general = self._code.graph
        order = self._match_inputs(placeholders_of(general), placeholders_of(self._special))
        if order is None or not self._are_covered():
            return None
        if views_of_inputs(general).keys() != views_of_inputs(self._special).keys():
            return None
        left = [node for node in _computations(general) if not self._skips(node, self._sizes)]
        right = [node for node in _computations(self._special) if not self._skips(node, {})]
        if len(left) != len(right) or not all(map(self._match_node, left, right)):
            return None
        return order if self._same(output_of(general), output_of(self._special)) else None

    def _match_inputs(self, left: Sequence[Any], right: Sequence[Any]) -> list[int | None] | None:
        """Pair the tensors in their order, then the numbers that the code takes."""
        order: list[int | None] = [None] * len(left)
        taken = sorted(number for kind, number in self._code.inputs if kind == "number")
        pairs = [(_tensors(left), _tensors(right)), (taken, _numbers(right))]
        for ours, theirs in pairs:
            if len(ours) != len(theirs):
                return None
            for k, j in zip(ours, theirs, strict=True):
                if k in self._code.weights.tensors and self._code.weights.tensors[k] is not self._weights.get(j):
                    return None
                order[k], self._nodes[left[k]] = j, right[j]
        values = [(_val(a), _val(b)) for a, b in self._nodes.items()]
        # symbols alone first, then expressions of them
        return order if all(self._fits(a, b) for a, b in values) and all(self._fits(a, b) for a, b in values) else None

    def _are_covered(self) -> bool:
        """Whether the sizes lie in the ranges that the code was compiled for."""
        ranges = symbol_ranges(self._special)
        for symbol, size in self._sizes.items():
            own = self._code.ranges.get(symbol)
            other = ranges.get(size)
            low, high = (size, size) if size.is_Integer else (other.lower, other.upper) if other else (None, None)
            if own is not None and (low is None or not (own.lower <= low and high <= own.upper)):
                return False
        return True

    def _skips(self, node: torch.fx.Node, sizes: Mapping[Any, Any]) -> bool:
        """Whether a node gives its operand, where its graph's symbols have these sizes."""
        if getattr(node.target, "overloadpacket", None) not in _IDENTITIES:
            return False
        operand = node.args[0]
        assert isinstance(operand, torch.fx.Node)
        own, other = ([_expression(d).xreplace(sizes) for d in _val(x).shape] for x in (node, operand))
        is_same = own == other and _val(node).dtype == _val(operand).dtype
        if is_same:
            self._operands[node] = self._operands.get(operand, operand)
        return is_same

    def _match_node(self, left: torch.fx.Node, right: torch.fx.Node) -> bool:
        self._nodes[left] = right
        if left.op == "get_attr":
            return right.op == "get_attr" and _same_constants(_attribute(left), _attribute(right))
        return (
            (left.op, left.target) == (right.op, right.target)
            and self._same(left.args, right.args)
            and self._same(left.kwargs, right.kwargs)
            and self._fits(_val(left), _val(right))
        )

    def _same(self, left: Any, right: Any) -> bool:
        """Whether two arguments of nodes are the same."""
        if isinstance(left, torch.fx.Node) and not isinstance(_val(left), _SCALARS):
            return self._nodes.get(self._operands.get(left, left)) is self._operands.get(right, right)
        if (a := _expression(left)) is not None:
            b = _expression(right)
            return b is not None and a.xreplace(self._sizes) == b
        if isinstance(left, slice):
            return isinstance(right, slice) and self._same(_parts(left), _parts(right))
        if isinstance(left, tuple | list):
            return isinstance(right, tuple | list) and len(left) == len(right) and all(map(self._same, left, right))
        if isinstance(left, dict):
            return isinstance(right, dict) and left.keys() == right.keys() and self._same([*left.values()], [
                right[key] for key in left
            ])  # fmt: skip
        return type(left) is type(right) and bool(left == right)

    def _fits(self, left: Any, right: Any) -> bool:
        """Whether two values have the same type; sizes of the general graph that are new symbols are bound."""
        if isinstance(left, torch.Tensor):
            return (
                isinstance(right, torch.Tensor)
                and (left.dtype, left.dim(), left.is_conj()) == (right.dtype, right.dim(), right.is_conj())
                and all(map(self._fits, left.shape, right.shape))
            )
        if isinstance(left, tuple | list):
            return isinstance(right, tuple | list) and len(left) == len(right) and all(map(self._fits, left, right))
        a, b = _expression(left), _expression(right)
        if a is None or b is None:
            return a is b
        if a.is_Symbol and a not in self._sizes:
            self._sizes[a] = b
        return a.free_symbols - self._sizes.keys() != set() or a.xreplace(self._sizes) == b


def _val(node: torch.fx.Node) -> Any:
    return node.meta.get("val")


def _tensors(inputs: Sequence[torch.fx.Node]) -> list[int]:
    return [k for k, node in enumerate(inputs) if isinstance(_val(node), torch.Tensor)]


def _numbers(inputs: Sequence[torch.fx.Node]) -> list[int]:
    """The inputs that code takes as numbers: those that are no sizes of tensors."""
    shapes = (_val(node).shape for node in inputs if isinstance(_val(node), torch.Tensor))
    known = {
        symbol for shape in shapes for d in shape if isinstance(d, torch.SymInt) for symbol in sympy_of(d).free_symbols
    }
    values = enumerate(map(_val, inputs))
    return [
        k for k, x in values if isinstance(x, torch.SymInt | torch.SymFloat) and not sympy_of(x).free_symbols <= known
    ]


def _computations(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The nodes that compute tensors; numbers are compared where they are used."""
    nodes = (node for node in graph.graph.nodes if node.op not in ("placeholder", "output"))
    return [node for node in nodes if not isinstance(_val(node), _SCALARS)]


def _expression(value: Any) -> Any:
    """A number as a sympy expression, None for anything else."""
    if isinstance(value, torch.fx.Node):
        value = _val(value)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return sympy_of(value)
    return sympy.sympify(value) if isinstance(value, int | float | bool) else None


def _attribute(node: torch.fx.Node) -> Any:
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def _same_constants(left: Any, right: Any) -> bool:
    both_tensors = isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
    return left is right or (both_tensors and left.dtype == right.dtype and torch.equal(left, right))


def _parts(value: slice) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step
