"""Eigenvalues of symmetric matrices and singular values, by Jacobi's rotations, in float64.

See Golub and Van Loan, "Matrix Computations", 4th edition, sections 8.5 (symmetric) and 8.6.3 (one-sided). A sweep
rotates every pair of rows once; sweeps end when one of them rotates nothing. Vectors have no sign of their own: the
component of greatest size of each eigenvector, and of each right singular vector, is made positive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Attr, Sample, register
from relaxlite.ir.ops.matrices import Matrix, MatrixOp, each_matrix, workspace
from relaxlite.ir.ops.scalars import Scalar, Variable, allocate, index, select
from relaxlite.ir.program import Buffer, IfThenElse, LetIndex, Stmt, loops, seq
from relaxlite.ir.symbolic import SymExpr, SymVar, smin, sym
from relaxlite.ir.types import TensorType, TupleType, Type

_SWEEPS = 40  # matrices of any size need about ten
_PRECISION = 1e-15  # of a rotation, against the size of the matrix


def identity(matrix: Matrix, size: SymExpr) -> Stmt:
    """Build the store of an identity matrix."""
    return loops("ij", (size, size), lambda i, j: matrix.set((i, j), index(i).equals(index(j)).cast("float64")))


def total(result: Variable, count: SymExpr, term: Callable[[SymExpr], Scalar]) -> Stmt:
    """Build result = the sum of term(0), ..., term(count - 1)."""
    return seq(result.set(0.0), loops("i", (count,), lambda i: result.set(result.get() + term(i))))


class _Scale:
    """The element of greatest size of a matrix, by which it is divided so that no square overflows; 1 for zeros."""

    def __init__(self) -> None:
        self.size = Variable("scale")

    def find(self, x: Matrix, rows: SymExpr, columns: SymExpr) -> Stmt:
        grow = loops("ij", (rows, columns), lambda i, j: self.size.set(
            self.size.get().maximum(x[i, j].cast("float64").abs())
        ))  # fmt: skip
        return seq(self.size.set(0.0), grow, IfThenElse(self.size.get().equals(0.0).value, self.size.set(1.0)))


class _Rotation:
    """A rotation of two rows: of angle t = tan, the smaller root of t^2 + 2 zeta t = 1."""

    def __init__(self) -> None:
        self.zeta, self.tangent = Variable("zeta"), Variable("tangent")
        self.cosine, self.sine = Variable("cosine"), Variable("sine")
        self.left, self.right = Variable("left"), Variable("right")
        self.variables = (self.zeta, self.tangent, self.cosine, self.sine, self.left, self.right)

    def choose(self, zeta: Scalar) -> Stmt:
        size = self.zeta.get().abs()
        tangent = 1.0 / (size + (size * size + 1.0).unary("sqrt"))
        t = self.tangent.get()
        return seq(
            self.zeta.set(zeta),
            self.tangent.set(select(self.zeta.get() < 0.0, -tangent, tangent)),
            self.cosine.set(1.0 / (t * t + 1.0).unary("sqrt")),
            self.sine.set(self.cosine.get() * t),
        )

    def apply(self, matrix: Matrix, p: tuple[SymExpr, ...], q: tuple[SymExpr, ...]) -> Stmt:
        """Build the rotation of two elements."""
        x, y, c, s = self.left.get(), self.right.get(), self.cosine.get(), self.sine.get()
        return seq(
            self.left.set(matrix[p]), self.right.set(matrix[q]),
            matrix.set(p, c * x - s * y), matrix.set(q, s * x + c * y),
        )  # fmt: skip

    def rows(self, matrix: Matrix, p: SymExpr, q: SymExpr, columns: SymExpr) -> Stmt:
        return loops("i", (columns,), lambda i: self.apply(matrix, (p, i), (q, i)))


def sweeps(size: SymExpr, pair: Callable[[SymExpr, SymExpr, Stmt], Stmt]) -> Stmt:
    """Build sweeps over the pairs p < q until none is rotated: pair(p, q, what to do where it rotates)."""
    active = Variable("active", "int64")
    row = lambda p: loops("q", (size - p - 1,), lambda q: pair(p, p + 1 + q, active.set(1)))  # noqa: E731
    sweep = seq(active.set(0), loops("p", (size,), row))
    repeat = loops("s", (_SWEEPS,), lambda s: IfThenElse(active.get().equals(1).value, sweep))
    return allocate((active,), seq(active.set(1), repeat))


class _Order:
    """The numbers of rows in the order of their keys, which is found by selection."""

    def __init__(self, size: SymExpr) -> None:
        self.size, self.rows = size, workspace("order", size, dtype="int64")
        self.best, self.swap = Variable("best", "int64"), Variable("swap", "int64")
        self.variables = (self.rows, self.best, self.swap)

    def find(self, keys: Matrix, *, descending: bool) -> Stmt:
        def place(t: SymExpr) -> Stmt:
            def consider(r: SymExpr) -> Stmt:
                other, best = SymVar("other"), SymVar("so_far")
                key, least = keys[(other,)], keys[(best,)]
                is_better = key > least if descending else key < least
                better = IfThenElse(is_better.value, self.best.set(index(t + 1 + r)))
                body = LetIndex(best, self.rows[(position,)].value, better)
                body = LetIndex(other, self.rows[(t + 1 + r,)].value, body)
                return LetIndex(position, self.best.get().value, body)

            position, pivot = SymVar("position"), SymVar("pivot")
            exchange = seq(
                self.swap.set(self.rows[(t,)]), self.rows.set((t,), self.rows[(pivot,)]),
                self.rows.set((pivot,), self.swap.get()),
            )  # fmt: skip
            search = seq(self.best.set(index(t)), loops("r", (self.size - t - 1,), consider))
            return seq(search, LetIndex(pivot, self.best.get().value, exchange))

        start = loops("i", (self.size,), lambda i: self.rows.set((i,), index(i)))
        return seq(start, loops("t", (self.size,), place))

    def at(self, t: SymExpr, use: Callable[[SymVar], Stmt]) -> Stmt:
        row = SymVar("row")
        return LetIndex(row, self.rows[(t,)].value, use(row))


class _Sign:
    """The sign of the component of greatest size of a row."""

    def __init__(self) -> None:
        self.greatest = Variable("greatest")

    def find(self, matrix: Matrix, row: SymExpr, size: SymExpr) -> Stmt:
        def consider(i: SymExpr) -> Stmt:
            value = matrix[row, i]
            return IfThenElse((value.abs() > self.greatest.get().abs()).value, self.greatest.set(value))

        return seq(self.greatest.set(0.0), loops("i", (size,), consider))

    def apply(self, value: Scalar) -> Scalar:
        return select(self.greatest.get() < 0.0, -value, value)


@register
class Eigh(MatrixOp):
    """Eigenvalues and eigenvectors of symmetric matrices: (values (..., n), vectors (..., n, n)).

    Only the lower triangle is read. Values ascend; column t of the vectors belongs to value t.
    """

    name = "eigh"
    operands = ("x",)

    def infer(self, x: Expr) -> Type:
        ty = self.matrices(x, "x")
        return TupleType((TensorType.of((ty.shape or ())[:-1], ty.dtype), ty))

    def lower(self, x: Buffer, *, out: tuple[Buffer, Buffer]) -> Stmt:
        *batch, n, _ = x.shape
        a, v, values = workspace("a", n, n), workspace("v", n, n), workspace("values", n)
        scale, rotation, order, sign = _Scale(), _Rotation(), _Order(n), _Sign()

        def pair(p: SymExpr, q: SymExpr, rotated: Stmt) -> Stmt:
            zeta = (a[q, q] - a[p, p]) / (a[p, q] * 2.0)
            rotate = seq(
                rotation.choose(zeta), rotation.rows(a, p, q, n), rotation.rows(v, p, q, n),
                loops("i", (n,), lambda i: rotation.apply(a, (i, p), (i, q))),
                a.set((p, q), 0.0), a.set((q, p), 0.0), rotated,
            )  # fmt: skip
            return IfThenElse((a[p, q].abs() > _PRECISION).value, rotate)

        def decompose(*b: SymExpr) -> Stmt:
            source, result, vectors = Matrix(x, b), Matrix(out[0], b), Matrix(out[1], b)

            def read(i: SymExpr, d: SymExpr) -> Stmt:
                element = source[i, d].cast("float64") / scale.size.get()
                return seq(a.set((i, d), element), a.set((d, i), element))

            def write(t: SymExpr, row: SymExpr) -> Stmt:
                column = loops("i", (n,), lambda i: vectors.set((i, t), sign.apply(v[row, i])))
                return seq(result.set((t,), values[(row,)] * scale.size.get()), sign.find(v, row, n), column)

            return seq(
                scale.find(source, n, n), identity(v, n),
                loops("i", (n,), lambda i: loops("j", (i + 1,), lambda j: read(i, j))),
                sweeps(n, pair),
                loops("i", (n,), lambda i: values.set((i,), a[i, i])), order.find(values, descending=False),
                loops("t", (n,), lambda t: order.at(t, lambda row: write(t, row))),
            )  # fmt: skip

        memory = (a, v, values, scale.size, *rotation.variables, *order.variables, sign.greatest)
        return seq(self.square_checks(x), allocate(memory, each_matrix(tuple(batch), decompose)))

    def reference(self, x: Any) -> Any:
        values, vectors = np.linalg.eigh(x.astype(np.float64))
        return values.astype(x.dtype), (vectors * _signs(vectors)).astype(x.dtype)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("b", "n", "n"),), tolerance=1e-4)


def _signs(columns: Any) -> Any:
    """Return the sign of the component of greatest size of each column: (..., 1, n)."""
    if not columns.size:
        return np.ones((*columns.shape[:-2], 1, columns.shape[-1]))
    place = np.abs(columns).argmax(-2, keepdims=True)
    return np.where(np.take_along_axis(columns, place, -2) < 0, -1.0, 1.0)


@register
class Svd(MatrixOp):
    """Singular value decomposition x = u diag(s) vh of (..., m, n): (u (..., m, k), s (..., k), vh (..., k, n)).

    k = min(m, n). Values descend. With `full`, u is (..., m, m) and vh (..., n, n). Singular vectors of values that are
    0 in the precision of float64 are made orthogonal to the others.
    """

    name = "svd"
    operands = ("x",)
    attrs: ClassVar[Mapping[str, Attr]] = {"full": Attr("bool", False)}

    def infer(self, x: Expr, *, full: bool) -> Type:
        ty = self.matrices(x, "x")
        *batch, m, n = ty.shape or ()
        k = smin(m, n)
        left, right = ((m, m), (n, n)) if full else ((m, k), (k, n))
        shapes = ((*batch, *left), (*batch, k), (*batch, *right))
        return TupleType(tuple(TensorType.of(shape, ty.dtype) for shape in shapes))

    def lower(self, x: Buffer, *, out: tuple[Buffer, Buffer, Buffer], full: bool) -> Stmt:
        *batch, m, n = x.shape
        rows = m if full else smin(m, n)
        rotated = _RotatedColumns(m, n)
        u, sign = workspace("u", rows, m), _Sign()
        basis = _Basis(u, m)
        size = rotated.scale.size

        def decompose(*b: SymExpr) -> Stmt:
            left, values, right = (Matrix(o, b) for o in out)

            def vectors(t: SymExpr, row: SymExpr) -> Stmt:
                s = rotated.norms[(row,)]
                column = loops("i", (m,), lambda i: u.set((t, i), sign.apply(rotated.w[row, i] / s)))
                is_zero = ~(rotated.is_regular(s) | s.differs(s))
                return seq(
                    values.set((t,), s * size.get()), sign.find(rotated.v, row, n),
                    loops("i", (n,), lambda i: right.set((t, i), sign.apply(rotated.v[row, i]))),
                    IfThenElse(is_zero.value, basis.complete(t), column),
                )  # fmt: skip

            def rest(t: SymExpr) -> Stmt:
                copy = lambda row: loops("i", (n,), lambda i: right.set((t, i), rotated.v[row, i]))  # noqa: E731
                return rotated.order.at(t, copy)

            k = smin(m, n)
            more = seq(
                loops("t", (m - k,), lambda t: basis.complete(k + t)), loops("t", (n - k,), lambda t: rest(k + t))
            )  # fmt: skip
            return seq(
                rotated.compute(Matrix(x, b)),
                loops("t", (k,), lambda t: rotated.order.at(t, lambda row: vectors(t, row))),
                *((more,) if full else ()),
                loops("ti", (rows, m), lambda t, i: left.set((i, t), u[t, i])),
            )

        memory = (u, sign.greatest, *rotated.variables, *basis.variables)
        return allocate(memory, each_matrix(tuple(batch), decompose))

    def reference(self, x: Any, *, full: bool) -> Any:
        u, s, vh = np.linalg.svd(x.astype(np.float64), full_matrices=full)
        signs, k = _signs(np.swapaxes(vh, -1, -2)), s.shape[-1]
        u[..., :k], vh[..., :k, :] = (
            u[..., :k] * signs[..., :k],
            vh[..., :k, :] * np.swapaxes(signs, -1, -2)[..., :k, :],
        )
        return tuple(y.astype(x.dtype) for y in (u, s, vh))

    def samples(self) -> Iterable[Sample]:
        yield Sample((("b", "n", 3),), tolerance=1e-3)
        yield Sample(((2, "n"),), tolerance=1e-3)


@register
class SingularValues(MatrixOp):
    """Singular values of matrices (..., m, n), descending: (..., min(m, n))."""

    name = "singular_values"
    operands = ("x",)

    def infer(self, x: Expr) -> Type:
        ty = self.matrices(x, "x")
        *batch, m, n = ty.shape or ()
        return TensorType.of((*batch, smin(m, n)), ty.dtype)

    def lower(self, x: Buffer, *, out: Buffer) -> Stmt:
        *batch, m, n = x.shape
        rotated = _RotatedColumns(m, n, has_vectors=False)

        def decompose(*b: SymExpr) -> Stmt:
            values = Matrix(out, b)

            def write(t: SymExpr, row: SymExpr) -> Stmt:
                return values.set((t,), rotated.norms[(row,)] * rotated.scale.size.get())

            ordered = loops("t", (smin(m, n),), lambda t: rotated.order.at(t, lambda row: write(t, row)))
            return seq(rotated.compute(Matrix(x, b)), ordered)

        return allocate(rotated.variables, each_matrix(tuple(batch), decompose))

    def reference(self, x: Any) -> Any:
        return np.linalg.svd(x.astype(np.float64), compute_uv=False).astype(x.dtype)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("b", "n", "m"),), tolerance=1e-4)


class _RotatedColumns:
    """The columns of x / scale, rotated until they are orthogonal, as rows of w: x / scale = w^T v, v orthogonal."""

    def __init__(self, m: SymExpr, n: SymExpr, *, has_vectors: bool = True) -> None:
        self.m, self.n, self.has_vectors = m, n, has_vectors
        self.w, self.v, self.norms = workspace("w", n, m), workspace("v", n, n), workspace("norms", n)
        self.scale, self.rotation, self.order = _Scale(), _Rotation(), _Order(n)
        self.a, self.b, self.c = Variable("a"), Variable("b"), Variable("c")
        own = (self.w, self.norms, self.scale.size, self.a, self.b, self.c)
        vectors = (self.v,) if has_vectors else ()
        self.variables = (*own, *vectors, *self.rotation.variables, *self.order.variables)

    def is_regular(self, norm: Scalar) -> Scalar:
        """Whether a column is not 0 in the precision of float64; the greatest is at least 1 / sqrt(n)."""
        return norm > _PRECISION

    def compute(self, x: Matrix) -> Stmt:
        """Build the rotations, the norms of the columns, and the descending order of those."""
        scaled = lambda j, i: self.w.set((j, i), x[i, j].cast("float64") / self.scale.size.get())  # noqa: E731
        norm = lambda j: seq(  # noqa: E731
            total(self.a, self.m, lambda i: self.w[j, i] * self.w[j, i]),
            self.norms.set((j,), self.a.get().unary("sqrt")),
        )
        return seq(
            self.scale.find(x, self.m, self.n),
            *((identity(self.v, self.n),) if self.has_vectors else ()),
            loops("ji", (self.n, self.m), scaled), sweeps(self.n, self._pair),
            loops("j", (self.n,), norm), self.order.find(self.norms, descending=True),
        )  # fmt: skip

    def _pair(self, p: SymExpr, q: SymExpr, rotated: Stmt) -> Stmt:
        a, b, c, w = self.a.get(), self.b.get(), self.c.get(), self.w
        bound = _PRECISION * _PRECISION
        is_needed = (c * c > a * b * bound) & (a > bound) & (b > bound)
        rotate = seq(
            self.rotation.choose((b - a) / (c * 2.0)), self.rotation.rows(w, p, q, self.m),
            *((self.rotation.rows(self.v, p, q, self.n),) if self.has_vectors else ()), rotated,
        )  # fmt: skip
        return seq(
            total(self.a, self.m, lambda i: w[p, i] * w[p, i]), total(self.b, self.m, lambda i: w[q, i] * w[q, i]),
            total(self.c, self.m, lambda i: w[p, i] * w[q, i]), IfThenElse(is_needed.value, rotate),
        )  # fmt: skip


class _Basis:
    """Rows of a matrix that are made orthogonal to those above them."""

    def __init__(self, u: Matrix, size: SymExpr) -> None:
        self.u, self.size = u, size
        self.is_complete, self.product = Variable("is_complete", "int64"), Variable("product")
        self.variables = (self.is_complete, self.product)

    def complete(self, t: SymExpr) -> Stmt:
        """Build row t from the first unit vector that is far enough from the span of rows 0, ..., t - 1."""
        u, m = self.u, self.size

        def project(r: SymExpr) -> Stmt:
            def subtract(i: SymExpr) -> Stmt:
                return u.set((t, i), u[t, i] - self.product.get() * u[r, i])

            return seq(total(self.product, m, lambda i: u[t, i] * u[r, i]), loops("i", (m,), subtract))

        def attempt(e: SymExpr) -> Stmt:
            norm = self.product.get()
            normalize = loops("i", (m,), lambda i: u.set((t, i), u[t, i] / norm.unary("sqrt")))
            # Some unit vector leaves at least 1 / m of its squared length.
            is_enough = norm * index(m, "float64") > 0.5
            return seq(
                loops("i", (m,), lambda i: u.set((t, i), index(i).equals(index(e)).cast("float64"))),
                loops("a", (sym(2),), lambda _: loops("r", (t,), project)),
                total(self.product, m, lambda i: u[t, i] * u[t, i]),
                IfThenElse(is_enough.value, seq(normalize, self.is_complete.set(1))),
            )  # fmt: skip

        search = loops("e", (m,), lambda e: IfThenElse(self.is_complete.get().equals(0).value, attempt(e)))
        return seq(self.is_complete.set(0), search)
