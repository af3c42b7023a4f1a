"""Per-layer embeddings (Gemma 3n and 4): an additional input of each layer for each token.

A table has a vector per token and layer, to which a normed projection of the token embedding is added. A layer
multiplies its input by a gate, a projection of its hidden state, and adds a projection of the product to that state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relaxlite.ir.expr import Expr, Var
from relaxlite.ir.symbolic import SymExpr, sym
from relaxlite.ir.types import TensorType
from relaxlite.records import dataclass

if TYPE_CHECKING:
    from relaxlite.frontend.llm.layers import Decoder


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """The per-layer inputs of some tokens; `values` is [..., layers, width]."""

    decoder: Decoder
    values: Var

    @staticmethod
    def of(d: Decoder, tokens: Expr, x: Expr) -> PerLayerInputs:
        """Emit the inputs for tokens [...] and their scaled embeddings x [..., hidden]."""
        width = d.config.per_layer_input
        assert width is not None
        shape = (*_dims(tokens), sym(d.config.layers), sym(width))
        table_rows = d.op("multiply", d.lookup_rows("layer_embed", tokens), np.float32(width**0.5))
        projected = d.op("multiply", d.linear("layer_project", x), np.float32(d.config.hidden**-0.5))
        normed = d.norm("layer_project_norm", d.op("reshape", projected, shape))
        total = d.op("add", normed, d.op("reshape", table_rows, shape))
        return PerLayerInputs(d, d.op("multiply", total, np.float32(0.5**0.5)))

    def of_layer(self, k: int, wanted: Expr | None) -> Var:
        """Slice the input of layer `k`: [..., width], or [rows, width] of the tokens at `wanted` int64 [rows]."""
        d, (*lead, _, width) = self.decoder, _dims(self.values)
        part = d.op("slice", self.values, (*(0 for _ in lead), k, 0), (*lead, sym(1), width))
        flat = d.op("reshape", part, (*lead, width))
        return flat if wanted is None else d.op("gather", flat, wanted, axis=0)


def add_per_layer_input(d: Decoder, k: int, x: Expr, layer_input: Expr) -> Var:
    """Add what layer `k` makes of its input `per_layer_input` [..., width] to x [..., hidden]."""
    name = f"layers.{k}.input"
    gate = d.activate(d.linear(f"{name}_gate", x))
    return d.op("add", x, d.norm(f"{name}_norm", d.linear(f"{name}_project", d.op("multiply", gate, layer_input))))


def _dims(x: Expr) -> tuple[SymExpr, ...]:
    assert isinstance(x.ty, TensorType) and x.ty.shape is not None
    return tuple(sym(dim) for dim in x.ty.shape)
