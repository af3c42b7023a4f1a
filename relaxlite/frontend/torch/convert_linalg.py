"""Converters of matrix products."""

from __future__ import annotations

from relaxlite.frontend.torch.node import Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr


@torch_op("aten.linear")
def linear(n: Node, input: Expr, weight: Expr, bias: Expr | None = None) -> Expr:
    dtype = n.dtype()
    operand = n.cast(weight, dtype)
    matrix = operand if n.rank(operand) == 1 else n.emit(ops.transpose(operand))
    product = n.emit(ops.matmul(n.cast(input, dtype), matrix))
    return product if bias is None else n.emit(ops.add(product, n.cast(bias, dtype)))


@torch_op("aten.mm", "aten.bmm", "aten.matmul", "aten.mv", "aten.dot", "aten.vdot", "aten.inner")
def matmul(
    n: Node, self: Expr, other: Expr | None = None, mat2: Expr | None = None, vec: Expr | None = None,
    tensor: Expr | None = None, tensor2: Expr | None = None,
) -> Expr:  # fmt: skip
    right = next(x for x in (other, mat2, vec, tensor, tensor2) if x is not None)
    if n.target.startswith("aten.inner") and n.rank(right) > 1:
        right = n.emit(ops.transpose(right))
    left, right = n.unify_depth(n.cast(self, n.dtype()), n.cast(right, n.dtype()))
    return n.emit(ops.matmul(left, right))
