"""Input arrays for the command line: from .npy files, or random with a shape and range."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import InputError
from relaxlite.runtime.executable import TensorSpec

Shape = tuple[int, ...]
Limits = tuple[int | float, int | float]

DEFAULT_INTEGER_RANGE: Limits = (0, 1)  # valid as masks, token types and tokens of any vocabulary
_MAGIC = b"\x93NUMPY"


def make_inputs(
    specs: Sequence[TensorSpec],
    *,
    files: Mapping[str, str],
    shapes: Mapping[str, Shape],
    ranges: Mapping[str, Limits],
    seed: int,
    shape_option: str = "--shape",
    takes_files: bool = True,
) -> dict[str, np.ndarray]:
    """Return an array for every input: read from its .npy file, or random, of a given or inferred shape.

    files, shapes, ranges: by name of input. shape_option, takes_files: the options of the command, for error texts.
    Raises InputError for unknown names, unreadable files, wrong ranks and unknown sizes. Sizes and dtypes are checked
    when the model runs.
    """
    _check_names(specs, (*files, *shapes, *ranges))
    if twice := sorted(files.keys() & shapes.keys()):
        raise InputError(f"input {twice[0]!r} has both --input and {shape_option}")
    rng = np.random.default_rng(seed)
    arrays = {spec.name: _read(files[spec.name], spec) for spec in specs if spec.name in files}
    known = {**shapes, **{name: array.shape for name, array in arrays.items()}}
    _check_ranks(specs, known)
    symbols = _sizes_of_symbols(specs, known)
    alternatives = f"say{', or a file with --input' if takes_files else ''}{_step_hint(specs)}"
    inputs = {}
    for spec in specs:
        array = arrays.get(spec.name)
        if array is None:
            shape = known[spec.name] if spec.name in known else _shape_from(spec, symbols, shape_option, alternatives)
            array = _random(spec, shape, ranges.get(spec.name), rng)
        inputs[spec.name] = array
    return inputs


def _check_names(specs: Sequence[TensorSpec], names_given: Iterable[str]) -> None:
    names = [spec.name for spec in specs]
    for name in names_given:
        if name not in names:
            raise InputError(f"the model has no input {name!r}; it has {', '.join(map(repr, names)) or 'none'}")


def _check_ranks(specs: Sequence[TensorSpec], shapes: Mapping[str, Shape]) -> None:
    """Raise InputError for a shape of the wrong rank, before sizes of other inputs are inferred from the shapes."""
    for spec in specs:
        shape = shapes.get(spec.name, ())
        if spec.name in shapes and len(shape) != len(spec.shape):
            _, _, kind = str(spec).partition(f"{spec.name}: ")
            raise InputError(
                f"argument {spec.name!r}: expects {kind} of rank {len(spec.shape)}, got rank {len(shape)}: {shape}"
            )


def _read(path: str, spec: TensorSpec) -> np.ndarray:
    try:
        with open(path, "rb") as file:
            head = file.read(len(_MAGIC))
        if head.startswith(b"PK"):
            raise ValueError("it holds several arrays, as .npz files do")
        if head != _MAGIC:
            raise ValueError("it is empty" if not head else "it is none")
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"input {spec.name!r}: cannot read {path!r} as a .npy file: {reason}") from error
    dtype = dtypes.to_numpy(spec.dtype)
    # NumPy's file format has no bfloat16: such arrays are stored as raw bytes.
    return array.view(dtype) if array.dtype.kind == "V" and array.dtype.itemsize == dtype.itemsize else array


def _sizes_of_symbols(specs: Sequence[TensorSpec], shapes: Mapping[str, Shape]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for spec in specs:
        for dim, size in zip(spec.shape, shapes.get(spec.name, ()), strict=False):
            if dim in spec.bounds:
                sizes.setdefault(str(dim), size)
    return sizes


def _step_hint(specs: Sequence[TensorSpec]) -> str:
    if any(re.fullmatch(r"keys_\d+", spec.name) for spec in specs):
        return "; it is one step of a language model, which `relaxlite generate`, `chat` and `eval` run"
    return ""


def _shape_from(spec: TensorSpec, sizes: Mapping[str, int], shape_option: str, alternatives: str) -> Shape:
    shape = tuple(dim if isinstance(dim, int) else sizes.get(dim, dim) for dim in spec.shape)
    unknown = [dim for dim in shape if isinstance(dim, str)]
    if unknown:
        example = f"{shape_option} {spec.name}={'x'.join(str(dim) if isinstance(dim, int) else '1' for dim in shape)}"
        raise InputError(f"input {spec}: how large is {unknown[0]!r}? Give {example}, {alternatives}")
    return tuple(int(dim) for dim in shape)


def _random(spec: TensorSpec, shape: Shape, limits: Limits | None, rng: np.random.Generator) -> np.ndarray:
    if spec.element == "string":
        return rng.integers(0, 2, shape).astype(str)
    dtype = dtypes.to_numpy(spec.dtype)
    try:
        if not dtypes.is_float(spec.dtype):
            low, high = limits or DEFAULT_INTEGER_RANGE
            if not isinstance(low, int) or not isinstance(high, int):
                raise InputError(f"--range {spec.name}={low}..{high}: {spec.dtype} takes whole numbers")
            return np.asarray(rng.integers(low, high, shape, dtype, endpoint=True))
        values = rng.standard_normal(shape) if limits is None else rng.uniform(*limits, shape)
        return np.asarray(values).astype(dtype)
    except (ValueError, MemoryError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"input {spec.name!r}: cannot make random values of shape {shape}: {error}") from error
