"""Converters of sequences and optionals.

What is known at import exists at import only: a sequence of known length is a tuple, an optional is its value, or
absent. Others stand in tensors (sequences.py, ragged.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from relaxlite.frontend.onnx import ragged
from relaxlite.frontend.onnx.convert_shapes import move_first_axis, normalize_axis, split_axis
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.frontend.onnx.sequences import (
    AbsentOptional,
    RaggedSequence,
    RuntimeOptional,
    StackedSequence,
    to_ragged,
)
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr, Tuple
from relaxlite.ir.symbolic import SymExpr, as_int, ceildiv, smin, sym


def _elements(n: Node, index: int) -> list[Expr] | None:
    """Return the elements of a sequence of known length, None for another sequence."""
    value = n.input(index)
    if not isinstance(value, Tuple) or isinstance(value, AbsentOptional | RuntimeOptional):
        n.fail(f"input {index} is no sequence")
    return None if isinstance(value, RaggedSequence | StackedSequence) else list(value.fields)


def _ragged(n: Node, index: int) -> RaggedSequence:
    return to_ragged(n.bb, n.input(index))


def _position(n: Node, index: int, size: int) -> int | None:
    """Return a known position in a sequence of `size` elements, counted from the front, or None."""
    value = n.const(index)
    if value is None:
        return None
    position = int(value.reshape(-1)[0])
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
    place = len(fields or ()) if n.optional(2) is None else _position(n, 2, len(fields or ())) if fields else None
    if fields is None or place is None:
        sequence = to_ragged(n.bb, n.input(0), (n.dtype(1), n.rank(1)))
        return ragged.inserted(n, sequence, n.input(1), n.optional(2))
    fields.insert(place, n.input(1))
    return Tuple(tuple(fields))


@onnx_op("SequenceErase", since=11)
def sequence_erase(n: Node) -> Result:
    fields = _elements(n, 0)
    place = -1 if n.optional(1) is None else None if fields is None else _position(n, 1, len(fields))
    if fields is None or place is None:
        return ragged.erased(n, _ragged(n, 0), n.optional(1))
    del fields[place]
    return Tuple(tuple(fields))


@onnx_op("SequenceAt", since=11)
def sequence_at(n: Node) -> Result:
    fields = _elements(n, 0)
    place = None if fields is None else _position(n, 1, len(fields))
    if fields is None or place is None:
        return ragged.element(n, _ragged(n, 0), n.input(1))
    return fields[place]


@onnx_op("SequenceLength", since=11)
def sequence_length(n: Node) -> Result:
    fields = _elements(n, 0)
    return ragged.length_of(n, _ragged(n, 0)) if fields is None else Constant.of(len(fields), "int64")


@onnx_op("ConcatFromSequence", since=11)
def concat_from_sequence(n: Node) -> Result:
    axis, sequence, new_axis = n.int("axis"), n.input(0), n.flag("new_axis")
    if isinstance(sequence, StackedSequence):
        return _concat_slices(n, sequence.fields[0], axis, new_axis=new_axis)
    fields = _elements(n, 0)
    if fields is None:
        return ragged.concatenated(n, _ragged(n, 0), axis, new_axis=new_axis)
    if not fields:
        n.fail("an empty sequence cannot be concatenated")
    if new_axis:
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
    if n.optional(1) is not None and n.rank(1) == 1:
        return Tuple(tuple(split_axis(n, axis, n.shape_values(1, lower=0))))
    part = sym(1) if n.optional(1) is None else n.shape_values(1, lower=1)[0]
    is_squeezed = n.optional(1) is None and not keepdims
    count = as_int(ceildiv(extent, part))
    if count is None:
        return _split_in_loop(n, axis, part, is_squeezed=is_squeezed)
    parts = split_axis(n, axis, [smin(part, extent - part * k) for k in range(count)])
    return Tuple(tuple(n.emit(ops.squeeze(x, axes=(axis,))) if is_squeezed else x for x in parts))


def _split_in_loop(n: Node, axis: int, part: SymExpr, *, is_squeezed: bool) -> RaggedSequence:
    """Split into parts of one size, whose number is known at run time only."""
    extent = n.shape()[axis]
    count, size, whole = (
        n.emit(ops.reshape(n.emit(ops.shape_to_tensor((d,))), ())) for d in (ceildiv(extent, part), part, extent)
    )

    def cut(step: Expr) -> list[Expr]:
        begin = n.emit(ops.multiply(step, size))
        length = n.emit(ops.minimum(size, n.emit(ops.subtract(whole, begin))))
        begins, lengths = (n.resolver.values(x, lower=0) for x in (begin, length))
        piece = n.emit(ops.slice(n.input(0), begins, (1,) if is_squeezed else lengths, axes=(axis,)))
        return [n.emit(ops.squeeze(piece, axes=(axis,))) if is_squeezed else piece]

    return ragged.build(n, count, [(n.dtype(), n.rank() - is_squeezed)], cut)[0]


@onnx_op("SequenceMap", since=17)
def sequence_map(n: Node) -> Result:
    """SequenceMap: convert the body once for each element, or once for all in a loop; tensors are the same for all."""
    graph, inputs = n.graph("body"), n.all_inputs()
    if _elements(n, 0) is None:
        return _map_in_loop(n)
    columns: list[Sequence[Expr]] = []
    for k in range(len(_elements(n, 0) or ())):
        values = [x.fields[k] if isinstance(x, Tuple) else x for x in inputs]
        columns.append(n.importer.subgraph(graph, values, n.label))
    return tuple(Tuple(tuple(column[k] for column in columns)) for k in range(n.num_outputs))


def _map_in_loop(n: Node) -> Result:
    graph = n.graph("body")
    inputs = [to_ragged(n.bb, x) if isinstance(x, Tuple) else x for x in n.all_inputs()]

    def body(step: Expr) -> list[Expr]:
        values = [ragged.element(n, x, step) if isinstance(x, RaggedSequence) else x for x in inputs]
        return n.importer.subgraph(graph, values, n.label)

    with n.bb.body(), n.resolver.scope():
        types = [n.type_of(n.bb.leaf(x)) for x in body(n.emit(ops.reshape(ragged.ZERO, ())))]
    assert isinstance(inputs[0], RaggedSequence)
    count = ragged.length_of(n, inputs[0])
    return tuple(ragged.build(n, count, [(ty.dtype, ty.rank or 0) for ty in types], body))


# Optionals


@onnx_op("Optional", since=15)
def optional(n: Node) -> Result:
    n.ignore("type")
    return AbsentOptional(()) if n.optional(0) is None else n.input(0)


@onnx_op("OptionalHasElement", since=15)
def optional_has_element(n: Node) -> Result:
    value = n.optional(0)
    if isinstance(value, RuntimeOptional):
        return value.is_present
    return Constant.of(value is not None and not isinstance(value, AbsentOptional), "bool")


@onnx_op("OptionalGetElement", since=15)
def optional_get_element(n: Node) -> Result:
    value = n.input(0)
    if isinstance(value, RuntimeOptional):
        n.check_assumption(value.is_present, True, "the optional value is absent")
        return value.value
    if isinstance(value, AbsentOptional):
        n.fail("the optional value is absent")
    return value
