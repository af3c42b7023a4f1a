"""The words of docs/glossary.md: identifiers do not use those that it replaces, and summaries are no fragments.

What is left of the old words is counted below, and may only become less.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SOURCES = sorted((ROOT / "relaxlite").rglob("*.py"))
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text("utf-8")
FORBIDDEN = {
    word for row in re.findall(r"^\|.*\|([^|]*)\|$", GLOSSARY, re.MULTILINE) for word in re.findall(r"([\w]+)\*", row)
}

LEFT: dict[str, int] = {
    "asked": 2,
    "asks": 4,
    "coarse": 2,
    "follows": 1,
    "found": 7,
    "given": 8,
    "instead": 1,
    "made": 2,
    "planes": 2,
    "spread": 4,
    "squares": 3,
    "streams": 2,
    "turned": 1,
}

FRAGMENT = re.compile(r"(Of|What|Which|Those|The same|By|As|From|In|With|At|That|To|For|How|Where|It|They)\b")
FRAGMENTS_LEFT = 87


def parts_of(name: str) -> set[str]:
    """The words of an identifier, and the whole in lower case."""
    words = re.split(r"_|(?<=[a-z0-9])(?=[A-Z])", name.strip("_"))
    return {word.lower() for word in words if word} | {name.strip("_").lower()}


def defined_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text("utf-8")) for path in SOURCES}


def test_identifiers_use_the_words_of_the_field(trees: dict[Path, ast.Module]) -> None:
    used: Counter[str] = Counter()
    for tree in trees.values():
        for name in set(defined_names(tree)):
            used.update(parts_of(name) & FORBIDDEN)
    assert len(FORBIDDEN) > 20
    more = {word: count for word, count in used.items() if count > LEFT.get(word, 0)}
    assert not more, "see docs/glossary.md; files that use these words"
    assert used == Counter(LEFT), "fewer are left: write the new counts down"


def test_summaries_are_no_fragments(trees: dict[Path, ast.Module]) -> None:
    count = 0
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                count += bool(FRAGMENT.match(ast.get_docstring(node) or ""))
    assert count <= FRAGMENTS_LEFT
