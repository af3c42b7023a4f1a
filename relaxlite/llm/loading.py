"""`relaxlite.llm.load`: a compiled language model opened, or a checkpoint, which is compiled once and kept.

The compiler is imported only when something is compiled.
"""

from __future__ import annotations

import os
from pathlib import Path

from relaxlite.errors import InvalidArgumentError
from relaxlite.llm.compiled_engine import CACHE_BYTES
from relaxlite.llm.model import LanguageModel
from relaxlite.llm.model import load as load_compiled
from relaxlite.loading import is_checkpoint, path_text
from relaxlite.runtime import threadpool
from relaxlite.runtime.executable import ExecutableData


def load(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    cache_bytes: int = CACHE_BYTES,
    verify: bool = False,
    max_context: int | None = None,
    cache_dtype: str | None = None,
    quantize: str | None = None,
    precision: str | None = None,
) -> LanguageModel:
    """A language model from a file that `relaxlite compile` or `LanguageModel.save` wrote, a GGUF file, or a Hugging
    Face folder.

    A checkpoint is compiled for this processor when it is opened for the first time, with these options of
    `relaxlite.llm.compile`, and again when it, an option or relaxlite has changed; what it compiles to is kept on disk
    (`relaxlite cache` shows it), where the next process finds it and loads no compiler.

    `cache_bytes` bounds the cache of keys and values; `verify` checks every byte of the weights. Raises ArtifactError
    when a compiled file is damaged or no language model, InvalidArgumentError for an option that it does not take, and
    what `relaxlite.llm.compile` raises.
    """
    given = {"max_context": max_context, "cache_dtype": cache_dtype, "quantize": quantize, "precision": precision}
    options = {name: value for name, value in given.items() if value is not None}
    path = path_text(path)
    if not is_checkpoint(path):
        if options:
            raise InvalidArgumentError(f"{', '.join(options)}: of a checkpoint, and '{os.fspath(path)}' is none")
        return load_compiled(path, threads=threads, cache_bytes=cache_bytes, verify=verify)
    if threads is not None:
        threadpool.set_num_threads(threads)  # before a model is compiled, which may take long
    from relaxlite import model_cache

    def make() -> ExecutableData:
        from relaxlite.llm.compiling import build

        return build(path, **options)  # type: ignore[arg-type]

    data = model_cache.load_or_compile(Path(path), model_cache.LANGUAGE_MODEL, options, make, verify=verify)
    return LanguageModel.of(data, cache_bytes=cache_bytes)
