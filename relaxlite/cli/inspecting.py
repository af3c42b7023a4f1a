"""The views of relaxlite inspect that show the compiler at work. Imports it."""

from __future__ import annotations

import argparse

from relaxlite.cli.compiling import find_pass, import_model, make_context, show_timings
from relaxlite.ir.printer import print_module
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import default_pipeline


def show_inside(args: argparse.Namespace) -> None:
    """--ir, --after PASS or --notes."""
    last = find_pass(args.after) if args.after else None
    context = make_context(args)
    module = import_model(args, context)
    steps = default_pipeline()
    if last is not None:
        steps = steps[: 1 + [step.name for step in steps].index(last.name)]
    if not args.ir:
        module = run_passes(module, steps, context)
    show_timings(args, context.timings)
    if args.notes:
        print("\n".join(context.notes) or "no notes")
    else:
        print(print_module(module, embed=args.embed), end="")
