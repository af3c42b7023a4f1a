"""Tables of labels and categories: LabelEncoder, CategoryMapper, and maps from labels to numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from relaxlite.frontend.onnx.ml.scores import ML, labels
from relaxlite.frontend.onnx.ml.tables import position_in, value_at
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.frontend.onnx.sequences import MapSequence
from relaxlite.ir import ops


def _look_up(n: Node, keys: list[Any], values: Any, default: Any) -> Result:
    """Return the value of the key that each element of input 0 is; values are strings or numbers of one dtype."""
    if len(keys) != len(values):
        n.fail(f"the node has {len(keys)} keys and {len(values)} values")
    x = n.input(0)
    place = position_in(n, x, keys)
    if not isinstance(default, str):
        return value_at(n, place, values, default)
    words = n.text_constant([*values, default]).value
    return n.as_text(value_at(n, place, words[:-1], words[-1]))


@onnx_op("LabelEncoder", domain=ML)
def label_encoder_1(n: Node) -> Result:
    return _classes(n, "classes_strings")


def _classes(n: Node, name: str) -> Result:
    """Strings to their positions in a list, or positions to strings."""
    words, numbers = list(n.texts(name)), np.arange(len(n.texts(name)))
    text, number = n.text("default_string", "_Unused"), n.int("default_int64", -1)
    if n.is_text(n.input(0)):
        return _look_up(n, words, numbers, number)
    return _look_up(n, numbers.tolist(), words, text)


@onnx_op("LabelEncoder", domain=ML, since=2)
def label_encoder(n: Node) -> Result:
    """Keys to values; each are in one of three lists, or since opset 4 in a tensor."""
    keys, values = _entries(n, "keys"), _entries(n, "values")
    kind = "strings" if isinstance(values[0], str) else "floats" if values.dtype.kind == "f" else "int64s"
    default = _default(n, kind)
    return _look_up(n, list(keys), values, default)


def _entries(n: Node, name: str) -> Any:
    for kind, dtype in (("strings", None), ("int64s", np.int64), ("floats", np.float32)):
        if n.has(f"{name}_{kind}"):
            read = {"strings": n.texts, "int64s": n.ints, "floats": n.floats}[kind]
            values: Any = read(f"{name}_{kind}")
            if values:
                return list(values) if dtype is None else np.array(values, dtype)
    entries = _tensor(n, f"{name}_tensor")
    if entries is None or not len(entries):
        n.fail(
            f"one of attributes '{name}_strings', '{name}_int64s', '{name}_floats' and '{name}_tensor' must be given"
        )
    return entries


def _tensor(n: Node, name: str) -> Any:
    """Return a tensor attribute as a list of strings or a vector of numbers, or None."""
    proto = n.tensor_proto(name)
    if proto is None or proto.data_type == onnx.TensorProto.UNDEFINED:
        return None
    if proto.data_type == onnx.TensorProto.STRING:
        return [text.decode() for text in proto.string_data]
    return n.importer.reader.constant(proto).value.reshape(-1)


def _default(n: Node, kind: str) -> Any:
    stored = _tensor(n, "default_tensor")
    text, number, real = n.text("default_string", "_Unused"), n.int("default_int64", -1), n.float("default_float", -0.0)
    if stored is not None and len(stored):
        return stored[0]
    return {"strings": text, "int64s": number, "floats": real}[kind]


@onnx_op("CategoryMapper", domain=ML)
def category_mapper(n: Node) -> Result:
    words, numbers = list(n.texts("cats_strings")), list(n.ints("cats_int64s"))
    text, number = n.text("default_string", "_Unused"), n.int("default_int64", -1)
    if n.is_text(n.input(0)):
        return _look_up(n, words, np.array(numbers, np.int64), number)
    return _look_up(n, numbers, words, text)


@onnx_op("ZipMap", domain=ML)
def zip_map(n: Node) -> Result:
    """Rows as maps from labels to numbers: the matrix, which the model's border converts."""
    names, x = labels(n, "classlabels_int64s", "classlabels_strings"), n.input(0)
    if n.rank() == 1:
        x = n.emit(ops.reshape(x, (1, *n.shape())))
    return MapSequence((n.bb.leaf(x),), tuple(names))
