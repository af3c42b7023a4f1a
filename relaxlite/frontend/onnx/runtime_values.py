"""Values that other models give as constants and these models give at run time: axes, flags, starts and steps.

`by_axes` and `choose` convert a node once for each possible value; the model takes one at run time. Where a value per
axis is a size anyway, `for_every_axis` spreads values over all axes, as integers that `ShapeResolver` reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from relaxlite.frontend.onnx.node import Node
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.symbolic import SymExpr, as_int

MAX_CHOICES = 64  # possible values of one input, each of which is compiled
Axes = tuple[int, ...]


def choose(n: Node, number: Expr, choices: Sequence[Callable[[], list[Expr]]]) -> list[Expr]:
    """Return the outputs of the choice whose number, 0 <= number < len(choices), an int64 scalar holds at run time.

    Outputs whose sizes differ between choices get sizes that are known at run time only.
    """
    if len(choices) == 1:
        return choices[0]()
    middle = len(choices) // 2
    above = n.emit(ops.subtract(number, Constant.of(middle, "int64")))
    branches: list[Callable[[], list[Expr]]] = [
        lambda: choose(n, number, choices[:middle]),
        lambda: choose(n, above, choices[middle:]),
    ]
    is_low = n.emit(ops.less(number, Constant.of(middle, "int64")))
    names = [name or f"{n.op_type}_{k}" for k, name in enumerate(n.proto.output)]
    return n.importer.flow.branch(is_low, branches, names)


def by_axes(
    n: Node, index: int, rank: int, convert: Callable[[Axes], Expr], *, possible: Sequence[int] | None = None
) -> Expr:
    """Return `convert(axes)` for the axes that an input holds; axes known at run time only are a choice.

    `rank`: of the tensor that the axes belong to. `possible`: the axes that the op takes, by default all. The model
    checks at run time that axes exist and differ. Raises ImportModelError for a tensor with more than MAX_CHOICES
    combinations of axes.
    """
    known = n.const(index)
    if known is not None:
        return convert(tuple(int(axis) for axis in known.reshape(-1)))
    choices = _combinations(n, index, rank, range(rank) if possible is None else possible)
    bits = Constant.of([1 << axis for axis in range(rank)], "int64")
    mask = n.emit(ops.sum(n.emit(ops.multiply(axis_marks(n, n.input(index), rank), bits)), axes=(0,)))
    is_chosen = n.emit(ops.equal(mask, Constant.of([sum(1 << a for a in axes) for axes in choices], "int64")))
    what = f"axes (input {index}) must differ, and be axes that {n.op_type} takes"
    n.check_assumption(n.emit(ops.any(is_chosen, axes=(0,))), True, what)
    numbers = Constant.of(np.arange(len(choices), dtype=np.int64))
    number = n.emit(ops.sum(n.emit(ops.where(is_chosen, numbers, Constant.of(0, "int64"))), axes=(0,)), "choice")
    return choose(n, number, [partial(_converted, convert, axes) for axes in choices])[0]


def _converted(convert: Callable[[Axes], Expr], axes: Axes) -> list[Expr]:
    return [convert(axes)]


def _combinations(n: Node, index: int, rank: int, possible: Sequence[int]) -> list[Axes]:
    """Return the combinations of axes that a tensor of axes may hold."""
    dims = n.shape(index)
    count = as_int(dims[0]) if dims else 1
    counts = range(len(possible) + 1) if count is None else (min(count, len(possible)),)
    choices = [axes for size in counts for axes in itertools.combinations(possible, size)]
    if len(choices) > MAX_CHOICES:
        n.fail(
            f"the axes (input {index}) come from the model's inputs, and a tensor of rank {rank} has {len(choices)} "
            f"combinations, of which at most {MAX_CHOICES} are compiled: make the axes a constant"
        )
    return choices


def axis_marks(n: Node, axes: Expr, rank: int) -> Expr:
    """Return int64 (rank,), 1 for each of the axes, which may be negative; checks at run time that axes exist."""
    is_axis = n.emit(ops.any(_hits(n, axes, rank), axes=(0,)))
    return n.emit(ops.cast(is_axis, dtype="int64"))


def for_every_axis(n: Node, values: Expr, axes: Expr | None, rank: int, default: int) -> Expr:
    """Return int64 (rank,): of each axis the value that stands in `values` where the axis stands in `axes`.

    `axes` None: the first axes, one for each value. Axes that are not named get `default`.
    """
    wide = _wide(n, values)
    if axes is None:
        count = as_int(n.shape_of(values)[0])
        axes = Constant.of(np.arange(rank if count is None else count, dtype=np.int64))
    hits = _hits(n, axes, rank)
    column = n.emit(ops.expand_dims(wide, axes=(1,)))
    summed = n.emit(ops.sum(n.emit(ops.where(hits, column, Constant.of(0, "int64"))), axes=(0,)))
    return n.emit(ops.where(n.emit(ops.any(hits, axes=(0,))), summed, Constant.of(default, "int64")))


def _hits(n: Node, axes: Expr, rank: int) -> Expr:
    """Return bool (number of axes, rank): whether an axis is this one."""
    wide = n.emit(ops.reshape(_wide(n, axes), (_size(n, axes),)))
    limit = Constant.of(rank, "int64")
    is_negative = n.emit(ops.less(wide, Constant.of(0, "int64")))
    positive = n.emit(ops.where(is_negative, n.emit(ops.add(wide, limit)), wide))
    inside = n.emit(
        ops.logical_and(n.emit(ops.less_equal(Constant.of(0, "int64"), positive)), n.emit(ops.less(positive, limit)))
    )
    n.check_assumption(n.emit(ops.all(inside, axes=(0,))), True, f"an axis does not exist in a tensor of rank {rank}")
    every = Constant.of(np.arange(rank, dtype=np.int64))
    return n.emit(ops.equal(n.emit(ops.expand_dims(positive, axes=(1,))), every))


def _size(n: Node, x: Expr) -> SymExpr | int:
    dims = n.shape_of(x)
    return dims[0] if dims else 1


def _wide(n: Node, x: Expr) -> Expr:
    return x if n.type_of(x).dtype == "int64" else n.emit(ops.cast(x, dtype="int64"))
