"""Converters of real tensors that serve complex ones, part by part: of operators that only move elements."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from relaxlite.frontend.torch.node import Complex, Node
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr, Var

_VALUES = ("value", "values", "fill", "src", "source")  # arguments whose elements become those of a result


def over_parts(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Let a converter of an operator that moves elements take complex operands: once for each part."""

    @functools.wraps(convert)
    def converted(n: Node, *args: Any, **kwargs: Any) -> Any:
        if not _has_complex((*args, *kwargs.values())):
            return convert(n, *args, **kwargs)
        real, imaginary = (convert(n, *(_part(n, a, k) for a in args), **_part(n, kwargs, k)) for k in (0, 1))
        return _combined(n, real, imaginary)

    return converted


def part(n: Node, x: Complex, k: int) -> Expr:
    """Return the real (0) or imaginary (1) part."""
    rank = n.rank(x.parts) - 1
    return n.emit(ops.squeeze(n.emit(ops.slice(x.parts, (k,), (1,), axes=(rank,))), axes=(rank,)))


def combine(n: Node, real: Expr, imaginary: Expr) -> Complex:
    """Return the complex tensor of two parts."""
    axis = n.rank(real)
    columns = [n.emit(ops.expand_dims(x, axes=(axis,))) for x in (real, imaginary)]
    return Complex(n.emit(ops.concat(*columns, axis=axis)))


def _has_complex(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_complex, value))
    return isinstance(value, Complex)


def _part(n: Node, value: Any, k: int) -> Any:
    """Return a part of the complex operands among arguments; the imaginary part of real values is 0."""
    if isinstance(value, Complex):
        return part(n, value, k)
    if isinstance(value, complex):
        n.fail("a complex number as an argument")
    if isinstance(value, list | tuple):
        if _has_complex(value):
            return [part(n, v, k) if isinstance(v, Complex) else _value_part(n, v, k) for v in value]
        return value
    if isinstance(value, dict):
        return {name: (_value_part if name in _VALUES else _part)(n, v, k) for name, v in value.items()}
    return value


def _value_part(n: Node, value: Any, k: int) -> Any:
    if isinstance(value, Complex):
        return part(n, value, k)
    if isinstance(value, complex):
        return (value.real, value.imag)[k]
    if value is None or k == 0:
        return value
    return n.full(n.shape_of(value), 0, n.dtype_of(value)) if isinstance(value, Var | Constant) else 0


def _combined(n: Node, real: Any, imaginary: Any) -> Any:
    if isinstance(real, list | tuple):
        return [_combined(n, a, b) for a, b in zip(real, imaginary, strict=True)]
    return combine(n, real, imaginary)
