"""Converters of linear algebra: MatMul, Gemm, Einsum, Det."""

from __future__ import annotations

from relaxlite import dtypes
from relaxlite.frontend.common.unify import unify_dims
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import SymExpr, as_int

Shape = tuple[SymExpr, ...]

_MAX_DET = 5


def emit_matmul(n: Node, a: Expr, b: Expr) -> Expr:
    """Emit a @ b; contracted dimensions with different symbols are checked at run time."""
    return n.emit(matmul_call(n, a, b))


def matmul_call(n: Node, a: Expr, b: Expr) -> Expr:
    """Return the call a @ b, see `emit_matmul`."""
    left, right = n.shape_of(a), n.shape_of(b)
    if left and right:
        a = unify_dims(n.bb, a, {len(left) - 1: right[-2] if len(right) > 1 else right[0]})
    return ops.matmul(a, b)


@onnx_op("MatMul")
def matmul(n: Node) -> Result:
    return matmul_call(n, n.input(0), n.input(1))


@onnx_op("Gemm")
def gemm(n: Node) -> Result:
    """Gemm: alpha * A' @ B' + beta * C, with C broadcast to the product."""
    alpha, beta = n.float("alpha", 1.0), n.float("beta", 1.0)
    if n.opset < 7:
        n.int("broadcast", 0)  # follows from the shape of C
    a = n.emit(ops.transpose(n.input(0), axes=(1, 0))) if n.flag("transA") else n.input(0)
    b = n.emit(ops.transpose(n.input(1), axes=(1, 0))) if n.flag("transB") else n.input(1)
    if len(n.shape_of(a)) != 2 or len(n.shape_of(b)) != 2:
        n.fail("Gemm multiplies matrices: its first two inputs must have rank 2")
    product = matmul_call(n, a, b)
    if alpha != 1.0:
        product = scale_by(n, n.emit(product), alpha)
    c = n.optional(2)
    if c is None or beta == 0.0:
        return product
    result = n.emit(product)
    added = _broadcast_to_product(n, c if beta == 1.0 else n.emit(scale_by(n, c, beta)), n.shape_of(result))
    return ops.add(result, added)


def _broadcast_to_product(n: Node, x: Expr, target: Shape) -> Expr:
    """Broadcast x to a shape unless a sum of x and a tensor of this shape provably has the shape."""
    dims = n.shape_of(x)
    pairs = zip(reversed(dims), reversed(target), strict=False)
    fits = (as_int(d) == 1 or PROVER.can_prove_equal(d, t) or PROVER.can_prove_ne(t, 1) for d, t in pairs)
    return x if len(dims) <= len(target) and all(fits) else n.emit(ops.broadcast_to(x, target))


def scale_by(n: Node, x: Expr, factor: float) -> Expr:
    """Return x * factor in the dtype of x; integers times a fraction are computed in float64."""
    dtype = n.type_of(x).dtype
    if not dtypes.is_float(dtype) and factor != int(factor):
        wide = n.emit(ops.multiply(n.emit(ops.cast(x, dtype="float64")), Constant.of(factor, "float64")))
        return ops.cast(wide, dtype=dtype)
    return ops.multiply(x, Constant.of(factor, dtype))


@onnx_op("Einsum", since=12)
def einsum(n: Node) -> Result:
    return ops.einsum(*n.all_inputs(), equation=n.text("equation"))


@onnx_op("Det", since=11)
def det(n: Node) -> Result:
    """Det, by Laplace expansion along the first row, meant for small matrices."""
    size = as_int(n.shape()[-1])
    if size is None or not 1 <= size <= _MAX_DET or as_int(n.shape()[-2]) != size:
        n.fail(f"Det is supported for matrices of 1x1 to {_MAX_DET}x{_MAX_DET}, got {n.type()}")
    axis = n.rank() - 2
    rows = [n.emit(ops.slice(n.input(0), (k,), (1,), axes=(axis,))) for k in range(size)]
    cells: list[list[Expr]] = [
        [n.emit(ops.slice(row, (k,), (1,), axes=(axis + 1,))) for k in range(size)] for row in rows
    ]
    return ops.reshape(_expand(n, cells), n.shape()[:-2])


def _expand(n: Node, cells: list[list[Expr]]) -> Expr:
    if len(cells) == 1:
        return cells[0][0]
    total: Expr | None = None
    for k, cell in enumerate(cells[0]):
        minor = _expand(n, [row[:k] + row[k + 1 :] for row in cells[1:]])
        term = n.emit(ops.multiply(cell, minor))
        total = term if total is None else n.emit((ops.subtract if k % 2 else ops.add)(total, term))
    assert total is not None
    return total
