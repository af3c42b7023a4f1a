"""Markdown that all generated pages share."""

from __future__ import annotations

import inspect
from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; cells are Markdown already."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def first_paragraph(documented: object) -> str:
    """The first paragraph of an object's docstring, as a cell of a table."""
    return cell_of(documented.__doc__ or "")


def cell_of(docstring: str) -> str:
    """The first paragraph of a docstring, as a cell of a table."""
    return cell(inspect.cleandoc(docstring).partition("\n\n")[0])


def cell(text: str) -> str:
    """Plain text as a cell of a table, on one line."""
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*")
