"""Import and compilation of models with the options of the command line. Imports the compiler."""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from relaxlite.cli.inputs import make_inputs
from relaxlite.cli.opening import is_checkpoint
from relaxlite.driver import build
from relaxlite.errors import InvalidArgumentError
from relaxlite.ir.expr import Function
from relaxlite.ir.module import IRModule
from relaxlite.ir.symbolic import evaluate
from relaxlite.ir.types import TensorType, defined_symbols
from relaxlite.library import names_of, rules_for
from relaxlite.loading import import_file
from relaxlite.passes.context import DEFAULT_PRECISION, PassContext
from relaxlite.passes.manager import Pass
from relaxlite.passes.pipeline import PASSES, pipeline_of
from relaxlite.passes.schedule.tuning import Tuning
from relaxlite.runtime.executable import ENTRY, ExecutableData
from relaxlite.signature import signature_of
from relaxlite.target import Target
from relaxlite.validation.samples import symbol_values


def make_context(args: argparse.Namespace) -> PassContext:
    """Return a pass context with the target, precision, libraries and tuning of the options."""
    precision = getattr(args, "precision", None) or DEFAULT_PRECISION
    context = PassContext(Target.parse(args.target or "llvm"), precision=precision)
    context.constant_memory = getattr(args, "constant_memory", False)
    libraries = getattr(args, "libraries", None)
    context.libraries = rules_for(names_of(libraries) if libraries else None, context.target)
    file = getattr(args, "tuning", None)
    context.tuning = Tuning.load(file) if file else Tuning.of_knob()
    return context


def import_model(args: argparse.Namespace, context: PassContext) -> IRModule:
    """Import `args.model`: an ONNX or PyTorch file, with the dimensions and bounds of the options, or a checkpoint."""
    start = time.perf_counter()
    if is_checkpoint(args.model):
        from relaxlite.cli.compiling_llm import import_checkpoint

        module = import_checkpoint(args)
    else:
        module = import_file(args.model, dynamic_shapes=args.dynamic_shape or None, bounds=args.bound or None)
    context.timings.append(("import", time.perf_counter() - start))
    if context.constant_memory:
        _warn_of_unbounded(module)
    return module


def _warn_of_unbounded(module: IRModule) -> None:
    """Warn of symbols without an upper bound, for which --constant-memory cannot plan."""
    main = module[ENTRY]
    assert isinstance(main, Function)
    symbols = dict.fromkeys(s for p in main.params for s in defined_symbols(p.ty) if s.upper is None)
    if symbols:
        names = ", ".join(s.name for s in symbols)
        example = f"--bound {next(iter(symbols)).name}=1..64"
        warnings.warn(f"--constant-memory needs an upper bound of {names}: give {example}, say", stacklevel=2)


def compile_model(args: argparse.Namespace, context: PassContext | None = None) -> ExecutableData:
    """Import and compile `args.model`; with --validate, show a progress bar if stderr is a terminal."""
    context = context or make_context(args)
    is_validated = getattr(args, "validate", False)
    title = f"validating {Path(args.model).name}"
    with pass_progress(title, context) if is_validated else nullcontext():
        module = import_model(args, context)
        validate = is_validated and (_example_inputs(args, module) or True)
        data = build(module, context.target, context=context, validate=validate)
    show_validations(context)
    show_timings(args, context.timings)
    return data


def _example_inputs(args: argparse.Namespace, module: IRModule) -> list[tuple[np.ndarray, ...]]:
    """Return the sets of inputs for --validate: none if no option describes inputs.

    Of --input and --shape, one set; of --range alone, one for each sample of the symbols' sizes.
    """
    if not (args.input or args.shape or args.range):
        return []
    main = module[ENTRY]
    assert isinstance(main, Function)
    specs = signature_of(main).inputs
    shapes = [args.shape] if args.input or args.shape else _random_shapes(main, [spec.name for spec in specs])
    return [
        tuple(make_inputs(specs, files=args.input, shapes=input_shapes, ranges=args.range, seed=seed).values())
        for seed, input_shapes in enumerate(shapes)
    ]


def _random_shapes(main: Function, names: Sequence[str]) -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of all parameters for each sample of the symbols' sizes."""
    params = zip(names, (p.ty for p in main.params), strict=True)
    dims = {name: ty.shape or () for name, ty in params if isinstance(ty, TensorType)}
    return [
        {name: tuple(evaluate(dim, values) for dim in shape) for name, shape in dims.items()}
        for values in symbol_values(main, random.Random(0))
    ]


@contextmanager
def pass_progress(title: str, context: PassContext) -> Iterator[Callable[[str], None]]:
    """Show a progress bar: one step to read the model, one for each pass, one for code generation.

    Yield a function that sets the text beside the bar until the first pass.
    """
    steps = len(pipeline_of(context.target.kind))
    form = "{desc} {bar:24} {n_fmt}/{total_fmt} {postfix}"
    with tqdm(total=steps + 2, desc=title, bar_format=form, leave=False, disable=None) as bar:

        def observe(step: Any, before: Any, after: Any, seconds: float) -> None:
            done = bar.n + (1 if bar.n else 2)
            bar.set_postfix_str("machine code" if done > steps else step.name, refresh=False)
            bar.update(done - bar.n)

        context.observers.append(observe)
        bar.set_postfix_str("reading the model")
        yield bar.set_postfix_str
    context.observers.remove(observe)


def find_pass(name: str) -> Pass:
    """Return the pass of this name. Raises InvalidArgumentError for an unknown name."""
    if name not in PASSES:
        raise InvalidArgumentError(f"there is no pass {name!r}; there are {', '.join(PASSES)}")
    return PASSES[name]


def show_validations(context: PassContext) -> None:
    """Print what has been validated."""
    for text in context.validations:
        print(f"validated {text}")


def show_timings(args: argparse.Namespace, timings: Iterable[tuple[str, float]]) -> None:
    """With -v, print the time of each pass on stderr."""
    if not getattr(args, "verbose", False):
        return
    rows = list(timings)
    total = sum(seconds for _, seconds in rows)
    for name, seconds in [*rows, ("total", total)]:
        print(f"  {name:<24}{seconds * 1e3:10.1f} ms{seconds / max(total, 1e-9):6.0%}", file=sys.stderr)
