"""Sequences and optionals of which only the running model knows how long they are, or whether they are present.

A sequence of static length is a plain Tuple, and an optional that is known to be present is its value. A
`RaggedSequence` is two tensors, as at the model's border (forms.py): the elements one after another, flat, and
their shapes. Elements have one dtype and rank. A `RuntimeOptional` is a flag and the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from relaxlite.errors import ImportModelError
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Constant, Expr, Tuple
from relaxlite.ir.symbolic import as_int, product, sym
from relaxlite.ir.types import TensorType
from relaxlite.records import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class StackedSequence(Tuple):
    """A sequence stored as one tensor: its elements are the slices along the first axis. Its length is symbolic."""


@dataclass(frozen=True, slots=True, eq=False)
class RaggedSequence(Tuple):
    """A sequence stored as two tensors: elements (total,), shapes int64 (length, rank)."""

    @property
    def elements(self) -> Expr:
        return self.fields[0]

    @property
    def shapes(self) -> Expr:
        return self.fields[1]


@dataclass(frozen=True, slots=True, eq=False)
class AbsentOptional(Tuple):
    """An optional that is known to be absent."""


@dataclass(frozen=True, slots=True, eq=False)
class RuntimeOptional(Tuple):
    """An optional stored as a bool scalar and its value: a tensor, or a sequence."""

    @property
    def is_present(self) -> Expr:
        return self.fields[0]

    @property
    def value(self) -> Expr:
        return self.fields[1]


@dataclass(frozen=True, slots=True, eq=False)
class MapSequence(Tuple):
    """A sequence of maps from labels to numbers, stored as a matrix whose columns are the labels'."""

    labels: tuple[str | int, ...] = ()


# Leaves: the tensors that a value stands in


def leaves(value: Expr) -> list[Expr]:
    """Return the tensors that a value stands in."""
    return [leaf for field in value.fields for leaf in leaves(field)] if isinstance(value, Tuple) else [value]


def rebuilt(value: Expr, parts: Sequence[Expr]) -> Expr:
    """Return a value like this one that stands in other tensors."""
    if not isinstance(value, Tuple):
        return parts[0]
    fields, rest = list[Expr](), list(parts)
    for field in value.fields:
        count = len(leaves(field))
        fields.append(rebuilt(field, rest[:count]))
        rest = rest[count:]
    return replace(value, fields=tuple(fields))


# Ragged sequences


def tensor_type(x: Expr) -> TensorType:
    if not isinstance(x.ty, TensorType) or x.ty.shape is None:
        raise ImportModelError(f"an element of a sequence is {x.ty}, not a tensor")
    return x.ty


def rank_of(sequence: RaggedSequence) -> int:
    """Return the rank of the elements."""
    rank = as_int((tensor_type(sequence.shapes).shape or ())[1])
    if rank is None:
        raise ImportModelError(
            "the elements of a sequence differ in rank, or have another rank than is declared: declare the sequence's "
            "type where it begins"
        )
    return rank


def empty_sequence(dtype: str, rank: int) -> RaggedSequence:
    return RaggedSequence((Constant.of(np.zeros(0), dtype), Constant.of(np.zeros((0, rank), np.int64))))


def row_of(bb: BlockBuilder, x: Expr) -> tuple[Expr, Expr]:
    """Return an element as the parts of a sequence of length 1: flat, and its shape (1, rank)."""
    dims = tensor_type(x).shape or ()
    shape = bb.emit(ops.shape_to_tensor(dims)) if dims else Constant.of(np.zeros(0, np.int64))
    return bb.emit(ops.reshape(x, (product(dims),))), bb.emit(ops.reshape(shape, (1, len(dims))))


def to_ragged(bb: BlockBuilder, value: Expr, default: tuple[str, int] = ("float32", 0)) -> RaggedSequence:
    """Return a sequence as a ragged one; `default`: dtype and rank of an empty one. ImportModelError for a tensor."""
    if isinstance(value, RaggedSequence):
        return value
    if isinstance(value, StackedSequence):
        return _from_stack(bb, value.fields[0])
    if not isinstance(value, Tuple) or isinstance(value, RuntimeOptional):
        raise ImportModelError("a sequence is needed, got another value")
    if not value.fields:
        return empty_sequence(*default)
    types = {(tensor_type(x).dtype, len(tensor_type(x).shape or ())) for x in value.fields}
    if len(types) > 1:
        raise ImportModelError("the elements of a sequence differ in rank or type: such a sequence cannot be stored")
    rows = [row_of(bb, x) for x in value.fields]
    return RaggedSequence(tuple(_joined(bb, [row[k] for row in rows]) for k in (0, 1)))


def _joined(bb: BlockBuilder, parts: Sequence[Expr]) -> Expr:
    return parts[0] if len(parts) == 1 else bb.emit(ops.concat(*parts, axis=0))


def _from_stack(bb: BlockBuilder, stack: Expr) -> RaggedSequence:
    length, *dims = tensor_type(stack).shape or ()
    flat = bb.emit(ops.reshape(stack, (product((length, *dims)),)))
    shape = bb.emit(ops.shape_to_tensor(tuple(dims))) if dims else Constant.of(np.zeros(0, np.int64))
    return RaggedSequence((flat, bb.emit(ops.broadcast_to(shape, (length, sym(len(dims)))))))
