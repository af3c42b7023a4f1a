"""Converters of eigenvalues of symmetric matrices, of singular values, and of what follows from them."""

from __future__ import annotations

import numpy as np

from relaxlite import dtypes
from relaxlite.frontend.torch.convert_factorizations import transposed
from relaxlite.frontend.torch.node import Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import smax

# Symmetric matrices


@torch_op("aten._linalg_eigh", "aten.linalg_eigh")
def eigh(n: Node, A: Expr, UPLO: str = "L", compute_v: bool = True) -> tuple[Expr, ...]:
    return n.fields(ops.eigh(transposed(n, A) if UPLO.upper() == "U" else A))


@torch_op("aten.linalg_eigvalsh")
def eigvalsh(n: Node, self: Expr, UPLO: str = "L") -> Expr:
    return eigh(n, self, UPLO)[0]


# Singular values


def is_wide(n: Node, x: Expr) -> bool:
    """Whether matrices have provably more columns than rows: their transposes need fewer rotations."""
    *_, rows, columns = n.shape_of(x)
    return PROVER.can_prove_le(rows + 1, columns)


@torch_op("aten._linalg_svd", "aten.linalg_svd")
def svd(
    n: Node, A: Expr, full_matrices: bool = False, compute_uv: bool = True, driver: str | None = None
) -> tuple[Expr, ...]:  # fmt: skip
    if not compute_uv:
        return n.full(n.shape(0), 0, n.dtype(0)), singular_values(n, A), n.full(n.shape(2), 0, n.dtype(2))
    if not is_wide(n, A):
        return n.fields(ops.svd(A, full=full_matrices))
    v, values, uh = n.fields(ops.svd(transposed(n, A), full=full_matrices))
    return transposed(n, uh), values, transposed(n, v)


@torch_op("aten.linalg_svdvals")
def singular_values(n: Node, A: Expr, driver: str | None = None) -> Expr:
    return n.emit(ops.singular_values(transposed(n, A) if is_wide(n, A) else A))


# Pseudoinverses


@torch_op("aten.linalg_pinv.atol_rtol_tensor")
def pinv(n: Node, self: Expr, atol: Expr | None = None, rtol: Expr | None = None, hermitian: bool = False) -> Expr:
    """v diag(1 / s) u^T, with 0 for the 1 / s of values that are at most a share `rtol` of the greatest, or `atol`."""
    if hermitian:
        values, right = eigh(n, self)
        sizes, left = n.emit(ops.abs(values)), transposed(n, right)
    else:
        u, values, vh = svd(n, self)
        sizes, left, right = values, transposed(n, u), transposed(n, vh)
    inverse = n.emit(
        ops.where(is_above(n, self, sizes, atol, rtol), n.emit(ops.reciprocal(values)), n.operand(0, n.dtype()))
    )
    scaled = n.emit(ops.multiply(right, n.emit(ops.expand_dims(inverse, axes=(n.rank(inverse) - 1,)))))
    return n.emit(ops.matmul(scaled, left))


def is_above(n: Node, x: Expr, sizes: Expr, atol: Expr | None, rtol: Expr | None) -> Expr:
    """Emit which sizes of singular values or eigenvalues count, as torch.linalg defines the tolerances."""
    dtype, rank = n.dtype_of(x), n.rank(sizes)
    if rtol is None:
        share = n.emit(ops.multiply(n.symbols.tensor(smax(*n.shape_of(x)[-2:]), dtype), epsilon(n, dtype)))
        rtol = share
        if atol is not None:
            has_atol = n.emit(ops.greater(n.cast(atol, dtype), n.operand(0, dtype)))
            rtol = n.emit(ops.where(has_atol, n.operand(0, dtype), share))
    greatest = n.emit(ops.max(sizes, axes=(rank - 1,), keepdims=True))
    bound = n.emit(ops.multiply(n.emit(ops.expand_dims(n.cast(rtol, dtype), axes=(n.rank(rtol),))), greatest))
    if atol is not None:
        bound = n.emit(ops.maximum(bound, n.emit(ops.expand_dims(n.cast(atol, dtype), axes=(n.rank(atol),)))))
    return n.emit(ops.greater(sizes, bound))


def epsilon(n: Node, dtype: str) -> Expr:
    """Return the distance from 1 to the next float."""
    return n.operand(float(np.finfo(dtypes.to_numpy(dtype)).eps), dtype)
