"""Binary serialization of tensor programs, and their fingerprints: keys and contents of caches.

A program is serialized as tokens in post-order, one per node and symbolic expression. In a token (kind, field, ...) a
node is represented by its number, a string by itself, a number by a list: 7 is node number 7, [7] is the integer seven.
All fields are serialized by reflection: a field left out of a fingerprint would match cached code of another program.
"""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.ir import program as nodes
from relaxlite.ir.expr import Attrs
from relaxlite.ir.program import Buffer, TensorProgram
from relaxlite.ir.symbolic import ATOM_CONSTRUCTORS, BinaryAtom, SymExpr, SymVar, from_terms

_ATOM_CONSTRUCTORS = {kind.__name__: make for kind, make in ATOM_CONSTRUCTORS.items()}
_MARSHAL = 2  # latest marshal version in which equal values have equal bytes
_IGNORED_FIELDS = {(Buffer, "name")}


def fingerprint(program: TensorProgram) -> str:
    """SHA-256 of a program, as 64 hexadecimal digits, the same in every process.

    Ignores names of buffers and symbols, and the steps of the schedule. Raises TypeError for a field that has no exact
    representation.
    """
    return hashlib.sha256(_serialize(program, is_identity=True)).hexdigest()


def encode(*items: Any, symbols: Sequence[SymVar] = ()) -> bytes:
    """Serialize nodes, symbolic expressions, strings, numbers, and tuples of these, for `decode`.

    `decode` may run in another process of the same Python version. Equal items have equal bytes. `symbols` are symbols
    that the caller of `decode` passes too. Raises TypeError for an item of another type.
    """
    return _serialize(items, symbols, is_identity=False)


def _serialize(root: Any, symbols: Sequence[SymVar] = (), *, is_identity: bool) -> bytes:
    writer = _Encoder(is_identity=is_identity)
    for symbol in symbols:
        writer.expr(symbol)
    writer.write(root)
    return marshal.dumps(writer.tokens, _MARSHAL)


def decode(data: bytes, symbols: Sequence[SymVar] = ()) -> tuple[Any, ...]:
    """Deserialize the items of `encode`. Buffers are new objects, and so are symbols other than `symbols`."""
    values: list[Any] = list(symbols)

    def item_of(item: Any) -> Any:
        kind = type(item)
        if kind is int:
            return values[item]
        if kind is tuple:
            return tuple([item_of(part) for part in item])
        if kind is list:
            return _number_of(*item)
        return item

    for kind, *items in marshal.loads(data)[len(symbols) :]:
        if kind == "sum":
            const, terms = items
            values.append(from_terms(const, [(_monomial([values[a] for a in atoms]), coef) for coef, *atoms in terms]))
        elif kind in _ATOM_CONSTRUCTORS:
            values.append(_ATOM_CONSTRUCTORS[kind](values[items[0]], values[items[1]]))
        else:
            values.append(_CONSTRUCTORS[kind](*[item_of(item) for item in items]))
    result: tuple[Any, ...] = values[-1]
    return result


def _monomial(atoms: list[SymExpr]) -> tuple[SymExpr, ...]:
    return tuple(sorted(atoms, key=lambda atom: atom.key)) if len(atoms) > 1 else tuple(atoms)


def _number_of(value: Any, content: bytes | None = None) -> Any:
    return value if content is None else np.frombuffer(content, dtypes.to_numpy(value))[0]


_CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "Attrs": lambda names, values: Attrs(dict(zip(names, values, strict=True))),
    "SymVar": lambda name, lower, upper, divisor: SymVar(name, lower=lower, upper=upper, divisor=divisor),
    "items": lambda *items: items,
    **{kind.__name__: kind for kind in vars(nodes).values() if isinstance(kind, type) and is_dataclass(kind)},
}


@cache
def _fields_of(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Getter of all fields of a node class."""
    if kind.__name__ not in _CONSTRUCTORS:
        raise TypeError(f"a tensor program holds a {kind.__name__}, whose identity is not known")
    return _field_getter([f.name for f in fields(kind)])


@cache
def _identity_of(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Getter of the fields that belong to the fingerprint of a node class."""
    _fields_of(kind)
    names = [f.name for f in fields(kind) if (kind, f.name) not in _IGNORED_FIELDS]
    return _field_getter(["identity" if (kind, name) == (TensorProgram, "attrs") else name for name in names])


def _field_getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda node: tuple([getattr(node, name) for name in names])


_VERBATIM, _NUMBER, _TUPLE, _EXPR, _ATTRS, _NODE = range(6)


@cache
def _encoding_of(kind: Any) -> int:
    if issubclass(kind, (str, type(None))):
        return _VERBATIM
    if issubclass(kind, (int, float, np.generic)):
        return _NUMBER
    if issubclass(kind, tuple):
        return _TUPLE
    return _EXPR if issubclass(kind, SymExpr) else _ATTRS if issubclass(kind, Attrs) else _NODE


class _Encoder:
    """Serializer of nodes and expressions to tokens."""

    def __init__(self, *, is_identity: bool) -> None:
        self.tokens: list[tuple[Any, ...]] = []
        self._is_identity = is_identity
        self._numbers: dict[int, int] = {}  # by id: the program keeps its nodes alive
        self._exprs: dict[SymExpr, int] = {}

    def write(self, root: Any) -> None:
        """Append tokens of all nodes below `root`, children first. An explicit stack, as values nest deeply."""
        stack: list[tuple[Any, tuple[Any, ...] | None]] = [(root, None)]  # (node, its fields once children are on it)
        numbers, read = self._numbers, _identity_of if self._is_identity else _fields_of
        while stack:
            node, items = stack.pop()
            if id(node) in numbers:
                continue
            kind: Any = type(node)
            if items is None:
                items = node if kind is tuple else read(kind)(node)
                children: list[Any] = []
                _add_nodes(items, children)
                pending = [(child, None) for child in reversed(children) if id(child) not in numbers]
                if pending:
                    stack.append((node, items))
                    stack += pending
                    continue
            token = ("items" if kind is tuple else kind.__name__, *map(self._item, items))
            numbers[id(node)] = len(self.tokens)
            self.tokens.append(token)

    def _item(self, item: Any) -> Any:
        kind = _encoding_of(type(item))  # type: ignore[arg-type]
        if kind == _VERBATIM:
            return item
        if kind == _EXPR:
            return self.expr(item)
        if kind == _NODE:
            number = self._numbers.get(id(item))
            if number is None:
                raise TypeError(f"an attribute of a program holds a {type(item).__name__}")
            return number
        if kind == _TUPLE:
            return tuple([self._item(part) for part in item])
        if kind == _NUMBER:
            return [dtypes.from_numpy(item.dtype), item.tobytes()] if isinstance(item, np.generic) else [item]
        return self._add(("Attrs", tuple(item), tuple(map(self._item, item.values()))))

    def expr(self, expr: SymExpr) -> int:
        number = self._exprs.get(expr)
        if number is None:
            if isinstance(expr, SymVar):
                facts = ([expr.lower], [expr.upper], [expr.divisor])
                number = self._add(("SymVar", *facts) if self._is_identity else ("SymVar", expr.name, *facts))
            elif isinstance(expr, BinaryAtom):
                number = self._add((type(expr).__name__, self.expr(expr.a), self.expr(expr.b)))
            else:
                terms = tuple([(coef, *map(self.expr, monomial)) for monomial, coef in expr.terms])
                number = self._add(("sum", expr.const, terms))
            self._exprs[expr] = number
        return number

    def _add(self, token: tuple[Any, ...]) -> int:
        self.tokens.append(token)
        return len(self.tokens) - 1


def _add_nodes(items: tuple[Any, ...], nodes_found: list[Any]) -> None:
    """Append the nodes among these field values, those in tuples included."""
    for item in items:
        kind = _encoding_of(type(item))  # type: ignore[arg-type]
        if kind == _NODE:
            nodes_found.append(item)
        elif kind == _TUPLE:
            _add_nodes(item, nodes_found)
