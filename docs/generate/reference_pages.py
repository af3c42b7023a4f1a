"""docs/reference/*.md: commands, Python names, errors and knobs, from the parser, docstrings and tables."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path

import relaxlite
from docs.generate.page_text import cell, cell_of, first_paragraph, table
from relaxlite import config, cpus, errors, gpus, llm, target
from relaxlite.cli.parser import COMMANDS, make_parser
from relaxlite.ir import ops

MADE = "Made by `python -m docs.generate` from"


def render_commands() -> str:
    """The text of docs/reference/commands.md."""
    (commands,) = (a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    rows = [[f"[`{name}`](#{name})", cell(command.summary)] for name, command in COMMANDS.items()]
    parts = [
        f"# Commands\n\n{MADE} `relaxlite/cli/parser.py`. `relaxlite COMMAND --help` says the same.\n",
        "| exit code | meaning |\n| --- | --- |\n| 0 | success |\n| 1 | a model, file or input is at fault |",
        "| 2 | wrong usage |\n| 130, 143 | interrupted, terminated |\n",
        "Results go to stdout; times, progress and errors to stderr.\n",
        table(["command", "what it does"], rows),
        "",
    ]
    for name, command in COMMANDS.items():
        parts += [f"## {name}", "", f"{command.summary[0].upper()}{command.summary[1:]}.", ""]
        parts += [_arguments(commands.choices[name]), "", f"```text\n{command.detail.strip()}\n```", ""]
    return "\n".join(parts).rstrip() + "\n"


def _arguments(parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in parser._actions:
        if action.dest != "help":
            text = (action.help or "") % {"default": action.default, "prog": parser.prog}
            rows.append([_usage(action), cell(text)])
    return table(["argument", "meaning"], rows)


def _usage(action: argparse.Action) -> str:
    """The names of an argument and its value, as in a usage line."""
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    value = "" if action.nargs == 0 else str(action.metavar or choices or action.dest.upper())
    if not action.option_strings:
        return f"`{choices or action.metavar or action.dest}`"
    return ", ".join(f"`{' '.join(filter(None, (option, value)))}`" for option in action.option_strings)


def render_python() -> str:
    """The text of docs/reference/python.md."""
    parts = [
        f"# Python\n\n{MADE} docstrings. `help(rl.compile)` says more.\n",
        _names("rl", relaxlite._HOME),
        f"| `rl.ops` | {first_paragraph(ops)} |",
        "\n## rl.llm\n",
        _names("rl.llm", llm._HOME),
    ]
    for title, documented in (
        ("Executable", relaxlite.Executable),
        ("BlockBuilder", relaxlite.BlockBuilder),
        ("IRModule", relaxlite.IRModule),
        ("Target", relaxlite.Target),
        ("llm.LanguageModel", llm.LanguageModel),
    ):
        parts += [f"\n## rl.{title}\n", f"{first_paragraph(documented)}\n", _members(documented)]
    parts += ["\n## Modules\n", _modules()]
    return "\n".join(parts) + "\n"


def _names(prefix: str, homes: Mapping[str, str]) -> str:
    """A row for each public name, from the module that defines the name."""
    rows = [[f"`{prefix}.{name}`", cell_of(docstring(home, name))] for name, home in homes.items()]
    return table(["name", "summary"], rows)


def docstring(home: str, name: str) -> str:
    """The docstring of a function or class of a module or package, which is read, as PyTorch may be missing."""
    spec = importlib.util.find_spec(home)
    assert spec is not None and spec.origin is not None, home
    folders = spec.submodule_search_locations
    files = sorted(Path(folders[0]).rglob("*.py")) if folders else [Path(spec.origin)]
    for node in (node for file in files for node in ast.parse(file.read_text("utf-8")).body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return ast.get_docstring(node) or ""
    raise AssertionError(f"{home} defines no {name}")


def _members(owner: type) -> str:
    """Public methods and properties of a class, in the order of their definitions."""
    rows = []
    for name, value in vars(owner).items():
        if name.startswith("_") or not inspect.getdoc(value) or isinstance(value, type):
            continue
        call = f"{name}()" if inspect.isroutine(value) else name
        rows.append([f"`{call}`", first_paragraph(value)])
    return table(["member", "summary"], rows)


def _modules() -> str:
    modules = {name: importlib.import_module(f"relaxlite.{name}") for name in relaxlite._SUBMODULES if name != "llm"}
    rows = [[f"`rl.{name}`", first_paragraph(module)] for name, module in modules.items() if module.__doc__]
    return table(["module", "summary"], rows)


def render_errors() -> str:
    """The text of docs/reference/errors.md."""
    rows = [[f"{'- ' * depth}`{error.__name__}`", _also(error), first_paragraph(error)] for depth, error in _tree()]
    head = (
        f"# Errors\n\n{MADE} `relaxlite/errors.py`. All are `rl.errors.NAME`; a dash marks a kind of the error above."
    )
    more = (
        "A message names the operand, the shapes, and the source (ONNX node, Python line), and gives one hint. "
        "`relaxlite -v COMMAND` shows where an error comes from."
    )
    return f"{head}\n\n{more}\n\n{table(['error', 'also a', 'when'], rows)}\n"


def _tree() -> Iterator[tuple[int, type[BaseException]]]:
    """Every error with its depth, each below the one that it is a kind of."""
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]

    def below(parent: type[BaseException], depth: int) -> Iterator[tuple[int, type[BaseException]]]:
        yield depth, parent
        for child in classes:
            if child.__bases__[0] is parent:
                yield from below(child, depth + 1)

    return below(errors.RelaxliteError, 0)


def _also(error: type[BaseException]) -> str:
    builtin = [base.__name__ for base in error.__bases__ if base.__module__ == "builtins" and base is not Exception]
    return ", ".join(f"`{name}`" for name in builtin)


def render_targets() -> str:
    """The text of docs/reference/targets.md."""
    rows = [
        [cell(row.name), ", ".join(f"`{name}`" for name in row.llvm_names), str(row.vector_bits or "any")]
        for row in cpus.MICROARCHITECTURES
    ]
    return "\n".join(
        [
            f"# Targets\n\n{MADE} `relaxlite/target.py`, `relaxlite/cpus.py` and `relaxlite/gpus.py`.\n",
            f"A target is one line of text:\n\n```text\n{target._SYNTAX}\n{target._CUDA_SYNTAX}\n```\n",
            inspect.cleandoc(_OPTIONS_OF_TARGETS),
            "\n## Processors\n",
            "Schedules ask for facts about a processor. A target has the first row that matches LLVM's name of",
            "its CPU and the width of its vectors: [how to add one](../howto-add/processor.md).\n",
            table(["row", "LLVM's names", "bits of a vector"], rows),
            "\n## GPUs\n",
            "`cuda` alone is this machine's GPU; `-sms` is the number of its multiprocessors. How models run on GPUs:",
            "[GPUs](../gpu.md).\n",
            table(["`-arch`", "multiprocessors", "shared memory of a block"], _gpu_rows()),
            "",
        ]
    )


def _gpu_rows() -> list[list[str]]:
    return [[f"`{g.arch}`", str(g.multiprocessors), f"{g.max_shared_bytes >> 10} KiB"] for g in gpus.GPUS]


_OPTIONS_OF_TARGETS = """
    | option | meaning | default |
    | --- | --- | --- |
    | `-mcpu` | LLVM's name of the processor; `x86-64-v2`, `x86-64-v3`, `x86-64-v4` are levels | this one |
    | `-mattr` | features to add or take away | those of the processor |
    | `-mtriple` | architecture, system and ABI | those of this process |
    | `-l1-bytes`, `-l2-bytes`, `-l3-bytes` | caches, for tile sizes | 32 KB, 512 KB, 32 MB |
    | `-cores` | a hint for schedules | unknown |

    `llvm` alone is this machine, caches included. A file runs on every processor that has the features of its target;
    others refuse the file.
"""

_KNOBS_IN_PYTHON = """
    from relaxlite import config

    config.set(num_threads=2)  # for the rest of the process; None goes back to the environment
    with config.override(verify_passes=True):  # for a block
        assert config.get("verify_passes")
"""


def render_knobs() -> str:
    """The text of docs/reference/knobs.md."""
    rows = [[f"`{k.name}`", f"`{k.variable}`", k.kind, f"`{k.default!r}`", cell(k.doc)] for k in config.KNOBS.values()]
    head = f"# Knobs\n\n{MADE} `relaxlite/config.py`."
    use = "```python\n" + inspect.cleandoc(_KNOBS_IN_PYTHON) + "\n```"
    order = "The value of a knob: from `set` or `override`, else from the environment variable, else the default."
    return f"{head}\n\n{order}\n\n{use}\n\n{table(['knob', 'variable', 'values', 'default', 'meaning'], rows)}\n"
