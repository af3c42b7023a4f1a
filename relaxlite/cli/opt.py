"""run passes on the text form of a module: text in, text out

relaxlite opt module.py -p fold_constants -p eliminate_dead
relaxlite inspect model.onnx --ir > module.py          (constants too large for text are left out there)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from relaxlite.cli.arguments import print_timings

NAME = "opt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", default="-", help="the module's text; - or nothing reads standard input")
    parser.add_argument(
        "-p",
        "--pass",
        dest="passes",
        action="append",
        default=[],
        metavar="PASS",
        help="a pass to run; repeat for several",
    )
    parser.add_argument("--list", action="store_true", help="list the passes and end")
    parser.add_argument("--target", default="llvm", help="the target that passes ask about")


def execute(args: argparse.Namespace) -> None:
    from relaxlite.errors import InvalidArgumentError
    from relaxlite.ir import ops  # noqa: F401  (the parser looks ops up)
    from relaxlite.ir.parser import parse_module
    from relaxlite.ir.printer import print_module
    from relaxlite.passes.manager import PassContext, run_passes
    from relaxlite.passes.pipeline import PASSES
    from relaxlite.target import Target

    if args.list:
        print("\n".join(PASSES))
        return
    unknown = [name for name in args.passes if name not in PASSES]
    if unknown:
        raise InvalidArgumentError(f"there is no pass {unknown[0]!r}; passes: {', '.join(PASSES)}")
    text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text("utf-8")
    context = PassContext(Target.parse(args.target))
    module = run_passes(parse_module(text), [PASSES[name] for name in args.passes], context)
    print(print_module(module, embed=True), end="")
    if args.verbose:
        print_timings(context.timings)
