"""Reader of the JSON files of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from relaxlite.errors import ImportModelError
from relaxlite.frontend.foreign_files import SIGNATURE_BYTES, describe_foreign


def read_json(path: Path, *, needed: bool = False) -> dict[str, Any]:
    """Read the JSON object in a file; an empty one if the file does not exist.

    Raises ImportModelError if the file is `needed` and missing, or is no JSON object.
    """
    if not path.exists():
        if needed:
            raise ImportModelError(f"{path.parent}: no {path.name}; {_missing_hint(path.parent)}")
        return {}
    try:
        result = json.loads(path.read_text("utf-8-sig"))
    except (ValueError, OSError, RecursionError) as error:
        raise ImportModelError(f"{path}: cannot be read: {describe_foreign_file(path) or error}") from error
    if not isinstance(result, dict):
        raise ImportModelError(f"{path}: no JSON object")
    return result


def _missing_hint(folder: Path) -> str:
    """Return the end of an error message about a missing config.json."""
    if (folder / "adapter_config.json").exists():
        return "it holds an adapter (LoRA); merge it into its model, and take the folder of that"
    return "a Hugging Face folder has one"


def describe_foreign_file(path: Path) -> str | None:
    """Describe the format of a file that has not the expected one; None if it is not recognized."""
    try:
        with path.open("rb") as file:
            return describe_foreign(file.read(SIGNATURE_BYTES))
    except OSError:
        return None
