"""Registry of converters, the functions that convert PyTorch operators.

    @torch_op("aten.softmax.int", "aten._softmax")
    def softmax(n, x, dim, dtype=None):
        return ops.softmax(n.cast(x, n.dtype()), axis=dim)

A converter receives the node and the arguments by the names of the operator's schema; the first argument may have any
name. An argument that the converter does not take must have its default, else the import fails: no argument is ignored.
A key without an overload ("aten.add") serves all overloads; a key with one ("aten.add.Tensor") takes precedence.
`n` is a `Node` (node.py). Operators of a library of your own: `@rl.torch_op("mylib::scale")`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from relaxlite.errors import InvalidArgumentError
from relaxlite.records import dataclass

Convert: TypeAlias = "Callable[..., Any]"


@dataclass(frozen=True, slots=True)
class Converter:
    """A registered function with the names of its parameters after the node."""

    function: Convert
    params: tuple[str, ...]
    has_complex: bool  # takes `Complex` operands


_converters: dict[str, Converter] = {}
_complex_converters: dict[str, Converter] = {}  # take precedence where an operand or the result is complex
_builtin: list[dict[str, Converter]] = []  # copies of both tables with relaxlite's own converters


def torch_op(*names: str, complex: bool = False, replace: bool = False) -> Callable[[Convert], Convert]:
    """Register the decorated function as the converter of PyTorch operators, "aten.add", "aten.add.Tensor" or "ns::op".

    complex: the function takes complex operands (`Complex`). replace: replaces an existing converter. Raises
    InvalidArgumentError if an operator has a converter already.
    """

    def register(function: Convert) -> Convert:
        parameters = tuple(inspect.signature(function).parameters)[1:]
        for name in names:
            key = name.replace("::", ".")
            if key in _converters and not replace:
                raise InvalidArgumentError(f"the operator {key} has a converter; pass replace=True to replace it")
            _converters[key] = Converter(function, parameters, complex)
        return function

    return register


def complex_op(*names: str) -> Callable[[Convert], Convert]:
    """Register the decorated function as the converter of operators on complex tensors.

    Real tensors of these operators have a converter of their own, by `torch_op`.
    """

    def register(function: Convert) -> Convert:
        parameters = tuple(inspect.signature(function).parameters)[1:]
        for name in names:
            _complex_converters[name] = Converter(function, parameters, has_complex=True)
        return function

    return register


def find_converter(name: str, *, is_complex: bool = False) -> Converter | None:
    """Return the converter of an operator "namespace.name.overload": of the overload, else of all overloads.

    is_complex: an operand or the result is complex; a converter for such calls takes precedence.
    """
    packet = name.rpartition(".")[0]
    if is_complex and (converter := _complex_converters.get(name) or _complex_converters.get(packet)):
        return converter
    return _converters.get(name) or _converters.get(packet)


def mark_builtin_converters() -> None:
    """Record that relaxlite has registered all of its own converters."""
    _builtin[:] = [dict(_converters), dict(_complex_converters)]


def has_user_converters() -> bool:
    """Whether users have registered or replaced converters since `mark_builtin_converters`."""
    return _builtin != [_converters, _complex_converters]
