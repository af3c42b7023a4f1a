"""Ranges 0, 1, 2, ... along a dimension, recognized by how they were built.

Masks of attention come as comparisons and indices of such ranges (the functions that torch.vmap leaves): `mask[b, k]`
with ranges b and k is the mask itself, `k >= 0` is true. Recognizing both leaves the mask as the user's tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relaxlite import dtypes
from relaxlite.frontend.torch.node import Node, Shape
from relaxlite.ir import ops
from relaxlite.ir.expr import Call, Constant, Expr, Var
from relaxlite.ir.op import Op
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import SymExpr, as_int, sym
from relaxlite.ir.types import TensorType
from relaxlite.records import dataclass


@dataclass(frozen=True, slots=True)
class Iota:
    """The numbers start, start + 1, ... of `count` elements along `axis`; all other dimensions are 1."""

    axis: int
    start: int
    count: SymExpr


def _call(n: Node, x: Expr, *names: str) -> Call | None:
    value = n.bb.bound_value(x) if isinstance(x, Var) else None
    is_op = isinstance(value, Call) and isinstance(value.callee, Op) and value.callee.name in names
    return value if is_op else None  # type: ignore[return-value]


def _constant(x: Expr) -> int | None:
    if isinstance(x, Constant) and x.value.size == 1 and dtypes.is_integer(x.ty.dtype):
        return int(x.value.reshape(-1)[0])
    return None


def iota_of(n: Node, x: Expr) -> Iota | None:
    """Return the range that x is, or None."""
    if (call := _call(n, x, "arange")) is not None and _constant(call.args[1]) == 1:
        start = _constant(call.args[0])
        return None if start is None else Iota(0, start, n.shape_of(x)[0])
    if (call := _call(n, x, "add")) is not None:
        for inner, other in (call.args, call.args[::-1]):
            offset, range_ = _constant(other), iota_of(n, inner)
            if offset is not None and range_ is not None and n.rank(x) == n.rank(inner):
                return Iota(range_.axis, range_.start + offset, range_.count)
    if (call := _call(n, x, "reshape")) is not None and (range_ := iota_of(n, call.args[0])) is not None:
        shape = n.shape_of(x)
        long = [k for k, d in enumerate(shape) if as_int(d) != 1]
        if len(long) <= 1 and shape:
            return Iota(long[0] if long else 0, range_.start, range_.count)
    return None


def indexed_by_iotas(n: Node, x: Expr, indices: Sequence[Expr | None]) -> Expr | None:
    """Return x[indices] as a transpose and reshape of x, where each index is the range of its dimension; else None."""
    ranges = [None if t is None else iota_of(n, t) for t in indices]
    sizes = n.shape_of(x)
    if len(ranges) != len(sizes):
        return None
    rank = max(n.rank(t) for t in indices if t is not None) if any(t is not None for t in indices) else 0
    places: list[int] = []
    for range_, t, size in zip(ranges, indices, sizes, strict=True):
        if range_ is None or t is None or range_.start or not PROVER.can_prove_equal(range_.count, size):
            return None
        places.append(range_.axis + rank - n.rank(t))
    moving = [k for k, size in enumerate(sizes) if as_int(size) != 1]
    if len({places[k] for k in moving}) < len(moving):
        return None
    order = sorted(moving, key=places.__getitem__) + [k for k in range(len(sizes)) if k not in moving]
    if order != sorted(order):
        x = n.emit(ops.transpose(x, axes=order))
    shape = [sym(1)] * rank
    for k in moving:
        shape[places[k]] = sizes[k]
    return n.reshape(x, shape)


def compared(n: Node, name: str, x: Expr, bound: object) -> bool | None:
    """Decide a comparison, the name of its op, of a range with a constant for all elements; None if not decided."""
    range_ = iota_of(n, x) if isinstance(x, Var) else None
    if range_ is None or not isinstance(bound, int) or isinstance(bound, bool):
        return None
    first, last = sym(range_.start), range_.count + range_.start - 1
    if name in ("greater_equal", "greater"):
        limit = bound + (name == "greater")
        return True if PROVER.can_prove_le(limit, first) else False if PROVER.can_prove_le(last + 1, limit) else None
    if name not in ("less_equal", "less"):
        return None
    limit = bound - (name == "less")
    return True if PROVER.can_prove_le(last, limit) else False if PROVER.can_prove_le(limit + 1, first) else None


def is_true(n: Node, x: Expr) -> bool:
    """Whether a bool tensor is known to be true everywhere."""
    if isinstance(x, Constant):
        return x.ty.dtype == "bool" and bool(np.all(x.value))
    call = _call(n, x, "full", "broadcast_to", "reshape")
    if call is None:
        return False
    return is_true(n, call.args[1] if call.callee.name == "full" else call.args[0])


def unbroadcast(n: Node, x: Expr) -> Expr:
    """Return what x was broadcast from, with leading dimensions of 1 up to its rank; x itself where it was not."""
    call = _call(n, x, "broadcast_to")
    if call is None or not isinstance(call.args[0].ty, TensorType):
        return x
    inner = n.shape_of(call.args[0])
    shape: Shape = (*(sym(1),) * (n.rank(x) - len(inner)), *inner)
    return n.reshape(call.args[0], shape)
