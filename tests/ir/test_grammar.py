"""The grammar in the docstring of relaxlite.ir names every node, with its fields, and nothing that does not exist."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from typing import get_args

import pytest

from relaxlite import ir
from relaxlite.ir import expr, module, op, program, symbolic, types

GRAMMAR = (ir.__doc__ or "").split("```")[1]
MODULES = (expr, module, program, symbolic, types)
OUTSIDE = {"SymExpr", "BinaryAtom"}  # a base class of nodes, not a node


def defined_classes() -> dict[str, type]:
    return {
        name: value
        for part in MODULES
        for name, value in vars(part).items()
        if isinstance(value, type) and value.__module__ == part.__name__ and not name.startswith("_")
    }


def productions() -> dict[str, list[str]]:
    """Node -> the names of its fields, wherever the grammar writes `Node(a, b: T, ...)` or `Node = (a, b: T, ...)`."""
    found = re.findall(r"\b([A-Z]\w+)\s*(?:= )?\(([^()]*)\)", GRAMMAR)
    names = (fields.split(",") if fields else [] for _, fields in found)
    return {node: [n.split(":")[0].strip() for n in group] for (node, _), group in zip(found, names, strict=True)}


def test_every_node_is_named() -> None:
    named = set(re.findall(r"\b[A-Z]\w+", GRAMMAR))
    assert not set(defined_classes()) - named - OUTSIDE


def test_every_name_exists() -> None:
    categories = {"Binding", "Body", "Expr", "Leaf", "Type", "Stmt", "Value", "Definition"}
    for name in sorted(set(re.findall(r"\b[A-Z][a-z]\w+|\bIRModule\b", GRAMMAR)) - {"None", "A-normal"}):
        assert hasattr(ir, name), f"{name} stands in the grammar, but relaxlite.ir does not export it"
        assert name in defined_classes() or name in categories or name == "Op"


@pytest.mark.parametrize("name", [n for n, c in defined_classes().items() if dataclasses.is_dataclass(c)])
def test_fields_are_those_of_the_class(name: str) -> None:
    fields = [field.name for field in dataclasses.fields(defined_classes()[name])]
    assert productions()[name] == fields


@pytest.mark.parametrize("category", ["Expr", "Leaf", "Binding", "Type", "Stmt", "Value"])
def test_alternatives_are_those_of_the_union(category: str) -> None:
    union = next(getattr(part, category) for part in MODULES if hasattr(part, category))
    members = set(re.findall(r"\w+", union)) if isinstance(union, str) else {c.__name__ for c in get_args(union)}
    text = re.search(rf"^{category}\s+= (.*?)(?=^\w|\Z)", GRAMMAR, re.S | re.M)
    assert text is not None
    assert set(re.findall(r"^(?:\s+\| )?(\w+)", text[1], re.M)) == members


def test_symbolic_integers_are_complete() -> None:
    kinds = {"SymVar", *(c.__name__ for c in symbolic.BinaryAtom.__subclasses__())}
    assert kinds == {"SymVar", "FloorDiv", "FloorMod", "Min", "Max"} and all(kind in GRAMMAR for kind in kinds)


def test_every_export_exists() -> None:
    assert all(hasattr(ir, name) for name in ir.__all__)
    assert ir.Op is op.Op


def test_importing_the_ir_is_light() -> None:
    code = (
        "import sys, relaxlite.ir;"
        "print([m for m in ('sympy', 'onnx', 'llvmlite', 'relaxlite.ir.ops') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
