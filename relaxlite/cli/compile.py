"""relaxlite compile: compile an ONNX model or a language model's checkpoint into one deployable file."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from relaxlite.cli.compiling import compile_model
from relaxlite.cli.opening import checkpoint_options, is_checkpoint, is_compiled
from relaxlite.cli.sizes import bytes_text
from relaxlite.errors import InvalidArgumentError, RelaxliteError
from relaxlite.runtime import artifact
from relaxlite.runtime.executable import TensorSpec

_FEW = 4  # similar tensors that are shown one by one


def execute(args: argparse.Namespace) -> None:
    start = time.perf_counter()
    is_language_model = is_checkpoint(args.model)
    if is_compiled(args.model, suggesting=("onnx", "gguf")):
        raise InvalidArgumentError(f"{args.model!r} is compiled already")
    if not is_language_model and (problem := checkpoint_options(args)):
        raise InvalidArgumentError(f"{problem} of a language model, and {args.model!r} is none")
    _check_inputs(args, is_language_model)
    output = _output(args)
    if is_language_model:
        from relaxlite.cli.compiling_llm import compile_checkpoint

        data = compile_checkpoint(args)
    else:
        data = compile_model(args)
    artifact.save(data, output)
    seconds = time.perf_counter() - start
    for title, specs in (("in ", data.signature.inputs), ("out", data.signature.outputs)):
        for line in _lines(specs):
            print(f"{title}  {line}")
    kernels = f"{len(data.kernels)} kernels for {data.target.processor}"
    print(f"{output}: {kernels}, {bytes_text(output.stat().st_size)}, compiled in {seconds:.1f} s")


def _check_inputs(args: argparse.Namespace, is_language_model: bool) -> None:
    """Raise InvalidArgumentError if inputs are given but not used."""
    options = [f"--{name}" for name in ("input", "shape", "range") if getattr(args, name)]
    if options and is_language_model:
        raise InvalidArgumentError(
            f"{options[0]} needs an ONNX file: a language model, as {args.model!r} is, is validated on steps of its own"
        )
    if options and not args.validate:
        raise InvalidArgumentError(f"{options[0]} describes inputs to validate with: add --validate")


def _lines(specs: Sequence[TensorSpec]) -> Iterator[str]:
    """Yield a line per tensor, but one line for many whose names differ in a number only, as KV cache pools."""
    remaining = Counter(re.sub(r"\d+$", "#", spec.name) for spec in specs)
    for spec in specs:
        pattern = re.sub(r"\d+$", "#", spec.name)
        count = remaining.pop(pattern, 0)
        if count > _FEW:
            yield f"{spec} (and {count - 1} more like it)"
        elif count:
            remaining[pattern] = count
            yield str(spec)


def _output(args: argparse.Namespace) -> Path:
    """Return the path to write to. Raises RelaxliteError if it cannot be written, before a long compilation."""
    model = Path(args.model).resolve()
    output = Path(args.output or f"{model.name if model.is_dir() else model.stem}.rlx")
    try:
        os.stat(output)
    except FileNotFoundError:
        pass
    except OSError as error:  # the name is too long, or a parent is a file
        raise RelaxliteError(f"cannot write {str(output)!r}: {error.strerror}") from error
    if output.is_dir():
        raise RelaxliteError(f"cannot write {str(output)!r}: it is a folder; name a file in it")
    if output.exists() and not output.is_file():
        raise RelaxliteError(f"cannot write {str(output)!r}: it is a device or a pipe, no file that could be replaced")
    folder = Path(os.path.realpath(output)).parent if output.is_symlink() else output.parent  # of the link's target
    if not folder.is_dir():
        raise RelaxliteError(f"cannot write {str(output)!r}: there is no folder {str(folder)!r}")
    if not os.access(folder, os.W_OK):
        raise RelaxliteError(f"cannot write {str(output)!r}: no permission to write to {str(folder)!r}")
    if output.exists() and output.samefile(args.model):
        raise RelaxliteError(f"{str(output)!r} is the model itself; name another file")
    return output
