"""docs/ops.md: the table of all operators, from their declarations."""

from __future__ import annotations

import importlib
from itertools import groupby

from docs.generate.page_text import first_paragraph, table
from relaxlite.ir import ops
from relaxlite.ir.op import REQUIRED, Op, all_ops

HEAD = """\
# The operators

Made by `python -m docs.generate` from the declarations in `relaxlite/ir/ops/`, one section per file. In Python an
op is `relaxlite.ops.NAME`. An operand with `?` may be left out, `*` stands for any number; attributes are keywords.
"""


def render() -> str:
    """The text of docs/ops.md."""
    own = [op for op in all_ops() if type(op).__module__.startswith(f"{ops.__name__}.")]
    by_file = groupby(sorted(own, key=_file), key=_file)
    return "\n".join([HEAD, *(_section(file, list(members)) for file, members in by_file)])


def _file(op: Op) -> str:
    return type(op).__module__.rpartition(".")[2]


def _section(file: str, members: list[Op]) -> str:
    module = importlib.import_module(f"{ops.__name__}.{file}")
    rows = [[f"`{_signature(op)}`", first_paragraph(op)] for op in members]
    return "\n".join([f"## {file}", "", first_paragraph(module), "", table(["op", "meaning"], rows), ""])


def _signature(op: Op) -> str:
    attrs = [name if attr.default is REQUIRED else f"{name}={attr.default!r}" for name, attr in op.attrs.items()]
    is_open = any(operand.startswith("*") for operand in op.operands)  # what follows is a keyword anyway
    star = ["*"] if attrs and not is_open else []
    return f"{op.name}({', '.join([*op.operands, *star, *attrs])})"
