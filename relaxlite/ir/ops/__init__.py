"""The op library: `ops.add(a, b)` is a typed call of the op named "add". Importing this package registers every op."""

from __future__ import annotations

from relaxlite.ir.op import Op, all_ops, get_op
from relaxlite.ir.ops import activations, binary, elementwise, reduce, shape

__all__ = ["activations", "all_ops", "binary", "elementwise", "get_op", "reduce", "shape"]


def __getattr__(name: str) -> Op:
    try:
        return get_op(name)
    except KeyError:
        raise AttributeError(f"relaxlite has no op named {name!r}") from None
