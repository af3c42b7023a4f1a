"""The generated pages of docs/: `python -m docs.generate` writes them, a test compares them with what is there."""

from __future__ import annotations

from collections.abc import Callable

from docs.generate import ops_page, passes_page, reference_pages

PAGES: dict[str, Callable[[], str]] = {
    "ops.md": ops_page.render,
    "passes.md": passes_page.render,
    "reference/commands.md": reference_pages.render_commands,
    "reference/errors.md": reference_pages.render_errors,
    "reference/knobs.md": reference_pages.render_knobs,
    "reference/python.md": reference_pages.render_python,
    "reference/targets.md": reference_pages.render_targets,
}
