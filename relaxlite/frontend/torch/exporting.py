"""Import of PyTorch modules, exported programs and saved programs: `from_torch`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.export import ExportedProgram
from torch.export import dynamic_shapes as shapes

from relaxlite.errors import ImportModelError, InvalidArgumentError, RelaxliteError
from relaxlite.frontend.common.bounds import Bounds
from relaxlite.frontend.torch.functional import functionalize
from relaxlite.frontend.torch.program import DimNames, ProgramImporter
from relaxlite.frontend.torch.recurrent_layers import recurrent_layers_kept
from relaxlite.frontend.torch.survey import check_operators
from relaxlite.garbage import with_gc_disabled
from relaxlite.ir.module import IRModule

DynamicShapes: TypeAlias = "dict[str, Any] | tuple[Any, ...] | list[Any] | None"
Model: TypeAlias = "torch.nn.Module | ExportedProgram | str | os.PathLike[str]"


@with_gc_disabled
def from_torch(
    model: Model,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: DynamicShapes = None,
    bounds: Bounds | None = None,
    strict: bool = False,
) -> IRModule:
    """Import a PyTorch model as an IRModule whose entry function is "main".

    model: an `nn.Module`, which `torch.export` exports with the example arguments `args` and `kwargs`; an
    `ExportedProgram`; or the path of a saved one (.pt2). dynamic_shapes, strict: as of `torch.export.export`; symbols
    get the names of the user's `Dim`s, else of input and axis, as `x_dim0`. bounds: narrower ranges of symbols,
    `{"batch": "1..64"}`, checked when the model runs.

    Buffers and arguments that the model writes are state of the compiled model (`Executable.state`). Raises
    ImportModelError (UnsupportedOpsError lists all operators without a converter), InvalidArgumentError.
    """
    names: DimNames = {}
    if isinstance(model, torch.nn.Module):
        if args is None and kwargs is None:
            raise InvalidArgumentError("from_torch(module, args): give example arguments, with which to export it")
        program = _export(model, tuple(args or ()), dict(kwargs or {}), dynamic_shapes, strict)
        names = _dim_names(model, program, tuple(args or ()), dict(kwargs or {}), dynamic_shapes)
    else:
        if args is not None or kwargs is not None or dynamic_shapes is not None:
            raise InvalidArgumentError("args, kwargs, dynamic_shapes: of a module to export; this one is exported")
        program = model if isinstance(model, ExportedProgram) else _load(model)
    try:
        functional = functionalize(program)
        check_operators(functional.graph_module)
        return ProgramImporter(functional, names, bounds).run()
    except RelaxliteError:
        raise
    except Exception as error:
        raise ImportModelError(f"the program cannot be imported ({type(error).__name__}: {error})") from error


def _export(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: DynamicShapes, strict: bool
) -> ExportedProgram:
    with recurrent_layers_kept(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            return torch.export.export(
                model,
                args,
                kwargs or None,
                dynamic_shapes=dynamic_shapes,
                strict=strict,
            )
        except Exception as error:
            name = type(model).__name__
            raise ImportModelError(f"torch.export cannot export {name}: {error}\n{_hint(str(error))}") from error


_HINTS = {
    "Constraints violated": "hint: leave out the Dim of a size that the model fixes, or use torch.export.Dim.AUTO",
    "marked as dynamic": "hint: float(n), math.sqrt(n) fix a size; torch.sym_sqrt(n) and n ** -0.5 do not",
    "data-dependent": "hint: state what holds by torch._check(condition), as torch's message proposes",
    "Could not guard": "hint: state what holds by torch._check(condition), as torch's message proposes",
    "positional arguments": "hint: args must be a tuple of the arguments of forward",
}


def _hint(message: str) -> str:
    default = "hint: see https://docs.pytorch.org/docs/stable/export.html for what torch.export takes"
    return next((hint for text, hint in _HINTS.items() if text in message), default)


def _load(path: str | os.PathLike[str]) -> ExportedProgram:
    try:
        file = Path(path)
        if not file.is_file():
            raise ImportModelError(f"cannot import {path}: there is no such file")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.load(file)
    except RelaxliteError:
        raise
    except TypeError as error:
        raise InvalidArgumentError(f"expected a module, an ExportedProgram or the path of one, got {path!r}") from error
    except Exception as error:
        raise ImportModelError(
            f"{path} cannot be read as an exported program of torch {torch.__version__} ({type(error).__name__}: "
            f"{error}); hint: write it by torch.export.save of this version"
        ) from error


def _dim_names(
    model: torch.nn.Module,
    program: ExportedProgram,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: DynamicShapes,
) -> DimNames:
    """Names that the user's `Dim`s give to axes of the program's inputs."""
    if not dynamic_shapes:
        return {}
    user_inputs = iter([s.arg.name for s in program.graph_signature.input_specs if s.kind.name == "USER_INPUT"])
    names: dict[tuple[str, int], str] = {}

    def visit(_path: Any, _leaf: Any, spec: Any) -> None:
        placeholder = next(user_inputs, "")
        items = spec.items() if isinstance(spec, Mapping) else enumerate(spec or ())
        for axis, dim in items:
            if isinstance(dim, shapes.Dim) and type(dim) is shapes.Dim:
                names[placeholder, axis] = dim.__name__

    combined = shapes._combine_args(model, args, kwargs)
    if not isinstance(dynamic_shapes, Mapping):
        dynamic_shapes = type(combined)(zip(combined, dynamic_shapes, strict=False))
    shapes._tree_map_with_path(visit, combined, dynamic_shapes)
    return names
