"""README and docs/: code runs, command lines are understood, links lead somewhere, tables are true, pages are short."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from docs.generate import PAGES
from relaxlite.cli.parser import COMMANDS, make_parser
from relaxlite.passes.pipeline import PASSES
from tests.support.paths import ROOT

README = (ROOT / "README.md").read_text("utf-8")
SOURCES = sorted((ROOT / "relaxlite").rglob("*.py"))
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
FILES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("relaxlite", "tests", "bench", "examples", "docs")
    for path in (ROOT / folder).rglob("*.*")
]
GENERATED = {ROOT / "docs" / page for page in PAGES}
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = "\n".join(path.read_text("utf-8") for path in DOCUMENTS)
WRITTEN = [  # by hand, to be read
    path for path in DOCUMENTS if path.parent.name not in ("measurements", "benchmarks") and path not in GENERATED
]
PROGRAMS = [
    pytest.param("\n".join(blocks), id=str(path.relative_to(ROOT)))
    for path in DOCUMENTS
    if (blocks := re.findall(r"```python\n(.*?)```", path.read_text("utf-8"), re.DOTALL))
]


@pytest.mark.parametrize("code", PROGRAMS)
def test_code_in_documents_runs(code: str, tmp_path: Path) -> None:
    """The blocks of a document are one program."""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=ENVIRONMENT)


def test_the_readme_is_short() -> None:
    assert README.count("\n") < 150


def test_the_tour_takes_one_afternoon() -> None:
    files = re.findall(
        r"^\| \d+ \| `(relaxlite/[\w/]+\.py)`", (ROOT / "docs" / "tour.md").read_text("utf-8"), re.MULTILINE
    )
    assert files and files[0] == "relaxlite/driver.py" and len(files) <= 30
    assert sum((ROOT / file).read_text("utf-8").count("\n") for file in files) <= 8000


def test_readme_begins_with_the_two_commands() -> None:
    first, second = re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL)[:2]
    assert (first, second) == ("pip install . && relaxlite demo", 'pip install -e ".[test]" && pytest -n auto')
    assert "<!-- test-command -->\n```sh\n" + second in README, "which .ci/run reads"


def test_readme_lists_the_commands_in_order() -> None:
    table = README.partition("## On the command line")[2].partition("\n## ")[0]
    assert [cell.split()[1] for cell in re.findall(r"^\| `(relaxlite [^`]*)`", table, re.MULTILINE)] == list(COMMANDS)


def command_lines() -> list[str]:
    """The README's command lines, and those of the shell blocks of all documents, without comments."""
    shown = set(re.findall(r"`[^`\n]*?(relaxlite (?:\w+)[^`\n]*)`", README))
    for block in re.findall(r"```sh\n(.*?)```", TEXTS, re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line.partition("&& ")[2] or line, comments=True)
            if words[:1] == ["relaxlite"]:
                shown.add(shlex.join(words))
    return sorted(shown)


@pytest.mark.parametrize("text", command_lines())
def test_command_lines_in_documents_are_understood(text: str) -> None:
    words = shlex.split(text.replace("[NAME]", "NAME").replace(" ...", " --shape x=1"))[1:]
    args = make_parser().parse_args(words)
    assert args.command in COMMANDS and getattr(args, "after", None) in (None, "PASS", *PASSES)


@pytest.mark.parametrize("option", sorted(set(re.findall(r"(?<![\w-])--[a-z][\w-]*", README))))
def test_options_in_the_readme_exist(option: str) -> None:
    assert any(option in line for line in help_texts()), option


def help_texts() -> list[str]:
    commands = make_parser()._subparsers
    assert commands is not None
    return [p.format_help() for action in commands._group_actions for p in action.choices.values()]  # type: ignore[union-attr]


@pytest.mark.parametrize("page", PAGES)
def test_generated_pages_are_up_to_date(page: str) -> None:
    assert (ROOT / "docs" / page).read_text("utf-8") == PAGES[page](), "run `python -m docs.generate`"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", document.read_text("utf-8")):
        file, _, heading = link.partition("#")
        target = document.parent / file if file else document
        assert target.exists(), link
        assert not heading or heading in slugs(target), link


def slugs(document: Path) -> list[str]:
    """The anchors of a document's headings."""
    text = re.sub(r"```.*?```", "", document.read_text("utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return [re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings]


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r": ([\w/-]+\.md)$", navigation, re.MULTILINE)
    assert sorted(listed) == sorted(path.relative_to(ROOT / "docs").as_posix() for path in DOCUMENTS[1:])


def test_pages_for_people_can_be_reached_from_the_readme() -> None:
    """Through links, but for records of measurements."""
    reached, waiting = {ROOT / "README.md"}, [ROOT / "README.md"]
    while waiting:
        document = waiting.pop()
        links = re.findall(r"\]\((?!https?:)([^)#]+\.md)", document.read_text("utf-8"))
        new = {(document.parent / link).resolve() for link in links} - reached
        reached |= new
        waiting += new
    assert {path for path in DOCUMENTS if path not in reached and path.parent.name != "measurements"} == set()


@pytest.mark.parametrize("document", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_paragraphs_are_short(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text("utf-8"), flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n|\n(?=[-*|#\d])", text):
        assert paragraph.count("\n") < 8 and len(paragraph) < 1000, paragraph[:80]


def test_paths_in_documents_exist() -> None:
    for path in re.findall(r"`((?:relaxlite|docs|examples|tests|bench)/[\w/.-]+)`", TEXTS):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("document", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_in_documents_exist(document: Path) -> None:
    """By the end of their paths: `kv_cache.py`, `runtime/kv_cache.py`."""
    text = document.read_text("utf-8")
    for name in re.findall(r"`([\w/]+\.py)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        assert any(f"/{path}".endswith(f"/{name}") for path in FILES), name


def test_documents_named_in_code_exist() -> None:
    named = {path for source in SOURCES for path in re.findall(r"docs/[\w/-]+\.md", source.read_text("utf-8"))}
    missing = sorted(path for path in named - {"docs/gguf.md"} if not (ROOT / path).exists())  # that one is of ggml
    assert named and missing == []
