"""From a checkpoint to a compiled language model as the options of the command line say. Imports the compiler."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from relaxlite.cli import compiled_models
from relaxlite.cli.compiling import make_context, show_timings
from relaxlite.cli.opening import check_not_onnx
from relaxlite.frontend.llm.read import read_checkpoint
from relaxlite.frontend.llm.step import CACHE_DTYPES
from relaxlite.ir.module import IRModule
from relaxlite.llm import compiling
from relaxlite.passes.manager import PassContext
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.runtime.executable import ExecutableData

_OPTIONS = ("max_context", "cache_dtype", "quantize", "precision", "constant_memory", "libraries")
_FOLDER_FILES = ("*.json", "*.jinja", "*.safetensors")  # of a Hugging Face folder: what is read of it
_PACKAGE = Path(__file__).resolve().parent.parent
_CHUNK = 1 << 22


def compile_checkpoint(args: argparse.Namespace) -> ExecutableData:
    """Compile `args.model`, with a progress bar where stderr is a terminal."""
    check_not_onnx(args)
    context = make_context(args)
    with _progress(f"compiling {Path(args.model).name}", context) as show:
        data = compiling.build(
            args.model,
            context.target,
            max_context=args.max_context,
            cache_dtype=args.cache_dtype or CACHE_DTYPES[0],
            quantize=args.quantize,
            progress=lambda name: show(f"quantizing {name}"),
            context=context,
            validate=getattr(args, "validate", False),
        )
    show_timings(args, context.timings)
    return data


def import_checkpoint(args: argparse.Namespace) -> IRModule:
    """The module of `args.model`, which has no tokenizer: to look at, and for `relaxlite run` and its like."""
    check_not_onnx(args)
    return compiling.module_of(read_checkpoint(args.model))


def compile_once(args: argparse.Namespace) -> Path:
    """The compiled file of `args.model`, made if it is not kept yet."""
    model = Path(args.model).resolve()
    name = (model.name if model.is_dir() else model.stem) + (f"-{args.quantize}" if args.quantize else "")
    key = _key_of(args)
    path = compiled_models.place_of(name, key)
    return path if path.exists() else compiled_models.keep(compile_checkpoint(args), name, key)


def _key_of(args: argparse.Namespace) -> str:
    """Everything that the compiled file depends on: the checkpoint, relaxlite, the target, the options."""
    context = make_context(args)
    digest = hashlib.sha256()
    options = {name: getattr(args, name, None) for name in _OPTIONS}
    digest.update(f"{context.target!r} {context.tuning!r} {options!r}".encode())
    for file in sorted(_PACKAGE.rglob("*.py")):
        digest.update(file.read_bytes())
    place = Path(args.model)
    files = sorted(f for pattern in _FOLDER_FILES for f in place.glob(pattern)) if place.is_dir() else [place]
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        with open(file, "rb") as opened:
            while chunk := opened.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()[: compiled_models.KEY_DIGITS]


@contextmanager
def _progress(title: str, context: PassContext) -> Iterator[Callable[[str], None]]:
    """A bar that follows the passes: one step to read the checkpoint, one for each pass, one for machine code. It is
    given what to show beside it until the first pass."""
    steps = len(default_pipeline())
    form = "{desc} {bar:24} {n_fmt}/{total_fmt} {postfix}"
    with tqdm(total=steps + 2, desc=title, bar_format=form, leave=False, disable=None) as bar:

        def observe(step: Any, before: Any, after: Any, seconds: float) -> None:
            done = bar.n + (1 if bar.n else 2)
            bar.set_postfix_str("machine code" if done > steps else step.name, refresh=False)
            bar.update(done - bar.n)

        context.observers.append(observe)
        bar.set_postfix_str("reading the weights")
        yield bar.set_postfix_str
    context.observers.remove(observe)
