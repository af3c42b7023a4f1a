"""`relaxlite.load`: a compiled model opened, or an ONNX file, which is compiled once and kept. The compiler is imported
only when something is compiled."""

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
    from relaxlite.frontend.onnx.symbols import Bounds, DynamicShapes
    from relaxlite.passes.schedule.tuning import Tuning

EXTERNAL_DATA = "external_data"  # where an imported model's provenance names files that lie beside it
_CHECKPOINT, _ONNX = b"GGUF", b"\x08"  # how such files begin: ONNX with the version of its IR, a varint


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
    """Open a saved model, or an ONNX file.

    An ONNX file is compiled for this processor when it is opened for the first time, with these options of `from_onnx`
    and `compile`, and again when it, its external data, an option or relaxlite has changed; what it compiles to is kept
    on disk (`relaxlite cache` shows it), where the next process finds it and loads no compiler.

    `threads`: how many threads work on one parallel loop, in the whole process. `verify`: check every byte of large
    weights too, which reads the whole file. Raises ArtifactError when a saved model is damaged or needs another
    machine, InvalidArgumentError for an option that it does not take, and what `from_onnx` and `compile` raise.
    """
    source = Path(path_text(path))
    given = {
        "dynamic_shapes": dynamic_shapes,
        "bounds": bounds,
        "precision": precision,
        "constant_memory": constant_memory,
        "tuning": tuning,
        "libraries": libraries,
    }
    options = {name: value for name, value in given.items() if value is not None}
    if not _is_onnx(source):
        if options:
            raise InvalidArgumentError(f"{', '.join(options)}: of a model that is compiled, and '{path}' is already")
        return load_compiled(source, threads=threads, verify=verify)
    if threads is not None:
        threadpool.set_num_threads(threads)  # before a model is compiled, which may take long
    return Executable(_onnx_data(source, options, verify=verify))


def path_text(path: str | os.PathLike[str]) -> str:
    """InvalidArgumentError: it is no path."""
    try:
        return os.fsdecode(path)
    except TypeError as error:
        raise InvalidArgumentError(f"a model is opened by the path of its file, got {path!r}") from error


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a GGUF file or a Hugging Face folder."""
    text = path_text(path)
    if not text or os.path.isdir(text):
        return bool(text) and os.path.exists(Path(text) / "config.json")
    return _start(Path(text)).startswith(_CHECKPOINT)


def external_data(data: ExecutableData, source: Path) -> list[Path]:
    """The files beside an ONNX file that it was compiled from."""
    return [source.parent / name for name in data.metadata.provenance.get(EXTERNAL_DATA, ())]


def _onnx_data(source: Path, options: Mapping[str, Any], *, verify: bool) -> ExecutableData:
    from relaxlite import model_cache

    def make() -> ExecutableData:
        from relaxlite.driver import build
        from relaxlite.frontend.onnx import from_onnx

        of_import = {name: options[name] for name in ("dynamic_shapes", "bounds") if name in options}
        others = {name: value for name, value in options.items() if name not in of_import}
        return build(from_onnx(source, **of_import), **others)

    tuning = options.get("tuning")
    if _has_own_rules() or not (tuning is None or isinstance(tuning, str | os.PathLike)):
        return make()
    return model_cache.find_or_make(
        source,
        model_cache.MODEL,
        options,
        make,
        files=[] if tuning is None else [Path(tuning)],
        more=partial(external_data, source=source),
        verify=verify,
    )


def _is_onnx(source: Path) -> bool:
    """Whether a file is to be compiled. Raises ArtifactError for a checkpoint."""
    start = _start(source)
    if start.startswith(_CHECKPOINT):
        raise ArtifactError(f"cannot load {source}: it is the checkpoint of a language model; use relaxlite.llm.load")
    return start.startswith(_ONNX) or (source.suffix == ".onnx" and os.path.isfile(source) and start != MAGIC)


def _start(path: Path) -> bytes:
    """How a file begins; nothing where it cannot be read, or is a pipe, which could not be read again."""
    if not os.path.isfile(path):  # Path.is_file() raises OSError for paths that are too long
        return b""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC))
    except OSError:
        return b""


def _has_own_rules() -> bool:
    """Whether this process has changed what models compile to, by rules for libraries or converters of its own."""
    library, registry = (sys.modules.get(name) for name in ("relaxlite.library", "relaxlite.frontend.onnx.registry"))
    return bool(library and library.registered()) or bool(registry and registry.has_foreign())
