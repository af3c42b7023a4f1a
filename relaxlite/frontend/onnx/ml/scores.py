"""Scores and labels of classifiers: transforms after the sums, a second class of binary models, labels by table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from relaxlite.frontend.onnx.node import Node
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.symbolic import sym
from relaxlite.ir.types import TensorType

ML = "ai.onnx.ml"
Labels: TypeAlias = "list[int] | list[str]"
TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")  # numbered as in TreeEnsemble


def post_transform(n: Node) -> str:
    """Return the attribute `post_transform`."""
    name = n.text("post_transform", "NONE")
    if name not in TRANSFORMS:
        n.fail(f"attribute 'post_transform' must be one of {', '.join(TRANSFORMS)}, not {name!r}")
    return name


def matrix(n: Node, *, keeps: tuple[str, ...] = ("float32",)) -> Expr:
    """Return input 0 as rows (n, features), of float32 unless its dtype is one of `keeps`; a vector is one row."""
    x = n.input(0)
    if n.dtype() not in keeps:
        x = n.emit(ops.cast(x, dtype="float32"))
    if n.rank() == 1:
        return n.emit(ops.reshape(x, (1, *n.shape())))
    if n.rank() != 2:
        n.fail(f"input 0 must have shape (rows, features), got {n.type()}")
    return x


def dtype_of(x: Expr) -> str:
    """Return the dtype of a tensor."""
    assert isinstance(x.ty, TensorType)
    return x.ty.dtype


def scalar_like(value: float, x: Expr) -> Constant:
    """Return a constant of the dtype of x."""
    return Constant.of(value, dtype=dtype_of(x))


def column(n: Node, x: Expr, index: int) -> Expr:
    """Return column `index` of a matrix, as a vector."""
    return n.emit(ops.gather(x, Constant.of(np.int64(index)), axis=1))


def columns(n: Node, x: Expr, chosen: list[int]) -> Expr:
    """Return these columns of a matrix."""
    if sym(len(chosen)) == n.shape_of(x)[1] and chosen == list(range(len(chosen))):
        return x
    return n.emit(ops.gather(x, Constant.of(np.array(chosen, np.int64)), axis=1))


# Transforms


def transform_scores(n: Node, scores: Expr, name: str) -> Expr:
    """Apply a post_transform to scores (n, classes)."""
    return _TRANSFORMS[name](n, scores)


def _softmax_zero(n: Node, x: Expr) -> Expr:
    """Softmax that leaves zeros zero: they add nothing to the sum."""
    small = scalar_like(1e-7, x)
    is_some = n.emit(ops.greater(n.emit(ops.abs(x)), small))
    top = n.emit(ops.max(x, axes=(-1,), keepdims=True))
    powers = n.emit(ops.exp(n.emit(ops.subtract(x, top))))
    zeros = n.emit(ops.multiply(x, n.emit(ops.exp(n.emit(ops.neg(top))))))
    total = n.emit(ops.sum(n.emit(ops.where(is_some, powers, scalar_like(0, x))), axes=(-1,), keepdims=True))
    return n.emit(ops.divide(n.emit(ops.where(is_some, powers, zeros)), total))


def _probit(n: Node, x: Expr) -> Expr:
    """The normal quantile of x by Winitzki's approximation of the inverse error function, as onnxruntime has it."""
    y = n.emit(ops.subtract(n.emit(ops.multiply(x, scalar_like(2, x))), scalar_like(1, x)))
    one = scalar_like(1, x)
    log = n.emit(ops.log(n.emit(ops.multiply(n.emit(ops.subtract(one, y)), n.emit(ops.add(one, y))))))
    half = n.emit(ops.multiply(log, scalar_like(0.5, x)))
    first = n.emit(ops.add(half, scalar_like(2 / (3.14159 * 0.147), x)))
    square = n.emit(ops.subtract(n.emit(ops.multiply(first, first)), n.emit(ops.divide(log, scalar_like(0.147, x)))))
    root = n.emit(ops.sqrt(n.emit(ops.subtract(n.emit(ops.sqrt(square)), first))))
    signed = n.emit(ops.where(n.emit(ops.less(y, scalar_like(0, x))), n.emit(ops.neg(root)), root))
    return n.emit(ops.multiply(signed, scalar_like(2**0.5, x)))


_TRANSFORMS: Mapping[str, Callable[[Node, Expr], Expr]] = {
    "NONE": lambda n, x: x,
    "LOGISTIC": lambda n, x: n.emit(ops.sigmoid(x)),
    "SOFTMAX": lambda n, x: n.emit(ops.softmax(x, axis=-1)),
    "SOFTMAX_ZERO": _softmax_zero,
    "PROBIT": _probit,
}


def with_second_class(n: Node, score: Expr, transform: str, *, is_probability: bool) -> Expr:
    """Return the scores (rows, 2) of a binary model from the score (rows,) of its second class.

    is_probability: the other score is 1 - score, not its negative.
    """
    negative = n.emit(ops.neg(score))
    if transform == "LOGISTIC":
        return transform_scores(n, stacked(n, negative, score), transform)
    if transform == "PROBIT":
        score, is_probability = _probit(n, score), True
    other = n.emit(ops.subtract(scalar_like(1, score), score)) if is_probability else negative
    return stacked(n, other, score)


def stacked(n: Node, *columns: Expr) -> Expr:
    """Return vectors (n,) as the columns of a matrix."""
    shaped = [n.emit(ops.reshape(c, (*n.shape_of(c), sym(1)))) for c in columns]
    return n.emit(ops.concat(*shaped, axis=1))


# Labels


def labels(n: Node, ints: str, strings: str) -> Labels:
    """Return the class labels, from one of two attributes."""
    numbers, texts = n.ints(ints, []), n.texts(strings, [])
    if bool(numbers) == bool(texts):
        n.fail(f"one of attributes '{ints}' and '{strings}' must be given")
    return list(numbers) or list(texts)


def label_at(n: Node, names: Labels, index: Expr) -> Expr:
    """Return the labels at int64 indices."""
    if names == list(range(len(names))):
        return index
    if isinstance(names[0], str):
        return n.as_text(n.emit(ops.gather(n.text_constant([str(name) for name in names]), index, axis=0)))
    return n.emit(ops.gather(Constant.of(np.array(names, np.int64)), index, axis=0))


def first_of_greatest(n: Node, scores: Expr) -> Expr:
    """Return the column of the greatest score of each row, the first one of equals: int64 (n,)."""
    return n.emit(ops.argmax(scores, axis=1))


def is_above(n: Node, score: Expr, limit: float) -> Expr:
    """Return 1 where a score is above a limit, else 0, as int64."""
    return n.emit(ops.cast(n.emit(ops.greater(score, scalar_like(limit, score))), dtype="int64"))


def as_float32(n: Node, x: Expr) -> Expr:
    return x if dtype_of(x) == "float32" else n.emit(ops.cast(x, dtype="float32"))
