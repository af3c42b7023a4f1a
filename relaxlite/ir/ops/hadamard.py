"""The Walsh-Hadamard transform: a product with a matrix of ones and minus ones, by additions alone."""

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
    """Each run of `size` elements along the last axis, as a vector, times the symmetric Walsh-Hadamard matrix of that
    size, a power of two, in the order of Sylvester: H(1) = 1, H(2n) = [[H(n), H(n)], [H(n), -H(n)]]. Not normalized:
    twice gives `size` times x. Every row takes the same additions in the same order (Fino and Algazi, "Unified Matrix
    Treatment of the Fast Walsh-Hadamard Transform", 1976).
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
            rows = [Buffer(f"mixed{k}", (width,), x.dtype, "local") for k in range(len(spans) - 1)]
            places = [(x, i), *((each, ()) for each in rows), (out, i)]
            stages = [
                _added(source, to, width, span) for span, source, to in zip(spans, places, places[1:], strict=False)
            ]
            body = seq(*stages)
            for each in reversed(rows):
                body = Allocate(each, body)
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


Place = tuple[Buffer, tuple[SymExpr, ...]]  # a row of a buffer


def _added(source: Place, to: Place, width: SymExpr, span: int) -> Stmt:
    """One step: of elements `span` apart their sum and their difference. A span of 0 copies."""
    (given, i), (result, o) = source, to

    def load(at: SymExpr) -> Scalar:
        place = (*i, at)
        return Scalar(given[place])

    def store(at: SymExpr, value: Scalar) -> Stmt:
        return Store(result, (*o, at), value.value)

    def pair(c: SymExpr, j: SymExpr) -> Stmt:
        low, high = c * (2 * span) + j, c * (2 * span) + j + span
        a, b = load(low), load(high)
        return seq(store(low, a + b), store(high, a - b))

    if not span:
        return loops("j", (width,), lambda j: store(j, load(j)))
    return loops("cj", (width // (2 * span), sym(span)), pair)
