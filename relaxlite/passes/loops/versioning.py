"""Loop versioning: a version without clamped indices for broadcasting that is only known at run time.

An operand whose size d equals the extent n of a loop or 1 is loaded at min(i, d - 1), which is i if n <= d:

    for i in n: out[i] = x[min(i, d - 1)]   =>   if n <= d: for i in n: out[i] = x[i]
                                                 else:      for i in n: out[i] = x[min(i, d - 1)]
"""

from __future__ import annotations

from functools import reduce

from relaxlite.ir.program import For, Load, Stmt, Store
from relaxlite.ir.program_visitor import ProgramRewriter, bound_symbols, loads, stores, walk_stmts
from relaxlite.ir.symbolic import Min, SymExpr, SymVar, extremum_operands, map_atoms, smin

ClampExtents = dict[tuple[SymVar, SymExpr], SymExpr]


def clamped_indices(stmt: Stmt) -> ClampExtents:
    """Map the clamped indices min(variable, limit) of a statement, as (variable, limit), to the extents of their loops.

    Limits and extents that depend on variables bound inside of the statement are left out.
    """
    inner = bound_symbols(stmt)
    extents = {s.var: s.extent for s in walk_stmts(stmt) if isinstance(s, For) and _is_outer(s.extent, inner)}
    clamps: ClampExtents = {}
    accesses: list[Load | Store] = [*loads(stmt), *stores(stmt)]
    for access in accesses:
        for index in access.indices:
            for var, limit in _clamps(index):
                if var in extents and _is_outer(limit, inner):
                    clamps[var, limit] = extents[var]
    return clamps


def _is_outer(expr: SymExpr, inner: set[SymVar]) -> bool:
    return inner.isdisjoint(expr.free_vars())


def _clamps(index: SymExpr) -> list[tuple[SymVar, SymExpr]]:
    atoms = [atom for monomial, _ in index.terms for atom in monomial if isinstance(atom, Min)]
    return [pair for atom in atoms for pair in _splits(atom)]


def _splits(atom: Min) -> list[tuple[SymVar, SymExpr]]:
    """min(v, a, b) as (v, min(a, b)), for every operand v that is a variable."""
    parts = extremum_operands(atom)
    return [(v, reduce(smin, [p for p in parts if p is not v])) for v in parts if isinstance(v, SymVar)]


class Unclamp(ProgramRewriter):
    """Replaces clamped indices min(variable, limit) by the variable."""

    def __init__(self, clamps: ClampExtents) -> None:
        super().__init__()
        self._clamps = clamps

    def index(self, expr: SymExpr) -> SymExpr:
        return map_atoms(expr, self._change)

    def _change(self, atom: SymExpr) -> SymExpr:
        if isinstance(atom, Min):
            for pair in _splits(atom):
                if pair in self._clamps:
                    return pair[0]
        return atom
