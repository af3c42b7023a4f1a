"""Converters of operators that rearrange and repeat elements: flip, roll, pad, repeat, diagonals, windows, pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from relaxlite.frontend.torch.complex_parts import over_parts
from relaxlite.frontend.torch.convert_indexing import as_vector, flat, permuted, positions_along
from relaxlite.frontend.torch.node import Node, Shape
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import SymExpr, as_int, floormod, product, smax, sym

_PAD_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}
_PAD_NUMBERS = ("reflect", "replicate", "circular", "constant")  # of _pad_enum


@torch_op("aten.flip", complex=True)
@over_parts
def flip(n: Node, self: Expr, dims: Sequence[int]) -> Expr:
    axes = n.axes(self, list(dims)) if dims else ()
    if not axes:
        return self
    sizes = tuple(n.shape_of(self)[k] for k in axes)
    return n.emit(ops.slice(self, tuple(d - 1 for d in sizes), sizes, axes=axes, steps=(-1,) * len(axes)))


@torch_op("aten.roll", complex=True)
@over_parts
def roll(n: Node, self: Expr, shifts: Sequence[Any], dims: Sequence[int] = ()) -> Expr:
    if not n.rank(self):
        return self
    if not dims:
        return n.reshape(_rolled(n, flat(n, self), n.int(shifts[0]), 0), n.shape())
    x = self
    for shift, dim in zip(shifts, dims, strict=True):
        x = _rolled(n, x, n.int(shift), n.axis(self, dim))
    return x


def _rolled(n: Node, x: Expr, shift: SymExpr, axis: int) -> Expr:
    constant = as_int(shift)
    if constant is not None:
        return x if constant == 0 else n.emit(ops.roll(x, shift=constant, axis=axis))
    size = n.shape_of(x)[axis]
    first = floormod(shift, smax(size, 1))
    tail = n.emit(ops.slice(x, (size - first,), (first,), axes=(axis,)))
    return n.emit(ops.concat(tail, n.emit(ops.slice(x, (0,), (size - first,), axes=(axis,))), axis=axis))


@torch_op("aten.repeat", "aten.tile", complex=True)
@over_parts
def repeat(n: Node, self: Expr, repeats: Sequence[Any] = (), dims: Sequence[Any] = ()) -> Expr:
    counts = list(n.ints(repeats or dims))
    sizes = n.shape_of(self)
    counts = [sym(1)] * (len(sizes) - len(counts)) + counts
    x: Expr = n.reshape(self, ((1,) * (len(counts) - len(sizes))) + sizes)
    if all(as_int(c) == 1 for c in counts):
        return x
    return n.emit(ops.tile(x, tuple(counts)))


@torch_op("aten.repeat_interleave.self_int", complex=True)
@over_parts
def repeat_interleave(n: Node, self: Expr, repeats: Any, dim: int | None = None, output_size: Any = None) -> Expr:
    x = flat(n, self) if dim is None else as_vector(n, self)
    axis, count = 0 if dim is None else n.axis(x, dim), n.int(repeats)
    sizes = n.shape_of(x)
    copies: Expr = n.emit(ops.expand_dims(x, axes=(axis + 1,)))
    copies = n.broadcast(copies, (*sizes[: axis + 1], count, *sizes[axis + 1 :]))
    return n.reshape(copies, (*sizes[:axis], sizes[axis] * count, *sizes[axis + 1 :]))


@torch_op("aten.constant_pad_nd", complex=True)
@over_parts
def constant_pad_nd(n: Node, self: Expr, pad: Sequence[Any], value: Any = 0) -> Expr:
    return padded(n, self, pad, "constant", value)


@torch_op("aten.pad", complex=True)
@over_parts
def pad_(n: Node, self: Expr, pad: Sequence[Any], mode: str = "constant", value: Any = None) -> Expr:
    return padded(n, self, pad, mode, value)


@torch_op("aten._pad_enum", complex=True)
@over_parts
def pad_enum(n: Node, self: Expr, pad: Sequence[Any], mode: int, value: Any = None) -> Expr:
    return padded(n, self, pad, _PAD_NUMBERS[mode], value)


@torch_op("aten._pad_circular", complex=True)
@over_parts
def pad_circular(n: Node, self: Expr, pad: Sequence[Any]) -> Expr:
    return padded(n, self, pad, "circular", None)


@torch_op("aten.reflection_pad1d", "aten.reflection_pad2d", "aten.reflection_pad3d", complex=True)
@over_parts
def reflection_pad(n: Node, self: Expr, padding: Sequence[Any]) -> Expr:
    return padded(n, self, padding, "reflect", None)


@torch_op("aten.replication_pad1d", "aten.replication_pad2d", "aten.replication_pad3d", complex=True)
@over_parts
def replication_pad(n: Node, self: Expr, padding: Sequence[Any]) -> Expr:
    return padded(n, self, padding, "replicate", None)


def padded(n: Node, x: Expr, pad: Sequence[Any], mode: str, value: Any) -> Expr:
    """Pad by pairs of numbers, the last dimension first; negative numbers crop."""
    numbers, rank = n.ints(list(pad)), n.rank(x)
    before, after = [sym(0)] * rank, [sym(0)] * rank
    for k in range(len(numbers) // 2):
        before[rank - 1 - k], after[rank - 1 - k] = numbers[2 * k], numbers[2 * k + 1]
    if mode == "circular":  # what is left after cropping is repeated
        x = _cropped(n, x, before, after)
        before, after = [smax(b, 0) for b in before], [smax(a, 0) for a in after]
    if all(as_int(p) == 0 for p in (*before, *after)):
        return x
    fill = n.operand(0 if value is None else value, n.dtype())
    operands = (fill,) if mode == "constant" else ()
    return n.emit(ops.pad(x, tuple(before), tuple(after), *operands, mode=_PAD_MODES[mode]))


def _cropped(n: Node, x: Expr, before: Sequence[SymExpr], after: Sequence[SymExpr]) -> Expr:
    crops = [(smax(-b, 0), smax(-a, 0)) for b, a in zip(before, after, strict=True)]
    if all(as_int(low) == as_int(high) == 0 for low, high in crops):
        return x
    sizes = tuple(d - low - high for d, (low, high) in zip(n.shape_of(x), crops, strict=True))
    return n.emit(ops.slice(x, tuple(low for low, _ in crops), sizes))


@torch_op("aten.diagonal", "aten.diagonal_copy", "aten.linalg_diagonal", complex=True)
@over_parts
def diagonal(n: Node, self: Expr, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Expr:
    if n.target.startswith("aten.linalg_diagonal") and not n.fx_node.kwargs.keys() & {"dim1", "dim2"}:
        dim1, dim2 = -2, -1
    rank, dims = n.rank(self), n.shape_of(self)
    pair = (n.axis(self, dim1), n.axis(self, dim2))
    order = (*(k for k in range(rank) if k not in pair), *pair)
    outer, (rows, columns) = tuple(dims[k] for k in order[:-2]), (dims[k] for k in pair)
    count = n.shape()[-1]
    if as_int(count) == 0:
        return n.full(n.shape(), 0, n.dtype())
    x = n.reshape(permuted(n, self, order), (*outer, rows * columns))
    at = positions_along(n, count, offset if offset >= 0 else -columns * offset, columns + 1)
    return n.emit(ops.gather(x, at, axis=rank - 2))


@torch_op("aten.unfold", "aten.unfold_copy", complex=True)
@over_parts
def unfold(n: Node, self: Expr, dimension: int, size: Any, step: Any) -> Expr:
    x = as_vector(n, self)
    if not n.rank(self):
        return n.reshape(x, n.shape())
    axis, rank = n.axis(x, dimension), n.rank(x)
    count, width = n.shape()[axis], n.int(size)
    begins = n.reshape(positions_along(n, count, 0, n.int(step)), (count, 1))
    at = n.emit(ops.add(begins, n.reshape(positions_along(n, width), (1, width))))
    windows = n.emit(ops.gather(x, at, axis=axis))  # (..., count, width, ...)
    return permuted(n, windows, (*range(axis + 1), *range(axis + 2, rank + 1), axis + 1))


@torch_op("aten.as_strided", "aten.as_strided_copy", complex=True)
@over_parts
def as_strided(n: Node, self: Expr, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None) -> Expr:
    memory, origin = _memory(n, self), n.int(0 if storage_offset is None else storage_offset)
    sizes, strides = n.ints(list(size)), n.ints(list(stride))
    if as_int(origin) == 0 and _are_dense(sizes, strides) and n.proves_equal(product(sizes), n.shape_of(memory)[0]):
        return n.reshape(memory, sizes)
    return n.emit(ops.gather(memory, strided_positions(n, sizes, strides, origin)))


@torch_op("aten.as_strided_scatter", complex=True)
@over_parts
def as_strided_scatter(
    n: Node, self: Expr, src: Expr, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None
) -> Expr:
    order = _memory_order(n)
    memory, origin = _memory(n, self), n.int(0 if storage_offset is None else storage_offset)
    at = flat(n, strided_positions(n, n.ints(list(size)), n.ints(list(stride)), origin))
    written = n.emit(ops.scatter_elements(memory, at, flat(n, src), axis=0))
    dims = n.shape_of(self)
    restored = n.reshape(written, tuple(dims[k] for k in order))
    return permuted(n, restored, [order.index(k) for k in range(len(order))])


def strided_positions(n: Node, sizes: Shape, strides: Shape, origin: SymExpr) -> Expr:
    """Return the positions in memory of the elements of a strided view."""
    rank = len(sizes)
    at = n.full((1,) * rank, origin, "int64")
    for k, (size, step) in enumerate(zip(sizes, strides, strict=True)):
        column = n.reshape(positions_along(n, size, 0, step), tuple(size if j == k else 1 for j in range(rank)))
        at = n.emit(ops.add(at, column))
    return at


def _memory_order(n: Node) -> list[int]:
    """Return the dimensions of the first operand as they lie in torch's memory, outermost first."""
    source = n.fx_node.args[0]
    assert isinstance(source, torch.fx.Node)
    described = source.meta["val"]
    sizes, strides = n.symbols.shape(described), tuple(map(n.symbols.dim, described.stride()))
    order: list[int] = []
    inner: SymExpr = sym(1)
    while len(order) < len(sizes):
        rest = [k for k in reversed(range(len(sizes))) if k not in order]
        axis = next((k for k in rest if as_int(sizes[k]) == 1 or PROVER.can_prove_equal(strides[k], inner)), None)
        if axis is None:
            break
        order.insert(0, axis)
        inner = inner * sizes[axis]
    offset = described.storage_offset()
    if len(order) < len(sizes) or not isinstance(offset, int) or offset != 0:
        n.fail("strides of a tensor that is a view into a larger one are not supported; hint: call clone() before")
    return order


def _memory(n: Node, x: Expr) -> Expr:
    """Return the elements of the first operand in the order in which torch has them in memory."""
    return flat(n, permuted(n, x, _memory_order(n)))


def _are_dense(sizes: Shape, strides: Shape) -> bool:
    """Whether strides are those of a tensor in row-major order without gaps."""
    expected: SymExpr = sym(1)
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if as_int(size) != 1 and not PROVER.can_prove_equal(stride, expected):
            return False
        expected = expected * smax(size, 1) if not PROVER.can_prove_le(1, size) else expected * size
    return True


@torch_op("aten.pixel_shuffle", "aten.pixel_unshuffle", complex=True)
@over_parts
def pixel_shuffle(n: Node, self: Expr, upscale_factor: int = 1, downscale_factor: int = 1) -> Expr:
    *outer, channels, height, width = n.shape_of(self)
    at = len(outer)
    if n.target.startswith("aten.pixel_shuffle"):
        r = upscale_factor
        x = n.reshape(self, (*outer, channels // (r * r), r, r, height, width))
        order = (*range(at), at, at + 3, at + 1, at + 4, at + 2)
    else:
        r = downscale_factor
        x = n.reshape(self, (*outer, channels, height // r, r, width // r, r))
        order = (*range(at), at, at + 2, at + 4, at + 1, at + 3)
    return n.reshape(n.emit(ops.transpose(x, axes=order)), n.shape())


@torch_op("aten.channel_shuffle", "aten.native_channel_shuffle", complex=True)
@over_parts
def channel_shuffle(n: Node, self: Expr, groups: Any) -> Expr:
    batch, channels, *spatial = n.shape_of(self)
    count = n.int(groups)
    x = n.reshape(self, (batch, count, channels // count, *spatial))
    return n.reshape(n.emit(ops.transpose(x, axes=(0, 2, 1, *range(3, 3 + len(spatial))))), n.shape())


@torch_op("aten.tril", "aten.triu", complex=True)
@over_parts
def triangle(n: Node, self: Expr, diagonal: Any = 0) -> Expr:
    return n.emit(ops.trilu(self, (n.int(diagonal),), upper=n.target.startswith("aten.triu")))


@torch_op("aten.diag_embed", complex=True)
@over_parts
def diag_embed(n: Node, self: Expr, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Expr:
    *outer, count = n.shape_of(self)
    rank, size = len(outer) + 2, count + abs(offset)
    first, second = (d % rank for d in (dim1, dim2))
    if first > second:  # row and column exchanged
        first, second, offset = second, first, -offset
    before, after = max(offset, 0), max(-offset, 0)
    columns = n.emit(ops.pad(self, (*(0,) * len(outer), before), (*(0,) * len(outer), after))) if offset else self
    row, column = (n.reshape(positions_along(n, size), shape) for shape in ((size, 1), (1, size)))
    on_diagonal = n.emit(ops.equal(n.emit(ops.add(row, Constant.of(offset, "int64"))), column))
    wide = n.broadcast(n.emit(ops.expand_dims(columns, axes=(rank - 2,))), (*outer, size, size))
    matrix = n.emit(ops.where(on_diagonal, wide, n.operand(0, n.dtype())))
    order = [k for k in range(rank)]
    places = [k for k in range(rank) if k not in (first, second)]
    for k, axis in enumerate((*places, first, second)):
        order[axis] = k
    return permuted(n, matrix, order)
