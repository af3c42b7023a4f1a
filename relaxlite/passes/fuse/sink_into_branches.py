"""Move what only one branch of an If uses into that branch: there it fuses, and the other branch does not pay for it.

Only calls that cannot fail move: one with a run-time check would raise its error in one branch alone.
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
    """Move what only one branch of an If uses into that branch."""

    def sunk(function: Function) -> Function:
        body = _Sink(module, context).body(function.body)
        return function if body is function.body else replace(function, body=body)

    return map_functions(module, sunk)


class _Sink:
    def __init__(self, module: IRModule, context: PassContext) -> None:
        self._module, self._context = module, context

    def body(self, body: Body) -> Body:
        """The body with each movable call inside of the one branch that uses it; the same object where none is."""
        if not any(inner_bodies(b.value) for b in body.bindings() if isinstance(b, Let)):
            return body
        moved: dict[tuple[Binding, int], list[Binding]] = {}
        uses: dict[Var, list[tuple[Binding | None, int | None]]] = {}  # variable -> (binding, branch that it is in)
        gone: set[Binding] = set()
        for var in used_vars(body.result):
            uses.setdefault(var, []).append((None, None))
        for binding in reversed(body.bindings()):
            places = set(uses.get(binding.var, ()))
            place = next(iter(places)) if len(places) == 1 else None
            if place is not None and place[0] is not None and place[1] is not None and self._can_move(binding):
                moved.setdefault((place[0], place[1]), []).insert(0, binding)
                gone.add(binding)
                self._note(binding, place[0], place[1])
                self._use(binding, uses, place)
            else:
                self._use(binding, uses, None)
        blocks = tuple(
            Block(tuple(self._inner(b, moved) for b in block.bindings if b not in gone), block.is_dataflow)
            for block in body.blocks
        )
        return Body(tuple(b for b in blocks if b.bindings), body.result)

    def _use(self, binding: Binding, uses: dict[Var, list[tuple[Binding | None, int | None]]], place: object) -> None:
        """Note what a binding uses, where it stands or in the branches that it has."""
        value = binding.value if isinstance(binding, Let) else binding.source
        if place is not None:
            for var in used_vars(value):
                uses.setdefault(var, []).append(place)  # type: ignore[arg-type]
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
            return value.callee.name == "reshape" and _keeps_count(value)
        program = self._module.get(value.callee.name) if isinstance(value.callee, GlobalVar) else None
        return isinstance(program, TensorProgram) and not any(isinstance(s, Check) for s in walk_stmts(program.body))

    def _note(self, binding: Binding, into: Binding, branch: int) -> None:
        which = "else" if branch else "then"
        subject = f"{binding.var.name} into the {which} branch of {into.var.name}"
        self._context.decide("sink_into_branches", subject, True, "only that branch uses it")

    def _inner(self, binding: Binding, moved: dict[tuple[Binding, int], list[Binding]]) -> Binding:
        """A binding with its nested bodies rewritten, what moved into them in front."""
        if isinstance(binding, MatchShape) or not inner_bodies(binding.value):
            return binding
        value = binding.value
        if isinstance(value, Loop):
            return Let(binding.var, replace(value, body=self.body(value.body)))
        assert isinstance(value, If)
        branches = []
        for k, branch in enumerate((value.then_body, value.else_body)):
            front = moved.get((binding, k))
            blocks = branch.blocks if front is None else (Block(tuple(front)), *branch.blocks)
            branches.append(self.body(Body(blocks, branch.result)))
        then_body, else_body = branches
        return Let(binding.var, replace(value, then_body=then_body, else_body=else_body))


def _keeps_count(call: Call) -> bool:
    """Whether a reshape is proven to have as many elements as its operand."""
    before, after = call.args[0].ty, call.ty
    if not isinstance(before, TensorType) or not isinstance(after, TensorType):
        return False
    if before.shape is None or after.shape is None:
        return False
    return Analyzer().can_prove_equal(product(before.shape), product(after.shape))
