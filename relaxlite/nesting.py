"""Nesting of a model's arguments and results, as a PyTorch module has it: tuples, lists, dicts, classes, constants.

A compiled function takes and gives arrays in a row. A `CallStructure` says where each of them stands in what the caller
passes, and how results are nested; it is stored as JSON with the model. PyTorch itself is never imported here: its
tensors are recognized where the caller has imported it, and results then are tensors too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import InputError
from relaxlite.records import dataclass

INITIAL_STATE = "initial_state"  # the entry that gives the first contents of a model's state
_LEAVES = ("tensor", "complex", "int", "float", "bool")


@dataclass(frozen=True, slots=True)
class Tree:
    """A node of the nesting.

    kind: "tensor", "complex" (a tensor of pairs), "int", "float", "bool": input or output `index`; "const": `value`;
    "tuple", "list", "dict", "named" (a named tuple), "object" (a class `name`): `children` under `keys`.
    """

    kind: str
    index: int = 0
    value: Any = None
    name: str = ""
    keys: tuple[Any, ...] = ()
    children: tuple[Tree, ...] = ()

    def to_json(self) -> Any:
        """The tree as JSON."""
        if self.kind in _LEAVES:
            return [self.kind, self.index]
        if self.kind == "const":
            return [self.kind, self.value]
        return [self.kind, self.name, list(self.keys), [child.to_json() for child in self.children]]

    @staticmethod
    def of_json(data: Any) -> Tree:
        """The tree of JSON. Raises TypeError, ValueError or IndexError for other data."""
        kind, *rest = data
        if kind in _LEAVES:
            return Tree(kind, index=int(rest[0]))
        if kind == "const":
            return Tree(kind, value=rest[0])
        name, keys, children = rest
        return Tree(kind, name=name, keys=tuple(keys), children=tuple(map(Tree.of_json, children)))


@dataclass(frozen=True, slots=True)
class CallStructure:
    """Nesting of the arguments, (name, tree) of each positional and keyword one, and of the result."""

    args: tuple[tuple[str, Tree], ...]
    kwargs: tuple[tuple[str, Tree], ...]
    result: Tree

    def to_text(self) -> str:
        """The structure as JSON text."""
        pairs = [[[name, tree.to_json()] for name, tree in part] for part in (self.args, self.kwargs)]
        return json.dumps([*pairs, self.result.to_json()], separators=(",", ":"))

    @staticmethod
    def of_text(text: str) -> CallStructure:
        """The structure of JSON text. Raises ValueError or TypeError for other text."""
        args, kwargs, result = json.loads(text)
        positional, keywords = (tuple((name, Tree.of_json(tree)) for name, tree in part) for part in (args, kwargs))
        return CallStructure(positional, keywords, Tree.of_json(result))

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the values of the inputs, in their order. Raises InputError for other arguments than the model's."""
        if len(args) > len(self.args):
            raise InputError(f"got {len(args)} arguments by position; the model takes {self._described()}")
        given = dict(zip((name for name, _ in self.args), args, strict=False))
        for name, value in kwargs.items():
            if name in given:
                raise InputError(f"argument '{name}' is given both by position and by name")
            given[name] = value
        values: list[Any] = []
        for name, tree in (*self.args, *self.kwargs):
            if name in given:
                _collect(given.pop(name), tree, name, values)
            elif all(leaf.kind == "const" for leaf in _leaves(tree)):
                continue  # its default, which the export made constant
            else:
                raise InputError(f"missing argument '{name}'; the model takes {self._described()}")
        if given:
            raise InputError(f"there is no argument '{next(iter(given))}'; the model takes {self._described()}")
        return values

    def _described(self) -> str:
        return ", ".join(name for name, _ in (*self.args, *self.kwargs)) or "none"


def _leaves(tree: Tree) -> list[Tree]:
    if not tree.children:
        return [tree] if tree.kind in (*_LEAVES, "const") else []
    return [leaf for child in tree.children for leaf in _leaves(child)]


def _collect(value: Any, tree: Tree, where: str, values: list[Any]) -> None:
    """Append the inputs below a tree to `values`."""
    kind = tree.kind
    if kind == "complex":
        values.append(_pairs(value, where))
    elif kind in _LEAVES:
        values.append(value)
    elif kind == "const":
        if not _equals(value, tree.value):
            raise InputError(
                f"argument {where}: got {value!r}, but the export has fixed it to {tree.value!r}; export it again"
            )
    else:
        children = _children(value, tree, where)
        keys = tree.keys or tuple(range(len(children)))
        for key, child, subtree in zip(keys, children, tree.children, strict=True):
            _collect(child, subtree, f"{where}[{key!r}]", values)


def _equals(value: Any, expected: Any) -> bool:
    try:
        return bool(value == expected) or (value is None and expected is None) or str(value) == expected
    except (TypeError, ValueError, RuntimeError):
        return False


def _children(value: Any, tree: Tree, where: str) -> list[Any]:
    """Return the children of a value, in the order of the tree."""
    count = len(tree.children)
    if tree.kind in ("dict", "object") and isinstance(value, Mapping):
        missing = [key for key in tree.keys if key not in value]
        if missing or (tree.kind == "dict" and len(value) != count):
            raise InputError(f"argument {where}: expects the keys {list(tree.keys)}, got {list(value)}")
        return [value[key] for key in tree.keys]
    if tree.kind == "object":
        return _object_children(value, tree, where)
    if not isinstance(value, tuple | list) or len(value) != count:
        got = f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__
        raise InputError(f"argument {where}: expects a {tree.kind} of {count}, got {got}")
    return list(value)


def _object_children(value: Any, tree: Tree, where: str) -> list[Any]:
    node = _registered(tree.name)
    if node is not None and type(value) is node[0]:
        children = list(node[1].flatten_fn(value)[0])
        if len(children) == len(tree.children):
            return children
    if tree.keys and all(hasattr(value, str(key)) for key in tree.keys):
        return [getattr(value, str(key)) for key in tree.keys]
    raise InputError(f"argument {where}: expects a {tree.name} with {len(tree.children)} fields, got {value!r:.80}")


def _registered(name: str) -> tuple[type, Any] | None:
    """Return a class that PyTorch knows as a pytree node, with its registration; None if there is none."""
    pytree = sys.modules.get("torch.utils._pytree")
    if pytree is None:
        return None
    for kind, node in pytree.SUPPORTED_NODES.items():
        if f"{kind.__module__}.{kind.__qualname__}" == name:
            return kind, node
    return None


# results


def nest(tree: Tree, results: Sequence[np.ndarray], as_tensor: Any) -> Any:
    """Nest results. `as_tensor` converts an array to what the caller gets."""
    kind = tree.kind
    if kind == "tensor":
        return as_tensor(results[tree.index])
    if kind == "complex":
        return as_tensor(_complex(results[tree.index]))
    if kind in _LEAVES:
        return results[tree.index].item()
    if kind == "const":
        return tree.value
    children = [nest(child, results, as_tensor) for child in tree.children]
    if kind == "list":
        return children
    if kind == "tuple":
        return tuple(children)
    if kind == "named":
        return _named(tree, children)
    if kind == "dict":
        return dict(zip(tree.keys, children, strict=True))
    return _object(tree, children)


def _named(tree: Tree, children: list[Any]) -> Any:
    kind = _loaded_class(tree.name)
    if kind is None or not issubclass(kind, tuple):
        return tuple(children)
    return kind(*children) if hasattr(kind, "_make") else kind(children)


def _loaded_class(name: str) -> type | None:
    """Return a class that the process has loaded, by its name; None if there is none."""
    module, _, attribute = name.rpartition(".")
    kind = getattr(sys.modules.get(module), attribute, None)
    return kind if isinstance(kind, type) else None


def _object(tree: Tree, children: list[Any]) -> Any:
    """An object of a class that PyTorch knows as a pytree node; without it a dict, or a list."""
    fields = dict(zip(tree.keys, children, strict=True)) if tree.keys else None
    node = _registered(tree.name)
    if node is not None and fields is not None:
        kind = node[0]
        absent = (name for name in getattr(kind, "__dataclass_fields__", ()) if name not in fields)
        return kind(**fields, **dict.fromkeys(absent))  # what the module set to None is no leaf
    return children if fields is None else fields


# arrays and tensors


def torch_of(values: Sequence[Any]) -> Any:
    """Return the module torch if one of the values is a tensor of PyTorch, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and any(isinstance(v, torch.Tensor) for v in values) else None


def to_array(tensor: Any) -> np.ndarray:
    """Return a tensor of PyTorch as an array that shares its memory. InputError for a tensor on another device."""
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError):  # it requires gradients, or NumPy has no such type or layout
        return _to_array(tensor.detach())


def _to_array(tensor: Any) -> np.ndarray:
    if tensor.device.type != "cpu":
        raise InputError(f"the tensor is on device {tensor.device}; copy it to the CPU first, with .cpu()")
    if tensor.dtype is sys.modules["torch"].bfloat16:
        return tensor.view(sys.modules["torch"].int16).numpy().view(dtypes.to_numpy("bfloat16"))
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.numpy()


def to_tensor(torch: Any, array: np.ndarray) -> Any:
    """Return an array as a tensor of PyTorch that shares its memory."""
    if array.dtype.kind == "V":  # bfloat16
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _pairs(value: Any, where: str) -> np.ndarray:
    """Return a complex array as a real one with pairs along a new last dimension."""
    torch = sys.modules.get("torch")
    array = to_array(value) if torch is not None and isinstance(value, torch.Tensor) else np.asarray(value)
    if array.dtype.kind != "c":
        raise InputError(f"argument {where}: expects a complex array, got {array.dtype.name}")
    array = np.ascontiguousarray(array).reshape(array.shape)
    return (
        array.view(np.dtype(f"f{array.dtype.itemsize // 2}")).reshape(*array.shape, 2)
        if array.ndim
        else (array.reshape(1).view(np.dtype(f"f{array.dtype.itemsize // 2}")))
    )


def _complex(array: np.ndarray) -> np.ndarray:
    dtype = np.dtype(f"c{array.dtype.itemsize * 2}")
    return np.ascontiguousarray(array).view(dtype).reshape(array.shape[:-1])
