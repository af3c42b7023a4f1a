"""Loading of language models: a compiled file, or a checkpoint, which is compiled once and cached.

The compiler is imported only if something is compiled.
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
    """Load a language model from a compiled file, a GGUF file, or a Hugging Face folder.

    Compiled files are written by `relaxlite compile` and `LanguageModel.save`. A checkpoint is compiled for this
    processor when it is loaded for the first time, with these options of `relaxlite.llm.compile`, and again when the
    checkpoint, an option or relaxlite has changed; the result is cached on disk (`relaxlite cache` shows it), where the
    next process loads it without the compiler.

    `cache_bytes` bounds the KV cache; `verify` checks every byte of the weights. Raises ArtifactError if a compiled
    file is damaged or is no language model, InvalidArgumentError for options of compilation with a compiled file, and
    the errors of `relaxlite.llm.compile`.
    """
    all_options = {"max_context": max_context, "cache_dtype": cache_dtype, "quantize": quantize, "precision": precision}
    options = {name: value for name, value in all_options.items() if value is not None}
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
