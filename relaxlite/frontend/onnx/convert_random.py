"""Converters of random ops, as a counter-based generator: a hash of element index and seed, equal in every run.

The seed is the node's attribute, or a hash of the node's name. Values differ from other runtimes'.
"""

from __future__ import annotations

import struct
import zlib

from relaxlite.frontend.common.random_values import gumbel, normal, uniform
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.symbolic import SymExpr, sym

Shape = tuple[SymExpr, ...]


def _key(n: Node) -> Expr:
    seed = n.float("seed", None)
    number = zlib.crc32(struct.pack("<f", seed) if seed is not None else n.label.encode())
    return Constant.of(number, "uint32")


def _scaled(n: Node, x: Expr, factor: float, offset: float, dtype: str) -> Result:
    result = n.emit(ops.multiply(x, Constant.of(factor, "float32")))
    result = n.emit(ops.add(result, Constant.of(offset, "float32")))
    return result if dtype == "float32" else ops.cast(result, dtype=dtype)


def _random(n: Node, shape: Shape, dtype: str) -> Result:
    key = _key(n)
    if n.op_type.startswith("RandomNormal"):
        return _scaled(n, normal(n.emit, shape, key), n.float("scale", 1.0), n.float("mean", 0.0), dtype)
    low, high = n.float("low", 0.0), n.float("high", 1.0)
    return _scaled(n, uniform(n.emit, shape, key), high - low, low, dtype)


@onnx_op("RandomNormal", "RandomUniform")
def random(n: Node) -> Result:
    return _random(n, tuple(sym(d) for d in n.ints("shape")), n.element_type("dtype", "float32"))


@onnx_op("RandomNormalLike", "RandomUniformLike")
def random_like(n: Node) -> Result:
    dtype = n.dtype()
    return _random(n, n.shape(), n.element_type("dtype", dtype if dtype.startswith(("float", "bfloat")) else "float32"))


@onnx_op("Multinomial", since=7)
def multinomial(n: Node) -> Result:
    """Multinomial: sample classes from unnormalized log-probabilities (batch, classes) by the Gumbel-max trick."""
    count, dtype = n.int("sample_size", 1), n.element_type("dtype", "int32")
    batch, classes = n.shape()
    noise = gumbel(n.emit, (batch, sym(count), classes), _key(n))
    logits = n.emit(ops.cast(n.emit(ops.expand_dims(n.input(0), axes=(1,))), dtype="float32"))
    samples = n.emit(ops.argmax(n.emit(ops.add(logits, noise)), axis=2))
    return ops.cast(samples, dtype=dtype)
