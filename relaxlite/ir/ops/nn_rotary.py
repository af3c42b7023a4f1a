"""Rotary position embedding (Su et al., "RoFormer", arXiv 2104.09864)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Attr, Op, Sample, register
from relaxlite.ir.ops.broadcast import PROVER, Shape, broadcast_index
from relaxlite.ir.ops.linalg import accumulator, to_accumulator_dtype
from relaxlite.ir.ops.scalars import Scalar, index, select
from relaxlite.ir.program import Buffer, Stmt, Value, compute
from relaxlite.ir.symbolic import SymExpr, as_int
from relaxlite.ir.types import Type


@register
class Rotary(Op):
    """Rotary position embedding: rotate pairs (a, b) of elements of each row of x (..., d) by angles.

        a' = a * cos - b * sin        b' = b * cos + a * sin

    A pair is (i, i + d/2), or (2*i, 2*i + 1) if `interleaved`. cos and sin broadcast to x; their rows hold one value
    per element (d) or per pair (d / 2). Half-precision floats compute in float32.
    """

    name = "rotary"
    operands = ("x", "cos", "sin")
    attrs: ClassVar = {"interleaved": Attr("bool", False)}

    def infer(self, x: Expr, cos: Expr, sin: Expr, *, interleaved: bool) -> Type:
        ty, shape = self.tensor(x, "x"), self.tensor(x, "x").shape or ()
        width = as_int(shape[-1]) if shape else None
        if width is None or width % 2 or not dtypes.is_float(ty.dtype):
            self.fail(f"x must be of floats, with rows of a constant, even width, got {ty}")
        tables = [self.tensor(t, name) for t, name in ((cos, "cos"), (sin, "sin"))]
        for name, table in zip(("cos", "sin"), tables, strict=True):
            dims = table.shape or ()
            if table.dtype != ty.dtype or not dims or len(dims) > len(shape):
                self.fail(f"{name} must broadcast to x, {ty}, got {table}")
            if as_int(dims[-1]) not in (width, width // 2) or dims[-1] is not (tables[0].shape or ())[-1]:
                self.fail(f"rows of cos and sin must both hold {width} or {width // 2} elements, {name} is {table}")
            for dim, full in zip(reversed(dims[:-1]), reversed(shape[:-1]), strict=False):
                if as_int(dim) != 1 and not PROVER.can_prove_equal(dim, full):
                    self.fail(f"{name} {table} is not known to broadcast to x, {ty}")
        return ty

    def lower(self, x: Buffer, cos: Buffer, sin: Buffer, *, out: Buffer, interleaved: bool) -> Stmt:
        half = (as_int(x.shape[-1]) or 0) // 2
        wide = accumulator(x.dtype)
        per_pair = as_int(cos.shape[-1]) == half and half > 0

        def read(buffer: Buffer, at: Shape) -> Scalar:
            return Scalar(buffer[at]).cast(wide)

        def rotated(i: Shape, *, is_first: bool) -> Scalar:
            *row, column = i
            step = 1 if interleaved else half
            pair = column // 2 if interleaved else column - (0 if is_first else half)
            table_indices = (*row, pair if per_pair else column)
            c, s = (read(t, _table_index(t, table_indices, x.shape)) for t in (cos, sin))
            other = read(x, (*row, column + step if is_first else column - step)) * s
            return read(x, i) * c - other if is_first else read(x, i) * c + other

        def element(*i: SymExpr) -> Value:
            is_first = index(i[-1] % 2).equals(0) if interleaved else index(i[-1]) < half
            return select(is_first, rotated(i, is_first=True), rotated(i, is_first=False)).cast(out.dtype).value

        return compute(out, element)

    def reference(self, x: Any, cos: Any, sin: Any, *, interleaved: bool) -> Any:
        wide, half = to_accumulator_dtype(x), x.shape[-1] // 2
        first, second = (wide[..., ::2], wide[..., 1::2]) if interleaved else (wide[..., :half], wide[..., half:])
        parts = []
        for sign, a, b in ((-1, first, second), (1, second, first)):
            c, s = (self._half(to_accumulator_dtype(t), sign < 0, half, interleaved) for t in (cos, sin))
            parts.append(a * c + sign * b * s)
        array = np.stack(parts, axis=-1).reshape(x.shape) if interleaved else np.concatenate(parts, axis=-1)
        return array.astype(x.dtype)

    @staticmethod
    def _half(table: Any, is_first: bool, half: int, interleaved: bool) -> Any:
        """Slice a table to the values for the first or for the second elements of pairs."""
        if table.shape[-1] == half:
            return table
        if interleaved:
            return table[..., 0 if is_first else 1 :: 2]
        return table[..., :half] if is_first else table[..., half:]

    def samples(self) -> Iterable[Sample]:
        yield Sample((("b", 2, "n", 8), ("n", 8), ("n", 8)))
        yield Sample((("b", "n", 3, 6), ("b", "n", 1, 3), ("n", 1, 3)))
        yield Sample((("n", 32), ("n", 16), (16,)), {"interleaved": True})
        yield Sample((("n", 6), ("n", 6), (1, 6)), {"interleaved": True})
        yield Sample((("n", 8), ("n", 8), ("n", 8)), dtypes=("float16",) * 3, tolerance=5e-3)


def _table_index(table: Buffer, at: Shape, shape: Shape) -> Shape:
    """Indices of a cos or sin table for element `at` of x, whose last index is already that of the table."""
    rows = broadcast_index(table.shape[:-1], at[:-1], shape[:-1])
    return (*rows, at[-1])
