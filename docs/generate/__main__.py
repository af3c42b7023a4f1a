"""Write the generated pages of docs/: python docs/generate"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ops_page
import passes_page

PAGES: dict[str, Callable[[], str]] = {
    "ops.md": ops_page.render,
    "passes.md": passes_page.render,
}

if __name__ == "__main__":
    for name, render in PAGES.items():
        Path(__file__).parents[1].joinpath(name).write_text(render(), "utf-8")
