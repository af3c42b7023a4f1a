"""Converter of view(dtype), which reinterprets the bits of elements, several as one or one as several."""

from __future__ import annotations

import torch

from relaxlite import dtypes
from relaxlite.frontend.torch.node import Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr


@torch_op("aten.view.dtype", "aten.view_copy.dtype")
def view_dtype(n: Node, self: Expr, dtype: torch.dtype) -> Expr:
    source, target = n.dtype_of(self), n.dtype()
    if source == target:
        return self
    if "bool" in (source, target):
        n.fail(f"a view of {source} as {target} is not supported; hint: compare with 0")
    before, after = dtypes.itemsize(source), dtypes.itemsize(target)
    x = _bitcast(n, self, f"uint{8 * before}")
    if before < after:
        x = _joined(n, x, after // before, f"uint{8 * after}")
    elif before > after:
        x = _divided(n, x, before // after, f"uint{8 * after}")
    return _bitcast(n, x, target)


def _bitcast(n: Node, x: Expr, dtype: str) -> Expr:
    return x if n.dtype_of(x) == dtype else n.emit(ops.bitcast(x, dtype=dtype))


def _shifts(count: int, dtype: str, width: int) -> Constant:
    """Return the places of `count` parts of so many bytes in one integer, the lowest first."""
    return Constant.of([8 * width * k for k in range(count)], dtype)


def _joined(n: Node, x: Expr, count: int, wide: str) -> Expr:
    """Join so many unsigned integers of the last dimension to one."""
    *outer, size = n.shape_of(x)
    width = dtypes.itemsize(n.dtype_of(x))
    groups = n.cast(n.reshape(x, (*outer, size // count, count)), wide)
    placed = n.emit(ops.left_shift(groups, _shifts(count, wide, width)))
    return n.emit(ops.sum(placed, axes=(len(outer) + 1,)))  # no two have a bit in common


def _divided(n: Node, x: Expr, count: int, narrow: str) -> Expr:
    """Divide unsigned integers into so many each."""
    *outer, size = n.shape_of(x)
    wide = n.dtype_of(x)
    parts = n.emit(
        ops.right_shift(
            n.emit(ops.expand_dims(x, axes=(len(outer) + 1,))), _shifts(count, wide, dtypes.itemsize(narrow))
        )
    )
    return n.reshape(n.cast(parts, narrow), (*outer, size * count))
