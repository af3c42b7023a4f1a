"""About how much one run of a statement takes, to see whether threads are worth starting for it.

The unit is a machine instruction on a scalar or a vector: half a nanosecond, within a factor of two or so either way.
"""

from __future__ import annotations

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.op_costs import flops_of
from relaxlite.ir.program import (
    Allocate,
    Binary,
    CallLibrary,
    Cast,
    For,
    IfThenElse,
    LetIndex,
    Load,
    Seq,
    Stmt,
    Store,
    Unary,
    Value,
)
from relaxlite.ir.program_visitor import bound_symbols, stmt_values, walk_values
from relaxlite.ir.symbolic import SymExpr, SymVar, sym

_ANALYZER = Analyzer()
_UNKNOWN_EXTENT = 16  # iterations of a loop whose extent only the code around it knows


def work_of(stmt: Stmt) -> SymExpr:
    """Instructions of one run, in the symbols that the statement does not bind itself."""
    return _work(stmt, bound_symbols(stmt))


def _work(stmt: Stmt, inner: set[SymVar]) -> SymExpr:
    own = sym(sum(_value_work(v) for v in stmt_values(stmt)))
    if isinstance(stmt, Seq):
        return sum((_work(s, inner) for s in stmt.stmts), own)
    if isinstance(stmt, For):
        times = sym(1) if stmt.kind == "vectorized" else _outer(stmt.extent, inner)
        return times * _work(stmt.body, inner)
    if isinstance(stmt, IfThenElse):  # the first of several ways is the cheapest (tiles of several heights)
        return own + _work(stmt.then, inner)
    if isinstance(stmt, CallLibrary):
        return own + _outer(stmt.work, inner)
    if isinstance(stmt, LetIndex | Allocate):
        return own + _work(stmt.body, inner)
    return own + (1 if isinstance(stmt, Store) else 0) + (1 if isinstance(stmt, Store) and stmt.combine else 0)


def _outer(extent: SymExpr, inner: set[SymVar]) -> SymExpr:
    """The extent, or its upper bound where variables that are bound inside occur in it."""
    if inner.isdisjoint(extent.free_vars()):
        return extent
    _, upper = _ANALYZER.interval(extent)  # quick: this is an estimate
    return sym(_UNKNOWN_EXTENT if upper is None else upper)


def _value_work(value: Value) -> int:
    return sum(_operation_work(part) for part in walk_values(value))


def _operation_work(value: Value) -> int:
    if isinstance(value, Unary | Binary):
        return max(1, flops_of(value.op))
    return 1 if isinstance(value, Load | Cast) else 0
