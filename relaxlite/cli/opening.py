"""Loading of models by path: compiled files are loaded, other models are compiled and cached on disk."""

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
    """Return an executable of `args.model`; set the number of threads to `args.threads`."""
    if args.threads is not None:
        threadpool.set_num_threads(args.threads)  # before a compilation, which may take long
    if is_compiled(args.model):
        return Executable(open_data(args))
    return Executable(compile_cached(args, model_cache.MODEL, partial(open_data, args)))


def compile_cached(args: argparse.Namespace, kind: str, make: Callable[[], ExecutableData]) -> ExecutableData:
    """Return compiled `args.model` from the model cache, or compile it by `make`; with -v it is always compiled.

    `kind`: MODEL or LANGUAGE_MODEL of model_cache.
    """
    if getattr(args, "verbose", False):
        return make()
    tuning = getattr(args, "tuning", None)
    return model_cache.load_or_compile(
        Path(args.model),
        kind,
        _options(args),
        make,
        files=[Path(tuning)] if tuning else [],
        more=partial(external_data, source=Path(args.model)),
    )


def cached_file(args: argparse.Namespace, kind: str) -> Path | None:
    """Return the path of the model cache's file for `args.model`, or None if there is none."""
    cache_entry = model_cache.cache_entry(Path(args.model), kind, _options(args))
    return cache_entry.path if cache_entry is not None and os.path.exists(cache_entry.path) else None


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given options by name; "--" tells them from those of `relaxlite.load`, whose values differ in form."""
    return {f"--{name}": value for name in _OPTIONS if (value := getattr(args, name, None))}


def open_data(args: argparse.Namespace, *, to_run: bool = True) -> ExecutableData:
    """Load or compile `args.model`, without the model cache. `to_run=False` permits files for another machine."""
    if not is_compiled(args.model):
        from relaxlite.cli.compiling import compile_model

        return compile_model(args)
    check_not_compiled(args, **{name: f"--{name.replace('_', '-')}" for name in _ONNX_OPTIONS})
    return load(args.model, verify=getattr(args, "verify", False), to_run=to_run)


def is_compiled(path: str, *, suggesting: Sequence[str] = ("onnx", "pt2", "rlx", "gguf")) -> bool:
    """Whether a file is a compiled model, by its magic number or its name's ending, .rlx.

    Raises RelaxliteError if there is no file, and for a folder that is no checkpoint; the error suggests a file in the
    folder with one of the endings `suggesting`.
    """
    file_path = Path(path)
    if not path or not file_path.exists():
        raise RelaxliteError(f"there is no file {path!r}")
    if is_checkpoint(path):
        return False
    if file_path.is_dir():
        inside = sorted(file for ending in suggesting for file in file_path.glob(f"*.{ending}"))
        hint = f"give the path of a model in it, as {str(inside[0])!r}" if inside else "give the path of a model in it"
        if (file_path / "adapter_config.json").exists():
            hint = "merge the adapter (LoRA) that it holds into its model"
        raise RelaxliteError(f"{path!r} is a folder; {hint}")
    if file_path.suffix == ".safetensors" or file_path.name == "config.json":
        raise RelaxliteError(
            f"{path!r} is one file of a Hugging Face folder; give the folder, {str(file_path.parent)!r}"
        )
    if file_path.suffix == ".rlx" or not file_path.is_file():  # a pipe cannot be read twice
        return file_path.suffix == ".rlx"
    with open(file_path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def checkpoint_options(args: argparse.Namespace, *more: str) -> str:
    """Return an error text about given options that only a checkpoint takes: "--quantize needs a checkpoint", or "".

    `more`: attributes of further options that only a checkpoint takes.
    """
    attributes = ("max_context", "cache_dtype", "quantize", *more)
    options = [f"--{name.replace('_', '-')}" for name in attributes if getattr(args, name)]
    return f"{' and '.join(options)} {'needs' if len(options) == 1 else 'need'} a checkpoint" if options else ""


def check_not_onnx(args: argparse.Namespace) -> None:
    """Raise InvalidArgumentError if options for ONNX files only are given."""
    for name, option in (("dynamic_shape", "--dynamic-shape"), ("bound", "--bound")):
        if getattr(args, name, None):
            raise InvalidArgumentError(f"{option} needs an ONNX file, and {args.model!r} is a language model")


def check_not_compiled(args: argparse.Namespace, **options: str) -> None:
    """Raise InvalidArgumentError if any of these options (attribute -> option) is given for a compiled model."""
    for name, option in options.items():
        if getattr(args, name, None):
            raise InvalidArgumentError(f"{option} needs an ONNX file, and {args.model!r} is compiled already")
