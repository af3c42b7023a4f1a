"""Sink calls into the branch of an If that alone uses their results: they fuse there, the other branch skips them.

Only calls that cannot fail move: a run-time check would otherwise raise its error in one branch only.
"""

from __future__ import annotations

from dataclasses import replace

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.expr import Binding, Block, Body, Call, Function, GlobalVar, If, Let, Loop, MatchShape, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.program import Check, TensorProgram
from relaxlite.ir.program_visitor import walk_stmts
from relaxlite.ir.symbolic import product
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import body_uses, inner_bodies, map_functions, used_vars
from relaxlite.passes.context import PassContext


def sink_into_branches(module: IRModule, context: PassContext) -> IRModule:
    """Move calls whose results only one branch of an If uses into that branch."""

    def sunk(function: Function) -> Function:
        """The function with calls moved into branches."""
        body = _Sink(module, context).body(function.body)
        return function if body is function.body else replace(function, body=body)

    return map_functions(module, sunk)


class _Sink:
    """Rewriter of one function; visits bindings from the last to the first."""

    def __init__(self, module: IRModule, context: PassContext) -> None:
        self._module, self._context = module, context

    def body(self, body: Body) -> Body:
        """Move each movable call of a body into the only branch that uses it; the same object if none moves."""
        if not any(inner_bodies(b.value) for b in body.bindings() if isinstance(b, Let)):
            return body
        moved: dict[tuple[Binding, int], list[Binding]] = {}
        uses: dict[Var, list[tuple[Binding | None, int | None]]] = {}  # variable -> (binding, number of the branch)
        removed: set[Binding] = set()
        for var in used_vars(body.result):
            uses.setdefault(var, []).append((None, None))
        for binding in reversed(body.bindings()):
            sites = set(uses.get(binding.var, ()))
            site = next(iter(sites)) if len(sites) == 1 else None
            if site is not None and site[0] is not None and site[1] is not None and self._can_move(binding):
                moved.setdefault((site[0], site[1]), []).insert(0, binding)
                removed.add(binding)
                self._record_decision(binding, site[0], site[1])
                self._record_uses(binding, uses, site)
            else:
                self._record_uses(binding, uses, None)
        blocks = tuple(
            Block(tuple(self._rewrite_nested(b, moved) for b in block.bindings if b not in removed), block.is_dataflow)
            for block in body.blocks
        )
        return Body(tuple(b for b in blocks if b.bindings), body.result)

    def _record_uses(
        self, binding: Binding, uses: dict[Var, list[tuple[Binding | None, int | None]]], site: object
    ) -> None:
        """Record the variables that a binding uses, at its own position or in its branches."""
        value = binding.value if isinstance(binding, Let) else binding.source
        if site is not None:
            for var in used_vars(value):
                uses.setdefault(var, []).append(site)  # type: ignore[arg-type]
            return
        branches = (value.then_body, value.else_body) if isinstance(value, If) else ()
        for k, branch in enumerate(branches):
            for var in body_uses(branch):
                uses.setdefault(var, []).append((binding, k))
        for var in used_vars(value.cond if isinstance(value, If) else value):
            uses.setdefault(var, []).append((binding, None))

    def _can_move(self, binding: Binding) -> bool:
        value = binding.value if isinstance(binding, Let) else None
        if not isinstance(value, Call):
            return False
        if isinstance(value.callee, Op):
            return value.callee.name == "reshape" and _keeps_num_elements(value)
        program = self._module.get(value.callee.name) if isinstance(value.callee, GlobalVar) else None
        return isinstance(program, TensorProgram) and not any(isinstance(s, Check) for s in walk_stmts(program.body))

    def _record_decision(self, binding: Binding, into: Binding, branch: int) -> None:
        which = "else" if branch else "then"
        subject = f"{binding.var.name} into the {which} branch of {into.var.name}"
        self._context.decide("sink_into_branches", subject, True, "only that branch uses it")

    def _rewrite_nested(self, binding: Binding, moved: dict[tuple[Binding, int], list[Binding]]) -> Binding:
        """A binding with rewritten nested bodies, each after the calls that moved into it."""
        if isinstance(binding, MatchShape) or not inner_bodies(binding.value):
            return binding
        value = binding.value
        if isinstance(value, Loop):
            return Let(binding.var, replace(value, body=self.body(value.body)))
        assert isinstance(value, If)
        branches = []
        for k, branch in enumerate((value.then_body, value.else_body)):
            sunk = moved.get((binding, k))
            blocks = branch.blocks if sunk is None else (Block(tuple(sunk)), *branch.blocks)
            branches.append(self.body(Body(blocks, branch.result)))
        then_body, else_body = branches
        return Let(binding.var, replace(value, then_body=then_body, else_body=else_body))


def _keeps_num_elements(call: Call) -> bool:
    """Whether a reshape provably keeps the number of elements."""
    before, after = call.args[0].ty, call.ty
    if not isinstance(before, TensorType) or not isinstance(after, TensorType):
        return False
    if before.shape is None or after.shape is None:
        return False
    return Analyzer().can_prove_equal(product(before.shape), product(after.shape))
