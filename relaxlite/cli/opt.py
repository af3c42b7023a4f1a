"""relaxlite opt: run passes on a module's text and print the resulting module."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from relaxlite.cli.compiling import find_pass, make_context, show_timings
from relaxlite.errors import ParseError, RelaxliteError, VerifyError
from relaxlite.ir import ops  # noqa: F401  (registers the ops for the parser)
from relaxlite.ir.module import IRModule
from relaxlite.ir.parser import parse_module
from relaxlite.ir.printer import print_module
from relaxlite.ir.verifier import verify
from relaxlite.passes.manager import Pass, run_passes
from relaxlite.passes.pipeline import PASSES, all_passes


def execute(args: argparse.Namespace) -> None:
    if args.list:
        for step in PASSES.values():
            print(f"{step.name:<24}-> {step.stage:<9}{step.doc}".rstrip())
        return
    steps = [find_pass(name) for name in args.passes]
    context = make_context(args)
    context.verify = True
    module = _read(args.file)
    if steps:
        _check_stage(module, steps[0])
    module = run_passes(module, steps, context)
    print(print_module(module, embed=True), end="")
    show_timings(args, context.timings)


def _read(file: str) -> IRModule:
    where = "standard input" if file == "-" else file
    try:
        text = (sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RelaxliteError(f"{where}: not the text of a module (byte {error.start} is no UTF-8)") from None
    try:
        module = parse_module(text)
    except ParseError as error:
        is_without_weights = "constants = [" in text and 'data="' not in text
        hint = "\n  hint: `relaxlite inspect MODEL --ir --embed` prints weights too" if is_without_weights else ""
        raise RelaxliteError(f"{where}, {error}{hint}") from error
    if not module:
        raise RelaxliteError(f"{where}: nothing is defined in this text")
    return module


def _check_stage(module: IRModule, first: Pass) -> None:
    """Raise RelaxliteError unless the module is at the level of the first pass's input in the pipeline."""
    pipeline = all_passes()
    position = [step.name for step in pipeline].index(first.name)
    stage = pipeline[position - 1].stage if position else "graph"
    try:
        verify(module, stage)
    except VerifyError as error:
        raise RelaxliteError(f"the module is none that pass {first.name} takes (the {stage} level): {error}") from error
