"""Support for passes that merge calls: call sites in a block, and their programs over shared buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import is_
from typing import TypeAlias

from relaxlite.ir.expr import Binding, Block, Body, Call, Expr, GlobalVar, If, Let, Loop, MatchShape, Var
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.program import Buffer, Stmt, TensorProgram
from relaxlite.ir.program_visitor import Substitute, program_symbols
from relaxlite.ir.symbolic import SymVar
from relaxlite.ir.types import TensorType, TupleType, Type, type_symbols
from relaxlite.ir.visitor import body_uses, expr_symbols, used_vars
from relaxlite.passes.loops.legalize import ProgramTable
from relaxlite.passes.loops.pattern import top_stages
from relaxlite.records import dataclass

ChangeBlock: TypeAlias = Callable[[Block, Mapping[Var, int], ProgramTable], Sequence[Binding]]


@dataclass(frozen=True, slots=True, eq=False)
class CallSite:
    """A call of a tensor program, and the variable that it is bound to."""

    var: Var
    call: Call
    program: TensorProgram
    position: int  # index of the binding in its block


def call_sites(bindings: Sequence[Binding], module: IRModule) -> list[CallSite]:
    """The calls of tensor programs without attributes whose result is one tensor, in the order of the block."""
    sites = []
    for position, binding in enumerate(bindings):
        call = binding.value if isinstance(binding, Let) else None
        if not isinstance(call, Call) or not isinstance(call.callee, GlobalVar):
            continue
        program = module.get(call.callee.name)
        if isinstance(program, TensorProgram) and not program.attrs and isinstance(call.ty, TensorType):
            sites.append(CallSite(binding.var, call, program, position))
    return sites


class DefUsePositions:
    """Definitions and uses of variables in a range of a block, by position."""

    def __init__(self, bindings: Iterable[tuple[int, Binding]]) -> None:
        self._defined: dict[Var | SymVar, int] = {}
        self._used: set[Var] = set()
        for position, binding in bindings:
            value = binding.value if isinstance(binding, Let) else binding.source
            self._used.update(used_vars(value))
            self._defined[binding.var] = position
            if isinstance(binding, MatchShape):
                for symbol in type_symbols(binding.var.ty):
                    self._defined.setdefault(symbol, position)

    def defined(self, site: CallSite) -> int:
        """The last position that defines an operand or symbol of a call; -1: all are defined before the range."""
        operands: tuple[Var | SymVar, ...] = (*used_vars(site.call), *expr_symbols(site.call))
        return max((self._defined.get(x, -1) for x in operands), default=-1)

    def is_used(self, var: Var) -> bool:
        """Whether a binding of the range uses the variable."""
        return var in self._used


class ProgramInstances:
    """Instantiates programs of several calls over shared buffers: one buffer for each distinct argument or result."""

    def __init__(self) -> None:
        self.buffers: dict[Expr, Buffer] = {}

    def buffer(self, expr: Expr) -> Buffer:
        """The buffer of an argument or result, created at the first request."""
        if expr not in self.buffers:
            name = expr.name if isinstance(expr, Var) else f"c{len(self.buffers)}"
            assert isinstance(expr.ty, TensorType) and expr.ty.shape is not None
            self.buffers[expr] = Buffer(name, expr.ty.shape, expr.ty.dtype)
        return self.buffers[expr]

    def stages(self, site: CallSite) -> tuple[Stmt, ...]:
        """The stages of a call's program over the shared buffers, with the caller's symbols."""
        symbols = dict(zip(site.program.symbols, site.call.sym_args, strict=True))
        buffers = (*(self.buffer(a) for a in site.call.args), self.buffer(site.var))
        actual = dict(zip(site.program.params, buffers, strict=True))
        return top_stages(replace(site.program, body=Substitute(symbols, actual, fresh=True).stmt(site.program.body)))

    def call(self, hint: str, body: Stmt, inputs: Sequence[Expr], outputs: Sequence[Var], table: ProgramTable) -> Call:
        """A call of a new program with the given body, added to `table` under the name `hint`."""
        params = tuple(self.buffer(x) for x in (*inputs, *outputs))
        program = TensorProgram(params, program_symbols(params, body), body, len(outputs))
        ty: Type = outputs[0].ty if len(outputs) == 1 else TupleType(tuple(v.ty for v in outputs))
        return Call(table.add(hint, program), tuple(inputs), sym_args=program.symbols, ty=ty)


def stem(site: CallSite) -> str:
    """The name of a call's program without its numeric suffix."""
    name = site.call.callee.name
    head, _, last = name.rpartition("_")
    return head if head and last.isdigit() else name


def map_blocks(module: IRModule, change: ChangeBlock, names: Collection[str] | None = None) -> IRModule:
    """Replace the bindings of every block, nested bodies included, in all functions or those in `names`.

    `change` maps (block, number of uses of each variable in the body, table for new programs) to the new bindings.
    """
    definitions: dict[str, Definition] = dict(module)
    table = ProgramTable(definitions)
    for name, function in module.functions().items():
        if names is not None and name not in names:
            continue
        body = _changed(function.body, change, table)
        definitions[name] = function if body is function.body else replace(function, body=body)
    return module.updated(definitions)


def _changed(body: Body, change: ChangeBlock, table: ProgramTable) -> Body:
    uses = Counter(body_uses(body))
    blocks = []
    for block in body.blocks:
        bindings = tuple(_nested(b, change, table) for b in change(block, uses, table))
        same = len(bindings) == len(block.bindings) and all(map(is_, bindings, block.bindings))
        blocks.append(block if same else replace(block, bindings=bindings))
    return body if all(map(is_, blocks, body.blocks)) else Body(tuple(blocks), body.result)


def _nested(binding: Binding, change: ChangeBlock, table: ProgramTable) -> Binding:
    value = binding.value if isinstance(binding, Let) else None
    if isinstance(value, If):
        then_body, else_body = (_changed(b, change, table) for b in (value.then_body, value.else_body))
        same = then_body is value.then_body and else_body is value.else_body
        return binding if same else Let(binding.var, replace(value, then_body=then_body, else_body=else_body))
    if isinstance(value, Loop):
        body = _changed(value.body, change, table)
        return binding if body is value.body else Let(binding.var, replace(value, body=body))
    return binding
