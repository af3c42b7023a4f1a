"""The imported module inside a compiled model, for `Executable.load_weights` (weights_update.py)."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from relaxlite.errors import InvalidArgumentError
from relaxlite.ir.attributes import WEIGHTS
from relaxlite.ir.expr import Constant, Function, Let, Tuple
from relaxlite.ir.module import IRModule
from relaxlite.ir.printer import module_constants, print_module
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import bodies, operands
from relaxlite.runtime.executable import ExecutableData

SOURCE, REST = "source.module", "source.npz"  # attachments: text of the module, constants that are not weights
OPTIONS = "source.json"  # options of the compilation
_HASH = re.compile(r', hash="[0-9a-f]*"(?=, name=)')


def attach_source(data: ExecutableData, module: IRModule, options: Mapping[str, Any]) -> ExecutableData:
    """Return an executable that holds its imported module, for `load_weights`.

    Raises InvalidArgumentError for options that cannot be stored.
    """
    try:
        stored_options = json.dumps({name: value for name, value in options.items() if value is not None}).encode()
    except TypeError as error:
        raise InvalidArgumentError(f"updatable=True: {error}; pass the options of compile as plain values") from error
    names = weight_names(module)
    rest = {str(k): _bits(c.value) for k, c in enumerate(module_constants(module)) if c.name not in names}
    buffer = io.BytesIO()
    np.savez(buffer, **rest)  # type: ignore[arg-type]
    source = {SOURCE: _HASH.sub("", print_module(module)).encode(), REST: buffer.getvalue(), OPTIONS: stored_options}
    return replace(data, attachments={**data.attachments, **source})


def weight_names(module: IRModule) -> dict[str, TensorType]:
    """Types of the weights by name: the constants that `weights` of the module names, else all that have a name."""
    chosen = module.attrs.get(WEIGHTS)
    constants = {c.name: c.ty for f in module.functions().values() for c in _constants(f) if c.name is not None}
    return {name: ty for name, ty in constants.items() if chosen is None or name in chosen}  # type: ignore[operator]


def _constants(function: Function) -> Iterator[Constant]:
    for body in bodies(function):
        results = body.result.fields if isinstance(body.result, Tuple) else (body.result,)
        values = [b.value if isinstance(b, Let) else b.source for b in body.bindings()]
        for value in (*values, *results):
            yield from (x for x in (value, *operands(value)) if isinstance(x, Constant))


def _bits(array: np.ndarray) -> np.ndarray:
    """The array in a type that .npz files hold: bfloat16 as uint16."""
    return array if array.dtype.isbuiltin else array.view(np.uint16)
