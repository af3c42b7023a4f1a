"""relaxlite explain: report what compiling a model did and why, in the terminal or as an HTML page."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from relaxlite.cli.compiling import import_model, make_context, show_timings
from relaxlite.cli.opening import check_not_compiled, is_compiled, open_data
from relaxlite.cli.sizes import bytes_text
from relaxlite.errors import InputError, InvalidArgumentError
from relaxlite.explain.explanation import explain
from relaxlite.explain.page import page
from relaxlite.explain.summary import compiled_summary, summary, summary_text
from relaxlite.runtime.executable import TensorSpec, bound_problem


def execute(args: argparse.Namespace) -> None:
    if args.json and args.output:
        raise InvalidArgumentError("give --json or -o FILE, not both: --json prints to the terminal")
    name = Path(args.model).name
    _, shapes = args.shapes
    if is_compiled(args.model):
        check_not_compiled(args, output="-o")
        data = open_data(args)
        sizes_of(data.signature.inputs, shapes)
        report = compiled_summary(name, data)
    else:
        output = _output(args.output)
        context = make_context(args)
        explanation = explain(import_model(args, context), context.target, name=name, context=context)
        show_timings(args, context.timings)
        sizes = sizes_of(explanation.data.signature.inputs, shapes)
        report = summary(explanation, sizes)
        if output is not None:
            output.write_text(page(explanation, sizes, code=not args.no_code), "utf-8")
            print(f"-> {output}, {bytes_text(output.stat().st_size)}")
            return
    print(json.dumps(report, indent=1) if args.json else summary_text(report), end="\n" if args.json else "")


def _output(text: str | None) -> Path | None:
    """Return the path to write to, or None. InvalidArgumentError if it cannot be written, before a long compilation."""
    if text is None:
        return None
    output = Path(text)
    if output.is_dir():
        raise InvalidArgumentError(f"cannot write {text!r}: it is a folder; name a file in it, as report.html")
    if not output.parent.is_dir():
        raise InvalidArgumentError(f"cannot write {text!r}: there is no folder {str(output.parent)!r}")
    return output


def sizes_of(specs: Sequence[TensorSpec], shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the values of symbols that the shapes of some inputs determine. Raises InputError for unfit shapes."""
    by_name = {spec.name: spec for spec in specs}
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        if name not in by_name:
            raise InputError(f"the model has no input {name!r}; it has {', '.join(map(repr, by_name)) or 'none'}")
        spec = by_name[name]
        if len(shape) != len(spec.shape):
            raise InputError(f"input {spec}: the shape {'x'.join(map(str, shape))} has another number of dimensions")
        for dim, size in zip(spec.shape, shape, strict=True):
            if isinstance(dim, int) and dim != size:
                raise InputError(f"input {spec}: the dimension {dim} cannot be {size}")
            if not isinstance(dim, str) or dim not in spec.bounds:
                continue
            if sizes.setdefault(dim, size) != size:
                raise InputError(f"input {spec}: {dim} is {sizes[dim]} elsewhere and {size} here")
            if problem := bound_problem(dim, spec.bounds[dim], size):
                raise InputError(f"input {spec}: {problem}")
    return sizes
