"""Compilation of language models with the options of the command line. Imports the compiler."""

from __future__ import annotations

import argparse
from pathlib import Path

from relaxlite.cli.compiling import make_context, pass_progress, show_timings, show_validations
from relaxlite.cli.opening import check_not_onnx
from relaxlite.frontend.llm.read import read_checkpoint
from relaxlite.ir.module import IRModule
from relaxlite.llm import compiling
from relaxlite.runtime.executable import ExecutableData


def compile_checkpoint(args: argparse.Namespace) -> ExecutableData:
    """Compile the checkpoint `args.model`, with a progress bar if stderr is a terminal."""
    check_not_onnx(args)
    context = make_context(args)
    with pass_progress(f"compiling {Path(args.model).name}", context) as show:
        data = compiling.build(
            args.model,
            context.target,
            max_context=args.max_context,
            cache_dtype=args.cache_dtype,
            quantize=args.quantize,
            progress=lambda name: show(f"quantizing {name}"),
            context=context,
            validate=getattr(args, "validate", False),
        )
    show_validations(context)
    show_timings(args, context.timings)
    return data


def import_checkpoint(args: argparse.Namespace) -> IRModule:
    """Import the checkpoint `args.model` as a module without tokenizer, for `relaxlite inspect`, `run` and similar."""
    check_not_onnx(args)
    return compiling.build_step_module(read_checkpoint(args.model))
