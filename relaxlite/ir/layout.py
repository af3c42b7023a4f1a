"""Row-major offsets of buffer elements."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.symbolic import Division, SymExpr, sym

_ANALYZER = Analyzer()


def flat_offset(shape: Iterable[SymExpr], indices: Iterable[SymExpr]) -> SymExpr:
    """Row-major offset of an element, in elements.

    Indices of fused loops contain t // m and t % m of one loop variable; t // m * m + t % m simplifies to t.
    """
    return _flat_offset(tuple(shape), tuple(indices))


@functools.lru_cache(maxsize=1024)  # many passes compute strides of the same accesses
def _flat_offset(shape: tuple[SymExpr, ...], indices: tuple[SymExpr, ...]) -> SymExpr:
    total, divides = sym(0), False
    for dim, index in zip(shape, indices, strict=True):
        total = total * dim + index
        divides = divides or _divides(index)
    return _ANALYZER.simplify(total) if divides else total


def _divides(expr: SymExpr) -> bool:
    return any(isinstance(atom, Division) for monomial, _ in expr.terms for atom in monomial)
