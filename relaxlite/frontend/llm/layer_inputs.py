"""What each layer is given of a token beside what the layer before gives (per-layer embeddings of Gemma 3n and 4).

One table has for every token `layer_input` numbers of each layer. A product of the token's usual embedding, normed, is
added to them. A layer takes them times a gate that it makes of what it has found, and adds a product of that.
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
class LayerInputs:
    """`found` [..., layers, width], of all layers."""

    decoder: Decoder
    found: Var

    @staticmethod
    def of(d: Decoder, tokens: Expr, x: Expr) -> LayerInputs:
        """For tokens [...] and their scaled embeddings x [..., hidden]."""
        width = d.config.layer_input
        assert width is not None
        shape = (*_dims(tokens), sym(d.config.layers), sym(width))
        own = d.op("multiply", d.looked_up("layer_embed", tokens), np.float32(width**0.5))
        shared = d.op("multiply", d.linear("layer_project", x), np.float32(d.config.hidden**-0.5))
        normed = d.norm("layer_project_norm", d.op("reshape", shared, shape))
        both = d.op("add", normed, d.op("reshape", own, shape))
        return LayerInputs(d, d.op("multiply", both, np.float32(0.5**0.5)))

    def of_layer(self, k: int, wanted: Expr | None) -> Var:
        """[..., width], or of the tokens whose places `wanted` [rows] has."""
        d, (*lead, _, width) = self.decoder, _dims(self.found)
        part = d.op("slice", self.found, (*(0 for _ in lead), k, 0), (*lead, sym(1), width))
        flat = d.op("reshape", part, (*lead, width))
        return flat if wanted is None else d.op("gather", flat, wanted, axis=0)


def with_layer_input(d: Decoder, k: int, x: Expr, given: Expr) -> Var:
    """x [..., hidden] with what layer k makes of its input `given` [..., width]."""
    name = f"layers.{k}.input"
    gate = d.activated(d.linear(f"{name}_gate", x))
    return d.op("add", x, d.norm(f"{name}_norm", d.linear(f"{name}_project", d.op("multiply", gate, given))))


def _dims(x: Expr) -> tuple[SymExpr, ...]:
    assert isinstance(x.ty, TensorType) and x.ty.shape is not None
    return tuple(sym(dim) for dim in x.ty.shape)
