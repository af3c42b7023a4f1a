"""Linear models and support vector machines."""

from __future__ import annotations

from typing import Any

import numpy as np

from relaxlite.frontend.onnx.ml.scores import (
    ML,
    Labels,
    column,
    first_of_greatest,
    is_above,
    label_at,
    labels,
    matrix,
    post_transform,
    scalar_like,
    transform_scores,
    with_second_class,
)
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.symbolic import as_int


def _floats(n: Node, name: str) -> Any:
    return np.array(n.floats(name, []), np.float32)


def _rows(n: Node, name: str, values: Any, count: int) -> Any:
    """Return values as a matrix of `count` rows."""
    if count <= 0 or len(values) == 0 or len(values) % count:
        n.fail(f"attribute '{name}' has {len(values)} elements, not a multiple of {count}")
    return values.reshape(count, -1)


def _product(n: Node, x: Expr, rows: Any) -> Expr:
    """Return the products of each row of x with each row of a constant matrix."""
    features = as_int(n.shape_of(x)[1])
    if features is not None and features != rows.shape[1]:
        n.fail(f"input 0 has {features} features, the coefficients {rows.shape[1]}")
    return n.emit(ops.matmul(x, Constant.of(np.ascontiguousarray(rows.T))))


def _plus(n: Node, x: Expr, values: Any) -> Expr:
    return n.emit(ops.add(x, Constant.of(values)))


@onnx_op("LinearRegressor", domain=ML)
def linear_regressor(n: Node) -> Result:
    targets, intercepts = n.int("targets", 1), _floats(n, "intercepts")
    rows = _rows(n, "coefficients", _floats(n, "coefficients"), targets)
    if len(intercepts) not in (0, targets):
        n.fail(f"attribute 'intercepts' has {len(intercepts)} elements for {targets} targets")
    transform, scores = post_transform(n), _product(n, matrix(n), rows)
    if len(intercepts):
        scores = _plus(n, scores, intercepts)
    return transform_scores(n, scores, transform if targets > 1 or transform == "PROBIT" else "NONE")


@onnx_op("LinearClassifier", domain=ML)
def linear_classifier(n: Node) -> Result:
    """(labels, scores). One row of coefficients with two labels scores the second label."""
    n.ignore("multi_class")
    names, transform = labels(n, "classlabels_ints", "classlabels_strings"), post_transform(n)
    intercepts, coefficients = _floats(n, "intercepts"), _floats(n, "coefficients")
    count = len(intercepts) or len(names)
    rows = _rows(n, "coefficients", coefficients, count)
    scores = _product(n, matrix(n), rows)
    if len(intercepts):
        scores = _plus(n, scores, intercepts)
    if count > 1:
        if count > len(names):
            n.fail(f"attribute 'intercepts' has {count} elements for {len(names)} labels")
        return label_at(n, names, first_of_greatest(n, scores)), transform_scores(n, scores, transform)
    score = column(n, scores, 0)
    label = is_above(n, score, 0.0)
    if len(names) != 2:
        return label, transform_scores(n, scores, transform if transform == "PROBIT" else "NONE")
    return label_at(n, names, label), with_second_class(n, score, transform, is_probability=True)


# Support vector machines


def _kernel(n: Node, x: Expr, vectors: Any, offset: float = 0.0) -> Expr:
    """Return the kernel of each row of x with each vector, plus an offset inside of linear ones."""
    gamma, coef0, degree = (*n.floats("kernel_params", []), 0.0, 0.0, 0.0)[:3]
    kind = n.text("kernel_type", "LINEAR")
    if kind == "RBF":
        return _radial(n, x, vectors, gamma)
    dot = _product(n, x, vectors)
    if kind == "LINEAR":
        return _plus(n, dot, np.float32(offset)) if offset else dot
    scaled = _plus(n, n.emit(ops.multiply(dot, scalar_like(gamma, x))), np.float32(coef0))
    if kind == "POLY":
        return n.emit(ops.power(scaled, scalar_like(degree, x)))
    if kind == "SIGMOID":
        return n.emit(ops.tanh(scaled))
    n.fail(f"attribute 'kernel_type' must be LINEAR, POLY, RBF or SIGMOID, not {kind!r}")


def _radial(n: Node, x: Expr, vectors: Any, gamma: float) -> Expr:
    """exp(-gamma |x - v|^2), with the differences themselves: |x|^2 - 2 x v + |v|^2 cancels."""
    rows = n.emit(ops.expand_dims(x, axes=(1,)))
    difference = n.emit(ops.subtract(rows, Constant.of(vectors[None])))
    square = n.emit(ops.sum_square(difference, axes=(-1,), keepdims=False))
    return n.emit(ops.exp(n.emit(ops.multiply(square, scalar_like(-gamma, x)))))


@onnx_op("SVMRegressor", domain=ML)
def svm_regressor(n: Node) -> Result:
    post_transform(n)  # onnxruntime applies none
    coefficients, rho = _floats(n, "coefficients"), _floats(n, "rho")
    count, one_class, x = n.int("n_supports", 0), n.flag("one_class"), matrix(n)
    if len(rho) != 1:
        n.fail(f"attribute 'rho' has {len(rho)} elements, not 1")
    if count > 0:
        kernel = _kernel(n, x, _rows(n, "support_vectors", _floats(n, "support_vectors"), count))
        scores = _plus(n, _product(n, kernel, _rows(n, "coefficients", coefficients, 1)), rho)
    else:
        n.ignore("support_vectors", "kernel_params", "kernel_type")
        scores = _plus(n, _product(n, x, _rows(n, "coefficients", coefficients, 1)), rho)
    if not one_class:
        return scores
    is_inside = n.emit(ops.greater(scores, scalar_like(0, scores)))
    return n.emit(ops.where(is_inside, scalar_like(1, scores), scalar_like(-1, scores)))


@onnx_op("SVMClassifier", domain=ML)
def svm_classifier(n: Node) -> Result:
    """(labels, scores). With support vectors, a classifier for each pair of classes votes for one of them."""
    names, transform = labels(n, "classlabels_ints", "classlabels_strings"), post_transform(n)
    coefficients, rho = _floats(n, "coefficients"), _floats(n, "rho")
    if n.ints("vectors_per_class", ()):
        return _pairwise(n, names, coefficients, rho, transform)
    n.ignore("support_vectors", "kernel_params", "kernel_type", "prob_a", "prob_b")
    scores = _plus(n, _product(n, matrix(n), _rows(n, "coefficients", coefficients, len(names))), rho[:1])
    label = first_of_greatest(n, scores)
    if len(names) == 2 and not n.has("prob_a"):  # the second label wins unless no score is positive
        limit = scalar_like(0.5 if (coefficients >= 0).all() else 0.0, scores)
        is_high = ops.greater_equal if (coefficients >= 0).all() else ops.greater
        top = n.emit(ops.max(scores, axes=(1,), keepdims=False))
        label = n.emit(ops.where(n.emit(is_high(top, limit)), Constant.of(np.int64(1)), label))
    return label_at(n, names, label), transform_scores(n, scores, transform)


def _pairwise(n: Node, names: Labels, coefficients: Any, rho: Any, transform: str) -> Result:
    per_class = n.ints("vectors_per_class")
    classes, total = len(names), sum(per_class)
    pairs = [(i, j) for i in range(classes) for j in range(i + 1, classes)]
    a, b = _floats(n, "prob_a"), _floats(n, "prob_b")
    if len(per_class) != classes or len(rho) < len(pairs) or (len(a) and min(len(a), len(b)) < len(pairs)):
        n.fail(f"attributes 'vectors_per_class', 'rho', 'prob_a' and 'prob_b' do not fit {classes} classes")
    kernel = _kernel(n, matrix(n), _rows(n, "support_vectors", _floats(n, "support_vectors"), total))
    weights = _pair_weights(_rows(n, "coefficients", coefficients, classes - 1), per_class, pairs)
    scores = _plus(n, _product(n, kernel, weights), rho[: len(pairs)])
    label = label_at(n, names, first_of_greatest(n, _votes(n, scores, pairs, classes)))
    if len(a):
        return label, transform_scores(n, _probabilities(n, scores, a, b, pairs, classes), transform)
    if classes > 2:
        return label, transform_scores(n, scores, transform)
    is_probability = transform not in ("NONE", "PROBIT")
    return label, with_second_class(n, column(n, scores, 0), "NONE", is_probability=is_probability)


def _probabilities(n: Node, scores: Expr, a: Any, b: Any, pairs: list[tuple[int, int]], classes: int) -> Expr:
    """Class probabilities (rows, classes) from the scores of pairs, by Platt's sigmoids of slope -a and offset -b."""
    a, b = a[: len(pairs)], b[: len(pairs)]
    won = n.emit(ops.sigmoid(_plus(n, n.emit(ops.multiply(scores, Constant.of(-a))), -b)))
    won = n.emit(ops.clip(won, lower=1e-7, upper=1 - 1e-7))
    lost = n.emit(ops.subtract(scalar_like(1, won), won))
    both = n.emit(ops.concat(won, lost, axis=1))
    places = np.zeros((classes, classes), np.int64)  # the diagonal is not read
    for k, (i, j) in enumerate(pairs):
        places[i, j], places[j, i] = k, len(pairs) + k
    return n.emit(ops.couple_pairs(n.emit(ops.gather(both, Constant.of(places), axis=1)), classes=classes))


def _pair_weights(coefficients: Any, per_class: Any, pairs: list[tuple[int, int]]) -> Any:
    """The weight of each support vector in the classifier of each pair (i, j): (pairs, vectors).

    A vector of class i has one coefficient per other class, in row j - 1 for a later class j.
    """
    ends = np.cumsum(per_class)
    starts = ends - per_class
    weights = np.zeros((len(pairs), coefficients.shape[1]), np.float32)
    for row, (i, j) in zip(weights, pairs, strict=True):
        row[starts[i] : ends[i]] = coefficients[j - 1, starts[i] : ends[i]]
        row[starts[j] : ends[j]] = coefficients[i, starts[j] : ends[j]]
    return weights


def _votes(n: Node, scores: Expr, pairs: list[tuple[int, int]], classes: int) -> Expr:
    """The number of pairs that each class wins, (rows, classes)."""
    wins = np.zeros((len(pairs), classes), np.float32)
    losses = np.zeros_like(wins)
    for k, (i, j) in enumerate(pairs):
        wins[k, i], losses[k, j] = 1, 1
    won = n.emit(ops.cast(n.emit(ops.greater(scores, scalar_like(0, scores))), dtype="float32"))
    # won @ wins + (1 - won) @ losses
    return _plus(n, n.emit(ops.matmul(won, Constant.of(wins - losses))), losses.sum(axis=0))
