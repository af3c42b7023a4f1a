"""HTML fragments, and numbers with units for display."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from html import escape

from relaxlite.explain.decisions import DecisionGroup
from relaxlite.ir.symbolic import SymExpr
from relaxlite.passes.context import Decision


def section(at: str, title: str, *parts: str) -> str:
    """A section with a heading; `parts` are HTML."""
    body = "\n".join(part for part in parts if part)
    return f'<section id="{at}" aria-labelledby="{at}-title"><h2 id="{at}-title">{escape(title)}</h2>\n{body}</section>'


def details(head: str, body: str, attributes: str = "") -> str:
    """A collapsible element. `head` and `body` are HTML."""
    return f"<details {attributes}><summary>{head}</summary>{body}</details>"


def folded(text: str) -> str:
    """An expression as code; a long one collapsed."""
    code = f"<code>{escape(text)}</code>"
    return code if len(text) <= 120 else details(f"{len(text)} characters", code)


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Container[int] = (),
    attributes: str = "",
    row_name: str = "row",
) -> str:
    """A table of HTML cells; columns in `numbers` are right-aligned. Rows are numbered: `data-<row_name>`."""

    def cells(tag: str, row: Sequence[str]) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        return "".join(
            f"<{tag}{scope}{' class=number' if k in numbers else ''}>{cell}</{tag}>" for k, cell in enumerate(row)
        )

    body = "\n".join(f'<tr data-{row_name}="{k}">{cells("td", row)}</tr>' for k, row in enumerate(rows))
    head = f"<tr>{cells('th', heads)}</tr>"
    return f'<div class="wide"><table {attributes}><thead>{head}</thead><tbody>\n{body}\n</tbody></table></div>'


Amount = Callable[[str, SymExpr], str]  # name and value of a figure -> HTML


def decision_items(decisions: Sequence[Decision], amount: Amount, kernel_of: Mapping[str, int], limit: int) -> str:
    """List of the subjects of decisions; values of a kernel link to the kernel."""
    items = []
    for decision in decisions[:limit]:
        subject = " ".join(_linked(word, kernel_of) for word in decision.subject.split())
        items.append(f"<li>{subject}{_amounts(decision, amount)}</li>")
    if len(decisions) > limit:
        items.append(f"<li>and {len(decisions) - limit} more</li>")
    return f"<ul>{''.join(items)}</ul>"


def group_items(groups: Iterable[DecisionGroup], amount: Amount, place_of: Callable[[Decision], str]) -> str:
    """List of decision groups: the first decision of each, with a link to the whole group."""
    items = []
    for group in groups:
        first, times = group.decisions[0], len(group.decisions)
        repetitions = f" (and {times - 1} more like it)" if times > 1 else ""
        text = f"{escape(first.subject)}: {verdict(group.taken)}, {escape(first.reason)}{_amounts(first, amount)}"
        items.append(f'<li><a href="#{place_of(first)}">{escape(group.step)}</a>: {text}{repetitions}</li>')
    return f"<ul>{''.join(items)}</ul>"


def verdict(taken: bool) -> str:
    """A decision as HTML: yes or no."""
    return '<span class="yes">yes</span>' if taken else '<span class="no">no</span>'


def _linked(word: str, kernel_of: Mapping[str, int]) -> str:
    return f'<a href="#kernel-{kernel_of[word]}">{escape(word)}</a>' if word in kernel_of else escape(word)


def _amounts(decision: Decision, amount: Amount) -> str:
    parts = [amount(name, expr) for name, expr in decision.figures.items()]
    return f" ({', '.join(parts)})" if parts else ""


def words(items: Sequence[str], limit: int) -> str:
    """The first items, and the number of further ones."""
    text = ", ".join(items[:limit])
    return text if len(items) <= limit else f"{text} and {len(items) - limit} more"


def bytes_text(count: float) -> str:
    """Bytes with a unit: "512 B", "97.0 kB", "1.2 MB"; page.js uses the same format."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def count_text(count: float) -> str:
    """Count with a unit: "512", "97.0 k", "1.2 M"; page.js uses the same format."""
    return _scaled(count, ("", "k", "M", "G", "T", "P"))


def _scaled(count: float, units: Sequence[str]) -> str:
    size, unit = float(count), 0
    while abs(size) >= 999.95 and unit < len(units) - 1:
        size, unit = size / 1000, unit + 1
    number = f"{size:.0f}" if unit == 0 else f"{size:.1f}"
    return f"{number} {units[unit]}".rstrip()
