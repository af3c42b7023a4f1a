"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) with one KV head for all heads.

A narrow vector per token is cached, of which keys and values of all heads are projections. Keys and values are never
materialized ("absorbed" projections): queries are multiplied by the key projection of their head, which makes the
vector itself the key; the value projection is applied to the weighted sum of vectors. Attention thus has one KV head,
of the vector and of the few elements under the rotary embedding. Of a token of DeepSeek-V2-Lite a step reads 1,088
numbers in place of 5,120.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from relaxlite.ir.expr import Expr, TupleGetItem, Var
from relaxlite.ir.symbolic import SymExpr, product, sym
from relaxlite.ir.types import TensorType

if TYPE_CHECKING:
    from relaxlite.frontend.llm.layers import Decoder, Mixer


def latent_attention(d: Decoder, k: int, x: Expr, positions: Expr, mix: Mixer) -> Var:
    """Emit the attention of layer `k` up to its output projection: [..., heads * width]."""
    c, mla, name = d.config, d.config.latent, f"layers.{k}"
    assert mla is not None
    rope = c.rope_of(k)
    assert rope is not None
    query_input = x
    if mla.query_rank is not None:
        down = d.linear(f"{name}.q_down", x, c.has_qkv_bias)
        query_input = d.op("rms_norm", down, d.vector(f"{name}.q_down_norm"), epsilon=mla.norm_epsilon)
    q = d.heads(d.linear(f"{name}.q", query_input), c.heads, mla.nope_width + mla.rope_width)
    cached = d.linear(f"{name}.kv_down", x, c.has_qkv_bias, is_cached=True)
    latent = d.op("rms_norm", _part(d, cached, 0, mla.rank), d.vector(f"{name}.kv_norm"), epsilon=mla.norm_epsilon)
    latent = d.heads(latent, 1, mla.rank)
    rope_key = d.apply_rope(d.heads(_part(d, cached, mla.rank, mla.rope_width), 1, mla.rope_width), positions, rope)
    absorbed = _by_head(d, [f"{name}.latent_keys.{h}" for h in range(c.heads)], _part(d, q, 0, mla.nope_width))
    queries = d.op(
        "concat", absorbed, d.apply_rope(_part(d, q, mla.nope_width, mla.rope_width), positions, rope), axis=-1
    )
    result = mix(k, queries, d.op("concat", latent, rope_key, axis=-1), latent)
    values = _by_head(d, [f"{name}.latent_values.{h}" for h in range(c.heads)], result)
    return d.op("reshape", values, (*_dims(values)[:-2], c.heads * mla.width))


def _by_head(d: Decoder, names: Sequence[str], x: Expr) -> Var:
    """Multiply each head's row of x [..., heads, in] by its matrix: [..., heads, out].

    With blocked weights that are multiplied in integers, rows are grouped by head, as by expert (mixture.py).
    """
    *lead, heads, width = _dims(x)
    rows = product(lead)
    if d.groups_rows and d.can_stack(names):
        count = np.int64(heads.const)
        flat = d.op("arange", np.int64(0), np.int64(1), (rows * heads,))
        numbers = d.op("subtract", flat, d.op("multiply", d.op("floor_divide", flat, count), count))
        by_head = d.op("group_rows", numbers, groups=heads.const)
        order, places, spans = (d.bb.emit(TupleGetItem(by_head, k)) for k in range(3))
        grouped_rows = d.op("gather", d.op("reshape", x, (rows * heads, width)), order, axis=0)
        result = d.grouped(names, grouped_rows, spans, d.op("gather", numbers, order, axis=0))
        result = d.op("gather", result, places, axis=0)
    else:
        head_rows = d.op("transpose", d.op("reshape", x, (rows, heads, width)), axes=(1, 0, 2))
        result = d.op("transpose", d.op("matmul", head_rows, d.stack(names)), axes=(1, 0, 2))
    return d.op("reshape", result, (*lead, heads, _dims(result)[-1]))


def _part(d: Decoder, x: Expr, first: int, count: int) -> Var:
    """Slice `count` elements of the last dimension."""
    lead = _dims(x)[:-1]
    return d.op("slice", x, (*(0 for _ in lead), first), (*lead, count))


def _dims(x: Expr) -> tuple[SymExpr, ...]:
    assert isinstance(x.ty, TensorType) and x.ty.shape is not None
    return tuple(sym(dim) for dim in x.ty.shape)
