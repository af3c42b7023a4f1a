"""Cost model of statements, which decides how many chunks a parallel loop has.

The unit is one machine instruction, scalar or vector: about half a nanosecond (docs/measurements/backend.md).
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
_UNKNOWN_EXTENT = 16  # assumed for loops whose extent has no known bound


def work_of(stmt: Stmt) -> SymExpr:
    """Estimated instructions of one execution, in symbols that are free in the statement."""
    return _stmt_work(stmt, bound_symbols(stmt))


def _stmt_work(stmt: Stmt, inner: set[SymVar]) -> SymExpr:
    own = sym(sum(_value_work(v) for v in stmt_values(stmt)))
    if isinstance(stmt, Seq):
        return sum((_stmt_work(s, inner) for s in stmt.stmts), own)
    if isinstance(stmt, For):
        trip_count = sym(1) if stmt.kind == "vectorized" else _free_extent(stmt.extent, inner)
        return trip_count * _stmt_work(stmt.body, inner)
    if isinstance(stmt, IfThenElse):  # the first alternative is the cheapest: tiles of several heights
        return own + _stmt_work(stmt.then, inner)
    if isinstance(stmt, CallLibrary):
        return own + _free_extent(stmt.work, inner)
    if isinstance(stmt, LetIndex | Allocate):
        return own + _stmt_work(stmt.body, inner)
    return own + (1 if isinstance(stmt, Store) else 0) + (1 if isinstance(stmt, Store) and stmt.combine else 0)


def _free_extent(extent: SymExpr, inner: set[SymVar]) -> SymExpr:
    """The extent, or an upper bound where it contains variables that the statement binds."""
    if inner.isdisjoint(extent.free_vars()):
        return extent
    _, upper = _ANALYZER.interval(extent)  # cheap, as an estimate suffices
    return sym(_UNKNOWN_EXTENT if upper is None else upper)


def _value_work(value: Value) -> int:
    return sum(_operation_work(part) for part in walk_values(value))


def _operation_work(value: Value) -> int:
    if isinstance(value, Unary | Binary):
        return max(1, flops_of(value.op))
    return 1 if isinstance(value, Load | Cast) else 0
