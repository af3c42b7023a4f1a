"""Functional form of a graph without a retrace: writes into tensors and their views become new values.

    a = select(x, 0, 1);  add_(a, y);  use(x)     =>     a = select(x, 0, 1);  b = add(a, y);
                                                         z = select_scatter(x, b, 0, 1);  use(z)

A write goes up the chain of views to the tensor that owns the memory; views of that memory which are read afterwards
are taken again. What this file does not know, such as writes through expanded tensors, is left to torch's own retrace,
which takes as long as the export.
"""

from __future__ import annotations

from typing import Any

import torch

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
_RESHAPES = frozenset(("view", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten", "reshape", "ravel"))
_PERMUTATIONS = frozenset(("transpose", "t", "permute", "swapaxes"))
_IDENTITIES = frozenset(("alias", "detach", "lift_fresh", "contiguous", "to", "view_as", "type_as", "positive"))
_TRAINED = frozenset(("batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm"))
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


def _is_alias(node: Node) -> bool:
    """Whether a result of the operator may share the memory of its first argument."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    returns = node.target._schema.returns
    return bool(returns) and returns[0].alias_info is not None


class _Rewriter:
    """Copies a graph node by node; see the file's docstring."""

    def __init__(self) -> None:
        self.new = torch.fx.Graph()
        self._values: dict[Node, Node] = {}  # node of the old graph -> its present value
        self._parents: dict[Node, Node] = {}  # view -> what it is a view of
        self._epochs: dict[Node, int] = {}  # owner of memory -> number of writes
        self._seen: dict[Node, int] = {}  # node -> the epoch of its present value

    def visit(self, node: Node) -> None:
        """Copy one node; a write becomes a new value of what it writes."""
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            self._write_of(node)
            return
        if _name(node) in _TRAINED and True in node.args:
            raise CannotFunctionalize(f"{node.target} in training writes statistics")
        base = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        if base is not None and self._shares_memory(node, base):
            self._parents[node] = base
        self._values[node] = self._copy(node)
        self._seen[node] = self._epochs.setdefault(self._owner(node), 0)

    def written(self) -> dict[str, Node]:
        """Present values of the placeholders that were written, by name."""
        return {n.name: self._values[n] for n, count in self._epochs.items() if count and n.op == "placeholder"}

    def _shares_memory(self, node: Node, base: Node) -> bool:
        name = _name(node)
        if node.target is not None and getattr(node.target, "__name__", "") == "getitem":
            return base in self._parents
        if not _is_alias(node):
            return False
        before, after = base.meta.get("val"), node.meta.get("val")
        if name in ("reshape", "flatten", "contiguous", "to", "ravel") and isinstance(before, torch.Tensor):
            if name == "to" and isinstance(after, torch.Tensor) and after.dtype != before.dtype:
                return False
            if not before.is_contiguous():
                return name == "to"
        return True

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
            self._values[node] = base if _name(node) in _IDENTITIES or _is_write(node) else self._copy(node)
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
        if name in _IDENTITIES or _is_write(view):
            return value
        if name in _SCATTERS:
            args = torch.fx.map_arg(view.args[1:], self._read)
            kwargs = torch.fx.map_arg(dict(view.kwargs), self._read)
            return self._call(_SCATTERS[name], (old, value, *args), kwargs, parent)
        if name in _RESHAPES:
            shape = parent.meta["val"].shape
            return self._call(aten.reshape.default, (value, list(shape)), {}, parent)
        if name in _PERMUTATIONS:
            return self._call(aten.permute.default, (value, _inverse(view)), {}, parent)
        raise CannotFunctionalize(f"a write through {view.target}")


def _is_write(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


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
