"""What the values of a loop nest are, where they read nothing but constants: in NumPy, a few rows at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from relaxlite import dtypes
from relaxlite.ir import scalar_functions
from relaxlite.ir.expr import Array
from relaxlite.ir.program import Binary, Buffer, Cast, Compare, IndexValue, Literal, Load, Select, Unary, Value
from relaxlite.ir.symbolic import SymExpr, SymVar, evaluate
from relaxlite.records import dataclass

PARTS = (Load, Literal, IndexValue, Select, Cast, Unary, Binary, Compare)  # of which such values may consist
_ELEMENTS = 1 << 16  # computed at a time: they stay in the cache
Constants: TypeAlias = Mapping[Buffer, Array]


def matrix_of(value: Value, row: SymVar, column: SymVar, shape: tuple[int, int], constants: Constants) -> Array:
    """The value, of PARTS, in all rows and columns. Its loads have `column` as their last index or nowhere."""
    rows, columns = shape
    found, most = np.empty(shape, dtypes.to_numpy(value.dtype)), max(1, _ELEMENTS // max(columns, 1))
    with np.errstate(all="ignore"):
        for start in range(0, rows, most):
            some = range(start, min(start + most, rows))
            found[some.start : some.stop] = _Rows(row, column, some, constants).value(value)
    return found


@dataclass(frozen=True, slots=True)
class _Rows:
    row: SymVar
    column: SymVar
    some: range
    constants: Constants

    def value(self, value: Value) -> Array:
        """In these rows (len(rows), n), or what broadcasts to that."""
        if isinstance(value, Load):
            return self._load(value)
        if isinstance(value, Literal):
            return np.asarray(value.value, dtypes.to_numpy(value.dtype))
        if isinstance(value, IndexValue):
            return self._index(value.index).astype(dtypes.to_numpy(value.dtype))[:, None]
        if isinstance(value, Select):
            return np.where(*(self.value(part) for part in (value.cond, value.then, value.other)))
        if isinstance(value, Cast):
            return scalar_functions.cast(self.value(value.x), value.dtype)
        if isinstance(value, Unary):
            return scalar_functions.apply_unary(value.op, self.value(value.x))
        assert isinstance(value, Binary | Compare)
        apply = scalar_functions.apply_binary if isinstance(value, Binary) else scalar_functions.apply_compare
        return apply(value.op, self.value(value.a), self.value(value.b))

    def _load(self, load: Load) -> Array:
        array, is_row = self.constants[load.buffer], load.indices[-1:] == (self.column,)
        places = tuple(self._index(index) for index in (load.indices[:-1] if is_row else load.indices))
        if not places:
            return array
        found: Array = array[places]
        return found if is_row else found[:, None]

    def _index(self, index: SymExpr) -> Array:
        return np.array([evaluate(index, {self.row: k}) for k in self.some])
