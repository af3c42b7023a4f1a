"""Models as the command line names them: a compiled file is loaded, others are compiled once and kept."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from relaxlite import model_cache
from relaxlite.errors import InvalidArgumentError, RelaxliteError
from relaxlite.loading import external_data, is_checkpoint
from relaxlite.runtime import threadpool
from relaxlite.runtime.artifact import MAGIC, load
from relaxlite.runtime.executable import ExecutableData
from relaxlite.runtime.module import Executable

_ONNX_OPTIONS = ("dynamic_shape", "bound", "target", "tuning", "libraries", "precision", "constant_memory")
_OPTIONS = (*_ONNX_OPTIONS, "max_context", "cache_dtype", "quantize")


def open_model(args: argparse.Namespace) -> Executable:
    """An executable of `args.model`, with `args.threads`."""
    if args.threads is not None:
        threadpool.set_num_threads(args.threads)  # before a model is compiled, which may take long
    if is_compiled(args.model):
        return Executable(open_data(args))
    return Executable(compile_once(args, model_cache.MODEL, partial(open_data, args)))


def compile_once(args: argparse.Namespace, kind: str, make: Callable[[], ExecutableData]) -> ExecutableData:
    """What `args.model` compiles to: kept from before, or as `make` makes it. With -v it is made.

    `kind`: MODEL or LANGUAGE_MODEL of model_cache.
    """
    if getattr(args, "verbose", False):
        return make()
    tuning = getattr(args, "tuning", None)
    return model_cache.find_or_make(
        Path(args.model),
        kind,
        _options(args),
        make,
        files=[Path(tuning)] if tuning else [],
        more=partial(external_data, source=Path(args.model)),
    )


def kept_file(args: argparse.Namespace, kind: str) -> Path | None:
    """Where what `compile_once` gave is kept, if it is."""
    place = model_cache.place_of(Path(args.model), kind, _options(args))
    return place.path if place is not None and os.path.exists(place.path) else None


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Those that are given, by other names than in Python, where they are written in another way."""
    return {f"--{name}": value for name in _OPTIONS if (value := getattr(args, name, None))}


def open_data(args: argparse.Namespace, *, to_run: bool = True) -> ExecutableData:
    """What `args.model` holds, or compiles to. `to_run=False`: a compiled file may be for another machine."""
    if not is_compiled(args.model):
        from relaxlite.cli.compiling import compile_model

        return compile_model(args)
    check_not_compiled(args, **{name: f"--{name.replace('_', '-')}" for name in _ONNX_OPTIONS})
    return load(args.model, verify=getattr(args, "verify", False), to_run=to_run)


def is_compiled(path: str, *, suggesting: Sequence[str] = ("onnx", "rlx", "gguf")) -> bool:
    """Whether a file is, or says that it is, made by `relaxlite compile`. Raises RelaxliteError if there is none, and
    for a folder, of which it suggests a file with one of these endings."""
    result = Path(path)
    if not path or not result.exists():
        raise RelaxliteError(f"there is no file {path!r}")
    if is_checkpoint(path):
        return False
    if result.is_dir():
        inside = sorted(file for ending in suggesting for file in result.glob(f"*.{ending}"))
        hint = f"give the path of a model in it, as {str(inside[0])!r}" if inside else "give the path of a model in it"
        if (result / "adapter_config.json").exists():
            hint = "merge the adapter (LoRA) that it holds into its model"
        raise RelaxliteError(f"{path!r} is a folder; {hint}")
    if result.suffix == ".safetensors" or result.name == "config.json":
        raise RelaxliteError(f"{path!r} is one file of a Hugging Face folder; give the folder, {str(result.parent)!r}")
    if result.suffix == ".rlx" or not result.is_file():  # what is read from a pipe cannot be read again
        return result.suffix == ".rlx"
    with open(result, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def checkpoint_options(args: argparse.Namespace, *more: str) -> str:
    """Which options are given that make sense only where a language model is compiled: "--quantize needs a checkpoint",
    or "". `more` names some, by attribute, that are such here."""
    known = ("max_context", "cache_dtype", "quantize", *more)
    names = [f"--{name.replace('_', '-')}" for name in known if getattr(args, name)]
    return f"{' and '.join(names)} {'needs' if len(names) == 1 else 'need'} a checkpoint" if names else ""


def check_not_onnx(args: argparse.Namespace) -> None:
    """Refuse options that make sense for an ONNX file only."""
    for name, option in (("dynamic_shape", "--dynamic-shape"), ("bound", "--bound")):
        if getattr(args, name, None):
            raise InvalidArgumentError(f"{option} needs an ONNX file, and {args.model!r} is a language model")


def check_not_compiled(args: argparse.Namespace, **options: str) -> None:
    """Refuse options (by attribute) that make sense for an ONNX file only."""
    for name, option in options.items():
        if getattr(args, name, None):
            raise InvalidArgumentError(f"{option} needs an ONNX file, and {args.model!r} is compiled already")
