"""The fast Walsh-Hadamard transform, in additions and subtractions alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Attr, Op, Sample, register
from relaxlite.ir.ops.scalars import Scalar
from relaxlite.ir.program import Allocate, Buffer, Stmt, Store, loops, seq
from relaxlite.ir.symbolic import SymExpr, as_int, sym
from relaxlite.ir.types import Type


@register
class WalshHadamard(Op):
    """Walsh-Hadamard transform of every `size` consecutive elements along the last axis; `size` is a power of two.

    The matrix is in Sylvester's order, H(1) = 1, H(2n) = [[H(n), H(n)], [H(n), -H(n)]], and not normalized: the
    transform of the transform is `size` times x. All rows take the same additions in the same order (Fino and Algazi,
    "Unified Matrix Treatment of the Fast Walsh-Hadamard Transform", 1976).
    """

    name = "walsh_hadamard"
    operands = ("x",)
    attrs: ClassVar[Mapping[str, Attr]] = {"size": Attr("int")}

    def infer(self, x: Expr, *, size: int) -> Type:
        ty = self.tensor(x, "x")
        if not dtypes.is_float(ty.dtype) or not ty.shape:
            self.fail(f"x must be of a float dtype and have an axis, got {ty}")
        width = as_int(ty.shape[-1])
        if size < 1 or size & (size - 1) or width is None or width % size:
            self.fail(f"size must be a power of two that divides the last axis, which is known, got {size} for {ty}")
        return ty

    def lower(self, x: Buffer, *, out: Buffer, size: int) -> Stmt:
        width = x.shape[-1]
        spans = [size >> k for k in range(1, size.bit_length())] or [0]

        def row(*i: SymExpr) -> Stmt:
            buffers = [Buffer(f"mixed{k}", (width,), x.dtype, "local") for k in range(len(spans) - 1)]
            stage_rows = [(x, i), *((buffer, ()) for buffer in buffers), (out, i)]
            stages = [
                _butterfly_stage(source, to, width, span)
                for span, source, to in zip(spans, stage_rows, stage_rows[1:], strict=False)
            ]
            body = seq(*stages)
            for buffer in reversed(buffers):
                body = Allocate(buffer, body)
            return body

        return loops("iklmn", x.shape[:-1], row)

    def reference(self, x: Any, *, size: int) -> Any:
        runs = (*x.shape[:-1], x.shape[-1] // size)
        result, span = x.astype(np.float64), size // 2
        while span:
            pairs = result.reshape(*runs, size // (2 * span), 2, span)
            sums = (pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :])
            result, span = np.stack(sums, -2).reshape(x.shape), span // 2
        return result.astype(x.dtype)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 3, 16),), {"size": 16})
        yield Sample((("n", 24),), {"size": 8})
        yield Sample((("n", 2),), {"size": 2})
        yield Sample(((5,),), {"size": 1})


BufferRow = tuple[Buffer, tuple[SymExpr, ...]]  # a row of a buffer: buffer, leading indices


def _butterfly_stage(source: BufferRow, to: BufferRow, width: SymExpr, span: int) -> Stmt:
    """One butterfly stage: sums and differences of elements `span` apart; a span of 0 copies the row."""
    (x, i), (y, o) = source, to

    def load(at: SymExpr) -> Scalar:
        place = (*i, at)
        return Scalar(x[place])

    def store(at: SymExpr, value: Scalar) -> Stmt:
        return Store(y, (*o, at), value.value)

    def pair(c: SymExpr, j: SymExpr) -> Stmt:
        low, high = c * (2 * span) + j, c * (2 * span) + j + span
        a, b = load(low), load(high)
        return seq(store(low, a + b), store(high, a - b))

    if not span:
        return loops("j", (width,), lambda j: store(j, load(j)))
    return loops("cj", (width // (2 * span), sym(span)), pair)
