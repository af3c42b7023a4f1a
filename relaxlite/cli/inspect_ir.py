"""Views of relaxlite inspect that show the IR and the decisions of passes. Imports the compiler."""

from __future__ import annotations

import argparse

from relaxlite.cli.compiling import find_pass, import_model, make_context, show_timings
from relaxlite.ir.module import IRModule
from relaxlite.ir.printer import print_module
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import pipeline_of
from relaxlite.passes.schedule.primitives import steps_of


def show_ir_view(args: argparse.Namespace) -> None:
    """Print the view that --ir, --after PASS, --notes or --schedules asks for."""
    context = make_context(args)
    steps = pipeline_of(context.target.kind)
    scheduling = next(step.name for step in steps if step.name in ("schedule", "schedule_gpu"))
    name = scheduling if args.schedules else args.after
    last = find_pass(name) if name else None
    module = import_model(args, context)
    if last is not None:
        steps = steps[: 1 + [step.name for step in steps].index(last.name)]
    if not args.ir:
        module = run_passes(module, steps, context)
    show_timings(args, context.timings)
    if args.notes:
        print("\n".join(context.notes) or "no notes")
    elif args.schedules:
        _show_schedules(module)
    else:
        print(print_module(module, embed=args.embed), end="")


def _show_schedules(module: IRModule) -> None:
    """Print the shapes and the schedule of each program, as `--after schedule` also shows them above the loops."""
    for name, program in module.programs().items():
        shapes = [f"{b.name}: {b.dtype}[{', '.join(map(str, b.shape))}]" for b in program.params]
        print(f"{name}({', '.join(shapes)})")
        print("\n".join(f"    {step}" for step in steps_of(program)) or "    as it was written")
