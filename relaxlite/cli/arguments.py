"""What several commands share: parsing name=value arguments, opening models, making inputs, printing times."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import InvalidArgumentError
from relaxlite.runtime.executable import TensorSpec
from relaxlite.runtime.module import Executable, load

DEFAULT_INTEGERS = (0, 2)  # drawn for integer inputs without --range: valid as masks, types and most vocabularies


def named(items: Iterable[str] | None, what: str) -> dict[str, str]:
    """["a=1", "b=2"] -> {"a": "1", "b": "2"}; names may hold anything but '='."""
    found: dict[str, str] = {}
    for item in items or ():
        name, sign, value = item.rpartition("=")
        if not sign or not name:
            raise InvalidArgumentError(f"{what} {item!r} is not of the form NAME=VALUE")
        if name in found:
            raise InvalidArgumentError(f"{what} for {name!r} is given twice")
        found[name] = value
    return found


def parse_shape(text: str) -> tuple[int, ...]:
    """ "1x128" -> (1, 128); "scalar" or "" -> ()."""
    if text in ("", "scalar"):
        return ()
    if not re.fullmatch(r"\d+([x,]\d+)*", text):
        raise InvalidArgumentError(f"shape {text!r} is not of the form 1x3x224")
    return tuple(int(d) for d in re.split("[x,]", text))


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dynamic-shape", action="append", metavar="NAME=D0xD1",
        help="override an input's dimensions: numbers, symbol names, or ? to keep one; e.g. ids=batchx128",
    )  # fmt: skip
    parser.add_argument(
        "--bound", action="append", metavar="SYMBOL=LOW..HIGH", help="bounds of a symbol, e.g. seq=1..512"
    )
    parser.add_argument(
        "--target", default="llvm", help="what to compile for, e.g. 'llvm -mcpu=x86-64-v3' (default: this machine)"
    )


def import_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of from_onnx that the command line asks for."""
    shapes: dict[str, dict[int, str | int]] = {}
    for name, text in named(args.dynamic_shape, "--dynamic-shape").items():
        dims = re.split(r"(?<=[\w?])x(?=[\w?])|,", text)
        shapes[name] = {k: int(d) if d.isdigit() else d for k, d in enumerate(dims) if d != "?"}
    return {"dynamic_shapes": shapes or None, "bounds": named(args.bound, "--bound") or None}


def open_model(args: argparse.Namespace) -> Executable:
    """A saved artifact, or an ONNX model compiled now."""
    path = Path(args.model)
    if path.suffix != ".onnx":
        return load(path, threads=getattr(args, "threads", None))
    from relaxlite.driver import compile as compile_module
    from relaxlite.frontend.onnx import from_onnx
    from relaxlite.passes.manager import PassContext
    from relaxlite.target import Target

    context = PassContext(Target.parse(args.target))
    executable = compile_module(from_onnx(path, **import_options(args)), context.target, context=context)
    if args.verbose:
        print_timings(context.timings)
    return executable


def print_timings(timings: Iterable[tuple[str, float]]) -> None:
    for name, seconds in timings:
        print(f"  {name:<24}{seconds * 1e3:9.1f} ms")


def make_inputs(
    specs: Iterable[TensorSpec],
    files: Mapping[str, str],
    shapes: Mapping[str, str],
    ranges: Mapping[str, str],
    seed: int,
) -> dict[str, np.ndarray]:
    """An array for every input: from its .npy file, or random of the shape that is given or follows from the others.

    Integers are drawn from LOW..HIGH (inclusive) of `ranges`, floats from a normal distribution.
    """
    specs = tuple(specs)
    names = {s.name for s in specs}
    for given in (files, shapes, ranges):
        for name in given:
            if name not in names:
                raise InvalidArgumentError(f"the model has no input {name!r}; it has {', '.join(sorted(names))}")
    rng = np.random.default_rng(seed)
    arrays = {name: _read(path, name) for name, path in files.items()}
    symbols: dict[str, int] = {}
    for spec in specs:
        given_shape = arrays[spec.name].shape if spec.name in arrays else None
        if given_shape is None and spec.name in shapes:
            given_shape = parse_shape(shapes[spec.name])
        if given_shape is not None:
            symbols.update((d, n) for d, n in zip(spec.shape, given_shape, strict=False) if isinstance(d, str))
    for spec in specs:
        if spec.name not in arrays:
            shape = parse_shape(shapes[spec.name]) if spec.name in shapes else _shape_from(spec, symbols)
            arrays[spec.name] = _random(spec, shape, ranges.get(spec.name), rng)
    return {spec.name: arrays[spec.name] for spec in specs}


def _read(path: str, name: str) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InvalidArgumentError(f"input {name!r}: cannot read {path!r} as a .npy file: {error}") from error
    if not isinstance(array, np.ndarray):
        raise InvalidArgumentError(f"input {name!r}: {path!r} holds several arrays; give a .npy file of one")
    return array


def _shape_from(spec: TensorSpec, symbols: Mapping[str, int]) -> tuple[int, ...]:
    missing = [d for d in spec.shape if isinstance(d, str) and d not in symbols]
    if missing:
        raise InvalidArgumentError(
            f"input {spec.name!r} is {spec}: say how large {missing[0]!r} is, "
            f"with --shape {spec.name}={'x'.join('1' if isinstance(d, str) else str(d) for d in spec.shape) or 'scalar'} or --input"
        )
    return tuple(symbols[d] if isinstance(d, str) else d for d in spec.shape)


def _random(spec: TensorSpec, shape: tuple[int, ...], limits: str | None, rng: np.random.Generator) -> np.ndarray:
    dtype = dtypes.to_numpy(spec.dtype)
    if limits is not None:
        match = re.fullmatch(r"(-?[\d.e+-]+)\.\.(-?[\d.e+-]+)", limits)
        if match is None:
            raise InvalidArgumentError(f"--range {spec.name}={limits!r} is not of the form LOW..HIGH")
        low, high = float(match[1]), float(match[2])
        values = (
            rng.uniform(low, high, shape)
            if dtypes.is_float(spec.dtype)
            else rng.integers(int(low), int(high) + 1, shape)
        )
        return np.asarray(values).astype(dtype)
    if dtypes.is_float(spec.dtype):
        return np.asarray(rng.standard_normal(shape)).astype(dtype)
    return np.asarray(rng.integers(*DEFAULT_INTEGERS, shape)).astype(dtype)
