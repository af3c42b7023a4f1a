"""Concatenation without copies: operands are computed directly in their range of the result.

    a = memory.alloc_tensor(shape(n))                   y = memory.alloc_tensor(shape(n + m))
    call(f, x, a)                                       a = memory.part(y, shape(0), shape(n))
    b = memory.alloc_tensor(shape(m))            =>     call(f, x, a)
    call(g, x, b)                                       b = memory.part(y, shape(n*4), shape(m))
    y = memory.alloc_tensor(shape(n + m))               call(g, x, b)
    call(concat, a, b, y)

Each operand must be a separate allocation of the same body that does not escape the function by itself. The sizes of
the result must be defined where the first operand is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field, replace

from relaxlite import dtypes
from relaxlite.ir.attributes import CONCATENATES
from relaxlite.ir.expr import (
    Binding,
    Block,
    Body,
    Call,
    ControlFlow,
    Expr,
    Function,
    GlobalVar,
    If,
    Let,
    Loop,
    MatchShape,
    ShapeValue,
    Var,
)
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.op import Op, get_op
from relaxlite.ir.program import TensorProgram
from relaxlite.ir.symbolic import SymExpr, SymVar, product, sym
from relaxlite.ir.types import TensorType, defined_symbols
from relaxlite.ir.visitor import inner_bodies
from relaxlite.passes.context import PassContext
from relaxlite.passes.memory.aliases import find_aliases
from relaxlite.records import dataclass


def join_parts(module: IRModule, context: PassContext) -> IRModule:
    """Allocate the operands of contiguous concatenations inside of the result, and remove the copies."""
    if not any(program.attrs.get(CONCATENATES) for program in module.programs().values()):
        return module
    definitions: dict[str, Definition] = dict(module)
    for name, function in module.functions().items():
        definitions[name] = _JoinParts(module, context, function).run()
    return module.updated(definitions)


@dataclass(slots=True)
class _Scope:
    """Symbols and allocations of a body, with the number of the binding that defines each (-1: outside of the body)."""

    symbols: dict[SymVar, int]
    allocations: dict[Var, int] = field(default_factory=dict)


class _JoinParts:
    def __init__(self, module: IRModule, context: PassContext, function: Function) -> None:
        self._module, self._context, self._function = module, context, function
        self._aliases = find_aliases(function, module)
        self._before: dict[Var, list[Binding]] = {}  # bindings to insert before the binding of a variable
        self._replacements: dict[Var, Binding | None] = {}  # replacement of a binding; None: removed
        self._joined: set[Var] = set()

    def run(self) -> Function:
        function = self._function
        self._plan(function.body, _defined(function.params))
        return replace(function, body=self._rewrite_body(function.body)) if self._replacements else function

    # Planning

    def _plan(self, body: Body, symbols: Iterable[SymVar]) -> None:
        scope = _Scope(dict.fromkeys(symbols, -1))
        for number, binding in enumerate(body.bindings()):
            value = binding.value if isinstance(binding, Let) else binding.source
            if isinstance(binding, MatchShape):
                scope.symbols.update(
                    dict.fromkeys((s for s in _symbols(binding.shape) if s not in scope.symbols), number)
                )
            if isinstance(value, Call) and isinstance(value.callee, Op) and value.callee.name == "memory.alloc_tensor":
                scope.allocations[binding.var] = number
            if isinstance(value, ControlFlow):
                inner = _defined(value.params) if isinstance(value, Loop) else ()
                for nested in inner_bodies(value):
                    self._plan(nested, (*scope.symbols, *inner))
            elif isinstance(value, Call) and isinstance(value.callee, GlobalVar):
                self._call(binding.var, value, value.callee.name, scope)

    def _call(self, at: Var, call: Call, name: str, scope: _Scope) -> None:
        program = self._module[name]
        joins = program.attrs.get(CONCATENATES) if isinstance(program, TensorProgram) else None
        if not isinstance(program, TensorProgram) or not joins or len(call.args) != len(program.params):
            return
        assert isinstance(joins, tuple)
        operands, out = [call.args[k] for k in joins], call.args[-1]  # type: ignore[index]
        assert isinstance(out, Var) and isinstance(out.ty, TensorType) and out.ty.shape is not None
        reason = self._obstacle(operands, out, scope)
        text = reason or "its operands are computed in their places"
        nbytes = product(out.ty.shape) * dtypes.itemsize(out.ty.dtype)
        self._context.decide("join_parts", f"{out.name} of {name}", reason is None, text, bytes=nbytes)
        if reason is None:
            self._join([owner for x in operands if (owner := self._owner(x)) is not None], out, at, scope)

    def _obstacle(self, operands: list[Expr], out: Var, scope: _Scope) -> str | None:
        """Reason against computing the operands in the result, or None."""
        owners: list[Var] = []
        for x in operands:
            if not isinstance(x, Var):
                return "an operand is a constant"
            owner = self._owner(x)
            if owner not in scope.allocations or owner in self._joined:
                return f"'{x.name}' has no memory of its own that this body allocates"
            if self._aliases.last_use(owner) >= self._aliases.end or self._aliases.is_carried(owner):
                return f"'{x.name}' leaves the body itself"
            owners.append(owner)
        if len(set(owners)) < len(owners):
            return "an operand comes twice"
        if out not in scope.allocations or out in self._joined:
            return "the result is not allocated in the same body"
        first = min(scope.allocations[owner] for owner in owners)
        assert isinstance(out.ty, TensorType) and out.ty.shape is not None
        late = [s.name for s in _symbols(out.ty.shape) if scope.symbols.get(s, first) >= first]
        return f"the size {late[0]} is not known yet where the first operand is computed" if late else None

    def _owner(self, x: Expr) -> Var | None:
        """The allocation whose whole memory the variable is; None if there is none."""
        roots = self._aliases.roots(x)
        owner = roots[0] if len(roots) == 1 else None
        return owner if isinstance(owner, Var) and _bytes(owner) is _bytes(x) is not None else None

    def _join(self, owners: list[Var], out: Var, at: Var, scope: _Scope) -> None:
        assert isinstance(out.ty, TensorType) and out.ty.shape is not None
        allocation = get_op("memory.alloc_tensor")(ShapeValue(out.ty.shape), dtype=out.ty.dtype)
        self._before[min(owners, key=lambda var: scope.allocations[var])] = [Let(out, allocation)]
        self._replacements |= {out: None, at: None}
        start = sym(0)
        for owner in owners:
            assert isinstance(owner.ty, TensorType) and owner.ty.shape is not None
            shape = ShapeValue(owner.ty.shape)
            part = get_op("memory.part")(out, ShapeValue((start,)), shape, dtype=owner.ty.dtype)
            self._replacements[owner] = Let(owner, part)
            start = start + product(owner.ty.shape) * dtypes.itemsize(owner.ty.dtype)
        self._joined.update((*owners, out))

    # Rewriting

    def _rewrite_body(self, body: Body) -> Body:
        blocks = []
        for block in body.blocks:
            bindings = [new for binding in block.bindings for new in self._binding(binding)]
            blocks.append(Block(tuple(bindings), block.is_dataflow))
        return Body(tuple(blocks), body.result)

    def _binding(self, binding: Binding) -> list[Binding]:
        new: Binding | None = self._replacements.get(binding.var, binding)
        if isinstance(new, Let) and isinstance(new.value, If):
            then_body, else_body = self._rewrite_body(new.value.then_body), self._rewrite_body(new.value.else_body)
            new = Let(new.var, replace(new.value, then_body=then_body, else_body=else_body))
        elif isinstance(new, Let) and isinstance(new.value, Loop):
            new = Let(new.var, replace(new.value, body=self._rewrite_body(new.value.body)))
        return [*self._before.get(binding.var, ()), *([new] if new is not None else [])]


def _bytes(x: Expr) -> SymExpr | None:
    if not isinstance(x.ty, TensorType) or x.ty.shape is None:
        return None
    return product(x.ty.shape) * dtypes.itemsize(x.ty.dtype)


def _defined(params: Iterable[Var]) -> tuple[SymVar, ...]:
    return tuple(s for p in params for s in defined_symbols(p.ty))


def _symbols(dims: Iterable[SymExpr]) -> Iterable[SymVar]:
    return (s for dim in dims for s in dim.free_vars())
