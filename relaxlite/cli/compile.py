"""relaxlite compile: an ONNX model into one deployable file."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from relaxlite.cli.compiling import compile_model
from relaxlite.cli.opening import is_compiled
from relaxlite.cli.sizes import bytes_text
from relaxlite.errors import InvalidArgumentError, RelaxliteError
from relaxlite.runtime import artifact


def execute(args: argparse.Namespace) -> None:
    start = time.perf_counter()
    if is_compiled(args.model):
        raise InvalidArgumentError(f"{args.model!r} is compiled already")
    output = _output(args)
    data = compile_model(args)
    artifact.save(data, output)
    seconds = time.perf_counter() - start
    for title, specs in (("in ", data.signature.inputs), ("out", data.signature.outputs)):
        for spec in specs:
            print(f"{title}  {spec}")
    kernels = f"{len(data.kernels)} kernels for {data.target.cpu}"
    print(f"{output}: {kernels}, {bytes_text(output.stat().st_size)}, compiled in {seconds:.1f} s")


def _output(args: argparse.Namespace) -> Path:
    """Where to write to; checked before a long compilation."""
    output = Path(args.output or Path(args.model).with_suffix(".rlx").name)
    if output.is_dir():
        raise RelaxliteError(f"cannot write {str(output)!r}: it is a folder; name a file in it")
    if not output.parent.is_dir():
        raise RelaxliteError(f"cannot write {str(output)!r}: there is no folder {str(output.parent)!r}")
    if not os.access(output.parent, os.W_OK):
        raise RelaxliteError(f"cannot write {str(output)!r}: no permission to write to {str(output.parent)!r}")
    if output.exists() and output.samefile(args.model):
        raise RelaxliteError(f"{str(output)!r} is the model itself; name another file")
    return output
