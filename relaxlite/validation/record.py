"""Files that reproduce a mismatch: the modules before and after as text, and the inputs."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from relaxlite import config, dtypes
from relaxlite.ir.module import IRModule
from relaxlite.ir.parser import parse_module
from relaxlite.ir.printer import print_module
from relaxlite.validation.samples import Sample


def write_record(
    what: str, sample: Sample, problem: str, before: IRModule, after: IRModule | None, folder: str | None = None
) -> str:
    """Write NAME.before.py, NAME.after.py and NAME.npz; returns the path of the first file.

    `folder`: by default the knob dump_dir, else the system's folder for temporary files.
    """
    place = Path(folder or config.get("dump_dir") or tempfile.gettempdir())
    place.mkdir(parents=True, exist_ok=True)
    name = "relaxlite-" + re.sub(r"[^A-Za-z0-9]+", "-", what)
    header = "".join(f"# {line}\n" for line in (what, f"at {sample}", *problem.split("\n")))
    path = place / f"{name}.before.py"
    path.write_text(header + print_module(before, embed=True))
    if after is not None:
        (place / f"{name}.after.py").write_text(header + print_module(after, embed=True))
    save_arrays(place / f"{name}.npz", sample.args)
    return str(path)


def read_record(path: str) -> tuple[str, IRModule, IRModule | None, tuple[Any, ...]]:
    """Read the files of `write_record`.

    Returns the failed check ("pass fuse_ops", or "pass fuse_ops in fill"), the modules before and after, and the
    arguments.
    """
    first = Path(path)
    stem = first.name.removesuffix(".before.py")
    text, after = first.read_text(), first.with_name(f"{stem}.after.py")
    what = text.split("\n", 1)[0].removeprefix("# ")
    second = parse_module(after.read_text()) if after.exists() else None
    return what, parse_module(text), second, load_arrays(first.with_name(f"{stem}.npz"))


def save_arrays(path: Path, args: tuple[Any, ...]) -> None:
    """Save arrays, and tuples of integers, in a NumPy .npz file; bfloat16 as uint16 bits."""
    content: dict[str, Any] = {}
    for k, value in enumerate(args):
        array = np.asarray(value)
        dtype = dtypes.from_numpy(array.dtype) or "int64"
        content[f"{k}_{dtype}"] = array.view(np.uint16) if dtype == "bfloat16" else array
    np.savez(path, **content)


def load_arrays(path: Path) -> tuple[Any, ...]:
    """Load the arrays of `save_arrays`."""
    with np.load(path) as content:
        named = [(int(key.partition("_")[0]), key.partition("_")[2], content[key]) for key in content.files]
    ordered = sorted(named, key=lambda item: item[0])
    return tuple(array.view(dtypes.to_numpy(dtype)) if dtype == "bfloat16" else array for _, dtype, array in ordered)
