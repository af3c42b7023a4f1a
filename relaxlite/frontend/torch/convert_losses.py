"""Converters of losses that torch has as operators of their own and does not decompose."""

from __future__ import annotations

from typing import Any

import torch

from relaxlite.frontend.torch.node import Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr


@torch_op("torch_nn._linear_cross_entropy_batch_chunked_no_reduction")
def linear_cross_entropy_per_row(
    n: Node, input: Expr, linear_weight: Expr, target: Expr, linear_bias: Expr | None, weight: Expr | None,
    ignore_index: int, batch_chunk_size: int, acc_policy: str, acc_dtype: torch.dtype,
) -> Expr:  # fmt: skip
    losses, _ = _losses(n, input, linear_weight, target, linear_bias, weight, ignore_index)
    return n.cast(losses, n.dtype())


@torch_op("torch_nn._linear_cross_entropy_batch_chunked")
def linear_cross_entropy(
    n: Node, input: Expr, linear_weight: Expr, target: Expr, linear_bias: Expr | None, weight: Expr | None,
    reduction: str, ignore_index: int, label_smoothing: float, batch_chunk_size: int, acc_policy: str,
    acc_dtype: torch.dtype, allow_retain_graph: bool, compute_input_grad: bool, compute_linear_weight_grad: bool,
    compute_linear_bias_grad: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """The loss; the gradients that torch computes beside it are refused where they are used."""
    if label_smoothing or any(n.wants(k) for k in (1, 2, 3)):
        n.fail("linear_cross_entropy in chunks with label smoothing, or with gradients, is not supported")
    losses, shares = _losses(n, input, linear_weight, target, linear_bias, weight, ignore_index)
    total: Expr = n.emit(ops.sum(losses))
    if reduction == "mean":
        total = n.emit(ops.divide(total, n.emit(ops.sum(shares))))
    return n.cast(total, n.dtype()), None, None, None


def _losses(
    n: Node, x: Expr, matrix: Expr, target: Expr, bias: Expr | None, weight: Expr | None, ignored: int
) -> tuple[Expr, Expr]:
    """Return the loss of each row (n,), and its share of a mean: the weight of its class, 0 where it is ignored."""
    dtype = "float64" if n.dtype() == "float64" else "float32"
    logits = n.emit(ops.matmul(n.cast(x, dtype), n.emit(ops.transpose(n.cast(matrix, dtype)))))
    if bias is not None:
        logits = n.emit(ops.add(logits, n.cast(bias, dtype)))
    rows, zero = n.shape_of(target)[0], n.operand(0, dtype)
    is_ignored = n.emit(ops.equal(target, n.operand(ignored, n.dtype_of(target))))
    classes = n.emit(ops.where(is_ignored, n.operand(0, n.dtype_of(target)), target))
    scores = n.emit(ops.log_softmax(logits, axis=1))
    picked = n.reshape(n.emit(ops.gather_elements(scores, n.reshape(classes, (rows, 1)), axis=1)), (rows,))
    shares = n.operand(1, dtype) if weight is None else n.emit(ops.gather(n.cast(weight, dtype), classes, axis=0))
    shares = n.emit(ops.where(is_ignored, zero, shares))
    losses = n.emit(ops.neg(n.emit(ops.multiply(picked, shares))))
    return n.emit(ops.where(is_ignored, zero, losses)), shares
