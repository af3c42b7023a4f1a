"""relaxlite run: run a model on arrays from files or random arrays."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from relaxlite.cli.inputs import make_inputs
from relaxlite.cli.opening import open_model

MAX_SHOWN = 8  # larger outputs are summarized


def execute(args: argparse.Namespace) -> None:
    if args.output_dir:
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    exe = open_model(args)
    inputs = make_inputs(exe.inputs, files=args.input, shapes=args.shape, ranges=args.range, seed=args.seed)
    start = time.perf_counter()
    results = exe.run(inputs)
    elapsed = time.perf_counter() - start
    outputs = {name: _as_array(result) for name, result in results.items()}
    written = _save(outputs, Path(args.output_dir)) if args.output_dir else {}
    for name, array in inputs.items():
        source = args.input.get(name) or f"random, seed {args.seed}"
        print(f"in   {_title(name, array)}  {source}")
    for name, array in outputs.items():
        print(f"out  {_title(name, array)}  {_summary(array)}")
        if name in written:
            print(f"     -> {written[name]}")
    print(f"ran in {elapsed * 1e3:.2f} ms")
    if args.profile:
        print(exe.profile(inputs), end="")


def _as_array(result: np.ndarray | list[dict[str | int, float]]) -> np.ndarray:
    """Return strings as an array of text, and maps as records with a field per label."""
    if isinstance(result, np.ndarray):
        return result.astype(str) if result.dtype == object else result
    fields = [(str(label), np.float32) for label in (result[0] if result else ())]
    return np.array([tuple(record.values()) for record in result], fields)


def _title(name: str, array: np.ndarray) -> str:
    return f"{name}: {array.dtype}[{', '.join(map(str, array.shape))}]"


def _summary(array: np.ndarray) -> str:
    if array.size <= MAX_SHOWN:
        return np.array2string(array, separator=", ").replace("\n", "")
    if array.dtype.kind in "UV":
        return f"{_summary(array.reshape(-1)[:MAX_SHOWN])[:-1]}, ...]"
    if array.dtype == np.bool_:
        return f"{int(array.sum())} of {array.size} true"
    low, mean, high = array.min(), array.mean(dtype=np.float64), array.max()
    return f"min {low:.6g}  mean {mean:.6g}  max {high:.6g}"


def _save(outputs: Mapping[str, np.ndarray], folder: Path) -> dict[str, Path]:
    """Write each output to a file atomically and return the files' paths."""
    paths = {name: folder / file for name, file in file_names(outputs).items()}
    for name, path in paths.items():
        temporary = folder / f".{os.urandom(8).hex()}.tmp"
        try:
            with open(temporary, "xb") as file:
                np.save(file, outputs[name], allow_pickle=False)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return paths


def file_names(names: Iterable[str]) -> dict[str, str]:
    """Return a unique file name for each tensor, with "_" for characters that file systems reserve."""
    result: dict[str, str] = {}
    for name in names:
        stem = re.sub(r"[^\w.-]", "_", name).lstrip(".") or "_"
        unique, count = stem, 0
        while f"{unique}.npy".lower() in (file.lower() for file in result.values()):
            count += 1
            unique = f"{stem}_{count}"
        result[name] = f"{unique}.npy"
    return result
