"""Merge the composite functions of fuse_ops.py into one tensor program each, with merge_stages.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.attributes import COMPOSITE
from relaxlite.ir.equality import structural_hash
from relaxlite.ir.expr import Call, Expr, Function, GlobalVar, Let, ShapeValue, Tuple, Var
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.op import get_op
from relaxlite.ir.program import Allocate, Buffer, Check, Compare, IndexValue, Stmt, TensorProgram, seq
from relaxlite.ir.program_visitor import Substitute, program_symbols, walk_stmts
from relaxlite.ir.symbolic import SymExpr, substitute, sym
from relaxlite.ir.types import ShapeType, TensorType
from relaxlite.ir.visitor import Rewriter
from relaxlite.passes.fuse.merge_stages import CannotMerge, merge_stages
from relaxlite.passes.loops.access import accesses
from relaxlite.passes.loops.legalize import ProgramTable
from relaxlite.passes.loops.pattern import top_stages

_ANALYZER = Analyzer()

_Definitions: TypeAlias = Mapping[str, Definition]
_Fused: TypeAlias = tuple[GlobalVar, tuple[int, ...], TensorProgram]  # positions among the passed symbols

_NEGATIVE = " is negative"  # end of check messages that name a tensor, which differs between call sites


def fuse_programs(module: IRModule) -> IRModule:
    """Merge the loops of each composite function into one tensor program."""
    composites = {n: f for n, f in module.functions().items() if f.attrs.get(COMPOSITE)}
    definitions: dict[str, Definition] = {n: d for n, d in module.items() if n not in composites}
    table = ProgramTable(definitions)
    fused: dict[str, _Fused] = {}
    by_hash: dict[str, _Fused] = {}  # repeated layers share one program
    for name, function in composites.items():
        digest = structural_hash(function)
        if digest in by_hash:
            fused[name] = by_hash[digest]
            continue
        program, declared = merge_composite(function, module), _declared_symbols(function)
        fused[name] = table.add(name, program), tuple(declared.index(s) for s in program.symbols), program
        if not any(isinstance(s, Check) and s.message.endswith(_NEGATIVE) for s in walk_stmts(program.body)):
            by_hash[digest] = fused[name]
    for name, function in module.functions().items():
        if name not in composites:
            definitions[name] = _CallFused(fused).function(function)
    return module.updated({**{n: None for n in composites if n not in definitions}, **definitions})


def _declared_symbols(composite: Function) -> tuple[SymExpr, ...]:
    """The symbols that the last parameter of a composite function declares."""
    ty = composite.params[-1].ty
    assert isinstance(ty, ShapeType) and ty.values is not None
    return ty.values


class _CallFused(Rewriter):
    """Rewriter of calls of composite functions into calls of their merged programs."""

    def __init__(self, fused: dict[str, _Fused]) -> None:
        super().__init__()
        self._fused = fused

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if (
            not isinstance(value, Call)
            or not isinstance(value.callee, GlobalVar)
            or value.callee.name not in self._fused
        ):
            return None
        callee, order, program = self._fused[value.callee.name]
        *args, shape = value.args
        assert isinstance(shape, ShapeValue)
        sym_args = tuple(shape.values[position] for position in order)
        ty, symbols = value.ty, dict(zip(program.symbols, sym_args, strict=True))
        if isinstance(ty, TensorType) and ty.shape is not None:
            result = tuple(substitute(d, symbols) for d in program.outputs[0].shape)
            if len(result) != len(ty.shape) or not all(map(_ANALYZER.can_prove_equal, result, ty.shape)):
                call = Call(
                    callee, tuple(args), value.attrs, sym_args, TensorType(result, ty.dtype, len(result)), value.loc
                )
                return get_op("reshape")(self.bb.emit(call, var.name), ShapeValue(ty.shape))
        return Call(callee, tuple(args), value.attrs, sym_args, ty, value.loc)


def merge_composite(function: Function, definitions: _Definitions) -> TensorProgram:
    """Merge the programs that a composite function calls into one program with the same results in the same order.

    A single result may have another shape with the elements in the same order. Raises CannotMerge.
    """
    buffers: dict[Expr, Buffer] = {p: _buffer(p) for p in function.params[:-1]}
    stages: list[Stmt] = []
    results_expr = function.body.result
    results = results_expr.fields if isinstance(results_expr, Tuple) else (results_expr,)
    for binding in function.body.bindings():
        assert isinstance(binding, Let) and isinstance(binding.value, Call)
        buffers[binding.var] = _buffer(binding.var)
        stages.extend(_instantiate(binding.value, buffers, binding.var, definitions))
        if binding.var not in results:
            stages.extend(_size_checks(buffers[binding.var]))
    inputs, outputs = tuple(buffers[p] for p in function.params[:-1]), tuple(buffers[r] for r in results)
    intermediates = [b for b in buffers.values() if b not in inputs and b not in outputs]
    merged, outputs = merge_stages(stages, intermediates, outputs)
    body = seq(*merged)
    params = (*inputs, *outputs)
    allocated = {s.buffer for s in walk_stmts(body) if isinstance(s, Allocate)}
    unstored = {x.buffer for x in accesses(body)} - set(params) - allocated
    if unstored:
        raise CannotMerge(f"{', '.join(b.name for b in unstored)} would have to be stored")
    return TensorProgram(params, program_symbols(params, body), body, len(outputs))


def _size_checks(buffer: Buffer) -> list[Check]:
    """Run-time checks that an allocation of the tensor would make: no size is negative."""
    unproven = [d for d in dict.fromkeys(buffer.shape) if not _ANALYZER.can_prove_le(0, d)]
    return [
        Check(Compare("ge", IndexValue(d), IndexValue(sym(0))), f"{buffer.name}: the size {d}{_NEGATIVE}")
        for d in unproven
    ]


def _buffer(var: Var) -> Buffer:
    assert isinstance(var.ty, TensorType) and var.ty.shape is not None
    return Buffer(var.name, var.ty.shape, var.ty.dtype)


def _instantiate(call: Call, buffers: dict[Expr, Buffer], out: Var, definitions: _Definitions) -> tuple[Stmt, ...]:
    """Stages of the called program over the buffers of a composite function."""
    assert isinstance(call.callee, GlobalVar)
    program = definitions[call.callee.name]
    assert isinstance(program, TensorProgram)
    symbols = dict(zip(program.symbols, call.sym_args, strict=True))
    actual = dict(zip(program.params, (*(buffers[a] for a in call.args), buffers[out]), strict=True))
    return top_stages(replace(program, body=Substitute(symbols, actual, fresh=True).stmt(program.body)))
