"""Sections of the HTML page, and the data that its scripts read."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from relaxlite.explain.code import Code, codes_of, pack_text, packed_size
from relaxlite.explain.decisions import decisions_by_kernel, group_decisions
from relaxlite.explain.explanation import Explanation
from relaxlite.explain.graph import Graph
from relaxlite.explain.kernels import FLOPS_PER_BYTE, Kernel, modelled_work
from relaxlite.explain.markup import (
    bytes_text,
    count_text,
    decision_items,
    details,
    folded,
    group_items,
    section,
    table,
    verdict,
    words,
)
from relaxlite.explain.passes import Differences
from relaxlite.explain.symbols import Figures, value_of
from relaxlite.ir.program_printer import print_program
from relaxlite.ir.symbolic import SymExpr
from relaxlite.passes.context import Decision
from relaxlite.runtime.executable import bound_text

MAX_CODE_BYTES = 8_000_000
"""Packed LLVM IR and assembly in a page, limited for the time in which a browser opens the page."""

MAX_PLAIN = 2_000_000
"""Characters of diffs and loops in a page as plain text, readable without JavaScript."""


class Sections:
    """Renderer of the page.

    Call `html` and `controls` before `data`, since figures and long texts are numbered as they are rendered.
    """

    def __init__(self, explanation: Explanation, initial_values: Mapping[str, int], with_code: bool) -> None:
        self.explanation, self.initial_values, self.with_code = explanation, initial_values, with_code
        self.figures = Figures(explanation.symbols)
        self.texts: list[dict[str, str]] = []
        self.plain_budget = MAX_PLAIN
        self.kernels = self._ranked()
        self.decisions = group_decisions(explanation.decisions)
        self.group_of = {id(d): number for number, group in enumerate(self.decisions) for d in group.decisions}
        self.kernel_of = {name: k for k, kernel in enumerate(self.kernels) for name in kernel.calls}
        for name, fused in explanation.fused.items():
            if name in self.kernel_of:
                for member in fused.members:
                    self.kernel_of.setdefault(member.name, self.kernel_of[name])

    def _ranked(self) -> list[Kernel]:
        ranked = [kernel for kernel, _, _ in self.explanation.costliest(self.explanation.values(self.initial_values))]
        return ranked + [kernel for kernel in self.explanation.kernels if kernel not in ranked]

    def html(self) -> list[str]:
        """All sections as HTML."""
        return [
            self._summary(),
            section("graph", "Graph", _GRAPH),
            self._passes(),
            self._kernels(),
            self._decisions(),
            self._memory(),
            self._weights(),
            self._about(),
        ]

    def data(self) -> dict[str, Any]:
        """Data of the scripts, as JSON."""
        at = self.explanation.values(self.initial_values)
        return {
            "symbols": [
                {
                    "name": s.name,
                    "value": at[s.var],
                    "lower": s.var.lower or 0,
                    "upper": s.var.upper,
                    "divisor": s.var.divisor,
                }
                for s in self.explanation.symbols
            ],
            "graphs": {
                "imported": self._nodes(self.explanation.imported),
                "compiled": self._nodes(self.explanation.compiled),
            },
            "memory": [self._plan(name) for name in self.explanation.memory_plans],
            "flopsPerByte": FLOPS_PER_BYTE,
            "figures": self.figures.to_json(),
            "texts": self.texts,
        }

    def _nodes(self, graph: Graph) -> list[dict[str, Any]]:
        nodes = graph.to_json()
        for node in nodes:
            if node["kind"] not in ("input", "output") and node["name"] in self.kernel_of:
                node["kernel"] = self.kernel_of[node["name"]]
        return nodes

    def _plan(self, name: str) -> dict[str, Any]:
        plan = self.explanation.memory_plans[name]
        number = self.figures.number
        tensors = [
            {
                "name": t.name,
                "bytes": number(t.nbytes),
                "offset": number(t.offset),
                "first": t.first,
                "last": t.last,
                "inside": t.inside,
                "pauses": getattr(t, "pauses", ()),
                "kernel": self.kernel_of.get(t.name),
            }
            for t in plan.tensors
        ]
        return {"function": name, "steps": plan.steps, "arena": number(plan.arena), "tensors": tensors}

    # figures and texts

    def figure(self, expr: SymExpr, unit: str = "count") -> str:
        """A number that follows the values of the symbols, with its expression as a tooltip."""
        number = self.figures.number(expr)
        value = value_of(expr, self.explanation.values(self.initial_values))
        text = bytes_text(value) if unit == "bytes" else count_text(value)
        return f'<data class="figure" data-figure="{number}" data-unit="{unit}" value="{value}">{text}</data>'

    def amount(self, name: str, expr: SymExpr) -> str:
        """Figure of a decision: its name, its expression and its value."""
        number = self.figure(expr, "bytes" if "byte" in name else "count")
        text = "" if expr.is_const else f"{escape(self.explanation.symbols.text(expr))} = "
        return f"{escape(name)} {text}{number}"

    def expression(self, expr: SymExpr) -> str:
        """The expression as text; a long one collapsed."""
        self.explanation.symbols.add_all(expr)
        return folded(self.explanation.symbols.text(expr))

    def long_text(self, text: str, kind: str, *, is_extra: bool = False) -> str:
        """A block of text: plain within the budget of the page; otherwise, or if `is_extra`, compressed."""
        if not is_extra and len(text) <= self.plain_budget:
            self.plain_budget -= len(text)
            return f'<pre class="{kind}" tabindex="0">{escape(text)}</pre>'
        item = pack_text(text)
        if "text" in item:
            return f'<pre class="{kind}" tabindex="0">{escape(text)}</pre>'
        self.texts.append(item)
        lines = text.count("\n") + 1
        return f'<pre class="{kind}" tabindex="0" data-text="{len(self.texts) - 1}">{lines} lines</pre>'

    # sections

    def _summary(self) -> str:
        explanation, data = self.explanation, self.explanation.data
        at = explanation.values(self.initial_values)
        num_ops = sum(node.kind in ("op", "view", "control") for node in explanation.imported.nodes)
        seconds = sum(s for _, s in explanation.timings)
        cards = [
            (str(num_ops), "operators in the model"),
            (str(sum(bool(k.calls) for k in explanation.kernels)), "kernels"),
            (str(sum(len(k.calls) for k in explanation.kernels)), "calls of kernels in a run"),
            (str(sum(map(len, explanation.library.values()))), "calls of libraries"),
            (f"{seconds:.2f} s", "to compile"),
        ]
        figures = [f"<div><b>{escape(figure)}</b>{escape(meaning)}</div>" for figure, meaning in cards]
        plan = explanation.memory_plans.get("main")
        if plan is not None:
            share = plan.arena_bytes(at) / max(plan.lower_bound(at), 1)
            figures.append(f"<div><b>{self.figure(plan.arena, 'bytes')}</b>of memory for intermediates</div>")
            figures.append(f'<div><b><span data-share="main">{share:.2f}</span></b>times what any plan needs</div>')
        specs = [("in", spec) for spec in data.signature.inputs] + [("out", spec) for spec in data.signature.outputs]
        rows = [[escape(side), f"<code>{escape(str(spec))}</code>"] for side, spec in specs]
        if len(rows) > 12:
            listing = details(f"{len(rows)} inputs and outputs", table(("", "tensor"), rows))
        else:
            listing = table(("", "tensor"), rows)
        return section(
            "summary", "Summary", f'<div class="cards">{"".join(figures)}</div>', listing, self._symbol_table()
        )

    def _symbol_table(self) -> str:
        rows = []
        for symbol in self.explanation.symbols:
            var = symbol.var
            bounds = bound_text(symbol.name, (var.lower, var.upper, var.divisor)) or "any size"
            where = words(symbol.defined, 4) or "by a pass"
            rows.append([f"<code>{escape(symbol.name)}</code>", escape(bounds), escape(where)])
        if not rows:
            return "<h3>Symbols</h3><p>Every size of this model is known when it is compiled.</p>"
        return "<h3>Symbols</h3>" + table(("symbol", "bounds", "defined by"), rows)

    def controls(self) -> str:
        """Inputs for the values of the symbols."""
        at = self.explanation.values(self.initial_values)
        controls = []
        for k, symbol in enumerate(self.explanation.symbols):
            name, var = escape(symbol.name), symbol.var
            max_attribute = "" if var.upper is None else f' max="{var.upper}"'
            limits = f'min="{var.lower or 0}"{max_attribute} step="{var.divisor}"'
            box = f'<input type="number" id="symbol-{k}" data-symbol="{k}" value="{at[var]}" {limits}>'
            slider = f'<input type="range" data-slider="{k}" min="0" max="1000" aria-label="{name}, slider">'
            controls.append(f'<div><label for="symbol-{k}">{name}</label>{box}{slider}</div>')
        if not controls:
            return ""
        return f'<form id="symbols" aria-label="Values of the symbols">{"".join(controls)}</form>'

    def _passes(self) -> str:
        differences = Differences()
        ran = [snapshot.summary() for snapshot in self.explanation.snapshots.taken]
        rows, parts = [], []
        for snapshot, item in zip(self.explanation.snapshots.taken, ran, strict=True):
            text = differences.of(snapshot)
            name = escape(item["name"])
            (b0, b1), (p0, p1) = item["bindings"], item["programs"]
            calls = f"{b0} to {b1}" if b0 != b1 else str(b1)
            programs = f"{p0} to {p1}" if p0 != p1 else str(p1)
            link = f'<a href="#pass-{name}">{name}</a>' if text else f'<span id="pass-{name}">{name}</span>'
            decided = self._decision_link(item["name"])
            rows.append(
                [link, escape(item["stage"]), f"{item['ms']:.1f}", calls, programs, decided, escape(item["doc"])]
            )
            if text:
                changed = sum(line[:1] in ("+", "-") for line in text.split("\n"))
                head = f"{name}: {item['ms']:.1f} ms, {changed} lines changed in {len(item['changed'])} definitions"
                body = self.long_text(text, "diff")
                parts.append(details(head, body, f'id="pass-{name}" data-find="{name}" data-kind="pass"'))
        passes = {item["name"] for item in ran}
        for name, seconds in self.explanation.timings:
            if name not in passes:
                rows.append([escape(name), "", f"{seconds * 1e3:.1f}", "", "", "", "not a pass"])
        heads = ("pass", "stage after it", "ms", "bindings", "programs", "decisions", "what it does")
        note = '<p class="hint">Below: the lines that each pass changed; passes that changed nothing have none.</p>'
        return section("passes", "Passes", table(heads, rows, numbers=(2, 3, 4, 5)), note, *parts)

    def _decision_link(self, step: str) -> str:
        """Number of decisions of a pass, with a link to them."""
        groups = [(k, group) for k, group in enumerate(self.decisions) if group.step == step]
        if not groups:
            return ""
        count = sum(len(group.decisions) for _, group in groups)
        return f'<a href="#decision-{groups[0][0]}">{count}</a>'

    def _kernels(self) -> str:
        decisions_of = decisions_by_kernel(self.explanation.decisions, self.kernel_of)
        heads = ("kernel", "made of", "calls", "FLOPs", "bytes read", "bytes written", "FLOP/byte", "cost")
        hint = (
            f"Of all calls of a run together, at the symbols' values. Cost: the greater of the bytes and of FLOPs / "
            f"{FLOPS_PER_BYTE}, as a share of all. A click on a heading sorts. Measured times: relaxlite profile."
        )
        costs = table(heads, self._cost_rows(), numbers=range(2, 8), attributes='id="kernel-table"', row_name="kernel")
        num_omitted, parts = 0, []
        code_budget = MAX_CODE_BYTES
        codes = codes_of(self.kernels, self.explanation.target) if self.with_code else iter(())
        for k, kernel in enumerate(self.kernels):
            code = next(codes, None) if code_budget > 0 else None
            if code is not None:
                code_budget -= sum(packed_size(pack_text(t)) for t in (code.llvm, code.assembly))
            num_omitted += self.with_code and code is None
            parts.append(self._kernel(k, kernel, code, decisions_of.get(k, [])))
        if num_omitted:
            parts.append(
                f'<p class="hint">LLVM IR and assembly of the {num_omitted} cheapest kernels are left out: '
                f"those above fill the {bytes_text(MAX_CODE_BYTES)} that a page keeps for them.</p>"
            )
        return section("kernels", "Kernels", f'<p class="hint">{escape(hint)}</p>', costs, *parts, self._library())

    def _library(self) -> str:
        rows = [
            [f"<code>{escape(symbol)}</code>", str(len(names)), escape(words(names, 20))]
            for symbol, names in self.explanation.library.items()
        ]
        if not rows:
            return ""
        return "<h3>Library calls</h3>" + table(("routine", "calls", "results"), rows, numbers=(1,))

    def _cost_rows(self) -> list[list[str]]:
        at = self.explanation.values(self.initial_values)
        work = {kernel: (flops, nbytes) for kernel, flops, nbytes in self.explanation.costliest(at)}
        total = sum(modelled_work(*amounts) for amounts in work.values()) or 1
        rows = []
        for k, kernel in enumerate(self.kernels):
            ops = escape(words(kernel.ops, 6)) or "sizes, computed when it runs"
            row = [f'<a href="#kernel-{k}">{escape(kernel.name)}</a>', ops, str(len(kernel.calls))]
            if (cost := kernel.cost) is not None:
                flops, nbytes = work[kernel]
                ratio = f"{flops / nbytes:.2f}" if nbytes else "-"
                row += [
                    ("" if cost.is_bound else "at least ") + self.figure(cost.flops),
                    self.figure(cost.bytes_read, "bytes"),
                    self.figure(cost.bytes_written, "bytes"),
                    f'<span data-intensity="{k}">{ratio}</span>',
                    f'<span data-cost="{k}">{100 * modelled_work(flops, nbytes) / total:.1f} %</span>',
                ]
            rows.append(row + ["-"] * (8 - len(row)))
        return rows

    def _kernel(self, k: int, kernel: Kernel, code: Code | None, notes: list[Decision]) -> str:
        name = escape(kernel.name)
        body = [f"<p><code>{escape(kernel.signature)}</code></p>"]
        if (cost := kernel.cost) is not None:
            amounts = {"FLOPs": cost.flops, "bytes read": cost.bytes_read, "bytes written": cost.bytes_written}
            rows = [[what, self.expression(amount)] for what, amount in amounts.items()]
            flops, moved = map(self.explanation.symbols.text, (cost.flops, cost.bytes_read + cost.bytes_written))
            rows.append(["FLOP/byte", folded(f"({flops}) / ({moved})")])
            body.append(table(("of all calls", "in symbols"), rows))
        if kernel.calls:
            shown = ", ".join(f"<code>{escape(c)}</code>" for c in kernel.calls[:8])
            more = f" and {len(kernel.calls) - 8} more" if len(kernel.calls) > 8 else ""
            buttons = f'<button type="button" data-show="{k}">Show in the graph</button>'
            if any(
                self.kernel_of.get(t.name) == k for plan in self.explanation.memory_plans.values() for t in plan.tensors
            ):
                buttons += f' <button type="button" data-tensors="{k}">Show in memory</button>'
            body.append(f"<p>Computes {shown}{more}. {buttons}</p>")
        body.append(self._members(kernel))
        if notes:
            body.append("<h3>Decisions</h3>" + group_items(group_decisions(notes), self.amount, self._anchor))
        steps = "\n".join(kernel.steps) or "as it was written"
        body.append(f'<h3>Schedule</h3><pre tabindex="0">{escape(steps)}</pre>')
        loops = code.loops if code else print_program(kernel.name, kernel.program)
        body.append(details("Loops after scheduling", self.long_text(loops, "code")))
        if code:
            body.append(details("LLVM IR", self.long_text(code.llvm, "code", is_extra=True)))
            body.append(details("Assembly", self.long_text(code.assembly, "code", is_extra=True)))
        head = f"<b>{name}</b> {escape(words(kernel.ops, 8))}"
        return details(head, "".join(body), f'id="kernel-{k}" data-find="{name}" data-kind="kernel"')

    def _members(self, kernel: Kernel) -> str:
        fused = next((self.explanation.fused[c] for c in kernel.calls if c in self.explanation.fused), None)
        if fused is None:
            return ""
        rows = [[f"<code>{escape(m.name)}</code>", escape(m.what), escape(m.loc or "")] for m in fused.members]
        return f"<h3>Fused of {len(rows)} calls</h3>" + table(("result", "op", "source"), rows)

    def _anchor(self, decision: Decision) -> str:
        """Anchor of the group of a decision."""
        return f"decision-{self.group_of[id(decision)]}"

    def _decisions(self) -> str:
        if not self.decisions:
            return section("decisions", "Decisions", "<p>No pass noted a decision.</p>")
        parts, step = [], ""
        for number, group in enumerate(self.decisions):
            if group.step != step:
                step = group.step
                parts.append(f"<h3>{escape(step)}</h3>")
            count = f" ({len(group.decisions)} times)" if len(group.decisions) > 1 else ""
            head = f"{verdict(group.taken)} {escape(group.reason)}{count}"
            name = escape(f"{step}: {group.reason}")
            items = decision_items(group.decisions, self.amount, self.kernel_of, limit=200)
            parts.append(details(head, items, f'id="decision-{number}" data-find="{name}" data-kind="decision"'))
        note = '<p class="hint">What passes did or did not do, and why. Amounts follow the symbols.</p>'
        return section("decisions", "Decisions", note, *parts)

    def _memory(self) -> str:
        explanation, at = self.explanation, self.explanation.values(self.initial_values)
        rows = []
        for name, plan in explanation.memory_plans.items():
            lower = plan.lower_bound(at)
            rows.append(
                [
                    escape(name),
                    str(len(plan.tensors)),
                    self.figure(plan.arena, "bytes"),
                    f'<span data-lower="{escape(name)}">{bytes_text(lower)}</span>',
                    f'<span data-share="{escape(name)}">{plan.arena_bytes(at) / max(lower, 1):.2f}</span>',
                    self.expression(plan.arena),
                ]
            )
        if not rows:
            return section("memory", "Memory", "<p>Nothing is planned: there are no intermediates in an arena.</p>")
        heads = ("function", "tensors", "arena", "lower bound", "arena / bound", "arena in symbols")
        names = "".join(f"<option>{escape(name)}</option>" for name in explanation.memory_plans)
        chosen = f'<label>Function <select id="plan">{names}</select></label>' if len(rows) > 1 else ""
        return section("memory", "Memory", table(heads, rows, numbers=(1, 2, 3, 4)), _MEMORY.replace("@", chosen))

    def _weights(self) -> str:
        weights = sorted(self.explanation.weights, key=lambda c: -c.value.nbytes)
        total = sum(c.value.nbytes for c in weights)
        rows = [
            [
                f"<code>{escape(c.name or '-')}</code>",
                f"{c.ty.dtype}[{', '.join(map(str, c.value.shape))}]",
                bytes_text(c.value.nbytes),
            ]
            for c in weights[:200]
        ]
        if len(weights) > len(rows):
            rows.append([f"and {len(weights) - len(rows)} smaller ones", "", ""])
        summary = f"<p>{len(weights)} tensors of more than a few elements, {bytes_text(total)}.</p>"
        listing = details("All of them, the largest first", table(("name", "type", "size"), rows, numbers=(2,)))
        return section("weights", "Weights", summary, listing if rows else "")

    def _about(self) -> str:
        rows = [[escape(what), escape(version)] for what, version in self.explanation.versions.items()]
        provenance = self.explanation.data.metadata.provenance
        for key in ("producer", "opset", "assumptions"):
            if provenance.get(key):
                value = provenance[key]
                text = "; ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
                rows.append([f"model's {key}", escape(text)])
        host = self.explanation.data.host
        calls = f"native, {bytes_text(len(host.object_code))}" if host.object_code else f"interpreted: {host.reason}"
        rows.append(["calls", escape(calls)])
        return section("about", "About", table(("what", "version"), rows))


_GRAPH = """<div class="tools"><label>Graph <select id="which"><option value="imported">as imported</option>
<option value="compiled" selected>as compiled</option></select></label>
<label>Show <select id="level"></select></label>
<span><button type="button" id="zoom-out" aria-label="Zoom out">-</button>
<button type="button" id="zoom-in" aria-label="Zoom in">+</button>
<button type="button" id="zoom-width">Width</button><button type="button" id="zoom-all">All</button></span>
<label><input type="checkbox" id="heat" checked> shade kernels by cost</label>
<span id="graph-size" class="hint"></span></div>
<div class="drawing"><svg id="drawing" tabindex="0" role="group"
aria-label="The graph; the sections below list what it shows"></svg>
<aside id="node" aria-live="polite"><p class="hint">Click a node to see what it is. Double click opens or closes a
group. Drag moves; Ctrl and wheel, + and - zoom. Once the drawing was clicked, wheel and arrow keys move it, until
Escape.</p></aside></div>"""

_MEMORY = """<div class="tools">@<span><button type="button" id="steps-out" aria-label="More steps">-</button>
<button type="button" id="steps-in" aria-label="Fewer steps">+</button>
<button type="button" id="steps-all">All steps</button></span><span id="memory-at" class="hint">&nbsp;</span></div>
<svg id="timeline" tabindex="0" role="group"
aria-label="Tensors of the arena: steps to the right, offsets upwards"></svg>
<p class="hint">Each rectangle is a tensor: from the step that makes it to its last use, over the bytes that it takes.
The line is the sum of what is alive; no plan can take less than its highest point (dashed). A click on a tensor leads
to its kernel; Ctrl and wheel, + and - zoom, dragging moves.</p>"""
