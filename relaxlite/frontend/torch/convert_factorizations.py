"""Converters of linear algebra: systems, inverses, determinants and factorizations of matrices (ops/factorizations.py).

Pivots are int32 and count from 1, as LAPACK's.
"""

from __future__ import annotations

from typing import Any

from relaxlite.frontend.torch.node import Node, Shape
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr
from relaxlite.ir.symbolic import SymExpr, smin, sym


def transposed(n: Node, x: Expr) -> Expr:
    """Emit the transposes of matrices."""
    rank = n.rank(x)
    return n.emit(ops.transpose(x, axes=(*range(rank - 2), rank - 1, rank - 2)))


def diagonal(n: Node, x: Expr) -> Expr:
    """Emit the diagonals of matrices."""
    *_, rows, columns = n.shape_of(x)
    size = smin(rows, columns)
    rank = n.rank(x)
    square = n.emit(ops.slice(x, (sym(0), sym(0)), (size, size), axes=(rank - 2, rank - 1)))
    return n.emit(ops.einsum(square, equation="...ii->...i"))


def identity(n: Node, shape: Shape, dtype: str) -> Expr:
    """Emit identity matrices of a shape."""
    return n.broadcast(n.emit(ops.eye(shape[-2:], dtype=dtype)), shape)


def triangle(n: Node, x: Expr, *, upper: bool, offset: int = 0) -> Expr:
    """Emit matrices with zeros below (upper) or above a diagonal."""
    return n.emit(ops.trilu(x, (offset,), upper=upper))


def rows_in_order(n: Node, x: Expr, rows: Expr) -> Expr:
    """Emit the rows of matrices in another order."""
    indices = n.broadcast(n.emit(ops.expand_dims(rows, axes=(n.rank(rows),))), n.shape_of(x))
    return n.emit(ops.gather_elements(x, indices, axis=n.rank(x) - 2))


def stretched(n: Node, x: Expr, batch: Shape) -> Expr:
    """Broadcast matrices to a batch."""
    return n.broadcast(x, (*batch, *n.shape_of(x)[-2:]))


def triangular(n: Node, a: Expr, b: Expr, *, upper: bool, unit: bool = False) -> Expr:
    """Emit the solution of a y = b for triangular matrices of one batch."""
    b = n.fit_except(b, (*n.shape_of(a)[:-1], sym(1)), n.rank(b) - 1)
    return n.emit(ops.solve_triangular(a, b, upper=upper, unit=unit))


def solved(n: Node, lu: Expr, rows: Expr, b: Expr) -> Expr:
    """Emit the solution of x y = b by the LU factorization of x, in batches of equal shape."""
    lower = triangular(n, lu, rows_in_order(n, b, rows), upper=False, unit=True)
    return triangular(n, lu, lower, upper=True)


def one_based(n: Node, pivots: Expr) -> Expr:
    """Emit pivots as LAPACK counts them."""
    return n.cast(n.emit(ops.add(pivots, n.operand(1, "int64"))), "int32")


def is_vector(n: Node, a: Expr, b: Expr) -> bool:
    """Whether torch takes the right-hand side of a system as vectors, one for each matrix."""
    left, right = n.shape_of(a)[:-1], n.shape_of(b)
    return len(right) == 1 or (len(left) == len(right) and all(map(n.proves_equal, left, right)))


def solution(n: Node, a: Expr, b: Expr, left: bool, check_errors: bool) -> tuple[Expr, ...]:
    """Emit the solution of A X = B, or X A = B, and lu, pivots and info of A, or of its transpose."""
    vector = is_vector(n, a, b)
    lu, pivots, rows, info = n.fields(ops.lu(a if left else transposed(n, a)))
    right = n.emit(ops.expand_dims(b, axes=(n.rank(b),))) if vector else b if left else transposed(n, b)
    batch = n.shape()[: len(n.shape()) - (1 if vector else 2)]
    wide_rows = n.broadcast(rows, (*batch, n.shape_of(rows)[-1]))
    x = solved(n, stretched(n, lu, batch), wide_rows, stretched(n, right, batch))
    x = n.emit(ops.squeeze(x, axes=(n.rank(x) - 1,))) if vector else x if left else transposed(n, x)
    if check_errors:
        check_info(n, info, "torch.linalg.solve: the matrix is singular")
    return x, lu, pivots, info


@torch_op("aten._linalg_solve_ex")
def solve_ex(n: Node, A: Expr, B: Expr, left: bool = True, check_errors: bool = False) -> tuple[Expr, ...]:
    x, lu, pivots, info = solution(n, A, B, left, check_errors)
    results = (lu, one_based(n, pivots)) if left else (unused(n, 1), unused(n, 2))
    return (x, *results, n.cast(info, "int32"))


@torch_op("aten.linalg_solve")
def solve(n: Node, A: Expr, B: Expr, left: bool = True) -> Expr:
    return solution(n, A, B, left, check_errors=True)[0]


def unused(n: Node, index: int) -> Expr:
    """Return zeros for a result that the program does not use; fail if it does."""
    if n.wants(index):
        n.fail(f"result {index} of this operator is not supported")
    return n.full(n.shape(index), 0, n.dtype(index))


def check_info(n: Node, info: Expr, message: str) -> None:
    """Check at run time that every matrix of a batch could be factorized."""
    flags = n.emit(ops.equal(info, n.operand(0, n.dtype_of(info))))
    n.check(n.emit(ops.all(flags)), message)


@torch_op("aten._linalg_check_errors")
def check_errors(n: Node, info: Expr, api_name: str, is_matrix: bool) -> None:
    check_info(n, info, f"{api_name}: the matrix is singular, or not positive definite")


@torch_op("higher_order.with_effects")
def with_effects(
    n: Node, token: Any, operator: Any, *operands: Any, is_matrix: bool | None = None
) -> tuple[Any, ...]:  # fmt: skip
    """An operator that is kept for its effect: the check of a factorization. Effects have no order to keep here."""
    if str(operator) != "aten._linalg_check_errors.default":
        n.fail(f"the effect of {operator} is not supported")
    check_errors(n, *operands, is_matrix=bool(is_matrix))
    return (token, None)


@torch_op("aten.linalg_inv", "aten.inverse")
def inv(n: Node, self: Expr) -> Expr:
    lu, _, rows, info = n.fields(ops.lu(self))
    check_info(n, info, "torch.linalg.inv: the matrix is singular")
    return solved(n, lu, rows, identity(n, n.shape_of(lu), n.dtype_of(lu)))


@torch_op("aten.linalg_inv_ex")
def inv_ex(n: Node, A: Expr, check_errors: bool = False) -> tuple[Expr, Expr]:
    lu, _, rows, info = n.fields(ops.lu(A))
    if check_errors:
        check_info(n, info, "torch.linalg.inv: the matrix is singular")
    return solved(n, lu, rows, identity(n, n.shape_of(lu), n.dtype_of(lu))), n.cast(info, "int32")


def determinant_sign(n: Node, pivots: Expr, dtype: str) -> Expr:
    """Emit 1 for an even number of exchanged rows, else -1."""
    places = n.emit(ops.arange(n.operand(0, "int64"), n.operand(1, "int64"), (n.shape_of(pivots)[-1],)))
    moved = n.cast(n.emit(ops.not_equal(pivots, places)), "int64")
    odd = n.emit(ops.bitwise_and(n.emit(ops.sum(moved, axes=(-1,))), n.operand(1, "int64")))
    twice = n.emit(ops.multiply(odd, n.operand(2, "int64")))
    return n.cast(n.emit(ops.subtract(n.operand(1, "int64"), twice)), dtype)


@torch_op("aten._linalg_det")
def det(n: Node, A: Expr) -> tuple[Expr, ...]:
    lu, pivots, _, _ = n.fields(ops.lu(A))
    product = n.emit(ops.prod(diagonal(n, lu), axes=(-1,)))
    return n.emit(ops.multiply(product, determinant_sign(n, pivots, n.dtype()))), unused(n, 1), unused(n, 2)


@torch_op("aten._linalg_slogdet")
def slogdet(n: Node, A: Expr) -> tuple[Expr, ...]:
    lu, pivots, _, _ = n.fields(ops.lu(A))
    values = diagonal(n, lu)
    signs = n.emit(ops.prod(n.emit(ops.sign(values)), axes=(-1,)))
    logarithm = n.emit(ops.sum(n.emit(ops.log(n.emit(ops.abs(values)))), axes=(-1,)))
    sign = n.emit(ops.multiply(signs, determinant_sign(n, pivots, n.dtype())))
    return sign, logarithm, unused(n, 2), unused(n, 3)


# LU


def check_pivoting(n: Node, pivot: bool) -> None:
    if not pivot:
        n.fail("an LU factorization without pivoting is not supported")


@torch_op("aten.linalg_lu_factor_ex")
def lu_factor_ex(n: Node, A: Expr, pivot: bool = True, check_errors: bool = False) -> tuple[Expr, ...]:
    check_pivoting(n, pivot)
    lu, pivots, _, info = n.fields(ops.lu(A))
    if check_errors:
        check_info(n, info, "torch.linalg.lu_factor: the matrix is singular")
    return lu, one_based(n, pivots), n.cast(info, "int32")


def unpacked(n: Node, lu: Expr) -> tuple[Expr, Expr]:
    """Emit L and U of a factorization."""
    *batch, rows, columns = n.shape_of(lu)
    size, rank = smin(rows, columns), n.rank(lu)
    left = n.emit(ops.slice(lu, (sym(0),), (size,), axes=(rank - 1,)))
    lower = triangle(n, left, upper=False, offset=-1)
    unit = identity(n, (*batch, rows, size), n.dtype_of(lu))
    upper = triangle(n, n.emit(ops.slice(lu, (sym(0),), (size,), axes=(rank - 2,))), upper=True)
    return n.emit(ops.add(lower, unit)), upper


def permutation(n: Node, rows: Expr, dtype: str) -> Expr:
    """Emit the matrices P of x = P L U."""
    count = n.shape_of(rows)[-1]
    numbers = n.emit(ops.arange(n.operand(0, "int64"), n.operand(1, "int64"), (count,)))
    column = n.emit(ops.expand_dims(numbers, axes=(1,)))
    row = n.emit(ops.expand_dims(rows, axes=(n.rank(rows) - 1,)))
    return n.cast(n.emit(ops.equal(row, column)), dtype)


@torch_op("aten.linalg_lu")
def linalg_lu(n: Node, A: Expr, pivot: bool = True) -> tuple[Expr, ...]:
    check_pivoting(n, pivot)
    lu, _, rows, _ = n.fields(ops.lu(A))
    return (permutation(n, rows, n.dtype()), *unpacked(n, lu))


def row_order(n: Node, pivots: Expr, count: SymExpr) -> Expr:
    """Emit the order of rows that pivots of LAPACK make."""
    zero_based = n.emit(ops.subtract(n.cast(pivots, "int64"), n.operand(1, "int64")))
    return n.emit(ops.pivot_rows(zero_based, (count,)))


@torch_op("aten.lu_unpack")
def lu_unpack(
    n: Node, LU_data: Expr, LU_pivots: Expr, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Expr, ...]:  # fmt: skip
    empty = [n.full(n.shape(k), 0, n.dtype(k)) for k in range(3) if not (unpack_pivots if k == 0 else unpack_data)]
    first = (
        permutation(n, row_order(n, LU_pivots, n.shape_of(LU_data)[-2]), n.dtype()) if unpack_pivots else empty.pop(0)
    )
    return (first, *(unpacked(n, LU_data) if unpack_data else empty))


@torch_op("aten.linalg_lu_solve")
def lu_solve(
    n: Node, LU: Expr, pivots: Expr, B: Expr, left: bool = True, adjoint: bool = False
) -> Expr:  # fmt: skip
    """Solution of A X = B or X A = B, of the transpose of A if adjoint, by the factorization A = P L U."""
    batch = n.shape()[:-2]
    order = row_order(n, pivots, n.shape_of(LU)[-2])
    rows = n.broadcast(order, (*batch, n.shape_of(order)[-1]))
    lu = stretched(n, LU, batch)
    right = stretched(n, B if left else transposed(n, B), batch)
    if adjoint == left:  # A^T = U^T L^T P^T
        lower = triangular(n, transposed(n, lu), right, upper=False)
        upper = triangular(n, transposed(n, lu), lower, upper=True, unit=True)
        result = rows_in_order(n, upper, n.emit(ops.argsort(rows, axis=-1)))
    else:
        result = solved(n, lu, rows, right)
    return result if left else transposed(n, result)


# Triangular systems and Cholesky


@torch_op("aten.linalg_solve_triangular")
def solve_triangular(
    n: Node, self: Expr, B: Expr, upper: bool, left: bool = True, unitriangular: bool = False
) -> Expr:  # fmt: skip
    batch = n.shape()[:-2]
    a, b = stretched(n, self, batch), stretched(n, B, batch)
    if left:
        return triangular(n, a, b, upper=upper, unit=unitriangular)
    return transposed(n, triangular(n, transposed(n, a), transposed(n, b), upper=not upper, unit=unitriangular))


@torch_op("aten.triangular_solve")
def old_triangular_solve(
    n: Node, self: Expr, A: Expr, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Expr, Expr]:  # fmt: skip
    batch = n.shape()[:-2]
    a, b = stretched(n, A, batch), stretched(n, self, batch)
    matrix = transposed(n, a) if transpose else a
    return triangular(n, matrix, b, upper=upper != transpose, unit=unitriangular), a


@torch_op("aten.linalg_cholesky")
def linalg_cholesky(n: Node, self: Expr, upper: bool = False) -> Expr:
    return cholesky(n, self, upper)


@torch_op("aten.linalg_cholesky_ex")
def cholesky_ex(n: Node, self: Expr, upper: bool = False, check_errors: bool = False) -> tuple[Expr, Expr]:
    factor, info = n.fields(ops.cholesky(transposed(n, self) if upper else self))
    if check_errors:
        check_info(n, info, "torch.linalg.cholesky: the matrix is not positive definite")
    return transposed(n, factor) if upper else factor, n.cast(info, "int32")


@torch_op("aten.cholesky")
def cholesky(n: Node, self: Expr, upper: bool = False) -> Expr:
    factor, info = n.fields(ops.cholesky(transposed(n, self) if upper else self))
    check_info(n, info, "torch.cholesky: the matrix is not positive definite")
    return transposed(n, factor) if upper else factor


def solved_by_cholesky(n: Node, b: Expr, factor: Expr, *, upper: bool) -> Expr:
    """Emit the solution of L L^T y = b, or of U^T U y = b."""
    lower = transposed(n, factor) if upper else factor
    middle = triangular(n, lower, b, upper=False)
    return triangular(n, transposed(n, lower), middle, upper=True)


@torch_op("aten.cholesky_solve")
def cholesky_solve(n: Node, self: Expr, input2: Expr, upper: bool = False) -> Expr:
    batch = n.shape()[:-2]
    return solved_by_cholesky(n, stretched(n, self, batch), stretched(n, input2, batch), upper=upper)


@torch_op("aten.cholesky_inverse")
def cholesky_inverse(n: Node, self: Expr, upper: bool = False) -> Expr:
    return solved_by_cholesky(n, identity(n, n.shape_of(self), n.dtype()), self, upper=upper)


# Householder QR


def with_columns(n: Node, x: Expr, count: SymExpr) -> Expr:
    """Return the first columns of matrices, with zeros where they have fewer."""
    *_, columns = n.shape_of(x)
    if n.proves_equal(columns, count):
        return x
    after = [count - columns if k == n.rank(x) - 1 else sym(0) for k in range(n.rank(x))]
    return n.emit(ops.pad(x, (0,) * n.rank(x), tuple(after)))


@torch_op("aten.linalg_qr")
def qr(n: Node, A: Expr, mode: str = "reduced") -> tuple[Expr, Expr]:
    *_, rows, columns = n.shape_of(A)
    a, tau = n.fields(ops.geqrf(A))
    size = rows if mode == "complete" else smin(rows, columns)
    kept = n.emit(ops.slice(a, (sym(0),), (size,), axes=(n.rank(a) - 2,)))
    right = triangle(n, kept, upper=True)
    if mode == "r":
        return n.full(n.shape(), 0, n.dtype()), right
    return n.emit(ops.householder_product(with_columns(n, a, size), tau)), right


@torch_op("aten.geqrf")
def geqrf(n: Node, self: Expr) -> tuple[Expr, ...]:
    return n.fields(ops.geqrf(self))


@torch_op("aten.linalg_householder_product", "aten.orgqr")
def householder_product(n: Node, input: Expr, tau: Expr | None = None, input2: Expr | None = None) -> Expr:
    factors = tau if tau is not None else input2
    return n.emit(ops.householder_product(input, factors))


@torch_op("aten.ormqr")
def ormqr(n: Node, self: Expr, input2: Expr, input3: Expr, left: bool = True, transpose: bool = False) -> Expr:
    rows = n.shape_of(self)[-2]
    q: Expr = n.emit(ops.householder_product(with_columns(n, self, rows), input2))
    q = transposed(n, q) if transpose else q
    return n.emit(ops.matmul(*((q, input3) if left else (input3, q))))


@torch_op("aten.linalg_matrix_exp", "aten.matrix_exp")
def matrix_exp(n: Node, self: Expr) -> Expr:
    return n.emit(ops.matrix_exp(self))
