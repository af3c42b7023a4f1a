"""run a compiled (.rlx) or ONNX model on arrays from files or random ones

relaxlite run model.rlx --input ids=ids.npy --output-dir out
relaxlite run model.rlx --shape ids=1x128 --range ids=0..30000
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from pathlib import Path

import numpy as np

from relaxlite.cli.arguments import add_import_arguments, make_inputs, named, open_model

NAME = "run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a file made by `relaxlite compile`, or an ONNX file")
    parser.add_argument("--input", action="append", metavar="NAME=FILE", help="an input from a .npy file")
    parser.add_argument("--shape", action="append", metavar="NAME=1x128", help="a random input of this shape")
    parser.add_argument("--range", action="append", metavar="NAME=LOW..HIGH", help="where random values are drawn from")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (default 0)")
    parser.add_argument("--output-dir", metavar="DIR", help="write each output to DIR/NAME.npy")
    parser.add_argument("--threads", type=int, help="how many threads work on one model")
    parser.add_argument("--profile", action="store_true", help="print the time of each kernel")
    add_import_arguments(parser)


def execute(args: argparse.Namespace) -> None:
    exe = open_model(args)
    ranges = named(args.range, "--range")
    inputs = make_inputs(exe.inputs, named(args.input, "--input"), named(args.shape, "--shape"), ranges, args.seed)
    start = time.perf_counter()
    outputs = exe.run(inputs)
    elapsed = time.perf_counter() - start
    for name, array in outputs.items():
        print(f"{name}: {array.dtype}[{', '.join(map(str, array.shape))}]{_summary(array)}")
    print(f"ran in {elapsed * 1e3:.2f} ms")
    if args.profile:
        print(exe.profile(inputs))
    if args.output_dir:
        _save(outputs, Path(args.output_dir))


def _summary(array: np.ndarray) -> str:
    if array.size == 0 or array.dtype == np.bool_:
        return ""
    values = array.astype(np.float64)
    return f"  min {values.min():.6g}  mean {values.mean():.6g}  max {values.max():.6g}"


def _save(outputs: dict[str, np.ndarray], folder: Path) -> None:
    """Each file appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in outputs.items():
        path = folder / (re.sub(r"[^\w.-]", "_", name) + ".npy")
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                np.save(file, array, allow_pickle=False)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        print(f"wrote {path}")
