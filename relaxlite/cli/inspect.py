"""show what a model or a compiled file consists of: signature, ops, kernels, memory plan"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relaxlite.cli.arguments import add_import_arguments, import_options, print_timings
from relaxlite.runtime.executable import ExecutableData, disassemble

NAME = "inspect"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="an ONNX file, or a file made by `relaxlite compile`")
    parser.add_argument("--ir", action="store_true", help="print the imported module (ONNX only)")
    parser.add_argument("--after", metavar="PASS", help="print the module after this pass (ONNX only)")
    parser.add_argument("--notes", action="store_true", help="print why calls were not fused (ONNX only)")
    parser.add_argument("--bytecode", action="store_true", help="print the bytecode")
    add_import_arguments(parser)


def execute(args: argparse.Namespace) -> None:
    if Path(args.model).suffix == ".onnx":
        _inspect_onnx(args)
    else:
        from relaxlite.runtime import artifact

        _print_data(artifact.load(args.model), bytecode=args.bytecode)


def _inspect_onnx(args: argparse.Namespace) -> None:
    from relaxlite.driver import build
    from relaxlite.errors import InvalidArgumentError
    from relaxlite.frontend.onnx import from_onnx
    from relaxlite.passes.manager import PassContext, run_passes
    from relaxlite.passes.pipeline import PASSES, default_pipeline
    from relaxlite.target import Target

    module = from_onnx(args.model, **import_options(args))
    context = PassContext(Target.parse(args.target))
    if args.ir:
        print(module)
        return
    if args.after:
        if args.after not in PASSES:
            raise InvalidArgumentError(f"there is no pass {args.after!r}; passes: {', '.join(PASSES)}")
        steps = default_pipeline()
        last = [step.name for step in steps].index(args.after)
        print(run_passes(module, steps[: last + 1], context))
        return
    data = build(module, context.target, context=context)
    _print_data(data, bytecode=args.bytecode)
    if args.verbose:
        print_timings(context.timings)
    if args.notes:
        print("\n".join(context.notes))


def _print_data(data: ExecutableData, *, bytecode: bool) -> None:
    for title, specs in (("inputs", data.signature.inputs), ("outputs", data.signature.outputs)):
        print(f"{title}:")
        for spec in specs:
            print(f"  {spec}")
    print(f"target: {data.target.triple} {data.target.cpu}")
    weights = sum(c.nbytes for c in data.constants)
    print(
        f"weights: {len(data.constants)} tensors, {weights / 1e6:.2f} MB; object code: {len(data.object_code) / 1e3:.0f} kB"
    )
    _print_counts("ops", data.metadata.info.get("ops", {}))
    _print_counts("kernels, by calls", _kernel_calls(data))
    print(f"memory plan: one arena of {data.metadata.memory_plan.get('arena_bytes', '?')} bytes per call")
    if bytecode:
        print(disassemble(data))


def _kernel_calls(data: ExecutableData) -> dict[str, int]:
    from relaxlite.runtime.executable import Call

    counts: dict[str, int] = {}
    for function in data.functions.values():
        for instruction in function.instructions:
            if isinstance(instruction, Call) and instruction.callee.startswith("kernel:"):
                name = instruction.callee.partition(":")[2]
                counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _print_counts(title: str, counts: Mapping[str, Any]) -> None:
    print(f"{title} ({len(counts)} kinds, {sum(counts.values())} in all):")
    for name, count in counts.items():
        print(f"  {count:5d}  {name}")
