"""Language models that were compiled for `generate`, `chat` or `eval`, kept on disk: CACHE/compiled/NAME-KEY.rlx.

NAME is that of the checkpoint, with the kind of quantization where one was asked for; there is one file for each. KEY
says everything that the file depends on.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from relaxlite import models
from relaxlite.runtime import artifact
from relaxlite.runtime.executable import ExecutableData

KEY_DIGITS = 16
_FILE = re.compile(rf"(.+)-[0-9a-f]{{{KEY_DIGITS}}}\.rlx")
_ABANDONED = re.compile(rf"\.{_FILE.pattern}\.\w+\.tmp")  # of a process that was killed while it wrote


@dataclass(frozen=True, slots=True)
class Kept:
    name: str
    path: Path
    bytes: int


def folder() -> Path:
    return models.cache_folder() / "compiled"


def place_of(name: str, key: str) -> Path:
    """Where the compiled file of a name is, or would be."""
    return folder() / f"{name}-{key}.rlx"


def keep(data: ExecutableData, name: str, key: str) -> Path:
    """Write a compiled model, in the place of an older one of this name. Raises ArtifactError."""
    path = place_of(name, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    artifact.save(data, path)
    for old in kept():
        if old.name == name and old.path != path:
            old.path.unlink(missing_ok=True)
    return path


def kept() -> list[Kept]:
    """All of them, by name."""
    found = []
    for path in sorted(folder().glob("*.rlx")):
        if match := _FILE.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                found.append(Kept(match[1], path, path.stat().st_size))
    return found


def clear() -> list[Kept]:
    """Remove all of them, and nothing else that may lie in the folder; says what that was."""
    found = kept()
    abandoned = [path for path in folder().glob(".*.tmp") if _ABANDONED.fullmatch(path.name)]
    for path in [*(model.path for model in found), *abandoned]:
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # there is none, or something else is in it
        folder().rmdir()
    return found
