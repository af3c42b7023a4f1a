"""Access to each matrix of a batch, and checks of operands, shared by ops on matrices."""

from __future__ import annotations

from collections.abc import Callable

from relaxlite.dtypes import DType
from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Op
from relaxlite.ir.ops.broadcast import Shape
from relaxlite.ir.ops.elementwise import check_dtype
from relaxlite.ir.ops.linalg import equality_checks
from relaxlite.ir.ops.scalars import Number, Scalar, literal
from relaxlite.ir.program import Buffer, Stmt, Store, loops, seq
from relaxlite.ir.symbolic import SymExpr
from relaxlite.ir.types import TensorType

ACCEPTS = ("float32", "float64")


class Matrix:
    """One matrix of a batch: element access by row and column."""

    def __init__(self, buffer: Buffer, batch: Shape) -> None:
        self.buffer, self.batch = buffer, batch

    def __getitem__(self, at: tuple[SymExpr, ...]) -> Scalar:
        place = (*self.batch, *at)
        return Scalar(self.buffer[place])

    def set(self, at: tuple[SymExpr, ...], value: Scalar | Number) -> Stmt:
        """Build the store of an element, cast to the dtype of the matrix."""
        dtype = self.buffer.dtype
        new = value.cast(dtype) if isinstance(value, Scalar) else Scalar(literal(value, dtype))
        return Store(self.buffer, (*self.batch, *at), new.value)


def workspace(name: str, *shape: SymExpr, dtype: DType = "float64") -> Matrix:
    """Return memory for a matrix or vector, which `allocate` must enclose."""
    return Matrix(Buffer.of(name, shape, dtype), ())


def each_matrix(batch: Shape, make: Callable[..., Stmt]) -> Stmt:
    """Loops over the matrices of a batch."""
    return loops("bcdefg", batch, make)


class MatrixOp(Op):
    """Base of ops on (..., m, n)."""

    def matrices(self, x: Expr, name: str) -> TensorType:
        """Check that an operand is a batch of matrices, and return its type."""
        ty = self.tensor(x, name)
        check_dtype(self, ty, ACCEPTS, name)
        if (ty.rank or 0) < 2:
            self.fail(f"{name} must have the dimensions of a matrix, got {ty}")
        return ty

    def square_checks(self, x: Buffer) -> Stmt:
        return seq(*equality_checks(f"{self.name}: a matrix must be square", (x.shape[-2], x.shape[-1])))
