"""An Explanation as one self-contained HTML page: no network, no fonts, no other files.

The page contains all text, so that it is readable without JavaScript. Scripts draw the graphs and the memory plan,
evaluate figures at the values of the symbols, search, and decompress long texts. The content security policy forbids
every connection, and names the page's style and script by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from html import escape
from pathlib import Path

from relaxlite.explain.explanation import Explanation
from relaxlite.explain.sections import Sections

_FOLDER = Path(__file__).parent
_SCRIPTS = ("page.js", "graph.js", "memory.js")
_NAVIGATION = {
    "summary": "Summary",
    "graph": "Graph",
    "passes": "Passes",
    "kernels": "Kernels",
    "decisions": "Decisions",
    "memory": "Memory",
    "weights": "Weights",
    "about": "About",
}


def page(explanation: Explanation, values: Mapping[str, int] | None = None, *, code: bool = True) -> str:
    """Render the page, with these initial values of symbols. `code=False` omits LLVM IR and assembly."""
    sections = Sections(explanation, values or {}, code)
    parts, controls = sections.html(), sections.controls()
    style = (_FOLDER / "page.css").read_text("utf-8")
    script = "\n".join((_FOLDER / name).read_text("utf-8") for name in _SCRIPTS)
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'"
    data = json.dumps(sections.data(), separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    title = escape(f"{explanation.name}: what compiling it did")
    links = "".join(f'<a href="#{at}">{escape(name)}</a>' for at, name in _NAVIGATION.items())
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}; form-action \'none\'">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title>\n<style>{style}</style></head><body>",
            f'<a class="skip" href="#summary">Skip to the summary</a><header><div><b>{escape(explanation.name)}</b>',
            f'<nav aria-label="Sections">{links}</nav>{_SEARCH}</div>{controls}</header><main>',
            f"<h1>{title}</h1>{_NO_SCRIPT}",
            *parts,
            f'</main><script type="application/json" id="data">{data}</script>',
            f"<script>{script}</script></body></html>\n",
        ]
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


_NO_SCRIPT = """<noscript><p class="hint">Without JavaScript the graphs and the memory drawing are missing, figures
stand at the values of the symbols that the page was made with, and long texts are not unpacked; <code>relaxlite
inspect --after PASS</code> prints those.</p></noscript>"""

_SEARCH = """<div id="search" role="search"><label for="query">Search</label>
<input id="query" type="search" autocomplete="off" placeholder="kernels, passes, values ( / )" role="combobox"
aria-expanded="false" aria-controls="results"><ul id="results" role="listbox" aria-label="Results" hidden></ul></div>"""
