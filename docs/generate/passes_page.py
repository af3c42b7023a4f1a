"""docs/passes.md: each pass of the pipeline, what places the pass there, and a small module before and after."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterator
from itertools import groupby

from docs.generate.page_text import cell, table
from docs.generate.pass_examples import DTYPES, EXAMPLES, before_and_after
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import REQUIRED, all_ops
from relaxlite.passes.manager import Pass
from relaxlite.passes.pipeline import PASSES, all_passes

HEAD = """\
# The passes

Made by `python -m docs.generate` from `relaxlite/passes/pipeline.py`. A pass is a pure function of modules.
`relaxlite inspect MODEL --after PASS` prints a module after a pass; `relaxlite opt FILE -p PASS` runs a pass on text.
Why the passes are as they are: [design notes](design-notes.md).

Examples are differences: lines with `-` are before the pass, lines with `+` after. Types are shortened: `f32[n, 4]` is
`Tensor((n, 4), "float32")`. Attributes with default values, symbol declarations and unchanged programs are omitted.
Bindings that nothing uses any more stay until `eliminate_dead`.
"""
SHORT = {dtype: short for short, dtype in DTYPES.items()} | {
    "float16": "f16", "bfloat16": "bf16", "int32": "i32", "int16": "i16",
}  # fmt: skip
MAX_LINES = 60  # of an example


def render() -> str:
    """The text of docs/passes.md."""
    parts = [HEAD, "## In order", "", _overview(), ""]
    stages = _stages()
    for title, members in groupby(PASSES.values(), lambda step: stages[step.name]):
        parts += [f"## {title}", ""]
        for step in members:
            parts += _section(step)
    return "\n".join(parts).rstrip() + "\n"


def _stages() -> dict[str, str]:
    """The title of the stage of each pass, from the docstring and the comments of `all_passes`."""
    docs = re.findall(r"^ +([A-Z])  (.+?) {2,}", all_passes.__doc__ or "", re.MULTILINE)
    titles = {letter: f"Stage {letter}: {name}" for letter, name in docs}
    stages, title = {}, ""
    for letter, name in re.findall(r'# ([A-Z])$|_step\(\s*"(\w+)"', inspect.getsource(all_passes), re.MULTILINE):
        title = titles.get(letter, title)
        stages[name] = title
    return stages


def _overview() -> str:
    rows = [[f"[`{s.name}`](#{s.name})", cell(s.doc) + (" May round." if s.rounds else "")] for s in PASSES.values()]
    return table(["pass", "purpose"], rows)


def _section(step: Pass) -> list[str]:
    lines = [f"### {step.name}", "", f"{cell(step.doc)} File: `{_file(step)}`.", ""]
    lines += [f"- Why here: {step.why}."]
    if step.after:
        lines += [f"- After: {_links(step.after)}."]
    if step.before:
        lines += [f"- Before: {_links(step.before)}."]
    if step.rounds:
        lines += ["- Results may change where the precision allows rounding."]
    lines += [f"- The module then has the form `{step.stage}` (`relaxlite/ir/verifier.py`).", ""]
    if step.name in EXAMPLES:
        lines += ["```diff", *_difference(step.name), "```", ""]
        lines += ["The loops that change are left out.", ""] if EXAMPLES[step.name].shown else []
    return lines


def _file(step: Pass) -> str:
    """The file of a pass; the pipeline wraps functions that take a module alone."""
    run = inspect.getclosurevars(step.run).nonlocals.get("run", step.run)
    return f"{run.__module__.replace('.', '/')}.py"


def _links(names: tuple[str, ...]) -> str:
    return ", ".join(f"[`{name}`](#{name})" for name in names)


def _difference(name: str) -> Iterator[str]:
    """Lines of the definitions that a pass changes, marked as in a unified diff."""
    before, after = (_definitions(module) for module in before_and_after(name))
    assert before != after, f"the example of {name} does not change"
    only = EXAMPLES[name].shown
    lines: list[str] = []
    for definition in dict.fromkeys([*before, *after]):
        old, new = before.get(definition, []), after.get(definition, [])
        if old != new and (not only or definition in ("constants", *only)):
            lines += [line for line in difflib.ndiff(old, new) if not line.startswith("?")]
    assert len(lines) <= MAX_LINES, f"the example of {name} has {len(lines)} lines"
    yield from (line.rstrip() for line in lines)


def _definitions(module: IRModule) -> dict[str, list[str]]:
    """Shortened lines of each definition of a module, and of its large constants."""
    parts: dict[str, list[str]] = {}
    for text in str(module).split("\n\n"):
        short = _shortened(text)
        name = re.search(r"^def (\w+)|^(constants) = ", short, re.MULTILINE)
        assert name, text
        parts[name[1] or name[2]] = short.split("\n")
    return parts


def _shortened(text: str) -> str:
    text = re.sub(r"^\w+ = symbol\(.*\)\n", "", text.strip("\n"), flags=re.MULTILINE)
    text = re.sub(r', hash="\w+"', "", text)
    text = re.sub(r'\b(?:Tensor|Buffer)\(\((.*?),?\), "(\w+)"\)', lambda m: f"{SHORT[m[2]]}[{m[1]}]", text)
    lines = [_without_defaults(line) for line in text.split("\n")]
    return "\n".join(_dedented(lines) if "@function" in text else lines)


def _dedented(lines: list[str]) -> Iterator[str]:
    """The lines of a function without those that open a block of bindings."""
    for line in lines:
        if line.strip() not in ("with dataflow():", "with block():"):
            yield line[4:] if line.startswith("        ") else line


def _without_defaults(line: str) -> str:
    called = re.search(r"= ([\w.]+)\(", line)
    for op in all_ops():
        if called and op.name == called[1]:
            for name, attr in op.attrs.items():
                if attr.default is not REQUIRED:
                    line = line.replace(f", {name}={attr.default!r}".replace("'", '"'), "")
    return line
