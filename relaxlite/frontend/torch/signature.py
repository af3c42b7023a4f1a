"""Nesting of a program's arguments and results, as the text of a `CallStructure` (nesting.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from relaxlite.nesting import CallStructure, Tree
from relaxlite.records import dataclass


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of the arguments or results: a tensor, a scalar, or a value that the export made constant."""

    kind: str  # "tensor", "complex", "int", "float", "bool", "const"
    name: str = ""
    value: Any = None

    @property
    def is_tensor(self) -> bool:
        """Whether the compiled function has an input or output for the leaf."""
        return self.kind != "const"


def structure_text(program: ExportedProgram, inputs: Sequence[Leaf], outputs: Sequence[Leaf]) -> str:
    """Return the text of the call structure of a program with these leaves."""
    call = program.call_spec
    args, kwargs = pytree.treespec_leaf(), pytree.treespec_leaf()
    if call.in_spec is not None:
        args, kwargs = call.in_spec.children()
    leaves = iter(_trees(inputs))
    names = _argument_names(program, args.num_children)
    args_trees = tuple(_tree(child, leaves) for child in args.children())
    kwargs_trees = tuple(_tree(child, leaves) for child in kwargs.children())
    result = _tree(call.out_spec, iter(_trees(outputs))) if call.out_spec is not None else Tree("tuple")
    keywords = tuple(zip(map(str, kwargs.context or ()), kwargs_trees, strict=True))
    return CallStructure(tuple(zip(names, args_trees, strict=True)), keywords, result).to_text()


def _trees(leaves: Sequence[Leaf]) -> list[Tree]:
    """Leaves as trees, with the number of the input or output of each."""
    trees, number = [], 0
    for leaf in leaves:
        if leaf.is_tensor:
            trees.append(Tree(leaf.kind, index=number))
            number += 1
        else:
            trees.append(Tree("const", value=leaf.value if _is_plain(leaf.value) else str(leaf.value)))
    return trees


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _tree(spec: Any, leaves: Any) -> Tree:
    if spec.is_leaf():
        return next(leaves)
    children = tuple(_tree(child, leaves) for child in spec.children())
    kind, context = spec.type, spec.context
    if kind is tuple or kind is list:
        return Tree(kind.__name__, children=children)
    if not isinstance(kind, type) or issubclass(kind, tuple):  # a named tuple; its class is the context
        kind = context if isinstance(context, type) else kind
        fields = tuple(getattr(kind, "_fields", ()))
        return Tree("named", name=_class_name(kind), keys=fields, children=children)
    if kind in (dict, pytree.OrderedDict, pytree.defaultdict):
        keys = context[1] if kind is pytree.defaultdict else context
        return Tree("dict", keys=tuple(keys), children=children)
    return Tree("object", name=_class_name(kind), keys=_keys(context, len(children)), children=children)


def _class_name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _keys(context: Any, count: int) -> tuple[Any, ...]:
    """Names of the fields in the context of a class that is registered as a pytree node; () if there are none."""
    candidates = [context, *(context if isinstance(context, tuple | list) else ())]
    for names in candidates:
        if isinstance(names, tuple | list) and len(names) == count and all(isinstance(n, str) for n in names):
            return tuple(names)
    return ()


def _argument_names(program: ExportedProgram, count: int) -> list[str]:
    """Names of the positional arguments of `forward`."""
    signature = program.module_call_graph[0].signature if program.module_call_graph else None
    names = list(getattr(signature, "forward_arg_names", None) or ())
    return [*names, *(f"arg{k}" for k in range(len(names), count))][:count]
