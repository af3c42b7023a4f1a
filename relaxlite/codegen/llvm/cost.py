"""How much work a loop is, as a formula over the symbols: whether threads are worth waking is decided when it runs.

The unit is about one cycle of a core: a vector instruction of arithmetic, half a vector loaded or stored.
"""

from __future__ import annotations

from collections.abc import Container

from relaxlite.ir.program import (
    Allocate,
    Binary,
    Cast,
    For,
    IfThenElse,
    LetIndex,
    Load,
    Seq,
    Stmt,
    Store,
    Unary,
)
from relaxlite.ir.program_visitor import stmt_values, walk_values
from relaxlite.ir.symbolic import SymExpr, SymVar, smax, sym

MEMORY = 2  # one access
ENOUGH = 5000  # cost of a chunk that is worth handing to another thread: about 1.5 us

_COSTLY_BINARY = {"div": 5, "pow": 40, "fmod": 40, "floormod": 40, "floordiv": 40, "truncdiv": 20, "atan2": 60}
_CHEAP_UNARY = ("neg", "not", "bitwise_not", "abs", "sign", "floor", "ceil", "round", "trunc", "isnan", "isinf")


def cost_of(stmt: Stmt, known: Container[SymVar]) -> SymExpr | None:
    """The cost of running a statement once, over the known symbols; None where it depends on something else."""
    if isinstance(stmt, For):
        inner = cost_of(stmt.body, known)
        if inner is None or any(v not in known for v in (*stmt.extent.free_vars(), *inner.free_vars())):
            return None
        return inner if stmt.kind == "vectorized" else stmt.extent * inner
    if isinstance(stmt, Seq):
        parts = [cost_of(s, known) for s in stmt.stmts]
        return None if any(p is None for p in parts) else sum((p for p in parts if p is not None), sym(0))
    if isinstance(stmt, Allocate | LetIndex):
        return cost_of(stmt.body, known)
    if isinstance(stmt, IfThenElse):
        sides = [cost_of(s, known) for s in (stmt.then, stmt.other) if s is not None]
        if any(s is None for s in sides):
            return None
        found = [s for s in sides if s is not None]
        return found[0] if len(found) == 1 else smax(*found)
    return sym(_own_cost(stmt))


def _own_cost(stmt: Stmt) -> int:
    total = MEMORY if isinstance(stmt, Store) else 0
    for root in stmt_values(stmt):
        for value in walk_values(root):
            if isinstance(value, Load):
                total += MEMORY
            elif isinstance(value, Unary):
                total += 1 if value.op in _CHEAP_UNARY else 12
            elif isinstance(value, Binary):
                total += _COSTLY_BINARY.get(value.op, 1)
            elif isinstance(value, Cast):
                total += 1
    return total
