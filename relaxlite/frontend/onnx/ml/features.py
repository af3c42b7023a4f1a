"""Transformers of features: scaling, imputation, selection, one-hot codes."""

from __future__ import annotations

from typing import Any

import numpy as np

from relaxlite.frontend.onnx.ml.scores import ML, as_float32, scalar_like
from relaxlite.frontend.onnx.ml.tables import position_in
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.symbolic import as_int, product


def _per_feature(n: Node, name: str, values: Any) -> Constant:
    """Return values of which there are one for all features or one per feature."""
    features = as_int(n.shape()[-1]) if n.rank() else None
    if len(values) != 1 and features is not None and len(values) != features:
        n.fail(f"attribute '{name}' has {len(values)} elements for {features} features")
    return Constant.of(values)


@onnx_op("Scaler", domain=ML)
def scaler(n: Node) -> Result:
    x = as_float32(n, n.input(0))
    offset = _per_feature(n, "offset", np.array(n.floats("offset", (0.0,)), np.float32))
    scale = _per_feature(n, "scale", np.array(n.floats("scale", (1.0,)), np.float32))
    return ops.multiply(n.emit(ops.subtract(x, offset)), scale)


@onnx_op("Normalizer", domain=ML)
def normalizer(n: Node) -> Result:
    """Rows divided by their norm. Rows of norm 0 stay; MAX is the greatest element with its sign."""
    norm, x = n.text("norm", "MAX"), as_float32(n, n.input(0))
    axes: Any = {"axes": (n.rank() - 1,), "keepdims": True}
    if norm == "MAX":
        size = n.emit(ops.max(x, **axes))
    elif norm == "L1":
        size = n.emit(ops.l1_norm(x, **axes))
    elif norm == "L2":
        size = n.emit(ops.l2_norm(x, **axes))
    else:
        n.fail(f"attribute 'norm' must be MAX, L1 or L2, not {norm!r}")
    is_zero = n.emit(ops.equal(size, scalar_like(0, x)))
    return ops.divide(x, n.emit(ops.where(is_zero, scalar_like(1, x), size)))


@onnx_op("Imputer", domain=ML)
def imputer(n: Node) -> Result:
    x, is_int = n.input(0), n.dtype() in ("int32", "int64")
    floats, ints = n.floats("imputed_value_floats", ()), n.ints("imputed_value_int64s", ())
    replaced = (n.float("replaced_value_float", 0.0), n.int("replaced_value_int64", 0))[is_int]
    name = ("imputed_value_floats", "imputed_value_int64s")[is_int]
    values = np.array(ints if is_int else floats, np.dtype(n.dtype()))
    if not len(values):
        n.fail(f"attribute '{name}' is missing")
    is_missing = ops.isnan(x) if np.isnan(replaced) else ops.equal(x, scalar_like(replaced, x))
    return ops.where(n.emit(is_missing), _per_feature(n, name, values), x)


@onnx_op("Binarizer", domain=ML)
def binarizer(n: Node) -> Result:
    x = n.input(0)
    return ops.cast(n.emit(ops.greater(x, scalar_like(n.float("threshold", 0.0), x))), dtype=n.dtype())


@onnx_op("ArrayFeatureExtractor", domain=ML)
def array_feature_extractor(n: Node) -> Result:
    x, indices = n.input(0), n.input(1)
    indices = n.emit(ops.reshape(indices, (product(n.shape(1)),))) if n.rank(1) != 1 else indices
    if n.rank() == 1:
        x = n.emit(ops.reshape(x, (1, *n.shape())))
    chosen = n.emit(ops.gather(x, indices, axis=max(n.rank() - 1, 1)))
    return n.as_text(chosen) if n.is_text(n.input(0)) else chosen


@onnx_op("FeatureVectorizer", domain=ML)
def feature_vectorizer(n: Node) -> Result:
    """The first `inputdimensions` features of each input side by side, as float32; absent ones are 0."""
    sizes, inputs = n.ints("inputdimensions"), n.all_inputs()
    if len(sizes) != len(inputs):
        n.fail(f"attribute 'inputdimensions' has {len(sizes)} elements for {len(inputs)} inputs")
    parts = [_features(n, as_float32(n, x), size) for x, size in zip(inputs, sizes, strict=True)]
    return ops.concat(*parts, axis=1)


def _features(n: Node, x: Expr, size: int) -> Expr:
    shape = n.shape_of(x)
    if len(shape) == 1:
        x = n.emit(ops.reshape(x, (*shape, 1)))
    known = 1 if len(shape) == 1 else as_int(shape[1])
    if known is None:
        n.fail(f"an input has {shape[1]} features; give the number by `dynamic_shapes`")
    if known > size:
        return n.emit(ops.slice(x, (0,), (size,), axes=(1,)))
    return x if known == size else n.emit(ops.pad(x, (0, 0), (0, size - known)))


@onnx_op("OneHotEncoder", domain=ML)
def one_hot_encoder(n: Node) -> Result:
    """A new last axis with 1 at the category of each element; an unknown one gives zeros, or with zeros=0 an error."""
    numbers, texts = n.ints("cats_int64s", ()), n.texts("cats_strings", ())
    if bool(numbers) == bool(texts):
        n.fail("one of attributes 'cats_int64s' and 'cats_strings' must be given")
    x = n.input(0)
    if numbers and n.dtype() != "int64":
        x = n.emit(ops.cast(x, dtype="int64"))
    place = position_in(n, x, list(numbers or texts))
    if not n.flag("zeros", True):
        is_known = n.emit(ops.greater_equal(place, Constant.of(np.int64(0))))
        n.check_assumption(n.emit(ops.all(is_known)), True, "every element is one of the categories")
    places = n.emit(ops.expand_dims(place, axes=(n.rank(),)))
    hits = n.emit(ops.equal(places, Constant.of(np.arange(len(numbers or texts)))))
    return ops.cast(hits, dtype="float32")
