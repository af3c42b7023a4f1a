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
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import InvalidArgumentError
from relaxlite.frontend.llm.hf_folder import DTYPES, read_safetensors
from relaxlite.ir import ops  # noqa: F401  (registers the ops)
from relaxlite.ir.attributes import TIED, UNUSED
from relaxlite.ir.expr import Constant, Expr, Function
from relaxlite.ir.module import IRModule
from relaxlite.ir.parser import parse_module
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import Rewriter
from relaxlite.nesting import to_array, torch_of
from relaxlite.runtime.executable import ExecutableData
from relaxlite.updatable import OPTIONS, REST, SOURCE, weight_names

_KINDS = tuple(DTYPES)
_ROW = re.compile(r'^    constant\(\(([\d, ]*)\), "(\w+)"(.*)\),$', re.MULTILINE)

Weights: TypeAlias = "Mapping[str, Any] | str | os.PathLike[str]"


def module_with_weights(data: ExecutableData, weights: Weights) -> tuple[IRModule, dict[str, Any]]:
    """Return the imported module of an executable with other weights, and the options that it was compiled with.

    weights: arrays or tensors by name, or a safetensors file. Raises InvalidArgumentError with the names of weights
    that are missing, unknown or of another shape or dtype, and for a model that was not compiled with `updatable=True`;
    ImportModelError for a damaged file.
    """
    if SOURCE not in data.attachments:
        raise InvalidArgumentError("the model holds no source to load weights into; compile it with updatable=True")
    module = _module(data)
    arrays = _fitting(_arrays(weights), module)
    updated = module.updated({name: _Replace(arrays).function(f) for name, f in module.functions().items()})
    return updated, json.loads(data.attachments[OPTIONS])


def _module(data: ExecutableData) -> IRModule:
    """The imported module, with zeros in place of the large weights."""
    text = data.attachments[SOURCE].decode()
    with np.load(io.BytesIO(data.attachments[REST])) as rest:
        stored = {int(key): rest[key] for key in rest.files}
    constants = []
    for k, (dims, dtype, rest_of_row) in enumerate(_ROW.findall(text)):
        shape, numpy_dtype = tuple(int(d) for d in dims.split(",") if d.strip()), dtypes.to_numpy(dtype)
        array = stored[k].view(numpy_dtype) if k in stored else np.broadcast_to(np.zeros((), numpy_dtype), shape)
        name = re.search(r'name="([^"]*)"', rest_of_row)
        constants.append(Constant(array, TensorType.of(shape, dtype), name[1] if name else None))
    return parse_module(text, constants)


def _arrays(weights: Weights) -> dict[str, np.ndarray]:
    if isinstance(weights, Mapping):
        return {name: to_array(w) if torch_of([w]) is not None else np.asarray(w) for name, w in weights.items()}
    return {name: np.asarray(weight.data) for name, weight in read_safetensors(Path(weights), _KINDS).items()}


def _fitting(arrays: Mapping[str, np.ndarray], module: IRModule) -> dict[str, np.ndarray]:
    """Check the arrays against the weights of the module and return those that the module uses."""
    types = weight_names(module)
    aliases: dict[str, str] = dict(_entries(module, TIED))
    known = {*types, *aliases, *_entries(module, UNUSED)}
    problems = [f"'{name}' is missing" for name in types if name not in arrays]
    problems += [f"'{name}' is unknown" for name in arrays if name not in known]
    for name in (name for name in types if name in arrays):
        shape, dtype = list(map(int, types[name].shape or ())), types[name].dtype
        got = list(arrays[name].shape), dtypes.from_numpy(arrays[name].dtype)
        if got != (shape, dtype):
            problems.append(f"'{name}' is {arrays[name].dtype.name}{got[0]}, the model has {dtype}{shape}")
    for name, other in aliases.items():
        if name in arrays and other in arrays and not np.array_equal(arrays[name], arrays[other]):
            problems.append(f"'{name}' differs from '{other}', and the model has one weight for both")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise InvalidArgumentError(f"the weights do not fit the model: {'; '.join(problems[:8])}{more}")
    return {name: arrays[name] for name in types}


def _entries(module: IRModule, name: str) -> Any:
    """The value of an attribute of the module that is a tuple; () if there is none."""
    return module.attrs.get(name, ())


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
