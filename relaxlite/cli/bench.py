"""time a model at several shapes, beside onnxruntime where that is installed

relaxlite bench model.onnx --shapes "ids=1x128;mask=1x128" --shapes "ids=8x64;mask=8x64"
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relaxlite.cli.arguments import add_import_arguments, make_inputs, named, open_model

NAME = "bench"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="an ONNX file, or a file made by `relaxlite compile`")
    parser.add_argument(
        "--shapes", action="append", required=True, metavar="'A=1x2;B=3'", help="input shapes of one case; repeat"
    )
    parser.add_argument("--range", action="append", metavar="NAME=LOW..HIGH", help="where random values are drawn from")
    parser.add_argument("--repeats", type=int, default=20, help="timed runs of each case (default 20)")
    parser.add_argument("--threads", type=int, default=2, help="for every engine (default 2)")
    add_import_arguments(parser)


def execute(args: argparse.Namespace) -> None:
    start = time.perf_counter()
    exe = open_model(args)
    print(f"relaxlite ready in {time.perf_counter() - start:.2f} s")
    peer = _onnxruntime(args)
    print(f"{'case':<40}{'relaxlite ms':>14}" + (f"{'onnxruntime ms':>16}{'ratio':>8}" if peer else ""))
    for case in args.shapes:
        shapes = named((s for s in case.split(";") if s), "--shapes")
        inputs = make_inputs(exe.inputs, {}, shapes, named(args.range, "--range"), 0)
        ours = _median_ms(lambda: exe.run(inputs), args.repeats)  # noqa: B023
        line = f"{case:<40}{ours:>14.3f}"
        if peer is not None:
            theirs = _median_ms(lambda: peer(inputs), args.repeats)  # noqa: B023
            line += f"{theirs:>16.3f}{theirs / ours:>7.2f}x"
        print(line, flush=True)


def _median_ms(run: Callable[[], Any], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def _onnxruntime(args: argparse.Namespace) -> Callable[[Any], Any] | None:
    if Path(args.model).suffix != ".onnx":
        return None
    try:
        import onnxruntime
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = args.threads
    session = onnxruntime.InferenceSession(args.model, options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, inputs)
