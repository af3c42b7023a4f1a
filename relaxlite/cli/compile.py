"""compile an ONNX model into one deployable file

Sizes that the model leaves open stay open: the file runs at every shape.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from relaxlite.cli.arguments import add_import_arguments, import_options, print_timings

NAME = "compile"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="an ONNX file")
    parser.add_argument("-o", "--output", help="the file to write (default: the model's name with .rlx)")
    add_import_arguments(parser)


def execute(args: argparse.Namespace) -> None:
    from relaxlite.driver import build
    from relaxlite.frontend.onnx import from_onnx
    from relaxlite.passes.manager import PassContext
    from relaxlite.runtime import artifact
    from relaxlite.target import Target

    start = time.perf_counter()
    context = PassContext(Target.parse(args.target))
    module = from_onnx(args.model, **import_options(args))
    context.timings.append(("import", time.perf_counter() - start))
    data = build(module, context.target, context=context)
    output = Path(args.output) if args.output else Path(args.model).with_suffix(".rlx")
    artifact.save(data, output)
    if args.verbose:
        print_timings(context.timings)
    for title, specs in (("in ", data.signature.inputs), ("out", data.signature.outputs)):
        for spec in specs:
            print(f"{title}  {spec}")
    seconds, size = time.perf_counter() - start, output.stat().st_size
    print(f"{output}: {len(data.kernels)} kernels, {size / 1e6:.1f} MB, compiled in {seconds:.1f} s")
