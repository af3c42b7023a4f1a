"""relaxlite tune: search schedules for a model's kernels by measurement, and save the faster ones in a file."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from relaxlite.cli.compiling import import_model, make_context
from relaxlite.cli.inputs import make_inputs
from relaxlite.cli.opening import is_compiled
from relaxlite.errors import ExecutionError, InvalidArgumentError, RelaxliteError
from relaxlite.ir.expr import Function
from relaxlite.ir.module import IRModule
from relaxlite.passes.context import PassContext
from relaxlite.passes.schedule.tuning import Tuning
from relaxlite.runtime import threadpool
from relaxlite.runtime.executable import ENTRY
from relaxlite.signature import signature_of
from relaxlite.tuner import sample_shapes, tune


def execute(args: argparse.Namespace) -> None:
    start = time.perf_counter()
    if is_compiled(args.model):
        raise InvalidArgumentError(f"{args.model!r} is compiled already; schedules are chosen for an ONNX file")
    output = Path(args.output or Path(args.model).with_suffix(".tuning.json").name)
    if not output.parent.is_dir():
        raise RelaxliteError(f"cannot write {str(output)!r}: there is no folder {str(output.parent)!r}")
    known = Tuning.load(output) if output.exists() else Tuning()
    if args.threads is not None:
        threadpool.set_num_threads(args.threads)
    context = make_context(args)
    module = import_model(args, context)
    tuning = _tuned(args, module, context, known)
    tuning.save(output)
    _show(tuning, str(context.target))
    print(f"{output}: tuned in {time.perf_counter() - start:.0f} s; give it to `relaxlite compile --tuning`")


def _tuned(args: argparse.Namespace, module: IRModule, context: PassContext, known: Tuning) -> Tuning:
    main = module[ENTRY]
    assert isinstance(main, Function)
    shapes = [shapes for _, shapes in args.shapes] if args.shapes else sample_shapes(module)
    specs = signature_of(main).inputs
    options = {"files": {}, "ranges": args.range, "seed": 0, "shape_option": "--shapes", "takes_files": False}
    samples = [make_inputs(specs, shapes=s, **options) for s in shapes]
    try:
        return tune(module, samples, context.target, precision=context.precision, tuning=known)
    except ExecutionError as error:
        if args.shapes:
            raise
        sizes = "; ".join(f"{name}={'x'.join(map(str, shape))}" for s in shapes for name, shape in s.items())
        raise RelaxliteError(
            f"the model does not run at sizes guessed from its bounds ({sizes}): {error}; give --shapes"
        ) from error


def _show(tuning: Tuning, target: str) -> None:
    entries = sorted(tuning.targets.get(target, {}).values(), key=lambda e: e.program)
    if not entries:
        print("the rules' own schedules are as fast as any that was tried", file=sys.stderr)
        return
    width = max(len(entry.program) for entry in entries)
    for entry in entries:
        speeds = ", ".join(
            f"{speed:.2f}x at {'x'.join(map(str, size)) or 'its size'}"
            for speed, size in zip(entry.speeds, entry.sizes, strict=True)
        )
        print(f"{entry.program:<{width}}  {entry.choice}: {speeds}")
