"""Converters of operators that move, select and create elements, and of those that do nothing."""

from __future__ import annotations

from typing import Any

import torch

from relaxlite.frontend.torch.dtypes import dtype_name
from relaxlite.frontend.torch.node import Complex, Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr
from relaxlite.ir.symbolic import sym


@torch_op(
    "aten.alias", "aten.clone", "aten.contiguous", "aten.detach", "aten.lift_fresh_copy", "aten.lift_fresh",
    "aten.positive", complex=True,
)  # fmt: skip
def same(n: Node, self: Any) -> Any:
    return self


@torch_op("aten.view", "aten.reshape", "aten._unsafe_view", "aten.view_copy", "aten._reshape_alias", "aten.reshape_as",
          "aten.view_as", "aten.unsqueeze", "aten.squeeze", "aten.flatten", "aten.unflatten", "aten.squeeze_copy",
          "aten.unsqueeze_copy", "aten.ravel", "aten._reshape_copy", complex=True)  # fmt: skip
def view(
    n: Node, self: Any, size: Any = None, shape: Any = None, dim: Any = None, start_dim: Any = None,
    end_dim: Any = None, sizes: Any = None, stride: Any = None, other: Any = None, dtype: Any = None,
) -> Any:  # fmt: skip
    if n.overload == "dtype":
        n.fail("view(dtype) reinterprets bits; this is not supported yet")
    if isinstance(self, Complex):
        return Complex(n.reshape(self.parts, (*n.shape(), sym(2))))
    return n.reshape(self, n.shape())


@torch_op("aten.permute", "aten.permute_copy")
def permute(n: Node, self: Expr, dims: list[int]) -> Expr:
    axes = [n.axis(self, d) for d in dims]
    return self if axes == sorted(axes) else n.emit(ops.transpose(self, axes=axes))


@torch_op("aten.transpose", "aten.swapaxes", "aten.transpose_copy")
def transpose(n: Node, self: Expr, dim0: int = 0, dim1: int = 0, axis0: int = 0, axis1: int = 0) -> Expr:
    order = list(range(n.rank(self)))
    if not order:
        return self
    a, b = n.axis(self, dim0 or axis0), n.axis(self, dim1 or axis1)
    order[a], order[b] = order[b], order[a]
    return self if a == b else n.emit(ops.transpose(self, axes=order))


@torch_op("aten.t", "aten.t_copy", "aten.numpy_T")
def t(n: Node, self: Expr) -> Expr:
    return self if n.rank(self) < 2 else n.emit(ops.transpose(self))


@torch_op("aten.expand", "aten.expand_copy", "aten.expand_as", "aten.broadcast_to")
def expand(n: Node, self: Expr, size: Any = None, other: Any = None) -> Expr:
    return n.broadcast(self, n.shape())


@torch_op("aten._to_copy", "aten.to", "aten.type_as", "aten.float", "aten._cast_Float")
def to(n: Node, self: Expr, dtype: torch.dtype | None = None, other: Any = None) -> Expr:
    return n.cast(self, n.dtype())


@torch_op("aten.full", "aten.full_like", "aten.new_full")
def full(n: Node, self: Any, size: Any = None, fill_value: Any = None, dtype: Any = None) -> Expr:
    return n.full(n.shape(), fill_value, n.dtype())


@torch_op("aten.zeros", "aten.zeros_like", "aten.new_zeros", "aten.empty", "aten.empty_like", "aten.new_empty",
          "aten.empty_strided", "aten.new_empty_strided", "aten.empty_permuted")  # fmt: skip
def zeros(
    n: Node, self: Any, size: Any = None, stride: Any = None, dtype: Any = None, physical_layout: Any = None
) -> Expr:
    return n.full(n.shape(), 0, n.dtype())


@torch_op("aten.ones", "aten.ones_like", "aten.new_ones")
def ones(n: Node, self: Any, size: Any = None, dtype: Any = None) -> Expr:
    return n.full(n.shape(), 1, n.dtype())


@torch_op("aten.arange")
def arange(n: Node, self: Any, start: Any = 0, end: Any = None, step: Any = 1, dtype: Any = None) -> Expr:
    if n.overload != "default":
        start = self
    (count,) = n.shape()
    return n.emit(ops.arange(n.operand(start, n.dtype()), n.operand(step, n.dtype()), (count,)))


@torch_op("aten.cat", "aten.concat", "aten.concatenate")
def cat(n: Node, tensors: list[Expr], dim: int = 0) -> Expr:
    dtype, shape = n.dtype(), n.shape()
    axis = dim + len(shape) if dim < 0 else dim
    parts = [n.cast(x, dtype) for x in tensors if n.rank(x) == len(shape)]  # torch permits empty vectors among them
    parts = [n.fit_except(x, shape, axis) for x in parts]
    return parts[0] if len(parts) == 1 else n.emit(ops.concat(*parts, axis=axis))


@torch_op("aten.slice", "aten.slice_copy")
def slice_(n: Node, self: Expr, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Expr:
    axis, length = n.axis(self, dim), n.shape()[n.axis(self, dim)]
    begin = n.slice_begin(n.shape_of(self)[axis], 0 if start is None else start)
    if step == 1 and n.proves_equal(length, n.shape_of(self)[axis]):
        return self
    return n.emit(ops.slice(self, (begin,), (length,), axes=(axis,), steps=(int(step),)))


@torch_op("aten.select", "aten.select_copy")
def select(n: Node, self: Expr, dim: int, index: Any) -> Expr:
    axis = n.axis(self, dim)
    begin = n.slice_begin(n.shape_of(self)[axis], index)
    row = n.emit(ops.slice(self, (begin,), (1,), axes=(axis,)))
    return n.emit(ops.squeeze(row, axes=(axis,)))


@torch_op("aten.sym_size", "aten.sym_numel", "aten.sym_stride", "aten.sym_storage_offset")
def sym_size(n: Node, self: Any, dim: int | None = None) -> Any:
    return n.fx_node.meta["val"]


@torch_op("aten._assert_tensor_metadata", complex=True)
def assert_tensor_metadata(n: Node, a: Any, size: Any = None, stride: Any = None, dtype: Any = None) -> None:
    return None  # torch has checked it in the export


@torch_op("aten._assert_scalar", "aten._assert_async")
def assert_scalar(n: Node, self: Any, assert_msg: str = "an assertion of the model failed") -> None:
    n.check(self, assert_msg)


@torch_op("aten.sym_constrain_range", "aten.sym_constrain_range_for_size")
def sym_constrain_range(n: Node, size: Any, min: int | None = None, max: int | None = None) -> None:
    return None  # torch's ranges are those of the symbols


def dtype_or(dtype: torch.dtype | None, default: str) -> str:
    """Return the name of a dtype argument, or a default for None."""
    return default if dtype is None else dtype_name(dtype)
