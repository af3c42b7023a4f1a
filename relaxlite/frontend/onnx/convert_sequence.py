"""Sequences and optionals whose length is known at import: they exist there only, as tuples of tensors. So do lists
that a loop appends to, as one tensor of all that it appended (appended.py)."""

from __future__ import annotations

from collections.abc import Sequence

from relaxlite.frontend.onnx.appended import Stacked
from relaxlite.frontend.onnx.convert_shapes import cut, move_first, normalize_axis
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr, Tuple
from relaxlite.ir.symbolic import as_int, ceildiv, smin, sym


def _elements(n: Node, index: int) -> list[Expr]:
    result = n.input(index)
    if not isinstance(result, Tuple):
        n.fail(f"input {index} is a tensor, not a sequence")
    if isinstance(result, Stacked):
        n.fail("a sequence that a loop appends to can only be concatenated")
    return list(result.fields)


def _position(n: Node, index: int, size: int) -> int:
    """A place in a sequence; negative ones count from the end."""
    (at,) = n.const_ints(index, "the position in a sequence")
    if not -size <= at <= size:
        n.fail(f"position {at} lies outside a sequence of {size}")
    return at + size if at < 0 else at


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
    axis, result = n.int("axis"), n.input(0)
    if isinstance(result, Stacked):
        return _joined(n, result.fields[0], axis, new_axis=n.flag("new_axis"))
    fields = _elements(n, 0)
    if n.flag("new_axis"):
        axis = normalize_axis(n, axis, len(n.shape_of(fields[0])) + 1)
        fields = [n.emit(ops.expand_dims(x, axes=(axis,))) for x in fields]
    return ops.concat(*fields, axis=axis)


def _joined(n: Node, stack: Expr, axis: int, *, new_axis: bool) -> Expr:
    """The slices along the first axis, side by side along another."""
    rank = len(n.shape_of(stack))
    if new_axis:
        return move_first(n, stack, axis)
    axis = normalize_axis(n, axis, rank - 1)
    moved = move_first(n, stack, axis)
    dims = n.shape_of(moved)
    return ops.reshape(moved, (*dims[:axis], dims[axis] * dims[axis + 1], *dims[axis + 2 :]))


@onnx_op("SplitToSequence", since=11)
def split_to_sequence(n: Node) -> Result:
    """Parts of sizes that are given, of one size (the last may be smaller), or single slices without keepdims."""
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
    parts = cut(n, axis, sizes)
    return Tuple(tuple(parts if keepdims else (n.emit(ops.squeeze(x, axes=(axis,))) for x in parts)))


@onnx_op("SequenceMap", since=17)
def sequence_map(n: Node) -> Result:
    """The body for every element; inputs that are tensors are the same for all."""
    graph = n.graph("body")
    inputs = n.all_inputs()
    count = len(_elements(n, 0))
    columns: list[Sequence[Expr]] = []
    for k in range(count):
        values = [x.fields[k] if isinstance(x, Tuple) else x for x in inputs]
        columns.append(n.importer.subgraph(graph, values, n.label))
    return tuple(Tuple(tuple(column[k] for column in columns)) for k in range(n.num_outputs))


# Optionals: an absent one is an empty sequence


@onnx_op("Optional", since=15)
def optional(n: Node) -> Result:
    n.ignore("type")
    return Tuple(()) if n.optional(0) is None else n.input(0)


@onnx_op("OptionalHasElement", since=15)
def optional_has_element(n: Node) -> Result:
    result = n.optional(0)
    return Constant.of(result is not None and not (isinstance(result, Tuple) and not result.fields), "bool")


@onnx_op("OptionalGetElement", since=15)
def optional_get_element(n: Node) -> Result:
    result = n.input(0)
    if isinstance(result, Tuple) and not result.fields:
        n.fail("the optional value is absent")
    return result
