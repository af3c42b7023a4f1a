"""Conditions of windows over an image, shared by both layouts: which taps lie inside the image.

Tiles in the middle of an image are scheduled without conditions, tiles at its borders with masked loads
(windows_nhwc.py: channels last; windows_nchw.py: channels first).
"""

from __future__ import annotations

from collections.abc import Sequence

from relaxlite.ir.ops.scalars import identity
from relaxlite.ir.program import Binary, Compare, IndexValue, Literal, Load, Select, Store, Value
from relaxlite.ir.program_visitor import ProgramRewriter
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, sym
from relaxlite.passes.loops.access import coefficient
from relaxlite.passes.loops.transforms import less


def symbols_in(indices: Sequence[SymExpr]) -> set[SymVar]:
    return {v for index in indices for v in index.free_vars()}


def slope(expr: SymExpr, var: SymVar) -> int | None:
    result = coefficient(expr, var)
    return None if result is None else as_int(result)


def conditions_of(update: Store) -> tuple[list[SymExpr], Select | None] | None:
    """Return (terms, select): the update's one Select takes its value where all terms are >= 0; no effect elsewhere.

    select is None where the update has no Select. None: the update has another form.
    """
    value = update.value
    factor = isinstance(value, Binary) and value.op == "mul" and update.combine == "add"
    candidates = (value.a, value.b) if factor else (value,)  # type: ignore[union-attr]
    selects = [v for v in candidates if isinstance(v, Select)]
    if not selects:
        return ([], None) if not _has_select(value) else None
    (select, *other_selects) = selects
    neutral = identity(update.combine or "add", update.buffer.dtype)
    if (
        other_selects
        or not isinstance(select.other, Literal)
        or select.other.value != neutral.value
        or _has_select(select.then)
    ):
        return None
    terms = _terms(select.cond)
    return None if terms is None else (terms, select)


def _has_select(value: Value) -> bool:
    finder = _FindSelect()
    finder.value(value)
    return finder.found


class _FindSelect(ProgramRewriter):
    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def _value(self, value: Value) -> Value:
        self.found = self.found or isinstance(value, Select)
        return super()._value(value)


def _terms(cond: Value) -> list[SymExpr] | None:
    """Return expressions that are all >= 0 if and only if the condition holds; None: it has another form."""
    if isinstance(cond, Binary) and cond.op == "and":
        left, right = _terms(cond.a), _terms(cond.b)
        return None if left is None or right is None else left + right
    if not isinstance(cond, Compare):
        return None
    a, b = _as_index(cond.a), _as_index(cond.b)
    if a is None or b is None:
        return None
    return {"ge": [a - b], "gt": [a - b - 1], "le": [b - a], "lt": [b - a - 1]}.get(cond.op)


def _as_index(value: Value) -> SymExpr | None:
    if isinstance(value, Literal) and value.dtype == "int64" and isinstance(value.value, int):
        return sym(value.value)
    return value.index if isinstance(value, IndexValue) else None


class Without(ProgramRewriter):
    """Replaces a Select by another value, by default the value under its condition."""

    def __init__(self, select: Select, by: Value | None = None) -> None:
        super().__init__()
        self._select, self._by = select, select.then if by is None else by

    def _value(self, value: Value) -> Value:
        return self._by if value is self._select else super()._value(value)


def all_inside(terms: Sequence[SymExpr]) -> Value:
    """Return the condition that all expressions are >= 0."""
    cond: Value | None = None
    for term in terms:
        test = less(-1, term)
        cond = test if cond is None else Binary("and", cond, test)
    return cond if cond is not None else Literal(True, "bool")


class Masked(ProgramRewriter):
    """Masks the loads that depend on a loop variable by a condition."""

    def __init__(self, var: SymVar, cond: Value) -> None:
        super().__init__()
        self._var, self._cond = var, cond

    def _value(self, value: Value) -> Value:
        if isinstance(value, Load) and self._var in symbols_in(value.indices):
            return Select(self._cond, value, Literal(0, value.dtype))
        return super()._value(value)
