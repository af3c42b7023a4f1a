"""IR text in tests: a shorthand for types, and "this pass turns that text into this one".

    f32[n, 4]      Tensor((n, 4), "float32"), and in the parameters of a program Buffer((n, 4), "float32")

Statements need no `with dataflow():`; how bindings are grouped into blocks is not compared.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from relaxlite.ir import ops  # noqa: F401  (registers the ops)
from relaxlite.ir.equality import first_difference
from relaxlite.ir.expr import Binding, Block, Body, If, Let, Loop
from relaxlite.ir.module import IRModule
from relaxlite.ir.parser import parse_module
from relaxlite.ir.program import TensorProgram
from relaxlite.ir.verifier import verify

_DTYPES = {
    "f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16", "i8": "int8", "i32": "int32",
    "i64": "int64", "u8": "uint8", "bool": "bool",
}  # fmt: skip
_TYPE = re.compile(rf"\b({'|'.join(_DTYPES)})\[([^\]]*)\]")

Run = Callable[[IRModule], IRModule]


def module(text: str) -> IRModule:
    """The module that a text in shorthand stands for."""
    return _grouped(parse_module(_expanded(text)))


def program(text: str) -> TensorProgram:
    """The one program of a text in shorthand."""
    (found,) = module(text).programs().values()
    return found


def assert_becomes(run: Run, before: str, after: str, *, stage: str = "graph", result_stage: str | None = None) -> None:
    """The pass turns one text into the other, both legal."""
    given = module(before)
    verify(given, stage)
    made = run(given)
    verify(made, result_stage or stage)
    difference = first_difference(_grouped(made), module(after))
    assert difference is None, f"{difference}\n\n{made}"


def assert_stays(run: Run, text: str, *, stage: str = "graph") -> None:
    """The pass leaves the module alone: it gives back the same object."""
    given = module(text)
    verify(given, stage)
    made = run(given)
    assert made is given, str(made)


def _expanded(text: str) -> str:
    lines, kind = [], "Tensor"
    for line in textwrap.dedent(text).strip().split("\n"):
        if line.startswith("@"):
            kind = "Buffer" if line.startswith("@program") else "Tensor"
        lines.append(_TYPE.sub(partial(_type, kind), line))
    return "\n".join(lines) + "\n"


def _type(kind: str, match: re.Match[str]) -> str:
    shape = f"{match[2]}," if match[2] else ""
    return f'{kind}(({shape}), "{_DTYPES[match[1]]}")'


def _grouped(given: IRModule) -> IRModule:
    """The module with blocks as the builder makes them: runs of dataflow, and each If and Loop on its own."""
    return given.updated({name: replace(f, body=_group(f.body)) for name, f in given.functions().items()})


def _group(body: Body) -> Body:
    blocks: list[Block] = []
    run: list[Binding] = []
    for binding in body.bindings():
        value = binding.value if isinstance(binding, Let) else None
        if isinstance(value, If):
            value = replace(value, then_body=_group(value.then_body), else_body=_group(value.else_body))
        elif isinstance(value, Loop):
            value = replace(value, body=_group(value.body))
        else:
            run.append(binding)
            continue
        if run:
            blocks.append(Block(tuple(run)))
        blocks.append(Block((Let(binding.var, value),), is_dataflow=False))
        run = []
    if run:
        blocks.append(Block(tuple(run)))
    return Body(tuple(blocks), body.result)
