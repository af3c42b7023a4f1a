"""Evaluate at compile time the values of a loop nest that reads only constants, with NumPy and a few rows at a time."""

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

EVALUABLE_NODES = (Load, Literal, IndexValue, Select, Cast, Unary, Binary, Compare)  # the nodes that can be evaluated
_ELEMENTS = 1 << 16  # of one block of rows: intermediates stay in cache
Constants: TypeAlias = Mapping[Buffer, Array]


def evaluate_matrix(value: Value, row: SymVar, column: SymVar, shape: tuple[int, int], constants: Constants) -> Array:
    """A value as an array of `shape` (rows, columns) of its dtype, evaluated for every row and column.

    The value consists of nodes in `EVALUABLE_NODES`. Loads contain `column` as their last index or not at all.
    """
    rows, columns = shape
    result, block_rows = np.empty(shape, dtypes.to_numpy(value.dtype)), max(1, _ELEMENTS // max(columns, 1))
    with np.errstate(all="ignore"):
        for start in range(0, rows, block_rows):
            block = range(start, min(start + block_rows, rows))
            result[block.start : block.stop] = _RowEvaluator(row, column, block, constants).value(value)
    return result


@dataclass(frozen=True, slots=True)
class _RowEvaluator:
    """Evaluates values for a block of rows."""

    row: SymVar
    column: SymVar
    block: range
    constants: Constants

    def value(self, value: Value) -> Array:
        """The value as an array that broadcasts to (rows of the block, columns)."""
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
        indices = tuple(self._index(index) for index in (load.indices[:-1] if is_row else load.indices))
        if not indices:
            return array
        elements: Array = array[indices]
        return elements if is_row else elements[:, None]

    def _index(self, index: SymExpr) -> Array:
        return np.array([evaluate(index, {self.row: k}) for k in self.block])
