"""Which function converts which ONNX op.

    @onnx_op("Softmax", since=13)
    def softmax(n: Node) -> Result:
        return ops.softmax(n.input(0), axis=n.int("axis", -1))

The converter of a node is the one with the greatest `since` that is not newer than the model's opset of that domain.
To add an op (also one of a domain of your own), register a converter before calling `from_onnx`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from relaxlite.errors import InvalidArgumentError
from relaxlite.ir.expr import Expr

if TYPE_CHECKING:
    from relaxlite.frontend.onnx.node import Node

Result: TypeAlias = "Expr | tuple[Expr | None, ...]"  # one value per output; None for one that is not asked for
Converter: TypeAlias = "Callable[[Node], Result]"

_converters: dict[tuple[str, str], list[tuple[int, Converter]]] = {}
_own = [0]  # how many of them are relaxlite's


def onnx_op(*names: str, since: int = 1, domain: str = "") -> Callable[[Converter], Converter]:
    """Function decorator: it converts these ops from opset `since` on."""

    def register(function: Converter) -> Converter:
        for name in names:
            versions = _converters.setdefault((canonical_domain(domain), name), [])
            if any(known == since for known, _ in versions):
                raise InvalidArgumentError(f"ONNX op {name} has two converters since opset {since}")
            versions.append((since, function))
            versions.sort(key=lambda version: version[0])
        return function

    return register


def canonical_domain(domain: str) -> str:
    """The standard domain has two spellings."""
    return "" if domain == "ai.onnx" else domain


def find_converter(domain: str, name: str, opset: int) -> Converter | None:
    """The converter for this opset of the domain, or None."""
    result = None
    for since, function in _converters.get((domain, name), ()):
        if since <= opset:
            result = function
    return result


def mark_own() -> None:
    """Called when relaxlite has registered all of its own converters."""
    _own[0] = _count()


def has_foreign() -> bool:
    """Whether somebody else has registered converters since."""
    return _count() != _own[0]


def _count() -> int:
    return sum(map(len, _converters.values()))


def known_ops() -> list[tuple[str, str]]:
    """(domain, name) of every op with a converter."""
    return sorted(_converters)
