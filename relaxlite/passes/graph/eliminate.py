"""Common subexpressions and dead bindings."""

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
    """Bind equal pure expressions once. Does not look across the bodies of If and Loop."""
    return map_functions(module, lambda f: _EliminateCommon().function(f))


class _EliminateCommon(Rewriter):
    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[Hashable, Var] = {}

    def body(self, body: Body) -> Body:
        outer = self._seen
        self._seen = dict(outer)  # what dominates the body may be reused in it; what is bound inside ends with it
        result = super().body(body)
        self._seen = outer
        return result

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if isinstance(value, Call) and not _is_function_of_operands(value):
            return None
        key = _key(value)
        if key is None:
            return None
        found = self._seen.setdefault(key, var)
        return None if found is var or found.ty != var.ty else found


def _is_function_of_operands(call: Call) -> bool:
    """Pure, and no piece of memory: two allocations of equal shape are not one."""
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
    """Drop bindings that nothing uses. Run-time shape checks stay, and an If or a call that holds what stays."""
    lasting = _lasting(module)

    def live(function: Function) -> Function:
        body = _live_body(function.body, lasting)
        return function if body is function.body else replace(function, body=body)

    return map_functions(module, live)


def _lasting(module: IRModule) -> frozenset[str]:
    """The functions whose calls stay although nobody uses what they give."""
    lasting: frozenset[str] = frozenset()
    while True:
        found = frozenset(
            name for name, f in module.functions().items() if not all(_may_go(b, lasting) for b in f.body.bindings())
        )
        if found == lasting:
            return found
        lasting = found


def _live_body(body: Body, lasting: frozenset[str]) -> Body:
    live: set[Var] = set(used_vars(body.result))
    blocks: list[Block] = []
    changed = False
    for block in reversed(body.blocks):
        kept: list[Binding] = []
        for binding in reversed(block.bindings):
            new = _live_binding(binding, live, lasting)
            changed |= new is not binding
            if new is not None:
                kept.append(new)
                live.update(used_vars(new.value if isinstance(new, Let) else new.source))
        if kept:
            blocks.append(Block(tuple(reversed(kept)), block.is_dataflow))
    return Body(tuple(reversed(blocks)), body.result) if changed else body


def _live_binding(binding: Binding, live: set[Var], lasting: frozenset[str]) -> Binding | None:
    if isinstance(binding, MatchShape):
        return binding
    value = binding.value
    if binding.var not in live and _may_go(binding, lasting):
        return None
    if isinstance(value, If):
        then_body, else_body = _live_body(value.then_body, lasting), _live_body(value.else_body, lasting)
        if then_body is not value.then_body or else_body is not value.else_body:
            return Let(binding.var, replace(value, then_body=then_body, else_body=else_body))
    if isinstance(value, Loop) and (body := _live_body(value.body, lasting)) is not value.body:
        return Let(binding.var, replace(value, body=body))
    return binding


def _may_go(binding: Binding, lasting: frozenset[str]) -> bool:
    """A loop may not end, so it stays; a call of a program in destination-passing form fills its operands."""
    if isinstance(binding, MatchShape):
        return False
    value = binding.value
    if isinstance(value, Call):
        if isinstance(value.callee, Op):
            return value.callee.is_pure
        is_lasting = isinstance(value.callee, GlobalVar) and value.callee.name in lasting
        return not is_lasting and bool(getattr(value.ty, "fields", True))
    inner = (b for body in inner_bodies(value) for b in body.bindings())
    return not isinstance(value, Loop) and all(_may_go(b, lasting) for b in inner)
