"""Converters of sequences and optionals, which exist at import only, as tuples of tensors of known length.

A sequence that a loop appends to is one stacked tensor (loop_sequences.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from relaxlite.frontend.onnx.convert_shapes import move_first_axis, normalize_axis, split_axis
from relaxlite.frontend.onnx.loop_sequences import StackedSequence
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr, Tuple
from relaxlite.ir.symbolic import as_int, ceildiv, smin, sym


def _elements(n: Node, index: int) -> list[Expr]:
    """Return the elements of an input that is a sequence of known length."""
    value = n.input(index)
    if not isinstance(value, Tuple):
        n.fail(f"input {index} is a tensor, not a sequence")
    if isinstance(value, StackedSequence):
        n.fail("a sequence that a loop appends to can only be concatenated")
    return list(value.fields)


def _position(n: Node, index: int, size: int) -> int:
    """Return a position in a sequence of `size` elements; negative inputs count from the end."""
    (position,) = n.const_ints(index, "the position in a sequence")
    if not -size <= position <= size:
        n.fail(f"position {position} lies outside a sequence of {size}")
    return position + size if position < 0 else position


@onnx_op("SequenceEmpty", since=11)
def sequence_empty(n: Node) -> Result:
    n.ignore("dtype")
    return Tuple(())


@onnx_op("SequenceConstruct", since=11)
def sequence_construct(n: Node) -> Result:
    return Tuple(tuple(n.all_inputs()))


@onnx_op("SequenceInsert", since=11)
def sequence_insert(n: Node) -> Result:
    fields = _elements(n, 0)
    fields.insert(len(fields) if n.optional(2) is None else _position(n, 2, len(fields)), n.input(1))
    return Tuple(tuple(fields))


@onnx_op("SequenceErase", since=11)
def sequence_erase(n: Node) -> Result:
    fields = _elements(n, 0)
    del fields[-1 if n.optional(1) is None else _position(n, 1, len(fields))]
    return Tuple(tuple(fields))


@onnx_op("SequenceAt", since=11)
def sequence_at(n: Node) -> Result:
    fields = _elements(n, 0)
    return fields[_position(n, 1, len(fields))]


@onnx_op("SequenceLength", since=11)
def sequence_length(n: Node) -> Result:
    return Constant.of(len(_elements(n, 0)), "int64")


@onnx_op("ConcatFromSequence", since=11)
def concat_from_sequence(n: Node) -> Result:
    axis, sequence = n.int("axis"), n.input(0)
    if isinstance(sequence, StackedSequence):
        return _concat_slices(n, sequence.fields[0], axis, new_axis=n.flag("new_axis"))
    fields = _elements(n, 0)
    if n.flag("new_axis"):
        axis = normalize_axis(n, axis, len(n.shape_of(fields[0])) + 1)
        fields = [n.emit(ops.expand_dims(x, axes=(axis,))) for x in fields]
    return ops.concat(*fields, axis=axis)


def _concat_slices(n: Node, stack: Expr, axis: int, *, new_axis: bool) -> Expr:
    """Concatenate the slices along the first axis along another axis."""
    rank = len(n.shape_of(stack))
    if new_axis:
        return move_first_axis(n, stack, axis)
    axis = normalize_axis(n, axis, rank - 1)
    moved = move_first_axis(n, stack, axis)
    dims = n.shape_of(moved)
    return ops.reshape(moved, (*dims[:axis], dims[axis] * dims[axis + 1], *dims[axis + 2 :]))


@onnx_op("SplitToSequence", since=11)
def split_to_sequence(n: Node) -> Result:
    """SplitToSequence: into parts of given sizes, of one size (the last may be smaller), or single slices."""
    axis = normalize_axis(n, n.int("axis", 0), n.rank())
    extent, keepdims = n.shape()[axis], n.flag("keepdims", True)
    if n.optional(1) is None:
        count = as_int(extent)
        if count is None:
            n.fail("the number of parts must be known when the model is compiled")
        sizes = [sym(1)] * count
    elif n.rank(1) == 1:
        sizes, keepdims = list(n.shape_values(1, lower=0)), True
    else:
        part, count = n.shape_values(1, lower=0)[0], as_int(ceildiv(extent, n.shape_values(1, lower=0)[0]))
        if count is None:
            n.fail("the number of parts must be known when the model is compiled")
        sizes, keepdims = [smin(part, extent - part * k) for k in range(count)], True
    parts = split_axis(n, axis, sizes)
    return Tuple(tuple(parts if keepdims else (n.emit(ops.squeeze(x, axes=(axis,))) for x in parts)))


@onnx_op("SequenceMap", since=17)
def sequence_map(n: Node) -> Result:
    """SequenceMap: convert the body once for each element; inputs that are tensors are the same for all."""
    graph = n.graph("body")
    inputs = n.all_inputs()
    count = len(_elements(n, 0))
    columns: list[Sequence[Expr]] = []
    for k in range(count):
        values = [x.fields[k] if isinstance(x, Tuple) else x for x in inputs]
        columns.append(n.importer.subgraph(graph, values, n.label))
    return tuple(Tuple(tuple(column[k] for column in columns)) for k in range(n.num_outputs))


# Optionals: an absent optional is an empty sequence


@onnx_op("Optional", since=15)
def optional(n: Node) -> Result:
    n.ignore("type")
    return Tuple(()) if n.optional(0) is None else n.input(0)


@onnx_op("OptionalHasElement", since=15)
def optional_has_element(n: Node) -> Result:
    value = n.optional(0)
    return Constant.of(value is not None and not (isinstance(value, Tuple) and not value.fields), "bool")


@onnx_op("OptionalGetElement", since=15)
def optional_get_element(n: Node) -> Result:
    value = n.input(0)
    if isinstance(value, Tuple) and not value.fields:
        n.fail("the optional value is absent")
    return value
