"""Reading of checkpoints in either format: a GGUF file or a Hugging Face folder."""

from __future__ import annotations

import os
from pathlib import Path

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.checkpoint import Checkpoint
from relaxlite.frontend.llm.gguf_file import read_gguf
from relaxlite.frontend.llm.hf_folder import read_folder


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a GGUF file or a Hugging Face folder. Raises ImportModelError for other paths."""
    place = Path(path)
    if os.path.isdir(place):
        return read_folder(place)
    if not os.path.exists(place):  # unlike Path.exists(), without an error for paths that are too long
        raise ImportModelError(f"{place}: no such file or folder")
    return read_gguf(place)
