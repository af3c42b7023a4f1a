"""Self-contained HTML page of a profile: roofline plot (SVG), sortable table, time line (canvas)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT = 900, 460  # viewBox of the roofline plot
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 20, 16, 44  # margins
_GOLDEN_ANGLE = 137.508  # hue step in degrees, so that neighbouring kernels differ

Json = Mapping[str, Any]
Event = tuple[str, float, float]  # kernel, start and duration in microseconds


def page(profile: Json, timeline: Sequence[Event], remarks: Sequence[str]) -> str:
    """Text of the page. `profile`: as by `Profile.to_json`; `timeline`: calls of one run; `remarks`: footnotes."""
    kernels = profile["kernels"]
    numbers = {kernel["kernel"]: k for k, kernel in enumerate(kernels)}
    calls = [[numbers[name], round(start, 3), round(us, 3)] for name, start, us in timeline if name in numbers]
    names = [kernel["kernel"] for kernel in kernels]
    data = json.dumps({"names": names, "calls": calls}).replace("</", "<\\/")
    inputs = ", ".join(f"{escape(name)}: {escape(shape)}" for name, shape in profile["inputs"].items())
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>relaxlite profile</title><style>{_STYLE}</style></head><body>",
            f"<h1>Where the time goes</h1><p>{inputs}</p>",
            f'<div class="cards">{"".join(_cards(profile))}</div>',
            "<h2>Roofline</h2>",
            _roofline(profile),
            '<h2>Kernels</h2><div class="wide"><table id="kernels">',
            _table(kernels, profile["run_us"]),
            "</table></div>",
            "<h2>Time line</h2>",
            '<p class="hint">Wheel: zoom. Drag: move. Double click: all. A click on a row marks its kernel.</p>',
            '<canvas id="timeline" role="img" aria-label="kernel calls over time"></canvas><p id="at">&nbsp;</p>',
            *(f'<p class="hint">{escape(remark)}</p>' for remark in remarks),
            f'<script type="application/json" id="data">{data}</script>',
            f"<script>{_SCRIPT}</script></body></html>\n",
        ]
    )


def colour(number: int) -> str:
    """CSS colour of a kernel, for light and dark pages."""
    return f"hsl({number * _GOLDEN_ANGLE % 360:.0f} 65% 50%)"


def _cards(profile: Json) -> Iterator[str]:
    run, least = profile["run_us"], profile["least_us"]
    threads = profile["threads"]
    facts = [
        (_time(run), "one run"),
        (f"{max(0.0, 1 - profile['outside_kernels_us'] / max(run, 1e-9)):.0%}", "of it in kernels"),
        (str(threads), "thread" if threads == 1 else "threads"),
    ]
    if least is not None:
        facts += [(_time(least), "least time of the kernels, by the roofline")]
    if flops := sum(kernel["flops"] or 0 for kernel in profile["kernels"]):
        facts += [(f"{flops / run / 1e3:.1f}", "GFLOP/s overall")]
    for figure, meaning in facts:
        yield f"<div><b>{escape(figure)}</b>{escape(meaning)}</div>"


def _time(us: float) -> str:
    return f"{us / 1e3:.2f} ms" if us >= 1000 else f"{us:.1f} us"


# The table

_COLUMNS = (
    ("us", "us", "{:.1f}"),
    ("share", "share", "{:.1%}"),
    ("calls", "calls", "{}"),
    ("bytes", "bytes", "{:,.0f}"),
    ("flops", "FLOPs", "{:,.0f}"),
    ("intensity", "FLOP/byte", "{:.2f}"),
    ("gflops", "GFLOP/s", "{:.1f}"),
    ("gb_per_s", "GB/s", "{:.1f}"),
    ("roofline", "of roof", "{:.0%}"),
    ("limit", "limit", "{}"),
)


def _table(kernels: Sequence[Json], run_us: float) -> str:
    heads = ["<th>kernel</th>", *(f"<th>{escape(title)}</th>" for _, title, _ in _COLUMNS)]
    rows = []
    for number, kernel in enumerate(kernels):
        name = escape(kernel["kernel"])
        cells = [f'<td><i style="background:{colour(number)}"></i>{name}</td>']
        for key, _, form in _COLUMNS:
            value = kernel[key]
            text = "-" if value is None else form.format(value)
            mark = "~" if key == "flops" and not kernel["is_bound"] else ""
            cells.append(f'<td data-v="{escape(str(-1 if value is None else value))}">{mark}{escape(text)}</td>')
        rows.append(f'<tr data-k="{number}">{"".join(cells)}</tr>')
    return f"<thead><tr>{''.join(heads)}</tr></thead><tbody>{''.join(rows)}</tbody>"


# The roofline plot


class _Axes:
    """Log-log axes: x in FLOPs per byte, y in GFLOP/s."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self.left, self.right = math.log10(min(xs) / 1.5), math.log10(max(xs) * 1.5)
        self.low, self.high = math.log10(min(ys) / 1.5), math.log10(max(ys) * 1.8)

    def x(self, value: float) -> float:
        share = (math.log10(value) - self.left) / (self.right - self.left)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def grid(self) -> Iterator[str]:
        top, bottom = self.y(10**self.high), self.y(10**self.low)
        left, right = self.x(10**self.left), self.x(10**self.right)
        for power in range(math.ceil(self.left), math.floor(self.right) + 1):
            at = self.x(10.0**power)
            yield _line(at, top, at, bottom, "grid")
            yield _text(at, bottom + 18, f"{10.0**power:g}", "middle")
        for power in range(math.ceil(self.low), math.floor(self.high) + 1):
            at = self.y(10.0**power)
            yield _line(left, at, right, at, "grid")
            yield _text(left - 8, at + 4, f"{10.0**power:g}", "end")
        yield _text((left + right) / 2, _HEIGHT - 6, "FLOPs per byte", "middle")
        middle = (top + bottom) / 2
        yield f'<text transform="translate(14 {middle:.1f}) rotate(-90)" text-anchor="middle">GFLOP/s</text>'


def _roofline(profile: Json) -> str:
    points = [(k, kernel) for k, kernel in enumerate(profile["kernels"]) if kernel["intensity"] and kernel["gflops"]]
    machine = profile["machine"]
    if not points and machine is None:
        return '<p class="hint">No kernel states its arithmetic, so there is nothing to plot.</p>'
    xs = [kernel["intensity"] for _, kernel in points] + [0.1, 100.0]
    ys = [max(kernel["gflops"], 1e-3) for _, kernel in points] + [1.0, 100.0]
    ys += [peak for peak in machine["gflops"].values()] if machine else []
    axes = _Axes(xs, ys)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="roofline">', *axes.grid()]
    if machine:
        parts += _ceilings(axes, machine)
    for number, kernel in sorted(points, key=lambda point: -point[1]["share"]):
        parts.append(_point(axes, number, kernel))
    idle = len(profile["kernels"]) - len(points)
    note = f" {idle} kernels that compute nothing, or whose work is not known, are left out." if idle else ""
    machine_note = "" if machine else " The limits of the machine were not given."
    caption = f"Each point is a kernel, its area the share of the run.{note}{machine_note}"
    return "\n".join([*parts, "</svg>", f'<p class="hint">{escape(caption)}</p>'])


def _ceilings(axes: _Axes, machine: Json) -> Iterator[str]:
    """Lines of the peak per thread count, and of each memory level's bandwidth at the highest thread count."""
    counts = sorted(map(int, machine["gflops"]))
    left, right, bottom = 10.0**axes.left, 10.0**axes.right, 10.0**axes.low
    for count in counts:
        peak = machine["gflops"][str(count)]
        yield _line(axes.x(left), axes.y(peak), axes.x(right), axes.y(peak), "peak")
        label = f"{peak:.0f} GFLOP/s, {count} thread{'s' if count > 1 else ''}"
        yield _text(axes.x(right) - 4, axes.y(peak) + (-6 if count == counts[-1] else 14), label, "end")
    peak = machine["gflops"][str(counts[-1])]
    for number, level in enumerate(machine["levels"]):
        speed = level["gb_per_s"][max(level["gb_per_s"], key=int)]
        start, end = max(left, bottom / speed), min(peak / speed, right)
        if start < end:
            line = axes.x(start), axes.y(start * speed), axes.x(end), axes.y(end * speed)
            yield _line(*line, "level")
            is_above = 2 * number < len(machine["levels"])  # labels of outer levels are below their lines
            yield _along(*line, 0.02 + 0.2 * number, f"{level['name']} {speed:.0f} GB/s", -6 if is_above else 14)


def _along(x1: float, y1: float, x2: float, y2: float, share: float, text: str, down: int) -> str:
    """Text along a line, starting at the fraction `share` of it."""
    x, y = x1 + (x2 - x1) * share, y1 + (y2 - y1) * share
    angle = math.degrees(math.atan2(y2 - y1, x2 - x1))
    return f'<text transform="translate({x:.1f} {y:.1f}) rotate({angle:.1f})" dy="{down}">{escape(text)}</text>'


def _point(axes: _Axes, number: int, kernel: Json) -> str:
    x, y = axes.x(kernel["intensity"]), axes.y(max(kernel["gflops"], 1e-3))
    radius = 3 + 16 * math.sqrt(max(kernel["share"], 0.0))
    roof = "" if kernel["roofline"] is None else f", {kernel['roofline']:.0%} of the roof ({kernel['limit']})"
    title = f"{kernel['kernel']}: {kernel['share']:.1%} of the run, {kernel['gflops']:.1f} GFLOP/s{roof}"
    return (
        f'<circle data-k="{number}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{colour(number)}">'
        f"<title>{escape(title)}</title></circle>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; --paper: #fff; --mark: #ffd33d55; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9198a1; --line: #30363d; --paper: #0d1117; --mark: #bb800955; }
}
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1100px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.hint, .cards div { color: var(--soft); font-size: .85rem; }
.cards { display: flex; flex-wrap: wrap; gap: 2rem; }
.cards b { display: block; color: var(--ink); font-size: 1.3rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; width: 100%; }
th { text-align: right; cursor: pointer; white-space: nowrap; }
th, td { padding: .25rem .5rem; border-bottom: 1px solid var(--line); }
td { text-align: right; } th:first-child, td:first-child { text-align: left; }
td:first-child { max-width: 26rem; overflow-wrap: anywhere; }
td i { display: inline-block; width: .7rem; height: .7rem; border-radius: 50%; margin-right: .5rem; }
tr.on { background: var(--mark); } tbody tr { cursor: pointer; }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: var(--soft); }
line.grid { stroke: var(--line); } line.peak { stroke: var(--ink); stroke-width: 1.5; }
line.level { stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 6 4; }
circle { fill-opacity: .75; stroke: var(--paper); } circle.on { stroke: var(--ink); stroke-width: 3; fill-opacity: 1; }
canvas { width: 100%; height: 110px; border: 1px solid var(--line); touch-action: none; }
#at { font-size: .85rem; min-height: 1.5em; }
"""

_SCRIPT = """
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const hue = k => `hsl(${(k * 137.508) % 360} 65% 50%)`;
let marked = -1;

const body = document.querySelector("#kernels tbody");
document.querySelectorAll("#kernels th").forEach((head, column) => head.onclick = () => {
  const down = head.dataset.order !== "down";
  head.dataset.order = down ? "down" : "up";
  const key = row => column ? row.cells[column].dataset.v : row.cells[0].textContent;
  const compare = (a, b) => isNaN(+a) || isNaN(+b) ? a.localeCompare(b) : a - b;
  const rows = [...body.rows].sort((a, b) => compare(key(a), key(b)) * (down ? -1 : 1));
  body.append(...rows);
});
const mark = k => {
  marked = marked === k ? -1 : k;
  document.querySelectorAll("[data-k]").forEach(e => e.classList.toggle("on", +e.dataset.k === marked));
  draw();
};
document.querySelectorAll("[data-k]").forEach(e => e.onclick = () => mark(+e.dataset.k));

const canvas = document.getElementById("timeline"), pen = canvas.getContext("2d");
const end = data.calls.reduce((most, call) => Math.max(most, call[1] + call[2]), 1);
let from = 0, to = end;
const place = us => (us - from) / (to - from) * canvas.clientWidth;
function draw() {
  const scale = window.devicePixelRatio || 1, wide = canvas.clientWidth, high = canvas.clientHeight;
  canvas.width = wide * scale; canvas.height = high * scale; pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.font = "11px system-ui";
  for (const [k, start, us] of data.calls) {
    const x = place(start), w = Math.max(place(start + us) - x, 0.6);
    if (x > wide || x + w < 0) continue;
    pen.globalAlpha = marked < 0 || marked === k ? 1 : 0.2;
    pen.fillStyle = hue(k); pen.fillRect(x, 22, w, high - 30);
    if (w > 60) { pen.fillStyle = "#fff"; pen.fillText(data.names[k], Math.max(x, 0) + 4, high / 2 + 8, w - 8); }
  }
  pen.globalAlpha = 1; pen.fillStyle = getComputedStyle(document.body).color;
  const step = 10 ** Math.floor(Math.log10((to - from) / 3));
  for (let us = Math.ceil(from / step) * step; us <= to; us += step)
    pen.fillText(us >= 1000 ? +(us / 1000).toPrecision(6) + " ms" : +us.toPrecision(6) + " us", place(us), 13);
}
canvas.onwheel = e => {
  e.preventDefault();
  const at = from + e.offsetX / canvas.clientWidth * (to - from), zoom = e.deltaY > 0 ? 1.25 : 0.8;
  from = Math.max(at - (at - from) * zoom, 0); to = Math.min(at + (to - at) * zoom, end); draw();
};
canvas.ondblclick = () => { from = 0; to = end; draw(); };
canvas.onpointermove = e => {
  const us = from + e.offsetX / canvas.clientWidth * (to - from);
  if (e.buttons) {
    const by = Math.min(Math.max(-e.movementX / canvas.clientWidth * (to - from), -from), end - to);
    from += by; to += by; draw();
  }
  const call = data.calls.find(c => c[1] <= us && us <= c[1] + c[2]);
  const text = call ? `${data.names[call[0]]}: ${call[2]} us at ${call[1]} us` : "\\u00a0";
  document.getElementById("at").textContent = text;
};
window.onresize = draw;
draw();
"""
