"""Calls that were fused into one kernel, according to the composite functions after fusion passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from relaxlite.ir.attributes import COMPOSITE
from relaxlite.ir.expr import Call, Constant, Expr, Function, GlobalVar, Let, TupleGetItem, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.types import Type
from relaxlite.ir.visitor import bodies
from relaxlite.records import dataclass


@dataclass(frozen=True, slots=True)
class FusedMember:
    """Fused call: the name of its result, its callee, and the names of its operands."""

    name: str
    what: str
    ty: Type
    loc: str | None
    reads: tuple[str, ...]
    constants: int


@dataclass(frozen=True, slots=True)
class FusedCall:
    """Call of a composite function: the name of its result, the function, and the fused calls in order."""

    name: str
    composite: str
    members: tuple[FusedMember, ...]


def fused_calls(modules: Iterable[IRModule]) -> dict[str, FusedCall]:
    """Calls of composite functions in these modules, by the name of the result; later modules take precedence."""
    result: dict[str, FusedCall] = {}
    for module in modules:
        composites = {name: f for name, f in module.functions().items() if f.attrs.get(COMPOSITE)}
        if composites:
            result.update((call.name, call) for call in _calls(module, composites))
    return result


def _calls(module: IRModule, composites: dict[str, Function]) -> Iterator[FusedCall]:
    for name, function in module.functions().items():
        if name in composites:
            continue
        for body in bodies(function):
            for binding in body.bindings():
                value = binding.value if isinstance(binding, Let) else None
                if isinstance(value, Call) and isinstance(value.callee, GlobalVar) and value.callee.name in composites:
                    callee = value.callee.name
                    yield FusedCall(binding.var.name, callee, tuple(_members(composites[callee], value)))


def _members(composite: Function, call: Call) -> Iterator[FusedMember]:
    outer: dict[Var, Expr] = dict(zip(composite.params, call.args, strict=False))
    aliases: dict[Var, Var] = {}
    for binding in composite.body.bindings():
        value = binding.value if isinstance(binding, Let) else None
        if isinstance(value, Var | TupleGetItem) and isinstance(source := _source(value), Var):
            aliases[binding.var] = aliases.get(source, source)
        if not isinstance(value, Call):
            continue
        args = [outer.get(a, aliases.get(a, a)) if isinstance(a, Var) else a for a in value.args]
        reads = tuple(dict.fromkeys(a.name for a in args if isinstance(a, Var)))
        constants = sum(isinstance(a, Constant) for a in args)
        what = stem(value.callee.name) if isinstance(value.callee, GlobalVar) else value.callee.name
        yield FusedMember(binding.var.name, what, binding.var.ty, value.loc, reads, constants)


def _source(value: Expr) -> Expr:
    return value.value if isinstance(value, TupleGetItem) else value


def stem(program: str) -> str:
    """Op of a program that lowers one op: "matmul" for "matmul_12"."""
    name, _, number = program.rpartition("_")
    return name if name and number.isdigit() else program
