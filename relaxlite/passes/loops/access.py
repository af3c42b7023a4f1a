"""Row-major offsets of buffer accesses, and their strides along loop variables."""

from __future__ import annotations

from collections.abc import Iterator

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.layout import flat_offset
from relaxlite.ir.program import IndexValue, Load, Stmt, Store
from relaxlite.ir.program_visitor import all_values, loads, stores
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, sym


def offset(access: Load | Store) -> SymExpr:
    """The row-major offset of the accessed element from the start of its buffer, in elements."""
    return flat_offset(access.buffer.shape, access.indices)


def coefficient(expr: SymExpr, var: SymVar) -> SymExpr | None:
    """The coefficient c of `var` in expr == c*var + rest; None if `expr` is not linear in `var`.

    Neither c nor rest contains `var`.
    """
    total = sym(0)
    for monomial, coef in expr.terms:
        factors = [atom for atom in monomial if atom is not var]
        if any(var in atom.free_vars() for atom in factors) or len(monomial) - len(factors) > 1:
            return None
        if len(factors) < len(monomial):
            term = sym(coef)
            for atom in factors:
                term = term * atom
            total = total + term
    return total


def accesses(stmt: Stmt) -> Iterator[Load | Store]:
    """Every load and store in a statement: loads first, then stores."""
    yield from loads(stmt)
    yield from stores(stmt)


def stride(access: Load | Store, var: SymVar) -> int | None:
    """The stride of an access along a loop variable, in elements per iteration; None if it is not a constant."""
    step = coefficient(offset(access), var)
    return None if step is None else as_int(step)


def can_fuse(stmt: Stmt, outer: SymVar, inner: SymVar, extent: SymExpr) -> bool:
    """Whether all accesses of a nest stay linear when loops `outer` and `inner` are fused.

    That holds if the stride along `outer` is the stride along `inner` times `extent`, the extent of the inner loop.
    """
    if outer in extent.free_vars():
        return False
    analyzer = Analyzer()
    for value in all_values(stmt):
        if isinstance(value, IndexValue) and {outer, inner} & set(value.index.free_vars()):
            return False
    for access in accesses(stmt):
        position = offset(access)
        outer_stride, inner_stride = coefficient(position, outer), coefficient(position, inner)
        if (
            outer_stride is None
            or inner_stride is None
            or not analyzer.can_prove_equal(outer_stride, inner_stride * extent)
        ):
            return False
    return True
