"""Layers of Mamba-2 (Dao and Gu, arXiv 2405.21060): a state space model as linear attention with decay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relaxlite.ir.expr import Expr, Var
from relaxlite.ir.symbolic import sym
from relaxlite.ir.types import TensorType

if TYPE_CHECKING:
    from relaxlite.frontend.llm.layers import Decoder, Mixer


def mamba(d: Decoder, k: int, x: Expr, mix: Mixer) -> Var:
    """Emit the token mixer of layer `k` up to its output projection: gated, normed heads [..., heads * width]."""
    c, name = d.config.states, f"layers.{k}.mamba"
    assert c is not None and isinstance(x.ty, TensorType) and x.ty.shape is not None
    lead, value_channels = tuple(sym(dim) for dim in x.ty.shape[:-1]), c.heads * c.width

    # operands of the state, whose rounding errors reach all later tokens: never in relaxed precision
    xbc, time = (d.linear(f"{name}_{part}", x, c.has_bias, is_cached=True) for part in ("given", "time"))
    mixed = mix.causal_convolution(k, xbc, np.ascontiguousarray(d.vector(f"{name}_conv").T))
    if c.has_conv_bias:
        mixed = d.op("add", mixed, d.vector(f"{name}_conv_bias"))
    mixed = d.silu(mixed)
    value = d.channels(mixed, 0, c.heads, c.width)
    key, query = (
        d.channels(mixed, value_channels + at, c.key_heads, c.key_width) for at in (0, c.key_heads * c.key_width)
    )
    step = d.op("softplus", d.op("add", time, d.vector(f"{name}_step")))
    decay = d.op("multiply", step, d.vector(f"{name}_rate"))
    result = mix.linear_attention(k, query, key, value, decay, step)
    result = d.op("add", result, d.op("multiply", value, d.vector(f"{name}_skip").reshape(-1, 1)))
    gate = d.linear(f"{name}_gate", x, c.has_bias)
    gated = d.op("multiply", d.op("reshape", result, (*lead, value_channels)), d.silu(gate))
    # a norm over all heads that share keys
    groups = d.op("reshape", gated, (*lead, c.key_heads, value_channels // c.key_heads))
    ones = np.ones(value_channels // c.key_heads, np.float32)
    normed = d.op("rms_norm", groups, ones, epsilon=d.config.norm_epsilon)
    return d.op("multiply", d.op("reshape", normed, (*lead, value_channels)), d.vector(f"{name}_scale"))
