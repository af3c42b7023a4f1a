"""Converters of random ops, as a counter-based generator: a hash of element index and seed, equal in every run.

The seed is the node's attribute, or a hash of the node's name. Values differ from other runtimes'.
"""

from __future__ import annotations

import math
import struct
import zlib

from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.symbolic import SymExpr, product, sym

Shape = tuple[SymExpr, ...]


def _seed(n: Node) -> int:
    seed = n.float("seed", None)
    return zlib.crc32(struct.pack("<f", seed) if seed is not None else n.label.encode())


def _uniform(n: Node, shape: Shape, seed: int) -> Expr:
    """Emit uniform float32 in (0, 1): 24 bits of a hash of element index and seed."""
    zero, one = Constant.of(0, "int64"), Constant.of(1, "int64")
    position = n.emit(ops.cast(n.emit(ops.arange(zero, one, (product(shape),))), dtype="uint32"))
    bits = n.emit(ops.bitwise_xor(_hash(n, position), Constant.of(seed, "uint32")))
    top = n.emit(ops.right_shift(_hash(n, bits), Constant.of(8, "uint32")))
    fraction = n.emit(ops.multiply(n.emit(ops.cast(top, dtype="float32")), Constant.of(2.0**-24, "float32")))
    return n.emit(ops.reshape(n.emit(ops.add(fraction, Constant.of(2.0**-25, "float32"))), shape))


def _hash(n: Node, x: Expr) -> Expr:
    """Emit a low-bias permutation of 32-bit integers (Wellons, "Prospecting for hash functions", 2018)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = n.emit(ops.bitwise_xor(x, n.emit(ops.right_shift(x, Constant.of(shift, "uint32")))))
        x = n.emit(ops.multiply(x, Constant.of(factor, "uint32")))
    return n.emit(ops.bitwise_xor(x, n.emit(ops.right_shift(x, Constant.of(16, "uint32")))))


def _normal(n: Node, shape: Shape, seed: int) -> Expr:
    """Emit standard normal float32 by the Box-Muller transform."""
    radius = n.emit(
        ops.sqrt(n.emit(ops.multiply(n.emit(ops.log(_uniform(n, shape, seed))), Constant.of(-2.0, "float32"))))
    )
    angle = n.emit(ops.multiply(_uniform(n, shape, seed ^ 0x9E3779B9), Constant.of(2 * math.pi, "float32")))
    return n.emit(ops.multiply(radius, n.emit(ops.cos(angle))))


def _scaled(n: Node, x: Expr, factor: float, offset: float, dtype: str) -> Result:
    result = n.emit(ops.multiply(x, Constant.of(factor, "float32")))
    result = n.emit(ops.add(result, Constant.of(offset, "float32")))
    return result if dtype == "float32" else ops.cast(result, dtype=dtype)


def _random(n: Node, shape: Shape, dtype: str) -> Result:
    seed = _seed(n)
    if n.op_type.startswith("RandomNormal"):
        return _scaled(n, _normal(n, shape, seed), n.float("scale", 1.0), n.float("mean", 0.0), dtype)
    low, high = n.float("low", 0.0), n.float("high", 1.0)
    return _scaled(n, _uniform(n, shape, seed), high - low, low, dtype)


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
    uniform = _uniform(n, (batch, sym(count), classes), _seed(n))
    noise = n.emit(ops.neg(n.emit(ops.log(n.emit(ops.neg(n.emit(ops.log(uniform))))))))
    logits = n.emit(ops.cast(n.emit(ops.expand_dims(n.input(0), axes=(1,))), dtype="float32"))
    samples = n.emit(ops.argmax(n.emit(ops.add(logits, noise)), axis=2))
    return ops.cast(samples, dtype=dtype)
