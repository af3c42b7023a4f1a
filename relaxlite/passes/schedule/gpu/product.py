"""Sums of products as templates see them: out[g, i, j] = final(sum over r of a[g, i, r] * b[g, j, r]).

`rows` are the loops that only a depends on, `columns` those that only b depends on, `groups` those of both; each may be
several loops, which count as one flat loop, and so may the reduced loops. So a convolution is such a product, too: its
rows are output channels, its columns positions of images.
"""

from __future__ import annotations

from collections.abc import Sequence

from relaxlite.ir.program import Binary, Buffer, Check, For, IfThenElse, Literal, Load, Stmt, Value
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, walk_stmts, walk_values
from relaxlite.ir.symbolic import SymExpr, SymVar
from relaxlite.passes.loops.access import stride
from relaxlite.passes.loops.parallel import has_disjoint_writes
from relaxlite.passes.loops.pattern import Reduction, perfect_nest, reduction_of
from relaxlite.passes.loops.transforms import less
from relaxlite.passes.products.prologue import symbols_of
from relaxlite.passes.schedule.gpu.axes import flat_places, size_of
from relaxlite.records import dataclass


@dataclass(frozen=True, slots=True)
class Operand:
    """A factor of the products; `loops` are its rows or columns."""

    value: Value
    loops: tuple[For, ...]
    reduced: tuple[For, ...]

    @property
    def size(self) -> SymExpr:
        return size_of(self.loops)

    @property
    def is_along_reduced(self) -> bool:
        """Whether elements that lie side by side in memory are those of one row, not of neighboring rows."""
        read = [v for v in walk_values(self.value) if isinstance(v, Load)]
        return any(stride(load, self.reduced[-1].var) == 1 for load in read)


@dataclass(frozen=True, slots=True)
class Product:
    """A sum of products; see the docstring of the module."""

    a: Operand
    b: Operand
    groups: tuple[For, ...]
    reduced: tuple[For, ...]
    reduction: Reduction

    @property
    def depth(self) -> SymExpr:
        return size_of(self.reduced)

    def element(self, operand: Operand, group: SymExpr, number: SymExpr, depth: SymExpr) -> Value:
        """The value of an operand at a flat row or column and a flat place of the sum."""
        return Substitute(self._places(operand.loops, group, number, depth)).value(operand.value)

    def _places(self, loops: Sequence[For], group: SymExpr, number: SymExpr, depth: SymExpr) -> dict[SymVar, SymExpr]:
        places = flat_places(self.groups, group) | flat_places(loops, number)
        return places | flat_places(self.reduced, depth)

    def finish(self, group: SymExpr, row: SymExpr, column: SymExpr, total: Load) -> Stmt:
        """The statement behind the sum of an element, if the element exists."""
        places = flat_places(self.groups, group) | flat_places(self.a.loops, row) | flat_places(self.b.loops, column)
        final = _Total(self.reduction.element, total).stmt(self.reduction.final)
        final = Substitute(places, fresh=True).stmt(final)
        exists = Binary("and", less(row, self.a.size), less(column, self.b.size))
        return IfThenElse(exists, final)


class _Total(ProgramRewriter):
    """Replaces loads of the reduction's element."""

    def __init__(self, element: Buffer, total: Load) -> None:
        super().__init__()
        self._element, self._total = element, total

    def _value(self, value: Value) -> Value:
        if isinstance(value, Load) and value.buffer is self._element:
            return self._total
        return super()._value(value)


def product_of(stage: Stmt) -> Product | None:
    """Match a stage as a float32 sum of products that starts at 0; else None."""
    reduction = reduction_of(stage)
    if reduction is None or any(isinstance(s, Check) for s in walk_stmts(stage)):
        return None
    if not _is_sum(reduction) or not all(map(has_disjoint_writes, reduction.spatial)):
        return None
    value = reduction.update.value
    assert isinstance(value, Binary)
    reduced, spatial = perfect_nest(reduction.inner).loops, reduction.spatial
    in_a, in_b = (symbols_of(side) for side in (value.a, value.b))
    rows = tuple(loop for loop in spatial if loop.var in in_a and loop.var not in in_b)
    columns = tuple(loop for loop in spatial if loop.var in in_b and loop.var not in in_a)
    groups = tuple(loop for loop in spatial if loop.var in in_a and loop.var in in_b)
    if not rows or not columns or len(rows) + len(columns) + len(groups) < len(spatial):
        return None
    bound = {loop.var for loop in (*spatial, *reduced)}
    if any(not bound.isdisjoint(loop.extent.free_vars()) for loop in (*spatial, *reduced)):
        return None
    a, b = Operand(value.a, rows, reduced), Operand(value.b, columns, reduced)
    if spatial.index(rows[-1]) > spatial.index(columns[-1]):  # columns are what lies side by side in the result
        a, b = b, a
    return Product(a, b, groups, reduced, reduction)


def _is_sum(reduction: Reduction) -> bool:
    init, update = reduction.init, reduction.update
    starts_at_zero = isinstance(init.value, Literal) and init.value.value == 0
    is_product = isinstance(update.value, Binary) and update.value.op == "mul"
    is_float = update.combine == "add" and update.buffer.dtype == "float32"
    return starts_at_zero and is_product and is_float
