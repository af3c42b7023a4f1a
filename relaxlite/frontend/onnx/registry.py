"""Registry of converters, the functions that convert ONNX ops.

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

Result: TypeAlias = "Expr | tuple[Expr | None, ...]"  # one value per output; None for an unused one
Converter: TypeAlias = "Callable[[Node], Result]"

_converters: dict[tuple[str, str], list[tuple[int, Converter]]] = {}
_num_builtin = [0]  # how many converters are relaxlite's own


def onnx_op(*names: str, since: int = 1, domain: str = "") -> Callable[[Converter], Converter]:
    """Register the decorated function as the converter of these ops from opset version `since` on.

    Raises InvalidArgumentError if an op has a converter of the same version.
    """

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
    """Return the domain's canonical name: the standard domain, "" or "ai.onnx", is ""."""
    return "" if domain == "ai.onnx" else domain


def find_converter(domain: str, name: str, opset: int) -> Converter | None:
    """Return an op's converter for this opset version of its domain, or None."""
    converter = None
    for since, function in _converters.get((domain, name), ()):
        if since <= opset:
            converter = function
    return converter


def mark_builtin_converters() -> None:
    """Record that relaxlite has registered all of its own converters."""
    _num_builtin[0] = _count()


def has_user_converters() -> bool:
    """Whether converters have been registered since `mark_builtin_converters`, by users."""
    return _count() != _num_builtin[0]


def _count() -> int:
    return sum(map(len, _converters.values()))


def known_ops() -> list[tuple[str, str]]:
    """Return (domain, name) of every op that has a converter."""
    return sorted(_converters)
