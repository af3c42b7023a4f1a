"""Ops on sequences whose length only the running model knows (sequences.py), composed of ordinary ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.sequences import RaggedSequence, empty_sequence, rank_of, row_of, tensor_type
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr, Var
from relaxlite.ir.symbolic import SymExpr, product, sym

ZERO, ONE = Constant.of(np.int64(0)), Constant.of(np.int64(1))


def length_dim(sequence: RaggedSequence) -> SymExpr:
    """Return the length as a symbolic integer."""
    return (tensor_type(sequence.shapes).shape or ())[0]


def length_of(n: Node, sequence: RaggedSequence) -> Expr:
    """Return the length, an int64 scalar."""
    return n.emit(ops.reshape(n.emit(ops.shape_to_tensor((length_dim(sequence),))), ()))


def element(n: Node, sequence: RaggedSequence, position: Expr) -> Expr:
    """Return the element at a position, an integer scalar that the model checks."""
    position = _checked_position(n, sequence, position, is_insertion=False)
    shape = n.emit(ops.gather(sequence.shapes, position, axis=0), "shape")
    dims = n.resolver.values(shape, lower=0) if rank_of(sequence) else ()
    begin = _offset(n, sequence, position)
    return n.emit(ops.reshape(n.emit(ops.slice(sequence.elements, (begin,), (product(dims),), axes=(0,))), dims))


def inserted(n: Node, sequence: RaggedSequence, x: Expr, position: Expr | None) -> RaggedSequence:
    """Return the sequence with an element inserted before a position; None: at the end."""
    sequence = with_rank(n, sequence, len(n.shape_of(x)))
    row = row_of(n.bb, x)
    if position is None:
        pieces: list[tuple[Expr, ...]] = list(zip(sequence.fields, row, strict=True))
    else:
        position = _checked_position(n, sequence, position, is_insertion=True)
        cuts = _offset(n, sequence, position), _number(n, position)
        sides = [_cut(n, field, at, at) for field, at in zip(sequence.fields, cuts, strict=True)]
        pieces = [(low, part, high) for (low, high), part in zip(sides, row, strict=True)]
    return RaggedSequence(tuple(n.emit(ops.concat(*p, axis=0)) for p in pieces))


def erased(n: Node, sequence: RaggedSequence, position: Expr | None) -> RaggedSequence:
    """Return the sequence without the element at a position; None: without the last."""
    position = _checked_position(n, sequence, Constant.of(-1, "int64") if position is None else position, False)
    begin, number = _offset(n, sequence, position), _number(n, position)
    end = _offset(n, sequence, n.emit(ops.add(position, ONE)))
    sides = _cut(n, sequence.elements, begin, end), _cut(n, sequence.shapes, number, number + 1)
    return RaggedSequence(tuple(n.emit(ops.concat(*half, axis=0)) for half in sides))


def appended(n: Node, first: RaggedSequence, second: RaggedSequence) -> RaggedSequence:
    """Return the elements of both sequences."""
    first = with_rank(n, first, rank_of(second))
    return RaggedSequence(
        tuple(n.emit(ops.concat(a, b, axis=0)) for a, b in zip(first.fields, second.fields, strict=True))
    )


def with_rank(n: Node, sequence: RaggedSequence, rank: int) -> RaggedSequence:
    """Return a sequence for elements of this rank. One for elements of another rank must be empty, which is checked."""
    if rank_of(sequence) == rank:
        return sequence
    is_empty = n.emit(ops.equal(length_of(n, sequence), ZERO))
    n.check_assumption(is_empty, True, f"a sequence of tensors of rank {rank_of(sequence)} gets one of rank {rank}")
    return empty_sequence(tensor_type(sequence.elements).dtype, rank)


def concatenated(n: Node, sequence: RaggedSequence, axis: int, *, new_axis: bool) -> Expr:
    """Return the elements concatenated along the first axis; with `new_axis`, stacked along a new first axis."""
    rank = rank_of(sequence)
    if axis not in (0, -rank - new_axis):
        n.fail("a sequence whose length the model computes can be concatenated along the first axis only")
    first = n.emit(ops.gather(sequence.shapes, ZERO, axis=0), "shape")
    dims = n.resolver.values(first, lower=0) if rank else ()
    if new_axis:
        return ops.reshape(sequence.elements, (length_dim(sequence), *dims))
    rows = n.emit(ops.gather(sequence.shapes, ZERO, axis=1))
    total = n.resolver.values(n.emit(ops.sum(rows, axes=(0,)), "total"), lower=0)
    return ops.reshape(sequence.elements, (*total, *dims[1:]))


def build(
    n: Node, count: Expr, types: Sequence[tuple[str, int]], make: Callable[[Expr], Sequence[Expr]]
) -> list[RaggedSequence]:
    """Return sequences whose k-th elements are make(k), of these dtypes and ranks, made by a loop of `count` steps."""
    starts = [leaf for dtype, rank in types for leaf in _empty(n, dtype, rank)]
    labels = ["step", *(f"{n.op_type}_{part}" for _ in types for part in ("elements", "shapes"))]

    def iterate(params: Sequence[Var]) -> tuple[Expr, list[Expr]]:
        step, carried, values = params[0], params[1:], list[Expr]()
        for k, x in enumerate(make(step)):
            row = row_of(n.bb, x)
            values += [n.emit(ops.concat(carried[2 * k + part], row[part], axis=0)) for part in (0, 1)]
        next_step = n.emit(ops.add(step, ONE))
        return n.emit(ops.less(next_step, count)), [next_step, *values]

    final = n.importer.flow.loop(n.emit(ops.less(ZERO, count)), [ZERO, *starts], labels, iterate)[1:]
    return [RaggedSequence((final[2 * k], final[2 * k + 1])) for k in range(len(types))]


def _empty(n: Node, dtype: str, rank: int) -> list[Expr]:
    zeros = [n.emit(ops.full((sym(0),), Constant.of(0, dtype)))]
    return [*zeros, n.emit(ops.full((sym(0), sym(rank)), ZERO))]


def _checked_position(n: Node, sequence: RaggedSequence, position: Expr, is_insertion: bool) -> Expr:
    """Return a position counted from the front, an int64 scalar, with a run-time check that it exists."""
    wide = n.emit(ops.reshape(position, ()))
    wide = wide if n.type_of(wide).dtype == "int64" else n.emit(ops.cast(wide, dtype="int64"))
    length = length_of(n, sequence)
    positive = n.emit(ops.where(n.emit(ops.less(wide, ZERO)), n.emit(ops.add(wide, length)), wide))
    end = (ops.less_equal if is_insertion else ops.less)(positive, length)
    inside = n.emit(ops.logical_and(n.emit(ops.less_equal(ZERO, positive)), n.emit(end)))
    n.check_assumption(inside, True, "a position lies outside of the sequence")
    return positive


def _offset(n: Node, sequence: RaggedSequence, position: Expr) -> SymExpr:
    """Return where the element at a position begins among the elements; the length is a position, too."""
    sizes = n.emit(ops.prod(sequence.shapes, axes=(1,))) if rank_of(sequence) else _ones(n, sequence)
    numbers = n.emit(ops.arange(ZERO, ONE, (length_dim(sequence),)))
    before = n.emit(ops.where(n.emit(ops.less(numbers, position)), sizes, ZERO))
    return n.resolver.values(n.emit(ops.sum(before, axes=(0,)), "offset"), lower=0)[0]


def _ones(n: Node, sequence: RaggedSequence) -> Expr:
    return n.emit(ops.full((length_dim(sequence),), ONE))


def _number(n: Node, position: Expr) -> SymExpr:
    return n.resolver.values(position, lower=0)[0]


def _cut(n: Node, x: Expr, begin: SymExpr, end: SymExpr) -> tuple[Expr, Expr]:
    """Return what stands before `begin`, and from `end` on, along the first axis."""
    size = n.shape_of(x)[0]
    return n.emit(ops.slice(x, (0,), (begin,), axes=(0,))), n.emit(ops.slice(x, (end,), (size - end,), axes=(0,)))
