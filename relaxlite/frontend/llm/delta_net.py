"""Layers of the gated delta rule (Yang et al., arXiv 2412.06464), as in Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relaxlite.ir.expr import Expr, Var
from relaxlite.ir.symbolic import sym
from relaxlite.ir.types import TensorType

if TYPE_CHECKING:
    from relaxlite.frontend.llm.layers import Decoder, Mixer

_EPSILON = 1e-6  # of the norms of queries and keys


def delta_net(d: Decoder, k: int, x: Expr, mix: Mixer) -> Var:
    """Emit the token mixer of layer `k` up to its output projection: normed, gated heads [..., heads * width]."""
    c, name = d.config.states, f"layers.{k}.delta"
    assert c is not None and isinstance(x.ty, TensorType) and x.ty.shape is not None
    lead = tuple(sym(dim) for dim in x.ty.shape[:-1])

    # operands of the state, whose rounding errors reach all later tokens: never in relaxed precision
    qkv, alpha, beta = (d.linear(f"{name}_{part}", x, is_cached=True) for part in ("qkv", "alpha", "beta"))
    mixed = mix.causal_convolution(k, qkv, np.ascontiguousarray(d.vector(f"{name}_conv").T))
    mixed = d.silu(mixed)
    keys = c.key_heads * c.key_width
    query, key = (d.channels(mixed, first, c.key_heads, c.key_width) for first in (0, keys))
    value = d.channels(mixed, 2 * keys, c.heads, c.width)
    # L2 norms, as RMS norms times a constant; queries times width**-0.5 besides, as in attention
    unit = np.full(c.key_width, c.key_width**-0.5, np.float32)
    query, key = (
        d.op("rms_norm", y, unit * np.float32(factor), epsilon=_EPSILON / c.key_width)
        for y, factor in ((query, c.key_width**-0.5), (key, 1.0))
    )
    step = d.op("softplus", d.op("add", alpha, d.vector(f"{name}_step")))
    decay = d.op("multiply", step, d.vector(f"{name}_rate"))
    result = mix.linear_attention(k, query, key, value, decay, d.op("sigmoid", beta))
    normed = d.op("rms_norm", result, d.vector(f"{name}_scale"), epsilon=d.config.norm_epsilon)
    gate = d.linear(f"{name}_gate", x)
    flat = d.op("reshape", normed, (*lead, c.heads * c.width))
    return d.op("multiply", flat, d.silu(gate))
