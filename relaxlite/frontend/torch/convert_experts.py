"""Converters of grouped matrix products, by which mixtures of experts multiply."""

from __future__ import annotations

from relaxlite.frontend.torch.node import Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr
from relaxlite.ir.ops.scalars import HALF
from relaxlite.ir.symbolic import sym


@torch_op("transformers.grouped_mm_fallback", "aten._grouped_mm")
def grouped_mm(
    n: Node, input: Expr, weight: Expr | None = None, offs: Expr | None = None, mat2: Expr | None = None
) -> Expr:
    """Rows offs[g - 1] .. offs[g] of the input times weight[g]; rows after the last are 0."""
    w = weight if weight is not None else mat2
    if offs is None or w is None or n.rank(input) != 2 or n.rank(w) != 3:
        n.fail("grouped matrix products of (rows, k) by (groups, k, n) are supported, with offsets")
    rows, dtype = n.shape_of(input)[0], n.dtype()
    wide = "float32" if dtype in HALF else dtype
    index = n.emit(ops.arange(n.operand(0, "int64"), n.operand(1, "int64"), (rows,)))
    passed = n.emit(ops.less_equal(n.cast(offs, "int64"), n.reshape(index, (rows, sym(1)))))  # (rows, groups)
    group = n.emit(ops.sum(n.cast(passed, "int64"), axes=(1,)))
    last = n.symbols.tensor(n.shape_of(w)[0] - 1, "int64")
    within = n.emit(ops.less_equal(group, last))
    clipped = n.emit(ops.minimum(group, last))
    product = n.emit(ops.grouped_rows_matmul(n.cast(input, wide), n.cast(w, wide), clipped))
    kept = n.emit(ops.where(n.reshape(within, (rows, sym(1))), product, n.operand(0, wide)))
    return n.cast(kept, dtype)
