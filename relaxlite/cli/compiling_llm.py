"""From a checkpoint to a compiled language model as the options of the command line say. Imports the compiler."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from relaxlite.cli.compiling import make_context, show_timings
from relaxlite.cli.opening import check_not_onnx
from relaxlite.frontend.llm.read import read_checkpoint
from relaxlite.frontend.llm.step import CACHE_DTYPES
from relaxlite.ir.module import IRModule
from relaxlite.llm import compiling
from relaxlite.passes.manager import PassContext
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.runtime.executable import ExecutableData


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
