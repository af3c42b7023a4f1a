"""Dimensions that must be equal, but have different symbols: the exporter's names are honest, or run time says not."""

from __future__ import annotations

from collections.abc import Mapping

from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Expr
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import SymExpr
from relaxlite.ir.types import TensorType


def unify_dims(bb: BlockBuilder, x: Expr, dims: Mapping[int, SymExpr]) -> Expr:
    """x with these dimensions (axis -> size), checked at run time where they are not proven.

    A dimension that provably differs is left as it is, for the op's type rule to report.
    """
    ty = x.ty
    if not isinstance(ty, TensorType) or ty.shape is None:
        return x
    changed = list(ty.shape)
    for axis, size in dims.items():
        have = ty.shape[axis]
        if not PROVER.can_prove_equal(have, size) and not PROVER.can_prove_ne(have, size):
            changed[axis] = size
    return x if tuple(changed) == ty.shape else bb.match_shape(x, changed)
