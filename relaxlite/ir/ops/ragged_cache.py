"""Keys and values of past tokens in one tensor, of which each sequence of a batch fills another part."""

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
    """The first begins[b] rows of cache (b, h, p, width), then x (b, h, s, width), then zeros: (b, h, length, width).

    `begins` is of int64; begins[b] is at most p, and begins[b] + s at most `length` (a shape of one value).
    """

    name = "append_at"
    operands = ("cache", "x", "begins", "length")

    def infer(self, cache: Expr, x: Expr, begins: Expr, length: Expr) -> Type:
        ty, new, places = self.tensor(cache, "cache"), self.tensor(x, "x"), self.tensor(begins, "begins")
        if ty.rank != 4 or new.rank != 4 or places.rank != 1 or places.dtype != "int64":
            self.fail(f"cache, x and int64 begins must have ranks 4, 4 and 1, got {ty}, {new}, {places}")
        rows = self.shape(length, "length")
        if len(rows) != 1:
            self.fail(f"length must be one value, got {len(rows)}")
        assert ty.shape is not None and new.shape is not None and places.shape is not None
        batch, heads, _, width = ty.shape
        wanted = (batch, heads, new.shape[2], width)
        if new.dtype != ty.dtype or any(map(PROVER.can_prove_ne, new.shape, wanted)):
            self.fail(f"x must be {ty.dtype} of (batch, heads, s, width) as the cache {ty} has them, got {new}")
        if PROVER.can_prove_ne(places.shape[0], batch):
            self.fail(f"begins must hold one value for each sequence of the cache {ty}, got {places}")
        return TensorType.of((batch, heads, rows[0], width), ty.dtype)

    def lower(self, cache: Buffer, x: Buffer, begins: Buffer, length: Shape, *, out: Buffer) -> Stmt:
        begin, count = SymVar("begin", lower=None), x.shape[2]

        def element(b: SymExpr, h: SymExpr, j: SymExpr, d: SymExpr) -> Stmt:
            fits = (index(begin) >= 0) & (index(begin) <= cache.shape[2]) & (index(begin + count) <= out.shape[2])
            new = select(index(j) < begin + count, Scalar(x[b, h, j - begin, d]), Scalar(literal(0, x.dtype)))
            row = select(index(j) < begin, Scalar(cache[b, h, j, d]), new)
            message = "append_at: the new rows of a sequence, from where it begins on, do not fit"
            return LetIndex(begin, begins[b], seq(Check(fits.value, message), Store(out, (b, h, j, d), row.value)))

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
