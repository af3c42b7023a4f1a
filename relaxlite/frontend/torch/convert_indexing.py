"""Converters of operators that read at indices: index, gather, take, embedding, and the masked selections of elements.

Torch's rules of indexing: masks stand for the positions of their true elements, index tensors are broadcast together,
and the dimensions of the result that they give stand where the indices stood, or first if those are not adjacent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relaxlite.frontend.common.unify import unify_dims
from relaxlite.frontend.torch.complex_parts import over_parts
from relaxlite.frontend.torch.iota import indexed_by_iotas
from relaxlite.frontend.torch.node import Node, Shape
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.symbolic import SymExpr, as_int, product, sym
from relaxlite.records import dataclass

MASKS = ("bool", "uint8")


@dataclass(frozen=True, slots=True, eq=False)
class Indexing:
    """Index tensors of one shape for some axes of a tensor of `rank` dimensions."""

    axes: tuple[int, ...]
    tensors: tuple[Expr, ...]
    shape: Shape
    rank: int

    @property
    def others(self) -> tuple[int, ...]:
        """The axes that are not indexed."""
        return tuple(k for k in range(self.rank) if k not in self.axes)

    @property
    def place(self) -> int:
        """Number of other dimensions of the result before those of the indices."""
        is_adjacent = self.axes == tuple(range(self.axes[0], self.axes[0] + len(self.axes)))
        return self.axes[0] if is_adjacent else 0

    def result_shape(self, dims: Shape) -> Shape:
        """Return the shape of what is read from a tensor of this shape."""
        others = [dims[k] for k in self.others]
        return (*others[: self.place], *self.shape, *others[self.place :])


def resolve_indices(n: Node, x: Expr, indices: Sequence[Expr | None]) -> Indexing:
    """Return indices, of which each is for one axis, None, or a mask over several axes."""
    axes: list[int] = []
    tensors: list[Expr] = []
    axis = 0
    for index in indices:
        if index is None:
            axis += 1
            continue
        positions = mask_positions(n, x, index, axis) if n.dtype_of(index) in MASKS else [index]
        axes += range(axis, axis + len(positions))
        tensors += [n.cast(p, "int64") for p in positions] if len(positions) > 1 or len(indices) > 1 else positions
        axis += len(positions)
    if not axes:
        n.fail("an index of no dimension")
    tensors, shape = broadcast_together(n, tensors)
    return Indexing(tuple(axes), tuple(tensors), shape, n.rank(x))


def mask_positions(n: Node, x: Expr, mask: Expr, axis: int) -> list[Expr]:
    """Return for each dimension of a mask, which covers the dimensions of x from axis on, the true positions."""
    dims = n.shape_of(x)
    mask = unify_dims(n.bb, n.cast(mask, "bool"), {k: dims[axis + k] for k in range(n.rank(mask))})
    rank, count = n.rank(mask), n.symbols.fresh("count")
    positions = n.bb.match_shape(n.emit(ops.non_zero(mask)), (rank, count))
    rows = [n.emit(ops.slice(positions, (k,), (1,), axes=(0,))) for k in range(rank)] if rank > 1 else [positions]
    return [n.reshape(row, (count,)) for row in rows]


def broadcast_together(n: Node, tensors: Sequence[Expr]) -> tuple[list[Expr], Shape]:
    """Return tensors broadcast to their common shape, and that shape."""
    shapes = [n.shape_of(t) for t in tensors]
    rank = max(map(len, shapes))
    shape: list[SymExpr] = []
    for k in range(rank):
        sizes = [s[len(s) - rank + k] for s in shapes if len(s) >= rank - k]
        wide = [d for d in sizes if as_int(d) != 1]
        shape.append(next((d for d in wide if as_int(d) is not None), wide[0] if wide else sym(1)))
    return [n.broadcast(t, shape) for t in tensors], tuple(shape)


def stacked(n: Node, tensors: Sequence[Expr]) -> Expr:
    """Return index tensors as one, with a last dimension for the axes."""
    axis = n.rank(tensors[0])
    columns = [n.emit(ops.expand_dims(t, axes=(axis,))) for t in tensors]
    return columns[0] if len(columns) == 1 else n.emit(ops.concat(*columns, axis=axis))


def permuted(n: Node, x: Expr, order: Sequence[int]) -> Expr:
    """Return x with its dimensions in another order."""
    return x if list(order) == list(range(len(order))) else n.emit(ops.transpose(x, axes=tuple(order)))


def as_vector(n: Node, x: Expr) -> Expr:
    """Return x, of which a scalar becomes a vector of one element."""
    return x if n.rank(x) else n.reshape(x, (1,))


def flat(n: Node, x: Expr) -> Expr:
    """Return the elements of x as a vector."""
    return n.reshape(x, (product(n.shape_of(x)),))


@torch_op("aten.index", "aten._unsafe_index", complex=True)
@over_parts
def index(n: Node, self: Expr, indices: list[Expr | None]) -> Expr:
    places = [k for k, t in enumerate(indices) if t is not None]
    if len(places) == 1 and n.dtype_of(indices[places[0]]) in MASKS:  # type: ignore[arg-type]
        return _selected(n, self, indices[places[0]], places[0])  # type: ignore[arg-type]
    if (whole := indexed_by_iotas(n, self, indices)) is not None:
        return n.broadcast(whole, n.shape())
    where = resolve_indices(n, self, indices)
    if len(where.axes) == 1:
        return n.emit(ops.gather(self, where.tensors[0], axis=where.axes[0]))
    first = permuted(n, self, (*where.axes, *where.others))
    read = n.emit(ops.gather_nd(first, stacked(n, where.tensors)))  # (indices..., others...)
    width, place = len(where.shape), where.place
    order = (*range(width, width + place), *range(width), *range(width + place, width + len(where.others)))
    return permuted(n, read, order)


def _selected(n: Node, x: Expr, mask: Expr, axis: int) -> Expr:
    """Return the slices of x where a mask over some dimensions from axis on is true."""
    dims, rank = n.shape_of(x), n.rank(mask)
    covered = dims[axis : axis + rank]
    mask = unify_dims(n.bb, n.cast(mask, "bool"), dict(enumerate(covered)))
    rows = n.reshape(x, (*dims[:axis], product(covered), *dims[axis + rank :]))
    kept = n.emit(ops.compress(rows, flat(n, mask), axis=axis))
    return n.bb.match_shape(kept, (*dims[:axis], n.symbols.fresh("count"), *dims[axis + rank :]))


@torch_op("aten.index_select", "aten.index_select_copy", complex=True)
@over_parts
def index_select(n: Node, self: Expr, dim: int, index: Expr) -> Expr:
    x = as_vector(n, self)
    return n.reshape(n.emit(ops.gather(x, as_vector(n, index), axis=n.axis(x, dim))), n.shape())


@torch_op("aten.gather", complex=True)
@over_parts
def gather(n: Node, self: Expr, dim: int, index: Expr, sparse_grad: bool = False) -> Expr:
    shape = n.shape()
    if any(as_int(d) == 0 for d in shape):
        return n.full(shape, 0, n.dtype())
    x, at = as_vector(n, self), as_vector(n, index)
    return n.reshape(n.emit(ops.gather_elements(x, at, axis=n.axis(x, dim))), shape)


@torch_op("aten.take_along_dim", complex=True)
@over_parts
def take_along_dim(n: Node, self: Expr, indices: Expr, dim: int | None = None) -> Expr:
    if dim is None:
        return n.emit(ops.gather(flat(n, self), flat(n, indices)))
    axis = n.axis(self, dim)
    shape = list(n.shape())
    at = n.broadcast(indices, shape)
    shape[axis] = n.shape_of(self)[axis]
    return n.emit(ops.gather_elements(n.broadcast(self, shape), at, axis=axis))


@torch_op("aten.take", complex=True)
@over_parts
def take(n: Node, self: Expr, index: Expr) -> Expr:
    return n.emit(ops.gather(flat(n, self), index))


@torch_op("aten.embedding")
def embedding(
    n: Node, weight: Expr, indices: Expr, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Expr:
    return n.emit(ops.gather(weight, indices))  # the other arguments concern gradients


@torch_op("aten.masked_fill", complex=True)
@over_parts
def masked_fill(n: Node, self: Expr, mask: Expr, value: Any) -> Expr:
    shape = n.shape()
    operands = [n.fit(x, shape) for x in (n.cast(mask, "bool"), n.operand(value, n.dtype()), self)]
    return n.broadcast(n.emit(ops.where(*operands)), shape)


@torch_op("aten.masked_scatter", complex=True)
@over_parts
def masked_scatter(n: Node, self: Expr, mask: Expr, source: Expr) -> Expr:
    """Masked scatter: the k-th true element of the mask takes the k-th element of the source."""
    shape = n.shape()
    flags = flat(n, n.broadcast(n.cast(mask, "bool"), shape))
    number = n.emit(ops.cumsum(n.cast(flags, "int64"), axis=0))
    at = n.emit(ops.where(flags, number, Constant.of(0, "int64")))  # 0: an element that is not used
    values = n.emit(ops.concat(n.full((1,), 0, n.dtype()), flat(n, source), axis=0))
    taken = n.reshape(n.emit(ops.gather(values, at)), shape)
    return n.emit(ops.where(n.reshape(flags, shape), taken, n.broadcast(self, shape)))


@torch_op("aten._unsafe_masked_index", complex=True)
@over_parts
def unsafe_masked_index(n: Node, self: Expr, mask: Expr, indices: list[Expr | None], fill: Any) -> Expr:
    """Index where a mask is true, else a number: indices need be in range only there."""
    dims = n.shape_of(self)
    bounded = [None if t is None else _bounded(n, t, dims[k]) for k, t in enumerate(indices)]
    if any(as_int(d) == 0 for d in dims):
        return n.full(n.shape(), fill, n.dtype())
    read = index.__wrapped__(n, self, bounded)  # type: ignore[attr-defined]
    shape = n.shape()
    operands = [n.fit(x, shape) for x in (n.cast(mask, "bool"), read, n.operand(fill, n.dtype()))]
    return n.broadcast(n.emit(ops.where(*operands)), shape)


def _bounded(n: Node, at: Expr, size: SymExpr) -> Expr:
    """Return indices clamped to 0 ... size - 1."""
    last = n.operand(size - 1, "int64")
    return n.emit(ops.minimum(n.emit(ops.maximum(n.cast(at, "int64"), Constant.of(0, "int64"))), last))


def positions_along(n: Node, count: SymExpr | int, begin: Any = 0, step: Any = 1) -> Expr:
    """Return the vector begin, begin + step, ... of so many indices."""
    return n.emit(ops.arange(n.operand(begin, "int64"), n.operand(step, "int64"), (count,)))
