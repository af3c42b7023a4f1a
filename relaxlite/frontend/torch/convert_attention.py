"""Converters of scaled dot-product attention."""

from __future__ import annotations

import math
from typing import Any

from relaxlite.frontend.torch.iota import unbroadcast
from relaxlite.frontend.torch.node import Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr
from relaxlite.ir.symbolic import as_int, sym


@torch_op("aten.scaled_dot_product_attention")
def scaled_dot_product_attention(
    n: Node, query: Expr, key: Expr, value: Expr, attn_mask: Expr | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: Any = None, enable_gqa: bool = False,
) -> Expr:  # fmt: skip
    """Attention over the last two dimensions. Rows whose keys are all masked give 0, as in torch."""
    if dropout_p:
        n.fail("attention with dropout is random; export the model in eval mode: model.eval()")
    dtype = n.dtype()
    operands = [n.cast(x, dtype) for x in (query, key, value)]
    rank = max(3, *(n.rank(x) for x in operands))
    q, k, v = (n.reshape(x, (*(sym(1),) * (rank - n.rank(x)), *n.shape_of(x))) for x in operands)
    batch = n.shape()[:-2]
    q = n.fit(q, (*(sym(1),) * (rank - 2 - len(batch)), *batch, *n.shape_of(q)[-2:]))
    width = n.shape_of(q)[-1]
    attrs: dict[str, Any] = {"zero_nan": True, "group": _group(n, q, k) if enable_gqa else 1}
    if scale is None and as_int(width) is not None:
        attrs["scale"] = 1 / math.sqrt(int(width)) if int(width) else 1.0
    elif isinstance(scale, int | float):
        attrs["scale"] = float(scale)
    else:
        q = n.emit(ops.multiply(q, _symbolic_scale(n, scale, width, dtype)))
    k = n.fit(k, (*n.shape_of(k)[:-1], width))
    length = n.shape_of(k)[-2]
    v = n.fit(v, (*n.shape_of(v)[:-2], length, n.shape_of(v)[-1]))
    added: list[Expr] = []
    if attn_mask is not None:
        full = (*n.shape()[:-2], n.shape_of(q)[-2], length)
        mask = n.fit(unbroadcast(n, attn_mask), full)
        if n.dtype_of(mask) == "bool":
            attrs |= {"masked": -math.inf, "masked_where": False}
        else:
            mask = n.cast(mask, dtype)
        added.append(mask)
    elif is_causal:
        added.append(_causal(n, n.shape_of(q)[-2], length))
        attrs |= {"masked": -math.inf, "masked_where": True}
    result = n.emit(ops.attention(q, k, v, *added, **attrs))
    return n.reshape(result, n.shape())


def _group(n: Node, q: Expr, k: Expr) -> int:
    """Return how many matrices of q share one of k."""
    heads, shared = n.shape_of(q)[-3], n.shape_of(k)[-3]
    group = as_int(heads // shared) if not n.proves_equal(heads, shared) else 1
    if group is None or not n.proves_equal(shared * group, heads):
        n.fail(f"enable_gqa: {heads} heads of queries are not a constant multiple of {shared} of keys")
    return group


def _symbolic_scale(n: Node, scale: Any, width: Any, dtype: str) -> Expr:
    if scale is not None:
        return n.operand(scale, dtype)
    return n.cast(n.emit(ops.rsqrt(n.symbols.tensor(width, "float64"))), dtype)


def _causal(n: Node, queries: Any, keys: Any) -> Expr:
    """Return the mask (queries, keys) that is true where a key comes after its query; aligned to the top left."""
    rows = n.emit(ops.arange(n.operand(0, "int64"), n.operand(1, "int64"), (queries,)))
    columns = n.emit(ops.arange(n.operand(0, "int64"), n.operand(1, "int64"), (keys,)))
    return n.emit(ops.greater(columns, n.reshape(rows, (queries, sym(1)))))


@torch_op("aten._scaled_dot_product_flash_attention_for_cpu")
def flash_attention(
    n: Node, query: Expr, key: Expr, value: Expr, dropout_p: float = 0.0, is_causal: bool = False,
    attn_mask: Expr | None = None, scale: Any = None,
) -> tuple[Expr, None]:  # fmt: skip
    if n.wants(1):
        n.fail("the logarithms of sums of attention are for gradients only")
    return scaled_dot_product_attention(n, query, key, value, attn_mask, dropout_p, is_causal, scale), None
