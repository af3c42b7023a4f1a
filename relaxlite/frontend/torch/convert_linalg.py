"""Converters of matrix products."""

from __future__ import annotations

from typing import Any

from relaxlite.frontend.torch.node import Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr
from relaxlite.ir.ops.scalars import HALF


@torch_op("aten.linear")
def linear(n: Node, input: Expr, weight: Expr, bias: Expr | None = None) -> Expr:
    dtype = n.dtype()
    operand = n.cast(weight, dtype)
    matrix = operand if n.rank(operand) == 1 else n.emit(ops.transpose(operand))
    product = n.emit(ops.matmul(n.cast(input, dtype), matrix))
    return product if bias is None else n.emit(ops.add(product, n.cast(bias, dtype)))


def matrix_product(n: Node, left: Expr, right: Expr, dtype: str) -> Expr:
    """Emit a matrix product by NumPy's rules; of booleans as `or` of `and`."""
    if dtype == "bool":
        return n.cast(matrix_product(n, n.cast(left, "int32"), n.cast(right, "int32"), "int32"), "bool")
    left, right = n.unify_depth(n.cast(left, dtype), n.cast(right, dtype))
    return n.emit(ops.matmul(left, right))


@torch_op("aten.mm", "aten.bmm", "aten.matmul", "aten.mv", "aten.dot", "aten.vdot", "aten.__matmul__")
def matmul(
    n: Node, self: Expr, other: Expr | None = None, mat2: Expr | None = None, vec: Expr | None = None,
    tensor: Expr | None = None,
) -> Expr:  # fmt: skip
    right = next(x for x in (other, mat2, vec, tensor) if x is not None)
    return matrix_product(n, self, right, n.dtype())


@torch_op("aten.inner")
def inner(n: Node, self: Expr, other: Expr) -> Expr:
    if not n.rank(self) or not n.rank(other):
        return n.emit(ops.multiply(n.cast(self, n.dtype()), n.cast(other, n.dtype())))
    return contract(n, self, other, [n.rank(self) - 1], [n.rank(other) - 1])


@torch_op("aten.outer", "aten.ger")
def outer(n: Node, self: Expr, vec2: Expr) -> Expr:
    column = n.emit(ops.expand_dims(n.cast(self, n.dtype()), axes=(1,)))
    op = ops.logical_and if n.dtype() == "bool" else ops.multiply
    return n.emit(op(column, n.cast(vec2, n.dtype())))


def scaled_sum(n: Node, self: Expr, product: Expr, beta: Any, alpha: Any) -> Expr:
    """Emit beta * self + alpha * product, rounded once to torch's type; with beta = 0, self is not read."""
    dtype = n.dtype()
    wide = n.dtype_of(product)

    def scaled(x: Expr, factor: Any) -> Expr:
        is_one = isinstance(factor, int | float) and factor == 1
        return x if is_one else n.emit(ops.multiply(x, n.operand(factor, wide)))

    result = scaled(product, alpha)
    if not (isinstance(beta, int | float) and beta == 0):
        result = n.emit(ops.add(n.fit(scaled(n.cast(self, wide), beta), n.shape()), result))
    return n.cast(n.broadcast(result, n.shape()), dtype)


@torch_op("aten.addmm", "aten.addmv", "aten.baddbmm")
def addmm(
    n: Node, self: Expr, mat1: Expr | None = None, mat2: Expr | None = None, mat: Expr | None = None,
    vec: Expr | None = None, batch1: Expr | None = None, batch2: Expr | None = None, beta: Any = 1, alpha: Any = 1,
) -> Expr:  # fmt: skip
    left, right = (next(x for x in group if x is not None) for group in ((mat1, mat, batch1), (mat2, vec, batch2)))
    return scaled_sum(n, self, wide_product(n, left, right), beta, alpha)


def wide_product(n: Node, left: Expr, right: Expr) -> Expr:
    """Emit a matrix product in the type in which sums are computed: float32 for half-precision floats."""
    dtype = n.dtype()
    left, right = n.unify_depth(n.cast(left, dtype), n.cast(right, dtype))
    return n.emit(ops.matmul(left, right, dtype="float32" if dtype in HALF else None))


@torch_op("aten.addbmm")
def addbmm(n: Node, self: Expr, batch1: Expr, batch2: Expr, beta: Any = 1, alpha: Any = 1) -> Expr:
    product = n.emit(ops.sum(wide_product(n, batch1, batch2), axes=(0,)))
    return scaled_sum(n, self, product, beta, alpha)


@torch_op("aten.addr")
def addr(n: Node, self: Expr, vec1: Expr, vec2: Expr, beta: Any = 1, alpha: Any = 1) -> Expr:
    dtype = n.dtype()
    if dtype == "bool":
        n.fail("addr of booleans is not supported")
    wide = "float32" if dtype in HALF else dtype
    column = n.emit(ops.expand_dims(n.cast(vec1, wide), axes=(1,)))
    return scaled_sum(n, self, n.emit(ops.multiply(column, n.cast(vec2, wide))), beta, alpha)


_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def einsum_of(n: Node, equation: str, operands: list[Expr], dtype: str) -> Expr:
    """Emit an Einstein summation; the sizes of a label are unified."""
    if dtype == "bool":
        n.fail("an Einstein summation of booleans is not supported")
    return n.emit(ops.einsum(*(n.cast(x, dtype) for x in operands), equation=equation))


def contract(n: Node, a: Expr, b: Expr, dims_a: list[int], dims_b: list[int]) -> Expr:
    """Emit the contraction of dimensions of a with dimensions of b: the free ones of a, then those of b."""
    labels = iter(_LETTERS)
    of_a = [next(labels) for _ in range(n.rank(a))]
    of_b = [next(labels) for _ in range(n.rank(b))]
    for i, j in zip(dims_a, dims_b, strict=True):
        of_b[j] = of_a[i]
    free = [x for k, x in enumerate(of_a) if k not in dims_a] + [x for k, x in enumerate(of_b) if k not in dims_b]
    return einsum_of(n, f"{''.join(of_a)},{''.join(of_b)}->{''.join(free)}", [a, b], n.dtype())


@torch_op("aten.tensordot")
def tensordot(n: Node, self: Expr, other: Expr, dims_self: list[int], dims_other: list[int]) -> Expr:
    first, second = [n.axis(self, d) for d in dims_self], [n.axis(other, d) for d in dims_other]
    return contract(n, self, other, first, second)


@torch_op("aten.einsum")
def einsum(n: Node, equation: str, tensors: list[Expr], path: Any = None) -> Expr:
    """path: the order of the products, which does not change the result."""
    return einsum_of(n, equation, tensors, n.dtype())


@torch_op("aten.bilinear")
def bilinear(n: Node, input1: Expr, input2: Expr, weight: Expr, bias: Expr | None = None) -> Expr:
    product = einsum_of(n, "...i,oij,...j->...o", [input1, weight, input2], n.dtype())
    return product if bias is None else n.emit(ops.add(product, n.cast(bias, n.dtype())))


@torch_op("aten.kron")
def kron(n: Node, self: Expr, other: Expr) -> Expr:
    """Kronecker product: each element of self times the whole of other."""
    rank = max(n.rank(self), n.rank(other))
    a, b = (n.reshape(n.cast(x, n.dtype()), (*(1,) * (rank - n.rank(x)), *n.shape_of(x))) for x in (self, other))
    left = n.emit(ops.expand_dims(a, axes=tuple(range(1, 2 * rank, 2)))) if rank else a
    right = n.emit(ops.expand_dims(b, axes=tuple(range(0, 2 * rank, 2)))) if rank else b
    op = ops.logical_and if n.dtype() == "bool" else ops.multiply
    return n.reshape(n.emit(op(left, right)), n.shape())


@torch_op("aten.cross", "aten.linalg_cross")
def cross(n: Node, self: Expr, other: Expr, dim: int | None = None) -> Expr:
    """Cross product of vectors of length 3 along a dimension; by default -1, in `torch.cross` the first of size 3."""
    a, b = (n.broadcast(n.cast(x, n.dtype()), n.shape()) for x in (self, other))
    if dim is None:
        dim = next((k for k, size in enumerate(n.shape_of(a)) if n.proves_equal(size, 3)), -1) if (
            n.target.startswith("aten.cross")) else -1  # fmt: skip
    axis = n.axis(a, dim)

    def rotated(x: Expr, shift: int) -> Expr:
        return n.emit(ops.roll(x, shift=shift, axis=axis))

    forward = n.emit(ops.multiply(rotated(a, -1), rotated(b, -2)))
    return n.emit(ops.subtract(forward, n.emit(ops.multiply(rotated(a, -2), rotated(b, -1)))))
