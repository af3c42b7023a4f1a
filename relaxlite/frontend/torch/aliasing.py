"""Functional form of a graph without a retrace: writes into tensors and their views become new values.

    a = select(x, 0, 1);  add_(a, y);  use(x)     =>     a = select(x, 0, 1);  b = add(a, y);
                                                         z = select_scatter(x, b, 0, 1);  use(z)

A write goes up the chain of views to the tensor that owns the memory; views of that memory which are read afterwards
are taken again. What this file does not know, such as writes through expanded tensors or into a reshape that may be a
copy, is left to torch's own retrace, which takes as long as the export.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten
Node = torch.fx.Node


class CannotFunctionalize(Exception):
    """The graph writes into tensors in a way that needs a retrace; the message is the reason."""


# Views that take part in writes: name -> operator that puts a changed view back, or None for a reshape or permutation.
_SCATTERS: dict[str, Any] = {
    "select": aten.select_scatter.default,
    "slice": aten.slice_scatter.default,
    "diagonal": aten.diagonal_scatter.default,
}
_COPYING_RESHAPES = frozenset(("flatten", "reshape", "reshape_as", "ravel"))  # views where strides allow one
_RESHAPES = _COPYING_RESHAPES | {"view", "view_as", "_unsafe_view", "unsqueeze", "squeeze", "unflatten"}
_PERMUTATIONS = frozenset(("transpose", "t", "permute", "swapaxes"))
_CONVERSIONS = frozenset(("contiguous", "to", "type_as"))  # the operand itself where nothing is to be converted
_DROPOUTS = frozenset(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"))
_IDENTITIES = frozenset(("alias", "detach", "lift_fresh", "positive")) | _CONVERSIONS | _DROPOUTS
_RANDOM = frozenset(
    ("normal_", "uniform_", "random_", "exponential_", "bernoulli_", "geometric_", "cauchy_", "log_normal_")
)
_REPLACED = {"zero_": aten.zeros_like.default, "fill_": aten.full_like.default}


def functional_graph(module: torch.fx.GraphModule) -> tuple[torch.fx.Graph, dict[str, Node]]:
    """Return the functional graph, and the new contents of placeholders that the graph writes, by their names.

    The graph's output is what it was. Raises CannotFunctionalize.
    """
    rewriter = _Rewriter()
    for node in module.graph.nodes:
        rewriter.visit(node)
    return rewriter.new, rewriter.written()


def _name(node: Node) -> str:
    return node.target._schema.name.partition("::")[2] if isinstance(node.target, torch._ops.OpOverload) else ""


def is_write(node: Node) -> bool:
    """Whether the node's operator writes into one of its arguments, by its schema."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _shares_memory(node: Node, base: Node) -> bool | None:
    """Whether the node's result lies in the memory of its first argument; None where that depends on strides."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name, before, after = _name(node), base.meta.get("val"), node.meta.get("val")
    if name in _DROPOUTS:
        return not (argument_of(node, "train") and argument_of(node, "p"))
    if name in _CONVERSIONS:
        return _converts_nothing(node, before, after)
    returns = node.target._schema.returns
    if not returns or returns[0].alias_info is None:
        return False
    if name in _COPYING_RESHAPES and not (isinstance(before, torch.Tensor) and before.is_contiguous()):
        return None
    return True


def _converts_nothing(node: Node, before: Any, after: Any) -> bool | None:
    """Whether `to`, `type_as` or `contiguous` returns its operand; None where the strides are not known."""
    if not (isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)):
        return None
    if argument_of(node, "copy") or (before.dtype, before.device) != (after.dtype, after.device):
        return False
    strides = list(zip(before.stride(), after.stride(), strict=True))
    if all(statically_known_true(a == b) for a, b in strides):
        return True
    return False if any(statically_known_true(a != b) for a, b in strides) else None


def argument_of(node: Node, name: str) -> Any:
    """Return an argument of the node by its name in the schema; None where the node does not pass it."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return (dict(zip(names, node.args, strict=False)) | node.kwargs).get(name)


class _Rewriter:
    """Copies a graph node by node; see the file's docstring."""

    def __init__(self) -> None:
        self.new = torch.fx.Graph()
        self._values: dict[Node, Node] = {}  # node of the old graph -> its present value
        self._parents: dict[Node, Node] = {}  # view -> what it is a view of
        self._epochs: dict[Node, int] = {}  # owner of memory -> number of writes
        self._seen: dict[Node, int] = {}  # node -> the epoch of its present value
        self._uncertain: list[tuple[Node, Node]] = []  # (node, base) that may or may not share memory

    def visit(self, node: Node) -> None:
        """Copy one node; a write becomes a new value of what it writes."""
        if is_write(node):
            self._write_of(node)
            return
        base = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        if base is not None:
            self._relate(node, base)
        self._values[node] = self._copy(node)
        self._seen[node] = self._epochs.setdefault(self._owner(node), 0)

    def written(self) -> dict[str, Node]:
        """Present values of the placeholders that were written, by name."""
        return {n.name: self._values[n] for n, count in self._epochs.items() if count and n.op == "placeholder"}

    def _relate(self, node: Node, base: Node) -> None:
        """Note whether the node is a view of its first argument."""
        is_item = getattr(node.target, "__name__", "") == "getitem" and base in self._parents
        shares = is_item or _shares_memory(node, base)
        if shares:
            self._parents[node] = base
        elif shares is None:
            self._uncertain.append((node, base))

    def _copy(self, node: Node) -> Node:
        return self.new.node_copy(node, self._read)

    def _owner(self, node: Node) -> Node:
        while node in self._parents:
            node = self._parents[node]
        return node

    def _read(self, node: Node) -> Node:
        """Return the present value of a node: a view of memory that was written meanwhile is taken again."""
        epoch = self._epochs.get(self._owner(node), 0)
        if self._seen[node] != epoch:
            base = self._read(self._parents[node])
            self._values[node] = base if _name(node) in _IDENTITIES or is_write(node) else self._copy(node)
            self._seen[node] = epoch
        return self._values[node]

    def _write_of(self, node: Node) -> None:
        schema = node.target._schema  # type: ignore[union-attr]
        targets = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        x, name = node.args[0] if node.args else None, _name(node)
        if (
            not isinstance(x, Node)
            or len(targets) != 1
            or (targets[0] is not schema.arguments[0] and (targets[0].name != schema.arguments[0].name))
        ):
            raise CannotFunctionalize(f"{node.target} writes other arguments than its first")
        value = self._read(x) if name == "detach_" else self._functional(node, name)
        self._parents[node] = x
        self._write(x, value)
        self._values[node], self._seen[node] = value, self._epochs[self._owner(x)]

    def _functional(self, node: Node, name: str) -> Node:
        """Emit the functional twin of an operator that writes into its first argument."""
        if name in _RANDOM or not name.endswith("_"):
            raise CannotFunctionalize(f"{node.target} has no functional twin here")
        twin = _REPLACED.get(name)
        if twin is None:
            packet = getattr(getattr(torch.ops, node.target.namespace), name[:-1], None)  # type: ignore[union-attr]
            twin = getattr(packet, node.target._overloadname, None) if packet is not None else None  # type: ignore[union-attr]
        if twin is None:
            raise CannotFunctionalize(f"{node.target} has no functional twin")
        args = torch.fx.map_arg(node.args, self._read)
        kwargs = torch.fx.map_arg(dict(node.kwargs), self._read)
        if name == "fill_" and len(args) > 1 and isinstance(args[1], Node):
            raise CannotFunctionalize("fill_ by a tensor")
        return self._call(twin, args, kwargs, node)

    def _call(self, target: Any, args: Any, kwargs: dict[str, Any], like: Node) -> Node:
        """Emit a call whose result is described as that of another node."""
        call = self.new.call_function(target, tuple(args), kwargs)
        call.meta = {**like.meta}
        return call

    def _write(self, x: Node, value: Node) -> None:
        """Make `value` the contents of x, and of all memory that x is a view of."""
        for node, base in self._uncertain:
            if self._owner(x) in (self._owner(node), self._owner(base)):
                raise CannotFunctionalize(f"{node.target} may be a view of what is written, or a copy")
        chain = [x]
        while chain[-1] in self._parents:
            chain.append(self._parents[chain[-1]])
        before = [self._read(node) for node in chain]
        present = value
        values = [value]
        for view, parent, old in zip(chain, chain[1:], before[1:], strict=False):
            present = self._put_back(view, parent, old, present)
            values.append(present)
        owner = chain[-1]
        self._epochs[owner] = self._epochs.get(owner, 0) + 1
        for node, new in zip(chain, values, strict=True):
            self._values[node], self._seen[node] = new, self._epochs[owner]

    def _put_back(self, view: Node, parent: Node, old: Node, value: Node) -> Node:
        """Emit the parent of a view with the view's new contents."""
        name = _name(view)
        if name in _IDENTITIES or is_write(view):
            return value
        if name in _SCATTERS:
            args = torch.fx.map_arg(view.args[1:], self._read)
            kwargs = torch.fx.map_arg(dict(view.kwargs), self._read)
            return self._call(_SCATTERS[name], (old, value, *args), kwargs, parent)
        if name in _RESHAPES:
            return self._call(aten.reshape.default, (value, self._sizes(old, parent)), {}, parent)
        if name in _PERMUTATIONS:
            return self._call(aten.permute.default, (value, _inverse(view)), {}, parent)
        raise CannotFunctionalize(f"a write through {view.target}")

    def _sizes(self, value: Node, like: Node) -> list[int | Node]:
        """The sizes of a value; those that are known only at run time are read from it."""
        return [n if isinstance(n, int) else self._size(value, d, n) for d, n in enumerate(like.meta["val"].shape)]

    def _size(self, value: Node, dim: int, size: torch.SymInt) -> Node:
        node = self.new.call_function(aten.sym_size.int, (value, dim))
        node.meta = {"val": size}
        return node


def _inverse(view: Node) -> list[int]:
    """The permutation that undoes a view's."""
    rank, name = view.meta["val"].dim(), _name(view)
    order = list(range(rank))
    if name == "permute":
        order = [d % rank for d in view.args[1]]  # type: ignore[union-attr]
    elif name == "t":
        order.reverse()
    else:
        a, b = (int(d) % rank for d in view.args[1:3])  # type: ignore[arg-type]
        order[a], order[b] = order[b], order[a]
    return [order.index(k) for k in range(rank)]
