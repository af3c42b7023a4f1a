"""Unification of dimensions that must be equal but have different symbols, checked at run time."""

from __future__ import annotations

from collections.abc import Mapping

from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Expr
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import Min, SymExpr
from relaxlite.ir.types import TensorType


def unify_dims(bb: BlockBuilder, x: Expr, dims: Mapping[int, SymExpr]) -> Expr:
    """Return x with these dimensions (axis -> size), checked at run time unless proven equal.

    A dimension that provably differs is not changed: the op's type rule reports it.
    """
    ty = x.ty
    if not isinstance(ty, TensorType) or ty.shape is None:
        return x
    changed = list(ty.shape)
    for axis, size in dims.items():
        current = ty.shape[axis]
        if not PROVER.can_prove_equal(current, size) and not PROVER.can_prove_ne(current, size):
            changed[axis] = size
    return x if tuple(changed) == ty.shape else bb.match_shape(x, tuple(changed))


def unify_broadcast(bb: BlockBuilder, operands: list[Expr]) -> list[Expr]:
    """Return the operands of a broadcasting op with dimensions unified that are compatible only if equal.

    Example: min(n, 512), from a table of 512 positions sliced to n, against n. If they differ, n exceeds 512 and
    neither is 1. So the operand with the minimum gets size n, checked at run time.
    """
    shapes = [x.ty.shape if isinstance(x.ty, TensorType) else None for x in operands]
    result = list(operands)
    for k, shape in enumerate(shapes):
        changes = {}
        for axis, dim in enumerate(shape or ()):
            opposite = (
                s[axis - len(shape or ())] for s in shapes if s is not None and len(s) >= len(shape or ()) - axis
            )
            size = next((o for o in opposite if _is_limited(dim, o)), None)
            if size is not None:
                changes[axis] = size
        result[k] = unify_dims(bb, operands[k], changes) if changes else operands[k]
    return result


def _is_limited(dim: SymExpr, other: SymExpr) -> bool:
    """Whether dim is min(other, limit) with a limit of at least 2."""
    if not isinstance(dim, Min):
        return False
    limit = dim.b if dim.a is other else dim.a if dim.b is other else None
    return limit is not None and PROVER.can_prove_le(2, limit)
