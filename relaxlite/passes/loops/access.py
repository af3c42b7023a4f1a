"""How buffers are accessed: row-major offsets and their strides along loop variables."""

from __future__ import annotations

from collections.abc import Iterator

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.layout import flat_offset
from relaxlite.ir.program import IndexValue, Load, Stmt, Store
from relaxlite.ir.program_visitor import all_values, loads, stores
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, sym


def offset(access: Load | Store) -> SymExpr:
    """The row-major position of the accessed element, in elements."""
    return flat_offset(access.buffer.shape, access.indices)


def coefficient(expr: SymExpr, var: SymVar) -> SymExpr | None:
    """c in expr == c*var + rest, where neither c nor rest mention var; None if expr is not linear in var."""
    total = sym(0)
    for monomial, coef in expr.terms:
        others = [atom for atom in monomial if atom is not var]
        if any(var in atom.free_vars() for atom in others) or len(monomial) - len(others) > 1:
            return None
        if len(others) < len(monomial):
            term = sym(coef)
            for atom in others:
                term = term * atom
            total = total + term
    return total


def accesses(stmt: Stmt) -> Iterator[Load | Store]:
    """Every load and store inside."""
    yield from loads(stmt)
    yield from stores(stmt)


def stride(access: Load | Store, var: SymVar) -> int | None:
    """By how many elements the access moves per step of var; None if that is no constant."""
    found = coefficient(offset(access), var)
    return None if found is None else as_int(found)


def can_fuse(stmt: Stmt, outer: SymVar, inner: SymVar, extent: SymExpr) -> bool:
    """Whether every access moves along (outer, inner) as along one loop of both: its stride along `outer` is `extent`
    times that along `inner`. Then the fused index is linear again."""
    if outer in extent.free_vars():
        return False
    analyzer = Analyzer()
    for value in all_values(stmt):
        if isinstance(value, IndexValue) and {outer, inner} & set(value.index.free_vars()):
            return False
    for access in accesses(stmt):
        position = offset(access)
        a, b = coefficient(position, outer), coefficient(position, inner)
        if a is None or b is None or not analyzer.can_prove_equal(a, b * extent):
            return False
    return True
