"""TreeEnsemble, and TreeEnsembleRegressor and TreeEnsembleClassifier, which it replaces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from relaxlite.frontend.onnx.ml.forest import Forest, LeafWeights, pack_forest
from relaxlite.frontend.onnx.ml.forest_attributes import read_ensemble, read_forest, values_of
from relaxlite.frontend.onnx.ml.scores import (
    ML,
    TRANSFORMS,
    Labels,
    as_float32,
    column,
    columns,
    dtype_of,
    first_of_greatest,
    is_above,
    label_at,
    labels,
    matrix,
    post_transform,
    stacked,
    transform_scores,
    with_second_class,
)
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr

_AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")  # numbered as in TreeEnsemble
_IDENTITIES = {"add": 0.0, "min": np.inf, "max": -np.inf}


@onnx_op("TreeEnsembleRegressor", domain=ML)
def tree_ensemble_regressor(n: Node) -> Result:
    forest, leaves = read_forest(n, "target")
    num_targets = n.int("n_targets", 1)
    aggregate, transform = n.text("aggregate_function", "SUM"), post_transform(n)
    if aggregate not in _AGGREGATES:
        n.fail(f"attribute 'aggregate_function' must be one of {', '.join(_AGGREGATES)}, not {aggregate!r}")
    base = values_of(n, "base_values")
    if len(base) not in (0, 1, num_targets):
        n.fail(f"attribute 'base_values' has {len(base)} elements for {num_targets} targets")
    scores = _aggregate(n, forest, leaves, num_targets, aggregate)
    if len(base) == num_targets:
        scores = n.emit(ops.add(scores, Constant.of(base, dtype=dtype_of(scores))))
    return as_float32(n, _regression(n, scores, num_targets, transform))


@onnx_op("TreeEnsemble", domain=ML, since=5)
def tree_ensemble(n: Node) -> Result:
    forest, leaves = read_ensemble(n)
    aggregate, transform = n.int("aggregate_function", 1), n.int("post_transform", 0)
    if not 0 <= aggregate < len(_AGGREGATES) or not 0 <= transform < len(TRANSFORMS):
        n.fail(f"attributes 'aggregate_function' {aggregate} and 'post_transform' {transform} must be 0..3 and 0..4")
    num_targets = n.int("n_targets", 1)
    scores = _aggregate(n, forest, leaves, num_targets, _AGGREGATES[aggregate])
    result = _regression(n, scores, num_targets, TRANSFORMS[transform])
    return result if dtype_of(result) == n.dtype() else n.emit(ops.cast(result, dtype=n.dtype()))


def _regression(n: Node, scores: Expr, num_targets: int, transform: str) -> Expr:
    """Apply the transform of a regressor: onnxruntime's only one for a single target is PROBIT."""
    if num_targets == 1 and transform != "PROBIT":
        return scores
    return transform_scores(n, scores, transform)


def _aggregate(n: Node, forest: Forest, leaves: LeafWeights, num_targets: int, aggregate: str) -> Expr:
    """Return the aggregated weights (rows, num_targets), in float64 if x or the trees are."""
    x = matrix(n, keeps=("float32", "float64"))
    dtype = np.result_type(dtype_of(x), forest.threshold.dtype)
    if dtype_of(x) != dtype.name:
        x = n.emit(ops.cast(x, dtype=dtype.name))
    forest = replace(forest, threshold=forest.threshold.astype(dtype))
    combine = {"MIN": "min", "MAX": "max"}.get(aggregate, "add")
    packed = pack_forest(forest, leaves, num_targets, _IDENTITIES[combine])
    call: Any = ops.tree_ensemble(
        x, *map(Constant.of, packed.operands),
        num_targets=num_targets, num_features=packed.num_features, aggregate=combine, missing=packed.missing,
    )  # fmt: skip
    scores: Expr = n.emit(call)
    if aggregate == "AVERAGE":
        return n.emit(ops.divide(scores, Constant.of(len(forest.roots), dtype=dtype.name)))
    if combine != "add":  # a target without a leaf is 0
        absent = n.emit(ops.equal(scores, Constant.of(_IDENTITIES[combine], dtype=dtype.name)))
        return n.emit(ops.where(absent, Constant.of(0.0, dtype=dtype.name), scores))
    return scores


@onnx_op("TreeEnsembleClassifier", domain=ML)
def tree_ensemble_classifier(n: Node) -> Result:
    """(labels, scores). What the standard leaves open for one and two classes is as in onnxruntime."""
    forest, leaves = read_forest(n, "class")
    names = labels(n, "classlabels_int64s", "classlabels_strings")
    base, transform = values_of(n, "base_values"), post_transform(n)
    if len(base) not in (0, len(names)) and (len(base), len(names)) != (1, 2):
        n.fail(f"attribute 'base_values' has {len(base)} elements for {len(names)} classes")
    scores = _aggregate(n, forest, leaves, len(names), "SUM")
    if len(names) <= 2:
        label, scores = _few_classes(n, scores, leaves, names, base, transform)
        return label, as_float32(n, scores)
    if len(base):
        scores = n.emit(ops.add(scores, Constant.of(base, dtype=dtype_of(scores))))
    scored = sorted(range(len(names)) if len(base) else set(leaves.target.tolist()))
    label = label_at(n, [names[k] for k in scored], first_of_greatest(n, columns(n, scores, scored)))
    return label, as_float32(n, transform_scores(n, scores, transform))


def _few_classes(
    n: Node, scores: Expr, leaves: LeafWeights, names: Labels, base: Any, transform: str
) -> tuple[Expr, Expr]:
    """(labels, scores) of a model with one or two labels.

    Weights of the first class alone score the second label: as probability if none is negative.
    """
    classes = set(leaves.target.tolist())
    is_one_class, is_probability = len(names) == 2 and len(classes) == 1, bool((leaves.weight >= 0).all())
    pair = _class_scores(n, scores, classes, base) if len(names) == 2 else ()
    score = pair[-1] if 1 in classes else _plus(n, column(n, scores, 0), base[:1])
    label = is_above(n, score, 0.5 if is_one_class and is_probability else 0.0)
    if is_one_class or isinstance(names[0], str):
        label = label_at(n, names, label)
    if pair:
        return label, transform_scores(n, stacked(n, *pair), transform)
    if len(names) == 2:
        return label, with_second_class(n, score, transform, is_probability=is_probability)
    return label, transform_scores(n, stacked(n, score), "PROBIT" if transform == "PROBIT" else "NONE")


def _class_scores(n: Node, scores: Expr, classes: set[int], base: Any) -> tuple[Expr, ...]:
    """The scores of two classes; () if the second has neither weights nor a base value."""
    first, second = column(n, scores, 0), column(n, scores, 1)
    if 1 not in classes:
        return (_plus(n, first, base[:1]), second) if len(base) == 2 else ()
    if len(base) == 2:  # weights of the second class are then not used
        second = _plus(n, first, base[1:])
        return (n.emit(ops.neg(second)) if 0 in classes else first), second
    return (_plus(n, first, base) if 0 in classes else first), second


def _plus(n: Node, score: Expr, base: Any) -> Expr:
    return n.emit(ops.add(score, Constant.of(base[0], dtype=dtype_of(score)))) if len(base) else score
