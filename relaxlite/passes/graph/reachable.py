"""Reachability of definitions from the entry points of a module."""

from __future__ import annotations

from collections.abc import Iterable

from relaxlite.ir.attributes import EXPORTED
from relaxlite.ir.expr import Call, Function, GlobalVar, Let
from relaxlite.ir.module import IRModule
from relaxlite.ir.visitor import bodies, operands


def entry_points(module: IRModule) -> list[str]:
    """The names of the entry points: "main", then the exported functions."""
    return ["main", *(name for name, f in module.functions().items() if name != "main" and f.attrs.get(EXPORTED))]


def reachable(module: IRModule, roots: Iterable[str]) -> set[str]:
    """The names of all definitions reachable from `roots` through calls, `roots` included."""
    visited: set[str] = set()
    pending = list(roots)
    while pending:
        name = pending.pop()
        if name in visited or name not in module:
            continue
        visited.add(name)
        definition = module[name]
        if isinstance(definition, Function):
            pending.extend(_called(definition))
    return visited


def drop_unused(module: IRModule) -> IRModule:
    """Remove functions and programs that are not reachable from an entry point."""
    used = reachable(module, entry_points(module))
    return module.updated({name: None for name in module if name not in used})


def _called(function: Function) -> list[str]:
    names: list[str] = []
    for body in bodies(function):
        for binding in body.bindings():
            value = binding.value if isinstance(binding, Let) else binding.source
            if isinstance(value, Call) and isinstance(value.callee, GlobalVar):
                names.append(value.callee.name)
            names.extend(o.name for o in operands(value) if isinstance(o, GlobalVar))
    return names
