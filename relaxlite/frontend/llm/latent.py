"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): of each token one narrow vector is kept, of which every
head makes its keys and values.

Keys are never made: a head's product with its queries is one of the vector itself with queries that went through the
head's matrix before, and values come of the sum of vectors, not of each one. So attention has one head of keys, of the
vector and of the few elements that the rotary embedding turns, and a step reads of a token of DeepSeek-V2-Lite 1,088
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
    """What all heads of a layer found, side by side: [..., heads * width]"""
    c, net, name = d.config, d.config.latent, f"layers.{k}"
    assert net is not None
    rope = c.rope_of(k)
    assert rope is not None
    given = x
    if net.query_rank is not None:
        down = d.linear(f"{name}.q_down", x, c.has_qkv_bias)
        given = d.op("rms_norm", down, d.vector(f"{name}.q_down_norm"), epsilon=net.norm_epsilon)
    q = d.heads(d.linear(f"{name}.q", given), c.heads, net.plain + net.turned)
    kept = d.linear(f"{name}.kv_down", x, c.has_qkv_bias, is_kept=True)
    latent = d.op("rms_norm", _part(d, kept, 0, net.rank), d.vector(f"{name}.kv_norm"), epsilon=net.norm_epsilon)
    latent = d.heads(latent, 1, net.rank)
    turned = d.rotate(d.heads(_part(d, kept, net.rank, net.turned), 1, net.turned), positions, rope)
    through = _by_head(d, [f"{name}.latent_keys.{h}" for h in range(c.heads)], _part(d, q, 0, net.plain))
    queries = d.op("concat", through, d.rotate(_part(d, q, net.plain, net.turned), positions, rope), axis=-1)
    result = mix(k, queries, d.op("concat", latent, turned, axis=-1), latent)
    values = _by_head(d, [f"{name}.latent_values.{h}" for h in range(c.heads)], result)
    return d.op("reshape", values, (*_dims(values)[:-2], c.heads * net.width))


def _by_head(d: Decoder, names: Sequence[str], x: Expr) -> Var:
    """Each head's row of x [..., heads, in] times the matrix of that name: [..., heads, out]. In blocks that are
    multiplied in integers, rows are sorted by head, as by expert (mixture.py)."""
    *lead, heads, width = _dims(x)
    rows = product(lead)
    if d.groups_rows and d.can_stack(names):
        count = np.int64(heads.const)
        flat = d.op("arange", np.int64(0), np.int64(1), (rows * heads,))
        numbers = d.op("subtract", flat, d.op("multiply", d.op("floor_divide", flat, count), count))
        by_head = d.op("group_rows", numbers, groups=heads.const)
        order, places, spans = (d.bb.emit(TupleGetItem(by_head, k)) for k in range(3))
        given = d.op("gather", d.op("reshape", x, (rows * heads, width)), order, axis=0)
        result = d.grouped(names, given, spans, d.op("gather", numbers, order, axis=0))
        result = d.op("gather", result, places, axis=0)
    else:
        turned = d.op("transpose", d.op("reshape", x, (rows, heads, width)), axes=(1, 0, 2))
        result = d.op("transpose", d.op("matmul", turned, d.stack(names)), axes=(1, 0, 2))
    return d.op("reshape", result, (*lead, heads, _dims(result)[-1]))


def _part(d: Decoder, x: Expr, first: int, count: int) -> Var:
    """Of the last dimension."""
    lead = _dims(x)[:-1]
    return d.op("slice", x, (*(0 for _ in lead), first), (*lead, count))


def _dims(x: Expr) -> tuple[SymExpr, ...]:
    assert isinstance(x.ty, TensorType) and x.ty.shape is not None
    return tuple(sym(dim) for dim in x.ty.shape)
