"""`read_checkpoint`: a GGUF file or a Hugging Face folder, whichever a path is."""

from __future__ import annotations

import os
from pathlib import Path

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.checkpoint import Checkpoint
from relaxlite.frontend.llm.gguf_file import read_gguf
from relaxlite.frontend.llm.hf_folder import read_folder


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """ImportModelError for what is neither a GGUF file nor a folder with config.json."""
    place = Path(path)
    if os.path.isdir(place):
        return read_folder(place)
    if not os.path.exists(place):  # nor do paths that are too long, which Path.exists() raises OSError for
        raise ImportModelError(f"{place}: no such file or folder")
    return read_gguf(place)
