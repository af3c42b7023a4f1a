"""Other weights in a compiled model: `Executable.load_weights`.

A model that was compiled with `updatable=True` holds its imported module: the text, and the constants that are not
weights. Loading weights runs the passes again on the module with the new weights, since passes fold, pack and transform
constants. The kernels stay: no code is compiled, unless the new values let a pass decide otherwise (a zero point that
is not constant any more, say).
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from relaxlite import dtypes
from relaxlite.driver import build
from relaxlite.errors import InvalidArgumentError
from relaxlite.frontend.llm.hf_folder import read_safetensors
from relaxlite.ir import ops  # noqa: F401  (registers the ops)
from relaxlite.ir.attributes import TIED, UNUSED, WEIGHTS
from relaxlite.ir.expr import Constant, Expr, Function, Let, Tuple
from relaxlite.ir.module import IRModule
from relaxlite.ir.parser import parse_module
from relaxlite.ir.printer import module_constants, print_module
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import Rewriter, bodies, operands
from relaxlite.nesting import to_array, torch_of
from relaxlite.runtime.executable import ExecutableData

SOURCE, REST = "source.module", "source.npz"  # attachments: text of the module, constants that are not weights
_OPTIONS = "source.json"  # options of the compilation
_KINDS = ("I64", "I32", "I16", "I8", "U8", "BOOL", "F64")
_HASH = re.compile(r', hash="[0-9a-f]*"(?=, name=)')
_ROW = re.compile(r'^    constant\(\(([\d, ]*)\), "(\w+)"(.*)\),$', re.MULTILINE)

Weights: TypeAlias = "Mapping[str, Any] | str | os.PathLike[str]"


def attach_source(data: ExecutableData, module: IRModule, options: Mapping[str, Any]) -> ExecutableData:
    """Return an executable that holds its imported module, for `load_weights`.

    Raises InvalidArgumentError for options that cannot be stored.
    """
    try:
        stored_options = json.dumps({name: value for name, value in options.items() if value is not None}).encode()
    except TypeError as error:
        raise InvalidArgumentError(f"updatable=True: {error}; pass the options of compile as plain values") from error
    names = _weight_names(module)
    rest = {str(k): _bits(c.value) for k, c in enumerate(module_constants(module)) if c.name not in names}
    buffer = io.BytesIO()
    np.savez(buffer, **rest)  # type: ignore[arg-type]
    source = {SOURCE: _HASH.sub("", print_module(module)).encode(), REST: buffer.getvalue(), _OPTIONS: stored_options}
    return replace(data, attachments={**data.attachments, **source})


def with_weights(data: ExecutableData, weights: Weights) -> ExecutableData:
    """Return the executable with other weights: arrays or tensors by name, or a safetensors file.

    Raises InvalidArgumentError with the names of weights that are missing, unknown or of another shape or dtype, and
    for a model that was not compiled with `updatable=True`; ImportModelError for a damaged file.
    """
    if SOURCE not in data.attachments:
        raise InvalidArgumentError("the model holds no source to load weights into; compile it with updatable=True")
    module = _module(data)
    arrays = _fitting(_arrays(weights), module)
    updated = module.updated({name: _Replace(arrays).function(f) for name, f in module.functions().items()})
    return replace(build(updated, **json.loads(data.attachments[_OPTIONS])), attachments=data.attachments)


def _weight_names(module: IRModule) -> dict[str, TensorType]:
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


def _module(data: ExecutableData) -> IRModule:
    """The imported module, with zeros in place of the large weights."""
    text = data.attachments[SOURCE].decode()
    with np.load(io.BytesIO(data.attachments[REST])) as rest:
        stored = {int(key): rest[key] for key in rest.files}
    constants = []
    for k, (dims, dtype, _) in enumerate(_ROW.findall(text)):
        shape, numpy_dtype = tuple(int(d) for d in dims.split(",") if d.strip()), dtypes.to_numpy(dtype)
        array = stored[k].view(numpy_dtype) if k in stored else np.broadcast_to(np.zeros((), numpy_dtype), shape)
        name = re.search(r'name="([^"]*)"', _)
        constants.append(Constant(array, TensorType.of(shape, dtype), name[1] if name else None))
    return parse_module(text, constants)


def _arrays(weights: Weights) -> dict[str, np.ndarray]:
    if isinstance(weights, Mapping):
        return {name: to_array(w) if torch_of([w]) is not None else np.asarray(w) for name, w in weights.items()}
    return {name: np.asarray(weight.data) for name, weight in read_safetensors(Path(weights), _KINDS).items()}


def _fitting(arrays: Mapping[str, np.ndarray], module: IRModule) -> dict[str, np.ndarray]:
    """Check the arrays against the weights of the module and return those that the module uses."""
    types, aliases = _weight_names(module), dict(module.attrs.get(TIED, ()))  # type: ignore[call-overload]
    known = {*types, *aliases, *module.attrs.get(UNUSED, ())}  # type: ignore[misc]
    problems = [f"'{name}' is missing" for name in types if name not in arrays]
    problems += [f"'{name}' is unknown" for name in arrays if name not in known]
    for name, ty in types.items():
        if name in arrays and (arrays[name].shape != tuple(map(int, ty.shape or ())) or _dtype(arrays[name]) != ty.dtype):
            got = f"{arrays[name].dtype.name}{list(arrays[name].shape)}"
            problems.append(f"'{name}' is {got}, the model has {ty.dtype}{list(map(int, ty.shape or ()))}")
    for name, other in aliases.items():
        if name in arrays and other in arrays and not np.array_equal(arrays[name], arrays[other]):
            problems.append(f"'{name}' differs from '{other}', and the model has one weight for both")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise InvalidArgumentError(f"the weights do not fit the model: {'; '.join(problems[:8])}{more}")
    return {name: arrays[name] for name in types}


def _dtype(array: np.ndarray) -> str | None:
    return dtypes.from_numpy(array.dtype)


class _Replace(Rewriter):
    """Replaces constants by name."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        super().__init__()
        self._constants = {name: Constant.of(array, name=name) for name, array in arrays.items()}

    def operand(self, expr: Expr) -> Expr:
        if isinstance(expr, Constant):
            return self._constants.get(expr.name or "", expr)
        return super().operand(expr)

    def _operands(self, exprs: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return super()._operands(tuple(self.operand(e) if isinstance(e, Constant) else e for e in exprs))

    def function(self, function: Function) -> Function:
        return replace(function, body=self.body(function.body))
