"""Converters of operators that change shapes, take slices and join tensors, and of those that do nothing."""

from __future__ import annotations

from typing import Any

import torch

from relaxlite.frontend.common.slices import resolve_slice
from relaxlite.frontend.common.unify import unify_dims
from relaxlite.frontend.torch.complex_parts import over_parts
from relaxlite.frontend.torch.node import Complex, Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr
from relaxlite.ir.symbolic import as_int, sym


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
    if isinstance(self, Complex):
        return Complex(n.reshape(self.parts, (*n.shape(), sym(2))))
    return n.reshape(self, n.shape())


@torch_op("aten.permute", "aten.permute_copy", complex=True)
@over_parts
def permute(n: Node, self: Expr, dims: list[int]) -> Expr:
    axes = [n.axis(self, d) for d in dims]
    return self if axes == sorted(axes) else n.emit(ops.transpose(self, axes=axes))


@torch_op("aten.transpose", "aten.swapaxes", "aten.swapdims", "aten.transpose_copy", complex=True)
@over_parts
def transpose(n: Node, self: Expr, dim0: int = 0, dim1: int = 0, axis0: int = 0, axis1: int = 0) -> Expr:
    order = list(range(n.rank(self)))
    if not order:
        return self
    a, b = n.axis(self, dim0 or axis0), n.axis(self, dim1 or axis1)
    order[a], order[b] = order[b], order[a]
    return self if a == b else n.emit(ops.transpose(self, axes=order))


@torch_op("aten.movedim", "aten.moveaxis", complex=True)
@over_parts
def movedim(n: Node, self: Expr, source: list[int] | int, destination: list[int] | int) -> Expr:
    sources, targets = ([n.axis(self, d) for d in ([x] if isinstance(x, int) else x)] for x in (source, destination))
    rest = iter(k for k in range(n.rank(self)) if k not in sources)
    order = [sources[targets.index(k)] if k in targets else next(rest) for k in range(n.rank(self))]
    return self if order == sorted(order) else n.emit(ops.transpose(self, axes=order))


@torch_op("aten.t", "aten.t_copy", "aten.numpy_T", "aten.mT", complex=True)
@over_parts
def t(n: Node, self: Expr) -> Expr:
    order = [*range(n.rank(self))]
    if n.target.startswith("aten.mT"):
        order[-2:] = order[:-3:-1]
    else:
        order.reverse()
    return self if order == sorted(order) else n.emit(ops.transpose(self, axes=order))


@torch_op("aten.expand", "aten.expand_copy", "aten.expand_as", "aten.broadcast_to", complex=True)
@over_parts
def expand(n: Node, self: Expr, size: Any = None, other: Any = None) -> Expr:
    return n.broadcast(self, n.shape())


@torch_op("aten._to_copy", "aten.to", "aten.type_as", "aten.float", "aten._cast_Float", "prims.convert_element_type")
def to(n: Node, self: Expr, dtype: torch.dtype | None = None, other: Any = None) -> Expr:
    return n.cast(self, n.dtype())


@torch_op("aten.cat", "aten.concat", "aten.concatenate", complex=True)
@over_parts
def cat(n: Node, tensors: list[Expr], dim: int = 0) -> Expr:
    dtype, shape = n.dtype(), n.shape()
    axis = dim + len(shape) if dim < 0 else dim
    is_empty = [n.rank(x) == 1 and as_int(n.shape_of(x)[0]) == 0 for x in tensors]  # torch permits these anywhere
    parts = [n.cast(x, dtype) for x, leaves_out in zip(tensors, is_empty, strict=True) if not leaves_out]
    if not parts:
        return n.full(shape, 0, dtype)
    parts = [n.fit_except(x, shape, axis) for x in parts]
    return parts[0] if len(parts) == 1 else n.emit(ops.concat(*parts, axis=axis))


@torch_op("aten.stack", "aten._stack", complex=True)
@over_parts
def stack(n: Node, tensors: list[Expr], dim: int = 0) -> Expr:
    dtype, shape = n.dtype(), n.shape()
    axis = dim + len(shape) if dim < 0 else dim
    parts = [n.fit(n.cast(x, dtype), shape[:axis] + shape[axis + 1 :]) for x in tensors]
    parts = [n.emit(ops.expand_dims(x, axes=(axis,))) for x in parts]
    return parts[0] if len(parts) == 1 else n.emit(ops.concat(*parts, axis=axis))


@torch_op("aten.slice", "aten.slice_copy", complex=True)
@over_parts
def slice_(n: Node, self: Expr, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Expr:
    axis = n.axis(self, dim)
    extent, described = n.shape_of(self)[axis], n.result().shape[axis]
    if n.symbols.unknown(described):  # ends that depend on data
        stop = extent if end is None else n.int(end)
        part = resolve_slice(extent, n.int(0 if start is None else start), stop, int(step))
        begin, length = part.begin, part.size
    else:
        begin, length = n.slice_begin(extent, 0 if start is None else start), n.symbols.dim(described)
    if step == 1 and n.proves_equal(length, extent):
        return self
    return n.emit(ops.slice(self, (begin,), (length,), axes=(axis,), steps=(int(step),)))


@torch_op("aten.narrow", "aten.narrow_copy", complex=True)
@over_parts
def narrow(n: Node, self: Expr, dim: int, start: Any, length: Any) -> Expr:
    axis = n.axis(self, dim)
    begin = n.slice_begin(n.shape_of(self)[axis], start)
    return n.emit(ops.slice(self, (begin,), (n.int(length),), axes=(axis,)))


@torch_op("aten.split", "aten.split_copy", "aten.split_with_sizes", "aten.split_with_sizes_copy", "aten.unsafe_split",
          "aten.unsafe_split_with_sizes", "aten.chunk", "aten.unsafe_chunk", "aten.tensor_split.sections",
          complex=True)  # fmt: skip
@over_parts
def split(
    n: Node,
    self: Expr,
    split_size: Any = None,
    split_sizes: Any = None,
    chunks: int = 0,
    sections: Any = 0,
    dim: int = 0,
) -> list[Expr]:
    """Split; torch has derived the sizes of the parts, by guards that are checked when the model runs."""
    axis = n.axis(self, dim)
    sizes = [n.shape(k)[axis] for k in range(len(n.fx_node.meta["val"]))]
    x = unify_dims(n.bb, self, {axis: sum(sizes, sym(0))})
    begin, parts = sym(0), list[Expr]()
    for size in sizes:
        parts.append(n.emit(ops.slice(x, (begin,), (size,), axes=(axis,))))
        begin = begin + size
    return parts


@torch_op("aten.tensor_split.indices", complex=True)
@over_parts
def tensor_split(n: Node, self: Expr, indices: list[Any], dim: int = 0) -> list[Expr]:
    axis = n.axis(self, dim)
    begins = [sym(0), *(n.slice_begin(n.shape_of(self)[axis], k) for k in indices)]
    return [n.emit(ops.slice(self, (begin,), (n.shape(k)[axis],), axes=(axis,))) for k, begin in enumerate(begins)]


@torch_op("aten.unbind", "aten.unbind_copy", complex=True)
@over_parts
def unbind(n: Node, self: Expr, dim: int = 0) -> list[Expr]:
    axis = n.axis(self, dim)
    rows = (n.emit(ops.slice(self, (k,), (1,), axes=(axis,))) for k in range(len(n.fx_node.meta["val"])))
    return [n.emit(ops.squeeze(row, axes=(axis,))) for row in rows]


@torch_op("aten.select", "aten.select_copy", complex=True)
@over_parts
def select(n: Node, self: Expr, dim: int, index: Any) -> Expr:
    axis = n.axis(self, dim)
    begin = n.slice_begin(n.shape_of(self)[axis], index)
    row = n.emit(ops.slice(self, (begin,), (1,), axes=(axis,)))
    return n.emit(ops.squeeze(row, axes=(axis,)))


@torch_op("aten.sym_size", "aten.sym_numel", "aten.sym_stride", complex=True)
def sym_size(n: Node, self: Any, dim: int | None = None) -> Any:
    return n.fx_node.meta["val"]


@torch_op("aten.sym_storage_offset", complex=True)
def sym_storage_offset(n: Node, self: Any) -> Any:
    described = n.fx_node.meta["val"]
    for symbol in n.symbols.unknown(described):  # each tensor of relaxlite begins where its memory does
        n.symbols.define_as(symbol, sym(0))
    return described


@torch_op("aten._assert_tensor_metadata", complex=True)
def assert_tensor_metadata(n: Node, a: Any, size: Any = None, stride: Any = None, dtype: Any = None) -> None:
    return None  # torch has checked it in the export


@torch_op("aten._assert_scalar", "aten._assert_async")
def assert_scalar(n: Node, self: Any, assert_msg: str = "an assertion of the model failed") -> None:
    n.check(self, assert_msg)


@torch_op("aten.sym_constrain_range", "aten.sym_constrain_range_for_size")
def sym_constrain_range(n: Node, size: Any, min: int | None = None, max: int | None = None) -> None:
    return None  # torch's ranges are those of the symbols


@torch_op("aten.copy")
def copy(n: Node, self: Expr, src: Expr) -> Expr:
    """The contents of `src` in shape and type of `self`."""
    return n.broadcast(n.cast(src, n.dtype()), n.shape())
