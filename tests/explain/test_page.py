"""The page of `relaxlite explain -o`: what it holds as a file, and what it does in a real, headless browser."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import relaxlite as rl
from bench.decoder import DecoderConfig, build_decoder
from relaxlite.explain import Explanation, explain, sections
from relaxlite.explain.kernels import modelled_work
from relaxlite.explain.markup import bytes_text, count_text
from relaxlite.explain.page import page
from relaxlite.ir.module import IRModule
from relaxlite.ir.symbolic import evaluate
from relaxlite.passes.context import Decision
from tests.explain.test_explanation import SMALL, branches
from tests.support.browser import Browser, browser, need_browser

SIZES = {"batch": 2, "seq": 8, "past": 3}
NAME = 'a <b> & "c" </script>'


@pytest.fixture(scope="module")
def decoder() -> Explanation:
    return explain(build_decoder(SMALL), name=NAME)


@pytest.fixture(scope="module")
def text(decoder: Explanation) -> str:
    return page(decoder, SIZES)


class Elements(HTMLParser):
    """Every element with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def values(self, name: str) -> list[str]:
        return [value for _, attrs in self.found if (value := attrs.get(name)) is not None]


def test_the_page_needs_nothing_else(text: str) -> None:
    elements = Elements(text)
    assert not [v for name in ("src", "action", "background", "data") for v in elements.values(name)]
    assert all(link.startswith("#") for link in elements.values("href"))
    assert not [tag for tag, _ in elements.found if tag in ("link", "img", "iframe", "object", "base")]
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style and not re.search(r"@import|url\(", style[1])


def test_the_policy_allows_its_own_style_and_script_and_no_connection(text: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy and "default-src 'none'" in policy[1] and "unsafe" not in policy[1]
    for kind in ("style", "script"):
        body = re.search(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        assert body
        digest = base64.b64encode(hashlib.sha256(body[1].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy[1]
    assert not Elements(text).values("style"), "inline styles would be refused"


def test_every_link_leads_to_a_place_and_no_place_is_there_twice(text: str) -> None:
    elements = Elements(text)
    places = elements.values("id")
    assert len(places) == len(set(places))
    assert {link[1:] for link in elements.values("href")} <= set(places)
    assert {at for label in ("for", "aria-labelledby", "aria-controls") for at in elements.values(label)} <= set(places)


def test_text_stands_in_the_page_itself(text: str, decoder: Explanation) -> None:
    """So that it reads without JavaScript."""
    body = text.partition('<script type="application/json"')[0]
    for kernel in decoder.kernels:
        assert f"<b>{kernel.name}</b>" in body
    for snapshot in decoder.snapshots.taken:
        assert f'id="pass-{snapshot.step.name}"' in body
    plan = decoder.memory_plans["main"]
    assert bytes_text(plan.arena_bytes(decoder.values(SIZES))) in body
    share = re.search(r'data-cost="0">([\d.]+) %', body)
    assert share and float(share[1]) > 10
    assert "fuse_ops" in body and "both sides hold a reduction" in body


def test_texts_beyond_the_limit_are_packed(decoder: Explanation, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sections, "MAX_PLAIN", 0)
    legalize = r'id="pass-legalize"[^>]*><summary>[^<]*</summary><pre class="diff" tabindex="0"( data-text="\d+")?>'
    assert (plain := re.search(legalize, text)) and plain[1] is None
    assert (less := re.search(legalize, page(decoder, code=False))) and less[1] is not None


def test_names_are_escaped(text: str) -> None:
    assert NAME not in text and "a &lt;b&gt; &amp;" in text
    assert text.count("</script>") == 2


def test_code_beyond_the_limit_is_left_out_and_the_page_says_so(
    decoder: Explanation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sections, "MAX_CODE_BYTES", 1)
    limited, bare = page(decoder), page(decoder, code=False)
    assert f"assembly of the {len(decoder.kernels) - 1} cheapest kernels are left out" in limited
    assert limited.count("<summary>Assembly</summary>") == 1
    assert "Assembly" not in bare and "left out" not in bare and "Loops after scheduling" in bare


def test_a_model_without_symbols_or_plan_has_a_page(tmp_path: Path) -> None:
    config = DecoderConfig(layers=1, hidden=16, heads=2, kv_heads=1, intermediate=16, vocab=8)
    found = explain(build_decoder(config))
    found.memory_plans, found.decisions = {}, []
    assert "No pass noted a decision" in page(found, code=False) and "Nothing is planned" in page(found, code=False)


# In a browser


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    need_browser()
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def file(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(text, "utf-8")
    return path


@pytest.fixture
def opened(window: Browser, file: Path) -> Iterator[Browser]:
    """The decoder's page; whatever a test does, the console stays empty and nothing is requested."""
    window.open(file)
    yield window
    assert window.problems() == []


def test_what_a_page_should_not_do_is_noticed(window: Browser, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text("<script>console.error('oops'); fetch('http://127.0.0.1:9/x').catch(() => 0)</script>", "utf-8")
    window.open(bad)
    window.run("return fetch('http://127.0.0.1:9/y').catch(() => 0)")
    problems = window.problems()
    assert any("oops" in p for p in problems) and "http://127.0.0.1:9/x" in problems


def test_the_policy_is_enforced(opened: Browser) -> None:
    """The page cannot reach anything, even if its script wanted to."""
    refused = "return fetch('data:text/plain,x').then(() => 'reached', () => 'refused')"
    assert opened.run(refused) == "refused"
    assert any("Content Security Policy" in problem for problem in opened.problems())


BOXES = 'return [...document.querySelectorAll("#drawing .box")].length'
SHOW_LEVEL = """
const which = document.getElementById("which"), level = document.getElementById("level");
which.value = arguments[0];
which.dispatchEvent(new Event("change"));
const option = [...level.options].find(o => o.text === arguments[1]);
level.value = option.value;
level.dispatchEvent(new Event("change"));
"""


def test_the_graph_as_compiled_has_a_box_for_each_kernel(opened: Browser, decoder: Explanation) -> None:
    nodes = decoder.compiled.nodes
    opened.run(SHOW_LEVEL, "compiled", "one box per kernel")
    assert opened.run(BOXES) == sum(node.inside is None for node in nodes)
    opened.run(SHOW_LEVEL, "compiled", "every operator")
    parents = {node.inside for node in nodes if node.inside is not None}
    assert parents and opened.run(BOXES) == len(nodes) - len(parents), "the calls stand in the place of their kernels"


def test_the_graph_as_imported_has_a_box_for_each_operator(opened: Browser, decoder: Explanation) -> None:
    opened.run(SHOW_LEVEL, "imported", "every operator")
    assert opened.run(BOXES) == len(decoder.imported.nodes)


def test_there_is_an_edge_for_each_pair_of_boxes_of_which_one_reads_the_other(
    opened: Browser, decoder: Explanation
) -> None:
    count = 'return document.querySelectorAll("#drawing .edge").length'
    opened.run(SHOW_LEVEL, "imported", "every operator")
    assert opened.run(count) == sum(len(set(node.reads)) for node in decoder.imported.nodes)
    nodes = decoder.compiled.nodes
    opened.run(SHOW_LEVEL, "compiled", "one box per kernel")
    assert opened.run(count) == sum(len(set(node.reads)) for node in nodes if node.inside is None)
    last = {node.inside: k for k, node in enumerate(nodes) if node.inside is not None}
    pairs = {(last.get(r, r), k) for k, node in enumerate(nodes) if k not in last for r in node.reads}
    opened.run(SHOW_LEVEL, "compiled", "every operator")
    assert opened.run(count) == len(pairs)


def test_boxes_do_not_overlap(opened: Browser) -> None:
    for graph in ("compiled", "imported"):
        opened.run(SHOW_LEVEL, graph, "every operator")
        boxes = opened.run(
            'return [...document.querySelectorAll("#drawing .box rect")].map(r => '
            '["x", "y", "width"].map(a => +r.getAttribute(a)))'
        )
        layers: dict[float, list[tuple[float, float]]] = {}
        for x, y, width in boxes:
            layers.setdefault(y, []).append((x, width))
        for layer in layers.values():
            layer.sort()
            assert all(x + width <= other + 0.2 for (x, width), (other, _) in itertools.pairwise(layer))


def test_a_double_click_opens_a_kernel_and_a_button_closes_it(opened: Browser, decoder: Explanation) -> None:
    opened.run(SHOW_LEVEL, "compiled", "one box per kernel")
    before = opened.run(BOXES)
    name = opened.run(
        'const box = document.querySelector("#drawing .box.kernel.group");'
        'box.dispatchEvent(new MouseEvent("click", {bubbles: true}));'
        'const name = document.querySelector("#node dd").textContent;'
        'box.dispatchEvent(new MouseEvent("dblclick", {bubbles: true})); return name'
    )
    members = decoder.fused[name].members
    assert opened.run(BOXES) == before + len(members) - 1
    shown = opened.run('return [...document.querySelectorAll("#drawing .box.op")].map(b => b.children[1].textContent)')
    assert Counter(m.what for m in members) <= Counter(shown), "the calls stand in the kernel's place"
    opened.run('[...document.querySelectorAll("#node button")].find(b => b.textContent === "Close its group").click()')
    assert opened.run(BOXES) == before


def test_the_dearest_kernel_is_shaded_most(opened: Browser, decoder: Explanation) -> None:
    opened.run(SHOW_LEVEL, "compiled", "one box per kernel")
    shades = opened.run(
        'return [...document.querySelectorAll("#drawing .box.kernel")].map(b => '
        "[b.querySelector('title').textContent.split('\\n')[0], +(/ (\\d+)%/.exec(b.firstChild.style.fill)?.[1])])"
    )
    ranked = decoder.costliest(decoder.values(SIZES))
    work = {name: modelled_work(f, b) / len(k.calls) for k, f, b in ranked for name in k.calls}
    shaded = sorted((-work[name], -share) for name, share in shades if name in work)
    assert [share for _, share in shaded] == sorted(share for _, share in shaded)
    assert shaded[0][1] == -85 and shaded[-1][1] > -85
    opened.run('document.getElementById("heat").click()')
    assert opened.run('return document.querySelector("#drawing .box.kernel rect").style.fill') == ""


def test_a_chosen_node_says_what_it_is_and_leads_to_its_kernel(opened: Browser) -> None:
    said = opened.run(
        'document.querySelector("#drawing .box.kernel").dispatchEvent(new MouseEvent("click", {bubbles: true}));'
        'document.querySelector("#node a").click(); return document.getElementById("node").textContent'
    )
    for what in ("name", "type", "kernel", "read by"):
        assert what in said
    opened_kernel = opened.run('return document.querySelector("details.found").id')
    assert re.fullmatch(r"kernel-\d+", opened_kernel)
    opened.run('document.querySelector("[data-show]").click()')
    assert opened.run('return document.querySelectorAll("#drawing .chosen").length') == 1


def test_moving_a_symbol_changes_every_figure_to_what_python_computes(opened: Browser, decoder: Explanation) -> None:
    for sizes in ({"batch": 1, "seq": 1, "past": 0}, {"batch": 8, "seq": 61, "past": 7}, SIZES):
        for name, size in sizes.items():
            opened.run(
                'const labels = [...document.querySelectorAll("#symbols label")];'
                "const box = labels.find(l => l.textContent === arguments[0]).control;"
                "box.value = arguments[1]; box.dispatchEvent(new Event('input'))",
                name,
                size,
            )
        at = decoder.values(sizes)
        plan = decoder.memory_plans["main"]
        drawn = opened.run(
            'return [+document.getElementById("timeline").dataset.arena, '
            '+document.querySelector("[data-lower=main]").dataset.bytes, '
            'document.querySelector("#memory data.figure").textContent, '
            'document.querySelector("[data-lower=main]").textContent, '
            'document.querySelector("#memory [data-share]").textContent]'
        )
        arena, lower = plan.arena_bytes(at), plan.lower_bound(at)
        assert drawn == [arena, lower, bytes_text(arena), bytes_text(lower), f"{arena / lower:.2f}"]
        tensors = opened.run(
            'return [...document.querySelectorAll("#timeline rect")].map(r => [+r.dataset.bytes, +r.dataset.offset])'
        )
        assert tensors == [[evaluate(t.nbytes, at), evaluate(t.offset, at)] for t in plan.tensors]
        kernel, flops, nbytes = decoder.costliest(at)[0]
        row = opened.run(
            'const row = [...document.querySelectorAll("#kernel-table tbody tr")]'
            ".find(r => r.cells[0].textContent === arguments[0]);"
            "return [...row.cells].map(c => c.textContent)",
            kernel.name,
        )
        assert row[3] == count_text(flops) and row[6] == f"{flops / nbytes:.2f}"


def test_the_tensors_of_a_kernel_stand_out_in_memory(opened: Browser, decoder: Explanation) -> None:
    names = opened.run(
        'const button = document.querySelector("[data-tensors]"); button.click();'
        "return [button.closest('details').dataset.find, [...document.querySelectorAll('#timeline rect.found title')]"
        ".map(t => t.textContent.split(':')[0])]"
    )
    (kernel,) = [k for k in decoder.kernels if k.name == names[0]]
    assert names[1] and set(names[1]) <= set(kernel.calls)


def test_values_out_of_bounds_change_nothing(opened: Browser) -> None:
    before = opened.run('return document.getElementById("timeline").dataset.arena')
    for value in ("9", "0", "", "1.5"):  # batch goes from 1 to 8
        opened.run(
            'const box = document.getElementById("symbol-0"); box.value = arguments[0];'
            'box.dispatchEvent(new Event("input"))',
            value,
        )
        assert opened.run('return document.getElementById("timeline").dataset.arena') == before


def test_the_slider_stays_within_the_bounds(opened: Browser) -> None:
    move = (
        'const slider = document.querySelector("[data-slider=\\"0\\"]"); slider.value = arguments[0];'
        'slider.dispatchEvent(new Event("input")); return +document.getElementById("symbol-0").value'
    )
    assert [opened.run(move, place) for place in (0, 1000)] == [1, 8]
    assert 1 < opened.run(move, 500) < 8


def test_the_search_finds_kernels_passes_and_values(opened: Browser, decoder: Explanation) -> None:
    find = (
        'const query = document.getElementById("query"); query.focus(); query.value = arguments[0];'
        'query.dispatchEvent(new Event("input"));'
        'return [...document.querySelectorAll("#results li")].map(l => l.textContent)'
    )
    press = 'document.getElementById("query").dispatchEvent(new KeyboardEvent("keydown", {key: arguments[0]}))'
    assert "fuse_ops" in opened.run(find, "fuse_ops")[0]
    opened.run(press, "Enter")
    assert opened.run(
        'return [document.querySelector(".found").id, document.getElementById("pass-fuse_ops").open]'
    ) == [
        "pass-fuse_ops",
        True,
    ]
    assert opened.run(find, "no such thing at all") == ["nothing of that name"]
    name = decoder.imported.nodes[10].name
    assert any(item.startswith(name) and item.endswith("value, imported") for item in opened.run(find, name))
    places = opened.run(find, f"{name} imported")
    for _ in range(next(k for k, item in enumerate(places) if item.startswith(f"{name}:"))):
        opened.run(press, "ArrowDown")
    opened.run(press, "Enter")
    assert opened.run('return document.querySelector("#drawing .chosen title").textContent').startswith(name)
    assert opened.run('return document.getElementById("results").hidden')


def test_long_texts_are_unpacked_when_they_are_opened(opened: Browser, decoder: Explanation) -> None:
    unpack = (
        "const block = document.querySelector(arguments[0]); block.closest('details').open = true;"
        "return new Promise(done => { const look = () => block.dataset.open && !/^\\d+ lines$/.test(block.textContent)"
        " ? done(block.textContent) : setTimeout(look, 20); look(); })"
    )
    code = opened.run(unpack, "pre.code[data-text]")
    names = [kernel.name for kernel in decoder.kernels]
    assert any(f"def {name}(" in code or "define" in code for name in names)
    changes = opened.run(unpack, "#pass-legalize pre.diff")
    assert "@@ main" in changes and "matmul" in changes
    colours = (
        'return [...new Set([...document.querySelectorAll("#pass-legalize pre span")].map(s => s.className))].sort()'
    )
    assert opened.run(colours) == ["added", "gone", "hunk"]


def test_the_table_of_kernels_sorts(opened: Browser) -> None:
    click = (
        'document.querySelectorAll("#kernel-table th")[arguments[0]].click();'
        'return [...document.querySelectorAll("#kernel-table tbody tr")].map(r => '
        "+(r.cells[arguments[0]].querySelector('data')?.value ?? r.cells[arguments[0]].textContent))"
    )
    calls = opened.run(click, 2)
    assert calls == sorted(calls, reverse=True) and len(set(calls)) > 1
    assert (again := opened.run(click, 2)) == sorted(again)
    read = [value for value in opened.run(click, 4) if value is not None]
    assert read == sorted(read, reverse=True)


PRESS = "document.getElementById(arguments[0]).dispatchEvent(new KeyboardEvent('keydown', {key: arguments[1]}))"


def test_keys_zoom_and_move_the_graph(opened: Browser) -> None:
    where = (
        "const scene = document.querySelector('#drawing .scene');"
        "const matrix = scene.transform.baseVal.consolidate().matrix; return [matrix.a, matrix.e, matrix.f]"
    )
    scale, x, y = opened.run(where)
    opened.run(PRESS, "drawing", "ArrowDown")
    assert opened.run(where) == [scale, x, y - 80]
    opened.run(PRESS, "drawing", "+")
    assert opened.run(where)[0] == pytest.approx(scale * 1.25, rel=1e-3)
    opened.run(PRESS, "drawing", "0")
    outside = (
        "const area = document.getElementById('drawing').getBoundingClientRect();"
        "return [...document.querySelectorAll('#drawing .box rect')].map(r => r.getBoundingClientRect())"
        ".filter(r => r.top < area.top || r.bottom > area.bottom || r.left < area.left || r.right > area.right).length"
    )
    assert opened.run(outside) == 0


def test_keys_zoom_and_move_the_memory_plan(opened: Browser, decoder: Explanation) -> None:
    count = "return document.querySelectorAll('#timeline rect').length"
    everything = len(decoder.memory_plans["main"].tensors)
    for _ in range(12):
        opened.run(PRESS, "timeline", "+")
    assert 0 < opened.run(count) < everything
    for _ in range(40):
        opened.run(PRESS, "timeline", "ArrowLeft")
    assert "step 0" in opened.run("return document.getElementById('timeline').textContent")
    opened.run(PRESS, "timeline", "0")
    assert opened.run(count) == everything


@pytest.mark.parametrize("width", [1280, 380])
def test_the_page_is_no_wider_than_the_window(window: Browser, file: Path, width: int) -> None:
    window.open(file, width=width)
    inner, content = window.run("return [innerWidth, document.documentElement.scrollWidth]")
    assert content <= inner
    assert window.problems() == []


def test_every_control_has_a_name_and_headings_step_by_one(opened: Browser) -> None:
    nameless = opened.run(
        'return [...document.querySelectorAll("input, select, button")].filter(c => !(c.labels?.length || '
        "c.getAttribute('aria-label') || c.textContent.trim())).length"
    )
    assert nameless == 0
    levels = [
        int(tag[1]) for tag in opened.run('return [...document.querySelectorAll("h1,h2,h3,h4")].map(h => h.tagName)')
    ]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_branches_loops_and_library_calls_are_drawn(window: Browser, tmp_path: Path) -> None:
    found = explain(branches(), name="branches")
    path = tmp_path / "branches.html"
    path.write_text(page(found), "utf-8")
    window.open(path)
    window.run(SHOW_LEVEL, "imported", "every operator")
    assert window.run(BOXES) == len(found.imported.nodes)
    kinds = window.run('return [...document.querySelectorAll("#drawing .box")].map(b => b.classList[1])')
    assert set(kinds) == {"input", "output", "op", "control", "library", "view"}
    assert "lib_square" in window.run('return document.getElementById("kernels").innerText')
    assert window.problems() == []


def fixed() -> IRModule:
    """No symbols, no intermediates."""
    bb = rl.BlockBuilder()
    with bb.function("main", x=rl.TensorType.of((3, 4), "float32")) as (x,):
        bb.result(rl.ops.relu(x))
    return bb.module()


def test_a_model_of_fixed_sizes_has_a_page_too(window: Browser, tmp_path: Path) -> None:
    found = explain(fixed())
    found.decisions.append(Decision("test", "x <y>", True, "because & so"))
    path = tmp_path / "fixed.html"
    path.write_text(page(found), "utf-8")
    window.open(path)
    assert window.run(BOXES) == 3 and window.run('return document.getElementById("symbols")') is None
    assert "because & so" in window.run('return document.getElementById("decisions").textContent')
    assert window.problems() == []


def test_without_javascript_the_text_is_there(file: Path, decoder: Explanation) -> None:
    need_browser()
    with browser(script=False) as plain:
        plain.open(file)
        shown = plain.run('return document.querySelector("main").innerText')
        assert "Without JavaScript" in shown
        assert all(kernel.name in shown for kernel in decoder.kernels)
        assert plain.run('return document.querySelectorAll("#drawing .box").length') == 0
