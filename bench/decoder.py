"""A Llama-shaped decoder built with the builder API, every part written out as exporters write it.

Touvron et al., "LLaMA" (arXiv 2302.13971): RMS norm, rotary embedding, grouped-query attention, SiLU-gated MLP. The
function takes a batch of token sequences behind a past of any length, which each layer's keys and values hold:

    main(tokens: i64[batch, seq], k_0: f32[batch, heads, past, width], v_0: ..., k_1, ...)
        -> (logits f32[batch, 1, vocab] of the last token, k_0: f32[batch, heads, past + seq, width], v_0, ...)

so a prefill is a call with past = 0, and a decoding step one with seq = 1. Weights are random, from one seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from relaxlite.ir import ops  # noqa: F401  (registers them)
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Expr, Tuple, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import get_op
from relaxlite.ir.symbolic import SymExpr
from relaxlite.ir.types import TensorType


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of a decoder; `max_batch` and `context` bound its symbols (None: unbounded)."""

    layers: int = 8
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 2
    intermediate: int = 1408
    vocab: int = 8192
    rope_base: float = 10000.0
    epsilon: float = 1e-5
    max_batch: int | None = None
    context: int | None = None

    @property
    def width(self) -> int:
        return self.hidden // self.heads


def build_decoder(config: DecoderConfig | None = None, seed: int = 0) -> IRModule:
    """The module of a decoder."""
    return _Decoder(config or DecoderConfig(), seed).module()


class _Decoder:
    def __init__(self, config: DecoderConfig, seed: int) -> None:
        self.config, self.bb, self.rng = config, BlockBuilder(), np.random.default_rng(seed)
        upper = config.context
        self.batch = self.bb.symbol("batch", lower=1, upper=config.max_batch)
        self.seq = self.bb.symbol("seq", lower=1, upper=upper)
        self.past = self.bb.symbol("past", lower=0, upper=upper)

    def module(self) -> IRModule:
        c, bb = self.config, self.bb
        cache = TensorType.of((self.batch, c.kv_heads, self.past, c.width), "float32")
        params = [Var("tokens", TensorType.of((self.batch, self.seq), "int64"))]
        params += [Var(f"{name}_{k}", cache) for k in range(c.layers) for name in "kv"]
        with bb.function_with_params("main", tuple(params)):
            x = self.op("gather", self.weight(c.vocab, c.hidden, scale=1.0), params[0], axis=0)
            cos, sin = self.rotary_tables()
            bias = self.causal_bias()
            results: list[Expr] = []
            for k in range(c.layers):
                keys, values = params[1 + 2 * k : 3 + 2 * k]
                attended, *kept = self.attention(self.norm(x), keys, values, cos, sin, bias)
                x = self.op("add", x, attended)
                x = self.op("add", x, self.mlp(self.norm(x)))
                results += kept
            last = self.op("slice", x, (0, self.seq - 1, 0), (self.batch, 1, c.hidden))
            logits = self.linear(self.norm(last), c.vocab)
            bb.result(Tuple((logits, *results)))
        return bb.module()

    # parts

    def op(self, name: str, *args: object, **attrs: object) -> Var:
        return self.bb.emit(get_op(name)(*args, **attrs))  # type: ignore[arg-type]

    def weight(self, *shape: int, scale: float | None = None) -> np.ndarray:
        scale = shape[0] ** -0.5 if scale is None else scale
        return (scale * self.rng.standard_normal(shape)).astype(np.float32)

    def linear(self, x: Expr, width: int) -> Var:
        return self.op("matmul", x, self.weight(x.ty.shape[-1].const, width))  # type: ignore[union-attr]

    def norm(self, x: Expr) -> Var:
        """x / sqrt(mean(x^2) + epsilon) * weight"""
        square = self.op("mean", self.op("multiply", x, x), axes=(2,), keepdims=True)
        root = self.op("rsqrt", self.op("add", square, np.float32(self.config.epsilon)))
        scale = (1 + 0.1 * self.rng.standard_normal(self.config.hidden)).astype(np.float32)
        return self.op("multiply", self.op("multiply", x, root), scale)

    def rotary_tables(self) -> tuple[Var, Var]:
        """cos and sin of position * frequency, each [seq, width]."""
        c, half = self.config, self.config.width // 2
        start = self.op("squeeze", self.op("shape_to_tensor", (self.past,)), axes=(0,))
        places = self.op("arange", start, np.int64(1), (self.seq,))
        places = self.op("expand_dims", self.op("cast", places, dtype="float32"), axes=(1,))
        frequencies = (c.rope_base ** (-np.arange(half) / half)).astype(np.float32)
        angles = self.op("multiply", places, np.concatenate([frequencies, frequencies])[None])
        return self.op("cos", angles), self.op("sin", angles)

    def rotate(self, x: Expr, cos: Expr, sin: Expr, heads: int) -> Var:
        """The rotary embedding of x: [batch, heads, seq, width], halves of a row being the two components."""
        half = self.config.width // 2
        size = (self.batch, heads, self.seq, half)
        first, second = (self.op("slice", x, (0, 0, 0, begin), size) for begin in (0, half))
        turned = self.op("concat", self.op("neg", second), first, axis=3)
        return self.op("add", self.op("multiply", x, cos), self.op("multiply", turned, sin))

    def causal_bias(self) -> Var:
        """0 where query past + i may see key j (j <= past + i), else the least float: [seq, past + seq]."""
        zero, one = np.int64(0), np.int64(1)
        rows = self.op("expand_dims", self.op("arange", zero, one, (self.seq,)), axes=(1,))
        rows = self.op("add", rows, self.op("squeeze", self.op("shape_to_tensor", (self.past,)), axes=(0,)))
        columns = self.op("expand_dims", self.op("arange", zero, one, (self.past + self.seq,)), axes=(0,))
        seen = self.op("less_equal", columns, rows)
        return self.op("where", seen, np.float32(0), np.float32(np.finfo(np.float32).min))

    def heads_of(self, x: Expr, heads: int) -> Var:
        """[batch, seq, heads * width] -> [batch, heads, seq, width]"""
        parted = self.op("reshape", x, (self.batch, self.seq, heads, self.config.width))
        return self.op("transpose", parted, axes=(0, 2, 1, 3))

    def shared(self, x: Expr, length: SymExpr) -> Var:
        """Each head of keys or values for its group of query heads: [batch, heads, length, width]."""
        c = self.config
        group = c.heads // c.kv_heads
        wide = self.op("expand_dims", x, axes=(2,))
        wide = self.op("broadcast_to", wide, (self.batch, c.kv_heads, group, length, c.width))
        return self.op("reshape", wide, (self.batch, c.heads, length, c.width))

    def attention(self, x: Expr, past_k: Var, past_v: Var, cos: Expr, sin: Expr, bias: Expr) -> tuple[Var, Var, Var]:
        """What is attended to, and the keys and values with those of these tokens behind them."""
        c, total = self.config, self.past + self.seq
        q = self.rotate(self.heads_of(self.linear(x, c.hidden), c.heads), cos, sin, c.heads)
        k = self.rotate(self.heads_of(self.linear(x, c.kv_heads * c.width), c.kv_heads), cos, sin, c.kv_heads)
        v = self.heads_of(self.linear(x, c.kv_heads * c.width), c.kv_heads)
        k, v = self.op("concat", past_k, k, axis=2), self.op("concat", past_v, v, axis=2)
        keys = self.op("transpose", self.shared(k, total), axes=(0, 1, 3, 2))
        scores = self.op("multiply", self.op("matmul", q, keys), np.float32(c.width**-0.5))
        weights = self.op("softmax", self.op("add", scores, bias), axis=-1)
        mixed = self.op("transpose", self.op("matmul", weights, self.shared(v, total)), axes=(0, 2, 1, 3))
        joined = self.op("reshape", mixed, (self.batch, self.seq, c.hidden))
        return self.linear(joined, c.hidden), k, v

    def mlp(self, x: Expr) -> Var:
        c = self.config
        gate, up = self.linear(x, c.intermediate), self.linear(x, c.intermediate)
        gate = self.op("multiply", gate, self.op("sigmoid", gate))
        return self.linear(self.op("multiply", gate, up), c.hidden)
