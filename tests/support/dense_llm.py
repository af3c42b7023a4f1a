"""A whole-sequence model without a cache: tokens int64 [batch, seq] -> logits float32 [batch, seq, vocab]."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np

from relaxlite.frontend.llm.checkpoint import Checkpoint
from relaxlite.frontend.llm.layers import Decoder
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Expr, TupleGetItem, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.symbolic import SymExpr, sym
from relaxlite.ir.types import TensorType


def build_dense(checkpoint: Checkpoint) -> IRModule:
    """The module of a checkpoint; positions count from 0 in each row."""
    bb = BlockBuilder()
    batch = bb.symbol("batch", lower=1)
    seq = bb.symbol("seq", lower=1, upper=checkpoint.config.context)
    with bb.function("main", tokens=TensorType.of((batch, seq), "int64")) as (tokens,):
        decoder = Decoder(bb, checkpoint.config, checkpoint.weights)
        row = decoder.op("expand_dims", decoder.op("arange", np.int64(0), np.int64(1), (seq,)), axes=(0,))
        positions = decoder.op("broadcast_to", row, (batch, seq))
        bb.result(decoder.logits(decoder.hidden(tokens, positions, DenseAttention(decoder, seq))))
    return bb.module()


class DenseAttention:
    """Causal attention within each row of a batch [batch, seq], without a cache."""

    def __init__(self, decoder: Decoder, seq: SymExpr) -> None:
        self.decoder, self.seq = decoder, seq
        self._biases: dict[bool, Var] = {}
        self._seen: dict[int, tuple[Var, Var]] = {}  # keys and values by layer

    def __call__(self, layer: int, q: Expr, k: Expr | None, v: Expr | None) -> Expr:
        d, c = self.decoder, self.decoder.config
        scale = c.head_width_of(layer) ** -0.5 if c.query_scale is None else c.query_scale
        if k is not None and v is not None:
            self._seen[layer] = self._spread(k), self._spread(v)
        turned = [d.op("transpose", x, axes=(0, 2, 1, 3)) for x in (q, *self._seen[c.kv_layer_of(layer)])]
        keys = d.op("transpose", turned[1], axes=(0, 1, 3, 2))
        scores = d.op("multiply", d.op("matmul", turned[0], keys), np.float32(scale))
        if c.score_cap is not None:
            scores = d.soft_cap(scores, c.score_cap)
        scores = d.op("add", scores, self._bias(c.is_local_layer(layer)))
        if c.has_sinks:
            batch, heads, seq, _ = _dims(scores)
            sinks = d.vector(f"layers.{layer}.sinks").reshape(-1, 1, 1)
            scores = d.op("concat", scores, d.op("broadcast_to", sinks, (batch, heads, seq, sym(1))), axis=-1)
        weights = d.op("softmax", scores, axis=-1)
        if c.has_sinks:
            weights = d.op("slice", weights, (0,) * 4, (batch, heads, seq, seq))
        return d.op("transpose", d.op("matmul", weights, turned[2]), axes=(0, 2, 1, 3))

    def causal_convolution(self, layer: int, x: Expr, weight: Any) -> Expr:
        d, (batch, seq, width) = self.decoder, _dims(x)
        before = d.op("broadcast_to", np.zeros(1, np.float32), (batch, sym(len(weight) - 1), width))
        padded = d.op("concat", before, x, axis=1)
        terms = (
            d.op("multiply", d.op("slice", padded, (0, j, 0), (batch, seq, width)), factors)
            for j, factors in enumerate(weight)
        )
        return reduce(lambda total, term: d.op("add", total, term), terms)

    def linear_attention(self, layer: int, q: Expr, k: Expr, v: Expr, decay: Expr, beta: Expr) -> Expr:
        d, (batch, seq, heads, width) = self.decoder, _dims(v)
        net = d.config.states
        assert net is not None
        flat = [d.op("reshape", x, (batch * seq, *_dims(x)[2:])) for x in (q, k, v, decay, beta)]
        first = d.op("arange", np.int64(0), np.int64(1), (batch,))
        length = d.op("broadcast_to", d.op("shape_to_tensor", (seq,)), (batch,))
        none = d.op("broadcast_to", np.int64([-1]), (batch,))
        columns = (d.op("multiply", first, length), length, none, none)
        spans = d.op("concat", *(d.op("expand_dims", x, axes=(1,)) for x in columns), axis=1)
        pool = np.zeros((net.heads, 1, net.key_width, net.width), np.float32)
        both = d.op("gated_linear_attention", *flat, pool, spans, tiled=net.tiled, delta=net.kind == "delta")
        return d.op("reshape", d.bb.emit(TupleGetItem(both, 0)), (batch, seq, heads, width))

    def _spread(self, x: Expr) -> Var:
        """Each head of keys or values for its group of query heads."""
        d, c = self.decoder, self.decoder.config
        batch, seq, heads, width = _dims(x)
        wide = d.op("expand_dims", x, axes=(3,))
        wide = d.op("broadcast_to", wide, (batch, seq, heads, c.heads // heads.const, width))
        return d.op("reshape", wide, (batch, seq, c.heads, width))

    def _bias(self, is_local: bool) -> Var:
        """0 where row i may see column j, else the least float: [seq, seq]."""
        if is_local not in self._biases:
            d, zero, one = self.decoder, np.int64(0), np.int64(1)
            places = d.op("arange", zero, one, (self.seq,))
            rows, columns = d.op("expand_dims", places, axes=(1,)), d.op("expand_dims", places, axes=(0,))
            seen = d.op("less_equal", columns, rows)
            if is_local:
                first = d.op("subtract", rows, np.int64(d.config.window or 0))
                seen = d.op("logical_and", seen, d.op("greater", columns, first))
            self._biases[is_local] = d.op("where", seen, np.float32(0), np.float32(np.finfo(np.float32).min))
        return self._biases[is_local]


def _dims(x: Expr) -> tuple[SymExpr, ...]:
    assert isinstance(x.ty, TensorType) and x.ty.shape is not None
    return tuple(sym(d) for d in x.ty.shape)
