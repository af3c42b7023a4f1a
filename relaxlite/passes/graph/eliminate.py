"""Common subexpression elimination and dead code elimination on graphs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from relaxlite.ir.expr import (
    Binding,
    Block,
    Body,
    Call,
    Constant,
    Expr,
    Function,
    GlobalVar,
    If,
    Let,
    Loop,
    MatchShape,
    ShapeValue,
    Tuple,
    TupleGetItem,
    Var,
)
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.text import attrs_key
from relaxlite.ir.visitor import Rewriter, inner_bodies, map_functions, used_vars


def eliminate_common(module: IRModule) -> IRModule:
    """Bind equal pure expressions once (common subexpression elimination).

    The bodies of If and Loop reuse values from outside, not from each other.
    """
    return map_functions(module, lambda f: _EliminateCommon().function(f))


class _EliminateCommon(Rewriter):
    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[Hashable, Var] = {}

    def body(self, body: Body) -> Body:
        outer = self._seen
        self._seen = dict(outer)  # values that dominate the body are reused in it; its own go out of scope with it
        result = super().body(body)
        self._seen = outer
        return result

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if isinstance(value, Call) and not _is_function_of_operands(value):
            return None
        key = _key(value)
        if key is None:
            return None
        first = self._seen.setdefault(key, var)
        return None if first is var or first.ty != var.ty else first


def _is_function_of_operands(call: Call) -> bool:
    """Whether a call of an op is pure and no allocation: allocations of equal shape are distinct."""
    return isinstance(call.callee, Op) and call.callee.is_pure and not call.callee.name.startswith(("memory.", "vm."))


def _key(value: Expr) -> Hashable:
    if isinstance(value, Call):
        return (value.callee, tuple(map(_operand_key, value.args)), attrs_key(value.attrs), value.sym_args, value.ty)
    if isinstance(value, TupleGetItem):
        return ("item", _operand_key(value.value), value.index)
    return tuple(map(_operand_key, value.fields)) if isinstance(value, Tuple) else None


def _operand_key(operand: Expr) -> Hashable:
    if isinstance(operand, Constant) and operand.value.size <= 16:
        return (operand.ty, operand.value.tobytes())
    return operand.values if isinstance(operand, ShapeValue) else operand


def eliminate_dead(module: IRModule) -> IRModule:
    """Remove unused bindings (dead code elimination).

    Bindings with effects stay: runtime shape checks, loops, impure calls, and an If or a call that contains one.
    """
    effectful = _effectful_functions(module)

    def live(function: Function) -> Function:
        body = _live_body(function.body, effectful)
        return function if body is function.body else replace(function, body=body)

    return map_functions(module, live)


def _effectful_functions(module: IRModule) -> frozenset[str]:
    """The functions with effects, whose calls stay even if their results are unused: a fixed point over the call
    graph."""
    effectful: frozenset[str] = frozenset()
    while True:
        result = frozenset(
            name
            for name, f in module.functions().items()
            if not all(_is_removable(b, effectful) for b in f.body.bindings())
        )
        if result == effectful:
            return result
        effectful = result


def _live_body(body: Body, effectful: frozenset[str]) -> Body:
    live: set[Var] = set(used_vars(body.result))
    blocks: list[Block] = []
    changed = False
    for block in reversed(body.blocks):
        remaining: list[Binding] = []
        for binding in reversed(block.bindings):
            new = _live_binding(binding, live, effectful)
            changed |= new is not binding
            if new is not None:
                remaining.append(new)
                live.update(used_vars(new.value if isinstance(new, Let) else new.source))
        if remaining:
            blocks.append(Block(tuple(reversed(remaining)), block.is_dataflow))
    return Body(tuple(reversed(blocks)), body.result) if changed else body


def _live_binding(binding: Binding, live: set[Var], effectful: frozenset[str]) -> Binding | None:
    if isinstance(binding, MatchShape):
        return binding
    value = binding.value
    if binding.var not in live and _is_removable(binding, effectful):
        return None
    if isinstance(value, If):
        then_body, else_body = _live_body(value.then_body, effectful), _live_body(value.else_body, effectful)
        if then_body is not value.then_body or else_body is not value.else_body:
            return Let(binding.var, replace(value, then_body=then_body, else_body=else_body))
    if isinstance(value, Loop) and (body := _live_body(value.body, effectful)) is not value.body:
        return Let(binding.var, replace(value, body=body))
    return binding


def _is_removable(binding: Binding, effectful: frozenset[str]) -> bool:
    """Whether an unused binding can be removed: not loops, which may not terminate, nor programs in destination-passing
    style, which write their operands."""
    if isinstance(binding, MatchShape):
        return False
    value = binding.value
    if isinstance(value, Call):
        if isinstance(value.callee, Op):
            return value.callee.is_pure
        has_effects = isinstance(value.callee, GlobalVar) and value.callee.name in effectful
        return not has_effects and bool(getattr(value.ty, "fields", True))
    inner = (b for body in inner_bodies(value) for b in body.bindings())
    return not isinstance(value, Loop) and all(_is_removable(b, effectful) for b in inner)
