"""Small pieces of HTML, and numbers as a person reads them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from html import escape

from relaxlite.ir.symbolic import SymExpr
from relaxlite.passes.decisions import Decision


def section(at: str, title: str, *parts: str) -> str:
    body = "\n".join(part for part in parts if part)
    return f'<section id="{at}" aria-labelledby="{at}-title"><h2 id="{at}-title">{escape(title)}</h2>\n{body}</section>'


def details(head: str, body: str, attributes: str = "") -> str:
    """What opens with a click. `head` and `body` are HTML."""
    return f"<details {attributes}><summary>{head}</summary>{body}</details>"


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Container[int] = (), attributes: str = ""
) -> str:
    """A table of HTML cells; the columns in `numbers` stand to the right."""

    def cells(tag: str, row: Sequence[str]) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        return "".join(
            f"<{tag}{scope}{' class=number' if k in numbers else ''}>{cell}</{tag}>" for k, cell in enumerate(row)
        )

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = f"<tr>{cells('th', heads)}</tr>"
    return f'<div class="wide"><table {attributes}><thead>{head}</thead><tbody>\n{body}\n</tbody></table></div>'


def decision_items(
    decisions: Sequence[Decision],
    figure: Callable[..., str],
    *,
    limit: int,
    kernel_of: Mapping[str, int] | None = None,
    with_reason: bool = True,
) -> str:
    """A list of decisions; the values that a kernel computes are links to it."""
    items = []
    for decision in decisions[:limit]:
        subject = " ".join(_linked(word, kernel_of or {}) for word in decision.subject.split())
        reason = ""
        if with_reason:
            verdict = '<span class="yes">yes</span>' if decision.taken else '<span class="no">no</span>'
            reason = f": {verdict}, {escape(decision.reason)}"
        amounts = ", ".join(_amount(name, expr, figure) for name, expr in decision.figures.items())
        step = f"{escape(decision.step)}: " if with_reason else ""
        items.append(f"<li>{step}{subject}{reason}{f' ({amounts})' if amounts else ''}</li>")
    if len(decisions) > limit:
        items.append(f"<li>and {len(decisions) - limit} more</li>")
    return f"<ul>{''.join(items)}</ul>"


def _linked(word: str, kernel_of: Mapping[str, int]) -> str:
    return f'<a href="#kernel-{kernel_of[word]}">{escape(word)}</a>' if word in kernel_of else escape(word)


def _amount(name: str, expr: SymExpr, figure: Callable[..., str]) -> str:
    unit = "bytes" if "byte" in name else "count"
    return f"{escape(name)} <code>{escape(str(expr))}</code> = {figure(expr, unit)}"


def words(items: Sequence[str], limit: int) -> str:
    """The first of them, and how many more there are."""
    text = ", ".join(items[:limit])
    return text if len(items) <= limit else f"{text} and {len(items) - limit} more"


def bytes_text(count: float) -> str:
    """ "512 B", "97.0 kB", "1.2 MB"; page.js writes the same."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def count_text(count: float) -> str:
    """ "512", "97.0 k", "1.2 M"; page.js writes the same."""
    return _scaled(count, ("", "k", "M", "G", "T", "P"))


def _scaled(count: float, units: Sequence[str]) -> str:
    size, place = float(count), 0
    while abs(size) >= 999.95 and place < len(units) - 1:
        size, place = size / 1000, place + 1
    number = f"{size:.0f}" if place == 0 else f"{size:.1f}"
    return f"{number} {units[place]}".rstrip()
