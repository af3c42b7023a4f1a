"""Contiguous KV cache of a batch whose sequences have different lengths."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Op, Sample, register
from relaxlite.ir.ops.broadcast import PROVER, Shape
from relaxlite.ir.ops.linalg import equality_checks
from relaxlite.ir.ops.scalars import Scalar, index, literal, select
from relaxlite.ir.program import Buffer, Check, LetIndex, Stmt, Store, loops, seq
from relaxlite.ir.symbolic import SymExpr, SymVar
from relaxlite.ir.types import TensorType, Type


@register
class AppendAt(Op):
    """Append x (b, h, s, width) to cache (b, h, p, width) at a position per sequence: (b, h, length, width).

    Sequence b gives the first begins[b] rows of the cache, then x[b], then zeros. `begins` int64 (b,) is at most p, and
    begins[b] + s at most `length`, a shape of one value.
    """

    name = "append_at"
    operands = ("cache", "x", "begins", "length")

    def infer(self, cache: Expr, x: Expr, begins: Expr, length: Expr) -> Type:
        ty, x_type, begins_type = self.tensor(cache, "cache"), self.tensor(x, "x"), self.tensor(begins, "begins")
        if ty.rank != 4 or x_type.rank != 4 or begins_type.rank != 1 or begins_type.dtype != "int64":
            self.fail(f"cache, x and int64 begins must have ranks 4, 4 and 1, got {ty}, {x_type}, {begins_type}")
        rows = self.shape(length, "length")
        if len(rows) != 1:
            self.fail(f"length must be one value, got {len(rows)}")
        assert ty.shape is not None and x_type.shape is not None and begins_type.shape is not None
        batch, heads, _, width = ty.shape
        expected = (batch, heads, x_type.shape[2], width)
        if x_type.dtype != ty.dtype or any(map(PROVER.can_prove_ne, x_type.shape, expected)):
            self.fail(f"x must be {ty.dtype} of (batch, heads, s, width) as the cache {ty} has them, got {x_type}")
        if PROVER.can_prove_ne(begins_type.shape[0], batch):
            self.fail(f"begins must hold one value for each sequence of the cache {ty}, got {begins_type}")
        return TensorType.of((batch, heads, rows[0], width), ty.dtype)

    def lower(self, cache: Buffer, x: Buffer, begins: Buffer, length: Shape, *, out: Buffer) -> Stmt:
        begin, count = SymVar("begin", lower=None), x.shape[2]

        def element(b: SymExpr, h: SymExpr, j: SymExpr, d: SymExpr) -> Stmt:
            is_valid = (index(begin) >= 0) & (index(begin) <= cache.shape[2]) & (index(begin + count) <= out.shape[2])
            new = select(index(j) < begin + count, Scalar(x[b, h, j - begin, d]), Scalar(literal(0, x.dtype)))
            row = select(index(j) < begin, Scalar(cache[b, h, j, d]), new)
            message = "append_at: the new rows of a sequence, from where it begins on, do not fit"
            return LetIndex(begin, begins[b], seq(Check(is_valid.value, message), Store(out, (b, h, j, d), row.value)))

        checks = equality_checks(
            "append_at: the cache, x and begins differ in size",
            (x.shape[0], cache.shape[0]),
            (x.shape[1], cache.shape[1]),
            (x.shape[3], cache.shape[3]),
            (begins.shape[0], cache.shape[0]),
        )
        return seq(*checks, loops("bhjd", out.shape, element))

    def reference(self, cache: Any, x: Any, begins: Any, length: Any) -> Any:
        out = np.zeros((*cache.shape[:2], int(length[0]), cache.shape[3]), cache.dtype)
        for b, begin in enumerate(begins.tolist()):
            out[b, :, :begin] = cache[b, :, :begin]
            out[b, :, begin : begin + x.shape[2]] = x[b]
        return out

    def samples(self) -> Iterable[Sample]:
        def draw(limit: int) -> Any:
            return lambda shape, rng: rng.integers(0, limit + 1, shape)

        types = ("float32", "float32", "int64", "shape")
        yield Sample((("b", 3, 5, 4), ("b", 3, 2, 4), ("b",), (7,)), {}, types, make={2: draw(5)})
        yield Sample((("b", 1, 9, 16), ("b", 1, 3, 16), ("b",), (9,)), {}, types, make={2: draw(6)})
        yield Sample((("b", 2, 4, 3), ("b", 2, "n", 3), ("b",), (40,)), {}, ("float16", "float16", "int64", "shape"),
                     make={2: draw(4)})  # fmt: skip
