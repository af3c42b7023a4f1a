"""The identity of a tensor program: equal programs of any process have one fingerprint, different ones never share it.

Unlike a printer or `structural_hash`, it reads every field of every node, whatever nodes there are: a new field of the
IR cannot be forgotten, which would hand out the code of another program. Only the names of buffers and of symbolic
variables and the steps of the schedule are left out; each variable is the number of its first occurrence, with its
facts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import numpy as np

from relaxlite.ir.expr import Attrs
from relaxlite.ir.program import Buffer, TensorProgram
from relaxlite.ir.symbolic import SymExpr, SymVar, to_text
from relaxlite.ir.text import attrs_key

_PLAIN = (str, int, float, bool, np.generic, type(None))
_WITHOUT_NODES = (*_PLAIN, SymExpr, Attrs)
_NAMES = {(Buffer, "name")}


def fingerprint(program: TensorProgram) -> str:
    """64 hexadecimal digits. TypeError for a node that holds something that has no exact text."""
    walk = _Walk()
    walk.number(program)
    return hashlib.sha256(repr(walk.tokens).encode()).hexdigest()


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    if not is_dataclass(kind):
        raise TypeError(f"a tensor program holds a {kind.__name__}, whose identity is not known")
    return tuple(f.name for f in fields(kind) if (kind, f.name) not in _NAMES)


def _fields_of(node: Any) -> tuple[Any, ...]:
    names = _field_names(type(node))  # type: ignore[arg-type]
    items = tuple(getattr(node, name) for name in names)
    if not isinstance(node, TensorProgram):
        return items
    return tuple(node.identity if name == "attrs" else item for name, item in zip(names, items, strict=True))


def _nodes(item: Any) -> Iterator[Any]:
    """The nodes in the value of a field."""
    if isinstance(item, tuple):
        for part in item:
            yield from _nodes(part)
    elif not isinstance(item, _WITHOUT_NODES):
        yield item


class _Walk:
    """Nodes in postorder, each once: a token is made of the numbers of what is below it."""

    def __init__(self) -> None:
        self.tokens: list[tuple[Any, ...]] = []
        self._numbers: dict[int, int] = {}  # by id: the program keeps its nodes alive
        self._texts: dict[SymExpr, str] = {}
        self._symbols: dict[SymVar, str] = {}

    def number(self, root: Any) -> None:
        """By a stack of its own: values may nest deeper than Python's."""
        stack: list[tuple[Any, tuple[Any, ...] | None]] = [(root, None)]  # with the fields where all below has a number
        while stack:
            node, items = stack.pop()
            if id(node) in self._numbers:
                continue
            if items is None:
                items = _fields_of(node)
                below = [child for child in _nodes(items) if id(child) not in self._numbers]
                if below:
                    stack.append((node, items))
                    stack.extend((child, None) for child in reversed(below))
                    continue
            token = (type(node).__name__, *map(self._token, items))
            self._numbers[id(node)] = len(self.tokens)
            self.tokens.append(token)

    def _token(self, item: Any) -> Any:
        if isinstance(item, _PLAIN):
            return item
        if isinstance(item, SymExpr):
            return self._text(item)
        if isinstance(item, tuple):
            return tuple(map(self._token, item))
        return attrs_key(item) if isinstance(item, Attrs) else self._numbers[id(item)]

    def _text(self, expr: SymExpr) -> str:
        text = self._texts.get(expr)
        if text is None:
            self._texts[expr] = text = to_text(expr, self._symbol)
        return text

    def _symbol(self, var: SymVar) -> str:
        name = self._symbols.get(var)
        if name is None:
            self._symbols[var] = name = f"s{len(self._symbols)}"
            self.tokens.append(("symbol", var.lower, var.upper, var.divisor))
        return name
