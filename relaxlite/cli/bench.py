"""relaxlite bench: time a model at several shapes, and onnxruntime for comparison if installed."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from relaxlite.cli.inputs import make_inputs
from relaxlite.cli.opening import is_compiled, open_model
from relaxlite.runtime import threadpool

Arrays = Mapping[str, np.ndarray]


def execute(args: argparse.Namespace) -> None:
    start = time.perf_counter()
    exe = open_model(args)
    threads = threadpool.num_threads()
    print(f"ready in {time.perf_counter() - start:.2f} s, {threads} threads", file=sys.stderr)
    onnxruntime_run = _onnxruntime(args, threads)
    shape_cases = args.shapes or [("(as the model says)", {})]
    options = {"files": {}, "ranges": args.range, "seed": 0, "shape_option": "--shapes", "takes_files": False}
    cases = [(text, make_inputs(exe.inputs, shapes=shapes, **options)) for text, shapes in shape_cases]
    width = max(len("shapes"), *(len(text) for text, _ in cases))
    header = f"{'shapes':<{width}}  {'relaxlite ms':>14}"
    print(header + (f"  {'onnxruntime ms':>14}  {'speed':>7}  {'difference':>10}" if onnxruntime_run else ""))
    for text, inputs in cases:
        ours, ours_ms = _measure(partial(exe.run, inputs), args.repeats)
        line = f"{text:<{width}}  {ours_ms:>14.3f}"
        print(
            line + (_compare(onnxruntime_run, inputs, args.repeats, ours, ours_ms) if onnxruntime_run else ""),
            flush=True,
        )


def _compare(
    onnxruntime_run: Callable[[Arrays], Arrays], inputs: Arrays, repeats: int, ours: Arrays, ours_ms: float
) -> str:
    try:
        theirs, theirs_ms = _measure(partial(onnxruntime_run, inputs), repeats)
    except Exception as error:  # onnxruntime raises errors of many types
        print(f"onnxruntime: {error}", file=sys.stderr)
        return f"  {'-':>14}"
    return f"  {theirs_ms:>14.3f}  {theirs_ms / ours_ms:>6.2f}x  {_difference(ours, theirs):>10.1e}"


def _measure(run: Callable[[], Arrays], repeats: int) -> tuple[Arrays, float]:
    """Return the results and the median time in milliseconds, after a first run as warm-up."""
    results = run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return results, statistics.median(times) * 1e3


def _difference(ours: Arrays, theirs: Arrays) -> float:
    """Return the maximum difference over all outputs, relative to the maximum magnitude of the output."""
    worst = 0.0
    for name, reference in theirs.items():
        a, b = ours[name].astype(np.float64), reference.astype(np.float64)
        if b.size:
            worst = max(worst, float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)))
    return worst


def _onnxruntime(args: argparse.Namespace, threads: int) -> Callable[[Arrays], Arrays] | None:
    if is_compiled(args.model):
        return None
    try:
        import onnxruntime
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # fatal errors only; errors are also raised
    try:
        session = onnxruntime.InferenceSession(args.model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises errors of many types
        print(f"onnxruntime: {error}", file=sys.stderr)
        return None
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, dict(inputs)), strict=True))
