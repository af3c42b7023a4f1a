"""Decomposition of composite ops into simpler ops (`Op.decompose`)."""

from __future__ import annotations

from relaxlite.errors import PassError
from relaxlite.ir.expr import Call, Expr, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.visitor import Rewriter, map_functions

MAX_ROUNDS = 100


def decompose(module: IRModule) -> IRModule:
    """Replace composite ops by the simpler ops that they consist of, until no composite op is left.

    Raises PassError if that takes more than `MAX_ROUNDS` rounds.
    """
    for _ in range(MAX_ROUNDS):
        after = map_functions(module, _Decompose().function)
        if after is module:
            return module
        module = after
    raise PassError(f"after {MAX_ROUNDS} rounds there is still an op to take apart: does one decompose into itself?")


class _Decompose(Rewriter):
    def may_rewrite(self, value: Expr) -> bool:
        if not isinstance(value, Call) or not isinstance(value.callee, Op):
            return False
        return type(value.callee).decompose is not Op.decompose

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not self.may_rewrite(value):
            return None
        assert isinstance(value, Call) and isinstance(value.callee, Op)
        return value.callee.decompose(self.bb, value)
