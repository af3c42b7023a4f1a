"""Merge the loops of composite functions (fuse_ops) into one tensor program each.

1. The programs' stages are laid out one after another over shared intermediate buffers.
2. Injective intermediates are inlined: a load of one becomes the value that was stored there.
3. A row program that reads a costly intermediate in several stages keeps the row in a local one (rows.keep_row).
4. A reduction's elementwise consumer moves into its spatial loops; the intermediate becomes one local element:

    for i, j:                          for i, j:
        local e[]; e[] = 0                 local e[]; e[] = 0
        for k: e[] += a*b                  for k: e[] += a*b
        t[i, j] = e[]              =>      out[i, j] = f(e[])
    for i, j:
        out[i, j] = f(t[i, j])

   and a row program's into the loop that writes its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from relaxlite.errors import PassError
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.equality import structural_hash
from relaxlite.ir.expr import Call, Expr, Function, GlobalVar, Let, ShapeValue, Var
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.program import (
    Allocate,
    Buffer,
    Check,
    Compare,
    For,
    IndexValue,
    LetIndex,
    Load,
    Seq,
    Stmt,
    Store,
    TensorProgram,
    Value,
    seq,
)
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, loads, program_symbols, stores, walk_stmts
from relaxlite.ir.symbolic import SymExpr, sym
from relaxlite.ir.types import ShapeType, TensorType
from relaxlite.ir.visitor import Rewriter
from relaxlite.passes.fuse_ops import stmt_cost
from relaxlite.passes.legalize import ProgramTable
from relaxlite.passes.loop_pattern import Nest, injective_store, perfect_nest, reduction_of, top_stages
from relaxlite.passes.rows import keep_row, rows_of, with_final

CHEAP_READS = 3  # cost of a value that may be computed again in each stage of a row program rather than kept
_ANALYZER = Analyzer()

_Fused: TypeAlias = tuple[GlobalVar, tuple[int, ...]]  # the program, and which of the passed symbols are its symbols


def fuse_programs(module: IRModule) -> IRModule:
    composites = {n: f for n, f in module.functions().items() if f.attrs.get("composite")}
    definitions: dict[str, Definition] = {n: d for n, d in module.items() if n not in composites}
    table = ProgramTable(definitions)
    fused: dict[str, _Fused] = {}
    by_hash: dict[str, _Fused] = {}  # a layer that a model repeats is merged once
    for name, function in composites.items():
        digest = structural_hash(function)
        if digest in by_hash:
            fused[name] = by_hash[digest]
            continue
        program, declared = merge(function, module), _declared_symbols(function)
        fused[name] = table.add(name, program), tuple(declared.index(s) for s in program.symbols)
        if not any(isinstance(s, Check) for s in walk_stmts(program.body)):  # whose messages name tensors
            by_hash[digest] = fused[name]
    for name, function in module.functions().items():
        if name not in composites:
            definitions[name] = _CallFused(fused).function(function)
    return module.updated({**{n: None for n in composites if n not in definitions}, **definitions})


def _declared_symbols(composite: Function) -> tuple[SymExpr, ...]:
    """The symbols that a composite function is passed, as its last parameter."""
    ty = composite.params[-1].ty
    assert isinstance(ty, ShapeType) and ty.values is not None
    return ty.values


class _CallFused(Rewriter):
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
        callee, order = self._fused[value.callee.name]
        *args, shape = value.args
        assert isinstance(shape, ShapeValue)
        sym_args = tuple(shape.values[position] for position in order)
        return Call(callee, tuple(args), value.attrs, sym_args, value.ty, value.loc)


def merge(function: Function, module: IRModule) -> TensorProgram:
    """One program that computes what a composite function computes."""
    buffers: dict[Expr, Buffer] = {p: _buffer(p) for p in function.params[:-1]}
    stages: list[Stmt] = []
    result = function.body.result
    for binding in function.body.bindings():
        assert isinstance(binding, Let) and isinstance(binding.value, Call)
        buffers[binding.var] = _buffer(binding.var)
        stages.extend(_instantiate(binding.value, buffers, binding.var, module))
        if binding.var is not result:
            stages.extend(_size_checks(buffers[binding.var]))
    inputs, output = tuple(buffers[p] for p in function.params[:-1]), buffers[result]
    intermediates = [b for b in buffers.values() if b not in inputs and b is not output]
    stages = _inline(_keep_rows(stages, intermediates), intermediates)
    stages = _merge_epilogue(stages, output)
    body = seq(*stages)
    params = (*inputs, output)
    own = {s.buffer for s in walk_stmts(body) if isinstance(s, Allocate)}
    left = {s.buffer for s in stores(body)} - set(params) - own
    if left:
        raise PassError(f"fusion left intermediate buffers {[b.name for b in left]} in {output.name}")
    return TensorProgram(params, program_symbols(params, body), body)


def _size_checks(buffer: Buffer) -> list[Check]:
    """What allocating a tensor checks: no size is negative."""
    unproven = [d for d in dict.fromkeys(buffer.shape) if not _ANALYZER.can_prove_le(0, d)]
    return [
        Check(Compare("ge", IndexValue(d), IndexValue(sym(0))), f"{buffer.name}: the size {d} is negative")
        for d in unproven
    ]


def _buffer(var: Var) -> Buffer:
    assert isinstance(var.ty, TensorType) and var.ty.shape is not None
    return Buffer(var.name, var.ty.shape, var.ty.dtype)


def _instantiate(call: Call, buffers: dict[Expr, Buffer], out: Var, module: IRModule) -> tuple[Stmt, ...]:
    assert isinstance(call.callee, GlobalVar)
    program = module[call.callee.name]
    assert isinstance(program, TensorProgram)
    symbols = dict(zip(program.symbols, call.sym_args, strict=True))
    actual = dict(zip(program.params, (*(buffers[a] for a in call.args), buffers[out]), strict=True))
    return top_stages(replace(program, body=Substitute(symbols, actual, fresh=True).stmt(program.body)))


def _keep_rows(stages: list[Stmt], intermediates: list[Buffer]) -> list[Stmt]:
    """Row programs that compute each element of a costly intermediate once."""
    writers = [s for b in intermediates for s in stages if any(store.buffer is b for store in stores(s))]
    cost = sum(stmt_cost(s) + len(set(loads(s))) - 1 for s in writers)
    done: list[Stmt] = []
    for stage in stages:
        rows = rows_of(stage)
        for buffer in intermediates if rows is not None else ():
            readings = sum(any(x.buffer is buffer for x in loads(s)) for s in rows.stages) if rows is not None else 0
            if rows is not None and (readings - 1) * cost > CHEAP_READS:
                rows = keep_row(rows, buffer) or rows
        done.append(stage if rows is None else rows.nest)
    return done


def _inline(stages: list[Stmt], intermediates: list[Buffer]) -> list[Stmt]:
    """Inline every intermediate that one injective stage computes, the last first: then all that a stage reads of one
    element is one shared value, where each inlined reader of it would bring a copy, and copies of its copies."""
    for buffer in reversed(intermediates):
        writers = [s for s in stages if any(store.buffer is buffer for store in stores(s))]
        if len(writers) != 1 or injective_store(perfect_nest(writers[0])) is None:
            continue
        inliner = _Inline(buffer, writers[0])
        stages = [inliner.stmt(s) for s in stages if s is not writers[0]]
    return stages


class _Inline(ProgramRewriter):
    """Replaces loads of a buffer by the value its producer stores; the producer's data-dependent indices and checks are
    bound round the consuming store."""

    def __init__(self, buffer: Buffer, producer: Stmt) -> None:
        super().__init__()
        self._buffer = buffer
        self._nest = perfect_nest(producer)
        self._values: dict[object, Value] = {}
        self._wrappers: list[Callable[[Stmt], Stmt]] = []

    def _value(self, value: Value) -> Value:
        if not isinstance(value, Load) or value.buffer is not self._buffer:
            return super()._value(value)
        if value.indices not in self._values:
            self._values[value.indices] = self._produce(value)
        return self._values[value.indices]

    def _produce(self, load: Load) -> Value:
        at = dict(zip(self._nest.vars, load.indices, strict=True))
        body = Substitute(at, fresh=True).stmt(self._nest.body)
        while not isinstance(body, Store):
            if isinstance(body, LetIndex):
                self._wrappers.append(partial(LetIndex, body.var, body.value))
                body = body.body
            else:
                assert isinstance(body, Seq)
                self._wrappers.append(partial(seq, *body.stmts[:-1]))
                body = body.stmts[-1]
        return body.value

    def stmt(self, stmt: Stmt) -> Stmt:
        if not isinstance(stmt, Store | LetIndex | Check):
            return super().stmt(stmt)
        outer, self._wrappers, self._values, self._done = self._wrappers, [], {}, {}
        new = super().stmt(stmt)
        for wrap in reversed(self._wrappers):
            new = wrap(new)
        self._wrappers = outer
        return new


def _merge_epilogue(stages: list[Stmt], output: Buffer) -> list[Stmt]:
    """Move the stage that writes `output` into the spatial loops of the reduction that it reads, if there is one."""
    final = next(s for s in reversed(stages) if any(store.buffer is output for store in stores(s)))
    for anchor in stages:
        if anchor is final:
            continue
        reduction, rows, nest = reduction_of(anchor), rows_of(anchor), perfect_nest(final)
        if rows is not None:
            merged = with_final(rows, _epilogue(rows.result, (*rows.spatial, rows.final), nest))
            return [merged if s is final else s for s in stages if s is not anchor]
        if reduction is None:
            continue
        assert isinstance(reduction.final, Store)
        merged = replace(reduction, final=_epilogue(reduction.final, reduction.spatial, nest)).block
        for loop in reversed(reduction.spatial):
            merged = replace(loop, body=merged)
        return [merged if s is final else s for s in stages if s is not anchor]
    return stages


def _epilogue(result: Store, loops: Sequence[For], nest: Nest) -> Stmt:
    """What the nest does with an element, at the place where it is computed."""
    at_element = Substitute(dict(zip(nest.vars, (loop.var for loop in loops), strict=True))).stmt(nest.body)
    return _Replace(result.buffer, result.value).stmt(at_element)


class _Replace(ProgramRewriter):
    """Replaces every load of a buffer by one value."""

    def __init__(self, buffer: Buffer, value: Value) -> None:
        super().__init__()
        self._buffer, self._by = buffer, value

    def _value(self, value: Value) -> Value:
        return self._by if isinstance(value, Load) and value.buffer is self._buffer else super()._value(value)
