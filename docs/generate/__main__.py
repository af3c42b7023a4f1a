"""Write the generated pages of docs/: python -m docs.generate"""

from __future__ import annotations

from pathlib import Path

from docs.generate import PAGES

if __name__ == "__main__":
    for name, render in PAGES.items():
        Path(__file__).parents[1].joinpath(name).write_text(render(), "utf-8")
