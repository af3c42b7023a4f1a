"""A whole-sequence model without a cache: tokens int64 [batch, seq] -> logits float32 [batch, seq, vocab]."""

from __future__ import annotations

import numpy as np

from relaxlite.frontend.llm.checkpoint import Checkpoint
from relaxlite.frontend.llm.layers import Decoder, DenseAttention
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.module import IRModule
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
