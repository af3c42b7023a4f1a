"""Converters of shape ops and data movement: shape, reshape, transpose, slice, concat, pad, tile, ..."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relaxlite import dtypes
from relaxlite.frontend.common.slices import SliceRange, resolve_slice
from relaxlite.frontend.common.unify import unify_dims
from relaxlite.frontend.onnx.narrow_types import TEXT
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.frontend.onnx.runtime_slices import runtime_slice
from relaxlite.frontend.onnx.runtime_values import axis_marks, for_every_axis
from relaxlite.frontend.onnx.tensors import sparse_constant
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr, Var
from relaxlite.ir.ops.broadcast import PROVER, broadcast_dim
from relaxlite.ir.ops.shape import infer_dimension
from relaxlite.ir.symbolic import SymExpr, as_int, ceildiv, product, smax, sym

Shape = tuple[SymExpr, ...]


def normalize_axis(n: Node, axis: int, rank: int) -> int:
    """Return the axis counted from the front, 0 <= axis < rank. Raises ImportModelError for an axis out of range."""
    if not -max(rank, 1) <= axis < max(rank, 1):
        n.fail(f"axis {axis} does not exist in a tensor of rank {rank}")
    return axis % max(rank, 1)


# Constants and shapes


@onnx_op("Constant")
def constant(n: Node) -> Result:
    name = n.proto.output[0]
    if n.has("value"):
        tensor = n.tensor("value")
        assert tensor is not None
        result = Constant(tensor.value, tensor.ty, tensor.name or name)
        if tensor in n.importer.narrow:
            n.importer.narrow[result] = n.importer.narrow[tensor]
        return result
    if n.has("sparse_value"):
        sparse = n.sparse_tensor("sparse_value")
        assert sparse is not None
        return sparse_constant(sparse, n.importer.reader)
    for attribute, dtype in (
        ("value_int", "int64"),
        ("value_ints", "int64"),
        ("value_float", "float32"),
        ("value_floats", "float32"),
    ):
        if n.has(attribute):
            read = {"value_int": n.int, "value_ints": n.ints, "value_float": n.float, "value_floats": n.floats}[
                attribute
            ]
            return Constant.of(np.asarray(read(attribute), dtypes.to_numpy(dtype)), name=name)
    if n.has("value_string") or n.has("value_strings"):
        texts = (n.text("value_string"),) if n.has("value_string") else n.texts("value_strings")
        codes = n.importer.reader.codes(texts)
        text = Constant.of(codes.reshape(()) if n.has("value_string") else codes, name=name)
        n.importer.narrow[text] = TEXT
        return text
    n.fail("the constant has no value")


@onnx_op("Shape")
def shape(n: Node) -> Result:
    """Shape; since opset 15 optionally a part of the shape, start <= axis < end."""
    rank = n.rank()
    start, end = n.int("start", 0), n.int("end", rank)
    first, last = (min(max(v + rank if v < 0 else v, 0), rank) for v in (start, end))
    whole = n.emit(ops.shape_of(n.input(0)))
    if (first, last) == (0, rank):
        return whole
    return ops.slice(whole, (first,), (max(last - first, 0),), axes=(0,))


@onnx_op("Size")
def size(n: Node) -> Result:
    return ops.reshape(n.emit(ops.shape_to_tensor((product(n.shape()),))), ())


@onnx_op("ConstantOfShape", since=9)
def constant_of_shape(n: Node) -> Result:
    value = n.tensor("value")
    if value in n.importer.narrow:
        n.fail("the value is of a narrow type, which is not supported")
    fill = Constant.of(np.zeros((), np.float32)) if value is None else Constant.of(value.value.reshape(()))
    return ops.broadcast_to(fill, n.shape_values(0, lower=0))


# Reshaping


@onnx_op("Reshape")
def reshape_1(n: Node) -> Result:
    n.ignore("consumed_inputs")
    return _reshape(n, tuple(sym(d) for d in n.ints("shape")), allow_zero=False)


@onnx_op("Reshape", since=5)
def reshape(n: Node) -> Result:
    allow_zero = n.flag("allowzero")
    known = n.resolver.known(n.input(1))
    if known is not None:
        return _reshape(n, known, allow_zero=allow_zero)
    return ops.reshape(n.input(0), n.resolver.reshape_target(n.input(0), n.input(1), allow_zero=allow_zero))


def _reshape(n: Node, target: Shape, *, allow_zero: bool) -> Result:
    """Reshape to a target in which 0 copies a dimension (unless allow_zero) and -1 is inferred."""
    dims = n.shape()
    if not allow_zero:
        for k, d in enumerate(target):
            if as_int(d) == 0 and k >= len(dims):
                n.fail(f"the target shape keeps dimension {k} (a 0), but the input has rank {len(dims)}")
        target = tuple(dims[k] if as_int(d) == 0 else d for k, d in enumerate(target))
    if sum(as_int(d) == -1 for d in target) > 1:
        n.fail(f"the target shape ({', '.join(map(str, target))}) has more than one -1")
    return ops.reshape(n.input(0), infer_dimension(dims, n.resolver.simplify_nonempty(target)))


@onnx_op("Flatten")
def flatten(n: Node) -> Result:
    """Flatten to a matrix: the product of the dimensions before `axis`, and of the others."""
    dims = n.shape()
    axis = n.int("axis", 1)
    if not -len(dims) <= axis <= len(dims):
        n.fail(f"axis {axis} does not exist in a tensor of rank {len(dims)}")
    axis = axis + len(dims) if axis < 0 else axis
    return ops.reshape(n.input(0), (product(dims[:axis]), product(dims[axis:])))


@onnx_op("Squeeze")
def squeeze_1(n: Node) -> Result:
    return _squeeze(n, n.ints("axes", None))


@onnx_op("Squeeze", since=13)
def squeeze(n: Node) -> Result:
    if n.optional(1) is not None and n.const(1) is None:
        return _squeeze_runtime_axes(n)
    return _squeeze(n, n.const_ints(1, "axes") if n.optional(1) is not None else None)


def _squeeze_runtime_axes(n: Node) -> Result:
    """Squeeze axes that are known at run time only: the sizes of the others, in their order, are the new shape."""
    rank, count = n.rank(), _number_of_axes(n)
    stays = n.emit(ops.subtract(Constant.of(1, "int64"), axis_marks(n, n.input(1), rank)))
    places = n.emit(ops.subtract(n.emit(ops.cumsum(stays, axis=0)), Constant.of(1, "int64")))  # in the new shape
    sizes = n.emit(ops.multiply(stays, n.emit(ops.shape_of(n.input(0)))))
    targets = Constant.of(np.arange(rank - count, dtype=np.int64)[:, None])
    moved = n.emit(ops.where(n.emit(ops.equal(targets, places)), sizes, Constant.of(0, "int64")))
    return ops.reshape(n.input(0), n.resolver.values(n.emit(ops.sum(moved, axes=(1,)), "size"), lower=0))


def _number_of_axes(n: Node) -> int:
    count = as_int(n.shape(1)[0]) if n.rank(1) else 1
    if count is None:
        n.fail("the number of axes (input 1) must be known when the model is compiled: the rank of the output needs it")
    return count


def _squeeze(n: Node, axes: tuple[int, ...] | None) -> Result:
    if axes is None:
        axes = _unit_axes(n)
    x, dims = n.input(0), n.shape()
    squeezed = {normalize_axis(n, axis, len(dims)) for axis in axes}
    ones = tuple(sym(1) if k in squeezed and as_int(d) is None else d for k, d in enumerate(dims))
    if ones != dims:
        x = n.bb.match_shape(n.bb.leaf(x), ones)  # a run-time check of the size
    return ops.squeeze(x, axes=axes) if axes else x


def _unit_axes(n: Node) -> tuple[int, ...]:
    """Return the axes to squeeze, those of size 1.

    Symbolic sizes are assumed not to be 1, or to be 1 if the outputs' declared ranks require it; checked at run time.
    """
    axes = tuple(k for k, d in enumerate(n.shape()) if as_int(d) == 1)
    symbolic = tuple(k for k, d in enumerate(n.shape()) if as_int(d) is None and not PROVER.can_prove_ne(d, 1))
    if not symbolic:
        return axes
    sizes = ", ".join(str(n.shape()[k]) for k in symbolic)
    none_is_one = n.importer.model.assumptions.assume(n.bb.loc or n.label, f"no size ({sizes}) is 1, which would go")
    if not none_is_one:
        return tuple(sorted(axes + symbolic))
    for size in dict.fromkeys(n.shape()[k] for k in symbolic):
        is_one = n.emit(ops.equal(n.emit(ops.shape_to_tensor((size,))), np.int64(1)))
        n.check_assumption(is_one, False, f"{size} is 1, but taken to be another size: give the axes to squeeze")
    return axes


@onnx_op("Unsqueeze")
def unsqueeze_1(n: Node) -> Result:
    return ops.expand_dims(n.input(0), axes=n.ints("axes"))


@onnx_op("Unsqueeze", since=13)
def unsqueeze(n: Node) -> Result:
    if n.const(1) is None:
        return _unsqueeze_runtime_axes(n)
    return ops.expand_dims(n.input(0), axes=n.const_ints(1, "axes"))


def _unsqueeze_runtime_axes(n: Node) -> Result:
    """Unsqueeze at axes that are known at run time only: 1 for each of the axes, between them the sizes in order."""
    rank = n.rank() + _number_of_axes(n)
    is_new = axis_marks(n, n.input(1), rank)
    old = n.emit(ops.subtract(Constant.of(1, "int64"), is_new))
    places = n.emit(ops.subtract(n.emit(ops.cumsum(old, axis=0)), Constant.of(1, "int64")))  # in the old shape
    padded = n.emit(ops.shape_to_tensor((*n.shape(), sym(1))))
    sizes = n.emit(ops.gather(padded, n.emit(ops.maximum(places, Constant.of(0, "int64"))), axis=0))
    new_sizes = n.emit(ops.where(n.emit(ops.equal(is_new, Constant.of(1, "int64"))), Constant.of(1, "int64"), sizes))
    return ops.reshape(n.input(0), n.resolver.values(new_sizes, lower=0))


@onnx_op("Expand", since=8)
def expand(n: Node) -> Result:
    """Expand: two-way broadcast of the input and the given shape, in which 1 keeps the input's size."""
    dims, target = n.shape(), n.shape_values(1, lower=0)
    rank = max(len(dims), len(target))
    ones = (sym(1),)
    left, right = ones * (rank - len(dims)) + dims, ones * (rank - len(target)) + target
    result = tuple(broadcast_dim(a, b) for a, b in zip(left, right, strict=True))
    for k, d in enumerate(result):
        if d is None:
            n.fail(f"dimension {k} of size {left[k]} cannot be expanded to {right[k]}")
    return n.input(0) if result == dims else ops.broadcast_to(n.input(0), result)


@onnx_op("Transpose")
def transpose(n: Node) -> Result:
    perm = n.ints("perm", None)
    return ops.transpose(n.input(0), axes=perm)


def move_first_axis(n: Node, x: Expr, axis: int) -> Expr:
    """Return x with its first axis moved to `axis`."""
    rank = len(n.shape_of(x))
    axis = normalize_axis(n, axis, rank)
    order = list(range(1, rank))
    order.insert(axis, 0)
    return x if axis == 0 else n.emit(ops.transpose(x, axes=tuple(order)))


# Concatenation, splitting, slicing and padding


@onnx_op("Concat")
def concat(n: Node) -> Result:
    axis = normalize_axis(n, n.int("axis", 1 if n.opset < 4 else 0), n.rank())
    parts = n.all_inputs()
    if len(parts) == 1:
        return parts[0]
    return ops.concat(*parts, axis=axis)


@onnx_op("Split")
def split_1(n: Node) -> Result:
    """Split before opset 13: sizes are an attribute, or (opset 1) an input."""
    sizes = n.ints("split", None)
    if sizes is None and n.optional(1) is not None:
        sizes = n.const_ints(1, "the sizes of the parts")
    return _split(n, None if sizes is None else tuple(map(sym, sizes)))


@onnx_op("Split", since=13)
def split_13(n: Node) -> Result:
    return _split(n, None if n.optional(1) is None else n.shape_values(1, lower=0))


@onnx_op("Split", since=18)
def split(n: Node) -> Result:
    """Split since opset 18: if no sizes are given, the last part may be smaller."""
    count = n.int("num_outputs", n.num_outputs)
    if n.optional(1) is not None:
        return split_13(n)
    extent = n.shape()[normalize_axis(n, n.int("axis", 0), n.rank())]
    part = ceildiv(extent, count)
    return _split(n, (part,) * (count - 1) + (extent - part * (count - 1),))


def _split(n: Node, sizes: Shape | None) -> Result:
    axis = normalize_axis(n, n.int("axis", 0), n.rank())
    if sizes is None:
        sizes = (n.shape()[axis] // n.num_outputs,) * n.num_outputs
    if len(sizes) != n.num_outputs:
        n.fail(f"{n.num_outputs} outputs need as many sizes, got {len(sizes)}")
    return tuple(split_axis(n, axis, sizes))


def split_axis(n: Node, axis: int, sizes: Sequence[SymExpr]) -> list[Expr]:
    """Split the first input along an axis into parts of these sizes, whose sum must be the axis's size."""
    total, extent = sum(sizes, sym(0)), n.shape()[axis]
    if PROVER.can_prove_ne(total, extent):
        n.fail(f"parts of {', '.join(map(str, sizes))} add up to {total}, but axis {axis} has size {extent}")
    x = unify_dims(n.bb, n.input(0), {axis: total})
    parts, begin = list[Expr](), sym(0)
    for size in sizes:
        parts.append(n.emit(ops.slice(x, (begin,), (size,), axes=(axis,))))
        begin = begin + size
    return parts


@onnx_op("Slice")
def slice_1(n: Node) -> Result:
    starts, ends = n.ints("starts"), n.ints("ends")
    axes = n.ints("axes", tuple(range(len(starts))))
    return _slice(n, tuple(map(sym, starts)), tuple(map(sym, ends)), axes, (1,) * len(starts))


@onnx_op("Slice", since=10)
def slice_10(n: Node) -> Result:
    if _is_runtime(n, 3) or _is_runtime(n, 4) or _is_argument(n, 1) or _is_argument(n, 2):
        return runtime_slice(n)
    starts, ends = n.shape_values(1), n.shape_values(2)
    axes = n.const_ints(3, "axes") if n.optional(3) is not None else tuple(range(len(starts)))
    steps = n.const_ints(4, "steps") if n.optional(4) is not None else (1,) * len(starts)
    return _slice(n, starts, ends, axes, steps)


def _is_runtime(n: Node, index: int) -> bool:
    """Whether an input is present and not known when the model is compiled."""
    return n.optional(index) is not None and n.const(index) is None


def _is_argument(n: Node, index: int) -> bool:
    """Whether an input is an input of the model, about whose elements nothing is known."""
    x = n.input(index)
    return isinstance(x, Var) and n.bb.bound_value(x) is None and n.resolver.known(x) is None


def _slice(n: Node, starts: Shape, ends: Shape, axes: tuple[int, ...], steps: tuple[int, ...]) -> Result:
    if not len(starts) == len(ends) == len(axes) == len(steps):
        n.fail(
            f"starts, ends, axes and steps must be equally many: {len(starts)}, {len(ends)}, {len(axes)}, {len(steps)}"
        )
    dims = n.shape()
    ranges: dict[int, SliceRange] = {}
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step == 0:
            n.fail("a step of a slice must not be 0")
        k = normalize_axis(n, axis, len(dims))
        ranges[k] = resolve_slice(dims[k], start, end, step)
    partial = {k: r for k, r in ranges.items() if not r.is_whole(dims[k])}
    if not partial:
        return n.input(0)
    begins, sizes = tuple(r.begin for r in partial.values()), tuple(r.size for r in partial.values())
    return ops.slice(n.input(0), begins, sizes, axes=tuple(partial), steps=tuple(r.step for r in partial.values()))


@onnx_op("Pad")
def pad_1(n: Node) -> Result:
    amounts = n.ints("paddings" if n.opset < 2 else "pads")
    return _pad(n, tuple(map(sym, amounts)), Constant.of(n.float("value", 0.0), n.dtype()), None)


@onnx_op("Pad", since=11)
def pad(n: Node) -> Result:
    if _is_runtime(n, 3):
        return _pad_runtime_axes(n)
    axes = n.const_ints(3, "axes") if n.optional(3) is not None else None
    return _pad(n, n.shape_values(1), n.optional(2), axes)


def _pad_runtime_axes(n: Node) -> Result:
    """Pad at axes that are known at run time only: the other axes are padded by 0."""
    count = _count_of_pads(n)
    sides = [n.emit(ops.slice(n.input(1), (begin,), (count,), axes=(0,))) for begin in (0, count)]
    amounts_of_sides = [for_every_axis(n, side, n.input(3), n.rank(), 0) for side in sides]
    amounts = tuple(amount for side in amounts_of_sides for amount in n.resolver.values(side))
    return _pad(n, amounts, n.optional(2), None)


def _count_of_pads(n: Node) -> SymExpr:
    return n.shape(1)[0] // 2


def _pad(n: Node, amounts: Shape, value: Expr | None, axes: tuple[int, ...] | None) -> Result:
    rank = n.rank()
    axes = tuple(range(rank)) if axes is None else tuple(normalize_axis(n, a, rank) for a in axes)
    if len(amounts) != 2 * len(axes):
        n.fail(f"pads must be {len(axes)} begins and as many ends, got {len(amounts)} numbers")
    before, after = [sym(0)] * rank, [sym(0)] * rank
    for k, axis in enumerate(axes):
        before[axis], after[axis] = amounts[k], amounts[len(axes) + k]
    mode = n.text("mode", "constant")
    if mode not in ("constant", "reflect", "edge", "wrap"):
        n.fail(f"attribute 'mode' must be constant, reflect, edge or wrap, not {mode!r}")
    fill = value if mode == "constant" else None
    return ops.pad(n.input(0), before, after, fill, mode=mode)


@onnx_op("Tile", since=6)
def tile(n: Node) -> Result:
    return ops.tile(n.input(0), n.shape_values(1, lower=0))


@onnx_op("Tile")
def tile_1(n: Node) -> Result:
    count, axis = n.const_ints(1, "tiles"), n.const_ints(2, "axis")
    return ops.tile(n.input(0), tuple(count[0] if k == axis[0] else 1 for k in range(n.rank())))


@onnx_op("SpaceToDepth")
def space_to_depth(n: Node) -> Result:
    """SpaceToDepth; mode (since opset 28) "DCR": the block is the outer part of the channels, "CRD": the inner."""
    size, mode = n.int("blocksize"), n.text("mode", "DCR")
    if mode not in ("DCR", "CRD"):
        n.fail(f"attribute 'mode' must be DCR or CRD, not {mode!r}")
    result = ops.space_to_depth(n.input(0), blocksize=size)
    if mode == "DCR":
        return result
    dims = n.shape_of(result)
    blocks = n.emit(ops.reshape(n.emit(result), (dims[0], size * size, n.shape()[1], *dims[2:])))
    return ops.reshape(n.emit(ops.transpose(blocks, axes=(0, 2, 1, 3, 4))), dims)


@onnx_op("DepthToSpace")
def depth_to_space(n: Node) -> Result:
    return ops.depth_to_space(n.input(0), blocksize=n.int("blocksize"), mode=n.text("mode", "DCR"))


@onnx_op("CenterCropPad", since=18)
def center_crop_pad(n: Node) -> Result:
    """CenterCropPad: crop or zero-pad around the centre to a given shape."""
    dims, target = n.shape(), n.shape_values(1, lower=0)
    axes = n.ints("axes", tuple(range(len(dims))))
    before, after = [sym(0)] * len(dims), [sym(0)] * len(dims)
    for axis, new in zip((normalize_axis(n, a, len(dims)) for a in axes), target, strict=True):
        old = dims[axis]
        first = smax(new - old, 0) // 2 - smax(old - new, 0) // 2
        before[axis], after[axis] = first, new - old - first
    return ops.pad(n.input(0), before, after, None)


@onnx_op("ReverseSequence", since=10)
def reverse_sequence(n: Node) -> Result:
    return ops.reverse_sequence(
        n.input(0), n.input(1), batch_axis=n.int("batch_axis", 1), time_axis=n.int("time_axis", 0)
    )
