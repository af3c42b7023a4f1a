"""Arguments of an operator call, bound to the parameters of its converter by the operator's schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from relaxlite.errors import ImportModelError
from relaxlite.frontend.torch.registry import Converter

# Arguments that change no value: order and copies in memory, and how a copy is made. Tensors are dense and values here.
_PLACEMENT = frozenset(("pin_memory", "memory_format", "non_blocking", "implicit", "copy"))


def _is_served(name: str, value: Any) -> bool:
    """Whether an argument that no converter takes may have the value.

    A device is that of the export; the compiled model runs on the CPU. Only tensors of "meta" have no values there. A
    generator of the caller cannot be honoured: the executable has its own.
    """
    if name == "device":
        return value is None or torch.device(value).type != "meta"
    if name == "layout":
        return value in (None, torch.strided)
    return name in _PLACEMENT or (name == "generator" and value is None)


def bind_arguments(
    node: torch.fx.Node, converter: Converter, value: Callable[[Any], Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments for a converter. `value`: gives the value of an fx argument.

    Raises ImportModelError for an argument that the converter does not take, unless it has its default.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return [value(x) for x in node.args], {k: value(v) for k, v in node.kwargs.items()}
    arguments = list(schema.arguments)
    given = dict(zip((a.name for a in arguments), node.args, strict=False)) | dict(node.kwargs)
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for index, argument in enumerate(arguments):
        name = argument.name
        present = name in given
        raw = given[name] if present else argument.default_value if argument.has_default_value() else None
        if index == 0 and converter.params:
            positional.append(value(raw))
        elif name in converter.params:
            if present or not argument.has_default_value() or argument.default_value is not None:
                keywords[name] = value(raw)
        elif present and not _is_served(name, raw) and not _is_default(raw, argument):
            raise ImportModelError(f"argument {name}={raw!r} of {node.target} is not supported")
    return positional, keywords


def _is_default(value: Any, argument: Any) -> bool:
    default = argument.default_value if argument.has_default_value() else None
    return argument.has_default_value() and type(value) is type(default) and value == default
