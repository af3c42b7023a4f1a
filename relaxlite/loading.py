"""`relaxlite.load`: load compiled models, or ONNX and PyTorch files by the model cache.

The compiler is imported only to compile.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relaxlite.errors import ArtifactError, InvalidArgumentError
from relaxlite.runtime import threadpool
from relaxlite.runtime.artifact import MAGIC
from relaxlite.runtime.executable import ExecutableData
from relaxlite.runtime.module import Executable
from relaxlite.runtime.module import load as load_compiled

if TYPE_CHECKING:
    from relaxlite.frontend.common.bounds import Bounds
    from relaxlite.frontend.onnx.symbols import DynamicShapes
    from relaxlite.ir.module import IRModule
    from relaxlite.passes.schedule.tuning import Tuning

EXTERNAL_DATA = "external_data"  # key of an imported model's provenance: names of its external data files
_CHECKPOINT, _ONNX = b"GGUF", b"\x08"  # magic number of GGUF; the first field of an ONNX file, its IR version


def load(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    verify: bool = False,
    dynamic_shapes: DynamicShapes | None = None,
    bounds: Bounds | None = None,
    precision: str | None = None,
    constant_memory: bool | None = None,
    tuning: str | os.PathLike[str] | Tuning | None = None,
    libraries: Sequence[str] | str | None = None,
) -> Executable:
    """Load a saved model, an ONNX file, or a program saved by `torch.export` (.pt2).

    The latter two are compiled for this processor, with these options of their import and of `compile`, and cached on
    disk (see `relaxlite cache`). Later processes load the cached model without the compiler, until the file, its
    external data, an option or relaxlite changes.

    threads: number of threads of a parallel loop, in the whole process. verify: also check every byte of large weights,
    which reads the whole file. Raises ArtifactError for a saved model that is damaged or for another machine,
    InvalidArgumentError for options of compilation with a saved model, and the errors of `from_onnx` and `compile`.
    """
    source = Path(path_text(path))
    values = {
        "dynamic_shapes": dynamic_shapes,
        "bounds": bounds,
        "precision": precision,
        "constant_memory": constant_memory,
        "tuning": tuning,
        "libraries": libraries,
    }
    options = {name: value for name, value in values.items() if value is not None}
    if not _is_onnx(source) and not is_torch_program(source):
        if options:
            raise InvalidArgumentError(f"{', '.join(options)}: of a model that is compiled, and '{path}' is already")
        return load_compiled(source, threads=threads, verify=verify, update=_with_weights)
    if threads is not None:
        threadpool.set_num_threads(threads)  # before a compilation, which may take long
    return Executable(_compiled_data(source, options, verify=verify), update=_with_weights)


def _with_weights(data: ExecutableData, weights: Any) -> ExecutableData:
    from relaxlite.driver import with_weights

    return with_weights(data, weights)


def path_text(path: str | os.PathLike[str]) -> str:
    """Return a path as text. Raises InvalidArgumentError if it is no path."""
    try:
        return os.fsdecode(path)
    except TypeError as error:
        raise InvalidArgumentError(f"a model is opened by the path of its file, got {path!r}") from error


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a GGUF file or a Hugging Face folder."""
    text = path_text(path)
    if not text or os.path.isdir(text):
        return bool(text) and os.path.exists(Path(text) / "config.json")
    return _first_bytes(Path(text)).startswith(_CHECKPOINT)


def external_data(data: ExecutableData, source: Path) -> list[Path]:
    """Return the external data files that a model was compiled from, beside the ONNX file `source`."""
    return [source.parent / name for name in data.metadata.provenance.get(EXTERNAL_DATA, ())]


def is_torch_program(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a program saved by `torch.export.save`, by the ending of its name, .pt2."""
    return path_text(path).lower().endswith(".pt2") and os.path.isfile(path)


def import_file(
    path: str | os.PathLike[str], *, dynamic_shapes: DynamicShapes | None = None, bounds: Bounds | None = None
) -> IRModule:
    """Import an ONNX file or a program saved by `torch.export`.

    Raises InvalidArgumentError for `dynamic_shapes` of the latter, whose export has fixed them.
    """
    if not is_torch_program(path):
        from relaxlite.frontend.onnx import from_onnx

        return from_onnx(Path(path), dynamic_shapes=dynamic_shapes, bounds=bounds)
    if dynamic_shapes:
        raise InvalidArgumentError(
            f"dynamic_shapes: of an ONNX file; the dimensions of {path} are those of its torch.export.export"
        )
    from relaxlite.frontend.torch import from_torch

    return from_torch(path, bounds=bounds)


def _compiled_data(source: Path, options: Mapping[str, Any], *, verify: bool) -> ExecutableData:
    from relaxlite import model_cache

    def make() -> ExecutableData:
        from relaxlite.driver import build

        import_options = {name: options[name] for name in ("dynamic_shapes", "bounds") if name in options}
        compile_options = {name: value for name, value in options.items() if name not in import_options}
        return build(import_file(source, **import_options), **compile_options)

    tuning = options.get("tuning")
    if _has_user_extensions() or not (tuning is None or isinstance(tuning, str | os.PathLike)):
        return make()
    return model_cache.load_or_compile(
        source,
        model_cache.MODEL,
        options,
        make,
        files=[] if tuning is None else [Path(tuning)],
        more=partial(external_data, source=source),
        verify=verify,
    )


def _is_onnx(source: Path) -> bool:
    """Whether a file is an ONNX model, to be compiled. Raises ArtifactError for a checkpoint."""
    start = _first_bytes(source)
    if start.startswith(_CHECKPOINT):
        raise ArtifactError(f"cannot load {source}: it is the checkpoint of a language model; use relaxlite.llm.load")
    return start.startswith(_ONNX) or (source.suffix == ".onnx" and os.path.isfile(source) and start != MAGIC)


def _first_bytes(path: Path) -> bytes:
    """Return the first bytes of a file; b"" if it cannot be read, or is a pipe, which cannot be read twice."""
    if not os.path.isfile(path):  # Path.is_file() raises OSError for paths that are too long
        return b""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC))
    except OSError:
        return b""


def _has_user_extensions() -> bool:
    """Whether the user has registered library rules or converters, which change what models compile to."""
    library = sys.modules.get("relaxlite.library")
    registries = (sys.modules.get(f"relaxlite.frontend.{name}.registry") for name in ("onnx", "torch"))
    return bool(library and library.registered()) or any(r is not None and r.has_user_converters() for r in registries)
