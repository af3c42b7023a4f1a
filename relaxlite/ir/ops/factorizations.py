"""Factorizations of matrices: LU, Cholesky, Householder QR, triangular systems, and the matrix exponential.

Each works on every matrix of a batch, in loops that follow the textbook: Golub and Van Loan, "Matrix Computations", 4th
edition, sections 3.4 (LU), 4.2 (Cholesky), 5.1 and 5.2 (Householder), 9.3 (exponential). Sizes may be symbolic or 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Attr, Op, Sample, register
from relaxlite.ir.ops.broadcast import Shape
from relaxlite.ir.ops.linalg import equality_checks
from relaxlite.ir.ops.matrices import Matrix, MatrixOp, each_matrix, workspace
from relaxlite.ir.ops.scalars import Scalar, Variable, allocate, index, literal, select
from relaxlite.ir.program import Buffer, Check, For, IfThenElse, LetIndex, Stmt, loops, seq
from relaxlite.ir.symbolic import SymExpr, SymVar, smin, sym
from relaxlite.ir.types import TensorType, TupleType, Type


def _draw_regular(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Draw matrices that are far from singular."""
    return rng.uniform(-1, 1, shape) + 3 * np.eye(shape[-2], shape[-1])


@register
class Lu(MatrixOp):
    """LU factorization with partial pivoting: (lu (..., m, n), pivots (..., k), rows (..., m), info (...)).

    k = min(m, n). lu holds U and, below the diagonal, L without its unit diagonal. Row pivots[t] was exchanged with row
    t, and rows are the numbers of the rows of x in their new order (int64). info is 0, or 1 + the first zero pivot.
    """

    name = "lu"
    operands = ("x",)

    def infer(self, x: Expr) -> Type:
        ty = self.matrices(x, "x")
        *batch, m, n = ty.shape or ()
        pivots = TensorType.of((*batch, smin(m, n)), "int64")
        return TupleType((ty, pivots, TensorType.of((*batch, m), "int64"), TensorType.of(tuple(batch), "int64")))

    def lower(self, x: Buffer, *, out: tuple[Buffer, Buffer, Buffer, Buffer]) -> Stmt:
        *batch, m, n = x.shape
        size, where = Variable("size", x.dtype), Variable("where", "int64")
        swap, row = Variable("swap", x.dtype), Variable("row", "int64")

        def factorize(*b: SymExpr) -> Stmt:
            source, (lu, pivots, rows, info) = Matrix(x, b), (Matrix(y, b) for y in out)

            def exchange(t: SymExpr, p: SymVar) -> Stmt:
                move = loops("j", (n,), lambda j: seq(
                    swap.set(lu[t, j]), lu.set((t, j), lu[p, j]), lu.set((p, j), swap.get())
                ))  # fmt: skip
                return seq(move, row.set(rows[(t,)]), rows.set((t,), rows[(p,)]), rows.set((p,), row.get()))

            def eliminate(t: SymExpr) -> Stmt:
                def below(r: SymExpr) -> Stmt:
                    i = t + 1 + r
                    scale = lu.set((i, t), lu[i, t] / lu[t, t])
                    return seq(scale, loops("j", (n - t - 1,), lambda j: lu.set(
                        (i, t + 1 + j), lu[i, t + 1 + j] - lu[i, t] * lu[t, t + 1 + j]
                    )))  # fmt: skip

                return loops("r", (m - t - 1,), below)

            def step(t: SymExpr) -> Stmt:
                def consider(r: SymExpr) -> Stmt:
                    value = lu[t + 1 + r, t].abs()
                    better = seq(size.set(value), where.set(index(t + 1 + r)))
                    return IfThenElse((value > size.get()).value, better)

                p = SymVar("p")
                singular = IfThenElse(info[()].equals(0).value, info.set((), index(t + 1)))
                return seq(
                    size.set(lu[t, t].abs()), where.set(index(t)), loops("r", (m - t - 1,), consider),
                    LetIndex(p, where.get().value, seq(
                        pivots.set((t,), index(p)),
                        IfThenElse(index(p).differs(index(t)).value, exchange(t, p)),
                        IfThenElse(size.get().equals(0.0).value, singular, eliminate(t)),
                    )),
                )  # fmt: skip

            return seq(
                loops("ij", (m, n), lambda i, j: lu.set((i, j), source[i, j])),
                loops("i", (m,), lambda i: rows.set((i,), index(i))),
                info.set((), index(0)),
                loops("t", (smin(m, n),), step),
            )

        return allocate((size, where, swap, row), each_matrix(tuple(batch), factorize))

    def reference(self, x: Any) -> Any:
        m, n = x.shape[-2:]
        lu, pivots = x.copy(), np.zeros((*x.shape[:-2], min(m, n)), np.int64)
        rows, info = np.zeros(x.shape[:-1], np.int64), np.zeros(x.shape[:-2], np.int64)
        for b in np.ndindex(x.shape[:-2]):
            rows[b] = np.arange(m)
            for t in range(min(m, n)):
                p = t + int(np.argmax(np.abs(lu[b][t:, t])))
                pivots[b][t] = p
                lu[b][[t, p]], rows[b][[t, p]] = lu[b][[p, t]], rows[b][[p, t]]
                if lu[b][t, t] == 0:
                    info[b] = info[b] or t + 1
                    continue
                lu[b][t + 1 :, t] /= lu[b][t, t]
                lu[b][t + 1 :, t + 1 :] -= np.outer(lu[b][t + 1 :, t], lu[b][t, t + 1 :])
        return lu, pivots, rows, info

    def samples(self) -> Iterable[Sample]:
        yield Sample((("b", "n", "n"),), tolerance=1e-4)
        yield Sample((("n", 3),), dtypes=("float64",), tolerance=1e-9)


@register
class Cholesky(MatrixOp):
    """Cholesky factorization x = L L^T of symmetric matrices, read from their lower triangle: (L, info int64 (...)).

    info is 0, or the order of the first leading part that is not positive definite; L is then NaN from there on.
    """

    name = "cholesky"
    operands = ("x",)

    def infer(self, x: Expr) -> Type:
        ty = self.matrices(x, "x")
        return TupleType((ty, TensorType.of((ty.shape or ())[:-2], "int64")))

    def lower(self, x: Buffer, *, out: tuple[Buffer, Buffer]) -> Stmt:
        *batch, n, _ = x.shape
        total = Variable("total")

        def factorize(*b: SymExpr) -> Stmt:
            source, lower, info = Matrix(x, b), Matrix(out[0], b), Matrix(out[1], b)

            def remainder(i: SymExpr, j: SymExpr) -> Stmt:
                def subtract(k: SymExpr) -> Stmt:
                    return total.set(total.get() - (lower[i, k] * lower[j, k]).cast("float64"))

                return seq(total.set(source[i, j].cast("float64")), loops("k", (j,), subtract))

            def column(j: SymExpr) -> Stmt:
                is_first = ~(total.get() > 0.0) & info[()].equals(0)

                def below(r: SymExpr) -> Stmt:
                    i = j + 1 + r
                    divided = lower.set((i, j), total.get() / lower[j, j].cast("float64"))
                    return seq(remainder(i, j), divided, lower.set((j, i), 0.0))

                return seq(
                    remainder(j, j),
                    IfThenElse(is_first.value, info.set((), index(j + 1))),
                    lower.set((j, j), select(info[()] > 0, float("nan"), total.get().unary("sqrt"))),
                    loops("r", (n - j - 1,), below),
                )

            return seq(info.set((), index(0)), loops("j", (n,), column))

        return seq(self.square_checks(x), allocate((total,), each_matrix(tuple(batch), factorize)))

    def reference(self, x: Any) -> Any:
        lower, info = np.zeros(x.shape, np.float64), np.zeros(x.shape[:-2], np.int64)
        with np.errstate(all="ignore"):
            for b in np.ndindex(x.shape[:-2]):
                for j in range(x.shape[-1]):
                    rest = x[b][j:, j] - lower[b][j:, :j] @ lower[b][j, :j]
                    if not rest[0] > 0 and info[b] == 0:
                        info[b] = j + 1
                    root = np.nan if info[b] else np.sqrt(rest[0])
                    lower[b][j:, j] = rest / root
                    lower[b][j, j] = root
        return lower.astype(x.dtype), info

    def samples(self) -> Iterable[Sample]:
        yield Sample((("b", "n", "n"),), make={0: _draw_positive}, tolerance=1e-4)


def _draw_positive(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Draw symmetric positive definite matrices."""
    root = rng.uniform(-1, 1, shape)
    return root @ np.swapaxes(root, -1, -2) + 2 * np.eye(shape[-1])


@register
class SolveTriangular(MatrixOp):
    """Solution of a y = b for triangular matrices a (..., n, n) and b (..., n, k), with equal batch dimensions.

    Only the triangle is read, and with `unit` not the diagonal, which is 1.
    """

    name = "solve_triangular"
    operands = ("a", "b")
    attrs: ClassVar[Mapping[str, Attr]] = {"upper": Attr("bool", False), "unit": Attr("bool", False)}

    def infer(self, a: Expr, b: Expr, *, upper: bool, unit: bool) -> Type:
        left, right = self.matrices(a, "a"), self.matrices(b, "b")
        if left.dtype != right.dtype or left.rank != right.rank:
            self.fail(f"operands must have one dtype and rank, got {left} and {right}")
        return right

    def lower(self, a: Buffer, b: Buffer, *, out: Buffer, upper: bool, unit: bool) -> Stmt:
        *batch, n, count = b.shape
        pairs = list(zip(a.shape[:-1], b.shape[:-1], strict=True))
        checks = equality_checks("solve_triangular: sizes differ", *pairs, (a.shape[-1], n))

        def solve(*at: SymExpr) -> Stmt:
            matrix, right, result = Matrix(a, at), Matrix(b, at), Matrix(out, at)

            def row(s: SymExpr) -> Stmt:
                i = n - 1 - s if upper else s

                def subtract(t: SymExpr) -> Stmt:
                    k = n - 1 - t if upper else t
                    return loops("c", (count,), lambda c: result.set(
                        (i, c), result[i, c] - matrix[i, k] * result[k, c]
                    ))  # fmt: skip

                divide = loops("c", (count,), lambda c: result.set((i, c), result[i, c] / matrix[i, i]))
                copy = loops("c", (count,), lambda c: result.set((i, c), right[i, c]))
                return seq(copy, loops("t", (s,), subtract), *(() if unit else (divide,)))

            return loops("s", (n,), row)

        return seq(*checks, each_matrix(tuple(batch), solve))

    def reference(self, a: Any, b: Any, *, upper: bool, unit: bool) -> Any:
        matrix = (np.triu if upper else np.tril)(a).astype(np.float64)
        if unit:
            matrix = matrix - matrix * np.eye(a.shape[-1]) + np.eye(a.shape[-1])
        return np.linalg.solve(matrix, b.astype(np.float64)).astype(b.dtype)

    def samples(self) -> Iterable[Sample]:
        for attrs in ({}, {"upper": True}, {"upper": True, "unit": True}):
            yield Sample((("b", "n", "n"), ("b", "n", 2)), attrs, make={0: _draw_regular}, tolerance=1e-3)


def _reflect(
    vector: Callable[[SymExpr], Scalar], tau: Scalar, target: Matrix, t: SymExpr, rest: SymExpr, columns: SymExpr,
    first: SymExpr, total: Variable,
) -> Stmt:  # fmt: skip
    """Apply I - tau v v^T, v = (1, vector(0), ...), to rows t and following of columns `first` and following."""

    def column(c: SymExpr) -> Stmt:
        j = first + c
        add = loops("r", (rest,), lambda r: total.set(
            total.get() + (vector(r) * target[t + 1 + r, j]).cast("float64")
        ))  # fmt: skip
        scaled = total.set(total.get() * tau.cast("float64"))
        update = loops("r", (rest,), lambda r: target.set(
            (t + 1 + r, j), target[t + 1 + r, j].cast("float64") - vector(r).cast("float64") * total.get()
        ))  # fmt: skip
        top = target.set((t, j), target[t, j].cast("float64") - total.get())
        return seq(total.set(target[t, j].cast("float64")), add, scaled, top, update)

    return loops("c", (columns,), column)


@register
class Geqrf(MatrixOp):
    """Householder QR as in LAPACK: (a (..., m, n), tau (..., min(m, n))).

    a holds R and, below the diagonal, the reflectors without their first element 1.
    """

    name = "geqrf"
    operands = ("x",)

    def infer(self, x: Expr) -> Type:
        ty = self.matrices(x, "x")
        *batch, m, n = ty.shape or ()
        return TupleType((ty, TensorType.of((*batch, smin(m, n)), ty.dtype)))

    def lower(self, x: Buffer, *, out: tuple[Buffer, Buffer]) -> Stmt:
        *batch, m, n = x.shape
        total, beta = Variable("total"), Variable("beta")

        def factorize(*b: SymExpr) -> Stmt:
            source, a, tau = Matrix(x, b), Matrix(out[0], b), Matrix(out[1], b)

            def step(t: SymExpr) -> Stmt:
                rest = m - t - 1
                wide = a[t, t].cast("float64")

                def square(r: SymExpr) -> Scalar:
                    value = a[t + 1 + r, t].cast("float64")
                    return value * value

                length = (wide * wide + total.get()).unary("sqrt")
                reflector = seq(
                    beta.set(select(a[t, t] < 0.0, length, -length)),
                    tau.set((t,), (beta.get() - wide) / beta.get()),
                    loops("r", (rest,), lambda r: a.set(
                        (t + 1 + r, t), a[t + 1 + r, t].cast("float64") / (wide - beta.get())
                    )),
                    a.set((t, t), beta.get()),
                    _reflect(lambda r: a[t + 1 + r, t], tau[(t,)], a, t, rest, n - t - 1, t + 1, total),
                )  # fmt: skip
                return seq(
                    total.set(0.0),
                    loops("r", (rest,), lambda r: total.set(total.get() + square(r))),
                    IfThenElse(
                        total.get().equals(0.0).value, tau.set((t,), 0.0), reflector
                    ),
                )  # fmt: skip

            copy = loops("ij", (m, n), lambda i, j: a.set((i, j), source[i, j]))
            return seq(copy, loops("t", (smin(m, n),), step))

        return allocate((total, beta), each_matrix(tuple(batch), factorize))

    def reference(self, x: Any) -> Any:
        m, n = x.shape[-2:]
        a, tau = x.astype(np.float64), np.zeros((*x.shape[:-2], min(m, n)))
        for b in np.ndindex(x.shape[:-2]):
            for t in range(min(m, n)):
                below = a[b][t + 1 :, t]
                if not (below**2).sum():
                    continue
                alpha = a[b][t, t]
                beta = np.sqrt(alpha**2 + (below**2).sum()) * (1 if alpha < 0 else -1)
                tau[b][t] = (beta - alpha) / beta
                v = np.concatenate([[1], below / (alpha - beta)])
                a[b][t:, t + 1 :] -= tau[b][t] * np.outer(v, v @ a[b][t:, t + 1 :])
                a[b][t:, t] = np.concatenate([[beta], v[1:]])
        return a.astype(x.dtype), tau.astype(x.dtype)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("b", "n", 3),), tolerance=1e-4)
        yield Sample(((3, "n"),), tolerance=1e-4)


@register
class HouseholderProduct(MatrixOp):
    """The first n columns of the product of reflectors I - tau v v^T, as `geqrf` gives them in a (..., m, n)."""

    name = "householder_product"
    operands = ("a", "tau")

    def infer(self, a: Expr, tau: Expr) -> Type:
        ty = self.matrices(a, "a")
        if self.tensor(tau, "tau").dtype != ty.dtype or self.tensor(tau, "tau").rank != (ty.rank or 0) - 1:
            self.fail(f"tau must be a vector per matrix, got {tau.ty} for {ty}")
        return ty

    def lower(self, a: Buffer, tau: Buffer, *, out: Buffer) -> Stmt:
        *batch, m, n = a.shape
        total, count = Variable("total"), tau.shape[-1]

        def multiply(*b: SymExpr) -> Stmt:
            vectors, factors, result = Matrix(a, b), Matrix(tau, b), Matrix(out, b)

            def step(s: SymExpr) -> Stmt:
                t = count - 1 - s
                return _reflect(
                    lambda r: vectors[t + 1 + r, t], factors[(t,)], result, t, m - t - 1, n, sym(0), total
                )  # fmt: skip

            one, zero = Scalar(literal(1.0, out.dtype)), 0.0
            start = loops("ij", (m, n), lambda i, j: result.set((i, j), select(index(i).equals(index(j)), one, zero)))
            return seq(start, loops("s", (count,), step))

        pairs = tuple(zip(tau.shape[:-1], batch, strict=True))
        checks = equality_checks("householder_product: batches of tau and a", *pairs)
        fits = (index(count) <= index(m)) & (index(count) <= index(n))
        within = Check(fits.value, f"householder_product: {count} reflections of {m} x {n} matrices")
        return seq(*checks, within, allocate((total,), each_matrix(tuple(batch), multiply)))

    def reference(self, a: Any, tau: Any) -> Any:
        m, n = a.shape[-2:]
        result = np.broadcast_to(np.eye(m, n), a.shape).copy()
        for b in np.ndindex(a.shape[:-2]):
            for t in reversed(range(tau.shape[-1])):
                v = np.concatenate([np.zeros(t), [1], a[b][t + 1 :, t].astype(np.float64)])
                result[b] -= tau[b][t] * np.outer(v, v @ result[b])
        return result.astype(a.dtype)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("b", "n+2", 3), ("b", 2)), tolerance=1e-3)


_TERMS = 16  # of the Taylor series: 0.5 ** 17 / 17! is below the precision of float64


@register
class MatrixExp(MatrixOp):
    """The matrix exponential, by a Taylor series of x / 2**s with norm <= 1/2, squared s times, in float64."""

    name = "matrix_exp"
    operands = ("x",)

    def infer(self, x: Expr) -> Type:
        return self.matrices(x, "x")

    def lower(self, x: Buffer, *, out: Buffer) -> Stmt:
        *batch, n, _ = x.shape
        scaled, power, next_power = (workspace(name, n, n) for name in ("scaled", "power", "next"))
        norm, total = Variable("norm"), Variable("total")

        def multiply(a: Matrix, b: Matrix, result: Matrix) -> Stmt:
            def element(i: SymExpr, j: SymExpr) -> Stmt:
                add = loops("k", (n,), lambda k: total.set(total.get() + a[i, k] * b[k, j]))
                return seq(total.set(0.0), add, result.set((i, j), total.get()))

            return loops("ij", (n, n), element)

        def exponential(*b: SymExpr) -> Stmt:
            source, result = Matrix(x, b), Matrix(out, b)
            zero, one = Scalar(literal(0.0, "float64")), Scalar(literal(1.0, "float64"))
            column_sum = lambda j: seq(  # noqa: E731
                total.set(zero),
                loops("i", (n,), lambda i: total.set(total.get() + source[i, j].abs().cast("float64"))),
                norm.set(norm.get().maximum(total.get())),
            )
            squarings, q = SymVar("squarings", lower=0), SymVar("q", lower=0)
            halvings = (norm.get().unary("log") * (1 / np.log(2.0))).unary("ceil") + 1.0
            count = halvings.maximum(0.0).minimum(1100.0).cast("int64")
            factor = (-index(squarings, "float64")).exp2()

            def taylor(t: SymExpr) -> Stmt:
                divisor = index(_TERMS - t, "float64")
                add = loops("ij", (n, n), lambda i, j: power.set(
                    (i, j), next_power[i, j] / divisor + select(index(i).equals(index(j)), one, zero)
                ))  # fmt: skip
                return seq(multiply(scaled, power, next_power), add)

            identity = lambda i, j: power.set((i, j), select(index(i).equals(index(j)), one, zero))  # noqa: E731
            square = seq(
                multiply(power, power, next_power),
                loops("ij", (n, n), lambda i, j: power.set((i, j), next_power[i, j])),
            )
            body = seq(
                loops("ij", (n, n), lambda i, j: scaled.set((i, j), source[i, j].cast("float64") * factor)),
                loops("ij", (n, n), identity),
                loops("t", (_TERMS,), taylor),
                For(q, squarings, square),
                loops("ij", (n, n), lambda i, j: result.set((i, j), power[i, j])),
            )
            return seq(norm.set(zero), loops("j", (n,), column_sum), LetIndex(squarings, count.value, body))

        body = each_matrix(tuple(batch), exponential)
        return seq(self.square_checks(x), allocate((scaled, power, next_power, norm, total), body))

    def reference(self, x: Any) -> Any:
        wide = x.astype(np.float64) / 1024
        term = total = np.broadcast_to(np.eye(x.shape[-1]), x.shape)
        for k in range(1, 20):
            term = term @ wide / k
            total = total + term
        for _ in range(10):
            total = total @ total
        return total.astype(x.dtype)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("b", "n", "n"),), tolerance=1e-3)


@register
class PivotRows(Op):
    """Order of `count` rows after the exchanges of `lu`: of row t with row pivots[t], in order. Both are int64."""

    name = "pivot_rows"
    operands = ("pivots", "count")

    def infer(self, pivots: Expr, count: Expr) -> Type:
        ty, (rows,) = self.tensor(pivots, "pivots"), self.shape(count, "count")
        if ty.dtype != "int64" or not ty.shape:
            self.fail(f"pivots must be int64 vectors, got {ty}")
        return TensorType.of((*ty.shape[:-1], rows), "int64")

    def lower(self, pivots: Buffer, count: Shape, *, out: Buffer) -> Stmt:
        row = Variable("row", "int64")

        def order(*b: SymExpr) -> Stmt:
            rows = Matrix(out, b)

            def exchange(t: SymExpr) -> Stmt:
                p = SymVar("p")
                swap = seq(row.set(rows[(t,)]), rows.set((t,), rows[(p,)]), rows.set((p,), row.get()))
                inside = (index(p) >= 0) & (index(p) < index(count[0])) & (index(t) < index(count[0]))
                check = Check(inside.value, "pivot_rows: a pivot is out of range")
                return LetIndex(p, Matrix(pivots, b)[(t,)].value, seq(check, swap))

            start = loops("i", (count[0],), lambda i: rows.set((i,), index(i)))
            return seq(start, loops("t", (pivots.shape[-1],), exchange))

        return allocate((row,), each_matrix(pivots.shape[:-1], order))

    def reference(self, pivots: Any, count: tuple[int, ...]) -> Any:
        rows = np.broadcast_to(np.arange(count[0]), (*pivots.shape[:-1], count[0])).copy()
        for b in np.ndindex(pivots.shape[:-1]):
            for t, p in enumerate(pivots[b]):
                rows[b][[t, p]] = rows[b][[p, t]]
        return rows

    def samples(self) -> Iterable[Sample]:
        def draw(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
            return rng.integers(0, max(shape[-1], 1), shape)

        yield Sample((("b", "n"), ("n+1",)), dtypes=("int64", "shape"), make={0: draw})
