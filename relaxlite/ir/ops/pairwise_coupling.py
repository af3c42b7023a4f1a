"""Class probabilities from the probabilities of pairs of classes, for support vector machines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Attr, Op, Sample, register
from relaxlite.ir.ops.scalars import Scalar, literal
from relaxlite.ir.program import Allocate, Buffer, IfThenElse, Stmt, Store, loops, seq
from relaxlite.ir.symbolic import SymExpr, sym
from relaxlite.ir.types import TensorType, Type

MAX_ROUNDS = 100


@register
class CouplePairs(Op):
    """Class probabilities (n, classes) that fit the probabilities of pairs best: r float32 (n, classes, classes).

    r[:, i, j] is the probability of class i among i and j. Wu, Lin and Weng, "Probability Estimates for Multi-class
    Classification by Pairwise Coupling" (2004), algorithm 2: at most 100 rounds, until the error is 0.005 / classes.
    """

    name = "couple_pairs"
    operands = ("r",)
    attrs: ClassVar[dict[str, Attr]] = {"classes": Attr("int")}

    def infer(self, r: Expr, *, classes: int) -> Type:
        ty = self.tensor(r, "r")
        if ty.dtype != "float32" or ty.rank != 3 or (ty.shape or ())[1:] != (sym(classes), sym(classes)):
            self.fail(f"r must be float32 (rows, {classes}, {classes}), got {ty}")
        return TensorType.of(((ty.shape or ())[0], classes), "float32")

    def lower(self, r: Buffer, *, out: Buffer, classes: int) -> Stmt:
        q = Buffer.of("q", (classes, classes), "float32", "local")
        products = Buffer.of("products", (classes,), "float32", "local")
        total, error = (Buffer.of(name, (), "float32", "local") for name in ("total", "error"))
        zero = literal(0.0, "float32")

        def row(n: SymExpr) -> Stmt:
            def p(i: SymExpr) -> Scalar:
                return Scalar(out[n, i])

            def element(i: int, j: int) -> Stmt:
                if i != j:
                    value = -(Scalar(r[n, sym(j), sym(i)]) * Scalar(r[n, sym(i), sym(j)]))
                    return Store(q, (sym(i), sym(j)), value.value)
                others = [Scalar(r[n, sym(k), sym(i)]) for k in range(classes) if k != i]
                return Store(q, (sym(i), sym(i)), sum((o * o for o in others[1:]), others[0] * others[0]).value)

            fill = [element(i, j) for i in range(classes) for j in range(classes)]
            even = loops("i", (classes,), lambda i: Store(out, (n, i), literal(1 / classes, "float32")))
            multiply = seq(
                loops("i", (classes,), lambda i: Store(products, (i,), zero)),
                loops(
                    "ij", (classes, classes), lambda i, j: Store(products, (i,), (Scalar(q[i, j]) * p(j)).value, "add")
                ),
                Store(total, (), zero),
                loops("i", (classes,), lambda i: Store(total, (), (p(i) * Scalar(products[i])).value, "add")),
            )

            def distance(i: SymExpr) -> Stmt:
                return Store(error, (), (Scalar(products[i]) - Scalar(total[()])).abs().value, "max")

            measure = seq(Store(error, (), zero), loops("i", (classes,), distance))

            def update(i: SymExpr) -> Stmt:
                step = Buffer.of("step", (), "float32", "local")
                d, own = Scalar(step[()]), Scalar(q[i, i])
                scale = d + 1.0
                new_total = (Scalar(total[()]) + d * (d * own + Scalar(products[i]) * 2.0)) / scale / scale

                def rescale(j: SymExpr) -> Stmt:
                    product = (Scalar(products[j]) + d * Scalar(q[i, j])) / scale
                    return seq(Store(products, (j,), product.value), Store(out, (n, j), (p(j) / scale).value))

                return Allocate(step, seq(
                    Store(step, (), ((Scalar(total[()]) - Scalar(products[i])) / own).value),
                    Store(out, (n, i), d.value, "add"),
                    Store(total, (), new_total.value),
                    loops("j", (classes,), rescale),
                ))  # fmt: skip

            improve = loops("i", (classes,), update)
            is_far = Scalar(error[()]) >= 0.005 / classes
            turn = IfThenElse(is_far.value, seq(multiply, measure, IfThenElse(is_far.value, improve)))
            start = Store(error, (), literal(1.0, "float32"))
            body = seq(*fill, even, start, loops("s", (MAX_ROUNDS,), lambda s: turn))
            for buffer in (q, products, total, error):
                body = Allocate(buffer, body)
            return body

        return loops("n", out.shape[:1], row)

    def reference(self, r: Any, *, classes: int) -> Any:
        out = np.full((len(r), classes), 1 / classes, np.float32)
        for pairs, p in zip(r, out, strict=True):
            q = -pairs * pairs.T
            np.fill_diagonal(q, [sum(pairs[k, i] ** 2 for k in range(classes) if k != i) for i in range(classes)])
            for _ in range(MAX_ROUNDS):
                products = q @ p
                total = p @ products
                if np.abs(products - total).max() < 0.005 / classes:
                    break
                for i in range(classes):
                    step = (total - products[i]) / q[i, i]
                    p[i] += step
                    total = (total + step * (step * q[i, i] + 2 * products[i])) / (1 + step) ** 2
                    products = (products + step * q[i]) / (1 + step)
                    p /= 1 + step
        return out

    def samples(self) -> Iterable[Sample]:
        def draw(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
            upper = np.triu(rng.uniform(0.1, 0.9, shape), 1)
            return (upper + np.tril(1 - upper.swapaxes(1, 2), -1)).astype(np.float32)

        yield Sample((("n", 3, 3),), {"classes": 3}, make={0: draw}, tolerance=1e-4)
