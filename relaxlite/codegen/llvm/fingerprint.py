"""The identity of a tensor program: equal programs of any process have one fingerprint, different ones never share it.

Unlike a printer or `structural_hash`, it reads every field of every node, whatever nodes there are: a new field of the
IR cannot be forgotten, which would hand out the code of another program. Only the names of buffers and of symbolic
variables and the steps of the schedule are left out; each variable is the number of its first occurrence, with its
facts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np

from relaxlite.ir.expr import Attrs
from relaxlite.ir.program import Buffer, TensorProgram
from relaxlite.ir.symbolic import Pair, SymExpr, SymVar
from relaxlite.ir.text import attrs_key

_PLAIN = (str, int, float, bool, np.generic, type(None))
_NAMES = {(Buffer, "name")}


def fingerprint(program: TensorProgram) -> str:
    """64 hexadecimal digits. TypeError for a node that holds something that has no exact text."""
    walk = _Walk()
    walk.number(program)
    return hashlib.sha256(repr(walk.tokens).encode()).hexdigest()


@cache
def _fields_of(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Reads the fields of a node of this kind that belong to its identity."""
    if not is_dataclass(kind):
        raise TypeError(f"a tensor program holds a {kind.__name__}, whose identity is not known")
    names = [f.name for f in fields(kind) if (kind, f.name) not in _NAMES]
    if kind is TensorProgram:
        names[names.index("attrs")] = "identity"
    if len(names) > 1:
        return attrgetter(*names)
    return lambda node: tuple([getattr(node, name) for name in names])


@cache
def _is_node(kind: Any) -> bool:
    return not issubclass(kind, (*_PLAIN, SymExpr, Attrs, tuple))


@cache
def _is_plain(kind: Any) -> bool:
    return issubclass(kind, _PLAIN)


def _add_nodes(items: tuple[Any, ...], found: list[Any]) -> None:
    """The nodes among these values of fields."""
    for item in items:
        kind: Any = type(item)
        if kind is tuple:
            _add_nodes(item, found)
        elif _is_node(kind):
            found.append(item)


class _Walk:
    """Nodes in postorder, each once: a token is made of the numbers of what is below it."""

    def __init__(self) -> None:
        self.tokens: list[tuple[Any, ...]] = []
        self._numbers: dict[int, int] = {}  # by id: the program keeps its nodes alive
        self._exprs: dict[SymExpr, str] = {}

    def number(self, root: Any) -> None:
        """By a stack of its own: values may nest deeper than Python's."""
        stack: list[tuple[Any, tuple[Any, ...] | None]] = [(root, None)]  # with the fields where all below has a number
        numbers = self._numbers
        while stack:
            node, items = stack.pop()
            if id(node) in numbers:
                continue
            if items is None:
                kind: Any = type(node)
                items, below = _fields_of(kind)(node), list[Any]()
                _add_nodes(items, below)
                todo = [(child, None) for child in reversed(below) if id(child) not in numbers]
                if todo:
                    stack.append((node, items))
                    stack += todo
                    continue
            token = (type(node).__name__, *map(self._token, items))
            numbers[id(node)] = len(self.tokens)
            self.tokens.append(token)

    def _token(self, item: Any) -> Any:
        kind: Any = type(item)
        if _is_plain(kind):
            return item
        if kind is tuple:
            return tuple([self._token(part) for part in item])
        if _is_node(kind):
            return self._numbers[id(item)]
        return self._expr(item) if isinstance(item, SymExpr) else attrs_key(item)

    def _expr(self, expr: SymExpr) -> str:
        name = self._exprs.get(expr)
        if name is None:
            token: tuple[Any, ...]
            if isinstance(expr, SymVar):
                token = ("symbol", expr.lower, expr.upper, expr.divisor)
            elif isinstance(expr, Pair):
                token = (type(expr).__name__, self._expr(expr.a), self._expr(expr.b))
            else:
                token = ("sum", expr.const, *[(coef, *map(self._expr, monomial)) for monomial, coef in expr.terms])
            self._exprs[expr] = name = f"e{len(self.tokens)}"
            self.tokens.append(token)
        return name
